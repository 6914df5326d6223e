//! Reading from the drives that hold the model: its own, and mirrors that share the work.
//!
//! With mirrors every stretch is cut so that all drives finish at about the same time, by the speed that each had so
//! far. A mirror that fails is not asked again. Direct reads go past the system's cache, so the budget is the only
//! cache; they are whole pages.
#![forbid(unsafe_code)]

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use anyhow::{Context, Result, anyhow, bail, ensure};

use super::record::{PAGE, Run};
use crate::store::ShardFile;
use crate::sys;

/// Largest header that is compared.
const MAX_HEADER: u64 = 256 << 20;
/// Weight of the last read in the speed of a drive.
const NEWS: f64 = 0.1;

/// Where bytes come from. Tests put a source with faults in between.
pub trait Source: Send + Sync {
    /// Reads from byte `at` of a file: how many bytes were read, 0 at its end. Direct reads keep to whole pages.
    ///
    /// # Errors
    /// Those of the system; `Interrupted` is tried again.
    fn read_at(&self, file: usize, buffer: &mut [u8], at: u64, direct: bool) -> io::Result<usize>;

    /// Whether direct reads are wanted and possible for this file.
    fn direct(&self, file: usize) -> bool;
}

/// Model files, opened for positioned reads.
pub struct Files(Vec<Opened>);

struct Opened {
    /// For messages, and for bytes that are in no file.
    shard: Arc<ShardFile>,
    /// Where it was opened: beside the model, or on a mirror.
    path: PathBuf,
    buffered: Option<File>,
    direct: Option<File>,
}

impl Files {
    /// Opens the files, or their namesakes in the directory `mirror`, for direct reads too where `direct` asks and the
    /// file system has them.
    ///
    /// # Errors
    /// A file cannot be opened.
    pub fn open(shards: &[Arc<ShardFile>], mirror: Option<&Path>, direct: bool) -> Result<Self> {
        let open = |shard: &Arc<ShardFile>| -> Result<Opened> {
            let path = match mirror {
                Some(dir) => dir.join(shard.path.file_name().unwrap_or_default()),
                None => shard.path.clone(),
            };
            let on_disk = shard.on_disk();
            let buffered = on_disk.then(|| File::open(&path)).transpose();
            Ok(Opened {
                shard: Arc::clone(shard),
                buffered: buffered.with_context(|| format!("cannot open {}", path.display()))?,
                direct: (on_disk && direct).then(|| sys::open_direct(&path).ok()).flatten(),
                path,
            })
        };
        shards.iter().map(open).collect::<Result<_>>().map(Self)
    }

    /// That these are copies of `originals`: as long, with the same header.
    ///
    /// # Errors
    /// One is not, or a header cannot be read.
    fn check_copies(&self, originals: &Self) -> Result<()> {
        for (copy, original) in self.0.iter().zip(&originals.0) {
            let (Some(a), Some(b)) = (&copy.buffered, &original.buffered) else {
                bail!("a model that is in no file has no mirror")
            };
            let (path, of) = (copy.path.display(), original.path.display());
            let len = |file: &File, path: &Path| {
                let len = file.metadata().map(|m| m.len());
                len.with_context(|| format!("cannot read {}", path.display()))
            };
            let (found, expected) = (len(a, &copy.path)?, len(b, &original.path)?);
            ensure!(
                found == expected,
                "{path}: {found} bytes, expected {expected} as in {of}; copy it again"
            );
            let header = |file: &File| -> io::Result<Vec<u8>> {
                let mut size = [0; 8];
                sys::read_exact_at(file, &mut size, 0)?;
                let size = u64::from_le_bytes(size).min(expected.saturating_sub(8)).min(MAX_HEADER);
                let mut header = vec![0; size as usize];
                sys::read_exact_at(file, &mut header, 8)?;
                Ok(header)
            };
            let read = |file: &File, path: &Path| {
                header(file).with_context(|| format!("cannot read {}", path.display()))
            };
            let same = read(a, &copy.path)? == read(b, &original.path)?;
            ensure!(same, "{path}: its header differs from that of {of}; copy it again");
        }
        Ok(())
    }

    fn path(&self, file: usize) -> &Path {
        &self.0[file].path
    }

    /// Asks the system to forget what it has cached of a file.
    pub(super) fn forget(&self, file: usize) {
        if let Some(file) = &self.0[file].buffered {
            sys::drop_from_cache(file);
        }
    }
}

impl Source for Files {
    fn read_at(&self, file: usize, buffer: &mut [u8], at: u64, direct: bool) -> io::Result<usize> {
        let opened = &self.0[file];
        if let Some(file) = opened.direct.as_ref().filter(|_| direct) {
            return sys::read_at(file, buffer, at);
        }
        if let Some(file) = &opened.buffered {
            return sys::read_at(file, buffer, at);
        }
        let bytes = opened.shard.bytes();
        let rest = &bytes[(at as usize).min(bytes.len())..];
        let n = rest.len().min(buffer.len());
        buffer[..n].copy_from_slice(&rest[..n]);
        Ok(n)
    }

    fn direct(&self, file: usize) -> bool {
        self.0[file].direct.is_some()
    }
}

/// Told about what goes wrong and is survived.
pub type Warn = fn(&str);

/// One place that all files can be read from.
struct Drive {
    source: Box<dyn Source>,
    paths: Vec<PathBuf>,
    failed: AtomicBool,
    /// Bytes per second, a moving mean, as the bits of an f64.
    speed: AtomicU64,
}

impl Drive {
    fn new(source: Box<dyn Source>, paths: Vec<PathBuf>) -> Self {
        // Until they were read from, all drives are taken to be equal.
        Self { source, paths, failed: AtomicBool::new(false), speed: AtomicU64::new(0) }
    }

    fn speed(&self) -> f64 {
        f64::from_bits(self.speed.load(Ordering::Relaxed))
    }

    /// Reads into `pages` what the file has from byte `first` on, a page boundary, up to byte `end`.
    fn read(&self, file: usize, pages: &mut [u8], first: usize, end: usize) -> Result<()> {
        if pages.is_empty() {
            return Ok(());
        }
        let started = Instant::now();
        let bytes = pages.len() as f64;
        read_pages(&*self.source, file, &self.paths[file], pages, first, end)?;
        let new = bytes / started.elapsed().as_secs_f64().max(1e-9);
        let old = self.speed();
        let mean = if old > 0.0 { old + NEWS * (new - old) } else { new };
        self.speed.store(mean.to_bits(), Ordering::Relaxed);
        Ok(())
    }
}

/// The drives that the model lies on.
pub(super) struct Drives {
    own: Drive,
    mirrors: Vec<Drive>,
    warn: Warn,
}

impl Drives {
    /// The model's own drive, read through `own`, and mirrors of `files`.
    ///
    /// # Errors
    /// A mirror is no copy of the files.
    pub(super) fn open(
        shards: &[Arc<ShardFile>],
        direct: bool,
        mirrors: &[PathBuf],
        between: Option<fn(Files) -> Box<dyn Source>>,
        warn: Warn,
    ) -> Result<Self> {
        let files = Files::open(shards, None, direct)?;
        let paths = |files: &Files| (0..shards.len()).map(|i| files.path(i).to_owned()).collect();
        let mirror = |dir: &PathBuf| -> Result<Drive> {
            let copies = Files::open(shards, Some(dir), direct)?;
            copies.check_copies(&files)?;
            let paths = paths(&copies);
            Ok(Drive::new(Box::new(copies), paths))
        };
        let mirrors = mirrors
            .iter()
            .map(|dir| mirror(dir).with_context(|| format!("mirror {}", dir.display())))
            .collect::<Result<_>>()?;
        let paths = paths(&files);
        let source = match between {
            Some(between) => between(files),
            None => Box::new(files),
        };
        Ok(Self { own: Drive::new(source, paths), mirrors, warn })
    }

    /// Reads one run into its place in a slot; what the model's own drive cannot read is tried once more.
    ///
    /// # Errors
    /// The own drive cannot read, or its file ends before the run does; the message names file and byte.
    pub(super) fn read(&self, run: &Run, slot: &mut [u8], retries: &mut u32) -> Result<()> {
        let pages = &mut slot[run.at..run.at + run.span()];
        let mirrors: Vec<&Drive> =
            self.mirrors.iter().filter(|m| !m.failed.load(Ordering::Relaxed)).collect();
        if mirrors.is_empty() {
            return self.read_own(run.file, pages, run.first_page(), run.end, retries);
        }
        let (own, parts) = cut(pages, &self.own, &mirrors);
        let own_end = run.end.min(run.first_page() + own.len());
        std::thread::scope(|scope| {
            let mut at = run.first_page() + own.len();
            let mut reads = Vec::new();
            for (mirror, pages) in mirrors.iter().zip(parts) {
                let (first, end) = (at, run.end.min(at + pages.len()));
                at += pages.len();
                if first < end {
                    let read = move || {
                        let result = mirror.read(run.file, pages, first, end);
                        (*mirror, pages, first, end, result)
                    };
                    let thread = std::thread::Builder::new().name("glm-mirror".to_owned());
                    let thread = thread.spawn_scoped(scope, read);
                    reads.push(thread.context("cannot start a thread that reads from a mirror")?);
                }
            }
            let mut result = self.read_own(run.file, own, run.first_page(), own_end, retries);
            for read in reads {
                let Ok((mirror, pages, first, end, failed)) = read.join() else {
                    bail!("a thread that read from a mirror died")
                };
                if let Err(e) = failed {
                    self.drop_mirror(mirror, &e);
                    if result.is_ok() {
                        result = self.read_own(run.file, pages, first, end, retries);
                    }
                }
            }
            result
        })
    }

    fn read_own(
        &self,
        file: usize,
        pages: &mut [u8],
        first: usize,
        end: usize,
        retries: &mut u32,
    ) -> Result<()> {
        self.own.read(file, pages, first, end).or_else(|_| {
            *retries += 1;
            self.own.read(file, pages, first, end)
        })
    }

    fn drop_mirror(&self, mirror: &Drive, e: &anyhow::Error) {
        if !mirror.failed.swap(true, Ordering::Relaxed) {
            (self.warn)(&format!("a mirror is no longer used: {e:#}"));
        }
    }
}

/// Cuts pages in proportion to the speeds of the drives.
fn cut<'a>(
    pages: &'a mut [u8],
    own: &Drive,
    mirrors: &[&Drive],
) -> (&'a mut [u8], Vec<&'a mut [u8]>) {
    let speeds: Vec<f64> = mirrors.iter().map(|m| m.speed()).chain([own.speed()]).collect();
    let unknown = speeds.contains(&0.0);
    let speed = |i: usize| if unknown { 1.0 } else { speeds[i] };
    let total: f64 = (0..speeds.len()).map(speed).sum();
    let n = pages.len() / PAGE;
    let mut rest = pages;
    let mut parts = Vec::new();
    for i in (0..mirrors.len()).rev() {
        let take = ((n as f64 * speed(i) / total) as usize * PAGE).min(rest.len());
        let (front, back) = rest.split_at_mut(rest.len() - take);
        parts.push(back);
        rest = front;
    }
    parts.reverse();
    (rest, parts)
}

/// Reads into `pages` what the file has from byte `first` on, a page boundary, up to byte `end`.
///
/// # Errors
/// The system cannot read, or the file ends before that; the message names file and byte.
pub(super) fn read_pages(
    source: &dyn Source,
    file: usize,
    path: &Path,
    pages: &mut [u8],
    first: usize,
    end: usize,
) -> Result<()> {
    let wanted = end - first;
    let mut direct = source.direct(file);
    let mut done = 0;
    while done < wanted {
        // What a direct read left in the middle of a page is read through the cache.
        direct &= done % PAGE == 0;
        let stop = if direct { pages.len() } else { wanted };
        let at = (first + done) as u64;
        match source.read_at(file, &mut pages[done..stop], at, direct) {
            Ok(0) => {
                return Err(anyhow!(
                    "{}: the file ends at byte {at}, bytes up to {end} were expected; it was truncated while in use",
                    path.display(),
                ));
            }
            Ok(n) => done += n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => {
                return Err(e).with_context(|| {
                    format!("{}: cannot read bytes {at} to {end}", path.display())
                });
            }
        }
    }
    Ok(())
}
