//! Matrix × rows: `tile[i][o] = w[first + o] · x[i]` for the columns `o` of an output tile.
//!
//! Three bodies. Float matrices (and every matrix under `--activations f32`) are f32 dot products of rows as stored.
//! Integer matrices are products with int8 activations: over panels where the matrix lies in panels, else row by row as
//! stored. All give an output the bits of its definition: one fma chain over exact integer steps in ascending order.
#![forbid(unsafe_code)]

use super::format::{Format, GROUP, MatView};
use super::panel::{
    Codes, Geometry, Int2Codes, Int3Codes, Int4Codes, Int8Codes, VECTOR, group_of, pack_strip,
    packs_fast, steps,
};
use super::portable::{dequant_row, dot_n, unpack_row};
use super::simd::{LANES, Simd, add_quad, bf16_to_f32, dot_i8, each, finish, upto4};
use super::{Input, Q8Row, Scratch};
use crate::pool::TileMut;

/// Activation rows that are multiplied with a strip before the next strip is read: their codes stay in the L2 cache.
const ROWS_AT_ONCE: usize = 96;

// ------------------------------------------------------------------------------------------------ f32

/// f32 arithmetic.
#[inline(always)]
pub(super) fn matmul_f32<S: Simd>(
    w: &MatView<'_>,
    first: usize,
    x: &Input<'_>,
    tile: &mut TileMut<'_>,
    scratch: &mut Scratch,
) {
    let cols = tile.cols().len();
    match w.format() {
        Format::Bf16 => {
            let mut o = 0;
            while o + 4 <= cols {
                let rows = each!(k in 0..4, w.row_codes(first + o + k));
                stored_rows::<S, 4>(rows, o, x, tile);
                o += 4;
            }
            while o < cols {
                stored_rows::<S, 1>([w.row_codes(first + o)], o, x, tile);
                o += 1;
            }
        }
        _ => {
            for o in 0..cols {
                let n = tile.rows().len();
                let row = dequant_row::<S>(w, first + o, scratch);
                let mut i = 0;
                while i + 4 <= n {
                    let y = dot_n::<S, 4>(row, each!(k in 0..4, x.f32_row(i + k)));
                    for k in 0..4 {
                        tile.row(i + k)[o] = y[k];
                    }
                    i += 4;
                }
                while i < n {
                    tile.row(i)[o] = dot_n::<S, 1>(row, [x.f32_row(i)])[0];
                    i += 1;
                }
            }
        }
    }
}

/// `N` bf16 rows as stored against all activation rows, two of these at a time.
#[inline(always)]
fn stored_rows<S: Simd, const N: usize>(
    rows: [&[u8]; N],
    o: usize,
    x: &Input<'_>,
    tile: &mut TileMut<'_>,
) {
    let n = tile.rows().len();
    let mut i = 0;
    while i + 2 <= n {
        let y = dot_bf16::<S, N, 2>(rows, [x.f32_row(i), x.f32_row(i + 1)]);
        for k in 0..2 {
            tile.row(i + k)[o..o + N].copy_from_slice(&y[k]);
        }
        i += 2;
    }
    if i < n {
        tile.row(i)[o..o + N].copy_from_slice(&dot_bf16::<S, N, 1>(rows, [x.f32_row(i)])[0]);
    }
}

#[inline(always)]
fn dot_bf16<S: Simd, const N: usize, const R: usize>(
    w: [&[u8]; N],
    x: [&[f32]; R],
) -> [[f32; N]; R] {
    let cols = x[0].len();
    let whole = cols / LANES;
    let chunks = each!(n in 0..N, &w[n].as_chunks::<{ 2 * LANES }>().0[..whole]);
    let xs = each!(r in 0..R, &x[r].as_chunks::<LANES>().0[..whole]);
    let mut p = [[S::zero(); N]; R];
    for i in 0..whole {
        upto4!(n < N, {
            let w = S::load_bf16(&chunks[n][i]);
            if S::PREFETCH > 0 && R == 1 && i % 2 == 0 {
                S::prefetch(&chunks[n][i], S::PREFETCH);
            }
            upto4!(r < R, {
                p[r][n] = S::fma(w, S::load(&xs[r][i]), p[r][n]);
            });
        });
    }
    let at = whole * LANES;
    finish::<S, R, N>(p, cols - at, |r, n, i, lane| {
        let w = bf16_to_f32([w[n][2 * (at + i)], w[n][2 * (at + i) + 1]]);
        w.mul_add(x[r][at + i], lane)
    })
}

// ------------------------------------------------------------------------------------------------ integer rows as stored

/// Strips that are packed and multiplied at a time: few, so that they stay in the cache.
const PACKED: usize = 2;
/// The same where products read all activation rows anew for every call.
const PACKED_MANY: usize = 16;

/// Integer matrices as stored: exact integer steps, one fma chain per output.
#[inline(always)]
pub(super) fn matmul_rows<S: Simd>(
    w: &MatView<'_>,
    first: usize,
    x: &Input<'_>,
    tile: &mut TileMut<'_>,
    scratch: &mut Scratch,
) {
    if packs_fast(w) {
        return matmul_packed::<S>(w, first, x, tile, scratch);
    }
    let codes = scratch.codes(w.cols());
    let per_row = Geometry::new(w.format(), w.cols()).is_some_and(|g| g.steps == 0);
    let group = group_of(w.format());
    let n = tile.rows().len();
    for o in 0..tile.cols().len() {
        unpack_row(w, first + o, codes);
        let scales = w.row_scales(first + o);
        let (groups, _) = codes.as_chunks::<GROUP>();
        for i in 0..n {
            let q = x.q8_row(i);
            let (xs, _) = q.codes.as_chunks::<GROUP>();
            let mut acc = 0.0f32;
            if per_row {
                for (g, (w, x)) in groups.iter().zip(xs).enumerate() {
                    acc = (S::dot64(w, x, q.bias[g]) as f32).mul_add(q.scales[g], acc);
                }
                acc *= scales[0];
            } else if group.is_multiple_of(GROUP) {
                let wide = group / GROUP;
                for (g, (w, x)) in groups.iter().zip(xs).enumerate() {
                    let s = scales[g / wide] * q.scales[g];
                    acc = (S::dot64(w, x, q.bias[g]) as f32).mul_add(s, acc);
                }
            } else {
                for b in 0..groups.len() {
                    for (from, to, at) in steps(group, b, w.cols()) {
                        let d = dot_i8(&codes[from..to], &q.codes[from..to]);
                        acc = (d as f32).mul_add(scales[at] * q.scales[b], acc);
                    }
                }
            }
            tile.row(i)[o] = acc;
        }
    }
}

/// Packs a few strips into a buffer of this thread and multiplies them there, then the next.
#[inline(always)]
fn matmul_packed<S: Simd>(
    w: &MatView<'_>,
    first: usize,
    x: &Input<'_>,
    tile: &mut TileMut<'_>,
    scratch: &mut Scratch,
) {
    let Some(g) = Geometry::new(w.format(), w.cols()) else { return };
    let mut packed = std::mem::take(&mut scratch.strips);
    let last = first + tile.cols().len();
    let at_once = if tile.rows().len() >= S::MANY { PACKED_MANY } else { PACKED };
    for s in (first / LANES..last.div_ceil(LANES)).step_by(at_once) {
        let end = (s + at_once).min(last.div_ceil(LANES));
        let bytes = (end - s) * g.strip;
        if packed.len() < bytes {
            packed.resize(bytes, 0);
        }
        for (s, strip) in (s..end).zip(packed.chunks_exact_mut(g.strip)) {
            pack_strip::<S>(w, s, strip, scratch.codes(w.cols()));
        }
        let base = s * LANES;
        let rows = (end * LANES).min(w.rows()) - base;
        let view = MatView::panels(w.format(), rows, w.cols(), &packed[..bytes]);
        let (from, to) = (first.max(base), last.min(base + rows));
        let mut part = tile.part(from - first..to - first);
        matmul_panels::<S>(&view, from - base, x, &mut part, scratch);
    }
    scratch.strips = packed;
}

// ------------------------------------------------------------------------------------------------ panels

/// Integer matrices in panels.
#[inline(always)]
pub(super) fn matmul_panels<S: Simd>(
    w: &MatView<'_>,
    first: usize,
    x: &Input<'_>,
    tile: &mut TileMut<'_>,
    scratch: &mut Scratch,
) {
    match w.format() {
        Format::Int4 { group: 0 } => strips::<S, Int4Codes, false>(w, first, x, tile, scratch),
        Format::Int4 { group } if (group as usize).is_multiple_of(GROUP) => {
            strips::<S, Int4Codes, true>(w, first, x, tile, scratch);
        }
        Format::Int4 { .. } => stepped::<S>(w, first, x, tile),
        Format::Int8 => strips::<S, Int8Codes, false>(w, first, x, tile, scratch),
        Format::Int3 => strips::<S, Int3Codes, true>(w, first, x, tile, scratch),
        _ => strips::<S, Int2Codes, false>(w, first, x, tile, scratch),
    }
}

/// `SCALED`: each block has its own 16 scales; else the strip has 16.
#[inline(always)]
fn strips<S: Simd, C: Codes, const SCALED: bool>(
    w: &MatView<'_>,
    first: usize,
    x: &Input<'_>,
    tile: &mut TileMut<'_>,
    scratch: &mut Scratch,
) {
    let cols = tile.cols().len();
    let (begin, end) = (first / LANES, (first + cols).div_ceil(LANES));
    let rows = tile.rows().len();
    if rows >= S::MANY {
        return S::many_rows::<C, SCALED>(w, first, x, tile, scratch);
    }
    if rows == 1 {
        // Two streams through the two halves of the range: each runs on without a gap, so that prefetching pays.
        let half = (end - begin) / 2;
        let x = [x.q8_row(0)];
        for s in begin..begin + half {
            let both = [s, s + half];
            let y = strip_tile::<S, C, SCALED, 1, 2>(w, both, &x);
            for n in 0..2 {
                put(tile, 0, both[n], first, &y[n][0]);
            }
        }
        for s in begin + 2 * half..end {
            put(tile, 0, s, first, &strip_tile::<S, C, SCALED, 1, 1>(w, [s], &x)[0][0]);
        }
        return;
    }
    for from in (0..rows).step_by(ROWS_AT_ONCE) {
        let to = (from + ROWS_AT_ONCE).min(rows);
        for s in begin..end {
            let mut i = from;
            while i < to {
                i += match to - i {
                    // 16 rows are better cut in halves than into 12 and 4.
                    16 if S::TILE >= 8 => rows_tile::<S, C, SCALED, 8>(w, s, first, x, i, tile),
                    12.. if S::TILE >= 12 => rows_tile::<S, C, SCALED, 12>(w, s, first, x, i, tile),
                    8.. if S::TILE >= 8 => rows_tile::<S, C, SCALED, 8>(w, s, first, x, i, tile),
                    4.. => rows_tile::<S, C, SCALED, 4>(w, s, first, x, i, tile),
                    2.. => rows_tile::<S, C, SCALED, 2>(w, s, first, x, i, tile),
                    _ => rows_tile::<S, C, SCALED, 1>(w, s, first, x, i, tile),
                };
            }
        }
    }
}

/// Strip `s` against the activation rows `i..i + R`; returns `R`.
#[inline(always)]
fn rows_tile<S: Simd, C: Codes, const SCALED: bool, const R: usize>(
    w: &MatView<'_>,
    s: usize,
    first: usize,
    x: &Input<'_>,
    i: usize,
    tile: &mut TileMut<'_>,
) -> usize {
    let xs: [Q8Row<'_>; R] = each!(r in 0..R, x.q8_row(i + r));
    let [y] = strip_tile::<S, C, SCALED, R, 1>(w, [s], &xs);
    for r in 0..R {
        put(tile, i + r, s, first, &y[r]);
    }
    R
}

/// The products of `N` strips with `R` activation rows.
#[inline(always)]
fn strip_tile<S: Simd, C: Codes, const SCALED: bool, const R: usize, const N: usize>(
    w: &MatView<'_>,
    strips: [usize; N],
    x: &[Q8Row<'_>; R],
) -> [[[f32; LANES]; R]; N] {
    let blocks = w.cols().div_ceil(GROUP);
    let stride = C::BYTES + if SCALED { 4 * LANES } else { 0 };
    let strips = each!(n in 0..N, w.strip(strips[n]));
    let codes = each!(r in 0..R, &x[r].codes.as_chunks::<GROUP>().0[..blocks]);
    let scales = each!(r in 0..R, &x[r].scales[..blocks]);
    let bias = each!(r in 0..R, &x[r].bias[..blocks]);
    let mut acc = [[S::zero(); R]; N];
    for b in 0..blocks {
        for n in 0..N {
            let block = &strips[n][b * stride..][..stride];
            if S::PREFETCH > 0 {
                for line in 0..stride / VECTOR {
                    S::prefetch(block, S::PREFETCH + VECTOR * line);
                }
            }
            let d = S::block::<C, R>(
                &block[..C::BYTES],
                each!(r in 0..R, &codes[r][b]),
                each!(r in 0..R, C::start(bias[r][b])),
            );
            for r in 0..R {
                let sx = S::splat(scales[r][b]);
                let s = if SCALED { S::mul(lanes::<S>(block, C::BYTES), sx) } else { sx };
                acc[n][r] = S::fma(S::to_f32(d[r]), s, acc[n][r]);
            }
        }
    }
    let mut out = [[[0.0; LANES]; R]; N];
    for n in 0..N {
        for r in 0..R {
            let y = match SCALED {
                true => acc[n][r],
                false => S::mul(acc[n][r], lanes::<S>(strips[n], blocks * stride)),
            };
            S::store(y, &mut out[n][r]);
        }
    }
    out
}

/// 16 f32 at byte `at`.
#[inline(always)]
pub(super) fn lanes<S: Simd>(bytes: &[u8], at: usize) -> S::Lanes {
    let (v, _) = bytes[at..at + 4 * LANES].as_chunks();
    S::load_bytes(&v[0])
}

/// Stores what the tile covers of the 16 outputs of strip `s`.
#[inline(always)]
pub(super) fn put(tile: &mut TileMut<'_>, i: usize, s: usize, first: usize, y: &[f32; LANES]) {
    let (at, out) = (s * LANES, tile.row(i));
    if at >= first && at + LANES <= first + out.len() {
        out[at - first..at - first + LANES].copy_from_slice(y);
        return;
    }
    for (j, y) in y.iter().enumerate() {
        if at + j >= first && at + j < first + out.len() {
            out[at + j - first] = *y;
        }
    }
}

/// int4 with groups that do not divide into 64s: every multiple of 16 inputs may end a step.
#[inline(always)]
fn stepped<S: Simd>(w: &MatView<'_>, first: usize, x: &Input<'_>, tile: &mut TileMut<'_>) {
    let Some(g) = Geometry::new(w.format(), w.cols()) else { return };
    let group = group_of(w.format());
    let (begin, end) = (first / LANES, (first + tile.cols().len()).div_ceil(LANES));
    for s in begin..end {
        let strip = w.strip(s);
        for i in 0..tile.rows().len() {
            let q = x.q8_row(i);
            let (xs, _) = q.codes.as_chunks::<GROUP>();
            let mut acc = S::zero();
            for (b, x) in xs.iter().enumerate() {
                let block = &strip[b * g.stride()..][..g.stride()];
                for (step, (from, to, _)) in steps(group, b, w.cols()).enumerate() {
                    let mut d = [0; LANES];
                    for k in (from % GROUP) / 4..(to - b * GROUP).div_ceil(4) {
                        let w = Int4Codes::quad::<[u8; VECTOR]>(block, k, 0);
                        add_quad(&mut d, &w, x, k, Int4Codes::OFFSET);
                    }
                    let scales = lanes::<S>(block, g.codes + step * 4 * LANES);
                    let s = S::mul(scales, S::splat(q.scales[b]));
                    acc = S::fma(S::load(&d.map(|d| d as f32)), s, acc);
                }
            }
            let mut y = [0.0; LANES];
            S::store(acc, &mut y);
            put(tile, i, s, first, &y);
        }
    }
}
