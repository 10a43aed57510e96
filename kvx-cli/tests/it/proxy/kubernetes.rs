//! Discovery of pods, with a fake API server whose pods are instances of this test. No cluster.

use kvx_instance::{Instance, Settings, answer_to};
use kvx_testkit::{FakeKubernetes, WatchEnd, ready_pod};
use serde_json::Value;

use crate::proxy::client::{Call, completion};
use crate::proxy::commands::{kvx_proxy, said};
use crate::proxy::fleet::{Proxy, SetupFile};
use crate::proxy::recipes::COMPLETIONS;

/// Returns a ready pod on this host with an instance.
fn pod(name: &str, uid: &str, instance: &Instance, role: &str) -> Value {
    let mut pod = ready_pod(name, uid, "127.0.0.1", &[("app", "vllm"), ("role", role)]);
    let port = instance.port().to_string();
    pod["metadata"]["annotations"] = serde_json::json!({"smg.ai/worker-ports": port});
    pod
}

/// Returns the role, URL and state of the discovered instances, in order.
fn found(status: &str) -> Vec<String> {
    let status: Value = serde_json::from_str(status).unwrap_or_default();
    let all = status["instances"].as_array().cloned().unwrap_or_default();
    let text = |one: &Value| one.as_str().unwrap_or_default().to_owned();
    let found = all
        .iter()
        .filter(|one| one["discovered_by"] == "kubernetes")
        .map(|one| format!("{} {} {}", text(&one["role"]), text(&one["url"]), text(&one["state"])));
    let mut found: Vec<_> = found.collect();
    found.sort();
    found
}

fn provider(status: &str) -> Value {
    let status: Value = serde_json::from_str(status).unwrap_or_default();
    let all = status["discovery"].as_array().cloned().unwrap_or_default();
    all.into_iter().find(|one| one["provider"] == "kubernetes").unwrap_or_default()
}

pub(crate) async fn pods_serve_drain_and_go_by_the_flags_of_sglangs_router() {
    let mut instances = [(); 3].map(|()| Instance::start(Settings::default()));
    let [prefill, decode, other] = &instances;
    let fake = FakeKubernetes::start().expect("a port is free");
    fake.set(pod("p-0", "u1", prefill, "prefill"));
    fake.set(pod("d-0", "u2", decode, "decode"));
    let file =
        SetupFile::new(&format!("port = 0\n[discovery.kubernetes]\napi = \"{}\"\n", fake.url()));
    let flags = [
        "--config",
        file.path(),
        "--service-discovery",
        "--service-discovery-namespace",
        "llm",
        "--prefill-selector",
        "app=vllm",
        "role=prefill",
        "--decode-selector",
        "app=vllm",
        "role=decode",
    ];
    let checked = kvx_proxy(&[&flags[..], &["--check"]].concat());
    let lines = said(&checked);
    assert_eq!(checked.status.code(), Some(0), "{lines}");
    assert!(lines.contains("kubernetes finds 2 instances now"), "{lines}");
    assert!(lines.contains("namespace llm with app=vllm,role=prefill are prefill"), "{lines}");

    let proxy = Proxy::start(&flags, &[]);
    let line = |role: &str, one: &Instance, state: &str| format!("{role} {} {state}", one.url());
    let (p, d) = (line("prefill", prefill, "up"), line("decode", decode, "up"));
    let shows = async |what: &str, mut wanted: Vec<String>| {
        wanted.sort();
        proxy.wait_until("/status", what, |_, text| found(text) == wanted).await;
    };
    let serves = async |prompt: &str| {
        let answer = Call::post(proxy.port, COMPLETIONS, &completion(prompt, 4)).send().await;
        assert_eq!(answer.header("x-kvx-route"), "disaggregated", "{}", answer.text());
        assert_eq!(answer.texts(), [answer_to(prompt, 4)]);
    };
    shows("both are found", vec![p.clone(), d.clone()]).await;
    serves("two pods").await;

    // A rolling update of the decode: the new pod is ready, the old one ends.
    fake.set(pod("d-1", "u3", other, "decode"));
    let new = line("decode", other, "up");
    shows("the new one is found", vec![p.clone(), d.clone(), new.clone()]).await;
    fake.edit("d-0", |pod| pod["metadata"]["deletionTimestamp"] = "2026-11-30T00:00:00Z".into());
    let ends = line("decode", decode, "draining");
    shows("the old one drains", vec![p.clone(), ends, new.clone()]).await;
    serves("while one ends").await;
    fake.delete("d-0");
    shows("the old one is gone", vec![p.clone(), new.clone()]).await;

    // Another pod of the same name and address is checked anew.
    fake.delete("p-0");
    shows("no prefill is left", vec![new.clone()]).await;
    let refused = Call::post(proxy.port, COMPLETIONS, &completion("none", 4)).send().await;
    assert_eq!(refused.status, 503, "{}", refused.text());
    fake.set(pod("p-0", "u4", prefill, "prefill"));
    shows("it is back", vec![p.clone(), new.clone()]).await;
    serves("a new pod").await;

    // The fleet outlives its API server.
    fake.refuse(Some(503));
    fake.end_watches(WatchEnd::Cut);
    let failing = |_, text: &str| provider(text)["failures"].as_u64() >= Some(3);
    proxy.wait_until("/status", "failures are counted", failing).await;
    shows("the pods stay", vec![p, new]).await;
    serves("without an API server").await;
    assert_eq!(proxy.metric("kvx_proxy_discovery_instances", "kubernetes").await, 2.0);
    drop(proxy);
    instances.iter_mut().for_each(|one| assert_eq!(one.violations(), Vec::<String>::new()));
}

pub(crate) async fn without_a_pod_it_says_what_to_set() {
    let file = SetupFile::new("port = 0\n[discovery.kubernetes]\napi = \"http://127.0.0.1:1\"\n");
    for check in [&[][..], &["--check"]] {
        let output = kvx_proxy(&[&["--config", file.path()], check].concat());
        assert_eq!(output.status.code(), Some(1), "{}", said(&output));
        assert!(said(&output).contains("--service-discovery-namespace"), "{}", said(&output));
    }
}
