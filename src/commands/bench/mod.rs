//! `glm bench`: what a machine can do and what this program makes of it.
#![forbid(unsafe_code)]

mod disk;
mod kernels;
mod model;
mod pool;

use std::io::Write;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::{Outcome, print_json, version};
use crate::cli::BenchCommand;
use crate::sys;

/// Runs the command.
pub(super) fn bench(what: &BenchCommand) -> Result<Outcome> {
    match what {
        BenchCommand::Model(args) => model::measure_model(args),
        BenchCommand::Kernels(args) => kernels::measure_kernels(args),
        BenchCommand::Disk(args) => disk::measure_disk(args),
        BenchCommand::Pool(args) => pool::measure_pool(args),
    }
}

/// Prints rows of a measurement: one JSON object, or a table whose columns are the keys of the first row.
fn print_rows(json: bool, rows: &[Value], numbers: usize) -> Result<()> {
    if json {
        return print_json(&json!({"version": version(), "cpu": sys::cpu_name(), "rows": rows}));
    }
    let mut text = sys::cpu_name() + "\n";
    let keys: Vec<&String> =
        rows.iter().filter_map(Value::as_object).flat_map(|r| r.keys()).collect();
    let keys = &keys[..numbers.min(keys.len())];
    let cell = |row: &Value, key: &str| match &row[key] {
        Value::String(s) => s.clone(),
        Value::Null => "-".to_owned(),
        v => v.to_string(),
    };
    let widths: Vec<usize> = keys
        .iter()
        .map(|k| {
            rows.iter().map(|r| cell(r, k).chars().count()).chain([k.len()]).max().unwrap_or(0)
        })
        .collect();
    let line = |cells: Vec<String>| {
        let padded: Vec<String> =
            cells.iter().zip(&widths).map(|(c, &w)| format!("{c:>w$}")).collect();
        padded.join("  ") + "\n"
    };
    text += &line(keys.iter().map(|k| (*k).clone()).collect());
    for row in rows {
        text += &line(keys.iter().map(|k| cell(row, k)).collect());
    }
    std::io::stdout().write_all(text.as_bytes()).context("cannot write to stdout")
}

/// Thread counts as asked for, or the default.
fn thread_counts(asked: &[u16], default: &[usize]) -> Vec<usize> {
    if asked.is_empty() { default.to_vec() } else { asked.iter().map(|&n| n.into()).collect() }
}

/// xorshift64*, the same numbers on every machine.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    fn byte(&mut self) -> u8 {
        (self.next() >> 24) as u8
    }

    /// In -1..1.
    fn f32(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }
}
