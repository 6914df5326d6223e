//! The feed-forward half of a layer: router, routed experts, shared experts, and the dense MLP.
//!
//! Rows are grouped by expert so that each expert is read once for all of them. The outputs of a row's experts are
//! added in expert order, one fma chain per element, then the shared expert's, so the result does not depend on how
//! rows were grouped.
#![forbid(unsafe_code)]

use anyhow::{Context, Result, ensure};

use super::config::Config;
use super::weights::{FeedForward, Layer};
use super::{Block, Model, Phase};
use crate::experts::GatedMlp;
use crate::kernels::{Acts, Input, math};
use crate::pool::TileMut;

/// Rows of expert work held at a time: bounds scratch memory in prefill.
const MAX_SLOTS: usize = 1024;

/// Buffers of the feed-forward half.
#[derive(Default)]
pub(super) struct Scratch {
    y: Acts,
    hidden: Acts,
    logits: Vec<f32>,
    slots: Vec<f32>,
    out: Vec<f32>,
}

/// The experts of one row, by descending choice, with their weights.
pub type Route = Vec<(u32, f32)>;

/// Adds the feed-forward output of the rows to their residual stream `x`.
pub(super) fn feed_forward(
    m: &Model,
    i: usize,
    layer: &Layer,
    block: &mut Block<'_, '_>,
    x: &mut [f32],
    s: &mut Scratch,
) -> Result<()> {
    let (c, compute) = (&m.config, &m.compute);
    let n = block.rows.len();
    let finite = compute.norm(x, &layer.ff_norm, c.rms_eps, &mut s.y);
    ensure!(finite, "layer {i}: the feed-forward input is not finite");
    match &layer.ff {
        FeedForward::Dense(mlp) => {
            let started = block.profile.start();
            gated(m, i, mlp, &s.y, n, &mut s.hidden, &mut s.slots)?;
            add(x, &s.slots);
            block.profile.stop(Phase::Dense, started);
        }
        FeedForward::Sparse { router, bias, shared } => {
            let started = block.profile.start();
            s.logits.resize(n * c.n_experts, 0.0);
            compute.matmul(router, s.y.input(0).exact(), n, &mut s.logits);
            let logits = &s.logits;
            let of_row = |r: usize| route(c, &logits[r * c.n_experts..(r + 1) * c.n_experts], bias);
            let routes = compute.pool.par_map(n, of_row).into_iter().collect::<Option<Vec<_>>>();
            let routes =
                routes.with_context(|| format!("layer {i}: a router score is not finite"))?;
            block.profile.stop(Phase::Router, started);
            if let Some(observer) = &mut block.observer {
                for (row, route) in block.rows.iter().zip(&routes) {
                    observer.routed(i, *row, route);
                }
            }
            let started = block.profile.start();
            s.out.clear();
            s.out.resize(n * c.d_model, 0.0);
            routed(m, i, &routes, block, s)?;
            block.profile.stop(Phase::Experts, started);
            let started = block.profile.start();
            if let Some(mlp) = shared {
                gated(m, i, mlp, &s.y, n, &mut s.hidden, &mut s.slots)?;
                add(&mut s.out, &s.slots);
            }
            add(x, &s.out);
            block.profile.stop(Phase::Dense, started);
        }
    }
    Ok(())
}

fn add(x: &mut [f32], y: &[f32]) {
    for (x, y) in x.iter_mut().zip(y) {
        *x += y;
    }
}

/// Chooses experts for one row from its router logits. `None` if a score is not finite.
///
/// Scores are sigmoid(logit); the choice adds the correction bias and is limited to the best groups, the weights are
/// the plain scores.
pub(super) fn route(c: &Config, logits: &[f32], bias: &[f32]) -> Option<Route> {
    let scores: Vec<f32> = logits.iter().map(|&l| math::sigmoid(l)).collect();
    let choice: Vec<f32> = scores.iter().zip(bias).map(|(s, b)| s + b).collect();
    if !choice.iter().all(|v| v.is_finite()) {
        return None;
    }
    // Descending choice, ties to the lower id.
    let best = |ids: &mut Vec<u32>, by: &[f32], k: usize| {
        ids.sort_unstable_by(|a, b| by[*b as usize].total_cmp(&by[*a as usize]).then(a.cmp(b)));
        ids.truncate(k);
    };
    let mut ids: Vec<u32> = (0..c.n_experts as u32).collect();
    if c.n_group > 1 {
        let size = c.n_experts / c.n_group;
        let ranks: Vec<f32> = choice
            .chunks(size)
            .map(|group| {
                let mut top = [f32::NEG_INFINITY; 2];
                for &v in group {
                    if v > top[0] {
                        top = [v, top[0]];
                    } else if v > top[1] {
                        top[1] = v;
                    }
                }
                if size > 1 { top[0] + top[1] } else { top[0] }
            })
            .collect();
        let mut groups: Vec<u32> = (0..c.n_group as u32).collect();
        best(&mut groups, &ranks, c.topk_group);
        ids.retain(|&e| groups.contains(&(e / size as u32)));
    }
    best(&mut ids, &choice, c.top_k);
    let mut weights: Vec<f32> = ids.iter().map(|&e| scores[e as usize]).collect();
    if c.norm_topk {
        let sum = weights.iter().fold(0.0f32, |a, w| a + w) + 1e-20;
        weights.iter_mut().for_each(|w| *w /= sum);
    }
    Some(ids.into_iter().zip(weights.into_iter().map(|w| w * c.routed_scale)).collect())
}

/// Adds every row's routed experts to `s.out`, experts ascending.
fn routed(
    m: &Model,
    i: usize,
    routes: &[Route],
    block: &Block<'_, '_>,
    s: &mut Scratch,
) -> Result<()> {
    // (expert, row, weight), ascending: the order in which a row's outputs are added.
    let mut slots: Vec<(u32, u32, f32)> = Vec::with_capacity(routes.len() * m.config.top_k);
    for (row, route) in routes.iter().enumerate() {
        slots.extend(route.iter().map(|&(e, w)| (e, row as u32, w)));
    }
    slots.sort_unstable_by_key(|&(e, row, _)| (e, row));
    let mut at = 0;
    while at < slots.len() {
        block.check_cancel()?;
        let end = (at + MAX_SLOTS).min(slots.len());
        routed_part(m, i, &slots[at..end], s)?;
        at = end;
    }
    Ok(())
}

fn routed_part(m: &Model, i: usize, slots: &[(u32, u32, f32)], s: &mut Scratch) -> Result<()> {
    let (c, compute, kernels) = (&m.config, &m.compute, m.compute.kernels);
    let d = c.d_model;
    let mut bounds = vec![0];
    let mut experts: Vec<&GatedMlp> = Vec::new();
    for same in slots.chunk_by(|a, b| a.0 == b.0) {
        experts.push(m.experts.acquire(i, same[0].0 as usize)?);
        bounds.push(bounds[bounds.len() - 1] + same.len());
    }
    let picks: Vec<u32> = slots.iter().map(|s| s.1).collect();
    let mean_rows = slots.len().div_ceil(experts.len());

    let y = &s.y;
    let chunk = compute.chunk(c.d_expert, 2 * d * mean_rows, experts.len());
    compute.pool.par_tiles(
        s.hidden.fill(slots.len(), c.d_expert),
        c.d_expert,
        &bounds,
        chunk,
        |band, mut tile| {
            gate_up(m, experts[band], y.picked(&picks[tile.rows()]), &mut tile);
        },
    );
    ensure!(compute.prepare(&mut s.hidden), "layer {i}: an expert's hidden state is not finite");

    s.slots.resize(slots.len() * d, 0.0);
    let hidden = &s.hidden;
    let chunk = compute.chunk(d, c.d_expert * mean_rows, experts.len());
    compute.pool.par_tiles(&mut s.slots, d, &bounds, chunk, |band, mut tile| {
        kernels.matmul(
            &experts[band].down.view(),
            tile.cols().start,
            &hidden.input(tile.rows().start),
            &mut tile,
        );
    });
    // Slots ascend by expert, so every element's chain runs in expert order; threads split the columns.
    let outputs = &s.slots;
    let rows = s.out.len() / d;
    let chunk = compute.chunk(d, slots.len(), 1);
    compute.pool.par_tiles(&mut s.out, d, &[0, rows], chunk, |_, mut tile| {
        let cols = tile.cols();
        for (&(_, row, weight), y) in slots.iter().zip(outputs.chunks(d)) {
            kernels.axpy(weight, &y[cols.clone()], tile.row(row as usize));
        }
    });
    Ok(())
}

/// `tile = silu(gate x) * (up x)` for the tile's columns.
fn gate_up(m: &Model, mlp: &GatedMlp, x: Input<'_>, tile: &mut TileMut<'_>) {
    let (kernels, cols) = (m.compute.kernels, tile.cols().len());
    kernels.matmul(&mlp.gate.view(), tile.cols().start, &x, tile);
    let mut up = vec![0.0; tile.rows().len() * cols];
    kernels.matmul(&mlp.up.view(), tile.cols().start, &x, &mut TileMut::whole(&mut up, cols));
    for (r, up) in up.chunks(cols).enumerate() {
        kernels.silu_mul(tile.row(r), up);
    }
}

/// A gated MLP over `n` rows of `y` into `out`.
fn gated(
    m: &Model,
    i: usize,
    mlp: &GatedMlp,
    y: &Acts,
    n: usize,
    hidden: &mut Acts,
    out: &mut Vec<f32>,
) -> Result<()> {
    let (compute, width) = (&m.compute, mlp.gate.rows());
    let chunk = compute.chunk(width, 2 * mlp.gate.cols() * n, 1);
    compute.pool.par_tiles(hidden.fill(n, width), width, &[0, n], chunk, |_, mut tile| {
        gate_up(m, mlp, y.input(0), &mut tile);
    });
    ensure!(compute.prepare(hidden), "layer {i}: the hidden state of the MLP is not finite");
    out.resize(n * mlp.down.rows(), 0.0);
    compute.matmul(&mlp.down, hidden.input(0), n, out);
    Ok(())
}
