//! Runs random work: for a few seconds here, for any time with `cargo xtask soak`.

use std::time::{Duration, SystemTime};

use kvx_testkit::{
    Failure, Mode, Setup, Soak, is_own_process, run_in_own_process, skip, soak, trial, trial_within,
};
use libtest_mimic::Trial;

use crate::registry_of_facade;

/// The environment variable with the seconds of work over each backend, with 200 peers. Without it,
/// a few peers work for a few seconds.
const SECONDS: &str = "KVX_SOAK_SECONDS";
/// The environment variable that repeats the choices of a run, which prints its value.
const SEED: &str = "KVX_SOAK_SEED";
/// The time that a run may take beyond its seconds of work.
const AFTER: Duration = Duration::from_secs(20 * 60);

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable)
        .ok()
        .map(|text| text.parse().unwrap_or_else(|_| panic!("{variable} is not a number: {text}")))
}

fn work(title: &str, backend: &'static str, asked: Option<u64>) -> Result<(), Failure> {
    if let Err(why) = kvx::registry().require(backend, &kvx::Options::default()) {
        skip(title, &why.to_string(), "see the reason");
        return Ok(());
    }
    let seed = number(SEED).unwrap_or_else(|| {
        SystemTime::UNIX_EPOCH.elapsed().map_or(1, |since| since.as_nanos() as u64)
    });
    let spec = match asked {
        Some(seconds) => {
            Soak { time: Duration::from_secs(seconds), processes: 8, agents: 25, seed }
        }
        None => Soak { time: Duration::from_secs(6), processes: 3, agents: 6, seed },
    };
    let mut setup = Setup::new(registry_of_facade, "", backend, Mode::TwoProcesses);
    setup.peer_timeout = Duration::from_secs(5);
    println!(
        "{backend}, {SEED}={seed}: {} agents in {} processes",
        spec.agents * spec.processes,
        spec.processes
    );
    println!("| seconds | process | descriptors | threads | MiB | mappings | in quarantine |");
    let done = soak(&setup, spec, |passed, done, [here, there]| {
        println!("| {} | this | {here} |\n| | the oldest other | {there} |", passed.as_secs());
        println!("  {done}");
    })?;
    println!("{backend}: {done}");
    let wanted = [done.arrived, done.failed, done.notified];
    assert!(wanted.iter().all(|count| *count > 0), "too little was done: {done}");
    Ok(())
}

fn title(backend: &str) -> String {
    format!("soak::{backend}::work_stays_correct_and_does_not_leak")
}

/// Returns short runs. Each has a separate process, because it measures the resources of its
/// process.
pub(crate) fn trials() -> impl Iterator<Item = Trial> {
    ["SHM", "TCP"].into_iter().map(|backend| {
        let title = title(backend);
        trial(title.clone(), move || match is_own_process() {
            true => work(&title, backend, None),
            false => run_in_own_process(&title, |_| {}),
        })
    })
}

/// Returns the trials of `cargo xtask soak`, if it has started this program.
pub(crate) fn asked_for() -> Option<Vec<Trial>> {
    let seconds = number(SECONDS)?;
    // Libraries keep resources of killed peers, so these backends run only on request.
    let trials = ["SHM", "TCP", "UCX", "LIBFABRIC"].into_iter().map(|backend| {
        let title = title(backend);
        let limit = Duration::from_secs(seconds) + AFTER;
        trial_within(limit, title.clone(), move || work(&title, backend, Some(seconds)))
    });
    Some(trials.collect())
}
