//! Tests which library and engine are loaded: those that the environment names, and no others.

use std::ffi::OsStr;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use kvx_core::{ErrorKind, Options, Registry};
use kvx_mooncake::Mooncake;
use kvx_testkit::{Check, is_own_process, run_in_own_process, test};

use crate::adapter;

const LIBRARY: &str = "KVX_MOONCAKE_LIB";
/// The name under which the library is searched for by default.
const SONAME: &str = "libtransfer_engine.so";
const ENGINE: &str = "KVX_MOONCAKE_ENGINE";
/// The time limit of a single Python command.
const LIMIT: Duration = Duration::from_secs(60);

/// Returns the version and the file of the loaded library, or why none is loaded.
fn opened(registry: &Registry, options: &str) -> Result<(String, PathBuf), String> {
    let found = registry.require("MOONCAKE", &Options::parse(options).unwrap());
    found.map(|(_, found)| (found.version, found.library.unwrap())).map_err(|error| {
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
        error.to_string()
    })
}

const TCP: &str = r#"{"mooncake_protocol": "tcp"}"#;

#[test]
fn a_library_that_the_variable_names_is_opened() -> Check {
    const TEST: &str = "which_library::a_library_that_the_variable_names_is_opened";
    let Some(adapter) = adapter::or_skip(TEST) else { return Ok(()) };
    if !is_own_process() {
        return run_over(TEST, LIBRARY, adapter.as_os_str());
    }
    let mut registry = Registry::new();
    registry.add(Mooncake::new()).unwrap();
    assert_eq!(opened(&registry, TCP).unwrap(), ("wheel 0.3.13.post1".to_owned(), adapter));
    Ok(())
}

/// Runs the named test in a process with this variable, and no other that selects a library.
fn run_over(test: &str, variable: &str, value: &OsStr) -> Check {
    run_in_own_process(test, |command| {
        command.env_remove(LIBRARY).env_remove(ENGINE).env(variable, value);
    })
}

/// A user who names a library does not want another, even if it would work.
#[test]
fn only_the_library_that_the_variable_names_is_opened() -> Check {
    const TEST: &str = "which_library::only_the_library_that_the_variable_names_is_opened";
    if adapter::or_skip(TEST).is_none() {
        return Ok(());
    }
    if !is_own_process() {
        return run_over(TEST, LIBRARY, OsStr::new("libm.so.6"));
    }
    let why = opened(&adapter::registry(""), TCP).unwrap_err();
    assert!(why.contains("libm.so.6 has no symbol createTransferEngine"), "{why}");
    assert!(why.contains("KVX_MOONCAKE_LIB=libm.so.6"), "{why}");
    Ok(())
}

/// A folder with other names of existing files. Removed when dropped.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("kvx-{name}-{}", std::process::id()));
        std::fs::remove_dir_all(&path).ok(); // left by a killed process with the same process id
        std::fs::create_dir(&path).unwrap();
        Folder(path)
    }

    /// Contains the adapter under the name of the library that it replaces, with the files that it
    /// loads from its own folder.
    fn of_library(adapter: &Path) -> Folder {
        let folder = Folder::new("library");
        symlink(adapter, folder.0.join(SONAME)).unwrap();
        let beside = "libetcd_wrapper.so";
        symlink(adapter.with_file_name(beside), folder.0.join(beside)).unwrap();
        folder
    }

    /// Contains the engine and the adapter as Python installs a wheel, under another version.
    fn of_wheel(version: &str, adapter: &Path) -> Folder {
        let python = adapter.parent().unwrap().join("venv/bin/python");
        let asks = "import sysconfig; print(sysconfig.get_path('platlib'))";
        let said = kvx_testkit::output(Command::new(python).args(["-c", asks]), LIMIT);
        let packages = PathBuf::from(String::from_utf8(said.stdout).unwrap().trim());
        let wheel = Folder::new("wheel");
        let name = "mooncake_transfer_engine_non_cuda";
        std::fs::create_dir(wheel.0.join(format!("{name}-{version}.dist-info"))).unwrap();
        std::fs::create_dir(wheel.0.join("mooncake")).unwrap();
        // The engine's dependencies are in its own folder, under their own names.
        for file in std::fs::read_dir(packages.join("mooncake")).unwrap() {
            let file = file.unwrap();
            symlink(file.path(), wheel.0.join("mooncake").join(file.file_name())).unwrap();
        }
        let libraries = format!("{name}.libs");
        symlink(packages.join(&libraries), wheel.0.join(libraries)).unwrap();
        wheel
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.0).ok();
    }
}

#[test]
fn an_engine_of_another_version_is_rejected_unless_it_is_accepted() -> Check {
    const TEST: &str =
        "which_library::an_engine_of_another_version_is_rejected_unless_it_is_accepted";
    let Some(adapter) = adapter::or_skip(TEST) else { return Ok(()) };
    if !is_own_process() {
        let wheel = Folder::of_wheel("9.9", &adapter);
        return run_over(TEST, ENGINE, wheel.0.join("mooncake/engine.so").as_os_str());
    }
    let registry = adapter::registry("");
    let why = opened(&registry, TCP).unwrap_err();
    for part in ["version 9.9", "0.3.13.post1", "mooncake.any_version"] {
        assert!(why.contains(part), "{part} is not in: {why}");
    }
    let wanted = r#"{"mooncake": {"mooncake_protocol": "tcp", "any_version": true}}"#;
    assert_eq!(opened(&registry, wanted).unwrap().0, "wheel 9.9");
    Ok(())
}

#[test]
fn a_library_of_the_default_name_is_opened_if_no_variable_names_one() -> Check {
    const TEST: &str =
        "which_library::a_library_of_the_default_name_is_opened_if_no_variable_names_one";
    let Some(adapter) = adapter::or_skip(TEST) else { return Ok(()) };
    if !is_own_process() {
        let folder = Folder::of_library(&adapter);
        return run_over(TEST, "LD_LIBRARY_PATH", folder.0.as_os_str());
    }
    // It has priority over the files that a program includes.
    let (_, file) = opened(&adapter::registry(""), TCP).unwrap();
    assert_eq!(file.file_name(), Some(OsStr::new(SONAME)), "{file:?}");
    Ok(())
}
