//! The access log.

use std::fs::OpenOptions;
use std::io::{BufWriter, ErrorKind, Write};
use std::os::unix::fs::FileTypeExt as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::error::{Error, Result};
use crate::metrics::Metrics;
use crate::setup::AccessLog;

/// A logger that writes one line per request on a separate thread: a slow log loses lines instead
/// of delaying requests.
#[derive(Clone, Debug)]
pub(crate) struct AccessLogger(Option<(SyncSender<LogMessage>, Arc<AtomicUsize>)>);

#[derive(Debug)]
enum LogMessage {
    Text(String),
    /// The writer drops the sender once everything before it is written.
    Flush(#[allow(dead_code, reason = "dropping it is the signal")] SyncSender<()>),
}

const LINES: usize = 8192;
/// The total length of queued lines.
const BYTES: usize = 8 << 20;

fn unwritable(path: &Path, error: std::io::Error) -> Error {
    Error::io(format_args!("cannot write the access log {}", path.display()), error)
}

impl AccessLogger {
    /// Returns a logger that discards every line.
    pub(crate) fn off() -> Self {
        AccessLogger(None)
    }

    /// Checks that the log can be opened. Removes the file again if it did not exist before.
    pub(crate) fn can_open(to: &AccessLog) -> Result<()> {
        let AccessLog::File(path) = to else { return Ok(()) };
        // Opening a pipe would block until it has a reader.
        if std::fs::metadata(path).is_ok_and(|file| file.file_type().is_fifo()) {
            return Ok(());
        }
        let opened = match OpenOptions::new().append(true).create_new(true).open(path) {
            Ok(_) => std::fs::remove_file(path),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                OpenOptions::new().append(true).open(path).map(drop)
            }
            Err(error) => Err(error),
        };
        opened.map_err(|error| unwritable(path, error))
    }

    /// Opens the log; [`AccessLog::Stdout`] writes to `stdout`.
    pub(crate) fn open(to: &AccessLog, stdout: Box<dyn Write + Send>) -> Result<Self> {
        let writer: Box<dyn Write + Send> = match to {
            AccessLog::Off => return Ok(AccessLogger::off()),
            AccessLog::Stdout => stdout,
            AccessLog::File(path) => {
                let file = OpenOptions::new().append(true).create(true).open(path);
                Box::new(file.map_err(|error| unwritable(path, error))?)
            }
        };
        let (sender, receiver) = sync_channel(LINES);
        let waiting = Arc::new(AtomicUsize::new(0));
        let bytes = Arc::clone(&waiting);
        std::thread::Builder::new()
            .name("kvx-access-log".to_owned())
            .spawn(move || write(&receiver, &bytes, BufWriter::new(writer)))
            .map_err(|error| Error::io("cannot start the access log's thread", error))?;
        Ok(AccessLogger(Some((sender, waiting))))
    }

    pub(crate) fn line(&self, metrics: &Metrics, line: impl FnOnce() -> serde_json::Value) {
        let Some((sender, waiting)) = &self.0 else { return };
        let text = format!("{}\n", line());
        let length = text.len();
        let fits = waiting.fetch_add(length, Relaxed) + length <= BYTES;
        if !fits || sender.try_send(LogMessage::Text(text)).is_err() {
            waiting.fetch_sub(length, Relaxed);
            metrics.log_lines_dropped.fetch_add(1, Relaxed);
        }
    }
}

/// Writes lines until all loggers are dropped or a write fails.
fn write(
    lines: &Receiver<LogMessage>,
    bytes: &AtomicUsize,
    mut to: BufWriter<Box<dyn Write + Send>>,
) {
    while let Ok(first) = lines.recv() {
        let mut waiting = Vec::new();
        let mut failed = false;
        for line in std::iter::once(first).chain(std::iter::from_fn(|| lines.try_recv().ok())) {
            match line {
                LogMessage::Text(text) => {
                    failed |= to.write_all(text.as_bytes()).is_err();
                    bytes.fetch_sub(text.len(), Relaxed);
                }
                LogMessage::Flush(done) => waiting.push(done),
            }
        }
        if failed || to.flush().is_err() {
            tracing::error!("cannot write the access log; no more lines are logged");
            return;
        }
    }
}

impl AccessLogger {
    /// Waits until all queued lines are written, but not for long: the log's reader may be stuck.
    pub(crate) fn flush(&self, within: std::time::Duration) {
        let Some((sender, _)) = &self.0 else { return };
        let (done, written) = sync_channel(1);
        if sender.try_send(LogMessage::Flush(done)).is_ok() {
            let _ = written.recv_timeout(within);
        }
    }
}

/// Returns the seconds since the Unix epoch.
pub(crate) fn now() -> f64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    (since.as_secs_f64() * 1e3).round() / 1e3
}

/// The most characters of a server's message that are kept.
const LONGEST_MESSAGE: usize = 300;

/// Returns the beginning of a text of others, with control characters escaped.
pub(crate) fn shown(text: &str) -> String {
    let mut shown = String::new();
    for character in text.chars().take(LONGEST_MESSAGE) {
        match character.is_control() {
            true => shown.extend(character.escape_default()),
            false => shown.push(character),
        }
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A writer that blocks until it is released.
    struct BlockedWriter(std::sync::mpsc::Receiver<()>);

    impl Write for BlockedWriter {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            let _ = self.0.recv_timeout(std::time::Duration::from_secs(10)); // an error: released
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn lines_that_wait_are_bounded_in_bytes() {
        let (release, stuck) = std::sync::mpsc::channel();
        let access =
            AccessLogger::open(&AccessLog::Stdout, Box::new(BlockedWriter(stuck))).unwrap();
        let metrics = Metrics::default();
        for _ in 0..20 {
            access.line(&metrics, || "x".repeat(1 << 20).into());
        }
        let dropped = metrics.log_lines_dropped.load(Relaxed);
        assert!((12..=13).contains(&dropped), "{dropped} of twenty lines of a MiB");
        drop(release);
        access.flush(std::time::Duration::from_secs(5));
        access.line(&metrics, || "x".into());
        assert_eq!(metrics.log_lines_dropped.load(Relaxed), dropped, "the queue has space again");
    }
}
