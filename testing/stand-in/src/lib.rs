//! A stand-in for GPU drivers. It exports the functions of `libcuda`, `libamdhip64` and hipRTC that
//! kvx calls, and implements them with host memory. Tests open it through the real loaders, so
//! everything above the driver runs without a GPU. [`library`] returns its path, and [`Control`]
//! adds delays and faults.
//!
//! Device memory is host memory at addresses that the host cannot access. Streams are threads.
//! Memory of another process is opened through its descriptor, and is gone when that process ends.
//! Launches run the kernels' reference implementation in Rust.
//!
//! The stand-in is strict where drivers are lenient or undefined. Calls without a context, unknown
//! handles, and ranges that are out of bounds or freed are errors. [`Control::faults`] counts those
//! that a real device would not survive.
//!
//! # Commands
//! [`Control::command`] executes one command. The environment variable `KVX_STAND_IN` may contain
//! several, separated by `;`, which the first call executes:
//!
//! | command | effect |
//! |---|---|
//! | `devices N` | sets the number of devices (default 2), before the first call that uses it |
//! | `memory BYTES` | sets the memory of each device (default 1 GiB) |
//! | `cuda-version 12080`, `hip-version 60100000` | sets the versions of the drivers |
//! | `no-peers` | devices cannot access each other |
//! | `fail NAME CODE TIMES [SKIP]` | after SKIP calls, the next TIMES calls fail (or `always`) |
//! | `well` | no call fails or is slow any more, and broken devices work again |
//! | `reset` | restores the initial state, including counts |
//! | `delay MICROSECONDS` | the least time of each copy and each launch |
//! | `late MICROSECONDS` | delays each event after the work that it marks |
//! | `hold`, `release` | stops streams before their next piece of work, and continues them |
//! | `slow NAME MICROSECONDS` | delays each call of a function |
//! | `hide-imports LEVEL` | does not tell the range of other processes' memory: by the usual function (1), by attributes (2), nor its number (3) |
//! | `unordered-writes` | devices see writes of network cards only after a flush, before the first call that lists devices |
//! | `other-context` | device memory belongs to another context than the primary one |
//! | `calls NAME [THREAD]` | returns how often a function was called, by threads whose name begins with THREAD |
//! | `faults` | returns how often memory was misused |
//! | `allocated` | returns the bytes of allocated device memory |

mod argument;
mod binary;
mod both;
mod client;
mod code;
mod control;
mod copies;
mod cuda;
mod devices;
mod event;
mod handles;
mod hip;
mod ipc;
mod launch;
mod mapping;
mod memory;
pub mod reference;
mod settings;
mod stream;
mod virtual_memory;

pub use client::{Control, library, stand_in, start_again};
