//! Measures the first token of a prompt of 2,000 tokens, with prefill and decode apart, next to the
//! cost of its parts: the prefill's own time, a bare transfer of the same blocks by `kvx bench`,
//! and one step of the decode.
//!
//! `cargo bench -p kvx-cli --bench serve` prints one JSON object per backend, with medians of
//! rounds in milliseconds. It also prints the first token of a short prompt through `kvx proxy` and
//! from a single server, and the time of `kvx demo` until its first answer. The model has the KV
//! cache of a large one but narrow layers, so that little time is spent before the transfer. With
//! `-- --test` it runs one round of a small model.
#![allow(clippy::unwrap_used, reason = "a benchmark that cannot run may panic")]

// This benchmark uses only a part of the tests' server.
#[allow(dead_code, reason = "the tests use the rest")]
#[path = "../tests/it/serve/server.rs"]
mod server;

use std::io::{BufRead as _, BufReader};
use std::ops::Range;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use self::server::{LIMIT, Server, ServerArgs, greedy, model};

/// A model with 44 KiB of KV cache per token.
const NARROW: Shape =
    Shape { hidden: "256", intermediate: "512", layers: 11, kv_heads: 8, head_dim: 128 };
const SMALL: Shape =
    Shape { hidden: "64", intermediate: "128", layers: 2, kv_heads: 8, head_dim: 8 };
const PROMPT: u64 = 2000;
/// The tokens of a short prompt, which shows the cost of a request rather than of its tokens.
const SHORT: u64 = 30;
/// The number of rounds with short prompts for each round with long ones.
const SHORT_ROUNDS: u64 = 10;
/// Flags for a pool that holds every round's prompt.
const POOL: &[&str] = &["--kv-cache-memory-bytes", "1G", "--max-model-len", "4096"];
/// Tokens of a block.
const BLOCK: u64 = 16;
/// The target for the transfer of an engine, as a multiple of the bare transfer.
const TRANSFER: f64 = 1.3;

/// Seconds of all transfers of a server.
const TRANSFERRED: &str = "vllm:nixl_xfer_time_seconds_sum";

/// The shape of a model, as far as it matters here.
#[derive(Clone, Copy)]
struct Shape {
    hidden: &'static str,
    intermediate: &'static str,
    layers: u64,
    kv_heads: u64,
    head_dim: u64,
}

impl Shape {
    fn folder(&self) -> std::path::PathBuf {
        let [layers, kv_heads, head_dim] =
            [self.layers, self.kv_heads, self.head_dim].map(|n| n.to_string());
        let shape = ["--arch", "qwen3", "--heads", "8", "--dtype", "bfloat16", "--tied"];
        let numbers = [
            ["--hidden", self.hidden],
            ["--intermediate", self.intermediate],
            ["--layers", &layers],
            ["--kv-heads", &kv_heads],
            ["--head-dim", &head_dim],
        ];
        model(&[&shape[..], numbers.as_flattened()].concat())
    }

    /// Returns the milliseconds of a read of the prompt's blocks by kvx alone, between two
    /// processes like the engines.
    fn bare_transfer(&self, backend: &str) -> f64 {
        // Keys and values have two bytes each.
        let block = 2 * 2 * BLOCK * self.kv_heads * self.head_dim;
        let count = self.layers * PROMPT.div_ceil(BLOCK);
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvx"));
        command.args(["bench", "--json", "--op", "read", "--backend", backend]);
        command.args(["--block", &block.to_string(), "--count", &count.to_string()]);
        let output = kvx_testkit::output(&mut command, LIMIT);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let figures: Value = serde_json::from_slice(&output.stdout).expect("one line of JSON");
        figures["p50_us"].as_f64().expect("a figure") / 1e3
    }
}

fn main() {
    let test = std::env::args().any(|argument| argument == "--test");
    let (shape, rounds) = if test { (SMALL, 1) } else { (NARROW, 3) };
    println!("{}", json!({"what": "demo", "first_answer_s": demo().as_secs_f64()}));
    let model = shape.folder();
    let single = Server::start(&model, ServerArgs { arguments: POOL, ..ServerArgs::default() });
    for (seed, backend) in [(0, "SHM"), (100, "TCP")] {
        let prefill = Server::with_peers(&model, backend, "fail", POOL);
        let decode = Server::with_peers(&model, backend, "fail", POOL);
        apart(&prefill, &decode, &json!("they meet")); // the handshake is not part of the target
        let router = Server::proxy(&[&prefill], &[&decode], &[]);
        println!(
            "{}",
            short(backend, [&single, &router], seed + 1000..seed + 1000 + rounds * SHORT_ROUNDS)
        );
        // Alone, prefill, transfer, bare transfer, step, first token apart, and the rest of the
        // latter.
        let mut figures: [Vec<f64>; 7] = Default::default();
        for round in seed..seed + rounds {
            let before = decode.metric(TRANSFERRED);
            // Each round uses prompts that no cache has.
            let (leg, first, step) = apart(&prefill, &decode, &prompt(round * 2, PROMPT));
            let moved = (decode.metric(TRANSFERRED) - before) * 1e3;
            let bare = shape.bare_transfer(backend);
            let (alone, _) = stream(&single, &prompt(round * 2 + 1, PROMPT), None);
            let beyond = first - leg - TRANSFER * bare - step;
            for (figure, value) in
                figures.iter_mut().zip([alone, leg, moved, bare, step, first, beyond])
            {
                figure.push(value);
            }
        }
        let [alone, prefill, transfer, bare, step, first, beyond] = figures.map(median);
        println!(
            "{}",
            json!({
                "what": "first token", "backend": backend, "tokens": PROMPT, "alone_ms": alone, "prefill_ms": prefill,
                "transfer_ms": transfer, "bare_transfer_ms": bare, "step_ms": step, "apart_ms": first,
                "beyond_ms": beyond,
            })
        );
    }
    std::fs::remove_dir_all(model).unwrap();
}

/// Measures the first token of short prompts, from a single server and through a router. Each
/// request follows the one before at once: only then can sockets wait for acknowledgements.
fn short(backend: &str, servers: [&Server; 2], seeds: Range<u64>) -> Value {
    let [alone, apart] = servers.map(|server| {
        median(seeds.clone().map(|seed| stream(server, &prompt(seed, SHORT), None).0).collect())
    });
    json!({
        "what": "first token", "backend": backend, "tokens": SHORT, "alone_ms": alone, "apart_ms": apart,
        "beyond_ms": apart - alone,
    })
}

/// Returns the time of `kvx demo` from its start to the end of its first answer.
fn demo() -> Duration {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvx"));
    command
        .args(["demo", "--json", "--backend", "SHM"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped());
    let begun = Instant::now();
    let mut demo = command.spawn().expect("kvx starts");
    kvx_testkit::kill_after(&demo, LIMIT * 2);
    let mut lines =
        BufReader::new(demo.stdout.take().expect("it is piped")).lines().map_while(Result::ok);
    let is_equal_answer = |line: String| {
        let event: Value = serde_json::from_str(&line).expect("a line is JSON");
        event["event"] == "answer" && event["equal"] == true
    };
    assert!(lines.any(is_equal_answer), "no answer is equal");
    let took = begun.elapsed();
    lines.for_each(drop);
    assert!(demo.wait().expect("it is a child").success());
    took
}

/// Returns a prompt that begins with the digits of its seed, so that no two share a block.
fn prompt(seed: u64, tokens: u64) -> Value {
    let digits = [1, 90, 90 * 90].map(|place| seed / place);
    let rest = (digits.len() as u64..tokens).map(|at| seed + at * 17);
    json!(digits.into_iter().chain(rest).map(|token| 32 + token % 90).collect::<Vec<_>>())
}

/// Returns the milliseconds of the prefill's leg, until the first token by both legs, and of a step
/// of the decode.
fn apart(prefill: &Server, decode: &Server, prompt: &Value) -> (f64, f64, f64) {
    let begun = Instant::now();
    let answer = prefill.tokens(prompt, 1, Some(&json!({"do_remote_decode": true})));
    let leg = millis(begun.elapsed());
    let (first, step) = stream(decode, prompt, Some(&answer["kv_transfer_params"]));
    (leg, leg + first, step)
}

/// Returns the milliseconds until the first token, and between those that follow.
fn stream(server: &Server, prompt: &Value, params: Option<&Value>) -> (f64, f64) {
    let mut body = greedy(prompt, 16);
    body["stream"] = true.into();
    body["kv_transfer_params"] = json!(params);
    let begun = Instant::now();
    let answer = BufReader::new(server.send("POST", "/v1/completions", Some(&body)));
    let events = answer.lines().map_while(Result::ok).filter(|line| line.starts_with("data: {"));
    let times: Vec<f64> = events.map(|_| millis(begun.elapsed())).collect();
    assert_eq!(times.len(), 16, "an answer of 16 tokens");
    let steps = times.windows(2).map(|pair| pair[1] - pair[0]).collect();
    (times[0], median(steps))
}

fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
