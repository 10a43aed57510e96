//! The program as operators run it.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use kvx_testkit::{kill_after, output, test};
use serde_json::Value;

/// The time after which the program is killed.
const LIMIT: Duration = Duration::from_secs(60);

fn program(arguments: &[&str]) -> Command {
    let program = Path::new(env!("CARGO_BIN_EXE_kvx"));
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null());
    command.env("KVX_NIXL_PLUGIN", plug_in());
    command
}

/// Returns the path of NIXL's plug-in. Cargo builds it there for crates that depend on it; a user
/// builds it separately.
pub(crate) fn plug_in() -> PathBuf {
    Path::new(env!("CARGO_BIN_EXE_kvx")).with_file_name("deps").join("libplugin_KVX.so")
}

fn kvx(arguments: &[&str]) -> Output {
    output(&mut program(arguments), LIMIT)
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).expect("the program speaks UTF-8")
}

const UNKNOWN: &str = "backend \"UXC\" is unknown; did you mean UCX? known: UCX, LIBFABRIC, MOONCAKE, RIXL, SHM, TCP\n";

#[test]
fn backends_lists_every_known_backend() {
    let output = kvx(&["backends"]);
    assert!(output.status.success());
    let lines: Vec<_> = text(&output.stdout).lines().collect();
    assert!(
        lines[0].starts_with("BACKEND") && lines[0].ends_with("VERSION AND LIBRARY"),
        "{lines:?}"
    );
    let end = lines.iter().position(|line| line.is_empty()).expect("the default choice follows");
    assert!(lines[end + 1].contains("the first of SHM, TCP"), "{lines:?}");
    assert!(lines.iter().all(|line| line.chars().count() <= 120), "{lines:?}");
    let rows = lines[1..end].iter().filter(|line| !line.starts_with(' ')); // details are below a backend
    let names: Vec<_> = rows.filter_map(|line| line.split_whitespace().next()).collect();
    assert_eq!(names, ["UCX", "LIBFABRIC", "MOONCAKE", "RIXL", "SHM", "TCP"]);
}

#[test]
fn backends_json_is_one_array_with_the_capabilities_of_available_backends() {
    let output = kvx(&["backends", "--json"]);
    let rows: Vec<Value> = serde_json::from_slice(&output.stdout).unwrap();
    let row = |name: &str| rows.iter().find(|row| row["name"] == name).unwrap();
    assert_eq!((&row("TCP")["compiled"], &row("TCP")["available"]), (&true.into(), &true.into()));
    assert!(row("TCP")["version"].is_string() && row("TCP")["reason"].is_null());
    assert_eq!(row("TCP")["capabilities"]["isolation"], "owner");
}

#[test]
fn require_reports_whether_a_backend_can_be_used() {
    assert!(kvx(&["backends", "--require", "tcp"]).status.success());
    let output = kvx(&["backends", "--require", "UXC"]);
    assert_eq!((output.status.code(), text(&output.stderr)), (Some(1), UNKNOWN));
    assert!(output.stdout.is_empty());
}

/// Returns the rows of `kvx backends --routes --json` with UCX from this file, or from the system.
fn routes(ucx: Option<&Path>, settings: &[(&str, &str)]) -> Vec<Value> {
    let mut command = program(&["backends", "--routes", "--json"]);
    command.envs(ucx.map(|file| ("KVX_UCX_LIB", file))).envs(settings.iter().copied());
    let output = output(&mut command, LIMIT);
    assert!(output.status.success(), "{}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("the program prints JSON")
}

/// Returns the UCX that the tests install in addition to the system's.
fn installed_ucx() -> Option<PathBuf> {
    let venv = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/peers/ucx/venv/lib");
    let mut versions = std::fs::read_dir(venv).ok()?.flatten();
    versions.find_map(|python| {
        let file = python.path().join("site-packages/libucx/lib/libucp.so.0");
        file.exists().then_some(file)
    })
}

#[test]
fn routes_report_how_each_available_backend_reaches_a_second_process() {
    let installed = installed_ucx();
    for ucx in [None, installed.as_deref()] {
        let rows = routes(ucx, &[]);
        for row in rows.iter().filter(|row| row["available"] == true) {
            let route = row["route"].as_str().unwrap_or_else(|| panic!("{row:#}"));
            let expected: &[&str] = match row["name"].as_str().unwrap() {
                "UCX" if ucx.is_some() => {
                    &["UCX 1.22", "cma/memory", "gets: 0..inf zero-copy", "puts: 0..inf zero-copy"]
                }
                "UCX" => &["UCX 1.", "lanes sysv/memory (", "gets and puts by "],
                "SHM" => &["shared memory"],
                "TCP" => &["TCP to "],
                _ => &[],
            };
            assert!(expected.iter().all(|part| route.contains(part)), "{route}");
        }
        let served = rows.iter().filter(|row| row["route"].is_string()).count();
        assert!(served >= 2 + usize::from(ucx.is_some()), "{rows:#?}");
    }
}

#[test]
fn log_lines_of_libraries_are_not_mixed_into_the_output() {
    let talkative = [("UCX_LOG_FILE", "stdout"), ("UCX_LOG_LEVEL", "info")];
    let rows = routes(None, &talkative); // valid JSON, although the second process logs as well
    assert!(rows.iter().any(|row| row["route"].is_string()), "{rows:#?}");
    let said = output(program(&["backends"]).envs(talkative), LIMIT);
    if rows.iter().any(|row| row["name"] == "UCX" && row["available"] == true) {
        assert!(text(&said.stderr).contains("UCX  INFO"), "it is told: {}", text(&said.stderr));
    }
}

#[test]
fn a_backend_that_reaches_no_second_process_reports_the_reason() {
    let rows = routes(None, &[("UCX_TLS", "self")]);
    let row = |name: &str| rows.iter().find(|row| row["name"] == name).unwrap();
    assert!(row("TCP")["route"].is_string(), "the other backends are still listed");
    if row("UCX")["available"] == true {
        let why = row("UCX")["reason"].as_str().unwrap();
        assert!(
            why.starts_with("no link to a second process of this host: ")
                && why.contains("UCX_TLS"),
            "{why}"
        );
        let mut required = program(&["backends", "--routes", "--require", "UCX"]);
        let output = output(required.env("UCX_TLS", "self"), LIMIT);
        assert_eq!(output.status.code(), Some(1));
        assert!(text(&output.stderr).contains("no link to a second process of this host"));
    }
}

#[test]
fn every_command_that_takes_a_backend_has_the_same_errors() {
    for list in ["UXC", "SHM,UXC"] {
        let output = kvx(&["demo", "--transfer", "--backend", list]);
        assert_eq!((output.status.code(), text(&output.stderr)), (Some(1), UNKNOWN), "{list}");
    }
}

#[test]
fn find_prints_the_variable_of_a_library_in_a_python_environment() {
    let environment = std::env::temp_dir().join(format!("kvx-program-{}", std::process::id()));
    let library = environment.join("lib/python3.11/site-packages/libucx/lib/libucp.so.0");
    std::fs::create_dir_all(library.parent().unwrap()).unwrap();
    std::fs::write(&library, "").unwrap();
    let output = output(program(&["backends", "--find"]).env("VIRTUAL_ENV", &environment), LIMIT);
    std::fs::remove_dir_all(&environment).unwrap();
    let line = format!("export KVX_UCX_LIB={}", library.display());
    assert!(
        text(&output.stdout).lines().any(|found| found.starts_with(&line)),
        "{}",
        text(&output.stdout)
    );
}

#[test]
fn invalid_arguments_exit_with_2() {
    for arguments in [
        &["no-such-command"][..],
        &["backends", "--no-such"],
        &["demo", "--transfer", "--size", "big"],
        &[],
    ] {
        let output = kvx(arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert!(!output.stderr.is_empty());
    }
    let output = kvx(&["demo", "--transfer", "--size", "1000"]);
    let sentence = "kvx: --size 1000 bytes: write a multiple of 1 MiB\n";
    assert_eq!((output.status.code(), text(&output.stderr)), (Some(1), sentence));
}

#[test]
fn a_failed_write_is_an_error() {
    for command in ["config", "backends"] {
        let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let child = program(&[command]).stdout(full).stderr(Stdio::piped()).spawn().unwrap();
        kvx_testkit::kill_after(&child, LIMIT);
        let said = child.wait_with_output().unwrap();
        assert_eq!(said.status.code(), Some(1), "{command}");
        assert!(text(&said.stderr).contains("No space left"), "{command}: {}", text(&said.stderr));
    }
}

#[test]
fn config_receives_its_arguments_unchanged() {
    let output = kvx(&["config", "--json", "--kv-transfer-config.kv_role", "kv_both"]);
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(output.status.success() && report.to_string().contains("kv_both"), "{report}");
    assert!(text(&kvx(&["config", "--help"]).stdout).contains("Usage: kvx config"));
}

#[test]
fn the_demo_passes_and_leaves_no_process_behind() {
    let output = kvx(&["demo", "--transfer", "--size", "4M"]);
    let story = text(&output.stdout);
    assert!(output.status.success(), "{story}\n{}", text(&output.stderr));
    assert_eq!(story.lines().last(), Some("All checks passed."));
    for backend in ["SHM", "TCP"] {
        let lost = format!("  {backend} after ");
        assert!(story.lines().any(|line| line.starts_with(&lost)), "{story}");
        assert!(story.contains(&format!("Route: {backend}: chosen")), "{story}");
    }
    let owner = story.strip_prefix("Process ").and_then(|rest| rest.split(' ').next()).unwrap();
    assert!(owner.parse::<u32>().is_ok(), "{story}");
    assert!(!PathBuf::from("/proc").join(owner).exists(), "process {owner} is still there");
}

#[test]
fn the_demo_runs_over_one_backend_too() {
    let output = kvx(&["demo", "--transfer", "--size", "1M", "--backend", "tcp,TCP"]);
    let story = text(&output.stdout);
    assert!(output.status.success(), "{story}\n{}", text(&output.stderr));
    assert_eq!(story.matches("Route: ").count(), 1, "{story}");
}

#[test]
fn a_demo_that_ends_in_the_middle_leaves_no_process_behind() {
    // No process reads its output, so it ends at its first line, just after it has started its
    // owner.
    let mut demo = program(&["demo", "--transfer", "--backend", "TCP", "--size", "3M"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    kill_after(&demo, LIMIT);
    drop(demo.stdout.take());
    let status = demo.wait().unwrap();
    assert!(status.success(), "{status}");
    let size = format!("--kvx={}", 3 << 20);
    for process in std::fs::read_dir("/proc").unwrap().flatten() {
        let line = std::fs::read(process.path().join("cmdline")).unwrap_or_default();
        let arguments: Vec<_> = line.split(|byte| *byte == 0).collect();
        let is_owner =
            arguments.contains(&&b"bench-target"[..]) && arguments.contains(&size.as_bytes());
        assert!(!is_owner, "{:?} is still there", process.path());
    }
}

#[test]
fn the_owner_of_the_demo_ends_with_its_reader() {
    let sizes = ["--kvx=1048576", "--foreign=0", "--device=0"];
    let mut owner = program(&["bench-target", "--backend", "TCP", "--options", "{}", "--life=60"])
        .args(sizes)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    kill_after(&owner, LIMIT / 3);
    let mut metadata = String::new();
    BufReader::new(owner.stdout.take().unwrap()).read_line(&mut metadata).unwrap();
    assert!(metadata.len() > 100, "{metadata:?}");
    drop(owner.stdin.take()); // as the kernel does when the reader dies
    let status = owner.wait().unwrap();
    assert!(status.success(), "the owner outlived its reader, or failed: {status}");
}

#[test]
fn a_model_is_created_and_never_overwritten() {
    let folder = std::env::temp_dir().join(format!("kvx-model-{}", std::process::id()));
    let place = folder.to_str().unwrap();
    let arguments = [
        "make-model",
        place,
        "--arch",
        "qwen3",
        "--layers",
        "1",
        "--dtype",
        "bfloat16",
        "--shards",
        "2",
    ];
    let made = kvx(&arguments);
    assert!(made.status.success() && text(&made.stdout).contains("random weights"), "{made:?}");
    let config: Value =
        serde_json::from_str(&std::fs::read_to_string(folder.join("config.json")).unwrap())
            .unwrap();
    assert_eq!((&config["model_type"], &config["num_hidden_layers"]), (&"qwen3".into(), &1.into()));
    let again = kvx(&arguments);
    assert!(text(&again.stderr).contains("holds a model already"), "{again:?}");
    let wrong = kvx(&["make-model", place, "--arch", "mamba"]);
    assert!(text(&wrong.stderr).contains("--arch must be llama, qwen2 or qwen3"), "{wrong:?}");
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn a_secret_is_created_for_its_owner_only_and_never_overwritten() {
    use std::os::unix::fs::PermissionsExt as _;
    let folder = std::env::temp_dir().join(format!("kvx-secret-made-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let file = folder.join("fleet.secret");
    let file = file.to_str().unwrap();
    let made = kvx(&["secret", file]);
    assert!(made.status.success(), "{}", text(&made.stderr));
    assert!(
        text(&made.stdout).contains(&format!("\nKVX_SECRET_FILE={file}\n")),
        "{}",
        text(&made.stdout)
    );
    assert_eq!(std::fs::metadata(file).unwrap().permissions().mode() & 0o7777, 0o600);
    let line = std::fs::read_to_string(file).unwrap();
    let key = line.strip_prefix("kvx-secret-1:").and_then(|rest| rest.split(':').next()).unwrap();
    assert!(!text(&made.stdout).contains(key), "the key is printed");
    let again = kvx(&["secret", file]);
    assert_eq!(
        (again.status.code(), std::fs::read_to_string(file).unwrap()),
        (Some(1), line.clone())
    );
    assert!(text(&again.stderr).contains("never overwritten"), "{}", text(&again.stderr));
    kvx::Secret::from_file(file).unwrap();
    // `kvx config` reports whether there is a secret, but never its content.
    let config = |variable: &str, value: &str| {
        let mut config = program(&["config", "--kv-transfer-config.kv_role", "kv_both"]);
        config.env_remove("KVX_SECRET_FILE").env(variable, value);
        let said = output(&mut config, LIMIT);
        assert!(said.status.success(), "{}", text(&said.stderr));
        let said = text(&said.stdout).to_owned();
        assert!(!said.contains(key), "the key is printed");
        said.lines()
            .find(|line| line.trim_start().starts_with("secret"))
            .expect("a line about it")
            .to_owned()
    };
    assert!(config("KVX_SECRET_FILE", file).contains("KVX_SECRET_FILE names one"));
    assert!(
        config("KVX_NOTHING", "")
            .contains("none: every peer with this engine's metadata is served")
    );
    assert!(config("KVX_SECRET_FILE", "/nowhere").contains("/nowhere"));
    assert!(config("KVX_SECRET", "word").contains("unset KVX_SECRET"));
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn nixls_are_listed_and_a_folder_for_the_plug_in_is_created_and_removed() {
    assert!(kvx(&["nixl"]).status.success());
    let listed = kvx(&["nixl", "--json"]);
    assert!(listed.status.success());
    for line in text(&listed.stdout).lines() {
        let nixl: Value = serde_json::from_str(line).unwrap();
        assert!(
            nixl["library"].is_string() && nixl["serves"].is_null() != nixl["refused"].is_null(),
            "{nixl}"
        );
    }
    let folder = std::env::temp_dir().join(format!("kvx-nixl-{}", std::process::id()));
    let place = folder.to_str().unwrap();
    let installed = kvx(&["nixl", "--install", place]);
    assert!(installed.status.success(), "{}", text(&installed.stderr));
    assert!(text(&installed.stdout).contains("export NIXL_PLUGIN_DIR="));
    assert!(folder.join("libplugin_KVX.so").exists(), "the link leads somewhere");
    assert!(kvx(&["nixl", "--remove", place]).status.success());
    assert!(!kvx(&["nixl", "--remove", place]).status.success(), "the link is removed");
    std::fs::remove_dir(folder).unwrap();
}

#[test]
fn two_agents_of_a_nixl_are_checked_over_kvx() {
    let Some(environment) = peers("nixl") else {
        return kvx_testkit::skip(
            "two_agents_of_a_nixl_are_checked_over_kvx",
            "a wheel of nixl-cu12 is not installed",
            "cargo xtask test --install",
        );
    };
    let mut check = program(&["nixl", "--check"]);
    let output = output(check.env("VIRTUAL_ENV", &environment), 2 * LIMIT);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let said = text(&output.stdout);
    assert!(said.starts_with("nixl-cu12 1."), "the wheel has a name: {said}");
    assert!(
        said.contains("it has no backend KVX: run kvx nixl --install"),
        "an engine would not find it: {said}"
    );
    for (backend, blocks) in [
        ("KVX", "1024 blocks of 4 KiB"),
        ("KVX", "512 blocks of 64 KiB"),
        ("UCX", "1024 blocks of 4 KiB"),
    ] {
        let mut lines = said.lines();
        let line = lines.find(|line| line.starts_with(&format!("  {backend}: {blocks} ")));
        let figures = line.unwrap_or_else(|| panic!("{said}"));
        assert!(figures.contains(" GB/s, ") && figures.ends_with(" in 3 runs"), "{figures}");
    }
    assert!(said.contains("route: SHM: chosen, ") && said.contains("route: rma"), "{said}");
}

/// Returns the environment of a peer, if `cargo xtask test --install` has created it.
pub(crate) fn peers(name: &str) -> Option<PathBuf> {
    let target = Path::new(env!("CARGO_BIN_EXE_kvx")).ancestors().nth(2)?;
    Some(target.join("peers").join(name).join("venv")).filter(|environment| environment.exists())
}
