//! Reads cargo's metadata of the workspace.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use serde::Deserialize;
use serde_json::Value;

use crate::{Result, process};

/// The time limit for resolving the workspace, including downloads.
const LIMIT: Duration = Duration::from_secs(300);

/// The output of `cargo metadata`.
#[derive(Default, Deserialize)]
#[serde(default)]
pub(crate) struct Metadata {
    pub(crate) packages: Vec<PackageMetadata>,
    pub(crate) target_directory: PathBuf,
    pub(crate) workspace_root: PathBuf,
}

/// A borrowed package of [`Metadata`].
pub(crate) type Package<'a> = &'a PackageMetadata;

/// A package as cargo describes it.
#[derive(Default, Deserialize)]
#[serde(default)]
pub(crate) struct PackageMetadata {
    pub(crate) name: String,
    pub(crate) version: String,
    pub(crate) manifest_path: PathBuf,
    source: Option<String>,
    /// The registries that the package may be published to; `None` for any.
    pub(crate) publish: Option<Vec<String>>,
    pub(crate) features: BTreeMap<String, Value>,
    pub(crate) targets: Vec<Target>,
    /// The tables `[package.metadata.…]`.
    metadata: Value,
    pub(crate) rust_version: Option<String>,
    /// The package's dependencies of all kinds.
    pub(crate) dependencies: Vec<Dependency>,
    /// The other fields, such as `description` and `keywords`.
    #[serde(flatten)]
    pub(crate) others: BTreeMap<String, Value>,
}

/// A target of a package.
#[derive(Deserialize)]
pub(crate) struct Target {
    pub(crate) name: String,
    pub(crate) kind: Vec<String>,
}

/// Something that cargo has built, as `--message-format=json` reports it.
#[derive(Deserialize)]
pub(crate) struct Artifact {
    pub(crate) manifest_path: PathBuf,
    pub(crate) target: Target,
    pub(crate) profile: Profile,
    pub(crate) executable: Option<PathBuf>,
    pub(crate) filenames: Vec<PathBuf>,
}

#[derive(Deserialize)]
pub(crate) struct Profile {
    pub(crate) test: bool,
}

/// Returns the artifacts in the output of a build.
pub(crate) fn artifacts(output: &str) -> impl Iterator<Item = Artifact> {
    // The other messages have other fields.
    output.lines().filter_map(|line| serde_json::from_str(line).ok())
}

/// Returns what the compiler prints with these options.
pub(crate) fn rustc(options: &str) -> Result<String> {
    let mut rustc = Command::new(std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()));
    rustc.args(options.split(' '));
    process::output_of(rustc, LIMIT)
}

/// Returns this machine's platform from the output of `rustc -vV`.
pub(crate) fn host(version: &str) -> Result<&str> {
    let host = version.lines().find_map(|line| line.strip_prefix("host: "));
    Ok(host.ok_or("rustc -vV names no host")?)
}

/// A dependency of a package.
#[derive(Deserialize)]
pub(crate) struct Dependency {
    pub(crate) name: String,
    /// The versions that the dependency may have; `*` when the manifest names none.
    #[serde(rename = "req")]
    pub(crate) requirement: String,
    /// The path of the dependency, unless it comes from the registry.
    pub(crate) path: Option<PathBuf>,
    /// `dev` if only tests need it, `build` if its build script does.
    pub(crate) kind: Option<String>,
}

impl Metadata {
    /// Loads only the members of the workspace: fast, and without downloads.
    pub(crate) fn of_members() -> Result<Metadata> {
        Metadata::load(&["--no-deps"])
    }

    /// Loads the members with all their features, and every package that they need on this
    /// platform, for any purpose (normal, build, dev).
    pub(crate) fn of_everything() -> Result<Metadata> {
        Metadata::load(&["--all-features", "--filter-platform", host(&rustc("-vV")?)?])
    }

    fn load(arguments: &[&str]) -> Result<Metadata> {
        let all = ["metadata", "--format-version", "1"].iter().chain(arguments);
        Metadata::parse(process::cargo(all.copied()))
    }

    /// Runs a call of `cargo metadata` and parses its output.
    pub(crate) fn parse(cargo: Command) -> Result<Metadata> {
        Ok(serde_json::from_str(&process::output_of(cargo, LIMIT)?)?)
    }

    /// Returns the package at the root of the workspace: the facade.
    pub(crate) fn root_package(&self) -> Result<Package<'_>> {
        let root = self.packages.iter().find(|package| package.folder() == self.workspace_root);
        Ok(root.ok_or("the workspace has no package at its root")?)
    }
}

impl PackageMetadata {
    /// Returns whether the package has a library, and its manifest does not say how docs.rs builds
    /// its documentation.
    pub(crate) fn lacks_docs_rs(&self) -> bool {
        let has_library =
            self.targets.iter().any(|target| target.kind.first().is_some_and(|kind| kind == "lib"));
        has_library && !self.metadata["docs"]["rs"].is_object()
    }

    /// Returns the folder of the package's manifest.
    pub(crate) fn folder(&self) -> &Path {
        self.manifest_path.parent().unwrap_or(Path::new(""))
    }

    /// Returns the entries of this list in `[package.metadata.kvx]`.
    pub(crate) fn listed(&self, list: &str) -> impl Iterator<Item = &str> {
        self.metadata["kvx"][list].as_array().into_iter().flatten().filter_map(Value::as_str)
    }

    /// Returns `seconds` of `[package.metadata.kvx]`.
    pub(crate) fn seconds_of_tests(&self) -> Option<u64> {
        self.metadata["kvx"]["seconds"].as_u64()
    }

    /// Returns whether the package is a member of the workspace: all packages from paths are.
    pub(crate) fn is_member(&self) -> bool {
        self.source.is_none()
    }
}

impl fmt::Display for PackageMetadata {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.name, self.version)
    }
}

#[cfg(test)]
impl Metadata {
    /// Parses the output of `cargo metadata`.
    pub(crate) fn from_text(text: &str) -> Metadata {
        serde_json::from_str(text).unwrap()
    }
}
