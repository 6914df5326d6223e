//! Arithmetic on rows: one table of primitives per instruction set, chosen once, all giving the same bits.
//!
//! A kernel handles a range of outputs; splitting work over threads is the caller's business. `portable.rs` defines
//! every primitive; a [`Kernels`] of another instruction set can only be had on a CPU that supports it, so holding one
//! is the proof that its functions may be called.

mod acts;
#[cfg(target_arch = "x86_64")]
mod amx;
mod attention;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod format;
mod isa;
pub mod math;
#[cfg(target_arch = "aarch64")]
mod neon;
mod panel;
mod portable;
mod product;
mod simd;
#[cfg(test)]
mod tests;
#[cfg(any(test, target_arch = "x86_64"))]
mod tiles;

use std::cell::RefCell;

pub use acts::{Activations, Acts, Band, Input, Q8Row};
pub use format::{FP8_BLOCK, Format, GROUP, GROUP_SIZES, MatView};
pub use isa::Isa;
pub use panel::panel_bytes;
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
#[derive(Clone, Copy, Debug)]
pub enum KeySet<'a> {
    /// Positions `0..n`.
    All(usize),
    /// These positions.
    Chosen(&'a [u32]),
}

impl KeySet<'_> {
    /// Number of positions.
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
}

/// What a group of queries sees of one cache.
#[derive(Clone, Copy, Debug)]
pub enum Seen<'a> {
    /// Per query the number of first positions that it sees.
    First(&'a [usize]),
    /// The same ascending positions for every query.
    Chosen(&'a [u32]),
}

impl Seen<'_> {
    /// Number of positions that query `i` sees.
    #[inline(always)]
    fn of(&self, i: usize) -> usize {
        match self {
            Seen::First(n) => n[i],
            Seen::Chosen(p) => p.len(),
        }
    }

    /// Most positions that a query sees.
    #[inline(always)]
    fn longest(&self) -> usize {
        match self {
            Seen::First(n) => n.iter().fold(0, |a, &b| a.max(b)),
            Seen::Chosen(p) => p.len(),
        }
    }
}

/// Per-thread buffers that kernels work in; they grow to what is needed and stay.
#[derive(Default)]
struct Scratch {
    row: Vec<f32>,
    /// Packed strips.
    strips: Vec<u8>,
    codes: Vec<i8>,
    scales: Vec<f32>,
    rows: Vec<f32>,
    parts: Vec<f32>,
    #[cfg(any(test, target_arch = "x86_64"))]
    tiles: tiles::TileScratch,
}

impl Scratch {
    /// Space for the codes of one row, padded to whole groups.
    fn codes(&mut self, cols: usize) -> &mut [i8] {
        self.codes_and_scales(cols, 0).0
    }

    /// Space for the codes of one row, padded to whole groups, and for its scales.
    fn codes_and_scales(&mut self, cols: usize, scales: usize) -> (&mut [i8], &mut [f32]) {
        let padded = cols.next_multiple_of(GROUP);
        if self.codes.len() < padded {
            self.codes.resize(padded, 0);
        }
        if self.scales.len() < scales {
            self.scales.resize(scales, 0.0);
        }
        (&mut self.codes[..padded], &mut self.scales[..scales])
    }

    /// Separate buffers of these lengths; what they hold is left over from earlier calls.
    fn parts<const N: usize>(&mut self, lengths: [usize; N]) -> [&mut [f32]; N] {
        let total = lengths.iter().sum();
        if self.parts.len() < total {
            self.parts.resize(total, 0.0);
        }
        let mut rest = self.parts.as_mut_slice();
        lengths.map(|n| {
            let (part, left) = std::mem::take(&mut rest).split_at_mut(n);
            rest = left;
            part
        })
    }
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

fn with_scratch<R>(f: impl FnOnce(&mut Scratch) -> R) -> R {
    SCRATCH.with_borrow_mut(f)
}

/// Rows of f32 with a distance between them: row `i` starts at `i * stride`.
pub struct Strided<T> {
    /// The values.
    pub data: T,
    /// Values from one row to the next.
    pub stride: usize,
}

/// One set of primitives. Holding a `&'static Kernels` proves that the CPU supports it.
pub struct Kernels {
    isa: Isa,
    stream: unsafe fn(&[u8], usize) -> u64,
    dot: unsafe fn(&[f32], &[f32]) -> f32,
    axpy: unsafe fn(f32, &[f32], &mut [f32]),
    rms_norm: unsafe fn(&[f32], &[f32], f32, &mut [f32]) -> bool,
    layer_norm: unsafe fn(&mut [f32], &[f32], &[f32], f32),
    silu_mul: unsafe fn(&mut [f32], &[f32]),
    quantize_row: unsafe fn(&[f32], &mut [i8], &mut [f32], &mut [i32]) -> bool,
    dequant_row: unsafe fn(&MatView<'_>, usize, &mut [f32], &mut Scratch),
    pack_strip: unsafe fn(&MatView<'_>, usize, &mut [u8], &mut Scratch),
    matmul_f32: unsafe fn(&MatView<'_>, usize, &Input<'_>, &mut TileMut<'_>, &mut Scratch),
    matmul_rows: unsafe fn(&MatView<'_>, usize, &Input<'_>, &mut TileMut<'_>, &mut Scratch),
    matmul_panels: unsafe fn(&MatView<'_>, usize, &Input<'_>, &mut TileMut<'_>, &mut Scratch),
    attend: unsafe fn(&[f32], &Keys<'_>, &Seen<'_>, f32, &mut [f32], &mut Scratch),
    absorb: unsafe fn(
        &MatView<'_>,
        usize,
        usize,
        (&[f32], usize),
        (&mut [f32], usize),
        usize,
        &mut Scratch,
    ),
    index_scores: unsafe fn(&[f32], &[f32], &Keys<'_>, usize, f32, &mut [f32], &mut Scratch),
}

/// Compiles the generic bodies for one instruction set and puts them into `TABLE`.
///
/// `$simd` is the set's hand-written part; `$features` what the bodies are compiled with.
macro_rules! table {
    ($isa:expr, $simd:ty $(, $features:literal)?) => {
        use crate::kernels::{Input, Isa, Kernels, Keys, MatView, Scratch, Seen};
        use crate::kernels::{attention, panel, portable, product};
        use crate::pool::TileMut;

        pub(in crate::kernels) static TABLE: Kernels = Kernels {
            isa: $isa,
            stream,
            dot,
            axpy,
            rms_norm,
            layer_norm,
            silu_mul,
            quantize_row,
            dequant_row,
            pack_strip,
            matmul_f32,
            matmul_rows,
            matmul_panels,
            attend,
            absorb,
            index_scores,
        };

        $(#[target_feature(enable = $features)])?
        fn stream(bytes: &[u8], ahead: usize) -> u64 {
            portable::stream::<$simd>(bytes, ahead)
        }
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
        fn quantize_row(x: &[f32], q: &mut [i8], s: &mut [f32], bias: &mut [i32]) -> bool {
            portable::quantize_row(x, q, s, bias)
        }
        $(#[target_feature(enable = $features)])?
        fn dequant_row(w: &MatView<'_>, r: usize, out: &mut [f32], scratch: &mut Scratch) {
            portable::dequant_into::<$simd>(w, r, out, scratch);
        }
        $(#[target_feature(enable = $features)])?
        fn pack_strip(w: &MatView<'_>, s: usize, out: &mut [u8], scratch: &mut Scratch) {
            panel::pack_strip::<$simd>(w, s, out, scratch.codes(w.cols()));
        }
        $(#[target_feature(enable = $features)])?
        fn matmul_f32(w: &MatView<'_>, r: usize, x: &Input<'_>, t: &mut TileMut<'_>, scratch: &mut Scratch) {
            product::matmul_f32::<$simd>(w, r, x, t, scratch);
        }
        $(#[target_feature(enable = $features)])?
        fn matmul_rows(w: &MatView<'_>, r: usize, x: &Input<'_>, t: &mut TileMut<'_>, scratch: &mut Scratch) {
            product::matmul_rows::<$simd>(w, r, x, t, scratch);
        }
        $(#[target_feature(enable = $features)])?
        fn matmul_panels(w: &MatView<'_>, r: usize, x: &Input<'_>, t: &mut TileMut<'_>, scratch: &mut Scratch) {
            product::matmul_panels::<$simd>(w, r, x, t, scratch);
        }
        $(#[target_feature(enable = $features)])?
        fn attend(q: &[f32], k: &Keys<'_>, seen: &Seen<'_>, scale: f32, out: &mut [f32], scratch: &mut Scratch) {
            attention::attend::<$simd>(q, k, seen, scale, out, scratch);
        }
        $(#[target_feature(enable = $features)])?
        fn absorb(
            w: &MatView<'_>,
            first: usize,
            terms: usize,
            q: (&[f32], usize),
            out: (&mut [f32], usize),
            n: usize,
            scratch: &mut Scratch,
        ) {
            attention::absorb::<$simd>(w, first, terms, q, out, n, scratch);
        }
        $(#[target_feature(enable = $features)])?
        fn index_scores(q: &[f32], w: &[f32], k: &Keys<'_>, first: usize, scale: f32, out: &mut [f32], scratch: &mut Scratch) {
            attention::index_scores::<$simd>(q, w, k, first, scale, out, scratch);
        }
    };
}
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use table;

mod scalar {
    table!(Isa::Portable, crate::kernels::simd::Scalar);
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
            Isa::Avx2 => Some(&avx2::plain::TABLE),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2Vnni => Some(&avx2::vnni::TABLE),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => Some(&avx512::bw::TABLE),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Vnni => Some(&avx512::vnni::TABLE),
            #[cfg(target_arch = "x86_64")]
            Isa::Amx => Some(&amx::TABLE),
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => Some(&neon::plain::TABLE),
            #[cfg(target_arch = "aarch64")]
            Isa::NeonDot => Some(&neon::dot::TABLE),
            #[cfg(target_arch = "aarch64")]
            Isa::NeonI8mm => Some(&neon::mm::TABLE),
            // Sets of another architecture are never available.
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

    /// Reads every whole piece of 256 bytes once, in order, fetching `ahead` bytes ahead (0: not): what a product can
    /// at best be as fast as.
    pub fn stream(&self, bytes: &[u8], ahead: usize) -> u64 {
        // SAFETY: a table is only handed out on a CPU with its features (`for_isa`).
        unsafe { (self.stream)(bytes, ahead) }
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

    /// Quantizes one activation row to int8 groups of 64; `bias` is -8 × the sum of each group's codes. False when a
    /// value is not finite.
    ///
    /// # Panics
    /// When `q`, `scales` or `bias` are shorter than the groups of `x`.
    #[must_use]
    pub fn quantize_row(
        &self,
        x: &[f32],
        q: &mut [i8],
        scales: &mut [f32],
        bias: &mut [i32],
    ) -> bool {
        // SAFETY: as in `dot`.
        unsafe { (self.quantize_row)(x, q, scales, bias) }
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
        // SAFETY: as in `dot`.
        with_scratch(|s| unsafe {
            match (x.uses_q8(w.format()), w.in_panels()) {
                (false, _) => (self.matmul_f32)(w, first, x, tile, s),
                (true, true) => (self.matmul_panels)(w, first, x, tile, s),
                (true, false) => (self.matmul_rows)(w, first, x, tile, s),
            }
        });
    }

    /// Writes strip `s` (rows `16 s..16 s + 16`) of a stored integer matrix in the layout of panels.
    ///
    /// # Panics
    /// When the format has no panels, `w` already lies in them, or `out` is not one strip.
    pub fn pack_strip(&self, w: &MatView<'_>, s: usize, out: &mut [u8]) {
        assert!(!w.in_panels() && s * simd::LANES < w.rows(), "a strip of a matrix as stored");
        let strip = panel_bytes(w.format(), 1, w.cols());
        assert_eq!(Some(out.len()), strip, "bytes of one strip");
        // SAFETY: as in `dot`.
        with_scratch(|scratch| unsafe { (self.pack_strip)(w, s, out, scratch) });
    }

    /// Softmax attention of a group of queries over what they see of a cache: `q` is (n, width of a cache row), `out` is
    /// (n, rank), the weighted mean of the rows' first `rank` values. Every query must see at least one position.
    ///
    /// # Panics
    /// When the sizes do not fit or a position is not in the cache.
    pub fn attend(&self, q: &[f32], keys: &Keys<'_>, seen: &Seen<'_>, scale: f32, out: &mut [f32]) {
        let n = q.len() / keys.width();
        assert!(n * keys.width() == q.len() && out.len().is_multiple_of(n.max(1)), "whole queries");
        assert!(out.len() <= q.len(), "an output is a part of a cache row");
        match seen {
            Seen::First(count) => assert!(
                count.len() == n && seen.longest() <= keys.len(),
                "positions inside the cache"
            ),
            Seen::Chosen(p) => {
                assert!(p.iter().all(|&p| (p as usize) < keys.len()), "positions inside the cache");
            }
        }
        if n == 0 || out.is_empty() {
            return;
        }
        assert!((0..n).all(|i| seen.of(i) > 0), "every query sees a position");
        // SAFETY: as in `dot`.
        with_scratch(|s| unsafe { (self.attend)(q, keys, seen, scale, out, s) });
    }

    /// `out[i][c] = Σ_k q[i][k] w[first + k][c]` for `n` queries and `k < terms`, ascending k: queries moved into latent
    /// space.
    ///
    /// # Panics
    /// When rows are missing in `w`, `q` or `out`.
    pub fn absorb(
        &self,
        w: &MatView<'_>,
        first: usize,
        terms: usize,
        q: &Strided<&[f32]>,
        out: &mut Strided<&mut [f32]>,
        n: usize,
    ) {
        assert!(first + terms <= w.rows(), "rows of the matrix");
        let holds = |len: usize, stride: usize, row: usize| n == 0 || (n - 1) * stride + row <= len;
        assert!(
            holds(q.data.len(), q.stride, terms) && holds(out.data.len(), out.stride, w.cols()),
            "rows of the queries and of the outputs"
        );
        // SAFETY: as in `dot`.
        with_scratch(|s| unsafe {
            (self.absorb)(w, first, terms, (q.data, q.stride), (out.data, out.stride), n, s);
        });
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
        assert!(!w.is_empty() && q.len() == w.len() * keys.width(), "heads of the width of a key");
        assert!(first + out.len() <= keys.len(), "positions inside the cache");
        // SAFETY: as in `dot`.
        with_scratch(|s| unsafe { (self.index_scores)(q, w, keys, first, scale, out, s) });
    }
}
