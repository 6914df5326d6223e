//! `glm convert`: a checkpoint becomes a quantized container, in memory, through the same packers as loading.
#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

use anyhow::{Context, Result, bail, ensure};
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::{Map, Value};

use super::{Outcome, cancel_flag, human_bytes, progress_bar, stderr_line};
use crate::cli::ConvertArgs;
use crate::engine::read_config;
use crate::kernels::Format;
use crate::model::census::Found;
use crate::model::config::Config;
use crate::model::weights::{self, BindOptions, Class};
use crate::store::{Shards, quant};

/// A file is closed at the next layer once it holds this much.
const SHARD_BYTES: usize = 4 << 30;
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
    let census = weights::census(&config, &shards, BindOptions::default())?;
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
    prepare_destination(src, dst)?;

    let bar = progress_bar(args.quiet, Some(census.found.len() as u64), "converting");
    let mut writer = Writer { dst: dst.clone(), written: Vec::new(), bytes: 0 };
    for (prefix, part) in parts(&config, &census.found) {
        let mut shard = Shard::default();
        let mut layer = None;
        for f in part {
            if cancel.load(Ordering::Relaxed) {
                bar.finish_and_clear();
                writer.undo();
                return Ok(Outcome::Interrupted);
            }
            if f.layer != layer && shard.bytes >= SHARD_BYTES {
                writer.write(prefix, std::mem::take(&mut shard))?;
            }
            layer = f.layer;
            if let Err(e) = shard.add(&config, &shards, f, args.to) {
                writer.undo();
                return Err(e);
            }
            bar.inc(1);
        }
        if !shard.entries.is_empty() {
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
            writer.written.len(),
            human_bytes(writer.bytes),
            args.to
        ));
    }
    Ok(Outcome::Done)
}

/// Makes the directory, or makes sure that it is empty: a second conversion must not mix with a first.
fn prepare_destination(src: &Path, dst: &Path) -> Result<()> {
    let shown = dst.display();
    ensure!(!dst.exists() || dst.is_dir(), "{shown}: not a directory; name a new one");
    std::fs::create_dir_all(dst).with_context(|| format!("cannot make directory {shown}"))?;
    if let (Ok(src), Ok(inner)) = (src.canonicalize(), dst.canonicalize()) {
        ensure!(
            !inner.starts_with(&src),
            "{shown}: lies inside the source; name a directory elsewhere"
        );
    }
    let entries =
        std::fs::read_dir(dst).with_context(|| format!("cannot read directory {shown}"))?;
    if entries.count() > 0 {
        // The side files are copied last, so a conversion without them was cut short.
        if dst.join("config.json").exists() {
            bail!("{shown}: the output directory is not empty; name a new one");
        }
        bail!(
            "{shown}: the output directory is not empty, perhaps a conversion that was killed; delete it or name a new one"
        );
    }
    Ok(())
}

/// Main model, indexer and MTP layer go to files of their own, as containers in circulation have them.
fn parts<'a>(config: &Config, found: &'a [Found]) -> [(&'static str, Vec<&'a Found>); 3] {
    let is_mtp = |f: &Found| f.layer == Some(config.n_layers);
    let is_index = |f: &Found| weights::is_indexer(&f.name);
    let pick = |want: &dyn Fn(&Found) -> bool| found.iter().filter(|f| want(f)).collect();
    [
        ("out", pick(&|f| !is_mtp(f) && !is_index(f))),
        ("out-idx", pick(&|f| !is_mtp(f) && is_index(f))),
        ("out-mtp", pick(&is_mtp)),
    ]
}

/// One output file in the making.
#[derive(Default)]
struct Shard {
    entries: Vec<(String, Dtype, Vec<usize>, Vec<u8>)>,
    stamps: Map<String, Value>,
    bytes: usize,
}

impl Shard {
    fn add(&mut self, config: &Config, shards: &Shards, f: &Found, to: Format) -> Result<()> {
        let mat = weights::stored_mat(config, shards, f)?;
        let at = || format!("{}: {}", mat.path().display(), f.name);
        let mtp = f.layer == Some(config.n_layers);
        match weights::quantized_format(to, f.class, mtp, f.rows, f.cols) {
            Some(format) => {
                let (codes, scales) = weights::pack(&mat, format).with_context(at)?;
                if format == Format::F32 {
                    self.push(f.name.clone(), Dtype::F32, vec![f.rows, f.cols], codes);
                    return Ok(());
                }
                let scales: Vec<u8> = scales.iter().flat_map(|s| s.to_le_bytes()).collect();
                if f.class != Class::Expert {
                    self.stamps.insert(f.name.clone(), quant::stamp_name(format).into());
                }
                self.push(format!("{}.qs", f.name), Dtype::F32, vec![scales.len() / 4], scales);
                self.push(f.name.clone(), Dtype::U8, vec![codes.len()], codes);
            }
            None => {
                // Norms and router are f32 in containers; what is large and stays float keeps its width.
                let (format, dtype) = match (f.class, mat.format()) {
                    (Class::Norm | Class::Router | Class::HeadWeights, _) => {
                        (Format::F32, Dtype::F32)
                    }
                    (_, Format::Bf16) => (Format::Bf16, Dtype::BF16),
                    (_, Format::F16) => (Format::F16, Dtype::F16),
                    _ => (Format::F32, Dtype::F32),
                };
                let shape =
                    shards.find(&f.name).map_or_else(|| vec![f.rows, f.cols], |t| t.shape.clone());
                let (codes, _) = weights::pack(&mat, format).with_context(at)?;
                self.push(f.name.clone(), dtype, shape, codes);
            }
        }
        Ok(())
    }

    fn push(&mut self, name: String, dtype: Dtype, shape: Vec<usize>, data: Vec<u8>) {
        self.bytes += data.len();
        self.entries.push((name, dtype, shape, data));
    }
}

/// Writes numbered files; each appears under its name only when it is whole.
struct Writer {
    dst: PathBuf,
    written: Vec<(&'static str, PathBuf)>,
    bytes: u64,
}

impl Writer {
    fn write(&mut self, prefix: &'static str, shard: Shard) -> Result<()> {
        let number = self.written.iter().filter(|(p, _)| *p == prefix).count();
        let path = self.dst.join(format!("{prefix}-{number:05}.safetensors"));
        let part = path.with_extension("safetensors.part");
        let views = shard
            .entries
            .iter()
            .map(|(name, dtype, shape, data)| {
                Ok((name, TensorView::new(*dtype, shape.clone(), data)?))
            })
            .collect::<Result<Vec<_>>>()?;
        // One key, so that the same input gives the same bytes: the map has no order.
        let metadata =
            HashMap::from([("colibri.fmt".to_owned(), Value::Object(shard.stamps).to_string())]);
        let written = safetensors::serialize_to_file(views, Some(metadata), &part)
            .with_context(|| format!("cannot write {}", part.display()))
            .and_then(|()| {
                std::fs::rename(&part, &path).with_context(|| {
                    format!("cannot rename {} to {}", part.display(), path.display())
                })
            });
        if let Err(e) = written {
            // Best effort: the first error is the one to report.
            let _ = std::fs::remove_file(&part);
            self.undo();
            return Err(e);
        }
        self.bytes += std::fs::metadata(&path).map_or(0, |m| m.len());
        self.written.push((prefix, path));
        Ok(())
    }

    /// Removes what was written: half a model is no model.
    fn undo(&mut self) {
        for (_, path) in self.written.drain(..) {
            let _ = std::fs::remove_file(path);
        }
    }
}
