//! The programs and libraries that a machine with a GPU is shown with: as cargo built them, or unpacked from an
//! archive.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use serde_json::Value;

use super::checks::Needs;
use crate::Result;
use crate::install::site_packages;
use crate::metadata::Metadata;
use crate::process::{self, Output};
use crate::test::features_of_all;
use crate::test::tier::{self, Tier};

/// A program of the kit: a target of a package.
pub(crate) struct KitProgram {
    pub(crate) name: &'static str,
    /// The package's folder.
    package: &'static str,
    target: &'static str,
}

pub(crate) const PROGRAMS: &[KitProgram] = &[
    KitProgram { name: "kvx", package: "kvx-cli", target: "kvx" },
    KitProgram { name: "cuda-devices", package: "kvx-cuda", target: "stand_in" },
    KitProgram { name: "cuda-conformance", package: "kvx-cuda", target: "conformance" },
    KitProgram { name: "connector-ranks", package: "kvx-connector", target: "ranks" },
    KitProgram { name: "ucx-conformance", package: "kvx-ucx", target: "conformance" },
    KitProgram { name: "rixl-conformance", package: "kvx-rixl", target: "conformance" },
];

/// The stand-in's file, which the test programs want beside them.
pub(crate) const STAND_IN: &str = "libkvx_stand_in.so";
/// kvx's plug-in for NIXL.
const PLUGIN: &str = "libplugin_KVX.so";
/// The libraries of ours that lie beside the programs.
const LIBRARIES: [&str; 2] = [STAND_IN, PLUGIN];
/// Where NIXL looks for plug-ins, instead of its own folder.
const PLUGIN_DIR: &str = "NIXL_PLUGIN_DIR";
/// This program.
pub(crate) const XTASK: &str = "xtask";

/// Where the driver is, unless the variable says it.
const DRIVER: (&str, &str) = ("KVX_CUDA_LIB", "libcuda.so.1");

/// Below the folder of a wheel's environment.
pub(crate) const UCX: (&str, &str) = ("ucx", "libucx/lib/libucp.so.0");
pub(crate) const RIXL: (&str, &str) = ("nixl", ".nixl_cu12.mesonpy.libs/libnixl_capi.so");

/// How long a build may take.
const BUILD_LIMIT: Duration = Duration::from_secs(40 * 60);
/// How long the program may look for devices.
const LOOK_LIMIT: Duration = Duration::from_secs(60);

/// What is built.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Profile {
    /// What the tests have built, all of it.
    Dev,
    Release,
}

/// Where everything is.
pub(crate) struct Kit {
    /// The programs by their names in the kit, this one and the stand-in too.
    pub(crate) files: BTreeMap<&'static str, PathBuf>,
    /// Other people's libraries, as `cargo xtask test --install` lays them out.
    pub(crate) peers: PathBuf,
}

/// The device that everything runs on.
pub(crate) struct Device {
    pub(crate) line: String,
    pub(crate) is_stand_in: bool,
}

impl Kit {
    /// Builds the programs.
    pub(crate) fn build(profile: Profile) -> Result<Self> {
        let calls = match profile {
            // As `cargo xtask test` calls it: another choice of packages or features would be another build of them.
            Profile::Dev => {
                vec![format!("test --workspace --no-run{}", features_of_all(Tier::of_variable()))]
            }
            Profile::Release => vec![
                "build --release -p kvx-cli -p kvx-nixl".to_owned(),
                "test --release --no-run -p kvx-cuda -p kvx-ucx -p kvx-rixl --test conformance --test stand_in".to_owned(),
                "test --release --no-run -p kvx-connector --features runtime --test ranks".to_owned(),
            ],
        };
        let mut files = BTreeMap::from([(XTASK, std::env::current_exe()?)]);
        for line in calls {
            let mut cargo = process::cargo(line.split(' '));
            cargo.arg("--message-format=json-render-diagnostics");
            println!("cargo {line}");
            let built = process::run(cargo, BUILD_LIMIT, Output::Kept)?;
            if !built.succeeded() {
                return Err(format!("cargo {line}: {}", built.end).into());
            }
            files.extend(built.output.lines().filter_map(artifact).flatten());
        }
        let peers = Metadata::of_members()?.target_directory()?.join("peers");
        Kit { files, peers }.whole()
    }

    /// What lies in a folder.
    pub(crate) fn unpacked(folder: &Path) -> Result<Self> {
        let folder = std::path::absolute(folder)?;
        let names = PROGRAMS.iter().map(|program| program.name).chain(LIBRARIES).chain([XTASK]);
        let files = names.map(|name| (name, folder.join(name))).filter(|(_, file)| file.is_file()).collect();
        Kit { files, peers: folder.join("peers") }.whole()
    }

    fn whole(self) -> Result<Self> {
        let mut names = PROGRAMS.iter().map(|program| program.name).chain(LIBRARIES);
        match names.find(|name| !self.files.contains_key(name)) {
            Some(missing) => Err(format!("the kit has no {missing}").into()),
            None => Ok(self),
        }
    }

    /// A program of it, to be started with the driver and the libraries that there are; NIXL has the plug-ins that are
    /// needed.
    pub(crate) fn command(&self, program: &str, needs: Needs) -> Result<Command> {
        let file = self.files.get(program).ok_or_else(|| format!("the kit has no {program}"))?;
        let mut command = Command::new(file);
        command.env(DRIVER.0, driver());
        command.env(tier::VARIABLE, Tier::Whole.name());
        // NIXL and UCX talk; what they say of the ends of peers is what the tests are about.
        command.env("NIXL_LOG_LEVEL", "fatal").env("UCX_LOG_LEVEL", "fatal");
        for (variable, needs) in [("KVX_UCX_LIB", Needs::Ucx), ("KVX_RIXL_LIB", Needs::Rixl)] {
            if let Some(library) = self.library(needs) {
                command.env(variable, library);
            }
        }
        if needs == Needs::KvxInNixl {
            let plugin = self.files.get(PLUGIN).ok_or_else(|| format!("the kit has no {PLUGIN}"))?;
            command.env(PLUGIN_DIR, plugin.parent().ok_or("a library lies in a folder")?);
        }
        Ok(command)
    }

    /// Whether there is what something needs.
    pub(crate) fn has(&self, needs: Needs) -> bool {
        needs == Needs::Nothing || self.library(needs).is_some()
    }

    /// Why something that needs it does not run.
    pub(crate) fn lacks(&self, needs: Needs) -> String {
        format!("no {needs} lies in {}: cargo xtask test --install, before packing", self.peers.display())
    }

    fn library(&self, needs: Needs) -> Option<PathBuf> {
        let (peer, file) = match needs {
            Needs::Nothing => return None,
            Needs::Ucx => UCX,
            Needs::Rixl | Needs::KvxInNixl => RIXL,
        };
        site_packages(&self.peers.join(peer).join("venv"))
            .map(|folder| folder.join(file))
            .find(|file| file.is_file())
    }

    /// The first NVIDIA device. Errors: the program's own words on why there is none.
    pub(crate) fn device(&self) -> Result<Device> {
        let mut command = self.command("kvx", Needs::Nothing)?;
        command.args(["devices", "--json"]);
        let told = process::run(command, LOOK_LIMIT, Output::Kept)?;
        if !told.succeeded() {
            return Err(
                "nothing can be shown here: no device, see above for the reason and what to do".into()
            );
        }
        let devices: Value = serde_json::from_str(&told.output)?;
        let nvidias = devices.as_array().into_iter().flatten().find(|device| device["kind"] == "cuda");
        let device = nvidias.ok_or("there is a device, but none of NVIDIA's: kvx devices says why")?;
        let word = |field: &str| device[field].as_str().unwrap_or_default().to_owned();
        Ok(Device {
            line: format!("{} at {}, driver of CUDA {}", word("name"), word("bus"), word("version")),
            is_stand_in: word("version").contains(STAND_IN),
        })
    }
}

/// The driver that the device is used through. It is said to the test programs, which take the stand-in otherwise.
fn driver() -> OsString {
    std::env::var_os(DRIVER.0).unwrap_or_else(|| DRIVER.1.into())
}

/// The files of the kit in a line of cargo's.
fn artifact(line: &str) -> Option<Vec<(&'static str, PathBuf)>> {
    let message: Value = serde_json::from_str(line).ok()?;
    let target = message["target"]["name"].as_str()?;
    let package = Path::new(message["manifest_path"].as_str()?).parent()?.file_name()?.to_str()?;
    let mut files = Vec::new();
    // A program as such, or a test program; not the unit tests of a program.
    let is_program = message["target"]["kind"][0] != "bin" || message["profile"]["test"] == false;
    if let (Some(file), true) = (message["executable"].as_str(), is_program) {
        let programs =
            PROGRAMS.iter().filter(|program| (program.package, program.target) == (package, target));
        files.extend(programs.map(|program| (program.name, file.into())));
    }
    let libraries = message["filenames"].as_array().into_iter().flatten().filter_map(Value::as_str);
    for file in libraries {
        let name = LIBRARIES.into_iter().find(|name| file.ends_with(name));
        files.extend(name.map(|name| (name, file.into())));
    }
    Some(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cargos_lines_name_the_files() {
        let line = |package: &str, target: &str, kind: &str, test: bool| {
            let text = format!(
                r#"{{"manifest_path":"/x/{package}/Cargo.toml","target":{{"name":"{target}","kind":["{kind}"]}},
                    "profile":{{"test":{test}}},"executable":"/t/{target}","filenames":["/t/{target}"]}}"#
            );
            artifact(&text).unwrap()
        };
        assert_eq!(line("kvx-cli", "kvx", "bin", false), [("kvx", "/t/kvx".into())]);
        assert_eq!(line("kvx-cli", "kvx", "bin", true), [], "its unit tests");
        assert_eq!(
            line("kvx-ucx", "conformance", "test", true),
            [("ucx-conformance", "/t/conformance".into())]
        );
        assert_eq!(line("kvx-connector", "ranks", "test", true), [("connector-ranks", "/t/ranks".into())]);
        assert_eq!(line("kvx-native", "conformance", "test", true), []);
        let library = r#"{"manifest_path":"/x/stand-in/Cargo.toml","target":{"name":"kvx_stand_in"},
                          "filenames":["/t/libkvx_stand_in.rlib","/t/libkvx_stand_in.so"]}"#;
        assert_eq!(artifact(library).unwrap(), [(STAND_IN, "/t/libkvx_stand_in.so".into())]);
        let plugin = r#"{"manifest_path":"/x/kvx-nixl/Cargo.toml","target":{"name":"plugin_KVX","kind":["cdylib"]},
                         "filenames":["/t/libplugin_KVX.so"]}"#;
        assert_eq!(artifact(plugin).unwrap(), [(PLUGIN, "/t/libplugin_KVX.so".into())]);
        assert!(artifact(r#"{"reason":"build-finished","success":true}"#).is_none());
    }
}
