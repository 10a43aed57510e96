//! Writes a recording on a separate thread: a slow or full disk loses lines of the recording, and
//! neither delays nor fails a request.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use rustix::rand::{GetRandomFlags, getrandom};
use sha2::{Digest as _, Sha256};

use super::{HOLDS, Header, Line, VERSION};
use crate::error::{Error, Result};
use crate::fleet::cache_model::CHUNK_TOKENS;
use crate::log::now;

/// The most requests that wait to be written, and the most bytes that these take.
const WAITING: usize = 8192;
const WAITING_BYTES: usize = 8 << 20;
/// A header is shorter, in bytes.
const LONGEST_HEADER: u64 = 512;

/// What a recording keeps of a prompt.
#[derive(Clone, Debug, Default)]
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

    /// Opens a recording that grows to at most `most` bytes, and writes its header. A file that is
    /// a recording already gets a further section.
    ///
    /// # Errors
    ///
    /// Fails if the file cannot be written, or is not a recording.
    pub(crate) fn open(path: &Path, most: usize) -> Result<Self> {
        let (file, length) = open(path)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(wrong(path, "belongs to another router"));
            }
            Err(TryLockError::Error(error)) => return Err(unwritable(path, error)),
        }
        if length + LONGEST_HEADER > most as u64 {
            tracing::warn!(file = %path.display(), "the recording is full; nothing is recorded");
            return Ok(Recorder::off());
        }
        let key = random_key()?;
        let mut writer = Writer {
            file: Box::new(file),
            name: path.display().to_string(),
            key,
            started: Instant::now(),
            length,
            most: most as u64,
            lost: Arc::default(),
        };
        writer.header().map_err(|error| unwritable(path, error))?;
        Self::start(writer)
    }

    /// Checks that a recording can be opened. Removes the file again if it did not exist before.
    pub(crate) fn can_open(path: &Path) -> Result<()> {
        let existed = path.exists();
        open(path)?;
        match existed {
            true => Ok(()),
            false => std::fs::remove_file(path).map_err(|error| unwritable(path, error)),
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
                for message in receiver.try_iter() {
                    if let Message::Request(_) = message {
                        writer.lost.fetch_add(1, Relaxed);
                    }
                }
            })
            .map_err(|error| Error::io("cannot start the recording's thread", error))?;
        Ok(Recorder(Some(queue)))
    }

    /// Returns true if requests are recorded.
    pub(crate) fn is_on(&self) -> bool {
        self.0.as_ref().is_some_and(|queue| !queue.ended.load(Relaxed))
    }

    /// Returns the counter of requests that were not written.
    pub(crate) fn lost(&self) -> Arc<AtomicU64> {
        self.0.as_ref().map(|queue| Arc::clone(&queue.lost)).unwrap_or_default()
    }

    /// Queues a request, or counts it as lost if too many wait.
    pub(crate) fn add(&self, request: RecordedRequest) {
        let Some(queue) = &self.0 else { return };
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

fn unwritable(path: &Path, error: std::io::Error) -> Error {
    Error::io(format_args!("cannot write the recording {}", path.display()), error)
}

fn wrong(path: &Path, why: &str) -> Error {
    Error::new(format!("the recording {} {why}; name another file", path.display()))
}

/// Opens the file of a recording, and returns its length.
fn open(path: &Path) -> Result<(File, u64)> {
    let is_other = std::fs::metadata(path).is_ok_and(|found| !found.is_file());
    if is_other {
        return Err(wrong(path, "is not a regular file, whose size could be limited"));
    }
    let mut options = OpenOptions::new();
    // Times and lengths of users' requests are nobody else's business.
    options.read(true).append(true).create(true).mode(0o600);
    let mut file = options.open(path).map_err(|error| unwritable(path, error))?;
    let length = file.metadata().map_err(|error| unwritable(path, error))?.len();
    if length > 0 {
        let cannot_read =
            |error| Error::io(format_args!("cannot read the recording {}", path.display()), error);
        if !is_recording(&mut file).map_err(cannot_read)? {
            return Err(wrong(path, "exists, and is not a recording"));
        }
    }
    Ok((file, length))
}

/// Returns true if a file begins with a header of this version, and ends with a whole line.
fn is_recording(file: &mut File) -> std::io::Result<bool> {
    #[derive(serde::Deserialize)]
    struct Version {
        kvx_recording: u32,
    }
    let mut last = [0];
    file.seek(SeekFrom::End(-1))?;
    file.read_exact(&mut last)?;
    file.rewind()?;
    let mut first = Vec::new();
    BufReader::new(Read::take(file, 4096)).read_until(b'\n', &mut first)?;
    let version = serde_json::from_slice::<Version>(&first).map(|header| header.kvx_recording);
    Ok(last == *b"\n" && version.is_ok_and(|version| version == VERSION))
}

fn random_key() -> Result<[u8; 32]> {
    let mut key = [0; 32];
    // The kernel never returns 32 bytes in parts.
    match getrandom(&mut key, GetRandomFlags::empty()) {
        Ok(32) => Ok(key),
        other => Err(Error::new(format!(
            "getrandom returned no key for the hashes of the recording: {other:?}"
        ))),
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
        let header = Header {
            kvx_recording: VERSION,
            started: now(),
            block_tokens: CHUNK_TOKENS,
            holds: HOLDS,
        };
        let line = format!("{}\n", serde_json::to_string(&header)?);
        self.write(line.as_bytes())
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
                        is_full |= self.line(request, &mut text).is_err();
                        is_full |= self.length + text.len() as u64 > self.most;
                        if is_full {
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
            input_length: prompt.tokens,
            output_length: request.answer_tokens,
            hash_ids: &prompt.chunks,
            max_tokens: prompt.max_tokens,
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

    /// Appends whole lines, or nothing.
    fn write(&mut self, lines: &[u8]) -> std::io::Result<()> {
        let written = self.file.write_all(lines).and_then(|()| self.file.flush());
        match written {
            Ok(()) => self.length += lines.len() as u64,
            Err(_) => self.file.cut(self.length)?,
        }
        written
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    /// A file in memory that takes at most this many bytes.
    #[derive(Clone, Default)]
    struct SmallDisk(Arc<Mutex<Vec<u8>>>, usize);

    impl Write for SmallDisk {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            let mut file = self.0.lock().unwrap();
            let space = self.1 - file.len();
            if space == 0 {
                return Err(std::io::ErrorKind::StorageFull.into());
            }
            let now = bytes.len().min(space);
            file.extend_from_slice(&bytes[..now]);
            Ok(now)
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    impl Target for SmallDisk {
        fn cut(&mut self, length: u64) -> std::io::Result<()> {
            self.0.lock().unwrap().truncate(length as usize);
            Ok(())
        }
    }

    fn writer(disk: &SmallDisk, most: u64, key: u8) -> Writer {
        let mut writer = Writer {
            file: Box::new(disk.clone()),
            name: "recording".to_owned(),
            key: [key; 32],
            started: Instant::now(),
            length: 0,
            most,
            lost: Arc::default(),
        };
        writer.header().unwrap();
        writer
    }

    fn request(chunks: &[u64]) -> RecordedRequest {
        RecordedRequest {
            arrived: Instant::now(),
            prompt: RecordedPrompt {
                tokens: 256 * chunks.len() as u64,
                max_tokens: 4,
                chunks: chunks.to_vec(),
                stream: true,
                other_events: 0,
            },
            chat: false,
            answer_tokens: Some(4),
            status: 200,
            outcome: "ok",
            route: Some("disaggregated"),
            first_byte: Some(Duration::from_millis(5)),
            total: Duration::from_millis(9),
        }
    }

    fn text(disk: &SmallDisk) -> String {
        String::from_utf8(disk.0.lock().unwrap().clone()).unwrap()
    }

    /// Records this many requests, one after the other, and returns how many were dropped.
    fn record(writer: Writer, requests: u64) -> u64 {
        let recorder = Recorder::start(writer).unwrap();
        for number in 0..requests {
            recorder.add(request(&[1, number]));
            recorder.flush(Duration::from_secs(10));
        }
        recorder.lost().load(Relaxed)
    }

    #[test]
    fn hashes_keep_what_is_equal_and_depend_on_the_key() {
        let ids = |key| {
            let disk = SmallDisk(Arc::default(), 1 << 20);
            assert_eq!(record(writer(&disk, 1 << 20, key), 2), 0);
            let text = text(&disk);
            let ids = text.lines().skip(1).map(|line| {
                let line: serde_json::Value = serde_json::from_str(line).unwrap();
                let ids = line["hash_ids"].as_array().unwrap();
                ids.iter().map(|id| id.as_u64().unwrap()).collect::<Vec<_>>()
            });
            ids.collect::<Vec<_>>()
        };
        let (one, other) = (ids(1), ids(2));
        assert_eq!(one.len(), 2);
        assert!(one[0][0] == one[1][0] && one[0][1] != one[1][1], "{one:?}");
        assert!(one.iter().flatten().all(|id| *id > 1 && *id < 1 << 53), "{one:?}");
        assert!(one.iter().flatten().all(|id| !other.concat().contains(id)), "{one:?} {other:?}");
        assert_eq!(one, ids(1));
    }

    #[test]
    fn a_full_disk_ends_the_recording_after_its_last_whole_line() {
        let disk = SmallDisk(Arc::default(), 1000);
        let lost = record(writer(&disk, 1 << 20, 1), 50);
        let text = text(&disk);
        let written = text.lines().count() as u64 - 1;
        assert!(text.ends_with('\n') && (2..=10).contains(&written), "{text}");
        assert!(text.lines().all(|line| serde_json::from_str::<serde_json::Value>(line).is_ok()));
        assert!((49..=50).contains(&(written + lost)), "{written} written, {lost} lost");
    }

    #[test]
    fn the_size_is_bounded() {
        let disk = SmallDisk(Arc::default(), 1 << 20);
        record(writer(&disk, 2000, 1), 50);
        let text = text(&disk);
        assert!(text.len() <= 2000 && text.len() > 1500 && text.ends_with('\n'), "{text}");
    }

    #[test]
    fn requests_that_wait_are_bounded_in_bytes() {
        let (sender, _nobody_reads) = sync_channel(WAITING);
        let queue =
            Queue { sender, waiting: Arc::default(), ended: Arc::default(), lost: Arc::default() };
        let recorder = Recorder(Some(queue));
        for _ in 0..30 {
            recorder.add(request(&vec![7; 128 << 10])); // a MiB
        }
        assert_eq!(recorder.lost().load(Relaxed), 23);
    }

    #[test]
    fn only_recordings_are_continued() {
        let path = std::env::temp_dir().join(format!("kvx-recording-{}", std::process::id()));
        std::fs::write(&path, "a line of another file\n").unwrap();
        let error = Recorder::open(&path, 1 << 20).unwrap_err().to_string();
        assert!(error.contains("is not a recording; name another file"), "{error}");
        std::fs::remove_file(&path).unwrap();
        let first = Recorder::open(&path, 1 << 20).unwrap();
        let error = Recorder::open(&path, 1 << 20).unwrap_err().to_string();
        assert!(error.contains("belongs to another router"), "{error}");
        // The file is unlocked when the writer has ended.
        drop(first);
        let end = Instant::now() + Duration::from_secs(10);
        while let Err(error) = Recorder::open(&path, 1 << 20) {
            assert!(Instant::now() < end, "{error}");
            std::thread::yield_now();
        }
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert_eq!(text.matches("{\"kvx_recording\":1,").count(), 2, "{text}");
        let folder = Recorder::open(&std::env::temp_dir(), 1 << 20).unwrap_err().to_string();
        assert!(folder.contains("not a regular file"), "{folder}");
    }
}
