//! NVRTC and hipRTC, opened where they lie: two compilers with one interface, but for the first letters of its names.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::Path;

use crate::Result;

/// An opened compiler. It is never closed: both leave threads and handlers behind.
pub(crate) struct Compiler {
    library: *mut c_void,
    prefix: &'static str,
}

/// A program of the compiler's.
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
        let name = CString::new(library.as_os_str().as_encoded_bytes())?;
        // SAFETY: the name is a C string; the caller names a compiler's library, which nothing else here has open.
        let opened = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if opened.is_null() {
            // SAFETY: after a failure this is null or a C string, valid until the next call, on this one thread.
            let why = unsafe { libc::dlerror().as_ref().map(|text| CStr::from_ptr(text).to_string_lossy()) };
            return Err(format!("{}: {}", library.display(), why.unwrap_or_default()).into());
        }
        Ok(Compiler { library: opened, prefix })
    }

    /// Compiles `source`; what comes of it has the name `kind` in the library: `PTX` or `Code`.
    pub(crate) fn compile(&self, source: &str, name: &str, options: &[&str], kind: &str) -> Result<Vec<u8>> {
        let texts = [source, name].map(CString::new);
        let [source, name] = texts.map(|text| text.expect("sources and names hold no zero byte"));
        let options: Vec<CString> =
            options.iter().map(|text| CString::new(*text)).collect::<std::result::Result<_, _>>()?;
        let options: Vec<*const c_char> = options.iter().map(|text| text.as_ptr()).collect();
        let mut program = std::ptr::null_mut();
        // SAFETY: the signatures are those of the documentation of both libraries, which is one; all strings outlive
        // the calls, no headers are given, and the program is not used after it is destroyed.
        unsafe {
            let create: Create = self.function("CreateProgram")?;
            let made =
                create(&mut program, source.as_ptr(), name.as_ptr(), 0, std::ptr::null(), std::ptr::null());
            self.held(made, "")?;
            let compile: Compile = self.function("CompileProgram")?;
            let compiled = compile(program, options.len() as c_int, options.as_ptr());
            let log = self.fetched(program, "ProgramLog")?;
            self.held(compiled, &String::from_utf8_lossy(&log))?;
            let code = self.fetched(program, kind)?;
            let destroy: Destroy = self.function("DestroyProgram")?;
            self.held(destroy(&mut program), "")?;
            Ok(code)
        }
    }

    /// What the library calls `what` of a program.
    ///
    /// # Safety
    /// The program is one of this library's.
    unsafe fn fetched(&self, program: CompilerProgram, what: &str) -> Result<Vec<u8>> {
        let mut len = 0;
        // SAFETY: as `compile`; the second function writes as many bytes as the first one said.
        unsafe {
            let size: Size = self.function(&format!("Get{what}Size"))?;
            self.held(size(program, &mut len), "")?;
            let mut bytes = vec![0; len];
            let fill: Fill = self.function(&format!("Get{what}"))?;
            self.held(fill(program, bytes.as_mut_ptr().cast()), "")?;
            Ok(bytes)
        }
    }

    fn held(&self, result: c_int, log: &str) -> Result<()> {
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
    unsafe fn function<F>(&self, name: &str) -> Result<F> {
        let name = format!("{}{name}", self.prefix);
        let symbol = CString::new(name.as_str())?;
        // SAFETY: the library is open and the name a C string.
        let found = unsafe { libc::dlsym(self.library, symbol.as_ptr()) };
        if found.is_null() {
            return Err(format!("the library has no {name}").into());
        }
        assert_eq!(size_of::<F>(), size_of::<*mut c_void>(), "F is a pointer to a function");
        // SAFETY: both are pointers, and the caller says what this one points to.
        Ok(unsafe { std::mem::transmute_copy(&found) })
    }
}
