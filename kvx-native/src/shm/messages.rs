//! The control messages, and the protocol they make up.
//!
//! One Unix socket (sequenced packets) per link, from the initiator's agent to the target's; each packet is one
//! message: a byte that names it, then its fields, little-endian. The bytes of blocks never travel here.
//!
//! * **Handshake.** The initiator opens with [`Hello`](Message::Hello): versions, who it is, whom it expects, and where
//!   it keeps 32 probe bytes. The target answers [`Welcome`](Message::Welcome) with the same and whether it could read
//!   the initiator's probe by `process_vm_readv`, or [`Refuse`](Message::Refuse) with a reason and who it really is.
//! * **Regions.** A reader asks once per region and link with number and key ([`Want`](Message::Want)); the owner
//!   [`Grant`](Message::Grant)s: a sealed file (with the packet) for a kvx pool, a handle of the driver's for memory of
//!   a device, an address for other memory; or it [`Deny`](Message::Deny)s. The initiator of writes [`Lend`](Message::Lend)s its own regions to the target the same way,
//!   unasked: what is lent serves that connection's writes only.
//! * **Reads** need no message: the initiator copies from the mapping, or by `process_vm_readv`, or its device does.
//! * **Writes** are pulled: [`Write`](Message::Write) describes up to some thousand blocks on both sides, the target
//!   checks keys and bounds, copies into its own region, and answers each with one [`Done`](Message::Done).
//!   [`Cancel`](Message::Cancel) drops what has not been pulled; each part is still answered. When all parts are
//!   answered, the target does not touch the initiator's memory again.
//! * **Revocation.** The owner [`Recall`](Message::Recall)s a region from everyone who was granted or lent it; each drops
//!   its work on it, unmaps, and says [`Released`](Message::Released).
//! * **Notifications.** [`Notify`](Message::Notify), answered by [`Ack`](Message::Ack) once the peer's agent has it. At most a window
//!   is unanswered, and at most 64 parts of writes: a target holds what it cannot take yet, and never stops reading.
//! * **Life.** While an answer is awaited, silence is broken by [`Ping`](Message::Ping), which is answered by
//!   [`Alive`](Message::Alive) whatever else the peer is busy with. An idle connection is silent.
//! * **End.** Who wants to end drops all it holds of the other, then shuts down its sending side. The other end drops
//!   all as well and closes. Either sight (end of stream, or the process's end) proves that the other end holds
//!   nothing any more: only then do tickets of half-done writes settle and revocations count as confirmed.

use kvx_core::memory::IpcHandle;
use kvx_core::transport::MAX_NOTIFICATION;
use kvx_core::wire::{Reader, Writer};
use kvx_core::{DeviceId, Identity, RegionId, RegionKey, Result};

use kvx_backend::control::Refusal;

use crate::described::Described;

/// What every handshake begins with.
const MAGIC: [u8; 8] = *b"kvx/shm\n";
/// The versions that this release speaks: from, to.
pub(crate) const VERSIONS: (u16, u16) = (1, 1);
/// The longest message; a notification of the greatest length fits.
pub(crate) const MAX_MESSAGE: usize = MAX_NOTIFICATION + (4 << 10);
/// The most grids that one [`Message::Write`] describes.
pub(crate) const MAX_GRIDS: usize = 128;
/// The most indices that one [`Message::Write`] describes.
pub(crate) const MAX_INDICES: usize = 6000;

/// Bytes at a known place in a process, by which another finds out whether it may read there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Probe {
    /// Where they lie in the sender's process; 0: foreign memory is switched off there.
    pub(crate) address: u64,
    /// What they are.
    pub(crate) bytes: [u8; 32],
}

/// How a region is reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Reached {
    /// Its length in bytes.
    pub(crate) len: u64,
    /// Where it is.
    pub(crate) at: At,
}

/// Where a region is, for a reader.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum At {
    /// In the file that comes with the message.
    File,
    /// At an address in the owner's process.
    Address(u64),
    /// On a device, whose driver knows it by this handle.
    Device { device: DeviceId, handle: IpcHandle },
}

/// A message. See the [module](self) for who sends which when.
#[derive(Clone, Debug)]
pub(crate) enum Message<'a> {
    Hello { versions: (u16, u16), from: Identity, to: Identity, probe: Probe },
    Welcome { version: u16, from: Identity, probe: Probe, reads_us: Result<(), Refusal> },
    Refuse { from: Identity, why: Refusal },
    Want { import: u64, id: RegionId, key: RegionKey },
    Grant { import: u64, reached: Reached },
    Deny { import: u64, why: Refusal },
    Lend { id: RegionId, reached: Reached },
    Write { write: u64, into: Described, from: Described },
    Done { write: u64, result: Result<(), Refusal> },
    Cancel { write: u64 },
    Recall { id: RegionId },
    Released { id: RegionId },
    Notify { id: u64, bytes: &'a [u8] },
    Ack { id: u64 },
    Ping,
    Alive,
}

mod number {
    pub(super) const HELLO: u8 = 1;
    pub(super) const WELCOME: u8 = 2;
    pub(super) const REFUSE: u8 = 3;
    pub(super) const WANT: u8 = 4;
    pub(super) const GRANT: u8 = 5;
    pub(super) const DENY: u8 = 6;
    pub(super) const LEND: u8 = 7;
    pub(super) const WRITE: u8 = 8;
    pub(super) const DONE: u8 = 9;
    pub(super) const CANCEL: u8 = 10;
    pub(super) const RECALL: u8 = 11;
    pub(super) const RELEASED: u8 = 12;
    pub(super) const NOTIFY: u8 = 13;
    pub(super) const ACK: u8 = 14;
    pub(super) const PING: u8 = 15;
    pub(super) const ALIVE: u8 = 16;
}

impl Message<'_> {
    /// The message as one packet.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(64);
        match self {
            Message::Hello { versions, from, to, probe } => {
                out.put_u8(number::HELLO);
                out.put(&MAGIC);
                out.put_u16(versions.0);
                out.put_u16(versions.1);
                out.put_identity(from);
                out.put_identity(to);
                put_probe(&mut out, probe);
            }
            Message::Welcome { version, from, probe, reads_us } => {
                out.put_u8(number::WELCOME);
                out.put(&MAGIC);
                out.put_u16(*version);
                out.put_identity(from);
                put_probe(&mut out, probe);
                put_result(&mut out, reads_us);
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
                out.put_region(*id, key);
            }
            Message::Grant { import, reached } => {
                out.put_u8(number::GRANT);
                out.put_u64(*import);
                put_reached(&mut out, reached);
            }
            Message::Deny { import, why } => {
                out.put_u8(number::DENY);
                out.put_u64(*import);
                why.encode(&mut out);
            }
            Message::Lend { id, reached } => {
                out.put_u8(number::LEND);
                out.put_u64(id.0);
                put_reached(&mut out, reached);
            }
            Message::Write { write, into, from } => {
                out.put_u8(number::WRITE);
                out.put_u64(*write);
                into.encode(&mut out);
                from.encode(&mut out);
            }
            Message::Done { write, result } => {
                out.put_u8(number::DONE);
                out.put_u64(*write);
                put_result(&mut out, result);
            }
            Message::Cancel { write } => {
                out.put_u8(number::CANCEL);
                out.put_u64(*write);
            }
            Message::Recall { id } => {
                out.put_u8(number::RECALL);
                out.put_u64(id.0);
            }
            Message::Released { id } => {
                out.put_u8(number::RELEASED);
                out.put_u64(id.0);
            }
            Message::Notify { id, bytes } => {
                out.reserve_exact(9 + bytes.len());
                out.put_u8(number::NOTIFY);
                out.put_u64(*id);
                out.put(bytes);
            }
            Message::Ack { id } => {
                out.put_u8(number::ACK);
                out.put_u64(*id);
            }
            Message::Ping => out.put_u8(number::PING),
            Message::Alive => out.put_u8(number::ALIVE),
        }
        out
    }
}

impl<'a> Message<'a> {
    /// Reads one packet. Errors: `Malformed`.
    pub(crate) fn decode(bytes: &'a [u8]) -> Result<Self> {
        let mut reader = Reader::new("SHM message", bytes);
        let message = match reader.u8()? {
            number::HELLO => {
                magic(&mut reader)?;
                Message::Hello {
                    versions: (reader.u16()?, reader.u16()?),
                    from: reader.identity()?,
                    to: reader.identity()?,
                    probe: probe(&mut reader)?,
                }
            }
            number::WELCOME => {
                magic(&mut reader)?;
                Message::Welcome {
                    version: reader.u16()?,
                    from: reader.identity()?,
                    probe: probe(&mut reader)?,
                    reads_us: result(&mut reader)?,
                }
            }
            number::REFUSE => {
                magic(&mut reader)?;
                Message::Refuse { from: reader.identity()?, why: Refusal::decode(&mut reader)? }
            }
            number::WANT => {
                let import = reader.u64()?;
                let (id, key) = reader.region()?;
                Message::Want { import, id, key }
            }
            number::GRANT => Message::Grant { import: reader.u64()?, reached: reached(&mut reader)? },
            number::DENY => Message::Deny { import: reader.u64()?, why: Refusal::decode(&mut reader)? },
            number::LEND => Message::Lend { id: RegionId(reader.u64()?), reached: reached(&mut reader)? },
            number::WRITE => {
                let write = reader.u64()?;
                let (into, from) = (Described::decode(&mut reader)?, Described::decode(&mut reader)?);
                if into.bytes() != from.bytes() {
                    return Err(reader.malformed(format_args!(
                        "a write of {} bytes into blocks of {} bytes",
                        from.bytes(),
                        into.bytes()
                    )));
                }
                Message::Write { write, into, from }
            }
            number::DONE => Message::Done { write: reader.u64()?, result: result(&mut reader)? },
            number::CANCEL => Message::Cancel { write: reader.u64()? },
            number::RECALL => Message::Recall { id: RegionId(reader.u64()?) },
            number::RELEASED => Message::Released { id: RegionId(reader.u64()?) },
            number::NOTIFY => {
                let id = reader.u64()?;
                let len = reader.left();
                if len > MAX_NOTIFICATION {
                    return Err(reader.malformed(format_args!(
                        "a notification of {len} bytes, at most {MAX_NOTIFICATION} are allowed"
                    )));
                }
                Message::Notify { id, bytes: reader.bytes(len)? }
            }
            number::ACK => Message::Ack { id: reader.u64()? },
            number::PING => Message::Ping,
            number::ALIVE => Message::Alive,
            other => return Err(reader.malformed(format_args!("number {other}"))),
        };
        reader.end()?;
        Ok(message)
    }
}

fn put_probe(out: &mut Vec<u8>, probe: &Probe) {
    out.put_u64(probe.address);
    out.put(&probe.bytes);
}

fn probe(reader: &mut Reader<'_>) -> Result<Probe> {
    Ok(Probe { address: reader.u64()?, bytes: reader.array()? })
}

fn put_reached(out: &mut Vec<u8>, reached: &Reached) {
    out.put_u64(reached.len);
    match &reached.at {
        At::File => out.put_u8(0),
        At::Address(address) => {
            out.put_u8(1);
            out.put_u64(*address);
        }
        At::Device { device, handle } => {
            out.put_u8(2);
            out.put(&device.0);
            out.put_block(&handle.bytes);
            out.put_u64(handle.offset);
        }
    }
}

fn reached(reader: &mut Reader<'_>) -> Result<Reached> {
    let len = reader.u64()?;
    let (at, from) = match reader.u8()? {
        0 => (At::File, 0),
        1 => {
            let address = reader.u64()?;
            (At::Address(address), address)
        }
        2 => {
            let device = DeviceId(reader.array()?);
            let bytes = reader.block(IpcHandle::LONGEST)?.to_vec();
            let offset = reader.u64()?;
            (At::Device { device, handle: IpcHandle { bytes, offset } }, offset)
        }
        other => return Err(reader.malformed(format_args!("memory of kind {other}"))),
    };
    // No process has addresses beyond 63 bits: ends and sums of offsets below stay numbers.
    if from.checked_add(len).is_none_or(|end| end > i64::MAX as u64) {
        return Err(reader.malformed("memory beyond the address space"));
    }
    Ok(Reached { len, at })
}

fn put_result(out: &mut Vec<u8>, result: &Result<(), Refusal>) {
    match result {
        Ok(()) => out.put_u8(1),
        Err(refusal) => {
            out.put_u8(0);
            refusal.encode(out);
        }
    }
}

fn result(reader: &mut Reader<'_>) -> Result<Result<(), Refusal>> {
    match reader.u8()? {
        1 => Ok(Ok(())),
        0 => Refusal::decode(reader).map(Err),
        other => Err(reader.malformed(format_args!("an answer of kind {other}"))),
    }
}

fn magic(reader: &mut Reader<'_>) -> Result<()> {
    if reader.array()? == MAGIC {
        return Ok(());
    }
    Err(reader.malformed("the other end does not speak kvx's shared-memory protocol"))
}

#[cfg(test)]
mod tests {
    use kvx_core::{Error, Grid, Incarnation, Kind, Placed};

    use super::*;

    fn identity(name: &str) -> Identity {
        Identity { name: name.into(), incarnation: Incarnation([name.len() as u8; 16]) }
    }

    fn described(count: u32) -> Described {
        Described {
            regions: vec![(RegionId(3), RegionKey([5; 16]))],
            grids: [Placed { region: 0, grid: Grid::packed(64, 100) }].into(),
            indices: (0..count).map(|at| at * 7 % 100).collect::<Vec<_>>().into(),
        }
    }

    fn on_device() -> At {
        let handle = IpcHandle { bytes: vec![7; 64], offset: 2 << 20 };
        At::Device { device: DeviceId([3; 16]), handle }
    }

    fn samples() -> Vec<Message<'static>> {
        let probe = Probe { address: 0x7000_0000, bytes: [9; 32] };
        let why = || Refusal { kind: Kind::WrongKey, text: "the key is another".into() };
        vec![
            Message::Hello { versions: VERSIONS, from: identity("decode"), to: identity("prefill-0"), probe },
            Message::Welcome { version: 1, from: identity("prefill-0"), probe, reads_us: Ok(()) },
            Message::Welcome { version: 1, from: identity("prefill-0"), probe, reads_us: Err(why()) },
            Message::Refuse { from: identity("other"), why: why() },
            Message::Want { import: 1, id: RegionId(2), key: RegionKey([3; 16]) },
            Message::Grant { import: 1, reached: Reached { len: 4096, at: At::File } },
            Message::Grant { import: 1, reached: Reached { len: 4096, at: At::Address(0x7f00_0000_0000) } },
            Message::Grant { import: 1, reached: Reached { len: 4096, at: on_device() } },
            Message::Deny { import: 1, why: why() },
            Message::Lend { id: RegionId(2), reached: Reached { len: 1, at: At::File } },
            Message::Write { write: 9, into: described(20), from: described(20) },
            Message::Done { write: 9, result: Ok(()) },
            Message::Done { write: 9, result: Err(why()) },
            Message::Cancel { write: 9 },
            Message::Recall { id: RegionId(2) },
            Message::Released { id: RegionId(2) },
            Message::Notify { id: 4, bytes: b"a\0b" },
            Message::Ack { id: 4 },
            Message::Ping,
            Message::Alive,
        ]
    }

    #[test]
    fn messages_travel_as_they_are() {
        for message in samples() {
            let bytes = message.encode();
            let back = Message::decode(&bytes).unwrap();
            assert_eq!(back.encode(), bytes, "{message:?}");
            assert!(bytes.len() <= MAX_MESSAGE);
        }
    }

    #[test]
    fn the_longest_messages_fit_into_a_packet() {
        let grids: std::sync::Arc<[Placed]> =
            (0..MAX_GRIDS as u32).map(|region| Placed { region, grid: Grid::packed(64, 100) }).collect();
        let described = Described {
            regions: vec![(RegionId(3), RegionKey([5; 16])); MAX_GRIDS],
            grids,
            indices: vec![5; MAX_INDICES].into(),
        };
        let write = Message::Write { write: 1, into: described.clone(), from: described };
        assert!(write.encode().len() <= MAX_MESSAGE);
        let notify = Message::Notify { id: 1, bytes: &[7; MAX_NOTIFICATION] };
        assert!(notify.encode().len() <= MAX_MESSAGE);
        let long = Error::new(Kind::Native, "é".repeat(5000));
        let refused = Message::Done { write: 1, result: Err(Refusal::from(&long)) }.encode();
        assert!(Message::decode(&refused).is_ok());
    }

    #[test]
    fn a_peers_refusal_is_cleaned_of_control_characters() {
        let why = Refusal { kind: Kind::Denied, text: "\x1b[2Jno\n".into() };
        for message in [
            Message::Deny { import: 3, why: why.clone() },
            Message::Refuse { from: identity("c"), why: why.clone() },
            Message::Done { write: 1, result: Err(why) },
        ] {
            let bytes = message.encode();
            let text = match Message::decode(&bytes).unwrap() {
                Message::Deny { why, .. } | Message::Refuse { why, .. } => why.text,
                Message::Done { result, .. } => result.unwrap_err().text,
                other => panic!("{other:?}"),
            };
            assert_eq!(text, " [2Jno ");
        }
    }

    #[test]
    fn truncated_messages_are_errors() {
        for message in samples() {
            let bytes = message.encode();
            // A notification is as long as its packet: each prefix that holds its number is a shorter one.
            let least = if matches!(message, Message::Notify { .. }) { 9 } else { bytes.len() };
            for len in 0..least {
                assert!(Message::decode(&bytes[..len]).is_err(), "{len} of {message:?}");
            }
        }
    }

    /// Seeded mutations: whatever comes in is a message whose numbers are sound, or an error; never a panic, and no
    /// allocation beyond what the packet's own length justifies.
    #[test]
    fn mutated_messages_are_sound_or_refused() {
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        let mut random = move || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state
        };
        let seeds: Vec<Vec<u8>> = samples().iter().map(Message::encode).collect();
        let mut accepted = 0;
        for _ in 0..200_000 {
            let mut bytes = seeds[random() as usize % seeds.len()].clone();
            for _ in 0..=random() % 4 {
                let at = random() as usize % bytes.len();
                match random() % 5 {
                    0 => bytes[at] = random() as u8,
                    1 => bytes[at] ^= 1 << (random() % 8),
                    2 => bytes[at] = [0, 1, 0x7f, 0x80, 0xff][random() as usize % 5],
                    3 => bytes.truncate(at.max(1)),
                    _ => bytes.insert(at, random() as u8),
                }
            }
            match Message::decode(&bytes) {
                Ok(Message::Write { into, from, .. }) => {
                    accepted += 1;
                    assert_eq!(into.bytes(), from.bytes());
                    for side in [into, from] {
                        assert!(side.indices.len() * 4 <= bytes.len() || side.indices.as_range().is_some());
                    }
                }
                Ok(Message::Grant { reached, .. } | Message::Lend { reached, .. }) => {
                    accepted += 1;
                    let from = match &reached.at {
                        At::File => 0,
                        At::Address(address) => *address,
                        At::Device { handle, .. } => {
                            assert!(handle.bytes.len() <= IpcHandle::LONGEST);
                            handle.offset
                        }
                    };
                    assert!(from + reached.len <= i64::MAX as u64);
                }
                Ok(_) => accepted += 1,
                Err(error) => assert_eq!(error.kind(), Kind::Malformed),
            }
        }
        assert!(accepted > 1000, "the mutations never hit a sound message");
    }
}
