//! Tests of what `kvx replay` measures and reports.

use std::collections::BTreeSet;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::TcpListener;
use std::path::Path;
use std::time::Duration;

use kvx_instance::{Delays, Fault, Instance, Leg, Script, Settings};
use serde_json::{Value, json};

use crate::proxy::commands::said;
use crate::proxy::fleet::SetupFile;
use crate::proxy::replay::{bodies, kvx_replay, replayed, trace};

pub(crate) async fn a_replay_compares_two_endpoints_and_writes_a_page() {
    let file = SetupFile::new(&trace());
    let (mut one, mut other) =
        (Instance::start(Settings::default()), Instance::start(Settings::default()));
    other.script(Script { leg: Some(Leg::Alone), times: 1, fault: Fault::Status(503) });
    other.script(Script { leg: Some(Leg::Alone), times: 1, fault: Fault::ErrorAfter(2) });
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let report = folder.join(format!("replay-{}.html", std::process::id()));
    let (first, second) = (one.url(), other.url());
    let output = kvx_replay(&[
        file.path(),
        "--url",
        &first,
        "--beside",
        &second,
        "--speed",
        "10",
        "--report",
        report.to_str().unwrap(),
    ]);
    assert_eq!(output.status.code(), Some(0), "{}", said(&output));
    let row = |name: &str| {
        let text = said(&output);
        let line = text.lines().find(|line| line.starts_with(name));
        let line = line.unwrap_or_else(|| panic!("no {name}: {text}"))[name.len()..].to_owned();
        line.split_whitespace().map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(row("requests"), ["4", "4"]);
    assert_eq!(row("not sent"), ["0", "0"]);
    assert_eq!(row("failed"), ["0", "2"]);
    assert_eq!(row("  status 503"), ["0", "1"]);
    assert_eq!(row("  error event"), ["0", "1"]);
    let (ones, others) = (bodies(&mut one), bodies(&mut other));
    let lengths = |bodies: &[(Vec<u64>, u64)]| {
        bodies.iter().map(|(ids, answer)| (ids.len(), *answer)).collect::<BTreeSet<_>>()
    };
    assert_eq!(lengths(&ones), lengths(&others));
    assert!(ones.iter().all(|body| !others.contains(body)), "each has prompts of its own");

    let page = std::fs::read_to_string(&report).unwrap();
    std::fs::remove_file(&report).unwrap();
    assert_eq!(page.matches("<svg ").count(), 3);
    assert!(page.contains("prefers-color-scheme:dark") && page.contains("default-src 'none'"));
    for loads in ["src=", "href=", "url(", "@import", "<script", "NaN", "inf"] {
        assert!(!page.contains(loads), "{loads}: {page}");
    }
    assert!(page.contains(&first) && page.contains(&second));
}

pub(crate) async fn endpoints_that_take_turns_are_never_busy_at_the_same_time() {
    let file = SetupFile::new(&trace());
    let busy = Duration::from_millis(150);
    let settings = Settings {
        delays: Delays { prefill_ms: busy.as_millis() as u64, token_ms: 0 },
        tells: true,
        ..Settings::default()
    };
    let (mut one, mut other) = (Instance::start(settings.clone()), Instance::start(settings));
    let beside = other.url();
    let summary = replayed(file.path(), &one.url(), &["--beside", &beside, "--in-turn", "300ms"]);
    for endpoint in summary["endpoints"].as_array().unwrap() {
        assert_eq!((&endpoint["requests"], &endpoint["errors"]), (&json!(4), &json!({})));
    }
    let times = |instance: &mut Instance| {
        instance.begun().into_iter().map(|begun| begun.at).collect::<Vec<_>>()
    };
    let (ones, others) = (times(&mut one), times(&mut other));
    assert_eq!((ones.len(), others.len()), (4, 4));
    for (one, other) in ones.iter().flat_map(|one| others.iter().map(move |other| (one, other))) {
        assert!(one.abs_diff(*other) >= busy, "they overlap: {ones:?} and {others:?}");
    }
}

pub(crate) async fn waiting_for_others_is_a_part_of_the_times() {
    let line = |at: u32| {
        json!({"timestamp": at, "input_length": 9, "output_length": 1, "hash_ids": []}).to_string()
    };
    let file = SetupFile::new(&[0, 1, 2, 3].map(line).join("\n"));
    let instance = Instance::start(Settings {
        delays: Delays { prefill_ms: 300, token_ms: 0 },
        ..Settings::default()
    });
    let play = |more: &[&str]| {
        let one_at_a_time = ["--concurrency", "1", "--slo-ttft", "1h"];
        replayed(file.path(), &instance.url(), &[&one_at_a_time[..], more].concat())["endpoints"][0]
            .clone()
    };
    // The fourth one waits for three others.
    let played = play(&[]);
    assert_eq!((&played["requests"], &played["not_sent"]), (&json!(4), &json!(0)), "{played}");
    let p99 = |of: &str| played[of]["p99"].as_f64().unwrap();
    assert!(p99("ttft_ms") >= 1190.0 && p99("total_ms") >= p99("ttft_ms"), "{played}");
    assert!(p99("late_ms") >= 890.0 && played["ttft_ms"]["p50"].as_f64() >= Some(595.0));
    assert_eq!(played["most_late_ms"], played["late_ms"]["p99"]);
    assert_eq!(played["within_level"], 1.0);
    // The third one would begin after the end.
    let played = play(&["--for", "500ms"]);
    let count = |of: &str| played[of].as_u64().unwrap();
    assert!((1..=2).contains(&count("requests")), "{played}");
    assert_eq!(count("requests") + count("not_sent"), 4, "{played}");
    assert_eq!(played["within_level"], count("requests") as f64 / 4.0);
    assert_eq!(played["errors"], json!({}));
}

/// Serves `/metrics` of a cache: these answers, one per connection, and then nothing.
fn metrics_of_a_cache(answers: Vec<(u16, String)>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        for (status, text) in answers {
            let (mut client, _) = listener.accept().unwrap();
            let mut head = BufReader::new(&client);
            let mut line = String::new();
            while head.read_line(&mut line).unwrap() > 2 {
                line.clear();
            }
            let length = text.len();
            write!(
                client,
                "HTTP/1.1 {status} x\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n{text}"
            )
            .unwrap();
        }
    });
    url
}

pub(crate) async fn unknown_counts_of_a_cache_discard_no_answers() {
    let file = SetupFile::new(&trace());
    let instance = Instance::start(Settings::default());
    let counts = |queries: u32, hits: u32| {
        let text = format!(
            "vllm:prefix_cache_queries_total {queries}\nvllm:prefix_cache_hits_total {hits}\n"
        );
        (200, text)
    };
    for (after, part, note) in [
        (counts(300, 60), json!(0.25), None),
        (counts(20, 2), Value::Null, Some("has restarted")),
        ((500, String::new()), Value::Null, Some("status 500")),
    ] {
        let cache = metrics_of_a_cache(vec![counts(100, 10), after]);
        let summary =
            replayed(file.path(), &instance.url(), &["--speed", "10", "--caches", &cache]);
        let played = &summary["endpoints"][0];
        assert_eq!((&played["requests"], &played["cache_hit_part"]), (&json!(4), &part));
        let notes = summary["notes"].to_string();
        match note {
            Some(note) => assert!(notes.contains(note) && notes.contains("are unknown"), "{notes}"),
            None => assert_eq!(notes, "[]"),
        }
    }
}

pub(crate) async fn a_report_replaces_an_earlier_one_only_when_it_is_complete() {
    let file = SetupFile::new(&trace());
    let report = SetupFile::new("an earlier report");
    let play = |report: &str| {
        // It lists no model, so the replay fails before its first request.
        let nobody = "http://127.0.0.1:1";
        kvx_replay(&[file.path(), "--url", nobody, "--report", report])
    };
    assert_eq!(play(report.path()).status.code(), Some(1));
    assert_eq!(std::fs::read_to_string(report.path()).unwrap(), "an earlier report");
    let folder = Path::new(report.path()).parent().unwrap();
    let name = Path::new(report.path()).file_name().unwrap().to_str().unwrap();
    let left = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name());
    let temporary = format!("{name}.");
    let left = left.filter(|other| other.to_str().is_some_and(|o| o.starts_with(&temporary)));
    assert_eq!(left.count(), 0, "no temporary file is left");
    for (path, why) in
        [(file.path(), "it is the file to replay"), ("/dev/null", "it is not a regular file")]
    {
        let output = play(path);
        assert_eq!(output.status.code(), Some(1));
        assert!(said(&output).contains(why), "{}", said(&output));
    }
    assert_eq!(std::fs::read_to_string(file.path()).unwrap(), trace());
}
