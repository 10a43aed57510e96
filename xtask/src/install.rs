//! `cargo xtask test --install`: what the tests need and cargo does not bring.
//!
//! Fast when everything is there: then nothing is downloaded, and no package tool is called but `dpkg-query`.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use crate::process::{self, Output};
use crate::{Result, peers};

/// A Debian package, installed for the whole machine.
pub(crate) struct DebianPackage {
    pub(crate) name: &'static str,
    pub(crate) why: &'static str,
}

/// A Python wheel of one version, installed without its dependencies into an environment below the target directory.
pub(crate) struct Wheel {
    /// Whose environment: `target/peers/<peer>/venv`. Wheels of one peer share it.
    pub(crate) peer: &'static str,
    pub(crate) name: &'static str,
    pub(crate) version: &'static str,
    pub(crate) why: &'static str,
}

const DEBIAN_PACKAGES: &[DebianPackage] = &[
    DebianPackage { name: "iproute2", why: "network namespaces and links for the fault tests" },
    DebianPackage { name: "iptables", why: "cut links and lost packets in the fault tests" },
    DebianPackage {
        name: "libamdhip64-5",
        why: "HIP without a device, and hipRTC, which compiles the kernels for AMD",
    },
    DebianPackage { name: "libclang-dev", why: "reads headers for `cargo xtask bindings`" },
    DebianPackage {
        name: "libfabric-bin",
        why: "fi_pingpong, beside which a bare libfabric loop is measured",
    },
    DebianPackage { name: "libfabric-dev", why: "the headers that the bindings to libfabric come from" },
    DebianPackage {
        name: "libfabric1",
        why: "libfabric 1.17, the oldest version that kvx-libfabric works with",
    },
    DebianPackage { name: "libhiprtc-builtins5", why: "what hipRTC includes in every source" },
    DebianPackage { name: "libjemalloc2", why: "a heap of another maker under NIXL, in a test" },
    DebianPackage { name: "libtcmalloc-minimal4", why: "likewise" },
    DebianPackage { name: "libucx-dev", why: "the headers that the bindings to UCX come from" },
    DebianPackage { name: "libucx0", why: "UCX 1.13, the oldest version that kvx-ucx is tested on" },
    DebianPackage { name: "ucx-utils", why: "ucx_perftest, beside which a bare UCP loop is measured" },
];

/// What the committed PTX comes from. The oldest of CUDA 12: drivers refuse PTX of a newer release than their own.
pub(crate) const NVRTC: Wheel = Wheel {
    peer: "nvrtc",
    name: "nvidia-cuda-nvrtc-cu12",
    version: "12.0.140",
    why: "compiles the kernels for CUDA",
};

const WHEELS: &[Wheel] = &[
    NVRTC,
    Wheel { peer: "ucx", name: "libucx-cu12", version: "1.22.0", why: "a recent UCX, and its headers" },
    Wheel { peer: "nixl", name: "nixl-cu12", version: "1.5.1", why: "NIXL beside kvx, and its UCX 1.23" },
    Wheel { peer: "nixl-1.5", name: "nixl-cu12", version: "1.5.0", why: "the NIXL that vLLM asks for" },
    Wheel { peer: "nixl-1.1", name: "nixl-cu12", version: "1.1.0", why: "the C interface that RIXL has" },
    Wheel {
        peer: "nixl",
        name: "msgspec",
        version: "0.22.0",
        why: "handshakes as vLLM reads and writes them",
    },
    Wheel { peer: "nixl", name: "numpy", version: "2.2.6", why: "NIXL's Python agent needs it" },
    Wheel { peer: "nixl", name: "pyzmq", version: "27.3.0", why: "ZeroMQ itself at the side channel" },
    Wheel {
        peer: "openai",
        name: "openai",
        version: "3.54.0",
        why: "the client that most people use, at kvx proxy",
    },
    of_openai("annotated-types", "0.8.0"),
    of_openai("anyio", "4.16.0"),
    of_openai("h11", "0.16.0"),
    of_openai("httpcore2", "2.16.2"),
    of_openai("httpx2", "2.16.2"),
    of_openai("idna", "3.20"),
    of_openai("jiter", "0.19.0"),
    of_openai("pydantic", "2.14.3"),
    of_openai("pydantic_core", "2.50.4"),
    of_openai("sniffio", "1.3.1"),
    of_openai("truststore", "0.10.5"),
    of_openai("typing-inspection", "0.4.5"),
    of_openai("typing_extensions", "4.16.0"),
];

/// The variable that adds [`MORE_WHEELS`]; the tests of kvx-nixl go by it too.
const MORE: &str = "KVX_NIXL_TEST_MORE";

/// What nobody needs each time.
const MORE_WHEELS: &[Wheel] = &[Wheel {
    peer: "nixl-0.10",
    name: "nixl-cu12",
    version: "0.10.1",
    why: "the NIXL whose table is the longest",
}];

/// What the `openai` package needs.
const fn of_openai(name: &'static str, version: &'static str) -> Wheel {
    Wheel { peer: "openai", name, version, why: "the openai package needs it" }
}

/// Installs what is missing, within `limit`, and returns what could not be installed, a sentence each.
pub(crate) fn run(target: &Path, limit: Duration) -> Result<Vec<String>> {
    let until = Instant::now() + limit;
    let mut failures = Vec::new();
    if let Err(error) = install_debian_packages(DEBIAN_PACKAGES, until) {
        failures.push(error.to_string());
    }
    let more = if std::env::var_os(MORE).is_some() { MORE_WHEELS } else { &[] };
    for wheel in WHEELS.iter().chain(more) {
        if let Err(error) = install_wheel(wheel, target, until) {
            failures.push(error.to_string());
        }
    }
    failures.extend(peers::prepare_all(target, left(until)));
    Ok(failures)
}

pub(crate) fn install_debian_packages(packages: &[DebianPackage], until: Instant) -> Result<()> {
    let mut query = Command::new("dpkg-query");
    query.args(["--show", "--showformat", "${db:Status-Status} ${Package}\n"]);
    query.args(packages.iter().map(|package| package.name));
    let known = process::run(query, left(until), Output::Kept).map_err(|error| {
        format!("{error}: --install knows Debian packages only, here install {}", listed(packages))
    })?;
    let missing = missing(packages, &known.output);
    if missing.is_empty() {
        println!("Debian packages: all {} installed", packages.len());
        return Ok(());
    }
    for package in &missing {
        println!("Debian package {}: missing; for {}", package.name, package.why);
    }
    let names: Vec<_> = missing.iter().map(|package| package.name).collect();
    // SAFETY: it has no preconditions and cannot fail.
    if unsafe { libc::geteuid() } != 0 {
        let names = names.join(" ");
        return Err(format!(
            "not installed: {names}, and this user is not root; as root run \
             `apt-get update && apt-get install -y --no-install-recommends {names}`"
        )
        .into());
    }
    apt_get(&["update"], until)?;
    apt_get(&[&["install", "-y", "--no-install-recommends"], names.as_slice()].concat(), until)
}

fn apt_get(arguments: &[&str], until: Instant) -> Result<()> {
    let mut command = Command::new("apt-get");
    command.args(["-o", "DPkg::Lock::Timeout=120"]).args(arguments).env("DEBIAN_FRONTEND", "noninteractive");
    must_succeed(command, until)
}

/// Which of `packages` the output of `dpkg-query` does not show as installed: it leaves out those it never heard of.
fn missing<'a>(packages: &'a [DebianPackage], output: &str) -> Vec<&'a DebianPackage> {
    let installed: Vec<_> = output.lines().filter_map(|line| line.strip_prefix("installed ")).collect();
    packages.iter().filter(|package| !installed.contains(&package.name)).collect()
}

fn listed(packages: &[DebianPackage]) -> String {
    let entries: Vec<_> =
        packages.iter().map(|package| format!("{} ({})", package.name, package.why)).collect();
    entries.join(", ")
}

pub(crate) fn install_wheel(wheel: &Wheel, target: &Path, until: Instant) -> Result<()> {
    let Wheel { peer, name, version, why } = wheel;
    let environment = target.join("peers").join(peer).join("venv");
    if is_installed(wheel, &environment) {
        println!("wheel {name} {version}: installed");
        return Ok(());
    }
    println!("wheel {name} {version}: missing; for {why}");
    let python = environment.join("bin/python");
    if !python.exists() {
        let mut create = Command::new("python3");
        create.args(["-m", "venv"]).arg(&environment);
        must_succeed(create, until)?;
    }
    let mut pip = Command::new(python);
    pip.args(["-m", "pip", "install", "--no-deps", "--disable-pip-version-check"])
        .arg(format!("{name}=={version}"));
    must_succeed(pip, until)
}

/// Whether the environment holds the wheel in this version; asks no Python.
pub(crate) fn is_installed(wheel: &Wheel, environment: &Path) -> bool {
    let name = wheel.name.replace(['-', '.'], "_").to_ascii_lowercase();
    let record = format!("{name}-{}.dist-info", wheel.version);
    site_packages(environment).any(|folder| {
        let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
        entries
            .map(|entry| entry.file_name())
            .any(|entry| entry.to_string_lossy().to_ascii_lowercase() == record)
    })
}

/// Where the wheels of an environment lie.
pub(crate) fn site_packages(environment: &Path) -> impl Iterator<Item = PathBuf> {
    let pythons = std::fs::read_dir(environment.join("lib")).into_iter().flatten().flatten();
    pythons.map(|python| python.path().join("site-packages"))
}

pub(crate) fn must_succeed(command: Command, until: Instant) -> Result<()> {
    let shown = format!("{command:?}");
    println!("{shown}");
    let finished = process::run(command, left(until), Output::Shown)?;
    if finished.succeeded() { Ok(()) } else { Err(format!("{shown}: {}", finished.end).into()) }
}

fn left(until: Instant) -> Duration {
    until.saturating_duration_since(Instant::now())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_package_is_missing_unless_dpkg_shows_it_as_installed() {
        let packages = [
            DebianPackage { name: "iproute2", why: "x" },
            DebianPackage { name: "iptables", why: "x" },
            DebianPackage { name: "never-heard-of", why: "x" },
        ];
        let output = "installed iproute2\nconfig-files iptables\ninstalled iproute2-doc\n";
        let names: Vec<_> = missing(&packages, output).iter().map(|package| package.name).collect();
        assert_eq!(names, ["iptables", "never-heard-of"]);
    }

    #[test]
    fn every_row_says_why_and_is_there_once() {
        let mut seen = std::collections::BTreeSet::new();
        let packages = DEBIAN_PACKAGES.iter().map(|row| ("the machine", row.name, row.why));
        for (place, name, why) in
            packages.chain(WHEELS.iter().chain(MORE_WHEELS).map(|row| (row.peer, row.name, row.why)))
        {
            assert!(!why.is_empty(), "{name}");
            assert!(seen.insert((place, name)), "{name} is there twice in {place}");
        }
    }

    #[test]
    fn a_wheel_is_recognised_by_name_and_version() {
        let environment = std::env::temp_dir().join(format!("kvx-xtask-venv-{}", std::process::id()));
        let packages = environment.join("lib/python3.11/site-packages");
        std::fs::create_dir_all(packages.join("Some_Wheel-1.2.0.dist-info")).unwrap();
        let wheel = |name, version| Wheel { peer: "x", name, version, why: "x" };
        assert!(is_installed(&wheel("some-wheel", "1.2.0"), &environment));
        assert!(!is_installed(&wheel("some-wheel", "1.2"), &environment));
        assert!(!is_installed(&wheel("some", "1.2.0"), &environment));
        std::fs::remove_dir_all(environment).unwrap();
    }
}
