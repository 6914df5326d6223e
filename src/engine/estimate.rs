//! How fast a planned model will decode, from the bytes that a token touches and the speeds of what they come from.
//!
//! One token takes
//!
//! ```text
//! layers · o  +  resident / m  +  max(missed / d,  shared / m + routed / p)  +  last / p
//! ```
//!
//! where `resident`, `shared`, `routed` and `missed` are bytes of weights outside experts, of shared experts, of the
//! routed experts that the token is sent to, and of those of them that are in no slot; `m` is the speed of going
//! through weights in memory, `p` that of products with experts as they are stored, `d` that of the drive; `o` is what a
//! layer costs beside its bytes. A layer reads while it computes the shared expert, what is in slots and what has
//! arrived; the product with the last expert to arrive (`last`, one in each layer that misses any) overlaps with no read,
//! and neither does anything outside that half of the layer. With all experts in memory a token takes
//! `layers · o + (resident + shared + routed) / m`.
//!
//! Left out are the attention cache, so it is an estimate for a short context, and what reading threads take from those
//! that compute.
#![forbid(unsafe_code)]

use super::plan::{Plan, Residency};

/// What a layer costs beside its bytes: some dozen parallel sections and small steps on one thread.
const LAYER_SECONDS: f64 = 35e-6;
/// Share of the speed of plain reads at which decoding goes through weights in memory, at worst and at best.
const MEMORY_SHARE: [f64; 2] = [0.65, 0.95];

/// A figure and how far it went up and down while it was measured.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Span {
    /// Lower end.
    pub low: f64,
    /// Median.
    pub middle: f64,
    /// Upper end.
    pub high: f64,
}

/// Bytes per second, all threads together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Speeds {
    /// Plain reads of memory.
    pub memory: Span,
    /// Products with weights as they lie in files and slots; `None` when nothing is streamed.
    pub products: Option<Span>,
    /// Random reads of experts; `None` when nothing is streamed, or not from a drive.
    pub drive: Option<Span>,
}

/// What bounds the speed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tier {
    /// Reading weights that are in memory.
    Memory,
    /// Products with experts as stored.
    Products,
    /// Reading experts from the drive.
    Drive,
}

impl Tier {
    /// Name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Products => "the processor",
            Self::Drive => "the drive",
        }
    }

    /// Name in JSON.
    pub fn key(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Products => "products",
            Self::Drive => "drive",
        }
    }
}

/// What to expect of decoding.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Estimate {
    /// Tokens per second.
    pub low: f64,
    /// Tokens per second.
    pub high: f64,
    /// What takes most of the time.
    pub bound: Tier,
    /// Bytes of that tier per token.
    pub bytes: u64,
    /// Speed of that tier.
    pub speed: f64,
}

impl Plan {
    /// What to expect when a share `hits` of the experts that are asked for is in memory. `None` for mapped files, where
    /// the system decides.
    pub fn estimate(&self, speeds: &Speeds, hits: f64) -> Option<Estimate> {
        if self.residency == Residency::Mapped {
            return None;
        }
        let [worst, best] = MEMORY_SHARE;
        let usual = self.parts(speeds, hits, |s| s.middle, (worst + best) / 2.0);
        let rate = |of: fn(Span) -> f64, share| 1.0 / self.parts(speeds, hits, of, share).token;
        let candidates = [
            (usual.memory, Tier::Memory, usual.memory_bytes, speeds.memory),
            (
                usual.products,
                Tier::Products,
                usual.product_bytes,
                speeds.products.unwrap_or(speeds.memory),
            ),
            (usual.drive, Tier::Drive, usual.drive_bytes, speeds.drive.unwrap_or(speeds.memory)),
        ];
        let longest = candidates.into_iter().max_by(|a, b| a.0.total_cmp(&b.0));
        longest.map(|(_, bound, bytes, speed)| Estimate {
            low: rate(|s| s.low, worst),
            high: rate(|s| s.high, best),
            bound,
            bytes: bytes as u64,
            speed: speed.middle,
        })
    }

    /// The time of one token, and of it what each tier takes.
    fn parts(&self, speeds: &Speeds, hits: f64, of: impl Fn(Span) -> f64, share: f64) -> Parts {
        let [resident, shared, routed] =
            [self.touched.resident, self.touched.shared, self.touched.routed].map(|b| b as f64);
        let layers = self.n_layers as f64 * LAYER_SECONDS;
        let m = share * of(speeds.memory);
        if self.residency == Residency::Memory {
            let memory_bytes = resident + shared + routed;
            let memory = memory_bytes / m;
            return Parts { token: layers + memory, memory, memory_bytes, ..Parts::default() };
        }
        let p = speeds.products.map_or(m, &of);
        // What is read from no drive is copied.
        let d = speeds.drive.map_or(m, &of);
        let missed = routed * (1.0 - hits);
        // One expert of every layer that has any.
        let one_each = routed / self.top_k.max(1) as f64;
        let last = one_each.min(missed);
        Parts {
            token: layers + resident / m + (missed / d).max(shared / m + routed / p) + last / p,
            memory: (resident + shared) / m,
            memory_bytes: resident + shared,
            products: routed / p,
            product_bytes: routed,
            drive: missed / d,
            drive_bytes: missed,
        }
    }
}

/// Seconds of one token, and seconds and bytes of each tier.
#[derive(Default)]
struct Parts {
    token: f64,
    memory: f64,
    memory_bytes: f64,
    products: f64,
    product_bytes: f64,
    drive: f64,
    drive_bytes: f64,
}
