//! A bare loop over NIXL's C interface between two processes: what it gives without kvx, to measure kvx beside.
//!
//! It is a program for `kvx bench --beside` (see `kvx-cli/BESIDE.md`). Requests are prepared before the rounds, one for
//! each list, with neighbours merged; each transfer posts the next of them and asks for its state until it has ended.
//! Neither agent has NIXL's thread. The library is what `KVX_RIXL_LIB` names; it uses nothing of kvx but the bindings.
//! With arguments it measures notifications beside transfers instead ([`notices`]).

mod notices;

use kvx_rixl::raw::*;
use std::ffi::{CStr, CString, c_int, c_void};
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::ptr::{NonNull, null, null_mut};
use std::time::Instant;

/// How often a target without an order lets NIXL work, in milliseconds: the first request waits until both ends have
/// answered each other.
const LOOKS: c_int = 20;

/// An agent with the plugin UCX.
struct NixlAgent {
    nixl: Functions,
    raw: nixl_agent,
    args: nixl_opt_args,
    notifications: nixl_notif_map,
}

fn done(code: nixl_status) {
    assert_eq!(code, NIXL_CAPI_SUCCESS, "NIXL refuses");
}

impl NixlAgent {
    fn start(name: &CStr) -> NixlAgent {
        let file = CString::new(
            std::env::var("KVX_RIXL_LIB").expect("KVX_RIXL_LIB names libnixl_capi.so"),
        );
        let file = file.expect("a file name");
        let (mut raw, mut params, mut backend) = (null_mut(), null_mut(), null_mut());
        let (mut args, mut notifications) = (null_mut(), null_mut());
        // SAFETY: each call is as nixl_capi.h describes it, on handles that the calls before have made.
        unsafe {
            // The system's before the wheel's, as kvx-rixl does it: with both in turn the process crashes at its end.
            libc::dlopen(c"libnl-route-3.so.200".as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL);
            let library = libc::dlopen(file.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL);
            assert!(!library.is_null(), "{} does not load", file.to_string_lossy());
            let find =
                |name: &'static CStr| NonNull::new(libc::dlsym(library, name.as_ptr())).ok_or(name);
            let nixl = Functions::find(find).expect("NIXL's functions");
            let config = nixl_agent_config { num_workers: 1, ..nixl_agent_config::default() };
            done((nixl.nixl_capi_create_configured_agent)(name.as_ptr(), &config, &mut raw));
            done((nixl.nixl_capi_create_params)(&mut params));
            let device = (c"engine_config".as_ptr(), c"NET_DEVICES=lo".as_ptr());
            done((nixl.nixl_capi_params_add)(params, device.0, device.1));
            done((nixl.nixl_capi_create_backend)(raw, c"UCX".as_ptr(), params, &mut backend));
            done((nixl.nixl_capi_create_opt_args)(&mut args));
            done((nixl.nixl_capi_opt_args_add_backend)(args, backend));
            done((nixl.nixl_capi_create_notif_map)(&mut notifications));
            NixlAgent { nixl, raw, args, notifications }
        }
    }

    /// Memory as kvx's: shared pages for its pools, private ones for what a program brings along; registered, for ever.
    fn memory(&self, len: usize, foreign: bool) -> usize {
        const HUGE: usize = 2 << 20;
        let kind = if foreign { libc::MAP_PRIVATE } else { libc::MAP_SHARED } | libc::MAP_ANONYMOUS;
        let mut list = null_mut();
        // SAFETY: new pages, of which so many are written to behind the first huge page's border; a list of this
        // agent's.
        unsafe {
            let pages =
                libc::mmap(null_mut(), len + HUGE, libc::PROT_READ | libc::PROT_WRITE, kind, -1, 0);
            assert!(pages != libc::MAP_FAILED, "no memory");
            libc::madvise(pages, len + HUGE, libc::MADV_HUGEPAGE);
            let address = pages.map_addr(|address| address.next_multiple_of(HUGE));
            address.cast::<u8>().write_bytes(7, len);
            done((self.nixl.nixl_capi_create_reg_dlist)(NIXL_CAPI_MEM_DRAM as c_int, &mut list));
            done((self.nixl.nixl_capi_reg_dlist_add_desc)(
                list,
                address as usize,
                len,
                0,
                null(),
                0,
            ));
            done((self.nixl.nixl_capi_register_mem)(self.raw, list, self.args));
            address as usize
        }
    }

    /// How to reach it and all of its memory.
    fn metadata(&self) -> Vec<u8> {
        let (mut data, mut len) = (null_mut::<c_void>(), 0);
        // SAFETY: places for the answer, which is so many bytes.
        unsafe {
            done((self.nixl.nixl_capi_get_local_md)(self.raw, &mut data, &mut len));
            std::slice::from_raw_parts(data.cast::<u8>(), len).to_vec()
        }
    }

    fn load(&self, metadata: &[u8]) {
        let mut name = null_mut();
        // SAFETY: bytes that another agent's `metadata` gave, with their length.
        done(unsafe {
            (self.nixl.nixl_capi_load_remote_md)(
                self.raw,
                metadata.as_ptr().cast(),
                metadata.len(),
                &mut name,
            )
        });
    }

    fn look(&self) {
        // SAFETY: live handles.
        done(unsafe { (self.nixl.nixl_capi_get_notifs)(self.raw, self.notifications, null_mut()) });
    }

    /// A request that moves `pieces`: here, there, and how long.
    fn request(&self, read: bool, pieces: &[[usize; 3]]) -> nixl_xfer_req {
        let list = |end: usize| {
            let mut list = null_mut();
            // SAFETY: a list of this agent's, of memory that stays.
            unsafe {
                done((self.nixl.nixl_capi_create_xfer_dlist)(
                    NIXL_CAPI_MEM_DRAM as c_int,
                    &mut list,
                ));
                for piece in pieces {
                    done((self.nixl.nixl_capi_xfer_dlist_add_desc)(list, piece[end], piece[2], 0));
                }
            }
            list
        };
        let op = if read { NIXL_CAPI_XFER_OP_READ } else { NIXL_CAPI_XFER_OP_WRITE } as c_int;
        let (create, target, mut request) =
            (self.nixl.nixl_capi_create_xfer_req, c"target".as_ptr(), null_mut());
        // SAFETY: lists of as many ranges, of memory of both agents.
        done(unsafe { create(self.raw, op, list(0), list(1), target, &mut request, self.args) });
        request
    }

    fn transfer(&self, request: nixl_xfer_req) {
        // SAFETY: a request of this agent's that is not in progress, posted once and asked for until it has ended.
        unsafe {
            let mut state = (self.nixl.nixl_capi_post_xfer_req)(self.raw, request, null_mut());
            while state == NIXL_CAPI_IN_PROG {
                state = (self.nixl.nixl_capi_get_xfer_status)(self.raw, request);
            }
            done(state);
        }
    }
}

fn send(mut to: &UnixStream, bytes: &[u8]) {
    to.write_all(&bytes.len().to_le_bytes())
        .and_then(|()| to.write_all(bytes))
        .expect("the other lives");
}

fn receive(mut from: &UnixStream) -> Option<Vec<u8>> {
    let mut len = [0; 8];
    from.read_exact(&mut len).ok()?;
    let mut bytes = vec![0; usize::from_le_bytes(len)];
    from.read_exact(&mut bytes).ok().map(|()| bytes)
}

/// The other process: lends memory of the lengths that it is told, and looks after NIXL meanwhile.
fn serve(stream: &UnixStream) {
    let agent = NixlAgent::start(c"target");
    let mut socket = libc::pollfd { fd: stream.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    loop {
        // SAFETY: one descriptor, which is open.
        if unsafe { libc::poll(&mut socket, 1, LOOKS) } == 0 {
            agent.look();
            continue;
        }
        let Some(order) = receive(stream) else { return };
        let Some((asked, metadata)) = order.split_at_checked(16) else { return };
        let number =
            |at: usize| usize::from_le_bytes(asked[at..at + 8].try_into().expect("eight bytes"));
        let address = agent.memory(number(0), number(8) == 1);
        agent.load(metadata);
        send(stream, &[&address.to_le_bytes(), agent.metadata().as_slice()].concat());
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

/// Puts pieces together that are neighbours at both ends.
fn merged(pieces: impl Iterator<Item = [usize; 3]>) -> Vec<[usize; 3]> {
    let mut runs: Vec<[usize; 3]> = Vec::new();
    for [our_memory, their_memory, len] in pieces {
        match runs.last_mut() {
            Some(run) if run[0] + run[2] == our_memory && run[1] + run[2] == their_memory => {
                run[2] += len
            }
            _ => runs.push([our_memory, their_memory, len]),
        }
    }
    runs
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let (ours, theirs) = UnixStream::pair().expect("two sockets");
    // SAFETY: the program has one thread, and has not opened NIXL yet.
    if unsafe { libc::fork() } == 0 {
        drop(ours);
        match arguments[..] {
            ["notices", _, how] => notices::serve(&theirs, how == "polls"),
            _ => serve(&theirs),
        }
        // SAFETY: ends the process. NIXL's libraries do not survive a usual exit everywhere.
        unsafe { libc::_exit(0) };
    }
    drop(theirs);
    match arguments[..] {
        ["notices", slice, _] => notices::read(&ours, slice.parse().expect("bytes of a slice")),
        _ => answer(&ours),
    }
    // SAFETY: as above.
    unsafe { libc::_exit(0) };
}

/// Answers `kvx bench`.
fn answer(other: &UnixStream) {
    let agent = NixlAgent::start(c"initiator");
    let (mut requests, mut next) = (Vec::new(), 0);
    for line in std::io::stdin().lines().map_while(Result::ok) {
        let words = || line.split(' ').filter_map(|word| word.split_once('='));
        let word =
            |key: &str| words().find(|(name, _)| *name == key).map_or("", |(_, value)| value);
        let number = |key: &str| word(key).parse::<usize>().expect("a number");
        let mut once = || {
            agent.transfer(requests[next]);
            next = (next + 1) % requests.len();
        };
        if let Some(seconds) = line.strip_prefix("go ") {
            let seconds: f64 = seconds.parse().expect("seconds");
            let (start, mut times) = (Instant::now(), 0);
            while times == 0 || start.elapsed().as_secs_f64() < seconds {
                once();
                times += 1;
            }
            println!("moved {times} {}", start.elapsed().as_secs_f64());
            continue;
        }
        let (block, count, foreign, read) =
            (number("block"), number("count"), word("memory") == "foreign", word("op") == "read");
        let (all, seed, scattered) =
            (count * number("lists"), number("seed") as u64, word("pattern") == "scattered");
        let our_memory = agent.memory(block * all, foreign);
        let asked = [block * all, foreign.into()].map(usize::to_le_bytes);
        send(other, &[asked.as_flattened(), agent.metadata().as_slice()].concat());
        let answer = receive(other).expect("the other lives");
        let (their_memory, metadata) = answer.split_at(8);
        let their_memory = usize::from_le_bytes(their_memory.try_into().expect("eight bytes"));
        agent.load(metadata);
        let order = |seed| if scattered { shuffled(all, seed) } else { (0..all).collect() };
        let (from, to) = (order(seed), order(seed + 1));
        let (locals, remotes) = if read { (to, from) } else { (from, to) };
        let lists = locals.chunks(count).zip(remotes.chunks(count));
        let pieces = lists.map(|(locals, remotes)| {
            let places = locals.iter().zip(remotes);
            merged(places.map(|(local, remote)| {
                [our_memory + local * block, their_memory + remote * block, block]
            }))
        });
        requests = pieces.map(|pieces| agent.request(read, &pieces)).collect();
        next = 0;
        agent.transfer(requests[0]);
        println!("ready bare NIXL");
    }
}
