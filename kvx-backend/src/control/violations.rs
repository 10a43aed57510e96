//! Violations of the protocol by an initiator, for tests. The tests of this module check, without a
//! socket, that each ends a link; the tests of each backend check that the backend uses this module
//! and continues with other peers.

use kvx_core::backend::{Invitation, RegionKey};
use kvx_core::{ErrorKind, Identity, Incarnation, RegionId, Result, Secret};

use super::proof::{Keys, PROOF};
use super::{ControlMessage, Greeting, VERSIONS, WINDOW};

/// Where the nonce of an encoded hello begins: behind its number, eight bytes that name kvx,
/// versions and a length.
const NONCE: usize = 17;

/// The state of a handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HandshakeStage {
    /// No message was sent.
    Start,
    /// The target welcomed the hello of an invited initiator. It may be a recorded one.
    Welcome,
    /// The initiator has proven itself: the link is up.
    Up,
}

/// A violation that ends a link.
#[derive(Debug)]
pub struct Violation {
    /// Names it in the message of a failed test.
    pub description: &'static str,
    /// When the initiator sends it.
    pub stage: HandshakeStage,
    /// Its messages. With the last one at the latest, the link has ended.
    pub messages: Vec<Vec<u8>>,
    /// The error that a target answers with, if it can answer unauthenticated peers.
    pub refusal: Option<ErrorKind>,
}

/// Returns each kind of violation once, for a target with this invitation and a region of this
/// number and key, which it has not granted, and with capacity for fewer than eight notifications.
/// `rest` is the transport's part of a hello.
pub fn violations(
    invitation: &Invitation,
    rest: &[u8],
    id: RegionId,
    key: RegionKey,
) -> Result<Vec<Violation>> {
    let (_, invited) = greet(invitation, None, rest)?;
    let (_, stranger) = greet(&Invitation::from_bytes([0; 32]), None, rest)?;
    let mut altered = invited.clone();
    altered[NONCE] ^= 1; // what it says besides is as it was
    let one = |message: ControlMessage<'_>| vec![message.encode()];
    let notify = |notice| ControlMessage::Notify { notice, bytes: &[7; 1000] }.encode();
    let (old, newer) = (Some(ErrorKind::PeerRestarted), Some(ErrorKind::Incompatible));
    let other_versions = ControlMessage::Hello { versions: (7, 9), body: b"as version 7 says it" };
    let proof = || one(ControlMessage::Confirm { proof: [0; PROOF] });
    let violations = [
        (
            HandshakeStage::Start,
            "bytes that are no message",
            vec![b"GET / HTTP/1.1\r\n\r\n".to_vec()],
            None,
        ),
        (HandshakeStage::Start, "a message that is no hello", one(ControlMessage::Ping), None),
        (HandshakeStage::Start, "the hello of a stranger", vec![stranger], old),
        (HandshakeStage::Start, "a hello that was altered", vec![altered], old),
        (HandshakeStage::Start, "a hello in other versions", one(other_versions), newer),
        (HandshakeStage::Welcome, "a proof that is none", proof(), None),
        (
            HandshakeStage::Welcome,
            "a region is wanted before the proof",
            one(ControlMessage::Want { import: 1, id, key }),
            None,
        ),
        (HandshakeStage::Welcome, "a notification before the proof", vec![notify(0)], None),
        (HandshakeStage::Welcome, "a question before the proof", one(ControlMessage::Ping), None),
        (HandshakeStage::Up, "a second hello", vec![invited], None),
        (HandshakeStage::Up, "a second proof", proof(), None),
        (
            HandshakeStage::Up,
            "the answer to a notification, from who notifies",
            one(ControlMessage::Ack { notice: 3 }),
            None,
        ),
        (
            HandshakeStage::Up,
            "a grant, from who asks for it",
            one(ControlMessage::Grant { import: 0, rest: b"" }),
            None,
        ),
        (
            HandshakeStage::Up,
            "a region is released that was not granted",
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

/// Returns an initiator with this invitation, and its hello; `rest` is the transport's part of it.
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

/// Returns the message that proves the initiator after its welcome. Errors: it is no welcome for
/// it.
pub fn prove(greeting: &Greeting, welcome: &[u8]) -> Result<Vec<u8>> {
    let ControlMessage::Welcome { version, body } = ControlMessage::decode(welcome)? else {
        return Err(super::errors::malformed("no welcome"));
    };
    let (_, proof) = greeting.verify_welcome(version, body)?;
    Ok(ControlMessage::Confirm { proof }.encode())
}

/// Returns a random message to a target, one in four with an altered byte. Every other one is of
/// `own`, where a transport has messages of its own. `below` draws a number below another one.
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
