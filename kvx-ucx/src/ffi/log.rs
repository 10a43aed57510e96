//! Changes UCX's log level temporarily.

use std::ffi::{c_char, c_int, c_uint, c_void};

use kvx_backend::loader;
use kvx_core::backend::sync::Mutex;

use super::context::UcpConfig;
use super::library::Library;

/// UCX's default log level.
const USUAL: &str = "warn";
/// UCX's number of the log level `warn`; higher levels are more verbose.
const WARN: c_int = 2;
/// The return values of a handler: UCX stops at this handler, or calls the next one.
const STOP: c_int = 0;
const CONTINUE: c_int = 1;

/// A log handler, as in libucs since 1.9: file, line, function, level, component, format,
/// `va_list`. The last is passed as a pointer on the platforms that kvx supports, and the handler
/// does not read it.
type Handler = extern "C" fn(
    *const c_char,
    c_uint,
    *const c_char,
    c_int,
    *const c_void,
    *const c_char,
    *mut c_void,
) -> c_int;

/// The functions of libucs that install a handler before UCX's own and remove it. kvx has no
/// bindings to libucs.
struct HandlerStack {
    push: unsafe extern "C" fn(Handler),
    pop: unsafe extern "C" fn(),
}

impl HandlerStack {
    fn find(library: &loader::NativeLibrary) -> Option<HandlerStack> {
        // SAFETY: libucs declares both by these names, `push` with a handler of the type above.
        unsafe {
            let push = library
                .optional_symbol::<unsafe extern "C" fn(Handler)>(c"ucs_log_push_handler")?;
            let pop = library.optional_symbol::<unsafe extern "C" fn()>(c"ucs_log_pop_handler")?;
            Some(HandlerStack { push, pop })
        }
    }
}

/// Suppresses lines that UCX does not log at its default level.
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

/// Returns whether the user has configured UCX's logging.
fn is_set_by_user() -> bool {
    ["UCX_LOG_LEVEL", "UCX_PROTO_INFO"].iter().any(|name| std::env::var_os(name).is_some())
}

/// Calls `act` with UCX logging errors only, unless the user has configured UCX's logging.
pub(super) fn with_less_log<T>(library: &'static Library, act: impl FnOnce() -> T) -> T {
    at_level(library, "error", !is_set_by_user(), act)
}

/// Calls `act` with UCX's log level at `debug`, at which UCX describes its objects in more detail.
/// Log lines of any thread meanwhile are suppressed. If the user has configured UCX's logging,
/// nothing changes.
pub(super) fn with_debug_log<T>(library: &'static Library, act: impl FnOnce() -> T) -> T {
    /// Held while an agent changes the log's level and handlers, which belong to the process.
    static ONE: Mutex<()> = Mutex::new(());
    let handlers = HandlerStack::find(library.native()).filter(|_| !is_set_by_user());
    let Some(handlers) = handlers else { return act() };
    let _one = ONE.lock();
    // SAFETY: UCX calls the handler with the arguments of its type; the handler is a function of
    // this program and stays loaded.
    unsafe { (handlers.push)(suppress_details) };
    let answer = at_level(library, "debug", true, act);
    // SAFETY: removes the handler that this function pushed last.
    unsafe { (handlers.pop)() };
    answer
}

fn at_level<T>(library: &'static Library, level: &str, change: bool, act: impl FnOnce() -> T) -> T {
    // Read the configuration first, so that the level is changed as briefly as possible.
    let config = change.then(|| UcpConfig::read(library).ok()).flatten();
    let changed = config.filter(|config| config.set("LOG_LEVEL", level).is_ok());
    let answer = act();
    if let Some(config) = changed
        && let Err(status) = config.set("LOG_LEVEL", USUAL)
    {
        tracing::warn!(?status, "UCX's log level could not be restored");
    }
    answer
}
