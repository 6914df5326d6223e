//! The DSA indexer: index keys, scores, and the keys that each query keeps.
//!
//! A layer that scores keys decides for itself and for the layers after it that share its choice. While a query sees no
//! more keys than it may keep, nothing is scored (the choice would be all of them), but index keys are cached all the
//! same.
#![forbid(unsafe_code)]

use anyhow::{Result, bail};

use super::config::LATENT_EPS;
use super::rope::rotate;
use super::weights::Indexer;
use super::{Block, Model};
use crate::kernels::{Acts, KeySet};

/// Scores held at a time: bounds the scratch memory of long contexts.
const MAX_SCORES: usize = 1 << 22;

/// Per query row the keys it attends to; `None` means all at or before its position.
pub(super) type Selection = Option<Vec<u32>>;

/// The keys of one selection as kernels take them.
pub(super) fn key_set(selection: &Selection, pos: usize) -> KeySet<'_> {
    selection.as_ref().map_or(KeySet::All(pos + 1), |s| KeySet::Chosen(s))
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
) -> Result<()> {
    let Some(x) = &m.config.indexer else { return Ok(()) };
    let (kernels, pairs, d) = (m.compute.kernels, m.rope.pairs(), x.head_dim);
    let n = block.rows.len();
    let angles = block.angles;
    let of_row = |i: usize| &angles[i * pairs..(i + 1) * pairs];

    let mut keys = vec![0.0; n * d];
    m.compute.matmul(&w.k, h.input(0), n, &mut keys);
    for (i, key) in keys.chunks_mut(d).enumerate() {
        kernels.layer_norm(key, &w.k_norm, &w.k_norm_bias, LATENT_EPS);
        rotate(key, of_row(i));
        block.caches[block.rows[i].seq].push_index(layer, key);
    }

    selections.iter_mut().for_each(|s| *s = None);
    let scored: Vec<usize> = (0..n).filter(|&i| block.rows[i].pos >= x.top_k).collect();
    if scored.is_empty() {
        return Ok(());
    }
    let mut q = vec![0.0; n * x.n_heads * d];
    m.compute.matmul(&w.q_b, qr.input(0), n, &mut q);
    for (i, q) in q.chunks_mut(x.n_heads * d).enumerate() {
        q.chunks_mut(d).for_each(|head| rotate(head, of_row(i)));
    }
    let mut head_weights = vec![0.0; n * x.n_heads];
    m.compute.matmul(&w.head_weights, h.input(0).exact(), n, &mut head_weights);
    let head_scale = 1.0 / (x.n_heads as f32).sqrt();
    head_weights.iter_mut().for_each(|v| *v *= head_scale);

    let score_scale = 1.0 / (d as f32).sqrt();
    let longest = scored.iter().map(|&i| block.rows[i].pos + 1).max().unwrap_or(1);
    let at_once = (MAX_SCORES / longest).max(1);
    let (rows, caches) = (block.rows, &block.caches);
    for part in scored.chunks(at_once) {
        let mut scores = vec![0.0; part.len() * longest];
        let bounds: Vec<usize> = (0..=part.len()).collect();
        let chunk = m.compute.chunk(longest, x.n_heads * d, part.len());
        m.compute.pool.par_tiles(&mut scores, longest, &bounds, chunk, |band, mut tile| {
            let i = part[band];
            let row = rows[i];
            let (first, end) = (tile.cols().start, tile.cols().end.min(row.pos + 1));
            if let Some(keys) = caches[row.seq].index_keys(layer).filter(|_| first < end) {
                let q = &q[i * x.n_heads * d..(i + 1) * x.n_heads * d];
                let w = &head_weights[i * x.n_heads..(i + 1) * x.n_heads];
                kernels.index_scores(
                    q,
                    w,
                    &keys,
                    first,
                    score_scale,
                    &mut tile.row(0)[..end - first],
                );
            }
        });
        let chosen = m.compute.pool.par_map(part.len(), |j| {
            let pos = rows[part[j]].pos;
            top_keys(&scores[j * longest..][..pos + 1], x.top_k)
        });
        for (&i, keys) in part.iter().zip(chosen) {
            if keys.is_none() {
                bail!("layer {layer}: an indexer score at position {} is not finite", rows[i].pos);
            }
            selections[i] = keys;
        }
    }
    Ok(())
}

/// The positions of the `k` largest scores, ascending; on a tie the earlier position. `None` if a score is not finite.
fn top_keys(scores: &[f32], k: usize) -> Option<Vec<u32>> {
    if !scores.iter().all(|s| s.is_finite()) {
        return None;
    }
    let mut keys: Vec<u32> = (0..scores.len() as u32).collect();
    if k < keys.len() {
        let score = |t: &u32| scores[*t as usize];
        // Scores are finite, so `total_cmp` could only differ on the sign of zero, which must tie.
        keys.select_nth_unstable_by(k, |a, b| {
            (score(b) + 0.0).total_cmp(&(score(a) + 0.0)).then(a.cmp(b))
        });
        keys.truncate(k);
        keys.sort_unstable();
    }
    Some(keys)
}

#[cfg(test)]
mod tests {
    use super::top_keys;

    #[test]
    fn the_largest_scores_win_and_ties_go_to_the_earlier_key() {
        assert_eq!(top_keys(&[0.0, 3.0, -1.0, 3.0, 2.0], 2), Some(vec![1, 3]));
        assert_eq!(top_keys(&[1.0, -0.0, 0.0, 0.0], 2), Some(vec![0, 1]));
        assert_eq!(top_keys(&[1.0, 2.0], 5), Some(vec![0, 1]));
        assert_eq!(top_keys(&[1.0, f32::NAN], 1), None);
    }

    proptest::proptest! {
        #[test]
        fn equals_a_stable_sort(scores in proptest::collection::vec(-3i8..3, 1..60), k in 1usize..20) {
            let scores: Vec<f32> = scores.iter().map(|&s| f32::from(s)).collect();
            let mut order: Vec<u32> = (0..scores.len() as u32).collect();
            order.sort_by(|a, b| scores[*b as usize].total_cmp(&scores[*a as usize]));
            order.truncate(k);
            order.sort_unstable();
            proptest::prop_assert_eq!(top_keys(&scores, k), Some(order));
        }
    }
}
