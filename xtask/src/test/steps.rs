//! The steps of `cargo xtask test`, as data: a new check is a new row.

use std::time::Duration;

use super::tier::Tier;

/// One step: what runs, how long it may take, and how its result is counted.
pub(crate) struct Step {
    /// The name that is printed and that `--only` takes.
    pub(crate) name: &'static str,
    /// What it does.
    pub(crate) action: Action,
    /// When it is killed and counted as a failure; for tests: when each program is.
    pub(crate) limit: Duration,
    /// The least tier that it is a part of.
    pub(crate) tier: Tier,
    /// The crates that it is about; empty: all of them.
    pub(crate) of: &'static [&'static str],
}

/// What a step does.
pub(crate) enum Action {
    /// Runs cargo; counts as one passed or one failed.
    Cargo(&'static CargoCall),
    /// Builds the test programs and runs each of them; each test counts.
    Tests,
    /// The checks of `cargo xtask features`; counts as one passed or one failed.
    Features,
    /// Words are spelled correctly; counts as one passed or one failed.
    Spelling,
    /// The checks of `cargo xtask package`; counts as one passed or one failed.
    Package,
}

/// Arguments and environment of one call of cargo.
pub(crate) struct CargoCall {
    /// What follows `cargo`, separated by single spaces; `{crates}` stands for the choice of packages.
    pub(crate) line: &'static str,
    /// Variables set for this call only.
    pub(crate) environment: &'static [(&'static str, &'static str)],
}

/// The limit of a step whose row has no reason for another.
pub(crate) const LIMIT: Duration = Duration::from_secs(20 * 60);

/// Every step, in the order in which they run: what is cheap to find out comes first.
pub(crate) const STEPS: &[Step] = &[
    Step { tier: Tier::Fast, ..step("format", Action::Cargo(&call("fmt --all --check"))) },
    Step {
        tier: Tier::Fast,
        ..step("lints", Action::Cargo(&call("clippy {crates} --all-targets -- -D warnings")))
    },
    step("spelling", Action::Spelling),
    step(
        "lints-all-features",
        Action::Cargo(&call("clippy {crates} --all-targets --all-features -- -D warnings")),
    ),
    step(
        "docs",
        Action::Cargo(&CargoCall {
            line: "doc {crates} --no-deps",
            environment: &[("RUSTDOCFLAGS", "-D warnings")],
        }),
    ),
    // As docs.rs builds them: with a compiler's unstable mark of what needs which feature.
    Step {
        tier: Tier::Whole,
        ..step(
            "docs-rs",
            Action::Cargo(&CargoCall {
                line: "doc {crates} --no-deps --all-features",
                environment: &[("RUSTDOCFLAGS", "-D warnings --cfg docsrs"), ("RUSTC_BOOTSTRAP", "1")],
            }),
        )
    },
    // The committed bindings are what the headers say.
    Step {
        of: &["kvx-ucx", "kvx-libfabric", "kvx-mooncake", "kvx-rixl"],
        ..step("bindings", Action::Cargo(&call("xtask bindings --check")))
    },
    // The committed PTX is what the source says, and the source is one for AMD devices too.
    Step { of: &["kvx-cuda", "kvx-rocm"], ..step("kernels", Action::Cargo(&call("xtask kernels --check"))) },
    // Unit, integration and documentation tests, and with them the conformance suite, its breakers (`catches`),
    // the multi-process and the fault tests: whatever `cargo test` finds, program by program.
    Step { tier: Tier::Fast, ..step("tests", Action::Tests) },
    // As README shows it.
    Step { of: &["kvx-cli"], ..step("demo", Action::Cargo(&call("run --release -- demo"))) },
    // What is carried to a machine with a GPU works there, as far as the stand-in can tell.
    Step { of: &["kvx-cuda"], ..step("gpu", Action::Cargo(&call("xtask gpu --rehearse"))) },
    Step { of: &["kvx-transfer", "kvx-core"], ..step("features", Action::Features) },
    // Each benchmark once, of what the tests have built: nothing is measured here.
    Step {
        of: &["kvx-transfer"],
        tier: Tier::Whole,
        ..step(
            "bench",
            Action::Cargo(&call("test --workspace --features kvx-cli/tls --bench costs -- --test")),
        )
    },
    // The wheel for those whose NIXL is one, as docs/vllm.md shows it.
    Step {
        of: &["kvx-nixl"],
        tier: Tier::Whole,
        ..step("wheel", Action::Cargo(&call("xtask wheel --check")))
    },
    // What users get builds alone, and README's program on it.
    Step { of: &["kvx-transfer"], tier: Tier::Whole, ..step("package", Action::Package) },
];

/// A step of each crate, which the fast tier leaves out.
const fn step(name: &'static str, action: Action) -> Step {
    Step { name, action, limit: LIMIT, tier: Tier::Usual, of: &[] }
}

const fn call(line: &'static str) -> CargoCall {
    CargoCall { line, environment: &[] }
}

impl Step {
    /// Whether it is a part of `tier`, and has to do with the crate of this name, if one is named.
    pub(crate) fn is_part_of(&self, tier: Tier, package: Option<&str>) -> bool {
        self.tier <= tier && package.is_none_or(|name| self.of.is_empty() || self.of.contains(&name))
    }
}

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

    #[test]
    fn each_tier_has_what_the_one_before_it_has_and_a_crate_has_its_part() {
        let of = |tier, package| {
            let steps = STEPS.iter().filter(move |step| step.is_part_of(tier, package));
            steps.map(|step| step.name).collect::<Vec<_>>()
        };
        assert_eq!(of(Tier::Fast, None), ["format", "lints", "tests"]);
        assert_eq!(of(Tier::Whole, None), names().collect::<Vec<_>>());
        assert!(of(Tier::Usual, Some("kvx-ucx")).contains(&"bindings"));
        assert!(!of(Tier::Usual, Some("kvx-ucx")).contains(&"demo"));
    }

    #[test]
    fn steps_name_crates_that_there_are() {
        let workspace = crate::metadata::Metadata::of_members().unwrap();
        for name in STEPS.iter().flat_map(|step| step.of) {
            assert!(workspace.packages().any(|package| package.name() == *name), "{name}");
        }
    }
}
