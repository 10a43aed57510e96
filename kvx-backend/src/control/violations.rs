//! What an initiator may not say, for tests: those of this room see without a socket that it ends a link, those of
//! each backend that the backend asks this room, and goes on with others.

use kvx_core::{ErrorKind, Identity, Incarnation, Invitation, RegionId, RegionKey, Result, Secret};

use super::proof::{Keys, PROOF};
use super::{ControlMessage, Greeting, VERSIONS, WINDOW};

/// Where the nonce of an encoded hello begins: behind its number, eight bytes that name kvx, versions and a length.
const NONCE: usize = 17;

/// How far a link has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ViolationOutcome {
    /// Nobody has said anything.
    Nothing,
    /// The hello of one that was invited was welcomed. It may be a recorded one.
    Welcome,
    /// The initiator has proven itself: the link is up.
    Proof,
}

/// Something that ends a link.
#[derive(Debug)]
pub struct Violation {
    /// What it is, for who reads that a test has failed.
    pub what: &'static str,
    /// When the initiator says it.
    pub after: ViolationOutcome,
    /// What it says. With the last message, if not before, the link has ended.
    pub says: Vec<Vec<u8>>,
    /// What a target that can answer anybody refuses it as.
    pub told: Option<ErrorKind>,
}

/// Each kind of violation once, toward a target that invites by this, has a region of this number and key, has not
/// granted it, and has room for fewer than eight notifications. `rest` is what the transport says with a hello: that of
/// a stranger is as good as any.
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
            ViolationOutcome::Nothing,
            "bytes that are no message",
            vec![b"GET / HTTP/1.1\r\n\r\n".to_vec()],
            None,
        ),
        (ViolationOutcome::Nothing, "a message that is no hello", one(ControlMessage::Ping), None),
        (ViolationOutcome::Nothing, "the hello of a stranger", vec![stranger], old),
        (ViolationOutcome::Nothing, "a hello that was altered", vec![altered], old),
        (ViolationOutcome::Nothing, "a hello in other versions", one(other_versions), newer),
        (ViolationOutcome::Welcome, "a proof that is none", proof(), None),
        (
            ViolationOutcome::Welcome,
            "a region is wanted before the proof",
            one(ControlMessage::Want { import: 1, id, key }),
            None,
        ),
        (ViolationOutcome::Welcome, "a notification before the proof", vec![notify(0)], None),
        (ViolationOutcome::Welcome, "a question before the proof", one(ControlMessage::Ping), None),
        (ViolationOutcome::Proof, "a second hello", vec![invited], None),
        (ViolationOutcome::Proof, "a second proof", proof(), None),
        (
            ViolationOutcome::Proof,
            "the answer to a notification, from who notifies",
            one(ControlMessage::Ack { notice: 3 }),
            None,
        ),
        (
            ViolationOutcome::Proof,
            "a grant, from who asks for it",
            one(ControlMessage::Grant { import: 0, rest: b"" }),
            None,
        ),
        (
            ViolationOutcome::Proof,
            "a region is released that was not granted",
            one(ControlMessage::Released { id }),
            None,
        ),
        (
            ViolationOutcome::Proof,
            "more notifications than the window",
            (0..WINDOW as u64 + 8).map(notify).collect(),
            None,
        ),
    ];
    let violation = |(after, what, says, told)| Violation { what, after, says, told };
    Ok(violations.into_iter().map(violation).collect())
}

/// A stranger's greeting by this invitation, and its first message; `rest` is what its transport says with it.
pub fn greet(
    invitation: &Invitation,
    secret: Option<&Secret>,
    rest: &[u8],
) -> Result<(Greeting, Vec<u8>)> {
    greet_as("stranger", invitation, secret, rest)
}

/// The same of another name.
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

/// The message that proves the greeting which was welcomed by this one. Errors: it is no welcome to it.
pub fn prove(greeting: &Greeting, welcome: &[u8]) -> Result<Vec<u8>> {
    let ControlMessage::Welcome { version, body } = ControlMessage::decode(welcome)? else {
        return Err(super::reasons::malformed("no welcome"));
    };
    let (_, proof) = greeting.welcomed(version, body)?;
    Ok(ControlMessage::Confirm { proof }.encode())
}

/// Any message to a target, one in four with an altered byte. Every other one is of `own`, where a transport has
/// messages of its own. `below` draws a number below another one.
pub fn any_message(
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
