//! The handshake of a lane: versions, invitation and secret, and who comes. Pure: bytes in, bytes out.
//!
//! Each message is proven by [`Keys`] over everything said so far, under a label of its own. The owner proves first
//! (over the initiator's fresh nonce) that it is who the metadata invited to, then the initiator (over the owner's
//! fresh nonce and its identity) that it was invited, then the owner once more. No identity leaves an end before the
//! other has proven itself, and a recorded conversation fails at the fresh nonces. An initiator that is not answered by
//! whom it wanted asks for a proof of the secret alone, if there is one: then that owner has restarted. The bytes that
//! follow are not protected: this keeps strangers out, not eavesdroppers.

use kvx_backend::control::proof::{Claim, Keys, PROOF, other_secret, stranger};
use kvx_core::wire::{Reader, Writer};
use kvx_core::{Error, Identity, Kind, Result, random_key};

use super::frames::{
    Challenge, Frame, Header, Hello, VERSIONS, Versions, put_frame, put_refuse, read_refuse,
};

/// What an initiator says in a PROOF, and an owner in its ANSWER: it is let in.
const INVITED: u8 = 0;
/// Likewise: it has the metadata of another life, or of another agent.
const MISTAKEN: u8 = 1;

const CHALLENGES: &str = "kvx tcp 2: the owner challenges";
const ENTERS: &str = "kvx tcp 2: the initiator enters";
const WELCOMES: &str = "kvx tcp 2: the owner welcomes";
const ASKS: &str = "kvx tcp 2: the initiator asks who has the secret";
const TELLS: &str = "kvx tcp 2: the owner tells that it has the secret";

/// What was said so far, and what to prove it with.
struct Transcript {
    keys: Keys,
    said: Vec<u8>,
}

impl Transcript {
    fn new(keys: Keys) -> Self {
        Transcript { keys, said: Vec::new() }
    }

    fn add(&mut self, message: &[u8]) {
        self.said.put_block(message);
    }

    fn both(&self, label: &str) -> Claim {
        self.keys.both(label, &[&self.said])
    }

    /// Errors: `Denied` without a secret.
    fn secret(&self, label: &str) -> Result<Claim> {
        self.keys.secret(label, &[&self.said]).ok_or_else(stranger)
    }
}

/// Splits a message into what is proven and the proof.
fn split_proof<'a>(what: &'static str, body: &'a [u8], head: usize) -> Result<(&'a [u8], &'a [u8])> {
    let mut reader = Reader::new(what, body);
    let split = (reader.bytes(head)?, reader.bytes(PROOF)?);
    reader.end()?;
    Ok(split)
}

fn unexpected(header: Header) -> Error {
    Error::new(Kind::Malformed, format!("malformed handshake: {:?} out of turn", header.frame))
}

/// Only one end has a secret.
fn one_sided(who: &str) -> Error {
    Error::new(
        Kind::Denied,
        format!("{who} has a shared secret and the other agent has none: give both the same, or neither"),
    )
}

fn no_version(owner: Versions, initiator: Versions) -> Error {
    Error::new(
        Kind::Incompatible,
        format!(
            "the owner speaks versions {owner} of the TCP protocol, the initiator {initiator}: \
             bring both to releases of kvx that overlap"
        ),
    )
}

/// What the initiator learns at the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Welcome,
    /// Whoever answers is not whom the metadata invited to.
    Restarted,
}

/// How an initiator's handshake stands.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Asked {
    Nothing,
    ToEnter,
    WhoHasTheSecret,
}

/// The initiator's side of a handshake.
pub(super) struct InitiatorHandshake {
    transcript: Transcript,
    own: Identity,
    asked: Asked,
}

impl InitiatorHandshake {
    /// Says hello.
    pub(super) fn start(
        keys: Keys,
        own: Identity,
        (link, lane): ([u8; 16], u8),
        out: &mut Vec<u8>,
    ) -> Result<Self> {
        let hello =
            Hello { versions: VERSIONS, secret: keys.have_secret(), link, lane, nonce: random_key()? }
                .encode();
        put_frame(out, Frame::Hello, 0, |out| out.put(&hello));
        let mut transcript = Transcript::new(keys);
        transcript.add(&hello);
        Ok(InitiatorHandshake { transcript, own, asked: Asked::Nothing })
    }

    /// Takes a frame of the owner's. `Some`: the end. An error ends the connection; `out` may hold a last word.
    pub(super) fn frame(
        &mut self,
        header: Header,
        body: &[u8],
        out: &mut Vec<u8>,
    ) -> Result<Option<Verdict>> {
        match (header.frame, self.asked) {
            (Frame::Refuse, Asked::WhoHasTheSecret) => Err(other_secret()),
            (Frame::Refuse, _) => Err(read_refuse(body)),
            (Frame::Challenge, Asked::Nothing) => {
                self.challenge(body, out).inspect_err(|error| put_refuse(out, error))
            }
            (Frame::Answer, Asked::ToEnter | Asked::WhoHasTheSecret) => self.answer(body).map(Some),
            _ => Err(unexpected(header)),
        }
    }

    fn challenge(&mut self, body: &[u8], out: &mut Vec<u8>) -> Result<Option<Verdict>> {
        let mut reader = Reader::new("Challenge", body);
        let challenge = Challenge::decode(&mut reader)?;
        let (head, proof) = split_proof("Challenge", body, body.len() - reader.left())?;
        if !(VERSIONS.min..=VERSIONS.max).contains(&challenge.version) {
            let chosen = Versions { min: challenge.version, max: challenge.version };
            return Err(no_version(chosen, VERSIONS));
        }
        match (self.transcript.keys.have_secret(), challenge.secret) {
            (true, false) => return Err(one_sided("this agent")),
            (false, true) => return Err(one_sided("the peer")),
            _ => {}
        }
        self.transcript.add(head);
        let invited = self.transcript.both(CHALLENGES).holds(proof);
        if !invited && !challenge.secret {
            return Ok(Some(Verdict::Restarted));
        }
        let mut message = vec![if invited { INVITED } else { MISTAKEN }];
        if invited {
            message.put_identity(&self.own);
        }
        self.transcript.add(&message);
        let proof =
            if invited { self.transcript.both(ENTERS) } else { self.transcript.secret(ASKS)? }.proof();
        message.put(&proof);
        put_frame(out, Frame::Proof, 0, |out| out.put(&message));
        self.asked = if invited { Asked::ToEnter } else { Asked::WhoHasTheSecret };
        Ok(None)
    }

    fn answer(&mut self, body: &[u8]) -> Result<Verdict> {
        let (head, proof) = split_proof("Answer", body, 1)?;
        self.transcript.add(head);
        let (verdict, claim) = match (head, self.asked) {
            ([INVITED], Asked::ToEnter) => (Verdict::Welcome, self.transcript.both(WELCOMES)),
            ([MISTAKEN], Asked::WhoHasTheSecret) => (Verdict::Restarted, self.transcript.secret(TELLS)?),
            _ => {
                return Err(Error::new(Kind::Malformed, "malformed handshake: the answer to something else"));
            }
        };
        if claim.holds(proof) { Ok(verdict) } else { Err(other_secret()) }
    }
}

/// How a handshake stands, on the owner's side.
#[derive(Debug)]
pub(super) enum Step {
    /// It goes on.
    More,
    /// The initiator is who it says, and this is the `lane`-th lane of its `link`.
    Welcome { who: Identity, link: [u8; 16], lane: u8 },
    /// Answered that it wants somebody else: close when that is sent.
    Mistaken,
}

/// The owner's side of a handshake.
pub(super) struct OwnerHandshake {
    transcript: Transcript,
    hello: Option<Hello>,
    /// Why nobody may come in, if that is so: told to who may.
    full: Option<Error>,
}

impl OwnerHandshake {
    pub(super) fn new(keys: Keys, full: Option<Error>) -> Self {
        OwnerHandshake { transcript: Transcript::new(keys), hello: None, full }
    }

    /// Whether the initiator has said anything.
    pub(super) fn has_said_hello(&self) -> bool {
        self.hello.is_some()
    }

    /// Takes a frame of the initiator's. An error ends the connection; `out` holds a last word.
    pub(super) fn frame(&mut self, header: Header, body: &[u8], out: &mut Vec<u8>) -> Result<Step> {
        if header.frame == Frame::Refuse {
            return Err(read_refuse(body));
        }
        self.step(header, body, out).inspect_err(|error| put_refuse(out, error))
    }

    fn step(&mut self, header: Header, body: &[u8], out: &mut Vec<u8>) -> Result<Step> {
        match (header.frame, self.hello.is_some()) {
            (Frame::Hello, false) => self.hello(body, out).map(|()| Step::More),
            (Frame::Proof, true) => self.proof(body, out),
            _ => Err(unexpected(header)),
        }
    }

    fn hello(&mut self, body: &[u8], out: &mut Vec<u8>) -> Result<()> {
        let hello = Hello::decode(body)?;
        let version = VERSIONS.common(hello.versions).ok_or_else(|| no_version(VERSIONS, hello.versions))?;
        match (self.transcript.keys.have_secret(), hello.secret) {
            (true, false) => return Err(one_sided("the owner")),
            (false, true) => return Err(one_sided("the initiator")),
            _ => {}
        }
        let mut message = Challenge { version, secret: hello.secret, nonce: random_key()? }.encode();
        self.transcript.add(body);
        self.transcript.add(&message);
        message.put(&self.transcript.both(CHALLENGES).proof());
        put_frame(out, Frame::Challenge, 0, |out| out.put(&message));
        self.hello = Some(hello);
        Ok(())
    }

    fn proof(&mut self, body: &[u8], out: &mut Vec<u8>) -> Result<Step> {
        let Some((said, proof)) = body.split_at_checked(body.len().saturating_sub(PROOF)) else {
            return Err(stranger());
        };
        self.transcript.add(said);
        let mistaken = said == [MISTAKEN];
        let claim = if mistaken { self.transcript.secret(ASKS)? } else { self.transcript.both(ENTERS) };
        if !claim.holds(proof) {
            return Err(stranger());
        }
        let mut message = vec![if mistaken { MISTAKEN } else { INVITED }];
        self.transcript.add(&message);
        if mistaken {
            message.put(&self.transcript.secret(TELLS)?.proof());
            put_frame(out, Frame::Answer, 0, |out| out.put(&message));
            return Ok(Step::Mistaken);
        }
        let mut reader = Reader::new("Proof", said);
        let _invited = reader.u8()?;
        let who = reader.identity()?;
        reader.end()?;
        if let Some(full) = self.full.take() {
            return Err(full);
        }
        message.put(&self.transcript.both(WELCOMES).proof());
        put_frame(out, Frame::Answer, 0, |out| out.put(&message));
        let (link, lane) = self.hello.as_ref().map_or(([0; 16], 0), |hello| (hello.link, hello.lane));
        Ok(Step::Welcome { who, link, lane })
    }
}

#[cfg(test)]
mod tests {
    use kvx_core::{Incarnation, Invitation, Secret};

    use super::super::frames::HEADER;
    use super::*;

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

    struct Conversation {
        initiator: Result<Verdict>,
        owner: Result<Step>,
        /// Every frame, the initiator's first.
        frames: Vec<Vec<u8>>,
    }

    fn keys(life: u8, secret: Option<Secret>) -> Keys {
        Keys::new(&Invitation::from_bytes([life; 32]), secret.as_ref())
    }

    /// Between one that was invited by life `expected` and life 2 of the owner.
    fn converse(ours: Option<Secret>, theirs: Option<Secret>, expected: u8) -> Conversation {
        let mut frames = vec![Vec::new()];
        let mut initiator =
            InitiatorHandshake::start(keys(expected, ours), who("d0", 1), ([8; 16], 3), &mut frames[0])
                .unwrap();
        let mut owning = OwnerHandshake::new(keys(2, theirs), None);
        loop {
            let mut reply = Vec::new();
            let (header, body) = frame(frames.last().unwrap());
            let owner = owning.frame(header, body, &mut reply);
            frames.push(reply);
            let mut reply = Vec::new();
            let (header, body) = frame(frames.last().unwrap());
            let initiator = initiator.frame(header, body, &mut reply);
            match (initiator, owner) {
                (Ok(None), Ok(Step::More)) => frames.push(reply),
                (Ok(Some(verdict)), owner) => return Conversation { initiator: Ok(verdict), owner, frames },
                (Err(error), Ok(Step::More)) if !reply.is_empty() => {
                    frames.push(reply);
                    let (header, body) = frame(frames.last().unwrap());
                    let owner = owning.frame(header, body, &mut Vec::new());
                    return Conversation { initiator: Err(error), owner, frames };
                }
                (Err(error), owner) => return Conversation { initiator: Err(error), owner, frames },
                (Ok(None), owner) => panic!("the owner ended alone: {owner:?}"),
            }
        }
    }

    fn kinds(conversation: &Conversation) -> (Kind, Kind) {
        let initiator = conversation.initiator.as_ref().unwrap_err().kind();
        (initiator, conversation.owner.as_ref().unwrap_err().kind())
    }

    #[test]
    fn the_same_secret_or_none_lets_in_who_was_invited() {
        for secret in [None, secret(3)] {
            let done = converse(secret.clone(), secret, 2);
            assert_eq!(done.initiator.unwrap(), Verdict::Welcome);
            assert!(
                matches!(done.owner.unwrap(), Step::Welcome { who: initiator, link: [8, ..], lane: 3 } if initiator == who("d0", 1))
            );
        }
    }

    #[test]
    fn another_secret_or_a_missing_one_is_denied_on_both_ends_before_any_name_is_told() {
        let (a, b) = (secret(3), secret(4));
        for (ours, theirs) in [(a.clone(), b.clone()), (a.clone(), None), (None, b)] {
            for expected in [2, 9] {
                let done = converse(ours.clone(), theirs.clone(), expected);
                assert_eq!(kinds(&done), (Kind::Denied, Kind::Denied));
                assert!(done.frames.iter().all(|frame| !frame.windows(2).any(|word| word == b"d0")));
            }
        }
    }

    #[test]
    fn another_life_is_told_without_a_name_and_with_a_secret_only_by_who_has_it() {
        for secret in [None, secret(3)] {
            let done = converse(secret.clone(), secret.clone(), 9);
            assert_eq!(done.initiator.unwrap(), Verdict::Restarted);
            assert!(matches!(done.owner.unwrap(), Step::Mistaken if secret.is_some()) || secret.is_none());
            assert!(done.frames.iter().all(|frame| !frame.windows(2).any(|word| word == b"d0")));
        }
    }

    #[test]
    fn a_recorded_conversation_is_refused() {
        let secret = secret(3);
        let recorded = converse(secret.clone(), secret.clone(), 2);
        let mut owning = OwnerHandshake::new(keys(2, secret), None);
        let (header, body) = frame(&recorded.frames[0]);
        assert!(matches!(owning.frame(header, body, &mut Vec::new()).unwrap(), Step::More));
        let (header, body) = frame(&recorded.frames[2]);
        let mut reply = Vec::new();
        assert_eq!(owning.frame(header, body, &mut reply).unwrap_err().kind(), Kind::Denied);
        assert_eq!(frame(&reply).0.frame, Frame::Refuse);
    }

    #[test]
    fn who_answers_for_another_and_cannot_prove_it_is_told_no_name() {
        for (secret, kind) in [(None, None), (secret(3), Some(Kind::Denied))] {
            let mut out = Vec::new();
            let mut initiator =
                InitiatorHandshake::start(keys(2, secret.clone()), who("d0", 1), ([8; 16], 0), &mut out)
                    .unwrap();
            let mut challenge =
                Challenge { version: VERSIONS.max, secret: secret.is_some(), nonce: [1; 32] }.encode();
            challenge.put(&[0; PROOF]);
            let header = Header { frame: Frame::Challenge, len: challenge.len(), id: 0 };
            let verdict = initiator.frame(header, &challenge, &mut out).unwrap();
            if kind.is_none() {
                assert_eq!(verdict, Some(Verdict::Restarted));
            } else {
                let answer = [&[MISTAKEN][..], &[0; PROOF]].concat();
                let header = Header { frame: Frame::Answer, len: answer.len(), id: 0 };
                let error = initiator.frame(header, &answer, &mut out).unwrap_err();
                assert_eq!(Some(error.kind()), kind);
            }
            assert!(!out.windows(2).any(|word| word == b"d0"));
        }
    }

    #[test]
    fn who_may_come_in_is_told_that_there_is_no_room_and_nobody_else() {
        let full = || Some(Error::new(Kind::Exhausted, "raise the limit"));
        for (invited, kind) in [(2, Kind::Exhausted), (9, Kind::Denied)] {
            let (mut hello, mut challenge, mut proof) = (Vec::new(), Vec::new(), Vec::new());
            let mut initiator =
                InitiatorHandshake::start(keys(2, None), who("d0", 1), ([8; 16], 0), &mut hello).unwrap();
            let mut owning = OwnerHandshake::new(keys(2, None), full());
            let (header, body) = frame(&hello);
            owning.frame(header, body, &mut challenge).unwrap();
            let (header, body) = frame(&challenge);
            initiator.frame(header, body, &mut proof).unwrap();
            if invited != 2 {
                let last = proof.len() - 1;
                proof[last] ^= 1;
            }
            let (header, body) = frame(&proof);
            assert_eq!(owning.frame(header, body, &mut Vec::new()).unwrap_err().kind(), kind);
        }
    }

    #[test]
    fn no_common_version_names_both_ranges() {
        let future = Hello {
            versions: Versions { min: 7, max: 9 },
            secret: false,
            lane: 0,
            link: [0; 16],
            nonce: [0; 32],
        }
        .encode();
        let mut owning = OwnerHandshake::new(keys(2, None), None);
        let header = Header { frame: Frame::Hello, len: future.len(), id: 0 };
        let error = owning.frame(header, &future, &mut Vec::new()).unwrap_err();
        assert_eq!(error.kind(), Kind::Incompatible);
        assert!(error.sentence().contains("2 to 2") && error.sentence().contains("7 to 9"), "{error}");
    }

    #[test]
    fn a_changed_bit_of_a_proof_keeps_the_stranger_out() {
        let secret = secret(3);
        let proof_bits = 8 * frame(&converse(secret.clone(), secret.clone(), 2).frames[2]).1.len();
        for bit in 0..proof_bits {
            let mut hello = Vec::new();
            let mut initiator =
                InitiatorHandshake::start(keys(2, secret.clone()), who("d0", 1), ([8; 16], 0), &mut hello)
                    .unwrap();
            let mut owning = OwnerHandshake::new(keys(2, secret.clone()), None);
            let (mut challenge, mut proof) = (Vec::new(), Vec::new());
            let (header, body) = frame(&hello);
            owning.frame(header, body, &mut challenge).unwrap();
            let (header, body) = frame(&challenge);
            initiator.frame(header, body, &mut proof).unwrap();
            proof[HEADER + bit / 8] ^= 1 << (bit % 8);
            let (header, body) = frame(&proof);
            assert!(owning.frame(header, body, &mut Vec::new()).is_err(), "bit {bit}");
        }
    }
}
