//! An instance as a test holds it.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, ChildStdin, Command as Process, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::commands::VARIABLE;
use crate::settings::{Begun, Command, Delays, InstanceReport, Line, Script, Settings};

/// How long an instance may take to answer a command.
const PATIENCE: Duration = Duration::from_secs(10);

/// What an instance has told unasked, and those in whose place it was started.
#[derive(Debug, Default)]
struct Heard {
    violations: Mutex<Vec<String>>,
    begun: Mutex<Vec<Begun>>,
}

/// An instance in a process of its own, which ends with this.
#[derive(Debug)]
pub struct Instance {
    settings: Settings,
    process: Child,
    stdin: ChildStdin,
    lines: Receiver<Line>,
    heard: Arc<Heard>,
    port: u16,
    bootstrap: u16,
}

#[expect(
    clippy::expect_used,
    clippy::panic,
    reason = "a test whose instance does not obey is at its end"
)]
impl Instance {
    /// Starts one; it serves when this returns. The thread that calls must live as long as it.
    ///
    /// # Panics
    ///
    /// When it does not serve within 10 s, as all of these when it does not answer.
    pub fn start(settings: Settings) -> Self {
        Self::start_with(settings, Arc::default())
    }

    fn start_with(settings: Settings, heard: Arc<Heard>) -> Self {
        let mut process = Process::new(std::env::current_exe().expect("this program has a path"));
        let text = serde_json::to_string(&settings).expect("settings are JSON");
        let mut process = process
            .env(VARIABLE, text)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("this program starts again");
        let stdin = process.stdin.take().expect("it is piped");
        let stdout = BufReader::new(process.stdout.take().expect("it is piped"));
        let (sender, lines) = channel();
        let collected = heard.clone();
        std::thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                match serde_json::from_str(&line) {
                    Ok(Line::Violation(sentence)) => {
                        collected.violations.lock().expect("nothing panics with it").push(sentence)
                    }
                    Ok(Line::Begun(begun)) => {
                        collected.begun.lock().expect("nothing panics with it").push(begun)
                    }
                    Ok(line) => {
                        if sender.send(line).is_err() {
                            break;
                        }
                    }
                    Err(error) => eprintln!("an instance said {line:?}: {error}"),
                }
            }
        });
        let mut instance =
            Instance { settings, process, stdin, lines, heard, port: 0, bootstrap: 0 };
        match instance.hear() {
            Line::Listening { port, bootstrap } => {
                (instance.port, instance.bootstrap) = (port, bootstrap)
            }
            _ => panic!("the instance did not begin with where it listens"),
        }
        instance
    }

    /// Where it serves, on loopback.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Where its bootstrap server listens, on loopback; 0 if it is not Mooncake's.
    pub fn bootstrap_port(&self) -> u16 {
        self.bootstrap
    }

    /// Its URL.
    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    /// What of vLLM's rules has been broken toward it, also toward those in whose place it was
    /// started.
    pub fn violations(&mut self) -> Vec<String> {
        self.hear_all();
        self.heard.violations.lock().expect("nothing panics with it").clone()
    }

    /// The completions that it has begun with, and those in whose place it was started, if its
    /// settings let it tell.
    pub fn begun(&mut self) -> Vec<Begun> {
        self.hear_all();
        self.heard.begun.lock().expect("nothing panics with it").clone()
    }

    /// Hears what it has said before.
    fn hear_all(&mut self) {
        if !std::thread::panicking() && matches!(self.process.try_wait(), Ok(None)) {
            self.report();
        }
    }

    /// Has something go wrong with its next requests.
    pub fn script(&mut self, script: Script) {
        self.order(&Command::Script(script));
    }

    /// Forgets what should go wrong.
    pub fn clear_scripts(&mut self) {
        self.order(&Command::ClearScripts);
    }

    /// Changes how fast it is.
    pub fn delays(&mut self, delays: Delays) {
        self.order(&Command::Delays(delays));
    }

    /// Changes what it says of its health: a status, or none to say nothing.
    pub fn health(&mut self, status: Option<u16>) {
        self.order(&Command::Health(status));
    }

    /// Has it refuse connections, and close those it has; or listen again.
    pub fn listen(&mut self, listens: bool) {
        self.order(&Command::Listen(listens));
        let end = Instant::now() + PATIENCE;
        while std::net::TcpStream::connect(("127.0.0.1", self.port)).is_ok() != listens {
            assert!(Instant::now() < end, "its port is not as ordered");
            std::thread::yield_now();
        }
    }

    /// What it has counted.
    pub fn report(&mut self) -> InstanceReport {
        self.say(&Command::Report);
        match self.hear() {
            Line::Report(report) => *report,
            _ => panic!("the instance did not report"),
        }
    }

    /// Waits until its report is as wanted.
    ///
    /// # Panics
    ///
    /// When it is not within 10 s.
    pub fn wait_until(
        &mut self,
        what: &str,
        wanted: impl Fn(&InstanceReport) -> bool,
    ) -> InstanceReport {
        let end = Instant::now() + PATIENCE;
        loop {
            let report = self.report();
            if wanted(&report) {
                return report;
            }
            assert!(Instant::now() < end, "not within {PATIENCE:?}: {what}; {report:#?}");
            std::thread::sleep(Duration::from_millis(5)); // between looks, never in place of one
        }
    }

    /// Stops it (SIGSTOP).
    pub fn stop(&self) {
        self.signal(Signal::STOP);
    }

    /// Lets it go on (SIGCONT).
    pub fn go_on(&self) {
        self.signal(Signal::CONT);
    }

    /// Kills it (SIGKILL).
    pub fn kill(&mut self) {
        self.process.kill().expect("it has not been waited for");
        self.process.wait().expect("it is a child");
    }

    /// Starts another one in its place, on its port: another engine, as after a crash.
    pub fn restart(&mut self) {
        let settings = Settings { port: self.port, ..self.settings.clone() };
        self.process.kill().ok(); // an error: it was killed before
        self.process.wait().ok();
        *self = Self::start_with(settings, self.heard.clone());
    }

    fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.process.id().cast_signed()).expect("it has a process id");
        kill_process(pid, signal).expect("it is not reaped, so its id is its own");
    }

    fn order(&mut self, command: &Command) {
        self.say(command);
        assert!(matches!(self.hear(), Line::Done), "the instance did not obey");
    }

    fn say(&mut self, command: &Command) {
        let text = serde_json::to_string(command).expect("commands are JSON");
        writeln!(self.stdin, "{text}")
            .and_then(|()| self.stdin.flush())
            .expect("the instance reads commands");
    }

    fn hear(&self) -> Line {
        match self.lines.recv_timeout(PATIENCE) {
            Ok(line) => line,
            Err(RecvTimeoutError::Timeout) => {
                panic!("the instance did not answer within {PATIENCE:?}")
            }
            Err(RecvTimeoutError::Disconnected) => panic!("the instance has ended"),
        }
    }
}

impl Drop for Instance {
    fn drop(&mut self) {
        // Errors: it has been killed already.
        self.process.kill().ok();
        self.process.wait().ok();
    }
}
