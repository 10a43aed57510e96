//! Engines whose ranks are processes of their own: what they load over SHM and TCP, and what becomes of it when a rank
//! is killed, stopped, started twice, or never comes; and the same on two hosts. Every byte says where it belongs.
//! Pools on devices are those of the stand-in, or, if `KVX_CUDA_LIB` names a driver, its own.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "what fails here is the test")]

mod devices;
mod digests;
mod distant;
mod faults;
mod fleet;
mod giving_back;
mod loads;
mod pushes;
mod rank;
/// The pools and their bytes.
#[allow(dead_code, reason = "ranks take a part of it")]
#[path = "../runtime/rig.rs"]
mod rig;

use std::process::ExitCode;

use kvx_testkit::Tier;
use libtest_mimic::{Arguments, Trial};

fn main() -> ExitCode {
    if let Ok(spec) = std::env::var(rank::VARIABLE) {
        rank::serve(&spec);
        return ExitCode::SUCCESS;
    }
    // Processes are more than what is waited for after each edit.
    let trials = if Tier::Usual.runs() { trials() } else { Vec::new() };
    let secret = distant::with_a_secret();
    let mut arguments = Arguments::from_args();
    // Outcomes have deadlines, and each trial is several processes; most of the time all of them wait.
    arguments.test_threads.get_or_insert(4);
    let conclusion = libtest_mimic::run(&arguments, trials);
    secret.into_iter().for_each(|file| std::fs::remove_file(file).unwrap());
    conclusion.exit_code()
}

fn trials() -> Vec<Trial> {
    let over = |backend: &'static str, cases: &[(&'static str, fn(&str))]| -> Vec<Trial> {
        let trial = |(name, run): &(&'static str, fn(&str))| {
            let run = *run;
            Trial::test(format!("{backend}::{name}"), move || {
                run(backend);
                Ok(())
            })
        };
        cases.iter().map(trial).collect()
    };
    let both = |cases| ["SHM", "TCP"].into_iter().flat_map(move |backend| over(backend, cases));
    both(loads::CASES)
        .chain(both(loads::OF_ONE_HOST))
        .chain(both(digests::CASES))
        .chain(both(pushes::CASES))
        .chain(both(giving_back::WITH_LOADS))
        .chain(over("SHM", giving_back::CASES))
        .chain(both(devices::CASES))
        .chain(over("SHM", devices::OF_SHM))
        .chain(both(faults::WITH_LOADS))
        .chain(both(faults::OF_ONE_HOST))
        .chain(over("SHM", faults::CASES))
        .chain(distant::trials())
        .collect()
}
