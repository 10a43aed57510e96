//! The side channel against pyzmq and msgspec, in both roles.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use kvx_testkit::{Child, hex};
use serde_json::{Value, json};

use super::*;
use kvx_vllm::wire::{HandshakePayload, HandshakeRequest};

const PATIENCE: Duration = Duration::from_secs(20);

/// A program that speaks the side channel as vLLM does.
struct Python(Child);

impl Python {
    /// Starts the program. Returns `None`, and reports a skip, if it is not installed.
    fn start(test: &str) -> Option<Self> {
        let here = Path::new(env!("CARGO_MANIFEST_DIR"));
        let environment: PathBuf = here.join("../target/peers/nixl/venv");
        let pythons = std::fs::read_dir(environment.join("lib")).into_iter().flatten().flatten();
        let has = |package: &str| {
            let name = format!("site-packages/{package}");
            std::fs::read_dir(environment.join("lib"))
                .into_iter()
                .flatten()
                .flatten()
                .any(|python| python.path().join(&name).exists())
        };
        if pythons.count() == 0 || !has("zmq") || !has("msgspec") {
            kvx_testkit::skip(
                test,
                "no pyzmq and msgspec in target/peers/nixl",
                "cargo xtask test --install",
            );
            return None;
        }
        let mut command = Command::new(environment.join("bin/python"));
        command.arg(here.join("tests/python/side_channel.py"));
        Some(Python(Child::start(command).unwrap()))
    }

    fn tell(&mut self, order: &Value) {
        self.0.say(&order.to_string()).unwrap();
    }

    fn hear(&self) -> Value {
        serde_json::from_str(&self.0.hear(PATIENCE).unwrap()).unwrap()
    }

    fn ask(&mut self, order: Value) -> Value {
        self.tell(&order);
        self.hear()
    }

    /// Asks while the runtime of this thread keeps running.
    async fn ask_beside(&mut self, order: Value) -> Value {
        self.tell(&order);
        let until = Instant::now() + PATIENCE;
        loop {
            if let Ok(line) = self.0.hear(Duration::ZERO) {
                return serde_json::from_str(&line).unwrap();
            }
            assert!(Instant::now() < until, "the program answers");
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }
}

fn question(rank: WorkerRank, version: Version) -> String {
    hex(&HandshakeRequest::new(rank, version).unwrap().encode())
}

#[test]
fn decodes_of_pyzmq_are_answered_over_req_and_dealer_while_pinging() {
    let test = "decodes_of_pyzmq_are_answered_over_req_and_dealer_while_pinging";
    let Some(mut python) = Python::start(test) else { return };
    run(async {
        let server = server(None, true).await;
        let (known, unknown) =
            (question(RANK, Version::V0_33), question(WorkerRank { pp: 0, tp: 7 }, Version::V0_33));
        for (kind, identity) in [("REQ", None), ("DEALER", None), ("DEALER", Some("a-decode"))] {
            let requests = json!([known, unknown, "c1", question(RANK, Version::V0_22), known]);
            let order = json!({"do": "ask", "port": server.address().port, "requests": requests, "kind": kind,
                "identity": identity});
            let heard = python.ask_beside(order).await;
            let answers = heard["answers"].as_array().unwrap();
            assert_eq!(answers.len(), 5, "{kind}: {heard:#}");
            for index in [0, 3, 4] {
                assert_eq!(answers[index]["engine_id"], "prefill-0");
                assert_eq!(
                    (&answers[index]["hash"], &answers[index]["kvx_metadata"]),
                    (&hash().as_str().into(), &true.into())
                );
                assert_eq!(
                    answers[index]["clock"].is_f64(),
                    index != 3,
                    "an older form gets no clock"
                );
            }
            for index in [1, 2] {
                let said = answers[index]["hash"].as_str().unwrap();
                assert!(
                    said.starts_with("refused by kvx: ") && answers[index]["engine_id"].is_null(),
                    "{said}"
                );
            }
        }
    });
}

#[test]
fn a_decode_of_vllm_gets_the_setting_to_change_and_never_secret_kvx_metadata() {
    let test = "a_decode_of_vllm_gets_the_setting_to_change_and_never_secret_kvx_metadata";
    let Some(mut python) = Python::start(test) else { return };
    run(async {
        let requests = [question(RANK, Version::V0_33)];
        for (secret, nixl) in [(secret(3), true), (None, false)] {
            let server = server(secret, nixl).await;
            let order = json!({"do": "ask", "port": server.address().port, "requests": requests});
            let heard = python.ask_beside(order).await;
            let answer = &heard["answers"][0];
            assert_eq!(answer["kvx_metadata"], false);
            assert_eq!(answer["engine_id"], if nixl { json!("prefill-0") } else { Value::Null });
            assert_eq!(
                answer["hash"].as_str().unwrap().contains("kv_connector_extra_config.backends"),
                !nixl
            );
        }
    });
}

#[test]
fn a_listener_of_pyzmq_gets_vllms_exact_request_and_nothing_else() {
    let mut theirs = metadata(true);
    theirs.kvx_metadata = None;
    let payload = hex(&HandshakePayload::new(hash(), theirs.encode()).encode());
    for (version, form) in [
        (Version::V0_33, "93c40c6765745f6d6574615f6d73670000"),
        (Version::V0_22, "92c40c6765745f6d6574615f6d736700"),
    ] {
        let test = "a_listener_of_pyzmq_gets_vllms_exact_request_and_nothing_else";
        let Some(mut python) = Python::start(test) else { return };
        let old_form = version == Version::V0_22;
        let served = python.ask(
            json!({"do": "serve", "payload": payload, "ranks": [[0, 0]], "old_form": old_form}),
        );
        let peer = at("127.0.0.1", served["port"].as_u64().unwrap() as u16);
        for secret in [None, secret(3)] {
            let expectation = Expectation::new(version, "prefill-0", hash());
            let asked = run(asker(secret).ask(&peer, &[RANK], expectation)).unwrap();
            assert_eq!((asked.standing, &asked.peer.workers[&RANK]), (PeerKind::Foreign, &theirs));
            assert_eq!(asked.peer.clock.is_some(), !old_form);
        }
        let heard = python.ask(json!({"do": "asked"}));
        assert_eq!(heard, json!({"requests": [form, form], "ended": null}));
    }
}

#[test]
fn a_listener_that_has_ended_or_was_killed_never_hangs_a_decode() {
    let test = "a_listener_that_has_ended_or_was_killed_never_hangs_a_decode";
    let Some(mut python) = Python::start(test) else { return };
    let served = python.ask(json!({"do": "serve", "payload": "80", "ranks": [], "mute": true}));
    let peer = at("127.0.0.1", served["port"].as_u64().unwrap() as u16);
    let ask = || run(asker(None).ask(&peer, &[RANK], expectation())).unwrap_err();
    assert_eq!(ask().kind(), ErrorKind::TimedOut, "a thread that has ended: the socket lives");
    python.0.stop().unwrap();
    assert_eq!(ask().kind(), ErrorKind::TimedOut);
    python.0.kill().unwrap();
    assert_eq!(ask().kind(), ErrorKind::PeerLost);
}
