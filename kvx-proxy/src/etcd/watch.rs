//! Watches a prefix.

use std::fmt;
use std::time::Duration;

use serde_json::json;
use tokio::time::{Instant, timeout};

use super::client::{CALL, CallError, Client, prefix_end, refused};
use super::messages::{Base64, KeyValue, Number, Streamed, WatchAnswer};
use crate::lines::{LineError, Lines};
use crate::log::shown;

/// The most bytes of a line. One has all changes of a revision, or of many while a watch catches
/// up.
const LINE: usize = 16 << 20;
/// The silence after which the member is checked.
const SILENCE: Duration = Duration::from_secs(5);

/// The time after which a watch notices that its member hangs.
pub(crate) const NOTICED_AFTER: Duration = SILENCE.saturating_add(CALL);

/// A change of a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    Put(KeyValue),
    Deleted(Vec<u8>),
}

/// The end of a watch.
#[derive(Debug)]
pub(crate) enum WatchEnd {
    /// The stream broke, or the member failed: another watch may continue at the same revision.
    Cut(String),
    /// The changes since that revision are lost, or cannot be read: only a list helps.
    Lost(String),
}

impl fmt::Display for WatchEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            WatchEnd::Cut(why) => write!(f, "the watch broke off: {why}"),
            WatchEnd::Lost(why) => write!(f, "the watch cannot continue: {why}"),
        }
    }
}

/// A watch of a prefix.
#[derive(Debug)]
pub(crate) struct Watch<'a> {
    client: &'a Client,
    prefix: &'a str,
    endpoint: usize,
    lines: Lines,
    /// The first revision whose changes have not arrived.
    next: u64,
    /// The last time at which the member has answered.
    contact: Instant,
}

impl<'a> Watch<'a> {
    /// Opens a watch of the changes from a revision on.
    pub(crate) async fn open(
        client: &'a Client,
        prefix: &'a str,
        from: u64,
    ) -> Result<Self, WatchEnd> {
        let endpoint = client.endpoint();
        let body = json!({"create_request": {
            "key": Base64(prefix.into()),
            "range_end": prefix_end(prefix),
            "start_revision": Number(from),
            "progress_notify": true,
        }});
        let body = match client.stream(endpoint, "/v3/watch", &body).await {
            Ok(body) => body,
            Err(CallError::Unavailable(why)) => {
                client.avoid(endpoint);
                return Err(WatchEnd::Cut(why));
            }
            Err(error) => return Err(WatchEnd::Lost(error.to_string())),
        };
        let contact = Instant::now();
        let mut watch =
            Watch { client, prefix, endpoint, lines: Lines::new(body, LINE), next: from, contact };
        let first = timeout(CALL, watch.answer()).await;
        let first = first.map_err(|_| watch.cut("it has not begun in time".to_owned()))??;
        if !first.created {
            return Err(WatchEnd::Lost("its first line does not say that it has begun".to_owned()));
        }
        // The data may have been replaced by older data, or by none.
        if first.header.revision.0.saturating_add(1) < from {
            return Err(WatchEnd::Lost(format!(
                "etcd is at revision {}, before {from}",
                first.header.revision.0
            )));
        }
        Ok(watch)
    }

    /// Returns the first revision whose changes have not arrived, to continue with another watch.
    pub(crate) fn next_revision(&self) -> u64 {
        self.next
    }

    /// Returns the last time at which the member has answered.
    pub(crate) fn contact(&self) -> Instant {
        self.contact
    }

    /// Waits for changes. While there are none, checks the member, whose streams stay open without
    /// an error if it hangs.
    pub(crate) async fn changes(&mut self) -> Result<Vec<Change>, WatchEnd> {
        loop {
            let Ok(answer) = timeout(SILENCE, self.answer()).await else {
                let checked = self.client.check(self.endpoint, self.prefix).await;
                checked.map_err(|error| self.cut(error.to_string()))?;
                self.contact = Instant::now();
                continue;
            };
            let answer = answer?;
            let last = answer.events.iter().map(|event| event.kv.mod_revision.0).max();
            // Without events the line says that all changes until its revision have arrived.
            let last_revision = last.unwrap_or(answer.header.revision.0);
            self.next = self.next.max(last_revision.saturating_add(1));
            if last.is_some() {
                let changes = answer.events.into_iter().map(|event| match &*event.r#type {
                    "DELETE" => Change::Deleted(event.kv.key.0),
                    _ => Change::Put(event.kv.into()),
                });
                return Ok(changes.collect());
            }
        }
    }

    fn cut(&self, why: String) -> WatchEnd {
        self.client.avoid(self.endpoint);
        WatchEnd::Cut(why)
    }

    /// Reads a line. Dropping the future loses nothing.
    async fn answer(&mut self) -> Result<WatchAnswer, WatchEnd> {
        let line = match self.lines.next().await {
            Ok(Some(line)) => line,
            Ok(None) => return Err(self.cut("etcd has closed it".to_owned())),
            // It would be as long the next time.
            Err(why @ LineError::TooLong(_)) => return Err(WatchEnd::Lost(why.to_string())),
            Err(why) => return Err(self.cut(why.to_string())),
        };
        self.contact = Instant::now();
        let line: Streamed<WatchAnswer> = serde_json::from_slice(&line).map_err(|error| {
            let why = shown(&error.to_string());
            WatchEnd::Lost(format!("a line is not of a watch: {why}"))
        })?;
        let answer = match (line.result, line.error) {
            (Some(answer), None) => answer,
            (_, error) => {
                return Err(WatchEnd::Lost(refused(error.unwrap_or_default()).to_string()));
            }
        };
        if answer.canceled {
            // The stream stays open, silent.
            let why = match answer.compact_revision.0 {
                0 => format!("etcd has canceled it: {}", shown(&answer.cancel_reason)),
                compacted => format!("changes before revision {compacted} are compacted"),
            };
            return Err(WatchEnd::Lost(why));
        }
        Ok(answer)
    }
}
