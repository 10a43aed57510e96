//! The handle with which a test controls an instance.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, ChildStdin, Command as Process, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::commands::VARIABLE;
use crate::settings::{Begun, Command, Delays, InstanceReport, Line, Script, Settings};

/// The time that an instance may take to answer a command.
const PATIENCE: Duration = Duration::from_secs(10);

/// The events that an instance, and those that it has replaced, have reported.
#[derive(Debug, Default)]
struct Heard {
    violations: Mutex<Vec<String>>,
    begun: Mutex<Vec<Begun>>,
}

/// An instance in a separate process, which ends when this is dropped.
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
    reason = "a test cannot continue without its instance"
)]
impl Instance {
    /// Starts an instance, which serves when this returns. The calling thread must outlive the
    /// instance.
    ///
    /// # Panics
    ///
    /// Panics if the instance does not serve within 10 s. The other methods panic if it does not
    /// answer.
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
            .expect("this program can be started");
        let stdin = process.stdin.take().expect("standard input is piped");
        let stdout = BufReader::new(process.stdout.take().expect("standard output is piped"));
        let (sender, lines) = channel();
        let collected = heard.clone();
        std::thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                match serde_json::from_str(&line) {
                    Ok(Line::Violation(sentence)) => collected
                        .violations
                        .lock()
                        .expect("no holder of the lock panics")
                        .push(sentence),
                    Ok(Line::Begun(begun)) => {
                        collected.begun.lock().expect("no holder of the lock panics").push(begun)
                    }
                    Ok(line) => {
                        if sender.send(line).is_err() {
                            break;
                        }
                    }
                    Err(error) => eprintln!("an instance wrote an invalid line {line:?}: {error}"),
                }
            }
        });
        let mut instance =
            Instance { settings, process, stdin, lines, heard, port: 0, bootstrap: 0 };
        match instance.hear() {
            Line::Listening { port, bootstrap } => {
                (instance.port, instance.bootstrap) = (port, bootstrap)
            }
            _ => panic!("the first line of an instance must be its port"),
        }
        instance
    }

    /// Returns its port on loopback.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Returns the port of its bootstrap server on loopback, or 0 if its connector is not Mooncake.
    pub fn bootstrap_port(&self) -> u16 {
        self.bootstrap
    }

    /// Returns its URL.
    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// Returns its process id.
    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    /// Returns the violations of vLLM's rules that it, and the instances that it has replaced, have
    /// seen.
    pub fn violations(&mut self) -> Vec<String> {
        self.hear_all();
        self.heard.violations.lock().expect("no holder of the lock panics").clone()
    }

    /// Returns the completions that it, and the instances that it has replaced, have begun, if the
    /// settings enable this.
    pub fn begun(&mut self) -> Vec<Begun> {
        self.hear_all();
        self.heard.begun.lock().expect("no holder of the lock panics").clone()
    }

    /// Waits for all earlier reports of the instance.
    fn hear_all(&mut self) {
        if !std::thread::panicking() && matches!(self.process.try_wait(), Ok(None)) {
            self.report();
        }
    }

    /// Makes its next requests fail.
    pub fn script(&mut self, script: Script) {
        self.order(&Command::Script(script));
    }

    /// Removes all scripts.
    pub fn clear_scripts(&mut self) {
        self.order(&Command::ClearScripts);
    }

    /// Changes its delays.
    pub fn delays(&mut self, delays: Delays) {
        self.order(&Command::Delays(delays));
    }

    /// Changes the status of `/health`; `None` leaves requests unanswered.
    pub fn health(&mut self, status: Option<u16>) {
        self.order(&Command::Health(status));
    }

    /// Makes it close its port and connections, or listen again.
    pub fn listen(&mut self, listens: bool) {
        self.order(&Command::Listen(listens));
        let end = Instant::now() + PATIENCE;
        while std::net::TcpStream::connect(("127.0.0.1", self.port)).is_ok() != listens {
            assert!(Instant::now() < end, "the port has not changed as requested");
            std::thread::yield_now();
        }
    }

    /// Returns its counts.
    pub fn report(&mut self) -> InstanceReport {
        self.say(&Command::Report);
        match self.hear() {
            Line::Report(report) => *report,
            _ => panic!("the instance did not report"),
        }
    }

    /// Waits until its report is as expected.
    ///
    /// # Panics
    ///
    /// Panics if that takes longer than 10 s.
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
            std::thread::sleep(Duration::from_millis(5)); // polls the report
        }
    }

    /// Stops its process (SIGSTOP).
    pub fn stop(&self) {
        self.signal(Signal::STOP);
    }

    /// Continues its process (SIGCONT).
    pub fn go_on(&self) {
        self.signal(Signal::CONT);
    }

    /// Kills its process (SIGKILL).
    pub fn kill(&mut self) {
        self.process.kill().expect("the process is not reaped yet");
        self.process.wait().expect("the process is a child");
    }

    /// Starts another instance at its port, which is another engine, as after a crash.
    pub fn restart(&mut self) {
        let settings = Settings { port: self.port, ..self.settings.clone() };
        self.process.kill().ok(); // fails if it was already killed
        self.process.wait().ok();
        *self = Self::start_with(settings, self.heard.clone());
    }

    fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.process.id().cast_signed()).expect("the process id is valid");
        kill_process(pid, signal).expect("the process is not reaped, so its id is not reused");
    }

    fn order(&mut self, command: &Command) {
        self.say(command);
        assert!(matches!(self.hear(), Line::Done), "the instance must confirm a command");
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
        // Errors mean that it was already killed.
        self.process.kill().ok();
        self.process.wait().ok();
    }
}
