//! Tests that hostile metadata is rejected before NIXL, which trusts its input, loads it.

use std::sync::Arc;
use std::time::Duration;

use kvx_backend::fabric::attacker::{sign_export, strip_signature};
use kvx_core::backend::Metadata;
use kvx_core::{Agent, ErrorKind, Grid, Memory, Options, Peer, Plan, Region, Transfer};
use kvx_testkit::{Child, hex, unhex};
use libtest_mimic::{Failed, Trial};

use crate::{Outcome, registry, with_nixl};

const CUT_OFF: Duration = Duration::from_secs(10);
const BLOCK: u64 = 4096;
const BLOCKS: u32 = 64;
const LEN: usize = BLOCK as usize * BLOCKS as usize;
/// The content of the victim's memory.
const CONTENT: u8 = 7;
/// Set in a process that serves until its standard input is closed, to its agent's name.
const SERVES: &str = "KVX_RIXL_TEST_SERVES_AS_VICTIM";
/// The bytes before the kind of memory in one of NIXL's descriptor lists.
const LIST: &[u8] = b"nixlSDList|t\x04\0\0\0\0\0\0\0";

/// Opens an agent over TCP, where the peer's process takes part in every transfer: while it is
/// stopped, nothing ends.
fn agent(name: &str) -> kvx_core::Result<Agent> {
    let options =
        Options::parse(r#"{"rixl": {"params": {"engine_config": "NET_DEVICES=lo,TLS=tcp"}}}"#)?;
    Agent::builder(name).backends(["RIXL"]).options(options).registry(registry("")).build()
}

fn read(ours: &Region, peer: &Peer) -> kvx_core::Result<Transfer> {
    let grid = Grid::packed(BLOCK, BLOCKS);
    let all: Vec<u32> = (0..BLOCKS).collect();
    let remote = peer.region("kv")?.grid(grid)?.blocks(&all[..]);
    let plan = Plan::read(ours.grid(grid)?.blocks(&all[..]), remote)?;
    peer.transfer(&plan).deadline(CUT_OFF).post()
}

/// Starts an agent in another process, and returns its metadata.
fn victim() -> Result<(Child, Vec<u8>), Failed> {
    let victim = Child::start_self(SERVES, "victim")?;
    let metadata = unhex(&victim.hear(CUT_OFF)?);
    Ok((victim, metadata))
}

fn serve(name: &str) -> kvx_core::Result<()> {
    let agent = agent(name)?;
    let _region = agent.register("kv", Memory::owned(vec![CONTENT; LEN]))?;
    println!("{}", hex(&agent.metadata()?));
    std::io::stdin().read_line(&mut String::new()).ok();
    Ok(())
}

/// Returns `metadata` with another NIXL description of its region, a new checksum and a new
/// signature, as an attacker in a fleet without a secret would write it.
fn with_description(
    metadata: &[u8],
    alter: impl FnOnce(&mut Vec<u8>),
) -> kvx_core::Result<Vec<u8>> {
    let mut metadata = Metadata::decode(metadata)?;
    let mut region = (*metadata.regions[0]).clone();
    let described = &mut region.exports[0].1;
    strip_signature(described);
    alter(described);
    let end = described.len() - 8;
    let sum = described[..end].iter().fold(0xcbf2_9ce4_8422_2325, |sum: u64, byte| {
        (sum ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    });
    described[end..].copy_from_slice(&sum.to_le_bytes());
    sign_export("RIXL", &metadata.identity, described);
    metadata.regions[0] = Arc::new(region);
    metadata.encode()
}

/// A peer describes its region as another agent's, with another key. NIXL would drop that agent
/// because of it, and a transfer with that agent would seem to have ended while its bytes still
/// arrive.
fn a_peer_cannot_describe_another_agents_memory() -> Outcome {
    let (victim_process, victims) = victim()?;
    let (near, hostile) = (agent("near")?, agent("hostile")?);
    let ours = near.register("kv", Memory::owned(vec![0; LEN]))?;
    let _theirs = hostile.register("kv", Memory::owned(vec![9; LEN]))?;
    let victim = near.connect(&victims)?;
    victim.ready(CUT_OFF).wait_blocking(CUT_OFF)?;
    read(&ours, &victim)?.wait_blocking(CUT_OFF)?;
    let mut described = Metadata::decode(&victims)?.regions[0].exports[0].1.clone();
    strip_signature(&mut described);
    let altered = with_description(&hostile.metadata()?, |own| {
        *own = described;
        let key = own.len() - 10; // the checksum and the field's final `|` follow it
        own[key] ^= 0x55;
    })?;
    let hostile = near.connect(&altered)?;
    hostile.ready(CUT_OFF).wait_blocking(CUT_OFF)?;

    victim_process.stop()?;
    ours.copy_in(0, &[0; LEN])?;
    let flying = read(&ours, &victim)?;
    let refused = read(&ours, &hostile).and_then(|read| read.wait_blocking(CUT_OFF));
    assert_eq!(refused.map_err(|why| why.kind()).map(drop), Err(ErrorKind::Malformed));
    victim_process.go_on()?;
    let report = flying.wait_blocking(CUT_OFF)?;
    assert_eq!(report.bytes, LEN as u64);
    let mut got = vec![0; LEN];
    ours.copy_out(0, &mut got)?;
    assert!(got.iter().all(|byte| *byte == CONTENT), "the victim's bytes have arrived");
    Ok(())
}

/// Overwrites the kind of memory in one of NIXL's descriptions.
fn with_kind(described: &mut [u8], kind: i32) {
    let at = described.windows(LIST.len()).position(|window| window == LIST).expect("a list")
        + LIST.len();
    described[at..at + 4].copy_from_slice(&kind.to_le_bytes());
}

/// NIXL crashes on unknown kinds of memory, in a region's description and in a foreign agent's.
fn memory_of_an_unknown_kind_is_rejected() -> Outcome {
    let (near, far) = (agent("near")?, agent("far")?);
    let ours = near.register("kv", Memory::owned(vec![0; LEN]))?;
    let _theirs = far.register("kv", Memory::owned(vec![9; LEN]))?;
    for kind in [-1, 6, 77] {
        let metadata = with_description(&far.metadata()?, |own| with_kind(own, kind))?;
        let peer = near.connect(&metadata)?;
        peer.ready(CUT_OFF).wait_blocking(CUT_OFF)?;
        let refused = read(&ours, &peer).and_then(|read| read.wait_blocking(CUT_OFF));
        assert_eq!(
            refused.map_err(|why| why.kind()).map(drop),
            Err(ErrorKind::Malformed),
            "kind {kind}"
        );
        drop(peer);
        let mut foreign = far.foreign_metadata("RIXL")?;
        with_kind(&mut foreign, kind);
        let refused = near
            .connect_foreign("RIXL", &foreign)
            .and_then(|peer| peer.ready(CUT_OFF).wait_blocking(CUT_OFF));
        assert_eq!(refused.map_err(|why| why.kind()), Err(ErrorKind::Malformed), "kind {kind}");
    }
    let peer = near.connect(&far.metadata()?)?;
    peer.ready(CUT_OFF).wait_blocking(CUT_OFF)?;
    read(&ours, &peer)?.wait_blocking(CUT_OFF)?;
    Ok(())
}

/// Serves and exits if this process was started for that.
pub(crate) fn serve_if_asked() {
    let Ok(name) = std::env::var(SERVES) else { return };
    serve(&name).expect("it serves");
    std::process::exit(0);
}

pub(crate) fn trials() -> [Trial; 2] {
    let test = |name, test: fn() -> Outcome| with_nixl(format!("hostile::{name}"), test);
    [
        test(
            "a_peer_cannot_describe_another_agents_memory",
            a_peer_cannot_describe_another_agents_memory,
        ),
        test("memory_of_an_unknown_kind_is_rejected", memory_of_an_unknown_kind_is_rejected),
    ]
}
