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
