//! Tests of SHM between two agents of one process.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::ends::*;
use kvx_core::{ErrorKind, MemoryKind, Transfer};
use kvx_testkit::{TestDevice, test};

fn shuffled(count: u32) -> Vec<u32> {
    (0..count).map(|at| (at * 7919 + 13) % count).collect()
}

#[test]
fn blocks_are_read_and_written_between_pools_files_and_foreign_memory() {
    let (decode, prefill) = (agent("decode"), agent("prefill"));
    const BLOCKS: u32 = 3001;
    for ours in ALL {
        for theirs in ALL {
            let local = region(&decode, &format!("local {ours:?} {theirs:?}"), ours, BLOCKS, 1);
            let remote =
                region(&prefill, &format!("remote {ours:?} {theirs:?}"), theirs, BLOCKS, 2);
            let peer = connect(&decode, &prefill);
            let there = peer.region(&format!("remote {ours:?} {theirs:?}")).unwrap();
            let (from, into) = (shuffled(BLOCKS), (0..BLOCKS).rev().collect::<Vec<_>>());
            let report = run(&peer, &read(&local, &there, &into, &from)).unwrap();
            assert_eq!((report.blocks, report.backend), (u64::from(BLOCKS), "SHM"));
            for (into, from) in into.iter().zip(&from) {
                assert_eq!(
                    filled_with(&local, *into),
                    pattern(2, *from),
                    "{ours:?} from {theirs:?}"
                );
            }
            // Then back, to other places.
            for block in 0..BLOCKS {
                local
                    .copy_in(
                        (u64::from(block) * BLOCK) as usize,
                        &[pattern(3, block); BLOCK as usize],
                    )
                    .unwrap();
            }
            run(&peer, &write(&local, &there, &into, &from)).unwrap();
            for (into, from) in into.iter().zip(&from) {
                assert_eq!(
                    filled_with(&remote, *from),
                    pattern(3, *into),
                    "{ours:?} into {theirs:?}"
                );
            }
        }
    }
    shut_down(&[&decode, &prefill]);
}

#[test]
fn a_single_block_is_read_asynchronously() {
    let (decode, prefill) = (agent("decode"), agent("prefill"));
    for on in BOTH {
        let local = region(&decode, &format!("{on:?}"), on, 4, 1);
        let remote = region(&prefill, &format!("{on:?}"), on, 4, 2);
        let peer = connect(&decode, &prefill);
        let there = peer.region(&format!("{on:?}")).unwrap();
        let plan = read(&local, &there, &[1], &[3]);
        for round in 0..100u8 {
            remote.copy_in(3 * BLOCK as usize, &[round; BLOCK as usize]).unwrap();
            run(&peer, &plan).unwrap();
            assert_eq!(filled_with(&local, 1), round);
            assert_eq!(filled_with(&local, 0), pattern(1, 0));
        }
    }
    shut_down(&[&decode, &prefill]);
}

#[test]
fn an_agent_links_to_itself() {
    let own = agent("own");
    for on in BOTH {
        let a = region(&own, &format!("a {on:?}"), on, 64, 1);
        let b = region(&own, &format!("b {on:?}"), on, 64, 2);
        let peer = connect(&own, &own);
        let there = peer.region(&format!("b {on:?}")).unwrap();
        run(&peer, &read(&a, &there, &[0, 1, 2], &[63, 5, 62])).unwrap();
        assert_eq!([0, 1, 2].map(|at| filled_with(&a, at)), [63, 5, 62].map(|at| pattern(2, at)));
        run(&peer, &write(&a, &there, &[10, 11], &[7, 0])).unwrap();
        assert_eq!([7, 0].map(|at| filled_with(&b, at)), [10, 11].map(|at| pattern(1, at)));
        peer.notify(b"to myself", CUT_OFF).wait_blocking(CUT_OFF).unwrap();
        let notification = own.notification(CUT_OFF).join().unwrap();
        assert_eq!(
            (&*notification.bytes, &*notification.from.name),
            (b"to myself".as_slice(), "own")
        );
    }
    shut_down(&[&own]);
}

#[test]
fn notifications_of_any_length_arrive_once_even_through_a_full_queue() {
    let decode = agent("decode");
    let prefill = kvx_core::Agent::builder("prefill")
        .notifications(3, 64 << 10)
        .registry(registry())
        .build()
        .unwrap();
    let peer = connect(&decode, &prefill);
    let sent: Vec<_> = (0..200u32)
        .map(|at| {
            let len = [0, 1, 100, 64 << 10][at as usize % 4];
            peer.notify(vec![at as u8; len], CUT_OFF)
        })
        .collect();
    let mut got = Vec::new();
    for _ in 0..200 {
        let notification = prefill.notification(CUT_OFF).join().unwrap();
        assert_eq!(notification.from.name, decode.identity().name);
        assert!(notification.bytes.iter().all(|byte| *byte == notification.bytes[0]));
        got.push((notification.bytes.len(), notification.bytes.first().copied()));
    }
    for done in sent {
        done.wait_blocking(CUT_OFF).unwrap();
    }
    assert!(prefill.try_notification().is_none());
    let mut expected: Vec<_> = (0..200u32)
        .map(|at| match at % 4 {
            0 => (0, None),
            rest => ([0, 1, 100, 64 << 10][rest as usize], Some(at as u8)),
        })
        .collect();
    got.sort();
    expected.sort();
    assert_eq!(got, expected);
    shut_down(&[&decode, &prefill]);
}

#[test]
fn a_revoked_region_is_refused_and_its_memory_is_returned() {
    let (decode, prefill) = (agent("decode"), agent("prefill"));
    for on in BOTH {
        let local = region(&decode, &format!("{on:?}"), on, 8, 1);
        let remote = region(&prefill, &format!("{on:?}"), on, 8, 2);
        let peer = connect(&decode, &prefill);
        let there = peer.region(&format!("{on:?}")).unwrap();
        let reading = read(&local, &there, &[0], &[1]);
        let writing = write(&local, &there, &[0], &[1]);
        run(&peer, &reading).unwrap();
        run(&peer, &writing).unwrap();
        remote.revoke(CUT_OFF).wait_blocking(CUT_OFF).unwrap();
        for plan in [&reading, &writing] {
            assert_eq!(run(&peer, plan).unwrap_err().kind(), ErrorKind::Revoked, "{plan:?} {on:?}");
        }
        // The local region was lent for the write, and is released as well.
        drop(reading);
        drop(writing);
        local.revoke(CUT_OFF).wait_blocking(CUT_OFF).unwrap();
    }
    shut_down(&[&decode, &prefill]);
}

#[test]
fn a_region_is_revoked_during_transfers() {
    let (decode, prefill) = (agent("decode"), agent("prefill"));
    const BLOCKS: u32 = 16 << 10;
    for on in BOTH {
        for writes in [false, true] {
            let name = format!("{on:?} {writes}");
            let local = region(&decode, &name, on, BLOCKS, 1);
            let remote = region(&prefill, &name, on, BLOCKS, 2);
            let peer = connect(&decode, &prefill);
            let there = peer.region(&name).unwrap();
            let all: Vec<u32> = (0..BLOCKS).collect();
            let plan = if writes {
                write(&local, &there, &all, &all)
            } else {
                read(&local, &there, &all, &all)
            };
            run(&peer, &plan).unwrap();
            // Some bytes have moved, but by far not all: the watched block is written first and was
            // zeroed before.
            let watched = if writes { &remote } else { &local };
            watched.copy_in(0, &[0; BLOCK as usize]).unwrap();
            let begun = Instant::now();
            let memory = std::thread::scope(|scope| {
                // Transfers are in flight when this thread revokes, whenever it is scheduled.
                let until_refused = scope.spawn(|| {
                    let mut transfers = VecDeque::<Transfer>::new();
                    loop {
                        assert!(begun.elapsed() < CUT_OFF, "none is refused");
                        let oldest =
                            if transfers.len() < 16 { None } else { transfers.pop_front() };
                        let result = match oldest {
                            Some(oldest) => oldest.wait_blocking(CUT_OFF).map(drop),
                            None => peer.post(&plan).map(|transfer| transfers.push_back(transfer)),
                        };
                        if let Err(refused) = result {
                            return (refused, transfers);
                        }
                    }
                });
                let mut first = [0];
                while first == [0] {
                    assert!(begun.elapsed() < CUT_OFF);
                    watched.copy_out(0, &mut first).unwrap();
                }
                let memory = remote.revoke(CUT_OFF).wait_blocking(CUT_OFF).unwrap();
                // From here on no transfer touches it. No block was ever filled with an even byte.
                memory.copy_in(0, &vec![0x5a; memory.len()]).unwrap();
                let (refused, others) = until_refused.join().unwrap();
                assert_eq!(refused.kind(), ErrorKind::Revoked, "{refused}");
                for error in
                    others.into_iter().filter_map(|other| other.wait_blocking(CUT_OFF).err())
                {
                    assert_eq!(error.kind(), ErrorKind::Revoked, "{error}");
                }
                memory
            });
            assert!(
                (0..BLOCKS).all(|block| filled_with(&local, block) != 0x5a),
                "{on:?} {writes}: read after the end"
            );
            let mut after = vec![0; memory.len()];
            memory.copy_out(0, &mut after).unwrap();
            assert!(after.iter().all(|byte| *byte == 0x5a), "{on:?} {writes}");
        }
    }
    shut_down(&[&decode, &prefill]);
}

#[test]
fn a_cancelled_transfer_settles_and_the_link_continues() {
    let (decode, prefill) = (agent("decode"), agent("prefill"));
    const BLOCKS: u32 = 16 << 10;
    let local = region(&decode, "kv", On::Foreign, BLOCKS, 1);
    let _remote = region(&prefill, "kv", On::Foreign, BLOCKS, 2);
    let peer = connect(&decode, &prefill);
    let there = peer.region("kv").unwrap();
    let all = shuffled(BLOCKS);
    for plan in [read(&local, &there, &all, &all), write(&local, &there, &all, &all)] {
        let transfers: Vec<_> = (0..4).map(|_| peer.post(&plan).unwrap()).collect();
        let settled: Vec<_> = transfers.iter().map(|transfer| transfer.settled()).collect();
        transfers.iter().for_each(|transfer| transfer.cancel());
        for settled in settled {
            settled.wait_blocking(CUT_OFF).unwrap();
        }
        for transfer in transfers {
            match transfer.wait_blocking(CUT_OFF) {
                Ok(_) => {}
                Err(error) => assert_eq!(error.kind(), ErrorKind::Cancelled),
            }
        }
        run(&peer, &plan).unwrap();
    }
    shut_down(&[&decode, &prefill]);
}

#[test]
fn a_peer_that_shuts_down_is_lost_and_a_new_incarnation_of_it_is_reported() {
    let decode = agent("decode");
    let prefill = agent("prefill of a_peer_that_shuts_down");
    let local = region(&decode, "kv", On::Pool, 4, 1);
    region(&prefill, "kv", On::Pool, 4, 2);
    let _kept = region(&prefill, "kept", On::Pool, 4, 2);
    let old = prefill.metadata().unwrap();
    let peer = decode.connect(&old).unwrap();
    let plan = read(&local, &peer.region("kept").unwrap(), &[0], &[1]);
    run(&peer, &plan).unwrap();
    shut_down(&[&prefill]);
    until_lost(&peer);
    assert_eq!(run(&peer, &plan).unwrap_err().kind(), ErrorKind::PeerLost);
    let again = agent("prefill of a_peer_that_shuts_down");
    let stale = decode.connect(&old).unwrap();
    assert_eq!(
        stale.ready(CUT_OFF).wait_blocking(CUT_OFF).unwrap_err().kind(),
        ErrorKind::PeerRestarted
    );
    assert_eq!(run(&peer, &plan).unwrap_err().kind(), ErrorKind::PeerRestarted);
    connect(&decode, &again).ready(CUT_OFF).wait_blocking(CUT_OFF).unwrap();
    shut_down(&[&decode, &again]);
}

#[test]
fn disabled_foreign_memory_is_reported_and_pools_still_move() {
    let decode = agent("decode");
    let prefill = agent_with("prefill", r#"{"shm": {"foreign_memory": false}}"#);
    let (pool, foreign) =
        (region(&decode, "pool", On::Pool, 4, 1), region(&decode, "foreign", On::Foreign, 4, 1));
    region(&prefill, "unused", On::Pool, 4, 2);
    let _theirs =
        [region(&prefill, "pool", On::Pool, 4, 2), region(&prefill, "foreign", On::Foreign, 4, 2)];
    let peer = connect(&decode, &prefill);
    let (there, there_foreign) = (peer.region("pool").unwrap(), peer.region("foreign").unwrap());
    for local in [&pool, &foreign] {
        run(&peer, &read(local, &there, &[0], &[1])).unwrap();
    }
    run(&peer, &write(&pool, &there, &[0], &[1])).unwrap();
    for plan in [read(&pool, &there_foreign, &[0], &[1]), write(&foreign, &there, &[0], &[1])] {
        let refused = run(&peer, &plan).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Unsupported, "{refused}");
        assert!(refused.to_string().contains("shm.foreign_memory"), "{refused}");
    }
    shut_down(&[&decode, &prefill]);
}

#[test]
fn sixteen_threads_share_a_link() {
    let (decode, prefill) = (agent("decode"), agent("prefill"));
    let remote = region(&prefill, "kv", On::Pool, 64, 2);
    let target = region(&prefill, "sink", On::Foreign, 64, 0);
    let peer = connect(&decode, &prefill);
    let (there, sink) = (peer.region("kv").unwrap(), peer.region("sink").unwrap());
    std::thread::scope(|scope| {
        for thread in 0..16u32 {
            let (decode, peer, there, sink) = (&decode, &peer, &there, &sink);
            scope.spawn(move || {
                let on = BOTH[thread as usize % 2];
                let local = region(decode, &format!("local {thread}"), on, 64, thread as u8);
                for round in 0..40u32 {
                    let from = (thread * 5 + round) % 64;
                    run(peer, &read(&local, there, &[round % 64], &[from])).unwrap();
                    assert_eq!(filled_with(&local, round % 64), pattern(2, from));
                    run(peer, &write(&local, sink, &[round % 64], &[thread])).unwrap();
                    let bytes = format!("{thread} {round}");
                    peer.notify(bytes.as_bytes(), CUT_OFF).wait_blocking(CUT_OFF).unwrap();
                    if round % 8 == 0 {
                        peer.post(&read(&local, there, &[0], &[1])).unwrap().cancel();
                    }
                }
            });
        }
    });
    for thread in 0..16 {
        assert_eq!(filled_with(&target, thread), pattern(2, (thread * 5 + 39) % 64));
    }
    let mut got = 0;
    while prefill.try_notification().is_some() {
        got += 1;
    }
    assert_eq!(got, 16 * 40);
    drop(remote);
    shut_down(&[&decode, &prefill]);
}

#[test]
fn regions_added_later_and_many_of_them_work() {
    let (decode, prefill) = (agent("decode"), agent("prefill"));
    let local = region(&decode, "kv", On::Pool, 300, 1);
    let _first = region(&prefill, "first", On::Pool, 4, 2);
    let peer = connect(&decode, &prefill);
    run(&peer, &read(&local, &peer.region("first").unwrap(), &[0], &[1])).unwrap();
    let later: Vec<_> = (0..300)
        .map(|at| region(&prefill, &format!("later {at}"), BOTH[at % 2], 2, at as u8))
        .collect();
    assert!(peer.update(prefill.metadata().unwrap()).unwrap());
    let transfers: Vec<_> = (0..300u32)
        .map(|at| {
            let there = peer.region(&format!("later {at}")).unwrap();
            peer.post(&read(&local, &there, &[at], &[1])).unwrap()
        })
        .collect();
    for transfer in transfers {
        transfer.wait_blocking(CUT_OFF).unwrap();
    }
    for at in 0..300 {
        assert_eq!(filled_with(&local, at), pattern(at as u8, 1));
    }
    drop(later);
    shut_down(&[&decode, &prefill]);
}

#[test]
fn a_shutdown_with_work_in_flight_ends_everything() {
    let (decode, prefill) = (agent("decode"), agent("prefill"));
    const BLOCKS: u32 = 16 << 10;
    let local = region(&decode, "kv", On::Foreign, BLOCKS, 1);
    let remote = region(&prefill, "kv", On::Foreign, BLOCKS, 2);
    let peer = connect(&decode, &prefill);
    let there = peer.region("kv").unwrap();
    let all = shuffled(BLOCKS);
    let plans = [read(&local, &there, &all, &all), write(&local, &there, &all, &all)];
    let transfers: Vec<_> = (0..8).map(|at| peer.post(&plans[at % 2]).unwrap()).collect();
    decode.shutdown(CUT_OFF).wait_blocking(CUT_OFF).unwrap();
    for transfer in transfers {
        match transfer.wait_blocking(CUT_OFF) {
            Ok(_) => {}
            Err(error) => assert_eq!(error.kind(), ErrorKind::Closed, "{error}"),
        }
    }
    assert_eq!(
        peer.notify(b"late", CUT_OFF).wait_blocking(CUT_OFF).unwrap_err().kind(),
        ErrorKind::Closed
    );
    // The other end keeps working, and its memory is no longer shared.
    remote.revoke(CUT_OFF).wait_blocking(CUT_OFF).unwrap();
    shut_down(&[&prefill]);
}

#[test]
fn metadata_of_another_host_is_rejected_with_the_reason() {
    let (decode, prefill) = (agent("decode"), agent("prefill"));
    let metadata = prefill.metadata().unwrap();
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    let boot: Vec<u8> = boot.trim().replace('-', "").into_bytes();
    let boot: Vec<u8> = boot
        .chunks(2)
        .map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap())
        .collect();
    let at = metadata.windows(16).position(|window| window == boot).unwrap();
    let mut elsewhere = metadata.clone();
    elsewhere[at] ^= 1;
    if let Ok(peer) = decode.connect(&elsewhere) {
        let error = peer.ready(CUT_OFF).wait_blocking(CUT_OFF).unwrap_err();
        assert!(error.to_string().contains("another host"), "{error}");
    }
    shut_down(&[&decode, &prefill]);
}

#[test]
fn device_memory_is_rejected_at_register() {
    let device = TestDevice::new(MemoryKind::Cuda);
    device.refuse_to_share("no other process may open it");
    let own = agent("own");
    let refused = own.register("gpu", device.allocate(4096)).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unsupported, "{refused}");
    own.shutdown(Duration::from_secs(5)).wait_blocking(CUT_OFF).unwrap();
}
