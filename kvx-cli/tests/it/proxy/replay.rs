//! Tests of `kvx proxy --record` and `kvx replay`.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use kvx_instance::{Delays, Fault, Instance, Leg, Script, Settings};
use kvx_testkit::output;
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::proxy::client::{CUT_OFF, Call, completion, prompt, streamed};
use crate::proxy::commands::{kvx_proxy, said};
use crate::proxy::fleet::{Fleet, Plan, Proxy, SetupFile};
use crate::proxy::recipes::COMPLETIONS;

const CHAT: &str = "/v1/chat/completions";

/// Starts a fleet whose router records into the file.
async fn recording_fleet(file: &SetupFile, more: &str) -> Fleet {
    let setup = format!("record = \"{}\"\n{more}", file.path());
    Plan::of(1, 1, &Settings::default()).setup(&setup).start().await
}

/// Waits until a recording has this many requests, and returns its lines without the header.
async fn recorded(path: &str, requests: usize) -> Vec<Value> {
    let end = Instant::now() + CUT_OFF;
    loop {
        let text = std::fs::read_to_string(path).unwrap();
        let lines: Vec<Value> = text
            .lines()
            .map(|line| {
                serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"))
            })
            .filter(|line: &Value| line["kvx_recording"].is_null())
            .collect();
        if lines.len() >= requests {
            assert_eq!(lines.len(), requests, "{text}");
            return lines;
        }
        assert!(Instant::now() < end, "{requests} requests are not recorded: {text}");
        tokio::time::sleep(Duration::from_millis(5)).await; // between polls
    }
}

async fn ask(port: u16, path: &str, body: &Value) {
    let answer = Call::post(port, path, body).send().await;
    assert_eq!(answer.status, 200, "{}", answer.text());
}

pub(super) fn kvx_replay(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvx"));
    command.env_remove("OPENAI_API_KEY").arg("replay").args(arguments).stdin(Stdio::null());
    output(&mut command, CUT_OFF * 3)
}

/// Replays a file, and returns the object that `--json` prints.
pub(super) fn replayed(file: &str, url: &str, more: &[&str]) -> Value {
    let output = kvx_replay(&[&[file, "--url", url, "--json"][..], more].concat());
    assert_eq!(output.status.code(), Some(0), "{}", said(&output));
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"))
}

fn url(port: u16) -> String {
    format!("http://127.0.0.1:{port}")
}

/// Returns the lengths of prompts and answers, and which blocks are equal, by the length of the
/// prompts.
fn shape(lines: &[Value]) -> Vec<(u64, u64, Vec<usize>)> {
    let mut lines: Vec<_> = lines.iter().collect();
    lines.sort_by_key(|line| line["input_length"].as_u64());
    let mut names = HashMap::new();
    let mut number = |id: &Value| {
        let next = names.len();
        *names.entry(id.as_u64().unwrap()).or_insert(next)
    };
    let shape = lines.iter().map(|line| {
        let length = |key: &str| line[key].as_u64().unwrap_or_else(|| panic!("{key}: {line}"));
        let blocks = line["hash_ids"].as_array().unwrap().iter().map(&mut number).collect();
        (length("input_length"), length("output_length"), blocks)
    });
    shape.collect()
}

/// Returns prompts of 700, 710, 720, 300 and 20 tokens. The first three share 600 tokens.
fn prompts() -> Vec<String> {
    let shared = prompt("a secret system prompt", 600);
    let with = |name: &str, tokens: usize| format!("{shared}{}", prompt(name, tokens));
    vec![
        with("Alice", 100),
        with("Bob", 110),
        with("Carol", 120),
        prompt("another secret", 300),
        prompt("Dave", 20),
    ]
}

pub(crate) async fn a_recording_has_lengths_and_keyed_hashes_but_no_text() {
    let (one, other) = (SetupFile::new(""), SetupFile::new(""));
    let fleet = recording_fleet(&one, "").await;
    for prompt in prompts() {
        ask(fleet.port(), COMPLETIONS, &completion(&prompt, 3)).await;
    }
    // A reload changes neither the file nor its key.
    let before = fleet.proxy.errors().len();
    fleet.reread(&fleet.prefill, &fleet.decode);
    let end = Instant::now() + CUT_OFF;
    while !fleet.proxy.errors()[before..].contains("reloaded") {
        assert!(Instant::now() < end, "it does not reload: {}", fleet.proxy.errors());
        tokio::time::sleep(Duration::from_millis(5)).await; // between polls
    }
    let mut again = streamed(&prompts()[0], 4);
    again["stream_options"] = json!({"include_usage": true});
    assert!(Call::post(fleet.port(), COMPLETIONS, &again).stream().await.is_whole());
    let chat = json!({"model": "m", "max_tokens": 5, "stream": true, "user": "mallory",
                      "messages": [{"role": "user", "content": "a confession"}]});
    assert!(Call::post(fleet.port(), CHAT, &chat).stream().await.is_whole());
    // Other paths have no prompt that the router knows.
    ask(fleet.port(), "/tokenize", &json!({"model": "m", "prompt": "x"})).await;
    let lines = recorded(one.path(), 7).await;

    let text = std::fs::read_to_string(one.path()).unwrap();
    for word in ["secret", "lorem", "ipsum", "Alice", "confession", "mallory", "\"m\"", "127.0.0.1"]
    {
        assert!(!text.contains(word), "{word}: {text}");
    }
    let keys: BTreeSet<_> =
        lines.iter().flat_map(|line| line.as_object().unwrap().keys()).collect();
    let known = [
        "chat",
        "hash_ids",
        "input_length",
        "max_tokens",
        "outcome",
        "output_length",
        "route",
        "status",
        "stream",
        "timestamp",
        "total_ms",
        "ttft_ms",
    ];
    assert!(keys.iter().copied().eq(known), "no field may be added without a thought: {keys:?}");
    let header: Value = serde_json::from_str(text.lines().next().unwrap()).unwrap();
    assert_eq!((&header["kvx_recording"], &header["block_tokens"]), (&json!(1), &json!(256)));
    let holds = header["holds"].as_str().unwrap();
    assert!(holds.contains("no text"), "{holds}");

    let first: Vec<_> = lines[..5].to_vec();
    let lengths: Vec<_> =
        shape(&first).into_iter().map(|(input, output, _)| (input, output)).collect();
    assert_eq!(lengths, [(20, 3), (300, 3), (700, 3), (710, 3), (720, 3)]);
    assert_eq!(lines[5]["output_length"], 4, "the usage is no token");
    assert_eq!((&lines[6]["chat"], &lines[6]["stream"]), (&json!(true), &json!(true)));
    assert_eq!(lines[5]["hash_ids"], lines[0]["hash_ids"], "as before the reload");
    assert!(lines.iter().all(|line| line["outcome"] == "ok" && line["status"] == 200), "{text}");

    // Another router, or the same one after a restart, has other hashes for the same prompts.
    let second = recording_fleet(&other, "").await;
    for prompt in prompts() {
        ask(second.port(), COMPLETIONS, &completion(&prompt, 3)).await;
    }
    let others = recorded(other.path(), 5).await;
    assert_eq!(shape(&others), shape(&first));
    let ids = |lines: &[Value]| -> BTreeSet<u64> {
        let ids = lines.iter().flat_map(|line| line["hash_ids"].as_array().unwrap().clone());
        ids.map(|id| id.as_u64().unwrap()).collect()
    };
    assert!(ids(&first).len() == 3 && ids(&first).is_disjoint(&ids(&others)), "{text}");
}

pub(crate) async fn a_replay_sends_what_was_recorded() {
    let (original, copy) = (SetupFile::new(""), SetupFile::new(""));
    let fleet = recording_fleet(&original, "").await;
    for (count, prompt) in prompts().iter().enumerate() {
        ask(fleet.port(), COMPLETIONS, &completion(prompt, 3 + count as u64)).await;
    }
    let lines = recorded(original.path(), 5).await;
    drop(fleet);
    let fleet = recording_fleet(&copy, "").await;
    let summary = replayed(original.path(), &url(fleet.port()), &[]);
    let played = &summary["endpoints"][0];
    assert_eq!((&played["requests"], &played["errors"]), (&json!(5), &json!({})), "{summary}");
    assert_eq!((&played["prompt_tokens"], &played["answer_tokens"]), (&json!(2450), &json!(25)));
    let copied = recorded(copy.path(), 5).await;
    assert_eq!(shape(&copied), shape(&lines));
    let shared: Vec<_> = shape(&copied).into_iter().map(|(_, _, blocks)| blocks).collect();
    assert_eq!(shared, [vec![], vec![0], vec![1, 2], vec![1, 2], vec![1, 2]]);
}

/// Returns the lines of a trace in the form of Mooncake's: four requests within 600 ms.
pub(super) fn trace() -> String {
    let line = |at: u32, input: u32, output: u32, ids: &[u32]| {
        json!({"timestamp": at, "input_length": input, "output_length": output, "hash_ids": ids})
            .to_string()
    };
    [
        line(0, 600, 4, &[0, 1]),
        line(200, 1100, 5, &[0, 1, 2]),
        line(400, 700, 6, &[3, 4]),
        line(600, 30, 7, &[5]),
    ]
    .join("\n")
}

/// Returns the prompts and the lengths of answers that an instance was asked for, sorted.
pub(super) fn bodies(instance: &mut Instance) -> Vec<(Vec<u64>, u64)> {
    let seen = instance.report().seen.into_iter().filter(|seen| seen.leg == Some(Leg::Alone));
    let mut bodies: Vec<_> = seen
        .map(|seen| {
            let ids = seen.body["prompt"].as_array().unwrap().iter();
            let ids = ids.map(|id| id.as_u64().unwrap()).collect();
            (ids, seen.body["max_tokens"].as_u64().unwrap())
        })
        .collect();
    bodies.sort();
    bodies
}

pub(crate) async fn a_seed_makes_the_same_requests_and_a_trace_of_mooncake_plays() {
    let file = SetupFile::new(&trace());
    let play = |more: &[&str]| {
        let mut instance = Instance::start(Settings::default());
        let started = Instant::now();
        let summary = replayed(file.path(), &instance.url(), more);
        assert_eq!(summary["endpoints"][0]["errors"], json!({}), "{summary}");
        (bodies(&mut instance), started.elapsed())
    };
    let (first, took) = play(&[]);
    assert!(took >= Duration::from_millis(600), "arrivals keep their distance: {took:?}");
    let lengths: Vec<_> = first.iter().map(|(ids, answer)| (ids.len(), *answer)).collect();
    assert_eq!(
        lengths.iter().copied().collect::<BTreeMap<_, _>>(),
        BTreeMap::from([(600, 4), (1100, 5), (700, 6), (30, 7)])
    );
    let of = |tokens: usize| &first.iter().find(|(ids, _)| ids.len() == tokens).unwrap().0;
    assert_eq!(of(600)[..], of(1100)[..600], "equal hashes are equal tokens");
    assert_ne!(of(600)[..100], of(700)[..100]);
    let (second, took) = play(&["--speed", "2"]);
    assert_eq!(first, second, "the same requests");
    assert!(took >= Duration::from_millis(300), "{took:?}");
    assert_ne!(play(&["--seed", "1"]).0, first);
    let (short, _) = play(&["--limit", "2", "--shrink", "16", "--max-answer", "2"]);
    let lengths: Vec<_> = short.iter().map(|(ids, answer)| (ids.len(), *answer)).collect();
    assert!(lengths.iter().all(|length| [(38, 1), (69, 1)].contains(length)), "{lengths:?}");
    assert_eq!(short.len(), 2);
    // The second one is due after two seconds.
    let (early, _) = play(&["--for", "1s", "--speed", "0.1", "--max-prompt", "40"]);
    assert_eq!(early.iter().map(|(ids, _)| ids.len()).collect::<Vec<_>>(), [40]);
}

pub(crate) async fn outcomes_of_failures_are_recorded() {
    let file = SetupFile::new("");
    let more = "[retries]\nattempts = 1\n[timeouts]\nrequest = \"5s\"\n";
    let mut fleet = recording_fleet(&file, more).await;
    let port = fleet.port();
    // A request that the router does not admit is not recorded.
    assert_eq!(Call::post(port, COMPLETIONS, &json!(7)).send().await.status, 400);
    let mut fails = async |fault, leg| {
        fleet.decode[0].script(Script { leg: Some(leg), times: 1, fault });
        let call = Call::post(port, COMPLETIONS, &streamed(&prompt("it fails", 300), 9));
        call.try_open().await.unwrap().read_out().await.status
    };
    assert_eq!(fails(Fault::Status(400), Leg::Decode).await, 400);
    assert_eq!(fails(Fault::Status(500), Leg::Decode).await, 500);
    assert_eq!(fails(Fault::CloseAfter(2), Leg::Decode).await, 200);
    assert_eq!(fails(Fault::HangAfter(2), Leg::Decode).await, 200);
    fleet.decode[0].delays(Delays { prefill_ms: 0, token_ms: 200 });
    let mut open = Call::post(port, COMPLETIONS, &streamed("it ends early", 50)).open().await;
    open.event().await.unwrap();
    drop(open);
    let lines = recorded(file.path(), 5).await;
    let mut outcomes: Vec<_> = lines
        .iter()
        .map(|line| (line["outcome"].as_str().unwrap(), line["status"].as_u64().unwrap()))
        .collect();
    outcomes.sort_unstable();
    let expected = [
        ("broken_off", 200),
        ("client_error", 400),
        ("client_gone", 200),
        ("timeout", 200),
        ("upstream_error", 500),
    ];
    assert_eq!(outcomes, expected);
    let whole = lines.iter().filter(|line| line["input_length"] == 300);
    assert!(whole.clone().count() == 4 && whole.clone().all(|line| line["max_tokens"] == 9));
    // A replay asks for whole answers.
    let summary =
        replayed(file.path(), &Instance::start(Settings::default()).url(), &["--speed", "100"]);
    assert_eq!(summary["endpoints"][0]["answer_tokens"], 4 * 9 + 50, "{summary}");
    assert_eq!(summary["notes"], json!([]), "{summary}");
}

/// Waits until exactly this many requests are counted as missing in the recording.
async fn lost(proxy: &Proxy, requests: usize) {
    let end = Instant::now() + CUT_OFF;
    loop {
        let lost = proxy.metric("kvx_proxy_recording_lines_dropped_total", "").await;
        assert!(lost <= requests as f64, "{lost} are counted, and {requests} are lost");
        if lost == requests as f64 {
            return;
        }
        assert!(Instant::now() < end, "{lost} are counted, and {requests} are lost");
        tokio::time::sleep(Duration::from_millis(5)).await; // between polls
    }
}

pub(crate) async fn a_full_disk_ends_the_recording_and_no_request() {
    let file = SetupFile::new("");
    let instances = [Instance::start(Settings::default()), Instance::start(Settings::default())];
    // Files may have this many blocks of 512 bytes. The signal is ignored, so that writes fail as
    // on a full disk.
    let start = |file: &SetupFile, blocks: u32| {
        let limited = format!("trap '' 25; ulimit -f {blocks}; exec \"$0\" \"$@\"");
        let mut command = Command::new("sh");
        command.args(["-c", &limited, env!("CARGO_BIN_EXE_kvx")]);
        command.args(["proxy", "--port", "0", "--record", file.path()]);
        command.args(["--prefill", &instances[0].url(), "--decode", &instances[1].url()]);
        Proxy::spawn(command, &[])
    };
    let proxy = start(&file, 4);
    proxy.wait_until("/ready", "it is ready", |status, _| status == 200).await;
    let mut sent = 20;
    for count in 0..sent {
        ask(proxy.port, COMPLETIONS, &completion(&prompt(&format!("request {count}"), 300), 2))
            .await;
    }
    let end = Instant::now() + CUT_OFF;
    while proxy.metric("kvx_proxy_recording_lines_dropped_total", "").await < 1.0 {
        assert!(Instant::now() < end, "no line is counted as lost: {}", proxy.errors());
        ask(proxy.port, COMPLETIONS, &completion("one more", 2)).await;
        sent += 1;
    }
    assert!(proxy.errors().contains("cannot write the recording"), "{}", proxy.errors());
    for _ in 0..3 {
        ask(proxy.port, COMPLETIONS, &completion("after the end", 2)).await;
        sent += 1;
    }
    let text = std::fs::read_to_string(file.path()).unwrap();
    assert!(text.ends_with('\n') && (1000..=2048).contains(&text.len()), "{text}");
    lost(&proxy, sent - (text.lines().count() - 1)).await;
    replayed(file.path(), &instances[0].url(), &["--speed", "100"]);

    // A disk that is full from the start stops no router either.
    let empty = SetupFile::new("");
    let proxy = start(&empty, 0);
    proxy.wait_until("/ready", "it is ready", |status, _| status == 200).await;
    for _ in 0..2 {
        ask(proxy.port, COMPLETIONS, &completion("not recorded", 2)).await;
    }
    lost(&proxy, 2).await;
    assert!(
        proxy.errors().contains("the disk has no space for the recording"),
        "{}",
        proxy.errors()
    );
    assert_eq!(std::fs::metadata(empty.path()).unwrap().len(), 0);

    let urls = instances.each_ref().map(Instance::url);
    let pair = ["--prefill", &urls[0], "--decode", &urls[1], "--port", "0"];
    let other = SetupFile::new("a file of another program\n");
    let missing = format!("{}/recording", file.path());
    for (path, why) in [
        (&*missing, "cannot write the recording"),
        (other.path(), "is not a recording"),
        ("/dev/full", "is not a regular file"),
    ] {
        let arguments = [&pair[..], &["--record", path]].concat();
        for arguments in [arguments.clone(), [&arguments[..], &["--check"]].concat()] {
            let output = kvx_proxy(&arguments);
            assert_eq!(output.status.code(), Some(1), "{}", said(&output));
            assert!(
                said(&output).contains(why) && said(&output).contains(path),
                "{}",
                said(&output)
            );
        }
    }
    assert_eq!(std::fs::read_to_string(other.path()).unwrap(), "a file of another program\n");
}

pub(crate) async fn a_restart_adds_to_the_recording_and_its_size_is_limited() {
    let file = SetupFile::new("");
    for requests in [1, 2] {
        let mut fleet = recording_fleet(&file, "").await;
        ask(fleet.port(), COMPLETIONS, &completion(&prompt("restarted", 300), 2)).await;
        recorded(file.path(), requests).await;
        fleet.proxy.signal(Signal::TERM);
        assert_eq!(fleet.proxy.ended(CUT_OFF).await, 0);
    }
    let lines = recorded(file.path(), 2).await;
    assert_ne!(lines[0]["hash_ids"], lines[1]["hash_ids"], "each start has its own key");
    let summary = replayed(file.path(), &Instance::start(Settings::default()).url(), &[]);
    assert_eq!(summary["endpoints"][0]["requests"], 2);
    let fleet = recording_fleet(&file, "record_size = \"2KiB\"").await;
    let end = Instant::now() + CUT_OFF;
    while !fleet.proxy.errors().contains("has reached record_size") {
        assert!(Instant::now() < end, "{}", fleet.proxy.errors());
        ask(fleet.port(), COMPLETIONS, &completion(&prompt("limited", 300), 2)).await;
    }
    assert!(std::fs::metadata(file.path()).unwrap().len() <= 2048);
}

pub(crate) async fn malformed_files_are_refused_with_the_line() {
    let instance = Instance::start(Settings::default());
    let good = trace();
    let long = format!("{good}\n{}", "x".repeat(1 << 20));
    for (text, why) in [
        (format!("{good}\nnot JSON"), "line 5: it is no JSON object"),
        (long, "line 5 is longer than"),
        (
            good.replace("\"input_length\":700", "\"input_length\":7"),
            "line 3: hash_ids has 2 hashes",
        ),
        (good.replace("400", "-400"), "line 3: timestamp is -400"),
        (
            "{\"kvx_recording\":2,\"block_tokens\":256}".to_owned(),
            "line 1: the recording has version 2",
        ),
        (String::new(), "no request"),
    ] {
        let file = SetupFile::new(&text);
        let output = kvx_replay(&[file.path(), "--url", &instance.url()]);
        assert_eq!(output.status.code(), Some(1), "{}", said(&output));
        assert!(
            said(&output).contains(why) && said(&output).contains(file.path()),
            "{}",
            said(&output)
        );
    }
    let file = SetupFile::new(&good);
    for (arguments, why) in [
        (&["--speed", "0"][..], "from 0.001 to 1000"),
        (&["--shrink", "1000"][..], "from 1 to that"),
        (&["--for", "5"][..], "not a duration"),
        (&["--in-turn", "5s"][..], "--beside"),
        (&["--report", "/nowhere/report.html"][..], "cannot write the report /nowhere/report.html"),
        (
            &["--caches", "http://127.0.0.1:1"][..],
            "cannot read the cache's metrics at http://127.0.0.1:1",
        ),
    ] {
        let output =
            kvx_replay(&[&[file.path(), "--url", &instance.url()][..], arguments].concat());
        assert!(!output.status.success() && said(&output).contains(why), "{}", said(&output));
    }
    let gone = kvx_replay(&["/nowhere/trace", "--url", &instance.url()]);
    assert!(said(&gone).contains("cannot read the trace /nowhere/trace"), "{}", said(&gone));
    let nobody = kvx_replay(&[file.path(), "--url", "http://127.0.0.1:1", "--model", "m"]);
    assert_eq!(nobody.status.code(), Some(1));
    assert!(
        said(&nobody).contains("every request to http://127.0.0.1:1 failed"),
        "{}",
        said(&nobody)
    );
}
