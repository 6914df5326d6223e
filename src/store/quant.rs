//! Which format a stored tensor is in, and packing of f32 rows into the formats.
//!
//! The bit layouts and the inference order are those of the int4/int8 containers in circulation (`docs/formats.md`).
//! Inference works on byte counts alone, so a writer must only produce what a reader infers back: see [`writable`].
#![forbid(unsafe_code)]

use anyhow::{Result, bail, ensure};
use rayon::prelude::*;

use crate::kernels::{E4M3, FP8_BLOCK, Format, GROUP, GROUP_SIZES};

/// Names that format stamps use, and the formats that are refused by name.
const STAMP_NAMES: [&str; 10] = [
    "f32",
    "int8-row",
    "int4-row",
    "int2-row",
    "int4-grouped",
    "int3-g64",
    "e8-iq3-lattice",
    "mxfp4",
    "fp8-e4m3-b128",
    "int4-rans256-g0",
];

/// The stamp name of a packed format.
pub fn stamp_name(format: Format) -> &'static str {
    match format {
        Format::F32 | Format::F16 | Format::Bf16 => "f32",
        Format::Int8 => "int8-row",
        Format::Int4 { group: 0 } => "int4-row",
        Format::Int4 { .. } => "int4-grouped",
        Format::Int3 => "int3-g64",
        Format::Int2 => "int2-row",
        Format::Fp8 => "fp8-e4m3-b128",
    }
}

/// What a file says about a packed matrix.
struct Packed<'a> {
    rows: usize,
    cols: usize,
    /// Bytes of codes and of scales.
    codes: usize,
    scales: usize,
    stamp: Option<&'a str>,
}

/// Infers the format of a packed `rows`×`cols` matrix from the byte counts of its codes and scales.
///
/// `stamp` is the metadata stamp for resident tensors; routed experts pass `None`. The order of the tests is part of
/// the container format.
///
/// # Errors
/// No layout fits, two fit and no stamp decides, the stamp disagrees, or the format is one that is not implemented.
pub fn infer(
    rows: usize,
    cols: usize,
    codes: usize,
    scales: usize,
    stamp: Option<&str>,
) -> Result<Format> {
    if let Some(name) = stamp {
        ensure!(
            STAMP_NAMES.contains(&name),
            "stamped with the unknown format `{name}`, expected one of {}",
            STAMP_NAMES.join(", ")
        );
        ensure!(
            name != "int4-rans256-g0",
            "format int4-rans256-g0 (entropy-coded) is not supported; repack it as int4 first"
        );
        ensure!(name != "mxfp4", "format mxfp4 is not supported");
    }
    let format = infer_bytes(&Packed { rows, cols, codes, scales, stamp })?;
    if let Some(name) = stamp {
        ensure!(
            name == stamp_name(format),
            "stamped `{name}`, but {codes} bytes of codes and {scales} of scales for {rows}×{cols} are {}",
            stamp_name(format)
        );
    }
    Ok(format)
}

fn infer_bytes(p: &Packed<'_>) -> Result<Format> {
    let Packed { rows, cols, codes, scales, stamp } = *p;
    let blocks = rows.div_ceil(FP8_BLOCK) * cols.div_ceil(FP8_BLOCK);
    let e8 = scales == 4 && codes == rows * cols.div_ceil(256) * 98;
    if e8 {
        const E8: &str = "format e8-iq3-lattice is not supported";
        let as_int8 = codes == rows * cols && rows == 1;
        let as_fp8 = codes == rows * cols && (blocks == 1 || blocks == 4);
        if !as_int8 && !as_fp8 {
            bail!("{E8}");
        }
        match stamp {
            Some("int8-row") if as_int8 => return Ok(Format::Int8),
            Some("fp8-e4m3-b128") if as_fp8 && blocks == 1 => return Ok(Format::Fp8),
            Some("e8-iq3-lattice") => bail!("{E8}"),
            _ => bail!(
                "{codes} bytes of codes and one scale for {rows}×{cols} fit e8, fp8 and int8; only a format stamp can decide"
            ),
        }
    }
    let format = if codes == rows * cols {
        return infer_bytes_per_code(p, blocks);
    } else if codes == rows * cols.div_ceil(2) {
        int4_group(rows, cols, scales)
    } else if codes == rows * cols.div_ceil(4) {
        Format::Int2
    } else if codes == rows * cols.div_ceil(GROUP) * 24 {
        Format::Int3
    } else {
        bail!(
            "{codes} bytes of codes fit no layout of {rows}×{cols}: expected {} (int8, fp8), {} (int4), {} (int2) or {} (int3)",
            rows * cols,
            rows * cols.div_ceil(2),
            rows * cols.div_ceil(4),
            rows * cols.div_ceil(GROUP) * 24
        )
    };
    let want = 4 * format.n_scales(rows, cols);
    ensure!(
        scales == want,
        "{scales} bytes of scales for a {rows}×{cols} {format} matrix, expected {want}"
    );
    Ok(format)
}

/// Grouped or per-row int4: the smallest known group size whose scale count fits.
fn int4_group(rows: usize, cols: usize, scales: usize) -> Format {
    let fits = |g: &&u32| **g as usize <= cols && scales == 4 * rows * cols.div_ceil(**g as usize);
    let group =
        if scales > 4 * rows { GROUP_SIZES.iter().find(fits).copied().unwrap_or(0) } else { 0 };
    Format::Int4 { group }
}

/// One byte per code: int8 per row, or fp8 with block scales.
fn infer_bytes_per_code(p: &Packed<'_>, blocks: usize) -> Result<Format> {
    let Packed { rows, cols, scales, stamp, .. } = *p;
    let (row, block, ue8m0) = (scales == 4 * rows, scales == 4 * blocks, scales == blocks);
    match (row, block) {
        // GLM-5.2's own o_proj has as many rows as blocks, so an unstamped tie must stay int8.
        (true, true) => match stamp {
            None | Some("int8-row") => Ok(Format::Int8),
            Some("fp8-e4m3-b128") => Ok(Format::Fp8),
            Some(other) => {
                bail!("stamped `{other}`, but the byte counts fit only int8-row and fp8-e4m3-b128")
            }
        },
        (true, false) if ue8m0 && stamp != Some("int8-row") => {
            bail!(
                "{scales} bytes of scales fit both int8-row and fp8 with UE8M0 scales; the latter is not supported, stamp the former"
            )
        }
        (true, false) => Ok(Format::Int8),
        (false, true) => Ok(Format::Fp8),
        (false, false) if ue8m0 => bail!("fp8 with one-byte UE8M0 scales is not supported"),
        (false, false) => bail!(
            "{scales} bytes of scales for a {rows}×{cols} matrix of bytes, expected {} (int8-row) or {} (fp8-e4m3-b128)",
            4 * rows,
            4 * blocks
        ),
    }
}

/// The format closest to `wanted` that a reader infers back from byte counts for this shape.
///
/// A group as wide as the row is the per-row format; ambiguous group sizes fall back to smaller ones, anything else
/// that would be misread to int8.
pub fn writable(wanted: Format, rows: usize, cols: usize) -> Format {
    let reads_back = |f: Format| {
        infer(rows, cols, rows * f.row_bytes(cols), 4 * f.n_scales(rows, cols), None)
            .is_ok_and(|g| g == f)
    };
    let mut candidates = vec![wanted];
    if let Format::Int4 { group } = wanted {
        if group as usize >= cols {
            candidates = vec![Format::Int4 { group: 0 }];
        } else if group > 0 {
            // Only sizes that divide an activation group: the others are slow to multiply.
            let smaller = GROUP_SIZES
                .iter()
                .rev()
                .filter(|&&g| g < group && GROUP.is_multiple_of(g as usize));
            candidates.extend(smaller.map(|&group| Format::Int4 { group }));
        }
    }
    candidates.push(Format::Int8);
    candidates.into_iter().find(|&f| reads_back(f)).unwrap_or(Format::F32)
}

/// Packs `rows` rows of `cols` values, produced by `row(r, out)`, into codes and scales.
///
/// Rounding rule: `qmax = 2^(bits-1) - 1`, `scale = max(absmax / qmax, 1e-8)`, `q = round-half-even(w / scale)`, clipped
/// to the code range; dequantized as `q * scale`. FP8: `scale = max(absmax / 448, 1e-8)` per block, codes rounded to
/// nearest even.
///
/// # Errors
/// A value is not finite.
pub fn pack(
    format: Format,
    rows: usize,
    cols: usize,
    row: impl Fn(usize, &mut [f32]) + Sync,
) -> Result<(Vec<u8>, Vec<f32>)> {
    let row_bytes = format.row_bytes(cols);
    let mut codes = vec![0u8; rows * row_bytes];
    let mut scales = vec![0f32; format.n_scales(rows, cols)];
    // A band is what shares scales: one row, or 128 rows of fp8.
    let band_rows = if format == Format::Fp8 { FP8_BLOCK } else { 1 };
    let band_scales = format.n_scales(band_rows.min(rows), cols);
    let pack_band = |band: usize, codes: &mut [u8], scales: &mut [f32]| -> Result<()> {
        let first = band * band_rows;
        let n = band_rows.min(rows - first);
        let mut values = vec![0f32; n * cols];
        for (i, out) in values.chunks_mut(cols).enumerate() {
            row(first + i, out);
            if let Some(c) = out.iter().position(|v| !v.is_finite()) {
                bail!(
                    "value at row {}, column {c} is {}, expected a finite number",
                    first + i,
                    out[c]
                );
            }
        }
        match format {
            Format::Fp8 => pack_fp8(&values, cols, codes, scales),
            _ => pack_row(format, &values, codes, scales),
        }
        Ok(())
    };
    if band_scales == 0 {
        codes
            .par_chunks_mut(row_bytes)
            .enumerate()
            .try_for_each(|(b, c)| pack_band(b, c, &mut []))?;
    } else {
        codes
            .par_chunks_mut(band_rows * row_bytes)
            .zip(scales.par_chunks_mut(band_scales))
            .enumerate()
            .try_for_each(|(b, (c, s))| pack_band(b, c, s))?;
    }
    Ok((codes, scales))
}

/// Scale of one group and its integer codes.
fn quantize(w: &[f32], bits: u32) -> (f32, impl Fn(f32) -> i32) {
    let qmax = ((1i32 << (bits - 1)) - 1) as f32;
    let absmax = w.iter().fold(0f32, |m, v| m.max(v.abs()));
    let scale = (absmax / qmax).max(1e-8);
    (scale, move |v: f32| (v / scale).round_ties_even().clamp(-qmax - 1.0, qmax) as i32)
}

fn pack_row(format: Format, w: &[f32], codes: &mut [u8], scales: &mut [f32]) {
    match format {
        Format::F32 => {
            for (o, v) in codes.as_chunks_mut::<4>().0.iter_mut().zip(w) {
                *o = v.to_le_bytes();
            }
        }
        Format::F16 => {
            for (o, v) in codes.as_chunks_mut::<2>().0.iter_mut().zip(w) {
                *o = half::f16::from_f32(*v).to_le_bytes();
            }
        }
        Format::Bf16 => {
            for (o, v) in codes.as_chunks_mut::<2>().0.iter_mut().zip(w) {
                *o = half::bf16::from_f32(*v).to_le_bytes();
            }
        }
        Format::Int8 => {
            let (scale, q) = quantize(w, 8);
            scales[0] = scale;
            for (o, &v) in codes.iter_mut().zip(w) {
                *o = q(v) as i8 as u8;
            }
        }
        Format::Int4 { group } => {
            let group = if group == 0 { w.len() } else { group as usize };
            for (g, w) in w.chunks(group).enumerate() {
                let (scale, q) = quantize(w, 4);
                scales[g] = scale;
                for (k, &v) in w.iter().enumerate() {
                    let at = g * group + k;
                    codes[at / 2] |= ((q(v) + 8) as u8) << (4 * (at % 2));
                }
            }
        }
        Format::Int2 => {
            let (scale, q) = quantize(w, 2);
            scales[0] = scale;
            for (k, &v) in w.iter().enumerate() {
                codes[k / 4] |= ((q(v) + 2) as u8) << (2 * (k % 4));
            }
        }
        Format::Int3 => {
            for (g, (w, o)) in w.chunks(GROUP).zip(codes.as_chunks_mut::<24>().0).enumerate() {
                let (scale, q) = quantize(w, 3);
                scales[g] = scale;
                for k in 0..GROUP {
                    // Padding elements are stored as code 4, which is zero.
                    let code = w.get(k).map_or(4, |&v| (q(v) + 4) as u8);
                    o[k / 4] |= (code & 3) << (2 * (k % 4));
                    o[16 + k / 8] |= (code >> 2) << (k % 8);
                }
            }
        }
        Format::Fp8 => unreachable!("fp8 is packed by blocks"),
    }
}

/// Up to 128 rows that share their scales.
fn pack_fp8(w: &[f32], cols: usize, codes: &mut [u8], scales: &mut [f32]) {
    for (b, scale) in scales.iter_mut().enumerate() {
        let span = b * FP8_BLOCK..((b + 1) * FP8_BLOCK).min(cols);
        let absmax =
            w.chunks(cols).flat_map(|r| &r[span.clone()]).fold(0f32, |m, v| m.max(v.abs()));
        *scale = (absmax / 448.0).max(1e-8);
        for (row, out) in w.chunks(cols).zip(codes.chunks_mut(cols)) {
            for c in span.clone() {
                out[c] = to_e4m3(row[c] / *scale);
            }
        }
    }
}

/// Nearest e4m3 code, ties to the even code, saturating at 448.
fn to_e4m3(v: f32) -> u8 {
    let sign = if v.is_sign_negative() { 0x80 } else { 0 };
    let a = v.abs().min(448.0);
    // Codes 0..=0x7e ascend in value: find the first that is not below, then choose between it and the one before.
    let hi = E4M3[..0x7f].partition_point(|&t| t < a).min(0x7e);
    let lo = hi.saturating_sub(1);
    let (down, up) = (a - E4M3[lo], E4M3[hi] - a);
    let code = if down < up || (down == up && lo % 2 == 0) { lo } else { hi };
    code as u8 | sign
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::{Isa, Kernels, MatView};

    const G64: Format = Format::Int4 { group: 64 };

    #[test]
    fn inference_follows_the_documented_order() {
        // (rows, cols, codes, scales, stamp) → format or a word of the error
        let ok = [
            (6, 128, 6 * 128, 24, None, Format::Int8),
            (6, 128, 6 * 64, 24, None, Format::Int4 { group: 0 }),
            (6, 128, 6 * 64, 48, None, G64),
            (6, 128, 6 * 32, 24, None, Format::Int2),
            (6, 128, 6 * 48, 48, None, Format::Int3),
            (300, 300, 90_000, 36, None, Format::Fp8),
            // 48 and 32 both give two groups of 64: the smaller wins.
            (4, 64, 128, 32, None, Format::Int4 { group: 32 }),
            // As many rows as blocks: int8 unless stamped.
            (1, 128, 128, 4, None, Format::Int8),
            (1, 128, 128, 4, Some("fp8-e4m3-b128"), Format::Fp8),
            (1, 128, 128, 4, Some("int8-row"), Format::Int8),
            (1, 98, 98, 4, Some("int8-row"), Format::Int8),
            (1, 98, 98, 4, Some("fp8-e4m3-b128"), Format::Fp8),
            (6144, 16384, 6144 * 16384, 4 * 6144, None, Format::Int8),
        ];
        for (r, c, nb, ns, stamp, want) in ok {
            assert_eq!(infer(r, c, nb, ns, stamp).unwrap(), want, "{r}×{c} {nb} {ns} {stamp:?}");
        }
        let err = [
            (6, 128, 6 * 128 - 1, 24, None, "fit no layout"),
            (6, 128, 6 * 128, 20, None, "bytes of scales"),
            (6, 128, 6 * 64, 40, None, "bytes of scales"),
            (1, 98, 98, 4, None, "only a format stamp"),
            (2, 256, 196, 4, None, "e8-iq3-lattice"),
            (1, 98, 98, 4, Some("e8-iq3-lattice"), "e8-iq3-lattice"),
            (6, 128, 6 * 128, 24, Some("int4-row"), "stamped `int4-row`"),
            (6, 128, 6 * 128, 24, Some("int5"), "unknown format"),
            (6, 128, 100, 24, Some("int4-rans256-g0"), "rans"),
            (300, 300, 90_000, 9, None, "UE8M0"),
            (512, 512, 512 * 512, 4 * 512 + 4, None, "bytes of scales"),
        ];
        for (r, c, nb, ns, stamp, word) in err {
            let e = infer(r, c, nb, ns, stamp).unwrap_err().to_string();
            assert!(e.contains(word), "{r}×{c} {nb} {ns} {stamp:?}: {e}");
        }
    }

    #[test]
    fn what_is_written_reads_back() {
        for f in [
            Format::Fp8,
            Format::Int8,
            Format::Int4 { group: 0 },
            G64,
            Format::Int4 { group: 128 },
            Format::Int3,
            Format::Int2,
        ] {
            for (r, c) in [
                (1, 128),
                (4, 48),
                (4, 64),
                (4, 80),
                (7, 20),
                (128, 300),
                (1, 98),
                (256, 128),
                (6144, 16384),
            ] {
                let w = writable(f, r, c);
                let back = infer(r, c, r * w.row_bytes(c), 4 * w.n_scales(r, c), None);
                assert!(w == Format::F32 || back.unwrap() == w, "{f} {r}×{c} → {w}");
            }
        }
        assert_eq!(writable(G64, 10, 256), G64);
        assert_eq!(writable(G64, 10, 64), Format::Int4 { group: 0 });
        assert_eq!(writable(G64, 10, 80), Format::Int4 { group: 32 });
        assert_eq!(
            writable(Format::Int3, 10, 48),
            Format::Int8,
            "48 columns of int3 look like int4"
        );
    }

    #[test]
    fn packing_follows_the_rounding_rule() {
        let k = Kernels::for_isa(Isa::Portable).unwrap();
        let (rows, cols) = (3, 130);
        let value = |r: usize, c: usize| ((r * cols + c) as f32 * 0.7).sin() * (1.0 + r as f32);
        for f in [
            Format::Int8,
            Format::Int4 { group: 0 },
            G64,
            Format::Int4 { group: 48 },
            Format::Int3,
            Format::Int2,
            Format::Fp8,
        ] {
            let (codes, scales) = pack(f, rows, cols, |r, o| {
                o.iter_mut().enumerate().for_each(|(c, v)| *v = value(r, c));
            })
            .unwrap();
            let w = MatView::new(f, rows, cols, &codes, &scales);
            for r in 0..rows {
                let mut out = vec![0.0; cols];
                k.dequant_row(&w, r, &mut out);
                for c in 0..cols {
                    let err = (out[c] - value(r, c)).abs();
                    let absmax = 1.0 + if f == Format::Fp8 { 2.0 } else { r as f32 };
                    let step = match f {
                        Format::Int8 => absmax / 127.0,
                        Format::Int4 { .. } => absmax / 7.0,
                        Format::Int3 => absmax / 3.0,
                        Format::Int2 => absmax,
                        _ => absmax / 14.0,
                    };
                    assert!(
                        err <= step * 0.5001,
                        "{f} ({r},{c}): off by {err}, half a step is {}",
                        step / 2.0
                    );
                }
            }
        }
    }

    #[test]
    fn fp8_codes_round_to_nearest_even() {
        for (b, &t) in E4M3.iter().enumerate().filter(|(b, _)| b & 0x7f != 0x7f) {
            assert_eq!(to_e4m3(t), b as u8, "code {b:#x}");
        }
        assert_eq!(to_e4m3(17.0), to_e4m3(16.0), "17 is half way between 16 (even) and 18");
        assert_eq!(to_e4m3(19.0), to_e4m3(20.0));
        assert_eq!(to_e4m3(1e9), 0x7e);
    }

    #[test]
    fn a_value_that_is_not_finite_is_named() {
        let e = pack(Format::Int8, 2, 3, |r, o| o.fill(if r == 1 { f32::NAN } else { 1.0 }))
            .unwrap_err();
        assert_eq!(e.to_string(), "value at row 1, column 0 is NaN, expected a finite number");
    }
}
