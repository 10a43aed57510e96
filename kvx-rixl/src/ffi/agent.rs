//! A NIXL agent with one plugin.

use std::ffi::{CStr, CString, OsString, c_char, c_void};
use std::path::Path;
use std::ptr;
use std::sync::Arc;
use std::time::Duration;

use kvx_core::{ErrorKind, Op, Result};

use super::bindings::{
    Functions, NIXL_CAPI_SUCCESS, NIXL_CAPI_THREAD_SYNC_NONE, NIXL_CAPI_XFER_OP_READ,
    NIXL_CAPI_XFER_OP_WRITE, nixl_agent, nixl_agent_config, nixl_backend, nixl_notif_map,
    nixl_opt_args, nixl_params, nixl_status,
};
use super::library::Library;
use super::lists::{MemorySegment, Range, RegistrationList, TransferList};
use super::request::{Request, UnreleasedRequests};
use super::status::{State, Status};

/// NIXL's plugin over UCX.
pub(crate) const UCX: &str = "UCX";

/// The arguments of an agent.
pub(crate) struct Settings<'a> {
    pub(crate) name: &'a str,
    pub(crate) plugin: &'a str,
    pub(crate) params: &'a [(String, String)],
    /// The longest sleep of NIXL's own thread; `None` without such a thread.
    pub(crate) progress_thread: Option<Duration>,
}

/// An agent, for one thread at a time. Dropping it destroys it.
pub(crate) struct NixlAgent {
    functions: &'static Functions,
    raw: nixl_agent,
    /// Names the one plugin: it carries out all operations.
    args: nixl_opt_args,
    backend: nixl_backend,
    notifications: nixl_notif_map,
    unreleased: Arc<UnreleasedRequests>,
    over_ucx: bool,
    names_refusals: bool,
}

// SAFETY: NIXL's objects belong to no thread; `&mut self` and the lock around an agent ensure one
// caller at a time.
unsafe impl Send for NixlAgent {}

/// Returns a hint for an error: NIXL 1.5 reads a settings file in the user's home, and creates no
/// agent if that directory is not accessible.
fn unreadable_home(home: Option<OsString>) -> String {
    let hidden = home.map(|home| Path::new(&home).join(".nixl.cfg")).filter(|path| {
        std::fs::metadata(path).is_err_and(|why| why.kind() == std::io::ErrorKind::PermissionDenied)
    });
    hidden.map_or_else(String::new, |path| {
        format!(
            " ({} is not readable for this user: set HOME to a folder that it may read)",
            path.display()
        )
    })
}

fn c_string(what: &str, text: &str) -> Result<CString> {
    CString::new(text)
        .map_err(|_| ErrorKind::Invalid.because(format!("{what} {text:?} has a NUL byte")))
}

impl NixlAgent {
    /// Creates an agent and its plugin's backend, which takes half a second. Errors: what NIXL
    /// answers.
    pub(crate) fn open(library: &'static Library, settings: &Settings<'_>) -> Result<Self> {
        let functions = library.functions();
        let check =
            |doing: &str, status| Status::check(status).map_err(|status| status.error(doing));
        let (name, plugin) =
            (c_string("agent", settings.name)?, c_string("plugin", settings.plugin)?);
        let with_thread = settings.progress_thread.is_some();
        let delay = settings.progress_thread.unwrap_or_default().as_micros();
        let config = nixl_agent_config {
            enable_prog_thread: with_thread,
            // The agent is behind kvx's own lock; the plugin locks what NIXL's own thread accesses.
            thread_sync: NIXL_CAPI_THREAD_SYNC_NONE as i32,
            num_workers: 1,
            pthr_delay_us: u64::try_from(delay).unwrap_or(u64::MAX),
            ..nixl_agent_config::default()
        };
        let mut agent = NixlAgent {
            functions,
            raw: ptr::null_mut(),
            args: ptr::null_mut(),
            backend: ptr::null_mut(),
            notifications: ptr::null_mut(),
            unreleased: Arc::default(),
            over_ucx: settings.plugin == UCX,
            names_refusals: false,
        };
        // SAFETY: C strings, a configuration as the header declares it, and locations for handles;
        // `Drop` destroys the objects that exist, whichever call fails.
        unsafe {
            let made = (functions.nixl_capi_create_configured_agent)(
                name.as_ptr(),
                &config,
                &mut agent.raw,
            );
            Status::check(made).map_err(|status| {
                status
                    .error(&format!("making an agent{}", unreadable_home(std::env::var_os("HOME"))))
            })?;
            let mut params = Params { functions, raw: ptr::null_mut() };
            check("making parameters", (functions.nixl_capi_create_params)(&mut params.raw))?;
            for (key, value) in settings.params {
                let (key, value) = (c_string("parameter", key)?, c_string("parameter", value)?);
                check(
                    "adding a parameter",
                    (functions.nixl_capi_params_add)(params.raw, key.as_ptr(), value.as_ptr()),
                )?;
            }
            check(
                "opening the plugin",
                (functions.nixl_capi_create_backend)(
                    agent.raw,
                    plugin.as_ptr(),
                    params.raw,
                    &mut agent.backend,
                ),
            )?;
            check("making arguments", (functions.nixl_capi_create_opt_args)(&mut agent.args))?;
            check(
                "naming the plugin",
                (functions.nixl_capi_opt_args_add_backend)(agent.args, agent.backend),
            )?;
            check(
                "making a map",
                (functions.nixl_capi_create_notif_map)(&mut agent.notifications),
            )?;
        }
        agent.names_refusals = agent.look_up(c"").is_err_and(Status::is_not_found);
        Ok(agent)
    }

    fn check(&self, doing: &str, status: nixl_status) -> Result<()> {
        Status::check(status).map_err(|status| status.error(doing))
    }

    /// Copies and frees bytes that NIXL allocated.
    ///
    /// # Safety
    /// `data` came from `malloc`, has `len` bytes, and has no other owner.
    unsafe fn take(data: *mut c_void, len: usize) -> Vec<u8> {
        if data.is_null() {
            return Vec::new();
        }
        // SAFETY: guaranteed by the caller.
        let bytes = unsafe { std::slice::from_raw_parts(data.cast::<u8>(), len) }.to_vec();
        // SAFETY: guaranteed by the caller; nobody uses it afterwards.
        unsafe { libc::free(data) };
        bytes
    }

    /// Returns whether the agent's plugin is UCX.
    pub(crate) fn is_over_ucx(&self) -> bool {
        self.over_ucx
    }

    /// Returns whether NIXL distinguishes an unknown agent from other errors: NIXL 1.5 does.
    pub(crate) fn names_refusals(&self) -> bool {
        self.names_refusals
    }

    /// Returns the metadata that peers need to connect, without memory.
    pub(crate) fn connection(&self) -> Result<Vec<u8>> {
        self.part_of(&[])
    }

    /// Returns the metadata of one registered range.
    pub(crate) fn export(&self, range: &Range) -> Result<Vec<u8>> {
        self.part_of(std::slice::from_ref(range))
    }

    fn part_of(&self, ranges: &[Range]) -> Result<Vec<u8>> {
        let list = RegistrationList::of(self.functions, ranges)?;
        let (mut data, mut len) = (ptr::null_mut(), 0);
        // SAFETY: live handles, and locations for the answer.
        let status = unsafe {
            (self.functions.nixl_capi_get_local_partial_md)(
                self.raw, list.raw, &mut data, &mut len, self.args,
            )
        };
        self.check("describing the agent", status)?;
        // SAFETY: the call has succeeded, so it has allocated these bytes.
        Ok(unsafe { Self::take(data, len) })
    }

    /// Returns the metadata of all registered memory, for a foreign agent.
    pub(crate) fn whole(&self) -> Result<Vec<u8>> {
        let (mut data, mut len) = (ptr::null_mut(), 0);
        // SAFETY: a live handle, and locations for the answer.
        let status =
            unsafe { (self.functions.nixl_capi_get_local_md)(self.raw, &mut data, &mut len) };
        self.check("describing the agent", status)?;
        // SAFETY: the call has succeeded, so it has allocated these bytes.
        Ok(unsafe { Self::take(data, len) })
    }

    /// Loads a peer's blob, and returns the peer's name. May take a third of a second. The blob
    /// must have been validated: NIXL trusts it.
    pub(crate) fn load(&self, blob: &[u8]) -> Result<String> {
        let mut name: *mut c_char = ptr::null_mut();
        // SAFETY: a live handle, bytes with their length, a location for a string.
        let status = unsafe {
            (self.functions.nixl_capi_load_remote_md)(
                self.raw,
                blob.as_ptr().cast(),
                blob.len(),
                &mut name,
            )
        };
        self.check("loading a peer's metadata", status)?;
        // SAFETY: the call has succeeded, so this is a C string from `malloc`.
        let text = unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned();
        // SAFETY: nobody uses it afterwards.
        unsafe { libc::free(name.cast()) };
        Ok(text)
    }

    /// Removes a peer, and closes the connection.
    pub(crate) fn forget(&self, peer: &CStr) {
        // SAFETY: a live handle and a C string. An unknown peer is not an error here.
        unsafe { (self.functions.nixl_capi_invalidate_remote_md)(self.raw, peer.as_ptr()) };
    }

    /// Connects to a peer whose metadata is loaded.
    pub(crate) fn connect(&self, peer: &CStr) -> Result<()> {
        // SAFETY: live handles and a C string.
        let status = unsafe {
            (self.functions.nixl_capi_agent_make_connection)(self.raw, peer.as_ptr(), self.args)
        };
        self.check("connecting", status)
    }

    /// Returns whether NIXL has a peer's metadata. It drops the metadata when the plugin finds the
    /// peer disconnected.
    pub(crate) fn knows(&self, peer: &CStr) -> bool {
        self.look_up(peer).is_ok()
    }

    fn look_up(&self, peer: &CStr) -> Result<(), Status> {
        // SAFETY: a live handle and a C string; without a list the call checks no memory.
        Status::check(unsafe {
            (self.functions.nixl_capi_check_remote_md)(self.raw, peer.as_ptr(), ptr::null_mut())
        })
    }

    /// Registers memory with the plugin.
    pub(crate) fn register(&self, range: &Range) -> Result<()> {
        let list = RegistrationList::of(self.functions, std::slice::from_ref(range))?;
        // SAFETY: live handles. `kvx_backend::fabric` ensures that the memory stays valid until it
        // is deregistered.
        let status =
            unsafe { (self.functions.nixl_capi_register_mem)(self.raw, list.raw, self.args) };
        self.check("registering memory", status)
    }

    /// Deregisters memory.
    pub(crate) fn deregister(&self, range: &Range) -> Result<()> {
        let list = RegistrationList::of(self.functions, std::slice::from_ref(range))?;
        // SAFETY: live handles.
        let status =
            unsafe { (self.functions.nixl_capi_deregister_mem)(self.raw, list.raw, self.args) };
        self.check("deregistering memory", status)
    }

    /// Creates a list of this agent.
    pub(crate) fn list(&self, segment: MemorySegment) -> Result<TransferList> {
        TransferList::new(self.functions, segment)
    }

    /// Prepares a transfer between two lists with equally many ranges.
    pub(crate) fn request(
        &self,
        op: Op,
        local: &TransferList,
        remote: &TransferList,
        peer: &CStr,
    ) -> Result<Request> {
        let operation = match op {
            Op::Read => NIXL_CAPI_XFER_OP_READ,
            Op::Write => NIXL_CAPI_XFER_OP_WRITE,
        };
        let mut raw = ptr::null_mut();
        // SAFETY: live handles, a C string, a location for a handle.
        let status = unsafe {
            (self.functions.nixl_capi_create_xfer_req)(
                self.raw,
                operation as i32,
                local.raw,
                remote.raw,
                peer.as_ptr(),
                &mut raw,
                self.args,
            )
        };
        self.check("preparing a transfer", status)?;
        Ok(Request::new(raw, &self.unreleased))
    }

    /// Starts a request that is not in progress.
    ///
    /// # Safety
    /// The memory in its lists stays valid until the request is no longer in progress.
    pub(crate) unsafe fn post(&self, request: &Request) -> State {
        // SAFETY: live handles; the caller guarantees the memory.
        State::of(unsafe {
            (self.functions.nixl_capi_post_xfer_req)(self.raw, request.raw, ptr::null_mut())
        })
    }

    /// Makes progress, and returns the state of a posted request.
    pub(crate) fn state(&self, request: &Request) -> State {
        // SAFETY: live handles.
        State::of(unsafe { (self.functions.nixl_capi_get_xfer_status)(self.raw, request.raw) })
    }

    /// Returns the dropped requests; [`release`](Agent::release) frees them.
    pub(crate) fn unreleased(&self) -> &Arc<UnreleasedRequests> {
        &self.unreleased
    }

    /// Frees the dropped requests. None of them is in progress, because such a request has an
    /// owner.
    pub(crate) fn release(&self) {
        for raw in self.unreleased.take() {
            // SAFETY: this agent created the handle, which is not in progress and is released once,
            // here.
            unsafe {
                (self.functions.nixl_capi_release_xfer_req)(self.raw, raw);
                (self.functions.nixl_capi_destroy_xfer_req)(raw);
            }
        }
    }

    /// Sends a notification to a peer.
    pub(crate) fn notify(&self, peer: &CStr, bytes: &[u8]) -> Result<(), Status> {
        // SAFETY: live handles, a C string, bytes with their length, which NIXL copies.
        Status::check(unsafe {
            (self.functions.nixl_capi_gen_notif)(
                self.raw,
                peer.as_ptr(),
                bytes.as_ptr().cast(),
                bytes.len(),
                self.args,
            )
        })
    }

    /// Makes progress, and takes the notifications that have arrived: sender and bytes.
    pub(crate) fn notifications(&mut self, mut each: impl FnMut(&CStr, &[u8])) {
        let (functions, map) = (self.functions, self.notifications);
        let mut agents = 0;
        // SAFETY: live handles and locations for numbers.
        unsafe {
            // After an error of one kind of connection, the map still holds the notifications of
            // others.
            (functions.nixl_capi_get_notifs)(self.raw, map, ptr::null_mut());
            (functions.nixl_capi_notif_map_size)(map, &mut agents);
        }
        if agents == 0 {
            return;
        }
        for at in 0..agents {
            let (mut name, mut count) = (ptr::null(), 0);
            // SAFETY: live handles and locations for numbers; the name lives until the map is
            // cleared.
            // A name with a NUL byte is not found again.
            unsafe {
                if (functions.nixl_capi_notif_map_get_agent_at)(map, at, &mut name)
                    != NIXL_CAPI_SUCCESS
                    || (functions.nixl_capi_notif_map_get_notifs_size)(map, name, &mut count)
                        != NIXL_CAPI_SUCCESS
                {
                    continue;
                }
            }
            for index in 0..count {
                let (mut data, mut len) = (ptr::null(), 0);
                // SAFETY: live handles and locations for numbers; the bytes live until the map is
                // cleared, and `each` keeps none of them.
                unsafe {
                    let status = (functions.nixl_capi_notif_map_get_notif)(
                        map, name, index, &mut data, &mut len,
                    );
                    if status == NIXL_CAPI_SUCCESS && !data.is_null() {
                        each(CStr::from_ptr(name), std::slice::from_raw_parts(data.cast(), len));
                    }
                }
            }
        }
        // SAFETY: a live handle.
        unsafe { (functions.nixl_capi_notif_map_clear)(map) };
    }
}

impl Drop for NixlAgent {
    fn drop(&mut self) {
        if !self.raw.is_null() {
            self.release();
        }
        // SAFETY: `open` created each handle; those that are not null are destroyed once, here.
        unsafe {
            if !self.notifications.is_null() {
                (self.functions.nixl_capi_destroy_notif_map)(self.notifications);
            }
            if !self.args.is_null() {
                (self.functions.nixl_capi_destroy_opt_args)(self.args);
            }
            if !self.backend.is_null() {
                (self.functions.nixl_capi_destroy_backend)(self.backend);
            }
            if !self.raw.is_null() {
                (self.functions.nixl_capi_destroy_agent)(self.raw);
            }
        }
    }
}

/// A plugin's parameters while it is being opened.
struct Params {
    functions: &'static Functions,
    raw: nixl_params,
}

impl Drop for Params {
    fn drop(&mut self) {
        if !self.raw.is_null() {
            // SAFETY: created once and destroyed once, here.
            unsafe { (self.functions.nixl_capi_destroy_params)(self.raw) };
        }
    }
}
