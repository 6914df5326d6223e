//! A trace through a policy, as the store would ask it, and through the best choice that knows the future.
#![forbid(unsafe_code)]

use std::collections::BTreeSet;

use super::policy::{Policy, PolicyKind};
use super::trace::Accesses;

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
        self.run(kind.build(self.all(), slots).as_mut(), slots)
    }

    fn run(&self, policy: &mut dyn Policy, slots: usize) -> Count {
        let mut resident = vec![false; self.all()];
        let mut free = slots;
        let mut hits = 0;
        for (_, call) in self.calls() {
            let (there, missing): (Vec<u32>, Vec<u32>) =
                call.iter().partition(|&&k| resident[k as usize]);
            there.iter().for_each(|&key| policy.hit(key));
            hits += there.len();
            for key in missing {
                if free > 0 {
                    free -= 1;
                } else {
                    let mut keep = |key| call.binary_search(&key).is_ok();
                    let victim = policy.evict(&mut keep).or_else(|| policy.evict(&mut |_| false));
                    if let Some(victim) = victim {
                        resident[victim as usize] = false;
                    }
                }
                policy.insert(key);
                resident[key as usize] = true;
            }
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
