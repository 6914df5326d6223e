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
use super::config::Config;
use crate::experts::{Experts, GatedMlp};
use crate::kernels::{FP8_BLOCK, Format, Kernels};
use crate::store::{Bytes, Dtype, Mat, Scales, Shards, TensorRef, quant};

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
    /// (n_heads * (d_nope + d_v), kv_rank): per head its key rows, then its value rows
    pub kv_b: Mat,
    /// (d_model, n_heads * d_v)
    pub o: Mat,
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
#[derive(Clone, Copy, Debug, Default)]
pub struct BindOptions {
    /// Quantize float matrices to this format while loading.
    pub quantize: Option<Format>,
    /// Ignore an indexer that config promises: attention is dense and the context ends at its `top_k`.
    pub no_indexer: bool,
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
    let options = BindOptions { quantize: Some(wanted), no_indexer: false };
    let none = Shards::from_static(&[])?;
    let mut binder = Binder::new(config, &none, options, Stage::List);
    binder.bind()?;
    Ok(binder.found)
}

/// Looks at headers only: what is there, what is missing.
///
/// # Errors
/// A tensor has the wrong shape, size or type.
pub fn census(config: &Config, shards: &Shards, options: BindOptions) -> Result<Census> {
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

/// Binds all weights. `dir` is only used to explain what is missing.
///
/// # Errors
/// A tensor is missing or has the wrong shape, size or type; a resident scale or vector is not finite.
pub fn bind(
    config: &Config,
    shards: &Shards,
    options: BindOptions,
    dir: Option<&Path>,
) -> Result<Bound> {
    let census = census(config, shards, options)?;
    if !census.missing.is_empty() {
        let at = dir.map_or_else(String::new, |d| format!("{}: ", d.display()));
        bail!("{at}{}", census.explain_missing(config, shards, dir));
    }
    let (weights, experts) = Binder::new(config, shards, options, Stage::Load).bind()?;
    Ok(Bound { weights, experts, warnings: census.warnings(config) })
}

/// What a walk over the model's tensors does.
#[derive(Clone, Copy, PartialEq)]
enum Stage {
    /// Names them; there are no files.
    List,
    /// Looks them up and checks shapes and sizes.
    Headers,
    /// Reads and keeps them.
    Load,
}

struct Binder<'a> {
    config: &'a Config,
    shards: &'a Shards,
    options: BindOptions,
    stage: Stage,
    layer: Option<usize>,
    mtp: bool,
    found: Vec<Found>,
    missing: Vec<String>,
}

impl<'a> Binder<'a> {
    fn new(config: &'a Config, shards: &'a Shards, options: BindOptions, stage: Stage) -> Self {
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

    fn bind(&mut self) -> Result<(Weights, Experts)> {
        let c = self.config;
        let mut experts = Vec::new();
        let embed = self.mat("model.embed_tokens.weight", c.vocab, c.d_model, Class::Embedding)?;
        let layers = (0..c.n_layers)
            .map(|i| self.decoder_layer(i, &mut experts))
            .collect::<Result<Vec<_>>>()?;
        self.layer = None;
        let norm = self.vector("model.norm.weight", c.d_model, Class::Norm)?;
        let head = if c.tied && self.shards.find("lm_head.weight").is_none() {
            embed.clone()
        } else {
            self.mat("lm_head.weight", c.vocab, c.d_model, Class::Head)?
        };
        let mtp = self.mtp_layer(&mut experts)?;
        Ok((Weights { embed, layers, norm, head, mtp }, Experts::new(experts, expert_name)))
    }

    fn decoder_layer(&mut self, i: usize, experts: &mut Vec<Vec<GatedMlp>>) -> Result<Layer> {
        let c = self.config;
        self.layer = Some(i);
        let n = |s: &str| format!("model.layers.{i}.{s}");
        let a = |s: &str| format!("model.layers.{i}.self_attn.{s}");
        let attn_norm = self.vector(&n("input_layernorm.weight"), c.d_model, Class::Norm)?;
        let class = Class::Attention;
        let attn = Attention {
            q_a: self.mat(&a("q_a_proj.weight"), c.q_rank, c.d_model, class)?,
            q_a_norm: self.vector(&a("q_a_layernorm.weight"), c.q_rank, Class::Norm)?,
            q_b: self.mat(
                &a("q_b_proj.weight"),
                c.n_heads * (c.d_nope + c.d_rope),
                c.q_rank,
                class,
            )?,
            kv_a: self.mat(
                &a("kv_a_proj_with_mqa.weight"),
                c.kv_rank + c.d_rope,
                c.d_model,
                class,
            )?,
            kv_a_norm: self.vector(&a("kv_a_layernorm.weight"), c.kv_rank, Class::Norm)?,
            kv_b: self.mat(
                &a("kv_b_proj.weight"),
                c.n_heads * (c.d_nope + c.d_v),
                c.kv_rank,
                class,
            )?,
            o: self.mat(&a("o_proj.weight"), c.d_model, c.n_heads * c.d_v, class)?,
        };
        // Containers in circulation leave the MTP layer's own indexer out; drafts are then made with dense attention.
        let its_own = |name: &str| layer_of(name) == Some(i) && is_indexer(name);
        let left_out = i == c.n_layers && !self.has(its_own);
        let skip = self.options.no_indexer || left_out;
        let indexer = match &c.indexer {
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
        let ff = if c.is_sparse(i) {
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
        experts.push(layer_experts);
        Ok(Layer { attn_norm, attn, indexer, ff_norm, ff })
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
        Ok(Some(Mtp {
            e_norm: self.vector(&n("enorm.weight"), c.d_model, Class::Norm)?,
            h_norm: self.vector(&n("hnorm.weight"), c.d_model, Class::Norm)?,
            eh: self.mat(&n("eh_proj.weight"), c.d_model, 2 * c.d_model, Class::MtpProjection)?,
            layer,
            norm: self.vector(&n("shared_head.norm.weight"), c.d_model, Class::Norm)?,
        }))
    }

    /// Whether there is a tensor with such a name; a list has everything.
    fn has(&self, wanted: impl Fn(&str) -> bool) -> bool {
        self.stage == Stage::List || self.shards.names().any(wanted)
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
        if self.stage != Stage::Load {
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
        if self.stage == Stage::List {
            self.record(name, class, 1, len, Format::F32);
            return Ok(Vec::new());
        }
        let Some(t) = self.find(name) else { return Ok(Vec::new()) };
        let at = || format!("{}: {name}", self.shards.path(t).display());
        let format = float_format(t.dtype)
            .with_context(|| format!("{}: dtype {:?}, expected BF16, F16 or F32", at(), t.dtype))?;
        ensure!(t.shape == [len], "{}: shape {:?}, expected [{len}] by config.json", at(), t.shape);
        self.record(name, class, 1, len, format);
        if self.stage == Stage::Headers {
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
        if self.stage == Stage::List {
            let format = quantized.unwrap_or_else(|| published_format(class));
            self.record(name, class, rows, cols, format);
            return Ok(no_mat());
        }
        let Some(t) = self.find(name) else { return Ok(no_mat()) };
        let Some(mat) = self.stored(name, t, rows, cols, class)? else { return Ok(no_mat()) };
        self.record(name, class, rows, cols, mat.format());
        if self.stage == Stage::Headers {
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
    let mut binder = Binder::new(config, shards, BindOptions::default(), Stage::Headers);
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
