//! A bare UCP loop between two processes: the performance of UCX without kvx, as a baseline.
//!
//! - Without arguments it is a program for `kvx bench --beside` (see `kvx-cli/BESIDE.md`).
//! - `get SIZE WINDOW` and `put SIZE WINDOW` move one buffer over and over, `WINDOW` operations in
//!   flight, as `ucx_perftest -t ucp_get -O WINDOW` does, and print the time of one and GB/s.
//!
//! The library is `KVX_UCX_LIB`, otherwise `libucp.so.0`; settings are UCX's own and the
//! environment's. Peer failures are not reported, which is UCX's fastest mode. Of kvx it uses only
//! the bindings and the test kit's baseline module.

use kvx_backend::baseline::{
    self, Baseline, BlockPair, Channel, HugeMemory, Point, answer, repeat,
};
use kvx_backend::loader::{FunctionTable as _, Search};
use kvx_ucx::raw::*;
use std::ffi::{CStr, c_void};
use std::ptr::{null, null_mut};
use std::time::Duration;
use std::{cell::Cell, mem::zeroed};

/// A context with its only worker, and the number of operations in flight, which callbacks
/// decrement.
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
        let search = Search::new("KVX_UCX_LIB", &["libucp.so.0"], "install UCX 1.13 or newer");
        let library = search.open().expect("UCX");
        let find = |name: &'static CStr| library.address(name);
        // SAFETY: ucp.h allows each call on the handles that the calls before it have created.
        // made.
        unsafe {
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
        // SAFETY: the worker lives as long as the program, which has one thread.
        unsafe { (self.functions.ucp_worker_progress)(self.worker) }
    }

    /// Counts a posted operation, and makes progress while more than `left` are in flight.
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
    // SAFETY: `transfer` passes the leaked `Ucp`, and UCX passes a request that nobody else frees.
    let in_flight = unsafe {
        ((*ucp).functions.ucp_request_free)(request);
        &(*ucp).in_flight
    };
    in_flight.set(in_flight.get() - 1);
    check("an operation", status);
}

/// Registered memory of one process.
struct Memory {
    ucp: &'static Ucp,
    bytes: HugeMemory,
    handle: ucp_mem_h,
}

impl Memory {
    fn new(ucp: &'static Ucp, length: usize) -> Memory {
        let bytes = HugeMemory::new(length, true);
        let (mut params, mut handle) = (ucp_mem_map_params_t::default(), null_mut());
        params.field_mask =
            u64::from(UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH);
        (params.address, params.length) = (bytes.as_ptr().cast(), length);
        // SAFETY: the memory has that length, and `Memory` unmaps it before freeing it; the handles
        // are valid, as in `Ucp::open`.
        unsafe {
            check("ucp_mem_map", (ucp.functions.ucp_mem_map)(ucp.context, &params, &mut handle));
        }
        Memory { ucp, bytes, handle }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: no operation is in flight between points.
        unsafe { (self.ucp.functions.ucp_mem_unmap)(self.ucp.context, self.handle) };
    }
}

/// Requests that are not lengths: `PROGRESS` makes progress until the next request, `REST` does
/// nothing until then.
const PROGRESS: usize = 0;
const REST: usize = usize::MAX;

/// Runs the target process, which allocates memory of the lengths that it receives.
fn serve(channel: &Channel) {
    let (ucp, mut memory) = (Ucp::open(), None);
    let (mut address, mut length) = (null_mut(), 0);
    // SAFETY: the worker is alive; UCX owns the address, which is never released.
    channel.send(0, unsafe {
        check(
            "address",
            (ucp.functions.ucp_worker_get_address)(ucp.worker, &mut address, &mut length),
        );
        std::slice::from_raw_parts(address.cast::<u8>(), length)
    });
    while let Some((request, _)) = channel.receive() {
        if request == PROGRESS {
            // An idle target must not take CPU time from the initiator, which may copy on its core.
            let mut idle = 0;
            while !channel.wait(Duration::from_millis(u64::from(idle > 20))) {
                idle = if (0..256).map(|_| ucp.progress()).sum::<u32>() > 0 { 0 } else { idle + 1 };
            }
        } else if request != REST {
            drop(memory.take());
            let shared = memory.insert(Memory::new(ucp, request));
            let (mut key, mut length) = (null_mut(), 0);
            // SAFETY: context and registration are alive; UCX owns the packed key, which is never
            // released.
            channel.send(shared.bytes.as_ptr().expose_provenance(), unsafe {
                check(
                    "key",
                    (ucp.functions.ucp_rkey_pack)(
                        ucp.context,
                        shared.handle,
                        &mut key,
                        &mut length,
                    ),
                );
                std::slice::from_raw_parts(key.cast::<u8>(), length)
            });
        }
    }
}

/// The initiator process, and memory of one length in both processes.
struct Initiator {
    ucp: &'static Ucp,
    target: Channel,
    endpoint: ucp_ep_h,
    memory: Option<Memory>,
    remote: usize,
    key: ucp_rkey_h,
}

impl Initiator {
    fn new() -> Initiator {
        // SAFETY: the program has one thread, and has not loaded UCX yet.
        let target = unsafe { baseline::fork(|channel| serve(&channel)) };
        let ucp = Ucp::open();
        let ((_, address), mut endpoint) = (target.receive().expect("its address"), null_mut());
        // SAFETY: the field that the mask names is set, to a complete address of the other process.
        unsafe {
            let mut params: ucp_ep_params_t = zeroed();
            params.field_mask = u64::from(UCP_EP_PARAM_FIELD_REMOTE_ADDRESS);
            params.address = address.as_ptr().cast();
            check(
                "ucp_ep_create",
                (ucp.functions.ucp_ep_create)(ucp.worker, &params, &mut endpoint),
            );
        }
        Initiator { ucp, target, endpoint, memory: None, remote: 0, key: null_mut() }
    }

    fn allocate(&mut self, length: usize) {
        self.memory = None; // the key of the last point is kept: it is small
        self.target.send(length, &[]);
        let (remote, packed) = self.target.receive().expect("address and key");
        let unpack = self.ucp.functions.ucp_ep_rkey_unpack;
        // SAFETY: the endpoint is open, and the key is complete.
        check("rkey", unsafe { unpack(self.endpoint, packed.as_ptr().cast(), &mut self.key) });
        (self.remote, self.memory) = (remote, Some(Memory::new(self.ucp, length)));
    }

    /// Reads or writes blocks, adjacent ones in one operation, with `window` in flight. Waits for
    /// the last.
    fn move_blocks(&self, read: bool, block: usize, window: usize, pairs: &[BlockPair]) {
        let (ucp, memory) = (self.ucp, self.memory.as_ref().expect("there is memory"));
        let mut param = ucp_request_param_t {
            op_attr_mask: UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA,
            user_data: (&raw const *ucp).cast_mut().cast(),
            memh: memory.handle,
            ..ucp_request_param_t::default()
        };
        param.op_attr_mask |= UCP_OP_ATTR_FIELD_MEMH | UCP_OP_ATTR_FLAG_MULTI_SEND;
        param.cb.send = Some(ended);
        let Functions { ucp_get_nbx: get, ucp_put_nbx: put, ucp_ep_flush_nbx, .. } = ucp.functions;
        for run in pairs.chunk_by(|a, b| (a.0 + 1, a.1 + 1) == *b) {
            let (local_block, remote_block) = run[0];
            let local = memory.bytes.as_ptr().wrapping_add(local_block * block).cast();
            let (remote, length) = ((self.remote + remote_block * block) as u64, run.len() * block);
            // SAFETY: both memories are large enough for every block of the point, and live until
            // the next point.
            #[rustfmt::skip]
            let posted = unsafe {
                if read { get(self.endpoint, local, length, remote, self.key, &param) }
                else { put(self.endpoint, local, length, remote, self.key, &param) }
            };
            ucp.posted(posted, window - 1);
        }
        let flushed = match read {
            true => null_mut(),
            // SAFETY: the endpoint is open.
            false => unsafe { ucp_ep_flush_nbx(self.endpoint, &param) },
        };
        ucp.posted(flushed, 0);
    }
}

impl Baseline for Initiator {
    fn prepare(&mut self, point: &Point) -> Option<String> {
        self.allocate(point.bytes());
        None
    }

    fn transfer(&mut self, point: &Point, list: usize) {
        self.move_blocks(point.read, point.block, 512, &point.pairs[point.list(list)]);
    }

    fn set_active(&mut self, active: bool) {
        self.target.send(if active { PROGRESS } else { REST }, &[]);
    }
}

fn one_buffer(read: bool, size: usize, window: usize) {
    let mut initiator = Initiator::new();
    initiator.allocate(size);
    let round = |initiator: &mut Initiator| {
        initiator.move_blocks(read, size, window, &[(0, 0); 5000]);
    };
    repeat(&mut initiator, 0.5, round); // connects, and warms up
    let (times, took) = repeat(&mut initiator, 3.0, round);
    let one = took / (f64::from(times) * 5000.0);
    println!("{:.3} us, {:.3} GB/s", one * 1e6, size as f64 / one / 1e9);
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => answer("UCP", &mut Initiator::new()),
        [operation @ ("get" | "put"), size, window] => {
            let number = |text: &str| text.parse().expect("a number");
            one_buffer(operation == "get", number(size), number(window));
        }
        _ => eprintln!("usage: kvx-ucx-bare [get|put SIZE WINDOW]"),
    }
}
