//! `glm plan`: where memory would go.
#![forbid(unsafe_code)]

use std::io::Write;

use anyhow::{Context, Result};
use serde_json::json;

use super::{Outcome, print_json};
use crate::cli::{KvArg, PlanArgs};
use crate::engine::{Engine, Options, Plan};
use crate::model::kv::KvType;

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
    let plan = Engine::plan(&args.dir, &options)?;
    if args.json {
        print_json(&plan_json(&plan))?;
    } else {
        let text = format!(
            "{plan}\n  context of {} tokens; one token is sent to {:.3} GB of the {} experts\n",
            plan.ctx,
            plan.per_token as f64 / 1e9,
            plan.n_routed
        );
        std::io::stdout().write_all(text.as_bytes()).context("cannot write to stdout")?;
    }
    Ok(Outcome::Done)
}

fn plan_json(plan: &Plan) -> serde_json::Value {
    let terms: serde_json::Map<String, serde_json::Value> = plan
        .terms()
        .iter()
        .map(|(name, bytes)| (format!("{}_bytes", name.replace(' ', "_")), (*bytes).into()))
        .collect();
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
            "per_token_bytes": plan.per_token,
        },
        "total_bytes": plan.total(),
    })
}
