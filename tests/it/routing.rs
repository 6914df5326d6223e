//! Routing traces: recorded as the model routes, replayed as the store would be asked, and policies that change no bit.

use std::collections::{BTreeMap, BTreeSet};
use std::process::{Command, Output, Stdio};

use glm::engine::{Engine, Options};
use glm::experts::policy::PolicyKind;
use glm::experts::replay::Replay;
use glm::experts::trace::Accesses;
use glm::experts::{Lookahead, StreamOptions};
use glm::model::kv::KvCache;
use glm::model::{Control, Observer, Output as Logits, Route, Row, Workspace};
use serde_json::Value;

use crate::fixture::{Oracle, dir, root};

fn glm(args: &[&str]) -> Output {
    let mut c = Command::new(env!("CARGO_BIN_EXE_glm"));
    c.current_dir(root()).env_remove("GLM_MODEL").env_remove("GLM_ISA").stdin(Stdio::null());
    c.args(args).output().unwrap()
}

fn stdout(args: &[&str]) -> String {
    let o = glm(args);
    assert!(o.status.success(), "{}", String::from_utf8_lossy(&o.stderr));
    String::from_utf8(o.stdout).unwrap()
}

fn error(args: &[&str]) -> String {
    let o = glm(args);
    assert_eq!(o.status.code(), Some(1), "{args:?}");
    let text = String::from_utf8(o.stderr).unwrap();
    assert!(text.starts_with("error: ") && text.lines().count() == 1, "{text}");
    text
}

/// The routes of a pass as the model tells them.
#[derive(Default)]
struct Routes(Vec<(usize, usize, Vec<(u32, f32)>)>);

impl Observer for Routes {
    fn routed(&mut self, layer: usize, row: Row, route: &Route) {
        self.0.push((layer, row.pos, route.to_vec()));
    }
}

#[test]
fn a_trace_holds_every_route_of_every_pass() {
    let tmp = tempfile::tempdir().unwrap();
    let file = tmp.path().join("trace");
    let ids = Oracle::load("tiny").ids("/input_ids");
    let ids = &ids[..6];
    let options = Options { record: Some(file.clone()), ..Options::default() };
    let engine = Engine::open(&dir("tiny"), &options).unwrap();
    let mut session = engine.session();
    session.prefill(&engine, &ids[..4], None, None).unwrap();
    session.push(&engine, ids[4], None).unwrap();
    session.push(&engine, ids[5], None).unwrap();

    // The same passes with an observer of the test's own.
    let mut kv = KvCache::new(&engine.model.config, glm::model::kv::KvType::F16);
    let (mut ws, mut out, mut lines, mut call) =
        (Workspace::default(), Logits::default(), Vec::new(), 0);
    for pass in [0..4, 4..5, 5..6] {
        let rows: Vec<Row> =
            pass.map(|pos| Row { seq: 0, pos, token: ids[pos], logits: false }).collect();
        let mut routes = Routes::default();
        let mut control = Control { cancel: None, observer: Some(&mut routes) };
        engine.model.forward(&rows, &mut [&mut kv], &mut ws, &mut control, &mut out).unwrap();
        for of_layer in routes.0.chunk_by(|a, b| a.0 == b.0) {
            for (layer, pos, route) in of_layer {
                let experts: String =
                    route.iter().map(|(id, gate)| format!(" {id}:{gate:.4}")).collect();
                lines.push(format!("{call} {} {layer}{experts}", pos - rows[0].pos));
            }
            call += 1;
        }
    }
    let text = std::fs::read_to_string(&file).unwrap();
    assert!(text.ends_with('\n'));
    assert_eq!(text.lines().collect::<Vec<_>>(), lines);
}

/// What `--slots` of a replay finds is what the store counts while it decodes.
#[test]
fn a_replay_counts_what_the_store_counts() {
    let ids = Oracle::load("long").ids("/input_ids");
    for kind in PolicyKind::ALL {
        let tmp = tempfile::tempdir().unwrap();
        let file = tmp.path().join("trace");
        let held = Engine::open(&dir("long"), &Options::default()).unwrap();
        let stream = StreamOptions {
            bytes: held.plan.routed / 2,
            policy: kind,
            readers: 1,
            lookahead: Lookahead::Off,
            ..StreamOptions::default()
        };
        let options = Options { stream, record: Some(file.clone()), ..Options::default() };
        let engine = Engine::open(&dir("long"), &options).unwrap();
        let mut session = engine.session();
        ids.iter().for_each(|&id| session.push(&engine, id, None).unwrap());
        let text = std::fs::read(&file).unwrap();
        let trace = Accesses::read(&text[..], "trace", false).unwrap();
        let stream = engine.model.stream().unwrap();
        let replay = Replay::new(&trace, engine.model.config.n_experts as u32);
        let (count, stats) = (replay.policy(kind, stream.slots()), stream.stats());
        println!("{kind}: {} slots of {}, {count:?}, {stats:?}", stream.slots(), replay.all());
        assert!(stream.slots() < replay.all());
        assert_eq!(
            (count.hits, count.wanted),
            (stats.hits as usize, (stats.hits + stats.misses) as usize),
            "{kind}"
        );
    }
}

#[test]
fn every_policy_gives_the_same_bits_with_few_slots() {
    for preset in ["tiny", "odd"] {
        let ids = Oracle::load(preset).ids("/input_ids");
        let ids = &ids[..ids.len().min(16)];
        let logits = |stream: StreamOptions| {
            let options = Options { stream, ..Options::default() };
            let engine = Engine::open(&dir(preset), &options).unwrap();
            let mut session = engine.session();
            let mut bits = Vec::new();
            session.prefill(&engine, &ids[..5], None, None).unwrap();
            for &id in &ids[5..] {
                session.push(&engine, id, None).unwrap();
                bits.extend(session.logits().iter().map(|l| l.to_bits()));
            }
            (bits, engine.plan.routed)
        };
        let (want, routed) = logits(StreamOptions::default());
        for policy in PolicyKind::ALL {
            for bytes in [1, routed / 8, routed] {
                let stream = StreamOptions { bytes, policy, ..StreamOptions::default() };
                assert!(logits(stream).0 == want, "{preset}, {policy}, {bytes} bytes");
            }
        }
    }
}

#[test]
fn what_is_recorded_is_replayed() {
    let tmp = tempfile::tempdir().unwrap();
    let path = |name: &str| tmp.path().join(name).to_str().unwrap().to_owned();
    let (run, score) = (path("run"), path("score"));
    std::fs::write(&run, "what was here before\n").unwrap();
    let args = ["run", "-q", "Tell me a story.", "-n", "40", "--ignore-eos", "--seed", "1"];
    stdout(&[&args[..], &["--record-routing", &run]].concat());
    let text = "models/tiny-bf16/valid/prose.txt";
    stdout(&["score", "-q", text, "--window", "256", "--record-routing", &score]);

    // The calls of the file, counted by hand.
    let text = std::fs::read_to_string(&run).unwrap();
    let mut calls: BTreeMap<u64, BTreeSet<&str>> = BTreeMap::new();
    for line in text.lines() {
        let fields: Vec<&str> = line.split(' ').collect();
        assert_eq!(fields.len(), 7, "{line}");
        let ids = fields[3..].iter().map(|f| f.split_once(':').unwrap().0);
        calls.entry(fields[0].parse().unwrap()).or_default().extend(ids);
    }
    let wanted: usize = calls.values().map(BTreeSet::len).sum();

    let json: Value = serde_json::from_str(&stdout(&["replay", "--json", &run, &score])).unwrap();
    let tables = json.as_array().unwrap();
    assert_eq!(
        tables.iter().map(|t| t["trace"].as_str().unwrap()).collect::<Vec<_>>(),
        [&*run, &*score, "all"]
    );
    for table in tables {
        let lines = table["policies"].as_array().unwrap();
        assert_eq!(lines.len(), 3 * (PolicyKind::ALL.len() + 1));
        for line in lines {
            assert!(line["of_best"].as_f64().unwrap() <= 1.0, "{line}");
            if line["policy"] == "best" {
                assert_eq!(line["of_best"], 1.0);
            }
        }
    }
    assert_eq!((&tables[0]["layers"], &tables[0]["experts"]), (&4.into(), &16.into()));
    assert_eq!(tables[0]["policies"][0]["wanted"], wanted);
    assert_eq!(tables[0]["policies"][0]["slots"], 6);

    // With all slots only first uses miss; rows alone want four experts per layer.
    let one = stdout(&["replay", &score, "--rows", "--policy", "lru", "--slots", "100%", "--json"]);
    let one: Value = serde_json::from_str(&one).unwrap();
    let line = &one[0]["policies"][0];
    let rows = std::fs::read_to_string(&score).unwrap().lines().count();
    assert_eq!((&line["wanted"], &line["hits"]), (&(4 * rows).into(), &(4 * rows - 64).into()));
    assert_eq!(one.as_array().unwrap().len(), 1);

    let table = stdout(&["replay", "--synth", "tokens=50,layers=4,experts=32", "--slots", "9"]);
    for word in ["tokens=50", "1600 wanted", "4 layers of 32 experts", "of best", "forecast", "lru"]
    {
        assert!(table.contains(word), "no {word:?} in:\n{table}");
    }
}

#[test]
fn what_cannot_be_recorded_or_replayed_is_one_clear_error() {
    let tmp = tempfile::tempdir().unwrap();
    let path = tmp.path().join("trace");
    let name = path.to_str().unwrap();
    for (text, words) in [
        ("0 0 1 3:0.5 4:0.5\n0 1 1 3;0.5\n", &[":2: found `0 1 1 3;0.5`", "expected `<call>"][..]),
        ("0 0 1 3:0.5\nx\n", &[":2:", "`x`", "no call"]),
        ("0 0 1\n", &[":1:", "no experts"]),
        ("0 0 1 3:nan\n", &[":1:", "gate"]),
        ("0 0 1 70000:0.5\n", &[":1:", "below 4096"]),
        ("0 0 99999 7:0.5\n", &[":1:", "layer 99999"]),
        ("0 0 1 3:0.5\n0 0 1 3:0.5\n", &[":2:", "found call 0, row 0", "row 1"]),
        ("0 0 1 3:0.5\n2 0 2 3:0.5\n", &[":2:", "found call 2", "call 1, row 0"]),
        ("0 0 1 3:0.5\n0 1 2 3:0.5\n", &[":2:", "found call 0, row 1, layer 2", "layer 1"]),
        ("5 1 1 3:0.5\n", &[":1:", "expected row 0"]),
        ("0 0 1 3:0.5\n1 0 2 3:0.", &[":2:", "ends inside a line"]),
        ("", &["no calls"]),
    ] {
        std::fs::write(&path, text).unwrap();
        let error = error(&["replay", name]);
        for word in words.iter().chain([&name]) {
            assert!(error.contains(word), "{text:?}: no {word:?} in: {error}");
        }
    }
    std::fs::write(&path, "0 0 1 3:0.5\n").unwrap();
    let too_few = error(&["replay", name, "--experts", "3"]);
    assert!(too_few.contains("expert 3") && too_few.contains("--experts"), "{too_few}");
    assert!(error(&["replay", "/nowhere/trace"]).contains("cannot open /nowhere/trace"));
    assert!(
        error(&["run", "hello", "-q", "--record-routing", "/nowhere/trace"])
            .contains("cannot write /nowhere/trace")
    );
    if cfg!(target_os = "linux") {
        let full = error(&["score", "-q", "README.md", "--record-routing", "/dev/full"]);
        assert!(full.contains("cannot write /dev/full"), "{full}");
    }
    for (args, word) in [
        (&["replay"][..], "no trace"),
        (&["replay", "--synth", "speed=3"], "`speed`"),
        (&["replay", name, "--policy", "lru,best"], "`best`"),
        (&["replay", name, "--slots", "0%"], "25%"),
        (&["run", "x", "--policy", "fifo"], "s3fifo"),
    ] {
        let o = glm(args);
        let text = String::from_utf8_lossy(&o.stderr).into_owned();
        assert_eq!(o.status.code(), Some(2), "{args:?}: {text}");
        assert!(text.contains(word), "no {word:?} in: {text}");
    }
}
