//! The definition of every kernel, written to be read.
//!
//! All other instruction sets must give the same bits. They do so by construction where they can: the bodies here are
//! `#[inline(always)]` and are compiled again inside `#[target_feature]` functions (see `table!` in `mod.rs`), where
//! the compiler may use wider vectors but may not reorder a floating-point operation. What a compiler does badly, the
//! f32 lanes of a dot product and the integer dot product of a 64-group, are the methods of [`Simd`] and are written by
//! hand per instruction set.
//!
//! Orders of summation (`docs/architecture.md`, "Arithmetic"):
//! - f32 dot: element i goes to partial sum i mod 16 by fma, then the tree 8+8, 4+4, 2+2, 1+1.
//! - quantized dot: exact int32 per step, then one fma chain over the steps in ascending order.
//! - sums of scaled rows: one fma chain per element in ascending row order.
#![forbid(unsafe_code)]

use super::format::{FP8_BLOCK, GROUP};
use super::math::{exp, silu};
use super::{Format, Input, KeySet, Keys, MatView, Scratch};
use crate::pool::TileMut;

/// What an instruction set writes by hand: 16 lanes of f32, and the integer dot product of a group.
pub(super) trait Simd {
    /// 16 partial sums.
    type Lanes: Copy;

    fn zero() -> Self::Lanes;
    /// `p[j] = fma(a[j], b[j], p[j])`.
    fn fma(a: &[f32; LANES], b: &[f32; LANES], p: Self::Lanes) -> Self::Lanes;
    fn store(p: Self::Lanes) -> [f32; LANES];
    /// Exact int32 dot product of one full 64-group. `q` is in -127..=127, `q_sum` is the sum of `q`.
    fn dot64(w: &[i8; GROUP], q: &[i8; GROUP], q_sum: i32) -> i32;
}

/// The scalar definition.
pub(super) struct Scalar;

impl Simd for Scalar {
    type Lanes = [f32; LANES];

    #[inline(always)]
    fn zero() -> [f32; LANES] {
        [0.0; LANES]
    }

    #[inline(always)]
    fn fma(a: &[f32; LANES], b: &[f32; LANES], mut p: [f32; LANES]) -> [f32; LANES] {
        for j in 0..LANES {
            p[j] = a[j].mul_add(b[j], p[j]);
        }
        p
    }

    #[inline(always)]
    fn store(p: [f32; LANES]) -> [f32; LANES] {
        p
    }

    #[inline(always)]
    fn dot64(w: &[i8; GROUP], q: &[i8; GROUP], _q_sum: i32) -> i32 {
        dot_i8(w, q)
    }
}

#[inline(always)]
fn dot_i8(w: &[i8], q: &[i8]) -> i32 {
    w.iter().zip(q).map(|(&w, &q)| i32::from(w) * i32::from(q)).sum()
}

// ------------------------------------------------------------------------------------------------ f32 primitives

/// Partial sums of a dot product.
pub(super) const LANES: usize = 16;

#[inline(always)]
fn tree(mut p: [f32; LANES]) -> f32 {
    let mut n = LANES / 2;
    while n > 0 {
        for j in 0..n {
            p[j] += p[j + n];
        }
        n /= 2;
    }
    p[0]
}

/// Dot products of `a` with `N` rows of the same length.
#[inline(always)]
fn dot_n<S: Simd, const N: usize>(a: &[f32], b: [&[f32]; N]) -> [f32; N] {
    let n = a.len();
    let (chunks, tail) = a.as_chunks::<LANES>();
    let b = b.map(|b| &b[..n]);
    let b_chunks = b.map(|b| &b.as_chunks::<LANES>().0[..chunks.len()]);
    let mut p = [S::zero(); N];
    for (i, a) in chunks.iter().enumerate() {
        for k in 0..N {
            p[k] = S::fma(a, &b_chunks[k][i], p[k]);
        }
    }
    let mut k = 0;
    p.map(|p| {
        let mut p = S::store(p);
        for (j, (&a, &b)) in tail.iter().zip(&b[k][n - tail.len()..]).enumerate() {
            p[j] = a.mul_add(b, p[j]);
        }
        k += 1;
        tree(p)
    })
}

#[inline(always)]
pub(super) fn dot<S: Simd>(a: &[f32], b: &[f32]) -> f32 {
    dot_n::<S, 1>(a, [b])[0]
}

/// `y = fma(a, x, y)` per element.
#[inline(always)]
pub(super) fn axpy(a: f32, x: &[f32], y: &mut [f32]) {
    for (y, &x) in y.iter_mut().zip(x) {
        *y = a.mul_add(x, *y);
    }
}

/// `w * x / sqrt(mean(x²) + eps)`; a non-finite sum of squares is reported as `false`.
#[inline(always)]
pub(super) fn rms_norm<S: Simd>(x: &[f32], w: &[f32], eps: f32, y: &mut [f32]) -> bool {
    let ss = dot::<S>(x, x);
    let r = 1.0 / (ss / x.len() as f32 + eps).sqrt();
    for ((y, &x), &w) in y.iter_mut().zip(x).zip(w) {
        *y = x * r * w;
    }
    ss.is_finite()
}

/// `(x - mean) / sqrt(var + eps) * w + b` in place, biased variance.
#[inline(always)]
pub(super) fn layer_norm<S: Simd>(x: &mut [f32], w: &[f32], b: &[f32], eps: f32) {
    let n = x.len() as f32;
    let mut p = [0.0f32; LANES];
    for (i, &v) in x.iter().enumerate() {
        p[i % LANES] += v;
    }
    let mean = tree(p) / n;
    for v in x.iter_mut() {
        *v -= mean;
    }
    let r = 1.0 / (dot::<S>(x, x) / n + eps).sqrt();
    for ((v, &w), &b) in x.iter_mut().zip(w).zip(b) {
        *v = (*v * r).mul_add(w, b);
    }
}

/// `g = silu(g) * u`.
#[inline(always)]
pub(super) fn silu_mul(g: &mut [f32], u: &[f32]) {
    for (g, &u) in g.iter_mut().zip(u) {
        *g = silu(*g) * u;
    }
}

/// Quantizes one activation row: per 64-group `scale = absmax / 127`, `q = round-half-even(x / scale)`.
///
/// `q` is padded with zeros to whole groups; `sums` are the sums of `q`. Returns false if a value is not finite.
#[inline(always)]
pub(super) fn quantize_row(x: &[f32], q: &mut [i8], scales: &mut [f32], sums: &mut [i32]) -> bool {
    let mut finite = true;
    for (g, x) in x.chunks(GROUP).enumerate() {
        let q = &mut q[g * GROUP..(g + 1) * GROUP];
        // The maximum is taken over bit patterns, which order like magnitudes and make NaN the largest.
        let top = x.iter().fold(0u32, |m, v| m.max(v.to_bits() & 0x7fff_ffff));
        finite &= top < 0x7f80_0000;
        let scale = f32::from_bits(top) / 127.0;
        scales[g] = scale;
        // An all-zero group, or one so small that its scale underflows to 0, becomes zeros.
        let div = if scale > 0.0 { scale } else { 1.0 };
        for (q, &x) in q.iter_mut().zip(x) {
            // The clamp only acts when a subnormal scale has lost the bits that keep |x / scale| at 127.
            *q = (x / div).round_ties_even().clamp(-127.0, 127.0) as i8;
        }
        q[x.len()..].fill(0);
        sums[g] = q.iter().map(|&v| i32::from(v)).sum();
    }
    finite
}

// ------------------------------------------------------------------------------------------------ unpacking

#[inline(always)]
fn f16_to_f32(h: u16) -> f32 {
    // Scaling by 2^112 re-biases the exponent and normalises subnormals exactly; infinity and NaN are patched in.
    let em = u32::from(h & 0x7fff);
    let v = f32::from_bits(em << 13) * f32::from_bits(0x7780_0000);
    let special = if em >= 0x7c00 { 0x7f80_0000 } else { 0 };
    f32::from_bits(v.to_bits() | special | (u32::from(h & 0x8000) << 16))
}

/// Value of every e4m3 code: bias 7, no infinity, 0x7f and 0xff are NaN.
pub(crate) static E4M3: [f32; 256] = {
    let mut t = [0.0f32; 256];
    let mut b = 0;
    while b < 256 {
        let (e, m) = ((b >> 3) & 15, b & 7);
        let mut v = if e == 0 {
            m as f32 / 512.0 // subnormal step 2^-9
        } else {
            // (8 + m) / 8 * 2^(e - 7)
            (8 + m) as f32 / 8.0 * f32::from_bits(((e + 120) as u32) << 23)
        };
        if e == 15 && m == 7 {
            v = f32::NAN;
        }
        t[b] = if b >= 128 { -v } else { v };
        b += 1;
    }
    t
};

/// Integer codes of one row as int8, padded with zeros to whole 64-groups.
#[inline(always)]
fn unpack_row(w: &MatView<'_>, r: usize, out: &mut [i8]) {
    let codes = w.row_codes(r);
    let cols = w.cols();
    match w.format() {
        Format::Int8 => {
            for (o, &c) in out.iter_mut().zip(codes) {
                *o = c as i8;
            }
        }
        Format::Int4 { .. } => {
            let (pairs, _) = out.as_chunks_mut::<2>();
            for (o, &c) in pairs.iter_mut().zip(codes) {
                *o = [(c & 15) as i8 - 8, (c >> 4) as i8 - 8];
            }
        }
        Format::Int2 => {
            let (quads, _) = out.as_chunks_mut::<4>();
            for (o, &c) in quads.iter_mut().zip(codes) {
                *o = [0, 2, 4, 6].map(|s| ((c >> s) & 3) as i8 - 2);
            }
        }
        Format::Int3 => {
            let (groups, _) = out.as_chunks_mut::<GROUP>();
            let (codes, _) = codes.as_chunks::<24>();
            for (o, c) in groups.iter_mut().zip(codes) {
                for k in 0..GROUP {
                    let low = (c[k / 4] >> (2 * (k % 4))) & 3;
                    let high = (c[16 + k / 8] >> (k % 8)) & 1;
                    o[k] = (low | high << 2) as i8 - 4;
                }
            }
        }
        f => unreachable!("{f} has no integer codes"),
    }
    out[cols..].fill(0);
}

/// One row as f32: `f32(code) * scale`.
#[inline(always)]
pub(super) fn dequant_row(w: &MatView<'_>, r: usize, out: &mut [f32], codes: &mut [i8]) {
    let bytes = w.row_codes(r);
    let scales = w.row_scales(r);
    match w.format() {
        Format::F32 => {
            for (o, b) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
                *o = f32::from_le_bytes(*b);
            }
        }
        Format::F16 => {
            for (o, b) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                *o = f16_to_f32(u16::from_le_bytes(*b));
            }
        }
        Format::Bf16 => {
            for (o, b) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                *o = f32::from_bits(u32::from(u16::from_le_bytes(*b)) << 16);
            }
        }
        Format::Fp8 => {
            for ((o, b), &s) in out.chunks_mut(FP8_BLOCK).zip(bytes.chunks(FP8_BLOCK)).zip(scales) {
                for (o, &b) in o.iter_mut().zip(b) {
                    *o = E4M3[usize::from(b)] * s;
                }
            }
        }
        f => {
            unpack_row(w, r, codes);
            let group = match f {
                Format::Int4 { group: 0 } | Format::Int8 | Format::Int2 => w.cols(),
                Format::Int4 { group } => group as usize,
                _ => GROUP,
            };
            for ((o, c), &s) in out.chunks_mut(group).zip(codes.chunks(group)).zip(scales) {
                for (o, &c) in o.iter_mut().zip(c) {
                    *o = f32::from(c) * s;
                }
            }
        }
    }
}

// ------------------------------------------------------------------------------------------------ matrix × rows

/// f32 arithmetic: `tile[i][o] = dot(w[first + o], x[i])` for the tile's columns `o`.
#[inline(always)]
pub(super) fn matmul_f32<S: Simd>(
    w: &MatView<'_>,
    first: usize,
    x: &Input<'_>,
    tile: &mut TileMut<'_>,
    scratch: &mut Scratch,
) {
    let (row, codes) = scratch.row(w.cols());
    let n = tile.rows().len();
    for o in 0..tile.cols().len() {
        dequant_row(w, first + o, row, codes);
        let mut i = 0;
        while i + 4 <= n {
            let y = dot_n::<S, 4>(
                row,
                [x.f32_row(i), x.f32_row(i + 1), x.f32_row(i + 2), x.f32_row(i + 3)],
            );
            for k in 0..4 {
                tile.row(i + k)[o] = y[k];
            }
            i += 4;
        }
        while i < n {
            tile.row(i)[o] = dot::<S>(row, x.f32_row(i));
            i += 1;
        }
    }
}

/// Quantized arithmetic for the integer formats: exact integer steps, one fma chain per output.
#[inline(always)]
pub(super) fn matmul_q8<S: Simd>(
    w: &MatView<'_>,
    first: usize,
    x: &Input<'_>,
    tile: &mut TileMut<'_>,
    scratch: &mut Scratch,
) {
    let (_, codes) = scratch.row(w.cols());
    let per_row = w.format().scales_per_row(w.cols()) == 1
        && !matches!(w.format(), Format::Int4 { group: 1.. } | Format::Int3);
    let group = match w.format() {
        Format::Int4 { group } => group as usize,
        _ => GROUP,
    };
    let n = tile.rows().len();
    for o in 0..tile.cols().len() {
        unpack_row(w, first + o, codes);
        let scales = w.row_scales(first + o);
        let (groups, _) = codes.as_chunks::<GROUP>();
        for i in 0..n {
            let q = x.q8_row(i);
            let (xs, _) = q.codes.as_chunks::<GROUP>();
            let mut acc = 0.0f32;
            if per_row {
                for (g, (w, x)) in groups.iter().zip(xs).enumerate() {
                    acc = (S::dot64(w, x, q.sums[g]) as f32).mul_add(q.scales[g], acc);
                }
                acc *= scales[0];
            } else if group.is_multiple_of(GROUP) {
                let wide = group / GROUP;
                for (g, (w, x)) in groups.iter().zip(xs).enumerate() {
                    let s = scales[g / wide] * q.scales[g];
                    acc = (S::dot64(w, x, q.sums[g]) as f32).mul_add(s, acc);
                }
            } else {
                acc = chain_of_steps(codes, q.codes, scales, q.scales, group, w.cols());
            }
            tile.row(i)[o] = acc;
        }
    }
}

/// The quantized dot for group sizes that do not divide into 64s: a step is a maximal run of inputs inside one weight
/// group and one activation group.
#[inline(always)]
fn chain_of_steps(w: &[i8], q: &[i8], ws: &[f32], qs: &[f32], group: usize, cols: usize) -> f32 {
    let mut acc = 0.0f32;
    let mut at = 0;
    while at < cols {
        let end = ((at / group + 1) * group).min((at / GROUP + 1) * GROUP).min(cols);
        let d = dot_i8(&w[at..end], &q[at..end]);
        acc = (d as f32).mul_add(ws[at / group] * qs[at / GROUP], acc);
        at = end;
    }
    acc
}

// ------------------------------------------------------------------------------------------------ attention

/// Keys per block of the running softmax.
const BLOCK: usize = 64;

/// Row `t` of the cache as f32, through `buf` when it is stored as f16.
#[inline(always)]
fn key_row<'a>(keys: &Keys<'a>, t: usize, buf: &'a mut [f32]) -> &'a [f32] {
    match *keys {
        Keys::F32 { data, width } => &data[t * width..(t + 1) * width],
        Keys::F16 { data, width } => {
            for (o, &h) in buf.iter_mut().zip(&data[t * width..(t + 1) * width]) {
                *o = f16_to_f32(h);
            }
            buf
        }
    }
}

/// Softmax attention of one query over the chosen keys, ascending, in blocks of 64 with a running maximum.
///
/// `q` has the width of a cache row, `out` its first `out.len()` elements' weighted mean: `Σ a_t row_t`.
#[inline(always)]
pub(super) fn attend<S: Simd>(
    q: &[f32],
    keys: &Keys<'_>,
    set: &KeySet<'_>,
    scale: f32,
    out: &mut [f32],
    scratch: &mut Scratch,
) {
    let n = set.len();
    let width = q.len();
    let rank = out.len();
    let block_rows = scratch.block(BLOCK * width);
    out.fill(0.0);
    let mut max = f32::NEG_INFINITY;
    let mut sum = 0.0f32;
    let mut at = 0;
    while at < n {
        let len = BLOCK.min(n - at);
        let mut p = [f32::NEG_INFINITY; BLOCK];
        for j in 0..len {
            let buf = &mut block_rows[j * width..(j + 1) * width];
            p[j] = dot::<S>(q, key_row(keys, set.at(at + j), buf)) * scale;
        }
        let new_max = p.iter().fold(max, |m, &s| if s > m { s } else { m });
        // exp(-inf - finite) = 0 on the first block; afterwards 1 exactly while the maximum stays.
        let shrink = exp(max - new_max);
        max = new_max;
        sum *= shrink;
        for v in out.iter_mut() {
            *v *= shrink;
        }
        for v in &mut p {
            *v = exp(*v - max);
        }
        for j in 0..len {
            sum += p[j];
            let row = match *keys {
                Keys::F32 { data, width } => &data[set.at(at + j) * width..][..rank],
                Keys::F16 { .. } => &block_rows[j * width..][..rank],
            };
            axpy(p[j], row, out);
        }
        at += len;
    }
    let r = 1.0 / sum;
    for v in out.iter_mut() {
        *v *= r;
    }
}

/// Indexer scores of one query position: `out[t] = Σ_h w_h * relu(dot(q_h, key_t) * scale)`, heads ascending.
#[inline(always)]
pub(super) fn index_scores<S: Simd>(
    q: &[f32],
    w: &[f32],
    keys: &Keys<'_>,
    first: usize,
    scale: f32,
    out: &mut [f32],
    scratch: &mut Scratch,
) {
    let d = q.len() / w.len();
    let buf = scratch.block(d);
    for (t, out) in out.iter_mut().enumerate() {
        let key = key_row(keys, first + t, buf);
        let mut s = 0.0f32;
        for (q, &w) in q.chunks_exact(d).zip(w) {
            let r = dot::<S>(q, key) * scale;
            let r = if r > 0.0 || r.is_nan() { r } else { 0.0 };
            s = w.mul_add(r, s);
        }
        *out = s;
    }
}
