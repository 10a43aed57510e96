//! Another process: this program again, with a role. Its standard input is a socket to the parent.

use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};

use super::CUT_OFF;

/// A child process, killed when it is dropped.
pub(crate) struct Other {
    process: Child,
    line: UnixStream,
}

impl Other {
    /// Starts a child whose `main` finds its role in this variable.
    pub(crate) fn start(variable: &str, role: &str) -> Self {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let process = Command::new(std::env::current_exe().unwrap())
            .env(variable, role)
            .stdin(OwnedFd::from(theirs))
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        ours.set_read_timeout(Some(CUT_OFF)).unwrap();
        Other { process, line: ours }
    }

    pub(crate) fn say(&mut self, what: &[u8]) {
        say(&mut self.line, what);
    }

    pub(crate) fn hear(&mut self) -> Vec<u8> {
        hear(&mut self.line).expect("the child answers")
    }

    /// Sends a request and waits for the answer.
    pub(crate) fn ask(&mut self, what: &str) -> String {
        self.say(what.as_bytes());
        String::from_utf8(self.hear()).unwrap()
    }

    pub(crate) fn pid(&self) -> i32 {
        self.process.id() as i32
    }

    pub(crate) fn signal(&self, signal: libc::c_int) {
        // SAFETY: this sends a signal to a child that has not been waited for.
        assert_eq!(unsafe { libc::kill(self.pid(), signal) }, 0);
    }

    /// Stops the child, and returns once it is stopped.
    pub(crate) fn stop(&self) {
        self.signal(libc::SIGSTOP);
        let mut status = 0;
        // SAFETY: `status` outlives the call; the call consumes nothing but the report of the stop.
        let stopped = unsafe { libc::waitpid(self.pid(), &raw mut status, libc::WUNTRACED) };
        assert!(stopped == self.pid() && libc::WIFSTOPPED(status));
    }

    pub(crate) fn go_on(&self) {
        self.signal(libc::SIGCONT);
    }

    pub(crate) fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        self.process.kill().ok();
        self.process.wait().ok();
    }
}

fn say(line: &mut UnixStream, what: &[u8]) {
    line.write_all(&(what.len() as u32).to_le_bytes()).unwrap();
    line.write_all(what).unwrap();
}

fn hear(line: &mut UnixStream) -> Option<Vec<u8>> {
    let mut len = [0; 4];
    line.read_exact(&mut len).ok()?;
    let mut what = vec![0; u32::from_le_bytes(len) as usize];
    line.read_exact(&mut what).ok()?;
    Some(what)
}

/// Returns a child's role in this variable, and its line to the parent. Returns `None` in other
/// processes.
pub(crate) fn role(variable: &str) -> Option<(String, Line)> {
    let role = std::env::var(variable).ok()?;
    let line = std::io::stdin().as_fd().try_clone_to_owned().unwrap();
    Some((role, Line(UnixStream::from(line))))
}

/// A child's line to its parent.
pub(crate) struct Line(UnixStream);

impl Line {
    pub(crate) fn say(&mut self, what: &[u8]) {
        say(&mut self.0, what);
    }

    /// Receives a message; `None` if the parent has ended.
    pub(crate) fn hear(&mut self) -> Option<Vec<u8>> {
        hear(&mut self.0)
    }
}
