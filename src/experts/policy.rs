//! Which resident expert to give up.
//!
//! A token goes through the layers in order and wants a few experts of each, so an expert that was just used is the one
//! whose layer comes round last: recency alone says little, and the policies that count uses do better
//! (docs/residency.md). A wanted expert always takes a slot; what does not deserve it is given up first afterwards.
#![forbid(unsafe_code)]

use std::collections::{BTreeSet, VecDeque};
use std::str::FromStr;

/// Which resident expert to give up. Keys are dense: `layer * n_experts + id`.
pub trait Policy: Send {
    /// A wanted expert was resident.
    fn hit(&mut self, key: u32);
    /// A wanted expert was not resident and now takes a slot.
    fn insert(&mut self, key: u32);
    /// Names the expert to give up and forgets it; never one for which `keep` is true. `None` when all are kept.
    fn evict(&mut self, keep: &mut dyn FnMut(u32) -> bool) -> Option<u32>;
    /// Forgets a resident expert that was given up for another reason.
    fn remove(&mut self, key: u32);
}

/// The policies to choose from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PolicyKind {
    /// Gives up the expert that was not wanted for longest.
    Lru,
    /// Gives up the expert that was wanted least often, with counts that are halved now and then.
    Lfru,
    /// Three queues: newcomers that are not wanted again soon leave first.
    S3Fifo,
    /// A newcomer keeps its slot only if it was wanted more often than the expert that would go for it.
    TinyLfu,
    /// Gives up the expert with the lowest sum of uses, each worth less the longer ago it was.
    #[default]
    Decay,
}

impl PolicyKind {
    /// All policies.
    pub const ALL: [Self; 5] = [Self::Lru, Self::Lfru, Self::S3Fifo, Self::TinyLfu, Self::Decay];

    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Lru => "lru",
            Self::Lfru => "lfru",
            Self::S3Fifo => "s3fifo",
            Self::TinyLfu => "tinylfu",
            Self::Decay => "decay",
        }
    }

    /// A policy over the keys `0..keys` for so many slots.
    pub fn build(self, keys: usize, slots: usize) -> Box<dyn Policy> {
        match self {
            Self::Lru => Box::new(Lru { order: Order::new(keys), clock: 0 }),
            Self::Lfru => Box::new(Lfru {
                order: Order::new(keys),
                uses: Uses::new(keys, 8 * keys),
                last: vec![0; keys],
                clock: 0,
            }),
            Self::S3Fifo => Box::new(S3Fifo::new(keys, slots)),
            Self::TinyLfu => Box::new(TinyLfu {
                window: Order::new(keys),
                main: Order::new(keys),
                share: (slots / 16).max(1),
                uses: Uses::new(keys, 8 * keys),
                clock: 0,
            }),
            Self::Decay => Box::new(Decay::new(keys, 4 * keys)),
        }
    }
}

impl std::fmt::Display for PolicyKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for PolicyKind {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        Self::ALL.into_iter().find(|p| p.name() == s).ok_or_else(|| {
            let names = Self::ALL.map(Self::name).join(", ");
            format!("unknown policy `{s}`, expected one of {names}")
        })
    }
}

/// Resident keys in ascending order of something.
struct Order<T> {
    set: BTreeSet<(T, u32)>,
    /// By key; `None` for what is not resident.
    of: Vec<Option<T>>,
}

impl<T: Ord + Copy> Order<T> {
    fn new(keys: usize) -> Self {
        Self { set: BTreeSet::new(), of: vec![None; keys] }
    }

    fn holds(&self, key: u32) -> bool {
        self.of[key as usize].is_some()
    }

    fn set(&mut self, key: u32, to: T) {
        self.remove(key);
        self.of[key as usize] = Some(to);
        self.set.insert((to, key));
    }

    fn remove(&mut self, key: u32) {
        if let Some(at) = self.of[key as usize].take() {
            self.set.remove(&(at, key));
        }
    }

    /// The first key that is not kept.
    fn first(&self, keep: &mut dyn FnMut(u32) -> bool) -> Option<u32> {
        self.set.iter().map(|&(_, key)| key).find(|&key| !keep(key))
    }

    /// Gives every resident key its place anew.
    fn renew(&mut self, place: impl Fn(u32) -> T) {
        self.set = std::mem::take(&mut self.set).into_iter().map(|(_, k)| (place(k), k)).collect();
        for &(at, key) in &self.set {
            self.of[key as usize] = Some(at);
        }
    }
}

/// How often each key was wanted, resident or not; halved now and then so that the past fades.
struct Uses {
    counts: Vec<u32>,
    /// Accesses between two halvings, and those that are left until the next.
    every: usize,
    left: usize,
}

impl Uses {
    fn new(keys: usize, every: usize) -> Self {
        Self { counts: vec![0; keys], every, left: every }
    }

    fn of(&self, key: u32) -> u32 {
        self.counts[key as usize]
    }

    /// Counts a use. True when all counts were halved.
    fn add(&mut self, key: u32) -> bool {
        self.counts[key as usize] += 1;
        self.left -= 1;
        let halve = self.left == 0;
        if halve {
            self.left = self.every;
            self.counts.iter_mut().for_each(|n| *n /= 2);
        }
        halve
    }
}

struct Lru {
    order: Order<u64>,
    clock: u64,
}

impl Policy for Lru {
    fn hit(&mut self, key: u32) {
        self.insert(key);
    }
    fn insert(&mut self, key: u32) {
        self.clock += 1;
        self.order.set(key, self.clock);
    }
    fn evict(&mut self, keep: &mut dyn FnMut(u32) -> bool) -> Option<u32> {
        let key = self.order.first(keep)?;
        self.order.remove(key);
        Some(key)
    }
    fn remove(&mut self, key: u32) {
        self.order.remove(key);
    }
}

/// Counts decide, recency among equal counts.
struct Lfru {
    order: Order<(u32, u64)>,
    uses: Uses,
    last: Vec<u64>,
    clock: u64,
}

impl Policy for Lfru {
    fn hit(&mut self, key: u32) {
        self.insert(key);
    }
    fn insert(&mut self, key: u32) {
        self.clock += 1;
        self.last[key as usize] = self.clock;
        let halved = self.uses.add(key);
        self.order.set(key, (self.uses.of(key), self.clock));
        if halved {
            self.order.renew(|key| (self.uses.of(key), self.last[key as usize]));
        }
    }
    fn evict(&mut self, keep: &mut dyn FnMut(u32) -> bool) -> Option<u32> {
        let key = self.order.first(keep)?;
        self.order.remove(key);
        Some(key)
    }
    fn remove(&mut self, key: u32) {
        self.order.remove(key);
    }
}

/// Yang et al., "FIFO queues are all you need for cache eviction" (2023): a small queue of newcomers, a main queue of
/// those that were wanted again, and the names of newcomers that left, who go to the main queue when they come back.
struct S3Fifo {
    small: VecDeque<u32>,
    main: VecDeque<u32>,
    gone: VecDeque<u32>,
    /// By key: in `gone`.
    is_gone: Vec<bool>,
    /// By key: uses since it took its slot or was passed over, at most 3.
    uses: Vec<u8>,
    /// Slots of the small queue.
    share: usize,
    slots: usize,
}

impl S3Fifo {
    fn new(keys: usize, slots: usize) -> Self {
        Self {
            small: VecDeque::new(),
            main: VecDeque::new(),
            gone: VecDeque::new(),
            is_gone: vec![false; keys],
            uses: vec![0; keys],
            share: (slots / 10).max(1),
            slots,
        }
    }

    fn from_small(&mut self, keep: &mut dyn FnMut(u32) -> bool) -> Option<u32> {
        let mut at = 0;
        while let Some(&key) = self.small.get(at) {
            if keep(key) {
                at += 1;
                continue;
            }
            self.small.remove(at);
            if self.uses[key as usize] <= 1 {
                self.note_gone(key);
                return Some(key);
            }
            self.uses[key as usize] = 0;
            self.main.push_back(key);
        }
        None
    }

    fn from_main(&mut self, keep: &mut dyn FnMut(u32) -> bool) -> Option<u32> {
        let mut at = 0;
        while let Some(&key) = self.main.get(at) {
            if keep(key) {
                at += 1;
                continue;
            }
            self.main.remove(at);
            if self.uses[key as usize] == 0 {
                return Some(key);
            }
            self.uses[key as usize] -= 1;
            self.main.push_back(key);
        }
        None
    }

    fn note_gone(&mut self, key: u32) {
        self.is_gone[key as usize] = true;
        self.gone.push_back(key);
        // What came back is in the queue still, and not gone.
        while self.gone.len() > self.slots {
            if let Some(key) = self.gone.pop_front() {
                self.is_gone[key as usize] = false;
            }
        }
    }
}

impl Policy for S3Fifo {
    fn hit(&mut self, key: u32) {
        let uses = &mut self.uses[key as usize];
        *uses = (*uses + 1).min(3);
    }
    fn insert(&mut self, key: u32) {
        self.uses[key as usize] = 0;
        if self.is_gone[key as usize] {
            self.is_gone[key as usize] = false;
            self.gone.retain(|&k| k != key);
            self.main.push_back(key);
        } else {
            self.small.push_back(key);
        }
    }
    fn evict(&mut self, keep: &mut dyn FnMut(u32) -> bool) -> Option<u32> {
        let small_first = self.small.len() >= self.share;
        let early = if small_first { self.from_small(keep) } else { None };
        early
            .or_else(|| self.from_main(keep))
            .or_else(|| self.from_small(keep))
            // Those of the small queue may have moved.
            .or_else(|| self.from_main(keep))
    }
    fn remove(&mut self, key: u32) {
        self.small.retain(|&k| k != key);
        self.main.retain(|&k| k != key);
    }
}

/// After Einziger et al., "TinyLFU" (2017): newcomers live in a window; who leaves it must have been wanted more often
/// than the one that was not wanted for longest among the others. Counts are exact: there are few keys.
struct TinyLfu {
    window: Order<u64>,
    main: Order<u64>,
    /// Slots of the window.
    share: usize,
    uses: Uses,
    clock: u64,
}

impl Policy for TinyLfu {
    fn hit(&mut self, key: u32) {
        self.clock += 1;
        self.uses.add(key);
        let order = if self.window.holds(key) { &mut self.window } else { &mut self.main };
        order.set(key, self.clock);
    }
    fn insert(&mut self, key: u32) {
        self.clock += 1;
        self.uses.add(key);
        self.window.set(key, self.clock);
        if self.window.set.len() > self.share
            && let Some((at, oldest)) = self.window.set.first().copied()
        {
            self.window.remove(oldest);
            self.main.set(oldest, at);
        }
    }
    fn evict(&mut self, keep: &mut dyn FnMut(u32) -> bool) -> Option<u32> {
        let newcomer = self.window.first(keep).filter(|_| self.window.set.len() >= self.share);
        let victim = self.main.first(keep);
        match (newcomer, victim) {
            (Some(newcomer), Some(victim)) if self.uses.of(newcomer) > self.uses.of(victim) => {
                self.window.remove(newcomer);
                self.main.set(newcomer, self.clock);
                self.main.remove(victim);
                Some(victim)
            }
            (newcomer, victim) => {
                let key = newcomer.or(victim).or_else(|| self.window.first(keep))?;
                self.remove(key);
                Some(key)
            }
        }
    }
    fn remove(&mut self, key: u32) {
        self.window.remove(key);
        self.main.remove(key);
    }
}

/// A use is worth 1 when it happens and half of that `half_life` accesses later. Instead of shrinking what was, every
/// new use is worth more than the last, so the order of keys changes only where one is used.
struct Decay {
    order: Order<u64>,
    /// By key, in units of `unit`.
    worth: Vec<f64>,
    growth: f64,
    unit: f64,
}

impl Decay {
    fn new(keys: usize, half_life: usize) -> Self {
        // 2^(1/n) by products alone: the same bits on every machine.
        let growth = 1.0 + std::f64::consts::LN_2 / half_life as f64;
        Self { order: Order::new(keys), worth: vec![0.0; keys], growth, unit: 1.0 }
    }
}

impl Policy for Decay {
    fn hit(&mut self, key: u32) {
        self.insert(key);
    }
    fn insert(&mut self, key: u32) {
        self.unit *= self.growth;
        self.worth[key as usize] += self.unit;
        // Positive floats are ordered as their bits are.
        self.order.set(key, self.worth[key as usize].to_bits());
        if self.unit > 1e100 {
            self.worth.iter_mut().for_each(|w| *w /= self.unit);
            self.unit = 1.0;
            self.order.renew(|key| self.worth[key as usize].to_bits());
        }
    }
    fn evict(&mut self, keep: &mut dyn FnMut(u32) -> bool) -> Option<u32> {
        let key = self.order.first(keep)?;
        self.order.remove(key);
        Some(key)
    }
    fn remove(&mut self, key: u32) {
        self.order.remove(key);
    }
}
