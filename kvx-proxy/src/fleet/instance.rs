//! One server: what it has to do, whether it may be asked, and what was learnt of it.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use kvx_vllm::params::TransferParams;
use kvx_vllm::params::recipe::concurrent::{MooncakeTarget, PushTarget};

use super::models::Models;
use crate::setup::{Health, InstanceSetup};

/// What an instance does in its pool.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize,
)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Role {
    Prefill,
    Decode,
}

impl Role {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Role::Prefill => "prefill",
            Role::Decode => "decode",
        }
    }
}

/// Why an instance is left out for a while.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reason {
    Refused,
    Errors,
    Slow,
    Health,
}

impl Reason {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Reason::Refused => "refused",
            Reason::Errors => "errors",
            Reason::Slow => "slow",
            Reason::Health => "health",
        }
    }
}

/// What a prefill instance has turned out to be.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) enum PrefillKind {
    /// It has not been asked yet.
    #[default]
    Unknown,
    /// Prefill first, then decode.
    Nixl,
    /// Both legs at once; by data parallel rank, as far as their answers have said who they are.
    Push(Vec<Option<PushTarget>>),
    /// Both legs at once, to one of these ranks.
    Mooncake(Vec<MooncakeTarget>),
}

/// Marks an instance that fails its health checks, or has not passed one yet.
const DOWN: u64 = u64::MAX;

/// One server in one role of one pool. A changed set-up makes another one with the same [`State`].
#[derive(Debug)]
pub(crate) struct Instance {
    pub(crate) setup: InstanceSetup,
    pub(crate) role: Role,
    /// The pool's place in the fleet.
    pub(crate) pool: usize,
    pub(crate) pool_name: String,
    /// Whether it came over `/instances`.
    pub(crate) added: bool,
    /// Its name as a number, for prefix affinity.
    pub(crate) hash: u64,
    pub(crate) state: Arc<State>,
}

/// What changes about an instance; it outlives changes of its set-up.
#[derive(Debug)]
pub(crate) struct State {
    started: Instant,
    outstanding: AtomicU64,
    requests: AtomicU64,
    pub(crate) requests_total: AtomicU64,
    pub(crate) failures_total: AtomicU64,
    /// 0: open. [`DOWN`]: closed by its health. Else closed until so many milliseconds after
    /// `started`.
    closed_until: AtomicU64,
    /// Whether it refused connections when it was left out.
    refuses: AtomicBool,
    /// Where round robin stands, in strides.
    pub(super) pass: AtomicU64,
    /// Which models it serves.
    pub(crate) models: Models,
    /// A data parallel rank's turn.
    turn: AtomicU64,
    checked: AtomicBool,
    /// Whether a request tries it after a time out.
    trying: AtomicBool,
    faults: Mutex<Faults>,
    kind: Mutex<PrefillKind>,
    /// Whether it has ever answered as Mooncake's.
    mooncake: AtomicBool,
}

#[derive(Debug, Default)]
struct Faults {
    health: u32,
    requests: u32,
    /// Ejections in a row.
    ejected: u32,
    last: Option<String>,
}

impl Default for State {
    fn default() -> Self {
        State {
            started: Instant::now(),
            outstanding: AtomicU64::new(0),
            requests: AtomicU64::new(0),
            requests_total: AtomicU64::new(0),
            failures_total: AtomicU64::new(0),
            closed_until: AtomicU64::new(DOWN),
            refuses: AtomicBool::new(false),
            pass: AtomicU64::new(0),
            models: Models::default(),
            turn: AtomicU64::new(0),
            checked: AtomicBool::new(false),
            trying: AtomicBool::new(false),
            faults: Mutex::default(),
            kind: Mutex::default(),
            mooncake: AtomicBool::new(false),
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl State {
    fn millis(&self, now: Instant) -> u64 {
        // Never 0, which means open.
        now.saturating_duration_since(self.started).as_millis() as u64 + 1
    }

    /// Whether it may be asked: it is open, or its time out is over and one request may try it.
    pub(crate) fn is_open(&self, now: Instant) -> bool {
        let closed_until = self.closed_until.load(Relaxed);
        closed_until == 0 || (closed_until != DOWN && self.millis(now) >= closed_until)
    }

    /// Whether it is open without any doubt.
    pub(crate) fn is_sound(&self) -> bool {
        self.closed_until.load(Relaxed) == 0
    }

    /// Whether it may be asked if nobody is open: it was left out for how it answered, if at all.
    pub(crate) fn is_usable(&self) -> bool {
        match self.closed_until.load(Relaxed) {
            0 => true,
            DOWN => false,
            _ => !self.refuses.load(Relaxed),
        }
    }

    /// Whether its health checks fail, or none has passed yet.
    pub(crate) fn is_down(&self) -> bool {
        self.closed_until.load(Relaxed) == DOWN
    }

    /// Whether a health check has come to an end, however it ended.
    pub(crate) fn is_checked(&self) -> bool {
        self.checked.load(Relaxed)
    }

    /// Takes the right to ask it: after a time out only one gets it, and the next one a time out
    /// later.
    fn enter(&self, now: Instant, eject_for: Duration) -> bool {
        let closed_until = self.closed_until.load(Relaxed);
        if closed_until == 0 {
            return true;
        }
        let millis = self.millis(now);
        if closed_until == DOWN || millis < closed_until {
            return false;
        }
        let next = millis + eject_for.as_millis() as u64;
        let entered =
            self.closed_until.compare_exchange(closed_until, next, Relaxed, Relaxed).is_ok();
        if entered {
            self.trying.store(true, Relaxed);
        }
        entered
    }

    pub(crate) fn outstanding(&self) -> u64 {
        self.outstanding.load(Relaxed)
    }

    pub(crate) fn requests(&self) -> u64 {
        self.requests.load(Relaxed)
    }

    pub(crate) fn last_fault(&self) -> Option<String> {
        lock(&self.faults).last.clone()
    }

    /// A request went well.
    pub(crate) fn succeeded(&self) {
        // The usual case takes no lock: nothing was wrong before.
        if self.closed_until.load(Relaxed) == DOWN {
            return; // A leg of old; its health decides.
        }
        let mut faults = lock(&self.faults);
        if faults.requests > 0 || faults.ejected > 0 {
            faults.requests = 0;
            faults.ejected = 0;
            self.closed_until.store(0, Relaxed);
        }
    }

    /// A request failed. `alone` says that nobody else of its pool and role is open. Returns
    /// whether it is left out now.
    pub(crate) fn failed(
        &self,
        reason: Reason,
        words: &str,
        health: &Health,
        alone: bool,
        now: Instant,
    ) -> bool {
        self.failures_total.fetch_add(1, Relaxed);
        let mut faults = lock(&self.faults);
        faults.last = Some(words.to_owned());
        faults.requests += 1;
        if self.is_down() || (faults.requests < health.eject_after && faults.ejected == 0) {
            return false;
        }
        let refused = reason == Reason::Refused;
        // Better a sick one than none: only one that refuses connections is left out then.
        if alone && !refused {
            return false;
        }
        // Whatever else was at work there when it was left out fails too, and says nothing new,
        // unless it refuses now.
        let says_more = refused && !self.refuses.load(Relaxed);
        if !self.is_open(now) && !self.trying.swap(false, Relaxed) && !says_more {
            return false;
        }
        let doubled = health.eject_for.saturating_mul(1 << faults.ejected.min(4));
        faults.ejected += 1;
        self.refuses.store(refused, Relaxed);
        self.closed_until.store(self.millis(now) + doubled.as_millis() as u64, Relaxed);
        true
    }

    /// A health check passed. Returns whether the instance was down.
    pub(crate) fn healthy(&self) -> bool {
        self.checked.store(true, Relaxed);
        let mut faults = lock(&self.faults);
        faults.health = 0;
        if !self.is_down() {
            return false;
        }
        faults.requests = 0;
        faults.ejected = 0;
        self.closed_until.store(0, Relaxed);
        true
    }

    /// A health check failed. `spared` says that it stays up all the same. Returns whether the
    /// instance is down for it now.
    pub(crate) fn unhealthy(&self, words: &str, health: &Health, spared: bool) -> bool {
        let first = !self.checked.swap(true, Relaxed);
        let mut faults = lock(&self.faults);
        faults.health += 1;
        faults.last = Some(words.to_owned());
        if first || spared || self.is_down() || faults.health < health.down_after {
            return false;
        }
        self.closed_until.store(DOWN, Relaxed);
        drop(faults);
        self.forget_ranks();
        true
    }

    pub(crate) fn kind(&self) -> PrefillKind {
        lock(&self.kind).clone()
    }

    pub(crate) fn set_kind(&self, kind: PrefillKind) {
        if matches!(kind, PrefillKind::Mooncake(_)) {
            self.mooncake.store(true, Relaxed);
        }
        *lock(&self.kind) = kind;
    }

    pub(crate) fn was_mooncake(&self) -> bool {
        self.mooncake.load(Relaxed)
    }

    /// Forgets who its ranks are: it may have been restarted.
    pub(crate) fn forget_ranks(&self) {
        let mut kind = lock(&self.kind);
        match &mut *kind {
            PrefillKind::Push(targets) => targets.iter_mut().for_each(|target| *target = None),
            PrefillKind::Mooncake(_) => *kind = PrefillKind::Unknown,
            PrefillKind::Unknown | PrefillKind::Nixl => {}
        }
    }

    /// Learns from the answer of a prefill leg to a rank whether the instance pushes, and who that
    /// rank is. Returns the rank's target if it does.
    pub(crate) fn learn_push(
        &self,
        params: &TransferParams,
        rank: usize,
        ranks: usize,
    ) -> Option<PushTarget> {
        use kvx_vllm::params::TransferMode;
        if params.transfer_mode != Some(TransferMode::Push) {
            return None;
        }
        let target = PushTarget {
            engine_id: params.remote_engine_id.clone()?,
            host: params.remote_host.clone()?,
            port: params.remote_port?,
            tp_size: params.tp_size.unwrap_or(1),
            pp_size: params.pp_size.unwrap_or(1),
        };
        let mut kind = lock(&self.kind);
        if !matches!(&*kind, PrefillKind::Push(targets) if targets.len() == ranks) {
            *kind = PrefillKind::Push(vec![None; ranks]);
        }
        if let PrefillKind::Push(targets) = &mut *kind
            && let Some(known) = targets.get_mut(rank)
        {
            *known = Some(target.clone());
        }
        Some(target)
    }

    /// The next one of so many data parallel ranks.
    pub(crate) fn next_rank(&self, ranks: usize) -> usize {
        (self.turn.fetch_add(1, Relaxed) % ranks.max(1) as u64) as usize
    }
}

impl Instance {
    pub(crate) fn name(&self) -> &str {
        self.setup.name()
    }

    /// The next one of its data parallel ranks, if the proxy shall pick one.
    pub(crate) fn next_rank(&self) -> Option<usize> {
        let ranks = self.setup.ranks as usize;
        (ranks > 1).then(|| self.state.next_rank(ranks))
    }

    /// Returns true if these two may serve a request together: they are of one pool, compatible as
    /// far as the set-up names compatibility, and have a model in common as far as theirs are
    /// known.
    pub(crate) fn pairs_with(&self, other: &Instance) -> bool {
        self.pool == other.pool
            && self.state.models.share_one(&other.state.models)
            && match (&self.setup.compatibility, &other.setup.compatibility) {
                (Some(one), Some(other)) => one == other,
                _ => true,
            }
    }

    /// Gives it a request of so many tokens, unless it may not be asked any more.
    pub(super) fn take(
        self: &Arc<Self>,
        tokens: u64,
        now: Instant,
        eject_for: Duration,
    ) -> Option<InFlight> {
        self.state.enter(now, eject_for).then(|| self.take_anyway(tokens))
    }

    /// Gives it a request of so many tokens, though it may be left out.
    pub(super) fn take_anyway(self: &Arc<Self>, tokens: u64) -> InFlight {
        self.state.outstanding.fetch_add(tokens, Relaxed);
        self.state.requests.fetch_add(1, Relaxed);
        self.state.requests_total.fetch_add(1, Relaxed);
        InFlight { instance: Arc::clone(self), tokens }
    }
}

/// A request that an instance has; it is counted as outstanding until this is dropped.
#[derive(Debug)]
pub(crate) struct InFlight {
    pub(crate) instance: Arc<Instance>,
    tokens: u64,
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.instance.state.outstanding.fetch_sub(self.tokens, Relaxed);
        self.instance.state.requests.fetch_sub(1, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn health() -> Health {
        Health { eject_after: 2, eject_for: Duration::from_secs(10), ..Health::default() }
    }

    #[test]
    fn an_instance_is_closed_until_its_first_check_passes() {
        let state = State::default();
        let now = Instant::now();
        assert!(!state.is_open(now));
        assert!(!state.unhealthy("refused", &health(), false), "it was never up");
        assert!(state.healthy());
        assert!(state.is_open(now) && state.is_sound());
    }

    #[test]
    fn after_its_time_out_one_request_tries_it_and_success_opens_it() {
        let state = State::default();
        state.healthy();
        let now = Instant::now();
        assert!(!state.failed(Reason::Errors, "x", &health(), false, now));
        assert!(state.failed(Reason::Errors, "x", &health(), false, now));
        assert!(!state.is_open(now + Duration::from_secs(9)));
        let later = now + Duration::from_secs(11);
        assert!(state.is_open(later));
        assert!(state.enter(later, health().eject_for));
        assert!(!state.enter(later, health().eject_for), "one request tries it");
        assert!(!state.is_open(later));
        state.succeeded();
        assert!(state.is_sound());
    }

    #[test]
    fn a_failed_trial_doubles_the_time_out() {
        let state = State::default();
        state.healthy();
        let now = Instant::now();
        state.failed(Reason::Errors, "x", &health(), false, now);
        state.failed(Reason::Errors, "x", &health(), false, now);
        let later = now + Duration::from_secs(11);
        assert!(state.enter(later, health().eject_for));
        assert!(state.failed(Reason::Errors, "x", &health(), false, later));
        assert!(!state.is_open(later + Duration::from_secs(19)));
        assert!(state.is_open(later + Duration::from_secs(21)));
    }

    #[test]
    fn many_failures_at_once_are_one_reason() {
        let state = State::default();
        state.healthy();
        let now = Instant::now();
        let ejections =
            (0..100).filter(|_| state.failed(Reason::Errors, "x", &health(), false, now)).count();
        assert_eq!(ejections, 1);
        assert!(state.is_open(now + Duration::from_secs(11)), "the time out was not doubled");
    }

    #[test]
    fn the_last_instance_is_ejected_for_refused_connections_only() {
        let state = State::default();
        state.healthy();
        let now = Instant::now();
        for _ in 0..10 {
            assert!(!state.failed(Reason::Slow, "late", &health(), true, now));
            assert!(!state.failed(Reason::Errors, "500", &health(), true, now));
            assert!(!state.unhealthy("late", &health(), true));
        }
        assert!(state.is_sound());
        assert!(state.failed(Reason::Refused, "refused", &health(), true, now));
        let state = State::default();
        state.healthy();
        let failed = || state.failed(Reason::Slow, "late", &health(), false, now);
        assert!(!failed() && failed(), "another could take over");
    }

    #[test]
    fn an_instance_that_was_slow_is_usable_until_it_refuses() {
        let state = State::default();
        let now = Instant::now();
        let failed = |reason| state.failed(reason, "x", &health(), false, now);
        assert!(!state.is_usable(), "no check has passed");
        state.healthy();
        assert!(!failed(Reason::Slow) && failed(Reason::Slow) && !state.is_open(now));
        assert!(state.is_usable());
        assert!(failed(Reason::Refused) && !state.is_usable(), "that is news");
        assert!(!failed(Reason::Refused), "and that is none");
        state.succeeded();
        assert!(
            !failed(Reason::Slow) && failed(Reason::Slow) && state.is_usable(),
            "it takes connections again"
        );
        (0..2).for_each(|_| _ = state.unhealthy("500", &health(), false));
        assert!(!state.is_usable());
    }

    #[test]
    fn health_takes_it_down_and_brings_it_back() {
        let state = State::default();
        state.healthy();
        assert!(!state.unhealthy("refused", &health(), false));
        assert!(state.unhealthy("refused", &health(), false));
        assert!(
            !state.is_open(Instant::now() + Duration::from_secs(3600)),
            "only a check brings it back"
        );
        state.succeeded();
        assert!(state.is_down(), "a request of old does not");
        assert!(state.healthy() && state.is_sound());
    }

    #[test]
    fn push_targets_are_learnt_by_rank_and_forgotten() {
        let state = State::default();
        let params = TransferParams::from_value(&serde_json::json!({
            "transfer_mode": "push", "remote_engine_id": "e_dp1", "remote_host": "h", "remote_port": 5600, "tp_size": 2,
        }))
        .unwrap();
        assert_eq!(state.learn_push(&params, 1, 2).unwrap().tp_size, 2);
        let PrefillKind::Push(targets) = state.kind() else { panic!("{:?}", state.kind()) };
        assert_eq!(
            (targets[0].is_none(), targets[1].as_ref().unwrap().engine_id.as_str()),
            (true, "e_dp1")
        );
        state.forget_ranks();
        assert_eq!(state.kind(), PrefillKind::Push(vec![None, None]));
        let mut pull = params;
        pull.transfer_mode = None;
        assert!(State::default().learn_push(&pull, 0, 1).is_none());
    }
}
