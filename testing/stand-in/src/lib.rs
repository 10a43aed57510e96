//! A library that stands where a GPU's driver would: it exports what kvx calls of `libcuda`,
//! `libamdhip64` and hipRTC, and does it with host memory. Tests open it through the real loaders,
//! so that everything above the driver runs without a GPU: [`library`] says where it lies,
//! [`Control`] makes it slow, broken or strict.
//!
//! Device memory is host memory at addresses that the host cannot reach. Streams are threads.
//! Memory of another process is opened by its descriptor, and is gone when that process is.
//! Launches run the kernels' reference in plain Rust.
//!
//! It is strict where drivers are lenient or undefined: calls without a context, unknown handles,
//! ranges that are out of bounds or freed are errors, and [`Control::faults`] counts those that a
//! real device would not have survived.
//!
//! # Commands
//! [`Control::command`] takes them one at a time, and the variable `KVX_STAND_IN` as a list with
//! `;` between them, read at the first call:
//!
//! | command | what it does |
//! |---|---|
//! | `devices N` | there are so many (2, unless said); only before the first call that looks |
//! | `memory BYTES` | each has so much (1 GiB, unless said) |
//! | `cuda-version 12080`, `hip-version 60100000` | what the drivers say they are |
//! | `no-peers` | devices do not reach each other |
//! | `fail NAME CODE TIMES [SKIP]` | the next calls of a function fail (`always`, or so many), after `SKIP` good ones |
//! | `well` | no call fails any more, and broken devices work again |
//! | `reset` | everything as it was in the beginning, counts too |
//! | `delay MICROSECONDS` | each copy and each launch takes so long at least |
//! | `late MICROSECONDS` | each event comes so much later than what it stands for |
//! | `hold`, `release` | streams stop before their next piece of work, and go on |
//! | `calls NAME` | answers how often a function was called |
//! | `faults` | answers how often memory was misused |
//! | `allocated` | answers how many bytes of device memory live |

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
mod settings;
mod stream;
mod virtual_memory;

pub use client::{Control, library, stand_in, start_again};
