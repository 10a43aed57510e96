//! The reports of `kvx bench`, `kvx bench compare` and `kvx bench sweep`.

use std::path::PathBuf;
use std::process::{Command, Output};

use kvx_testkit::{output, test};
use serde_json::Value;

use super::{LIMIT, bench, lines, measured, stderr};

/// The page that documents the lines of JSON.
const DOCUMENT: &str = include_str!("../../../../docs/operations/bench.md");

/// A companion that claims four transfers per microsecond, under a name that HTML must not take for
/// a tag.
const COMPANION: &str = "sh -c 'while read -r word rest; do case \"$word\" in \
                         point) echo \"ready <b>four\";; go) echo moved 4 0.000001;; esac; done'";

/// A folder that is removed at the end of a test.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("kvx-bench-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    fn path(&self, name: &str) -> String {
        self.0.join(name).to_str().unwrap().to_owned()
    }

    fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.0.join(name)).unwrap()
    }

    fn write(&self, name: &str, lines: &[Value]) -> String {
        let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
        std::fs::write(self.0.join(name), text).unwrap();
        self.path(name)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.0).ok();
    }
}

/// Checks that every element is closed in the order in which a browser or a converter expects it.
#[track_caller]
fn assert_well_formed(text: &str) {
    let mut open: Vec<&str> = Vec::new();
    for tag in text.split('<').skip(1) {
        let tag = tag.split_once('>').expect("a tag ends").0;
        let name = tag.trim_start_matches('/').split_whitespace().next().unwrap();
        match tag.strip_prefix('/') {
            Some(_) => assert_eq!(open.pop(), Some(name), "{tag} closes another element"),
            None if tag.ends_with('/') || matches!(name, "!DOCTYPE" | "meta") => {}
            None => open.push(name),
        }
    }
    assert!(open.is_empty(), "{open:?} is not closed");
}

#[test]
fn a_report_has_plots_and_the_same_figures_as_a_table_and_loads_nothing() {
    let folder = Folder::new("report");
    let (page, picture) = (folder.path("out.html"), folder.path("out.svg"));
    let reports = ["--report", &page, "--report", &picture];
    let points =
        ["--block", "4K,64K", "--count", "1,8", "--seconds", "0.05", "--beside", COMPANION];
    let lines = lines(&measured(&[&points[..], &reports].concat()));
    assert_eq!(lines.len(), 2 * 2 * 2 * 2);

    let (page, picture) = (folder.read("out.html"), folder.read("out.svg"));
    for text in [&page, &picture] {
        assert_well_formed(text);
        for loaded in ["src=", "href=", "url(", "@import", "<script", "<b>"] {
            assert!(!text.contains(loaded), "{loaded}");
        }
        // Bandwidth and latency of both operations, each with an explanation for those who cannot
        // see it, in both colour schemes.
        assert_eq!(
            text.matches("<svg class=\"plot\"").count() + text.matches("<svg y=").count(),
            { if text.starts_with("<svg") { 1 + 4 } else { 4 } }
        );
        assert_eq!(text.matches("<desc>Lines: SHM, limit of SHM: memcpy, ").count(), 4);
        assert!(text.contains("prefers-color-scheme:dark"));
        for name in ["&lt;b&gt;four beside TCP", "limit of TCP: sockets", "blocks of 64 KiB"] {
            assert!(text.contains(name), "{name}");
        }
    }
    assert_eq!(page.matches("<tr>").count(), 1 + lines.len());
    for line in &lines {
        let gbps = format!("<td>{:.2}</td>", line["gbps"].as_f64().unwrap());
        assert!(page.contains(&gbps), "{gbps}");
    }
    let machine = &lines[0]["machine"];
    for field in ["cpu", "kernel", "kvx"] {
        assert!(page.contains(machine[field].as_str().unwrap()), "{field}");
    }
    assert!(page.contains("<code>kvx bench --block 4K,64K --count 1,8 --seconds 0.05 --beside"));
}

#[test]
fn reports_that_cannot_be_written_are_rejected_before_the_measurement() {
    for (report, why) in [
        ("out.png", "--report out.png: write a name that ends in .html for a page, or in .svg"),
        ("/nowhere/out.svg", "cannot write the report /nowhere/out.svg"),
    ] {
        let output = measured(&["--block", "4K", "--count", "8", "--report", report]);
        assert_eq!(output.status.code(), Some(1), "{report}");
        assert!(stderr(&output).contains(why) && output.stdout.is_empty(), "{}", stderr(&output));
    }
}

#[test]
fn every_field_of_a_line_is_documented() {
    let output = measured(&["--block", "4K", "--count", "8", "--beside", COMPANION]);
    for line in lines(&output) {
        let fields = line.as_object().unwrap().keys();
        let machine = line["machine"].as_object().unwrap().keys();
        for field in fields.chain(machine) {
            assert!(DOCUMENT.contains(&format!("`{field}`")), "{field} is not documented");
        }
        for field in ["round_gbps", "round_p50_us", "limit_round_gbps"] {
            assert_eq!(line[field].as_array().map(Vec::len), Some(3), "{field} in {line}");
        }
        let mut rates: Vec<f64> =
            line["round_gbps"].as_array().unwrap().iter().filter_map(Value::as_f64).collect();
        rates.sort_by(f64::total_cmp);
        let gbps = line["gbps"].as_f64().unwrap();
        assert!((rates[1] - gbps).abs() <= 0.001 + gbps / 1000.0, "{line}");
    }
}

fn compare(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvx"));
    output(command.args(["bench", "compare"]).args(arguments), LIMIT)
}

#[test]
fn two_runs_are_compared_point_by_point() {
    let folder = Folder::new("compare");
    let point = ["--backend", "SHM", "--op", "read", "--block", "4K,64K", "--count", "8"];
    let mut first = lines(&measured(&[&point[..], &["--rounds", "11"]].concat()));
    // The machine may be noisy, so the compared runs have known rates.
    for line in &mut first {
        line["round_gbps"] = (0..11).map(|round| 2.0 + 0.01 * f64::from(round)).collect();
    }
    let a = folder.write("a.json", &first);
    let mut second = first.clone();
    second[1]["block"] = 8.into();
    let rates = first[0]["round_gbps"].as_array().unwrap().iter();
    second[0]["round_gbps"] = rates.map(|rate| rate.as_f64().unwrap() * 0.8).collect();
    let b = folder.write("b.json", &second);

    let rows = lines(&compare(&[&a, &b, "--json"]));
    let verdicts: Vec<_> = rows.iter().map(|row| row["verdict"].as_str().unwrap()).collect();
    assert_eq!(verdicts, ["slower", "only-in-a", "only-in-b"]);
    assert_eq!((&rows[0]["ratio"], &rows[0]["a_rounds"]), (&0.8.into(), &11.into()));
    for field in rows[0].as_object().unwrap().keys().chain([&"slower".to_owned()]) {
        assert!(DOCUMENT.contains(&format!("`{field}`")), "{field} is not documented");
    }

    let lost = compare(&[&a, &b, "--fail-if-slower", "25"]);
    assert_eq!(lost.status.code(), Some(1));
    assert!(stderr(&lost).contains("1 of A's points are not in B"), "{}", stderr(&lost));
    let table = compare(&[&a, &b]);
    let told = String::from_utf8_lossy(&table.stdout);
    assert!(table.status.success(), "{}", stderr(&table));
    assert!(told.contains("slower") && told.contains("only in B"), "{told}");
    let failed = compare(&[&a, &b, "--fail-if-slower", "10"]);
    assert_eq!(failed.status.code(), Some(1));
    assert_eq!(stderr(&failed), "kvx: 1 point is slower by more than 10 %\n");
    let whole = folder.write("whole.json", &[second[0].clone(), first[1].clone()]);
    let allowed = compare(&[&a, &whole, "--fail-if-slower", "25"]);
    assert!(allowed.status.success(), "{}", stderr(&allowed));
    let same = compare(&[&a, &a, "--fail-if-slower", "0"]);
    assert!(same.status.success(), "{}", stderr(&same));
}

#[test]
fn runs_that_cannot_be_compared_are_rejected_with_what_to_do() {
    let folder = Folder::new("rejected");
    let few = folder.write("few.json", &lines(&measured(&["--block", "4K", "--count", "8"])));
    let mut other: Value =
        serde_json::from_str(folder.read("few.json").lines().next().unwrap()).unwrap();
    other["round_gbps"] = vec![1.0; 6].into();
    let a = folder.write("a.json", std::slice::from_ref(&other));
    other["block"] = 16.into();
    let b = folder.write("b.json", &[other]);
    for (arguments, why) in [
        ([&*few, &*few], "has 3 rounds (round_gbps), and an interval needs 6; write it by"),
        ([&*a, &*b], "the files have no point in common; measure both with the same flags"),
        (["/nowhere/a.json", &*b], "/nowhere/a.json: "),
    ] {
        let output = compare(&arguments);
        assert_eq!(output.status.code(), Some(1), "{arguments:?}");
        assert!(stderr(&output).contains(why), "{}", stderr(&output));
    }
    let negative = compare(&[&a, &a, "--fail-if-slower=-1"]);
    assert!(stderr(&negative).contains("write a percentage"), "{}", stderr(&negative));
}

#[test]
fn a_sweep_says_how_fast_prompts_of_models_arrive() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvx"));
    let sweep = ["bench", "sweep", "--model", "llama-3.1-8b,DeepSeek-V3", "--pool", "16M"];
    let measured = output(command.args(sweep).args(["--rounds", "3", "--seconds", "0.1"]), LIMIT);
    let lines = lines(&measured);
    let names: Vec<_> =
        lines.iter().map(|line| (line["backend"].as_str(), line["model"].as_str())).collect();
    let (llama, deep_seek) = (Some("Llama-3.1-8B"), Some("DeepSeek-V3"));
    let (shm, tcp) = (Some("SHM"), Some("TCP"));
    assert_eq!(names, [(shm, llama), (shm, deep_seek), (tcp, llama), (tcp, deep_seek)]);
    for line in &lines {
        let number = |field: &str| line[field].as_f64().unwrap();
        assert_eq!(line["verified"], true, "{line}");
        let seconds = 32_768.0 / number("tokens_per_s");
        assert!((seconds / number("seconds_per_32k") - 1.0).abs() < 0.01, "{line}");
        let bytes = number("tokens_per_s") * number("bytes_per_token");
        assert!((bytes / (number("gbps") * 1e9) - 1.0).abs() < 0.01, "{line}");
        for field in line.as_object().unwrap().keys() {
            assert!(DOCUMENT.contains(&format!("`{field}`")), "{field} is not documented");
        }
    }
    let told = stderr(&measured);
    assert!(told.starts_with("4 measurements, 16 MiB of memory per side, about "), "{told}");
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvx"));
    let unknown = output(command.args(["bench", "sweep", "--model", "Llama-4"]), LIMIT);
    assert_eq!(unknown.status.code(), Some(2));
    assert!(stderr(&unknown).contains("Llama-3.1-70B, Qwen2.5-7B"), "{}", stderr(&unknown));
}

#[test]
fn long_measurements_show_their_progress_in_plain_lines() {
    let point = ["--backend", "SHM", "--op", "read", "--block", "64K", "--count", "8"];
    let output = output(&mut bench(&[&point[..], &["--seconds", "6"]].concat()), LIMIT);
    let told = stderr(&output);
    let progress: Vec<_> = told.lines().filter(|line| line.contains(" % done, ")).collect();
    // At most one in ten seconds, also on a machine that is as slow as it gets.
    assert!(!progress.is_empty() && progress.len() < 12, "{told}");
    assert!(progress[0].ends_with(" s left: SHM read 64 KiB x8 scattered kvx block"), "{told}");
    assert!(!told.contains('\x1b'), "{told}");
}
