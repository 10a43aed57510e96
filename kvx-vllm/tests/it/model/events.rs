//! The events of the model: what may happen in a state.

use kvx_vllm::params::TransferMode;

use super::scene::{Faults, HORIZON, Role, Scene};
use super::state::{Flight, Leg, Message, Progress, Question, State};

/// An event.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Event {
    /// A request's prefill leg arrives and gets a block.
    Start(usize),
    /// The prefill has computed the prompt.
    Prefilled(usize),
    /// The router passes a request to the decode.
    ToDecode(usize),
    /// The decode gives a block to a request.
    Admit(usize),
    /// An engine takes its worker's report and passes on its scheduler's message.
    Step(Role),
    /// The prefill uses a free block for something else.
    Reuse(u32),
    /// A message arrives.
    Deliver(Message),
    /// A runtime answers its engine.
    Answer(Role, Question),
    /// A transfer accesses its memory and ends.
    Arrive(Role, usize),
    /// A cancelled transfer ends without having arrived.
    Break(Role, usize),
    /// The time of a transfer has passed, but it may access its memory.
    TimeOut(Role, usize),
    /// A transfer whose time had passed ends.
    Settle(Role, usize),
    /// The time of the next deadline comes.
    Pass,
    /// A message is lost.
    Lose(Message),
    /// A message arrives, and will arrive again.
    Repeat(Message),
    /// A handshake fails.
    Refuse(Role, Question),
    /// A client disconnects.
    Abort(usize),
    /// An engine is replaced by a new incarnation with the same name.
    Restart(Role),
    /// An engine's transport notices that the peer's incarnation is gone.
    Notice(Role),
}

impl Event {
    /// Returns whether the event is a fault or other chance, without which each run must end well.
    fn may_never_happen(&self) -> bool {
        matches!(
            self,
            Event::Reuse(_)
                | Event::Lose(_)
                | Event::Repeat(_)
                | Event::Refuse(..)
                | Event::Abort(_)
                | Event::Restart(_)
                | Event::Notice(_)
        )
    }
}

impl State {
    /// Returns whether nothing happens without another fault.
    pub(super) fn is_quiet(&self, scene: &Scene) -> bool {
        self.next_time().is_none()
            && self.messages.is_empty()
            && self.questions.is_empty()
            && self.flights.is_empty()
            && self.events(scene).iter().all(Event::may_never_happen)
    }

    /// Returns the events that may happen.
    pub(super) fn events(&self, scene: &Scene) -> Vec<Event> {
        let mut events = Vec::new();
        if self.broken.is_some() {
            return events;
        }
        self.requests_go_on(scene, &mut events);
        self.engines_go_on(scene, &mut events);
        self.network_goes_on(&mut events);
        if self.next_time().is_some() {
            events.push(Event::Pass);
        }
        events
    }

    fn requests_go_on(&self, scene: &Scene, events: &mut Vec<Event>) {
        let (prefill, decode) = (self.side(Role::Prefill), self.side(Role::Decode));
        let has_started = |number: usize| self.requests[number].legs[0] == Leg::Started;
        let may_abort = self.faults.take(|faults: &mut Faults| &mut faults.aborts).is_some();
        for (number, request) in self.requests.iter().enumerate() {
            // The requests are alike, so they start in order.
            if !has_started(number) {
                let next = number == 0 || has_started(number - 1);
                if next && prefill.pool.free().is_some() {
                    events.push(Event::Start(number));
                }
                continue;
            }
            if prefill.running.contains_key(&number) {
                events.push(Event::Prefilled(number));
            }
            let is_over = request.has_ended;
            let known = scene.mode == TransferMode::Push || request.params.is_some();
            if request.legs[1] == Leg::Idle && known && !is_over && self.now < request.deadline {
                events.push(Event::ToDecode(number));
            }
            if decode.running.get(&number).is_some_and(Vec::is_empty)
                && decode.pool.free().is_some()
            {
                events.push(Event::Admit(number));
            }
            if may_abort && !is_over {
                events.push(Event::Abort(number));
            }
        }
    }

    fn engines_go_on(&self, scene: &Scene, events: &mut Vec<Event>) {
        let may_restart = self.faults.take(|faults: &mut Faults| &mut faults.restarts).is_some();
        for role in Role::BOTH {
            let (side, peer) = (self.side(role), self.side(role.other()));
            if self.is_due(role) {
                events.push(Event::Step(role));
            }
            if may_restart {
                events.push(Event::Restart(role));
            }
            if side.links.values().any(|life| *life != peer.life) {
                events.push(Event::Notice(role));
            }
        }
        if scene.mode == TransferMode::Pull {
            let reusable = self.side(Role::Prefill).pool.reusable();
            events.extend(reusable.into_iter().map(Event::Reuse));
        }
    }

    fn network_goes_on(&self, events: &mut Vec<Event>) {
        let may_lose = self.faults.take(|faults: &mut Faults| &mut faults.losses).is_some();
        let may_repeat = self.faults.take(|faults: &mut Faults| &mut faults.repeats).is_some();
        let mut before = None;
        for message in &self.messages {
            // Equal messages are neighbours.
            if before.replace(message) == Some(message) {
                continue;
            }
            events.push(Event::Deliver(message.clone()));
            if may_lose {
                events.push(Event::Lose(message.clone()));
            }
            if may_repeat {
                events.push(Event::Repeat(message.clone()));
            }
        }
        for (role, question) in &self.questions {
            events.push(Event::Answer(*role, question.clone()));
            if may_lose && matches!(question, Question::Handshake(_)) {
                events.push(Event::Refuse(*role, question.clone()));
            }
        }
        for flight in &self.flights {
            let (by, request) = (flight.by, flight.request);
            if flight.progress == Progress::Unsettled {
                events.push(Event::Settle(by, request));
                continue;
            }
            events.push(Event::Arrive(by, request));
            if flight.progress == Progress::Cancelled {
                events.push(Event::Break(by, request));
            }
            if self.has_timed_out(flight) {
                events.push(Event::TimeOut(by, request));
            }
        }
    }

    /// Returns whether an engine must step before time passes.
    pub(super) fn is_due(&self, role: Role) -> bool {
        let side = self.side(role);
        // An engine fails requests in prefill at their deadline; the connector fails loads.
        let fails = |(number, _): (&usize, _)| self.requests[*number].deadline <= self.now;
        side.due || (role == Role::Prefill && side.running.iter().any(fails))
    }

    fn has_timed_out(&self, flight: &Flight) -> bool {
        flight.progress != Progress::Unsettled && flight.deadline <= self.now
    }

    /// Returns the time of the next deadline, if time may pass: engines step and transfers time out
    /// at once.
    pub(super) fn next_time(&self) -> Option<u64> {
        let due = Role::BOTH.into_iter().any(|role| self.is_due(role))
            || self.flights.iter().any(|flight| self.has_timed_out(flight));
        if due {
            return None;
        }
        let engines =
            Role::BOTH.into_iter().filter_map(|role| self.side(role).next_deadline(self.now));
        let unended = self
            .requests
            .iter()
            .filter(|request| request.legs[0] == Leg::Started && !request.has_ended);
        let moving = self.flights.iter().filter(|flight| flight.progress != Progress::Unsettled);
        engines
            .chain(unended.map(|request| request.deadline))
            .chain(moving.map(|flight| flight.deadline))
            .filter(|at| *at <= self.now + HORIZON)
            .min()
    }
}
