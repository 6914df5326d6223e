//! Whether to look ahead: reading what the next layer will probably want, while this one computes.
//!
//! A guess that is right hides a read behind computing; a wrong one delays the reads that are wanted. Which of them
//! weighs more depends on the model, the drive and the cache, so both ways are timed in turns.
#![forbid(unsafe_code)]

use std::fmt;
use std::str::FromStr;
use std::time::{Duration, Instant};

/// Rows up to which a pass is a step of decode; longer ones are parts of a prompt.
const DECODE_ROWS: usize = 8;
/// Passes that are timed at once.
const WINDOW: usize = 4;
/// Windows in which both ways take turns before the faster one is kept.
const TRIAL: usize = 6;
/// One in so many windows goes the slower way, in case things have changed.
const RETRIAL: usize = 16;
/// Weight of the last window in the mean.
const NEWS: f64 = 0.3;

/// Whether decode looks ahead.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Lookahead {
    /// Never.
    Off,
    /// Always.
    On,
    /// While it is faster.
    #[default]
    Auto,
}

impl Lookahead {
    /// Every mode.
    pub const ALL: [Self; 3] = [Self::Off, Self::On, Self::Auto];

    fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::On => "on",
            Self::Auto => "auto",
        }
    }
}

impl fmt::Display for Lookahead {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Lookahead {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|m| m.name() == s);
        found.ok_or_else(|| format!("`{s}` is none of off, on, auto"))
    }
}

/// Times decode passes with and without looking ahead.
#[derive(Debug)]
pub(super) struct Trial {
    mode: Lookahead,
    /// What the running window does.
    on: bool,
    passes: usize,
    time: Duration,
    windows: usize,
    /// Seconds per pass, a moving mean: without, with.
    mean: [Option<f64>; 2],
    /// Since when the running pass runs, and whether it is one of decode.
    began: Option<(Instant, bool)>,
}

impl Trial {
    pub(super) fn new(mode: Lookahead) -> Self {
        Self {
            mode,
            on: true,
            passes: 0,
            time: Duration::ZERO,
            windows: 0,
            mean: [None; 2],
            began: None,
        }
    }

    pub(super) fn begin(&mut self, rows: usize) {
        self.began = Some((Instant::now(), rows <= DECODE_ROWS));
    }

    /// Ends a pass; one that failed is not timed.
    pub(super) fn end(&mut self, ok: bool) {
        if let Some((began, true)) = self.began.take().filter(|_| ok) {
            self.timed(began.elapsed());
        }
    }

    fn timed(&mut self, pass: Duration) {
        self.time += pass;
        self.passes += 1;
        if self.passes < WINDOW {
            return;
        }
        let new = self.time.as_secs_f64() / WINDOW as f64;
        let mean = &mut self.mean[usize::from(self.on)];
        *mean = Some(mean.map_or(new, |old| old + NEWS * (new - old)));
        (self.time, self.passes) = (Duration::ZERO, 0);
        self.windows += 1;
        self.on = match self.mean {
            [Some(off), Some(on)] if self.windows >= TRIAL => {
                (on < off) != self.windows.is_multiple_of(RETRIAL)
            }
            _ => !self.on,
        };
    }

    /// Whether the running pass looks ahead. Prompts do unless told otherwise: the next layer wants most of its
    /// experts, so few guesses are wrong.
    pub(super) fn looks_ahead(&self) -> bool {
        let decode = self.began.is_some_and(|(_, decode)| decode);
        match self.mode {
            Lookahead::Off => false,
            Lookahead::On => true,
            Lookahead::Auto => self.on || !decode,
        }
    }

    /// Milliseconds per decode pass without and with looking ahead, where both were timed.
    pub(super) fn timings(&self) -> Option<[f64; 2]> {
        let [off, on] = self.mean;
        Some([off? * 1e3, on? * 1e3])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn passes(trial: &mut Trial, n: usize, ms: impl Fn(bool) -> u64) -> usize {
        let mut ahead = 0;
        for _ in 0..n {
            trial.begin(1);
            ahead += usize::from(trial.looks_ahead());
            let took = Duration::from_millis(ms(trial.on));
            trial.timed(took);
        }
        ahead
    }

    #[test]
    fn the_faster_way_is_kept_and_the_other_tried_again() {
        let mut trial = Trial::new(Lookahead::Auto);
        let n = RETRIAL * WINDOW * 4;
        let ahead = passes(&mut trial, n, |on| if on { 10 } else { 12 });
        assert!(ahead > n * 8 / 10 && ahead < n, "{ahead} of {n}");
        // The drive became slower for guesses: the mean follows.
        let ahead = passes(&mut trial, 2 * n, |on| if on { 20 } else { 12 });
        assert!(ahead < n / 2, "{ahead} of {}", 2 * n);
        let ahead = passes(&mut trial, n, |on| if on { 20 } else { 12 });
        assert!(ahead > 0 && ahead < n / 5, "{ahead} of {n}");
    }

    #[test]
    fn told_so_it_does_not_try() {
        for (mode, want) in [(Lookahead::Off, 0), (Lookahead::On, 100)] {
            assert_eq!(passes(&mut Trial::new(mode), 100, |on| 1 + u64::from(on)), want);
        }
        let mut trial = Trial::new(Lookahead::Auto);
        trial.on = false;
        trial.begin(100);
        assert!(trial.looks_ahead(), "prompts look ahead");
    }
}
