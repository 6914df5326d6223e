//! Decoding allocates nothing once it is warm: an allocator that counts, in a program of its own.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use glm::engine::{Engine, Options};
use glm::sample::argmax;

struct Counting;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is handed to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's duties are those of the system's allocator.
        unsafe { System.alloc(layout) }
    }

    unsafe fn realloc(&self, p: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: as in `alloc`.
        unsafe { System.realloc(p, layout, size) }
    }

    unsafe fn dealloc(&self, p: *mut u8, layout: Layout) {
        // SAFETY: as in `alloc`.
        unsafe { System.dealloc(p, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn decoding_allocates_nothing_once_warm() {
    // A context beyond the built-in model's index_topk of 256, so that keys are scored and chosen.
    let prompt: Vec<u32> = (0..300).map(|i| 300 + i * 7 % 2000).collect();
    for threads in [1, 2] {
        let options = Options { threads: Some(threads), ..Options::default() };
        let engine = Engine::builtin(&options).unwrap();
        let mut session = engine.session();
        session.prefill(&engine, &prompt, None, None).unwrap();
        session.reserve(200);
        let step = |session: &mut glm::engine::Session| {
            let id = argmax(session.logits());
            session.push(&engine, id, None).unwrap();
        };
        // A thread that meets a kind of task for the first time still makes room: the first quiet window counts.
        let quiet = (0..10).any(|_| {
            let before = ALLOCATIONS.load(Ordering::Relaxed);
            (0..20).for_each(|_| step(&mut session));
            ALLOCATIONS.load(Ordering::Relaxed) == before
        });
        assert!(quiet, "allocations in every 20 of 200 tokens, {threads} threads");
    }
    let before = ALLOCATIONS.load(Ordering::Relaxed);
    drop(std::hint::black_box(vec![1u8; 100]));
    assert!(ALLOCATIONS.load(Ordering::Relaxed) > before, "the allocator counts");
}
