//! Hosts with their own ports and addresses: network namespaces, connected by a switch if there are
//! several.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use kvx_testkit::output;
use serde_json::Value;

use crate::serve::server::{LIMIT, sum};
use crate::this_test;

/// A host. Dropping it kills the processes that run there.
pub(crate) struct Host {
    network: kvx_testkit::Host,
    secret: Option<&'static Path>,
    running: Vec<Child>,
    /// The logs of its processes.
    logs: Vec<PathBuf>,
}

/// Returns the file of the secret that several hosts share.
pub(crate) fn secret() -> &'static Path {
    static MADE: OnceLock<PathBuf> = OnceLock::new();
    MADE.get_or_init(|| {
        let file = Path::new(env!("CARGO_TARGET_TMPDIR"))
            .join(format!("serve-{}.secret", std::process::id()));
        let _ = std::fs::remove_file(&file);
        kvx::Secret::create(&file).expect("a file");
        file
    })
}

/// Hosts that reach each other, and their switch.
pub(crate) struct Hosts {
    pub(crate) each: Vec<Host>,
    switch: kvx_testkit::Hosts,
}

impl Hosts {
    /// Creates `count` hosts. Skips the test and returns `None` if namespaces are not available.
    pub(crate) fn for_this_test(count: usize) -> Option<Hosts> {
        let mut hosts = kvx_testkit::Hosts::for_test(&this_test(), count).expect("hosts")?;
        let secret = (count > 1).then(secret);
        let each = std::mem::take(&mut hosts.each).into_iter();
        let each = each
            .map(|network| Host { network, secret, running: Vec::new(), logs: Vec::new() })
            .collect();
        Some(Hosts { each, switch: hosts })
    }

    /// Cuts a host, numbered from 1, off from the others, or connects it again.
    pub(crate) fn cut_off(&self, number: usize, cut: bool) {
        self.switch.cut_off(number, cut).expect("the switch exists");
    }

    /// Returns the address of a host, numbered from 1.
    pub(crate) fn address(number: usize) -> String {
        kvx_testkit::Hosts::address(number)
    }
}

impl Host {
    /// Runs `kvx` on the host.
    pub(crate) fn kvx(
        &self,
        arguments: &[String],
        variables: &[(String, String)],
        cache: &Path,
    ) -> Command {
        let mut command = self.network.command(env!("CARGO_BIN_EXE_kvx"));
        command.args(arguments).env("HF_HUB_CACHE", cache);
        command.envs(self.secret.map(|file| ("KVX_SECRET_FILE", file)));
        command.envs(variables.iter().cloned());
        command
    }

    /// Returns a command that runs a program on the host.
    pub(crate) fn command(&self, program: &str) -> Command {
        self.network.command(program)
    }

    /// Runs a command until the end of the test.
    pub(crate) fn run(&mut self, mut command: Command) {
        static LOGS: AtomicU32 = AtomicU32::new(0);
        let number = LOGS.fetch_add(1, Ordering::Relaxed);
        let log = Path::new(env!("CARGO_TARGET_TMPDIR"))
            .join(format!("host-{}-{number}", std::process::id()));
        let show = std::env::var_os("KVX_TEST_SHOW").is_some();
        command.stderr(match show {
            true => Stdio::inherit(),
            false => File::create(&log).expect("a file").into(),
        });
        self.logs.push(log);
        self.running.push(command.stdout(Stdio::null()).spawn().expect("kvx starts"));
    }

    /// Returns a JSON answer or a text, or `None` without a successful answer.
    pub(crate) fn curl(&self, url: &str, body: Option<&Value>) -> Option<Value> {
        let (status, text) = self.ask(url, body, None);
        (status == 200).then(|| serde_json::from_str(&text).unwrap_or(Value::String(text)))
    }

    /// Returns the status and the text of an answer; the status is 0 if there is none. `header` is
    /// sent in addition to the usual ones.
    pub(crate) fn ask(
        &self,
        url: &str,
        body: Option<&Value>,
        header: Option<&str>,
    ) -> (u16, String) {
        let mut curl = self.network.command("curl");
        curl.args(["-s", "--max-time", "25", "-w", "\n%{http_code}", url]);
        if let Some(header) = header {
            curl.args(["-H", header]);
        }
        if let Some(body) = body {
            curl.args(["-H", "content-type: application/json", "-d", &body.to_string()]);
        }
        let text = String::from_utf8_lossy(&output(&mut curl, LIMIT).stdout).into_owned();
        let (text, status) = text.rsplit_once('\n').unwrap_or_default();
        (status.parse().unwrap_or_default(), text.to_owned())
    }

    /// Returns the tokens of a streamed answer.
    pub(crate) fn streamed(&self, url: &str, body: &Value, header: &str) -> Value {
        let mut body = body.clone();
        body["stream"] = true.into();
        let (_, text) = self.ask(url, Some(&body), Some(header));
        let events = text.lines().filter_map(|line| line.strip_prefix("data: {"));
        let events =
            events.filter_map(|event| serde_json::from_str::<Value>(&format!("{{{event}")).ok());
        events
            .flat_map(|event| {
                event["choices"][0]["token_ids"].as_array().cloned().unwrap_or_default()
            })
            .collect()
    }

    /// Ends the host's processes.
    pub(crate) fn stop(&mut self) {
        for mut child in self.running.drain(..) {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    pub(crate) fn wait(&self, url: &str) {
        let until = Instant::now() + LIMIT * 2;
        while self.curl(url, None).is_none() {
            assert!(
                Instant::now() < until,
                "{url} does not answer; the logs of its host:\n{}",
                self.said()
            );
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    fn said(&self) -> String {
        self.logs.iter().filter_map(|log| std::fs::read_to_string(log).ok()).collect()
    }

    /// Returns the sum of a metric of the server at this port, over labels that contain `label`.
    pub(crate) fn metric(&self, port: u16, name: &str, label: &str) -> f64 {
        let text = self.curl(&format!("http://localhost:{port}/metrics"), None).expect("metrics");
        sum(text.as_str().expect("they are text"), name, label)
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.stop();
        for log in &self.logs {
            let _ = std::fs::remove_file(log);
        }
    }
}
