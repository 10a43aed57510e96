//! The real engine, for tests that put a function of their own in the place of one of its.

use std::ffi::{c_int, c_void};
use std::path::PathBuf;
use std::sync::OnceLock;

use super::super::adapter_bindings;
use super::super::bindings::{Functions, transfer_status};
use super::super::engine::{Engine, EngineOptions, PEER_TO_PEER};
use super::super::library::{Library, LoadOptions};

/// The real functions, to which replaced ones pass most of their calls on.
static REAL: OnceLock<(Functions, adapter_bindings::Functions)> = OnceLock::new();

pub(super) fn real_functions() -> &'static Functions {
    &REAL.get().expect("set before anybody asks").0
}

pub(super) fn real_adapter_functions() -> &'static adapter_bindings::Functions {
    &REAL.get().expect("set before anybody asks").1
}

/// An answer to the question for a piece's state, made of the real one.
pub(super) trait PieceAnswer {
    /// Changes the state in place. Returns the code of the answer.
    fn change(piece: usize, code: c_int, status: &mut transfer_status) -> c_int;
}

/// Answers as `A` does.
pub(super) unsafe extern "C" fn answer_as<A: PieceAnswer>(
    engine: *mut c_void,
    batch: u64,
    piece: usize,
    status: *mut transfer_status,
) -> c_int {
    // SAFETY: the caller's arguments, and the place that it gave for the answer.
    unsafe {
        let code = (real_functions().getTransferStatus)(engine, batch, piece, status);
        A::change(piece, code, &mut *status)
    }
}

/// The adapter as `cargo xtask peers mooncake` builds it.
pub(super) fn adapter() -> Option<PathBuf> {
    let program = std::env::current_exe().expect("a program knows where it lies");
    let file = "peers/mooncake/libkvx_mooncake_adapter.so";
    program.ancestors().map(|folder| folder.join(file)).find(|file| file.exists())
}

/// The real library with its functions; or the test is skipped.
pub(super) fn real(
    test: &str,
) -> Option<(&'static Library, Functions, adapter_bindings::Functions)> {
    let Some(file) = adapter() else {
        let why = "Mooncake's wheel and the adapter are not there";
        kvx_testkit::skip(test, why, "cargo xtask peers mooncake");
        return None;
    };
    let library = Library::open(&LoadOptions { files: vec![file], ..LoadOptions::default() })
        .expect("the real one passes");
    let of_adapter = *library.adapter().expect("that is the adapter");
    let (functions, of_adapter) = *REAL.get_or_init(|| (*library.functions(), of_adapter));
    Some((library, functions, of_adapter))
}

fn engine_options(devices: &[&str]) -> EngineOptions {
    EngineOptions {
        metadata: PEER_TO_PEER.into(),
        host: "127.0.0.1".into(),
        protocol: "tcp".into(),
        devices: devices.iter().map(|device| (*device).to_owned()).collect(),
    }
}

/// An engine of a library that stays as long as the engine.
pub(super) fn engine(library: Library, devices: &[&str]) -> kvx_core::Result<Engine> {
    Engine::start(Box::leak(Box::new(library)), &engine_options(devices))
}
