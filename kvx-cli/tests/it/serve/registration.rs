//! Tests of servers that register in a real etcd.

use std::io::ErrorKind;
use std::sync::Arc;

use kvx_proxy::Role;
use kvx_proxy::registration::{FleetAddress, FleetList, Registration, follow};
use kvx_testkit::{Etcd, skip, test};
use rustix::process::Signal;
use serde_json::Value;

use crate::proxy::run;
use crate::serve::server::{LIMIT, Server, ServerArgs, answer, greedy, model, prompt};
use crate::this_test;

/// The list of a fleet in an etcd.
struct Fleet {
    etcd: Etcd,
    list: FleetList,
}

impl Fleet {
    /// Starts an etcd, or reports that the test does not run.
    fn start() -> Option<Fleet> {
        let Some(etcd) = Etcd::start() else {
            skip(&this_test(), "etcd is not installed", "apt install etcd-server");
            return None;
        };
        let list = follow(&FleetAddress::new(&address(&etcd)).unwrap(), None).unwrap();
        Some(Fleet { etcd, list })
    }

    /// Waits for a list of this length.
    async fn wait_for(&self, length: usize) -> Arc<[Registration]> {
        let mut lists = self.list.subscribe();
        let has_length = |list: &Option<Arc<[Registration]>>| {
            list.as_deref().is_some_and(|list| list.len() == length)
        };
        let list = tokio::time::timeout(LIMIT, lists.wait_for(has_length)).await;
        list.unwrap().unwrap().clone().unwrap()
    }
}

fn address(etcd: &Etcd) -> String {
    format!("etcd://{}/chat", etcd.address())
}

fn start(arguments: &[&str]) -> Server {
    Server::start(&model(&["--arch", "llama"]), ServerArgs { arguments, ..ServerArgs::default() })
}

#[test]
fn a_server_registers_and_leaves_before_its_answers_end() {
    run(async || {
        let Some(fleet) = Fleet::start() else { return };
        let address = address(&fleet.etcd);
        let server = start(&["--register", &address, "--max-num-seqs", "1"]);
        let list = fleet.wait_for(1).await;
        let here = format!("127.0.0.1:{}", server.port);
        assert_eq!((list[0].role, list[0].setup.name()), (Role::Decode, &*here));
        let several = (1..=2).map(|from| prompt(from, 8)).collect::<Value>();
        let stream = server.send("POST", "/v1/completions", Some(&greedy(&several, 1500)));
        server.until("vllm:num_requests_running", LIMIT, |running| running == 1.0);
        server.signal(Signal::TERM);
        fleet.wait_for(0).await;
        stream.set_nonblocking(true).unwrap();
        let answered = stream.peek(&mut [0]).map_err(|error| error.kind());
        assert_eq!(answered, Err(ErrorKind::WouldBlock), "its answer has not ended");
        stream.set_nonblocking(false).unwrap();
        let (status, text) = answer(stream);
        assert_eq!(status, 200, "{text}");
        assert!(server.ended().0.success());
    })
    .unwrap();
}

#[test]
fn a_process_beside_an_engine_registers_it() {
    run(async || {
        let Some(fleet) = Fleet::start() else { return };
        let engine = start(&[]);
        let watched = format!("http://127.0.0.1:{}", engine.port);
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_kvx"));
        command.args(["register", &address(&fleet.etcd), "--watch", &watched]);
        command.args(["--role", "prefill", "--url", "http://10.0.0.1:8000"]);
        let sidecar = Server::spawn(command);
        let list = fleet.wait_for(1).await;
        assert_eq!((list[0].role, list[0].setup.name()), (Role::Prefill, "10.0.0.1:8000"));
        sidecar.signal(Signal::TERM);
        assert!(sidecar.ended().0.success());
        assert_eq!(fleet.etcd.keys(), 0, "it has left before it ended");
        fleet.wait_for(0).await;
    })
    .unwrap();
}

#[test]
fn unusable_registrations_stop_the_start() {
    let both = r#"{"kv_connector": "NixlConnector", "kv_role": "kv_both"}"#;
    for (arguments, words) in [
        (&["--register", "http://127.0.0.1:1/f"][..], "is no address in etcd"),
        (&["--register-role", "decode"], "--register"),
        (&["--register", "etcd://127.0.0.1:1/f", "--register-role", "router"], "prefill"),
        (&["--register", "etcd://127.0.0.1:1/f", "--headless"], "the head registers"),
        (&["--register", "etcd://127.0.0.1:1/f", "--host", "0.0.0.0"], "--register-url"),
        (
            &["--register", "etcd://127.0.0.1:1/f", "--kv-transfer-config", both],
            "--register-role prefill or decode",
        ),
        #[cfg(not(feature = "tls"))]
        (&["--register", "etcd+https://127.0.0.1:1/f"], "this build has no TLS"),
    ] {
        let model = model(&["--arch", "llama"]);
        let args = ServerArgs { arguments, ..ServerArgs::default() };
        let (status, said) = Server::try_start(&model, args).ended();
        assert_eq!(status.code(), Some(1), "{said}");
        assert!(said.contains(words), "{words}\n{said}");
    }
}
