//! Activations as matrix kernels read them: rows of f32 and, when asked for, their int8 form.
#![forbid(unsafe_code)]

use super::format::GROUP;
use super::{Format, Kernels};

/// Whether products with integer-coded matrices use int8 activations or exact f32 ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activations {
    /// int8 in groups of 64, exact integer dot products: the default.
    Q8,
    /// f32 activations against dequantized weights.
    F32,
}

/// One layer input, prepared once and read by every matrix that multiplies it.
#[derive(Default)]
pub struct Acts {
    cols: usize,
    x: Vec<f32>, // (rows, cols)
    q8: bool,
    q: Vec<i8>,       // (rows, groups * 64), zero padded
    scales: Vec<f32>, // (rows, groups)
    sums: Vec<i32>,   // (rows, groups)
}

impl Acts {
    /// Resizes to `rows` × `cols` and returns the f32 rows to fill; follow with [`Acts::prepare`].
    pub fn fill(&mut self, rows: usize, cols: usize) -> &mut [f32] {
        self.cols = cols;
        self.x.resize(rows * cols, 0.0);
        self.q8 = false;
        &mut self.x
    }

    /// Makes the int8 form if `mode` asks for it. Returns false when a value is not finite.
    #[must_use]
    pub fn prepare(&mut self, kernels: &Kernels, mode: Activations) -> bool {
        let cols = self.cols;
        let rows = self.x.len() / cols.max(1);
        self.q8 = mode == Activations::Q8;
        if !self.q8 {
            return self.x.iter().all(|v| v.is_finite());
        }
        let groups = cols.div_ceil(GROUP);
        self.q.resize(rows * groups * GROUP, 0);
        self.scales.resize(rows * groups, 0.0);
        self.sums.resize(rows * groups, 0);
        let mut finite = true;
        for r in 0..rows {
            let g = r * groups..(r + 1) * groups;
            finite &= kernels.quantize_row(
                &self.x[r * cols..(r + 1) * cols],
                &mut self.q[g.start * GROUP..g.end * GROUP],
                &mut self.scales[g.clone()],
                &mut self.sums[g],
            );
        }
        finite
    }

    /// The f32 rows.
    pub fn rows(&self) -> &[f32] {
        &self.x
    }

    /// All rows as kernel input, starting at row `first`.
    pub fn input(&self, first: usize) -> Input<'_> {
        Input { acts: self, pick: None, first, exact: false }
    }

    /// The rows named by `pick`, in that order.
    pub fn picked<'a>(&'a self, pick: &'a [u32]) -> Input<'a> {
        Input { acts: self, pick: Some(pick), first: 0, exact: false }
    }
}

/// A sequence of activation rows for one product.
#[derive(Clone, Copy)]
pub struct Input<'a> {
    acts: &'a Acts,
    pick: Option<&'a [u32]>,
    first: usize,
    exact: bool,
}

/// The int8 form of one activation row.
pub struct Q8Row<'a> {
    /// Codes in -127..=127, zero padded to whole groups.
    pub codes: &'a [i8],
    /// One scale per group of 64.
    pub scales: &'a [f32],
    /// Sum of the codes of each group.
    pub sums: &'a [i32],
}

impl<'a> Input<'a> {
    #[inline(always)]
    fn index(&self, i: usize) -> usize {
        self.pick.map_or(self.first + i, |p| p[i] as usize)
    }

    /// The same rows, read as f32 whatever the matrix' format.
    pub fn exact(self) -> Self {
        Self { exact: true, ..self }
    }

    /// Number of inputs of one row.
    pub fn cols(&self) -> usize {
        self.acts.cols
    }

    /// Number of rows that can be read.
    pub fn rows(&self) -> usize {
        match self.pick {
            Some(p) => p.len(),
            None => (self.acts.x.len() / self.acts.cols.max(1)).saturating_sub(self.first),
        }
    }

    /// Whether a product with a matrix of this format uses the int8 form.
    pub fn uses_q8(&self, format: Format) -> bool {
        self.acts.q8 && !self.exact && format.is_integer()
    }

    /// Row `i` in f32.
    #[inline(always)]
    pub fn f32_row(&self, i: usize) -> &'a [f32] {
        let (r, n) = (self.index(i), self.acts.cols);
        &self.acts.x[r * n..(r + 1) * n]
    }

    /// Row `i` in int8. Only after `prepare(.., Q8)`.
    #[inline(always)]
    pub fn q8_row(&self, i: usize) -> Q8Row<'a> {
        let n = self.acts.cols.div_ceil(GROUP);
        let g = self.index(i) * n..(self.index(i) + 1) * n;
        let a = self.acts;
        Q8Row {
            codes: &a.q[g.start * GROUP..g.end * GROUP],
            scales: &a.scales[g.clone()],
            sums: &a.sums[g],
        }
    }
}
