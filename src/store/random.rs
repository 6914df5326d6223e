//! Random matrices in every format, made as codes: for synthetic models.
//!
//! A byte depends on seed, tensor name and place alone, and only integer and exactly rounded operations make it, so
//! every machine and thread count gives the same. Codes are symmetric around zero: the one code without a counterpart
//! (−8 of int4) becomes 0, because a mean other than zero adds the same vector to every token, and then every token
//! goes to the same experts.
#![forbid(unsafe_code)]

use rayon::prelude::*;

use crate::kernels::{E4M3, Format};

/// Bytes that are worth a task of their own.
const MIN_BYTES: usize = 1 << 16;
/// The lowest bit of every field of a word.
const BYTES: u64 = u64::MAX / 0xff;
const NIBBLES: u64 = u64::MAX / 0xf;
const PAIRS: u64 = u64::MAX / 0x3;

/// A random matrix, or a vector as one row, that exists only as the bytes that are asked for.
#[derive(Clone, Copy, Debug)]
pub struct RandomMat {
    format: Format,
    rows: usize,
    cols: usize,
    mean: f32,
    deviation: f64,
    words: Words,
}

impl RandomMat {
    /// Numbers with mean zero and this standard deviation. `seed` and `name` choose them.
    pub fn new(
        format: Format,
        rows: usize,
        cols: usize,
        deviation: f64,
        seed: u64,
        name: &str,
    ) -> Self {
        Self { format, rows, cols, mean: 0.0, deviation, words: Words::named(seed, name) }
    }

    /// The same around another mean, for float formats: packed ones have mean zero.
    pub fn around(self, mean: f32) -> Self {
        Self { mean, ..self }
    }

    /// The stored codes; of a float format, the numbers, which are near normal.
    pub fn codes(&self) -> Vec<u8> {
        let row_bytes = self.format.row_bytes(self.cols);
        let mut codes = vec![0; self.rows * row_bytes];
        if codes.is_empty() {
            return codes;
        }
        let rows = codes.par_chunks_mut(row_bytes).with_min_len(MIN_BYTES.div_ceil(row_bytes));
        rows.enumerate().for_each(|(r, row)| self.fill_row(self.words.fork(r as u64), row));
        codes
    }

    /// The stored scales: those that give the standard deviation, each up to 20% off.
    pub fn scales(&self) -> Vec<u8> {
        let scale = (self.deviation / code_deviation(self.format)) as f32;
        // No row has this number.
        let words = self.words.fork(u64::MAX);
        let mut bytes = vec![0; 4 * self.format.n_scales(self.rows, self.cols)];
        let (scales, _) = bytes.as_chunks_mut::<4>();
        let scales = scales.par_iter_mut().with_min_len(MIN_BYTES / 4).enumerate();
        scales.for_each(|(i, s)| {
            let share = (words.at(i as u64) >> 40) as f32 / (1u32 << 24) as f32;
            *s = (scale * (0.8 + 0.4 * share)).to_le_bytes();
        });
        bytes
    }

    fn fill_row(&self, words: Words, row: &mut [u8]) {
        let k = self.deviation / (f64::from(u32::MAX) / 3.0).sqrt();
        let number = |i: usize| self.mean + (k * f64::from(sum_of_four(words.at(i as u64)))) as f32;
        match self.format {
            Format::F32 => {
                for (i, o) in row.as_chunks_mut::<4>().0.iter_mut().enumerate() {
                    *o = number(i).to_le_bytes();
                }
            }
            Format::F16 => {
                for (i, o) in row.as_chunks_mut::<2>().0.iter_mut().enumerate() {
                    *o = half::f16::from_f32(number(i)).to_le_bytes();
                }
            }
            Format::Bf16 => {
                for (i, o) in row.as_chunks_mut::<2>().0.iter_mut().enumerate() {
                    *o = half::bf16::from_f32(number(i)).to_le_bytes();
                }
            }
            Format::Fp8 => fill(words, row, without_nan),
            Format::Int8 => fill(words, row, without_lowest_byte),
            Format::Int4 { .. } => {
                fill(words, row, |w| w | zero_nibbles(w) << 3);
                keep_fields(row, 4, self.cols);
            }
            Format::Int2 => {
                fill(words, row, |w| w | zero_pairs(w) << 1);
                keep_fields(row, 2, self.cols);
            }
            Format::Int3 => fill_int3(words, row, self.cols),
        }
    }
}

/// Random 64-bit words that can be read at any place (splitmix64).
#[derive(Clone, Copy, Debug)]
struct Words(u64);

impl Words {
    fn named(seed: u64, name: &str) -> Self {
        // FNV-1a.
        let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325, |h: u64, b| {
            (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3)
        });
        Self(Self(seed).at(0) ^ hash)
    }

    /// Words of their own, such as those of one row.
    fn fork(self, i: u64) -> Self {
        Self(self.at(i))
    }

    #[inline]
    fn at(self, i: u64) -> u64 {
        let z = self.0.wrapping_add(i.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

/// The sum of a word's four 16-bit numbers around zero: near normal, variance (2³² − 1) / 3.
fn sum_of_four(w: u64) -> i32 {
    let sum: u64 = (0..4).map(|i| (w >> (16 * i)) & 0xffff).sum();
    sum as i32 - 2 * 0xffff
}

/// Standard deviation of the codes of a packed format, all codes being equally likely but the one that became 0.
fn code_deviation(format: Format) -> f64 {
    // ±1 to ±q among 2^bits codes.
    let symmetric = |bits: i32, q: u32| {
        (f64::from(q * (q + 1) * (2 * q + 1) / 3) / f64::from(2u32.pow(bits as u32))).sqrt()
    };
    match format {
        Format::Int8 => symmetric(8, 127),
        Format::Int4 { .. } => symmetric(4, 7),
        Format::Int3 => symmetric(3, 3),
        Format::Int2 => symmetric(2, 1),
        Format::Fp8 => {
            let squares: f64 = E4M3[..0x7f].iter().map(|&v| f64::from(v) * f64::from(v)).sum();
            (squares / 128.0).sqrt()
        }
        Format::F32 | Format::F16 | Format::Bf16 => 1.0,
    }
}

/// Fills `row` with words after `repair`.
#[inline]
fn fill(words: Words, row: &mut [u8], repair: impl Fn(u64) -> u64) {
    let (whole, rest) = row.as_chunks_mut::<8>();
    for (i, o) in whole.iter_mut().enumerate() {
        *o = repair(words.at(i as u64)).to_le_bytes();
    }
    let last = repair(words.at(whole.len() as u64)).to_le_bytes();
    rest.copy_from_slice(&last[..rest.len()]);
}

/// Groups of 64: 16 bytes of low pairs, 8 bytes of third bits. Stored 0 becomes 4, which is zero and also the padding.
fn fill_int3(words: Words, row: &mut [u8], cols: usize) {
    for (g, o) in row.as_chunks_mut::<24>().0.iter_mut().enumerate() {
        let word = |i: usize| words.at((3 * g + i) as u64);
        let used = cols - 64 * g;
        let kept = |w: u64, used: usize| if used < 32 { w & ((1 << (2 * used)) - 1) } else { w };
        let low = [kept(word(0), used), kept(word(1), used.saturating_sub(32))];
        let padding = if used < 64 { u64::MAX << used } else { 0 };
        let zeros = squeeze(zero_pairs(low[0])) | squeeze(zero_pairs(low[1])) << 32;
        let third = word(2) & !padding | zeros | padding;
        for (o, w) in o.as_chunks_mut::<8>().0.iter_mut().zip([low[0], low[1], third]) {
            *o = w.to_le_bytes();
        }
    }
}

/// Clears what follows the first `n` fields of the row's last byte.
fn keep_fields(row: &mut [u8], bits: usize, n: usize) {
    let used = n * bits % 8;
    if let Some(last) = row.last_mut().filter(|_| used > 0) {
        *last &= (1 << used) - 1;
    }
}

/// The e4m3 codes of NaN become zeros.
fn without_nan(w: u64) -> u64 {
    let magnitudes = w & (BYTES * 0x7f);
    let nan = (magnitudes + BYTES) & (BYTES * 0x80);
    w & !(nan - (nan >> 7))
}

/// −128 becomes 0.
fn without_lowest_byte(w: u64) -> u64 {
    let others = ((w & (BYTES * 0x7f)) + BYTES * 0x7f) | !w;
    w ^ (!others & (BYTES * 0x80))
}

/// The lowest bit of every nibble that is zero.
fn zero_nibbles(w: u64) -> u64 {
    !(w | w >> 1 | w >> 2 | w >> 3) & NIBBLES
}

/// The lower bit of every pair that is zero.
fn zero_pairs(w: u64) -> u64 {
    !(w | w >> 1) & PAIRS
}

/// The even bits, one after the other.
fn squeeze(w: u64) -> u64 {
    let mut w = w & PAIRS;
    for (shift, mask) in [
        (1, 0x3333_3333_3333_3333),
        (2, 0x0f0f_0f0f_0f0f_0f0f),
        (4, 0x00ff_00ff_00ff_00ff),
        (8, 0x0000_ffff_0000_ffff),
        (16, 0x0000_0000_ffff_ffff),
    ] {
        w = (w | w >> shift) & mask;
    }
    w
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::{Kernels, MatView};
    use crate::store::quant;

    const FORMATS: [Format; 10] = [
        Format::F32,
        Format::F16,
        Format::Bf16,
        Format::Fp8,
        Format::Int8,
        Format::Int4 { group: 0 },
        Format::Int4 { group: 64 },
        Format::Int4 { group: 32 },
        Format::Int3,
        Format::Int2,
    ];

    fn values(m: &RandomMat) -> Vec<f32> {
        let (codes, scales) = (m.codes(), m.scales());
        let scales: Vec<f32> =
            scales.as_chunks().0.iter().map(|b: &[u8; 4]| f32::from_le_bytes(*b)).collect();
        let view = MatView::new(m.format, m.rows, m.cols, &codes, &scales);
        let mut out = vec![0.0; m.rows * m.cols];
        for (r, row) in out.chunks_mut(m.cols).enumerate() {
            Kernels::best().dequant_row(&view, r, row);
        }
        out
    }

    #[test]
    fn numbers_have_mean_zero_and_the_deviation_asked_for() {
        for f in FORMATS {
            let m = RandomMat::new(f, 500, 331, 0.02, 7, "x");
            let v = values(&m);
            let n = v.len() as f64;
            let mean = v.iter().map(|&x| f64::from(x)).sum::<f64>() / n;
            let deviation = (v.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / n).sqrt();
            assert!(mean.abs() < 5.0 * 0.02 / n.sqrt(), "{f}: mean {mean}");
            // The 12 scales of fp8 differ by chance.
            let tolerance = if f == Format::Fp8 { 0.1 } else { 0.03 };
            assert!((deviation / 0.02 - 1.0).abs() < tolerance, "{f}: deviation {deviation}");
        }
        let near_one = values(&RandomMat::new(Format::F32, 1, 5000, 0.1, 7, "x").around(1.0));
        assert!(near_one.iter().all(|v| (0.6..1.4).contains(v)));
    }

    /// What is stored is what packing its own values would store: no code without a counterpart, padding as documented.
    #[test]
    fn codes_are_those_a_packer_may_write() {
        for f in FORMATS {
            for cols in [1, 3, 7, 30, 64, 70, 130, 331] {
                let m = RandomMat::new(f, 40, cols, 1.0, 3, "x");
                let unit = RandomMat { deviation: code_deviation(f), ..m };
                let codes = unit.codes();
                assert_eq!(codes.len(), 40 * f.row_bytes(cols), "{f} {cols}");
                if !f.is_integer() {
                    assert!(values(&m).iter().all(|v| v.is_finite()), "{f} {cols}");
                    continue;
                }
                // A row that also holds the largest code is packed with a scale of exactly one.
                let q = match f {
                    Format::Int8 => 127.0,
                    Format::Int4 { .. } => 7.0,
                    Format::Int3 => 3.0,
                    _ => 1.0f32,
                };
                let ones = vec![1.0; f.n_scales(40, cols)];
                let view = MatView::new(f, 40, cols, &codes, &ones);
                for r in 0..40 {
                    let mut row = vec![0.0; cols];
                    Kernels::best().dequant_row(&view, r, &mut row);
                    assert!(row.iter().all(|v| v.abs() <= q), "{f} {cols}: {row:?}");
                    if f.scales_per_row(cols) > 1 || !row.iter().any(|v| v.abs() == q) {
                        continue;
                    }
                    let (packed, _) =
                        quant::pack(f, 1, cols, |_, o| o.copy_from_slice(&row)).unwrap();
                    assert_eq!(packed, view.row_codes(r), "{f} {cols}: row {r}");
                }
            }
        }
    }

    #[test]
    fn other_seeds_names_and_rows_give_other_bytes() {
        let codes = |seed, name| RandomMat::new(Format::Int8, 2, 64, 1.0, seed, name).codes();
        assert_eq!(codes(1, "a"), codes(1, "a"));
        assert_ne!(codes(1, "a"), codes(2, "a"));
        assert_ne!(codes(1, "a"), codes(1, "b"));
        assert_ne!(codes(1, "a")[..64], codes(1, "a")[64..]);
    }
}
