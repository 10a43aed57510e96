//! A transfer engine: segments, memory, batches, notifications.

use std::collections::BTreeSet;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use kvx_core::backend::sync::Mutex;
use kvx_core::{Error, ErrorKind, Op, Result};

use super::bindings::{notify_msg, transfer_request, transfer_status};
use super::incoming;
use super::library::{Library, on_named_thread};
use crate::error;

/// The arguments of an engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct EngineOptions {
    /// `P2PHANDSHAKE`, or the URL of a metadata server.
    pub(crate) metadata: String,
    /// The name or address at which peers reach this host.
    pub(crate) host: String,
    /// `tcp` or `rdma`.
    pub(crate) protocol: String,
    /// Network devices; all if empty.
    pub(crate) devices: Vec<String>,
}

/// The value of `metadata` with which engines query each other.
pub(crate) const PEER_TO_PEER: &str = "P2PHANDSHAKE";

/// The engine's number of a peer's segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SegmentId(i32);

/// A batch of an engine: a pointer in the form of a number, which the engine never checks. Only
/// [`Engine::submit`] creates one, and [`Engine::free`] consumes it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Batch(u64);

/// One contiguous piece of a batch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EnginePiece {
    pub(crate) op: Op,
    pub(crate) local: u64,
    pub(crate) segment: SegmentId,
    pub(crate) remote: u64,
    pub(crate) len: u64,
}

/// The state of a piece or a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TransferState {
    InProgress,
    /// Completed, with this number of bytes.
    Completed(u64),
    /// Ended in another state, with the engine's code.
    Failed(i32),
}

/// A batch that the engine did not accept.
#[derive(Debug)]
pub(crate) struct SubmitError {
    pub(crate) why: Error,
    /// True if no piece was started; otherwise that is unknown.
    pub(crate) unstarted: bool,
}

/// A transfer engine. Dropping it ends its threads. It must not be dropped while a batch is in
/// flight.
pub(crate) struct Engine {
    handle: NonNull<c_void>,
    library: &'static Library,
    name: String,
    /// The port at which the engine listens, on all interfaces. With a metadata server, its name
    /// does not contain this port.
    port: Option<u16>,
    /// The ports at which the engine's own threads receive data from peers, if they do.
    data_ports: Option<BTreeSet<u16>>,
    /// True without a metadata server: an engine listens at the address that is its name.
    peer_to_peer: bool,
}

// SAFETY: the engine's methods lock internally, and upstream shares engines between threads. Only
// one thread at a time uses a batch, because its number is neither cloned nor shared.
unsafe impl Send for Engine {}
// SAFETY: the engine's methods lock internally, and upstream shares engines between threads. Only
// one thread at a time uses a batch, because its number is neither cloned nor shared.
unsafe impl Sync for Engine {}

/// The maximum number of a name's addresses that are probed.
const ADDRESSES: usize = 8;
/// Errors of the kernel for temporary shortages.
const SHORT_OF: [i32; 5] = [libc::EMFILE, libc::ENFILE, libc::ENOBUFS, libc::ENOMEM, libc::EAGAIN];
/// How often the tcp transport is tried.
const TCP_TRIES: u32 = 4;

/// Engines are created one at a time: two must not install a transport concurrently.
static MAKING: Mutex<()> = Mutex::new(());

impl Engine {
    /// Starts an engine with one transport.
    ///
    /// # Errors
    /// `Invalid` for text with a NUL; `Unavailable` if the engine does not start or does not have
    /// the transport.
    pub(crate) fn start(
        library: &'static Library,
        engine_options: &EngineOptions,
    ) -> Result<Engine> {
        on_named_thread(|| {
            Ok(kvx_backend::loader::with_signals_kept(|| Engine::make(library, engine_options)))
        })
        .map_err(|why| ErrorKind::Exhausted.because(why.to_string()))?
    }

    /// Works like [`start`](Engine::start), but on this thread and with a library that is being
    /// tested.
    pub(super) fn make(
        library: &'static Library,
        engine_options: &EngineOptions,
    ) -> Result<Engine> {
        // The tcp transport chooses a free port and binds it later: another program may take it in
        // between.
        let tries = if engine_options.protocol == "tcp" { TCP_TRIES } else { 1 };
        for _ in 0..tries {
            if let Some(engine) = Engine::try_make(library, engine_options)? {
                return Ok(engine);
            }
        }
        let why = format!(
            "Mooncake has no transport {} here: choose another with mooncake_protocol; kvx does not use another in its place",
            engine_options.protocol
        );
        Err(ErrorKind::Unavailable.because(why))
    }

    /// Returns `None` if the engine does not have the requested transport.
    fn try_make(
        library: &'static Library,
        engine_options: &EngineOptions,
    ) -> Result<Option<Engine>> {
        let _one_at_a_time = MAKING.lock();
        let metadata = c_string("the metadata server", &engine_options.metadata)?;
        let host = c_string("the host", &engine_options.host)?;
        // Engines in peer-to-peer mode choose a free port and use it in their name. Others get a
        // port here.
        let peer_to_peer = engine_options.metadata == PEER_TO_PEER;
        let port = if peer_to_peer { 0 } else { free_port()? };
        let name = if peer_to_peer {
            engine_options.host.clone()
        } else {
            format!("{}:{port}", engine_options.host)
        };
        let name = c_string("the host", &name)?;
        let protocol = c_string("the protocol", &engine_options.protocol)?;
        let devices: Vec<CString> = engine_options
            .devices
            .iter()
            .map(|device| c_string("a device", device))
            .collect::<Result<_>>()?;
        let devices: Vec<*const c_char> = devices.iter().map(|device| device.as_ptr()).collect();
        let discovers = c_int::from(engine_options.protocol != "tcp");
        let listening_ports = incoming::listening_ports();
        let made = match (library.adapter(), &devices[..]) {
            // SAFETY: all texts outlive the call.
            (_, []) => unsafe {
                (library.functions().createTransferEngine)(
                    metadata.as_ptr(),
                    name.as_ptr(),
                    host.as_ptr(),
                    port.into(),
                    discovers,
                )
            },
            // SAFETY: all texts outlive the call; `devices` has as many texts as its length says.
            (Some(adapter), devices) => unsafe {
                (adapter.kvx_mooncake_create)(
                    metadata.as_ptr(),
                    name.as_ptr(),
                    host.as_ptr(),
                    port.into(),
                    discovers,
                    devices.as_ptr(),
                    devices.len(),
                )
            },
            (None, _) => {
                let why = "this libtransfer_engine.so takes no list of devices: leave device_name out, and set \
                           MC_TE_FILTERS before the program starts";
                return Err(ErrorKind::Unsupported.because(why));
            }
        };
        let Some(handle) = NonNull::new(made) else {
            let said = library.last_error().unwrap_or_else(|| "the engine gave no reason".into());
            let why = format!(
                "Mooncake's engine did not start with metadata {} and host {}: {said}",
                engine_options.metadata, engine_options.host
            );
            return Err(ErrorKind::Unavailable.because(why));
        };
        let mut engine = Engine {
            handle,
            library,
            name: String::new(),
            port: None,
            data_ports: None,
            peer_to_peer,
        };
        // SAFETY: the handle is alive, and the transport needs no arguments.
        let transport = unsafe {
            (library.functions().installTransport)(
                engine.raw(),
                protocol.as_ptr(),
                std::ptr::null_mut(),
            )
        };
        if transport.is_null() {
            return Ok(None);
        }
        let listens_at = engine.own_name();
        engine.port = listens_at.as_ref().ok().and_then(|at| at.rsplit_once(':')?.1.parse().ok());
        if engine_options.protocol == "tcp" {
            // Another listener that starts concurrently is taken for the engine's too: the end of a
            // region then waits for its peers as well.
            let new = listening_ports
                .and_then(|before| Ok(&incoming::listening_ports()? - &before))
                .unwrap_or_default();
            engine.data_ports =
                Some(new.into_iter().filter(|port| Some(*port) != engine.port).collect());
        }
        engine.name = if peer_to_peer { listens_at? } else { name.to_string_lossy().into_owned() };
        Ok(Some(engine))
    }

    fn own_name(&self) -> Result<String> {
        let mut buffer = [0; 512];
        // SAFETY: the buffer has the given length.
        let code = unsafe {
            (self.library.functions().getLocalIpAndPort)(
                self.raw(),
                buffer.as_mut_ptr().cast(),
                buffer.len(),
            )
        };
        let name = CStr::from_bytes_until_nul(&buffer).ok().and_then(|name| name.to_str().ok());
        match name.filter(|name| code == 0 && !name.is_empty()) {
            Some(name) => Ok(name.to_owned()),
            None => Err(self.error("asking the engine for its own name", code)),
        }
    }

    fn raw(&self) -> *mut c_void {
        self.handle.as_ptr()
    }

    fn error(&self, doing: &str, code: c_int) -> Error {
        error::of_code(doing, code, self.library.last_error())
    }

    /// Returns the name by which peers open this engine's segment.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Returns the last errors that the engine logged: results contain little detail.
    pub(crate) fn log(&self) -> Option<String> {
        self.library.log()
    }

    /// Registers memory, so that every peer can access it.
    ///
    /// # Safety
    /// The memory stays valid until [`unregister`](Engine::unregister) has returned.
    pub(crate) unsafe fn register(&self, address: u64, len: usize, location: &str) -> Result<()> {
        let location = c_string("a location", location)?;
        let register = self.library.functions().registerLocalMemory;
        // SAFETY: guaranteed by the caller.
        let code =
            unsafe { register(self.raw(), address as *mut c_void, len, location.as_ptr(), 1) };
        if code == 0 { Ok(()) } else { Err(self.error("registering memory", code)) }
    }

    /// Unregisters memory: operations that begin later cannot access it.
    pub(crate) fn unregister(&self, address: u64) -> Result<()> {
        // SAFETY: takes only an address; one that is not registered is an error.
        let code = unsafe {
            (self.library.functions().unregisterLocalMemory)(self.raw(), address as *mut c_void)
        };
        if code == 0 { Ok(()) } else { Err(self.error("unregistering memory", code)) }
    }

    /// Returns the connections over which bytes of an ended process of this host may still arrive
    /// for unregistered memory. `None`: not known yet. Errors: it cannot be known.
    pub(crate) fn connections_of_ended_processes(&self) -> Result<Option<BTreeSet<u64>>> {
        // An RDMA device stops its access when memory is unregistered. It accepts nothing more from
        // the other side of the connection, which the kernel has reset by then.
        let Some(ports) = &self.data_ports else { return Ok(Some(BTreeSet::new())) };
        let why = "kvx cannot tell whether bytes of an ended process may still arrive: it keeps the region's memory";
        if ports.is_empty() {
            return Err(ErrorKind::StillShared.because(why));
        }
        match incoming::from_ended_processes(ports) {
            Err(error) if error.raw_os_error().is_some_and(|code| SHORT_OF.contains(&code)) => {
                Ok(None)
            }
            told => told.map_err(|error| Error::os(why, error).with_kind(ErrorKind::StillShared)),
        }
    }

    /// Fetches the segment of the peer with this name. Blocks for a minute if the peer is stopped.
    pub(crate) fn open_segment(&self, name: &str) -> Result<SegmentId> {
        let text = c_string("the peer's address", name)?;
        // SAFETY: the text outlives the call.
        let segment =
            unsafe { (self.library.functions().openSegmentNoCache)(self.raw(), text.as_ptr()) };
        if segment >= 0 {
            Ok(SegmentId(segment))
        } else {
            Err(self.error("opening the peer's segment", segment))
        }
    }

    /// Returns whether only a metadata server can resolve names: a process need not listen at the
    /// address in the name.
    pub(crate) fn asks_a_server(&self) -> bool {
        !self.peer_to_peer
    }

    /// Returns whether a process listens at the address that serves the peer's segment; `None` if
    /// that is unknown. Blocks for seconds at most, unless name resolution takes longer.
    pub(crate) fn probe(&self, name: &str) -> Option<bool> {
        if self.asks_a_server() { None } else { probe(name) }
    }

    /// Starts to move pieces.
    ///
    /// # Safety
    /// The local memory stays valid until [`piece_state`](Engine::piece_state) has reported the end
    /// of each piece.
    pub(crate) unsafe fn submit(&self, pieces: &[EnginePiece]) -> Result<Batch, SubmitError> {
        let functions = self.library.functions();
        // SAFETY: takes only a number.
        let batch = unsafe { (functions.allocateBatchID)(self.raw(), pieces.len()) };
        if batch == u64::MAX {
            let why = ErrorKind::Exhausted
                .because("Mooncake's engine has no free slot for another batch");
            return Err(SubmitError { why, unstarted: true });
        }
        let mut requests: Vec<transfer_request> = pieces.iter().map(request).collect();
        // SAFETY: the array has that many requests, which the engine copies; the caller guarantees
        // their memory.
        let code = unsafe {
            (functions.submitTransfer)(self.raw(), batch, requests.as_mut_ptr(), requests.len())
        };
        if code == 0 {
            return Ok(Batch(batch));
        }
        // The engine returns these codes before it passes anything to a transport.
        let unstarted = error::is_before_start(code);
        if unstarted {
            // SAFETY: nothing was started, and nobody else has the number.
            unsafe { (functions.freeBatchID)(self.raw(), batch) };
        }
        Err(SubmitError { why: self.error("submitting a batch", code), unstarted })
    }

    /// Returns the state of a whole batch, if the engine supports that: failed as soon as one piece
    /// has failed.
    pub(crate) fn batch_state(&self, batch: &Batch) -> Option<TransferState> {
        let ask = self.library.adapter()?.kvx_mooncake_batch_status;
        let mut status = transfer_status::default();
        // SAFETY: the batch is alive, because only `free` consumes it.
        let code = unsafe { ask(self.raw(), batch.0, &raw mut status) };
        (code == 0).then(|| state(&status))
    }

    /// Returns the state of one piece. Errors: the engine does not know; the piece may be in
    /// flight.
    pub(crate) fn piece_state(&self, batch: &Batch, piece: usize) -> Result<TransferState> {
        match self.query_piece(batch, piece)? {
            // The engine reads the number of bytes before the state. If the piece ends in between,
            // the first answer has too few bytes.
            TransferState::Completed(_) => self.query_piece(batch, piece),
            state => Ok(state),
        }
    }

    fn query_piece(&self, batch: &Batch, piece: usize) -> Result<TransferState> {
        let mut status = transfer_status::default();
        // SAFETY: the batch is alive, because only `free` consumes it.
        let code = unsafe {
            (self.library.functions().getTransferStatus)(
                self.raw(),
                batch.0,
                piece,
                &raw mut status,
            )
        };
        if code == 0 {
            Ok(state(&status))
        } else {
            Err(self.error("asking for a piece's state", code))
        }
    }

    /// Frees a batch whose pieces have all ended.
    pub(crate) fn free(&self, batch: Batch) {
        // SAFETY: this consumes the number.
        let code = unsafe { (self.library.functions().freeBatchID)(self.raw(), batch.0) };
        if code != 0 {
            tracing::debug!(code, "Mooncake did not free a batch that has ended");
        }
    }

    /// Sends a notification. Blocks for a minute if the peer is stopped.
    pub(crate) fn notify(&self, segment: SegmentId, name: &CStr, text: &CStr) -> Result<()> {
        let message = notify_msg { name: name.as_ptr().cast_mut(), msg: text.as_ptr().cast_mut() };
        // SAFETY: both texts outlive the call, which copies them.
        let code = unsafe {
            (self.library.functions().genNotifyInEngine)(self.raw(), segment.0 as u64, message)
        };
        if code == 0 { Ok(()) } else { Err(self.error("sending a notification", code)) }
    }

    /// Passes the received notifications to `take`: name and text. Returns their number.
    pub(crate) fn notifications(&self, mut take: impl FnMut(&[u8], &[u8])) -> usize {
        let functions = self.library.functions();
        let mut count: c_int = 0;
        // SAFETY: the call writes one number.
        let messages = unsafe { (functions.getNotifsFromEngine)(self.raw(), &raw mut count) };
        let Some(messages) = NonNull::new(messages) else { return 0 };
        let count = usize::try_from(count).unwrap_or(0);
        // SAFETY: the engine returns that many messages, which stay valid until they are freed
        // below.
        for message in unsafe { std::slice::from_raw_parts(messages.as_ptr(), count) } {
            if message.name.is_null() || message.msg.is_null() {
                continue;
            }
            // SAFETY: both are C strings from the engine.
            unsafe {
                take(
                    CStr::from_ptr(message.name).to_bytes(),
                    CStr::from_ptr(message.msg).to_bytes(),
                )
            };
        }
        // SAFETY: frees the messages from the call above, once.
        unsafe { (functions.freeNotifsMsgBuf)(messages.as_ptr(), count as c_int) };
        count
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        // The engine's listener checks for its end once a second, or when a connection arrives:
        // connect to it.
        let ended = AtomicBool::new(false);
        std::thread::scope(|scope| {
            if let Some(own) = self.port.map(|port| SocketAddr::from((Ipv4Addr::LOCALHOST, port))) {
                let ended = &ended;
                let call = move || {
                    while !ended.load(Ordering::Acquire) {
                        std::thread::park_timeout(Duration::from_millis(2));
                        TcpStream::connect_timeout(&own, Duration::from_millis(100)).ok();
                    }
                };
                // Without the thread, the engine takes the second.
                std::thread::Builder::new()
                    .name("kvx-mooncake".into())
                    .spawn_scoped(scope, call)
                    .ok();
            }
            // SAFETY: the last use of the handle; the owner ensures that no batch is in flight.
            unsafe { (self.library.functions().destroyTransferEngine)(self.raw()) };
            ended.store(true, Ordering::Release);
        });
    }
}

/// Returns whether a process listens at `name`; `None` if that is unknown.
fn probe(name: &str) -> Option<bool> {
    probe_at(&name.to_socket_addrs().ok()?.collect::<Vec<_>>())
}

/// Returns whether a process listens at one of these addresses; none does if each refuses the
/// connection.
fn probe_at(addresses: &[SocketAddr]) -> Option<bool> {
    let mut all_refuse = (1..=ADDRESSES).contains(&addresses.len());
    for address in addresses.iter().take(ADDRESSES) {
        match probe_one(address) {
            Some(true) => return Some(true),
            answer => all_refuse &= answer.is_some(),
        }
    }
    all_refuse.then_some(false)
}

fn probe_one(address: &SocketAddr) -> Option<bool> {
    // A process that dies closes its files one after the other: check again after a moment.
    for _ in 0..3 {
        match TcpStream::connect_timeout(address, Duration::from_secs(1)) {
            Ok(_) => std::thread::sleep(Duration::from_millis(10)),
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionRefused => {
                return Some(false);
            }
            Err(_) => return None,
        }
    }
    Some(true)
}

/// Returns a free port: the engine listens on all interfaces.
fn free_port() -> Result<u16> {
    let found = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)).and_then(|free| free.local_addr());
    found.map(|address| address.port()).map_err(|error| {
        Error::os("could not find a free port for the engine", error)
            .with_kind(ErrorKind::Exhausted)
    })
}

fn request(piece: &EnginePiece) -> transfer_request {
    transfer_request {
        opcode: match piece.op {
            Op::Read => 0,
            Op::Write => 1,
        },
        source: piece.local as *mut c_void,
        target_id: piece.segment.0,
        target_offset: piece.remote,
        length: piece.len,
    }
}

fn state(status: &transfer_status) -> TransferState {
    match status.status {
        4 => TransferState::Completed(status.transferred_bytes),
        failed @ (2 | 3 | 5 | 6) => TransferState::Failed(failed),
        _ => TransferState::InProgress, // an unknown state is not an end
    }
}

fn c_string(what: &str, text: &str) -> Result<CString> {
    CString::new(text).map_err(|_| {
        ErrorKind::Invalid.because(format!("{what} contains a NUL: {text:?}; remove it"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_process_listens_if_every_address_refuses() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port is free");
        let listens = listener.local_addr().expect("it has one");
        let gone = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port is free");
        let refuses = gone.local_addr().expect("it has one");
        drop(gone);
        let unreachable = SocketAddr::from((Ipv4Addr::BROADCAST, 1)); // over TCP
        assert_eq!(probe_at(&[refuses]), Some(false));
        assert_eq!(probe_at(&[refuses, listens]), Some(true), "the second address is probed too");
        assert_eq!(probe_at(&[refuses, unreachable]), None, "a process may listen there");
        assert_eq!(probe_at(&[unreachable, refuses]), None);
        assert_eq!(probe_at(&[refuses; ADDRESSES + 1]), None, "one was not probed");
        assert_eq!(probe_at(&[]), None);
    }

    #[test]
    fn only_known_final_states_are_an_end() {
        let state = |status| state(&transfer_status { status, transferred_bytes: 7 });
        assert_eq!(state(4), TransferState::Completed(7));
        for failed in [2, 3, 5, 6] {
            assert_eq!(state(failed), TransferState::Failed(failed));
        }
        for other in [0, 1, 7, -1] {
            assert_eq!(state(other), TransferState::InProgress, "{other}");
        }
    }
}
