//! Discovery by DNS, with a real server: `dnsmasq` on a port of its own.

use std::process::{Child, Command, Stdio};
use std::time::Duration;

use hyper::Method;
use kvx_instance::{Instance, Settings, answer_to};
use kvx_testkit::{free_port, kill_after, skip};
use rustix::process::Signal;
use serde_json::Value;

use crate::proxy::client::{CUT_OFF, Call, completion};
use crate::proxy::commands::{kvx_proxy, said};
use crate::proxy::fleet::{Proxy, SetupFile};
use crate::proxy::recipes::COMPLETIONS;

const PROGRAM: &str = "/usr/sbin/dnsmasq";
const NAME: &str = "_http._tcp.p.test";

/// A server for `.test`.
struct Server(Child);

impl Server {
    /// Starts it with SRV records for these instances.
    fn start(port: u16, instances: &[&Instance]) -> Self {
        let mut command = Command::new(PROGRAM);
        command
            .args(["--keep-in-foreground", "--conf-file=/dev/null", "--pid-file=", "--no-resolv"])
            .args(["--no-hosts", "--local=/test/", "--bind-interfaces"])
            .args(["--listen-address=127.0.0.1", &format!("--port={port}")]);
        for one in instances {
            command.arg(format!("--srv-host={NAME},localhost,{}", one.port()));
        }
        let quiet = command.stdin(Stdio::null()).stdout(Stdio::null());
        let server = Server(quiet.spawn().expect("dnsmasq starts"));
        kill_after(&server.0, 2 * CUT_OFF);
        server
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.0.kill().ok(); // an error: it has already exited
        self.0.wait().ok();
    }
}

/// Returns what `/status` says about SRV records.
fn provider(status: &str) -> Value {
    let status: Value = serde_json::from_str(status).unwrap_or_default();
    let all = status["discovery"].as_array().cloned().unwrap_or_default();
    let ours = format!("dnssrv+http://{NAME}");
    all.into_iter().find(|one| one["provider"] == ours.as_str()).unwrap_or_default()
}

/// Returns the names of the prefill instances that are up.
fn prefills(status: &str) -> Vec<String> {
    let status: Value = serde_json::from_str(status).unwrap_or_default();
    let all = status["instances"].as_array().cloned().unwrap_or_default();
    let up = all.iter().filter(|one| one["role"] == "prefill" && one["state"] == "up");
    let mut names: Vec<_> =
        up.map(|one| one["url"].as_str().unwrap_or_default().to_owned()).collect();
    names.sort();
    names
}

pub(crate) async fn follows_a_server_and_survives_its_death() {
    if !std::path::Path::new(PROGRAM).exists() {
        return skip(
            "proxy::discovery::follows_a_server_and_survives_its_death",
            "dnsmasq is not installed",
            "cargo xtask test --install",
        );
    }
    let mut instances = [(); 3].map(|()| Instance::start(Settings::default()));
    let [one, other, decode] = &instances;
    let port = free_port(0).expect("a port is free");
    let text = format!(
        "port = 0\n[discovery]\nevery = \"50ms\"\nresolvers = [\"127.0.0.1:{port}\"]\n[[pool]]\n\
         prefill = [\"dnssrv+http://{NAME}\"]\ndecode = [\"dns+http://localhost:{}\"]\n",
        decode.port()
    );
    let file = SetupFile::new(&text);
    let url = |instance: &Instance| format!("http://localhost:{}", instance.port());
    let sorted = |mut urls: Vec<String>| {
        urls.sort();
        urls
    };

    // Without a server the router finds no prefill. The decode does not compute prompts instead.
    let proxy = Proxy::start(&["--config", file.path()], &[("ADMIN_API_KEY", "k")]);
    let failing = |_, text: &str| {
        let error = provider(text)["last_error"].as_str().unwrap_or_default().to_owned();
        error.contains(&format!("resolver 127.0.0.1:{port}"))
    };
    proxy.wait_until("/status", "the failure is shown", failing).await;
    let decode_is_up = |_, text: &str| text.contains("\"discovered_by\":\"dns+http://localhost");
    proxy.wait_until("/status", "the decode is found", decode_is_up).await;
    let answer = async |prompt: &str| {
        Call::post(proxy.port, COMPLETIONS, &completion(prompt, 4)).send().await
    };
    let refused = answer("too early").await;
    assert_eq!(refused.status, 503, "{}", refused.text());

    // Both instances appear.
    let server = Server::start(port, &[one, other]);
    let both = sorted(vec![url(one), url(other)]);
    proxy.wait_until("/status", "both appear", |_, text| prefills(text) == both).await;
    for prompt in ["one", "two", "three", "four"] {
        let answer = answer(prompt).await;
        assert_eq!(answer.header("x-kvx-route"), "disaggregated");
        assert_eq!(answer.texts(), [answer_to(prompt, 4)]);
    }
    let found = proxy.metric("kvx_proxy_discovery_instances", NAME).await;
    assert_eq!(found, 2.0);
    let checked = kvx_proxy(&["--config", file.path(), "--check"]);
    let lines = said(&checked);
    assert_eq!(checked.status.code(), Some(0), "{lines}");
    assert!(lines.contains(&format!("dnssrv+http://{NAME} finds 2 instances now")), "{lines}");
    let name = format!("prefill localhost:{} is up", one.port());
    assert!(lines.contains(&name), "{lines}");
    let body = serde_json::json!({"role": "prefill", "url": url(one)});
    let remove = Call::new(proxy.port, Method::DELETE, "/instances").header("x-api-key", "k");
    let remove = remove.body(body.to_string()).send().await;
    assert!(remove.status == 409 && remove.text().contains(NAME), "{}", remove.text());

    // One disappears.
    drop(server);
    let server = Server::start(port, &[other]);
    let left = [url(other)];
    proxy.wait_until("/status", "one disappears", |_, text| prefills(text) == left).await;

    // NXDOMAIN, several times in a row.
    drop(server);
    let server = Server::start(port, &[]);
    let none = |_, text: &str| prefills(text).is_empty();
    proxy.wait_until("/status", "none is left after NXDOMAIN", none).await;
    assert_eq!(answer("none").await.status, 503);

    // The fleet outlives its server, also across a reload.
    drop(server);
    let server = Server::start(port, &[one]);
    let left = [url(one)];
    proxy.wait_until("/status", "one is back", |_, text| prefills(text) == left).await;
    drop(server);
    for reload in [false, true] {
        if reload {
            proxy.signal(Signal::HUP);
        }
        let status = Call::get(proxy.port, "/status").send().await.text();
        let failures = provider(&status)["failures"].as_u64().expect("they are counted");
        let more = |_, text: &str| provider(text)["failures"].as_u64() >= Some(failures + 5);
        proxy.wait_until("/status", "queries fail", more).await;
        let stays = |_, text: &str| prefills(text) == left;
        proxy.wait_until("/status", "the instance stays", stays).await;
        assert_eq!(answer("still served").await.texts(), [answer_to("still served", 4)]);
    }
    let end = std::time::Instant::now() + CUT_OFF;
    while !proxy.errors().contains("reloaded the configuration") {
        assert!(std::time::Instant::now() < end, "{}", proxy.errors());
        tokio::time::sleep(Duration::from_millis(10)).await; // between polls
    }
    drop(proxy);
    instances.iter_mut().for_each(|one| assert_eq!(one.violations(), Vec::<String>::new()));
}
