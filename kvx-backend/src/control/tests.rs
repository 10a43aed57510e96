//! Two ends of a link, with a clock and wires that the test controls.

use std::collections::{HashSet, VecDeque};
use std::time::{Duration, Instant};

use kvx_core::backend::{Invitation, QueueFull, RegionKey};
use kvx_core::{Completion, Error, ErrorKind, Identity, Incarnation, RegionId, Result};

use super::errors::{malformed, revoked};
use super::proof::{Claim, Keys, unauthenticated};
use super::violations::{HandshakeStage, violations};
use super::*;

mod simulation;

const TIMEOUT: Duration = Duration::from_secs(4);
const KEY: RegionKey = RegionKey([8; 16]);
const REGION: RegionId = RegionId(1);

fn identity(name: &str) -> Identity {
    Identity { name: name.into(), incarnation: Incarnation([name.len() as u8; 16]) }
}

/// Returns the keys made of the invitation of the agent with this name.
fn keys(name: &str) -> Keys {
    Keys::new(&Invitation::from_bytes([name.len() as u8; 32]), None)
}

/// Both ends, and the messages between them.
struct Link {
    now: Instant,
    up: bool,
    to_owner: VecDeque<Vec<u8>>,
    to_initiator: VecDeque<Vec<u8>>,

    to_peer: NoticesToPeer,
    silence: Silence,
    imports: ImportedRegions<RegionId, RegionId>,
    turned_away: Option<Error>,
    greeting: Option<Greeting>,

    /// The claim that the initiator must prove before the owner's side is up.
    confirmed: Option<Claim>,
    /// The kind of error with which the owner has refused the initiator.
    refused: Option<ErrorKind>,
    both_up: bool,
    table: RegionTable<()>,
    granted: GrantedRegions,
    recalls: Recalls<u8, RegionId>,
    from_peer: NoticesFromPeer,
    /// The notifications that the owner's agent has, and how many more fit into its queue.
    taken: Vec<Vec<u8>>,
    room: usize,
}

impl Link {
    fn greeted(expected: &str) -> Self {
        let now = Instant::now();
        let mut link = Link {
            now,
            up: false,
            to_owner: VecDeque::new(),
            to_initiator: VecDeque::new(),
            to_peer: NoticesToPeer::default(),
            silence: Silence::new(now),
            imports: ImportedRegions::default(),
            turned_away: None,
            greeting: None,
            confirmed: None,
            refused: None,
            both_up: false,
            table: RegionTable::default(),
            granted: GrantedRegions::default(),
            recalls: Recalls::default(),
            from_peer: NoticesFromPeer::default(),
            taken: Vec::new(),
            room: usize::MAX,
        };
        link.table.open(REGION, KEY, ());
        let (greeting, body) = Greeting::new(&identity("initiator"), keys(expected), b"").unwrap();
        link.greeting = Some(greeting);
        link.to_owner.push_back(ControlMessage::Hello { versions: VERSIONS, body: &body }.encode());
        link
    }

    fn up() -> Self {
        let mut link = Link::greeted("owner");
        link.settle();
        assert!(link.up && link.turned_away.is_none());
        link
    }

    fn owner(&mut self, bytes: &[u8]) -> Result<()> {
        let message = ControlMessage::decode(bytes)?;
        if !message.fits(self.both_up, false) {
            return Err(malformed("out of place"));
        }
        let (taken, room) = (&mut self.taken, &mut self.room);
        let deliver = |bytes: &[u8]| {
            *room = room.checked_sub(1).ok_or(QueueFull)?;
            taken.push(bytes.to_vec());
            Ok(())
        };
        let answer = match message {
            ControlMessage::Hello { versions, body } => {
                let answer = match verify_hello(&keys("owner"), versions, body) {
                    Ok(greeted) => {
                        let (version, body, claim) =
                            greeted.welcome.complete(&keys("owner"), b"")?;
                        self.confirmed = Some(claim);
                        ControlMessage::Welcome { version, body: &body }.encode()
                    }
                    Err(away) => {
                        self.refused = Some(away.refusal.kind);
                        away.message().encode()
                    }
                };
                self.to_initiator.push_back(answer);
                return Ok(());
            }
            ControlMessage::Confirm { proof } => {
                self.both_up = self.confirmed.take().is_some_and(|claim| claim.holds(&proof));
                return if self.both_up { Ok(()) } else { Err(unauthenticated()) };
            }
            ControlMessage::Want { import, id, key } => match self.table.check(id, &key) {
                Ok(()) => {
                    self.granted.grant(id);
                    ControlMessage::Grant { import, rest: b"" }
                }
                Err(why) => ControlMessage::Deny { import, why: Refusal::from(&why) },
            },
            ControlMessage::Released { id } => {
                self.granted.release(id)?;
                self.recalls.release(&0, Some(id));
                return Ok(());
            }
            ControlMessage::Notify { notice, bytes } => {
                match self.from_peer.take(notice, bytes, deliver)? {
                    true => ControlMessage::Ack { notice },
                    false => return Ok(()),
                }
            }
            ControlMessage::Ping => ControlMessage::Alive,
            other => panic!("{other:?}"),
        };
        self.to_initiator.push_back(answer.encode());
        Ok(())
    }

    fn initiator(&mut self, bytes: &[u8]) -> Result<()> {
        let message = ControlMessage::decode(bytes)?;
        assert!(message.fits(self.up, true), "{message:?}");
        self.silence.note_activity(self.now);
        match message {
            ControlMessage::Welcome { version, body } => {
                let (_, proof) = self.greeting.as_ref().unwrap().verify_welcome(version, body)?;
                self.to_owner.push_back(ControlMessage::Confirm { proof }.encode());
                self.up = true;
            }
            ControlMessage::Refuse { why, proof } => {
                self.turned_away = Some(self.greeting.as_ref().unwrap().refusal_error(why, proof));
            }
            ControlMessage::Grant { import, .. } => {
                let id = self.imports.take_answer(import)?;
                self.imports.settle(import, Ok(id));
            }
            ControlMessage::Deny { import, why } => {
                self.imports.take_answer(import)?;
                self.imports.settle(import, Err(why.into_error()));
            }
            ControlMessage::Recall { id } => {
                self.imports.recall(|held| *held == id, &revoked(id));
                self.to_owner.push_back(ControlMessage::Released { id }.encode());
            }
            ControlMessage::Ack { notice } => self.to_peer.acknowledge(notice)?.settle(Ok(())),
            ControlMessage::Alive => {}
            other => panic!("{other:?}"),
        }
        Ok(())
    }

    /// Sends the notifications that fit into the window.
    fn send(&mut self) {
        while let Some((notice, bytes)) = self.to_peer.next_to_send() {
            self.to_owner.push_back(ControlMessage::Notify { notice, bytes: &bytes }.encode());
        }
        let awaits = self.to_peer.awaits_answer() || self.imports.awaits_answer();
        self.silence.note(awaits, || self.now);
    }

    /// Delivers all messages.
    fn settle(&mut self) {
        loop {
            self.send();
            if let Some(bytes) = self.to_owner.pop_front() {
                self.owner(&bytes).unwrap();
            } else if let Some(bytes) = self.to_initiator.pop_front() {
                self.initiator(&bytes).unwrap();
            } else {
                return;
            }
        }
    }

    /// Makes space for `room` more notifications at the owner's agent.
    fn resume(&mut self, room: usize) {
        self.room = room;
        while let Some(notice) = self.from_peer.deliver_next(|bytes| {
            self.room = self.room.checked_sub(1).ok_or(QueueFull)?;
            self.taken.push(bytes.to_vec());
            Ok(())
        }) {
            self.to_initiator.push_back(ControlMessage::Ack { notice }.encode());
        }
        self.settle();
    }

    fn notify(&mut self, number: u32) -> Completion<()> {
        let (end, done) = Completion::with_ticket();
        assert!(self.to_peer.add(number.to_le_bytes().into(), done).is_ok());
        end
    }
}

#[test]
fn who_was_invited_by_another_agent_is_turned_away() {
    let mut link = Link::greeted("stranger");
    link.settle();
    assert_eq!((link.up, link.turned_away.unwrap().kind()), (false, ErrorKind::PeerRestarted));
}

#[test]
fn violations_of_the_protocol_end_the_link_and_nothing_is_granted_or_taken() {
    for violation in violations(&Invitation::from_bytes([5; 32]), b"", REGION, KEY).unwrap() {
        let mut link =
            if violation.stage == HandshakeStage::Up { Link::up() } else { Link::greeted("owner") };
        link.room = 0;
        let hello = link.to_owner.pop_front();
        if violation.stage == HandshakeStage::Welcome {
            link.owner(&hello.unwrap()).unwrap();
        }
        let ended = violation
            .messages
            .iter()
            .any(|bytes| link.owner(bytes).is_err() || link.refused.is_some());
        assert!(ended && !violation.messages.is_empty(), "{}", violation.description);
        assert_eq!(link.refused, violation.refusal, "{}", violation.description);
        assert!(link.taken.is_empty() && link.granted.is_empty(), "{}", violation.description);
    }
}

#[test]
fn notifications_arrive_once_and_in_order_through_a_queue_of_any_size() {
    for step in [1, 2, 7, 100] {
        let mut link = Link::up();
        link.room = 0;
        let ends: Vec<_> = (0..500).map(|number| link.notify(number)).collect();
        link.settle();
        assert!(link.taken.is_empty() && link.to_peer.awaits_answer());
        for _ in 0..500_usize.div_ceil(step) {
            link.resume(step);
            // At most the granted number is taken, and none overtakes another.
            assert!(link.taken.len() <= 500);
        }
        link.resume(usize::MAX);
        let numbers: Vec<_> = link
            .taken
            .iter()
            .map(|bytes| u32::from_le_bytes(bytes[..].try_into().unwrap()))
            .collect();
        assert_eq!(numbers, (0..500).collect::<Vec<_>>());
        assert!(ends.into_iter().all(|end| end.wait_blocking(Duration::ZERO).is_ok()));
    }
}

#[test]
fn a_region_is_used_from_its_grant_to_its_recall() {
    let mut link = Link::up();
    for (import, id, key) in
        [(1, REGION, KEY), (2, REGION, RegionKey([0; 16])), (3, RegionId(9), KEY)]
    {
        link.imports.want(import, id);
        link.to_owner.push_back(ControlMessage::Want { import, id, key }.encode());
    }
    link.settle();
    let refused = |link: &Link, import| match link.imports.get(import) {
        Some(ImportState::Refused(why)) => Some(why.kind()),
        _ => None,
    };
    assert_eq!(link.imports.held().collect::<Vec<_>>(), [&REGION]);
    assert_eq!(refused(&link, 2), Some(ErrorKind::WrongKey));
    assert_eq!(refused(&link, 3), Some(ErrorKind::Unregistered));

    assert!(link.table.revoke(REGION).is_some() && link.granted.holds(REGION));
    link.recalls.begin(REGION, HashSet::from([0]), REGION);
    assert!(link.recalls.take_done(|_| false).is_empty());
    link.to_initiator.push_back(ControlMessage::Recall { id: REGION }.encode());
    link.settle();
    assert_eq!(
        (refused(&link, 1), link.recalls.take_done(|_| false)),
        (Some(ErrorKind::Revoked), vec![REGION])
    );
    assert!(link.granted.is_empty());
}

#[test]
fn a_live_owner_is_never_lost_and_a_stopped_one_is() {
    let mut link = Link::up();
    link.room = 0;
    let end = link.notify(7);
    link.settle();
    // The owner does not take the notification, but answers whenever it is asked.
    for _ in 0..100 {
        link.now += Silence::step(TIMEOUT);
        match link.silence.look(link.now, TIMEOUT) {
            SilenceStatus::Ask(_) => link.to_owner.push_back(ControlMessage::Ping.encode()),
            look => assert!(matches!(look, SilenceStatus::Until(_)), "{look:?}"),
        }
        link.settle();
    }
    // The owner is stopped: messages to it stay on the wire.
    let stopped = link.now;
    while link.silence.look(link.now, TIMEOUT) != SilenceStatus::Lost {
        assert!(link.now <= stopped + 2 * TIMEOUT);
        link.now += Silence::step(TIMEOUT);
    }
    assert!(link.now >= stopped + TIMEOUT);
    link.to_peer.end().for_each(|done| done.settle(Err(errors::peer_silent(TIMEOUT))));
    assert_eq!(end.wait_blocking(Duration::ZERO).unwrap_err().kind(), ErrorKind::PeerLost);
}
