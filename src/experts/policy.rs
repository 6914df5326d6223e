//! Which resident expert to give up.
//!
//! A token goes through the layers in order and wants a few experts of each, so an expert that was just used is the one
//! whose layer comes round last: recency alone says little, and the policies that count uses do better
//! (docs/residency.md). A wanted expert always takes a slot; what does not deserve it is given up first afterwards.
#![forbid(unsafe_code)]

use std::collections::{BTreeSet, VecDeque};
use std::str::FromStr;

use super::forecast::Forecast;

/// Which resident expert to give up. Keys are dense: `layer * width + id`.
pub trait Policy: Send {
    /// A layer is visited: what is wanted from here on is wanted by it.
    fn begin(&mut self, _layer: usize) {}
    /// A wanted expert was resident.
    fn hit(&mut self, key: u32);
    /// An expert that was not resident now takes a slot. It is wanted, unless it was read ahead.
    fn insert(&mut self, key: u32, wanted: bool);
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
    /// Gives up the expert with the lowest sum of uses, each worth less the longer ago it was.
    Decay,
    /// Gives up the expert that is least likely to be wanted soon, judged by how others like it fared.
    #[default]
    Forecast,
}

impl PolicyKind {
    /// All policies.
    pub const ALL: [Self; 5] = [Self::Lru, Self::Lfru, Self::S3Fifo, Self::Decay, Self::Forecast];

    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Lru => "lru",
            Self::Lfru => "lfru",
            Self::S3Fifo => "s3fifo",
            Self::Decay => "decay",
            Self::Forecast => "forecast",
        }
    }

    /// A policy over layers of `width` experts each, for so many slots.
    pub fn build(self, layers: usize, width: usize, slots: usize) -> Box<dyn Policy> {
        let keys = layers * width;
        match self {
            Self::Lru => Box::new(Lru { order: Order::new(keys), clock: 0 }),
            Self::Lfru => Box::new(Lfru {
                order: Order::new(keys),
                uses: vec![0; keys],
                last: vec![0; keys],
                clock: 0,
                every: 16 * slots as u64,
            }),
            Self::S3Fifo => Box::new(S3Fifo::new(keys, slots)),
            Self::Decay => Box::new(Decay::new(keys, 8 * slots)),
            Self::Forecast => Box::new(Forecast::new(layers, width)),
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

/// Policies to compare.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Policies(pub Vec<PolicyKind>);

impl FromStr for Policies {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        match s {
            "all" => Ok(Self(PolicyKind::ALL.to_vec())),
            _ => s.split(',').map(str::parse).collect::<Result<_, _>>().map(Self),
        }
    }
}

/// Resident keys in ascending order of what they are worth.
struct Order<T> {
    set: BTreeSet<(T, u32)>,
    /// By key; `None` for what is not resident.
    of: Vec<Option<T>>,
}

impl<T: Ord + Copy> Order<T> {
    fn new(keys: usize) -> Self {
        Self { set: BTreeSet::new(), of: vec![None; keys] }
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

    /// Takes out the first key that is not kept.
    fn take_first(&mut self, keep: &mut dyn FnMut(u32) -> bool) -> Option<u32> {
        let key = self.set.iter().map(|&(_, key)| key).find(|&key| !keep(key))?;
        self.remove(key);
        Some(key)
    }

    /// Gives every resident key its place anew.
    fn renew(&mut self, place: impl Fn(u32) -> T) {
        self.set = std::mem::take(&mut self.set).into_iter().map(|(_, k)| (place(k), k)).collect();
        for &(at, key) in &self.set {
            self.of[key as usize] = Some(at);
        }
    }
}

struct Lru {
    order: Order<u64>,
    clock: u64,
}

impl Policy for Lru {
    fn hit(&mut self, key: u32) {
        self.clock += 1;
        self.order.set(key, self.clock);
    }
    fn insert(&mut self, key: u32, _wanted: bool) {
        self.hit(key);
    }
    fn evict(&mut self, keep: &mut dyn FnMut(u32) -> bool) -> Option<u32> {
        self.order.take_first(keep)
    }
    fn remove(&mut self, key: u32) {
        self.order.remove(key);
    }
}

/// Counts of all keys, resident or not, decide; recency among equal counts. Halving lets the past fade.
struct Lfru {
    order: Order<(u32, u64)>,
    uses: Vec<u32>,
    last: Vec<u64>,
    clock: u64,
    /// Uses between two halvings.
    every: u64,
}

impl Lfru {
    fn count(&mut self, key: u32) {
        self.clock += 1;
        self.uses[key as usize] += 1;
        self.last[key as usize] = self.clock;
        if self.clock.is_multiple_of(self.every) {
            self.uses.iter_mut().for_each(|n| *n /= 2);
            self.order.renew(|key| (self.uses[key as usize], self.last[key as usize]));
        }
    }

    fn place(&mut self, key: u32) {
        self.order.set(key, (self.uses[key as usize], self.last[key as usize]));
    }
}

impl Policy for Lfru {
    fn hit(&mut self, key: u32) {
        self.count(key);
        self.place(key);
    }
    fn insert(&mut self, key: u32, wanted: bool) {
        if wanted {
            self.count(key);
        }
        self.place(key);
    }
    fn evict(&mut self, keep: &mut dyn FnMut(u32) -> bool) -> Option<u32> {
        self.order.take_first(keep)
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

    fn leave_small(&mut self, keep: &mut dyn FnMut(u32) -> bool) -> Option<u32> {
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

    fn leave_main(&mut self, keep: &mut dyn FnMut(u32) -> bool) -> Option<u32> {
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
    fn insert(&mut self, key: u32, _wanted: bool) {
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
        let early = if small_first { self.leave_small(keep) } else { None };
        early
            .or_else(|| self.leave_main(keep))
            .or_else(|| self.leave_small(keep))
            // Those of the small queue may have moved.
            .or_else(|| self.leave_main(keep))
    }
    fn remove(&mut self, key: u32) {
        self.small.retain(|&k| k != key);
        self.main.retain(|&k| k != key);
    }
}

/// A use is worth 1 when it happens and half of that `half_life` uses later. Instead of shrinking what was, every new
/// use is worth more than the last, so the order of keys changes only where one is used.
struct Decay {
    order: Order<u64>,
    /// By key, in units of the first use.
    worth: Vec<f64>,
    growth: f64,
    unit: f64,
}

impl Decay {
    fn new(keys: usize, half_life: usize) -> Self {
        // 2^(1/n), nearly.
        let growth = 1.0 + std::f64::consts::LN_2 / half_life as f64;
        Self { order: Order::new(keys), worth: vec![0.0; keys], growth, unit: 1.0 }
    }

    fn count(&mut self, key: u32) {
        self.unit *= self.growth;
        self.worth[key as usize] += self.unit;
        if self.unit > 1e100 {
            self.worth.iter_mut().for_each(|w| *w /= self.unit);
            self.unit = 1.0;
            self.order.renew(|key| self.worth[key as usize].to_bits());
        }
    }

    fn place(&mut self, key: u32) {
        // Positive floats are ordered as their bits are.
        self.order.set(key, self.worth[key as usize].to_bits());
    }
}

impl Policy for Decay {
    fn hit(&mut self, key: u32) {
        self.count(key);
        self.place(key);
    }
    fn insert(&mut self, key: u32, wanted: bool) {
        if wanted {
            self.count(key);
        }
        self.place(key);
    }
    fn evict(&mut self, keep: &mut dyn FnMut(u32) -> bool) -> Option<u32> {
        self.order.take_first(keep)
    }
    fn remove(&mut self, key: u32) {
        self.order.remove(key);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    const LAYERS: u32 = 3;
    const WIDTH: u32 = 8;
    const SLOTS: usize = 7;

    struct Rng(u64);

    impl Rng {
        fn below(&mut self, n: usize) -> usize {
            self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (self.0 >> 33) as usize % n
        }
    }

    /// Every use so far, oldest first, and what is resident: enough to say what a simple policy must give up.
    #[derive(Default)]
    struct Model {
        resident: BTreeSet<u32>,
        uses: Vec<u32>,
        /// Order of placement, for policies that go by it.
        placed: Vec<u32>,
    }

    impl Model {
        fn expected(&self, kind: PolicyKind, keep: &dyn Fn(u32) -> bool) -> Option<u32> {
            let candidates = self.resident.iter().copied().filter(|&k| !keep(k));
            let last =
                |list: &[u32], key| list.iter().rposition(|&k| k == key).map_or(0, |i| i + 1);
            match kind {
                PolicyKind::Lru => candidates.min_by_key(|&k| last(&self.placed, k)),
                PolicyKind::Lfru => {
                    let every = 16 * SLOTS;
                    let count = |key| {
                        self.uses.chunks(every).fold(0, |sum, chunk| {
                            let sum = sum + chunk.iter().filter(|&&k| k == key).count();
                            if chunk.len() == every { sum / 2 } else { sum }
                        })
                    };
                    candidates.min_by_key(|&k| (count(k), last(&self.uses, k)))
                }
                PolicyKind::Decay => {
                    let half_life = (8 * SLOTS) as f64;
                    let worth = |key| {
                        let ago = self.uses.iter().rev().enumerate().filter(|&(_, &k)| k == key);
                        let growth: f64 = 1.0 + std::f64::consts::LN_2 / half_life;
                        ago.map(|(ago, _)| growth.powi(-(ago as i32))).sum::<f64>()
                    };
                    candidates.min_by(|&a, &b| worth(a).total_cmp(&worth(b)).then(a.cmp(&b)))
                }
                PolicyKind::S3Fifo | PolicyKind::Forecast => None,
            }
        }
    }

    /// Random wants, read-aheads and removals; the victims.
    fn drive(kind: PolicyKind, seed: u64) -> Vec<u32> {
        let mut rng = Rng(seed);
        let mut policy = kind.build(LAYERS as usize, WIDTH as usize, SLOTS);
        let mut model = Model::default();
        let mut victims = Vec::new();
        for step in 0..3000 {
            let layer = step / 2 % LAYERS;
            // Low ids are wanted more often.
            let id = rng.below(WIDTH as usize).min(rng.below(WIDTH as usize)) as u32;
            let key = layer * WIDTH + id;
            let wanted = rng.below(10) > 0;
            if step % 2 == 0 {
                policy.begin(layer as usize);
            }
            if model.resident.contains(&key) {
                if wanted {
                    policy.hit(key);
                    model.uses.push(key);
                    model.placed.push(key);
                } else if rng.below(4) == 0 {
                    policy.remove(key);
                    model.resident.remove(&key);
                }
                continue;
            }
            if model.resident.len() == SLOTS {
                // Sometimes everything is kept, sometimes nothing.
                let share = rng.below(5);
                let kept: Vec<u32> =
                    model.resident.iter().copied().filter(|_| rng.below(4) < share).collect();
                let keep = |key: u32| kept.contains(&key);
                let victim = policy.evict(&mut |key| keep(key));
                assert_eq!(victim.is_none(), kept.len() == SLOTS, "{kind}, step {step}");
                let Some(victim) = victim else { continue };
                assert!(!keep(victim), "{kind}, step {step}: {victim} was to be kept");
                assert!(model.resident.contains(&victim), "{kind}, step {step}: {victim} was gone");
                if let Some(expected) = model.expected(kind, &keep) {
                    assert_eq!(victim, expected, "{kind}, step {step}");
                }
                model.resident.remove(&victim);
                victims.push(victim);
            }
            policy.insert(key, wanted);
            model.resident.insert(key);
            model.placed.push(key);
            if wanted {
                model.uses.push(key);
            }
        }
        // What is left comes out once each.
        for _ in 0..model.resident.len() {
            let victim = policy.evict(&mut |_| false).expect("a resident key");
            assert!(model.resident.remove(&victim), "{kind}: {victim} came out twice");
        }
        assert_eq!(policy.evict(&mut |_| false), None, "{kind}");
        victims
    }

    #[test]
    fn victims_are_resident_not_kept_and_always_the_same() {
        for kind in PolicyKind::ALL {
            for seed in 1..=4 {
                let victims = drive(kind, seed);
                assert!(victims.len() > 500, "{kind}: only {} victims", victims.len());
                assert_eq!(victims, drive(kind, seed), "{kind}");
            }
        }
    }

    #[test]
    fn names_are_parsed_back() {
        for kind in PolicyKind::ALL {
            assert_eq!(kind.name().parse(), Ok(kind));
        }
        let error = "LRU".parse::<PolicyKind>().unwrap_err();
        assert!(error.contains("`LRU`") && error.contains("forecast"), "{error}");
    }
}
