//! The fuzz targets of TCP.
//!
//! They run the two ends of a lane as the machine does, over socket pairs. A script determines what
//! the peer sends, in which piece sizes, and which events happen meanwhile. Each script runs with
//! every seal.

pub mod by_hand;
pub(crate) mod frames;
pub(crate) mod handshake;
pub(crate) mod initiator;
pub(crate) mod owner;
#[cfg(test)]
mod pair;

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use kvx_backend::control::HeldBytes;
use kvx_backend::control::proof::Keys;
use kvx_core::backend::fork::Private;
use kvx_core::backend::wire::Reader;
use kvx_core::backend::{Events, Invitation, LinkId, LinkState, QueueFull};
use kvx_core::{Identity, Incarnation, Memory, Options, Result, Sender};
use kvx_noise::{NoiseHandshake, RECORD, Seals, TAG};

use crate::tcp::config::Config;
use crate::tcp::connections::connection::{Conn, Role};
use crate::tcp::connections::lane::Scope;
use crate::tcp::connections::table::Conns;
use crate::tcp::context::AgentContext;
use crate::tcp::frames::{Frame, HEADER, Header, MAX_DATA};
use crate::tcp::limit::ConnectionLimit;
use crate::tcp::memory::deferred::DeferredCompletions;
use crate::tcp::memory::regions::Regions;
use crate::tcp::memory::stages::DeviceStages;
use crate::tcp::seal::Seal;
use crate::tcp::socket::chunk::Bin;

/// The bytes that a connection moves in a turn.
const SHARE: usize = 64 << 10;
/// The number of lanes in a script.
const LANES: usize = 2;
/// The byte of payload that a script does not spell out.
const FILLER: u8 = 0x5a;

/// An agent with or without space for notifications.
#[derive(Default)]
struct Inbox(AtomicBool);

impl Events for Inbox {
    fn notification(&self, _: Sender<'_>, _: &[u8]) -> Result<(), QueueFull> {
        if self.0.load(Ordering::Relaxed) { Err(QueueFull) } else { Ok(()) }
    }

    fn link(&self, _: LinkId, _: LinkState) {}
}

/// One end of a link's lanes, and the other ends of their sockets.
struct Lanes {
    conns: Conns,
    scope: Scope,
    held: HeldBytes<Identity>,
    inbox: Arc<Inbox>,
    fars: Vec<Far>,
    /// The bytes that the peers send at a time.
    piece: usize,
}

/// The peer of one lane.
struct Far {
    socket: UnixStream,
    unsent: Vec<u8>,
    /// The received bytes of an incomplete header or record, the remaining bytes of their frame,
    /// and whether they are sealed.
    begun: Vec<u8>,
    left: usize,
    is_sealed: bool,
    seals: Option<(Seal, Seals)>,
    reads: bool,
    /// True if it sends nothing more once everything is sent.
    ends: bool,
}

impl Lanes {
    /// Creates lanes with these roles, by number, and this seal, and the other ends of their
    /// sockets.
    fn new(seal: Seal, role: impl Fn(usize, u8) -> Role) -> Self {
        let (mut nears, mut fars) = (Vec::new(), Vec::new());
        for _ in 0..LANES {
            let (near, socket) = UnixStream::pair().expect("descriptors are available");
            socket.set_nonblocking(true).expect("it is open");
            let (ours, theirs) = seals();
            nears.push((near, ours));
            fars.push(Far {
                socket,
                unsent: Vec::new(),
                begun: Vec::new(),
                left: 0,
                is_sealed: false,
                seals: (seal > Seal::None).then_some((seal, theirs)),
                reads: true,
                ends: false,
            });
        }
        Lanes { fars, ..Lanes::over(nears, seal, role) }
    }

    /// Creates lanes with these roles over these sockets, after a handshake.
    fn over(
        sockets: Vec<(UnixStream, Seals)>,
        seal: Seal,
        role: impl Fn(usize, u8) -> Role,
    ) -> Self {
        let inbox = Arc::new(Inbox::default());
        let context = AgentContext {
            config: Config::read(&Options::new()).expect("every option has a default"),
            limit: ConnectionLimit::new(1),
            agent: who(1),
            keys: Keys::new(&Invitation::from_bytes([2; 32]), None),
            secret: None,
            events: Arc::clone(&inbox) as _,
            peer_timeout: Duration::from_secs(4),
            regions: Regions::default(),
            stages: DeviceStages::default(),
            deferred: Arc::new(DeferredCompletions::default()),
            process: std::process::id(),
        };
        let scope = Scope::new(Arc::new(context), Bin::new());
        let mut conns = Conns::default();
        for (number, (near, ours)) in sockets.into_iter().enumerate() {
            near.set_nonblocking(true).expect("it is open");
            let near = Private::from(OwnedFd::from(near));
            let mut conn = Conn::new(
                near,
                ([127, 0, 0, 1], 1).into(),
                role(number, number as u8),
                Instant::now(),
            );
            conn.small = number == 0;
            conn.input.open_from_here(ours.opener, seal);
            conn.output.seal_from_here(ours.sealer, seal);
            conns.insert(conn);
        }
        Lanes {
            conns,
            scope,
            held: HeldBytes::default(),
            inbox,
            fars: Vec::new(),
            piece: usize::MAX,
        }
    }

    /// Runs a turn of one lane. Returns true if anything moved. Calls `heard` with each header that
    /// its peer receives. An error ends the link.
    fn turn(&mut self, key: usize, mut heard: impl FnMut(Header)) -> Result<bool> {
        let wrote = self.fars[key].write(self.piece);
        let moved = self.turn_here(key)?;
        self.fars[key].read(&mut heard);
        Ok(wrote + moved > 0)
    }

    /// Runs this end's part of a turn. Returns the bytes moved.
    fn turn_here(&mut self, key: usize) -> Result<usize> {
        let (conn, scope) = (&mut self.conns[key], &mut self.scope);
        conn.event(true, true, false);
        let (got, sent) = conn.serve(SHARE, key, scope)?;
        conn.note_held(&mut self.held)?;
        Ok(got + sent)
    }

    /// Ends all connections as the machine does.
    fn end(&mut self) {
        for key in self.conns.iter().map(|(key, _)| key).collect::<Vec<_>>() {
            let Some(mut conn) = self.conns.remove(key) else { continue };
            if let Role::Served(lane) = &conn.role {
                self.scope.described -= lane.described();
            }
            conn.release_held(&mut self.held);
            if let Some(lane) = conn.role.up_mut() {
                lane.release(&self.scope.context.deferred);
            }
        }
        assert_eq!(self.scope.described, 0, "descriptions are counted but not held");
        assert!(self.held.greediest(|_| true).is_none());
    }
}

impl Far {
    /// Sends a piece of the unsent bytes, at least a certain fraction, so that a script ends.
    fn write(&mut self, piece: usize) -> usize {
        if self.unsent.is_empty() {
            if self.ends {
                self.socket.shutdown(Shutdown::Write).expect("it is open");
            }
            return 0;
        }
        let len = piece.max(self.unsent.len() / 32).min(self.unsent.len());
        match self.socket.write(&self.unsent[..len]) {
            Ok(count) => {
                self.unsent.drain(..count);
                count
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => 0,
            Err(error) => panic!("the socket of a lane: {error}"),
        }
    }

    /// Receives bytes, and checks that they are a series of complete frames.
    fn read(&mut self, heard: &mut impl FnMut(Header)) {
        let mut buffer = [0; 32 << 10];
        while self.reads {
            let count = match self.socket.read(&mut buffer) {
                Ok(count) if count > 0 => count,
                _ => return,
            };
            let mut bytes = &buffer[..count];
            while !bytes.is_empty() {
                if self.left > 0 && !self.is_sealed {
                    let payload = self.left.min(bytes.len());
                    self.left -= payload;
                    bytes = &bytes[payload..];
                    continue;
                }
                let len = if self.left == 0 { HEADER } else { self.left.min(RECORD) };
                let wanted = len + if self.seals.is_some() { TAG } else { 0 };
                let (piece, rest) = bytes.split_at((wanted - self.begun.len()).min(bytes.len()));
                self.begun.extend_from_slice(piece);
                bytes = rest;
                if self.begun.len() == wanted {
                    self.whole(len, heard);
                }
            }
        }
    }

    /// Handles a complete header or record.
    fn whole(&mut self, len: usize, heard: &mut impl FnMut(Header)) {
        let mut came = std::mem::take(&mut self.begun);
        if let Some((_, seals)) = &mut self.seals {
            seals.opener.open(&mut came).expect("a lane sends its sealed messages in order");
        }
        if self.left > 0 {
            self.left -= len;
            return;
        }
        let header = came.first_chunk().expect("a header is complete");
        let header = Header::decode(header).expect("a lane sends valid headers");
        self.left = header.len;
        self.is_sealed =
            self.seals.as_ref().is_some_and(|(seal, _)| seals_body(*seal, header.frame as u8));
        heard(header);
    }

    /// Sends a frame of this kind, which may be unknown.
    fn frame(&mut self, kind: u8, id: u64, body: &[u8]) {
        let len = body.len() as u32;
        let head = [&[kind, 0, 0, 0][..], &len.to_le_bytes(), &id.to_le_bytes()].concat();
        let Some((seal, seals)) = &mut self.seals else {
            return self.send(&[&head, body].concat());
        };
        let mut sealed = Vec::new();
        seals.sealer.seal(&head, &mut sealed);
        match seals_body(*seal, kind) {
            true => seals.sealer.seal(body, &mut sealed),
            false => sealed.extend_from_slice(body),
        }
        self.send(&sealed);
    }

    fn send(&mut self, bytes: &[u8]) {
        if !self.ends {
            self.unsent.extend_from_slice(bytes);
        }
    }
}

/// Returns true if the bytes after a header of this kind are sealed.
fn seals_body(seal: Seal, kind: u8) -> bool {
    seal == Seal::All || kind != Frame::Data as u8
}

/// Returns the keys of both ends of a lane, after a handshake.
pub(super) fn seals() -> (Seals, Seals) {
    let mut initiator =
        NoiseHandshake::initiator(&[1; 32], &[]).expect("random numbers are available");
    let mut owner = NoiseHandshake::responder(&[1; 32], &[]).expect("the same pattern");
    let mut said = Vec::new();
    initiator.write(&[], &mut said).expect("its turn");
    owner.read(&said).expect("the same key");
    said.clear();
    owner.write(&[], &mut said).expect("its turn");
    initiator.read(&said).expect("the same key");
    (initiator.seals(), owner.seals())
}

/// The next step of a script.
enum FuzzStep<'a> {
    /// The peer of this lane sends a frame.
    Frame { lane: usize, kind: u8, id: u64, body: &'a [u8] },
    /// The peer sends a frame with a body of `len` filler bytes.
    Long { lane: usize, kind: u8, id: u64, len: usize },
    /// The peer sends arbitrary bytes.
    Bytes { lane: usize, bytes: &'a [u8] },
    /// The peer reads, or stops reading.
    Reads { lane: usize, reads: bool },
    /// The peer sends nothing more.
    Ends { lane: usize },
    /// Peers send this many bytes at a time.
    Piece(usize),
    /// Lanes move this much payload at a time.
    Payload(usize),
    /// A step of one kind of lane: its number and its argument.
    Own(u8, u8),
}

/// Reads the next step; `None` at the end of the script.
fn next<'a>(script: &mut Reader<'a>) -> Option<FuzzStep<'a>> {
    let some = |script: &mut Reader<'a>, len: usize| script.bytes(len.min(script.left())).ok();
    let op = script.u8().ok()?;
    // The highest bits are the lane, and whether the payload is filler.
    let lane = usize::from(op >> 7);
    let is_long = op & 0x40 != 0;
    Some(match op & 0x3f {
        kind @ 0..32 => {
            let (slot, sequence) = (script.u8().ok()?, script.u8().ok()?);
            let id = u64::from(sequence) << 16 | u64::from(slot);
            let len = usize::from(script.u16().ok()?);
            match is_long {
                true => FuzzStep::Long { lane, kind, id, len: (len * 17).min(MAX_DATA + 1) },
                false => FuzzStep::Frame { lane, kind, id, body: some(script, len)? },
            }
        }
        32 => {
            let len = usize::from(script.u8().ok()?);
            FuzzStep::Bytes { lane, bytes: some(script, len)? }
        }
        33 => FuzzStep::Reads { lane, reads: is_long },
        34 => FuzzStep::Ends { lane },
        35 => FuzzStep::Piece(1 + usize::from(script.u8().ok()?)),
        36 => FuzzStep::Payload(17 + 64 * usize::from(script.u8().ok()?)),
        own => FuzzStep::Own(own - 37, script.u8().ok()?),
    })
}

impl Lanes {
    /// Executes a step that every kind of lane has.
    fn take(&mut self, step: &FuzzStep<'_>) {
        match *step {
            FuzzStep::Frame { lane, kind, id, body } => self.fars[lane].frame(kind, id, body),
            FuzzStep::Long { lane, kind, id, len } => {
                self.fars[lane].frame(kind, id, &vec![FILLER; len])
            }
            FuzzStep::Bytes { lane, bytes } => self.fars[lane].send(bytes),
            FuzzStep::Reads { lane, reads } => self.fars[lane].reads = reads,
            FuzzStep::Ends { lane } => self.fars[lane].ends = true,
            FuzzStep::Piece(piece) => self.piece = piece,
            FuzzStep::Payload(piece) => self.scope.piece = piece,
            FuzzStep::Own(..) => {}
        }
    }
}

fn who(number: u8) -> Identity {
    Identity { name: "peer".into(), incarnation: Incarnation([number; 16]) }
}

/// Memory, and its content since it must not be touched any more.
struct WatchedMemory {
    memory: Arc<Memory>,
    kept: Option<Vec<u8>>,
}

impl WatchedMemory {
    fn new(len: usize) -> Self {
        WatchedMemory { memory: Arc::new(Memory::owned(vec![0; len])), kept: None }
    }

    fn content(&self) -> Vec<u8> {
        let mut content = vec![0; self.memory.len()];
        self.memory.copy_out(0, &mut content).expect("the lengths are equal");
        content
    }

    /// Expects the memory to stay unchanged from now on.
    fn keep(&mut self) {
        self.kept = Some(self.content());
    }

    fn check(&self) {
        if let Some(kept) = &self.kept {
            assert!(*kept == self.content(), "a write to memory that must not be touched any more");
        }
    }
}
