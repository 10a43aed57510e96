//! Keeps signal handlers that a library changes while it loads.

use std::cell::Cell;

use kvx_core::backend::sync::Mutex;

/// Serialises loading: libraries race with each other in changing process-wide state while they
/// start.
static LOADING: Mutex<()> = Mutex::new(());

thread_local! {
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// Runs `load`, which opens and initialises a library, and restores every signal handler that it
/// changed. Other threads that open a library with this module wait meanwhile; nested calls do not.
///
/// Compares all 64 signals and logs changes at debug level. Also restores handlers that other
/// threads of the program change during the call: install them before, or after.
///
/// Leaves the two signals that the C library reserves (32 and 33) unchanged if they had no handler
/// before: the C library installs one on first need, for good, and would end the process without
/// it.
pub fn with_signals_kept<T>(load: impl FnOnce() -> T) -> T {
    if INSIDE.get() {
        return load();
    }
    let _one = LOADING.lock();
    let _kept = SavedHandlers::save(); // dropped before the lock, also when `load` panics
    load()
}

const SIGNALS: std::ops::RangeInclusive<i32> = 1..=64;

/// The kernel's `struct sigaction`. Its layout depends on the architecture; it is only copied and
/// compared.
type Disposition = [u64; 8];

/// The dispositions of all signals at one time, restored when dropped.
struct SavedHandlers([Disposition; 64]);

impl SavedHandlers {
    fn save() -> Self {
        INSIDE.set(true);
        let mut kept = SavedHandlers([[0; 8]; 64]);
        for (signal, disposition) in SIGNALS.zip(&mut kept.0) {
            *disposition = disposition_of(signal);
        }
        kept
    }
}

impl Drop for SavedHandlers {
    fn drop(&mut self) {
        let mut changed = Vec::new();
        for (signal, before) in SIGNALS.zip(&self.0) {
            if disposition_of(signal) == *before {
                continue;
            }
            changed.push(signal);
            let of_the_c_library = matches!(signal, 32 | 33) && before[0] == 0;
            if !of_the_c_library {
                dispose(signal, before);
            }
        }
        INSIDE.set(false);
        if !changed.is_empty() {
            tracing::debug!(
                signals = ?changed,
                "restored signal handlers that a native library had changed"
            );
        }
    }
}

/// The size of the kernel's signal set.
const SET: usize = 8;

/// Uses the system call, because the C library's function hides its reserved signals and their
/// handlers.
fn disposition_of(signal: i32) -> Disposition {
    let mut disposition = [0; 8];
    let none = std::ptr::null::<Disposition>();
    // SAFETY: this only queries; the kernel's structure is smaller than the 64 bytes that it may
    // fill. If the call fails, zeros are left.
    unsafe { libc::syscall(libc::SYS_rt_sigaction, signal, none, disposition.as_mut_ptr(), SET) };
    disposition
}

fn dispose(signal: i32, disposition: &Disposition) {
    let none = std::ptr::null_mut::<Disposition>();
    // SAFETY: the kernel reported `disposition` for this signal before, so its handler was
    // installed then and belongs to code that is still loaded.
    let rc =
        unsafe { libc::syscall(libc::SYS_rt_sigaction, signal, disposition.as_ptr(), none, SET) };
    if rc != 0 {
        let error = std::io::Error::last_os_error();
        tracing::warn!(signal, %error, "cannot restore the handler of a signal");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_while_loading_leaves_the_loader_usable() {
        let outcome = std::panic::catch_unwind(|| with_signals_kept(|| panic!("on purpose")));
        assert!(outcome.is_err());
        assert_eq!(with_signals_kept(|| with_signals_kept(|| 7)), 7);
    }
}
