//! `glm` runs GLM-5.x (`glm_moe_dsa`) models on one computer: latent attention over a compressed cache, sparse attention
//! chosen by an indexer, 256 routed experts per layer, exactly as the reference implementation computes them, with the
//! same bits on every CPU, thread count and batch. This library is the program without its `main`; benches and tests
//! use it. The program is a front end over [`engine::Engine`] and [`engine::Session`].
//!
//! ```text
//! prompt text ─ template ─ tokenizer ─▶ ids ─▶ Session ─┐
//!                                                       │ rows: (sequence, position, id)
//!          ┌────────────────────────────────────────────┘
//!          ▼
//!   Model::forward(rows)   embed → layers × { norm → attention → + → norm → dense | experts → + } → norm → head
//!          │                                   │                             │
//!          │                                KvCache                       Experts ◀─ Shards ◀─ mapped files
//!          ▼
//!   logits of the rows that asked ─▶ Sampler ─▶ id ─▶ stop rules ─▶ whole characters ─▶ Event ─▶ front end
//! ```
//!
//! # Code map, top to bottom; a module uses only what stands below it
//!
//! | module | what it owns |
//! |---|---|
//! | [`cli`], [`commands`] | what may be typed, and what is printed; the only place that prints |
//! | [`engine`] | a model opened with tokenizer, template and defaults; sessions; the decode loop |
//! | [`model`] | config, weights by name, attention, indexer, experts' arithmetic, cache, the layer loop |
//! | [`tokenizer`], [`template`], [`sample`] | text to ids and back; messages to text; logits to ids. They do not see each other or the model |
//! | [`experts`] | the one way to reach expert weights |
//! | [`store`] | model files: headers, tensors, formats, packing, random matrices |
//! | [`kernels`] | arithmetic on rows, one table per instruction set |
//! | [`pool`] | fork-join; the only spawner of compute threads |
//! | [`sys`] | what differs between operating systems |
//!
//! # Invariants, each with a test
//!
//! 1. Logits are the same bits for every instruction set, thread count, batch composition and block size
//!    (`tests/it/equality.rs`, `kernels/tests.rs`), and on every kind of machine (`tests/it/digests.rs`). The exception
//!    has to be asked for by name ([`model::lossy`], `tests/it/lossy.rs`).
//! 2. Logits, router and indexer decisions equal the reference implementation's (`tests/it/oracle.rs`).
//! 3. Nothing is read of a weight before all headers agree with the config; an error names file and tensor
//!    (`tests/it/faults.rs`), and no input makes the program panic (`tests/it/mutate.rs`, `fuzz/`).
//! 4. Text of a user never becomes a control token (`tokenizer.rs`, `tests/it/cli.rs`).
//! 5. No module uses one above it (`tests/it/layers.rs`).

pub mod cli;
pub mod commands;
pub mod engine;
pub mod experts;
pub mod kernels;
pub mod model;
pub mod pool;
pub mod sample;
pub mod store;
pub mod sys;
pub mod template;
pub mod tokenizer;
