//! One token timeline: its ids, its attention cache and the logits after the last id.
#![forbid(unsafe_code)]

use std::sync::atomic::AtomicBool;

use anyhow::{Result, ensure};

use super::Engine;
use crate::experts::trace::Recorder;
use crate::model::config::Config;
use crate::model::kv::{KvCache, KvType};
use crate::model::{Control, Observer, Output, Profile, Route, Row, Workspace};

/// Most rows of one forward pass in prefill: an expert is read once per this many tokens. A pass of GLM-5.2 holds
/// about 280 KB per row; the plan takes fewer rows where memory is short.
pub(super) const PREFILL_ROWS: usize = 4096;
/// Rows whose logits are held at a time: GLM-5.2 needs 0.6 MB for each.
const LOGIT_ROWS: usize = 64;

/// Told about progress in prefill: tokens done, counting the layers of the running pass, and tokens in all.
pub type Progress<'a> = dyn FnMut(f64, usize) + 'a;

/// A token timeline.
pub struct Session {
    tokens: Vec<u32>,
    kv: KvCache,
    rows: Vec<Row>,
    ws: Workspace,
    out: Output,
}

impl Session {
    pub(super) fn new(config: &Config, kv: KvType) -> Self {
        Self {
            tokens: Vec::new(),
            kv: KvCache::new(config, kv),
            rows: Vec::new(),
            ws: Workspace::default(),
            out: Output::default(),
        }
    }

    /// Ids so far.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Logits after the last id of the last [`Session::prefill`] or [`Session::push`].
    pub fn logits(&mut self) -> &mut [f32] {
        &mut self.out.logits
    }

    /// Time by phase of all passes of this session.
    pub fn profile(&self) -> &Profile {
        &self.ws.profile
    }

    /// Makes room for `n` more tokens, so that decoding them allocates nothing.
    pub fn reserve(&mut self, n: usize) {
        self.tokens.reserve_exact(n);
        self.kv.reserve(n);
    }

    /// Forgets every token from position `n` on.
    pub fn rewind(&mut self, n: usize) {
        self.tokens.truncate(n);
        self.kv.truncate(n);
        self.out.logits.clear();
    }

    /// Appends `tokens` and computes the logits after the last of them. After an error the session holds the tokens that
    /// it held before, without logits.
    ///
    /// # Errors
    /// The context would overflow, an id is out of range, the model computes something that is not finite, or
    /// [`crate::model::Cancelled`].
    pub fn prefill(
        &mut self,
        engine: &Engine,
        tokens: &[u32],
        cancel: Option<&AtomicBool>,
        progress: Option<&mut Progress<'_>>,
    ) -> Result<()> {
        self.run(engine, tokens, true, &mut |_, _, _, _| Ok(()), cancel, progress)
    }

    /// Appends one token and computes the logits after it.
    ///
    /// # Errors
    /// As in [`Session::prefill`].
    pub fn push(&mut self, engine: &Engine, token: u32, cancel: Option<&AtomicBool>) -> Result<()> {
        self.prefill(engine, &[token], cancel, None)
    }

    /// Appends `tokens` and hands `each` the logits after every token from index `first` of `tokens` on, in order.
    ///
    /// # Errors
    /// As in [`Session::prefill`], or the error of `each`.
    pub fn score(
        &mut self,
        engine: &Engine,
        tokens: &[u32],
        first: usize,
        mut each: impl FnMut(usize, &[f32]) -> Result<()>,
        cancel: Option<&AtomicBool>,
    ) -> Result<()> {
        let (d, vocab) = (engine.model.config.d_model, engine.model.config.vocab);
        // Whole passes through the layers, then the head in small blocks: logits are large, experts are read per pass.
        let mut after = |done: usize, hidden: &[f32], ws: &mut Workspace, logits: &mut Vec<f32>| {
            let skip = first.saturating_sub(done).min(hidden.len() / d);
            for (b, block) in hidden[skip * d..].chunks(LOGIT_ROWS * d).enumerate() {
                engine.model.logits(block, ws, logits)?;
                let at = done + skip + b * LOGIT_ROWS;
                logits.chunks(vocab).enumerate().try_for_each(|(i, l)| each(at + i, l))?;
            }
            Ok(())
        };
        self.run(engine, tokens, false, &mut after, cancel, None)
    }

    /// Appends `tokens` in passes of bounded size. `after` sees the number of tokens done before a pass and the pass'
    /// hidden states, and may use the workspace and the logits buffer.
    fn run(
        &mut self,
        engine: &Engine,
        tokens: &[u32],
        last_logits: bool,
        after: &mut dyn FnMut(usize, &[f32], &mut Workspace, &mut Vec<f32>) -> Result<()>,
        cancel: Option<&AtomicBool>,
        mut progress: Option<&mut Progress<'_>>,
    ) -> Result<()> {
        let start = self.tokens.len();
        let total = start + tokens.len();
        ensure!(
            total <= engine.context(),
            "{total} tokens exceed the context of {}; shorten the text or raise --ctx (the model allows {})",
            engine.context(),
            engine.model.max_context()
        );
        let rows = engine.plan.rows;
        for (c, chunk) in tokens.chunks(rows).enumerate() {
            let done = c * rows;
            self.rows.clear();
            self.rows.extend((done..).zip(chunk).map(|(i, &token)| {
                let logits = last_logits && i + 1 == tokens.len();
                Row { seq: 0, pos: start + i, token, logits }
            }));
            let mut recorder = engine.recorder();
            let mut watch = Watch {
                progress: progress.as_deref_mut(),
                recorder: recorder.as_deref_mut(),
                done,
                rows: chunk.len(),
                total: tokens.len(),
            };
            let mut control = Control { cancel, observer: Some(&mut watch) };
            let caches = &mut [&mut self.kv];
            let forward =
                engine.model.forward(&self.rows, caches, &mut self.ws, &mut control, &mut self.out);
            let recorded = recorder.map_or(Ok(()), |mut r| r.end_pass());
            let result = forward.and(recorded).and_then(|()| {
                let Output { logits, hidden } = &mut self.out;
                after(done, hidden, &mut self.ws, logits)
            });
            if let Err(e) = result {
                self.rewind(start);
                return Err(e);
            }
            self.tokens.extend_from_slice(chunk);
        }
        Ok(())
    }
}

/// Turns layers done into tokens done, and records routes.
struct Watch<'a, 'b> {
    progress: Option<&'a mut Progress<'b>>,
    recorder: Option<&'a mut Recorder>,
    done: usize,
    rows: usize,
    total: usize,
}

impl Observer for Watch<'_, '_> {
    fn routed(&mut self, layer: usize, _row: Row, route: &Route) {
        if let Some(recorder) = &mut self.recorder {
            recorder.routed(layer, route);
        }
    }

    fn progress(&mut self, layers_done: usize, layers: usize) {
        if let Some(progress) = &mut self.progress {
            progress(
                self.done as f64 + self.rows as f64 * layers_done as f64 / layers as f64,
                self.total,
            );
        }
    }
}
