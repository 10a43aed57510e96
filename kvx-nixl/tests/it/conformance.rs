//! Tests the backend KVX in real NIXLs, through their Python API: tests/python/conformance.py over
//! each wheel and each route; GPU memory with a stand-in for the drivers.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

use kvx::{MemoryKind, Options};
use kvx_testkit::{Tier, skip, trial_within};
use libtest_mimic::{Failed, Trial};

use crate::wheels::{self, Folder, NEWEST, NEWEST_VERSION, ROUNDS, Wheel};

const SCRIPT: &str = "conformance.py";
const CUT_OFF: Duration = Duration::from_secs(60);
/// The time limit of `KVX_NIXL_TEST_ROUNDS=1000000`, which is not part of regular runs.
const CUT_OFF_OF_MANY: Duration = Duration::from_secs(900);
/// The time limit under valgrind, which is slow. Those tests run only if [`VALGRIND`] is set.
const CUT_OFF_OF_VALGRIND: Duration = Duration::from_secs(590);
const VALGRIND: &str = "KVX_NIXL_TEST_VALGRIND";
const ROUTES: [&str; 2] = ["SHM", "TCP"];
/// With both backends, memory that a device cannot access over SHM goes over TCP.
const WITH_BOTH: [&str; 3] = ["SHM", "TCP", "SHM,TCP"];
/// A backend that cannot access the stand-in's device memory, because it calls the drivers itself.
const WITHOUT_DEVICES: &str = "UCX";

/// The tests in conformance.py, by name.
const TESTS: &[&str] = &[
    "prepped_and_direct_reads_and_writes",
    "reposts",
    "unequal_lists",
    "a_hundred_thousand_descriptors",
    "notifications_of_all_lengths",
    "a_long_notification_that_is_done_was_taken",
    "transfers_to_itself",
    "regions_added_later",
    "a_killed_peer",
    "a_stopped_peer",
    "a_restarted_peer",
    "release_in_mid_transfer",
    "deregister_under_a_reading_peer",
    "deregister_under_a_stopped_peer",
    "two_agents_in_one_process",
    "sglangs_calls",
    "dynamos_calls",
    "telemetry",
    "many_regions_take_linear_time",
    "sixteen_threads",
    "idle_agents_sleep",
    "what_makes_no_sense_is_refused",
    "a_forked_child_is_told",
    "many_rounds_do_not_grow",
];

/// A test of GPU memory.
struct OnGpus {
    /// The test in conformance.py.
    test: &'static str,
    /// The variable that names the stand-in as a driver, if there is one.
    driver: Option<&'static str>,
    routes: &'static [&'static str],
}

const ON_GPUS: &[OnGpus] = &[
    OnGpus { test: "memory_of_gpus_both_ways", driver: Some(CUDA), routes: &WITH_BOTH },
    OnGpus { test: "memory_of_gpus_both_ways", driver: Some(HIP), routes: &WITH_BOTH },
    OnGpus { test: "sglangs_calls", driver: Some(CUDA), routes: &WITH_BOTH },
    OnGpus { test: "memory_of_gpus_that_are_not_there", driver: Some(CUDA), routes: &WITH_BOTH },
    OnGpus { test: NOT_OFFERED, driver: None, routes: &ROUTES },
    OnGpus { test: NOT_OFFERED, driver: Some(CUDA), routes: &[WITHOUT_DEVICES] },
];
const NOT_OFFERED: &str = "memory_of_gpus_that_is_not_offered";
const CUDA: &str = "KVX_CUDA_LIB";
const HIP: &str = "KVX_HIP_LIB";

/// The text that standard error must contain when a test has passed, by test and route.
const LINES: &[(&str, &str, &str)] = &[
    ("two_agents_in_one_process", "SHM", "KVX: agent a reaches b by SHM: chosen, shared memory"),
    (
        "two_agents_in_one_process",
        "TCP",
        "KVX: agent a reaches b by TCP: chosen, TCP to 127.0.0.1:",
    ),
    ("deregister_under_a_stopped_peer", "SHM", "KVX: do not free the 67108864 bytes at 0x"),
    (
        "memory_of_gpus_that_are_not_there",
        "SHM",
        "of device 9 are not registered: there is no device 9",
    ),
    (NOT_OFFERED, "SHM", "of device 0 are not registered: memory of GPUs is not offered: NVIDIA: "),
    (
        NOT_OFFERED,
        WITHOUT_DEVICES,
        "memory of GPUs is not offered: no open backend reaches cuda memory (open: UCX)",
    ),
];

/// Other heaps in the process, and glibc's own with checks: a library, its Debian package, and a
/// variable.
const HEAPS: &[(&str, &str, (&str, &str))] = &[
    ("libc_malloc_debug.so.0", "libc6", ("MALLOC_CHECK_", "3")),
    ("libtcmalloc_minimal.so.4", "libtcmalloc-minimal4", ("TCMALLOC_RECLAIM_MEMORY", "1")),
    ("libjemalloc.so.2", "libjemalloc2", ("MALLOC_CONF", "abort_conf:true,junk:true")),
];
/// The tests that run with them: all forms of data that cross the C++ interface.
const ON_HEAPS: &[&str] = &[
    "prepped_and_direct_reads_and_writes",
    "notifications_of_all_lengths",
    "transfers_to_itself",
    "regions_added_later",
    "sglangs_calls",
    "what_makes_no_sense_is_refused",
];

/// The tests that run under valgrind, in one process.
const UNDER_VALGRIND: &[&str] = &["two_agents_in_one_process", "transfers_to_itself"];

type Outcome = Result<(), Failed>;

/// Runs a test of the script with these packages before the wheel's own.
fn run(wheel: &Wheel, plugins: &Path, before: &[PathBuf], route: &str, test: &str) -> Output {
    let limit = if std::env::var_os(ROUNDS).is_some() { CUT_OFF_OF_MANY } else { CUT_OFF };
    kvx_testkit::output(wheel.script(SCRIPT, plugins, before, route).arg(test), limit)
}

fn passes(wheel: &Wheel, plugins: &Path, numpy: &Path, route: &str, test: &str) -> Outcome {
    let output = run(wheel, plugins, &[numpy.to_owned()], route, test);
    told(output, line_of(test, route))
}

fn line_of(test: &str, route: &str) -> &'static str {
    LINES.iter().find(|(of, over, _)| (*of, *over) == (test, route)).map_or("", |(_, _, line)| line)
}

/// Runs a test with the stand-in in place of a vendor's driver, or without any; no real driver is
/// used.
fn on_gpus(
    wheel: &Wheel,
    plugins: &Path,
    numpy: &Path,
    route: &str,
    of: &OnGpus,
    title: &str,
) -> Outcome {
    if route == WITHOUT_DEVICES {
        match kvx::registry().require(route, &Options::default()) {
            Err(why) => {
                skip(title, why.sentence(), "see the reason");
                return Ok(());
            }
            Ok((_, found)) if found.capabilities.local.contains(MemoryKind::Cuda) => {
                let reason =
                    format!("{route} reaches memory of NVIDIA's devices here [cannot run here]");
                skip(title, &reason, "run it on a machine without such devices");
                return Ok(());
            }
            Ok(_) => {}
        }
    }
    let mut script = wheel.script(SCRIPT, plugins, &[numpy.to_owned()], route);
    script.envs([CUDA, HIP].map(|variable| (variable, "/nonexistent")));
    let names = Folder::new(&format!("driver-{route}-{}", of.test))?;
    if let Some(driver) = of.driver {
        kvx_stand_in::stand_in(&mut script, &[driver], &names.0);
    }
    told(kvx_testkit::output(script.arg(of.test), CUT_OFF), line_of(of.test, route))
}

/// Runs a test with another heap in all of its processes.
fn on_a_heap(
    wheel: &Wheel,
    plugins: &Path,
    heap: &Path,
    variable: (&str, &str),
    test: &str,
) -> Outcome {
    let mut script = wheel.script(SCRIPT, plugins, &[], "SHM");
    script
        .arg(test)
        .env("LD_PRELOAD", heap)
        .env(variable.0, variable.1)
        .env("MALLOC_PERTURB_", "165");
    told(kvx_testkit::output(&mut script, CUT_OFF), "")
}

/// Runs a test under valgrind: no report has a frame of the library. Memory that is still allocated
/// at the end is not an error.
fn under_valgrind(wheel: &Wheel, plugins: &Path, test: &str) -> Outcome {
    let reports = Folder::new(&format!("valgrind-{test}"))?;
    let file = reports.0.join("reports.xml"); // in this format, frames name their libraries
    let script = wheel.script(SCRIPT, plugins, &[], "SHM");
    let mut command = Command::new("valgrind");
    command.args(["--error-limit=no", "--num-callers=40", "--xml=yes"]);
    command.arg(format!("--xml-file={}", file.display())).arg("--");
    command
        .arg(script.get_program())
        .args(script.get_args())
        .arg(test)
        .env("PYTHONMALLOC", "malloc");
    for (name, value) in script.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    told(kvx_testkit::output(&mut command, CUT_OFF_OF_VALGRIND), "")?;
    let said = std::fs::read_to_string(file)?;
    assert!(
        said.contains("<tool>memcheck</tool>") && said.contains("</valgrindoutput>"),
        "valgrind has run"
    );
    let is_one = |report: &&str| {
        // With XML output valgrind always lists memory that is still allocated at the end. The
        // kernel ignores the size of a null mask.
        let is_leak = report.contains("<kind>Leak_");
        let is_null = report.contains("Syscall param epoll_pwait(sigsetsize)");
        report.contains("libplugin_KVX.so</obj>") && !is_leak && !is_null
    };
    let ours: Vec<_> = said.split("<error>").skip(1).filter(is_one).collect();
    match ours.first() {
        Some(first) => Err(format!("{} reports, the first one: {first}", ours.len()).into()),
        None => Ok(()),
    }
}

fn told(output: Output, line: &str) -> Outcome {
    let said = String::from_utf8_lossy(&output.stderr);
    if output.status.success() && output.stdout == b"passed\n" && said.contains(line) {
        return Ok(());
    }
    Err(format!("{:?}, {line:?}\n{said}", output.status).into())
}

/// A copy of the wheel with another record or other plug-ins, in its own folder.
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
        // Python and the linker resolve links to the real files, so the files that they inspect are
        // copied.
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

    /// Tests that the plug-in rejects the wheel with this message, and that the process survives.
    fn refused(&self, wheel: &Wheel, plugins: &Path, sentence: &str) -> Outcome {
        let output = run(
            wheel,
            plugins,
            std::slice::from_ref(&self.packages),
            "SHM",
            "two_agents_in_one_process",
        );
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

fn an_unknown_version_is_rejected_unless_it_is_accepted(wheel: &Wheel, plugins: &Path) -> Outcome {
    let doctored = Doctored::new(wheel, "version", "9.8.7")?;
    doctored.refused(wheel, plugins, "NIXL 9.8.7 was not tried with KVX")?;
    let mut command =
        wheel.script(SCRIPT, plugins, std::slice::from_ref(&doctored.packages), "SHM");
    command.arg("two_agents_in_one_process").env("KVX_NIXL_ANY_VERSION", "1");
    let output = kvx_testkit::output(&mut command, CUT_OFF);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.contains("in NIXL 9.8.7"), "{said}");
    drop(doctored.folder);
    Ok(())
}

/// A NIXL without a record of its version, such as a source build, is supported; a log line says
/// how its interface was determined.
fn a_source_build_is_supported_by_its_tables(wheel: &Wheel, plugins: &Path) -> Outcome {
    let doctored = Doctored::new(wheel, "source", NEWEST_VERSION)?;
    std::fs::remove_dir(doctored.packages.join(format!("nixl_cu12-{NEWEST_VERSION}.dist-info")))?;
    let before = std::slice::from_ref(&doctored.packages);
    let output = run(wheel, plugins, before, "SHM", "two_agents_in_one_process");
    told(output, "reports no version: KVX relies on the function tables of its plug-ins")
}

/// Changes a byte of a function's name in another plug-in, then truncates that plug-in.
fn a_damaged_sibling_is_rejected(wheel: &Wheel, plugins: &Path) -> Outcome {
    let doctored = Doctored::new(wheel, "sibling", NEWEST_VERSION)?;
    let whole = std::fs::read(doctored.sibling("UCX"))?;
    // Everywhere: tools that change a library's paths leave old names in place.
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

/// Runs agents with UCX, with both, and with KVX, in a wheel that KVX is linked into.
fn a_fleet_rolls_over(wheel: &Wheel, plugins: &Path) -> Outcome {
    let doctored = Doctored::new(wheel, "rolling", NEWEST_VERSION)?;
    symlink(plugins.join("libplugin_KVX.so"), doctored.sibling("KVX"))?;
    let mut script = wheel.script(SCRIPT, plugins, std::slice::from_ref(&doctored.packages), "SHM");
    script.arg("rolling_over").env_remove("NIXL_PLUGIN_DIR");
    let done = told(kvx_testkit::output(&mut script, CUT_OFF), "ucx reads from both by UCX");
    drop(doctored.folder);
    done
}

/// Returns a test whose processes have their own time limit.
fn trial(name: String, test: impl FnOnce() -> Outcome + Send + 'static) -> Trial {
    trial_within(CUT_OFF_OF_MANY + CUT_OFF, name, test)
}

/// Returns the tests of this run. One folder contains the library under test, the other numpy.
pub(crate) fn trials(plugins: &Folder, borrowed: &Folder) -> Vec<Trial> {
    let (wheels, mut trials) = wheels::of_this_run("conformance");
    for (release, wheel) in wheels {
        let wheel: &'static Wheel = Box::leak(Box::new(wheel));
        assert!(wheel.libraries().exists(), "the libraries of the wheel");
        for route in ROUTES {
            for test in TESTS {
                let (plugins, numpy) = (plugins.0.clone(), borrowed.0.clone());
                let name = format!("{release}::{}::{test}", route.to_lowercase());
                trials.push(trial(name, move || passes(wheel, &plugins, &numpy, route, test)));
            }
        }
        for of in ON_GPUS {
            for route in of.routes {
                let (plugins, numpy) = (plugins.0.clone(), borrowed.0.clone());
                let driver = of.driver.unwrap_or("no driver");
                let name = format!("{release}::{}::{driver}::{}", route.to_lowercase(), of.test);
                let title = name.clone();
                let run = move || on_gpus(wheel, &plugins, &numpy, route, of, &title);
                trials.push(trial(name, run));
            }
        }
    }
    if let Some(newest) = Wheel::find(NEWEST) {
        trials.extend(of_the_newest(Box::leak(Box::new(newest)), &plugins.0));
    }
    trials
}

/// Returns a skipped test for a package that is not installed.
fn missing(title: String, package: &'static str, cure: &'static str) -> Trial {
    let name = title.clone();
    trial(name, move || {
        skip(&title, &format!("{package} is not installed"), cure);
        Ok(())
    })
}

/// Returns the tests that run in one release only.
fn of_the_newest(wheel: &'static Wheel, plugins: &Path) -> Vec<Trial> {
    let mut trials = Vec::new();
    for (heap, package, variable) in HEAPS {
        if !Tier::Whole.runs_or_says(&format!("NIXL on {heap}")) {
            continue;
        }
        let folders = ["/usr/lib/x86_64-linux-gnu", "/lib/x86_64-linux-gnu", "/usr/lib64"];
        let file =
            folders.iter().map(|folder| Path::new(folder).join(heap)).find(|file| file.exists());
        let Some(file) = file else {
            trials.push(missing(
                format!("conformance on {heap}"),
                package,
                "cargo xtask test --install",
            ));
            continue;
        };
        for test in ON_HEAPS {
            let (plugins, file) = (plugins.to_owned(), file.clone());
            let run = move || on_a_heap(wheel, &plugins, &file, *variable, test);
            trials.push(trial(format!("{NEWEST}::{heap}::{test}"), run));
        }
    }
    if kvx_testkit::is_asked_for(VALGRIND, "two scripts under valgrind") {
        if Command::new("valgrind").arg("--version").output().is_err() {
            let title = "conformance under valgrind".to_owned();
            trials.push(missing(title, "valgrind", "apt-get install valgrind"));
        } else {
            for test in UNDER_VALGRIND {
                let plugins = plugins.to_owned();
                let run = move || under_valgrind(wheel, &plugins, test);
                trials.push(trial(format!("{NEWEST}::valgrind::{test}"), run));
            }
        }
    }
    let own: [(&str, fn(&Wheel, &Path) -> Outcome); 4] = [
        ("an_unknown_version_is_rejected", an_unknown_version_is_rejected_unless_it_is_accepted),
        ("a_source_build_is_supported", a_source_build_is_supported_by_its_tables),
        ("a_damaged_sibling_is_rejected", a_damaged_sibling_is_rejected),
        ("a_fleet_rolls_over", a_fleet_rolls_over),
    ];
    for (name, test) in own {
        let plugins = plugins.to_owned();
        trials.push(trial(format!("{NEWEST}::{name}"), move || test(wheel, &plugins)));
    }
    trials
}
