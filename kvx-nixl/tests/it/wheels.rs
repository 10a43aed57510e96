//! The wheels of NIXL that `cargo xtask test --install` has installed, and folders with the library
//! under test for them.

use std::ffi::OsString;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use kvx_testkit::{Tier, is_asked_for, is_own_process, skip, trial};
use libtest_mimic::Trial;

/// Environments of wheels, as `cargo xtask test --install` names them. The release that vLLM
/// requires is tested in each run; one with the table of the first 1.x in the whole run; the others
/// if [`MORE`] is set.
const RELEASES: [&str; 4] = ["nixl-1.5", "nixl-1.1", NEWEST, "nixl-0.10"];
/// The release whose numpy all of them use.
pub(crate) const NEWEST: &str = "nixl";
/// Its version.
pub(crate) const NEWEST_VERSION: &str = "1.5.1";
/// The variable that adds further releases to the tests and the installation.
const MORE: &str = "KVX_NIXL_TEST_MORE";

/// Returns the installed releases that this run tests, and a skipped test for each missing one.
/// `what` names the tests.
pub(crate) fn of_this_run(what: &str) -> (Vec<(&'static str, Wheel)>, Vec<Trial>) {
    let is_wanted = |release: &&str| match *release {
        "nixl-1.5" => true,
        // A process that runs a single test of another process can use all releases.
        NEWEST | "nixl-0.10" if is_own_process() => true,
        NEWEST | "nixl-0.10" => is_asked_for(MORE, &format!("{what} in NIXL of {release}")),
        other => Tier::Whole.runs_or_says(&format!("{what} in NIXL of {other}")),
    };
    let (mut found, mut missing) = (Vec::new(), Vec::new());
    for release in RELEASES.into_iter().filter(is_wanted) {
        match Wheel::find(release).filter(|_| Wheel::find(NEWEST).is_some()) {
            Some(wheel) => found.push((release, wheel)),
            None => {
                let title = format!("{what} in {release}");
                missing.push(trial(title.clone(), move || skip(&title, ABSENT.0, ABSENT.1)));
            }
        }
    }
    (found, missing)
}

/// The reason and remedy if a wheel is missing.
const ABSENT: (&str, &str) =
    ("a wheel of nixl-cu12 is not installed", "cargo xtask test --install");

/// Creates a folder with the newest wheel's numpy, for the others.
pub(crate) fn numpy(name: &str) -> std::io::Result<Folder> {
    let folder = Folder::new(name)?;
    if let Some(newest) = Wheel::find(NEWEST) {
        for part in ["numpy", "numpy.libs"] {
            symlink(newest.packages.join(part), folder.0.join(part))?;
        }
    }
    Ok(folder)
}

/// The variable with the number of rounds of `many_rounds_do_not_grow`.
pub(crate) const ROUNDS: &str = "KVX_NIXL_TEST_ROUNDS";

/// A wheel of NIXL: its Python, and the folder with its packages.
pub(crate) struct Wheel {
    pub(crate) python: PathBuf,
    pub(crate) packages: PathBuf,
}

fn environments(release: &str) -> impl Iterator<Item = PathBuf> {
    let program = std::env::current_exe().expect("the running program has a path");
    let usual = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target");
    let targets: Vec<PathBuf> = program.ancestors().map(Path::to_owned).chain([usual]).collect();
    targets.into_iter().map(move |target| target.join("peers").join(release).join("venv"))
}

impl Wheel {
    pub(crate) fn find(release: &str) -> Option<Wheel> {
        environments(release).find_map(|environment| {
            let packages = std::fs::read_dir(environment.join("lib")).ok()?.flatten();
            let mut packages = packages.map(|python| python.path().join("site-packages"));
            let packages = packages.find(|folder| folder.join("nixl_cu12").exists())?;
            Some(Wheel { python: environment.join("bin/python"), packages })
        })
    }

    pub(crate) fn libraries(&self) -> PathBuf {
        self.packages.join(".nixl_cu12.mesonpy.libs")
    }

    /// Returns a command for a script in tests/python, with these plug-ins and these packages
    /// before the wheel's own. Of KVX's variables it sets only the backends, and [`ROUNDS`] if this
    /// process has it.
    pub(crate) fn script(
        &self,
        name: &str,
        plugins: &Path,
        before: &[PathBuf],
        route: &str,
    ) -> Command {
        let path: OsString = std::env::join_paths(before).expect("no colon in them");
        let mut command = Command::new(&self.python);
        command.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/python").join(name));
        command
            .env("NIXL_PLUGIN_DIR", plugins)
            .env("PYTHONPATH", path)
            .env("PYTHONDONTWRITEBYTECODE", "1");
        for (name, _) in std::env::vars_os()
            .filter(|(name, _)| name.to_string_lossy().starts_with("KVX_") && name != ROUNDS)
        {
            command.env_remove(name);
        }
        command.env("KVX_BACKENDS", route);
        command
    }
}

/// A folder that is removed when it is dropped.
pub(crate) struct Folder(pub(crate) PathBuf);

impl Folder {
    pub(crate) fn new(name: &str) -> std::io::Result<Folder> {
        let folder = std::env::temp_dir().join(format!("kvx-nixl-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&folder)?;
        Ok(Folder(folder))
    }

    /// Creates a folder with the library that was built with this test.
    pub(crate) fn of_plugins(name: &str) -> std::io::Result<Folder> {
        let program = std::env::current_exe()?;
        let library = program.parent().expect("a folder").join("libplugin_KVX.so");
        let folder = Folder::new(name)?;
        symlink(library, folder.0.join("libplugin_KVX.so"))?;
        Ok(folder)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.0).ok();
    }
}
