//! AVX2, FMA and F16C.
//!
//! The integer dot product multiplies |w| as u8 by q with the sign of w as i8 (`maddubs`). Its int16 pair sums cannot
//! saturate: |w| <= 128 and |q| <= 127 give at most 2 * 128 * 127 = 32,512.

use std::arch::x86_64::*;

use super::{GROUP, table};

table!(Isa::Avx2, Avx2, "avx2,fma,f16c");

/// The 64-group dot product with `maddubs`.
struct Avx2;

impl portable::Dot for Avx2 {
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
