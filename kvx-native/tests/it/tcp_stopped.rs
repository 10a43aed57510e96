//! An agent whose process was stopped keeps its links: it was away, not its peers.

use std::net::TcpListener;
use std::time::Duration;

use crate::ends::child::{self, Line, Other};
use crate::tcp_pair::raw::{BARE, Raw, invitation_of};
use crate::tcp_pair::{CUT_OFF, agent_with, registry};
use kvx_core::{Agent, ErrorKind, Grid, Memory, Options, Peer, Plan, Result};
use kvx_testkit::test;

/// The children's peer timeout.
const PATIENCE: Duration = Duration::from_secs(3);
/// The time limit for operations that end only when the child continues.
const HELD: Duration = Duration::from_secs(30);

/// The variable with a child's role.
const ROLE: &str = "KVX_TCP_TEST_ROLE";

/// Plays a role and ends the process, if it was started for that.
pub(crate) fn play_if_asked() {
    if let Some((role, line)) = child::role(ROLE) {
        play(&role, line);
        std::process::exit(0);
    }
}

/// Connects to the parent, and reports the result.
fn play(role: &str, mut line: Line) {
    let options = if role == "connects" { BARE } else { "{}" }; // for an owner that the test plays
    let options = Options::parse(options).unwrap();
    let own = Agent::builder(role)
        .options(options)
        .peer_timeout(PATIENCE)
        .registry(registry())
        .build()
        .unwrap();
    if role == "owns" {
        let _pool = own.register("kv", Memory::owned(vec![0; 4096])).unwrap();
        line.say(&own.metadata().unwrap());
        line.hear();
        return;
    }
    let peer = own.connect(line.hear().unwrap()).unwrap();
    let ready = peer.ready(HELD).wait_blocking(HELD);
    if role == "waits" {
        ready.unwrap();
        waits(&peer, &mut line);
    } else {
        line.say(told(ready).as_bytes());
    }
    line.hear();
}

/// Waits for the parent to take notifications, whereupon all but the first are acknowledged.
fn waits(peer: &Peer, line: &mut Line) {
    let mut sent: Vec<_> = (0..5u8).map(|number| peer.notify([number], HELD)).collect();
    sent.remove(0).wait_blocking(HELD).unwrap();
    line.say(b"waiting");
    let all = sent.into_iter().try_for_each(|acknowledged| acknowledged.wait_blocking(HELD));
    line.say(told(all).as_bytes());
}

fn told(result: Result<()>) -> String {
    result.map_or_else(|error| error.to_string(), |()| "ok".into())
}

/// Lets time pass without events for `owner`.
fn pass(owner: &Agent, time: Duration) {
    assert_eq!(
        owner.wait_for_senders(b"never sent", 1, time).wait_blocking(CUT_OFF).unwrap_err().kind(),
        ErrorKind::TimedOut
    );
}

#[test]
fn an_agent_that_was_stopped_does_not_lose_its_peer() {
    let owner =
        Agent::builder("owner").notifications(1, 64 << 10).registry(registry()).build().unwrap();
    let mut other = Other::start(ROLE, "waits");
    other.say(&owner.metadata().unwrap());
    assert_eq!(other.hear(), b"waiting");
    other.stop();
    pass(&owner, PATIENCE * 2);
    other.go_on();
    // The child checks its peer before it has another answer.
    pass(&owner, PATIENCE);
    for _ in 0..5 {
        owner.notification(CUT_OFF).join().unwrap();
    }
    assert_eq!(String::from_utf8(other.hear()).unwrap(), "ok");
}

#[test]
fn a_stopped_peer_is_lost_even_if_each_write_is_given_up_early() {
    let timeout = Duration::from_millis(800);
    let reader =
        Agent::builder("reader").peer_timeout(timeout).registry(registry()).build().unwrap();
    let ours = reader.register("ours", Memory::owned(vec![1; 4096])).unwrap();
    let mut other = Other::start(ROLE, "owns");
    let peer = reader.connect(other.hear()).unwrap();
    let grid = Grid::packed(64, 4);
    let theirs = peer.region("kv").unwrap().grid(grid).unwrap();
    let plan = Plan::write(ours.grid(grid).unwrap().blocks([0]), theirs.blocks([1])).unwrap();
    let write =
        |deadline: Duration| peer.transfer(&plan).deadline(deadline).post()?.wait_blocking(CUT_OFF);
    write(CUT_OFF).unwrap();
    other.stop();
    // Each deadline is shorter than the peer timeout, and nothing is in flight between two writes.
    let mut kinds = (0..30).map(|_| write(timeout / 4).unwrap_err().kind());
    let other_kind = kinds.find(|kind| *kind != ErrorKind::TimedOut);
    assert_eq!(other_kind, Some(ErrorKind::PeerLost), "30 consecutive writes timed out");
    assert_eq!(peer.loss(CUT_OFF).join().unwrap().kind(), ErrorKind::PeerLost);
    other.go_on();
}

#[test]
fn an_answer_that_arrives_while_the_initiator_is_stopped_completes_the_handshake() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let advertised = format!(r#"{{"tcp": {{"advertise": "{}"}}}}"#, listener.local_addr().unwrap());
    let owner = agent_with("owner", &advertised, None);
    let mut other = Other::start(ROLE, "connects");
    other.say(&owner.metadata().unwrap());
    let accept = || Raw::of(listener.accept().unwrap().0);
    let mut small = accept();
    let invitation = invitation_of(&owner);
    assert_eq!(small.welcome(&invitation), 0);
    let mut bulk = [accept(), accept()];
    bulk[0].welcome(&invitation);
    // Its last lane waits only for the answer.
    bulk[1].welcome_when(&invitation, || other.stop());
    pass(&owner, PATIENCE * 2);
    other.go_on();
    assert_eq!(String::from_utf8(other.hear()).unwrap(), "ok");
}
