//! `glm bench disk`: random reads of a large file, by block size, number of readers and path.
#![forbid(unsafe_code)]

use std::fs::File;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Context, Result, ensure};
use serde_json::json;

use super::{median, print_rows, seconds};
use crate::cli::BenchDiskArgs;
use crate::commands::{Outcome, cancel_flag, progress_bar, round};
use crate::sys;

pub(super) fn measure_disk(args: &BenchDiskArgs) -> Result<Outcome> {
    let cancel = cancel_flag()?;
    let (path, len) = largest_file(args)?;
    let amount = args.amount as usize * 1_000_000;
    let longest = args.block.iter().max().map_or(0, |&k| u64::from(k) * 1024);
    ensure!(
        len >= 2 * longest.max(1 << 20),
        "{}: {len} bytes, the largest file here is too small to measure reads of {longest} bytes",
        path.display()
    );
    let bar = progress_bar(args.report.json, None, "reading");
    let mut rows = Vec::new();
    let buffered = File::open(&path).with_context(|| format!("cannot open {}", path.display()))?;
    // Some file systems have no direct reads.
    let direct = sys::open_direct(&path).ok().map(|file| ("direct", file));
    for (io, file) in direct.into_iter().chain([("buffered", buffered)]) {
        for &block in &args.block {
            for &readers in &args.readers {
                let block = block as usize * 1024;
                let n = amount.div_ceil(block);
                let mut times = Vec::new();
                for rep in 0..args.report.reps {
                    if cancel.load(Ordering::Relaxed) {
                        return Ok(Outcome::Interrupted);
                    }
                    if io == "buffered" {
                        sys::drop_from_cache(&file);
                    }
                    let job = Job { file: &file, len, block, first: u64::from(rep) * n as u64 };
                    let taken = job.run(n, readers.into());
                    times.push(taken.with_context(|| path.display().to_string())?);
                    bar.inc(1);
                }
                let seconds = median(&mut times);
                rows.push(json!({
                    "io": io,
                    "block_kb": block / 1024,
                    "readers": readers,
                    "gbps": round((n * block) as f64 / seconds / 1e9, 2),
                }));
            }
        }
    }
    bar.finish_and_clear();
    print_rows(args.report.json, &rows, 4)?;
    Ok(Outcome::Done)
}

/// Random reads of one block size.
struct Job<'a> {
    file: &'a File,
    len: u64,
    block: usize,
    /// Number of the first block of this repeat: repeats read other places while there are enough.
    first: u64,
}

impl Job<'_> {
    /// Seconds that `readers` threads need for `n` blocks at places that no two blocks share while there are enough.
    fn run(&self, n: usize, readers: usize) -> Result<f64> {
        let places = self.len / self.block as u64;
        let step = coprime_step(places);
        let next = AtomicUsize::new(0);
        let mut result = Ok(());
        let taken = seconds(|| {
            std::thread::scope(|scope| {
                let work = || -> Result<()> {
                    let mut buffer = sys::aligned_buffer(self.block)?;
                    loop {
                        let i = next.fetch_add(1, Ordering::Relaxed) as u64;
                        if i >= n as u64 {
                            return Ok(());
                        }
                        let place = (i + self.first) % places * step % places;
                        sys::read_exact_at(self.file, &mut buffer, place * self.block as u64)
                            .context("cannot read")?;
                    }
                };
                let threads: Vec<_> = (0..readers).map(|_| scope.spawn(work)).collect();
                for t in threads {
                    // A reader returns its errors; it does not panic.
                    if let Ok(Err(e)) = t.join() {
                        result = Err(e);
                    }
                }
            });
        });
        result.map(|()| taken)
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

fn largest_file(args: &BenchDiskArgs) -> Result<(PathBuf, u64)> {
    let dir = args.dir.display();
    let entries = std::fs::read_dir(&args.dir).with_context(|| format!("cannot read {dir}"))?;
    let mut best = None;
    for entry in entries {
        let entry = entry.with_context(|| format!("cannot read {dir}"))?;
        let Ok(meta) = std::fs::metadata(entry.path()) else { continue };
        if meta.is_file() && best.as_ref().is_none_or(|(_, len)| *len < meta.len()) {
            best = Some((entry.path(), meta.len()));
        }
    }
    best.with_context(|| format!("{dir}: no file to read; name a directory with a model in it"))
}
