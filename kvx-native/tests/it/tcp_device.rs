//! Device memory over TCP with peers that do not read.

use crate::tcp_pair::raw::{BARE, READ, Raw, blocks, frame, fresh, key_of};
use crate::tcp_pair::{CUT_OFF, Pair, agent, agent_with, pattern};
use kvx_core::{Grid, Memory, MemoryKind, Plan};
use kvx_testkit::{TestDevice, test};

/// The number of lanes: more than the bounce buffers serve, with more bytes on each than the
/// sockets hold.
const STUCK: u8 = 40;
const LEN: usize = 64 << 20;

#[test]
fn peers_that_do_not_read_keep_no_bounce_buffers_from_others() {
    let device = TestDevice::new(MemoryKind::Cuda);
    let (owner, reader) = (agent_with("owner", BARE, None), agent("reader"));
    let memory = device.allocate(LEN);
    let bytes = pattern(LEN, 3);
    memory.copy_in(0, &bytes).unwrap();
    let _theirs = owner.register("kv", memory).unwrap();
    let ours = reader.register("kv", Memory::owned(vec![0; LEN])).unwrap();
    let (id, key) = key_of(&owner, "kv");
    let stuck: Vec<Raw> = (0..STUCK)
        .map(|_| {
            let mut raw = Raw::lane_of(&owner, fresh(), 1);
            for number in 1..3 {
                raw.send(&frame(READ, number, &blocks(id, key, LEN as u64, 1, &[0])));
            }
            raw
        })
        .collect();

    let peer = reader.connect(owner.metadata().unwrap()).unwrap();
    let grid = Grid::packed(LEN as u64, 1);
    let remote = peer.region("kv").unwrap().grid(grid).unwrap();
    let plan = Plan::read(ours.grid(grid).unwrap().blocks([0]), remote.blocks([0])).unwrap();
    peer.transfer(&plan).deadline(CUT_OFF).post().unwrap().wait_blocking(CUT_OFF).unwrap();
    assert!(Pair::all(&ours) == bytes);

    // A lane that reads later still gets its answer.
    let mut late = stuck.into_iter().next().unwrap();
    let (mut first, mut second) = (Vec::new(), Vec::new());
    while first.len() + second.len() < 2 * LEN {
        let (_, number, payload) = late.frame().unwrap();
        if number == 1 { first.extend(payload) } else { second.extend(payload) }
    }
    assert!(first == bytes && second == bytes);
    assert_eq!(device.counters().faults, 0);
}
