//! The engine's log does not fill the program's: what its errors say is there, and everything where the environment
//! asks for it.

#![allow(clippy::unwrap_used, reason = "a test's unwrap is its assertion")]

mod adapter;

use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use kvx_core::{Agent, Grid, Kind, Memory, MemoryKind, Options, Plan};

const CUT_OFF: Duration = Duration::from_secs(10);
/// Set in the process whose output is looked at.
const CHILD: &str = "KVX_TEST_CHILD";
const BLOCK: usize = 4096;

/// What the test `name` writes to standard error in a process of its own, in which this is the environment's word on
/// logging.
fn said(name: &str, logging: &[(&str, &str)]) -> String {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([name, "--exact", "--nocapture"]).env(CHILD, "1");
    for (variable, _) in std::env::vars_os() {
        let text = variable.to_string_lossy();
        if text.starts_with("GLOG_") || text.starts_with("MC_LOG_") {
            command.env_remove(&variable);
        }
    }
    let output = kvx_testkit::output(command.envs(logging.iter().copied()), 6 * CUT_OFF);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    String::from_utf8(output.stderr).unwrap()
}

fn is_child() -> bool {
    std::env::var_os(CHILD).is_some()
}

fn is_there(test: &str) -> bool {
    adapter::or_skip(test).is_some()
}

fn tcp() -> Options {
    Options::parse(r#"{"mooncake_protocol": "tcp"}"#).unwrap()
}

#[test]
fn whoever_looks_for_backends_reads_nothing_of_the_engines_log() {
    const TEST: &str = "whoever_looks_for_backends_reads_nothing_of_the_engines_log";
    if !is_there(TEST) {
        return;
    }
    if is_child() {
        adapter::registry("").require("MOONCAKE", &tcp()).unwrap();
        return;
    }
    assert_eq!(said(TEST, &[]), "");
    for asks in [("MC_LOG_LEVEL", "INFO"), ("GLOG_minloglevel", "0")] {
        let said = said(TEST, &[asks]);
        assert!(said.contains("listening on"), "with {asks:?}: {said}");
    }
}

#[test]
fn errors_of_the_engine_are_seen() {
    const TEST: &str = "errors_of_the_engine_are_seen";
    if !is_there(TEST) {
        return;
    }
    if !is_child() {
        let said = said(TEST, &[]);
        assert!(said.contains("rejected by server"), "{said}");
        return assert!(!said.contains("listening on"), "{said}");
    }
    let agent =
        |name: &str| Agent::builder(name).backends(["MOONCAKE"]).options(tcp()).build(&adapter::registry(""));
    let (decode, prefill) = (agent("decode").unwrap(), agent("prefill").unwrap());
    let ours = decode.register("kv", Arc::new(Memory::owned(vec![0; BLOCK]))).unwrap();
    let peer = decode.connect_foreign("MOONCAKE", prefill.foreign_metadata("MOONCAKE").unwrap()).unwrap();
    peer.ready(CUT_OFF).wait(CUT_OFF).unwrap();
    let (grid, unregistered) = (Grid::packed(BLOCK as u64, 1), vec![0; BLOCK]);
    let there =
        peer.foreign(unregistered.as_ptr() as u64, BLOCK as u64, MemoryKind::Host, 0).unwrap().grid(grid);
    let plan = Plan::read(ours.grid(grid).unwrap().blocks([0]), there.unwrap().blocks([0])).unwrap();
    let error = peer.transfer(&plan).deadline(CUT_OFF).post().unwrap().wait(CUT_OFF).unwrap_err();
    assert_eq!(error.kind(), Kind::Native, "{error}");
    for agent in [decode, prefill] {
        agent.shutdown(CUT_OFF).wait(CUT_OFF).unwrap();
    }
}
