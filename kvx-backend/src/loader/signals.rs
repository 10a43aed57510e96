//! Signal handlers, which a library may change while it loads.

use std::cell::Cell;

use kvx_core::backend::sync::Mutex;

/// One at a time: libraries race with each other in what they do to a process while they start.
static LOADING: Mutex<()> = Mutex::new(());

thread_local! {
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// Runs `load`, which opens and initialises a library, and puts back every signal handler that it
/// changed. Other threads that open a library by this module wait meanwhile; nested calls do not.
///
/// All 64 signals are compared, and changes are logged at debug level. Handlers that other threads
/// of the program install during the call are put back too: install them before, or after.
///
/// The two signals that the C library keeps to itself (32 and 33) are left alone if it had no
/// handler there before: it installs one on first need, for good, and would end the process
/// without.
pub fn with_signals_kept<T>(load: impl FnOnce() -> T) -> T {
    if INSIDE.get() {
        return load();
    }
    let _one = LOADING.lock();
    let _kept = SavedHandlers::save(); // dropped before the lock, also when `load` panics
    load()
}

const SIGNALS: std::ops::RangeInclusive<i32> = 1..=64;

/// The kernel's `struct sigaction`, whose layout differs from machine to machine; it is only
/// carried and compared.
type Disposition = [u64; 8];

/// The dispositions of all signals at one time; put back when dropped.
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
            tracing::debug!(signals = ?changed, "a native library changed what these signals do: put back");
        }
    }
}

/// The size of the kernel's signal set.
const SET: usize = 8;

/// By the system call: the C library's function hides the signals it keeps to itself, and their
/// handlers.
fn disposition_of(signal: i32) -> Disposition {
    let mut disposition = [0; 8];
    let none = std::ptr::null::<Disposition>();
    // SAFETY: asks only; the kernel's structure is smaller than the 64 bytes it may fill. A refusal
    // leaves zeros.
    unsafe { libc::syscall(libc::SYS_rt_sigaction, signal, none, disposition.as_mut_ptr(), SET) };
    disposition
}

fn dispose(signal: i32, disposition: &Disposition) {
    let none = std::ptr::null_mut::<Disposition>();
    // SAFETY: `disposition` is what the kernel said of this signal before, so its handler is one
    // that was installed then; a library that came since is not asked to run anything.
    let rc =
        unsafe { libc::syscall(libc::SYS_rt_sigaction, signal, disposition.as_ptr(), none, SET) };
    if rc != 0 {
        let error = std::io::Error::last_os_error();
        tracing::warn!(signal, %error, "the handler of a signal could not be put back");
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
