//! Decoding with the built-in model, and what a parallel section costs.

use divan::{Bencher, black_box};
use glm::engine::{Engine, Options};
use glm::pool::Pool;
use glm::sample::argmax;

fn main() {
    divan::main();
}

/// One token after a prompt of this length.
#[divan::bench(args = [64, 512])]
fn token(bencher: Bencher<'_, '_>, prompt: u32) {
    let engine = Engine::builtin(&Options::default()).expect("the built-in model opens");
    let ids: Vec<u32> = (0..prompt).map(|i| 300 + i * 7 % 2000).collect();
    let mut session = engine.session();
    session.prefill(&engine, &ids, None, None).expect("a prompt inside the context");
    bencher.bench_local(|| {
        let id = argmax(session.logits());
        session.push(&engine, id, None).expect("a token inside the context");
        session.tokens().len()
    });
}

/// An empty parallel section.
#[divan::bench(args = [1, 2, 4])]
fn section(bencher: Bencher<'_, '_>, threads: usize) {
    let pool = Pool::new(threads);
    bencher.bench_local(|| {
        pool.par(threads, |i| {
            black_box(i);
        });
    });
}
