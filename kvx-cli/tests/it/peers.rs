//! The program with third-party software, and compared with it, as installed by `cargo xtask test
//! --install`.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

use kvx_testkit::{output, test};
use serde_json::Value;

/// The time after which a program counts as hung.
const LIMIT: Duration = Duration::from_secs(120);

/// A library that kvx opens, and the Python of its wheel.
struct Wheel {
    variable: &'static str,
    library: PathBuf,
    python: PathBuf,
}

impl Wheel {
    /// Returns Mooncake's wheel and the adapter, or skips the test.
    fn mooncake(test: &str) -> Option<Wheel> {
        let folder = Wheel::folder("mooncake");
        let library = Some(folder.join("libkvx_mooncake_adapter.so"));
        Wheel::or_skip(
            test,
            "KVX_MOONCAKE_LIB",
            library,
            &folder,
            "Mooncake's wheel or the adapter is not installed",
        )
    }

    /// Returns NIXL's wheel, or skips the test.
    fn nixl(test: &str) -> Option<Wheel> {
        let folder = Wheel::folder("nixl");
        let pythons = std::fs::read_dir(folder.join("venv/lib")).into_iter().flatten().flatten();
        let file = "site-packages/.nixl_cu12.mesonpy.libs/libnixl_capi.so";
        let library = pythons.map(|python| python.path().join(file)).find(|file| file.exists());
        Wheel::or_skip(
            test,
            "KVX_RIXL_LIB",
            library,
            &folder,
            "the wheel nixl-cu12 is not installed",
        )
    }

    fn folder(peer: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/peers").join(peer)
    }

    fn or_skip(
        test: &str,
        variable: &'static str,
        library: Option<PathBuf>,
        folder: &Path,
        why: &str,
    ) -> Option<Wheel> {
        let python = folder.join("venv/bin/python");
        let Some(library) = library.filter(|file| file.exists() && python.exists()) else {
            kvx_testkit::skip(test, why, "cargo xtask test --install");
            return None;
        };
        Some(Wheel { variable, library, python })
    }

    fn kvx(&self, arguments: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvx"));
        output(command.args(arguments).env(self.variable, &self.library), LIMIT)
    }

    /// Measures one point of `kvx bench` with this script as its companion program. Checks that the
    /// script moves bytes and verifies them, but not its speed.
    fn is_measured_beside(&self, backend: &str, script: &str, name: &str) {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(script);
        let beside = format!("'{}' '{}'", self.python.display(), script.display());
        // Large enough that a rate with three decimals is not zero if the one transfer of a round
        // takes half a second.
        let shape = ["--op", "read", "--block", "64K", "--count", "8", "--memory", "foreign"];
        let rounds = ["--rounds", "1", "--seconds", "0.05", "--pool", "2M"];
        let run = ["bench", "--backend", backend, "--beside", &beside];
        let output = self.kvx(&[&run[..], &shape, &rounds].concat());
        let (told, wrong) =
            (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "{told}\n{wrong}");
        let line: Value = serde_json::from_str(&told).unwrap_or_else(|_| panic!("{told}\n{wrong}"));
        assert_eq!(
            (&line["backend"], &line["verified"]),
            (&backend.into(), &true.into()),
            "{line}"
        );
        assert_eq!(line["beside_name"], name, "{line}\n{wrong}");
        assert!(line["beside_gbps"].as_f64() > Some(0.0), "{line}");
    }
}

#[test]
fn mooncakes_python_engine_is_measured_beside_kvx() {
    let wheel = Wheel::mooncake("mooncakes_python_engine_is_measured_beside_kvx");
    let Some(wheel) = wheel else { return };
    wheel.is_measured_beside("MOONCAKE", "kvx-mooncake/benches/beside.py", "mooncake-python");
}

#[test]
fn the_adapter_for_mooncakes_wheel_is_built_from_the_programs_sources() {
    let wheel =
        Wheel::mooncake("the_adapter_for_mooncakes_wheel_is_built_from_the_programs_sources");
    let Some(wheel) = wheel else { return };
    let environment = wheel.python.parent().and_then(Path::parent).unwrap();
    let pythons = std::fs::read_dir(environment.join("lib")).unwrap().flatten();
    let engine = pythons.map(|python| python.path().join("site-packages/mooncake/engine.so"));
    let engine = engine.into_iter().find(|file| file.exists()).unwrap().display().to_string();
    let folder = std::env::temp_dir().join(format!("kvx-adapter-{}", std::process::id()));
    let made = folder.display().to_string();
    let mut find = Command::new(env!("CARGO_BIN_EXE_kvx"));
    find.args(["backends", "--find"]).env("VIRTUAL_ENV", environment).env_remove(wheel.variable);
    let found = String::from_utf8_lossy(&output(&mut find, LIMIT).stdout).into_owned();
    assert!(found.contains("`kvx mooncake-adapter FOLDER --engine "), "{found}");
    let run = |arguments: &[&str], compiler: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvx"));
        let output =
            output(command.arg("mooncake-adapter").args(arguments).env("CXX", compiler), LIMIT);
        let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
        (output.status.success(), text(&output.stdout), text(&output.stderr))
    };
    let (worked, told, wrong) = run(&[&made, "--engine", &engine], "");
    assert!(worked, "{told}\n{wrong}");
    let file = folder.join("libkvx_mooncake_adapter.so");
    assert_eq!(
        told,
        format!(
            "export KVX_MOONCAKE_LIB={}\nexport KVX_MOONCAKE_ENGINE={engine}\n",
            file.display()
        )
    );
    assert!(wrong.contains("wheel 0."), "{wrong}");
    // A failed build leaves the old libraries, and no other files.
    let missing = "/nonexistent/c++";
    for (arguments, compiler, words) in [
        (&[&made, "--engine", &engine][..], missing, "could not be started"),
        (&[&made, "--engine", &engine], "false", "could not build"),
        (&[&made, "--engine", missing], "", "is not a file"),
        (&["--engine", &engine], "", "name a folder to build it in"),
    ] {
        let (worked, told, wrong) = run(arguments, compiler);
        assert!(!worked && told.is_empty() && wrong.contains(words), "{words}: {told}\n{wrong}");
    }
    assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 2);
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn nixls_python_agent_is_measured_beside_kvx() {
    let Some(wheel) = Wheel::nixl("nixls_python_agent_is_measured_beside_kvx") else { return };
    wheel.is_measured_beside("RIXL", "kvx-rixl/benches/nixl_beside.py", "nixl");
}

// vLLM guide R14: with Mooncake's wheel, `kvx backends` warns that the engine listens on all
//     interfaces without authentication
#[test]
fn backends_says_that_mooncakes_engine_lets_everybody_in() {
    let wheel = Wheel::mooncake("backends_says_that_mooncakes_engine_lets_everybody_in");
    let Some(wheel) = wheel else { return };
    for arguments in [&["backends"][..], &["backends", "--json"]] {
        let output = wheel.kvx(&[arguments, &["--require", "mooncake"]].concat());
        let told = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{told}\n{}", String::from_utf8_lossy(&output.stderr));
        for part in ["listens on all interfaces", "without authentication"] {
            assert!(told.contains(part), "{part} is not in {told}");
        }
    }
}
