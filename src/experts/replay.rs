//! A trace through a policy, as the store would ask it, and through the best choice that knows the future.
#![forbid(unsafe_code)]

use std::collections::BTreeSet;
use std::str::FromStr;

use super::policy::{Policy, PolicyKind};
use super::trace::Accesses;

/// A number of slots.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Slots {
    /// So many.
    Count(usize),
    /// So many percent of all experts.
    Percent(f64),
}

impl Slots {
    /// The number, at least one, for so many experts in all.
    pub fn of(self, all: usize) -> usize {
        match self {
            Self::Count(n) => n,
            Self::Percent(p) => ((all as f64 * p / 100.0) as usize).max(1),
        }
    }
}

impl FromStr for Slots {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        let slots = match s.strip_suffix('%') {
            Some(p) => p.parse().ok().filter(|p| *p > 0.0 && *p <= 100.0).map(Self::Percent),
            None => s.parse().ok().filter(|n| *n > 0).map(Self::Count),
        };
        slots.ok_or_else(|| {
            "expected a number of slots, or a share of all experts as in 25%".to_owned()
        })
    }
}

/// Experts wanted, and those that were in a slot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Count {
    /// Wanted and in a slot.
    pub hits: usize,
    /// Wanted.
    pub wanted: usize,
}

impl Count {
    /// Share of wanted experts that were in a slot.
    pub fn hit_rate(&self) -> f64 {
        self.hits as f64 / self.wanted.max(1) as f64
    }

    /// Adds another count.
    pub fn add(&mut self, other: Self) {
        self.hits += other.hits;
        self.wanted += other.wanted;
    }
}

/// The accesses of a trace as keys.
pub struct Replay {
    layers: usize,
    experts: usize,
    keys: Vec<u32>,
    /// Where the keys of each call end.
    ends: Vec<usize>,
}

impl Replay {
    /// Of a trace whose layers have `experts` each, more than any id.
    pub fn new(accesses: &Accesses, experts: u32) -> Self {
        let layers = accesses.layers();
        let mut keys = Vec::with_capacity(accesses.wanted());
        let mut ends = Vec::new();
        for (layer, ids) in accesses.calls() {
            let layer = layers.partition_point(|&l| l < layer) as u32;
            keys.extend(ids.iter().map(|id| layer * experts + id));
            ends.push(keys.len());
        }
        Self { layers: layers.len(), experts: experts as usize, keys, ends }
    }

    /// All experts of all layers.
    pub fn all(&self) -> usize {
        self.layers * self.experts
    }

    /// Calls: where they begin, and their keys.
    fn calls(&self) -> impl Iterator<Item = (usize, &[u32])> {
        let starts = std::iter::once(0).chain(self.ends.iter().copied());
        starts.zip(&self.ends).map(|(start, &end)| (start, &self.keys[start..end]))
    }

    /// Hits of a policy with so many slots, at least one.
    ///
    /// An expert counts as a hit if it was resident before its call. Those of a call are kept until it ends, unless
    /// there are more of them than slots.
    pub fn policy(&self, kind: PolicyKind, slots: usize) -> Count {
        self.run(kind.build(self.layers, self.experts, slots).as_mut(), slots)
    }

    fn run(&self, policy: &mut dyn Policy, slots: usize) -> Count {
        let mut resident = vec![false; self.all()];
        let mut free = slots;
        let mut hits = 0;
        let mut asked: Vec<u32> = Vec::new();
        for (_, call) in self.calls() {
            let (there, missing): (Vec<u32>, Vec<u32>) =
                call.iter().partition(|&&k| resident[k as usize]);
            policy.begin(call[0] as usize / self.experts);
            there.iter().for_each(|&key| policy.hit(key));
            hits += there.len();
            // As in the store: all reads are asked for, then they arrive.
            for key in missing {
                if free > 0 {
                    free -= 1;
                } else {
                    let victim = policy.evict(&mut |key| call.binary_search(&key).is_ok());
                    let victim = victim.or_else(|| {
                        asked.drain(..).for_each(|key| policy.insert(key, true));
                        policy.evict(&mut |_| false)
                    });
                    if let Some(victim) = victim {
                        resident[victim as usize] = false;
                    }
                }
                resident[key as usize] = true;
                asked.push(key);
            }
            asked.drain(..).for_each(|key| policy.insert(key, true));
        }
        Count { hits, wanted: self.keys.len() }
    }

    /// The most hits that a policy could have: it gives up what is not wanted for longest, knowing the future (Belady).
    pub fn best(&self, slots: usize) -> Count {
        // For every access, the call in which its key is wanted next.
        let mut next = vec![u32::MAX; self.keys.len()];
        let mut of_key = vec![u32::MAX; self.all()];
        let calls: Vec<_> = self.calls().collect();
        for (number, &(start, call)) in calls.iter().enumerate().rev() {
            for (i, &key) in (start..).zip(call) {
                next[i] = std::mem::replace(&mut of_key[key as usize], number as u32);
            }
        }
        // What is resident, by its next call.
        let mut order: BTreeSet<(u32, u32)> = BTreeSet::new();
        let mut hits = 0;
        for (number, &(start, call)) in calls.iter().enumerate() {
            let missing: Vec<(usize, u32)> = (start..)
                .zip(call.iter().copied())
                .filter(|&(i, key)| {
                    let hit = order.remove(&(number as u32, key));
                    if hit {
                        order.insert((next[i], key));
                    }
                    !hit
                })
                .collect();
            hits += call.len() - missing.len();
            for (i, key) in missing {
                if order.len() == slots {
                    let kept = |key: &u32| call.binary_search(key).is_ok();
                    let victim = order.iter().rev().find(|(_, key)| !kept(key)).copied();
                    let victim = victim.or_else(|| order.last().copied());
                    victim.map(|v| order.remove(&v));
                }
                order.insert((next[i], key));
            }
        }
        Count { hits, wanted: self.keys.len() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The most hits by trying every victim; keys of a call are kept, and there are slots for all of them.
    fn by_trial(calls: &[Vec<u32>], resident: &[u32], slots: usize) -> usize {
        let Some((call, rest)) = calls.split_first() else { return 0 };
        let hits = call.iter().filter(|k| resident.contains(k)).count();
        let mut all = resident.to_vec();
        all.extend(call.iter().filter(|k| !resident.contains(k)));
        // Every choice of what stays: all of the call, and as much of the rest as there is room for.
        let others: Vec<u32> = resident.iter().copied().filter(|k| !call.contains(k)).collect();
        let room = slots - call.len();
        let mut best = 0;
        for choice in 0u32..1 << others.len() {
            if choice.count_ones() as usize != room.min(others.len()) {
                continue;
            }
            let kept = (0..others.len()).filter(|i| choice >> i & 1 == 1).map(|i| others[i]);
            let next: Vec<u32> = call.iter().copied().chain(kept).collect();
            best = best.max(by_trial(rest, &next, slots));
        }
        hits + best
    }

    fn trace(seed: u64, calls: usize, layers: u32, experts: usize, top_k: usize) -> Replay {
        let mut state = seed;
        let mut accesses = Accesses::default();
        for call in 0..calls {
            let mut ids: Vec<u32> = (0..top_k)
                .map(|_| {
                    state = state.wrapping_mul(6364136223846793005).wrapping_add(1);
                    ((state >> 33) as usize % experts) as u32
                })
                .collect();
            accesses.push(call as u32 % layers, &mut ids);
        }
        Replay::new(&accesses, experts as u32)
    }

    #[test]
    fn the_best_is_what_trying_everything_finds() {
        for seed in 0..40 {
            let replay = trace(seed, 9, 2, 4, 2);
            let calls: Vec<Vec<u32>> = replay.calls().map(|(_, call)| call.to_vec()).collect();
            for slots in 2..=5 {
                let best = replay.best(slots);
                assert_eq!(best.hits, by_trial(&calls, &[], slots), "seed {seed}, {slots} slots");
            }
        }
    }

    #[test]
    fn no_policy_is_better_than_the_best_and_all_slots_leave_first_uses_only() {
        for seed in 0..5 {
            let replay = trace(seed, 600, 3, 12, 3);
            let mut distinct = replay.keys.clone();
            distinct.sort_unstable();
            distinct.dedup();
            for kind in PolicyKind::ALL {
                for slots in [1, 2, 5, 9, 20, 36] {
                    let (policy, best) = (replay.policy(kind, slots), replay.best(slots));
                    assert_eq!(policy.wanted, replay.keys.len());
                    // With less slots than a call wants, what is given up first is not the best's to choose.
                    assert!(
                        slots < 3 || policy.hits <= best.hits,
                        "{kind}, {slots}: {policy:?}, {best:?}"
                    );
                }
                assert_eq!(
                    replay.policy(kind, 36).hits,
                    replay.keys.len() - distinct.len(),
                    "{kind}"
                );
            }
        }
    }
}
