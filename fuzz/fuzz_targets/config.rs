//! A `config.json` of any bytes. What is accepted must not overflow in the arithmetic of shapes.
#![no_main]

use glm::model::config::Config;
use glm::model::kv::{KvCache, KvType};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Ok(c) = Config::parse(data, "config.json") else { return };
    let _ = c.kv_width();
    for i in 0..=c.n_layers {
        let _ = (c.is_sparse(i), c.scores_keys(i));
    }
    let _ = KvCache::bytes_per_position(&c, KvType::F16);
    let _ = KvCache::new(&c, KvType::F16);
});
