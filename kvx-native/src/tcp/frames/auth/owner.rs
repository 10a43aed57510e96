//! The owner's side of a handshake.

use std::sync::Arc;

use kvx_backend::control::Refusal;
use kvx_backend::control::proof::{Keys, unauthenticated};
use kvx_core::backend::wire::{Reader, Writer};
use kvx_core::{Error, ErrorKind, Identity, Result};
use kvx_noise::{NoiseHandshake, TAG};

use super::{
    Agreement, COME_IN, NO_ROOM, before_mistaken, invited_key, mistaken_key, no_version, unexpected,
};
use crate::tcp::frames::{Frame, Header, Hello, VERSIONS, Versions, put_frame, put_refuse};
use crate::tcp::limit::{ConnectionLimit, ConnectionPlace};
use crate::tcp::seal::Seal;

/// The state of a handshake on the owner's side, after a frame.
pub(crate) enum Step {
    /// Another frame follows.
    More,
    /// The initiator is authenticated, and this is lane `lane` of its `link`.
    Entered {
        who: Identity,
        link: [u8; 16],
        lane: u8,
        seals: Agreement,
        /// `None` without a limit for connections.
        place: Option<ConnectionPlace>,
    },
    /// The initiator expects another agent, and the answer says so: close once it is sent.
    Mistaken,
}

/// The owner's side of a handshake.
pub(crate) struct OwnerHandshake {
    keys: Keys,
    /// The weakest seal that the owner accepts.
    wish: Seal,
    /// The agreement, after it has welcomed an initiator that has the key, with the place that the
    /// connection has from then on.
    welcomed: Option<(Agreement, Option<ConnectionPlace>)>,
    /// The limit for connections.
    limit: Option<Arc<ConnectionLimit>>,
}

impl OwnerHandshake {
    pub(crate) fn new(keys: Keys, wish: Seal, limit: Option<Arc<ConnectionLimit>>) -> Self {
        OwnerHandshake { keys, wish, welcomed: None, limit }
    }

    /// Returns true if the initiator has sent a valid hello.
    pub(crate) fn has_said_hello(&self) -> bool {
        self.welcomed.is_some()
    }

    /// Takes a frame from the initiator. An error ends the connection; `out` has the last answer.
    pub(crate) fn frame(&mut self, header: Header, body: &[u8], out: &mut Vec<u8>) -> Result<Step> {
        match (header.frame, self.welcomed.take()) {
            (Frame::Hello, None) => self.hello(body, out),
            (Frame::Confirm, Some((agreement, place))) => confirm(body, agreement, place, out),
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
        // All unauthenticated peers get the same answer, regardless of what they sent.
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
        // Handshakes that are not confirmed yet count, so that many at once cannot exceed the limit.
        let place = self.limit.as_ref().map(ConnectionLimit::take).transpose();
        let mut says = Vec::new();
        match &place {
            Err(full) => {
                says.put_u8(NO_ROOM);
                Refusal::from(full).encode(&mut says);
            }
            Ok(_) => {
                says.put_u8(COME_IN);
                says.put_u16(VERSIONS.common(theirs).unwrap_or(VERSIONS.max));
                says.put_u8(seal.number());
            }
        }
        let mut message = Vec::new();
        noise.write(&says, &mut message)?;
        put_frame(out, Frame::Welcome, 0, |out| out.put(&message));
        let place = place?;
        self.welcomed = Some(((seal, Box::new(noise.seals())), place));
        Ok(Step::More)
    }
}

/// Verifies the initiator's last message, which cannot be a replay.
fn confirm(
    body: &[u8],
    (seal, mut seals): Agreement,
    place: Option<ConnectionPlace>,
    out: &mut Vec<u8>,
) -> Result<Step> {
    let mut said = body.to_vec();
    seals.opener.open(&mut said).map_err(|_| unauthenticated())?;
    said.truncate(body.len() - TAG);
    let mut reader = Reader::new("Confirm", &said);
    let (link, lane, who) = (reader.array()?, reader.u8()?, reader.identity()?);
    reader.end()?;
    put_frame(out, Frame::Entered, 0, |out| seals.sealer.seal_end(0, out));
    Ok(Step::Entered { who, link, lane, seals: (seal, seals), place })
}
