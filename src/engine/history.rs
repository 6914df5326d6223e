//! The usage history of a model: which experts were chosen, in this process and before.
#![forbid(unsafe_code)]

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Result;

use crate::experts::Stream;
use crate::experts::usage::{FILE_NAME, Shape, Usage};

/// How a usage history is kept.
#[derive(Clone, Debug, PartialEq)]
pub struct UsageOptions {
    /// The file; `None` is the one in the model directory.
    pub file: Option<PathBuf>,
    /// What counts of the past are multiplied by, once per process.
    pub decay: f64,
}

impl Default for UsageOptions {
    fn default() -> Self {
        Self { file: None, decay: 0.9 }
    }
}

/// A history and the file that it is kept in.
pub(super) struct History {
    path: PathBuf,
    shape: Shape,
    /// Whether the user chose the file.
    named: bool,
    decay: f64,
    decayed: AtomicBool,
}

impl History {
    /// The history of a model directory and what it has so far; a damaged file that nobody named is left alone, with
    /// a warning.
    ///
    /// # Errors
    /// The file that was named cannot be used.
    pub(super) fn open(
        options: &UsageOptions,
        dir: Option<&Path>,
        shape: Shape,
        warnings: &mut Vec<String>,
    ) -> Result<Option<(Self, Usage)>> {
        let file = options.file.clone();
        let Some(path) = file.or_else(|| dir.map(|d| d.join(FILE_NAME))) else { return Ok(None) };
        let named = options.file.is_some();
        match Usage::read(&path, shape, named) {
            Ok(usage) => {
                let (decay, decayed) = (options.decay, AtomicBool::new(false));
                Ok(Some((Self { path, shape, named, decay, decayed }, usage)))
            }
            Err(e) if named => Err(e),
            Err(e) => {
                warnings.push(format!("the usage history is not used: {e:#}"));
                Ok(None)
            }
        }
    }

    /// Adds to the file what was chosen since the last time.
    ///
    /// # Errors
    /// The file cannot be read or written.
    pub(super) fn save(&self, stream: &Stream) -> Result<()> {
        // Another process may have added to it.
        let mut usage = Usage::read(&self.path, self.shape, self.named)?;
        if !self.decayed.swap(true, Ordering::Relaxed) {
            usage.decay(self.decay);
        }
        stream.take_chosen(&mut |layer, id, times| usage.add(layer, id, times));
        usage.write(&self.path)
    }
}
