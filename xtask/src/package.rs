//! `cargo xtask package`: builds the crates as users do, and lists the crates in the published
//! files. cargo reports which crates are published.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use serde_json::Value;

use crate::metadata::{Metadata, Package};
use crate::process::{self, Deadline, Output};
use crate::sbom::Packages;
use crate::skips;
use crate::{Result, all_held, install, release, root};

/// The limit of the whole command.
const LIMIT: Duration = Duration::from_secs(30 * 60);

/// The arguments of cargo-deny; deny.toml has the rules for dependencies.
const DENY: &str =
    "--offline --workspace check -D unnecessary-skip -D unmatched-skip licenses bans sources";

/// Variables that would let a build script compile or find a native library; set to a program that
/// fails.
const NATIVE_TOOLS: [&str; 5] = ["CC", "CXX", "HOST_CC", "HOST_CXX", "PKG_CONFIG"];

/// The features of the README's program, as a manifest writes them.
const CHOICES: [(&str, &str); 2] =
    [("default features", ""), ("`tcp` alone", ", default-features = false, features = [\"tcp\"]")];

/// Runs every check; returns false if something failed.
pub(crate) fn run() -> Result<bool> {
    let deadline = Deadline::after(LIMIT);
    let everything = Metadata::of_everything()?;
    let mut failures = manifests(&everything);
    let page = std::fs::read_to_string(root().join("docs/project/dependencies.md"))?;
    failures.extend(without_a_line(&everything, &page));
    failures.extend(denied(&everything.target_directory, deadline)?);
    if !failures.is_empty() {
        return Ok(all_held(failures)); // wrong manifests make the builds meaningless
    }
    let folder = everything.target_directory.join("xtask/package");
    let cargo = |line: &str| process::cargo(line.split(' '));
    let packages = Packages::load(&cargo)?;
    let to_compile = |package: &str| packages.to_compile(package);
    failures.extend(packages.write_lists(&folder.join("sbom"), to_compile)?);
    tarballs(&everything, &folder, deadline)?;
    let lists = release::files(&folder.join("sbom"), "json")?;
    let tarballs = published(&everything).map(|package| tarball(&folder, package)).collect();
    release::write_checksums(&folder, [lists, tarballs].concat())?;
    failures.extend(compile_alone(&everything, &folder, deadline)?);
    for (what, features) in CHOICES {
        println!("README's program, outside the workspace, with {what}");
        let failure = readmes_program(&everything, &folder, features, deadline)?;
        failures.extend(failure.map(|why| format!("{what}: {why}")));
    }
    Ok(all_held(failures))
}

fn published(workspace: &Metadata) -> impl Iterator<Item = Package<'_>> {
    workspace.packages.iter().filter(|package| package.is_member() && package.publish.is_none())
}

/// Returns missing and wrong fields in the manifests of published crates.
fn manifests(workspace: &Metadata) -> Vec<String> {
    let ours: Vec<_> = published(workspace).collect();
    let mut wrong = Vec::new();
    for package in &ours {
        for field in ["description", "license", "readme"] {
            if package.others.get(field).is_none_or(Value::is_null) {
                wrong.push(format!("{package} has no {field}"));
            }
        }
        for field in ["keywords", "categories"] {
            let count = package.others.get(field).and_then(Value::as_array).map_or(0, Vec::len);
            if !(1..=5).contains(&count) {
                wrong.push(format!("{package} has {count} {field}; it must have one to five"));
            }
        }
        let docs_rs =
            package.lacks_docs_rs().then(|| format!("{package} has no [package.metadata.docs.rs]"));
        let files = ["LICENSE-APACHE", "LICENSE-MIT"].into_iter();
        let missing = files.filter(|name| !package.folder().join(name).exists());
        wrong.extend(
            docs_rs
                .into_iter()
                .chain(missing.map(|name| format!("{package} has no link to {name}"))),
        );
        for dependency in package
            .dependencies
            .iter()
            .filter(|it| it.path.is_some() && it.kind.as_deref() != Some("dev"))
        {
            if dependency.requirement == "*" {
                wrong.push(format!("{package} names a path but no version of {}", dependency.name));
            }
            if ours.iter().all(|other| other.name != dependency.name) {
                wrong.push(format!(
                    "{package} depends on {}, which is not published",
                    dependency.name
                ));
            }
        }
    }
    wrong
}

/// Returns the dependencies of published crates that have no line in docs/project/dependencies.md.
fn without_a_line(workspace: &Metadata, page: &str) -> Vec<String> {
    let dependencies = published(workspace).flat_map(|package| &package.dependencies);
    let others =
        dependencies.filter(|it| it.path.is_none() && !page.contains(&format!("| {} |", it.name)));
    let names: BTreeSet<_> = others.map(|dependency| &dependency.name).collect();
    names.iter().map(|name| format!("{name} has no line in docs/project/dependencies.md")).collect()
}

/// Checks licences, duplicate versions and sources with cargo-deny; skips itself if that is not
/// installed.
fn denied(target: &Path, deadline: Deadline) -> Result<Option<String>> {
    let installed = install::cargo_deny(target);
    if !installed.exists() {
        let cure = "cargo xtask test --install --whole";
        skips::note("licences and versions", "cargo-deny is not installed", cure)?;
        return Ok(None);
    }
    let mut deny = Command::new(installed);
    deny.current_dir(root()).args(DENY.split(' '));
    Ok(process::failure_of(deny, &format!("cargo deny {DENY}"), deadline)?)
}

/// Makes the tarball of each crate and unpacks it.
fn tarballs(workspace: &Metadata, folder: &Path, deadline: Deadline) -> Result<()> {
    let mut cargo = process::cargo(["package", "--no-verify", "--allow-dirty", "--offline"]);
    cargo.args(published(workspace).flat_map(|package| ["-p", &package.name]));
    cargo.arg("--target-dir").arg(folder);
    process::must_succeed(cargo, deadline)?;
    let unpacked = folder.join("unpacked");
    let _ = std::fs::remove_dir_all(&unpacked); // left by an earlier run
    std::fs::create_dir_all(&unpacked)?;
    for package in published(workspace) {
        let mut tar = Command::new("tar");
        // cargo gives all files the same old time, so that it would consider an earlier run's build
        // up to date.
        tar.arg("-xzmf").arg(tarball(folder, package)).arg("-C").arg(&unpacked);
        process::must_succeed(tar, deadline)?;
    }
    Ok(())
}

/// Returns the path of a crate's tarball. The folder may also have those of earlier versions.
fn tarball(folder: &Path, package: Package<'_>) -> PathBuf {
    folder.join("package").join(format!("{}-{}.crate", package.name, package.version))
}

/// Compiles each unpacked crate alone, against the tarballs of the others, and returns those that
/// fail.
fn compile_alone(workspace: &Metadata, folder: &Path, deadline: Deadline) -> Result<Vec<String>> {
    let mut failures = Vec::new();
    for package in published(workspace) {
        println!("{package}, alone, from its tarball");
        let mut cargo = user_cargo("check", &unpacked(folder, package), folder);
        for other in published(workspace).filter(|other| other.name != package.name) {
            let path = unpacked(folder, other);
            cargo.args(["--config", &format!("patch.crates-io.{}.path={path:?}", other.name)]);
        }
        let finished = process::run(cargo, deadline.left(), Output::Quiet)?;
        if !finished.succeeded() {
            println!("{}", finished.output);
            failures.push(format!("{package} does not compile from its tarball: {}", finished.end));
        }
    }
    Ok(failures)
}

/// Builds and runs README's program as a separate crate, from the unpacked tarballs; returns why it
/// failed.
fn readmes_program(
    workspace: &Metadata,
    folder: &Path,
    features: &str,
    deadline: Deadline,
) -> Result<Option<String>> {
    let program = folder.join("user");
    std::fs::create_dir_all(program.join("src"))?;
    let facade = workspace.root_package()?;
    let readme = std::fs::read_to_string(root().join("README.md"))?;
    std::fs::write(
        program.join("src/main.rs"),
        first_program(&readme).ok_or("README.md shows no program")?,
    )?;
    // The versions that the workspace is tested with.
    std::fs::copy(root().join("Cargo.lock"), program.join("Cargo.lock"))?;
    let mut manifest = format!(
        "[package]\nname = \"user\"\nedition = \"2024\"\n\n[workspace]\n\n[dependencies]\n\
         kvx = {{ package = \"{}\", version = \"{}\"{features} }}\n\n[patch.crates-io]\n",
        facade.name, facade.version
    );
    for package in published(workspace) {
        manifest.push_str(&format!(
            "{} = {{ path = {:?} }}\n",
            package.name,
            unpacked(folder, package)
        ));
    }
    std::fs::write(program.join("Cargo.toml"), manifest)?;
    let finished =
        process::run(user_cargo("run", &program, folder), deadline.left(), Output::Shown)?;
    Ok(match finished.succeeded() {
        true if finished.output.contains(" bytes over ") => None,
        true => Some(format!(
            "README's program does not print the expected output: {}",
            finished.output
        )),
        false => Some(format!("README's program: {}", finished.end)),
    })
}

/// Returns a call of cargo in a user's crate, without native tools. All of these calls share one
/// target directory, and build no debug information, which took 9 GB.
fn user_cargo(command: &str, crate_folder: &Path, folder: &Path) -> Command {
    let mut cargo = process::cargo([command, "--offline", "--quiet"]);
    cargo.current_dir(crate_folder).env("CARGO_TARGET_DIR", folder.join("built"));
    cargo.env("CARGO_PROFILE_DEV_DEBUG", "none").env("CARGO_INCREMENTAL", "0");
    cargo.envs(NATIVE_TOOLS.iter().map(|tool| (tool, "false")));
    cargo
}

/// Returns the folder of a crate's unpacked tarball.
fn unpacked(folder: &Path, package: Package<'_>) -> PathBuf {
    folder.join("unpacked").join(format!("{}-{}", package.name, package.version))
}

/// Returns README's first block of Rust.
fn first_program(readme: &str) -> Option<String> {
    let (_, rest) = readme.split_once("```rust\n")?;
    Some(rest.split_once("```")?.0.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_fields_of_a_manifest_are_named() {
        let metadata = Metadata::from_text(
            r#"{"packages": [
            {"name": "core", "version": "0.1.0", "manifest_path": "/w/core/Cargo.toml", "dependencies": [
                {"name": "tests", "req": "*", "path": "/w/tests", "kind": null},
                {"name": "libc", "req": "^0.2", "path": null, "kind": null},
                {"name": "rare", "req": "^1", "path": null, "kind": "dev"}]},
            {"name": "tests", "version": "0.1.0", "manifest_path": "/w/tests/Cargo.toml", "publish": []}]}"#,
        );
        let wrong = manifests(&metadata).join("\n");
        for part in ["no description", "0 keywords", "no version of tests", "not published"] {
            assert!(wrong.contains(part), "{part} is not in:\n{wrong}");
        }
        assert!(!wrong.contains("tests 0.1.0"), "unpublished crates are not checked:\n{wrong}");
        let page = "| crate | why |\n|---|---|\n| libc | calls |\n";
        assert_eq!(
            without_a_line(&metadata, page),
            ["rare has no line in docs/project/dependencies.md"]
        );
    }

    #[test]
    fn the_crates_of_this_workspace_are_ready_to_be_published() {
        let members = Metadata::of_members().unwrap();
        assert_eq!(manifests(&members), Vec::<String>::new());
        assert!(published(&members).any(|package| package.name == "kvx-core"));
        assert!(published(&members).all(|package| package.name != "xtask"));
        let readme = std::fs::read_to_string(root().join("README.md")).unwrap();
        assert!(first_program(&readme).is_some_and(|program| program.contains("use kvx::")));
    }
}
