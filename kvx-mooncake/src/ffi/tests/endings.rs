//! Tests the ends of pieces, and of bytes that an ended process had sent, with the real engine and
//! some of its answers replaced.

use std::ffi::{c_char, c_int, c_void};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use kvx_core::backend::{Availability, Context, Factory, Placement, Transport, Unavailable};
use kvx_core::{Agent, ErrorKind, Grid, Memory, Op, Options, Plan, Registry};

use super::super::adapter_bindings;
use super::super::bindings::{Functions, transfer_request, transfer_status};
use super::super::engine::{EnginePiece, TransferState};
use super::super::library::Library;
use super::real_engine::{
    PieceAnswer, adapter, answer_as, engine, in_flight, real, real_functions,
};
use crate::Mooncake;
use crate::config::Config;

const CUT_OFF: Duration = Duration::from_secs(10);
const SHORT: Duration = Duration::from_millis(300);
const LEN: usize = 8192;

/// The number of batches that were allocated and not freed.
static BATCHES: AtomicI64 = AtomicI64::new(0);
/// True while the second piece of a batch is reported as in progress.
static SECOND_MOVES: AtomicBool = AtomicBool::new(false);

unsafe extern "C" fn allocation_counted(engine: *mut c_void, size: usize) -> u64 {
    BATCHES.fetch_add(1, Ordering::SeqCst);
    // SAFETY: passes the caller's arguments on.
    unsafe { (real_functions().allocateBatchID)(engine, size) }
}

unsafe extern "C" fn freeing_counted(engine: *mut c_void, batch: u64) -> c_int {
    BATCHES.fetch_sub(1, Ordering::SeqCst);
    // SAFETY: passes the caller's arguments on.
    unsafe { (real_functions().freeBatchID)(engine, batch) }
}

/// The first piece has failed, and the second stays in progress as long as the test says.
struct FirstFailed;
impl PieceAnswer for FirstFailed {
    fn change(piece: usize, code: c_int, status: &mut transfer_status) -> c_int {
        match piece {
            0 => *status = transfer_status { status: 6, transferred_bytes: 0 },
            1 if SECOND_MOVES.load(Ordering::SeqCst) => status.status = 1,
            _ => {}
        }
        code
    }
}

/// Reports a batch as failed as soon as one of its pieces has failed.
unsafe extern "C" fn all_failed(_: *mut c_void, _: u64, status: *mut transfer_status) -> c_int {
    // SAFETY: the caller passed this location for the answer.
    unsafe { *status = transfer_status { status: 6, transferred_bytes: 0 } };
    0
}

#[test]
fn a_failed_batch_has_not_ended_while_one_of_its_pieces_moves() {
    const TEST: &str = "a_failed_batch_has_not_ended_while_one_of_its_pieces_moves";
    let Some((real, functions, of_adapter)) = real(TEST) else { return };
    let asked = Functions {
        allocateBatchID: allocation_counted,
        freeBatchID: freeing_counted,
        getTransferStatus: answer_as::<FirstFailed>,
        ..functions
    };
    let whole = adapter_bindings::Functions { kvx_mooncake_batch_status: all_failed, ..of_adapter };
    // For the life of the process: failed pieces may still be in flight.
    let [near, far] = [0, 7].map(|byte| Vec::leak(vec![byte; LEN]).as_mut_ptr() as u64);
    for of_adapter in [Some(whole), None] {
        let made = |library| engine(library, &[]).expect("an engine");
        let (ours, theirs) = (made(real.with(asked, of_adapter)), made(real.with(functions, None)));
        // SAFETY: the memory stays valid forever.
        unsafe { ours.register(near, LEN, "*") }.expect("it is free");
        // SAFETY: the memory stays valid forever.
        unsafe { theirs.register(far, LEN, "*") }.expect("it is free");
        let segment = ours.open_segment(theirs.name()).expect("it is there");
        let piece = |at: u64| EnginePiece {
            op: Op::Read,
            local: near + at,
            segment,
            remote: far + at,
            len: 4096,
        };
        SECOND_MOVES.store(true, Ordering::SeqCst);
        // SAFETY: the memory stays valid forever.
        let batch = unsafe { ours.submit(&[piece(0), piece(4096)]) }.expect("it is taken");
        assert_eq!(ours.piece_state(&batch, 0).expect("it is there"), TransferState::Failed(6));
        let mut batches = in_flight(batch, &theirs, &[4096; 2]);
        let now = Instant::now();
        for later in 0..5 {
            let now = now + later * Duration::from_secs(1);
            assert!(batches.poll_next(&ours, now).is_none(), "a piece is in flight");
        }
        assert_eq!(BATCHES.load(Ordering::SeqCst), 1);
        SECOND_MOVES.store(false, Ordering::SeqCst);
        let until = Instant::now() + CUT_OFF;
        let ended = loop {
            if let Some(ended) = batches.poll_next(&ours, now) {
                break ended;
            }
            assert!(Instant::now() < until, "the second piece must have ended by now");
            std::thread::yield_now();
        };
        assert!(ended.failed.is_some() && batches.is_empty());
        ours.free(ended.batch);
        assert_eq!(BATCHES.load(Ordering::SeqCst), 0);
    }
}

/// The number of submissions that were carried out but reported as failed.
static DENIED: AtomicUsize = AtomicUsize::new(0);

unsafe extern "C" fn done_and_denied(
    engine: *mut c_void,
    batch: u64,
    requests: *mut transfer_request,
    count: usize,
) -> c_int {
    DENIED.fetch_add(1, Ordering::SeqCst);
    // SAFETY: passes the caller's arguments on.
    unsafe { (real_functions().submitTransfer)(engine, batch, requests, count) };
    -1
}

/// MOONCAKE over the test's own library.
struct Over(&'static Library);

impl Factory for Over {
    fn name(&self) -> &'static str {
        "MOONCAKE"
    }

    fn placement(&self) -> Placement {
        Mooncake::new().placement()
    }

    fn available(&self, options: &Options) -> Result<Availability, Unavailable> {
        Mooncake::new().or_files(adapter()).available(options)
    }

    fn open(&self, context: Context) -> kvx_core::Result<Arc<dyn Transport>> {
        let config = Config::read(&context.options)?;
        crate::factory::open(self.0, config, context)
    }
}

fn agent(name: &str, factory: Arc<dyn Factory>) -> Agent {
    let options = Options::parse(r#"{"mooncake_protocol": "tcp"}"#).expect("JSON");
    let mut registry = Registry::new();
    registry.add_shared(factory).expect("one name");
    Agent::builder(name)
        .backends(["MOONCAKE"])
        .options(options)
        .registry(registry.clone())
        .build()
        .expect("an agent")
}

#[test]
fn pieces_that_may_have_been_started_keep_their_memory() {
    const TEST: &str = "pieces_that_may_have_been_started_keep_their_memory";
    let Some((real, functions, of_adapter)) = real(TEST) else { return };
    let denies = Functions { submitTransfer: done_and_denied, ..functions };
    let library = Box::leak(Box::new(real.with(denies, Some(of_adapter))));
    let decode = agent("decode", Arc::new(Over(library)));
    let prefill = agent("prefill", Arc::new(Mooncake::new().or_files(adapter())));
    let memory = Arc::new(Memory::owned(vec![0; LEN]));
    let kept = Arc::downgrade(&memory);
    let ours = decode.register("kv", memory).expect("it is free");
    let theirs = prefill.register("kv", Arc::new(Memory::owned(vec![7; LEN]))).expect("it is free");
    let peer = decode.connect(prefill.metadata().expect("it has some")).expect("metadata");
    peer.ready(CUT_OFF).wait_blocking(CUT_OFF).expect("it is there");
    let grid = Grid::packed(4096, 2);
    let sender = peer.region("kv").expect("it was told").grid(grid).expect("it fits");
    let receiver = ours.grid(grid).expect("it fits");
    let plan = Plan::read(receiver.blocks([0]), sender.blocks([1])).expect("they fit");
    let transfer = peer.transfer(&plan).deadline(CUT_OFF).post().expect("the request is accepted");
    let settled = transfer.settled();
    let why = transfer.wait_blocking(CUT_OFF).expect_err("it was denied");
    assert_eq!(why.kind(), ErrorKind::PeerLost, "{why}");
    assert_eq!(DENIED.load(Ordering::SeqCst), 1, "it is not tried again");
    drop((ours, peer));
    let kept_back =
        decode.shutdown(SHORT).wait_blocking(CUT_OFF).expect_err("a transfer has not settled");
    assert_eq!(kept_back.kind(), ErrorKind::StillShared, "{kept_back}");
    let why = settled.wait_blocking(CUT_OFF).expect_err("whether it is in flight is unknown");
    assert_eq!(why.kind(), ErrorKind::Forgotten, "{why}");
    drop((plan, decode));
    assert!(kept.strong_count() > 0, "the engine may write to it at any time");
    drop(theirs);
    prefill.shutdown(SHORT).wait_blocking(CUT_OFF).ok(); // the reader has not released its region
}

/// Listens like the engine's data port, and is taken for one.
static DATA_PORT: Mutex<Option<TcpListener>> = Mutex::new(None);

unsafe extern "C" fn listens_too(
    engine: *mut c_void,
    name: *const c_char,
    arguments: *mut *mut c_void,
) -> *mut c_void {
    *DATA_PORT.lock().expect("nobody panics") = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)).ok();
    // SAFETY: passes the caller's arguments on.
    unsafe { (real_functions().installTransport)(engine, name, arguments) }
}

/// Keeps a connection that an engine would read from open on this side after the other has ended.
#[test]
fn memory_is_released_when_everything_that_an_ended_process_sent_was_read() {
    const TEST: &str = "memory_is_released_when_everything_that_an_ended_process_sent_was_read";
    let Some((real, functions, of_adapter)) = real(TEST) else { return };
    let listens = Functions { installTransport: listens_too, ..functions };
    let owner =
        agent("owner", Arc::new(Over(Box::leak(Box::new(real.with(listens, Some(of_adapter)))))));
    let region =
        |name| owner.register(name, Arc::new(Memory::owned(vec![0; LEN]))).expect("it is free");
    let listener = DATA_PORT.lock().expect("nobody panics").take().expect("a port is free");
    let port = listener.local_addr().expect("it has one").port();
    let sender = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).expect("somebody listens");
    let receiver = listener.accept().expect("somebody has connected").0;
    region("of a live peer")
        .revoke(CUT_OFF)
        .wait_blocking(CUT_OFF)
        .expect("a live peer is asked in another way");
    drop(sender);
    let why = region("of the dead")
        .revoke(SHORT)
        .wait_blocking(CUT_OFF)
        .expect_err("not all bytes were read");
    assert_eq!(why.kind(), ErrorKind::StillShared, "{why}");
    drop(receiver);
    region("of nobody").revoke(CUT_OFF).wait_blocking(CUT_OFF).expect("all is read");
    owner.shutdown(CUT_OFF).wait_blocking(CUT_OFF).expect("no operation is in flight");
}
