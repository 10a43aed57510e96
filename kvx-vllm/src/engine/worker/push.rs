//! Push: a decode registers its blocks and a prefill writes into them, in either order.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use kvx_core::ErrorKind;

use super::super::action::{Action, Connection, Move, MoveId, MoveLists};
use super::super::failure::{FailureKind, TransferFailure};
use super::super::peers::Reach;
use super::super::plan::{PeerPlan, pair_push};
use super::super::remote::RemoteEngine;
use super::load::{MoveState, ReceiveStage};
use super::{Waiting, Worker};
use crate::engine::deadlines::Deadlines;
use crate::ids::{Address, BlockLists, EngineId, RequestId, WorkerRank};
use crate::params::TransferMode;
use crate::time::Time;
use crate::wire::{EngineNotification, PushGrant, PushRegistration};

/// The maximum number of registrations that wait for a prefill, and of those remembered as served.
/// It bounds what peers can make this engine store.
const MAX_REGISTRATIONS: usize = 65_536;
/// The maximum size in bytes of the registrations that wait, and of the names remembered as served.
const MAX_BYTES: usize = 64 << 20;

/// A decode's registration of blocks for a request.
#[derive(Clone, Debug)]
struct Registration {
    request: RequestId,
    peer: Arc<RemoteEngine>,
    blocks: BlockLists,
    /// The grants that authorize the writes.
    grants: Arc<[PushGrant]>,
    /// The time until which the decode waits.
    until: Time,
}

impl Registration {
    /// Returns the approximate size of the registration in bytes.
    fn bytes(&self) -> usize {
        let names = self.request.as_str().len()
            + self.peer.engine.as_str().len()
            + self.peer.address.host.len();
        let lists = self.blocks.len() * size_of::<u32>() + size_of_val(self.blocks.groups());
        let grants = self.grants.iter().flat_map(|grant| &grant.regions);
        size_of::<Self>()
            + names
            + lists
            + grants.map(|region| size_of_val(region) + region.len()).sum::<usize>()
    }

    /// Returns the notification that one of `ranks` workers has finished writing.
    fn written(&self, ranks: u32) -> Option<Arc<[u8]>> {
        EngineNotification::done(self.request.as_str(), ranks).ok().map(|done| done.encode().into())
    }
}

/// Returns the length of both names in bytes.
fn name_bytes((engine, request): &(EngineId, RequestId)) -> usize {
    engine.as_str().len() + request.as_str().len()
}

/// A request whose blocks are being written.
#[derive(Clone, Debug)]
struct Push {
    registration: Registration,
    blocks: BlockLists,
    connection: Option<Connection>,
    /// Workers to notify after all writes. A single write carries the notification itself.
    untold: Vec<WorkerRank>,
    /// The number of writes that may still read the blocks.
    unsettled: usize,
    failed: bool,
    /// True if the blocks are released as soon as the writes end.
    expired: bool,
    /// True if the lease's end revoked the blocks, not the decode or this engine.
    lease_is_over: bool,
}

/// The requests and registrations that wait under one shared name.
#[derive(Clone, Debug, Default)]
struct Names {
    ready: BTreeSet<RequestId>,
    registered: BTreeSet<RequestId>,
}

impl Names {
    /// Returns a request and its registration: those of the same name, or else the only ones. Two
    /// of either are ambiguous.
    fn matching(&self) -> Option<(RequestId, RequestId)> {
        if let Some(name) = self.ready.intersection(&self.registered).next() {
            return Some((name.clone(), name.clone()));
        }
        match (self.ready.len(), self.registered.len()) {
            (1, 1) => Some((self.ready.first()?.clone(), self.registered.first()?.clone())),
            _ => None,
        }
    }
}

/// The prefill side of push.
#[derive(Clone, Debug)]
pub(super) struct Pushes {
    timeout: Duration,
    /// Finished requests without a registration.
    ready: BTreeMap<RequestId, BlockLists>,
    /// Registrations without a finished request, by the decode's name.
    registrations: BTreeMap<RequestId, Registration>,
    /// The size in bytes of `registrations`.
    bytes: usize,
    watchdog: Deadlines<RequestId>,
    /// Requests and registrations, by the part of the name that both engines share.
    names: BTreeMap<Box<str>, Names>,
    running: BTreeMap<RequestId, Push>,
    /// The times at which to repeat handshakes with the decodes of requests.
    pub(super) again: Deadlines<RequestId>,
    /// Served or withdrawn registrations. A repeated one must not match the next request of that
    /// name.
    served: BTreeSet<(EngineId, RequestId)>,
    /// The size of the names in `served` in bytes.
    served_bytes: usize,
    served_until: Deadlines<(EngineId, RequestId)>,
}

impl Pushes {
    pub(super) fn new(timeout: Duration) -> Self {
        Pushes {
            timeout,
            ready: BTreeMap::new(),
            registrations: BTreeMap::new(),
            bytes: 0,
            watchdog: Deadlines::default(),
            names: BTreeMap::new(),
            running: BTreeMap::new(),
            again: Deadlines::default(),
            served: BTreeSet::new(),
            served_bytes: 0,
            served_until: Deadlines::default(),
        }
    }

    pub(super) fn forget_late(&mut self, now: Time) {
        while let Some(request) = self.watchdog.take_reached(now) {
            self.take_registration(request.as_str());
        }
        while let Some(served) = self.served_until.take_reached(now) {
            self.forget_served(&served);
        }
    }

    pub(super) fn next_deadline(&self) -> Option<Time> {
        [self.watchdog.next(), self.again.next(), self.served_until.next()]
            .into_iter()
            .flatten()
            .min()
    }

    pub(super) fn len(&self) -> usize {
        self.ready.len() + self.registrations.len() + self.running.len()
    }

    pub(super) fn connection(&self, request: &RequestId) -> Option<Connection> {
        self.running.get(request)?.connection
    }

    /// Returns all requests that are being written.
    pub(super) fn all(&self) -> impl Iterator<Item = &RequestId> {
        self.running.keys()
    }

    /// Handles the end of a lease. Returns true if the blocks can be freed now, or false if the
    /// last write frees them.
    pub(super) fn expired(&mut self, request: &RequestId) -> bool {
        self.take_ready(request.as_str());
        let Some(push) = self.running.get_mut(request) else { return true };
        (push.expired, push.lease_is_over) = (true, true);
        if push.unsettled > 0 {
            return false;
        }
        self.running.remove(request);
        true
    }

    /// Returns whether the decode of a request that is being written has granted access to its
    /// memory, as kvx decodes do.
    pub(super) fn grants(&self, request: &RequestId) -> bool {
        self.running.get(request).is_some_and(|push| !push.registration.grants.is_empty())
    }

    /// Removes a request whose blocks are no longer wanted.
    pub(super) fn give_up(&mut self, request: &str) -> Option<RequestId> {
        self.take_ready(request).map(|(request, _)| request)
    }

    fn serve(&mut self, now: Time, registration: &Registration) {
        let served = (registration.peer.engine.clone(), registration.request.clone());
        self.served_until.set(served.clone(), now + self.timeout);
        let bytes = name_bytes(&served);
        if self.served.insert(served) {
            self.served_bytes += bytes;
        }
        while (self.served.len() > MAX_REGISTRATIONS || self.served_bytes > MAX_BYTES)
            && let Some(oldest) = self.served_until.take_next()
        {
            self.forget_served(&oldest);
        }
    }

    fn forget_served(&mut self, served: &(EngineId, RequestId)) {
        if self.served.remove(served) {
            self.served_bytes -= name_bytes(served);
        }
    }

    fn add_ready(&mut self, request: RequestId, blocks: BlockLists) {
        self.names.entry(request.shared().into()).or_default().ready.insert(request.clone());
        self.ready.insert(request, blocks);
    }

    fn take_ready(&mut self, request: &str) -> Option<(RequestId, BlockLists)> {
        let (request, blocks) = self.ready.remove_entry(request)?;
        self.unname(&request, |names| &mut names.ready);
        Some((request, blocks))
    }

    fn add_registration(&mut self, registration: Registration) {
        let request = registration.request.clone();
        self.bytes += registration.bytes();
        self.watchdog.set(request.clone(), registration.until);
        self.names.entry(request.shared().into()).or_default().registered.insert(request.clone());
        self.registrations.insert(request, registration);
    }

    fn take_registration(&mut self, request: &str) -> Option<Registration> {
        let (request, registration) = self.registrations.remove_entry(request)?;
        self.bytes -= registration.bytes();
        self.watchdog.clear(&request);
        self.unname(&request, |names| &mut names.registered);
        Some(registration)
    }

    fn unname(&mut self, request: &RequestId, side: fn(&mut Names) -> &mut BTreeSet<RequestId>) {
        let Some(names) = self.names.get_mut(request.shared()) else {
            return debug_assert!(false, "each ready request and each registration has a name");
        };
        side(names).remove(request);
        if names.ready.is_empty() && names.registered.is_empty() {
            self.names.remove(request.shared());
        }
    }

    /// Removes and returns a request and its registration, if both exist.
    fn take_matching(&mut self, shared: &str) -> Option<(RequestId, BlockLists, Registration)> {
        let (request, registered) = self.names.get(shared)?.matching()?;
        let registration = self.take_registration(registered.as_str())?;
        let (request, blocks) = self.take_ready(request.as_str())?;
        Some((request, blocks, registration))
    }
}

impl Worker {
    /// Decode: registers the blocks of a request with the prefill.
    pub(super) fn register(
        &mut self,
        request: &RequestId,
        connection: Connection,
        plan: &PeerPlan,
    ) {
        let Some(receive) = self.receives.get_mut(request) else {
            return debug_assert!(false, "begin registers loads that exist");
        };
        let remote = &receive.order.remote;
        let blocks = receive.order.local.groups().iter().map(|group| group.to_vec()).collect();
        let mut registration = PushRegistration::new(request.as_str(), blocks);
        registration.decode_engine_id = Some(self.settings.engine.as_str().to_owned());
        registration.decode_host = Some(self.settings.address.host.to_string());
        registration.decode_port = Some(self.settings.address.port);
        registration.decode_tp_size = Some(self.settings.tp_size);
        registration.remote_engine_id = Some(remote.peer.engine.as_str().to_owned());
        registration.remote_host = Some(remote.peer.address.host.to_string());
        registration.remote_port = Some(remote.peer.address.port);
        registration.remote_tp_size = Some(remote.peer.tp_size);
        registration.remote_pp_size = Some(remote.peer.pp_size);
        registration.kvx_registration = Some(self.registration);
        receive.stage = ReceiveStage::Awaiting { expected: plan.completions.max(1) as usize };
        self.actions.push_back(Action::Register {
            request: request.clone(),
            connection,
            ranks: plan.ranks().into_iter().collect(),
            registration: Box::new(registration),
        });
    }

    /// Prefill: handles a finished request, whose blocks can be pushed.
    pub(super) fn push_ready(&mut self, now: Time, request: RequestId, blocks: BlockLists) {
        let shared: Box<str> = request.shared().into();
        self.pushes.add_ready(request, blocks);
        self.push_matching(now, &shared);
    }

    /// Prefill: handles a decode's registration of blocks.
    pub(super) fn registered(
        &mut self,
        now: Time,
        registration: PushRegistration,
    ) -> kvx_core::Result<()> {
        if self.settings.mode != TransferMode::Push {
            return Err(ErrorKind::Unsupported.because(
                "received a push registration, but this engine does not push: set kv_connector of \
                 both engines to the same connector",
            ));
        }
        let missing = |key: &str| {
            ErrorKind::Malformed.because(format!(
                "malformed push registration without {key}: its blocks are not pushed"
            ))
        };
        let peer = RemoteEngine {
            engine: registration
                .decode_engine_id
                .ok_or_else(|| missing("decode_engine_id"))?
                .into(),
            address: Address {
                host: registration.decode_host.ok_or_else(|| missing("decode_host"))?.into(),
                port: registration.decode_port.ok_or_else(|| missing("decode_port"))?,
            },
            tp_size: registration.decode_tp_size.ok_or_else(|| missing("decode_tp_size"))?,
            pp_size: 1,
            // A registration does not contain the size. A decode whose handshake reports another is
            // rejected.
            dcp_size: self.settings.dcp_size,
            registration: registration.kvx_registration.unwrap_or(0),
        };
        let host = &peer.address.host;
        if self
            .settings
            .allowed_hosts
            .as_ref()
            .is_some_and(|allowed| !allowed.iter().any(|one| **one == **host))
        {
            return Err(ErrorKind::PermissionDenied.because(format!(
                "a push registration names the host {host:?}, which is not in \
                 kv_connector_extra_config.allowed_hosts: add it there if it is your decode"
            )));
        }
        let request = RequestId::from(registration.request_id);
        let served = (peer.engine.clone(), request.clone());
        let known = self.pushes.served.contains(&served)
            || self.pushes.registrations.contains_key(&request);
        if known
            || registration
                .remote_engine_id
                .is_some_and(|engine| engine != self.settings.engine.as_str())
        {
            return Ok(());
        }
        let until = now + self.pushes.timeout;
        let blocks = BlockLists::new(registration.local_block_ids);
        let grants = registration.kvx_grants.into();
        let registration =
            Registration { request: request.clone(), peer: Arc::new(peer), blocks, grants, until };
        let (count, bytes) = (self.pushes.registrations.len(), self.pushes.bytes);
        if count >= MAX_REGISTRATIONS || bytes + registration.bytes() > MAX_BYTES {
            return Err(ErrorKind::Busy.because(format!(
                "request {request} is not pushed: {count} push registrations of {bytes} bytes \
                 already wait for a prefill; retry later"
            )));
        }
        self.pushes.add_registration(registration);
        self.push_matching(now, request.shared());
        Ok(())
    }

    fn push_matching(&mut self, now: Time, shared: &str) {
        while let Some((request, blocks, registration)) = self.pushes.take_matching(shared) {
            self.pushes.serve(now, &registration);
            let push = Push {
                registration,
                blocks,
                connection: None,
                untold: Vec::new(),
                unsettled: 0,
                failed: false,
                expired: false,
                lease_is_over: false,
            };
            self.pushes.running.insert(request.clone(), push);
            self.find_decode(now, &request);
        }
    }

    pub(super) fn find_decode(&mut self, now: Time, request: &RequestId) {
        // Expected race: the push ended while it waited for the handshake.
        let Some(push) = self.pushes.running.get(request) else { return };
        let (peer, until) = (Arc::clone(&push.registration.peer), push.registration.until);
        match self.reach(now, &peer) {
            Reach::Ready(connection, plan) => self.write(now, request, connection, &plan),
            Reach::Wait => self.wait_for(&peer.engine, Waiting::Push(request.clone())),
            // There is no message that asks the decode to retry later, so the prefill retries
            // itself.
            Reach::Refused(_, Some(next)) if !next.has_reached(until) => {
                self.pushes.again.set(request.clone(), next);
            }
            Reach::Refused(why, _) => {
                self.record(self.describe_push(request, FailureKind::PushHandshakeFailed, &why));
                self.push_failed(request);
            }
        }
    }

    fn write(
        &mut self,
        now: Time,
        request: &RequestId,
        connection: Connection,
        plan: &Arc<PeerPlan>,
    ) {
        let Some(push) = self.pushes.running.get_mut(request) else {
            return debug_assert!(false, "find_decode writes pushes that exist");
        };
        let paired =
            pair_push(plan, &push.registration.blocks, &push.blocks, &self.settings.groups);
        let groups = match paired.and_then(|paired| paired.push_moves()) {
            Ok(groups) => groups,
            Err(why) => {
                self.record(self.describe_push(request, FailureKind::TransferSetupFailed, &why));
                return self.push_failed(request);
            }
        };
        push.connection = Some(connection);
        self.peers.hold(connection);
        let deadline = push.registration.until;
        let done = push.registration.written(self.settings.tp_size);
        let groups: Arc<[_]> = groups.into();
        let (local, remote) = (push.blocks.clone(), push.registration.blocks.clone());
        let grants = Arc::clone(&push.registration.grants);
        let lists = MoveLists { local, remote, tokens: None };
        for (at, lane) in plan.lanes.iter().enumerate() {
            let groups = lane.select(&groups);
            let rides = lane.memory.len() == 1;
            push.untold.extend((!rides).then_some(lane.rank));
            for part in lane.parts() {
                self.last_move += 1;
                let id = MoveId(self.last_move);
                self.moves.insert(id, MoveState::new(request, at, true));
                push.unsettled += 1;
                self.actions.push_back(Action::Write(Move {
                    id,
                    request: request.clone(),
                    connection,
                    part,
                    groups: Arc::clone(&groups),
                    lists: lists.clone(),
                    notification: done.clone().filter(|_| rides),
                    deadline,
                    grants: Arc::clone(&grants),
                }));
            }
        }
        if plan.lanes.is_empty() {
            self.push_over(now, request);
        }
    }

    pub(super) fn write_done(&mut self, now: Time, id: MoveId) {
        if let Some(connection) =
            self.moves.get(&id).and_then(|state| self.pushes.connection(&state.request))
        {
            self.peers.proven(connection);
        }
        self.write_over(now, id);
    }

    pub(super) fn write_over(&mut self, now: Time, id: MoveId) {
        let Some(MoveState { request, .. }) = self.moves.remove(&id) else {
            return debug_assert!(false, "each write ends once");
        };
        if let Some(push) = self.pushes.running.get_mut(&request) {
            push.unsettled -= 1;
            if push.unsettled == 0 {
                self.push_over(now, &request);
            }
        }
    }

    /// Ends a push whose writes no longer read the blocks. After a failed push, the blocks stay
    /// until the lease ends.
    fn push_over(&mut self, now: Time, request: &RequestId) {
        let Some(push) = self.pushes.running.get_mut(request) else {
            return debug_assert!(false, "only pushes that exist end");
        };
        let connection = push.connection.take();
        let (keeps, expired, lease_is_over) = (push.failed, push.expired, push.lease_is_over);
        let untold = std::mem::take(&mut push.untold).into_iter().filter(|_| !keeps);
        if let (Some(connection), Some(bytes)) =
            (connection, push.registration.written(self.settings.tp_size))
        {
            for rank in untold {
                let (request, bytes) = (Some(request.clone()), Arc::clone(&bytes));
                self.actions.push_back(Action::Notify { connection, rank, request, bytes });
            }
        }
        if !keeps || expired {
            if keeps && lease_is_over {
                self.note_expiry(request);
            }
            self.pushes.running.remove(request);
            self.sends.remove(request.as_str());
            self.output.finished_sending.push(request.clone());
        }
        if let Some(connection) = connection {
            self.peers.release(now, connection, &mut self.actions);
        }
    }

    pub(super) fn push_failed(&mut self, request: &RequestId) {
        if let Some(push) = self.pushes.running.get_mut(request) {
            push.failed = true;
        }
    }

    /// Revokes the blocks of a request. They are not pushed any more, and an output reports when no
    /// write reads them.
    pub(super) fn take_back(&mut self, now: Time, request: &RequestId) {
        self.pushes.give_up(request.as_str());
        let Some(push) = self.pushes.running.get_mut(request) else {
            if self.sends.keeps(request.as_str()) {
                self.sends.remove(request.as_str());
                self.output.finished_sending.push(request.clone());
            }
            return;
        };
        (push.failed, push.expired) = (true, true);
        let idle = push.unsettled == 0;
        self.cancel_moves(request);
        if idle {
            self.push_over(now, request);
        }
    }

    /// Handles a decode that no longer wants its blocks written. `theirs` is the decode's name of
    /// the request. Returns false if there is no such registration.
    pub(super) fn withdrawn(&mut self, now: Time, theirs: &str) -> bool {
        if self.sends.keeps(theirs) {
            return false;
        }
        if let Some(registration) = self.pushes.take_registration(theirs) {
            self.pushes.serve(now, &registration);
            return true;
        }
        let running = self
            .pushes
            .running
            .iter_mut()
            .find(|(_, push)| push.registration.request.as_str() == theirs);
        let Some((request, push)) = running else { return false };
        push.expired = true;
        let (request, idle) = (request.clone(), push.unsettled == 0);
        self.cancel_moves(&request);
        if idle {
            self.push_over(now, &request);
        }
        true
    }

    fn describe_push(
        &self,
        request: &RequestId,
        kind: FailureKind,
        error: &str,
    ) -> TransferFailure {
        let mut failure = TransferFailure::new(kind, error);
        failure.request = Some(request.clone());
        if let Some(push) = self.pushes.running.get(request) {
            failure.remote_request = Some(push.registration.request.clone());
            failure.engine = Some(push.registration.peer.engine.clone());
            failure.address = Some(push.registration.peer.address.clone());
            failure.blocks = push.blocks.groups().iter().map(|group| group.len()).collect();
        }
        failure
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_names_of_served_registrations_are_bounded_in_bytes() {
        let mut pushes = Pushes::new(Duration::from_secs(10));
        let address = Address { host: "h".into(), port: 1 };
        let peer = Arc::new(RemoteEngine::new("d", address));
        for number in 0..70 {
            let registration = Registration {
                request: format!("{number}{}", "x".repeat(1 << 20)).into(),
                peer: Arc::clone(&peer),
                blocks: BlockLists::default(),
                grants: [].into(),
                until: Time::default(),
            };
            pushes.serve(Time::default(), &registration);
            assert!(pushes.served_bytes <= MAX_BYTES, "{}", pushes.served_bytes);
        }
        assert_eq!(pushes.served.len(), 63);
        pushes.forget_late(Time::from_origin(Duration::from_secs(11)));
        assert_eq!((pushes.served.len(), pushes.served_bytes), (0, 0));
    }
}
