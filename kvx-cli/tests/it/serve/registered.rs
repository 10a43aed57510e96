//! A fleet over etcd on five hosts, under load and through faults.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use kvx_testkit::{Tier, kill_after, skip, test, trial_within};
use libtest_mimic::Trial;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use crate::serve::hosts::{Host, Hosts};
use crate::serve::server::{LIMIT, greedy, model, prompt};
use crate::this_test;

const ETCD: &str = "etcd://10.77.0.1:2379/chat";
/// The hosts of the routers, of the prefills, and of the decodes. The first host has etcd, the last
/// one the clients too.
const ROUTERS: [usize; 3] = [2, 3, 4];
const PREFILLS: [usize; 2] = [2, 3];
const DECODES: [usize; 2] = [4, 5];
const CLIENTS: usize = 3;
const PROMPTS: u64 = 12;

/// A process on a host, which is killed when this is dropped.
struct Process {
    child: Child,
    log: PathBuf,
}

impl Process {
    fn start(mut command: std::process::Command, name: &str) -> Process {
        static STARTS: AtomicU64 = AtomicU64::new(0);
        let number = STARTS.fetch_add(1, Relaxed);
        let log = Path::new(env!("CARGO_TARGET_TMPDIR"))
            .join(format!("registered-{}-{number}-{name}", std::process::id()));
        let to = File::create(&log).expect("a file");
        let quiet = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(to);
        let child = quiet.spawn().expect("it starts");
        kill_after(&child, 10 * LIMIT);
        Process { child, log }
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).expect("it runs");
    }

    /// Asks it to end, and waits until it has.
    fn end(&mut self) {
        self.signal(Signal::TERM);
        let until = Instant::now() + LIMIT;
        while self.child.try_wait().expect("it is a child").is_none() {
            assert!(Instant::now() < until, "it does not end:\n{}", self.said());
            std::thread::sleep(Duration::from_millis(20)); // between polls
        }
    }

    fn kill(&mut self) {
        self.child.kill().expect("it can be killed");
        self.child.wait().expect("it is a child");
    }

    fn said(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.child.kill().ok(); // an error: it has ended
        self.child.wait().ok();
        std::fs::remove_file(&self.log).ok(); // an error leaves only an unused file
    }
}

fn etcd(host: &Host, folder: &Path) -> Process {
    let mut command = host.command("etcd");
    command.arg("--data-dir").arg(folder);
    for url in ["--listen-client-urls", "--advertise-client-urls"] {
        command.args([url, "http://10.77.0.1:2379"]);
    }
    Process::start(command, "etcd")
}

fn kvx(hosts: &Hosts, number: usize, name: &str, words: &[&str]) -> Process {
    let own = [("VLLM_NIXL_SIDE_CHANNEL_HOST".to_owned(), Hosts::address(number))];
    let words: Vec<String> = words.iter().map(|&word| word.to_owned()).collect();
    let command = hosts.each[number - 1].kvx(&words, &own, &std::env::temp_dir());
    Process::start(command, &format!("{name}-{number}"))
}

fn engine(hosts: &Hosts, number: usize) -> Process {
    let role = if PREFILLS.contains(&number) { "kv_producer" } else { "kv_consumer" };
    let config = json!({"kv_connector": "NixlConnector", "kv_role": role,
                        "kv_connector_extra_config": {"backends": ["TCP"], "load_timeout": 5},
                        "kv_load_failure_policy": "recompute"});
    let (config, host) = (config.to_string(), Hosts::address(number));
    let folder = model(&["--arch", "llama"]);
    let folder = folder.to_str().expect("a path of text");
    let fixed = ["--served-model-name", "m", "--kv-cache-memory-bytes", "16M", "--port", "8200"];
    let more = ["--host", &host, "--register", ETCD, "--kv-transfer-config", &config];
    kvx(hosts, number, "engine", &[&["serve", folder][..], &fixed, &more].concat())
}

fn router(hosts: &Hosts, number: usize) -> Process {
    let words = ["proxy", "--host", "0.0.0.0", "--port", "8000", "--access-log", "/dev/stderr"];
    kvx(hosts, number, "router", &[&words[..], &["--discovery-etcd", ETCD]].concat())
}

/// Waits until each router knows as many instances that are up.
fn wait_until_up(client: &Host, count: usize, when: &str) {
    for number in ROUTERS {
        let url = format!("http://{}:8000/status", Hosts::address(number));
        let until = Instant::now() + 2 * LIMIT;
        loop {
            let status = client.curl(&url, None).unwrap_or_default();
            let all = status["instances"].as_array().cloned().unwrap_or_default();
            if all.iter().filter(|one| one["state"] == "up").count() == count {
                break;
            }
            assert!(Instant::now() < until, "{when}: {number} has {status:#}");
            std::thread::sleep(Duration::from_millis(100)); // between polls
        }
    }
}

/// The observations of all clients.
#[derive(Default)]
struct Seen {
    is_over: AtomicBool,
    /// Routers that are not ready, to which a load balancer sends nothing.
    left_out: [AtomicBool; ROUTERS.len()],
    /// The right answers of each client.
    right: [AtomicU64; CLIENTS],
    /// Requests whose router was away, and which another one has answered.
    moved: AtomicU64,
}

impl Seen {
    fn counts(&self) -> [u64; CLIENTS] {
        std::array::from_fn(|client| self.right[client].load(Relaxed))
    }
}

/// Sends requests one after the other to the routers in turn. Each must get the right answer, from
/// another router if the first is away.
fn be_client(client: &Host, number: usize, right: &[Value], seen: &Seen) {
    for at in number.. {
        if seen.is_over.load(Relaxed) {
            break;
        }
        let which = at * 7 % right.len();
        let body = greedy(&prompt(which as u64, 20 + 10 * which as u64), 8);
        let begun = Instant::now();
        let ask = |router: usize| {
            let is_ready = |at: &usize| !seen.left_out[*at].load(Relaxed);
            let at = (router..).map(|at| at % ROUTERS.len()).find(is_ready);
            let host = Hosts::address(ROUTERS[at.expect("one is ready")]);
            client.ask(&format!("http://{host}:8000/v1/completions"), Some(&body), None)
        };
        let (mut status, mut text) = ask(at);
        if status == 0 {
            seen.moved.fetch_add(1, Relaxed);
            (status, text) = ask(at + 1);
        }
        assert_eq!(status, 200, "request {at} after {:?}: {text}", begun.elapsed());
        let answer: Value = serde_json::from_str(&text).expect("JSON");
        assert_eq!(answer["choices"][0]["token_ids"], right[which], "request {at}");
        seen.right[number].fetch_add(1, Relaxed);
    }
}

#[test]
fn three_routers_over_etcd_serve_through_faults() {
    serve_through_faults([2, 2, 2].map(Duration::from_secs));
}

/// Returns a trial of the whole run only: etcd hangs for longer than a lease, and is away for a
/// minute.
pub(crate) fn trials() -> Vec<Trial> {
    if !Tier::Whole.runs_or_says("kvx proxy: three routers while etcd is away for a minute") {
        return Vec::new();
    }
    let name = "serve::registered::three_routers_serve_while_etcd_is_away_for_a_minute";
    let long = || serve_through_faults([20, 60, 5].map(Duration::from_secs));
    vec![trial_within(10 * LIMIT, name, long)]
}

/// Serves clients while etcd hangs, is away and cannot be reached, each for some time, and while a
/// router and each engine are restarted.
fn serve_through_faults([hung, away, cut]: [Duration; 3]) {
    if kvx_testkit::output(std::process::Command::new("which").arg("etcd"), LIMIT).stdout.is_empty()
    {
        return skip(&this_test(), "etcd is not installed", "cargo xtask test --install");
    }
    let Some(hosts) = Hosts::for_this_test(5) else { return };
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!(
        "registered-{}-{}.etcd",
        std::process::id(),
        away.as_secs()
    ));
    let client = &hosts.each[4];
    let mut list = etcd(&hosts.each[0], &folder);
    let mut engines = [PREFILLS, DECODES].concat().into_iter().map(|at| (at, engine(&hosts, at)));
    let mut engines: Vec<_> = engines.by_ref().collect();
    let mut routers = ROUTERS.map(|number| router(&hosts, number));
    wait_until_up(client, 4, "at the start");
    let right: Vec<Value> = (0..PROMPTS)
        .map(|which| {
            let url = format!("http://{}:8200/v1/completions", Hosts::address(DECODES[1]));
            let body = greedy(&prompt(which, 20 + 10 * which), 8);
            let answer = client.curl(&url, Some(&body)).expect("an engine answers");
            answer["choices"][0]["token_ids"].clone()
        })
        .collect();

    let seen = Seen::default();
    std::thread::scope(|scope| {
        let clients: Vec<_> = (0..CLIENTS)
            .map(|number| {
                scope.spawn({
                    let (right, seen) = (&right, &seen);
                    move || be_client(client, number, right, seen)
                })
            })
            .collect();
        let is_served = |what: &str| {
            let before = seen.counts();
            let until = Instant::now() + LIMIT;
            // The first answer may be to a request from before.
            while !before.iter().zip(seen.counts()).all(|(before, now)| now >= before + 3) {
                assert!(Instant::now() < until, "{what}: no more answers");
                assert!(!clients.iter().any(|client| client.is_finished()), "{what}");
                std::thread::sleep(Duration::from_millis(20)); // between polls
            }
            println!("{what}: {} right answers", seen.counts().iter().sum::<u64>());
        };
        // Ends the load also if a step fails.
        let steps = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            is_served("all is well");
            list.signal(Signal::STOP);
            std::thread::sleep(hung); // etcd hangs
            is_served("etcd hangs");
            list.signal(Signal::CONT);
            list.kill();
            std::thread::sleep(away); // etcd is away
            is_served("etcd is away");
            std::fs::remove_dir_all(&folder).expect("the folder is the test's own");
            list = etcd(&hosts.each[0], &folder);
            is_served("etcd has lost its data");
            hosts.cut_off(1, true);
            std::thread::sleep(cut); // etcd cannot be reached
            is_served("etcd cannot be reached");
            hosts.cut_off(1, false);
            wait_until_up(client, 4, "after etcd's faults");
            routers[1].kill();
            is_served("a router is away");
            // It may find fewer instances at first: the list in etcd was lost.
            seen.left_out[1].store(true, Relaxed);
            is_served("no client asks the router any more");
            routers[1] = router(&hosts, ROUTERS[1]);
            wait_until_up(client, 4, "after a router's restart");
            seen.left_out[1].store(false, Relaxed);
            for (number, process) in &mut engines {
                process.end();
                is_served(&format!("engine {number} is away"));
                *process = engine(&hosts, *number);
                wait_until_up(client, 4, &format!("after the restart of engine {number}"));
            }
            is_served("every engine has been restarted");
        }));
        seen.is_over.store(true, Relaxed);
        let ended: Vec<_> = clients.into_iter().map(|client| client.join()).collect();
        if steps.is_err() || ended.iter().any(Result::is_err) {
            for process in routers.iter().chain(engines.iter().map(|(_, engine)| engine)) {
                println!("{}:\n{}", process.log.display(), process.said());
            }
        }
        if let Some(panic) = ended.into_iter().chain([steps]).find_map(Result::err) {
            std::panic::resume_unwind(panic);
        }
    });
    let moved = seen.moved.load(Relaxed);
    assert!(moved > 0, "no client has noticed that a router was killed");
    println!("{moved} requests were sent to a second router");
    drop(list);
    std::fs::remove_dir_all(&folder).ok(); // an error leaves only unused files
}
