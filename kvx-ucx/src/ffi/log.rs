//! UCX's log: how much it says, for a moment.

use std::ffi::{c_char, c_int, c_uint, c_void};

use kvx_backend::loader;
use kvx_core::backend::sync::Mutex;

use super::context::UcpConfig;
use super::library::Library;

/// UCX's own log.
const USUAL: &str = "warn";
/// The number of that level in UCX; larger ones say more.
const WARN: c_int = 2;
/// The answers of a handler: nobody else is shown the line, or the next one is.
const STOP: c_int = 0;
const CONTINUE: c_int = 1;

/// A handler of lines, as libucs has had it since 1.9: file, line, function, level, component,
/// format, `va_list`. The last is passed as a pointer on the machines that kvx runs on, and is not
/// looked at.
type Handler = extern "C" fn(
    *const c_char,
    c_uint,
    *const c_char,
    c_int,
    *const c_void,
    *const c_char,
    *mut c_void,
) -> c_int;

/// The functions that put a handler before UCX's own, and remove it. In libucs, for which there are
/// no bindings.
struct HandlerStack {
    push: unsafe extern "C" fn(Handler),
    pop: unsafe extern "C" fn(),
}

impl HandlerStack {
    fn find(library: &loader::NativeLibrary) -> Option<HandlerStack> {
        // SAFETY: both are what libucs declares by these names, `push` with a handler of the type
        // above.
        unsafe {
            let push = library
                .optional_symbol::<unsafe extern "C" fn(Handler)>(c"ucs_log_push_handler")?;
            let pop = library.optional_symbol::<unsafe extern "C" fn()>(c"ucs_log_pop_handler")?;
            Some(HandlerStack { push, pop })
        }
    }
}

/// Keeps back what would not be shown at the usual level.
extern "C" fn suppress_details(
    _: *const c_char,
    _: c_uint,
    _: *const c_char,
    level: c_int,
    _: *const c_void,
    _: *const c_char,
    _: *mut c_void,
) -> c_int {
    if level > WARN { STOP } else { CONTINUE }
}

/// Returns whether the user has said what UCX is to log.
fn is_set_by_user() -> bool {
    ["UCX_LOG_LEVEL", "UCX_PROTO_INFO"].iter().any(|name| std::env::var_os(name).is_some())
}

/// Does something while UCX logs less than usual, unless the user has set what it logs.
pub(super) fn with_less_log<T>(library: &'static Library, act: impl FnOnce() -> T) -> T {
    at_level(library, "error", !is_set_by_user(), act)
}

/// Does something while UCX takes its log level for `debug`: it then tells more where it is asked
/// to describe something. What it would log meanwhile, on any thread, is kept back. If the user has
/// set the level, that holds.
pub(super) fn with_debug_log<T>(library: &'static Library, act: impl FnOnce() -> T) -> T {
    /// Level and handlers are the process's: one agent at a time.
    static ONE: Mutex<()> = Mutex::new(());
    let handlers = HandlerStack::find(library.native()).filter(|_| !is_set_by_user());
    let Some(handlers) = handlers else { return act() };
    let _one = ONE.lock();
    // SAFETY: UCX calls the handler with what its type says, and it is a function of this program,
    // which stays.
    unsafe { (handlers.push)(suppress_details) };
    let answer = at_level(library, "debug", true, act);
    // SAFETY: takes away what was pushed last, which is ours.
    unsafe { (handlers.pop)() };
    answer
}

fn at_level<T>(library: &'static Library, level: &str, change: bool, act: impl FnOnce() -> T) -> T {
    // Read first: the level is another for as short as can be.
    let config = change.then(|| UcpConfig::read(library).ok()).flatten();
    let changed = config.filter(|config| config.set("LOG_LEVEL", level).is_ok());
    let answer = act();
    if let Some(config) = changed
        && let Err(status) = config.set("LOG_LEVEL", USUAL)
    {
        tracing::warn!(?status, "UCX's log level stays changed");
    }
    answer
}
