//! A kit for baseline programs: two processes that move blocks through a bare native library.
//!
//! `kvx bench --beside PROGRAM` measures such a program and kvx in alternation; [`answer`] speaks
//! its protocol, which `kvx-cli/BESIDE.md` describes. The program implements [`Baseline`] and forks
//! the process that owns the remote memory with [`fork`]. It uses nothing else of kvx but bindings,
//! the [loader](crate::loader) and this module. Baselines have no error handling: any failure
//! panics and so ends the program.

use std::io::{Read, Write};
use std::ops::Range;
use std::os::unix::net::UnixStream;
use std::ptr::NonNull;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::mm::{Advice, MapFlags, ProtFlags};

/// A block number of the initiator's memory, and the number of the remote block that it is paired
/// with.
pub type BlockPair = (usize, usize);

/// The transfers that the next rounds repeat.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Point {
    /// True if blocks move from the remote memory to the initiator's, false for the other
    /// direction.
    pub read: bool,
    /// True if the memory stands for a program's own, false if it stands for a kvx pool.
    pub foreign: bool,
    /// The size of one block in bytes.
    pub block: usize,
    /// The number of blocks that one transfer moves.
    pub count: usize,
    /// The blocks of all transfers, in order.
    pub pairs: Vec<BlockPair>,
}

impl Point {
    /// Parses a line `point …` of the protocol.
    fn parse(line: &str) -> Point {
        let value = |key: &str| {
            let mut words = line.split(' ').filter_map(|word| word.split_once('='));
            words.find_map(|(name, value)| (name == key).then_some(value)).unwrap_or_default()
        };
        let number = |key: &str| value(key).parse::<usize>().expect("a number");
        let (read, count, seed) = (value("op") == "read", number("count"), number("seed") as u64);
        let all = count * number("lists");
        let scattered = value("pattern") == "scattered";
        let order = |seed| if scattered { shuffled(all, seed) } else { (0..all).collect() };
        let (from, to) = (order(seed), order(seed + 1));
        let (local, remote) = if read { (to, from) } else { (from, to) };
        Point {
            read,
            foreign: value("memory") == "foreign",
            block: number("block"),
            count,
            pairs: local.into_iter().zip(remote).collect(),
        }
    }

    /// Returns the size of each side's memory in bytes.
    pub fn bytes(&self) -> usize {
        self.block * self.pairs.len()
    }

    /// Returns the number of different transfers.
    pub fn lists(&self) -> usize {
        self.pairs.len() / self.count
    }

    /// Returns the range of one transfer's blocks in [`pairs`](Point::pairs).
    pub fn list(&self, list: usize) -> Range<usize> {
        list * self.count..(list + 1) * self.count
    }
}

/// Returns the numbers below `count` in an order that depends only on `seed`.
pub fn shuffled(count: usize, seed: u64) -> Vec<usize> {
    let (mut numbers, mut state) = ((0..count).collect::<Vec<_>>(), seed);
    for at in (1..count).rev() {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let word = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        numbers.swap(at, ((word ^ (word >> 31)) % (at as u64 + 1)) as usize);
    }
    numbers
}

/// The initiator's side of a loop around a bare library.
pub trait Baseline {
    /// Allocates the memory of both processes and prepares the transfers. Returns a reason to skip
    /// the point.
    fn prepare(&mut self, point: &Point) -> Option<String>;

    /// Runs one transfer to completion: the blocks of [`Point::list`].
    fn transfer(&mut self, point: &Point, list: usize);

    /// Notifies the other process that a round begins or has ended, if it needs to know.
    fn set_active(&mut self, _active: bool) {}
}

/// Answers `kvx bench` on standard output as the baseline `name`, until standard input ends.
pub fn answer(name: &str, baseline: &mut impl Baseline) {
    let (mut point, mut next) = (Point::default(), 0);
    for line in std::io::stdin().lines().map_while(Result::ok) {
        if let Some(seconds) = line.strip_prefix("go ") {
            let seconds = seconds.parse().expect("seconds");
            let (times, took) = repeat(baseline, seconds, |baseline| {
                baseline.transfer(&point, next);
                next = (next + 1) % point.lists();
            });
            println!("moved {times} {took}");
        } else {
            (point, next) = (Point::parse(&line), 0);
            match baseline.prepare(&point) {
                None => println!("ready bare {name}"),
                Some(reason) => println!("skip {reason}"),
            }
        }
    }
}

/// Repeats `round` for `seconds`, at least once. Returns how often it ran and for how long.
pub fn repeat<B: Baseline>(
    baseline: &mut B,
    seconds: f64,
    mut round: impl FnMut(&mut B),
) -> (u32, f64) {
    baseline.set_active(true);
    let (start, mut times) = (Instant::now(), 0);
    while times == 0 || start.elapsed().as_secs_f64() < seconds {
        round(baseline);
        times += 1;
    }
    let took = start.elapsed().as_secs_f64();
    baseline.set_active(false);
    (times, took)
}

/// Starts the second process, which runs `child` and exits. Returns the first process's end of
/// their channel.
///
/// # Safety
///
/// The caller ensures that the process has a single thread.
pub unsafe fn fork(child: impl FnOnce(Channel)) -> Channel {
    let (near, far) = UnixStream::pair().expect("two sockets");
    // SAFETY: the caller ensures a single thread, so the child may do whatever the parent may.
    if unsafe { libc::fork() } == 0 {
        drop(near);
        child(Channel(far));
        std::process::exit(0);
    }
    Channel(near)
}

/// Carries messages between the two processes: a number, and bytes.
#[derive(Debug)]
pub struct Channel(UnixStream);

impl Channel {
    /// Sends a message.
    pub fn send(&self, number: usize, bytes: &[u8]) {
        let head = [number.to_le_bytes(), bytes.len().to_le_bytes()].concat();
        (&self.0).write_all(&[&head, bytes].concat()).expect("the other process lives");
    }

    /// Receives a message. Returns `None` when the other process has ended.
    pub fn receive(&self) -> Option<(usize, Vec<u8>)> {
        let mut head = [[0; 8]; 2];
        (&self.0).read_exact(head.as_flattened_mut()).ok()?;
        let [number, length] = head.map(usize::from_le_bytes);
        let mut bytes = vec![0; length];
        (&self.0).read_exact(&mut bytes).ok()?;
        Some((number, bytes))
    }

    /// Waits at most `longest` until a message can be received. Returns true if one can.
    pub fn wait(&self, longest: Duration) -> bool {
        let mut ready = [PollFd::new(&self.0, PollFlags::IN)];
        let longest = Timespec::try_from(longest).expect("a short time");
        poll(&mut ready, Some(&longest)).is_ok_and(|ready| ready > 0)
    }
}

/// Anonymous memory on transparent huge pages, of which every page was written to.
#[derive(Debug)]
pub struct HugeMemory {
    pages: NonNull<u8>,
    mapped: usize,
    start: NonNull<u8>,
}

impl HugeMemory {
    const HUGE_PAGE: usize = 2 << 20;

    /// Maps `len` bytes: `private` like a program's own allocations, otherwise shared like a kvx
    /// pool.
    pub fn new(len: usize, private: bool) -> HugeMemory {
        let flags = if private { MapFlags::PRIVATE } else { MapFlags::SHARED };
        let mapped = len + Self::HUGE_PAGE;
        // SAFETY: the kernel chooses new pages. The writes touch `len` bytes after the first
        // huge-page boundary, and the mapping is long enough for them.
        unsafe {
            let access = ProtFlags::READ | ProtFlags::WRITE;
            let pages = rustix::mm::mmap_anonymous(std::ptr::null_mut(), mapped, access, flags)
                .expect("memory");
            // Without huge pages the memory is slower, and the measurement shows it.
            rustix::mm::madvise(pages, mapped, Advice::LinuxHugepage).ok();
            let start = pages.map_addr(|address| address.next_multiple_of(Self::HUGE_PAGE));
            start.cast::<u8>().write_bytes(7, len);
            let [pages, start] = [pages, start].map(|at| NonNull::new(at.cast()).expect("mapped"));
            HugeMemory { pages, mapped, start }
        }
    }

    /// Returns the first byte.
    pub fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// Keeps the memory for the life of the process. Returns its address.
    pub fn leak(self) -> usize {
        std::mem::ManuallyDrop::new(self).as_ptr().expose_provenance()
    }
}

impl Drop for HugeMemory {
    fn drop(&mut self) {
        // SAFETY: `new` mapped these pages, and the owner no longer has them registered anywhere.
        unsafe { rustix::mm::munmap(self.pages.as_ptr().cast(), self.mapped) }.ok();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_order_is_the_one_that_the_protocol_defines() {
        assert_eq!(shuffled(8, 1), [4, 3, 2, 7, 5, 6, 0, 1]);
        assert_eq!(shuffled(8, 2), [5, 2, 7, 4, 1, 3, 0, 6]);
    }

    #[test]
    fn a_point_pairs_local_blocks_with_remote_ones() {
        let line = "point backend=UCX op=read block=4096 count=4 lists=2 pattern=scattered seed=1 \
                    memory=foreign wait=block";
        let point = Point::parse(line);
        assert_eq!((point.block, point.count, point.lists()), (4096, 4, 2));
        assert_eq!((point.bytes(), point.list(1)), (8 * 4096, 4..8));
        assert!(point.read && point.foreign);
        assert_eq!(point.pairs[..2], [(5, 4), (2, 3)]);
        let write = Point::parse(&line.replace("read", "write"));
        assert_eq!(write.pairs[..2], [(4, 5), (3, 2)]);
        let adjacent = Point::parse(&line.replace("scattered", "adjacent"));
        assert_eq!(adjacent.pairs[7], (7, 7));
    }

    #[test]
    fn messages_arrive_whole_and_the_end_of_the_channel_is_reported() {
        let (near, far) = UnixStream::pair().unwrap();
        let (near, far) = (Channel(near), Channel(far));
        assert!(!far.wait(Duration::ZERO));
        near.send(7, b"bytes");
        near.send(0, b"");
        assert!(far.wait(Duration::from_secs(10)));
        assert_eq!(far.receive(), Some((7, b"bytes".to_vec())));
        assert_eq!(far.receive(), Some((0, Vec::new())));
        drop(near);
        assert_eq!(far.receive(), None);
    }

    #[test]
    fn memory_lies_on_huge_pages() {
        for private in [false, true] {
            let memory = HugeMemory::new(12345, private);
            assert_eq!(memory.as_ptr().addr() % HugeMemory::HUGE_PAGE, 0);
            // SAFETY: the memory is long enough, and no other code uses it.
            assert_eq!(unsafe { memory.as_ptr().add(12344).read() }, 7);
        }
    }
}
