//! `glm replay`: recorded routing through every policy, beside the best choice that knows the future.
#![forbid(unsafe_code)]

use std::fmt::Write as _;
use std::fs::File;
use std::io::{BufReader, Write as _};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use super::routing::MadeUp;
use super::{Outcome, Usage, input_name, print_json, round};
use crate::cli::ReplayArgs;
use crate::experts::replay::{Count, Replay};
use crate::experts::trace::Accesses;

/// One line of the table.
struct Line {
    policy: &'static str,
    /// `None` for traces with different numbers.
    slots: Option<usize>,
    count: Count,
    best: Count,
}

/// The lines of one trace, or of all.
struct Table {
    trace: String,
    layers: usize,
    experts: u32,
    lines: Vec<Line>,
}

/// Runs the command.
pub(super) fn replay(args: &ReplayArgs) -> Result<Outcome> {
    if args.files.is_empty() && args.synth.is_empty() {
        return Err(Usage("no trace: name a file, or make one up with --synth".to_owned()).into());
    }
    let made_up = args.synth.iter().map(|s| s.parse::<MadeUp>().map_err(Usage));
    let made_up = made_up.collect::<Result<Vec<_>, _>>()?;
    let mut tables = Vec::new();
    for path in &args.files {
        let name = input_name(path);
        let trace = if name == "stdin" {
            Accesses::read(std::io::stdin().lock(), &name, args.rows)?
        } else {
            let file = File::open(path).with_context(|| format!("cannot open {name}"))?;
            Accesses::read(BufReader::with_capacity(1 << 20, file), &name, args.rows)?
        };
        ensure!(trace.wanted() > 0, "{name}: no calls; expected a routing trace");
        tables.push(table(name, &trace, trace.experts(), args)?);
    }
    for (text, routing) in args.synth.iter().zip(&made_up) {
        tables.push(table(text.clone(), &routing.accesses(), routing.experts, args)?);
    }
    if tables.len() > 1 {
        tables.push(sum(&tables));
    }
    if args.json {
        print_json(&Value::Array(tables.iter().map(table_json).collect()))?;
    } else {
        let text: String = tables.iter().map(table_text).collect::<Vec<_>>().join("\n");
        std::io::stdout().write_all(text.as_bytes()).context("cannot write to stdout")?;
    }
    Ok(Outcome::Done)
}

fn table(name: String, trace: &Accesses, seen: u32, args: &ReplayArgs) -> Result<Table> {
    let experts = args.experts.unwrap_or(seen);
    ensure!(
        seen <= experts,
        "{name}: found expert {}, expected ids below {experts} (--experts)",
        seen - 1
    );
    let replay = Replay::new(trace, experts);
    let mut lines = Vec::new();
    for slots in &args.slots {
        let slots = slots.of(replay.all());
        let best = replay.best(slots);
        for &kind in &args.policy.0 {
            let count = replay.policy(kind, slots);
            lines.push(Line { policy: kind.name(), slots: Some(slots), count, best });
        }
        lines.push(Line { policy: "best", slots: Some(slots), count: best, best });
    }
    Ok(Table { trace: name, layers: replay.all() / experts as usize, experts, lines })
}

/// All traces together, line by line.
fn sum(tables: &[Table]) -> Table {
    let mut lines: Vec<Line> = Vec::new();
    for table in tables {
        for (i, line) in table.lines.iter().enumerate() {
            match lines.get_mut(i) {
                Some(sum) => {
                    sum.slots = sum.slots.filter(|_| sum.slots == line.slots);
                    sum.count.add(line.count);
                    sum.best.add(line.best);
                }
                None => lines.push(Line { ..*line }),
            }
        }
    }
    let layers = tables.iter().map(|t| t.layers).sum();
    Table { trace: "all".to_owned(), layers, experts: 0, lines }
}

impl Line {
    fn of_best(&self) -> f64 {
        if self.best.hits == 0 { 1.0 } else { self.count.hits as f64 / self.best.hits as f64 }
    }
}

fn table_text(table: &Table) -> String {
    let wanted = table.lines.first().map_or(0, |l| l.count.wanted);
    let mut s = format!("{}: {wanted} wanted", table.trace);
    if table.experts > 0 {
        let _ = write!(s, ", {} layers of {} experts", table.layers, table.experts);
    }
    let _ = write!(s, "\n  {:<10} {:>8} {:>10} {:>8}\n", "policy", "slots", "hit rate", "of best");
    for line in &table.lines {
        let _ = writeln!(
            s,
            "  {:<10} {:>8} {:>9.1}% {:>8.3}",
            line.policy,
            line.slots.map_or_else(|| "various".to_owned(), |n| n.to_string()),
            100.0 * line.count.hit_rate(),
            line.of_best()
        );
    }
    s
}

fn table_json(table: &Table) -> Value {
    let lines: Vec<Value> = table
        .lines
        .iter()
        .map(|line| {
            json!({
                "policy": line.policy,
                "slots": line.slots,
                "wanted": line.count.wanted,
                "hits": line.count.hits,
                "hit_rate": round(line.count.hit_rate(), 6),
                "of_best": round(line.of_best(), 6),
            })
        })
        .collect();
    json!({"trace": table.trace, "layers": table.layers, "experts": table.experts, "policies": lines})
}
