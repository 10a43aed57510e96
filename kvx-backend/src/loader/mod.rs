//! Opens native libraries at run time. A missing library is a reported reason, never a crash.
//!
//! The process belongs to the program, not to the libraries that kvx needs. kvx never closes them,
//! because their threads and exit handlers would run into unmapped code, and does not change the
//! environment for them. Some libraries install signal handlers while they are loaded or
//! initialised; kvx restores the previous ones. Therefore open a library and initialise it within
//! one [`with_signals_kept`].
//!
//! ```
//! use kvx_backend::loader::{self, Search};
//!
//! let search = Search::new("KVX_EXAMPLE_LIB", &["libkvx-example.so.1"], "install kvx-example");
//! let opened = loader::with_signals_kept(|| {
//!     let library = search.open()?;
//!     // SAFETY: the library's header declares `int example_init(void)`.
//!     let init: unsafe extern "C" fn() -> i32 = unsafe { library.symbol(c"example_init") }?;
//!     // SAFETY: as the header says, it may be called once and needs nothing.
//!     Ok::<_, kvx_core::backend::Unavailable>((unsafe { init() }, library))
//! });
//! let why = opened.err().expect("there is no such library").to_string();
//! assert!(why.starts_with("libkvx-example.so.1 not found (KVX_EXAMPLE_LIB unset; tried"), "{why}");
//! assert!(why.ends_with("install kvx-example"));
//! ```

mod library;
mod search;
mod signals;

pub use library::{
    BoundLibrary, FunctionTable, NativeLibrary, OpenOnce, ProcessLibrary, loaded_files,
};
pub use search::{Search, preload};
pub use signals::with_signals_kept;
