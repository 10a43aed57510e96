//! The handshake of a lane: who may come, who comes, and what is sealed. Pure: bytes in, bytes out.
//!
//! It is Noise (kvx-noise says which) by a key of 256 bits that both ends make of the owner's
//! invitation and of the secret, if there is one. The initiator's first message proves that its
//! sender had the key; before that an owner computes no Diffie-Hellman, and tells one answer that
//! is always the same, or which versions it speaks. The owner's message proves the same, and that
//! it is not a recorded one; then the initiator's, by fresh keys, tells who it is. An initiator
//! with a secret says hello a second time in its first message, by the secret alone: an owner that
//! finds only this one right is not whom the metadata invited to, proves that it has the secret all
//! the same, and the initiator knows that it has restarted.

use kvx_backend::control::Refusal;
use kvx_backend::control::proof::{Keys, secret_mismatch, unauthenticated};
use kvx_core::backend::wire::{Reader, Writer};
use kvx_core::{Error, ErrorKind, Identity, Result};
use kvx_noise::{KEY, NoiseHandshake, Seals, TAG};

use crate::tcp::frames::{
    Frame, Header, Hello, VERSIONS, Versions, put_frame, put_refuse, read_refuse,
};
use crate::tcp::seal::Seal;

const INVITED: &str = "kvx tcp 3: the key by invitation and secret";
const MISTAKEN: &str = "kvx tcp 3: the key by the secret alone";

/// First byte of what an owner's WELCOME says.
const COME_IN: u8 = 0;
const NO_ROOM: u8 = 1;

/// What is agreed and by what it is sealed, when a handshake is done.
pub(crate) type Agreement = (Seal, Box<Seals>);

fn unexpected(header: Header) -> Error {
    Error::new(ErrorKind::Malformed, format!("malformed handshake: {:?} out of turn", header.frame))
}

/// Only one end has a secret.
fn one_sided(who: &str) -> Error {
    Error::new(
        ErrorKind::Authentication,
        format!(
            "{who} has a shared secret and the other agent has none: give both the same, or neither"
        ),
    )
}

fn no_version(owner: Versions, initiator: Versions) -> Error {
    Error::new(
        ErrorKind::Incompatible,
        format!(
            "the owner speaks versions {owner} of the TCP protocol, the initiator {initiator}: \
             bring both to releases of kvx that overlap"
        ),
    )
}

fn not_the_peer() -> Error {
    let why = "whoever answers has not proven to be the peer, or its answer was altered: find out who is between";
    Error::new(ErrorKind::Malformed, why)
}

fn invited_key(keys: &Keys) -> [u8; KEY] {
    keys.both(INVITED, &[]).proof()
}

fn mistaken_key(keys: &Keys) -> Option<[u8; KEY]> {
    Some(keys.secret(MISTAKEN, &[])?.proof())
}

/// What the hello by the secret alone is bound to: all that was said before it.
fn before_mistaken(head: &[u8], invited: &[u8]) -> Vec<u8> {
    [head, invited].concat()
}

/// What the initiator learns at the end.
pub(crate) enum InitiatorVerdict {
    Welcome(Agreement),
    /// Whoever answers is not whom the metadata invited to.
    Restarted,
}

/// How an initiator's handshake stands.
enum Asked {
    /// It has said hello, by the secret alone too if it has one.
    ToEnter { invited: Box<NoiseHandshake>, mistaken: Option<Box<NoiseHandshake>> },
    /// It has said who it is.
    Confirmed(Option<Agreement>),
}

/// The initiator's side of a handshake.
pub(crate) struct InitiatorHandshake {
    own: Identity,
    link: [u8; 16],
    lane: u8,
    /// What it wants sealed at least.
    wish: Seal,
    asked: Asked,
}

impl InitiatorHandshake {
    /// Says hello.
    pub(crate) fn start(
        keys: &Keys,
        own: Identity,
        (link, lane): ([u8; 16], u8),
        wish: Seal,
        out: &mut Vec<u8>,
    ) -> Result<Self> {
        let head = Hello::head(VERSIONS);
        let (mut by_both, mut by_secret) = (Vec::new(), Vec::new());
        let mut invited = NoiseHandshake::initiator(&invited_key(keys), &head)?;
        invited.write(&[wish.number()], &mut by_both)?;
        let mut mistaken = None;
        if let Some(key) = mistaken_key(keys) {
            let mut noise = NoiseHandshake::initiator(&key, &before_mistaken(&head, &by_both))?;
            noise.write(&[], &mut by_secret)?;
            mistaken = Some(Box::new(noise));
        }
        let hello = Hello { versions: VERSIONS, invited: &by_both, mistaken: &by_secret };
        put_frame(out, Frame::Hello, 0, |out| out.put(&hello.encode()));
        let asked = Asked::ToEnter { invited: Box::new(invited), mistaken };
        Ok(InitiatorHandshake { own, link, lane, wish, asked })
    }

    /// Takes a frame of the owner's. `Some`: the end. An error ends the connection.
    pub(crate) fn frame(
        &mut self,
        header: Header,
        body: &[u8],
        out: &mut Vec<u8>,
    ) -> Result<Option<InitiatorVerdict>> {
        match (header.frame, &mut self.asked) {
            (Frame::Refuse, Asked::ToEnter { mistaken, .. }) => {
                refused(body, mistaken.is_some()).map(Some)
            }
            (Frame::Mistaken, Asked::ToEnter { mistaken: Some(noise), .. }) => {
                noise.read(body).ok_or_else(not_the_peer)?;
                Ok(Some(InitiatorVerdict::Restarted))
            }
            (Frame::Welcome, Asked::ToEnter { invited, .. }) => {
                let said = invited.read(body).ok_or_else(not_the_peer)?;
                let seal = read_welcome(&said, self.wish)?;
                let mut seals = invited.seals();
                let mut confirm = self.link.to_vec();
                confirm.put_u8(self.lane);
                confirm.put_identity(&self.own);
                put_frame(out, Frame::Confirm, 0, |out| seals.sealer.seal(&confirm, out));
                self.asked = Asked::Confirmed(Some((seal, Box::new(seals))));
                Ok(None)
            }
            (Frame::Entered, Asked::Confirmed(sealed)) => {
                let (seal, mut seals) = sealed.take().ok_or_else(|| unexpected(header))?;
                seals.opener.open(&mut body.to_vec())?;
                Ok(Some(InitiatorVerdict::Welcome((seal, seals))))
            }
            _ => Err(unexpected(header)),
        }
    }
}

/// A refusal proves nothing. It says whether the owner has a secret; with one, only who has it is
/// told of a restart.
fn refused(body: &[u8], have_secret: bool) -> Result<InitiatorVerdict> {
    let error = read_refuse(body);
    match (error.kind(), have_secret) {
        (ErrorKind::PeerRestarted, false) => Ok(InitiatorVerdict::Restarted),
        (ErrorKind::PeerRestarted, true) => Err(one_sided("this agent")),
        (ErrorKind::Authentication, false) => Err(one_sided("the peer")),
        (ErrorKind::Authentication, true) => Err(secret_mismatch()),
        (ErrorKind::Incompatible, _) => Err(error),
        // No owner says anything else to a stranger.
        _ => Err(not_the_peer()),
    }
}

/// What is sealed, if there is room.
fn read_welcome(said: &[u8], wish: Seal) -> Result<Seal> {
    let mut reader = Reader::new("Welcome", said);
    if reader.u8()? == NO_ROOM {
        return Err(Refusal::decode(&mut reader)?.into_error());
    }
    let (version, seal) = (reader.u16()?, Seal::of_number(reader.u8()?)?);
    reader.end()?;
    if !(VERSIONS.min..=VERSIONS.max).contains(&version) {
        return Err(no_version(Versions { min: version, max: version }, VERSIONS));
    }
    if seal < wish {
        return Err(reader.malformed("less is sealed than was asked for"));
    }
    Ok(seal)
}

/// How a handshake stands, on the owner's side.
pub(crate) enum Step {
    /// It goes on.
    More,
    /// The initiator is who it says, and this is the `lane`-th lane of its `link`.
    Entered { who: Identity, link: [u8; 16], lane: u8, seals: Agreement },
    /// Answered that it wants somebody else: close when that is sent.
    Mistaken,
}

/// The owner's side of a handshake.
pub(crate) struct OwnerHandshake {
    keys: Keys,
    /// What it wants sealed at least.
    wish: Seal,
    /// It has welcomed an initiator that has the key.
    welcomed: Option<Agreement>,
    /// Why nobody may come in, if that is so: told to who may.
    full: Option<Error>,
}

impl OwnerHandshake {
    pub(crate) fn new(keys: Keys, wish: Seal, full: Option<Error>) -> Self {
        OwnerHandshake { keys, wish, welcomed: None, full }
    }

    /// Returns true if the initiator has said hello, by the key.
    pub(crate) fn has_said_hello(&self) -> bool {
        self.welcomed.is_some()
    }

    /// Takes a frame of the initiator's. An error ends the connection; `out` holds a last word.
    pub(crate) fn frame(&mut self, header: Header, body: &[u8], out: &mut Vec<u8>) -> Result<Step> {
        match (header.frame, self.welcomed.take()) {
            (Frame::Hello, None) => self.hello(body, out),
            (Frame::Confirm, Some(sealed)) => confirm(body, sealed, out),
            _ => Err(unexpected(header)),
        }
    }

    fn hello(&mut self, body: &[u8], out: &mut Vec<u8>) -> Result<Step> {
        if let Ok((theirs, _)) = Hello::versions(body)
            && VERSIONS.common(theirs).is_none()
        {
            let error = no_version(VERSIONS, theirs);
            put_refuse(out, &error);
            return Err(error);
        }
        // What a stranger is told says no more of its words than that they were those of one.
        let kind = if self.keys.have_secret() {
            ErrorKind::Authentication
        } else {
            ErrorKind::PeerRestarted
        };
        let refuse = |out: &mut Vec<u8>| {
            put_refuse(out, &Error::new(kind, unauthenticated().sentence().to_owned()))
        };
        let hello = Hello::decode(body).inspect_err(|_| refuse(out))?;
        let head = Hello::head(hello.versions);
        let by_secret = match mistaken_key(&self.keys) {
            None => hello.mistaken.is_empty().then_some(None),
            Some(key) => {
                let mut noise =
                    NoiseHandshake::responder(&key, &before_mistaken(&head, hello.invited))?;
                noise.read(hello.mistaken).map(|_| Some(noise))
            }
        };
        if let Some(by_secret) = by_secret {
            let mut noise = NoiseHandshake::responder(&invited_key(&self.keys), &head)?;
            if let Some(said) = noise.read(hello.invited) {
                return self.welcome(noise, hello.versions, &said, out);
            }
            if let Some(mut noise) = by_secret {
                let mut answer = Vec::new();
                noise.write(&[], &mut answer)?;
                put_frame(out, Frame::Mistaken, 0, |out| out.put(&answer));
                return Ok(Step::Mistaken);
            }
        }
        refuse(out);
        Err(unauthenticated())
    }

    fn welcome(
        &mut self,
        mut noise: NoiseHandshake,
        theirs: Versions,
        said: &[u8],
        out: &mut Vec<u8>,
    ) -> Result<Step> {
        let mut reader = Reader::new("Hello", said);
        let seal = Seal::of_number(reader.u8()?)?.max(self.wish);
        reader.end()?;
        let mut says = Vec::new();
        match &self.full {
            Some(full) => {
                says.put_u8(NO_ROOM);
                Refusal::from(full).encode(&mut says);
            }
            None => {
                says.put_u8(COME_IN);
                says.put_u16(VERSIONS.common(theirs).unwrap_or(VERSIONS.max));
                says.put_u8(seal.number());
            }
        }
        let mut message = Vec::new();
        noise.write(&says, &mut message)?;
        put_frame(out, Frame::Welcome, 0, |out| out.put(&message));
        match self.full.take() {
            Some(full) => Err(full),
            None => {
                self.welcomed = Some((seal, Box::new(noise.seals())));
                Ok(Step::More)
            }
        }
    }
}

/// The initiator's last word: no recorded one can say it.
fn confirm(body: &[u8], (seal, mut seals): Agreement, out: &mut Vec<u8>) -> Result<Step> {
    let mut said = body.to_vec();
    seals.opener.open(&mut said).map_err(|_| unauthenticated())?;
    said.truncate(body.len() - TAG);
    let mut reader = Reader::new("Confirm", &said);
    let (link, lane, who) = (reader.array()?, reader.u8()?, reader.identity()?);
    reader.end()?;
    put_frame(out, Frame::Entered, 0, |out| seals.sealer.seal_end(0, out));
    Ok(Step::Entered { who, link, lane, seals: (seal, seals) })
}

#[cfg(test)]
mod tests {
    use kvx_core::backend::Invitation;
    use kvx_core::{Incarnation, Secret};

    use super::*;
    use crate::tcp::frames::HEADER;

    /// The initiator's. Longer than what random bytes spell.
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
        /// What its last step was.
        owner: Result<Step>,
        /// Every frame, the initiator's first.
        frames: Vec<Vec<u8>>,
    }

    /// The frames as they are; `alter` sees each before it arrives.
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
        let cut_off = || Error::new(ErrorKind::PeerLost, "no whole frame came");
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

    /// Between one that was invited by life `expected` and life 2 of the owner.
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
    fn the_same_secret_or_none_lets_in_who_was_invited() {
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
    fn the_stricter_wish_counts() {
        for (_, ours) in Seal::NAMED {
            for (_, theirs) in Seal::NAMED {
                let done =
                    converse_altered(&keys(2, None), &keys(2, None), (ours, theirs), |_, _| {});
                let Ok(InitiatorVerdict::Welcome((at_initiator, _))) = done.initiator else {
                    panic!("not welcome")
                };
                let Ok(Step::Entered { seals: (at_owner, _), .. }) = done.owner else {
                    panic!("not in")
                };
                assert_eq!((at_initiator, at_owner), (ours.max(theirs), ours.max(theirs)));
            }
        }
        // An owner that has the key and wants less than it was asked for is not obeyed.
        let says =
            [&[COME_IN][..], &VERSIONS.max.to_le_bytes(), &[Seal::Control.number()]].concat();
        assert_eq!(kind(&read_welcome(&says, Seal::All)), Some(ErrorKind::Malformed));
    }

    #[test]
    fn another_secret_or_a_missing_one_is_denied_on_both_ends_before_any_name_is_told() {
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
    fn another_life_is_told_without_a_name_and_with_a_secret_only_by_who_has_it() {
        for secret in [None, secret(3)] {
            let done = converse(secret.clone(), secret.clone(), 9);
            assert!(!tells_a_name(&done));
            assert!(matches!(done.initiator, Ok(InitiatorVerdict::Restarted)));
            assert_eq!(matches!(done.owner, Ok(Step::Mistaken)), secret.is_some());
        }
        // Without it that is not believed.
        let mut restarted = Vec::new();
        put_refuse(&mut restarted, &Error::new(ErrorKind::PeerRestarted, "restarted"));
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
    fn strangers_get_one_answer_whatever_they_say() {
        for theirs in [None, secret(3)] {
            let answer = |hello: &[u8]| {
                let mut answer = Vec::new();
                let header = Header { frame: Frame::Hello, len: hello.len(), id: 0 };
                let mut owner = OwnerHandshake::new(keys(2, theirs.clone()), Seal::None, None);
                assert!(
                    owner.frame(header, hello, &mut answer).is_err() && !owner.has_said_hello()
                );
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
        assert_ne!(welcome, recorded.frames[1], "what it is answered it cannot read");
        let (header, body) = frame(&recorded.frames[2]);
        let mut reply = Vec::new();
        assert_eq!(kind(&owning.frame(header, body, &mut reply)), Some(ErrorKind::Authentication));
        assert!(reply.is_empty());
    }

    #[test]
    fn who_answers_for_another_and_cannot_prove_it_is_told_no_name() {
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
            assert_eq!(
                kind(&initiator.frame(welcome, &[3; 52], &mut out)),
                Some(ErrorKind::Malformed)
            );
            assert!(out.is_empty());
        }
    }

    #[test]
    fn who_may_come_in_is_told_that_there_is_no_room_and_nobody_else() {
        for (invited, expected) in [(2, ErrorKind::Exhausted), (9, ErrorKind::PeerRestarted)] {
            let (mut initiator, hello) = greets(&keys(invited, None), Seal::None);
            let full = Some(Error::new(ErrorKind::Exhausted, "raise the limit"));
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
        assert!(
            error.sentence().contains("3 to 3") && error.sentence().contains("7 to 9"),
            "{error}"
        );
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
                    assert!(
                        number == 3 || !matches!(done.owner, Ok(Step::Entered { .. })),
                        "{case}"
                    );
                }
            }
        }
    }
}
