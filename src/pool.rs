//! The compute pool: fork-join over a fixed number of tasks, and the disjoint output tiles that tasks write.
//!
//! Workers spin for some tens of microseconds after a section, then park, so an idle engine costs nothing. Tasks are
//! taken from a shared counter; which thread runs a task never changes a result, because a task owns its outputs and
//! no sum is split between tasks. This is the only place that spawns threads for a forward pass (packing uses rayon).

use std::any::Any;
use std::cell::{Cell, UnsafeCell};
use std::marker::PhantomData;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

/// Iterations of the spin loop before a worker parks: some tens of microseconds.
const SPINS: u32 = 2_000;

/// A job as the workers see it: a task body and the number of tasks.
type Job = *const (dyn Fn(usize) + Sync);

/// Bit of `state` that is set while workers may enter the section.
const OPEN: u64 = 1 << 31;
/// Bits of `state` that count the workers inside the section.
const INSIDE: u64 = OPEN - 1;

struct Shared {
    /// Generation of the section (upper half), `OPEN`, and the number of workers inside.
    ///
    /// A worker enters an open section by counting itself in; the caller closes the section when no task is left and
    /// then waits for those inside only. A worker that the system has not scheduled meanwhile is not waited for.
    state: AtomicU64,
    /// Next task to take.
    next: AtomicUsize,
    stop: AtomicBool,
    job: UnsafeCell<Option<(Job, usize)>>,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

// SAFETY: `job` is written only by `Pool::par` while the section is closed and nobody is inside, and is published by
// the release store that opens it; workers read it only while inside. The closure behind the pointer is `Sync`.
unsafe impl Sync for Shared {}
// SAFETY: as above; the raw pointer is only dereferenced while `Pool::par` keeps the closure alive.
unsafe impl Send for Shared {}

/// A fixed set of worker threads. The calling thread takes part in every section.
pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    /// One section at a time: a second caller waits.
    section: Mutex<()>,
}

impl Pool {
    /// A pool of `threads` compute threads, the caller included (so `threads - 1` are spawned).
    pub fn new(threads: usize) -> Self {
        let shared = Arc::new(Shared {
            state: AtomicU64::new(0),
            next: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            job: UnsafeCell::new(None),
            panic: Mutex::new(None),
        });
        // A system that refuses a thread leaves a smaller pool; results do not change.
        let workers = (1..threads.max(1))
            .map_while(|i| {
                let shared = Arc::clone(&shared);
                let name = format!("glm-compute-{i}");
                std::thread::Builder::new().name(name).spawn(move || worker(&shared)).ok()
            })
            .collect();
        Self { shared, workers, section: Mutex::new(()) }
    }

    /// Number of threads that take part in a section.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Runs `body(0) … body(tasks - 1)`, each exactly once, and returns when all are done. A panic in a task is
    /// raised again here after the others finished.
    ///
    /// # Panics
    /// When called from inside a task: sections do not nest.
    pub fn par(&self, tasks: usize, body: impl Fn(usize) + Sync) {
        assert!(!IN_TASK.get(), "a parallel section inside a task");
        if tasks <= 1 || self.workers.is_empty() {
            let _inside = InTask::enter();
            (0..tasks).for_each(body);
            return;
        }
        let _section = self.section.lock().unwrap_or_else(PoisonError::into_inner);
        let s = &*self.shared;
        let body: &(dyn Fn(usize) + Sync) = &body;
        // SAFETY: only the lifetime is erased. The closure outlives every use: the guard below keeps this function from
        // returning or unwinding before the section is closed and empty, and workers touch the pointer only inside.
        let job = unsafe {
            std::mem::transmute::<&(dyn Fn(usize) + Sync), &'static (dyn Fn(usize) + Sync)>(body)
        };
        // SAFETY: the section is closed and empty (the last call ended so), so no worker reads `job`.
        unsafe { *s.job.get() = Some((std::ptr::from_ref(job), tasks)) };
        s.next.store(0, Ordering::Relaxed);
        let generation = (s.state.load(Ordering::Relaxed) >> 32).wrapping_add(1);
        let open = OpenSection(s);
        s.state.store(generation << 32 | OPEN, Ordering::Release);
        for w in self.workers.iter().take(tasks - 1) {
            w.thread().unpark();
        }
        s.take_tasks(body, tasks);
        drop(open);
        let panic = s.panic.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(payload) = panic {
            resume_unwind(payload);
        }
    }

    /// Cuts `items` into chunks of `size` and runs `body(i, chunk i)` on each, in parallel.
    pub fn par_chunks<T: Send>(
        &self,
        items: &mut [T],
        size: usize,
        body: impl Fn(usize, &mut [T]) + Sync,
    ) {
        assert!(size > 0, "a chunk has at least one item");
        let len = items.len();
        let base = SendPtr(items.as_mut_ptr());
        self.par(len.div_ceil(size), |i| {
            let base = &base;
            let (at, end) = (i * size, ((i + 1) * size).min(len));
            // SAFETY: `at..end` lies inside `items`, which stays borrowed until `par` returns; tasks have different
            // `i`, so their ranges are disjoint.
            body(i, unsafe { std::slice::from_raw_parts_mut(base.0.add(at), end - at) });
        });
    }

    /// Runs `f` on every item, in parallel.
    pub fn par_each<T: Send>(&self, items: Vec<T>, f: impl Fn(T) + Sync) {
        let slots: Vec<Mutex<Option<T>>> = items.into_iter().map(|t| Mutex::new(Some(t))).collect();
        self.par(slots.len(), |i| {
            let item = slots[i].lock().unwrap_or_else(PoisonError::into_inner).take();
            item.into_iter().for_each(&f);
        });
    }

    /// Splits the row-major matrix `y` (`stride` columns) into tiles and runs `body(band, tile)` on each in parallel.
    ///
    /// Each band of rows is cut into column chunks of `chunk`. Empty bands are skipped.
    pub fn par_tiles(
        &self,
        y: &mut [f32],
        stride: usize,
        bands: Bands<'_>,
        chunk: usize,
        body: impl Fn(usize, TileMut) + Sync,
    ) {
        assert!(stride > 0 && chunk > 0, "a tile has at least one column");
        let all_rows = y.len() / stride;
        if let Bands::Between(bounds) = bands {
            let inside = bounds.last().is_none_or(|&b| b <= all_rows);
            assert!(bounds.is_sorted() && inside, "bands lie inside y");
        }
        let chunks = stride.div_ceil(chunk);
        let n = match bands {
            Bands::Every(rows) => all_rows.div_ceil(rows.max(1)),
            Bands::Between(bounds) => bounds.len().saturating_sub(1),
        };
        let base = SendPtr(y.as_mut_ptr());
        self.par(n * chunks, |task| {
            let base = &base;
            let (band, c) = (task / chunks, task % chunks);
            let rows = match bands {
                Bands::Every(k) => band * k.max(1)..((band + 1) * k.max(1)).min(all_rows),
                Bands::Between(bounds) => bounds[band]..bounds[band + 1],
            };
            if rows.is_empty() {
                return;
            }
            let cols = c * chunk..((c + 1) * chunk).min(stride);
            // Tasks differ in band or in column chunk, so their tiles are disjoint, and all lie inside `y` (asserted
            // above), which stays borrowed until `par` returns.
            body(band, TileMut { base: base.0, stride, rows, cols, _y: PhantomData });
        });
    }
}

/// How rows are cut into bands.
#[derive(Clone, Copy)]
pub enum Bands<'a> {
    /// This many rows each.
    Every(usize),
    /// Between consecutive bounds: ascending, the last at most the number of rows.
    Between(&'a [usize]),
}

struct SendPtr<T>(*mut T);
// SAFETY: only used to derive disjoint parts of a borrowed slice of `Send` items, one per task (see `par_chunks` and
// `par_tiles`).
unsafe impl<T: Send> Sync for SendPtr<T> {}

/// A rectangle of a row-major f32 matrix that one task owns.
pub struct TileMut<'a> {
    base: *mut f32,
    stride: usize,
    rows: Range<usize>,
    cols: Range<usize>,
    _y: PhantomData<&'a mut [f32]>,
}

impl<'a> TileMut<'a> {
    /// The whole of `y` as one tile of `stride` columns.
    pub fn whole(y: &'a mut [f32], stride: usize) -> Self {
        let rows = y.len() / stride.max(1);
        Self { base: y.as_mut_ptr(), stride, rows: 0..rows, cols: 0..stride, _y: PhantomData }
    }

    /// Rows of the matrix that the tile covers.
    #[inline]
    pub fn rows(&self) -> Range<usize> {
        self.rows.clone()
    }

    /// Columns of the matrix that the tile covers.
    #[inline]
    pub fn cols(&self) -> Range<usize> {
        self.cols.clone()
    }

    /// Columns `cols` of this tile (counted from its first) as a tile of their own.
    ///
    /// # Panics
    /// When they are not inside.
    pub fn part(&mut self, cols: Range<usize>) -> TileMut<'_> {
        assert!(cols.start <= cols.end && cols.end <= self.cols.len(), "columns inside the tile");
        let cols = self.cols.start + cols.start..self.cols.start + cols.end;
        TileMut { base: self.base, stride: self.stride, rows: self.rows(), cols, _y: PhantomData }
    }

    /// The tile's part of its `i`-th row: `cols.len()` values.
    ///
    /// # Panics
    /// When `i` is not below `rows.len()`.
    #[inline]
    pub fn row(&mut self, i: usize) -> &mut [f32] {
        assert!(i < self.rows.len(), "row {i} of a tile of {}", self.rows.len());
        // SAFETY: the row lies inside the matrix (checked by the constructors), no other tile covers these columns of
        // this row, and `&mut self` makes the borrow unique within the tile.
        unsafe {
            let p = self.base.add((self.rows.start + i) * self.stride + self.cols.start);
            std::slice::from_raw_parts_mut(p, self.cols.len())
        }
    }
}

thread_local! {
    /// Whether this thread runs a task.
    static IN_TASK: Cell<bool> = const { Cell::new(false) };
}

/// Marks this thread as running a task until dropped.
struct InTask;

impl InTask {
    fn enter() -> Self {
        IN_TASK.set(true);
        Self
    }
}

impl Drop for InTask {
    fn drop(&mut self) {
        IN_TASK.set(false);
    }
}

/// Closes the section when dropped, and waits until no worker is inside.
struct OpenSection<'a>(&'a Shared);

impl Drop for OpenSection<'_> {
    fn drop(&mut self) {
        self.0.state.fetch_and(!OPEN, Ordering::AcqRel);
        let mut spins = 0u32;
        while self.0.state.load(Ordering::Acquire) & INSIDE != 0 {
            spins += 1;
            if spins < SPINS { std::hint::spin_loop() } else { std::thread::yield_now() }
        }
    }
}

/// Counts a worker out of the section when dropped.
struct Inside<'a>(&'a Shared);

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        self.0.state.fetch_sub(1, Ordering::Release);
    }
}

impl Shared {
    fn take_tasks(&self, body: &(dyn Fn(usize) + Sync), tasks: usize) {
        let _inside = InTask::enter();
        loop {
            let task = self.next.fetch_add(1, Ordering::Relaxed);
            if task >= tasks {
                return;
            }
            if let Err(payload) = catch_unwind(AssertUnwindSafe(|| body(task))) {
                let mut first = self.panic.lock().unwrap_or_else(PoisonError::into_inner);
                match *first {
                    None => *first = Some(payload),
                    // Dropping a payload may panic in turn; a second one is only leaked.
                    Some(_) => std::mem::forget(payload),
                }
            }
        }
    }
}

fn worker(s: &Shared) {
    let mut seen = 0;
    loop {
        let mut spins = 0;
        let mut state = s.state.load(Ordering::Acquire);
        while state >> 32 == seen {
            spins += 1;
            if spins < SPINS {
                std::hint::spin_loop();
            } else {
                std::thread::park();
                spins = 0;
            }
            state = s.state.load(Ordering::Acquire);
        }
        if s.stop.load(Ordering::Relaxed) {
            return;
        }
        seen = state >> 32;
        // Enter if the section is still open and still this one.
        while state >> 32 == seen && state & OPEN != 0 {
            match s.state.compare_exchange_weak(
                state,
                state + 1,
                Ordering::AcqRel,
                Ordering::Acquire,
            ) {
                Ok(_) => {
                    let _inside = Inside(s);
                    // SAFETY: inside an open section: `par` wrote the job before opening and waits for this worker.
                    if let Some((body, tasks)) = unsafe { *s.job.get() } {
                        // SAFETY: the closure is alive until this worker has left.
                        s.take_tasks(unsafe { &*body }, tasks);
                    }
                    break;
                }
                Err(now) => state = now,
            }
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        self.shared.state.fetch_add(1 << 32, Ordering::Release);
        for w in self.workers.drain(..) {
            w.thread().unpark();
            // A worker never panics outside a task, and task panics were already raised.
            let _ = w.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_runs_once_for_any_thread_count() {
        for threads in [1, 2, 3, 7] {
            let pool = Pool::new(threads);
            for tasks in [0usize, 1, 2, 5, 100] {
                let hits: Vec<AtomicUsize> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
                pool.par(tasks, |i| {
                    hits[i].fetch_add(1, Ordering::Relaxed);
                });
                assert!(
                    hits.iter().all(|h| h.load(Ordering::Relaxed) == 1),
                    "{threads} threads, {tasks} tasks"
                );
            }
        }
    }

    #[test]
    fn tiles_cover_the_bands_exactly() {
        let pool = Pool::new(3);
        let mut y = vec![0.0; 7 * 10];
        pool.par_tiles(&mut y, 10, Bands::Between(&[0, 2, 2, 6]), 4, |band, mut t| {
            for i in 0..t.rows().len() {
                t.row(i).iter_mut().for_each(|v| *v += band as f32 + 1.0);
            }
        });
        let want: Vec<f32> =
            (0..7).flat_map(|r| vec![[1., 1., 3., 3., 3., 3., 0.][r]; 10]).collect();
        assert_eq!(y, want);
        let mut y = vec![0.0; 7 * 10];
        pool.par_tiles(&mut y, 10, Bands::Every(3), 6, |band, mut t| {
            let n = t.cols().len();
            let mut right = t.part(n - 2..n);
            right.row(0)[0] = 1.0 + band as f32;
        });
        let want: Vec<f32> = (0..70)
            .map(|i| match i {
                4 | 8 => 1.0,
                34 | 38 => 2.0,
                64 | 68 => 3.0,
                _ => 0.0,
            })
            .collect();
        assert_eq!(y, want);
        let mut items = [0; 50];
        pool.par_chunks(&mut items, 7, |i, chunk| chunk.iter_mut().for_each(|v| *v += i + 1));
        assert_eq!(items, std::array::from_fn::<usize, 50, _>(|i| i / 7 + 1));
    }

    #[test]
    fn a_panic_in_a_task_is_raised_and_the_pool_stays_usable() {
        let pool = Pool::new(2);
        let r = catch_unwind(AssertUnwindSafe(|| pool.par(8, |i| assert!(i != 3, "task three"))));
        assert!(r.is_err());
        let n = AtomicUsize::new(0);
        pool.par(8, |_| {
            n.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(n.load(Ordering::Relaxed), 8);
    }

    #[test]
    fn sections_do_not_nest_at_any_thread_count() {
        for threads in [1, 2] {
            let pool = Pool::new(threads);
            for tasks in [1, 4] {
                let nested = || pool.par(tasks, |_| pool.par(1, |_| ()));
                assert!(catch_unwind(AssertUnwindSafe(nested)).is_err(), "{threads} threads");
            }
            pool.par_each(vec![1, 2, 3], |_| ());
        }
    }

    #[test]
    fn every_item_is_taken_once() {
        let pool = Pool::new(3);
        let mut hits = [0; 50];
        pool.par_each(hits.iter_mut().collect(), |h| *h += 1);
        assert_eq!(hits, [1; 50]);
    }

    #[test]
    fn two_callers_share_one_pool() {
        let pool = Pool::new(2);
        let n = AtomicUsize::new(0);
        std::thread::scope(|s| {
            for _ in 0..4 {
                s.spawn(|| {
                    for _ in 0..200 {
                        pool.par(4, |_| {
                            n.fetch_add(1, Ordering::Relaxed);
                        });
                    }
                });
            }
        });
        assert_eq!(n.load(Ordering::Relaxed), 4 * 200 * 4);
    }
}
