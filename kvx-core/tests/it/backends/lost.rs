//! Posts to a lost peer whose address answers no more, as over RDMA or on a host that is down.

use std::future::Future;
use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::task::{Context as TaskContext, Poll, Waker};
use std::time::{Duration, Instant};

use kvx_core::backend::{Events, LinkId, LinkState};
use kvx_core::{Agent, ErrorKind, Grid, Memory, Peer, Plan, Region, Registry, Result};
use kvx_testkit::{StillBackend, test};

const PATIENCE: Duration = Duration::from_secs(10);

/// The links that transports were asked for, with the receiver of their reports.
type Links = Arc<Mutex<Vec<(LinkId, Arc<dyn Events>)>>>;

/// Reports a state of the link that was asked for last.
fn report(links: &Links, state: LinkState) {
    let (id, events) = links.lock().unwrap().last().cloned().unwrap();
    events.link(id, state);
}

/// Posts a read whose deadline is far.
fn read(near: &Region, peer: &Peer) -> kvx_core::Transfer {
    let grid = Grid::packed(64, 1);
    let theirs = peer.region("kv").unwrap().grid(grid).unwrap().blocks([0]);
    let plan = Plan::read(near.grid(grid).unwrap().blocks([0]), theirs).unwrap();
    peer.transfer(&plan).deadline(Duration::from_secs(60)).post().unwrap()
}

/// Returns the error of a future that has one at once.
fn error_now<T>(future: impl Future<Output = Result<T>>) -> ErrorKind {
    match pin!(future).poll(&mut TaskContext::from_waker(Waker::noop())) {
        Poll::Ready(Err(error)) => error.kind(),
        Poll::Ready(Ok(_)) => panic!("it succeeded on a lost handle"),
        Poll::Pending => panic!("it waits"),
    }
}

#[test]
fn an_unanswered_probe_delays_posts_once_and_its_late_answer_counts() {
    let links = Links::default();
    let mut registry = Registry::new();
    // The links come up only when the test reports it.
    let asked = Arc::clone(&links);
    let on_link = move |id, events| asked.lock().unwrap().push((id, events));
    registry.add(StillBackend::new("SILENT", on_link, drop)).unwrap();
    let agent = |name| Agent::builder(name).registry(registry.clone()).build().unwrap();
    let (near_agent, far_agent) = (agent("near"), agent("far"));
    let register = |agent: &Agent| agent.register("kv", Memory::pool(4096).build().unwrap());
    let (near, _far) = (register(&near_agent).unwrap(), register(&far_agent).unwrap());
    let peer = near_agent.connect(far_agent.metadata().unwrap()).unwrap();
    report(&links, LinkState::Up);
    read(&near, &peer).wait_blocking(PATIENCE).unwrap();

    let ended = ErrorKind::PeerLost.because("its process has ended").with_backend("SILENT");
    report(&links, LinkState::Lost(ended));
    let begun = Instant::now();
    let probing = read(&near, &peer);
    assert_eq!(links.lock().unwrap().len(), 2, "the post asks who answers there now");
    assert_eq!(error_now(peer.notify(b"hello", PATIENCE)), ErrorKind::PeerLost);
    assert_eq!(error_now(peer.ready(PATIENCE)), ErrorKind::PeerLost);
    assert_eq!(probing.wait_blocking(PATIENCE).unwrap_err().kind(), ErrorKind::PeerLost);
    assert!(begun.elapsed() < PATIENCE / 2, "it waited for {:?}", begun.elapsed());
    assert_eq!(error_now(read(&near, &peer)), ErrorKind::PeerLost);
    assert_eq!(links.lock().unwrap().len(), 2, "the first probe is still under way");

    report(&links, LinkState::Restarted);
    assert_eq!(error_now(read(&near, &peer)), ErrorKind::PeerRestarted);
}
