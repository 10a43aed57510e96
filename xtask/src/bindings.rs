//! `cargo xtask bindings`: generates the committed bindings to native libraries from their headers, by the table
//! `bindings.toml`.
//!
//! The generator is a workspace of its own in `xtask/bindings`, so that only this command builds bindgen.

use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::metadata::Metadata;
use crate::process;
use crate::skips::{self, Skip};
use crate::test::steps;
use crate::{Result, root};

/// The file `bindings.toml`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Table {
    bindings: Vec<Binding>,
}

/// A generated file; `bindings.toml` describes the fields.
#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Binding {
    library: String,
    version: String,
    of: String,
    file: PathBuf,
    beside: Option<PathBuf>,
    prefix: String,
    package: Vec<PathBuf>,
    headers: Vec<String>,
    functions: Vec<String>,
    types: Vec<String>,
    constants: Vec<String>,
    blocked: Vec<String>,
    uses: String,
    adds: Vec<String>,
}

fn bindings() -> Result<Vec<Binding>> {
    Ok(toml::from_str::<Table>(include_str!("../bindings.toml"))?.bindings)
}

/// Writes every file again, or only compares; returns false if a compared one differs.
pub(crate) fn run(check: bool) -> Result<bool> {
    let target = Metadata::of_members()?.target_directory()?;
    let mut held = true;
    for binding in bindings()? {
        let title = format!("{} {}", binding.library, binding.version);
        let include = match headers(&binding, &target) {
            Ok(include) => include,
            Err(reason) => {
                let cure = "cargo xtask test --install on Debian 12".to_owned();
                skips::note(&Skip { name: title, reason, cure })?;
                continue;
            }
        };
        let generated = generate(&binding, &target, &include)?;
        let file = root().join(&binding.file);
        let shown = binding.file.display();
        if std::fs::read_to_string(&file).is_ok_and(|committed| committed == generated) {
            println!("{title}: identical");
        } else if check {
            held = false;
            println!("{title}: differs: run `cargo xtask bindings` and commit {shown}");
        } else {
            std::fs::write(&file, generated)?;
            println!("{title}: written to {shown}");
        }
    }
    Ok(held)
}

/// Returns the folder of the headers, or why they are not those of the right version.
fn headers(binding: &Binding, target: &Path) -> std::result::Result<PathBuf, String> {
    let Binding { library, version, prefix, package, .. } = binding;
    if package.is_empty() {
        return Ok(root().join(prefix));
    }
    let prefix = matching(target, prefix).ok_or(format!("no {library} {version} is installed"))?;
    let package = package.iter().find_map(|file| std::fs::read_to_string(prefix.join(file)).ok());
    let package = package.unwrap_or_default();
    match package.lines().find_map(|line| line.strip_prefix("Version:")).map(str::trim) {
        Some(found) if found == version => Ok(prefix.join("include")),
        Some(found) => {
            Err(format!("the headers in {} are of {library} {found}, not {version}", prefix.display()))
        }
        None => Err(format!("no headers of {library} {version} in {}", prefix.display())),
    }
}

/// Returns the first folder below `base` that fits `pattern`, in which `*` is any folder.
fn matching(base: &Path, pattern: &str) -> Option<PathBuf> {
    let Some((before, after)) = pattern.split_once("/*/") else {
        return Some(base.join(pattern)).filter(|path| path.is_dir());
    };
    let folders = std::fs::read_dir(base.join(before)).ok()?.flatten();
    folders.map(|folder| folder.path().join(after)).find(|path| path.is_dir())
}

/// Runs the generator, which takes pairs of a kind and a value.
fn generate(binding: &Binding, target: &Path, include: &Path) -> Result<String> {
    let mut command = process::cargo(["run", "--quiet", "--release", "--locked"]);
    command.arg("--manifest-path").arg(root().join("xtask/bindings/Cargo.toml"));
    command.arg("--target-dir").arg(target.join("xtask/bindings")).arg("--");
    command.args(["of", &binding.of, "uses", &binding.uses, "include"]).arg(include);
    if let Some(beside) = &binding.beside {
        command.arg("beside").arg(root().join(beside));
    }
    for (kind, values) in [
        ("header", &binding.headers),
        ("function", &binding.functions),
        ("type", &binding.types),
        ("constant", &binding.constants),
        ("blocked", &binding.blocked),
        ("adds", &binding.adds),
    ] {
        for value in values {
            command.args([kind, value]);
        }
    }
    process::output_of(command, steps::LIMIT)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_count_only_in_their_version() {
        let target = std::env::temp_dir().join(format!("kvx-xtask-headers-{}", std::process::id()));
        let bindings = bindings().unwrap();
        let sgl = bindings.iter().find(|binding| binding.beside.is_some()).unwrap();
        assert!(headers(sgl, &target).unwrap_err().contains("no ucx 1.22.0 is installed"));
        let prefix = target.join("peers/ucx/venv/lib/python3.11/site-packages/libucx");
        std::fs::create_dir_all(prefix.join("lib/pkgconfig")).unwrap();
        for (text, answer) in [
            ("", Err("no headers")),
            ("Name: ucx\nVersion: 1.21.0\n", Err("are of ucx 1.21.0")),
            ("Name: ucx\nVersion: 1.22.0\n", Ok(prefix.join("include"))),
        ] {
            std::fs::write(prefix.join("lib/pkgconfig/ucx.pc"), text).unwrap();
            match (headers(sgl, &target), answer) {
                (Ok(found), Ok(wanted)) => assert_eq!(found, wanted),
                (Err(found), Err(wanted)) => assert!(found.contains(wanted), "{found}"),
                (found, wanted) => panic!("{found:?}, not {wanted:?}"),
            }
        }
        std::fs::remove_dir_all(target).unwrap();
    }

    #[test]
    fn every_file_is_committed_and_names_its_version() {
        for binding in bindings().unwrap() {
            let text = std::fs::read_to_string(root().join(&binding.file)).unwrap();
            let first = text.lines().next().unwrap();
            assert!(first.contains("cargo xtask bindings") && first.contains(&binding.version), "{first}");
        }
    }
}
