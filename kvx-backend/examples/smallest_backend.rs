//! The smallest backend that keeps kvx's contract, with the conformance suite that tests it.
//! docs/backends/writing.md explains it.
//!
//! Its stand-in for a native library loses nothing and guarantees no order: it sends messages as
//! datagrams over Unix sockets and copies pieces with `process_vm_readv` and `process_vm_writev`,
//! both in random order.

use std::collections::HashMap;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::process::ExitCode;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Once};
use std::time::Duration;

use kvx_backend::fabric::{
    EndpointId, Event, Fabric, Job, JobId, Parts, Registrar, SendStatus, Unregister,
};
use kvx_backend::reactor::{Armed, Turn};
use kvx_core::backend::wire::{Reader, Writer};
use kvx_core::backend::{
    AutoOpen, Availability, Context, Factory, Placement, RemoteSpec, Transport, Unavailable,
};
use kvx_core::{
    Capabilities, Error, ErrorKind, HungPageScope, Identity, Idle, Isolation, Memory, MemoryKinds,
    Op, Options, PerOp, RegionId, Registry, Result, Revocation,
};
use kvx_testkit::{Suite, Tier, conformance_main};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType};

const NAME: &str = "SHUFFLED";
/// The longest datagram.
const MAX_MESSAGE: usize = 2048;
/// The most pieces that are in flight at once.
const DEPTH: usize = 64;

/// Runs the conformance suite: every clause of CONTRACT.md, with both ends in one process and in
/// two.
fn main() -> ExitCode {
    conformance_main(registry, &[Suite { tier: Tier::Fast, ..Suite::over(NAME) }])
}

fn registry(_: &str) -> Registry {
    // Native libraries do this; the suite must not mistake it for the other process's answers.
    static LOGGED: Once = Once::new();
    LOGGED.call_once(|| println!("{NAME} logs on standard output"));
    let mut registry = Registry::new();
    registry.add(Shuffled).expect("one name");
    registry
}

/// Returns the capabilities that the backend promises for every peer.
fn capabilities() -> Capabilities {
    Capabilities {
        isolation: PerOp::same(Isolation::Cooperative),
        idle: Idle::Asleep,
        target_cpu: PerOp::NEITHER,
        revocation: Revocation::Confirmed,
        peer_loss_within: Some(Duration::from_secs(1)),
        settles_without_peer: PerOp::BOTH,
        hung_page: HungPageScope::Agent,
        ordered: false,
        local: MemoryKinds::HOST,
        remote: MemoryKinds::HOST,
    }
}

/// The factory of the backend's transports.
struct Shuffled;

impl Factory for Shuffled {
    fn name(&self) -> &'static str {
        NAME
    }

    fn placement(&self) -> Placement {
        Placement { order: 1000, auto_open: AutoOpen::Skip, speaks_for: &[] }
    }

    fn available(&self, _: &Options) -> Result<Availability, Unavailable> {
        Ok(Availability::embedded("test", capabilities()))
    }

    fn open(&self, context: Context) -> Result<Arc<dyn Transport>> {
        static OPENED: AtomicU32 = AtomicU32::new(0);
        let opened = OPENED.fetch_add(1, Ordering::Relaxed);
        let name = [&context.agent.incarnation.0[..], &opened.to_le_bytes()].concat();
        let os = |cause| Error::os("no socket", cause);
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::DGRAM, flags, None)
            .map_err(os)?;
        let at = SocketAddrUnix::new_abstract_name(&name).map_err(os)?;
        rustix::net::bind(&socket, &at).map_err(os)?;
        let mut address = Vec::new();
        address.put_u32(std::process::id());
        address.put_block(&name);
        let fabric = ShuffledFabric {
            fds: [socket.as_raw_fd()],
            socket,
            destinations: HashMap::new(),
            pieces: Vec::new(),
            seed: u64::from_le_bytes(std::array::from_fn(|at| context.agent.incarnation.0[at])) | 1,
        };
        let address = Box::new(move || Ok(address.clone()));
        let registrar = Arc::new(Addresses);
        let parts = Parts { name: NAME, capabilities: capabilities(), address, fabric, registrar };
        kvx_backend::fabric::open(context, parts)
    }
}

/// A registrar that needs nothing but the memory's address.
struct Addresses;

// SAFETY: peers reach the memory by its address, as the kernel permits; `Local` has nothing to
// keep.
unsafe impl Registrar<()> for Addresses {
    fn register(&self, _: RegionId, memory: &Arc<Memory>) -> Result<((), Vec<u8>)> {
        Ok(((), memory.address().to_le_bytes().to_vec()))
    }
}

/// The peer that an endpoint leads to.
struct Destination {
    pid: i32,
    at: SocketAddrUnix,
    severed: bool,
}

/// A piece that was posted and has not ended.
struct PostedPiece {
    job: JobId,
    endpoint: EndpointId,
    op: Op,
    local: u64,
    remote: u64,
    len: u64,
}

/// The "library": a socket, and the pieces that the kit posted to it.
struct ShuffledFabric {
    socket: OwnedFd,
    fds: [RawFd; 1],
    destinations: HashMap<EndpointId, Destination>,
    pieces: Vec<PostedPiece>,
    /// The state of the random number generator.
    seed: u64,
}

impl ShuffledFabric {
    fn random(&mut self, below: usize) -> usize {
        self.seed ^= self.seed << 13;
        self.seed ^= self.seed >> 7;
        self.seed ^= self.seed << 17;
        (self.seed >> 11) as usize % below
    }

    fn shuffle<T>(&mut self, what: &mut [T]) {
        for at in (1..what.len()).rev() {
            let with = self.random(at + 1);
            what.swap(at, with);
        }
    }

    fn copy(&self, piece: &PostedPiece) -> Result<()> {
        let lost = |why: String| Error::new(ErrorKind::PeerLost, why);
        let Some(peer) = self.destinations.get(&piece.endpoint).filter(|peer| !peer.severed) else {
            return Err(lost("the peer is lost".into()));
        };
        let len = piece.len as usize;
        let local = libc::iovec { iov_base: piece.local as *mut _, iov_len: len };
        let remote = libc::iovec { iov_base: piece.remote as *mut _, iov_len: len };
        // SAFETY: the job keeps the region of the local range alive, and core checked the range's
        // bounds.
        let moved = unsafe {
            match piece.op {
                Op::Read => libc::process_vm_readv(peer.pid, &local, 1, &remote, 1, 0),
                Op::Write => libc::process_vm_writev(peer.pid, &local, 1, &remote, 1, 0),
            }
        };
        if moved == len as isize {
            return Ok(());
        }
        Err(lost(std::io::Error::last_os_error().to_string()))
    }
}

// SAFETY: `poll` copies pieces before it reports them; nothing else touches local memory.
unsafe impl Fabric for ShuffledFabric {
    type Local = ();
    type Remote = u64;
    type State = ();

    fn connect(&mut self, endpoint: EndpointId, _: &Identity, address: &[u8]) -> Result<()> {
        let mut reader = Reader::new("address", address);
        let pid = reader.u32()? as i32;
        let at = SocketAddrUnix::new_abstract_name(reader.block(64)?)
            .map_err(|cause| Error::os("no such name", cause))?;
        self.destinations.insert(endpoint, Destination { pid, at, severed: false });
        Ok(())
    }

    fn send(&mut self, endpoint: EndpointId, message: &[u8]) -> Result<SendStatus> {
        let Some(peer) = self.destinations.get(&endpoint) else { return Ok(SendStatus::Taken) };
        match rustix::net::sendto(self.socket.as_fd(), message, SendFlags::DONTWAIT, &peer.at) {
            Ok(_) => Ok(SendStatus::Taken),
            Err(rustix::io::Errno::AGAIN) => Ok(SendStatus::Later),
            Err(cause) => {
                Err(Error::os("the peer's socket is closed", cause).with_kind(ErrorKind::PeerLost))
            }
        }
    }

    fn max_message(&self) -> usize {
        MAX_MESSAGE
    }

    fn unpack(&mut self, _: EndpointId, region: &RemoteSpec<'_>) -> Result<u64> {
        Reader::new("export", region.export).u64()
    }

    fn max_piece(&self) -> u64 {
        128 << 10
    }

    fn advance(&mut self, job: &mut Job<'_, Self>) -> Result<u64> {
        let mut moved = 0;
        while self.pieces.len() < DEPTH
            && moved < 1 << 20
            && let Some(piece) = job.next_piece()
        {
            self.pieces.push(PostedPiece {
                job: job.id(),
                endpoint: job.endpoint(),
                op: job.op(),
                local: job.local_address(&piece),
                remote: *job.remote(piece.remote_region) + piece.remote_offset,
                len: piece.len,
            });
            job.add_in_flight(1);
            moved += piece.len;
        }
        Ok(moved)
    }

    fn sever(&mut self, endpoint: EndpointId) {
        if let Some(peer) = self.destinations.get_mut(&endpoint) {
            peer.severed = true;
        }
    }

    fn disconnect(&mut self, endpoint: EndpointId) {
        assert!(self.pieces.iter().all(|piece| piece.endpoint != endpoint), "pieces are in flight");
        self.destinations.remove(&endpoint);
    }

    fn poll(&mut self, events: &mut Vec<Event>) -> Turn {
        let mut messages = Vec::new();
        let mut buffer = [0; MAX_MESSAGE];
        while messages.len() < 64 {
            match rustix::net::recv(self.socket.as_fd(), &mut buffer[..], RecvFlags::DONTWAIT) {
                Ok((_, len)) => messages.push(Event::Message(buffer[..len].to_vec())),
                Err(_) => break,
            }
        }
        self.shuffle(&mut messages);
        events.extend(messages);
        let mut pieces = std::mem::take(&mut self.pieces);
        self.shuffle(&mut pieces);
        // Leaves some pieces for the next call, as a wire would.
        let later = if pieces.len() > 4 { pieces.split_off(pieces.len() / 2) } else { Vec::new() };
        for piece in &pieces {
            events.push(Event::Completed { job: piece.job, pieces: 1, result: self.copy(piece) });
        }
        self.pieces = later;
        Turn::did(events.len())
    }

    fn arm(&mut self, waiting: bool) -> Result<Armed> {
        if !self.pieces.is_empty() {
            return Ok(Armed::Again);
        }
        // No event reports when a peer's socket has capacity again.
        Ok(Armed::Sleep(waiting.then_some(Duration::from_millis(5))))
    }

    fn fds(&self) -> &[RawFd] {
        &self.fds
    }

    fn describe(&mut self, _: EndpointId) -> (String, Capabilities) {
        ("shuffled datagrams".into(), capabilities())
    }

    fn unregister(&mut self, (): &()) -> Result<Unregister> {
        Ok(Unregister::Now)
    }

    fn stop(&mut self) -> bool {
        self.pieces.clear();
        true
    }
}
