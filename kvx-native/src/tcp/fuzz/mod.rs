//! What the fuzz targets of TCP call.
//!
//! The two ends of a lane are tried as the machine drives them, over socket pairs: a script says
//! what the peer sends, in how large pieces, and what else happens meanwhile. Each script is run
//! for each way to seal.

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
use crate::tcp::memory::deferred::DeferredCompletions;
use crate::tcp::memory::regions::Regions;
use crate::tcp::memory::stages::DeviceStages;
use crate::tcp::seal::Seal;
use crate::tcp::socket::chunk::Bin;

/// Bytes that a connection moves in a turn.
const SHARE: usize = 64 << 10;
/// The most lanes of a script.
const LANES: usize = 2;
/// What payload of a script is made of, where it is not written out.
const FILLER: u8 = 0x5a;

/// An agent that has room for notifications, or none.
#[derive(Default)]
struct Inbox(AtomicBool);

impl Events for Inbox {
    fn notification(&self, _: Sender<'_>, _: &[u8]) -> Result<(), QueueFull> {
        if self.0.load(Ordering::Relaxed) { Err(QueueFull) } else { Ok(()) }
    }

    fn link(&self, _: LinkId, _: LinkState) {}
}

/// One end of a link's lanes, and their sockets' other ends.
struct Lanes {
    conns: Conns,
    scope: Scope,
    held: HeldBytes<Identity>,
    inbox: Arc<Inbox>,
    fars: Vec<Far>,
    /// Bytes that the peers send at a time.
    piece: usize,
}

/// The peer of one lane.
struct Far {
    socket: UnixStream,
    unsent: Vec<u8>,
    /// The received bytes that make no whole header or record yet, the bytes that are left of their
    /// frame, and whether they are sealed.
    begun: Vec<u8>,
    left: usize,
    is_sealed: bool,
    seals: Option<(Seal, Seals)>,
    reads: bool,
    /// It sends nothing more when all is sent.
    ends: bool,
}

impl Lanes {
    /// Lanes of these roles, by number, that are sealed in this way, and the sockets' other ends.
    fn new(seal: Seal, role: impl Fn(usize, u8) -> Role) -> Self {
        let (mut nears, mut fars) = (Vec::new(), Vec::new());
        for _ in 0..LANES {
            let (near, socket) = UnixStream::pair().expect("there are descriptors");
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

    /// Lanes of these roles over these sockets, after a handshake.
    fn over(
        sockets: Vec<(UnixStream, Seals)>,
        seal: Seal,
        role: impl Fn(usize, u8) -> Role,
    ) -> Self {
        let inbox = Arc::new(Inbox::default());
        let context = AgentContext {
            config: Config::read(&Options::new()).expect("there is a default for every option"),
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

    /// A turn of one lane. Returns whether anything moved; calls `heard` with each header that its
    /// peer gets. Errors end the link.
    fn turn(&mut self, key: usize, mut heard: impl FnMut(Header)) -> Result<bool> {
        let wrote = self.fars[key].write(self.piece);
        let moved = self.turn_here(key)?;
        self.fars[key].read(&mut heard);
        Ok(wrote + moved > 0)
    }

    /// This end's part of it. Says how much moved.
    fn turn_here(&mut self, key: usize) -> Result<usize> {
        let (conn, scope) = (&mut self.conns[key], &mut self.scope);
        conn.event(true, true, false);
        let (got, sent) = conn.serve(SHARE, key, scope)?;
        conn.note_held(&mut self.held)?;
        Ok(got + sent)
    }

    /// All connections end, as the machine ends them.
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
        assert_eq!(self.scope.described, 0, "descriptions are counted that nobody holds");
        assert!(self.held.greediest(|_| true).is_none());
    }
}

impl Far {
    /// Sends a piece of what is to be sent: not less than a part of it, so that a script ends.
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

    /// Takes what has come, and checks that it is whole frames in a row.
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

    /// A header or a record has come.
    fn whole(&mut self, len: usize, heard: &mut impl FnMut(Header)) {
        let mut came = std::mem::take(&mut self.begun);
        if let Some((_, seals)) = &mut self.seals {
            seals.opener.open(&mut came).expect("a lane says what it has sealed, in its order");
        }
        if self.left > 0 {
            self.left -= len;
            return;
        }
        let header = came.first_chunk().expect("it is as long");
        let header = Header::decode(header).expect("a lane says what its peer understands");
        self.left = header.len;
        self.is_sealed =
            self.seals.as_ref().is_some_and(|(seal, _)| seals_body(*seal, header.frame as u8));
        heard(header);
    }

    /// A frame of this kind, be there one or not.
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

/// Returns true if what follows a header is sealed.
fn seals_body(seal: Seal, kind: u8) -> bool {
    seal == Seal::All || kind != Frame::Data as u8
}

/// Both ends of a lane, after a handshake.
pub(super) fn seals() -> (Seals, Seals) {
    let mut initiator = NoiseHandshake::initiator(&[1; 32], &[]).expect("there are random numbers");
    let mut owner = NoiseHandshake::responder(&[1; 32], &[]).expect("the same pattern");
    let mut said = Vec::new();
    initiator.write(&[], &mut said).expect("its turn");
    owner.read(&said).expect("the same key");
    said.clear();
    owner.write(&[], &mut said).expect("its turn");
    initiator.read(&said).expect("the same key");
    (initiator.seals(), owner.seals())
}

/// What happens next.
enum FuzzStep<'a> {
    /// The peer of this lane sends a frame.
    Frame { lane: usize, kind: u8, id: u64, body: &'a [u8] },
    /// The same, of so many bytes.
    Long { lane: usize, kind: u8, id: u64, len: usize },
    /// It sends bytes that are what they are.
    Bytes { lane: usize, bytes: &'a [u8] },
    /// It reads, or does not.
    Reads { lane: usize, reads: bool },
    /// It sends nothing more.
    Ends { lane: usize },
    /// Peers send so many bytes at a time.
    Piece(usize),
    /// Lanes move so much payload at a time.
    Payload(usize),
    /// What only one kind of lane knows: which, and with what.
    Own(u8, u8),
}

/// Reads the next step; at the end of the script there is none.
fn next<'a>(script: &mut Reader<'a>) -> Option<FuzzStep<'a>> {
    let some = |script: &mut Reader<'a>, len: usize| script.bytes(len.min(script.left())).ok();
    let op = script.u8().ok()?;
    // The highest bits: the lane, and whether the payload is written out.
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
    /// Does what every kind of lane knows.
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

/// Memory, and what it held when nobody was to touch it any more.
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
        self.memory.copy_out(0, &mut content).expect("it is as long as that");
        content
    }

    /// From now on nobody writes into it.
    fn keep(&mut self) {
        self.kept = Some(self.content());
    }

    fn check(&self) {
        if let Some(kept) = &self.kept {
            assert!(
                *kept == self.content(),
                "memory was written to that must not be touched any more"
            );
        }
    }
}
