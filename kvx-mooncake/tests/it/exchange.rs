//! Two agents that find each other through a metadata server and move blocks.

use std::sync::Arc;
use std::time::Duration;

use kvx_core::{Agent, Grid, Memory, Options, Plan};

use crate::adapter;

pub(crate) const CUT_OFF: Duration = Duration::from_secs(10);

/// Runs `meanwhile` while both are open.
pub(crate) fn by_way_of(server: &str, meanwhile: impl FnOnce()) {
    let agent = |name: &str| {
        let mut options = Options::new();
        options.set("mooncake", "metadata", server.to_owned()).set(
            "mooncake",
            "mooncake_protocol",
            "tcp",
        );
        let builder =
            Agent::builder(format!("{name}-{}", std::process::id())).backends(["MOONCAKE"]);
        builder.options(options).registry(adapter::registry("")).build().unwrap()
    };
    let (decode, prefill) = (agent("decode"), agent("prefill"));
    meanwhile();
    let grid = Grid::packed(4096, 16);
    let theirs = prefill.register("kv", Arc::new(Memory::owned(vec![7; 65536]))).unwrap();
    let ours = decode.register("kv", Arc::new(Memory::owned(vec![0; 65536]))).unwrap();
    let peer = decode.connect(prefill.metadata().unwrap()).unwrap();
    peer.ready(CUT_OFF).wait_blocking(CUT_OFF).unwrap();
    let remote = peer.region("kv").unwrap().grid(grid).unwrap();
    let plan = Plan::read(ours.grid(grid).unwrap().blocks([3, 1]), remote.blocks([2, 9])).unwrap();
    let transfer = peer.transfer(&plan).deadline(CUT_OFF).notify(*b"read").post().unwrap();
    assert_eq!(transfer.wait_blocking(CUT_OFF).unwrap().bytes, 8192);
    assert_eq!(&*prefill.notification(CUT_OFF).join().unwrap().bytes, b"read");
    let mut bytes = vec![0; 65536];
    ours.copy_out(0, &mut bytes).unwrap();
    assert!(
        bytes
            .iter()
            .enumerate()
            .all(|(at, byte)| *byte == if matches!(at / 4096, 1 | 3) { 7 } else { 0 })
    );
    drop(theirs);
    decode.shutdown(CUT_OFF).wait_blocking(CUT_OFF).unwrap();
    prefill.shutdown(CUT_OFF).wait_blocking(CUT_OFF).unwrap();
}
