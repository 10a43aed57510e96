//! The checks of `cargo xtask gpu`, as data: the test programs, the runs of the bench, and the bars.

use std::fmt;
use std::time::Duration;

use crate::bars::Figure::Field;
use crate::bars::{Asked, Bar};

/// A library that something needs beside the driver. None of them reaches the stand-in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Needs {
    Nothing,
    Ucx,
    Rixl,
    /// NIXL with kvx's own plug-in.
    KvxInNixl,
}

impl fmt::Display for Needs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Needs::Nothing => "nothing",
            Needs::Ucx => "UCX",
            Needs::Rixl | Needs::KvxInNixl => "NIXL",
        })
    }
}

/// A test program, on the device.
pub(crate) struct Check {
    pub(crate) name: &'static str,
    /// What it shows.
    pub(crate) what: &'static str,
    /// Its name in the kit.
    pub(crate) program: &'static str,
    pub(crate) arguments: &'static [&'static str],
    /// The arguments of a rehearsal over the stand-in, which the tests run all of.
    pub(crate) quick: &'static [&'static str],
    pub(crate) needs: Needs,
    pub(crate) limit: Duration,
}

/// A run of `kvx bench`, of blocks of one size and number.
pub(crate) struct BenchRun {
    pub(crate) name: &'static str,
    pub(crate) arguments: &'static str,
    pub(crate) block: &'static str,
    pub(crate) count: &'static str,
    pub(crate) needs: Needs,
}

const MINUTES: Duration = Duration::from_secs(10 * 60);

/// In this order.
pub(crate) const CHECKS: &[Check] = &[
    Check {
        name: "driver",
        what: "kernels against what they do in plain Rust; memory of another process; faults",
        program: "cuda-devices",
        arguments: &[],
        quick: &["_"],
        needs: Needs::Nothing,
        limit: MINUTES,
    },
    Check {
        name: "contract",
        what: "every clause over SHM and TCP: device to device in one and two processes, device to host and back",
        program: "cuda-conformance",
        arguments: &[],
        quick: &["two::T1_"],
        needs: Needs::Nothing,
        limit: MINUTES,
    },
    Check {
        name: "contract over UCX",
        what: "every clause over UCX, device to device",
        program: "ucx-conformance",
        arguments: &["UCX-1.22-device"],
        quick: &["UCX-1.22-device::one::T"],
        needs: Needs::Ucx,
        limit: MINUTES,
    },
    Check {
        name: "contract over RIXL",
        what: "every clause over RIXL, device to device",
        program: "rixl-conformance",
        arguments: &["RIXL-device"],
        quick: &["RIXL-device::one::T"],
        needs: Needs::Rixl,
        limit: MINUTES,
    },
    Check {
        name: "connector",
        what: "prompts between engines of ranks in processes: device to device, to and from the host, host buffers",
        program: "connector-ranks",
        arguments: &["on_devices"],
        quick: &["on_devices"],
        needs: Needs::Nothing,
        limit: MINUTES,
    },
];

const fn native(
    name: &'static str,
    arguments: &'static str,
    block: &'static str,
    count: &'static str,
) -> BenchRun {
    BenchRun { name, arguments, block, count, needs: Needs::Nothing }
}

/// In this order.
pub(crate) const RUNS: &[BenchRun] = &[
    native("IPC 4K", "--backend SHM --memory device", "4K", "8192"),
    native("IPC 64K", "--backend SHM --memory device", "64K", "8192"),
    native("IPC 1M", "--backend SHM --memory device", "1M", "512"),
    native("IPC small", "--backend SHM --memory device", "64K", "64"),
    native("IPC and the host", "--backend SHM --memory device-host,host-device", "64K", "1024"),
    native("staging 64K", "--backend TCP --memory device", "64K", "1024"),
    native("staging 1M", "--backend TCP --memory device", "1M", "64"),
    native("staging and the host", "--backend TCP --memory device-host,host-device", "64K", "1024"),
    native("kernels", "--kernels", "64K", "8192"),
    native("kernels small", "--kernels", "64K", "1024"),
    BenchRun {
        name: "UCX",
        arguments: "--backend UCX --memory device",
        block: "64K",
        count: "1024",
        needs: Needs::Ucx,
    },
    BenchRun {
        name: "RIXL",
        arguments: "--backend RIXL --memory device",
        block: "64K",
        count: "1024",
        needs: Needs::Rixl,
    },
    BenchRun {
        name: "KVX in NIXL",
        arguments: r#"--backend RIXL --options {"rixl":{"plugin":"KVX"}} --memory device,device-host,host-device"#,
        block: "64K",
        count: "1024",
        needs: Needs::KvxInNixl,
    },
];

const fn at_least(what: &'static str, run: &'static str, at: &'static str, least: f64) -> Bar {
    Bar { what, run, figure: Field { at, field: "ratio" }, asked: Asked::AtLeast(least) }
}

/// What must hold on a device.
pub(crate) const BARS: &[Bar] = &[
    at_least("IPC read of 64 KiB blocks, of a device copy", "IPC 64K", "op=read", 0.9),
    at_least("IPC read of 1 MiB blocks, of a device copy", "IPC 1M", "op=read", 0.9),
    at_least(
        "staged read of 64 KiB blocks, of the slower of PCIe and sockets",
        "staging 64K",
        "op=read",
        0.85,
    ),
    at_least(
        "staged write of 64 KiB blocks, of the slower of PCIe and sockets",
        "staging 64K",
        "op=write",
        0.85,
    ),
    at_least("staged read of 1 MiB blocks, of the slower of PCIe and sockets", "staging 1M", "op=read", 0.85),
    at_least(
        "staged write of 1 MiB blocks, of the slower of PCIe and sockets",
        "staging 1M",
        "op=write",
        0.85,
    ),
    at_least("gather of 64 KiB blocks, of a device copy", "kernels", "kernel=gather", 0.8),
    at_least("scatter of 64 KiB blocks, of a device copy", "kernels", "kernel=scatter", 0.8),
];

#[cfg(test)]
mod tests {
    use super::super::kit::PROGRAMS;
    use super::*;

    #[test]
    fn bars_are_of_runs_and_checks_of_programs_that_there_are() {
        for bar in BARS {
            assert!(RUNS.iter().any(|run| run.name == bar.run), "{}", bar.what);
        }
        for check in CHECKS {
            assert!(PROGRAMS.iter().any(|program| program.name == check.program), "{}", check.name);
        }
    }
}
