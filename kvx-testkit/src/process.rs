//! Processes of tests: started, stopped and killed by pid. None outlives its test.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt as _;
use std::process::{ChildStdin, Command, Output, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError, channel};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use crate::check::{CUT_OFF, Failure};

/// Kills a child that has not ended after `limit`. Callers that wait for it, or read its output,
/// then return.
///
/// # Panics
/// If the child cannot be watched because it has already been waited for.
#[expect(
    clippy::expect_used,
    reason = "a test that cannot watch its child must not go on to wait for it"
)]
pub fn kill_after(child: &std::process::Child, limit: Duration) {
    let life = pidfd_open(Pid::from_child(child), PidfdFlags::empty())
        .expect("it has not been waited for");
    let until = Instant::now() + limit;
    std::thread::spawn(move || {
        let ended = loop {
            let left = until.saturating_duration_since(Instant::now());
            let left = Timespec::try_from(left).expect("a limit fits into a timespec");
            match poll(&mut [PollFd::new(&life, PollFlags::IN)], Some(&left)) {
                Err(Errno::INTR) if Instant::now() < until => {}
                outcome => break outcome == Ok(1),
            }
        };
        if !ended {
            pidfd_send_signal(&life, Signal::KILL).ok(); // the error means that it has ended
        }
    });
}

/// Runs a program without input, and returns its status and output. It is killed after `limit`.
///
/// # Panics
/// If the program cannot be started, or if a process that it started keeps its output open long
/// afterwards.
#[expect(clippy::expect_used, reason = "a test that cannot run its program is at its end")]
pub fn output(command: &mut Command, limit: Duration) -> Output {
    output_if_started(command, limit).expect("the program starts, and its output can be read")
}

/// Does the same for a program that may be missing.
#[expect(clippy::expect_used, reason = "a test that cannot end its program is at its end")]
pub(crate) fn output_if_started(command: &mut Command, limit: Duration) -> std::io::Result<Output> {
    let command = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = command.spawn()?;
    kill_after(&child, limit);
    let (sender, output) = channel();
    std::thread::spawn(move || sender.send(child.wait_with_output()));
    output.recv_timeout(limit + CUT_OFF).expect("nothing else holds its output")
}

/// Returns where a [`Child`] writes its answers; call it before the child loads a library.
/// Libraries log on standard output, where their lines would be taken for answers, so this
/// redirects standard output to standard error.
pub fn answers_apart() -> std::io::Result<File> {
    let answers = rustix::io::fcntl_dupfd_cloexec(std::io::stdout(), 3)?;
    rustix::stdio::dup2_stdout(std::io::stderr())?;
    Ok(answers.into())
}

/// A child process that receives and answers lines. It is killed when this is dropped or its parent
/// dies.
pub struct Child {
    process: std::process::Child,
    stdin: ChildStdin,
    answers: Receiver<String>,
    /// True if the answers may come from a process that this child has started, and that dies with
    /// it.
    starts_another: bool,
}

impl Child {
    /// Starts this program again with `variable` set to `value`.
    pub fn start_self(variable: &str, value: &str) -> Result<Self, Failure> {
        Child::start_self_with(&[(variable, value.to_owned())])
    }

    /// Starts this program again with several variables.
    pub fn start_self_with(variables: &[(&str, String)]) -> Result<Self, Failure> {
        Child::start_self_through(&[], variables)
    }

    /// Starts this program again behind a program and its arguments, if there are any.
    pub(crate) fn start_self_through(
        through: &[String],
        variables: &[(&str, String)],
    ) -> Result<Self, Failure> {
        let program = std::env::current_exe()?;
        let mut words = through.iter().map(OsStr::new).chain([program.as_os_str()]);
        let mut command = Command::new(words.next().unwrap_or_default());
        command.args(words).envs(variables.iter().map(|(variable, value)| (variable, value)));
        let mut child = Child::start(command)?;
        child.starts_another = !through.is_empty();
        Ok(child)
    }

    /// Starts a program that receives and answers lines.
    pub fn start(mut command: Command) -> Result<Self, Failure> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        // SAFETY: between fork and exec only prctl is called, which is async-signal-safe.
        unsafe {
            command.pre_exec(|| {
                if libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) == 0 {
                    Ok(())
                } else {
                    Err(std::io::Error::last_os_error())
                }
            });
        }
        let mut process = command.spawn()?;
        let stdin =
            process.stdin.take().ok_or_else(|| Failure::new("the child has no standard input"))?;
        let stdout = process
            .stdout
            .take()
            .ok_or_else(|| Failure::new("the child has no standard output"))?;
        let (sender, answers) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines() {
                let Ok(line) = line else { break };
                if sender.send(line).is_err() {
                    break;
                }
            }
        });
        Ok(Child { process, stdin, answers, starts_another: false })
    }

    /// Returns the process id.
    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    /// Sends a line.
    pub fn say(&mut self, line: &str) -> Result<(), Failure> {
        writeln!(self.stdin, "{line}").and_then(|()| self.stdin.flush())?;
        Ok(())
    }

    /// Returns the next line that it writes.
    pub fn hear(&self, patience: Duration) -> Result<String, Failure> {
        self.answers.recv_timeout(patience).map_err(|error| match error {
            RecvTimeoutError::Timeout => {
                Failure::new(format!("the other process did not answer within {patience:?}"))
            }
            RecvTimeoutError::Disconnected => Failure::new("the other process ended"),
        })
    }

    /// Returns the next line, if it has written one by now.
    pub fn heard(&self) -> Result<Option<String>, Failure> {
        match self.answers.try_recv() {
            Ok(line) => Ok(Some(line)),
            Err(TryRecvError::Empty) => Ok(None),
            Err(TryRecvError::Disconnected) => Err(Failure::new("the other process ended")),
        }
    }

    fn its_pid(&self) -> Result<Pid, Failure> {
        // The child is not reaped before `kill`, so its id is not reused.
        Pid::from_raw(self.process.id().cast_signed()).ok_or_else(|| Failure::new("no process id"))
    }

    fn signal(&self, signal: Signal) -> Result<(), Failure> {
        rustix::process::kill_process(self.its_pid()?, signal).map_err(not_sent)
    }

    /// Stops the process (SIGSTOP) and waits until all its threads have stopped.
    pub fn stop(&self) -> Result<(), Failure> {
        stop_process(self.its_pid()?)
    }

    /// Returns whether all its threads have stopped, as after a SIGSTOP that it sends itself.
    pub fn is_stopped(&self) -> Result<bool, Failure> {
        has_stopped(self.its_pid()?)
    }

    /// Continues the process (SIGCONT).
    pub fn go_on(&self) -> Result<(), Failure> {
        self.signal(Signal::CONT)
    }

    /// Kills the process (SIGKILL) and reaps it.
    pub fn kill(&mut self) -> Result<(), Failure> {
        self.process.kill()?;
        self.process.wait()?;
        if !self.starts_another {
            return Ok(());
        }
        let until = Instant::now() + CUT_OFF;
        loop {
            // The output ends when no process holds it any more.
            match self.answers.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok(_) => {}
                Err(RecvTimeoutError::Disconnected) => return Ok(()),
                Err(RecvTimeoutError::Timeout) => {
                    return Err(Failure::new("a process did not die with the one that started it"));
                }
            }
        }
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        // The errors mean that it was already killed.
        self.process.kill().ok();
        self.process.wait().ok();
    }
}

/// A process that a child has started and will reap. It is killed when this is dropped.
pub struct Grandchild {
    pid: Pid,
    process: OwnedFd,
}

impl Grandchild {
    /// Creates the handle of the live process with this number.
    pub fn of(pid: i32) -> Result<Self, Failure> {
        let pid = Pid::from_raw(pid).ok_or_else(|| Failure::new("no process id"))?;
        let process = pidfd_open(pid, PidfdFlags::empty())
            .map_err(|error| Failure::new(error.to_string()))?;
        Ok(Grandchild { pid, process })
    }

    /// Stops the process, as [`Child::stop`] does.
    pub fn stop(&self) -> Result<(), Failure> {
        self.signal(Signal::STOP)?;
        until_stopped(self.pid)
    }

    /// Continues the process, as [`Child::go_on`] does.
    pub fn go_on(&self) -> Result<(), Failure> {
        self.signal(Signal::CONT)
    }

    /// Kills the process (SIGKILL) and waits until it has ended.
    pub fn kill(&self) -> Result<(), Failure> {
        self.signal(Signal::KILL)?;
        let limit = Timespec::try_from(CUT_OFF).map_err(|error| Failure::new(error.to_string()))?;
        match poll(&mut [PollFd::new(&self.process, PollFlags::IN)], Some(&limit)) {
            Ok(1) => Ok(()),
            _ => Err(Failure::new(format!("the other process did not end within {CUT_OFF:?}"))),
        }
    }

    fn signal(&self, signal: Signal) -> Result<(), Failure> {
        pidfd_send_signal(&self.process, signal).map_err(not_sent)
    }
}

impl Drop for Grandchild {
    fn drop(&mut self) {
        // The error means that it has already ended.
        self.kill().ok();
    }
}

fn not_sent(error: rustix::io::Errno) -> Failure {
    Failure::new(format!("no signal sent: {error}"))
}

/// Stops a process that has not been reaped (SIGSTOP), and waits until each of its threads has
/// stopped. The signal alone is not enough: one thread takes it, and until then the others run.
pub fn stop_process(pid: Pid) -> Result<(), Failure> {
    rustix::process::kill_process(pid, Signal::STOP).map_err(not_sent)?;
    until_stopped(pid)
}

/// Waits until each thread of a process has stopped.
fn until_stopped(pid: Pid) -> Result<(), Failure> {
    let end = Instant::now() + CUT_OFF;
    while !has_stopped(pid)? {
        if Instant::now() >= end {
            return Err(Failure::new("the other process did not stop"));
        }
        std::thread::yield_now();
    }
    Ok(())
}

/// Returns whether no thread of the process runs. Its first thread may have stopped while another
/// one is still in a system call.
fn has_stopped(pid: Pid) -> Result<bool, Failure> {
    for thread in std::fs::read_dir(format!("/proc/{}/task", pid.as_raw_nonzero()))? {
        // A thread that has ended meanwhile has no state any more.
        let Ok(stat) = std::fs::read_to_string(thread?.path().join("stat")) else { continue };
        if !stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('T')) {
            return Ok(false);
        }
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt as _;

    use super::*;

    fn shell(script: &str, limit: Duration) -> Output {
        output(Command::new("sh").args(["-c", script]), limit)
    }

    #[test]
    fn a_program_that_does_not_end_is_killed() {
        let killed = shell("exec sleep 60", Duration::from_millis(100));
        assert_eq!(killed.status.signal(), Some(libc::SIGKILL));
    }

    #[test]
    fn all_output_of_a_program_is_returned() {
        let said = shell("head -c 300000 /dev/zero; head -c 200000 /dev/zero >&2; exit 3", CUT_OFF);
        assert_eq!(
            (said.status.code(), said.stdout.len(), said.stderr.len()),
            (Some(3), 300_000, 200_000)
        );
    }
}
