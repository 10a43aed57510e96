//! The access log, and the last errors for the page.

use std::collections::VecDeque;
use std::io::{BufWriter, Write};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::error::{Error, Result};
use crate::metrics::Metrics;
use crate::setup::AccessLog;

/// Writes a line per request on a thread of its own: whoever reads the log too slowly loses lines, not requests.
#[derive(Clone, Debug)]
pub(crate) struct Access(Option<SyncSender<String>>);

const LINES: usize = 8192;

impl Access {
    /// Opens the log; `stdout` is what [`AccessLog::Stdout`] means.
    pub(crate) fn open(to: &AccessLog, stdout: Box<dyn Write + Send>) -> Result<Self> {
        let writer: Box<dyn Write + Send> = match to {
            AccessLog::Off => return Ok(Access(None)),
            AccessLog::Stdout => stdout,
            AccessLog::File(path) => {
                let file = std::fs::OpenOptions::new().append(true).create(true).open(path);
                let doing = format_args!("cannot write the access log {}", path.display()).to_string();
                Box::new(file.map_err(|error| Error::io(doing, error))?)
            }
        };
        let (sender, receiver) = sync_channel(LINES);
        std::thread::Builder::new()
            .name("kvx-access-log".to_owned())
            .spawn(move || write(&receiver, BufWriter::new(writer)))
            .map_err(|error| Error::io("cannot start the access log's thread", error))?;
        Ok(Access(Some(sender)))
    }

    pub(crate) fn line(&self, metrics: &Metrics, line: impl FnOnce() -> serde_json::Value) {
        let Some(sender) = &self.0 else { return };
        if sender.try_send(format!("{}\n", line())).is_err() {
            metrics.log_lines_dropped.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        }
    }
}

/// Until nobody can write any more, or the log cannot be written.
fn write(lines: &Receiver<String>, mut to: BufWriter<Box<dyn Write + Send>>) {
    while let Ok(line) = lines.recv() {
        let mut failed = to.write_all(line.as_bytes()).is_err();
        while let Ok(line) = lines.try_recv() {
            failed |= to.write_all(line.as_bytes()).is_err();
        }
        if failed || to.flush().is_err() {
            tracing::error!("the access log cannot be written any more");
            return;
        }
    }
}

/// Seconds since 1970.
pub(crate) fn now() -> f64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    (since.as_secs_f64() * 1e3).round() / 1e3
}

/// The last things that went wrong, for `/status`.
#[derive(Clone, Debug, Default)]
pub(crate) struct LastErrors(Arc<Mutex<VecDeque<serde_json::Value>>>);

impl LastErrors {
    const KEPT: usize = 32;

    pub(crate) fn add(&self, instance: &str, what: &str) {
        let mut what = what.to_owned();
        if let Some((end, _)) = what.char_indices().nth(300) {
            what.truncate(end);
        }
        let mut errors = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if errors.len() == Self::KEPT {
            errors.pop_back();
        }
        errors.push_front(serde_json::json!({"time": now(), "instance": instance, "what": what}));
    }

    pub(crate) fn list(&self) -> Vec<serde_json::Value> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect()
    }
}
