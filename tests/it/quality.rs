//! The small trained model: perplexity against the reference figure, and the shipped container against its source.

use std::process::Command;

use serde_json::Value;

use crate::fixture::root;

/// Nats per token and scored tokens of one validation text, scored as the reference figures were made.
fn nats(domain: &str, args: &[&str]) -> (f64, u64) {
    let out = Command::new(env!("CARGO_BIN_EXE_glm"))
        .current_dir(root())
        .args([
            "score",
            &format!("models/tiny-bf16/valid/{domain}.txt"),
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
    (v["nats_per_token"].as_f64().unwrap(), v["tokens"].as_u64().unwrap())
}

#[test]
fn perplexity_is_the_reference_figure() {
    // transformers on the same weights, windows of 512 tokens: domain, nats per token, scored tokens.
    let reference =
        [("stories", 0.5365, 11753), ("chat", 0.8060, 12775), ("recall", 1.3191, 12775)];
    for (domain, want, tokens) in reference {
        let (got, n) = nats(domain, &["--model", "models/tiny-bf16"]);
        assert_eq!(n, tokens, "{domain}: scored tokens");
        assert!((got - want).exp().abs() - 1.0 < 1e-3, "{domain}: {got}, expected {want}");
        assert!((want - got).exp().abs() - 1.0 < 1e-3, "{domain}: {got}, expected {want}");
    }
    // The built-in container: int8 activations cost at most 0.3% of perplexity.
    let bf16 = reference[1].1;
    let [q8, exact] = ["q8", "f32"].map(|mode| nats("chat", &["--activations", mode]).0);
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
