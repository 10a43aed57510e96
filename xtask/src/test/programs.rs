//! The test programs that cargo builds, each to be run as a process of its own.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use serde_json::Value;

use super::FEATURES;
use super::tier::Tier;
use crate::Result;
use crate::metadata::{Metadata, Package};
use crate::process::{self, Output};

/// How long the build of all of them may take.
const BUILD_LIMIT: Duration = Duration::from_secs(40 * 60);

/// What a crate's manifest may say of its test programs, below `[package.metadata.kvx]`: lists of targets' names.
/// Those of the first run while nothing else does, those of the second are part of the fast tier.
const LISTS: [&str; 2] = ["alone", "fast"];

/// A program of tests.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct TestProgram {
    /// What follows `cargo test` to run it and no other: its name wherever it is told.
    pub(crate) title: String,
    /// Whether it is run while no other runs, because it measures what others would disturb.
    pub(crate) alone: bool,
    /// The least tier that it is a part of.
    pub(crate) tier: Tier,
    /// About how many seconds it takes where nothing is known of an earlier run.
    pub(crate) guess: f64,
    call: Call,
}

#[derive(Clone, Debug, PartialEq)]
enum Call {
    /// As `cargo test` would: in the package's folder.
    Executable { file: PathBuf, manifest: PathBuf },
    /// Documentation tests: rustdoc's, whom only cargo can call.
    Cargo,
}

#[cfg(test)]
impl TestProgram {
    /// One of this name.
    pub(crate) fn of_nothing(title: &str) -> TestProgram {
        let (tier, call) = (Tier::Usual, Call::Cargo);
        TestProgram { title: title.to_owned(), alone: false, tier, guess: 1.0, call }
    }
}

impl TestProgram {
    /// Returns what follows `cargo test` to build and run it as it was here.
    pub(crate) fn shown(&self) -> String {
        format!("{} {FEATURES}", self.title)
    }

    /// The process that runs its tests.
    pub(crate) fn command(&self) -> Command {
        match &self.call {
            Call::Executable { file, manifest } => {
                let mut command = Command::new(file);
                let folder = manifest.parent().unwrap_or(Path::new("."));
                command.current_dir(folder).env("CARGO_MANIFEST_DIR", folder);
                command.env("CARGO_MANIFEST_PATH", manifest);
                command
            }
            Call::Cargo => {
                let mut command = process::cargo(["test"]);
                command.args(self.title.split(' ')).arg(FEATURES);
                command
            }
        }
    }

    /// The process that runs the test of this name and no other.
    pub(crate) fn command_of(&self, test: &str) -> Command {
        let mut command = self.command();
        if self.call == Call::Cargo {
            command.arg("--");
        }
        command.args(["--exact", test]);
        command
    }
}

/// Builds the test programs of the packages that `of` chooses (`--workspace`, `-p NAME`) and lists those of `tier`.
pub(crate) fn build(of: &str, tier: Tier, workspace: &Metadata) -> Result<Vec<TestProgram>> {
    if let Some(wrong) = unknown(workspace) {
        return Err(wrong.into());
    }
    let line = format!("test {of} {FEATURES} --no-run");
    let mut cargo = process::cargo(line.split(' '));
    cargo.arg("--message-format=json-render-diagnostics");
    println!("cargo {line}");
    let built = process::run(cargo, BUILD_LIMIT, Output::Kept)?;
    if !built.succeeded() {
        return Err(format!("{} (cargo {line})", built.end).into());
    }
    let mut programs = listed(&built.output, workspace)?;
    programs.push(TestProgram {
        title: format!("{of} --doc"),
        alone: false,
        tier: Tier::Usual,
        guess: 60.0,
        call: Call::Cargo,
    });
    programs.retain(|program| program.tier <= tier);
    Ok(programs)
}

/// The first name in a manifest's lists of test programs that is no target of the crate.
fn unknown(workspace: &Metadata) -> Option<String> {
    workspace.packages().find_map(|package| {
        let mut names = LISTS.iter().flat_map(|list| package.listed(list));
        let name = names.find(|name| package.targets().all(|target| target != *name))?;
        Some(format!("{}: [package.metadata.kvx] lists {name}, which is no target", package.manifest()))
    })
}

/// The test programs among what cargo says that it made.
fn listed(messages: &str, workspace: &Metadata) -> Result<Vec<TestProgram>> {
    let mut programs = Vec::new();
    for message in messages.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok()) {
        let test = message["reason"] == "compiler-artifact" && message["profile"]["test"] == true;
        let (Some(file), Some(manifest)) =
            (message["executable"].as_str(), message["manifest_path"].as_str())
        else {
            continue;
        };
        if !test {
            continue;
        }
        let package = workspace.packages().find(|package| package.manifest() == manifest);
        let package =
            package.ok_or_else(|| format!("cargo built a test of {manifest}, which is no member"))?;
        let kind = message["target"]["kind"][0].as_str().unwrap_or_default();
        let name = message["target"]["name"].as_str().unwrap_or_default();
        programs.push(of_target(package, kind, name, file));
    }
    Ok(programs)
}

fn of_target(package: Package<'_>, kind: &str, name: &str, file: &str) -> TestProgram {
    let [alone, fast] = LISTS;
    let is_in = |list: &str| package.listed(list).any(|target| target == name);
    let (flags, unit, guess) = match kind {
        "test" => (format!("--test {name}"), false, if name == "it" { 120.0 } else { 10.0 }),
        "bin" => (format!("--bin {name}"), true, 5.0),
        "example" => (format!("--example {name}"), false, 5.0),
        _ => ("--lib".to_owned(), true, 5.0),
    };
    let quick = unit || is_in(fast);
    TestProgram {
        title: format!("-p {} {flags}", package.name()),
        alone: is_in(alone),
        tier: if quick { Tier::Fast } else { Tier::Usual },
        guess,
        call: Call::Executable { file: file.into(), manifest: package.manifest().into() },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WORKSPACE: &str = r#"{"packages": [
        {"name": "core", "manifest_path": "/w/core/Cargo.toml"},
        {"name": "ucx", "manifest_path": "/w/ucx/Cargo.toml",
         "metadata": {"kvx": {"alone": ["timing"], "fast": ["conformance"]}}}]}"#;

    fn message(package: &str, kind: &str, name: &str, test: bool) -> String {
        format!(
            r#"{{"reason":"compiler-artifact","manifest_path":"/w/{package}/Cargo.toml","target":{{"kind":["{kind}"],"name":"{name}"}},"profile":{{"test":{test}}},"executable":"/t/{name}-0"}}"#
        )
    }

    #[test]
    fn test_programs_are_found_among_what_cargo_made() {
        let messages = [
            message("core", "lib", "core", true),
            "   Compiling something".to_owned(),
            message("ucx", "example", "short", false),
            message("ucx", "test", "timing", true),
            message("ucx", "test", "conformance", true),
            r#"{"reason":"build-finished","success":true}"#.to_owned(),
        ];
        let programs = listed(&messages.join("\n"), &Metadata::from_text(WORKSPACE));
        let programs = programs.unwrap();
        let told: Vec<_> = programs.iter().map(|p| (p.title.as_str(), p.alone, p.tier)).collect();
        assert_eq!(
            told,
            [
                ("-p core --lib", false, Tier::Fast),
                ("-p ucx --test timing", true, Tier::Usual),
                ("-p ucx --test conformance", false, Tier::Fast),
            ]
        );
        assert_eq!(programs[1].shown(), "-p ucx --test timing --all-features");
        let command = programs[1].command_of("it_is_quick");
        assert_eq!(command.get_current_dir(), Some(Path::new("/w/ucx")));
        assert_eq!(command.get_args().collect::<Vec<_>>(), ["--exact", "it_is_quick"]);
    }

    #[test]
    fn a_program_of_a_stranger_is_an_error() {
        let error = listed(&message("other", "lib", "other", true), &Metadata::from_text(WORKSPACE));
        assert!(error.unwrap_err().to_string().contains("/w/other/Cargo.toml"));
    }

    #[test]
    fn a_manifest_that_names_no_program_of_its_own_is_an_error() {
        assert_eq!(unknown(&Metadata::of_members().unwrap()), None);
        let wrong = unknown(&Metadata::from_text(WORKSPACE)).unwrap();
        assert!(wrong.contains("/w/ucx/Cargo.toml") && wrong.contains("timing"), "{wrong}");
    }
}
