//! `cargo xtask interop mistralrs`: runs engines on mistral.rs, joined by kvx. It puts the hook of
//! `interop/mistralrs/hook` into a copy of the crate that cargo downloads, and builds the server with that.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use serde::Deserialize;
use serde_json::Value;

use crate::metadata::Metadata;
use crate::process::{self, Deadline, must_succeed};
use crate::{Result, root};

/// The crate that the hook is put into, and the release that it was written for.
const CRATE: (&str, &str) = ("mistralrs-core", "0.8.1");
/// The limit of the builds; the first one builds some 600 crates.
const BUILD: Duration = Duration::from_secs(90 * 60);
const RUN: Duration = Duration::from_secs(30 * 60);

/// The parts that check.py runs alone: models, backends, and `kvx serve` in the same fleet.
pub(super) const PARTS: [&str; 5] = ["llama", "qwen2", "SHM", "TCP", "kvx"];

/// Lines that are put into a file of the crate.
#[derive(Deserialize)]
struct Insertion {
    file: PathBuf,
    /// The beginning of the one line that they are put before.
    before: String,
    lines: Vec<String>,
}

/// Builds the server and runs these parts, or all; returns false if something was not as it must be.
pub(super) fn run(only: &[String]) -> Result<bool> {
    let (deadline, target) = (Deadline::after(BUILD), Metadata::of_members()?.target_directory()?);
    let (here, built) = (root().join("interop/mistralrs"), target.join("interop"));
    put_hook_in(&downloaded(&here, &built.join("download"), deadline)?, &here)?;
    let mut cargo = process::cargo(["build", "--locked"]);
    cargo.current_dir(&here).env("CARGO_TARGET_DIR", &built);
    must_succeed(cargo, deadline)?;
    super::build("kvx-cli")?;
    let mut check = Command::new("python3");
    check.arg(here.join("check.py")).arg(built.join("debug/kvx-interop-mistralrs"));
    check.arg(target.join("release/kvx")).arg(built.join("mistralrs")).args(only);
    check.env("PYTHONUNBUFFERED", "1").env("PYTHONDONTWRITEBYTECODE", "1");
    check.env("PYTHONPATH", root().join("xtask/src/interop/vllm"));
    process::shown_to_succeed(check, RUN)
}

/// Has cargo download the crate and returns its folder.
fn downloaded(here: &Path, folder: &Path, deadline: Deadline) -> Result<PathBuf> {
    let (name, version) = CRATE;
    std::fs::create_dir_all(folder.join("src"))?;
    std::fs::write(folder.join("src/lib.rs"), "")?;
    let manifest = format!(
        "[workspace]\n[package]\nname = \"download\"\nedition = \"2024\"\n[dependencies]\n\
         {name} = {{ version = \"={version}\", default-features = false }}\n"
    );
    std::fs::write(folder.join("Cargo.toml"), manifest)?;
    // The same dependencies as in the build that follows.
    std::fs::copy(here.join("Cargo.lock"), folder.join("Cargo.lock"))?;
    let mut cargo = process::cargo(["metadata", "--format-version", "1"]);
    cargo.current_dir(folder);
    let metadata: Value = serde_json::from_str(&process::output_of(cargo, deadline.left())?)?;
    let mut packages = metadata["packages"].as_array().into_iter().flatten();
    let package = packages.find(|package| package["name"] == name && package["version"] == version);
    let manifest = package.and_then(|package| package["manifest_path"].as_str());
    let folder = manifest.and_then(|manifest| Path::new(manifest).parent());
    Ok(folder.ok_or_else(|| format!("cargo did not download {name} {version}"))?.to_owned())
}

/// Copies the crate to `.core`, with the hook. Files that are right already stay untouched, so that cargo builds only
/// what has changed.
fn put_hook_in(source: &Path, here: &Path) -> Result<()> {
    let insertions = insertions(here)?;
    let mut files = vec![(here.join("hook/outside_kv.rs"), PathBuf::from("src/outside_kv.rs"))];
    let mut folders = vec![source.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder)? {
            let path = entry?.path();
            if path.is_dir() {
                folders.push(path);
            } else {
                let name = path.strip_prefix(source)?.to_owned();
                files.push((path, name));
            }
        }
    }
    for (from, name) in files {
        let mut contents = std::fs::read(&from)?;
        for insertion in insertions.iter().filter(|insertion| insertion.file == name) {
            contents = insertion.put_in(&String::from_utf8(contents)?)?.into_bytes();
        }
        let to = here.join(".core").join(name);
        if std::fs::read(&to).ok().as_ref() != Some(&contents) {
            std::fs::create_dir_all(to.parent().ok_or("a file lies in a folder")?)?;
            std::fs::write(to, contents)?;
        }
    }
    Ok(())
}

fn insertions(here: &Path) -> Result<Vec<Insertion>> {
    Ok(serde_json::from_str(&std::fs::read_to_string(here.join("hook/insertions.json"))?)?)
}

impl Insertion {
    fn put_in(&self, text: &str) -> Result<String> {
        let mut lines: Vec<_> = text.split_inclusive('\n').map(str::to_owned).collect();
        let starts: Vec<_> = (0..lines.len()).filter(|at| lines[*at].starts_with(&self.before)).collect();
        let [at] = starts[..] else {
            let (file, count, before) = (self.file.display(), starts.len(), &self.before);
            let why =
                format!("{file} has {count} lines that begin with `{before}`: the hook does not fit it");
            return Err(why.into());
        };
        lines.splice(at..at, self.lines.iter().map(|line| format!("{line}\n")));
        Ok(lines.concat())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(file: &str) -> String {
        std::fs::read_to_string(root().join("interop/mistralrs").join(file)).unwrap()
    }

    #[test]
    fn the_hook_has_at_most_60_lines_and_the_server_300() {
        let inserted = insertions(&root().join("interop/mistralrs")).unwrap();
        let inserted: usize = inserted.iter().map(|insertion| insertion.lines.len()).sum();
        let hook = text("hook/outside_kv.rs").lines().count() + inserted;
        let is_code = |line: &&str| !line.trim().is_empty() && !line.trim_start().starts_with("//");
        let code = |file| text(file).lines().filter(is_code).count();
        let server = code("src/main.rs") + code("src/kv.rs");
        assert!(hook <= 60 && server <= 300, "{hook} lines of hook, {server} of the server's code");
    }

    #[test]
    fn lines_are_put_before_exactly_one_line() {
        let (before, lines) = ("mod b;".to_owned(), vec!["mod a;".to_owned()]);
        let insertion = Insertion { file: "a.rs".into(), before, lines };
        assert_eq!(insertion.put_in("// mod b;\nmod b;\n").unwrap(), "// mod b;\nmod a;\nmod b;\n");
        for text in ["mod c;\n", "mod b;\nmod b;\n"] {
            assert!(insertion.put_in(text).unwrap_err().to_string().contains("the hook does not fit it"));
        }
    }

    #[test]
    fn the_manifest_and_the_lock_file_name_the_release_of_the_hook() {
        let (name, version) = CRATE;
        assert!(text("Cargo.toml").contains(&format!("{name} = {{ version = \"={version}\"")));
        assert!(text("Cargo.lock").contains(&format!("name = \"{name}\"\nversion = \"{version}\"")));
    }
}
