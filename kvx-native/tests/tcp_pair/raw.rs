//! The wire format by hand, for peers that do not keep to it.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};

use kvx_core::wire::{Reader, Writer};
use kvx_core::{Agent, Identity, Incarnation, Metadata, RegionId, RegionKey};

use super::CUT_OFF;

pub(crate) const HELLO: u8 = 1;
pub(crate) const CHALLENGE: u8 = 2;
pub(crate) const PROOF: u8 = 3;
pub(crate) const ANSWER: u8 = 4;
pub(crate) const REFUSE: u8 = 5;
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

/// A frame.
pub(crate) fn frame(kind: u8, id: u64, body: &[u8]) -> Vec<u8> {
    let mut bytes = vec![kind, 0, 0, 0];
    bytes.put_u32(body.len() as u32);
    bytes.put_u64(id);
    bytes.put(body);
    bytes
}

pub(crate) fn hello(secret: bool, lane: u8) -> Vec<u8> {
    hello_of(fresh(), secret, lane)
}

fn hello_of(link: [u8; 16], secret: bool, lane: u8) -> Vec<u8> {
    let mut body = b"kvx-tcp\n".to_vec();
    body.put_u16(1);
    body.put_u16(1);
    body.put_u8(secret.into());
    body.put_u8(lane);
    body.put(&link);
    body.put(&[7; 32]);
    frame(HELLO, 0, &body)
}

/// The nonce of a link.
pub(crate) fn fresh() -> [u8; 16] {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let mut nonce = [5; 16];
    nonce[..8].copy_from_slice(&NEXT.fetch_add(1, Ordering::Relaxed).to_le_bytes());
    nonce
}

/// A description of blocks of one packed grid.
pub(crate) fn blocks(region: RegionId, key: RegionKey, length: u64, count: u32, indices: &[u32]) -> Vec<u8> {
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

/// Where an agent listens.
pub(crate) fn address_of(agent: &Agent) -> SocketAddr {
    let metadata = Metadata::decode(&agent.metadata().unwrap()).unwrap();
    let mut reader = Reader::new("address", &metadata.backends[0].1);
    assert_eq!((reader.u8().unwrap(), reader.u8().unwrap(), reader.u8().unwrap()), (1, 1, 4));
    let ip = reader.array::<4>().unwrap();
    SocketAddr::from((ip, reader.u16().unwrap()))
}

/// Number and key of an agent's region.
pub(crate) fn key_of(agent: &Agent, name: &str) -> (RegionId, RegionKey) {
    let metadata = Metadata::decode(&agent.metadata().unwrap()).unwrap();
    let region = metadata.regions.iter().find(|region| &*region.name == name).unwrap();
    (region.id, region.key)
}

/// A port that is free now, and that the system gives to nobody who does not ask for it.
pub(crate) fn free_port() -> u16 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    loop {
        let offset = u64::from(std::process::id()) * 97 + NEXT.fetch_add(1, Ordering::Relaxed);
        let port = 12_000 + (offset % 20_000) as u16;
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}

/// A connection that speaks by hand.
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

    /// A lane to an agent without a secret, through the handshake.
    pub(crate) fn lane(agent: &Agent) -> Self {
        Self::lane_of(agent, fresh(), 1)
    }

    /// One of several lanes of a link.
    pub(crate) fn lane_of(agent: &Agent, link: [u8; 16], lane: u8) -> Self {
        let mut raw = Self::connect(address_of(agent));
        raw.send(&hello_of(link, false, lane));
        assert_eq!(raw.frame().unwrap().0, CHALLENGE);
        let mut body = Vec::new();
        body.put_identity(&Identity { name: "stranger".into(), incarnation: Incarnation([9; 16]) });
        body.put_identity(agent.identity());
        body.put_block(&[]);
        raw.send(&frame(PROOF, 0, &body));
        assert_eq!(raw.frame().unwrap().0, ANSWER);
        raw
    }

    /// The owner's part of a handshake without a secret, as whoever is expected. Says which lane it is.
    pub(crate) fn welcome(&mut self) -> u8 {
        self.welcome_when(|| {})
    }

    /// The same; calls `asked` before its last word, which answers what has come by then.
    pub(crate) fn welcome_when(&mut self, asked: impl FnOnce()) -> u8 {
        let (kind, _, hello) = self.frame().unwrap();
        assert_eq!(kind, HELLO);
        let mut challenge = Vec::new();
        challenge.put_u16(1);
        challenge.put_u8(0);
        challenge.put(&[1; 32]);
        challenge.put_block(&[]);
        self.send(&frame(CHALLENGE, 0, &challenge));
        let (kind, _, proof) = self.frame().unwrap();
        assert_eq!(kind, PROOF);
        let mut reader = Reader::new("proof", &proof);
        let (_, expected) = (reader.identity().unwrap(), reader.identity().unwrap());
        let mut answer = vec![0];
        answer.put_identity(&expected);
        answer.put_block(&[]);
        asked();
        self.send(&frame(ANSWER, 0, &answer));
        hello[13]
    }

    /// The id of the next frame, if it has come and is of this kind. It stays where it is.
    pub(crate) fn peeked(&self, kind: u8) -> Option<u64> {
        let mut header = [0; 16];
        self.0.set_nonblocking(true).unwrap();
        let got = self.0.peek(&mut header);
        self.0.set_nonblocking(false).unwrap();
        let whole = got.is_ok_and(|count| count == 16) && header[0] == kind;
        whole.then(|| u64::from_le_bytes(header[8..].try_into().unwrap()))
    }

    /// Sends, whether or not the other end still listens.
    pub(crate) fn send(&mut self, bytes: &[u8]) -> bool {
        self.0.write_all(bytes).is_ok()
    }

    /// The next frame; `None` when the other end has closed.
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

    /// The other end closes, whatever it says before.
    pub(crate) fn is_closed(&mut self) -> bool {
        while self.frame().is_some() {}
        true
    }

    /// The payload and the end of a read.
    pub(crate) fn answer(&mut self, id: u64) -> Result<Vec<u8>, u8> {
        let mut got = Vec::new();
        loop {
            match self.frame().expect("an answer") {
                (DATA, from, payload) if from == id => got.extend_from_slice(&payload),
                (END, from, end) if from == id => return end.first().map_or(Ok(got), |kind| Err(*kind)),
                other => panic!("unexpected frame {other:?}"),
            }
        }
    }
}
