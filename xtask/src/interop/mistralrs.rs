//! `cargo xtask interop mistralrs`: engines on mistral.rs, joined by kvx. The hook of `interop/mistralrs/hook` is put
//! into a copy of the crate that cargo has downloaded, and the server beside it is built with that.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::install::must_succeed;
use crate::metadata::Metadata;
use crate::process::{self, Output};
use crate::{Result, root};

/// The crate that the hook is put into, and the release that it was written for.
const CRATE: (&str, &str) = ("mistralrs-core", "0.8.1");
/// The first time some 600 crates are built.
const BUILD: Duration = Duration::from_secs(90 * 60);
const RUN: Duration = Duration::from_secs(30 * 60);

/// What check.py runs a part of: models, backends, and `kvx serve` beside them.
pub(super) const PARTS: [&str; 5] = ["llama", "qwen2", "SHM", "TCP", "kvx"];

/// Lines that are put into a file of the crate.
struct Insertion {
    file: String,
    /// Before the one line that begins so.
    before: String,
    lines: String,
}

/// Builds the server and runs these parts, or all; false if something was not as it must be.
pub(super) fn run(only: &[String]) -> Result<bool> {
    let (until, target) = (Instant::now() + BUILD, Metadata::of_members()?.target_directory()?);
    let (here, built) = (root().join("interop/mistralrs"), target.join("interop"));
    let (source, version) = downloaded(&here, &target.join("interop/download"), until)?;
    put_hook_in(&source, &version, &here)?;
    let mut cargo = process::cargo(["build", "--locked"]);
    cargo.current_dir(&here).env("CARGO_TARGET_DIR", &built);
    must_succeed(cargo, until)?;
    must_succeed(process::cargo(["build", "--release", "-p", "kvx-cli"]), until)?;
    let mut check = Command::new("python3");
    check.arg(here.join("check.py")).arg(built.join("debug/kvx-interop-mistralrs"));
    check.arg(target.join("release/kvx")).arg(target.join("interop/mistralrs")).args(only);
    check.env("PYTHONUNBUFFERED", "1").env("PYTHONDONTWRITEBYTECODE", "1");
    check.env("PYTHONPATH", root().join("xtask/src/interop/vllm"));
    let finished = process::run(check, RUN, Output::Shown)?;
    println!("{}", finished.end);
    Ok(finished.succeeded())
}

/// Has cargo download the crate as it was published, in the release that the lock file names; its folder and version.
fn downloaded(here: &Path, folder: &Path, until: Instant) -> Result<(PathBuf, String)> {
    let name = CRATE.0;
    let version = locked(&std::fs::read_to_string(here.join("Cargo.lock"))?)?;
    std::fs::create_dir_all(folder.join("src"))?;
    std::fs::write(folder.join("src/lib.rs"), "")?;
    std::fs::write(
        folder.join("Cargo.toml"),
        format!(
            "[workspace]\n[package]\nname = \"download\"\nedition = \"2024\"\n[dependencies]\n{name} = {{ version = \
             \"={version}\", default-features = false }}\n"
        ),
    )?;
    std::fs::copy(here.join("Cargo.lock"), folder.join("Cargo.lock"))?; // what is built later, and not again
    let mut cargo = process::cargo(["metadata", "--format-version", "1"]);
    cargo.current_dir(folder);
    let told = process::run(cargo, until.saturating_duration_since(Instant::now()), Output::Kept)?;
    if !told.succeeded() {
        return Err(format!("cargo metadata: {}", told.end).into());
    }
    let told: Value = serde_json::from_str(&told.output)?;
    let mut packages = told["packages"].as_array().into_iter().flatten();
    let package = packages.find(|package| package["name"] == name);
    let word = |field: &str| package.and_then(|package| package[field].as_str());
    let (manifest, version) =
        word("manifest_path").zip(word("version")).ok_or("cargo did not download the crate")?;
    let folder = Path::new(manifest).parent().ok_or("a manifest lies in a folder")?;
    Ok((folder.to_owned(), version.to_owned()))
}

/// Copies the crate to `.core`, with the hook. A file that is right already is left alone: cargo builds what has
/// changed.
fn put_hook_in(source: &Path, version: &str, here: &Path) -> Result<()> {
    if version != CRATE.1 {
        return Err(format!("the hook was written for {} {}, and this is {version}", CRATE.0, CRATE.1).into());
    }
    let insertions = insertions(&std::fs::read_to_string(here.join("hook/insertions.json"))?)?;
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
        for insertion in insertions.iter().filter(|insertion| Path::new(&insertion.file) == name) {
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

/// The release of the crate in a lock file.
fn locked(text: &str) -> Result<String> {
    let (_, rest) = text
        .split_once(&format!("name = \"{}\"\nversion = \"", CRATE.0))
        .ok_or("the lock file has no such crate")?;
    Ok(rest.split('"').next().unwrap_or_default().to_owned())
}

fn insertions(text: &str) -> Result<Vec<Insertion>> {
    let told: Vec<Value> = serde_json::from_str(text)?;
    let read = |told: &Value| {
        let word = |field: &str| told[field].as_str().map(str::to_owned);
        let lines = told["lines"].as_array()?.iter().map(|line| Some(format!("{}\n", line.as_str()?)));
        Some(Insertion { file: word("file")?, before: word("before")?, lines: lines.collect::<Option<_>>()? })
    };
    told.iter().map(|one| read(one).ok_or_else(|| format!("an insertion is {one}").into())).collect()
}

impl Insertion {
    fn put_in(&self, text: &str) -> Result<String> {
        let at: Vec<_> = text
            .match_indices(&self.before)
            .map(|(at, _)| at)
            .filter(|at| *at == 0 || text.as_bytes()[at - 1] == b'\n')
            .collect();
        let [at] = at[..] else {
            let (file, before) = (&self.file, &self.before);
            return Err(format!(
                "{file} has {} lines that begin with `{before}`: the hook does not fit it",
                at.len()
            )
            .into());
        };
        Ok(format!("{}{}{}", &text[..at], self.lines, &text[at..]))
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
        let inserted: usize = insertions(&text("hook/insertions.json"))
            .unwrap()
            .iter()
            .map(|one| one.lines.lines().count())
            .sum();
        let hook = text("hook/outside_kv.rs").lines().count() + inserted;
        let is_code = |line: &&str| !line.trim().is_empty() && !line.trim_start().starts_with("//");
        let code = |file| text(file).lines().filter(is_code).count();
        let server = code("src/main.rs") + code("src/kv.rs");
        assert!(hook <= 60 && server <= 300, "{hook} lines of hook, {server} of the server's code");
    }

    #[test]
    fn lines_go_before_the_one_that_they_belong_to_or_nowhere() {
        let insertion = Insertion { file: "a.rs".into(), before: "mod b;".into(), lines: "mod a;\n".into() };
        assert_eq!(insertion.put_in("// mod b;\nmod b;\n").unwrap(), "// mod b;\nmod a;\nmod b;\n");
        for text in ["mod c;\n", "mod b;\nmod b;\n"] {
            assert!(insertion.put_in(text).unwrap_err().to_string().contains("the hook does not fit it"));
        }
    }

    #[test]
    fn another_release_is_refused() {
        let why = put_hook_in(Path::new("/nowhere"), "0.9.0", Path::new("/nowhere")).unwrap_err();
        assert_eq!(why.to_string(), "the hook was written for mistralrs-core 0.8.1, and this is 0.9.0");
    }

    #[test]
    fn the_manifest_names_the_release_of_the_hook() {
        assert!(text("Cargo.toml").contains(&format!("{} = {{ version = \"={}\"", CRATE.0, CRATE.1)));
        assert_eq!(locked(&text("Cargo.lock")).unwrap(), CRATE.1);
        assert_eq!(locked("name = \"mistralrs-core\"\nversion = \"0.9.0\"\n").unwrap(), "0.9.0");
    }
}
