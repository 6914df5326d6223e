//! `glm synth`: what it writes is a model, always the same one, and tokens spread over its experts.

use std::path::Path;
use std::process::{Command, Output};

use glm::engine::{Engine, Options};
use glm::model::kv::{KvCache, KvType};
use glm::model::{Control, Observer, Output as Pass, Route, Row, Workspace};
use serde_json::Value;

fn glm(args: &[&str]) -> Output {
    command(args).output().unwrap()
}

fn command(args: &[&str]) -> Command {
    let mut c = Command::new(env!("CARGO_BIN_EXE_glm"));
    c.args(args).env_remove("GLM_MODEL").env_remove("GLM_ISA");
    c
}

fn synth(dir: &Path, args: &[&str]) -> Output {
    let o = glm(&[&["synth", "--preset", "tiny", dir.to_str().unwrap()], args].concat());
    assert!(o.status.success(), "{args:?}: {}", String::from_utf8_lossy(&o.stderr));
    o
}

/// FNV-1a of all weight files, names included.
fn digest(dir: &Path) -> u64 {
    let mut paths: Vec<_> = std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().path()).collect();
    paths.retain(|p| p.extension().is_some_and(|e| e == "safetensors"));
    paths.sort();
    let mut hash = 0xcbf2_9ce4_8422_2325u64;
    for path in paths {
        let name = path.file_name().unwrap().as_encoded_bytes().to_vec();
        for b in name.into_iter().chain(std::fs::read(&path).unwrap()) {
            hash = (hash ^ u64::from(b)).wrapping_mul(0x100_0000_01b3);
        }
    }
    hash
}

#[test]
fn every_format_gives_a_complete_model_that_runs() {
    for format in ["int4-g64", "int8", "int4-row", "int4-g32", "int3", "int2", "fp8"] {
        let tmp = tempfile::tempdir().unwrap();
        let dir = tmp.path().to_str().unwrap();
        synth(tmp.path(), &["--format", format, "--mtp", "--quiet"]);
        let inspect = glm(&["inspect", dir, "--json"]);
        assert!(inspect.status.success(), "{format}: {}", String::from_utf8_lossy(&inspect.stdout));
        let v: Value = serde_json::from_slice(&inspect.stdout).unwrap();
        assert_eq!((&v["complete"], &v["config"]["mtp"]), (&true.into(), &true.into()), "{format}");
        for list in ["unused", "warnings"] {
            assert_eq!(v[list], Value::Array(Vec::new()), "{format}");
        }
        let classes = v["classes"].as_array().unwrap();
        let experts = classes.iter().filter(|c| c["class"] == "routed experts");
        assert!(experts.clone().any(|c| c["format"] == format), "{format}: {v}");
        let run = glm(&["run", "--model", dir, "-n", "4", "--ignore-eos", "-q", "--json", "hi"]);
        assert!(run.status.success(), "{format}: {}", String::from_utf8_lossy(&run.stderr));
        let v: Value = serde_json::from_slice(&run.stdout).unwrap();
        assert_eq!(v["ids"].as_array().unwrap().len(), 4, "{format}");
    }
}

#[test]
fn bench_runs_and_sizes_are_those_asked_for() {
    let tmp = tempfile::tempdir().unwrap();
    let args = ["--layers", "3", "--dense", "2", "--experts", "8", "--vocab", "5000"];
    let o = synth(tmp.path(), &[&args[..], &["--json"]].concat());
    let v: Value = serde_json::from_slice(&o.stdout).unwrap();
    let sizes = ["layers", "dense_layers", "experts", "vocab"].map(|k| v[k].as_u64().unwrap());
    assert_eq!(sizes, [3, 2, 8, 5000]);
    assert_eq!((&v["format"], &v["mtp"]), (&"int4-g64".into(), &false.into()));
    let stderr = String::from_utf8(o.stderr).unwrap();
    assert!(stderr.starts_with("writing ") && stderr.contains("GB/s"), "{stderr}");
    let dir = tmp.path().to_str().unwrap();
    let bench = glm(&[
        "bench", "model", "--model", dir, "--prompt", "8", "--gen", "4", "--reps", "1", "--json",
        "-q",
    ]);
    assert!(bench.status.success(), "{}", String::from_utf8_lossy(&bench.stderr));
}

/// The same on every machine: the digest is pinned.
#[test]
fn a_seed_gives_the_same_bytes_with_any_number_of_threads() {
    let digest_of = |seed: &str, threads: &str| {
        let tmp = tempfile::tempdir().unwrap();
        let args = ["synth", "--preset", "tiny", "--mtp", "--quiet", "--seed", seed];
        let mut c = command(&[&args[..], &[tmp.path().to_str().unwrap()]].concat());
        assert!(c.env("RAYON_NUM_THREADS", threads).status().unwrap().success());
        digest(tmp.path())
    };
    let one = digest_of("1", "1");
    assert_eq!(one, digest_of("1", "3"));
    assert_ne!(one, digest_of("2", "3"));
    assert_eq!(format!("{one:#x}"), "0xf80021fb1f7ef367");
}

/// What the layers of a model do with a prompt of random ids and greedy tokens after it.
struct Watch {
    /// How often each expert of each layer was chosen.
    chosen: Vec<Vec<u32>>,
    largest: f32,
}

impl Observer for Watch {
    fn routed(&mut self, layer: usize, _row: Row, route: &Route) {
        for &(expert, _) in route {
            self.chosen[layer][expert as usize] += 1;
        }
    }

    fn hidden(&mut self, _layer: usize, _row: Row, x: &[f32]) {
        self.largest = x.iter().fold(self.largest, |m, v| m.max(v.abs()));
    }
}

fn watch(args: &[&str], prompt: usize, greedy: usize) -> Watch {
    let tmp = tempfile::tempdir().unwrap();
    synth(tmp.path(), &[args, &["--quiet"]].concat());
    let engine = Engine::open(tmp.path(), &Options::default()).unwrap();
    let c = &engine.model.config;
    let mut watch = Watch { chosen: vec![vec![0; c.n_experts]; c.n_layers], largest: 0.0 };
    let mut cache = KvCache::new(c, KvType::F16);
    let (mut ws, mut out) = (Workspace::default(), Pass::default());
    let id = |pos: usize| (pos * 2_654_435_761 % c.vocab) as u32;
    let mut rows: Vec<Row> = (0..prompt)
        .map(|pos| Row { seq: 0, pos, token: id(pos), logits: pos + 1 == prompt })
        .collect();
    for pos in prompt..=prompt + greedy {
        let mut control = Control { cancel: None, observer: Some(&mut watch) };
        engine.model.forward(&rows, &mut [&mut cache], &mut ws, &mut control, &mut out).unwrap();
        assert!(out.logits.iter().all(|v| v.is_finite()));
        rows = vec![Row { seq: 0, pos, token: glm::sample::argmax(&out.logits), logits: true }];
    }
    watch
}

/// No expert is idle or in every token, neither for a prompt nor for what the model says: greedy tokens do not end in
/// a loop of a few.
#[test]
fn tokens_spread_over_the_experts() {
    let Watch { chosen, .. } = watch(&[], 100, 100);
    let even = 200 * 4 / 16;
    for (layer, chosen) in chosen.iter().enumerate().skip(1) {
        assert_eq!(chosen.iter().sum::<u32>(), 200 * 4, "layer {layer}");
        assert!(
            chosen.iter().all(|n| (even / 4..5 * even / 2).contains(n)),
            "layer {layer}: {chosen:?}, even is {even}"
        );
    }
}

#[test]
fn hidden_states_stay_small_at_the_depth_of_the_real_model() {
    let Watch { largest, .. } = watch(&["--layers", "78"], 24, 4);
    assert!((1.0..100.0).contains(&largest), "{largest}");
}

#[test]
fn wrong_sizes_and_used_directories_are_refused() {
    let tmp = tempfile::tempdir().unwrap();
    let dir = tmp.path().join("new");
    let refused = |args: &[&str], code: i32, words: &[&str]| {
        let o = glm(&[&["synth", dir.to_str().unwrap()], args].concat());
        let stderr = String::from_utf8_lossy(&o.stderr).into_owned();
        assert_eq!(o.status.code(), Some(code), "{args:?}: {stderr}");
        for word in words {
            assert!(stderr.contains(word), "{args:?}: {stderr}");
        }
    };
    refused(&[], 2, &["--preset"]);
    refused(&["--preset", "glm-4"], 2, &["glm-5.2", "tiny"]);
    let tiny = ["--preset", "tiny"];
    refused(&[&tiny[..], &["--layers", "129"]].concat(), 2, &["129", "128"]);
    refused(
        &[&tiny[..], &["--layers", "2", "--dense", "3"]].concat(),
        2,
        &["--dense is 3", "2 layers"],
    );
    refused(&[&tiny[..], &["--experts", "3"]].concat(), 2, &["--experts is 3", "at least 4"]);
    refused(&[&tiny[..], &["--vocab", "4095"]].concat(), 2, &["--vocab is 4095", "at least 4096"]);
    refused(&[&tiny[..], &["--format", "int5"]].concat(), 2, &["int5", "int4-gN"]);
    assert!(!dir.exists(), "nothing is made before the arguments are checked");
    std::fs::create_dir(&dir).unwrap();
    std::fs::write(dir.join("config.json"), "{}").unwrap();
    refused(&tiny, 1, &["not empty"]);
}

/// Ctrl-C leaves an empty directory.
#[test]
#[cfg(unix)]
fn an_interrupted_run_leaves_nothing() {
    let tmp = tempfile::tempdir().unwrap();
    // Large enough to be interrupted: 6 GB, of which a fraction is written.
    let args = [
        "synth",
        "--preset",
        "glm-5.2",
        "--layers",
        "5",
        "--experts",
        "32",
        "--vocab",
        "8192",
        "--quiet",
    ];
    let mut child =
        command(&[&args[..], &[tmp.path().to_str().unwrap()]].concat()).spawn().unwrap();
    while std::fs::read_dir(tmp.path()).unwrap().count() == 0 {
        std::thread::sleep(std::time::Duration::from_millis(5));
        assert!(child.try_wait().unwrap().is_none(), "ended early");
    }
    let pid = child.id().to_string();
    assert!(Command::new("kill").args(["-INT", &pid]).status().unwrap().success());
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert_eq!(std::fs::read_dir(tmp.path()).unwrap().count(), 0);
}
