//! Hosts with ports and addresses of their own: network namespaces, on one switch if there are several.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use kvx_testkit::output;
use serde_json::Value;

use crate::server::{LIMIT, sum};

/// A host of its own. What runs there is killed when it is dropped.
pub(crate) struct Host {
    keeper: Child,
    running: Vec<Child>,
    /// What each of those says.
    logs: Vec<PathBuf>,
}

/// Hosts that reach each other, and what they are plugged into.
pub(crate) struct Hosts {
    pub(crate) each: Vec<Host>,
    _switch: Host,
}

impl Hosts {
    /// So many; none where there are no namespaces.
    pub(crate) fn new(count: usize) -> Option<Hosts> {
        let switch = Host::new()?;
        switch.ip("link add name bridge type bridge")?;
        switch.ip("link set bridge up")?;
        let mut each = Vec::new();
        for at in 1..=count {
            let host = Host::new()?;
            switch.ip(&format!("link add port{at} type veth peer name eth0 netns {}", host.keeper.id()))?;
            switch.ip(&format!("link set port{at} master bridge up"))?;
            host.ip(&format!("addr add {}/24 dev eth0", Hosts::address(at)))?;
            host.ip("link set eth0 up")?;
            each.push(host);
        }
        Some(Hosts { each, _switch: switch })
    }

    /// Of the host of this number, counted from 1.
    pub(crate) fn address(number: usize) -> String {
        format!("10.77.0.{number}")
    }
}

impl Host {
    pub(crate) fn new() -> Option<Host> {
        let mut command = Command::new("unshare");
        command.args(["--net", "sh", "-c", "ip link set lo up && exec sleep 300"]).stderr(Stdio::null());
        let mut host = Host { keeper: command.spawn().ok()?, running: Vec::new(), logs: Vec::new() };
        let until = Instant::now() + LIMIT;
        while Instant::now() < until && host.keeper.try_wait().ok()?.is_none() {
            if host.is_up() {
                return Some(host);
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        None
    }

    fn is_up(&self) -> bool {
        let network = |process: &str| std::fs::read_link(format!("/proc/{process}/ns/net")).ok();
        // The keeper begins in our network, where `lo` is up as well: what entered too early would work on ours.
        network(&self.keeper.id().to_string()) != network("self")
            && String::from_utf8_lossy(&output(self.command("ip").args(["addr", "show", "lo"]), LIMIT).stdout)
                .contains("LOOPBACK,UP")
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new("nsenter");
        command.args(["-t", &self.keeper.id().to_string(), "-n", program]);
        command
    }

    fn ip(&self, arguments: &str) -> Option<()> {
        let done = output(self.command("ip").args(arguments.split(' ')), LIMIT);
        done.status.success().then_some(())
    }

    /// `kvx` there.
    pub(crate) fn kvx(&self, arguments: &[String], variables: &[(String, String)], cache: &Path) -> Command {
        let mut command = self.command(env!("CARGO_BIN_EXE_kvx"));
        command.args(arguments).envs(variables.iter().cloned()).env("HF_HUB_CACHE", cache);
        command
    }

    /// Runs this until the end of the test.
    pub(crate) fn run(&mut self, mut command: Command) {
        let log = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!(
            "host-{}-{}-{}",
            std::process::id(),
            self.keeper.id(),
            self.logs.len()
        ));
        let show = std::env::var_os("KVX_TEST_SHOW").is_some();
        command.stderr(match show {
            true => Stdio::inherit(),
            false => File::create(&log).expect("a file").into(),
        });
        self.logs.push(log);
        self.running.push(command.stdout(Stdio::null()).spawn().expect("kvx starts"));
    }

    /// A JSON answer, or a text; none if there is no answer of success.
    pub(crate) fn curl(&self, url: &str, body: Option<&Value>) -> Option<Value> {
        let (status, text) = self.ask(url, body, None);
        (status == 200).then(|| serde_json::from_str(&text).unwrap_or(Value::String(text)))
    }

    /// Status and words of an answer; 0 if there is none. `header`: of the request, beside the usual ones.
    pub(crate) fn ask(&self, url: &str, body: Option<&Value>, header: Option<&str>) -> (u16, String) {
        let mut curl = self.command("curl");
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

    /// The tokens of a streamed answer.
    pub(crate) fn streamed(&self, url: &str, body: &Value, header: &str) -> Value {
        let mut body = body.clone();
        body["stream"] = true.into();
        let (_, text) = self.ask(url, Some(&body), Some(header));
        let events = text.lines().filter_map(|line| line.strip_prefix("data: {"));
        let events = events.filter_map(|event| serde_json::from_str::<Value>(&format!("{{{event}")).ok());
        events
            .flat_map(|event| event["choices"][0]["token_ids"].as_array().cloned().unwrap_or_default())
            .collect()
    }

    /// Ends what runs there.
    pub(crate) fn stop(&mut self) {
        for mut child in self.running.drain(..) {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    pub(crate) fn wait(&self, url: &str) {
        let until = Instant::now() + LIMIT * 2;
        while self.curl(url, None).is_none() {
            assert!(Instant::now() < until, "{url} does not answer; its host says\n{}", self.said());
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    fn said(&self) -> String {
        self.logs.iter().filter_map(|log| std::fs::read_to_string(log).ok()).collect()
    }

    /// The sum of a metric of the server at this port, over labels that contain `label`.
    pub(crate) fn metric(&self, port: u16, name: &str, label: &str) -> f64 {
        let text = self.curl(&format!("http://localhost:{port}/metrics"), None).expect("metrics");
        sum(text.as_str().expect("they are text"), name, label)
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.stop();
        let _ = self.keeper.kill();
        let _ = self.keeper.wait();
        for log in &self.logs {
            let _ = std::fs::remove_file(log);
        }
    }
}
