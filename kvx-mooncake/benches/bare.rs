//! A bare loop over Mooncake's engine between two processes: the performance of the engine without
//! kvx, as a baseline.
//!
//! It is a program for `kvx bench --beside` (see `kvx-cli/BESIDE.md`). Each transfer is one batch,
//! whose state it queries until it has ended, as the Python engine does. The library is the adapter
//! that `KVX_MOONCAKE_LIB` names. Of kvx it uses only the bindings and the test kit's baseline
//! module.

use kvx_backend::baseline::{self, Baseline, Channel, HugeMemory, Point, answer};
use kvx_backend::loader::{FunctionTable as _, Search};
use kvx_mooncake::raw::{adapter, *};
use std::ffi::{CStr, CString, c_char, c_void};
use std::ptr::null_mut;

const COMPLETED: i32 = 4;
/// The first state in which a batch has ended; 0 and 1 mean that it is in progress.
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
        let search = Search::new("KVX_MOONCAKE_LIB", &[], "run `kvx mooncake-adapter FOLDER`");
        let library = search.open().expect("the adapter");
        let find = |name: &'static CStr| library.address(name);
        let mut name = [0; 512];
        // SAFETY: transfer_engine.h and adapter.h allow each call on the handles that the calls
        // before it have created.
        unsafe {
            let functions = Functions::find(find).expect("Mooncake's functions");
            let adapter = adapter::Functions::find(find).expect("the adapter's functions");
            let why = (adapter.kvx_mooncake_load)(0);
            assert!(why.is_null(), "{:?}", CStr::from_ptr(why));
            let (metadata, host) = (c"P2PHANDSHAKE".as_ptr(), c"127.0.0.1".as_ptr());
            let handle = (functions.createTransferEngine)(metadata, host, host, 0, 0);
            assert!(!handle.is_null(), "the engine did not start");
            assert!(
                !(functions.installTransport)(handle, c"tcp".as_ptr(), null_mut()).is_null(),
                "no tcp"
            );
            (functions.getLocalIpAndPort)(handle, name.as_mut_ptr().cast::<c_char>(), name.len());
            let name = CStr::from_bytes_until_nul(&name).expect("a name").to_owned();
            BareEngine { functions, adapter, handle, name }
        }
    }

    /// Allocates and registers memory, for the life of the process.
    fn memory(&self, len: usize, foreign: bool) -> usize {
        let address = HugeMemory::new(len, foreign).leak();
        let start = std::ptr::with_exposed_provenance_mut(address);
        let register = self.functions.registerLocalMemory;
        // SAFETY: the memory has that length, and stays valid.
        let code = unsafe { register(self.handle, start, len, c"*".as_ptr(), 1) };
        assert_eq!(code, 0, "registering memory");
        address
    }

    /// Moves all pieces in one batch. Returns the state in which the batch ended.
    fn submit(&self, requests: &mut [transfer_request]) -> i32 {
        let Functions { allocateBatchID, submitTransfer, freeBatchID, .. } = self.functions;
        let mut status = transfer_status::default();
        // SAFETY: the requests name memory of both processes that stays valid forever; the batch is
        // freed once.
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

/// Runs the target process: sends its name, and allocates memory of the lengths that it receives.
fn serve(channel: &Channel) {
    let engine = BareEngine::start();
    channel.send(0, engine.name.as_bytes_with_nul());
    while let Some((len, foreign)) = channel.receive() {
        channel.send(engine.memory(len, foreign == [1]), &[]);
    }
}

/// The initiator process.
struct Initiator {
    engine: BareEngine,
    target: Channel,
    segment: i32,
    requests: Vec<transfer_request>,
}

impl Initiator {
    fn new() -> Initiator {
        // SAFETY: the program has one thread, and has not loaded the engine yet.
        let target = unsafe { baseline::fork(|channel| serve(&channel)) };
        let engine = BareEngine::start();
        let name = CString::from_vec_with_nul(target.receive().expect("its name").1);
        let name = name.expect("its name");
        // SAFETY: the name outlives the call.
        let segment =
            unsafe { (engine.functions.openSegmentNoCache)(engine.handle, name.as_ptr()) };
        assert!(segment >= 0, "its segment could not be opened");
        Initiator { engine, target, segment, requests: Vec::new() }
    }
}

impl Baseline for Initiator {
    fn prepare(&mut self, point: &Point) -> Option<String> {
        let local_memory = self.engine.memory(point.bytes(), point.foreign);
        self.target.send(point.bytes(), &[point.foreign.into()]);
        let (remote_memory, _) = self.target.receive().expect("an address");
        let request = |(local, remote): &(usize, usize)| transfer_request {
            opcode: (!point.read).into(),
            source: (local_memory + local * point.block) as *mut c_void,
            target_id: self.segment,
            target_offset: (remote_memory + remote * point.block) as u64,
            length: point.block as u64,
        };
        self.requests = point.pairs.iter().map(request).collect();
        match self.engine.submit(&mut self.requests[point.list(0)]) {
            COMPLETED => None,
            state => Some(format!("the engine ended a batch of {} in state {state}", point.count)),
        }
    }

    fn transfer(&mut self, point: &Point, list: usize) {
        let state = self.engine.submit(&mut self.requests[point.list(list)]);
        assert_eq!(state, COMPLETED, "a batch failed");
    }
}

fn main() {
    answer("Mooncake", &mut Initiator::new());
    std::process::exit(0);
}
