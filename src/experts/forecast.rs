//! A policy that forecasts: how likely is it that an expert is wanted when its layer comes round again?
//!
//! Experts are sorted into classes by how often they were wanted, and at which of the last visits. Each class counts how
//! often its members were wanted at the next visit of their layer, so what a model's routing is like (skewed, sticky or
//! neither) is learned while it runs. Given up is the expert with the lowest chance per call that it would have to wait in
//! its slot.
#![forbid(unsafe_code)]

use std::ops::Range;

use super::policy::Policy;

/// Visits whose pattern of uses makes a class: this many bits.
const PATTERN: u32 = 4;
/// Classes of the past: the patterns, and how long ago the last use was where the pattern is empty.
const PASTS: usize = (1 << PATTERN) + 3;
/// Classes of frequency, each about 1.4 times as frequent as the next.
const RATES: usize = 16;
/// Visits over which frequency is measured.
const SPAN: f32 = 128.0;
/// Members of a class after which its counts are halved.
const MEMBERS: f32 = 1e5;

/// Counts of one class of experts.
#[derive(Clone, Copy)]
struct Class {
    members: f32,
    wanted: f32,
}

/// What is known of one expert.
#[derive(Clone, Copy)]
struct Seen {
    /// Wanted at this share of visits, recent ones counting more.
    rate: f32,
    /// Whether it was wanted at the last visits, the last of all in the lowest bit.
    past: u32,
    class: u16,
    /// The class before the last visit, which that visit tells something about.
    before: u16,
}

pub(super) struct Forecast {
    width: usize,
    classes: Vec<Class>,
    seen: Vec<Seen>,
    /// Visits of each layer.
    visits: Vec<u32>,
    /// Resident keys of each layer with their chance, the lowest first.
    resident: Vec<Vec<(f32, u32)>>,
    /// The layer that is being visited; `None` before the first.
    layer: Option<usize>,
}

impl Forecast {
    /// Over layers of `width` experts each.
    pub(super) fn new(layers: usize, width: usize) -> Self {
        // Until something is known, the recent are taken to be likelier.
        let class = |c: usize| {
            let past = (c / RATES) as u32;
            let ago = if past < 1 << PATTERN { past.trailing_zeros().min(32) } else { PATTERN };
            Class { members: 1.0, wanted: 1.0 / (2.0 + ago as f32) }
        };
        let unseen = (RATES - 1) as u16;
        let unseen = Seen { rate: 0.0, past: 0, class: unseen, before: unseen };
        Self {
            width,
            classes: (0..PASTS * RATES).map(class).collect(),
            seen: vec![unseen; layers * width],
            visits: vec![0; layers],
            resident: vec![Vec::new(); layers],
            layer: None,
        }
    }

    fn of_layer(&self, layer: usize) -> Range<usize> {
        layer * self.width..(layer + 1) * self.width
    }

    /// How much one visit of a layer changes rates: they are plain means at first.
    fn weight(&self, layer: usize) -> f32 {
        1.0 / SPAN.min(self.visits[layer] as f32)
    }

    /// Learns from the visit that ends.
    fn end_visit(&mut self) {
        let Some(layer) = self.layer else { return };
        let of_layer = self.of_layer(layer);
        for seen in &self.seen[of_layer] {
            let class = &mut self.classes[usize::from(seen.before)];
            class.members += 1.0;
            class.wanted += if seen.past & 1 == 1 { 1.0 } else { 0.0 };
            if class.members > MEMBERS {
                class.members *= 0.5;
                class.wanted *= 0.5;
            }
        }
    }

    /// Notes a use.
    fn want(&mut self, key: u32) {
        let weight = self.weight(key as usize / self.width);
        let seen = &mut self.seen[key as usize];
        seen.past |= 1;
        seen.rate += weight;
        seen.class = class_of(seen);
    }

    fn place(&mut self, key: u32) {
        let chance = chance_of(&self.seen, &self.classes, key);
        let resident = &mut self.resident[key as usize / self.width];
        let at = resident.partition_point(|r| r.0 < chance);
        resident.insert(at, (chance, key));
    }
}

fn class_of(seen: &Seen) -> u16 {
    let pattern = seen.past & ((1 << PATTERN) - 1);
    let past = match seen.past.trailing_zeros() {
        32 => 0,
        0..PATTERN => pattern,
        ago @ PATTERN.. => (1 << PATTERN) + (ago / PATTERN).ilog2(),
    };
    // The exponent and the first bit of the mantissa.
    let octaves = |x: f32| x.to_bits() >> 22;
    let rate = (octaves(1.0) - octaves(seen.rate.min(1.0))).min(RATES as u32 - 1);
    (past * RATES as u32 + rate) as u16
}

fn chance_of(seen: &[Seen], classes: &[Class], key: u32) -> f32 {
    let class = classes[usize::from(seen[key as usize].class)];
    class.wanted / class.members
}

impl Policy for Forecast {
    fn begin(&mut self, layer: usize) {
        self.end_visit();
        self.layer = Some(layer);
        self.visits[layer] = self.visits[layer].saturating_add(1);
        let (of_layer, weight) = (self.of_layer(layer), self.weight(layer));
        // Nothing is wanted until it is said to be: what stays unwanted is the first to go.
        for seen in &mut self.seen[of_layer] {
            seen.before = seen.class;
            seen.past <<= 1;
            seen.rate -= seen.rate * weight;
            seen.class = class_of(seen);
        }
        let (seen, classes) = (&self.seen, &self.classes);
        let resident = &mut self.resident[layer];
        resident.iter_mut().for_each(|(chance, key)| *chance = chance_of(seen, classes, *key));
        resident.sort_unstable_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
    }

    fn hit(&mut self, key: u32) {
        self.want(key);
        self.remove(key);
        self.place(key);
    }

    fn insert(&mut self, key: u32, wanted: bool) {
        if wanted {
            self.want(key);
        }
        self.place(key);
    }

    fn evict(&mut self, keep: &mut dyn FnMut(u32) -> bool) -> Option<u32> {
        // The calls to come, that of the running layer last.
        let next = self.layer.map_or(0, |layer| layer + 1);
        let mut wait = 0;
        let mut lowest: Option<(f32, u32)> = None;
        for layer in (next..self.resident.len()).chain(0..next) {
            let resident = &self.resident[layer];
            if resident.is_empty() && self.visits[layer] == 0 {
                // A dense layer.
                continue;
            }
            wait += 1;
            let worth = |chance: f32| chance / wait as f32;
            let below = |w: f32| lowest.is_none_or(|l| w < l.0);
            let first = resident.iter().take_while(|r| below(worth(r.0))).find(|r| !keep(r.1));
            if let Some(&(chance, key)) = first {
                lowest = Some((worth(chance), key));
            }
        }
        let (_, key) = lowest?;
        self.remove(key);
        Some(key)
    }

    fn remove(&mut self, key: u32) {
        self.resident[key as usize / self.width].retain(|r| r.1 != key);
    }
}
