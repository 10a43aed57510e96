//! Tests the exports of `libamdhip64` and of hipRTC.

use kvx_core::backend::Hop;
use kvx_gpu::kernels::{Launch, SOURCE, THREADS, encode_hops};
use kvx_stand_in::Control;
use kvx_testkit::test;

use crate::symbols::{Opened, call};

type Handle = usize;

struct Hip {
    library: Opened,
    stream: Handle,
    control: Control,
}

impl Hip {
    fn new() -> Self {
        let control = Control::open();
        let library = Opened::by_path();
        let mut stream: Handle = 0;
        assert_eq!(call!(library, hipSetDevice(0 => i32)), 0);
        assert_eq!(
            call!(library, hipStreamCreateWithFlags(&mut stream => *mut Handle, 1 => u32)),
            0
        );
        Hip { library, stream, control }
    }

    fn allocate(&self, len: usize) -> u64 {
        let mut address = 0;
        assert_eq!(call!(self.library, hipMalloc(&mut address => *mut u64, len => usize)), 0);
        address
    }

    fn free(&self, address: u64) -> i32 {
        call!(self.library, hipFree(address => u64))
    }

    fn copy(&self, to: u64, from: u64, len: usize, kind: i32) -> i32 {
        let code = call!(self.library, hipMemcpyAsync(
            to => u64, from => u64, len => usize, kind => i32, self.stream => Handle));
        assert_eq!(call!(self.library, hipStreamSynchronize(self.stream => Handle)), 0);
        code
    }
}

impl Drop for Hip {
    fn drop(&mut self) {
        call!(self.library, hipStreamDestroy(self.stream => Handle));
    }
}

#[test]
fn copies_check_their_direction() {
    let hip = Hip::new();
    let memory = hip.allocate(64);
    let (mut bytes, mut back) = (*b"kvx kvx ", [0_u8; 8]);
    let [host, there] = [bytes.as_mut_ptr() as u64, back.as_mut_ptr() as u64];
    assert_eq!(hip.copy(memory, host, 8, 1), 0);
    assert_eq!(hip.copy(memory + 8, memory, 8, 3), 0);
    assert_eq!(hip.copy(there, memory + 8, 8, 2), 0);
    assert_eq!(&back, b"kvx kvx ");
    assert_eq!(hip.copy(memory, host, 8, 2), 1);
    assert_eq!(hip.copy(memory + 60, memory, 8, 3), 1);
    // Two rows of three bytes, 32 apart on the device.
    assert_eq!(
        call!(hip.library, hipMemcpy2DAsync(
        memory => u64, 32 => usize, host => u64, 4 => usize, 3 => usize, 2 => usize, 1 => i32,
        hip.stream => Handle)),
        0
    );
    assert_eq!(
        call!(hip.library, hipMemsetAsync(memory + 1 => u64, 0 => i32, 1 => usize, hip.stream => Handle)),
        0
    );
    assert_eq!(hip.copy(there, memory + 32, 8, 4), 0);
    assert_eq!(&back, b"kvx\0\0\0\0\0");
    assert_eq!(hip.copy(there, memory, 4, 2), 0);
    assert_eq!(&back[..4], b"k\0x ");
    assert_eq!((hip.free(memory), hip.free(memory), hip.free(0)), (0, 1, 0));
}

/// `hipPointerAttribute_t`.
#[derive(Debug, Default, PartialEq)]
#[repr(C)]
struct Attributes {
    kind: i32,
    ordinal: i32,
    device: u64,
    host: u64,
    managed: i32,
    flags: u32,
}

#[test]
fn memory_types_have_the_numbers_of_the_version() {
    let hip = Hip::new();
    let memory = hip.allocate(64);
    let (mut pinned, mut pool) = (0_u64, 0_usize);
    assert_eq!(
        call!(hip.library, hipHostMalloc(&mut pinned => *mut u64, 64 => usize, 1 => u32)),
        0
    );
    let plain = 0_u64;
    let kind = |address: u64| {
        let mut found = Attributes { kind: 99, ..Attributes::default() };
        let code = call!(hip.library, hipPointerGetAttributes(&mut found => *mut Attributes, address => u64));
        if code == 0 { Ok((found.kind, found.device, found.host)) } else { Err(code) }
    };
    let plain = (&raw const plain) as u64;
    for (version, device, host, unknown) in [
        ("50221153", 1, 0, Err(1)),
        ("60100000", 2, 1, Ok((0, 0, 0))),
        ("70051831", 2, 1, Ok((0, 0, 0))),
    ] {
        hip.control.command(&format!("hip-version {version}"));
        let mut found = 0;
        assert_eq!(call!(hip.library, hipRuntimeGetVersion(&mut found => *mut i32)), 0);
        assert_eq!(found.to_string(), version);
        assert_eq!(kind(memory + 5), Ok((device, memory + 5, 0)));
        assert_eq!(kind(pinned), Ok((host, pinned, pinned)));
        assert_eq!(kind(plain), unknown);
        let mut descriptor = -1;
        let exported = call!(hip.library, hipMemGetHandleForAddressRange(
            &mut descriptor => *mut i32, memory => u64, 4096 => usize, 1 => i32, 0 => u64));
        assert_eq!(exported, if version.starts_with('7') { 0 } else { 801 });
    }
    assert_eq!(
        call!(hip.library, hipPointerGetAttribute(&mut pool => *mut usize, 17 => i32, memory => u64)),
        0
    );
    assert_eq!(pool, 0);
    let mut pooled = 0_u64;
    assert_eq!(
        call!(hip.library, hipMallocAsync(&mut pooled => *mut u64, 64 => usize, hip.stream => Handle)),
        0
    );
    assert_eq!(
        call!(hip.library, hipPointerGetAttribute(&mut pool => *mut usize, 17 => i32, pooled => u64)),
        0
    );
    assert_ne!(pool, 0);
    assert_eq!(call!(hip.library, hipFreeAsync(pooled => u64, hip.stream => Handle)), 0);
    assert_eq!(call!(hip.library, hipStreamSynchronize(hip.stream => Handle)), 0);
    assert_eq!(call!(hip.library, hipHostFree(pinned => u64)), 0);
    assert_eq!(hip.free(memory), 0);
    assert_eq!(hip.control.allocated(), 0);
}

#[test]
fn the_hsa_runtime_exports_descriptors_of_whole_allocations() {
    let hip = Hip::new();
    let memory = hip.allocate(8192);
    let (mut descriptor, mut offset) = (-1, 0_u64);
    assert_eq!(
        call!(hip.library, hsa_amd_portable_export_dmabuf(
        memory + 100 => u64, 50 => usize, &mut descriptor => *mut i32, &mut offset => *mut u64)),
        0
    );
    assert_eq!(offset, 100);
    // SAFETY: the driver returned the descriptor to this caller, who owns it.
    let file = unsafe { <std::fs::File as std::os::fd::FromRawFd>::from_raw_fd(descriptor) };
    assert_eq!(file.metadata().expect("a file").len(), 8192);
    assert_eq!(
        call!(hip.library, hsa_amd_portable_export_dmabuf(
        memory + 8190 => u64, 50 => usize, &mut descriptor => *mut i32, &mut offset => *mut u64)),
        0x1001
    );
    assert_eq!(hip.free(memory), 0);
}

#[test]
fn each_thread_has_its_own_current_device() {
    let hip = Hip::new();
    let ordinal = || {
        let mut ordinal = -1;
        assert_eq!(call!(hip.library, hipGetDevice(&mut ordinal => *mut i32)), 0);
        ordinal
    };
    assert_eq!(call!(hip.library, hipSetDevice(1 => i32)), 0);
    assert_eq!(call!(hip.library, hipSetDevice(2 => i32)), 101);
    assert_eq!(ordinal(), 1);
    let elsewhere =
        std::thread::scope(|scope| scope.spawn(ordinal).join().expect("the thread does not panic"));
    assert_eq!(elsewhere, 0);
    let memory = hip.allocate(64);
    let mut found = Attributes::default();
    assert_eq!(
        call!(hip.library, hipPointerGetAttributes(&mut found => *mut Attributes, memory => u64)),
        0
    );
    assert_eq!(found.ordinal, 1);
    let mut can = 0;
    assert_eq!(
        call!(hip.library, hipDeviceCanAccessPeer(&mut can => *mut i32, 0 => i32, 1 => i32)),
        0
    );
    assert_eq!(can, 1);
    hip.control.command("no-peers");
    assert_eq!(
        call!(hip.library, hipDeviceCanAccessPeer(&mut can => *mut i32, 0 => i32, 1 => i32)),
        0
    );
    assert_eq!(can, 0);
    assert_eq!(hip.free(memory), 0);
    assert_eq!(call!(hip.library, hipSetDevice(0 => i32)), 0);
}

/// Returns the compiler's code for a source, or its error code and log.
fn compiled(hip: &Hip, source: &str) -> Result<Vec<u8>, (i32, String)> {
    let source = format!("{source}\0");
    let (mut program, option): (Handle, _) = (0, c"-O3");
    let null: *const usize = std::ptr::null();
    assert_eq!(
        call!(hip.library, hiprtcCreateProgram(
        &mut program => *mut Handle, source.as_ptr() => *const u8, c"kernels.cu".as_ptr() => *const std::ffi::c_char,
        0 => i32, null => *const usize, null => *const usize)),
        0
    );
    let options = [option.as_ptr()];
    let code = call!(hip.library, hiprtcCompileProgram(
        program => Handle, 1 => i32, options.as_ptr() => *const *const std::ffi::c_char));
    let mut len = 0_usize;
    assert_eq!(
        call!(hip.library, hiprtcGetProgramLogSize(program => Handle, &mut len => *mut usize)),
        0
    );
    let mut log = vec![0_u8; len];
    assert_eq!(
        call!(hip.library, hiprtcGetProgramLog(program => Handle, log.as_mut_ptr() => *mut u8)),
        0
    );
    assert_eq!(call!(hip.library, hiprtcGetCodeSize(program => Handle, &mut len => *mut usize)), 0);
    let mut bytes = vec![0_u8; len];
    assert_eq!(
        call!(hip.library, hiprtcGetCode(program => Handle, bytes.as_mut_ptr() => *mut u8)),
        0
    );
    assert_eq!(call!(hip.library, hiprtcDestroyProgram(&mut program => *mut Handle)), 0);
    assert_eq!(program, 0);
    let log = String::from_utf8_lossy(&log).trim_end_matches('\0').to_owned();
    if code == 0 { Ok(bytes) } else { Err((code, log)) }
}

#[test]
fn the_kernels_are_compiled_loaded_and_launched() {
    let hip = Hip::new();
    let code = compiled(&hip, SOURCE).expect("the kernels");
    assert_eq!(compiled(&hip, "int x;"), Err((6, "no kernel in this source".to_owned())));
    hip.control.fail("hiprtcCompileProgram", 6, 1);
    assert_eq!(compiled(&hip, SOURCE).expect_err("the test has requested a failure").0, 6);
    let [mut module, mut function]: [Handle; 2] = [0; 2];
    let ptx = format!("{}\0", kvx_gpu::kernels::PTX);
    assert_eq!(
        call!(hip.library, hipModuleLoadData(&mut module => *mut Handle, ptx.as_ptr() => *const u8)),
        200
    );
    assert_eq!(
        call!(hip.library, hipModuleLoadData(&mut module => *mut Handle, code.as_ptr() => *const u8)),
        0
    );
    assert_eq!(
        call!(hip.library, hipModuleGetFunction(
        &mut function => *mut Handle, module => Handle, c"kvx_hops".as_ptr() => *const std::ffi::c_char)),
        0
    );

    let memory = hip.allocate(128);
    let hops = [
        Hop { from: memory, to: memory + 64, len: 5 },
        Hop { from: memory + 1, to: memory + 80, len: 3 },
    ];
    let mut content = [b"kvx k".as_slice(), &[0; 59], &[0; 64]].concat();
    assert_eq!(hip.copy(memory, content.as_ptr() as u64, 128, 1), 0);
    let encoded = encode_hops(&hops);
    let table = hip.allocate(encoded.len());
    assert_eq!(hip.copy(table, encoded.as_ptr() as u64, encoded.len(), 1), 0);
    let launch = Launch::hops(table, &hops);
    let parameters: Vec<*const u64> =
        launch.parameters.iter().map(|value| &raw const *value).collect();
    let run = |threads: u32| {
        call!(hip.library, hipModuleLaunchKernel(
            function => Handle, launch.grid[0] => u32, 1 => u32, 1 => u32, threads => u32, 1 => u32, 1 => u32,
            0 => u32, hip.stream => Handle, parameters.as_ptr() => *const *const u64,
            std::ptr::null() => *const usize))
    };
    assert_eq!(run(THREADS / 2), 1, "the kernels require another number of threads");
    assert_eq!(run(THREADS), 0);
    let mut back = vec![0_u8; 128];
    assert_eq!(hip.copy(back.as_mut_ptr() as u64, memory, 128, 2), 0);
    content[64..69].copy_from_slice(b"kvx k");
    content[80..83].copy_from_slice(b"vx ");
    assert_eq!(back, content);
    assert_eq!(hip.free(memory) + hip.free(table), 0);
    assert_eq!(hip.control.faults(), 0);
}

#[test]
fn errors_have_names() {
    let library = Opened::by_path();
    // SAFETY: the function accepts any number and returns a constant C string.
    let name = unsafe {
        let name: unsafe extern "C" fn(i32) -> *const std::ffi::c_char =
            library.function("hipGetErrorName");
        std::ffi::CStr::from_ptr(name(700))
    };
    assert_eq!(name, c"hipErrorIllegalAddress");
}
