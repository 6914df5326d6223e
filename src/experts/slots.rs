//! The state of the slots: which are free, which are being filled, which hold an expert, and which is given up next.
//!
//! One thread, the engine's, owns the state; reading threads only fill slots that were handed to them. An expert that
//! the running batch still wants, or that was given out, is not evicted while another can be.
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::time::Duration;

use memmap2::MmapMut;

use super::Library;
use super::loader::{Done, Job, Loader};
use super::policy::Policy;
use super::record::Loaded;
use super::stream::Stats;

/// Read-aheads that are under way at a time.
const AHEAD: usize = 8;

/// Slots of one size. Layers whose experts are larger than others' have slots of their own.
pub(super) struct Class {
    pub(super) slot_bytes: usize,
    pub(super) free: Vec<MmapMut>,
    pub(super) policy: Box<dyn Policy>,
}

/// What is known of one expert.
enum Entry {
    Absent,
    Loading { ahead: bool },
    Ready { expert: Arc<Loaded>, ahead: bool },
}

/// All slots and what they hold.
pub(super) struct State {
    loader: Loader,
    library: Arc<Library>,
    classes: Vec<Class>,
    /// Class of each layer.
    class: Vec<usize>,
    /// By key.
    entries: Vec<Entry>,
    /// By key: whether the running batch has yet to be given it.
    pub(super) wanted: Vec<bool>,
    /// Jobs that did not come back yet, and how many of them are read-aheads.
    pub(super) in_flight: usize,
    ahead_in_flight: usize,
    /// What read-ahead is still to bring, in this order.
    pub(super) ahead: Vec<u32>,
    pub(super) stats: Stats,
}

impl State {
    pub(super) fn new(
        loader: Loader,
        library: Arc<Library>,
        classes: Vec<Class>,
        class: Vec<usize>,
    ) -> Self {
        let keys = library.layers.len() * library.width;
        Self {
            loader,
            library,
            classes,
            class,
            entries: (0..keys).map(|_| Entry::Absent).collect(),
            wanted: vec![false; keys],
            in_flight: 0,
            ahead_in_flight: 0,
            ahead: Vec::new(),
            stats: Stats::default(),
        }
    }

    fn class_of(&self, key: u32) -> usize {
        self.class[self.library.place(key).0]
    }

    /// Whether an expert is in a slot.
    pub(super) fn holds(&self, key: u32) -> bool {
        matches!(self.entries[key as usize], Entry::Ready { .. })
    }

    /// The expert, if it is in a slot.
    pub(super) fn ready(&self, key: u32) -> Option<Arc<Loaded>> {
        match &self.entries[key as usize] {
            Entry::Ready { expert, .. } => Some(Arc::clone(expert)),
            _ => None,
        }
    }

    /// Notes that a batch of a layer begins.
    pub(super) fn begin(&mut self, layer: usize) {
        self.classes[self.class[layer]].policy.begin(layer);
    }

    /// Notes that the running batch wants an expert.
    pub(super) fn want(&mut self, key: u32) {
        let class = self.class_of(key);
        self.wanted[key as usize] = true;
        match &mut self.entries[key as usize] {
            Entry::Ready { ahead, .. } => {
                self.stats.hits += 1;
                self.stats.ahead_hits += u64::from(std::mem::take(ahead));
                self.classes[class].policy.hit(key);
            }
            Entry::Loading { ahead } => {
                self.stats.misses += 1;
                self.ahead_in_flight -= usize::from(std::mem::take(ahead));
            }
            Entry::Absent => self.stats.misses += 1,
        }
    }

    /// Asks for the wanted experts among `keys` that are neither there nor under way, in this order, as far as there
    /// are slots; then for what read-ahead named.
    pub(super) fn ask(&mut self, keys: &[u32]) {
        for &key in keys {
            if self.wanted[key as usize] && matches!(self.entries[key as usize], Entry::Absent) {
                let Some(slot) = self.slot_for(key) else { return };
                self.submit(key, slot, false);
            }
        }
        while self.ahead_in_flight < AHEAD
            && let Some(&key) = self.ahead.first()
        {
            if matches!(self.entries[key as usize], Entry::Absent) {
                let Some(slot) = self.slot_for(key) else { return };
                self.submit(key, slot, true);
            }
            self.ahead.remove(0);
        }
    }

    fn submit(&mut self, key: u32, slot: MmapMut, ahead: bool) {
        self.entries[key as usize] = Entry::Loading { ahead };
        self.in_flight += 1;
        self.ahead_in_flight += usize::from(ahead);
        self.loader.submit(Job { key, slot }, ahead);
    }

    /// A slot for an expert: a free one, or that of the expert to give up.
    fn slot_for(&mut self, key: u32) -> Option<MmapMut> {
        let class = self.class_of(key);
        if let Some(slot) = self.classes[class].free.pop() {
            return Some(slot);
        }
        let (entries, wanted) = (&self.entries, &self.wanted);
        let mut keep = |key: u32| wanted[key as usize] || in_use(&entries[key as usize]);
        let victim = self.classes[class].policy.evict(&mut keep)?;
        self.take_slot(victim)
    }

    fn take_slot(&mut self, victim: u32) -> Option<MmapMut> {
        match std::mem::replace(&mut self.entries[victim as usize], Entry::Absent) {
            Entry::Ready { expert, .. } => Arc::into_inner(expert)?.into_slot(),
            _ => None,
        }
    }

    /// Frees the slot of the last of `keys` that is there, though it is wanted.
    pub(super) fn give_up_last(&mut self, keys: &[u32]) -> bool {
        let there = |&&key: &&u32| {
            let entry = &self.entries[key as usize];
            matches!(entry, Entry::Ready { .. }) && self.wanted[key as usize] && !in_use(entry)
        };
        let Some(&key) = keys.iter().rev().find(there) else { return false };
        let class = self.class_of(key);
        self.classes[class].policy.remove(key);
        let slot = self.take_slot(key);
        self.classes[class].free.extend(slot);
        true
    }

    /// Takes what the reading threads have finished; what failed comes back.
    pub(super) fn collect_finished(&mut self) -> Vec<(u32, anyhow::Error)> {
        let mut failed = Vec::new();
        while let Some(done) = self.loader.poll() {
            failed.extend(self.arrived(done));
        }
        failed
    }

    /// Waits for one read; what failed comes back.
    pub(super) fn wait(&mut self, patience: Duration) -> Option<(u32, anyhow::Error)> {
        self.loader.wait(patience).and_then(|done| self.arrived(done))
    }

    fn arrived(&mut self, done: Done) -> Option<(u32, anyhow::Error)> {
        let Done { key, result, service, bytes, retries } = done;
        let ahead = matches!(self.entries[key as usize], Entry::Loading { ahead: true });
        self.in_flight -= 1;
        self.ahead_in_flight -= usize::from(ahead);
        self.stats.service += service;
        self.stats.bytes += bytes as u64;
        self.stats.retries += u64::from(retries);
        let class = self.class_of(key);
        match result {
            Ok(loaded) => {
                self.stats.loads += 1;
                self.stats.ahead_loads += u64::from(ahead);
                self.classes[class].policy.insert(key, !ahead);
                self.entries[key as usize] = Entry::Ready { expert: Arc::new(loaded), ahead };
                None
            }
            Err((e, slot)) => {
                self.entries[key as usize] = Entry::Absent;
                self.classes[class].free.extend(slot);
                // A read-ahead that failed is tried again when the expert is wanted.
                (!ahead).then_some((key, e))
            }
        }
    }

    /// Drops the read-aheads that no thread has begun.
    pub(super) fn cancel_ahead(&mut self) {
        self.ahead.clear();
        let jobs = self.loader.cancel_ahead();
        self.ahead_in_flight -= jobs.len();
        self.take_back(jobs);
    }

    /// Ends a batch before it was given everything: what no thread has begun is not read.
    pub(super) fn forget(&mut self, keys: &[u32]) {
        keys.iter().for_each(|&key| self.wanted[key as usize] = false);
        self.cancel_ahead();
        let jobs = self.loader.cancel_demand();
        self.take_back(jobs);
    }

    fn take_back(&mut self, jobs: Vec<Job>) {
        for Job { key, slot } in jobs {
            self.in_flight -= 1;
            self.entries[key as usize] = Entry::Absent;
            let class = self.class_of(key);
            self.classes[class].free.push(slot);
        }
    }
}

fn in_use(entry: &Entry) -> bool {
    matches!(entry, Entry::Ready { expert, .. } if Arc::strong_count(expert) > 1)
}
