//! The test programs that cargo builds, each of which runs in a separate process.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::time::Duration;

use super::tier::Tier;
use crate::Result;
use crate::metadata::{self, Artifact, Metadata};
use crate::process::{self, Output, locked};

/// The features of lints, documentation and tests: the same for all, so that cargo compiles no
/// crate twice.
pub(crate) const FEATURES: &str = "--all-features";
/// The time limit of the build of all programs.
const BUILD_LIMIT: Duration = Duration::from_secs(40 * 60);

/// Lists of test targets that a manifest may have in `[package.metadata.kvx]`: those that run while
/// no other program does, and those that are part of the fast tier. `seconds` there says about how
/// long the crate's integration tests take.
const LISTS: [&str; 2] = ["alone", "fast"];

/// A program of tests.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct TestProgram {
    /// The arguments with which `cargo test` runs it and no other.
    pub(crate) title: String,
    /// True if the program must run alone, because other programs would disturb its measurements.
    pub(crate) alone: bool,
    /// The lowest tier that the program is a part of.
    pub(crate) tier: Tier,
    /// The approximate run time in seconds: the longest programs start first.
    pub(crate) seconds: u64,
    call: Call,
}

#[derive(Clone, Debug, PartialEq)]
enum Call {
    /// Runs in the package's folder, as with `cargo test`.
    Executable { file: PathBuf, manifest: PathBuf },
    /// Documentation tests, which only cargo can run.
    Cargo,
}

impl TestProgram {
    /// Names the documentation tests of these packages or, in tests, another program.
    pub(crate) fn named(title: &str) -> TestProgram {
        let (tier, call) = (Tier::Usual, Call::Cargo);
        TestProgram { title: title.to_owned(), alone: false, tier, seconds: 60, call }
    }

    /// Returns the arguments with which `cargo test` builds and runs it as here.
    pub(crate) fn shown(&self) -> String {
        format!("{} {FEATURES}", self.title)
    }

    /// Returns the command that runs its tests.
    pub(crate) fn command(&self) -> Command {
        match &self.call {
            Call::Executable { file, manifest } => {
                let mut command = Command::new(file);
                let folder = manifest.parent().unwrap_or(Path::new("."));
                command.current_dir(folder).env("CARGO_MANIFEST_DIR", folder);
                command.env("CARGO_MANIFEST_PATH", manifest).env("NO_COLOR", "1");
                command
            }
            Call::Cargo => {
                let mut command = process::cargo(["test"]);
                command.args(self.title.split(' ')).arg(FEATURES).env("CARGO_TERM_COLOR", "never");
                command
            }
        }
    }

    /// Returns the command that runs one test.
    pub(crate) fn command_of(&self, test: &str) -> Command {
        let mut command = self.command();
        if self.call == Call::Cargo {
            command.arg("--");
        }
        command.args(["--exact", test]);
        command
    }
}

/// Builds the test programs of the packages that `of` chooses (`--workspace`, `-p NAME`) and lists
/// those of `tier`.
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
    programs.push(TestProgram::named(&format!("{of} --doc")));
    programs.retain(|program| program.tier <= tier);
    programs.sort_by_key(|program| std::cmp::Reverse(program.seconds));
    Ok(programs)
}

/// Calls `run` with each program, in order, on `threads` threads, and returns the results.
pub(crate) fn run_in_parallel<T: Send>(
    programs: Vec<TestProgram>,
    threads: usize,
    run: impl Fn(TestProgram) -> T + Sync,
) -> Vec<T> {
    let (queue, results) = (Mutex::new(programs.into_iter()), Mutex::new(Vec::new()));
    let next = || locked(&queue).next();
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some(program) = next() {
                    let result = run(program);
                    locked(&results).push(result);
                }
            });
        }
    });
    results.into_inner().unwrap_or_default()
}

/// Returns an error for the first name in a manifest's lists of test programs that is no target of
/// the crate.
fn unknown(workspace: &Metadata) -> Option<String> {
    workspace.packages.iter().find_map(|package| {
        let mut names = LISTS.iter().flat_map(|list| package.listed(list));
        let name = names.find(|name| package.targets.iter().all(|target| target.name != *name))?;
        Some(format!("{package}: [package.metadata.kvx] lists {name}, which is no target"))
    })
}

/// Returns the test programs that cargo reports to have built.
fn listed(output: &str, workspace: &Metadata) -> Result<Vec<TestProgram>> {
    let mut programs = Vec::new();
    for artifact in metadata::artifacts(output).filter(|artifact| artifact.profile.test) {
        let Artifact { manifest_path: manifest, target, executable: Some(file), .. } = artifact
        else {
            continue;
        };
        let package = workspace.packages.iter().find(|package| package.manifest_path == manifest);
        let package = package
            .ok_or_else(|| format!("cargo built a test of {}, no member", manifest.display()))?;
        let [alone, fast] = LISTS.map(|list| package.listed(list).any(|name| name == target.name));
        let kind = target.kind[0].as_str();
        let flags = match kind {
            "test" | "bin" | "example" => format!("--{kind} {}", target.name),
            _ => "--lib".to_owned(),
        };
        let has_unit_tests = !["test", "example"].contains(&kind);
        programs.push(TestProgram {
            title: format!("-p {} {flags}", package.name),
            alone,
            tier: if has_unit_tests || fast { Tier::Fast } else { Tier::Usual },
            seconds: if kind == "test" { package.seconds_of_tests().unwrap_or(20) } else { 5 },
            call: Call::Executable { file, manifest },
        });
    }
    Ok(programs)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    const WORKSPACE: &str = r#"{"packages": [
        {"name": "core", "manifest_path": "/w/core/Cargo.toml"},
        {"name": "ucx", "manifest_path": "/w/ucx/Cargo.toml",
         "metadata": {"kvx": {"alone": ["timing"], "fast": ["conformance"], "seconds": 90}}}]}"#;

    fn message(package: &str, kind: &str, name: &str, test: bool) -> String {
        format!(
            r#"{{"reason":"compiler-artifact","manifest_path":"/w/{package}/Cargo.toml","target":{{"kind":["{kind}"],"name":"{name}"}},"profile":{{"test":{test}}},"executable":"/t/{name}-0","filenames":[]}}"#
        )
    }

    #[test]
    fn test_programs_are_found_among_the_artifacts() {
        let messages = [
            message("core", "lib", "core", true),
            "   Compiling something".to_owned(),
            message("ucx", "example", "short", false),
            message("ucx", "test", "timing", true),
            message("ucx", "test", "conformance", true),
            r#"{"reason":"build-finished","success":true}"#.to_owned(),
        ];
        let programs = listed(&messages.join("\n"), &Metadata::from_text(WORKSPACE)).unwrap();
        let fields = programs.iter().map(|p| (p.title.as_str(), p.alone, p.tier, p.seconds));
        assert_eq!(
            fields.collect::<Vec<_>>(),
            [
                ("-p core --lib", false, Tier::Fast, 5),
                ("-p ucx --test timing", true, Tier::Usual, 90),
                ("-p ucx --test conformance", false, Tier::Fast, 90),
            ]
        );
        assert_eq!(programs[1].shown(), "-p ucx --test timing --all-features");
        let command = programs[1].command_of("it_is_quick");
        assert_eq!(command.get_current_dir(), Some(Path::new("/w/ucx")));
        assert_eq!(command.get_args().collect::<Vec<_>>(), ["--exact", "it_is_quick"]);
    }

    #[test]
    fn unknown_packages_and_targets_are_errors() {
        let error =
            listed(&message("other", "lib", "other", true), &Metadata::from_text(WORKSPACE));
        assert!(error.unwrap_err().to_string().contains("/w/other/Cargo.toml"));
        assert_eq!(unknown(&Metadata::of_members().unwrap()), None);
        let wrong = unknown(&Metadata::from_text(WORKSPACE)).unwrap();
        assert!(wrong.starts_with("ucx") && wrong.contains("timing"), "{wrong}");
    }

    #[test]
    fn each_program_runs_once_and_no_more_at_a_time_than_there_are_threads() {
        let programs: Vec<_> = (0..20).map(|i| TestProgram::named(&i.to_string())).collect();
        let (running, most) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let mut ran = run_in_parallel(programs.clone(), 3, |program| {
            most.fetch_max(running.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            std::thread::yield_now();
            running.fetch_sub(1, Ordering::SeqCst);
            program
        });
        ran.sort_by_key(|program| program.title.parse::<usize>().unwrap());
        assert_eq!(ran, programs);
        assert!(most.into_inner() <= 3);
    }
}
