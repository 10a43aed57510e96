//! Tests kvx with NIXL's own Python agent, in both directions.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use kvx_core::{
    Agent, ErrorKind, Grid, Memory, MemoryKind, Op, Options, Peer, PeerRegion, Plan, Region, Report,
};
use kvx_testkit::{Child, hex, run, unhex};
use libtest_mimic::{Failed, Trial};
use serde_json::{Value, json};

use crate::python::Python;
use crate::{Outcome, registry, wheel, with_nixl};

const CUT_OFF: Duration = Duration::from_secs(10);
const BLOCK: u64 = 4096;
const BLOCKS: u32 = 8192;
const LEN: usize = BLOCK as usize * BLOCKS as usize;
/// Set in a process that serves until it is killed.
const SERVES: &str = "KVX_RIXL_TEST_SERVES";

fn agent(name: &str) -> Agent {
    agent_over("", name)
}

/// Opens an agent over these transports of UCX: `,TLS=tcp`; all if empty.
fn agent_over(tls: &str, name: &str) -> Agent {
    let options = json!({"rixl": {"params": {"engine_config": format!("NET_DEVICES=lo{tls}")}}});
    let options = Options::parse(&options.to_string()).expect("JSON");
    Agent::builder(name)
        .backends(["RIXL"])
        .options(options)
        .registry(registry(""))
        .build()
        .expect("NIXL is installed")
}

/// Returns the 8 bytes at an offset of a region that was filled with `seed`, as the Python side
/// computes them.
fn word(seed: u64, offset: u64) -> [u8; 8] {
    (offset / 8).wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(seed).to_le_bytes()
}

fn bytes(seed: u64, offset: u64, len: u64) -> Vec<u8> {
    (0..len / 8).flat_map(|at| word(seed, offset + at * 8)).collect()
}

fn filled(len: usize, seed: u64) -> Memory {
    Memory::owned(bytes(seed, 0, len as u64))
}

/// Returns all numbers below `count` in a random order.
fn shuffled(count: u32, mut seed: u64) -> Vec<u32> {
    let mut numbers: Vec<u32> = (0..count).collect();
    for at in (1..count as usize).rev() {
        seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        numbers.swap(at, (seed >> 33) as usize % (at + 1));
    }
    numbers
}

fn connect(agent: &Agent, python: &Python) -> Result<Peer, Failed> {
    let peer = agent.connect_foreign("RIXL", &python.metadata)?;
    peer.ready(CUT_OFF).wait_blocking(CUT_OFF)?;
    Ok(peer)
}

fn theirs(peer: &Peer, python: &Python, region: usize, len: usize) -> Result<PeerRegion, Failed> {
    Ok(peer.foreign(python.at[region], len as u64, MemoryKind::Host, 0)?)
}

#[allow(clippy::too_many_arguments)] // the two sides of a plan
fn moved(
    op: Op,
    peer: &Peer,
    (ours, our_grid, our_blocks): (&Region, Grid, &[u32]),
    (theirs, their_grid, their_blocks): (&PeerRegion, Grid, &[u32]),
    notify: Option<&[u8]>,
) -> Result<Report, Failed> {
    let (local, remote) =
        (ours.grid(our_grid)?.blocks(our_blocks), theirs.grid(their_grid)?.blocks(their_blocks));
    let plan = match op {
        Op::Read => Plan::read(local, remote)?,
        Op::Write => Plan::write(local, remote)?,
    };
    let mut posting = peer.transfer(&plan).deadline(CUT_OFF);
    if let Some(bytes) = notify {
        posting = posting.notify(bytes);
    }
    Ok(run(posting.post()?)?)
}

/// kvx reads and writes Python's memory, in lists of 1 to 8192 blocks, in several regions, and with
/// strides.
fn python_serves(interpreter: PathBuf) -> Outcome {
    let mut python = Python::start(&interpreter, "python-serves", &[LEN, LEN]);
    for region in 0..2 {
        python.ask(json!({"do": "fill", "region": region, "seed": 100 + region}));
    }
    let agent = agent("kvx-reads");
    let peer = connect(&agent, &python)?;
    let ours =
        [agent.register("a", Memory::owned(vec![0; LEN]))?, agent.register("b", filled(LEN, 7))?];
    let grid = Grid::packed(BLOCK, BLOCKS);
    for (round, count) in [1, 2, 64, 1000, 8192].into_iter().enumerate() {
        let region = round % 2;
        let remote = theirs(&peer, &python, region, LEN)?;
        let (to, from) = (shuffled(BLOCKS, round as u64), shuffled(BLOCKS, 50 + round as u64));
        let (to, from) = (&to[..count], &from[..count]);
        let report = moved(Op::Read, &peer, (&ours[0], grid, to), (&remote, grid, from), None)?;
        assert_eq!((report.bytes, report.blocks), (count as u64 * BLOCK, count as u64));
        for (to, from) in to.iter().zip(from) {
            let mut got = vec![0; BLOCK as usize];
            ours[0].copy_out(*to as usize * BLOCK as usize, &mut got)?;
            assert!(
                got == bytes(100 + region as u64, u64::from(*from) * BLOCK, BLOCK),
                "block {from} of {count}"
            );
        }
    }
    for (round, count) in [1, 8192].into_iter().enumerate() {
        let remote = theirs(&peer, &python, round, LEN)?;
        let (to, from) = (shuffled(BLOCKS, 90), shuffled(BLOCKS, 91));
        moved(
            Op::Write,
            &peer,
            (&ours[1], grid, &from[..count]),
            (&remote, grid, &to[..count]),
            None,
        )?;
        let at = |block: &u32| u64::from(*block) * BLOCK;
        let blocks: Vec<_> =
            to.iter().zip(&from).take(count).map(|(to, from)| (at(to), at(from), BLOCK)).collect();
        assert!(python.holds(round, 7, &blocks), "{count} blocks arrived");
    }
    // A slice of each block, as tensor parallelism reads it.
    python.ask(json!({"do": "fill", "region": 0, "seed": 5}));
    let remote = theirs(&peer, &python, 0, LEN)?;
    let slice = Grid { base: 2048, stride: BLOCK, length: 1024, count: 512 };
    let order = shuffled(512, 3);
    moved(
        Op::Read,
        &peer,
        (&ours[0], Grid::packed(1024, 512), &order),
        (&remote, slice, &order),
        None,
    )?;
    for block in order {
        let mut got = vec![0; 1024];
        ours[0].copy_out(block as usize * 1024, &mut got)?;
        assert!(got == bytes(5, u64::from(block) * BLOCK + 2048, 1024), "slice {block}");
    }
    two_regions_in_one_plan(&mut python, &peer, &ours)?;
    // NIXL rejects memory that Python has not registered, and the link stays usable.
    let beyond = peer.foreign(python.at[0] ^ 1 << 45, BLOCK, MemoryKind::Host, 0)?;
    let one = Grid::packed(BLOCK, 1);
    let plan = Plan::read(ours[0].grid(one)?.blocks(&[0][..]), beyond.grid(one)?.blocks(&[0][..]))?;
    let refused = run(peer.transfer(&plan).deadline(CUT_OFF).post()?);
    assert_eq!(refused.map(drop).map_err(|why| why.kind()), Err(ErrorKind::Native));
    moved(Op::Read, &peer, (&ours[0], one, &[0]), (&remote, one, &[0]), None)?;
    agent.shutdown(CUT_OFF).wait_blocking(CUT_OFF)?;
    Ok(())
}

/// One plan reads from both of Python's regions into both of kvx's.
fn two_regions_in_one_plan(python: &mut Python, peer: &Peer, ours: &[Region; 2]) -> Outcome {
    const HALF: usize = 300;
    let (grid, to, from) =
        (Grid::packed(BLOCK, BLOCKS), shuffled(BLOCKS, 60), shuffled(BLOCKS, 61));
    let halves = [0..HALF, HALF..2 * HALF];
    let mut pairs = Vec::new();
    for (region, half) in halves.iter().enumerate() {
        python.ask(json!({"do": "fill", "region": region, "seed": 70 + region}));
        ours[region].copy_in(0, &vec![0; LEN])?;
        let remote = theirs(peer, python, region, LEN)?;
        pairs.push((
            ours[region].grid(grid)?.blocks(&to[half.clone()]),
            remote.grid(grid)?.blocks(&from[half.clone()]),
        ));
    }
    let report = run(peer.transfer(&Plan::of(Op::Read, pairs)?).deadline(CUT_OFF).post()?)?;
    assert_eq!((report.bytes, report.blocks), (2 * HALF as u64 * BLOCK, 2 * HALF as u64));
    for (region, half) in halves.into_iter().enumerate() {
        for (to, from) in to[half.clone()].iter().zip(&from[half]) {
            let mut got = vec![0; BLOCK as usize];
            ours[region].copy_out(*to as usize * BLOCK as usize, &mut got)?;
            assert!(
                got == bytes(70 + region as u64, u64::from(*from) * BLOCK, BLOCK),
                "block {from} of {region}"
            );
        }
    }
    Ok(())
}

/// Python reads and writes kvx's memory.
fn kvx_serves(interpreter: PathBuf) -> Outcome {
    let agent = agent("kvx-serves");
    let ours =
        [agent.register("a", filled(LEN, 11))?, agent.register("b", Memory::owned(vec![0; LEN]))?];
    let mut python = Python::start(&interpreter, "python-reads", &[LEN]);
    let name = python.ask(json!({"do": "load", "metadata": hex(&agent.foreign_metadata("RIXL")?)}));
    let at = |region: &Region, block: u32| region.memory().address() + u64::from(block) * BLOCK;
    for count in [1, 64, 1000, 8192] {
        let (to, from) = (shuffled(BLOCKS, 1), shuffled(BLOCKS, 2));
        let local: Vec<u64> =
            to[..count].iter().map(|block| python.at[0] + u64::from(*block) * BLOCK).collect();
        let remote: Vec<u64> = from[..count].iter().map(|block| at(&ours[0], *block)).collect();
        let transfer = json!({"do": "transfer", "op": "READ", "peer": name["name"], "local": local, "remote": remote, "length": BLOCK});
        assert_eq!(python.ask(transfer)["state"], "DONE");
        let bytes = |block: &u32| u64::from(*block) * BLOCK;
        let blocks: Vec<_> = to
            .iter()
            .zip(&from)
            .take(count)
            .map(|(to, from)| (bytes(to), bytes(from), BLOCK))
            .collect();
        assert!(python.holds(0, 11, &blocks), "{count} blocks were read");
    }
    python.ask(json!({"do": "fill", "region": 0, "seed": 12}));
    let (to, from) = (shuffled(BLOCKS, 4), shuffled(BLOCKS, 5));
    let local: Vec<u64> =
        from.iter().map(|block| python.at[0] + u64::from(*block) * BLOCK).collect();
    let remote: Vec<u64> = to.iter().map(|block| at(&ours[1], *block)).collect();
    let transfer = json!({
        "do": "transfer", "op": "WRITE", "peer": name["name"], "local": local, "remote": remote, "length": BLOCK,
        "notify": hex(b"all\0written"),
    });
    assert_eq!(python.ask(transfer)["state"], "DONE");
    let notification = run(agent.notification(CUT_OFF))?;
    assert_eq!(
        (&*notification.bytes, &*notification.from.name),
        (&b"all\0written"[..], "python-reads")
    );
    for (to, from) in to.iter().zip(&from) {
        let mut got = vec![0; BLOCK as usize];
        ours[1].copy_out(*to as usize * BLOCK as usize, &mut got)?;
        assert!(got == bytes(12, u64::from(*from) * BLOCK, BLOCK), "block {to} was written");
    }
    strided_lists_move_slices(&mut python, &name["name"], &ours)?;
    // Python has the metadata of the memory, and its access cannot be revoked: the memory is not
    // released.
    let [published, _] = ours;
    assert_eq!(
        published.revoke(CUT_OFF).wait_blocking(CUT_OFF).map(drop).map_err(|why| why.kind()),
        Err(ErrorKind::StillShared)
    );
    Ok(())
}

/// Python's strided lists: a slice of each of kvx's blocks, read into a packed list and written
/// back to another place.
fn strided_lists_move_slices(python: &mut Python, name: &Value, ours: &[Region; 2]) -> Outcome {
    const SLICE: u64 = 1024;
    const SLICES: u32 = 4096;
    let packed = json!([python.at[0], SLICE, SLICES]);
    let order: Vec<(u32, u32)> =
        shuffled(SLICES, 8).into_iter().zip(shuffled(SLICES, 9)).take(1000).collect();
    let strided = |op: &str, region: &Region, offset: u64| {
        let slices = json!([region.memory().address() + offset, BLOCK, SLICES]);
        json!({"do": "strided", "op": op, "peer": name, "local": packed, "remote": slices, "length": SLICE, "blocks": order})
    };
    assert_eq!(python.ask(strided("READ", &ours[0], 2048))["state"], "DONE");
    let blocks: Vec<_> = order
        .iter()
        .map(|(to, from)| (u64::from(*to) * SLICE, u64::from(*from) * BLOCK + 2048, SLICE))
        .collect();
    assert!(python.holds(0, 11, &blocks), "the slices were read");
    assert_eq!(python.ask(strided("WRITE", &ours[1], 512))["state"], "DONE");
    for (_, block) in &order {
        let at = u64::from(*block) * BLOCK;
        let mut got = vec![0; SLICE as usize];
        ours[1].copy_out(at as usize + 512, &mut got)?;
        assert!(got == bytes(11, at + 2048, SLICE), "the slice of block {block} was written");
    }
    Ok(())
}

/// Notifications arrive unchanged in both directions, alone and after data.
fn notifications_are_bytes_both_ways(interpreter: PathBuf) -> Outcome {
    let agent = agent("kvx-talks");
    let region = agent.register("kv", filled(LEN, 1))?;
    let mut python = Python::start(&interpreter, "python-talks", &[LEN]);
    let name = python.ask(json!({"do": "load", "metadata": hex(&agent.foreign_metadata("RIXL")?)}));
    let peer = connect(&agent, &python)?;
    let messages: [&[u8]; 5] = [b"", b"\0", b"a\0b", &[0xff; 300], &[7; 60_000]];
    for message in messages {
        peer.notify(message, CUT_OFF).wait_blocking(CUT_OFF)?;
        let heard = python.ask(json!({"do": "hear", "count": 1}));
        assert_eq!(heard["heard"][0][1].as_str().map(unhex).as_deref(), Some(message));
        assert_eq!(heard["heard"][0][0], name["name"]);
        python.ask(json!({"do": "notify", "peer": name["name"], "message": hex(message)}));
        let notification = run(agent.notification(CUT_OFF))?;
        assert_eq!((&*notification.bytes, &*notification.from.name), (message, "python-talks"));
    }
    let remote = theirs(&peer, &python, 0, LEN)?;
    let (grid, order) = (Grid::packed(BLOCK, BLOCKS), shuffled(BLOCKS, 6));
    moved(Op::Write, &peer, (&region, grid, &order), (&remote, grid, &order), Some(b"written\0"))?;
    let heard = python.ask(json!({"do": "hear", "count": 1}));
    assert_eq!(heard["heard"][0][1], hex(b"written\0"));
    let blocks: Vec<_> =
        (0..u64::from(BLOCKS)).map(|block| (block * BLOCK, block * BLOCK, BLOCK)).collect();
    assert!(python.holds(0, 1, &blocks), "the data arrived before its notification");
    Ok(())
}

/// Python is killed while kvx reads, each time into separate memory. Each transfer ends, with the
/// right bytes or with an error. Another Python continues to serve, and so does a new one with the
/// same name.
fn python_is_killed_and_starts_again(interpreter: PathBuf) -> Outcome {
    let agent = agent("kvx-survives");
    let near = agent.register("kv", Memory::owned(vec![0; LEN]))?;
    let mut python = Python::start(&interpreter, "python-dies", &[LEN]);
    python.ask(json!({"do": "fill", "region": 0, "seed": 21}));
    let mut other = Python::start(&interpreter, "python-lives", &[LEN]);
    other.ask(json!({"do": "fill", "region": 0, "seed": 22}));
    let (grid, order) = (Grid::packed(BLOCK, BLOCKS), shuffled(BLOCKS, 8));
    let (peer, second) = (connect(&agent, &python)?, connect(&agent, &other)?);
    let remote = theirs(&peer, &python, 0, LEN)?;
    let holds = |region: &Region, seed| -> Result<bool, Failed> {
        let mut got = vec![0; LEN];
        region.copy_out(0, &mut got)?;
        Ok(got == bytes(seed, 0, LEN as u64))
    };
    let plan_into = |region: &Region| {
        Plan::read(region.grid(grid)?.blocks(&order[..]), remote.grid(grid)?.blocks(&order[..]))
    };
    run(peer.transfer(&plan_into(&near)?).deadline(CUT_OFF).post()?)?;
    assert!(holds(&near, 21)?);
    let fresh = |at| agent.register(&format!("fresh {at}"), Memory::owned(vec![0; LEN]));
    let regions: Vec<_> = (0..4).map(fresh).collect::<kvx_core::Result<_>>()?;
    let plans: Vec<_> = regions.iter().map(plan_into).collect::<kvx_core::Result<_>>()?;
    let post = |plan| peer.transfer(plan).deadline(CUT_OFF).post();
    let flying: Vec<_> = plans.iter().map(post).collect::<kvx_core::Result<_>>()?;
    python.kill();
    let right = |error: &kvx_core::Error| error.kind() == ErrorKind::PeerLost;
    for (region, flying) in regions.iter().zip(flying) {
        match run(flying) {
            Ok(_) => assert!(holds(region, 21)?, "a successful read has its bytes"),
            Err(why) => assert!(right(&why), "{why:?}"),
        }
    }
    let late = run(peer.transfer(&plans[0]).deadline(CUT_OFF).post()?);
    assert!(late.as_ref().err().is_some_and(right), "{late:?}");
    drop((plans, regions, remote, peer));

    let check = |peer: &Peer, python: &Python, seed| -> Outcome {
        let remote = theirs(peer, python, 0, LEN)?;
        moved(Op::Read, peer, (&near, grid, &order), (&remote, grid, &order), None)?;
        assert!(holds(&near, seed)?, "the bytes of {seed}");
        Ok(())
    };
    check(&second, &other, 22)?;
    let mut again = Python::start(&interpreter, "python-dies", &[LEN]);
    again.ask(json!({"do": "fill", "region": 0, "seed": 23}));
    check(&connect(&agent, &again)?, &again, 23)?;
    check(&second, &other, 22)
}

/// Over TCP nothing ends without Python's help. All requests in flight fail and settle when a
/// Python that does not help is killed. NIXL's C interface neither gives the reason nor drops the
/// agent; kvx finds out.
fn requests_in_flight_fail_when_python_is_killed(interpreter: PathBuf) -> Outcome {
    let agent = agent_over(",TLS=tcp", "kvx-loses");
    let near = agent.register("kv", Memory::owned(vec![0; LEN]))?;
    let mut python = Python::start(&interpreter, "python-stalls", &[LEN]);
    python.ask(json!({"do": "fill", "region": 0, "seed": 41}));
    let peer = connect(&agent, &python)?;
    let remote = theirs(&peer, &python, 0, LEN)?;
    let (grid, order) = (Grid::packed(BLOCK, 256), shuffled(256, 9));
    moved(Op::Read, &peer, (&near, grid, &order), (&remote, grid, &order), None)?;
    let mut got = vec![0; 256 * BLOCK as usize];
    near.copy_out(0, &mut got)?;
    assert!(got == bytes(41, 0, 256 * BLOCK), "it works while Python helps");

    assert_eq!(python.ask(json!({"do": "stall"})), json!({"stalled": true}));
    let (ours, theirs) = (near.grid(grid)?, remote.grid(grid)?);
    let read = Plan::read(ours.blocks(&order[..]), theirs.blocks(&order[..]))?;
    let write = Plan::write(ours.blocks(&order[..]), theirs.blocks(&order[..]))?;
    let post = |plan| peer.transfer(plan).deadline(CUT_OFF).post();
    let flying: Vec<_> =
        [&read, &write].repeat(4).into_iter().map(post).collect::<kvx_core::Result<_>>()?;
    python.kill();
    let settled: Vec<_> = flying.iter().map(|flying| flying.settled()).collect();
    let kinds: Vec<_> =
        flying.into_iter().map(|flying| run(flying).map(drop).map_err(|why| why.kind())).collect();
    assert_eq!(kinds, vec![Err(ErrorKind::PeerLost); 8]);
    settled.into_iter().try_for_each(|settled| settled.wait_blocking(CUT_OFF))?;
    let late = post(&write).and_then(run);
    assert_eq!(late.map(drop).map_err(|why| why.kind()), Err(ErrorKind::PeerLost), "it stays lost");
    Ok(())
}

/// While Python moves as much as it can to and from kvx's memory over TCP, which needs kvx's own
/// CPU, kvx's callers can use other peers.
fn callers_are_not_delayed_while_python_streams(interpreter: PathBuf) -> Outcome {
    const LARGE: usize = 16 << 20;
    const AT_A_TIME: u32 = 4;
    let (agent, other) = (agent_over(",TLS=tcp", "kvx-busy"), agent_over(",TLS=tcp", "kvx-other"));
    let served = agent.register("served", Memory::owned(vec![0; LARGE]))?;
    let near = agent.register("near", Memory::owned(vec![0; 4 * BLOCK as usize]))?;
    let _far = other.register("far", filled(4 * BLOCK as usize, 3))?;
    let peer = agent.connect(&other.metadata()?)?;
    peer.ready(CUT_OFF).wait_blocking(CUT_OFF)?;
    let (grid, remote) = (Grid::packed(BLOCK, 4), peer.region("far")?);
    let plan = Plan::read(near.grid(grid)?.blocks(&[1][..]), remote.grid(grid)?.blocks(&[2][..]))?;
    let mut python = Python::start(&interpreter, "python-streams", &[LARGE]);
    let name = python.ask(json!({"do": "load", "metadata": hex(&agent.foreign_metadata("RIXL")?)}));
    for op in ["READ", "WRITE"] {
        python.tell(json!({
            "do": "pour", "op": op, "peer": name["name"], "local": python.at[0], "remote": served.memory().address(),
            "length": LARGE, "depth": AT_A_TIME, "seconds": 0.5,
        }));
        assert_eq!(python.hear(), json!({"begun": true}));
        let until = Instant::now() + 2 * CUT_OFF;
        let end = loop {
            assert!(Instant::now() < until, "{op}: Python did not finish");
            near.copy_in(0, &[0; 4 * BLOCK as usize])?;
            peer.transfer(&plan).deadline(CUT_OFF).post()?.wait_blocking(CUT_OFF)?;
            let mut got = vec![0; BLOCK as usize];
            near.copy_out(BLOCK as usize, &mut got)?;
            assert!(got == bytes(3, 2 * BLOCK, BLOCK), "the block has arrived");
            let cancelled = peer.transfer(&plan).deadline(CUT_OFF).post()?;
            cancelled.cancel();
            let end = cancelled.wait_blocking(CUT_OFF).map(drop).map_err(|why| why.kind());
            assert!(matches!(end, Ok(()) | Err(ErrorKind::Cancelled)), "{end:?}");
            agent
                .register("more", Memory::owned(vec![0; 64]))?
                .revoke(CUT_OFF)
                .wait_blocking(CUT_OFF)?;
            if let Some(end) = python.heard() {
                break end;
            }
        };
        assert_eq!(end["states"], json!(vec!["DONE"; AT_A_TIME as usize]), "{op}: {end}");
    }
    Ok(())
}

/// NIXL knows one agent of a name. A later agent of the same name, or newer metadata, replaces the
/// earlier one, whose handles stay valid and report that it is lost.
fn the_latest_agent_of_a_name_replaces_earlier_ones(interpreter: PathBuf) -> Outcome {
    const SMALL: usize = 1 << 20;
    let agent = agent("kvx-follows");
    let near = agent.register("kv", Memory::owned(vec![0; SMALL]))?;
    let (grid, order) = (Grid::packed(BLOCK, 256), shuffled(256, 9));
    let reads = |peer: &Peer, python: &Python, region| -> Result<Report, Failed> {
        let remote = theirs(peer, python, region, SMALL)?;
        moved(Op::Read, peer, (&near, grid, &order), (&remote, grid, &order), None)
    };
    let check = |peer: &Peer, python: &mut Python, region, seed| -> Outcome {
        python.ask(json!({"do": "fill", "region": region, "seed": seed}));
        reads(peer, python, region)?;
        let mut got = vec![0; SMALL];
        near.copy_out(0, &mut got)?;
        assert!(got == bytes(seed, 0, SMALL as u64), "the bytes of {seed}");
        Ok(())
    };
    let lost = |peer: &Peer, python: &Python| -> Outcome {
        let remote = theirs(peer, python, 0, SMALL)?;
        let plan =
            Plan::read(near.grid(grid)?.blocks(&order[..]), remote.grid(grid)?.blocks(&order[..]))?;
        let end = peer.transfer(&plan).deadline(CUT_OFF).post().and_then(run);
        assert_eq!(end.map(drop).map_err(|why| why.kind()), Err(ErrorKind::PeerLost));
        Ok(())
    };
    let mut first = Python::start(&interpreter, "python-twice", &[SMALL]);
    let old = connect(&agent, &first)?;
    check(&old, &mut first, 0, 51)?;
    let mut second = Python::start(&interpreter, "python-twice", &[SMALL]);
    let new = connect(&agent, &second)?;
    check(&new, &mut second, 0, 52)?;
    lost(&old, &first)?;
    second.registers_more(SMALL);
    let newest = connect(&agent, &second)?;
    check(&newest, &mut second, 1, 53)?;
    check(&newest, &mut second, 0, 54)?;
    lost(&new, &second)?;
    lost(&old, &first)
}

/// kvx is stopped and killed during a transfer by Python, which over TCP ends only with kvx's help.
/// Python gets an error, and works with a new kvx of the same name.
fn kvx_is_killed_and_starts_again(interpreter: PathBuf) -> Outcome {
    let mut python = Python::start(&interpreter, "python-survives", &[SERVED]);
    for (life, flying) in ["READ", "WRITE"].into_iter().enumerate() {
        let mut served = Child::start_self(SERVES, "kvx-dies")?;
        let metadata = served.hear(CUT_OFF)?;
        let address: u64 = served.hear(CUT_OFF)?.parse()?;
        let name = python.ask(json!({"do": "load", "metadata": metadata}));
        let blocks = |at: u64| (at..at + SERVED as u64).step_by(BLOCK as usize).collect::<Vec<_>>();
        let (local, remote) = (blocks(python.at[0]), blocks(address));
        let transfer = |what: &str, op: &str| json!({"do": what, "op": op, "peer": name["name"], "local": local, "remote": remote, "length": BLOCK});
        python.ask(json!({"do": "fill", "region": 0, "seed": 30}));
        assert_eq!(
            python.ask(transfer("transfer", "READ")),
            json!({"state": "DONE"}),
            "life {life}"
        );
        assert!(
            python.holds(0, 31, &[(0, 0, SERVED as u64)]),
            "the bytes of incarnation {life} were read"
        );
        served.stop()?;
        python.tell(transfer("fly", flying));
        assert_eq!(python.hear(), json!({"posted": "PROC"}), "life {life}");
        served.kill()?;
        let end = python.hear();
        assert_eq!(end["state"], "ERR", "life {life}: {end}");
    }
    Ok(())
}

/// The size of the memory of a process that serves.
const SERVED: usize = 4 << 20;

/// Serves Python until it is killed. Over TCP, all of Python's operations need this process's help.
fn serve(name: &str) {
    let agent = agent_over(",TLS=tcp", name);
    let region = agent.register("kv", filled(SERVED, 31)).expect("memory can be registered");
    println!("{}", hex(&agent.foreign_metadata("RIXL").expect("metadata can be exported")));
    println!("{}", region.memory().address());
    std::io::stdin().read_line(&mut String::new()).ok();
}

/// Serves and exits if this process was started for that.
pub(crate) fn serve_if_asked() {
    let Ok(name) = std::env::var(SERVES) else { return };
    serve(&name);
    std::process::exit(0);
}

pub(crate) fn trials() -> [Trial; 8] {
    let test = |name, test: fn(PathBuf) -> Outcome| {
        let with_python =
            move || test(wheel::python().expect("the wheel's library is in its environment"));
        with_nixl(format!("interop::{name}"), with_python)
    };
    [
        test("python_serves", python_serves),
        test("kvx_serves", kvx_serves),
        test("notifications_are_bytes_both_ways", notifications_are_bytes_both_ways),
        test("python_is_killed_and_starts_again", python_is_killed_and_starts_again),
        test(
            "requests_in_flight_fail_when_python_is_killed",
            requests_in_flight_fail_when_python_is_killed,
        ),
        test(
            "the_latest_agent_of_a_name_replaces_earlier_ones",
            the_latest_agent_of_a_name_replaces_earlier_ones,
        ),
        test(
            "callers_are_not_delayed_while_python_streams",
            callers_are_not_delayed_while_python_streams,
        ),
        test("kvx_is_killed_and_starts_again", kvx_is_killed_and_starts_again),
    ]
}
