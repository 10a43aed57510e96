//! Discovery: providers list the instances of a fleet, and the reconciler makes the registry agree.
//!
//! It is level-triggered: the last full list of each provider is compared with the registry when a
//! list arrives, and every second. Only instances that a provider has added are changed.

pub(crate) mod dns;
mod reconcile;
pub(crate) mod srv;
pub(crate) mod status;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{Instant, interval, sleep, timeout_at};

use self::reconcile::{WantedInstances, goals, reconciled};
use crate::fleet::instance::{Instance, Origin, Role};
use crate::relay::core::Core;
use crate::setup::{InstanceSetup, Setup};

/// The time between two comparisons without a new list.
const TICK: Duration = Duration::from_secs(1);
/// Lists that arrive within this time count as one change.
const COALESCE: Duration = Duration::from_millis(100);
/// Reports that wait; providers wait while there are as many.
const REPORTS: usize = 16;

/// An instance that a provider has found.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Discovered {
    /// Distinguishes the instance from a later one at the same address.
    pub(crate) identity: Arc<str>,
    /// The name of its pool. Without such a pool the instance is not used.
    pub(crate) pool: String,
    pub(crate) role: Role,
    /// Its address and settings; `draining` if it is about to end.
    pub(crate) setup: InstanceSetup,
}

/// All instances that a provider finds now, or why it cannot say.
pub(crate) type Report = Result<Vec<Discovered>, String>;

/// A source of instances.
///
/// It sends its full list on each change, and again from time to time: an instance is removed after
/// lists have lacked it, so an unchanged list counts too.
pub(crate) struct Provider {
    /// Names the provider in logs, metrics and `/status`; unique.
    pub(crate) name: Arc<str>,
    /// The number of lists in a row without an instance after which it is removed.
    pub(crate) absences: u32,
    /// The pools and roles of its instances.
    pub(crate) places: BTreeSet<(String, Role)>,
    /// Sends reports until it is dropped.
    pub(crate) run: Box<dyn FnOnce(Reports) -> ProviderTask + Send>,
}

pub(crate) type ProviderTask = Pin<Box<dyn Future<Output = ()> + Send>>;

impl fmt::Debug for Provider {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Provider").field("name", &self.name).finish_non_exhaustive()
    }
}

/// Where a provider sends its reports.
#[derive(Debug)]
pub(crate) struct Reports {
    name: Arc<str>,
    sender: mpsc::Sender<(Arc<str>, Report)>,
}

impl Reports {
    pub(crate) async fn send(&self, report: Report) {
        // An error: the router ends.
        _ = self.sender.send((Arc::clone(&self.name), report)).await;
    }
}

/// Keeps the registry as the providers of the current configuration list it; never returns.
pub(crate) async fn discover(core: Arc<Core>, providers: impl Fn(&Setup) -> Vec<Provider>) {
    let mut reconciler = Reconciler::new(core);
    let mut ticks = interval(TICK);
    loop {
        tokio::select! {
            Some((name, report)) = reconciler.reports.recv() => {
                reconciler.take(&name, report);
                sleep(COALESCE).await;
                while let Ok((name, report)) = reconciler.reports.try_recv() {
                    reconciler.take(&name, report);
                }
            }
            _ = ticks.tick() => reconciler.follow(&providers),
        }
        reconciler.apply().await;
    }
}

/// Asks each provider once and adds what it finds. Returns the first report of each, as the number
/// of instances.
pub(crate) async fn discover_once(
    core: &Arc<Core>,
    providers: impl Fn(&Setup) -> Vec<Provider>,
    limit: Duration,
) -> BTreeMap<Arc<str>, Result<usize, String>> {
    let mut reconciler = Reconciler::new(Arc::clone(core));
    reconciler.follow(&providers);
    let late = || -> Result<usize, String> { Err(format!("no answer within {limit:?}")) };
    let mut first: BTreeMap<_, _> =
        reconciler.wanted.keys().map(|name| (Arc::clone(name), late())).collect();
    let (deadline, mut left) = (Instant::now() + limit, first.len());
    while left > 0 {
        let Ok(Some((name, report))) = timeout_at(deadline, reconciler.reports.recv()).await else {
            break;
        };
        let count = report.as_ref().map(Vec::len).map_err(String::clone);
        left -= usize::from(first.insert(Arc::clone(&name), count) == Some(late()));
        reconciler.take(&name, report);
    }
    reconciler.apply().await;
    first
}

struct Reconciler {
    core: Arc<Core>,
    /// The configuration that the providers are of.
    setup: Option<Arc<Setup>>,
    wanted: BTreeMap<Arc<str>, WantedInstances>,
    tasks: JoinSet<()>,
    sender: mpsc::Sender<(Arc<str>, Report)>,
    reports: mpsc::Receiver<(Arc<str>, Report)>,
}

impl Reconciler {
    fn new(core: Arc<Core>) -> Self {
        let (sender, reports) = mpsc::channel(REPORTS);
        let tasks = JoinSet::new();
        Reconciler { core, setup: None, wanted: BTreeMap::new(), tasks, sender, reports }
    }

    /// Starts the providers of the current configuration if it has changed. Their last lists stay.
    fn follow(&mut self, providers: impl Fn(&Setup) -> Vec<Provider>) {
        let setup = Arc::clone(&self.core.live().setup);
        if self.setup.as_ref().is_some_and(|known| Arc::ptr_eq(known, &setup)) {
            return;
        }
        self.tasks = JoinSet::new(); // ends the earlier ones
        (self.sender, self.reports) = mpsc::channel(REPORTS); // so that none of their reports counts
        let mut before = std::mem::take(&mut self.wanted);
        for Provider { name, absences, places, run } in providers(&setup) {
            let mut wanted = before.remove(&name).unwrap_or_default();
            wanted.absences = absences;
            wanted.keep(&places);
            self.wanted.insert(Arc::clone(&name), wanted);
            let reports = Reports { name, sender: self.sender.clone() };
            self.tasks.spawn(run(reports));
        }
        self.core.metrics.discovery.keep(self.wanted.keys());
        self.setup = Some(setup);
    }

    fn take(&mut self, name: &Arc<str>, report: Report) {
        let Some(wanted) = self.wanted.get_mut(name) else { return }; // it was removed
        let status = &self.core.metrics.discovery;
        match report.and_then(|list| wanted.observe(list)) {
            Ok(returned) => {
                status.succeeded(name, wanted.present(), wanted.absent());
                // Another instance may have taken the address: ask what it serves.
                let live = self.core.live();
                for place in returned {
                    let is_own = |one: &&Arc<Instance>| {
                        matches!(&one.origin, Origin::Discovered { provider, .. } if provider == name)
                            && one.place() == place
                    };
                    if let Some(one) = live.fleet.all().find(is_own) {
                        one.state.check_again();
                        self.core.newcomers.notify_one();
                    }
                }
            }
            Err(why) => {
                if status.failed(name, &why) {
                    tracing::warn!(
                        provider = &**name,
                        why,
                        "discovery fails; the known instances stay"
                    );
                }
            }
        }
    }

    /// Makes the registry agree with the last lists.
    async fn apply(&self) {
        let goals = goals(&self.wanted);
        self.core.place(|fleet| reconciled(fleet, &goals)).await;
    }
}
