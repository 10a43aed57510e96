//! Handshakes between both sides, and with altered, recorded and forged messages.

use kvx_core::backend::Invitation;
use kvx_core::{Identity, Incarnation, Result, Secret};

use super::initiator::read_welcome;
use super::*;
use crate::tcp::frames::{Frame, HEADER, Hello, VERSIONS, put_refuse};
use crate::tcp::limit::ConnectionLimit;

/// The initiator's name. Longer than any text that random bytes are likely to contain.
const NAME: &str = "decode-on-host-0";

fn who(name: &str, life: u8) -> Identity {
    Identity { name: name.into(), incarnation: Incarnation([life; 16]) }
}

fn secret(byte: u8) -> Option<Secret> {
    Some(Secret::from_bytes([byte; 32]))
}

fn frame(bytes: &[u8]) -> (Header, &[u8]) {
    let header = Header::decode(bytes[..HEADER].try_into().unwrap()).unwrap();
    assert_eq!(bytes.len(), HEADER + header.len, "one frame at a time");
    (header, &bytes[HEADER..])
}

fn keys(life: u8, secret: Option<Secret>) -> Keys {
    Keys::new(&Invitation::from_bytes([life; 32]), secret.as_ref())
}

fn greets(keys: &Keys, wish: Seal) -> (InitiatorHandshake, Vec<u8>) {
    let mut hello = Vec::new();
    let handshake =
        InitiatorHandshake::start(keys, who(NAME, 1), ([8; 16], 3), wish, &mut hello).unwrap();
    (handshake, hello)
}

struct Conversation {
    initiator: Result<InitiatorVerdict>,
    /// The result of the owner's last step.
    owner: Result<Step>,
    /// Every frame, beginning with the initiator's first.
    frames: Vec<Vec<u8>>,
}

/// Runs a handshake; `alter` sees each frame before it arrives.
fn converse_altered(
    ours: &Keys,
    theirs: &Keys,
    wishes: (Seal, Seal),
    mut alter: impl FnMut(usize, &mut Vec<u8>),
) -> Conversation {
    let (mut initiator, hello) = greets(ours, wishes.0);
    let mut owning = OwnerHandshake::new(theirs.clone(), wishes.1, None);
    let mut frames = vec![hello];
    let arrived = |said: &[u8]| -> Option<(Header, Vec<u8>)> {
        let header = Header::decode(said.first_chunk()?).ok()?;
        Some((header, said[HEADER..].get(..header.len)?.to_vec()))
    };
    let cut_off = || ErrorKind::PeerLost.because("no complete frame arrived");
    loop {
        alter(frames.len() - 1, frames.last_mut().unwrap());
        let mut reply = Vec::new();
        let owner = match arrived(frames.last().unwrap()) {
            Some((header, body)) => owning.frame(header, &body, &mut reply),
            None => Err(cut_off()),
        };
        if reply.is_empty() {
            return Conversation { initiator: Err(cut_off()), owner, frames };
        }
        frames.push(reply);
        alter(frames.len() - 1, frames.last_mut().unwrap());
        let mut reply = Vec::new();
        let said = match arrived(frames.last().unwrap()) {
            Some((header, body)) => initiator.frame(header, &body, &mut reply),
            None => Err(cut_off()),
        };
        match said {
            Ok(None) => frames.push(reply),
            Ok(Some(verdict)) => return Conversation { initiator: Ok(verdict), owner, frames },
            Err(error) => return Conversation { initiator: Err(error), owner, frames },
        }
    }
}

/// Runs a handshake between an initiator invited by incarnation `expected` and incarnation 2 of the
/// owner.
fn converse(ours: Option<Secret>, theirs: Option<Secret>, expected: u8) -> Conversation {
    let wishes = (Seal::Control, Seal::Control);
    converse_altered(&keys(expected, ours), &keys(2, theirs), wishes, |_, _| {})
}

fn tells_a_name(conversation: &Conversation) -> bool {
    let is_in = |frame: &Vec<u8>| frame.windows(NAME.len()).any(|word| word == NAME.as_bytes());
    conversation.frames.iter().any(is_in)
}

fn kind<T>(result: &Result<T>) -> Option<ErrorKind> {
    result.as_ref().err().map(Error::kind)
}

#[test]
fn the_same_secret_or_none_admits_an_invited_peer() {
    for secret in [None, secret(3)] {
        let done = converse(secret.clone(), secret, 2);
        assert!(!tells_a_name(&done), "to who listens");
        assert!(matches!(done.initiator, Ok(InitiatorVerdict::Welcome(_))));
        let Ok(Step::Entered { who: initiator, link, lane, .. }) = done.owner else {
            panic!("not in")
        };
        assert_eq!((initiator, link, lane), (who(NAME, 1), [8; 16], 3));
    }
}

#[test]
fn the_stricter_seal_counts() {
    for (_, ours) in Seal::NAMED {
        for (_, theirs) in Seal::NAMED {
            let done = converse_altered(&keys(2, None), &keys(2, None), (ours, theirs), |_, _| {});
            let Ok(InitiatorVerdict::Welcome((at_initiator, _))) = done.initiator else {
                panic!("not welcome")
            };
            let Ok(Step::Entered { seals: (at_owner, _), .. }) = done.owner else {
                panic!("not in")
            };
            assert_eq!((at_initiator, at_owner), (ours.max(theirs), ours.max(theirs)));
        }
    }
    // An owner that has the key but chooses a weaker seal than requested is rejected.
    let says = [&[COME_IN][..], &VERSIONS.max.to_le_bytes(), &[Seal::Control.number()]].concat();
    assert_eq!(kind(&read_welcome(&says, Seal::All)), Some(ErrorKind::Malformed));
}

#[test]
fn a_wrong_or_missing_secret_is_denied_on_both_ends_before_any_name_is_sent() {
    let (a, b) = (secret(3), secret(4));
    for (ours, theirs) in [(a.clone(), b.clone()), (a.clone(), None), (None, b)] {
        for expected in [2, 9] {
            let done = converse(ours.clone(), theirs.clone(), expected);
            assert_eq!(
                (kind(&done.initiator), kind(&done.owner)),
                (Some(ErrorKind::Authentication), Some(ErrorKind::Authentication))
            );
            assert!(!tells_a_name(&done));
        }
    }
}

#[test]
fn a_restart_is_reported_without_a_name_and_with_a_secret_only_by_its_holder() {
    for secret in [None, secret(3)] {
        let done = converse(secret.clone(), secret.clone(), 9);
        assert!(!tells_a_name(&done));
        assert!(matches!(done.initiator, Ok(InitiatorVerdict::Restarted)));
        assert_eq!(matches!(done.owner, Ok(Step::Mistaken)), secret.is_some());
    }
    // Without the secret, that answer is not trusted.
    let mut restarted = Vec::new();
    put_refuse(&mut restarted, &ErrorKind::PeerRestarted.because("restarted"));
    let (mut initiator, _) = greets(&keys(2, secret(3)), Seal::None);
    let (header, body) = frame(&restarted);
    assert_eq!(
        kind(&initiator.frame(header, body, &mut Vec::new())),
        Some(ErrorKind::Authentication)
    );
    let (mut initiator, _) = greets(&keys(2, secret(3)), Seal::None);
    let header = Header { frame: Frame::Mistaken, len: 48, id: 0 };
    assert_eq!(
        kind(&initiator.frame(header, &[0; 48], &mut Vec::new())),
        Some(ErrorKind::Malformed)
    );
}

#[test]
fn unauthenticated_peers_get_one_constant_answer() {
    for theirs in [None, secret(3)] {
        let answer = |hello: &[u8]| {
            let mut answer = Vec::new();
            let header = Header { frame: Frame::Hello, len: hello.len(), id: 0 };
            let mut owner = OwnerHandshake::new(keys(2, theirs.clone()), Seal::None, None);
            assert!(owner.frame(header, hello, &mut answer).is_err() && !owner.has_said_hello());
            answer
        };
        let of = |keys: Keys| answer(&greets(&keys, Seal::None).1[HEADER..]);
        let answers = [
            of(keys(9, secret(4))),
            of(keys(9, None)),
            answer(b"kvx-tcp\n\x03\0\x03\0"),
            answer(b"hello"),
        ];
        assert!(answers.iter().all(|one| *one == answers[0]));
        assert_eq!(frame(&answers[0]).0.frame, Frame::Refuse);
    }
}

#[test]
fn a_recorded_conversation_is_refused() {
    let secret = secret(3);
    let recorded = converse(secret.clone(), secret.clone(), 2);
    let mut owning = OwnerHandshake::new(keys(2, secret), Seal::None, None);
    let (header, body) = frame(&recorded.frames[0]);
    let mut welcome = Vec::new();
    assert!(matches!(owning.frame(header, body, &mut welcome).unwrap(), Step::More));
    assert_ne!(welcome, recorded.frames[1], "the replaying peer cannot decrypt the answer");
    let (header, body) = frame(&recorded.frames[2]);
    let mut reply = Vec::new();
    assert_eq!(kind(&owning.frame(header, body, &mut reply)), Some(ErrorKind::Authentication));
    assert!(reply.is_empty());
}

#[test]
fn an_impostor_without_proof_learns_no_name() {
    for secret in [None, secret(3)] {
        let (mut initiator, hello) = greets(&keys(2, secret), Seal::None);
        let mut imposter = OwnerHandshake::new(keys(2, self::secret(7)), Seal::None, None);
        let (header, body) = frame(&hello);
        let mut reply = Vec::new();
        assert_eq!(
            kind(&imposter.frame(header, body, &mut reply)),
            Some(ErrorKind::Authentication)
        );
        let welcome = Header { frame: Frame::Welcome, len: 52, id: 0 };
        let mut out = Vec::new();
        assert_eq!(kind(&initiator.frame(welcome, &[3; 52], &mut out)), Some(ErrorKind::Malformed));
        assert!(out.is_empty());
    }
}

#[test]
fn only_an_authenticated_peer_learns_that_the_limit_is_reached() {
    for (invited, expected) in [(2, ErrorKind::Exhausted), (9, ErrorKind::PeerRestarted)] {
        let (mut initiator, hello) = greets(&keys(invited, None), Seal::None);
        let full = Some(ConnectionLimit::new(0));
        let mut owning = OwnerHandshake::new(keys(2, None), Seal::None, full);
        let (header, body) = frame(&hello);
        let mut answer = Vec::new();
        assert!(owning.frame(header, body, &mut answer).is_err());
        assert!(!answer.windows(5).any(|word| word == b"raise"), "to who listens");
        let (header, body) = frame(&answer);
        match initiator.frame(header, body, &mut Vec::new()) {
            Ok(Some(InitiatorVerdict::Restarted)) => {
                assert_eq!(expected, ErrorKind::PeerRestarted)
            }
            other => assert_eq!(kind(&other), Some(expected)),
        }
    }
}

#[test]
fn no_common_version_names_both_ranges() {
    let mut future = Hello::head(Versions { min: 7, max: 9 });
    future.extend_from_slice(b"as version 7 says it");
    let mut owning = OwnerHandshake::new(keys(2, None), Seal::None, None);
    let header = Header { frame: Frame::Hello, len: future.len(), id: 0 };
    let mut answer = Vec::new();
    let error = owning.frame(header, &future, &mut answer).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Incompatible);
    assert!(error.sentence().contains("3 to 3") && error.sentence().contains("7 to 9"), "{error}");
    let (mut initiator, _) = greets(&keys(2, None), Seal::None);
    let (header, body) = frame(&answer);
    assert_eq!(
        kind(&initiator.frame(header, body, &mut Vec::new())),
        Some(ErrorKind::Incompatible)
    );
}

#[test]
fn every_altered_bit_of_a_handshake_ends_it() {
    for secret in [None, secret(3)] {
        let keys = keys(2, secret);
        let wishes = (Seal::All, Seal::None);
        let good = converse_altered(&keys, &keys, wishes, |_, _| {});
        for (number, len) in good.frames.iter().map(Vec::len).enumerate() {
            for bit in 0..8 * len {
                let done = converse_altered(&keys, &keys, wishes, |at, frame| {
                    if at == number {
                        frame[bit / 8] ^= 1 << (bit % 8);
                    }
                });
                let case = format!("bit {bit} of message {number}");
                assert!(!matches!(done.initiator, Ok(InitiatorVerdict::Welcome(_))), "{case}");
                assert!(number == 3 || !matches!(done.owner, Ok(Step::Entered { .. })), "{case}");
            }
        }
    }
}
