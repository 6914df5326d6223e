//! Checkpoint names and shapes → typed weights. The only file with tensor names in it.
//!
//! Binding runs twice over the same code: first dry, which looks at headers only and collects what is missing, then for
//! real, which reads the vectors, checks the scales of resident matrices and quantizes if asked. So nothing is read
//! before everything is known to be there and to have the right size. The same code without files is the list of what
//! a model has ([`tensors`]).
#![forbid(unsafe_code)]

use std::collections::HashSet;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};

use super::census::{Census, Found};
use super::compute::Compute;
use super::config::Config;
use super::lossy::Lossy;
use crate::experts::{Experts, GatedMlp, StreamOptions};
use crate::kernels::{FP8_BLOCK, Format, Kernels, MatView};
use crate::store::{Bytes, Dtype, Mat, Scales, Shards, TensorRef, quant, settle};

/// What a tensor is for: decides how it is quantized and how the census groups it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Class {
    /// Token embedding.
    Embedding,
    /// Output head.
    Head,
    /// Norm weights and biases.
    Norm,
    /// Attention projections.
    Attention,
    /// DSA indexer.
    Indexer,
    /// Weights of the indexer's heads, which stay float.
    HeadWeights,
    /// MLP of the dense layers.
    Dense,
    /// Router and its correction bias.
    Router,
    /// Shared experts.
    Shared,
    /// Routed experts.
    Expert,
    /// The MTP layer's own projection.
    MtpProjection,
}

impl Class {
    /// Name in the census.
    pub fn name(self) -> &'static str {
        match self {
            Self::Embedding => "embedding",
            Self::Head => "head",
            Self::Norm => "norms",
            Self::Attention => "attention",
            Self::Indexer => "indexer",
            Self::HeadWeights => "indexer weights",
            Self::Dense => "dense mlp",
            Self::Router => "router",
            Self::Shared => "shared experts",
            Self::Expert => "routed experts",
            Self::MtpProjection => "mtp projection",
        }
    }
}

/// Attention weights of one layer.
pub struct Attention {
    /// (q_rank, d_model)
    pub q_a: Mat,
    /// (q_rank)
    pub q_a_norm: Vec<f32>,
    /// (n_heads * (d_nope + d_rope), q_rank)
    pub q_b: Mat,
    /// (kv_rank + d_rope, d_model)
    pub kv_a: Mat,
    /// (kv_rank)
    pub kv_a_norm: Vec<f32>,
    /// (n_heads * d_nope, kv_rank): the key half of `kv_b`, as stored because its rows are added, not multiplied
    pub k_b: HeadRows,
    /// (n_heads * d_v, kv_rank): the value half of `kv_b`
    pub v_b: HeadRows,
    /// (d_model, n_heads * d_v)
    pub o: Mat,
}

/// Rows of a matrix that belong to heads.
pub struct HeadRows {
    mat: Mat,
    first: usize,
    stride: usize,
}

impl HeadRows {
    /// Key and value rows of `kv_b`, which has per head its `d_nope` key rows, then its `d_v` value rows.
    fn split(kv_b: &Mat, c: &Config) -> (Self, Self) {
        let stride = c.d_nope + c.d_v;
        let rows = |first: usize, n: usize| {
            (0..c.n_heads).flat_map(move |h| h * stride + first..h * stride + first + n)
        };
        let part = |first: usize, n: usize| {
            // Formats that are read as stored need no copy.
            let own = kv_b.format().is_integer().then(|| kv_b.pick_rows(rows(first, n)));
            match own.flatten() {
                Some(mat) if first == 0 => Self { mat: mat.kept_as_stored(), first: 0, stride: n },
                Some(mat) => Self { mat, first: 0, stride: n },
                None => Self { mat: kv_b.clone(), first, stride },
            }
        };
        (part(0, c.d_nope), part(c.d_nope, c.d_v))
    }

    /// What the stages before loading bind.
    fn none() -> Self {
        Self { mat: no_mat(), first: 0, stride: 0 }
    }

    /// The matrix that holds the rows.
    pub fn view(&self) -> MatView<'_> {
        self.mat.view()
    }

    /// First row of a head.
    pub fn row(&self, head: usize) -> usize {
        head * self.stride + self.first
    }
}

/// Indexer weights of one layer.
pub struct Indexer {
    /// (n_heads * head_dim, q_rank)
    pub q_b: Mat,
    /// (head_dim, d_model)
    pub k: Mat,
    /// (n_heads, d_model)
    pub head_weights: Mat,
    /// (head_dim)
    pub k_norm: Vec<f32>,
    /// (head_dim)
    pub k_norm_bias: Vec<f32>,
}

/// The feed-forward half of one layer; routed experts are in [`Experts`].
pub enum FeedForward {
    /// One dense MLP.
    Dense(GatedMlp),
    /// Routed and shared experts.
    Sparse {
        /// (n_experts, d_model)
        router: Mat,
        /// (n_experts)
        bias: Vec<f32>,
        /// Width n_shared * d_expert, absent when n_shared is 0.
        shared: Option<GatedMlp>,
    },
}

/// One decoder layer.
pub struct Layer {
    /// (d_model)
    pub attn_norm: Vec<f32>,
    /// Attention.
    pub attn: Attention,
    /// Present on layers that score keys.
    pub indexer: Option<Indexer>,
    /// (d_model)
    pub ff_norm: Vec<f32>,
    /// Feed-forward.
    pub ff: FeedForward,
}

/// The MTP layer: a decoder layer with its own input projection and norm.
pub struct Mtp {
    /// (d_model): norm of the embedding half
    pub e_norm: Vec<f32>,
    /// (d_model): norm of the hidden half
    pub h_norm: Vec<f32>,
    /// (d_model, 2 * d_model): embedding columns first
    pub eh: Mat,
    /// The decoder layer.
    pub layer: Layer,
    /// (d_model)
    pub norm: Vec<f32>,
}

/// Everything but the routed experts.
pub struct Weights {
    /// (vocab, d_model)
    pub embed: Mat,
    /// Decoder layers.
    pub layers: Vec<Layer>,
    /// (d_model)
    pub norm: Vec<f32>,
    /// (vocab, d_model)
    pub head: Mat,
    /// The MTP layer, when config and files have it.
    pub mtp: Option<Mtp>,
}

/// Everything bound, and what is worth telling about it.
pub struct Bound {
    /// Resident weights.
    pub weights: Weights,
    /// Routed experts.
    pub experts: Experts,
    /// See [`Census::warnings`].
    pub warnings: Vec<String>,
}

/// How weights are bound.
#[derive(Clone, Debug, Default)]
pub struct BindOptions {
    /// Quantize float matrices to this format while loading.
    pub quantize: Option<Format>,
    /// Ignore an indexer that config promises: attention is dense and the context ends at its `top_k`.
    pub no_indexer: bool,
    /// Where weights go.
    pub placement: Placement,
    /// Routes rows to fewer or other experts than their routers choose.
    pub lossy: Option<Lossy>,
}

/// Where weights go.
#[derive(Clone, Debug, Default)]
pub struct Placement {
    /// Whether weights other than routed experts are moved into memory of their own; else they stay mapped.
    pub dense: bool,
    /// What becomes of routed experts.
    pub experts: ExpertPlace,
}

impl Placement {
    /// Everything in memory.
    pub fn memory() -> Self {
        Self { dense: true, experts: ExpertPlace::Memory }
    }
}

/// What becomes of routed experts.
#[derive(Clone, Debug, Default)]
pub enum ExpertPlace {
    /// Moved into memory of their own.
    Memory,
    /// Mapped as stored: the system's cache decides what is in memory.
    #[default]
    Mapped,
    /// Read into slots when they are wanted.
    Streamed(StreamOptions),
}

/// What a pass that binds for real works with.
#[derive(Clone, Copy)]
struct Memory<'a> {
    compute: &'a Compute,
    /// Whether weights other than routed experts are moved into memory of their own.
    dense: bool,
    /// Whether routed experts are.
    experts: bool,
}

/// Tensor name of a part of a routed expert.
pub fn expert_name(layer: usize, id: usize, part: &str) -> String {
    format!("model.layers.{layer}.mlp.experts.{id}.{part}.weight")
}

/// The layer that a tensor belongs to, by its name.
pub fn layer_of(name: &str) -> Option<usize> {
    name.strip_prefix("model.layers.")?.split('.').next()?.parse().ok()
}

/// Whether a tensor belongs to an indexer.
pub fn is_indexer(name: &str) -> bool {
    name.contains(".self_attn.indexer.")
}

/// What a tensor is a part of: the name without its last two words. An expert's matrices share it.
pub fn module_of(name: &str) -> Option<&str> {
    name.rsplitn(3, '.').nth(2)
}

/// Whether a tensor is added to something, not multiplied with it.
pub fn is_bias(name: &str) -> bool {
    name.ends_with("bias")
}

/// Whether a tensor holds all experts of a layer, a form that is not read.
pub fn is_fused_experts(name: &str) -> bool {
    name.ends_with("mlp.experts.gate_up_proj")
}

/// The format that a matrix of this class gets when the model is quantized to `wanted`.
///
/// Embedding, head, indexer and MTP layer never go below int8; router, norms and the indexer's head weights stay f32,
/// which is `None`.
pub fn quantized_format(
    wanted: Format,
    class: Class,
    mtp: bool,
    rows: usize,
    cols: usize,
) -> Option<Format> {
    let low = if wanted == Format::Fp8 { Format::Fp8 } else { Format::Int8 };
    let format = match class {
        Class::Norm | Class::Router | Class::HeadWeights => return None,
        Class::Embedding | Class::Head | Class::MtpProjection if wanted == Format::Fp8 => {
            return None;
        }
        Class::Embedding | Class::Head | Class::Indexer | Class::MtpProjection => low,
        _ if mtp => low,
        _ => wanted,
    };
    Some(quant::writable(format, rows, cols))
}

/// All tensors of a complete model of this config, MTP layer and indexers included where it promises them, in the
/// formats that they have in a container of `wanted`. No files are looked at.
///
/// # Errors
/// Never for a config that was parsed.
pub fn tensors(config: &Config, wanted: Format) -> Result<Vec<Found>> {
    let options = BindOptions { quantize: Some(wanted), ..BindOptions::default() };
    let none = Shards::from_static(&[])?;
    let mut binder = Binder::new(config, &none, &options, Stage::List);
    binder.bind()?;
    Ok(binder.found)
}

/// Looks at headers only: what is there, what is missing.
///
/// # Errors
/// A tensor has the wrong shape, size or type.
pub fn census(config: &Config, shards: &Shards, options: &BindOptions) -> Result<Census> {
    let mut binder = Binder::new(config, shards, options, Stage::Headers);
    binder.bind()?;
    let used: HashSet<&str> = binder.found.iter().map(|f| f.name.as_str()).collect();
    let is_side = |n: &str| {
        [".qs", "_scale_inv"].iter().any(|s| n.strip_suffix(s).is_some_and(|n| used.contains(n)))
    };
    let mut unused: Vec<String> =
        shards.names().filter(|n| !used.contains(n) && !is_side(n)).map(String::from).collect();
    unused.sort();
    Ok(Census { unused, missing: binder.missing, mtp: binder.mtp, found: binder.found })
}

/// The census of files that have everything. `dir` is only used to explain what is missing.
///
/// # Errors
/// A tensor is missing or has the wrong shape, size or type.
pub fn complete_census(
    config: &Config,
    shards: &Shards,
    options: &BindOptions,
    dir: Option<&Path>,
) -> Result<Census> {
    let census = census(config, shards, options)?;
    if !census.missing.is_empty() {
        let at = dir.map_or_else(String::new, |d| format!("{}: ", d.display()));
        bail!("{at}{}", census.explain_missing(config, shards, dir));
    }
    Ok(census)
}

/// Binds all weights of files that were found complete.
///
/// # Errors
/// A resident scale or vector is not finite, or the store of experts cannot be opened.
pub fn bind(
    config: &Config,
    shards: &Shards,
    census: &Census,
    options: &BindOptions,
    compute: &Compute,
) -> Result<Bound> {
    let memory = Memory {
        compute,
        dense: options.placement.dense,
        experts: matches!(options.placement.experts, ExpertPlace::Memory),
    };
    let mut binder = Binder::new(config, shards, options, Stage::Load(memory));
    let (weights, experts) = binder.bind()?;
    let experts = match &options.placement.experts {
        ExpertPlace::Memory | ExpertPlace::Mapped => Experts::held(experts, expert_name),
        ExpertPlace::Streamed(stream) => Experts::streamed(experts, expert_name, stream)?,
    };
    Ok(Bound { weights, experts, warnings: census.warnings(config) })
}

/// Bytes that a tensor takes in memory when it is quantized while loading as `quantize` asks.
pub fn loaded_bytes(config: &Config, quantize: Option<Format>, f: &Found) -> usize {
    match quantize {
        Some(wanted) if !f.format.is_integer() => {
            let mtp = f.layer == Some(config.n_layers);
            quantized_format(wanted, f.class, mtp, f.rows, f.cols)
                .map_or(f.bytes, |format| format.total_bytes(f.rows, f.cols))
        }
        _ => f.bytes,
    }
}

/// What a walk over the model's tensors does.
#[derive(Clone, Copy)]
enum Stage<'a> {
    /// Names them; there are no files.
    List,
    /// Looks them up and checks shapes and sizes.
    Headers,
    /// Reads them into memory.
    Load(Memory<'a>),
}

struct Binder<'a> {
    config: &'a Config,
    shards: &'a Shards,
    options: &'a BindOptions,
    stage: Stage<'a>,
    layer: Option<usize>,
    mtp: bool,
    found: Vec<Found>,
    missing: Vec<String>,
}

impl<'a> Binder<'a> {
    fn new(
        config: &'a Config,
        shards: &'a Shards,
        options: &'a BindOptions,
        stage: Stage<'a>,
    ) -> Self {
        Self {
            config,
            shards,
            options,
            stage,
            layer: None,
            mtp: false,
            found: Vec::new(),
            missing: Vec::new(),
        }
    }

    fn bind(&mut self) -> Result<(Weights, Vec<Vec<GatedMlp>>)> {
        let c = self.config;
        let mut experts = Vec::new();
        let embed = self.mat("model.embed_tokens.weight", c.vocab, c.d_model, Class::Embedding)?;
        let layers = (0..c.n_layers)
            .map(|i| self.decoder_layer(i, &mut experts))
            .collect::<Result<Vec<_>>>()?;
        self.layer = None;
        let norm = self.vector("model.norm.weight", c.d_model, Class::Norm)?;
        let mut head = if c.tied && self.shards.find("lm_head.weight").is_none() {
            embed.clone()
        } else {
            self.mat("lm_head.weight", c.vocab, c.d_model, Class::Head)?
        };
        self.settle(vec![&mut head])?;
        let mtp = self.mtp_layer(&mut experts)?;
        Ok((Weights { embed, layers, norm, head, mtp }, experts))
    }

    fn decoder_layer(&mut self, i: usize, experts: &mut Vec<Vec<GatedMlp>>) -> Result<Layer> {
        let c = self.config;
        self.layer = Some(i);
        let n = |s: &str| format!("model.layers.{i}.{s}");
        let a = |s: &str| format!("model.layers.{i}.self_attn.{s}");
        let attn_norm = self.vector(&n("input_layernorm.weight"), c.d_model, Class::Norm)?;
        let class = Class::Attention;
        let mut q_a = self.mat(&a("q_a_proj.weight"), c.q_rank, c.d_model, class)?;
        let q_a_norm = self.vector(&a("q_a_layernorm.weight"), c.q_rank, Class::Norm)?;
        let q_rows = c.n_heads * (c.d_nope + c.d_rope);
        let mut q_b = self.mat(&a("q_b_proj.weight"), q_rows, c.q_rank, class)?;
        let kv_width = c.kv_rank + c.d_rope;
        let mut kv_a = self.mat(&a("kv_a_proj_with_mqa.weight"), kv_width, c.d_model, class)?;
        let kv_a_norm = self.vector(&a("kv_a_layernorm.weight"), c.kv_rank, Class::Norm)?;
        let kv_rows = c.n_heads * (c.d_nope + c.d_v);
        let mut kv_b = self.mat(&a("kv_b_proj.weight"), kv_rows, c.kv_rank, class)?;
        let mut o = self.mat(&a("o_proj.weight"), c.d_model, c.n_heads * c.d_v, class)?;
        if !kv_b.format().is_integer() {
            self.settle(vec![&mut kv_b])?;
        }
        let (mut k_b, mut v_b) = match self.memory() {
            Some(_) => HeadRows::split(&kv_b, c),
            None => (HeadRows::none(), HeadRows::none()),
        };
        // Containers in circulation leave the MTP layer's own indexer out; drafts are then made with dense attention.
        let its_own = |name: &str| layer_of(name) == Some(i) && is_indexer(name);
        let left_out = i == c.n_layers && !self.has(its_own);
        let skip = self.options.no_indexer || left_out;
        let mut indexer = match &c.indexer {
            Some(x) if c.scores_keys(i) && !skip => Some(Indexer {
                q_b: self.mat(
                    &a("indexer.wq_b.weight"),
                    x.n_heads * x.head_dim,
                    c.q_rank,
                    Class::Indexer,
                )?,
                k: self.mat(&a("indexer.wk.weight"), x.head_dim, c.d_model, Class::Indexer)?,
                head_weights: self.mat(
                    &a("indexer.weights_proj.weight"),
                    x.n_heads,
                    c.d_model,
                    Class::HeadWeights,
                )?,
                k_norm: self.vector(&a("indexer.k_norm.weight"), x.head_dim, Class::Norm)?,
                k_norm_bias: self.vector(&a("indexer.k_norm.bias"), x.head_dim, Class::Norm)?,
            }),
            _ => None,
        };
        let ff_norm = self.vector(&n("post_attention_layernorm.weight"), c.d_model, Class::Norm)?;
        let mut layer_experts = Vec::new();
        let mut ff = if c.is_sparse(i) {
            let router = self.mat(&n("mlp.gate.weight"), c.n_experts, c.d_model, Class::Router)?;
            let bias =
                self.vector(&n("mlp.gate.e_score_correction_bias"), c.n_experts, Class::Router)?;
            let shared = match c.n_shared {
                0 => None,
                k => Some(self.gated(&n("mlp.shared_experts."), k * c.d_expert, Class::Shared)?),
            };
            layer_experts.reserve(c.n_experts);
            for e in 0..c.n_experts {
                layer_experts.push(self.gated(
                    &n(&format!("mlp.experts.{e}.")),
                    c.d_expert,
                    Class::Expert,
                )?);
            }
            FeedForward::Sparse { router, bias, shared }
        } else {
            FeedForward::Dense(self.gated(&n("mlp."), c.d_ff, Class::Dense)?)
        };
        if let Some(m) = self.memory().filter(|m| m.experts) {
            for (e, mlp) in layer_experts.iter().enumerate() {
                for (part, mat) in mlp.parts() {
                    mat.check_scales(&expert_name(i, e, part))?;
                }
            }
            let mut mats: Vec<_> = layer_experts.iter_mut().flat_map(GatedMlp::mats).collect();
            settle(&mut mats, m.compute.kernels, &m.compute.pool)?;
        }
        experts.push(layer_experts);
        let mut mats = vec![&mut q_a, &mut q_b, &mut kv_a, &mut k_b.mat, &mut v_b.mat, &mut o];
        if let Some(x) = &mut indexer {
            mats.extend([&mut x.q_b, &mut x.k, &mut x.head_weights]);
        }
        match &mut ff {
            FeedForward::Dense(mlp) => mats.extend(mlp.mats()),
            FeedForward::Sparse { router, shared, .. } => {
                mats.push(router);
                mats.extend(shared.iter_mut().flat_map(GatedMlp::mats));
            }
        }
        self.settle(mats)?;
        let attn = Attention { q_a, q_a_norm, q_b, kv_a, kv_a_norm, k_b, v_b, o };
        Ok(Layer { attn_norm, attn, indexer, ff_norm, ff })
    }

    /// Where weights go; `None` in the stages that read none.
    fn memory(&self) -> Option<Memory<'a>> {
        match self.stage {
            Stage::Load(memory) => Some(memory),
            Stage::List | Stage::Headers => None,
        }
    }

    /// Moves matrices into memory of their own in the stage that loads, if there is room.
    fn settle(&self, mut mats: Vec<&mut Mat>) -> Result<()> {
        let memory = self.memory().filter(|m| m.dense);
        memory.map_or(Ok(()), |m| settle(&mut mats, m.compute.kernels, &m.compute.pool))
    }

    fn gated(&mut self, prefix: &str, width: usize, class: Class) -> Result<GatedMlp> {
        let d = self.config.d_model;
        Ok(GatedMlp {
            gate: self.mat(&format!("{prefix}gate_proj.weight"), width, d, class)?,
            up: self.mat(&format!("{prefix}up_proj.weight"), width, d, class)?,
            down: self.mat(&format!("{prefix}down_proj.weight"), d, width, class)?,
        })
    }

    /// The MTP layer is optional: a container without any of its tensors is a model without drafts. One that has some
    /// of them must have all.
    fn mtp_layer(&mut self, experts: &mut Vec<Vec<GatedMlp>>) -> Result<Option<Mtp>> {
        let c = self.config;
        let i = c.n_layers;
        let n = |s: &str| format!("model.layers.{i}.{s}");
        if !c.mtp || !self.has(|name| layer_of(name) == Some(i)) {
            return Ok(None);
        }
        self.mtp = true;
        let layer = self.decoder_layer(i, experts)?;
        let e_norm = self.vector(&n("enorm.weight"), c.d_model, Class::Norm)?;
        let h_norm = self.vector(&n("hnorm.weight"), c.d_model, Class::Norm)?;
        let class = Class::MtpProjection;
        let mut eh = self.mat(&n("eh_proj.weight"), c.d_model, 2 * c.d_model, class)?;
        self.settle(vec![&mut eh])?;
        let norm = self.vector(&n("shared_head.norm.weight"), c.d_model, Class::Norm)?;
        Ok(Some(Mtp { e_norm, h_norm, eh, layer, norm }))
    }

    /// Whether there is a tensor with such a name; a list has everything.
    fn has(&self, wanted: impl Fn(&str) -> bool) -> bool {
        matches!(self.stage, Stage::List) || self.shards.names().any(wanted)
    }

    /// The tensor, or its name on the list of missing ones.
    fn find(&mut self, name: &str) -> Option<&'a TensorRef> {
        let t = self.shards.find(name);
        if t.is_none() {
            self.missing.push(name.to_owned());
        }
        t
    }

    fn record(&mut self, name: &str, class: Class, rows: usize, cols: usize, format: Format) {
        if !matches!(self.stage, Stage::Load(_)) {
            let bytes = format.total_bytes(rows, cols);
            self.found.push(Found {
                name: name.to_owned(),
                class,
                layer: self.layer,
                rows,
                cols,
                format,
                bytes,
            });
        }
    }

    fn vector(&mut self, name: &str, len: usize, class: Class) -> Result<Vec<f32>> {
        if matches!(self.stage, Stage::List) {
            self.record(name, class, 1, len, Format::F32);
            return Ok(Vec::new());
        }
        let Some(t) = self.find(name) else { return Ok(Vec::new()) };
        let at = || format!("{}: {name}", self.shards.path(t).display());
        let format = float_format(t.dtype)
            .with_context(|| format!("{}: dtype {:?}, expected BF16, F16 or F32", at(), t.dtype))?;
        ensure!(t.shape == [len], "{}: shape {:?}, expected [{len}] by config.json", at(), t.shape);
        self.record(name, class, 1, len, format);
        if matches!(self.stage, Stage::Headers) {
            return Ok(Vec::new());
        }
        let mat = Mat::new(format, 1, len, self.shards.bytes(t), no_scales());
        let mut out = vec![0.0; len];
        Kernels::best().dequant_row(&mat.view(), 0, &mut out);
        if let Some(k) = out.iter().position(|v| !v.is_finite()) {
            bail!(
                "{}: value {k} is {}, expected a finite number; the file is damaged",
                at(),
                out[k]
            );
        }
        Ok(out)
    }

    fn mat(&mut self, name: &str, rows: usize, cols: usize, class: Class) -> Result<Mat> {
        let mtp = self.layer == Some(self.config.n_layers);
        let quantized =
            self.options.quantize.and_then(|to| quantized_format(to, class, mtp, rows, cols));
        if matches!(self.stage, Stage::List) {
            let format = quantized.unwrap_or_else(|| published_format(class));
            self.record(name, class, rows, cols, format);
            return Ok(no_mat());
        }
        let Some(t) = self.find(name) else { return Ok(no_mat()) };
        let Some(mat) = self.stored(name, t, rows, cols, class)? else { return Ok(no_mat()) };
        self.record(name, class, rows, cols, mat.format());
        if matches!(self.stage, Stage::Headers) {
            return Ok(mat);
        }
        if class != Class::Expert {
            mat.check_scales(name)?;
        }
        match quantized {
            Some(format) if !mat.format().is_integer() => requantize(&mat, format)
                .with_context(|| format!("{}: {name}", mat.path().display())),
            _ => Ok(mat),
        }
    }

    /// Binds the stored form; `None` when its scales are missing (and noted).
    fn stored(
        &mut self,
        name: &str,
        t: &TensorRef,
        rows: usize,
        cols: usize,
        class: Class,
    ) -> Result<Option<Mat>> {
        let shards = self.shards;
        let at = || format!("{}: {name}", shards.path(t).display());
        let codes = shards.bytes(t);
        let check_shape = || -> Result<()> {
            ensure!(
                t.shape == [rows, cols],
                "{}: shape {:?}, expected [{rows}, {cols}] by config.json",
                at(),
                t.shape
            );
            Ok(())
        };
        match t.dtype {
            Dtype::F8_E4M3 => {
                check_shape()?;
                let side = format!("{name}_scale_inv");
                let Some(s) = self.find(&side) else { return Ok(None) };
                let want = [rows.div_ceil(FP8_BLOCK), cols.div_ceil(FP8_BLOCK)];
                ensure!(
                    s.dtype == Dtype::F32 && s.shape == want,
                    "{}: {side}: {:?} {:?}, expected F32 {want:?} (one scale per 128×128 block)",
                    shards.path(s).display(),
                    s.dtype,
                    s.shape
                );
                Ok(Some(Mat::new(Format::Fp8, rows, cols, codes, Scales::new(shards.bytes(s)))))
            }
            Dtype::U8 | Dtype::I8 => {
                let side = format!("{name}.qs");
                let Some(s) = self.find(&side) else { return Ok(None) };
                // Containers store codes flat; who keeps rows must have as many as config says.
                ensure!(
                    t.shape.len() == 1 || t.shape.first() == Some(&rows),
                    "{}: shape {:?}, expected one dimension or {rows} rows by config.json",
                    at(),
                    t.shape
                );
                let stamp = if class == Class::Expert { None } else { shards.stamp(name) };
                let format = quant::infer(rows, cols, t.len(), s.len(), stamp).with_context(at)?;
                ensure!(
                    s.dtype == Dtype::F32,
                    "{}: {side}: dtype {:?}, expected F32",
                    shards.path(s).display(),
                    s.dtype
                );
                Ok(Some(Mat::new(format, rows, cols, codes, Scales::new(shards.bytes(s)))))
            }
            dtype => {
                let format = float_format(dtype)
                    .with_context(|| format!("{}: dtype {dtype:?} cannot hold weights", at()))?;
                check_shape()?;
                Ok(Some(Mat::new(format, rows, cols, codes, no_scales())))
            }
        }
    }
}

/// The matrix packed anew in `format`.
///
/// # Errors
/// A value is not finite.
pub fn requantize(mat: &Mat, format: Format) -> Result<Mat> {
    let (codes, scales) = pack(mat, format)?;
    let codes = Bytes::owned(codes, &mat.path().display().to_string());
    Ok(Mat::new(format, mat.rows(), mat.cols(), codes, Scales::owned(scales)))
}

/// Codes and scales of the matrix in `format`.
///
/// # Errors
/// A value is not finite.
pub fn pack(mat: &Mat, format: Format) -> Result<(Vec<u8>, Vec<f32>)> {
    let (view, kernels) = (mat.view(), Kernels::best());
    quant::pack(format, mat.rows(), mat.cols(), |r, out| kernels.dequant_row(&view, r, out))
}

/// The stored matrix of one tensor of the census.
///
/// # Errors
/// As in binding.
pub fn stored_mat(config: &Config, shards: &Shards, f: &Found) -> Result<Mat> {
    let t = shards.find(&f.name).with_context(|| format!("{}: not in the files", f.name))?;
    // A vector is stored with one dimension and was checked by the census.
    if f.rows == 1 && t.shape == [f.cols] && float_format(t.dtype).is_some() {
        return Ok(Mat::new(f.format, 1, f.cols, shards.bytes(t), no_scales()));
    }
    let options = BindOptions::default();
    let mut binder = Binder::new(config, shards, &options, Stage::Headers);
    let mat = binder.stored(&f.name, t, f.rows, f.cols, f.class)?;
    let mat = mat.with_context(|| format!("{}: its scales are missing", f.name))?;
    mat.check_scales(&f.name)?;
    Ok(mat)
}

/// What containers keep of a matrix that is not quantized: f32 for small ones, the published width for large ones.
fn published_format(class: Class) -> Format {
    match class {
        Class::Norm | Class::Router | Class::HeadWeights => Format::F32,
        _ => Format::Bf16,
    }
}

fn no_mat() -> Mat {
    Mat::new(Format::F32, 0, 0, Bytes::owned(Vec::new(), ""), no_scales())
}

fn no_scales() -> Scales {
    Scales::owned(Vec::new())
}

fn float_format(dtype: Dtype) -> Option<Format> {
    match dtype {
        Dtype::F32 => Some(Format::F32),
        Dtype::F16 => Some(Format::F16),
        Dtype::BF16 => Some(Format::Bf16),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantized_classes() {
        let g64 = Format::Int4 { group: 64 };
        assert_eq!(quantized_format(g64, Class::Expert, false, 128, 256), Some(g64));
        assert_eq!(quantized_format(g64, Class::Expert, true, 128, 256), Some(Format::Int8));
        assert_eq!(quantized_format(g64, Class::Head, false, 128, 256), Some(Format::Int8));
        assert_eq!(quantized_format(g64, Class::Router, false, 16, 256), None);
        assert_eq!(quantized_format(Format::Fp8, Class::Head, false, 128, 256), None);
    }
}
