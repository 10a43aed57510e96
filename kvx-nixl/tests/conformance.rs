//! The backend KVX inside real NIXLs, through their Python API: tests/python/conformance.py over each wheel and each
//! route.

use std::ffi::OsString;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Output};
use std::time::Duration;

use kvx_testkit::{Tier, skip};
use libtest_mimic::{Arguments, Failed, Trial};

const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/python/conformance.py");
const CUT_OFF: Duration = Duration::from_secs(60);
/// Environments of wheels, as `cargo xtask test --install` names them: the newest, and one whose table is of the
/// first 1.x.
const RELEASES: [&str; 2] = ["nixl", "nixl-1.1"];
const ROUTES: [&str; 2] = ["SHM", "TCP"];

/// In conformance.py, by their names.
const TESTS: &[&str] = &[
    "prepped_and_direct_reads_and_writes",
    "reposts",
    "unequal_lists",
    "a_hundred_thousand_descriptors",
    "notifications_of_all_lengths",
    "transfers_to_itself",
    "regions_added_later",
    "a_killed_peer",
    "a_stopped_peer",
    "a_restarted_peer",
    "release_in_mid_transfer",
    "deregister_under_a_reading_peer",
    "two_agents_in_one_process",
    "sixteen_threads",
    "idle_agents_sleep",
    "what_makes_no_sense_is_refused",
    "a_forked_child_is_told",
    "many_rounds_do_not_grow",
];

type Outcome = Result<(), Failed>;

/// The library that was built with this test.
fn library() -> PathBuf {
    let program = std::env::current_exe().expect("the running program has a path");
    program.parent().expect("a folder").join("libplugin_KVX.so")
}

fn environments(release: &str) -> impl Iterator<Item = PathBuf> {
    let program = std::env::current_exe().expect("the running program has a path");
    let usual = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target");
    let targets: Vec<PathBuf> = program.ancestors().map(Path::to_owned).chain([usual]).collect();
    targets.into_iter().map(move |target| target.join("peers").join(release).join("venv"))
}

/// A wheel of NIXL: its Python, and the folder that its packages lie in.
struct Wheel {
    python: PathBuf,
    packages: PathBuf,
}

impl Wheel {
    fn find(release: &str) -> Option<Wheel> {
        environments(release).find_map(|environment| {
            let packages = std::fs::read_dir(environment.join("lib")).ok()?.flatten();
            let mut packages = packages.map(|python| python.path().join("site-packages"));
            let packages = packages.find(|folder| folder.join("nixl_cu12").exists())?;
            Some(Wheel { python: environment.join("bin/python"), packages })
        })
    }

    fn libraries(&self) -> PathBuf {
        self.packages.join(".nixl_cu12.mesonpy.libs")
    }
}

/// A folder that goes when it is dropped.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> std::io::Result<Folder> {
        let folder = std::env::temp_dir().join(format!("kvx-nixl-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&folder)?;
        Ok(Folder(folder))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.0).ok();
    }
}

/// Runs a test of the script with these packages before the wheel's own.
fn run(wheel: &Wheel, plugins: &Path, before: &[PathBuf], route: &str, test: &str) -> Output {
    let path: OsString = std::env::join_paths(before).expect("no colon in them");
    let mut command = Command::new(&wheel.python);
    command.args([SCRIPT, test]).env("NIXL_PLUGIN_DIR", plugins).env("PYTHONPATH", path);
    command.env("PYTHONDONTWRITEBYTECODE", "1");
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("KVX_")) {
        command.env_remove(name);
    }
    kvx_testkit::output(command.env("KVX_BACKENDS", route), CUT_OFF)
}

fn passes(wheel: &Wheel, plugins: &Path, numpy: &[PathBuf], route: &str, test: &str) -> Outcome {
    let output = run(wheel, plugins, numpy, route, test);
    let said = String::from_utf8_lossy(&output.stderr);
    if output.status.success() && output.stdout == b"passed\n" {
        return Ok(());
    }
    Err(format!("{:?}\n{said}", output.status).into())
}

/// The wheel under another record or with other plug-ins, in a folder of its own.
struct Doctored {
    folder: Folder,
    packages: PathBuf,
}

impl Doctored {
    fn new(wheel: &Wheel, name: &str, version: &str) -> std::io::Result<Doctored> {
        let folder = Folder::new(name)?;
        let packages = folder.0.join("packages");
        std::fs::create_dir_all(packages.join(".nixl_cu12.mesonpy.libs/plugins"))?;
        for part in ["nixl_cu12.libs", "numpy", "numpy.libs"] {
            symlink(wheel.packages.join(part), packages.join(part))?;
        }
        // Python and the linker follow links to where the real ones lie: what is looked at is copied.
        for part in ["nixl_cu12", ".nixl_cu12.mesonpy.libs", ".nixl_cu12.mesonpy.libs/plugins"] {
            std::fs::create_dir_all(packages.join(part))?;
            for entry in std::fs::read_dir(wheel.packages.join(part))?.flatten() {
                if entry.file_type()?.is_file() {
                    std::fs::copy(entry.path(), packages.join(part).join(entry.file_name()))?;
                }
            }
        }
        std::fs::create_dir(packages.join(format!("nixl_cu12-{version}.dist-info")))?;
        Ok(Doctored { folder, packages })
    }

    fn sibling(&self, name: &str) -> PathBuf {
        self.packages.join(format!(".nixl_cu12.mesonpy.libs/plugins/libplugin_{name}.so"))
    }

    /// Refused in words, and the process lives to tell.
    fn refused(&self, wheel: &Wheel, plugins: &Path, sentence: &str) -> Outcome {
        let output =
            run(wheel, plugins, std::slice::from_ref(&self.packages), "SHM", "two_agents_in_one_process");
        let said = String::from_utf8_lossy(&output.stderr);
        let told = said.lines().any(|line| line.starts_with("KVX: ") && line.contains(sentence));
        let lived = output.status.code() == Some(1);
        if told && lived {
            Ok(())
        } else {
            Err(format!("{:?}, not {sentence:?}:\n{said}", output.status).into())
        }
    }
}

fn an_unknown_version_is_refused_unless_it_is_asked_for(wheel: &Wheel, plugins: &Path) -> Outcome {
    let doctored = Doctored::new(wheel, "version", "9.8.7")?;
    doctored.refused(wheel, plugins, "NIXL 9.8.7 was not tried with KVX")?;
    let mut command = Command::new(&wheel.python);
    command.args([SCRIPT, "two_agents_in_one_process"]).env("NIXL_PLUGIN_DIR", plugins);
    command.env("PYTHONPATH", &doctored.packages).env("KVX_BACKENDS", "SHM").env("KVX_NIXL_ANY_VERSION", "1");
    let output = kvx_testkit::output(&mut command, CUT_OFF);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.contains("in NIXL 9.8.7"), "{said}");
    drop(doctored.folder);
    Ok(())
}

/// A byte of a function's name in a sibling, and a sibling that is cut off.
fn a_doctored_sibling_is_refused(wheel: &Wheel, plugins: &Path) -> Outcome {
    let doctored = Doctored::new(wheel, "sibling", "1.5.1")?;
    let whole = std::fs::read(doctored.sibling("UCX"))?;
    // Everywhere: tools that change a library's paths leave old names behind.
    let name = b"9checkXferEP15nixlBackendReqH";
    let mut other = whole.clone();
    for at in (0..whole.len() - name.len()).filter(|at| whole[*at..].starts_with(name)) {
        other[at + 1] = b'x';
    }
    assert!(other != whole, "the name of a function");
    std::fs::write(doctored.sibling("UCX"), other)?;
    doctored.refused(wheel, plugins, "its table lacks the function CheckXfer")?;
    std::fs::write(doctored.sibling("UCX"), &whole[..whole.len() / 2])?;
    doctored.refused(wheel, plugins, "UCX: it is cut off or damaged")?;
    Ok(())
}

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    let plugins = Folder::new("plugins").expect("a new folder");
    symlink(library(), plugins.0.join("libplugin_KVX.so")).expect("a new name");
    // Older wheels are installed without numpy: the newest one's serves them.
    let newest = Wheel::find(RELEASES[0]);
    let borrowed = Folder::new("numpy").expect("a new folder");
    if let Some(newest) = &newest {
        for part in ["numpy", "numpy.libs"] {
            symlink(newest.packages.join(part), borrowed.0.join(part)).expect("a new name");
        }
    }
    let mut trials = Vec::new();
    for release in RELEASES {
        if release != RELEASES[0] && !Tier::Whole.runs_or_says(&format!("NIXL of {release}")) {
            continue;
        }
        let Some(wheel) = Wheel::find(release).filter(|_| newest.is_some()) else {
            skip(
                &format!("conformance in {release}"),
                "a wheel of nixl-cu12 is not installed",
                "cargo xtask test --install",
            );
            continue;
        };
        let wheel: &'static Wheel = Box::leak(Box::new(wheel));
        assert!(wheel.libraries().exists(), "the libraries of the wheel");
        for (route, test) in ROUTES.iter().flat_map(|route| TESTS.iter().map(move |test| (route, test))) {
            let (plugins, numpy) = (plugins.0.clone(), borrowed.0.clone());
            let run = move || passes(wheel, &plugins, &[numpy], route, test);
            trials.push(Trial::test(format!("{release}::{}::{test}", route.to_lowercase()), run));
        }
        if release == RELEASES[0] {
            let own: [(&str, fn(&Wheel, &Path) -> Outcome); 2] = [
                ("an_unknown_version_is_refused", an_unknown_version_is_refused_unless_it_is_asked_for),
                ("a_doctored_sibling_is_refused", a_doctored_sibling_is_refused),
            ];
            for (name, test) in own {
                let plugins = plugins.0.clone();
                trials.push(Trial::test(format!("{release}::{name}"), move || test(wheel, &plugins)));
            }
        }
    }
    // Its tests measure times: one after the other.
    let arguments = Arguments { test_threads: Some(1), ..arguments };
    let conclusion = libtest_mimic::run(&arguments, trials);
    drop((plugins, borrowed));
    conclusion.exit_code()
}
