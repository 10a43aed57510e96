//! Blocks whose decode was given up are free at once, and no block is freed while it is read.

use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use kvx_testkit::test;
use rustix::process::Signal;
use serde_json::json;

use crate::proxy::faults::Deaf;
use crate::serve::hosts::secret;
use crate::serve::ids;
use crate::serve::server::{LIMIT, Server, ServerArgs, greedy, model, prompt};

/// The model, whose heads two ranks can share.
const SHAPE: &[&str] = &["--arch", "llama", "--kv-heads", "2"];
/// The variable from which engines and routers read the secret.
const SECRET: &str = "KVX_SECRET_FILE";
/// The time within which blocks are free, on a loaded machine. Their lease is far longer.
const SOON: Duration = Duration::from_secs(5);
const LEASE: u64 = 60;

/// Starts a server whose blocks stay for [`LEASE`] unless they are released.
fn engine(backend: &str, arguments: &[&str], secret: Option<&Path>) -> Server {
    let extra = json!({"backends": [backend], "kv_lease_duration": LEASE});
    let fields = json!({"kv_load_failure_policy": "fail", "kv_connector_extra_config": extra});
    let secret = secret.map(|file| (SECRET, file.to_str().unwrap()));
    let told = ServerArgs { arguments, variables: secret.as_slice() };
    Server::configured(&model(SHAPE), backend, &fields, told)
}

/// Starts a router with these lines in its file.
fn router(prefill: &Server, decodes: &[String], lines: &str, secret: Option<&Path>) -> Server {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!(
        "releases-{}-{}.toml",
        std::process::id(),
        COUNT.fetch_add(1, Relaxed)
    ));
    let setup = format!(
        "port = 0\naccess_log = 'off'\n{lines}\n[[pool]]\nconnector = 'NixlConnector'\n\
         prefill = ['http://127.0.0.1:{}']\ndecode = {decodes:?}\n",
        prefill.port
    );
    std::fs::write(&file, setup).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvx"));
    command.args(["proxy", "--config"]).arg(&file);
    command.envs(secret.map(|file| (SECRET, file)));
    let router = Server::spawn(command).listening();
    router.until("kvx_proxy_instance_up", LIMIT, |up| up == (1 + decodes.len()) as f64);
    std::fs::remove_file(file).unwrap();
    router
}

fn released(router: &Server, result: &str) -> f64 {
    router.metric_of("kvx_proxy_releases_total", &format!("\"{result}\""))
}

/// Waits until this many releases have ended so.
fn until_released(router: &Server, result: &str, count: f64) {
    let until = Instant::now() + LIMIT;
    while released(router, result) != count {
        assert!(Instant::now() < until, "{count} {result}: {}", router.get("/status").1);
        std::thread::sleep(Duration::from_millis(20)); // between polls
    }
}

/// Lets a client leave between the legs, and waits until the router and the prefill are done with it.
/// Returns the time until the prefill keeps no blocks.
fn leave(router: &Server, prefill: &Server, at: u64) -> Duration {
    let client = router.send("POST", "/v1/completions", Some(&greedy(&prompt(at, 60), 6)));
    prefill.until("kvx_blocks_kept", LIMIT, |kept| kept > 0.0);
    let ended = |legs| legs == (at + 1) as f64;
    let until = Instant::now() + LIMIT;
    while !ended(router.metric_of("kvx_proxy_legs_total", "leg=\"prefill\",outcome=\"ok\"")) {
        assert!(Instant::now() < until, "the router has the prefill's answer");
    }
    let left = Instant::now();
    drop(client);
    prefill.keeps_nothing(SOON);
    left.elapsed()
}

fn leaves_no_blocks(backend: &'static str, arguments: &'static [&'static str], guarded: bool) {
    let secret = guarded.then(secret);
    crate::proxy::run(move || async move {
        let mut deaf = Deaf::start();
        let prefill = engine(backend, arguments, secret);
        let router = router(&prefill, &[deaf.url()], "", secret);
        deaf.take_none().await;
        let mut times: Vec<_> = (0..9).map(|at| leave(&router, &prefill, at)).collect();
        times.sort();
        println!("over {backend}: {:?}, at most {:?}", times[times.len() / 2], times.last());
        // The router counts a release after the prefill has received it.
        until_released(&router, "sent", 9.0);
        let (status, text) = router.get("/status");
        assert!(status == 200 && text.contains(r#""by":"notification""#), "{text}");
        assert_eq!(prefill.metric("vllm:nixl_num_kv_expired_reqs"), 0.0, "no lease has ended");
    })
    .unwrap();
}

#[test]
fn a_client_that_leaves_between_the_legs_leaves_no_blocks() {
    leaves_no_blocks("TCP", &[], false);
}

#[test]
fn with_a_secret_a_client_that_leaves_between_the_legs_leaves_no_blocks() {
    leaves_no_blocks("SHM", &[], true);
}

/// Each rank is a separate process, and keeps a part of the blocks.
#[test]
fn all_ranks_release_their_part_of_the_blocks() {
    leaves_no_blocks("TCP", &["--tensor-parallel-size", "2"], true);
}

#[test]
fn a_router_with_another_secret_or_none_releases_nothing() {
    let other = Path::new(env!("CARGO_TARGET_TMPDIR"))
        .join(format!("releases-{}.secret", std::process::id()));
    let _ = std::fs::remove_file(&other);
    kvx::Secret::create(&other).unwrap();
    let prefill = engine("TCP", &[], Some(secret()));
    for theirs in [Some(&*other), None] {
        crate::proxy::run(|| async {
            let mut deaf = Deaf::start();
            let router = router(
                &prefill,
                &[deaf.url()],
                "[timeouts]\nconnect = '500ms'\n[retries]\nattempts = 1",
                theirs,
            );
            let before = prefill.metric("kvx_blocks_kept");
            deaf.take_none().await;
            let (status, answer) = router.post("/v1/completions", &greedy(&prompt(1, 60), 6));
            assert_eq!(status, 504, "{answer}");
            until_released(&router, "refused", 1.0);
            assert!(prefill.metric("kvx_blocks_kept") > before, "the lease rules: {theirs:?}");
            let (_, status) = router.get("/status");
            assert!(status.contains("release of blocks: refused: "), "{status}");
        })
        .unwrap();
    }
    std::fs::remove_file(other).unwrap();
}

/// Clients leave while their legs wait for a connection to a decode that takes none, or run at a
/// decode that is stopped again and again. The legs of the others are retried there with the same
/// blocks. `KVX_RELEASE_TRIALS` sets the number of clients that leave.
#[test]
fn no_block_is_freed_while_a_decode_reads_it() {
    let trials = std::env::var("KVX_RELEASE_TRIALS").map_or(40, |count| count.parse().unwrap());
    crate::proxy::run_within(LIMIT * 8, move || async move {
        let single = Server::start(&model(SHAPE), ServerArgs::default());
        let (prefill, decode) = (engine("TCP", &[], None), engine("TCP", &[], None));
        let mut deaf = Deaf::start();
        let decodes = [deaf.url(), format!("http://127.0.0.1:{}", decode.port)];
        let lines = "choice = 'round-robin'\n[timeouts]\nconnect = '60ms'\n[health]\nevery = '1h'\n\
                     down_after = 1000000\neject_after = 1000000\n[retries]\nbudget = 1.0\n";
        let router = router(&prefill, &decodes, lines, None);
        deaf.take_none().await;
        let answers: Vec<_> =
            (0..8).map(|at| ids(&single.tokens(&prompt(at, 60 + at), 4, None))).collect();
        let (left, done) = (AtomicU64::new(0), AtomicBool::new(false));
        std::thread::scope(|scope| {
            let stops = scope.spawn(|| {
                while !done.load(Relaxed) {
                    decode.stop();
                    std::thread::sleep(Duration::from_millis(40)); // the decode is slow
                    decode.signal(Signal::CONT);
                    std::thread::sleep(Duration::from_millis(40)); // and works in between
                }
            });
            let clients: Vec<_> = (0..4_u64)
                .map(|client| {
                    let (router, answers, left) = (&router, &answers, &left);
                    scope.spawn(move || {
                        for round in 0_u64.. {
                            if left.load(Relaxed) >= trials {
                                return;
                            }
                            let at = (client + round * 3) % 8;
                            let body = greedy(&prompt(at, 60 + at), 4);
                            if (client + round) % 3 == 0 {
                                let (status, answer) = router.post("/v1/completions", &body);
                                assert_eq!(status, 200, "{answer}");
                                assert_eq!(ids(&answer), answers[at as usize], "{at}");
                                continue;
                            }
                            let stream = router.send("POST", "/v1/completions", Some(&body));
                            let wait = (client * 31 + round * 17) % 120;
                            std::thread::sleep(Duration::from_millis(wait)); // then the client leaves
                            drop(stream);
                            left.fetch_add(1, Relaxed);
                        }
                    })
                })
                .collect();
            let ended: Vec<_> = clients.into_iter().map(|client| client.join()).collect();
            done.store(true, Relaxed);
            stops.join().unwrap();
            ended.into_iter().for_each(|ended| ended.unwrap());
        });
        router.until("kvx_proxy_in_flight", LIMIT, |requests| requests == 0.0);
        for name in ["vllm:nixl_num_failed_transfers", "vllm:nixl_num_kv_expired_reqs"] {
            let failed = decode.metric(name) + prefill.metric(name);
            assert_eq!(failed, 0.0, "{name}: a load was stale or failed");
        }
        let late = prefill.metric("vllm:nixl_num_notifications_after_expiry");
        assert_eq!(late, 0.0, "a decode has read blocks that were free");
        let sent = released(&router, "sent");
        println!("{trials} clients have left, the blocks of {sent} were released");
        assert!(sent > 0.0, "some left between the legs");
        assert_eq!(released(&router, "failed") + released(&router, "refused"), 0.0);
    })
    .unwrap();
}
