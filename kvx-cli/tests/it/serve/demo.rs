//! `kvx demo`.

use std::io::{BufRead as _, BufReader};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use kvx_testkit::test;

use crate::serve::server::{LIMIT, model};

fn demo(arguments: &[&str]) -> (Output, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvx"));
    // Each request alone may take a minute.
    let output = kvx_testkit::output(command.arg("demo").args(arguments), LIMIT * 6);
    let text = format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    (output, text)
}

// vLLM guide R13: answers through the proxy equal those of a single server
#[test]
fn answers_on_moved_blocks_are_those_of_one_server_and_a_killed_prefill_is_told() {
    let (output, text) = demo(&["--prefillers", "2", "--decoders", "2", "--tp", "1:2"]);
    assert!(output.status.success(), "{text}");
    assert_eq!(text.matches("  equal\n").count(), 16, "{text}");
    // The demo prints the text of each answer.
    let alone = told(&text, "alone: ");
    assert!(alone.len() == 16 && alone.iter().all(|told| told.chars().count() > 5), "{text}");
    assert_eq!(alone, told(&text, "apart: "));
    // Eight servers, two proxies and their pages.
    assert_eq!(text.matches(" listens on http://127.0.0.1:").count(), 12, "{text}");
    assert_eq!(text.matches("The proxy's status page is http://127.0.0.1:").count(), 2, "{text}");
    // A test build is slower, and runs concurrently with other tests.
    let limit = if cfg!(debug_assertions) { 60.0 } else { 20.0 };
    let first =
        text.split_once("The first one was complete ").and_then(|(_, rest)| rest.split_once(" s "));
    assert!(first.unwrap().0.parse::<f64>().unwrap() < limit, "{text}");
    assert_eq!(
        text.matches(" was killed during the transfer of its blocks. ").count(),
        2,
        "{text}"
    );
    // Over TCP a dead prefill sends nothing; shared memory outlives it.
    let (_, over_tcp) = text.split_once("\nTCP: ").unwrap();
    assert!(over_tcp.contains("The client receives HTTP 500 "), "{text}");
    assert_eq!(text.matches("The next request is served.").count(), 2, "{text}");
    let rows: Vec<&str> = text.lines().filter(|line| line.ends_with("  equal")).collect();
    let with = |rows: &[&str], word: &str| {
        rows.iter().filter(|row| row.split_whitespace().any(|w| w == word)).count()
    };
    let (shm, tcp) = rows.split_at(8);
    assert_eq!((with(shm, "SHM"), with(tcp, "TCP")), (8, 8), "{text}");
    // The first transfer with a peer prints the time of the handshake; later ones print `before`.
    assert!(
        (1..8).contains(&with(shm, "before")) && (1..8).contains(&with(tcp, "before")),
        "{text}"
    );
}

/// Returns the text after `words`, line by line.
fn told<'a>(text: &'a str, words: &str) -> Vec<&'a str> {
    text.lines().filter_map(|line| line.trim_start().strip_prefix(words)).collect()
}

#[test]
fn blocks_of_either_side_may_be_larger_and_ranks_more() {
    let model = model(&["--arch", "llama", "--kv-heads", "2"]);
    let model = model.to_str().unwrap();
    for (sizes, ranks) in [("16:64", "1"), ("64:16", "2:1")] {
        let (output, text) =
            demo(&["--backend", "TCP", "--model", model, "--block-size", sizes, "--tp", ranks]);
        assert!(output.status.success(), "{text}");
        assert_eq!(text.matches("  equal\n").count(), 8, "{text}");
    }
    for (flag, value, words) in [
        ("--block-size", "24:16", "a multiple of the other"),
        ("--block-size", "0", "16:64"),
        ("--block-size", "16:x", "16:64"),
        ("--tp", "3", "1, 2, 4 or 8"),
        ("--tp", "2:", "1, 2, 4 or 8"),
    ] {
        let (output, text) = demo(&[flag, value]);
        assert!(!output.status.success() && text.contains(words), "{text}");
    }
}

#[test]
fn a_demo_that_serves_leaves_nothing_when_it_is_interrupted() {
    let folder =
        Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("demo-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvx"));
    command.args(["demo", "--backend", "SHM", "--serve"]).env("TMPDIR", &folder);
    let mut demo =
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    kvx_testkit::kill_after(&demo, LIMIT * 2);
    let (says, said) = channel();
    let output = demo.stdout.take().unwrap();
    std::thread::spawn(move || {
        BufReader::new(output).lines().map_while(Result::ok).for_each(|line| drop(says.send(line)));
    });
    let until = Instant::now() + LIMIT * 2;
    let port: u16 = loop {
        let line = said
            .recv_timeout(until.saturating_duration_since(Instant::now()))
            .expect("it says more");
        let Some((_, rest)) = line.split_once("curl http://127.0.0.1:") else { continue };
        break rest.split('/').next().unwrap().parse().unwrap();
    };
    // Servers that listen have mapped the model.
    assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0, "the model is still there");
    assert!(TcpStream::connect(("127.0.0.1", port)).is_ok());
    rustix::process::kill_process(
        rustix::process::Pid::from_child(&demo),
        rustix::process::Signal::INT,
    )
    .unwrap();
    assert_eq!(demo.wait().unwrap().code(), Some(130));
    std::fs::remove_dir(&folder).unwrap();
    while TcpStream::connect(("127.0.0.1", port)).is_ok() {
        assert!(Instant::now() < until, "the proxy still runs");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Returns true if a process was started with this in its arguments.
fn runs(argument: &str) -> bool {
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    processes
        .filter_map(|process| std::fs::read(process.path().join("cmdline")).ok())
        .any(|line| String::from_utf8_lossy(&line).contains(argument))
}

#[test]
fn a_demo_that_is_interrupted_while_it_starts_leaves_nothing() {
    let folder =
        Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("demo-begun-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvx"));
    command.args(["demo", "--backend", "SHM", "--serve"]).env("TMPDIR", &folder);
    let mut demo =
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    kvx_testkit::kill_after(&demo, LIMIT);
    let model = folder.join(format!("kvx-demo-{}-0", demo.id()));
    let until = Instant::now() + LIMIT;
    while !runs(model.to_str().unwrap()) {
        assert!(
            Instant::now() < until && demo.try_wait().unwrap().is_none(),
            "no server is started"
        );
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(model.exists());
    rustix::process::kill_process(
        rustix::process::Pid::from_child(&demo),
        rustix::process::Signal::INT,
    )
    .unwrap();
    assert_eq!(demo.wait().unwrap().code(), Some(130));
    std::fs::remove_dir(&folder).expect("the model is removed");
    while runs(model.to_str().unwrap()) {
        assert!(Instant::now() < until, "a server still runs");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_models_own_folder_is_served_and_stays() {
    let folder = model(&["--arch", "qwen3", "--dtype", "bfloat16", "--kv-heads", "2"]);
    let (output, text) = demo(&["--backend", "SHM", "--model", folder.to_str().unwrap()]);
    assert!(output.status.success(), "{text}");
    assert_eq!(text.matches("  equal\n").count(), 8, "{text}");
    assert!(folder.join("model.safetensors").exists());
    let (output, text) = demo(&["--backend", "SHM", "--model", "/nowhere"]);
    assert!(!output.status.success() && text.contains("/nowhere"), "{text}");
}

#[test]
fn a_corrupted_block_changes_the_answer_and_the_demo_reports_it() {
    let (output, text) = demo(&["--backend", "SHM", "--corrupt"]);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(
        text.contains("DIFFERENT") && text.contains("a transferred block was corrupted"),
        "{text}"
    );
}
