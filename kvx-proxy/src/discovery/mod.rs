//! Discovery: providers list the instances of a fleet, and the reconciler makes the registry agree.
//!
//! It is level-triggered: the last full list of each provider is compared with the registry when a
//! list arrives, and every second. Only instances that a provider has added are changed.

mod dns;
mod etcd;
pub(crate) mod kubernetes;
pub(crate) mod providers;
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
use self::status::DiscoveryStatus;
use crate::fleet::instance::{Instance, Role};
use crate::relay::core::Core;
use crate::setup::{FleetAddress, FleetSecret, InstanceSetup, Setup};

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
    /// A configuration that changes them starts it anew.
    pub(crate) settings: ProviderSettings,
    /// The time between two reports without a change.
    pub(crate) every: Duration,
    /// The number of lists in a row without an instance after which it is removed.
    pub(crate) absences: u32,
    /// The pools and roles of its instances.
    pub(crate) places: BTreeSet<(String, Role)>,
    /// Sends reports until it is dropped.
    pub(crate) run: Box<dyn FnOnce(Reports) -> ProviderTask + Send>,
}

/// The settings of a provider, to compare them.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum ProviderSettings {
    /// Settings without a secret.
    Text(String),
    /// A fleet in etcd; the rest as text.
    Fleet(Box<FleetAddress>, Option<FleetSecret>, String),
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
    start: u64,
    sender: mpsc::Sender<NamedReport>,
    status: DiscoveryStatus,
}

/// A report, and which start of which provider it is from.
#[derive(Debug)]
struct NamedReport {
    name: Arc<str>,
    start: u64,
    report: Report,
}

impl Reports {
    pub(crate) async fn send(&self, report: Report) {
        let (name, start) = (Arc::clone(&self.name), self.start);
        // An error: the router ends.
        _ = self.sender.send(NamedReport { name, start, report }).await;
    }

    /// Shows how many entries the provider has refused since it was started, by reason.
    pub(crate) fn refused(&self, counts: impl Iterator<Item = (&'static str, u64)>) {
        self.status.refused(&self.name, counts);
    }
}

/// A provider that was started.
#[derive(Debug)]
struct RunningProvider {
    wanted: WantedInstances,
    places: BTreeSet<(String, Role)>,
    settings: ProviderSettings,
    /// Distinguishes its reports from those before it was started anew.
    start: u64,
    /// Its task, which ends when this is dropped.
    task: JoinSet<()>,
}

/// Makes the registry agree with the lists of providers.
#[derive(Debug)]
pub(crate) struct Reconciler {
    core: Arc<Core>,
    /// The configuration that the providers are of.
    setup: Option<Arc<Setup>>,
    running: BTreeMap<Arc<str>, RunningProvider>,
    starts: u64,
    sender: mpsc::Sender<NamedReport>,
    reports: mpsc::Receiver<NamedReport>,
}

impl Reconciler {
    pub(crate) fn new(core: Arc<Core>) -> Self {
        let (sender, reports) = mpsc::channel(REPORTS);
        Reconciler { core, setup: None, running: BTreeMap::new(), starts: 0, sender, reports }
    }

    /// Waits for the first report of each provider, but not beyond `limit`, and adds what they find.
    /// Returns these reports as numbers of instances.
    pub(crate) async fn first(
        &mut self,
        providers: impl Fn(&Setup) -> Vec<Provider>,
        limit: Duration,
    ) -> BTreeMap<Arc<str>, Result<usize, String>> {
        self.follow(&providers);
        let mut silent: BTreeSet<_> = self.running.keys().map(Arc::clone).collect();
        let mut first = BTreeMap::new();
        let deadline = Instant::now() + limit;
        while !silent.is_empty() {
            let Ok(Some(report)) = timeout_at(deadline, self.reports.recv()).await else {
                break;
            };
            if silent.remove(&report.name) {
                let count = report.report.as_ref().map(Vec::len).map_err(String::clone);
                first.insert(Arc::clone(&report.name), count);
            }
            self.take(report);
        }
        first.extend(
            silent.into_iter().map(|name| (name, Err(format!("no answer within {limit:?}")))),
        );
        self.apply().await;
        first
    }

    /// Keeps the registry as the providers of the current configuration list it; never returns.
    pub(crate) async fn run(mut self, providers: impl Fn(&Setup) -> Vec<Provider>) {
        let mut ticks = interval(TICK);
        loop {
            tokio::select! {
                Some(report) = self.reports.recv() => {
                    self.take(report);
                    sleep(COALESCE).await;
                    while let Ok(report) = self.reports.try_recv() {
                        self.take(report);
                    }
                }
                _ = ticks.tick() => self.follow(&providers),
            }
            self.apply().await;
        }
    }

    /// Makes the running providers those of the current configuration if it has changed, or if one
    /// has ended. Those with the same settings run on, and the last lists of all stay.
    fn follow(&mut self, providers: impl Fn(&Setup) -> Vec<Provider>) {
        let setup = Arc::clone(&self.core.live().setup);
        let mut has_ended = false;
        for (name, one) in &mut self.running {
            if one.task.try_join_next().is_some() {
                has_ended = true;
                self.core.metrics.discovery.failed(name, "it has ended; started again");
                tracing::error!(provider = &**name, "a provider has ended, and is started again");
            }
        }
        if !has_ended && self.setup.as_ref().is_some_and(|known| Arc::ptr_eq(known, &setup)) {
            return;
        }
        let mut before = std::mem::take(&mut self.running);
        for Provider { name, settings, every, absences, places, run } in providers(&setup) {
            let known = before.remove(&name);
            let is_same = |one: &RunningProvider| one.settings == settings && !one.task.is_empty();
            let mut one = match known {
                Some(known) if is_same(&known) => known,
                known => {
                    self.starts += 1;
                    let reports = Reports {
                        name: Arc::clone(&name),
                        start: self.starts,
                        sender: self.sender.clone(),
                        status: self.core.metrics.discovery.clone(),
                    };
                    let mut task = JoinSet::new();
                    task.spawn(run(reports));
                    let wanted = known.map(|known| known.wanted).unwrap_or_default();
                    let (places, start) = (BTreeSet::new(), self.starts);
                    RunningProvider { wanted, places, settings, start, task }
                }
            };
            (one.wanted.absences, one.wanted.every) = (absences, every);
            one.wanted.keep(&places);
            one.places = places;
            self.running.insert(name, one);
        }
        self.core.metrics.discovery.keep(self.running.keys());
        self.setup = Some(setup);
    }

    fn take(&mut self, NamedReport { name, start, report }: NamedReport) {
        // A provider may have been removed, or started anew.
        let running = self.running.get_mut(&name).filter(|one| one.start == start);
        let Some(RunningProvider { wanted, places, .. }) = running else { return };
        let status = &self.core.metrics.discovery;
        let mut without_pool = 0;
        let report = report.map(|mut list| {
            let all = list.len();
            list.retain(|one| places.contains(&(one.pool.clone(), one.role)));
            without_pool = all - list.len();
            list
        });
        match report.and_then(|list| wanted.observe(list, Instant::now())) {
            Ok(returned) => {
                let counts = [wanted.present(), wanted.absent(), without_pool];
                if status.succeeded(&name, counts) && without_pool > 0 {
                    tracing::warn!(
                        provider = &*name,
                        instances = without_pool,
                        "instances are not used: their pool is not in the configuration"
                    );
                }
                // Another instance may have taken the address: ask what it serves.
                let live = self.core.live();
                for place in returned {
                    let is_own = |one: &&Arc<Instance>| {
                        one.origin.provider() == Some(&name) && one.place() == place
                    };
                    if let Some(one) = live.fleet.all().find(is_own) {
                        one.state.check_again();
                        self.core.newcomers.notify_one();
                    }
                }
            }
            Err(why) => {
                if status.failed(&name, &why) {
                    tracing::warn!(
                        provider = &*name,
                        why,
                        "discovery fails; the known instances stay"
                    );
                }
            }
        }
    }

    /// Makes the registry agree with the last lists.
    async fn apply(&self) {
        let goals = goals(self.running.iter().map(|(name, one)| (name, &one.wanted)));
        self.core.place(|fleet| reconciled(fleet, &goals)).await;
    }
}
