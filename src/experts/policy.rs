//! Which resident expert to give up.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;

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
    /// The expert that was not wanted for longest.
    #[default]
    Lru,
}

impl PolicyKind {
    /// A policy over the keys `0..keys` for so many slots.
    pub fn build(self, keys: usize, _slots: usize) -> Box<dyn Policy> {
        Box::new(Lru { last: vec![0; keys], order: BTreeMap::new(), clock: 0 })
    }
}

struct Lru {
    last: Vec<u64>,
    order: BTreeMap<u64, u32>,
    clock: u64,
}

impl Policy for Lru {
    fn hit(&mut self, key: u32) {
        self.order.remove(&self.last[key as usize]);
        self.insert(key);
    }
    fn insert(&mut self, key: u32) {
        self.clock += 1;
        self.last[key as usize] = self.clock;
        self.order.insert(self.clock, key);
    }
    fn evict(&mut self, keep: &mut dyn FnMut(u32) -> bool) -> Option<u32> {
        let (&at, &key) = self.order.iter().find(|&(_, &k)| !keep(k))?;
        self.order.remove(&at);
        Some(key)
    }
    fn remove(&mut self, key: u32) {
        self.order.remove(&self.last[key as usize]);
    }
}
