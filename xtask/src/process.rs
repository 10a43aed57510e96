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

/// How often a running child is looked at.
const TICK: Duration = Duration::from_millis(20);

/// How long a group may take to end after SIGTERM, and its last output to arrive after its end.
const GRACE: Duration = Duration::from_secs(2);

/// The signal that asked xtask to end; 0 while none did.
static INTERRUPTED: AtomicI32 = AtomicI32::new(0);

/// Where a child's output goes, besides being kept.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Output {
    /// Standard output and standard error, in one order, to xtask's standard output as they come.
    Shown,
    /// Standard output is kept and not shown; standard error goes where xtask's goes.
    Kept,
    /// Both are kept, in one order, and not shown.
    Quiet,
}

/// A child that has ended.
pub(crate) struct Finished {
    /// How it ended.
    pub(crate) end: End,
    /// What it wrote (both streams but for [`Output::Kept`]).
    pub(crate) output: String,
}

/// How a child ended.
#[derive(Debug, PartialEq)]
pub(crate) enum End {
    /// By itself.
    Exited(ExitStatus),
    /// Killed with its process group after this limit.
    TimedOut(Duration),
}

impl Finished {
    /// Whether it exited with 0.
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

/// A call of the cargo that runs xtask.
pub(crate) fn cargo<'a>(arguments: impl IntoIterator<Item = &'a str>) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(arguments);
    command
}

/// Makes SIGINT, SIGTERM and SIGHUP end the running children's process groups before xtask, which would not reach them
/// otherwise: the groups are not the terminal's.
pub(crate) fn catch_interrupts() {
    extern "C" fn note(signal: libc::c_int) {
        INTERRUPTED.store(signal, Ordering::Relaxed);
    }
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        // SAFETY: `note` has the signature of a handler and only stores to an atomic, which is async-signal-safe.
        let before = unsafe { libc::signal(signal, note as *const () as libc::sighandler_t) };
        if before == libc::SIG_IGN {
            // SAFETY: SIG_IGN is a valid disposition. Whoever started xtask (nohup) wants this signal ignored.
            unsafe { libc::signal(signal, libc::SIG_IGN) };
        }
    }
}

/// Runs `command` in its own process group and without standard input until it exits or `limit` is over. Whatever is
/// left of the group then is killed; a process that left the group is not, but it cannot hold up the call.
///
/// An error means that the child could not be started or watched. An interrupt ends xtask itself.
pub(crate) fn run(mut command: Command, limit: Duration, mode: Output) -> io::Result<Finished> {
    let start = Instant::now();
    let (mut reader, writer) = io::pipe()?;
    if mode != Output::Kept {
        command.stderr(writer.try_clone()?);
    }
    command.stdin(Stdio::null()).stdout(writer).process_group(0);
    let group = Group::start(&mut command).map_err(|error| {
        io::Error::new(error.kind(), format!("cannot start {}: {error}", command.get_program().display()))
    })?;
    // Closes this process's copies of the pipe's writing end: the children's decide when the output is over.
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
        if start.elapsed() >= limit {
            group.terminate()?;
            break true;
        }
    };
    let status = group.finish()?;
    let until = Instant::now() + GRACE;
    while Instant::now() < until && intake.take(TICK)? {}
    Ok(Finished {
        end: if timed_out { End::TimedOut(limit) } else { End::Exited(status) },
        output: String::from_utf8_lossy(&intake.kept).into_owned(),
    })
}

/// What arrives from the child.
struct Intake {
    chunks: Receiver<Vec<u8>>,
    mode: Output,
    kept: Vec<u8>,
}

impl Intake {
    /// Waits up to `wait` for a piece of output; false means that there will be no more.
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
                // The child may close its output long before it exits: its watcher still ticks.
                thread::sleep(wait);
                Ok(false)
            }
        }
    }
}

/// Ends xtask as `signal` asks, and first every child's group.
fn end_by(signal: libc::c_int) -> ! {
    // Kept until the end: nobody starts or reaps a child any more.
    let running = running();
    for group in running.iter() {
        signal_group(*group, libc::SIGTERM);
    }
    let until = Instant::now() + GRACE;
    while Instant::now() < until && running.iter().any(|group| is_there(*group)) {
        thread::sleep(TICK);
    }
    for group in running.iter() {
        signal_group(*group, libc::SIGKILL);
    }
    eprintln!("xtask: ended by signal {signal}");
    std::process::exit(128 + signal);
}

/// The groups whose leaders are not reaped: no other groups can have their ids.
fn running() -> MutexGuard<'static, Vec<libc::pid_t>> {
    static RUNNING: Mutex<Vec<libc::pid_t>> = Mutex::new(Vec::new());
    RUNNING.lock().unwrap_or_else(PoisonError::into_inner)
}

fn signal_group(id: libc::pid_t, signal: libc::c_int) {
    // SAFETY: plain system call. The group's leader is not reaped, so the id means this group. It fails only if nobody
    // is left in the group, which is what it is for.
    unsafe { libc::kill(-id, signal) };
}

/// Whether the leader of this group, a child of ours that is not reaped, still runs.
fn is_there(id: libc::pid_t) -> bool {
    !exited(id.cast_unsigned()).unwrap_or(true)
}

/// Whether this child has exited; leaves it to be reaped.
fn exited(child: u32) -> io::Result<bool> {
    let mut info = std::mem::MaybeUninit::<libc::siginfo_t>::zeroed();
    let flags = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
    // SAFETY: `info` is valid for the write of one siginfo_t.
    let result = unsafe { libc::waitid(libc::P_PID, child, info.as_mut_ptr(), flags) };
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

    fn signal(&self, signal: libc::c_int) {
        signal_group(self.id(), signal);
    }

    fn reap(&mut self) -> io::Result<ExitStatus> {
        let mut running = running();
        self.reaped = true;
        running.retain(|group| *group != self.id());
        self.leader.wait()
    }

    /// Whether the leader has exited; leaves it to be reaped.
    fn leader_exited(&self) -> io::Result<bool> {
        exited(self.leader.id())
    }

    /// Asks the group to end and waits for the leader, but not for long.
    fn terminate(&self) -> io::Result<()> {
        self.signal(libc::SIGTERM);
        let until = Instant::now() + GRACE;
        while Instant::now() < until && !self.leader_exited()? {
            thread::sleep(TICK);
        }
        Ok(())
    }

    /// Kills what is left of the group and reaps the leader.
    fn finish(mut self) -> io::Result<ExitStatus> {
        self.signal(libc::SIGKILL);
        self.reap()
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        if !self.reaped {
            self.signal(libc::SIGKILL);
            // Nobody is left to tell, and the child is dead.
            let _ = self.reap();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    /// Whether the process is there and not merely waiting to be reaped by its new parent.
    fn runs(pid: &str) -> bool {
        std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| {
            !stat.rsplit(')').next().unwrap_or_default().trim_start().starts_with(['Z', 'X'])
        })
    }

    /// The process that a script names.
    fn number(output: &str) -> &str {
        let said = output.trim();
        assert!(said.parse::<u32>().is_ok(), "{output:?} is no number of a process");
        said
    }

    fn assert_ends(pid: &str) {
        let until = Instant::now() + Duration::from_secs(10);
        while runs(pid) {
            assert!(Instant::now() < until, "process {pid} is left behind");
            thread::yield_now();
        }
    }

    #[test]
    fn a_child_over_its_limit_is_killed() {
        let mut sleep = Command::new("sleep");
        sleep.arg("60");
        let limit = Duration::from_millis(200);
        let start = Instant::now();
        let finished = run(sleep, limit, Output::Kept).unwrap();
        assert_eq!(finished.end, End::TimedOut(limit));
        assert!(!finished.succeeded());
        assert!(
            start.elapsed() >= limit && start.elapsed() < Duration::from_secs(30),
            "{:?}",
            start.elapsed()
        );
    }

    #[test]
    fn a_killed_child_leaves_no_process_behind() {
        // The grandchild keeps the pipe open and ignores SIGTERM from when it has said its number.
        let script = r#"sh -c "trap '' TERM; echo \$\$; exec sleep 60" & wait"#;
        let finished = run(shell(script), Duration::from_secs(3), Output::Kept).unwrap();
        assert!(matches!(finished.end, End::TimedOut(_)));
        assert_ends(number(&finished.output));
    }

    #[test]
    fn a_child_that_exits_leaves_no_process_behind() {
        let finished = run(shell("sleep 60 & echo $!"), Duration::from_secs(30), Output::Kept).unwrap();
        assert!(finished.succeeded());
        assert_ends(number(&finished.output));
    }

    #[test]
    fn output_and_exit_status_are_kept() {
        let finished =
            run(shell("echo one; echo two; exit 3"), Duration::from_secs(30), Output::Kept).unwrap();
        assert_eq!(finished.output, "one\ntwo\n");
        assert_eq!(finished.end.to_string(), "exit status: 3");
    }

    #[test]
    fn both_streams_arrive_in_one_order() {
        let script = "echo one; echo two >&2; echo three";
        let finished = run(shell(script), Duration::from_secs(30), Output::Shown).unwrap();
        assert_eq!(finished.output, "one\ntwo\nthree\n");
    }

    #[test]
    fn a_program_that_does_not_exist_is_named() {
        let error = run(Command::new("no-such-program"), Duration::from_secs(1), Output::Kept)
            .err()
            .expect("there is no such program");
        assert!(error.to_string().contains("no-such-program"), "{error}");
    }
}
