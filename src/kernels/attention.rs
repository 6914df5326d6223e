//! Attention over cached rows: softmax attention, the absorbed query, and indexer scores.
//!
//! Queries come in groups that see the same keys (heads of a position, or positions of a block), so a block of keys is
//! brought to f32 once for all of them. Scores and weighted means run in register tiles of several queries and several
//! keys or columns; every score is one f32 dot product, every element of a mean one fma chain in ascending key order.
#![forbid(unsafe_code)]

use super::format::MatView;
use super::math::exp;
use super::portable::{add_rows, dequant_into, dots};
use super::simd::{LANES, Simd, each, f16_to_f32};
use super::{Keys, Scratch, Seen};

/// Keys per block of the running softmax.
const BLOCK: usize = 64;

/// Rows `at..at + len` of what the queries see, as f32 in `buf` or in place.
#[inline(always)]
fn key_rows<'a, S: Simd>(
    keys: &Keys<'a>,
    seen: &Seen<'_>,
    at: usize,
    len: usize,
    buf: &'a mut [f32],
) -> &'a [f32] {
    let width = keys.width();
    if let (Keys::F32 { data, .. }, Seen::First(_)) = (keys, seen) {
        return &data[at * width..(at + len) * width];
    }
    for (j, row) in buf.chunks_exact_mut(width).take(len).enumerate() {
        let t = match seen {
            Seen::First(_) => at + j,
            Seen::Chosen(positions) => positions[at + j] as usize,
        };
        match *keys {
            Keys::F32 { data, .. } => row.copy_from_slice(&data[t * width..(t + 1) * width]),
            Keys::F16 { data, .. } => widen::<S>(&data[t * width..(t + 1) * width], row),
        }
    }
    &buf[..len * width]
}

/// f16 bit patterns as f32.
#[inline(always)]
fn widen<S: Simd>(from: &[u16], to: &mut [f32]) {
    let (to_chunks, to_tail) = to.as_chunks_mut::<LANES>();
    let (chunks, tail) = from.as_chunks::<LANES>();
    for (o, h) in to_chunks.iter_mut().zip(chunks) {
        S::store(S::load_f16(h), o);
    }
    for (o, &h) in to_tail.iter_mut().zip(tail) {
        *o = f16_to_f32(h);
    }
}

/// Softmax attention of `n` queries, in ascending blocks of 64 keys with a running maximum per query.
///
/// `q` is (n, width of a cache row); `out` is (n, rank): the weighted mean of the rows' first `rank` values.
#[inline(always)]
pub(super) fn attend<S: Simd>(
    q: &[f32],
    keys: &Keys<'_>,
    seen: &Seen<'_>,
    scale: f32,
    out: &mut [f32],
    scratch: &mut Scratch,
) {
    let width = keys.width();
    let n = q.len() / width;
    let rank = out.len() / n.max(1);
    let longest = seen.longest();
    let [buf, p, state] = scratch.parts([BLOCK * width, n * BLOCK, 2 * n]);
    let (max, sum) = state.split_at_mut(n);
    out.fill(0.0);
    max.fill(f32::NEG_INFINITY);
    sum.fill(0.0);
    for at in (0..longest).step_by(BLOCK) {
        let len = BLOCK.min(longest - at);
        let rows = key_rows::<S>(keys, seen, at, len, buf);
        scores::<S>(q, rows, width, p);
        // How many of these keys a query sees.
        let here = |i: usize| seen.of(i).saturating_sub(at).min(len);
        for i in 0..n {
            let seen_here = here(i);
            if seen_here == 0 {
                continue;
            }
            let p: &mut [f32; BLOCK] = &mut p.as_chunks_mut().0[i];
            for (j, p) in p.iter_mut().enumerate() {
                *p = if j < seen_here { *p * scale } else { f32::NEG_INFINITY };
            }
            let new_max = p.iter().fold(max[i], |m, &s| if s > m { s } else { m });
            // exp(-inf - finite) = 0 on the first block; afterwards 1 exactly while the maximum stays.
            let shrink = exp(max[i] - new_max);
            max[i] = new_max;
            sum[i] *= shrink;
            out[i * rank..(i + 1) * rank].iter_mut().for_each(|v| *v *= shrink);
            p.iter_mut().for_each(|v| *v = exp(*v - new_max));
            sum[i] = p[..seen_here].iter().fold(sum[i], |sum, p| sum + p);
        }
        // Neighbours that see as many of these keys are added together.
        let mut i = 0;
        while i < n {
            let same = (i..n).take_while(|&k| here(k) == here(i)).count();
            let count = here(i);
            if count > 0 {
                add_rows::<S>(
                    &p[i * BLOCK..],
                    BLOCK,
                    &rows[..count * width],
                    width,
                    &mut out[i * rank..],
                    rank,
                    (same, rank),
                );
            }
            i += same;
        }
    }
    for (out, sum) in out.chunks_exact_mut(rank).zip(sum) {
        let r = 1.0 / *sum;
        out.iter_mut().for_each(|v| *v *= r);
    }
}

/// `p[i][j]` = dot product of query `i` and row `j`, rows of `p` 64 apart.
#[inline(always)]
fn scores<S: Simd>(q: &[f32], rows: &[f32], width: usize, p: &mut [f32]) {
    let (n, len) = (q.len() / width, rows.len() / width);
    let query = |i: usize| &q[i * width..(i + 1) * width];
    let row = |j: usize| &rows[j * width..(j + 1) * width];
    let mut i = 0;
    while i < n {
        let mut j = 0;
        if S::TILE >= 8 && i + 4 <= n {
            while j + 4 <= len {
                let d =
                    dots::<S, 4, 4>(each!(k in 0..4, query(i + k)), each!(k in 0..4, row(j + k)));
                for k in 0..4 {
                    p[(i + k) * BLOCK + j..][..4].copy_from_slice(&d[k]);
                }
                j += 4;
            }
            for j in j..len {
                let d = dots::<S, 1, 4>([row(j)], each!(k in 0..4, query(i + k)));
                for k in 0..4 {
                    p[(i + k) * BLOCK + j] = d[0][k];
                }
            }
            i += 4;
        } else if i + 2 <= n {
            while j + 2 <= len {
                let d = dots::<S, 2, 2>([query(i), query(i + 1)], [row(j), row(j + 1)]);
                for k in 0..2 {
                    p[(i + k) * BLOCK + j..][..2].copy_from_slice(&d[k]);
                }
                j += 2;
            }
            if j < len {
                let d = dots::<S, 1, 2>([row(j)], [query(i), query(i + 1)]);
                p[i * BLOCK + j] = d[0][0];
                p[(i + 1) * BLOCK + j] = d[0][1];
            }
            i += 2;
        } else {
            while j + 4 <= len {
                let d = dots::<S, 1, 4>([query(i)], each!(k in 0..4, row(j + k)));
                p[i * BLOCK + j..][..4].copy_from_slice(&d[0]);
                j += 4;
            }
            for j in j..len {
                p[i * BLOCK + j] = dots::<S, 1, 1>([query(i)], [row(j)])[0][0];
            }
            i += 1;
        }
    }
}

/// `out[i][c] = Σ_k q[i][k] w[first + k][c]`, k ascending: a query moved into latent space.
///
/// Row `i` of `q` starts at `i * q_stride` and has `terms` values; row `i` of `out` starts at `i * out_stride`.
#[inline(always)]
pub(super) fn absorb<S: Simd>(
    w: &MatView<'_>,
    first: usize,
    terms: usize,
    (q, q_stride): (&[f32], usize),
    (out, out_stride): (&mut [f32], usize),
    n: usize,
    scratch: &mut Scratch,
) {
    let cols = w.cols();
    for i in 0..n {
        out[i * out_stride..][..cols].fill(0.0);
    }
    let mut rows = std::mem::take(&mut scratch.rows);
    if rows.len() < BLOCK * cols {
        rows.resize(BLOCK * cols, 0.0);
    }
    for at in (0..terms).step_by(BLOCK) {
        let len = BLOCK.min(terms - at);
        for (k, row) in rows.chunks_exact_mut(cols).take(len).enumerate() {
            dequant_into::<S>(w, first + at + k, row, scratch);
        }
        add_rows::<S>(&q[at..], q_stride, &rows[..len * cols], cols, out, out_stride, (n, cols));
    }
    scratch.rows = rows;
}

/// Indexer scores of one query position: `out[t] = Σ_h w_h * relu(dot(q_h, key_t) * scale)`, heads ascending.
#[inline(always)]
pub(super) fn index_scores<S: Simd>(
    q: &[f32],
    w: &[f32],
    keys: &Keys<'_>,
    first: usize,
    scale: f32,
    out: &mut [f32],
    scratch: &mut Scratch,
) {
    let d = q.len() / w.len();
    let heads = w.len();
    let query = |h: usize| &q[h * d..(h + 1) * d];
    let [buf] = scratch.parts([BLOCK * d]);
    let relu = |v: f32| if v > 0.0 || v.is_nan() { v } else { 0.0 };
    for (b, out) in out.chunks_mut(BLOCK).enumerate() {
        let rows = key_rows::<S>(keys, &Seen::First(&[]), first + b * BLOCK, out.len(), buf);
        let row = |j: usize| &rows[j * d..(j + 1) * d];
        let mut j = 0;
        while j < out.len() {
            // Four keys at a time, or one.
            let many = if j + 4 <= out.len() { 4 } else { 1 };
            let mut s = [0.0f32; 4];
            let mut h = 0;
            while h < heads {
                if S::TILE >= 8 && many == 4 && h + 4 <= heads {
                    let dots = dots::<S, 4, 4>(
                        each!(k in 0..4, query(h + k)),
                        each!(k in 0..4, row(j + k)),
                    );
                    for (k, dots) in dots.iter().enumerate() {
                        for (s, dot) in s.iter_mut().zip(dots) {
                            *s = w[h + k].mul_add(relu(dot * scale), *s);
                        }
                    }
                    h += 4;
                } else if many == 4 {
                    let dots = dots::<S, 1, 4>([query(h)], each!(k in 0..4, row(j + k)));
                    for (s, dot) in s.iter_mut().zip(dots[0]) {
                        *s = w[h].mul_add(relu(dot * scale), *s);
                    }
                    h += 1;
                } else {
                    let dot = dots::<S, 1, 1>([query(h)], [row(j)])[0][0];
                    s[0] = w[h].mul_add(relu(dot * scale), s[0]);
                    h += 1;
                }
            }
            out[j..j + many].copy_from_slice(&s[..many]);
            j += many;
        }
    }
}
