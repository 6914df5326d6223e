//! The one struct a front end holds: a model with its tokenizer, template and sampling defaults, opened once.
//!
//! Front ends see [`Engine`], [`Session`] and [`Generation`]; tensors stay below.
#![forbid(unsafe_code)]

mod estimate;
mod generate;
mod history;
mod plan;
mod session;

use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Map, Value, json};

pub use estimate::{Estimate, Span, Speeds, Tier};
pub use generate::{Channel, Event, Finish, Generation, Request, TokenEvent};
use history::History;
pub use history::UsageOptions;
pub use plan::{Expert, Plan, Ram, Residency, Touched, Wishes};
pub use session::{Progress, Session};

use crate::experts::StreamOptions;
use crate::experts::trace::Recorder;
use crate::experts::usage::Shape;
use crate::kernels::{Activations, Format, Isa, Kernels};
use crate::model::census::Census;
use crate::model::config::{Config, MAX_CONFIG_BYTES, eos_ids};
use crate::model::kv::KvType;
use crate::model::lossy::Lossy;
use crate::model::weights::{BindOptions, ExpertPlace, Placement, complete_census};
use crate::model::{Compute, Model};
use crate::pool::Pool;
use crate::store::Shards;
use crate::sys;
use crate::template::{RenderOptions, Template};
use crate::tokenizer::Tokenizer;

/// Largest tokenizer and side file that is read.
const MAX_SIDE_FILE_BYTES: u64 = 1 << 30;

/// How an engine is opened.
#[derive(Clone, Debug)]
pub struct Options {
    /// Compute threads; `None` is one per physical core.
    pub threads: Option<usize>,
    /// Instruction set; `None` is the best of this CPU.
    pub isa: Option<Isa>,
    /// Activation mode.
    pub activations: Activations,
    /// Cache precision.
    pub kv: KvType,
    /// Context limit; `None` is the model's.
    pub ctx: Option<usize>,
    /// Quantize float weights while loading.
    pub quantize: Option<Format>,
    /// Run without the indexer that config promises.
    pub no_indexer: bool,
    /// Memory that may be taken; `None` is most of what is available.
    pub ram: Option<Ram>,
    /// Leave experts that do not fit in mapped files, to the system's cache.
    pub mapped: bool,
    /// How experts that do not fit are read. `bytes` is the plan's, unless it or `slots` is set; all are streamed then.
    pub stream: StreamOptions,
    /// Where it is kept which experts were chosen; `None` keeps nothing.
    pub usage: Option<UsageOptions>,
    /// Rows of the largest forward pass; `None` is what memory allows.
    pub rows: Option<usize>,
    /// Routes tokens to fewer or other experts than the model does: the answer is another one.
    pub lossy: Option<Lossy>,
    /// Where to write the routing trace.
    pub record: Option<PathBuf>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            threads: None,
            isa: None,
            activations: Activations::Q8,
            kv: KvType::F16,
            ctx: None,
            quantize: None,
            no_indexer: false,
            ram: None,
            mapped: false,
            stream: StreamOptions::default(),
            usage: None,
            rows: None,
            lossy: None,
            record: None,
        }
    }
}

/// Sampling defaults of `generation_config.json`.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingDefaults {
    /// 0 when `do_sample` is false.
    pub temperature: f32,
    /// Nucleus.
    pub top_p: f32,
    /// 0 is off.
    pub top_k: u32,
    /// 0 is off.
    pub min_p: f32,
    /// 1 is off.
    pub repeat_penalty: f32,
}

impl Default for SamplingDefaults {
    fn default() -> Self {
        Self { temperature: 1.0, top_p: 1.0, top_k: 0, min_p: 0.0, repeat_penalty: 1.0 }
    }
}

/// An opened model.
pub struct Engine {
    /// The network.
    pub model: Model,
    /// Text to ids and back.
    pub tokenizer: Tokenizer,
    /// Messages to text.
    pub template: Template,
    /// Sampling defaults.
    pub defaults: SamplingDefaults,
    /// Where the model came from; `None` is the built-in one.
    pub dir: Option<PathBuf>,
    /// Where memory goes.
    pub plan: Plan,
    stops: Vec<u32>,
    kv: KvType,
    ctx: usize,
    history: Option<History>,
    warnings: Vec<String>,
    recorder: Option<Mutex<Recorder>>,
}

/// The small files of a model, as bytes.
struct SideFiles<'a> {
    config: &'a [u8],
    tokenizer: &'a [u8],
    generation: Option<&'a [u8]>,
    tokenizer_config: Option<&'a [u8]>,
    template: Option<&'a [u8]>,
}

/// The demonstration model that is compiled in: its files, made by `tools/make-builtin.sh`.
pub(crate) mod builtin {
    pub(crate) const CONFIG: &[u8] = include_bytes!("../../models/tiny/config.json");
    pub(crate) const TOKENIZER: &[u8] = include_bytes!("../../models/tiny/tokenizer.json");
    pub(crate) const GENERATION: &[u8] = include_bytes!("../../models/tiny/generation_config.json");
    pub(super) const TEMPLATE: &[u8] = include_bytes!("../../models/tiny/chat_template.jinja");
    pub(super) const SHARDS: [(&str, &[u8]); 3] = [
        (
            "built-in/out-00000.safetensors",
            include_bytes!("../../models/tiny/out-00000.safetensors"),
        ),
        (
            "built-in/out-idx-00000.safetensors",
            include_bytes!("../../models/tiny/out-idx-00000.safetensors"),
        ),
        (
            "built-in/out-mtp-00000.safetensors",
            include_bytes!("../../models/tiny/out-mtp-00000.safetensors"),
        ),
    ];
}

impl Engine {
    /// Opens a model directory.
    ///
    /// # Errors
    /// A file is missing, damaged, or does not fit the others; every message names the file.
    pub fn open(dir: &Path, options: &Options) -> Result<Self> {
        let config = config_bytes(dir)?;
        let tokenizer = required(dir, "tokenizer.json", MAX_SIDE_FILE_BYTES)?;
        let generation = read_side(dir, "generation_config.json")?;
        let tokenizer_config = read_side(dir, "tokenizer_config.json")?;
        let template = read_side(dir, "chat_template.jinja")?;
        let shards = Shards::open(dir)?;
        let files = SideFiles {
            config: &config,
            tokenizer: &tokenizer,
            generation: generation.as_deref(),
            tokenizer_config: tokenizer_config.as_deref(),
            template: template.as_deref(),
        };
        Self::assemble(&files, &shards, Some(dir), options)
    }

    /// Where the memory of a model directory, or of the built-in model, would go. Reads headers only.
    ///
    /// # Errors
    /// Files are missing or damaged, or the model cannot run in the budget.
    pub fn plan(dir: Option<&Path>, options: &Options) -> Result<Plan> {
        let (config, shards) = match dir {
            Some(dir) => (read_config(dir)?, Shards::open(dir)?),
            None => (
                Config::parse(builtin::CONFIG, "built-in/config.json")?,
                Shards::from_static(&builtin::SHARDS)?,
            ),
        };
        let bind = BindOptions { no_indexer: options.no_indexer, ..BindOptions::default() };
        census_and_plan(&config, &shards, &bind, dir, options).map(|(_, plan)| plan)
    }

    /// Opens the small demonstration model that is compiled into the program.
    ///
    /// # Errors
    /// Only for options that do not fit it.
    pub fn builtin(options: &Options) -> Result<Self> {
        let files = SideFiles {
            config: builtin::CONFIG,
            tokenizer: builtin::TOKENIZER,
            generation: Some(builtin::GENERATION),
            tokenizer_config: None,
            template: Some(builtin::TEMPLATE),
        };
        Self::assemble(&files, &Shards::from_static(&builtin::SHARDS)?, None, options)
    }

    fn assemble(
        files: &SideFiles<'_>,
        shards: &Shards,
        dir: Option<&Path>,
        options: &Options,
    ) -> Result<Self> {
        let path = |name: &str| {
            dir.map_or_else(|| format!("built-in/{name}"), |d| d.join(name).display().to_string())
        };
        let config_path = path("config.json");
        let config = Config::parse(files.config, &config_path)?;
        options.lossy.map_or(Ok(()), |lossy| lossy.check(&config))?;
        let tokenizer = check_tokenizer(files.tokenizer, &path("tokenizer.json"), &config)?;
        let generation = files
            .generation
            .map(|b| json_object(b, &path("generation_config.json")))
            .transpose()?;
        let defaults = generation.as_ref().map_or_else(
            || Ok(SamplingDefaults::default()),
            |g| sampling_defaults(g, &path("generation_config.json")),
        )?;
        let template = template(files, &path)?;

        // End-of-turn ids: both configs together, and the tokenizer's end of text.
        let mut stops = config.eos.clone();
        if let Some(g) = &generation {
            stops.extend(eos_ids(g, &path("generation_config.json"))?);
        }
        stops.extend(tokenizer.control_id("<|endoftext|>"));
        stops.sort_unstable();
        stops.dedup();

        let isa = options.isa.unwrap_or_else(Isa::best);
        let kernels = Kernels::for_isa(isa).with_context(|| {
            let have =
                Isa::available().iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
            format!("this CPU lacks {isa}, it has {have}")
        })?;
        let pool = Pool::new(options.threads.unwrap_or_else(sys::default_threads));
        let compute = Compute { kernels, pool, activations: options.activations };
        let mut bind = BindOptions {
            quantize: options.quantize,
            no_indexer: options.no_indexer,
            placement: Placement::default(),
            lossy: options.lossy,
        };
        let (census, plan) = census_and_plan(&config, shards, &bind, dir, options)?;
        bind.placement = match &options.stream {
            StreamOptions { bytes: 0, slots: None, .. } => plan.placement(&options.stream),
            stream => Placement { dense: true, experts: ExpertPlace::Streamed(stream.clone()) },
        };
        let (mut warnings, mut history) = (Vec::new(), None);
        if let (ExpertPlace::Streamed(stream), Some(usage)) =
            (&mut bind.placement.experts, &options.usage)
        {
            let shape = Shape { layers: config.n_layers, experts: config.n_experts };
            let found = History::open(usage, dir, shape, &mut warnings)?;
            history = found.map(|(history, usage)| {
                stream.history = Some(usage);
                history
            });
        }
        let model = Model::load(config, shards, &census, &bind, compute)?;
        warnings.extend_from_slice(model.warnings());
        let ctx = plan.ctx;
        let recorder = options.record.as_deref().map(Recorder::create).transpose()?;
        Ok(Self {
            model,
            tokenizer,
            template,
            defaults,
            dir: dir.map(Path::to_owned),
            stops,
            kv: options.kv,
            plan,
            ctx,
            history,
            warnings,
            recorder: recorder.map(Mutex::new),
        })
    }

    /// What is worth telling about the files.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// Adds to the usage history which experts were chosen since the last time, if one is kept.
    ///
    /// # Errors
    /// Its file cannot be read or written.
    pub fn save_usage(&self) -> Result<()> {
        match (&self.history, self.model.stream()) {
            (Some(history), Some(stream)) => history.save(stream),
            _ => Ok(()),
        }
    }

    /// Where the model came from, for reports.
    pub fn label(&self) -> String {
        self.dir.as_ref().map_or_else(|| "built-in".to_owned(), |d| d.display().to_string())
    }

    /// A new, empty timeline.
    pub fn session(&self) -> Session {
        Session::new(&self.model.config, self.kv)
    }

    /// The routing trace, if one is written; held for the time of a pass.
    fn recorder(&self) -> Option<MutexGuard<'_, Recorder>> {
        self.recorder.as_ref().map(|r| r.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Most tokens of one timeline.
    pub fn context(&self) -> usize {
        self.ctx
    }

    /// Ids that end a turn.
    pub fn stops(&self) -> &[u32] {
        &self.stops
    }

    /// Instruction set and thread count, for the statistics line.
    pub fn describe_compute(&self) -> String {
        let n = self.model.compute.pool.threads();
        format!("{}, {n} thread{}", self.model.compute.kernels.isa(), if n == 1 { "" } else { "s" })
    }

    /// Ids of one user turn rendered through the chat template. Nothing in `user` or `system` becomes a control token.
    ///
    /// # Errors
    /// The template refuses the messages.
    pub fn encode_turn(
        &self,
        system: Option<&str>,
        user: &str,
        options: &RenderOptions,
    ) -> Result<Vec<u32>> {
        let escape = |text: &str| self.tokenizer.escape(text, &[]).into_owned();
        let mut messages = Vec::new();
        if let Some(system) = system {
            messages.push(json!({"role": "system", "content": escape(system)}));
        }
        messages.push(json!({"role": "user", "content": escape(user)}));
        let rendered = self.template.render(&Value::Array(messages), None, options)?;
        self.tokenizer.encode(&rendered)
    }

    /// Ids of plain text, after `[gMASK]<sop>` when `prefix` asks for it and the model has them.
    ///
    /// # Errors
    /// The text cannot be encoded.
    pub fn encode_raw(&self, text: &str, prefix: bool) -> Result<Vec<u32>> {
        let mut ids: Vec<u32> =
            self.tokenizer.prefix().filter(|_| prefix).into_iter().flatten().collect();
        ids.extend(self.tokenizer.encode_text(text)?);
        Ok(ids)
    }
}

/// The census of complete files, and where their weights go.
fn census_and_plan(
    config: &Config,
    shards: &Shards,
    bind: &BindOptions,
    dir: Option<&Path>,
    options: &Options,
) -> Result<(Census, Plan)> {
    let census = complete_census(config, shards, bind, dir)?;
    let max_ctx = config.max_context(options.no_indexer);
    if let Some(ctx) = options.ctx {
        ensure!(
            ctx <= max_ctx,
            "a context of {ctx} was asked for, this model ends at {max_ctx}{}",
            if options.no_indexer { " without its indexer" } else { "" }
        );
    }
    let wishes = Wishes {
        ram: options.ram,
        ctx: options.ctx,
        max_ctx,
        kv: options.kv,
        mapped: options.mapped,
        quantize: options.quantize,
        on_disk: options.quantize.is_none(),
        rows: options.rows.unwrap_or(session::PREFILL_ROWS).min(session::PREFILL_ROWS),
    };
    let plan = Plan::new(config, &census, &wishes)?;
    Ok((census, plan))
}

/// The checked `config.json` of a model directory.
///
/// # Errors
/// Not there, not readable, absurdly large, or refused by [`Config::parse`].
pub fn read_config(dir: &Path) -> Result<Config> {
    Config::parse(&config_bytes(dir)?, &dir.join("config.json").display().to_string())
}

fn config_bytes(dir: &Path) -> Result<Vec<u8>> {
    ensure!(
        dir.is_dir(),
        "{}: not a directory; expected a model directory with config.json, tokenizer.json and *.safetensors",
        dir.display()
    );
    required(dir, "config.json", MAX_CONFIG_BYTES)
}

/// The tokenizer of a model directory, checked against its config.
///
/// # Errors
/// Not there, damaged, or with more ids than the model has rows.
pub fn read_tokenizer(dir: &Path, config: &Config) -> Result<Tokenizer> {
    let bytes = required(dir, "tokenizer.json", MAX_SIDE_FILE_BYTES)?;
    check_tokenizer(&bytes, &dir.join("tokenizer.json").display().to_string(), config)
}

/// A file that every model directory has.
fn required(dir: &Path, name: &str, limit: u64) -> Result<Vec<u8>> {
    let path = dir.join(name);
    read_bounded(&path, limit)?.with_context(|| {
        format!(
            "{}: not found; a model directory holds config.json, tokenizer.json and *.safetensors",
            path.display()
        )
    })
}

fn check_tokenizer(bytes: &[u8], path: &str, config: &Config) -> Result<Tokenizer> {
    let tokenizer = Tokenizer::from_bytes(bytes, path)?;
    ensure!(
        tokenizer.vocab_len() <= config.vocab,
        "{path}: ids up to {}, but the model has only {} rows (`vocab_size` in config.json); the tokenizer belongs to another model",
        tokenizer.vocab_len() - 1,
        config.vocab
    );
    Ok(tokenizer)
}

fn read_side(dir: &Path, name: &str) -> Result<Option<Vec<u8>>> {
    read_bounded(&dir.join(name), MAX_SIDE_FILE_BYTES)
}

/// A file's bytes, or `None` if it does not exist.
fn read_bounded(path: &Path, limit: u64) -> Result<Option<Vec<u8>>> {
    let meta = match std::fs::metadata(path) {
        Ok(meta) => meta,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(e).with_context(|| format!("cannot read {}", path.display())),
    };
    ensure!(meta.is_file(), "{}: not a regular file", path.display());
    ensure!(
        meta.len() <= limit,
        "{}: {} bytes, at most {limit} are read",
        path.display(),
        meta.len()
    );
    std::fs::read(path).map(Some).with_context(|| format!("cannot read {}", path.display()))
}

fn json_object(bytes: &[u8], file: &str) -> Result<Map<String, Value>> {
    let value: Value =
        serde_json::from_slice(bytes).with_context(|| format!("{file}: not valid JSON"))?;
    match value {
        Value::Object(map) => Ok(map),
        _ => bail!("{file}: not a JSON object"),
    }
}

fn sampling_defaults(g: &Map<String, Value>, file: &str) -> Result<SamplingDefaults> {
    let d = SamplingDefaults::default();
    let number = |key: &str, default: f32, low: f64, high: f64| -> Result<f32> {
        match g.get(key).filter(|v| !v.is_null()) {
            None => Ok(default),
            Some(v) => {
                let x = v.as_f64().filter(|x| (low..=high).contains(x));
                x.map(|x| x as f32).with_context(|| {
                    format!("{file}: `{key}` is {v}, expected a number from {low} to {high}")
                })
            }
        }
    };
    let greedy = match g.get("do_sample") {
        None | Some(Value::Null) => false,
        Some(Value::Bool(sample)) => !sample,
        Some(v) => bail!("{file}: `do_sample` is {v}, expected true or false"),
    };
    Ok(SamplingDefaults {
        temperature: if greedy { 0.0 } else { number("temperature", d.temperature, 0.0, 100.0)? },
        top_p: number("top_p", d.top_p, 1e-6, 1.0)?,
        top_k: number("top_k", 0.0, 0.0, f64::from(1 << 24))? as u32,
        min_p: number("min_p", d.min_p, 0.0, 1.0)?,
        repeat_penalty: number("repetition_penalty", d.repeat_penalty, 1e-3, 1e3)?,
    })
}

/// `chat_template.jinja`, else the template inside `tokenizer_config.json`, else the built-in default.
fn template(files: &SideFiles<'_>, path: &dyn Fn(&str) -> String) -> Result<Template> {
    if let Some(bytes) = files.template {
        let file = path("chat_template.jinja");
        let source = std::str::from_utf8(bytes).with_context(|| format!("{file}: not UTF-8"))?;
        return Template::from_source(source, &file);
    }
    if let Some(bytes) = files.tokenizer_config {
        let file = path("tokenizer_config.json");
        let config = json_object(bytes, &file)?;
        let source = match config.get("chat_template") {
            Some(Value::String(s)) => Some(s.as_str()),
            // Several named templates: the one called default.
            Some(Value::Array(list)) => list
                .iter()
                .find(|t| t.get("name").and_then(Value::as_str) == Some("default"))
                .and_then(|t| t.get("template").and_then(Value::as_str)),
            _ => None,
        };
        if let Some(source) = source {
            return Template::from_source(source, &file);
        }
    }
    Ok(Template::builtin())
}
