//! `cargo xtask test --install`: installs the dependencies of the tests that cargo does not
//! install, from the table `install.toml`.
//!
//! When everything is installed, it downloads nothing and calls no package tool but `dpkg-query`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;
use std::time::Duration;

use serde::Deserialize;

use crate::process::{self, Deadline, Output, must_succeed};
use crate::progress::Progress;
use crate::{Result, peers};

/// NIXL's library below the packages of its wheel's environment.
pub(crate) const NIXL_LIBRARY: &str = ".nixl_cu12.mesonpy.libs/libnixl_capi.so";

/// The table of everything that can be installed.
pub(crate) static TABLE: LazyLock<Table> = LazyLock::new(|| {
    toml::from_str(include_str!("../install.toml")).expect("tests parse install.toml")
});

/// The purposes of Debian packages, by name.
type DebianPackages = BTreeMap<String, String>;

/// Wheels by their names.
type Wheels = BTreeMap<String, Wheel>;

/// The file `install.toml`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Table {
    /// The version of cargo-deny.
    cargo_deny: String,
    debian: DebianPackages,
    /// Programs by their names.
    programs: BTreeMap<String, Program>,
    pub(crate) peers: BTreeMap<String, Peer>,
}

/// A program that several packages have: two of them could not be installed at once.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Program {
    /// The Debian package to install where the program is missing.
    debian: String,
    why: String,
}

/// Third-party software, installed into `target/peers/<name>`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Peer {
    /// The environment variable with which `--install` installs the peer.
    variable: Option<String>,
    #[serde(default)]
    debian: DebianPackages,
    wheels: Wheels,
    /// Shared libraries that connect kvx to the peer.
    #[serde(default)]
    pub(crate) libraries: Vec<peers::SharedLibrary>,
}

/// A Python wheel of one version, installed without its dependencies.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Wheel {
    version: String,
    why: String,
}

/// Installs missing packages within `limit`, and returns an error message for each that cannot be
/// installed. The whole tier also needs cargo-deny, which is compiled.
pub(crate) fn run(target: &Path, whole: bool, limit: Duration) -> Vec<String> {
    let is_wanted =
        |peer: &Peer| peer.variable.as_ref().is_none_or(|name| std::env::var_os(name).is_some());
    let peers: Vec<_> = TABLE.peers.iter().filter(|(_, peer)| is_wanted(peer)).collect();
    let deadline = Deadline::after(limit);
    let debian = with_missing_programs(&TABLE.debian, &TABLE.programs, is_in_path);
    let mut failures = install(&debian, &peers, target, deadline);
    if whole && !cargo_deny(target).exists() {
        let progress = Progress::unlike(1);
        progress.begins("builds cargo-deny");
        let mut cargo =
            process::cargo(["install", "--locked", "--version", &TABLE.cargo_deny, "cargo-deny"]);
        cargo.arg("--root").arg(target.join("peers/cargo-deny"));
        failures.extend(must_succeed(cargo, deadline).err().map(|error| error.to_string()));
    }
    failures
}

/// Adds the packages of programs that are missing.
fn with_missing_programs(
    debian: &DebianPackages,
    programs: &BTreeMap<String, Program>,
    exists: impl Fn(&str) -> bool,
) -> DebianPackages {
    let missing = programs.iter().filter(|(name, _)| !exists(name));
    let packages = missing.map(|(_, program)| (program.debian.clone(), program.why.clone()));
    debian.clone().into_iter().chain(packages).collect()
}

/// Returns whether a folder of PATH has a file of this name.
fn is_in_path(name: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|folder| folder.join(name).is_file())
}

/// Returns where cargo-deny is installed for the whole tier.
pub(crate) fn cargo_deny(target: &Path) -> PathBuf {
    target.join("peers/cargo-deny/bin/cargo-deny")
}

/// Installs peers by name. The error names those that cannot be installed.
pub(crate) fn peers(names: &[&str], target: &Path, deadline: Deadline) -> Result<()> {
    let peers: Vec<_> =
        TABLE.peers.iter().filter(|(name, _)| names.contains(&name.as_str())).collect();
    let failures = install(&DebianPackages::new(), &peers, target, deadline);
    if failures.is_empty() { Ok(()) } else { Err(failures.join("; ").into()) }
}

/// Installs Debian packages, then wheels, then builds the libraries, which need both.
fn install(
    debian: &DebianPackages,
    peers: &[(&String, &Peer)],
    target: &Path,
    deadline: Deadline,
) -> Vec<String> {
    let packages = debian.iter().chain(peers.iter().flat_map(|(_, peer)| &peer.debian));
    let packages = packages.map(|(name, why)| (name.as_str(), why.as_str())).collect();
    let mut failures = Vec::new();
    let progress = Progress::unlike(1 + peers.len());
    let mut note = |name: &str, result: Result<()>| {
        failures.extend(result.err().map(|error| format!("{name}: {error}")));
    };
    progress.begins("Debian packages");
    note("Debian packages", install_debian_packages(&packages, deadline));
    for (name, peer) in peers {
        progress.begins(&format!("wheels and libraries of {name}"));
        let installed = install_wheels(name, &peer.wheels, target, deadline);
        note(name, installed.and_then(|()| peers::build(name, &peer.libraries, target, deadline)));
    }
    failures
}

fn install_debian_packages(packages: &BTreeMap<&str, &str>, deadline: Deadline) -> Result<()> {
    if packages.is_empty() {
        return Ok(());
    }
    let mut query = Command::new("dpkg-query");
    query
        .args(["--show", "--showformat", "${db:Status-Status} ${Package}\n"])
        .args(packages.keys());
    // The query fails if it does not know one of the packages.
    let known = process::run(query, deadline.left(), Output::Quiet).map_err(|error| {
        let names: Vec<_> = packages.keys().copied().collect();
        format!(
            "{error}: xtask installs only Debian packages; install the equivalents of {}",
            names.join(" ")
        )
    })?;
    let missing = missing(packages, &known.output);
    if missing.is_empty() {
        println!("Debian packages: all {} installed", packages.len());
        return Ok(());
    }
    for name in &missing {
        println!("Debian package {name}: missing; for {}", packages[name]);
    }
    if !rustix::process::geteuid().is_root() {
        let install = format!("apt-get install -y --no-install-recommends {}", missing.join(" "));
        return Err(
            format!("this user is not root; run as root: apt-get update && {install}").into()
        );
    }
    let install = [&["install", "-y", "--no-install-recommends"], missing.as_slice()].concat();
    for arguments in [&["update"], install.as_slice()] {
        let mut apt = Command::new("apt-get");
        apt.args(["-o", "DPkg::Lock::Timeout=120"])
            .args(arguments)
            .env("DEBIAN_FRONTEND", "noninteractive");
        must_succeed(apt, deadline)?;
    }
    Ok(())
}

/// Returns the names in `packages` that `dpkg-query` did not list as installed.
fn missing<'a>(packages: &BTreeMap<&'a str, &str>, output: &str) -> Vec<&'a str> {
    let installed: Vec<_> =
        output.lines().filter_map(|line| line.strip_prefix("installed ")).collect();
    packages.keys().filter(|name| !installed.contains(name)).copied().collect()
}

/// Installs the wheels of one peer that are missing, by one call of pip.
fn install_wheels(peer: &str, wheels: &Wheels, target: &Path, deadline: Deadline) -> Result<()> {
    let environment = Environment::of(target, peer);
    let missing: Vec<_> =
        wheels.iter().filter(|(name, wheel)| !environment.has(name, &wheel.version)).collect();
    if missing.is_empty() {
        println!("wheels of {peer}: all {} installed", wheels.len());
        return Ok(());
    }
    for (name, Wheel { version, why }) in &missing {
        println!("wheel {name} {version} of {peer}: missing; for {why}");
    }
    let wanted = missing.iter().map(|(name, wheel)| format!("{name}=={}", wheel.version));
    let arguments = ["--quiet", "--no-deps"].map(str::to_owned).into_iter().chain(wanted);
    environment.install(arguments, deadline)
}

/// Returns whether this wheel of this peer is installed in its version.
pub(crate) fn is_installed(peer: &str, wheel: &str, target: &Path) -> bool {
    let version =
        TABLE.peers.get(peer).and_then(|peer| peer.wheels.get(wheel)).map(|wheel| &wheel.version);
    version.is_some_and(|version| Environment::of(target, peer).has(wheel, version))
}

/// A virtual Python environment without its own pip: creating one with pip takes 5 s instead of 0.3
/// s.
pub(crate) struct Environment(pub(crate) PathBuf);

impl Environment {
    /// Returns the environment of a peer.
    pub(crate) fn of(target: &Path, peer: &str) -> Environment {
        Environment(target.join("peers").join(peer).join("venv"))
    }

    /// Returns the environment's Python, which exists once a package was installed.
    pub(crate) fn python(&self) -> PathBuf {
        self.0.join("bin/python")
    }

    /// Returns the first path below the folder of the environment's packages that exists.
    pub(crate) fn find(&self, below: &str) -> Option<PathBuf> {
        let pythons = std::fs::read_dir(self.0.join("lib")).into_iter().flatten().flatten();
        pythons
            .map(|python| python.path().join("site-packages").join(below))
            .find(|path| path.symlink_metadata().is_ok())
    }

    /// Returns whether the environment holds the wheel in this version, without running Python.
    fn has(&self, name: &str, version: &str) -> bool {
        let record =
            format!("{}-{version}.dist-info", name.replace(['-', '.'], "_").to_ascii_lowercase());
        let entries = self.find("").and_then(|folder| std::fs::read_dir(folder).ok());
        let names = entries.into_iter().flatten().flatten().map(|entry| entry.file_name());
        names.map(|name| name.to_string_lossy().to_ascii_lowercase()).any(|name| name == record)
    }

    /// Runs `pip install` with these arguments for the environment, which it creates if it does not
    /// exist.
    pub(crate) fn install(
        &self,
        arguments: impl IntoIterator<Item = String>,
        deadline: Deadline,
    ) -> Result<()> {
        if !self.python().exists() {
            let mut create = Command::new("python3");
            create.args(["-m", "venv", "--without-pip"]).arg(&self.0);
            must_succeed(create, deadline)?;
        }
        let mut pip = Command::new("python3");
        pip.args(["-m", "pip", "--disable-pip-version-check", "--python"]).arg(self.python());
        pip.arg("install").args(arguments);
        must_succeed(pip, deadline)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_package_is_missing_unless_dpkg_lists_it_as_installed() {
        let packages = BTreeMap::from([("iproute2", "x"), ("iptables", "x"), ("unknown", "x")]);
        let output = "installed iproute2\nconfig-files iptables\ninstalled iproute2-doc\n";
        assert_eq!(missing(&packages, output), ["iptables", "unknown"]);
    }

    #[test]
    fn a_program_that_another_package_brought_is_not_installed_again() {
        let debian = BTreeMap::from([("iproute2".to_owned(), "x".to_owned())]);
        let packages = |exists: fn(&str) -> bool| {
            let all = with_missing_programs(&debian, &TABLE.programs, exists);
            all.into_keys().collect::<Vec<_>>()
        };
        assert_eq!(packages(|_| true), ["iproute2"]);
        assert_eq!(packages(|name| name != "kubectl"), ["iproute2", "kubernetes-client"]);
        assert!(is_in_path("sh") && !is_in_path("no-such-program"));
    }

    #[test]
    fn a_wheel_is_recognised_by_name_and_version() {
        let folder = std::env::temp_dir().join(format!("kvx-xtask-venv-{}", std::process::id()));
        let packages = folder.join("lib/python3.11/site-packages");
        std::fs::create_dir_all(packages.join("Some_Wheel-1.2.0.dist-info")).unwrap();
        let environment = Environment(folder.clone());
        assert!(environment.has("some-wheel", "1.2.0"));
        assert!(!environment.has("some-wheel", "1.2") && !environment.has("some", "1.2.0"));
        std::fs::remove_dir_all(folder).unwrap();
    }
}
