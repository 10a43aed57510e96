//! Instances by Kubernetes: the pods of a namespace, by their labels.
//!
//! A complete list, then a watch of the changes after it. A watch that ends, is cut or stays silent
//! is opened again at its last version. Where that fails, and from time to time anyway, the
//! complete list is read again, and the former one stays until then.

mod access;
mod api;
mod pods;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout_at};

use self::access::Access;
use self::api::{Api, ApiError};
pub(crate) use self::pods::fuzz;
use self::pods::{Event, Pods};
use super::{Provider, ProviderSettings, Reports};
use crate::backoff::Backoff;
use crate::error::Result;
use crate::fleet::instance::Role;
use crate::setup::{KubernetesDiscovery, Setup};

/// The name of the provider.
const NAME: &str = "kubernetes";

/// Times of the provider.
#[derive(Clone, Copy, Debug)]
struct Times {
    /// Changes within this time are one list.
    coalesce: Duration,
    /// Between two lists without a change.
    resend: Duration,
    /// Between two complete lists of the API server.
    relist: Duration,
    /// The silence after which a watch is opened again. Bookmarks arrive about once a minute.
    silence: Duration,
    /// The longest watch, a little above what the server is asked for.
    watch: Duration,
    /// A watch that ends within this time, without a line, does not work.
    at_once: Duration,
}

const TIMES: Times = Times {
    coalesce: Duration::from_millis(100),
    resend: Duration::from_secs(60),
    relist: Duration::from_secs(600),
    silence: Duration::from_secs(90),
    watch: Duration::from_secs(300),
    at_once: Duration::from_secs(5),
};

/// Checks that the settings, or this pod, name an API server and a namespace.
///
/// # Errors
///
/// Fails if not; the message says what to set.
pub(super) fn check(settings: &KubernetesDiscovery) -> Result<()> {
    Access::new(settings).map(|_| ())
}

/// Returns the provider of a configuration, if it has one.
pub(super) fn provider(setup: &Setup) -> Option<Provider> {
    let settings = setup.discovery.kubernetes.clone()?;
    let roles = [Role::Prefill, Role::Decode].into_iter();
    let roles = roles.filter(|role| settings.may_find(&settings.pool, *role));
    let places: BTreeSet<_> = roles.map(|role| (settings.pool.clone(), role)).collect();
    let described = ProviderSettings::Text(format!("{settings:?}"));
    let run = move |reports: Reports| -> super::ProviderTask {
        Box::pin(async move {
            let follower =
                Access::new(&settings).and_then(|access| Follower::new(access, settings, TIMES));
            match follower {
                Ok(follower) => follower.run(reports).await,
                // A change of the settings starts it anew.
                Err(error) => loop {
                    reports.send(Err(error.to_string())).await;
                    sleep(TIMES.resend).await; // before it is reported again
                },
            }
        })
    };
    let (name, run) = (NAME.into(), Box::new(run));
    let every = TIMES.resend;
    // A pod that a list lacks has been deleted, so one absence is enough.
    Some(Provider { name, settings: described, every, absences: 1, places, run })
}

struct Follower {
    access: Access,
    selector: String,
    times: Times,
    pods: Pods,
    /// The version at which a watch can continue.
    resume: Option<String>,
    relist_at: Instant,
    /// True if the list has changed since it was sent.
    is_changed: bool,
    /// When the list is to be sent next.
    due: Instant,
    backoff: Backoff,
}

impl Follower {
    fn new(access: Access, settings: KubernetesDiscovery, times: Times) -> Result<Self> {
        let (selector, now) = (settings.query(), Instant::now());
        let pods = Pods::new(Arc::new(settings))?;
        Ok(Follower {
            access,
            selector,
            times,
            pods,
            resume: None,
            relist_at: now,
            is_changed: false,
            due: now,
            backoff: Backoff::new(),
        })
    }

    async fn run(mut self, reports: Reports) {
        loop {
            if let Err(why) = self.round(&reports).await {
                reports.send(Err(why)).await;
            }
            sleep(self.backoff.next()).await; // before the next attempt
        }
    }

    /// Lists the pods, unless a watch can continue, and follows their changes until the watch ends.
    async fn round(&mut self, reports: &Reports) -> std::result::Result<(), String> {
        let (access, selector) = (self.access.clone(), self.selector.clone());
        let api = Api::new(&access, &selector)?;
        let version = match self.resume.take().filter(|_| Instant::now() < self.relist_at) {
            Some(version) => version,
            None => self.list(&api, reports).await.map_err(ApiError::text)?,
        };
        let followed = self.follow(&api, version, reports).await;
        if self.is_changed {
            self.report(reports).await;
        }
        match followed {
            // A new list is the cure, and not a failure.
            Err(ApiError::Expired) => Ok(()),
            followed => followed.map_err(ApiError::text),
        }
    }

    async fn list(
        &mut self,
        api: &Api<'_>,
        reports: &Reports,
    ) -> std::result::Result<String, ApiError> {
        let mut pods = self.pods.empty();
        let version = api.list(|pod| pods.list(pod, &self.pods)).await?;
        self.pods = pods;
        self.relist_at = Instant::now() + self.times.relist;
        self.report(reports).await;
        Ok(version)
    }

    async fn report(&mut self, reports: &Reports) {
        reports.send(Ok(self.pods.instances())).await;
        self.is_changed = false;
        self.due = Instant::now() + self.times.resend;
    }

    /// Follows the changes after a version. After an error a new list is necessary.
    async fn follow(
        &mut self,
        api: &Api<'_>,
        mut version: String,
        reports: &Reports,
    ) -> std::result::Result<(), ApiError> {
        let mut lines = api.watch(&version).await?;
        let opened = Instant::now();
        let (mut heard, mut is_silent) = (opened, true);
        loop {
            let now = Instant::now();
            if self.due <= now {
                self.report(reports).await;
            }
            let end = (heard + self.times.silence).min(opened + self.times.watch);
            let end = end.min(self.relist_at);
            if end <= now {
                self.backoff.reset();
                break;
            }
            let Ok(line) = timeout_at(end.min(self.due), lines.next()).await else { continue };
            match line {
                Ok(Some(line)) => {
                    (heard, is_silent) = (Instant::now(), false);
                    self.backoff.reset();
                    match self.take(&line)? {
                        ControlFlow::Continue(next) => version = next,
                        ControlFlow::Break(()) => return Err(ApiError::Expired),
                    }
                }
                Ok(None) | Err(_) if is_silent && opened.elapsed() < self.times.at_once => {
                    return Err("the watch ends at once, without a line".to_owned().into());
                }
                Ok(None) => break,
                Err(why) => {
                    tracing::debug!(%why, "a watch of pods was cut; it continues");
                    break;
                }
            }
        }
        self.resume = Some(version);
        Ok(())
    }

    /// Applies a line. Returns the version after it; breaks if only a new list helps.
    fn take(&mut self, line: &[u8]) -> std::result::Result<ControlFlow<(), String>, String> {
        let version = match Event::parse(line)? {
            Event::Expired => return Ok(ControlFlow::Break(())),
            Event::Bookmark(version) => return Ok(ControlFlow::Continue(version)),
            Event::Changed(pod, version) => {
                self.pods.apply(&pod)?;
                version
            }
            Event::Gone(pod, version) => {
                self.pods.remove(&pod);
                version
            }
        };
        if !self.is_changed {
            self.is_changed = true;
            self.due = self.due.min(Instant::now() + self.times.coalesce);
        }
        Ok(ControlFlow::Continue(version))
    }
}
