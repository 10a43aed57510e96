//! Child processes that end: in a process group of their own, under a time limit, with their output kept.

use std::fmt;
use std::io::{self, Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// The interval at which a running child is checked.
const TICK: Duration = Duration::from_millis(20);

/// How long a group may take to end after SIGTERM, and its last output to arrive after its end.
const GRACE: Duration = Duration::from_secs(2);

/// The signal that asked xtask to end, or 0.
static INTERRUPTED: AtomicI32 = AtomicI32::new(0);

/// The time at which a command of several steps has to be done.
#[derive(Clone, Copy)]
pub(crate) struct Deadline(Instant);

impl Deadline {
    /// A deadline after `limit` from now.
    pub(crate) fn after(limit: Duration) -> Deadline {
        Deadline(Instant::now() + limit)
    }

    /// Returns the time that is left.
    pub(crate) fn left(self) -> Duration {
        self.0.saturating_duration_since(Instant::now())
    }
}

/// Where a child's output goes, besides being kept.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Output {
    /// Standard output and standard error, in one order, are shown as they arrive.
    Shown,
    /// Standard output is kept and not shown; standard error is inherited.
    Kept,
    /// Both are kept, in one order, and not shown.
    Quiet,
}

/// A child that has ended.
pub(crate) struct Finished {
    /// How it ended.
    pub(crate) end: End,
    /// What it wrote (standard output alone for [`Output::Kept`]).
    pub(crate) output: String,
}

/// How a child ended.
#[derive(Debug, PartialEq)]
pub(crate) enum End {
    /// It exited, or a signal killed it.
    Exited(ExitStatus),
    /// xtask killed it with its process group after this limit.
    TimedOut(Duration),
}

impl Finished {
    /// Returns whether the child exited with status 0.
    pub(crate) fn succeeded(&self) -> bool {
        matches!(self.end, End::Exited(status) if status.success())
    }
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            End::Exited(status) => write!(f, "{status}"),
            End::TimedOut(limit) => write!(f, "killed: still running after its limit of {limit:?}"),
        }
    }
}

/// Returns a command that runs the cargo which runs xtask.
pub(crate) fn cargo<'a>(arguments: impl IntoIterator<Item = &'a str>) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(arguments);
    command
}

/// Runs a command, prints it and its output, and returns an error unless it succeeds.
pub(crate) fn must_succeed(command: Command, deadline: Deadline) -> crate::Result<()> {
    let shown = format!("{command:?}");
    println!("{shown}");
    let finished = run(command, deadline.left(), Output::Shown)?;
    if finished.succeeded() { Ok(()) } else { Err(format!("{shown}: {}", finished.end).into()) }
}

/// Runs a command and returns its standard output, or an error unless it succeeds.
pub(crate) fn output_of(command: Command, limit: Duration) -> crate::Result<String> {
    let shown = format!("{command:?}");
    let finished = run(command, limit, Output::Kept)?;
    if finished.succeeded() { Ok(finished.output) } else { Err(format!("{shown}: {}", finished.end).into()) }
}

/// Runs a command, prints its output and how it ended, and returns whether it succeeded.
pub(crate) fn shown_to_succeed(command: Command, limit: Duration) -> crate::Result<bool> {
    let finished = run(command, limit, Output::Shown)?;
    println!("{}", finished.end);
    Ok(finished.succeeded())
}

/// Makes SIGINT, SIGTERM and SIGHUP end the children's process groups before xtask. The terminal does not signal
/// these groups.
pub(crate) fn catch_interrupts() {
    extern "C" fn note(signal: libc::c_int) {
        INTERRUPTED.store(signal, Ordering::Relaxed);
    }
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        // SAFETY: `note` has the signature of a handler and only stores to an atomic, which is async-signal-safe.
        let before = unsafe { libc::signal(signal, note as *const () as libc::sighandler_t) };
        if before == libc::SIG_IGN {
            // SAFETY: SIG_IGN is a valid disposition. The caller of xtask (nohup) wants this signal ignored.
            unsafe { libc::signal(signal, libc::SIG_IGN) };
        }
    }
}

/// Runs `command` in its own process group, without standard input, until it exits or `limit` is over, and kills what
/// is left of the group. A process that left the group survives, but cannot delay the call.
///
/// An error means that the child could not be started or watched. An interrupt ends xtask.
pub(crate) fn run(mut command: Command, limit: Duration, mode: Output) -> io::Result<Finished> {
    let deadline = Deadline::after(limit);
    let (mut reader, writer) = io::pipe()?;
    if mode != Output::Kept {
        command.stderr(writer.try_clone()?);
    }
    command.stdin(Stdio::null()).stdout(writer).process_group(0);
    let mut group = Group::start(&mut command).map_err(|error| {
        io::Error::new(error.kind(), format!("cannot start {}: {error}", command.get_program().display()))
    })?;
    // Closes this process's copies of the pipe's writing end, so that the output ends with the children's copies.
    drop(command);

    let (sender, chunks) = mpsc::sync_channel(16);
    thread::spawn(move || {
        let mut buffer = vec![0; 16 * 1024];
        loop {
            match reader.read(&mut buffer) {
                Ok(0) => return,
                Ok(n) if sender.send(buffer[..n].to_vec()).is_err() => return,
                Err(error) if error.kind() != io::ErrorKind::Interrupted => return,
                Ok(_) | Err(_) => {}
            }
        }
    });

    let mut intake = Intake { chunks, mode, kept: Vec::new() };
    let timed_out = loop {
        intake.take(TICK)?;
        let signal = INTERRUPTED.load(Ordering::Relaxed);
        if signal != 0 {
            end_by(signal);
        }
        if group.leader_exited()? {
            break false;
        }
        if deadline.left().is_zero() {
            group.terminate()?;
            break true;
        }
    };
    let status = group.finish()?;
    let deadline = Deadline::after(GRACE);
    while !deadline.left().is_zero() && intake.take(TICK)? {}
    Ok(Finished {
        end: if timed_out { End::TimedOut(limit) } else { End::Exited(status) },
        output: String::from_utf8_lossy(&intake.kept).into_owned(),
    })
}

/// Receives a child's output.
struct Intake {
    chunks: Receiver<Vec<u8>>,
    mode: Output,
    kept: Vec<u8>,
}

impl Intake {
    /// Waits up to `wait` for a piece of output; returns false after the end of the output.
    fn take(&mut self, wait: Duration) -> io::Result<bool> {
        match self.chunks.recv_timeout(wait) {
            Ok(chunk) => {
                if self.mode == Output::Shown {
                    let mut stdout = io::stdout().lock();
                    stdout.write_all(&chunk)?;
                    stdout.flush()?;
                }
                self.kept.extend_from_slice(&chunk);
                Ok(true)
            }
            Err(RecvTimeoutError::Timeout) => Ok(true),
            Err(RecvTimeoutError::Disconnected) => {
                // The child may close its output long before it exits: the caller still polls.
                thread::sleep(wait);
                Ok(false)
            }
        }
    }
}

/// Ends every child's group, and then xtask as `signal` asks.
fn end_by(signal: libc::c_int) -> ! {
    // Held until the end, so that no child is started or reaped any more.
    let running = running();
    running.iter().for_each(|group| signal_group(*group, libc::SIGTERM));
    let deadline = Deadline::after(GRACE);
    while !deadline.left().is_zero() && running.iter().any(|group| !exited(*group).unwrap_or(true)) {
        thread::sleep(TICK);
    }
    running.iter().for_each(|group| signal_group(*group, libc::SIGKILL));
    eprintln!("xtask: ended by signal {signal}");
    std::process::exit(128 + signal);
}

/// Locks the list of groups whose leaders are not reaped: no other groups can have their ids.
fn running() -> MutexGuard<'static, Vec<libc::pid_t>> {
    static RUNNING: Mutex<Vec<libc::pid_t>> = Mutex::new(Vec::new());
    RUNNING.lock().unwrap_or_else(PoisonError::into_inner)
}

fn signal_group(id: libc::pid_t, signal: libc::c_int) {
    // SAFETY: plain system call. The group's leader is not reaped, so the id means this group. It fails only if the
    // group has no process left.
    unsafe { libc::kill(-id, signal) };
}

/// Returns whether this child has exited; leaves it to be reaped.
fn exited(child: libc::pid_t) -> io::Result<bool> {
    let mut info = std::mem::MaybeUninit::<libc::siginfo_t>::zeroed();
    let flags = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
    // SAFETY: `info` is valid for the write of one siginfo_t.
    let result = unsafe { libc::waitid(libc::P_PID, child.cast_unsigned(), info.as_mut_ptr(), flags) };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: zero bytes are a valid siginfo_t, and waitid wrote over them or left them.
    let info = unsafe { info.assume_init() };
    Ok(info.si_signo == libc::SIGCHLD)
}

/// A child that leads a process group. Until it is reaped no other group can get its id.
struct Group {
    leader: Child,
    reaped: bool,
}

impl Group {
    fn start(command: &mut Command) -> io::Result<Group> {
        let mut running = running();
        let group = Group { leader: command.spawn()?, reaped: false };
        running.push(group.id());
        Ok(group)
    }

    fn id(&self) -> libc::pid_t {
        self.leader.id().cast_signed()
    }

    fn leader_exited(&self) -> io::Result<bool> {
        exited(self.id())
    }

    /// Asks the group to end and waits up to [`GRACE`] for the leader.
    fn terminate(&self) -> io::Result<()> {
        signal_group(self.id(), libc::SIGTERM);
        let deadline = Deadline::after(GRACE);
        while !deadline.left().is_zero() && !self.leader_exited()? {
            thread::sleep(TICK);
        }
        Ok(())
    }

    /// Kills what is left of the group and reaps the leader.
    fn finish(&mut self) -> io::Result<ExitStatus> {
        signal_group(self.id(), libc::SIGKILL);
        let mut running = running();
        self.reaped = true;
        running.retain(|group| *group != self.id());
        self.leader.wait()
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        if !self.reaped {
            // An error has no reader here, and the child is dead.
            let _ = self.finish();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(30);

    fn shell(script: &str, limit: Duration, mode: Output) -> Finished {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        run(command, limit, mode).unwrap()
    }

    /// Waits until the process whose id a script printed has ended.
    fn assert_ends(output: &str) {
        let pid: u32 = output.trim().parse().expect("the script prints a process id");
        let deadline = Deadline::after(LONG);
        // A zombie that waits for its new parent has ended.
        while std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| {
            !stat.rsplit(')').next().unwrap_or_default().trim_start().starts_with(['Z', 'X'])
        }) {
            assert!(!deadline.left().is_zero(), "process {pid} is left behind");
            thread::yield_now();
        }
    }

    #[test]
    fn a_child_over_its_limit_is_killed() {
        let (limit, start) = (Duration::from_millis(200), Instant::now());
        let finished = shell("exec sleep 60", limit, Output::Kept);
        assert_eq!(finished.end, End::TimedOut(limit));
        assert!(!finished.succeeded() && (limit..LONG).contains(&start.elapsed()));
    }

    #[test]
    fn a_killed_child_leaves_no_process_behind() {
        // The grandchild keeps the pipe open and ignores SIGTERM once it has printed its id.
        let script = r#"sh -c "trap '' TERM; echo \$\$; exec sleep 60" & wait"#;
        let finished = shell(script, Duration::from_secs(3), Output::Kept);
        assert!(matches!(finished.end, End::TimedOut(_)));
        assert_ends(&finished.output);
    }

    #[test]
    fn a_child_that_exits_leaves_no_process_behind() {
        let finished = shell("sleep 60 & echo $!", LONG, Output::Kept);
        assert!(finished.succeeded());
        assert_ends(&finished.output);
    }

    #[test]
    fn both_streams_arrive_in_one_order_with_the_exit_status() {
        let finished = shell("echo one; echo two >&2; echo three; exit 3", LONG, Output::Shown);
        assert_eq!(finished.output, "one\ntwo\nthree\n");
        assert_eq!(finished.end.to_string(), "exit status: 3");
    }

    #[test]
    fn an_error_names_the_program() {
        let error = output_of(Command::new("no-such-program"), LONG).unwrap_err();
        assert!(error.to_string().contains("no-such-program"), "{error}");
    }
}
