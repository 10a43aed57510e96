//! Attackers without the fleet's secret: peers that have an agent's metadata and use UCX directly,
//! and those who alter the metadata.

use std::time::Duration;

use kvx_backend::fabric::attacker;
use kvx_core::backend::Metadata;
use kvx_core::{Agent, ErrorKind, Memory, Options, Registry, Secret};
use kvx_testkit::{newcomer, newcomers_amid};

use crate::error::NAME;
use crate::factory::{Ucx, parts};
use crate::versions;

/// Builds agents with one secret.
fn fleet(secret: &Secret) -> impl Fn(&str) -> Agent {
    let (mut registry, secret) = (Registry::new(), secret.clone());
    registry.add(Ucx).unwrap();
    move |name| {
        let builder = Agent::builder(name).backends([NAME]).secret(secret.clone());
        builder.registry(registry.clone()).build().unwrap()
    }
}

#[test]
fn an_altered_address_in_metadata_reaches_no_parser() {
    const TITLE: &str = "unauthenticated::an_altered_address_in_metadata_reaches_no_parser";
    const PATIENCE: Duration = Duration::from_secs(10);
    versions::on_each(TITLE, |_| {
        let [secret, wrong] = [3, 4].map(|byte| Secret::from_bytes([byte; 32]));
        let agent = fleet(&secret);
        let (owner, reader) = (agent("owner"), agent("reader"));
        let _region = owner.register("kv", Memory::pool(64 << 10).build().unwrap()).unwrap();
        let metadata = owner.metadata().unwrap();
        let told = Metadata::decode(&metadata).unwrap();
        for wrong in [Some(&wrong), None] {
            let altered = attacker::with_altered_addresses(NAME, &told, (&secret, wrong)).unwrap();
            assert!(altered.len() > 100, "{} addresses", altered.len());
            let connect = |metadata: Metadata| reader.connect(metadata.encode().unwrap()).unwrap();
            let peers: Vec<_> = altered.into_iter().map(connect).collect();
            let waits: Vec<_> = peers.iter().map(|peer| peer.ready(PATIENCE)).collect();
            // An altered address that is parsed may abort this process.
            let ends: Vec<_> = waits.into_iter().map(|wait| wait.wait_blocking(PATIENCE)).collect();
            for end in ends {
                assert_eq!(end.map_err(|why| why.kind()), Err(ErrorKind::Authentication));
            }
        }
        newcomer(&reader, &metadata).unwrap();
    });
}

#[test]
fn an_address_that_is_not_proven_reaches_no_parser_and_keeps_nobody_waiting() {
    const TITLE: &str =
        "unauthenticated::an_address_that_is_not_proven_reaches_no_parser_and_keeps_nobody_waiting";
    versions::on_each(TITLE, |_| {
        let [secret, wrong] = [3, 4].map(|byte| Secret::from_bytes([byte; 32]));
        let agent = fleet(&secret);
        let owner = agent("owner");
        let _region = owner.register("kv", Memory::pool(64 << 10).build().unwrap()).unwrap();
        let metadata = owner.metadata().unwrap();
        let told = Metadata::decode(&metadata).unwrap();
        let (library, _) = parts(&attacker::context(Options::new())).unwrap();
        let siege = || {
            attacker::flood_with_hellos(library, &told, (&secret, &wrong), Duration::from_secs(2))
        };
        let hellos = newcomers_amid(|| agent("reader"), &metadata, siege).unwrap();
        assert!(hellos > 1_000, "{hellos} hellos");
        newcomer(&agent("reader"), &metadata).unwrap();
    });
}
