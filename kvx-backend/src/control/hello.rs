//! The handshake of a link: versions, identities, and the proofs of both ends.
//!
//! An initiator's first message already carries a proof. The proof is made with the invitation from
//! the target's metadata, and with the fleet's secret if there is one. A native library can only
//! answer at the initiator's address, so the target must trust that address before it has sent
//! anything. The first message may be a replay; the link is therefore not up before the initiator
//! has also proven itself over the target's nonce.
//!
//! An unauthenticated peer gets no information. On a socket it receives one constant answer; where
//! an answer would need its address, it receives none.

use kvx_core::backend::random_key;
use kvx_core::backend::wire::{Reader, Writer};
use kvx_core::{Error, ErrorKind, Identity, Result};

use super::errors::malformed;
use super::proof::{Claim, Keys, PROOF, Proof, secret_mismatch, unauthenticated};
use super::{ControlMessage, Refusal};

/// The first and the last protocol version that this release speaks.
pub const VERSIONS: (u16, u16) = (2, 2);

const GREETS: &str = "kvx link 2: the initiator greets";
const WELCOMES: &str = "kvx link 2: the target welcomes";
const CONFIRMS: &str = "kvx link 2: the initiator confirms";
const REFUSES: &str = "kvx link 2: the target knows the secret and another invitation";

/// The initiator's side of a handshake.
pub struct Greeting {
    keys: Keys,
    said: Vec<u8>,
}

impl Greeting {
    /// Begins a handshake. Also returns the body of [`ControlMessage::Hello`]. `rest` is the
    /// transport's own part of that body.
    pub fn new(me: &Identity, keys: Keys, rest: &[u8]) -> Result<(Self, Vec<u8>)> {
        Self::offering(VERSIONS, me, keys, rest)
    }

    fn offering(
        versions: (u16, u16),
        me: &Identity,
        keys: Keys,
        rest: &[u8],
    ) -> Result<(Self, Vec<u8>)> {
        let offered = encoded(versions);
        let mut said = random_key()?.to_vec();
        said.put_identity(me);
        said.put(rest);
        let mut body = Vec::with_capacity(said.len() + 80);
        body.put_block(&said);
        body.put(&keys.both(GREETS, &[&offered, &said]).proof());
        let of_secret = keys.secret(GREETS, &[&offered, &said]).map(|claim| claim.proof());
        body.put_block(of_secret.as_ref().map_or(&[], |proof| &proof[..]));
        Ok((Greeting { keys, said }, body))
    }

    /// Verifies the target's welcome. Returns the target transport's part of it, and the proof for
    /// [`ControlMessage::Confirm`].
    ///
    /// # Errors
    /// `Malformed`, also for a peer that does not prove to be the target.
    pub fn verify_welcome<'a>(&self, version: u16, body: &'a [u8]) -> Result<(&'a [u8], Proof)> {
        if !(VERSIONS.0..=VERSIONS.1).contains(&version) {
            return Err(malformed(format_args!(
                "version {version} does not lie between the offered {VERSIONS:?}"
            )));
        }
        let mut reader = Reader::new("welcome", body);
        let said = reader.block(body.len())?;
        let proof: Proof = reader.array()?;
        reader.end()?;
        if !self.keys.both(WELCOMES, &[&self.said, said]).holds(&proof) {
            return Err(malformed("the answer does not prove that it comes from the peer"));
        }
        let mut reader = Reader::new("welcome", said);
        let _its_nonce = reader.array::<32>()?;
        let rest = reader.bytes(reader.left())?;
        Ok((rest, self.keys.both(CONFIRMS, &[&self.said, said]).proof()))
    }

    /// Returns the error that a refusal means: `PeerRestarted` if the answering agent does not know
    /// the invitation in the peer's metadata. With a secret, this end believes only an agent that
    /// proves to have it.
    pub fn refusal_error(&self, why: Refusal, proof: &[u8]) -> Error {
        if why.kind != ErrorKind::PeerRestarted {
            return why.into_error();
        }
        match self.keys.secret(REFUSES, &[&self.said]) {
            Some(claim) if !claim.holds(proof) => secret_mismatch(),
            _ => ErrorKind::PeerRestarted.because(
                "the peer does not recognise this metadata: it was restarted; connect with its new \
                 metadata",
            ),
        }
    }
}

/// A hello whose proof is valid.
pub struct VerifiedHello<'a> {
    /// The initiator's identity.
    pub from: Identity,
    /// The initiator transport's own part.
    pub rest: &'a [u8],
    /// The answer, which may be sent later.
    pub welcome: WelcomeDraft,
}

/// The answer to a verified hello, without the part of the target's transport.
#[derive(Debug)]
pub struct WelcomeDraft {
    version: u16,
    said: Vec<u8>,
}

/// A hello that is rejected.
pub struct Rejection<'a> {
    /// The reason, for this end.
    pub why: Error,
    /// The answer to send if the initiator can be answered.
    pub refusal: Refusal,
    /// The proof that this end has the secret; empty for an unauthenticated initiator.
    pub proof: Vec<u8>,
    /// The initiator transport's part, if the initiator has proven to have the secret.
    pub rest: Option<&'a [u8]>,
}

/// Verifies an initiator's first message.
///
/// # Errors
/// The rejection, with its reason and the answer to send.
pub fn verify_hello<'a>(
    keys: &Keys,
    versions: (u16, u16),
    body: &'a [u8],
) -> Result<VerifiedHello<'a>, Box<Rejection<'a>>> {
    let turned_away = |why: Error, refusal: Refusal| {
        Box::new(Rejection { why, refusal, proof: Vec::new(), rest: None })
    };
    if versions.1 < VERSIONS.0 || versions.0 > VERSIONS.1 {
        let why = format!(
            "link versions {} to {} and {} to {} have none in common: update the older end",
            versions.0, versions.1, VERSIONS.0, VERSIONS.1
        );
        let why = ErrorKind::Incompatible.because(why);
        let refusal = Refusal::from(&why);
        return Err(turned_away(why, refusal));
    }
    let refusal = || Refusal {
        kind: ErrorKind::PeerRestarted,
        text: unauthenticated().sentence().to_owned(),
    };
    let (said, proof, of_secret) = read(body).map_err(|why| turned_away(why, refusal()))?;
    let offered = encoded(versions);
    let knows_secret =
        || keys.secret(GREETS, &[&offered, said]).is_some_and(|claim| claim.holds(of_secret));
    if keys.both(GREETS, &[&offered, said]).holds(&proof) {
        let (from, rest) = taken_apart(said).map_err(|why| turned_away(why, refusal()))?;
        let welcome = WelcomeDraft { version: versions.1.min(VERSIONS.1), said: said.to_vec() };
        return Ok(VerifiedHello { from, rest, welcome });
    }
    let mut away = turned_away(unauthenticated(), refusal());
    if knows_secret() {
        away.proof =
            keys.secret(REFUSES, &[said]).map_or_else(Vec::new, |claim| claim.proof().into());
        away.rest = taken_apart(said).ok().map(|(_, rest)| rest);
        away.why = ErrorKind::PeerRestarted.because(
            "a peer connected with the metadata of another agent, or of an earlier incarnation of \
             this one",
        );
    }
    Err(away)
}

/// Encodes versions for the proofs, so that an attacker on the path cannot choose an older one.
fn encoded((from, to): (u16, u16)) -> [u8; 4] {
    let mut bytes = [0; 4];
    bytes[..2].copy_from_slice(&from.to_le_bytes());
    bytes[2..].copy_from_slice(&to.to_le_bytes());
    bytes
}

/// Splits a hello into its content, the proof of the content, and the proof of the secret alone.
fn read(body: &[u8]) -> Result<(&[u8], Proof, &[u8])> {
    let mut reader = Reader::new("hello", body);
    let read = (reader.block(body.len())?, reader.array()?, reader.block(PROOF)?);
    reader.end()?;
    Ok(read)
}

fn taken_apart(said: &[u8]) -> Result<(Identity, &[u8])> {
    let mut reader = Reader::new("hello", said);
    let _nonce = reader.array::<32>()?;
    Ok((reader.identity()?, reader.bytes(reader.left())?))
}

impl<'a> VerifiedHello<'a> {
    /// Admits the initiator while `served`, the number of other peers, is below `most`.
    ///
    /// # Errors
    /// A rejection of kind `Exhausted`; the initiator may try again.
    pub fn admit(self, served: usize, most: usize) -> Result<Self, Box<Rejection<'a>>> {
        if served < most {
            return Ok(self);
        }
        let why = format!("the peer serves {most} others, which is its limit: try later");
        let why = ErrorKind::Exhausted.because(why);
        Err(Box::new(Rejection {
            refusal: Refusal::from(&why),
            why,
            proof: Vec::new(),
            rest: None,
        }))
    }
}

impl WelcomeDraft {
    /// Returns the version that both speak, the body of [`ControlMessage::Welcome`], and the claim
    /// that [`ControlMessage::Confirm`] must prove before the link is up.
    ///
    /// # Errors
    /// The operating system returns no random bytes.
    pub fn complete(self, keys: &Keys, rest: &[u8]) -> Result<(u16, Vec<u8>, Claim)> {
        let mut said = random_key()?.to_vec();
        said.put(rest);
        let mut body = Vec::with_capacity(said.len() + 40);
        body.put_block(&said);
        body.put(&keys.both(WELCOMES, &[&self.said, &said]).proof());
        Ok((self.version, body, keys.both(CONFIRMS, &[&self.said, &said])))
    }
}

impl Rejection<'_> {
    /// Returns the answer as a message.
    pub fn message(&self) -> ControlMessage<'_> {
        ControlMessage::Refuse { why: self.refusal.clone(), proof: &self.proof }
    }
}

#[cfg(test)]
mod tests {
    use kvx_core::backend::Invitation;
    use kvx_core::{Incarnation, Secret};

    use super::*;

    fn me() -> Identity {
        Identity { name: "reader".into(), incarnation: Incarnation([9; 16]) }
    }

    fn keys(invitation: u8, secret: Option<u8>) -> Keys {
        let secret = secret.map(|byte| Secret::from_bytes([byte; 32]));
        Keys::new(&Invitation::from_bytes([invitation; 32]), secret.as_ref())
    }

    const A: Option<u8> = Some(3);
    const B: Option<u8> = Some(4);

    /// Returns the initiator's result of a handshake.
    fn meet(ours: Keys, theirs: &Keys) -> Result<()> {
        let (greeting, body) = Greeting::new(&me(), ours, b"an address").unwrap();
        match verify_hello(theirs, VERSIONS, &body) {
            Ok(greeted) => {
                assert_eq!((&greeted.from, greeted.rest), (&me(), &b"an address"[..]));
                let (version, body, claim) = greeted.welcome.complete(theirs, b"news").unwrap();
                let (rest, proof) = greeting.verify_welcome(version, &body)?;
                assert_eq!(rest, b"news");
                assert!(claim.holds(&proof) && !claim.holds(&[0; 32]));
                Ok(())
            }
            Err(away) => Err(greeting.refusal_error(away.refusal.clone(), &away.proof)),
        }
    }

    #[test]
    fn only_an_initiator_with_invitation_and_secret_is_welcome() {
        for secret in [None, A] {
            meet(keys(1, secret), &keys(1, secret)).unwrap();
            assert_eq!(
                meet(keys(2, secret), &keys(1, secret)).unwrap_err().kind(),
                ErrorKind::PeerRestarted
            );
        }
        for invitation in [1, 2] {
            for (ours, theirs) in [(A, B), (A, None)] {
                let error = meet(keys(invitation, ours), &keys(1, theirs)).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Authentication, "{error}");
            }
        }
    }

    #[test]
    fn unauthenticated_peers_get_one_answer_and_their_content_is_not_read() {
        let target = keys(1, A);
        let answers = [keys(1, None), keys(1, B), keys(2, None), keys(2, B)].map(|stranger| {
            let (_, body) = Greeting::new(&me(), stranger, b"an address").unwrap();
            let away = verify_hello(&target, VERSIONS, &body).err().unwrap();
            assert!(away.rest.is_none());
            away.message().encode()
        });
        let garbage = verify_hello(&target, VERSIONS, b"garbage").err().unwrap().message().encode();
        assert!(answers.iter().all(|answer| *answer == garbage));
        // With the secret and old metadata the initiator learns that, and can be answered.
        let (_, body) = Greeting::new(&me(), keys(2, A), b"an address").unwrap();
        let away = verify_hello(&target, VERSIONS, &body).err().unwrap();
        assert_eq!(
            (away.rest, away.why.kind()),
            (Some(&b"an address"[..]), ErrorKind::PeerRestarted)
        );
    }

    #[test]
    fn every_altered_bit_of_a_hello_or_a_welcome_is_noticed() {
        let target = keys(1, A);
        let (greeting, body) = Greeting::new(&me(), keys(1, A), b"an address").unwrap();
        let proven = body.len() - 4 - PROOF; // the second proof counts only if the first fails
        for bit in 0..8 * proven {
            let mut altered = body.clone();
            altered[bit / 8] ^= 1 << (bit % 8);
            assert!(verify_hello(&target, VERSIONS, &altered).is_err(), "bit {bit}");
        }
        let (version, body, _) = verify_hello(&target, VERSIONS, &body)
            .ok()
            .unwrap()
            .welcome
            .complete(&target, b"news")
            .unwrap();
        for bit in 0..8 * body.len() {
            let mut altered = body.clone();
            altered[bit / 8] ^= 1 << (bit % 8);
            assert!(greeting.verify_welcome(version, &altered).is_err(), "bit {bit}");
        }
        assert!(
            greeting.verify_welcome(VERSIONS.1 + 1, &body).is_err()
                && greeting.verify_welcome(0, &body).is_err()
        );
    }

    #[test]
    fn a_replayed_hello_cannot_be_confirmed_with_the_recorded_proof() {
        let target = keys(1, A);
        let (greeting, hello) = Greeting::new(&me(), keys(1, A), b"").unwrap();
        let (version, welcome, _) = verify_hello(&target, VERSIONS, &hello)
            .ok()
            .unwrap()
            .welcome
            .complete(&target, b"")
            .unwrap();
        let (_, recorded) = greeting.verify_welcome(version, &welcome).unwrap();
        let (_, _, again) = verify_hello(&target, VERSIONS, &hello)
            .ok()
            .unwrap()
            .welcome
            .complete(&target, b"")
            .unwrap();
        assert!(!again.holds(&recorded));
    }

    #[test]
    fn unknown_versions_are_reported_before_the_body_is_read() {
        for versions in [(7, 9), (0, 0), (3, 1), (u16::MAX, 0)] {
            let away =
                verify_hello(&keys(1, None), versions, b"as version 7 says it").err().unwrap();
            assert_eq!(away.refusal.kind, ErrorKind::Incompatible, "{versions:?}");
        }
        let (_, body) = Greeting::offering((0, 9), &me(), keys(1, None), b"").unwrap();
        assert_eq!(
            verify_hello(&keys(1, None), (0, 9), &body).ok().unwrap().welcome.version,
            VERSIONS.1
        );
    }

    #[test]
    fn an_initiator_above_the_limit_receives_exhausted() {
        let target = keys(1, None);
        let (_, body) = Greeting::new(&me(), keys(1, None), b"").unwrap();
        let comes = |served| {
            verify_hello(&target, VERSIONS, &body).and_then(|greeted| greeted.admit(served, 64))
        };
        assert!(comes(0).is_ok() && comes(63).is_ok());
        for served in [64, 65] {
            let away = comes(served).err().unwrap();
            assert_eq!(
                (away.why.kind(), away.refusal.kind),
                (ErrorKind::Exhausted, ErrorKind::Exhausted)
            );
            assert!(away.refusal.text.contains("serves 64 others") && away.proof.is_empty());
        }
    }

    #[test]
    fn a_hello_with_altered_versions_is_unauthenticated() {
        let (_, body) = Greeting::offering((0, 9), &me(), keys(1, A), b"").unwrap();
        for versions in [(0, 2), (2, 9), (2, 2), (1, 9)] {
            let away = verify_hello(&keys(1, A), versions, &body).err().unwrap();
            assert!(away.rest.is_none() && away.proof.is_empty(), "{versions:?}");
        }
    }
}
