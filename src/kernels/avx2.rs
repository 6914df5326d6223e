//! AVX2, FMA and F16C.
//!
//! The integer dot product multiplies |w| as u8 by q with the sign of w as i8 (`maddubs`). Its int16 pair sums cannot
//! saturate: |w| <= 128 and |q| <= 127 give at most 2 * 128 * 127 = 32,512.

use std::arch::x86_64::*;

use super::portable::LANES;
use super::{GROUP, table};

table!(Isa::Avx2, Avx2, "avx2,fma,f16c");

/// Two vectors of eight lanes; integer dot products with `maddubs`.
struct Avx2;

impl portable::Simd for Avx2 {
    type Lanes = [__m256; 2];

    #[inline(always)]
    fn zero() -> Self::Lanes {
        // SAFETY: only called from this file's table, whose functions are compiled with AVX2 and FMA.
        unsafe { [_mm256_setzero_ps(); 2] }
    }

    #[inline(always)]
    fn fma(a: &[f32; LANES], b: &[f32; LANES], p: Self::Lanes) -> Self::Lanes {
        // SAFETY: as in `zero`; the loads read the 16 values of each array.
        unsafe {
            let half = |i: usize| {
                let (a, b) = (
                    _mm256_loadu_ps(a.as_ptr().add(8 * i)),
                    _mm256_loadu_ps(b.as_ptr().add(8 * i)),
                );
                _mm256_fmadd_ps(a, b, p[i])
            };
            [half(0), half(1)]
        }
    }

    #[inline(always)]
    fn store(p: Self::Lanes) -> [f32; LANES] {
        let mut out = [0.0; LANES];
        // SAFETY: as in `zero`; the stores write the 16 values of the array.
        unsafe {
            _mm256_storeu_ps(out.as_mut_ptr(), p[0]);
            _mm256_storeu_ps(out.as_mut_ptr().add(8), p[1]);
        }
        out
    }

    #[inline(always)]
    fn dot64(w: &[i8; GROUP], q: &[i8; GROUP], _q_sum: i32) -> i32 {
        // SAFETY: only called from this file's table, whose functions are compiled with AVX2; the loads read the 64
        // bytes of each array.
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
}
