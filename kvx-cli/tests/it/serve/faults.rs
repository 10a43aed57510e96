//! Faults of a fleet behind `kvx proxy`: the client receives the right answer or a clear error in
//! time, no block is kept beyond its lease, and the next answer is right.

use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use kvx_testkit::test;
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::serve::assert_same;
use crate::serve::server::{LIMIT, Server, ServerArgs, completion, greedy, model, prompt};
use crate::serve::transfers::published;

/// The duration of a lease, and the timeout of a load.
const LEASE: Duration = Duration::from_secs(2);
/// The longest time that a block is kept beyond its lease.
const BEYOND: Duration = Duration::from_secs(2);
/// The time within which there is an answer or an error: the timeout of a load, and this margin.
const IN_TIME: Duration = LEASE.saturating_add(BEYOND);
/// Tokens of each prompt.
const PROMPT: u64 = 60;

/// Starts a server that may be a prefill or a decode.
fn engine(model: &Path, policy: &str) -> Server {
    let extra = json!({"backends": ["TCP"], "kv_lease_duration": LEASE.as_secs(), "load_timeout": LEASE.as_secs()});
    let fields = json!({"kv_load_failure_policy": policy, "kv_connector_extra_config": extra});
    Server::configured(model, "TCP", &fields, ServerArgs::default())
}

struct Fleet {
    single: Server,
    prefills: Vec<Server>,
    decode: Server,
    proxy: Server,
}

impl Fleet {
    /// Starts one decode that reports failures, and prefills that have all been connected with it.
    fn start(prefills: usize) -> Fleet {
        Fleet::of(prefills, &model(&["--arch", "llama"]), "fail", || ())
    }

    /// Starts a fleet whose decode reports failures or computes failed prompts, by `policy`. The
    /// decode starts after `between`.
    fn of(prefills: usize, folder: &Path, policy: &str, between: impl FnOnce()) -> Fleet {
        let single = Server::start(&model(&["--arch", "llama"]), ServerArgs::default());
        let prefills: Vec<Server> = (0..prefills).map(|_| engine(folder, policy)).collect();
        between();
        let decode = engine(folder, policy);
        let proxy = proxy(&prefills, &decode);
        let fleet = Fleet { single, prefills, decode, proxy };
        for at in 0..fleet.prefills.len() as u64 {
            fleet.serves(at);
        }
        fleet
    }

    /// Checks that the answer to a prompt equals a single server's.
    fn serves(&self, prompt: u64) {
        let prompt = self::prompt(prompt, PROMPT);
        assert_same(
            &self.proxy.tokens(&prompt, 6, None),
            &self.single.tokens(&prompt, 6, None),
            "a request",
        );
    }

    /// Checks the same for a server without the proxy.
    fn serves_alone(&self, server: &Server) {
        let prompt = prompt(21, PROMPT);
        assert_same(
            &server.tokens(&prompt, 6, None),
            &self.single.tokens(&prompt, 6, None),
            "alone",
        );
    }

    /// Stops the decode while `ask` requests prompt 9, until its prefill has answered the proxy.
    /// Returns the prefill that has its blocks, and the result of `ask`.
    fn published<T>(&self, ask: impl FnOnce() -> T) -> (&Server, T) {
        self.decode.stop();
        let before = self.proxy.metric("kvx_proxy_legs_total");
        let asked = ask();
        self.proxy.until("kvx_proxy_legs_total", LIMIT, |legs| legs > before);
        let keeps = |server: &&Server| server.metric("kvx_blocks_kept") > 0.0;
        (self.prefills.iter().find(keeps).expect("a prefill keeps blocks"), asked)
    }

    /// Returns the answer to prompt 9, with a fault after its prefill. It arrives in time.
    fn asked(&self, fault: impl FnOnce(&Server)) -> (u16, Value) {
        std::thread::scope(|scope| {
            let ask = || scope.spawn(|| self.proxy.post("/v1/completions", &body(9)));
            let (prefill, asked) = self.published(ask);
            let begun = Instant::now();
            fault(prefill);
            let answer = asked.join().expect("an answer");
            assert!(begun.elapsed() < IN_TIME, "{:?}", begun.elapsed());
            answer
        })
    }

    /// Checks that this is the right answer to prompt 9, or a clear error.
    fn assert_right_or_clear(&self, (status, answer): &(u16, Value)) {
        match status {
            200 => assert_same(
                answer,
                &self.single.tokens(&prompt(9, PROMPT), 6, None),
                "in spite of the fault",
            ),
            500..600 => assert!(
                answer["error"]["message"].as_str().is_some_and(|words| !words.is_empty()),
                "{status}: {answer}"
            ),
            _ => panic!("neither an answer nor an error: {status}: {answer}"),
        }
    }

    /// Checks that the living servers keep no block beyond its lease, and that the next answer is
    /// right.
    fn assert_recovers(&self, living: &[&Server]) {
        for server in living {
            server.keeps_nothing(LEASE + BEYOND);
        }
        self.serves(20);
    }
}

fn proxy(prefills: &[Server], decode: &Server) -> Server {
    let prefills: Vec<&Server> = prefills.iter().collect();
    Server::proxy(&prefills, &[decode], &["--choice", "round-robin"])
}

fn body(from: u64) -> Value {
    completion(&prompt(from, PROMPT), 6)
}

/// Reads up to `bytes` bytes of a streamed answer.
fn read(stream: &mut impl std::io::Read, bytes: u64) -> String {
    let mut text = Vec::new();
    // An error: the stream was broken off, which some tests expect.
    let _ = stream.take(bytes).read_to_end(&mut text);
    String::from_utf8_lossy(&text).into_owned()
}

fn streamed(from: u64, tokens: usize) -> Value {
    let mut body = greedy(&prompt(from, PROMPT), tokens);
    body["stream"] = true.into();
    body
}

#[test]
fn a_prefill_that_is_killed_before_its_blocks_are_fetched() {
    let fleet = Fleet::start(2);
    let answer = fleet.asked(|prefill| {
        prefill.signal(Signal::KILL);
        fleet.decode.signal(Signal::CONT);
    });
    fleet.assert_right_or_clear(&answer);
    fleet.assert_recovers(&[&fleet.decode]);
}

#[test]
fn a_prefill_that_is_killed_while_its_blocks_are_fetched() {
    let fleet = Fleet::start(2);
    let answer = fleet.asked(|prefill| {
        prefill.stop();
        fleet.decode.signal(Signal::CONT);
        fleet.decode.until("vllm:num_requests_waiting", LIMIT, |waiting| waiting == 1.0);
        prefill.signal(Signal::KILL);
    });
    fleet.assert_right_or_clear(&answer);
    fleet.assert_recovers(&[&fleet.decode]);
}

/// The proxy does not retry with another prefill: the decode reports the failure in time, or
/// computes the missing blocks.
#[test]
fn the_only_prefill_is_killed_or_stands_still_while_its_blocks_are_fetched() {
    let model = model(&["--arch", "llama"]);
    for (policy, status) in [("fail", 500), ("recompute", 200)] {
        for signal in [Signal::KILL, Signal::STOP] {
            let fleet = Fleet::of(1, &model, policy, || ());
            let prefill = &fleet.prefills[0];
            let mut body = body(9);
            body["kv_transfer_params"] = published(prefill, &prompt(9, PROMPT));
            prefill.stop();
            let begun = Instant::now();
            let answer = std::thread::scope(|scope| {
                let asked = scope.spawn(|| fleet.decode.post("/v1/completions", &body));
                while fleet.decode.metric("vllm:num_requests_waiting") != 1.0 {
                    assert!(
                        !asked.is_finished(),
                        "answered before the first poll: {:?}",
                        asked.join()
                    );
                }
                prefill.signal(signal);
                asked.join().expect("an answer")
            });
            assert!(begun.elapsed() < IN_TIME, "{:?}", begun.elapsed());
            assert_eq!(answer.0, status, "{policy}");
            fleet.assert_right_or_clear(&answer);
            if signal == Signal::STOP {
                prefill.signal(Signal::CONT);
                fleet.assert_recovers(&[prefill, &fleet.decode]);
            } else {
                fleet.serves_alone(&fleet.decode);
            }
        }
    }
}

#[test]
fn a_prefill_that_is_killed_after_its_blocks_were_fetched() {
    let fleet = Fleet::start(2);
    let mut stream = fleet.proxy.send("POST", "/v1/completions", Some(&streamed(9, 200)));
    let begin = read(&mut stream, 600);
    assert!(begin.contains("token_ids"), "{begin}");
    // The prefill with one more success has served this request.
    let served = fleet.prefills.iter().max_by(|one, other| {
        let served = |server: &Server| server.metric("vllm:request_success_total");
        served(one).total_cmp(&served(other))
    });
    served.unwrap().signal(Signal::KILL);
    let text = begin + &read(&mut stream, u64::MAX);
    assert!(text.contains("data: [DONE]"), "{text}");
    let right = fleet.single.events("/v1/completions", &streamed(9, 200));
    let told = tokens(text.lines().filter_map(|line| line.strip_prefix("data: {")));
    assert_eq!(told, right.iter().flat_map(token_ids).collect::<Vec<_>>());
    fleet.assert_recovers(&[&fleet.decode]);
}

fn token_ids(event: &Value) -> Vec<u64> {
    let ids = event["choices"][0]["token_ids"].as_array().into_iter().flatten();
    ids.filter_map(Value::as_u64).collect()
}

fn tokens<'a>(events: impl Iterator<Item = &'a str>) -> Vec<u64> {
    events
        .flat_map(|event| token_ids(&serde_json::from_str(&format!("{{{event}")).unwrap()))
        .collect()
}

#[test]
fn a_decode_that_is_killed_leaves_no_block_leased() {
    let mut fleet = Fleet::start(1);
    let answer = fleet.asked(|_| fleet.decode.signal(Signal::KILL));
    assert!(answer.0 >= 500, "{}", answer.0);
    fleet.assert_right_or_clear(&answer);
    fleet.prefills[0].keeps_nothing(LEASE + BEYOND);
    // Another decode replaces it.
    fleet.decode = engine(&model(&["--arch", "llama"]), "fail");
    fleet.proxy = proxy(&fleet.prefills, &fleet.decode);
    fleet.serves(20);
}

#[test]
fn a_decode_that_is_killed_in_its_answer_breaks_it_off() {
    let fleet = Fleet::start(1);
    let mut stream = fleet.proxy.send("POST", "/v1/completions", Some(&streamed(9, 1500)));
    let begin = read(&mut stream, 600);
    assert!(begin.contains("token_ids"), "{begin}");
    fleet.decode.signal(Signal::KILL);
    let begun = Instant::now();
    let rest = read(&mut stream, u64::MAX);
    assert!(
        begun.elapsed() < LIMIT / 2 && !rest.contains("\"finish_reason\":\"length\""),
        "{rest}"
    );
    fleet.prefills[0].keeps_nothing(LEASE + BEYOND);
}

#[test]
fn a_proxy_that_is_restarted_leaves_no_block_and_the_next_one_serves() {
    let mut fleet = Fleet::start(1);
    let ask = || fleet.proxy.send("POST", "/v1/completions", Some(&body(9)));
    let (_, mut client) = fleet.published(ask);
    fleet.proxy.signal(Signal::KILL);
    fleet.decode.signal(Signal::CONT);
    assert_eq!(read(&mut client, u64::MAX), "", "the client's connection is closed");
    fleet.proxy = proxy(&fleet.prefills, &fleet.decode);
    fleet.assert_recovers(&[&fleet.prefills[0], &fleet.decode]);
}

#[test]
fn a_client_that_goes_while_its_blocks_are_fetched_leaves_none() {
    let fleet = Fleet::start(1);
    let ask = || fleet.proxy.send("POST", "/v1/completions", Some(&body(9)));
    let (prefill, client) = fleet.published(ask);
    prefill.stop();
    fleet.decode.signal(Signal::CONT);
    fleet.decode.until("vllm:num_requests_waiting", LIMIT, |waiting| waiting == 1.0);
    drop(client);
    prefill.signal(Signal::CONT);
    fleet.decode.until("vllm:num_requests_waiting", LEASE + BEYOND, |waiting| waiting == 0.0);
    fleet.assert_recovers(&[&fleet.prefills[0], &fleet.decode]);
}

#[test]
fn a_model_whose_disk_is_gone_ends_its_server_alone() {
    let model = model(&["--arch", "llama"]);
    let folder = copied(&model, "disk");
    // Each side has the weights on a separate disk, but peers must be started with the same path.
    let disk = || {
        let weights = folder.join("model.safetensors");
        std::fs::remove_file(&weights).unwrap();
        std::fs::copy(model.join("model.safetensors"), &weights).unwrap();
        File::options().write(true).open(weights).unwrap()
    };
    // The mapped files can no longer be read.
    let gone = |disk: &File| disk.set_len(0).unwrap();

    let of_prefill = disk();
    let fleet = Fleet::of(1, &folder, "fail", || drop(disk()));
    gone(&of_prefill);
    let answer = fleet.proxy.post("/v1/completions", &body(9));
    assert!(answer.0 >= 500, "{}", answer.0);
    fleet.assert_right_or_clear(&answer);
    fleet.decode.keeps_nothing(LEASE + BEYOND);
    fleet.serves_alone(&fleet.decode);

    drop(disk());
    let mut of_decode = None;
    let fleet = Fleet::of(1, &folder, "fail", || of_decode = Some(disk()));
    let answer = fleet.asked(|_| {
        of_decode.iter().for_each(gone);
        fleet.decode.signal(Signal::CONT);
    });
    assert!(answer.0 >= 500, "{}", answer.0);
    fleet.assert_right_or_clear(&answer);
    fleet.prefills[0].keeps_nothing(LEASE + BEYOND);
    fleet.serves_alone(&fleet.prefills[0]);
}

/// Copies a model's folder, so that a test may corrupt it.
fn copied(model: &Path, name: &str) -> PathBuf {
    let copy = model.with_extension(name);
    std::fs::create_dir_all(&copy).unwrap();
    for entry in std::fs::read_dir(model).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), copy.join(entry.file_name())).unwrap();
    }
    copy
}

#[test]
fn a_model_whose_folder_is_removed_is_served_on() {
    let model = model(&["--arch", "llama"]);
    let copy = copied(&model, "gone");
    let single = Server::start(&model, ServerArgs::default());
    let server = Server::start(
        &copy,
        ServerArgs { arguments: &["--tensor-parallel-size", "2"], ..ServerArgs::default() },
    );
    std::fs::remove_dir_all(&copy).unwrap();
    assert_same(
        &server.tokens(&prompt(1, PROMPT), 6, None),
        &single.tokens(&prompt(1, PROMPT), 6, None),
        "without its folder",
    );
}
