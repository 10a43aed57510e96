//! Tests that the engine's log does not flood the program's: only its errors appear, and everything
//! if the environment asks for it.

use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use kvx_core::{Agent, ErrorKind, Grid, Memory, MemoryKind, Options, Plan};
use kvx_testkit::test;

use crate::adapter;

const CUT_OFF: Duration = Duration::from_secs(10);
/// Set in the process whose output is tested, to what it does.
const DOES: &str = "KVX_MOONCAKE_TEST_DOES";
const LOOKS_FOR_BACKENDS: &str = "looks for backends";
const MEETS_AN_ERROR: &str = "meets an error";
const BLOCK: usize = 4096;

/// Runs the process whose output is tested, if this process was started for that.
pub(crate) fn play_if_asked() {
    let Ok(does) = std::env::var(DOES) else { return };
    match does.as_str() {
        LOOKS_FOR_BACKENDS => _ = adapter::registry("").require("MOONCAKE", &tcp()).unwrap(),
        MEETS_AN_ERROR => meet_an_error(),
        other => panic!("{DOES}={other}"),
    }
    std::process::exit(0);
}

/// Returns what a process that does this writes to standard error, with these variables for
/// logging.
fn said(does: &str, logging: &[(&str, &str)]) -> String {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.env(DOES, does);
    for (variable, _) in std::env::vars_os() {
        let text = variable.to_string_lossy();
        if text.starts_with("GLOG_") || text.starts_with("MC_LOG_") {
            command.env_remove(&variable);
        }
    }
    let output = kvx_testkit::output(command.envs(logging.iter().copied()), 6 * CUT_OFF);
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{said}");
    said
}

fn is_there(test: &str) -> bool {
    adapter::or_skip(test).is_some()
}

fn tcp() -> Options {
    Options::parse(r#"{"mooncake_protocol": "tcp"}"#).unwrap()
}

#[test]
fn listing_backends_prints_nothing_of_the_engines_log() {
    const TEST: &str = "listing_backends_prints_nothing_of_the_engines_log";
    if !is_there(TEST) {
        return;
    }
    assert_eq!(said(LOOKS_FOR_BACKENDS, &[]), "");
    for asks in [("MC_LOG_LEVEL", "INFO"), ("GLOG_minloglevel", "0")] {
        let said = said(LOOKS_FOR_BACKENDS, &[asks]);
        assert!(said.contains("listening on"), "with {asks:?}: {said}");
    }
}

#[test]
fn errors_of_the_engine_are_seen() {
    const TEST: &str = "errors_of_the_engine_are_seen";
    if !is_there(TEST) {
        return;
    }
    let said = said(MEETS_AN_ERROR, &[]);
    assert!(said.contains("rejected by server"), "{said}");
    assert!(!said.contains("listening on"), "{said}");
}

fn meet_an_error() {
    let agent = |name: &str| {
        Agent::builder(name)
            .backends(["MOONCAKE"])
            .options(tcp())
            .registry(adapter::registry(""))
            .build()
    };
    let (decode, prefill) = (agent("decode").unwrap(), agent("prefill").unwrap());
    let ours = decode.register("kv", Arc::new(Memory::owned(vec![0; BLOCK]))).unwrap();
    let peer =
        decode.connect_foreign("MOONCAKE", prefill.foreign_metadata("MOONCAKE").unwrap()).unwrap();
    peer.ready(CUT_OFF).wait_blocking(CUT_OFF).unwrap();
    let (grid, unregistered) = (Grid::packed(BLOCK as u64, 1), vec![0; BLOCK]);
    let there = peer
        .foreign(unregistered.as_ptr() as u64, BLOCK as u64, MemoryKind::Host, 0)
        .unwrap()
        .grid(grid);
    let plan =
        Plan::read(ours.grid(grid).unwrap().blocks([0]), there.unwrap().blocks([0])).unwrap();
    let error =
        peer.transfer(&plan).deadline(CUT_OFF).post().unwrap().wait_blocking(CUT_OFF).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Native, "{error}");
    for agent in [decode, prefill] {
        agent.shutdown(CUT_OFF).wait_blocking(CUT_OFF).unwrap();
    }
}
