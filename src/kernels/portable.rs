//! The definition of every primitive over rows, written to be read; `product.rs` and `attention.rs` build on it.
//!
//! All instruction sets must give the same bits. They do so by construction: the bodies are `#[inline(always)]` and are
//! compiled again inside `#[target_feature]` functions (see `table!` in `mod.rs`), where the compiler may use wider
//! vectors but may not reorder a floating-point operation. What a compiler does badly is written by hand per
//! instruction set: the methods of [`Simd`].
//!
//! Orders of summation (`docs/architecture.md`, "Arithmetic"):
//! - f32 dot: element i goes to partial sum i mod 16 by fma, then the tree 8+8, 4+4, 2+2, 1+1.
//! - quantized dot: exact int32 per step, then one fma chain over the steps in ascending order.
//! - sums of scaled rows: one fma chain per element in ascending row order.
#![forbid(unsafe_code)]

use super::format::{FP8_BLOCK, Format, GROUP, MatView};
use super::math::silu;
use super::simd::{LANES, Simd, bf16_to_f32, each, f16_to_f32, finish, tree, upto4};
use super::{Scratch, panel};

// ------------------------------------------------------------------------------------------------ f32 primitives

/// Dot products of `A` rows with `B` rows of the same length.
#[inline(always)]
pub(super) fn dots<S: Simd, const A: usize, const B: usize>(
    a: [&[f32]; A],
    b: [&[f32]; B],
) -> [[f32; B]; A] {
    let n = a[0].len();
    let whole = n / LANES;
    let (a, b) = (each!(j in 0..A, &a[j][..n]), each!(k in 0..B, &b[k][..n]));
    let ac = each!(j in 0..A, &a[j].as_chunks::<LANES>().0[..whole]);
    let bc = each!(k in 0..B, &b[k].as_chunks::<LANES>().0[..whole]);
    let mut p = [[S::zero(); B]; A];
    for i in 0..whole {
        let b = each!(k in 0..B, S::load(&bc[k][i]));
        upto4!(j < A, {
            let a = S::load(&ac[j][i]);
            upto4!(k < B, {
                p[j][k] = S::fma(a, b[k], p[j][k]);
            });
        });
    }
    let at = whole * LANES;
    finish::<S, A, B>(p, n - at, |j, k, i, lane| a[j][at + i].mul_add(b[k][at + i], lane))
}

/// Dot products of `a` with `N` rows of the same length.
#[inline(always)]
pub(super) fn dot_n<S: Simd, const N: usize>(a: &[f32], b: [&[f32]; N]) -> [f32; N] {
    dots::<S, 1, N>([a], b)[0]
}

/// `out[i][c] = fma(coef[i][j], rows[j][c], out[i][c])` over all rows j, ascending, for `n` × `cols` elements.
///
/// Row `i` of `coef` starts at `i * coef_stride`, row `i` of `out` at `i * out_stride`; `rows` are `stride` wide.
#[inline(always)]
pub(super) fn add_rows<S: Simd>(
    coef: &[f32],
    coef_stride: usize,
    rows: &[f32],
    stride: usize,
    out: &mut [f32],
    out_stride: usize,
    (n, cols): (usize, usize),
) {
    let terms = rows.len() / stride;
    let mut c = 0;
    while c < cols {
        let mut i = 0;
        let left = (cols - c) / LANES;
        while i < n {
            let (coef, out) = (&coef[i * coef_stride..], &mut out[i * out_stride + c..]);
            let rows = &rows[c..];
            if left >= 4 && S::TILE >= 8 && i + 4 <= n {
                add_tile::<S, 4, 4>(coef, coef_stride, rows, stride, terms, out, out_stride);
                i += 4;
            } else if left >= 4 && i + 2 <= n {
                add_tile::<S, 2, 4>(coef, coef_stride, rows, stride, terms, out, out_stride);
                i += 2;
            } else if left >= 4 {
                add_tile::<S, 1, 4>(coef, coef_stride, rows, stride, terms, out, out_stride);
                i += 1;
            } else if left >= 1 {
                add_tile::<S, 1, 1>(coef, coef_stride, rows, stride, terms, out, out_stride);
                i += 1;
            } else {
                for (j, &a) in coef[..terms].iter().enumerate() {
                    axpy(a, &rows[j * stride..][..cols - c], &mut out[..cols - c]);
                }
                i += 1;
            }
        }
        c += match left {
            4.. => 4 * LANES,
            1.. => LANES,
            _ => cols - c,
        };
    }
}

/// [`add_rows`] for `M` output rows and `V` vectors of columns, in registers.
#[inline(always)]
fn add_tile<S: Simd, const M: usize, const V: usize>(
    coef: &[f32],
    coef_stride: usize,
    rows: &[f32],
    stride: usize,
    terms: usize,
    out: &mut [f32],
    out_stride: usize,
) {
    let coef = each!(m in 0..M, &coef[m * coef_stride..][..terms]);
    let mut acc = each!(m in 0..M, {
        let out = out[m * out_stride..][..V * LANES].as_chunks::<LANES>().0;
        each!(v in 0..V, S::load(&out[v]))
    });
    for j in 0..terms {
        let row = rows[j * stride..][..V * LANES].as_chunks::<LANES>().0;
        let row = each!(v in 0..V, S::load(&row[v]));
        for m in 0..M {
            let a = S::splat(coef[m][j]);
            for v in 0..V {
                acc[m][v] = S::fma(a, row[v], acc[m][v]);
            }
        }
    }
    for m in 0..M {
        let out = &mut out[m * out_stride..][..V * LANES];
        for (v, out) in out.as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
            S::store(acc[m][v], out);
        }
    }
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
/// `q` is padded with zeros to whole groups; `bias` is -8 × the sum of a group's `q`. Returns false if a value is not
/// finite.
#[inline(always)]
pub(super) fn quantize_row(x: &[f32], q: &mut [i8], scales: &mut [f32], bias: &mut [i32]) -> bool {
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
        bias[g] = -8 * q.iter().map(|&v| i32::from(v)).sum::<i32>();
    }
    finite
}

/// Exclusive or of all whole 256-byte pieces: a plain read.
#[inline(always)]
pub(super) fn stream<S: Simd>(bytes: &[u8], ahead: usize) -> u64 {
    let mut sum = [0u64; 32];
    for piece in bytes.as_chunks::<256>().0 {
        if ahead > 0 {
            for line in 0..4 {
                S::prefetch(piece, ahead + 64 * line);
            }
        }
        let words = piece.as_chunks::<8>().0;
        for i in 0..32 {
            sum[i] ^= u64::from_le_bytes(words[i]);
        }
    }
    sum.iter().fold(0, |a, b| a ^ b)
}

// ------------------------------------------------------------------------------------------------ unpacking

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

/// Integer codes of one row as stored, as int8, padded with zeros to whole 64-groups.
#[inline(always)]
pub(super) fn unpack_row(w: &MatView<'_>, r: usize, out: &mut [i8]) {
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

/// Codes of row `r` wherever they lie, whole groups.
#[inline(always)]
fn row_codes(w: &MatView<'_>, r: usize, out: &mut [i8]) {
    if w.in_panels() { panel::unpack_row(w, r, out) } else { unpack_row(w, r, out) }
}

/// Row `r` as f32, in the scratch.
#[inline(always)]
pub(super) fn dequant_row<'a, S: Simd>(
    w: &MatView<'_>,
    r: usize,
    scratch: &'a mut Scratch,
) -> &'a [f32] {
    let mut row = std::mem::take(&mut scratch.row);
    if row.len() < w.cols() {
        row.resize(w.cols(), 0.0);
    }
    dequant_into::<S>(w, r, &mut row[..w.cols()], scratch);
    scratch.row = row;
    &scratch.row[..w.cols()]
}

/// Row `r` as f32: `f32(code) * scale`.
#[inline(always)]
pub(super) fn dequant_into<S: Simd>(
    w: &MatView<'_>,
    r: usize,
    out: &mut [f32],
    scratch: &mut Scratch,
) {
    let bytes = w.row_codes(r);
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
                *o = bf16_to_f32(*b);
            }
        }
        Format::Fp8 => {
            let scales = w.row_scales(r);
            for ((o, b), &s) in out.chunks_mut(FP8_BLOCK).zip(bytes.chunks(FP8_BLOCK)).zip(scales) {
                for (o, &b) in o.iter_mut().zip(b) {
                    *o = E4M3[usize::from(b)] * s;
                }
            }
        }
        f => {
            let (codes, own) = scratch.codes_and_scales(w.cols(), f.scales_per_row(w.cols()));
            row_codes(w, r, codes);
            let scales = if w.in_panels() {
                panel::unpack_scales(w, r, own);
                &*own
            } else {
                w.row_scales(r)
            };
            let group = if scales.len() == 1 { w.cols() } else { panel::group_of(f) };
            for ((o, c), &s) in out.chunks_mut(group).zip(codes.chunks(group)).zip(scales) {
                for (o, &c) in o.iter_mut().zip(c) {
                    *o = f32::from(c) * s;
                }
            }
        }
    }
}
