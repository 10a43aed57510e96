//! Loom models of how threads of core interact, in every possible order: run them with `cargo xtask
//! loom`.

use std::sync::Arc;
use std::time::Duration;

use loom::sync::atomic::{AtomicUsize, Ordering};
use loom::thread;

use crate::ErrorKind;
use crate::completion::{Completion, Promise};
use crate::region::core_of;
use crate::ticket::Ticket;
use crate::transport::LocalRegion;

/// Never reached: a model has no time, and a wait that does not end is a deadlock, which fails the
/// model.
const LONG: Duration = Duration::from_secs(3600);

#[test]
fn one_result_of_two_counts_and_who_waits_is_woken() {
    loom::model(|| {
        let promise = Promise::new();
        let finishes = |value| {
            let promise = Arc::clone(&promise);
            thread::spawn(move || promise.finish(Ok(value)).is_none())
        };
        let (one, two) = (finishes(1), finishes(2));
        let got = Completion::of(Arc::clone(&promise)).wait_blocking(LONG).unwrap();
        let counted = [one.join().unwrap(), two.join().unwrap()];
        assert_eq!(counted, [got == 1, got == 2]);
    });
}

#[test]
fn a_future_is_woken_by_its_result() {
    loom::model(|| {
        let (completion, ticket) = Completion::with_ticket();
        let settles = thread::spawn(move || ticket.settle(Ok(())));
        loom::future::block_on(completion).unwrap();
        settles.join().unwrap();
    });
}

/// A registration whose revocation settles at once. It checks that no transfer uses the memory.
struct UnusedRegion(Arc<AtomicUsize>);

impl LocalRegion for UnusedRegion {
    fn export(&self) -> &[u8] {
        &[]
    }

    fn revoke(&self, done: Ticket) {
        assert_eq!(
            self.0.load(Ordering::SeqCst),
            0,
            "the transports are asked while a transfer uses the memory"
        );
        done.settle(Ok(()));
    }
}

#[test]
fn a_region_is_revoked_once_and_only_when_no_transfer_uses_it() {
    loom::model(|| {
        let users = Arc::new(AtomicUsize::new(0));
        let region = Arc::new(core_of(Arc::new(UnusedRegion(Arc::clone(&users)))));
        let uses = {
            let (region, users) = (Arc::clone(&region), Arc::clone(&users));
            thread::spawn(move || match region.pin() {
                Ok(()) => {
                    users.fetch_add(1, Ordering::SeqCst);
                    users.fetch_sub(1, Ordering::SeqCst);
                    region.unpin();
                }
                Err(why) => assert_eq!(why.kind(), ErrorKind::Revoked),
            })
        };
        region.revoke_at_shutdown().wait_blocking(LONG).unwrap();
        uses.join().unwrap();
    });
}
