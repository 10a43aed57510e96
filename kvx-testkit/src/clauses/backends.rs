//! B: the choice of a backend, and the reasons against the others.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use kvx_core::backend::{
    Admission, AutoOpen, Availability, BackendName, Context, Factory, Placement, Transport,
    Unavailable,
};
use kvx_core::{Agent, Error, ErrorKind, Grid, Options, Peer, Plan, Region, Registry, Verdict};

use super::clause::{Breaker, Clause, Execution, clauses};
use crate::chaos::Fault;
use crate::check::{CUT_OFF, Check, Failure, ensure, ensure_kind};
use crate::setup::{AgentPair, Mode, Setup};
use crate::unique::unique;

pub(super) const CLAUSES: &[Clause] = clauses!(
    B1 a_list_of_backends_restricts, Both, [Breaker::Core("silent-fallback")];
    B2 without_a_list_the_order_decides, Both, [Breaker::Core("order")];
    B3 missing_backends_are_three_errors, OneProcess, [Breaker::Core("one-error")];
    B4 the_route_explains_itself, Both, [Breaker::Chaos(Fault::Mute)];
);

/// A backend under another name, and at another place in the order.
struct Twin {
    name: &'static str,
    inner: Arc<dyn Factory>,
    placement: Placement,
    opened: Arc<AtomicUsize>,
}

impl Factory for Twin {
    fn name(&self) -> &'static str {
        self.name
    }

    fn placement(&self) -> Placement {
        self.placement
    }

    fn admission(&self) -> Admission {
        self.inner.admission()
    }

    fn available(&self, options: &Options) -> Result<Availability, Unavailable> {
        self.inner.available(options)
    }

    fn open(&self, context: Context) -> kvx_core::Result<Arc<dyn Transport>> {
        self.opened.fetch_add(1, Ordering::SeqCst);
        self.inner.open(context)
    }
}

/// A backend that cannot run on this machine.
struct Absent;

const CURE: &str = "install libabsent, or leave it out";

impl Factory for Absent {
    fn name(&self) -> &'static str {
        "ABSENT"
    }

    fn placement(&self) -> Placement {
        Placement { order: 0, auto_open: AutoOpen::Open, speaks_for: &[] }
    }

    fn available(&self, _: &Options) -> Result<Availability, Unavailable> {
        Err(Unavailable::because("libabsent.so.0 not found", CURE))
    }

    fn open(&self, _: Context) -> kvx_core::Result<Arc<dyn Transport>> {
        Err(ErrorKind::Unavailable.because("opened although it is not available"))
    }
}

/// The backend under test, together with others.
struct Choice {
    registry: Registry,
    backend: &'static str,
    inner: Arc<dyn Factory>,
}

impl Choice {
    fn new(setup: &Setup) -> Result<Self, Failure> {
        let whole = setup.registry();
        let (inner, _) = whole.require(&setup.backends[0], &setup.options_here()?)?;
        let (backend, inner) = (inner.name(), Arc::clone(inner));
        let mut registry = Registry::new();
        registry.add_shared(Arc::clone(&inner))?;
        Ok(Choice { registry, backend, inner })
    }

    /// Adds the same backend under another name. Returns a counter of how often it is opened.
    fn twin(
        &mut self,
        name: &'static str,
        before: bool,
        auto_open: AutoOpen,
    ) -> Result<Arc<AtomicUsize>, Failure> {
        let own = self.inner.placement().order;
        let order = if before { own.saturating_sub(1) } else { own + 1 };
        let opened = Arc::new(AtomicUsize::new(0));
        let placement = Placement { order, auto_open, speaks_for: &[] };
        self.registry.add(Twin {
            name,
            inner: Arc::clone(&self.inner),
            placement,
            opened: Arc::clone(&opened),
        })?;
        Ok(opened)
    }

    /// Builds an agent with these backends; `None` means no list.
    fn agent(&self, setup: &Setup, backends: Option<&[&str]>) -> kvx_core::Result<Agent> {
        let mut builder = Agent::builder(unique("chooser")).options(setup.options_here()?);
        if let Some((_, source)) = setup.device {
            builder = builder.device(source()?.access());
        }
        match backends {
            Some(names) => {
                builder.backends(names.iter().copied()).registry(self.registry.clone()).build()
            }
            None => builder.registry(self.registry.clone()).build(),
        }
    }
}

/// Creates the other end of a choice: an ordinary pair whose near end is not used.
fn target(setup: &Setup) -> Result<AgentPair, Failure> {
    let mut pair = setup.pair()?;
    pair.far_region("kv", 1 << 16, 2)?;
    Ok(pair)
}

fn connect(agent: &Agent, setup: &Setup, metadata: &[u8]) -> Result<(Peer, Region), Failure> {
    Ok((agent.connect(metadata)?, agent.register("near", setup.memory(1 << 16, 1)?)?))
}

/// Reads a block. Returns the backend that carried it.
async fn read(peer: &Peer, near: &Region) -> kvx_core::Result<&'static str> {
    let grid = Grid::packed(4096, 16);
    let plan =
        Plan::read(near.grid(grid)?.blocks([1]), peer.region("kv")?.grid(grid)?.blocks([2]))?;
    Ok(peer.transfer(&plan).deadline(CUT_OFF).post()?.await?.backend)
}

/// B1: a list is in order of preference, in any letter case, and no other backend is used.
pub async fn a_list_of_backends_restricts(setup: &Setup) -> Check {
    let mut target = target(setup)?;
    let metadata = target.far.metadata()?;
    let mut choice = Choice::new(setup)?;
    choice.twin("TWIN", true, AutoOpen::Open)?;
    choice.registry.add(Absent)?;
    let (lower, upper) = (choice.backend.to_lowercase(), choice.backend.to_uppercase());
    for written in [&lower, &upper] {
        let agent = choice.agent(setup, Some(&[written]))?;
        ensure!(
            agent.backends() == [choice.backend],
            "the list [{written}] opened {:?}",
            agent.backends()
        );
        let (peer, near) = connect(&agent, setup, &metadata)?;
        let used = read(&peer, &near).await?;
        ensure!(used == choice.backend, "the list [{written}] used {used}");
    }
    // The peer has not opened TWIN, and the backend that it has opened is not used instead.
    let agent = choice.agent(setup, Some(&["Twin"]))?;
    ensure!(agent.backends() == ["TWIN"], "the list [Twin] opened {:?}", agent.backends());
    let (peer, near) = connect(&agent, setup, &metadata)?;
    let refused = read(&peer, &near).await;
    ensure_kind!(refused, NoRoute | Unsupported);
    let sentence = refused.err().map(|error| error.to_string()).unwrap_or_default();
    ensure!(
        sentence.contains("TWIN"),
        "the error does not say why TWIN cannot be used: {sentence}"
    );
    // A backend that cannot run only counts as a reason, as long as another one of the list can.
    let agent = choice.agent(setup, Some(&["absent", "tWiN", &lower]))?;
    ensure!(
        agent.backends() == ["TWIN", choice.backend],
        "the agent opened {:?} in the wrong order",
        agent.backends()
    );
    let (peer, near) = connect(&agent, setup, &metadata)?;
    let used = read(&peer, &near).await?;
    ensure!(used == choice.backend, "the list [absent, tWiN, {lower}] used {used}");
    ensure_kind!(choice.agent(setup, Some(&["ABSENT"])), Unavailable);
    ensure_kind!(choice.agent(setup, Some(&[])), Invalid);
    Ok(())
}

/// B2: without a list, the first backend in the order that serves the peer carries the transfer. A
/// backend that opens only when it is named stays closed.
pub async fn without_a_list_the_order_decides(setup: &Setup) -> Check {
    let mut target = target(setup)?;
    let mut choice = Choice::new(setup)?;
    // One backend before the tested one, which the peer does not have; another one that must be
    // named.
    choice.twin("FIRST", true, AutoOpen::Open)?;
    choice.registry.add(Absent)?;
    let named_only = choice.twin("NAMED", true, AutoOpen::Skip)?;
    let agent = choice.agent(setup, None)?;
    ensure!(
        named_only.load(Ordering::SeqCst) == 0,
        "a backend that opens only when it is named was opened"
    );
    let own = choice.inner.placement().auto_open;
    let (peer, near) = connect(&agent, setup, &target.far.metadata()?)?;
    if own == AutoOpen::Open {
        ensure!(
            agent.backends() == ["FIRST", choice.backend],
            "without a list {:?} are open",
            agent.backends()
        );
        let used = read(&peer, &near).await?;
        ensure!(used == choice.backend, "the peer has only {}, {used} was used", choice.backend);
    }
    let agent = choice.agent(setup, Some(&["NAMED"]))?;
    ensure!(
        named_only.load(Ordering::SeqCst) == 1,
        "a backend that was named is not open: {:?}",
        agent.backends()
    );
    // If two agents have all backends, the first in the order is used.
    if setup.mode == Mode::OneProcess && own == AutoOpen::Open {
        let mut choice = Choice::new(setup)?;
        choice.twin("SECOND", false, AutoOpen::Open)?;
        choice.twin("FIRST", true, AutoOpen::Open)?;
        let (one, other) = (choice.agent(setup, None)?, choice.agent(setup, None)?);
        let _kv = other.register("kv", setup.memory(1 << 16, 2)?)?;
        let (peer, near) = connect(&one, setup, &other.metadata()?)?;
        let used = read(&peer, &near).await?;
        ensure!(used == "FIRST", "FIRST serves and is preferred, {used} was used");
        // A list has its own order.
        let one = choice.agent(setup, Some(&["second", "first"]))?;
        let (peer, near) = connect(&one, setup, &other.metadata()?)?;
        let used = read(&peer, &near).await?;
        ensure!(used == "SECOND", "SECOND is named first, {used} was used");
    }
    Ok(())
}

/// B3: unknown, not compiled in, not available: three kinds and three messages, each with the next
/// step.
pub async fn missing_backends_are_three_errors(setup: &Setup) -> Check {
    let mut choice = Choice::new(setup)?;
    choice.registry.add(Absent)?;
    choice.registry = choice.registry.with_names(&[
        BackendName { name: "ABSENT", aliases: &["GONE"], feature: Some("absent") },
        BackendName { name: "OPTIONAL", aliases: &[], feature: Some("optional") },
        BackendName { name: "FUTURE", aliases: &[], feature: None },
    ]);
    let said = |name: &str| -> Result<Error, Failure> {
        let built = choice.agent(setup, Some(&[name]));
        built
            .err()
            .ok_or_else(|| Failure::new(format!("an agent was built with the backend {name}")))
    };
    let unknown = said("OPTOINAL")?;
    ensure!(unknown.kind() == ErrorKind::UnknownBackend, "an unknown name: {unknown:?}");
    let sentence = "backend \"OPTOINAL\" is unknown; did you mean OPTIONAL? known: ";
    ensure!(unknown.to_string().contains(sentence), "an unknown name: {unknown}");
    let not_compiled = said("optional")?;
    ensure!(
        not_compiled.kind() == ErrorKind::NotCompiled,
        "a backend that is not compiled in: {not_compiled:?}"
    );
    let sentence = "backend OPTIONAL is not in this build: enable feature \"optional\"";
    ensure!(
        not_compiled.to_string().contains(sentence),
        "a backend that is not compiled in: {not_compiled}"
    );
    let future = said("FUTURE")?;
    ensure!(future.kind() == ErrorKind::NotCompiled, "a backend of another release: {future:?}");
    ensure!(
        future.to_string().contains("not in this release"),
        "a backend of another release: {future}"
    );
    for name in ["absent", "GONE"] {
        let absent = said(name)?;
        ensure!(
            absent.kind() == ErrorKind::Unavailable,
            "a backend that cannot run here: {absent:?}"
        );
        let sentence = format!("backend ABSENT is unavailable: libabsent.so.0 not found: {CURE}");
        ensure!(absent.to_string().contains(&sentence), "a backend that cannot run here: {absent}");
    }
    // The error for a list without a usable backend contains the reason of each.
    let none = choice.agent(setup, Some(&["ABSENT", "OPTIONAL"]));
    let none = none.err().ok_or_else(|| Failure::new("an agent was built without any backend"))?;
    let both = none.to_string().contains(CURE) && none.to_string().contains("\"optional\"");
    ensure!(both, "the error does not say what to do about each backend: {none}");
    Ok(())
}

/// B4: the route names the backend that carries transfers, and says why the others do not.
pub async fn the_route_explains_itself(setup: &Setup) -> Check {
    let mut target = target(setup)?;
    let mut choice = Choice::new(setup)?;
    choice.twin("TWIN", true, AutoOpen::Open)?;
    choice.registry.add(Absent)?;
    let agent = choice.agent(setup, Some(&["ABSENT", "TWIN", choice.backend]))?;
    let (peer, near) = connect(&agent, setup, &target.far.metadata()?)?;
    peer.ready(CUT_OFF).await?;
    let used = read(&peer, &near).await?;
    let route = peer.route();
    ensure!(
        route.chosen() == Some(choice.backend),
        "{} is connected, the route says {route}",
        choice.backend
    );
    ensure!(used == choice.backend, "the route says {route}, the transfer's result says {used}");
    let verdict = |backend: &str| {
        let found = route.candidates.iter().find(|considered| considered.backend == backend);
        found.map(|considered| &considered.verdict)
    };
    let Some(Verdict::Refused(why)) = verdict("ABSENT") else {
        return Err(Failure::new(format!(
            "the route does not say why ABSENT does not carry: {route}"
        )));
    };
    ensure!(
        why.kind() == ErrorKind::Unavailable && why.to_string().contains(CURE),
        "ABSENT does not carry because {why}"
    );
    let Some(Verdict::Refused(why)) = verdict("TWIN") else {
        return Err(Failure::new(format!(
            "the route does not say why TWIN does not carry: {route}"
        )));
    };
    ensure!(!why.to_string().is_empty(), "TWIN does not carry for no reason");
    let Some(Verdict::Up(how)) = verdict(choice.backend) else {
        return Err(Failure::new(format!(
            "the route does not say how {} carries: {route}",
            choice.backend
        )));
    };
    ensure!(!how.is_empty(), "the route does not say how {} reaches the peer", choice.backend);
    let text = route.to_string();
    for name in ["ABSENT", "TWIN", choice.backend] {
        ensure!(text.contains(name), "the text of the route omits {name}: {text}");
    }
    Ok(())
}
