//! Sessions and generation: what a front end relies on.

use std::sync::atomic::AtomicBool;

use glm::engine::{Channel, Engine, Event, Finish, Generation, Request};
use glm::model::Cancelled;
use glm::sample::SampleParams;
use serde_json::Value;

use crate::fixture::{Oracle, PRESETS, dir, exact, ids, open};

fn greedy(prompt: Vec<u32>, max_tokens: usize) -> Request {
    Request {
        prompt,
        params: SampleParams { temperature: 0.0, ..SampleParams::default() },
        max_tokens,
        stop: Vec::new(),
        ignore_eos: false,
        logprobs: None,
        chat: true,
    }
}

/// Ids, text and end of a generation.
fn generate(engine: &Engine, request: Request) -> (Vec<u32>, String, Finish) {
    let go = AtomicBool::new(false);
    let mut session = engine.session();
    session.prefill(engine, &request.prompt, None, None).unwrap();
    let mut generation = Generation::new(engine, &mut session, request, &go).unwrap();
    let mut text = String::new();
    for event in &mut generation {
        if let Event::Text(channel, piece) = event.unwrap() {
            assert_eq!(channel, Channel::Answer);
            text += &piece;
        }
    }
    (generation.ids.clone(), text, generation.finish.unwrap())
}

#[test]
fn generated_text_equals_the_reference() {
    for preset in PRESETS {
        let (engine, oracle) = (open(preset), Oracle::load(preset));
        let want = &oracle.json["text"];
        let request = Request { ignore_eos: true, ..greedy(ids(&want["prompt_ids"]), 16) };
        let (got, text, finish) = generate(&engine, request);
        assert_eq!(got, ids(&want["greedy_ids"]), "{preset}");
        assert_eq!(finish, Finish::Length);
        // Special tokens have no text in an answer.
        assert_eq!(text, engine.tokenizer.decode(&got, true), "{preset}");
    }
}

/// Every id of either config ends the answer and is not printed.
#[test]
fn each_end_of_turn_id_of_both_configs_ends_the_answer() {
    let oracle = Oracle::load("tiny");
    let answer = ids(&oracle.json["text"]["greedy_ids"]);
    for (file, other) in
        [("config.json", "generation_config.json"), ("generation_config.json", "config.json")]
    {
        for n in [0, 2] {
            let tmp = tempfile::tempdir().unwrap();
            for entry in std::fs::read_dir(dir("tiny")).unwrap() {
                let path = entry.unwrap().path();
                if !path.ends_with("oracle.safetensors") {
                    std::fs::copy(&path, tmp.path().join(path.file_name().unwrap())).unwrap();
                }
            }
            let set = |name: &str, eos: Value| {
                let path = tmp.path().join(name);
                let mut v: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
                v["eos_token_id"] = eos;
                std::fs::write(&path, v.to_string()).unwrap();
            };
            set(other, 280.into());
            set(file, serde_json::json!([281, answer[n]]));
            let engine = Engine::open(tmp.path(), &exact()).unwrap();
            let (got, text, finish) =
                generate(&engine, greedy(ids(&oracle.json["text"]["prompt_ids"]), 16));
            assert_eq!((got.as_slice(), finish), (&answer[..=n], Finish::Stop), "{file} {n}");
            assert_eq!(
                text,
                engine.tokenizer.decode(&answer[..n], true),
                "{file} {n}: not printed"
            );
        }
    }
}

#[test]
fn a_stop_text_ends_the_answer_wherever_tokens_cut_it() {
    let engine = Engine::builtin(&glm::engine::Options::default()).unwrap();
    let options =
        glm::template::RenderOptions { enable_thinking: Some(false), ..Default::default() };
    let prompt =
        engine.encode_turn(None, "Tell me a story about a fox and a lantern.", &options).unwrap();
    let (_, full, _) = generate(&engine, greedy(prompt.clone(), 40));
    let ends: Vec<usize> = full.char_indices().map(|(i, _)| i).skip(1).collect();
    for (&start, len) in ends.iter().zip([1, 2, 3, 5, 8, 13].into_iter().cycle()).step_by(5) {
        let Some(stop) = full.get(start..start + len) else { continue };
        let request =
            Request { stop: vec!["§".into(), stop.into()], ..greedy(prompt.clone(), 40) };
        let (_, text, finish) = generate(&engine, request);
        assert_eq!(
            (text.as_str(), finish),
            (&full[..full.find(stop).unwrap()], Finish::Stop),
            "{stop:?}"
        );
    }
}

#[test]
fn a_cancelled_or_failed_pass_leaves_the_session_as_it_was() {
    let engine = open("long");
    let input = Oracle::load("long").ids("/input_ids");
    let mut fresh = engine.session();
    fresh.prefill(&engine, &input[..80], None, None).unwrap();
    let want = fresh.logits().to_vec();

    let mut session = engine.session();
    session.prefill(&engine, &input[..50], None, None).unwrap();
    let stop = AtomicBool::new(true);
    let e = session.prefill(&engine, &input[50..80], Some(&stop), None).unwrap_err();
    assert!(e.is::<Cancelled>() && session.tokens() == &input[..50]);
    let e = session.prefill(&engine, &[input[50], 99_999], None, None).unwrap_err();
    assert!(e.to_string().contains("99999") && session.tokens() == &input[..50], "{e}");
    session.prefill(&engine, &input[50..90], None, None).unwrap();
    session.rewind(70);
    session.prefill(&engine, &input[70..80], None, None).unwrap();
    assert_eq!(
        session.logits(),
        want,
        "the same bits after a cancelled pass, a failed one and a rewind"
    );
}
