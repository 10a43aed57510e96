//! Tests killed processes: their forked children do not hide their death, and writes over shared
//! memory that they have left do not block other users of their target.

use std::time::{Duration, Instant};

use crate::processes::{self, PATIENCE};
use kvx_core::Region;
use kvx_testkit::{Check, Moment, PostSpec, Setup, Trouble, fault, test};

const BLOCK: u64 = 64 << 10;
const BLOCKS: u32 = 512;
const BYTES: usize = BLOCK as usize * BLOCKS as usize;
/// The number of kills during writes. A process that is killed after all of its writes have ended
/// does not count.
const KILLS: usize = 3;
const ROUNDS: usize = 10 * KILLS;

/// The time in which a death is noticed. A handshake that nobody answers takes 7 s.
const PROMPTLY: Duration = Duration::from_secs(2);

#[test]
fn a_forked_child_hides_no_death_at_any_moment() -> Check {
    processes::check(
        "a_forked_child_hides_no_death_at_any_moment",
        "tcp;ofi_rxm",
        async |setup: Setup| {
            for moment in Moment::ALL {
                let ended = fault(&setup, Trouble::KilledBesideAChild, moment, PATIENCE)?;
                assert!(ended.after < PROMPTLY, "{moment}: noticed after {:?}", ended.after);
                assert!(ended.settled.is_some(), "{moment}: memory is kept while the child lives");
            }
            Ok(())
        },
    )
}

#[test]
fn the_target_of_a_killed_process_stays_usable() -> Check {
    processes::check(
        "the_target_of_a_killed_process_stays_usable",
        "shm",
        kill_in_the_middle_of_writes,
    )
}

async fn kill_in_the_middle_of_writes(setup: Setup) -> Check {
    let (mut kills, mut rounds) = (0, 0);
    while kills < KILLS {
        assert!(
            rounds < ROUNDS,
            "{kills} of {ROUNDS} processes were killed in the middle of their writes"
        );
        rounds += 1;
        let mut pair = setup.pair()?;
        let region = pair.near_region("kv", BYTES, 1)?;
        pair.far_region("own", BYTES, 2)?;
        let there = pair.connect_back()?;
        let process = pair.far.process()?.pid();
        // In random order, so that blocks are not merged; block 0 is written first.
        let order: Vec<u32> = (0..BLOCKS).map(|number| number * 7 % BLOCKS).collect();
        let all = |region| PostSpec {
            write: true,
            region,
            theirs: "kv".to_owned(),
            grid: (BLOCK, BLOCKS),
            local: order.clone(),
            remote: order.clone(),
            within: PATIENCE,
            notify: None,
        };
        let written = std::thread::scope(|scope| {
            scope.spawn(|| kill_at_the_first_byte(process, &region));
            pair.far.post(there, all(0))
        });
        match written {
            Ok(all) => drop(all?),
            Err(_it_did_not_come_to_say) => kills += 1,
        }

        let mut other = setup.far()?;
        setup.far_agent(&mut other, "other")?;
        other.register("own", BYTES, setup.far, Some(3))?;
        let there = other.connect(0, &pair.near.metadata()?)?;
        other.post(there, all(0))??;
        let mut first = [0];
        region.copy_out(0, &mut first)?;
        assert_eq!(first[0], kvx_testkit::byte_at(3, 0), "what the other wrote");
        pair.near.shutdown(PATIENCE).await?;
    }
    Ok(())
}

/// Kills a process when the first byte of its writes has arrived and others are in flight.
fn kill_at_the_first_byte(process: u32, region: &Region) {
    let (before, until) = (kvx_testkit::byte_at(1, 0), Instant::now() + PATIENCE);
    let mut first = [before];
    while first[0] == before && Instant::now() < until {
        region.copy_out(0, &mut first).expect("it is registered");
    }
    // SAFETY: takes only integers. The process is a child that was not waited for, so its id is not
    // reused.
    unsafe { libc::kill(process.cast_signed(), libc::SIGKILL) };
}
