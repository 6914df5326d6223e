//! Integration tests: one binary, real files, real processes.

mod cli;
mod equality;
mod faults;
mod fixture;
mod layers;
mod mutate;
mod oracle;
mod quality;
