//! hipRTC: compiles sources with entries of kvx's kernels into a text that lists these entries.

use std::ffi::{c_char, c_int, c_void};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::argument::{In, Out, Text, answer};
use crate::code::{Answer, Code};
use crate::handles::{Handle, Handles};
use crate::launch::COMPILED;

/// Error codes of hipRTC.
const INVALID_INPUT: Code = Code(3);
const INVALID_PROGRAM: Code = Code(4);
const COMPILATION: Code = Code(6);

struct Program {
    source: String,
    result: Mutex<Result>,
}

/// The results of a program so far; both end with a zero byte.
#[derive(Default)]
struct Result {
    log: Vec<u8>,
    code: Vec<u8>,
}

static PROGRAMS: Handles<Program> = Handles::new();

fn program(handle: Handle) -> Answer<Arc<Program>> {
    PROGRAMS.get(handle).map_err(|_| INVALID_PROGRAM)
}

impl Program {
    fn result(&self) -> MutexGuard<'_, Result> {
        self.result.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[unsafe(no_mangle)]
extern "C" fn hiprtcCreateProgram(
    created: Out<Handle>,
    source: Text,
    _name: Text,
    headers: c_int,
    _header_sources: In<*const c_void>,
    _header_names: In<*const c_void>,
) -> c_int {
    answer("hiprtcCreateProgram", || {
        if headers != 0 {
            return Err(INVALID_INPUT);
        }
        let program = Program { source: source.get()?, result: Mutex::default() };
        created.set(PROGRAMS.add(Arc::new(program)))
    })
}

#[unsafe(no_mangle)]
extern "C" fn hiprtcCompileProgram(handle: Handle, count: c_int, options: In<Text>) -> c_int {
    answer("hiprtcCompileProgram", || {
        let program = program(handle)?;
        if count > 0 && options.is_null() {
            return Err(INVALID_INPUT);
        }
        let mut result = program.result();
        if !program.source.contains("__global__") {
            result.log = b"no kernel in this source\0".to_vec();
            return Err(COMPILATION);
        }
        result.log = b"\0".to_vec();
        result.code = format!("{COMPILED}{}\0", program.source).into_bytes();
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn hiprtcDestroyProgram(handle: Out<Handle>) -> c_int {
    answer("hiprtcDestroyProgram", || {
        PROGRAMS.remove(handle.taken(0)?).map_err(|_| INVALID_PROGRAM)?;
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn hiprtcGetProgramLogSize(handle: Handle, len: Out<usize>) -> c_int {
    answer("hiprtcGetProgramLogSize", || len.set(program(handle)?.result().log.len()))
}

#[unsafe(no_mangle)]
extern "C" fn hiprtcGetProgramLog(handle: Handle, log: Out<u8>) -> c_int {
    answer("hiprtcGetProgramLog", || log.bytes(&program(handle)?.result().log))
}

#[unsafe(no_mangle)]
extern "C" fn hiprtcGetCodeSize(handle: Handle, len: Out<usize>) -> c_int {
    answer("hiprtcGetCodeSize", || len.set(program(handle)?.result().code.len()))
}

#[unsafe(no_mangle)]
extern "C" fn hiprtcGetCode(handle: Handle, code: Out<u8>) -> c_int {
    answer("hiprtcGetCode", || code.bytes(&program(handle)?.result().code))
}

#[unsafe(no_mangle)]
extern "C" fn hiprtcGetErrorString(error: c_int) -> *const c_char {
    let text = match Code(error) {
        Code(0) => c"HIPRTC_SUCCESS",
        INVALID_INPUT => c"HIPRTC_ERROR_INVALID_INPUT",
        INVALID_PROGRAM => c"HIPRTC_ERROR_INVALID_PROGRAM",
        COMPILATION => c"HIPRTC_ERROR_COMPILATION",
        _ => c"HIPRTC_ERROR_INTERNAL_ERROR",
    };
    text.as_ptr()
}
