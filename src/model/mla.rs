//! Latent attention over the compressed cache, `kv_b` absorbed into query and output.
//!
//! Keys and values of a head are never formed: the query is moved into latent space (`W_Kᵀ q`), scores and the weighted
//! mean run over cached latents, and `W_V` is applied to the mean. Decode and prefill are the same code.
#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Result, ensure};

use super::config::LATENT_EPS;
use super::dsa::{self, Selection, key_set};
use super::rope::rotate;
use super::weights::{Attention, Layer};
use super::{Block, Model, Phase};
use crate::kernels::Acts;
use crate::pool::TileMut;

/// Rows of one head that a task handles together, so that a key row of `kv_b` is unpacked once for all of them.
const BAND: usize = 16;

/// Buffers of one attention block.
#[derive(Default)]
pub(super) struct Scratch {
    h: Acts,
    qr: Acts,
    heads: Acts,
    q_a: Vec<f32>,
    q: Vec<f32>,
    kv: Vec<f32>,
    out: Vec<f32>,
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
        let started = block.profile.start();
        dsa::select(m, i, indexer, block, &s.h, &s.qr, selections)?;
        block.profile.stop(Phase::Indexer, started);
    }
    if let Some(observer) = &mut block.observer {
        for (row, selection) in block.rows.iter().zip(selections.iter()) {
            observer.selected(i, *row, key_set(selection, row.pos));
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
    let mut latent = vec![0.0; c.kv_rank];
    for (r, (row, kv)) in block.rows.iter().zip(s.kv.chunks_mut(width)).enumerate() {
        let (raw, key) = kv.split_at_mut(c.kv_rank);
        let finite = m.compute.kernels.rms_norm(raw, &w.kv_a_norm, LATENT_EPS, &mut latent);
        ensure!(finite, "layer {i}: the key-value latent at position {} is not finite", row.pos);
        raw.copy_from_slice(&latent);
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
    let (c, compute, kernels) = (&m.config, &m.compute, m.compute.kernels);
    let (pairs, width, d_q) = (m.rope.pairs(), c.kv_width(), c.d_nope + c.d_rope);
    let n = block.rows.len();
    let scale = 1.0 / (d_q as f32).sqrt();
    let kv_b = w.kv_b.view();
    let finite = AtomicBool::new(true);
    let (q, angles, rows, caches) = (&s.q, block.angles, block.rows, &block.caches);
    let bounds: Vec<usize> = (0..n).step_by(BAND).chain([n]).collect();
    compute.pool.par_tiles(
        s.heads.fill(n, c.n_heads * c.d_v),
        c.n_heads * c.d_v,
        &bounds,
        c.d_v,
        |_, mut tile: TileMut<'_>| {
            let head = tile.cols().start / c.d_v;
            let first = head * (c.d_nope + c.d_v);
            let q_of = |r: usize| &q[(r * c.n_heads + head) * d_q..][..d_q];
            // Queries in latent space: Σ_r q_r W_K[r], ascending rows, then the rotated part behind.
            let mut latent_q = vec![0.0; tile.rows().len() * width];
            let mut key_row = vec![0.0; c.kv_rank];
            for k in 0..c.d_nope {
                kernels.dequant_row(&kv_b, first + k, &mut key_row);
                for (j, r) in tile.rows().enumerate() {
                    kernels.axpy(q_of(r)[k], &key_row, &mut latent_q[j * width..][..c.kv_rank]);
                }
            }
            let mut means = Acts::default();
            let mean_rows = means.fill(tile.rows().len(), c.kv_rank);
            for (j, r) in tile.rows().enumerate() {
                let latent_q = &mut latent_q[j * width..(j + 1) * width];
                latent_q[c.kv_rank..].copy_from_slice(&q_of(r)[c.d_nope..]);
                rotate(&mut latent_q[c.kv_rank..], &angles[r * pairs..(r + 1) * pairs]);
                let keys = caches[rows[r].seq].keys(i);
                let set = key_set(&selections[r], rows[r].pos);
                kernels.attend(
                    latent_q,
                    &keys,
                    &set,
                    scale,
                    &mut mean_rows[j * c.kv_rank..(j + 1) * c.kv_rank],
                );
            }
            if !means.prepare(kernels, compute.activations) {
                finite.store(false, Ordering::Relaxed);
            }
            kernels.matmul(&kv_b, first + c.d_nope, &means.input(0), &mut tile);
        },
    );
    ensure!(finite.into_inner(), "layer {i}: an attention output is not finite");
    ensure!(compute.prepare(&mut s.heads), "layer {i}: the output of attention is not finite");
    Ok(())
}
