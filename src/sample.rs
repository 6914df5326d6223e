#![forbid(unsafe_code)]
//! Choosing the next token: logits in, one id out.
//!
//! Owns the sampling parameters, the penalty history, the random generator and the
//! log-probabilities of `--logprobs`. The same parameters, seed and logits give the same ids on
//! every machine: candidates are ordered by (logit descending, id ascending), every sum runs in
//! that order or in id order, and the exponential and logarithm are the crate's own. Knows nothing
//! of text, models or sessions.
//!
//! The order of the steps is that of Hugging Face transformers: repeat penalty, temperature, top-k,
//! top-p, min-p.

use std::cmp::Ordering;
use std::collections::VecDeque;

use anyhow::{Result, bail, ensure};

use crate::kernels::math;

/// Number of most recent ids the repeat penalty looks at.
pub const PENALTY_WINDOW: usize = 64;

/// First size of the sorted prefix when the nucleus is looked for; doubled until it is found.
const FIRST_CANDIDATES: usize = 64;

/// How the next token is chosen.
#[derive(Clone, Debug, PartialEq)]
pub struct SampleParams {
    /// Divides the logits; 0 takes the best token without drawing.
    pub temperature: f32,
    /// Keeps the k best tokens; 0 keeps all.
    pub top_k: u32,
    /// Keeps the fewest best tokens whose probabilities reach this sum; 1 keeps all.
    pub top_p: f32,
    /// Keeps the tokens at least this fraction as probable as the best; 0 keeps all.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of recent ids; 1 changes nothing.
    pub repeat_penalty: f32,
    /// Seed of the random generator.
    pub seed: u64,
}

impl Default for SampleParams {
    fn default() -> Self {
        Self { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0, repeat_penalty: 1.0, seed: 0 }
    }
}

impl SampleParams {
    /// Checks every parameter against its range.
    ///
    /// # Errors
    /// Names the first parameter outside its range, its value and the range.
    pub fn validate(&self) -> Result<()> {
        // Written so that NaN fails every test.
        let t = self.temperature;
        ensure!((0.0..=100.0).contains(&t), "temperature: {t}, expected 0 to 100");
        let p = self.top_p;
        ensure!(p > 0.0 && p <= 1.0, "top_p: {p}, expected above 0 and at most 1");
        let p = self.min_p;
        ensure!((0.0..=1.0).contains(&p), "min_p: {p}, expected 0 to 1");
        let p = self.repeat_penalty;
        ensure!(p > 0.0 && p <= 100.0, "repeat_penalty: {p}, expected above 0 and at most 100");
        Ok(())
    }
}

/// Draws tokens by [`SampleParams`], remembering recent ids and the state of the generator.
#[derive(Clone, Debug)]
pub struct Sampler {
    params: SampleParams,
    history: VecDeque<u32>,
    rng: Rng,
    /// Ids being ordered, kept between calls for their storage.
    order: Vec<u32>,
    /// Unnormalised probabilities, kept for their storage.
    weights: Vec<f32>,
}

impl Sampler {
    /// Makes a sampler with an empty history.
    ///
    /// # Errors
    /// Fails where [`SampleParams::validate`] does.
    pub fn new(params: SampleParams) -> Result<Self> {
        params.validate()?;
        let rng = Rng::new(params.seed);
        let history = VecDeque::with_capacity(PENALTY_WINDOW);
        Ok(Self { params, history, rng, order: Vec::new(), weights: Vec::new() })
    }

    /// The parameters this sampler was made with.
    pub fn params(&self) -> &SampleParams {
        &self.params
    }

    /// Adds an id to the history of the repeat penalty, which keeps the last [`PENALTY_WINDOW`].
    pub fn accept(&mut self, id: u32) {
        if self.history.len() == PENALTY_WINDOW {
            self.history.pop_front();
        }
        self.history.push_back(id);
    }

    /// Chooses an id; the caller passes it to [`Sampler::accept`] if it keeps it.
    ///
    /// The repeat penalty is applied to `logits` in place. A temperature of 0 draws no random
    /// number, any other exactly one.
    ///
    /// # Errors
    /// Fails if `logits` is empty or holds a value that is not finite.
    pub fn sample(&mut self, logits: &mut [f32]) -> Result<u32> {
        check_finite(logits)?;
        self.penalise(logits);
        if self.params.temperature == 0.0 {
            return Ok(argmax(logits));
        }
        let u = self.rng.unit();
        let Self { params, order, weights, .. } = self;
        let k = match params.top_k {
            0 => logits.len(),
            k => logits.len().min(k as usize),
        };
        let best = logits[argmax(logits) as usize];
        // Relative to the best logit, so that the exponent is at most 0 and a tiny temperature
        // stays finite.
        let weight = |id: u32| math::exp((logits[id as usize] - best) / params.temperature);

        order.clear();
        order.extend(0..logits.len() as u32);
        weights.clear();
        if k == order.len() && params.top_p >= 1.0 {
            // No order is needed: min-p is a threshold on the weight itself.
            weights.extend(order.iter().map(|&id| weight(id)));
            for w in weights.iter_mut().filter(|w| **w < params.min_p) {
                *w = 0.0;
            }
            return Ok(order[draw(weights, u)]);
        }

        // The mass top-p is a fraction of: all tokens in id order, or the k best in their order.
        let mut total = 0.0f64;
        let mut sorted = 0;
        if k == order.len() {
            total = order.iter().map(|&id| f64::from(weight(id))).sum();
        } else {
            sort_prefix(logits, order, 0, k);
            sorted = k;
            for &id in &order[..k] {
                total += f64::from(weight(id));
            }
        }
        let nucleus = f64::from(params.top_p) * total;
        let mut mass = 0.0f64;
        for i in 0..k {
            if i == sorted {
                let next = (sorted * 2).max(FIRST_CANDIDATES).min(k);
                sort_prefix(logits, order, sorted, next);
                sorted = next;
            }
            // Hugging Face keeps a token while the mass before it is below top_p.
            if i > 0 && params.top_p < 1.0 && mass >= nucleus {
                break;
            }
            let w = weight(order[i]);
            if w < params.min_p {
                break; // weights only fall from here on; the first is 1 and min_p at most 1
            }
            mass += f64::from(w);
            weights.push(w);
        }
        Ok(order[draw(weights, u)])
    }

    fn penalise(&self, logits: &mut [f32]) {
        let penalty = self.params.repeat_penalty;
        if penalty == 1.0 {
            return;
        }
        for (i, &id) in self.history.iter().enumerate() {
            if self.history.iter().take(i).any(|&earlier| earlier == id) {
                continue; // once an id, however often it occurred
            }
            if let Some(x) = logits.get_mut(id as usize) {
                let y = if *x > 0.0 { *x / penalty } else { *x * penalty };
                *x = y.clamp(f32::MIN, f32::MAX);
            }
        }
    }
}

/// Log-sum-exp of `logits` and the log-probabilities of the `k` best ids, best first, ties by id.
///
/// Empty logits give negative infinity and no ids; NaN logits sort by [`f32::total_cmp`] and make
/// the sum NaN.
pub fn log_softmax_top(logits: &[f32], k: usize) -> (f64, Vec<(u32, f32)>) {
    let lse = log_sum_exp(logits);
    let k = k.min(logits.len());
    let mut order: Vec<u32> = (0..logits.len() as u32).collect();
    sort_prefix(logits, &mut order, 0, k);
    let log_prob = |&id: &u32| (id, (f64::from(logits[id as usize]) - lse) as f32);
    let top = order[..k].iter().map(log_prob).collect();
    (lse, top)
}

/// Log-probability of `id`; negative infinity for an id outside `logits`.
pub fn logprob(logits: &[f32], id: u32) -> f64 {
    match logits.get(id as usize) {
        Some(&x) => f64::from(x) - log_sum_exp(logits),
        None => f64::NEG_INFINITY,
    }
}

/// Id of the largest logit, the lowest on ties; 0 for empty logits.
pub fn argmax(logits: &[f32]) -> u32 {
    let mut best = 0;
    for (i, &x) in logits.iter().enumerate() {
        if x > logits[best] {
            best = i;
        }
    }
    best as u32
}

fn log_sum_exp(logits: &[f32]) -> f64 {
    if logits.is_empty() {
        return f64::NEG_INFINITY;
    }
    let best = logits[argmax(logits) as usize];
    let sum: f64 = logits.iter().map(|&x| f64::from(math::exp(x - best))).sum();
    f64::from(best) + math::ln(sum)
}

fn check_finite(logits: &[f32]) -> Result<()> {
    ensure!(!logits.is_empty(), "logits: 0 values, expected at least 1");
    let bad = logits.iter().filter(|x| !x.is_finite()).count();
    if bad > 0 {
        let first = logits.iter().position(|x| !x.is_finite()).unwrap_or_default();
        let n = logits.len();
        bail!("logits: {bad} of {n} values not finite (first: id {first}, {})", logits[first]);
    }
    Ok(())
}

/// The order of candidates: logit descending, then id ascending. -0 and +0 are equal.
fn by_rank(logits: &[f32], a: u32, b: u32) -> Ordering {
    let key = |id: u32| logits[id as usize] + 0.0; // turns -0 into +0
    key(b).total_cmp(&key(a)).then(a.cmp(&b))
}

/// Puts the ids of ranks `from..to` into `order[from..to]`, given that ranks `0..from` are already
/// in place.
fn sort_prefix(logits: &[f32], order: &mut [u32], from: usize, to: usize) {
    let rest = &mut order[from..];
    let n = to - from;
    if n == 0 {
        return;
    }
    if n < rest.len() {
        rest.select_nth_unstable_by(n - 1, |&a, &b| by_rank(logits, a, b));
    }
    rest[..n].sort_unstable_by(|&a, &b| by_rank(logits, a, b));
}

/// Index drawn in proportion to `weights` (not empty, the largest above 0) by `u` in [0, 1).
fn draw(weights: &[f32], u: f64) -> usize {
    let total: f64 = weights.iter().map(|&w| f64::from(w)).sum();
    let goal = u * total;
    let mut mass = 0.0f64;
    let mut last = 0;
    for (i, &w) in weights.iter().enumerate() {
        if w > 0.0 {
            mass += f64::from(w);
            last = i;
            if mass > goal {
                return i;
            }
        }
    }
    last // u * total may round up to total
}

/// xoshiro256++ 1.0 seeded by splitmix64 (Blackman and Vigna, prng.di.unimi.it).
///
/// Part of the contract: a seed gives the same stream in every version.
#[derive(Clone, Debug)]
pub(crate) struct Rng([u64; 4]);

impl Rng {
    pub(crate) fn new(seed: u64) -> Self {
        let mut x = seed;
        // Four outputs of a bijection at four different points: never all zero.
        Self([(); 4].map(|()| split_mix(&mut x)))
    }

    fn next(&mut self) -> u64 {
        let s = &mut self.0;
        let out = s[0].wrapping_add(s[3]).rotate_left(23).wrapping_add(s[0]);
        let t = s[1] << 17;
        s[2] ^= s[0];
        s[3] ^= s[1];
        s[1] ^= s[2];
        s[0] ^= s[3];
        s[2] ^= t;
        s[3] = s[3].rotate_left(45);
        out
    }

    /// A multiple of 2^-53 in [0, 1).
    pub(crate) fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
    }
}

fn split_mix(x: &mut u64) -> u64 {
    *x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *x;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn draws(params: SampleParams, logits: &[f32], n: usize) -> Vec<usize> {
        let mut sampler = Sampler::new(params).unwrap();
        let mut counts = vec![0; logits.len()];
        for _ in 0..n {
            counts[sampler.sample(&mut logits.to_vec()).unwrap() as usize] += 1;
        }
        counts
    }

    fn support(params: SampleParams, logits: &[f32]) -> Vec<usize> {
        let counts = draws(params, logits, 4000);
        (0..logits.len()).filter(|&i| counts[i] > 0).collect()
    }

    /// Logits whose softmax at temperature 1 is `probs`.
    fn logits_of(probs: &[f64]) -> Vec<f32> {
        probs.iter().map(|p| p.ln() as f32).collect()
    }

    #[test]
    fn generators_match_their_reference_outputs() {
        let mut x = 0;
        assert_eq!(split_mix(&mut x), 0xe220_a839_7b1d_cdaf);
        assert_eq!(split_mix(&mut x), 0x6e78_9e6a_a1b9_65f4);
        let mut rng = Rng([1, 2, 3, 4]);
        let expected = [41_943_041, 58_720_359, 3_588_806_011_781_223, 3_591_011_842_654_386];
        assert_eq!(expected.map(|_| rng.next()), expected);
    }

    #[test]
    fn frequencies_follow_the_softmax() {
        let probs = [0.05, 0.4, 0.1, 0.25, 0.2];
        let n = 20_000;
        let chi = |counts: &[usize], probs: &[f64]| -> f64 {
            let term = |(&c, &p): (&usize, &f64)| {
                let e = p * n as f64;
                (c as f64 - e).powi(2) / e
            };
            counts.iter().zip(probs).filter(|(_, p)| **p > 0.0).map(term).sum()
        };
        // 18.5 is the 0.1 % point of chi-square with 4 degrees of freedom; the seed is fixed.
        let base = SampleParams { seed: 42, ..Default::default() };
        assert!(chi(&draws(base.clone(), &logits_of(&probs), n), &probs) < 18.5);
        // The ordered path draws from the same distribution.
        let params = SampleParams { top_p: 0.999_999, ..base.clone() };
        assert!(chi(&draws(params, &logits_of(&probs), n), &probs) < 18.5);
        // Temperature 2 takes the square root.
        let sum: f64 = probs.iter().map(|p| p.sqrt()).sum();
        let root: Vec<f64> = probs.iter().map(|p| p.sqrt() / sum).collect();
        let params = SampleParams { temperature: 2.0, ..base.clone() };
        assert!(chi(&draws(params, &logits_of(&probs), n), &root) < 18.5);
        // top-k 2 keeps ids 1 and 3.
        let params = SampleParams { top_k: 2, ..base };
        let kept = [0.0, 0.4 / 0.65, 0.0, 0.25 / 0.65, 0.0];
        let counts = draws(params, &logits_of(&probs), n);
        assert_eq!(counts[0] + counts[2] + counts[4], 0);
        assert!(chi(&counts, &kept) < 10.8);
    }

    #[test]
    fn truncations_keep_what_hugging_face_keeps() {
        let logits = logits_of(&[0.05, 0.4, 0.1, 0.25, 0.2]);
        let p = |top_k, top_p, min_p| SampleParams { top_k, top_p, min_p, ..Default::default() };
        assert_eq!(support(p(0, 1.0, 0.0), &logits), [0, 1, 2, 3, 4]);
        assert_eq!(support(p(1, 1.0, 0.0), &logits), [1]);
        assert_eq!(support(p(99, 1.0, 0.0), &logits), [0, 1, 2, 3, 4]);
        assert_eq!(support(p(0, 0.39, 0.0), &logits), [1]);
        assert_eq!(support(p(0, 0.41, 0.0), &logits), [1, 3]);
        assert_eq!(support(p(0, 1e-9, 0.0), &logits), [1]);
        assert_eq!(support(p(0, 0.86, 0.0), &logits), [1, 2, 3, 4]);
        // top-p after top-k works on the renormalised two: 0.4 / 0.65 = 0.615.
        assert_eq!(support(p(2, 0.61, 0.0), &logits), [1]);
        assert_eq!(support(p(2, 0.62, 0.0), &logits), [1, 3]);
        assert_eq!(support(p(0, 1.0, 0.45), &logits), [1, 3, 4]);
        assert_eq!(support(p(0, 0.9999, 0.45), &logits), [1, 3, 4]);
        assert_eq!(support(p(0, 1.0, 1.0), &logits), [1]);
    }

    #[test]
    fn nucleus_is_found_beyond_the_first_candidates() {
        // 1000 equal tokens: ties go by id, so top-p 0.5 keeps the first 500.
        let params = SampleParams { top_p: 0.5, ..Default::default() };
        let counts = draws(params, &vec![1.5; 1000], 20_000);
        assert_eq!(counts.iter().rposition(|&c| c > 0), Some(499));
        assert!(counts[..500].iter().all(|&c| c > 0));
    }

    #[test]
    fn zero_temperature_takes_the_lowest_best_id_without_drawing() {
        let params = SampleParams { temperature: 0.0, ..Default::default() };
        let mut sampler = Sampler::new(params).unwrap();
        let before = sampler.rng.0;
        assert_eq!(sampler.sample(&mut [-1.0, 3.0, 3.0, 2.0]).unwrap(), 1);
        assert_eq!(sampler.sample(&mut [-0.0, 0.0]).unwrap(), 0);
        assert_eq!(sampler.rng.0, before);
        let params = SampleParams { temperature: 1e-38, ..Default::default() };
        assert_eq!(support(params, &[f32::MIN, 1.0, f32::MAX]), [2]);
    }

    #[test]
    fn penalty_acts_once_an_id_and_forgets_the_oldest() {
        let params = SampleParams { temperature: 0.0, repeat_penalty: 2.0, ..Default::default() };
        let mut sampler = Sampler::new(params).unwrap();
        for id in [0, 1, 1, 77] {
            sampler.accept(id);
        }
        let mut logits = [4.0, -4.0, 3.0];
        assert_eq!(sampler.sample(&mut logits).unwrap(), 2);
        assert_eq!(logits, [2.0, -8.0, 3.0]);
        for _ in 0..PENALTY_WINDOW {
            sampler.accept(2);
        }
        assert_eq!(sampler.sample(&mut [4.0, -4.0, 3.0]).unwrap(), 0);
        let mut logits = [1.0, 0.0, f32::MIN];
        sampler.sample(&mut logits).unwrap();
        assert_eq!(logits[2], f32::MIN);
    }

    #[test]
    fn bad_input_is_named() {
        let mut sampler = Sampler::new(SampleParams::default()).unwrap();
        let error = sampler.sample(&mut [0.0, f32::NAN, f32::INFINITY]).unwrap_err().to_string();
        assert_eq!(error, "logits: 2 of 3 values not finite (first: id 1, NaN)");
        assert!(sampler.sample(&mut []).is_err());
        let bad = |p: SampleParams| p.validate().unwrap_err().to_string();
        let d = SampleParams::default();
        let error = bad(SampleParams { temperature: f32::NAN, ..d.clone() });
        assert_eq!(error, "temperature: NaN, expected 0 to 100");
        assert!(bad(SampleParams { top_p: 0.0, ..d.clone() }).starts_with("top_p: 0"));
        assert!(bad(SampleParams { min_p: 1.1, ..d.clone() }).starts_with("min_p: 1.1"));
        assert!(bad(SampleParams { repeat_penalty: 0.0, ..d }).starts_with("repeat_penalty: 0"));
    }

    #[test]
    fn seeds_reproduce_and_differ() {
        let logits: Vec<f32> = (0..50).map(|i| (i * 7 % 13) as f32 * 0.3).collect();
        let run = |seed| {
            let params = SampleParams { seed, top_p: 0.95, ..Default::default() };
            let mut sampler = Sampler::new(params).unwrap();
            (0..20).map(|_| sampler.sample(&mut logits.clone()).unwrap()).collect::<Vec<_>>()
        };
        assert_eq!(run(7), run(7));
        assert_ne!(run(7), run(8));
    }

    #[test]
    fn log_probabilities_match_libm() {
        let logits: Vec<f32> = (0..300).map(|i| ((i * 37 % 101) as f32 - 50.0) * 0.21).collect();
        let lse = logits.iter().map(|&x| f64::from(x).exp()).sum::<f64>().ln();
        let (got, top) = log_softmax_top(&logits, 5);
        assert!((got - lse).abs() < 1e-6, "{got} {lse}");
        assert_eq!(top.len(), 5);
        assert!(top.windows(2).all(|w| w[0].1 > w[1].1 || w[0].1 == w[1].1 && w[0].0 < w[1].0));
        for &(id, lp) in &top {
            assert!((f64::from(lp) - logprob(&logits, id)).abs() < 1e-6);
        }
        assert_eq!(log_softmax_top(&logits, 999).1.len(), 300);
        assert_eq!(log_softmax_top(&[], 3), (f64::NEG_INFINITY, vec![]));
        assert_eq!(logprob(&logits, 300), f64::NEG_INFINITY);
        assert!(logprob(&[f32::NAN, 1.0], 1).is_nan());
    }

    proptest! {
        #[test]
        fn growing_prefixes_equal_a_full_sort(raw in prop::collection::vec(-4i8..4, 1..300)) {
            let logits: Vec<f32> = raw.iter().map(|&x| f32::from(x) * 0.5).collect();
            let mut full: Vec<u32> = (0..logits.len() as u32).collect();
            full.sort_by(|&a, &b| by_rank(&logits, a, b));
            let mut order: Vec<u32> = (0..logits.len() as u32).collect();
            let (mut from, mut to) = (0, 3.min(order.len()));
            while from < order.len() {
                sort_prefix(&logits, &mut order, from, to);
                prop_assert_eq!(&order[..to], &full[..to]);
                (from, to) = (to, (to * 2).min(order.len()));
            }
        }

        #[test]
        fn any_finite_logits_give_an_id(
            mut logits in prop::collection::vec(
                prop::num::f32::NORMAL | prop::num::f32::ZERO, 1..200),
            top_k in 0u32..300, top_p in 0.001f32..=1.0, min_p in 0.0f32..=1.0,
            temperature in 0.0f32..10.0, seed: u64,
        ) {
            let params =
                SampleParams { temperature, top_k, top_p, min_p, repeat_penalty: 1.3, seed };
            let mut sampler = Sampler::new(params).unwrap();
            sampler.accept(0);
            let id = sampler.sample(&mut logits).unwrap();
            prop_assert!((id as usize) < logits.len());
        }
    }
}
