//! A bare libfabric loop between two processes: the performance of libfabric without kvx, as a
//! baseline. `PROVIDER DOMAIN` (`tcp lo`, `shm shm`) runs it for `kvx bench --beside` (see
//! `kvx-cli/BESIDE.md`). With `pingpong SIZE` as well, it sends messages back and forth, as
//! `fi_pingpong -e rdm -S SIZE` does.
//!
//! The library is `KVX_LIBFABRIC_LIB`, otherwise `libfabric.so.1`; settings come from the
//! environment. A write counts when it completes with `FI_DELIVERY_COMPLETE`; over shm a post
//! copies before it returns. Of kvx it uses only the bindings and the test kit's baseline module.

use kvx_backend::baseline::{self, Baseline, BlockPair, Channel, HugeMemory, Point, answer};
use kvx_backend::loader::{FunctionTable as _, Search};
use kvx_libfabric::raw::*;
use std::cell::Cell;
use std::ffi::{CStr, CString};
use std::ptr::{null, null_mut};
use std::time::{Duration, Instant};

/// Calls a function from an object's table.
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

/// One of the two processes: its endpoint, which is connected to the other's, and memory of one
/// length in both.
struct End {
    info: *mut fi_info,
    domain: *mut fid_domain,
    ep: *mut fid_ep,
    cq: *mut fid_cq,
    peer: u64,
    other: Channel,
    memory: Option<Memory>,
    /// The other process's base address and key.
    remote: [u64; 2],
    in_flight: Cell<usize>,
}

/// Registered memory.
struct Memory {
    bytes: HugeMemory,
    registration: *mut fid_mr,
}

/// Requests that are not lengths: make progress until the next request; do nothing until then;
/// answer messages of a length.
const PROGRESS: usize = 0;
const REST: usize = usize::MAX;
const ANSWER: usize = usize::MAX - 1;
const MESSAGES: usize = 2000; // back and forth in one measurement

impl End {
    fn new(provider: &str, wanted: &str, other: Channel) -> End {
        let search = Search::new("KVX_LIBFABRIC_LIB", &["libfabric.so.1"], "install libfabric");
        let library = search.open().expect("libfabric");
        let find = |name: &'static CStr| library.versioned_address(name, symbol_version(name));
        let none = null_mut();
        // SAFETY: libfabric's manual allows each call on the objects that the calls before it have
        // created.
        unsafe {
            let functions = Functions::find(find).expect("every function of 1.17");
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
            other.send(0, &address);
            let theirs = other.receive().expect("its address").1;
            check(
                "fi_av_insert",
                call!(av, ops.insert(theirs.as_ptr().cast(), 1, &mut peer, 0, none)),
            );
            let in_flight = Cell::new(0);
            End { info, domain, ep, cq, peer, other, memory: None, remote: [0; 2], in_flight }
        }
    }

    /// Registers memory in place of the last. Returns the two numbers by which the other process
    /// accesses it.
    fn allocate(&mut self, length: usize) -> [u64; 2] {
        if let Some(Memory { registration, .. }) = self.memory.take() {
            // SAFETY: no operation is in flight between points.
            unsafe { call!(registration.cast::<fid>(), ops.close()) };
        }
        let bytes = HugeMemory::new(length, true);
        let access = FI_SEND | FI_RECV | FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE;
        let (mut mr, access) = (null_mut(), u64::from(access));
        let (start, at) = (bytes.as_ptr().cast_const().cast(), bytes.as_ptr().addr() as u64);
        // SAFETY: the memory has that length, and stays allocated while it is registered; the
        // domain is open.
        unsafe {
            check(
                "fi_mr_reg",
                call!(self.domain, mr.reg(start, length, access, 0, at, 0, &mut mr, null_mut())),
            );
            self.memory = Some(Memory { bytes, registration: mr });
            let by_address =
                (*(*self.info).domain_attr).mr_mode.cast_unsigned() & FI_MR_VIRT_ADDR != 0;
            [if by_address { at } else { 0 }, (*mr).key]
        }
    }

    /// Reads completions.
    fn progress(&self) {
        let mut entries = [fi_cq_msg_entry::default(); 64];
        // SAFETY: the array has that many entries of the format that the queue was opened with.
        let answer = unsafe { call!(self.cq, ops.read(entries.as_mut_ptr().cast(), 64)) };
        if answer != -(libc::EAGAIN as isize) {
            self.in_flight
                .set(self.in_flight.get() - check("an operation", answer as i64) as usize);
        }
    }

    /// Posts once there is capacity, and makes progress while more than `left` are in flight.
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

    /// Reads or writes blocks, at most 512 at a time.
    fn move_blocks(&self, read: bool, block: usize, pairs: &[BlockPair]) {
        let (End { ep, peer, remote: [base, key], .. }, none) = (self, null_mut());
        let Memory { bytes, registration: mr } = self.memory.as_ref().expect("there is memory");
        for (local_block, remote_block) in pairs {
            let (local, at) = (
                bytes.as_ptr().wrapping_add(local_block * block).cast(),
                base + (remote_block * block) as u64,
            );
            // SAFETY: both memories are large enough for every block of the point, and live until
            // the next point.
            #[rustfmt::skip]
            self.post(511, || unsafe {
                let desc = (**mr).mem_desc;
                if read { call!(*ep, rma.read(local, block, desc, *peer, at, *key, none)) }
                else { call!(*ep, rma.write(local.cast_const(), block, desc, *peer, at, *key, none)) }
            });
        }
        self.wait(0);
    }

    /// Sends a message and receives the other's, or the other way round.
    fn message(&self, first: bool, size: usize) {
        let Memory { bytes, registration: mr } = self.memory.as_ref().expect("there is memory");
        let (End { ep, peer, .. }, none, out) = (self, null_mut(), bytes.as_ptr());
        let into = out.wrapping_add(size);
        // SAFETY: the memory holds two messages, one for each direction, and one of each is in
        // flight.
        unsafe {
            let desc = (**mr).mem_desc;
            self.post(usize::from(first), || {
                call!(*ep, msg.recv(into.cast(), size, desc, u64::MAX, none))
            });
            self.post(0, || call!(*ep, msg.send(out.cast_const().cast(), size, desc, *peer, none)));
        }
    }

    /// Runs the target process.
    fn serve(&mut self) {
        while let Some((request, bytes)) = self.other.receive() {
            if request == PROGRESS {
                while !self.other.wait(Duration::ZERO) {
                    (0..256).for_each(|_| self.progress());
                }
            } else if request == ANSWER {
                let size = u64::from_le_bytes(bytes.as_chunks().0[0]) as usize;
                (0..MESSAGES).for_each(|_| self.message(false, size));
            } else if request != REST {
                let region = self.allocate(request).map(u64::to_le_bytes);
                self.other.send(0, region.as_flattened());
            }
        }
    }

    fn allocate_both(&mut self, length: usize) {
        self.allocate(length);
        self.other.send(length, &[]);
        let region = self.other.receive().expect("where its memory is").1;
        self.remote = [0, 1].map(|at| u64::from_le_bytes(region.as_chunks().0[at]));
    }
}

impl Baseline for End {
    fn prepare(&mut self, point: &Point) -> Option<String> {
        self.allocate_both(point.bytes());
        None
    }

    fn transfer(&mut self, point: &Point, list: usize) {
        self.move_blocks(point.read, point.block, &point.pairs[point.list(list)]);
    }

    fn set_active(&mut self, active: bool) {
        self.other.send(if active { PROGRESS } else { REST }, &[]);
    }
}

fn pingpong(mut end: End, size: usize) {
    end.allocate_both(2 * size);
    for _ in 0..3 {
        end.other.send(ANSWER, &size.to_le_bytes());
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
    let open = |other| End::new(provider, domain, other);
    // SAFETY: the program has one thread, and has not loaded libfabric yet.
    let other = unsafe { baseline::fork(|channel| open(channel).serve()) };
    let mut end = open(other);
    match size {
        Some(size) => pingpong(end, size),
        None => answer("libfabric", &mut end),
    }
}
