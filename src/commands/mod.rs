//! The subcommands: thin front ends over the engine. Only here is anything printed, and only here is stdin read.
//!
//! stdout carries the product; notes, progress and statistics go to stderr. Progress is shown on terminals only.
#![forbid(unsafe_code)]

mod bench;
mod container;
mod convert;
mod inspect;
mod measure;
mod plan;
mod replay;
mod routing;
mod run;
mod score;
mod synth;

use std::ffi::OsString;
use std::io::{IsTerminal, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};
use clap::CommandFactory;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::cli::{ActivationsArg, Cli, Command, EngineArgs, IoArg, KvArg, LossyArgs};
use crate::engine::{Engine, Options, Plan, Residency, UsageOptions};
use crate::experts::{Io, Stream, StreamOptions};
use crate::kernels::{Activations, Isa};
use crate::model::Model;
use crate::model::kv::KvType;
use crate::model::lossy::{Lossy, Unfit};

/// How a command ended that did not fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Everything was done.
    Done,
    /// The report is complete, but what it reports on is not.
    Incomplete,
    /// Ctrl-C.
    Interrupted,
}

/// Wrong usage that the argument parser cannot see: exit code 2.
#[derive(Debug)]
pub struct Usage(pub String);

impl std::fmt::Display for Usage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Usage {}

/// Runs one subcommand.
///
/// # Errors
/// What the command could not do; a [`Usage`] for wrong usage.
pub fn dispatch(command: Command) -> Result<Outcome> {
    match command {
        Command::Run(args) => run::run(&args),
        Command::Score(args) => score::score(&args),
        Command::Inspect(args) => inspect::inspect(&args),
        Command::Plan(args) => plan::plan(&args),
        Command::Replay(args) => replay::replay(&args),
        Command::Convert(args) => convert::convert(&args),
        Command::Bench(what) => bench::bench(&what),
        Command::Synth(args) => synth::synth(&args),
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "glm", &mut script);
            std::io::stdout().write_all(&script).context("cannot write to stdout")?;
            Ok(Outcome::Done)
        }
    }
}

/// Version, commit and the kernels that this CPU can run, the default first.
pub fn version() -> &'static str {
    static VERSION: OnceLock<String> = OnceLock::new();
    VERSION.get_or_init(|| {
        let mut isas: Vec<String> =
            Isa::available().iter().rev().map(ToString::to_string).collect();
        isas[0] += " (default)";
        format!(
            "{} (commit {}), kernels: {}",
            env!("CARGO_PKG_VERSION"),
            env!("GLM_COMMIT"),
            isas.join(", ")
        )
    })
}

/// Prints an error with its causes on one line.
pub fn print_error(e: &anyhow::Error) {
    stderr_line(&format!("error: {e:#}"));
}

/// Whether an error is a vanished reader of stdout.
pub fn is_broken_pipe(e: &anyhow::Error) -> bool {
    e.chain().any(|c| {
        c.downcast_ref::<std::io::Error>()
            .is_some_and(|e| e.kind() == std::io::ErrorKind::BrokenPipe)
    })
}

/// Writes one line to stderr; a closed stderr is nobody's failure.
fn stderr_line(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// The flag that Ctrl-C sets. A second Ctrl-C ends the process at once.
fn cancel_flag() -> Result<&'static AtomicBool> {
    static FLAG: AtomicBool = AtomicBool::new(false);
    ctrlc::set_handler(|| {
        if FLAG.swap(true, Ordering::Relaxed) {
            #[expect(clippy::exit, reason = "the second Ctrl-C must not wait for anything")]
            std::process::exit(130);
        }
    })
    .context("cannot install the Ctrl-C handler")?;
    Ok(&FLAG)
}

/// A variable of the environment; an empty one counts as not set.
fn variable(name: &str) -> Option<OsString> {
    std::env::var_os(name).filter(|v| !v.is_empty())
}

/// The instruction set of `--isa`, else of `GLM_ISA`.
fn chosen_isa(asked: Option<Isa>) -> Result<Option<Isa>> {
    let from_env = || {
        variable("GLM_ISA")
            .map(|v| v.to_string_lossy().parse::<Isa>().map_err(|e| Usage(format!("GLM_ISA: {e}"))))
    };
    asked.map(Ok).or_else(from_env).transpose().map_err(Into::into)
}

/// Opens the model that the arguments or the environment name, or the built-in one with a note.
fn open_engine(args: &EngineArgs) -> Result<Engine> {
    let options = Options {
        threads: args.threads.map(usize::from),
        isa: chosen_isa(args.isa)?,
        activations: match args.activations {
            ActivationsArg::Q8 => Activations::Q8,
            ActivationsArg::F32 => Activations::F32,
        },
        kv: match args.kv {
            KvArg::F16 => KvType::F16,
            KvArg::F32 => KvType::F32,
        },
        ctx: args.ctx.map(|n| n as usize),
        quantize: args.quantize,
        no_indexer: args.no_indexer,
        ram: args.ram,
        mapped: args.io == IoArg::Mmap,
        stream: stream_options(args),
        usage: (!args.no_usage)
            .then(|| UsageOptions { file: args.usage.clone(), decay: f64::from(args.usage_decay) }),
        rows: args.pass_rows.map(|n| n as usize),
        lossy: lossy(&args.lossy),
        record: args.record_routing.clone(),
    };
    if args.slots.is_some() && options.mapped {
        return Err(Usage("--slots and --io mmap exclude each other".to_owned()).into());
    }
    let engine = open_model(args, &options);
    let engine = engine.map_err(|e| match e.downcast::<Unfit>() {
        Ok(unfit) => Usage(unfit.to_string()).into(),
        Err(e) => e,
    })?;
    if !args.quiet {
        lossy_note(&engine.model).iter().for_each(|l| stderr_line(l));
    }
    Ok(engine)
}

fn open_model(args: &EngineArgs, options: &Options) -> Result<Engine> {
    let dir = args.model.clone().or_else(|| variable("GLM_MODEL").map(PathBuf::from));
    let Some(dir) = dir else {
        if args.slots.is_some() {
            return Err(Usage(
                "--slots needs --model: the built-in model is in no file".to_owned(),
            )
            .into());
        }
        if !args.quiet {
            stderr_line(
                "note: this is the built-in demonstration model (12 M parameters, it invents and cannot calculate); \
                 for GLM-5.2 download a checkpoint and pass --model DIR (see README.md)",
            );
        }
        return Engine::builtin(options);
    };
    let spinner = progress_bar(args.quiet, None, &format!("loading {}", dir.display()));
    let engine = Engine::open(&dir, options);
    spinner.finish_and_clear();
    let engine = engine?;
    if !args.quiet {
        plan_note(&engine.plan).iter().for_each(|l| stderr_line(l));
        engine.warnings().iter().for_each(|w| stderr_line(&format!("warning: {w}")));
    }
    Ok(engine)
}

/// What a user should know of where memory goes.
fn plan_note(plan: &Plan) -> Option<String> {
    let gb = |bytes: u64| bytes as f64 / 1e9;
    if plan.clamped {
        stderr_line(&format!(
            "warning: --ram is more than the {:.2} GB that are available: {:.2} GB are taken",
            gb(plan.available.unwrap_or(plan.ram)),
            gb(plan.ram)
        ));
    }
    match plan.residency {
        Residency::Memory => None,
        Residency::Streamed => Some(format!(
            "note: {:.1} GB of experts are read from disk through {:.1} GB of memory; the context is {} tokens (`glm plan` shows the terms)",
            gb(plan.routed),
            gb(plan.experts),
            plan.ctx
        )),
        Residency::Mapped => Some(format!(
            "note: {:.1} GB of experts stay in mapped files; what is in memory is up to the system",
            gb(plan.routed)
        )),
    }
}

/// How the arguments want experts to be read.
fn stream_options(args: &EngineArgs) -> StreamOptions {
    let io = match args.io {
        IoArg::Auto | IoArg::Mmap => Io::Auto,
        IoArg::Direct => Io::Direct,
        IoArg::Buffered => Io::Buffered,
    };
    StreamOptions {
        io,
        lookahead: args.lookahead,
        mirrors: args.mirror.clone(),
        warn: |text| stderr_line(&format!("warning: {text}")),
        slots: args.slots.map(|n| n as usize),
        policy: args.policy,
        ..StreamOptions::default()
    }
}

/// The lossy routing that the arguments ask for; the parser lets one at most through.
fn lossy(args: &LossyArgs) -> Option<Lossy> {
    let top_p = args.lossy_expert_top_p.map(Lossy::TopP);
    let top_k = args.lossy_expert_top_k.map(|k| Lossy::TopK(k as usize));
    let cache_route = args
        .lossy_cache_route
        .map(|(keep, of)| Lossy::CacheRoute { keep: keep as usize, of: of as usize });
    let miss_budget = args.lossy_miss_budget.map(|n| Lossy::MissBudget(n as usize));
    top_p.or(top_k).or(cache_route).or(miss_budget)
}

/// Says that answers are not the model's.
fn lossy_note(model: &Model) -> Option<String> {
    let (mode, _) = model.lossy()?;
    Some(match model.stream() {
        None if mode.needs_slots() => format!(
            "note: lossy routing: {mode}; it changes nothing here, where no expert is read from disk through slots"
        ),
        _ => format!("note: lossy routing: {mode}; the answer differs from the model's"),
    })
}

/// What lossy routing did, for the statistics line.
fn lossy_text(model: &Model) -> String {
    model.lossy().filter(|(_, t)| t.rows > 0).map_or_else(String::new, |(mode, t)| {
        format!(
            ", lossy {mode}: {:.1}% of choices kept, {:.1}% dropped, KL {:.4}",
            100.0 * t.agreement(),
            100.0 * t.dropped(),
            t.kl()
        )
    })
}

/// What lossy routing did; `None` without it. Figures over nothing are null.
fn lossy_json(model: &Model) -> Option<serde_json::Value> {
    let (mode, t) = model.lossy()?;
    let over_rows = |x: f64| (t.rows > 0).then(|| round(x, 6));
    Some(serde_json::json!({
        "mode": mode.to_string(),
        "rows": t.rows,
        "agreement": over_rows(t.agreement()),
        "dropped": over_rows(t.dropped()),
        "kl": over_rows(t.kl()),
    }))
}

/// What was read from disk, for the statistics line.
fn stream_text(stream: &Stream) -> String {
    let s = stream.stats();
    format!(
        ", {} slots {:.0}% hits ({} pinned, {} read ahead), {:.2} GB read at {:.2} GB/s, waited {:.1} s",
        stream.slots(),
        100.0 * s.hit_rate(),
        s.pin_hits,
        s.ahead_hits,
        s.bytes as f64 / 1e9,
        s.bytes as f64 / 1e9 / s.service.as_secs_f64().max(1e-9),
        s.wait.as_secs_f64()
    )
}

/// What was read from disk.
fn stream_json(stream: &Stream) -> serde_json::Value {
    let s = stream.stats();
    serde_json::json!({
        "slots": stream.slots(),
        "io": if stream.direct() { "direct" } else { "buffered" },
        "hits": s.hits,
        "pinned": stream.pins(),
        "pin_hits": s.pin_hits,
        "ahead_hits": s.ahead_hits,
        "ahead_late": s.ahead_late,
        "ahead_recall": s.recall().map(|r| round(r, 4)),
        "lookahead_ms_per_pass": stream.lookahead_timings().map(|[off, on]| {
            serde_json::json!({"off": round(off, 3), "on": round(on, 3)})
        }),
        "misses": s.misses,
        "hit_rate": round(s.hit_rate(), 4),
        "loads": s.loads,
        "ahead_loads": s.ahead_loads,
        "bytes": s.bytes,
        "service_s": round(s.service.as_secs_f64(), 6),
        "wait_s": round(s.wait.as_secs_f64(), 6),
        "retries": s.retries,
    })
}

/// A progress bar on stderr, hidden where stderr is no terminal. `len` of `None` makes a spinner.
fn progress_bar(quiet: bool, len: Option<u64>, message: &str) -> ProgressBar {
    if quiet || !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let bar = match len {
        Some(n) => ProgressBar::new(n).with_style(style("{msg} {wide_bar} {pos}/{len} {eta}")),
        None => ProgressBar::new_spinner().with_style(style("{spinner} {msg} {elapsed}")),
    };
    bar.set_draw_target(ProgressDrawTarget::stderr());
    bar.set_message(message.to_owned());
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
}

/// Largest prompt or scoring input that is read.
const MAX_TEXT_BYTES: u64 = 1 << 30;

/// Name of an input in messages.
fn input_name(path: &Path) -> String {
    if path == Path::new("-") { "stdin".to_owned() } else { path.display().to_string() }
}

/// Text of a file, or of stdin for `-`.
fn read_text(path: &Path) -> Result<String> {
    let name = input_name(path);
    let source: Box<dyn Read> = if path == Path::new("-") {
        Box::new(std::io::stdin())
    } else {
        Box::new(std::fs::File::open(path).with_context(|| format!("cannot open {name}"))?)
    };
    let mut bytes = Vec::new();
    source
        .take(MAX_TEXT_BYTES + 1)
        .read_to_end(&mut bytes)
        .with_context(|| format!("cannot read {name}"))?;
    ensure!(
        bytes.len() as u64 <= MAX_TEXT_BYTES,
        "{name}: more than {MAX_TEXT_BYTES} bytes of text"
    );
    String::from_utf8(bytes).map_err(|e| {
        let at = e.utf8_error().valid_up_to();
        anyhow!("{name}: byte {at} is not valid UTF-8; convert the text to UTF-8 first")
    })
}

/// Writes one line of JSON to stdout.
fn print_json(value: &serde_json::Value) -> Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{value}").and_then(|()| out.flush()).context("cannot write to stdout")
}

/// Tokens per second, 0 when nothing was timed.
fn rate(tokens: usize, seconds: f64) -> f64 {
    if seconds > 0.0 { tokens as f64 / seconds } else { 0.0 }
}

/// `x` rounded to `digits` decimals, for JSON.
fn round(x: f64, digits: i32) -> f64 {
    let k = 10f64.powi(digits);
    (x * k).round() / k
}

/// Bytes with a binary unit.
fn human_bytes(n: u64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut x = n as f64;
    let mut u = 0;
    while x >= 1024.0 && u + 1 < units.len() {
        x /= 1024.0;
        u += 1;
    }
    if u == 0 { format!("{n} B") } else { format!("{x:.1} {}", units[u]) }
}
