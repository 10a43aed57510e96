//! Work without a plan: seconds of it here, as long as one likes by `cargo xtask soak`.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "what fails here is the test")]

use std::process::ExitCode;
use std::time::{Duration, SystemTime};

use kvx_testkit::{Mode, Setup, Soak, serve_if_asked, skip, soak};
use libtest_mimic::{Arguments, Failed, Trial};

/// Seconds of work over each backend, with 200 peers; without it, a few seconds with fewer.
const SECONDS: &str = "KVX_SOAK_SECONDS";
/// What a run prints at its beginning: with it, another makes the same choices.
const SEED: &str = "KVX_SOAK_SEED";

fn registry(_: &str) -> kvx::Registry {
    kvx::registry()
}

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable)
        .ok()
        .map(|text| text.parse().unwrap_or_else(|_| panic!("{variable} is no number: {text}")))
}

fn work(backend: &'static str, asked: Option<u64>) -> Result<(), Failed> {
    if let Err(why) = kvx::registry().require(backend, &kvx::Options::default()) {
        skip(&format!("soak over {backend}"), &why.to_string(), "see the reason");
        return Ok(());
    }
    let seed = number(SEED)
        .unwrap_or_else(|| SystemTime::UNIX_EPOCH.elapsed().map_or(1, |since| since.as_nanos() as u64));
    let spec = match asked {
        Some(seconds) => Soak { time: Duration::from_secs(seconds), processes: 8, agents: 25, seed },
        None => Soak { time: Duration::from_secs(6), processes: 3, agents: 6, seed },
    };
    let mut setup = Setup::new(registry, "", backend, Mode::TwoProcesses);
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

fn main() -> ExitCode {
    serve_if_asked(registry);
    let asked = number(SECONDS);
    // What libraries keep of killed peers is theirs: they are worked on where somebody asks for it.
    let backends: &[&'static str] =
        if asked.is_some() { &["SHM", "TCP", "UCX", "LIBFABRIC"] } else { &["SHM", "TCP"] };
    let trials = backends.iter().map(|backend| {
        Trial::test(format!("{backend}::nothing_is_wrong_and_nothing_grows"), move || work(backend, asked))
    });
    let mut arguments = Arguments::from_args();
    arguments.test_threads.get_or_insert(1);
    libtest_mimic::run(&arguments, trials.collect()).exit_code()
}
