//! Integration tests: one binary, real files, real processes.

mod fixture;
mod oracle;
