//! The same bits on every kind of machine: each compares its logits with digests that are written down here, so all
//! machines that pass agree with each other.

use std::fmt::Write as _;

use glm::engine::{Engine, Options};
use glm::kernels::{Activations, Isa};
use glm::model::kv::KvType;

use crate::fixture::{argmax, dir};

/// A model, the format its weights are quantized to while loading (empty: as stored), and the digests of its logits in
/// the modes of [`MODES`].
type Line = (&'static str, &'static str, [u64; 2]);

/// The default, and the exact mode.
const MODES: [(Activations, KvType); 2] =
    [(Activations::Q8, KvType::F16), (Activations::F32, KvType::F32)];

/// Tokens of the first pass: more than the `index_topk` of every fixture.
const PREFILL: usize = 40;
/// Passes of one token after it.
const DECODE: usize = 6;

/// A change that is meant to change arithmetic pastes the table that the failing test prints. Formats that no fixture
/// is stored in come from quantizing; groups of 48 and 96 cross the activation groups.
const DIGESTS: &[Line] = &[
    ("built-in", "", [0xe864e4115696b359, 0xbf87a75b9a0325d4]),
    ("tiny", "", [0xe39b39229e3235f3, 0x75e40d1ec0dac114]),
    ("odd", "", [0xd29793b1ab825e44, 0xcddbcee1dc19cee5]),
    ("groups", "", [0x4f47227ce8198563, 0x11e96db4a820bd3e]),
    ("fp8", "", [0x5ab137f165f1ad40, 0xc69b80afec3767d0]),
    ("long", "", [0xa9ed0c21410eadf2, 0x853b1ba676b40551]),
    ("tiny", "fp8", [0x38b3cba32b6304f6, 0xea6a095186e986f6]),
    ("fp8", "int8", [0xc81478b48705c554, 0x4cf078c79f614348]),
    ("fp8", "int4-row", [0xe54b8bdcc467eb13, 0x34bebc687b5d43cb]),
    ("tiny", "int4-g16", [0x1d173ace1d6a9495, 0xbb58682fdf3a0d1e]),
    ("groups", "int4-g32", [0xe29bae201c09d836, 0xb23d985d1fe10e16]),
    ("odd", "int4-g48", [0x530fe6f0d12d9e2f, 0x10f65e2c0565174e]),
    ("odd", "int4-g64", [0x627e78dd10e8a2fc, 0x3853afc5691a1b66]),
    ("fp8", "int4-g96", [0x7e454eba05aabccf, 0x13e797f14e278528]),
    ("fp8", "int4-g128", [0x1fd1949a5072e1e0, 0x039dae89dfc8b33f]),
    ("fp8", "int3", [0x37ec5b1c612f4940, 0xa6737b4b5b1edcfa]),
    ("fp8", "int2", [0x58a3a9fcc0ac218d, 0x136737a6505e02b1]),
];

/// 64-bit FNV-1a.
struct Fnv(u64);

impl Fnv {
    fn add(&mut self, logits: &[f32]) {
        for byte in logits.iter().flat_map(|v| v.to_bits().to_le_bytes()) {
            self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }
}

/// Digest of the logits after every token of a fixed prompt and of its greedy continuation.
fn digest(isa: Isa, model: &str, quantize: &str, (activations, kv): (Activations, KvType)) -> u64 {
    let quantize = (!quantize.is_empty()).then(|| quantize.parse().unwrap());
    let options = Options {
        isa: Some(isa),
        threads: Some(2),
        activations,
        kv,
        quantize,
        ..Options::default()
    };
    let engine = match model {
        "built-in" => Engine::builtin(&options),
        preset => Engine::open(&dir(preset), &options),
    }
    .unwrap_or_else(|e| panic!("{model} {quantize:?}: {e:#}"));

    let vocab = engine.model.config.vocab;
    let ids: Vec<u32> = (0..PREFILL).map(|i| ((17 * i * i + 5 * i + 3) % vocab) as u32).collect();
    let (mut fnv, mut next) = (Fnv(0xcbf2_9ce4_8422_2325), 0);
    let mut session = engine.session();
    let each = |_, logits: &[f32]| {
        fnv.add(logits);
        next = argmax(logits);
        Ok(())
    };
    session.score(&engine, &ids, 0, each, None).unwrap();
    for _ in 0..DECODE {
        session.push(&engine, next, None).unwrap();
        fnv.add(session.logits());
        next = argmax(session.logits());
    }
    fnv.0
}

fn hex([a, b]: [u64; 2]) -> String {
    format!("[{a:#018x}, {b:#018x}]")
}

#[test]
fn every_machine_computes_the_digests_in_the_table() {
    let isas = Isa::available();
    println!("instruction sets of this CPU: {isas:?}");
    let (mut portable, mut wrong) = (String::new(), String::new());
    for &(model, quantize, want) in DIGESTS {
        for &isa in &isas {
            let got = MODES.map(|mode| digest(isa, model, quantize, mode));
            if isa == Isa::Portable {
                writeln!(portable, "    ({model:?}, {quantize:?}, {}),", hex(got)).unwrap();
            }
            if got != want {
                writeln!(wrong, "{isa}: {model} {quantize} {}, not {}", hex(got), hex(want))
                    .unwrap();
            }
        }
    }
    assert!(
        wrong.is_empty(),
        "digests differ\n{wrong}\nas the portable kernels compute it here:\n\nconst DIGESTS: &[Line] = &[\n{portable}];\n"
    );
}
