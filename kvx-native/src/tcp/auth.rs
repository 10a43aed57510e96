//! The handshake of a lane: versions, the shared secret, and who is who. Pure: bytes in, bytes out.
//!
//! With a shared secret each message is proved by HMAC-SHA-256 over everything said so far, under a label of its own:
//! the owner proves first (over the initiator's fresh nonce), then the initiator (over the owner's fresh nonce and the
//! identities), then the owner once more over its answer. No identity leaves an end before the other has proved itself,
//! and a recorded conversation fails at the fresh nonces. The bytes that follow are not protected: the secret keeps
//! strangers out, not eavesdroppers.

use hmac::{Hmac, KeyInit, Mac};
use kvx_core::wire::{Reader, Writer};
use kvx_core::{Error, Identity, Incarnation, Kind, Result, Secret};
use sha2::Sha256;

use super::frames::{
    Answer, Challenge, Frame, Header, Hello, VERSIONS, Versions, put_frame, put_refuse, read_refuse,
};

/// Bytes of a proof.
const PROOF: usize = 32;

#[derive(Clone, Copy)]
enum Label {
    Owner,
    Initiator,
    Answer,
}

impl Label {
    fn bytes(self) -> &'static [u8] {
        match self {
            Label::Owner => b"kvx tcp 1: the owner proves itself",
            Label::Initiator => b"kvx tcp 1: the initiator proves itself",
            Label::Answer => b"kvx tcp 1: the owner answers",
        }
    }
}

/// What was said so far, and the secret to prove it with.
struct Transcript {
    secret: Option<Secret>,
    said: Vec<u8>,
}

impl Transcript {
    fn add(&mut self, message: &[u8]) {
        self.said.put_block(message);
    }

    fn mac(&self, label: Label) -> Option<Hmac<Sha256>> {
        let secret = self.secret.as_ref()?;
        let mut mac =
            <Hmac<Sha256> as KeyInit>::new_from_slice(secret.bytes()).expect("HMAC takes keys of any length");
        mac.update(label.bytes());
        mac.update(&self.said);
        Some(mac)
    }

    /// Appends the proof, which is empty without a secret.
    fn prove(&self, label: Label, out: &mut Vec<u8>) {
        match self.mac(label) {
            Some(mac) => out.put_block(&mac.finalize().into_bytes()),
            None => out.put_block(&[]),
        }
    }

    /// Checks a proof in a time that does not depend on it.
    fn check(&self, label: Label, proof: &[u8]) -> Result<()> {
        match self.mac(label) {
            Some(mac) => mac.verify_slice(proof).map_err(|_| {
                Error::new(Kind::Denied, "the shared secrets of the two agents differ: give both the same")
            }),
            None if proof.is_empty() => Ok(()),
            None => {
                Err(Error::new(Kind::Malformed, "malformed handshake: a proof where nobody has a secret"))
            }
        }
    }
}

/// Splits a message into what is proved and the proof.
fn split_proof<'a>(what: &'static str, body: &'a [u8], head: usize) -> Result<(&'a [u8], &'a [u8])> {
    let mut reader = Reader::new(what, body);
    let head = reader.bytes(head)?;
    let proof = reader.block(PROOF)?;
    reader.end()?;
    Ok((head, proof))
}

/// Fresh random bytes.
pub(super) fn nonce<const N: usize>() -> Result<[u8; N]> {
    let mut nonce = [0; N];
    let got = rustix::rand::getrandom(&mut nonce, rustix::rand::GetRandomFlags::empty())
        .map_err(|error| Error::os("the operating system gave no random bytes", error))?;
    if got != nonce.len() {
        return Err(Error::new(Kind::Native, "the operating system gave too few random bytes; try again"));
    }
    Ok(nonce)
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
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Welcome,
    Restarted(Incarnation),
}

/// The initiator's side of a handshake.
pub(super) struct InitiatorHandshake {
    transcript: Transcript,
    own: Identity,
    expected: Identity,
    challenged: bool,
}

impl InitiatorHandshake {
    /// Says hello.
    pub(super) fn start(
        secret: Option<Secret>,
        own: Identity,
        expected: Identity,
        (link, lane): ([u8; 16], u8),
        out: &mut Vec<u8>,
    ) -> Result<Self> {
        let hello =
            Hello { versions: VERSIONS, secret: secret.is_some(), link, lane, nonce: nonce()? }.encode();
        put_frame(out, Frame::Hello, 0, |out| out.put(&hello));
        let mut transcript = Transcript { secret, said: Vec::new() };
        transcript.add(&hello);
        Ok(InitiatorHandshake { transcript, own, expected, challenged: false })
    }

    /// Takes a frame of the owner's. `Some`: the end. An error ends the connection; `out` may hold a last word.
    pub(super) fn frame(
        &mut self,
        header: Header,
        body: &[u8],
        out: &mut Vec<u8>,
    ) -> Result<Option<Verdict>> {
        match (header.frame, self.challenged) {
            (Frame::Refuse, _) => Err(read_refuse(body)),
            (Frame::Challenge, false) => {
                self.challenged = true;
                self.challenge(body, out).inspect_err(|error| put_refuse(out, error))?;
                Ok(None)
            }
            (Frame::Answer, true) => self.answer(body).map(Some),
            _ => Err(unexpected(header)),
        }
    }

    fn challenge(&mut self, body: &[u8], out: &mut Vec<u8>) -> Result<()> {
        let mut reader = Reader::new("Challenge", body);
        let challenge = Challenge::decode(&mut reader)?;
        let (head, proof) = split_proof("Challenge", body, body.len() - reader.left())?;
        if !(VERSIONS.min..=VERSIONS.max).contains(&challenge.version) {
            let chosen = Versions { min: challenge.version, max: challenge.version };
            return Err(no_version(chosen, VERSIONS));
        }
        match (self.transcript.secret.is_some(), challenge.secret) {
            (true, false) => return Err(one_sided("this agent")),
            (false, true) => return Err(one_sided("the peer")),
            _ => {}
        }
        self.transcript.add(head);
        self.transcript.check(Label::Owner, proof)?;
        let mut message = Vec::new();
        message.put_identity(&self.own);
        message.put_identity(&self.expected);
        self.transcript.add(&message);
        self.transcript.prove(Label::Initiator, &mut message);
        put_frame(out, Frame::Proof, 0, |out| out.put(&message));
        Ok(())
    }

    fn answer(&mut self, body: &[u8]) -> Result<Verdict> {
        let mut reader = Reader::new("Answer", body);
        let _its_own_word = reader.u8()?;
        let who = reader.identity()?;
        let (head, proof) = split_proof("Answer", body, body.len() - reader.left())?;
        self.transcript.add(head);
        self.transcript.check(Label::Answer, proof)?;
        match Answer::of(&who, &self.expected) {
            Answer::Welcome => Ok(Verdict::Welcome),
            Answer::Restarted => Ok(Verdict::Restarted(who.incarnation)),
            Answer::Stranger => Err(Error::new(
                Kind::PeerLost,
                format!(
                    "agent {} answers where {} was: connect with its new metadata",
                    who.name, self.expected.name
                ),
            )),
        }
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
    Mistaken { who: Identity },
}

/// The owner's side of a handshake.
pub(super) struct OwnerHandshake {
    transcript: Transcript,
    own: Identity,
    hello: Option<Hello>,
    /// Why nobody may come in, if that is so.
    full: Option<Error>,
}

impl OwnerHandshake {
    pub(super) fn new(secret: Option<Secret>, own: Identity, full: Option<Error>) -> Self {
        OwnerHandshake { transcript: Transcript { secret, said: Vec::new() }, own, hello: None, full }
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
        if let Some(full) = self.full.take() {
            return Err(full);
        }
        let version = VERSIONS.common(hello.versions).ok_or_else(|| no_version(VERSIONS, hello.versions))?;
        match (self.transcript.secret.is_some(), hello.secret) {
            (true, false) => return Err(one_sided("the owner")),
            (false, true) => return Err(one_sided("the initiator")),
            _ => {}
        }
        let mut message = Challenge { version, secret: hello.secret, nonce: nonce()? }.encode();
        self.transcript.add(body);
        self.transcript.add(&message);
        self.transcript.prove(Label::Owner, &mut message);
        put_frame(out, Frame::Challenge, 0, |out| out.put(&message));
        self.hello = Some(hello);
        Ok(())
    }

    fn proof(&mut self, body: &[u8], out: &mut Vec<u8>) -> Result<Step> {
        let mut reader = Reader::new("Proof", body);
        let (who, expected) = (reader.identity()?, reader.identity()?);
        let (head, proof) = split_proof("Proof", body, body.len() - reader.left())?;
        self.transcript.add(head);
        self.transcript.check(Label::Initiator, proof)?;
        let answer = Answer::of(&self.own, &expected);
        let mut message = vec![answer as u8];
        message.put_identity(&self.own);
        self.transcript.add(&message);
        self.transcript.prove(Label::Answer, &mut message);
        put_frame(out, Frame::Answer, 0, |out| out.put(&message));
        let (link, lane) = self.hello.as_ref().map_or(([0; 16], 0), |hello| (hello.link, hello.lane));
        Ok(if answer == Answer::Welcome { Step::Welcome { who, link, lane } } else { Step::Mistaken { who } })
    }
}

#[cfg(test)]
mod tests {
    use super::super::frames::HEADER;
    use super::*;

    fn who(name: &str, life: u8) -> Identity {
        Identity { name: name.into(), incarnation: Incarnation([life; 16]) }
    }

    fn secret(text: &str) -> Option<Secret> {
        Some(Secret::new(text.as_bytes().to_vec()).unwrap())
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

    fn converse(ours: Option<Secret>, theirs: Option<Secret>, expected: Identity) -> Conversation {
        let mut frames = vec![Vec::new()];
        let mut initiator =
            InitiatorHandshake::start(ours, who("d0", 1), expected, ([8; 16], 3), &mut frames[0]).unwrap();
        let mut owning = OwnerHandshake::new(theirs, who("p0", 2), None);
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
    fn the_same_secret_or_none_lets_in() {
        for secret in [None, secret("sixteen bytes ok")] {
            let done = converse(secret.clone(), secret, who("p0", 2));
            assert_eq!(done.initiator.unwrap(), Verdict::Welcome);
            assert!(
                matches!(done.owner.unwrap(), Step::Welcome { who: initiator, link: [8, ..], lane: 3 } if initiator == who("d0", 1))
            );
        }
    }

    #[test]
    fn another_secret_or_a_missing_one_is_denied_on_both_ends_before_any_name_is_told() {
        let (a, b) = (secret("sixteen bytes ok"), secret("seventeen bytes!!"));
        for (ours, theirs) in [(a.clone(), b.clone()), (a.clone(), None), (None, b)] {
            let done = converse(ours, theirs, who("p0", 2));
            assert_eq!(kinds(&done), (Kind::Denied, Kind::Denied));
            for message in &done.frames {
                assert!(!message.windows(2).any(|word| word == b"p0" || word == b"d0"));
            }
        }
    }

    #[test]
    fn a_recorded_conversation_is_refused() {
        let secret = secret("sixteen bytes ok");
        let recorded = converse(secret.clone(), secret.clone(), who("p0", 2));
        let mut owning = OwnerHandshake::new(secret, who("p0", 2), None);
        let (header, body) = frame(&recorded.frames[0]);
        assert!(matches!(owning.frame(header, body, &mut Vec::new()).unwrap(), Step::More));
        let (header, body) = frame(&recorded.frames[2]);
        let mut reply = Vec::new();
        assert_eq!(owning.frame(header, body, &mut reply).unwrap_err().kind(), Kind::Denied);
        assert_eq!(frame(&reply).0.frame, Frame::Refuse);
    }

    #[test]
    fn an_owner_without_the_secret_cannot_answer_for_another() {
        let secret = secret("sixteen bytes ok");
        // Reflects the initiator's own proof.
        let mut hello = Vec::new();
        let mut initiator =
            InitiatorHandshake::start(secret.clone(), who("d0", 1), who("p0", 2), ([8; 16], 0), &mut hello)
                .unwrap();
        let mut challenge = Challenge { version: 1, secret: true, nonce: [1; 32] }.encode();
        challenge.put_block(&[0; PROOF]);
        let header = Header { frame: Frame::Challenge, len: challenge.len(), id: 0 };
        assert_eq!(initiator.frame(header, &challenge, &mut Vec::new()).unwrap_err().kind(), Kind::Denied);
    }

    #[test]
    fn another_life_or_another_agent_is_told_apart() {
        let restarted = converse(None, None, who("p0", 9));
        assert_eq!(restarted.initiator.unwrap(), Verdict::Restarted(Incarnation([2; 16])));
        assert!(matches!(restarted.owner.unwrap(), Step::Mistaken { .. }));
        let stranger = converse(None, None, who("p1", 2));
        let error = stranger.initiator.unwrap_err();
        assert_eq!(error.kind(), Kind::PeerLost);
        assert!(error.sentence().contains("p0") && error.sentence().contains("p1"), "{error}");
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
        let mut owning = OwnerHandshake::new(None, who("p0", 2), None);
        let header = Header { frame: Frame::Hello, len: future.len(), id: 0 };
        let error = owning.frame(header, &future, &mut Vec::new()).unwrap_err();
        assert_eq!(error.kind(), Kind::Incompatible);
        assert!(error.sentence().contains("1 to 1") && error.sentence().contains("7 to 9"), "{error}");
    }

    #[test]
    fn a_changed_bit_of_a_proof_keeps_the_stranger_out() {
        let secret = secret("sixteen bytes ok");
        let proof_bits = 8 * frame(&converse(secret.clone(), secret.clone(), who("p0", 2)).frames[2]).1.len();
        for bit in 0..proof_bits {
            let mut hello = Vec::new();
            let mut initiator = InitiatorHandshake::start(
                secret.clone(),
                who("d0", 1),
                who("p0", 2),
                ([8; 16], 0),
                &mut hello,
            )
            .unwrap();
            let mut owning = OwnerHandshake::new(secret.clone(), who("p0", 2), None);
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
