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
pub(crate) struct Access(Option<SyncSender<Line>>);

#[derive(Debug)]
enum Line {
    Text(String),
    /// Everything before this is to be written; then this is dropped.
    Flush(#[allow(dead_code, reason = "its end is what counts")] SyncSender<()>),
}

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
        if sender.try_send(Line::Text(format!("{}\n", line()))).is_err() {
            metrics.log_lines_dropped.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        }
    }
}

/// Until nobody can write any more, or the log cannot be written.
fn write(lines: &Receiver<Line>, mut to: BufWriter<Box<dyn Write + Send>>) {
    while let Ok(first) = lines.recv() {
        let mut waiting = Vec::new();
        let mut failed = false;
        for line in std::iter::once(first).chain(std::iter::from_fn(|| lines.try_recv().ok())) {
            match line {
                Line::Text(text) => failed |= to.write_all(text.as_bytes()).is_err(),
                Line::Flush(done) => waiting.push(done),
            }
        }
        if failed || to.flush().is_err() {
            tracing::error!("the access log cannot be written any more");
            return;
        }
    }
}

impl Access {
    /// Waits until what was logged is written, but not long: nobody may read it.
    pub(crate) fn flush(&self, within: std::time::Duration) {
        let Some(sender) = &self.0 else { return };
        let (done, written) = sync_channel(1);
        if sender.try_send(Line::Flush(done)).is_ok() {
            let _ = written.recv_timeout(within);
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
