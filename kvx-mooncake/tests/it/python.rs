//! A Python process with Mooncake's own engine.

#![allow(dead_code, reason = "each program of tests uses some of it")]

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use rustix::process::{Pid, Signal};

const PATIENCE: Duration = Duration::from_secs(20);

/// The agent in `agent.py`. Killed when dropped.
pub(crate) struct Python {
    process: Child,
    stdin: ChildStdin,
    answers: Receiver<String>,
    /// The name to which other agents connect.
    pub(crate) name: String,
    /// The address of its memory.
    pub(crate) address: u64,
}

impl Python {
    /// Starts one with `bytes` bytes, in the Python environment in which the adapter was built.
    pub(crate) fn start(adapter: &Path, bytes: usize) -> Python {
        Python::start_with(adapter, bytes, &[])
    }

    /// Starts one with its own name at a metadata server.
    pub(crate) fn start_as(adapter: &Path, bytes: usize, name: &str, metadata: &str) -> Python {
        Python::start_with(adapter, bytes, &[name, metadata])
    }

    fn start_with(adapter: &Path, bytes: usize, more: &[&str]) -> Python {
        let python = adapter.parent().expect("a file lies in a folder").join("venv/bin/python");
        let mut process = Command::new(python)
            .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/python/agent.py"))
            .arg(bytes.to_string())
            .args(more)
            .env("MC_LOG_LEVEL", "ERROR")
            // The address that it registers at a metadata server.
            .env("MC_TCP_BIND_ADDRESS", "127.0.0.1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the environment has a Python");
        let stdin = process.stdin.take().expect("it is piped");
        let stdout = process.stdout.take().expect("it is piped");
        let (sender, answers) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        let mut this = Python { process, stdin, answers, name: String::new(), address: 0 };
        let ready = this.answer();
        let mut words = ready.split(' ').skip(1).map(str::to_owned);
        this.name = words.next().expect("its name");
        this.address = words.next().and_then(|word| word.parse().ok()).expect("its address");
        this
    }

    fn answer(&mut self) -> String {
        self.answers.recv_timeout(PATIENCE).expect("Python answers in time")
    }

    pub(crate) fn ask(&mut self, line: &str) -> String {
        writeln!(self.stdin, "{line}").expect("Python listens");
        self.answer()
    }

    /// Returns bytes of its memory.
    pub(crate) fn get(&mut self, offset: usize, len: usize) -> Vec<u8> {
        kvx_testkit::unhex(&self.ask(&format!("get {offset} {len}")))
    }

    fn signal(&self, signal: Signal) {
        let pid = Pid::from_child(&self.process);
        rustix::process::kill_process(pid, signal).expect("it is our child");
    }

    /// Stops it, and waits until each of its threads has stopped: a running one would serve a
    /// transfer.
    pub(crate) fn stop(&self) {
        kvx_testkit::stop_process(Pid::from_child(&self.process)).expect("it is our child");
    }

    pub(crate) fn go_on(&self) {
        self.signal(Signal::CONT);
    }

    pub(crate) fn kill(&mut self) {
        self.process.kill().expect("it is our child");
        self.process.wait().expect("it is our child");
    }
}

impl Drop for Python {
    fn drop(&mut self) {
        self.process.kill().ok();
        self.process.wait().ok();
    }
}

/// Returns the initial value of byte `at` of its memory.
pub(crate) fn content(at: usize) -> u8 {
    let at = at % (1 << 16);
    ((at * 31) >> 3 ^ at) as u8
}
