//! Products with many activation rows on int8 matrix tiles.
//!
//! A block of a strip, unpacked to signed bytes, is a right-hand tile as it lies: 16 quads × 16 rows × 4 codes. 16
//! activation rows × 64 codes are a left-hand tile, and one tile product is the exact int32 sums of 16 × 16 outputs over
//! one 64-group, so the float chain per output is that of every other kernel.
//!
//! Blocks are taken 16 at a time and unpacked once for up to 64 activation rows. Four result tiles rotate: the sums of a batch
//! are scaled while the next one is multiplied, because reading a tile right after it was stored waits for the store.
#![forbid(unsafe_code)]

use super::format::{GROUP, MatView};
use super::panel::{Codes, VECTOR};
use super::product::{lanes, put};
use super::simd::{LANES, Simd, each};
use super::{Input, Scratch};
use crate::pool::TileMut;

/// Blocks that are unpacked at a time: 16 KiB of codes.
const BLOCKS: usize = 16;
/// Result tiles in rotation.
const ROTATE: usize = 4;
/// Activation rows that share unpacked blocks: their codes and partial results stay in the L2 cache.
const ROWS: usize = 64;

/// Bytes of a tile: 16 rows of 64.
pub(super) type Tile = [[i8; VECTOR]; LANES];
/// Exact sums: 16 activation rows × 16 outputs.
pub(super) type Sums = [[i32; LANES]; LANES];

/// The few tile operations that the kernel needs: tiles 0 to 3 hold sums, 4 and 5 weights, 6 and 7 activations.
pub(super) trait Tiles {
    /// Sets the shapes up for this thread; undone when dropped.
    fn configure() -> Self;
    fn zero<const T: usize>(&mut self);
    fn load<const T: usize>(&mut self, from: &Tile);
    /// `sums[C] += activations[A] · weights[W]` over 64 inputs.
    fn dot<const C: usize, const A: usize, const W: usize>(&mut self);
    fn store<const T: usize>(&mut self, to: &mut Sums);
}

/// Tiles in plain memory: the definition, for tests on every machine.
pub(super) struct PlainTiles {
    sums: [Sums; ROTATE],
    operands: [Tile; 4],
}

impl Tiles for PlainTiles {
    fn configure() -> Self {
        // Not zero: a kernel must not rely on it.
        Self { sums: [[[77; LANES]; LANES]; ROTATE], operands: [[[3; VECTOR]; LANES]; 4] }
    }

    fn zero<const T: usize>(&mut self) {
        self.sums[T] = [[0; LANES]; LANES];
    }

    fn load<const T: usize>(&mut self, from: &Tile) {
        self.operands[T - ROTATE] = *from;
    }

    fn dot<const C: usize, const A: usize, const W: usize>(&mut self) {
        let (x, w) = (&self.operands[A - ROTATE], &self.operands[W - ROTATE]);
        for (sums, x) in self.sums[C].iter_mut().zip(x) {
            for (k, w) in w.iter().enumerate() {
                for (i, &w) in w.iter().enumerate() {
                    sums[i / 4] += i32::from(x[4 * k + i % 4]) * i32::from(w);
                }
            }
        }
    }

    fn store<const T: usize>(&mut self, to: &mut Sums) {
        *to = self.sums[T];
    }
}

/// Buffers of the kernel.
#[derive(Default)]
pub(super) struct TileScratch {
    activations: Vec<Tile>,     // (row tiles, blocks)
    scales: Vec<[f32; LANES]>,  // (row tiles, blocks)
    weights: Vec<Tile>,         // BLOCKS
    partial: Vec<[f32; LANES]>, // (row tiles, 16)
}

/// All rows of `x` against the strips that the tile covers.
#[inline(always)]
pub(super) fn matmul<T: Tiles, S: Simd, C: Codes, const SCALED: bool>(
    w: &MatView<'_>,
    first: usize,
    x: &Input<'_>,
    tile: &mut TileMut<'_>,
    scratch: &mut Scratch,
) {
    let blocks = w.cols().div_ceil(GROUP);
    let stride = C::BYTES + if SCALED { 4 * LANES } else { 0 };
    let rows = tile.rows().len();
    let s = &mut scratch.tiles;
    s.weights.resize(BLOCKS, [[0; VECTOR]; LANES]);
    let mut tiles = T::configure();
    for from in (0..rows).step_by(ROWS) {
        let n = ROWS.min(rows - from);
        let row_tiles = n.div_ceil(LANES);
        gather(x, from, n, blocks, s);
        for strip_at in first / LANES..(first + tile.cols().len()).div_ceil(LANES) {
            let strip = w.strip(strip_at);
            s.partial.clear();
            s.partial.resize(row_tiles * LANES, [0.0; LANES]);
            for b in (0..blocks).step_by(BLOCKS) {
                let len = BLOCKS.min(blocks - b);
                let part = &strip[b * stride..(b + len) * stride];
                for (block, out) in part.chunks_exact(stride).zip(&mut s.weights) {
                    if S::PREFETCH > 0 {
                        for line in 0..stride / VECTOR {
                            S::prefetch(block, S::PREFETCH + VECTOR * line);
                        }
                    }
                    S::signed::<C>(&block[..C::BYTES], out);
                }
                for t in 0..row_tiles {
                    let at = t * blocks + b;
                    add_blocks::<T, S, C, SCALED>(
                        &mut tiles,
                        part,
                        &s.weights[..len],
                        &s.activations[at..at + len],
                        &s.scales[at..at + len],
                        &mut s.partial[t * LANES..(t + 1) * LANES],
                    );
                }
            }
            for (i, y) in s.partial[..n].iter_mut().enumerate() {
                if !SCALED {
                    let scaled = S::mul(S::load(y), lanes::<S>(strip, blocks * stride));
                    S::store(scaled, y);
                }
                put(tile, from + i, strip_at, first, y);
            }
        }
    }
}

/// Lays the codes and scales of `n` activation rows out in tiles; rows that do not exist are zero.
#[inline(always)]
fn gather(x: &Input<'_>, from: usize, n: usize, blocks: usize, s: &mut TileScratch) {
    let row_tiles = n.div_ceil(LANES);
    s.activations.resize(row_tiles * blocks, [[0; VECTOR]; LANES]);
    s.scales.resize(row_tiles * blocks, [0.0; LANES]);
    for r in 0..row_tiles * LANES {
        let (t, i) = (r / LANES, r % LANES);
        if r >= n {
            for b in 0..blocks {
                s.activations[t * blocks + b][i] = [0; VECTOR];
                s.scales[t * blocks + b][i] = 0.0;
            }
            continue;
        }
        let q = x.q8_row(from + r);
        for (b, codes) in q.codes.as_chunks::<GROUP>().0.iter().enumerate() {
            s.activations[t * blocks + b][i] = *codes;
            s.scales[t * blocks + b][i] = q.scales[b];
        }
    }
}

/// Adds up to 16 blocks to the partial results of 16 activation rows.
#[inline(always)]
fn add_blocks<T: Tiles, S: Simd, C: Codes, const SCALED: bool>(
    tiles: &mut T,
    part: &[u8],
    weights: &[Tile],
    activations: &[Tile],
    scales: &[[f32; LANES]],
    partial: &mut [[f32; LANES]],
) {
    let stride = part.len() / weights.len();
    let mut acc = each!(i in 0..LANES, S::load(&partial[i]));
    // Two batches of sums: one is filled while the other is scaled.
    let mut sums = [[[[0i32; LANES]; LANES]; ROTATE]; 2];
    let batches = weights.len().div_ceil(ROTATE);
    for batch in 0..=batches {
        if batch < batches {
            let at = batch * ROTATE;
            let left = weights.len() - at;
            tiles.zero::<0>();
            tiles.load::<6>(&activations[at]);
            tiles.load::<4>(&weights[at]);
            tiles.dot::<0, 6, 4>();
            if left > 1 {
                tiles.zero::<1>();
                tiles.load::<7>(&activations[at + 1]);
                tiles.load::<5>(&weights[at + 1]);
                tiles.dot::<1, 7, 5>();
            }
            if left > 2 {
                tiles.zero::<2>();
                tiles.load::<6>(&activations[at + 2]);
                tiles.load::<4>(&weights[at + 2]);
                tiles.dot::<2, 6, 4>();
            }
            if left > 3 {
                tiles.zero::<3>();
                tiles.load::<7>(&activations[at + 3]);
                tiles.load::<5>(&weights[at + 3]);
                tiles.dot::<3, 7, 5>();
            }
        }
        if batch > 0 {
            let at = (batch - 1) * ROTATE;
            let done = &sums[(batch - 1) % 2];
            for (b, sums) in (at..weights.len().min(at + ROTATE)).zip(done) {
                for i in 0..LANES {
                    let sx = S::splat(scales[b][i]);
                    let s = match SCALED {
                        true => S::mul(lanes::<S>(part, b * stride + C::BYTES), sx),
                        false => sx,
                    };
                    acc[i] = S::fma(S::to_f32(S::load_sums(&sums[i])), s, acc[i]);
                }
            }
        }
        if batch < batches {
            let left = weights.len() - batch * ROTATE;
            let [s0, s1, s2, s3] = &mut sums[batch % 2];
            tiles.store::<0>(s0);
            if left > 1 {
                tiles.store::<1>(s1);
            }
            if left > 2 {
                tiles.store::<2>(s2);
            }
            if left > 3 {
                tiles.store::<3>(s3);
            }
        }
    }
    for (acc, out) in acc.into_iter().zip(partial) {
        S::store(acc, out);
    }
}
