//! The published files: builds of the same bytes in every folder, and checksums.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::metadata::Metadata;
use crate::process::{self, Deadline};
use crate::{Result, all_held, root};

/// The features of the program: all that need no C compiler, without `serve`.
const PROGRAM: &str = "shm,tcp,ucx,libfabric,mooncake,rixl,cuda,rocm,connector,proxy,release";
/// The features of the router in a container: `tls` is for the APIs of Kubernetes and etcd, and
/// needs a C compiler.
const ROUTER_FEATURES: &str = "shm,tcp,proxy,release,tls";
/// The target of static programs. Without a target, cargo would also build macros as static.
const STATIC_TARGET: &str = "x86_64-unknown-linux-gnu";
/// The limit of `cargo xtask reproduce`.
const LIMIT: Duration = Duration::from_secs(2 * 60 * 60);
/// The folders of its builds: paths of different lengths.
const FOLDERS: [&str; 2] = ["first", "the-second-one"];

/// A published file, and what cargo builds for it. Each is built alone: built together, they would
/// contain more than they need.
pub(crate) struct Artefact {
    file: &'static str,
    build: &'static [&'static str],
    /// Links the C library into the file.
    is_static: bool,
}

pub(crate) static ARTEFACTS: [Artefact; 3] = [
    Artefact {
        file: "kvx",
        build: &["-p", "kvx-cli", "--bin", "kvx", "--no-default-features", "--features", PROGRAM],
        is_static: false,
    },
    Artefact { file: "libkvx_python.so", build: &["-p", "kvx-python"], is_static: false },
    Artefact { file: "libplugin_KVX.so", build: &["-p", "kvx-nixl"], is_static: false },
];

/// The router alone, for containers without a C library.
pub(crate) static ROUTER: Artefact = Artefact {
    file: "kvx",
    build: &[
        "-p",
        "kvx-cli",
        "--bin",
        "kvx",
        "--no-default-features",
        "--features",
        ROUTER_FEATURES,
        "--target",
        STATIC_TARGET,
    ],
    is_static: true,
};

/// Returns the names of the published files.
pub(crate) fn names() -> impl Iterator<Item = &'static str> {
    ARTEFACTS.iter().map(|artefact| artefact.file)
}

impl Artefact {
    /// Builds the file from the sources in `from`. Returns its path.
    pub(crate) fn build(&self, from: &Path, target: &Path, deadline: Deadline) -> Result<PathBuf> {
        let mut cargo = process::cargo(["build", "--release", "--locked"]);
        cargo.args(self.build).current_dir(from).arg("--target-dir").arg(target);
        let inherited = inherited_flags(|name| std::env::var(name).ok());
        let mut flags = [inherited, flags(from, target, &cargo_home()?)].concat();
        let folder = match self.is_static {
            true => target.join(STATIC_TARGET),
            false => target.to_owned(),
        };
        if self.is_static {
            flags.extend(["-C", "target-feature=+crt-static"].map(str::to_owned));
        }
        cargo.env("CARGO_ENCODED_RUSTFLAGS", flags.join("\x1f"));
        process::must_succeed(cargo, deadline)?;
        Ok(folder.join("release").join(self.file))
    }
}

/// Returns the flags of the caller's environment, which the variable that
/// [`build`](Artefact::build) sets would hide. As for cargo, CARGO_ENCODED_RUSTFLAGS takes
/// precedence over RUSTFLAGS.
fn inherited_flags(variable: impl Fn(&str) -> Option<String>) -> Vec<String> {
    let (text, separator) = match variable("CARGO_ENCODED_RUSTFLAGS") {
        Some(encoded) => (encoded, '\x1f'),
        None => (variable("RUSTFLAGS").unwrap_or_default(), ' '),
    };
    text.split(separator).filter(|flag| !flag.is_empty()).map(str::to_owned).collect()
}

/// Returns the flags that replace the paths of this machine. The last one that matches a path
/// counts.
fn flags(from: &Path, target: &Path, home: &Path) -> Vec<String> {
    let names = [(home, "/cargo"), (from, "/kvx"), (target, "/target")];
    names.map(|(path, name)| format!("--remap-path-prefix={}={name}", path.display())).into()
}

/// Returns the folder with the sources of dependencies.
fn cargo_home() -> Result<PathBuf> {
    let home = std::env::var_os("CARGO_HOME").map(PathBuf::from);
    let home = home.or_else(|| std::env::home_dir().map(|home| home.join(".cargo")));
    home.ok_or_else(|| "set CARGO_HOME: neither it nor a home directory is known".into())
}

/// Builds the published files from the committed sources in two folders, and compares them.
pub(crate) fn reproduce(only: Option<&str>) -> Result<bool> {
    let deadline = Deadline::after(LIMIT);
    let folder = Metadata::of_members()?.target_directory.join("xtask/reproduce");
    let _ = std::fs::remove_dir_all(&folder); // left by an earlier run
    std::fs::create_dir_all(&folder)?;
    let archive = folder.join("sources.tar");
    let mut git = Command::new("git");
    git.current_dir(root()).args(["archive", "--output"]).arg(&archive).arg("HEAD");
    process::must_succeed(git, deadline)?;
    let mut builds = Vec::new();
    for name in FOLDERS {
        let from = folder.join(name);
        std::fs::create_dir_all(&from)?;
        let mut tar = Command::new("tar");
        tar.arg("-xf").arg(&archive).arg("-C").arg(&from);
        process::must_succeed(tar, deadline)?;
        builds.push(from);
    }
    let mut failures = Vec::new();
    for artefact in ARTEFACTS.iter().filter(|it| only.is_none_or(|only| only == it.file)) {
        let build = |from: &Path| -> Result<(String, PathBuf)> {
            let file = artefact.build(from, &from.join("target"), deadline)?;
            Ok((checksum(&file)?, file))
        };
        let ((one, first), (other, second)) = (build(&builds[0])?, build(&builds[1])?);
        println!("{one}  {}\n{other}  {}", first.display(), second.display());
        if one != other {
            failures.push(format!(
                "{} differs between two builds; compare them with diffoscope",
                artefact.file
            ));
        }
    }
    Ok(all_held(failures))
}

/// Returns the SHA-256 of a file, in hexadecimal digits.
fn checksum(file: &Path) -> Result<String> {
    let mut program = Command::new("sha256sum");
    program.arg("--").arg(file);
    let output = process::output_of(program, Duration::from_secs(60))?;
    let digits = output.trim_start_matches('\\').split(' ').next().unwrap_or_default();
    Ok(digits.to_owned())
}

/// Writes SHA256SUMS into `folder`, for these files below it, as `sha256sum -c` reads it.
pub(crate) fn write_checksums(folder: &Path, mut files: Vec<PathBuf>) -> Result<()> {
    files.sort();
    let mut sums = String::new();
    for file in files {
        let name = file.strip_prefix(folder)?;
        sums.push_str(&format!("{}  {}\n", checksum(&file)?, name.display()));
    }
    std::fs::write(folder.join("SHA256SUMS"), sums)?;
    Ok(())
}

/// Returns the files in `folder` with this extension.
pub(crate) fn files(folder: &Path, extension: &str) -> Result<Vec<PathBuf>> {
    let entries = std::fs::read_dir(folder)?.collect::<std::result::Result<Vec<_>, _>>()?;
    let files = entries.into_iter().map(|entry| entry.path());
    Ok(files.filter(|file| file.extension().is_some_and(|it| it == extension)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_are_those_that_sha256sum_checks() {
        let folder = Metadata::of_members().unwrap().target_directory.join("xtask/checksums");
        std::fs::create_dir_all(folder.join("below")).unwrap();
        for (name, bytes) in [("b.txt", "abc"), ("below/a.txt", "")] {
            std::fs::write(folder.join(name), bytes).unwrap();
        }
        let found = [files(&folder, "txt").unwrap(), files(&folder.join("below"), "txt").unwrap()];
        write_checksums(&folder, found.concat()).unwrap();
        let abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad  b.txt\n";
        let sums = std::fs::read_to_string(folder.join("SHA256SUMS")).unwrap();
        assert!(sums.starts_with(abc), "{sums}");
        let check = || {
            let mut program = Command::new("sha256sum");
            program.current_dir(&folder).args(["--quiet", "-c", "SHA256SUMS"]);
            process::output_of(program, Duration::from_secs(60))
        };
        check().unwrap();
        std::fs::write(folder.join("b.txt"), "other").unwrap();
        check().unwrap_err();
    }

    #[test]
    fn the_program_has_the_default_features_except_for_serve() {
        let manifest = std::fs::read_to_string(root().join("kvx-cli/Cargo.toml")).unwrap();
        let default = manifest.lines().find_map(|line| line.strip_prefix("default = ")).unwrap();
        let default = default.split('"').skip(1).step_by(2).filter(|name| *name != "serve");
        assert_eq!(PROGRAM.split(',').collect::<Vec<_>>(), default.collect::<Vec<_>>());
    }

    #[test]
    fn the_dockerfile_builds_the_router_with_the_same_arguments() {
        let file = std::fs::read_to_string(root().join("deploy/docker/router.Dockerfile")).unwrap();
        let words: Vec<_> = file.split_whitespace().collect();
        for argument in ROUTER.build.iter().chain(&["--release", "--locked"]) {
            assert!(words.contains(argument), "router.Dockerfile lacks {argument}");
        }
        assert!(file.contains("RUSTFLAGS=\"-C target-feature=+crt-static\""), "{file}");
    }

    #[test]
    fn builds_keep_the_flags_of_the_environment() {
        let of = |variables: &[(&str, &str)]| {
            inherited_flags(|name| {
                let found = variables.iter().find(|(variable, _)| *variable == name);
                found.map(|(_, value)| (*value).to_owned())
            })
        };
        assert_eq!(of(&[]), [""; 0]);
        let plain = ("RUSTFLAGS", " -C  target-cpu=native");
        assert_eq!(of(&[plain]), ["-C", "target-cpu=native"]);
        let encoded = ("CARGO_ENCODED_RUSTFLAGS", "--cfg\x1fa b");
        assert_eq!(of(&[plain, encoded]), ["--cfg", "a b"]);
        assert_eq!(of(&[plain, ("CARGO_ENCODED_RUSTFLAGS", "")]), [""; 0]);
    }

    #[test]
    fn builds_replace_the_paths_of_this_machine() {
        let flags = flags(Path::new("/w/kvx"), Path::new("/w/kvx/target"), Path::new("/h/.cargo"));
        // The target directory lies in the sources, so it comes after them.
        assert_eq!(flags[0], "--remap-path-prefix=/h/.cargo=/cargo");
        assert_eq!(flags[1], "--remap-path-prefix=/w/kvx=/kvx");
        assert_eq!(flags[2], "--remap-path-prefix=/w/kvx/target=/target");
        assert!(cargo_home().unwrap().is_absolute());
    }
}
