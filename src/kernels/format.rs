//! How the numbers of a matrix are stored, and a borrowed view of one stored matrix.
#![forbid(unsafe_code)]

use std::fmt;
use std::str::FromStr;

use super::panel::panel_bytes;
use super::simd::LANES;

/// Inputs per activation group of the quantized dot product, and per scale of the 3-bit format.
pub const GROUP: usize = 64;
/// Side of the square blocks that share one scale in the FP8 format.
pub const FP8_BLOCK: usize = 128;

/// A stored number format. Bit layouts are in `docs/formats.md`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Format {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// The upper half of a single.
    Bf16,
    /// e4m3 codes with one f32 scale per 128×128 block.
    Fp8,
    /// Two's complement bytes with one scale per row.
    Int8,
    /// Nibbles, offset 8. `group` inputs share a scale; 0 means one scale per row.
    Int4 {
        /// Inputs per scale, or 0.
        group: u32,
    },
    /// Three bits, offset 4, in groups of 64 with a scale each.
    Int3,
    /// Two bits, offset 2, with one scale per row.
    Int2,
}

impl Format {
    /// Bytes of one stored row of `cols` numbers.
    pub fn row_bytes(self, cols: usize) -> usize {
        match self {
            Self::F32 => cols * 4,
            Self::F16 | Self::Bf16 => cols * 2,
            Self::Fp8 | Self::Int8 => cols,
            Self::Int4 { .. } => cols.div_ceil(2),
            Self::Int3 => cols.div_ceil(GROUP) * 24,
            Self::Int2 => cols.div_ceil(4),
        }
    }

    /// Number of f32 scales of a `rows`×`cols` matrix.
    pub fn n_scales(self, rows: usize, cols: usize) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::Bf16 => 0,
            Self::Fp8 => rows.div_ceil(FP8_BLOCK) * cols.div_ceil(FP8_BLOCK),
            _ => rows * self.scales_per_row(cols),
        }
    }

    /// Scales of one row, for the formats whose scales run along rows.
    pub fn scales_per_row(self, cols: usize) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::Bf16 | Self::Fp8 => 0,
            Self::Int8 | Self::Int2 | Self::Int4 { group: 0 } => 1,
            Self::Int4 { group } => cols.div_ceil(group as usize),
            Self::Int3 => cols.div_ceil(GROUP),
        }
    }

    /// Whether codes are integers, so that the int8-activation dot product applies.
    pub fn is_integer(self) -> bool {
        matches!(self, Self::Int8 | Self::Int4 { .. } | Self::Int3 | Self::Int2)
    }

    /// Stored bytes of a `rows`×`cols` matrix, scales included.
    pub fn total_bytes(self, rows: usize, cols: usize) -> usize {
        rows * self.row_bytes(cols) + 4 * self.n_scales(rows, cols)
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::F32 => f.write_str("f32"),
            Self::F16 => f.write_str("f16"),
            Self::Bf16 => f.write_str("bf16"),
            Self::Fp8 => f.write_str("fp8"),
            Self::Int8 => f.write_str("int8"),
            Self::Int4 { group: 0 } => f.write_str("int4-row"),
            Self::Int4 { group } => write!(f, "int4-g{group}"),
            Self::Int3 => f.write_str("int3"),
            Self::Int2 => f.write_str("int2"),
        }
    }
}

/// Group sizes that the container format knows.
pub const GROUP_SIZES: [u32; 8] = [16, 32, 48, 64, 96, 128, 192, 256];

impl FromStr for Format {
    type Err = String;

    /// Parses a format that weights can be quantized to.
    fn from_str(s: &str) -> Result<Self, String> {
        match s {
            "fp8" => return Ok(Self::Fp8),
            "int8" => return Ok(Self::Int8),
            "int4-row" => return Ok(Self::Int4 { group: 0 }),
            "int3" => return Ok(Self::Int3),
            "int2" => return Ok(Self::Int2),
            _ => {}
        }
        let group = s.strip_prefix("int4-g").and_then(|g| g.parse().ok());
        if let Some(group) = group.filter(|g| GROUP_SIZES.contains(g)) {
            return Ok(Self::Int4 { group });
        }
        Err(format!(
            "unknown format `{s}`, expected fp8, int8, int4-row, int4-gN (N = 16, 32, 48, 64, 96, 128, 192 or 256), int3 or int2"
        ))
    }
}

/// A borrowed matrix: `rows` rows of `cols` inputs, one output per row.
#[derive(Clone, Copy, Debug)]
pub struct MatView<'a> {
    format: Format,
    rows: usize,
    cols: usize,
    layout: Layout<'a>,
}

/// How a matrix lies in memory.
#[derive(Clone, Copy, Debug)]
enum Layout<'a> {
    /// As stored: row-major codes, scales apart.
    Rows { codes: &'a [u8], scales: &'a [f32] },
    /// Strips of 16 rows (`panel.rs`); integer formats only.
    Panels { strips: &'a [u8], strip: usize },
}

impl<'a> MatView<'a> {
    /// A view over `codes` and `scales` as stored.
    ///
    /// # Panics
    /// When the slices do not have exactly the sizes that the format asks for: kernels rely on them.
    pub fn new(
        format: Format,
        rows: usize,
        cols: usize,
        codes: &'a [u8],
        scales: &'a [f32],
    ) -> Self {
        assert_eq!(codes.len(), rows * format.row_bytes(cols), "codes of a {rows}×{cols} {format}");
        assert_eq!(scales.len(), format.n_scales(rows, cols), "scales of a {rows}×{cols} {format}");
        Self { format, rows, cols, layout: Layout::Rows { codes, scales } }
    }

    /// A view over panels.
    ///
    /// # Panics
    /// When the format has no panels, or the slice does not have their size.
    pub fn panels(format: Format, rows: usize, cols: usize, strips: &'a [u8]) -> Self {
        assert_eq!(
            Some(strips.len()),
            panel_bytes(format, rows, cols),
            "panels of a {rows}×{cols} {format}"
        );
        let strip = strips.len() / rows.div_ceil(LANES).max(1);
        Self { format, rows, cols, layout: Layout::Panels { strips, strip } }
    }

    /// Stored format.
    pub fn format(&self) -> Format {
        self.format
    }

    /// Number of rows, which is the number of outputs.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of columns, which is the number of inputs.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Whether the matrix lies in panels.
    #[inline(always)]
    pub fn in_panels(&self) -> bool {
        matches!(self.layout, Layout::Panels { .. })
    }

    /// The bytes of strip `s`: rows `16 s..16 s + 16`. Empty when the matrix is not in panels.
    #[inline(always)]
    pub(super) fn strip(&self, s: usize) -> &'a [u8] {
        match self.layout {
            Layout::Rows { .. } => &[],
            Layout::Panels { strips, strip } => &strips[s * strip..(s + 1) * strip],
        }
    }

    /// The stored bytes of row `r`. Empty when the matrix is in panels.
    #[inline(always)]
    pub fn row_codes(&self, r: usize) -> &'a [u8] {
        let n = self.format.row_bytes(self.cols);
        match self.layout {
            Layout::Rows { codes, .. } => &codes[r * n..(r + 1) * n],
            Layout::Panels { .. } => &[],
        }
    }

    /// The scales that apply to row `r` as stored: one, one per group, or one per 128 columns. Empty when the matrix is
    /// in panels.
    #[inline(always)]
    pub fn row_scales(&self, r: usize) -> &'a [f32] {
        let (at, n) = match self.format {
            Format::Fp8 => {
                let n = self.cols.div_ceil(FP8_BLOCK);
                (r / FP8_BLOCK * n, n)
            }
            f => {
                let n = f.scales_per_row(self.cols);
                (r * n, n)
            }
        };
        match self.layout {
            Layout::Rows { scales, .. } => &scales[at..at + n],
            Layout::Panels { .. } => &[],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        for f in ["fp8", "int8", "int4-row", "int4-g16", "int4-g64", "int4-g256", "int3", "int2"] {
            assert_eq!(f.parse::<Format>().unwrap().to_string(), f);
        }
        for f in ["int4-g", "int4-g0", "int4-g65", "int4-g-1", "bf16", ""] {
            assert!(f.parse::<Format>().is_err(), "{f}");
        }
    }

    #[test]
    fn sizes_of_one_expert_are_the_published_ones() {
        // GLM-5.2: hidden 6144, expert width 2048, gate + up + down.
        let expert = |f: Format| 2 * f.total_bytes(2048, 6144) + f.total_bytes(6144, 2048);
        assert_eq!(expert(Format::Int4 { group: 64 }), 21_233_664);
        assert_eq!(expert(Format::Int4 { group: 0 }), 18_915_328);
        assert_eq!(expert(Format::Int8), 37_789_696);
    }
}
