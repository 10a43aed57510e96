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

/// The openings that the demo continues.
const OPENINGS: usize = 5;

// vLLM guide R13: answers through the proxy equal those of a single server
#[test]
fn answers_of_the_fleet_are_the_single_servers_and_another_prefill_takes_over() {
    let (output, text) = demo(&["--decoders", "2", "--tp", "1:2"]);
    assert!(output.status.success(), "{text}");
    assert_eq!(
        text.matches("    equal   the first token came after ").count(),
        2 * OPENINGS,
        "{text}"
    );
    // The demo prints the text of each answer.
    let alone = lines_after(&text, "alone   ");
    assert!(
        alone.len() == 2 * OPENINGS && alone.iter().all(|text| text.chars().count() > 20),
        "{text}"
    );
    assert_eq!(alone, lines_after(&text, "apart   "));
    assert_eq!(text.matches("The router's status page is\nhttp://127.0.0.1:").count(), 2, "{text}");
    let (shm, tcp) = text.split_once("\nTCP: ").unwrap();
    for (part, backend) in [(shm, "SHM"), (tcp, "TCP")] {
        assert_eq!(
            part.matches(&format!("tokens moved over {backend} in ")).count(),
            OPENINGS,
            "{text}"
        );
        // Only the first transfer between two servers needs a handshake.
        let handshakes = part.matches(", after a handshake of ").count();
        assert!((1..OPENINGS).contains(&handshakes), "{text}");
        assert!(part.contains("was killed while it computed a prompt of "), "{text}");
        assert!(
            part.contains(
                "The router sent the prompt to another one: the client received the right answer"
            ),
            "{text}"
        );
    }
    // A file receives plain lines.
    assert!(!text.contains('\x1b'), "{text}");
}

#[test]
fn a_prefill_that_is_killed_in_a_transfer_ends_as_the_policy_says() {
    let (output, text) = demo(&["--kill"]);
    assert!(output.status.success(), "{text}");
    let (shm, tcp) = text.split_once("\nTCP: ").unwrap();
    // Over TCP a dead prefill sends nothing; shared memory outlives it.
    assert!(shm.contains("    fail      the right answer after "), "{text}");
    assert!(shm.contains("    recompute the right answer after "), "{text}");
    assert!(tcp.contains("    fail      HTTP 500 after "), "{text}");
    assert!(tcp.contains(" computed again by the decode server"), "{text}");
}

#[test]
fn json_has_a_line_for_each_answer() {
    let (output, text) = demo(&["--backend", "SHM", "--json"]);
    assert!(output.status.success(), "{text}");
    let lines = String::from_utf8(output.stdout).unwrap();
    let events: Vec<serde_json::Value> =
        lines.lines().map(|line| serde_json::from_str(line).expect(line)).collect();
    let named =
        |name: &str| -> Vec<_> { events.iter().filter(|event| event["event"] == name).collect() };
    let answers = named("answer");
    assert_eq!((named("started").len(), answers.len(), named("end").len()), (1, OPENINGS, 1));
    for answer in &answers {
        assert_eq!(answer["alone"]["token_ids"], answer["apart"]["token_ids"], "{answer}");
        assert_eq!(
            (&answer["equal"], answer["computed_by_decode"].as_u64()),
            (&true.into(), Some(1))
        );
        assert!(answer["transfer"]["bytes"].as_f64().unwrap() > 0.0, "{answer}");
    }
    assert!(answers[OPENINGS - 1]["prompt_tokens"].as_u64().unwrap() > 1000);
    // A test build is slower, and runs concurrently with other tests.
    let limit = if cfg!(debug_assertions) { 60.0 } else { 20.0 };
    let started = named("started")[0]["seconds"].as_f64().unwrap();
    let first = answers[0]["apart"]["first_token_seconds"].as_f64().unwrap();
    assert!(started + first < limit, "{started} s and {first} s");
    // The fourth opening begins like the third.
    let had = |at: usize| answers[at]["transfer"]["tokens_had"].as_u64().unwrap();
    assert_eq!((had(2), had(3)), (0, 48));
    let killed = named("killed");
    assert_eq!(
        (killed[0]["during"].as_str(), &killed[0]["equal"]),
        (Some("prefill"), &true.into())
    );
}

/// Returns the text after `words`, line by line.
fn lines_after<'a>(text: &'a str, words: &str) -> Vec<&'a str> {
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
        assert_eq!(text.matches("    equal   ").count(), OPENINGS, "{text}");
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
    assert_eq!(text.matches("    equal   ").count(), OPENINGS, "{text}");
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
