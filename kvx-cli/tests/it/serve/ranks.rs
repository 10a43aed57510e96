//! Tests of ranks of a model in separate processes, which start and end with their server.

use std::time::{Duration, Instant};

use kvx_testkit::test;
use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use serde_json::json;

use crate::serve::assert_same;
use crate::serve::server::{LIMIT, Server, ServerArgs, model, prompt};

const RANKS: &[&str] = &["--tensor-parallel-size", "2"];

fn assert_gone(ranks: &[Pid]) {
    let until = Instant::now() + LIMIT;
    // The process that adopts them must also reap them.
    let is_there = |pid: &Pid| {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero()))
            .unwrap_or_default();
        test_kill_process(*pid).is_ok() && !stat.contains(") Z ")
    };
    while ranks.iter().any(is_there) {
        assert!(Instant::now() < until, "{ranks:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Waits until the server reports that it cannot serve.
fn assert_unwell(server: &Server) {
    let until = Instant::now() + LIMIT;
    while server.get("/health").0 != 503 {
        assert!(Instant::now() < until, "the server does not notice");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn ranks_are_processes_that_end_with_their_server() {
    let model = model(&["--arch", "llama"]);
    let arguments = ["--tensor-parallel-size", "4"];
    let alone =
        || Server::start(&model, ServerArgs { arguments: &arguments, ..ServerArgs::default() });
    let peer = || Server::with_peers(&model, "TCP", "fail", &arguments);
    for server in [alone(), peer()] {
        let ranks = server.ranks();
        assert_eq!(ranks.len(), 3);
        server.signal(Signal::INT);
        let (status, said) = server.ended();
        assert!(
            status.success() && !said.contains("is killed") && !said.contains("ERROR"),
            "{said}"
        );
        assert!(
            ranks.iter().all(|rank| test_kill_process(*rank).is_err()),
            "they end before it: {ranks:?}"
        );
    }
    for server in [alone(), peer()] {
        let ranks = server.ranks();
        server.signal(Signal::KILL);
        assert_gone(&ranks);
    }
}

#[test]
fn a_killed_rank_ends_its_engine_with_a_reason() {
    let server = Server::start(
        &model(&["--arch", "llama"]),
        ServerArgs { arguments: RANKS, ..ServerArgs::default() },
    );
    let [rank] = server.ranks()[..] else { panic!("{:?}", server.ranks()) };
    let body = json!({"prompt": "long", "max_tokens": 4000, "temperature": 0, "ignore_eos": true});
    let answer = std::thread::scope(|scope| {
        let asked = scope.spawn(|| server.post("/v1/completions", &body));
        server.until("vllm:num_requests_running", LIMIT, |running| running == 1.0);
        kill_process(rank, Signal::KILL).unwrap();
        asked.join().unwrap()
    });
    assert_eq!(answer.0, 500, "{}", answer.1);
    assert_unwell(&server);
    server.signal(Signal::INT);
    let (status, said) = server.ended();
    assert!(!status.success() && said.contains("rank 1 of the model"), "{said}");
}

#[test]
fn a_killed_rank_of_a_prefill_or_a_decode_costs_its_server_alone() {
    let model = model(&["--arch", "llama"]);
    let single = Server::start(&model, ServerArgs::default());
    let engine = || Server::with_peers(&model, "SHM", "recompute", RANKS);
    let (prefill, first, second) = (engine(), engine(), engine());
    let answers = |decode: &Server, from: u64| {
        let (prompt, mut published) =
            (prompt(from, 60), crate::serve::server::completion(&prompt(from, 60), 1));
        published["kv_transfer_params"] = json!({"do_remote_decode": true});
        let (status, answer) = prefill.post("/v1/completions", &published);
        let params = (status == 200).then(|| answer["kv_transfer_params"].clone());
        let answer = decode.tokens(&prompt, 6, params.as_ref());
        assert_same(&answer, &single.tokens(&prompt, 6, None), from);
    };
    answers(&first, 1);
    // The server is idle at the time, and still notices the loss.
    kill_process(first.ranks()[0], Signal::KILL).unwrap();
    assert_unwell(&first);
    answers(&second, 2);
    prefill.keeps_nothing(Duration::from_secs(8));
    kill_process(prefill.ranks()[0], Signal::KILL).unwrap();
    assert_unwell(&prefill);
    // The decode continues with the blocks that it has.
    answers(&second, 3);
}
