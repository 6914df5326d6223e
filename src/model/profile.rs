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

/// Time by phase: at any moment of a pass one phase runs, so the times add up to that of the passes.
#[derive(Clone, Debug)]
pub struct Profile {
    time: [Duration; Phase::ALL.len()],
    running: Phase,
    since: Instant,
    /// Forward passes.
    pub passes: usize,
    /// Rows over all passes.
    pub rows: usize,
}

impl Default for Profile {
    fn default() -> Self {
        let time = [Duration::ZERO; Phase::ALL.len()];
        Self { time, running: Phase::Embedding, since: Instant::now(), passes: 0, rows: 0 }
    }
}

impl Profile {
    /// Begins a pass over so many rows; what went by since the last one belongs to no phase.
    pub fn begin(&mut self, rows: usize) {
        self.passes += 1;
        self.rows += rows;
        self.running = Phase::Embedding;
        self.since = Instant::now();
    }

    /// Ends the running phase and begins `phase`; returns the one that ended.
    pub fn switch(&mut self, phase: Phase) -> Phase {
        let now = Instant::now();
        self.time[self.running as usize] += now - self.since;
        self.since = now;
        std::mem::replace(&mut self.running, phase)
    }

    /// Gives to `phase` a part of the running phase's time, measured elsewhere.
    pub fn reassign(&mut self, phase: Phase, time: Duration) {
        self.since += time;
        self.time[phase as usize] += time;
    }

    /// Time of one phase.
    pub fn total(&self, phase: Phase) -> Duration {
        self.time[phase as usize]
    }

    /// Time of all phases.
    pub fn sum(&self) -> Duration {
        self.time.iter().sum()
    }
}
