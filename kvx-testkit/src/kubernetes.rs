//! A fake of the Kubernetes API, for tests of discovery.

use std::collections::BTreeMap;
use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use serde_json::{Value, json};

/// The most bytes of a request.
const REQUEST: u64 = 64 << 10;
/// The time between two looks whether the server has ended.
const LOOK: Duration = Duration::from_millis(200);

/// A fake API server on loopback, with the pods of one namespace: LIST in pages and WATCH over HTTP.
///
/// It shows that a client handles the protocol and its faults. It is not Kubernetes: it has no
/// authorisation, validation, controllers or kubelets, and its times are those of the test.
#[derive(Debug)]
pub struct FakeKubernetes {
    address: SocketAddr,
    server: Arc<Server>,
}

#[derive(Debug, Default)]
struct Server {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    version: u64,
    /// Watches cannot start before this version.
    oldest: u64,
    pods: BTreeMap<String, Value>,
    log: Vec<(u64, Entry)>,
    requests: Vec<String>,
    token: Option<String>,
    /// The status of every answer.
    refusal: Option<u16>,
    /// The pages that expire while a list is read.
    expiring_pages: usize,
    /// Watches of an earlier generation end so.
    generation: u64,
    end: Option<WatchEnd>,
    has_ended: bool,
}

#[derive(Clone, Debug)]
enum Entry {
    Change { before: Option<Value>, after: Option<Value> },
    Bookmark,
    Expired,
}

/// How all watches end that are open now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WatchEnd {
    /// The server ends its answer, as it does after `timeoutSeconds`.
    Closed,
    /// The connection breaks.
    Cut,
    /// The connection stays open, and nothing arrives any more.
    Silent,
}

/// Returns a pod that is ready, as JSON with more than kvx reads.
pub fn ready_pod(name: &str, uid: &str, address: &str, labels: &[(&str, &str)]) -> Value {
    let labels: BTreeMap<_, _> = labels.iter().copied().collect();
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": "llm",
            "uid": uid,
            "labels": labels,
            "managedFields": [{"manager": "kubelet", "fieldsV1": {"f:status": {}}}],
        },
        "spec": {"containers": [{"name": "engine", "ports": [{"containerPort": 8000}]}]},
        "status": {
            "phase": "Running",
            "podIP": address,
            "podIPs": [{"ip": address}],
            "conditions": [
                {"type": "PodScheduled", "status": "True"},
                {"type": "Ready", "status": "True", "lastProbeTime": null},
            ],
        },
    })
}

impl FakeKubernetes {
    /// Starts a server without pods.
    ///
    /// # Errors
    ///
    /// Fails if no port is free.
    pub fn start() -> io::Result<Self> {
        let listener = TcpListener::bind(("127.0.0.1", 0))?;
        let (address, server) = (listener.local_addr()?, Arc::<Server>::default());
        server.state().version = 100;
        let accepting = Arc::clone(&server);
        thread::spawn(move || {
            for stream in listener.incoming() {
                if accepting.state().has_ended {
                    return;
                }
                let server = Arc::clone(&accepting);
                thread::spawn(move || {
                    // An error: the client has gone.
                    stream.and_then(|stream| server.answer(stream)).ok();
                });
            }
        });
        Ok(FakeKubernetes { address, server })
    }

    /// Returns its URL.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Returns its host and port.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Adds a pod, or changes the one of its name.
    pub fn set(&self, mut pod: Value) {
        self.change(|state| {
            pod["metadata"]["resourceVersion"] = state.version.to_string().into();
            let name = pod["metadata"]["name"].as_str().unwrap_or_default().to_owned();
            let before = state.pods.insert(name, pod.clone());
            Entry::Change { before, after: Some(pod) }
        });
    }

    /// Changes a pod with this name, if there is one.
    pub fn edit(&self, name: &str, edit: impl FnOnce(&mut Value)) {
        let pod = self.server.state().pods.get(name).cloned();
        if let Some(mut pod) = pod {
            edit(&mut pod);
            self.set(pod);
        }
    }

    /// Removes a pod.
    pub fn delete(&self, name: &str) {
        self.change(|state| Entry::Change { before: state.pods.remove(name), after: None });
    }

    /// Sends a bookmark.
    pub fn bookmark(&self) {
        self.change(|_| Entry::Bookmark);
    }

    /// Forgets all changes, and sends open watches an event that says so. Watches from earlier
    /// versions get status 410.
    pub fn expire(&self) {
        self.change(|state| {
            state.oldest = state.version;
            Entry::Expired
        });
    }

    /// Forgets all changes. Open watches do not notice it.
    pub fn forget(&self) {
        self.change(|state| {
            state.oldest = state.version;
            Entry::Change { before: None, after: None }
        });
    }

    /// Answers that many pages, other than first ones, with status 410.
    pub fn expire_pages(&self, count: usize) {
        self.server.state().expiring_pages = count;
    }

    /// Ends the open watches.
    pub fn end_watches(&self, end: WatchEnd) {
        let mut state = self.server.state();
        state.generation += 1;
        state.end = Some(end);
        self.server.changed.notify_all();
    }

    /// Answers every request with this status.
    pub fn refuse(&self, status: Option<u16>) {
        self.server.state().refusal = status;
    }

    /// Accepts requests with this token only.
    pub fn require_token(&self, token: &str) {
        self.server.state().token = Some(token.to_owned());
    }

    /// Returns the targets of all requests so far.
    pub fn requests(&self) -> Vec<String> {
        self.server.state().requests.clone()
    }

    fn change(&self, change: impl FnOnce(&mut State) -> Entry) {
        let mut state = self.server.state();
        state.version += 1;
        let entry = change(&mut state);
        let version = state.version;
        state.log.push((version, entry));
        self.server.changed.notify_all();
    }
}

impl Drop for FakeKubernetes {
    fn drop(&mut self) {
        self.server.state().has_ended = true;
        self.server.changed.notify_all();
        TcpStream::connect(self.address).ok(); // wakes the listener
    }
}

impl Server {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn answer(&self, mut stream: TcpStream) -> io::Result<()> {
        let mut lines = BufReader::new(stream.try_clone()?.take(REQUEST)).lines();
        let first = lines.next().transpose()?.unwrap_or_default();
        let target = first.split(' ').nth(1).unwrap_or_default().to_owned();
        let mut token = None;
        for line in lines {
            let line = line?;
            if line.is_empty() {
                break;
            }
            if let Some((name, value)) = line.split_once(": ")
                && name.eq_ignore_ascii_case("authorization")
            {
                token = value.strip_prefix("Bearer ").map(str::to_owned);
            }
        }
        let (path, query) = target.split_once('?').unwrap_or((&target, ""));
        let query: BTreeMap<String, String> = query
            .split('&')
            .filter_map(|pair| pair.split_once('='))
            .map(|(key, value)| (key.to_owned(), decoded(value)))
            .collect();
        let get = |key: &str| query.get(key).map_or("", String::as_str);
        let (status, answer) = {
            let mut state = self.state();
            state.requests.push(target.clone());
            if state.token.is_some() && state.token != token {
                (401, failure(401, "Unauthorized"))
            } else if let Some(status) = state.refusal {
                (status, failure(status, "the test refuses it"))
            } else if path != "/api/v1/namespaces/llm/pods" {
                (404, failure(404, "the server could not find the requested resource"))
            } else if get("watch").is_empty() {
                state.list(get("labelSelector"), get("limit"), get("continue"))
            } else if get("resourceVersion").parse().is_ok_and(|from: u64| from < state.oldest) {
                (410, failure(410, "too old resource version"))
            } else {
                (200, Value::Null)
            }
        };
        if (status, &answer) == (200, &Value::Null) {
            let from = get("resourceVersion").parse().unwrap_or(u64::MAX);
            return self.watch(stream, from, get("labelSelector"));
        }
        let body = answer.to_string();
        write!(
            stream,
            "HTTP/1.1 {status} Status\r\ncontent-type: application/json\r\nconnection: close\r\n\
             content-length: {}\r\n\r\n{body}",
            body.len()
        )
    }

    fn watch(&self, mut stream: TcpStream, from: u64, selector: &str) -> io::Result<()> {
        stream.write_all(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")?;
        let generation = self.state().generation;
        let mut sent = from;
        loop {
            let state = self.state();
            if state.has_ended {
                return Ok(());
            }
            if state.generation != generation {
                match state.end {
                    Some(WatchEnd::Closed) => return stream.write_all(b"0\r\n\r\n"),
                    Some(WatchEnd::Silent) => {}
                    Some(WatchEnd::Cut) | None => return Ok(()),
                }
            }
            let is_silent = state.generation != generation;
            let lines: Vec<String> = match is_silent {
                true => Vec::new(),
                false => {
                    let new = state.log.iter().filter(|(version, _)| *version > sent);
                    new.filter_map(|(version, entry)| entry.line(*version, selector)).collect()
                }
            };
            if lines.is_empty() {
                // A late look is no failure.
                drop(self.changed.wait_timeout(state, LOOK));
                continue;
            }
            sent = state.version;
            drop(state);
            for line in lines {
                write!(stream, "{:x}\r\n{line}\n\r\n", line.len() + 1)?;
            }
        }
    }
}

impl State {
    /// Returns a page. Its continuation is the name of its last pod.
    fn list(&mut self, selector: &str, limit: &str, after: &str) -> (u16, Value) {
        if !after.is_empty() && self.expiring_pages > 0 {
            self.expiring_pages -= 1;
            return (410, failure(410, "The provided continue parameter is too old"));
        }
        let limit = limit.parse().unwrap_or(usize::MAX);
        let rest: Vec<_> = self
            .pods
            .iter()
            .filter(|(name, pod)| name.as_str() > after && matches(pod, selector))
            .collect();
        let page = &rest[..rest.len().min(limit)];
        let mut metadata = json!({"resourceVersion": self.version.to_string()});
        if page.len() < rest.len()
            && let Some((name, _)) = page.last()
        {
            metadata["continue"] = Value::from(name.as_str());
            metadata["remainingItemCount"] = Value::from(rest.len() - page.len());
        }
        let items: Vec<_> = page.iter().map(|(_, pod)| pod).collect();
        let list =
            json!({"kind": "PodList", "apiVersion": "v1", "metadata": metadata, "items": items});
        (200, list)
    }
}

impl Entry {
    /// Returns the event for watches with this selector, if there is one.
    fn line(&self, version: u64, selector: &str) -> Option<String> {
        let version = version.to_string();
        let (kind, object) = match self {
            Entry::Bookmark => (
                "BOOKMARK",
                json!({"kind": "Pod", "metadata": {"resourceVersion": version, "creationTimestamp": null}}),
            ),
            Entry::Expired => ("ERROR", failure(410, "too old resource version")),
            Entry::Change { before, after } => {
                let matching =
                    |pod: &Option<Value>| pod.clone().filter(|pod| matches(pod, selector));
                let (kind, mut pod) = match (matching(before), matching(after)) {
                    (None, None) => return None,
                    (None, Some(pod)) => ("ADDED", pod),
                    (Some(_), Some(pod)) => ("MODIFIED", pod),
                    // Also a pod whose labels do not match any more.
                    (Some(pod), None) => ("DELETED", after.clone().unwrap_or(pod)),
                };
                pod["metadata"]["resourceVersion"] = version.into();
                (kind, pod)
            }
        };
        Some(json!({"type": kind, "object": object}).to_string())
    }
}

fn failure(code: u16, message: &str) -> Value {
    json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, "code": code})
}

/// Returns true if a pod has the labels: terms `key=value` and `key in (value,value)`.
fn matches(pod: &Value, selector: &str) -> bool {
    let label = |key: &str| pod["metadata"]["labels"][key].as_str();
    let mut rest = selector;
    while !rest.is_empty() {
        let end = match (rest.find(','), rest.find('(')) {
            (Some(comma), Some(open)) if open < comma => rest.find(')').map(|at| at + 1),
            (comma, _) => comma,
        };
        let (term, after) = rest.split_at(end.unwrap_or(rest.len()));
        rest = after.trim_start_matches(',');
        let has = match term.split_once(" in (") {
            Some((key, values)) => {
                let mut values = values.trim_end_matches(')').split(',');
                label(key).is_some_and(|label| values.any(|value| value == label))
            }
            None => term.split_once('=').is_some_and(|(key, value)| label(key) == Some(value)),
        };
        if !has {
            return false;
        }
    }
    true
}

/// Decodes the escapes of a query.
fn decoded(text: &str) -> String {
    let mut bytes = Vec::new();
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        let digits = [rest.clone().next(), rest.clone().nth(1)];
        match (byte, digits.map(|digit| digit.and_then(|digit| char::from(digit).to_digit(16)))) {
            (b'%', [Some(high), Some(low)]) => {
                bytes.push((high * 16 + low) as u8);
                rest.nth(1);
            }
            _ => bytes.push(byte),
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}
