//! Tests which libraries are accepted, and the reports about those that are not.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use kvx_core::backend::Factory as _;
use kvx_core::{Agent, Options};
use libtest_mimic::{Failed, Trial};

use crate::{Outcome, registry, with_nixl};

const CUT_OFF: Duration = Duration::from_secs(10);
/// Set in a process that reports on its library, to the options.
const REPORT: &str = "KVX_RIXL_TEST_REPORT";

/// A folder that is removed when it is dropped.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> std::io::Result<Folder> {
        let folder = std::env::temp_dir().join(format!("kvx-rixl-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&folder)?;
        Ok(Folder(folder))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.0).ok();
    }
}

/// Returns what `kvx backends` would report about the library that the environment names, and
/// whether an agent opens over it.
fn report(options: &str) -> String {
    let options = Options::parse(options).expect("JSON");
    let available = match kvx_rixl::Rixl.available(&options) {
        Ok(available) => format!("NIXL {}", available.version),
        Err(why) => why.to_string(),
    };
    let agent =
        Agent::builder("teller").backends(["RIXL"]).options(options).registry(registry("")).build();
    let agent = agent.map_or_else(|why| format!("no agent: {why}"), |_| "an agent".to_owned());
    format!("{available}\n{agent}")
}

/// Runs a child that loads another library. Returns its report.
fn run_child(options: &str, variable: &str, value: &Path) -> Result<String, Failed> {
    let mut again = Command::new(std::env::current_exe()?);
    let output = kvx_testkit::output(again.env(REPORT, options).env(variable, value), CUT_OFF);
    assert!(output.status.success(), "{output:?}");
    Ok(String::from_utf8(output.stdout)?)
}

/// Returns the folder of the wheel's libraries, whose name contains the wheel's.
fn libraries() -> PathBuf {
    let library = PathBuf::from(std::env::var_os("KVX_RIXL_LIB").expect("it was set"));
    library.parent().expect("a folder").to_owned()
}

/// The wheel's record claims another version.
// vLLM guide R3: a NIXL library from another source than the wheel is accepted or rejected by its
//     version; RIXL on AMD devices has not been run
fn a_version_out_of_range_is_rejected_unless_it_is_accepted() -> Outcome {
    let (folder, real) = (Folder::new("version")?, libraries());
    let copy = folder.0.join(real.file_name().expect("a name"));
    std::fs::create_dir(&copy)?;
    for entry in std::fs::read_dir(&real)? {
        let entry = entry?;
        symlink(entry.path(), copy.join(entry.file_name()))?;
    }
    // The dependencies of the wheel's libraries are in the folder beside them.
    let beside = real.parent().expect("a folder").join("nixl_cu12.libs");
    symlink(beside, folder.0.join("nixl_cu12.libs"))?;
    std::fs::create_dir(folder.0.join("nixl_cu12-2.0.0.dist-info"))?;
    let library = copy.join("libnixl_capi.so");
    let refused = run_child("{}", "KVX_RIXL_LIB", &library)?;
    let why = format!("{} is NIXL 2.0.0, and kvx supports 1.0 and later 1.x", library.display());
    let lines: Vec<_> = refused.lines().collect();
    assert!(lines[0].contains(&why) && lines[0].contains("rixl.any_version"), "{refused}");
    assert!(lines[1].starts_with("no agent: ") && lines[1].contains("NIXL 2.0.0"), "{refused}");
    let any = r#"{"rixl": {"any_version": true, "params": {"engine_config": "NET_DEVICES=lo"}}}"#;
    assert_eq!(run_child(any, "KVX_RIXL_LIB", &library)?, "NIXL 2.0.0\nan agent\n");
    Ok(())
}

/// A plugin whose dependency on the C++ library was changed to one that does not exist.
fn the_missing_libraries_of_a_plugin_are_named() -> Outcome {
    const NEEDED: &[u8] = b"libstdc++.so.6\0";
    const NOWHERE: &[u8] = b"libno-such.so0\0";
    let folder = Folder::new("plugin")?;
    let mut plugin = std::fs::read(libraries().join("plugins/libplugin_UCX.so"))?;
    let at =
        plugin.windows(NEEDED.len()).position(|name| name == NEEDED).expect("it is written in C++");
    plugin[at..at + NOWHERE.len()].copy_from_slice(NOWHERE);
    let path = folder.0.join("libplugin_UCX.so");
    std::fs::write(&path, plugin)?;
    let refused = run_child("{}", "NIXL_PLUGIN_DIR", &folder.0)?;
    let why = format!("NIXL's plugin {} cannot be loaded: missing ", path.display());
    let (_, missed) = refused.split_once(&why).unwrap_or_else(|| panic!("{refused}"));
    assert!(missed.contains("libno-such.so0") && !missed.contains("libc.so"), "{refused}");
    Ok(())
}

/// Prints the state of its library and exits, if this process was started for that.
pub(crate) fn report_if_asked() {
    let Ok(options) = std::env::var(REPORT) else { return };
    println!("{}", report(&options));
    std::process::exit(0);
}

pub(crate) fn trials() -> [Trial; 2] {
    let test = |name, test: fn() -> Outcome| with_nixl(format!("libraries::{name}"), test);
    [
        test(
            "a_version_out_of_range_is_rejected_unless_it_is_accepted",
            a_version_out_of_range_is_rejected_unless_it_is_accepted,
        ),
        test(
            "the_missing_libraries_of_a_plugin_are_named",
            the_missing_libraries_of_a_plugin_are_named,
        ),
    ]
}
