//! Work without a plan: seconds of it here, as long as one likes by `cargo xtask soak`.

use std::time::{Duration, SystemTime};

use kvx_testkit::{
    Failure, Mode, Setup, Soak, is_own_process, run_in_own_process, skip, soak, trial, trial_within,
};
use libtest_mimic::Trial;

use crate::registry_of_facade;

/// Seconds of work over each backend, with 200 peers; without it, a few seconds with fewer.
const SECONDS: &str = "KVX_SOAK_SECONDS";
/// What a run prints at its beginning: with it, another makes the same choices.
const SEED: &str = "KVX_SOAK_SEED";
/// How long a run may take beyond its seconds of work.
const AFTER: Duration = Duration::from_secs(20 * 60);

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable)
        .ok()
        .map(|text| text.parse().unwrap_or_else(|_| panic!("{variable} is no number: {text}")))
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
    format!("soak::{backend}::nothing_is_wrong_and_nothing_grows")
}

/// A few seconds of it. What a process holds is counted: each run has one for itself.
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
    // What libraries keep of killed peers is theirs: they are worked on where somebody asks for it.
    let trials = ["SHM", "TCP", "UCX", "LIBFABRIC"].into_iter().map(|backend| {
        let title = title(backend);
        let limit = Duration::from_secs(seconds) + AFTER;
        trial_within(limit, title.clone(), move || work(&title, backend, Some(seconds)))
    });
    Some(trials.collect())
}
