//! Runs the conformance suite over NIXL's UCX plugin: every clause, in one process and in two, on
//! each release.
//!
//! A process can load only one NIXL, so the program starts itself for each release, with [`SUITES`]
//! set and its own arguments. Such a child runs the clauses of its release alone and prints their
//! results.

use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::time::Duration;

use kvx_testkit::{
    Backing, Device, Gap, Suite, Tier, conformance_trials, device, is_asked_for, kill_after, skip,
    trial,
};
use libtest_mimic::{Arguments, Trial};

use crate::{registry, wheel};

/// Set in a child that runs the suites of a release, to the release's name.
const SUITES: &str = "KVX_RIXL_TEST_RELEASE";
const GAPS: &[Gap] = &[];
/// The variable that adds the older release's suite over TCP, which the newer one always runs.
const MORE: &str = "KVX_RIXL_TEST_MORE";
/// For all suites of a release. Each clause has its own limit; this one ends a library that hangs
/// as its process exits.
const LIMIT: Duration = Duration::from_secs(20 * 60);

/// UCX's choice on one host: data by the kernel's cross-memory attach, messages by TCP over
/// loopback.
const CMA: Suite = Suite {
    gaps: GAPS,
    options: r#"{"rixl": {"params": {"engine_config": "NET_DEVICES=lo"}}}"#,
    ..Suite::over("RIXL")
};

/// The case of hosts without RDMA: UCX asks the peer's process to read and write.
const TCP: Suite = Suite {
    tier: Tier::Whole,
    label: "RIXL-tcp",
    options: r#"{"rixl": {"params": {"engine_config": "NET_DEVICES=lo,TLS=tcp"}}}"#,
    ..CMA
};

/// With NIXL's own thread, which plugins other than UCX need. That thread reads messages before
/// kvx's thread is woken for them, so kvx polls at intervals.
const THREAD: Suite = Suite {
    tier: Tier::Whole,
    label: "RIXL-thread",
    options: r#"{"rixl": {"progress_thread": true, "params": {"engine_config": "NET_DEVICES=lo"}}}"#,
    ..CMA
};

fn first_device() -> kvx_core::Result<Arc<dyn Device>> {
    device::first(kvx_cuda::devices, |device, len| device.pool(len).build())
}

/// From NVIDIA device memory to memory of the same device.
const DEVICE: Suite = Suite {
    label: "RIXL-device",
    near: Backing::Device,
    far: Backing::Device,
    device: Some(first_device),
    ..CMA
};

/// Over the C interface that RIXL has: NIXL gives no reason when it rejects a call.
const CMA_AS_RIXL: Suite = Suite { label: "RIXL-1.1", ..CMA };
const TCP_AS_RIXL: Suite = Suite { label: "RIXL-1.1-tcp", ..TCP };

fn suites(release: &str) -> Vec<Suite> {
    if release == wheel::AS_RIXL {
        let mut suites = vec![CMA_AS_RIXL];
        if is_asked_for(MORE, TCP_AS_RIXL.label) {
            suites.push(TCP_AS_RIXL);
        }
        return suites;
    }
    let namespace = Suite { label: "RIXL-namespace", ..TCP }.in_another_namespace();
    let user = Suite { label: "RIXL-user", ..TCP }.as_another_user();
    let hosts = Suite {
        label: "RIXL-hosts",
        options: r#"{"rixl": {"params": {"engine_config": "NET_DEVICES=eth0,TLS=tcp"}}}"#,
        ..TCP
    };
    vec![CMA, TCP, THREAD, DEVICE, namespace, user, hosts.on_two_hosts()]
}

/// Returns the releases that this run tests, with this program over each. A library that the
/// environment names replaces all.
fn of_this_run() -> Vec<(&'static str, Result<Command, (&'static str, &'static str)>)> {
    if std::env::var_os("KVX_RIXL_LIB").is_some() {
        let program = std::env::current_exe().expect("the running program has a path");
        return vec![(wheel::NEWEST, Ok(Command::new(program)))];
    }
    wheel::of_this_run().map(|release| (release, wheel::command(release))).collect()
}

/// Returns a skipped test for each release that is not installed.
pub(crate) fn missing_releases() -> impl Iterator<Item = Trial> {
    of_this_run().into_iter().filter_map(|(release, command)| {
        let (reason, cure) = command.err()?;
        let title = format!("conformance over {release}");
        Some(trial(title.clone(), move || skip(&title, reason, cure)))
    })
}

/// Runs the suites of each installed release in its own process. Returns whether all passed.
pub(crate) fn run_each_release() -> bool {
    let arguments = Arguments::from_args();
    if arguments.exact && arguments.filter.is_some_and(|title| !title.starts_with("RIXL")) {
        return true; // the filter names another test
    }
    let mut all = true;
    for (release, command) in of_this_run() {
        let Ok(mut command) = command else { continue };
        command.args(std::env::args_os().skip(1)).env(SUITES, release);
        let mut suites = command.spawn().expect("this program can be started");
        kill_after(&suites, LIMIT);
        let ended = suites.wait().expect("it is our child");
        if !ended.success() {
            eprintln!("the suites of {release}: {ended}");
            all = false;
        }
    }
    all
}

/// Runs only the suites of a release if this process was started for that.
pub(crate) fn run_suites_if_asked() -> Option<ExitCode> {
    let release = std::env::var(SUITES).ok()?;
    let mut arguments = Arguments::from_args();
    arguments.test_threads.get_or_insert(2);
    Some(
        libtest_mimic::run(&arguments, conformance_trials(registry, &suites(&release))).exit_code(),
    )
}
