//! The state of an instance: its settings, scripts, blocks and counts.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use tokio::sync::{Notify, watch};

use crate::blocks::KeptBlocks;
use crate::settings::{Delays, Fault, InstanceReport, Leg, Line, Script, Seen, Settings};

pub(crate) struct State {
    pub(crate) settings: Settings,
    /// The port of its API and its side channel.
    pub(crate) port: u16,
    engine: String,
    inner: Mutex<Inner>,
    /// Notified when blocks are published.
    pub(crate) published: Notify,
    /// True while the instance listens; all connections end when it becomes false.
    pub(crate) listens: watch::Sender<bool>,
    pub(crate) connections: AtomicU64,
    ids: AtomicU64,
}

pub(crate) struct Inner {
    pub(crate) scripts: Vec<Script>,
    pub(crate) delays: Delays,
    pub(crate) health: Option<u16>,
    pub(crate) blocks: KeptBlocks,
    pub(crate) counts: InstanceReport,
    /// The engine has stopped.
    pub(crate) dead: bool,
}

impl State {
    pub(crate) fn new(settings: Settings, port: u16) -> Arc<Self> {
        let inner = Inner {
            scripts: Vec::new(),
            delays: settings.delays,
            health: Some(200),
            blocks: KeptBlocks::new(Duration::from_millis(settings.lease_ms)),
            counts: InstanceReport::default(),
            dead: false,
        };
        // A process that replaces another one at its port is another engine.
        let engine = format!("engine-{port}-{}", std::process::id());
        Arc::new(State {
            settings,
            port,
            engine,
            inner: Mutex::new(inner),
            published: Notify::new(),
            listens: watch::Sender::new(true),
            connections: AtomicU64::new(0),
            ids: AtomicU64::new(1),
        })
    }

    #[expect(clippy::expect_used, reason = "a panic ends the process of a test")]
    pub(crate) fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().expect("no holder of the lock panics")
    }

    /// Returns the engine id of a data-parallel rank.
    pub(crate) fn engine(&self, rank: u32) -> String {
        match self.settings.dp_size {
            1 => self.engine.clone(),
            _ => format!("{}_dp{rank}", self.engine),
        }
    }

    /// Returns the message of a fault, with names that no client of a router may see.
    pub(crate) fn fault_message(&self, what: &str) -> String {
        let (engine, port) = (&self.engine, self.port);
        format!("{what}: engine {engine}, http://127.0.0.1:{port}/v1, 127.0.0.1:{port}")
    }

    /// Returns a request's id in the engine: the client's id and a suffix of eight characters.
    pub(crate) fn internal_id(&self, outer: &str) -> String {
        let count = self.ids.fetch_add(1, Ordering::Relaxed);
        format!("{outer}-{:08x}", count.wrapping_mul(0x9e37_79b1) & 0xffff_ffff)
    }

    /// Reports a violation by the router. Stops the engine if vLLM's engine would stop.
    pub(crate) fn violation(&self, sentence: &str, stops: bool) {
        self.lock().dead |= stops;
        say(&Line::Violation(format!("{}: {sentence}", self.engine)));
    }

    /// Returns the fault of a request, if it has one.
    pub(crate) fn fault(&self, leg: Leg) -> Option<Fault> {
        let mut inner = self.lock();
        let fits = |script: &&mut Script| {
            script.times > 0 && script.leg.is_none_or(|wanted| wanted == leg)
        };
        let script = inner.scripts.iter_mut().find(fits)?;
        script.times -= 1;
        Some(script.fault.clone())
    }

    pub(crate) fn note(&self, seen: Seen) {
        let mut inner = self.lock();
        if inner.counts.seen.len() >= self.settings.keeps {
            inner.counts.seen.clear(); // tests look at the latest requests
        }
        if self.settings.keeps > 0 {
            inner.counts.seen.push(seen);
        }
    }

    pub(crate) fn report(&self) -> InstanceReport {
        let mut inner = self.lock();
        inner.blocks.sweep();
        let (read, pinned, expired) = inner.blocks.counts();
        let connections = self.connections.load(Ordering::Relaxed);
        InstanceReport { read, pinned, expired, connections, ..inner.counts.clone() }
    }
}

/// A running request. It counts as aborted if it is dropped before it has completed.
pub(crate) struct Running {
    state: Arc<State>,
    leg: Leg,
    completed: bool,
}

impl Running {
    pub(crate) fn new(state: &Arc<State>, leg: Leg) -> Self {
        state.lock().counts.running += 1;
        Running { state: state.clone(), leg, completed: false }
    }

    pub(crate) fn complete(mut self) {
        self.completed = true;
        let counts = &mut self.state.lock().counts;
        match self.leg {
            Leg::Prefill => counts.prefills += 1,
            Leg::Decode => counts.decodes += 1,
            Leg::Alone => counts.alone += 1,
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let counts = &mut self.state.lock().counts;
        counts.running -= 1;
        match self.leg {
            _ if self.completed => {}
            Leg::Prefill => counts.aborted_prefills += 1,
            Leg::Decode | Leg::Alone => counts.aborted_decodes += 1,
        }
    }
}

/// Sends a line to the test.
#[expect(clippy::expect_used, reason = "a panic ends the process of a test")]
pub(crate) fn say(line: &Line) {
    use std::io::Write as _;
    let mut text = serde_json::to_vec(line).expect("lines are JSON");
    text.push(b'\n');
    let mut out = std::io::stdout().lock();
    out.write_all(&text).and_then(|()| out.flush()).ok(); // an error means that the test has ended
}
