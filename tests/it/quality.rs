//! The small trained model: perplexity against the reference figure, and the shipped container against its source.

use std::process::Command;

use serde_json::Value;

use crate::fixture::root;

/// Nats per token of one validation text, scored as the reference figures were made.
fn nats(args: &[&str]) -> f64 {
    let out = Command::new(env!("CARGO_BIN_EXE_glm"))
        .current_dir(root())
        .args([
            "score",
            "models/tiny-bf16/valid/chat.txt",
            "--window",
            "512",
            "--no-prefix",
            "--parse-special",
            "--json",
        ])
        .args(args)
        .output()
        .unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let v: Value = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!(v["tokens"], 12775, "scored tokens");
    v["nats_per_token"].as_f64().unwrap()
}

#[test]
fn perplexity_is_the_reference_figure() {
    // transformers on the same weights: 0.8060 nats per token, perplexity 2.239.
    let bf16 = nats(&["--model", "models/tiny-bf16"]);
    assert!((bf16.exp() / 0.8060f64.exp() - 1.0).abs() < 1e-3, "bf16: {bf16} nats per token");
    // The built-in container: int8 activations cost at most 0.3% of perplexity.
    let (q8, exact) = (nats(&["--activations", "q8"]), nats(&["--activations", "f32"]));
    assert!((q8 - exact).exp() < 1.003, "int8 activations: {q8} against {exact}");
    assert!((exact - bf16).exp() < 1.02, "int4: {exact} against {bf16}");
}

#[test]
fn the_built_in_container_is_what_the_converter_makes() {
    let tmp = tempfile::tempdir().unwrap();
    let dst = tmp.path().join("tiny");
    let status = Command::new(env!("CARGO_BIN_EXE_glm"))
        .current_dir(root())
        .args(["convert", "--quiet", "--to", "int4-g64", "models/tiny-bf16"])
        .arg(&dst)
        .status()
        .unwrap();
    assert!(status.success());
    for file in [
        "out-00000.safetensors",
        "out-idx-00000.safetensors",
        "out-mtp-00000.safetensors",
        "config.json",
        "tokenizer.json",
    ] {
        let (made, shipped) = (
            std::fs::read(dst.join(file)).unwrap(),
            std::fs::read(root().join("models/tiny").join(file)).unwrap(),
        );
        assert!(made == shipped, "models/tiny/{file} is stale: run tools/make-builtin.sh");
    }
}
