//! Arithmetic on rows: one table of primitives per instruction set, chosen once, all giving the same bits.
//!
//! A kernel handles a range of outputs; splitting work over threads is the caller's business. `portable.rs` defines
//! every primitive; a [`Kernels`] of another instruction set can only be had on a CPU that supports it, so holding one
//! is the proof that its functions may be called.

mod acts;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod format;
mod isa;
pub mod math;
mod portable;
#[cfg(test)]
mod tests;

use std::cell::RefCell;

pub use acts::{Activations, Acts, Band, Input, Q8Row};
pub use format::{FP8_BLOCK, Format, GROUP, GROUP_SIZES, MatView};
pub use isa::Isa;
pub(crate) use portable::E4M3;

use crate::pool::TileMut;

/// Rows of an attention cache: `width` values per position.
#[derive(Clone, Copy)]
pub enum Keys<'a> {
    /// Stored as f32.
    F32 {
        /// (positions, width)
        data: &'a [f32],
        /// Values per row.
        width: usize,
    },
    /// Stored as f16 bits.
    F16 {
        /// (positions, width)
        data: &'a [u16],
        /// Values per row.
        width: usize,
    },
}

impl Keys<'_> {
    fn len(&self) -> usize {
        match *self {
            Keys::F32 { data, width } => data.len() / width,
            Keys::F16 { data, width } => data.len() / width,
        }
    }

    fn width(&self) -> usize {
        match *self {
            Keys::F32 { width, .. } | Keys::F16 { width, .. } => width,
        }
    }
}

/// Positions that one query attends to, ascending.
#[derive(Clone, Copy)]
pub enum KeySet<'a> {
    /// Positions `0..n`.
    All(usize),
    /// These positions.
    Chosen(&'a [u32]),
}

impl KeySet<'_> {
    /// Number of positions.
    #[inline(always)]
    pub fn len(&self) -> usize {
        match self {
            KeySet::All(n) => *n,
            KeySet::Chosen(p) => p.len(),
        }
    }

    /// Whether there is no position.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    #[inline(always)]
    fn at(&self, i: usize) -> usize {
        match self {
            KeySet::All(_) => i,
            KeySet::Chosen(p) => p[i] as usize,
        }
    }
}

/// Per-thread buffers that kernels unpack into; they grow to the largest row and stay.
#[derive(Default)]
struct Scratch {
    row: Vec<f32>,
    codes: Vec<i8>,
    block: Vec<f32>,
}

impl Scratch {
    /// Space for one row of `cols` values and its codes padded to whole groups.
    fn row(&mut self, cols: usize) -> (&mut [f32], &mut [i8]) {
        let padded = cols.next_multiple_of(GROUP);
        if self.row.len() < cols {
            self.row.resize(cols, 0.0);
        }
        if self.codes.len() < padded {
            self.codes.resize(padded, 0);
        }
        (&mut self.row[..cols], &mut self.codes[..padded])
    }

    fn block(&mut self, n: usize) -> &mut [f32] {
        if self.block.len() < n {
            self.block.resize(n, 0.0);
        }
        &mut self.block[..n]
    }
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

fn with_scratch<R>(f: impl FnOnce(&mut Scratch) -> R) -> R {
    SCRATCH.with_borrow_mut(f)
}

/// One set of primitives. Holding a `&'static Kernels` proves that the CPU supports it.
pub struct Kernels {
    isa: Isa,
    dot: unsafe fn(&[f32], &[f32]) -> f32,
    axpy: unsafe fn(f32, &[f32], &mut [f32]),
    rms_norm: unsafe fn(&[f32], &[f32], f32, &mut [f32]) -> bool,
    layer_norm: unsafe fn(&mut [f32], &[f32], &[f32], f32),
    silu_mul: unsafe fn(&mut [f32], &[f32]),
    quantize_row: unsafe fn(&[f32], &mut [i8], &mut [f32], &mut [i32]) -> bool,
    dequant_row: unsafe fn(&MatView<'_>, usize, &mut [f32], &mut Scratch),
    matmul_f32: unsafe fn(&MatView<'_>, usize, &Input<'_>, &mut TileMut<'_>, &mut Scratch),
    matmul_q8: unsafe fn(&MatView<'_>, usize, &Input<'_>, &mut TileMut<'_>, &mut Scratch),
    attend: unsafe fn(&[f32], &Keys<'_>, &KeySet<'_>, f32, &mut [f32], &mut Scratch),
    index_scores: unsafe fn(&[f32], &[f32], &Keys<'_>, usize, f32, &mut [f32], &mut Scratch),
}

/// Compiles the portable bodies for one instruction set and puts them into `TABLE`.
///
/// `$simd` is the set's hand-written part; `$features` what the bodies are compiled with.
macro_rules! table {
    ($isa:expr, $simd:ty $(, $features:literal)?) => {
        use crate::kernels::portable;
        use crate::kernels::{Input, Isa, Kernels, KeySet, Keys, MatView, Scratch};
        use crate::pool::TileMut;

        pub(in crate::kernels) static TABLE: Kernels = Kernels {
            isa: $isa,
            dot,
            axpy,
            rms_norm,
            layer_norm,
            silu_mul,
            quantize_row,
            dequant_row,
            matmul_f32,
            matmul_q8,
            attend,
            index_scores,
        };

        $(#[target_feature(enable = $features)])?
        fn dot(a: &[f32], b: &[f32]) -> f32 {
            portable::dot::<$simd>(a, b)
        }
        $(#[target_feature(enable = $features)])?
        fn axpy(a: f32, x: &[f32], y: &mut [f32]) {
            portable::axpy(a, x, y);
        }
        $(#[target_feature(enable = $features)])?
        fn rms_norm(x: &[f32], w: &[f32], eps: f32, y: &mut [f32]) -> bool {
            portable::rms_norm::<$simd>(x, w, eps, y)
        }
        $(#[target_feature(enable = $features)])?
        fn layer_norm(x: &mut [f32], w: &[f32], b: &[f32], eps: f32) {
            portable::layer_norm::<$simd>(x, w, b, eps);
        }
        $(#[target_feature(enable = $features)])?
        fn silu_mul(g: &mut [f32], u: &[f32]) {
            portable::silu_mul(g, u);
        }
        $(#[target_feature(enable = $features)])?
        fn quantize_row(x: &[f32], q: &mut [i8], s: &mut [f32], sums: &mut [i32]) -> bool {
            portable::quantize_row(x, q, s, sums)
        }
        $(#[target_feature(enable = $features)])?
        fn dequant_row(w: &MatView<'_>, r: usize, out: &mut [f32], scratch: &mut Scratch) {
            portable::dequant_row(w, r, out, scratch.row(w.cols()).1);
        }
        $(#[target_feature(enable = $features)])?
        fn matmul_f32(w: &MatView<'_>, r: usize, x: &Input<'_>, t: &mut TileMut<'_>, scratch: &mut Scratch) {
            portable::matmul_f32::<$simd>(w, r, x, t, scratch);
        }
        $(#[target_feature(enable = $features)])?
        fn matmul_q8(w: &MatView<'_>, r: usize, x: &Input<'_>, t: &mut TileMut<'_>, scratch: &mut Scratch) {
            portable::matmul_q8::<$simd>(w, r, x, t, scratch);
        }
        $(#[target_feature(enable = $features)])?
        fn attend(q: &[f32], k: &Keys<'_>, set: &KeySet<'_>, scale: f32, out: &mut [f32], scratch: &mut Scratch) {
            portable::attend::<$simd>(q, k, set, scale, out, scratch);
        }
        $(#[target_feature(enable = $features)])?
        fn index_scores(q: &[f32], w: &[f32], k: &Keys<'_>, first: usize, scale: f32, out: &mut [f32], scratch: &mut Scratch) {
            portable::index_scores::<$simd>(q, w, k, first, scale, out, scratch);
        }
    };
}
#[cfg(target_arch = "x86_64")]
use table;

mod scalar {
    table!(Isa::Portable, portable::Scalar);
}

impl Kernels {
    /// The table of `isa`, or `None` when this CPU lacks it.
    pub fn for_isa(isa: Isa) -> Option<&'static Self> {
        if !isa.is_available() {
            return None;
        }
        match isa {
            Isa::Portable => Some(&scalar::TABLE),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => Some(&avx2::TABLE),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => Some(&avx512::bw::TABLE),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Vnni => Some(&avx512::vnni::TABLE),
            #[cfg(not(target_arch = "x86_64"))]
            _ => None,
        }
    }

    /// The fastest table that this CPU has.
    pub fn best() -> &'static Self {
        Self::for_isa(Isa::best()).unwrap_or(&scalar::TABLE)
    }

    /// The instruction set of this table.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Dot product of two rows of equal length.
    ///
    /// # Panics
    /// When `b` is shorter than `a`.
    #[inline]
    pub fn dot(&self, a: &[f32], b: &[f32]) -> f32 {
        // SAFETY: a table is only handed out on a CPU with its features (`for_isa`).
        unsafe { (self.dot)(a, b) }
    }

    /// `y = fma(a, x, y)` per element of the shorter of the two.
    #[inline]
    pub fn axpy(&self, a: f32, x: &[f32], y: &mut [f32]) {
        // SAFETY: as in `dot`.
        unsafe { (self.axpy)(a, x, y) }
    }

    /// RMS norm of a row into `y`; false when the sum of squares is not finite.
    #[must_use]
    pub fn rms_norm(&self, x: &[f32], w: &[f32], eps: f32, y: &mut [f32]) -> bool {
        // SAFETY: as in `dot`.
        unsafe { (self.rms_norm)(x, w, eps, y) }
    }

    /// Layer norm of a row in place.
    pub fn layer_norm(&self, x: &mut [f32], w: &[f32], b: &[f32], eps: f32) {
        // SAFETY: as in `dot`.
        unsafe { (self.layer_norm)(x, w, b, eps) }
    }

    /// `g = silu(g) * u` per element.
    pub fn silu_mul(&self, g: &mut [f32], u: &[f32]) {
        // SAFETY: as in `dot`.
        unsafe { (self.silu_mul)(g, u) }
    }

    /// Quantizes one activation row to int8 groups of 64; false when a value is not finite.
    ///
    /// # Panics
    /// When `q`, `scales` or `sums` are shorter than the groups of `x`.
    #[must_use]
    pub fn quantize_row(
        &self,
        x: &[f32],
        q: &mut [i8],
        scales: &mut [f32],
        sums: &mut [i32],
    ) -> bool {
        // SAFETY: as in `dot`.
        unsafe { (self.quantize_row)(x, q, scales, sums) }
    }

    /// Row `r` of `w` as f32.
    pub fn dequant_row(&self, w: &MatView<'_>, r: usize, out: &mut [f32]) {
        assert_eq!(out.len(), w.cols(), "one value per column");
        // SAFETY: as in `dot`.
        with_scratch(|s| unsafe { (self.dequant_row)(w, r, out, s) });
    }

    /// `tile[i][o] = w[first + o] · x[i]` for every row `i` and column `o` of the tile.
    ///
    /// # Panics
    /// When the widths differ, or `w` or `x` have too few rows.
    pub fn matmul(&self, w: &MatView<'_>, first: usize, x: &Input<'_>, tile: &mut TileMut<'_>) {
        assert_eq!(w.cols(), x.cols(), "inputs of the matrix and of the activations");
        assert!(
            first + tile.cols().len() <= w.rows() && tile.rows().len() <= x.rows(),
            "tile inside the product"
        );
        let f = if x.uses_q8(w.format()) { self.matmul_q8 } else { self.matmul_f32 };
        // SAFETY: as in `dot`.
        with_scratch(|s| unsafe { f(w, first, x, tile, s) });
    }

    /// Softmax attention of one query over the chosen cache rows; `out` is the weighted mean of their first
    /// `out.len()` values.
    ///
    /// # Panics
    /// When the widths differ or a position is not in the cache.
    pub fn attend(
        &self,
        q: &[f32],
        keys: &Keys<'_>,
        set: &KeySet<'_>,
        scale: f32,
        out: &mut [f32],
    ) {
        assert!(
            q.len() == keys.width() && out.len() <= q.len(),
            "width of a query and of a cache row"
        );
        assert!(set.is_empty() || set.at(set.len() - 1) < keys.len(), "positions inside the cache");
        // SAFETY: as in `dot`.
        with_scratch(|s| unsafe { (self.attend)(q, keys, set, scale, out, s) });
    }

    /// Indexer scores of the positions `first..first + out.len()` for one query.
    ///
    /// # Panics
    /// When the widths differ or a position is not in the cache.
    pub fn index_scores(
        &self,
        q: &[f32],
        w: &[f32],
        keys: &Keys<'_>,
        first: usize,
        scale: f32,
        out: &mut [f32],
    ) {
        assert!(q.len() == w.len() * keys.width(), "width of a query and of an index key");
        assert!(first + out.len() <= keys.len(), "positions inside the cache");
        // SAFETY: as in `dot`.
        with_scratch(|s| unsafe { (self.index_scores)(q, w, keys, first, scale, out, s) });
    }
}
