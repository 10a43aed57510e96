//! The steps of `cargo xtask test`, from `steps.toml`.

use std::collections::BTreeMap;
use std::sync::LazyLock;
use std::time::Duration;

use serde::Deserialize;

use super::tier::Tier;

/// The file `steps.toml`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Table {
    steps: Vec<Step>,
}

/// A step: its work, and the runs that include it.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Step {
    /// The name that is printed and that `--only` takes.
    pub(crate) name: String,
    /// Its work.
    pub(crate) action: Action,
    /// The lowest tier that it is part of.
    #[serde(default)]
    tier: Tier,
    /// The crates that it concerns; empty for all of them.
    #[serde(default)]
    of: Vec<String>,
    /// Environment variables of its call of cargo.
    #[serde(default)]
    pub(crate) environment: BTreeMap<String, String>,
}

/// The work of a step. All but [`Action::Tests`] count as one passed or one failed.
#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Action {
    /// Runs cargo with these arguments, separated by single spaces; `{crates}` stands for the
    /// choice of packages.
    Cargo(String),
    /// Installs the tests' dependencies, if the options request it.
    Install,
    /// Builds the test programs and runs each of them; each test counts.
    Tests,
    /// Checks the spelling.
    Spelling,
    /// Checks the features and dependencies that are compiled in: the cheap checks, or every choice
    /// of features.
    Features { all: bool },
}

/// The time limit of a step or a test program, after which it is killed and counts as failed.
pub(crate) const LIMIT: Duration = Duration::from_secs(20 * 60);

/// Every step, in order.
pub(crate) static STEPS: LazyLock<Vec<Step>> = LazyLock::new(|| {
    let table: Table =
        toml::from_str(include_str!("../../steps.toml")).expect("a test parses steps.toml");
    table.steps
});

impl Step {
    /// Returns whether the step is part of `tier` and, if a crate is named, concerns that crate.
    pub(crate) fn is_part_of(&self, tier: Tier, package: Option<&str>) -> bool {
        self.tier <= tier
            && package.is_none_or(|name| self.of.is_empty() || self.of.iter().any(|of| of == name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_fit_for_a_file_and_crates_exist() {
        let workspace = crate::metadata::Metadata::of_members().unwrap();
        let mut seen = std::collections::BTreeSet::new();
        for Step { name, of, .. } in STEPS.iter() {
            assert!(name.chars().all(|c| c.is_ascii_lowercase() || c == '-'), "{name}");
            assert!(seen.insert(name), "{name} is there twice");
            for name in of {
                assert!(workspace.packages.iter().any(|package| package.name == *name), "{name}");
            }
        }
    }

    #[test]
    fn the_demo_is_the_command_that_the_readme_shows() {
        let readme = std::fs::read_to_string(crate::root().join("README.md")).unwrap();
        let demo = STEPS.iter().find(|step| step.name == "demo").unwrap();
        let Action::Cargo(line) = &demo.action else { panic!("the demo is a call of cargo") };
        let shown = format!("cargo {line}");
        assert!(readme.lines().any(|line| line.trim() == shown), "README.md has no line `{shown}`");
    }

    #[test]
    fn each_tier_includes_the_one_before_it_and_crates_select_steps() {
        let of = |tier, package| {
            let steps = STEPS.iter().filter(move |step| step.is_part_of(tier, package));
            steps.map(|step| step.name.as_str()).collect::<Vec<_>>()
        };
        assert_eq!(of(Tier::Fast, None), ["format", "lints", "install", "tests"]);
        let usual = [
            "format", "lints", "features", "docs", "install", "spelling", "kernels", "tests", "gpu",
        ];
        assert_eq!(of(Tier::Usual, None), usual);
        assert_eq!(
            of(Tier::Whole, None),
            STEPS.iter().map(|step| step.name.as_str()).collect::<Vec<_>>()
        );
        assert!(of(Tier::Whole, Some("kvx-ucx")).contains(&"bindings"));
        assert!(!of(Tier::Whole, Some("kvx-ucx")).contains(&"demo"));
    }
}
