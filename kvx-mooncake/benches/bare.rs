//! A bare loop over Mooncake's engine between two processes: what it gives without kvx, to measure kvx beside.
//!
//! It is a program for `kvx bench --beside` (see `kvx-cli/BESIDE.md`). Each transfer is one batch, whose state it asks
//! for until it has ended, as the Python engine does. The library is the adapter that `KVX_MOONCAKE_LIB` names; it uses
//! nothing of kvx but the bindings.

use kvx_mooncake::raw::{adapter, *};
use std::ffi::{CStr, CString, c_char, c_void};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::ptr::{NonNull, null_mut};
use std::time::Instant;

const COMPLETED: i32 = 4;
/// From here on a batch has ended otherwise; 0 and 1 mean that it moves.
const INVALID: i32 = 2;

/// An engine with the tcp transport.
struct BareEngine {
    functions: Functions,
    adapter: adapter::Functions,
    handle: *mut c_void,
    name: CString,
}

impl BareEngine {
    fn start() -> BareEngine {
        let file = std::env::var("KVX_MOONCAKE_LIB").expect("KVX_MOONCAKE_LIB names the adapter");
        let file = CString::new(file).expect("a file name");
        let mut name = [0; 512];
        // SAFETY: each call is as transfer_engine.h and adapter.h describe it, on handles that the calls before have
        // made.
        unsafe {
            let library = libc::dlopen(file.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL);
            assert!(!library.is_null(), "{} does not load", file.to_string_lossy());
            let find =
                |name: &'static CStr| NonNull::new(libc::dlsym(library, name.as_ptr())).ok_or(name);
            let functions = Functions::find(find).expect("Mooncake's functions");
            let adapter = adapter::Functions::find(find).expect("the adapter's functions");
            let why = (adapter.kvx_mooncake_load)(0);
            assert!(why.is_null(), "{:?}", CStr::from_ptr(why));
            let (metadata, host) = (c"P2PHANDSHAKE".as_ptr(), c"127.0.0.1".as_ptr());
            let handle = (functions.createTransferEngine)(metadata, host, host, 0, 0);
            assert!(!handle.is_null(), "the engine does not start");
            assert!(
                !(functions.installTransport)(handle, c"tcp".as_ptr(), null_mut()).is_null(),
                "no tcp"
            );
            (functions.getLocalIpAndPort)(handle, name.as_mut_ptr().cast::<c_char>(), name.len());
            let name = CStr::from_bytes_until_nul(&name).expect("a name").to_owned();
            BareEngine { functions, adapter, handle, name }
        }
    }

    /// Memory as kvx's: shared pages for its pools, private ones for what a program brings along; registered, for ever.
    fn memory(&self, len: usize, foreign: bool) -> u64 {
        const HUGE: usize = 2 << 20;
        let kind = if foreign { libc::MAP_PRIVATE } else { libc::MAP_SHARED } | libc::MAP_ANONYMOUS;
        // SAFETY: new pages, of which so many are written to behind the first huge page's border.
        unsafe {
            let pages =
                libc::mmap(null_mut(), len + HUGE, libc::PROT_READ | libc::PROT_WRITE, kind, -1, 0);
            assert!(pages != libc::MAP_FAILED, "no memory");
            libc::madvise(pages, len + HUGE, libc::MADV_HUGEPAGE);
            let address = pages.map_addr(|address| address.next_multiple_of(HUGE));
            address.cast::<u8>().write_bytes(7, len);
            let code =
                (self.functions.registerLocalMemory)(self.handle, address, len, c"*".as_ptr(), 1);
            assert_eq!(code, 0, "registering memory");
            address as u64
        }
    }

    /// Moves all of it in one batch. Says how the batch ended.
    fn transfer(&self, requests: &mut [transfer_request]) -> i32 {
        let Functions { allocateBatchID, submitTransfer, freeBatchID, .. } = self.functions;
        let mut status = transfer_status::default();
        // SAFETY: the requests name memory of both processes that stays for ever; the batch is freed once.
        unsafe {
            let batch = allocateBatchID(self.handle, requests.len());
            let code = submitTransfer(self.handle, batch, requests.as_mut_ptr(), requests.len());
            assert_eq!(code, 0, "submitting");
            while status.status < INVALID {
                let code =
                    (self.adapter.kvx_mooncake_batch_status)(self.handle, batch, &raw mut status);
                assert_eq!(code, 0, "asking for the state");
            }
            freeBatchID(self.handle, batch);
        }
        status.status
    }
}

/// The other process: says its name, and lends memory of the lengths that it is told.
fn serve(stream: UnixStream) {
    let engine = BareEngine::start();
    let mut answers = &stream;
    answers.write_all(engine.name.as_bytes_with_nul()).expect("the first process lives");
    let mut asked = [[0; 8]; 2];
    while (&stream).read_exact(asked.as_flattened_mut()).is_ok() {
        let [len, foreign] = asked.map(usize::from_le_bytes);
        answers
            .write_all(&engine.memory(len, foreign == 1).to_le_bytes())
            .expect("the first process lives");
    }
}

/// As `kvx-cli/BESIDE.md` has it.
fn shuffled(count: usize, seed: u64) -> Vec<u64> {
    let (mut numbers, mut state) = ((0..count as u64).collect::<Vec<_>>(), seed);
    for at in (1..count).rev() {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let word = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        numbers.swap(at, ((word ^ (word >> 31)) % (at as u64 + 1)) as usize);
    }
    numbers
}

fn main() {
    let (ours, theirs) = UnixStream::pair().expect("two sockets");
    // SAFETY: the program has one thread, and has not opened the engine yet.
    if unsafe { libc::fork() } == 0 {
        drop(ours);
        return serve(theirs);
    }
    drop(theirs);
    let engine = BareEngine::start();
    let (mut other, mut name) = (BufReader::new(&ours), Vec::new());
    other.read_until(0, &mut name).expect("its name");
    let name = CString::from_vec_with_nul(name).expect("its name");
    // SAFETY: the name outlives the call.
    let segment = unsafe { (engine.functions.openSegmentNoCache)(engine.handle, name.as_ptr()) };
    assert!(segment >= 0, "its segment does not open");
    let (mut requests, mut count, mut next) = (Vec::<transfer_request>::new(), 1, 0);
    for line in std::io::stdin().lines().map_while(Result::ok) {
        let words = || line.split(' ').filter_map(|word| word.split_once('='));
        let word =
            |key: &str| words().find(|(name, _)| *name == key).map_or("", |(_, value)| value);
        let number = |key: &str| word(key).parse::<usize>().expect("a number");
        let mut once = |requests: &mut [transfer_request]| {
            let state = engine.transfer(&mut requests[next..next + count]);
            next = (next + count) % requests.len();
            state
        };
        if let Some(seconds) = line.strip_prefix("go ") {
            let seconds: f64 = seconds.parse().expect("seconds");
            let (start, mut times) = (Instant::now(), 0);
            while times == 0 || start.elapsed().as_secs_f64() < seconds {
                assert_eq!(once(&mut requests), COMPLETED, "a batch failed");
                times += 1;
            }
            println!("moved {times} {}", start.elapsed().as_secs_f64());
            continue;
        }
        let (block, foreign, read) =
            (number("block") as u64, word("memory") == "foreign", word("op") == "read");
        let (all, seed, scattered) = (
            number("count") * number("lists"),
            number("seed") as u64,
            word("pattern") == "scattered",
        );
        (count, next) = (number("count"), 0);
        let order = |seed| if scattered { shuffled(all, seed) } else { (0..all as u64).collect() };
        let (from, to) = (order(seed), order(seed + 1));
        let len = block as usize * all;
        let our_memory = engine.memory(len, foreign);
        (&ours)
            .write_all([len, foreign.into()].map(usize::to_le_bytes).as_flattened())
            .expect("the other lives");
        let mut their_memory = [0; 8];
        other.read_exact(&mut their_memory).expect("an address");
        let their_memory = u64::from_le_bytes(their_memory);
        let request = |(from, to): (&u64, &u64)| {
            let (local, remote) = if read { (to, from) } else { (from, to) };
            transfer_request {
                opcode: (!read).into(),
                source: (our_memory + local * block) as *mut c_void,
                target_id: segment,
                target_offset: their_memory + remote * block,
                length: block,
            }
        };
        requests = from.iter().zip(&to).map(request).collect();
        let state = engine.transfer(&mut requests[..count]);
        match state {
            COMPLETED => println!("ready bare Mooncake"),
            state => println!("skip the engine ends a batch of {count} with {state}"),
        }
    }
    std::process::exit(0);
}
