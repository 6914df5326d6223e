//! Short measurements of this machine, for `glm bench` and `glm plan`: reads of a drive, reads of memory, products.
#![forbid(unsafe_code)]

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use memmap2::MmapMut;

use crate::engine::{Expert, Span};
use crate::kernels::Acts;
use crate::model::Compute;
use crate::store::{Bytes, Mat, Scales, ShardFile, huge_pages};
use crate::sys;

/// Distances of prefetching that a plain read is tried with; the fastest counts.
pub(super) const AHEAD: [usize; 3] = [0, 1024, 2048];
/// More than the caches of most processors.
const COLD: u64 = 512 << 20;

/// Median; sorts.
pub(super) fn median(v: &mut [f64]) -> f64 {
    v.sort_by(f64::total_cmp);
    middle(v)
}

/// Median of sorted values.
pub(super) fn middle(v: &[f64]) -> f64 {
    match v.len() {
        0 => 0.0,
        n => (v[(n - 1) / 2] + v[n / 2]) / 2.0,
    }
}

/// Median, least and most.
pub(super) fn extremes(mut v: Vec<f64>) -> Span {
    let middle = median(&mut v);
    let end = |v: Option<&f64>| v.copied().unwrap_or_default();
    Span { low: end(v.first()), middle, high: end(v.last()) }
}

/// Median and quartiles: what a longer run will probably see.
fn quartiles(mut v: Vec<f64>) -> Span {
    let middle = median(&mut v);
    let at = |i: usize| v.get(i).copied().unwrap_or_default();
    let low = v.len().saturating_sub(1) / 4;
    Span { low: at(low), middle, high: at(v.len().saturating_sub(1 + low)) }
}

/// Seconds that `f` takes.
pub(super) fn seconds(f: impl FnOnce()) -> f64 {
    let started = Instant::now();
    f();
    started.elapsed().as_secs_f64()
}

/// Results of `f`, again and again until `time` is over, three at least.
fn repeated(time: Duration, mut f: impl FnMut() -> f64) -> Span {
    let started = Instant::now();
    let mut results = Vec::new();
    while results.len() < 3 || started.elapsed() < time {
        results.push(f());
    }
    quartiles(results)
}

/// Every thread reads its share of every part.
pub(super) fn read_all(compute: &Compute, parts: &[&[u8]], ahead: usize) {
    let threads = compute.pool.threads();
    let sum = AtomicU64::new(0);
    compute.pool.par(threads, |i| {
        for part in parts {
            let share = part.len().div_ceil(threads).next_multiple_of(256);
            let part = part.get(i * share..((i + 1) * share).min(part.len())).unwrap_or_default();
            sum.fetch_xor(compute.kernels.stream(part, ahead), Ordering::Relaxed);
        }
    });
    std::hint::black_box(sum.into_inner());
}

/// Bytes per second of plain reads of memory.
///
/// # Errors
/// The system refuses the memory to read.
pub(super) fn memory_speed(compute: &Compute, time: Duration) -> Result<Span> {
    let memory = filled(COLD)?;
    Ok(repeated(time, || {
        let once = |ahead| seconds(|| read_all(compute, &[&memory], ahead));
        memory.len() as f64 / AHEAD.into_iter().map(once).fold(f64::INFINITY, f64::min)
    }))
}

/// Bytes per second of products of one row with matrices as they lie in files.
///
/// # Errors
/// The system refuses the memory for them.
pub(super) fn product_speed(compute: &Compute, expert: &Expert, time: Duration) -> Result<Span> {
    let Expert { format, rows, cols, .. } = *expert;
    let (codes, scales) = (rows * format.row_bytes(cols), 4 * format.n_scales(rows, cols));
    let one = (codes + scales).next_multiple_of(4096);
    // What the numbers are makes no difference.
    let memory = filled(COLD / 4)?;
    let n = (memory.len() / one).max(1);
    let memory = if memory.len() < one { huge_pages(one)? } else { memory };
    let memory = ShardFile::in_buffer(Path::new("synthetic"), memory);
    let mats: Vec<Mat> = (0..n)
        .map(|i| {
            let bytes = |at: usize, len: usize| Bytes::of(&memory, at..at + len);
            let scales = Scales::new(bytes(i * one + codes, scales));
            Mat::new(format, rows, cols, bytes(i * one, codes), scales)
        })
        .collect();
    let mut x = Acts::default();
    x.fill(1, cols).fill(1.0);
    ensure!(compute.prepare(&mut x), "ones are finite");
    let mut y = vec![0.0; rows];
    let mut next = mats.iter().cycle();
    Ok(repeated(time, || {
        // An expert's worth.
        let few = next.by_ref().take(3.min(n));
        let taken = seconds(|| few.for_each(|mat| compute.matmul(mat, x.input(0), 1, &mut y)));
        (3.min(n) * (codes + scales)) as f64 / taken
    }))
}

/// Memory with something in it: pages that were never written are all the same.
fn filled(bytes: u64) -> Result<MmapMut> {
    let room = sys::available_memory().unwrap_or(u64::MAX) / 4;
    let mut memory = huge_pages(bytes.min(room).next_multiple_of(4096) as usize)?;
    memory.fill(1);
    Ok(memory)
}

/// A large file of a directory, opened for reads through the system's cache and past it.
pub(super) struct Drive {
    pub(super) path: PathBuf,
    pub(super) len: u64,
    pub(super) buffered: File,
    /// `None` where the file system has no such reads.
    pub(super) direct: Option<File>,
}

impl Drive {
    /// Opens the largest file of `dir`.
    ///
    /// # Errors
    /// There is none, or it cannot be read.
    pub(super) fn open(dir: &Path) -> Result<Self> {
        let (path, len) = largest_file(dir)?;
        let buffered =
            File::open(&path).with_context(|| format!("cannot open {}", path.display()))?;
        // A file system may open a file for direct reads and then refuse them.
        let works = |file: &File| {
            let mut page = sys::aligned_buffer(4096)?;
            sys::read_at(file, &mut page, 0)
        };
        let direct = sys::open_direct(&path).ok().filter(|file| works(file).is_ok());
        Ok(Self { path, len, buffered, direct })
    }

    /// Bytes per second of random reads as experts are read: past the system's cache where that can be done. The middle
    /// is the mean, because reads add up.
    ///
    /// # Errors
    /// The file is too small or cannot be read.
    pub(super) fn speed(&self, block: usize, readers: usize, time: Duration) -> Result<Span> {
        const PARTS: usize = 8;
        let mut reads = Reads::new(self, self.direct.is_none(), block, readers)?;
        let ends = reads.run(time, None)?;
        let mut start = 0.0;
        let mut speeds = Vec::new();
        for part in ends.chunks(ends.len().div_ceil(PARTS).max(1)) {
            let end = part[part.len() - 1];
            // Two readers may end at the same time.
            speeds.push((part.len() * block) as f64 / (end - start).max(1e-6));
            start = end;
        }
        let Span { low, high, .. } = quartiles(speeds);
        let middle = (ends.len() * block) as f64 / start;
        Ok(Span { low: low.min(middle), middle, high: high.max(middle) })
    }
}

/// Random reads of one block size by some threads.
pub(super) struct Reads<'a> {
    drive: &'a Drive,
    file: &'a File,
    buffered: bool,
    block: usize,
    /// One for each reader. Slots are huge pages that were written before, and so are these.
    buffers: Vec<MmapMut>,
    /// Number of the next block: places repeat only after all others.
    next: AtomicU64,
}

impl<'a> Reads<'a> {
    /// Reads of `block` bytes, a multiple of the page size.
    ///
    /// # Errors
    /// The file holds less than two blocks, or has no direct reads where they were asked for.
    pub(super) fn new(
        drive: &'a Drive,
        buffered: bool,
        block: usize,
        readers: usize,
    ) -> Result<Self> {
        ensure!(
            drive.len >= 2 * block as u64,
            "{}: {} bytes, the largest file here is too small to measure reads of {block} bytes",
            drive.path.display(),
            drive.len
        );
        let direct = drive.direct.as_ref().filter(|_| !buffered);
        let file = if buffered { &drive.buffered } else { direct.context("no direct reads")? };
        let buffer = |_| {
            let mut buffer = huge_pages(block)?;
            buffer.fill(1);
            Ok(buffer)
        };
        let buffers = (0..readers).map(buffer).collect::<Result<_>>()?;
        Ok(Self { drive, file, buffered, block, buffers, next: AtomicU64::new(0) })
    }

    /// Reads while `time` goes by; every reader finishes the block that it has begun. Buffered reads begin with an empty
    /// cache. Returns the seconds after which each block was read, ascending, at least one.
    ///
    /// # Errors
    /// A read fails.
    fn run(&mut self, time: Duration, cancel: Option<&AtomicBool>) -> Result<Vec<f64>> {
        if self.buffered {
            sys::drop_from_cache(self.file);
        }
        let Self { drive, file, block, buffers, next, .. } = self;
        let (block, next) = (*block as u64, &*next);
        let places = drive.len / block;
        let step = coprime_step(places);
        let started = Instant::now();
        let work = |buffer: &mut MmapMut| -> Result<Vec<f64>> {
            let mut ends = Vec::new();
            loop {
                let place = next.fetch_add(1, Ordering::Relaxed) % places * step % places;
                sys::read_exact_at(file, buffer, place * block)
                    .with_context(|| format!("cannot read {}", drive.path.display()))?;
                ends.push(started.elapsed().as_secs_f64());
                let cancelled = cancel.is_some_and(|cancel| cancel.load(Ordering::Relaxed));
                if cancelled || started.elapsed() >= time {
                    return Ok(ends);
                }
            }
        };
        let results: Vec<Result<Vec<f64>>> = std::thread::scope(|scope| {
            let threads: Vec<_> =
                buffers.iter_mut().map(|buffer| scope.spawn(|| work(buffer))).collect();
            // A reader returns its errors; it does not panic.
            threads.into_iter().filter_map(|t| t.join().ok()).collect()
        });
        let mut ends = results.into_iter().collect::<Result<Vec<_>>>()?.concat();
        ends.sort_by(f64::total_cmp);
        Ok(ends)
    }

    /// Bytes per second while `time` goes by, as in [`Reads::run`].
    ///
    /// # Errors
    /// A read fails.
    pub(super) fn speed(&mut self, time: Duration, cancel: Option<&AtomicBool>) -> Result<f64> {
        let ends = self.run(time, cancel)?;
        Ok((ends.len() * self.block) as f64 / ends.last().copied().unwrap_or(f64::INFINITY))
    }
}

/// A step that visits all of `n` places before it repeats one, far from place to place.
fn coprime_step(n: u64) -> u64 {
    let gcd = |mut a: u64, mut b: u64| {
        while b > 0 {
            (a, b) = (b, a % b);
        }
        a
    };
    // The golden section; some number within a few hundred is coprime.
    let start = (n as f64 * 0.618) as u64;
    (start.max(1)..).find(|&step| gcd(step, n) == 1).unwrap_or(1)
}

fn largest_file(dir: &Path) -> Result<(PathBuf, u64)> {
    let at = dir.display();
    let entries = std::fs::read_dir(dir).with_context(|| format!("cannot read {at}"))?;
    let mut best = None;
    for entry in entries {
        let entry = entry.with_context(|| format!("cannot read {at}"))?;
        let Ok(meta) = std::fs::metadata(entry.path()) else { continue };
        if meta.is_file() && best.as_ref().is_none_or(|(_, len)| *len < meta.len()) {
            best = Some((entry.path(), meta.len()));
        }
    }
    best.with_context(|| format!("{at}: no file to read; name a directory with a model in it"))
}
