//! Lossy routing: nothing changes unless it is asked for and has something to drop, and what it does is told.

use std::collections::BTreeMap;

use glm::engine::{Engine, Options};
use glm::experts::StreamOptions;
use glm::model::kv::{KvCache, KvType};
use glm::model::lossy::{Lossy, SHORT_PASS};
use glm::model::{Control, Observer, Output, Route, Row, Workspace};

use crate::cli::{json, run, stderr, stdout};
use crate::fixture::{Oracle, PRESETS, dir};

/// Experts by layer and position.
#[derive(Default, PartialEq)]
struct Routes(BTreeMap<(usize, usize), Vec<(u32, f32)>>);

impl Observer for Routes {
    fn routed(&mut self, layer: usize, row: Row, route: &Route) {
        self.0.insert((layer, row.pos), route.to_vec());
    }
}

fn open(preset: &str, lossy: Option<Lossy>, slots: Option<usize>, threads: usize) -> Engine {
    let stream = StreamOptions { slots, ..StreamOptions::default() };
    let options = Options { lossy, stream, threads: Some(threads), ..Options::default() };
    Engine::open(&dir(preset), &options).unwrap()
}

/// Bits of the logits of every position, in passes of `rows`, and the experts that were used.
fn forward(engine: &Engine, ids: &[u32], rows: usize) -> (Vec<u32>, Routes) {
    let mut cache = KvCache::new(&engine.model.config, KvType::F16);
    let (mut ws, mut out) = (Workspace::default(), Output::default());
    let (mut bits, mut routes) = (Vec::new(), Routes::default());
    for (b, chunk) in ids.chunks(rows).enumerate() {
        let pass: Vec<Row> = (b * rows..)
            .zip(chunk)
            .map(|(pos, &token)| Row { seq: 0, pos, token, logits: true })
            .collect();
        let mut control = Control { cancel: None, observer: Some(&mut routes) };
        engine.model.forward(&pass, &mut [&mut cache], &mut ws, &mut control, &mut out).unwrap();
        bits.extend(out.logits.iter().map(|v| v.to_bits()));
    }
    (bits, routes)
}

fn ids(preset: &str) -> Vec<u32> {
    let ids = Oracle::load(preset).ids("/input_ids");
    ids[..ids.len().min(24)].to_vec()
}

#[test]
fn what_drops_nothing_changes_no_bit() {
    for preset in PRESETS {
        let ids = ids(preset);
        let exact = open(preset, None, None, 2);
        assert!(exact.model.lossy().is_none());
        let (want, routes) = forward(&exact, &ids, 1);
        let (k, n) = (exact.model.config.top_k, exact.model.config.n_experts);
        for mode in [
            Lossy::TopP(1.0 - f32::EPSILON),
            Lossy::MissBudget(n),
            Lossy::CacheRoute { keep: k, of: n },
            Lossy::CacheRoute { keep: 1, of: k },
        ] {
            let engine = open(preset, Some(mode), Some(3), 2);
            let (bits, used) = forward(&engine, &ids, 1);
            assert!(bits == want && used == routes, "{preset}, {mode}");
            let (_, tally) = engine.model.lossy().unwrap();
            assert_eq!((tally.agreement(), tally.dropped(), tally.kl()), (1.0, 0.0, 0.0));
            let sparse = (0..exact.model.config.n_layers)
                .filter(|&i| exact.model.config.is_sparse(i))
                .count();
            assert_eq!(tally.rows, (ids.len() * sparse) as u64, "{preset}, {mode}");
        }
        // In memory there is nothing to route around.
        for mode in [Lossy::MissBudget(0), Lossy::CacheRoute { keep: 1, of: n }] {
            let engine = open(preset, Some(mode), None, 2);
            assert!(forward(&engine, &ids, 1).0 == want, "{preset}, {mode}");
            assert_eq!(engine.model.lossy().unwrap().1.rows, 0);
        }
    }
}

#[test]
fn thinned_routes_are_the_same_bits_whatever_the_slots_threads_and_passes() {
    for preset in PRESETS {
        let ids = ids(preset);
        let exact = open(preset, None, None, 2);
        let (other, chosen) = forward(&exact, &ids, ids.len());
        for mode in [Lossy::TopK(1), Lossy::TopP(0.4)] {
            let (want, used) = forward(&open(preset, Some(mode), None, 1), &ids, ids.len());
            assert!(want != other, "{preset}, {mode}: something is lost");
            for (slots, threads, rows) in [(None, 3, 1), (Some(3), 2, 7), (Some(1), 1, 1)] {
                let got = forward(&open(preset, Some(mode), slots, threads), &ids, rows);
                assert!(
                    got == (want.clone(), Routes(used.0.clone())),
                    "{preset}, {mode}, {slots:?}"
                );
            }
            // The first sparse layer sees the same input: its routes are a part of the exact ones, of the same weight.
            let first = chosen.0.keys().next().unwrap().0;
            for ((_, pos), route) in used.0.iter().filter(|((layer, _), _)| *layer == first) {
                let exact = &chosen.0[&(first, *pos)];
                let sum = |r: &[(u32, f32)]| r.iter().map(|r| r.1).sum::<f32>();
                assert!((sum(route) - sum(exact)).abs() < 1e-5, "{preset}, {mode}: {route:?}");
                assert!(route.iter().all(|r| exact.iter().any(|x| x.0 == r.0)));
                let best = exact.iter().map(|r| r.1).fold(0.0, f32::max);
                let heaviest = exact.iter().find(|x| x.1 == best).unwrap().0;
                assert!(route.iter().any(|r| r.0 == heaviest), "{preset}, {mode}: {route:?}");
                assert!(mode != Lossy::TopK(1) || route.len() == 1);
            }
        }
    }
}

#[test]
fn the_modes_that_look_at_slots_read_less_and_leave_long_passes_alone() {
    let ids = ids("groups");
    let exact = open("groups", None, Some(12), 2);
    let (want, _) = forward(&exact, &ids, 1);
    let misses = |e: &Engine| e.model.stream().unwrap().stats().misses;
    let k = exact.model.config.top_k as u64;
    for (mode, drops) in
        [(Lossy::CacheRoute { keep: 1, of: 8 }, false), (Lossy::MissBudget(1), true)]
    {
        let engine = open("groups", Some(mode), Some(12), 2);
        let (bits, used) = forward(&engine, &ids, 1);
        assert!(bits != want, "{mode}");
        assert!(misses(&engine) < misses(&exact), "{mode}");
        let (_, tally) = engine.model.lossy().unwrap();
        assert!((0.1..1.0).contains(&tally.agreement()) && tally.kl() > 0.0, "{mode}: {tally:?}");
        assert_eq!(tally.dropped() > 0.0, drops, "{mode}: {tally:?}");
        assert!(used.0.values().all(|r| drops || r.len() as u64 == k));
        assert!(used.0.values().all(|r| !r.is_empty()));
        assert_eq!(used.0.values().map(|r| r.len() as u64).sum::<u64>(), tally.used);
        if drops {
            // A layer reads one expert at most, or none but the best of a row that has no other.
            assert!(misses(&engine) <= tally.rows, "{mode}: {tally:?}");
        }

        let long = [ids.clone(), ids.clone()].concat();
        let engine = open("groups", Some(mode), Some(12), 2);
        assert!(
            forward(&engine, &long[..=SHORT_PASS], SHORT_PASS + 1).0
                == want[..want.len() / ids.len() * (SHORT_PASS + 1)]
        );
        assert_eq!(engine.model.lossy().unwrap().1.rows, 0, "{mode}");
        forward(&engine, &long, SHORT_PASS);
        assert_eq!(engine.model.lossy().unwrap().1.rows, 3 * long.len() as u64, "{mode}");
    }
}

const MODEL: [&str; 9] = [
    "--model",
    "models/tiny",
    "--no-usage",
    "--slots",
    "24",
    "--io",
    "buffered",
    "--pass-rows",
    "16",
];

#[test]
fn a_lossy_run_says_so_and_an_exact_one_does_not() {
    let ask = ["run", "What rhymes with cat?", "--no-think", "--temperature", "0"];
    for (flag, value) in [
        ("--lossy-expert-top-p", "0.5"),
        ("--lossy-expert-top-k", "2"),
        ("--lossy-cache-route", "1,8"),
        ("--lossy-miss-budget", "1"),
    ] {
        let args = [&ask[..], &MODEL, &[flag, value]].concat();
        let o = run(&args);
        let mode = format!("{} {value}", flag.trim_start_matches("--lossy-"));
        let note = format!("note: lossy routing: {mode}; the answer differs from the model's\n");
        assert!(stderr(&o).contains(&note), "{}", stderr(&o));
        assert!(stderr(&o).contains(&format!(", lossy {mode}: ")), "{}", stderr(&o));
        let o = run(&[&args[..], &["--json", "-q"]].concat());
        assert_eq!(stderr(&o), "");
        let lossy = &json(&o)["lossy"];
        assert_eq!(lossy["mode"], mode);
        let figure = |key: &str| lossy[key].as_f64().unwrap();
        assert!((0.1..1.0).contains(&figure("agreement")) && figure("kl") > 0.0, "{lossy}");
        assert_eq!(figure("dropped") == 0.0, flag == "--lossy-cache-route", "{lossy}");
        assert!(figure("rows") > 0.0);
    }
    let o = run(&[&ask[..], &MODEL].concat());
    assert!(!stderr(&o).contains("lossy"), "{}", stderr(&o));
    let v = json(&run(&[&ask[..], &MODEL, &["--json"]].concat()));
    assert!(v.get("lossy").is_none() && v["experts"]["slots"].as_u64() > Some(20), "{v}");

    // Everything in memory: these two have nothing to do.
    for mode in [["--lossy-cache-route", "1,8"], ["--lossy-miss-budget", "0"]] {
        let args = [&ask[..], &["--model", "models/tiny"], &mode].concat();
        assert!(stderr(&run(&args)).contains("it changes nothing here"), "{mode:?}");
        let v = json(&run(&[&args[..], &["--json", "-q"]].concat()));
        assert_eq!((&v["text"], &v["lossy"]["rows"]), (&"Bat rhymes with cat.".into(), &0.into()));
        assert!(v["lossy"]["agreement"].is_null());
    }
}

#[test]
fn scores_and_benches_tell_of_lossy_routing() {
    let tmp = tempfile::tempdir().unwrap();
    let file = tmp.path().join("text.txt");
    std::fs::write(&file, "Once upon a time, there was a little owl who lived in a tree.").unwrap();
    let score = ["score", file.to_str().unwrap()];
    let mode = ["--lossy-expert-top-k", "1"];
    let text = stdout(&run(&[&score[..], &mode].concat()));
    assert!(
        text.contains(", lossy expert-top-k 1: 25.0% of choices kept, 75.0% dropped"),
        "{text}"
    );
    let lossy = json(&run(&[&score[..], &mode, &["--json", "-q"]].concat()));
    let exact = json(&run(&[&score[..], &["--json", "-q"]].concat()));
    assert_eq!(lossy["lossy"]["agreement"], 0.25);
    assert!(exact.get("lossy").is_none());
    assert_ne!(lossy["perplexity"], exact["perplexity"]);
    // The length of passes is no part of the result.
    let short = json(&run(&[&score[..], &mode, &["--json", "-q", "--pass-rows", "3"]].concat()));
    assert_eq!(short["logprob"], lossy["logprob"]);

    let bench = ["bench", "model", "--prompt", "8", "--gen", "2", "--reps", "1", "-q"];
    let text = stdout(&run(&[&bench[..], &mode].concat()));
    assert!(text.contains("routing, warm-up included, lossy expert-top-k 1: 25.0%"), "{text}");
    let v = json(&run(&[&bench[..], &mode, &["--json"]].concat()));
    assert_eq!(v["lossy"]["dropped"], 0.75);
}

#[test]
fn wrong_lossy_options_are_usage_errors() {
    for (args, words) in [
        (&["--lossy-expert-top-p", "1"][..], "above 0 and below 1"),
        (&["--lossy-expert-top-p", "0"], "above 0 and below 1"),
        (&["--lossy-expert-top-p", "nan"], "expected a number"),
        (&["--lossy-expert-top-k", "0"], "0"),
        (
            &["--lossy-expert-top-k", "4"],
            "--lossy-expert-top-k 4: expected fewer than the 4 experts",
        ),
        (&["--lossy-cache-route", "3"], "two numbers J,M"),
        (&["--lossy-cache-route", "0,8"], "J from 1 to 4 and M from 4 to 16"),
        (&["--lossy-cache-route", "5,8"], "J from 1 to 4 and M from 4 to 16"),
        (&["--lossy-cache-route", "2,3"], "J from 1 to 4 and M from 4 to 16"),
        (&["--lossy-cache-route", "2,17"], "J from 1 to 4 and M from 4 to 16"),
        (&["--lossy-miss-budget", "-1"], "-1"),
        (&["--lossy-miss-budget", "1", "--lossy-expert-top-p", "0.5"], "cannot be used with"),
        (&["--lossy-cache-route", "2,8", "--lossy-expert-top-k", "2"], "cannot be used with"),
        (&["--slots", "8"], "--slots needs --model"),
        (&["--slots", "8", "--io", "mmap", "--model", "models/tiny"], "exclude each other"),
        (&["--pass-rows", "0"], "0"),
    ] {
        let o = run(&[&["run", "hello", "-n", "1"], args].concat());
        assert_eq!(o.status.code(), Some(2), "{args:?}: {}", stderr(&o));
        assert!(stderr(&o).contains(words), "{args:?}: {}", stderr(&o));
    }
}
