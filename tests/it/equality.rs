//! The same bits everywhere: instruction sets, thread counts and batch compositions, for every weight format.

use glm::engine::{Engine, Options, Ram};
use glm::kernels::{Activations, Format, Isa};
use glm::model::kv::{KvCache, KvType};
use glm::model::{Control, Output, Row, Workspace};

use crate::fixture::{Oracle, dir, root};

/// How rows are given to the model.
#[derive(Clone, Copy, Debug)]
enum Batch {
    /// So many rows of one sequence at a time.
    Blocks(usize),
    /// Three sequences, the first is the one that counts, advancing by 2, 1 and 3 rows.
    Shared,
}

/// Bits of the logits of every position of `ids`.
fn logits(engine: &Engine, ids: &[u32], batch: Batch) -> Vec<u32> {
    let c = &engine.model.config;
    let steps: &[usize] = match batch {
        Batch::Blocks(n) => &[n],
        Batch::Shared => &[2, 1, 3],
    };
    let mut caches: Vec<KvCache> = steps.iter().map(|_| KvCache::new(c, KvType::F16)).collect();
    let (mut ws, mut out, mut bits) = (Workspace::default(), Output::default(), Vec::new());
    while bits.len() < ids.len() * c.vocab {
        let mut rows = Vec::new();
        for (seq, &step) in steps.iter().enumerate() {
            let at = caches[seq].len();
            rows.extend((at..(at + step).min(ids.len())).map(|pos| Row {
                seq,
                pos,
                token: ids[(pos + 3 * seq) % ids.len()],
                logits: seq == 0,
            }));
        }
        let mut views: Vec<&mut KvCache> = caches.iter_mut().collect();
        engine
            .model
            .forward(&rows, &mut views, &mut ws, &mut Control::default(), &mut out)
            .unwrap();
        bits.extend(out.logits.iter().map(|v| v.to_bits()));
    }
    bits
}

#[test]
fn logits_are_the_same_bits_everywhere() {
    let g64 = Format::Int4 { group: 64 };
    // (fixture, format that it is quantized to while loading)
    let versions = [
        ("tiny", None),
        ("fp8", None),
        ("fp8", Some(Format::Int8)),
        ("fp8", Some(Format::Int4 { group: 0 })),
        ("fp8", Some(g64)),
        ("fp8", Some(Format::Int3)),
        ("fp8", Some(Format::Int2)),
        ("odd", Some(g64)),
    ];
    let isas = Isa::available();
    println!("instruction sets of this CPU: {isas:?}");
    for (preset, quantize) in versions {
        let ids = Oracle::load(preset).ids("/input_ids");
        for activations in [Activations::Q8, Activations::F32] {
            let open = |isa, threads| {
                let options = Options {
                    isa: Some(isa),
                    threads: Some(threads),
                    quantize,
                    activations,
                    // Experts as stored, too: results do not depend on how weights lie in memory.
                    ram: (threads == 2).then_some(Ram::Bytes(1)),
                    mapped: true,
                    ..Options::default()
                };
                Engine::open(&dir(preset), &options).unwrap()
            };
            let want = logits(&open(Isa::Portable, 1), &ids, Batch::Blocks(64));
            assert!(want.iter().any(|&b| b != 0), "logits are not all zero");
            for &isa in &isas {
                for threads in [1, 2, 3, 7] {
                    let engine = open(isa, threads);
                    for batch in
                        [Batch::Blocks(1), Batch::Blocks(7), Batch::Blocks(64), Batch::Shared]
                    {
                        let same = logits(&engine, &ids, batch) == want;
                        assert!(
                            same,
                            "{preset} {quantize:?} {activations:?} {isa} {threads} threads {batch:?}: bits differ"
                        );
                    }
                }
            }
        }
    }
}

/// The small model has the shapes that kernels like best; a long prompt also crosses its `index_topk` of 256.
#[test]
fn the_built_in_model_gives_the_same_bits_everywhere() {
    let text = std::fs::read_to_string(root().join("models/tiny-bf16/valid/stories.txt")).unwrap();
    let open = |isa, threads| {
        Engine::builtin(&Options { isa: Some(isa), threads: Some(threads), ..Options::default() })
            .unwrap()
    };
    let reference = open(Isa::best(), 1);
    let ids = reference.tokenizer.encode_text(&text).unwrap()[..300].to_vec();
    let want = logits(&reference, &ids, Batch::Blocks(300));
    for isa in Isa::available() {
        let portable = isa == Isa::Portable;
        for threads in if portable { vec![2] } else { vec![1, 2, 3, 7] } {
            let engine = open(isa, threads);
            for batch in if portable {
                vec![Batch::Blocks(64)]
            } else {
                vec![Batch::Blocks(1), Batch::Blocks(7), Batch::Shared]
            } {
                assert!(
                    logits(&engine, &ids, batch) == want,
                    "{isa} {threads} threads {batch:?}: bits differ"
                );
            }
        }
    }
}

/// Loading with `--quantize` and converting first are the same thing.
#[test]
fn quantizing_while_loading_equals_converting() {
    for (preset, format) in [
        ("tiny", Format::Int8),
        ("odd", Format::Int4 { group: 64 }),
        ("fp8", Format::Int3),
        ("groups", Format::Fp8),
    ] {
        let tmp = tempfile::tempdir().unwrap();
        let dst = tmp.path().join("out");
        let status = std::process::Command::new(env!("CARGO_BIN_EXE_glm"))
            .args(["convert", "--quiet", "--to", &format.to_string()])
            .args([&dir(preset), &dst])
            .status()
            .unwrap();
        assert!(status.success(), "{preset} {format}");
        let ids = Oracle::load(preset).ids("/input_ids");
        let converted = Engine::open(&dst, &Options::default())
            .unwrap_or_else(|e| panic!("{preset} {format}: {e:#}"));
        let loaded =
            Engine::open(&dir(preset), &Options { quantize: Some(format), ..Options::default() })
                .unwrap();
        let same =
            logits(&converted, &ids, Batch::Blocks(64)) == logits(&loaded, &ids, Batch::Blocks(64));
        assert!(same, "{preset} {format}: bits differ");
    }
}
