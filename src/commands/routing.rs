//! Made-up routing, to try policies at the size of a model that is not there.
//!
//! Every layer has its own order of popularity by Zipf's law. A token keeps each expert that the last token had in the
//! layer with some probability and draws the others; now and then two experts of a layer trade places.
#![forbid(unsafe_code)]

use std::str::FromStr;

use crate::experts::trace::Accesses;
use crate::kernels::math;
use crate::sample::Rng;

/// What the routing is like.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct MadeUp {
    skew: f64,
    tokens: usize,
    layers: usize,
    /// Experts of a layer.
    pub(super) experts: u32,
    top_k: usize,
    sticky: f64,
    drift: f64,
    seed: u64,
}

impl Default for MadeUp {
    fn default() -> Self {
        Self {
            skew: 0.8,
            tokens: 1000,
            layers: 75,
            experts: 256,
            top_k: 8,
            sticky: 0.3,
            drift: 0.05,
            seed: 1,
        }
    }
}

impl FromStr for MadeUp {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        let mut made = Self::default();
        for field in s.split(',').filter(|f| !f.is_empty()) {
            let (name, value) = field
                .split_once('=')
                .ok_or_else(|| format!("--synth: found `{field}`, expected NAME=VALUE"))?;
            let number = |low: f64, high: f64| {
                let x = value.parse::<f64>().ok().filter(|x| (low..=high).contains(x));
                x.ok_or_else(|| {
                    format!("--synth: {name} is `{value}`, expected a number from {low} to {high}")
                })
            };
            match name {
                "skew" => made.skew = number(0.0, 2.0)?,
                "tokens" => made.tokens = number(1.0, 1e6)? as usize,
                "layers" => made.layers = number(1.0, 1024.0)? as usize,
                "experts" => made.experts = number(1.0, 4096.0)? as u32,
                "top_k" => made.top_k = number(1.0, 64.0)? as usize,
                "sticky" => made.sticky = number(0.0, 1.0)?,
                "drift" => made.drift = number(0.0, 1.0)?,
                "seed" => made.seed = number(0.0, 1e15)? as u64,
                _ => {
                    return Err(format!(
                        "--synth: found `{name}`, expected skew, tokens, layers, experts, top_k, sticky, drift or seed"
                    ));
                }
            }
        }
        if made.top_k > made.experts as usize {
            return Err(format!(
                "--synth: top_k is {}, expected at most the {} experts",
                made.top_k, made.experts
            ));
        }
        Ok(made)
    }
}

impl MadeUp {
    /// The routing of all tokens, one pass each.
    pub(super) fn accesses(&self) -> Accesses {
        let mut rng = Rng::new(self.seed);
        let mut sum = 0.0;
        let up_to: Vec<f64> = (1..=self.experts)
            .map(|rank| {
                sum += math::pow64(f64::from(rank), -self.skew);
                sum
            })
            .collect();
        let below = |rng: &mut Rng, n: usize| ((rng.unit() * n as f64) as usize).min(n - 1);
        let experts = self.experts as usize;
        // Experts by popularity, and what the last token had.
        let mut layers: Vec<(Vec<u32>, Vec<u32>)> = (0..self.layers)
            .map(|_| {
                let mut order: Vec<u32> = (0..self.experts).collect();
                for i in (1..experts).rev() {
                    order.swap(i, below(&mut rng, i + 1));
                }
                (order, Vec::new())
            })
            .collect();
        let mut accesses = Accesses::default();
        for _ in 0..self.tokens {
            for (layer, (order, chosen)) in (0..).zip(&mut layers) {
                if rng.unit() < self.drift {
                    order.swap(below(&mut rng, experts), below(&mut rng, experts));
                }
                chosen.retain(|_| rng.unit() < self.sticky);
                while chosen.len() < self.top_k {
                    let at = rng.unit() * sum;
                    let id = order[up_to.partition_point(|&s| s <= at).min(experts - 1)];
                    if !chosen.contains(&id) {
                        chosen.push(id);
                    }
                }
                accesses.push(layer, &mut chosen.clone());
            }
        }
        accesses
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experts::policy::PolicyKind;
    use crate::experts::replay::{Replay, Slots};

    #[test]
    fn routing_is_what_was_asked_for_and_the_same_every_time() {
        let of = |s: &str| s.parse::<MadeUp>().unwrap().accesses();
        let text = "tokens=200,layers=3,experts=32,top_k=4";
        let trace = of(text);
        assert_eq!((trace.wanted(), trace.layers(), trace.experts()), (2400, vec![0, 1, 2], 32));
        assert!(trace.calls().eq(of(text).calls()));
        assert!(!trace.calls().eq(of(&format!("{text},seed=2")).calls()));
        // Without drift and with everything kept, the first choice lasts.
        let still = of("tokens=50,layers=2,experts=32,top_k=4,sticky=1,drift=0");
        let first: Vec<_> = still.calls().take(2).collect();
        assert!(still.calls().zip(first.iter().cycle()).all(|(a, &b)| a == b));
        for (spec, word) in [
            ("skew", "NAME=VALUE"),
            ("skew=x", "0 to 2"),
            ("speed=1", "`speed`"),
            ("experts=4", "at most"),
        ] {
            let error = spec.parse::<MadeUp>().unwrap_err();
            assert!(error.contains(word), "{error}");
        }
    }

    #[test]
    fn the_default_policy_has_the_most_hits() {
        for skew in ["0.6", "1.2"] {
            let made = format!("skew={skew},tokens=400,layers=20,experts=64,top_k=4");
            let made = made.parse::<MadeUp>().unwrap();
            let replay = Replay::new(&made.accesses(), made.experts);
            for percent in [10.0, 25.0] {
                let slots = Slots::Percent(percent).of(replay.all());
                let hits = |kind| replay.policy(kind, slots).hits;
                let default = PolicyKind::default();
                for kind in PolicyKind::ALL.into_iter().filter(|&kind| kind != default) {
                    let (best, other) = (hits(default), hits(kind));
                    assert!(
                        best > other,
                        "skew {skew}, {percent}%: {default} {best}, {kind} {other}"
                    );
                }
            }
        }
    }
}
