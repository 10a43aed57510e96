//! Prefill and decode engines, a network and clients in virtual time. A seed always gives the same
//! run.
//!
//! Blocks are real: a pool with owners, and contents that identify their tokens and the write that
//! produced them. A read takes time and copies the current contents while it runs. Engines restart,
//! the network is cut, notifications get lost and are repeated, and clients disconnect at any
//! moment. In every run:
//!
//! - no block is leaked, freed or given to another request while a transfer may access it;
//! - no block with foreign contents counts as loaded;
//! - every client has an answer by its deadline.
//!
//! All engines speak one version, or each engine speaks its own.
//!
//! `KVX_SIM_SEED=n` runs one seed; with `KVX_SIM_TRACE=1` and `--nocapture` it prints every event.
//! `KVX_SIM_RUNS=n` runs that many seeds.

mod engine;
mod memory;
mod mooncake;
mod nixl;
mod world;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use kvx_testkit::harness::LIMIT;
use kvx_testkit::{Tier, test, trial_within};
use kvx_vllm::Version;
use libtest_mimic::Trial;

use self::world::Summary;

/// The number of seeds with which all assertions on the summary hold.
const RUNS: u64 = 800;
/// The number of seeds of the whole run.
const MANY: u64 = 10_000;
/// The longest average time of a seed, without optimisation on a busy machine.
const EACH: Duration = Duration::from_millis(120);

/// The tests that run all seeds.
const ALL_SEEDS: &[(&str, fn())] = &[
    // vLLM 32: a recomputing request keeps no invalid block, and no invalid block counts as loaded
    // vLLM 34: blocks of loads in flight stay reserved, whatever happens
    ("every_request_ends_and_no_block_is_leaked_reused_early_or_stale", engines_of_one_dialect),
    // vLLM 59, 60: before 0.16: transfers with kvx and plain agents survive reordering, loss,
    //     restarts and aborts in virtual time, in every fourth seed
    ("every_transfer_ends_and_no_block_is_leaked_reused_early_or_written_late", mooncake_engines),
    ("the_same_holds_between_engines_of_unequal_dialects", engines_of_unequal_dialects),
];

/// Returns the tests that run all seeds, with time limits for their numbers of seeds.
pub(crate) fn trials() -> Vec<Trial> {
    if !Tier::Usual.runs() {
        return Vec::new();
    }
    let runs = runs(Tier::Whole.runs());
    let limit = LIMIT + EACH * u32::try_from(runs).unwrap();
    let trial =
        |(name, run): &(&str, fn())| trial_within(limit, format!("simulation::{name}"), *run);
    ALL_SEEDS.iter().map(trial).collect()
}

/// Returns the number of seeds to run.
fn runs(whole: bool) -> u64 {
    number("KVX_SIM_RUNS").unwrap_or(if whole { MANY } else { RUNS })
}

fn run(seed: u64, generations: bool, among: &[Version]) -> Result<Summary, String> {
    caught(|| nixl::drawn(seed, generations, among).run())
}

fn run_mooncake(seed: u64) -> Result<Summary, String> {
    caught(|| mooncake::drawn(seed).run())
}

fn caught(run: impl FnOnce() -> Result<Summary, String>) -> Result<Summary, String> {
    catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|panic| {
        let why = panic.downcast_ref::<String>().cloned();
        let why = why.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
        Err(format!("panic: {}", why.unwrap_or_default()))
    })
}

fn number(variable: &str) -> Option<u64> {
    let text = std::env::var(variable).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{variable} is {text:?}; expected a number")))
}

/// Runs seeds on all cores and stops at the first failure.
fn all(
    seeds: std::ops::Range<u64>,
    run: impl Fn(u64) -> Result<Summary, String> + Sync,
) -> Result<Summary, (u64, String)> {
    let run = &run;
    let threads = std::thread::available_parallelism().map_or(1, usize::from) as u64;
    let parts = std::thread::scope(|scope| {
        let parts: Vec<_> = (0..threads)
            .map(|thread| {
                let seeds = seeds.clone().skip(thread as usize).step_by(threads as usize);
                scope.spawn(move || {
                    let mut whole = Summary::default();
                    for seed in seeds {
                        whole.add(&run(seed).map_err(|why| (seed, why))?);
                    }
                    Ok(whole)
                })
            })
            .collect();
        parts
            .into_iter()
            .map(|part| part.join().expect("runs catch their panics"))
            .collect::<Vec<_>>()
    });
    let mut whole = Summary::default();
    for part in parts {
        whole.add(&part?);
    }
    Ok(whole)
}

fn engines_of_one_dialect() {
    hold_among(&[Version::default()]);
}

fn mooncake_engines() {
    hold(run_mooncake, |summary, count| {
        let Summary { loaded, recomputed, errors, aborted, lost, restarts, older, .. } = *summary;
        let least = [loaded, recomputed, errors, aborted, restarts, older].into_iter().min();
        least.map(u64::from) > Some(count / 10) && u64::from(lost) > count / 200
    });
}

fn engines_of_unequal_dialects() {
    let summary = hold_among(&Version::SPOKEN);
    assert!(
        summary.is_none_or(|summary| summary.unequal > 8 * summary.runs / 10),
        "most pairs have unequal versions"
    );
}

/// Runs all seeds with engines of these versions. Returns the summary if that many seeds ran.
fn hold_among(among: &[Version]) -> Option<Summary> {
    hold(
        |seed| run(seed, true, among),
        |summary, count| {
            let Summary { loaded, recomputed, errors, aborted, stale, lost, restarts, .. } =
                *summary;
            let least = [loaded, recomputed, errors, aborted, restarts].into_iter().min();
            least.map(u64::from) > Some(count / 10)
                && u64::from(stale) > count / 200
                && u64::from(lost) > count / 200
        },
    )
}

/// Runs all seeds and checks with `enough` that the summary covers enough events.
fn hold(
    run: impl Fn(u64) -> Result<Summary, String> + Sync,
    enough: impl Fn(&Summary, u64) -> bool,
) -> Option<Summary> {
    let seeds = match number("KVX_SIM_SEED") {
        Some(seed) => seed..seed + 1,
        None => {
            let whole = Tier::Whole.runs_or_says(&format!("{MANY} simulations instead of {RUNS}"));
            0..runs(whole)
        }
    };
    let count = seeds.end - seeds.start;
    match all(seeds, run) {
        Err((seed, why)) => panic!("seed {seed}: {why}\nto reproduce it: KVX_SIM_SEED={seed}"),
        Ok(summary) => {
            println!("{summary:?}");
            // A simulation without events would pass every check.
            assert!(count < RUNS || enough(&summary, count), "{summary:?}");
            (count >= RUNS).then_some(summary)
        }
    }
}

#[test]
fn without_generations_the_simulation_finds_an_accepted_stale_block() {
    let found = (0..RUNS)
        .find_map(|seed| run(seed, false, &[Version::default()]).err().map(|why| (seed, why)));
    let (seed, why) = found.expect("a read that observed another request's contents");
    println!("seed {seed}: {why}");
    assert!(why.contains("STALE"), "seed {seed}: {why}");
    assert!(run(seed, true, &[Version::default()]).is_ok(), "seed {seed} is safe with generations");
}

#[test]
fn a_seed_is_reproducible() {
    for seed in 0..20 {
        let both = || format!("{:?} {:?}", run(seed, true, &Version::SPOKEN), run_mooncake(seed));
        assert_eq!(both(), both(), "seed {seed}");
    }
}
