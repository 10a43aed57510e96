//! Error codes: those used here have the same numbers in CUDA and HIP.

use std::ffi::CStr;

/// A driver's error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Code(pub(crate) i32);

pub(crate) type Answer<T = ()> = Result<T, Code>;

impl Code {
    pub(crate) const INVALID_VALUE: Code = Code(1);
    pub(crate) const OUT_OF_MEMORY: Code = Code(2);
    pub(crate) const NOT_INITIALIZED: Code = Code(3);
    pub(crate) const NO_DEVICE: Code = Code(100);
    pub(crate) const INVALID_DEVICE: Code = Code(101);
    pub(crate) const INVALID_IMAGE: Code = Code(200);
    pub(crate) const INVALID_CONTEXT: Code = Code(201);
    pub(crate) const ALREADY_MAPPED: Code = Code(208);
    pub(crate) const INVALID_HANDLE: Code = Code(400);
    pub(crate) const NOT_FOUND: Code = Code(500);
    pub(crate) const NOT_READY: Code = Code(600);
    pub(crate) const ILLEGAL_ADDRESS: Code = Code(700);
    pub(crate) const NOT_SUPPORTED: Code = Code(801);
    pub(crate) const UNKNOWN: Code = Code(999);

    /// Returns its names in CUDA and in HIP, and a text.
    fn row(self) -> Option<&'static (i32, &'static CStr, &'static CStr, &'static CStr)> {
        ROWS.iter().find(|row| row.0 == self.0)
    }

    pub(crate) fn cuda_name(self) -> Option<&'static CStr> {
        self.row().map(|row| row.1)
    }

    pub(crate) fn hip_name(self) -> &'static CStr {
        self.row().map_or(c"hipErrorUnknown", |row| row.2)
    }

    pub(crate) fn text(self) -> Option<&'static CStr> {
        self.row().map(|row| row.3)
    }
}

const ROWS: &[(i32, &CStr, &CStr, &CStr)] = &[
    (0, c"CUDA_SUCCESS", c"hipSuccess", c"no error"),
    (1, c"CUDA_ERROR_INVALID_VALUE", c"hipErrorInvalidValue", c"invalid argument"),
    (2, c"CUDA_ERROR_OUT_OF_MEMORY", c"hipErrorOutOfMemory", c"out of memory"),
    (3, c"CUDA_ERROR_NOT_INITIALIZED", c"hipErrorNotInitialized", c"not initialised"),
    (100, c"CUDA_ERROR_NO_DEVICE", c"hipErrorNoDevice", c"no device"),
    (101, c"CUDA_ERROR_INVALID_DEVICE", c"hipErrorInvalidDevice", c"no such device"),
    (200, c"CUDA_ERROR_INVALID_IMAGE", c"hipErrorInvalidImage", c"not a kernel image"),
    (201, c"CUDA_ERROR_INVALID_CONTEXT", c"hipErrorInvalidContext", c"no current context"),
    (208, c"CUDA_ERROR_ALREADY_MAPPED", c"hipErrorAlreadyMapped", c"already mapped"),
    (209, c"CUDA_ERROR_NO_BINARY_FOR_GPU", c"hipErrorNoBinaryForGpu", c"no code for this device"),
    (222, c"CUDA_ERROR_UNSUPPORTED_PTX_VERSION", c"hipErrorUnknown", c"PTX of a newer version"),
    (400, c"CUDA_ERROR_INVALID_HANDLE", c"hipErrorInvalidHandle", c"no such handle"),
    (500, c"CUDA_ERROR_NOT_FOUND", c"hipErrorNotFound", c"no such symbol"),
    (600, c"CUDA_ERROR_NOT_READY", c"hipErrorNotReady", c"not ready"),
    (700, c"CUDA_ERROR_ILLEGAL_ADDRESS", c"hipErrorIllegalAddress", c"an illegal memory access"),
    (719, c"CUDA_ERROR_LAUNCH_FAILED", c"hipErrorLaunchFailure", c"a kernel failed"),
    (801, c"CUDA_ERROR_NOT_SUPPORTED", c"hipErrorNotSupported", c"not supported"),
    (
        803,
        c"CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
        c"hipErrorUnknown",
        c"library and driver do not match",
    ),
    (999, c"CUDA_ERROR_UNKNOWN", c"hipErrorUnknown", c"unknown error"),
];
