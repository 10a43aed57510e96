//! Device memory over SHM and TCP: devices that are slow, fail, or lose copies.

mod ends;
mod routes;

use std::task::{Context, Waker};
use std::time::{Duration, Instant};

use ends::{BLOCK, BOTH, Busy, CUT_OFF, Ends, OPS};
use kvx_core::{Completion, ErrorKind, Op};
use kvx_testkit::device::CopyOutcome;
use kvx_testkit::test;

/// Returns true if it ends within a moment in which it must not.
fn ends_now<T>(completion: &mut Completion<T>) -> bool {
    let until = Instant::now() + Duration::from_millis(30);
    let mut context = Context::from_waker(Waker::noop());
    while Instant::now() < until {
        if std::pin::pin!(&mut *completion).poll(&mut context).is_ready() {
            return true;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    false
}

#[test]
fn blocks_arrive_where_the_plan_says_and_others_stay_unchanged() {
    for backend in BOTH {
        for op in OPS {
            for (local, remote) in [(true, true), (true, false), (false, true)] {
                let ends = Ends::new(backend, local, remote, 1000);
                let (from, to) = (Ends::scattered(900, 7), Ends::scattered(900, 13));
                let (ours, theirs) = if op == Op::Read { (&to, &from) } else { (&from, &to) };
                let report = ends.run(op, ours, theirs).unwrap();
                assert_eq!((report.bytes, report.backend), (900 * BLOCK, backend));
                let (source, target) =
                    if op == Op::Read { (2, &ends.ours) } else { (1, &ends.theirs) };
                let other = 3 - source;
                for block in 0..1000 {
                    let moved = to.iter().position(|to| *to == block).map(|at| (source, from[at]));
                    let (seed, number) = moved.unwrap_or((other, block));
                    Ends::check(target, block, seed, number);
                }
            }
        }
    }
}

#[test]
fn a_cancelled_transfer_settles_when_its_device_has_ended_the_copies() {
    for backend in BOTH {
        for op in OPS {
            let ends = Ends::new(backend, true, true, 64);
            // Over SHM the reading end copies; over TCP each end copies its own side.
            let busy = match (backend, op) {
                ("SHM", Op::Write) => Busy::Theirs,
                _ => Busy::Ours,
            };
            ends.device(busy).hold();
            let transfer = ends.post(op);
            ends.until_waiting(busy);
            let mut settled = transfer.settled();
            transfer.cancel();
            assert!(!ends_now(&mut settled), "{backend} {op}: settled while a copy is in flight");
            ends.device(busy).release();
            settled.wait_blocking(CUT_OFF).unwrap();
            assert_eq!(transfer.wait_blocking(CUT_OFF).unwrap_err().kind(), ErrorKind::Cancelled);
            ends.works();
        }
    }
}

#[test]
fn no_bytes_are_written_after_a_late_transfer_has_settled() {
    for backend in BOTH {
        let ends = Ends::new(backend, true, true, 64);
        ends.device(Busy::Ours).hold();
        // Long enough that the copy has begun before, even on a busy machine.
        let transfer = ends.post_within(Op::Read, Duration::from_secs(3));
        ends.until_waiting(Busy::Ours);
        let mut settled = transfer.settled();
        assert_eq!(transfer.wait_blocking(CUT_OFF).unwrap_err().kind(), ErrorKind::TimedOut);
        assert!(!ends_now(&mut settled), "{backend}: settled while a copy is in flight");
        ends.device(Busy::Ours).release();
        settled.wait_blocking(CUT_OFF).unwrap();
        let copies = ends.device(Busy::Ours).counters().copies;
        ends.fill(&ends.ours, 9);
        for block in 0..64 {
            Ends::check(&ends.ours, block, 9, block);
        }
        let own = 1 + 64; // for the filling and the checks above
        assert_eq!(ends.device(Busy::Ours).counters().copies, copies + own);
        ends.works();
    }
}

#[test]
fn a_slow_device_loses_no_peer() {
    const PATIENCE: Duration = Duration::from_millis(1500);
    let ends = Ends::patient("TCP", true, false, 64, PATIENCE);
    ends.device(Busy::Ours).hold();
    // More than the bounce buffers hold: the peer's answers wait behind them, including its signs
    // of life.
    let post = |block| {
        let plan = ends.plan(Op::Read, &[block], &[block]).unwrap();
        ends.peer.transfer(&plan).deadline(CUT_OFF * 3).post().unwrap()
    };
    let transfers: Vec<_> = (0..64).map(post).collect();
    ends.until_waiting(Busy::Ours);
    let quiet = ends.owner.wait_for_senders(b"never sent", 1, PATIENCE * 2);
    assert_eq!(quiet.wait_blocking(CUT_OFF).unwrap_err().kind(), ErrorKind::TimedOut);
    ends.device(Busy::Ours).release();
    for transfer in transfers {
        transfer.wait_blocking(CUT_OFF).unwrap();
    }
}

#[test]
fn a_revocation_waits_for_copies_from_and_to_the_region() {
    for backend in BOTH {
        for op in OPS {
            let ends = Ends::new(backend, true, true, 64);
            let busy = match (backend, op) {
                ("SHM", Op::Read) => Busy::Ours,
                _ => Busy::Theirs,
            };
            ends.device(busy).hold();
            let transfer = ends.post(op);
            ends.until_waiting(busy);
            let mut revoked = ends.theirs.revoke(CUT_OFF);
            assert!(!ends_now(&mut revoked), "{backend} {op}: revoked while a copy is in flight");
            ends.device(busy).release();
            revoked.wait_blocking(CUT_OFF).unwrap();
            assert_eq!(
                transfer.wait_blocking(CUT_OFF).unwrap_err().kind(),
                ErrorKind::Revoked,
                "{backend} {op}"
            );
            assert_eq!(ends.run(op, &[0], &[0]).unwrap_err().kind(), ErrorKind::Revoked);
        }
    }
}

#[test]
fn a_revocation_waits_for_copies_of_a_connection_that_has_ended() {
    for backend in BOTH {
        let ends = Ends::new(backend, true, true, 64);
        ends.device(Busy::Theirs).hold();
        let transfer = ends.post(Op::Write);
        ends.until_waiting(Busy::Theirs);
        let shut_down = ends.reader.shutdown(CUT_OFF);
        let mut revoked = ends.theirs.revoke(CUT_OFF);
        assert!(!ends_now(&mut revoked), "{backend}: revoked while a copy is in flight");
        ends.device(Busy::Theirs).release();
        revoked.wait_blocking(CUT_OFF).unwrap();
        shut_down.wait_blocking(CUT_OFF).ok();
        transfer.wait_blocking(CUT_OFF).unwrap_err();
    }
}

#[test]
fn a_copy_that_a_device_refuses_fails_only_its_transfer() {
    for backend in BOTH {
        for op in OPS {
            for busy in [Busy::Ours, Busy::Theirs] {
                let ends = Ends::new(backend, true, true, 64);
                if backend == "SHM" && (op == Op::Read) != (busy == Busy::Ours) {
                    continue; // that device copies nothing
                }
                ends.device(busy).next([CopyOutcome::Fail]);
                let failed = ends.post(op).wait_blocking(CUT_OFF).unwrap_err();
                assert_eq!(failed.kind(), ErrorKind::Native, "{backend} {op} {busy:?}: {failed}");
                assert!(failed.sentence().contains("the test device fails this copy"), "{failed}");
                ends.works();
            }
        }
    }
}

/// Runs in its own process because the lost memory stays quarantined, which other tests check.
#[test(own_process)]
fn a_lost_copy_quarantines_the_memory_that_it_may_touch() {
    for backend in BOTH {
        let ends = Ends::new(backend, true, true, 64);
        ends.device(Busy::Ours).next([CopyOutcome::Forget]);
        let transfer = ends.post(Op::Read);
        assert_eq!(
            transfer.wait_blocking(CUT_OFF).unwrap_err().kind(),
            ErrorKind::Forgotten,
            "{backend}"
        );
        let revoked = ends
            .ours
            .revoke(Duration::from_millis(100))
            .wait_blocking(CUT_OFF)
            .map(drop)
            .unwrap_err();
        assert_eq!(revoked.kind(), ErrorKind::StillShared, "{backend}: {revoked}");

        let ends = Ends::new(backend, true, true, 64);
        ends.device(Busy::Theirs).next([CopyOutcome::Forget]);
        ends.post_within(Op::Write, Duration::from_secs(1)).wait_blocking(CUT_OFF).unwrap_err();
        let revoked = ends.theirs.revoke(CUT_OFF).wait_blocking(CUT_OFF).map(drop).unwrap_err();
        assert_eq!(revoked.kind(), ErrorKind::StillShared, "{backend}: {revoked}");
    }
}

#[test]
fn an_agent_that_ends_waits_for_its_devices() {
    for backend in BOTH {
        let ends = Ends::new(backend, true, true, 64);
        ends.device(Busy::Ours).hold();
        let transfer = ends.post(Op::Read);
        ends.until_waiting(Busy::Ours);
        let mut settled = transfer.settled();
        let shut_down = ends.reader.shutdown(CUT_OFF);
        assert!(!ends_now(&mut settled), "{backend}: settled while a copy is in flight");
        ends.device(Busy::Ours).release();
        settled.wait_blocking(CUT_OFF).unwrap();
        shut_down.wait_blocking(CUT_OFF).unwrap();
    }
}

#[test]
fn many_transfers_share_few_buffers() {
    for backend in BOTH {
        let ends = Ends::new(backend, true, true, 16 << 10);
        let list = |from: u32, count: u32| (from..from + count).collect::<Vec<_>>();
        for op in OPS {
            let mut transfers = Vec::new();
            for at in 0..16 {
                // Each of them has its own blocks: one of 4 MiB, and some small ones.
                let bulk = list(at * 1024, 1000);
                transfers.push(ends.transfer(op, &bulk, &bulk));
                for small in 1000..1010 {
                    let small = list(at * 1024 + small, 1);
                    transfers.push(ends.transfer(op, &small, &small));
                }
            }
            for transfer in transfers {
                transfer.wait_blocking(CUT_OFF).unwrap();
            }
            let (seed, target) = if op == Op::Read { (2, &ends.ours) } else { (1, &ends.theirs) };
            for at in (0..16 << 10).filter(|at| at % 1024 < 1010).step_by(101) {
                Ends::check(target, at, seed, at);
            }
            ends.fill(&ends.ours, 1);
            ends.fill(&ends.theirs, 2);
        }
    }
}
