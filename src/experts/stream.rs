//! Experts that are read from disk when a layer wants them: opening, and the batches that layers work through.
#![forbid(unsafe_code)]

use std::ops::Range;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::ahead::{Lookahead, Trial};
use super::drives::{Drives, Files, Source, Warn, read_pages};
use super::loader::Loader;
use super::policy::PolicyKind;
use super::record::{Loaded, Record, Records};
use super::slots::{Class, State};
use super::usage::{Shape, Usage};
use super::{GatedMlp, Interrupted, Library, Name};
use crate::store::huge_pages;

/// How long a wait for a read lasts before the cancel flag is looked at.
const PATIENCE: Duration = Duration::from_millis(50);
/// Choices from which a history is one, and from which it is trusted fully.
const HISTORY: (u64, u64) = (5_000, 200_000);
/// The part of the slots that a trusted history may pin.
const PINNED: f64 = 0.5;
/// Passes between reviews of what is pinned.
const REVIEW: u64 = 64;

/// How experts are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Io {
    /// Whichever of the other two is faster, measured on two experts.
    #[default]
    Auto,
    /// Past the system's cache.
    Direct,
    /// Through the system's cache.
    Buffered,
}

/// How experts are streamed.
#[derive(Clone, Debug)]
pub struct StreamOptions {
    /// Bytes that slots may take.
    pub bytes: u64,
    /// Slots, instead of as many as `bytes` allow; each size has its part, rounded down.
    pub slots: Option<usize>,
    /// How to read.
    pub io: Io,
    /// Reading threads.
    pub readers: usize,
    /// Which expert to give up.
    pub policy: PolicyKind,
    /// Whether decode looks ahead.
    pub lookahead: Lookahead,
    /// Directories with copies of the model on other drives.
    pub mirrors: Vec<PathBuf>,
    /// How often experts were chosen before; the hottest are pinned.
    pub history: Option<Usage>,
    /// Told about what goes wrong and is survived.
    pub warn: Warn,
    /// What stands between the files and the store; only tests have something there.
    pub between: Option<fn(Files) -> Box<dyn Source>>,
}

impl Default for StreamOptions {
    fn default() -> Self {
        Self {
            bytes: 0,
            slots: None,
            io: Io::Auto,
            readers: 2,
            policy: PolicyKind::default(),
            lookahead: Lookahead::default(),
            mirrors: Vec::new(),
            history: None,
            warn: |_| {},
            between: None,
        }
    }
}

/// What was read and waited for, since the store was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Stats {
    /// Wanted experts that were in a slot.
    pub hits: u64,
    /// Of these, pinned experts.
    pub pin_hits: u64,
    /// Of these, experts that read-ahead had brought.
    pub ahead_hits: u64,
    /// Wanted experts that had to be read.
    pub misses: u64,
    /// Of these, experts that read-ahead was just reading.
    pub ahead_late: u64,
    /// Wanted experts of layers that were guessed before, and those of them that the guess named.
    pub guessed: u64,
    /// See `guessed`.
    pub foreseen: u64,
    /// Experts read.
    pub loads: u64,
    /// Of these, by read-ahead.
    pub ahead_loads: u64,
    /// Bytes read.
    pub bytes: u64,
    /// Time that reading threads spent in reads, summed over threads.
    pub service: Duration,
    /// Time that computing waited for reads.
    pub wait: Duration,
    /// Passes through the model.
    pub passes: u64,
    /// Reads that failed and succeeded when tried again, or failed twice.
    pub retries: u64,
}

impl Stats {
    /// What came after `earlier`.
    pub fn since(&self, earlier: &Self) -> Self {
        Self {
            hits: self.hits - earlier.hits,
            pin_hits: self.pin_hits - earlier.pin_hits,
            ahead_hits: self.ahead_hits - earlier.ahead_hits,
            ahead_late: self.ahead_late - earlier.ahead_late,
            guessed: self.guessed - earlier.guessed,
            foreseen: self.foreseen - earlier.foreseen,
            misses: self.misses - earlier.misses,
            loads: self.loads - earlier.loads,
            ahead_loads: self.ahead_loads - earlier.ahead_loads,
            bytes: self.bytes - earlier.bytes,
            service: self.service.saturating_sub(earlier.service),
            wait: self.wait.saturating_sub(earlier.wait),
            passes: self.passes - earlier.passes,
            retries: self.retries - earlier.retries,
        }
    }

    /// Share of wanted experts that were in a slot.
    pub fn hit_rate(&self) -> f64 {
        self.hits as f64 / (self.hits + self.misses).max(1) as f64
    }

    /// Share of wanted experts that the guess before had named; `None` when nothing was guessed.
    pub fn recall(&self) -> Option<f64> {
        (self.guessed > 0).then(|| self.foreseen as f64 / self.guessed as f64)
    }
}

/// The bytes of one slot of each layer: its largest expert. 0 for a layer without routed experts, or one whose experts
/// are in no file.
pub fn slot_bytes(layers: &[Vec<GatedMlp>]) -> Vec<usize> {
    let none = || layers.iter().map(|_| 0).collect();
    Records::of(layers).map_or_else(none, |records| largest(&records))
}

fn largest(records: &Records) -> Vec<usize> {
    let of_layer = |l: &Vec<Record>| l.iter().map(|r| r.slot_bytes).max().unwrap_or(0);
    records.layers.iter().map(of_layer).collect()
}

/// The store of streamed experts.
pub struct Stream {
    library: Arc<Library>,
    state: Mutex<State>,
    trial: Mutex<Trial>,
    /// How often each expert was chosen since this was last taken.
    chosen: Mutex<Usage>,
    slots: usize,
    direct: bool,
}

impl Stream {
    /// Opens files, takes memory for as many slots as `options.bytes` allows, and starts the reading threads.
    pub(super) fn new(
        layers: Vec<Vec<GatedMlp>>,
        name: Name,
        options: &StreamOptions,
    ) -> Result<Self> {
        let records = Records::of(&layers).context("an expert is not as stored in a file")?;
        let sizes = largest(&records);
        let counts: Vec<usize> = layers.iter().map(Vec::len).collect();
        let width = counts.iter().copied().max().unwrap_or(0).max(1);
        let mut distinct: Vec<usize> = sizes.iter().copied().filter(|&b| b > 0).collect();
        distinct.sort_unstable();
        distinct.dedup();
        let bytes = match options.slots {
            None => options.bytes,
            Some(slots) => {
                let all: u64 = sizes.iter().zip(&counts).map(|(&b, &n)| (b * n) as u64).sum();
                let experts = counts.iter().sum::<usize>().max(1) as u64;
                (slots as u64).saturating_mul(all).div_ceil(experts)
            }
        };
        let share = share(&sizes, &counts, &distinct, bytes);
        let mut classes = Vec::new();
        for (&slot_bytes, &slots) in distinct.iter().zip(&share) {
            let free = (0..slots).map(|_| huge_pages(slot_bytes)).collect::<Result<Vec<_>>>()?;
            let policy = options.policy.build(layers.len(), width, slots);
            classes.push(Class { slot_bytes, free, slots, policy, unclaimed: Vec::new() });
        }
        let class = sizes.iter().map(|b| distinct.binary_search(b).unwrap_or(0)).collect();
        let library = Arc::new(Library { records, layers, width });
        let direct = match options.io {
            Io::Direct => true,
            Io::Buffered => false,
            Io::Auto => direct_is_faster(&library, &mut classes)?,
        };
        let files = &library.records.files;
        let drives = Drives::open(files, direct, &options.mirrors, options.between, options.warn)?;
        let loader = Loader::start(Arc::clone(&library), drives, name, options.readers)?;
        let mut state = State::new(loader, Arc::clone(&library), classes, class);
        if let Some(history) = &options.history {
            let mut hottest: Vec<_> = history.counts().filter(|c| counted(&counts, c)).collect();
            hottest.sort_by_key(|&(_, _, n)| std::cmp::Reverse(n));
            let total = history.total();
            if total >= HISTORY.0 {
                state.pin(&hottest, PINNED * (total as f64 / HISTORY.1 as f64).min(1.0));
            }
        }
        let slots = share.iter().sum();
        let trial = Mutex::new(Trial::new(options.lookahead));
        let layers = library.layers.len();
        let shape = Shape { layers, experts: width };
        let chosen = Mutex::new(Usage::new(shape));
        Ok(Self { library, state: Mutex::new(state), trial, chosen, slots, direct })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // A panic elsewhere leaves slots missing at worst.
        lock(&self.state)
    }

    /// Slots in all.
    pub fn slots(&self) -> usize {
        self.slots
    }

    /// Whether reads go past the system's cache.
    pub fn direct(&self) -> bool {
        self.direct
    }

    /// What was read and waited for so far.
    pub fn stats(&self) -> Stats {
        self.state().stats
    }

    /// Whether an expert is in a slot.
    pub fn resident(&self, layer: usize, id: u32) -> bool {
        let key = self.library.key(layer, id);
        self.state().holds(key)
    }

    /// Pinned experts.
    pub fn pins(&self) -> usize {
        self.state().pins()
    }

    /// Milliseconds per decode pass without and with looking ahead, where both were timed.
    pub fn lookahead_timings(&self) -> Option<[f64; 2]> {
        lock(&self.trial).timings()
    }

    /// Hands over how often each expert was chosen since the last call, as (layer, expert, times).
    pub fn take_chosen(&self, each: &mut dyn FnMut(usize, u32, u64)) {
        let mut chosen = lock(&self.chosen);
        chosen.counts().for_each(|(layer, id, n)| each(layer, id, n));
        chosen.clear();
    }

    pub(super) fn count(&self, layer: usize, route: &[(u32, f32)]) {
        let mut chosen = lock(&self.chosen);
        route.iter().for_each(|&(id, _)| chosen.add(layer, id, 1));
    }

    pub(super) fn begin_pass(&self, rows: usize) {
        lock(&self.trial).begin(rows);
    }

    pub(super) fn end_pass(&self, ok: bool) {
        lock(&self.trial).end(ok);
        let mut state = self.state();
        state.stats.passes += 1;
        if state.stats.passes.is_multiple_of(REVIEW) {
            state.review_pins();
        }
    }

    pub(super) fn looks_ahead(&self) -> bool {
        lock(&self.trial).looks_ahead()
    }

    pub(super) fn batch(&self, layer: usize, wanted: &[u32]) -> Batch<'_> {
        let keys: Vec<u32> = wanted.iter().map(|&id| self.library.key(layer, id)).collect();
        let mut state = self.state();
        // Errors of experts that nobody waited for cost nothing: those are read again.
        state.collect_finished();
        state.open(layer, &keys);
        state.ask(&keys);
        let leases = keys.iter().map(|_| None).collect();
        let given = vec![false; keys.len()];
        Batch { stream: self, keys, leases, given, waited: Duration::ZERO }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether the expert of a count is one of this model's, which may have been loaded without its MTP layer.
fn counted(layers: &[usize], &(layer, id, _): &(usize, u32, u64)) -> bool {
    layers.get(layer).is_some_and(|&n| (id as usize) < n)
}

/// Slots of each size: the budget in proportion to what the layers of that size hold, at least one each.
fn share(sizes: &[usize], counts: &[usize], distinct: &[usize], bytes: u64) -> Vec<usize> {
    let experts = |size: usize| -> usize {
        sizes.iter().zip(counts).filter(|&(&b, _)| b == size).map(|(_, n)| n).sum()
    };
    let total: u128 = distinct.iter().map(|&b| b as u128 * experts(b) as u128).sum();
    let slots = |&size: &usize| {
        let all = experts(size);
        let part = u128::from(bytes) * all as u128 / total.max(1);
        usize::try_from(part).unwrap_or(usize::MAX).clamp(1, all.max(1))
    };
    distinct.iter().map(slots).collect()
}

/// Reads one expert each way, the buffered one after forgetting what the system has of it.
fn direct_is_faster(library: &Library, classes: &mut [Class]) -> Result<bool> {
    let Some(class) = classes.first_mut() else { return Ok(false) };
    let Some(slot) = class.free.last_mut() else { return Ok(false) };
    let shards = &library.records.files;
    let mut fitting =
        library.records.layers.iter().flatten().filter(|r| r.slot_bytes == class.slot_bytes);
    let (Some(first), Some(second)) = (fitting.next(), fitting.next()) else { return Ok(false) };
    let mut seconds = |record: &Record, files: &Files| -> Result<f64> {
        let started = Instant::now();
        for run in &record.runs {
            let (path, pages) = (&shards[run.file].path, &mut slot[run.at..run.at + run.span()]);
            read_pages(files, run.file, path, pages, run.first_page(), run.end)?;
        }
        Ok(started.elapsed().as_secs_f64())
    };
    let files = Files::open(shards, None, true)?;
    if first.runs.iter().any(|r| !files.direct(r.file)) {
        return Ok(false);
    }
    // A file system may open a file for direct reads and then refuse them.
    let Ok(direct) = seconds(first, &files) else { return Ok(false) };
    let files = Files::open(shards, None, false)?;
    second.runs.iter().for_each(|r| files.forget(r.file));
    // Direct reads leave the processor to the layers; buffered ones must be clearly faster.
    Ok(direct <= 1.5 * seconds(second, &files)?)
}

/// The experts that one layer wants.
pub(super) struct Batch<'a> {
    stream: &'a Stream,
    /// Keys, in the order of what was wanted.
    keys: Vec<u32>,
    /// What the last `next` gave out.
    leases: Vec<Option<Arc<Loaded>>>,
    given: Vec<bool>,
    waited: Duration,
}

impl Batch<'_> {
    /// Names what the next layer will probably want, likeliest first: read when nothing that is wanted is to be read.
    pub(super) fn read_ahead(&mut self, layer: usize, ids: &[u32]) {
        let mut state = self.stream.state();
        state.foresee(layer, ids);
        state.ask(&self.keys);
    }

    pub(super) fn next(
        &mut self,
        within: Range<usize>,
        ready: &mut Vec<u32>,
        cancel: Option<&AtomicBool>,
    ) -> Result<()> {
        ready.clear();
        self.leases.iter_mut().for_each(|l| *l = None);
        let mut state = self.stream.state();
        let mut failed = Vec::new();
        loop {
            failed.extend(state.collect_finished());
            if let Some(i) = failed.iter().position(|(key, _)| state.wanted[*key as usize]) {
                return Err(failed.swap_remove(i).1);
            }
            state.ask(&self.keys);
            for i in within.clone().filter(|&i| !self.given[i]) {
                if let Some(expert) = state.ready(self.keys[i]) {
                    self.leases[i] = Some(expert);
                    ready.push(i as u32);
                }
            }
            for &i in ready.iter() {
                self.given[i as usize] = true;
                state.wanted[self.keys[i as usize] as usize] = false;
            }
            if !ready.is_empty() || within.clone().all(|i| self.given[i]) {
                return Ok(());
            }
            if cancel.is_some_and(|c| c.load(Ordering::Relaxed)) {
                return Err(Interrupted.into());
            }
            if state.in_flight == 0 {
                // Every slot holds an expert that this batch wants later: the last of them is read again.
                ensure!(state.give_up_last(&self.keys), "no slot for an expert");
                continue;
            }
            let started = Instant::now();
            failed.extend(state.wait(PATIENCE));
            self.waited += started.elapsed();
            state.stats.wait += started.elapsed();
        }
    }

    pub(super) fn get(&self, index: usize) -> &GatedMlp {
        let lease = self.leases[index].as_ref();
        &lease.unwrap_or_else(|| panic!("expert {index} of the batch was not given out")).mlp
    }

    pub(super) fn waited(&self) -> Duration {
        self.waited
    }
}

impl Drop for Batch<'_> {
    fn drop(&mut self) {
        self.leases.clear();
        let mut state = self.stream.state();
        if self.given.iter().any(|given| !given) {
            state.forget(&self.keys);
        }
    }
}
