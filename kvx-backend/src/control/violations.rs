//! Protocol violations of an initiator, for tests. The tests of this module check, without a
//! socket, that each of them ends a link. The tests of each backend check that the backend uses
//! this module and continues with other peers.

use kvx_core::backend::{Invitation, RegionKey};
use kvx_core::{ErrorKind, Identity, Incarnation, RegionId, Result, Secret};

use super::proof::{Keys, PROOF};
use super::{ControlMessage, Greeting, VERSIONS, WINDOW};

/// The offset of the nonce in an encoded hello: after the message number, the eight magic bytes,
/// versions and a length.
const NONCE: usize = 17;

/// The state of a handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HandshakeStage {
    /// No message was sent.
    Start,
    /// The target welcomed the hello of an invited initiator; the hello may be a replay.
    Welcome,
    /// The initiator has proven itself: the link is up.
    Up,
}

/// A violation that ends a link.
#[derive(Debug)]
pub struct Violation {
    /// The description for the message of a failed test.
    pub description: &'static str,
    /// The stage at which the initiator sends it.
    pub stage: HandshakeStage,
    /// The messages. The link has ended after the last of them, if not before.
    pub messages: Vec<Vec<u8>>,
    /// The error that a target answers with, if it can answer unauthenticated peers.
    pub refusal: Option<ErrorKind>,
}

/// Returns each kind of violation once. The target has this invitation and capacity for fewer than
/// eight notifications; it has not granted its region of this id and key. `rest` is the transport's
/// part of a hello.
pub fn violations(
    invitation: &Invitation,
    rest: &[u8],
    id: RegionId,
    key: RegionKey,
) -> Result<Vec<Violation>> {
    let (_, invited) = greet(invitation, None, rest)?;
    let (_, stranger) = greet(&Invitation::from_bytes([0; 32]), None, rest)?;
    let mut altered = invited.clone();
    altered[NONCE] ^= 1; // the rest of the hello is unchanged
    let one = |message: ControlMessage<'_>| vec![message.encode()];
    let notify = |notice| ControlMessage::Notify { notice, bytes: &[7; 1000] }.encode();
    let (old, newer) = (Some(ErrorKind::PeerRestarted), Some(ErrorKind::Incompatible));
    let other_versions = ControlMessage::Hello { versions: (7, 9), body: b"as version 7 says it" };
    let proof = || one(ControlMessage::Confirm { proof: [0; PROOF] });
    let violations = [
        (
            HandshakeStage::Start,
            "bytes that are not a message",
            vec![b"GET / HTTP/1.1\r\n\r\n".to_vec()],
            None,
        ),
        (HandshakeStage::Start, "a message that is not a hello", one(ControlMessage::Ping), None),
        (HandshakeStage::Start, "the hello of an unauthenticated peer", vec![stranger], old),
        (HandshakeStage::Start, "an altered hello", vec![altered], old),
        (HandshakeStage::Start, "a hello with unknown versions", one(other_versions), newer),
        (HandshakeStage::Welcome, "an invalid proof", proof(), None),
        (
            HandshakeStage::Welcome,
            "a request for a region before the proof",
            one(ControlMessage::Want { import: 1, id, key }),
            None,
        ),
        (HandshakeStage::Welcome, "a notification before the proof", vec![notify(0)], None),
        (HandshakeStage::Welcome, "a ping before the proof", one(ControlMessage::Ping), None),
        (HandshakeStage::Up, "a second hello", vec![invited], None),
        (HandshakeStage::Up, "a second proof", proof(), None),
        (
            HandshakeStage::Up,
            "an acknowledgement from the end that sends notifications",
            one(ControlMessage::Ack { notice: 3 }),
            None,
        ),
        (
            HandshakeStage::Up,
            "a grant from the end that requests regions",
            one(ControlMessage::Grant { import: 0, rest: b"" }),
            None,
        ),
        (
            HandshakeStage::Up,
            "the release of a region that was not granted",
            one(ControlMessage::Released { id }),
            None,
        ),
        (
            HandshakeStage::Up,
            "more notifications than the window",
            (0..WINDOW as u64 + 8).map(notify).collect(),
            None,
        ),
    ];
    let violation = |(stage, description, messages, refusal)| Violation {
        description,
        stage,
        messages,
        refusal,
    };
    Ok(violations.into_iter().map(violation).collect())
}

/// Returns an initiator with this invitation, and its hello. `rest` is the transport's part of it.
pub fn greet(
    invitation: &Invitation,
    secret: Option<&Secret>,
    rest: &[u8],
) -> Result<(Greeting, Vec<u8>)> {
    greet_as("stranger", invitation, secret, rest)
}

/// Like [`greet`], with a name.
pub fn greet_as(
    name: &str,
    invitation: &Invitation,
    secret: Option<&Secret>,
    rest: &[u8],
) -> Result<(Greeting, Vec<u8>)> {
    let from = Identity { name: name.into(), incarnation: Incarnation([9; 16]) };
    let (greeting, body) = Greeting::new(&from, Keys::new(invitation, secret), rest)?;
    Ok((greeting, ControlMessage::Hello { versions: VERSIONS, body: &body }.encode()))
}

/// Returns the message that proves the initiator after its welcome.
///
/// # Errors
///
/// `welcome` is not a valid welcome for this initiator.
pub fn prove(greeting: &Greeting, welcome: &[u8]) -> Result<Vec<u8>> {
    let ControlMessage::Welcome { version, body } = ControlMessage::decode(welcome)? else {
        return Err(super::errors::malformed("no welcome"));
    };
    let (_, proof) = greeting.verify_welcome(version, body)?;
    Ok(ControlMessage::Confirm { proof }.encode())
}

/// Returns a random message to a target; one in four has an altered byte. If the transport has
/// messages of its own, every other one comes from `own`. `below` draws a number below its
/// argument.
pub fn random_message(
    mut below: impl FnMut(usize) -> usize,
    id: RegionId,
    key: RegionKey,
    own: &[Vec<u8>],
) -> Vec<u8> {
    let mut bytes = match below(if own.is_empty() { 13 } else { 26 }) {
        0 => ControlMessage::Want { import: 1, id, key }.encode(),
        1 => ControlMessage::Recall { id }.encode(),
        2 => ControlMessage::Released { id }.encode(),
        3 => ControlMessage::Ping.encode(),
        4 => ControlMessage::Alive.encode(),
        5 => ControlMessage::Ack { notice: 0 }.encode(),
        6 => ControlMessage::Leave.encode(),
        7 => ControlMessage::Bye.encode(),
        8..13 => {
            ControlMessage::Notify { notice: below(usize::MAX) as u64, bytes: b"news" }.encode()
        }
        _ => own[below(own.len())].clone(),
    };
    if below(4) == 0 {
        let at = below(bytes.len());
        bytes[at] = below(256) as u8;
    }
    bytes
}
