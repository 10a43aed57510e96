//! Every order of events between one prefill and one decode, by the model checker stateright.
//!
//! The transitions are the functions of the engine ([`Scheduler`] and [`Worker`]) as its runtime
//! calls them. The rest is the world around them: clients, a router, blocks with contents and
//! generation counters, messages, transfers and handshakes under way, and one clock. An event
//! starts, ends or aborts a request, lets an engine step, delivers, loses or repeats a message,
//! answers a question of an engine, ends a transfer, reuses a free block, restarts an engine, or
//! lets the time of the next deadline come. In every order of these:
//!
//! - no load yields contents of a block that its owner has reused;
//! - no block is freed or given away while a transfer under a live lease, or one that writes, may
//!   access it;
//! - each lease and each load ends once;
//! - each request ends by its deadline;
//! - when nothing happens any more, no block, lease, load or connection is left.
//!
//! Two states are equal if all that their engines print with `Debug` is, except what [`encoding`]
//! omits, and with times and stamps counted from now. Blocks of a request that has ended for its
//! client have no contents. An engine has one block unless a scenario says otherwise, so that the
//! second request gets the block of the first.
//!
//! The model leaves out: several blocks, ranks or KV cache groups of a request, several turns,
//! drifting clocks, decodes without grants, transfers that their transport forgets, and engines
//! that step late. A read or write takes effect at one moment, after it began and before it is
//! reported. Of equal messages under way, one arrives. A request ends as soon as it is loaded. The
//! simulation has all of these, in random orders.
//!
//! A known bug of another engine, made by one transition, must be found.
//!
//! [`Scheduler`]: kvx_vllm::engine::Scheduler
//! [`Worker`]: kvx_vllm::engine::Worker

mod encoding;
mod events;
mod scene;
mod state;
mod transitions;

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use kvx_testkit::{Tier, test, trial_within};
use kvx_vllm::params::TransferMode;
use libtest_mimic::Trial;
use stateright::{Checker, HasDiscoveries, Model, Property};

use self::events::Event;
use self::scene::{Bug, Faults, Role, Scene, Sight};
use self::state::{Broken, State};

const STALE: &str = "no load yields a reused block";
const IN_USE: &str = "no block is freed during a transfer";
const TWICE: &str = "leases and loads end once";
const LATE: &str = "requests end by their deadline";
const LEAK: &str = "blocks, leases and loads are released in the end";

impl Model for Scene {
    type State = State;
    type Action = Event;

    fn init_states(&self) -> Vec<State> {
        vec![State::new(self).seal(self)]
    }

    fn actions(&self, state: &State, events: &mut Vec<Event>) {
        events.extend(state.events(self));
    }

    fn next_state(&self, state: &State, event: Event) -> Option<State> {
        Some(state.after(self, event))
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always(STALE, |_, state: &State| state.broken != Some(Broken::Stale)),
            Property::always(IN_USE, |_, state: &State| state.broken != Some(Broken::InUse)),
            Property::always(TWICE, |_, state: &State| state.broken != Some(Broken::Twice)),
            Property::always(LATE, |_, state: &State| state.broken != Some(Broken::Late)),
            Property::always(LEAK, |_, state: &State| state.broken != Some(Broken::Leak)),
        ]
    }
}

/// The result of a check.
struct Report {
    states: usize,
    depth: usize,
    sights: BTreeSet<Sight>,
}

/// Checks a scenario, to a depth if there is one. Fails with the events that break a promise.
fn hold(name: &str, scene: Scene, depth: Option<usize>) -> Report {
    let start = Instant::now();
    let sights = scene.sights();
    // Several threads may first reach a state on a longer path, and would not look beyond it at the
    // depth's end.
    let threads = match depth {
        Some(_) => 1,
        None => std::thread::available_parallelism().map_or(1, usize::from),
    };
    let checker = scene.checker().threads(threads).finish_when(HasDiscoveries::AnyFailures);
    let checker = match depth {
        Some(depth) => checker.target_max_depth(depth + 2),
        None => checker,
    };
    let checker = checker.spawn_bfs().join();
    if let Some((property, path)) = checker.discoveries().into_iter().next() {
        let why = path.last_state().why.clone();
        let events: String =
            path.into_actions().iter().map(|event| format!("\n  {event:?}")).collect();
        panic!("{name}: {property}: {}{events}", why.as_deref().unwrap_or_default());
    }
    let report = Report {
        states: checker.unique_state_count(),
        depth: checker.max_depth(),
        sights: sights(),
    };
    println!(
        "{name}: {} states ({} with repetitions), depth {}, {:.1} s, {:?}",
        report.states,
        checker.state_count(),
        report.depth,
        start.elapsed().as_secs_f64(),
        report.sights
    );
    report
}

/// Returns the shortest events that break a promise.
fn shortest(scene: impl Fn() -> Scene, property: &'static str) -> Vec<String> {
    // The checker reports one of the first, not the first: shorter ones are searched until there
    // are none.
    let mut least: Option<Vec<Event>> = None;
    loop {
        let depth = least.as_ref().map_or(usize::MAX, |events| events.len() + 1);
        let finish = HasDiscoveries::AllOf([property].into());
        let checker = scene().checker().finish_when(finish).target_max_depth(depth);
        match (checker.spawn_bfs().join().discovery(property), least) {
            (Some(path), _) => least = Some(path.into_actions()),
            (None, Some(least)) => return least.iter().map(|event| format!("{event:?}")).collect(),
            (None, None) => panic!("the bug is not found"),
        }
    }
}

/// Asserts that events with these beginnings happen in this order.
fn assert_order(events: &[String], expected: &[&str]) {
    println!("{events:#?}");
    let mut left = events.iter();
    for beginning in expected {
        assert!(
            left.any(|event| event.starts_with(beginning)),
            "{beginning} is missing, or happens too early"
        );
    }
}

fn pull(requests: usize, faults: Faults) -> Scene {
    Scene::new(TransferMode::Pull, requests, faults)
}

fn push(requests: usize, faults: Faults) -> Scene {
    Scene::new(TransferMode::Push, requests, faults)
}

/// One fault of any kind.
const ONE: Faults = Faults { losses: 1, repeats: 1, aborts: 1, restarts: 1, total: 1 };

#[test]
fn two_reads_keep_their_promises_in_every_order() {
    let report = hold("pull, 2 requests", pull(2, Faults::NONE), None);
    let expected = [Sight::Loaded, Sight::Stale, Sight::Expired, Sight::Released, Sight::Renewed];
    assert!(report.sights.is_superset(&expected.into()), "{:?}", report.sights);
    assert!(report.states > 10_000, "{} states", report.states);
}

#[test]
fn a_read_keeps_its_promises_with_one_fault_in_every_order() {
    let report = hold("pull, 1 request, 1 fault", pull(1, ONE), None);
    let expected = [Sight::Loaded, Sight::Stale, Sight::Held, Sight::Transfer, Sight::Refused];
    assert!(report.sights.is_superset(&expected.into()), "{:?}", report.sights);
    assert!(report.states > 5_000, "{} states", report.states);
}

#[test]
fn a_write_keeps_its_promises_in_every_order() {
    let report = hold("push, 1 request", push(1, Faults::NONE), None);
    let expected = [Sight::Loaded, Sight::Fenced, Sight::Expired, Sight::Renewed, Sight::Held];
    assert!(report.sights.is_superset(&expected.into()), "{:?}", report.sights);
    assert!(report.states > 5_000, "{} states", report.states);
}

/// A larger scenario, for `cargo xtask test --whole`: its name, and the depth to which it runs.
type Larger = (&'static str, fn() -> Scene, Option<usize>);

const LARGER: [Larger; 4] = [
    ("one_write_with_one_fault", || push(1, ONE), None),
    ("two_writes", || push(2, Faults::NONE), Some(20)),
    ("two_reads_with_one_fault", || pull(2, ONE), Some(16)),
    ("two_reads_at_a_time", || pull(2, Faults::NONE).with_blocks(2), Some(16)),
];

/// The time limit of a larger scenario.
const LIMIT: Duration = Duration::from_secs(20 * 60);

/// Returns the larger scenarios as tests.
pub(crate) fn trials() -> Vec<Trial> {
    if !Tier::Whole.runs_or_says("larger scenarios of the model of a prefill and a decode") {
        return Vec::new();
    }
    let trial = |(name, scene, depth): Larger| {
        trial_within(LIMIT, format!("model::larger::{name}"), move || {
            hold(name, scene(), depth);
        })
    };
    LARGER.into_iter().map(trial).collect()
}

// Without that, the model would have a state for each time.
#[test]
fn states_are_equal_at_every_time() {
    let scene = pull(1, Faults::NONE);
    let early = State::new(&scene);
    let mut late = early.clone();
    late.pass_to(early.now + 77);
    let events = || [Event::Start(0), Event::Prefilled(0), Event::Step(Role::Prefill)];
    let [early, late] = [early, late].map(|state| {
        events().into_iter().fold(state.seal(&scene), |state, event| state.after(&scene, event))
    });
    assert!(early == late, "only the time differs");
    assert!(early != early.after(&scene, Event::Pass), "a lease has become shorter");
}

const ABORT: Faults = Faults { aborts: 1, total: 1, ..Faults::NONE };

// vllm#52234: a decode read blocks that the prefill had reused, and answered without an error
#[test]
fn without_generations_a_load_of_a_reused_block_is_found() {
    let events = shortest(|| pull(1, Faults::NONE).with_bug(Bug::NoGenerations), STALE);
    let expected =
        ["Prefilled(0)", "Pass", "Step(Prefill)", "Reuse(0)", "Arrive(Decode, 0)", "Step(Decode)"];
    assert_order(&events, &expected);
}

// vllm#46283: the blocks of an aborted load never returned, because the prefill never reported it
#[test]
fn if_only_the_peer_ends_a_load_the_leak_after_an_abort_is_found() {
    let events = shortest(|| push(1, ABORT).with_bug(Bug::OnlyThePeerEndsALoad), LEAK);
    assert_order(&events, &["Start(0)", "Admit(0)", "Step(Decode)", "Abort(0)"]);
    assert!(!events.iter().any(|event| event.starts_with("Arrive")), "the prefill writes nothing");
}

// sglang#38961: a decode gave blocks back while the prefill could still write to them
#[test]
fn if_a_decode_does_not_wait_for_the_writer_the_early_release_is_found() {
    let events = shortest(|| push(1, ABORT).with_bug(Bug::ReleasesBeforeTheWriteEnds), IN_USE);
    assert_order(
        &events,
        &["Prefilled(0)", "Abort(0)", "Answer(Decode, Fence(0))", "Step(Decode)"],
    );
    assert!(!events.iter().any(|event| event.starts_with("Arrive")), "the write goes on");
}

// sglang#38961: a prefill forgot an aborted write, and freed the blocks that it still read
#[test]
fn if_a_prefill_forgets_a_write_the_early_release_is_found() {
    let events = shortest(|| push(1, ABORT).with_bug(Bug::ForgetsTheWrite), IN_USE);
    assert_order(&events, &["Prefilled(0)", "Abort(0)", "Step(Prefill)"]);
    assert!(!events.iter().any(|event| event.starts_with("Arrive")), "the write goes on");
}
