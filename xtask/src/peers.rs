//! `cargo xtask peers`: installs third-party software that kvx's tests and measurements use, and
//! builds the shared libraries that connect kvx to it.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde::Deserialize;

use crate::install::{self, Environment, TABLE};
use crate::metadata::Metadata;
use crate::process::{Deadline, must_succeed};
use crate::test::steps;
use crate::{Result, root};

/// A shared library that is compiled from one C++ file into `target/peers/<peer>`.
#[derive(Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) struct SharedLibrary {
    file: String,
    /// The source, relative to the root of the repository.
    source: PathBuf,
    /// The headers that the source includes, relative to the root of the repository.
    #[serde(default)]
    headers: Vec<PathBuf>,
    /// The name by which the dynamic linker knows the library, if that is not the file's.
    soname: Option<String>,
    /// A macro that is set to the absolute path of a file below the folder of the packages.
    path_macro: Option<(String, String)>,
}

const MOONCAKE: &str = "mooncake";
/// The library that connects kvx to the engine in Mooncake's wheel.
const ADAPTER: &str = "libkvx_mooncake_adapter.so";

/// Returns the names of the peers.
pub(crate) fn names() -> impl Iterator<Item = &'static str> {
    TABLE.peers.keys().map(String::as_str)
}

/// Installs and builds these peers, or all.
pub(crate) fn command(chosen: &[String]) -> Result<bool> {
    let chosen: Vec<_> =
        names().filter(|name| chosen.is_empty() || chosen.iter().any(|one| one == name)).collect();
    let target = Metadata::of_members()?.target_directory;
    install::peers(&chosen, &target, Deadline::after(steps::LIMIT)).map(|()| true)
}

/// Builds the libraries of a peer that are older than their sources.
pub(crate) fn build(
    peer: &str,
    libraries: &[SharedLibrary],
    target: &Path,
    deadline: Deadline,
) -> Result<()> {
    let folder = target.join("peers").join(peer);
    for SharedLibrary { file, source, headers, soname, path_macro } in libraries {
        let output = folder.join(file);
        let sources: Vec<_> =
            headers.iter().chain([source]).map(|file| root().join(file)).collect();
        if is_newer(&output, &sources) {
            println!("{file}: built");
            continue;
        }
        let mut options =
            Vec::from_iter(soname.as_ref().map(|soname| format!("-Wl,-soname,{soname}")));
        if let Some((name, below)) = path_macro {
            let found = Environment::of(target, peer).find(below);
            let found =
                std::path::absolute(found.ok_or_else(|| format!("the wheel has no {below}"))?)?;
            options.push(format!("-D{name}=\"{}\"", found.display()));
        }
        compile(source, &options, &output, deadline)?;
    }
    Ok(())
}

/// Compiles a shared library from one C++ file.
fn compile(source: &Path, options: &[String], output: &Path, deadline: Deadline) -> Result<()> {
    const FLAGS: &str = "-std=c++17 -O2 -Wall -Wextra -Werror -shared -fPIC -fvisibility=hidden";
    let unfinished = output.with_extension("so.new");
    let mut compile = Command::new("c++");
    compile.args(FLAGS.split(' ')).args(options).arg(root().join(source));
    compile.arg("-o").arg(&unfinished).arg("-ldl");
    must_succeed(compile, deadline)?;
    // A process that has opened the old library keeps it.
    Ok(std::fs::rename(unfinished, output)?)
}

/// Builds the libraries for Mooncake's wheel on other machines, where a variable names the wheel's
/// path.
pub(crate) fn portable_adapter(folder: &Path, deadline: Deadline) -> Result<()> {
    for SharedLibrary { file, source, .. } in &TABLE.peers[MOONCAKE].libraries {
        let options = ["-s".to_owned(), format!("-Wl,-soname,{file}")];
        compile(source, &options, &folder.join(file), deadline)?;
    }
    Ok(())
}

/// Returns the adapter for Mooncake's wheel, if it is built.
pub(crate) fn mooncake_adapter(target: &Path) -> Option<PathBuf> {
    Some(target.join("peers").join(MOONCAKE).join(ADAPTER)).filter(|file| file.is_file())
}

/// Returns whether a file exists and is not older than what it is made from.
fn is_newer(output: &Path, sources: &[PathBuf]) -> bool {
    let changed = |path: &Path| std::fs::metadata(path).and_then(|file| file.modified()).ok();
    let Some(built) = changed(output) else { return false };
    sources.iter().all(|source| changed(source).is_some_and(|changed| changed <= built))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_and_headers_are_in_the_repository() {
        for library in TABLE.peers.values().flat_map(|peer| &peer.libraries) {
            for file in library.headers.iter().chain([&library.source]) {
                assert!(root().join(file).is_file(), "{}", file.display());
            }
        }
        assert!(TABLE.peers[MOONCAKE].libraries.iter().any(|library| library.file == ADAPTER));
    }

    #[test]
    fn a_library_is_built_again_when_a_source_is_newer_or_gone() {
        let folder = std::env::temp_dir().join(format!("kvx-xtask-peers-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let [source, output, gone] = ["source", "output", "gone"].map(|name| folder.join(name));
        std::fs::write(&output, "1").unwrap();
        std::fs::write(&source, "1").unwrap();
        let touch = |file| {
            std::fs::File::open(file).unwrap().set_modified(std::time::SystemTime::now()).unwrap()
        };
        let newer = |output, source: &PathBuf| is_newer(output, std::slice::from_ref(source));
        touch(&output);
        assert!(newer(&output, &source) && !newer(&output, &gone) && !newer(&gone, &source));
        touch(&source);
        assert!(!newer(&output, &source));
        std::fs::remove_dir_all(folder).unwrap();
    }
}
