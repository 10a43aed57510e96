//! The messages that all links share, and their encoding: one byte for the kind of message, then
//! its fields in little-endian order.

use kvx_core::backend::wire::{Reader, Writer};
use kvx_core::backend::{MAX_NOTIFICATION, RegionKey};
use kvx_core::{RegionId, Result};

use super::Refusal;
use super::proof::{PROOF, Proof};

/// The first bytes of handshakes.
const MAGIC: [u8; 8] = *b"kvx/link";
/// The first number of a transport's own messages.
pub const FIRST_TRANSPORT_NUMBER: u8 = 32;
/// The limit in bytes for messages after the handshake, except for a transport's own.
pub const MAX_MESSAGE: usize = MAX_NOTIFICATION + 1024;

/// A message. `rest` is the transport's own part of it.
#[derive(Clone, Debug)]
pub enum ControlMessage<'a> {
    /// The initiator begins.
    Hello {
        /// The first and the last version that the initiator speaks.
        versions: (u16, u16),
        /// The content and its proofs: see [`Greeting`](super::Greeting).
        body: &'a [u8],
    },
    /// The target accepts.
    Welcome {
        /// The version that both speak.
        version: u16,
        /// The content and its proof: see [`VerifiedHello`](super::VerifiedHello).
        body: &'a [u8],
    },
    /// The initiator proves that its hello was not recorded.
    Confirm {
        /// The proof.
        proof: Proof,
    },
    /// The target refuses.
    Refuse {
        /// The reason.
        why: Refusal,
        /// The proof that the target has the fleet's secret, for an initiator that has it.
        proof: &'a [u8],
    },
    /// The initiator requests a region.
    Want {
        /// The number of the import.
        import: u64,
        /// The region.
        id: RegionId,
        /// The region's key.
        key: RegionKey,
    },
    /// The owner grants the region.
    Grant {
        /// The number of the import in the request.
        import: u64,
        /// The transport's own part.
        rest: &'a [u8],
    },
    /// The owner denies the region.
    Deny {
        /// The number of the import in the request.
        import: u64,
        /// The reason.
        why: Refusal,
    },
    /// The owner revokes a region.
    Recall {
        /// The region.
        id: RegionId,
    },
    /// The other end has released the region.
    Released {
        /// The region.
        id: RegionId,
    },
    /// A notification.
    Notify {
        /// The number of the notification on this link.
        notice: u64,
        /// The payload.
        bytes: &'a [u8],
    },
    /// The target's agent has received the notification.
    Ack {
        /// The number of the notification.
        notice: u64,
    },
    /// A request for a sign of life.
    Ping,
    /// The answer to [`Ping`](ControlMessage::Ping).
    Alive,
    /// The target asks the initiator to end the link because its agent is shutting down.
    Leave,
    /// The last message of an end that no longer holds anything of the other.
    Bye,
}

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
    pub(super) const CONFIRM: u8 = 15;
}

impl ControlMessage<'_> {
    /// Returns true if the message may arrive at this end of a link. `up` means that the handshake
    /// is done.
    pub fn fits(&self, up: bool, to_initiator: bool) -> bool {
        match self {
            ControlMessage::Hello { .. } | ControlMessage::Confirm { .. } => !up && !to_initiator,
            ControlMessage::Welcome { .. } | ControlMessage::Refuse { .. } => !up && to_initiator,
            ControlMessage::Want { .. } | ControlMessage::Notify { .. } => up && !to_initiator,
            ControlMessage::Grant { .. }
            | ControlMessage::Deny { .. }
            | ControlMessage::Ack { .. }
            | ControlMessage::Leave => up && to_initiator,
            // Each end may hold regions of the other.
            ControlMessage::Recall { .. } | ControlMessage::Released { .. } => up,
            ControlMessage::Ping | ControlMessage::Alive | ControlMessage::Bye => up,
        }
    }

    /// Encodes the message.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(64);
        match self {
            ControlMessage::Hello { versions, body } => {
                out.put_u8(number::HELLO);
                out.put(&MAGIC);
                out.put_u16(versions.0);
                out.put_u16(versions.1);
                out.put(body);
            }
            ControlMessage::Welcome { version, body } => {
                out.put_u8(number::WELCOME);
                out.put(&MAGIC);
                out.put_u16(*version);
                out.put(body);
            }
            ControlMessage::Confirm { proof } => {
                out.put_u8(number::CONFIRM);
                out.put(proof);
            }
            ControlMessage::Refuse { why, proof } => {
                out.put_u8(number::REFUSE);
                out.put(&MAGIC);
                why.encode(&mut out);
                out.put_block(proof);
            }
            ControlMessage::Want { import, id, key } => {
                out.put_u8(number::WANT);
                out.put_u64(*import);
                out.put_region(*id, key);
            }
            ControlMessage::Grant { import, rest } => {
                out.put_u8(number::GRANT);
                out.put_u64(*import);
                out.put(rest);
            }
            ControlMessage::Deny { import, why } => {
                out.put_u8(number::DENY);
                out.put_u64(*import);
                why.encode(&mut out);
            }
            ControlMessage::Recall { id } => {
                out.put_u8(number::RECALL);
                out.put_u64(id.0);
            }
            ControlMessage::Released { id } => {
                out.put_u8(number::RELEASED);
                out.put_u64(id.0);
            }
            ControlMessage::Notify { notice, bytes } => {
                out.reserve_exact(9 + bytes.len());
                out.put_u8(number::NOTIFY);
                out.put_u64(*notice);
                out.put(bytes);
            }
            ControlMessage::Ack { notice } => {
                out.put_u8(number::ACK);
                out.put_u64(*notice);
            }
            ControlMessage::Ping => out.put_u8(number::PING),
            ControlMessage::Alive => out.put_u8(number::ALIVE),
            ControlMessage::Leave => out.put_u8(number::LEAVE),
            ControlMessage::Bye => out.put_u8(number::BYE),
        }
        out
    }
}

impl<'a> ControlMessage<'a> {
    /// Decodes a message, which must fill `bytes`.
    ///
    /// # Errors
    /// `Malformed`.
    pub fn decode(bytes: &'a [u8]) -> Result<Self> {
        let mut reader = Reader::new("link message", bytes);
        let message = match reader.u8()? {
            number::HELLO => {
                magic(&mut reader)?;
                ControlMessage::Hello {
                    versions: (reader.u16()?, reader.u16()?),
                    body: rest(&mut reader)?,
                }
            }
            number::WELCOME => {
                magic(&mut reader)?;
                ControlMessage::Welcome { version: reader.u16()?, body: rest(&mut reader)? }
            }
            number::CONFIRM => ControlMessage::Confirm { proof: reader.array()? },
            number::REFUSE => {
                magic(&mut reader)?;
                ControlMessage::Refuse {
                    why: Refusal::decode(&mut reader)?,
                    proof: reader.block(PROOF)?,
                }
            }
            number::WANT => {
                let import = reader.u64()?;
                let (id, key) = reader.region()?;
                ControlMessage::Want { import, id, key }
            }
            number::GRANT => {
                ControlMessage::Grant { import: reader.u64()?, rest: rest(&mut reader)? }
            }
            number::DENY => {
                ControlMessage::Deny { import: reader.u64()?, why: Refusal::decode(&mut reader)? }
            }
            number::RECALL => ControlMessage::Recall { id: RegionId(reader.u64()?) },
            number::RELEASED => ControlMessage::Released { id: RegionId(reader.u64()?) },
            number::NOTIFY => {
                let (notice, len) = (reader.u64()?, reader.left());
                if len > MAX_NOTIFICATION {
                    return Err(reader.malformed(format_args!(
                        "a notification has {len} bytes, and at most {MAX_NOTIFICATION} are allowed"
                    )));
                }
                ControlMessage::Notify { notice, bytes: rest(&mut reader)? }
            }
            number::ACK => ControlMessage::Ack { notice: reader.u64()? },
            number::PING => ControlMessage::Ping,
            number::ALIVE => ControlMessage::Alive,
            number::LEAVE => ControlMessage::Leave,
            number::BYE => ControlMessage::Bye,
            unknown => {
                return Err(reader.malformed(format_args!("no message has the number {unknown}")));
            }
        };
        reader.end()?;
        Ok(message)
    }
}

fn magic(reader: &mut Reader<'_>) -> Result<()> {
    if reader.array()? == MAGIC { Ok(()) } else { Err(reader.malformed("it is not a kvx message")) }
}

fn rest<'a>(reader: &mut Reader<'a>) -> Result<&'a [u8]> {
    reader.bytes(reader.left())
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvx_core::ErrorKind;

    /// Returns each message, with the number of bytes at its end that may have any length.
    fn all() -> Vec<(ControlMessage<'static>, usize)> {
        let why = Refusal { kind: ErrorKind::WrongKey, text: "not that key".into() };
        let (id, key) = (RegionId(4), RegionKey([5; 16]));
        vec![
            (ControlMessage::Hello { versions: (1, 3), body: b"\0\x01body" }, 6),
            (ControlMessage::Welcome { version: 1, body: b"body" }, 4),
            (ControlMessage::Confirm { proof: [7; PROOF] }, 0),
            (ControlMessage::Refuse { why: why.clone(), proof: b"proof" }, 0),
            (ControlMessage::Want { import: 3, id, key }, 0),
            (ControlMessage::Grant { import: 3, rest: b"" }, 0),
            (ControlMessage::Grant { import: 3, rest: b"rest" }, 4),
            (ControlMessage::Deny { import: 3, why }, 0),
            (ControlMessage::Recall { id }, 0),
            (ControlMessage::Released { id }, 0),
            (ControlMessage::Notify { notice: 7, bytes: b"\0 bytes" }, 7),
            (ControlMessage::Ack { notice: 7 }, 0),
            (ControlMessage::Ping, 0),
            (ControlMessage::Alive, 0),
            (ControlMessage::Leave, 0),
            (ControlMessage::Bye, 0),
        ]
    }

    #[test]
    fn messages_round_trip_and_truncated_ones_are_rejected() {
        for (message, any) in all() {
            let bytes = message.encode();
            assert_eq!(ControlMessage::decode(&bytes).unwrap().encode(), bytes);
            assert!(bytes[0] < FIRST_TRANSPORT_NUMBER && bytes.len() <= MAX_MESSAGE);
            for len in 0..bytes.len() - any {
                assert!(ControlMessage::decode(&bytes[..len]).is_err(), "{len} of {message:?}");
            }
        }
        for whole in [
            ControlMessage::Ping,
            ControlMessage::Bye,
            ControlMessage::Ack { notice: 1 },
            ControlMessage::Recall { id: RegionId(1) },
        ] {
            assert!(
                ControlMessage::decode(&[&whole.encode()[..], &[0]].concat()).is_err(),
                "{whole:?}"
            );
        }
        assert!(ControlMessage::decode(&[FIRST_TRANSPORT_NUMBER]).is_err());
    }

    #[test]
    fn each_message_is_allowed_at_one_end_and_in_one_phase() {
        for (message, _) in all() {
            let fits = |up, to_initiator| message.fits(up, to_initiator);
            let handshake = fits(false, true) || fits(false, false);
            assert_ne!(handshake, fits(true, true) || fits(true, false), "{message:?}");
        }
        let ack = ControlMessage::Ack { notice: 1 };
        assert!(ack.fits(true, true) && !ack.fits(true, false));
    }

    #[test]
    fn limits_hold_and_control_characters_are_removed() {
        let long = vec![7; MAX_NOTIFICATION + 1];
        let notify = |bytes| ControlMessage::Notify { notice: 1, bytes }.encode();
        assert!(
            ControlMessage::decode(&notify(&long)).is_err()
                && ControlMessage::decode(&notify(&long[1..])).is_ok()
        );
        assert!(notify(&long).len() <= MAX_MESSAGE);
        let why = Refusal::from(&ErrorKind::Authentication.because("\x1b[2Jno\n"));
        let refused = [
            ControlMessage::Deny { import: 3, why: why.clone() }.encode(),
            ControlMessage::Refuse { why, proof: b"" }.encode(),
        ];
        for bytes in refused {
            let Ok(ControlMessage::Deny { why, .. } | ControlMessage::Refuse { why, .. }) =
                ControlMessage::decode(&bytes)
            else {
                panic!("{bytes:?}");
            };
            assert_eq!(why.text, " [2Jno ");
        }
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
        for (message, _) in all() {
            let bytes = message.encode();
            for _ in 0..2_000 {
                let mut altered = bytes.clone();
                for _ in 0..1 + random() % 4 {
                    let at = random() as usize % altered.len();
                    altered[at] = random() as u8;
                }
                altered.truncate(random() as usize % (altered.len() + 1));
                ControlMessage::decode(&altered).ok();
            }
        }
    }
}
