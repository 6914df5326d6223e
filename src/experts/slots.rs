//! The state of the slots: which are free, which are being filled, which hold an expert, and which is given up next.
//!
//! One thread, the engine's, owns the state; reading threads only fill slots that were handed to them. An expert that
//! the running batch still wants, or that was given out, is not evicted while another can be. What read-ahead brought
//! and nobody wanted goes first; pinned experts never do.
#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use memmap2::MmapMut;

use super::Library;
use super::loader::{Done, Job, Loader};
use super::policy::Policy;
use super::record::Loaded;
use super::stream::Stats;

/// Of the slots, the part that read-ahead may be filling at a time.
const AHEAD: usize = 4;
/// Pinned experts that are being read at a time.
const WARMING: usize = 2;

/// Slots of one size. Layers whose experts are larger than others' have slots of their own.
pub(super) struct Class {
    pub(super) slot_bytes: usize,
    pub(super) free: Vec<MmapMut>,
    pub(super) slots: usize,
    pub(super) policy: Box<dyn Policy>,
    /// Read ahead and not wanted so far.
    pub(super) unclaimed: Vec<u32>,
}

/// What is known of one expert. The policy knows those that are there, without unclaimed and pinned ones.
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
    /// By key: whether it stays.
    pinned: Vec<bool>,
    /// By key: hits of pinned experts since the last review.
    pin_hits: Vec<u32>,
    /// Jobs that did not come back yet, and how many of them are read-aheads.
    pub(super) in_flight: usize,
    ahead_in_flight: usize,
    /// What read-ahead is still to bring, in this order.
    ahead: VecDeque<u32>,
    /// The layer that it is for, until a batch of that layer is opened.
    ahead_layer: Option<usize>,
    /// What was guessed for that layer.
    guess: Vec<u32>,
    /// Experts that are to be read and pinned when nothing else is to be done.
    warm: VecDeque<u32>,
    pub(super) stats: Stats,
    /// As they were at the last review of pins.
    reviewed: Stats,
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
            pinned: vec![false; keys],
            pin_hits: vec![0; keys],
            in_flight: 0,
            ahead_in_flight: 0,
            ahead: VecDeque::new(),
            ahead_layer: None,
            guess: Vec::new(),
            warm: VecDeque::new(),
            stats: Stats::default(),
            reviewed: Stats::default(),
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

    /// Begins a batch of a layer: what was read ahead for it is claimed or proved wrong.
    pub(super) fn open(&mut self, layer: usize, keys: &[u32]) {
        // A read-ahead that no thread has begun is either wanted now or was wrong.
        self.cancel_ahead();
        if self.ahead_layer.take() == Some(layer) {
            self.stats.guessed += keys.len() as u64;
            self.stats.foreseen +=
                keys.iter().filter(|key| self.guess.contains(key)).count() as u64;
        }
        self.classes[self.class[layer]].policy.begin(layer);
        keys.iter().for_each(|&key| self.want(key));
    }

    /// Notes that the running batch wants an expert.
    fn want(&mut self, key: u32) {
        let class = self.class_of(key);
        let class = &mut self.classes[class];
        self.wanted[key as usize] = true;
        match &mut self.entries[key as usize] {
            Entry::Ready { ahead, .. } => {
                self.stats.hits += 1;
                if self.pinned[key as usize] {
                    self.stats.pin_hits += 1;
                    self.pin_hits[key as usize] += 1;
                } else if std::mem::take(ahead) {
                    self.stats.ahead_hits += 1;
                    class.unclaimed.retain(|&k| k != key);
                    class.policy.insert(key, true);
                } else {
                    class.policy.hit(key);
                }
            }
            Entry::Loading { ahead } => {
                self.stats.misses += 1;
                let ahead = std::mem::take(ahead);
                self.stats.ahead_late += u64::from(ahead);
                self.ahead_in_flight -= usize::from(ahead);
            }
            Entry::Absent => self.stats.misses += 1,
        }
    }

    /// Names what the next layer will probably want, likeliest first.
    pub(super) fn foresee(&mut self, layer: usize, ids: &[u32]) {
        self.ahead_layer = Some(layer);
        self.guess.clear();
        self.guess.extend(ids.iter().map(|&id| self.library.key(layer, id)));
        self.ahead.extend(&self.guess);
    }

    /// Asks for the wanted experts among `keys` that are neither there nor under way, in this order, as far as there
    /// are slots; then for what read-ahead named, then for what is to be pinned.
    pub(super) fn ask(&mut self, keys: &[u32]) {
        for &key in keys {
            if self.wanted[key as usize] && matches!(self.entries[key as usize], Entry::Absent) {
                let Some(slot) = self.slot_for(key, true) else { return };
                self.submit(key, slot, false);
            }
        }
        while let Some(&key) = self.ahead.front()
            && self.ahead_in_flight < (self.classes[self.class_of(key)].slots / AHEAD).max(1)
        {
            self.ahead.pop_front();
            if matches!(self.entries[key as usize], Entry::Absent) {
                let Some(slot) = self.slot_for(key, false) else { break };
                self.submit(key, slot, true);
            }
        }
        while self.in_flight < WARMING
            && let Some(key) = self.warm.pop_front()
        {
            let class = self.class_of(key);
            match &mut self.entries[key as usize] {
                Entry::Ready { ahead, .. } => {
                    if std::mem::take(ahead) {
                        self.classes[class].unclaimed.retain(|&k| k != key);
                    } else {
                        self.classes[class].policy.remove(key);
                    }
                    self.pinned[key as usize] = true;
                }
                Entry::Loading { .. } => self.pinned[key as usize] = true,
                Entry::Absent => {
                    let Some(slot) = self.slot_for(key, false) else { break };
                    self.pinned[key as usize] = true;
                    self.submit(key, slot, true);
                }
            }
        }
    }

    fn submit(&mut self, key: u32, slot: MmapMut, ahead: bool) {
        self.entries[key as usize] = Entry::Loading { ahead };
        self.in_flight += 1;
        self.ahead_in_flight += usize::from(ahead);
        self.loader.submit(Job { key, slot }, ahead);
    }

    /// A slot for an expert: a free one, or that of the expert to give up.
    fn slot_for(&mut self, key: u32, demand: bool) -> Option<MmapMut> {
        let class = self.class_of(key);
        if let Some(slot) = self.classes[class].free.pop() {
            return Some(slot);
        }
        let victim = self.unclaimed(class, false).or_else(|| {
            let (entries, wanted) = (&self.entries, &self.wanted);
            let mut keep = |key: u32| wanted[key as usize] || in_use(&entries[key as usize]);
            self.classes[class].policy.evict(&mut keep)
        });
        let victim = victim.or_else(|| self.unclaimed(class, true).filter(|_| demand))?;
        self.take_slot(victim)
    }

    /// An expert that was read ahead in vain; with `all` one that may still be wanted by the next layer.
    fn unclaimed(&mut self, class: usize, all: bool) -> Option<u32> {
        let next = self.ahead_layer;
        let library = &self.library;
        let list = &mut self.classes[class].unclaimed;
        let i = list.iter().position(|&key| all || Some(library.place(key).0) != next)?;
        Some(list.swap_remove(i))
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
            let there = matches!(entry, Entry::Ready { .. }) && !in_use(entry);
            there && self.wanted[key as usize] && !self.pinned[key as usize]
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
                let pinned = self.pinned[key as usize];
                let class = &mut self.classes[class];
                match (pinned, ahead) {
                    (true, _) => {}
                    (false, true) => class.unclaimed.push(key),
                    (false, false) => class.policy.insert(key, true),
                }
                let ahead = ahead && !pinned;
                self.entries[key as usize] = Entry::Ready { expert: Arc::new(loaded), ahead };
                None
            }
            Err((e, slot)) => {
                self.entries[key as usize] = Entry::Absent;
                self.pinned[key as usize] = false;
                self.classes[class].free.extend(slot);
                // A read-ahead that failed is tried again when the expert is wanted.
                (!ahead).then_some((key, e))
            }
        }
    }

    /// Drops the read-aheads that no thread has begun.
    fn cancel_ahead(&mut self) {
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
            if std::mem::take(&mut self.pinned[key as usize]) {
                self.warm.push_front(key);
            }
            let class = self.class_of(key);
            self.classes[class].free.push(slot);
        }
    }

    /// Pins the hottest of `counts` (layer, expert, times chosen), hottest first: at most `share` of the slots, and of
    /// a layer's experts those that were chosen at least twice as often as its average.
    pub(super) fn pin(&mut self, counts: &[(usize, u32, u64)], share: f64) {
        let layers = &self.library.layers;
        let mut totals = vec![0; layers.len()];
        counts.iter().for_each(|&(layer, _, n)| totals[layer] += n);
        let mut room: Vec<usize> =
            self.classes.iter().map(|c| (c.slots as f64 * share) as usize).collect();
        for &(layer, id, n) in counts {
            let room = &mut room[self.class[layer]];
            if *room > 0 && n * layers[layer].len() as u64 >= 2 * totals[layer] {
                *room -= 1;
                self.warm.push_back(self.library.key(layer, id));
            }
        }
    }

    /// Lets go of pinned experts that were wanted less often than the mean of the others, since the last review.
    pub(super) fn review_pins(&mut self) {
        let new = self.stats.since(&self.reviewed);
        self.reviewed = self.stats;
        let pinned = self.pins();
        let others = self.classes.iter().map(|c| c.slots).sum::<usize>() - pinned;
        let mean = (new.hits - new.pin_hits) as f64 / others.max(1) as f64;
        for key in 0..self.pinned.len() {
            let hits = std::mem::take(&mut self.pin_hits[key]);
            let there = matches!(self.entries[key], Entry::Ready { .. });
            if self.pinned[key] && there && f64::from(hits) < mean {
                self.pinned[key] = false;
                let class = self.class_of(key as u32);
                self.classes[class].policy.insert(key as u32, false);
            }
        }
    }

    /// Pinned experts.
    pub(super) fn pins(&self) -> usize {
        self.pinned.iter().filter(|&&p| p).count()
    }
}

fn in_use(entry: &Entry) -> bool {
    matches!(entry, Entry::Ready { expert, .. } if Arc::strong_count(expert) > 1)
}
