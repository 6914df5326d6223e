//! The routed experts: the one way to reach their weights.
//!
//! They are in memory of their own, mapped as stored, or streamed: read from disk into slots of a fixed budget when a
//! layer asks for them. A layer opens a [`Batch`] of the experts that it wants and computes each as soon as it is
//! there; what is resident comes first, while the rest is read.
#![forbid(unsafe_code)]

mod ahead;
mod drives;
mod forecast;
mod loader;
pub mod policy;
mod record;
pub mod replay;
mod slots;
mod stream;
pub mod trace;
pub mod usage;

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::Result;

pub use ahead::Lookahead;
pub use drives::{Files, Source, Warn};
use record::Records;
pub use stream::{Io, Stats, Stream, StreamOptions, slot_bytes};

use crate::store::Mat;

/// The three matrices of a gated MLP.
pub struct GatedMlp {
    /// (d_ff, d_model)
    pub gate: Mat,
    /// (d_ff, d_model)
    pub up: Mat,
    /// (d_model, d_ff)
    pub down: Mat,
}

impl GatedMlp {
    /// The matrices, to be moved.
    pub fn mats(&mut self) -> [&mut Mat; 3] {
        [&mut self.gate, &mut self.up, &mut self.down]
    }

    /// The matrices with the names of their parts.
    pub fn parts(&self) -> [(&'static str, &Mat); 3] {
        [("gate_proj", &self.gate), ("up_proj", &self.up), ("down_proj", &self.down)]
    }
}

/// Tensor name of (layer, expert, part), for messages.
pub type Name = fn(usize, usize, &str) -> String;

/// All experts as they lie in files.
struct Library {
    records: Records,
    layers: Vec<Vec<GatedMlp>>,
    /// Experts of the layer that has most.
    width: usize,
}

impl Library {
    fn key(&self, layer: usize, id: u32) -> u32 {
        (layer * self.width) as u32 + id
    }

    fn place(&self, key: u32) -> (usize, usize) {
        (key as usize / self.width, key as usize % self.width)
    }

    fn record(&self, key: u32) -> &record::Record {
        let (layer, id) = self.place(key);
        &self.records.layers[layer][id]
    }

    fn like(&self, key: u32) -> &GatedMlp {
        let (layer, id) = self.place(key);
        &self.layers[layer][id]
    }
}

struct Slot {
    mlp: GatedMlp,
    checked: AtomicBool,
}

enum Place {
    /// In memory or mapped: all of them can be used at any time.
    Held(Vec<Vec<Slot>>),
    Streamed(Box<Stream>),
}

/// All routed experts of a model, by layer and id.
pub struct Experts {
    place: Place,
    name: Name,
}

impl Experts {
    /// Experts that can be used where they lie; a layer without routed experts has an empty list.
    pub fn held(layers: Vec<Vec<GatedMlp>>, name: Name) -> Self {
        let slot = |mlp| Slot { mlp, checked: AtomicBool::new(false) };
        let layers = layers.into_iter().map(|l| l.into_iter().map(slot).collect()).collect();
        Self { place: Place::Held(layers), name }
    }

    /// Experts that are read into slots when they are wanted.
    ///
    /// # Errors
    /// An expert is not as stored in a file, a file cannot be opened, or the system refuses memory or threads.
    pub fn streamed(
        layers: Vec<Vec<GatedMlp>>,
        name: Name,
        options: &StreamOptions,
    ) -> Result<Self> {
        let stream = Box::new(Stream::new(layers, name, options)?);
        Ok(Self { place: Place::Streamed(stream), name })
    }

    /// Opens the experts `wanted` of a layer, ascending and distinct.
    pub fn batch<'a>(&'a self, layer: usize, wanted: &'a [u32]) -> Batch<'a> {
        Batch(match &self.place {
            Place::Held(layers) => {
                Kind::Held { slots: &layers[layer], name: self.name, layer, wanted, given: 0 }
            }
            Place::Streamed(stream) => Kind::Streamed(stream.batch(layer, wanted)),
        })
    }

    /// A pass over so many rows begins.
    pub fn begin_pass(&self, rows: usize) {
        self.stream().into_iter().for_each(|s| s.begin_pass(rows));
    }

    /// The pass is over.
    pub fn end_pass(&self, ok: bool) {
        self.stream().into_iter().for_each(|s| s.end_pass(ok));
    }

    /// Whether to tell batches what the next layer will probably want.
    pub fn looks_ahead(&self) -> bool {
        self.stream().is_some_and(Stream::looks_ahead)
    }

    /// Counts the experts that rows of a layer chose.
    pub fn count(&self, layer: usize, route: &[(u32, f32)]) {
        self.stream().into_iter().for_each(|s| s.count(layer, route));
    }

    /// The store that reads experts from disk, if there is one.
    pub fn stream(&self) -> Option<&Stream> {
        match &self.place {
            Place::Held(_) => None,
            Place::Streamed(stream) => Some(stream),
        }
    }
}

/// The experts that one layer wants; each stays where it is from being given out until the next [`Batch::next`].
pub struct Batch<'a>(Kind<'a>);

enum Kind<'a> {
    Held { slots: &'a [Slot], name: Name, layer: usize, wanted: &'a [u32], given: usize },
    Streamed(stream::Batch<'a>),
}

impl Batch<'_> {
    /// Fills `ready` with those of `within`, indices into what was wanted, that are there and were not given out yet.
    /// Waits until there is one; empty when all of them were. Ranges ascend from call to call.
    ///
    /// # Errors
    /// An expert cannot be read or has a scale that is not finite; `cancel` was set while waiting
    /// ([`crate::experts::Interrupted`]).
    pub fn next(
        &mut self,
        within: Range<usize>,
        ready: &mut Vec<u32>,
        cancel: Option<&AtomicBool>,
    ) -> Result<()> {
        match &mut self.0 {
            Kind::Held { slots, name, layer, wanted, given } => {
                ready.clear();
                for i in *given..within.end.max(*given) {
                    let id = wanted[i] as usize;
                    let slot = &slots[id];
                    if !slot.checked.load(Ordering::Relaxed) {
                        for (part, mat) in slot.mlp.parts() {
                            mat.check_scales(&name(*layer, id, part))?;
                        }
                        slot.checked.store(true, Ordering::Relaxed);
                    }
                    ready.push(i as u32);
                }
                *given = within.end.max(*given);
                Ok(())
            }
            Kind::Streamed(batch) => batch.next(within, ready, cancel),
        }
    }

    /// The weights of a wanted expert that was given out by the last [`Batch::next`].
    ///
    /// # Panics
    /// When it was not.
    pub fn get(&self, index: usize) -> &GatedMlp {
        match &self.0 {
            Kind::Held { slots, wanted, .. } => &slots[wanted[index] as usize].mlp,
            Kind::Streamed(batch) => batch.get(index),
        }
    }

    /// Names experts that another layer will probably want, likeliest first. They are read while nothing that is wanted
    /// is to be read.
    pub fn read_ahead(&mut self, layer: usize, ids: &[u32]) {
        if let Kind::Streamed(batch) = &mut self.0 {
            batch.read_ahead(layer, ids);
        }
    }

    /// Time spent waiting for reads.
    pub fn waited(&self) -> Duration {
        match &self.0 {
            Kind::Held { .. } => Duration::ZERO,
            Kind::Streamed(batch) => batch.waited(),
        }
    }
}

/// The wait for an expert was given up because its cancel flag was set.
#[derive(Debug)]
pub struct Interrupted;

impl std::fmt::Display for Interrupted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("interrupted while waiting for an expert")
    }
}

impl std::error::Error for Interrupted {}
