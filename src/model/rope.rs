//! Interleaved rotary position embedding: pair (x[2j], x[2j+1]) is rotated by `position * theta^(-2j/d)`.
#![forbid(unsafe_code)]

use crate::kernels::math::{pow64, sin_cos};

/// Inverse frequencies of one model.
pub(super) struct Rope {
    inv_freq: Vec<f32>, // (d_rope / 2)
}

impl Rope {
    /// Frequencies for `d` rotated dimensions.
    pub(super) fn new(theta: f32, d: usize) -> Self {
        // The reference raises to the power and inverts in f32; rounding at the same two places gives its bits.
        let inv_freq = (0..d / 2).map(|j| {
            let e = (2 * j) as f32 / d as f32;
            1.0 / (pow64(f64::from(theta), f64::from(e)) as f32)
        });
        Self { inv_freq: inv_freq.collect() }
    }

    /// (sin, cos) of every pair at one position.
    pub(super) fn angles(&self, position: usize, out: &mut Vec<(f32, f32)>) {
        // The reference multiplies in f32; positions below 2^24 are exact.
        out.extend(self.inv_freq.iter().map(|f| sin_cos(position as f32 * f)));
    }

    /// Number of rotated pairs.
    pub(super) fn pairs(&self) -> usize {
        self.inv_freq.len()
    }
}

/// Rotates the pairs of `x` in place.
pub(super) fn rotate(x: &mut [f32], angles: &[(f32, f32)]) {
    for (pair, &(sin, cos)) in x.as_chunks_mut::<2>().0.iter_mut().zip(angles) {
        let [a, b] = *pair;
        *pair = [a * cos - b * sin, b * cos + a * sin];
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rotation_keeps_length_and_depends_on_distance_only() {
        let rope = Rope::new(10_000.0, 8);
        let at = |p: usize, x: [f32; 8]| {
            let mut angles = Vec::new();
            rope.angles(p, &mut angles);
            let mut x = x;
            rotate(&mut x, &angles);
            x
        };
        let (q, k) = (
            [1.0, 2.0, -1.0, 0.5, 3.0, -2.0, 0.25, 1.5],
            [0.5, -1.0, 2.0, 1.0, -0.5, 0.75, 1.0, -2.0],
        );
        let dot = |a: [f32; 8], b: [f32; 8]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>();
        assert_eq!(at(0, q), q);
        assert!((dot(at(7, q), at(3, k)) - dot(at(104, q), at(100, k))).abs() < 1e-4);
    }
}
