//! Run-time compilers of kernels: NVRTC and hipRTC.

use std::ffi::{CStr, CString, c_char, c_int};

use kvx_core::{Error, ErrorKind, Result};

use super::functions::{CallResult, CompilerFunctions, Failure, Program};

/// The maximum length of code or a log: more than any kernel of kvx has.
const LONGEST: usize = 64 << 20;

/// Compiles `source` for a device. Errors: `Native`, with the log of the compiler `name`.
pub(crate) fn compile(
    compiler: &CompilerFunctions,
    name: &str,
    source: &str,
    options: &[CString],
) -> Result<Vec<u8>> {
    let source = CString::new(source).map_err(|error| {
        ErrorKind::Invalid.because("the source contains a NUL").with_source(error)
    })?;
    let mut program: Program = std::ptr::null_mut();
    let (none, none_named) = (std::ptr::null(), std::ptr::null());
    // SAFETY: C strings, no headers, and a location for the program, as the compiler's header
    // declares.
    let created = unsafe {
        let (program, title) = (&raw mut program, c"kvx".as_ptr());
        compiler.create(program, source.as_ptr(), title, 0, none, none_named)
    };
    created.map_err(|failure| error(name, failure, ""))?;
    let code = compile_program(compiler, name, program, options);
    // SAFETY: the program was created above, and nobody uses it afterwards.
    unsafe { compiler.destroy(&raw mut program) }.ok(); // a failure only leaks it
    code
}

fn compile_program(
    compiler: &CompilerFunctions,
    name: &str,
    program: Program,
    options: &[CString],
) -> Result<Vec<u8>> {
    let options: Vec<_> = options.iter().map(|option| option.as_ptr()).collect();
    // SAFETY: the program is alive; the options end in NUL and outlive the call.
    let compiled = unsafe { compiler.compile(program, options.len() as c_int, options.as_ptr()) };
    if let Err(failure) = compiled {
        // SAFETY: `read` passes locations for a length and for that many bytes.
        let log = read(
            |len| unsafe { compiler.log_size(program, len) },
            |text| unsafe { compiler.log(program, text) },
        );
        let log = log.unwrap_or_default();
        let log = CStr::from_bytes_until_nul(&log).unwrap_or_default().to_string_lossy();
        return Err(error(name, failure, &log));
    }
    // SAFETY: `read` passes locations for a length and for that many bytes.
    let code = read(
        |len| unsafe { compiler.code_size(program, len) },
        |code| unsafe { compiler.code(program, code) },
    );
    code.map_err(|failure| error(name, failure, ""))
}

/// Reads bytes from a compiler: `size` stores their length, and `fill` then writes them.
fn read(
    size: impl FnOnce(*mut usize) -> CallResult,
    fill: impl FnOnce(*mut c_char) -> CallResult,
) -> CallResult<Vec<u8>> {
    let mut len = 0;
    size(&raw mut len)?;
    let mut bytes = vec![0u8; len.min(LONGEST)];
    if len <= LONGEST {
        fill(bytes.as_mut_ptr().cast())?;
    }
    Ok(bytes)
}

fn error(name: &str, failure: Failure, log: &str) -> Error {
    let (function, status) = match failure {
        Failure::Status(function, status) => (function.to_str().unwrap_or_default(), status),
        Failure::Other(error) => return error,
        Failure::Missing(what) => return ErrorKind::Unsupported.because(what),
    };
    let sentence =
        format!("{name} did not compile kvx's kernels: see the log, and report this as a bug");
    ErrorKind::Native.because(sentence).with_operation(function).with_native(status.into(), log)
}
