//! The control messages on a socket: those that all links share, and SHM's own.
//!
//! Each link has one Unix socket (sequenced packets) from the initiator's agent to the target's.
//! Each packet is one message of [`kvx_backend::control`] or one of SHM's own. The bytes of blocks
//! never travel here.
//!
//! * **Handshake.** In hello and welcome each end states the address of its 32 probe bytes. The
//!   welcome also reports whether the target could read the initiator's by `process_vm_readv`.
//! * **Regions.** A grant includes the location of the region: a sealed file (with the packet) for
//!   a kvx pool, a handle of the driver for memory of a device, an address for other memory. The
//!   initiator of writes [`Lend`](Message::Lend)s its own regions to the target in the same way,
//!   without a request. Lent regions serve that connection's writes only. The target releases one
//!   that it cannot open at once, and the initiator lends it again for a later write. Either end
//!   can recall its regions from the other.
//! * **Reads** need no message: the initiator, or its device, copies from the mapping or by
//!   `process_vm_readv`.
//! * **Writes** are pulled: [`Write`](Message::Write) describes up to some thousand blocks on both
//!   sides. The target checks keys and bounds, copies into its own region, and answers each
//!   message with one [`Done`](Message::Done). [`Cancel`](Message::Cancel) drops parts that are
//!   not pulled yet; each part is still answered. After all parts are answered, the target does
//!   not touch the initiator's memory again. At most 64 parts are unanswered.
//! * **End.** The end that closes a connection releases all memory of the other, then shuts down
//!   its sending side. The other end releases everything as well and closes. The end of the
//!   stream, or of the process, proves that the other end holds no memory any more. Only then do
//!   tickets of unfinished writes settle and revocations count as confirmed.

use kvx_backend::control::{self, FIRST_TRANSPORT_NUMBER, Refusal};
use kvx_core::backend::wire::{Reader, Writer};
use kvx_core::backend::{IpcHandle, MAX_NOTIFICATION};
use kvx_core::{DeviceId, RegionId, Result};

use crate::described::Described;

/// The limit in bytes for a message; the largest notification fits.
pub(crate) const MAX_MESSAGE: usize = MAX_NOTIFICATION + (4 << 10);
/// The limit for grids in one [`Message::Write`].
pub(crate) const MAX_GRIDS: usize = 128;
/// The limit for indices in one [`Message::Write`].
pub(crate) const MAX_INDICES: usize = 6000;

/// Bytes at a known address in a process, with which another process checks whether it may read
/// there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Probe {
    /// The address in the sender's process; 0 if foreign memory is switched off there.
    pub(crate) address: u64,
    /// The content of these bytes.
    pub(crate) bytes: [u8; 32],
}

/// The information that a reader needs to reach a region.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RegionAccess {
    /// The length in bytes.
    pub(crate) len: u64,
    /// The location.
    pub(crate) at: Location,
}

/// The location of a region, for a reader.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Location {
    /// The file that comes with the message.
    File,
    /// An address in the owner's process.
    Address(u64),
    /// A device, whose driver knows the memory by this handle.
    Device { device: DeviceId, handle: IpcHandle },
}

/// A message. The [module](self) describes which end sends it, and when.
#[derive(Clone, Debug)]
pub(crate) enum Message<'a> {
    Shared(control::ControlMessage<'a>),
    Lend { id: RegionId, access: RegionAccess },
    Write { write: u64, into: Described, from: Described },
    Done { write: u64, result: Result<(), Refusal> },
    Cancel { write: u64 },
}

impl<'a> From<control::ControlMessage<'a>> for Message<'a> {
    fn from(message: control::ControlMessage<'a>) -> Self {
        Message::Shared(message)
    }
}

mod number {
    use super::FIRST_TRANSPORT_NUMBER;

    pub(super) const LEND: u8 = FIRST_TRANSPORT_NUMBER;
    pub(super) const WRITE: u8 = FIRST_TRANSPORT_NUMBER + 1;
    pub(super) const DONE: u8 = FIRST_TRANSPORT_NUMBER + 2;
    pub(super) const CANCEL: u8 = FIRST_TRANSPORT_NUMBER + 3;
}

impl Message<'_> {
    /// Returns true if the message may arrive at this end of a link. `up` means that the handshake
    /// is done.
    pub(crate) fn fits(&self, up: bool, to_initiator: bool) -> bool {
        match self {
            Message::Shared(message) => message.fits(up, to_initiator),
            Message::Lend { .. } | Message::Write { .. } | Message::Cancel { .. } => {
                up && !to_initiator
            }
            Message::Done { .. } => up && to_initiator,
        }
    }

    /// Encodes the message as one packet.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(64);
        match self {
            Message::Shared(message) => return message.encode(),
            Message::Lend { id, access } => {
                out.put_u8(number::LEND);
                out.put_u64(id.0);
                access.encode(&mut out);
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
        }
        out
    }
}

impl<'a> Message<'a> {
    /// Decodes one packet. Returns `Malformed` for an invalid one.
    pub(crate) fn decode(bytes: &'a [u8]) -> Result<Self> {
        if bytes.first().is_none_or(|number| *number < FIRST_TRANSPORT_NUMBER) {
            return control::ControlMessage::decode(bytes).map(Message::Shared);
        }
        let mut reader = Reader::new("SHM message", bytes);
        let message = match reader.u8()? {
            number::LEND => Message::Lend {
                id: RegionId(reader.u64()?),
                access: RegionAccess::decode(&mut reader)?,
            },
            number::WRITE => {
                let write = reader.u64()?;
                let (into, from) =
                    (Described::decode(&mut reader)?, Described::decode(&mut reader)?);
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
            other => return Err(reader.malformed(format_args!("number {other}"))),
        };
        reader.end()?;
        Ok(message)
    }
}

impl Probe {
    fn encode(&self, out: &mut Vec<u8>) {
        out.put_u64(self.address);
        out.put(&self.bytes);
    }

    fn decode(reader: &mut Reader<'_>) -> Result<Self> {
        Ok(Probe { address: reader.u64()?, bytes: reader.array()? })
    }

    /// Encodes SHM's part of a hello.
    pub(crate) fn hello_rest(&self) -> Vec<u8> {
        let mut rest = Vec::new();
        self.encode(&mut rest);
        rest
    }

    /// Decodes SHM's part of a hello. Returns `Malformed` for an invalid one.
    pub(crate) fn of_hello(rest: &[u8]) -> Result<Self> {
        let mut reader = Reader::new("SHM hello", rest);
        let probe = Self::decode(&mut reader)?;
        reader.end()?;
        Ok(probe)
    }

    /// Encodes SHM's part of a welcome, with the result of the target's attempt to read the
    /// initiator's probe.
    pub(crate) fn welcome_rest(&self, reads_us: &Result<(), Refusal>) -> Vec<u8> {
        let mut rest = self.hello_rest();
        put_result(&mut rest, reads_us);
        rest
    }

    /// Decodes SHM's part of a welcome. Returns `Malformed` for an invalid one.
    pub(crate) fn of_welcome(rest: &[u8]) -> Result<(Self, Result<(), Refusal>)> {
        let mut reader = Reader::new("SHM welcome", rest);
        let said = (Self::decode(&mut reader)?, result(&mut reader)?);
        reader.end()?;
        Ok(said)
    }
}

impl RegionAccess {
    /// Returns true if the region's file comes with the message.
    pub(crate) fn is_file(&self) -> bool {
        self.at == Location::File
    }

    /// Appends the encoding, for a grant or a loan.
    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        out.put_u64(self.len);
        match &self.at {
            Location::File => out.put_u8(0),
            Location::Address(address) => {
                out.put_u8(1);
                out.put_u64(*address);
            }
            Location::Device { device, handle } => {
                out.put_u8(2);
                out.put(&device.0);
                out.put_block(&handle.bytes);
                out.put_u64(handle.offset);
            }
        }
    }

    /// Encodes SHM's part of a grant.
    pub(crate) fn grant_rest(&self) -> Vec<u8> {
        let mut rest = Vec::new();
        self.encode(&mut rest);
        rest
    }

    /// Decodes SHM's part of a grant. Returns `Malformed` for an invalid one.
    pub(crate) fn of_grant(rest: &[u8]) -> Result<Self> {
        let mut reader = Reader::new("SHM grant", rest);
        let access = Self::decode(&mut reader)?;
        reader.end()?;
        Ok(access)
    }

    fn decode(reader: &mut Reader<'_>) -> Result<Self> {
        let len = reader.u64()?;
        let (at, from) = match reader.u8()? {
            0 => (Location::File, 0),
            1 => {
                let address = reader.u64()?;
                (Location::Address(address), address)
            }
            2 => {
                let device = DeviceId(reader.array()?);
                let bytes = reader.block(IpcHandle::LONGEST)?.to_vec();
                let offset = reader.u64()?;
                (Location::Device { device, handle: IpcHandle { bytes, offset } }, offset)
            }
            other => return Err(reader.malformed(format_args!("unknown kind {other} of memory"))),
        };
        // No process has addresses beyond 63 bits, so ends and sums of offsets cannot overflow.
        if from.checked_add(len).is_none_or(|end| end > i64::MAX as u64) {
            return Err(reader.malformed("memory exceeds the address space"));
        }
        Ok(RegionAccess { len, at })
    }
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
        other => Err(reader.malformed(format_args!("unknown kind {other} of answer"))),
    }
}

#[cfg(test)]
mod tests {
    use kvx_core::backend::{PlacedGrid, RegionKey};
    use kvx_core::{ErrorKind, Grid};

    use super::*;

    fn described(count: u32) -> Described {
        Described {
            regions: vec![(RegionId(3), RegionKey([5; 16]))],
            grids: [PlacedGrid { region: 0, grid: Grid::packed(64, 100) }].into(),
            indices: (0..count).map(|at| at * 7 % 100).collect::<Vec<_>>().into(),
        }
    }

    fn on_device() -> Location {
        let handle = IpcHandle { bytes: vec![7; 64], offset: 2 << 20 };
        Location::Device { device: DeviceId([3; 16]), handle }
    }

    fn samples() -> Vec<Message<'static>> {
        let why = || Refusal { kind: ErrorKind::WrongKey, text: "the key is wrong".into() };
        let lend = |at| Message::Lend { id: RegionId(2), access: RegionAccess { len: 4096, at } };
        vec![
            lend(Location::File),
            lend(Location::Address(0x7f00_0000_0000)),
            lend(on_device()),
            Message::Write { write: 9, into: described(20), from: described(20) },
            Message::Done { write: 9, result: Ok(()) },
            Message::Done { write: 9, result: Err(why()) },
            Message::Cancel { write: 9 },
            control::ControlMessage::Ack { notice: 4 }.into(),
        ]
    }

    #[test]
    fn contents_of_handshakes_and_grants_round_trip() {
        let probe = Probe { address: 0x7000_0000, bytes: [9; 32] };
        assert_eq!(Probe::of_hello(&probe.hello_rest()).unwrap(), probe);
        for reads_us in [Ok(()), Err(Refusal { kind: ErrorKind::Unsupported, text: "no".into() })] {
            let rest = probe.welcome_rest(&reads_us);
            assert_eq!(Probe::of_welcome(&rest).unwrap(), (probe, reads_us));
            assert!(Probe::of_welcome(&rest[1..]).is_err() && Probe::of_hello(&rest).is_err());
        }
        for at in [Location::File, Location::Address(7), on_device()] {
            let access = RegionAccess { len: 4096, at };
            let rest = access.grant_rest();
            assert_eq!(RegionAccess::of_grant(&rest).unwrap(), access);
            assert!(RegionAccess::of_grant(&rest[1..]).is_err());
        }
    }

    #[test]
    fn messages_round_trip() {
        for message in samples() {
            let bytes = message.encode();
            let back = Message::decode(&bytes).unwrap();
            assert_eq!(back.encode(), bytes, "{message:?}");
            assert!(bytes.len() <= MAX_MESSAGE);
        }
    }

    #[test]
    fn the_longest_messages_fit_into_a_packet() {
        let grids: std::sync::Arc<[PlacedGrid]> = (0..MAX_GRIDS as u32)
            .map(|region| PlacedGrid { region, grid: Grid::packed(64, 100) })
            .collect();
        let described = Described {
            regions: vec![(RegionId(3), RegionKey([5; 16])); MAX_GRIDS],
            grids,
            indices: vec![5; MAX_INDICES].into(),
        };
        let write = Message::Write { write: 1, into: described.clone(), from: described };
        assert!(write.encode().len() <= MAX_MESSAGE);
        const { assert!(control::MAX_MESSAGE <= MAX_MESSAGE) };
        let long = ErrorKind::Native.because("é".repeat(5000));
        let refused = Message::Done { write: 1, result: Err(Refusal::from(&long)) }.encode();
        assert!(Message::decode(&refused).is_ok());
    }

    #[test]
    fn truncated_messages_are_errors() {
        for message in samples() {
            let bytes = message.encode();
            for len in 0..bytes.len() {
                assert!(Message::decode(&bytes[..len]).is_err(), "{len} of {message:?}");
            }
        }
    }

    /// Checks with seeded mutations that each packet decodes to a message with valid numbers or to
    /// an error: it never panics, and never allocates more than the packet's length justifies.
    #[test]
    fn mutated_messages_are_valid_or_rejected() {
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
                        assert!(
                            side.indices.len() * 4 <= bytes.len()
                                || side.indices.as_range().is_some()
                        );
                    }
                }
                Ok(Message::Lend { access, .. }) => {
                    accepted += 1;
                    let from = match &access.at {
                        Location::File => 0,
                        Location::Address(address) => *address,
                        Location::Device { handle, .. } => {
                            assert!(handle.bytes.len() <= IpcHandle::LONGEST);
                            handle.offset
                        }
                    };
                    assert!(from + access.len <= i64::MAX as u64);
                }
                Ok(_) => accepted += 1,
                Err(error) => assert_eq!(error.kind(), ErrorKind::Malformed),
            }
        }
        assert!(accepted > 1000, "too few mutations yield a valid message");
    }
}
