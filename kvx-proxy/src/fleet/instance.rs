//! One server: its load, its health, and what the proxy has learned about it.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use kvx_vllm::params::TransferParams;
use kvx_vllm::params::recipe::concurrent::{MooncakeTarget, PushTarget};

use super::knowledge::drift::Prediction;
use super::knowledge::{CacheKnowledge, PromptParts};
use super::models::Models;
use super::tokenizer_pause::TokenizerPause;
pub(crate) use crate::setup::Role;
use crate::setup::{Health, InstanceSetup};

/// A request whose prompt is cached costs at least this part of one that is not.
const LEAST_PART: u64 = 16;

/// The source of an instance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    /// The configuration.
    Setup,
    /// An operator, through `/instances`.
    Admin,
    /// A provider of discovery, which found this identity.
    Discovered {
        provider: Arc<str>,
        identity: Arc<str>,
        /// True if an operator has changed its settings, which then are not the provider's.
        is_changed: bool,
    },
}

impl Origin {
    /// Returns the provider that has found the instance.
    pub(crate) fn provider(&self) -> Option<&Arc<str>> {
        match self {
            Origin::Discovered { provider, .. } => Some(provider),
            Origin::Setup | Origin::Admin => None,
        }
    }
}

/// The pool, the role and the name of an instance.
pub(crate) type Place = (String, Role, String);

/// The reason for an ejection.
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

/// The detected kind of a prefill instance.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) enum PrefillKind {
    /// Not detected yet.
    #[default]
    Unknown,
    /// Prefill first, then decode.
    Nixl,
    /// Both legs run concurrently. Targets by data parallel rank; `None` until the rank's first
    /// answer.
    Push(Vec<Option<PushTarget>>),
    /// Both legs run concurrently, with one of these ranks.
    Mooncake(Vec<MooncakeTarget>),
}

/// Marks an instance that fails its health checks, or has not passed one yet.
const DOWN: u64 = u64::MAX;

/// One server in one role of one pool. A changed configuration creates a new instance with the same
/// [`State`].
#[derive(Debug)]
pub(crate) struct Instance {
    pub(crate) setup: InstanceSetup,
    pub(crate) role: Role,
    /// The pool's index in the fleet.
    pub(crate) pool: usize,
    pub(crate) pool_name: String,
    pub(crate) origin: Origin,
    /// The instance's name, for what outlives the instance.
    pub(crate) shared_name: Arc<str>,
    /// A hash of the instance's name, for prefix affinity.
    pub(crate) hash: u64,
    pub(crate) state: Arc<State>,
}

/// The mutable state of an instance, kept when its configuration changes.
#[derive(Debug)]
pub(crate) struct State {
    started: Instant,
    outstanding: AtomicU64,
    requests: AtomicU64,
    pub(crate) requests_total: AtomicU64,
    pub(crate) failures_total: AtomicU64,
    /// 0: open. [`DOWN`]: closed by failed health checks. Otherwise: closed until this many
    /// milliseconds after `started`.
    closed_until: AtomicU64,
    /// True if the instance refused connections when it was ejected.
    refuses: AtomicBool,
    /// The instance's round-robin position, in strides.
    pub(super) pass: AtomicU64,
    /// The models that the instance serves.
    pub(crate) models: Models,
    /// Counts the turns of the instance's data parallel ranks.
    turn: AtomicU64,
    checked: AtomicBool,
    is_stale: AtomicBool,
    /// True while one request tries the instance after an ejection.
    trying: AtomicBool,
    faults: Mutex<Faults>,
    kind: Mutex<PrefillKind>,
    /// True once the instance has answered as a Mooncake instance.
    mooncake: AtomicBool,
    /// True if `kind` has several data parallel ranks. Choices read this for each instance.
    has_ranks: AtomicBool,
    /// No other lock is taken while this one is held.
    cache: Mutex<CacheKnowledge>,
    /// Pauses of `/tokenize`, for texts and for chats.
    tokenizer_pauses: [TokenizerPause; 2],
}

#[derive(Debug, Default)]
struct Faults {
    health: u32,
    requests: u32,
    /// The number of ejections in a row.
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
            is_stale: AtomicBool::new(false),
            trying: AtomicBool::new(false),
            faults: Mutex::default(),
            kind: Mutex::default(),
            mooncake: AtomicBool::new(false),
            has_ranks: AtomicBool::new(false),
            cache: Mutex::default(),
            tokenizer_pauses: <[TokenizerPause; 2]>::default(),
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl State {
    fn millis(&self, now: Instant) -> u64 {
        // Never 0, which means open.
        now.saturating_duration_since(self.started).as_millis() as u64 + 1
    }

    /// Returns true if the instance accepts requests: it is open, or its ejection has ended and one
    /// request may try it.
    pub(crate) fn is_open(&self, now: Instant) -> bool {
        let closed_until = self.closed_until.load(Relaxed);
        closed_until == 0 || (closed_until != DOWN && self.millis(now) >= closed_until)
    }

    /// Returns true if the instance is open without restriction.
    pub(crate) fn is_sound(&self) -> bool {
        self.closed_until.load(Relaxed) == 0
    }

    /// Returns true if the instance may serve requests when no instance is open: it is neither down
    /// nor ejected for refused connections.
    pub(crate) fn is_usable(&self) -> bool {
        match self.closed_until.load(Relaxed) {
            0 => true,
            DOWN => false,
            _ => !self.refuses.load(Relaxed),
        }
    }

    /// Returns true if the instance's health checks fail, or none has passed yet.
    pub(crate) fn is_down(&self) -> bool {
        self.closed_until.load(Relaxed) == DOWN
    }

    /// Returns true if a health check has completed, whatever its result.
    pub(crate) fn is_checked(&self) -> bool {
        self.checked.load(Relaxed)
    }

    /// Lets the next check ask for the models and the kind too: another instance may have taken the
    /// address.
    pub(crate) fn check_again(&self) {
        self.is_stale.store(true, Relaxed);
    }

    /// Returns true if the next check asks for the models and the kind.
    pub(crate) fn is_stale(&self) -> bool {
        self.is_stale.load(Relaxed)
    }

    /// Returns the same, and forgets it.
    pub(crate) fn take_stale(&self) -> bool {
        self.is_stale.swap(false, Relaxed)
    }

    /// Returns true if a request may be sent to the instance. After an ejection, one request may
    /// try it per `eject_for`.
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

    /// Returns how many of the last requests failed, one after the other.
    pub(crate) fn failed_in_a_row(&self) -> u32 {
        lock(&self.faults).requests
    }

    pub(crate) fn last_fault(&self) -> Option<String> {
        lock(&self.faults).last.clone()
    }

    /// Records a successful request.
    pub(crate) fn succeeded(&self) {
        if self.closed_until.load(Relaxed) == DOWN {
            return; // A leg from before: only a health check reopens it.
        }
        let mut faults = lock(&self.faults);
        if faults.requests > 0 || faults.ejected > 0 {
            faults.requests = 0;
            faults.ejected = 0;
            self.closed_until.store(0, Relaxed);
        }
    }

    /// Records a failed request. `alone` means that no other instance of its pool and role is open.
    /// Returns true if the instance is ejected now.
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
        // The last open instance is ejected only if it refuses connections.
        if alone && !refused {
            return false;
        }
        // Other requests in progress at the time of an ejection fail too. They change nothing,
        // unless the instance refuses connections now.
        let says_more = refused && !self.refuses.load(Relaxed);
        if !self.is_open(now) && !self.trying.swap(false, Relaxed) && !says_more {
            return false;
        }
        let doubled = health.eject_for.saturating_mul(1 << faults.ejected.min(4));
        faults.ejected += 1;
        self.refuses.store(refused, Relaxed);
        self.closed_until.store(self.millis(now) + doubled.as_millis() as u64, Relaxed);
        drop(faults);
        self.cache().forget_sent();
        true
    }

    /// Records a passed health check. Returns true if the instance was down.
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

    /// Records a failed health check. With `spared` the instance stays up. Returns true if this
    /// failure took it down.
    pub(crate) fn unhealthy(&self, words: &str, health: &Health, spared: bool) -> bool {
        self.checked.store(true, Relaxed);
        let mut faults = lock(&self.faults);
        faults.health += 1;
        faults.last = Some(words.to_owned());
        if spared || self.is_down() || faults.health < health.down_after {
            return false;
        }
        self.closed_until.store(DOWN, Relaxed);
        drop(faults);
        self.forget_ranks();
        self.cache().forget_sent();
        true
    }

    pub(crate) fn kind(&self) -> PrefillKind {
        lock(&self.kind).clone()
    }

    pub(crate) fn set_kind(&self, kind: PrefillKind) {
        if matches!(kind, PrefillKind::Mooncake(_)) {
            self.mooncake.store(true, Relaxed);
        }
        let mut known = lock(&self.kind);
        *known = kind;
        self.kind_changed(&known);
    }

    fn kind_changed(&self, kind: &PrefillKind) {
        let has_ranks = matches!(kind, PrefillKind::Mooncake(targets) if targets.len() > 1);
        self.has_ranks.store(has_ranks, Relaxed);
    }

    pub(crate) fn was_mooncake(&self) -> bool {
        self.mooncake.load(Relaxed)
    }

    /// Forgets the targets of its ranks: it may have restarted.
    pub(crate) fn forget_ranks(&self) {
        let mut kind = lock(&self.kind);
        match &mut *kind {
            PrefillKind::Push(targets) => targets.iter_mut().for_each(|target| *target = None),
            PrefillKind::Mooncake(_) => *kind = PrefillKind::Unknown,
            PrefillKind::Unknown | PrefillKind::Nixl => {}
        }
        self.kind_changed(&kind);
    }

    /// Learns from a rank's answer to a prefill leg whether the instance pushes. If so, stores and
    /// returns the rank's target.
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
            self.kind_changed(&kind);
        }
        if let PrefillKind::Push(targets) = &mut *kind
            && let Some(known) = targets.get_mut(rank)
        {
            *known = Some(target.clone());
        }
        Some(target)
    }

    /// Returns true if the instance is known to have several data parallel ranks, as Mooncake
    /// instances tell.
    fn has_ranks(&self) -> bool {
        self.has_ranks.load(Relaxed)
    }

    /// Returns what the router knows about the instance's prefix cache.
    pub(crate) fn cache(&self) -> MutexGuard<'_, CacheKnowledge> {
        lock(&self.cache)
    }

    /// Returns the pause of questions for the tokens of texts, or of chats.
    pub(crate) fn tokenizer_pause(&self, is_chat: bool) -> &TokenizerPause {
        &self.tokenizer_pauses[usize::from(is_chat)]
    }

    /// Returns the next of `ranks` data parallel ranks.
    pub(crate) fn next_rank(&self, ranks: usize) -> usize {
        (self.turn.fetch_add(1, Relaxed) % ranks.max(1) as u64) as usize
    }
}

impl Instance {
    pub(crate) fn name(&self) -> &str {
        self.setup.name()
    }

    pub(crate) fn place(&self) -> Place {
        (self.pool_name.clone(), self.role, self.name().to_owned())
    }

    /// Returns the next data parallel rank, if the proxy chooses ranks for this instance.
    pub(crate) fn next_rank(&self) -> Option<usize> {
        let ranks = self.setup.ranks as usize;
        (ranks > 1).then(|| self.state.next_rank(ranks))
    }

    /// Returns true if both instances may serve a request together. They must be in one pool, must
    /// not name different compatibilities, and must share a model if the models of both are known.
    pub(crate) fn pairs_with(&self, other: &Instance) -> bool {
        self.pool == other.pool
            && self.state.models.share_one(&other.state.models)
            && match (&self.setup.compatibility, &other.setup.compatibility) {
                (Some(one), Some(other)) => one == other,
                _ => true,
            }
    }

    /// Returns for how many tokens the instance is busy with a request of `tokens`, of which it has
    /// these cached: those that it has not, but at least a part, since it loads and sends cached
    /// ones as well.
    pub(super) fn uncached(&self, tokens: u64, cached: Prediction) -> u64 {
        match cached.with_pending {
            0 => tokens,
            cached => tokens.saturating_sub(cached).max(tokens / LEAST_PART).max(1),
        }
    }

    /// Returns false if the instance has several data parallel ranks, which take turns and have
    /// caches of their own.
    pub(crate) fn has_one_cache(&self) -> bool {
        self.setup.ranks == 1 && !self.state.has_ranks()
    }

    /// Predicts how many tokens of a prompt the instance has cached.
    pub(super) fn predict(&self, prompt: PromptParts<'_>) -> Prediction {
        let is_known = !prompt.chunks.is_empty() || prompt.tokens.is_some();
        if !is_known || !self.has_one_cache() {
            return Prediction::default();
        }
        self.state.cache().predict(prompt)
    }

    /// Assigns a request of `tokens` to the instance, if it still accepts requests.
    pub(super) fn take(
        self: &Arc<Self>,
        tokens: u64,
        predicted: Prediction,
        now: Instant,
        eject_for: Duration,
    ) -> Option<InFlight> {
        self.state.enter(now, eject_for).then(|| self.take_anyway(tokens, predicted))
    }

    /// Assigns a request of `tokens` to the instance, even if it is ejected.
    pub(super) fn take_anyway(self: &Arc<Self>, tokens: u64, predicted: Prediction) -> InFlight {
        self.state.outstanding.fetch_add(tokens, Relaxed);
        self.state.requests.fetch_add(1, Relaxed);
        self.state.requests_total.fetch_add(1, Relaxed);
        InFlight { instance: Arc::clone(self), tokens, predicted }
    }
}

/// A request assigned to an instance. It counts as outstanding until this is dropped.
#[derive(Debug)]
pub(crate) struct InFlight {
    pub(crate) instance: Arc<Instance>,
    tokens: u64,
    predicted: Prediction,
}

impl InFlight {
    /// Returns the tokens for which the request counts at its instance.
    pub(crate) fn tokens(&self) -> u64 {
        self.tokens
    }

    /// Returns how many tokens of the prompt the router took for cached.
    pub(crate) fn predicted(&self) -> Prediction {
        self.predicted
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.instance.state.outstanding.fetch_sub(self.tokens, Relaxed);
        self.instance.state.requests.fetch_sub(1, Relaxed);
    }
}

#[cfg(test)]
mod tests;
