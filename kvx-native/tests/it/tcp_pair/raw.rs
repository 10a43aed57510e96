//! The wire format without an agent, for peers that violate it.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};

use kvx_core::backend::wire::{Reader, Writer};
use kvx_core::backend::{Invitation, Metadata, RegionKey};
use kvx_core::{Agent, Identity, Incarnation, RegionId};
use kvx_native::fuzz::by_hand::{InitiatorByHand, OwnerByHand};

use super::CUT_OFF;

pub(crate) const HELLO: u8 = 1;
pub(crate) const WELCOME: u8 = 2;
pub(crate) const CONFIRM: u8 = 3;
pub(crate) const ENTERED: u8 = 4;
pub(crate) const REFUSE: u8 = 5;

/// Options of agents that seal nothing, so that frames can be written directly after the handshake.
pub(crate) const BARE: &str = r#"{"tcp": {"seal": "none"}}"#;
pub(crate) const READ: u8 = 16;
pub(crate) const WRITE: u8 = 17;
pub(crate) const DATA: u8 = 18;
pub(crate) const END: u8 = 19;
pub(crate) const CANCEL: u8 = 20;
pub(crate) const NOTIFY: u8 = 21;
pub(crate) const ACK: u8 = 22;
pub(crate) const PING: u8 = 23;
pub(crate) const ALIVE: u8 = 24;
pub(crate) const STOP: u8 = 25;

/// Encodes a frame.
pub(crate) fn frame(kind: u8, id: u64, body: &[u8]) -> Vec<u8> {
    let mut bytes = vec![kind, 0, 0, 0];
    bytes.put_u32(body.len() as u32);
    bytes.put_u64(id);
    bytes.put(body);
    bytes
}

/// Returns the hello of a peer with this invitation and without a secret.
pub(crate) fn hello(invitation: &Invitation) -> Vec<u8> {
    initiator(invitation, fresh(), 1).1
}

fn initiator(invitation: &Invitation, link: [u8; 16], lane: u8) -> (InitiatorByHand, Vec<u8>) {
    let who = Identity { name: "stranger".into(), incarnation: Incarnation([9; 16]) };
    InitiatorByHand::new(invitation, None, who, (link, lane)).unwrap()
}

/// Returns the invitation in an agent's metadata.
pub(crate) fn invitation_of(agent: &Agent) -> Invitation {
    invitation_in(&agent.metadata().unwrap())
}

/// Returns the invitation in metadata.
pub(crate) fn invitation_in(metadata: &[u8]) -> Invitation {
    Metadata::decode(metadata).unwrap().invited.unwrap().by
}

/// Returns a new nonce for a link.
pub(crate) fn fresh() -> [u8; 16] {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let mut nonce = [5; 16];
    nonce[..8].copy_from_slice(&NEXT.fetch_add(1, Ordering::Relaxed).to_le_bytes());
    nonce
}

/// Encodes a description of blocks of one packed grid.
pub(crate) fn blocks(
    region: RegionId,
    key: RegionKey,
    length: u64,
    count: u32,
    indices: &[u32],
) -> Vec<u8> {
    let mut body = Vec::new();
    body.put_u16(1);
    body.put_region(region, &key);
    body.put_u16(1);
    body.put_u32(0);
    body.put_u64(0);
    body.put_u64(length);
    body.put_u64(length);
    body.put_u32(count);
    body.put_u8(1);
    body.put_u32(indices.len() as u32);
    indices.iter().for_each(|index| body.put_u32(*index));
    body
}

/// Returns the address at which an agent listens.
pub(crate) fn address_of(agent: &Agent) -> SocketAddr {
    address_in(&agent.metadata().unwrap())
}

/// Returns the address in metadata.
pub(crate) fn address_in(metadata: &[u8]) -> SocketAddr {
    let metadata = Metadata::decode(metadata).unwrap();
    let mut reader = Reader::new("address", &metadata.backends[0].1);
    assert_eq!((reader.u8().unwrap(), reader.u8().unwrap(), reader.u8().unwrap()), (1, 1, 4));
    let ip = reader.array::<4>().unwrap();
    SocketAddr::from((ip, reader.u16().unwrap()))
}

/// Returns the id and key of an agent's region.
pub(crate) fn key_of(agent: &Agent, name: &str) -> (RegionId, RegionKey) {
    let metadata = Metadata::decode(&agent.metadata().unwrap()).unwrap();
    let region = metadata.regions.iter().find(|region| &*region.name == name).unwrap();
    (region.id, region.key)
}

/// Returns a port that is free now, and that the system assigns to no socket unless requested.
pub(crate) fn free_port() -> u16 {
    kvx_testkit::free_port(0).unwrap()
}

/// A connection on which a test writes frames.
pub(crate) struct Raw(pub(crate) TcpStream);

impl Raw {
    pub(crate) fn connect(address: SocketAddr) -> Self {
        Self::of(TcpStream::connect(address).unwrap())
    }

    pub(crate) fn of(stream: TcpStream) -> Self {
        stream.set_read_timeout(Some(CUT_OFF)).unwrap();
        stream.set_write_timeout(Some(CUT_OFF)).unwrap();
        stream.set_nodelay(true).unwrap();
        Raw(stream)
    }

    /// Connects a lane to an agent without secret and seals, and completes the handshake.
    pub(crate) fn lane(agent: &Agent) -> Self {
        Self::lane_of(agent, fresh(), 1)
    }

    /// Connects one of several lanes of a link.
    pub(crate) fn lane_of(agent: &Agent, link: [u8; 16], lane: u8) -> Self {
        Self::lane_to(&agent.metadata().unwrap(), link, lane)
    }

    /// Connects a lane to the agent with this metadata.
    pub(crate) fn lane_to(metadata: &[u8], link: [u8; 16], lane: u8) -> Self {
        let mut raw = Self::connect(address_in(metadata));
        let (mut initiator, hello) = initiator(&invitation_in(metadata), link, lane);
        raw.send(&hello);
        loop {
            let (answer, entered) = initiator.take(&raw.whole_frame().expect("an answer")).unwrap();
            if entered.is_some() {
                return raw;
            }
            raw.send(&answer);
        }
    }

    /// Connects a lane like [`lane`](Self::lane), but only up to the owner's first answer. Returns
    /// the frame that ends the handshake, or `None` if the owner refused.
    pub(crate) fn welcomed(agent: &Agent) -> (Self, Option<Vec<u8>>) {
        let mut raw = Self::connect(address_of(agent));
        let (mut initiator, hello) = initiator(&invitation_of(agent), fresh(), 1);
        raw.send(&hello);
        let answer = initiator.take(&raw.whole_frame().expect("an answer"));
        (raw, answer.ok().map(|(confirm, _)| confirm))
    }

    /// Plays the owner's part of a handshake without a secret, with this invitation. Returns the
    /// lane.
    pub(crate) fn welcome(&mut self, invitation: &Invitation) -> u8 {
        self.welcome_when(invitation, || {})
    }

    /// Like [`welcome`](Self::welcome), but calls `asked` before the last answer.
    pub(crate) fn welcome_when(&mut self, invitation: &Invitation, asked: impl FnOnce()) -> u8 {
        let mut owner = OwnerByHand::new(invitation, None);
        loop {
            let (answer, entered) = owner.take(&self.whole_frame().expect("a word")).unwrap();
            if let Some(lane) = entered {
                asked();
                self.send(&answer);
                return lane;
            }
            self.send(&answer);
        }
    }

    fn whole_frame(&mut self) -> Option<Vec<u8>> {
        self.frame().map(|(kind, id, body)| frame(kind, id, &body))
    }

    /// Returns the id of the next frame, if it has arrived and is of this kind. Does not consume
    /// it.
    pub(crate) fn peeked(&self, kind: u8) -> Option<u64> {
        let mut header = [0; 16];
        self.0.set_nonblocking(true).unwrap();
        let got = self.0.peek(&mut header);
        self.0.set_nonblocking(false).unwrap();
        let whole = got.is_ok_and(|count| count == 16) && header[0] == kind;
        whole.then(|| u64::from_le_bytes(header[8..].try_into().unwrap()))
    }

    /// Sends bytes. Returns false if the other end has closed.
    pub(crate) fn send(&mut self, bytes: &[u8]) -> bool {
        self.0.write_all(bytes).is_ok()
    }

    /// Receives the next frame; `None` when the other end has closed.
    pub(crate) fn frame(&mut self) -> Option<(u8, u64, Vec<u8>)> {
        let mut header = [0; 16];
        self.exactly(&mut header)?;
        let len = u32::from_le_bytes(header[4..8].try_into().unwrap()) as usize;
        let mut body = vec![0; len];
        self.exactly(&mut body)?;
        Some((header[0], u64::from_le_bytes(header[8..].try_into().unwrap()), body))
    }

    fn exactly(&mut self, bytes: &mut [u8]) -> Option<()> {
        match self.0.read_exact(bytes) {
            Ok(()) => Some(()),
            Err(error) => {
                let timed_out = matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut);
                assert!(!timed_out, "the other end neither answers nor closes");
                None
            }
        }
    }

    /// Waits until the other end closes, and ignores frames before that.
    pub(crate) fn is_closed(&mut self) -> bool {
        while self.frame().is_some() {}
        true
    }

    /// Receives the payload and the END of a read.
    pub(crate) fn answer(&mut self, id: u64) -> Result<Vec<u8>, u8> {
        let mut got = Vec::new();
        loop {
            match self.frame().expect("an answer") {
                (DATA, from, payload) if from == id => got.extend_from_slice(&payload),
                (END, from, end) if from == id => {
                    return end.first().map_or(Ok(got), |kind| Err(*kind));
                }
                other => panic!("unexpected frame {other:?}"),
            }
        }
    }
}
