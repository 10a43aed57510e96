//! NVIDIA's names of the functions that tests count or make fail, and the tests that exist only for
//! NVIDIA's devices.

use std::sync::{Arc, OnceLock};

use kvx_core::DeviceAccess as _;
use kvx_core::{ErrorKind, Memory, MemoryKind};
use kvx_gpu::{DevicePtr, StreamHandle};
use kvx_testkit::Child;
use libtest_mimic::Trial;

use crate::devices::{self, Bench, LONG, Maker, Names, ROLE};
use crate::nvrtc;

pub(crate) static MAKER: Maker = Maker {
    kind: MemoryKind::Cuda,
    devices: kvx_cuda::devices,
    variables: &["KVX_CUDA_LIB"],
    visible: "CUDA_VISIBLE_DEVICES",
    too_old: "cuda-version 11000",
    releases: &["cuda-version 11040", "cuda-version 12020", "cuda-version 13000"],
    names: Names {
        to_device: "cuMemcpyHtoDAsync_v2",
        rows: "cuMemcpy2DAsync_v2",
        batch: Some("cuMemcpyBatchAsync_v2"),
        launch: "cuLaunchKernel",
        record: "cuEventRecord",
        query: "cuEventQuery",
        allocate: "cuMemAlloc_v2",
        free: "cuMemFree_v2",
        unpin: "cuMemFreeHost",
        create_stream: "cuStreamCreate",
        open: "cuIpcOpenMemHandle_v2",
        close: "cuIpcCloseMemHandle",
        load: "cuModuleLoadData",
    },
    copy_on_a_stream,
};

fn copy_on_a_stream(from: u64, to: u64, len: usize) -> StreamHandle {
    use cudarc::driver::result::{self, stream::StreamKind};
    static STREAM: OnceLock<usize> = OnceLock::new();
    let device = result::device::get(0).unwrap();
    // SAFETY: cudarc's context is the device's primary one, which this test has retained; both stay
    // valid.
    unsafe {
        result::ctx::set_current(result::primary_ctx::retain(device).unwrap()).unwrap();
        let made = || result::stream::create(StreamKind::NonBlocking).unwrap() as usize;
        let stream = *STREAM.get_or_init(made);
        result::memcpy_dtod_async(to, from, len, stream as _).unwrap();
        result::ctx::set_current(std::ptr::null_mut()).unwrap();
        StreamHandle(stream)
    }
}

pub(crate) fn trials() -> Vec<Trial> {
    devices::trials(
        &MAKER,
        &[
            ("cudarc_has_the_same_library", cudarc_has_the_same_library),
            ("a_second_driver_in_the_process_is_refused", second_driver_is_refused),
            (nvrtc::NAME, nvrtc::compiles_the_kernels),
            (
                "mapped_memory_without_a_handle_is_refused_with_what_to_set",
                mapped_memory_is_refused,
            ),
            ("memory_of_another_context_is_refused", other_context_is_refused),
            ("a_device_is_flushed_where_needed_before_data_counts_as_arrived", flushed),
        ],
        &[("memory_of_the_drivers_own_pool_is_refused", pool_memory_is_refused)],
    )
}

/// Runs in its own process, which loads the other driver before kvx does.
fn second_driver_is_refused(_: &Bench<'_>) {
    let child = Child::start_self(ROLE, "unavailable second-driver").expect("a process starts");
    let answer = child.hear(LONG).expect("it says why");
    assert!(answer.contains("together with") && answer.contains("libcuda.so.1, which"), "{answer}");
    assert!(answer.contains("one driver serves a process"), "{answer}");
}

/// Tests that another user of cudarc in the process gets the library that kvx has loaded.
fn cudarc_has_the_same_library(bench: &Bench<'_>) {
    bench.device.pinned(64).unwrap(); // the device is in use
    let before = bench.control.calls("cuDevicePrimaryCtxRetain");
    let device = cudarc::driver::result::device::get(0).unwrap();
    // SAFETY: the driver named the device.
    let context = unsafe { cudarc::driver::result::primary_ctx::retain(device) }.unwrap();
    assert!(!context.is_null());
    assert_eq!(
        bench.control.calls("cuDevicePrimaryCtxRetain"),
        before + 1,
        "cudarc called the stand-in"
    );
    // SAFETY: retained above.
    unsafe { cudarc::driver::result::primary_ctx::release(device) }.unwrap();
}

/// Runs in its own process, because the driver names a device's properties once.
fn flushed(_: &Bench<'_>) {
    for (role, result) in [("arrival unordered", "flushed"), ("arrival ordered", "not flushed")] {
        let child = Child::start_self(ROLE, role).expect("a process starts");
        assert_eq!(child.hear(LONG).expect("it says how it went"), result);
    }
}

/// Tests memory like that of PyTorch's expandable segments: mapped, without a shareable handle.
fn mapped_memory_is_refused(bench: &Bench<'_>) {
    use cudarc::driver::sys;
    const LEN: usize = 4 << 20;
    bench.device.pinned(64).unwrap(); // the device is in use
    // SAFETY: plain numbers, for which all zeros are valid.
    let mut properties: sys::CUmemAllocationProp = unsafe { std::mem::zeroed() };
    properties.type_ = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location.type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
    let access = sys::CUmemAccessDesc {
        location: properties.location,
        flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
    };
    let (mut address, mut handle) = (0, 0);
    // SAFETY: locations for each result; nobody unmaps the memory before the process ends.
    unsafe {
        sys::cuMemAddressReserve(&raw mut address, LEN, 0, 0, 0).result().unwrap();
        sys::cuMemCreate(&raw mut handle, LEN, &raw const properties, 0).result().unwrap();
        sys::cuMemMap(address, LEN, 0, handle, 0).result().unwrap();
        sys::cuMemSetAccess(address, LEN, &raw const access, 1).result().unwrap();
    }
    // SAFETY: nobody unmaps the memory before the process ends.
    let memory = unsafe { bench.device.adopt(DevicePtr(address), LEN, ()) }.unwrap();
    memory.copy_in(0, &[7; 64]).unwrap();
    let error = bench.device.share(&Arc::new(memory)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.to_string().contains("expandable_segments:False"), "{error}");
}

fn other_context_is_refused(bench: &Bench<'_>) {
    let pool = bench.device.pool(4096).build().unwrap();
    bench.control.command("other-context");
    // SAFETY: the call rejects the memory.
    let error = unsafe { bench.device.adopt(DevicePtr(pool.address()), 4096, ()) }.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.to_string().contains("primary context"), "{error}");
}

fn pool_memory_is_refused(bench: &Bench<'_>) {
    let device = cudarc::driver::result::device::get(0).unwrap();
    // SAFETY: cudarc's context is the device's primary one, which this test has retained; the
    // stream is the null stream, and nobody frees the memory before the process ends.
    let address = unsafe {
        let context = cudarc::driver::result::primary_ctx::retain(device).unwrap();
        cudarc::driver::result::ctx::set_current(context).unwrap();
        let address = cudarc::driver::result::malloc_async(std::ptr::null_mut(), 4096).unwrap();
        cudarc::driver::result::ctx::set_current(std::ptr::null_mut()).unwrap();
        address
    };
    // SAFETY: the call rejects the memory.
    let error = unsafe { bench.device.adopt(DevicePtr(address), 4096, ()) }.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.to_string().contains("Device::pool"), "{error}");
    let (id, access) = (bench.device.info().id, Arc::clone(&bench.device));
    // SAFETY: nobody touches the memory, which nobody frees before the process ends.
    let memory = unsafe { Memory::adopt_device(address, 4096, id, access, ()) };
    let error = bench.device.share(&Arc::new(memory)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.to_string().contains("pool of CUDA"), "{error}");
}
