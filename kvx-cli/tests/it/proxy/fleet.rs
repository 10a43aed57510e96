//! A fleet of instances and the router in front of them, each a process.

use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use kvx_instance::{Instance, Settings};
use kvx_testkit::kill_after;
use rustix::process::{Pid, Signal, kill_process};

use crate::proxy::client::{CUT_OFF, Call};

/// The time after which a router is killed, whatever happens to its test.
const LIMIT: Duration = Duration::from_secs(120);

/// `kvx proxy` in a separate process.
pub(crate) struct Proxy {
    pub(crate) port: u16,
    process: Child,
    /// Its standard output: the access log.
    out: Arc<Mutex<Vec<String>>>,
    err: Arc<Mutex<Vec<String>>>,
}

impl Proxy {
    /// Starts it with these arguments and variables, and returns once it listens.
    pub(crate) fn start(arguments: &[&str], variables: &[(&str, &str)]) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvx"));
        command.arg("proxy").args(arguments);
        Proxy::spawn(command, variables)
    }

    /// Starts a command that becomes `kvx proxy`.
    pub(crate) fn spawn(mut command: Command, variables: &[(&str, &str)]) -> Self {
        let mut process = command
            .env_remove("OPENAI_API_KEY")
            .env_remove("ADMIN_API_KEY")
            .envs(variables.iter().copied())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("kvx starts");
        kill_after(&process, LIMIT);
        let (said, listening) = channel();
        let out = collect(process.stdout.take().expect("it is piped"), None);
        let err = collect(process.stderr.take().expect("it is piped"), Some(said));
        let mut proxy = Proxy { port: 0, process, out, err };
        proxy.port = proxy.hear_port(&listening);
        proxy
    }

    fn hear_port(&self, lines: &Receiver<String>) -> u16 {
        let end = Instant::now() + CUT_OFF;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let Ok(line) = lines.recv_timeout(left) else {
                panic!("it does not listen: {}", self.errors())
            };
            if let Some((_, address)) = line.split_once("listening on ") {
                let port = address
                    .trim()
                    .trim_end_matches('/')
                    .rsplit_once(':')
                    .expect("an address has a port")
                    .1;
                return port.parse().unwrap_or_else(|_| panic!("no port: {line}"));
            }
        }
    }

    /// Returns its standard error so far.
    pub(crate) fn errors(&self) -> String {
        self.err.lock().expect("nothing panics with it").join("\n")
    }

    /// Returns its standard output so far.
    pub(crate) fn output(&self) -> String {
        self.out.lock().expect("nothing panics with it").join("\n")
    }

    pub(crate) fn pid(&self) -> u32 {
        self.process.id()
    }

    pub(crate) fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.process.id().cast_signed()).expect("it has a process id");
        kill_process(pid, signal).expect("it is not reaped, so its id is its own");
    }

    /// Waits until it has exited, and returns its exit status.
    pub(crate) async fn ended(&mut self, limit: Duration) -> i32 {
        let end = Instant::now() + limit;
        loop {
            if let Some(status) = self.process.try_wait().expect("it is a child") {
                return status.code().unwrap_or(-1);
            }
            assert!(Instant::now() < end, "the router did not end within {limit:?}");
            tokio::time::sleep(Duration::from_millis(5)).await; // between polls
        }
    }

    /// Returns its resident memory in KiB.
    pub(crate) fn resident(&self) -> u64 {
        self.memory("VmRSS:")
    }

    /// Returns the most resident memory that it has had, in KiB.
    pub(crate) fn peak(&self) -> u64 {
        self.memory("VmHWM:")
    }

    fn memory(&self, field: &str) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.process.id()))
            .expect("it runs");
        let line =
            status.lines().find_map(|line| line.strip_prefix(field)).expect("a process has memory");
        line.trim().trim_end_matches(" kB").parse().expect("a number of KiB")
    }

    /// Waits until `GET path` returns the wanted answer.
    pub(crate) async fn wait_until(
        &self,
        path: &str,
        what: &str,
        wanted: impl Fn(u16, &str) -> bool,
    ) {
        let end = Instant::now() + CUT_OFF;
        loop {
            let answer = Call::get(self.port, path).send().await;
            if wanted(answer.status, &answer.text()) {
                return;
            }
            assert!(Instant::now() < end, "not within {CUT_OFF:?}: {what}; {}", answer.text());
            tokio::time::sleep(Duration::from_millis(10)).await; // between polls
        }
    }

    /// Waits for the line of the access log that contains `part`.
    pub(crate) async fn log_line(&self, part: &str) -> String {
        let end = Instant::now() + CUT_OFF;
        loop {
            if let Some(line) = self.output().lines().find(|line| line.contains(part)) {
                return line.to_owned();
            }
            assert!(Instant::now() < end, "{part} is not logged: {}", self.output());
            tokio::time::sleep(Duration::from_millis(5)).await; // between polls
        }
    }

    /// Returns the sum of a metric's lines that contain `part`.
    pub(crate) async fn metric(&self, name: &str, part: &str) -> f64 {
        let text = Call::get(self.port, "/metrics").send().await.text();
        let lines = text.lines().filter(|line| {
            line.strip_prefix(name).is_some_and(|rest| rest.starts_with(['{', ' ']))
                && line.contains(part)
        });
        lines.filter_map(|line| line.rsplit_once(' ')?.1.parse::<f64>().ok()).sum()
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        // An error: it has already exited.
        self.process.kill().ok();
        self.process.wait().ok();
        if std::thread::panicking() {
            eprintln!("the router said:\n{}", self.errors());
        }
    }
}

fn collect(
    stream: impl std::io::Read + Send + 'static,
    told: Option<std::sync::mpsc::Sender<String>>,
) -> Arc<Mutex<Vec<String>>> {
    let lines = Arc::new(Mutex::new(Vec::new()));
    let kept = lines.clone();
    std::thread::spawn(move || {
        for line in BufReader::new(stream).lines().map_while(Result::ok) {
            if let Some(told) = &told {
                told.send(line.clone()).ok(); // an error: the receiver is gone
            }
            kept.lock().expect("nothing panics with it").push(line);
        }
    });
    lines
}

/// A configuration file that is removed when this is dropped.
pub(crate) struct SetupFile(PathBuf);

impl SetupFile {
    pub(crate) fn new(text: &str) -> Self {
        use std::sync::atomic::{AtomicU32, Ordering};
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let name = format!(
            "kvx-proxy-{}-{}.toml",
            std::process::id(),
            COUNT.fetch_add(1, Ordering::Relaxed)
        );
        let file = SetupFile(std::env::temp_dir().join(name));
        file.write(text);
        file
    }

    pub(crate) fn write(&self, text: &str) {
        std::fs::write(&self.0, text).expect("the temporary folder is writable");
        // Some of the files contain keys.
        let alone = std::fs::Permissions::from_mode(0o600);
        std::fs::set_permissions(&self.0, alone).expect("the file is ours");
    }

    pub(crate) fn path(&self) -> &str {
        self.0.to_str().expect("the temporary folder has a name of text")
    }
}

impl Drop for SetupFile {
    fn drop(&mut self) {
        std::fs::remove_file(&self.0).ok();
    }
}

/// The configuration of a fleet.
#[derive(Default)]
pub(crate) struct Plan {
    prefill: Vec<Settings>,
    decode: Vec<Settings>,
    setup: String,
    pool: String,
    variables: Vec<(&'static str, &'static str)>,
}

impl Plan {
    /// Creates a plan with this many prefill and decode instances and these settings.
    pub(crate) fn of(prefill: usize, decode: usize, settings: &Settings) -> Self {
        Plan {
            prefill: vec![settings.clone(); prefill],
            decode: vec![settings.clone(); decode],
            ..Plan::default()
        }
    }

    pub(crate) fn prefill(mut self, change: impl Fn(usize, &mut Settings)) -> Self {
        self.prefill.iter_mut().enumerate().for_each(|(index, settings)| change(index, settings));
        self
    }

    pub(crate) fn decode(mut self, change: impl Fn(usize, &mut Settings)) -> Self {
        self.decode.iter_mut().enumerate().for_each(|(index, settings)| change(index, settings));
        self
    }

    /// Adds TOML before the pool.
    pub(crate) fn setup(mut self, text: &str) -> Self {
        self.setup = text.to_owned();
        self
    }

    /// Adds TOML within the pool.
    pub(crate) fn pool(mut self, text: &str) -> Self {
        self.pool = text.to_owned();
        self
    }

    pub(crate) fn variable(mut self, name: &'static str, value: &'static str) -> Self {
        self.variables.push((name, value));
        self
    }

    /// Starts the fleet, and returns once the router is ready.
    pub(crate) async fn start(self) -> Fleet {
        let instances =
            |settings: Vec<Settings>| settings.into_iter().map(Instance::start).collect::<Vec<_>>();
        let (prefill, decode) = (instances(self.prefill), instances(self.decode));
        let file = SetupFile::new(&setup_text(&self.setup, &self.pool, &prefill, &decode));
        let proxy = Proxy::start(&["--config", file.path()], &self.variables);
        proxy.wait_until("/ready", "it is ready", |status, _| status == 200).await;
        Fleet { prefill, decode, proxy, file, setup: self.setup, pool: self.pool }
    }
}

fn setup_text(setup: &str, pool: &str, prefill: &[Instance], decode: &[Instance]) -> String {
    let entries = |instances: &[Instance]| {
        let entry = |instance: &Instance| match instance.bootstrap_port() {
            0 => format!("\"{}\"", instance.url()),
            port => format!("{{ url = \"{}\", bootstrap_port = {port} }}", instance.url()),
        };
        instances.iter().map(entry).collect::<Vec<_>>().join(", ")
    };
    format!(
        "port = 0\n{setup}\n[[pool]]\n{pool}\nprefill = [{}]\ndecode = [{}]\n",
        entries(prefill),
        entries(decode)
    )
}

/// Instances and their router. Dropping it fails the test if a rule of vLLM was broken.
pub(crate) struct Fleet {
    pub(crate) prefill: Vec<Instance>,
    pub(crate) decode: Vec<Instance>,
    pub(crate) proxy: Proxy,
    file: SetupFile,
    setup: String,
    pool: String,
}

impl Fleet {
    /// Starts a fleet with default settings.
    pub(crate) async fn new(prefill: usize, decode: usize) -> Self {
        Plan::of(prefill, decode, &Settings::default()).start().await
    }

    pub(crate) fn port(&self) -> u16 {
        self.proxy.port
    }

    /// Rewrites the configuration with other instances, and reloads it (SIGHUP).
    pub(crate) fn reread(&self, prefill: &[Instance], decode: &[Instance]) {
        self.file.write(&setup_text(&self.setup, &self.pool, prefill, decode));
        self.proxy.signal(Signal::HUP);
    }

    /// Reloads an invalid file.
    pub(crate) fn reread_text(&self, text: &str) {
        self.file.write(text);
        self.proxy.signal(Signal::HUP);
    }

    /// Waits until no instance has work, and no prefill's blocks wait for a reader.
    pub(crate) fn wait_until_idle(&mut self) {
        for instance in self.prefill.iter_mut().chain(&mut self.decode) {
            instance.wait_until("it is idle", |report| report.running == 0);
        }
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        let instances = self.prefill.iter_mut().chain(&mut self.decode);
        let violations: Vec<_> = instances.flat_map(Instance::violations).collect();
        if !std::thread::panicking() {
            assert!(violations.is_empty(), "these would stop or mislead a vLLM: {violations:#?}");
        } else if !violations.is_empty() {
            eprintln!("these would stop or mislead a vLLM: {violations:#?}");
        }
    }
}
