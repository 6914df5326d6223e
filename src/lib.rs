//! glm
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
