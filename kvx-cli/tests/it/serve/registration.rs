//! Tests of servers that register in a real etcd.

use std::io::ErrorKind;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvx_proxy::Role;
use kvx_proxy::registration::{FleetAddress, FleetList, Registration, follow};
use kvx_testkit::{Etcd, skip, test};
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::proxy::run;
use crate::serve::assert_same;
use crate::serve::hosts::secret;
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
        let etcd = Fleet::start_etcd()?;
        let list = follow(&FleetAddress::new(&address(&etcd)).unwrap(), None).unwrap();
        Some(Fleet { etcd, list })
    }

    fn start_etcd() -> Option<Etcd> {
        let etcd = Etcd::start();
        if etcd.is_none() {
            skip(&this_test(), "etcd is not installed", "cargo xtask test --install");
        }
        etcd
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
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvx"));
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

/// Starts an engine of a role, over TCP, in a fleet.
fn engine(role: &str, address: &str, variables: &[(&str, &str)]) -> Server {
    let fields = json!({"kv_role": role, "kv_connector_extra_config": {"backends": ["TCP"]},
                        "kv_load_failure_policy": "fail"});
    let arguments = ["--register", address];
    let args = ServerArgs { arguments: &arguments, variables };
    Server::configured(&model(&["--arch", "llama"]), "TCP", &fields, args)
}

/// Waits until the router's `/status` fits, and returns it.
fn status(router: &Server, what: &str, fits: impl Fn(&Value) -> bool) -> Value {
    let until = Instant::now() + LIMIT;
    loop {
        let status: Value = serde_json::from_str(&router.get("/status").1).unwrap();
        if fits(&status) {
            return status;
        }
        assert!(Instant::now() < until, "{what}: {status:#}");
        std::thread::sleep(Duration::from_millis(20)); // between polls
    }
}

/// Returns the number of instances that are up.
fn up(status: &Value) -> usize {
    let all = status["instances"].as_array().unwrap();
    all.iter().filter(|one| one["state"] == "up").count()
}

#[test]
fn a_router_finds_registered_engines_and_outlives_etcd() {
    let Some(mut fleet) = Fleet::start_etcd() else { return };
    let address = address(&fleet);
    let secret = [("KVX_SECRET_FILE", secret().to_str().unwrap())];
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvx"));
    command.args(["proxy", "--port", "0", "--access-log", "off", "--discovery-etcd", &address]);
    command.envs(secret);
    let router = Server::spawn(command).listening();
    assert_eq!(router.get("/ready").0, 503);

    let prefill = engine("kv_producer", &address, &secret);
    let decode = engine("kv_consumer", &address, &secret);
    let unsigned = engine("kv_consumer", &address, &[]);
    let refused = |status: &Value| status["discovery"][0]["refused"]["unsigned"].as_u64();
    let found = status(&router, "both are found, and the unsigned one is refused", |status| {
        up(status) == 2 && refused(status) >= Some(1)
    });
    assert_eq!(found["discovery"][0]["provider"], address.as_str(), "{found:#}");
    assert!(router.metric_of("kvx_proxy_discovery_refused_total", "unsigned") >= 1.0);
    drop(unsigned);

    let leaving = engine("kv_consumer", &address, &secret);
    let known = |status: &Value| status["instances"].as_array().unwrap().len();
    status(&router, "another decode is found", |status| up(status) == 3);
    leaving.signal(Signal::TERM);
    status(&router, "it has left", |status| known(status) == 2);
    assert!(leaving.ended().0.success());

    let answers = |what: &str| {
        let before = prefill.metric("vllm:request_success_total");
        let prompt = prompt(before as u64, 40);
        let answer = router.tokens(&prompt, 8, None);
        assert_same(&answer, &decode.tokens(&prompt, 8, None), what);
        assert_eq!(prefill.metric("vllm:request_success_total"), before + 1.0, "{what}");
    };
    answers("both are registered");
    fleet.kill();
    status(&router, "etcd's absence is seen", |status| status["discovery"][0]["failing"] == true);
    answers("etcd is away");
    fleet.restart(false);
    // The engines register again, under the same keys.
    status(&router, "etcd is back", |status| status["discovery"][0]["failing"] == false);
    let until = Instant::now() + LIMIT;
    while fleet.keys() < 2 {
        assert!(Instant::now() < until, "the engines have not registered again");
        std::thread::sleep(Duration::from_millis(20)); // between polls
    }
    answers("etcd has lost its data");
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
        (&["--register", "etcd+https://127.0.0.1:1/f"], "this build has none"),
    ] {
        let model = model(&["--arch", "llama"]);
        let args = ServerArgs { arguments, ..ServerArgs::default() };
        let (status, said) = Server::try_start(&model, args).ended();
        assert_eq!(status.code(), Some(1), "{said}");
        assert!(said.contains(words), "{words}\n{said}");
    }
}
