//! The state that all requests share.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Instant;

use hyper::header::{AUTHORIZATION, HeaderMap, HeaderValue};
use tokio::sync::{mpsc, watch};

use super::conversation::Conversations;
use super::fallback::Fallbacks;
use super::retries::RetryBudget;
use crate::admission::RequestAdmission;
use crate::error::Result;
use crate::fleet::Fleet;
use crate::fleet::instance::{Instance, Reason};
use crate::fleet::watch::{WatchScope, round};
use crate::last_errors::LastErrors;
use crate::log::AccessLogger;
use crate::metrics::Metrics;
use crate::recording::writer::Recorder;
use crate::release::Releases;
use crate::request::headers;
use crate::serve::keys::Keys;
use crate::setup::Setup;
use crate::timeline::History;
use crate::upstream::{Fault, Upstream};

/// State built from a configuration. A new configuration replaces it as a whole; requests in
/// progress keep the one that they began with.
#[derive(Debug)]
pub(crate) struct LiveSetup {
    pub(crate) setup: Arc<Setup>,
    pub(crate) fleet: Arc<Fleet>,
    pub(crate) upstream: Upstream,
    pub(crate) admission: Arc<RequestAdmission>,
    pub(crate) keys: Option<Arc<Keys>>,
    pub(crate) key_for_instances: Option<HeaderValue>,
}

impl LiveSetup {
    /// # Errors
    ///
    /// Fails if the configuration is invalid or its keys cannot be read.
    pub(crate) fn new(setup: Setup, before: Option<&LiveSetup>) -> Result<Self> {
        setup.valid()?;
        let keys = setup.api_key_file.as_deref().map(Keys::from_file).transpose()?.map(Arc::new);
        let fleet = Fleet::new(&setup, before.map(|before| &*before.fleet));
        // Unchanged settings keep their connections and admission slots.
        let same = before.filter(|before| before.setup.timeouts.connect == setup.timeouts.connect);
        let upstream = same.map_or_else(|| Upstream::new(&setup), |before| before.upstream.clone());
        let same = before.filter(|before| before.setup.limits == setup.limits);
        let admission = same.map_or_else(
            || Arc::new(RequestAdmission::new(&setup.limits)),
            |before| Arc::clone(&before.admission),
        );
        Ok(LiveSetup {
            fleet: Arc::new(fleet),
            upstream,
            admission,
            keys,
            key_for_instances: setup
                .openai_api_key
                .as_ref()
                .and_then(|key| headers::bearer(key.text())),
            setup: Arc::new(setup),
        })
    }

    /// Returns the headers of the router's own requests to instances.
    pub(crate) fn headers_for_instances(&self) -> HeaderMap {
        self.key_for_instances.iter().map(|key| (AUTHORIZATION, key.clone())).collect()
    }

    fn with_fleet(&self, fleet: Fleet) -> Self {
        LiveSetup {
            setup: Arc::clone(&self.setup),
            fleet: Arc::new(fleet),
            upstream: self.upstream.clone(),
            admission: Arc::clone(&self.admission),
            keys: self.keys.clone(),
            key_for_instances: self.key_for_instances.clone(),
        }
    }
}

/// The state that all requests share.
#[derive(Debug)]
pub(crate) struct Core {
    live: RwLock<Arc<LiveSetup>>,
    pub(crate) metrics: Metrics,
    pub(crate) access: AccessLogger,
    pub(crate) recorder: Recorder,
    pub(crate) errors: LastErrors,
    pub(crate) history: History,
    pub(crate) budget: RetryBudget,
    pub(crate) conversations: Conversations,
    pub(crate) fallbacks: Fallbacks,
    pub(crate) releases: Arc<Releases>,
    /// Held while a new configuration replaces the current one.
    changes: tokio::sync::Mutex<()>,
    ids: Mutex<HashSet<String>>,
    stored: Mutex<ResponseOwners>,
    /// Each request in progress holds a clone. `None` once a drain has begun.
    working: Mutex<Option<mpsc::Sender<()>>>,
    /// True once requests still in progress must end.
    pub(crate) end: watch::Sender<bool>,
    /// Wakes the task that watches the instances.
    pub(crate) look: tokio::sync::Notify,
    /// Wakes the task that checks instances for the first time.
    pub(crate) newcomers: tokio::sync::Notify,
}

/// The instances that stored the latest responses.
#[derive(Debug, Default)]
struct ResponseOwners {
    instances: HashMap<String, String>,
    order: VecDeque<String>,
}

const STORED: usize = 65_536;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Core {
    /// Creates the shared state. The returned receiver closes once a drain has begun and the last
    /// request has ended.
    pub(crate) fn new(
        live: LiveSetup,
        access: AccessLogger,
        recorder: Recorder,
    ) -> (Self, mpsc::Receiver<()>) {
        let (working, none_works) = mpsc::channel(1);
        let metrics = Metrics::new(recorder.lost());
        let releases = Releases::new(live.setup.releaser.clone(), Arc::clone(&metrics.releases));
        let core = Core {
            live: RwLock::new(Arc::new(live)),
            metrics,
            access,
            recorder,
            errors: LastErrors::default(),
            history: History::default(),
            budget: RetryBudget::default(),
            conversations: Conversations::default(),
            fallbacks: Fallbacks::default(),
            releases: Arc::new(releases),
            changes: tokio::sync::Mutex::default(),
            ids: Mutex::default(),
            stored: Mutex::default(),
            working: Mutex::new(Some(working)),
            end: watch::Sender::new(false),
            look: tokio::sync::Notify::new(),
            newcomers: tokio::sync::Notify::new(),
        };
        (core, none_works)
    }

    pub(crate) fn live(&self) -> Arc<LiveSetup> {
        Arc::clone(&self.live.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Applies a new configuration after checking its new instances. Calls `read` under the lock,
    /// so that the last caller's configuration is also the last one read.
    ///
    /// # Errors
    ///
    /// Fails as `read` and [`LiveSetup::new`] do; the current configuration then stays.
    pub(crate) async fn replace(
        self: &Arc<Self>,
        read: impl FnOnce() -> Result<Setup>,
        then: impl FnOnce(),
    ) -> Result<()> {
        let _one_at_a_time = self.changes.lock().await;
        let setup = read()?;
        let live = LiveSetup::new(setup, Some(&self.live()))?;
        self.swap(live).await;
        then();
        Ok(())
    }

    /// Changes the fleet after checking its new instances.
    pub(crate) async fn change_fleet<E>(
        self: &Arc<Self>,
        change: impl FnOnce(&Fleet) -> std::result::Result<Fleet, E>,
    ) -> std::result::Result<(), E> {
        let _one_at_a_time = self.changes.lock().await;
        let before = self.live();
        let live = before.with_fleet(change(&before.fleet)?);
        self.swap(live).await;
        Ok(())
    }

    /// Replaces the fleet if `change` returns another one. Does not wait for new instances, which
    /// get no requests before their first check.
    pub(crate) async fn place(&self, change: impl FnOnce(&Fleet) -> Option<Fleet>) {
        let _one_at_a_time = self.changes.lock().await;
        let before = self.live();
        if let Some(fleet) = change(&before.fleet) {
            let live = Arc::new(before.with_fleet(fleet));
            *self.live.write().unwrap_or_else(PoisonError::into_inner) = live;
            self.newcomers.notify_one();
        }
    }

    /// Checks new instances before the swap, so that requests find them up.
    async fn swap(self: &Arc<Self>, live: LiveSetup) {
        let live = Arc::new(live);
        round(self, &live, WatchScope::Newcomers).await;
        *self.live.write().unwrap_or_else(PoisonError::into_inner) = live;
    }

    /// Returns a token that a request in progress holds; `None` while draining.
    pub(crate) fn work(&self) -> Option<mpsc::Sender<()>> {
        lock(&self.working).clone()
    }

    pub(crate) fn is_draining(&self) -> bool {
        lock(&self.working).is_none()
    }

    /// Stops admitting requests.
    pub(crate) fn drain(&self) {
        *lock(&self.working) = None;
    }

    /// Reserves an id. Returns false if another request in progress has it.
    pub(crate) fn take_id(&self, id: &str) -> bool {
        lock(&self.ids).insert(id.to_owned())
    }

    pub(crate) fn forget_id(&self, id: &str) {
        lock(&self.ids).remove(id);
    }

    /// Remembers which instance stored a response.
    pub(crate) fn store(&self, response: String, instance: &str) {
        let stored = &mut *lock(&self.stored);
        if stored.instances.insert(response.clone(), instance.to_owned()).is_none() {
            stored.order.push_back(response);
        }
        if stored.order.len() > STORED
            && let Some(oldest) = stored.order.pop_front()
        {
            stored.instances.remove(&oldest);
        }
    }

    pub(crate) fn stored_by(&self, response: &str) -> Option<String> {
        lock(&self.stored).instances.get(response).cloned()
    }

    /// Records a leg's failure against its instance.
    pub(crate) fn blame(&self, live: &LiveSetup, instance: &Instance, fault: &Fault) {
        let what = format!("{} leg: {fault}", instance.role.as_str());
        let reason = match fault {
            // A busy instance is not broken: it may be too busy to accept connections.
            Fault::Late(_) | Fault::Busy(_) | Fault::Unreached(_) => Reason::Slow,
            Fault::Refused(_) => Reason::Refused,
            _ => Reason::Errors,
        };
        self.blame_for(live, instance, reason, &what);
    }

    pub(crate) fn blame_for(
        &self,
        live: &LiveSetup,
        instance: &Instance,
        reason: Reason,
        what: &str,
    ) {
        self.errors.add(instance.name(), what);
        if live.fleet.failed(instance, reason, what, &live.setup.health, Instant::now()) {
            self.metrics.ejection(reason.as_str());
            tracing::warn!(
                instance = instance.name(),
                why = what,
                "an instance is ejected for a while"
            );
        }
        // It may have restarted: query its ranks again.
        instance.state.forget_ranks();
        self.look.notify_one();
    }
}
