//! A bare libfabric loop between two processes: what libfabric gives without kvx, to measure kvx beside. `PROVIDER
//! DOMAIN` (`tcp lo`, `shm shm`) is a program for `kvx bench --beside` (see `kvx-cli/BESIDE.md`); with `pingpong SIZE`
//! behind it sends messages to and fro, as `fi_pingpong -e rdm -S SIZE` does.
//!
//! The library is `KVX_LIBFABRIC_LIB`, else `libfabric.so.1`; settings are the environment's. A write counts when its
//! bytes have arrived (`FI_DELIVERY_COMPLETE`; over shm a post copies before it returns). It uses nothing of kvx but
//! the bindings.

use kvx_libfabric::raw::*;
use std::cell::Cell;
use std::ffi::{CStr, CString};
use std::io::{Read, Write};
use std::os::{fd::AsRawFd, unix::net::UnixStream};
use std::ptr::{NonNull, null, null_mut};
use std::time::Instant;

/// Calls a function of an object out of its table.
macro_rules! call {
    ($object:expr, $table:ident.$name:ident($($argument:expr),*)) => {{
        let object = $object;
        ((*(*object).$table).$name.expect("libfabric has it"))(object.cast(), $($argument),*)
    }};
}

fn check(what: &str, answer: impl Into<i64>) -> i64 {
    let answer = answer.into();
    assert!(answer >= 0, "{what}: libfabric error {}", -answer);
    answer
}

/// One of the two processes: its endpoint, which leads to the other's, and memory of one length in both.
struct End {
    info: *mut fi_info,
    domain: *mut fid_domain,
    ep: *mut fid_ep,
    cq: *mut fid_cq,
    peer: u64,
    other: UnixStream,
    memory: Option<Memory>,
    /// What the other process calls its first byte, and its key.
    remote: [u64; 2],
    in_flight: Cell<usize>,
}

/// Memory on transparent huge pages: what keeps it, where it is, and its registration.
struct Memory(#[allow(dead_code, reason = "it keeps")] Vec<u8>, *mut u8, *mut fid_mr);

/// Numbers that are no length: make progress until the next number; do nothing until then; answer messages of a length.
const PROGRESS: usize = 0;
const REST: usize = usize::MAX;
const ANSWER: usize = usize::MAX - 1;
const MESSAGES: usize = 2000; // to and fro in one measurement

impl End {
    fn new(provider: &str, wanted: &str, other: UnixStream) -> End {
        let name =
            std::env::var("KVX_LIBFABRIC_LIB").unwrap_or_else(|_| "libfabric.so.1".to_owned());
        let (name, none) = (CString::new(name).expect("a file name"), null_mut());
        // SAFETY: each call is one that libfabric's manual describes, on objects that the calls before it have made.
        unsafe {
            let library = libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL);
            let functions = Functions::find(|name: &'static CStr| {
                let version = match name.to_bytes() {
                    [.., b'i', b'n', b'f', b'o'] => c"FABRIC_1.3",
                    b"fi_fabric" => c"FABRIC_1.1",
                    _ => c"FABRIC_1.0",
                };
                NonNull::new(libc::dlvsym(library, name.as_ptr(), version.as_ptr())).ok_or(name)
            });
            let functions = functions.expect("the library loads, and has every function of 1.17");
            let hints = (functions.fi_dupinfo)(null());
            (*hints).caps = u64::from(FI_MSG | FI_RMA);
            (*(*hints).ep_attr).type_ = FI_EP_RDM;
            (*(*hints).domain_attr).threading = FI_THREAD_DOMAIN;
            let rules = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
            (*(*hints).domain_attr).mr_mode = rules.cast_signed();
            (*(*hints).tx_attr).op_flags =
                if provider == "shm" { 0 } else { FI_DELIVERY_COMPLETE.into() };
            let wished = CString::new(provider).expect("a name");
            (*(*hints).fabric_attr).prov_name = libc::strdup(wished.as_ptr());
            let (mut info, version) = (null_mut(), FI_MAJOR_VERSION << 16 | FI_MINOR_VERSION);
            check(
                "fi_getinfo",
                (functions.fi_getinfo)(version, null(), null(), 0, hints, &mut info),
            );
            while CStr::from_ptr((*(*info).domain_attr).name).to_bytes() != wanted.as_bytes() {
                info = (*info).next;
                assert!(!info.is_null(), "the provider has no domain {wanted}");
            }
            let (mut fabric, mut domain, mut ep) = (null_mut(), null_mut(), null_mut());
            let (mut cq, mut av): (_, *mut fid_av) = (null_mut::<fid_cq>(), null_mut());
            let mut queue = fi_cq_attr { format: FI_CQ_FORMAT_MSG, ..Default::default() };
            check("fi_fabric", (functions.fi_fabric)((*info).fabric_attr, &mut fabric, none));
            check("fi_domain", call!(fabric, ops.domain(info, &mut domain, none)));
            check("fi_cq_open", call!(domain, ops.cq_open(&mut queue, &mut cq, none)));
            check("fi_av_open", call!(domain, ops.av_open(&mut Default::default(), &mut av, none)));
            check("fi_endpoint", call!(domain, ops.endpoint(info, &mut ep, none)));
            for (object, flags) in [(av.cast(), 0), (cq.cast(), u64::from(FI_TRANSMIT | FI_RECV))] {
                check("fi_ep_bind", call!(ep.cast::<fid>(), ops.bind(object, flags)));
            }
            check("fi_enable", call!(ep.cast::<fid>(), ops.control(FI_ENABLE.cast_signed(), none)));
            let (mut address, mut length, mut peer) = ([0_u8; 256], 256, u64::MAX);
            check("fi_getname", call!(ep, cm.getname(address.as_mut_ptr().cast(), &mut length)));
            send(&other, 0, &address);
            let theirs = receive(&other).expect("its address").1;
            check(
                "fi_av_insert",
                call!(av, ops.insert(theirs.as_ptr().cast(), 1, &mut peer, 0, none)),
            );
            let in_flight = Cell::new(0);
            End { info, domain, ep, cq, peer, other, memory: None, remote: [0; 2], in_flight }
        }
    }

    /// Touches and registers memory, in the place of what there was; gives what the other process needs.
    fn allocate(&mut self, length: usize) -> [u64; 2] {
        let mut bytes = Vec::<u8>::with_capacity(length + (2 << 20));
        let address = bytes.as_mut_ptr().map_addr(|address| address.next_multiple_of(2 << 20));
        let access = FI_SEND | FI_RECV | FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE;
        let (mut mr, access, at) = (null_mut(), u64::from(access), address.addr() as u64);
        // SAFETY: so many bytes are there, and nobody else's; the domain is open; nothing is in flight between points.
        unsafe {
            if let Some(Memory(_, _, old)) = self.memory.take() {
                call!(old.cast::<fid>(), ops.close());
            }
            libc::madvise(address.cast(), length, libc::MADV_HUGEPAGE);
            address.write_bytes(7, length);
            let start = address.cast_const().cast();
            check(
                "fi_mr_reg",
                call!(self.domain, mr.reg(start, length, access, 0, at, 0, &mut mr, null_mut())),
            );
            self.memory = Some(Memory(bytes, address, mr));
            let by_address =
                (*(*self.info).domain_attr).mr_mode.cast_unsigned() & FI_MR_VIRT_ADDR != 0;
            [if by_address { at } else { 0 }, (*mr).key]
        }
    }

    /// Takes what has ended.
    fn progress(&self) {
        let mut entries = [fi_cq_msg_entry::default(); 64];
        // SAFETY: there is room for so many entries of the form that the queue was opened with.
        let answer = unsafe { call!(self.cq, ops.read(entries.as_mut_ptr().cast(), 64)) };
        if answer != -(libc::EAGAIN as isize) {
            self.in_flight
                .set(self.in_flight.get() - check("an operation", answer as i64) as usize);
        }
    }

    /// Posts as soon as there is room, and makes progress while more than `left` are in flight.
    fn post(&self, left: usize, post: impl Fn() -> isize) {
        let mut answer = post();
        while answer == -(libc::EAGAIN as isize) {
            self.progress();
            answer = post();
        }
        check("posting", answer as i64);
        self.in_flight.set(self.in_flight.get() + 1);
        self.wait(left);
    }

    fn wait(&self, left: usize) {
        while self.in_flight.get() > left {
            self.progress();
        }
    }

    /// Reads or writes all blocks, each by its number here and there, at most 512 at a time.
    fn transfer(&self, read: bool, block: usize, moves: impl Iterator<Item = (usize, usize)>) {
        let (End { ep, peer, remote: [base, key], .. }, none) = (self, null_mut());
        let Memory(_, memory, mr) = self.memory.as_ref().expect("there is memory");
        for (local_block, remote_block) in moves {
            let (local, at) = (
                memory.wrapping_add(local_block * block).cast(),
                base + (remote_block * block) as u64,
            );
            // SAFETY: both memories have room for every block of the point, and live until the next point.
            #[rustfmt::skip]
            self.post(511, || unsafe {
                let desc = (**mr).mem_desc;
                if read { call!(*ep, rma.read(local, block, desc, *peer, at, *key, none)) }
                else { call!(*ep, rma.write(local.cast_const(), block, desc, *peer, at, *key, none)) }
            });
        }
        self.wait(0);
    }

    /// Sends a message and takes the other's, or the other way round.
    fn message(&self, first: bool, size: usize) {
        let Memory(_, out, mr) = self.memory.as_ref().expect("there is memory");
        let (End { ep, peer, .. }, none, into) = (self, null_mut(), out.wrapping_add(size));
        // SAFETY: there is room for two messages, one each way, and one of each is in flight.
        unsafe {
            let desc = (**mr).mem_desc;
            self.post(usize::from(first), || {
                call!(*ep, msg.recv(into.cast(), size, desc, u64::MAX, none))
            });
            self.post(0, || call!(*ep, msg.send(out.cast_const().cast(), size, desc, *peer, none)));
        }
    }

    /// The other process: does what it is told.
    fn serve(&mut self) {
        while let Some((told, bytes)) = receive(&self.other) {
            if told == PROGRESS {
                let mut ready =
                    libc::pollfd { fd: self.other.as_raw_fd(), events: libc::POLLIN, revents: 0 };
                // SAFETY: one descriptor of this process.
                while unsafe { libc::poll(&mut ready, 1, 0) } == 0 {
                    (0..256).for_each(|_| self.progress());
                }
            } else if told == ANSWER {
                let size = u64::from_le_bytes(bytes.as_chunks().0[0]) as usize;
                (0..MESSAGES).for_each(|_| self.message(false, size));
            } else if told != REST {
                let lent = self.allocate(told).map(u64::to_le_bytes);
                send(&self.other, 0, lent.as_flattened());
            }
        }
    }

    fn allocate_both(&mut self, length: usize) {
        self.allocate(length);
        send(&self.other, length, &[]);
        let lent = receive(&self.other).expect("where its memory is").1;
        self.remote = [0, 1].map(|at| u64::from_le_bytes(lent.as_chunks().0[at]));
    }
}

/// What one process tells the other: a number, and bytes that zeros follow.
fn send(mut stream: &UnixStream, number: usize, bytes: &[u8]) {
    let parts = [&number.to_le_bytes(), bytes, &[0; 256][bytes.len()..]];
    stream.write_all(&parts.concat()).expect("the other process lives");
}

fn receive(mut stream: &UnixStream) -> Option<(usize, [u8; 256])> {
    let (mut number, mut bytes) = ([0; 8], [0; 256]);
    stream.read_exact(&mut number).ok()?;
    stream.read_exact(&mut bytes).ok()?;
    Some((usize::from_le_bytes(number), bytes))
}

/// As `kvx-cli/BESIDE.md` has it.
fn shuffled(count: usize, seed: u64) -> Vec<usize> {
    let (mut numbers, mut state) = ((0..count).collect::<Vec<_>>(), seed);
    for at in (1..count).rev() {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let word = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        numbers.swap(at, ((word ^ (word >> 31)) % (at as u64 + 1)) as usize);
    }
    numbers
}

fn beside(mut end: End) {
    let (mut read, mut block, mut count, mut next, mut moves) = (true, 0, 1, 0, Vec::new());
    for line in std::io::stdin().lines().map_while(Result::ok) {
        let words = || line.split(' ').filter_map(|word| word.split_once('='));
        let word =
            |key: &str| words().find(|(name, _)| *name == key).map_or("", |(_, value)| value);
        let number = |key: &str| word(key).parse::<usize>().expect("a number");
        if let Some(seconds) = line.strip_prefix("go ") {
            let seconds: f64 = seconds.parse().expect("seconds");
            send(&end.other, PROGRESS, &[]);
            let (start, mut times) = (Instant::now(), 0);
            while times == 0 || start.elapsed().as_secs_f64() < seconds {
                end.transfer(read, block, moves[next..next + count].iter().copied());
                (times, next) = (times + 1, (next + count) % moves.len());
            }
            println!("moved {times} {}", start.elapsed().as_secs_f64());
            send(&end.other, REST, &[]);
        } else {
            (read, block, count, next) =
                (word("op") == "read", number("block"), number("count"), 0);
            let (all, scattered) = (count * number("lists"), word("pattern") == "scattered");
            let order = |seed| if scattered { shuffled(all, seed) } else { (0..all).collect() };
            let (from, to) = (order(number("seed") as u64), order(number("seed") as u64 + 1));
            let (local_block, remote_block) = if read { (to, from) } else { (from, to) };
            moves = local_block.into_iter().zip(remote_block).collect();
            end.allocate_both(block * all);
            println!("ready bare libfabric");
        }
    }
}

fn pingpong(mut end: End, size: usize) {
    end.allocate_both(2 * size);
    for _ in 0..3 {
        send(&end.other, ANSWER, &size.to_le_bytes());
        let start = Instant::now();
        (0..MESSAGES).for_each(|_| end.message(true, size));
        let took = start.elapsed().as_secs_f64() / (2 * MESSAGES) as f64;
        println!("{:.2} us a message, {:.2} MB/s", took * 1e6, size as f64 / took / 1e6);
    }
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (provider, domain, size) = match &arguments[..] {
        [provider, domain] => (provider, domain, None),
        [provider, domain, what, size] if what == "pingpong" => {
            (provider, domain, size.parse().ok())
        }
        _ => return eprintln!("usage: kvx-libfabric-bare PROVIDER DOMAIN [pingpong SIZE]"),
    };
    let (ours, theirs) = UnixStream::pair().expect("two sockets");
    // SAFETY: the program has one thread, and has not opened libfabric yet.
    if unsafe { libc::fork() } == 0 {
        drop(ours);
        End::new(provider, domain, theirs).serve();
        std::process::exit(0);
    }
    drop(theirs);
    let end = End::new(provider, domain, ours);
    match size {
        Some(size) => pingpong(end, size),
        None => beside(end),
    }
}
