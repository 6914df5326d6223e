//! Where memory goes: what a model needs, term by term, and what is left for experts.
//!
//! The sum is an upper bound of anonymous memory, known before a weight is read. Everything fits, or experts are
//! streamed through what the other terms leave, or the model is refused with the budget that would do.
#![forbid(unsafe_code)]

use std::fmt;
use std::str::FromStr;

use anyhow::{Result, ensure};

use crate::experts::StreamOptions;
use crate::kernels::{Format, panel_bytes};
use crate::model::census::{Census, Found};
use crate::model::config::Config;
use crate::model::kv::{KvCache, KvType};
use crate::model::weights::{Class, ExpertPlace, Placement, loaded_bytes};
use crate::sys;

/// Context that a streamed model has room for when none was asked for.
const CONTEXT: usize = 8192;
/// Code, tokenizer, allocator and thread stacks.
const PROGRAM: u64 = 192 << 20;
/// Pages beside those of the run that a slot needs: every run ends in the middle of one.
const SLOT_PAGES: u64 = 4 * 4096;

/// A budget as it is typed: bytes, or a share of what is available.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Ram {
    /// So many bytes.
    Bytes(u64),
    /// Percent of the memory that is available.
    Percent(f64),
}

impl Ram {
    /// In bytes, where `available` are.
    pub fn bytes(self, available: u64) -> u64 {
        match self {
            Self::Bytes(n) => n,
            Self::Percent(p) => (available as f64 * p / 100.0) as u64,
        }
    }
}

impl FromStr for Ram {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        let wrong = || {
            format!(
                "`{s}` is no amount of memory; expected GB as in 16 or 3.5, or a share as in 75%"
            )
        };
        let number = |s: &str| s.trim().parse::<f64>().ok().filter(|x| x.is_finite() && *x > 0.0);
        if let Some(percent) = s.strip_suffix('%') {
            return number(percent).filter(|p| *p <= 100.0).map(Self::Percent).ok_or_else(wrong);
        }
        let upper = s.to_ascii_uppercase();
        let gb = number(upper.trim_end_matches('B').trim_end_matches('G')).ok_or_else(wrong)?;
        if gb > 1e6 {
            return Err(wrong());
        }
        Ok(Self::Bytes((gb * 1e9) as u64))
    }
}

/// How experts come to be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Residency {
    /// All are in memory.
    Memory,
    /// Slots filled from disk.
    Streamed,
    /// Mapped files.
    Mapped,
}

impl Residency {
    /// Name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Memory => "in memory",
            Self::Streamed => "streamed",
            Self::Mapped => "mapped",
        }
    }
}

/// Bytes of anonymous memory, term by term.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// What may be taken.
    pub ram: u64,
    /// What the system has available; `None` when it does not tell.
    pub available: Option<u64>,
    /// Whether `ram` was asked for and cut to what is available.
    pub clamped: bool,
    /// Tokens of context that the cache has room for.
    pub ctx: usize,
    /// Rows of the largest forward pass: an expert is read once per this many tokens of a prompt.
    pub rows: usize,
    /// Weights other than routed experts.
    pub dense: u64,
    /// The attention cache of `ctx` tokens.
    pub kv: u64,
    /// Activations of the largest forward pass.
    pub scratch: u64,
    /// Everything else: code, tokenizer, stacks.
    pub program: u64,
    /// All routed experts.
    pub routed: u64,
    /// Number of routed experts.
    pub n_routed: usize,
    /// Of these, experts of the decoder layers; the others are the MTP layer's.
    pub n_decoder: usize,
    /// What becomes of them.
    pub residency: Residency,
    /// Bytes of memory for experts: all of them, or slots.
    pub experts: u64,
    /// Decoder layers, and routed experts of each that has any.
    pub n_layers: usize,
    /// See `n_layers`.
    pub n_experts: usize,
    /// Routed experts that a token is sent to in a layer.
    pub top_k: usize,
    /// What one token touches.
    pub touched: Touched,
    /// A routed expert of the decoder layers; `None` when they have none.
    pub expert: Option<Expert>,
}

/// Bytes of weights that decoding one token reads, without drafts.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Touched {
    /// Of everything but experts and the embedding, of which one row is read.
    pub resident: u64,
    /// Of shared experts.
    pub shared: u64,
    /// Of the routed experts that it is sent to.
    pub routed: u64,
}

/// What a routed expert of the decoder layers is like.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Expert {
    /// Bytes of its three matrices, the mean of all.
    pub bytes: u64,
    /// Format of the first expert's first matrix.
    pub format: Format,
    /// Outputs of that matrix.
    pub rows: usize,
    /// Inputs of that matrix.
    pub cols: usize,
}

/// Bytes of weights as the census has them, priced layer by layer: the MTP layer often has another format.
#[derive(Default)]
struct Weighed {
    dense: u64,
    routed: u64,
    n_routed: usize,
    /// Routed experts of the decoder layers.
    n_decoder: usize,
    touched: Touched,
    expert: Option<Expert>,
    /// The largest expert of the decoder layers.
    largest: u64,
    /// The largest expert of the MTP layer.
    largest_mtp: u64,
}

impl Weighed {
    fn new(c: &Config, census: &Census, quantize: Option<Format>) -> Self {
        let mut all = Self::default();
        let bytes = |f: &Found| {
            let stored = loaded_bytes(c, quantize, f) as u64;
            panel_bytes(f.format, f.rows, f.cols).map_or(stored, |panels| stored.max(panels as u64))
        };
        let untied = census.found.iter().any(|f| f.class == Class::Head);
        for f in census.found.iter().filter(|f| f.class != Class::Expert) {
            all.dense += bytes(f);
            match f.class {
                _ if f.layer == Some(c.n_layers) => {}
                Class::Embedding if untied => {}
                Class::Shared => all.touched.shared += bytes(f),
                _ => all.touched.resident += bytes(f),
            }
        }
        let experts: Vec<&Found> =
            census.found.iter().filter(|f| f.class == Class::Expert).collect();
        // Gate, up and down of an expert follow each other.
        for mats in experts.chunks(3) {
            let expert = mats.iter().map(|f| bytes(f)).sum();
            all.routed += expert;
            all.n_routed += 1;
            if mats[0].layer == Some(c.n_layers) {
                all.largest_mtp = all.largest_mtp.max(expert);
                continue;
            }
            all.largest = all.largest.max(expert);
            all.n_decoder += 1;
            all.touched.routed += expert;
            let Found { format, rows, cols, .. } = *mats[0];
            all.expert.get_or_insert(Expert { bytes: 0, format, rows, cols });
        }
        if let Some(expert) = &mut all.expert {
            // So far all experts were added up.
            expert.bytes = all.touched.routed / all.n_decoder as u64;
            let per_layer = all.touched.routed as f64 / c.n_experts as f64;
            all.touched.routed = (per_layer * c.top_k as f64) as u64;
        }
        all
    }

    /// Bytes of the fewest slots that are worth having: those of one token's experts in a layer, and one of the MTP layer.
    fn fewest(&self, top_k: usize) -> u64 {
        let mtp = if self.largest_mtp > 0 { self.largest_mtp + SLOT_PAGES } else { 0 };
        top_k as u64 * (self.largest + SLOT_PAGES) + mtp
    }
}

/// What a plan is made for.
#[derive(Clone, Copy, Debug)]
pub struct Wishes {
    /// Budget; `None` takes seven eighths of what is available.
    pub ram: Option<Ram>,
    /// Context; `None` is the model's own where everything fits.
    pub ctx: Option<usize>,
    /// Longest context of the model.
    pub max_ctx: usize,
    /// Precision of the cache.
    pub kv: KvType,
    /// Whether files may be mapped instead of read.
    pub mapped: bool,
    /// Format that weights are quantized to while loading.
    pub quantize: Option<Format>,
    /// Whether experts lie in files on disk.
    pub on_disk: bool,
    /// Rows of the largest forward pass, where memory allows.
    pub rows: usize,
}

impl Plan {
    /// Plans for the tensors of `census`.
    ///
    /// # Errors
    /// The budget is too small even for one token's experts; the message has every term and what would do.
    pub fn new(c: &Config, census: &Census, w: &Wishes) -> Result<Self> {
        let available = sys::available_memory();
        let room = available.unwrap_or(u64::MAX);
        let asked = w.ram.map(|ram| ram.bytes(room));
        let ram = asked.unwrap_or(room / 8 * 7).min(room);
        let weighed = Weighed::new(c, census, w.quantize);
        let Weighed { dense, routed, n_routed, n_decoder, touched, expert, .. } = weighed;
        let kv = |ctx: usize| KvCache::bytes_per_token(c, w.kv) * ctx as u64;
        // Long passes read each expert less often, but a small budget is better spent on slots.
        let affordable = |rows: &usize| scratch_bytes(c, *rows) <= ram / 8;
        let rows = [w.rows, w.rows / 2, w.rows / 4, w.rows / 8].into_iter().find(affordable);
        let rows = rows.unwrap_or(w.rows / 16).max(1);
        let scratch = |ctx: usize| scratch_bytes(c, rows.min(ctx));

        let fixed = |ctx: usize| dense + kv(ctx) + scratch(ctx) + PROGRAM;
        let wanted = w.ctx.unwrap_or(w.max_ctx).min(w.max_ctx);
        let short = w.ctx.unwrap_or(CONTEXT).min(w.max_ctx);
        // A context that nobody asked for is not paid for in slots, but it is not a reason to stream either.
        let fits = |ctx: usize| fixed(ctx).saturating_add(routed) <= ram;
        let in_memory = [wanted, short].into_iter().find(|&ctx| fits(ctx));
        let (ctx, residency) = match in_memory {
            Some(ctx) => (ctx, Residency::Memory),
            None if w.mapped => (wanted, Residency::Mapped),
            None => (short, Residency::Streamed),
        };
        let experts = match residency {
            Residency::Memory => routed,
            Residency::Mapped => 0,
            Residency::Streamed => ram.saturating_sub(fixed(ctx)),
        };
        let plan = Self {
            ram,
            available,
            clamped: asked.is_some_and(|asked| asked > ram),
            ctx,
            rows,
            dense,
            kv: kv(ctx),
            scratch: scratch(ctx),
            program: PROGRAM,
            routed,
            n_routed,
            n_decoder,
            residency,
            experts,
            n_layers: c.n_layers,
            n_experts: c.n_experts,
            top_k: c.top_k,
            touched,
            expert,
        };
        if residency == Residency::Streamed {
            // A layer can go on with one slot; with fewer than its choices it reads some of them again and again.
            let need = fixed(ctx) + weighed.fewest(c.top_k);
            ensure!(need <= ram, "{}", plan.refusal(need, w));
            ensure!(
                w.on_disk,
                "{:.2} GB of weights that are quantized while loading must all fit, --ram allows {:.2} GB; \
                 convert the model once with `glm convert` and run the result",
                gb(fixed(ctx) + routed),
                gb(ram)
            );
        }
        Ok(plan)
    }

    fn refusal(&self, need: u64, w: &Wishes) -> String {
        let mut text = format!(
            "{:.2} GB do not fit into {:.2} GB: {}",
            gb(need),
            gb(self.ram),
            self.terms()
                .iter()
                .map(|(name, bytes)| format!("{name} {:.2}", gb(*bytes)))
                .collect::<Vec<_>>()
                .join(", ")
        );
        text += &format!(", experts of one layer {:.2}", gb(need - self.fixed()));
        text +=
            &format!("; the least that works is --ram {:.2}", (gb(need) * 100.0).ceil() / 100.0);
        let per_token = self.kv / self.ctx.max(1) as u64;
        let over = need - self.ram;
        let fewer = (self.kv > over).then(|| self.ctx - over.div_ceil(per_token.max(1)) as usize);
        if let Some(ctx) = fewer.filter(|&ctx| ctx > 0) {
            text += &format!(", or --ctx {ctx}");
        }
        if self.available.is_some_and(|a| a < need) || w.ram.is_none() {
            text += &format!(" (available now: {:.2} GB)", gb(self.available.unwrap_or(self.ram)));
        }
        text
    }

    /// Every term but the experts.
    pub fn terms(&self) -> [(&'static str, u64); 4] {
        [
            ("resident weights", self.dense),
            ("attention cache", self.kv),
            ("scratch", self.scratch),
            ("program", self.program),
        ]
    }

    /// Share of the routed experts that have room in memory.
    pub fn room(&self) -> f64 {
        (self.experts as f64 / self.routed.max(1) as f64).min(1.0)
    }

    /// Experts of the decoder layers that have room in memory.
    pub fn decoder_slots(&self) -> usize {
        (self.room() * self.n_decoder as f64) as usize
    }

    /// Bytes of every term but the experts.
    fn fixed(&self) -> u64 {
        self.terms().iter().map(|t| t.1).sum()
    }

    /// Bytes of all terms.
    pub fn total(&self) -> u64 {
        self.fixed() + self.experts
    }

    /// Where weights go. `stream` says how, the plan how much.
    pub fn placement(&self, stream: &StreamOptions) -> Placement {
        let experts = match self.residency {
            Residency::Memory => ExpertPlace::Memory,
            Residency::Mapped => ExpertPlace::Mapped,
            Residency::Streamed => {
                ExpertPlace::Streamed(StreamOptions { bytes: self.experts, ..stream.clone() })
            }
        };
        Placement {
            dense: self.residency != Residency::Mapped || self.fixed() <= self.ram,
            experts,
        }
    }
}

/// 10⁹ bytes.
fn gb(bytes: u64) -> f64 {
    bytes as f64 / 1e9
}

/// Activations of a pass over `rows` rows: what the widest steps of a layer hold at the same time.
fn scratch_bytes(c: &Config, rows: usize) -> u64 {
    let (d, rows) = (c.d_model as u64, rows as u64);
    let (ff, expert) = (c.d_ff as u64, c.d_expert as u64);
    let slots = rows.max(1024);
    // Values are f32 and, where products read them, int8 with a scale per 64: about 5.1 bytes.
    let stream = rows * d * (4 + 4 + 6 + 4 + 4);
    let dense = rows * (ff.max(c.n_shared as u64 * expert) * 6 + d * 4);
    let routed = slots * (expert * 6 + d * 4) + rows * c.n_experts as u64 * 4;
    let block = 96 * (c.n_heads * (c.d_nope + c.d_rope + c.d_v + 2 * c.kv_rank)) as u64 * 4;
    stream + dense + routed + block + 2 * c.vocab as u64 * 4
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, bytes) in self.terms() {
            writeln!(f, "  {name:<18} {:>9.3} GB", gb(bytes))?;
        }
        let experts = format!("experts {}", self.residency.name());
        writeln!(f, "  {experts:<18} {:>9.3} GB of {:.3}", gb(self.experts), gb(self.routed))?;
        write!(f, "  {:<18} {:>9.3} GB of {:.3}", "total", gb(self.total()), gb(self.ram))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::builtin;
    use crate::model::weights;

    /// The built-in model's shapes in int4 with an int8 MTP layer.
    #[test]
    fn layers_are_priced_at_their_own_format() {
        let c = Config::parse(builtin::CONFIG, "config.json").unwrap();
        let found = weights::tensors(&c, Format::Int4 { group: 64 }).unwrap();
        let census = Census { found, missing: Vec::new(), unused: Vec::new(), mtp: true };
        let all = Weighed::new(&c, &census, None);
        assert!(
            c.mtp && all.largest_mtp > all.largest * 3 / 2,
            "{} {}",
            all.largest,
            all.largest_mtp
        );
        let sparse = (0..c.n_layers).filter(|&i| c.is_sparse(i)).count();
        assert_eq!(all.n_decoder, sparse * c.n_experts);
        assert_eq!(all.n_routed, all.n_decoder + c.n_experts);
        // All experts of a decoder layer have one size.
        assert_eq!(all.touched.routed, (sparse * c.top_k) as u64 * all.largest);
        assert_eq!(
            all.routed,
            all.n_decoder as u64 * all.largest + c.n_experts as u64 * all.largest_mtp
        );
        let slots = all.fewest(c.top_k) - (c.top_k as u64 + 1) * SLOT_PAGES;
        assert_eq!(slots, c.top_k as u64 * all.largest + all.largest_mtp);
    }

    #[test]
    fn budgets_are_read() {
        assert_eq!("16".parse(), Ok(Ram::Bytes(16_000_000_000)));
        assert_eq!("3.5GB".parse(), Ok(Ram::Bytes(3_500_000_000)));
        assert_eq!("3.5g".parse(), Ok(Ram::Bytes(3_500_000_000)));
        assert_eq!("75%".parse(), Ok(Ram::Percent(75.0)));
        assert_eq!(Ram::Percent(50.0).bytes(10), 5);
        for wrong in ["", "0", "-1", "101%", "x", "16 TB", "nan", "inf", "1e300"] {
            assert!(wrong.parse::<Ram>().is_err(), "{wrong}");
        }
    }
}
