//! How links begin, and what their messages do.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::reactor::Outbox;
use kvx_core::transport::LinkState;
use kvx_core::{Error, Identity, Kind, Result};

use super::handle::Wiring;
use super::machine::Machine;
use super::messages::{Header, Message, VERSIONS};
use super::session::{Phase, Session};
use super::stream::Incoming;
use super::{EndpointId, Fabric};
use crate::control::Refusal;
use crate::process::ProcessId;

/// How long a handshake may take, unless peers are to be lost earlier.
const PATIENCE: Duration = Duration::from_secs(5);
/// The most peers whose first message is not whole.
const MAX_GREETINGS: usize = 64;
/// The most sessions that peers began.
const MAX_ACCEPTED: usize = 4096;

/// A peer whose first message is not whole yet.
pub(super) struct Greeting {
    incoming: Incoming,
    pub(super) until: Instant,
}

impl<F: Fabric> Machine<F> {
    fn patience(&self) -> Duration {
        PATIENCE.min(self.peer_timeout)
    }

    /// A number for a session that nobody can guess.
    fn draw(&self) -> Result<u64> {
        loop {
            let number = kvx_core::random_number()?;
            if number != 0 && !self.sessions.contains_key(&number) {
                return Ok(number);
            }
        }
    }

    /// Begins a link.
    pub(super) fn connect(&mut self, link: Arc<Wiring>, address: &[u8], foreign: bool, out: &mut Outbox) {
        let begun = self.draw().and_then(|number| {
            let endpoint = EndpointId(number);
            if foreign {
                self.fabric.connect_foreign(endpoint, address)?;
                return Ok((number, None));
            }
            let ours = (self.address)()?;
            self.fabric.connect(endpoint, &link.peer, address)?;
            Ok((number, Some(ours)))
        });
        match begun {
            Err(why) => {
                let why = why.backend(self.name);
                if link.gone.set(why.clone()).is_ok() {
                    out.link(link.id, LinkState::Lost(why));
                }
            }
            Ok((number, ours)) => {
                let until = Instant::now() + self.fabric.sets_up_within() + self.patience();
                self.look_by(until);
                self.links.insert(link.id, number);
                let mut session = Session::new(number, Some(Arc::clone(&link)), link.peer.clone(), until);
                session.foreign = foreign;
                self.sessions.insert(number, session);
                if let Some(address) = ours {
                    let (from, to, process) = (self.me.clone(), link.peer.clone(), self.process);
                    let hello = Message::Hello { versions: VERSIONS, from, to, process, address: &address };
                    self.send(number, &hello, out);
                }
            }
        }
    }

    /// Takes a frame from whomever.
    pub(super) fn take_frame(&mut self, frame: &[u8], out: &mut Outbox) {
        let (header, part) = match Header::read(frame) {
            Ok(read) => read,
            Err(why) => return tracing::warn!(backend = self.name, %why, "a frame is ignored"),
        };
        if header.to == 0 {
            return self.take_greeting(&header, part, out);
        }
        let Some(session) = self.sessions.get_mut(&header.to) else {
            return tracing::debug!(backend = self.name, "a frame for a link that has ended is ignored");
        };
        if session.phase == Phase::Lost || session.other != 0 && session.other != header.from {
            return;
        }
        session.silence.heard(Instant::now());
        match session.incoming.take(&header, part) {
            Ok(messages) => {
                for message in messages {
                    let taken = Message::decode(&message)
                        .and_then(|message| self.take_message(header.to, header.from, message, out));
                    if let Err(why) = taken {
                        return self.cut_off(header.to, why, out);
                    }
                }
            }
            Err(why) => self.cut_off(header.to, why, out),
        }
    }

    fn take_greeting(&mut self, header: &Header, part: &[u8], out: &mut Outbox) {
        if header.from == 0 || self.sessions.values().any(|session| session.other == header.from) {
            return;
        }
        if !self.greetings.contains_key(&header.from) && self.greetings.len() >= MAX_GREETINGS {
            // The oldest makes room.
            if let Some(oldest) =
                self.greetings.iter().min_by_key(|(_, greeting)| greeting.until).map(|(number, _)| *number)
            {
                self.greetings.remove(&oldest);
            }
        }
        let until = Instant::now() + self.fabric.sets_up_within() + self.patience();
        let greeting = self
            .greetings
            .entry(header.from)
            .or_insert_with(|| Greeting { incoming: Incoming::default(), until });
        let messages = match greeting.incoming.take(header, part) {
            Ok(messages) => messages,
            Err(why) => {
                self.greetings.remove(&header.from);
                return tracing::warn!(backend = self.name, %why, "a peer's first message is ignored");
            }
        };
        self.look_by(until);
        let mut messages = messages.into_iter();
        let Some(first) = messages.next() else { return };
        let Some(greeting) = self.greetings.remove(&header.from) else { return };
        match Message::decode(&first) {
            Ok(Message::Hello { versions, from, to, process, address }) => {
                self.take_hello(header.from, greeting.incoming, versions, from, &to, process, address, out);
            }
            Ok(_) => {
                tracing::warn!(backend = self.name, "a peer's first message is no hello, and is ignored")
            }
            Err(why) => tracing::warn!(backend = self.name, %why, "a peer's first message is ignored"),
        }
    }

    #[allow(clippy::too_many_arguments)] // the fields of a hello
    fn take_hello(
        &mut self,
        other: u64,
        incoming: Incoming,
        versions: (u16, u16),
        from: Identity,
        to: &Identity,
        process: ProcessId,
        address: &[u8],
        out: &mut Outbox,
    ) {
        let accepted = self.sessions.values().filter(|session| session.link.is_none()).count();
        if accepted >= MAX_ACCEPTED {
            return tracing::warn!(
                backend = self.name,
                ?from,
                "turned away: {MAX_ACCEPTED} peers are connected"
            );
        }
        let begun = self.draw().and_then(|number| {
            self.fabric.accept(EndpointId(number), &from, address)?;
            Ok(number)
        });
        let number = match begun {
            Ok(number) => number,
            Err(why) => return tracing::warn!(backend = self.name, ?from, %why, "a peer cannot be answered"),
        };
        let until = Instant::now() + self.patience();
        let mut session = Session::new(number, None, from, until);
        (session.other, session.incoming) = (other, incoming);
        self.sessions.insert(number, session);
        let refused = if versions.1 < VERSIONS.0 || versions.0 > VERSIONS.1 {
            Some(Error::new(
                Kind::Incompatible,
                format!(
                    "link versions {} to {} meet {} to {}: update the older end",
                    versions.0, versions.1, VERSIONS.0, VERSIONS.1
                ),
            ))
        } else if *to != self.me {
            Some(Error::new(Kind::PeerRestarted, format!("{to:?} was expected, and this is {:?}", self.me)))
        } else {
            None
        };
        let me = self.me.clone();
        if let Some(why) = refused {
            self.send(number, &Message::Refuse { from: me, why: Refusal::from(&why) }, out);
            if let Some(session) = self.sessions.get_mut(&number) {
                session.phase = Phase::Leaving(until);
                self.look_by(until);
                self.after_work(number, out);
            }
            return;
        }
        if let Some(session) = self.sessions.get_mut(&number) {
            session.phase = Phase::Up;
        }
        self.watch(number, process);
        let welcome =
            Message::Welcome { version: VERSIONS.1.min(versions.1), from: me, process: self.process };
        self.send(number, &welcome, out);
    }

    /// Acts on a message. Errors end the link.
    fn take_message(
        &mut self,
        number: u64,
        other: u64,
        message: Message<'_>,
        out: &mut Outbox,
    ) -> Result<()> {
        let Some(session) = self.sessions.get_mut(&number) else { return Ok(()) };
        let (up, initiator) = (session.is_up(), session.link.is_some());
        if session.is_ending() {
            // Only what brings the end of what is left matters.
            match message {
                Message::Bye => self.take_bye(number, out),
                Message::Released { id } if !initiator => {
                    session.granted.remove(&id);
                    self.confirm(number, Some(id), out);
                }
                _ => {}
            }
            return Ok(());
        }
        match message {
            Message::Welcome { from, process, .. } if !up && initiator => {
                if from != session.peer {
                    let why = format!("{from:?} answers for {:?}", session.peer);
                    return Err(Error::new(Kind::Malformed, why));
                }
                session.other = other;
                self.watch(number, process);
                self.come_up(number, out);
            }
            Message::Refuse { from, why } if !up && initiator => self.take_refuse(number, &from, why, out),
            Message::Want { import, id, key } if up && !initiator => {
                let answer = self.regions.check(id, &key.0);
                match answer {
                    Ok(()) => {
                        session.granted.insert(id);
                        self.send(number, &Message::Grant { import }, out);
                    }
                    Err(why) => {
                        self.send(number, &Message::Deny { import, why: Refusal::from(&why) }, out);
                    }
                }
            }
            Message::Grant { import } if up && initiator => self.take_grant(number, import, Ok(()), out)?,
            Message::Deny { import, why } if up && initiator => {
                self.take_grant(number, import, Err(why.into()), out)?;
            }
            Message::Recall { id } if up && initiator => self.take_recall(number, id, out),
            Message::Released { id } if up && !initiator => {
                if !session.granted.remove(&id) {
                    let why = format!("malformed link message: region {id} was not granted");
                    return Err(Error::new(Kind::Malformed, why));
                }
                self.confirm(number, Some(id), out);
            }
            Message::Notify { notice, bytes } if up && !initiator => {
                self.take_notice(number, notice, bytes, out)?;
            }
            Message::Ack { notice } if up && initiator => {
                out.settle(session.to_peer.acknowledged(notice)?, Ok(()));
                self.send_notices(number, out);
            }
            Message::Ping if up => self.send(number, &Message::Alive, out),
            Message::Alive if up => {}
            Message::Leave if up && initiator => {
                let why = self.error(Kind::PeerLost, "the peer's agent was shut down, or dropped this link");
                self.end(number, why.clone(), Some(LinkState::Lost(why)), Phase::Closing, out);
            }
            Message::Bye if up => self.take_bye(number, out),
            _ => return Err(Error::new(Kind::Malformed, "malformed link message: out of place")),
        }
        Ok(())
    }

    /// The peer holds nothing of ours any more, and says no more.
    fn take_bye(&mut self, number: u64, out: &mut Outbox) {
        let Some(session) = self.sessions.get_mut(&number) else { return };
        session.granted.clear();
        session.parted = true;
        self.confirm(number, None, out);
        let why = self.error(Kind::PeerLost, "the peer closed the link: its agent was shut down");
        self.end(number, why.clone(), Some(LinkState::Lost(why)), Phase::Lost, out);
    }

    /// A foreign endpoint can be used.
    pub(super) fn ready(&mut self, endpoint: EndpointId, out: &mut Outbox) {
        if let Some(session) = self.sessions.get(&endpoint.0)
            && session.foreign
            && matches!(session.phase, Phase::Greeting(_))
        {
            self.come_up(endpoint.0, out);
        }
    }

    /// A handshake is done.
    pub(super) fn come_up(&mut self, number: u64, out: &mut Outbox) {
        if let Some(why) = self.fabric.refuses(EndpointId(number)) {
            let why = why.backend(self.name);
            return self.end(number, why.clone(), Some(LinkState::Lost(why)), Phase::Closing, out);
        }
        let (text, capabilities) = self.fabric.describe(EndpointId(number));
        let Some(session) = self.sessions.get_mut(&number) else { return };
        let Some(link) = session.link.clone() else { return };
        *link.known.lock() = Some((text, Arc::new(capabilities)));
        session.phase = Phase::Up;
        if self.links.contains_key(&link.id) {
            if link.lane_up() {
                out.link(link.id, LinkState::Up);
            }
        } else {
            // It was closed before it was up: the target is told.
            let why = self.error(Kind::Closed, "the link was closed on this side");
            self.end(number, why, None, Phase::Closing, out);
        }
    }

    /// The library says something else of an endpoint than before.
    pub(super) fn changed(&mut self, endpoint: EndpointId, out: &mut Outbox) {
        let Some(link) = self.sessions.get(&endpoint.0).filter(|session| session.is_up()) else { return };
        let Some(link) = link.link.clone() else { return };
        let (text, capabilities) = self.fabric.describe(endpoint);
        *link.known.lock() = Some((text, Arc::new(capabilities)));
        if self.links.contains_key(&link.id) {
            out.link(link.id, LinkState::Changed);
        }
    }

    /// The target turns us away.
    fn take_refuse(&mut self, number: u64, from: &Identity, why: Refusal, out: &mut Outbox) {
        let Some(session) = self.sessions.get(&number) else { return };
        let (why, state) = if why.kind != Kind::PeerRestarted {
            let why = Error::from(why).backend(self.name);
            (why.clone(), LinkState::Lost(why))
        } else if from.name == session.peer.name && from.incarnation != session.peer.incarnation {
            let why = format!("{from:?} answers for {:?}: connect with its new metadata", session.peer);
            (self.error(Kind::PeerRestarted, why), LinkState::Restarted(from.incarnation))
        } else {
            let why = "another agent answers at the peer's address: the peer has ended";
            let why = self.error(Kind::PeerLost, why);
            (why.clone(), LinkState::Lost(why))
        };
        self.end(number, why, Some(state), Phase::Lost, out);
    }
}
