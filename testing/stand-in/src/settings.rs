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
    held: bool,
    failures: Vec<Failure>,
    calls: HashMap<&'static str, u64>,
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
        held: false,
        failures: Vec::new(),
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

/// Counts a call, and returns the error with which it must fail, if any.
pub(crate) fn called(function: &'static str) -> Option<Code> {
    let mut settings = settings();
    *settings.calls.entry(function).or_default() += 1;
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
            ["well"] => self.failures.clear(),
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
            ["calls", function] => {
                return Some(self.calls.get(function).map_or(0, |calls| *calls as i64));
            }
            ["faults"] => return Some(self.faults as i64),
            _ => return None,
        }
        Some(0)
    }
}
