//! Writes a recording on a separate thread: a slow or full disk loses lines of the recording, and
//! neither delays nor fails a request.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{ErrorKind, Write};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use sha2::{Digest as _, Sha256};

use super::file::{LONGEST_HEADER, is_full, must_be_regular, open, unwritable, whole_lines, wrong};
use super::{Header, Line, MOST_TOKENS};
use crate::error::{Error, Result};
use crate::log::now;
use crate::random::random_bytes;

/// The most requests that wait to be written, and the most bytes that these take.
const WAITING: usize = 8192;
const WAITING_BYTES: usize = 8 << 20;

/// The part of a prompt that a recording keeps.
#[derive(Clone, Debug)]
pub(crate) struct RecordedPrompt {
    pub(crate) tokens: u64,
    pub(crate) max_tokens: u64,
    /// The router's hashes of its chunks, which the recording hashes again under its key.
    pub(crate) chunks: Vec<u64>,
    pub(crate) stream: bool,
    /// The events of its stream that have no token of the answer.
    pub(crate) other_events: u64,
}

/// A request that has ended.
#[derive(Debug)]
pub(crate) struct RecordedRequest {
    pub(crate) arrived: Instant,
    pub(crate) prompt: RecordedPrompt,
    pub(crate) chat: bool,
    pub(crate) answer_tokens: Option<u64>,
    pub(crate) status: u16,
    pub(crate) outcome: &'static str,
    pub(crate) route: Option<&'static str>,
    pub(crate) first_byte: Option<Duration>,
    pub(crate) total: Duration,
}

impl RecordedRequest {
    fn bytes(&self) -> usize {
        size_of::<Self>() + size_of_val(&self.prompt.chunks[..])
    }
}

#[derive(Debug)]
enum Message {
    Request(RecordedRequest),
    /// The writer drops the sender once everything before it is written.
    Flush(#[allow(dead_code, reason = "dropping it is the signal")] SyncSender<()>),
}

/// The queue of requests to record.
#[derive(Clone, Debug)]
pub(crate) struct Recorder(Option<Queue>);

#[derive(Clone, Debug)]
struct Queue {
    sender: SyncSender<Message>,
    waiting: Arc<AtomicUsize>,
    /// True once the file is full or cannot be written.
    ended: Arc<AtomicBool>,
    /// The number of requests that were not written.
    lost: Arc<AtomicU64>,
}

impl Recorder {
    /// Returns a recorder that keeps nothing.
    pub(crate) fn off() -> Self {
        Recorder(None)
    }

    /// Returns the recorder of a recording that has no space: it counts each request as lost.
    fn full() -> Self {
        let (sender, _) = sync_channel(0);
        Recorder(Some(Queue {
            sender,
            waiting: Arc::default(),
            ended: Arc::new(AtomicBool::new(true)),
            lost: Arc::default(),
        }))
    }

    /// Opens a recording that grows to at most `most` bytes, and writes its header. A file that is
    /// a recording already gets a further section; a part of a line at its end is cut off. If the
    /// file or the disk is full, all requests are counted as lost.
    ///
    /// # Errors
    ///
    /// Fails if the file cannot be written, or is not a recording.
    pub(crate) fn open(path: &Path, most: usize) -> Result<Self> {
        must_be_regular(path)?;
        let mut file = match open(path, OpenOptions::new().create(true)) {
            Ok(file) => file,
            Err(error) if is_full(&error) => return Ok(Self::without_space(path, &error)),
            Err(error) => return Err(unwritable(path, error)),
        };
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(wrong(path, "is locked by another process"));
            }
            Err(TryLockError::Error(error)) => return Err(unwritable(path, error)),
        }
        let length = whole_lines(path, &mut file)?;
        let found = file.metadata().map_err(|error| unwritable(path, error))?.len();
        if length < found {
            tracing::warn!(
                file = %path.display(),
                bytes = found - length,
                "the recording ended within a line, which is removed"
            );
            file.set_len(length).map_err(|error| unwritable(path, error))?;
        }
        if length + LONGEST_HEADER > most as u64 {
            tracing::warn!(
                file = %path.display(),
                "the recording is full, and gets no more requests: move the file away, and restart"
            );
            return Ok(Recorder::full());
        }
        let key = random_bytes()?;
        let mut writer = Writer {
            file: Box::new(file),
            name: path.display().to_string(),
            key,
            started: Instant::now(),
            length,
            most: most as u64,
            lost: Arc::default(),
        };
        match writer.header() {
            Ok(()) => Self::start(writer),
            Err(error) if is_full(&error) => Ok(Self::without_space(path, &error)),
            Err(error) => Err(unwritable(path, error)),
        }
    }

    fn without_space(path: &Path, error: &std::io::Error) -> Self {
        tracing::warn!(
            file = %path.display(),
            %error,
            "the disk has no space for the recording, which gets no requests until a restart"
        );
        Self::full()
    }

    /// Checks that a recording can be opened. Removes the file again if it did not exist before.
    pub(crate) fn can_open(path: &Path) -> Result<()> {
        must_be_regular(path)?;
        match open(path, OpenOptions::new().create_new(true)) {
            Ok(_) => std::fs::remove_file(path).map_err(|error| unwritable(path, error)),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                let file = open(path, &mut OpenOptions::new());
                whole_lines(path, &mut file.map_err(|error| unwritable(path, error))?)?;
                Ok(())
            }
            Err(error) => Err(unwritable(path, error)),
        }
    }

    fn start(mut writer: Writer) -> Result<Self> {
        let (sender, receiver) = sync_channel(WAITING);
        let queue = Queue {
            sender,
            waiting: Arc::default(),
            ended: Arc::default(),
            lost: Arc::clone(&writer.lost),
        };
        let (waiting, ended) = (Arc::clone(&queue.waiting), Arc::clone(&queue.ended));
        std::thread::Builder::new()
            .name("kvx-recording".to_owned())
            .spawn(move || {
                writer.run(&receiver, &waiting);
                ended.store(true, Relaxed);
                let lost = Arc::clone(&writer.lost);
                drop(writer);
                // Until all recorders are dropped, so that none is sent and not counted.
                for message in receiver {
                    if let Message::Request(request) = message {
                        waiting.fetch_sub(request.bytes(), Relaxed);
                        lost.fetch_add(1, Relaxed);
                    }
                }
            })
            .map_err(|error| Error::io("cannot start the recording's thread", error))?;
        Ok(Recorder(Some(queue)))
    }

    /// Returns true if a recording is configured, even if it has ended.
    pub(crate) fn is_configured(&self) -> bool {
        self.0.is_some()
    }

    /// Returns true if requests are recorded.
    pub(crate) fn is_on(&self) -> bool {
        self.0.as_ref().is_some_and(|queue| !queue.ended.load(Relaxed))
    }

    /// Returns the counter of requests that were not written.
    pub(crate) fn lost(&self) -> Arc<AtomicU64> {
        self.0.as_ref().map(|queue| Arc::clone(&queue.lost)).unwrap_or_default()
    }

    /// Queues a request, or counts it as lost if too many wait or the recording has ended.
    pub(crate) fn add(&self, request: RecordedRequest) {
        let Some(queue) = &self.0 else { return };
        if queue.ended.load(Relaxed) {
            queue.lost.fetch_add(1, Relaxed);
            return;
        }
        let bytes = request.bytes();
        let fits = queue.waiting.fetch_add(bytes, Relaxed) + bytes <= WAITING_BYTES;
        if !fits || queue.sender.try_send(Message::Request(request)).is_err() {
            queue.waiting.fetch_sub(bytes, Relaxed);
            queue.lost.fetch_add(1, Relaxed);
        }
    }

    /// Waits until all queued requests are written, but not for long: the disk may be stuck.
    pub(crate) fn flush(&self, within: Duration) {
        let Some(queue) = &self.0 else { return };
        let (done, written) = sync_channel(1);
        if queue.sender.try_send(Message::Flush(done)).is_ok() {
            let _ = written.recv_timeout(within);
        }
    }
}

/// A file that can be cut off at its last whole line.
trait Target: Write + Send {
    fn cut(&mut self, length: u64) -> std::io::Result<()>;
}

impl Target for File {
    fn cut(&mut self, length: u64) -> std::io::Result<()> {
        self.set_len(length)
    }
}

/// The thread that writes a recording.
struct Writer {
    file: Box<dyn Target>,
    name: String,
    /// The key of the hashes, which is never written.
    key: [u8; 32],
    started: Instant,
    /// The length of the file, which ends with a whole line there.
    length: u64,
    most: u64,
    lost: Arc<AtomicU64>,
}

impl Writer {
    fn header(&mut self) -> std::io::Result<()> {
        self.write(Header::new(now()).line()?.as_bytes())
    }

    /// Writes requests until all recorders are dropped, the file is full, or a write fails.
    fn run(&mut self, requests: &Receiver<Message>, waiting: &AtomicUsize) {
        while let Ok(first) = requests.recv() {
            let (mut text, mut flushes) = (Vec::new(), Vec::new());
            let (mut lines, mut is_full) = (0, false);
            for message in
                std::iter::once(first).chain(std::iter::from_fn(|| requests.try_recv().ok()))
            {
                match message {
                    Message::Request(request) => {
                        waiting.fetch_sub(request.bytes(), Relaxed);
                        let before = text.len();
                        let line = self.line(request, &mut text);
                        if let Err(error) = &line {
                            tracing::error!(file = self.name, %error, "a request is not recorded");
                        }
                        is_full = self.length + text.len() as u64 > self.most;
                        if is_full || line.is_err() {
                            text.truncate(before);
                            self.lost.fetch_add(1, Relaxed);
                        } else {
                            lines += 1;
                        }
                    }
                    Message::Flush(done) => flushes.push(done),
                }
                if is_full || text.len() > WAITING_BYTES {
                    break;
                }
            }
            if let Err(error) = self.write(&text) {
                self.lost.fetch_add(lines, Relaxed);
                tracing::error!(
                    file = self.name,
                    %error,
                    "cannot write the recording; no more requests are recorded until a restart"
                );
                return;
            }
            if is_full {
                tracing::warn!(
                    file = self.name,
                    bytes = self.most,
                    "the recording has reached record_size; no more requests are recorded"
                );
                return;
            }
        }
    }

    fn line(&self, request: RecordedRequest, text: &mut Vec<u8>) -> serde_json::Result<()> {
        let RecordedRequest { mut prompt, .. } = request;
        for chunk in &mut prompt.chunks {
            *chunk = self.keyed(*chunk);
        }
        let millis = |time: Duration| (time.as_secs_f64() * 1e6).round() / 1e3;
        let line = Line {
            timestamp: millis(request.arrived.saturating_duration_since(self.started)),
            input_length: prompt.tokens.min(MOST_TOKENS),
            output_length: request.answer_tokens.map(|tokens| tokens.min(MOST_TOKENS)),
            hash_ids: &prompt.chunks,
            max_tokens: prompt.max_tokens.min(MOST_TOKENS),
            chat: request.chat,
            stream: prompt.stream,
            status: request.status,
            outcome: request.outcome,
            route: request.route,
            ttft_ms: request.first_byte.map(millis),
            total_ms: millis(request.total),
        };
        serde_json::to_writer(&mut *text, &line)?;
        text.push(b'\n');
        Ok(())
    }

    /// Returns the hash of a chunk's hash under this recording's key, of 53 bits, so that every
    /// reader of JSON reads it exactly.
    fn keyed(&self, chunk: u64) -> u64 {
        let mut hash = Sha256::new();
        hash.update(self.key);
        hash.update(chunk.to_le_bytes());
        let hash = hash.finalize();
        hash.iter().take(8).fold(0, |bits, byte| bits << 8 | u64::from(*byte)) >> 11
    }

    /// Appends whole lines, or nothing. The error is that of the write.
    fn write(&mut self, lines: &[u8]) -> std::io::Result<()> {
        let written = self.file.write_all(lines).and_then(|()| self.file.flush());
        if written.is_ok() {
            self.length += lines.len() as u64;
        } else if let Err(error) = self.file.cut(self.length) {
            tracing::error!(
                file = self.name,
                %error,
                "cannot cut the recording after its last whole line; the next start does so"
            );
        }
        written
    }
}

#[cfg(test)]
mod tests;
