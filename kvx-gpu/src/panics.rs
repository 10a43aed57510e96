//! Tests a driver that panics: all waits for its device end.

use std::ffi::{c_char, c_int};
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use super::{Device, DevicePtr};
use crate::driver::{
    CallResult, CompilerFunctions, CompilerLibrary, CompilerNames, Context, CopyDirection,
    DeviceInfo, Driver, Failure, FunctionNames, Functions, Library, LibraryFile, PointerInfo, Rows,
    Status, StreamHandle, Vendor, VendorCalls, VirtualMemoryFunctions, VirtualMemoryNames,
};
use kvx_core::DeviceAccess as _;
use kvx_core::backend::Hop;
use kvx_core::backend::sync::Mutex;
use kvx_core::{Completion, DeviceId, ErrorKind, MemoryKind};

const LONG: Duration = Duration::from_secs(8);

const NO_FILE: LibraryFile = LibraryFile { variable: "", names: &[], file: None, cure: "" };

static VENDOR: Vendor = Vendor {
    kind: MemoryKind::Cuda,
    name: "TEST",
    noun: "test",
    kernel_log: "",
    device_list: "",
    library: NO_FILE,
    oldest: 0,
    format_version: |_| String::new(),
    advice: |_| (String::new(), ""),
    version: c"",
    functions: FunctionNames::UNUSED,
    virtual_memory: VirtualMemoryNames::UNUSED,
    imports_descriptors: 0,
    fatal: &[],
    kernels: None,
    compiler: CompilerLibrary { name: "", library: NO_FILE, functions: CompilerNames::UNUSED },
    calls: |_, _| Err(kvx_core::backend::Unavailable::because("a test", "")),
};

/// Panics at its first copy, after the test has sent a message.
struct PanickingCalls(Mutex<Receiver<()>>);

// SAFETY: it has no memory and copies nothing.
unsafe impl VendorCalls for PanickingCalls {
    fn describe(&self, _: Status) -> [*const c_char; 2] {
        [std::ptr::null(); 2]
    }

    fn device_id(&self, _: CallResult<[u8; 16]>, _: &str) -> CallResult<DeviceId> {
        Ok(DeviceId([1; 16]))
    }

    fn context(&self, _: c_int) -> CallResult<Context> {
        Ok(Context(0))
    }

    fn enter(&self, context: Context) -> CallResult<Context> {
        Ok(context)
    }

    fn leave(&self, _: Context) -> CallResult {
        Ok(())
    }

    fn classify(&self, _: u64) -> CallResult<PointerInfo> {
        Err(Failure::Missing("no memory".into()))
    }

    fn dma_buf(&self, _: c_int, _: Range<u64>) -> CallResult<(OwnedFd, u64)> {
        Err(Failure::Missing("no memory".into()))
    }

    unsafe fn copy(&self, _: CopyDirection, _: Hop, _: StreamHandle) -> CallResult {
        self.0.lock().recv_timeout(LONG).ok();
        panic!("a driver panics, as the test requires");
    }

    unsafe fn copy_rows(&self, _: CopyDirection, _: Rows, _: StreamHandle) -> CallResult {
        Err(Failure::Missing("no memory".into()))
    }
}

fn device(go: Receiver<()>) -> Arc<Device> {
    Device::new(driver(go))
}

/// Returns a driver whose other functions succeed and do nothing.
pub(crate) fn driver(go: Receiver<()>) -> Driver {
    let info = DeviceInfo {
        kind: MemoryKind::Cuda,
        driver: "TEST",
        id: DeviceId([1; 16]),
        ordinal: 0,
        name: "one that panics".into(),
        bus: String::new(),
        version: String::new(),
    };
    let library = Box::leak(Box::new(Library {
        vendor: &VENDOR,
        calls: Box::new(PanickingCalls(Mutex::new(go))),
        functions: Functions::idle(),
        virtual_memory: Some(VirtualMemoryFunctions::idle()),
        compiler: Some(CompilerFunctions::idle()),
        version: 0,
        path: "test".into(),
    }));
    Driver::new(library, 0, info, Arc::new([]))
}

#[test]
fn a_driver_that_panics_leaves_no_ticket_behind() {
    let (go, wait) = channel();
    let device = device(wait);
    let ask = |device: &Device| {
        let (completion, ticket) = Completion::with_ticket();
        // SAFETY: the driver copies no bytes.
        unsafe { device.hop(&[Hop { from: 4096, to: 8192, len: 64 }], ticket) };
        completion
    };
    let (first, second) = (ask(&device), ask(&device));
    go.send(()).unwrap();
    // The driver may have started the first copy: its memory is quarantined.
    assert_eq!(first.wait_blocking(LONG).unwrap_err().kind(), ErrorKind::Forgotten);
    second.wait_blocking(LONG).unwrap_err();
    let error = ask(&device).wait_blocking(LONG).unwrap_err();
    assert!(error.sentence().contains("the thread of the device has ended"), "{error}");
    let (completion, ticket) = Completion::with_ticket();
    // SAFETY: the driver copies no bytes.
    unsafe { device.gather(DevicePtr(0), &[], &[0].into(), ticket) };
    completion.wait_blocking(LONG).unwrap_err();
    drop(device);
}
