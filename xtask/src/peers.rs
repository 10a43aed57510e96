//! `cargo xtask peers`: other people's software that kvx's tests and measurements meet, and what has to be built for
//! it.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use crate::Result;
use crate::install::{
    DebianPackage, Wheel, install_debian_packages, install_wheel, must_succeed, site_packages,
};
use crate::metadata::Metadata;
use crate::test::steps;

/// A peer that is more than its packages.
struct PeerSoftware {
    name: &'static str,
    packages: &'static [DebianPackage],
    wheels: &'static [Wheel],
    /// Shared libraries of ours that lead to it.
    libraries: &'static [SharedLibrary],
}

/// A shared library that is compiled from one C++ file into `target/peers/<peer>`.
struct SharedLibrary {
    file: &'static str,
    /// Below the root of the repository.
    source: &'static str,
    /// What the source depends on, likewise.
    headers: &'static [&'static str],
    /// The name by which the dynamic linker knows it, if that is not the file's.
    soname: Option<&'static str>,
    /// A macro that is set to the absolute path of a file below the wheel's folder.
    path_macro: Option<(&'static str, &'static str)>,
}

const MOONCAKE: &str = "mooncake";
/// The engine in its wheel, and the library that leads to it.
const ENGINE: &str = "mooncake/engine.so";
const ADAPTER: &str = "libkvx_mooncake_adapter.so";

const PEERS: &[PeerSoftware] = &[PeerSoftware {
    name: MOONCAKE,
    packages: &[
        DebianPackage { name: "etcd-server", why: "Mooncake's engines find each other by it, in a test" },
        DebianPackage { name: "g++", why: "compiles kvx-mooncake/adapter" },
        DebianPackage { name: "libcurl4", why: "Mooncake's engine needs it" },
        DebianPackage { name: "libibverbs1", why: "Mooncake's engine needs it, also without RDMA" },
        DebianPackage { name: "libnuma1", why: "Mooncake's engine needs it" },
        DebianPackage { name: "libpython3.11", why: "the engine in Mooncake's wheel is a Python module" },
    ],
    wheels: &[
        Wheel {
            peer: "mooncake",
            name: "mooncake-transfer-engine-non-cuda",
            version: "0.3.13.post1",
            why: "Mooncake's engine, under kvx-mooncake and beside it",
        },
        Wheel {
            peer: "mooncake",
            name: "msgspec",
            version: "0.22.0",
            why: "questions of a MooncakeConnector as vLLM reads and writes them",
        },
        Wheel {
            peer: "mooncake",
            name: "pyzmq",
            version: "27.3.0",
            why: "ZeroMQ itself at that side channel",
        },
    ],
    libraries: &[
        SharedLibrary {
            file: ADAPTER,
            source: "kvx-mooncake/adapter/adapter.cpp",
            headers: &["kvx-mooncake/adapter/adapter.h", "kvx-mooncake/adapter/transfer_engine.h"],
            soname: None,
            path_macro: Some(("KVX_MOONCAKE_ENGINE_FILE", ENGINE)),
        },
        SharedLibrary {
            file: "libetcd_wrapper.so",
            source: "kvx-mooncake/adapter/etcd_stand_in.cpp",
            headers: &[],
            soname: Some("libetcd_wrapper.so"),
            path_macro: None,
        },
    ],
}];

/// The peers that there are.
pub(crate) fn names() -> impl Iterator<Item = &'static str> {
    PEERS.iter().map(|peer| peer.name)
}

/// Installs and builds what these peers need; false if something could not be.
pub(crate) fn command(names: &[String]) -> Result<bool> {
    let target = Metadata::of_members()?.target_directory()?;
    let until = Instant::now() + steps::LIMIT;
    let mut held = true;
    for peer in PEERS.iter().filter(|peer| names.is_empty() || names.iter().any(|name| name == peer.name)) {
        if let Err(error) = prepare(peer, &target, until) {
            println!("{}: {error}", peer.name);
            held = false;
        }
    }
    Ok(held)
}

/// Prepares all peers within `limit`; returns what failed, a sentence each.
pub(crate) fn prepare_all(target: &Path, limit: Duration) -> Vec<String> {
    let until = Instant::now() + limit;
    let results = PEERS.iter().map(|peer| (peer.name, prepare(peer, target, until)));
    results.filter_map(|(name, result)| Some(format!("{name}: {}", result.err()?))).collect()
}

fn prepare(peer: &PeerSoftware, target: &Path, until: Instant) -> Result<()> {
    install_debian_packages(peer.packages, until)?;
    for wheel in peer.wheels {
        install_wheel(wheel, target, until)?;
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().ok_or("xtask lies in no repository")?;
    let folder = target.join("peers").join(peer.name);
    for library in peer.libraries {
        build(library, root, &folder, until)?;
    }
    Ok(())
}

fn build(library: &SharedLibrary, root: &Path, folder: &Path, until: Instant) -> Result<()> {
    let SharedLibrary { file, source, headers, soname, path_macro } = library;
    let output = folder.join(file);
    let sources: Vec<PathBuf> = headers.iter().chain([source]).map(|file| root.join(file)).collect();
    if is_newer(&output, &sources) {
        println!("{file}: built");
        return Ok(());
    }
    let mut options = Vec::from_iter(soname.map(|soname| format!("-Wl,-soname,{soname}")));
    if let Some((name, below)) = path_macro {
        let found = in_wheel(folder, below).ok_or_else(|| format!("the wheel has no {below}"))?;
        options.push(format!("-D{name}=\"{}\"", std::path::absolute(found)?.display()));
    }
    compile(&root.join(source), &options, &output, until)
}

/// Makes a shared library of one C++ file.
fn compile(source: &Path, options: &[String], output: &Path, until: Instant) -> Result<()> {
    let unfinished = output.with_extension("so.new");
    let mut compile = Command::new("c++");
    compile.args([
        "-std=c++17",
        "-O2",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-shared",
        "-fPIC",
        "-fvisibility=hidden",
    ]);
    compile.args(options).arg(source).arg("-o").arg(&unfinished).arg("-ldl");
    must_succeed(compile, until)?;
    // A process that has the old one open keeps it.
    std::fs::rename(unfinished, output)?;
    Ok(())
}

/// A file below the folder of a peer's packages.
fn in_wheel(folder: &Path, below: &str) -> Option<PathBuf> {
    site_packages(&folder.join("venv")).map(|packages| packages.join(below)).find(|path| path.exists())
}

/// Makes the libraries over Mooncake's wheel for other machines: they are told there where the wheel lies.
pub(crate) fn portable_adapter(folder: &Path, until: Instant) -> Result<()> {
    let mooncake = PEERS.iter().filter(|peer| peer.name == MOONCAKE);
    for SharedLibrary { file, source, .. } in mooncake.flat_map(|peer| peer.libraries) {
        let options = ["-s".to_owned(), format!("-Wl,-soname,{file}")];
        compile(&crate::root().join(source), &options, &folder.join(file), until)?;
    }
    Ok(())
}

/// The engine of Mooncake's wheel, where `--install` has put it.
pub(crate) fn mooncake_engine(target: &Path) -> Option<PathBuf> {
    in_wheel(&target.join("peers").join(MOONCAKE), ENGINE)
}

/// The adapter over it, likewise.
pub(crate) fn mooncake_adapter(target: &Path) -> Option<PathBuf> {
    Some(target.join("peers").join(MOONCAKE).join(ADAPTER)).filter(|file| file.is_file())
}

/// Whether a file is there and not older than what it is made from.
fn is_newer(output: &Path, sources: &[PathBuf]) -> bool {
    let changed = |path: &Path| std::fs::metadata(path).and_then(|file| file.modified()).ok();
    let Some(built) = changed(output) else { return false };
    sources.iter().all(|source| changed(source).is_some_and(|changed| changed <= built))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_compiled_is_in_the_repository_and_every_row_says_why() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        for peer in PEERS {
            for library in peer.libraries {
                for file in library.headers.iter().chain([&library.source]) {
                    assert!(root.join(file).is_file(), "{file}");
                }
            }
            assert!(peer.packages.iter().all(|package| !package.why.is_empty()), "{}", peer.name);
            assert!(peer.wheels.iter().all(|wheel| wheel.peer == peer.name), "{}", peer.name);
        }
    }

    #[test]
    fn a_library_is_built_again_when_a_source_is_newer_or_gone() {
        let folder = std::env::temp_dir().join(format!("kvx-xtask-peers-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let [source, output] = ["source", "output"].map(|name| folder.join(name));
        std::fs::write(&source, "1").unwrap();
        assert!(!is_newer(&output, std::slice::from_ref(&source)));
        std::fs::write(&output, "1").unwrap();
        assert!(is_newer(&output, std::slice::from_ref(&source)));
        let later = std::time::SystemTime::now() + Duration::from_secs(60);
        std::fs::File::options().write(true).open(&source).unwrap().set_modified(later).unwrap();
        assert!(!is_newer(&output, std::slice::from_ref(&source)));
        std::fs::remove_file(&source).unwrap();
        assert!(!is_newer(&output, &[source]));
        std::fs::remove_dir_all(folder).unwrap();
    }
}
