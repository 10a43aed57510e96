//! The steps of `cargo xtask test`, as data: a new check is a new row.

use std::time::Duration;

/// One step: what runs, how long it may take, and how its result is counted.
pub(crate) struct Step {
    /// The name that is printed and that `--only` takes.
    pub(crate) name: &'static str,
    /// What it does.
    pub(crate) action: Action,
    /// When it is killed and counted as a failure.
    pub(crate) limit: Duration,
}

/// What a step does.
pub(crate) enum Action {
    /// Runs cargo; counts as one passed or one failed.
    Cargo(&'static CargoCall),
    /// Runs cargo on test harnesses; each test counts.
    Harness(&'static CargoCall),
    /// The checks of `cargo xtask features`; counts as one passed or one failed.
    Features,
    /// No line is too wide; counts as one passed or one failed.
    Width,
}

/// Arguments and environment of one call of cargo.
pub(crate) struct CargoCall {
    /// What follows `cargo`, separated by single spaces.
    pub(crate) line: &'static str,
    /// Variables set for this call only.
    pub(crate) environment: &'static [(&'static str, &'static str)],
}

/// The limit of a step whose row has no reason for another.
pub(crate) const LIMIT: Duration = Duration::from_secs(20 * 60);

/// Every step, in the order in which they run: what is cheap to find out comes first.
pub(crate) const STEPS: &[Step] = &[
    Step {
        name: "format",
        action: Action::Cargo(&CargoCall { line: "fmt --all --check", environment: &[] }),
        limit: LIMIT,
    },
    // The formatter leaves comments and texts as wide as they are.
    Step { name: "width", action: Action::Width, limit: LIMIT },
    Step {
        name: "lints",
        action: Action::Cargo(&CargoCall {
            line: "clippy --workspace --all-targets -- -D warnings",
            environment: &[],
        }),
        limit: LIMIT,
    },
    Step {
        name: "lints-all-features",
        action: Action::Cargo(&CargoCall {
            line: "clippy --workspace --all-targets --all-features -- -D warnings",
            environment: &[],
        }),
        limit: LIMIT,
    },
    Step {
        name: "docs",
        action: Action::Cargo(&CargoCall {
            line: "doc --workspace --no-deps",
            environment: &[("RUSTDOCFLAGS", "-D warnings")],
        }),
        limit: LIMIT,
    },
    // The committed bindings are what the headers say.
    Step {
        name: "bindings",
        action: Action::Cargo(&CargoCall { line: "xtask bindings --check", environment: &[] }),
        limit: LIMIT,
    },
    // The committed PTX is what the source says, and the source is one for AMD devices too.
    Step {
        name: "kernels",
        action: Action::Cargo(&CargoCall { line: "xtask kernels --check", environment: &[] }),
        limit: LIMIT,
    },
    // Unit, integration and documentation tests, and with them the conformance suite, its breakers (`catches`),
    // the multi-process and the fault tests: whatever `cargo test` finds.
    Step {
        name: "tests",
        action: Action::Harness(&CargoCall { line: "test --workspace --no-fail-fast", environment: &[] }),
        // It builds every test program and runs them one after the other.
        limit: Duration::from_secs(40 * 60),
    },
    // As README shows it.
    Step {
        name: "demo",
        action: Action::Cargo(&CargoCall { line: "run --release -- demo", environment: &[] }),
        limit: LIMIT,
    },
    // What is carried to a machine with a GPU works there, as far as the stand-in can tell.
    Step {
        name: "gpu",
        action: Action::Cargo(&CargoCall { line: "xtask gpu --rehearse", environment: &[] }),
        limit: LIMIT,
    },
    Step { name: "features", action: Action::Features, limit: LIMIT },
];

/// The names of the steps, in order.
pub(crate) fn names() -> impl Iterator<Item = &'static str> {
    STEPS.iter().map(|step| step.name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_fit_for_a_file_name() {
        let mut seen = std::collections::BTreeSet::new();
        for name in names() {
            assert!(name.chars().all(|c| c.is_ascii_lowercase() || c == '-'), "{name}");
            assert!(seen.insert(name), "{name} is there twice");
        }
    }

    #[test]
    fn the_demo_is_the_command_that_the_readme_shows() {
        let readme = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../README.md"))
            .expect("README.md lies at the root of the repository");
        let demo = STEPS.iter().find(|step| step.name == "demo").expect("there is a demo step");
        let Action::Cargo(call) = &demo.action else { panic!("the demo is a call of cargo") };
        let shown = format!("cargo {}", call.line);
        assert!(readme.lines().any(|line| line.trim() == shown), "README.md has no line `{shown}`");
    }
}
