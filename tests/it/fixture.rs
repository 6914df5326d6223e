//! Fixture models and their reference outputs.

use std::path::PathBuf;

use glm::engine::{Engine, Options};
use glm::kernels::Activations;
use glm::model::kv::KvType;
use safetensors::SafeTensors;
use serde_json::Value;

/// The reference fixtures: see `tests/fixtures/README.md`.
pub const PRESETS: [&str; 5] = ["tiny", "odd", "groups", "fp8", "long"];

pub fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

pub fn dir(preset: &str) -> PathBuf {
    root().join("tests/fixtures").join(preset)
}

/// Exact arithmetic, as the oracle was made.
pub fn exact() -> Options {
    Options {
        threads: Some(2),
        kv: KvType::F32,
        activations: Activations::F32,
        ..Options::default()
    }
}

pub fn open(preset: &str) -> Engine {
    Engine::open(&dir(preset), &exact()).unwrap_or_else(|e| panic!("{preset}: {e:#}"))
}

/// `oracle.json` and `oracle.safetensors` of a fixture.
pub struct Oracle {
    pub json: Value,
    tensors: Vec<u8>,
}

impl Oracle {
    pub fn load(preset: &str) -> Self {
        let json = std::fs::read(dir(preset).join("oracle.json")).unwrap();
        let tensors = std::fs::read(dir(preset).join("oracle.safetensors")).unwrap();
        Self { json: serde_json::from_slice(&json).unwrap(), tensors }
    }

    pub fn tensor(&self, name: &str) -> Vec<f32> {
        let file = SafeTensors::deserialize(&self.tensors).unwrap();
        let bytes = file.tensor(name).unwrap().data().to_vec();
        bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
    }

    pub fn ids(&self, pointer: &str) -> Vec<u32> {
        ids(self.json.pointer(pointer).unwrap_or_else(|| panic!("no {pointer}")))
    }
}

pub fn ids(v: &Value) -> Vec<u32> {
    v.as_array().unwrap().iter().map(|x| x.as_u64().unwrap() as u32).collect()
}

/// Largest absolute difference.
pub fn max_diff(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len(), "lengths");
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

pub fn argmax(logits: &[f32]) -> u32 {
    glm::sample::argmax(logits)
}
