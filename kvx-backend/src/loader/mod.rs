//! Opens native libraries at run time: a missing one is a reason in a list, never a crash.
//!
//! The host process belongs to the program, not to the libraries that kvx needs. They are never
//! closed (their threads and exit handlers would run into unmapped code), the environment is not
//! changed for them, and the signal handlers that some install while they are loaded or initialised
//! are put back: open a library and initialise it in one [`with_signals_kept`].
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

pub use library::{BoundLibrary, NativeLibrary, OpenOnce, ProcessLibrary, loaded_files};
pub use search::{Search, preload};
pub use signals::with_signals_kept;
