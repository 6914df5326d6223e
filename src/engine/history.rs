//! How often experts were used: what of it says how many will be in slots.
//!
//! MERGE: `counts` is to be replaced by the reader of `experts/usage.rs`, which also writes the file.
#![forbid(unsafe_code)]

use std::path::Path;

use anyhow::{Context, Result, ensure};

use super::plan::Plan;

/// Name of the file in a model directory.
pub const HISTORY_FILE: &str = ".coli_usage";
/// Largest history that is read.
const MAX_BYTES: u64 = 1 << 26;

/// Uses of experts of the decoder layers.
#[derive(Clone, Debug)]
pub struct History {
    /// The most used first.
    counts: Vec<u64>,
}

impl History {
    /// Reads a history of the planned model.
    ///
    /// # Errors
    /// The file cannot be read, is damaged, or belongs to another model.
    pub fn read(path: &Path, plan: &Plan) -> Result<Self> {
        let mut kept = Vec::new();
        for (layer, expert, count) in counts(path)? {
            // The MTP layer comes behind the decoder layers; only drafts use it.
            ensure!(
                layer <= plan.n_layers && (expert as usize) < plan.n_experts,
                "{}: layer {layer}, expert {expert}, but the model has {} layers of {} experts; the file belongs to another model",
                path.display(),
                plan.n_layers,
                plan.n_experts
            );
            if layer < plan.n_layers {
                kept.push(count);
            }
        }
        kept.sort_unstable_by(|a, b| b.cmp(a));
        Ok(Self { counts: kept })
    }

    /// Share of uses that found their expert in memory, had the `slots` most used ones been there; `None` when nothing
    /// was used.
    pub fn hits(&self, slots: usize) -> Option<f64> {
        let sum = |counts: &[u64]| counts.iter().map(|&n| n as f64).sum::<f64>();
        let all = sum(&self.counts);
        (all > 0.0).then(|| sum(&self.counts[..slots.min(self.counts.len())]) / all)
    }
}

/// Layer, expert and uses, line by line. Lines that begin with a negative number are headers.
fn counts(path: &Path) -> Result<Vec<(usize, u32, u64)>> {
    let at = || path.display();
    let size = std::fs::metadata(path).with_context(|| format!("cannot read {}", at()))?.len();
    ensure!(size <= MAX_BYTES, "{}: {size} bytes, at most {MAX_BYTES} are read", at());
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", at()))?;
    let mut counts = Vec::new();
    for (i, line) in text.lines().enumerate() {
        let fields: Vec<&str> = line.split_whitespace().collect();
        if fields.first().is_none_or(|f| f.starts_with('-')) {
            continue;
        }
        let parsed = match fields[..] {
            [layer, expert, count] => {
                layer.parse().ok().zip(expert.parse().ok()).zip(count.parse().ok())
            }
            _ => None,
        };
        let ((layer, expert), count) = parsed.with_context(|| {
            format!("{}: line {}: expected `<layer> <expert> <count>`", at(), i + 1)
        })?;
        counts.push((layer, expert, count));
    }
    Ok(counts)
}
