//! The settings that tests make in the library, and the counters that they read.

use std::collections::HashMap;
use std::sync::{Condvar, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::code::Code;

/// The environment variable with commands, for processes that a test starts.
const VARIABLE: &str = "KVX_STAND_IN";

pub(crate) struct Settings {
    pub(crate) devices: usize,
    pub(crate) memory: u64,
    pub(crate) cuda_version: i32,
    pub(crate) hip_version: i32,
    pub(crate) peers: bool,
    pub(crate) delay: Duration,
    pub(crate) late: Duration,
    /// The information on other processes' memory that is hidden: its range by the usual function
    /// (1), by attributes (2), and its number (3).
    pub(crate) hidden_imports: u8,
    /// True if all memory belongs to another context than the primary one.
    pub(crate) other_context: bool,
    /// True if writes of network cards are not ordered.
    pub(crate) unordered_writes: bool,
    held: bool,
    failures: Vec<Failure>,
    slow: HashMap<String, Duration>,
    /// The number of calls of a function, by the name of the thread.
    calls: HashMap<(&'static str, String), u64>,
    faults: u64,
}

/// A function whose calls fail.
struct Failure {
    function: String,
    code: Code,
    /// The number of good calls before.
    skip: u64,
    times: u64,
}

static SETTINGS: LazyLock<Mutex<Settings>> = LazyLock::new(|| Mutex::new(at_first()));

/// Returns the initial settings.
fn at_first() -> Settings {
    let mut settings = Settings {
        devices: 2,
        memory: 1 << 30,
        cuda_version: 12_080,
        hip_version: 60_100_000,
        peers: true,
        delay: Duration::ZERO,
        late: Duration::ZERO,
        hidden_imports: 0,
        other_context: false,
        unordered_writes: false,
        held: false,
        failures: Vec::new(),
        slow: HashMap::new(),
        calls: HashMap::new(),
        faults: 0,
    };
    let commands = std::env::var(VARIABLE).unwrap_or_default();
    for command in commands.split(';').map(str::trim).filter(|command| !command.is_empty()) {
        if settings.apply(command).is_none() {
            eprintln!("{VARIABLE}: unknown command `{command}`");
        }
    }
    settings
}

static RELEASED: Condvar = Condvar::new();

/// Returns the settings; the lock must not be held during work.
pub(crate) fn settings() -> MutexGuard<'static, Settings> {
    SETTINGS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Counts a call, delays it if a test requests that, and returns the error with which it must fail,
/// if any.
pub(crate) fn called(function: &'static str) -> Option<Code> {
    let thread = rustix::thread::name().unwrap_or_default();
    let mut settings = settings();
    *settings.calls.entry((function, thread.to_string_lossy().into_owned())).or_default() += 1;
    if let Some(time) = settings.slow.get(function).copied() {
        drop(settings);
        std::thread::sleep(time);
        return failure(function);
    }
    drop(settings);
    failure(function)
}

fn failure(function: &'static str) -> Option<Code> {
    let mut settings = settings();
    let failure = settings
        .failures
        .iter_mut()
        .find(|failure| failure.function == function && failure.times > 0)?;
    if failure.skip > 0 {
        failure.skip -= 1;
        return None;
    }
    failure.times -= 1;
    Some(failure.code)
}

/// Counts a misuse of memory.
pub(crate) fn note_fault() {
    settings().faults += 1;
}

/// Wakes streams, so that they check whether they may work again.
pub(crate) fn notify_streams() {
    RELEASED.notify_all();
}

/// Waits until streams may work.
pub(crate) fn wait_until_released() {
    let mut settings = settings();
    while settings.held {
        settings = RELEASED.wait(settings).unwrap_or_else(PoisonError::into_inner);
    }
}

impl Settings {
    /// Returns how often threads whose name begins with `thread` have called a function.
    fn calls(&self, function: &str, thread: &str) -> i64 {
        let its = |(called, by): &(&str, String)| *called == function && by.starts_with(thread);
        self.calls.iter().filter(|(call, _)| its(call)).map(|(_, calls)| *calls as i64).sum()
    }

    /// Executes a command that changes a setting. Returns `None` if it is another command.
    pub(crate) fn apply(&mut self, command: &str) -> Option<i64> {
        let words: Vec<&str> = command.split_whitespace().collect();
        let micros = |word: &str| word.parse().ok().map(Duration::from_micros);
        match words[..] {
            ["devices", count] => self.devices = count.parse().ok().filter(|count| *count <= 16)?,
            ["memory", bytes] => self.memory = bytes.parse().ok()?,
            ["cuda-version", version] => self.cuda_version = version.parse().ok()?,
            ["hip-version", version] => self.hip_version = version.parse().ok()?,
            ["no-peers"] => self.peers = false,
            ["delay", time] => self.delay = micros(time)?,
            ["late", time] => self.late = micros(time)?,
            ["hold"] => self.held = true,
            ["release"] => self.held = false,
            ["well"] => {
                self.failures.clear();
                self.slow.clear();
            }
            ["reset"] => *self = at_first(),
            ["fail", function, code, times, ref skip @ ..] => {
                let times = if times == "always" { u64::MAX } else { times.parse().ok()? };
                let skip = match skip {
                    [] => 0,
                    [skip] => skip.parse().ok()?,
                    _ => return None,
                };
                let function = function.to_owned();
                self.failures.push(Failure {
                    function,
                    code: Code(code.parse().ok()?),
                    skip,
                    times,
                });
            }
            ["calls", function] => return Some(self.calls(function, "")),
            ["calls", function, thread] => return Some(self.calls(function, thread)),
            ["slow", function, time] => _ = self.slow.insert(function.to_owned(), micros(time)?),
            ["hide-imports", level] => self.hidden_imports = level.parse().ok()?,
            ["unordered-writes"] => self.unordered_writes = true,
            ["other-context"] => self.other_context = true,
            ["faults"] => return Some(self.faults as i64),
            _ => return None,
        }
        Some(0)
    }
}
