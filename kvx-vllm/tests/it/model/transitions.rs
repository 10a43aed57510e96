//! The effects of the events. Each calls the functions of the engine that its runtime would call.

use std::sync::Arc;
use std::time::Duration;

use kvx_vllm::engine::{
    Action, Allocation, Arrival, BlockLists, Ending, FailureKind, HandshakeFailure, Kept,
    LoadFailure, Move, MoveFailure, MoveId, Outcome, Status, Transferred, WorkerRank,
};
use kvx_vllm::params::{TransferMode, TransferParams};
use kvx_vllm::wire::{EngineNotification, PushGrant};

use super::events::Event;
use super::scene::{Bug, LEASE, PATIENCE, Role, Scene, Sight, TOKENS, time};
use super::state::{Broken, Content, Flight, Id, Lease, Leg, Message, Progress, Question, State};

impl State {
    /// Returns the state after an event.
    pub(super) fn after(&self, scene: &Scene, event: Event) -> State {
        let mut next = self.clone();
        match event {
            Event::Start(request) => next.start(scene, request),
            Event::Prefilled(request) => next.prefilled(scene, request),
            Event::ToDecode(request) => next.route(scene, request),
            Event::Admit(request) => next.admit(scene, request),
            Event::Step(role) => next.step(scene, role),
            Event::Reuse(block) => next.reuse(Role::Prefill, block),
            Event::Deliver(message) => {
                next.remove_message(&message);
                next.deliver(scene, &message);
            }
            Event::Answer(role, question) => {
                next.remove_question(role, &question);
                next.answer(scene, role, question);
            }
            Event::Arrive(role, request) => next.arrive(scene, role, request),
            Event::Break(role, request) => next.break_off(scene, role, request),
            Event::TimeOut(role, request) => next.time_out(scene, role, request),
            Event::Settle(role, request) => next.settle(scene, role, request),
            Event::Pass => next.pass(),
            Event::Lose(message) => {
                next.fault(|faults| &mut faults.losses);
                next.remove_message(&message);
            }
            Event::Repeat(message) => {
                next.fault(|faults| &mut faults.repeats);
                next.deliver(scene, &message);
            }
            Event::Refuse(role, question) => {
                next.fault(|faults| &mut faults.losses);
                next.remove_question(role, &question);
                next.refuse(scene, role, &question);
            }
            Event::Abort(request) => {
                next.fault(|faults| &mut faults.aborts);
                next.end_request(scene, request, Status::Aborted);
            }
            Event::Restart(role) => {
                next.fault(|faults| &mut faults.restarts);
                next.replace(scene, role);
            }
            Event::Notice(role) => next.notice(scene, role),
        }
        next.seal(scene)
    }

    fn fault(&mut self, kind: impl Fn(&mut super::scene::Faults) -> &mut u8) {
        self.faults = self.faults.take(kind).expect("a fault that may happen");
    }

    fn remove_message(&mut self, message: &Message) {
        let at = self.messages.iter().position(|known| known == message);
        self.messages.remove(at.expect("a message under way"));
    }

    fn remove_question(&mut self, role: Role, question: &Question) {
        let at = self.questions.iter().position(|known| *known == (role, question.clone()));
        self.questions.remove(at.expect("a question without an answer"));
    }

    fn start(&mut self, scene: &Scene, request: usize) {
        let (now, deadline) = (self.now, self.now + PATIENCE);
        self.requests[request].legs[0] = Leg::Started;
        self.requests[request].deadline = deadline;
        let id = scene.name(Role::Prefill, request);
        let arrival = Arrival {
            request: id,
            prompt_tokens: TOKENS,
            params: Some(scene.asked()),
            deadline: Some(time(deadline)),
        };
        let side = self.side_mut(Role::Prefill);
        side.scheduler.on_new_request(time(now), arrival).expect("right parameters");
        let block = self.take(Role::Prefill, request);
        let allocation =
            Allocation { fill: BlockLists::single(Vec::new()), computed: 0, external: 0 };
        let side = self.side_mut(Role::Prefill);
        side.scheduler.update_state_after_alloc(time(now), id, allocation);
        side.running.insert(request, vec![block]);
        side.asked = true;
    }

    fn prefilled(&mut self, scene: &Scene, request: usize) {
        let side = self.side_mut(Role::Prefill);
        let block = side.running[&request][0];
        side.pool.contents[block as usize] = Content::Of(request);
        let (life, stamp) = (side.life, side.pool.reference().stamp);
        let params = self.end_leg(scene, Role::Prefill, request, Status::LengthCapped);
        let now = self.now;
        let entry = &mut self.requests[request];
        entry.params =
            params.filter(|_| scene.mode == TransferMode::Pull && !entry.has_ended).map(Arc::new);
        entry.published = (life, stamp);
        if now >= entry.deadline && entry.legs[1] == Leg::Idle {
            self.end(request);
        }
    }

    fn route(&mut self, scene: &Scene, request: usize) {
        let now = self.now;
        let entry = &mut self.requests[request];
        entry.legs[1] = Leg::Started;
        let deadline = entry.deadline;
        let params = match entry.params.take() {
            Some(params) => params,
            None => Arc::new(scene.pushed(request)),
        };
        let arrival = Arrival {
            request: scene.name(Role::Decode, request),
            prompt_tokens: TOKENS,
            params: Some(&params),
            deadline: Some(time(deadline)),
        };
        let side = self.side_mut(Role::Decode);
        side.scheduler.on_new_request(time(now), arrival).expect("right parameters");
        side.running.insert(request, Vec::new());
    }

    fn admit(&mut self, scene: &Scene, request: usize) {
        let now = self.now;
        let id = scene.name(Role::Decode, request);
        let block = self.take(Role::Decode, request);
        let side = self.side_mut(Role::Decode);
        let matched = side.scheduler.get_num_new_matched_tokens(time(now), id, 0);
        let fill = if matched.tokens > 0 { vec![block] } else { Vec::new() };
        let allocation =
            Allocation { fill: BlockLists::single(fill), computed: 0, external: matched.tokens };
        side.scheduler.update_state_after_alloc(time(now), id, allocation);
        side.running.insert(request, vec![block]);
        side.asked = true;
        if matched.tokens == 0 {
            self.end_leg(scene, Role::Decode, request, Status::LengthCapped);
            self.end(request);
        }
    }

    /// Gives a free block to a request.
    fn take(&mut self, role: Role, request: usize) -> u32 {
        let pool = &mut self.side_mut(role).pool;
        let block = pool.free().expect("a free block");
        pool.owners[block as usize] = Some(request);
        self.reuse(role, block);
        if self.uses(role, block, None) {
            let why =
                format!("{role:?} gives block {block} to request {request} during a transfer");
            self.breaks(Broken::InUse, why);
        }
        block
    }

    /// Frees blocks of a request. The peer's read for it may go on only if its lease is over.
    fn give_back(&mut self, role: Role, request: usize, blocks: &[u32], is_leased: bool) {
        for block in blocks {
            if self.uses(role, *block, is_leased.then_some(request)) {
                let why =
                    format!("{role:?} frees block {block} of request {request} during a transfer");
                self.breaks(Broken::InUse, why);
            }
            let owner = &mut self.side_mut(role).pool.owners[*block as usize];
            if owner.take() != Some(request) {
                let why = format!("{role:?} frees block {block} of request {request} twice");
                self.breaks(Broken::Twice, why);
            }
        }
    }

    /// Ends a request in one engine.
    fn end_leg(
        &mut self,
        scene: &Scene,
        role: Role,
        request: usize,
        status: Status,
    ) -> Option<TransferParams> {
        let now = self.now;
        if !self.side(role).running.contains_key(&request) {
            return None;
        }
        let side = self.side_mut(role);
        let blocks = side.running.remove(&request)?;
        let is_whole = status == Status::LengthCapped;
        let ending = Ending {
            status,
            blocks: BlockLists::single(blocks.clone()),
            computed: if is_whole { TOKENS } else { 0 },
            cached: None,
            reference: scene.has_generations().then(|| side.pool.reference()),
        };
        let id = scene.name(role, request);
        let finished = side.scheduler.request_finished(time(now), id, ending);
        side.asked = true;
        assert!(finished.withheld.is_none(), "{:?}", finished.withheld);
        if !finished.delay_free {
            self.give_back(role, request, &blocks, false);
        } else if finished.params.is_some() {
            side.leases.insert(request, Lease { until: now + LEASE, ordered: false });
            side.kept.insert((request, Kept::Request), blocks);
        } else {
            scene.see(Sight::Held);
            side.kept.insert((request, Kept::Load), blocks);
        }
        finished.params
    }

    /// Ends a request in both engines.
    fn end_request(&mut self, scene: &Scene, request: usize, status: Status) {
        self.end(request);
        for role in Role::BOTH {
            self.end_leg(scene, role, request, status);
        }
    }

    fn step(&mut self, scene: &Scene, role: Role) {
        let now = time(self.now);
        let side = self.side_mut(role);
        side.asked = false;
        let output = side.worker.get_finished(now);
        let output = side.aggregator.add([(0, output)]);
        let mut outcomes = side.scheduler.update_connector_output(now, output);
        outcomes.extend(side.scheduler.poll(now));
        for outcome in outcomes {
            self.heed(scene, role, outcome);
        }
        if role == Role::Prefill {
            let late = |request: &usize| self.requests[*request].deadline <= self.now;
            let late: Vec<_> = self.side(role).running.keys().copied().filter(late).collect();
            for request in late {
                self.end_request(scene, request, Status::Failed);
            }
        }
        let side = self.side_mut(role);
        let mut meta = side.scheduler.build_connector_meta(now);
        side.asked = false;
        scene.spoil(&mut meta);
        if !meta.is_empty() {
            side.worker.start_load_kv(now, meta);
            side.leases.values_mut().for_each(|lease| lease.ordered = true);
        }
        self.act(scene, role);
    }

    fn heed(&mut self, scene: &Scene, role: Role, outcome: Outcome) {
        let now = self.now;
        match outcome {
            Outcome::Loaded { request, computed } => {
                let request = scene.number(request.as_str());
                let Some(blocks) = self.side(role).running.get(&request).cloned() else {
                    return self.breaks(
                        Broken::Twice,
                        format!("request {request} is loaded, but has ended"),
                    );
                };
                assert_eq!(computed, TOKENS);
                scene.see(Sight::Loaded);
                let content = self.side(role).pool.contents[blocks[0] as usize];
                if content != Content::Of(request) {
                    self.breaks(Broken::Stale, format!("request {request} has loaded {content:?}"));
                }
                self.end_leg(scene, role, request, Status::LengthCapped);
                self.end(request);
            }
            Outcome::Failed { request, failure, held, .. } => {
                let request = scene.number(request.as_str());
                let held: Vec<u32> = held.iter().collect();
                let side = self.side_mut(role);
                let Some(blocks) = side.running.get_mut(&request) else {
                    return self.breaks(
                        Broken::Twice,
                        format!("request {request} has failed, but had ended"),
                    );
                };
                if !held.is_empty() {
                    scene.see(Sight::Held);
                    blocks.retain(|block| !held.contains(block));
                    side.kept.insert((request, Kept::Load), held);
                }
                scene.see(match failure {
                    LoadFailure::Stale => Sight::Stale,
                    LoadFailure::Deadline => Sight::TimedOut,
                    LoadFailure::NotPushed => Sight::NotPushed,
                    LoadFailure::Handshake(_) => Sight::Refused,
                    LoadFailure::Transfer(_) => Sight::Transfer,
                    other => unreachable!("{other:?}"),
                });
                // The prefill leg continues: no message tells the prefill that its client is gone.
                self.end_leg(scene, role, request, Status::Failed);
                self.end(request);
            }
            Outcome::Free { request, kept } => {
                let request = scene.number(request.as_str());
                let side = self.side_mut(role);
                let Some(blocks) = side.kept.remove(&(request, kept)) else {
                    let why = format!("{kept:?} of request {request} is freed, but is not kept");
                    return self.breaks(Broken::Twice, why);
                };
                let lease = match kept {
                    Kept::Load => None,
                    Kept::Request => side.leases.remove(&request),
                };
                let is_leased = lease.is_some_and(|lease| now < lease.until);
                if kept == Kept::Request {
                    scene.see(if is_leased { Sight::Released } else { Sight::Expired });
                }
                self.give_back(role, request, &blocks, is_leased);
            }
            Outcome::Lost { request, kept } => unreachable!("{kept:?} of {request} is lost"),
        }
    }

    /// Takes an engine's actions.
    fn act(&mut self, scene: &Scene, role: Role) {
        while let Some(action) = self.side_mut(role).worker.next_action() {
            match action {
                Action::Handshake { connection, .. } => {
                    self.questions.push((role, Question::Handshake(connection)));
                }
                Action::Read(what) => self.take_off(scene, role, &what, false),
                Action::Write(what) => self.take_off(scene, role, &what, true),
                Action::ReadGenerations { id, request, connection, blocks, .. } => {
                    let request = scene.number(request.as_str());
                    let (life, block) = (self.side(role).links[&connection], blocks[0].at(0));
                    let question = Question::Generation { request, id: Id(id), life, block };
                    self.questions.push((role, question));
                }
                Action::Notify { connection, request, bytes, .. } => {
                    self.send(role, self.side(role).links[&connection], request, bytes);
                }
                Action::Register { request, connection, mut registration, .. } => {
                    registration.kvx_grants = vec![grant(self.side(role).life)];
                    let bytes = EngineNotification::Registration(registration).encode().into();
                    self.send(role, self.side(role).links[&connection], Some(request), bytes);
                }
                Action::Cancel { id } => self.cancel(scene, role, id),
                Action::Fence { request } => {
                    let request = scene.number(request.as_str());
                    self.questions.push((role, Question::Fence(request)));
                }
                Action::Disconnect { connection } => {
                    self.side_mut(role).links.remove(&connection);
                }
                other => unreachable!("{other:?}"),
            }
        }
    }

    /// Sends a notification. Of equal ones under way, only the last arrives.
    fn send(
        &mut self,
        role: Role,
        life: u32,
        request: Option<kvx_vllm::engine::RequestId>,
        bytes: Arc<[u8]>,
    ) {
        let lives = (life, self.side(role).life);
        let message = Message { to: role.other(), lives, request, bytes };
        if !self.messages.contains(&message) {
            self.messages.push(message);
        }
    }

    fn take_off(&mut self, scene: &Scene, role: Role, what: &Move, write: bool) {
        let request = scene.number(what.request.as_str());
        let life = self.side(role).links[&what.connection];
        let peer = self.side(role.other());
        let remote = what.groups[0].remote.at(0);
        let is_granted = *what.grants == [grant(life)] && !peer.fenced.contains(&request);
        let is_rejected = life != peer.life || (write && !is_granted);
        let is_of_request = peer.pool.owners[remote as usize] == Some(request);
        if write && !is_rejected && !is_of_request {
            self.breaks(
                Broken::InUse,
                format!("a write goes to a block that request {request} has not"),
            );
        }
        self.flights.push(Flight {
            by: role,
            request,
            id: Id(what.id),
            write,
            life,
            local: what.groups[0].local.at(0),
            remote,
            deadline: what.deadline.seconds() as u64,
            progress: Progress::Moving,
            is_rejected,
            notification: what.notification.clone(),
        });
    }

    fn cancel(&mut self, scene: &Scene, role: Role, id: MoveId) {
        let forgets = scene.bug == Some(Bug::ForgetsTheWrite);
        let mut flights = self.flights.iter_mut();
        let flight = flights.find(|flight| flight.by == role && flight.id == Id(id));
        // A transfer may have ended before.
        let Some(flight) = flight.filter(|flight| flight.progress == Progress::Moving) else {
            return;
        };
        if forgets && flight.write && self.requests[flight.request].has_ended {
            let now = time(self.now);
            self.side_mut(role).worker.move_resolved(now, id, Err(failed(true, false)));
            return;
        }
        flight.progress = Progress::Cancelled;
    }

    /// Returns a transfer, which is no longer under way.
    fn landed(&mut self, role: Role, request: usize) -> Flight {
        let of = |flight: &Flight| (flight.by, flight.request) == (role, request);
        let at = self.flights.iter().position(of);
        self.flights.remove(at.expect("a transfer under way"))
    }

    /// Copies the block of a transfer, unless a side no longer lets it. Returns whether it did.
    fn copy(&mut self, flight: &Flight) -> bool {
        let peer = flight.by.other();
        if flight.life != self.side(peer).life || flight.is_rejected {
            return false;
        }
        let (from, to) = match flight.write {
            true => ((flight.by, flight.local), (peer, flight.remote)),
            false => ((peer, flight.remote), (flight.by, flight.local)),
        };
        let content = self.side(from.0).pool.contents[from.1 as usize];
        self.side_mut(to.0).pool.contents[to.1 as usize] = content;
        true
    }

    fn arrive(&mut self, scene: &Scene, role: Role, request: usize) {
        let flight = self.landed(role, request);
        let result = match self.copy(&flight) {
            true => Ok(transferred()),
            false => Err(failed(true, flight.life != self.side(role.other()).life)),
        };
        if result.is_ok()
            && let Some(bytes) = &flight.notification
        {
            self.send(role, flight.life, None, Arc::clone(bytes));
        }
        let now = time(self.now);
        self.side_mut(role).worker.move_resolved(now, flight.id.0, result);
        self.act(scene, role);
    }

    fn break_off(&mut self, scene: &Scene, role: Role, request: usize) {
        let flight = self.landed(role, request);
        let now = time(self.now);
        self.side_mut(role).worker.move_resolved(now, flight.id.0, Err(failed(true, false)));
        self.act(scene, role);
    }

    fn time_out(&mut self, scene: &Scene, role: Role, request: usize) {
        let mut flight = self.landed(role, request);
        let now = time(self.now);
        self.side_mut(role).worker.move_resolved(now, flight.id.0, Err(failed(false, false)));
        flight.progress = Progress::Unsettled;
        self.flights.push(flight);
        self.act(scene, role);
    }

    fn settle(&mut self, scene: &Scene, role: Role, request: usize) {
        let flight = self.landed(role, request);
        self.copy(&flight);
        let now = time(self.now);
        self.side_mut(role).worker.move_settled(now, flight.id.0);
        self.act(scene, role);
    }

    fn deliver(&mut self, scene: &Scene, message: &Message) {
        let now = self.now;
        let (receiver, sender) = message.lives;
        let role = message.to;
        if self.side(role).life != receiver {
            if self.side(role.other()).life == sender {
                let worker = &mut self.side_mut(role.other()).worker;
                let request = message.request.as_ref();
                worker.notification_failed(time(now), request, WorkerRank::default(), "no peer");
                self.act(scene, role.other());
            }
            return;
        }
        let notification = message.decoded();
        if let EngineNotification::Heartbeat { request_ids, .. } = &notification {
            for name in request_ids {
                let lease = self.side_mut(role).leases.get_mut(&scene.number(name));
                if let Some(lease) = lease.filter(|lease| lease.ordered) {
                    scene.see(Sight::Renewed);
                    lease.until = lease.until.max(now + LEASE * 2 / 3);
                }
            }
        }
        let from = format!("{:?}/{sender}", role.other());
        let heard = self.side_mut(role).worker.notified(time(now), &from, notification);
        heard.expect("a valid notification");
        self.act(scene, role);
    }

    fn answer(&mut self, scene: &Scene, role: Role, question: Question) {
        let now = time(self.now);
        let life = self.side(role.other()).life;
        match question {
            Question::Handshake(connection) => {
                let side = self.side_mut(role);
                side.links.insert(connection, life);
                side.worker.connected(now, connection, Ok(scene.plan()));
            }
            Question::Generation { id, life: read, block, .. } => {
                let (pool, word) = self.side(role.other()).pool.words(block);
                let words = [word];
                let result = match read == life {
                    true => Ok((pool, &words[..])),
                    false => Err("no peer".to_owned()),
                };
                self.side_mut(role).worker.generations_read(now, id.0, result);
            }
            Question::Fence(request) => {
                scene.see(Sight::Fenced);
                if scene.bug != Some(Bug::ReleasesBeforeTheWriteEnds) {
                    self.fence(role, request);
                }
                let id = scene.name(role, request);
                self.side_mut(role).worker.fenced(now, id);
            }
        }
        self.act(scene, role);
    }

    /// Keeps the peer's writes from a request's blocks.
    fn fence(&mut self, role: Role, request: usize) {
        let side = self.side_mut(role);
        side.fenced.insert(request);
        let life = side.life;
        for flight in &mut self.flights {
            if flight.write && flight.by != role && (flight.life, flight.request) == (life, request)
            {
                flight.is_rejected = true;
            }
        }
    }

    fn refuse(&mut self, scene: &Scene, role: Role, question: &Question) {
        let Question::Handshake(connection) = question else {
            unreachable!("only handshakes are refused");
        };
        let now = time(self.now);
        let failure = HandshakeFailure { setup: false, error: "no answer".into() };
        self.side_mut(role).worker.connected(now, *connection, Err(failure));
        self.act(scene, role);
    }

    /// Replaces an engine. Its transfers end with its process.
    fn replace(&mut self, scene: &Scene, role: Role) {
        let ended: Vec<usize> = self.side(role).running.keys().copied().collect();
        self.flights.retain(|flight| flight.by != role);
        self.questions.retain(|(by, _)| *by != role);
        self.restart(scene, role);
        for request in ended {
            // The router ends the other leg.
            self.end_request(scene, request, Status::Aborted);
        }
    }

    fn notice(&mut self, scene: &Scene, role: Role) {
        let now = time(self.now);
        let life = self.side(role.other()).life;
        let side = self.side_mut(role);
        let gone = side.links.iter().filter(|(_, link)| **link != life);
        let gone: Vec<_> = gone.map(|(connection, _)| *connection).collect();
        gone.into_iter().for_each(|connection| side.worker.connection_lost(now, connection));
        self.act(scene, role);
    }

    fn pass(&mut self) {
        let late = |request: &super::state::Request| {
            request.legs[0] == Leg::Started && !request.has_ended && request.deadline <= self.now
        };
        if let Some(request) = self.requests.iter().position(late) {
            return self
                .breaks(Broken::Late, format!("request {request} continues at its deadline"));
        }
        let Some(next) = self.next_time() else { unreachable!("time may pass") };
        self.pass_to(next);
        for number in 0..self.requests.len() {
            let runs =
                Role::BOTH.into_iter().any(|role| self.side(role).running.contains_key(&number));
            let request = &self.requests[number];
            let has_started = request.legs[0] == Leg::Started;
            if has_started && !runs && !request.has_ended && request.deadline <= next {
                self.end(number);
            }
        }
    }
}

/// Returns the grant for writes into the blocks of a decode's incarnation.
fn grant(life: u32) -> PushGrant {
    PushGrant { pp: 0, tp: 0, regions: vec![life.to_ne_bytes().into()] }
}

fn transferred() -> Transferred {
    let time = Duration::from_millis(1);
    Transferred { time, post: time, bytes: 1, descriptors: 1 }
}

fn failed(settled: bool, peer_is_gone: bool) -> MoveFailure {
    let (kind, error) = (FailureKind::TransferFailed, "no luck".into());
    MoveFailure { kind, settled, peer_is_gone, error }
}
