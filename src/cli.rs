//! What may be typed: subcommands, flags and their help texts. No behaviour.
#![forbid(unsafe_code)]

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::engine::Ram;
use crate::experts::Lookahead;
use crate::experts::policy::{Policies, PolicyKind};
use crate::experts::replay::Slots;
use crate::kernels::{Format, Isa};

/// Runs GLM-5.x models on one computer, exactly.
#[derive(Debug, Parser)]
#[command(name = "glm", about, disable_help_subcommand = true, arg_required_else_help = true, after_help = EXAMPLES)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

const EXAMPLES: &str = "\
Examples:
  glm run \"What is the capital of France?\"           answer with the built-in demonstration model
  glm run --model ~/GLM-5.2 --file question.txt      answer with a downloaded model
  glm inspect ~/GLM-5.2                              what a model directory holds and lacks
  glm score --model ~/GLM-5.2 book.txt               perplexity of a text

Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted.";

/// Subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Answers one prompt and exits
    Run(RunArgs),
    /// Measures log-likelihoods: perplexity, continuations, multiple choice
    Score(ScoreArgs),
    /// Shows what a model directory holds and what is missing
    Inspect(InspectArgs),
    /// Shows where memory would go and what speed to expect, before anything is loaded
    Plan(PlanArgs),
    /// Replays recorded routing: how many experts would have been in memory, by policy and slots
    Replay(ReplayArgs),
    /// Writes a quantized container from a checkpoint
    Convert(ConvertArgs),
    /// Measures a model, kernels, a drive or the thread pool
    #[command(subcommand)]
    Bench(BenchCommand),
    /// Writes a model of real layer shapes with random weights, to measure speed with
    Synth(SynthArgs),
    /// Prints a completion script for a shell
    Completions {
        /// Shell to complete for
        shell: clap_complete::Shell,
    },
}

/// Which model, and what it computes with.
#[derive(Debug, Args)]
pub struct EngineArgs {
    /// Model directory: config.json, tokenizer.json and *.safetensors; also from GLM_MODEL. Without it, the built-in
    /// demonstration model
    #[arg(long, value_name = "DIR", help_heading = "Model")]
    pub model: Option<PathBuf>,
    /// Most tokens that the cache holds: prompt and answer without its last token. Default is the model's own limit;
    /// memory grows with use
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..), help_heading = "Model")]
    pub ctx: Option<u32>,
    /// Quantize float weights while loading: int8, int4-row, int4-gN, int3, int2 or fp8
    #[arg(long, value_name = "FORMAT", help_heading = "Model")]
    pub quantize: Option<Format>,
    /// Run without the sparse attention indexer; the context then ends where dense attention stops being exact
    #[arg(long, help_heading = "Model")]
    pub no_indexer: bool,
    /// Activations in products with int8, int4, int3 and int2 weights
    #[arg(long, value_enum, default_value_t = ActivationsArg::Q8, help_heading = "Compute")]
    pub activations: ActivationsArg,
    /// Precision of the attention cache
    #[arg(long, value_enum, default_value_t = KvArg::F16, help_heading = "Compute")]
    pub kv: KvArg,
    /// Compute threads; default is one per physical core. Results do not depend on it
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024), help_heading = "Compute")]
    pub threads: Option<u16>,
    /// Instruction set: see `glm --version` for those of this CPU; also from GLM_ISA. Default is the best of this CPU; results
    /// do not depend on it
    #[arg(long, value_name = "ISA", help_heading = "Compute")]
    pub isa: Option<Isa>,
    /// Most memory to take: GB as in 16 or 3.5, or a share of what is available as in 75%. Experts that do not fit are
    /// read from disk when they are wanted. Default leaves an eighth of what is available
    #[arg(long, value_name = "GB|%", help_heading = "Memory")]
    pub ram: Option<Ram>,
    /// How experts that do not fit are read: auto measures direct against buffered; mmap leaves them to the system's cache
    #[arg(long, value_enum, default_value_t = IoArg::Auto, help_heading = "Memory")]
    pub io: IoArg,
    /// A directory with a copy of the model on another drive; reads are divided by speed. May be given several times
    #[arg(long, value_name = "DIR", help_heading = "Memory")]
    pub mirror: Vec<PathBuf>,
    /// Read what the next layer will probably want: auto does so while it is faster
    #[arg(long, value_name = "off|on|auto", default_value_t = Lookahead::Auto, help_heading = "Memory")]
    pub lookahead: Lookahead,
    /// Keep no history of which experts were chosen, and pin none by it
    #[arg(long, help_heading = "Memory")]
    pub no_usage: bool,
    /// The history's file; default is .coli_usage in the model directory
    #[arg(long, value_name = "FILE", conflicts_with = "no_usage", help_heading = "Memory")]
    pub usage: Option<PathBuf>,
    /// What the history's counts are multiplied by in each run, 0 to 1: lower forgets faster
    #[arg(long, value_name = "X", default_value_t = 0.9, value_parser = number::<0, 1>, conflicts_with = "no_usage", help_heading = "Memory")]
    pub usage_decay: f32,
    /// Read experts from disk through N slots, even if all of them would fit: to measure how results and speed depend on it.
    /// Default is what --ram leaves
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..), help_heading = "Memory")]
    pub slots: Option<u32>,
    /// Most rows of a forward pass, up to 4096: fewer read experts more often. Results depend on it only with
    /// --lossy-cache-route and --lossy-miss-budget. Default is what memory allows
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096), help_heading = "Memory")]
    pub pass_rows: Option<u32>,
    /// Ways to trade the answer for speed.
    #[command(flatten)]
    pub lossy: LossyArgs,
    /// Which expert to give up when another needs its slot: see `glm replay`
    #[arg(long, value_name = "NAME", default_value_t = PolicyKind::default(), help_heading = "Memory")]
    pub policy: PolicyKind,
    /// Write which experts every token is sent to, for `glm replay`
    #[arg(long, value_name = "FILE", help_heading = "Memory")]
    pub record_routing: Option<PathBuf>,
    /// Print no notes, progress or statistics
    #[arg(short, long)]
    pub quiet: bool,
}

/// Lossy routing: at most one of these.
#[derive(Debug, Args)]
#[group(multiple = false)]
pub struct LossyArgs {
    /// Send a token only to those of its experts, by descending weight, that together have the share P of its weight
    #[arg(long, value_name = "P", value_parser = part, help_heading = LOSSY)]
    pub lossy_expert_top_p: Option<f32>,
    /// Send a token only to the K of its experts that have the largest weight
    #[arg(long, value_name = "K", value_parser = clap::value_parser!(u32).range(1..), help_heading = LOSSY)]
    pub lossy_expert_top_k: Option<u32>,
    /// Send a token to its first J experts, and instead of the others to those among its first M that are in memory. In
    /// passes of up to 16 tokens; results depend on what ran before and may differ from run to run
    #[arg(long, value_name = "J,M", value_parser = pair, help_heading = LOSSY)]
    pub lossy_cache_route: Option<(u32, u32)>,
    /// Read at most N experts per layer, those of largest weight, and drop the others that are not in memory; a token
    /// keeps at least one. In passes of up to 16 tokens; results depend on what ran before and may differ from run to run
    #[arg(long, value_name = "N", help_heading = LOSSY)]
    pub lossy_miss_budget: Option<u32>,
}

const LOSSY: &str = "Lossy routing (changes the answer)";

/// Ways to read experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum IoArg {
    /// The faster of direct and buffered
    Auto,
    /// Past the system's cache
    Direct,
    /// Through the system's cache
    Buffered,
    /// Mapped files
    Mmap,
}

/// Activation modes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ActivationsArg {
    /// int8 in groups of 64, exact integer products
    Q8,
    /// f32, weights dequantized: slower, for comparison
    F32,
}

/// Cache precisions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum KvArg {
    /// Half precision
    F16,
    /// Single precision
    F32,
}

/// `glm run`.
#[derive(Debug, Args)]
#[command(
    allow_negative_numbers = true,
    after_help = "\
Examples:
  glm run \"Spell the word rabbit.\" --no-think
  git diff | glm run --system \"Review this change.\" -
  glm run --raw \"Once upon a time\" -n 200 --temperature 0.8 --seed 7
  glm run \"List three rivers.\" --json --logprobs 5 | jq .finish_reason

The answer goes to stdout, reasoning and statistics to stderr. Nothing in a prompt becomes a control token: a literal
<|user|> is text. One line break at the end of stdin or of a file is not part of a chat prompt."
)]
pub struct RunArgs {
    /// The prompt; `-` or nothing reads stdin
    #[arg(value_name = "PROMPT", conflicts_with = "file")]
    pub prompt: Option<String>,
    /// Read the prompt from a file
    #[arg(long, value_name = "F")]
    pub file: Option<PathBuf>,
    /// System message
    #[arg(long, value_name = "TEXT", conflicts_with = "raw")]
    pub system: Option<String>,
    /// Complete the text as it is, without the chat template
    #[arg(long)]
    pub raw: bool,
    /// Leaves the model's prefix out.
    #[arg(long, requires = "raw", help = "With --raw: do not put [gMASK]<sop> before the text")]
    pub no_prefix: bool,
    /// Let the model think before it answers; without --think and --no-think the model's template decides (GLM-5.2 thinks)
    #[arg(long, conflicts_with_all = ["no_think", "raw"])]
    pub think: bool,
    /// Answer without thinking
    #[arg(long, conflicts_with = "raw")]
    pub no_think: bool,
    /// Reasoning effort, as the model's template knows it (GLM-5.2: high or max)
    #[arg(long, value_name = "LEVEL", conflicts_with = "raw")]
    pub effort: Option<String>,
    /// Most tokens to generate, reasoning included
    #[arg(short = 'n', long, value_name = "N", default_value_t = 1024)]
    pub max_tokens: u32,
    /// 0 (the likeliest token always) to 100
    #[arg(long, value_name = "T", value_parser = number::<0, 100>, help_heading = "Sampling (defaults: generation_config.json)")]
    pub temperature: Option<f32>,
    /// Keep the likeliest tokens that together have probability P
    #[arg(long, value_name = "P", value_parser = share, help_heading = "Sampling (defaults: generation_config.json)")]
    pub top_p: Option<f32>,
    /// Keep the K likeliest tokens; 0 is off
    #[arg(long, value_name = "K", help_heading = "Sampling (defaults: generation_config.json)")]
    pub top_k: Option<u32>,
    /// Keep tokens at least P times as likely as the likeliest
    #[arg(long, value_name = "P", value_parser = number::<0, 1>, help_heading = "Sampling (defaults: generation_config.json)")]
    pub min_p: Option<f32>,
    /// Penalty on the last 64 tokens, 0.01 to 100; 1 is off
    #[arg(long, value_name = "X", value_parser = penalty, help_heading = "Sampling (defaults: generation_config.json)")]
    pub repeat_penalty: Option<f32>,
    /// Seed of the random numbers; default is from the clock and is shown at the end
    #[arg(long, value_name = "N", help_heading = "Sampling (defaults: generation_config.json)")]
    pub seed: Option<u64>,
    /// Text that ends the answer and is not part of it; may be given several times
    #[arg(long, value_name = "TEXT", value_parser = nonempty)]
    pub stop: Vec<String>,
    /// Go on after the end of the turn
    #[arg(long)]
    pub ignore_eos: bool,
    /// Print one JSON object with ids, text, finish reason and timings
    #[arg(long)]
    pub json: bool,
    /// With --json: log-probability of every token and of the K best (0 to 100)
    #[arg(long, value_name = "K", requires = "json", value_parser = clap::value_parser!(u16).range(0..=100))]
    pub logprobs: Option<u16>,
    /// Show where the time went
    #[arg(long)]
    pub profile: bool,
    /// Model and compute options.
    #[command(flatten)]
    pub engine: EngineArgs,
}

/// `glm score`.
#[derive(Debug, Args)]
#[command(
    allow_negative_numbers = true,
    after_help = "\
Input forms (found out from the first line, or said with --input):
  text   perplexity over windows of the text; a partial last window is left out
  jsonl  {\"context\": …, \"continuation\": …} log-likelihoods, or
         {\"context\": …, \"choices\": [...], \"gold\": N} accuracy, plain and normalised by the choice's length
  ids    <ctxlen> <contlen> <id> … one result line each: <log-likelihood> <contlen> <1 if greedy>

[gMASK]<sop> is put before every sequence that does not begin with it, unless --no-prefix.

Examples:
  glm score book.txt --window 2048 --stride 1024
  glm score --model ~/GLM-5.2 questions.jsonl --json
  printf '3 2 10 11 12 13 14\\n' | glm score -"
)]
pub struct ScoreArgs {
    /// Input file; `-` is stdin
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// Form of the input
    #[arg(long, value_enum)]
    pub input: Option<InputForm>,
    /// Text: tokens per window; default 2048 or the context
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(2..))]
    pub window: Option<u32>,
    /// Text: tokens from one window to the next; default is the window. A token is scored once, in the first window that holds it
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub stride: Option<u32>,
    /// Text: read control tokens such as <|user|> in the text as such
    #[arg(long)]
    pub parse_special: bool,
    /// Leaves the model's prefix out.
    #[arg(long, help = "Do not put [gMASK]<sop> before sequences")]
    pub no_prefix: bool,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    /// Model and compute options.
    #[command(flatten)]
    pub engine: EngineArgs,
}

/// Forms of scoring input.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum InputForm {
    /// Running text
    Text,
    /// One JSON object a line
    Jsonl,
    /// Token ids
    Ids,
}

/// `glm inspect`.
#[derive(Debug, Args)]
#[command(after_help = "\
Reads headers only. Exit code 1 when something is missing or damaged.

Example:
  glm inspect ~/GLM-5.2 --json | jq .missing")]
pub struct InspectArgs {
    /// Model directory
    #[arg(value_name = "DIR")]
    pub dir: PathBuf,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// `glm plan`.
#[derive(Debug, Args)]
#[command(after_help = "\
Reads headers, then measures for about two seconds: memory, and where experts are streamed the drive, with reads of the
model's own files, and products. What a token touches over these speeds is the decode speed to expect; context makes it
slower. Experts are expected in slots as if all were used alike, or as often as they were by the history of their use.
Exit code 1 when the model cannot run in the budget; the message says what would do.

Examples:
  glm plan ~/GLM-5.2 --ram 16
  glm plan ~/GLM-5.2 --ram 75% --ctx 32768 --no-measure --json")]
pub struct PlanArgs {
    /// Model directory; also from GLM_MODEL. Without it, the built-in demonstration model
    #[arg(value_name = "DIR")]
    pub dir: Option<PathBuf>,
    /// Most memory to take: GB as in 16 or 3.5, or a share of what is available as in 75%
    #[arg(long, value_name = "GB|%")]
    pub ram: Option<Ram>,
    /// Tokens of context
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub ctx: Option<u32>,
    /// Precision of the attention cache
    #[arg(long, value_enum, default_value_t = KvArg::F16)]
    pub kv: KvArg,
    /// Compute threads to expect; default is one per physical core
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub threads: Option<u16>,
    /// How often experts were used: lines of layer, expert and count; default is .coli_usage in DIR
    #[arg(long, value_name = "FILE")]
    pub usage: Option<PathBuf>,
    /// Measure nothing: show bytes only
    #[arg(long)]
    pub no_measure: bool,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// `glm replay`.
#[derive(Debug, Args)]
#[command(after_help = "\
A trace comes from --record-routing of `glm run`, `glm score` and `glm bench model`. Every policy sees what it would see
in the program. `best` knows the future: it gives up what is not wanted for longest; `of best` is the share of its hits.

Examples:
  glm run \"Tell me a story.\" -n 500 --ignore-eos --record-routing story.txt && glm replay story.txt
  glm score book.txt --record-routing book.trace && glm replay book.trace --rows --slots 10%,25%
  glm replay --synth skew=1.2,sticky=0.3 --policy lru,forecast --json

Made-up routing (--synth), with its defaults:
  skew=0.8      Zipf exponent of popularity, another order in every layer
  sticky=0.3    probability that an expert of the last token stays
  drift=0.05    probability, per token and layer, that two experts trade popularity
  tokens=1000, layers=75, experts=256, top_k=8, seed=1")]
pub struct ReplayArgs {
    /// Routing traces; `-` is stdin
    #[arg(value_name = "FILE")]
    pub files: Vec<PathBuf>,
    /// Policies: all, or names
    #[arg(long, value_name = "all|NAME,…", default_value = "all")]
    pub policy: Policies,
    /// Slots: numbers, or shares of all experts
    #[arg(long, value_name = "N|N%,…", value_delimiter = ',', default_value = "10%,25%,50%")]
    pub slots: Vec<Slots>,
    /// Experts per layer; default is one more than the highest id of the trace
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub experts: Option<u32>,
    /// Take each row of a pass for a pass of its own: what decoding the same tokens would want
    #[arg(long)]
    pub rows: bool,
    /// Make routing up instead of reading it; may be given several times
    #[arg(long, value_name = "NAME=VALUE,…")]
    pub synth: Vec<String>,
    /// Print one JSON object a trace, in a list
    #[arg(long)]
    pub json: bool,
}

/// `glm convert`.
#[derive(Debug, Args)]
#[command(after_help = "\
Embedding, head and indexer become int8; router and norms stay f32; the MTP layer becomes int8. SRC must hold float or
FP8 weights; DST must not hold a model yet. The whole result is held in memory.

Example:
  glm convert ~/GLM-5.2-FP8 ~/GLM-5.2-int4 --to int4-g64")]
pub struct ConvertArgs {
    /// Checkpoint directory
    #[arg(value_name = "SRC")]
    pub src: PathBuf,
    /// Directory to write; made if absent
    #[arg(value_name = "DST")]
    pub dst: PathBuf,
    /// Format of the large matrices: int8, int4-row, int4-gN, int3, int2 or fp8
    #[arg(long, value_name = "FORMAT", default_value = "int4-g64")]
    pub to: Format,
    /// Print no progress
    #[arg(short, long)]
    pub quiet: bool,
}

/// What `glm bench` measures.
#[derive(Debug, Subcommand)]
pub enum BenchCommand {
    /// Prefill and decode speed of a model
    Model(BenchModelArgs),
    /// Matrix products and attention on synthetic data, beside a plain read of the same bytes
    Kernels(BenchKernelsArgs),
    /// Reads from a drive: block sizes and numbers of readers
    Disk(BenchDiskArgs),
    /// Cost of a parallel section
    Pool(BenchPoolArgs),
}

/// `glm bench model`
#[derive(Debug, Args)]
#[command(after_help = "\
Prompts are random ids, decoding is greedy. Every figure is the median of the repeats; machines are noisy, so compare
two programs in one session, alternating. `glm synth` makes models to measure with.

Example:
  glm bench model --prompt 64,512 --gen 128 --json")]
pub struct BenchModelArgs {
    /// Prompt lengths
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_values_t = [64, 256], value_parser = clap::value_parser!(u32).range(1..))]
    pub prompt: Vec<u32>,
    /// Tokens to decode after each prompt
    #[arg(long = "gen", value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..))]
    pub generate: u32,
    /// How it is repeated and reported.
    #[command(flatten)]
    pub report: ReportArgs,
    /// Model and compute options.
    #[command(flatten)]
    pub engine: EngineArgs,
}

/// How often something is measured, and how it is printed.
#[derive(Debug, Args)]
pub struct ReportArgs {
    /// Repeats; figures are their median
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub reps: u32,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// `glm bench kernels`
#[derive(Debug, Args)]
#[command(after_help = "\
Products and plain reads of the same bytes alternate; `ratio` is product over the fastest read. Cold products go
through at least --cold of distinct matrices, so that weights come from memory; hot ones repeat one matrix.

Examples:
  glm bench kernels
  glm bench kernels --format int4-g64 --shape 2048x6144 --batch 1,8,64 --threads 1,2 --json")]
pub struct BenchKernelsArgs {
    /// Weight formats: bf16, fp8, int8, int4-row, int4-gN, int3, int2
    #[arg(long, value_name = "FORMAT,…", value_delimiter = ',', default_values_t = ["int4-g64".to_owned(), "int8".to_owned(), "bf16".to_owned()])]
    pub format: Vec<String>,
    /// Matrix shapes, outputs × inputs
    #[arg(long, value_name = "ROWSxCOLS,…", value_delimiter = ',', default_values_t = ["2048x6144".to_owned(), "6144x2048".to_owned()], value_parser = shape)]
    pub shape: Vec<String>,
    /// Activation rows of one product
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_values_t = [1, 4, 8, 16, 64, 512], value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub batch: Vec<u32>,
    /// Thread counts; default is one per physical core
    #[arg(long, value_name = "N,…", value_delimiter = ',', value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub threads: Vec<u16>,
    /// Instruction set; default is the best of this CPU
    #[arg(long, value_name = "ISA")]
    pub isa: Option<Isa>,
    /// MB of distinct matrices for cold products; 0 measures hot ones only
    #[arg(long, value_name = "MB", default_value_t = 1024, value_parser = clap::value_parser!(u32).range(..=1 << 20))]
    pub cold: u32,
    /// Lengths of the attention cache; 0 leaves attention out
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_values_t = [1024, 8192, 65536], value_parser = clap::value_parser!(u32).range(..=1 << 20))]
    pub keys: Vec<u32>,
    /// How it is repeated and reported.
    #[command(flatten)]
    pub report: ReportArgs,
}

/// `glm bench disk`
#[derive(Debug, Args)]
#[command(after_help = "\
Reads the largest file of DIR at random places, past the system's cache where it can (direct) and through it
(buffered, after dropping the file from the cache). Nothing is written. Every way to read is measured once, in random order, before any
is measured again; `spread` is the distance from the slowest to the fastest repeat, as a share of the median. `best` is
what needs the fewest readers and the smallest blocks within 3% of the fastest. The defaults take about 50 seconds.

Examples:
  glm bench disk /models/glm-5.2-int4 --json
  glm bench disk /models/glm-5.2-int4 --block 20480 --readers 1,2 --time 1000")]
pub struct BenchDiskArgs {
    /// Directory on the drive, with at least one large file
    #[arg(value_name = "DIR")]
    pub dir: PathBuf,
    /// KB of one read
    #[arg(long, value_name = "KB,…", value_delimiter = ',', default_values_t = [256, 1024, 4096, 20480], value_parser = block_kb)]
    pub block: Vec<u32>,
    /// Numbers of readers
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_values_t = [1, 2, 4, 8], value_parser = clap::value_parser!(u16).range(1..=256))]
    pub readers: Vec<u16>,
    /// Milliseconds that each measurement reads
    #[arg(long, value_name = "MS", default_value_t = 300, value_parser = clap::value_parser!(u32).range(1..=600_000))]
    pub time: u32,
    /// How it is repeated and reported.
    #[command(flatten)]
    pub report: ReportArgs,
}

/// `glm bench pool`
#[derive(Debug, Args)]
pub struct BenchPoolArgs {
    /// Thread counts; default is 1 and one per physical core
    #[arg(long, value_name = "N,…", value_delimiter = ',', value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub threads: Vec<u16>,
    /// How it is repeated and reported.
    #[command(flatten)]
    pub report: ReportArgs,
}

fn block_kb(s: &str) -> Result<u32, String> {
    let kb = s.parse::<u32>().ok().filter(|kb| (4..=1 << 20).contains(kb) && kb % 4 == 0);
    kb.ok_or_else(|| "expected a multiple of 4 up to 1048576".to_owned())
}

fn shape(s: &str) -> Result<String, String> {
    let side = |n: &str| n.parse::<usize>().ok().filter(|n| (1..=1 << 17).contains(n));
    match s.split_once('x') {
        Some((r, c)) if side(r).is_some() && side(c).is_some() => Ok(s.to_owned()),
        _ => Err("expected ROWSxCOLS, for example 2048x6144".to_owned()),
    }
}

/// `glm synth`.
#[derive(Debug, Args)]
#[command(after_help = "\
A speed measured with such a model is that of a real one with the same layers; what it says is noise. The same options
give the same bytes on every machine. Formats are chosen as in `glm convert`; the tokenizer is the built-in model's.

Examples:
  glm synth --preset glm-5.2 --layers 5 --experts 32 --vocab 8192 /tmp/synth    one dense and four sparse layers, 3.5 GB
  glm synth --preset glm-5.2 --dense 3 --mtp /mnt/big/synth                     all of GLM-5.2, 429 GB
  glm bench model --model /tmp/synth")]
pub struct SynthArgs {
    /// Directory to write; made if absent
    #[arg(value_name = "DIR")]
    pub dir: PathBuf,
    /// Whose layer shapes to take
    #[arg(long, value_enum)]
    pub preset: PresetArg,
    /// Decoder layers; default is the preset's
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=128))]
    pub layers: Option<u32>,
    /// How many of the first layers are dense; GLM-5.2 has 3 of 78
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub dense: u32,
    /// Routed experts per sparse layer; default is the preset's
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub experts: Option<u32>,
    /// Rows of embedding and head; default is the preset's
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1 << 24))]
    pub vocab: Option<u32>,
    /// Format of the large matrices: int8, int4-row, int4-gN, int3, int2 or fp8
    #[arg(long, value_name = "FORMAT", default_value = "int4-g64")]
    pub format: Format,
    /// Add the MTP layer
    #[arg(long)]
    pub mtp: bool,
    /// Seed of the random weights
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    /// Print no notes or progress
    #[arg(short, long)]
    pub quiet: bool,
}

/// Models whose layer shapes are known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PresetArg {
    /// GLM-5.2: 78 layers, 256 experts, 744 B parameters
    #[value(name = "glm-5.2")]
    Glm52,
    /// The built-in model: 5 layers, 16 experts, 12 M parameters
    Tiny,
}

/// A number from `LOW` to `HIGH`.
fn number<const LOW: i32, const HIGH: i32>(s: &str) -> Result<f32, String> {
    let x = s.parse::<f32>().ok().filter(|x| (LOW as f32..=HIGH as f32).contains(x));
    x.ok_or_else(|| format!("expected a number from {LOW} to {HIGH}"))
}

fn share(s: &str) -> Result<f32, String> {
    let x = number::<0, 1>(s).ok().filter(|x| *x > 0.0);
    x.ok_or_else(|| "expected a number above 0 and up to 1".to_owned())
}

/// A share of something that is neither nothing nor all of it.
fn part(s: &str) -> Result<f32, String> {
    let x = number::<0, 1>(s).ok().filter(|x| *x > 0.0 && *x < 1.0);
    x.ok_or_else(|| "expected a number above 0 and below 1".to_owned())
}

fn pair(s: &str) -> Result<(u32, u32), String> {
    let pair = s.split_once(',').and_then(|(a, b)| Some((a.parse().ok()?, b.parse().ok()?)));
    pair.ok_or_else(|| "expected two numbers J,M, for example 4,16".to_owned())
}

fn penalty(s: &str) -> Result<f32, String> {
    let x = number::<0, 100>(s).ok().filter(|x| *x >= 0.01);
    x.ok_or_else(|| "expected a number from 0.01 to 100; 1 is off".to_owned())
}

fn nonempty(s: &str) -> Result<String, String> {
    if s.is_empty() {
        Err("expected a text that is not empty".to_owned())
    } else {
        Ok(s.to_owned())
    }
}
