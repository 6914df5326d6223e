//! `glm plan`: where memory would go, and what speed to expect.
#![forbid(unsafe_code)]

use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Map, Value, json};

use super::measure::{Drive, memory_speed, product_speed};
use super::{Outcome, print_json, round, variable};
use crate::cli::{KvArg, PlanArgs};
use crate::engine::{Engine, Estimate, Options, Plan, Residency, Span, Speeds, Tier};
use crate::experts::StreamOptions;
use crate::experts::usage::{FILE_NAME, Shape, Usage};
use crate::kernels::{Activations, Isa, Kernels};
use crate::model::Compute;
use crate::model::kv::KvType;
use crate::pool::Pool;
use crate::sys;

/// How long memory, products and the drive are measured.
const MEMORY_TIME: Duration = Duration::from_millis(500);
const PRODUCT_TIME: Duration = Duration::from_millis(200);
const DRIVE_TIME: Duration = Duration::from_millis(1500);

/// How many experts are expected to be in memory when they are asked for.
struct Hits {
    /// If all were used alike.
    uniform: f64,
    /// As they were used.
    history: Option<(f64, PathBuf)>,
}

impl Hits {
    fn new(args: &PlanArgs, dir: Option<&Path>, plan: &Plan) -> Result<Self> {
        let uniform = plan.room();
        let beside = || dir.map(|dir| dir.join(FILE_NAME)).filter(|file| file.exists());
        let Some(file) = args.usage.clone().or_else(beside) else {
            return Ok(Self { uniform, history: None });
        };
        // A run would begin such a file; here there is nothing to learn from it.
        ensure!(file.exists(), "{}: no such file", file.display());
        let shape = Shape { layers: plan.n_layers, experts: plan.n_experts };
        let history = Usage::read(&file, shape, args.usage.is_some())?.hits(plan.decoder_slots());
        Ok(Self { uniform, history: history.map(|hits| (hits, file)) })
    }

    fn expected(&self) -> f64 {
        self.history.as_ref().map_or(self.uniform, |(hits, _)| *hits)
    }
}

/// Runs the command.
pub(super) fn plan(args: &PlanArgs) -> Result<Outcome> {
    let options = Options {
        ram: args.ram,
        ctx: args.ctx.map(|n| n as usize),
        kv: match args.kv {
            KvArg::F16 => KvType::F16,
            KvArg::F32 => KvType::F32,
        },
        ..Options::default()
    };
    let dir = args.dir.clone().or_else(|| variable("GLM_MODEL").map(PathBuf::from));
    let dir = dir.as_deref();
    let plan = Engine::plan(dir, &options)?;
    let hits = Hits::new(args, dir, &plan)?;
    let speeds = if args.no_measure { None } else { Some(measured(args, dir, &plan)?) };
    let estimate = speeds.and_then(|speeds| plan.estimate(&speeds, hits.expected()));
    if args.json {
        print_json(&plan_json(&plan, &hits, speeds.as_ref(), estimate.as_ref()))?;
    } else {
        let text = plan_text(&plan, &hits, speeds.as_ref(), estimate.as_ref());
        std::io::stdout().write_all(text.as_bytes()).context("cannot write to stdout")?;
    }
    Ok(Outcome::Done)
}

/// Measures what the plan's weights will come from.
fn measured(args: &PlanArgs, dir: Option<&Path>, plan: &Plan) -> Result<Speeds> {
    let kernels = Kernels::for_isa(Isa::best()).context("no kernels for this CPU")?;
    let pool = Pool::new(args.threads.map_or_else(sys::default_threads, usize::from));
    let compute = Compute { kernels, pool, activations: Activations::Q8 };
    let memory = memory_speed(&compute, MEMORY_TIME)?;
    let (mut products, mut drive) = (None, None);
    if let Some(expert) = plan.expert.filter(|_| plan.residency == Residency::Streamed) {
        products = Some(product_speed(&compute, &expert, PRODUCT_TIME)?);
        if let Some(dir) = dir {
            let block = expert.bytes.next_multiple_of(4096) as usize;
            let readers = StreamOptions::default().readers;
            drive = Some(Drive::open(dir)?.speed(block, readers, DRIVE_TIME)?);
        }
    }
    Ok(Speeds { memory, products, drive })
}

fn plan_text(plan: &Plan, hits: &Hits, speeds: Option<&Speeds>, e: Option<&Estimate>) -> String {
    let gb = |bytes: u64| bytes as f64 / 1e9;
    let touched = &plan.touched;
    let mut text = format!(
        "{plan}\n  context of {} tokens; a token reads {:.3} GB of resident weights and {:.3} GB of the {} experts\n",
        plan.ctx,
        gb(touched.resident + touched.shared),
        gb(touched.routed),
        plan.n_routed
    );
    if plan.residency == Residency::Streamed {
        text += &match &hits.history {
            Some((share, file)) => format!(
                "  {:.0}% of experts are expected in slots, as they were used ({}); {:.0}% if all were used alike\n",
                100.0 * share,
                file.display(),
                100.0 * hits.uniform
            ),
            None => format!(
                "  {:.0}% of experts are expected in slots if all are used alike\n",
                100.0 * hits.uniform
            ),
        };
    }
    if let Some(speeds) = speeds {
        let mut parts = vec![format!("memory {}", gbps_text(speeds.memory))];
        parts.extend(speeds.products.map(|s| format!("products {}", gbps_text(s))));
        parts.extend(speeds.drive.map(|s| format!("drive {}", gbps_text(s))));
        text += &format!("  measured: {}\n", parts.join(", "));
    }
    if let Some(e) = e {
        let at = match e.bound {
            Tier::Drive => format!(" at {:.0}% hits", 100.0 * hits.expected()),
            Tier::Memory | Tier::Products => String::new(),
        };
        text += &format!(
            "expected decode {} tok/s; bound by {} ({:.1} GB/s; {:.0} MB per token{at})\n",
            range(e.low, e.high),
            e.bound.name(),
            e.speed / 1e9,
            e.bytes as f64 / 1e6
        );
    }
    text
}

/// `2.1 GB/s (1.8–2.6)`.
fn gbps_text(s: Span) -> String {
    let [low, middle, high] = [s.low, s.middle, s.high].map(|x| x / 1e9);
    format!("{middle:.1} GB/s ({low:.1}–{high:.1})")
}

/// Two significant digits are all that an estimate has.
fn range(low: f64, high: f64) -> String {
    let digits = |x: f64| if x < 1.0 { 2 } else { usize::from(x < 10.0) };
    let d = digits(low).max(digits(high));
    format!("{low:.d$}–{high:.d$}")
}

fn plan_json(plan: &Plan, hits: &Hits, speeds: Option<&Speeds>, e: Option<&Estimate>) -> Value {
    let terms: Map<String, Value> = plan
        .terms()
        .iter()
        .map(|(name, bytes)| (format!("{}_bytes", name.replace(' ', "_")), (*bytes).into()))
        .collect();
    let gbps = |s: Span| {
        let [low, middle, high] = [s.low, s.middle, s.high].map(|x| round(x / 1e9, 2));
        json!({"median": middle, "low": low, "high": high})
    };
    json!({
        "ram_bytes": plan.ram,
        "available_bytes": plan.available,
        "clamped": plan.clamped,
        "ctx": plan.ctx,
        "terms": terms,
        "experts": {
            "residency": plan.residency.name(),
            "bytes": plan.experts,
            "of_bytes": plan.routed,
            "count": plan.n_routed,
        },
        "total_bytes": plan.total(),
        "per_token": {
            "resident_bytes": plan.touched.resident,
            "shared_bytes": plan.touched.shared,
            "routed_bytes": plan.touched.routed,
        },
        "hits": {
            "uniform": round(hits.uniform, 4),
            "usage": hits.history.as_ref().map(|(share, _)| round(*share, 4)),
            "usage_file": hits.history.as_ref().map(|(_, file)| file.display().to_string()),
        },
        "measured": speeds.map(|s| json!({
            "memory_gbps": gbps(s.memory),
            "products_gbps": s.products.map(gbps),
            "drive_gbps": s.drive.map(gbps),
        })),
        "estimate": e.map(|e| json!({
            "decode_tok_s": {"low": round(e.low, 3), "high": round(e.high, 3)},
            "hit_rate": round(hits.expected(), 4),
            "bound": e.bound.key(),
            "bound_bytes_per_token": e.bytes,
            "bound_gbps": round(e.speed / 1e9, 2),
        })),
    })
}
