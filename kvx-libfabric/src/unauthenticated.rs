//! Peers that have an agent's metadata but not the fleet's secret, and use libfabric directly.

use std::time::Duration;

use kvx_backend::fabric::attacker;
use kvx_core::backend::Metadata;
use kvx_core::{Agent, Memory, Options, Registry, Secret};
use kvx_testkit::{newcomer, newcomers_amid};

use crate::error::NAME;
use crate::factory::{Libfabric, parts};

fn an_address_that_is_not_proven_reaches_no_parser(test: &str, provider: &str) {
    let options =
        Options::parse(&format!(r#"{{"libfabric": {{"provider": "{provider}"}}}}"#)).unwrap();
    let mut registry = Registry::new();
    registry.add(Libfabric).unwrap();
    if let Err(why) = registry.require(NAME, &options) {
        return kvx_testkit::skip(
            test,
            &why.to_string(),
            "cargo xtask test --install on Debian 12",
        );
    }
    let [secret, wrong] = [3, 4].map(|byte| Secret::from_bytes([byte; 32]));
    let agent = |name| {
        let builder = Agent::builder(name).backends([NAME]).options(options.clone());
        builder.secret(secret.clone()).registry(registry.clone()).build().unwrap()
    };
    let owner = agent("owner");
    let _region = owner.register("kv", Memory::pool(64 << 10).build().unwrap()).unwrap();
    let metadata = owner.metadata().unwrap();
    let told = Metadata::decode(&metadata).unwrap();
    let library = parts(&attacker::context(options.clone())).unwrap();
    let siege =
        || attacker::flood_with_hellos(library, &told, (&secret, &wrong), Duration::from_secs(2));
    let hellos = newcomers_amid(|| agent("reader"), &metadata, siege).unwrap();
    assert!(hellos > 1_000, "{hellos} hellos");
    newcomer(&agent("reader"), &metadata).unwrap();
}

#[test]
fn an_address_that_is_not_proven_reaches_no_parser_over_shared_memory() {
    let test = "an_address_that_is_not_proven_reaches_no_parser_over_shared_memory";
    an_address_that_is_not_proven_reaches_no_parser(test, "shm");
}

#[test]
fn an_address_that_is_not_proven_reaches_no_parser_over_sockets() {
    let test = "an_address_that_is_not_proven_reaches_no_parser_over_sockets";
    an_address_that_is_not_proven_reaches_no_parser(test, "tcp;ofi_rxm");
}
