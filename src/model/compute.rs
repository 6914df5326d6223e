//! What the layers compute with: kernels, threads, activation mode, and products split over threads.
#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicBool, Ordering};

use crate::kernels::{Activations, Acts, Input, Kernels};
use crate::pool::{Bands, Pool};
use crate::store::Mat;

/// Multiply-adds below which a product is not worth another task.
const TASK_WORK: usize = 1 << 15;
/// Multiply-adds of a section that takes milliseconds.
const LONG_WORK: usize = 1 << 27;
/// Outputs of a task are a multiple of two strips: kernels read two at once.
const TASK_COLS: usize = 32;

/// Kernels, threads and activation mode of one engine.
pub struct Compute {
    /// Instruction set.
    pub kernels: &'static Kernels,
    /// Threads.
    pub pool: Pool,
    /// How products with integer-coded matrices read their input.
    pub activations: Activations,
}

impl Compute {
    /// `out[i][o] = w[o] · x[i]` for `rows` rows.
    pub fn matmul(&self, w: &Mat, x: Input<'_>, rows: usize, out: &mut [f32]) {
        if rows == 0 {
            return;
        }
        let view = w.view();
        let chunk = self.chunk(w.rows(), w.cols() * rows, 1);
        self.pool.par_tiles(out, w.rows(), Bands::Every(rows), chunk, |_, mut tile| {
            self.kernels.matmul(&view, tile.cols().start, &x, &mut tile);
        });
    }

    /// Columns per task when each column costs `work` multiply-adds and `bands` bands of rows are split alike.
    pub fn chunk(&self, cols: usize, work: usize, bands: usize) -> usize {
        let by_work = (TASK_WORK / work.max(1)).max(1);
        // A few tasks per thread even out a core that is slower for a while; long sections take more of them, because
        // the others wait for the last.
        let long = cols.saturating_mul(work).saturating_mul(bands) >= LONG_WORK;
        let per_thread = if long { 16 } else { 8 };
        let tasks = (per_thread * self.pool.threads()).div_ceil(bands.max(1));
        let chunk = by_work.max(cols.div_ceil(tasks));
        // Few outputs are rather split below two strips than left to one thread.
        if chunk >= TASK_COLS / 2 { chunk.next_multiple_of(TASK_COLS) } else { chunk }
    }

    /// RMS norm of the rows of `x` into `y`, ready for products. False when a value is not finite.
    #[must_use]
    pub fn norm(&self, x: &[f32], w: &[f32], eps: f32, y: &mut Acts) -> bool {
        let d = w.len();
        self.norm_rows(x, w, eps, y.fill(x.len() / d, d)) && self.prepare(y)
    }

    /// RMS norm of the rows of `x` into those of `y`. False when a sum of squares is not finite.
    #[must_use]
    pub fn norm_rows(&self, x: &[f32], w: &[f32], eps: f32, y: &mut [f32]) -> bool {
        let d = w.len();
        let finite = AtomicBool::new(true);
        self.pool.par_tiles(y, d, Bands::Every(self.band(d)), d, |_, mut tile| {
            for (i, r) in tile.rows().enumerate() {
                let x = &x[r * d..(r + 1) * d];
                if !self.kernels.rms_norm(x, w, eps, tile.row(i)) {
                    finite.store(false, Ordering::Relaxed);
                }
            }
        });
        finite.into_inner()
    }

    /// Makes the int8 form of filled rows if the activation mode asks for it. False when a value is not finite.
    #[must_use]
    pub fn prepare(&self, acts: &mut Acts) -> bool {
        if acts.rows().len() <= TASK_WORK {
            return acts.prepare(self.kernels, self.activations);
        }
        let finite = AtomicBool::new(true);
        let bands = acts.bands(self.activations, TASK_WORK);
        self.pool.par_each(bands, |mut band| {
            if !band.prepare(self.kernels) {
                finite.store(false, Ordering::Relaxed);
            }
        });
        finite.into_inner()
    }

    /// Rows of `width` values that are worth a task.
    pub fn band(&self, width: usize) -> usize {
        (TASK_WORK / width.max(1)).max(1)
    }
}
