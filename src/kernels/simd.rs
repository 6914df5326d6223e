//! What an instruction set writes by hand, and the scalar definition of it.
//!
//! A kernel is one generic body over [`Simd`]; `table!` in `mod.rs` compiles it once per instruction set inside
//! `#[target_feature]` functions. The vectors are 16 lanes of f32, 16 exact int32 sums (one per matrix row of a strip),
//! and the packed codes of a strip.
#![forbid(unsafe_code)]

use super::format::{GROUP, MatView};
use super::panel::{Codes, VECTOR, deal_nibbles};
use super::{Input, Scratch};
use crate::pool::TileMut;

/// Lanes of a vector, partial sums of a dot product, rows of a strip.
pub(super) const LANES: usize = 16;

/// [`Simd::pack8`] of eight int4 codes: dealt as panels want them.
pub(super) const NIBBLES: u8 = 0;
/// [`Simd::pack8`] of four int8 codes: made unsigned.
pub(super) const BYTES: u8 = 1;
/// [`Simd::pack8`] of one scale: as it is.
pub(super) const WORDS: u8 = 2;

/// Vector operations of one instruction set. All of them are exact or one IEEE operation per lane.
pub(super) trait Simd {
    /// Activation rows of the largest product tile that the registers hold.
    const TILE: usize;
    /// Bytes ahead of the one being read that a product fetches into the cache (`glm bench kernels`).
    const PREFETCH: usize;
    /// 16 lanes of f32.
    type Lanes: Copy;
    /// 16 exact int32 sums.
    type Sums: Copy;

    fn zero() -> Self::Lanes;
    fn splat(v: f32) -> Self::Lanes;
    fn load(a: &[f32; LANES]) -> Self::Lanes;
    /// 16 little-endian f32.
    fn load_bytes(a: &[u8; 4 * LANES]) -> Self::Lanes;
    /// 16 little-endian bf16.
    fn load_bf16(a: &[u8; 2 * LANES]) -> Self::Lanes;
    /// 16 half-precision bit patterns.
    fn load_f16(a: &[u16; LANES]) -> Self::Lanes;
    fn store(p: Self::Lanes, out: &mut [f32; LANES]);
    fn mul(a: Self::Lanes, b: Self::Lanes) -> Self::Lanes;
    /// `a * b + p` with one rounding.
    fn fma(a: Self::Lanes, b: Self::Lanes, p: Self::Lanes) -> Self::Lanes;

    /// The fixed tree 8+8, 4+4, 2+2, 1+1 over the lanes of each vector.
    #[inline(always)]
    fn trees<const N: usize>(p: [Self::Lanes; N]) -> [f32; N] {
        each!(k in 0..N, {
            let mut a = [0.0; LANES];
            Self::store(p[k], &mut a);
            tree(a)
        })
    }

    /// Exact dot product of one full 64-group of a stored row. `bias` is -8 Σq.
    fn dot64(w: &[i8; GROUP], q: &[i8; GROUP], bias: i32) -> i32;

    /// Exact sums of one block (16 rows × 64 inputs) against `R` activation groups, each starting at its `start`.
    fn block<C: Codes, const R: usize>(
        codes: &[u8],
        x: [&[i8; GROUP]; R],
        start: [i32; R],
    ) -> [Self::Sums; R];
    /// Each sum rounded to f32.
    fn to_f32(s: Self::Sums) -> Self::Lanes;
    #[cfg(any(test, target_arch = "x86_64"))]
    fn load_sums(s: &[i32; LANES]) -> Self::Sums;

    /// Activation rows from which [`Simd::many_rows`] is used.
    const MANY: usize = usize::MAX;
    /// A product of panels with at least `MANY` activation rows, for sets that have something better than registers.
    fn many_rows<C: Codes, const SCALED: bool>(
        _w: &MatView<'_>,
        _first: usize,
        _x: &Input<'_>,
        _tile: &mut TileMut<'_>,
        _scratch: &mut Scratch,
    ) {
        unreachable!("only called by sets that set MANY");
    }
    /// The codes of a block as signed bytes, quad by quad.
    #[cfg(any(test, target_arch = "x86_64"))]
    #[inline(always)]
    fn signed<C: Codes>(codes: &[u8], out: &mut [[i8; VECTOR]; GROUP / 4]) {
        for (k, out) in out.iter_mut().enumerate() {
            let w = C::quad::<[u8; VECTOR]>(codes, k, 0);
            for (o, w) in out.iter_mut().zip(w) {
                *o = w.wrapping_sub(C::OFFSET as u8) as i8;
            }
        }
    }

    /// Takes eight 4-byte words of each of 8 rows: word `v` of all rows goes to `out` from `at + v * stride` on.
    #[inline(always)]
    fn pack8<const HOW: u8>(rows: [&[u8; 32]; 8], out: &mut [u8], at: usize, stride: usize) {
        for (r, row) in rows.iter().enumerate() {
            for (v, word) in row.as_chunks::<4>().0.iter().enumerate() {
                let word = u32::from_le_bytes(*word);
                let word = match HOW {
                    NIBBLES => deal_nibbles(word),
                    BYTES => word ^ 0x8080_8080,
                    _ => word,
                };
                out[at + stride * v + 4 * r..][..4].copy_from_slice(&word.to_le_bytes());
            }
        }
    }

    /// Starts fetching the cache line `ahead` bytes after the start of `bytes`, which may lie outside of it.
    fn prefetch(bytes: &[u8], ahead: usize);
}

#[inline(always)]
pub(super) fn tree(mut p: [f32; LANES]) -> f32 {
    let mut n = LANES / 2;
    while n > 0 {
        for j in 0..n {
            p[j] += p[j + n];
        }
        n /= 2;
    }
    p[0]
}

/// Runs `$body` with the constant `$k` = first, first + 1, … : `quad` decodes by constant shifts. Half a block, or one.
macro_rules! unroll {
    ($k:ident in 0..8 + $half:expr, $body:block) => {
        unroll!(@ $k, $half, $body, 0 1 2 3 4 5 6 7)
    };
    ($k:ident in 0..16, $body:block) => {
        unroll!(@ $k, 0, $body, 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15)
    };
    (@ $k:ident, $half:expr, $body:block, $($n:literal)*) => {
        $({ let $k: usize = $n + $half; $body })*
    };
}
pub(super) use unroll;

/// `[e(0), e(1), … e(n - 1)]` of a `Copy` type. The compiler does not inline `array::from_fn` and `map` everywhere, and
/// a call costs a kernel its registers.
macro_rules! each {
    ($k:ident in 0..$n:expr, $e:expr) => {{
        let $k = 0;
        let mut all = [$e; $n];
        for $k in 1..$n {
            all[$k] = $e;
        }
        all
    }};
}
pub(super) use each;

/// Runs `$body` for `$k` = 0, 1, … below `$n`, which is at most 4, with constant indices: arrays of registers that are
/// indexed by a variable anywhere live in memory everywhere.
macro_rules! upto4 {
    ($k:ident < $n:expr, $body:block) => {{
        upto4!(@ $k, $n, $body, 0 1 2 3);
    }};
    (@ $k:ident, $n:expr, $body:block, $($i:literal)*) => {
        $(if $i < $n { let $k: usize = $i; $body })*
    };
}
pub(super) use upto4;

/// The sums of `A` × `B` dot products, each over 16 lanes. `tail(j, k, lane)` adds what is left beyond whole vectors.
#[inline(always)]
pub(super) fn finish<S: Simd, const A: usize, const B: usize>(
    p: [[S::Lanes; B]; A],
    rest: usize,
    tail: impl Fn(usize, usize, usize, f32) -> f32,
) -> [[f32; B]; A] {
    let mut out = [[0.0; B]; A];
    if rest == 0 {
        upto4!(j < A, {
            out[j] = S::trees(p[j]);
        });
        return out;
    }
    // A lane that gets no element must keep its bits, also the sign of a zero: the rest is added one by one.
    let mut lanes = [[[0.0; LANES]; B]; A];
    upto4!(j < A, {
        upto4!(k < B, {
            S::store(p[j][k], &mut lanes[j][k]);
        });
    });
    for j in 0..A {
        for k in 0..B {
            for (i, lane) in lanes[j][k].iter_mut().enumerate().take(rest) {
                *lane = tail(j, k, i, *lane);
            }
            out[j][k] = tree(lanes[j][k]);
        }
    }
    out
}

/// Four consecutive codes as kernels broadcast them.
#[inline(always)]
pub(super) fn quad_of(x: &[i8; GROUP], k: usize) -> i32 {
    i32::from_le_bytes([x[4 * k] as u8, x[4 * k + 1] as u8, x[4 * k + 2] as u8, x[4 * k + 3] as u8])
}

/// The scalar definition.
pub(super) struct Scalar;

impl Simd for Scalar {
    const TILE: usize = 4;
    const PREFETCH: usize = 0;
    type Lanes = [f32; LANES];
    type Sums = [i32; LANES];

    #[inline(always)]
    fn zero() -> Self::Lanes {
        [0.0; LANES]
    }

    #[inline(always)]
    fn splat(v: f32) -> Self::Lanes {
        [v; LANES]
    }

    #[inline(always)]
    fn load(a: &[f32; LANES]) -> Self::Lanes {
        *a
    }

    #[inline(always)]
    fn load_bytes(a: &[u8; 4 * LANES]) -> Self::Lanes {
        std::array::from_fn(|i| {
            f32::from_le_bytes([a[4 * i], a[4 * i + 1], a[4 * i + 2], a[4 * i + 3]])
        })
    }

    #[inline(always)]
    fn load_bf16(a: &[u8; 2 * LANES]) -> Self::Lanes {
        std::array::from_fn(|i| bf16_to_f32([a[2 * i], a[2 * i + 1]]))
    }

    #[inline(always)]
    fn load_f16(a: &[u16; LANES]) -> Self::Lanes {
        a.map(f16_to_f32)
    }

    #[inline(always)]
    fn store(p: Self::Lanes, out: &mut [f32; LANES]) {
        *out = p;
    }

    #[inline(always)]
    fn mul(a: Self::Lanes, b: Self::Lanes) -> Self::Lanes {
        std::array::from_fn(|j| a[j] * b[j])
    }

    #[inline(always)]
    fn fma(a: Self::Lanes, b: Self::Lanes, p: Self::Lanes) -> Self::Lanes {
        std::array::from_fn(|j| a[j].mul_add(b[j], p[j]))
    }

    #[inline(always)]
    fn dot64(w: &[i8; GROUP], q: &[i8; GROUP], _bias: i32) -> i32 {
        dot_i8(w, q)
    }

    #[inline(always)]
    fn block<C: Codes, const R: usize>(
        codes: &[u8],
        x: [&[i8; GROUP]; R],
        start: [i32; R],
    ) -> [Self::Sums; R] {
        let mut d = each!(r in 0..R, [start[r]; LANES]);
        for k in 0..GROUP / 4 {
            let w = C::quad::<[u8; VECTOR]>(codes, k, 0);
            for r in 0..R {
                add_quad(&mut d[r], &w, x[r], k, 0);
            }
        }
        d
    }

    #[inline(always)]
    fn to_f32(s: Self::Sums) -> Self::Lanes {
        s.map(|v| v as f32)
    }

    #[cfg(any(test, target_arch = "x86_64"))]
    #[inline(always)]
    fn load_sums(s: &[i32; LANES]) -> Self::Sums {
        *s
    }

    #[inline(always)]
    fn prefetch(_bytes: &[u8], _ahead: usize) {}
}

/// `d[row] += Σ_j (w[row][j] - offset) x[4k + j]`.
#[inline(always)]
pub(super) fn add_quad(
    d: &mut [i32; LANES],
    w: &[u8; VECTOR],
    x: &[i8; GROUP],
    k: usize,
    offset: i32,
) {
    for (d, w) in d.iter_mut().zip(w.as_chunks::<4>().0) {
        for j in 0..4 {
            *d += (i32::from(w[j]) - offset) * i32::from(x[4 * k + j]);
        }
    }
}

#[inline(always)]
pub(super) fn dot_i8(w: &[i8], q: &[i8]) -> i32 {
    w.iter().zip(q).map(|(&w, &q)| i32::from(w) * i32::from(q)).sum()
}

#[inline(always)]
pub(super) fn bf16_to_f32(b: [u8; 2]) -> f32 {
    f32::from_bits(u32::from(u16::from_le_bytes(b)) << 16)
}

#[inline(always)]
pub(super) fn f16_to_f32(h: u16) -> f32 {
    // Scaling by 2^112 re-biases the exponent and normalises subnormals exactly; infinity and NaN are patched in.
    let em = u32::from(h & 0x7fff);
    let v = f32::from_bits(em << 13) * f32::from_bits(0x7780_0000);
    let special = if em >= 0x7c00 { 0x7f80_0000 } else { 0 };
    f32::from_bits(v.to_bits() | special | (u32::from(h & 0x8000) << 16))
}
