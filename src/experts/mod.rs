//! The routed experts: the one way to reach their weights.
//!
//! They are either in memory of their own, or mapped as stored when they do not fit; then the system's page cache
//! decides what is in memory, and a damaged scale is found when its expert is first used, so that loading does not read
//! the whole model.
#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Result;

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

struct Slot {
    mlp: GatedMlp,
    checked: AtomicBool,
}

/// All routed experts of a model, by layer and id.
pub struct Experts {
    layers: Vec<Vec<Slot>>,
    /// Tensor name of (layer, expert, part), for messages.
    name: fn(usize, usize, &str) -> String,
}

impl Experts {
    /// Experts of each layer; a layer without routed experts has an empty list.
    pub fn new(layers: Vec<Vec<GatedMlp>>, name: fn(usize, usize, &str) -> String) -> Self {
        let slot = |mlp| Slot { mlp, checked: AtomicBool::new(false) };
        Self {
            layers: layers.into_iter().map(|l| l.into_iter().map(slot).collect()).collect(),
            name,
        }
    }

    /// The weights of one expert.
    ///
    /// # Panics
    /// When the layer or the id does not exist: ids come from the router, which is as long as the list.
    pub fn get(&self, layer: usize, id: usize) -> &GatedMlp {
        &self.layers[layer][id].mlp
    }

    /// Must be called before an expert is used: looks at its scales the first time.
    ///
    /// # Errors
    /// A scale of this expert is not finite.
    ///
    /// # Panics
    /// As in [`Experts::get`].
    pub fn check(&self, layer: usize, id: usize) -> Result<()> {
        let slot = &self.layers[layer][id];
        if !slot.checked.load(Ordering::Relaxed) {
            for (part, mat) in slot.mlp.parts() {
                mat.check_scales(&(self.name)(layer, id, part))?;
            }
            slot.checked.store(true, Ordering::Relaxed);
        }
        Ok(())
    }
}
