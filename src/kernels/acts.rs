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
    bias: Vec<i32>,   // (rows, groups): -8 × the sum of the codes
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
        self.size(mode);
        let q8 = self.q8.then_some((&mut self.q[..], &mut self.scales[..], &mut self.bias[..]));
        Band { x: &self.x, cols: self.cols.max(1), q8 }.prepare(kernels)
    }

    /// Makes room for the int8 form of the rows if `mode` asks for it.
    fn size(&mut self, mode: Activations) {
        self.q8 = mode == Activations::Q8;
        if self.q8 {
            let groups = self.cols.div_ceil(GROUP);
            let n = self.x.len() / self.cols.max(1) * groups;
            self.q.resize(n * GROUP, 0);
            self.scales.resize(n, 0.0);
            self.bias.resize(n, 0);
        }
    }

    /// Cuts the rows into bands of about `values` values that can be prepared in parallel. All of them must be.
    pub fn bands(&mut self, mode: Activations, values: usize) -> Vec<Band<'_>> {
        let cols = self.cols.max(1);
        let rows = self.x.len() / cols;
        let step = (values / cols).clamp(1, rows.max(1));
        self.size(mode);
        if !self.q8 {
            return self.x.chunks(step * cols).map(|x| Band { x, cols, q8: None }).collect();
        }
        let groups = cols.div_ceil(GROUP);
        let q = self.q.chunks_mut(step * groups * GROUP);
        let scales = self.scales.chunks_mut(step * groups);
        let bias = self.bias.chunks_mut(step * groups);
        let q8 = q.zip(scales).zip(bias).map(|((q, scales), bias)| Some((q, scales, bias)));
        self.x.chunks(step * cols).zip(q8).map(|(x, q8)| Band { x, cols, q8 }).collect()
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

/// Some rows of [`Acts`] whose int8 form is still to be made.
pub struct Band<'a> {
    x: &'a [f32],
    cols: usize,
    /// Codes, scales and biases of these rows; `None` when only f32 is wanted.
    q8: Option<(&'a mut [i8], &'a mut [f32], &'a mut [i32])>,
}

impl Band<'_> {
    /// Makes the int8 form. Returns false when a value is not finite.
    #[must_use]
    pub fn prepare(&mut self, kernels: &Kernels) -> bool {
        let Some((q, scales, bias)) = &mut self.q8 else {
            return self.x.iter().all(|v| v.is_finite());
        };
        let groups = self.cols.div_ceil(GROUP);
        let rows = self.x.chunks(self.cols).zip(q.chunks_mut(groups * GROUP));
        let sides = scales.chunks_mut(groups).zip(bias.chunks_mut(groups));
        // Not `all`, which would stop at the first row that is not finite and leave the others stale.
        let mut finite = true;
        for ((x, q), (scales, bias)) in rows.zip(sides) {
            finite &= kernels.quantize_row(x, q, scales, bias);
        }
        finite
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
#[derive(Clone, Copy)]
pub struct Q8Row<'a> {
    /// Codes in -127..=127, zero padded to whole groups.
    pub codes: &'a [i8],
    /// One scale per group of 64.
    pub scales: &'a [f32],
    /// -8 × the sum of the codes of each group: what integer sums over weight codes with offset 8 start with.
    pub bias: &'a [i32],
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
            bias: &a.bias[g],
        }
    }
}
