//! Keeps the list of a fleet's registrations.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout_at};

use super::Registration;
use super::refusal::Refusals;
use super::table::{MOST, Table};
use crate::backoff::Backoff;
use crate::error::Result;
use crate::etcd::{Client, NOTICED_AFTER, Watch, WatchEnd};
use crate::setup::{FleetAddress, FleetSecret};

/// The time between complete lists.
const LIST: Duration = Duration::from_secs(60);

/// A list of registrations; `None` until etcd has answered for the first time.
type Listed = Option<Arc<[Registration]>>;

/// The list of a fleet's registrations, which a task keeps until this is dropped.
#[derive(Debug)]
pub struct FleetList {
    list: watch::Receiver<Listed>,
    failure: watch::Receiver<Option<String>>,
    refusals: Arc<Refusals>,
    _task: JoinSet<()>,
}

impl FleetList {
    /// Returns a receiver of complete lists: the latest one, `None` until etcd has answered for the
    /// first time, and each that differs from the one before.
    ///
    /// While etcd does not answer, the list stays as it is. After such an outage entries that are
    /// missing, or that have expired, leave it only after the time of a lease, in which their
    /// instances can register again.
    pub fn subscribe(&self) -> watch::Receiver<Option<Arc<[Registration]>>> {
        self.list.clone()
    }

    /// Returns a receiver of the reason why the list may be old; `None` while etcd answers.
    pub fn failure(&self) -> watch::Receiver<Option<String>> {
        self.failure.clone()
    }

    /// Returns how many entries were refused, by [the reason's name](super::Refusal::as_str). Each
    /// complete list, once a minute, counts the refused entries again.
    pub fn refusals(&self) -> impl Iterator<Item = (&'static str, u64)> {
        self.refusals.counts()
    }
}

/// Follows the registrations of a fleet, in a task of the current tokio runtime. With a secret,
/// entries without a MAC of that secret are refused.
///
/// # Errors
///
/// Fails if the client cannot be created, for example because of the system's trusted certificates.
/// An etcd that does not answer is no error: it is tried again without end, and
/// [`failure`](FleetList::failure) says so.
pub fn follow(fleet: &FleetAddress, secret: Option<&FleetSecret>) -> Result<FleetList> {
    let refusals = Arc::<Refusals>::default();
    let (sender, list) = watch::channel(None);
    let (failed, failure) = watch::channel(None);
    let follower = Follower {
        client: fleet.client()?,
        prefix: fleet.prefix(),
        grace: fleet.lease,
        contact: Instant::now(),
        is_lost: false,
        strict_at: None,
        resume: None,
        published: Published {
            table: Table::new(fleet.clone(), secret.cloned(), refusals.clone()),
            sender,
        },
        failed,
        backoff: Backoff::new(),
    };
    let mut task = JoinSet::new();
    task.spawn(follower.run());
    Ok(FleetList { list, failure, refusals, _task: task })
}

/// The table, and the receivers of its registrations.
struct Published {
    table: Table,
    sender: watch::Sender<Listed>,
}

impl Published {
    fn publish(&self) {
        let registrations = self.table.registrations();
        self.sender.send_if_modified(|listed| {
            let is_new = listed.as_deref() != Some(&registrations[..]);
            if is_new {
                *listed = Some(registrations.into());
            }
            is_new
        });
    }
}

struct Follower {
    client: Client,
    prefix: String,
    /// The time in which instances register again after an outage.
    grace: Duration,
    /// The last time at which etcd has answered.
    contact: Instant,
    /// True if changes were lost.
    is_lost: bool,
    /// The end of the time after an outage in which nothing leaves the list.
    strict_at: Option<Instant>,
    /// The revision at which a watch can continue.
    resume: Option<u64>,
    published: Published,
    /// Why the list may be old.
    failed: watch::Sender<Option<String>>,
    backoff: Backoff,
}

impl Follower {
    async fn run(mut self) {
        loop {
            if let Err(why) = self.round().await {
                self.failed.send_replace(Some(why));
                tokio::time::sleep(self.backoff.next()).await; // before the next attempt
            }
        }
    }

    /// Lists the registrations, unless a watch can continue, and applies changes until it is time
    /// for the next list.
    async fn round(&mut self) -> std::result::Result<(), String> {
        // After a shorter absence no lease has ended: a restarted etcd gives each its whole time,
        // and one that hangs is noticed later.
        let was_away = self.contact.elapsed() > NOTICED_AFTER;
        let lost = std::mem::take(&mut self.is_lost) && self.strict_at.is_none();
        if was_away || lost {
            self.strict_at = Some(Instant::now() + self.grace);
        } else if self.strict_at.is_some_and(|at| at <= Instant::now()) {
            self.strict_at = None;
        }
        let strict = self.strict_at.is_none();
        let from = match self.resume.take() {
            Some(from) => from,
            None => self.list(strict).await?.saturating_add(1),
        };
        let Follower { client, prefix, published, .. } = self;
        let mut watch = match Watch::open(client, prefix, from).await {
            Ok(watch) => watch,
            Err(end) => {
                self.is_lost = matches!(end, WatchEnd::Lost(_));
                self.resume = matches!(end, WatchEnd::Cut(_)).then_some(from);
                return Err(end.to_string());
            }
        };
        if was_away {
            self.strict_at = Some(Instant::now() + self.grace);
        }
        self.failed.send_if_modified(|failed| failed.take().is_some());
        self.backoff.reset();
        let until = self.strict_at.unwrap_or_else(|| Instant::now() + LIST);
        let ended = loop {
            match timeout_at(until, watch.changes()).await {
                Ok(Ok(changes)) => {
                    changes.into_iter().for_each(|change| published.table.apply(change, strict));
                    published.publish();
                }
                Ok(Err(end)) => break Some(end),
                Err(_) => break None,
            }
        };
        self.contact = watch.contact();
        let Some(end) = ended else { return Ok(()) };
        self.is_lost = matches!(end, WatchEnd::Lost(_));
        self.resume = matches!(end, WatchEnd::Cut(_)).then_some(watch.next_revision());
        Err(end.to_string())
    }

    /// Reads the complete list, and returns its revision. A strict list removes missing entries.
    async fn list(&mut self, strict: bool) -> std::result::Result<u64, String> {
        let table = &self.published.table;
        let mut entries = table.begin(strict);
        let each = |entry| table.add(&mut entries, entry, strict);
        let listed = self.client.list(&self.prefix, MOST, each).await;
        let revision = listed.map_err(|error| error.to_string())?;
        self.contact = Instant::now();
        self.published.table.replace(entries);
        self.published.publish();
        Ok(revision)
    }
}
