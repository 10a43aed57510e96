//! NVRTC and hipRTC, opened at run time: two compilers whose interfaces differ only in the prefix of their names.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::Path;

use libloading::Library;

use crate::Result;

/// An opened compiler. It is never closed, because both leave threads and handlers behind.
pub(crate) struct Compiler {
    library: std::mem::ManuallyDrop<Library>,
    prefix: &'static str,
}

/// A program that a compiler holds.
type CompilerProgram = *mut c_void;

type Create = unsafe extern "C" fn(
    *mut CompilerProgram,
    *const c_char,
    *const c_char,
    c_int,
    *const *const c_char,
    *const *const c_char,
) -> c_int;
type Compile = unsafe extern "C" fn(CompilerProgram, c_int, *const *const c_char) -> c_int;
type Size = unsafe extern "C" fn(CompilerProgram, *mut usize) -> c_int;
type Fill = unsafe extern "C" fn(CompilerProgram, *mut c_char) -> c_int;
type Destroy = unsafe extern "C" fn(*mut CompilerProgram) -> c_int;
type Describe = unsafe extern "C" fn(c_int) -> *const c_char;

impl Compiler {
    /// Opens a library whose functions begin with `prefix`.
    pub(crate) fn open(library: &Path, prefix: &'static str) -> Result<Self> {
        // SAFETY: the caller names a compiler's library, whose initialisers have no preconditions.
        let library = std::mem::ManuallyDrop::new(unsafe { Library::new(library)? });
        Ok(Compiler { library, prefix })
    }

    /// Compiles `source` and returns the result that the library calls `kind`: `PTX` or `Code`.
    pub(crate) fn compile(&self, source: &str, name: &str, options: &[&str], kind: &str) -> Result<Vec<u8>> {
        let (source, name) = (CString::new(source)?, CString::new(name)?);
        let options: Vec<CString> =
            options.iter().map(|text| CString::new(*text)).collect::<std::result::Result<_, _>>()?;
        let options: Vec<*const c_char> = options.iter().map(|text| text.as_ptr()).collect();
        let (mut program, none) = (std::ptr::null_mut(), std::ptr::null());
        // SAFETY: the signatures are those of both libraries' documentation; all strings outlive the calls, no headers
        // are given, and the program is not used after it is destroyed.
        unsafe {
            let create: Create = self.function("CreateProgram")?;
            self.check(create(&mut program, source.as_ptr(), name.as_ptr(), 0, none, none), "")?;
            let compile: Compile = self.function("CompileProgram")?;
            let compiled = compile(program, options.len() as c_int, options.as_ptr());
            let log = self.fetch(program, "ProgramLog")?;
            self.check(compiled, &String::from_utf8_lossy(&log))?;
            let code = self.fetch(program, kind)?;
            let destroy: Destroy = self.function("DestroyProgram")?;
            self.check(destroy(&mut program), "")?;
            Ok(code)
        }
    }

    /// Returns what the library calls `what` of a program.
    ///
    /// # Safety
    /// The program is one of this library's.
    unsafe fn fetch(&self, program: CompilerProgram, what: &str) -> Result<Vec<u8>> {
        let mut len = 0;
        // SAFETY: the caller passes this library's program; the second function writes as many bytes as the first said.
        unsafe {
            let size: Size = self.function(&format!("Get{what}Size"))?;
            self.check(size(program, &mut len), "")?;
            let mut bytes = vec![0; len];
            let fill: Fill = self.function(&format!("Get{what}"))?;
            self.check(fill(program, bytes.as_mut_ptr().cast()), "")?;
            Ok(bytes)
        }
    }

    fn check(&self, result: c_int, log: &str) -> Result<()> {
        if result == 0 {
            return Ok(());
        }
        // SAFETY: it takes any number and returns a constant C string.
        let text = unsafe {
            let describe: Describe = self.function("GetErrorString")?;
            CStr::from_ptr(describe(result)).to_string_lossy()
        };
        Err(format!("{}: {text}\n{}", self.prefix, log.trim_end_matches('\0')).into())
    }

    /// # Safety
    /// `F` is the type of a pointer to the function of this name.
    unsafe fn function<F: Copy>(&self, name: &str) -> Result<F> {
        // SAFETY: the caller promises the type, and the library stays open.
        Ok(*unsafe { self.library.get::<F>(format!("{}{name}", self.prefix).as_bytes())? })
    }
}
