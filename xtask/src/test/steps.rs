//! The steps of `cargo xtask test`, as data: a new check is a new row.

use std::time::Duration;

use super::tier::Tier;

/// A step: what runs, how long it may take, and when it is part of a run.
pub(crate) struct Step {
    /// The name that is printed and that `--only` takes.
    pub(crate) name: &'static str,
    /// What it does.
    pub(crate) action: Action,
    /// When it is killed and counted as a failure; for tests: when each program is.
    pub(crate) limit: Duration,
    /// The lowest tier that it is part of.
    pub(crate) tier: Tier,
    /// The crates that it is about; empty: all of them.
    pub(crate) of: &'static [&'static str],
}

/// What a step does. All but [`Action::Tests`] count as one passed or one failed.
pub(crate) enum Action {
    /// Runs cargo.
    Cargo(&'static CargoCall),
    /// Installs what the tests need, if the options ask for it.
    Install,
    /// Builds the test programs and runs each of them; each test counts.
    Tests,
    /// Checks the spelling.
    Spelling,
    /// Checks what is compiled in: the cheap checks, or every choice of features.
    Features { all: bool },
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

/// Every step, in order: cheap checks come first. Lints, documentation and tests share one choice of features, so that
/// nothing is compiled twice.
pub(crate) const STEPS: &[Step] = &[
    Step { tier: Tier::Fast, ..step("format", cargo(&call("fmt --all --check"))) },
    Step {
        tier: Tier::Fast,
        ..step("lints", cargo(&call("clippy {crates} --all-targets --all-features -- -D warnings")))
    },
    Step { of: &["kvx-transfer", "kvx-core"], ..step("features", Action::Features { all: false }) },
    step("docs", cargo(&denying_warnings("doc {crates} --no-deps --all-features", &[WARNINGS]))),
    // Everything before this row needs nothing that the tests need: it runs while that is installed.
    Step { tier: Tier::Fast, ..step("install", Action::Install) },
    step("spelling", Action::Spelling),
    // The committed PTX is what the source says, and the source is one for AMD devices too.
    Step { of: &["kvx-cuda", "kvx-rocm"], ..step("kernels", cargo(&call("xtask kernels --check"))) },
    // Unit, integration and documentation tests, and with them the conformance suite and what breaks it.
    Step { tier: Tier::Fast, ..step("tests", Action::Tests) },
    // The committed bindings are what the headers say.
    Step {
        of: &["kvx-ucx", "kvx-libfabric", "kvx-mooncake", "kvx-rixl"],
        ..whole("bindings", cargo(&call("xtask bindings --check")))
    },
    // As docs.rs builds them: with a compiler's unstable mark of what needs which feature.
    whole(
        "docs-rs",
        cargo(&denying_warnings(
            "doc {crates} --no-deps --all-features",
            &[("RUSTDOCFLAGS", "-D warnings --cfg docsrs"), ("RUSTC_BOOTSTRAP", "1")],
        )),
    ),
    // As README shows it. The tests of kvx-cli run the same command of the debug build.
    Step { of: &["kvx-cli"], ..whole("demo", cargo(&call("run --release -- demo"))) },
    // What is carried to a machine with a GPU works there, as far as the stand-in can tell.
    Step { of: &["kvx-cuda"], ..whole("gpu", cargo(&call("xtask gpu --rehearse"))) },
    Step { of: &["kvx-transfer", "kvx-core"], ..whole("feature-choices", Action::Features { all: true }) },
    // Each benchmark once: nothing is measured here.
    Step {
        of: &["kvx-transfer"],
        ..whole("bench", cargo(&call("test --workspace --all-features --bench costs -- --test")))
    },
    // The wheel for those whose NIXL is one, as docs/vllm.md shows it.
    Step { of: &["kvx-nixl"], ..whole("wheel", cargo(&call("xtask wheel --check"))) },
    // What users get builds alone, and README's program on it; licences and versions are those of deny.toml.
    Step { of: &["kvx-transfer"], ..whole("package", cargo(&call("xtask package"))) },
];

/// Makes rustdoc fail where it would warn.
const WARNINGS: (&str, &str) = ("RUSTDOCFLAGS", "-D warnings");

/// A step about every crate, from the usual tier on.
const fn step(name: &'static str, action: Action) -> Step {
    Step { name, action, limit: LIMIT, tier: Tier::Usual, of: &[] }
}

/// A step of the whole tier.
const fn whole(name: &'static str, action: Action) -> Step {
    Step { tier: Tier::Whole, ..step(name, action) }
}

const fn cargo(call: &'static CargoCall) -> Action {
    Action::Cargo(call)
}

const fn call(line: &'static str) -> CargoCall {
    CargoCall { line, environment: &[] }
}

const fn denying_warnings(
    line: &'static str,
    environment: &'static [(&'static str, &'static str)],
) -> CargoCall {
    CargoCall { line, environment }
}

impl Step {
    /// Whether it is part of `tier`, and about the crate of this name, if one is named.
    pub(crate) fn is_part_of(&self, tier: Tier, package: Option<&str>) -> bool {
        self.tier <= tier && package.is_none_or(|name| self.of.is_empty() || self.of.contains(&name))
    }
}

/// Returns the names of the steps, in order.
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
        let readme = std::fs::read_to_string(crate::root().join("README.md")).unwrap();
        let demo = STEPS.iter().find(|step| step.name == "demo").unwrap();
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
        assert_eq!(of(Tier::Fast, None), ["format", "lints", "install", "tests"]);
        let usual = ["format", "lints", "features", "docs", "install", "spelling", "kernels", "tests"];
        assert_eq!(of(Tier::Usual, None), usual);
        assert_eq!(of(Tier::Whole, None), names().collect::<Vec<_>>());
        assert!(of(Tier::Whole, Some("kvx-ucx")).contains(&"bindings"));
        assert!(!of(Tier::Whole, Some("kvx-ucx")).contains(&"demo"));
    }

    #[test]
    fn steps_name_crates_that_there_are() {
        let workspace = crate::metadata::Metadata::of_members().unwrap();
        for name in STEPS.iter().flat_map(|step| step.of) {
            assert!(workspace.packages().any(|package| package.name() == *name), "{name}");
        }
    }
}
