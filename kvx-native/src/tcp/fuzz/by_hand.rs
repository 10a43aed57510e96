//! The two ends of a handshake for a test that then writes frames itself, without seals.

use kvx_backend::control::proof::Keys;
use kvx_core::backend::Invitation;
use kvx_core::{Identity, Result, Secret};

use crate::tcp::frames::auth::{
    Agreement, InitiatorHandshake, InitiatorVerdict, OwnerHandshake, Step,
};
use crate::tcp::frames::{HEADER, Header};
use crate::tcp::seal::Seal;

/// The answer of an end to a frame, and the lane once the handshake is done.
pub type Answer = Result<(Vec<u8>, Option<u8>)>;

/// An end that opens a lane.
pub struct InitiatorByHand {
    handshake: InitiatorHandshake,
    lane: u8,
}

impl InitiatorByHand {
    /// Begins a handshake. Also returns the first frame.
    pub fn new(
        invitation: &Invitation,
        secret: Option<&Secret>,
        who: Identity,
        (link, lane): ([u8; 16], u8),
    ) -> Result<(Self, Vec<u8>)> {
        let (keys, mut hello) = (Keys::new(invitation, secret), Vec::new());
        let handshake =
            InitiatorHandshake::start(&keys, who, (link, lane), Seal::None, &mut hello)?;
        Ok((InitiatorByHand { handshake, lane }, hello))
    }

    /// Takes a complete frame.
    pub fn take(&mut self, frame: &[u8]) -> Answer {
        let (header, body) = parts(frame)?;
        let mut answer = Vec::new();
        match self.handshake.frame(header, body, &mut answer)? {
            None => Ok((answer, None)),
            Some(InitiatorVerdict::Welcome(sealed)) => {
                check(&sealed);
                Ok((answer, Some(self.lane)))
            }
            Some(InitiatorVerdict::Restarted) => panic!("the owner does not know the invitation"),
        }
    }
}

/// An end that answers a handshake.
pub struct OwnerByHand(OwnerHandshake);

impl OwnerByHand {
    /// Creates an owner with this invitation.
    pub fn new(invitation: &Invitation, secret: Option<&Secret>) -> Self {
        OwnerByHand(OwnerHandshake::new(Keys::new(invitation, secret), Seal::None, None))
    }

    /// Takes a complete frame.
    pub fn take(&mut self, frame: &[u8]) -> Answer {
        let (header, body) = parts(frame)?;
        let mut answer = Vec::new();
        match self.0.frame(header, body, &mut answer)? {
            Step::More => Ok((answer, None)),
            Step::Entered { lane, seals, .. } => {
                check(&seals);
                Ok((answer, Some(lane)))
            }
            Step::Mistaken => panic!("the initiator has another invitation"),
        }
    }
}

fn parts(frame: &[u8]) -> Result<(Header, &[u8])> {
    let (head, body) = frame.split_first_chunk::<HEADER>().expect("the frame is complete");
    Ok((Header::decode(head)?, body))
}

fn check((seal, _): &Agreement) {
    assert_eq!(*seal, Seal::None, "set \"tcp.seal\" to \"none\" at the agent");
}
