//! `glm bench pool`: what a parallel section costs, with workers that still spin and with workers that sleep.
#![forbid(unsafe_code)]

use std::time::Duration;

use anyhow::Result;
use serde_json::json;

use super::{print_rows, thread_counts};
use crate::cli::BenchPoolArgs;
use crate::commands::measure::{median, seconds};
use crate::commands::{Outcome, round};
use crate::pool::Pool;
use crate::sys;

/// Sections in a row of one measurement.
const SECTIONS: usize = 20_000;
/// Long enough for every worker to park.
const REST: Duration = Duration::from_millis(2);

pub(super) fn measure_pool(args: &BenchPoolArgs) -> Result<Outcome> {
    let mut rows = Vec::new();
    for threads in thread_counts(&args.threads, &[1, sys::default_threads()]) {
        let pool = Pool::new(threads);
        let (mut awake, mut asleep) = (Vec::new(), Vec::new());
        for _ in 0..args.report.reps {
            let section = || {
                pool.par(threads, |i| {
                    std::hint::black_box(i);
                });
            };
            awake.push(seconds(|| (0..SECTIONS).for_each(|_| section())) / SECTIONS as f64);
            std::thread::sleep(REST);
            asleep.push(seconds(section));
        }
        rows.push(json!({
            "threads": threads,
            "awake_us": round(median(&mut awake) * 1e6, 3),
            "asleep_us": round(median(&mut asleep) * 1e6, 1),
        }));
    }
    print_rows(args.report.json, &rows, 3)?;
    Ok(Outcome::Done)
}
