//! `kvx serve` as a process, and a client with a minimal HTTP implementation.

use std::collections::HashMap;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use rustix::process::Pid;
use serde_json::{Value, json};

/// The vocabulary size of a model with random weights.
pub(crate) const VOCABULARY: usize = 259;

/// The timeout of every operation.
pub(crate) const LIMIT: Duration = Duration::from_secs(30);

/// Returns the folder of a model with random weights that every test may read, created once for
/// each shape.
pub(crate) fn model(shape: &[&str]) -> PathBuf {
    static MADE: OnceLock<Mutex<HashMap<String, PathBuf>>> = OnceLock::new();
    let mut made = MADE.get_or_init(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner);
    let name = shape.join("").replace('-', "_");
    made.entry(name.clone())
        .or_insert_with(|| {
            let folder = Path::new(env!("CARGO_TARGET_TMPDIR"))
                .join(format!("serve-{}-{name}", std::process::id()));
            let mut command = Command::new(env!("CARGO_BIN_EXE_kvx"));
            command.arg("make-model").arg(&folder).args(shape);
            for small in [["--hidden", "64"], ["--layers", "2"]] {
                if !shape.contains(&small[0]) {
                    command.args(small);
                }
            }
            let output = kvx_testkit::output(&mut command, LIMIT);
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            folder
        })
        .clone()
}

/// Returns `count` tokens, which differ for each `from`.
pub(crate) fn prompt(from: u64, count: u64) -> Value {
    json!((0..count).map(|at| 33 + (from * 31 + at * 7) % 90).collect::<Vec<_>>())
}

/// Returns a request for a greedy answer of `count` tokens, by their ids.
pub(crate) fn greedy(prompt: &Value, count: usize) -> Value {
    json!({"model": "m", "prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": true,
           "return_token_ids": true})
}

/// Returns the same request with the logits of all tokens at each position, for `assert_same`.
pub(crate) fn completion(prompt: &Value, count: usize) -> Value {
    let mut body = greedy(prompt, count);
    body["logprobs"] = (-1).into();
    body["return_tokens_as_token_ids"] = true.into();
    body
}

/// Returns the sum of a metric over its labels that contain `label`, in the text of `/metrics`.
pub(crate) fn sum(text: &str, name: &str, label: &str) -> f64 {
    let of_it = text.lines().filter_map(|line| line.strip_prefix(name)?.rsplit_once(' '));
    let of_it = of_it.filter(|(labels, _)| labels.is_empty() || labels.starts_with('{'));
    let of_it = of_it.filter(|(labels, _)| labels.contains(label));
    of_it.filter_map(|(_, value)| value.parse::<f64>().ok()).sum()
}

/// A running server, which is killed when this is dropped.
pub(crate) struct Server {
    child: Child,
    pub(crate) port: u16,
    said: Mutex<Receiver<String>>,
    /// The lines that were read before it listened.
    heard: Vec<String>,
}

/// The arguments of `kvx serve`, except for the model and the port.
#[derive(Clone, Copy, Default)]
pub(crate) struct ServerArgs<'a> {
    pub(crate) arguments: &'a [&'a str],
    pub(crate) variables: &'a [(&'a str, &'a str)],
}

impl Server {
    pub(crate) fn start(model: &Path, told: ServerArgs<'_>) -> Server {
        Server::try_start(model, told).listening()
    }

    /// Starts `kvx proxy` in front of these servers.
    pub(crate) fn proxy(prefills: &[&Server], decodes: &[&Server], more: &[&str]) -> Server {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvx"));
        command.args(["proxy", "--port", "0", "--access-log", "off"]).args(more);
        for (hosts, ports, servers) in [
            ("--prefiller-hosts", "--prefiller-ports", prefills),
            ("--decoder-hosts", "--decoder-ports", decodes),
        ] {
            if !servers.is_empty() {
                command.arg(hosts).args(servers.iter().map(|_| "127.0.0.1"));
                command.arg(ports).args(servers.iter().map(|server| server.port.to_string()));
            }
        }
        let proxy = Server::spawn(command).listening();
        let until = Instant::now() + LIMIT;
        while proxy.get("/ready").0 != 200 {
            assert!(Instant::now() < until, "the proxy does not find its servers");
            std::thread::sleep(Duration::from_millis(20));
        }
        proxy
    }

    /// Waits until it listens.
    pub(crate) fn listening(mut self) -> Server {
        let until = Instant::now() + LIMIT;
        while self.port == 0 {
            let said = self.said.get_mut().expect("nobody panics with it");
            match said.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok(line) => {
                    let address =
                        line.split_once("listening on http://").map(|(_, address)| address);
                    if let Some((_, port)) =
                        address.and_then(|address| address.trim().rsplit_once(':'))
                    {
                        self.port = port.trim_end_matches('/').parse().expect("a port");
                    }
                    self.heard.push(line);
                }
                Err(_) => panic!("the server does not listen:\n{}", self.heard.join("\n")),
            }
        }
        self
    }

    /// Starts it without waiting.
    pub(crate) fn try_start(model: &Path, told: ServerArgs<'_>) -> Server {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvx"));
        command.arg("serve").arg(model).args([
            "--host",
            "127.0.0.1",
            "--port",
            "0",
            "--kv-cache-memory-bytes",
            "16M",
            "--max-logprobs",
            "-1",
            "--logprobs-mode",
            "raw_logits",
        ]);
        command.args(told.arguments).envs(told.variables.iter().copied());
        command.args(["--served-model-name", "m"]);
        Server::spawn(command)
    }

    pub(crate) fn spawn(mut command: Command) -> Server {
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("kvx starts");
        // A limit in any case: no test takes this long.
        kvx_testkit::kill_after(&child, LIMIT * 10);
        let errors = child.stderr.take().expect("it is piped");
        let (says, said) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(errors).lines().map_while(Result::ok) {
                if std::env::var_os("KVX_TEST_SHOW").is_some() {
                    println!("{line}");
                }
                let _ = says.send(line);
            }
        });
        Server { child, port: 0, said: Mutex::new(said), heard: Vec::new() }
    }

    /// Starts a server that takes part in transfers over these backends.
    pub(crate) fn with_peers(model: &Path, backends: &str, policy: &str, more: &[&str]) -> Server {
        let config = json!({"kv_load_failure_policy": policy});
        Server::configured(
            model,
            backends,
            &config,
            ServerArgs { arguments: more, ..ServerArgs::default() },
        )
    }

    /// Starts such a server with these further fields of `--kv-transfer-config`.
    pub(crate) fn configured(
        model: &Path,
        backends: &str,
        fields: &Value,
        told: ServerArgs<'_>,
    ) -> Server {
        let mut config = json!({
            "kv_connector": "NixlConnector", "kv_role": "kv_both",
            "kv_connector_extra_config": {"backends": [backends], "kv_lease_duration": 6, "load_timeout": 5},
        });
        config
            .as_object_mut()
            .expect("it is one")
            .extend(fields.as_object().expect("fields").clone());
        let config = config.to_string();
        let arguments =
            [&["--kv-transfer-config", &config, "--enable-prompt-tokens-details"], told.arguments]
                .concat();
        let channel =
            [("VLLM_NIXL_SIDE_CHANNEL_HOST", "127.0.0.1"), ("VLLM_NIXL_SIDE_CHANNEL_PORT", "0")];
        let variables = [&channel, told.variables].concat();
        Server::start(model, ServerArgs { arguments: &arguments, variables: &variables })
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, signal).expect("the server runs");
    }

    /// Stops its process (SIGSTOP), and waits until all its threads have stopped.
    pub(crate) fn stop(&self) {
        kvx_testkit::stop_process(Pid::from_child(&self.child)).expect("the server runs");
    }

    /// Returns the processes of its model's further ranks.
    pub(crate) fn ranks(&self) -> Vec<Pid> {
        let us = self.child.id().to_string();
        let of_process = |entry: std::fs::DirEntry| {
            let pid = entry.file_name().to_str()?.parse().ok()?;
            let stat = std::fs::read_to_string(entry.path().join("stat")).ok()?;
            let parent = stat.rsplit(')').next()?.split_whitespace().nth(1)?;
            let command = std::fs::read(entry.path().join("cmdline")).ok()?;
            (parent == us && command.ends_with(b"serve-rank\0")).then(|| Pid::from_raw(pid))?
        };
        let mut ranks: Vec<Pid> = std::fs::read_dir("/proc")
            .expect("processes")
            .flatten()
            .filter_map(of_process)
            .collect();
        // In the order of their start.
        ranks.sort_by_key(|pid| pid.as_raw_nonzero());
        ranks
    }

    /// Waits until it has exited. Returns its exit status and its output.
    pub(crate) fn ended(mut self) -> (ExitStatus, String) {
        let until = Instant::now() + LIMIT;
        loop {
            if let Some(status) = self.child.try_wait().expect("it is a child") {
                let mut said = std::mem::take(&mut self.heard);
                said.extend(self.said.get_mut().expect("nobody panics with it").iter());
                return (status, said.join("\n"));
            }
            assert!(Instant::now() < until, "the server does not end");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Returns its CPU time.
    pub(crate) fn processor_time(&self) -> Duration {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id()))
            .expect("the server runs");
        let fields: Vec<&str> =
            stat.rsplit(')').next().expect("a name").split_whitespace().collect();
        let ticks: u64 =
            fields[11].parse::<u64>().expect("ticks") + fields[12].parse::<u64>().expect("ticks");
        Duration::from_millis(ticks * 10)
    }

    pub(crate) fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        let (status, text) = self.call("POST", path, Some(body));
        (status, serde_json::from_str(&text).unwrap_or(Value::String(text)))
    }

    pub(crate) fn get(&self, path: &str) -> (u16, String) {
        self.call("GET", path, None)
    }

    /// Sends a request with further lines of headers; it has no body if `body` is `None`.
    pub(crate) fn call_with(
        &self,
        headers: &str,
        method: &str,
        path: &str,
        body: Option<&Value>,
    ) -> (u16, String) {
        answer(self.send_with(headers, method, path, body))
    }

    /// Sends a request to one of several engines.
    pub(crate) fn post_to(&self, engine: usize, path: &str, body: &Value) -> (u16, Value) {
        let header = format!("x-data-parallel-rank: {engine}\r\n");
        let (status, text) = answer(self.send_with(&header, "POST", path, Some(body)));
        (status, serde_json::from_str(&text).unwrap_or(Value::String(text)))
    }

    fn call(&self, method: &str, path: &str, body: Option<&Value>) -> (u16, String) {
        answer(self.send(method, path, body))
    }

    /// Sends a request, and returns the connection with the unread answer.
    pub(crate) fn send(&self, method: &str, path: &str, body: Option<&Value>) -> TcpStream {
        self.send_with("", method, path, body)
    }

    fn send_with(&self, header: &str, method: &str, path: &str, body: Option<&Value>) -> TcpStream {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).expect("the server listens");
        stream.set_read_timeout(Some(LIMIT)).expect("a time");
        let body = body.map(Value::to_string).unwrap_or_default();
        let head = format!(
            "{method} {path} HTTP/1.1\r\nhost: m\r\nconnection: close\r\n{header}content-type: application/json\r\n\
             content-length: {}\r\n\r\n{body}",
            body.len()
        );
        stream.write_all(head.as_bytes()).expect("the server reads");
        stream
    }

    /// Returns the events of a streamed answer.
    pub(crate) fn events(&self, path: &str, body: &Value) -> Vec<Value> {
        let (status, text) = self.call("POST", path, Some(body));
        assert_eq!(status, 200, "{text}");
        assert!(text.ends_with("data: [DONE]\n\n"), "{text}");
        let events = text
            .split("\n\n")
            .filter_map(|event| event.strip_prefix("data: "))
            .filter(|data| *data != "[DONE]");
        events.map(|event| serde_json::from_str(event).expect("events are JSON")).collect()
    }

    /// Returns the sum of a metric over its labels.
    pub(crate) fn metric(&self, name: &str) -> f64 {
        self.metric_of(name, "")
    }

    /// Returns the sum of a metric over labels that contain `label`.
    pub(crate) fn metric_of(&self, name: &str, label: &str) -> f64 {
        sum(&self.get("/metrics").1, name, label)
    }

    /// Waits until no block is kept for a peer.
    pub(crate) fn keeps_nothing(&self, within: Duration) {
        self.until("kvx_blocks_kept", within, |kept| kept == 0.0);
    }

    /// Waits until a metric has a fitting value.
    pub(crate) fn until(&self, metric: &str, within: Duration, fits: impl Fn(f64) -> bool) {
        let until = Instant::now() + within;
        while !fits(self.metric(metric)) {
            assert!(Instant::now() < until, "{metric} is {} after {within:?}", self.metric(metric));
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Returns a greedy answer, with its tokens and the logits of all tokens at each position.
    pub(crate) fn tokens(&self, prompt: &Value, count: usize, params: Option<&Value>) -> Value {
        let mut body = completion(prompt, count);
        if let Some(params) = params {
            body["kv_transfer_params"] = params.clone();
        }
        let (status, answer) = self.post("/v1/completions", &body);
        assert_eq!(status, 200, "{answer}");
        answer
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Reads an answer to its end, and returns its status and its body.
pub(crate) fn answer(mut stream: TcpStream) -> (u16, String) {
    let mut text = Vec::new();
    stream.read_to_end(&mut text).expect("an answer in time");
    let (head, body) = split(&text);
    let status =
        head.split_whitespace().nth(1).and_then(|status| status.parse().ok()).expect("a status");
    let chunked = head.to_ascii_lowercase().contains("transfer-encoding: chunked");
    (
        status,
        if chunked { unchunked(body) } else { String::from_utf8(body.to_vec()).expect("UTF-8") },
    )
}

fn split(text: &[u8]) -> (String, &[u8]) {
    let at = text.windows(4).position(|end| end == b"\r\n\r\n").expect("a head");
    (String::from_utf8_lossy(&text[..at]).into_owned(), &text[at + 4..])
}

fn unchunked(mut body: &[u8]) -> String {
    let mut whole = Vec::new();
    loop {
        let end = body.windows(2).position(|end| end == b"\r\n").expect("a chunk's size");
        let size = std::str::from_utf8(&body[..end]).expect("a size");
        let size = usize::from_str_radix(size, 16).expect("a size");
        if size == 0 {
            return String::from_utf8(whole).expect("UTF-8");
        }
        whole.extend(&body[end + 2..end + 2 + size]);
        body = &body[end + 4 + size..];
    }
}
