//! Valid model directories with one file damaged at random: opening and running them may fail, but
//! never panics.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use glm::engine::{Engine, Options};
use glm::kernels::Format;
use glm::template::RenderOptions;

use crate::faults::Draft;

const CASES: u64 = 2000;
const SIDE_FILES: [&str; 4] =
    ["config.json", "tokenizer.json", "generation_config.json", "tokenizer_config.json"];
/// What replaces a number in JSON.
const NUMBERS: [&str; 12] = [
    "0",
    "-1",
    "1",
    "7",
    "255",
    "65536",
    "1048576",
    "2147483648",
    "18446744073709551615",
    "1e308",
    "null",
    "\"1\"",
];

/// splitmix64: the same cases in every run.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n.max(1) as u64) as usize
    }
}

/// Damages `bytes` once; most damage falls into the first `head` bytes.
fn damage(bytes: &mut Vec<u8>, head: usize, rng: &mut Random) {
    let reach = if rng.below(5) == 0 { bytes.len() } else { head.min(bytes.len()) };
    let (at, len) = (rng.below(reach), 1 + rng.below(24));
    let end = (at + len).min(bytes.len());
    match rng.below(8) {
        0 => {
            for _ in 0..1 + rng.below(8) {
                let at = rng.below(reach);
                bytes[at] ^= 1 << rng.below(8);
            }
        }
        1 => bytes.truncate(at),
        2 => bytes.extend((0..len).map(|_| rng.next() as u8)),
        3 => drop(bytes.drain(at..end)),
        4 => {
            let from = rng.below(reach);
            let piece = bytes[from..(from + len).min(bytes.len())].to_vec();
            drop(bytes.splice(at..end, piece));
        }
        // A number of the text becomes another one.
        _ => {
            let digit = |b: &u8| b.is_ascii_digit();
            let Some(start) = bytes[at..reach].iter().position(digit).map(|i| at + i) else {
                return;
            };
            let rest = &bytes[start..];
            let n = rest.iter().position(|b| !digit(b)).unwrap_or(rest.len());
            let number = NUMBERS[rng.below(NUMBERS.len())].bytes();
            drop(bytes.splice(start..start + n, number));
        }
    }
}

/// Opens the directory and uses what opens. Whether anything ran.
fn exercise(dir: &Path, quantize: Option<Format>) -> bool {
    let options = Options { threads: Some(1), quantize, ..Options::default() };
    let Ok(engine) = Engine::open(dir, &options) else { return false };
    let _ = engine.tokenizer.encode("Hello, <|user|> 1234 \u{fdd0}");
    let _ = engine.encode_turn(None, "a<b", &RenderOptions::default());
    let _ = engine.encode_raw("x", true);
    engine.session().prefill(&engine, &[1, 2, 3, 4], None, None).is_ok()
}

#[test]
fn damaged_files_never_panic() {
    let int4 = Draft::container(Format::Int4 { group: 32 });
    let drafts = [Draft::of("tiny"), Draft::container(Format::Int8), int4, Draft::of("fp8")];
    let mut ran = 0;
    for draft in &drafts {
        draft.write();
        assert!(exercise(draft.path(), None), "the undamaged model runs");
    }
    for case in 0..CASES {
        let mut rng = Random(case);
        let draft = &drafts[rng.below(drafts.len())];
        let shards: Vec<&str> = draft.files.keys().map(String::as_str).collect();
        let (name, shard) = match rng.below(8) {
            i @ 0..4 => (SIDE_FILES[i], false),
            _ => (shards[rng.below(shards.len())], true),
        };
        let path = draft.path().join(name);
        let original = std::fs::read(&path).unwrap();
        let mut bytes = original.clone();
        let header = original.first_chunk().map_or(0, |n| u64::from_le_bytes(*n) as usize);
        let head = if shard { 8 + header } else { original.len() };
        for _ in 0..1 + rng.below(3) {
            damage(&mut bytes, head, &mut rng);
            // A length that fits again, so that the damage behind it is reached.
            if shard && rng.below(2) == 0 && bytes.len() > original.len() - head + 8 {
                let header = bytes.len() - (original.len() - head) - 8;
                bytes[..8].copy_from_slice(&(header as u64).to_le_bytes());
            }
        }
        std::fs::write(&path, &bytes).unwrap();
        let quantize = (rng.below(16) == 0).then_some(Format::Int4 { group: 64 });
        let outcome = catch_unwind(AssertUnwindSafe(|| exercise(draft.path(), quantize)));
        std::fs::write(&path, &original).unwrap();
        match outcome {
            Ok(ok) => ran += usize::from(ok),
            Err(_) => panic!("case {case}: {name} of model {:?} panics", draft.path()),
        }
    }
    println!("{ran} of {CASES} damaged models still ran");
    // Damage that is always found at once would test nothing behind the parsers.
    assert!(ran > 100, "{ran} models ran");
}
