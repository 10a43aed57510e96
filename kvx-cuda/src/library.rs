//! The driver that this process has opened.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::Path;

use kvx_backend::loader::{self, OpenOnce, Search};
use kvx_core::{Error, ErrorKind, Result, Unavailable};
use libloading::os::unix as native;

use crate::ffi::{self, Functions, Status, VirtualMemory};

/// The variable that names the library.
pub(crate) const VARIABLE: &str = "KVX_CUDA_LIB";
const NAME: &str = "libcuda.so.1";
/// Where the drivers of WSL lie.
const FURTHER: &str = "/usr/lib/wsl/lib/libcuda.so.1";
const CURE: &str = "install NVIDIA's driver, which brings libcuda.so.1; in a container, pass the GPUs in (docker run --gpus all, \
                    with NVIDIA's container toolkit); or set KVX_CUDA_LIB to the file";
const UPDATE: &str = "install a newer driver of NVIDIA's";
/// CUDA 11.4: the first that knows a part of a device (MIG) by its own UUID.
const OLDEST: i32 = 11_040;

/// An open libcuda, initialised, for the life of the process: the first that worked is the only one.
pub(crate) struct Library {
    pub(crate) table: Functions,
    pub(crate) virtual_memory: Option<VirtualMemory>,
    /// As the driver writes it: 12080 for 12.8.
    pub(crate) version: i32,
    pub(crate) path: String,
}

static OPENED: OpenOnce<Library> = OpenOnce::new();

impl Library {
    /// Opens the library that `KVX_CUDA_LIB` names, else `libcuda.so.1`, and initialises it.
    ///
    /// # Errors
    /// What was tried and the cure; tried again at the next call.
    pub(crate) fn open() -> Result<&'static Library, Unavailable> {
        OPENED.open(Library::load)
    }

    fn load() -> Result<Library, Unavailable> {
        loader::with_signals_kept(|| {
            let library = Search::new(VARIABLE, &[NAME], CURE).files([FURTHER.into()]).open()?;
            // SAFETY: the signatures are those of the driver's interface, which keeps the functions of a name and
            // number as they are; that this is such a driver is what its name promises, or whoever set the variable.
            let version: unsafe extern "C" fn(*mut c_int) -> Status =
                unsafe { library.symbol(c"cuDriverGetVersion") }?;
            let mut number = 0;
            // SAFETY: a place for one number; may be called before anything else.
            let status = unsafe { version(&raw mut number) };
            let path = library.path().display().to_string();
            if status == ffi::SUCCESS && number < OLDEST {
                return Err(Unavailable::because(
                    format!(
                        "{path} is a driver of CUDA {}, and kvx needs 11.4 or newer",
                        shown(number)
                    ),
                    UPDATE,
                ));
            }
            // SAFETY: as above.
            let table = unsafe { Functions::find(&library) }?;
            // SAFETY: as above.
            let virtual_memory = unsafe { VirtualMemory::find(&library) }.ok(); // an older driver: pools are plain
            let library = Library { table, virtual_memory, version: number, path };
            // SAFETY: the one argument must be 0.
            library.begun(unsafe { (table.cuInit)(0) })?;
            library.is_the_only_one()?;
            Ok(library)
        })
    }

    /// Why the driver does not start.
    fn begun(&self, status: Status) -> Result<(), Unavailable> {
        if status == ffi::SUCCESS {
            return Ok(());
        }
        let (name, text) = self.explained(status);
        let cure = match status {
            ffi::NO_DEVICE => {
                "see what nvidia-smi lists; in a container, pass the GPUs in; CUDA_VISIBLE_DEVICES must name one"
            }
            ffi::STUB_LIBRARY => {
                "this is the toolkit's stub: take its folder out of LD_LIBRARY_PATH, or set KVX_CUDA_LIB"
            }
            ffi::SYSTEM_DRIVER_MISMATCH => {
                "the library and the kernel's module are of different releases: load the new module (reboot), or in a container \
                 take the host's library"
            }
            ffi::SYSTEM_NOT_READY => "start NVIDIA's fabric manager, and see nvidia-smi",
            _ => "see whether nvidia-smi works, and dmesg for lines of NVRM",
        };
        let visible =
            std::env::var("CUDA_VISIBLE_DEVICES").ok().filter(|_| status == ffi::NO_DEVICE);
        let visible =
            visible.map_or_else(String::new, |value| format!("; CUDA_VISIBLE_DEVICES={value}"));
        Err(Unavailable::because(
            format!("{} does not start: {name}: {text}{visible}", self.path),
            cure,
        ))
    }

    /// cudarc opens libcuda by its names: what it gets must be this library, and must be there. It would panic without.
    fn is_the_only_one(&self) -> Result<(), Unavailable> {
        // In the order in which cudarc asks for them; the further names of its list are of no driver.
        for (name, must_be) in [("libcuda.so", false), (NAME, true)] {
            // SAFETY: opening it runs its initialisers, as cudarc would; they have run if it is this library.
            let other = unsafe {
                native::Library::open(Some(name), native::RTLD_LAZY | native::RTLD_LOCAL)
            };
            let found = match other {
                Ok(other) => {
                    // SAFETY: only its address is looked at.
                    let init = unsafe { other.get::<*mut c_void>(b"cuInit\0") }.map(|init| *init);
                    _ = other.into_raw(); // nobody closes it: cudarc will use it
                    init.is_ok_and(|init| std::ptr::eq(init, self.table.cuInit as *mut c_void))
                }
                Err(_) if !must_be => continue,
                Err(_) => false,
            };
            if !found {
                return Err(Unavailable::because(
                    format!("{name} is another library for this process than {}", self.path),
                    "one driver serves a process: unset KVX_CUDA_LIB, or set it to the file that is called libcuda.so.1; and take \
                     folders of stubs out of LD_LIBRARY_PATH",
                ));
            }
            if !must_be {
                break; // cudarc takes this one
            }
        }
        Ok(())
    }

    /// The driver's name and text for a status.
    pub(crate) fn explained(&self, status: Status) -> (String, String) {
        let ask = |function: unsafe extern "C" fn(Status, *mut *const c_char) -> Status| {
            let mut text = std::ptr::null();
            // SAFETY: a place for one pointer, which the driver fills with a string of its own, or with null.
            let known =
                unsafe { function(status, &raw mut text) } == ffi::SUCCESS && !text.is_null();
            // SAFETY: the driver's strings end in NUL and live as long as it does.
            known.then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
        };
        (
            ask(self.table.cuGetErrorName).unwrap_or_else(|| format!("CUresult {status}")),
            ask(self.table.cuGetErrorString)
                .unwrap_or_else(|| "the driver has no text for it".into()),
        )
    }

    /// What `call` returned. Errors: `Exhausted` for memory, else `Native`, with the driver's code and text.
    pub(crate) fn check(&self, call: &'static str, status: Status) -> Result<()> {
        if status == ffi::SUCCESS { Ok(()) } else { Err(self.error(call, status)) }
    }

    pub(crate) fn error(&self, call: &'static str, status: Status) -> Error {
        let (name, text) = self.explained(status);
        let (kind, sentence) = match status {
            ffi::OUT_OF_MEMORY => (
                ErrorKind::Exhausted,
                "the device has not enough memory: free some, or ask for less",
            ),
            ffi::DEINITIALIZED => (ErrorKind::Closed, "the driver has ended with the process"),
            status if ends_all_work(status.into()) => (
                ErrorKind::Native,
                "the driver has given up the device for this process after an error of some kernel or copy in it: start the \
                 process again, and see dmesg for lines of NVRM",
            ),
            _ => (ErrorKind::Native, "the driver refused: its text says why"),
        };
        Error::new(kind, sentence)
            .with_operation(call)
            .with_native(status.into(), format!("{name}: {text}"))
    }

    /// The driver's version, and the file.
    pub(crate) fn shown(&self) -> String {
        let file = Path::new(&self.path)
            .file_name()
            .map(|name| name.to_string_lossy())
            .unwrap_or_default();
        format!("{} ({file})", shown(self.version))
    }
}

fn shown(version: i32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

/// Statuses after which a context does no more work: what was on its streams has ended.
pub(crate) fn ends_all_work(code: i64) -> bool {
    matches!(
        code,
        4 // deinitialized
            | 214 // uncorrectable ECC
            | 220 // uncorrectable NVLink
            | 226 // contained
            | 700 // illegal address
            | 702 // launch timeout
            | 709 // context destroyed
            | 710 // assert
            | 714
            ..=719 // illegal instructions, addresses and launches
            | 810 // MPS client terminated
    )
}
