//! The feed-forward half of a layer: router, routed experts, shared experts, and the dense MLP.
//!
//! Rows are grouped by expert so that each expert is read once for all of them. The outputs of a row's experts are
//! added in expert order, one fma chain per element, then the shared expert's, so the result does not depend on how
//! rows were grouped.
#![forbid(unsafe_code)]

use std::cell::RefCell;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Result, ensure};

use super::config::Config;
use super::lossy;
use super::weights::{FeedForward, Layer};
use super::{Block, Cancelled, Model, Phase};
use crate::experts::{Batch, GatedMlp, Interrupted};
use crate::kernels::{Acts, Input, math};
use crate::pool::{Bands, TileMut};

/// Rows of expert work held at a time: bounds scratch memory in prefill.
const MAX_SLOTS: usize = 1024;
/// Rows of a prompt that are asked for a guess at the next layer's experts.
const GUESSING_ROWS: usize = 256;
/// Rows from which a guess at the next layer's experts must be shared by two of them.
const SURE_ROWS: usize = 16;

/// Buffers of the feed-forward half.
#[derive(Default)]
pub(super) struct Scratch {
    y: Acts,
    hidden: Acts,
    logits: Vec<f32>,
    routes: Vec<(u32, f32)>, // (rows, top_k)
    routed: Routed,
    shared: Vec<f32>,
    slots: Vec<f32>,
    out: Vec<f32>,
    guess: Vec<f32>, // (rows, d_model): what is known of the next layer's input
    guess_y: Acts,
    guesses: Vec<(u32, f32)>, // (rows, top_k)
    votes: Vec<(u32, f32)>,   // (n_experts)
    foreseen: Vec<u32>,
}

/// Which rows go to which expert.
#[derive(Default)]
struct Routed {
    /// (expert, row, weight), ascending: the order in which a row's outputs are added.
    slots: Vec<(u32, u32, f32)>,
    /// The distinct experts of `slots`.
    experts: Vec<u32>,
    /// Where the slots of each of them begin and end.
    bounds: Vec<usize>,
    /// Experts that are computed now, as indices into `experts`.
    ready: Vec<u32>,
    /// Their rows, expert by expert.
    picks: Vec<u32>,
    /// Where in `picks` the rows of each begin and end.
    bands: Vec<usize>,
    /// The output line of each slot: lines are in order of arrival.
    lines: Vec<u32>,
}

thread_local! {
    static TASK: RefCell<TaskScratch> = RefCell::default();
}

/// Buffers of one task.
#[derive(Default)]
struct TaskScratch {
    up: Vec<f32>,
    scores: Vec<f32>,
    choice: Vec<f32>,
    ids: Vec<u32>,
    groups: Vec<u32>,
    ranks: Vec<f32>,
}

/// The experts of one row, by descending choice, with their weights.
pub type Route = [(u32, f32)];

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
    block.profile.switch(Phase::Router);
    let finite = compute.norm(x, &layer.ff_norm, c.rms_eps, &mut s.y);
    ensure!(finite, "layer {i}: the feed-forward input is not finite");
    match &layer.ff {
        FeedForward::Dense(mlp) => {
            block.profile.switch(Phase::Dense);
            gated(m, i, mlp, &s.y, n, &mut s.hidden, &mut s.slots)?;
            add(x, &s.slots);
        }
        FeedForward::Sparse { router, bias, shared } => {
            s.logits.resize(n * c.n_experts, 0.0);
            compute.matmul(router, s.y.input(0).exact(), n, &mut s.logits);
            let finite = choose(m, &s.logits, bias, &mut s.routes);
            ensure!(finite, "layer {i}: a router score is not finite");
            if let Some(rerouter) = &m.rerouter {
                rerouter.reroute(m, i, &s.logits, bias, &mut s.routes);
            }
            if let Some(observer) = &mut block.observer {
                for (row, route) in block.rows.iter().zip(s.routes.chunks(c.top_k)) {
                    observer.routed(i, *row, lossy::used(route));
                }
            }
            s.routed.sort(&s.routes, c.top_k);
            s.out.clear();
            s.out.resize(n * c.d_model, 0.0);
            let experts = std::mem::take(&mut s.routed.experts);
            let result = sparse(m, i, shared.as_ref(), block, &experts, x, s);
            s.routed.experts = experts;
            result?;
            add(x, &s.out);
        }
    }
    Ok(())
}

/// Routed and shared experts into `s.out`; the shared ones are computed while routed ones are read.
fn sparse(
    m: &Model,
    i: usize,
    shared: Option<&GatedMlp>,
    block: &mut Block<'_, '_>,
    experts: &[u32],
    x: &[f32],
    s: &mut Scratch,
) -> Result<()> {
    let mut batch = m.experts.batch(i, experts);
    s.routes.chunks(m.config.top_k).for_each(|route| m.experts.count(i, lossy::used(route)));
    block.profile.switch(Phase::Dense);
    if let Some(mlp) = shared {
        gated(m, i, mlp, &s.y, block.rows.len(), &mut s.hidden, &mut s.shared)?;
    }
    if m.experts.looks_ahead() {
        block.profile.switch(Phase::Router);
        foresee(m, i + 1, x, shared.is_some(), s);
        batch.read_ahead(i + 1, &s.foreseen);
    }
    block.profile.switch(Phase::Experts);
    let result = routed(m, i, block, &mut batch, s);
    block.profile.reassign(Phase::Wait, batch.waited());
    result.map_err(|e| if e.is::<Interrupted>() { Cancelled.into() } else { e })?;
    if shared.is_some() {
        add(&mut s.out, &s.shared);
    }
    Ok(())
}

/// Guesses which experts layer `i` will want, likeliest first, by giving its router what is known of its input: the
/// residual stream without the routed experts of the layer before. A wrong guess costs time, never a result.
fn foresee(m: &Model, i: usize, x: &[f32], shared: bool, s: &mut Scratch) {
    let (c, compute) = (&m.config, &m.compute);
    s.foreseen.clear();
    let Some(layer) = m.weights.layers.get(i) else { return };
    let FeedForward::Sparse { router, bias, .. } = &layer.ff else { return };
    let n = (x.len() / c.d_model).min(GUESSING_ROWS);
    s.guess.clear();
    s.guess.extend_from_slice(&x[..n * c.d_model]);
    if shared {
        add(&mut s.guess, &s.shared);
    }
    s.logits.resize(n * c.n_experts, 0.0);
    let finite = compute.norm(&s.guess, &layer.ff_norm, c.rms_eps, &mut s.guess_y);
    compute.matmul(router, s.guess_y.input(0).exact(), n, &mut s.logits);
    if !finite || !choose(m, &s.logits, bias, &mut s.guesses) {
        return;
    }
    // By how many rows want it, and how much. What one row of a long prompt may want is left to demand.
    s.votes.clear();
    s.votes.resize(c.n_experts, (0, 0.0));
    for &(e, weight) in &s.guesses {
        let (rows, sum) = &mut s.votes[e as usize];
        *rows += 1;
        *sum += weight;
    }
    let least = if n < SURE_ROWS { 1 } else { 2 };
    s.foreseen.extend((0..c.n_experts as u32).filter(|&e| s.votes[e as usize].0 >= least));
    s.foreseen.sort_unstable_by(|&a, &b| {
        let (va, vb) = (s.votes[a as usize], s.votes[b as usize]);
        vb.0.cmp(&va.0).then(vb.1.total_cmp(&va.1)).then(a.cmp(&b))
    });
}

fn add(x: &mut [f32], y: &[f32]) {
    for (x, y) in x.iter_mut().zip(y) {
        *x += y;
    }
}

/// Rows that choose their experts in one task.
const CHOICES: usize = 16;

/// Chooses the experts of every row from the router's logits. False if a score is not finite.
fn choose(m: &Model, logits: &[f32], bias: &[f32], routes: &mut Vec<(u32, f32)>) -> bool {
    let c = &m.config;
    routes.clear();
    routes.resize(logits.len() / c.n_experts * c.top_k, (0, 0.0));
    let finite = AtomicBool::new(true);
    m.compute.pool.par_chunks(routes, CHOICES * c.top_k, |t, routes| {
        let logits = logits[t * CHOICES * c.n_experts..].chunks(c.n_experts);
        TASK.with_borrow_mut(|task| {
            for (route, logits) in routes.chunks_mut(c.top_k).zip(logits) {
                if !choose_row(c, logits, bias, route, task) {
                    finite.store(false, Ordering::Relaxed);
                }
                weigh(c, route);
            }
        });
    });
    finite.into_inner()
}

/// Ranks the best experts of one row, as many as `route` holds, with their plain scores.
pub(super) fn rank(c: &Config, logits: &[f32], bias: &[f32], route: &mut Route) {
    TASK.with_borrow_mut(|task| choose_row(c, logits, bias, route, task));
}

/// Chooses the experts of one row, as many as `route` holds, with their plain scores. False if a score is not finite.
///
/// Scores are sigmoid(logit); the choice adds the correction bias and is limited to the best groups.
fn choose_row(
    c: &Config,
    logits: &[f32],
    bias: &[f32],
    route: &mut Route,
    task: &mut TaskScratch,
) -> bool {
    let TaskScratch { scores, choice, ids, groups, ranks, .. } = task;
    scores.clear();
    scores.extend(logits.iter().map(|&l| math::sigmoid(l)));
    choice.clear();
    choice.extend(scores.iter().zip(bias).map(|(s, b)| s + b));
    if !choice.iter().all(|v| v.is_finite()) {
        return false;
    }
    ids.clear();
    ids.extend(0..c.n_experts as u32);
    if c.n_group > 1 {
        limit_to_groups(c, choice, ids, groups, ranks);
    }
    best(ids, choice, route.len());
    for (slot, &e) in route.iter_mut().zip(ids.iter()) {
        *slot = (e, scores[e as usize]);
    }
    true
}

/// Turns the plain scores of a row's experts into their weights.
pub(super) fn weigh(c: &Config, route: &mut Route) {
    let sum = match c.norm_topk {
        true => route.iter().fold(0.0f32, |a, r| a + r.1) + 1e-20,
        false => 1.0,
    };
    route.iter_mut().for_each(|r| r.1 = r.1 / sum * c.routed_scale);
}

/// Keeps the `k` best, by descending choice, ties to the lower id.
fn best(ids: &mut Vec<u32>, by: &[f32], k: usize) {
    let order = |a: &u32, b: &u32| by[*b as usize].total_cmp(&by[*a as usize]).then(a.cmp(b));
    if k < ids.len() {
        ids.select_nth_unstable_by(k, order);
        ids.truncate(k);
    }
    ids.sort_unstable_by(order);
}

/// Keeps the experts of the best groups; a group is worth the sum of its two best choices.
fn limit_to_groups(
    c: &Config,
    choice: &[f32],
    ids: &mut Vec<u32>,
    groups: &mut Vec<u32>,
    ranks: &mut Vec<f32>,
) {
    let size = c.n_experts / c.n_group;
    let worth = |group: &[f32]| {
        let mut top = [f32::NEG_INFINITY; 2];
        for &v in group {
            if v > top[0] {
                top = [v, top[0]];
            } else if v > top[1] {
                top[1] = v;
            }
        }
        if size > 1 { top[0] + top[1] } else { top[0] }
    };
    ranks.clear();
    ranks.extend(choice.chunks(size).map(worth));
    groups.clear();
    groups.extend(0..c.n_group as u32);
    best(groups, ranks, c.topk_group);
    ids.retain(|&e| groups.contains(&(e / size as u32)));
}

impl Routed {
    /// Sorts the rows' choices by expert.
    fn sort(&mut self, routes: &[(u32, f32)], top_k: usize) {
        let Self { slots, experts, bounds, .. } = self;
        slots.clear();
        for (row, route) in (0..).zip(routes.chunks(top_k)) {
            slots.extend(lossy::used(route).iter().map(|&(e, w)| (e, row, w)));
        }
        slots.sort_unstable_by_key(|&(e, row, _)| (e, row));
        experts.clear();
        bounds.clear();
        bounds.push(0);
        for same in slots.chunk_by(|a, b| a.0 == b.0) {
            experts.push(same[0].0);
            bounds.push(bounds[bounds.len() - 1] + same.len());
        }
    }

    /// The experts from `first` on whose rows are computed together: as many as [`MAX_SLOTS`] allows, at least one.
    fn part(&self, first: usize) -> Range<usize> {
        let fits = |&end: &usize| self.bounds[end] - self.bounds[first] <= MAX_SLOTS;
        let last = (first + 1..self.bounds.len()).take_while(fits).last();
        first..last.unwrap_or(first + 1)
    }
}

/// Adds every row's routed experts to `s.out`, experts ascending.
fn routed(
    m: &Model,
    i: usize,
    block: &Block<'_, '_>,
    batch: &mut Batch<'_>,
    s: &mut Scratch,
) -> Result<()> {
    let mut part = 0..0;
    while part.end + 1 < s.routed.bounds.len() {
        part = s.routed.part(part.end);
        block.check_cancel()?;
        routed_part(m, i, block, batch, part.clone(), s)?;
    }
    Ok(())
}

/// The experts `part` of the batch, in the order in which they arrive.
fn routed_part(
    m: &Model,
    i: usize,
    block: &Block<'_, '_>,
    batch: &mut Batch<'_>,
    part: Range<usize>,
    s: &mut Scratch,
) -> Result<()> {
    let (c, compute, kernels) = (&m.config, &m.compute, m.compute.kernels);
    let (d, y) = (c.d_model, &s.y);
    let Routed { slots, bounds, ready, picks, bands, lines, .. } = &mut s.routed;
    let slots = &slots[bounds[part.start]..bounds[part.end]];
    s.slots.resize(slots.len() * d, 0.0);
    lines.resize(slots.len(), 0);
    let mut done = 0;
    while done < slots.len() {
        batch.next(part.clone(), ready, block.cancel)?;
        picks.clear();
        bands.clear();
        bands.push(0);
        for &expert in ready.iter() {
            let of_expert = bounds[expert as usize]..bounds[expert as usize + 1];
            for slot in of_expert {
                let slot = slot - bounds[part.start];
                lines[slot] = (done + picks.len()) as u32;
                picks.push(slots[slot].1);
            }
            bands.push(picks.len());
        }
        let expert = |band: usize| batch.get(ready[band] as usize);
        let mean_rows = picks.len().div_ceil(ready.len());
        let chunk = compute.chunk(c.d_expert, 2 * d * mean_rows, ready.len());
        compute.pool.par_tiles(
            s.hidden.fill(picks.len(), c.d_expert),
            c.d_expert,
            Bands::Between(bands),
            chunk,
            |band, mut tile| {
                gate_up(m, expert(band), y.picked(&picks[tile.rows()]), &mut tile);
            },
        );
        let finite = compute.prepare(&mut s.hidden);
        ensure!(finite, "layer {i}: an expert's hidden state is not finite");

        let hidden = &s.hidden;
        let chunk = compute.chunk(d, c.d_expert * mean_rows, ready.len());
        let outputs = &mut s.slots[done * d..(done + picks.len()) * d];
        compute.pool.par_tiles(outputs, d, Bands::Between(bands), chunk, |band, mut tile| {
            let x = hidden.input(tile.rows().start);
            kernels.matmul(&expert(band).down.view(), tile.cols().start, &x, &mut tile);
        });
        done += picks.len();
    }
    // Slots ascend by expert, so every element's chain runs in expert order; threads split the columns.
    let outputs = &s.slots;
    let rows = s.out.len() / d;
    let chunk = compute.chunk(d, slots.len(), 1);
    compute.pool.par_tiles(&mut s.out, d, Bands::Every(rows), chunk, |_, mut tile| {
        let cols = tile.cols();
        for (&(_, row, weight), &line) in slots.iter().zip(lines.iter()) {
            let y = &outputs[line as usize * d..][..d];
            kernels.axpy(weight, &y[cols.clone()], tile.row(row as usize));
        }
    });
    Ok(())
}

/// `tile = silu(gate x) * (up x)` for the tile's columns.
fn gate_up(m: &Model, mlp: &GatedMlp, x: Input<'_>, tile: &mut TileMut<'_>) {
    let (kernels, cols) = (m.compute.kernels, tile.cols().len());
    kernels.matmul(&mlp.gate.view(), tile.cols().start, &x, tile);
    TASK.with_borrow_mut(|task| {
        task.up.resize(tile.rows().len() * cols, 0.0);
        let mut up = TileMut::whole(&mut task.up, cols);
        kernels.matmul(&mlp.up.view(), tile.cols().start, &x, &mut up);
        for (r, up) in task.up.chunks(cols).enumerate() {
            kernels.silu_mul(tile.row(r), up);
        }
    });
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
    let tiles = hidden.fill(n, width);
    compute.pool.par_tiles(tiles, width, Bands::Every(n), chunk, |_, mut tile| {
        gate_up(m, mlp, y.input(0), &mut tile);
    });
    ensure!(compute.prepare(hidden), "layer {i}: the hidden state of the MLP is not finite");
    out.resize(n * mlp.down.rows(), 0.0);
    compute.matmul(&mlp.down, hidden.input(0), n, out);
    Ok(())
}
