//! The commands that the documents show. The commands of `kvx` run here as on the page, except for
//! addresses, ports and files that this machine does not have. The other commands are listed with
//! what runs them.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

#[cfg(feature = "proxy")]
use kvx_instance::{Connector, Instance};
use kvx_testkit::{output, skip, test, trial};
use libtest_mimic::Trial;
#[cfg(any(feature = "connector", all(feature = "serve", feature = "proxy")))]
use serde_json::json;

#[cfg(feature = "connector")]
use crate::probe::{api, prefill_of};
use crate::program::{peers, plug_in};
#[cfg(feature = "proxy")]
use crate::proxy::commands::{serves, start};
#[cfg(feature = "proxy")]
use crate::proxy::fleet::Proxy;
#[cfg(feature = "proxy")]
use crate::proxy::run;
#[cfg(all(feature = "serve", feature = "proxy"))]
use crate::serve::server::Server;
use crate::this_test;

/// The timeout of a command.
const LIMIT: Duration = Duration::from_secs(60);

/// The steps of `cargo xtask test`.
const STEPS: &str = "xtask/steps.toml";

/// Commands that run elsewhere: the file that runs them, and the text in it that shows so.
const ELSEWHERE: &[(&str, &str, &str)] = &[
    ("cargo bench --bench costs", STEPS, "--bench costs -- --test\""),
    ("cargo xtask test --install", ".ci/run", "cargo xtask test --install"),
    // The runner cannot run itself: tests cover the choices of its options.
    ("cargo xtask test --whole", "xtask/src/test/steps.rs", "of(Tier::Whole, None)"),
    ("cargo xtask test --fast", "xtask/src/test/steps.rs", "of(Tier::Fast, None)"),
    ("cargo xtask test --crate kvx-core", "xtask/src/test/steps.rs", "of(Tier::Whole, Some("),
    // Its `main` is a suite, and cargo runs it as a test.
    (
        "cargo test -p kvx-backend --example smallest_backend",
        "kvx-backend/Cargo.toml",
        "name = \"smallest_backend\"\ntest = true",
    ),
    ("cargo build --release -p kvx-cli", STEPS, "\"run --release -- demo\""),
    ("cargo build --release -p kvx-nixl", "kvx-cli/tests/it/program.rs", "libplugin_KVX.so"),
    ("cargo xtask router", STEPS, "\"xtask router\""),
    ("cargo xtask wheel", STEPS, "\"xtask wheel --check\""),
    // The rehearsal packs, unpacks and runs.
    ("cargo xtask gpu --kit kvx-gpu", STEPS, "\"xtask gpu --rehearse\""),
];

/// Commands of `kvx`, each with the function that runs it.
const HERE: &[(&str, fn(Words))] = &[
    #[cfg(all(feature = "serve", feature = "proxy"))]
    ("cargo run --release -- demo", demo_holds),
    ("target/release/kvx nixl", |words| succeeds(&mut words.kvx())),
    ("target/release/kvx nixl --check", nixl_is_checked),
    ("target/release/kvx nixl --install \"$VIRTUAL_ENV\"", nixl_is_installed),
    ("kvx secret fleet.secret", secret_is_made),
    #[cfg(feature = "connector")]
    ("kvx probe 10.0.0.1:5600 --api http://10.0.0.1:8100", |words| {
        engine_is_probed(words, "prefill-0")
    }),
    #[cfg(feature = "connector")]
    (
        "kvx probe 10.0.0.1:5600 --api http://10.0.0.1:8100 -- --model Qwen/Qwen3-0.6B --dtype half",
        |words| engine_is_probed(words, "the compatibility hashes are the same"),
    ),
    #[cfg(feature = "proxy")]
    (
        "kvx proxy --prefiller-hosts 10.0.0.1 10.0.0.2 --prefiller-ports 8100 8100 --decoder-hosts 10.0.0.3 --decoder-ports 8200",
        toy_command_line_serves,
    ),
    #[cfg(feature = "proxy")]
    (
        "kvx proxy --prefill http://10.0.0.1:8010 8998 --decode http://10.0.0.2:8020",
        mooncake_command_line_serves,
    ),
    #[cfg(feature = "proxy")]
    ("kvx proxy --config fleet.toml", fleet_serves),
    #[cfg(feature = "proxy")]
    ("kvx proxy --config fleet.toml --check", fleet_is_checked),
    #[cfg(feature = "proxy")]
    ("kvx proxy --compare http://10.0.0.9:8000 http://10.0.0.1:8100", endpoints_are_compared),
    #[cfg(feature = "proxy")]
    ("kvx proxy --explain request.json --router http://127.0.0.1:8000", request_is_explained),
    #[cfg(feature = "proxy")]
    ("kvx proxy --config fleet.toml --record requests.jsonl", requests_are_recorded),
    #[cfg(feature = "proxy")]
    (
        "kvx replay requests.jsonl --url http://10.0.0.9:8000 --beside http://10.0.0.1:8000 --speed 2 --report replay.html",
        requests_are_replayed,
    ),
    ("kvx doctor", host_is_examined),
    ("kvx bench --backend SHM --block 64K --count 64 --report bench.html", bench_reports),
    ("kvx bench compare before.json after.json --fail-if-slower 10", runs_are_compared),
    ("kvx bench sweep --model Llama-3.1-8B", models_are_measured),
    #[cfg(feature = "serve")]
    ("cargo run --release -- make-model /tmp/tiny --arch qwen3", model_is_made),
    #[cfg(all(feature = "serve", feature = "proxy"))]
    ("cargo run --release -- serve /tmp/tiny --port 8100", model_is_served),
];

/// The mark of a command that no test can run.
const NEEDS: &str = "needs an";

/// The arguments of a command of `kvx`, and a separate folder where it runs.
struct Words {
    words: Vec<String>,
    folder: PathBuf,
}

impl Words {
    fn of(command: &str, folder: PathBuf) -> Words {
        let programs = ["cargo run --release -- ", "target/release/kvx ", "kvx "];
        let arguments = programs.iter().find_map(|program| command.strip_prefix(program));
        let arguments = arguments.unwrap_or_else(|| panic!("{command} is no command of kvx"));
        let words = arguments.split(' ').map(|word| word.trim_matches('"').to_owned()).collect();
        std::fs::create_dir_all(&folder).unwrap();
        Words { words, folder }
    }

    /// Replaces the first argument that equals `word` with one that is valid on this machine.
    #[track_caller]
    fn replace(&mut self, word: &str, by: impl Into<String>) {
        let found = self.words.iter_mut().find(|found| *found == word);
        *found.unwrap_or_else(|| panic!("the command does not have {word}")) = by.into();
    }

    fn kvx(&self) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvx"));
        command.args(&self.words).current_dir(&self.folder).env("KVX_NIXL_PLUGIN", plug_in());
        command.env_remove("KVX_SECRET_FILE");
        command
    }

    /// Returns the arguments of `kvx proxy` with a free port.
    #[cfg(feature = "proxy")]
    fn of_proxy(&self) -> Vec<&str> {
        self.words[1..].iter().map(String::as_str).chain(["--port", "0"]).collect()
    }
}

impl Drop for Words {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.folder).ok(); // an error leaves only unused files
    }
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&[&output.stdout[..], &output.stderr].concat()).into_owned()
}

/// Runs a command to its end, and returns its output.
#[track_caller]
fn printed(command: &mut Command) -> String {
    let output = output(command, LIMIT);
    assert!(output.status.success(), "{}\n{}", output.status, said(&output));
    said(&output)
}

fn succeeds(command: &mut Command) {
    printed(command);
}

#[cfg(all(feature = "serve", feature = "proxy"))]
fn demo_holds(words: Words) {
    let said = printed(&mut words.kvx());
    let equal = "Every answer of the fleet equals the single server's";
    assert_eq!(said.matches(equal).count(), 2, "{said}");
    assert_eq!(said.matches("the client received the right answer").count(), 2, "{said}");
}

fn nixl_is_checked(words: Words) {
    let Some(environment) = peers("nixl") else {
        let absent = "a wheel of nixl-cu12 is not installed";
        return skip(&this_test(), absent, "cargo xtask test --install");
    };
    let said = printed(words.kvx().env("VIRTUAL_ENV", environment));
    assert!(said.contains("KVX: 1024 blocks of 4 KiB "), "{said}");
}

fn nixl_is_installed(mut words: Words) {
    let environment = words.folder.clone();
    words.replace("$VIRTUAL_ENV", environment.to_str().unwrap());
    succeeds(&mut words.kvx());
    assert!(environment.join("libplugin_KVX.so").exists(), "the link leads somewhere");
}

fn secret_is_made(words: Words) {
    let said = printed(&mut words.kvx());
    assert!(said.contains("KVX_SECRET_FILE="), "{said}");
    kvx::Secret::from_file(words.folder.join("fleet.secret")).unwrap();
}

fn bench_reports(mut words: Words) {
    words.words.extend(["--seconds", "0.1", "--pool", "16M"].map(str::to_owned));
    assert!(printed(&mut words.kvx()).contains("\"round_gbps\":["));
    assert!(words.folder.join("bench.html").exists());
}

fn host_is_examined(told: Words) {
    let said = output(&mut told.kvx(), LIMIT);
    // The machine may have a problem.
    assert!(matches!(said.status.code(), Some(0 | 1)), "{said:?}");
    let text = String::from_utf8_lossy(&said.stdout);
    assert!(text.starts_with("This host: "), "{text}");
    assert!(text.contains("\nok       backend: TCP"), "{text}");
}

fn runs_are_compared(words: Words) {
    for file in ["before.json", "after.json"] {
        let point = r#"{"backend": "SHM", "op": "read", "block": 4096, "count": 8, "pattern": "scattered",
            "memory": "kvx", "wait": "block", "verified": true, "round_gbps": [1, 2, 3, 4, 5, 6]}"#;
        std::fs::write(words.folder.join(file), point.replace('\n', " ")).unwrap();
    }
    let said = printed(&mut words.kvx());
    assert!(said.contains("no difference shown"), "{said}");
}

fn models_are_measured(mut words: Words) {
    words.words.extend(["--seconds", "0.1", "--pool", "16M"].map(str::to_owned));
    assert!(printed(&mut words.kvx()).contains("\"seconds_per_32k\":"));
}

/// Probes an engine of a small model that has the name of a large one.
#[cfg(feature = "connector")]
fn engine_is_probed(mut words: Words, told: &str) {
    let engine = prefill_of("Qwen/Qwen3-0.6B", "torch.float16");
    words.replace("10.0.0.1:5600", engine.address());
    words.replace("http://10.0.0.1:8100", api("0.33.0"));
    let model = words.folder.join("Qwen/Qwen3-0.6B");
    std::fs::create_dir_all(&model).unwrap();
    let config = json!({"num_attention_heads": 2, "head_dim": 4, "num_hidden_layers": 1});
    std::fs::write(model.join("config.json"), config.to_string()).unwrap();
    let said = printed(&mut words.kvx());
    assert!(said.contains(told), "{said}");
}

#[cfg(feature = "proxy")]
fn toy_command_line_serves(mut words: Words) {
    let (mut prefill, mut decode) = (start(2, Connector::Pull), start(1, Connector::Pull));
    for host in ["10.0.0.1", "10.0.0.2", "10.0.0.3"] {
        words.replace(host, "127.0.0.1");
    }
    for (port, instance) in [("8100", &prefill[0]), ("8100", &prefill[1]), ("8200", &decode[0])] {
        words.replace(port, instance.port().to_string());
    }
    run(async || {
        let proxy = Proxy::start(&words.of_proxy(), &[]);
        serves(&proxy, &mut prefill, &mut decode).await;
    })
    .unwrap();
}

#[cfg(feature = "proxy")]
fn mooncake_command_line_serves(mut words: Words) {
    let (mut prefill, mut decode) = (start(1, Connector::Mooncake), start(1, Connector::Mooncake));
    words.replace("http://10.0.0.1:8010", prefill[0].url());
    words.replace("8998", prefill[0].bootstrap_port().to_string());
    words.replace("http://10.0.0.2:8020", decode[0].url());
    run(async || {
        let proxy = Proxy::start(&words.of_proxy(), &[]);
        serves(&proxy, &mut prefill, &mut decode).await;
    })
    .unwrap();
}

/// Writes `fleet.toml` with these instances.
#[cfg(feature = "proxy")]
fn fleet_toml(words: &Words, prefill: &Instance, decode: &Instance) {
    let text = format!(
        "port = 0\n[[pool]]\nprefill = [\"{}\"]\ndecode = [\"{}\"]\n",
        prefill.url(),
        decode.url()
    );
    std::fs::write(words.folder.join("fleet.toml"), text).unwrap();
}

#[cfg(feature = "proxy")]
fn fleet_serves(mut words: Words) {
    let (mut prefill, mut decode) = (start(1, Connector::Pull), start(1, Connector::Pull));
    fleet_toml(&words, &prefill[0], &decode[0]);
    let file = words.folder.join("fleet.toml");
    words.replace("fleet.toml", file.to_str().unwrap());
    run(async || {
        let proxy = Proxy::start(&words.of_proxy(), &[]);
        serves(&proxy, &mut prefill, &mut decode).await;
    })
    .unwrap();
}

#[cfg(feature = "proxy")]
fn fleet_is_checked(words: Words) {
    let (prefill, decode) = (start(1, Connector::Pull), start(1, Connector::Pull));
    fleet_toml(&words, &prefill[0], &decode[0]);
    let said = printed(&mut words.kvx());
    assert!(said.contains(&decode[0].url()["http://".len()..]), "{said}");
}

#[cfg(feature = "proxy")]
fn endpoints_are_compared(mut words: Words) {
    let alike = start(2, Connector::Pull);
    words.replace("http://10.0.0.9:8000", alike[0].url());
    words.replace("http://10.0.0.1:8100", alike[1].url());
    let said = printed(&mut words.kvx());
    assert!(said.contains("the same answers"), "{said}");
}

#[cfg(feature = "proxy")]
fn request_is_explained(mut words: Words) {
    let (prefill, decode) = (start(1, Connector::Pull), start(1, Connector::Pull));
    let urls = [prefill[0].url(), decode[0].url()];
    let arguments = ["--prefill", &urls[0], "--decode", &urls[1], "--port", "0"];
    std::fs::write(words.folder.join("request.json"), r#"{"prompt": "Why?"}"#).unwrap();
    let key = ("ADMIN_API_KEY", "a key");
    let proxy = Proxy::start(&arguments, &[key]);
    words.replace("http://127.0.0.1:8000", format!("http://127.0.0.1:{}", proxy.port));
    let said = printed(words.kvx().env(key.0, key.1));
    assert!(said.contains(&urls[0]["http://".len()..]), "{said}");
}

#[cfg(feature = "proxy")]
fn requests_are_recorded(mut words: Words) {
    let (mut prefill, mut decode) = (start(1, Connector::Pull), start(1, Connector::Pull));
    fleet_toml(&words, &prefill[0], &decode[0]);
    for name in ["fleet.toml", "requests.jsonl"] {
        let file = words.folder.join(name);
        words.replace(name, file.to_str().unwrap());
    }
    run(async || {
        let proxy = Proxy::start(&words.of_proxy(), &[]);
        serves(&proxy, &mut prefill, &mut decode).await;
    })
    .unwrap();
    let text = std::fs::read_to_string(words.folder.join("requests.jsonl")).unwrap();
    assert!(text.starts_with("{\"kvx_recording\":1,"), "{text}");
}

#[cfg(feature = "proxy")]
fn requests_are_replayed(mut words: Words) {
    let alike = start(2, Connector::Pull);
    words.replace("http://10.0.0.9:8000", alike[0].url());
    words.replace("http://10.0.0.1:8000", alike[1].url());
    let line = r#"{"timestamp": 0, "input_length": 30, "output_length": 2, "hash_ids": []}"#;
    std::fs::write(words.folder.join("requests.jsonl"), line).unwrap();
    let said = printed(&mut words.kvx());
    assert!(said.contains("goodput/s"), "{said}");
    assert!(words.folder.join("replay.html").exists());
}

/// Moves the pages' model to a folder that a test may write.
#[cfg(feature = "serve")]
fn model(words: &mut Words) -> String {
    let folder = words.folder.join("tiny").to_str().unwrap().to_owned();
    words.replace("/tmp/tiny", &folder);
    folder
}

#[cfg(feature = "serve")]
fn model_is_made(mut words: Words) {
    let folder = model(&mut words);
    let said = printed(&mut words.kvx());
    assert!(said.contains("random weights"), "{said}");
    assert!(Path::new(&folder).join("config.json").exists());
}

#[cfg(all(feature = "serve", feature = "proxy"))]
fn model_is_served(mut words: Words) {
    let folder = model(&mut words);
    let mut make = Command::new(env!("CARGO_BIN_EXE_kvx"));
    succeeds(make.args(["make-model", &folder, "--arch", "qwen3"]));
    words.replace("8100", "0");
    let server = Server::spawn(words.kvx()).listening();
    let asked = json!({"model": folder, "prompt": "San Francisco is", "max_tokens": 2});
    let (status, answer) = server.post("/v1/completions", &asked);
    assert_eq!((status, &answer["usage"]["completion_tokens"]), (200, &json!(2)), "{answer}");
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Returns every Markdown page, except in hidden and build folders.
fn pages() -> Vec<PathBuf> {
    let (mut pages, mut folders) = (Vec::new(), vec![root()]);
    while let Some(folder) = folders.pop() {
        for path in std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()) {
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            match path.is_dir() {
                true if !name.starts_with('.') && name != "target" => folders.push(path),
                false if name.ends_with(".md") => pages.push(path),
                _ => {}
            }
        }
    }
    pages
}

/// Returns the commands of all pages, with their pages, except those that need other hardware.
fn shown() -> Vec<(PathBuf, String)> {
    let mut commands = Vec::new();
    for page in pages() {
        let mut in_shell = false;
        for line in std::fs::read_to_string(&page).unwrap().lines() {
            match line.strip_prefix("```") {
                Some(language) => in_shell = language == "sh",
                None if in_shell && !line.contains(NEEDS) => {
                    let command = line.split(" #").next().unwrap_or_default().trim();
                    commands.push((page.clone(), command.to_owned()));
                }
                None => {}
            }
        }
    }
    commands
}

#[cfg(all(feature = "connector", feature = "proxy", feature = "serve"))]
#[test]
fn every_command_runs_or_names_what_it_needs() {
    let shown = shown();
    let known: Vec<_> = HERE
        .iter()
        .map(|(command, _)| command)
        .chain(ELSEWHERE.iter().map(|(command, ..)| command))
        .collect();
    for (page, command) in &shown {
        assert!(known.contains(&&command.as_str()), "{}: nothing runs `{command}`", page.display());
    }
    for command in known {
        assert!(shown.iter().any(|(_, shown)| shown == command), "no page shows `{command}`");
    }
}

#[test]
fn commands_that_run_elsewhere_are_named_there() {
    for (command, file, words) in ELSEWHERE {
        let text = std::fs::read_to_string(root().join(file)).unwrap();
        assert!(
            text.contains(words),
            "`{command}` should be run by {file}, which does not contain {words:?}"
        );
    }
}

/// Returns a trial for each command of `kvx` that a page shows.
pub(crate) fn trials() -> Vec<Trial> {
    let trials = HERE.iter().enumerate().map(|(at, (command, run))| {
        let name = format!("documents::{}", command.replace(' ', "_").replace('"', ""));
        let folder = format!("documents-{}-{at}", std::process::id());
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(folder);
        trial(name, move || run(Words::of(command, folder)))
    });
    trials.collect()
}
