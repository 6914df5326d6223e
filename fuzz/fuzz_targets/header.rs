//! A safetensors file of any bytes: header, ranges, stamps, and what the model makes of it.
#![no_main]

use std::sync::LazyLock;

use glm::model::config::Config;
use glm::model::weights::{BindOptions, census};
use glm::store::Shards;
use libfuzzer_sys::fuzz_target;

static CONFIG: LazyLock<Config> = LazyLock::new(|| {
    let json = include_bytes!("../corpus/config/tiny.json");
    Config::parse(json, "config.json").expect("the seed is a valid config")
});

fuzz_target!(|data: &[u8]| {
    let Ok(shards) = Shards::from_bytes("fuzz.safetensors", data.to_vec()) else { return };
    for name in shards.names() {
        let tensor = shards.find(name).expect("a name from the list");
        assert_eq!(shards.bytes(tensor).as_slice().len(), tensor.len(), "{name}");
        let _ = shards.stamp(name);
    }
    for no_indexer in [false, true] {
        let options = BindOptions { no_indexer, ..BindOptions::default() };
        let _ = census(&CONFIG, &shards, options);
    }
});
