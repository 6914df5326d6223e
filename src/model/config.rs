//! `config.json` as a checked description of the model: what this engine does not implement is refused here.
#![forbid(unsafe_code)]

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Map, Value};

/// Largest `config.json` that is read.
pub const MAX_CONFIG_BYTES: u64 = 256 << 20;

/// The DSA indexer's shape.
#[derive(Clone, Debug, PartialEq)]
pub struct IndexerConfig {
    /// Heads that score keys.
    pub n_heads: usize,
    /// Width of an index key.
    pub head_dim: usize,
    /// Keys that a query keeps.
    pub top_k: usize,
    /// Per main layer: whether it scores keys itself; otherwise it reuses the nearest earlier scoring layer's choice.
    pub full: Vec<bool>,
}

/// Shapes and constants of one `glm_moe_dsa` model.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// Width of the residual stream.
    pub d_model: usize,
    /// Main decoder layers (the MTP layer is one more).
    pub n_layers: usize,
    /// Attention heads.
    pub n_heads: usize,
    /// Rows of the embedding and of the head.
    pub vocab: usize,
    /// Rank of the query projection.
    pub q_rank: usize,
    /// Rank of the key-value latent.
    pub kv_rank: usize,
    /// Query/key dimensions of a head without rotation.
    pub d_nope: usize,
    /// Rotated dimensions, shared by all heads.
    pub d_rope: usize,
    /// Value dimensions of a head.
    pub d_v: usize,
    /// Per main layer: routed experts (true) or one dense MLP.
    pub sparse: Vec<bool>,
    /// Width of the dense MLP.
    pub d_ff: usize,
    /// Width of one expert.
    pub d_expert: usize,
    /// Routed experts per layer.
    pub n_experts: usize,
    /// Experts chosen per token.
    pub top_k: usize,
    /// Shared experts, fused into one MLP of `n_shared * d_expert`.
    pub n_shared: usize,
    /// Expert groups, and how many of them a token may use.
    pub n_group: usize,
    /// Groups kept per token.
    pub topk_group: usize,
    /// Whether the chosen experts' weights are normalised to sum 1.
    pub norm_topk: bool,
    /// Factor on the routed experts' weights.
    pub routed_scale: f32,
    /// Epsilon of the layer norms.
    pub rms_eps: f32,
    /// Base of the rotary frequencies.
    pub rope_theta: f32,
    /// The sparse attention indexer, if the model has one.
    pub indexer: Option<IndexerConfig>,
    /// Whether an MTP layer is promised.
    pub mtp: bool,
    /// End-of-turn ids.
    pub eos: Vec<u32>,
    /// Longest context the model was made for.
    pub max_positions: usize,
    /// Whether the head is the embedding.
    pub tied: bool,
}

/// Epsilon of `q_a_layernorm`, `kv_a_layernorm` and the indexer's `k_norm`: fixed in the reference implementation.
pub const LATENT_EPS: f32 = 1e-6;

/// Reads fields of one JSON object; `file` names it in messages.
struct Fields<'a> {
    map: &'a Map<String, Value>,
    file: &'a str,
}

impl Fields<'_> {
    fn present(&self, key: &str) -> Option<&Value> {
        self.map.get(key).filter(|v| !v.is_null())
    }

    fn int(&self, key: &str, range: std::ops::RangeInclusive<usize>) -> Result<usize> {
        let v = self.present(key).with_context(|| format!("{}: `{key}` is missing", self.file))?;
        self.check_int(key, v, range)
    }

    fn int_or(
        &self,
        key: &str,
        default: usize,
        range: std::ops::RangeInclusive<usize>,
    ) -> Result<usize> {
        self.present(key).map_or(Ok(default), |v| self.check_int(key, v, range))
    }

    fn check_int(
        &self,
        key: &str,
        v: &Value,
        range: std::ops::RangeInclusive<usize>,
    ) -> Result<usize> {
        let n = v.as_u64().and_then(|n| usize::try_from(n).ok()).filter(|n| range.contains(n));
        n.with_context(|| {
            format!(
                "{}: `{key}` is {v}, expected an integer from {} to {}",
                self.file,
                range.start(),
                range.end()
            )
        })
    }

    fn float(&self, key: &str, default: Option<f32>) -> Result<f32> {
        let Some(v) = self.present(key) else {
            return default.with_context(|| format!("{}: `{key}` is missing", self.file));
        };
        let x = v.as_f64().map(|x| x as f32).filter(|x| x.is_finite() && *x > 0.0);
        x.with_context(|| format!("{}: `{key}` is {v}, expected a positive number", self.file))
    }

    fn bool_or(&self, key: &str, default: bool) -> Result<bool> {
        let Some(v) = self.present(key) else { return Ok(default) };
        v.as_bool()
            .with_context(|| format!("{}: `{key}` is {v}, expected true or false", self.file))
    }

    /// Refuses a field whose value is present and other than `only`.
    fn only(&self, key: &str, only: &Value) -> Result<()> {
        match self.present(key) {
            Some(v) if v != only => {
                bail!("{}: `{key}` is {v}; this engine implements only {only}", self.file)
            }
            _ => Ok(()),
        }
    }
}

impl Config {
    /// Parses and checks `config.json`. `file` names the file in messages.
    ///
    /// # Errors
    /// Not JSON, not a `glm_moe_dsa` model, a missing or absurd field, or a variant that is not implemented.
    pub fn parse(json: &[u8], file: &str) -> Result<Self> {
        let value: Value =
            serde_json::from_slice(json).with_context(|| format!("{file}: not valid JSON"))?;
        let map = value.as_object().with_context(|| format!("{file}: not a JSON object"))?;
        let c = Fields { map, file };

        let model_type = c.present("model_type").and_then(Value::as_str).unwrap_or("absent");
        ensure!(
            model_type == "glm_moe_dsa",
            "{file}: `model_type` is {model_type}, expected glm_moe_dsa: this program runs GLM-5.x models only"
        );
        c.only("hidden_act", &"silu".into())?;
        c.only("scoring_func", &"sigmoid".into())?;
        c.only("topk_method", &"noaux_tc".into())?;
        c.only("attention_bias", &false.into())?;
        c.only("rope_interleave", &true.into())?;
        c.only("indexer_rope_interleave", &true.into())?;
        c.only("moe_layer_freq", &1.into())?;

        let n_layers = c.int("num_hidden_layers", 1..=128)?;
        let (n_experts, n_group) =
            (c.int("n_routed_experts", 1..=4096)?, c.int_or("n_group", 1, 1..=4096)?);
        let topk_group = c.int_or("topk_group", 1, 1..=4096)?;
        let top_k = c.int("num_experts_per_tok", 1..=64)?;
        ensure!(
            n_experts.is_multiple_of(n_group),
            "{file}: `n_group` {n_group} does not divide `n_routed_experts` {n_experts}"
        );
        ensure!(
            topk_group <= n_group,
            "{file}: `topk_group` is {topk_group}, more than `n_group` {n_group}"
        );
        let reachable = if n_group > 1 { topk_group * (n_experts / n_group) } else { n_experts };
        ensure!(
            top_k <= reachable,
            "{file}: `num_experts_per_tok` is {top_k}, but only {reachable} experts can be chosen"
        );

        let rope_theta = rope_theta(&c)?;
        let d_rope = c.int("qk_rope_head_dim", 1..=1 << 16)?;
        ensure!(
            d_rope.is_multiple_of(2),
            "{file}: `qk_rope_head_dim` is {d_rope}, expected an even number"
        );

        if let Some(q) = c.present("quantization_config") {
            check_fp8(q, file)?;
        }
        let n_mtp = c.int_or("num_nextn_predict_layers", 0, 0..=16)?;
        ensure!(
            n_mtp <= 1,
            "{file}: `num_nextn_predict_layers` is {n_mtp}; this engine implements one MTP layer"
        );

        Ok(Self {
            d_model: c.int("hidden_size", 1..=1 << 20)?,
            n_layers,
            n_heads: c.int("num_attention_heads", 1..=1024)?,
            vocab: c.int("vocab_size", 1..=1 << 24)?,
            q_rank: c.int("q_lora_rank", 1..=1 << 20)?,
            kv_rank: c.int("kv_lora_rank", 1..=1 << 20)?,
            d_nope: c.int("qk_nope_head_dim", 1..=1 << 16)?,
            d_rope,
            d_v: c.int("v_head_dim", 1..=1 << 16)?,
            sparse: sparse_layers(&c, n_layers)?,
            d_ff: c.int("intermediate_size", 1..=1 << 24)?,
            d_expert: c.int("moe_intermediate_size", 1..=1 << 20)?,
            n_experts,
            top_k,
            n_shared: c.int_or("n_shared_experts", 0, 0..=64)?,
            n_group,
            topk_group,
            norm_topk: c.bool_or("norm_topk_prob", false)?,
            routed_scale: c.float("routed_scaling_factor", Some(1.0))?,
            rms_eps: c.float("rms_norm_eps", Some(1e-5))?,
            rope_theta,
            indexer: indexer(&c, n_layers, d_rope)?,
            mtp: n_mtp == 1,
            eos: eos_ids(c.map, file)?,
            max_positions: c.int_or("max_position_embeddings", 1 << 20, 1..=1 << 30)?,
            tied: c.bool_or("tie_word_embeddings", false)?,
        })
    }

    /// Width of one attention cache row: latent and rotated key.
    pub fn kv_width(&self) -> usize {
        self.kv_rank + self.d_rope
    }

    /// Whether layer `i` scores keys with its own indexer. The MTP layer (`i == n_layers`) always does.
    pub fn scores_keys(&self, i: usize) -> bool {
        self.indexer.as_ref().is_some_and(|x| x.full.get(i).copied().unwrap_or(true))
    }

    /// Longest context: the config's, or the indexer's `top_k` when it is left out.
    pub fn max_context(&self, no_indexer: bool) -> usize {
        let limit = self.indexer.as_ref().filter(|_| no_indexer).map(|x| x.top_k);
        limit.unwrap_or(usize::MAX).min(self.max_positions)
    }

    /// Whether layer `i` has routed experts. The MTP layer always does.
    pub fn is_sparse(&self, i: usize) -> bool {
        self.sparse.get(i).copied().unwrap_or(true)
    }
}

fn rope_theta(c: &Fields<'_>) -> Result<f32> {
    let file = c.file;
    let hint = "expected an object with `rope_theta`: the base of the rotary frequencies has no safe default";
    let rope = c
        .present("rope_parameters")
        .with_context(|| format!("{file}: `rope_parameters` is missing, {hint}"))?;
    let rope =
        rope.as_object().with_context(|| format!("{file}: `rope_parameters` is {rope}, {hint}"))?;
    let label = format!("{file}: rope_parameters");
    let rope = Fields { map: rope, file: &label };
    rope.only("rope_type", &"default".into())?;
    rope.float("rope_theta", None)
}

fn sparse_layers(c: &Fields<'_>, n: usize) -> Result<Vec<bool>> {
    let file = c.file;
    if let Some(types) = c.present("mlp_layer_types") {
        return layer_kinds(types, "mlp_layer_types", n, file, "sparse", "dense");
    }
    let dense = c.int("first_k_dense_replace", 0..=n)?;
    Ok((0..n).map(|i| i >= dense).collect())
}

/// A list of `n` strings, each `yes` or `no` (or the capital first letter).
fn layer_kinds(
    v: &Value,
    key: &str,
    n: usize,
    file: &str,
    yes: &str,
    no: &str,
) -> Result<Vec<bool>> {
    let kinds: Option<Vec<String>> = match v {
        Value::String(s) => Some(s.chars().map(String::from).collect()),
        Value::Array(a) => a.iter().map(|x| x.as_str().map(String::from)).collect(),
        _ => None,
    };
    let kinds = kinds.with_context(|| format!("{file}: `{key}` is not a list of strings"))?;
    ensure!(
        kinds.len() == n,
        "{file}: `{key}` has {} entries, expected {n} (num_hidden_layers)",
        kinds.len()
    );
    let short = |s: &str| s[..1].to_uppercase();
    kinds
        .iter()
        .enumerate()
        .map(|(i, k)| {
            if *k == yes || *k == short(yes) {
                Ok(true)
            } else if *k == no || *k == short(no) {
                Ok(false)
            } else {
                bail!("{file}: `{key}`[{i}] is `{k}`, expected `{yes}` or `{no}`")
            }
        })
        .collect()
}

fn indexer(c: &Fields<'_>, n: usize, d_rope: usize) -> Result<Option<IndexerConfig>> {
    let file = c.file;
    let top_k = c.int_or("index_topk", 0, 0..=1 << 20)?;
    if top_k == 0 {
        return Ok(None);
    }
    let full = if let Some(types) = c.present("indexer_types") {
        layer_kinds(types, "indexer_types", n, file, "full", "shared")?
    } else if let Some(pattern) = c.present("index_topk_pattern") {
        layer_kinds(pattern, "index_topk_pattern", n, file, "full", "shared")?
    } else {
        let freq = c.int_or("index_topk_freq", 1, 0..=1 << 16)?.max(1);
        let offset = c.int_or("index_skip_topk_offset", 2, 0..=1 << 16)?;
        (0..n).map(|i| (i + 1).saturating_sub(offset).is_multiple_of(freq)).collect()
    };
    ensure!(
        full[0],
        "{file}: layer 0 has no indexer of its own and no earlier layer to share with"
    );
    let head_dim = c.int("index_head_dim", 1..=1 << 16)?;
    ensure!(
        head_dim >= d_rope,
        "{file}: `index_head_dim` is {head_dim}, less than `qk_rope_head_dim` {d_rope}"
    );
    Ok(Some(IndexerConfig { n_heads: c.int("index_n_heads", 1..=1024)?, head_dim, top_k, full }))
}

fn check_fp8(q: &Value, file: &str) -> Result<()> {
    let method = q.get("quant_method").and_then(Value::as_str).unwrap_or("absent");
    ensure!(
        method == "fp8",
        "{file}: quantization_config: `quant_method` is {method}, expected fp8"
    );
    let block = q.get("weight_block_size").cloned().unwrap_or(Value::Null);
    ensure!(
        block == serde_json::json!([128, 128]),
        "{file}: quantization_config: `weight_block_size` is {block}, expected [128, 128]"
    );
    Ok(())
}

/// The ids of `eos_token_id`, a number or a list. Absent or null is no id.
///
/// # Errors
/// Anything else: a model whose end of turn is misread never stops.
pub fn eos_ids(map: &Map<String, Value>, file: &str) -> Result<Vec<u32>> {
    let id = |v: &Value| {
        let id = v.as_u64().and_then(|n| u32::try_from(n).ok());
        id.with_context(|| format!("{file}: `eos_token_id` holds {v}, expected token ids"))
    };
    match map.get("eos_token_id") {
        None | Some(Value::Null) => Ok(Vec::new()),
        Some(Value::Array(a)) => a.iter().map(id).collect(),
        Some(v) => Ok(vec![id(v)?]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tiny() -> Value {
        serde_json::from_str(include_str!("../../tests/fixtures/tiny/config.json")).unwrap()
    }

    fn with(key: &str, v: Value) -> Result<Config> {
        let mut c = tiny();
        c[key] = v;
        Config::parse(c.to_string().as_bytes(), "config.json")
    }

    #[test]
    fn the_fixtures_parse() {
        let c = Config::parse(tiny().to_string().as_bytes(), "config.json").unwrap();
        assert_eq!((c.d_model, c.n_layers, c.top_k), (64, 4, 2));
        assert_eq!(c.indexer.unwrap().full, [true, true, true, false]);
        let groups = include_bytes!("../../tests/fixtures/groups/config.json");
        let c = Config::parse(groups, "config.json").unwrap();
        // No `indexer_types` there: the schedule comes from frequency 2 and offset 2.
        assert_eq!(c.indexer.unwrap().full, [true, true, false, true]);
        assert_eq!((c.n_group, c.topk_group, c.norm_topk), (4, 2, false));
    }

    #[test]
    fn what_is_not_implemented_or_absurd_is_refused_by_name() {
        let cases = [
            ("model_type", "deepseek_v3".into(), "model_type"),
            ("hidden_size", 0.into(), "hidden_size"),
            ("hidden_size", Value::Null, "`hidden_size` is missing"),
            ("num_hidden_layers", 65535.into(), "num_hidden_layers"),
            ("n_group", 3.into(), "does not divide"),
            ("rope_parameters", Value::Null, "rope_parameters"),
            ("rope_parameters", serde_json::json!({"rope_type": "default"}), "rope_theta"),
            (
                "rope_parameters",
                serde_json::json!({"rope_type": "yarn", "rope_theta": 1e4}),
                "rope_type",
            ),
            ("num_experts_per_tok", 9.into(), "num_experts_per_tok"),
            ("indexer_types", serde_json::json!(["full"]), "indexer_types"),
            ("indexer_types", serde_json::json!(["shared", "full", "full", "full"]), "layer 0"),
            (
                "mlp_layer_types",
                serde_json::json!(["dense", "x", "sparse", "sparse"]),
                "mlp_layer_types",
            ),
            ("vocab_size", (-1).into(), "vocab_size"),
            ("qk_rope_head_dim", 7.into(), "even"),
            ("rms_norm_eps", "x".into(), "rms_norm_eps"),
            ("num_nextn_predict_layers", 2.into(), "num_nextn_predict_layers"),
        ];
        for (key, v, word) in cases {
            let e = with(key, v.clone()).unwrap_err().to_string();
            assert!(e.contains(word) && e.contains("config.json"), "{key} = {v}: {e}");
        }
    }
}
