//! The programs and libraries that test a machine with a GPU: as cargo built them, or unpacked from
//! an archive.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use serde_json::Value;

use super::checks::Needs;
use crate::Result;
use crate::install::{Environment, NIXL_LIBRARY};
use crate::metadata::{self, Artifact, Metadata};
use crate::process;
use crate::test::programs::FEATURES;
use crate::test::tier::{self, Tier};

/// The programs: their names in the kit, the folders of their packages, and their targets.
pub(crate) const PROGRAMS: [(&str, &str, &str); 5] = [
    ("kvx", "kvx-cli", "kvx"),
    ("cuda", "kvx-cuda", "it"),
    ("connector", "kvx-connector", "it"),
    ("ucx", "kvx-ucx", "it"),
    ("rixl", "kvx-rixl", "it"),
];

/// The stand-in for a driver, which the test programs load from their folder.
pub(crate) const STAND_IN: &str = "libkvx_stand_in.so";
/// kvx's plug-in for NIXL.
const PLUGIN: &str = "libplugin_KVX.so";
/// The libraries that lie in the folder of the programs.
const LIBRARIES: [&str; 2] = [STAND_IN, PLUGIN];
/// xtask itself.
pub(crate) const XTASK: &str = "xtask";

/// The time limit of a build.
const BUILD_LIMIT: Duration = Duration::from_secs(40 * 60);
/// The time limit of the search for devices.
const LOOK_LIMIT: Duration = Duration::from_secs(60);

/// The location of all files.
pub(crate) struct Kit {
    /// The programs by their names in the kit, xtask and the libraries included.
    pub(crate) files: BTreeMap<&'static str, PathBuf>,
    /// Third-party libraries, in the layout of `cargo xtask test --install`.
    pub(crate) peers: PathBuf,
}

impl Kit {
    /// Builds the programs, for release or as the tests build them.
    pub(crate) fn build(release: bool) -> Result<Self> {
        let calls = if release {
            vec![
                "build --release -p kvx-cli -p kvx-nixl".to_owned(),
                "test --release --no-run -p kvx-cuda -p kvx-ucx -p kvx-rixl --tests".to_owned(),
                "test --release --no-run -p kvx-connector --test it".to_owned(),
            ]
        } else {
            // Like the call of `cargo xtask test`: another choice of packages or features
            // would build them again.
            vec![format!("test --workspace {FEATURES} --no-run")]
        };
        let mut files = BTreeMap::from([(XTASK, std::env::current_exe()?)]);
        for line in calls {
            println!("cargo {line}");
            let mut cargo = process::cargo(line.split(' '));
            cargo.arg("--message-format=json-render-diagnostics");
            files.extend(files_of_build(&process::output_of(cargo, BUILD_LIMIT)?));
        }
        Kit { files, peers: Metadata::of_members()?.target_directory.join("peers") }.checked()
    }

    /// Returns the kit in a folder.
    pub(crate) fn unpacked(folder: &Path) -> Result<Self> {
        let folder = std::path::absolute(folder)?;
        let files = names().chain([XTASK]).map(|name| (name, folder.join(name)));
        let files = files.filter(|(_, file)| file.is_file()).collect();
        Kit { files, peers: folder.join("peers") }.checked()
    }

    fn checked(self) -> Result<Self> {
        names().try_for_each(|name| self.file(name).map(|_| ()))?;
        Ok(self)
    }

    fn file(&self, name: &str) -> Result<&Path> {
        Ok(self.files.get(name).ok_or_else(|| format!("the kit has no {name}"))?)
    }

    /// Returns a command that runs a program with the driver and the libraries that exist; NIXL
    /// gets the plug-ins that are needed.
    pub(crate) fn command(&self, program: &str, needs: Needs) -> Result<Command> {
        let mut command = Command::new(self.file(program)?);
        // Without the variable, test programs use the stand-in.
        command.env(
            "KVX_CUDA_LIB",
            std::env::var_os("KVX_CUDA_LIB").unwrap_or_else(|| "libcuda.so.1".into()),
        );
        command.env(tier::VARIABLE, Tier::Whole.name());
        // NIXL and UCX log the loss of peers, which the tests cause on purpose.
        command.env("NIXL_LOG_LEVEL", "fatal").env("UCX_LOG_LEVEL", "fatal");
        for (variable, needs) in [("KVX_UCX_LIB", Needs::Ucx), ("KVX_RIXL_LIB", Needs::Nixl)] {
            command.envs(self.library(needs).map(|library| (variable, library)));
        }
        if needs == Needs::KvxInNixl {
            command.envs(self.file(PLUGIN)?.parent().map(|folder| ("NIXL_PLUGIN_DIR", folder)));
        }
        Ok(command)
    }

    /// Returns why something that needs this cannot run, if it cannot.
    pub(crate) fn lacks(&self, needs: Needs) -> Option<String> {
        let lacks = needs != Needs::Nothing && self.library(needs).is_none();
        let peers = self.peers.display();
        lacks.then(|| {
            format!("{needs:?} is not in {peers}: cargo xtask test --install, before packing")
        })
    }

    fn library(&self, needs: Needs) -> Option<PathBuf> {
        let (peer, file) = match needs {
            Needs::Nothing => return None,
            Needs::Ucx => ("ucx", "libucx/lib/libucp.so.0"),
            Needs::Nixl | Needs::KvxInNixl => ("nixl", NIXL_LIBRARY),
        };
        Environment(self.peers.join(peer).join("venv")).find(file)
    }

    /// Describes the first NVIDIA device, and returns whether it is the stand-in. The program
    /// prints why there is none.
    pub(crate) fn device(&self) -> Result<(String, bool)> {
        let mut command = self.command("kvx", Needs::Nothing)?;
        command.args(["devices", "--json"]);
        let output = process::output_of(command, LOOK_LIMIT).map_err(|error| {
            format!("no device; see above for the reason and the remedy ({error})")
        })?;
        let devices: Value = serde_json::from_str(&output)?;
        let device =
            devices.as_array().into_iter().flatten().find(|device| device["kind"] == "cuda");
        let device = device
            .ok_or("there is no NVIDIA device, only others; run kvx devices for the reason")?;
        let [name, bus, version] =
            ["name", "bus", "version"].map(|field| device[field].as_str().unwrap_or_default());
        Ok((format!("{name} at {bus}, driver for CUDA {version}"), version.contains(STAND_IN)))
    }
}

/// Returns the names of the programs and libraries.
fn names() -> impl Iterator<Item = &'static str> {
    PROGRAMS.iter().map(|(name, ..)| *name).chain(LIBRARIES)
}

/// Returns the files of the kit in the output of a build.
fn files_of_build(output: &str) -> BTreeMap<&'static str, PathBuf> {
    let mut files = BTreeMap::new();
    for Artifact { manifest_path, target, profile, executable, filenames } in
        metadata::artifacts(output)
    {
        let package = manifest_path.parent().and_then(Path::file_name).unwrap_or_default();
        // A program, or a test program; not the unit tests of a program.
        if target.kind[0] != "bin" || !profile.test {
            let mut programs =
                PROGRAMS.iter().filter(|(_, folder, of)| package == *folder && *of == target.name);
            files.extend(programs.next().and_then(|(name, ..)| Some((*name, executable?))));
        }
        for file in filenames {
            let name = LIBRARIES.into_iter().find(|name| file.file_name() == Some(name.as_ref()));
            files.extend(name.map(|name| (name, file)));
        }
    }
    files
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_found_in_cargos_lines() {
        let files = |target: &str, kind: &str, test: bool, file: &str| {
            let line = format!(
                r#"{{"manifest_path":"/x/kvx-cli/Cargo.toml","target":{{"name":"{target}","kind":["{kind}"]}},
                    "profile":{{"test":{test}}},"executable":"/t/{target}","filenames":["/t/{file}"]}}"#
            );
            Vec::from_iter(files_of_build(&format!("no JSON\n{}", line.replace('\n', ""))))
        };
        assert_eq!(files("kvx", "bin", false, "kvx"), [("kvx", "/t/kvx".into())]);
        assert_eq!([files("kvx", "bin", true, "kvx"), files("it", "test", true, "it")], [[], []]);
        assert_eq!(
            files("kvx_stand_in", "lib", false, STAND_IN),
            [(STAND_IN, format!("/t/{STAND_IN}").into())]
        );
    }
}
