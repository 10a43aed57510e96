//! Tests of the commands of vLLM's guides, unchanged, each on the host that the guide names.

use std::path::{Path, PathBuf};

use kvx_testkit::{Tier, skip, test, trial};
use libtest_mimic::Trial;
use serde_json::{Value, json};

use crate::serve::hosts::{Host, Hosts};
use crate::serve::server::model;
use crate::this_test;

/// The commands and rules, by their ids.
const GUIDES: &str = include_str!("guides.json");
/// The page that names a test for each of them.
const PAGE: &str = include_str!("../../../../docs/project/vllm-parity.md");
/// The model for commands that do not name one.
const MODEL: &str = "Qwen/Qwen3-0.6B";

/// Returns a command's arguments, beginning with `kvx`'s own, and its variables. Servers get
/// `--host`, since kvx listens on loopback by default.
fn command(id: &str) -> (Vec<String>, Vec<(String, String)>) {
    let guides: Value = serde_json::from_str(GUIDES).unwrap();
    let command = guides["commands"].as_array().unwrap().iter().find(|command| command["id"] == id);
    let command = command.unwrap_or_else(|| panic!("no command {id}"));
    let filled = |value: &Value| {
        let text = value.as_str().unwrap().replace("${MODEL}", MODEL);
        (1..=5).fold(text, |text, at| text.replace(&format!("${{IP{at}}}"), &Hosts::address(at)))
    };
    let program = [command["program"].as_str().unwrap().to_owned()];
    let host = ["--host", "0.0.0.0"].map(str::to_owned);
    let host = host.into_iter().filter(|_| command["program"] == "serve");
    let arguments = command["args"].as_array().unwrap().iter().map(filled);
    let arguments = program.into_iter().chain(arguments).chain(host).collect();
    let variables = command["env"].as_object().unwrap().iter();
    (arguments, variables.map(|(name, value)| (name.clone(), filled(value))).collect())
}

fn run(host: &mut Host, id: &str, cache: &Path) {
    let (arguments, variables) = command(id);
    host.run(host.kvx(&arguments, &variables, cache));
}

/// Starts the single server that answers are compared with.
fn run_single(host: &mut Host, cache: &Path) {
    let arguments = ["serve", MODEL, "--port", "8300", "--host", "127.0.0.1"].map(str::to_owned);
    host.run(host.kvx(&arguments, &[], cache));
}

/// Creates a Hugging Face cache that has a small model under the guides' names.
fn cache(name: &str) -> PathBuf {
    // The size allows eight ranks to share the model.
    let model =
        model(&["--arch", "qwen3", "--heads", "8", "--kv-heads", "8", "--max-positions", "2048"]);
    let cache =
        Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("serve-{}-{name}", std::process::id()));
    for name in ["models--Qwen--Qwen3-0.6B", "models--Qwen--Qwen2.5-7B-Instruct"] {
        let kept = cache.join(name);
        std::fs::create_dir_all(kept.join("snapshots")).unwrap();
        std::fs::create_dir_all(kept.join("refs")).unwrap();
        std::fs::write(kept.join("refs/main"), "0a1b").unwrap();
        std::os::unix::fs::symlink(&model, kept.join("snapshots/0a1b")).unwrap();
    }
    cache
}

fn ask(prompt: &str) -> Value {
    json!({"model": MODEL, "prompt": prompt, "max_tokens": 16, "temperature": 0, "return_token_ids": true})
}

const PROMPTS: [&str; 3] = [
    "short",
    "San Francisco is a city of which there is much to say, and more than a block of it",
    "a third one",
];

fn one_host(guide: &str) {
    let Some(mut hosts) = Hosts::for_this_test(1) else { return };
    let host = &mut hosts.each[0];
    let cache = cache(guide);
    for command in ["prefill", "decode", "proxy"] {
        run(host, &format!("{guide}.same-host.{command}"), &cache);
    }
    run_single(host, &cache);
    for port in [8100, 8200, 8300] {
        host.wait(&format!("http://localhost:{port}/health"));
    }
    host.wait("http://localhost:8192/ready");
    for prompt in PROMPTS {
        let right = host
            .curl("http://localhost:8300/v1/completions", Some(&ask(prompt)))
            .expect("an answer");
        let answer = host
            .curl("http://localhost:8192/v1/completions", Some(&ask(prompt)))
            .expect("an answer");
        assert_eq!(answer["choices"][0]["token_ids"], right["choices"][0]["token_ids"]);
    }
    assert_eq!(host.metric(8200, "vllm:nixl_bytes_transferred_count", ""), PROMPTS.len() as f64);
}

// vLLM guide nixl-old.same-host.prefill: older guide, prefill on one host: tokens through the proxy
//     equal those of a single server
// vLLM guide nixl-old.same-host.decode: older guide, decode on one host: tokens through the proxy
//     equal those of a single server
// vLLM guide nixl-old.same-host.proxy: older guide, proxy on one host: its tokens equal those of a
//     single server
#[test]
fn the_older_guides_commands_for_one_host_work_as_they_are() {
    one_host("nixl-old");
}

// vLLM guide nixl.same-host.prefill: newer guide, prefill on one host: tokens through the proxy
//     equal those of a single server
// vLLM guide nixl.same-host.decode: newer guide, decode on one host: tokens through the proxy equal
//     those of a single server
// vLLM guide nixl.same-host.proxy: newer guide, proxy on one host: its tokens equal those of a
//     single server
#[test]
fn the_guides_commands_for_one_host_work_as_they_are() {
    one_host("nixl");
}

fn four_hosts(guide: &str) {
    let Some(mut hosts) = Hosts::for_this_test(5) else { return };
    let cache = cache(&format!("{guide}-4"));
    let servers = ["prefill-A", "prefill-B", "decode-C", "decode-D"];
    for (host, command) in hosts.each.iter_mut().zip(servers.into_iter().chain(["proxy"])) {
        run(host, &format!("{guide}.four-hosts.{command}"), &cache);
    }
    run_single(&mut hosts.each[4], &cache);
    for host in &hosts.each[..4] {
        host.wait("http://localhost:8000/health");
    }
    let head = &hosts.each[4];
    head.wait("http://localhost:8300/health");
    head.wait("http://localhost:8192/ready");
    // Each of the two decodes loads from each of the two prefills.
    for round in 0..4 {
        let ask = ask(&format!("{round} {}", PROMPTS[1]));
        let right =
            head.curl("http://localhost:8300/v1/completions", Some(&ask)).expect("an answer");
        let answer =
            head.curl("http://localhost:8192/v1/completions", Some(&ask)).expect("an answer");
        assert_eq!(answer["choices"][0]["token_ids"], right["choices"][0]["token_ids"]);
    }
    let moved = |host: &Host| host.metric(8000, "vllm:nixl_bytes_transferred_count", "");
    let moved: f64 = hosts.each[2..4].iter().map(moved).sum();
    assert_eq!(moved, 4.0 * 8.0, "each rank loads its heads of each prompt");
}

/// Returns trials of the whole run only: five hosts, and servers of eight ranks.
pub(crate) fn trials() -> impl Iterator<Item = Trial> {
    let of_guides = [
        // vLLM guide nixl-old.four-hosts.prefill-A: older guide, prefill A with TP 8 on its own
        //     host: tokens through the proxy equal those of a single server
        // vLLM guide nixl-old.four-hosts.prefill-B: older guide, prefill B with TP 8 on its own
        //     host: tokens through the proxy equal those of a single server
        // vLLM guide nixl-old.four-hosts.decode-C: older guide, decode C with TP 8 on its own host:
        //     tokens through the proxy equal those of a single server
        // vLLM guide nixl-old.four-hosts.decode-D: older guide, decode D with TP 8 on its own host:
        //     tokens through the proxy equal those of a single server
        // vLLM guide nixl-old.four-hosts.proxy: older guide, proxy for four hosts with TP 8: its
        //     tokens equal those of a single server
        ("the_older_guides_commands_for_four_hosts_work_as_they_are", "nixl-old"),
        // vLLM guide nixl.four-hosts.prefill-A: newer guide, prefill A with TP 8 on its own host:
        //     tokens through the proxy equal those of a single server
        // vLLM guide nixl.four-hosts.prefill-B: newer guide, prefill B with TP 8 on its own host:
        //     tokens through the proxy equal those of a single server
        // vLLM guide nixl.four-hosts.decode-C: newer guide, decode C with TP 8 on its own host:
        //     tokens through the proxy equal those of a single server
        // vLLM guide nixl.four-hosts.decode-D: newer guide, decode D with TP 8 on its own host:
        //     tokens through the proxy equal those of a single server
        // vLLM guide nixl.four-hosts.proxy: newer guide, proxy for four hosts with TP 8: its tokens
        //     equal those of a single server
        // vLLM guide R6: decodes on other hosts reach each prefill at the address that it
        //     advertises
        ("the_guides_commands_for_four_hosts_work_as_they_are", "nixl"),
    ];
    let is_wanted = |guide: &str| {
        Tier::Whole.runs_or_says(&format!("kvx serve: the commands of {guide} for four hosts"))
    };
    let wanted = of_guides.into_iter().filter(move |(_, guide)| is_wanted(guide));
    wanted.map(|(name, guide)| trial(format!("serve::guides::{name}"), move || four_hosts(guide)))
}

/// Runs a prefill of one command and a decode of another, each on its own host as the guide's rule
/// for hosts requires, and the proxy on a third. Checks that the tokens equal those of a single
/// server, and were transferred by `backend` if one is named. Both servers get the arguments
/// `more`, and the decode has these variables.
fn pair(
    name: &str,
    [prefill, decode]: [&str; 2],
    variables: &[(&str, &str)],
    more: &[&str],
    backend: &str,
) {
    let Some(mut hosts) = Hosts::for_this_test(3) else { return };
    let cache = cache(name);
    let mut proxy = vec!["proxy".to_owned(), "--port".to_owned(), "8192".to_owned()];
    let mut ports = Vec::new();
    for (at, (id, role)) in [(prefill, "prefiller"), (decode, "decoder")].into_iter().enumerate() {
        let (mut arguments, mut own) = command(id);
        arguments.extend(more.iter().map(|argument| (*argument).to_owned()));
        own.push(("VLLM_NIXL_SIDE_CHANNEL_HOST".to_owned(), Hosts::address(at + 1)));
        if role == "decoder" {
            own.extend(
                variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())),
            );
        }
        let host = &mut hosts.each[at];
        host.run(host.kvx(&arguments, &own, &cache));
        let port = arguments
            [arguments.iter().position(|argument| argument == "--port").unwrap() + 1]
            .clone();
        proxy.extend([format!("--{role}-hosts"), Hosts::address(at + 1)]);
        proxy.extend([format!("--{role}-ports"), port.clone()]);
        ports.push(port.parse::<u16>().unwrap());
    }
    let head = &mut hosts.each[2];
    head.run(head.kvx(&proxy, &[], &cache));
    run_single(head, &cache);
    for (host, port) in hosts.each.iter().zip(&ports) {
        host.wait(&format!("http://localhost:{port}/health"));
    }
    let head = &hosts.each[2];
    head.wait("http://localhost:8300/health");
    head.wait("http://localhost:8192/ready");
    for prompt in PROMPTS {
        let right = head
            .curl("http://localhost:8300/v1/completions", Some(&ask(prompt)))
            .expect("an answer");
        let answer = head
            .curl("http://localhost:8192/v1/completions", Some(&ask(prompt)))
            .expect("an answer");
        assert_eq!(answer["choices"][0]["token_ids"], right["choices"][0]["token_ids"]);
    }
    let moved = |name, label| hosts.each[1].metric(ports[1], name, label);
    assert_eq!(moved("vllm:nixl_bytes_transferred_count", ""), PROMPTS.len() as f64);
    // Each load also reads its generation counters.
    assert_eq!(moved("kvx_transfers_total", backend), 2.0 * PROMPTS.len() as f64);
}

// vLLM guide nixl.backend.json: a backend chosen by a JSON argument moves blocks between hosts,
//     behind the proxy; the test also names the network interface, as there is no RDMA card
// vLLM guide nixl.backend.dotted: a backend chosen by dotted arguments moves blocks between hosts,
//     behind the proxy; the test also names the network interface, as there is no RDMA card
// vLLM guide R2: a backend other than the default UCX moves the blocks (here LIBFABRIC)
#[test]
fn the_backend_that_the_guide_names_moves_the_blocks_however_it_is_written() {
    if let Err(why) = kvx::registry().require("LIBFABRIC", &kvx::Options::new()) {
        return skip(&this_test(), &why.to_string(), "cargo xtask test --install");
    }
    // There is no RDMA card here: without a domain, it would stay on loopback.
    let card = ["--kv-transfer-config.kv_connector_extra_config.libfabric.domain", "eth0"];
    pair("nixl.backend", ["nixl.backend.json", "nixl.backend.dotted"], &[], &card, "LIBFABRIC");
}

// vLLM guide nixl.permute: a decode with tokens first loads from a prefill with heads first on
//     another host, behind the proxy
// vLLM guide R12: `enable_permute_local_kv` is accepted as the string True
#[test]
fn the_guides_permuting_decode_works_as_it_is() {
    let layout = [("VLLM_KV_CACHE_LAYOUT", "NHD")];
    pair("nixl.permute", ["nixl.same-host.prefill", "nixl.permute"], &layout, &[], "");
}

/// Runs Mooncake's commands, each on a separate host; both servers get the arguments `more`. The
/// guide names no address: each command gets its host's, as with several hosts in any guide.
fn mooncakes_commands(name: &str, more: &[&str]) {
    let Some(mut hosts) = Hosts::for_this_test(3) else { return };
    let cache = cache(name);
    for (at, id) in
        ["mooncake.prefill", "mooncake.decode", "mooncake.proxy"].into_iter().enumerate()
    {
        let (mut arguments, mut variables) = command(id);
        if arguments[0] == "serve" {
            arguments.extend(more.iter().map(|argument| (*argument).to_owned()));
        }
        variables.push(("VLLM_HOST_IP".to_owned(), Hosts::address(at + 1)));
        let host = &mut hosts.each[at];
        host.run(host.kvx(&arguments, &variables, &cache));
    }
    let model = "Qwen/Qwen2.5-7B-Instruct";
    let head = &mut hosts.each[2];
    let single = ["serve", model, "--port", "8300", "--host", "127.0.0.1"].map(str::to_owned);
    head.run(head.kvx(&single, &[], &cache));
    hosts.each[0].wait("http://localhost:8010/health");
    hosts.each[1].wait("http://localhost:8020/health");
    let head = &hosts.each[2];
    head.wait("http://localhost:8300/health");
    head.wait("http://localhost:8000/ready");
    for prompt in PROMPTS {
        let mut ask = ask(prompt);
        ask["model"] = model.into();
        let right =
            head.curl("http://localhost:8300/v1/completions", Some(&ask)).expect("an answer");
        let answer =
            head.curl("http://localhost:8000/v1/completions", Some(&ask)).expect("an answer");
        assert_eq!(answer["choices"][0]["token_ids"], right["choices"][0]["token_ids"]);
    }
    let wrote = hosts.each[0].metric(8010, "vllm:mooncake_bytes_transferred_count", "");
    assert_eq!(wrote, PROMPTS.len() as f64);
}

// vLLM guide mooncake.prefill: prefill on its own host, with its address in `VLLM_HOST_IP`: tokens
//     through the proxy equal those of a single server
// vLLM guide mooncake.decode: decode on its own host, with its address in `VLLM_HOST_IP`: tokens
//     through the proxy equal those of a single server
// vLLM guide mooncake.proxy: proxy on its own host, with its address in `VLLM_HOST_IP`: its tokens
//     equal those of a single server
// vLLM guide R15: the guide's proxy command works unchanged, and clients send to its port 8000
#[test]
fn mooncakes_commands_work_as_they_are_and_the_prefill_writes() {
    mooncakes_commands("mooncake", &[]);
}

/// The proxy queries no bootstrap server: the prefill's answer contains its address.
// vLLM guide mooncake.prefill: prefill with `kv_compat` 0.11, the protocol before 0.16: tokens
//     through the proxy equal those of a single server
// vLLM guide mooncake.decode: decode with `kv_compat` 0.11, the protocol before 0.16: tokens
//     through the proxy equal those of a single server
// vLLM guide mooncake.proxy: proxy in front of servers with `kv_compat` 0.11, the protocol before
//     0.16: its tokens equal those of a single server
#[test]
fn mooncakes_commands_work_by_the_protocol_before_0_16_too() {
    let older = ["--kv-transfer-config.kv_connector_extra_config.kv_compat", "0.11"];
    mooncakes_commands("mooncake-older", &older);
}

/// Returns true if a file of the repository has this test: `FILE::NAME`.
fn exists(test: &str) -> bool {
    let Some((file, function)) = test.rsplit_once("::") else { return false };
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(file);
    // Ignore white space: rustfmt may break a list between any two names.
    let read = |file: &Path| std::fs::read_to_string(file).unwrap_or_default();
    let joined = |source: &str| {
        let code = source.lines().filter(|line| !line.trim().starts_with("//"));
        code.flat_map(str::split_whitespace).collect::<String>()
    };
    let source = read(&file);
    let (names, suite) = (joined(&source), joined(&read(&file.with_file_name("mod.rs"))));
    // Suites without `#[test]` list their tests, in this file or in the module of the suite.
    if names.contains(&format!("(\"{function}\",")) {
        return true;
    }
    let Some((before, _)) = source.split_once(&format!("fn {function}(")) else { return false };
    let mut attributes =
        before.lines().rev().take_while(|line| !line.contains('}') && !line.contains(';'));
    attributes.any(|line| line.starts_with("#[test"))
        || names.contains(&format!("\"{function}\","))
        || [":", ","].iter().any(|start| {
            [",", ";"].iter().any(|end| suite.contains(&format!("{start}{function}{end}")))
        })
}

#[test]
fn the_page_names_a_test_for_each_command_and_rule() {
    let (_, rows) = PAGE.split_once("## Guides").expect("the section is there");
    let rows: Vec<Vec<&str>> = rows
        .lines()
        .filter(|line| line.starts_with("| `"))
        .map(|line| {
            line.trim_matches('|').split('|').map(|cell| cell.trim().trim_matches('`')).collect()
        })
        .collect();
    let guides: Value = serde_json::from_str(GUIDES).unwrap();
    let ids = ["commands", "rows"].into_iter().flat_map(|kind| guides[kind].as_array().unwrap());
    for id in ids.map(|command| command["id"].as_str().unwrap()) {
        let of_it: Vec<_> = rows.iter().filter(|row| row[0] == id).collect();
        assert!(!of_it.is_empty(), "docs/project/vllm-parity.md does not name {id}");
        for row in of_it {
            assert!(row[2] == "left" || exists(row[2]), "{id}: no test {}", row[2]);
        }
    }
    let suite = "kvx-cli/tests/it/proxy/recipes.rs";
    for listed in [
        "pull_is_prefill_then_decode",                       // after the colon
        "a_later_turn_loads_what_the_decode_instance_holds", // alone on its line
        "hosts_that_a_client_names_are_dropped",             // the last one
    ] {
        assert!(exists(&format!("{suite}::{listed}")), "{listed}");
    }
    for no_test in ["never_written", "exists"] {
        assert!(!exists(&format!("kvx-cli/tests/it/serve/guides.rs::{no_test}")), "{no_test}");
    }
}
