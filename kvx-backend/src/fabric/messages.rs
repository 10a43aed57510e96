//! What two machines say to each other, and how it travels.
//!
//! Each link has two numbered *sessions*, one on either side, drawn at random. A message is cut into frames that the
//! library carries in any order; a frame names both sessions and its place in the stream of its sender, so that the
//! receiver has whole messages in the order in which they were sent.
//!
//! * **Handshake.** The initiator says [`Hello`](Message::Hello): versions, who it is, whom it expects, where to answer,
//!   which process it is. The target says [`Welcome`](Message::Welcome), or [`Refuse`](Message::Refuse) with the reason and
//!   who it really is.
//! * **Regions.** Before a link first uses a region, its owner is shown number and key ([`Want`](Message::Want)), and says
//!   [`Grant`](Message::Grant) or [`Deny`](Message::Deny). So a wrong key is refused also where the library's own keys know
//!   nothing of kvx's, and the owner knows whom to ask when it revokes.
//! * **Revocation.** The owner says [`Recall`](Message::Recall) to everyone it granted the region; each lets its operations
//!   on it end, drops its key, and says [`Released`](Message::Released).
//! * **Notifications.** [`Notify`](Message::Notify), answered by [`Ack`](Message::Ack) once the peer's agent has it.
//! * **Life.** While an answer is awaited, silence is broken by [`Ping`](Message::Ping), answered by
//!   [`Alive`](Message::Alive). An idle link is silent.
//! * **End.** [`Bye`](Message::Bye) is the last word of a side that holds nothing of the other any more.
//!   [`Leave`](Message::Leave) asks an initiator for it: the target's agent is shutting down.

use kvx_core::transport::MAX_NOTIFICATION;
use kvx_core::wire::{Reader, Writer};
use kvx_core::{Identity, MAX_NAME, RegionId, RegionKey, Result};

use crate::control::Refusal;
use crate::process::ProcessId;

/// What every hello begins with.
const MAGIC: [u8; 8] = *b"kvx/fab\n";
/// The versions that this release speaks: from, to.
pub(super) const VERSIONS: (u16, u16) = (1, 1);
/// The longest address of a library.
pub(super) const MAX_ADDRESS: usize = 1 << 20;
/// The longest message in bytes.
pub(super) const MAX_MESSAGE: usize = MAX_ADDRESS + 4 * MAX_NAME;
/// The longest message once the handshake is done.
pub(super) const MAX_LATER_MESSAGE: usize = MAX_NOTIFICATION + 64;
/// A message. See the [module](self) for who sends which when.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Message<'a> {
    Hello { versions: (u16, u16), from: Identity, to: Identity, process: ProcessId, address: &'a [u8] },
    Welcome { version: u16, from: Identity, process: ProcessId },
    Refuse { from: Identity, why: Refusal },
    Want { import: u64, id: RegionId, key: Key },
    Grant { import: u64 },
    Deny { import: u64, why: Refusal },
    Recall { id: RegionId },
    Released { id: RegionId },
    Notify { notice: u64, bytes: &'a [u8] },
    Ack { notice: u64 },
    Ping,
    Alive,
    Leave,
    Bye,
}

/// A region's key on its way: compared in tests, and printed nowhere.
#[derive(Clone, Copy, Debug)]
pub(super) struct Key(pub(super) RegionKey);

impl PartialEq for Key {
    fn eq(&self, other: &Key) -> bool {
        self.0.matches(&other.0)
    }
}

impl Eq for Key {}

mod number {
    pub(super) const HELLO: u8 = 1;
    pub(super) const WELCOME: u8 = 2;
    pub(super) const REFUSE: u8 = 3;
    pub(super) const WANT: u8 = 4;
    pub(super) const GRANT: u8 = 5;
    pub(super) const DENY: u8 = 6;
    pub(super) const RECALL: u8 = 7;
    pub(super) const RELEASED: u8 = 8;
    pub(super) const NOTIFY: u8 = 9;
    pub(super) const ACK: u8 = 10;
    pub(super) const PING: u8 = 11;
    pub(super) const ALIVE: u8 = 12;
    pub(super) const LEAVE: u8 = 13;
    pub(super) const BYE: u8 = 14;
}

impl Message<'_> {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(64);
        match self {
            Message::Hello { versions, from, to, process, address } => {
                out.put_u8(number::HELLO);
                out.put(&MAGIC);
                out.put_u16(versions.0);
                out.put_u16(versions.1);
                out.put_identity(from);
                out.put_identity(to);
                process.encode(&mut out);
                out.put_block(address);
            }
            Message::Welcome { version, from, process } => {
                out.put_u8(number::WELCOME);
                out.put(&MAGIC);
                out.put_u16(*version);
                out.put_identity(from);
                process.encode(&mut out);
            }
            Message::Refuse { from, why } => {
                out.put_u8(number::REFUSE);
                out.put(&MAGIC);
                out.put_identity(from);
                why.encode(&mut out);
            }
            Message::Want { import, id, key } => {
                out.put_u8(number::WANT);
                out.put_u64(*import);
                out.put_region(*id, &key.0);
            }
            Message::Grant { import } => {
                out.put_u8(number::GRANT);
                out.put_u64(*import);
            }
            Message::Deny { import, why } => {
                out.put_u8(number::DENY);
                out.put_u64(*import);
                why.encode(&mut out);
            }
            Message::Recall { id } => {
                out.put_u8(number::RECALL);
                out.put_u64(id.0);
            }
            Message::Released { id } => {
                out.put_u8(number::RELEASED);
                out.put_u64(id.0);
            }
            Message::Notify { notice, bytes } => {
                out.reserve_exact(9 + bytes.len());
                out.put_u8(number::NOTIFY);
                out.put_u64(*notice);
                out.put(bytes);
            }
            Message::Ack { notice } => {
                out.put_u8(number::ACK);
                out.put_u64(*notice);
            }
            Message::Ping => out.put_u8(number::PING),
            Message::Alive => out.put_u8(number::ALIVE),
            Message::Leave => out.put_u8(number::LEAVE),
            Message::Bye => out.put_u8(number::BYE),
        }
        out
    }
}

impl<'a> Message<'a> {
    /// Reads one whole message. Errors: `Malformed`.
    pub(super) fn decode(bytes: &'a [u8]) -> Result<Self> {
        let mut reader = Reader::new("link message", bytes);
        let message = match reader.u8()? {
            number::HELLO => {
                magic(&mut reader)?;
                Message::Hello {
                    versions: (reader.u16()?, reader.u16()?),
                    from: reader.identity()?,
                    to: reader.identity()?,
                    process: ProcessId::decode(&mut reader)?,
                    address: reader.block(MAX_ADDRESS)?,
                }
            }
            number::WELCOME => {
                magic(&mut reader)?;
                Message::Welcome {
                    version: reader.u16()?,
                    from: reader.identity()?,
                    process: ProcessId::decode(&mut reader)?,
                }
            }
            number::REFUSE => {
                magic(&mut reader)?;
                Message::Refuse { from: reader.identity()?, why: Refusal::decode(&mut reader)? }
            }
            number::WANT => {
                let import = reader.u64()?;
                let (id, key) = reader.region()?;
                Message::Want { import, id, key: Key(key) }
            }
            number::GRANT => Message::Grant { import: reader.u64()? },
            number::DENY => Message::Deny { import: reader.u64()?, why: Refusal::decode(&mut reader)? },
            number::RECALL => Message::Recall { id: RegionId(reader.u64()?) },
            number::RELEASED => Message::Released { id: RegionId(reader.u64()?) },
            number::NOTIFY => {
                let notice = reader.u64()?;
                if reader.left() > MAX_NOTIFICATION {
                    return Err(reader.malformed(format_args!("a notification of {} bytes", reader.left())));
                }
                Message::Notify { notice, bytes: reader.bytes(reader.left())? }
            }
            number::ACK => Message::Ack { notice: reader.u64()? },
            number::PING => Message::Ping,
            number::ALIVE => Message::Alive,
            number::LEAVE => Message::Leave,
            number::BYE => Message::Bye,
            unknown => return Err(reader.malformed(format_args!("no message has the number {unknown}"))),
        };
        reader.end()?;
        Ok(message)
    }
}

fn magic(reader: &mut Reader<'_>) -> Result<()> {
    if reader.array()? == MAGIC { Ok(()) } else { Err(reader.malformed("it does not come from kvx")) }
}

/// What stands before each frame's part of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    /// The receiver's session; 0 in a hello, whose sender does not know it yet.
    pub(super) to: u64,
    /// The sender's session.
    pub(super) from: u64,
    /// Which frame of its sender's stream.
    pub(super) place: u32,
    /// Whether the message goes on in the next frame.
    pub(super) more: bool,
}

impl Header {
    pub(super) const LEN: usize = 1 + 8 + 8 + 4 + 1;
    const VERSION: u8 = 1;

    pub(super) fn frame(&self, part: &[u8]) -> Vec<u8> {
        let mut out = Vec::with_capacity(Self::LEN + part.len());
        out.put_u8(Self::VERSION);
        out.put_u64(self.to);
        out.put_u64(self.from);
        out.put_u32(self.place);
        out.put_u8(u8::from(self.more));
        out.put(part);
        out
    }

    /// The header and the part of the message behind it. Errors: `Malformed`.
    pub(super) fn read(frame: &[u8]) -> Result<(Self, &[u8])> {
        let mut reader = Reader::new("link frame", frame);
        let version = reader.u8()?;
        if version != Self::VERSION {
            return Err(reader.malformed(format_args!("no frame has the version {version}")));
        }
        let (to, from, place) = (reader.u64()?, reader.u64()?, reader.u32()?);
        let more = match reader.u8()? {
            0 => false,
            1 => true,
            other => return Err(reader.malformed(format_args!("{other} is neither last nor followed"))),
        };
        Ok((Header { to, from, place, more }, reader.bytes(reader.left())?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvx_core::{Incarnation, Kind};

    fn identity(name: &str) -> Identity {
        Identity { name: name.into(), incarnation: Incarnation([9; 16]) }
    }

    fn all() -> Vec<Message<'static>> {
        let why = Refusal { kind: Kind::WrongKey, text: "not that key".into() };
        let process = ProcessId::this();
        let key = Key(RegionKey([5; 16]));
        vec![
            Message::Hello {
                versions: (1, 3),
                from: identity("a"),
                to: identity("b"),
                process,
                address: b"\0\x01address",
            },
            Message::Welcome { version: 1, from: identity("b"), process },
            Message::Refuse { from: identity("c"), why: why.clone() },
            Message::Want { import: 3, id: RegionId(4), key },
            Message::Grant { import: 3 },
            Message::Deny { import: 3, why },
            Message::Recall { id: RegionId(4) },
            Message::Released { id: RegionId(4) },
            Message::Notify { notice: 7, bytes: b"\0 bytes" },
            Message::Ack { notice: 7 },
            Message::Ping,
            Message::Alive,
            Message::Leave,
            Message::Bye,
        ]
    }

    #[test]
    fn messages_travel_as_they_are_and_nothing_shorter_or_longer_passes() {
        for message in all() {
            let bytes = message.encode();
            assert_eq!(Message::decode(&bytes).unwrap(), message);
            for len in 0..bytes.len() {
                let shorter = Message::decode(&bytes[..len]);
                assert!(
                    matches!(message, Message::Notify { .. } if len >= 9) || shorter.is_err(),
                    "{message:?}"
                );
            }
            if !matches!(message, Message::Notify { .. }) {
                assert!(Message::decode(&[&bytes[..], &[0]].concat()).is_err(), "{message:?}");
            }
        }
    }

    #[test]
    fn a_peers_refusal_is_cleaned_of_control_characters() {
        let why = Refusal { kind: Kind::Denied, text: "\x1b[2Jno\n".into() };
        let cleaned = Refusal { text: " [2Jno ".into(), ..why.clone() };
        let refused = [
            Message::Deny { import: 3, why: why.clone() }.encode(),
            Message::Refuse { from: identity("c"), why }.encode(),
        ];
        assert_eq!(
            refused.each_ref().map(|message| Message::decode(message).unwrap()),
            [
                Message::Deny { import: 3, why: cleaned.clone() },
                Message::Refuse { from: identity("c"), why: cleaned }
            ]
        );
    }

    #[test]
    fn altered_bytes_never_panic() {
        let mut seed = 0x9e37_79b9_7f4a_7c15_u64;
        let mut random = move || {
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            seed
        };
        for message in all() {
            let bytes = message.encode();
            for _ in 0..2_000 {
                let mut altered = bytes.clone();
                for _ in 0..1 + random() % 4 {
                    let at = random() as usize % altered.len();
                    altered[at] = random() as u8;
                }
                altered.truncate(random() as usize % (altered.len() + 1));
                Message::decode(&altered).ok();
                Header::read(&altered).ok();
            }
        }
    }

    #[test]
    fn frames_travel_as_they_are() {
        let header = Header { to: 1, from: u64::MAX, place: 3, more: true };
        let frame = header.frame(b"part");
        assert_eq!(Header::read(&frame).unwrap(), (header, &b"part"[..]));
        assert!(Header::read(&frame[..Header::LEN - 1]).is_err());
        assert!(Header::read(&[&[9], &frame[1..]].concat()).is_err());
    }
}
