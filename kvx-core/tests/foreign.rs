//! Who speaks to agents that are not kvx.

use std::sync::Arc;

use kvx_core::transport::{
    Availability, Context, Factory, Link, LocalRegion, PeerSection, RegionSpec, Transport,
};
use kvx_core::{
    Agent, Capabilities, Error, Idle, Isolation, Kind, LinkId, MemoryKinds, Options, PerOp, Placement,
    Registry, Result, Revocation, Ticket, Unavailable, WithoutAList,
};

const CAPABILITIES: Capabilities = Capabilities {
    isolation: PerOp::same(Isolation::Owner),
    idle: Idle::Asleep,
    target_cpu: PerOp::BOTH,
    revocation: Revocation::Owner,
    peer_loss_within: None,
    settles_without_peer: PerOp::NEITHER,
    ordered: false,
    local: MemoryKinds::HOST,
    remote: MemoryKinds::HOST,
};

/// A backend that says its name to whoever is not kvx, if it speaks to such at all.
struct Speaker {
    name: &'static str,
    speaks_for: Option<&'static [&'static str]>,
}

impl Factory for Speaker {
    fn name(&self) -> &'static str {
        self.name
    }

    fn placement(&self) -> Placement {
        let speaks_for = self.speaks_for.unwrap_or_default();
        Placement { order: 0, without_a_list: WithoutAList::Skip, speaks_for }
    }

    fn available(&self, _: &Options) -> Result<Availability, Unavailable> {
        Ok(Availability {
            version: "1".into(),
            library: None,
            devices: Vec::new(),
            rdma: false,
            capabilities: CAPABILITIES,
            caution: None,
        })
    }

    fn open(&self, _: Context) -> Result<Arc<dyn Transport>> {
        Ok(Arc::new(Says(self.speaks_for.map(|_| self.name))))
    }
}

struct Says(Option<&'static str>);

fn nothing<T>() -> Result<T> {
    Err(Error::new(Kind::Unsupported, "it moves nothing"))
}

// SAFETY: it touches no memory.
unsafe impl Transport for Says {
    fn capabilities(&self) -> &Capabilities {
        &CAPABILITIES
    }

    fn address(&self) -> Result<Vec<u8>> {
        Ok(Vec::new())
    }

    fn register(&self, _: RegionSpec) -> Result<Arc<dyn LocalRegion>> {
        nothing()
    }

    fn link(&self, _: LinkId, _: PeerSection<'_>) -> Result<Arc<dyn Link>> {
        nothing()
    }

    fn foreign_metadata(&self) -> Result<Vec<u8>> {
        self.0.map_or_else(nothing, |name| Ok(name.as_bytes().to_vec()))
    }

    fn shutdown(&self, done: Ticket) {
        done.settle(Ok(()));
    }
}

/// Whom an agent with these backends has speak to foreign agents of this kind.
fn speaker(backends: &[&str], kind: &str) -> Result<String> {
    let mut registry = Registry::new();
    for (name, speaks_for) in
        [("UCX", None), ("RIXL", Some(&["UCX", "NIXL"][..])), ("MOONCAKE", Some(&[][..]))]
    {
        registry.add(Speaker { name, speaks_for }).expect("another name");
    }
    let agent = Agent::builder("a").backends(backends.iter().copied()).build(&registry).expect("all open");
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
    assert_eq!(silent.kind(), Kind::Unsupported, "it is open, and speaks to kvx alone");
    let absent = speaker(&["UCX", "MOONCAKE"], "RIXL").unwrap_err();
    assert_eq!(absent.kind(), Kind::NoRoute);
    assert!(absent.to_string().contains("name RIXL in `backends`"), "{absent}");
}
