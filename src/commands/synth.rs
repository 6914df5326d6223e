//! `glm synth`: a model of real layer shapes with random weights, for measuring speed without a download.
//!
//! Weights are made as codes while they are written, one tensor at a time. The scales keep the variance of what flows
//! through a matrix, so that activations stay finite at any depth and the router spreads tokens over the experts as a
//! trained one does. What the model says is noise.
#![forbid(unsafe_code)]

use std::borrow::Cow;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use indicatif::ProgressBar;
use safetensors::Dtype;
use serde_json::{Value, json};

use super::container::{Data, SHARD_BYTES, Shard, Writer, parts, prepare_destination};
use super::{
    Outcome, Usage, cancel_flag, human_bytes, print_json, progress_bar, round, stderr_line,
};
use crate::cli::{PresetArg, SynthArgs};
use crate::engine::builtin;
use crate::kernels::Format;
use crate::model::census::Found;
use crate::model::config::Config;
use crate::model::weights::{self, Class};
use crate::store::random::RandomMat;
use crate::sys;
use crate::tokenizer::Tokenizer;

/// The published config.json of GLM-5.2 without its token ids, which belong to its tokenizer.
const GLM_5_2: &[u8] = include_bytes!("glm-5.2.json");

/// Runs the command.
pub(super) fn synth(args: &SynthArgs) -> Result<Outcome> {
    let cancel = cancel_flag()?;
    let (config_json, config) = synthetic_config(args)?;
    let tensors = weights::tensors(&config, args.format)?;
    let bytes: u64 = tensors.iter().map(|f| f.bytes as u64).sum();
    prepare_destination(&args.dir, None)?;
    check_space(&args.dir, bytes)?;
    if !args.quiet {
        stderr_line(&format!("writing {} to {}", human_bytes(bytes), args.dir.display()));
    }

    let started = Instant::now();
    let bar = progress_bar(args.quiet, Some(tensors.len() as u64), "writing");
    let mut writer = Writer::new(&args.dir);
    for (prefix, part) in parts(&config, &tensors) {
        for file in files(&part) {
            let mut shard = Shard::new();
            for f in file {
                add(&mut shard, f, args.seed, cancel, &bar);
            }
            writer.write(prefix, shard)?;
            if cancel.load(Ordering::Relaxed) {
                bar.finish_and_clear();
                writer.undo();
                return Ok(Outcome::Interrupted);
            }
        }
    }
    bar.finish_and_clear();
    if let Err(e) = write_side_files(&args.dir, &config_json) {
        writer.undo();
        return Err(e);
    }
    report(args, &config, &tensors, &writer, started.elapsed().as_secs_f64())?;
    Ok(Outcome::Done)
}

/// The preset's config with the sizes that were asked for, as JSON and checked.
fn synthetic_config(args: &SynthArgs) -> Result<(Value, Config)> {
    let preset = match args.preset {
        PresetArg::Glm52 => GLM_5_2,
        PresetArg::Tiny => builtin::CONFIG,
    };
    let mut json: Value = serde_json::from_slice(preset).context("preset")?;
    let tokens: Value = serde_json::from_slice(builtin::CONFIG).context("built-in config.json")?;
    for key in ["eos_token_id", "pad_token_id"] {
        json[key] = tokens[key].clone();
    }
    for (key, size) in [
        ("num_hidden_layers", args.layers),
        ("first_k_dense_replace", Some(args.dense)),
        ("n_routed_experts", args.experts),
        ("vocab_size", args.vocab),
        ("num_nextn_predict_layers", Some(u32::from(args.mtp))),
    ] {
        if let Some(n) = size {
            json[key] = n.into();
        }
    }
    check_sizes(&json)?;
    // Both lists follow from the numbers of layers; published configs spell them out.
    json["mlp_layer_types"] = Value::Null;
    json["indexer_types"] = Value::Null;
    let config = Config::parse(json.to_string().as_bytes(), "config.json")?;
    let spell = |kinds: &[bool], yes: &str, no: &str| {
        kinds.iter().map(|&k| if k { yes } else { no }).collect::<Value>()
    };
    json["mlp_layer_types"] = spell(&config.sparse, "sparse", "dense");
    if let Some(x) = &config.indexer {
        json["indexer_types"] = spell(&x.full, "full", "shared");
    }
    Ok((json, config))
}

/// Refuses sizes that make no model, by the names of their flags.
fn check_sizes(config: &Value) -> Result<()> {
    let n = |key: &str| config[key].as_u64().unwrap_or(0);
    let usage = |text: String| Err(Usage(text).into());
    let (layers, dense) = (n("num_hidden_layers"), n("first_k_dense_replace"));
    if dense > layers {
        return usage(format!("--dense is {dense}, but there are only {layers} layers (--layers)"));
    }
    let (experts, chosen) = (n("n_routed_experts"), n("num_experts_per_tok"));
    if experts < chosen {
        return usage(format!(
            "--experts is {experts}, expected at least {chosen}, which is how many a token goes to"
        ));
    }
    let tokens = Tokenizer::from_bytes(builtin::TOKENIZER, "built-in/tokenizer.json")?.vocab_len();
    let vocab = n("vocab_size");
    if vocab < tokens as u64 {
        return usage(format!(
            "--vocab is {vocab}, expected at least {tokens}, the ids of the tokenizer that goes with the model"
        ));
    }
    Ok(())
}

fn check_space(dir: &Path, bytes: u64) -> Result<()> {
    let free = sys::free_bytes(dir).unwrap_or(u64::MAX);
    ensure!(
        bytes <= free,
        "{}: {} to write, but only {} free; name a directory on another disk or lower --layers, --experts or --vocab",
        dir.display(),
        human_bytes(bytes),
        human_bytes(free)
    );
    Ok(())
}

/// Divides tensors into files below [`SHARD_BYTES`]. What belongs to one module, such as an expert, is not divided.
fn files<'a>(part: &[&'a Found]) -> Vec<Vec<&'a Found>> {
    let mut files: Vec<Vec<&Found>> = Vec::new();
    let mut free = 0;
    for module in part.chunk_by(|a, b| weights::module_of(&a.name) == weights::module_of(&b.name)) {
        let bytes = module.iter().map(|f| f.bytes).sum::<usize>();
        if bytes > free || files.is_empty() {
            files.push(Vec::new());
            free = SHARD_BYTES;
        }
        free = free.saturating_sub(bytes);
        if let Some(file) = files.last_mut() {
            file.extend(module);
        }
    }
    files
}

/// Adds one tensor: its recipe, not its bytes.
fn add<'a>(
    shard: &mut Shard<Recipe<'a>>,
    f: &Found,
    seed: u64,
    cancel: &'a AtomicBool,
    bar: &'a ProgressBar,
) {
    let recipe = |part| Recipe { mat: random(f, seed), part, cancel, bar };
    let dtype = match f.format {
        Format::F32 => Dtype::F32,
        Format::F16 => Dtype::F16,
        Format::Bf16 => Dtype::BF16,
        packed => return shard.push_packed(f, packed, recipe(Part::Codes), recipe(Part::Scales)),
    };
    let vector = f.class == Class::Norm || weights::is_bias(&f.name);
    let shape = if vector { vec![f.cols] } else { vec![f.rows, f.cols] };
    shard.push(f.name.clone(), dtype, shape, recipe(Part::Codes));
}

/// The values of a tensor.
fn random(f: &Found, seed: u64) -> RandomMat {
    let (mean, deviation) = match f.class {
        _ if weights::is_bias(&f.name) => (0.0, 0.0),
        Class::Norm => (1.0, 0.1),
        // Rows are looked up, not multiplied: the residual stream starts with variance one.
        Class::Embedding => (0.0, 1.0),
        // An input of variance one gives an output of variance one.
        _ => (0.0, 1.0 / (f.cols as f64).sqrt()),
    };
    RandomMat::new(f.format, f.rows, f.cols, deviation, seed, &f.name).around(mean)
}

/// Codes or scales of a tensor, made when they are written.
struct Recipe<'a> {
    mat: RandomMat,
    part: Part,
    cancel: &'a AtomicBool,
    bar: &'a ProgressBar,
}

enum Part {
    Codes,
    Scales,
}

impl Data for Recipe<'_> {
    fn bytes(&self) -> Cow<'_, [u8]> {
        if self.cancel.load(Ordering::Relaxed) {
            // Nothing more is made; the caller removes the file.
            return Cow::Borrowed(&[]);
        }
        match self.part {
            Part::Scales => self.mat.scales().into(),
            Part::Codes => {
                self.bar.inc(1);
                self.mat.codes().into()
            }
        }
    }
}

/// The tokenizer and its end-of-turn ids are the built-in model's. config.json is last: with it the model is complete.
fn write_side_files(dir: &Path, config: &Value) -> Result<()> {
    let config = format!("{config:#}\n");
    for (name, bytes) in [
        ("tokenizer.json", builtin::TOKENIZER),
        ("generation_config.json", builtin::GENERATION),
        ("config.json", config.as_bytes()),
    ] {
        let path = dir.join(name);
        std::fs::write(&path, bytes).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

fn report(
    args: &SynthArgs,
    config: &Config,
    tensors: &[Found],
    writer: &Writer,
    seconds: f64,
) -> Result<()> {
    if !args.quiet {
        stderr_line(&format!(
            "wrote {} files, {} in {seconds:.1} s ({:.2} GB/s)",
            writer.files(),
            human_bytes(writer.bytes()),
            writer.bytes() as f64 / 1e9 / seconds
        ));
    }
    if args.json {
        print_json(&json!({
            "dir": args.dir.display().to_string(),
            "format": args.format.to_string(),
            "seed": args.seed,
            "layers": config.n_layers,
            "dense_layers": config.sparse.iter().filter(|&&s| !s).count(),
            "experts": config.n_experts,
            "vocab": config.vocab,
            "mtp": config.mtp,
            "tensors": tensors.len(),
            "parameters": tensors.iter().map(|f| (f.rows * f.cols) as u64).sum::<u64>(),
            "files": writer.files(),
            "bytes": writer.bytes(),
            "seconds": round(seconds, 3),
        }))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(list: &[&str]) -> SynthArgs {
        use clap::Parser;
        let list = ["glm", "synth"].iter().chain(list).chain(&["dir"]);
        match crate::cli::Cli::try_parse_from(list).unwrap().command {
            crate::cli::Command::Synth(args) => args,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_preset_has_the_published_sizes() {
        let (json, config) =
            synthetic_config(&args(&["--preset", "glm-5.2", "--dense", "3", "--mtp"])).unwrap();
        let tensors = weights::tensors(&config, Format::Int4 { group: 64 }).unwrap();
        let parameters: usize = tensors.iter().map(|f| f.rows * f.cols).sum();
        assert_eq!(parameters, 753_329_940_480);
        let bytes: usize = tensors.iter().map(|f| f.bytes).sum();
        assert_eq!(bytes / 1_000_000_000, 429);
        assert_eq!(
            json["indexer_types"].as_array().unwrap().iter().filter(|t| *t == "full").count(),
            21
        );
        assert_eq!(json["mlp_layer_types"][3], "sparse");
        assert_eq!(tensors.iter().filter(|f| f.layer == Some(78)).count(), 791);
    }

    #[test]
    #[cfg(unix)]
    fn too_little_space_is_an_error_before_anything_is_written() {
        check_space(Path::new("."), 0).unwrap();
        let e = check_space(Path::new("."), u64::MAX - 1).unwrap_err().to_string();
        assert!(e.contains("free; name a directory on another disk"), "{e}");
    }

    #[test]
    fn files_are_bounded_and_experts_whole() {
        let (_, config) =
            synthetic_config(&args(&["--preset", "glm-5.2", "--layers", "5"])).unwrap();
        let tensors = weights::tensors(&config, Format::Int8).unwrap();
        let all: Vec<&Found> = tensors.iter().collect();
        let files = files(&all);
        assert!(files.len() > 5);
        for file in &files {
            assert!(file.iter().map(|f| f.bytes).sum::<usize>() <= SHARD_BYTES);
            assert_eq!(file.iter().filter(|f| f.class == Class::Expert).count() % 3, 0);
        }
        assert_eq!(files.concat().len(), tensors.len());
    }
}
