//! kvx's end of NIXL, and a bare agent that works only when the test lets it.

use std::time::Instant;

use kvx_core::transport::Factory as _;
use kvx_core::{Op, Options};

use super::*;
use crate::ffi::{Library, Settings};
use crate::loads::Loads;
use crate::{Rixl, wheel};

const PATIENCE: Duration = Duration::from_secs(10);
const LEN: usize = 256 << 10;
const CONTENT: u8 = 7;

/// Over TCP the peer has its part in all that is moved.
fn opened(name: &str) -> Agent {
    let params = [("engine_config".to_owned(), "NET_DEVICES=lo,TLS=tcp".to_owned())];
    let settings = Settings { name, plugin: "UCX", params: &params, progress_thread: None };
    Agent::open(Library::open(false).expect("the wheel"), &settings).expect("an agent")
}

fn near() -> Nixl {
    let capabilities = Rixl.available(&Options::default()).expect("the wheel").capabilities;
    let turnstile = Turnstile::new(opened("near")).expect("a turnstile");
    let loads = Loads::start("loads".to_owned(), Arc::clone(&turnstile)).expect("a thread");
    let wakes = Wakes::new(&[loads.fd(), turnstile.bell()], &[]).expect("a set");
    let peers = Peers::new(c"near".to_owned(), loads);
    let ranges = Arc::new(Ranges::new(Arc::clone(&turnstile)));
    Nixl::new(turnstile, ranges, peers, wakes, capabilities, "NIXL".to_owned()).expect("a fabric")
}

fn range(memory: &[u8]) -> Range {
    Range {
        segment: Segment::Host,
        address: memory.as_ptr().addr() as u64,
        len: memory.len() as u64,
        device: 0,
    }
}

/// Lets kvx's end work until `done` says that it has, by itself and what has happened so far.
fn until(near: &mut Nixl, mut done: impl FnMut(&Nixl, &[Happened]) -> bool) -> Vec<Happened> {
    let (mut happened, end) = (Vec::new(), Instant::now() + PATIENCE);
    while !done(near, &happened) {
        near.poll(&mut happened);
        assert!(Instant::now() < end, "{happened:?}");
    }
    happened
}

fn moved(happened: &[Happened]) -> bool {
    happened.iter().any(|happened| matches!(happened, Happened::Moved { .. }))
}

/// NIXL drops an agent over metadata that contradicts what it knows, and answers "not found" then when it is asked after a request
/// that still goes on with that agent: the request is not told to have ended before its last byte is there.
fn dropped_while_in_progress() {
    let (there, here) = (vec![CONTENT; LEN], vec![0_u8; LEN]);
    let (mut near, mut far) = (near(), opened("far"));
    far.register(&range(&there)).expect("registered");
    let (endpoint, name) = (EndpointId::from_number(1), Name::from(c"far"));
    let mut region = far.export(&range(&there)).expect("a blob");
    near.connect_foreign(endpoint, &far.connection().expect("a blob")).expect("well formed");
    until(&mut near, |_, happened| {
        far.notifications(|_, _| {});
        happened.iter().any(|happened| matches!(happened, Happened::Ready(_)))
    });

    let turnstile = Arc::clone(&near.turnstile);
    let passed = turnstile.pass();
    let agent = passed.as_ref().expect("it is open");
    agent.register(&range(&here)).expect("registered");
    agent.load(&region).expect("the far region");
    let list = |memory: &[u8]| {
        let mut list = agent.list(Segment::Host).expect("a list");
        list.add(memory.as_ptr().addr() as u64, LEN as u64, 0);
        list
    };
    let request = agent.request(Op::Read, &list(&here), &list(&there), &name).expect("a request");
    // SAFETY: `here` outlives the process's use of NIXL.
    assert_eq!(unsafe { agent.post(&request) }, State::InProgress);
    near.peers.flies(&name);
    let job = Some(JobId::from_number(0));
    near.flights.push(Flight { job, request: Arc::new(request), peer: Arc::clone(&name) });
    let key = region.len() - 2; // a bar ends the field, and the blob
    region[key] ^= 0x55;
    assert!(agent.load(&region).is_err() && !agent.knows(&name));
    drop(passed);

    let happened = until(&mut near, |_, happened| !happened.is_empty());
    assert!(matches!(happened[..], [Happened::Broken { .. }]), "{happened:?}");
    // SAFETY: bytes of `here`, which NIXL writes in the calls of this thread.
    let arrived = || here.iter().all(|byte| unsafe { std::ptr::read_volatile(byte) } == CONTENT);
    let happened = until(&mut near, |_, happened| {
        far.notifications(|_, _| {});
        assert!(!moved(happened) || arrived(), "it is said to have ended, and has not");
        arrived()
    });
    if !moved(&happened) {
        assert!(!near.stop(), "nobody can tell that it has ended, and its memory is kept");
    }
    std::mem::forget((near, here)); // what is kept is kept
}

#[test]
fn a_request_goes_on_when_nixl_drops_its_agent() {
    wheel::alone("fabric::tests::a_request_goes_on_when_nixl_drops_its_agent", dropped_while_in_progress);
}
