//! `glm inspect`: the census of a model directory, from headers only.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::{Outcome, human_bytes, print_json};
use crate::cli::InspectArgs;
use crate::engine::{read_config, read_tokenizer};
use crate::model::census::Census;
use crate::model::config::Config;
use crate::model::kv::{KvCache, KvType};
use crate::model::weights::{self, BindOptions, Class};
use crate::store::Shards;

/// Tensors and bytes of one class in one format.
#[derive(Default)]
struct Total {
    tensors: usize,
    parameters: u64,
    bytes: u64,
}

/// What was found in a model directory.
struct Report<'a> {
    dir: &'a Path,
    config: Config,
    shards: Shards,
    census: Census,
    totals: BTreeMap<(Class, String), Total>,
    problems: Vec<String>,
    warnings: Vec<String>,
}

/// Runs the command.
pub(super) fn inspect(args: &InspectArgs) -> Result<Outcome> {
    let report = Report::new(&args.dir)?;
    if args.json {
        print_json(&report.json())?;
    } else {
        let text = report.text();
        std::io::stdout().write_all(text.as_bytes()).context("cannot write to stdout")?;
    }
    Ok(if report.problems.is_empty() { Outcome::Done } else { Outcome::Incomplete })
}

/// What keeps the model from running.
fn problems(config: &Config, shards: &Shards, census: &Census, dir: &Path) -> Vec<String> {
    let mut problems = Vec::new();
    if !census.missing.is_empty() {
        problems.push(census.explain_missing(config, shards, Some(dir)));
    }
    if let Err(e) = read_tokenizer(dir, config) {
        problems.push(format!("{e:#}"));
    }
    problems
}

impl<'a> Report<'a> {
    fn new(dir: &'a Path) -> Result<Self> {
        let config = read_config(dir)?;
        let shards = Shards::open(dir)?;
        let census = weights::census(&config, &shards, &BindOptions::default())?;
        let mut totals: BTreeMap<(Class, String), Total> = BTreeMap::new();
        for f in &census.found {
            let t = totals.entry((f.class, f.format.to_string())).or_default();
            t.tensors += 1;
            t.parameters += (f.rows * f.cols) as u64;
            t.bytes += f.bytes as u64;
        }
        let problems = problems(&config, &shards, &census, dir);
        let warnings = census.warnings(&config);
        Ok(Self { dir, config, shards, census, totals, problems, warnings })
    }

    fn text(&self) -> String {
        let (c, census) = (&self.config, &self.census);
        let mut s = String::new();
        let mut line = |text: String| {
            s += &text;
            s.push('\n');
        };
        let sparse = c.sparse.iter().filter(|&&x| x).count();
        line(format!(
            "{}: {} files, {} tensors",
            self.dir.display(),
            self.shards.files().len(),
            self.shards.len()
        ));
        line(format!(
            "layers      {} ({} dense, {sparse} sparse){}",
            c.n_layers,
            c.n_layers - sparse,
            if census.mtp { " + MTP" } else { "" }
        ));
        line(format!(
            "width       {}, vocabulary {}, context {}",
            c.d_model, c.vocab, c.max_positions
        ));
        line(format!(
            "attention   {} heads of {}+{} (value {}), query rank {}, latent rank {}",
            c.n_heads, c.d_nope, c.d_rope, c.d_v, c.q_rank, c.kv_rank
        ));
        line(format!(
            "experts     {} of {} (width {}), {} shared, {} groups",
            c.top_k, c.n_experts, c.d_expert, c.n_shared, c.n_group
        ));
        match &c.indexer {
            Some(x) => {
                let full = x.full.iter().filter(|&&f| f).count();
                line(format!(
                    "indexer     {} heads of {}, keeps {}, own choice in {full} of {} layers",
                    x.n_heads, x.head_dim, x.top_k, c.n_layers
                ));
            }
            None => line("indexer     none".to_owned()),
        }
        line(format!(
            "cache       {} per token (f16)",
            human_bytes(KvCache::bytes_per_position(c, KvType::F16) as u64)
        ));
        line(String::new());
        line(format!(
            "{:<16} {:<9} {:>8} {:>16} {:>12}",
            "class", "format", "tensors", "parameters", "bytes"
        ));
        let mut sum = Total::default();
        for ((class, format), t) in &self.totals {
            line(format!(
                "{:<16} {format:<9} {:>8} {:>16} {:>12}",
                class.name(),
                t.tensors,
                t.parameters,
                human_bytes(t.bytes)
            ));
            sum.tensors += t.tensors;
            sum.parameters += t.parameters;
            sum.bytes += t.bytes;
        }
        line(format!(
            "{:<16} {:<9} {:>8} {:>16} {:>12}",
            "total",
            "",
            sum.tensors,
            sum.parameters,
            human_bytes(sum.bytes)
        ));
        if !census.unused.is_empty() {
            line(format!(
                "\n{} tensors are not used, the first is {}",
                census.unused.len(),
                census.unused[0]
            ));
        }
        for w in &self.warnings {
            line(format!("warning: {w}"));
        }
        line(String::new());
        if self.problems.is_empty() {
            line("complete: nothing is missing (headers only, values are not read)".to_owned());
        }
        for p in &self.problems {
            line(format!("problem: {p}"));
        }
        s
    }

    fn json(&self) -> Value {
        let c = &self.config;
        let files: Vec<Value> = self
            .shards
            .files()
            .iter()
            .map(|f| json!({"path": f.path.display().to_string(), "bytes": f.bytes().len()}))
            .collect();
        let classes: Vec<Value> = self.totals
            .iter()
            .map(|((class, format), t)| {
                json!({"class": class.name(), "format": format, "tensors": t.tensors, "parameters": t.parameters, "bytes": t.bytes})
            })
            .collect();
        json!({
            "complete": self.problems.is_empty(),
            "config": {
                "layers": c.n_layers,
                "sparse_layers": c.sparse.iter().filter(|&&x| x).count(),
                "mtp": self.census.mtp,
                "width": c.d_model,
                "vocab": c.vocab,
                "context": c.max_positions,
                "heads": c.n_heads,
                "q_rank": c.q_rank,
                "kv_rank": c.kv_rank,
                "experts": c.n_experts,
                "experts_per_token": c.top_k,
                "shared_experts": c.n_shared,
                "expert_groups": c.n_group,
                "index_topk": c.indexer.as_ref().map(|x| x.top_k),
            },
            "cache_bytes_per_token": KvCache::bytes_per_position(c, KvType::F16),
            "files": files,
            "classes": classes,
            "missing": self.census.missing,
            "unused": self.census.unused,
            "warnings": self.warnings,
            "problems": self.problems,
        })
    }
}
