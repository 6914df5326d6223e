//! Where the time of forward passes goes.
#![forbid(unsafe_code)]

use std::time::{Duration, Instant};

/// A part of the forward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Token embedding and what comes before the first layer.
    Embedding,
    /// Projections, cache and softmax.
    Attention,
    /// Index keys, scores and selection.
    Indexer,
    /// Router.
    Router,
    /// Routed experts.
    Experts,
    /// Waiting for experts to be read.
    Wait,
    /// Dense MLPs and shared experts.
    Dense,
    /// Final norm and output head.
    Head,
}

impl Phase {
    /// Every phase, in the order of a layer.
    pub const ALL: [Self; 8] = [
        Self::Embedding,
        Self::Attention,
        Self::Indexer,
        Self::Router,
        Self::Experts,
        Self::Wait,
        Self::Dense,
        Self::Head,
    ];

    /// Name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Embedding => "embedding",
            Self::Attention => "attention",
            Self::Indexer => "indexer",
            Self::Router => "router",
            Self::Experts => "experts",
            Self::Wait => "disk wait",
            Self::Dense => "dense",
            Self::Head => "head",
        }
    }
}

/// Time by phase.
#[derive(Clone, Debug, Default)]
pub struct Profile {
    time: [Duration; Phase::ALL.len()],
    /// Forward passes.
    pub passes: usize,
    /// Rows over all passes.
    pub rows: usize,
}

impl Profile {
    /// Starts a clock.
    pub fn start(&self) -> Instant {
        Instant::now()
    }

    /// Adds the time since `started` to `phase`.
    pub fn stop(&mut self, phase: Phase, started: Instant) {
        self.time[phase as usize] += started.elapsed();
    }

    /// As `stop`, less a part that another phase has counted.
    pub fn stop_less(&mut self, phase: Phase, started: Instant, other: Duration) {
        self.time[phase as usize] += started.elapsed().saturating_sub(other);
    }

    /// Adds a time that was measured elsewhere.
    pub fn add(&mut self, phase: Phase, time: Duration) {
        self.time[phase as usize] += time;
    }

    /// Time of one phase.
    pub fn total(&self, phase: Phase) -> Duration {
        self.time[phase as usize]
    }
}
