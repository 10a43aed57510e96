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
mod tests {
    use std::sync::Mutex;

    use super::*;
    use crate::recording::trace::Trace;

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
        assert_eq!(written + lost, 50, "{written} written, {lost} lost");
    }

    #[test]
    fn the_size_is_bounded() {
        let disk = SmallDisk(Arc::default(), 1 << 20);
        let lost = record(writer(&disk, 2000, 1), 50);
        let text = text(&disk);
        assert_eq!(text.lines().count() as u64 - 1 + lost, 50, "{text}");
        assert!(text.len() <= 2000 && text.len() > 1500 && text.ends_with('\n'), "{text}");
    }

    #[test]
    fn every_line_can_be_played() {
        let disk = SmallDisk(Arc::default(), 1 << 20);
        let recorder = Recorder::start(writer(&disk, 1 << 20, 1)).unwrap();
        let mut huge = request(&[1]);
        huge.prompt.tokens = 4097 * 1024; // as many parts, of which each counts as 1,024
        huge.prompt.max_tokens = u64::MAX;
        huge.answer_tokens = Some(u64::MAX);
        recorder.add(huge);
        recorder.flush(Duration::from_secs(10));
        let trace = Trace::read(text(&disk).as_bytes()).unwrap();
        assert_eq!((trace.requests.len(), trace.over_limit), (1, 0));
        assert_eq!(trace.requests[0].prompt_tokens, 4 << 20);
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
    fn a_part_of_a_line_at_the_end_is_cut_off() {
        let path = std::env::temp_dir().join(format!("kvx-torn-{}", std::process::id()));
        let header = "{\"kvx_recording\":1,\"block_tokens\":256}\n";
        let torn = format!("{header}{{}}\n{}", "\0".repeat(100_000));
        std::fs::write(&path, &torn).unwrap();
        Recorder::can_open(&path).unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), torn, "a check changes nothing");
        let recorder = Recorder::open(&path, 1 << 20).unwrap();
        recorder.add(request(&[1]));
        recorder.flush(Duration::from_secs(10));
        let text = std::fs::read_to_string(&path).unwrap();
        assert_eq!(text.lines().count(), 4, "{text}");
        assert!(text.starts_with(&format!("{header}{{}}\n{{\"kvx_recording\":1,")), "{text}");
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn a_part_of_the_first_header_is_cut_off() {
        let path = std::env::temp_dir().join(format!("kvx-torn-header-{}", std::process::id()));
        let header = Header::new(1790000000.25).line().unwrap();
        let header = header.trim_end();
        for torn in [
            header.to_owned(),
            header[..1].to_owned(),
            header[..20].to_owned(),
            header[..35].to_owned(),
            header[..60].to_owned(),
            "\0".to_owned(),
            "\0".repeat(LONGEST_HEADER as usize - 1),
            format!("{}{}", &header[..40], "\0".repeat(100)),
        ] {
            std::fs::write(&path, &torn).unwrap();
            Recorder::can_open(&path).unwrap();
            assert_eq!(std::fs::read_to_string(&path).unwrap(), torn, "a check changes nothing");
            let recorder = Recorder::open(&path, 1 << 20).unwrap();
            recorder.add(request(&[1]));
            recorder.flush(Duration::from_secs(10));
            let trace = Trace::from_file(&path).unwrap();
            assert_eq!(trace.requests.len(), 1, "{torn:?}");
            drop(recorder);
            // The writer may still have it locked.
            std::fs::remove_file(&path).unwrap();
        }
        for other in [
            "a note".to_owned(),
            "{\"kvx_recording\":2,\"started\":1.5".to_owned(),
            "{\"kvx_recording\":1,\"started\":1.5,\"x\"".to_owned(),
            format!("{}\0x", &header[..40]),
            format!("{header}}}"),
            format!("{header}\0\0\n"),
            "\0\n".to_owned(),
            "\0".repeat(LONGEST_HEADER as usize),
        ] {
            std::fs::write(&path, &other).unwrap();
            let error = Recorder::open(&path, 1 << 20).unwrap_err().to_string();
            assert!(error.contains("is not a recording"), "{other:?}: {error}");
            assert_eq!(std::fs::read_to_string(&path).unwrap(), other, "it is kept");
        }
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn a_write_that_fails_is_reported_even_if_the_cut_fails_too() {
        struct Broken;
        impl Write for Broken {
            fn write(&mut self, _: &[u8]) -> std::io::Result<usize> {
                Err(ErrorKind::StorageFull.into())
            }
            fn flush(&mut self) -> std::io::Result<()> {
                Ok(())
            }
        }
        impl Target for Broken {
            fn cut(&mut self, _: u64) -> std::io::Result<()> {
                Err(ErrorKind::PermissionDenied.into())
            }
        }
        let disk = SmallDisk(Arc::default(), 1 << 20);
        let mut writer = Writer { file: Box::new(Broken), ..writer(&disk, 1 << 20, 1) };
        assert_eq!(writer.write(b"{}\n").unwrap_err().kind(), ErrorKind::StorageFull);
    }

    #[test]
    fn a_recording_that_is_full_at_the_start_counts_what_it_lacks() {
        let path = std::env::temp_dir().join(format!("kvx-full-{}", std::process::id()));
        let recorder = Recorder::open(&path, 100).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert!(recorder.is_configured() && !recorder.is_on());
        (0..3).for_each(|_| recorder.add(request(&[1])));
        assert_eq!(recorder.lost().load(Relaxed), 3);
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
        assert!(error.contains("is locked by another process"), "{error}");
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
