//! AMD's names of the functions that tests count or make fail.

use std::ffi::{CStr, CString, c_int, c_uint, c_void};
use std::sync::OnceLock;

use kvx_core::MemoryKind;
use kvx_gpu::StreamHandle;
use libtest_mimic::Trial;

use crate::devices::{self, Maker, Names};

pub(crate) static MAKER: Maker = Maker {
    kind: MemoryKind::Rocm,
    devices: kvx_rocm::devices,
    variables: &["KVX_HIP_LIB", "KVX_HSA_LIB"],
    visible: "HIP_VISIBLE_DEVICES",
    too_old: "hip-version 40500000",
    releases: &[
        "hip-version 50221153",
        "hip-version 60340000",
        "hip-version 70051831",
        "hip-version 70151831",
    ],
    names: Names {
        to_device: "hipMemcpyAsync",
        rows: "hipMemcpy2DAsync",
        batch: None,
        launch: "hipModuleLaunchKernel",
        record: "hipEventRecord",
        query: "hipEventQuery",
        allocate: "hipMalloc",
        free: "hipFree",
        unpin: "hipHostFree",
        create_stream: "hipStreamCreateWithFlags",
        open: "hipIpcOpenMemHandle",
        close: "hipIpcCloseMemHandle",
        load: "hipModuleLoadData",
    },
    copy_on_a_stream,
};

fn copy_on_a_stream(from: u64, to: u64, len: usize) -> StreamHandle {
    type Make = unsafe extern "C" fn(*mut usize, c_uint) -> c_int;
    type Copy = unsafe extern "C" fn(u64, u64, usize, c_int, usize) -> c_int;
    const WITHIN: c_int = 3;
    static STREAM: OnceLock<usize> = OnceLock::new();
    // SAFETY: the functions have these types in HIP's header; the stream is never destroyed, and
    // the test owns the memory.
    unsafe {
        let make = std::mem::transmute::<*mut c_void, Make>(symbol(c"hipStreamCreateWithFlags"));
        let copy = std::mem::transmute::<*mut c_void, Copy>(symbol(c"hipMemcpyAsync"));
        let stream = *STREAM.get_or_init(|| {
            let mut stream = 0;
            assert_eq!(make(&raw mut stream, 1), 0);
            stream
        });
        assert_eq!(copy(to, from, len, WITHIN, stream), 0);
        StreamHandle(stream)
    }
}

/// Returns a function of the library that kvx-rocm has loaded.
fn symbol(name: &CStr) -> *mut c_void {
    let path = std::env::var("KVX_HIP_LIB").expect("the tests run with the library named");
    let path = CString::new(path).expect("a path has no zero byte");
    // SAFETY: both are C strings, and the library is already loaded.
    let found = unsafe { libc::dlsym(libc::dlopen(path.as_ptr(), libc::RTLD_NOW), name.as_ptr()) };
    assert!(!found.is_null(), "{name:?}");
    found
}

pub(crate) fn trials() -> Vec<Trial> {
    devices::trials(&MAKER, &[], &[])
}
