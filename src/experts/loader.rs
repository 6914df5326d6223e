//! Threads that read experts from disk into slots.
//!
//! A job owns its slot: it travels with the job to a thread and comes back filled. Demand goes before read-ahead.
//! Direct reads go past the system's cache, so the budget is the only cache; they are whole pages.
#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use memmap2::MmapMut;

use super::record::{Loaded, PAGE, Run};
use super::{Library, Name};
use crate::store::ShardFile;
use crate::sys;

/// Where bytes come from. Tests put a source with faults in between.
pub trait Source: Send + Sync {
    /// Reads from byte `at` of a file: how many bytes were read, 0 at its end. Direct reads keep to whole pages.
    ///
    /// # Errors
    /// Those of the system; `Interrupted` is tried again.
    fn read_at(&self, file: usize, buffer: &mut [u8], at: u64, direct: bool) -> io::Result<usize>;

    /// Whether direct reads are wanted and possible for this file.
    fn direct(&self, file: usize) -> bool;
}

/// Model files, opened for positioned reads.
pub struct Files(Vec<Opened>);

struct Opened {
    /// For messages, and for bytes that are in no file.
    shard: Arc<ShardFile>,
    buffered: Option<File>,
    direct: Option<File>,
}

impl Files {
    /// Opens the files, for direct reads too where `direct` asks and the file system has them.
    ///
    /// # Errors
    /// A file cannot be opened.
    pub fn open(shards: &[Arc<ShardFile>], direct: bool) -> Result<Self> {
        let open = |shard: &Arc<ShardFile>| -> Result<Opened> {
            let on_disk = shard.on_disk();
            let open = || File::open(&shard.path);
            let buffered = on_disk.then(open).transpose();
            Ok(Opened {
                shard: Arc::clone(shard),
                buffered: buffered
                    .with_context(|| format!("cannot open {}", shard.path.display()))?,
                direct: (on_disk && direct).then(|| sys::open_direct(&shard.path).ok()).flatten(),
            })
        };
        shards.iter().map(open).collect::<Result<_>>().map(Self)
    }

    /// Asks the system to forget what it has cached of a file.
    pub(super) fn forget(&self, file: usize) {
        if let Some(file) = &self.0[file].buffered {
            sys::drop_from_cache(file);
        }
    }
}

impl Source for Files {
    fn read_at(&self, file: usize, buffer: &mut [u8], at: u64, direct: bool) -> io::Result<usize> {
        let opened = &self.0[file];
        if let Some(file) = opened.direct.as_ref().filter(|_| direct) {
            return sys::read_at(file, buffer, at);
        }
        if let Some(file) = &opened.buffered {
            return sys::read_at(file, buffer, at);
        }
        let bytes = opened.shard.bytes();
        let rest = &bytes[(at as usize).min(bytes.len())..];
        let n = rest.len().min(buffer.len());
        buffer[..n].copy_from_slice(&rest[..n]);
        Ok(n)
    }

    fn direct(&self, file: usize) -> bool {
        self.0[file].direct.is_some()
    }
}

/// Reads one run into its place in a slot.
///
/// # Errors
/// The system cannot read, or the file ends before the run does; the message names file and byte.
pub(super) fn read_run(source: &dyn Source, run: &Run, path: &Path, slot: &mut [u8]) -> Result<()> {
    let (first, wanted) = (run.first_page(), run.end - run.first_page());
    let pages = &mut slot[run.at..run.at + run.span()];
    let mut direct = source.direct(run.file);
    let mut done = 0;
    while done < wanted {
        // What a direct read left in the middle of a page is read through the cache.
        direct &= done % PAGE == 0;
        let end = if direct { pages.len() } else { wanted };
        let at = (first + done) as u64;
        match source.read_at(run.file, &mut pages[done..end], at, direct) {
            Ok(0) => {
                return Err(anyhow!(
                    "{}: the file ends at byte {at}, bytes {} to {} were expected; it was truncated while in use",
                    path.display(),
                    run.start,
                    run.end
                ));
            }
            Ok(n) => done += n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => {
                return Err(e).with_context(|| {
                    format!("{}: cannot read bytes {at} to {}", path.display(), run.end)
                });
            }
        }
    }
    Ok(())
}

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
    source: Box<dyn Source>,
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
        source: Box<dyn Source>,
        name: Name,
        readers: usize,
    ) -> Result<Self> {
        let queues = Mutex::default();
        let shared = Arc::new(Shared { queues, work: Condvar::new(), library, source, name });
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
    let result = record.runs.iter().try_for_each(|run| {
        let path = &library.records.files[run.file].path;
        read_run(&*shared.source, run, path, &mut job.slot).or_else(|_| {
            retries += 1;
            read_run(&*shared.source, run, path, &mut job.slot)
        })
    });
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
