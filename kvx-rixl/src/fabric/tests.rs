//! Tests kvx's side of NIXL with a bare agent that makes progress only when the test lets it.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::Instant;

use kvx_backend::fabric::{JobId, Registrar as _};
use kvx_core::backend::Factory as _;
use kvx_core::{Incarnation, Memory, Op, Options, RegionId};

use super::*;
use crate::connection::{self, ConnectionState};
use crate::ffi::{self, Settings, Status};
use crate::peer_loader::{Name, PeerLoader};
use crate::{Rixl, wheel};

const PATIENCE: Duration = Duration::from_secs(10);
const LEN: usize = 256 << 10;
const CONTENT: u8 = 7;

fn opened(name: &str) -> NixlAgent {
    opened_over("UCX", name)
}

/// Opens an agent over a plugin. Over TCP, the peer takes part in every transfer.
fn opened_over(plugin: &str, name: &str) -> NixlAgent {
    let params = [("engine_config".to_owned(), "NET_DEVICES=lo,TLS=tcp".to_owned())];
    let settings = Settings { name, plugin, params: &params, progress_thread: None };
    NixlAgent::open(ffi::open_library(false).expect("the wheel"), &settings).expect("an agent")
}

fn near() -> NixlFabric {
    near_over("UCX")
}

fn near_over(plugin: &str) -> NixlFabric {
    let capabilities = Rixl.available(&Options::default()).expect("the wheel").capabilities;
    let agent = opened_over(plugin, "near");
    agent.register(&cpu_trials::page()).expect("registered");
    let agent_lock = AgentLock::new(agent).expect("a lock");
    let loads = PeerLoader::start("loads".to_owned(), Arc::clone(&agent_lock)).expect("a thread");
    let wakes = WakeSet::new(&[loads.fd(), agent_lock.released_fd()], &[]).expect("a set");
    let peers = Peers::new(c"near".to_owned(), loads);
    let ranges = Arc::new(RegisteredRanges::new(Arc::clone(&agent_lock)));
    NixlFabric::new(agent_lock, ranges, peers, wakes, capabilities, "NIXL".to_owned())
        .expect("a fabric")
}

fn range(memory: &[u8]) -> Range {
    Range {
        segment: MemorySegment::Host,
        address: memory.as_ptr().addr() as u64,
        len: memory.len() as u64,
        device: 0,
    }
}

/// Drives kvx's side until `done` returns true for it and the events so far.
fn until(
    near: &mut NixlFabric,
    mut done: impl FnMut(&mut NixlFabric, &[Event]) -> bool,
) -> Vec<Event> {
    let (mut events, end) = (Vec::new(), Instant::now() + PATIENCE);
    while !done(near, &events) {
        near.poll(&mut events);
        assert!(Instant::now() < end, "{events:?}");
    }
    events
}

/// Connects kvx's side with the agent that the blob describes.
fn connected(near: &mut NixlFabric, far: &mut NixlAgent, blob: &[u8]) {
    near.connect_foreign(EndpointId::from_number(1), blob).expect("well formed");
    until(near, |_, events| {
        far.notifications(|_, _| {});
        events.iter().any(|events| matches!(events, Event::Ready(_)))
    });
}

/// Connects kvx's side with the far agent, which publishes its memory.
fn linked(near: &mut NixlFabric, far: &mut NixlAgent, theirs: &[u8]) -> Name {
    far.register(&range(theirs)).expect("registered");
    let blob = far.whole().expect("a blob");
    connected(near, far, &blob);
    Name::from(c"far")
}

/// Posts a request, which ends when the far agent makes progress. `ours` outlives the process's use
/// of NIXL.
fn note_posted(
    op: Op,
    near: &mut NixlFabric,
    agent: &NixlAgent,
    name: &Name,
    ours: &[u8],
    theirs: &[u8],
) {
    agent.register(&range(ours)).expect("registered");
    let list = |memory: &[u8]| {
        let mut list = agent.list(MemorySegment::Host).expect("a list");
        list.add(memory.as_ptr().addr() as u64, LEN as u64, 0);
        list
    };
    let request = agent.request(op, &list(ours), &list(theirs), name).expect("a request");
    // SAFETY: guaranteed by the caller.
    assert_eq!(unsafe { agent.post(&request) }, State::InProgress);
    near.track(FlightPurpose::Job(JobId::from_number(0)), Arc::new(request), name);
}

fn moved(events: &[Event]) -> bool {
    events.iter().any(|events| matches!(events, Event::Completed { .. }))
}

/// NIXL drops an agent because of metadata that contradicts what it knows, and then answers "not
/// found" about a request that is still in progress with that agent. kvx does not report the end of
/// the request before its last byte has arrived.
fn dropped_while_in_progress() {
    let (theirs, ours) = (vec![CONTENT; LEN], vec![0_u8; LEN]);
    let (mut near, mut far) = (near(), opened("far"));
    far.register(&range(&theirs)).expect("registered");
    let (name, mut region) = (Name::from(c"far"), far.export(&range(&theirs)).expect("a blob"));
    let blob = far.connection().expect("a blob");
    connected(&mut near, &mut far, &blob);

    let agent_lock = Arc::clone(&near.agent_lock);
    let locked = agent_lock.lock();
    let agent = locked.as_ref().expect("it is open");
    agent.load(&region).expect("the far region");
    note_posted(Op::Read, &mut near, agent, &name, &ours, &theirs);
    let key = region.len() - 2; // `|` ends the field and the blob
    region[key] ^= 0x55;
    assert!(agent.load(&region).is_err() && !agent.knows(&name));
    drop(locked);

    let events = until(&mut near, |_, events| !events.is_empty());
    assert!(matches!(events[..], [Event::Broken { .. }]), "{events:?}");
    // SAFETY: bytes of `ours`, which NIXL writes during calls of this thread.
    let arrived = || ours.iter().all(|byte| unsafe { std::ptr::read_volatile(byte) } == CONTENT);
    let events = until(&mut near, |_, events| {
        far.notifications(|_, _| {});
        assert!(!moved(events) || arrived(), "it is reported as ended, but has not");
        arrived()
    });
    if !moved(&events) {
        assert!(!near.stop(), "its end is unknown, so its memory is kept");
    }
    std::mem::forget((near, ours)); // kvx keeps this memory for the life of the process
}

#[test]
fn a_request_goes_on_when_nixl_drops_its_agent() {
    wheel::alone_on_each(
        "fabric::tests::a_request_goes_on_when_nixl_drops_its_agent",
        dropped_while_in_progress,
    );
}

/// A link that ends during its trial leaves a request in progress, which is neither released nor
/// queried again, not even when another agent of that name is connected.
fn gone_while_tried_out() {
    let (mut near, far) = (near(), opened("far"));
    far.register(&cpu_trials::page()).expect("registered");
    let page = memory::Export {
        range: cpu_trials::page(),
        blob: far.export(&cpu_trials::page()).expect("a blob").into(),
    };
    let address =
        Address { name: "far".to_owned(), blob: far.connection().expect("a blob"), page }.encode();
    let identity = Identity { name: "far".into(), incarnation: Incarnation([0; 16]) };
    let endpoint = EndpointId::from_number(1);
    near.connect(endpoint, &identity, &address).expect("well formed");
    until(&mut near, |near, _| !near.flights.is_empty()); // the far end makes no progress
    let request = Arc::clone(&near.flights[0].request);
    near.disconnect(endpoint);
    let again = EndpointId::from_number(2);
    near.connect(again, &identity, &address).expect("well formed");
    until(&mut near, |near, _| matches!(near.peers.access(again), Ok(PeerAccess::Open(_, _, 1))));
    assert_eq!(near.flights.len(), 1, "the earlier one is not counted");
    assert!(Arc::strong_count(&request) > 1, "it is not released");
    near.disconnect(again);
    assert!(
        near.flights.is_empty() && near.agent_lock.is_in_progress(),
        "not even at the exit of the program"
    );
    assert!(!near.stop(), "its agent is kept");
    std::mem::forget((near, far));
}

#[test]
fn a_request_of_a_link_that_is_gone_is_not_released_in_progress() {
    wheel::alone(
        "fabric::tests::a_request_of_a_link_that_is_gone_is_not_released_in_progress",
        gone_while_tried_out,
    );
}

#[test]
fn what_was_begun_before_a_refusal_ends_with_a_broken_connection_alone() {
    let may_continue =
        |status, kind: ErrorKind| NixlFabric::may_continue(status, &kind.because("refused"));
    assert!(may_continue(Status::BACKEND, ErrorKind::Native));
    assert!(
        !may_continue(Status::BACKEND, ErrorKind::PeerLost),
        "the connection carries nothing any more"
    );
    assert!(!may_continue(Status::NOT_FOUND, ErrorKind::Native), "nothing was started");
}

/// A failure on a working connection loses no peer, whether or not other operations are in progress
/// on it. A failure on a connection whose peer has ended loses the peer.
fn found_out() {
    let (theirs, ours) = (vec![CONTENT; LEN], vec![0_u8; LEN]);
    let (mut near, mut far) = (near(), opened("far"));
    let name = linked(&mut near, &mut far, &theirs);
    let agent_lock = Arc::clone(&near.agent_lock);
    let failed = |near: &mut NixlFabric| {
        let locked = agent_lock.lock();
        let agent = locked.as_ref().expect("it is open");
        near.attribute_error(agent, &name, ErrorKind::Native.because("a transfer failed")).kind()
    };
    let mut note_ended = |near: &mut NixlFabric| {
        until(near, |near, _| {
            far.notifications(|_, _| {});
            near.flights.is_empty()
        })
    };
    assert_eq!(failed(&mut near), ErrorKind::Native);
    assert!(note_ended(&mut near).is_empty());
    assert_eq!((failed(&mut near), near.flights.len()), (ErrorKind::Native, 0), "it works");

    {
        let locked = agent_lock.lock();
        note_posted(
            Op::Write,
            &mut near,
            locked.as_ref().expect("it is open"),
            &name,
            &ours,
            &theirs,
        );
    }
    assert_eq!(
        (failed(&mut near), near.flights.len()),
        (ErrorKind::Native, 2),
        "it ends after the write"
    );
    let events = note_ended(&mut near);
    assert!(matches!(events[..], [Event::Completed { result: Ok(()), .. }]), "{events:?}");
    assert!(matches!(near.peers.access(EndpointId::from_number(1)), Ok(PeerAccess::Open(_, _, 0))));

    drop(far);
    let known = near.peers.any_memory(&name).expect("the blob says");
    let mut looks = Vec::new(); // they end with the connection
    until(&mut near, |near, _| {
        let locked = near.agent_lock.lock();
        match connection::look(locked.as_ref().expect("it is open"), &name, &known) {
            ConnectionState::Pending(request) => looks.push(request),
            ConnectionState::Works => {}
            ConnectionState::Broken => return true,
        }
        false
    });
    assert_eq!(failed(&mut near), ErrorKind::PeerLost);
    assert!(near.peers.access(EndpointId::from_number(1)).is_err(), "it stays lost");
    let events = until(&mut near, |_, events| !events.is_empty());
    assert!(matches!(events[..], [Event::Broken { .. }]), "{events:?}");
    assert_eq!(failed(&mut near), ErrorKind::PeerLost, "and is reported once");
    std::mem::forget((near, ours, looks));
}

#[test]
fn a_peer_whose_connection_is_broken_is_lost() {
    wheel::alone("fabric::tests::a_peer_whose_connection_is_broken_is_lost", found_out);
}

/// Returns whether kvx may query NIXL about requests in progress to a peer that failed: NIXL has
/// dropped the peer, or has detected that it can no longer reach it.
fn asked_after_the_blame(dropped: bool) -> bool {
    let (theirs, ours) = (vec![CONTENT; LEN], vec![0_u8; LEN]);
    let (mut near, mut far) = (near(), opened("far"));
    let name = linked(&mut near, &mut far, &theirs);
    let agent_lock = Arc::clone(&near.agent_lock);
    let locked = agent_lock.lock();
    let agent = locked.as_ref().expect("it is open");
    note_posted(Op::Read, &mut near, agent, &name, &ours, &theirs);
    if dropped {
        let mut region = far.export(&range(&theirs)).expect("a blob");
        let key = region.len() - 2; // `|` ends the field and the blob
        region[key] ^= 0x55;
        assert!(agent.load(&region).is_err());
    } else {
        drop(far);
    }
    let end = Instant::now() + PATIENCE;
    while near.attribute_error(agent, &name, ErrorKind::Native.because("a transfer failed")).kind()
        != ErrorKind::PeerLost
    {
        assert!(Instant::now() < end, "it is lost");
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(agent.knows(&name), !dropped);
    let asked = near.peers.can_be_asked(&name);
    std::mem::forget((near, ours, theirs));
    asked
}

#[test]
fn a_lost_peer_that_nixl_has_dropped_is_loaded_once_more() {
    let body = || {
        assert!(!asked_after_the_blame(true), "not before it is loaded again");
        assert!(asked_after_the_blame(false), "it knows the peer");
    };
    wheel::alone("fabric::tests::a_lost_peer_that_nixl_has_dropped_is_loaded_once_more", body);
}

/// All requests in progress to a peer end with it, even if NIXL drops the peer at the first end
/// that it detects and no process listens at its address any more.
fn ended_with_the_peer() {
    let (theirs, ours) = (vec![CONTENT; LEN], [0; 3].map(|byte| vec![byte; LEN]));
    let (mut near, mut far) = (near(), opened("far"));
    let name = linked(&mut near, &mut far, &theirs);
    let agent_lock = Arc::clone(&near.agent_lock);
    {
        let locked = agent_lock.lock();
        let agent = locked.as_ref().expect("it is open");
        for (op, ours) in [Op::Read, Op::Write, Op::Read].into_iter().zip(&ours) {
            note_posted(op, &mut near, agent, &name, ours, &theirs);
        }
    }
    drop(far);
    let events = until(&mut near, |near, _| near.flights.is_empty());
    let lost = |events: &&Event| match events {
        Event::Completed { result: Err(why), .. } => why.kind() == ErrorKind::PeerLost,
        _ => false,
    };
    assert_eq!(events.iter().filter(lost).count(), 3, "{events:?}");
    assert!(near.stop(), "no request is in progress");
    std::mem::forget(ours);
}

#[test]
fn what_is_in_progress_to_a_peer_ends_with_it() {
    wheel::alone_on_each(
        "fabric::tests::what_is_in_progress_to_a_peer_ends_with_it",
        ended_with_the_peer,
    );
}

const OTHER: &str = "OTHER";

/// A folder of plugins with UCX under its own name and another one. Removed when dropped.
struct Plugins(PathBuf);

impl Plugins {
    fn beside(library: &Path) -> std::io::Result<Self> {
        let plugins =
            Plugins(std::env::temp_dir().join(format!("kvx-rixl-plugins-{}", std::process::id())));
        // Left by a killed process with the same process id.
        std::fs::remove_dir_all(&plugins.0).ok();
        std::fs::create_dir_all(plugins.folder())?;
        let wheel = library.parent().expect("a folder");
        for name in ["UCX", OTHER] {
            let file = plugins.folder().join(format!("libplugin_{name}.so"));
            symlink(wheel.join("plugins/libplugin_UCX.so"), file)?;
        }
        // The place where a plugin searches for its dependencies.
        symlink(wheel.with_file_name("nixl_cu12.libs"), plugins.0.join("nixl_cu12.libs"))?;
        Ok(plugins)
    }

    fn folder(&self) -> PathBuf {
        self.0.join("wheel/plugins")
    }
}

impl Drop for Plugins {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.0).ok();
    }
}

/// Uses UCX under another name, as a plugin whose answer to a read of no bytes has no known
/// meaning.
fn unasked() {
    let (theirs, ours) = (vec![CONTENT; LEN], vec![0_u8; LEN]);
    let (mut near, mut far) = (near_over(OTHER), opened_over(OTHER, "far"));
    let name = linked(&mut near, &mut far, &theirs);
    let agent_lock = Arc::clone(&near.agent_lock);
    let locked = agent_lock.lock();
    let agent = locked.as_ref().expect("it is open");
    note_posted(Op::Write, &mut near, agent, &name, &ours, &theirs);
    assert_eq!(
        near.attribute_error(agent, &name, ErrorKind::Native.because("a transfer failed")).kind(),
        ErrorKind::Native
    );
    assert_eq!(near.flights.len(), 1, "no read waits for the write");
    std::mem::forget((near, ours, theirs));
}

#[test]
fn a_plugin_other_than_ucx_is_not_asked_by_a_read_of_no_bytes() {
    const NAME: &str = "fabric::tests::a_plugin_other_than_ucx_is_not_asked_by_a_read_of_no_bytes";
    let Some(library) = wheel::library() else {
        return kvx_testkit::skip(NAME, wheel::ABSENT.0, wheel::ABSENT.1);
    };
    let plugins = Plugins::beside(&library).expect("a new folder takes new names");
    wheel::alone_with(NAME, &[("NIXL_PLUGIN_DIR", &plugins.folder())], unasked);
}

/// Callers do not call NIXL if peers' transfers use this side's CPU: such a call could take long.
fn callers_stay_out() {
    let mut near = near();
    let only = |near: &mut NixlFabric| near.poll(&mut Vec::new()).own_thread_only;
    near.has_rdma = false;
    assert!(!only(&mut near));
    near.peers.needs_cpu = true;
    assert!(only(&mut near));
    near.peers.needs_cpu = false;
    near.ranges.foreign_metadata().expect("a blob");
    assert!(!only(&mut near), "nothing was published");
    let memory = Arc::new(Memory::owned(vec![0; 64]));
    near.ranges.register(RegionId(1), &memory).expect("registered");
    near.ranges.foreign_metadata().expect("a blob");
    assert!(only(&mut near), "a foreign agent may use published memory");
    near.has_rdma = true;
    assert!(!only(&mut near));
}

#[test]
fn nobody_but_the_reactor_meets_what_comes_over_tcp() {
    wheel::alone(
        "fabric::tests::nobody_but_the_reactor_meets_what_comes_over_tcp",
        callers_stay_out,
    );
}
