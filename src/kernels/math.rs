//! Elementary functions with one definition everywhere.
//!
//! Every function here is built from IEEE operations (add, multiply, divide, square root, fused multiply-add, rounding)
//! in a fixed order, so it gives the same bits on every CPU and in every vector width: the `#[inline(always)]` bodies
//! are compiled once per instruction set inside the kernel files. No libm function whose result may differ is called.
#![forbid(unsafe_code)]

const LOG2_E: f32 = std::f32::consts::LOG2_E;
/// ln 2 split so that `n * LN2_HI` is exact for |n| < 2^10.
const LN2_HI: f32 = 0.693_359_4;
const LN2_LO: f32 = -2.121_944_4e-4;

/// e^x, within 2 ulp. Below -87 the result is 0 (never a subnormal), above 88.7 infinity; NaN stays NaN.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    // n is clamped rather than x so that NaN passes through to the polynomial.
    let n = (x * LOG2_E).round_ties_even().clamp(-126.0, 128.0);
    let r = n.mul_add(-LN2_LO, n.mul_add(-LN2_HI, x));
    let mut p = 1.987_569_1e-4f32;
    p = p.mul_add(r, 1.398_199_9e-3);
    p = p.mul_add(r, 8.333_452e-3);
    p = p.mul_add(r, 4.166_579_6e-2);
    p = p.mul_add(r, 1.666_666_5e-1);
    p = p.mul_add(r, 0.5);
    p = (p * r).mul_add(r, r) + 1.0;
    // 2^n in two factors: n = 128 has no f32 of its own.
    let half = n * 0.5;
    let a = half.floor();
    let b = n - a;
    let y = p * exp2_int(a) * exp2_int(b);
    let y = if x < -87.0 { 0.0 } else { y };
    if x > 88.72 { f32::INFINITY } else { y }
}

/// 2^n for integral n in [-126, 127].
#[inline(always)]
fn exp2_int(n: f32) -> f32 {
    // A NaN casts to 0 and the caller's polynomial is NaN already.
    f32::from_bits((((n as i32) + 127) as u32) << 23)
}

/// 1 / (1 + e^-x).
#[inline(always)]
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// x * sigmoid(x).
#[inline(always)]
pub fn silu(x: f32) -> f32 {
    x / (1.0 + exp(-x))
}

/// Natural logarithm, within a few ulp of f64. Zero gives -inf, negative numbers NaN.
pub fn ln(x: f64) -> f64 {
    if x.is_nan() || x < 0.0 {
        return f64::NAN;
    }
    if x == 0.0 {
        return f64::NEG_INFINITY;
    }
    if x.is_infinite() {
        return x;
    }
    // x = m * 2^e with m in [sqrt(1/2), sqrt(2)); subnormals are scaled up first.
    let (x, bias) = if x < f64::MIN_POSITIVE { (x * 2f64.powi(54), -54) } else { (x, 0) };
    let bits = x.to_bits();
    let mut e = ((bits >> 52) as i64) - 1023 + bias;
    let mut m = f64::from_bits((bits & 0x000f_ffff_ffff_ffff) | 0x3ff0_0000_0000_0000);
    if m > std::f64::consts::SQRT_2 {
        m *= 0.5;
        e += 1;
    }
    // ln m = 2 atanh(s), s = (m-1)/(m+1), |s| < 0.172: the series to s^23 is below 1e-19.
    let s = (m - 1.0) / (m + 1.0);
    let z = s * s;
    let mut p = 0.0;
    for k in (1..=11).rev() {
        p = (p + 1.0 / f64::from(2 * k + 1)) * z;
    }
    let ln2_hi = 6.931_471_803_691_238e-1;
    let ln2_lo = 1.908_214_929_270_588e-10;
    (2.0 * s).mul_add(p, 2.0 * s) + (e as f64).mul_add(ln2_lo, e as f64 * ln2_hi)
}

/// e^x in f64, within a few ulp, for |x| < 700.
pub fn exp64(x: f64) -> f64 {
    let n = (x * std::f64::consts::LOG2_E).round_ties_even();
    let r = n.mul_add(-1.908_214_929_270_588e-10, n.mul_add(-6.931_471_803_691_238e-1, x));
    // Taylor to r^13 on |r| <= ln2/2: the remainder is below 1e-17.
    let mut p = 1.0;
    for k in (1..=13).rev() {
        p = p * r / f64::from(k) + 1.0;
    }
    let n = (n as i64).clamp(-1022, 1023);
    p * f64::from_bits(((n + 1023) as u64) << 52)
}

/// base^e in f64 for base > 0.
pub fn pow64(base: f64, e: f64) -> f64 {
    exp64(ln(base) * e)
}

/// (sin, cos) of an f32 angle in radians, correct to about half an f32 ulp for |x| < 2^30.
///
/// The angle is exact in f64; it is reduced by a three-part pi/2 and the polynomials run in f64, so large positions
/// (a million tokens) are as exact as small ones.
pub fn sin_cos(x: f32) -> (f32, f32) {
    const PIO2_1: f64 = 1.570_796_326_734_125_6; // 33 bits of pi/2
    const PIO2_2: f64 = 6.077_100_506_303_966e-11; // the next 33 bits
    const PIO2_3: f64 = 2.022_266_248_795_950_6e-21;
    let x = f64::from(x);
    let n = (x * std::f64::consts::FRAC_2_PI).round_ties_even();
    let r = n.mul_add(-PIO2_3, n.mul_add(-PIO2_2, n.mul_add(-PIO2_1, x)));
    let z = r * r;
    let mut s = 0.0;
    let mut c = 0.0;
    for k in (1..=8).rev() {
        let k = f64::from(k);
        s = (s + 1.0) * -z / ((2.0 * k) * (2.0 * k + 1.0));
        c = (c + 1.0) * -z / ((2.0 * k - 1.0) * (2.0 * k));
    }
    let (s, c) = (s.mul_add(r, r), c + 1.0);
    match (n as i64) & 3 {
        0 => (s as f32, c as f32),
        1 => (c as f32, -s as f32),
        2 => (-s as f32, -c as f32),
        _ => (-c as f32, s as f32),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_close_to_libm_and_exact_at_zero() {
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(-1000.0), 0.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(89.0), f32::INFINITY);
        assert!(exp(f32::NAN).is_nan());
        let mut worst = 0.0f64;
        for i in 0..200_000 {
            let x = -87.0 + i as f32 * (175.0 / 200_000.0);
            let want = f64::from(x).exp();
            worst = worst.max((f64::from(exp(x)) - want).abs() / want);
        }
        assert!(worst < 2.5e-7, "relative error {worst:e}");
    }

    #[test]
    fn sin_cos_is_close_to_libm() {
        for i in 0..200_000u32 {
            let x = (i as f32) * 5.3 - 1000.0;
            let (s, c) = sin_cos(x);
            assert!((f64::from(s) - f64::from(x).sin()).abs() < 6e-8, "sin {x}");
            assert!((f64::from(c) - f64::from(x).cos()).abs() < 6e-8, "cos {x}");
        }
    }

    #[test]
    fn ln_and_pow_are_close_to_libm() {
        for i in 1..100_000 {
            let x = f64::from(i) * 0.37;
            assert!((ln(x) - x.ln()).abs() <= 4e-16 * x.ln().abs().max(1.0), "ln {x}");
        }
        for j in 0..64 {
            let e = f64::from(j) / 32.0;
            let want = 8e6f64.powf(e);
            assert!((pow64(8e6, e) - want).abs() / want < 1e-14, "{e}");
        }
    }
}
