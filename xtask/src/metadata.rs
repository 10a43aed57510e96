//! Reads cargo's metadata of the workspace.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use serde_json::Value;

use crate::Result;
use crate::process::{self, Output};

/// How long cargo may take to resolve the workspace, downloads included.
const LIMIT: Duration = Duration::from_secs(300);

/// The answer of `cargo metadata`.
pub(crate) struct Metadata(Value);

/// One package of it.
#[derive(Clone, Copy)]
pub(crate) struct Package<'a>(&'a Value);

/// What a package depends on.
pub(crate) struct Dependency<'a> {
    pub(crate) name: &'a str,
    /// The versions that it may have; `*` when none are said.
    pub(crate) requirement: &'a str,
    /// Whether it lies beside, instead of in the registry.
    pub(crate) is_path: bool,
    /// Whether only tests need it.
    pub(crate) is_for_tests: bool,
}

/// A `rust-version`: major, minor, patch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct RustVersion(u32, u32, u32);

impl Metadata {
    /// The members of the workspace alone: fast, and downloads nothing.
    pub(crate) fn of_members() -> Result<Metadata> {
        Metadata::load(&["--no-deps"])
    }

    /// The members with all their features, and every package that they build with on this platform, for whatever
    /// purpose (normal, build, dev).
    pub(crate) fn of_everything() -> Result<Metadata> {
        let mut command =
            std::process::Command::new(std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()));
        command.arg("-vV");
        let told = process::run(command, LIMIT, Output::Kept)?.output;
        let host =
            told.lines().find_map(|line| line.strip_prefix("host: ")).ok_or("rustc -vV names no host")?;
        Metadata::load(&["--all-features", "--filter-platform", host])
    }

    fn load(arguments: &[&str]) -> Result<Metadata> {
        let all = ["metadata", "--format-version", "1"].iter().chain(arguments);
        let finished = process::run(process::cargo(all.copied()), LIMIT, Output::Kept)?;
        if !finished.succeeded() {
            return Err(format!("cargo metadata: {}", finished.end).into());
        }
        Ok(Metadata(serde_json::from_str(&finished.output)?))
    }

    /// The folder that cargo builds in.
    pub(crate) fn target_directory(&self) -> Result<PathBuf> {
        let path = self.0["target_directory"].as_str();
        Ok(path.ok_or("cargo metadata names no target directory")?.into())
    }

    /// The package at the root of the workspace: the facade.
    pub(crate) fn root_package(&self) -> Result<Package<'_>> {
        let folder = self.0["workspace_root"].as_str().ok_or("cargo metadata names no workspace root")?;
        let manifest = format!("{folder}/Cargo.toml");
        let root = self.packages().find(|package| package.0["manifest_path"] == manifest.as_str());
        Ok(root.ok_or("the workspace has no package at its root")?)
    }

    /// All packages.
    pub(crate) fn packages(&self) -> impl Iterator<Item = Package<'_>> {
        self.0["packages"].as_array().into_iter().flatten().map(Package)
    }
}

impl<'a> Package<'a> {
    /// Its name.
    pub(crate) fn name(self) -> &'a str {
        self.0["name"].as_str().unwrap_or_default()
    }

    /// Its features, also those that its optional dependencies imply; without `default`.
    pub(crate) fn features(self) -> impl Iterator<Item = &'a str> {
        let features = self.0["features"].as_object().into_iter().flatten();
        features.map(|(name, _)| name.as_str()).filter(|name| *name != "default")
    }

    /// Its version.
    pub(crate) fn version(self) -> &'a str {
        self.0["version"].as_str().unwrap_or_default()
    }

    /// Whether it may be published: its manifest does not say `publish = false`.
    pub(crate) fn is_published(self) -> bool {
        self.0["publish"].is_null()
    }

    /// What its manifest says under this key, if that is a text.
    pub(crate) fn text(self, key: &str) -> Option<&'a str> {
        self.0[key].as_str()
    }

    /// What its manifest lists under this key.
    pub(crate) fn texts(self, key: &str) -> impl Iterator<Item = &'a str> + use<'a> {
        self.0[key].as_array().into_iter().flatten().filter_map(Value::as_str)
    }

    /// Whether it has a library.
    pub(crate) fn has_library(self) -> bool {
        let mut targets = self.0["targets"].as_array().into_iter().flatten();
        targets.any(|target| target["kind"][0] == "lib")
    }

    /// Whether it says how its documentation is built.
    pub(crate) fn says_docs_rs(self) -> bool {
        self.0["metadata"]["docs"]["rs"].is_object()
    }

    /// What it depends on, for whatever purpose.
    pub(crate) fn dependencies(self) -> impl Iterator<Item = Dependency<'a>> {
        let all = self.0["dependencies"].as_array().into_iter().flatten();
        all.map(|dependency| Dependency {
            name: dependency["name"].as_str().unwrap_or_default(),
            requirement: dependency["req"].as_str().unwrap_or_default(),
            is_path: dependency["path"].is_string(),
            is_for_tests: dependency["kind"] == "dev",
        })
    }

    /// Where its manifest lies.
    pub(crate) fn manifest(self) -> &'a str {
        self.0["manifest_path"].as_str().unwrap_or_default()
    }

    /// What its manifest lists under this name in `[package.metadata.kvx]`.
    pub(crate) fn listed(self, list: &str) -> impl Iterator<Item = &'a str> + use<'a> {
        self.0["metadata"]["kvx"][list].as_array().into_iter().flatten().filter_map(Value::as_str)
    }

    /// The names of its targets.
    pub(crate) fn targets(self) -> impl Iterator<Item = &'a str> {
        self.0["targets"].as_array().into_iter().flatten().filter_map(|target| target["name"].as_str())
    }

    /// Whether it comes from a path: a member, as the workspace has no other such packages.
    pub(crate) fn is_member(self) -> bool {
        self.0["source"].is_null()
    }

    /// The `rust-version` that it asks for, if any.
    pub(crate) fn rust_version(self) -> Option<RustVersion> {
        RustVersion::parse(self.0["rust_version"].as_str()?)
    }
}

impl fmt::Display for Package<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.name(), self.0["version"].as_str().unwrap_or_default())
    }
}

impl RustVersion {
    /// Reads `1.88` or `1.88.0`.
    fn parse(text: &str) -> Option<RustVersion> {
        let mut parts = text.split('.').map(|part| part.parse().ok());
        Some(RustVersion(parts.next()??, parts.next()??, parts.next().unwrap_or(Some(0))?))
    }
}

impl fmt::Display for RustVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.0, self.1)?;
        if self.2 > 0 { write!(f, ".{}", self.2) } else { Ok(()) }
    }
}

#[cfg(test)]
impl Metadata {
    /// What cargo would answer with this text.
    pub(crate) fn from_text(text: &str) -> Metadata {
        Metadata(serde_json::from_str(text).unwrap())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rust_versions_compare_as_numbers() {
        let version = |text| RustVersion::parse(text).unwrap();
        assert!(version("1.9") < version("1.88"));
        assert!(version("1.88") < version("1.88.1"));
        assert_eq!(version("1.88"), version("1.88.0"));
        assert_eq!(version("1.88.0").to_string(), "1.88");
        assert_eq!(RustVersion::parse("stable"), None);
    }

    #[test]
    fn the_root_package_is_found_by_its_place() {
        let metadata = Metadata::from_text(
            r#"{"workspace_root": "/w", "target_directory": "/t", "packages": [
                {"name": "core", "manifest_path": "/w/core/Cargo.toml", "features": {}},
                {"name": "facade", "manifest_path": "/w/Cargo.toml",
                 "features": {"default": ["tcp"], "tcp": [], "shm": []}}]}"#,
        );
        let root = metadata.root_package().unwrap();
        assert_eq!(root.name(), "facade");
        assert_eq!(root.features().collect::<Vec<_>>(), ["shm", "tcp"]);
        assert_eq!(metadata.target_directory().unwrap(), PathBuf::from("/t"));
    }
}
