//! `cargo xtask package`: the crates as users get them.
//!
//! Which crates there are is asked of cargo: whatever a manifest does not keep from being published is covered.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use crate::Result;
use crate::metadata::{Metadata, Package};
use crate::process::{self, Output};

/// The limit of the whole command.
pub(crate) const LIMIT: Duration = Duration::from_secs(30 * 60);

/// Licences under which kvx may be built with a crate, as its manifest says it: whoever adds one has read it.
const LICENCES: &[&str] = &[
    "(MIT OR Apache-2.0) AND Unicode-3.0",
    "Apache-2.0",
    "Apache-2.0 / MIT",
    "Apache-2.0 AND ISC",
    "Apache-2.0 OR BSL-1.0",
    "Apache-2.0 OR ISC OR MIT",
    "Apache-2.0 OR MIT",
    "Apache-2.0 OR MIT OR Zlib",
    "Apache-2.0 WITH LLVM-exception OR Apache-2.0 OR MIT",
    "Apache-2.0/MIT",
    "BSD-2-Clause OR Apache-2.0 OR MIT",
    "BSD-3-Clause",
    "ISC",
    "MIT",
    "MIT AND BSD-3-Clause",
    "MIT OR Apache-2.0",
    "MIT/Apache-2.0",
    "Unlicense OR MIT",
    "Unlicense/MIT",
];

/// Crates that are there in several versions, and why nothing of ours can change that.
const DUPLICATES: &[(&str, &str)] = &[
    ("getrandom", "ring, which the feature `tls` of kvx-proxy brings, is behind the others"),
    ("itertools", "criterion is behind tokenizers"),
    ("rand", "tokenizers is behind proptest"),
    ("rand_core", "as rand"),
    ("syn", "derive macros of serde and of others, while they move from 2 to 3"),
];

/// What would let a build script compile or look for a native library; set to a program that fails.
const NATIVE_TOOLS: &[&str] = &["CC", "CXX", "HOST_CC", "HOST_CXX", "PKG_CONFIG"];

/// The features that README's program is built with: cargo's arguments, in a manifest's words.
const CHOICES: &[(&str, &str)] =
    &[("default features", ""), ("`tcp` alone", ", default-features = false, features = [\"tcp\"]")];

/// Runs the checks, or only asks for the names, and prints what failed; false if any did.
pub(crate) fn command(names: bool) -> Result<bool> {
    let failures = if names { names_are_free(&Metadata::of_members()?)? } else { check(LIMIT)? };
    for failure in &failures {
        println!("failed: {failure}");
    }
    Ok(failures.is_empty())
}

/// Runs every check that needs no network within `limit` and returns what failed, a sentence each.
pub(crate) fn check(limit: Duration) -> Result<Vec<String>> {
    let until = Instant::now() + limit;
    let everything = Metadata::of_everything()?;
    let mut failures = manifests(&everything);
    failures.extend(licences(&everything));
    failures.extend(duplicates(&everything));
    let page = Path::new(everything.root_package()?.manifest()).with_file_name("docs/dependencies.md");
    failures.extend(without_a_line(&everything, &std::fs::read_to_string(page)?));
    if !failures.is_empty() {
        return Ok(failures); // what is built of wrong manifests shows nothing
    }
    let folder = everything.target_directory()?.join("xtask").join("package");
    if let Some(failure) = tarballs(&everything, &folder, until)? {
        return Ok(vec![failure]);
    }
    failures.extend(compiles_alone(&everything, &folder, until)?);
    for (what, features) in CHOICES {
        println!("README's program, outside the workspace, with {what}");
        failures.extend(
            readmes_program(&everything, &folder, features, until)?.map(|why| format!("{what}: {why}")),
        );
    }
    Ok(failures)
}

fn published(workspace: &Metadata) -> impl Iterator<Item = Package<'_>> {
    workspace.packages().filter(|package| package.is_member() && package.is_published())
}

/// What the manifests of crates for users do not say, or say wrong.
fn manifests(workspace: &Metadata) -> Vec<String> {
    let ours: Vec<_> = published(workspace).collect();
    let mut wrong = Vec::new();
    for package in &ours {
        for field in ["description", "license", "repository", "documentation", "readme", "rust_version"] {
            if package.text(field).is_none() {
                wrong.push(format!("{package} has no {}", field.replace('_', "-")));
            }
        }
        for (field, most) in [("keywords", 5), ("categories", 5)] {
            let count = package.texts(field).count();
            if count == 0 || count > most {
                wrong.push(format!("{package} has {count} {field}: one to {most} are wanted"));
            }
        }
        if package.has_library() && !package.says_docs_rs() {
            wrong.push(format!("{package} has no [package.metadata.docs.rs]"));
        }
        for name in ["LICENSE-APACHE", "LICENSE-MIT"] {
            if Path::new(package.manifest()).parent().is_none_or(|folder| !folder.join(name).exists()) {
                wrong.push(format!("{package} has no {name}: link it to the workspace's"));
            }
        }
        for dependency in package.dependencies().filter(|dependency| dependency.is_path) {
            if !dependency.is_for_tests && dependency.requirement == "*" {
                wrong.push(format!("{package} asks for no version of {} beside its path", dependency.name));
            }
            if !dependency.is_for_tests && ours.iter().all(|other| other.name() != dependency.name) {
                wrong.push(format!("{package} depends on {}, which is not published", dependency.name));
            }
        }
    }
    wrong
}

fn licences(everything: &Metadata) -> Vec<String> {
    let others = everything.packages().filter(|package| !package.is_member());
    let wrong = others.filter_map(|package| {
        let licence = package.text("license").unwrap_or("none");
        (!LICENCES.contains(&licence))
            .then(|| format!("{package} has the licence {licence:?}: is it compatible?"))
    });
    wrong.collect()
}

fn duplicates(everything: &Metadata) -> Vec<String> {
    let mut versions: BTreeMap<&str, usize> = BTreeMap::new();
    for package in everything.packages() {
        *versions.entry(package.name()).or_default() += 1;
    }
    let known = |name: &str| DUPLICATES.iter().any(|(known, _)| *known == name);
    let many = versions.iter().filter(|(name, count)| **count > 1 && !known(name));
    let many = many.map(|(name, count)| format!("{name} is there in {count} versions"));
    let gone = DUPLICATES.iter().filter(|(name, _)| versions.get(name).is_none_or(|count| *count < 2));
    many.chain(gone.map(|(name, _)| format!("{name} is there once: remove its row"))).collect()
}

/// Dependencies of crates for users that have no line in docs/dependencies.md.
fn without_a_line(workspace: &Metadata, page: &str) -> Vec<String> {
    let ours = published(workspace).flat_map(Package::dependencies);
    let others =
        ours.filter(|dependency| !dependency.is_path && !page.contains(&format!("| {} |", dependency.name)));
    let names: BTreeSet<_> = others.map(|dependency| dependency.name).collect();
    names.iter().map(|name| format!("{name} has no line in docs/dependencies.md")).collect()
}

/// Makes the tarball of each crate and unpacks it.
fn tarballs(workspace: &Metadata, folder: &Path, until: Instant) -> Result<Option<String>> {
    let mut line = vec!["package", "--workspace", "--no-verify", "--allow-dirty", "--offline"];
    for package in workspace.packages().filter(|package| package.is_member() && !package.is_published()) {
        line.extend(["--exclude", package.name()]);
    }
    let mut cargo = process::cargo(line.iter().copied());
    cargo.arg("--target-dir").arg(folder);
    let shown = format!("cargo {}", line.join(" "));
    println!("{shown}");
    let finished = process::run(cargo, left(until), Output::Shown)?;
    if !finished.succeeded() {
        return Ok(Some(format!("{shown}: {}", finished.end)));
    }
    let unpacked = folder.join("unpacked");
    if unpacked.exists() {
        std::fs::remove_dir_all(&unpacked)?;
    }
    std::fs::create_dir_all(&unpacked)?;
    for package in published(workspace) {
        let tarball = folder.join("package").join(format!("{}-{}.crate", package.name(), package.version()));
        let mut tar = Command::new("tar");
        // Files in tarballs of cargo's have one old time: with it, what an earlier run has built would pass for built.
        tar.arg("-xzmf").arg(&tarball).arg("-C").arg(&unpacked);
        let finished = process::run(tar, left(until), Output::Shown)?;
        if !finished.succeeded() {
            return Ok(Some(format!("{}: tar: {}", tarball.display(), finished.end)));
        }
    }
    Ok(None)
}

/// Compiles each unpacked crate by itself, against the tarballs of the others: what it needs of them, it says.
fn compiles_alone(workspace: &Metadata, folder: &Path, until: Instant) -> Result<Vec<String>> {
    let mut failures = Vec::new();
    for package in published(workspace) {
        println!("{package}, alone, from its tarball");
        let mut cargo = process::cargo(["check", "--offline", "--quiet"]);
        cargo.current_dir(unpacked(folder, package));
        build_sparingly(&mut cargo, folder);
        for other in published(workspace).filter(|other| other.name() != package.name()) {
            let path = unpacked(folder, other);
            cargo.args(["--config", &format!("patch.crates-io.{}.path={path:?}", other.name())]);
        }
        let finished = process::run(without_native_tools(cargo), left(until), Output::Quiet)?;
        if !finished.succeeded() {
            println!("{}", finished.output);
            failures.push(format!("{package} does not compile from its tarball: {}", finished.end));
        }
    }
    Ok(failures)
}

/// Builds and runs README's program as a crate of its own, from the unpacked tarballs; says why it could not.
fn readmes_program(
    workspace: &Metadata,
    folder: &Path,
    features: &str,
    until: Instant,
) -> Result<Option<String>> {
    let program = folder.join("user");
    std::fs::create_dir_all(program.join("src"))?;
    let facade = workspace.root_package()?;
    let root = Path::new(facade.manifest()).parent().ok_or("the facade lies nowhere")?;
    let readme = std::fs::read_to_string(root.join("README.md"))?;
    std::fs::write(program.join("src/main.rs"), first_program(&readme).ok_or("README.md shows no program")?)?;
    // The versions that the workspace is tested with.
    std::fs::copy(root.join("Cargo.lock"), program.join("Cargo.lock"))?;
    let mut manifest = format!(
        "[package]\nname = \"user\"\nedition = \"2024\"\n\n[workspace]\n\n[dependencies]\n\
         kvx = {{ package = \"{}\", version = \"{}\"{features} }}\n\n[patch.crates-io]\n",
        facade.name(),
        facade.version()
    );
    for package in published(workspace) {
        manifest.push_str(&format!("{} = {{ path = {:?} }}\n", package.name(), unpacked(folder, package)));
    }
    std::fs::write(program.join("Cargo.toml"), manifest)?;
    let mut cargo = process::cargo(["run", "--offline", "--quiet"]);
    cargo.current_dir(&program);
    build_sparingly(&mut cargo, folder);
    let finished = process::run(without_native_tools(cargo), left(until), Output::Shown)?;
    Ok(match finished.succeeded() {
        true if finished.output.contains(" bytes over ") => None,
        true => Some(format!("README's program does not say what it says it would: {}", finished.output)),
        false => Some(format!("README's program: {}", finished.end)),
    })
}

/// Has cargo build where all of this is built, and only what a build shows: its defaults took 9 GB of disk.
fn build_sparingly(cargo: &mut Command, folder: &Path) {
    cargo.env("CARGO_TARGET_DIR", folder.join("built"));
    cargo.env("CARGO_PROFILE_DEV_DEBUG", "none").env("CARGO_INCREMENTAL", "0");
}

/// Where a crate's tarball is unpacked.
fn unpacked(folder: &Path, package: Package<'_>) -> PathBuf {
    folder.join("unpacked").join(format!("{}-{}", package.name(), package.version()))
}

/// README's first block of Rust.
fn first_program(readme: &str) -> Option<String> {
    let (_, rest) = readme.split_once("```rust\n")?;
    Some(rest.split_once("```")?.0.to_owned())
}

/// The registry knows no crate of these names; needs the network.
fn names_are_free(workspace: &Metadata) -> Result<Vec<String>> {
    let mut taken = Vec::new();
    for package in published(workspace) {
        // From a folder outside: within the workspace cargo would show the member.
        let mut cargo = process::cargo(["info", package.name()]);
        cargo.current_dir(std::env::temp_dir());
        let finished = process::run(cargo, Duration::from_secs(60), Output::Quiet)?;
        match name_is_free(finished.succeeded(), &finished.output) {
            Some(true) => println!("{}: free", package.name()),
            Some(false) => taken.push(format!("{} is somebody's", package.name())),
            None => taken.push(format!("{}: cargo info says {}", package.name(), finished.output.trim())),
        }
    }
    Ok(taken)
}

/// What `cargo info` says of a name; `None`: something else went wrong.
fn name_is_free(succeeded: bool, output: &str) -> Option<bool> {
    if succeeded { Some(false) } else { output.contains("could not find").then_some(true) }
}

fn without_native_tools(mut cargo: Command) -> Command {
    cargo.envs(NATIVE_TOOLS.iter().map(|tool| (tool, "false")));
    cargo
}

fn left(until: Instant) -> Duration {
    until.saturating_duration_since(Instant::now())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn metadata(core: &str) -> Metadata {
        Metadata::from_text(&format!(
            r#"{{"packages": [
            {{"name": "core", "version": "0.1.0", "manifest_path": "/w/core/Cargo.toml", {core}}},
            {{"name": "tests", "version": "0.1.0", "manifest_path": "/w/tests/Cargo.toml", "publish": []}},
            {{"name": "dep", "version": "1.0.0", "source": "registry", "license": "GPL-3.0"}},
            {{"name": "dep", "version": "2.0.0", "source": "registry", "license": "MIT"}}]}}"#
        ))
    }

    #[test]
    fn what_a_manifest_lacks_is_named() {
        let bare = metadata(
            r#""targets": [{"kind": ["lib"], "name": "core"}], "dependencies": [
                {"name": "tests", "req": "*", "path": "/w/tests", "kind": null}]"#,
        );
        let wrong = manifests(&bare).join("\n");
        for part in [
            "no description",
            "no documentation",
            "0 keywords",
            "docs.rs",
            "no version of tests",
            "not published",
        ] {
            assert!(wrong.contains(part), "{part} is not in:\n{wrong}");
        }
        assert!(!wrong.contains("tests 0.1.0"), "it is for this workspace alone:\n{wrong}");
        let with_tests =
            metadata(r#""dependencies": [{"name": "tests", "req": "*", "path": "/w/tests", "kind": "dev"}]"#);
        assert!(!manifests(&with_tests).join("\n").contains("version of tests"));
    }

    #[test]
    fn licences_and_versions_that_nobody_has_looked_at_are_named() {
        let metadata = metadata(r#""license": "MIT""#);
        assert_eq!(licences(&metadata), ["dep 1.0.0 has the licence \"GPL-3.0\": is it compatible?"]);
        assert_eq!(
            duplicates(&metadata),
            [
                "dep is there in 2 versions",
                "getrandom is there once: remove its row",
                "itertools is there once: remove its row",
                "rand is there once: remove its row",
                "rand_core is there once: remove its row",
                "syn is there once: remove its row"
            ]
        );
    }

    #[test]
    fn a_dependency_without_its_line_is_named() {
        let page = "| crate | why |\n|---|---|\n| libc | calls |\n";
        let metadata = metadata(
            r#""dependencies": [{"name": "libc", "req": "^0.2", "path": null, "kind": null},
                {"name": "rare", "req": "^1", "path": null, "kind": "dev"}]"#,
        );
        assert_eq!(without_a_line(&metadata, page), ["rare has no line in docs/dependencies.md"]);
    }

    #[test]
    fn a_name_is_free_only_when_the_registry_says_so() {
        assert_eq!(name_is_free(true, "kvx-core"), Some(false));
        assert_eq!(name_is_free(false, "error: could not find `kvx-core` in registry"), Some(true));
        assert_eq!(name_is_free(false, "error: failed to connect"), None);
    }

    #[test]
    fn readme_shows_a_program() {
        let readme = concat!(env!("CARGO_MANIFEST_DIR"), "/../README.md");
        let program = first_program(&std::fs::read_to_string(readme).unwrap()).unwrap();
        assert!(program.contains("fn main()") && program.contains("use kvx::"), "{program}");
    }

    #[test]
    fn the_crates_of_this_workspace_say_what_users_want_to_know() {
        let members = Metadata::of_members().unwrap();
        assert_eq!(manifests(&members), Vec::<String>::new());
        assert!(published(&members).any(|package| package.name() == "kvx-core"));
        assert!(published(&members).all(|package| package.name() != "xtask"));
    }
}
