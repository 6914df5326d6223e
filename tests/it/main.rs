//! Integration tests: one binary, real files, real processes.
#![expect(
    clippy::unwrap_used,
    unreachable_pub,
    reason = "a helper that fails fails its test; modules share helpers within one binary"
)]

mod cli;
mod digests;
mod equality;
mod faults;
mod fixture;
mod layers;
mod lossy;
mod mutate;
mod oracle;
mod quality;
mod routing;
mod sessions;
mod streaming;
mod synth;
