//! The model: one forward pass over rows, whatever sequences they belong to.
//!
//! A row is a token at a position of a sequence. Prefill is many rows of one sequence, decode one row of each, a draft
//! check a few: there is no second path. A pass goes through layer 0 with all rows, then layer 1, and so on; inside a
//! layer attention takes the rows in blocks to bound memory.

#![forbid(unsafe_code)]

pub mod census;
mod compute;
pub mod config;
mod dsa;
pub mod kv;
pub mod lossy;
mod mla;
mod moe;
mod profile;
mod rope;
pub mod weights;

use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Result, ensure};

use census::Census;
pub use compute::Compute;
use config::Config;
use dsa::Selection;
use kv::KvCache;
use lossy::{Lossy, Rerouter, Tally};
pub use moe::Route;
pub use profile::{Phase, Profile};
use rope::Rope;
use weights::{BindOptions, Bound, Layer, Weights};

use crate::experts::{Experts, Stream};
use crate::kernels::{Acts, KeySet};
use crate::store::Shards;

/// Rows that attention handles together.
const BLOCK: usize = 96;

/// One token at one position of one sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    /// Index of the sequence's cache in the list that the pass is given.
    pub seq: usize,
    /// Position, from 0.
    pub pos: usize,
    /// Token id.
    pub token: u32,
    /// Whether logits of this row are wanted.
    pub logits: bool,
}

/// Sees what a forward pass decides: for tests, traces and progress. Every method does nothing by default.
pub trait Observer {
    /// The residual stream of one row after a layer.
    fn hidden(&mut self, _layer: usize, _row: Row, _x: &[f32]) {}
    /// The experts that a row goes to, by descending choice.
    fn routed(&mut self, _layer: usize, _row: Row, _route: &Route) {}
    /// The keys that a row attends to.
    fn selected(&mut self, _layer: usize, _row: Row, _keys: KeySet<'_>) {}
    /// Layers done of this pass.
    fn progress(&mut self, _layers_done: usize, _layers: usize) {}
}

/// What a forward pass returns.
#[derive(Default)]
pub struct Output {
    /// (rows that asked, vocab), in row order
    pub logits: Vec<f32>,
    /// (rows, d_model): hidden states after the final norm, input of the MTP layer
    pub hidden: Vec<f32>,
}

/// A pass was stopped by its cancel flag. The caches must be truncated to where they were.
#[derive(Debug)]
pub struct Cancelled;

impl std::fmt::Display for Cancelled {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("cancelled")
    }
}

impl std::error::Error for Cancelled {}

/// How a pass is watched and stopped.
#[derive(Default)]
pub struct Control<'a> {
    /// Checked between blocks; set to stop the pass.
    pub cancel: Option<&'a AtomicBool>,
    /// Told what the pass decides.
    pub observer: Option<&'a mut dyn Observer>,
}

/// A loaded model and what it computes with.
pub struct Model {
    /// Shapes and constants.
    pub config: Config,
    /// Kernels, threads, activation mode.
    pub compute: Compute,
    weights: Weights,
    experts: Experts,
    rerouter: Option<Rerouter>,
    rope: Rope,
    max_context: usize,
    warnings: Vec<String>,
}

/// Buffers of a forward pass; they grow to the largest pass and stay.
#[derive(Default)]
pub struct Workspace {
    x: Vec<f32>,
    selections: Vec<Selection>,
    angles: Vec<(f32, f32)>, // (rows, d_rope / 2): sin and cos
    attention: mla::Scratch,
    feed_forward: moe::Scratch,
    head: Acts,
    wanted: Vec<f32>, // (rows that ask for logits, d_model)
    next: Vec<usize>, // next position of each sequence
    /// Time by phase, over all passes.
    pub profile: Profile,
}

/// Some rows of a pass and what they touch.
struct Block<'a, 'c> {
    rows: &'a [Row],
    /// Rotations of the rows.
    angles: &'a [(f32, f32)],
    caches: &'a mut [&'c mut KvCache],
    cancel: Option<&'a AtomicBool>,
    observer: Option<&'a mut dyn Observer>,
    profile: &'a mut Profile,
}

impl Model {
    /// Binds the weights of `shards`, which `census` found complete.
    ///
    /// # Errors
    /// A resident value is not finite, or the store of experts cannot be opened.
    pub fn load(
        config: Config,
        shards: &Shards,
        census: &Census,
        options: &BindOptions,
        compute: Compute,
    ) -> Result<Self> {
        let Bound { weights, experts, warnings } =
            weights::bind(&config, shards, census, options, &compute)?;
        let rope = Rope::new(config.rope_theta, config.d_rope);
        let max_context = config.max_context(options.no_indexer);
        let rerouter = options.lossy.map(Rerouter::new);
        Ok(Self { config, compute, weights, experts, rerouter, rope, max_context, warnings })
    }

    /// Longest context: the config's, or the indexer's `top_k` when it was left out.
    pub fn max_context(&self) -> usize {
        self.max_context
    }

    /// What is worth telling about the files.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// The store that reads experts from disk, if there is one.
    pub fn stream(&self) -> Option<&Stream> {
        self.experts.stream()
    }

    /// The lossy routing that was asked for, and what it did since the model was opened.
    pub fn lossy(&self) -> Option<(Lossy, Tally)> {
        self.rerouter.as_ref().map(|r| (r.mode, r.tally()))
    }

    /// Whether the MTP layer is loaded.
    pub fn has_mtp(&self) -> bool {
        self.weights.mtp.is_some()
    }

    /// Runs `rows` through the model; each must be the next position of its sequence's cache. Logits are computed for
    /// the rows that ask, hidden states for all.
    ///
    /// # Errors
    /// A token or position out of range, a value that is not finite (named by layer), a damaged expert, or [`Cancelled`].
    /// After an error the caches hold a part of the rows: truncate them.
    pub fn forward(
        &self,
        rows: &[Row],
        caches: &mut [&mut KvCache],
        ws: &mut Workspace,
        control: &mut Control<'_>,
        out: &mut Output,
    ) -> Result<()> {
        self.check_rows(rows, caches, 0, &mut ws.next)?;
        ws.profile.begin(rows.len());
        self.experts.begin_pass(rows.len());
        let mut x = std::mem::take(&mut ws.x);
        x.resize(rows.len() * self.config.d_model, 0.0);
        self.embed(rows, &mut x);
        let mut pass = Pass { rows, caches, ws, control };
        let result = self.layers(&mut pass, &mut x).and_then(|()| {
            pass.ws.profile.switch(Phase::Head);
            self.finish(&mut pass, &x, &self.weights.norm, out)
        });
        ws.x = x;
        ws.profile.switch(Phase::Embedding);
        self.experts.end_pass(result.is_ok());
        result
    }

    /// Runs the MTP layer: row p takes token p+1 (in `rows[..].token`) and the main model's final hidden state of
    /// position p, and predicts token p+2. `hidden` is (rows, d_model). The output's hidden states are those after the
    /// MTP norm.
    ///
    /// # Errors
    /// As in [`Model::forward`], or the model has no MTP layer. After an error truncate the MTP layer of the caches
    /// ([`KvCache::truncate_layer`]).
    pub fn forward_mtp(
        &self,
        rows: &[Row],
        hidden: &[f32],
        caches: &mut [&mut KvCache],
        ws: &mut Workspace,
        control: &mut Control<'_>,
        out: &mut Output,
    ) -> Result<()> {
        let (c, n) = (&self.config, self.config.n_layers);
        let Some(mtp) = &self.weights.mtp else { anyhow::bail!("this model has no MTP layer") };
        ensure!(hidden.len() == rows.len() * c.d_model, "one hidden state per row");
        self.check_rows(rows, caches, n, &mut ws.next)?;
        ws.profile.begin(rows.len());
        let mut embedded = vec![0.0; rows.len() * c.d_model];
        self.embed(rows, &mut embedded);
        let mut z = Acts::default();
        let mut finite = true;
        for (r, pair) in z.fill(rows.len(), 2 * c.d_model).chunks_mut(2 * c.d_model).enumerate() {
            let of_row = r * c.d_model..(r + 1) * c.d_model;
            let (e, h) = pair.split_at_mut(c.d_model);
            finite &=
                self.compute.kernels.rms_norm(&embedded[of_row.clone()], &mtp.e_norm, c.rms_eps, e);
            finite &= self.compute.kernels.rms_norm(&hidden[of_row], &mtp.h_norm, c.rms_eps, h);
        }
        ensure!(finite && self.compute.prepare(&mut z), "layer {n}: the MTP input is not finite");
        let mut x = embedded;
        self.compute.matmul(&mtp.eh, z.input(0), rows.len(), &mut x);
        let mut pass = Pass { rows, caches, ws, control };
        pass.start(&self.rope);
        self.layer(n, &mtp.layer, &mut pass, &mut x)?;
        pass.ws.profile.switch(Phase::Head);
        self.finish(&mut pass, &x, &mtp.norm, out)?;
        pass.ws.profile.switch(Phase::Embedding);
        Ok(())
    }

    /// Logits of rows of hidden states after a final norm, (rows, d_model) → (rows, vocab).
    ///
    /// # Errors
    /// A logit is not finite.
    pub fn logits(&self, hidden: &[f32], ws: &mut Workspace, out: &mut Vec<f32>) -> Result<()> {
        let (d, vocab) = (self.config.d_model, self.config.vocab);
        let rows = hidden.len() / d;
        ws.head.fill(rows, d).copy_from_slice(hidden);
        ensure!(self.compute.prepare(&mut ws.head), "the input of the head is not finite");
        out.resize(rows * vocab, 0.0);
        self.compute.matmul(&self.weights.head, ws.head.input(0), rows, out);
        // The largest magnitude, as bits: infinity and NaN are above every number.
        let top = out.iter().fold(0, |m, v| m.max(v.to_bits() & 0x7fff_ffff));
        ensure!(top < f32::INFINITY.to_bits(), "a logit is not finite");
        Ok(())
    }

    fn check_rows(
        &self,
        rows: &[Row],
        caches: &[&mut KvCache],
        layer: usize,
        next: &mut Vec<usize>,
    ) -> Result<()> {
        next.clear();
        next.extend(caches.iter().map(|c| c.layer_len(layer)));
        for row in rows {
            ensure!(
                (row.token as usize) < self.config.vocab,
                "token id {} is out of range, the vocabulary has {} ids",
                row.token,
                self.config.vocab
            );
            ensure!(
                row.pos < self.max_context,
                "position {} is beyond the context of {}",
                row.pos,
                self.max_context
            );
            let Some(next) = next.get_mut(row.seq) else {
                anyhow::bail!("row of sequence {} of {}", row.seq, caches.len())
            };
            ensure!(
                row.pos == *next,
                "row at position {} of a sequence whose next position is {next}",
                row.pos
            );
            *next += 1;
        }
        Ok(())
    }

    fn embed(&self, rows: &[Row], x: &mut [f32]) {
        let embed = self.weights.embed.view();
        for (row, x) in rows.iter().zip(x.chunks_mut(self.config.d_model)) {
            self.compute.kernels.dequant_row(&embed, row.token as usize, x);
        }
    }

    fn layers(&self, pass: &mut Pass<'_, '_, '_>, x: &mut [f32]) -> Result<()> {
        pass.start(&self.rope);
        for (i, layer) in self.weights.layers.iter().enumerate() {
            self.layer(i, layer, pass, x)?;
            if let Some(observer) = &mut pass.control.observer {
                observer.progress(i + 1, self.weights.layers.len());
            }
        }
        Ok(())
    }

    /// One decoder layer over all rows.
    fn layer(
        &self,
        i: usize,
        layer: &Layer,
        pass: &mut Pass<'_, '_, '_>,
        x: &mut [f32],
    ) -> Result<()> {
        let (d, pairs) = (self.config.d_model, self.rope.pairs());
        let ws = &mut *pass.ws;
        for (b, x) in x.chunks_mut(BLOCK * d).enumerate() {
            let of_block = b * BLOCK..(b * BLOCK + x.len() / d);
            ws.profile.switch(Phase::Attention);
            let mut block = Block {
                rows: &pass.rows[of_block.clone()],
                angles: &ws.angles[of_block.start * pairs..of_block.end * pairs],
                caches: pass.caches,
                cancel: pass.control.cancel,
                observer: reborrow(&mut pass.control.observer),
                profile: &mut ws.profile,
            };
            block.check_cancel()?;
            let selections = &mut ws.selections[of_block];
            mla::attention(self, i, layer, &mut block, x, selections, &mut ws.attention)?;
        }
        let mut block = Block {
            rows: pass.rows,
            angles: &ws.angles,
            caches: pass.caches,
            cancel: pass.control.cancel,
            observer: reborrow(&mut pass.control.observer),
            profile: &mut ws.profile,
        };
        moe::feed_forward(self, i, layer, &mut block, x, &mut ws.feed_forward)?;
        if let Some(observer) = &mut pass.control.observer {
            for (row, x) in pass.rows.iter().zip(x.chunks(d)) {
                observer.hidden(i, *row, x);
            }
        }
        Ok(())
    }

    /// Final norm of all rows, logits of those that ask.
    fn finish(
        &self,
        pass: &mut Pass<'_, '_, '_>,
        x: &[f32],
        norm: &[f32],
        out: &mut Output,
    ) -> Result<()> {
        let d = self.config.d_model;
        out.hidden.resize(x.len(), 0.0);
        let finite = self.compute.norm_rows(x, norm, self.config.rms_eps, &mut out.hidden);
        ensure!(finite, "the hidden state after the last layer is not finite");
        let mut wanted = std::mem::take(&mut pass.ws.wanted);
        wanted.clear();
        for (row, hidden) in pass.rows.iter().zip(out.hidden.chunks(d)) {
            if row.logits {
                wanted.extend_from_slice(hidden);
            }
        }
        let result = self.logits(&wanted, pass.ws, &mut out.logits);
        pass.ws.wanted = wanted;
        result
    }
}

/// One forward pass: its rows and what it works on.
struct Pass<'a, 'b, 'c> {
    rows: &'a [Row],
    caches: &'a mut [&'c mut KvCache],
    ws: &'a mut Workspace,
    control: &'a mut Control<'b>,
}

impl Pass<'_, '_, '_> {
    /// Forgets the last pass' key choices and computes the rows' rotations, which all layers share.
    fn start(&mut self, rope: &Rope) {
        let ws = &mut *self.ws;
        ws.selections.resize_with(self.rows.len(), Selection::default);
        ws.selections.iter_mut().for_each(Selection::reset);
        ws.angles.clear();
        for row in self.rows {
            rope.angles(row.pos, &mut ws.angles);
        }
    }
}

/// The part of a block that tasks share.
#[derive(Clone, Copy)]
struct Shared<'a, 'c> {
    rows: &'a [Row],
    angles: &'a [(f32, f32)],
    caches: &'a [&'c mut KvCache],
}

impl<'c> Block<'_, 'c> {
    fn shared(&self) -> Shared<'_, 'c> {
        Shared { rows: self.rows, angles: self.angles, caches: self.caches }
    }

    fn check_cancel(&self) -> Result<()> {
        if self.cancel.is_some_and(|c| c.load(Ordering::Relaxed)) {
            return Err(Cancelled.into());
        }
        Ok(())
    }
}

fn reborrow<'a>(observer: &'a mut Option<&mut dyn Observer>) -> Option<&'a mut dyn Observer> {
    match observer {
        Some(o) => Some(&mut **o),
        None => None,
    }
}
