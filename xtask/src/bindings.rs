//! `cargo xtask bindings`: the committed bindings to native libraries, and the headers that they come from.
//!
//! The generator is a workspace of its own in `xtask/bindings`, so that bindgen is built only when it is asked for.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::Result;
use crate::metadata::Metadata;
use crate::process::{self, Output};
use crate::skips::{self, Skip};
use crate::test::steps;

/// A generated file.
struct Binding {
    /// The library and the version of its headers, as they are printed.
    library: &'static str,
    version: &'static str,
    /// The generator's name for it.
    row: &'static str,
    /// Where it is, below the root of the repository.
    file: &'static str,
    /// The file whose items it does not repeat.
    beside: Option<&'static str>,
    /// Where the headers are, below the target directory if the path is relative; `*` is any folder.
    prefix: &'static str,
    /// Below the prefix: what says which version the headers are of. None: headers of our own, in the repository.
    package: &'static [&'static str],
}

const BINDINGS: &[Binding] = &[
    Binding {
        library: "ucx",
        version: "1.13.1",
        row: "ucx",
        file: "kvx-ucx/src/ffi/bindings_1_13.rs",
        beside: None,
        prefix: "/usr",
        package: &["lib/x86_64-linux-gnu/pkgconfig/ucx.pc", "lib/aarch64-linux-gnu/pkgconfig/ucx.pc"],
    },
    Binding {
        library: "ucx",
        version: "1.22.0",
        row: "ucx-sgl",
        file: "kvx-ucx/src/ffi/bindings_1_22.rs",
        beside: Some("kvx-ucx/src/ffi/bindings_1_13.rs"),
        prefix: "peers/ucx/venv/lib/*/site-packages/libucx",
        package: &["lib/pkgconfig/ucx.pc"],
    },
    Binding {
        library: "libfabric",
        version: "1.17.0",
        row: "libfabric",
        file: "kvx-libfabric/src/ffi/bindings_1_17.rs",
        beside: None,
        prefix: "/usr",
        package: &[
            "lib/x86_64-linux-gnu/pkgconfig/libfabric.pc",
            "lib/aarch64-linux-gnu/pkgconfig/libfabric.pc",
        ],
    },
    Binding {
        library: "mooncake",
        version: "transfer_engine.h",
        row: "mooncake",
        file: "kvx-mooncake/src/ffi/bindings.rs",
        beside: None,
        prefix: "kvx-mooncake/adapter",
        package: &[],
    },
    Binding {
        library: "mooncake",
        version: "adapter.h",
        row: "mooncake-adapter",
        file: "kvx-mooncake/src/ffi/adapter_bindings.rs",
        beside: None,
        prefix: "kvx-mooncake/adapter",
        package: &[],
    },
    Binding {
        library: "nixl",
        version: "nixl_capi.h",
        row: "nixl",
        file: "kvx-rixl/src/ffi/bindings.rs",
        beside: None,
        prefix: "kvx-rixl/src/ffi",
        package: &[],
    },
];

/// What makes every row run.
const CURE: &str = "cargo xtask test --install on Debian 12";

/// Writes every file again, or only compares; false if a compared one differs.
pub(crate) fn run(check: bool) -> Result<bool> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().ok_or("xtask lies in no repository")?;
    let target = Metadata::of_members()?.target_directory()?;
    let mut held = true;
    for binding in BINDINGS {
        let title = format!("{} {}", binding.library, binding.version);
        let found = if binding.package.is_empty() {
            Ok(root.join(binding.prefix))
        } else {
            headers(binding, &target)
        };
        let include = match found {
            Ok(include) => include,
            Err(reason) => {
                skips::note(&Skip { name: title, reason, cure: CURE.to_owned() })?;
                continue;
            }
        };
        let generated = generate(binding, root, &target, &include)?;
        let file = root.join(binding.file);
        if std::fs::read_to_string(&file).is_ok_and(|committed| committed == generated) {
            println!("{title}: identical");
        } else if check {
            held = false;
            println!("{title}: differs: run `cargo xtask bindings` and commit {}", binding.file);
        } else {
            std::fs::write(&file, generated)?;
            println!("{title}: written to {}", binding.file);
        }
    }
    Ok(held)
}

/// The folder of the headers, if they are of the right version; else why not.
fn headers(binding: &Binding, target: &Path) -> std::result::Result<PathBuf, String> {
    let Binding { library, version, .. } = binding;
    let prefix =
        matching(target, binding.prefix).ok_or_else(|| format!("no {library} {version} is installed"))?;
    let package = binding.package.iter().find_map(|file| std::fs::read_to_string(prefix.join(file)).ok());
    let found =
        package.as_deref().and_then(|text| text.lines().find_map(|line| line.strip_prefix("Version:")));
    match found.map(str::trim) {
        Some(found) if found == *version => Ok(prefix.join("include")),
        Some(found) => {
            Err(format!("the headers in {} are of {library} {found}, not {version}", prefix.display()))
        }
        None => Err(format!("no headers of {library} {version} in {}", prefix.display())),
    }
}

/// The first path below `base` that fits `pattern`.
fn matching(base: &Path, pattern: &str) -> Option<PathBuf> {
    match pattern.split_once("/*/") {
        None => Some(base.join(pattern)).filter(|path| path.is_dir()),
        Some((before, after)) => {
            let folders = std::fs::read_dir(base.join(before)).ok()?.flatten();
            folders.map(|folder| folder.path().join(after)).find(|path| path.is_dir())
        }
    }
}

fn generate(binding: &Binding, root: &Path, target: &Path, include: &Path) -> Result<String> {
    let mut command: Command = process::cargo(["run", "--quiet", "--release", "--locked"]);
    command.arg("--manifest-path").arg(root.join("xtask/bindings/Cargo.toml"));
    command.arg("--target-dir").arg(target.join("xtask/bindings"));
    command.arg("--").arg(binding.row).arg(include).args(binding.beside.map(|file| root.join(file)));
    let finished = process::run(command, steps::LIMIT, Output::Kept)?;
    if finished.succeeded() {
        Ok(finished.output)
    } else {
        Err(format!("the generator of {}: {}", binding.file, finished.end).into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_count_only_in_their_version() {
        let target = std::env::temp_dir().join(format!("kvx-xtask-headers-{}", std::process::id()));
        let sgl = BINDINGS.iter().find(|binding| binding.row == "ucx-sgl").unwrap();
        assert!(headers(sgl, &target).unwrap_err().contains("no ucx 1.22.0 is installed"));
        let prefix = target.join("peers/ucx/venv/lib/python3.11/site-packages/libucx");
        std::fs::create_dir_all(prefix.join("lib/pkgconfig")).unwrap();
        assert!(headers(sgl, &target).unwrap_err().contains("no headers"));
        let package = prefix.join("lib/pkgconfig/ucx.pc");
        std::fs::write(&package, "Name: ucx\nVersion: 1.21.0\n").unwrap();
        assert!(headers(sgl, &target).unwrap_err().contains("are of ucx 1.21.0"));
        std::fs::write(&package, "Name: ucx\nVersion: 1.22.0\n").unwrap();
        assert_eq!(headers(sgl, &target), Ok(prefix.join("include")));
        std::fs::remove_dir_all(target).unwrap();
    }

    #[test]
    fn every_file_is_committed_and_names_its_version() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        for binding in BINDINGS {
            let text = std::fs::read_to_string(root.join(binding.file)).unwrap();
            let first = text.lines().next().unwrap();
            assert!(first.contains("cargo xtask bindings") && first.contains(binding.version), "{first}");
        }
    }
}
