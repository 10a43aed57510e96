//! Loads kvx's kernels: the text that is compiled in, and if the driver does not take it, NVRTC's work.

use std::ffi::{CStr, CString, c_void};

use kvx_backend::loader::{self, Search};
use kvx_core::{Error, ErrorKind, Result};
use kvx_gpu::kernels::{ENTRIES, PTX, SOURCE};
use kvx_gpu::{Compiler, FunctionHandle};

use crate::driver::Cuda;
use crate::ffi::{Handle, Nvrtc, attribute};

/// The variable that names NVRTC.
const VARIABLE: &str = "KVX_NVRTC_LIB";
const NAMES: &[&str] = &["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so.11.2", "libnvrtc.so"];
const CURE: &str = "install a driver of CUDA 12.0 or newer; or NVRTC of CUDA's toolkit, and set KVX_NVRTC_LIB if it is not found";

pub(crate) fn load(cuda: &Cuda) -> Result<Vec<FunctionHandle>> {
    let ptx = CString::new(PTX).map_err(|error| {
        Error::new(ErrorKind::Invalid, "PTX with a NUL in it").with_source(error)
    })?;
    let module = match module(cuda, ptx.as_bytes_with_nul()) {
        Ok(module) => module,
        Err(refused) => {
            tracing::debug!(error = %refused, "the driver does not take kvx's PTX: compiling the kernels");
            module(cuda, &compiled(cuda).map_err(|error| error.with_source(refused))?)?
        }
    };
    ENTRIES.iter().map(|entry| function(cuda, module, entry)).collect()
}

/// Loads an image: text that ends in NUL, or a binary, which says its own length. It stays for the life of the process.
fn module(cuda: &Cuda, image: &[u8]) -> Result<Handle> {
    let mut module = std::ptr::null_mut();
    // SAFETY: a place for one handle; the image ends by itself, as said.
    let status = unsafe {
        (cuda.library.table.cuModuleLoadData)(&raw mut module, image.as_ptr().cast::<c_void>())
    };
    cuda.check("cuModuleLoadData", status).map(|()| module)
}

fn function(cuda: &Cuda, module: Handle, entry: &str) -> Result<FunctionHandle> {
    let name = CString::new(entry).map_err(|error| {
        Error::new(ErrorKind::Invalid, "an entry with a NUL").with_source(error)
    })?;
    let mut function = std::ptr::null_mut();
    // SAFETY: a place for one handle; the module lives, and the name ends in NUL.
    let status = unsafe {
        (cuda.library.table.cuModuleGetFunction)(&raw mut function, module, name.as_ptr())
    };
    cuda.check("cuModuleGetFunction", status).map(|()| FunctionHandle(function as usize))
}

/// A binary for this very device: needs neither a version of PTX nor the driver's compiler, which containers may lack.
///
/// By a table of our own: cudarc panics if it does not find NVRTC, and gives no binaries.
fn compiled(cuda: &Cuda) -> Result<Vec<u8>> {
    let unavailable =
        |why: kvx_core::Unavailable| Error::new(ErrorKind::Unavailable, why.to_string());
    let (nvrtc, path) = loader::with_signals_kept(|| {
        let library = Search::new(VARIABLE, NAMES, CURE).open()?;
        // SAFETY: the signatures are those of NVRTC's header, of every version since 11.2.
        let table = unsafe { Nvrtc::find(&library) }?;
        Ok((table, library.path().to_owned()))
    })
    .map_err(unavailable)?;
    tracing::debug!(path = %path.display(), "compiling kvx's kernels");
    let compiler = Compiler {
        name: "NVRTC",
        create: nvrtc.nvrtcCreateProgram,
        compile: nvrtc.nvrtcCompileProgram,
        log_size: nvrtc.nvrtcGetProgramLogSize,
        log: nvrtc.nvrtcGetProgramLog,
        code_size: nvrtc.nvrtcGetCUBINSize,
        code: nvrtc.nvrtcGetCUBIN,
        destroy: nvrtc.nvrtcDestroyProgram,
    };
    let (major, minor) =
        (cuda.attribute(attribute::COMPUTE_MAJOR), cuda.attribute(attribute::COMPUTE_MINOR));
    let architecture = format!("--gpu-architecture=sm_{major}{minor}\0");
    let option = CStr::from_bytes_with_nul(architecture.as_bytes())
        .expect("it ends in NUL and has no other");
    // SAFETY: all functions are NVRTC's.
    unsafe { compiler.compile(SOURCE, &[option]) }
}
