//! AVX-512 F/BW/DQ/VL, with and without VNNI.
//!
//! Without VNNI the codes of a block are multiplied as on AVX2 (see there for the bounds), 16 rows at a time; 8-bit
//! codes are widened to int16 instead, because AVX-512 has no `sign`.

use std::arch::x86_64::*;

use super::panel::{Codes, Vector};
use super::simd::{LANES, Simd, each, quad_of, unroll};
use super::{GROUP, table};

/// Without VNNI.
pub(super) mod bw {
    use super::*;

    table!(Isa::Avx512, Bw, "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl");

    struct Bw;

    impl Simd for Bw {
        super::lanes!();

        #[inline(always)]
        fn dot64(w: &[i8; GROUP], q: &[i8; GROUP], _bias: i32) -> i32 {
            // SAFETY: only called from this module's table, whose functions are compiled with AVX-512 F/BW/DQ/VL; the
            // loads read the 64 bytes of each array.
            unsafe {
                let (w, q) = (w.as_ptr().cast::<__m256i>(), q.as_ptr().cast::<__m256i>());
                let half = |i: usize| {
                    let w = _mm512_cvtepi8_epi16(_mm256_loadu_si256(w.add(i)));
                    let q = _mm512_cvtepi8_epi16(_mm256_loadu_si256(q.add(i)));
                    _mm512_madd_epi16(w, q)
                };
                _mm512_reduce_add_epi32(_mm512_add_epi32(half(0), half(1)))
            }
        }

        #[inline(always)]
        fn block<C: Codes, const R: usize>(
            codes: &[u8],
            x: [&[i8; GROUP]; R],
            start: [i32; R],
        ) -> [Self::Sums; R] {
            let mut d = each!(r in 0..R, splat_i32(start[r]));
            for half in 0..2 {
                // SAFETY: only called from this module's table, whose functions are compiled with AVX-512 BW.
                unsafe {
                    let mut pairs = [_mm512_setzero_si512(); R];
                    unroll!(k in 0..8 + 8 * half, {
                        let w: __m512i = C::quad(codes, k, 0);
                        if C::OFFSET > 8 {
                            // Bytes 0 and 2, then 1 and 3 of each quad, as int16.
                            let even = _mm512_and_si512(w, _mm512_set1_epi16(255));
                            let odd = _mm512_srli_epi16::<8>(w);
                            for r in 0..R {
                                let q = splat_i32(quad_of(x[r], k));
                                let q_even = _mm512_srai_epi16::<8>(_mm512_slli_epi16::<8>(q));
                                let q_odd = _mm512_srai_epi16::<8>(q);
                                let p = _mm512_add_epi32(
                                    _mm512_madd_epi16(even, q_even),
                                    _mm512_madd_epi16(odd, q_odd),
                                );
                                pairs[r] = _mm512_add_epi32(pairs[r], p);
                            }
                        } else {
                            for r in 0..R {
                                let p = _mm512_maddubs_epi16(w, splat_i32(quad_of(x[r], k)));
                                pairs[r] = _mm512_add_epi16(pairs[r], p);
                            }
                        }
                    });
                    for r in 0..R {
                        let sums = match C::OFFSET {
                            9.. => pairs[r],
                            _ => _mm512_madd_epi16(pairs[r], _mm512_set1_epi16(1)),
                        };
                        d[r] = _mm512_add_epi32(d[r], sums);
                    }
                }
            }
            d
        }
    }
}

/// With VNNI.
pub(super) mod vnni {
    use super::*;
    use crate::kernels::avx512;

    table!(Isa::Avx512Vnni, Vnni, "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni");

    struct Vnni;

    impl Simd for Vnni {
        super::lanes!();
        super::vnni_products!();
    }
}

#[inline(always)]
pub(super) fn splat_i32(v: i32) -> __m512i {
    // SAFETY: only called from this file's tables, whose functions are compiled with AVX-512 F.
    unsafe { _mm512_set1_epi32(v) }
}

/// All 16 rows of a block's quad.
impl Vector for __m512i {
    #[inline(always)]
    fn load(bytes: &[u8], at: usize) -> Self {
        let bytes = &bytes[at..at + 64];
        // SAFETY: only called from this file's tables, whose functions are compiled with AVX-512 F; the slice has 64
        // bytes.
        unsafe { _mm512_loadu_si512(bytes.as_ptr().cast()) }
    }

    #[inline(always)]
    fn shr(self, n: usize) -> Self {
        // SAFETY: as in `load`, with AVX-512 BW.
        unsafe { _mm512_srl_epi16(self, _mm_cvtsi32_si128(n as i32)) }
    }

    #[inline(always)]
    fn shl(self, n: usize) -> Self {
        // SAFETY: as in `shr`.
        unsafe { _mm512_sll_epi16(self, _mm_cvtsi32_si128(n as i32)) }
    }

    #[inline(always)]
    fn and(self, mask: u8) -> Self {
        // SAFETY: as in `load`.
        unsafe { _mm512_and_si512(self, _mm512_set1_epi8(mask as i8)) }
    }

    #[inline(always)]
    fn or(self, other: Self) -> Self {
        // SAFETY: as in `load`.
        unsafe { _mm512_or_si512(self, other) }
    }
}

/// One register of 16 f32 lanes, shared by both.
macro_rules! lanes {
    () => {
        const TILE: usize = 12;
        const PREFETCH: usize = 2304;
        type Lanes = __m512;
        type Sums = __m512i;

        #[inline(always)]
        fn zero() -> __m512 {
            Self::splat(0.0)
        }

        #[inline(always)]
        fn splat(v: f32) -> __m512 {
            // SAFETY: only called from this module's table, whose functions are compiled with AVX-512 F/BW/DQ/VL.
            unsafe { _mm512_set1_ps(v) }
        }

        #[inline(always)]
        fn load(a: &[f32; LANES]) -> __m512 {
            // SAFETY: as in `splat`; the load reads the 16 values of the array.
            unsafe { _mm512_loadu_ps(a.as_ptr()) }
        }

        #[inline(always)]
        fn load_bytes(a: &[u8; 4 * LANES]) -> __m512 {
            // SAFETY: as in `splat`; the load reads the 64 bytes of the array, at any alignment.
            unsafe { _mm512_loadu_ps(a.as_ptr().cast()) }
        }

        #[inline(always)]
        fn load_bf16(a: &[u8; 2 * LANES]) -> __m512 {
            // SAFETY: as in `splat`; the load reads the 32 bytes of the array.
            unsafe {
                let b = _mm512_cvtepu16_epi32(_mm256_loadu_si256(a.as_ptr().cast()));
                _mm512_castsi512_ps(_mm512_slli_epi32::<16>(b))
            }
        }

        #[inline(always)]
        fn load_f16(a: &[u16; LANES]) -> __m512 {
            // SAFETY: as in `splat`; the load reads the 16 values of the array.
            unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(a.as_ptr().cast())) }
        }

        #[inline(always)]
        fn store(p: __m512, out: &mut [f32; LANES]) {
            // SAFETY: as in `splat`; the store writes the 16 values of the array.
            unsafe { _mm512_storeu_ps(out.as_mut_ptr(), p) }
        }

        #[inline(always)]
        fn mul(a: __m512, b: __m512) -> __m512 {
            // SAFETY: as in `splat`.
            unsafe { _mm512_mul_ps(a, b) }
        }

        #[inline(always)]
        fn fma(a: __m512, b: __m512, p: __m512) -> __m512 {
            // SAFETY: as in `splat`.
            unsafe { _mm512_fmadd_ps(a, b, p) }
        }

        #[inline(always)]
        fn trees<const N: usize>(p: [__m512; N]) -> [f32; N] {
            each!(k in 0..N, {
                // SAFETY: as in `splat`.
                unsafe {
                    let s = _mm256_add_ps(
                        _mm512_castps512_ps256(p[k]),
                        _mm512_extractf32x8_ps::<1>(p[k]),
                    );
                    let s = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps::<1>(s));
                    let s = _mm_add_ps(s, _mm_movehl_ps(s, s));
                    _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)))
                }
            })
        }

        #[inline(always)]
        fn to_f32(s: __m512i) -> __m512 {
            // SAFETY: as in `splat`.
            unsafe { _mm512_cvtepi32_ps(s) }
        }

        #[inline(always)]
        fn load_sums(s: &[i32; LANES]) -> __m512i {
            // SAFETY: as in `splat`; the load reads the 16 values of the array.
            unsafe { _mm512_loadu_si512(s.as_ptr().cast()) }
        }

        #[inline(always)]
        fn pack8<const HOW: u8>(rows: [&[u8; 32]; 8], out: &mut [u8], at: usize, stride: usize) {
            // SAFETY: a CPU with AVX-512 has AVX2, and functions compiled with it have both.
            unsafe { crate::kernels::avx2::pack8::<HOW>(rows, out, at, stride) }
        }

        #[inline(always)]
        fn prefetch(bytes: &[u8], ahead: usize) {
            // SAFETY: a prefetch reads nothing and cannot fault, wherever it points.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(bytes.as_ptr().wrapping_add(ahead).cast()) }
        }
    };
}
pub(super) use lanes;

/// Integer products with VNNI.
macro_rules! vnni_products {
    () => {
        #[inline(always)]
        fn dot64(w: &[i8; GROUP], q: &[i8; GROUP], bias: i32) -> i32 {
            // SAFETY: only called from this module's table, whose functions are compiled with AVX-512 VNNI; the
            // loads read the 64 bytes of each array.
            unsafe {
                let w = _mm512_loadu_si512(w.as_ptr().cast());
                let q = _mm512_loadu_si512(q.as_ptr().cast());
                // Biased to u8 (w + 128); the bias is taken off again as -128 Σq.
                let biased = _mm512_xor_si512(w, _mm512_set1_epi8(-128));
                let d = _mm512_dpbusd_epi32(_mm512_setzero_si512(), biased, q);
                _mm512_reduce_add_epi32(d) + 16 * bias
            }
        }

        #[inline(always)]
        fn block<C: Codes, const R: usize>(
            codes: &[u8],
            x: [&[i8; GROUP]; R],
            start: [i32; R],
        ) -> [Self::Sums; R] {
            // Few rows are few chains of dependent sums: two for each keep the multipliers busy.
            let split = R <= 8;
            let mut d = each!(r in 0..R, avx512::splat_i32(start[r]));
            let mut odd = each!(_r in 0..R, avx512::splat_i32(0));
            unroll!(k in 0..16, {
                let w: __m512i = C::quad(codes, k, 0);
                for r in 0..R {
                    let q = avx512::splat_i32(quad_of(x[r], k));
                    // SAFETY: only called from this module's table, whose functions are compiled with VNNI.
                    unsafe {
                        if split && k % 2 == 1 {
                            odd[r] = _mm512_dpbusd_epi32(odd[r], w, q);
                        } else {
                            d[r] = _mm512_dpbusd_epi32(d[r], w, q);
                        }
                    }
                }
            });
            if split {
                for r in 0..R {
                    // SAFETY: as above.
                    d[r] = unsafe { _mm512_add_epi32(d[r], odd[r]) };
                }
            }
            d
        }
    };
}
pub(super) use vnni_products;
