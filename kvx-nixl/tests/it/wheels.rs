//! Wheels of NIXL that `cargo xtask test --install` has installed, and the library under test in a
//! folder for them.

use std::ffi::OsString;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use kvx_testkit::{Tier, is_asked_for, is_own_process, skip, trial};
use libtest_mimic::Trial;

/// Environments of wheels, as `cargo xtask test --install` names them. The one that vLLM asks for
/// is tested each time; one whose table is of the first 1.x by the whole run; the others where
/// [`MORE`] is set.
const RELEASES: [&str; 4] = ["nixl-1.5", "nixl-1.1", NEWEST, "nixl-0.10"];
/// This one has numpy, which serves all of them.
pub(crate) const NEWEST: &str = "nixl";
/// Its version.
pub(crate) const NEWEST_VERSION: &str = "1.5.1";
/// The variable that has further releases tested, and installed.
const MORE: &str = "KVX_NIXL_TEST_MORE";

/// The releases that this run tests, of those that are installed, and a skipped test for each other
/// one. `what`: of which tests.
pub(crate) fn of_this_run(what: &str) -> (Vec<(&'static str, Wheel)>, Vec<Trial>) {
    let is_wanted = |release: &&str| match *release {
        "nixl-1.5" => true,
        // A process that runs one test of another one's has all to choose from.
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

/// Why nothing runs without a wheel, and what to do.
const ABSENT: (&str, &str) =
    ("a wheel of nixl-cu12 is not installed", "cargo xtask test --install");

/// A folder with the newest wheel's numpy, for the others.
pub(crate) fn numpy(name: &str) -> std::io::Result<Folder> {
    let folder = Folder::new(name)?;
    if let Some(newest) = Wheel::find(NEWEST) {
        for part in ["numpy", "numpy.libs"] {
            symlink(newest.packages.join(part), folder.0.join(part))?;
        }
    }
    Ok(folder)
}

/// The variable that says how many rounds `many_rounds_do_not_grow` makes.
pub(crate) const ROUNDS: &str = "KVX_NIXL_TEST_ROUNDS";

/// A wheel of NIXL: its Python, and the folder that its packages lie in.
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

    /// A script of tests/python, with these plug-ins and these packages before the wheel's own.
    /// Of KVX's variables only the backends are set, and [`ROUNDS`] if this process has it.
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

/// A folder that goes when it is dropped.
pub(crate) struct Folder(pub(crate) PathBuf);

impl Folder {
    pub(crate) fn new(name: &str) -> std::io::Result<Folder> {
        let folder = std::env::temp_dir().join(format!("kvx-nixl-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&folder)?;
        Ok(Folder(folder))
    }

    /// With the library that was built with this test.
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
