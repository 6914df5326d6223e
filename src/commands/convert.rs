//! `glm convert`: a checkpoint becomes a quantized container, in memory, through the same packers as loading.
#![forbid(unsafe_code)]

use std::sync::atomic::Ordering;

use anyhow::{Context, Result, bail};
use safetensors::Dtype;

use super::container::{SHARD_BYTES, Shard, Writer, parts, prepare_destination};
use super::{Outcome, cancel_flag, human_bytes, progress_bar, stderr_line};
use crate::cli::ConvertArgs;
use crate::engine::read_config;
use crate::kernels::Format;
use crate::model::census::Found;
use crate::model::config::Config;
use crate::model::weights::{self, BindOptions, Class};
use crate::store::Shards;

/// Files that are copied when they exist.
const SIDE_FILES: [&str; 5] = [
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "chat_template.jinja",
];

/// Runs the command.
pub(super) fn convert(args: &ConvertArgs) -> Result<Outcome> {
    let (src, dst) = (&args.src, &args.dst);
    let cancel = cancel_flag()?;
    let config = read_config(src)?;
    let shards = Shards::open(src)?;
    let census = weights::census(&config, &shards, &BindOptions::default())?;
    if !census.missing.is_empty() {
        bail!("{}", census.explain_missing(&config, &shards, Some(src)));
    }
    if let Some(f) = census.found.iter().find(|f| f.format.is_integer()) {
        bail!(
            "{}: {} is already {}; convert from the published float or FP8 checkpoint",
            src.display(),
            f.name,
            f.format
        );
    }
    prepare_destination(dst, Some(src))?;

    let bar = progress_bar(args.quiet, Some(census.found.len() as u64), "converting");
    let mut writer = Writer::new(dst);
    for (prefix, part) in parts(&config, &census.found) {
        let mut shard = Shard::new();
        let mut layer = None;
        for f in part {
            if cancel.load(Ordering::Relaxed) {
                bar.finish_and_clear();
                writer.undo();
                return Ok(Outcome::Interrupted);
            }
            if f.layer != layer && shard.bytes() >= SHARD_BYTES {
                writer.write(prefix, std::mem::replace(&mut shard, Shard::new()))?;
            }
            layer = f.layer;
            if let Err(e) = add(&mut shard, &config, &shards, f, args.to) {
                writer.undo();
                return Err(e);
            }
            bar.inc(1);
        }
        if !shard.is_empty() {
            writer.write(prefix, shard)?;
        }
    }
    bar.finish_and_clear();
    for name in SIDE_FILES {
        let from = src.join(name);
        if from.exists() {
            std::fs::copy(&from, dst.join(name))
                .with_context(|| format!("cannot copy {} to {}", from.display(), dst.display()))?;
        } else if matches!(name, "tokenizer.json" | "generation_config.json") {
            stderr_line(&format!("warning: {} is absent and was not copied", from.display()));
        }
    }
    if !args.quiet {
        stderr_line(&format!(
            "wrote {} files, {} ({})",
            writer.files(),
            human_bytes(writer.bytes()),
            args.to
        ));
    }
    Ok(Outcome::Done)
}

/// Adds a tensor to a file, packed unless its class stays float.
fn add(
    shard: &mut Shard<Vec<u8>>,
    config: &Config,
    shards: &Shards,
    f: &Found,
    to: Format,
) -> Result<()> {
    let mat = weights::stored_mat(config, shards, f)?;
    let at = || format!("{}: {}", mat.path().display(), f.name);
    let mtp = f.layer == Some(config.n_layers);
    match weights::quantized_format(to, f.class, mtp, f.rows, f.cols) {
        Some(format) => {
            let (codes, scales) = weights::pack(&mat, format).with_context(at)?;
            if format == Format::F32 {
                shard.push(f.name.clone(), Dtype::F32, vec![f.rows, f.cols], codes);
                return Ok(());
            }
            let scales = scales.iter().flat_map(|s| s.to_le_bytes()).collect();
            shard.push_packed(f, format, codes, scales);
        }
        None => {
            // Norms and router are f32 in containers; what is large and stays float keeps its width.
            let (format, dtype) = match (f.class, mat.format()) {
                (Class::Norm | Class::Router | Class::HeadWeights, _) => (Format::F32, Dtype::F32),
                (_, Format::Bf16) => (Format::Bf16, Dtype::BF16),
                (_, Format::F16) => (Format::F16, Dtype::F16),
                _ => (Format::F32, Dtype::F32),
            };
            let shape =
                shards.find(&f.name).map_or_else(|| vec![f.rows, f.cols], |t| t.shape.clone());
            let (codes, _) = weights::pack(&mat, format).with_context(at)?;
            shard.push(f.name.clone(), dtype, shape, codes);
        }
    }
    Ok(())
}
