//! The handshake of a lane, between whose ends somebody alters what is said.

use kvx_backend::control::proof::Keys;
use kvx_core::{Invitation, Result, Secret};

use super::who;
use crate::tcp::auth::{InitiatorHandshake, OwnerHandshake, Step, Verdict};
use crate::tcp::frames::{HEADER, Header};

/// The first byte says what both have; then come the changes.
pub(crate) fn handshake(bytes: &[u8]) {
    let Some((flags, changes)) = bytes.split_first() else { return };
    let keys = |bits: u8| {
        let secret = (bits & 2 != 0).then(|| Secret::from_bytes([7; 32]));
        Keys::new(&Invitation::from_bytes([bits & 1; 32]), secret.as_ref())
    };
    let same = flags & 3 == flags >> 2 & 3;
    let mut conversation = Conversation { changes, number: 0, altered: false };
    let mut said = Vec::new();
    let mut initiator = InitiatorHandshake::start(keys(flags & 3), who(3), ([8; 16], 1), &mut said)
        .expect("there are random numbers");
    let mut owner = OwnerHandshake::new(keys(flags >> 2 & 3), None);
    let mut welcomed = false;
    // Four messages, and a last word.
    for _ in 0..3 {
        let mut answer = Vec::new();
        match conversation.pass(&said, |header, body| owner.frame(header, body, &mut answer)) {
            Some(Ok(Step::Welcome { who: initiator, link: [8, ..], lane: 1 })) => {
                assert!(same && !conversation.altered && initiator == who(3), "a stranger is let in");
                welcomed = true;
            }
            Some(Ok(Step::Welcome { .. })) => panic!("it says another than it is"),
            // Only who has the secret is told; a changed proof of the invitation makes an initiator ask for that, too.
            Some(Ok(Step::Mistaken)) => assert!(flags & 10 == 10 && (!same || conversation.altered)),
            Some(Ok(Step::More)) => assert!(!welcomed),
            Some(Err(_)) => assert!(conversation.altered || !same),
            None => {}
        }
        said.clear();
        match conversation.pass(&answer, |header, body| initiator.frame(header, body, &mut said)) {
            Some(Ok(Some(Verdict::Welcome))) => {
                assert!(welcomed && !conversation.altered, "whoever answers is believed");
                return;
            }
            Some(Ok(Some(Verdict::Restarted))) => {
                assert!(!same || conversation.altered, "who was invited to is not believed");
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
    assert!(conversation.altered || !same, "who was invited is not let in");
}

/// What is said, and how it is altered on its way.
struct Conversation<'a> {
    changes: &'a [u8],
    /// Of the message.
    number: u8,
    altered: bool,
}

impl Conversation<'_> {
    /// Hands over each frame that was said. The last answer counts.
    fn pass<T>(
        &mut self,
        said: &[u8],
        mut take: impl FnMut(Header, &[u8]) -> Result<T>,
    ) -> Option<Result<T>> {
        let (mut left, mut last) = (said, None);
        while let Some((head, rest)) = left.split_first_chunk::<HEADER>() {
            let header = Header::decode(head).expect("an end says what the other one understands");
            let (body, rest) = rest.split_at(header.len);
            let body = self.alter(body);
            last = Some(take(Header { len: body.len(), ..header }, &body));
            left = rest;
        }
        last
    }

    fn alter(&mut self, body: &[u8]) -> Vec<u8> {
        let altered = kvx_backend::fuzz::alter(self.changes, (self.number, 4), body);
        self.number += 1;
        self.altered |= altered != body;
        altered
    }
}
