//! Which backend connects to agents that are not kvx.

use std::sync::Arc;

use kvx_core::backend::{AutoOpen, Placement, Ticket};
use kvx_core::{Agent, ErrorKind, Registry, Result};
use kvx_testkit::test;

use super::still::Still;

/// Returns the backend that an agent with these backends uses for foreign agents of this kind.
fn speaker(backends: &[&str], kind: &str) -> Result<String> {
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
    let agent = Agent::builder("a")
        .backends(backends.iter().copied())
        .registry(registry.clone())
        .build()
        .expect("all open");
    agent.foreign_metadata(kind).map(|name| String::from_utf8(name).expect("a name"))
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
