//! Damaged, incomplete and hostile model directories: each is refused with a message that names the
//! file, the tensor and the values, or is loaded for a stated reason.
//!
//! The numbers C#… are those of the public bug reports that a case stands for.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use glm::engine::{Engine, Options, Ram};
use glm::experts::StreamOptions;
use glm::kernels::Format;
use glm::model::config::Config;
use glm::model::weights::{self, BindOptions};
use glm::store::{Shards, quant};
use serde_json::{Map, Value, json};
use tempfile::TempDir;

use crate::fixture::{self, exact};

/// One tensor of a file under construction.
#[derive(Clone)]
pub struct Tensor {
    pub dtype: String,
    pub shape: Vec<usize>,
    pub bytes: Vec<u8>,
}

impl Tensor {
    /// The values of a float tensor.
    fn f32s(&self) -> Vec<f32> {
        match self.dtype.as_str() {
            "BF16" => {
                let value = |b: &[u8; 2]| f32::from_bits(u32::from(u16::from_le_bytes(*b)) << 16);
                self.bytes.as_chunks::<2>().0.iter().map(value).collect()
            }
            "F32" => self.bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
            other => panic!("values of {other}"),
        }
    }

    fn of_f32s(values: &[f32]) -> Self {
        let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        Self { dtype: "F32".into(), shape: vec![values.len()], bytes }
    }

    /// Cuts or zero-fills along one axis of a matrix or vector.
    fn resize(&mut self, axis: usize, len: usize) {
        let size = self.bytes.len() / self.shape.iter().product::<usize>();
        if axis == 0 {
            self.bytes.resize(self.bytes.len() / self.shape[0] * len, 0);
        } else {
            let row = self.shape[1] * size;
            let rows = self.bytes.chunks(row).map(|r| {
                let mut r = r.to_vec();
                r.resize(len * size, 0);
                r
            });
            self.bytes = rows.collect::<Vec<_>>().concat();
        }
        self.shape[axis] = len;
    }
}

/// One safetensors file under construction.
#[derive(Clone, Default)]
pub struct File {
    pub tensors: BTreeMap<String, Tensor>,
    pub metadata: Map<String, Value>,
}

impl File {
    pub fn read(path: &Path) -> Self {
        let (header, data) = split(&std::fs::read(path).unwrap());
        let mut file = Self::default();
        for (name, entry) in header.as_object().unwrap() {
            if name == "__metadata__" {
                file.metadata = entry.as_object().unwrap().clone();
                continue;
            }
            let numbers = |key: &str| -> Vec<usize> {
                let list = entry[key].as_array().unwrap().iter();
                list.map(|n| n.as_u64().unwrap() as usize).collect()
            };
            let (span, dtype) = (numbers("data_offsets"), entry["dtype"].as_str().unwrap());
            let bytes = data[span[0]..span[1]].to_vec();
            let tensor = Tensor { dtype: dtype.into(), shape: numbers("shape"), bytes };
            file.tensors.insert(name.clone(), tensor);
        }
        file
    }

    pub fn to_bytes(&self) -> Vec<u8> {
        let (mut header, mut data) = (json!({ "__metadata__": self.metadata }), Vec::new());
        for (name, t) in &self.tensors {
            let start = data.len();
            data.extend_from_slice(&t.bytes);
            let span = [start, data.len()];
            header[name] = json!({"dtype": t.dtype, "shape": t.shape, "data_offsets": span});
        }
        join(&header.to_string(), &data)
    }
}

/// Header and data of a safetensors file.
fn split(bytes: &[u8]) -> (Value, Vec<u8>) {
    let len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    (serde_json::from_slice(&bytes[8..8 + len]).unwrap(), bytes[8 + len..].to_vec())
}

/// A safetensors file of any header and any data. Blanks align the data to 8 bytes.
fn join(header: &str, data: &[u8]) -> Vec<u8> {
    let len = header.len().next_multiple_of(8);
    let mut out = (len as u64).to_le_bytes().to_vec();
    out.extend_from_slice(header.as_bytes());
    out.resize(8 + len, b' ');
    out.extend_from_slice(data);
    out
}

/// A model directory under construction: a fixture to edit, write and open.
pub struct Draft {
    dir: TempDir,
    pub config: Value,
    pub files: BTreeMap<String, File>,
}

impl Draft {
    pub fn of(preset: &str) -> Self {
        let (source, dir) = (fixture::dir(preset), memory_dir());
        for name in ["tokenizer.json", "tokenizer_config.json", "generation_config.json"] {
            std::fs::copy(source.join(name), dir.path().join(name)).unwrap();
        }
        let config = std::fs::read(source.join("config.json")).unwrap();
        let config = serde_json::from_slice(&config).unwrap();
        let mut files = BTreeMap::new();
        for entry in std::fs::read_dir(&source).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_str().unwrap().to_owned();
            if name.ends_with(".safetensors") && !name.starts_with("oracle") {
                files.insert(name, File::read(&path));
            }
        }
        Self { dir, config, files }
    }

    /// `tiny` as a container of integer formats: routed experts in `expert`, other matrices int8,
    /// router and vectors as they are.
    pub fn container(expert: Format) -> Self {
        let mut draft = Self::of("tiny");
        let names: Vec<String> = draft.file().tensors.keys().cloned().collect();
        for name in names {
            let plain = draft.tensor(&name).shape.len() != 2 || name.ends_with("mlp.gate.weight");
            let routed = name.contains(".mlp.experts.");
            if !plain {
                draft.quantize(&name, if routed { expert } else { Format::Int8 });
            }
        }
        let file = draft.files.remove(MAIN).unwrap();
        draft.files.insert(OUT.into(), file);
        draft
    }

    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    /// The only file, or the first.
    fn file(&mut self) -> &mut File {
        self.files.values_mut().next().unwrap()
    }

    fn tensor(&mut self, name: &str) -> &mut Tensor {
        let file = self.files.values_mut().find(|f| f.tensors.contains_key(name));
        file.unwrap_or_else(|| panic!("no {name}")).tensors.get_mut(name).unwrap()
    }

    /// Removes the tensors whose name contains `part`.
    fn remove(&mut self, part: &str) -> BTreeMap<String, Tensor> {
        let mut removed = BTreeMap::new();
        for file in self.files.values_mut() {
            removed.extend(file.tensors.extract_if(.., |name, _| name.contains(part)));
        }
        assert!(!removed.is_empty(), "no {part}");
        removed
    }

    /// Replaces a float matrix by codes and scales, as converters store them.
    fn quantize(&mut self, name: &str, format: Format) {
        let t = self.tensor(name).clone();
        let (rows, cols, values) = (t.shape[0], t.shape[1], t.f32s());
        let format = quant::writable(format, rows, cols);
        let row = |r: usize, out: &mut [f32]| out.copy_from_slice(&values[r * cols..][..cols]);
        let (codes, scales) = quant::pack(format, rows, cols, row).unwrap();
        self.pack(name, codes, &scales);
    }

    /// Stores `name` as U8 codes with f32 scales.
    fn pack(&mut self, name: &str, bytes: Vec<u8>, scales: &[f32]) {
        *self.tensor(name) = Tensor { dtype: "U8".into(), shape: vec![bytes.len()], bytes };
        let file = self.files.values_mut().find(|f| f.tensors.contains_key(name)).unwrap();
        file.tensors.insert(format!("{name}.qs"), Tensor::of_f32s(scales));
    }

    /// Splits `tiny` into `out-00000`…, a layer each; what belongs to no layer goes to the last.
    fn split_by_layer(&mut self) {
        let file = self.files.remove(MAIN).unwrap();
        for (name, tensor) in file.tensors {
            let layer = name.strip_prefix("model.layers.").and_then(|n| n.split('.').next());
            let shard = format!("out-0000{}.safetensors", layer.unwrap_or("5"));
            self.files.entry(shard).or_default().tensors.insert(name, tensor);
        }
    }

    pub fn write(&self) {
        std::fs::write(self.path().join("config.json"), self.config.to_string()).unwrap();
        for (name, file) in &self.files {
            std::fs::write(self.path().join(name), file.to_bytes()).unwrap();
        }
    }

    fn open(&self, options: &Options) -> anyhow::Result<Engine> {
        self.write();
        Engine::open(self.path(), options)
    }

    /// Opens what is meant to load.
    fn loads(&self) -> Engine {
        self.open(&exact()).unwrap_or_else(|e| panic!("{e:#}"))
    }

    /// Writes, then [`refused`].
    fn refused(&self, words: &[&str]) -> String {
        self.write();
        refused(self.path(), words)
    }

    /// Writes the directory, changes one file as bytes, then [`refused`].
    fn refused_after(&self, file: &str, change: impl FnOnce(Vec<u8>) -> Vec<u8>, words: &[&str]) {
        self.write();
        let path = self.path().join(file);
        let bytes = change(std::fs::read(&path).unwrap());
        std::fs::write(&path, bytes).unwrap();
        refused(self.path(), &[&[path.to_str().unwrap()], words].concat());
    }

    /// Writes the directory, changes one header entry, then [`refused`].
    fn refused_entry(&self, name: &str, key: &str, value: Value, words: &[&str]) {
        let change = |bytes: Vec<u8>| {
            let (mut header, data) = split(&bytes);
            header[name][key] = value;
            join(&header.to_string(), &data)
        };
        self.refused_after(MAIN, change, &[&[name], words].concat());
    }

    /// Format of a tensor as the engine reads it.
    fn format(&self, name: &str) -> Format {
        self.write();
        let config = std::fs::read(self.path().join("config.json")).unwrap();
        let config = Config::parse(&config, "config.json").unwrap();
        let shards = Shards::open(self.path()).unwrap();
        let census = weights::census(&config, &shards, &BindOptions::default()).unwrap();
        census.found.iter().find(|f| f.name == name).unwrap().format
    }

    /// Stamps formats in the metadata of the first file.
    fn stamp(&mut self, stamps: &Value) {
        self.file().metadata.insert("colibri.fmt".into(), stamps.to_string().into());
    }
}

/// The model cannot be opened and the message has all `words`.
fn refused(dir: &Path, words: &[&str]) -> String {
    let error = match Engine::open(dir, &exact()) {
        Ok(_) => panic!("opened, expected a message with {words:?}"),
        Err(e) => format!("{e:#}"),
    };
    for word in words {
        assert!(error.contains(word), "no {word:?} in: {error}");
    }
    error
}

/// A temporary directory, in memory where the system has one.
fn memory_dir() -> TempDir {
    let shm = PathBuf::from("/dev/shm");
    if shm.is_dir() { TempDir::new_in(shm) } else { TempDir::new() }.unwrap()
}

/// Logits after every token.
fn logits(engine: &Engine, ids: &[u32]) -> anyhow::Result<Vec<u32>> {
    let mut all = Vec::new();
    let each = |_: usize, l: &[f32]| {
        all.extend(l.iter().map(|v| v.to_bits()));
        Ok(())
    };
    engine.session().score(engine, ids, 0, each, None)?;
    Ok(all)
}

const MAIN: &str = "model.safetensors";
const OUT: &str = "out-00000.safetensors";
const EMBED: &str = "model.embed_tokens.weight";
const Q_A: &str = "model.layers.1.self_attn.q_a_proj.weight";
const HEAD_WEIGHTS: &str = "model.layers.1.self_attn.indexer.weights_proj.weight";

#[test]
fn an_edited_copy_without_edits_is_the_fixture() {
    let ids = [1, 2, 3, 4, 5];
    for preset in ["tiny", "odd", "fp8"] {
        let want = logits(&fixture::open(preset), &ids).unwrap();
        assert_eq!(logits(&Draft::of(preset).loads(), &ids).unwrap(), want, "{preset}");
    }
    let mut split = Draft::of("tiny");
    split.split_by_layer();
    assert_eq!(split.files.len(), 6);
    let want = logits(&fixture::open("tiny"), &ids).unwrap();
    assert_eq!(logits(&split.loads(), &ids).unwrap(), want, "one file per layer");
    Draft::container(Format::Int4 { group: 32 }).loads();
}

// ------------------------------------------------------------------------------- absent files

/// C#1317: one main file is absent, and the MTP file makes the count look right.
#[test]
fn an_absent_first_file_is_named_by_its_number() {
    let mut draft = Draft::of("tiny");
    draft.split_by_layer();
    let mtp = draft.files.remove("out-00004.safetensors").unwrap();
    draft.files.insert("out-mtp-00000.safetensors".into(), mtp);
    let last = draft.files.remove("out-00005.safetensors").unwrap();
    draft.files.insert("out-00004.safetensors".into(), last);
    draft.loads();
    draft.files.remove("out-00000.safetensors");
    std::fs::remove_file(draft.path().join("out-00000.safetensors")).unwrap();
    let dir = draft.path().display().to_string();
    let gap = "of 5 files out-*.safetensors the numbers 0 are absent";
    draft.refused(&[&dir, gap, "layers 0 have no tensor at all (config.json says 4 layers)"]);
}

/// C#586: the download stopped before the last files.
#[test]
fn absent_last_files_are_explained() {
    let mut draft = Draft::of("tiny");
    draft.split_by_layer();
    draft.files.remove("out-00005.safetensors");
    draft.refused(&["model.embed_tokens.weight", "the last files may be absent"]);

    // A name that says how many there are, and an index that says which.
    let mut draft = Draft::of("odd");
    draft.files.remove("model-00003-of-00003.safetensors");
    let gap = "of 3 files model-*.safetensors the numbers 3 are absent";
    draft.refused(&["missing 75 of 231 tensors", gap]);
    let index = "model.safetensors.index.json";
    std::fs::copy(fixture::dir("odd").join(index), draft.path().join(index)).unwrap();
    draft.refused(&[index, "they are in model-00003-of-00003.safetensors, which is absent"]);

    let empty = Draft::of("tiny");
    std::fs::write(empty.path().join("config.json"), empty.config.to_string()).unwrap();
    refused(empty.path(), &[empty.path().to_str().unwrap(), "no *.safetensors file"]);
}

/// C#1476: every file is intact, but layers are missing.
#[test]
fn absent_layers_are_counted() {
    let mut draft = Draft::of("odd");
    for layer in [2, 3, 5] {
        draft.remove(&format!("layers.{layer}."));
    }
    draft.refused(&["layers 2–3, 5 have no tensor at all (config.json says 6 layers)"]);
    let mut draft = Draft::of("tiny");
    draft.config["num_hidden_layers"] = 3.into();
    draft.config["mlp_layer_types"] = json!(["dense", "sparse", "sparse"]);
    draft.config["indexer_types"] = json!(["full", "full", "full"]);
    // Layer 3 is then the MTP layer, which lacks its projection and norms.
    draft.refused(&["missing 4 of 148", "model.layers.3.enorm.weight", "MTP layer"]);
}

/// One tensor, one scale, one routed expert.
#[test]
fn one_missing_tensor_is_named() {
    for name in [Q_A, "model.norm.weight", "model.layers.3.mlp.experts.7.up_proj.weight"] {
        let mut draft = Draft::of("tiny");
        draft.remove(name);
        draft.refused(&["missing 1 of 191 tensors", name, draft.path().to_str().unwrap()]);
    }
    for name in [Q_A, "model.layers.3.mlp.experts.7.up_proj.weight"] {
        let mut draft = Draft::container(Format::Int8);
        draft.remove(&format!("{name}.qs"));
        draft.refused(&["missing 1 of", &format!("{name}.qs")]);
    }
    let mut draft = Draft::of("fp8");
    draft.remove("model.layers.0.mlp.gate_proj.weight_scale_inv");
    draft.refused(&["missing 1 of", "model.layers.0.mlp.gate_proj.weight_scale_inv"]);
}

// ---------------------------------------------------------------------------------- file sizes

/// C#236: a file that ends early, at any place.
#[test]
fn a_truncated_file_says_by_how_much() {
    let draft = Draft::of("tiny");
    let whole = draft.files[MAIN].to_bytes();
    let (n, header) = (whole.len(), u64::from_le_bytes(whole[..8].try_into().unwrap()));
    let data = 8 + header as usize;
    let cases: [(usize, &[&str]); 6] = [
        (n - 1, &["the file is truncated by 1 bytes", "model.norm.weight"]),
        (data + 10, &["data ends at byte", &format!("the file ends at byte {}", data + 10)]),
        (data, &["data ends at byte"]),
        (
            data - 1,
            &[&format!("header of {header} bytes ends after the file ({} bytes)", data - 1)],
        ),
        (7, &["7 bytes, too short for a safetensors header"]),
        (0, &["0 bytes, too short for a safetensors header"]),
    ];
    for (len, words) in cases {
        draft.refused_after(MAIN, |b| b[..len].to_vec(), words);
    }
    // Bytes that no tensor claims do no harm.
    draft.write();
    let file = std::fs::OpenOptions::new().write(true).open(draft.path().join(MAIN)).unwrap();
    file.set_len(n as u64 + 4096).unwrap();
    Engine::open(draft.path(), &exact()).unwrap();
}

/// C#413: a tensor whose size fits no layout is not guessed at.
#[test]
fn wrong_sizes_name_what_is_expected() {
    let mut draft = Draft::container(Format::Int8);
    let t = draft.tensor(Q_A);
    t.bytes.pop();
    t.shape[0] -= 1;
    let out = draft.path().join(OUT).display().to_string();
    let want = "2047 bytes of codes fit no layout of 32×64: expected 2048 (int8, fp8), 1024 (int4), \
                512 (int2) or 768 (int3)";
    draft.refused(&[&out, Q_A, want]);

    // Codes that are stored in two dimensions have the rows of the matrix.
    let mut draft = Draft::container(Format::Int8);
    draft.tensor(Q_A).shape = vec![32, 64];
    draft.loads();
    draft.tensor(Q_A).shape = vec![64, 32];
    draft.refused(&[OUT, Q_A, "shape [64, 32], expected one dimension or 32 rows"]);

    // The same for a routed expert, and for scales.
    let mut draft = Draft::container(Format::Int4 { group: 32 });
    let expert = "model.layers.2.mlp.experts.3.down_proj.weight";
    let t = draft.tensor(expert);
    t.bytes.push(0);
    t.shape[0] += 1;
    draft.refused(&[OUT, expert, "1025 bytes of codes fit no layout of 64×32"]);
    let mut draft = Draft::container(Format::Int8);
    *draft.tensor(&format!("{Q_A}.qs")) = Tensor::of_f32s(&[1.0; 31]);
    let want = "124 bytes of scales for a 32×64 matrix of bytes, expected 128 (int8-row) or 4";
    draft.refused(&[OUT, Q_A, want]);
    let mut draft = Draft::container(Format::Int8);
    draft.tensor(&format!("{Q_A}.qs")).dtype = "I64".into();
    draft.tensor(&format!("{Q_A}.qs")).shape = vec![16];
    draft.refused(&[OUT, &format!("{Q_A}.qs"), "dtype I64, expected F32"]);

    // Float tensors keep their shape.
    let mut draft = Draft::of("tiny");
    draft.tensor(Q_A).resize(0, 31);
    draft.refused(&[MAIN, Q_A, "shape [31, 64], expected [32, 64] by config.json"]);
    let mut draft = Draft::of("tiny");
    draft.tensor(Q_A).shape = vec![64, 32];
    draft.refused(&[MAIN, Q_A, "shape [64, 32], expected [32, 64] by config.json"]);
    let mut draft = Draft::of("tiny");
    draft.tensor("model.norm.weight").resize(0, 65);
    draft.refused(&[MAIN, "model.norm.weight", "shape [65], expected [64] by config.json"]);
    let mut draft = Draft::of("fp8");
    let side = "model.layers.0.mlp.gate_proj.weight_scale_inv";
    draft.tensor(side).shape = vec![2, 3];
    draft.refused(&["of-00002.safetensors", side, "[2, 3], expected F32 [3, 2]"]);
    // A type that cannot be a weight.
    let mut draft = Draft::of("tiny");
    draft.tensor(Q_A).dtype = "I64".into();
    draft.tensor(Q_A).shape = vec![32, 16];
    draft.refused(&[MAIN, Q_A, "dtype I64 cannot hold weights"]);
    let mut draft = Draft::of("tiny");
    draft.tensor("model.norm.weight").dtype = "U8".into();
    draft.tensor("model.norm.weight").shape = vec![128];
    draft.refused(&[MAIN, "model.norm.weight", "dtype U8, expected BF16, F16 or F32"]);
}

// --------------------------------------------------------------------- formats that byte counts
// ---------------------------------------------------------------------- alone cannot tell apart

/// `tiny` with one indexer head, so that its head weights are one row of 64.
fn one_row() -> Draft {
    let mut draft = Draft::of("tiny");
    draft.config["index_n_heads"] = 1.into();
    let names: Vec<String> = draft.file().tensors.keys().cloned().collect();
    for name in names {
        if name.ends_with("indexer.wq_b.weight") {
            draft.tensor(&name).resize(0, 16);
        } else if name.ends_with("indexer.weights_proj.weight") {
            draft.tensor(&name).resize(0, 1);
        }
    }
    draft
}

/// The same model, 98 wide.
fn one_row_of_98() -> Draft {
    let mut draft = one_row();
    draft.config["hidden_size"] = 98.into();
    for (name, t) in &mut draft.file().tensors {
        let ends = |list: &[&str]| list.iter().any(|s| name.ends_with(s));
        let norms = ["put_layernorm.weight", "attention_layernorm.weight", "norm.weight"];
        let latent = ["a_layernorm.weight", "k_norm.weight", "q_b_proj.weight", "wq_b.weight"];
        if ends(&latent) || ends(&["k_norm.bias", "kv_b_proj.weight", "correction_bias"]) {
            continue;
        }
        if ends(&norms) || ends(&["o_proj.weight", "down_proj.weight"]) {
            t.resize(0, 98);
        } else if ends(&["eh_proj.weight"]) {
            t.resize(0, 98);
            t.resize(1, 196);
        } else {
            t.resize(1, 98);
        }
    }
    draft
}

/// C#528: one row of at most 128 is both int8 and fp8 by size. Unstamped it is int8.
#[test]
fn int8_and_fp8_of_one_size_are_told_apart_by_the_stamp() {
    let mut draft = one_row();
    draft.quantize(HEAD_WEIGHTS, Format::Int8);
    assert_eq!(draft.format(HEAD_WEIGHTS), Format::Int8);
    let unstamped = logits(&draft.loads(), &[1, 2, 3]).unwrap();
    draft.stamp(&json!({HEAD_WEIGHTS: "int8-row"}));
    assert_eq!(draft.format(HEAD_WEIGHTS), Format::Int8);
    assert_eq!(logits(&draft.loads(), &[1, 2, 3]).unwrap(), unstamped);
    draft.stamp(&json!({HEAD_WEIGHTS: "fp8-e4m3-b128"}));
    assert_eq!(draft.format(HEAD_WEIGHTS), Format::Fp8);
    draft.stamp(&json!({HEAD_WEIGHTS: "int4-row"}));
    draft.refused(&[
        MAIN,
        HEAD_WEIGHTS,
        "stamped `int4-row`, but the byte counts fit only int8-row",
    ]);
}

/// C#465, C#529: at 98 columns a third format fits, and only a stamp may decide.
#[test]
fn one_row_of_98_needs_a_stamp() {
    let mut draft = one_row_of_98();
    draft.loads();
    draft.quantize(HEAD_WEIGHTS, Format::Int8);
    // That is not what `writable` would choose, so it is packed by hand.
    draft.pack(HEAD_WEIGHTS, vec![1; 98], &[0.5]);
    draft.refused(&[
        MAIN,
        HEAD_WEIGHTS,
        "98 bytes of codes and one scale for 1×98",
        "format stamp",
    ]);
    for (stamp, format) in [("int8-row", Format::Int8), ("fp8-e4m3-b128", Format::Fp8)] {
        draft.stamp(&json!({HEAD_WEIGHTS: stamp}));
        assert_eq!(draft.format(HEAD_WEIGHTS), format);
        draft.loads();
    }
    draft.stamp(&json!({HEAD_WEIGHTS: "e8-iq3-lattice"}));
    draft.refused(&[MAIN, HEAD_WEIGHTS, "e8-iq3-lattice is not supported"]);
}

/// C#529: two files stamp one tensor differently.
#[test]
fn stamps_that_disagree_name_both_files() {
    let mut draft = Draft::container(Format::Int8);
    draft.stamp(&json!({Q_A: "int8-row"}));
    let mut other = File::default();
    other.metadata.insert("colibri.fmt".into(), json!({Q_A: "int4-row"}).to_string().into());
    draft.files.insert("out-00001.safetensors".into(), other.clone());
    let (a, b) = (draft.path().join(OUT), draft.path().join("out-00001.safetensors"));
    let (a, b) = (a.to_str().unwrap(), b.to_str().unwrap());
    draft.refused(&[a, b, Q_A, "`int8-row`", "`int4-row`"]);
    // Equal stamps are one stamp.
    other.metadata.insert("colibri.fmt".into(), json!({Q_A: "int8-row"}).to_string().into());
    draft.files.insert("out-00001.safetensors".into(), other);
    draft.loads();
}

/// A stamp against the bytes, unknown, unsupported, or not a stamp at all.
#[test]
fn bad_stamps_are_refused() {
    let mut draft = Draft::container(Format::Int8);
    draft.stamp(&json!({Q_A: "int4-row"}));
    draft.refused(&[OUT, Q_A, "stamped `int4-row`, but 2048 bytes", "are int8-row"]);
    draft.stamp(&json!({Q_A: "int5"}));
    draft.refused(&[OUT, Q_A, "stamped with the unknown format `int5`, expected one of"]);
    draft.stamp(&json!({Q_A: "int4-rans256-g0"}));
    draft.refused(&[OUT, Q_A, "format int4-rans256-g0 (entropy-coded) is not supported"]);
    draft.stamp(&json!({Q_A: "mxfp4"}));
    draft.refused(&[OUT, Q_A, "format mxfp4 is not supported"]);
    draft.stamp(&json!({Q_A: 1}));
    draft.refused(&[OUT, Q_A, "`colibri.fmt`", "is 1, expected a string"]);
    draft.stamp(&json!([Q_A]));
    draft.refused(&[OUT, "`colibri.fmt` does not hold a JSON object"]);
    draft.file().metadata.insert("colibri.fmt".into(), "{".into());
    draft.refused(&[OUT, "`colibri.fmt` does not hold a JSON object", "EOF while parsing"]);
    let twice = format!("{{\"{Q_A}\": \"int8-row\", \"{Q_A}\": \"int4-row\"}}");
    draft.file().metadata.insert("colibri.fmt".into(), twice.into());
    draft.refused(&[OUT, "`colibri.fmt`", Q_A, "listed twice"]);
    draft.file().metadata.insert("colibri.fmt".into(), json!({Q_A: "int8-row"}));
    draft.refused(&[OUT, "`colibri.fmt` is not a string"]);
    let many: Map<String, Value> = (0..4097).map(|i| (format!("t{i}"), "f32".into())).collect();
    draft.stamp(&Value::Object(many));
    draft.refused(&[OUT, "has 4097 entries, at most 4096"]);
    // Stamps of tensors that are not there, and of routed experts, have no effect.
    let expert = "model.layers.1.mlp.experts.0.up_proj.weight";
    draft.stamp(&json!({"no.such.tensor": "int4-row", expert: "int4-row"}));
    draft.loads();
}

/// The lattice and the entropy-coded format are recognised and named.
#[test]
fn formats_without_a_decoder_are_refused_by_name() {
    let expert = "model.layers.1.mlp.experts.0.up_proj.weight";
    for name in [Q_A, expert] {
        let mut draft = Draft::container(Format::Int8);
        draft.pack(name, vec![0; 32 * 98], &[6.0]);
        draft.refused(&[OUT, name, "format e8-iq3-lattice is not supported"]);
    }
    let mut draft = Draft::container(Format::Int8);
    draft.pack(Q_A, vec![0; 777], &[1.0; 32]);
    draft.stamp(&json!({Q_A: "int4-rans256-g0"}));
    draft.refused(&[OUT, Q_A, "int4-rans256-g0", "not supported"]);
    // fp8 with one-byte scales.
    let mut draft = Draft::container(Format::Int8);
    let dense = "model.layers.0.mlp.gate_proj.weight";
    draft.tensor(&format!("{dense}.qs")).bytes = vec![0; 1];
    draft.tensor(&format!("{dense}.qs")).dtype = "U8".into();
    draft.tensor(&format!("{dense}.qs")).shape = vec![1];
    draft.refused(&[OUT, dense, "UE8M0"]);
}

// ----------------------------------------------------------------------------- twice and across

/// C#1106: a tensor in two files, or twice in one.
#[test]
fn duplicate_tensors_are_refused() {
    let mut draft = Draft::of("tiny");
    let mut copy = draft.tensor(Q_A).clone();
    copy.bytes.fill(0);
    draft.files.entry("z.safetensors".into()).or_default().tensors.insert(Q_A.into(), copy);
    let (a, b) = (draft.path().join(MAIN), draft.path().join("z.safetensors"));
    draft.refused(&[a.to_str().unwrap(), b.to_str().unwrap(), Q_A, "this tensor is also in"]);
    let twice = |bytes: Vec<u8>| {
        let (header, data) = split(&bytes);
        let entry = json!({Q_A: header[Q_A]}).to_string();
        let text = format!("{},{}", entry.strip_suffix('}').unwrap(), &header.to_string()[1..]);
        join(&text, &data)
    };
    Draft::of("tiny").refused_after(MAIN, twice, &[Q_A, "listed twice"]);
}

/// Ranges that share bytes, lie outside the file, or run backwards.
#[test]
fn bad_ranges_are_refused() {
    let draft = Draft::of("tiny");
    let (header, data) = split(&draft.files[MAIN].to_bytes());
    let of = |name: &str| header[name]["data_offsets"].clone();
    let q_a = of(Q_A);
    let (a, b) = (q_a[0].as_u64().unwrap(), q_a[1].as_u64().unwrap());
    draft.refused_entry(
        "lm_head.weight",
        "data_offsets",
        of(EMBED),
        &[EMBED, "overlap", "40960..81920"],
    );
    let shifted = json!([a - 1, b - 1]);
    draft.refused_entry(
        Q_A,
        "data_offsets",
        shifted,
        &["overlap", &format!("{}..{}", a - 1, b - 1)],
    );
    let reversed = format!("data_offsets [{b}, {a}] are reversed");
    draft.refused_entry(Q_A, "data_offsets", json!([b, a]), &[&reversed]);
    let end = data.len() as u64;
    let beyond = json!([end, end + b - a]);
    draft.refused_entry(Q_A, "data_offsets", beyond, &["truncated by 4096 bytes"]);
    for huge in [u64::MAX, 1 << 63, u64::MAX - 4096] {
        draft.refused_entry(Q_A, "data_offsets", json!([0, huge]), &["data ends at byte"]);
        draft.refused_entry(Q_A, "data_offsets", json!([huge, huge]), &["data ends at byte"]);
    }
    for malformed in [json!([a]), json!([a, b, b]), json!([-1, b]), json!("x"), json!(null)] {
        draft.refused_entry(Q_A, "data_offsets", malformed, &["header entry is malformed"]);
    }
    let short = json!([a, b - 1]);
    draft.refused_entry(
        Q_A,
        "data_offsets",
        short,
        &["needs 4096 bytes, but data_offsets span 4095"],
    );
}

// -------------------------------------------------------------------------------- hostile input

/// C#25 and its advisory: lengths and shapes made to overflow.
#[test]
fn absurd_headers_are_refused_without_allocating() {
    let draft = Draft::of("tiny");
    for len in [1 << 63, u64::MAX, u64::MAX - 7, 1 << 40, (100 << 20) + 1] {
        let set = |mut b: Vec<u8>| {
            b[..8].copy_from_slice(&u64::to_le_bytes(len));
            b
        };
        draft.refused_after(MAIN, set, &[&format!("header length {len} exceeds the limit")]);
    }
    let empty = |mut b: Vec<u8>| {
        b[..8].fill(0);
        b
    };
    draft.refused_after(MAIN, empty, &["header is not valid JSON"]);
    let shape = json!([65535, 65535, 65535, 65535, 65535]);
    draft.refused_entry(Q_A, "shape", shape, &["[65535, 65535, 65535, 65535, 65535] overflows"]);
    draft.refused_entry(Q_A, "shape", json!([1u64 << 63, 1]), &["overflows"]);
    draft.refused_entry(Q_A, "shape", json!([1u64 << 40, 1]), &["needs 2199023255552 bytes"]);
    draft.refused_entry(Q_A, "shape", json!([-1, 1]), &["header entry is malformed"]);
    draft.refused_entry(Q_A, "shape", json!([1.5]), &["header entry is malformed"]);
    draft.refused_entry(Q_A, "shape", Value::Null, &["header entry is malformed"]);
    draft.refused_entry(Q_A, "dtype", json!("F64"), &["dtype F64 is not supported"]);
    draft.refused_entry(
        Q_A,
        "dtype",
        json!("F32"),
        &["needs 8192 bytes, but data_offsets span 4096"],
    );
    draft.refused_entry(Q_A, "dtype", json!("bf17"), &["header entry is malformed"]);
    let texts = ["[]", "null", "1", "\"x\"", "{", "{\"a\":}", "{\"a\":1}", "{\"a\":{}}"];
    for text in texts.map(String::from).into_iter().chain(["[".repeat(100_000)]) {
        draft.refused_after(MAIN, |b| join(&text, &split(&b).1), &[]);
    }
    let deep = format!("{{\"a\":{}", "[".repeat(100_000));
    draft.refused_after(MAIN, |b| join(&deep, &split(&b).1), &["header is not valid JSON"]);
    draft.refused_after(
        MAIN,
        |b| [&b[..8], &[0xff; 64][..], &b[72..]].concat(),
        &["not valid JSON"],
    );
}

/// C#25: each number of config.json, absurd. Also C#1368: another family is refused up front.
#[test]
fn absurd_configs_are_refused_by_field() {
    let draft = Draft::of("tiny");
    let refuse = |key: &str, value: Value, words: &[&str]| {
        let (dir, config) = (memory_dir(), draft.config.clone());
        let mut copy = Draft { dir, config, files: BTreeMap::new() };
        copy.config[key] = value;
        for name in ["tokenizer.json", MAIN] {
            let source = fixture::dir("tiny").join(name);
            std::fs::copy(source, copy.path().join(name)).unwrap();
        }
        let path = copy.path().join("config.json").display().to_string();
        copy.refused(&[&[path.as_str(), key], words].concat());
    };
    let fields = [
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "vocab_size",
        "q_lora_rank",
        "kv_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
        "intermediate_size",
        "moe_intermediate_size",
        "n_routed_experts",
        "num_experts_per_tok",
        "index_head_dim",
        "index_n_heads",
        "n_shared_experts",
        "n_group",
        "topk_group",
        "max_position_embeddings",
        "index_topk",
    ];
    for key in fields {
        for value in [json!(u64::MAX), json!(1u64 << 40), json!(-1), json!("64"), json!(1.5)] {
            refuse(key, value.clone(), &[&value.to_string(), "expected an integer from"]);
        }
    }
    for key in &fields[..15] {
        refuse(key, Value::Null, &["is missing"]);
        refuse(key, json!(0), &["expected an integer from 1"]);
    }
    refuse("n_group", json!(3), &["`n_group` 3 does not divide `n_routed_experts` 8"]);
    refuse("rope_parameters", Value::Null, &["is missing", "rope_theta"]);
    refuse("rope_parameters", json!({"rope_type": "default"}), &["`rope_theta` is missing"]);
    refuse("rope_parameters", json!({"rope_theta": 0}), &["`rope_theta` is 0"]);
    refuse("rms_norm_eps", json!(1e-300), &["expected a positive number"]);
    let other = ["deepseek_v3", "qwen3_moe", "glm4_moe", ""];
    for family in other {
        refuse("model_type", family.into(), &[family, "expected glm_moe_dsa"]);
    }
    refuse("model_type", Value::Null, &["absent", "expected glm_moe_dsa"]);
    let bits = json!({"quant_method": "gptq", "bits": 4});
    refuse("quantization_config", bits, &["gptq", "expected fp8"]);
}

/// Sizes within the limits of a field that the files do not have: refused by shape or by count.
#[test]
fn a_config_larger_than_the_files_is_refused() {
    let cases = [
        ("n_routed_experts", 4096, "model.layers.1.mlp.gate.weight"),
        ("vocab_size", 1 << 24, "shape [320, 64], expected [16777216, 64]"),
        ("hidden_size", 1 << 20, "shape [320, 64], expected [320, 1048576]"),
        ("v_head_dim", 1 << 16, "kv_b_proj"),
        ("num_attention_heads", 1024, "q_b_proj"),
        ("index_n_heads", 1024, "wq_b"),
        ("moe_intermediate_size", 1 << 20, "shared_experts.gate_proj.weight: shape [32, 64]"),
        ("intermediate_size", 1 << 24, "model.layers.0.mlp.gate_proj.weight: shape [128, 64]"),
    ];
    for (key, value, word) in cases {
        let mut draft = Draft::of("tiny");
        draft.config[key] = value.into();
        draft.refused(&[MAIN, word]);
    }
    let mut draft = Draft::of("tiny");
    draft.config["num_hidden_layers"] = 128.into();
    draft.config["mlp_layer_types"] = Value::Null;
    draft.config["indexer_types"] = Value::Null;
    draft.config["first_k_dense_replace"] = 1.into();
    draft.config["index_topk_freq"] = 1.into();
    draft.refused(&["layers 5–127 have no tensor at all (config.json says 128 layers)"]);
}

/// A scale or vector value that is not a number: found at load, for a routed expert at its first
/// use.
#[test]
fn values_that_are_not_finite_are_found() {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut draft = Draft::container(Format::Int8);
        draft.tensor(&format!("{Q_A}.qs")).bytes[12..16].copy_from_slice(&bad.to_le_bytes());
        let out = draft.path().join(OUT).display().to_string();
        draft.refused(&[&out, Q_A, &format!("scale 3 of 32 is {bad}, expected a finite number")]);
    }
    let mut draft = Draft::of("fp8");
    let side = "model.layers.0.mlp.gate_proj.weight_scale_inv";
    draft.tensor(side).bytes[4..8].copy_from_slice(&f32::NAN.to_le_bytes());
    draft.refused(&[".safetensors", "model.layers.0.mlp.gate_proj.weight", "scale 1 of 6 is NaN"]);
    let mut draft = Draft::of("tiny");
    draft.tensor("model.norm.weight").bytes[2..4].copy_from_slice(&0x7fc0u16.to_le_bytes());
    draft.refused(&[MAIN, "model.norm.weight", "value 1 is NaN, expected a finite number"]);

    for expert in [Format::Int8, Format::Int4 { group: 32 }] {
        let mut draft = Draft::container(expert);
        for id in 0..8 {
            let scales = format!("model.layers.2.mlp.experts.{id}.up_proj.weight.qs");
            draft.tensor(&scales).bytes[..4].copy_from_slice(&f32::NAN.to_le_bytes());
        }
        let out = draft.path().join(OUT).display().to_string();
        let words = [&out, "model.layers.2.mlp.experts.", ".up_proj.weight", "scale 0 of", "NaN"];
        // In memory the damage is found while loading, mapped when the expert is first used.
        draft.refused(&words);
        let mapped = Options { ram: Some(Ram::Bytes(1)), mapped: true, ..exact() };
        let stream = StreamOptions { bytes: 1, ..StreamOptions::default() };
        for options in [mapped, Options { stream, ..exact() }] {
            let engine = draft.open(&options).unwrap();
            let error = format!("{:#}", logits(&engine, &[1]).unwrap_err());
            for word in words {
                assert!(error.contains(word), "no {word:?} in: {error}");
            }
        }
    }
    // Not scales but values: the pass names the layer.
    let mut draft = Draft::of("tiny");
    draft.tensor(Q_A).bytes[..2].copy_from_slice(&0x7fc0u16.to_le_bytes());
    let error = format!("{:#}", logits(&draft.loads(), &[1]).unwrap_err());
    assert!(error.contains("layer 1: the query latent is not finite"), "{error}");
}

/// A damaged head: no logits are better than wrong ones.
#[test]
fn logits_that_are_not_finite_are_an_error() {
    let mut draft = Draft::of("tiny");
    draft.tensor("lm_head.weight").bytes[..2].copy_from_slice(&0x7fc0u16.to_le_bytes());
    let error = format!("{:#}", logits(&draft.loads(), &[1]).unwrap_err());
    assert!(error.contains("a logit is not finite"), "{error}");
}

/// C#8: what runs but not as well as it could is said at load.
#[test]
fn files_that_run_badly_or_not_as_meant_are_warned_about() {
    let warned = |draft: &Draft, words: &[&str]| {
        let engine = draft.loads();
        let warnings = engine.model.warnings();
        assert_eq!(warnings.len(), 1, "{warnings:?}");
        assert!(words.iter().all(|w| warnings[0].contains(w)), "{warnings:?}");
    };
    assert!(Draft::of("tiny").loads().model.warnings().is_empty());
    let mut draft = Draft::of("tiny");
    draft.quantize("model.layers.4.eh_proj.weight", Format::Int4 { group: 0 });
    warned(&draft, &["model.layers.4.eh_proj.weight", "int4 with one scale per row"]);
    let mut draft = Draft::of("tiny");
    draft.remove("model.layers.4.");
    warned(&draft, &["promises an MTP layer, the files have none"]);
    let mut draft = Draft::of("tiny");
    draft.config["num_nextn_predict_layers"] = 0.into();
    warned(&draft, &["hold an MTP layer (4)", "num_nextn_predict_layers"]);
    let mut draft = Draft::of("tiny");
    draft.remove("model.layers.4.self_attn.indexer.");
    warned(&draft, &["the MTP layer has no indexer"]);
    let mut draft = Draft::of("tiny");
    let norm = draft.tensor("model.norm.weight").clone();
    draft.file().tensors.insert("model.layers.9.input_layernorm.weight".into(), norm);
    warned(&draft, &["1 tensors belong to layers beyond the 4"]);
    // A part of the MTP layer's indexer is a hole, not a choice.
    let mut draft = Draft::of("tiny");
    draft.remove("model.layers.4.self_attn.indexer.wq_b");
    draft.refused(&["missing 1 of 191", "model.layers.4.self_attn.indexer.wq_b.weight"]);
}

/// C#381: a model whose end of turn is misread never stops.
#[test]
fn end_of_turn_ids_that_are_none_are_refused() {
    for bad in
        [json!(-1), json!(1.5), json!("x"), json!(true), json!([280, "x"]), json!(1u64 << 40)]
    {
        let mut draft = Draft::of("tiny");
        draft.config["eos_token_id"] = bad.clone();
        draft.refused(&["config.json", "eos_token_id", "expected token ids"]);
        let draft = Draft::of("tiny");
        let text = json!({"eos_token_id": bad}).to_string().into_bytes();
        let file = "generation_config.json";
        draft.refused_after(file, |_| text, &[file, "eos_token_id", "expected token ids"]);
    }
}

/// Codes without a dimension are no matrix.
#[test]
fn a_scalar_where_a_matrix_should_be_is_refused() {
    let mut draft = Draft::container(Format::Int8);
    let t = draft.tensor(Q_A);
    (t.shape, t.bytes) = (Vec::new(), vec![0]);
    draft.refused(&[OUT, Q_A]);
}

// ------------------------------------------------------------------ parts that may be left out

/// An indexer that config promises and files lack.
#[test]
fn a_model_without_its_indexer_runs_up_to_top_k_on_request() {
    let mut draft = Draft::of("tiny");
    draft.remove(".indexer.");
    let advice = "pass --no-indexer, which is exact up to 16 tokens";
    draft.refused(&["model.layers.0.self_attn.indexer.wq_b.weight", "indexer", advice]);
    let without = draft.open(&Options { no_indexer: true, ..exact() }).unwrap();
    assert_eq!((without.context(), without.model.max_context()), (16, 16));
    let ids: Vec<u32> = (1..=16).collect();
    let want = logits(&fixture::open("tiny"), &ids).unwrap();
    assert_eq!(logits(&without, &ids).unwrap(), want, "bits of the logits");
    let error = logits(&without, &(1..=17).collect::<Vec<_>>()).unwrap_err().to_string();
    assert!(error.contains("17 tokens exceed the context of 16"), "{error}");
    let error = draft.open(&Options { no_indexer: true, ctx: Some(17), ..exact() });
    let error = format!("{:#}", error.err().unwrap());
    assert!(error.contains("17") && error.contains("16 without its indexer"), "{error}");
}

/// One of several indexer tensors missing is a damaged model, with the same way out.
#[test]
fn an_indexer_with_a_hole_is_refused() {
    let mut draft = Draft::of("tiny");
    let name = "model.layers.2.self_attn.indexer.k_norm.bias";
    draft.remove(name);
    draft.refused(&["missing 1 of 191", name, "--no-indexer"]);
}

/// The MTP layer may be absent, but not in part.
#[test]
fn an_mtp_layer_is_there_or_not() {
    let mut draft = Draft::of("tiny");
    let ids = [1, 2, 3];
    let want = logits(&fixture::open("tiny"), &ids).unwrap();
    let layer = draft.remove("model.layers.4.");
    let engine = draft.loads();
    assert!(!engine.model.has_mtp());
    assert_eq!(logits(&engine, &ids).unwrap(), want);
    let parts = ["eh_proj", "enorm", "mlp.experts.7.down_proj", "self_attn.q_a_layernorm"];
    for part in parts {
        let mut draft = Draft::of("tiny");
        let name = format!("model.layers.4.{part}.weight");
        draft.remove(&name);
        draft.refused(&["missing 1 of 191", &name, "MTP layer (4)", "whole or not at all"]);
    }
    // One tensor alone, whichever.
    for (name, tensor) in layer.into_iter().step_by(5) {
        let mut draft = Draft::of("tiny");
        draft.remove("model.layers.4.");
        draft.file().tensors.insert(name, tensor);
        draft.refused(&["model.layers.4."]);
    }
    // A model that promises none has none.
    let mut draft = Draft::of("tiny");
    draft.config["num_nextn_predict_layers"] = 0.into();
    assert!(!draft.loads().model.has_mtp());
}

/// A checkpoint that was loaded and saved by a library which fuses the experts.
#[test]
fn fused_experts_are_explained() {
    let mut draft = Draft::of("tiny");
    draft.remove(".mlp.experts.");
    for layer in 1..5 {
        let fused = |shape: [usize; 3]| Tensor {
            dtype: "BF16".into(),
            shape: shape.to_vec(),
            bytes: vec![0; 2 * shape.iter().product::<usize>()],
        };
        let prefix = format!("model.layers.{layer}.mlp.experts");
        let tensors = &mut draft.file().tensors;
        tensors.insert(format!("{prefix}.gate_up_proj"), fused([8, 64, 64]));
        tensors.insert(format!("{prefix}.down_proj"), fused([8, 64, 32]));
    }
    let why = "the experts are fused (mlp.experts.gate_up_proj)";
    draft.refused(&["missing 96 of", "model.layers.1.mlp.experts.0.gate_proj.weight", why]);
}

// ---------------------------------------------------------------------------------- side files

/// C#383, C#404: weights were copied, the small files were not.
#[test]
fn absent_side_files_are_named() {
    for name in ["config.json", "tokenizer.json"] {
        let draft = Draft::of("tiny");
        draft.write();
        let path = draft.path().join(name);
        std::fs::remove_file(&path).unwrap();
        refused(draft.path(), &[path.to_str().unwrap(), "not found"]);
    }
    // The two others are optional.
    let draft = Draft::of("tiny");
    for name in ["generation_config.json", "tokenizer_config.json"] {
        std::fs::remove_file(draft.path().join(name)).unwrap();
    }
    assert_eq!(draft.loads().stops(), [280, 287, 289]);
    let nowhere = draft.path().join("nowhere");
    refused(&nowhere, &[nowhere.to_str().unwrap(), "not a directory"]);
}

/// A tokenizer of another model, and side files that are not what they should be.
#[test]
fn side_files_that_do_not_fit_are_refused() {
    let draft = Draft::of("tiny");
    let grow = |b: Vec<u8>| {
        let mut json: Value = serde_json::from_slice(&b).unwrap();
        json["model"]["vocab"]["zzz"] = 320.into();
        json.to_string().into_bytes()
    };
    let words = ["ids up to 320, but the model has only 320 rows", "config.json", "another model"];
    draft.refused_after("tokenizer.json", grow, &words);
    let draft = Draft::of("tiny");
    for name in ["config.json", "tokenizer.json", "generation_config.json", "tokenizer_config.json"]
    {
        for text in ["", "{", "[]", "\u{0}", "<html>"] {
            let copy = Draft::of("tiny");
            copy.refused_after(name, |_| text.into(), &[]);
        }
        let copy = Draft::of("tiny");
        copy.refused_after(name, |_| b"{\"a\": \xff}".to_vec(), &[]);
    }
    let odd = json!({"temperature": -1}).to_string().into_bytes();
    draft.refused_after(
        "generation_config.json",
        |_| odd,
        &["`temperature` is -1", "from 0 to 100"],
    );
}

/// A directory or a pointer of a version control system where a file should be.
#[test]
fn things_that_are_no_model_files_are_refused() {
    let draft = Draft::of("tiny");
    let pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5368709120\n";
    draft.refused_after(MAIN, |_| pointer.to_vec(), &["a Git LFS pointer", "git lfs pull"]);
    draft.refused_after(MAIN, |_| b"<!DOCTYPE html>".to_vec(), &["not a safetensors file"]);
    draft.write();
    std::fs::create_dir(draft.path().join("z.safetensors")).unwrap();
    refused(draft.path(), &["z.safetensors", "not a regular file"]);
}
