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
