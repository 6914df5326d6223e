//! `glm bench model`: prefill and decode speed at given lengths.
#![forbid(unsafe_code)]

use std::io::Write;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::Random;
use crate::cli::BenchModelArgs;
use crate::commands::measure::middle;
use crate::commands::{
    Outcome, Usage, cancel_flag, lossy_json, lossy_text, open_engine, print_json, progress_bar,
    rate, round, stream_json, stream_text, version,
};
use crate::engine::Engine;
use crate::model::Cancelled;
use crate::sample::argmax;
use crate::sys;

/// Speeds of one prompt length over all repeats.
struct Measured {
    prompt: usize,
    prefill: Vec<f64>,
    decode: Vec<f64>,
}

/// Runs the command.
pub(super) fn measure_model(args: &BenchModelArgs) -> Result<Outcome> {
    let cancel = cancel_flag()?;
    let engine = open_engine(&args.engine)?;
    let generate = args.generate as usize;
    let longest = args.prompt.iter().max().map_or(0, |&n| n as usize) + generate;
    if longest > engine.context() {
        return Err(Usage(format!(
            "prompt and generated tokens are {longest} together, the context is {}",
            engine.context()
        ))
        .into());
    }
    let bar = progress_bar(
        args.engine.quiet,
        Some(args.prompt.len() as u64 * u64::from(args.report.reps + 1)),
        "measuring",
    );
    let mut rows = Vec::new();
    for &prompt in &args.prompt {
        let mut m = Measured { prompt: prompt as usize, prefill: Vec::new(), decode: Vec::new() };
        // The first repeat warms caches up and is not counted.
        for rep in 0..=args.report.reps {
            let measured = measure(&engine, prompt as usize, generate, cancel);
            let (prefill, decode) = match measured {
                Err(e) if e.is::<Cancelled>() => return Ok(Outcome::Interrupted),
                other => other?,
            };
            if rep > 0 {
                m.prefill.push(prefill);
                m.decode.push(decode);
            }
            bar.inc(1);
        }
        m.prefill.sort_by(f64::total_cmp);
        m.decode.sort_by(f64::total_cmp);
        rows.push(m);
    }
    bar.finish_and_clear();
    if args.report.json {
        print_json(&report_json(&engine, args, &rows))?;
    } else {
        let text = report(&engine, args, &rows);
        std::io::stdout().write_all(text.as_bytes()).context("cannot write to stdout")?;
    }
    Ok(Outcome::Done)
}

/// Tokens per second of one prefill and of one greedy decode after it.
fn measure(
    engine: &Engine,
    prompt: usize,
    generate: usize,
    cancel: &AtomicBool,
) -> Result<(f64, f64)> {
    let ids = random_ids(prompt, engine.model.config.vocab);
    let mut session = engine.session();
    let started = Instant::now();
    session.prefill(engine, &ids, Some(cancel), None)?;
    let prefill = started.elapsed().as_secs_f64();
    let started = Instant::now();
    for _ in 0..generate {
        let id = argmax(session.logits());
        session.push(engine, id, Some(cancel))?;
    }
    Ok((rate(prompt, prefill), rate(generate, started.elapsed().as_secs_f64())))
}

/// Ids from a fixed generator.
fn random_ids(n: usize, vocab: usize) -> Vec<u32> {
    let mut random = Random(0x9E37_79B9_7F4A_7C15);
    (0..n).map(|_| ((random.next() >> 33) % vocab as u64) as u32).collect()
}

fn report(engine: &Engine, args: &BenchModelArgs, rows: &[Measured]) -> String {
    let mut s = format!(
        "{}; {}; median (min–max) of {}\n",
        sys::cpu_name(),
        engine.describe_compute(),
        args.report.reps
    );
    s +=
        &format!("{:>7} {:>6}  {:>28}  {:>28}\n", "prompt", "gen", "prefill tok/s", "decode tok/s");
    let span = |v: &[f64]| format!("{:.1} ({:.1}–{:.1})", middle(v), v[0], v[v.len() - 1]);
    for m in rows {
        s += &format!(
            "{:>7} {:>6}  {:>28}  {:>28}\n",
            m.prompt,
            args.generate,
            span(&m.prefill),
            span(&m.decode)
        );
    }
    if let Some(stream) = engine.model.stream() {
        s += &format!("experts, warm-up included{}\n", stream_text(stream));
    }
    if engine.model.lossy().is_some() {
        s += &format!("routing, warm-up included{}\n", lossy_text(&engine.model));
    }
    s
}

fn report_json(engine: &Engine, args: &BenchModelArgs, rows: &[Measured]) -> Value {
    let span = |v: &[f64]| json!({"median": round(middle(v), 2), "min": round(v[0], 2), "max": round(v[v.len() - 1], 2)});
    let rows: Vec<Value> = rows
        .iter()
        .map(|m| json!({"prompt": m.prompt, "gen": args.generate, "prefill_tok_s": span(&m.prefill), "decode_tok_s": span(&m.decode)}))
        .collect();
    let experts = engine.model.stream().map(stream_json);
    let mut v = json!({
        "experts": experts,
        "version": version(),
        "cpu": sys::cpu_name(),
        "model": engine.label(),
        "kernels": engine.model.compute.kernels.isa().name(),
        "threads": engine.model.compute.pool.threads(),
        "reps": args.report.reps,
        "peak_rss_bytes": sys::peak_rss_bytes(),
        "rows": rows,
    });
    if let Some(lossy) = lossy_json(&engine.model) {
        v["lossy"] = lossy;
    }
    v
}
