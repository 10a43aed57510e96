//! The thread of a device, which alone uses the device's streams.

use std::collections::VecDeque;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::copies::{CopyCall, copy_calls, merge};
use super::flights::{Flight, SpareEvents, StreamFlights, code};
use super::kernel_tables::{KernelTable, TABLE, Tables};
use super::kernels::{self, DeviceGrid, ENTRIES, Launch, LaunchBlocks, Swap, THREADS};
use super::pinned::PinnedRanges;
use super::strided::{BlockSelection, DevicePtr, StridedBlocks};
use crate::driver::{CopyDirection, Driver, FunctionHandle, Rows, StreamHandle, status};
use kvx_backend::process::ProcessWatch;
use kvx_core::backend::sync::{Condvar, Mutex, catch_panic, pause_between_looks};
use kvx_core::backend::{Hop, Ticket};
use kvx_core::{Error, ErrorKind, Result};

/// Work for the thread.
pub(super) enum DeviceWork {
    /// Copies that are already merged.
    Lines { way: CopyDirection, lines: Vec<Hop> },
    /// Fills memory with zeros.
    Zero { address: u64, len: usize },
    /// Settles when a stream of the program has completed its current work.
    Behind(StreamHandle),
    /// Copies blocks of grids to packed bytes, or the other way.
    Grids { gather: bool, packed: u64, grids: Vec<DeviceGrid>, indices: Arc<[u32]> },
    /// Makes writes of network cards visible to the device.
    Flush,
    /// Copies blocks and swaps their dimensions.
    Permute { to: StridedBlocks, from: StridedBlocks, swap: Swap },
}

/// Work, with its ticket and the processes involved.
pub(super) struct DeviceJob {
    pub(super) work: DeviceWork,
    /// Processes whose memory it reads or writes.
    pub(super) owners: Vec<Arc<ProcessWatch>>,
    pub(super) done: Ticket,
}

/// A running thread. Dropping it waits until it has done its work and ended.
pub(super) struct DeviceThread {
    shared: Arc<ThreadState>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

struct ThreadState {
    queue: Mutex<JobQueue>,
    changed: Condvar,
}

#[derive(Default)]
struct JobQueue {
    jobs: VecDeque<DeviceJob>,
    stop: bool,
    /// True once the thread takes no more jobs.
    ended: bool,
}

/// Settles the jobs that were never started when the thread ends, even by a panic.
struct EndGuard<'a>(&'a ThreadState);

impl Drop for EndGuard<'_> {
    fn drop(&mut self) {
        let mut queue = self.0.queue.lock();
        queue.ended = true;
        let never_started = std::mem::take(&mut queue.jobs);
        drop(queue);
        for job in never_started {
            catch_panic(|| job.done.settle(Err(end_error())));
        }
    }
}

fn end_error() -> Error {
    ErrorKind::Native.because(
        "the thread of the device has ended: report this as a bug, and start the process again",
    )
}

impl DeviceThread {
    /// Starts the thread, which creates the device's context and streams. Does not wait for that:
    /// the caller may be the thread of a transport. Errors: `Exhausted` without a thread.
    pub(super) fn start(driver: Arc<Driver>, pinned: Arc<PinnedRanges>) -> Result<Self> {
        let shared = Arc::new(ThreadState { queue: Mutex::default(), changed: Condvar::new() });
        let ours = Arc::clone(&shared);
        let name = format!("kvx-gpu {} {}", driver.info().driver, driver.info().ordinal);
        let run = move || {
            let _ended = EndGuard(&ours);
            // After an error, the next job tries again.
            while let Err(error) = ours.serve(&driver, &pinned) {
                if ours.refuse(&error) {
                    return;
                }
            }
        };
        let thread = std::thread::Builder::new().name(name).spawn(run).map_err(|error| {
            Error::os("could not start the thread of a device: raise ulimit -u", error)
                .with_kind(ErrorKind::Exhausted)
        })?;
        Ok(DeviceThread { shared, thread: Mutex::new(Some(thread)) })
    }

    /// Queues a job; its ticket settles when the work has ended.
    ///
    /// # Safety
    /// All memory that the work refers to stays valid until then.
    pub(super) unsafe fn ask(&self, job: DeviceJob) {
        let mut queue = self.shared.queue.lock();
        if queue.ended {
            drop(queue);
            return job.done.settle(Err(end_error()));
        }
        queue.jobs.push_back(job);
        drop(queue);
        self.shared.changed.notify_all();
    }
}

impl Drop for DeviceThread {
    fn drop(&mut self) {
        if kvx_core::backend::fork::check().is_err() {
            return; // the thread belongs to the parent
        }
        self.shared.queue.lock().stop = true;
        self.shared.changed.notify_all();
        let thread = self.thread.lock().take();
        if let Some(thread) = thread
            && thread.thread().id() != std::thread::current().id()
        {
            thread.join().ok(); // a panic there has been reported by the panic hook
        }
    }
}

/// The time after an event during which the thread polls without a pause: as long as a small copy
/// takes.
const EAGER: Duration = Duration::from_micros(30);
/// The shortest and the longest pause. In between, a pause is a fraction of the time without
/// events.
const PAUSES: (Duration, Duration) = (Duration::from_micros(20), Duration::from_micros(200));

impl ThreadState {
    /// Works until the thread must stop. Errors: those of the first driver calls on a device.
    fn serve(&self, driver: &Driver, pinned: &PinnedRanges) -> Result<()> {
        let _inside = driver.enter()?;
        self.run(&mut Streams::new(driver, pinned)?);
        Ok(())
    }

    /// Fails the queued jobs, and waits for the next one. Returns true if the thread must stop.
    fn refuse(&self, error: &Error) -> bool {
        let refused = std::mem::take(&mut self.queue.lock().jobs);
        for job in refused {
            catch_panic(|| job.done.settle(Err(error.clone())));
        }
        let mut queue = self.queue.lock();
        while queue.jobs.is_empty() && !queue.stop {
            queue = self.changed.wait_until(queue, None);
        }
        queue.stop && queue.jobs.is_empty()
    }

    fn run(&self, streams: &mut Streams<'_>) {
        let (mut since, mut looks) = (Instant::now(), 0);
        let mut jobs = VecDeque::new();
        loop {
            let stop = self.wait(&mut jobs, streams, since, looks);
            let mut happened = jobs.len();
            for job in jobs.drain(..) {
                streams.start(job);
            }
            happened += streams.look();
            (since, looks) = if happened > 0 { (Instant::now(), 0) } else { (since, looks + 1) };
            if stop && streams.are_empty() {
                return streams.end();
            }
        }
    }

    /// Takes the queued jobs. Without any, waits for an appropriate time first. Returns whether to
    /// stop.
    fn wait(
        &self,
        jobs: &mut VecDeque<DeviceJob>,
        streams: &Streams<'_>,
        since: Instant,
        looks: u32,
    ) -> bool {
        let mut queue = self.queue.lock();
        if queue.jobs.is_empty() {
            if streams.are_empty() {
                while queue.jobs.is_empty() && !queue.stop {
                    queue = self.changed.wait_until(queue, None);
                }
            } else if since.elapsed() > EAGER {
                let pause = (since.elapsed() / 8).clamp(PAUSES.0, PAUSES.1);
                queue = self.changed.wait_until(queue, Some(Instant::now() + pause));
            } else {
                drop(queue);
                pause_between_looks(looks);
                queue = self.queue.lock();
            }
        }
        std::mem::swap(jobs, &mut queue.jobs);
        queue.stop
    }
}

/// Up to this number of driver calls are made one by one.
const FEW_CALLS: usize = 8;
/// The same limit within a device, where a call takes longer than moving the bytes.
const FEW_CALLS_WITHIN: usize = 2;
/// The number of copies per batch.
const BATCH: usize = 1024;
/// The number of bytes of a hop in its table.
const HOP: usize = 24;

/// The streams of a device and their work. Used only on its thread.
struct Streams<'a> {
    driver: &'a Driver,
    pinned: &'a PinnedRanges,
    /// One for each direction, in the order of [`CopyDirection`]; then streams of the program.
    lanes: Vec<StreamFlights>,
    events: SpareEvents,
    tables: Tables,
    kernels: Result<Vec<FunctionHandle>>,
    /// True for directions in which the driver rejects copies of rows, like [`CopyDirection`].
    without_rows: [bool; OWN],
    broken: Option<Error>,
}

/// The number of the device's own lanes.
const OWN: usize = 3;

impl<'a> Streams<'a> {
    fn new(driver: &'a Driver, pinned: &'a PinnedRanges) -> Result<Self> {
        let mut lanes = Vec::with_capacity(OWN);
        for _ in 0..OWN {
            lanes.push(StreamFlights::new(driver.create_stream()?));
        }
        let kernels = driver.load_kernels();
        if let Err(error) = &kernels {
            let device = &driver.info().name;
            tracing::warn!(%error, device, "no kernels are available: scattered blocks are copied one by one, and blocks cannot be permuted");
        }
        let (events, tables) = (SpareEvents::default(), Tables::default());
        let without_rows = [false; OWN];
        Ok(Streams { driver, pinned, lanes, events, tables, kernels, without_rows, broken: None })
    }

    fn are_empty(&self) -> bool {
        self.lanes.iter().all(StreamFlights::is_empty)
    }

    /// Starts work. In any case, its ticket settles once none of it is on a stream.
    fn start(&mut self, DeviceJob { work, owners, done }: DeviceJob) {
        if let Some(error) = &self.broken {
            let error = error.clone();
            return catch_panic(|| done.settle(Err(error)));
        }
        let way = match &work {
            DeviceWork::Lines { way, .. } => *way,
            DeviceWork::Behind(stream) => {
                self.lanes.push(StreamFlights::new(*stream));
                let flight = Flight { done, started: Ok(()), owners, tables: Vec::new() };
                let lane = self.lanes.last_mut().expect("one was pushed before");
                return lane.push(flight, self.driver, &mut self.events);
            }
            DeviceWork::Flush => {
                let flushed = self.driver.flush();
                return catch_panic(|| done.settle(flushed));
            }
            DeviceWork::Zero { .. } | DeviceWork::Grids { .. } | DeviceWork::Permute { .. } => {
                CopyDirection::Within
            }
        };
        let stream = self.lanes[way as usize].stream;
        let mut tables = Vec::new();
        let started = match work {
            DeviceWork::Lines { lines, .. } => self.lines(way, &lines, stream, &mut tables),
            DeviceWork::Zero { address, len } => {
                // SAFETY: the caller of `DeviceThread::ask` keeps the memory until the ticket
                // settles, here and below.
                unsafe { self.driver.zero(address, len, stream) }
            }
            DeviceWork::Grids { gather, packed, grids, indices } => {
                self.grids(gather, packed, &grids, &indices, stream, &mut tables)
            }
            DeviceWork::Permute { to, from, swap } => {
                self.permute(&to, &from, swap, stream, &mut tables)
            }
            DeviceWork::Behind(_) | DeviceWork::Flush => Ok(()),
        };
        let flight = Flight { done, started, owners, tables };
        self.lanes[way as usize].push(flight, self.driver, &mut self.events);
    }

    /// Settles the flights that have ended, and returns their number.
    fn look(&mut self) -> usize {
        let mut ended = 0;
        let mut broken = None;
        for lane in &mut self.lanes {
            let look = lane.look(self.driver, &mut self.events, &mut self.tables);
            ended += look.ended;
            broken = broken.or(look.broken);
        }
        if let Some(error) = broken {
            let error = self.give_up(error);
            for lane in &mut self.lanes {
                lane.fail(&error, &mut self.tables);
            }
            ended += 1;
        }
        let mut at = 0;
        self.lanes.retain(|lane| {
            at += 1;
            at <= OWN || !lane.is_empty()
        });
        ended
    }

    /// Records that the driver has ended all work of this process and does no more.
    fn give_up(&mut self, error: Error) -> Error {
        let device = &self.driver.info().name;
        tracing::error!(%error, device, "the driver has given up the device for this process");
        let native = error.native().cloned();
        let mut reported = ErrorKind::Native.because(format!(
            "the driver has given up {device} for this process: start the process again"
        ));
        if let Some(native) = native {
            reported = reported.with_native(native.code, native.text);
        }
        let reported = reported.with_source(error);
        self.broken = Some(reported.clone());
        reported
    }

    fn end(&mut self) {
        self.events.end(self.driver);
        self.tables.end(self.driver);
        for lane in self.lanes.drain(..).take(OWN) {
            // SAFETY: one of the device's own streams, on which no work is in flight.
            if let Err(error) = unsafe { self.driver.destroy_stream(lane.stream) } {
                tracing::debug!(%error, code = code(&error), "a stream could not be destroyed");
            }
        }
    }

    fn lines(
        &mut self,
        way: CopyDirection,
        lines: &[Hop],
        stream: StreamHandle,
        tables: &mut Vec<KernelTable>,
    ) -> Result<()> {
        if self.without_rows[way as usize] {
            return self.single_lines(way, lines, lines.len(), stream, tables);
        }
        let calls = copy_calls(lines).take(FEW_CALLS + 1).count();
        if let Some(done) = self.scattered(way, lines, calls, stream, tables) {
            return done;
        }
        for step in copy_calls(lines) {
            let copied = match step {
                // SAFETY: each step consists of lines of the work, whose memory the caller of
                // `DeviceThread::ask` keeps until the ticket settles, here and below.
                CopyCall::Line(line) => unsafe { self.driver.copy(way, line, stream) },
                // SAFETY: as for a line.
                CopyCall::Rows(rows) => match unsafe { self.driver.copy_rows(way, rows, stream) } {
                    Err(error) if is_refusal(&error) => {
                        self.row_by_row(way, rows, &error, stream, tables)
                    }
                    copied => copied,
                },
            };
            copied?;
        }
        Ok(())
    }

    /// Copies rows without the driver's call for them, which need not accept distances that it has
    /// not chosen. Once that works, later rows do not try the call.
    fn row_by_row(
        &mut self,
        way: CopyDirection,
        rows: Rows,
        error: &Error,
        stream: StreamHandle,
        tables: &mut Vec<KernelTable>,
    ) -> Result<()> {
        let lines: Vec<_> = rows.lines().collect();
        self.single_lines(way, &lines, lines.len(), stream, tables)?;
        let device = &self.driver.info().name;
        tracing::warn!(%error, device, ?way, ?rows, "the driver rejects 2-D copies: blocks are copied by kernels, in batches or one by one");
        self.without_rows[way as usize] = true;
        Ok(())
    }

    /// Copies lines without copies of rows.
    fn single_lines(
        &mut self,
        way: CopyDirection,
        lines: &[Hop],
        calls: usize,
        stream: StreamHandle,
        tables: &mut Vec<KernelTable>,
    ) -> Result<()> {
        if let Some(done) = self.scattered(way, lines, calls, stream, tables) {
            return done;
        }
        lines.iter().try_for_each(|line| {
            // SAFETY: the caller of `DeviceThread::ask` keeps the memory of all lines until the
            // ticket settles.
            unsafe { self.driver.copy(way, *line, stream) }
        })
    }

    /// Copies lines that take many `calls` by a batch or a kernel; `None` if they take few, or
    /// neither works.
    fn scattered(
        &mut self,
        way: CopyDirection,
        lines: &[Hop],
        calls: usize,
        stream: StreamHandle,
        tables: &mut Vec<KernelTable>,
    ) -> Option<Result<()>> {
        let few = if way == CopyDirection::Within { FEW_CALLS_WITHIN } else { FEW_CALLS };
        if calls <= few {
            return None;
        }
        // Copy engines leave the processors to the model; within a device they are too slow for
        // small copies.
        let batches = self.driver.has_batches();
        if batches && way != CopyDirection::Within {
            return Some(self.batches(lines, stream));
        }
        if self.kernels.is_ok() && self.reached_by_kernels(way, lines) {
            return Some(self.hops(lines, stream, tables));
        }
        batches.then(|| self.batches(lines, stream))
    }

    fn batches(&self, lines: &[Hop], stream: StreamHandle) -> Result<()> {
        lines.chunks(BATCH).try_for_each(|batch| {
            // SAFETY: the caller of `DeviceThread::ask` keeps the memory of all lines until the
            // ticket settles.
            unsafe { self.driver.copy_batch(batch, stream) }
        })
    }

    /// Returns whether kernels can access both sides: the host's side must be pinned.
    fn reached_by_kernels(&self, way: CopyDirection, lines: &[Hop]) -> bool {
        match way {
            CopyDirection::Within => true,
            CopyDirection::ToDevice => {
                self.pinned.has_all(lines.iter().map(|line| (line.from, line.len)))
            }
            CopyDirection::ToHost => {
                self.pinned.has_all(lines.iter().map(|line| (line.to, line.len)))
            }
        }
    }

    fn hops(
        &mut self,
        lines: &[Hop],
        stream: StreamHandle,
        tables: &mut Vec<KernelTable>,
    ) -> Result<()> {
        for part in lines.chunks(TABLE / HOP) {
            let table = self.table(&kernels::encode_hops(part), stream, tables)?;
            self.launch(&Launch::hops(table, part), stream)?;
        }
        Ok(())
    }

    /// Launches the kernel for as many indices at a time as fit into a table.
    fn grids(
        &mut self,
        gather: bool,
        packed: u64,
        grids: &[DeviceGrid],
        indices: &[u32],
        stream: StreamHandle,
        tables: &mut Vec<KernelTable>,
    ) -> Result<()> {
        if self.kernels.is_err() {
            let blocks = grids.iter().flat_map(|grid| block_copies(gather, packed, grid, indices));
            return self.lines(CopyDirection::Within, &merge(blocks), stream, tables);
        }
        for (part, chosen) in indices.chunks(TABLE / 4).enumerate() {
            let done = (part * (TABLE / 4)) as u64;
            let chosen_at = self.table(&encode_indices(chosen), stream, tables)?;
            for some in grids.chunks(TABLE / 32) {
                let moved =
                    |grid: &DeviceGrid| DeviceGrid { at: grid.at + done * grid.length, ..*grid };
                let some: Vec<_> = some.iter().map(moved).collect();
                let table = self.table(&kernels::encode_grids(&some), stream, tables)?;
                let count = chosen.len();
                let launch = Launch::grids(gather, packed, table, &some, chosen_at, count);
                self.launch(&launch, stream)?;
            }
        }
        Ok(())
    }

    fn permute(
        &mut self,
        to: &StridedBlocks,
        from: &StridedBlocks,
        swap: Swap,
        stream: StreamHandle,
        tables: &mut Vec<KernelTable>,
    ) -> Result<()> {
        let (most, count) = (TABLE / 4, to.count());
        for first in (0..count).step_by(most) {
            let count = most.min(count - first);
            let mut place = |blocks: &StridedBlocks| -> Result<LaunchBlocks> {
                let StridedBlocks { base: DevicePtr(base), stride, .. } = *blocks;
                Ok(match &blocks.selection {
                    BlockSelection::First(_) => {
                        LaunchBlocks { base: base + first as u64 * stride, stride, indices: 0 }
                    }
                    BlockSelection::Indices(indices) => {
                        let bytes = encode_indices(&indices[first..first + count]);
                        LaunchBlocks { base, stride, indices: self.table(&bytes, stream, tables)? }
                    }
                })
            };
            let (to, from) = (place(to)?, place(from)?);
            self.launch(&Launch::permute(to, from, count, swap)?, stream)?;
        }
        Ok(())
    }

    /// Copies a table to the device; it stays until the flight that gets `tables` has ended.
    fn table(
        &mut self,
        bytes: &[u8],
        stream: StreamHandle,
        tables: &mut Vec<KernelTable>,
    ) -> Result<u64> {
        tables.push(self.tables.take(self.driver)?);
        let table = tables.last_mut().expect("one was pushed before");
        table.fill(self.driver, bytes, stream)
    }

    fn launch(&self, launch: &Launch, stream: StreamHandle) -> Result<()> {
        let functions = self.kernels.as_ref().map_err(Clone::clone)?;
        let at = ENTRIES.iter().position(|entry| *entry == launch.entry);
        let function = at.and_then(|at| functions.get(at)).ok_or_else(|| {
            ErrorKind::Unsupported.because(format!("kernel {} was not loaded", launch.entry))
        })?;
        // SAFETY: the caller of `DeviceThread::ask` keeps the memory until the ticket settles;
        // `Launch` encodes the parameters as its kernel takes them.
        unsafe { self.driver.launch(*function, launch.grid, THREADS, &launch.parameters, stream) }
    }
}

/// Returns whether the driver rejects a call because of its arguments.
fn is_refusal(error: &Error) -> bool {
    [status::INVALID_VALUE, status::NOT_SUPPORTED].map(i64::from).contains(&code(error))
}

/// Returns the blocks of a grid that the indices select, as copies to or from the packed bytes.
fn block_copies(
    gather: bool,
    packed: u64,
    grid: &DeviceGrid,
    indices: &[u32],
) -> impl Iterator<Item = Hop> {
    let DeviceGrid { base, stride, length, at } = *grid;
    indices.iter().enumerate().map(move |(place, index)| {
        let block = base + u64::from(*index) * stride;
        let packed = packed + at + place as u64 * length;
        let (from, to) = if gather { (block, packed) } else { (packed, block) };
        Hop { from, to, len: length as usize }
    })
}

fn encode_indices(indices: &[u32]) -> Vec<u8> {
    indices.iter().flat_map(|index| index.to_ne_bytes()).collect()
}
