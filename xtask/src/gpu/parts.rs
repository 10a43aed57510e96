//! The checks of `cargo xtask gpu`, from `gpu.toml`: test programs, runs of the bench, and bars.

use serde::Deserialize;

use crate::Result;
use crate::bars::Bar;

/// The file `gpu.toml`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Table {
    pub(crate) checks: Vec<Check>,
    pub(crate) runs: Vec<BenchRun>,
}

/// A library that something needs besides the driver. None of them reaches the stand-in.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Needs {
    #[default]
    Nothing,
    Ucx,
    Nixl,
    /// NIXL with kvx's own plug-in.
    KvxInNixl,
}

/// A test program that runs on the device.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Check {
    pub(crate) name: String,
    /// A description for the output.
    pub(crate) what: String,
    /// The program's name in the kit.
    pub(crate) program: String,
    #[serde(default)]
    pub(crate) arguments: Vec<String>,
    /// The arguments of a rehearsal over the stand-in.
    pub(crate) quick: Vec<String>,
    #[serde(default)]
    pub(crate) needs: Needs,
}

/// A run of `kvx bench` with blocks of one size and number.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct BenchRun {
    pub(crate) name: String,
    pub(crate) arguments: String,
    pub(crate) block: String,
    pub(crate) count: String,
    #[serde(default)]
    pub(crate) needs: Needs,
    #[serde(default)]
    pub(crate) bars: Vec<Bar>,
}

/// Returns the checks and runs, in their order.
pub(crate) fn table() -> Result<Table> {
    Ok(toml::from_str(include_str!("../../gpu.toml"))?)
}

#[cfg(test)]
mod tests {
    use super::super::kit::PROGRAMS;

    #[test]
    fn checks_are_of_programs_in_the_kit_which_cargo_builds() {
        for check in super::table().unwrap().checks {
            assert!(PROGRAMS.iter().any(|(name, ..)| *name == check.program), "{}", check.name);
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
}
