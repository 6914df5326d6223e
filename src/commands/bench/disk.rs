//! `glm bench disk`: random reads of a large file, by block size, number of readers and path.
#![forbid(unsafe_code)]

use std::io::Write;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::{Random, print_rows};
use crate::cli::BenchDiskArgs;
use crate::commands::measure::{Drive, Reads, extremes};
use crate::commands::{Outcome, cancel_flag, progress_bar, round};
use crate::engine::Span;

/// What is as good as the fastest: drives drift by more.
const AS_GOOD: f64 = 0.97;

/// One way to read, and how fast it was.
struct Cell<'a> {
    buffered: bool,
    block_kb: u32,
    readers: u16,
    reads: Reads<'a>,
    speeds: Vec<f64>,
}

pub(super) fn measure_disk(args: &BenchDiskArgs) -> Result<Outcome> {
    let cancel = cancel_flag()?;
    let drive = Drive::open(&args.dir)?;
    let mut cells = Vec::new();
    for buffered in [false, true].into_iter().filter(|&b| b || drive.direct.is_some()) {
        for &block_kb in &args.block {
            for &readers in &args.readers {
                let block = block_kb as usize * 1024;
                let reads = Reads::new(&drive, buffered, block, readers.into())?;
                cells.push(Cell { buffered, block_kb, readers, reads, speeds: Vec::new() });
            }
        }
    }
    let (reps, time) = (args.report.reps, Duration::from_millis(args.time.into()));
    let bar = progress_bar(args.report.json, Some(u64::from(reps) * cells.len() as u64), "reading");
    // Drives drift within minutes: every way is measured once before any is measured again. The order is another each
    // time, because a drive that is fast and slow in turns may keep step with a fixed one.
    let mut random = Random(1);
    let mut order: Vec<usize> = (0..cells.len()).collect();
    for _ in 0..reps {
        order.sort_by_cached_key(|_| random.next());
        for &i in &order {
            let cell = &mut cells[i];
            cell.speeds.push(cell.reads.speed(time, Some(cancel))?);
            if cancel.load(Ordering::Relaxed) {
                return Ok(Outcome::Interrupted);
            }
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    let spans: Vec<Span> = cells.iter().map(|c| extremes(c.speeds.clone())).collect();
    let fastest = spans.iter().map(|s| s.middle).fold(0.0, f64::max);
    let best = (0..cells.len())
        .filter(|&i| spans[i].middle >= AS_GOOD * fastest)
        .min_by_key(|&i| (cells[i].readers, cells[i].block_kb, cells[i].buffered))
        .context("nothing to measure")?;
    let row = |i: usize| {
        let (cell, speed) = (&cells[i], &spans[i]);
        json!({
            "io": io_name(cell.buffered),
            "block_kb": cell.block_kb,
            "readers": cell.readers,
            "gbps": gbps(speed.middle),
            "spread": round((speed.high - speed.low) / speed.middle.max(1.0), 2),
            "min_gbps": gbps(speed.low),
            "max_gbps": gbps(speed.high),
            "best": i == best,
        })
    };
    let rows: Vec<Value> = (0..cells.len()).map(row).collect();
    print_rows(args.report.json, &rows, 5)?;
    if !args.report.json {
        let cell = &cells[best];
        let line = format!(
            "best: {}, {} KB blocks, {} reader{}: {:.2} GB/s\n",
            io_name(cell.buffered),
            cell.block_kb,
            cell.readers,
            if cell.readers == 1 { "" } else { "s" },
            spans[best].middle / 1e9
        );
        std::io::stdout().write_all(line.as_bytes()).context("cannot write to stdout")?;
    }
    Ok(Outcome::Done)
}

fn io_name(buffered: bool) -> &'static str {
    if buffered { "buffered" } else { "direct" }
}

fn gbps(bytes: f64) -> f64 {
    round(bytes / 1e9, 2)
}
