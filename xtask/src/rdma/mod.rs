//! `cargo xtask rdma`: runs the contract and a bench over RDMA verbs, with a card in software.
//!
//! A virtual machine runs Debian's kernel with soft-RoCE (`rdma_rxe`). Its root is this machine's,
//! read-only, so it runs the programs that cargo has built here. QEMU translates its code, with a
//! clock that counts instructions, so that deadlines hold however busy this machine is.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use std::{fs, io};

use clap::Args;

use crate::bars::print_table;
use crate::install::{self, Environment};
use crate::metadata::{self, Artifact, Metadata};
use crate::process::{self, Deadline, Output, must_succeed};
use crate::test::programs::FEATURES;
use crate::{Result, root};

/// The options of `cargo xtask rdma`.
#[derive(Args, Debug, PartialEq)]
pub(crate) struct RdmaOptions {
    /// Every clause in one and in two processes, not only the clauses of peers, ownership and
    /// safety in two; several hours
    #[arg(long)]
    all: bool,
    /// Only tests and runs with this in their names (`UCX-verbs-rc`, `P5_`, `bench`); may be
    /// repeated
    #[arg(long, value_name = "PART")]
    only: Vec<String>,
}

/// A suite of the contract, with the key of its program in [`Programs`].
struct Suite {
    label: &'static str,
    program: &'static str,
}

const SUITES: [Suite; 3] = [
    Suite { label: "UCX-verbs-rc", program: "kvx-ucx" },
    Suite { label: "LIBFABRIC-verbs", program: "kvx-libfabric" },
    Suite { label: "UCX-verbs-ud", program: "kvx-ucx" },
];
/// The names of the clauses that run by default: those of peers, ownership and safety.
const USUAL: &str = "::two::[POS][0-9]";
/// The runs of `kvx bench`: their names and arguments. It compares all bytes that it has moved.
const BENCHES: [(&str, &str); 2] = [
    ("UCX-verbs-rc::bench", r#"--backend UCX --options '{"ucx": {"tls": ["rc", "self"]}}'"#),
    (
        "LIBFABRIC-verbs::bench",
        r#"--backend LIBFABRIC --options '{"libfabric": {"provider": "verbs"}}'"#,
    ),
];
const BENCH: &str = "--block 64K --count 16 --pool 4M --rounds 1 --seconds 0.2";

/// The peer in `install.toml` with everything that is needed.
const PEER: &str = "rdma";
const INSTALL_LIMIT: Duration = Duration::from_secs(30 * 60);
const BUILD_LIMIT: Duration = Duration::from_secs(40 * 60);
/// The limits of the whole machine, on this machine's clock, and of one test, on its own.
const LIMITS: (Duration, Duration) =
    (Duration::from_secs(60 * 60), Duration::from_secs(8 * 60 * 60));
const TEST_LIMIT: Duration = Duration::from_secs(130);
/// The memory of the virtual machine.
const MEMORY: &str = "4G";

/// Runs the command; returns false if a clause failed or a bench did not run.
pub(crate) fn run(options: &RdmaOptions) -> Result<bool> {
    if !cfg!(target_arch = "x86_64") {
        return Err("the virtual machine is one of x86-64: run this on such a machine".into());
    }
    let target = Metadata::of_members()?.target_directory;
    let deadline = Deadline::after(INSTALL_LIMIT);
    install::peers(&[PEER], &target, deadline)?;
    let folder = target.join("rdma");
    let out = folder.join("out");
    fs::create_dir_all(&out)?;
    let script = |name: &str| root().join("xtask/src/rdma").join(name);
    let mut prepare = Command::new("sh");
    prepare.arg(script("prepare.sh")).args([&folder, &script("init")]);
    must_succeed(prepare, deadline)?;

    let libraries = Environment::of(&target, PEER).0.join("lib/mpich");
    let job =
        job(options, &programs(&folder)?, &libraries, &fs::read_to_string(script("clauses.sh"))?)?;
    fs::write(out.join("job"), job)?;
    for old in ["results", "said", "status"] {
        // The first run finds none.
        if let Err(why) = fs::remove_file(out.join(old))
            && why.kind() != io::ErrorKind::NotFound
        {
            return Err(format!("could not remove {old} of an earlier run: {why}").into());
        }
    }
    let limit = if options.all { LIMITS.1 } else { LIMITS.0 };
    let finished = process::run(machine(&folder, &out), limit, Output::Shown)?;
    let results = fs::read_to_string(out.join("results")).unwrap_or_default();
    print!("{}", fs::read_to_string(out.join("said")).unwrap_or_default());
    print_table(&head(), &rows(&results));
    if !out.join("status").exists() {
        return Err(
            format!("the virtual machine ended before its work did: {}", finished.end).into()
        );
    }
    let failures = failures(&results, &options.only);
    println!("{} failed", failures.len());
    Ok(crate::all_held(failures))
}

/// The programs that run in the machine, by their packages.
type Programs = Vec<(String, PathBuf)>;

/// Builds the programs as `cargo xtask test` does, and copies them into the folder: cargo may build
/// them again while the machine runs.
fn programs(folder: &Path) -> Result<Programs> {
    let mut programs = Programs::new();
    for line in [
        format!("test --no-run -p kvx-ucx -p kvx-libfabric --test it {FEATURES}"),
        "build -p kvx-cli --bin kvx".to_owned(),
    ] {
        println!("cargo {line}");
        let mut cargo = process::cargo(line.split(' '));
        cargo.arg("--message-format=json-render-diagnostics");
        let output = process::output_of(cargo, BUILD_LIMIT)?;
        // The packages also have programs that tests do not need here.
        let wanted = |artifact: &Artifact| ["it", "kvx"].contains(&&*artifact.target.name);
        for artifact in metadata::artifacts(&output).filter(wanted) {
            let package = artifact.manifest_path.parent().and_then(Path::file_name);
            if let (Some(package), Some(built)) = (package, artifact.executable) {
                let package = package.to_string_lossy().into_owned();
                let copy = folder.join(&package);
                fs::copy(built, &copy)?;
                programs.push((package, copy));
            }
        }
    }
    Ok(programs)
}

/// Returns the shell script that runs in the machine.
fn job(
    options: &RdmaOptions,
    programs: &Programs,
    libraries: &Path,
    clauses: &str,
) -> Result<String> {
    let program = |package: &str| {
        let found = programs.iter().find(|(name, _)| name == package);
        let (_, path) = found.ok_or_else(|| format!("cargo has built no program of {package}"))?;
        Ok::<_, Box<dyn std::error::Error>>(quoted(&path.display().to_string()))
    };
    let libraries = quoted(&libraries.display().to_string());
    let mut job = format!(
        "{clauses}
export KVX_RDMA_TEST=1 KVX_UCX_TEST_VERSION=UCX-verbs KVX_UCX_TEST_SUITES=1 UCX_LOG_LEVEL=fatal
export KVX_UCX_LIB={libraries}/libucp.so.0 KVX_LIBFABRIC_LIB={libraries}/libfabric.so.1
export FI_PROVIDER_PATH={libraries}/libfabric FI_UNIVERSE_SIZE=16
"
    );
    let mut chosen = options.only.iter().map(String::as_str).collect::<Vec<_>>();
    if chosen.is_empty() {
        chosen.push("");
    }
    for Suite { label, program: package } in SUITES {
        let usual = if options.all { "::" } else { USUAL };
        for part in &chosen {
            // A part of a suite's name chooses all of the suite.
            let pattern = if label.contains(part) { usual } else { part };
            writeln!(
                job,
                "clauses {} {label} {} {}",
                program(package)?,
                quoted(pattern),
                TEST_LIMIT.as_secs()
            )?;
        }
    }
    for (name, arguments) in BENCHES {
        if chosen.iter().any(|part| name.contains(part)) {
            writeln!(
                job,
                "timeout -k 10 {} {} bench {BENCH} {arguments} && r=holds || r='FAILED'\necho \
                 '{name}' $r 0 >> /out/results",
                TEST_LIMIT.as_secs(),
                program("kvx-cli")?
            )?;
        }
    }
    Ok(job)
}

/// Returns the text as one word of the shell.
fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}

/// Returns the command that boots the machine, which runs its job and ends.
fn machine(folder: &Path, out: &Path) -> Command {
    let share = |name: &str, path: &Path, more: &str| {
        let path = path.display();
        [
            "-fsdev".to_owned(),
            format!("local,id={name},path={path},security_model=none{more}"),
            "-device".to_owned(),
            format!("virtio-9p-pci,fsdev={name},mount_tag={name}"),
        ]
    };
    let mut qemu = Command::new("qemu-system-x86_64");
    qemu.args([
        "-M",
        "q35",
        "-cpu",
        "max",
        "-m",
        MEMORY,
        "-accel",
        "tcg,thread=single,tb-size=1024",
    ])
    .args(["-icount", "shift=1", "-nodefaults", "-display", "none", "-serial", "stdio"])
    .args(["-no-reboot", "-device", "virtio-rng-pci"])
    .arg("-kernel")
    .arg(folder.join("vmlinuz"))
    .arg("-initrd")
    .arg(folder.join("initial.gz"))
    .args(["-append", "console=ttyS0 quiet panic=-1 mitigations=off nokaslr"])
    .args(share("host", Path::new("/"), ",readonly=on,multidevs=remap"))
    .args(share("out", out, ""));
    qemu
}

/// A line of the results: a test or a run, how it ended, its seconds.
fn parsed(results: &str) -> impl Iterator<Item = (&str, &str, &str)> {
    results.lines().filter_map(|line| {
        let (rest, seconds) = line.rsplit_once(' ')?;
        let (name, result) = rest.rsplit_once(' ')?;
        Some((name, result, seconds))
    })
}

/// Returns everything that has failed, and the chosen suites of which no test has run.
fn failures(results: &str, only: &[String]) -> Vec<String> {
    let failed = parsed(results).filter(|(_, result, _)| result.starts_with("FAILED"));
    let mut failures: Vec<String> =
        failed.map(|(name, result, _)| format!("{name}: {result}")).collect();
    if parsed(results).next().is_none() {
        failures.push("nothing ran".to_owned());
    }
    let is_bench = |name: &str| BENCHES.iter().any(|(bench, _)| *bench == name);
    let has_run = |label: &str| {
        parsed(results).any(|(name, result, _)| {
            ["holds", "gap"].contains(&result)
                && !is_bench(name)
                && name.split_once("::").is_some_and(|(suite, _)| suite == label)
        })
    };
    for Suite { label, .. } in SUITES {
        let is_chosen = only.is_empty() || only.iter().any(|part| chooses(part, label));
        if is_chosen && !has_run(label) {
            failures.push(format!("{label}: no clause holds, and none is a gap"));
        }
    }
    failures
}

/// Returns whether a part of names chooses tests of a suite. One without the name of a suite or
/// bench is a clause's, which all suites have.
fn chooses(part: &str, label: &str) -> bool {
    let is_of_bench =
        BENCHES.iter().any(|(bench, _)| bench.contains(part)) && !part.ends_with("::");
    let suite = part.split_once("::").map_or("", |(suite, _)| suite);
    let is_of = |label: &str| {
        label.contains(part) || (!is_of_bench && !suite.is_empty() && label.ends_with(suite))
    };
    is_of(label) || !(is_of_bench || SUITES.iter().any(|suite| is_of(suite.label)))
}

fn head() -> String {
    let labels: Vec<_> = SUITES.iter().map(|suite| suite.label).collect();
    format!("clause | {}", labels.join(" | "))
}

/// Returns a row for each clause, with the result over each suite, and one for each other run.
fn rows(results: &str) -> Vec<String> {
    let mut rows: Vec<(&str, [String; SUITES.len()])> = Vec::new();
    for (name, result, seconds) in parsed(results) {
        let (label, clause) = name.split_once("::").unwrap_or(("", name));
        let column = SUITES.iter().position(|suite| suite.label == label).unwrap_or(0);
        let at = rows.iter().position(|(known, _)| *known == clause).unwrap_or_else(|| {
            rows.push((clause, Default::default()));
            rows.len() - 1
        });
        rows[at].1[column] = format!("{result} ({seconds} s)");
    }
    rows.sort_by_key(|(clause, _)| key(clause));
    rows.iter().map(|(clause, cells)| format!("| {clause} | {} |", cells.join(" | "))).collect()
}

/// Orders `two::P10_…` behind `two::P9_…`.
fn key(clause: &str) -> (String, u32, String) {
    let (mode, title) = clause.rsplit_once("::").unwrap_or(("", clause));
    let id = title.split('_').next().unwrap_or_default();
    let letter = id.trim_end_matches(|digit: char| digit.is_ascii_digit());
    (format!("{letter}{mode}"), id[letter.len()..].parse().unwrap_or(0), title.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const RESULTS: &str = "UCX-verbs-rc::two::P10_a FAILED(101) 12\nUCX-verbs-rc::two::P9_b gap 3\n\
        LIBFABRIC-verbs::two::P9_b holds 4\nUCX-verbs-rc::bench holds 0\n";

    #[test]
    fn results_become_a_row_for_each_clause_in_their_order() {
        let rows = rows(RESULTS);
        let wanted = [
            "| two::P9_b | gap (3 s) | holds (4 s) |  |",
            "| two::P10_a | FAILED",
            "| bench | holds",
        ];
        assert!(
            rows.len() == 3 && rows.iter().zip(wanted).all(|(row, begin)| row.starts_with(begin)),
            "{rows:?}"
        );
        let only = ["UCX-verbs-rc", "LIBFABRIC"].map(str::to_owned);
        assert_eq!(failures(RESULTS, &only), ["UCX-verbs-rc::two::P10_a: FAILED(101)"]);
        assert_eq!(failures("", &["bench".to_owned()]), ["nothing ran"]);
    }

    #[test]
    fn a_chosen_suite_of_which_no_test_ran_has_failed() {
        let silent = |results: &str, only: &[&str]| {
            let only: Vec<_> = only.iter().map(|part| (*part).to_owned()).collect();
            let failures = failures(results, &only).into_iter();
            let labels =
                failures.filter_map(|line| Some(line.split_once(": no clause")?.0.to_owned()));
            labels.collect::<Vec<_>>()
        };
        let all = SUITES.map(|suite| suite.label);
        let [rc, libfabric, ud] = all;
        assert_eq!(silent(RESULTS, &[]), [ud]);
        assert_eq!(silent("", &[]), all);
        assert_eq!(silent("card FAILED(1) 0\n", &["P5_"]), all);
        let skipped = format!("{rc}::two::P5_a skipped 1\n{rc}::bench holds 9\n");
        assert_eq!(silent(&skipped, &["P5_"]), all);
        assert_eq!(silent(&skipped, &["UCX-verbs"]), [rc, ud]);
        assert_eq!(silent(&skipped, &["LIBFABRIC", "rc::two::P5_"]), [rc, libfabric]);
        assert_eq!(silent(&skipped, &["bench", "UCX-verbs-rc::bench"]), [""; 0]);
    }

    #[test]
    fn a_note_counts_only_if_its_test_has_passed() {
        let folder = std::env::temp_dir().join(format!("kvx-xtask-rdma-{}", std::process::id()));
        let out = folder.join("out");
        fs::create_dir_all(&out).unwrap();
        let program = r#"#!/bin/sh
            tests="S::holds S::skips S::fails_and_skips S::gaps S::fails_and_gaps T::holds"
            [ "$1" = --list ] && printf '%s: test\n' $tests && exit
            case $2 in
                *skips) echo "SKIP $2: why" >> "$KVX_SKIPS" ;;
                *gaps) echo "GAP $2: why" >> "$KVX_SKIPS" ;;
            esac
            case $2 in
                *fails*) echo "$2 says"; exit 3 ;;
            esac"#;
        fs::write(folder.join("source"), program).unwrap();
        let here = format!("{}/", quoted(&folder.display().to_string()));
        let clauses = include_str!("clauses.sh").replace("/out/", "out/").replace("/tmp/", &here);
        // A copy: a file that this process has written may be busy in another child of it.
        let script = format!(
            "{clauses}\ncd {here}\ncp source program\nchmod +x program\nclauses ./program S . 9"
        );
        let mut sh = Command::new("sh");
        sh.args(["-c", &script]);
        process::output_of(sh, TEST_LIMIT).unwrap();
        let read = |name: &str| fs::read_to_string(out.join(name)).unwrap();
        let (results, said) = (read("results"), read("said"));
        fs::remove_dir_all(&folder).unwrap();
        let results: Vec<_> = parsed(&results).map(|(name, result, _)| (name, result)).collect();
        let wanted = [
            ("S::holds", "holds"),
            ("S::skips", "skipped"),
            ("S::fails_and_skips", "FAILED(3)"),
            ("S::gaps", "gap"),
            ("S::fails_and_gaps", "FAILED(3)"),
        ];
        assert_eq!(results, wanted);
        let [skip, gap] = ["SKIP S::skips: why", "GAP S::gaps: why"];
        let fails = ["S::fails_and_skips says", "S::fails_and_gaps says"];
        assert_eq!(said.lines().collect::<Vec<_>>(), [skip, fails[0], gap, fails[1]]);
    }

    #[test]
    fn a_job_has_the_chosen_tests_of_each_suite() {
        let path = PathBuf::from("/it");
        let packages = ["kvx-ucx", "kvx-libfabric", "kvx-cli"];
        let programs = packages.map(|name| (name.to_owned(), path.clone())).to_vec();
        let job = |all, only: &[&str]| {
            let only = only.iter().map(|part| (*part).to_owned()).collect();
            job(&RdmaOptions { all, only }, &programs, Path::new("/lib"), "").unwrap()
        };
        let usual = job(false, &[]);
        assert!(usual.contains("clauses '/it' UCX-verbs-ud '::two::[POS][0-9]' 130"), "{usual}");
        assert_eq!(usual.matches("'/it' bench ").count(), 2);
        assert!(job(true, &["UCX-verbs-rc"]).contains("clauses '/it' UCX-verbs-rc '::' 130"));
        let one = job(false, &["P5_"]);
        assert!(one.contains("clauses '/it' LIBFABRIC-verbs 'P5_' 130"));
        assert!(!one.contains(" bench "));
        assert!(job(false, &["a'b"]).contains(r"clauses '/it' UCX-verbs-ud 'a'\''b' 130"));
    }

    #[test]
    fn the_suites_are_those_of_the_test_programs() {
        for Suite { label, program } in SUITES {
            let suites = root().join(program).join("tests/it/conformance.rs");
            let text = fs::read_to_string(suites).unwrap();
            assert!(text.contains(&format!("\"{label}\"")), "{label}");
        }
    }
}
