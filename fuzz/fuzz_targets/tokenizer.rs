//! A `tokenizer.json` of any bytes up to a NUL, then text for it. Input that does not start like
//! JSON is text for a valid tokenizer.
#![no_main]

use std::sync::LazyLock;

use glm::tokenizer::Tokenizer;
use libfuzzer_sys::fuzz_target;

static SEED: LazyLock<Tokenizer> = LazyLock::new(|| {
    let json = include_bytes!("../corpus/tokenizer/small.json");
    Tokenizer::from_bytes(json, "tokenizer.json").expect("the seed is a valid tokenizer")
});

fuzz_target!(|data: &[u8]| {
    if data.first() != Some(&b'{') {
        let text = String::from_utf8_lossy(data);
        let plain = SEED.encode_text(&text).expect("plain text encodes");
        assert!(plain.iter().all(|&id| !SEED.is_control(id)), "a control token in plain text");
        assert_eq!(SEED.decode(&plain, true), text, "text comes back");
        let escaped = SEED.encode(&SEED.escape(&text, &[])).expect("escaped text encodes");
        assert_eq!(escaped, plain, "escaped text is plain text");
        return;
    }
    let end = data.iter().position(|&b| b == 0).unwrap_or(data.len());
    let Ok(tokenizer) = Tokenizer::from_bytes(&data[..end], "tokenizer.json") else { return };
    let text = String::from_utf8_lossy(&data[end..]);
    let Ok(ids) = tokenizer.encode(&text) else { return };
    assert!(ids.iter().all(|&id| (id as usize) < tokenizer.vocab_len()), "an id without a token");
    let _ = tokenizer.decode(&ids, false);
});
