//! The programs and libraries that test a machine with a GPU: as cargo built them, or unpacked from
//! the archive of a kit.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use super::parts::{Action, Needs, Part};
use crate::install::{Environment, NIXL_LIBRARY};
use crate::metadata::{self, Artifact, Metadata};
use crate::process;
use crate::test::programs::FEATURES;
use crate::test::tier::{self, Tier};
use crate::{Result, root};

/// The programs: their names in the kit, the folders of their packages, and their targets.
pub(crate) const PROGRAMS: [(&str, &str, &str); 5] = [
    ("kvx", "kvx-cli", "kvx"),
    ("cuda", "kvx-cuda", "it"),
    ("connector", "kvx-connector", "it"),
    ("ucx", "kvx-ucx", "it"),
    ("rixl", "kvx-rixl", "it"),
];

/// The features of the program `kvx`: without the server and the router it is a quarter as large.
const FEATURES_OF_KVX: &str = "--no-default-features --features \
    kvx-cli/shm,kvx-cli/tcp,kvx-cli/ucx,kvx-cli/rixl,kvx-cli/cuda";

/// The stand-in for a driver, which the test programs load from their folder.
pub(crate) const STAND_IN: &str = "libkvx_stand_in.so";
/// kvx's plug-in for NIXL.
const PLUGIN: &str = "libplugin_KVX.so";
/// The libraries that lie in the folder of the programs.
const LIBRARIES: [&str; 2] = [STAND_IN, PLUGIN];
/// xtask itself.
pub(crate) const XTASK: &str = "xtask";

/// The folder of the scripts that run inside NIXL's Python, and the scripts, in the repository.
pub(crate) const SCRIPTS: &str = "kvx-nixl/tests/python";
pub(crate) const SCRIPT_NAMES: [&str; 2] = ["agent.py", "conformance.py"];
/// The folder of the scripts in a kit.
const PACKED_SCRIPTS: &str = "python";
/// The file of a kit that names the commit.
pub(crate) const REVISION: &str = "revision";

/// The time limit of a build.
const BUILD_LIMIT: Duration = Duration::from_secs(40 * 60);

/// The location of all files.
pub(crate) struct Kit {
    /// The programs by their names in the kit, xtask and the libraries included.
    pub(crate) files: BTreeMap<&'static str, PathBuf>,
    /// Third-party libraries, in the layout of `cargo xtask test --install`.
    pub(crate) peers: PathBuf,
    /// The folder of the scripts.
    scripts: PathBuf,
    /// The commit that it was built from.
    pub(crate) revision: String,
    /// The driver's library. Without it, test programs would use the stand-in.
    driver: PathBuf,
}

impl Kit {
    /// Builds the programs, for release or as the tests build them.
    pub(crate) fn build(release: bool) -> Result<Self> {
        let calls = if release {
            vec![
                format!("build --release -p kvx-cli -p kvx-nixl {FEATURES_OF_KVX}"),
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
        let peers = Metadata::of_members()?.target_directory.join("peers");
        let (scripts, revision) = (root().join(SCRIPTS), revision());
        Kit { files, peers, scripts, revision, driver: driver() }.checked()
    }

    /// Returns the kit in the folder of an unpacked archive.
    pub(crate) fn unpacked(folder: &Path) -> Result<Self> {
        let folder = std::path::absolute(folder)?;
        let files = names().chain([XTASK]).map(|name| (name, folder.join(name)));
        let files = files.filter(|(_, file)| file.is_file()).collect();
        let revision = std::fs::read_to_string(folder.join(REVISION))?.trim().to_owned();
        let (peers, scripts) = (folder.join("peers"), folder.join(PACKED_SCRIPTS));
        Kit { files, peers, scripts, revision, driver: driver() }.checked()
    }

    /// Uses the stand-in in place of the driver.
    pub(crate) fn over_the_stand_in(mut self) -> Result<Self> {
        self.driver = self.file(STAND_IN)?.to_owned();
        Ok(self)
    }

    fn checked(self) -> Result<Self> {
        names().try_for_each(|name| self.file(name).map(|_| ()))?;
        Ok(self)
    }

    fn file(&self, name: &str) -> Result<&Path> {
        Ok(self.files.get(name).ok_or_else(|| format!("the kit has no {name}"))?)
    }

    /// Returns the command of a part; `python` runs scripts. Over the stand-in, parts are short and
    /// use no PyTorch, which would find no device.
    pub(crate) fn command_of(&self, part: &Part, python: &Path, stand_in: bool) -> Result<Command> {
        let mut command = match &part.action {
            Action::Tests { program, arguments, quick } => {
                let mut command = self.command(program)?;
                command.args(if stand_in { quick } else { arguments });
                command
            }
            Action::Bench(arguments) => {
                let mut command = self.command("kvx")?;
                command.args(["bench", "--json"]);
                command.args(bench_arguments(arguments, stand_in));
                command
            }
            Action::Nixl { test, backends } => {
                let mut command = Command::new(python);
                command.arg(self.scripts.join("conformance.py")).arg(test);
                command.env("KVX_BACKENDS", backends).env("PYTHONDONTWRITEBYTECODE", "1");
                command.envs(self.nixl_packages().map(|packages| ("PYTHONPATH", packages)));
                command.envs((!stand_in).then_some(("KVX_NIXL_TEST_TORCH", "1")));
                self.with_variables(&mut command);
                command
            }
        };
        if matches!(part.needs, Needs::KvxInNixl | Needs::Torch) {
            command.envs(self.file(PLUGIN)?.parent().map(|folder| ("NIXL_PLUGIN_DIR", folder)));
        }
        Ok(command)
    }

    /// Returns a command that runs a program with the driver and the libraries that exist.
    pub(crate) fn command(&self, program: &str) -> Result<Command> {
        let mut command = Command::new(self.file(program)?);
        self.with_variables(&mut command);
        Ok(command)
    }

    fn with_variables(&self, command: &mut Command) {
        command.env("KVX_CUDA_LIB", &self.driver);
        command.env(tier::VARIABLE, Tier::Whole.name());
        // NIXL and UCX log the loss of peers, which the tests cause on purpose.
        command.env("NIXL_LOG_LEVEL", "fatal").env("UCX_LOG_LEVEL", "fatal");
        for (variable, needs) in [("KVX_UCX_LIB", Needs::Ucx), ("KVX_RIXL_LIB", Needs::Nixl)] {
            command.envs(self.library(needs).map(|library| (variable, library)));
        }
    }

    /// Returns the library that something is, if it is in the kit.
    pub(crate) fn library(&self, needs: Needs) -> Option<PathBuf> {
        let (peer, file) = match needs {
            Needs::Nothing => return None,
            Needs::Ucx => ("ucx", "libucx/lib/libucp.so.0"),
            Needs::Nixl | Needs::KvxInNixl | Needs::Torch => ("nixl", NIXL_LIBRARY),
        };
        Environment(self.peers.join(peer).join("venv")).find(file)
    }

    /// Returns the folder with NIXL's Python package.
    pub(crate) fn nixl_packages(&self) -> Option<PathBuf> {
        Environment(self.peers.join("nixl/venv")).find("nixl_cu12")?.parent().map(Path::to_owned)
    }
}

/// Returns the name of the driver's library.
fn driver() -> PathBuf {
    std::env::var_os("KVX_CUDA_LIB").unwrap_or_else(|| "libcuda.so.1".into()).into()
}

/// Returns the commit of the repository, as git describes it.
fn revision() -> String {
    let mut git = Command::new("git");
    git.arg("-C").arg(root()).args(["describe", "--always", "--dirty"]);
    process::output_of(git, Duration::from_secs(60))
        .map_or_else(|_| "unknown".to_owned(), |output| output.trim().to_owned())
}

/// Returns the arguments of a run of the bench. Over the stand-in it moves few bytes.
fn bench_arguments(arguments: &str, stand_in: bool) -> Vec<&str> {
    let mut words: Vec<_> = arguments.split(' ').collect();
    if stand_in {
        for (option, few) in [("--block", "4K"), ("--count", "64")] {
            if let Some(at) = words.iter().position(|word| *word == option) {
                words[at + 1] = few;
            }
        }
        words.extend("--pool 2M --rounds 3 --seconds 0.1".split(' '));
    }
    words
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
    fn a_bench_over_the_stand_in_moves_few_bytes() {
        let words = |stand_in| {
            bench_arguments("--memory device --block 4K,64K --count 8192", stand_in).join(" ")
        };
        assert_eq!(words(false), "--memory device --block 4K,64K --count 8192");
        let few = "--memory device --block 4K --count 64 --pool 2M --rounds 3 --seconds 0.1";
        assert_eq!(words(true), few);
    }

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
