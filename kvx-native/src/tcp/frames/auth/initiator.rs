//! The initiator's side of a handshake.

use kvx_backend::control::Refusal;
use kvx_backend::control::proof::{Keys, secret_mismatch};
use kvx_core::backend::wire::{Reader, Writer};
use kvx_core::{Error, ErrorKind, Identity, Result};
use kvx_noise::NoiseHandshake;

use super::{
    Agreement, NO_ROOM, before_mistaken, invited_key, mistaken_key, no_version, unexpected,
};
use crate::tcp::frames::{Frame, Header, Hello, VERSIONS, Versions, put_frame, read_refuse};
use crate::tcp::seal::Seal;

/// Returns the error that only one end has a secret.
fn one_sided(who: &str) -> Error {
    ErrorKind::Authentication.because(format!(
        "{who} has a shared secret and the other agent has none: give both the same, or neither"
    ))
}

fn not_the_peer() -> Error {
    let why = "the answer was altered, or does not prove that it comes from the peer: look for a \
               proxy or an attacker on the path";
    ErrorKind::Malformed.because(why)
}

/// The result of the initiator's handshake.
pub(crate) enum InitiatorVerdict {
    Welcome(Agreement),
    /// The agent that answers is not the one that the metadata names.
    Restarted,
}

/// The state of an initiator's handshake.
enum HandshakeState {
    /// The initiator has sent its hello, and a second one with the secret alone if it has one.
    ToEnter { invited: Box<NoiseHandshake>, mistaken: Option<Box<NoiseHandshake>> },
    /// The initiator has sent its identity.
    Confirmed(Option<Agreement>),
}

/// The initiator's side of a handshake.
pub(crate) struct InitiatorHandshake {
    own: Identity,
    link: [u8; 16],
    lane: u8,
    /// The weakest seal that the initiator accepts.
    wish: Seal,
    state: HandshakeState,
}

impl InitiatorHandshake {
    /// Writes the hello to `out`.
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
        let state = HandshakeState::ToEnter { invited: Box::new(invited), mistaken };
        Ok(InitiatorHandshake { own, link, lane, wish, state })
    }

    /// Takes a frame from the owner. Returns the verdict at the end of the handshake. An error ends
    /// the connection.
    pub(crate) fn frame(
        &mut self,
        header: Header,
        body: &[u8],
        out: &mut Vec<u8>,
    ) -> Result<Option<InitiatorVerdict>> {
        match (header.frame, &mut self.state) {
            (Frame::Refuse, HandshakeState::ToEnter { mistaken, .. }) => {
                refused(body, mistaken.is_some()).map(Some)
            }
            (Frame::Mistaken, HandshakeState::ToEnter { mistaken: Some(noise), .. }) => {
                noise.read(body).ok_or_else(not_the_peer)?;
                Ok(Some(InitiatorVerdict::Restarted))
            }
            (Frame::Welcome, HandshakeState::ToEnter { invited, .. }) => {
                let said = invited.read(body).ok_or_else(not_the_peer)?;
                let seal = read_welcome(&said, self.wish)?;
                let mut seals = invited.seals();
                let mut confirm = self.link.to_vec();
                confirm.put_u8(self.lane);
                confirm.put_identity(&self.own);
                put_frame(out, Frame::Confirm, 0, |out| seals.sealer.seal(&confirm, out));
                self.state = HandshakeState::Confirmed(Some((seal, Box::new(seals))));
                Ok(None)
            }
            (Frame::Entered, HandshakeState::Confirmed(sealed)) => {
                let (seal, mut seals) = sealed.take().ok_or_else(|| unexpected(header))?;
                seals.opener.open(&mut body.to_vec())?;
                Ok(Some(InitiatorVerdict::Welcome((seal, seals))))
            }
            _ => Err(unexpected(header)),
        }
    }
}

/// Interprets a refusal, which is not authenticated. Its kind shows whether the owner has a secret.
/// An owner with a secret reports a restart only to peers that also have it.
fn refused(body: &[u8], have_secret: bool) -> Result<InitiatorVerdict> {
    let error = read_refuse(body);
    match (error.kind(), have_secret) {
        (ErrorKind::PeerRestarted, false) => Ok(InitiatorVerdict::Restarted),
        (ErrorKind::PeerRestarted, true) => Err(one_sided("this agent")),
        (ErrorKind::Authentication, false) => Err(one_sided("the peer")),
        (ErrorKind::Authentication, true) => Err(secret_mismatch()),
        (ErrorKind::Incompatible, _) => Err(error),
        // An owner sends no other kind to an unauthenticated peer.
        _ => Err(not_the_peer()),
    }
}

/// Returns the agreed seal, or an error if the owner serves too many connections or accepts no
/// common seal.
pub(super) fn read_welcome(said: &[u8], wish: Seal) -> Result<Seal> {
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
        return Err(reader.malformed("the owner chose a weaker seal than requested"));
    }
    Ok(seal)
}
