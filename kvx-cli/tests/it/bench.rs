//! `kvx bench` as operators run it, on a few megabytes.

mod reports;

use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use kvx_testkit::{output, test};
use serde_json::Value;

/// The time after which a program counts as hung: a sweep takes half a minute under load.
const LIMIT: Duration = Duration::from_secs(300);

fn bench(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvx"));
    command.arg("bench").args(arguments).args(["--pool", "2M"]);
    for (option, value) in [("--rounds", "3"), ("--seconds", "0.2")] {
        if !arguments.contains(&option) {
            command.args([option, value]);
        }
    }
    command
}

fn measured(arguments: &[&str]) -> Output {
    output(&mut bench(arguments), LIMIT)
}

/// Returns the JSON lines of a program that must have succeeded.
fn lines(output: &Output) -> Vec<Value> {
    let (out, err) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{out}\n{err}");
    out.lines().map(|line| serde_json::from_str(line).expect("each line is JSON")).collect()
}

fn stderr(output: &Output) -> &str {
    std::str::from_utf8(&output.stderr).expect("messages are UTF-8")
}

#[test]
fn a_sweep_has_a_line_for_every_point_with_every_field_in_order() {
    let sweep =
        ["--block", "4K,64K", "--count", "1,16", "--memory", "kvx,foreign", "--seconds", "0.05"];
    let output = measured(&sweep);
    let lines = lines(&output);
    assert_eq!(lines.len(), 2 * 2 * 2 * 2 * 2);
    for line in &lines {
        let number =
            |field: &str| line[field].as_f64().unwrap_or_else(|| panic!("{field} in {line}"));
        assert_eq!((&line["verified"], &line["rounds"]), (&true.into(), &3.into()), "{line}");
        for field in ["p50_us", "p99_us", "post_p50_us", "cpu_s_per_gb"] {
            assert!(number(field) > 0.0, "{field} in {line}");
        }
        // Figures have three decimals: if the machine stalls, single blocks round down to zero.
        assert!(number("gbps") >= 0.0 && number("limit_gbps") >= 0.0, "{line}");
        assert!(number("plan_us") >= 0.0 && number("p50_us") <= number("p99_us"), "{line}");
        assert!(
            number("ratio_min") <= number("ratio") && number("ratio") <= number("ratio_max"),
            "{line}"
        );
        let limit = match (line["backend"].as_str().unwrap(), line["memory"].as_str().unwrap()) {
            ("TCP", _) => "sockets",
            (_, "kvx") => "memcpy",
            _ => "process_vm_readv",
        };
        assert_eq!(line["limit_name"], limit);
        assert_eq!(line["bytes"], number("block") as u64 * number("count") as u64);
    }
    let order = "backend op block count pattern memory wait bytes gbps p50_us p99_us post_p50_us plan_us cpu_s_per_gb \
                 limit_name limit_gbps ratio ratio_min ratio_max verified";
    let text = String::from_utf8(output.stdout).unwrap();
    for line in text.lines() {
        let places =
            order.split(' ').map(|field| line.find(&format!("\"{field}\":")).expect(field));
        assert!(places.is_sorted(), "{line}");
    }
}

#[test]
fn both_ways_to_wait_and_both_patterns_are_measured() {
    let sweep = ["--block", "4K", "--count", "64", "--op", "read", "--backend", "shm,SHM"];
    let both = ["--wait", "block,async", "--pattern", "adjacent,scattered"];
    let output = measured(&[&sweep[..], &both].concat());
    let lines = lines(&output);
    let points: Vec<_> =
        lines.iter().map(|line| (line["wait"].as_str(), line["pattern"].as_str())).collect();
    let (block, wait) = (Some("block"), Some("async"));
    let (adjacent, scattered) = (Some("adjacent"), Some("scattered"));
    assert_eq!(
        points,
        [(block, adjacent), (block, scattered), (wait, adjacent), (wait, scattered)]
    );
    assert!(lines.iter().all(|line| line["backend"] == "SHM" && line["verified"] == true));
}

#[test]
fn points_above_the_limit_are_left_out_with_a_message() {
    let sweep = [
        "--backend",
        "TCP",
        "--op",
        "write",
        "--block",
        "4K,1M",
        "--count",
        "4",
        "--max-total",
        "1M",
    ];
    let output = measured(&sweep);
    assert_eq!(lines(&output).len(), 1);
    let told = stderr(&output);
    assert!(
        told.contains("left out: TCP write 1 MiB x4 scattered kvx block moves 4 MiB"),
        "{told}"
    );
    assert!(told.contains("1 point, 2 MiB of memory per side, about "), "{told}");
    let output = measured(&["--block", "1M", "--count", "4", "--max-total", "1M"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).ends_with("kvx: no point is left to measure\n"), "{}", stderr(&output));
}

#[test]
fn invalid_arguments_are_rejected() {
    for (arguments, code) in [
        (["--block", "100"], 1),
        (["--count", "0"], 1),
        (["--seconds", "0"], 1),
        (["--rounds", "0"], 1),
        (["--options", "3"], 1),
        (["--op", "swap"], 2),
        (["--memory", "gpu"], 2),
    ] {
        let output = measured(&arguments);
        assert_eq!(output.status.code(), Some(code), "{arguments:?}");
        assert!(!output.stderr.is_empty() && output.stdout.is_empty());
    }
    // The options are checked before the backend's library is looked for.
    let mut wrong = bench(&["--backend", "RIXL", "--options", r#"{"rixl": {"plugin": "../x"}}"#]);
    let output = output(wrong.env("KVX_RIXL_LIB", "/nonexistent"), LIMIT);
    assert!(stderr(&output).contains("rixl.plugin"), "{}", stderr(&output));
    let output = measured(&["--backend", "UXC"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        stderr(&output).starts_with("backend \"UXC\" is unknown; did you mean UCX?"),
        "{}",
        stderr(&output)
    );
}

#[test]
fn a_companion_program_receives_the_documented_lines() {
    // The program claims four transfers per microsecond of each round, supports no writes, and
    // records the lines that it receives.
    let told = std::env::temp_dir().join(format!("kvx-beside-{}", std::process::id()));
    let program = format!(
        "sh -c 'while read -r word rest; do echo \"$word $rest\" >> {told}; case \"$word $rest\" in \
         point*op=write*) echo skip no writes;; point*) echo ready four a microsecond;; go*) echo moved 4 0.000001;; \
         esac; done'",
        told = told.display()
    );
    let output =
        measured(&["--backend", "SHM", "--block", "4K", "--count", "8", "--beside", &program]);
    let heard = std::fs::read_to_string(&told).unwrap();
    std::fs::remove_file(&told).unwrap();
    let lines = lines(&output);
    let [read, write] = &lines[..] else { panic!("{lines:?}") };
    assert_eq!(read["beside_name"], "four a microsecond");
    assert_eq!(read["beside_gbps"], 4.0 * 8.0 * 4096.0 / 1e-6 / 1e9);
    assert!(read["beside_ratio"].as_f64().unwrap() < 1.0, "{read}");
    assert!(write.get("beside_name").is_none(), "{write}");
    assert!(
        stderr(&output).contains(
            "the companion program skips SHM write 4 KiB x8 scattered kvx block: no writes"
        )
    );
    let heard: Vec<_> = heard.lines().collect();
    let point = "point backend=SHM op=read block=4096 count=8 lists=64 pattern=scattered seed=1 memory=kvx wait=block";
    assert_eq!(heard[0], point);
    assert!(heard[1..4].iter().all(|line| line.starts_with("go 0.0")), "{heard:?}");
    assert_eq!(heard.len(), 1 + 3 + 1);
}

#[test]
fn a_companion_program_with_undocumented_answers_ends_the_bench() {
    let point = ["--backend", "SHM", "--op", "read", "--block", "4K", "--count", "8", "--beside"];
    for (program, why) in [
        (
            "sh -c 'read a; echo hello; read b'",
            "the companion program answered \"hello\" to a point",
        ),
        ("sh -c 'read a; echo ready x; read b; echo soon; read c'", "answered \"soon\" to a round"),
        (
            "sh -c 'read a; echo ready x; read b; echo moved 1 100; read c'",
            "reports 100 s for a round that took only",
        ),
        ("true", "the companion program"),
    ] {
        let output = measured(&[&point[..], &[program]].concat());
        assert_eq!(output.status.code(), Some(1), "{program}");
        assert!(stderr(&output).contains(why), "{program}: {}", stderr(&output));
    }
}

/// Runs the example of `BESIDE.md` unchanged.
#[test]
fn the_documented_program_works() {
    let path = std::env::var_os("PATH").unwrap_or_default();
    if !std::env::split_paths(&path).any(|folder| folder.join("python3").is_file()) {
        return kvx_testkit::skip(
            "the_documented_program_works",
            "no python3",
            "install Debian's python3",
        );
    }
    let document = include_str!("../../BESIDE.md");
    let code = |from: &str| {
        let lines = document.lines().skip_while(|line| line.trim() != from);
        let lines = lines.take_while(|line| line.is_empty() || line.starts_with("    "));
        lines
            .map(|line| format!("{}\n", line.strip_prefix("    ").unwrap_or(line)))
            .collect::<String>()
    };
    let program = std::env::temp_dir().join(format!("kvx-beside-{}.py", std::process::id()));
    std::fs::write(&program, code("def shuffled(count, seed):") + &code("import sys, time"))
        .unwrap();
    let beside = format!("python3 {}", program.display());
    let output =
        measured(&["--backend", "SHM", "--block", "4K", "--count", "8", "--beside", &beside]);
    std::fs::remove_file(&program).unwrap();
    let lines = lines(&output);
    assert!(
        lines.iter().all(|line| line["beside_name"] == "python" && line["beside_gbps"].as_f64() > Some(0.0))
    );
}

#[test]
fn the_other_measurements_have_their_figures() {
    let one = |arguments: &[&str]| {
        let output = measured(&[&["--backend", "TCP"], arguments].concat());
        let [line] = &lines(&output)[..] else { panic!("one line of {arguments:?}") };
        line.clone()
    };
    let idle = one(&["--idle", "1"]);
    assert!(idle["cpu_ms"].is_number() && idle["target_cpu_ms"].is_number(), "{idle}");
    let readers = one(&["--readers", "4"]);
    assert!(
        readers["least_of_mean"].as_f64() <= Some(1.0) && readers["gbps"].as_f64() > Some(0.0),
        "{readers}"
    );
    let notices = one(&["--notices-beside", "8M"]);
    for delay in [&notices["alone"], &notices["beside"]] {
        assert!(
            delay["p50_us"].as_f64() > Some(0.0)
                && delay["p99_us"].as_f64() >= delay["p50_us"].as_f64(),
            "{notices}"
        );
    }
    let bulk = one(&["--beside-bulk", "8M"]);
    for reads in [&bulk["small"], &bulk["bare"]] {
        assert!(
            reads["alone_p99_us"].as_f64() > Some(0.0) && reads["times"].as_f64() > Some(0.0),
            "{bulk}"
        );
    }
}

#[test]
fn the_target_does_not_outlive_a_bench_that_is_killed() {
    let mut bench = bench(&[
        "--backend",
        "SHM",
        "--block",
        "4K",
        "--count",
        "8",
        "--op",
        "read",
        "--seconds",
        "60",
    ])
    .stdin(Stdio::null())
    .stdout(Stdio::null())
    .stderr(Stdio::null())
    .spawn()
    .unwrap();
    let until = Instant::now() + Duration::from_secs(30);
    let children = format!("/proc/{0}/task/{0}/children", bench.id());
    let target = loop {
        let listed = std::fs::read_to_string(&children).unwrap();
        if let Some(first) = listed.split_whitespace().next() {
            break first.to_owned();
        }
        assert!(Instant::now() < until, "no target was started");
        std::thread::yield_now();
    };
    bench.kill().unwrap();
    bench.wait().unwrap();
    let runs = || {
        let stat = std::fs::read_to_string(format!("/proc/{target}/stat")).unwrap_or_default();
        let state = stat.rsplit(") ").next().unwrap_or_default();
        !(state.is_empty() || state.starts_with('Z'))
    };
    while runs() {
        assert!(Instant::now() < until, "process {target} is left behind");
        std::thread::yield_now();
    }
}

#[test]
fn the_limits_stay_small_and_do_not_use_kvx() {
    for limit in
        [include_str!("../../src/bench/bare.rs"), include_str!("../../src/bench/driver.rs")]
    {
        assert!(limit.lines().count() <= 170, "{} lines", limit.lines().count());
        assert!(!limit.contains("kvx"), "the limit names kvx");
        let imports = limit.lines().filter_map(|line| line.trim().strip_prefix("use "));
        assert!(imports.clone().count() > 0);
        for import in imports {
            assert!(import.starts_with("std::"), "{import}");
        }
    }
}

/// Runs `kvx` on a stand-in GPU that consists of host memory.
fn on_the_stand_in(mut command: Command) -> Output {
    output(command.env("KVX_CUDA_LIB", kvx_stand_in::library()), LIMIT)
}

#[test]
fn device_memory_is_measured_next_to_bare_driver_copies() {
    let sweep = [
        "--memory",
        "device,device-host,host-device",
        "--block",
        "4K",
        "--count",
        "16",
        "--seconds",
        "0.05",
    ];
    let output = on_the_stand_in(bench(&sweep));
    let lines = lines(&output);
    assert_eq!(lines.len(), 3 * 2 * 2);
    for line in &lines {
        assert_eq!(line["verified"], true, "{line}");
        let others = line["others"].as_array().map_or(&[][..], Vec::as_slice);
        let mut beside: Vec<_> =
            others.iter().map(|other| other["name"].as_str().unwrap()).collect();
        beside.push(line["limit_name"].as_str().unwrap());
        beside.sort_unstable();
        let [backend, memory, op] =
            ["backend", "memory", "op"].map(|field| line[field].as_str().unwrap());
        let to_device = (memory == "device-host") == (op == "read");
        let expected: &[_] = match (backend, memory) {
            ("SHM", "device") => &["a call a block", "device copy"],
            ("TCP", "device") => &["copy to device", "copy to host", "sockets"],
            ("SHM", _) if to_device => &["copy to device"],
            ("SHM", _) => &["copy to host"],
            _ if to_device => &["copy to device", "sockets"],
            _ => &["copy to host", "sockets"],
        };
        assert_eq!(beside, expected, "{line}");
    }
}

#[test]
fn kernels_are_measured_next_to_one_copy() {
    let output = on_the_stand_in(bench(&[
        "--kernels",
        "--block",
        "64K",
        "--count",
        "16",
        "--seconds",
        "0.05",
    ]));
    let lines = lines(&output);
    let kernels: Vec<_> = lines.iter().map(|line| line["kernel"].as_str().unwrap()).collect();
    assert_eq!(kernels, ["gather", "scatter"]);
    for line in lines {
        assert_eq!(
            (&line["verified"], &line["limit_name"]),
            (&true.into(), &"device copy".into()),
            "{line}"
        );
        assert!(line["gbps"].as_f64() > Some(0.0) && line["ratio"].as_f64() > Some(0.0), "{line}");
    }
}

#[test]
fn devices_are_listed_or_their_absence_is_explained() {
    let kvx = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvx"));
        command.args(arguments);
        command
    };
    let listed = on_the_stand_in(kvx(&["devices", "--json"]));
    let listed: Value = serde_json::from_slice(&listed.stdout).unwrap();
    assert_eq!(
        (&listed[0]["kind"], &listed[0]["ordinal"]),
        (&"cuda".into(), &0.into()),
        "{listed}"
    );
    let listed = on_the_stand_in(kvx(&["devices"]));
    assert!(listed.status.success() && listed.stdout.starts_with(b"cuda 0: "));
    for arguments in [&["devices"][..], &["bench", "--memory", "device"], &["bench", "--kernels"]] {
        let nowhere =
            [("KVX_CUDA_LIB", "/nowhere/libcuda.so.1"), ("KVX_HIP_LIB", "/nowhere/libamdhip64.so")];
        let output = output(kvx(arguments).envs(nowhere), LIMIT);
        assert_eq!(output.status.code(), Some(1), "{arguments:?}");
        let told = stderr(&output);
        assert!(
            told.contains(
                "kvx: no device memory can be reached; CUDA: /nowhere/libcuda.so.1 not found"
            ),
            "{told}"
        );
        assert!(told.contains("install NVIDIA's driver"), "{told}");
    }
}
