//! Where the bytes of one expert lie on disk, and how they lie in a slot.
//!
//! A record is a few runs: stretches of a file that are read at once. In a slot every run starts on a page and keeps
//! its position inside the page, as direct reads want it.
#![forbid(unsafe_code)]

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Result;
use memmap2::MmapMut;

use super::GatedMlp;
use crate::store::{Bytes, Mat, Scales, ShardFile};

/// Positions and lengths of direct reads are multiples of this.
pub(super) const PAGE: usize = 4096;

/// A stretch of a file, read at once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Run {
    /// Index of the file in [`Records::files`].
    pub(super) file: usize,
    /// First byte in the file.
    pub(super) start: usize,
    /// One past the last byte in the file.
    pub(super) end: usize,
    /// Where `start`, rounded down to a page, lies in the slot.
    pub(super) at: usize,
}

impl Run {
    /// First byte in the file of the pages that hold the run.
    pub(super) fn first_page(&self) -> usize {
        self.start / PAGE * PAGE
    }

    /// Bytes of the pages that hold the run.
    pub(super) fn span(&self) -> usize {
        self.end.next_multiple_of(PAGE) - self.first_page()
    }

    /// Whether a range of a file lies in the run.
    fn holds(&self, file: usize, range: &Range<usize>) -> bool {
        self.file == file && self.start <= range.start && range.end <= self.end
    }
}

/// Where one matrix lies in a slot.
struct Part {
    codes: Range<usize>,
    scales: Option<Range<usize>>,
}

/// Where one expert lies on disk and in its slot.
pub(super) struct Record {
    /// What is read, by file and position.
    pub(super) runs: Vec<Run>,
    /// Bytes of a slot that holds it.
    pub(super) slot_bytes: usize,
    parts: [Part; 3],
    path: PathBuf,
}

/// The records of all experts of a model.
pub(super) struct Records {
    /// The files that runs name.
    pub(super) files: Vec<Arc<ShardFile>>,
    /// By layer, then expert.
    pub(super) layers: Vec<Vec<Record>>,
}

impl Records {
    /// Where the experts of `layers` lie; `None` if one is not as stored in a file.
    pub(super) fn of(layers: &[Vec<GatedMlp>]) -> Option<Self> {
        let mut files = Vec::new();
        let layers = layers
            .iter()
            .map(|layer| layer.iter().map(|mlp| Record::of(mlp, &mut files)).collect())
            .collect::<Option<_>>()?;
        Some(Self { files, layers })
    }
}

impl Record {
    fn of(mlp: &GatedMlp, files: &mut Vec<Arc<ShardFile>>) -> Option<Self> {
        let mut index = |bytes: &Bytes| {
            let known = files.iter().rposition(|f| Arc::ptr_eq(f, bytes.file()));
            known.unwrap_or_else(|| {
                files.push(Arc::clone(bytes.file()));
                files.len() - 1
            })
        };
        let mut stored = Vec::new();
        for (_, mat) in mlp.parts() {
            let (codes, scales) = mat.stored()?;
            stored.push((index(codes), codes.range()));
            stored.extend(scales.map(|s| (index(s), s.range())));
        }
        let runs = runs(&stored);
        let place = |bytes: &Bytes, file: usize| {
            let run = runs.iter().find(|r| r.holds(file, &bytes.range()))?;
            let start = run.at + bytes.range().start - run.first_page();
            Some(start..start + bytes.len())
        };
        let part = |mat: &Mat, index: &mut dyn FnMut(&Bytes) -> usize| {
            let (codes, scales) = mat.stored()?;
            Some(Part {
                codes: place(codes, index(codes))?,
                scales: match scales {
                    Some(s) => Some(place(s, index(s))?),
                    None => None,
                },
            })
        };
        let [(_, gate), (_, up), (_, down)] = mlp.parts();
        let parts = [part(gate, &mut index)?, part(up, &mut index)?, part(down, &mut index)?];
        let slot_bytes = runs.iter().map(Run::span).sum();
        Some(Self { runs, slot_bytes, parts, path: gate.path().to_owned() })
    }

    /// Bytes that are read, whole pages.
    pub(super) fn bytes(&self) -> usize {
        self.runs.iter().map(Run::span).sum()
    }

    /// The expert whose bytes were read into `slot`; `like` has its shapes and formats.
    ///
    /// # Errors
    /// A scale is not finite; the slot comes back.
    pub(super) fn bind(
        &self,
        like: &GatedMlp,
        slot: MmapMut,
        name: &dyn Fn(&str) -> String,
    ) -> Result<Loaded, (anyhow::Error, Option<MmapMut>)> {
        let memory = ShardFile::in_buffer(&self.path, slot);
        let mat = |like: &Mat, part: &Part| {
            let scales = match &part.scales {
                Some(range) => Scales::new(Bytes::of(&memory, range.clone())),
                None => Scales::owned(Vec::new()),
            };
            let codes = Bytes::of(&memory, part.codes.clone());
            Mat::new(like.format(), like.rows(), like.cols(), codes, scales)
        };
        let [gate, up, down] = &self.parts;
        let mlp = GatedMlp {
            gate: mat(&like.gate, gate),
            up: mat(&like.up, up),
            down: mat(&like.down, down),
        };
        let loaded = Loaded { mlp, memory };
        let checked = loaded.mlp.parts().iter().try_for_each(|(p, m)| m.check_scales(&name(p)));
        match checked {
            Ok(()) => Ok(loaded),
            Err(e) => Err((e, loaded.into_slot())),
        }
    }
}

/// Ranges of files as runs: neighbours are one run.
fn runs(stored: &[(usize, Range<usize>)]) -> Vec<Run> {
    let mut sorted = stored.to_vec();
    sorted.sort_by_key(|(file, r)| (*file, r.start));
    let mut runs: Vec<Run> = Vec::new();
    for (file, range) in sorted {
        match runs.last_mut() {
            Some(run) if run.file == file && run.end == range.start => run.end = range.end,
            _ => runs.push(Run { file, start: range.start, end: range.end, at: 0 }),
        }
    }
    let mut at = 0;
    for run in &mut runs {
        run.at = at;
        at += run.span();
    }
    runs
}

/// An expert in a slot.
pub(super) struct Loaded {
    /// Its matrices.
    pub(super) mlp: GatedMlp,
    memory: Arc<ShardFile>,
}

impl Loaded {
    /// The slot, to be filled anew. `None` while a copy of a matrix is alive, which nothing here makes.
    pub(super) fn into_slot(self) -> Option<MmapMut> {
        let Self { mlp, memory } = self;
        drop(mlp);
        ShardFile::into_buffer(memory)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_are_one_run_and_runs_keep_their_place_in_the_page() {
        let stored = [(0, 9000..9100), (0, 5000..9000), (1, 10..20), (0, 20_000..20_001)];
        let runs = runs(&stored);
        let run = |file, start, end, at| Run { file, start, end, at };
        assert_eq!(
            runs,
            [run(0, 5000, 9100, 0), run(0, 20_000, 20_001, 8192), run(1, 10, 20, 12_288)]
        );
        assert_eq!(runs[0].first_page(), 4096);
        assert_eq!(runs[0].span(), 8192);
    }
}
