//! Which backend connects to agents that are not kvx.

use std::sync::Arc;

use kvx_core::backend::{AutoOpen, Placement, Ticket};
use kvx_core::{Agent, ErrorKind, Grid, MemoryKind, Place, Registry, Result};
use kvx_testkit::test;

use super::still::Still;

/// Returns an agent with these backends.
fn agent(backends: &[&str]) -> Agent {
    let mut registry = Registry::new();
    for (name, speaks_for) in
        [("UCX", None), ("RIXL", Some(&["UCX", "NIXL"][..])), ("MOONCAKE", Some(&[][..]))]
    {
        let foreign_metadata = speaks_for.map(|_| name);
        let speaks_for = speaks_for.unwrap_or_default();
        let placement = Placement { order: 0, auto_open: AutoOpen::Skip, speaks_for };
        let shutdown = Arc::new(|done: Ticket| done.settle(Ok(())));
        let backend = Still { name, placement, foreign_metadata, shutdown };
        registry.add(backend).expect("another name");
    }
    let builder = Agent::builder("a").backends(backends.iter().copied());
    builder.registry(registry.clone()).build().expect("all open")
}

/// Returns the backend that an agent with these backends uses for foreign agents of this kind.
fn speaker(backends: &[&str], kind: &str) -> Result<String> {
    let metadata = agent(backends).foreign_metadata(kind);
    metadata.map(|name| String::from_utf8(name).expect("a name"))
}

#[test]
fn who_speaks_for_a_backend_goes_before_it_wherever_the_list_has_them() {
    for backends in [["UCX", "RIXL"], ["RIXL", "UCX"]] {
        for kind in ["UCX", "ucx", "RIXL", "nixl"] {
            assert_eq!(speaker(&backends, kind).unwrap(), "RIXL", "{kind} of {backends:?}");
        }
    }
    assert_eq!(speaker(&["RIXL", "MOONCAKE"], "mooncake").unwrap(), "MOONCAKE");
    let silent = speaker(&["UCX", "MOONCAKE"], "UCX").unwrap_err();
    assert_eq!(
        silent.kind(),
        ErrorKind::Unsupported,
        "it is open, but connects to kvx agents only"
    );
    let absent = speaker(&["UCX", "MOONCAKE"], "RIXL").unwrap_err();
    assert_eq!(absent.kind(), ErrorKind::NoRoute);
    assert!(absent.to_string().contains("name RIXL in `backends`"), "{absent}");
}

#[test]
fn a_range_of_a_foreign_agent_lies_within_the_address_space() {
    let peer = agent(&["MOONCAKE"]).connect_foreign("MOONCAKE", "segment").expect("it is open");
    for (address, len) in [(0, u64::MAX), (u64::MAX - 64, 64), (u64::MAX, 0)] {
        let range = peer.foreign(address, len, MemoryKind::Host, 0).expect("it fits");
        assert_eq!(range.len(), len);
        range.grid(Grid::packed(1, 1).at(len)).map(drop).expect_err("a block after its end");
    }
    for (address, len) in [(u64::MAX - 63, 64), (u64::MAX, u64::MAX), (1, u64::MAX)] {
        let refused = peer.foreign(address, len, MemoryKind::Host, 0).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::OutOfBounds, "{refused}");
    }
}
