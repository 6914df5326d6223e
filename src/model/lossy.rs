//! Lossy routing, only where it was asked for: fewer experts for a row than its router chose, or others that are there.
//!
//! The exact choice comes first; here it is thinned or replaced. [`Lossy::TopP`] and [`Lossy::TopK`] look at nothing but
//! the row, so their results are the same bits everywhere, as exact ones are. [`Lossy::CacheRoute`] and
//! [`Lossy::MissBudget`] look at what the slots hold: their results depend on what ran before and on the timing of
//! reads. They act on passes of at most [`SHORT_PASS`] rows, because a long one reads most experts anyway, each once.
#![forbid(unsafe_code)]

use std::fmt;
use std::sync::{Mutex, PoisonError};

use super::Model;
use super::config::Config;
use super::moe::{Route, rank, weigh};
use crate::kernels::math;

/// Rows of the longest pass on which the modes that look at the slots act.
pub const SHORT_PASS: usize = 16;

/// The expert of an entry of a route that is not used; such entries are at its end.
const NONE: u32 = u32::MAX;

/// A way to save experts at the cost of the answer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Lossy {
    /// A row's experts of largest weight that together have this share of its weight.
    TopP(f32),
    /// So many of a row's experts, those of largest weight.
    TopK(usize),
    /// A row's first `keep` experts, and in place of the others those among the first `of` that are in a slot.
    CacheRoute {
        /// How many of the true choice stay.
        keep: usize,
        /// How many experts compete.
        of: usize,
    },
    /// So many of the experts that a layer would have to read, those of largest weight over the pass.
    MissBudget(usize),
}

impl fmt::Display for Lossy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TopP(p) => write!(f, "expert-top-p {p}"),
            Self::TopK(k) => write!(f, "expert-top-k {k}"),
            Self::CacheRoute { keep, of } => write!(f, "cache-route {keep},{of}"),
            Self::MissBudget(n) => write!(f, "miss-budget {n}"),
        }
    }
}

impl Lossy {
    /// Whether the mode looks at the slots; it changes nothing where there are none.
    pub fn needs_slots(self) -> bool {
        matches!(self, Self::CacheRoute { .. } | Self::MissBudget(_))
    }

    /// Whether the mode makes sense for a model.
    ///
    /// # Errors
    /// [`Unfit`], with what would make sense.
    pub fn check(self, c: &Config) -> Result<(), Unfit> {
        let (k, n) = (c.top_k, c.n_experts);
        let wanted = match self {
            Self::TopK(kept) if !(1..k).contains(&kept) => {
                format!("fewer than the {k} experts of a token of this model, at least 1")
            }
            Self::CacheRoute { keep, of } if !(1..=k).contains(&keep) || !(k..=n).contains(&of) => {
                format!("J from 1 to {k} and M from {k} to {n} for this model")
            }
            _ => return Ok(()),
        };
        Err(Unfit(format!("--lossy-{self}: expected {wanted}")))
    }
}

/// A mode that the model cannot be run with.
#[derive(Debug)]
pub struct Unfit(String);

impl fmt::Display for Unfit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Unfit {}

/// How far the used experts were from the chosen ones, over the rows of all layers on which the mode acted.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Tally {
    /// Rows, counted once per layer.
    pub rows: u64,
    /// Experts that the router chose for them.
    pub chosen: u64,
    /// Of these, experts that were used.
    pub kept: u64,
    /// Experts that were used.
    pub used: u64,
    /// Divergences of all rows, in nats.
    kl: f64,
}

impl Tally {
    /// Counts one row. `score` is the router's plain score.
    ///
    /// The divergence is KL(q‖p): q are the weights in use, p the router's scores over both the chosen and the used
    /// experts, each scaled to a sum of 1. As q is p cut down to the used ones, it is −ln of their share of p: 0 when
    /// the choice is unchanged, and always finite.
    fn count(&mut self, chosen: &Route, used: &Route, score: impl Fn(u32) -> f32) {
        let sum = |r: &mut dyn Iterator<Item = u32>| r.map(|e| f64::from(score(e))).sum::<f64>();
        let is_used = |e: u32| used.iter().any(|r| r.0 == e);
        let kept = chosen.iter().filter(|r| is_used(r.0)).count();
        self.rows += 1;
        self.chosen += chosen.len() as u64;
        self.kept += kept as u64;
        self.used += used.len() as u64;
        if kept < chosen.len() {
            let lost = sum(&mut chosen.iter().map(|r| r.0).filter(|&e| !is_used(e)));
            let have = sum(&mut used.iter().map(|r| r.0));
            // Scores that underflow to 0 weigh nothing.
            self.kl += (lost / have.max(f64::MIN_POSITIVE)).ln_1p();
        }
    }

    /// Share of the chosen experts that were used.
    pub fn agreement(&self) -> f64 {
        self.kept as f64 / self.chosen.max(1) as f64
    }

    /// Share of the chosen experts in whose place none was used.
    pub fn dropped(&self) -> f64 {
        (self.chosen - self.used) as f64 / self.chosen.max(1) as f64
    }

    /// Mean divergence per row, in nats.
    pub fn kl(&self) -> f64 {
        self.kl / self.rows.max(1) as f64
    }
}

/// A mode at work.
pub(super) struct Rerouter {
    pub(super) mode: Lossy,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    tally: Tally,
    /// The routes as the router chose them.
    chosen: Vec<(u32, f32)>,
    /// Experts of a row in some order, or the misses of a pass.
    ranked: Vec<(u32, f32)>,
    /// Whether each expert of the layer is in a slot.
    there: Vec<bool>,
}

impl Rerouter {
    pub(super) fn new(mode: Lossy) -> Self {
        Self { mode, state: Mutex::default() }
    }

    pub(super) fn tally(&self) -> Tally {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).tally
    }

    /// Thins or replaces the `routes` (rows, top_k) that were chosen from `logits` (rows, n_experts).
    pub(super) fn reroute(
        &self,
        m: &Model,
        layer: usize,
        logits: &[f32],
        bias: &[f32],
        routes: &mut [(u32, f32)],
    ) {
        let c = &m.config;
        let logits = logits.chunks(c.n_experts);
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let State { tally, chosen, ranked, there } = &mut *state;
        chosen.clear();
        chosen.extend_from_slice(routes);
        let each_route = routes.chunks_mut(c.top_k);
        match self.mode {
            Lossy::TopP(p) => each_route.for_each(|route| top_p(route, p, ranked)),
            Lossy::TopK(k) => each_route.for_each(|route| top_k(route, k, ranked)),
            Lossy::CacheRoute { .. } | Lossy::MissBudget(_) => {
                let Some(stream) = m.stream().filter(|_| each_route.len() <= SHORT_PASS) else {
                    return;
                };
                // Looked up once: reads may end meanwhile.
                there.clear();
                there.extend((0..c.n_experts as u32).map(|id| stream.resident(layer, id)));
                let resident = |id: u32| there[id as usize];
                if let Lossy::CacheRoute { keep, of } = self.mode {
                    for (route, logits) in each_route.zip(logits.clone()) {
                        ranked.clear();
                        ranked.resize(of, (NONE, 0.0));
                        rank(c, logits, bias, ranked);
                        // Groups of experts may leave fewer to choose from.
                        cache_route(used(ranked), keep, resident, route);
                        weigh(c, route);
                    }
                } else if let Lossy::MissBudget(n) = self.mode {
                    miss_budget(routes, c.top_k, n, resident, ranked);
                }
            }
        }
        let pairs = chosen.chunks(c.top_k).zip(routes.chunks(c.top_k));
        for ((chosen, route), logits) in pairs.zip(logits) {
            tally.count(chosen, used(route), |e| math::sigmoid(logits[e as usize]));
        }
    }
}

/// The part of a route that is used: all of it, except where lossy routing dropped experts.
pub(super) fn used(route: &Route) -> &Route {
    let n = route.iter().position(|r| r.0 == NONE).unwrap_or(route.len());
    &route[..n]
}

/// Drops the experts that are not to be kept; the weights of the others are scaled to the sum that all had.
fn keep_only(route: &mut Route, keep: impl Fn(u32) -> bool) {
    let n = route.iter().filter(|r| keep(r.0)).count();
    if n == route.len() {
        return;
    }
    let all = sum(route);
    // A stable sort: who stays keeps the order of choice.
    route.sort_by_key(|r| !keep(r.0));
    let kept = sum(&route[..n]);
    if kept > 0.0 {
        route[..n].iter_mut().for_each(|r| r.1 = r.1 / kept * all);
    }
    route[n..].fill((NONE, 0.0));
}

fn sum(route: &Route) -> f32 {
    route.iter().map(|r| r.1).sum()
}

/// Keeps the `k` experts of largest weight; of equal weights the earlier choice.
fn top_k(route: &mut Route, k: usize, heaviest: &mut Vec<(u32, f32)>) {
    heaviest.clear();
    heaviest.extend_from_slice(route);
    heaviest.sort_by(|a, b| b.1.total_cmp(&a.1));
    heaviest.truncate(k);
    keep_only(route, |e| heaviest.iter().any(|r| r.0 == e));
}

/// Keeps the fewest experts that together have the share `p` of the weight.
fn top_p(route: &mut Route, p: f32, heaviest: &mut Vec<(u32, f32)>) {
    let wanted = p * sum(route);
    heaviest.clear();
    heaviest.extend_from_slice(route);
    heaviest.sort_by(|a, b| b.1.total_cmp(&a.1));
    let mut mass = 0.0;
    let last = heaviest.iter().position(|r| {
        mass += r.1;
        mass >= wanted
    });
    top_k(route, last.map_or(route.len(), |last| last + 1), heaviest);
}

/// Fills `route` from the experts `ranked` by choice: the first `keep`, then those that are resident, then the others.
/// They stay in the order of choice.
fn cache_route(ranked: &Route, keep: usize, resident: impl Fn(u32) -> bool, route: &mut Route) {
    let places = route.len() - keep;
    let mut there = ranked[keep..].iter().filter(|r| resident(r.0)).count().min(places);
    let mut absent = places - there;
    let chosen = ranked.iter().enumerate().filter(|&(rank, r)| {
        if rank < keep {
            return true;
        }
        let left = if resident(r.0) { &mut there } else { &mut absent };
        let take = *left > 0;
        *left -= usize::from(take);
        take
    });
    for (place, (_, r)) in route.iter_mut().zip(chosen) {
        *place = *r;
    }
}

/// Drops the missing experts of all rows but the `budget` whose weights have the largest sums. A row that would be left
/// with none keeps its best one, and whoever else chose that one has it too.
fn miss_budget(
    routes: &mut [(u32, f32)],
    top_k: usize,
    budget: usize,
    resident: impl Fn(u32) -> bool,
    read: &mut Vec<(u32, f32)>,
) {
    read.clear();
    for &(e, weight) in routes.iter().filter(|r| !resident(r.0)) {
        match read.iter_mut().find(|r| r.0 == e) {
            Some(r) => r.1 += weight,
            None => read.push((e, weight)),
        }
    }
    read.sort_unstable_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    read.truncate(budget);
    for route in routes.chunks(top_k) {
        if !route.iter().any(|r| resident(r.0) || read.iter().any(|x| x.0 == r.0)) {
            let best = route.iter().copied().reduce(|a, b| if b.1 > a.1 { b } else { a });
            read.extend(best);
        }
    }
    for route in routes.chunks_mut(top_k) {
        keep_only(route, |e| resident(e) || read.iter().any(|x| x.0 == e));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROUTE: [(u32, f32); 4] = [(7, 0.5), (2, 1.0), (9, 0.25), (4, 0.25)];

    fn ids(route: &Route) -> Vec<u32> {
        used(route).iter().map(|r| r.0).collect()
    }

    fn thinned(f: impl Fn(&mut Route)) -> Vec<(u32, f32)> {
        let mut route = ROUTE;
        f(&mut route);
        used(&route).to_vec()
    }

    #[test]
    fn the_k_experts_of_largest_weight_stay() {
        let kept = |k: usize| thinned(|r| top_k(r, k, &mut Vec::new()));
        assert_eq!(kept(1), [(2, 2.0)]);
        assert_eq!(kept(2), [(7, 0.5 / 1.5 * 2.0), (2, 1.0 / 1.5 * 2.0)]);
        // Equal weights: the earlier choice stays, though its id is higher.
        assert_eq!(ids(&kept(3)), [7, 2, 9]);
        assert_eq!(kept(4), ROUTE, "nothing is dropped, so nothing is scaled");
    }

    #[test]
    fn the_fewest_experts_that_reach_the_share_stay() {
        for (p, want) in [
            (0.001, &[2][..]),
            (0.5, &[2]),
            (0.501, &[7, 2]),
            (0.75, &[7, 2]),
            (0.76, &[7, 2, 9]),
            (0.875, &[7, 2, 9]),
            (0.876, &[7, 2, 9, 4]),
            (0.999, &[7, 2, 9, 4]),
        ] {
            let route = thinned(|r| top_p(r, p, &mut Vec::new()));
            assert_eq!(ids(&route), want, "{p}");
            assert!((sum(&route) - 2.0).abs() < 1e-6, "{p}: {route:?}");
        }
        let mut one = [(3, 0.7)];
        top_p(&mut one, 0.1, &mut Vec::new());
        assert_eq!(one, [(3, 0.7)]);
    }

    #[test]
    fn weights_that_vanish_stay_finite() {
        let mut route = [(1, 0.0), (2, 0.0)];
        top_p(&mut route, 0.5, &mut Vec::new());
        assert_eq!(used(&route), [(1, 0.0)]);
        // The only expert that is there weighs next to nothing: it gets all the weight.
        let mut route = [(1, 2.5), (2, 1e-40)];
        miss_budget(&mut route, 2, 0, |e| e == 2, &mut Vec::new());
        assert_eq!(ids(&route), [2]);
        assert!((route[0].1 - 2.5).abs() < 1e-3, "{route:?}");
    }

    #[test]
    fn resident_experts_take_the_places_behind_the_kept_ones() {
        let ranked: Vec<(u32, f32)> = (10..18).map(|e| (e, e as f32)).collect();
        let chosen = |keep: usize, of: usize, there: &[u32]| {
            let mut route = [(0, 0.0); 4];
            cache_route(&ranked[..of], keep, |e| there.contains(&e), &mut route);
            assert!(route.iter().all(|r| r.1 == r.0 as f32), "plain scores: {route:?}");
            ids(&route)
        };
        // Nothing or everything is there: the true choice.
        assert_eq!(chosen(1, 8, &[]), [10, 11, 12, 13]);
        assert_eq!(chosen(1, 8, &(10..18).collect::<Vec<_>>()), [10, 11, 12, 13]);
        assert_eq!(chosen(1, 8, &[10, 11, 12, 13]), [10, 11, 12, 13]);
        // One substitute: the last of the true choice goes.
        assert_eq!(chosen(1, 8, &[17]), [10, 11, 12, 17]);
        // Two are there beyond the true choice, one of it is.
        assert_eq!(chosen(1, 8, &[13, 15, 16]), [10, 13, 15, 16]);
        // More than there are places: the best of them.
        assert_eq!(chosen(2, 8, &[13, 14, 15, 16]), [10, 11, 13, 14]);
        // The kept ones need not be there, and do not count as substitutes when they are.
        assert_eq!(chosen(2, 8, &[10, 14]), [10, 11, 12, 14]);
        // Bounds: everything is kept, or there is nothing else.
        assert_eq!(chosen(4, 8, &[14, 15]), [10, 11, 12, 13]);
        assert_eq!(chosen(1, 4, &[14, 15]), [10, 11, 12, 13]);
    }

    #[test]
    fn misses_compete_for_the_budget_over_all_rows() {
        // Two rows: 1 is there; 3 is wanted by both and weighs most, then 2, then 4 and 5, which weigh the same.
        let rows = [
            (1, 0.25),
            (2, 0.5),
            (3, 0.25),
            (4, 0.125),
            (3, 0.5),
            (5, 0.125),
            (1, 0.25),
            (6, 0.0625),
        ];
        let kept = |budget: usize| {
            let mut routes = rows;
            miss_budget(&mut routes, 4, budget, |e| e == 1, &mut Vec::new());
            for (route, all) in routes.chunks(4).zip(rows.chunks(4)) {
                assert!((sum(used(route)) - sum(all)).abs() < 1e-6, "{route:?}");
            }
            routes.chunks(4).map(ids).collect::<Vec<_>>()
        };
        assert_eq!(kept(0), [vec![1], vec![1]]);
        assert_eq!(kept(1), [vec![1, 3], vec![3, 1]]);
        assert_eq!(kept(2), [vec![1, 2, 3], vec![3, 1]]);
        // The tie goes to the lower id.
        assert_eq!(kept(3), [vec![1, 2, 3, 4], vec![3, 1]]);
        assert_eq!(kept(4), [vec![1, 2, 3, 4], vec![3, 5, 1]]);
        let mut routes = rows;
        miss_budget(&mut routes, 4, 5, |e| e == 1, &mut Vec::new());
        assert_eq!(routes, rows, "a budget for all changes no bit");
    }

    #[test]
    fn a_row_without_experts_keeps_its_best() {
        // Nothing is there and nothing may be read. The first of two equal weights is the best, and the second row,
        // which wants it too, needs none of its own.
        let mut routes = [(1, 0.25), (2, 0.5), (3, 0.5), (4, 0.75), (5, 0.125), (2, 0.125)];
        miss_budget(&mut routes, 3, 0, |_| false, &mut Vec::new());
        assert_eq!(routes.chunks(3).map(ids).collect::<Vec<_>>(), [[2], [2]]);
        assert_eq!((routes[0].1, routes[3].1), (1.25, 1.0));
    }

    #[test]
    fn the_tally_has_shares_and_the_divergence() {
        let score = |e: u32| [0.4, 0.2, 0.2, 0.2][e as usize];
        let route = |ids: &[u32]| ids.iter().map(|&e| (e, 1.0)).collect::<Vec<_>>();
        let mut tally = Tally::default();
        tally.count(&route(&[0, 1]), &route(&[1, 0]), score);
        assert_eq!((tally.agreement(), tally.dropped(), tally.kl()), (1.0, 0.0, 0.0));
        // Two thirds of the weight of the chosen ones.
        let mut tally = Tally::default();
        tally.count(&route(&[0, 1]), &route(&[0]), score);
        assert_eq!((tally.agreement(), tally.dropped()), (0.5, 0.5));
        assert!((tally.kl() - 1.5f64.ln()).abs() < 1e-6, "{tally:?}");
        // 1 gives way to 2: three quarters of the three that are chosen or used.
        let mut tally = Tally::default();
        tally.count(&route(&[0, 1]), &route(&[0, 2]), score);
        assert_eq!((tally.agreement(), tally.dropped()), (0.5, 0.0));
        assert!((tally.kl() - (4.0f64 / 3.0).ln()).abs() < 1e-6, "{tally:?}");
        tally.count(&route(&[0, 1]), &route(&[0, 1]), score);
        assert!((tally.kl() - (4.0f64 / 3.0).ln() / 2.0).abs() < 1e-6, "the mean over rows");
        assert_eq!(tally.agreement(), 0.75);
    }
}
