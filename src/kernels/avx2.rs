//! AVX2, FMA and F16C, with and without AVX-VNNI.
//!
//! Without VNNI the codes of a block are multiplied as u8 × i8 into pairs of int16 (`maddubs`), which must not
//! saturate. Codes below 16 give at most 2 · 15 · 127 = 3,810 per pair, so eight quads (30,480) are added before they
//! are widened. Codes of 8 bits are made signed first and multiplied as |w| × (±q): at most 2 · 128 · 127 = 32,512,
//! widened at once.

use std::arch::x86_64::*;

use super::panel::{Codes, Vector};
use super::simd::{BYTES, LANES, NIBBLES, Simd, each, quad_of, unroll};
use super::{GROUP, table};

/// Without VNNI.
pub(super) mod plain {
    use super::*;

    table!(Isa::Avx2, Avx2, "avx2,fma,f16c");

    struct Avx2;

    impl Simd for Avx2 {
        super::lanes!();
        super::dot64!();

        #[inline(always)]
        fn block<C: Codes, const R: usize>(
            codes: &[u8],
            x: [&[i8; GROUP]; R],
            start: [i32; R],
        ) -> [Self::Sums; R] {
            // Codes of 8 bits are made signed: their sums start at 0.
            let mut d = each!(r in 0..R, [splat_i32(if C::OFFSET > 8 { 0 } else { start[r] }); 2]);
            // One half of the rows at a time: 16 registers hold the sums of four activation rows.
            for h in 0..2 {
                for half in 0..2 {
                    // SAFETY: only called from this module's table, whose functions are compiled with AVX2.
                    unsafe {
                        let mut pairs = [_mm256_setzero_si256(); R];
                        unroll!(k in 0..8 + 8 * half, {
                            let w: __m256i = C::quad(codes, k, 32 * h);
                            if C::OFFSET > 8 {
                                let w = _mm256_xor_si256(w, _mm256_set1_epi8(-128));
                                let size = _mm256_abs_epi8(w);
                                for r in 0..R {
                                    let q = _mm256_sign_epi8(splat_i32(quad_of(x[r], k)), w);
                                    let p = _mm256_maddubs_epi16(size, q);
                                    let p = _mm256_madd_epi16(p, _mm256_set1_epi16(1));
                                    pairs[r] = _mm256_add_epi32(pairs[r], p);
                                }
                            } else {
                                for r in 0..R {
                                    let p = _mm256_maddubs_epi16(w, splat_i32(quad_of(x[r], k)));
                                    pairs[r] = _mm256_add_epi16(pairs[r], p);
                                }
                            }
                        });
                        for r in 0..R {
                            let sums = match C::OFFSET {
                                9.. => pairs[r],
                                _ => _mm256_madd_epi16(pairs[r], _mm256_set1_epi16(1)),
                            };
                            d[r][h] = _mm256_add_epi32(d[r][h], sums);
                        }
                    }
                }
            }
            d
        }
    }
}

/// With the VNNI dot product on 256-bit registers.
pub(super) mod vnni {
    use super::*;

    table!(Isa::Avx2Vnni, Avx2Vnni, "avx2,fma,f16c,avxvnni");

    struct Avx2Vnni;

    impl Simd for Avx2Vnni {
        super::lanes!();
        super::dot64!();

        #[inline(always)]
        fn block<C: Codes, const R: usize>(
            codes: &[u8],
            x: [&[i8; GROUP]; R],
            start: [i32; R],
        ) -> [Self::Sums; R] {
            let mut d = each!(r in 0..R, [splat_i32(start[r]); 2]);
            for h in 0..2 {
                unroll!(k in 0..16, {
                    let w: __m256i = C::quad(codes, k, 32 * h);
                    for r in 0..R {
                        // SAFETY: only called from this module's table, whose functions are compiled with AVX-VNNI.
                        d[r][h] = unsafe {
                            _mm256_dpbusd_avx_epi32(d[r][h], w, splat_i32(quad_of(x[r], k)))
                        };
                    }
                });
            }
            d
        }
    }
}

#[inline(always)]
fn splat_i32(v: i32) -> __m256i {
    // SAFETY: only called from this file's tables, whose functions are compiled with AVX2.
    unsafe { _mm256_set1_epi32(v) }
}

/// Eight rows of a block's quad.
impl Vector for __m256i {
    #[inline(always)]
    fn load(bytes: &[u8], at: usize) -> Self {
        let bytes = &bytes[at..at + 32];
        // SAFETY: only called from this file's tables, whose functions are compiled with AVX2; the slice has 32 bytes.
        unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) }
    }

    #[inline(always)]
    fn shr(self, n: usize) -> Self {
        // SAFETY: as in `load`.
        unsafe { _mm256_srl_epi16(self, _mm_cvtsi32_si128(n as i32)) }
    }

    #[inline(always)]
    fn shl(self, n: usize) -> Self {
        // SAFETY: as in `load`.
        unsafe { _mm256_sll_epi16(self, _mm_cvtsi32_si128(n as i32)) }
    }

    #[inline(always)]
    fn and(self, mask: u8) -> Self {
        // SAFETY: as in `load`.
        unsafe { _mm256_and_si256(self, _mm256_set1_epi8(mask as i8)) }
    }

    #[inline(always)]
    fn or(self, other: Self) -> Self {
        // SAFETY: as in `load`.
        unsafe { _mm256_or_si256(self, other) }
    }
}

/// [`Simd::pack8`] in registers: each row's words are dealt, then words and rows change places.
///
/// # Safety
/// The CPU has AVX2, and the caller is compiled with it.
#[inline(always)]
pub(super) unsafe fn pack8<const HOW: u8>(
    rows: [&[u8; 32]; 8],
    out: &mut [u8],
    at: usize,
    stride: usize,
) {
    let out = &mut out[at..at + 7 * stride + 32];
    // SAFETY: the caller's promise; loads read the 32 bytes of each row, stores write inside the slice cut above.
    unsafe {
        let w = each!(r in 0..8, {
            let w = _mm256_loadu_si256(rows[r].as_ptr().cast());
            match HOW {
                NIBBLES => deal(w),
                BYTES => _mm256_xor_si256(w, _mm256_set1_epi8(-128)),
                _ => w,
            }
        });
        // Pairs of rows, then fours, then eights.
        let a = each!(i in 0..8, {
            let (x, y) = (w[i / 2 * 2], w[i / 2 * 2 + 1]);
            if i % 2 == 0 { _mm256_unpacklo_epi32(x, y) } else { _mm256_unpackhi_epi32(x, y) }
        });
        let b = each!(i in 0..8, {
            let (x, y) = (a[i / 4 * 4 + i % 4 / 2], a[i / 4 * 4 + i % 4 / 2 + 2]);
            if i % 2 == 0 { _mm256_unpacklo_epi64(x, y) } else { _mm256_unpackhi_epi64(x, y) }
        });
        for v in 0..4 {
            let (low, high) = (b[v], b[v + 4]);
            let p = out.as_mut_ptr().add(stride * v);
            _mm256_storeu_si256(p.cast(), _mm256_permute2x128_si256::<0x20>(low, high));
            let p = out.as_mut_ptr().add(stride * (v + 4));
            _mm256_storeu_si256(p.cast(), _mm256_permute2x128_si256::<0x31>(low, high));
        }
    }
}

/// Nibbles 0…7 of each word in the order 0 4 1 5 2 6 3 7.
///
/// # Safety
/// As of [`pack8`].
#[inline(always)]
unsafe fn deal(w: __m256i) -> __m256i {
    // SAFETY: the caller's promise.
    unsafe {
        // Each byte twice: one copy gives its low nibble, the other its high one.
        let twice = |first: i32| {
            let word = |w: i32| (first + w) * 0x0101 + (first + w + 1) * 0x0101_0000;
            let half = _mm_setr_epi32(word(0), word(4), word(8), word(12));
            _mm256_shuffle_epi8(w, _mm256_broadcastsi128_si256(half))
        };
        let (a, b) = (twice(0), twice(2));
        let and = |v, mask| _mm256_and_si256(v, _mm256_set1_epi16(mask));
        let low = _mm256_or_si256(and(a, 0x000f), and(_mm256_srli_epi16::<4>(a), 0x0f00));
        let high =
            _mm256_or_si256(and(_mm256_slli_epi16::<4>(b), 0x00f0), and(b, 0xf000u16 as i16));
        _mm256_or_si256(low, high)
    }
}

/// f32 lanes in two registers, shared by both.
macro_rules! lanes {
    () => {
        const TILE: usize = 4;
        const PREFETCH: usize = 1152;
        type Lanes = [__m256; 2];
        type Sums = [__m256i; 2];

        #[inline(always)]
        fn zero() -> Self::Lanes {
            Self::splat(0.0)
        }

        #[inline(always)]
        fn splat(v: f32) -> Self::Lanes {
            // SAFETY: only called from this module's table, whose functions are compiled with AVX2, FMA and F16C.
            unsafe { [_mm256_set1_ps(v); 2] }
        }

        #[inline(always)]
        fn load(a: &[f32; LANES]) -> Self::Lanes {
            // SAFETY: as in `splat`; the loads read the 16 values of the array.
            unsafe { [_mm256_loadu_ps(a.as_ptr()), _mm256_loadu_ps(a.as_ptr().add(8))] }
        }

        #[inline(always)]
        fn load_bytes(a: &[u8; 4 * LANES]) -> Self::Lanes {
            let p: *const f32 = a.as_ptr().cast();
            // SAFETY: as in `splat`; the loads read the 64 bytes of the array, at any alignment.
            unsafe { [_mm256_loadu_ps(p), _mm256_loadu_ps(p.add(8))] }
        }

        #[inline(always)]
        fn load_bf16(a: &[u8; 2 * LANES]) -> Self::Lanes {
            // SAFETY: as in `splat`; the loads read the 32 bytes of the array.
            unsafe {
                let half = |i: usize| {
                    let b = _mm_loadu_si128(a.as_ptr().cast::<__m128i>().add(i));
                    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(b)))
                };
                [half(0), half(1)]
            }
        }

        #[inline(always)]
        fn load_f16(a: &[u16; LANES]) -> Self::Lanes {
            // SAFETY: as in `splat`; the loads read the 16 values of the array.
            unsafe {
                let half = |i| _mm256_cvtph_ps(_mm_loadu_si128(a.as_ptr().cast::<__m128i>().add(i)));
                [half(0), half(1)]
            }
        }

        #[inline(always)]
        fn store(p: Self::Lanes, out: &mut [f32; LANES]) {
            // SAFETY: as in `splat`; the stores write the 16 values of the array.
            unsafe {
                _mm256_storeu_ps(out.as_mut_ptr(), p[0]);
                _mm256_storeu_ps(out.as_mut_ptr().add(8), p[1]);
            }
        }

        #[inline(always)]
        fn mul(a: Self::Lanes, b: Self::Lanes) -> Self::Lanes {
            // SAFETY: as in `splat`.
            unsafe { [_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[1], b[1])] }
        }

        #[inline(always)]
        fn fma(a: Self::Lanes, b: Self::Lanes, p: Self::Lanes) -> Self::Lanes {
            // SAFETY: as in `splat`.
            unsafe { [_mm256_fmadd_ps(a[0], b[0], p[0]), _mm256_fmadd_ps(a[1], b[1], p[1])] }
        }

        #[inline(always)]
        fn trees<const N: usize>(p: [Self::Lanes; N]) -> [f32; N] {
            each!(k in 0..N, {
                // SAFETY: as in `splat`.
                unsafe {
                    let s = _mm256_add_ps(p[k][0], p[k][1]);
                    let s = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps::<1>(s));
                    let s = _mm_add_ps(s, _mm_movehl_ps(s, s));
                    _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)))
                }
            })
        }

        #[inline(always)]
        fn to_f32(s: Self::Sums) -> Self::Lanes {
            // SAFETY: as in `splat`.
            unsafe { [_mm256_cvtepi32_ps(s[0]), _mm256_cvtepi32_ps(s[1])] }
        }

        #[inline(always)]
        fn load_sums(s: &[i32; LANES]) -> Self::Sums {
            let p: *const __m256i = s.as_ptr().cast();
            // SAFETY: as in `splat`; the loads read the 16 values of the array.
            unsafe { [_mm256_loadu_si256(p), _mm256_loadu_si256(p.add(1))] }
        }

        #[inline(always)]
        fn pack8<const HOW: u8>(rows: [&[u8; 32]; 8], out: &mut [u8], at: usize, stride: usize) {
            // SAFETY: as in `splat`.
            unsafe { super::pack8::<HOW>(rows, out, at, stride) }
        }

        #[inline(always)]
        fn prefetch(bytes: &[u8], ahead: usize) {
            // SAFETY: a prefetch reads nothing and cannot fault, wherever it points.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(bytes.as_ptr().wrapping_add(ahead).cast()) }
        }
    };
}
use lanes;

/// Integer dot product of a group of a stored row: |w| × (±q).
macro_rules! dot64 {
    () => {
        #[inline(always)]
        fn dot64(w: &[i8; GROUP], q: &[i8; GROUP], _bias: i32) -> i32 {
            // SAFETY: only called from this module's table, whose functions are compiled with AVX2; the loads read the
            // 64 bytes of each array.
            unsafe {
                let (w, q) = (w.as_ptr().cast::<__m256i>(), q.as_ptr().cast::<__m256i>());
                let half = |i: usize| {
                    let (w, q) = (_mm256_loadu_si256(w.add(i)), _mm256_loadu_si256(q.add(i)));
                    let pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(q, w));
                    _mm256_madd_epi16(pairs, _mm256_set1_epi16(1))
                };
                let s = _mm256_add_epi32(half(0), half(1));
                let s = _mm_add_epi32(_mm256_castsi256_si128(s), _mm256_extracti128_si256::<1>(s));
                let s = _mm_add_epi32(s, _mm_shuffle_epi32::<0b01_00_11_10>(s));
                let s = _mm_add_epi32(s, _mm_shuffle_epi32::<0b10_11_00_01>(s));
                _mm_cvtsi128_si32(s)
            }
        }
    };
}
use dot64;
