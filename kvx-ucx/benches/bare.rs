//! A bare UCP loop between two processes: what UCX gives without kvx, to measure kvx beside.
//!
//! - Without arguments it is a program for `kvx bench --beside` (see `kvx-cli/BESIDE.md`).
//! - `get SIZE WINDOW` and `put SIZE WINDOW` move one buffer over and over, `WINDOW` operations in flight, as
//!   `ucx_perftest -t ucp_get -O WINDOW` does, and print the time of one and GB/s.
//!
//! The library is `KVX_UCX_LIB`, else `libucp.so.0`; settings are UCX's own and the environment's, and failures of the
//! peer are not asked for: the fastest that UCX is. It uses nothing of kvx but the bindings.

use kvx_ucx::raw::*;
use std::ffi::{CStr, CString, c_void};
use std::io::{Read, Write};
use std::os::{fd::AsRawFd, unix::net::UnixStream};
use std::ptr::{NonNull, null, null_mut};
use std::{cell::Cell, mem::zeroed, time::Instant};

/// A context with its one worker, and what its callbacks count.
struct Ucp {
    functions: Functions,
    context: ucp_context_h,
    worker: ucp_worker_h,
    in_flight: Cell<usize>,
}

fn check(what: &str, status: ucs_status_t) {
    assert!(status == UCS_OK, "{what}: UCX status {status}");
}

impl Ucp {
    fn open() -> &'static Ucp {
        let name = std::env::var("KVX_UCX_LIB").unwrap_or_else(|_| "libucp.so.0".to_owned());
        let name = CString::new(name).expect("a file name");
        // SAFETY: each call is one that ucp.h describes, on handles that the calls before it have made.
        unsafe {
            let library = libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL);
            assert!(!library.is_null(), "{} does not load", name.to_string_lossy());
            let find =
                |name: &'static CStr| NonNull::new(libc::dlsym(library, name.as_ptr())).ok_or(name);
            let functions = Functions::find(find).expect("every function of UCX 1.13");
            let (mut params, mut context, mut worker) =
                (ucp_params_t::default(), null_mut(), null_mut());
            params.field_mask = u64::from(UCP_PARAM_FIELD_FEATURES);
            params.features = u64::from(UCP_FEATURE_RMA);
            check("ucp_init", (functions.ucp_init_version)(1, 13, &params, null(), &mut context));
            check(
                "ucp_worker_create",
                (functions.ucp_worker_create)(context, &zeroed(), &mut worker),
            );
            Box::leak(Box::new(Ucp { functions, context, worker, in_flight: Cell::new(0) }))
        }
    }

    fn progress(&self) -> u32 {
        // SAFETY: the worker lives as long as the program; there is one thread.
        unsafe { (self.functions.ucp_worker_progress)(self.worker) }
    }

    /// Counts an operation that was posted, and makes progress while more than `left` are in flight.
    fn posted(&self, answer: ucs_status_ptr_t, left: usize) {
        match answer as isize {
            0 => {}
            status @ -100..0 => check("posting", status as ucs_status_t),
            _ => self.in_flight.set(self.in_flight.get() + 1),
        }
        while self.in_flight.get() > left {
            self.progress();
        }
    }
}

unsafe extern "C" fn ended(request: *mut c_void, status: ucs_status_t, ucp: *mut c_void) {
    let ucp = ucp.cast::<Ucp>();
    // SAFETY: `transfer` passes the leaked `Ucp`, and UCX a request that nobody else frees.
    let in_flight = unsafe {
        ((*ucp).functions.ucp_request_free)(request);
        &(*ucp).in_flight
    };
    in_flight.set(in_flight.get() - 1);
    check("an operation", status);
}

/// Memory on transparent huge pages, touched and registered: what keeps it, where it is, and its registration.
struct Memory(&'static Ucp, #[allow(dead_code, reason = "it keeps")] Vec<u8>, *mut u8, ucp_mem_h);

impl Memory {
    fn new(ucp: &'static Ucp, length: usize) -> Memory {
        let mut bytes = Vec::<u8>::with_capacity(length + (2 << 20));
        let address = bytes.as_mut_ptr().map_addr(|address| address.next_multiple_of(2 << 20));
        let (mut params, mut handle) = (ucp_mem_map_params_t::default(), null_mut());
        params.field_mask =
            u64::from(UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH);
        (params.address, params.length) = (address.cast(), length);
        // SAFETY: so many bytes are there, and nobody else's; then as in `Ucp::open`.
        unsafe {
            libc::madvise(address.cast(), length, libc::MADV_HUGEPAGE);
            address.write_bytes(7, length);
            check("ucp_mem_map", (ucp.functions.ucp_mem_map)(ucp.context, &params, &mut handle));
        }
        Memory(ucp, bytes, address, handle)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: nothing is in flight between points.
        unsafe { (self.0.functions.ucp_mem_unmap)(self.0.context, self.3) };
    }
}

/// What one process tells the other: a number, and bytes.
fn send(mut stream: &UnixStream, number: usize, bytes: &[u8]) {
    let head = [number.to_le_bytes(), bytes.len().to_le_bytes()].concat();
    stream.write_all(&[&head, bytes].concat()).expect("the other process lives");
}

fn receive(mut stream: &UnixStream) -> Option<(usize, Vec<u8>)> {
    let mut head = [[0; 8]; 2];
    stream.read_exact(head.as_flattened_mut()).ok()?;
    let [number, length] = head.map(usize::from_le_bytes);
    let mut bytes = vec![0; length];
    stream.read_exact(&mut bytes).ok()?;
    Some((number, bytes))
}

/// Numbers that are no length: make progress until the next number; do nothing until then.
const PROGRESS: usize = 0;
const REST: usize = usize::MAX;

/// The other process: lends memory of the length that it is told.
fn serve(stream: &UnixStream) {
    let (ucp, mut memory) = (Ucp::open(), None);
    let (mut address, mut length) = (null_mut(), 0);
    // SAFETY: the worker lives; the address is UCX's, and never given back.
    send(stream, 0, unsafe {
        check(
            "address",
            (ucp.functions.ucp_worker_get_address)(ucp.worker, &mut address, &mut length),
        );
        std::slice::from_raw_parts(address.cast::<u8>(), length)
    });
    while let Some((told, _)) = receive(stream) {
        if told == PROGRESS {
            let mut ready =
                libc::pollfd { fd: stream.as_raw_fd(), events: libc::POLLIN, revents: 0 };
            // Where nothing is asked of it, it must not take the core, or half of the core, that the other one copies
            // on.
            let mut idle = 0;
            // SAFETY: one descriptor of this process.
            while unsafe { libc::poll(&mut ready, 1, i32::from(idle > 20)) } == 0 {
                idle = if (0..256).map(|_| ucp.progress()).sum::<u32>() > 0 { 0 } else { idle + 1 };
            }
        } else if told != REST {
            drop(memory.take());
            let lent = memory.insert(Memory::new(ucp, told));
            let (mut key, mut length) = (null_mut(), 0);
            // SAFETY: context and registration live; the packed key is UCX's, and never given back.
            send(stream, lent.2 as usize, unsafe {
                check(
                    "key",
                    (ucp.functions.ucp_rkey_pack)(ucp.context, lent.3, &mut key, &mut length),
                );
                std::slice::from_raw_parts(key.cast::<u8>(), length)
            });
        }
    }
}

type Shape = (bool, usize, usize);
/// The number of a block where it comes from, and where it goes to.
type Move = (usize, usize);

/// The first process, with memory of one length in both.
struct Pair {
    ucp: &'static Ucp,
    other: UnixStream,
    endpoint: ucp_ep_h,
    memory: Option<Memory>,
    remote: usize,
    key: ucp_rkey_h,
}

impl Pair {
    fn new() -> Pair {
        let (other, theirs) = UnixStream::pair().expect("two sockets");
        // SAFETY: the program has one thread, and has not opened UCX yet.
        if unsafe { libc::fork() } == 0 {
            drop(other);
            serve(&theirs);
            std::process::exit(0);
        }
        drop(theirs);
        let ucp = Ucp::open();
        let ((_, address), mut endpoint) = (receive(&other).expect("its address"), null_mut());
        // SAFETY: the field that the mask names is set, to a whole address of the other process.
        unsafe {
            let mut params: ucp_ep_params_t = zeroed();
            params.field_mask = u64::from(UCP_EP_PARAM_FIELD_REMOTE_ADDRESS);
            params.address = address.as_ptr().cast();
            check(
                "ucp_ep_create",
                (ucp.functions.ucp_ep_create)(ucp.worker, &params, &mut endpoint),
            );
        }
        Pair { ucp, other, endpoint, memory: None, remote: 0, key: null_mut() }
    }

    fn allocate(&mut self, length: usize) {
        self.memory = None; // the key of the last point is kept: it is small
        send(&self.other, length, &[]);
        let (remote, packed) = receive(&self.other).expect("address and key");
        let unpack = self.ucp.functions.ucp_ep_rkey_unpack;
        // SAFETY: the endpoint is open and the key whole.
        check("rkey", unsafe { unpack(self.endpoint, packed.as_ptr().cast(), &mut self.key) });
        (self.remote, self.memory) = (remote, Some(Memory::new(self.ucp, length)));
    }

    /// Reads or writes all blocks, neighbours on both sides as one, so many at a time; waits for the last.
    fn transfer(&self, (read, block, window): Shape, moves: &[Move]) {
        let (ucp, memory) = (self.ucp, self.memory.as_ref().expect("there is memory"));
        let mut param = ucp_request_param_t {
            op_attr_mask: UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA,
            user_data: (&raw const *ucp).cast_mut().cast(),
            memh: memory.3,
            ..ucp_request_param_t::default()
        };
        param.op_attr_mask |= UCP_OP_ATTR_FIELD_MEMH | UCP_OP_ATTR_FLAG_MULTI_SEND;
        param.cb.send = Some(ended);
        let Functions { ucp_get_nbx: get, ucp_put_nbx: put, ucp_ep_flush_nbx, .. } = ucp.functions;
        for run in moves.chunk_by(|a, b| (a.0 + 1, a.1 + 1) == *b) {
            let (local_block, remote_block) = if read { (run[0].1, run[0].0) } else { run[0] };
            let local = memory.2.wrapping_add(local_block * block).cast();
            let (remote, length) = ((self.remote + remote_block * block) as u64, run.len() * block);
            // SAFETY: both memories have room for every block of the point, and live until the next point.
            #[rustfmt::skip]
            let posted = unsafe {
                if read { get(self.endpoint, local, length, remote, self.key, &param) }
                else { put(self.endpoint, local, length, remote, self.key, &param) }
            };
            ucp.posted(posted, window - 1);
        }
        // SAFETY: the endpoint is open.
        let flushed =
            if read { null_mut() } else { unsafe { ucp_ep_flush_nbx(self.endpoint, &param) } };
        ucp.posted(flushed, 0);
    }

    /// Does `round` again and again for so long; how often, and how long it took.
    fn repeat(&self, seconds: f64, mut round: impl FnMut(&Pair)) -> (u32, f64) {
        send(&self.other, PROGRESS, &[]);
        let (start, mut times) = (Instant::now(), 0);
        while times == 0 || start.elapsed().as_secs_f64() < seconds {
            round(self);
            times += 1;
        }
        let took = start.elapsed().as_secs_f64();
        send(&self.other, REST, &[]);
        (times, took)
    }
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

fn beside(mut pair: Pair) {
    let (mut shape, mut count, mut next, mut moves) = ((true, 0, 512), 1, 0, Vec::<Move>::new());
    for line in std::io::stdin().lines().map_while(Result::ok) {
        let words = || line.split(' ').filter_map(|word| word.split_once('='));
        let word =
            |key: &str| words().find(|(name, _)| *name == key).map_or("", |(_, value)| value);
        let number = |key: &str| word(key).parse::<usize>().expect("a number");
        if let Some(seconds) = line.strip_prefix("go ") {
            let (times, took) = pair.repeat(seconds.parse().expect("seconds"), |pair| {
                pair.transfer(shape, &moves[next..next + count]);
                next = (next + count) % moves.len();
            });
            println!("moved {times} {took}");
        } else {
            (shape.0, shape.1, count, next) =
                (word("op") == "read", number("block"), number("count"), 0);
            let (all, seed) = (count * number("lists"), number("seed") as u64);
            let scattered = word("pattern") == "scattered";
            let order = |seed| if scattered { shuffled(all, seed) } else { (0..all).collect() };
            moves = order(seed).into_iter().zip(order(seed + 1)).collect();
            pair.allocate(shape.1 * all);
            println!("ready bare UCP");
        }
    }
}

fn one_buffer(mut pair: Pair, shape: Shape) {
    pair.allocate(shape.1);
    let round = |pair: &Pair| pair.transfer(shape, &[(0, 0); 5000]);
    pair.repeat(0.5, round); // connects, and warms up
    let (times, took) = pair.repeat(3.0, round);
    let one = took / (f64::from(times) * 5000.0);
    println!("{:.3} us, {:.3} GB/s", one * 1e6, shape.1 as f64 / one / 1e9);
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => beside(Pair::new()),
        [operation @ ("get" | "put"), size, window] => {
            let number = |text: &str| text.parse().expect("a number");
            one_buffer(Pair::new(), (operation == "get", number(size), number(window)));
        }
        _ => eprintln!("usage: kvx-ucx-bare [get|put SIZE WINDOW]"),
    }
}
