//! Options of an endpoint that kvx changes (`fi_setopt`).
//!
//! EFA's number of retries to a receiver without a buffer (`FI_OPT_EFA_RNR_RETRY`) is not one of
//! them: after a few, the provider repeats a message itself, later each time. If the card repeated
//! it without a bound, messages to a stopped peer would fill the queue that all peers share.

use std::ffi::{c_int, c_void};

use super::bindings_1_17::*;
use super::domain::function;
use super::errno::Errno;
use super::info::Info;
use super::library::Version;

/// The level and names of options that the bindings do not have.
const FI_OPT_ENDPOINT: c_int = 0;
const FI_OPT_CUDA_API_PERMITTED: c_int = 10;
const FI_OPT_SHARED_MEMORY_PERMITTED: c_int = 11;

/// An option that kvx sets to false.
struct Prohibition {
    name: c_int,
    what: &'static str,
    /// The first version of the library that knows it.
    since: Version,
    concerns: fn(&Info) -> bool,
    /// The consequence of a refusal, unless that only costs time.
    danger: Option<&'static str>,
}

const PROHIBITIONS: &[Prohibition] = &[
    // A call to the driver may wait for the GPU, and would delay all peers.
    Prohibition {
        name: FI_OPT_CUDA_API_PERMITTED,
        what: "calls of the CUDA driver",
        since: Version::of(1, 18),
        concerns: Info::has_devices,
        danger: None,
    },
    // Within a host, EFA would use the provider shm, in which a killed process can block its peers.
    Prohibition {
        name: FI_OPT_SHARED_MEMORY_PERMITTED,
        what: "shared memory",
        since: Version::of(1, 21),
        concerns: |info| info.provider() == "efa",
        danger: Some(
            "a killed process can block its peers on this host, unless FI_EFA_ENABLE_SHM_TRANSFER \
             is 0",
        ),
    },
];

/// Sets kvx's options of an endpoint that is not enabled yet. A provider that refuses one keeps its
/// default.
///
/// # Safety
/// The endpoint is open.
pub(super) unsafe fn set(endpoint: *mut fid_ep, info: &Info, library: Version) {
    for Prohibition { name, what, danger, .. } in prohibitions(info, library) {
        let (no, level) = (false, FI_OPT_ENDPOINT);
        // SAFETY: the endpoint is open and begins with its `fid`; the provider reads one boolean.
        let answer = unsafe {
            let value = (&raw const no).cast::<c_void>();
            function!(endpoint, ops, setopt)(
                endpoint.cast(),
                level,
                *name,
                value,
                size_of::<bool>(),
            )
        };
        if let Err(errno) = Errno::check(answer) {
            match danger {
                Some(danger) => tracing::warn!(
                    ?errno,
                    "{} does not let kvx prohibit {what}: {danger}",
                    info.provider()
                ),
                None => {
                    tracing::debug!(what, ?errno, "the provider does not let kvx prohibit this");
                }
            }
        }
    }
}

fn prohibitions(info: &Info, library: Version) -> impl Iterator<Item = &'static Prohibition> {
    PROHIBITIONS.iter().filter(move |option| library >= option.since && (option.concerns)(info))
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::super::Infos;
    use super::*;

    static SET: Mutex<Vec<(c_int, bool)>> = Mutex::new(Vec::new());

    unsafe extern "C" fn record(
        _: fid_t,
        level: c_int,
        name: c_int,
        value: *const c_void,
        len: usize,
    ) -> c_int {
        assert_eq!((level, len), (0, 1));
        // SAFETY: `set` passes a boolean.
        SET.lock().unwrap().push((name, unsafe { *value.cast::<bool>() }));
        -libc::EOPNOTSUPP // a refusal does not keep the other options from being set
    }

    #[test]
    fn a_provider_is_told_to_call_no_driver_and_efa_to_use_no_shared_memory() {
        let mut functions = fi_ops_ep { setopt: Some(record), ..fi_ops_ep::default() };
        let mut endpoint = fid_ep { ops: &mut functions, ..fid_ep::default() };
        let infos = Infos::of_names(&[(c"efa", c"rdmap0s6", None), (c"tcp;ofi_rxm", c"lo", None)]);
        let mut set = |at, devices, (major, minor)| {
            let info = infos.iter().nth(at).unwrap();
            // SAFETY: the test owns the list, and uses one entry at a time.
            unsafe { (*info.raw()).caps = if devices { FI_HMEM } else { 0 } };
            // SAFETY: the endpoint has the function that is called.
            unsafe { super::set(&mut endpoint, info, Version::of(major, minor)) };
            std::mem::take(&mut *SET.lock().unwrap())
        };
        let [cuda, shared] =
            [FI_OPT_CUDA_API_PERMITTED, FI_OPT_SHARED_MEMORY_PERMITTED].map(|name| (name, false));
        assert_eq!(set(0, true, (2, 5)), [cuda, shared]);
        assert_eq!(set(0, true, (1, 18)), [cuda], "1.18 has only one of them");
        assert_eq!(set(0, false, (1, 21)), [shared], "host memory alone");
        assert_eq!(set(1, true, (2, 5)), [cuda]);
        assert_eq!(set(1, false, (2, 5)), []);
        assert_eq!(set(0, true, (1, 17)), [], "it would be another option");
    }
}
