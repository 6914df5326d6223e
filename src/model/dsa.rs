//! The DSA indexer: index keys, scores, and the keys that each query keeps.
//!
//! A layer that scores keys decides for itself and for the layers after it that share its choice. While a query sees no
//! more keys than it may keep, nothing is scored (the choice would be all of them), but index keys are cached all the
//! same.
#![forbid(unsafe_code)]

use std::cell::RefCell;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Result, ensure};

use super::config::LATENT_EPS;
use super::rope::rotate;
use super::weights::Indexer;
use super::{Block, Model};
use crate::kernels::{Acts, KeySet};
use crate::pool::Bands;

/// Scores held at a time: bounds the scratch memory of long contexts.
const MAX_SCORES: usize = 1 << 22;

/// The keys that a query row attends to.
#[derive(Clone, Default)]
pub(super) struct Selection {
    /// Ascending; only meaningful when `chosen`.
    keys: Vec<u32>,
    chosen: bool,
}

impl Selection {
    /// Whether the row attends to all keys at or before its position.
    pub(super) fn is_all(&self) -> bool {
        !self.chosen
    }

    /// Forgets a choice.
    pub(super) fn reset(&mut self) {
        self.chosen = false;
    }

    /// The chosen keys.
    pub(super) fn keys(&self) -> &[u32] {
        &self.keys
    }

    /// The keys of a row at position `pos`.
    pub(super) fn key_set(&self, pos: usize) -> KeySet<'_> {
        if self.chosen { KeySet::Chosen(&self.keys) } else { KeySet::All(pos + 1) }
    }
}

/// Buffers of the indexer.
#[derive(Default)]
pub(super) struct Scratch {
    keys: Vec<f32>,
    q: Vec<f32>,
    head_weights: Vec<f32>,
    scores: Vec<f32>,
    scored: Vec<u32>,
}

thread_local! {
    /// Sortable scores of one row, to select from.
    static RANKS: RefCell<Vec<u64>> = RefCell::default();
}

/// Caches the block's index keys and chooses keys for its rows.
///
/// `h` is the normalised layer input, `qr` the normalised query latent.
pub(super) fn select(
    m: &Model,
    layer: usize,
    w: &Indexer,
    block: &mut Block<'_, '_>,
    h: &Acts,
    qr: &Acts,
    selections: &mut [Selection],
    s: &mut Scratch,
) -> Result<()> {
    let Some(x) = &m.config.indexer else { return Ok(()) };
    let (kernels, pairs, d) = (m.compute.kernels, m.rope.pairs(), x.head_dim);
    let n = block.rows.len();
    let angles = block.angles;
    let of_row = |i: usize| &angles[i * pairs..(i + 1) * pairs];

    s.keys.resize(n * d, 0.0);
    m.compute.matmul(&w.k, h.input(0), n, &mut s.keys);
    for (i, key) in s.keys.chunks_mut(d).enumerate() {
        kernels.layer_norm(key, &w.k_norm, &w.k_norm_bias, LATENT_EPS);
        rotate(key, of_row(i));
        block.caches[block.rows[i].seq].push_index(layer, key);
    }

    selections.iter_mut().for_each(Selection::reset);
    s.scored.clear();
    s.scored.extend((0..n as u32).filter(|&i| block.rows[i as usize].pos >= x.top_k));
    if s.scored.is_empty() {
        return Ok(());
    }
    s.q.resize(n * x.n_heads * d, 0.0);
    m.compute.matmul(&w.q_b, qr.input(0), n, &mut s.q);
    for (i, q) in s.q.chunks_mut(x.n_heads * d).enumerate() {
        q.chunks_mut(d).for_each(|head| rotate(head, of_row(i)));
    }
    s.head_weights.resize(n * x.n_heads, 0.0);
    m.compute.matmul(&w.head_weights, h.input(0).exact(), n, &mut s.head_weights);
    let head_scale = 1.0 / (x.n_heads as f32).sqrt();
    s.head_weights.iter_mut().for_each(|v| *v *= head_scale);

    let score_scale = 1.0 / (d as f32).sqrt();
    let (rows, caches) = (block.rows, &block.caches);
    let pos_of = |i: u32| rows[i as usize].pos;
    let longest = s.scored.iter().map(|&i| pos_of(i) + 1).max().unwrap_or(1);
    let at_once = (MAX_SCORES / longest).max(1);
    let (q, head_weights) = (&s.q, &s.head_weights);
    for part in s.scored.chunks(at_once) {
        s.scores.resize(part.len() * longest, 0.0);
        let chunk = m.compute.chunk(longest, x.n_heads * d, part.len());
        m.compute.pool.par_tiles(
            &mut s.scores,
            longest,
            Bands::Every(1),
            chunk,
            |band, mut tile| {
                let i = part[band] as usize;
                let row = rows[i];
                let (first, end) = (tile.cols().start, tile.cols().end.min(row.pos + 1));
                if let Some(keys) = caches[row.seq].index_keys(layer).filter(|_| first < end) {
                    let q = &q[i * x.n_heads * d..(i + 1) * x.n_heads * d];
                    let w = &head_weights[i * x.n_heads..(i + 1) * x.n_heads];
                    let out = &mut tile.row(0)[..end - first];
                    kernels.index_scores(q, w, &keys, first, score_scale, out);
                }
            },
        );
        let (first, last) = (part[0] as usize, part[part.len() - 1] as usize);
        let not_finite = AtomicUsize::new(usize::MAX);
        let scores = &s.scores;
        m.compute.pool.par_chunks(&mut selections[first..=last], 1, |k, selection| {
            let i = (first + k) as u32;
            let Ok(j) = part.binary_search(&i) else { return };
            let scores = &scores[j * longest..][..pos_of(i) + 1];
            selection[0].chosen = true;
            if !top_keys(scores, x.top_k, &mut selection[0].keys) {
                not_finite.fetch_min(pos_of(i), Ordering::Relaxed);
            }
        });
        let pos = not_finite.into_inner();
        ensure!(
            pos == usize::MAX,
            "layer {layer}: an indexer score at position {pos} is not finite"
        );
    }
    Ok(())
}

/// The positions of the `k` largest scores, ascending; on a tie the earlier position. False if a score is not finite.
fn top_keys(scores: &[f32], k: usize, keys: &mut Vec<u32>) -> bool {
    if !scores.iter().all(|s| s.is_finite()) {
        return false;
    }
    keys.clear();
    if k >= scores.len() {
        keys.extend(0..scores.len() as u32);
        return true;
    }
    RANKS.with_borrow_mut(|ranks| {
        ranks.clear();
        ranks.extend(scores.iter().zip(0u64..).map(|(&s, at)| u64::from(descending(s)) << 32 | at));
        ranks.select_nth_unstable(k);
        keys.extend(ranks[..k].iter().map(|&r| r as u32));
    });
    keys.sort_unstable();
    true
}

/// A number that is smaller for a larger finite score, equal for both zeros.
fn descending(score: f32) -> u32 {
    let bits = (score + 0.0).to_bits();
    // Negative numbers grow with their magnitude bits, positive ones shrink.
    if bits >> 31 == 1 { bits } else { !bits & 0x7fff_ffff }
}

#[cfg(test)]
mod tests {
    use super::top_keys;

    fn top(scores: &[f32], k: usize) -> Option<Vec<u32>> {
        let mut keys = vec![9];
        top_keys(scores, k, &mut keys).then_some(keys)
    }

    #[test]
    fn the_largest_scores_win_and_ties_go_to_the_earlier_key() {
        assert_eq!(top(&[0.0, 3.0, -1.0, 3.0, 2.0], 2), Some(vec![1, 3]));
        assert_eq!(top(&[1.0, -0.0, 0.0, 0.0], 2), Some(vec![0, 1]));
        assert_eq!(top(&[1.0, 2.0], 5), Some(vec![0, 1]));
        assert_eq!(top(&[1.0, f32::NAN], 1), None);
    }

    proptest::proptest! {
        #[test]
        fn equals_a_stable_sort(scores in proptest::collection::vec(-3i8..3, 1..60), k in 1usize..20) {
            let scores: Vec<f32> = scores.iter().map(|&s| f32::from(s) * 0.3).collect();
            let mut order: Vec<u32> = (0..scores.len() as u32).collect();
            order.sort_by(|a, b| scores[*b as usize].total_cmp(&scores[*a as usize]));
            order.truncate(k);
            order.sort_unstable();
            proptest::prop_assert_eq!(top(&scores, k), Some(order));
        }
    }
}
