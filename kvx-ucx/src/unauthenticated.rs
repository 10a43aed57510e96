//! Peers that have an agent's metadata and not the fleet's secret, and use UCX directly.

use std::time::Duration;

use kvx_backend::fabric::attacker;
use kvx_core::backend::Metadata;
use kvx_core::{Agent, Memory, Options, Registry, Secret};
use kvx_testkit::{newcomer, newcomers_amid};

use crate::error::NAME;
use crate::factory::{Ucx, parts};
use crate::versions;

#[test]
fn an_address_that_is_not_proven_reaches_no_parser_and_keeps_nobody_waiting() {
    const TITLE: &str =
        "unauthenticated::an_address_that_is_not_proven_reaches_no_parser_and_keeps_nobody_waiting";
    versions::on_each(TITLE, |_| {
        let [secret, wrong] = [3, 4].map(|byte| Secret::from_bytes([byte; 32]));
        let mut registry = Registry::new();
        registry.add(Ucx).unwrap();
        let agent = |name| {
            Agent::builder(name)
                .backends([NAME])
                .secret(secret.clone())
                .registry(registry.clone())
                .build()
                .unwrap()
        };
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
