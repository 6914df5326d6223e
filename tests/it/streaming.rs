//! Experts read from disk: the same bits as in memory, whatever the slots, and faults that stay where they belong.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use glm::engine::{Engine, Options, Ram, Residency};
use glm::experts::{Files, Io, Source, StreamOptions};
use glm::model::Cancelled;

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
                assert_eq!(stats.misses, stats.loads, "{preset}, {bytes}: {stats:?}");
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
