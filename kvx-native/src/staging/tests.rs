//! Tests of the staging adaptor with a device whose memory the host cannot reach.

use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use super::{Buffers, Copies, Fetch, Stager, Store};
use kvx_core::backend::sync::Mutex;
use kvx_core::backend::{Direction, Extents, MemoryReceiver, Piece, PlacedGrid, Ticket};
use kvx_core::{
    DeviceAccess, DeviceId, ErrorKind, Grid, Indices, Memory, MemoryKind, Result, quarantined_bytes,
};
use kvx_testkit::TestDevice;
use kvx_testkit::device::{CopyOrder, CopyOutcome};

const BUFFER: usize = 1000;

/// A stand-in for a machine, which receives tokens and gives streams turns.
struct Machine {
    device: Arc<TestDevice>,
    stager: Stager,
    tokens: Receiver<u64>,
}

fn machine(count: usize, depth: usize) -> Machine {
    let device = TestDevice::new(MemoryKind::Cuda);
    let (sender, tokens) = mpsc::channel();
    let seen: Arc<OnceLock<Stager>> = Arc::default();
    let stager = {
        let seen = Arc::clone(&seen);
        let wake = move |token| {
            // Takes the locks of both pools, so that a call under one of them would deadlock.
            let _ = format!("{:?}", seen.get());
            sender.send(token).ok();
        };
        Stager::new(device.clone(), Buffers { len: BUFFER, count, depth }, wake)
    };
    seen.set(stager.clone()).unwrap();
    Machine { device, stager, tokens }
}

impl Machine {
    fn token(&self) -> u64 {
        self.tokens.recv_timeout(Duration::from_secs(20)).expect("a waiting stream is woken")
    }

    /// Returns device memory filled with a pattern.
    fn memory(&self, len: usize, seed: u64) -> Arc<Memory> {
        let memory = self.device.allocate(len);
        memory.copy_in(0, &pattern(len, seed)).unwrap();
        Arc::new(memory)
    }

    fn fetch(&self, token: u64, memory: &Arc<Memory>, blocks: &Blocks) -> Fetch {
        self.stager.fetch(token, vec![Arc::clone(memory)], blocks.extents()).unwrap()
    }

    fn store(&self, token: u64, memory: &Arc<Memory>, blocks: &Blocks) -> Store {
        self.stager.store(token, vec![Arc::clone(memory)], blocks.extents()).unwrap()
    }

    /// Sends all bytes of a fetch, `chunk` bytes at a time. Returns them.
    fn send(&self, fetch: &mut Fetch, chunk: usize) -> Vec<u8> {
        let mut sent = Vec::new();
        loop {
            fetch.resume().unwrap();
            let some = fetch.bytes();
            if !some.is_empty() {
                let count = some.len().min(chunk);
                sent.extend_from_slice(&some[..count]);
                fetch.sent(count);
            } else if fetch.left() == 0 {
                return sent;
            } else {
                self.token();
            }
        }
    }

    /// Receives all bytes of a store from `bytes`, `chunk` at a time, and waits until they are on
    /// the device.
    fn receive(&self, store: &mut Store, mut bytes: &[u8], chunk: usize) {
        loop {
            if let Some(room) = store.room().unwrap() {
                let count = room.len().min(chunk).min(bytes.len());
                room[..count].copy_from_slice(&bytes[..count]);
                bytes = &bytes[count..];
                store.received(count);
            } else if store.left() == 0 {
                break;
            } else {
                self.token();
            }
        }
        assert!(bytes.is_empty() && store.wanted() == 0);
        assert_eq!(store.copies(), Copies::Settled);
    }
}

fn pattern(len: usize, seed: u64) -> Vec<u8> {
    (0..len as u64)
        .map(|at| ((at + seed).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8)
        .collect()
}

/// Blocks of one region: two grids that share an index list.
struct Blocks(Vec<Grid>, Vec<u32>);

impl Blocks {
    /// Returns `count` blocks of `length` bytes in two halves of a region, in an order that merges
    /// some and scatters others, and the length of the region.
    fn scattered(length: u64, count: u32) -> (Self, usize) {
        let grid = Grid { base: 3, stride: length + 5, length, count };
        let packed =
            Grid { base: 3 + (length + 5) * u64::from(count), stride: length, length, count };
        let indices = (0..count / 2).rev().chain(count / 2..count).collect();
        (Blocks(vec![grid, packed], indices), 3 + (2 * length as usize + 5) * count as usize)
    }

    fn whole(len: usize) -> Self {
        Blocks(vec![Grid { base: 0, stride: len as u64, length: len as u64, count: 1 }], vec![0])
    }

    fn extents(&self) -> Extents {
        let placed = self.0.iter().map(|grid| PlacedGrid { region: 0, grid: *grid }).collect();
        Extents::new(placed, Indices::from(self.1.clone()))
    }

    fn ranges(&self) -> impl Iterator<Item = std::ops::Range<usize>> {
        self.0.iter().flat_map(|grid| {
            self.1.iter().map(|index| {
                let at = (grid.base + grid.stride * u64::from(*index)) as usize;
                at..at + grid.length as usize
            })
        })
    }

    /// Returns the bytes of the blocks, in the order of the stream.
    fn of(&self, memory: &[u8]) -> Vec<u8> {
        self.ranges().flat_map(|range| memory[range].to_vec()).collect()
    }
}

fn content(memory: &Memory) -> Vec<u8> {
    let mut bytes = vec![0; memory.len()];
    memory.copy_out(0, &mut bytes).unwrap();
    bytes
}

#[test]
fn bytes_are_sent_in_order_for_any_order_of_copies() {
    for (order, length, chunk) in [
        (CopyOrder::Oldest, 70, 1 << 20),
        (CopyOrder::Newest, 999, 333),
        (CopyOrder::Shuffled(5), 1, 17),
        (CopyOrder::Newest, 4000, 999),
    ] {
        let machine = machine(5, 4);
        let (blocks, len) = Blocks::scattered(length, 40);
        let memory = machine.memory(len, 1);
        machine.device.order(order);
        let mut fetch = machine.fetch(1, &memory, &blocks);
        assert_eq!(fetch.left(), 80 * length);
        let sent = machine.send(&mut fetch, chunk);
        assert!(sent == blocks.of(&pattern(len, 1)), "{order:?}, blocks of {length}");
        assert_eq!((fetch.copies(), machine.device.counters().faults), (Copies::Settled, 0));
    }
}

#[test]
fn bytes_arrive_at_their_blocks_and_nowhere_else() {
    for (order, length, chunk) in [
        (CopyOrder::Oldest, 70, 1 << 20),
        (CopyOrder::Newest, 999, 333),
        (CopyOrder::Shuffled(9), 1, 17),
        (CopyOrder::Newest, 4000, 999),
    ] {
        let machine = machine(5, 4);
        let (blocks, len) = Blocks::scattered(length, 40);
        let memory = machine.memory(len, 1);
        machine.device.order(order);
        let mut store = machine.store(1, &memory, &blocks);
        let wire = pattern(80 * length as usize, 77);
        machine.receive(&mut store, &wire, chunk);
        let (mut expected, mut at) = (pattern(len, 1), 0);
        for range in blocks.ranges() {
            at += length as usize;
            expected[range].copy_from_slice(&wire[at - length as usize..at]);
        }
        assert!(content(&memory) == expected, "{order:?}, blocks of {length}");
        assert_eq!(machine.device.counters().faults, 0);
    }
}

#[test]
fn copies_of_one_stream_overlap_up_to_its_depth() {
    let machine = machine(8, 3);
    let memory = machine.memory(10 * BUFFER, 1);
    machine.device.hold();
    let mut fetch = machine.fetch(1, &memory, &Blocks::whole(10 * BUFFER));
    fetch.resume().unwrap();
    assert_eq!((machine.device.waiting(), fetch.copies()), (3, Copies::InFlight));
    machine.device.release();
    // The first buffer is sent while others are being copied.
    while fetch.bytes().is_empty() {
        machine.token();
        fetch.resume().unwrap();
    }
    machine.device.hold();
    let count = fetch.bytes().len();
    fetch.sent(count);
    fetch.resume().unwrap();
    assert!(fetch.copies() == Copies::InFlight);
    machine.device.release();
    assert_eq!(machine.send(&mut fetch, BUFFER), pattern(10 * BUFFER, 1)[count..]);

    let mut store = machine.store(2, &memory, &Blocks::whole(10 * BUFFER));
    machine.device.hold();
    while let Some(room) = store.room().unwrap() {
        let len = room.len();
        store.received(len);
    }
    assert_eq!(machine.device.waiting(), 3);
    machine.device.release();
}

#[test]
fn a_stream_without_a_buffer_gets_the_next_that_is_free() {
    let machine = machine(1, 2);
    let memory = machine.memory(2 * BUFFER, 1);
    let whole = Blocks::whole(2 * BUFFER);
    let mut first = machine.fetch(1, &memory, &whole);
    first.resume().unwrap();
    let mut waiting: Vec<_> = (2..5).map(|token| machine.fetch(token, &memory, &whole)).collect();
    for fetch in &mut waiting {
        fetch.resume().unwrap();
        assert!(
            fetch.bytes().is_empty() && fetch.copies() == Copies::Settled,
            "a stream without a buffer starts no copy"
        );
    }
    // A stream that is dropped, and one that is stopped, give up their place to the next.
    let mut last = waiting.pop().unwrap();
    let mut stopped = waiting.pop().unwrap();
    stopped.stop();
    drop(waiting);
    assert_eq!(machine.send(&mut first, BUFFER), pattern(2 * BUFFER, 1));
    assert_eq!(machine.send(&mut last, BUFFER), pattern(2 * BUFFER, 1));
    assert_eq!(stopped.copies(), Copies::Settled);
}

#[test]
fn fetches_cannot_exhaust_the_buffers_of_stores() {
    let machine = machine(1, 4);
    let memory = machine.memory(4 * BUFFER, 1);
    let mut fetch = machine.fetch(1, &memory, &Blocks::whole(4 * BUFFER));
    fetch.resume().unwrap(); // holds all buffers, and its peer does not read
    let mut store = machine.store(2, &machine.memory(4 * BUFFER, 2), &Blocks::whole(4 * BUFFER));
    machine.receive(&mut store, &pattern(4 * BUFFER, 3), 100);
}

#[test]
fn a_store_without_available_bytes_yields_its_buffer_to_waiting_streams() {
    let machine = machine(1, 4);
    let (slow, fast) = (machine.memory(2 * BUFFER, 1), machine.memory(2 * BUFFER, 2));
    let whole = Blocks::whole(2 * BUFFER);
    let (wire, other) = (pattern(2 * BUFFER, 5), pattern(2 * BUFFER, 6));
    let mut dry = machine.store(1, &slow, &whole);
    dry.room().unwrap().unwrap()[..100].copy_from_slice(&wire[..100]);
    dry.received(100);
    dry.pause(); // no stream waits, so it keeps its buffer
    assert_eq!((dry.copies(), dry.wanted()), (Copies::Settled, 2 * BUFFER as u64 - 100));

    let mut store = machine.store(2, &fast, &whole);
    assert!(store.room().unwrap().is_none());
    assert_eq!(machine.token(), 1, "the paused stream learns that another one waits");
    assert!(dry.room().unwrap().is_some());
    dry.pause();
    machine.receive(&mut store, &other, 300);

    // It had planned more than it received: the rest still arrives.
    machine.receive(&mut dry, &wire[100..], 300);
    assert!(content(&slow) == wire && content(&fast) == other);
}

#[test]
fn a_store_that_received_nothing_returns_its_buffer_unused() {
    let machine = machine(1, 4);
    let (silent, busy) = (machine.memory(BUFFER, 1), machine.memory(BUFFER, 2));
    let whole = Blocks::whole(BUFFER);
    let mut first = machine.store(1, &silent, &whole);
    assert!(first.room().unwrap().is_some());
    let mut second = machine.store(2, &busy, &whole);
    assert!(second.room().unwrap().is_none());
    first.pause();
    assert_eq!((first.wanted(), first.copies()), (BUFFER as u64, Copies::Settled));
    machine.receive(&mut second, &pattern(BUFFER, 3), 300);
    machine.receive(&mut first, &pattern(BUFFER, 4), 300);
    assert!(content(&silent) == pattern(BUFFER, 4) && content(&busy) == pattern(BUFFER, 3));
}

#[test]
fn a_fetch_whose_peer_does_not_read_yields_its_buffers_to_waiting_streams() {
    let machine = machine(2, 2);
    let (blocks, len) = Blocks::scattered(70, 60);
    let memory = machine.memory(len, 1);
    let expected = blocks.of(&pattern(len, 1));
    let mut stuck = machine.fetch(1, &memory, &blocks);
    stuck.resume().unwrap();
    while stuck.bytes().is_empty() {
        machine.token(); // of a buffer, or of a copy
        stuck.resume().unwrap();
    }
    let mut sent = stuck.bytes()[..333].to_vec(); // then its socket is full
    stuck.sent(333);
    assert!(!stuck.is_in_the_way());

    let mut other = machine.fetch(2, &memory, &blocks);
    other.resume().unwrap();
    assert_eq!(machine.token(), 1, "the stream that blocks others is woken");
    assert!(stuck.is_in_the_way());
    stuck.rewind();
    assert_eq!(stuck.left(), expected.len() as u64 - 333);
    assert_eq!(machine.send(&mut other, 1 << 20), expected);

    // Copies in flight are given up, and their results go to no stream.
    machine.device.hold();
    stuck.resume().unwrap();
    stuck.rewind();
    machine.device.release();
    sent.extend(machine.send(&mut stuck, 1 << 20));
    assert_eq!(sent, expected);
    assert_eq!(stuck.copies(), Copies::Settled);
}

#[test]
fn a_failed_copy_fails_its_stream_and_no_other() {
    let machine = machine(2, 2);
    let memory = machine.memory(4 * BUFFER, 1);
    machine.device.next([CopyOutcome::Copy, CopyOutcome::Fail]);
    let mut fetch = machine.fetch(1, &memory, &Blocks::whole(4 * BUFFER));
    let error = loop {
        match fetch.resume() {
            Ok(()) => drop(machine.token()),
            Err(error) => break error,
        }
    };
    assert_eq!(error.kind(), ErrorKind::Native);
    assert_eq!(fetch.resume().unwrap_err().kind(), ErrorKind::Native, "it stays failed");
    fetch.stop();
    while fetch.copies() != Copies::Settled {
        machine.token();
    }
    let mut next = machine.fetch(2, &memory, &Blocks::whole(4 * BUFFER));
    assert_eq!(machine.send(&mut next, BUFFER), pattern(4 * BUFFER, 1));

    machine.device.next([CopyOutcome::Fail]);
    let mut store = machine.store(3, &memory, &Blocks::whole(BUFFER));
    assert!(store.room().unwrap().is_some());
    store.received(BUFFER);
    assert_eq!(machine.token_of(3, || store.room().map(|_| ())).kind(), ErrorKind::Native);
    assert!(store.left() > 0, "bytes that did not arrive do not count as arrived");
    assert_eq!(store.copies(), Copies::Settled);
}

impl Machine {
    /// Gives a stream turns until it fails.
    fn token_of(
        &self,
        token: u64,
        mut turn: impl FnMut() -> kvx_core::Result<()>,
    ) -> kvx_core::Error {
        loop {
            if let Err(error) = turn() {
                return error;
            }
            while self.token() != token {}
        }
    }
}

#[test]
fn a_lost_copy_quarantines_its_buffer_and_is_reported_as_lost() {
    let machine = machine(2, 1);
    let memory = machine.memory(BUFFER, 1);
    let whole = Blocks::whole(BUFFER);
    let before = quarantined_bytes();
    machine.device.next([CopyOutcome::Forget]);
    let mut fetch = machine.fetch(1, &memory, &whole);
    assert_eq!(machine.token_of(1, || fetch.resume()).kind(), ErrorKind::Forgotten);
    assert!(quarantined_bytes() >= before + BUFFER as u64);
    fetch.stop();
    assert_eq!(fetch.copies(), Copies::Lost);

    // The other buffer still works; when it is lost too, the waiting streams fail.
    let mut next = machine.fetch(2, &memory, &whole);
    assert_eq!(machine.send(&mut next, BUFFER), pattern(BUFFER, 1));
    machine.device.hold();
    machine.device.next([CopyOutcome::Forget]);
    let mut last = machine.fetch(3, &memory, &whole);
    last.resume().unwrap();
    let mut waiting = machine.fetch(4, &memory, &whole);
    waiting.resume().unwrap();
    machine.device.release();
    assert_eq!(machine.token_of(4, || waiting.resume()).kind(), ErrorKind::Exhausted);

    let store_before = quarantined_bytes();
    machine.device.next([CopyOutcome::Forget]);
    let mut store = machine.store(5, &memory, &whole);
    store.room().unwrap();
    store.received(BUFFER);
    assert_eq!(machine.token_of(5, || store.room().map(|_| ())).kind(), ErrorKind::Forgotten);
    assert_eq!(store.copies(), Copies::Lost);
    assert!(quarantined_bytes() >= store_before + BUFFER as u64);
}

#[test]
fn a_stopped_stream_settles_when_its_last_copy_does() {
    let machine = machine(2, 2);
    let memory = machine.memory(4 * BUFFER, 1);
    machine.device.hold();
    let mut fetch = machine.fetch(1, &memory, &Blocks::whole(4 * BUFFER));
    fetch.resume().unwrap();
    fetch.stop();
    assert_eq!((fetch.copies(), fetch.bytes().len()), (Copies::InFlight, 0));
    assert_eq!(fetch.resume().unwrap_err().kind(), ErrorKind::Cancelled);
    machine.device.release();
    while fetch.copies() == Copies::InFlight {
        assert_eq!(machine.token(), 1);
    }
    assert_eq!(fetch.copies(), Copies::Settled);
    let mut next = machine.fetch(2, &memory, &Blocks::whole(4 * BUFFER));
    assert_eq!(machine.send(&mut next, BUFFER), pattern(4 * BUFFER, 1));
}

#[test]
fn a_dropped_stream_frees_no_memory_that_a_copy_may_touch() {
    let machine = machine(2, 2);
    let memory = machine.memory(2 * BUFFER, 1);
    let gone = Arc::downgrade(&memory);
    machine.device.hold();
    let mut fetch = machine.fetch(1, &memory, &Blocks::whole(2 * BUFFER));
    fetch.resume().unwrap();
    drop((fetch, memory));
    assert!(gone.upgrade().is_some(), "the copies in flight keep it alive");
    machine.device.release();
    let other = machine.memory(2 * BUFFER, 2); // waits for a later copy
    assert_eq!(machine.device.counters().faults, 0);
    let mut next = machine.fetch(2, &other, &Blocks::whole(2 * BUFFER));
    assert_eq!(machine.send(&mut next, BUFFER), pattern(2 * BUFFER, 2));
    while gone.strong_count() > 0 {
        machine.token();
    }
}

#[test]
fn blocks_outside_their_memory_and_memory_of_other_devices_are_rejected() {
    let machine = machine(1, 1);
    let memory = machine.memory(BUFFER, 1);
    let beyond =
        Blocks(vec![Grid { base: 8, stride: 1, length: BUFFER as u64, count: 1 }], vec![0]);
    let mut fetch = machine.fetch(1, &memory, &beyond);
    assert_eq!(fetch.resume().unwrap_err().kind(), ErrorKind::OutOfBounds);
    let mut store = machine.store(1, &memory, &beyond);
    assert_eq!(store.room().unwrap_err().kind(), ErrorKind::OutOfBounds);
    assert_eq!(machine.device.counters().copies, 1, "only the copy of the pattern was made");
    for foreign in [TestDevice::new(MemoryKind::Cuda).allocate(8), Memory::owned(vec![0; 8])] {
        let refused = machine.stager.fetch(1, vec![Arc::new(foreign)], Blocks::whole(8).extents());
        assert_eq!(refused.err().unwrap().kind(), ErrorKind::Unsupported);
    }
}

#[test]
fn a_machine_with_streams_can_move_to_its_thread() {
    fn moves<T: Send>() {}
    moves::<(Stager, Fetch, Store)>();
}

#[test]
fn empty_streams_end_at_once() {
    let machine = machine(1, 1);
    let memory = machine.memory(BUFFER, 1);
    let nothing = Blocks(vec![Grid::packed(8, 1)], Vec::new());
    let mut fetch = machine.fetch(1, &memory, &nothing);
    fetch.resume().unwrap();
    assert_eq!((fetch.left(), fetch.bytes().len(), fetch.copies()), (0, 0, Copies::Settled));
    let mut store = machine.store(1, &memory, &nothing);
    assert!(store.room().unwrap().is_none() && store.left() == 0);
}

#[test]
fn buffers_can_be_allocated_in_advance() {
    let machine = machine(3, 1);
    machine.stager.prepare().unwrap();
    assert!(format!("{:?}", machine.stager).contains("3 of 3 buffers"));
    let memory = machine.memory(BUFFER, 1);
    let mut fetch = machine.fetch(1, &memory, &Blocks::whole(BUFFER));
    assert_eq!(machine.send(&mut fetch, BUFFER), pattern(BUFFER, 1));
}

/// A stream of the crowd below, with its position on an imaginary wire.
enum Member {
    Out(Fetch, Vec<u8>, Vec<u8>),
    In(Store, Vec<u8>, usize, Arc<Memory>, Vec<u8>),
}

/// A device whose driver pins memory when the test lets it, or refuses it at once.
struct SlowPinning {
    device: Arc<TestDevice>,
    asked: Mutex<Vec<MemoryReceiver>>,
    refuses: bool,
}

// SAFETY: the test device copies, which upholds the contract.
unsafe impl DeviceAccess for SlowPinning {
    fn kind(&self) -> MemoryKind {
        MemoryKind::Cuda
    }

    fn device(&self) -> DeviceId {
        DeviceAccess::device(&*self.device)
    }

    fn ordinal(&self) -> u32 {
        0
    }

    fn pinned(&self, _: usize) -> Result<Memory> {
        panic!("a stream's turn waits for the driver")
    }

    fn pinned_later(self: Arc<Self>, _: usize, done: MemoryReceiver) {
        if self.refuses {
            return done(Err(ErrorKind::Exhausted.because("no memory to pin")));
        }
        self.asked.lock().push(done);
    }

    unsafe fn copy(&self, direction: Direction, pieces: &[Piece], done: Ticket) {
        // SAFETY: guaranteed by the caller.
        unsafe { self.device.copy(direction, pieces, done) };
    }
}

/// Returns a device, a machine's stager, and the arguments of a fetch of a buffer's bytes.
fn slow_pinning(refuses: bool) -> (Arc<SlowPinning>, Stager, Vec<Arc<Memory>>, Receiver<u64>) {
    let device = TestDevice::new(MemoryKind::Cuda);
    let slow = Arc::new(SlowPinning { device, asked: Mutex::default(), refuses });
    let access = Arc::clone(&slow) as Arc<dyn DeviceAccess>;
    let (sender, tokens) = mpsc::channel();
    let wake = move |token| _ = sender.send(token);
    let stager =
        Stager::new(Arc::clone(&access), Buffers { len: BUFFER, count: 1, depth: 1 }, wake);
    let inner = slow.device.allocate(BUFFER);
    inner.copy_in(0, &pattern(BUFFER, 1)).unwrap();
    let (address, id) = (inner.address(), access.device());
    // SAFETY: the inner memory is the owner.
    let memory = unsafe { Memory::adopt_device(address, BUFFER, id, access, inner) };
    (slow, stager, vec![Arc::new(memory)], tokens)
}

#[test]
fn a_stream_whose_buffer_is_refused_while_it_asks_asks_again() {
    let (_slow, stager, memories, tokens) = slow_pinning(true);
    let mut fetch = stager.fetch(1, memories, Blocks::whole(BUFFER).extents()).unwrap();
    fetch.resume().unwrap();
    assert_eq!(tokens.recv_timeout(Duration::from_secs(20)), Ok(1), "the stream is woken");
    assert_eq!(fetch.resume().unwrap_err().kind(), ErrorKind::Exhausted);
}

#[test]
fn the_error_of_a_buffer_goes_to_no_later_stream() {
    let (slow, stager, memories, _tokens) = slow_pinning(false);
    let fetch = || stager.fetch(1, memories.clone(), Blocks::whole(BUFFER).extents()).unwrap();
    let mut first = fetch();
    first.resume().unwrap();
    let asked = slow.asked.lock().pop().expect("a buffer is asked for");
    asked(Err(ErrorKind::Exhausted.because("no memory to pin")));
    drop(first);
    let mut later = fetch();
    later.resume().unwrap();
    assert_eq!(slow.asked.lock().len(), 1, "it asks for a buffer of its own");
}

#[test]
fn a_stream_does_not_wait_while_the_driver_pins_its_buffer() {
    for works in [true, false] {
        let (slow, stager, memories, tokens) = slow_pinning(false);
        let mut fetch = stager.fetch(1, memories, Blocks::whole(BUFFER).extents()).unwrap();
        fetch.resume().unwrap();
        fetch.resume().unwrap();
        let asked = std::mem::take(&mut *slow.asked.lock());
        assert_eq!((asked.len(), tokens.try_recv().is_err()), (1, true));
        let full = || ErrorKind::Exhausted.because("no memory to pin");
        for done in asked {
            done(if works { Ok(Memory::owned(vec![0; BUFFER])) } else { Err(full()) });
        }
        assert_eq!(tokens.recv_timeout(Duration::from_secs(20)), Ok(1), "the stream is woken");
        if !works {
            assert_eq!(fetch.resume().unwrap_err().kind(), ErrorKind::Exhausted);
            continue;
        }
        fetch.resume().unwrap();
        tokens.recv_timeout(Duration::from_secs(20)).unwrap(); // the copy has landed
        fetch.resume().unwrap();
        assert_eq!(fetch.bytes(), pattern(BUFFER, 1));
        fetch.sent(BUFFER);
    }
}

#[test]
fn many_streams_share_few_buffers_and_all_complete() {
    let machine = machine(3, 2);
    machine.device.order(CopyOrder::Shuffled(3));
    let mut crowd: Vec<_> = (0..40u64)
        .map(|token| {
            let (blocks, len) = Blocks::scattered(1 + token * 37, 6);
            let memory = machine.memory(len, token);
            if token % 2 == 0 {
                let expected = blocks.of(&pattern(len, token));
                Some(Member::Out(machine.fetch(token, &memory, &blocks), Vec::new(), expected))
            } else {
                let store = machine.store(token, &memory, &blocks);
                let wire = pattern(store.left() as usize, token + 100);
                let (mut expected, mut at) = (pattern(len, token), 0);
                for range in blocks.ranges() {
                    let end = at + range.len();
                    expected[range].copy_from_slice(&wire[at..end]);
                    at = end;
                }
                Some(Member::In(store, wire, 0, memory, expected))
            }
        })
        .collect();
    let mut turns: std::collections::VecDeque<u64> = (0..40).collect();
    let mut left = crowd.len();
    while left > 0 {
        let token = turns.pop_front().unwrap_or_else(|| machine.token());
        let Some(member) = &mut crowd[token as usize] else { continue };
        let done = match member {
            Member::Out(fetch, sent, expected) => {
                fetch.resume().unwrap();
                let some = fetch.bytes();
                let count = some.len().min(400);
                sent.extend_from_slice(&some[..count]);
                fetch.sent(count);
                if count > 0 {
                    turns.push_back(token); // the socket took bytes: the stream gets another turn
                }
                let done = fetch.left() == 0;
                assert!(!done || sent == expected);
                done
            }
            Member::In(store, wire, at, memory, expected) => {
                if let Some(room) = store.room().unwrap() {
                    let count = room.len().min(400);
                    room[..count].copy_from_slice(&wire[*at..*at + count]);
                    *at += count;
                    store.received(count);
                    store.pause();
                    turns.push_back(token);
                }
                let done = store.left() == 0;
                assert!(!done || content(memory) == *expected);
                done
            }
        };
        if done {
            crowd[token as usize] = None;
            left -= 1;
        }
    }
    assert_eq!(machine.device.counters().faults, 0);
}
