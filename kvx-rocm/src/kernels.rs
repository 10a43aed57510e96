//! Compiles kvx's kernels for the device, with hipRTC, and loads them.

use std::ffi::{CString, c_void};

use kvx_backend::loader::{self, Search};
use kvx_core::{Error, ErrorKind, Result, Unavailable};
use kvx_gpu::kernels::{ENTRIES, SOURCE};
use kvx_gpu::{Compiler, FunctionHandle};

use crate::driver::Hip;
use crate::ffi::{Handle, Hiprtc};

/// The variable that names hipRTC.
const VARIABLE: &str = "KVX_HIPRTC_LIB";
const NAMES: &[&str] = &["libhiprtc.so.7", "libhiprtc.so.6", "libhiprtc.so.5", "libhiprtc.so"];
/// Where AMD's packages put it.
const FURTHER: &str = "/opt/rocm/lib/libhiprtc.so";
const CURE: &str =
    "install ROCm's hipRTC (AMD: hip-runtime-amd), or set KVX_HIPRTC_LIB to its libhiprtc.so";

pub(crate) fn load(hip: &Hip) -> Result<Vec<FunctionHandle>> {
    let unavailable = |why: Unavailable| Error::new(ErrorKind::Unavailable, why.to_string());
    let hiprtc = loader::with_signals_kept(|| {
        // HIP 5 and 6 have it in the same file as all else.
        // SAFETY: the signatures are those of hipRTC's header, the same in all releases.
        unsafe { Hiprtc::find(&hip.library.file) }.or_else(|_| {
            let library = Search::new(VARIABLE, NAMES, CURE).files([FURTHER.into()]).open()?;
            // SAFETY: as above.
            unsafe { Hiprtc::find(&library) }
        })
    })
    .map_err(unavailable)?;
    let compiler = Compiler {
        name: "hipRTC",
        create: hiprtc.hiprtcCreateProgram,
        compile: hiprtc.hiprtcCompileProgram,
        log_size: hiprtc.hiprtcGetProgramLogSize,
        log: hiprtc.hiprtcGetProgramLog,
        code_size: hiprtc.hiprtcGetCodeSize,
        code: hiprtc.hiprtcGetCode,
        destroy: hiprtc.hiprtcDestroyProgram,
    };
    // Without an option it compiles for the device that is current.
    // SAFETY: all functions are hipRTC's.
    let code = unsafe { compiler.compile(SOURCE, &[]) }?;
    let mut module = std::ptr::null_mut();
    // SAFETY: a place for one handle; code says its own length. It stays for the life of the process.
    let status = unsafe {
        (hip.library.table.hipModuleLoadData)(&raw mut module, code.as_ptr().cast::<c_void>())
    };
    hip.check("hipModuleLoadData", status)?;
    ENTRIES.iter().map(|entry| function(hip, module, entry)).collect()
}

fn function(hip: &Hip, module: Handle, entry: &str) -> Result<FunctionHandle> {
    let name = CString::new(entry).map_err(|error| {
        Error::new(ErrorKind::Invalid, "an entry with a NUL").with_source(error)
    })?;
    let mut function = std::ptr::null_mut();
    // SAFETY: a place for one handle; the module lives, and the name ends in NUL.
    let status = unsafe {
        (hip.library.table.hipModuleGetFunction)(&raw mut function, module, name.as_ptr())
    };
    hip.check("hipModuleGetFunction", status).map(|()| FunctionHandle(function as usize))
}
