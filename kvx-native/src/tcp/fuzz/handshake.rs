//! Fuzz target for the handshake of a lane and the first messages after it, which are altered on
//! the way.

use kvx_backend::control::proof::Keys;
use kvx_core::backend::Invitation;
use kvx_core::{Result, Secret};
use kvx_noise::Seals;

use super::who;
use crate::tcp::frames::auth::{InitiatorHandshake, InitiatorVerdict, OwnerHandshake, Step};
use crate::tcp::frames::{HEADER, Header};
use crate::tcp::seal::Seal;

/// The number of messages: those of a handshake, and two in each direction after it.
const MESSAGES: u8 = 8;

/// Runs a handshake. The first byte determines the keys and seals of both ends; the changes follow.
pub(crate) fn handshake(bytes: &[u8]) {
    let Some((flags, changes)) = bytes.split_first() else { return };
    let keys = |bits: u8| {
        let secret = (bits & 2 != 0).then(|| Secret::from_bytes([7; 32]));
        Keys::new(&Invitation::from_bytes([bits & 1; 32]), secret.as_ref())
    };
    let same = flags & 3 == flags >> 2 & 3;
    let wish = |bits: u8| Seal::NAMED[usize::from(bits % 3)].1;
    let wishes = (wish(flags >> 4 & 3), wish(flags >> 6));
    let mut conversation = Conversation { changes, number: 0, altered: false };
    let mut said = Vec::new();
    let mut initiator =
        InitiatorHandshake::start(&keys(flags & 3), who(3), ([8; 16], 1), wishes.0, &mut said)
            .expect("random numbers are available");
    let mut owner = OwnerHandshake::new(keys(flags >> 2 & 3), wishes.1, None);
    let mut entered = None;
    // The handshake has four messages.
    for _ in 0..2 {
        let mut answer = Vec::new();
        match conversation.pass(&said, |header, body| owner.frame(header, body, &mut answer)) {
            Some(Ok(Step::Entered { who: initiator, link, lane, seals, .. })) => {
                assert!(same && !conversation.altered, "an unauthenticated peer is admitted");
                assert!(
                    initiator == who(3) && (link, lane) == ([8; 16], 1),
                    "the initiator has a wrong identity"
                );
                assert!(seals.0 == wishes.0.max(wishes.1), "an attacker influences the seal");
                entered = Some(seals.1);
            }
            // Only a peer with the secret learns about a restart, and only from unaltered messages.
            Some(Ok(Step::Mistaken)) => assert!(flags & 10 == 10 && !same && !conversation.altered),
            Some(Ok(Step::More)) => {
                assert!(same && !conversation.altered, "an unauthenticated peer gets an answer")
            }
            Some(Err(_)) => assert!(conversation.altered || !same),
            None => {}
        }
        said.clear();
        match conversation.pass(&answer, |header, body| initiator.frame(header, body, &mut said)) {
            Some(Ok(Some(InitiatorVerdict::Welcome((seal, mut ours))))) => {
                assert!(!conversation.altered && seal == wishes.0.max(wishes.1));
                let mut theirs = entered.expect("the owner has admitted the initiator");
                conversation.seals(&mut ours, &mut theirs);
                conversation.seals(&mut theirs, &mut ours);
                return;
            }
            Some(Ok(Some(InitiatorVerdict::Restarted))) => {
                assert!(!same || conversation.altered, "a valid answer is rejected");
                // With a secret, only a holder of it can report a restart.
                assert!(flags & 2 == 0 || !conversation.altered);
                return;
            }
            Some(Ok(None)) => {}
            Some(Err(_)) => assert!(conversation.altered || !same),
            None => {}
        }
        if said.is_empty() {
            break;
        }
    }
    assert!(conversation.altered || !same, "an invited peer is not admitted");
}

/// The exchanged messages, and how they are altered on the way.
struct Conversation<'a> {
    changes: &'a [u8],
    /// The number of the message.
    number: u8,
    altered: bool,
}

impl Conversation<'_> {
    /// Delivers each frame. Returns the last result.
    fn pass<T>(
        &mut self,
        said: &[u8],
        mut take: impl FnMut(Header, &[u8]) -> Result<T>,
    ) -> Option<Result<T>> {
        let (mut left, mut last) = (said, None);
        while let Some((head, rest)) = left.split_first_chunk::<HEADER>() {
            let header = Header::decode(head).expect("each end sends valid headers");
            let (body, rest) = rest.split_at(header.len);
            let body = self.alter(body);
            last = Some(take(Header { len: body.len(), ..header }, &body));
            left = rest;
        }
        last
    }

    /// Seals at one end and decrypts at the other.
    fn seals(&mut self, from: &mut Seals, to: &mut Seals) {
        for word in [&b"a header of 16 by"[..], b"and a body"] {
            let mut sealed = Vec::new();
            from.sealer.seal(word, &mut sealed);
            let mut came = self.alter(&sealed);
            let is_whole = to.opener.open(&mut came).is_ok();
            assert_eq!(is_whole, came.len() == sealed.len() && came.starts_with(word));
            assert!(is_whole || self.altered, "an unaltered message is not decrypted");
            if !is_whole {
                return; // the connection ends
            }
        }
    }

    fn alter(&mut self, body: &[u8]) -> Vec<u8> {
        let altered = kvx_backend::fuzz::alter(self.changes, (self.number, MESSAGES), body);
        self.number += 1;
        self.altered |= altered != body;
        altered
    }
}
