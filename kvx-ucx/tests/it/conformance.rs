//! Runs the conformance suite on each version of UCX: every clause, in one process and in two, over
//! tcp, over shared memory and by default.
//!
//! A process can load only one UCX, so the program starts itself for each version, with [`SUITES`]
//! set and its own arguments. Such a child runs the clauses of its version alone and prints their
//! results.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use kvx_testkit::{
    Backing, Device, Gap, GapRate, Suite, Tier, conformance_trials, device, is_asked_for,
    kill_after, skip, trial,
};
use libtest_mimic::{Arguments, Trial};

use crate::registry;
use crate::versions::{self, Version};

/// Set in a child that runs the suites of its version.
const SUITES: &str = "KVX_UCX_TEST_SUITES";

const TCP: &str = r#"{"ucx": {"tls": "tcp"}}"#;
const SHARED: &str = r#"{"ucx": {"tls": "sm"}}"#;
/// Over an RDMA card alone. Over `rc` cards access memory, over `ud` UCX sends messages.
const RC: &str = r#"{"ucx": {"tls": ["rc", "self"]}}"#;
const UD: &str = r#"{"ucx": {"tls": ["ud", "self"]}}"#;
const ROUTES: Gap = Gap {
    clause: "P9",
    reason: "UCX 1.20 reads the machine's routes once in a process, at the first link over RoCE; without a \
             descriptor then, it knows no route any more (3 of 3 runs)",
    rate: GapRate::Mostly,
};
const PINNED: Gap = Gap {
    clause: "P12",
    reason: "the card reads and writes a peer's pinned pages, so such transfers succeed, but UCX copies small \
             pieces to and from local pages itself, which blocks the agent as declared (2 of 2 runs)",
    rate: GapRate::Mostly,
};
const THREADS: &str = r#"{"num_threads": 2}"#;
const GAPS: &[Gap] = &[];
/// The variable that adds suites through shared memory alone. On one host UCX chooses the same
/// lanes by default.
const MORE: &str = "KVX_UCX_TEST_MORE";
/// The gaps of 1.13 through shared memory.
const QUEUES: &[Gap] = &[Gap {
    clause: "P11",
    reason: "a killed sender leaves an unfinished message in the queue, and the receiver gets no more messages (in 8 of 20 \
             runs, with 512 MiB in flight; 1.22 copies by cma)",
    rate: GapRate::Sometimes { broken: 8, runs: 20 },
}];
/// For all suites of a version. Each clause has its own limit; this one ends a library that hangs
/// as its process exits.
const LIMIT: Duration = Duration::from_secs(20 * 60);

const fn suite(label: &'static str, options: &'static str) -> Suite {
    Suite { label, options, gaps: GAPS, ..Suite::over("UCX") }
}

fn first_device() -> kvx_core::Result<Arc<dyn Device>> {
    device::first(kvx_cuda::devices, |device, len| device.pool(len).build())
}

/// From NVIDIA device memory to memory of the same device.
const DEVICE: Suite = Suite {
    near: Backing::Device,
    far: Backing::Device,
    device: Some(first_device),
    ..suite("UCX-1.22-device", "{}")
};

/// Returns a version's suites: over tcp, over shared memory and cma, by default, and with several
/// threads; or over RDMA.
fn suites(version: &Version) -> Vec<Suite> {
    let (mut suites, through_shared_memory) = match version.label {
        "UCX-1.13" => (
            vec![suite("UCX-1.13-tcp", TCP), Suite { gaps: QUEUES, ..suite("UCX-1.13", "{}") }],
            Suite { gaps: QUEUES, ..suite("UCX-1.13-sm", SHARED) },
        ),
        "UCX-1.22" => (
            vec![
                suite("UCX-1.22", "{}"),
                Suite { tier: Tier::Whole, ..suite("UCX-1.22-tcp", TCP) },
                Suite { tier: Tier::Whole, ..suite("UCX-1.22-threads", THREADS) },
                suite("UCX-1.22-namespace", TCP).in_another_namespace(),
                suite("UCX-1.22-user", TCP).as_another_user(),
                suite("UCX-1.22-hosts", TCP).on_two_hosts(),
                DEVICE,
            ],
            suite("UCX-1.22-sm", SHARED),
        ),
        versions::VERBS => {
            return vec![
                Suite { gaps: &[ROUTES, PINNED], ..suite("UCX-verbs-rc", RC) },
                Suite { gaps: &[ROUTES], ..suite("UCX-verbs-ud", UD) },
            ];
        }
        other => panic!("{other} has no suites"),
    };
    if is_asked_for(MORE, through_shared_memory.label) {
        suites.push(through_shared_memory);
    }
    suites
}

/// Returns the versions that this run tests. NIXL's copy of 1.23 crashes when its process exits.
fn of_this_run() -> impl Iterator<Item = &'static Version> {
    versions::of_this_run().filter(|version| !version.ends_badly)
}

/// Returns a skipped test for each version that is not installed.
pub(crate) fn missing_versions() -> impl Iterator<Item = Trial> {
    of_this_run().filter_map(|version| {
        let (reason, cure) = version.library().err()?;
        Some(trial(version.label, move || skip(version.label, &reason, cure)))
    })
}

/// Runs the suites of each installed version in its own process. Returns whether all passed.
pub(crate) fn run_each_version() -> bool {
    let arguments = Arguments::from_args();
    let may_have = |version: &&Version| match &arguments.filter {
        Some(title) if arguments.exact => title.starts_with(version.label),
        _ => true,
    };
    let mut all = true;
    for version in of_this_run().filter(may_have) {
        let Ok(mut command) = version.command() else { continue };
        command.args(std::env::args_os().skip(1)).env(SUITES, "1");
        let mut suites = command.spawn().expect("this program can be started");
        kill_after(&suites, LIMIT);
        let ended = suites.wait().expect("it is our child");
        if !ended.success() {
            eprintln!("the suites of {}: {ended}", version.label);
            all = false;
        }
    }
    all
}

/// Runs only the suites if this process was started for that.
pub(crate) fn run_suites_if_asked() -> Option<ExitCode> {
    std::env::var_os(SUITES)?;
    let version = versions::chosen().expect("it was started for a version");
    let mut arguments = Arguments::from_args();
    // One clause at a time: with the threads that UCX spins, two are too much for two cores.
    arguments.test_threads.get_or_insert(1);
    let trials = conformance_trials(registry, &suites(version));
    Some(libtest_mimic::run(&arguments, trials).exit_code())
}
