//! An etcd server of a test.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::{free_port, kill_after, unique};

/// The time that etcd may take to start: it waits for the disk several times.
const STARTS_WITHIN: Duration = Duration::from_secs(60);
/// The time after which etcd is killed, whatever happens to its test.
const LIMIT: Duration = Duration::from_secs(300);
/// The time that etcd may take to answer.
const ANSWERS_WITHIN: Duration = Duration::from_secs(10);

/// An etcd server with one member, empty at first. It is killed when this is dropped.
#[derive(Debug)]
pub struct Etcd {
    process: Child,
    folder: PathBuf,
    port: u16,
}

impl Etcd {
    /// Starts a server, and returns once it answers; `None` if etcd is not installed.
    ///
    /// # Panics
    /// If it does not answer.
    #[expect(clippy::expect_used, reason = "a test without a port cannot go on")]
    pub fn start() -> Option<Etcd> {
        let until = Instant::now() + STARTS_WITHIN;
        loop {
            let folder = std::env::temp_dir().join(unique("kvx-etcd"));
            let port = free_port(0).expect("a port is free");
            let process = spawn(&folder, port)?;
            let mut etcd = Etcd { process, folder, port };
            // If it has ended, another program may have taken its port.
            if etcd.becomes_healthy(until) {
                return Some(etcd);
            }
        }
    }

    /// Returns its host and port.
    pub fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    /// Kills it.
    pub fn kill(&mut self) {
        self.process.kill().ok(); // an error: it has ended
        self.process.wait().ok();
    }

    /// Starts it again at the same port, with its data or without.
    ///
    /// # Panics
    /// If it does not answer.
    #[expect(clippy::expect_used, reason = "a test whose server does not start cannot go on")]
    pub fn restart(&mut self, with_data: bool) {
        self.kill();
        if !with_data {
            std::fs::remove_dir_all(&self.folder).expect("the folder is the test's own");
        }
        self.process = spawn(&self.folder, self.port).expect("it has been started before");
        assert!(self.becomes_healthy(Instant::now() + STARTS_WITHIN), "etcd has ended");
    }

    /// Suspends it: connections stay, and nothing answers.
    pub fn suspend(&self) {
        self.signal(Signal::STOP);
    }

    /// Continues it.
    pub fn resume(&self) {
        self.signal(Signal::CONT);
    }

    #[expect(clippy::expect_used, reason = "a test that cannot signal its server cannot go on")]
    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.process), signal).expect("it has not been waited for");
    }

    /// Posts JSON to its gateway, and returns the answer with its head.
    ///
    /// # Errors
    /// The connection fails, or no answer arrives in time.
    pub fn post(&self, path: &str, body: &str) -> std::io::Result<String> {
        self.ask(&format!("POST {path} HTTP/1.0\r\nContent-Length: {}\r\n\r\n{body}", body.len()))
    }

    /// Returns the number of its keys.
    ///
    /// # Panics
    /// If it does not answer.
    #[expect(clippy::expect_used, reason = "a test whose server does not answer cannot go on")]
    pub fn keys(&self) -> u64 {
        // All keys: a NUL byte in base64 as both ends of the range.
        let body = r#"{"key":"AA==","range_end":"AA==","count_only":true}"#;
        let answer = self.post("/v3/kv/range", body).expect("it answers");
        let (head, json) = answer.split_once("\r\n\r\n").expect("an answer has a head");
        assert!(head.contains(" 200 "), "{answer}");
        let json: serde_json::Value = serde_json::from_str(json).expect("it answers with JSON");
        json["count"].as_str().map_or(0, |count| count.parse().expect("a number"))
    }

    fn ask(&self, request: &str) -> std::io::Result<String> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port))?;
        stream.set_read_timeout(Some(ANSWERS_WITHIN))?;
        stream.write_all(request.as_bytes())?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    }

    /// Waits until it is healthy; false if it has ended.
    fn becomes_healthy(&mut self, until: Instant) -> bool {
        let is_healthy = |answer: std::io::Result<String>| {
            answer.is_ok_and(|answer| answer.contains("\"health\":\"true\""))
        };
        while !is_healthy(self.ask("GET /health HTTP/1.0\r\n\r\n")) {
            assert!(Instant::now() < until, "etcd does not answer");
            if self.process.try_wait().is_ok_and(|ended| ended.is_some()) {
                return false;
            }
            std::thread::sleep(Duration::from_millis(10)); // between polls
        }
        true
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        self.kill();
        std::fs::remove_dir_all(&self.folder).ok(); // an error leaves only unused files
    }
}

/// Starts etcd; `None` if it is not installed.
#[expect(clippy::panic, reason = "a test that cannot start its server cannot go on")]
fn spawn(folder: &PathBuf, port: u16) -> Option<Child> {
    let url = format!("http://127.0.0.1:{port}");
    let process = Command::new("etcd")
        .arg("--data-dir")
        .arg(folder)
        .args(["--listen-client-urls", &url, "--advertise-client-urls", &url])
        .args(["--listen-peer-urls", "http://127.0.0.1:0"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn();
    match process {
        Ok(process) => {
            kill_after(&process, LIMIT);
            Some(process)
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
        Err(error) => panic!("etcd does not start: {error}"),
    }
}
