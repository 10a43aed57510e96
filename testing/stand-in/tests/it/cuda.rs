//! Tests the exports of `libcuda`.

use kvx_core::backend::Hop;
use kvx_gpu::kernels::{
    DeviceGrid, Launch, LaunchBlocks, PTX, Swap, THREADS, encode_grids, encode_hops,
};
use kvx_stand_in::{Control, reference};
use kvx_testkit::test;

use crate::symbols::{Opened, call};
use crate::wait_for;

pub(crate) type Handle = usize;

/// The driver, with a context and a stream.
pub(crate) struct Cuda {
    pub(crate) library: Opened,
    pub(crate) stream: Handle,
    pub(crate) control: Control,
}

impl Cuda {
    pub(crate) fn new() -> Self {
        let control = Control::open();
        let library = Opened::by_path();
        assert_eq!(call!(library, cuInit(0 => u32)), 0);
        let [mut context, mut stream]: [Handle; 2] = [0; 2];
        assert_eq!(
            call!(library, cuDevicePrimaryCtxRetain(&mut context => *mut Handle, 0 => i32)),
            0
        );
        assert_eq!(call!(library, cuCtxPushCurrent_v2(context => Handle)), 0);
        assert_eq!(call!(library, cuStreamCreate(&mut stream => *mut Handle, 1 => u32)), 0);
        Cuda { library, stream, control }
    }

    pub(crate) fn allocate(&self, len: usize) -> u64 {
        let mut address = 0;
        assert_eq!(call!(self.library, cuMemAlloc_v2(&mut address => *mut u64, len => usize)), 0);
        address
    }

    pub(crate) fn free(&self, address: u64) -> i32 {
        call!(self.library, cuMemFree_v2(address => u64))
    }

    pub(crate) fn upload(&self, to: u64, bytes: &[u8]) -> i32 {
        let code = call!(self.library, cuMemcpyHtoDAsync_v2(
            to => u64, bytes.as_ptr() => *const u8, bytes.len() => usize, self.stream => Handle));
        self.wait();
        code
    }

    pub(crate) fn download(&self, from: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        let code = call!(self.library, cuMemcpyDtoHAsync_v2(
            bytes.as_mut_ptr() => *mut u8, from => u64, len => usize, self.stream => Handle));
        self.wait();
        assert_eq!(code, 0);
        bytes
    }

    pub(crate) fn wait(&self) -> i32 {
        call!(self.library, cuStreamSynchronize(self.stream => Handle))
    }

    /// Allocates memory with this content.
    pub(crate) fn with(&self, bytes: &[u8]) -> u64 {
        let address = self.allocate(bytes.len());
        assert_eq!(self.upload(address, bytes), 0);
        address
    }

    fn launch(&self, function: Handle, launch: &Launch) -> i32 {
        let parameters: Vec<*const u64> =
            launch.parameters.iter().map(|value| &raw const *value).collect();
        let [x, y, z] = launch.grid;
        call!(self.library, cuLaunchKernel(
            function => Handle, x => u32, y => u32, z => u32, THREADS => u32, 1 => u32, 1 => u32, 0 => u32,
            self.stream => Handle, parameters.as_ptr() => *const *const u64, std::ptr::null() => *const usize))
    }

    fn function(&self, entry: &str) -> Handle {
        let (text, name) = (format!("{PTX}\0"), format!("{entry}\0"));
        let [mut module, mut function]: [Handle; 2] = [0; 2];
        assert_eq!(
            call!(self.library, cuModuleLoadData(&mut module => *mut Handle, text.as_ptr() => *const u8)),
            0
        );
        assert_eq!(
            call!(self.library, cuModuleGetFunction(
            &mut function => *mut Handle, module => Handle, name.as_ptr() => *const u8)),
            0
        );
        function
    }
}

impl Drop for Cuda {
    fn drop(&mut self) {
        self.control.command("release");
        call!(self.library, cuStreamDestroy_v2(self.stream => Handle));
        call!(self.library, cuCtxPopCurrent_v2(std::ptr::null_mut() => *mut Handle));
    }
}

/// The soname makes later opens of `libcuda.so.1` return the library that is open under another
/// path.
#[test]
fn the_drivers_name_finds_the_library_that_is_open() {
    let opened = Opened::by_path();
    let named = Opened::by_name("libcuda.so.1").expect("its soname");
    for name in ["cuInit", "cuMemAlloc_v2", "kvx_stand_in_control"] {
        assert_eq!(opened.address(name).expect(name), named.address(name).expect(name));
    }
}

#[test]
fn calls_without_a_context_fail() {
    let cuda = Cuda::new();
    let mut context: Handle = 0;
    let mut address = 0_u64;
    let allocate =
        |address: &mut u64| call!(cuda.library, cuMemAlloc_v2(address => *mut u64, 64 => usize));
    assert_eq!(allocate(&mut address), 0);
    assert_eq!(call!(cuda.library, cuCtxPopCurrent_v2(&mut context => *mut Handle)), 0);
    assert_eq!(allocate(&mut address), 201);
    assert_eq!(call!(cuda.library, cuEventCreate(&mut context => *mut Handle, 2 => u32)), 201);
    let mut again: Handle = 0;
    assert_eq!(
        call!(cuda.library, cuDevicePrimaryCtxRetain(&mut again => *mut Handle, 0 => i32)),
        0
    );
    assert_eq!(call!(cuda.library, cuCtxPushCurrent_v2(again => Handle)), 0);
    let mut third: Handle = 0;
    assert_eq!(
        call!(cuda.library, cuDevicePrimaryCtxRetain(&mut third => *mut Handle, 0 => i32)),
        0
    );
    assert_eq!(again, third, "a device must have one primary context");
    assert_eq!(call!(cuda.library, cuCtxPushCurrent_v2(0xbad => Handle)), 201);
    assert_eq!(cuda.free(address), 0);
}

#[test]
fn copies_and_fills_move_bytes() {
    let cuda = Cuda::new();
    let bytes: Vec<u8> = (0..=255).collect();
    let first = cuda.with(&bytes);
    let second = cuda.allocate(256);
    assert_eq!(
        call!(cuda.library, cuMemcpyDtoDAsync_v2(
        second + 16 => u64, first + 1 => u64, 100 => usize, cuda.stream => Handle)),
        0
    );
    assert_eq!(
        call!(cuda.library, cuMemsetD8Async(
        second => u64, 7 => u8, 16 => usize, cuda.stream => Handle)),
        0
    );
    let expected = [&[7; 16], &bytes[1..101], &[0; 140]].concat();
    assert_eq!(cuda.download(second, 256), expected);
    assert_eq!(cuda.free(first) + cuda.free(second), 0);
    assert_eq!(cuda.control.faults(), 0);
}

/// `CUDA_MEMCPY2D` as eight words per side, apart from the type of memory.
#[repr(C)]
struct Copy2D([[u64; 7]; 2], [usize; 2]);

#[test]
fn rows_are_copied_at_their_pitches() {
    let cuda = Cuda::new();
    let host: Vec<u8> = (0..64).collect();
    let device = cuda.allocate(64);
    // Four rows of five bytes, with a pitch of 16 on the host and of 8 on the device.
    let from = [0, 0, 1, host.as_ptr() as u64, 0, 0, 16];
    let copy = |pitch| Copy2D([from, [0, 0, 2, 0, device, 0, pitch]], [5, 4]);
    let run = |copy: Copy2D| call!(cuda.library, cuMemcpy2DAsync_v2(&copy => *const Copy2D, cuda.stream => Handle));
    assert_eq!(run(copy(8)), 0);
    let expected: Vec<u8> =
        (0..64).map(|at| if at < 32 && at % 8 < 5 { at / 8 * 16 + at % 8 } else { 0 }).collect();
    assert_eq!(cuda.download(device, 64), expected);
    assert_eq!(run(copy(4)), 1, "rows must not overlap");
    assert_eq!(run(copy(32)), 1, "rows must be within the memory");
    assert_eq!(cuda.free(device), 0);
}

#[test]
fn a_batch_is_many_copies_in_one_call() {
    let cuda = Cuda::new();
    let source: Vec<u8> = (0..64).collect();
    let device = cuda.with(&source);
    let mut target = vec![0_u8; 8];
    let to = [device + 32, target.as_mut_ptr() as u64];
    let from = [source.as_ptr() as u64, device + 4];
    let (sizes, attributes, places) = ([4_usize, 8], [[3_u32, 0, 0, 0, 0, 0]], [0_usize]);
    let run = |stream: Handle| {
        call!(cuda.library, cuMemcpyBatchAsync_v2(
            to.as_ptr() => *const u64, from.as_ptr() => *const u64, sizes.as_ptr() => *const usize, 2 => usize,
            attributes.as_ptr() => *const [u32; 6], places.as_ptr() => *const usize, 1 => usize, stream => Handle))
    };
    assert_eq!(run(cuda.stream), 0);
    assert_eq!(cuda.download(device + 32, 8), [0, 1, 2, 3, 36, 37, 38, 39]);
    assert_eq!(target, source[4..12]);
    assert_eq!(run(0), 1, "the default stream must reject batches");
    let mut failed = 0_usize;
    assert_eq!(
        call!(cuda.library, cuMemcpyBatchAsync(
        to.as_ptr() => *const u64, from.as_ptr() => *const u64, sizes.as_ptr() => *const usize, 2 => usize,
        attributes.as_ptr() => *const [u32; 6], places.as_ptr() => *const usize, 1 => usize,
        &mut failed => *mut usize, cuda.stream => Handle)),
        0
    );
    cuda.wait();
    assert_eq!(cuda.control.calls("cuMemcpyBatchAsync_v2"), 2);
    assert_eq!(cuda.free(device), 0);
}

#[test]
fn launches_do_what_the_reference_does() {
    let cuda = Cuda::new();
    let content: Vec<u8> = (0..200).collect();
    let region = cuda.with(&content);
    let grids = [
        DeviceGrid { base: 0, stride: 20, length: 12, at: 0 },
        DeviceGrid { base: 120, stride: 8, length: 8, at: 36 },
    ];
    let indices = [4_u32, 0, 2];
    let mut packed = vec![0; 60];
    reference::gather(&content, &grids, &indices, &mut packed).expect("within bounds");

    let on_device = grids.map(|grid| DeviceGrid { base: region + grid.base, ..grid });
    let table = cuda.with(&encode_grids(&on_device));
    let list = cuda.with(&indices.map(u32::to_ne_bytes).concat());
    let target = cuda.allocate(60);
    let gather = Launch::grids(true, target, table, &on_device, list, indices.len());
    assert_eq!(cuda.launch(cuda.function("kvx_gather"), &gather), 0);
    assert_eq!(cuda.download(target, 60), packed);

    let back = cuda.allocate(200);
    let moved = on_device.map(|grid| DeviceGrid { base: grid.base - region + back, ..grid });
    assert_eq!(cuda.upload(table, &encode_grids(&moved)), 0);
    let scatter = Launch::grids(false, target, table, &moved, list, indices.len());
    assert_eq!(cuda.launch(cuda.function("kvx_scatter"), &scatter), 0);
    let mut expected = vec![0; 200];
    reference::scatter(&mut expected, &grids, &indices, &packed).expect("within bounds");
    assert_eq!(cuda.download(back, 200), expected);

    let hops =
        [Hop { from: region + 3, to: back, len: 9 }, Hop { from: region, to: back + 150, len: 50 }];
    let hop_table = cuda.with(&encode_hops(&hops));
    assert_eq!(cuda.launch(cuda.function("kvx_hops"), &Launch::hops(hop_table, &hops)), 0);
    expected[..9].copy_from_slice(&content[3..12]);
    expected[150..].copy_from_slice(&content[..50]);
    assert_eq!(cuda.download(back, 200), expected);

    // Two heads of three tokens of two bytes: blocks 4 and 0 of the region are copied into the
    // first two of the other.
    let swap = Swap::heads_to_tokens(2, 3, 2);
    let to = LaunchBlocks { base: back, stride: 12, indices: 0 };
    let from = LaunchBlocks { base: region, stride: 12, indices: list };
    let permute = Launch::permute(to, from, 2, swap).expect("the block is small enough");
    assert_eq!(cuda.launch(cuda.function("kvx_permute"), &permute), 0);
    for (to, from) in [(0, 48), (12, 0)] {
        reference::permute_block(&content[from..from + 12], &mut expected[to..to + 12], swap)
            .expect("a block");
    }
    assert_eq!(cuda.download(back, 200), expected);
    for address in [region, table, list, target, back, hop_table] {
        assert_eq!(cuda.free(address), 0);
    }
    assert_eq!((cuda.control.faults(), cuda.control.allocated()), (0, 0));
}

#[test]
fn a_kernel_out_of_bounds_breaks_the_device() {
    let cuda = Cuda::new();
    let region = cuda.allocate(64);
    let hops = [Hop { from: region, to: region + 60, len: 8 }];
    let table = cuda.with(&encode_hops(&hops));
    assert_eq!(cuda.launch(cuda.function("kvx_hops"), &Launch::hops(table, &hops)), 0);
    assert_eq!(cuda.wait(), 700);
    assert_eq!(cuda.upload(region, &[0; 8]), 700, "all later calls must fail");
    assert_eq!(cuda.control.faults(), 1);
    cuda.control.command("well");
    assert_eq!(cuda.free(region) + cuda.free(table), 0);
}

#[test]
fn kernels_reach_pinned_memory_and_no_other_of_the_host() {
    let cuda = Cuda::new();
    let memory = cuda.with(b"kvx kvx ");
    let mut pinned = 0_u64;
    assert_eq!(
        call!(cuda.library, cuMemHostAlloc(&mut pinned => *mut u64, 64 => usize, 1 => u32)),
        0
    );
    let mut plain = [0_u8; 8];
    let table = cuda.allocate(24);
    let run = |to: u64| {
        let hops = [Hop { from: memory, to, len: 8 }];
        assert_eq!(cuda.upload(table, &encode_hops(&hops)), 0);
        assert_eq!(cuda.launch(cuda.function("kvx_hops"), &Launch::hops(table, &hops)), 0);
        cuda.wait()
    };
    assert_eq!(run(pinned + 3), 0);
    // SAFETY: the driver pinned 16 bytes here, and no work that writes to them is left.
    let seen = unsafe { std::slice::from_raw_parts(pinned as *const u8, 16) };
    assert_eq!(seen, b"\0\0\0kvx kvx \0\0\0\0\0");
    assert_eq!(run(plain.as_mut_ptr() as u64), 700);
    assert_eq!(plain, [0; 8]);
    cuda.control.command("well");
    assert_eq!(call!(cuda.library, cuMemFreeHost(pinned => u64)), 0);
    assert_eq!(cuda.free(memory) + cuda.free(table), 0);
}

#[test]
fn kernels_of_other_programs_are_not_recognised() {
    let cuda = Cuda::new();
    let mut module: Handle = 0;
    for text in ["\0", "something else\0"] {
        assert_eq!(
            call!(cuda.library, cuModuleLoadData(&mut module => *mut Handle, text.as_ptr() => *const u8)),
            200
        );
    }
    let text = ".version 8.0\n.target sm_70\n.visible .entry kvx_hops(\n\0";
    assert_eq!(
        call!(cuda.library, cuModuleLoadData(&mut module => *mut Handle, text.as_ptr() => *const u8)),
        0
    );
    let mut function: Handle = 0;
    let name = c"kvx_gather";
    assert_eq!(
        call!(cuda.library, cuModuleGetFunction(
        &mut function => *mut Handle, module => Handle, name.as_ptr() => *const std::ffi::c_char)),
        500
    );
    let hops = cuda.function("kvx_hops");
    let wrong = Launch { grid: [1, 1 << 20, 1], ..Launch::hops(0, &[]) };
    assert_eq!(cuda.launch(hops, &wrong), 1, "the grid is too large");
    assert_eq!(cuda.launch(0xbad, &Launch::hops(0, &[])), 400);
}

#[test]
fn calls_fail_as_a_test_requests() {
    let cuda = Cuda::new();
    let mut memory = Vec::new();
    let mut allocate = || {
        let mut address = 0_u64;
        let code = call!(cuda.library, cuMemAlloc_v2(&mut address => *mut u64, 64 => usize));
        memory.extend(Some(address).filter(|_| code == 0));
        code
    };
    cuda.control.command("fail cuMemAlloc_v2 2 2 1");
    let codes = [allocate(), allocate(), allocate(), allocate()];
    assert_eq!(codes, [0, 2, 2, 0]);
    cuda.control.command("fail cuMemAlloc_v2 999 always");
    assert_eq!(allocate(), 999);
    cuda.control.command("well");
    cuda.control.command("memory 100");
    assert_eq!(allocate(), 2, "only two blocks of 64 bytes fit");
    assert_eq!((cuda.control.calls("cuMemAlloc_v2"), cuda.control.allocated()), (6, 128));
    for address in memory {
        assert_eq!(cuda.free(address), 0);
    }
}

#[test]
fn errors_have_names() {
    let cuda = Cuda::new();
    let mut name: *const std::ffi::c_char = std::ptr::null();
    assert_eq!(
        call!(cuda.library, cuGetErrorName(700 => i32, &mut name => *mut *const std::ffi::c_char)),
        0
    );
    // SAFETY: the driver's names are constants.
    let name_text = unsafe { std::ffi::CStr::from_ptr(name) };
    assert_eq!(name_text, c"CUDA_ERROR_ILLEGAL_ADDRESS");
    assert_eq!(
        call!(cuda.library, cuGetErrorString(12345 => i32, &mut name => *mut *const std::ffi::c_char)),
        1
    );
    assert!(name.is_null());
}

#[test]
fn virtual_memory_has_addresses_files_and_access() {
    const LEN: usize = 2 << 20;
    let cuda = Cuda::new();
    // Pinned memory, shareable as a descriptor, on device 0.
    let properties: [u64; 4] = [1 | 1 << 32, 1, 0, 0];
    let mut granularity = 0_usize;
    assert_eq!(
        call!(cuda.library, cuMemGetAllocationGranularity(
        &mut granularity => *mut usize, properties.as_ptr() => *const u64, 0 => i32)),
        0
    );
    assert_eq!(granularity, LEN);
    let mut base = 0_u64;
    assert_eq!(
        call!(cuda.library, cuMemAddressReserve(
        &mut base => *mut u64, 2 * LEN => usize, 0 => usize, 0 => u64, 0 => u64)),
        0
    );
    let mut handles: [Handle; 2] = [0; 2];
    for (at, handle) in handles.iter_mut().enumerate() {
        assert_eq!(
            call!(cuda.library, cuMemCreate(
            &mut *handle => *mut Handle, LEN => usize, properties.as_ptr() => *const u64, 0 => u64)),
            0
        );
        let address = base + (at * LEN) as u64;
        assert_eq!(
            call!(cuda.library, cuMemMap(
            address => u64, LEN => usize, 0 => usize, *handle => Handle, 0 => u64)),
            0
        );
    }
    let across = base + LEN as u64 - 4;
    assert_eq!(cuda.upload(across, b"kvx kvx "), 1, "no access yet");
    let access: [u32; 3] = [1, 0, 3];
    assert_eq!(
        call!(cuda.library, cuMemSetAccess(
        base => u64, 2 * LEN => usize, access.as_ptr() => *const u32, 1 => usize)),
        0
    );
    assert_eq!(cuda.upload(across, b"kvx kvx "), 0);
    assert_eq!(cuda.download(across, 8), b"kvx kvx ");
    // An address belongs to the range of one piece.
    let (mut start, mut len) = (0_u64, 0_usize);
    assert_eq!(
        call!(cuda.library, cuMemGetAddressRange_v2(
        &mut start => *mut u64, &mut len => *mut usize, across + 4 => u64)),
        0
    );
    assert_eq!((start, len), (base + LEN as u64, LEN));

    // A descriptor maps the same memory elsewhere.
    let mut descriptor = -1;
    assert_eq!(
        call!(cuda.library, cuMemExportToShareableHandle(
        &mut descriptor => *mut i32, handles[1] => Handle, 1 => i32, 0 => u64)),
        0
    );
    let mut imported: Handle = 0;
    assert_eq!(
        call!(cuda.library, cuMemImportFromShareableHandle(
        &mut imported => *mut Handle, descriptor as usize => usize, 1 => i32)),
        0
    );
    let mut elsewhere = 0_u64;
    assert_eq!(
        call!(cuda.library, cuMemAddressReserve(
        &mut elsewhere => *mut u64, LEN => usize, 0 => usize, 0 => u64, 0 => u64)),
        0
    );
    assert_eq!(
        call!(cuda.library, cuMemMap(
        elsewhere => u64, LEN => usize, 0 => usize, imported => Handle, 0 => u64)),
        0
    );
    assert_eq!(
        call!(cuda.library, cuMemSetAccess(
        elsewhere => u64, LEN => usize, access.as_ptr() => *const u32, 1 => usize)),
        0
    );
    assert_eq!(cuda.download(elsewhere, 4), b"kvx ");

    assert_eq!(
        call!(cuda.library, cuMemAddressFree(base => u64, 2 * LEN => usize)),
        1,
        "still mapped"
    );
    assert_eq!(call!(cuda.library, cuMemUnmap(base => u64, 2 * LEN => usize)), 0);
    assert_eq!(call!(cuda.library, cuMemUnmap(elsewhere => u64, LEN => usize)), 0);
    assert_eq!(cuda.upload(across, b"kvx kvx "), 1, "unmapped");
    assert_eq!(call!(cuda.library, cuMemAddressFree(base => u64, 2 * LEN => usize)), 0);
    assert_eq!(call!(cuda.library, cuMemAddressFree(elsewhere => u64, LEN => usize)), 0);
    for handle in handles.into_iter().chain([imported]) {
        assert_eq!(call!(cuda.library, cuMemRelease(handle => Handle)), 0);
        assert_eq!(call!(cuda.library, cuMemRelease(handle => Handle)), 400);
    }
    // SAFETY: the driver returned the descriptor to this caller, who owns it.
    drop(unsafe { <std::os::fd::OwnedFd as std::os::fd::FromRawFd>::from_raw_fd(descriptor) });
}

#[test]
fn another_thread_has_no_context() {
    let cuda = Cuda::new();
    let code = std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            let mut address = 0_u64;
            call!(cuda.library, cuMemAlloc_v2(&mut address => *mut u64, 64 => usize))
        });
        thread.join().expect("the thread does not panic")
    });
    assert_eq!(code, 201);
    wait_for("the stream", || call!(cuda.library, cuStreamQuery(cuda.stream => Handle)) == 0);
}
