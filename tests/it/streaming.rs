//! Experts read from disk: the same bits as in memory, whatever the slots, and faults that stay where they belong.

use std::io;
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use glm::engine::{Engine, Options, Ram, Residency, UsageOptions};
use glm::experts::{Files, Io, Lookahead, Source, StreamOptions};
use glm::model::Cancelled;

use crate::cli::{json, run, stderr};
use crate::fixture::{Oracle, dir};

fn open(preset: &str, stream: StreamOptions) -> Engine {
    Engine::open(&dir(preset), &Options { stream, ..Options::default() }).unwrap()
}

/// Bits of the logits after every token: a prefill of half of them, then one at a time.
fn bits(engine: &Engine, ids: &[u32]) -> Vec<u32> {
    let mut session = engine.session();
    let mut all = Vec::new();
    session.prefill(engine, &ids[..ids.len() / 2], None, None).unwrap();
    for &id in &ids[ids.len() / 2..] {
        all.extend(session.logits().iter().map(|l| l.to_bits()));
        session.push(engine, id, None).unwrap();
    }
    all.extend(session.logits().iter().map(|l| l.to_bits()));
    all
}

#[test]
fn streamed_experts_give_the_same_bits_with_any_number_of_slots() {
    for preset in ["tiny", "fp8", "odd", "groups", "long"] {
        let ids = Oracle::load(preset).ids("/input_ids");
        let ids = &ids[..ids.len().min(24)];
        let held = Engine::open(&dir(preset), &Options::default()).unwrap();
        assert_eq!(held.plan.residency, Residency::Memory);
        let want = bits(&held, ids);
        let all = held.plan.routed * 2 + (1 << 20);
        let mut slots = Vec::new();
        for bytes in [1, all / 16, all / 6, all / 2, all * 8] {
            for io in [Io::Auto, Io::Buffered] {
                let engine = open(preset, StreamOptions { bytes, io, ..StreamOptions::default() });
                assert!(bits(&engine, ids) == want, "{preset}, {bytes} bytes, cold");
                assert!(bits(&engine, ids) == want, "{preset}, {bytes} bytes, warm");
                let stream = engine.model.stream().unwrap();
                let stats = stream.stats();
                assert!(stats.misses <= stats.loads, "{preset}, {bytes}: {stats:?}");
                assert!(stats.bytes > 0 && stats.service > Duration::ZERO, "{stats:?}");
                slots.push(stream.slots());
            }
        }
        slots.dedup();
        assert!(slots.len() >= 3 && slots[0] <= 2, "{preset}: slots {slots:?}");
    }
}

/// Errors and delays that the next reads meet.
static FAULTS: AtomicUsize = AtomicUsize::new(0);
static SHORT: AtomicBool = AtomicBool::new(false);
static SLOW_MS: AtomicUsize = AtomicUsize::new(0);
static ENDS: AtomicBool = AtomicBool::new(false);

struct Faulty(Files);

impl Source for Faulty {
    fn read_at(&self, file: usize, buffer: &mut [u8], at: u64, direct: bool) -> io::Result<usize> {
        std::thread::sleep(Duration::from_millis(SLOW_MS.load(Ordering::SeqCst) as u64));
        if ENDS.load(Ordering::SeqCst) {
            return Ok(0);
        }
        let left = FAULTS.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| n.checked_sub(1));
        if let Ok(left) = left {
            // EINTR is nobody's fault, EIO is.
            return Err(if left % 2 == 0 {
                io::Error::from(io::ErrorKind::Interrupted)
            } else {
                io::Error::other("input/output error (injected)")
            });
        }
        let short = if direct { 4096 } else { 7 };
        let n = if SHORT.load(Ordering::SeqCst) { buffer.len().min(short) } else { buffer.len() };
        self.0.read_at(file, &mut buffer[..n], at, direct)
    }

    fn direct(&self, file: usize) -> bool {
        self.0.direct(file)
    }
}

#[test]
fn faults_of_reads_are_errors_of_the_request_and_of_nothing_else() {
    let ids = Oracle::load("tiny").ids("/input_ids");
    let ids = &ids[..8];
    let want = bits(&Engine::open(&dir("tiny"), &Options::default()).unwrap(), ids);
    for io in [Io::Direct, Io::Buffered] {
        let between: fn(Files) -> Box<dyn Source> = |files| Box::new(Faulty(files));
        let stream =
            StreamOptions { bytes: 1, io, between: Some(between), ..StreamOptions::default() };
        let engine = open("tiny", stream);
        let fails = |why: &str| {
            let error = engine.session().prefill(&engine, ids, None, None).unwrap_err();
            let text = format!("{error:#}");
            for word in [why, "layer ", "expert ", ".safetensors", "byte"] {
                assert!(text.contains(word), "no {word:?} in: {text}");
            }
        };

        SHORT.store(true, Ordering::SeqCst);
        assert!(bits(&engine, ids) == want, "short reads");
        SHORT.store(false, Ordering::SeqCst);

        // One interrupted read and one that fails, then everything works.
        FAULTS.store(2, Ordering::SeqCst);
        assert!(bits(&engine, ids) == want, "one failure");
        assert!(engine.model.stream().unwrap().stats().retries > 0);

        FAULTS.store(usize::MAX / 2, Ordering::SeqCst);
        fails("injected");
        FAULTS.store(0, Ordering::SeqCst);
        assert!(bits(&engine, ids) == want, "after errors");

        ENDS.store(true, Ordering::SeqCst);
        fails("truncated while in use");
        ENDS.store(false, Ordering::SeqCst);
        assert!(bits(&engine, ids) == want, "after a file that ended");

        // A slow drive: Ctrl-C does not wait for it.
        SLOW_MS.store(400, Ordering::SeqCst);
        let (cancel, mut session, started) =
            (AtomicBool::new(false), engine.session(), Instant::now());
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(30));
                cancel.store(true, Ordering::SeqCst);
            });
            let error = session.prefill(&engine, ids, Some(&cancel), None).unwrap_err();
            assert!(error.is::<Cancelled>(), "{error:#}");
        });
        assert!(started.elapsed() < Duration::from_millis(350), "{:?}", started.elapsed());
        SLOW_MS.store(0, Ordering::SeqCst);
        assert!(bits(&engine, ids) == want, "after an interrupt");
    }
}

/// A budget that holds everything but experts makes them stream; less than that is refused with what would do.
#[test]
fn the_budget_decides_what_is_streamed_and_what_is_refused() {
    let ids = Oracle::load("tiny").ids("/input_ids");
    let open = |ram: u64| {
        let options = Options { ram: Some(Ram::Bytes(ram)), ctx: Some(64), ..Options::default() };
        Engine::open(&dir("tiny"), &options)
    };
    let all = open(1 << 30).unwrap();
    assert_eq!(all.plan.residency, Residency::Memory);
    assert!(all.plan.total() <= all.plan.ram);
    let some = open(all.plan.total() - 1).unwrap();
    assert_eq!(some.plan.residency, Residency::Streamed);
    assert!(some.plan.total() <= some.plan.ram);
    assert!(some.model.stream().unwrap().slots() < some.plan.n_routed);
    assert!(bits(&some, &ids[..8]) == bits(&all, &ids[..8]));
    let error = format!("{:#}", open(1 << 20).err().unwrap());
    for word in ["do not fit into", "resident weights", "attention cache", "scratch", "--ram"] {
        assert!(error.contains(word), "no {word:?} in: {error}");
    }
}

/// A directory that is removed at the end.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("glm-it-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    /// A copy of a fixture.
    fn copy_of(preset: &str, name: &str) -> Self {
        let copy = Self::new(name);
        for entry in std::fs::read_dir(dir(preset)).unwrap() {
            let entry = entry.unwrap();
            if entry.file_type().unwrap().is_file() {
                std::fs::copy(entry.path(), copy.0.join(entry.file_name())).unwrap();
            }
        }
        copy
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[test]
fn looking_ahead_changes_no_bit_and_its_guesses_are_counted() {
    for preset in ["tiny", "odd", "long"] {
        let ids = Oracle::load(preset).ids("/input_ids");
        let ids = &ids[..ids.len().min(24)];
        let held = Engine::open(&dir(preset), &Options::default()).unwrap();
        let (want, all) = (bits(&held, ids), held.plan.routed * 2 + (1 << 20));
        for bytes in [1, all / 6, all / 3, all * 8] {
            for lookahead in Lookahead::ALL {
                let engine =
                    open(preset, StreamOptions { bytes, lookahead, ..StreamOptions::default() });
                for _ in 0..3 {
                    assert!(bits(&engine, ids) == want, "{preset}, {bytes} bytes, {lookahead}");
                }
                let stats = engine.model.stream().unwrap().stats();
                let off = lookahead == Lookahead::Off;
                assert_eq!(stats.recall().is_none(), off, "{preset}: {stats:?}");
                assert!(stats.misses + stats.ahead_loads <= stats.loads, "{stats:?}");
                assert!(stats.recall().is_none_or(|r| (0.1..=1.0).contains(&r)), "{stats:?}");
            }
        }
    }
}

#[test]
fn a_history_pins_the_hottest_and_goes_on_from_run_to_run() {
    let scratch = Scratch::new("usage");
    let file = scratch.0.join("usage.txt");
    let ids = Oracle::load("tiny").ids("/input_ids");
    let held = Engine::open(&dir("tiny"), &Options::default()).unwrap();
    let (want, all) = (bits(&held, &ids), held.plan.routed * 2);
    let open = |bytes: u64| {
        let usage = Some(UsageOptions { file: Some(file.clone()), decay: 1.0 });
        let stream = StreamOptions { bytes, ..StreamOptions::default() };
        Engine::open(&dir("tiny"), &Options { stream, usage, ..Options::default() })
    };
    let total = || -> u64 {
        let text = std::fs::read_to_string(&file).unwrap();
        let last = |l: &str| l.split(' ').next_back().unwrap().parse::<u64>().unwrap();
        text.lines().filter(|l| !l.starts_with('-')).map(last).sum()
    };

    let engine = open(all / 3).unwrap();
    assert!(bits(&engine, &ids) == want);
    assert_eq!(engine.model.stream().unwrap().pins(), 0);
    engine.save_usage().unwrap();
    let c = &engine.model.config;
    let sparse = (0..c.n_layers).filter(|&i| c.is_sparse(i)).count();
    let chosen = (ids.len() * sparse * c.top_k) as u64;
    assert_eq!(total(), chosen);
    engine.save_usage().unwrap();
    assert_eq!(total(), chosen, "what was saved is not saved again");

    // One expert of each layer is hot.
    let (experts, layers) = (c.n_experts, c.n_layers);
    let first = (0..layers).find(|&i| c.is_sparse(i)).unwrap();
    let hot: String = (first..layers).map(|l| format!("{l} 1 300000\n")).collect();
    std::fs::write(&file, format!("-1 {layers} {experts}\n-2 1 3815245270\n{hot}")).unwrap();
    for bytes in [1, all / 3, all * 4] {
        let engine = open(bytes).unwrap();
        for _ in 0..2 {
            assert!(bits(&engine, &ids) == want, "{bytes} bytes, pinned");
        }
        let stream = engine.model.stream().unwrap();
        let stats = stream.stats();
        assert!(stream.pins() <= stream.slots() / 2, "{} of {}", stream.pins(), stream.slots());
        assert_eq!(stats.pin_hits > 0, bytes > 1, "{bytes} bytes: {stats:?}");
    }

    std::fs::write(&file, "-1 7 7\n").unwrap();
    let error = format!("{:#}", open(all / 3).err().unwrap());
    assert!(error.contains("usage.txt: line 1: a history of 7 layers of 7"), "{error}");
}

#[test]
fn mirrors_share_the_reads_and_may_vanish() {
    static WARNINGS: Mutex<Vec<String>> = Mutex::new(Vec::new());
    let copy = Scratch::copy_of("tiny", "mirror");
    let ids = Oracle::load("tiny").ids("/input_ids");
    let want = bits(&Engine::open(&dir("tiny"), &Options::default()).unwrap(), &ids);
    let stream = |mirrors: Vec<PathBuf>, io| StreamOptions {
        bytes: 1,
        io,
        mirrors,
        warn: |text| WARNINGS.lock().unwrap().push(text.to_owned()),
        ..StreamOptions::default()
    };
    for io in [Io::Direct, Io::Buffered] {
        let engine = open("tiny", stream(vec![copy.0.clone(), dir("tiny")], io));
        assert!(bits(&engine, &ids) == want, "three drives");
    }
    assert_eq!(WARNINGS.lock().unwrap().len(), 0);

    // The mirror ends in the middle of a run: one warning, the same bits, nobody's error.
    let engine = open("tiny", stream(vec![copy.0.clone()], Io::Buffered));
    let shard = std::fs::read_dir(&copy.0).unwrap().map(|e| e.unwrap().path());
    let shards: Vec<PathBuf> =
        shard.filter(|p| p.extension().is_some_and(|e| e == "safetensors")).collect();
    for shard in &shards {
        std::fs::File::options().write(true).open(shard).unwrap().set_len(0).unwrap();
    }
    assert!(bits(&engine, &ids) == want, "a mirror that vanished");
    let warnings = std::mem::take(&mut *WARNINGS.lock().unwrap());
    assert_eq!(warnings.len(), 1, "{warnings:?}");
    assert!(warnings[0].contains("no longer used") && warnings[0].contains("ends at byte"));

    // Now it is no mirror any more.
    let options = Options { stream: stream(vec![copy.0.clone()], Io::Auto), ..Options::default() };
    let error = format!("{:#}", Engine::open(&dir("tiny"), &options).err().unwrap());
    for word in ["mirror ", ".safetensors", "0 bytes, expected", "copy it again"] {
        assert!(error.contains(word), "no {word:?} in: {error}");
    }
    shards.iter().for_each(|s| std::fs::remove_file(s).unwrap());
    let error = format!("{:#}", Engine::open(&dir("tiny"), &options).err().unwrap());
    assert!(error.contains("cannot open"), "{error}");
}

/// A budget is an upper bound of what the process takes, on a model of real layer shapes.
#[test]
fn memory_stays_within_the_budget() {
    let scratch = Scratch::new("budget");
    let model = scratch.0.join("model");
    let model = model.to_str().unwrap();
    let shape = ["--preset", "glm-5.2", "--layers", "3", "--dense", "1", "--experts", "24"];
    let made = run(&[&["synth"][..], &shape, &["--vocab", "4096", "-q", model]].concat());
    assert!(made.status.success(), "{}", stderr(&made));
    let plan = json(&run(&["plan", model, "--ctx", "64", "--no-measure", "--json"]));
    let bytes = |key: &str| plan.pointer(key).unwrap().as_u64().unwrap();
    // Room for a quarter of the experts.
    let ram = bytes("/total_bytes") - bytes("/experts/of_bytes") / 4 * 3;
    let ram_gb = (ram as f64 / 1e9).to_string();
    let lengths = ["--prompt", "40", "--gen", "6", "--reps", "1", "--ctx", "64"];
    let bench = ["bench", "model", "--model", model, "--no-usage", "--json", "--ram", &ram_gb];
    let v = json(&run(&[&bench[..], &lengths].concat()));
    let peak = v["peak_rss_bytes"].as_u64().unwrap();
    assert!(v["experts"]["misses"].as_u64().unwrap() > 0, "{v}");
    assert!(peak <= ram, "{peak} bytes were taken of {ram}: {v}");
    assert!(peak > ram / 2, "the bound is a bound of something: {peak} of {ram}");
}
