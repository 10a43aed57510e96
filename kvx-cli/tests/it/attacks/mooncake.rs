//! H4, L4, L5: processes without the secret fail all loads of MooncakeConnector, list its workers,
//! and receive the addresses and keys of a decode's memory.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::process::Command;
use std::time::{Duration, Instant};

use kvx_testkit::{connect_from, free_port, test};
use serde_json::{Value, json};

use super::kvx;
use crate::serve::hosts::secret;
use crate::serve::ids;
use crate::serve::server::{LIMIT, Server, ServerArgs, completion, model, prompt};
use crate::serve::transfers::published;

const TOKENS: usize = 6;
/// The longest question that a decode may send.
const LONGEST: usize = 16 << 20;

pub(super) fn server(role: &str, compat: &str, variables: &[(&str, &str)]) -> Server {
    let fields = json!({
        "kv_connector": "MooncakeConnector", "kv_role": role, "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {"backends": ["TCP"], "kv_compat": compat, "load_timeout": 5},
    });
    let told = ServerArgs { arguments: &[], variables };
    Server::configured(&model(&["--arch", "llama"]), "TCP", &fields, told)
}

/// Returns the greeting of a ZeroMQ socket.
pub(super) fn greeting(kind: &str) -> Vec<u8> {
    let mut out = vec![0; 64];
    (out[0], out[9], out[10], out[11]) = (0xff, 0x7f, 3, 1);
    out[12..16].copy_from_slice(b"NULL");
    let length = (kind.len() as u32).to_be_bytes();
    let ready = [&b"\x05READY\x0bSocket-Type"[..], &length, kind.as_bytes()].concat();
    out.extend([4, ready.len() as u8]);
    out.extend(ready);
    out
}

/// Waits until all bytes that were sent to a port of this host have been read.
fn wait_until_read(port: u16) {
    let (at, until) = (format!(":{port:04X}"), Instant::now() + LIMIT);
    let is_busy = |line: &str| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        // The local and the remote address, and the bytes that wait to be sent and to be read.
        let (local, remote, (sent, unread)) =
            (fields[1], fields[2], fields[4].split_once(':').unwrap_or_default());
        let waits = |bytes: &str| bytes != "00000000";
        local.ends_with(&at) && waits(unread) || remote.ends_with(&at) && waits(sent)
    };
    while std::fs::read_to_string("/proc/net/tcp").unwrap().lines().skip(1).any(is_busy) {
        assert!(Instant::now() < until, "the worker does not read");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn connections_of_others_do_not_fail_the_loads_of_decodes() {
    let prompt = prompt(1, 40);
    for secret in [Some(secret()), None] {
        let port = free_port(1).unwrap();
        let text = port.to_string();
        let mut variables = vec![("VLLM_MOONCAKE_BOOTSTRAP_PORT", &*text)];
        variables.extend(secret.map(|file| ("KVX_SECRET_FILE", file.to_str().unwrap())));
        // Before 0.16 the worker itself listens at that port.
        let prefill = server("kv_producer", "0.11", &variables);
        let decode = server("kv_consumer", "0.11", &variables);
        let params = published(&prefill, &prompt);
        let mut crowd = Vec::new();
        for _ in 0..5 {
            let other = Ipv4Addr::new(127, 0, 0, 2);
            let mut stream = connect_from(other, (Ipv4Addr::LOCALHOST, port), LIMIT).unwrap();
            stream.set_write_timeout(Some(LIMIT)).unwrap();
            let head = [&[2][..], &(LONGEST as u64).to_be_bytes()].concat();
            // All but the last byte of the longest question. An error: it was closed.
            let question = [greeting("REQ"), head, vec![0; LONGEST - 1]].concat();
            let _ = stream.write_all(&question);
            crowd.push(stream);
        }
        wait_until_read(port);
        let answer = decode.tokens(&prompt, TOKENS, Some(&params));
        assert_eq!(ids(&answer), ids(&prefill.tokens(&prompt, TOKENS, None)));
        assert_eq!(prefill.metric("vllm:mooncake_bytes_transferred_count"), 1.0);
    }
}

#[test]
fn the_bootstrap_server_lists_workers_to_members_of_the_fleet_only() {
    let port = free_port(1).unwrap();
    let text = port.to_string();
    let secret = ("KVX_SECRET_FILE", secret().to_str().unwrap());
    let variables = [("VLLM_MOONCAKE_BOOTSTRAP_PORT", &*text), secret];
    let prefill = server("kv_producer", "0.33", &variables);
    let decode = server("kv_consumer", "0.33", &variables);
    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    stream.write_all(b"GET /query HTTP/1.0\r\nHost: x\r\n\r\n").unwrap();
    let mut heard = String::new();
    stream.read_to_string(&mut heard).unwrap();
    assert!(heard.starts_with("HTTP/1.1 401") && !heard.contains("tcp://"), "{heard}");

    let urls = [&prefill, &decode].map(|server| format!("http://127.0.0.1:{}", server.port));
    let arguments = [
        "proxy",
        "--port",
        "0",
        "--prefill",
        &urls[0],
        &text,
        "--decode",
        &urls[1],
        "--access-log",
        "off",
    ];
    let (_, said) = kvx(&[&arguments[..], &["--check"]].concat());
    assert!(said.contains("KVX_SECRET_FILE of this proxy"), "{said}");
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvx"));
    command.args(arguments).env(secret.0, secret.1);
    let proxy = Server::spawn(command).listening();
    let until = Instant::now() + LIMIT;
    while proxy.get("/ready").0 != 200 {
        assert!(Instant::now() < until, "the proxy does not find its servers");
        std::thread::sleep(Duration::from_millis(20));
    }
    let prompt = prompt(2, 40);
    let answer = proxy.tokens(&prompt, TOKENS, None);
    assert_eq!(ids(&answer), ids(&prefill.tokens(&prompt, TOKENS, None)));
    assert_eq!(prefill.metric("vllm:mooncake_bytes_transferred_count"), 1.0);
}

/// Accepts a connection in time.
fn accept(listener: &TcpListener) -> TcpStream {
    listener.set_nonblocking(true).unwrap();
    let until = Instant::now() + LIMIT;
    loop {
        match listener.accept() {
            Ok((stream, _)) => {
                stream.set_nonblocking(false).unwrap();
                stream.set_read_timeout(Some(LIMIT)).unwrap();
                return stream;
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                assert!(Instant::now() < until, "nobody connects");
                std::thread::sleep(Duration::from_millis(5));
            }
            Err(error) => panic!("{error}"),
        }
    }
}

fn contains(heard: &[u8], text: &str) -> bool {
    heard.windows(text.len()).any(|part| part == text.as_bytes())
}

#[test]
fn a_false_prefill_learns_nothing_about_the_memory_of_a_decode() {
    let decode = server("kv_consumer", "0.33", &[("KVX_SECRET_FILE", secret().to_str().unwrap())]);
    let [bootstrap, worker] = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
    let [port, at] = [&bootstrap, &worker].map(|listener| listener.local_addr().unwrap().port());
    let mut body = completion(&prompt(3, 40), TOKENS);
    body["kv_transfer_params"] = json!({
        "do_remote_prefill": true, "do_remote_decode": false, "transfer_id": "t",
        "remote_engine_id": "false", "remote_bootstrap_addr": format!("http://127.0.0.1:{port}"),
    });
    let _answer = decode.send("POST", "/v1/completions", Some(&body));

    let mut query = accept(&bootstrap);
    let mut asked = Vec::new();
    while !asked.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        query.read_exact(&mut byte).unwrap();
        asked.extend(byte);
    }
    let listed: Value = json!({"0": {
        "engine_id": "false", "kvx": true,
        "worker_addr": {"0": {"0": format!("tcp://127.0.0.1:{at}")}},
    }});
    let listed = listed.to_string();
    let length = listed.len();
    write!(query, "HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n{listed}").unwrap();

    let mut asker = accept(&worker);
    asker.write_all(&greeting("ROUTER")).unwrap();
    // Long enough for a decode that asks at once.
    asker.set_read_timeout(Some(Duration::from_secs(2))).unwrap();
    let mut heard = Vec::new();
    let _ = asker.read_to_end(&mut heard);
    assert!(contains(&heard, "DEALER"), "the decode has connected: {heard:?}");
    for secret in ["kvx_metadata", "kvx_grants", "kv_caches_base_addr", "req_blocks"] {
        assert!(!contains(&heard, secret), "the decode tells {secret}");
    }
}
