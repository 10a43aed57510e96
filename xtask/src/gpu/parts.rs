//! The parts of `cargo xtask gpu`, from `gpu.toml`, in their order of value.

use serde::Deserialize;

use crate::Result;
use crate::bars::Bar;

/// The file `gpu.toml`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Table {
    parts: Vec<Part>,
}

/// Something that a part needs besides the driver.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Needs {
    #[default]
    Nothing,
    Ucx,
    Nixl,
    /// NIXL with kvx's own plug-in.
    KvxInNixl,
    /// A Python with NumPy and PyTorch, and NIXL's module for it.
    Torch,
}

impl Needs {
    /// Returns whether it reaches the memory of the stand-in. UCX and NIXL's own plug-ins call the
    /// driver themselves, which the stand-in does not cover.
    pub(crate) fn works_with_the_stand_in(self) -> bool {
        matches!(self, Needs::Nothing | Needs::Torch)
    }
}

/// A part, which runs in a process of its own.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Part {
    pub(crate) name: String,
    /// A description for the output.
    pub(crate) what: String,
    pub(crate) action: Action,
    /// About how long it takes on a device.
    pub(crate) seconds: u64,
    #[serde(default)]
    pub(crate) needs: Needs,
    /// Bars of a run of the bench.
    #[serde(default)]
    pub(crate) bars: Vec<Bar>,
}

/// What a part runs.
#[derive(Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) enum Action {
    /// A test program.
    Tests {
        /// Its name in the kit.
        program: String,
        arguments: Vec<String>,
        /// The arguments over the stand-in.
        quick: Vec<String>,
    },
    /// `kvx bench` with these arguments.
    Bench(String),
    /// A test of conformance.py in kvx-nixl, over these backends.
    Nixl { test: String, backends: String },
}

/// Returns the parts, in their order.
pub(crate) fn table() -> Result<Vec<Part>> {
    Ok(toml::from_str::<Table>(include_str!("../../gpu.toml"))?.parts)
}

#[cfg(test)]
mod tests {
    use super::super::kit::{PROGRAMS, SCRIPTS};
    use super::*;

    #[test]
    fn parts_are_of_programs_in_the_kit_which_cargo_builds() {
        let script = std::fs::read_to_string(crate::root().join(SCRIPTS).join("conformance.py"));
        let script = script.unwrap();
        for part in table().unwrap() {
            match part.action {
                Action::Tests { program, .. } => {
                    assert!(PROGRAMS.iter().any(|(name, ..)| *name == program), "{program}");
                }
                Action::Nixl { test, .. } => {
                    assert!(script.contains(&format!("\ndef {test}():")), "{test}");
                }
                Action::Bench(_) => {}
            }
        }
        let workspace = crate::metadata::Metadata::of_members().unwrap();
        for (_, folder, target) in PROGRAMS {
            let package = workspace
                .packages
                .iter()
                .find(|package| package.folder().ends_with(folder))
                .unwrap();
            assert!(
                package.targets.iter().any(|it| it.name == target),
                "{folder} has no target {target}"
            );
        }
    }

    #[test]
    fn the_first_parts_fit_a_loan_of_eight_minutes() {
        let parts = table().unwrap();
        let last = parts.iter().position(|part| part.name == "contract over UCX").unwrap();
        let seconds: u64 = parts[..=last].iter().map(|part| part.seconds).sum();
        assert!(seconds <= 7 * 60, "{seconds} s");
    }
}
