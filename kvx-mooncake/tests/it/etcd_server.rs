//! Tests engines that find each other through etcd. The engine's etcd client can be loaded only
//! with the engine, hence a separate process.

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use kvx_testkit::test;

use crate::adapter;
use crate::exchange::{self, CUT_OFF};

/// The time that etcd may take to start: it waits for the disk several times.
const STARTS_WITHIN: Duration = Duration::from_secs(60);
const TEST: &str = "agents_find_each_other_by_etcd";

/// An empty server. Killed when dropped.
struct Etcd {
    process: Child,
    folder: PathBuf,
    address: String,
}

impl Etcd {
    /// Starts a server; `None` if etcd is not installed.
    fn start() -> Option<Etcd> {
        let until = Instant::now() + STARTS_WITHIN;
        let mut etcd = Etcd::try_to_start()?;
        while !etcd.is_healthy().unwrap_or(false) {
            assert!(Instant::now() < until, "etcd does not answer");
            std::thread::sleep(Duration::from_millis(10));
            if etcd.process.try_wait().unwrap().is_some() {
                // The port was free, but another program has taken it since.
                etcd = Etcd::try_to_start()?;
            }
        }
        Some(etcd)
    }

    fn try_to_start() -> Option<Etcd> {
        let free = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = free.local_addr().unwrap();
        drop(free);
        let folder = std::env::temp_dir().join(format!(
            "kvx-etcd-{}-{}",
            std::process::id(),
            address.port()
        ));
        let address = address.to_string();
        let url = format!("http://{address}");
        let process = Command::new("etcd")
            .arg("--data-dir")
            .arg(&folder)
            .args(["--listen-client-urls", &url, "--advertise-client-urls", &url])
            .args(["--listen-peer-urls", "http://127.0.0.1:0"])
            .stdin(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        match process {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
            process => Some(Etcd { process: process.unwrap(), folder, address }),
        }
    }

    fn ask(&self, request: &str) -> std::io::Result<String> {
        let mut stream = TcpStream::connect(&self.address)?;
        stream.set_read_timeout(Some(CUT_OFF))?;
        stream.write_all(request.as_bytes())?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    }

    fn is_healthy(&self) -> std::io::Result<bool> {
        let answer = self.ask("GET /health HTTP/1.0\r\n\r\n")?;
        Ok(answer.contains("\"health\":\"true\""))
    }

    /// Returns the server's answer with the number of its keys.
    fn keys(&self) -> String {
        // All keys: a NUL byte in base64 as both ends of the range.
        let body = r#"{"key":"AA==","range_end":"AA==","count_only":true}"#;
        let len = body.len();
        self.ask(&format!("POST /v3/kv/range HTTP/1.0\r\nContent-Length: {len}\r\n\r\n{body}"))
            .unwrap()
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        self.process.kill().ok();
        self.process.wait().ok();
        std::fs::remove_dir_all(&self.folder).ok();
    }
}

#[test(own_process)]
fn agents_find_each_other_by_etcd() {
    if adapter::or_skip(TEST).is_none() {
        return;
    }
    let Some(etcd) = Etcd::start() else {
        return kvx_testkit::skip(TEST, "etcd is not installed", "apt install etcd-server");
    };
    assert!(!etcd.keys().contains("\"count\""), "it has no keys yet: {}", etcd.keys());
    exchange::by_way_of(&format!("etcd://{}", etcd.address), || {
        assert!(
            etcd.keys().contains("\"count\":\""),
            "the engines have registered themselves: {}",
            etcd.keys()
        );
    });
}
