//! Threads that read experts from disk into slots.
//!
//! A job owns its slot: it travels with the job to a thread and comes back filled. Demand goes before read-ahead.
#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use memmap2::MmapMut;

use super::drives::Drives;
use super::record::Loaded;
use super::{Library, Name};

/// One expert to be read.
pub(super) struct Job {
    /// `layer * n_experts + id`
    pub key: u32,
    pub slot: MmapMut,
}

/// One expert that was read, or could not be.
pub(super) struct Done {
    pub key: u32,
    /// On failure the slot, empty again.
    pub result: Result<Loaded, (anyhow::Error, Option<MmapMut>)>,
    pub service: Duration,
    /// Bytes read, 0 after a failure.
    pub bytes: usize,
    /// Reads that failed and were tried again.
    pub retries: u32,
}

#[derive(Default)]
struct Queues {
    demand: VecDeque<Job>,
    ahead: VecDeque<Job>,
    stop: bool,
}

struct Shared {
    queues: Mutex<Queues>,
    work: Condvar,
    library: Arc<Library>,
    drives: Drives,
    name: Name,
}

impl Shared {
    fn queues(&self) -> MutexGuard<'_, Queues> {
        // Queues are consistent between any two statements that could panic.
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The reading threads and their queue.
pub(super) struct Loader {
    shared: Arc<Shared>,
    done: Receiver<Done>,
    threads: Vec<JoinHandle<()>>,
}

impl Loader {
    /// Starts `readers` threads.
    ///
    /// # Errors
    /// The system refuses the first thread.
    pub(super) fn start(
        library: Arc<Library>,
        drives: Drives,
        name: Name,
        readers: usize,
    ) -> Result<Self> {
        let queues = Mutex::default();
        let shared = Arc::new(Shared { queues, work: Condvar::new(), library, drives, name });
        let (sender, done) = channel();
        let mut threads = Vec::new();
        for i in 0..readers.max(1) {
            let (shared, sender) = (Arc::clone(&shared), sender.clone());
            let thread = std::thread::Builder::new().name(format!("glm-read-{i}"));
            match thread.spawn(move || work(&shared, &sender)) {
                Ok(thread) => threads.push(thread),
                Err(e) => ensure!(!threads.is_empty(), "cannot start a reading thread: {e}"),
            }
        }
        Ok(Self { shared, done, threads })
    }

    /// Queues a read.
    pub(super) fn submit(&self, job: Job, ahead: bool) {
        let mut queues = self.shared.queues();
        if ahead { &mut queues.ahead } else { &mut queues.demand }.push_back(job);
        drop(queues);
        self.shared.work.notify_one();
    }

    /// Takes back the read-aheads that no thread has begun.
    pub(super) fn cancel_ahead(&self) -> Vec<Job> {
        self.shared.queues().ahead.drain(..).collect()
    }

    /// Takes back the demands that no thread has begun.
    pub(super) fn cancel_demand(&self) -> Vec<Job> {
        self.shared.queues().demand.drain(..).collect()
    }

    /// The next finished read, waiting up to `patience`.
    pub(super) fn wait(&self, patience: Duration) -> Option<Done> {
        self.done.recv_timeout(patience).ok()
    }

    /// The next finished read, if there is one.
    pub(super) fn poll(&self) -> Option<Done> {
        self.done.try_recv().ok()
    }
}

impl Drop for Loader {
    fn drop(&mut self) {
        let mut queues = self.shared.queues();
        queues.stop = true;
        queues.demand.clear();
        queues.ahead.clear();
        drop(queues);
        self.shared.work.notify_all();
        for thread in self.threads.drain(..) {
            // A reader that panicked has told so itself.
            let _ = thread.join();
        }
    }
}

/// A reading thread.
fn work(shared: &Shared, done: &Sender<Done>) {
    loop {
        let job = {
            let mut queues = shared.queues();
            loop {
                if queues.stop {
                    return;
                }
                let next = queues.demand.pop_front();
                if let Some(job) = next.or_else(|| queues.ahead.pop_front()) {
                    break job;
                }
                queues = shared.work.wait(queues).unwrap_or_else(PoisonError::into_inner);
            }
        };
        // Nobody listens any more only when the loader is being dropped.
        let _ = done.send(read(shared, job));
    }
}

/// Reads one expert; a read that failed is tried once more.
fn read(shared: &Shared, mut job: Job) -> Done {
    let started = Instant::now();
    let library = &shared.library;
    let (layer, id) = library.place(job.key);
    let (record, like) = (library.record(job.key), library.like(job.key));
    let mut retries = 0;
    let read = |run| shared.drives.read(run, &mut job.slot, &mut retries);
    let result = record.runs.iter().try_for_each(read);
    let service = started.elapsed();
    let done = |result, bytes| Done { key: job.key, result, service, bytes, retries };
    match result {
        Ok(()) => {
            let name = |part: &str| (shared.name)(layer, id, part);
            done(record.bind(like, job.slot, &name), record.bytes())
        }
        Err(e) => {
            let e = e.context(format!("layer {layer}, expert {id}"));
            done(Err((e, Some(job.slot))), 0)
        }
    }
}
