//! A vendor's library, loaded and initialised.

use std::ffi::{CStr, c_int};
use std::path::PathBuf;

use kvx_backend::loader;
use kvx_core::backend::Unavailable;
use kvx_core::{Error, ErrorKind, Result};

use super::compiler;
use super::functions::{CompilerFunctions, Failure, Functions, VirtualMemoryFunctions};
use super::types::{DeviceNumber, Status, status};
use super::vendor::{Vendor, VendorCalls};
use crate::kernels::SOURCE;

/// A loaded library, for the life of the process.
pub(crate) struct Library {
    pub(crate) vendor: &'static Vendor,
    pub(crate) calls: Box<dyn VendorCalls>,
    pub(crate) functions: Functions,
    /// `None` for an older driver, which has only pools of plain memory.
    pub(crate) virtual_memory: Option<VirtualMemoryFunctions>,
    /// The compiler, if it is in the driver's own library.
    pub(crate) compiler: Option<CompilerFunctions>,
    pub(crate) version: c_int,
    pub(crate) path: PathBuf,
}

impl Library {
    /// Loads and initialises the library. Errors: the candidates that were tried, and the remedy.
    pub(crate) fn load(vendor: &'static Vendor) -> Result<Library, Unavailable> {
        loader::with_signals_kept(|| {
            let file = vendor.library.open()?;
            // SAFETY: all releases of the vendor's interface have this signature. The library's
            // name, or the user who named the library, guarantees that it is the vendor's.
            let get_version: unsafe extern "C" fn(*mut c_int) -> Status =
                unsafe { file.symbol(vendor.version) }?;
            let mut version = 0;
            // SAFETY: a location for one number; the call is allowed before any other.
            let status = unsafe { get_version(&raw mut version) };
            if status == status::SUCCESS && version < vendor.oldest {
                let [found, oldest] = [version, vendor.oldest].map(vendor.format_version);
                let (path, name) = (file.path().display(), vendor.name);
                return Err(Unavailable::because(
                    format!("{path} is {name} {found}, and kvx needs {oldest} or newer"),
                    vendor.library.cure,
                ));
            }
            // SAFETY: `Vendor` names functions that have these signatures in every release from the
            // oldest on; the library is the vendor's, see above.
            let library = unsafe {
                Library {
                    vendor,
                    calls: (vendor.calls)(&file, version)?,
                    functions: Functions::find(&file, &vendor.functions)?,
                    virtual_memory: VirtualMemoryFunctions::find(&file, &vendor.virtual_memory)
                        .ok(),
                    compiler: CompilerFunctions::find(&file, &vendor.compiler.functions).ok(),
                    version,
                    path: file.path().to_owned(),
                }
            };
            library.check_start(library.calls.initialize())?;
            Ok(library)
        })
    }

    /// Returns the number of devices, at least one. Errors: the reason why there is none, and what
    /// to do.
    pub(crate) fn device_count(&self) -> Result<c_int, Unavailable> {
        let mut count = 0;
        // SAFETY: a location for one number.
        let counted = unsafe { self.functions.device_count(&raw mut count) };
        self.check_start(match counted {
            Ok(()) if count < 1 => status::NO_DEVICE,
            Err(Failure::Status(_, status)) => status,
            _ => status::SUCCESS,
        })?;
        Ok(count)
    }

    fn check_start(&self, status: Status) -> Result<(), Unavailable> {
        if status == status::SUCCESS {
            return Ok(());
        }
        let what = if status == status::NO_DEVICE { "finds no device" } else { "does not start" };
        let (text, path) = (self.describe(status), self.path.display());
        let (why, cure) = (self.vendor.advice)(status);
        Err(Unavailable::because(format!("{path} {what}: {text}{why}"), cure))
    }

    /// Returns the driver's name and text for a status.
    pub(crate) fn describe(&self, status: Status) -> String {
        let [name, text] = self.calls.describe(status).map(|text| {
            // SAFETY: such strings end in NUL and live as long as the driver (`VendorCalls`).
            let text = (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) });
            text.map(|text| text.to_string_lossy().into_owned())
        });
        let Vendor { name: driver, noun, .. } = self.vendor;
        let name = name.unwrap_or_else(|| format!("{driver} status {status}"));
        match text {
            Some(text) if text == name => name, // HIP before 6
            Some(text) => format!("{name}: {text}"),
            None => format!("{name}: the {noun} has no text for this status"),
        }
    }

    /// Returns the error for a status: `Exhausted` for memory, otherwise `Native`, with the
    /// driver's code and text.
    pub(crate) fn error(&self, function: &'static CStr, status: Status) -> Error {
        let Vendor { noun, kernel_log, .. } = self.vendor;
        let (kind, sentence) = match status {
            status::OUT_OF_MEMORY => (
                ErrorKind::Exhausted,
                "the device does not have enough memory: free some, or allocate less".to_owned(),
            ),
            status::DEINITIALIZED => {
                (ErrorKind::Closed, format!("the {noun} was shut down with the process"))
            }
            status if self.is_fatal(status.into()) => (
                ErrorKind::Native,
                format!(
                    "the {noun} has given up the device for this process after an error of some kernel or copy in \
                     it: start the process again, and see dmesg for lines of {kernel_log}"
                ),
            ),
            _ => (ErrorKind::Native, format!("a call of the {noun} failed: its text says why")),
        };
        // Remove the version of a function, which is only part of its symbol.
        let function = function.to_str().unwrap_or_default().trim_end_matches("_v2");
        Error::new(kind, sentence)
            .with_operation(function)
            .with_native(status.into(), self.describe(status))
    }

    /// Returns whether an error with this code ends the driver's work for the process.
    pub(crate) fn is_fatal(&self, code: i64) -> bool {
        self.vendor.fatal.iter().any(|codes| codes.contains(&code))
    }

    /// Compiles kvx's kernels for a device. Errors: `Unavailable` without a compiler, `Native`.
    pub(crate) fn compile_kernels(&self, device: DeviceNumber) -> Result<Vec<u8>> {
        let vendor = &self.vendor.compiler;
        let functions = match self.compiler {
            Some(functions) => functions,
            None => {
                let found = loader::with_signals_kept(|| {
                    let file = vendor.library.open()?;
                    tracing::debug!(path = %file.path().display(), "compiling kvx's kernels");
                    // SAFETY: the signatures are those of the compiler's header, equal in all
                    // releases with one of these file names.
                    unsafe { CompilerFunctions::find(&file, &vendor.functions) }
                });
                found.map_err(|why| ErrorKind::Unavailable.because(why.to_string()))?
            }
        };
        compiler::compile(&functions, vendor.name, SOURCE, &self.calls.compiler_options(device))
    }

    /// Returns the version, and the name of the file.
    pub(crate) fn version(&self) -> String {
        let file = self.path.file_name().unwrap_or_default().to_string_lossy();
        format!("{} ({file})", (self.vendor.format_version)(self.version))
    }
}
