//! The forward pass against the reference implementation's outputs, in every way rows can be grouped.

use std::collections::BTreeMap;

use glm::engine::Engine;
use glm::kernels::KeySet;
use glm::model::kv::{KvCache, KvType};
use glm::model::{Control, Observer, Output, Route, Row, Workspace};

use crate::fixture::{Oracle, PRESETS, argmax, ids, max_diff, open};

/// Tolerance on logits of size 10: the reference's own rounding noise is 3e-5.
const TOLERANCE: f32 = 1e-4;

/// Everything that a pass decides, by layer and position.
#[derive(Default)]
struct Trace {
    hidden: BTreeMap<(usize, usize), Vec<f32>>,
    routes: BTreeMap<(usize, usize), Vec<(u32, f32)>>,
    keys: BTreeMap<(usize, usize), Vec<u32>>,
}

impl Observer for Trace {
    fn hidden(&mut self, layer: usize, row: Row, x: &[f32]) {
        self.hidden.insert((layer, row.pos), x.to_vec());
    }

    fn routed(&mut self, layer: usize, row: Row, route: &Route) {
        self.routes.insert((layer, row.pos), route.to_vec());
    }

    fn selected(&mut self, layer: usize, row: Row, keys: KeySet<'_>) {
        let keys = match keys {
            KeySet::All(n) => (0..n as u32).collect(),
            KeySet::Chosen(k) => k.to_vec(),
        };
        self.keys.insert((layer, row.pos), keys);
    }
}

/// Logits of every position and what was decided, with the ids given `block` at a time.
fn forward(engine: &Engine, ids: &[u32], block: usize) -> (Vec<f32>, Vec<f32>, Trace) {
    let mut cache = KvCache::new(&engine.model.config, KvType::F32);
    let (mut logits, mut hidden, mut trace) = (Vec::new(), Vec::new(), Trace::default());
    let (mut ws, mut out) = (Workspace::default(), Output::default());
    for (b, chunk) in ids.chunks(block).enumerate() {
        let row =
            |(i, &token): (usize, &u32)| Row { seq: 0, pos: b * block + i, token, logits: true };
        let rows: Vec<Row> = chunk.iter().enumerate().map(row).collect();
        let mut control = Control { cancel: None, observer: Some(&mut trace) };
        engine.model.forward(&rows, &mut [&mut cache], &mut ws, &mut control, &mut out).unwrap();
        logits.extend_from_slice(&out.logits);
        hidden.extend_from_slice(&out.hidden);
    }
    (logits, hidden, trace)
}

fn bits(v: &[f32]) -> Vec<u32> {
    v.iter().map(|v| v.to_bits()).collect()
}

#[test]
fn teacher_forced_logits_and_every_decision_equal_the_reference() {
    for preset in PRESETS {
        let (engine, oracle) = (open(preset), Oracle::load(preset));
        let input = oracle.ids("/input_ids");
        let want = oracle.tensor("logits");
        let mut first: Option<Vec<u32>> = None;
        for block in [input.len(), 1, 7, 64] {
            let (logits, hidden, trace) = forward(&engine, &input, block);
            let d = max_diff(&logits, &want);
            println!("{preset} block {block}: max |Δlogit| {d:.2e}");
            assert!(d < TOLERANCE, "{preset} block {block}: logits differ by {d}");
            assert!(
                max_diff(&hidden, &oracle.tensor("final_norm")) < TOLERANCE,
                "{preset}: final norm"
            );
            check_trace(preset, &oracle, &trace, engine.model.config.n_layers);
            let best: Vec<u32> = logits.chunks(engine.model.config.vocab).map(argmax).collect();
            assert_eq!(best, oracle.ids("/argmax"), "{preset} block {block}: argmax");
            // However the rows are grouped, the bits are the same.
            let bits = bits(&logits);
            assert!(
                first.get_or_insert_with(|| bits.clone()) == &bits,
                "{preset} block {block}: bits differ"
            );
        }
    }
}

fn check_trace(preset: &str, oracle: &Oracle, trace: &Trace, n_layers: usize) {
    for layer in 0..n_layers {
        let want = oracle.tensor(&format!("hidden.{layer}"));
        let got: Vec<f32> =
            trace.hidden.range((layer, 0)..(layer + 1, 0)).flat_map(|(_, x)| x.clone()).collect();
        let d = max_diff(&got, &want);
        assert!(d < TOLERANCE, "{preset}: hidden states after layer {layer} differ by {d}");
    }
    let (mut routers, mut indexers) = (0, 0);
    for (layer, rows) in oracle.json["router"].as_object().unwrap() {
        let layer: usize = layer["layer".len()..].parse().unwrap();
        for (pos, want) in rows.as_object().unwrap() {
            let got = &trace.routes[&(layer, pos.parse().unwrap())];
            check_route(&format!("{preset} layer {layer} position {pos}"), got, want);
            routers += 1;
        }
    }
    for (layer, rows) in oracle.json["indexer"].as_object().unwrap() {
        let layer: usize = layer["layer".len()..].parse().unwrap();
        for (pos, want) in rows.as_object().unwrap() {
            assert_eq!(
                trace.keys[&(layer, pos.parse().unwrap())],
                ids(want),
                "{preset} layer {layer} position {pos}: keys"
            );
            indexers += 1;
        }
    }
    assert!(routers > 0 && indexers > 0, "{preset}: the oracle holds decisions");
}

/// The same experts with the same weights; the reference lists them by descending weight.
fn check_route(at: &str, got: &Route, want: &serde_json::Value) {
    let want_ids = ids(&want["ids"]);
    let weights: Vec<f32> =
        want["weights"].as_array().unwrap().iter().map(|w| w.as_f64().unwrap() as f32).collect();
    let mut got = got.to_vec();
    got.sort_by(|a, b| b.1.total_cmp(&a.1));
    assert_eq!(got.iter().map(|r| r.0).collect::<Vec<_>>(), want_ids, "{at}: experts");
    for ((_, got), want) in got.iter().zip(weights) {
        assert!((got - want).abs() < 1e-5, "{at}: weight {got}, expected {want}");
    }
}

#[test]
fn three_interleaved_sessions_in_one_batch_equal_each_alone() {
    for preset in PRESETS {
        let (engine, oracle) = (open(preset), Oracle::load(preset));
        let input = oracle.ids("/input_ids");
        let vocab = engine.model.config.vocab;
        // Three sequences that start at different times and advance by different steps, all in one list of rows.
        let streams: [Vec<u32>; 3] =
            [input.clone(), input.iter().rev().copied().collect(), input[5..].to_vec()];
        let alone: Vec<Vec<f32>> = streams.iter().map(|s| forward(&engine, s, 13).0).collect();
        let mut caches: Vec<KvCache> =
            (0..3).map(|_| KvCache::new(&engine.model.config, KvType::F32)).collect();
        let (mut ws, mut out) = (Workspace::default(), Output::default());
        let mut together: [Vec<f32>; 3] = Default::default();
        let mut pass = 0;
        while (0..3).any(|s| together[s].len() < streams[s].len() * vocab) {
            let mut rows = Vec::new();
            for (s, stream) in streams.iter().enumerate() {
                let at = together[s].len() / vocab;
                let step = if pass < s { 0 } else { [1, 3, 2][s] };
                rows.extend((at..(at + step).min(stream.len())).map(|pos| Row {
                    seq: s,
                    pos,
                    token: stream[pos],
                    logits: true,
                }));
            }
            // Sequences alternate row by row; positions of each stay in order.
            rows.sort_by_key(|r| (r.pos % 2, r.pos));
            rows.sort_by_key(|r| r.pos);
            let mut views: Vec<&mut KvCache> = caches.iter_mut().collect();
            engine
                .model
                .forward(&rows, &mut views, &mut ws, &mut Control::default(), &mut out)
                .unwrap();
            for (row, logits) in rows.iter().zip(out.logits.chunks(vocab)) {
                together[row.seq].extend_from_slice(logits);
            }
            pass += 1;
        }
        for s in 0..3 {
            assert!(
                bits(&together[s]) == bits(&alone[s]),
                "{preset}: sequence {s} differs in a batch"
            );
        }
        assert!(max_diff(&together[0], &oracle.tensor("logits")) < TOLERANCE, "{preset}");
    }
}

#[test]
fn greedy_continuation_and_text_equal_the_reference() {
    for preset in PRESETS {
        let (engine, oracle) = (open(preset), Oracle::load(preset));
        let greedy = |prompt: &[u32], n: usize| {
            let mut session = engine.session();
            session.prefill(&engine, prompt, None, None).unwrap();
            (0..n)
                .map(|_| {
                    let id = argmax(session.logits());
                    session.push(&engine, id, None).unwrap();
                    id
                })
                .collect::<Vec<_>>()
        };
        assert_eq!(
            greedy(&oracle.ids("/prompt_ids"), 24),
            oracle.ids("/greedy_ids"),
            "{preset}: greedy ids"
        );

        let text = &oracle.json["text"];
        let prompt = engine.tokenizer.encode(text["prompt"].as_str().unwrap()).unwrap();
        assert_eq!(prompt, ids(&text["prompt_ids"]), "{preset}: ids of the text prompt");
        let answer = greedy(&prompt, 16);
        assert_eq!(answer, ids(&text["greedy_ids"]), "{preset}: ids of the answer");
        assert_eq!(
            engine.tokenizer.decode(&answer, false),
            text["decoded"].as_str().unwrap(),
            "{preset}: text of the answer"
        );
    }
}

#[test]
fn tokenizer_cases_equal_the_reference() {
    for preset in PRESETS {
        let (engine, oracle) = (open(preset), Oracle::load(preset));
        let cases = oracle.json["tokenizer"].as_array().unwrap();
        assert!(cases.len() > 20, "{preset}: cases");
        for case in cases {
            let text = case["text"].as_str().unwrap();
            let got = engine.tokenizer.encode(text).unwrap();
            assert_eq!(got, ids(&case["ids"]), "{preset}: {text:?}");
            assert_eq!(engine.tokenizer.decode(&got, false), case["decoded"].as_str().unwrap());
            assert_eq!(
                engine.tokenizer.decode(&got, true),
                case["decoded_skip_special"].as_str().unwrap()
            );
        }
    }
}

#[test]
fn mtp_logits_and_drafts_equal_the_reference() {
    for preset in PRESETS {
        let (engine, oracle) = (open(preset), Oracle::load(preset));
        assert!(engine.model.has_mtp(), "{preset}: MTP layer");
        let c = &engine.model.config;
        let (input, d) = (oracle.ids("/input_ids"), c.d_model);
        let hidden = forward(&engine, &input, 64).1[..(input.len() - 1) * d].to_vec();
        let n = input.len() - 1;
        let rows: Vec<Row> =
            (0..n).map(|pos| Row { seq: 0, pos, token: input[pos + 1], logits: true }).collect();
        let want = oracle.tensor("mtp.logits");
        for block in [n, 1, 7] {
            let mut cache = KvCache::new(c, KvType::F32);
            let (mut ws, mut out) = (Workspace::default(), Output::default());
            let (mut logits, mut trace) = (Vec::new(), Trace::default());
            for (rows, hidden) in rows.chunks(block).zip(hidden.chunks(block * d)) {
                let mut control = Control { cancel: None, observer: Some(&mut trace) };
                engine
                    .model
                    .forward_mtp(rows, hidden, &mut [&mut cache], &mut ws, &mut control, &mut out)
                    .unwrap();
                logits.extend_from_slice(&out.logits);
            }
            let diff = max_diff(&logits, &want);
            assert!(diff < TOLERANCE, "{preset} block {block}: MTP logits differ by {diff}");
            let mtp = &oracle.json["mtp"];
            for (pos, want) in mtp["router"].as_object().unwrap() {
                check_route(
                    &format!("{preset} MTP position {pos}"),
                    &trace.routes[&(c.n_layers, pos.parse().unwrap())],
                    want,
                );
            }
            for (pos, want) in mtp["indexer"].as_object().unwrap() {
                assert_eq!(
                    trace.keys[&(c.n_layers, pos.parse().unwrap())],
                    ids(want),
                    "{preset} MTP position {pos}"
                );
            }
        }
        // A chain of drafts after the prompt: the hidden state after the MTP norm is recycled.
        let prompt = oracle.ids("/prompt_ids").len();
        let mut cache = KvCache::new(c, KvType::F32);
        let (mut ws, mut out) = (Workspace::default(), Output::default());
        let mut run = |rows: &[Row], hidden: &[f32], out: &mut Output| {
            engine
                .model
                .forward_mtp(rows, hidden, &mut [&mut cache], &mut ws, &mut Control::default(), out)
                .unwrap();
        };
        run(&rows[..prompt - 1], &hidden[..(prompt - 1) * d], &mut out);
        let mut token = input[prompt];
        let mut state = hidden[(prompt - 1) * d..prompt * d].to_vec();
        let mut drafts = Vec::new();
        for step in 0..5 {
            run(&[Row { seq: 0, pos: prompt - 1 + step, token, logits: true }], &state, &mut out);
            token = argmax(&out.logits);
            drafts.push(token);
            state.clone_from(&out.hidden);
        }
        assert_eq!(drafts, oracle.ids("/mtp/chain/post_norm/ids"), "{preset}: drafts");
    }
}
