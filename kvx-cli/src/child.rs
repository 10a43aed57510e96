//! A child process that receives lines and answers with lines.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{ChildStdin, Command, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use crate::Result;

/// The most lines of a child that are buffered. A child that answers with more blocks; more lines
/// of standard error are dropped.
const UNHEARD: usize = 1024;

/// A child process. It is killed when this is dropped, and by the kernel when this process dies.
pub(crate) struct Child {
    name: String,
    process: std::process::Child,
    asked: Option<ChildStdin>,
    answers: Receiver<String>,
}

impl Child {
    /// Starts a program. Call this on a thread that lives as long as this process: the kernel kills
    /// the child when that thread ends.
    pub(crate) fn start(name: &str, mut command: Command) -> Result<Self> {
        command.stdout(Stdio::piped());
        Self::spawn(name, command)
    }

    /// Like [`start`](Self::start), for a program that answers on standard error.
    #[cfg(all(feature = "serve", feature = "proxy"))]
    pub(crate) fn start_hearing_errors(name: &str, mut command: Command) -> Result<Self> {
        command.stdout(Stdio::null()).stderr(Stdio::piped());
        Self::spawn(name, command)
    }

    fn spawn(name: &str, mut command: Command) -> Result<Self> {
        let us = std::process::id().cast_signed();
        command.stdin(Stdio::piped()).process_group(0);
        let die_with_us = move || {
            // SAFETY: plain system calls, which may be made between fork and exec.
            let watched = unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) == 0 };
            // SAFETY: getppid may be called between fork and exec, and never fails. The kernel
            // sends no signal for a parent that had died before the prctl.
            if watched && unsafe { libc::getppid() } == us {
                Ok(())
            } else {
                Err(std::io::ErrorKind::Other.into())
            }
        };
        // SAFETY: the closure makes system calls and allocates nothing.
        unsafe { command.pre_exec(die_with_us) };
        let mut process =
            command.spawn().map_err(|error| format!("{name} could not be started: {error}"))?;
        let asked = process.stdin.take();
        let (send, answers) = mpsc::sync_channel(UNHEARD);
        // Libraries may write anything: replace invalid UTF-8.
        let lines = |output| {
            let lines = BufReader::new(output).split(b'\n').map_while(std::result::Result::ok);
            lines.map(|line| String::from_utf8_lossy(&line).into_owned())
        };
        if let Some(output) = process.stdout.take() {
            let lines = lines(Box::new(output) as Box<dyn Read + Send>);
            std::thread::spawn(move || {
                lines
                    .map(|line| send.send(line))
                    .take_while(std::result::Result::is_ok)
                    .for_each(drop);
            });
        } else if let Some(errors) = process.stderr.take() {
            let lines = lines(Box::new(errors) as Box<dyn Read + Send>);
            // Read to the end, so that the process never blocks on a full pipe.
            std::thread::spawn(move || lines.for_each(|line| drop(send.try_send(line))));
        }
        Ok(Child { name: name.to_owned(), process, asked, answers })
    }

    /// Returns the name that the child was started with.
    #[cfg(all(feature = "serve", feature = "proxy"))]
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Returns the child's process id.
    pub(crate) fn pid(&self) -> u32 {
        self.process.id()
    }

    /// Sends a line.
    pub(crate) fn send_line(&mut self, line: &str) -> Result<()> {
        let Some(asked) = &mut self.asked else {
            return Err(format!("{} accepts no more lines", self.name).into());
        };
        Ok(writeln!(asked, "{line}")
            .and_then(|()| asked.flush())
            .map_err(|error| format!("{}: {error}", self.name))?)
    }

    /// Returns the next line that the child writes.
    pub(crate) fn receive_line(&mut self, patience: Duration) -> Result<String> {
        match self.answers.recv_timeout(patience) {
            Ok(line) => Ok(line),
            Err(RecvTimeoutError::Timeout) => {
                Err(format!("{} did not answer within {patience:?}", self.name).into())
            }
            Err(RecvTimeoutError::Disconnected) => {
                self.asked = None;
                let status = self
                    .wait_for_exit(Duration::from_secs(2))
                    .map_or_else(String::new, |status| format!(": {status}"));
                Err(format!("{} ended{status}", self.name).into())
            }
        }
    }

    /// Stops the child with SIGSTOP until it is killed, and waits until all its threads have
    /// stopped.
    #[cfg(all(feature = "serve", feature = "proxy"))]
    pub(crate) fn stop(&self) -> Result<()> {
        let pid = self.process.id();
        // SAFETY: plain system call. The process is not reaped, so the id is still its own.
        if unsafe { libc::kill(pid.cast_signed(), libc::SIGSTOP) } != 0 {
            return Err(std::io::Error::last_os_error().into());
        }
        let within = Duration::from_secs(10);
        let until = Instant::now() + within;
        // The kernel reports a stop once the last thread has stopped. WNOWAIT leaves an exit to
        // `wait_for_exit`.
        let events = libc::WSTOPPED | libc::WEXITED | libc::WNOWAIT | libc::WNOHANG;
        loop {
            // SAFETY: siginfo_t consists of integers and pointers, for which zeros are valid.
            let mut event: libc::siginfo_t = unsafe { std::mem::zeroed() };
            // SAFETY: plain system call, which writes into `event` only.
            if unsafe { libc::waitid(libc::P_PID, pid, &raw mut event, events) } != 0 {
                return Err(std::io::Error::last_os_error().into());
            }
            if event.si_signo == libc::SIGCHLD {
                return Ok(());
            }
            if Instant::now() >= until {
                return Err(format!("{} did not stop within {within:?}", self.name).into());
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Kills the child by its process id, and waits until it has ended.
    pub(crate) fn kill(&mut self) -> Result<()> {
        self.process.kill()?;
        let within = Duration::from_secs(10);
        self.wait_for_exit(within).map(drop).ok_or_else(|| {
            format!("{} did not end within {within:?} of being killed", self.name).into()
        })
    }

    /// Closes the child's input, and waits up to 5 s for it to exit.
    pub(crate) fn end(mut self) {
        self.asked = None;
        self.wait_for_exit(Duration::from_secs(5));
    }

    fn wait_for_exit(&mut self, within: Duration) -> Option<std::process::ExitStatus> {
        let until = Instant::now() + within;
        loop {
            match self.process.try_wait() {
                Ok(None) if Instant::now() < until => std::thread::sleep(Duration::from_millis(1)),
                Ok(status) => return status,
                Err(_) => return None,
            }
        }
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        if let Ok(None) = self.process.try_wait() {
            // SAFETY: plain system call. The process is not reaped, so the id is still that of its
            // group.
            unsafe { libc::kill(-self.process.id().cast_signed(), libc::SIGKILL) };
        }
        // An error: it has already ended.
        self.process.kill().ok();
        self.process.wait().ok();
    }
}
