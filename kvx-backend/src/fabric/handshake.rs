//! The start of links, and the dispatch of their messages.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::reactor::Outbox;
use kvx_core::backend::LinkState;
use kvx_core::backend::wire::{Reader, Writer};
use kvx_core::{Error, ErrorKind, Identity, Incarnation, Result};

use super::library::{EndpointId, Fabric};
use super::machine::Machine;
use super::session::{LONG_SILENCE, Phase, Session, UnfinishedHello};
use super::shared_link::SharedLink;
use super::stream::{FrameHeader, Incoming, MAX_ADDRESS};
use crate::control::errors::{closed, malformed, peer_closed};
use crate::control::proof::unauthenticated;
use crate::control::{ControlMessage, Greeting, Refusal, VERSIONS, verify_hello};
use crate::process::ProcessId;

/// The time limit for a handshake; a shorter `peer_timeout` takes precedence.
const PATIENCE: Duration = Duration::from_secs(5);
/// The limit for peers whose first message is incomplete.
const MAX_GREETINGS: usize = 64;
/// The limit for sessions that peers initiated. Small in tests, which reach it.
const MAX_ACCEPTED: usize = if cfg!(test) { 64 } else { 4096 };
/// The limit for additional sessions, whose peers only receive the error that [`MAX_ACCEPTED`] is
/// reached.
const MAX_TURNED_AWAY: usize = 256;

impl<F: Fabric> Machine<F> {
    fn patience(&self) -> Duration {
        PATIENCE.min(self.peer_timeout)
    }

    /// Returns an unguessable number for a session.
    fn random_session_number(&self) -> Result<u64> {
        loop {
            let number = kvx_core::backend::random_number()?;
            if number != 0 && !self.sessions.contains_key(&number) {
                return Ok(number);
            }
        }
    }

    /// Initiates a link.
    pub(super) fn connect(&mut self, link: Arc<SharedLink>, address: &[u8], out: &mut Outbox) {
        // Before the library creates an endpoint, which takes UCX tens of milliseconds.
        let until = Instant::now() + self.fabric.setup_time() + self.patience();
        let begun = self.random_session_number().and_then(|number| {
            let endpoint = EndpointId(number);
            let Some(keys) = link.keys.clone() else {
                self.fabric.connect_foreign(endpoint, address)?;
                return Ok((number, None, None));
            };
            let rest = hello_rest(self.process, &(self.address)()?);
            let (greeting, hello) = Greeting::new(&self.me, keys, &rest)?;
            self.fabric.connect(endpoint, &link.peer, address)?;
            Ok((number, Some(greeting), Some(hello)))
        });
        match begun {
            Err(why) => {
                let why = why.with_backend(self.name);
                if link.gone.set(why.clone()).is_ok() {
                    out.link(link.id, LinkState::Lost(why));
                }
            }
            Ok((number, greeting, hello)) => {
                self.look_by(until);
                self.links.insert(link.id, number);
                let mut session =
                    Session::new(number, Some(Arc::clone(&link)), link.peer.clone(), until);
                (session.foreign, session.greeting) = (link.keys.is_none(), greeting);
                self.sessions.insert(number, session);
                if let Some(body) = hello {
                    self.send(
                        number,
                        &ControlMessage::Hello { versions: VERSIONS, body: &body },
                        out,
                    );
                }
            }
        }
    }

    /// Takes a frame, which may come from any peer.
    pub(super) fn take_frame(&mut self, frame: &[u8], out: &mut Outbox) {
        let (header, part) = match FrameHeader::read(frame) {
            Ok(read) => read,
            Err(why) => {
                return self
                    .unauthenticated
                    .log(|| tracing::warn!(backend = self.name, %why, "ignored an invalid frame"));
            }
        };
        if header.to == 0 {
            return self.take_greeting(&header, part, out);
        }
        let Some(session) = self.sessions.get_mut(&header.to) else {
            return tracing::debug!(
                backend = self.name,
                "ignored a frame for a link that has ended"
            );
        };
        if session.phase == Phase::Lost {
            return; // expected: the peer had not noticed the end of the link
        }
        if session.other != 0 && session.other != header.from {
            return self.unauthenticated.log(|| {
                tracing::warn!(
                    backend = self.name,
                    "ignored a frame whose sender is not the peer of its link"
                );
            });
        }
        session.note_activity(Instant::now());
        match session.incoming.take(&header, part) {
            Ok(messages) => {
                for message in messages {
                    let taken = ControlMessage::decode(&message).and_then(|message| {
                        self.take_message(header.to, header.from, message, out)
                    });
                    if let Err(why) = taken {
                        return self.cut_off(header.to, why, out);
                    }
                }
                self.count_held(header.to, out);
            }
            Err(why) => self.cut_off(header.to, why, out),
        }
    }

    fn take_greeting(&mut self, header: &FrameHeader, part: &[u8], out: &mut Outbox) {
        if header.from == 0 {
            return self.unauthenticated.log(|| {
                tracing::warn!(backend = self.name, "ignored a hello without a sender");
            });
        }
        if self.sessions.values().any(|session| session.other == header.from) {
            return; // expected: the library delivered the frame twice
        }
        if !self.unfinished_hellos.contains_key(&header.from)
            && self.unfinished_hellos.len() >= MAX_GREETINGS
        {
            // The newest hello replaces the oldest.
            if let Some(oldest) = self
                .unfinished_hellos
                .iter()
                .min_by_key(|(_, greeting)| greeting.until)
                .map(|(number, _)| *number)
            {
                self.unfinished_hellos.remove(&oldest);
            }
        }
        let until = Instant::now() + self.fabric.setup_time() + self.patience();
        let greeting = self
            .unfinished_hellos
            .entry(header.from)
            .or_insert_with(|| UnfinishedHello { incoming: Incoming::default(), until });
        let taken = greeting.incoming.take(header, part);
        if taken.is_err() {
            self.unfinished_hellos.remove(&header.from);
        }
        let first = match taken.map(|messages| messages.into_iter().next()) {
            Ok(Some(first)) => first,
            // Expected: the remaining frames of the hello have not arrived yet.
            Ok(None) => return self.look_by(until),
            Err(why) => return self.ignore_hello(&why),
        };
        let Some(greeting) = self.unfinished_hellos.remove(&header.from) else {
            debug_assert!(false, "a complete hello was not recorded");
            return;
        };
        match ControlMessage::decode(&first) {
            Ok(ControlMessage::Hello { versions, body }) => {
                self.take_hello(header.from, greeting.incoming, versions, body, out);
            }
            Ok(_) => self.ignore_hello(&malformed("no hello")),
            Err(why) => self.ignore_hello(&why),
        }
    }

    fn ignore_hello(&mut self, why: &Error) {
        self.unauthenticated
            .log(|| tracing::warn!(backend = self.name, %why, "ignored a peer's first message"));
    }

    /// Answers a hello if the initiator has proven that it was invited or has the secret. Otherwise
    /// it neither reads the content nor passes the address to the library.
    fn take_hello(
        &mut self,
        other: u64,
        incoming: Incoming,
        versions: (u16, u16),
        body: &[u8],
        out: &mut Outbox,
    ) {
        let heard = verify_hello(&self.keys, versions, body);
        let rest = match &heard {
            Ok(greeted) => greeted.rest,
            Err(away) => match away.rest {
                Some(rest) => rest,
                None => {
                    return self.unauthenticated.log(|| {
                        tracing::warn!(
                            backend = self.name,
                            why = %away.why,
                            "ignored the hello of an unauthenticated peer"
                        );
                    });
                }
            },
        };
        let accepted = self.make_room_and_count(out);
        if accepted >= MAX_ACCEPTED + MAX_TURNED_AWAY {
            return self.unauthenticated.log(|| {
                tracing::warn!(
                    backend = self.name,
                    "ignored a hello: {accepted} peers are connected, which is the limit"
                );
            });
        }
        let from = heard
            .as_ref()
            .map_or_else(|_| identity_with_old_metadata(), |greeted| greeted.from.clone());
        let begun = read_hello_rest(rest).and_then(|(process, address)| {
            let number = self.random_session_number()?;
            self.fabric.accept(EndpointId(number), &from, address)?;
            Ok((number, process))
        });
        let (number, process) = match begun {
            Ok(begun) => begun,
            Err(why) => {
                return tracing::warn!(
                    backend = self.name,
                    ?from,
                    %why,
                    "cannot create an endpoint to answer a peer"
                );
            }
        };
        let until = Instant::now() + self.fabric.setup_time() + self.patience();
        self.look_by(until);
        let mut session = Session::new(number, None, from, until);
        (session.other, session.incoming) = (other, incoming);
        let mut own = Vec::new();
        self.process.encode(&mut own);
        let heard = heard.and_then(|greeted| greeted.admit(accepted, MAX_ACCEPTED));
        let welcome = heard.map(|greeted| greeted.welcome.complete(&self.keys, &own));
        match welcome {
            Ok(Ok((version, body, claim))) => {
                session.awaited = Some(claim);
                self.sessions.insert(number, session);
                self.watch(number, process);
                self.send(number, &ControlMessage::Welcome { version, body: &body }, out);
                self.count_held(number, out);
            }
            Ok(Err(why)) => {
                self.sessions.insert(number, session);
                self.cut_off(number, why, out);
            }
            Err(away) => {
                self.sessions.insert(number, session);
                self.send(number, &away.message(), out);
                if let Some(session) = self.sessions.get_mut(&number) {
                    session.phase = Phase::Leaving(until);
                    self.after_work(number, out);
                }
            }
        }
    }

    /// Returns the number of sessions that peers initiated. At the limit it first ends the oldest
    /// unconfirmed one, because a replayed hello also begins a session.
    fn make_room_and_count(&mut self, out: &mut Outbox) -> usize {
        let begun = |session: &&Session<F>| session.link.is_none();
        if self.sessions.values().filter(begun).count() >= MAX_ACCEPTED {
            let unconfirmed =
                self.sessions.values().filter(begun).filter_map(|session| match session.phase {
                    Phase::Greeting(until) => Some((until, session.number)),
                    _ => None,
                });
            if let Some((_, oldest)) = unconfirmed.min() {
                self.fail_handshake(oldest, out);
            }
        }
        self.sessions.values().filter(begun).count()
    }

    /// Acts on a message. An error ends the link.
    fn take_message(
        &mut self,
        number: u64,
        other: u64,
        message: ControlMessage<'_>,
        out: &mut Outbox,
    ) -> Result<()> {
        // Expected: an earlier message of the same frame ended the session.
        let Some(session) = self.sessions.get_mut(&number) else { return Ok(()) };
        let initiator = session.link.is_some();
        if session.is_ending() {
            // Only messages that help to end the remaining work matter.
            match message {
                ControlMessage::Bye => self.take_bye(number, out),
                ControlMessage::Released { id } if !initiator => {
                    session.granted.release(id).ok();
                    self.confirm(number, Some(id), out);
                }
                _ => {}
            }
            return Ok(());
        }
        if !message.fits(session.is_up(), initiator) {
            return Err(malformed("out of place"));
        }
        match message {
            // A hello begins a session and is never valid on one.
            ControlMessage::Hello { .. } => return Err(malformed("out of place")),
            ControlMessage::Welcome { version, body } => {
                let Some(greeting) = session.greeting.take() else {
                    return Err(malformed("out of place"));
                };
                let (rest, proof) = greeting.verify_welcome(version, body)?;
                let mut reader = Reader::new("welcome", rest);
                let process = ProcessId::decode(&mut reader)?;
                reader.end()?;
                session.other = other;
                self.watch(number, process);
                self.send(number, &ControlMessage::Confirm { proof }, out);
                self.come_up(number, out);
            }
            ControlMessage::Confirm { proof } => {
                if !session.awaited.take().is_some_and(|claim| claim.holds(&proof)) {
                    return Err(unauthenticated());
                }
                session.confirm(&self.held);
                if session.ends_unseen() {
                    self.look_by(Instant::now() + LONG_SILENCE);
                }
            }
            ControlMessage::Refuse { why, proof } => self.take_refuse(number, why, proof, out)?,
            ControlMessage::Want { import, id, key } => match self.regions.check(id, &key) {
                Ok(()) => {
                    session.granted.grant(id);
                    self.send(number, &ControlMessage::Grant { import, rest: &[] }, out);
                }
                Err(why) => self.send(
                    number,
                    &ControlMessage::Deny { import, why: Refusal::from(&why) },
                    out,
                ),
            },
            ControlMessage::Grant { rest, .. } if !rest.is_empty() => {
                return Err(malformed("a grant with unexpected content"));
            }
            ControlMessage::Grant { import, .. } => self.take_grant(number, import, Ok(()), out)?,
            ControlMessage::Deny { import, why } => {
                self.take_grant(number, import, Err(why.into_error()), out)?;
            }
            ControlMessage::Recall { id } => self.take_recall(number, id, out),
            ControlMessage::Released { id } => {
                session.granted.release(id)?;
                self.confirm(number, Some(id), out);
            }
            ControlMessage::Notify { notice, bytes } => {
                self.take_notice(number, notice, bytes, out)?
            }
            ControlMessage::Ack { notice } => {
                out.settle(session.to_peer.acknowledge(notice)?, Ok(()));
                self.send_notices(number, out);
            }
            ControlMessage::Ping => self.send(number, &ControlMessage::Alive, out),
            ControlMessage::Alive => {}
            ControlMessage::Leave => {
                let why = peer_closed().with_backend(self.name);
                self.end(number, why.clone(), Some(LinkState::Lost(why)), Phase::Closing, out);
            }
            ControlMessage::Bye => self.take_bye(number, out),
        }
        Ok(())
    }

    /// Takes the peer's last message: the peer has released all local regions.
    fn take_bye(&mut self, number: u64, out: &mut Outbox) {
        let Some(session) = self.sessions.get_mut(&number) else {
            debug_assert!(false, "a farewell arrived for session {number}, which has ended");
            return;
        };
        session.granted.clear();
        session.parted = true;
        self.confirm(number, None, out);
        let why = peer_closed().with_backend(self.name);
        self.end(number, why.clone(), Some(LinkState::Lost(why)), Phase::Lost, out);
    }

    /// Brings up a link to a foreign endpoint that is ready.
    pub(super) fn ready(&mut self, endpoint: EndpointId, out: &mut Outbox) {
        if let Some(session) = self.sessions.get(&endpoint.0)
            && session.foreign
            && matches!(session.phase, Phase::Greeting(_))
        {
            self.come_up(endpoint.0, out);
        }
    }

    /// Brings up a link whose handshake is done.
    pub(super) fn come_up(&mut self, number: u64, out: &mut Outbox) {
        // Expected: the session ended because the proof could not be sent.
        let Some(session) = self
            .sessions
            .get_mut(&number)
            .filter(|session| matches!(session.phase, Phase::Greeting(_)))
        else {
            return;
        };
        let Some(link) = session.link.clone() else {
            debug_assert!(
                false,
                "session {number} came up as an initiator, but a peer initiated it"
            );
            return;
        };
        if let Some(why) = self.fabric.rejection(EndpointId(number)) {
            let why = why.with_backend(self.name);
            return self.end(number, why.clone(), Some(LinkState::Lost(why)), Phase::Closing, out);
        }
        let (text, capabilities) = self.fabric.describe(EndpointId(number));
        *link.known.lock() = Some((text, Arc::new(capabilities)));
        session.phase = Phase::Up;
        if self.links.contains_key(&link.id) {
            if link.lane_up() {
                out.link(link.id, LinkState::Up);
            }
        } else {
            // The link was closed before it was up; the target receives a `Bye`.
            let why = closed().with_backend(self.name);
            self.end(number, why, None, Phase::Closing, out);
        }
    }

    /// Reports that the library's description of an endpoint has changed.
    pub(super) fn take_change(&mut self, endpoint: EndpointId, out: &mut Outbox) {
        let Some(link) = self.sessions.get(&endpoint.0).filter(|session| session.is_up()) else {
            // Expected: the endpoint changed before its handshake was done, or after its end.
            return;
        };
        // Without a link a peer initiated the session, and it has no route at this end.
        let Some(link) = link.link.clone() else { return };
        let (text, capabilities) = self.fabric.describe(endpoint);
        *link.known.lock() = Some((text, Arc::new(capabilities)));
        if self.links.contains_key(&link.id) {
            out.link(link.id, LinkState::Changed);
        }
    }

    /// Ends a link that the target refused.
    fn take_refuse(
        &mut self,
        number: u64,
        why: Refusal,
        proof: &[u8],
        out: &mut Outbox,
    ) -> Result<()> {
        let Some(greeting) =
            self.sessions.get_mut(&number).and_then(|session| session.greeting.take())
        else {
            return Err(malformed("out of place"));
        };
        let why = greeting.refusal_error(why, proof).with_backend(self.name);
        let restarted = why.kind() == ErrorKind::PeerRestarted;
        let state = if restarted { LinkState::Restarted } else { LinkState::Lost(why.clone()) };
        self.end(number, why, Some(state), Phase::Lost, out);
        Ok(())
    }
}

/// Returns a placeholder identity for an initiator that only receives the error that its metadata
/// is old.
fn identity_with_old_metadata() -> Identity {
    Identity { name: "a peer with old metadata".into(), incarnation: Incarnation([0; 16]) }
}

/// Encodes this transport's part of a hello: the initiator's process, and the address to answer.
pub(super) fn hello_rest(process: ProcessId, address: &[u8]) -> Vec<u8> {
    let mut rest = Vec::new();
    process.encode(&mut rest);
    rest.put_block(address);
    rest
}

fn read_hello_rest(rest: &[u8]) -> Result<(ProcessId, &[u8])> {
    let mut reader = Reader::new("hello", rest);
    let said = (ProcessId::decode(&mut reader)?, reader.block(MAX_ADDRESS)?);
    reader.end()?;
    Ok(said)
}
