//! Tests whole agents: rails, agents with different providers, and what `kvx backends` lists.

use std::time::Duration;

use kvx_core::{Agent, BackendStatus, ErrorKind, Grid, Memory, Options, Peer, Plan, Region};
use kvx_testkit::test;

use crate::registry;

const PATIENCE: Duration = Duration::from_secs(10);
const BLOCK: u64 = 4096;
const BLOCKS: u32 = 300;

const ONE: &str = r#"{"libfabric": {"provider": "tcp;ofi_rxm"}}"#;
const TWO: &str = r#"{"libfabric": {"provider": "tcp;ofi_rxm", "domain": ["lo", "lo"]}}"#;
const THREE: &str =
    r#"{"libfabric": {"provider": "tcp;ofi_rxm", "domain": ["lo", "lo", "lo"], "rails": 2}}"#;
const SHARED: &str = r#"{"libfabric": {"provider": "shm"}}"#;

type Outcome<T = ()> = Result<T, Box<dyn std::error::Error>>;

/// Returns whether libfabric is installed here; reports a skipped test if it is not.
fn is_installed(test: &str) -> bool {
    match Options::parse(ONE)
        .and_then(|options| registry("").require("LIBFABRIC", &options).map(|_| ()))
    {
        Ok(()) => true,
        Err(why) => {
            kvx_testkit::skip(test, &why.to_string(), "cargo xtask test --install on Debian 12");
            false
        }
    }
}

/// Returns an agent with a region whose block `n` holds `content + n`.
fn agent(name: &str, options: &str, content: u8) -> Outcome<(Agent, Region)> {
    let builder = Agent::builder(name).backends(["LIBFABRIC"]).options(Options::parse(options)?);
    let agent = builder.registry(registry("")).build()?;
    let block = |number: u32| vec![content.wrapping_add(number as u8); BLOCK as usize];
    let bytes: Vec<u8> = (0..BLOCKS).flat_map(block).collect();
    let region = agent.register("kv", Memory::owned(bytes))?;
    Ok((agent, region))
}

/// Reads the first half of the peer's region into the local one, last block first, and writes the
/// local second half to the peer's.
fn both_ways(near: &Region, peer: &Peer) -> Outcome {
    peer.ready(PATIENCE).wait_blocking(PATIENCE)?;
    let grid = || Grid::packed(BLOCK, BLOCKS);
    let (ours, theirs) = (near.grid(grid())?, peer.region("kv")?.grid(grid())?);
    let (first, second) = (0..BLOCKS / 2, BLOCKS / 2..BLOCKS);
    let backwards: Vec<u32> = first.clone().rev().collect();
    let read = Plan::read(ours.blocks(backwards), theirs.blocks(first))?;
    peer.post(&read)?.wait_blocking(PATIENCE)?;
    let write = Plan::write(ours.blocks(second.clone()), theirs.blocks(second))?;
    peer.post(&write)?.wait_blocking(PATIENCE)?;
    Ok(())
}

/// Returns the first and the last byte of each block.
fn edges(region: &Region) -> Outcome<Vec<[u8; 2]>> {
    let mut bytes = vec![0; BLOCK as usize * BLOCKS as usize];
    region.copy_out(0, &mut bytes)?;
    Ok(bytes.chunks(BLOCK as usize).map(|block| [block[0], block[block.len() - 1]]).collect())
}

#[test]
fn transfers_are_spread_over_any_number_of_rails() {
    if !is_installed("transfers_are_spread_over_any_number_of_rails") {
        return;
    }
    for (near_domains, far_domains) in [(TWO, TWO), (TWO, ONE), (ONE, TWO), (THREE, TWO)] {
        let ((near, ours), (far, theirs)) =
            (agent("near", near_domains, 1).unwrap(), agent("far", far_domains, 101).unwrap());
        let peer = near.connect(far.metadata().unwrap()).unwrap();
        both_ways(&ours, &peer).unwrap();
        let half = BLOCKS / 2;
        let filled = |content: u8, number: u32| [content.wrapping_add(number as u8); 2];
        let read = (0..half).map(|number| filled(101, half - 1 - number));
        let kept = (half..BLOCKS).map(|number| filled(1, number));
        assert_eq!(
            edges(&ours).unwrap(),
            read.chain(kept.clone()).collect::<Vec<_>>(),
            "{near_domains} from {far_domains}"
        );
        let lent = (0..half).map(|number| filled(101, number));
        assert_eq!(
            edges(&theirs).unwrap(),
            lent.chain(kept).collect::<Vec<_>>(),
            "{near_domains} to {far_domains}"
        );
        if near_domains == TWO {
            assert!(peer.route().to_string().contains("over lo and lo"), "{}", peer.route());
        }
    }
}

#[test]
fn agents_with_different_providers_get_an_error_that_says_what_to_do() {
    if !is_installed("agents_with_different_providers_get_an_error_that_says_what_to_do") {
        return;
    }
    let ((near, _), (far, _)) = (agent("near", ONE, 1).unwrap(), agent("far", SHARED, 2).unwrap());
    let why = near
        .connect(far.metadata().unwrap())
        .and_then(|peer| peer.ready(PATIENCE).wait_blocking(PATIENCE))
        .unwrap_err()
        .to_string();
    assert!(why.contains("shm") && why.contains("\"libfabric.provider\""), "{why}");
}

#[test]
fn providers_are_listed_with_their_properties() {
    if !is_installed("providers_are_listed_with_their_properties") {
        return;
    }
    let (_, standing) = registry("").status("LIBFABRIC", &Options::parse(ONE).unwrap()).unwrap();
    let BackendStatus::Available(available) = standing else { panic!("it was available before") };
    let line = |name: &str| available.devices.iter().find(|line| line.starts_with(name)).cloned();
    let tcp = line("tcp;ofi_rxm/lo (").unwrap();
    assert!(tcp.contains("delivery") && !tcp.contains("not used"), "{tcp}");
    let shm = line("shm/shm (").unwrap();
    assert!(
        shm.contains("by address") && shm.contains("copied by kvx through the kernel"),
        "{shm}"
    );
}

#[test]
fn a_missing_provider_or_domain_is_named() {
    if !is_installed("a_missing_provider_or_domain_is_named") {
        return;
    }
    let refused = |options: &str| {
        let error =
            registry("").require("LIBFABRIC", &Options::parse(options).unwrap()).err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        error.to_string()
    };
    let why = refused(r#"{"libfabric": {"provider": "nothing"}}"#);
    assert!(why.contains("no provider nothing") && why.contains("fi_info"), "{why}");
    let why = refused(r#"{"libfabric": {"provider": "tcp;ofi_rxm", "domain": "nowhere9"}}"#);
    assert!(why.contains("no domain nowhere9") && why.contains("lo"), "{why}");
    // The library is too old here, or there is no card.
    let why = refused(r#"{"libfabric": {"provider": "efa"}}"#);
    assert!(why.contains("from libfabric 1.21 on") || why.contains("no provider efa"), "{why}");
}
