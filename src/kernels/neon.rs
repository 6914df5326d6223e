//! NEON on 64-bit Arm: plain, with the dot product (`sdot`), and with 8-bit matrix products (`smmla`).
//!
//! A register holds four rows of a quad. Codes below 16 are signed as they are; codes of 8 bits have their top bit
//! flipped, which takes the offset off. The intrinsics of `sdot` and `smmla` are not stable, their instructions are.

use std::arch::aarch64::*;
use std::arch::asm;

use super::panel::{Codes, Vector};
use super::simd::{LANES, Simd, each, f16_to_f32, quad_of, unroll};
use super::{GROUP, table};

/// Registers per 16 lanes, and parts of a strip.
const PARTS: usize = 4;

/// Without extensions.
pub(super) mod plain {
    use super::*;

    table!(Isa::Neon, Neon, "neon");

    struct Neon;

    impl Simd for Neon {
        super::lanes!();

        #[inline(always)]
        fn block<C: Codes, const R: usize>(
            codes: &[u8],
            x: [&[i8; GROUP]; R],
            start: [i32; R],
        ) -> [Self::Sums; R] {
            let mut d = starts::<C, R>(start);
            for part in 0..PARTS {
                unroll!(k in 0..16, {
                    let w = signed::<C>(codes, k, part);
                    for r in 0..R {
                        // SAFETY: NEON is part of every 64-bit Arm CPU that this is compiled for.
                        d[r][part] = unsafe {
                            let q = quad(x[r], k);
                            let low = vmull_s8(vget_low_s8(w), vget_low_s8(q));
                            let high = vmull_high_s8(w, q);
                            let sums = vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high));
                            vaddq_s32(d[r][part], sums)
                        };
                    }
                });
            }
            d
        }
    }
}

/// With the dot product.
pub(super) mod dot {
    use super::*;

    table!(Isa::NeonDot, NeonDot, "neon,dotprod");

    struct NeonDot;

    impl Simd for NeonDot {
        super::lanes!();

        #[inline(always)]
        fn block<C: Codes, const R: usize>(
            codes: &[u8],
            x: [&[i8; GROUP]; R],
            start: [i32; R],
        ) -> [Self::Sums; R] {
            let mut d = starts::<C, R>(start);
            for part in 0..PARTS {
                unroll!(k in 0..16, {
                    let w = signed::<C>(codes, k, part);
                    for r in 0..R {
                        // SAFETY: only called from this module's table, whose functions are compiled with `dotprod`.
                        unsafe { sdot(&mut d[r][part], w, quad(x[r], k)) };
                    }
                });
            }
            d
        }
    }
}

/// With matrix products.
pub(super) mod mm {
    use super::*;

    table!(Isa::NeonI8mm, NeonI8mm, "neon,dotprod,i8mm");

    struct NeonI8mm;

    impl Simd for NeonI8mm {
        super::lanes!();

        #[inline(always)]
        fn block<C: Codes, const R: usize>(
            codes: &[u8],
            x: [&[i8; GROUP]; R],
            start: [i32; R],
        ) -> [Self::Sums; R] {
            let mut d = starts::<C, R>(start);
            for part in 0..PARTS {
                // SAFETY: only called from this module's table, whose functions are compiled with `dotprod` and `i8mm`.
                unsafe {
                    // 2 rows × 2 activations each: rows 0 and 1, rows 2 and 3 of the part.
                    let mut pairs = [[vdupq_n_s32(0); 2]; R];
                    for k in 0..GROUP / 8 {
                        let w =
                            [signed::<C>(codes, 2 * k, part), signed::<C>(codes, 2 * k + 1, part)];
                        let (w0, w1) = (vreinterpretq_s32_s8(w[0]), vreinterpretq_s32_s8(w[1]));
                        let rows = [vzip1q_s32(w0, w1), vzip2q_s32(w0, w1)]
                            .map(|v| vreinterpretq_s8_s32(v));
                        let mut r = 0;
                        while r + 2 <= R {
                            let two = vcombine_s8(eight(x[r], k), eight(x[r + 1], k));
                            smmla(&mut pairs[r][0], rows[0], two);
                            smmla(&mut pairs[r][1], rows[1], two);
                            r += 2;
                        }
                        if r < R {
                            sdot(&mut d[r][part], w[0], quad(x[r], 2 * k));
                            sdot(&mut d[r][part], w[1], quad(x[r], 2 * k + 1));
                        }
                    }
                    let mut r = 0;
                    while r + 2 <= R {
                        let [a, b] = pairs[r];
                        d[r][part] = vaddq_s32(d[r][part], vuzp1q_s32(a, b));
                        d[r + 1][part] = vaddq_s32(d[r + 1][part], vuzp2q_s32(a, b));
                        r += 2;
                    }
                }
            }
            d
        }
    }
}

/// What sums start with: nothing where the codes are made signed.
#[inline(always)]
fn starts<C: Codes, const R: usize>(start: [i32; R]) -> [[int32x4_t; PARTS]; R] {
    each!(r in 0..R, {
        // SAFETY: NEON is part of every 64-bit Arm CPU that this is compiled for.
        [unsafe { vdupq_n_s32(if C::OFFSET > 8 { 0 } else { start[r] }) }; PARTS]
    })
}

/// Quad `k` of the four rows of `part`.
#[inline(always)]
fn signed<C: Codes>(codes: &[u8], k: usize, part: usize) -> int8x16_t {
    let w: uint8x16_t = C::quad(codes, k, 16 * part);
    // SAFETY: as in `starts`.
    unsafe {
        let w = if C::OFFSET > 8 { veorq_u8(w, vdupq_n_u8(128)) } else { w };
        vreinterpretq_s8_u8(w)
    }
}

/// Four activation codes, four times.
#[inline(always)]
fn quad(x: &[i8; GROUP], k: usize) -> int8x16_t {
    // SAFETY: as in `starts`.
    unsafe { vreinterpretq_s8_s32(vdupq_n_s32(quad_of(x, k))) }
}

/// Eight activation codes.
#[inline(always)]
fn eight(x: &[i8; GROUP], k: usize) -> int8x8_t {
    let x = &x[8 * k..8 * k + 8];
    // SAFETY: as in `starts`; the slice has eight bytes.
    unsafe { vld1_s8(x.as_ptr()) }
}

/// `d[i] += Σ_j a[4i + j] b[4i + j]`.
///
/// # Safety
/// The CPU has `dotprod`, and the function that this is inlined into is compiled with it.
#[inline(always)]
unsafe fn sdot(d: &mut int32x4_t, a: int8x16_t, b: int8x16_t) {
    // SAFETY: the caller vouches for the instruction; it touches registers only.
    unsafe {
        asm!(
            "sdot {d:v}.4s, {a:v}.16b, {b:v}.16b",
            d = inout(vreg) *d,
            a = in(vreg) a,
            b = in(vreg) b,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
}

/// `d[2i + j] += Σ_k a[8i + k] b[8j + k]`.
///
/// # Safety
/// As [`sdot`], with `i8mm`.
#[inline(always)]
unsafe fn smmla(d: &mut int32x4_t, a: int8x16_t, b: int8x16_t) {
    // SAFETY: as in `sdot`.
    unsafe {
        asm!(
            "smmla {d:v}.4s, {a:v}.16b, {b:v}.16b",
            d = inout(vreg) *d,
            a = in(vreg) a,
            b = in(vreg) b,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
}

/// Four rows of a block's quad.
impl Vector for uint8x16_t {
    #[inline(always)]
    fn load(bytes: &[u8], at: usize) -> Self {
        let bytes = &bytes[at..at + 16];
        // SAFETY: as in `starts`; the slice has 16 bytes.
        unsafe { vld1q_u8(bytes.as_ptr()) }
    }

    #[inline(always)]
    fn shr(self, n: usize) -> Self {
        // SAFETY: as in `starts`. A negative count shifts right.
        unsafe { vshlq_u8(self, vdupq_n_s8(-(n as i8))) }
    }

    #[inline(always)]
    fn shl(self, n: usize) -> Self {
        // SAFETY: as in `starts`.
        unsafe { vshlq_u8(self, vdupq_n_s8(n as i8)) }
    }

    #[inline(always)]
    fn and(self, mask: u8) -> Self {
        // SAFETY: as in `starts`.
        unsafe { vandq_u8(self, vdupq_n_u8(mask)) }
    }

    #[inline(always)]
    fn or(self, other: Self) -> Self {
        // SAFETY: as in `starts`.
        unsafe { vorrq_u8(self, other) }
    }
}

/// f32 lanes in four registers, and the dot product of stored rows, shared by all.
macro_rules! lanes {
    () => {
        const TILE: usize = 4;
        const PREFETCH: usize = 1024;
        type Lanes = [float32x4_t; PARTS];
        type Sums = [int32x4_t; PARTS];

        #[inline(always)]
        fn zero() -> Self::Lanes {
            Self::splat(0.0)
        }

        #[inline(always)]
        fn splat(v: f32) -> Self::Lanes {
            // SAFETY: NEON is part of every 64-bit Arm CPU that this is compiled for.
            unsafe { [vdupq_n_f32(v); PARTS] }
        }

        #[inline(always)]
        fn load(a: &[f32; LANES]) -> Self::Lanes {
            // SAFETY: as in `splat`; the loads read the 16 values of the array.
            each!(i in 0..PARTS, unsafe { vld1q_f32(a.as_ptr().add(4 * i)) })
        }

        #[inline(always)]
        fn load_bytes(a: &[u8; 4 * LANES]) -> Self::Lanes {
            // SAFETY: as in `splat`; the loads read the 64 bytes of the array, at any alignment.
            each!(i in 0..PARTS, unsafe { vreinterpretq_f32_u8(vld1q_u8(a.as_ptr().add(16 * i))) })
        }

        #[inline(always)]
        fn load_bf16(a: &[u8; 2 * LANES]) -> Self::Lanes {
            // SAFETY: as in `splat`; the loads read the 32 bytes of the array, at any alignment.
            each!(i in 0..PARTS, unsafe {
                let b = vreinterpret_u16_u8(vld1_u8(a.as_ptr().add(8 * i)));
                vreinterpretq_f32_u32(vshll_n_u16::<16>(b))
            })
        }

        #[inline(always)]
        fn load_f16(a: &[u16; LANES]) -> Self::Lanes {
            let mut all = [0.0; LANES];
            for (o, &h) in all.iter_mut().zip(a) {
                *o = f16_to_f32(h);
            }
            Self::load(&all)
        }

        #[inline(always)]
        fn store(p: Self::Lanes, out: &mut [f32; LANES]) {
            for (i, p) in p.into_iter().enumerate() {
                // SAFETY: as in `splat`; the stores write the 16 values of the array.
                unsafe { vst1q_f32(out.as_mut_ptr().add(4 * i), p) };
            }
        }

        #[inline(always)]
        fn mul(a: Self::Lanes, b: Self::Lanes) -> Self::Lanes {
            // SAFETY: as in `splat`.
            each!(i in 0..PARTS, unsafe { vmulq_f32(a[i], b[i]) })
        }

        #[inline(always)]
        fn fma(a: Self::Lanes, b: Self::Lanes, p: Self::Lanes) -> Self::Lanes {
            // SAFETY: as in `splat`.
            each!(i in 0..PARTS, unsafe { vfmaq_f32(p[i], a[i], b[i]) })
        }

        #[inline(always)]
        fn trees<const N: usize>(p: [Self::Lanes; N]) -> [f32; N] {
            each!(k in 0..N, {
                // SAFETY: as in `splat`.
                unsafe {
                    let s = vaddq_f32(vaddq_f32(p[k][0], p[k][2]), vaddq_f32(p[k][1], p[k][3]));
                    let s = vadd_f32(vget_low_f32(s), vget_high_f32(s));
                    vget_lane_f32::<0>(s) + vget_lane_f32::<1>(s)
                }
            })
        }

        #[inline(always)]
        fn dot64(w: &[i8; GROUP], q: &[i8; GROUP], _bias: i32) -> i32 {
            // SAFETY: as in `splat`; the loads read the 64 bytes of each array.
            unsafe {
                let mut s = vdupq_n_s32(0);
                for i in 0..PARTS {
                    let w = vld1q_s8(w.as_ptr().add(16 * i));
                    let q = vld1q_s8(q.as_ptr().add(16 * i));
                    s = vpadalq_s16(s, vmull_s8(vget_low_s8(w), vget_low_s8(q)));
                    s = vpadalq_s16(s, vmull_high_s8(w, q));
                }
                vaddvq_s32(s)
            }
        }

        #[inline(always)]
        fn to_f32(s: Self::Sums) -> Self::Lanes {
            // SAFETY: as in `splat`.
            each!(i in 0..PARTS, unsafe { vcvtq_f32_s32(s[i]) })
        }

        #[cfg(test)]
        #[inline(always)]
        fn load_sums(s: &[i32; LANES]) -> Self::Sums {
            // SAFETY: as in `splat`; the loads read the 16 values of the array.
            each!(i in 0..PARTS, unsafe { vld1q_s32(s.as_ptr().add(4 * i)) })
        }

        #[inline(always)]
        fn prefetch(bytes: &[u8], ahead: usize) {
            let at = bytes.as_ptr().wrapping_add(ahead);
            // SAFETY: a prefetch reads nothing and cannot fault, wherever it points.
            unsafe {
                asm!("prfm pldl1keep, [{}]", in(reg) at, options(nostack, readonly, preserves_flags));
            }
        }
    };
}
use lanes;
