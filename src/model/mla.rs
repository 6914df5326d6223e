//! Latent attention over the compressed cache, `kv_b` absorbed into query and output.
//!
//! Keys and values of a head are never formed: the query is moved into latent space (`W_Kᵀ q`), scores and the weighted
//! mean run over cached latents, and `W_V` is applied to the mean. Decode and prefill are the same code.
#![forbid(unsafe_code)]

use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Result, ensure};

use super::config::LATENT_EPS;
use super::dsa::{self, Selection};
use super::rope::rotate;
use super::weights::{Attention, Layer};
use super::{Block, Model, Phase, Row, Shared};
use crate::kernels::{Acts, Keys, Seen, Strided};
use crate::pool::{Bands, TileMut};

/// Rows that a task handles together, so that a key row of `kv_b` is unpacked once for all of them.
const BAND: usize = 16;
/// Most queries (rows × heads) of a task: bounds its scratch memory to what a core's cache holds.
const MAX_QUERIES: usize = 64;

/// Buffers of one attention block.
#[derive(Default)]
pub(super) struct Scratch {
    h: Acts,
    qr: Acts,
    heads: Acts,
    dsa: dsa::Scratch,
    q_a: Vec<f32>,
    q: Vec<f32>,
    kv: Vec<f32>,
    latent: Vec<f32>,
    out: Vec<f32>,
}

/// Buffers of one task.
#[derive(Default)]
struct TaskScratch {
    latent_q: Vec<f32>, // (rows, heads, kv_width)
    means: Acts,        // (rows, heads, kv_rank)
    seen: Vec<usize>,   // per query of a run
    picks: Vec<u32>,    // the rows of one head in `means`
}

thread_local! {
    static TASK: RefCell<TaskScratch> = RefCell::default();
}

/// Adds the attention of one block of rows to their residual stream `x`.
///
/// The block's cache rows are appended first, so that rows of one sequence see each other.
pub(super) fn attention(
    m: &Model,
    i: usize,
    layer: &Layer,
    block: &mut Block<'_, '_>,
    x: &mut [f32],
    selections: &mut [Selection],
    s: &mut Scratch,
) -> Result<()> {
    let (c, compute, w) = (&m.config, &m.compute, &layer.attn);
    let n = block.rows.len();
    let finite = compute.norm(x, &layer.attn_norm, c.rms_eps, &mut s.h);
    ensure!(finite, "layer {i}: the attention input is not finite");

    s.q_a.resize(n * c.q_rank, 0.0);
    compute.matmul(&w.q_a, s.h.input(0), n, &mut s.q_a);
    let finite = compute.norm(&s.q_a, &w.q_a_norm, LATENT_EPS, &mut s.qr);
    ensure!(finite, "layer {i}: the query latent is not finite");
    s.q.resize(n * c.n_heads * (c.d_nope + c.d_rope), 0.0);
    compute.matmul(&w.q_b, s.qr.input(0), n, &mut s.q);
    append_latents(m, i, w, block, s)?;

    if let Some(indexer) = &layer.indexer {
        let before = block.profile.switch(Phase::Indexer);
        dsa::select(m, i, indexer, block, &s.h, &s.qr, selections, &mut s.dsa)?;
        block.profile.switch(before);
    }
    if let Some(observer) = &mut block.observer {
        for (row, selection) in block.rows.iter().zip(selections.iter()) {
            observer.selected(i, *row, selection.key_set(row.pos));
        }
    }

    attend_heads(m, i, w, block, selections, s)?;
    s.out.resize(n * c.d_model, 0.0);
    compute.matmul(&w.o, s.heads.input(0), n, &mut s.out);
    for (x, y) in x.iter_mut().zip(&s.out) {
        *x += y;
    }
    Ok(())
}

/// Computes latent and rotated key of every row and appends them to the caches.
fn append_latents(
    m: &Model,
    i: usize,
    w: &Attention,
    block: &mut Block<'_, '_>,
    s: &mut Scratch,
) -> Result<()> {
    let (c, pairs, width) = (&m.config, m.rope.pairs(), m.config.kv_width());
    let n = block.rows.len();
    s.kv.resize(n * width, 0.0);
    m.compute.matmul(&w.kv_a, s.h.input(0), n, &mut s.kv);
    s.latent.resize(c.kv_rank, 0.0);
    for (r, (row, kv)) in block.rows.iter().zip(s.kv.chunks_mut(width)).enumerate() {
        let (raw, key) = kv.split_at_mut(c.kv_rank);
        let finite = m.compute.kernels.rms_norm(raw, &w.kv_a_norm, LATENT_EPS, &mut s.latent);
        ensure!(finite, "layer {i}: the key-value latent at position {} is not finite", row.pos);
        raw.copy_from_slice(&s.latent);
        rotate(key, &block.angles[r * pairs..(r + 1) * pairs]);
        block.caches[row.seq].push(i, kv);
    }
    Ok(())
}

/// Attention of every head of every row into `s.heads`, prepared for the output projection.
fn attend_heads(
    m: &Model,
    i: usize,
    w: &Attention,
    block: &Block<'_, '_>,
    selections: &[Selection],
    s: &mut Scratch,
) -> Result<()> {
    let (c, compute) = (&m.config, &m.compute);
    let n = block.rows.len();
    let finite = AtomicBool::new(true);
    let band = BAND.min(n).max(1);
    // As many heads per task as its scratch allows, but a few tasks per thread.
    let tasks = (4 * compute.pool.threads()).div_ceil(n.div_ceil(band));
    let heads = c.n_heads.div_ceil(tasks).min(MAX_QUERIES / band).max(1);
    let (q, shared) = (&s.q, block.shared());
    compute.pool.par_tiles(
        s.heads.fill(n, c.n_heads * c.d_v),
        c.n_heads * c.d_v,
        Bands::Every(band),
        heads * c.d_v,
        |_, mut tile| {
            TASK.with_borrow_mut(|task| {
                if !attend_tile(m, i, w, shared, selections, q, &mut tile, task) {
                    finite.store(false, Ordering::Relaxed);
                }
            });
        },
    );
    ensure!(finite.into_inner(), "layer {i}: an attention output is not finite");
    ensure!(compute.prepare(&mut s.heads), "layer {i}: the output of attention is not finite");
    Ok(())
}

/// Attention of the rows and heads of one output tile. False when a value is not finite.
fn attend_tile(
    m: &Model,
    i: usize,
    w: &Attention,
    block: Shared<'_, '_>,
    selections: &[Selection],
    q: &[f32],
    tile: &mut TileMut<'_>,
    task: &mut TaskScratch,
) -> bool {
    let (c, kernels) = (&m.config, m.compute.kernels);
    let (pairs, width, d_q) = (m.rope.pairs(), c.kv_width(), c.d_nope + c.d_rope);
    let (rows, n) = (tile.rows(), tile.rows().len());
    let (head, heads) = (tile.cols().start / c.d_v, tile.cols().len() / c.d_v);

    // Queries in latent space: Σ_k q_k W_K[k], ascending k, then the rotated part behind.
    task.latent_q.resize(n * heads * width, 0.0);
    for h in 0..heads {
        let of_head = Strided {
            data: &q[(rows.start * c.n_heads + head + h) * d_q..],
            stride: c.n_heads * d_q,
        };
        let mut out = Strided { data: &mut task.latent_q[h * width..], stride: heads * width };
        kernels.absorb(&w.k_b.view(), w.k_b.row(head + h), c.d_nope, &of_head, &mut out, n);
    }
    for (j, r) in rows.clone().enumerate() {
        for h in 0..heads {
            let key = &mut task.latent_q[(j * heads + h) * width + c.kv_rank..][..c.d_rope];
            key.copy_from_slice(&q[(r * c.n_heads + head + h) * d_q + c.d_nope..][..c.d_rope]);
            rotate(key, &block.angles[r * pairs..(r + 1) * pairs]);
        }
    }

    let means = task.means.fill(n * heads, c.kv_rank);
    let scale = 1.0 / (d_q as f32).sqrt();
    let mut done = 0;
    while done < n {
        let at = rows.start + done;
        let seq = block.rows[at].seq;
        let run = run_length(&block.rows[at..rows.end], &selections[at..rows.end]);
        let keys: Keys<'_> = block.caches[seq].keys(i);
        let seen = match &selections[at] {
            s if s.is_all() => {
                task.seen.clear();
                for row in &block.rows[at..at + run] {
                    task.seen.extend(std::iter::repeat_n(row.pos + 1, heads));
                }
                Seen::First(&task.seen)
            }
            s => Seen::Chosen(s.keys()),
        };
        kernels.attend(
            &task.latent_q[done * heads * width..][..run * heads * width],
            &keys,
            &seen,
            scale,
            &mut means[done * heads * c.kv_rank..][..run * heads * c.kv_rank],
        );
        done += run;
    }

    let finite = task.means.prepare(kernels, m.compute.activations);
    for h in 0..heads {
        task.picks.clear();
        task.picks.extend((0..n).map(|j| (j * heads + h) as u32));
        let mut out = tile.part(h * c.d_v..(h + 1) * c.d_v);
        let x = task.means.picked(&task.picks);
        kernels.matmul(&w.v_b.view(), w.v_b.row(head + h), &x, &mut out);
    }
    finite
}

/// Rows from the first on that attend together: those of one sequence that see all keys, or one that chose its own.
fn run_length(rows: &[Row], selections: &[Selection]) -> usize {
    let alike = |(row, s): &(&Row, &Selection)| row.seq == rows[0].seq && s.is_all();
    rows.iter().zip(selections).take_while(alike).count().max(1)
}
