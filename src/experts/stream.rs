//! Experts that are read from disk when a layer wants them: opening, and the batches that layers work through.
#![forbid(unsafe_code)]

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::loader::{Files, Loader, Source, read_run};
use super::policy::PolicyKind;
use super::record::{Loaded, Record, Records};
use super::slots::{Class, State};
use super::{GatedMlp, Interrupted, Library, Name};
use crate::store::huge_pages;

/// How long a wait for a read lasts before the cancel flag is looked at.
const PATIENCE: Duration = Duration::from_millis(50);

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
    /// How to read.
    pub io: Io,
    /// Reading threads.
    pub readers: usize,
    /// Which expert to give up.
    pub policy: PolicyKind,
    /// What stands between the files and the store; only tests have something there.
    pub between: Option<fn(Files) -> Box<dyn Source>>,
}

impl Default for StreamOptions {
    fn default() -> Self {
        Self { bytes: 0, io: Io::Auto, readers: 2, policy: PolicyKind::default(), between: None }
    }
}

/// What was read and waited for, since the store was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Stats {
    /// Wanted experts that were in a slot.
    pub hits: u64,
    /// Of these, experts that read-ahead had brought.
    pub ahead_hits: u64,
    /// Wanted experts that had to be read.
    pub misses: u64,
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
    /// Reads that failed and succeeded when tried again, or failed twice.
    pub retries: u64,
}

impl Stats {
    /// What came after `earlier`.
    pub fn since(&self, earlier: &Self) -> Self {
        Self {
            hits: self.hits - earlier.hits,
            ahead_hits: self.ahead_hits - earlier.ahead_hits,
            misses: self.misses - earlier.misses,
            loads: self.loads - earlier.loads,
            ahead_loads: self.ahead_loads - earlier.ahead_loads,
            bytes: self.bytes - earlier.bytes,
            service: self.service.saturating_sub(earlier.service),
            wait: self.wait.saturating_sub(earlier.wait),
            retries: self.retries - earlier.retries,
        }
    }

    /// Share of wanted experts that were in a slot.
    pub fn hit_rate(&self) -> f64 {
        self.hits as f64 / (self.hits + self.misses).max(1) as f64
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
        let share = share(&sizes, &counts, &distinct, options.bytes);
        let mut classes = Vec::new();
        for (&slot_bytes, &slots) in distinct.iter().zip(&share) {
            let free = (0..slots).map(|_| huge_pages(slot_bytes)).collect::<Result<Vec<_>>>()?;
            let policy = options.policy.build(layers.len(), width, slots);
            classes.push(Class { slot_bytes, free, policy });
        }
        let class = sizes.iter().map(|b| distinct.binary_search(b).unwrap_or(0)).collect();
        let library = Arc::new(Library { records, layers, width });
        let direct = match options.io {
            Io::Direct => true,
            Io::Buffered => false,
            Io::Auto => direct_is_faster(&library, &mut classes)?,
        };
        let files = Files::open(&library.records.files, direct)?;
        let source: Box<dyn Source> = match options.between {
            Some(between) => between(files),
            None => Box::new(files),
        };
        let loader = Loader::start(Arc::clone(&library), source, name, options.readers)?;
        let state = State::new(loader, Arc::clone(&library), classes, class);
        let slots = share.iter().sum();
        Ok(Self { library, state: Mutex::new(state), slots, direct })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // A panic elsewhere leaves slots missing at worst.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
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

    /// Names the experts that the next layer will probably want; they are read when nothing else is to be, into slots
    /// that can be spared. What was named before and not begun is dropped.
    pub fn read_ahead(&self, layer: usize, ids: &[u32]) {
        let mut state = self.state();
        state.cancel_ahead();
        state.ahead.extend(ids.iter().map(|&id| self.library.key(layer, id)));
    }

    pub(super) fn batch(&self, layer: usize, wanted: &[u32]) -> Batch<'_> {
        let keys: Vec<u32> = wanted.iter().map(|&id| self.library.key(layer, id)).collect();
        let mut state = self.state();
        // Errors of experts that nobody waited for cost nothing: those are read again.
        state.collect_finished();
        // A read-ahead that no thread has begun is either wanted now or was wrong.
        state.cancel_ahead();
        state.begin(layer);
        keys.iter().for_each(|&key| state.want(key));
        state.ask(&keys);
        let leases = keys.iter().map(|_| None).collect();
        let given = vec![false; keys.len()];
        Batch { stream: self, keys, leases, given, waited: Duration::ZERO }
    }
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
            read_run(files, run, &shards[run.file].path, slot)?;
        }
        Ok(started.elapsed().as_secs_f64())
    };
    let files = Files::open(shards, true)?;
    if first.runs.iter().any(|r| !files.direct(r.file)) {
        return Ok(false);
    }
    // A file system may open a file for direct reads and then refuse them.
    let Ok(direct) = seconds(first, &files) else { return Ok(false) };
    let files = Files::open(shards, false)?;
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
