//! Run-time compilers of kernels: NVRTC and hipRTC, which differ in the names of their functions only.

use std::ffi::{CStr, CString, c_char, c_int, c_void};

use kvx_core::{Error, ErrorKind, Result};

type Program = *mut c_void;
type Names = *const *const c_char;

/// The functions of a run-time compiler.
#[derive(Clone, Copy)]
#[allow(missing_docs)]
pub struct Compiler {
    pub name: &'static str,
    pub create: unsafe extern "C" fn(
        *mut Program,
        *const c_char,
        *const c_char,
        c_int,
        Names,
        Names,
    ) -> c_int,
    pub compile: unsafe extern "C" fn(Program, c_int, Names) -> c_int,
    pub log_size: unsafe extern "C" fn(Program, *mut usize) -> c_int,
    pub log: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
    pub code_size: unsafe extern "C" fn(Program, *mut usize) -> c_int,
    pub code: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
    pub destroy: unsafe extern "C" fn(*mut Program) -> c_int,
}

/// More than any kernel of kvx, or what is said of it, has.
const LONGEST: usize = 64 << 20;

impl Compiler {
    /// Compiles `source` to code for a device. Errors: `Native`, with what the compiler says.
    ///
    /// # Safety
    /// The functions are those of one compiler.
    pub unsafe fn compile(&self, source: &str, options: &[&CStr]) -> Result<Vec<u8>> {
        let source = CString::new(source).map_err(|error| {
            Error::new(ErrorKind::Invalid, "source with a NUL in it").with_source(error)
        })?;
        let mut program: Program = std::ptr::null_mut();
        let none = std::ptr::null();
        let options: Vec<_> = options.iter().map(|option| option.as_ptr()).collect();
        // SAFETY: as the compiler's header declares: strings that end in NUL, no headers, and a place for the program.
        let created = unsafe {
            (self.create)(&raw mut program, source.as_ptr(), c"kvx".as_ptr(), 0, none, none)
        };
        self.check(created, "create a program", "")?;
        let code = self.compiled(program, &options);
        // SAFETY: the program was created above, and nobody uses it any more.
        unsafe { (self.destroy)(&raw mut program) };
        code
    }

    fn compiled(&self, program: Program, options: &[*const c_char]) -> Result<Vec<u8>> {
        // SAFETY: the program lives; the options end in NUL and outlive the call.
        let status = unsafe { (self.compile)(program, options.len() as c_int, options.as_ptr()) };
        if status != 0 {
            let log = self.bytes(program, self.log_size, self.log).unwrap_or_default();
            let log = CStr::from_bytes_until_nul(&log).unwrap_or_default().to_string_lossy();
            self.check(status, "compile kvx's kernels", &log)?;
        }
        self.bytes(program, self.code_size, self.code)
    }

    fn bytes(
        &self,
        program: Program,
        size: unsafe extern "C" fn(Program, *mut usize) -> c_int,
        fill: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
    ) -> Result<Vec<u8>> {
        let mut len = 0;
        // SAFETY: the program lives, and there is a place for one number.
        self.check(unsafe { size(program, &raw mut len) }, "tell a size", "")?;
        let mut bytes = vec![0u8; len.min(LONGEST)];
        if len <= LONGEST {
            // SAFETY: as many bytes as the compiler said that it writes.
            self.check(unsafe { fill(program, bytes.as_mut_ptr().cast()) }, "give its result", "")?;
        }
        Ok(bytes)
    }

    fn check(&self, status: c_int, what: &str, log: &str) -> Result<()> {
        if status == 0 {
            return Ok(());
        }
        let name = self.name;
        Err(Error::new(
            ErrorKind::Native,
            format!("{name} did not {what}: see the log, and report this as a bug"),
        )
        .with_native(status.into(), log))
    }
}
