//! Tests with a fake API server: LIST, WATCH and their faults, but no cluster.

use std::path::PathBuf;

use kvx_testkit::{FakeKubernetes, WatchEnd, ready_pod, unique};
use serde_json::json;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::*;
use crate::discovery::status::DiscoveryStatus;
use crate::discovery::{Discovered, NamedReport, Report};

/// The timeout of every wait.
const CUT_OFF: Duration = Duration::from_secs(20);
/// A provider that sends only changes, and lists only when it must.
const ONLY_CHANGES: Times = Times {
    resend: Duration::from_secs(60),
    silence: CUT_OFF,
    relist: Duration::from_secs(60),
    at_once: CUT_OFF,
    ..TIMES
};

const BY_LABELS: &str = "prefill_selector = ['app=vllm', 'tier=prefill']\n\
                         decode_selector = ['app=vllm', 'tier=decode']";

/// A provider, and the fake API server that it follows.
struct Followed {
    fake: FakeKubernetes,
    reports: mpsc::Receiver<NamedReport>,
    _task: JoinSet<()>,
}

impl Followed {
    fn start(fake: FakeKubernetes, settings: &str, times: Times) -> Self {
        let text = format!(
            "[discovery.kubernetes]\nnamespace = 'llm'\napi = '{}'\n{settings}",
            fake.url()
        );
        let settings = Setup::from_toml(&text).unwrap().discovery.kubernetes.unwrap();
        let follower = Follower::new(Access::new(&settings).unwrap(), settings, times).unwrap();
        let (sender, reports) = mpsc::channel(16);
        let mut task = JoinSet::new();
        let (name, status) = (NAME.into(), DiscoveryStatus::default());
        task.spawn(follower.run(Reports { name, start: 1, sender, status }));
        Followed { fake, reports, _task: task }
    }

    async fn next(&mut self, what: &str) -> Report {
        let report = timeout(CUT_OFF, self.reports.recv()).await;
        report.unwrap_or_else(|_| panic!("no report: {what}")).unwrap().report
    }

    /// Waits for a list with these instances. Fails if one of `always` is not in a list meanwhile.
    async fn wait_for(&mut self, wanted: &[&str], always: &[&str]) -> Vec<Discovered> {
        loop {
            let list = match self.next(&format!("{wanted:?}")).await {
                Ok(list) => list,
                Err(_) => continue, // the earlier list stays
            };
            let found = described(&list);
            if found == wanted {
                return list;
            }
            for one in always {
                assert!(found.iter().any(|found| found == one), "{one} is not in {found:?}");
            }
        }
    }

    async fn wait_for_error(&mut self, words: &str) {
        loop {
            match self.next(words).await {
                Err(why) if why.contains(words) => return,
                _ => {}
            }
        }
    }

    /// Returns the number of lists and of watches that were requested.
    fn requests(&self) -> (usize, usize) {
        let requests = self.fake.requests();
        let watches = requests.iter().filter(|target| target.contains("watch=1")).count();
        (requests.len() - watches, watches)
    }

    async fn wait_for_watches(&self, count: usize) {
        let until = Instant::now() + CUT_OFF;
        while self.requests().1 < count {
            assert!(Instant::now() < until, "{:?}", self.fake.requests());
            sleep(Duration::from_millis(5)).await; // between polls
        }
    }
}

/// Describes instances as `identity role address`, and marks those that drain.
fn described(list: &[Discovered]) -> Vec<String> {
    let one = |one: &Discovered| {
        let drains = if one.setup.draining { " drains" } else { "" };
        format!("{} {} {}{drains}", one.identity, one.role.as_str(), one.setup.name())
    };
    let mut all: Vec<_> = list.iter().map(one).collect();
    all.sort();
    all
}

fn pod(name: &str, uid: &str, address: &str, tier: &str) -> serde_json::Value {
    ready_pod(name, uid, address, &[("app", "vllm"), ("tier", tier)])
}

fn fake() -> FakeKubernetes {
    let fake = FakeKubernetes::start().unwrap();
    fake.set(pod("p-0", "u1", "10.0.0.1", "prefill"));
    fake.set(pod("d-0", "u2", "10.0.0.2", "decode"));
    fake.set(ready_pod("other", "u3", "10.0.0.3", &[("app", "web")]));
    fake
}

const P: &str = "u1:8000 prefill 10.0.0.1:8000";
const D: &str = "u2:8000 decode 10.0.0.2:8000";

#[tokio::test]
async fn pods_become_ready_drain_and_go() {
    let mut followed = Followed::start(fake(), BY_LABELS, ONLY_CHANGES);
    followed.wait_for(&[P, D], &[]).await;
    let requests = followed.fake.requests();
    let selector = "&labelSelector=app%3Dvllm%2Ctier%20in%20%28decode%2Cprefill%29";
    assert!(requests.iter().all(|target| target.ends_with(selector)), "{requests:?}");

    // A pod that starts is used once it is ready.
    let mut new = pod("d-1", "u4", "10.0.0.4", "decode");
    new["status"]["conditions"][1]["status"] = "False".into();
    followed.fake.set(new);
    let ready = |value: &'static str| {
        move |pod: &mut serde_json::Value| pod["status"]["conditions"][1]["status"] = value.into()
    };
    followed.fake.edit("d-1", ready("True"));
    let d1 = "u4:8000 decode 10.0.0.4:8000";
    followed.wait_for(&[P, D, d1], &[P, D]).await;

    // One that is not ready any more keeps what it does.
    followed.fake.edit("d-1", ready("False"));
    followed.wait_for(&[P, D, "u4:8000 decode 10.0.0.4:8000 drains"], &[P, D]).await;
    followed.fake.edit("d-1", ready("True"));
    followed.wait_for(&[P, D, d1], &[P, D]).await;

    // Terminating, then gone.
    followed.fake.edit("d-1", |pod| {
        pod["metadata"]["deletionTimestamp"] = "2026-11-30T00:00:00Z".into();
    });
    followed.wait_for(&[P, D, "u4:8000 decode 10.0.0.4:8000 drains"], &[P, D]).await;
    followed.fake.delete("d-1");
    followed.wait_for(&[P, D], &[P, D]).await;

    // Another pod of the same name and address.
    followed.fake.delete("p-0");
    followed.fake.set(pod("p-0", "u5", "10.0.0.1", "prefill"));
    followed.wait_for(&[D, "u5:8000 prefill 10.0.0.1:8000"], &[D]).await;

    // A label that moves a pod to another role, and one that unselects it.
    followed.fake.edit("p-0", |pod| pod["metadata"]["labels"]["tier"] = "decode".into());
    followed.wait_for(&[D, "u5:8000 decode 10.0.0.1:8000"], &[D]).await;
    followed.fake.edit("p-0", |pod| pod["metadata"]["labels"]["app"] = "web".into());
    followed.wait_for(&[D], &[D]).await;
    // Completed pods keep an address that may be another pod's.
    followed.fake.edit("d-0", |pod| pod["status"]["phase"] = "Succeeded".into());
    followed.wait_for(&[], &[]).await;
    assert_eq!(followed.requests(), (1, 1), "the watch says it all");
}

#[tokio::test]
async fn long_lists_have_pages() {
    let fake = FakeKubernetes::start().unwrap();
    for number in 0..1200 {
        let address = format!("10.0.{}.{}", number >> 8, number & 255);
        fake.set(pod(&format!("d-{number:04}"), &format!("u{number}"), &address, "decode"));
    }
    // The first list expires while it is read.
    fake.expire_pages(1);
    let mut followed = Followed::start(fake, BY_LABELS, ONLY_CHANGES);
    let list = followed.next("a list").await;
    let list = match list {
        Ok(list) => list,
        Err(why) => {
            assert!(why.contains("long enough"), "{why}");
            followed.next("a list").await.unwrap()
        }
    };
    assert_eq!(list.len(), 1200);
    let requests = followed.fake.requests();
    let is_page = |target: &&String| target.contains("limit=500") && target.contains("&continue=");
    assert_eq!(requests.iter().filter(is_page).count(), 3, "{requests:?}");
}

#[tokio::test]
async fn expired_watches_are_replaced_by_lists_while_the_set_stays() {
    let mut followed = Followed::start(fake(), BY_LABELS, ONLY_CHANGES);
    followed.wait_for(&[P, D], &[]).await;
    followed.wait_for_watches(1).await;

    // 410 as an event.
    followed.fake.expire();
    followed.wait_for_watches(2).await;
    assert_eq!(followed.requests(), (2, 2));
    followed.fake.set(pod("d-1", "u4", "10.0.0.4", "decode"));
    followed.wait_for(&[P, D, "u4:8000 decode 10.0.0.4:8000"], &[P, D]).await;

    // 410 as a status, after a watch that has missed a removal.
    followed.fake.end_watches(WatchEnd::Silent);
    followed.fake.delete("d-1");
    followed.fake.forget();
    followed.fake.end_watches(WatchEnd::Cut);
    followed.wait_for(&[P, D], &[P, D]).await;
    followed.wait_for_watches(4).await;
    assert_eq!(followed.requests(), (3, 4));
}

/// Ends the watch after which a pod appears, and expects no other list than the first.
async fn continues_after(end: WatchEnd, silence: Duration) {
    let times = Times { silence, at_once: Duration::ZERO, ..ONLY_CHANGES };
    let mut followed = Followed::start(fake(), BY_LABELS, times);
    followed.wait_for(&[P, D], &[]).await;
    followed.wait_for_watches(1).await;
    followed.fake.bookmark();
    followed.fake.end_watches(end);
    followed.fake.set(pod("d-1", "u4", "10.0.0.4", "decode"));
    followed.wait_for(&[P, D, "u4:8000 decode 10.0.0.4:8000"], &[P, D]).await;
    let (lists, watches) = followed.requests();
    assert!(lists == 1 && watches > 1, "{:?}", followed.fake.requests());
}

#[tokio::test]
async fn watches_that_end_are_cut_or_stay_silent_continue_without_a_list() {
    continues_after(WatchEnd::Closed, CUT_OFF).await;
    continues_after(WatchEnd::Cut, CUT_OFF).await;
    continues_after(WatchEnd::Silent, Duration::from_millis(500)).await;
}

#[tokio::test]
async fn a_watch_that_ends_at_once_becomes_a_list() {
    let mut followed = Followed::start(fake(), BY_LABELS, ONLY_CHANGES);
    followed.wait_for(&[P, D], &[]).await;
    followed.wait_for_watches(1).await;
    followed.fake.end_watches(WatchEnd::Cut);
    followed.wait_for_error("ends at once").await;
    followed.wait_for(&[P, D], &[]).await;
    followed.wait_for_watches(2).await;
    assert_eq!(followed.requests(), (2, 2));
}

#[tokio::test]
async fn failures_are_reported_and_end() {
    let mut followed = Followed::start(fake(), BY_LABELS, ONLY_CHANGES);
    followed.wait_for(&[P, D], &[]).await;
    followed.wait_for_watches(1).await;
    for (status, words) in [
        (403, "get, list and watch of pods"),
        (401, "set a token"),
        (500, "status 500: the test refuses it"),
    ] {
        followed.fake.refuse(Some(status));
        followed.fake.end_watches(WatchEnd::Closed);
        followed.wait_for_error(words).await;
    }
    followed.fake.refuse(None);
    followed.wait_for(&[P, D], &[P, D]).await;
    // Without pods the list is empty, which the reconciler does not believe at once.
    for name in ["p-0", "d-0"] {
        followed.fake.delete(name);
    }
    followed.wait_for(&[], &[]).await;
}

#[tokio::test]
async fn lists_are_repeated_and_read_again() {
    let times = Times {
        resend: Duration::from_millis(50),
        relist: Duration::from_millis(200),
        ..ONLY_CHANGES
    };
    let mut followed = Followed::start(fake(), BY_LABELS, times);
    for _ in 0..20 {
        followed.wait_for(&[P, D], &[P, D]).await;
    }
    assert!(followed.requests().0 > 1, "{:?}", followed.fake.requests());
}

/// A file that is removed at the end.
struct Token(PathBuf);

impl Token {
    fn new(text: &str) -> Self {
        let token = Token(std::env::temp_dir().join(unique("kvx-token")));
        token.write(text);
        token
    }

    fn write(&self, text: &str) {
        std::fs::write(&self.0, text).unwrap();
    }
}

impl Drop for Token {
    fn drop(&mut self) {
        std::fs::remove_file(&self.0).ok(); // an error: it is gone
    }
}

#[tokio::test]
async fn a_token_is_read_again_after_it_has_changed() {
    let (fake, token) = (fake(), Token::new("first"));
    fake.require_token("first");
    let settings = format!("token = '{}'\n{BY_LABELS}", token.0.display());
    let mut followed = Followed::start(fake, &settings, ONLY_CHANGES);
    followed.wait_for(&[P, D], &[]).await;
    followed.wait_for_watches(1).await;
    followed.fake.require_token("second");
    followed.fake.end_watches(WatchEnd::Closed);
    followed.wait_for_error("status 401: Unauthorized").await;
    token.write("second\n");
    followed.wait_for(&[P, D], &[P, D]).await;
}

#[tokio::test]
async fn an_answer_that_is_no_list_is_a_failure() {
    let fake = fake();
    let settings = "namespace = 'other'\n";
    let text = format!("[discovery.kubernetes]\napi = '{}'\n{settings}", fake.url());
    let settings = Setup::from_toml(&text).unwrap().discovery.kubernetes.unwrap();
    let access = Access::new(&settings).unwrap();
    let api = Api::new(&access, "").unwrap();
    let error = api.list(|_| Ok(())).await.unwrap_err().text();
    assert!(error.contains("is it the URL of an API server?"), "{error}");
    for (answer, words) in [
        (json!({}), "not a list of pods"),
        (json!({"kind": "PodList", "metadata": {}, "items": []}), "no resourceVersion"),
        (json!({"kind": "Status", "metadata": {"resourceVersion": "1"}}), "but Status"),
    ] {
        let why = pods::Page::parse(answer.to_string().as_bytes()).map(|_| ()).unwrap_err();
        assert!(why.contains(words), "{answer}: {why}");
    }
}

/// Puts TLS in front of a server. Clients need the certificate of `localhost` too.
#[cfg(feature = "tls")]
async fn tls_in_front(server: std::net::SocketAddr) -> (u16, JoinSet<()>) {
    use tokio::io::copy_bidirectional;
    use tokio::net::{TcpListener, TcpStream};
    use tokio_rustls::TlsAcceptor;
    use tokio_rustls::rustls::crypto::ring;
    use tokio_rustls::rustls::pki_types::pem::PemObject as _;
    use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
    use tokio_rustls::rustls::server::WebPkiClientVerifier;
    use tokio_rustls::rustls::{RootCertStore, ServerConfig};

    let provider = Arc::new(ring::default_provider());
    let certificate = CertificateDer::from_pem_file(CERT).unwrap();
    let mut roots = RootCertStore::empty();
    roots.add(certificate.clone()).unwrap();
    let verifier = WebPkiClientVerifier::builder_with_provider(roots.into(), provider.clone());
    let config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_client_cert_verifier(verifier.build().unwrap())
        .with_single_cert(vec![certificate], PrivateKeyDer::from_pem_file(KEY).unwrap())
        .unwrap();
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        loop {
            let (client, _) = listener.accept().await.unwrap();
            let acceptor = acceptor.clone();
            tokio::spawn(async move {
                // An error: a client without a certificate, or one that has gone.
                if let Ok(mut client) = acceptor.accept(client).await {
                    let mut server = TcpStream::connect(server).await.unwrap();
                    copy_bidirectional(&mut client, &mut server).await.ok();
                }
            });
        }
    });
    (port, tasks)
}

/// The certificate of `localhost`, and its key.
#[cfg(feature = "tls")]
const CERT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/it/testdata/cert.pem");
#[cfg(feature = "tls")]
const KEY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/it/testdata/key.pem");

#[cfg(feature = "tls")]
#[tokio::test]
async fn https_needs_an_authority_and_may_need_a_certificate() {
    let (fake, token) = (fake(), Token::new("t"));
    fake.require_token("t");
    let (port, _tls) = tls_in_front(fake.address()).await;
    let base = format!(
        "[discovery.kubernetes]\nnamespace = 'llm'\napi = 'https://localhost:{port}'\n\
         token = '{}'\n",
        token.0.display()
    );
    let list = async |files: &str| {
        let setup = Setup::from_toml(&format!("{base}{files}")).unwrap();
        let access = Access::new(&setup.discovery.kubernetes.unwrap()).unwrap();
        let mut count = 0;
        let counted = |_: &pods::Pod| {
            count += 1;
            Ok(())
        };
        Api::new(&access, "app=vllm")?.list(counted).await.map_err(ApiError::text)?;
        Ok::<_, String>(count)
    };
    let (ca, own) = (format!("ca = '{CERT}'\n"), format!("certificate = '{CERT}'\nkey = '{KEY}'"));
    assert_eq!(list(&format!("{ca}{own}")).await, Ok(2));
    let error = list(&own).await.unwrap_err();
    assert!(error.contains("certificate"), "the system does not trust it: {error}");
    let error = list(&ca).await.unwrap_err();
    assert!(error.contains("https://localhost"), "the server wants a certificate: {error}");
    for (files, words) in [
        ("ca = '/nowhere/ca.crt'", "/nowhere/ca.crt"),
        (&*format!("{ca}certificate = '/nowhere/c'\nkey = '{KEY}'"), "/nowhere/c"),
        (&*format!("ca = '{KEY}'"), "has no certificate"),
    ] {
        let error = list(files).await.unwrap_err();
        assert!(error.contains(words), "{files}: {error}");
    }
}

/// Returns the instances of one pod, described.
fn of(settings: &str, pod: serde_json::Value) -> Vec<String> {
    described(&listed(settings, &pod))
}

fn listed(settings: &str, pod: &serde_json::Value) -> Vec<Discovered> {
    let setup = Setup::from_toml(&format!("[discovery.kubernetes]\n{settings}")).unwrap();
    let mut pods = Pods::new(Arc::new(setup.discovery.kubernetes.unwrap())).unwrap();
    let line = json!({"type": "ADDED", "object": pod}).to_string();
    let line = line.replacen("\"uid\"", "\"resourceVersion\":\"7\",\"uid\"", 1);
    let Ok(Event::Changed(pod, version)) = Event::parse(line.as_bytes()) else {
        panic!("not a change: {line}")
    };
    assert_eq!(version, "7");
    pods.apply(&pod).unwrap();
    pods.instances()
}

#[test]
fn labels_name_the_roles() {
    let at = |labels: &[(&str, &str)]| ready_pod("n", "u", "10.0.0.1", labels);
    let (prefill, decode) = (["u:8000 prefill 10.0.0.1:8000"], ["u:8000 decode 10.0.0.1:8000"]);
    for (role, wanted) in [
        ("prefill", &prefill[..]),
        ("encode-prefill", &prefill),
        ("decode", &decode),
        ("prefill-decode", &decode),
        ("encode-prefill-decode", &decode),
        ("both", &decode),
        ("encode", &[]),
    ] {
        assert_eq!(of("", at(&[("llm-d.ai/role", role)])), wanted, "{role}");
        assert_eq!(of("selector = ['a=b']", at(&[("llm-d.ai/role", role)])), [""; 0]);
        let labels = at(&[("llm-d.ai/role", role), ("a", "b")]);
        assert_eq!(of("selector = ['a=b']", labels), wanted, "{role}");
    }
    assert_eq!(of("", at(&[("a", "b")])), [""; 0]);
    assert_eq!(of("selector = ['a=b']", at(&[("a", "b")])), decode, "as for llm-d's router");
    let both = "prefill_selector = ['a=b']\ndecode_selector = ['a=b', 'c=d']";
    assert_eq!(of(both, at(&[("a", "b")])), prefill);
    let found = of(both, at(&[("a", "b"), ("c", "d")]));
    assert_eq!(found, [decode[0], prefill[0]]);
    let settings = |text: &str| {
        let setup = Setup::from_toml(&format!("[discovery.kubernetes]\n{text}")).unwrap();
        setup.discovery.kubernetes.unwrap().query()
    };
    let roles = "both,decode,encode-prefill,encode-prefill-decode,prefill,prefill-decode";
    assert_eq!(settings(""), format!("llm-d.ai/role in ({roles})"));
    assert_eq!(settings("selector = ['a=b']"), "a=b");
    assert_eq!(settings(both), "a=b");
    assert_eq!(settings("decode_selector = ['a=b', 'c=d']"), "a=b,c=d");
    let apart =
        "selector = ['x=y']\nprefill_selector = ['a=b', 'r=p']\ndecode_selector = ['a=b', 'r=d']";
    assert_eq!(settings(apart), "a=b,r in (d,p),x=y");
}

#[test]
fn annotations_name_ports() {
    let at = |annotations: serde_json::Value| {
        let mut pod = ready_pod("n", "u", "fd00::1", &[("llm-d.ai/role", "prefill")]);
        pod["metadata"]["annotations"] = annotations;
        pod
    };
    let settings = "port = 9000\nevents = 'tcp://*:5557'";
    let ports = |annotations| -> Vec<_> {
        let found = listed(settings, &at(annotations));
        found.iter().map(|one| (one.setup.name().to_owned(), one.setup.bootstrap_port)).collect()
    };
    let name = |port: u16| format!("[fd00::1]:{port}");
    assert_eq!(ports(json!(null)), [(name(9000), None)]);
    assert_eq!(ports(json!({"sglang.ai/bootstrap-port": "8998"})), [(name(9000), Some(8998))]);
    assert_eq!(ports(json!({"vllm.ai/bootstrap-port": "8999"})), [(name(9000), Some(8999))]);
    assert_eq!(
        ports(json!({"smg.ai/worker-ports": "8000, 8001", "sglang.ai/bootstrap-port": "1"})),
        [(name(8000), Some(1)), (name(8001), Some(1))]
    );
    assert_eq!(
        ports(json!({"llm-d.ai/active-ports": "8000,8001", "vllm.ai/bootstrap-port": "1,2"})),
        [(name(8000), Some(1)), (name(8001), Some(2))]
    );
    for wrong in [
        json!({"sglang.ai/bootstrap-port": "none"}),
        json!({"sglang.ai/bootstrap-port": "1,2"}),
        json!({"smg.ai/worker-ports": ""}),
        json!({"smg.ai/worker-ports": "0"}),
        json!({"smg.ai/worker-ports": "8000,8000"}),
        json!({"smg.ai/worker-ports": vec!["1"; 65].join(",")}),
    ] {
        assert_eq!(ports(wrong.clone()), [], "{wrong}");
    }
    let events = |annotations| listed(settings, &at(annotations))[0].setup.events.clone();
    assert_eq!(events(json!({})).unwrap().endpoint, ("fd00::1".to_owned(), 5557));
    assert_eq!(events(json!({"smg.ai/worker-ports": "1,2"})), None);
}

#[test]
fn more_pods_than_the_router_may_have_are_an_error() {
    let setup = Setup::from_toml("[discovery.kubernetes]").unwrap();
    let mut pods = Pods::new(Arc::new(setup.discovery.kubernetes.unwrap())).unwrap();
    let mut added = 0;
    let why = loop {
        let labels = [("llm-d.ai/role", "decode")];
        let pod = ready_pod("n", &added.to_string(), "10.0.0.1", &labels);
        if let Err(why) = pods.apply(&serde_json::from_value(pod).unwrap()) {
            break why;
        }
        added += 1;
    };
    assert!(added == 4096 && why.contains("narrow the selectors"), "{added}: {why}");
}
