//! The units of systemd.

use std::path::Path;
use std::process::Command;

use kvx_testkit::{output, skip, test};

use super::{LIMIT, entries, flags_among, flags_of, folder, is_installed};
use crate::this_test;

/// Returns the names and texts of the units.
fn units() -> Vec<(String, String)> {
    let files = entries(&folder("systemd")).into_iter();
    let units: Vec<_> = files
        .map(|file| {
            let name = file.file_name().unwrap().to_str().unwrap().to_owned();
            (name, std::fs::read_to_string(&file).unwrap())
        })
        .collect();
    assert!(units.len() >= 4, "{units:?}");
    units
}

/// Returns the values of a key.
fn values<'a>(unit: &'a str, key: &str) -> Vec<&'a str> {
    unit.lines().filter_map(|line| line.strip_prefix(key)?.strip_prefix('=')).collect()
}

#[test]
fn systemd_accepts_the_units() {
    if !is_installed("systemd-analyze") {
        return skip(
            &this_test(),
            "systemd-analyze is not installed",
            "cargo xtask test --install",
        );
    }
    let folder =
        Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("units-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    // The programs of the units are not installed here.
    let kvx = env!("CARGO_BIN_EXE_kvx");
    let here =
        |text: &str| text.replace("/usr/local/bin/kvx", kvx).replace("/opt/vllm/bin/vllm", kvx);
    for (name, text) in units() {
        std::fs::write(folder.join(name), here(&text)).unwrap();
    }
    let verified = |name: &str| {
        let mut analyze = Command::new("systemd-analyze");
        let output =
            output(analyze.current_dir(&folder).args(["verify", &format!("./{name}")]), LIMIT);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let about = said.lines().filter(|line| line.contains(name)).collect::<Vec<_>>().join("\n");
        (output.status.success(), about)
    };
    for (name, text) in units() {
        assert_eq!(verified(&name), (true, String::new()), "{name}");
        // An unknown key is a message about the unit.
        let wrong = text.replace("[Service]", "[Service]\nExekStart=/bin/true");
        std::fs::write(folder.join(&name), here(&wrong)).unwrap();
        let (_, said) = verified(&name);
        assert!(said.contains("ExekStart"), "{name}: {said}");
        std::fs::write(folder.join(&name), here(&text)).unwrap();
    }
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn units_start_commands_that_exist_and_wait_for_their_end() {
    let mut commands = Vec::new();
    for (name, text) in units() {
        for line in values(&text, "ExecStart") {
            let Some(arguments) = line.strip_prefix("/usr/local/bin/kvx ") else { continue };
            let words: Vec<_> = arguments.split(' ').collect();
            let has = flags_of(words[0]);
            for flag in flags_among(words.iter().copied()) {
                assert!(
                    has.iter().any(|one| one == flag),
                    "{name}: kvx {} has no {flag}",
                    words[0]
                );
            }
            commands.push(words[0].to_owned());
        }
        let file = values(&text, "LoadCredential");
        assert_eq!(file, ["fleet.secret:/etc/kvx/fleet.secret"], "{name}");
        assert!(
            values(&text, "Environment").contains(&"KVX_SECRET_FILE=%d/fleet.secret"),
            "{name}"
        );
        let limit: u64 = values(&text, "TimeoutStopSec")[0].parse().unwrap();
        let ends = match name.as_str() {
            "kvx-proxy.service" => kvx_proxy::Setup::default().drain.as_secs(),
            "vllm.service" => {
                let start = values(&text, "ExecStart")[0];
                let mut after = start.split(' ').skip_while(|word| *word != "--shutdown-timeout");
                after.nth(1).unwrap().parse().unwrap()
            }
            _ => 0,
        };
        assert!(limit > ends, "{name}: {limit} s");
    }
    commands.sort();
    assert_eq!(commands, ["proxy", "register", "serve"]);
}
