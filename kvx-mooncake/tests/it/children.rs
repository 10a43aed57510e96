//! Tests that child processes do not inherit the engine's sockets, so that a socket that the engine
//! closes is closed.

use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use kvx_core::{Agent, Grid, Memory, Options, Plan};
use kvx_testkit::test;

use crate::adapter;

const CUT_OFF: Duration = Duration::from_secs(10);

#[test(own_process)]
fn children_inherit_no_socket_of_the_engine() {
    if adapter::or_skip("children_inherit_no_socket_of_the_engine").is_none() {
        return;
    }
    let agent = |name: &str| {
        let options = Options::parse(r#"{"mooncake_protocol": "tcp"}"#).unwrap();
        let builder = Agent::builder(name).backends(["MOONCAKE"]).options(options);
        builder.registry(adapter::registry("")).build().unwrap()
    };
    let inherited = sockets_of_a_child();
    let (decode, prefill) = (agent("decode"), agent("prefill"));
    let _theirs = prefill.register("kv", Arc::new(Memory::owned(vec![7; 8192]))).unwrap();
    let ours = decode.register("kv", Arc::new(Memory::owned(vec![0; 8192]))).unwrap();
    let peer = decode.connect(prefill.metadata().unwrap()).unwrap();
    peer.ready(CUT_OFF).wait_blocking(CUT_OFF).unwrap();
    let grid = Grid::packed(4096, 2);
    let remote = peer.region("kv").unwrap().grid(grid).unwrap().blocks([1]);
    let plan = Plan::read(ours.grid(grid).unwrap().blocks([0]), remote).unwrap();
    peer.transfer(&plan).deadline(CUT_OFF).post().unwrap().wait_blocking(CUT_OFF).unwrap();
    // Both engines listen, and the connection that moved the block stays open.
    let own = std::fs::read_dir("/proc/self/fd")
        .unwrap()
        .filter_map(|entry| entry.unwrap().path().read_link().ok());
    let own = own.filter(|target| target.to_string_lossy().starts_with("socket:")).count();
    assert!(own >= 6, "four listeners and both ends of a connection, and there are {own} sockets");
    assert_eq!(sockets_of_a_child(), inherited, "a child has what the engines have open");
    decode.shutdown(CUT_OFF).wait_blocking(CUT_OFF).unwrap();
    prefill.shutdown(CUT_OFF).wait_blocking(CUT_OFF).unwrap();
}

/// Returns the sockets of a newly started process: this one may itself have inherited some.
fn sockets_of_a_child() -> Vec<String> {
    let mut child = Command::new("ls");
    let output = kvx_testkit::output(child.args(["-l", "/proc/self/fd"]), CUT_OFF);
    let listed = String::from_utf8(output.stdout).unwrap();
    assert!(listed.contains("/dev/null"), "the child lists its files: {listed}");
    listed
        .lines()
        .filter_map(|line| line.split_once("socket:"))
        .map(|(_, number)| number.to_owned())
        .collect()
}
