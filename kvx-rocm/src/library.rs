//! The HIP runtime that this process has opened.

use std::ffi::{CStr, c_char};
use std::path::Path;

use kvx_backend::loader::{self, NativeLibrary as File, OpenOnce, Search};
use kvx_core::{Error, ErrorKind, Result, Unavailable};

use crate::ffi::{self, Functions, Status, VirtualMemory};

/// The variable that names the library.
pub(crate) const VARIABLE: &str = "KVX_HIP_LIB";
const NAMES: &[&str] =
    &["libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5", "libamdhip64.so"];
/// Where AMD's packages put it, which is in no path of the dynamic linker's by itself.
const FURTHER: &str = "/opt/rocm/lib/libamdhip64.so";
const CURE: &str = "install ROCm's HIP runtime (AMD: hip-runtime-amd; Debian: libamdhip64-5), or set KVX_HIP_LIB to its \
                    libamdhip64.so";
/// HIP 5.0.
const OLDEST: i32 = 50_000_000;
/// HIP 6.0, where kinds of memory got new numbers.
const NEW_KINDS: i32 = 60_000_000;
/// HIP 7.1, which takes a descriptor where older ones take a pointer to it.
const DESCRIPTORS: i32 = 70_100_000;

/// An open libamdhip64, for the life of the process: the first that worked is the only one.
pub(crate) struct Library {
    pub(crate) table: Functions,
    /// `None`: an older runtime.
    pub(crate) virtual_memory: Option<VirtualMemory>,
    pub(crate) file: File,
    version: i32,
    /// At least one.
    pub(crate) devices: i32,
}

static OPENED: OpenOnce<Library> = OpenOnce::new();

impl Library {
    /// Opens the library that `KVX_HIP_LIB` names, else the first of the known names, and looks for devices.
    ///
    /// # Errors
    /// What was tried and the cure; tried again at the next call.
    pub(crate) fn open() -> Result<&'static Library, Unavailable> {
        OPENED.open(Library::load)
    }

    fn load() -> Result<Library, Unavailable> {
        loader::with_signals_kept(|| {
            let file = Search::new(VARIABLE, NAMES, CURE).files([FURTHER.into()]).open()?;
            // SAFETY: the signatures are those of HIP's interface, the same in all releases; that this is HIP is what
            // its name promises, or whoever set the variable.
            let table = unsafe { Functions::find(&file) }?;
            // SAFETY: as above.
            let virtual_memory = unsafe { VirtualMemory::find(&file) }.ok();
            let mut version = 0;
            // SAFETY: a place for one number; may be called before anything else.
            let status = unsafe { (table.hipRuntimeGetVersion)(&raw mut version) };
            let path = file.path().display().to_string();
            if status == ffi::SUCCESS && version < OLDEST {
                return Err(Unavailable::because(
                    format!("{path} is HIP {}, and kvx needs 5.0 or newer", shown(version)),
                    CURE,
                ));
            }
            let mut devices = 0;
            // SAFETY: a place for one number. `hipInit` tells less of why there is no device.
            let status = unsafe { (table.hipGetDeviceCount)(&raw mut devices) };
            let library = Library { table, virtual_memory, file, version, devices };
            let status =
                if status == ffi::SUCCESS && devices < 1 { ffi::NO_DEVICE } else { status };
            library.begun(status).map(|()| library)
        })
    }

    /// Why there is no device.
    fn begun(&self, status: Status) -> Result<(), Unavailable> {
        if status == ffi::SUCCESS {
            return Ok(());
        }
        let (name, text) = self.explained(status);
        let path = self.file.path().display();
        let device = Path::new("/dev/kfd");
        let (why, cure) = match (std::fs::File::open(device), status) {
            (Err(error), _) if error.kind() == std::io::ErrorKind::NotFound => (
                "; /dev/kfd is not there".to_owned(),
                "load the kernel's module amdgpu on a machine with an AMD GPU; in a container, pass /dev/kfd and /dev/dri in",
            ),
            (Err(error), _) => (
                format!("; /dev/kfd: {error}"),
                "let this user open /dev/kfd and /dev/dri/renderD*: the groups render and video",
            ),
            (Ok(_), ffi::NO_DEVICE) => (
                visible(),
                "see what rocminfo lists; ROCR_VISIBLE_DEVICES and HIP_VISIBLE_DEVICES must name one",
            ),
            (Ok(_), _) => {
                (String::new(), "see whether rocminfo works, and dmesg for lines of amdgpu")
            }
        };
        Err(Unavailable::because(format!("{path} finds no device: {name}: {text}{why}"), cure))
    }

    /// Whether kinds of memory have the numbers that they have since HIP 6.
    pub(crate) fn has_new_kinds(&self) -> bool {
        self.version >= NEW_KINDS
    }

    /// Whether shared virtual memory is imported by a descriptor, not by a pointer to one.
    pub(crate) fn takes_descriptors(&self) -> bool {
        self.version >= DESCRIPTORS
    }

    /// The runtime's name and text for a status.
    pub(crate) fn explained(&self, status: Status) -> (String, String) {
        let ask = |function: unsafe extern "C" fn(Status) -> *const c_char| {
            // SAFETY: the runtime answers with a string of its own.
            let text = unsafe { function(status) };
            // SAFETY: such a string ends in NUL and lives as long as the runtime.
            (!text.is_null())
                .then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
        };
        (
            ask(self.table.hipGetErrorName).unwrap_or_else(|| format!("hipError_t {status}")),
            ask(self.table.hipGetErrorString)
                .unwrap_or_else(|| "the runtime has no text for it".into()),
        )
    }

    /// What `call` returned. Errors: `Exhausted` for memory, else `Native`, with the runtime's code and text.
    pub(crate) fn check(&self, call: &'static str, status: Status) -> Result<()> {
        if status == ffi::SUCCESS { Ok(()) } else { Err(self.error(call, status)) }
    }

    fn error(&self, call: &'static str, status: Status) -> Error {
        let (name, text) = self.explained(status);
        let (kind, sentence) = match status {
            ffi::OUT_OF_MEMORY => (
                ErrorKind::Exhausted,
                "the device has not enough memory: free some, or ask for less",
            ),
            ffi::DEINITIALIZED => (ErrorKind::Closed, "the runtime has ended with the process"),
            status if ends_all_work(status.into()) => (
                ErrorKind::Native,
                "the runtime has given up the device for this process after an error of some kernel or copy in it: start the \
                 process again, and see dmesg for lines of amdgpu",
            ),
            _ => (ErrorKind::Native, "the runtime refused: its text says why"),
        };
        Error::new(kind, sentence)
            .with_operation(call)
            .with_native(status.into(), format!("{name}: {text}"))
    }

    /// The runtime's version, and the file.
    pub(crate) fn shown(&self) -> String {
        let file =
            self.file.path().file_name().map(|name| name.to_string_lossy()).unwrap_or_default();
        format!("{} ({file})", shown(self.version))
    }
}

fn visible() -> String {
    let set = |name| std::env::var(name).ok().map(|value| format!("; {name}={value}"));
    ["ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"].into_iter().filter_map(set).collect()
}

fn shown(version: i32) -> String {
    format!("{}.{}", version / 10_000_000, version / 100_000 % 100)
}

/// Statuses after which the runtime does no more work: what was on its streams has ended.
pub(crate) fn ends_all_work(code: i64) -> bool {
    matches!(
        code,
        4 // deinitialized
            | 214 // uncorrectable ECC
            | 700 // illegal address
            | 702 // launch timeout
            | 709 // context destroyed
            | 710 // assert
            | 719 // launch failure
    )
}
