//! Child processes with a guaranteed end: each has its own process group and a time limit, and its
//! output is kept.

use std::fmt;
use std::io::{self, Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::progress::{self, Above};

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};

/// The interval at which a running child is checked.
const TICK: Duration = Duration::from_millis(20);

/// The time that a group may take to end after SIGTERM, and its last output to arrive after its
/// end.
const GRACE: Duration = Duration::from_secs(2);

/// The signal that asked xtask to end, or 0.
static INTERRUPTED: AtomicI32 = AtomicI32::new(0);

/// The groups whose leaders are not reaped.
static RUNNING: Mutex<Vec<Pid>> = Mutex::new(Vec::new());

/// The time by which a command of several steps must end.
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

/// The destination of a child's output, which is also kept.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Output {
    /// Standard output and standard error, in one order, are shown as they arrive.
    Shown,
    /// Standard output is kept and not shown; standard error is inherited, or shown above the
    /// line of the progress.
    Kept,
    /// Both streams are kept, in one order, and not shown.
    Quiet,
}

/// A child that has ended.
pub(crate) struct Finished {
    /// How the child ended.
    pub(crate) end: End,
    /// The child's output (standard output alone for [`Output::Kept`]).
    pub(crate) output: String,
}

/// How a child ended.
#[derive(Debug, PartialEq)]
pub(crate) enum End {
    /// The child exited, or a signal killed it.
    Exited(ExitStatus),
    /// xtask killed the child with its process group after this limit.
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
    failure_of(command, &shown, deadline)?.map_or(Ok(()), |failure| Err(failure.into()))
}

/// Runs a command and returns its standard output, or an error unless it succeeds.
pub(crate) fn output_of(command: Command, limit: Duration) -> crate::Result<String> {
    let shown = format!("{command:?}");
    let finished = run(command, limit, Output::Kept)?;
    if finished.succeeded() {
        Ok(finished.output)
    } else {
        Err(format!("{shown}: {}", finished.end).into())
    }
}

/// Runs a command, prints its output and how it ended, and returns whether it succeeded.
pub(crate) fn shown_to_succeed(command: Command, limit: Duration) -> crate::Result<bool> {
    let finished = run(command, limit, Output::Shown)?;
    println!("{}", finished.end);
    Ok(finished.succeeded())
}

/// Runs a command, prints `shown` and the output, and returns a sentence if the command failed.
pub(crate) fn failure_of(
    command: Command,
    shown: &str,
    deadline: Deadline,
) -> io::Result<Option<String>> {
    println!("{shown}");
    let finished = run(command, deadline.left(), Output::Shown)?;
    Ok((!finished.succeeded()).then(|| format!("{shown}: {}", finished.end)))
}

/// Makes SIGINT, SIGTERM and SIGHUP end the children's process groups before xtask. The terminal
/// does not signal these groups.
pub(crate) fn catch_interrupts() {
    extern "C" fn note(signal: libc::c_int) {
        INTERRUPTED.store(signal, Ordering::Relaxed);
    }
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        // SAFETY: `note` has the signature of a handler and only stores to an atomic, which is
        // async-signal-safe.
        let before = unsafe { libc::signal(signal, note as *const () as libc::sighandler_t) };
        if before == libc::SIG_IGN {
            // SAFETY: SIG_IGN is a valid disposition. The caller of xtask (nohup) ignores this
            // signal, too.
            unsafe { libc::signal(signal, libc::SIG_IGN) };
        }
    }
}

/// Runs `command` in its own process group, without standard input, until it exits or `limit` is
/// over, and kills the rest of the group. A process that left the group survives, but cannot delay
/// the call.
///
/// An error means that the child could not be started or watched. An interrupt ends xtask.
pub(crate) fn run(mut command: Command, limit: Duration, mode: Output) -> io::Result<Finished> {
    let (reader, writer) = io::pipe()?;
    let mut errors = None;
    if mode != Output::Kept {
        command.stderr(writer.try_clone()?);
    } else if progress::is_shown() {
        let (mut reader, writer) = io::pipe()?;
        command.stderr(writer);
        let mut above = Above(io::stderr());
        errors = Some(thread::spawn(move || io::copy(&mut reader, &mut above)));
    }
    let shown: Vec<Sink> = match mode {
        Output::Shown => vec![Box::new(Above(io::stdout()))],
        Output::Kept | Output::Quiet => Vec::new(),
    };
    let finished = run_into(command, limit, (reader, writer), shown);
    wait(GRACE, || errors.as_ref().is_none_or(thread::JoinHandle::is_finished));
    finished
}

/// Runs a command like [`run`]. Both streams are shown, and written to `log`, as they arrive.
pub(crate) fn run_logged(
    mut command: Command,
    limit: Duration,
    log: std::fs::File,
) -> io::Result<Finished> {
    let (reader, writer) = io::pipe()?;
    command.stderr(writer.try_clone()?);
    run_into(command, limit, (reader, writer), vec![Box::new(Above(io::stdout())), Box::new(log)])
}

/// A destination of a child's output.
type Sink = Box<dyn Write + Send>;

fn run_into(
    mut command: Command,
    limit: Duration,
    (mut reader, writer): (io::PipeReader, io::PipeWriter),
    mut sinks: Vec<Sink>,
) -> io::Result<Finished> {
    let deadline = Deadline::after(limit);
    command.stdin(Stdio::null()).stdout(writer).process_group(0);
    let started = {
        // Until `finish` reaps the leader no other group can get its id.
        let mut running = locked(&RUNNING);
        command.spawn().inspect(|leader| running.push(Pid::from_child(leader)))
    };
    let mut leader = started.map_err(|error| {
        io::Error::new(
            error.kind(),
            format!("cannot start {}: {error}", command.get_program().display()),
        )
    })?;
    // Closes this process's copies of the pipe's writing end, so that the output ends with the
    // children's copies.
    drop(command);
    let kept = Arc::new(Mutex::new(Vec::new()));
    let output = Arc::clone(&kept);
    let intake = thread::spawn(move || {
        let mut buffer = vec![0; 16 * 1024];
        loop {
            let piece = match reader.read(&mut buffer) {
                Ok(0) => return,
                Ok(n) => &buffer[..n],
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(_) => return,
            };
            for sink in &mut sinks {
                // If it is closed, or its disk full, the child's result still counts.
                let _ = sink.write_all(piece).and_then(|()| sink.flush());
            }
            locked(&output).extend_from_slice(piece);
        }
    });

    let timed_out = watch(Pid::from_child(&leader), deadline);
    let status = finish(&mut leader)?;
    wait(GRACE, || intake.is_finished());
    progress::clear();
    Ok(Finished {
        end: if timed_out? { End::TimedOut(limit) } else { End::Exited(status) },
        output: String::from_utf8_lossy(&locked(&kept)).into_owned(),
    })
}

/// Waits until the leader of a group exits, or asks the group to end at the deadline; returns
/// whether it had to.
fn watch(group: Pid, deadline: Deadline) -> io::Result<bool> {
    while !exited(group)? {
        if deadline.left().is_zero() {
            signal_group(group, Signal::TERM);
            wait(GRACE, || exited(group).unwrap_or(true));
            return Ok(true);
        }
        thread::sleep(TICK);
        progress::tick();
        let signal = INTERRUPTED.load(Ordering::Relaxed);
        if signal != 0 {
            end_by(signal);
        }
    }
    Ok(false)
}

/// Waits until a condition holds, or `limit` is over.
fn wait(limit: Duration, holds: impl Fn() -> bool) {
    let deadline = Deadline::after(limit);
    while !holds() && !deadline.left().is_zero() {
        thread::sleep(TICK);
    }
}

/// Ends every child's group, and then xtask as `signal` asks.
fn end_by(signal: libc::c_int) -> ! {
    // Held until the end, so that no child is started or reaped any more.
    let running = locked(&RUNNING);
    progress::clear();
    running.iter().for_each(|group| signal_group(*group, Signal::TERM));
    wait(GRACE, || running.iter().all(|group| exited(*group).unwrap_or(true)));
    running.iter().for_each(|group| signal_group(*group, Signal::KILL));
    eprintln!("xtask: ended by signal {signal}");
    std::process::exit(128 + signal);
}

/// Locks a mutex, also after a panic of another thread that held it.
pub(crate) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Signals a group whose leader is not reaped, so that no other group has its id.
fn signal_group(id: Pid, signal: Signal) {
    // It fails only if the group has no process left.
    let _ = kill_process_group(id, signal);
}

/// Returns whether this child has exited; leaves it to be reaped.
fn exited(child: Pid) -> io::Result<bool> {
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    Ok(waitid(WaitId::Pid(child), options)?.is_some())
}

/// Kills what is left of a group and reaps its leader.
fn finish(leader: &mut Child) -> io::Result<ExitStatus> {
    let group = Pid::from_child(leader);
    signal_group(group, Signal::KILL);
    let mut running = locked(&RUNNING);
    running.retain(|other| *other != group);
    leader.wait()
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
    fn a_child_over_its_limit_is_killed_with_its_group() {
        let (limit, start) = (Duration::from_secs(3), Instant::now());
        // The grandchild keeps the pipe open and ignores SIGTERM once it has printed its id.
        let script = r#"sh -c "trap '' TERM; echo \$\$; exec sleep 60" & wait"#;
        let finished = shell(script, limit, Output::Kept);
        assert_eq!(finished.end, End::TimedOut(limit));
        assert!(!finished.succeeded() && (limit..LONG).contains(&start.elapsed()));
        assert_ends(&finished.output);
    }

    #[test]
    fn a_child_that_exits_leaves_no_process_behind() {
        let finished = shell("sleep 60 & echo $!", LONG, Output::Kept);
        assert!(finished.succeeded());
        assert_ends(&finished.output);
    }

    #[test]
    fn both_streams_arrive_in_one_order_with_the_exit_status_and_errors_name_the_program() {
        let finished = shell("echo one; echo two >&2; echo three; exit 3", LONG, Output::Shown);
        assert_eq!(finished.output, "one\ntwo\nthree\n");
        assert_eq!(finished.end.to_string(), "exit status: 3");
        let error = output_of(Command::new("no-such-program"), LONG).unwrap_err();
        assert!(error.to_string().contains("no-such-program"), "{error}");
    }
}
