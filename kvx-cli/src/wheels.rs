//! Finds native libraries of Python wheels and conda packages in their known places, without
//! running Python.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

/// The places where [`find`] looks, for messages.
pub(crate) const PLACES: &str =
    "VIRTUAL_ENV, CONDA_PREFIX, ./.venv, each python3 on PATH, ~/.local, /usr/local, /usr";

/// The variable that names the engine that an adapter opens; see `kvx mooncake-adapter`.
pub(crate) const MOONCAKE_ENGINE: &str = "KVX_MOONCAKE_ENGINE";

/// Places below a folder of packages (`site-packages`).
const IN_WHEELS: &[WheelPattern] = &[
    WheelPattern::new("UCX", "KVX_UCX_LIB", "libucx/lib/libucp.so.0"),
    WheelPattern::new("MOONCAKE", MOONCAKE_ENGINE, "mooncake/engine*.so"),
    WheelPattern::new("RIXL", "KVX_RIXL_LIB", ".nixl*.mesonpy.libs/libnixl_capi.so"),
];

/// Places below the root of a conda environment.
const IN_CONDA: &[WheelPattern] = &[
    WheelPattern::new("UCX", "KVX_UCX_LIB", "lib/libucp.so.0"),
    WheelPattern::new("LIBFABRIC", "KVX_LIBFABRIC_LIB", "lib/libfabric.so.1"),
    WheelPattern::new("MOONCAKE", "KVX_MOONCAKE_LIB", "lib/libtransfer_engine.so"),
    WheelPattern::new("RIXL", "KVX_RIXL_LIB", "lib/libnixl_capi.so"),
];

/// The paths of package folders below the root of an environment.
const PACKAGES: &str = "lib*/python3*/*-packages";

/// A library that exists.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FoundLibrary {
    /// The backend that needs the library.
    pub(crate) backend: &'static str,
    /// The variable that names the library.
    pub(crate) variable: &'static str,
    /// The library's file.
    pub(crate) path: PathBuf,
}

struct WheelPattern {
    backend: &'static str,
    variable: &'static str,
    pattern: &'static str,
}

impl WheelPattern {
    const fn new(backend: &'static str, variable: &'static str, pattern: &'static str) -> Self {
        WheelPattern { backend, variable, pattern }
    }
}

/// The roots of Python environments, the most specific ones first.
#[derive(Debug, Default)]
pub(crate) struct Environments {
    roots: Vec<PathBuf>,
    conda: Option<PathBuf>,
}

impl Environments {
    /// Returns the environments that this process's variables and the usual places lead to.
    pub(crate) fn of_process() -> Self {
        let named = |variable| {
            std::env::var_os(variable).filter(|value| !value.is_empty()).map(PathBuf::from)
        };
        let conda = named("CONDA_PREFIX");
        let mut roots = Vec::from_iter(named("VIRTUAL_ENV"));
        roots.extend(conda.clone());
        roots.push(".venv".into());
        let path = std::env::var_os("PATH").unwrap_or_default();
        let pythons = std::env::split_paths(&path).filter(|folder| folder.join("python3").exists());
        roots.extend(pythons.filter_map(|folder| Some(folder.parent()?.to_owned())));
        roots.extend(named("HOME").map(|home| home.join(".local")));
        roots.extend(["/usr/local", "/usr"].map(PathBuf::from));
        Environments { roots, conda }
    }
}

/// Returns every known library: each file once, by backend, and the most specific environment
/// first.
pub(crate) fn find(environments: &Environments) -> Vec<FoundLibrary> {
    let mut seen = BTreeSet::new();
    let mut found = Vec::new();
    let mut look = |root: &Path, places: &[WheelPattern]| {
        for WheelPattern { backend, variable, pattern } in places {
            for path in matches(root, pattern) {
                let file = path.canonicalize().unwrap_or_else(|_| path.clone());
                if seen.insert(file) {
                    found.push(FoundLibrary {
                        backend,
                        variable,
                        path: std::path::absolute(&path).unwrap_or(path),
                    });
                }
            }
        }
    };
    for root in &environments.roots {
        for packages in matches(root, PACKAGES) {
            look(&packages, IN_WHEELS);
        }
    }
    if let Some(root) = &environments.conda {
        look(root, IN_CONDA);
    }
    found.sort_by_key(|found| found.backend);
    found
}

/// The path of NIXL in a wheel, below a folder of packages.
const NIXL: &str = ".nixl*.mesonpy.libs/libnixl.so";
/// The prefixes of NIXL in images and builds from source.
const PREFIXES: [&str; 5] =
    ["usr/local/nixl", "usr/local/rixl", "opt/nixl", "opt/rixl", "opt/nvidia/nvda_nixl"];
#[cfg(target_arch = "aarch64")]
const FOLDERS: [&str; 3] = ["lib/aarch64-linux-gnu", "lib64", "lib"];
#[cfg(not(target_arch = "aarch64"))]
const FOLDERS: [&str; 3] = ["lib/x86_64-linux-gnu", "lib64", "lib"];

/// Returns every NIXL of the environments' wheels, of the conda environment, and of images; each
/// file once.
pub(crate) fn nixls(environments: &Environments) -> Vec<PathBuf> {
    let of_wheels = environments.roots.iter().flat_map(|root| nixls_below(root));
    let of_conda = environments.conda.iter().flat_map(|root| matches(root, "lib/libnixl.so"));
    let found = once_each(of_wheels.chain(of_conda).chain(nixls_of_images(Path::new("/"))));
    found.into_iter().map(|path| std::path::absolute(&path).unwrap_or(path)).collect()
}

/// Removes paths that lead to the same file as an earlier one.
fn once_each(paths: impl IntoIterator<Item = PathBuf>) -> Vec<PathBuf> {
    let mut seen = BTreeSet::new();
    let paths = paths.into_iter();
    paths.filter(|path| seen.insert(path.canonicalize().unwrap_or_else(|_| path.clone()))).collect()
}

/// Returns the NIXLs of the wheels in one environment, or in one folder of packages; each file
/// once.
pub(crate) fn nixls_below(root: &Path) -> Vec<PathBuf> {
    let mut packages = matches(root, PACKAGES);
    packages.push(root.to_owned());
    once_each(packages.iter().flat_map(|packages| matches(packages, NIXL)))
}

fn nixls_of_images(root: &Path) -> Vec<PathBuf> {
    let folders =
        PREFIXES.iter().flat_map(|prefix| FOLDERS.map(|folder| root.join(prefix).join(folder)));
    folders.map(|folder| folder.join("libnixl.so")).filter(|file| file.exists()).collect()
}

/// Returns the existing paths below `root` that match the pattern, in order. Each part of it may
/// have one `*`.
fn matches(root: &Path, pattern: &str) -> Vec<PathBuf> {
    let mut paths = vec![root.to_owned()];
    for part in pattern.split('/') {
        let below = |folder: PathBuf| match part.split_once('*') {
            None => vec![folder.join(part)],
            Some((start, end)) => {
                let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
                let fits = |name: &OsStr| {
                    name.to_str().is_some_and(|name| {
                        name.len() >= start.len() + end.len()
                            && name.starts_with(start)
                            && name.ends_with(end)
                    })
                };
                let mut paths: Vec<_> = entries
                    .filter(|entry| fits(&entry.file_name()))
                    .map(|entry| entry.path())
                    .collect();
                paths.sort();
                paths
            }
        };
        paths = paths.into_iter().flat_map(below).collect();
    }
    paths.retain(|path| path.exists());
    paths
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder of one test, removed when this is dropped.
    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str, files: &[&str]) -> Self {
            let root = std::env::temp_dir().join(format!("kvx-{name}-{}", std::process::id()));
            for file in files {
                let path = root.join(file);
                std::fs::create_dir_all(path.parent().unwrap()).unwrap();
                std::fs::write(path, "").unwrap();
            }
            Folder(root)
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            std::fs::remove_dir_all(&self.0).ok();
        }
    }

    fn found(
        environments: &Environments,
        root: &Path,
    ) -> Vec<(&'static str, &'static str, String)> {
        let below = |path: PathBuf| path.strip_prefix(root).unwrap().display().to_string();
        find(environments)
            .into_iter()
            .map(|found| (found.backend, found.variable, below(found.path)))
            .collect()
    }

    #[test]
    fn the_known_wheels_are_found_in_an_environment() {
        let folder = Folder::new(
            "wheels",
            &[
                "lib/python3.11/site-packages/libucx/lib/libucp.so.0",
                "lib/python3.11/site-packages/.nixl_cu12.mesonpy.libs/libnixl_capi.so",
                "lib/python3.11/site-packages/nixl_cu12.libs/libucp-0f.so.0.0.0",
                "lib/python3/dist-packages/mooncake/engine.so",
                "lib/python3/dist-packages/mooncake/store.so",
                "lib/libfabric.so.1",
            ],
        );
        // Two names of one environment count once.
        let roots = vec![folder.0.clone(), folder.0.join("lib/..")];
        assert_eq!(
            found(&Environments { roots, conda: None }, &folder.0),
            [
                (
                    "MOONCAKE",
                    "KVX_MOONCAKE_ENGINE",
                    "lib/python3/dist-packages/mooncake/engine.so".into()
                ),
                (
                    "RIXL",
                    "KVX_RIXL_LIB",
                    "lib/python3.11/site-packages/.nixl_cu12.mesonpy.libs/libnixl_capi.so".into()
                ),
                (
                    "UCX",
                    "KVX_UCX_LIB",
                    "lib/python3.11/site-packages/libucx/lib/libucp.so.0".into()
                ),
            ]
        );
    }

    #[test]
    fn the_libraries_of_a_conda_environment_count_too() {
        let folder = Folder::new("conda", &["lib/libfabric.so.1", "lib/libucp.so.0"]);
        let conda = Environments { roots: vec![folder.0.clone()], conda: Some(folder.0.clone()) };
        let names: Vec<_> =
            found(&conda, &folder.0).into_iter().map(|(backend, ..)| backend).collect();
        assert_eq!(names, ["LIBFABRIC", "UCX"]);
    }

    #[test]
    fn nixls_of_wheels_and_of_conda_are_found() {
        let wheel = "lib/python3.12/site-packages/.nixl_cu13.mesonpy.libs/libnixl.so";
        let folder = Folder::new("nixls", &[wheel, "lib/libnixl.so"]);
        let environments =
            Environments { roots: vec![folder.0.clone()], conda: Some(folder.0.clone()) };
        let found = nixls(&environments);
        assert_eq!(found[..2], [folder.0.join(wheel), folder.0.join("lib/libnixl.so")]);
    }

    #[test]
    fn nixls_of_images_and_source_builds_are_found_in_each_of_their_places() {
        for prefix in
            ["usr/local/nixl", "usr/local/rixl", "opt/nixl", "opt/rixl", "opt/nvidia/nvda_nixl"]
        {
            for libraries in FOLDERS {
                let file = format!("{prefix}/{libraries}/libnixl.so");
                let folder = Folder::new("images", &[&file]);
                assert_eq!(nixls_of_images(&folder.0), [folder.0.join(&file)]);
            }
        }
    }

    #[test]
    fn an_environment_that_is_not_there_has_nothing() {
        let roots = vec![PathBuf::from("/nonexistent/kvx")];
        assert_eq!(find(&Environments { roots, conda: None }), []);
    }
}
