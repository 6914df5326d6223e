//! AVX-512 F/BW/DQ/VL, with and without VNNI.
//!
//! Without VNNI the integer dot product widens to int16 and uses `madd`, which cannot saturate. With VNNI the weights
//! are biased to u8 (w + 128) for `dpbusd` and the bias is taken off again as 128 * Σq.

use std::arch::x86_64::*;

use super::GROUP;
use super::portable::LANES;

/// One vector of 16 f32 lanes, shared by both.
macro_rules! lanes {
    () => {
        type Lanes = __m512;

        #[inline(always)]
        fn zero() -> __m512 {
            // SAFETY: only called from this module's table, whose functions are compiled with AVX-512 F.
            unsafe { _mm512_setzero_ps() }
        }

        #[inline(always)]
        fn fma(a: &[f32; LANES], b: &[f32; LANES], p: __m512) -> __m512 {
            // SAFETY: as in `zero`; the loads read the 16 values of each array.
            unsafe { _mm512_fmadd_ps(_mm512_loadu_ps(a.as_ptr()), _mm512_loadu_ps(b.as_ptr()), p) }
        }

        #[inline(always)]
        fn store(p: __m512) -> [f32; LANES] {
            let mut out = [0.0; LANES];
            // SAFETY: as in `zero`; the store writes the 16 values of the array.
            unsafe { _mm512_storeu_ps(out.as_mut_ptr(), p) };
            out
        }
    };
}

/// Without VNNI.
pub(super) mod bw {
    use super::*;
    use crate::kernels::table;

    table!(Isa::Avx512, Bw, "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl");

    struct Bw;

    impl portable::Simd for Bw {
        lanes!();

        #[inline(always)]
        fn dot64(w: &[i8; GROUP], q: &[i8; GROUP], _q_sum: i32) -> i32 {
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
    }
}

/// With VNNI.
pub(super) mod vnni {
    use super::*;
    use crate::kernels::table;

    table!(Isa::Avx512Vnni, Vnni, "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni");

    struct Vnni;

    impl portable::Simd for Vnni {
        lanes!();

        #[inline(always)]
        fn dot64(w: &[i8; GROUP], q: &[i8; GROUP], q_sum: i32) -> i32 {
            // SAFETY: only called from this module's table, whose functions are compiled with AVX-512 VNNI; the loads
            // read the 64 bytes of each array.
            unsafe {
                let w = _mm512_loadu_si512(w.as_ptr().cast());
                let q = _mm512_loadu_si512(q.as_ptr().cast());
                let biased = _mm512_xor_si512(w, _mm512_set1_epi8(-128));
                let d = _mm512_dpbusd_epi32(_mm512_setzero_si512(), biased, q);
                _mm512_reduce_add_epi32(d) - 128 * q_sum
            }
        }
    }
}
