//! A transport that does not close delays no other transport.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use kvx_core::backend::{AutoOpen, Placement, Ticket};
use kvx_core::{Agent, ErrorKind, Registry};
use kvx_testkit::test;

use super::still::Still;

/// Returns a backend that opens without being named, and closes by `shutdown`.
fn closing_by(
    name: &'static str,
    order: u32,
    shutdown: impl Fn(Ticket) + Send + Sync + 'static,
) -> Still {
    let placement = Placement { order, auto_open: AutoOpen::Open, speaks_for: &[] };
    Still { name, placement, foreign_metadata: None, shutdown: Arc::new(shutdown) }
}

#[test]
fn a_transport_that_does_not_close_keeps_neither_the_shutdown_nor_the_other_ones() {
    let (go_on, end) = mpsc::channel::<()>();
    let (end, closed) = (Mutex::new(end), Arc::new(AtomicUsize::new(0)));
    let others = Arc::clone(&closed);
    let mut registry = Registry::new();
    let stuck = move |done: Ticket| {
        // Blocks until the other end is dropped, or until the test would have failed.
        end.lock()
            .expect("no thread panics while holding it")
            .recv_timeout(Duration::from_secs(10))
            .ok();
        done.settle(Ok(()));
    };
    let fine = move |done: Ticket| {
        others.fetch_add(1, Ordering::SeqCst);
        done.settle(Ok(()));
    };
    registry.add(closing_by("STUCK", 0, stuck)).unwrap().add(closing_by("FINE", 1, fine)).unwrap();
    let agent = Agent::builder("a").registry(registry.clone()).build().unwrap();

    let begun = Instant::now();
    let error = agent.shutdown(Duration::from_millis(300)).join().unwrap_err();
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
    assert_eq!(error.kind(), ErrorKind::TimedOut);
    assert!(error.to_string().contains("1 transports not closed STUCK"), "{error}");
    assert_eq!(closed.load(Ordering::SeqCst), 1, "the other one has closed");
    drop(go_on);
}

#[test]
fn a_shutdown_waits_for_threads_that_end_after_the_ticket_settles() {
    let ended = Arc::new(AtomicUsize::new(0));
    let counts = Arc::clone(&ended);
    let mut registry = Registry::new();
    let slow = move |done: Ticket| {
        done.settle(Ok(()));
        std::thread::sleep(Duration::from_millis(50)); // like a thread that is joined
        counts.fetch_add(1, Ordering::SeqCst);
    };
    registry.add(closing_by("SLOW", 0, slow)).unwrap();
    Agent::builder("a")
        .registry(registry.clone())
        .build()
        .unwrap()
        .shutdown(Duration::from_secs(10))
        .join()
        .unwrap();
    assert_eq!(ended.load(Ordering::SeqCst), 1);
}
