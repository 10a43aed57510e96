//! UCX keeps the contract: every clause, in one process and in two, over tcp, over shared memory and by default, on
//! each version.

mod versions;

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use kvx_core::Registry;
use kvx_testkit::{
    Backing, Device, Gap, GapRate, Suite, Tier, conformance_main, device, is_asked_for, kill_after,
    serve_if_asked, skip,
};
use versions::Version;

fn registry(_: &str) -> Registry {
    let mut registry = Registry::new();
    registry.add(kvx_ucx::Ucx).expect("one name");
    registry
}

const TCP: &str = r#"{"ucx": {"tls": "tcp"}}"#;
const SHARED: &str = r#"{"ucx": {"tls": "sm"}}"#;
const THREADS: &str = r#"{"num_threads": 2}"#;
const GAPS: &[Gap] = &[];
/// The variable that adds suites through shared memory alone: on one host UCX chooses the same lanes by default.
const MORE: &str = "KVX_UCX_TEST_MORE";
/// Of 1.13 through shared memory.
const QUEUES: &[Gap] = &[Gap {
    clause: "P11",
    reason: "a message that its sender was killed in stays in the queue, and the survivor hears nobody (in 8 of 20 \
             runs, with 512 MiB in flight; 1.22 copies by cma)",
    rate: GapRate::Sometimes { broken: 8, runs: 20 },
}];
/// All suites of a version. Each clause has a limit of its own: this one is for a library that hangs as its process
/// ends.
const LIMIT: Duration = Duration::from_secs(20 * 60);

const fn suite(label: &'static str, options: &'static str) -> Suite {
    Suite { label, options, gaps: GAPS, ..Suite::over("UCX") }
}

fn first_device() -> kvx_core::Result<Arc<dyn Device>> {
    device::first(kvx_cuda::devices, |device, len| device.pool(len).build())
}

/// From an NVIDIA device to the same one.
const DEVICE: Suite = Suite {
    near: Backing::Device,
    far: Backing::Device,
    device: Some(first_device),
    ..suite("UCX-1.22-device", "{}")
};

/// Over tcp, over shared memory and cma, by default; with several threads.
fn suites(version: &Version) -> Vec<Suite> {
    let (mut suites, through_shared_memory) = match version.label {
        "UCX-1.13" => (
            vec![suite("UCX-1.13-tcp", TCP), Suite { gaps: QUEUES, ..suite("UCX-1.13", "{}") }],
            Suite { gaps: QUEUES, ..suite("UCX-1.13-sm", SHARED) },
        ),
        "UCX-1.22" => (
            vec![
                suite("UCX-1.22-tcp", TCP),
                suite("UCX-1.22", "{}"),
                Suite { tier: Tier::Whole, ..suite("UCX-1.22-threads", THREADS) },
                suite("UCX-1.22-namespace", TCP).in_another_namespace(),
                suite("UCX-1.22-user", TCP).as_another_user(),
                suite("UCX-1.22-hosts", TCP).on_two_hosts(),
                DEVICE,
            ],
            suite("UCX-1.22-sm", SHARED),
        ),
        other => panic!("{other} has no suites"),
    };
    if is_asked_for(MORE, through_shared_memory.label) {
        suites.push(through_shared_memory);
    }
    suites
}

fn main() -> ExitCode {
    serve_if_asked(registry);
    if let Some(version) = versions::chosen() {
        return conformance_main(registry, &suites(version));
    }
    let mut all = ExitCode::SUCCESS;
    // NIXL's copy of 1.23 crashes when its process ends.
    for version in versions::of_this_run().filter(|version| !version.ends_badly) {
        let mut command = match version.command() {
            Ok(command) => command,
            Err((reason, cure)) => {
                skip(version.label, &reason, cure);
                continue;
            }
        };
        // One clause at a time: two of them, with what UCX's threads spin, are too much for two cores.
        command.arg("--test-threads=1");
        let mut suites =
            command.args(std::env::args_os().skip(1)).spawn().expect("this program starts again");
        kill_after(&suites, LIMIT);
        if !suites.wait().expect("it is our child").success() {
            all = ExitCode::FAILURE;
        }
    }
    all
}
