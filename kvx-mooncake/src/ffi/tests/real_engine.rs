//! The real engine, for tests that replace some of its functions.

use std::ffi::{c_int, c_void};
use std::path::PathBuf;
use std::sync::OnceLock;

use kvx_backend::fabric::{EndpointId, JobId};

use super::super::adapter_bindings;
use super::super::bindings::{Functions, transfer_status};
use super::super::engine::{Batch, Engine, EngineOptions, PEER_TO_PEER};
use super::super::library::{Library, LoadOptions};
use crate::batches::{Batches, InFlightBatch};

/// The real functions, to which replacements pass most calls.
static REAL: OnceLock<(Functions, adapter_bindings::Functions)> = OnceLock::new();

pub(super) fn real_functions() -> &'static Functions {
    &REAL.get().expect("set before anybody asks").0
}

pub(super) fn real_adapter_functions() -> &'static adapter_bindings::Functions {
    &REAL.get().expect("set before anybody asks").1
}

/// An answer to the query for a piece's state, derived from the real one.
pub(super) trait PieceAnswer {
    /// Changes the state in place. Returns the result of the call.
    fn change(piece: usize, code: c_int, status: &mut transfer_status) -> c_int;
}

/// Answers like `A`.
pub(super) unsafe extern "C" fn answer_as<A: PieceAnswer>(
    engine: *mut c_void,
    batch: u64,
    piece: usize,
    status: *mut transfer_status,
) -> c_int {
    // SAFETY: passes the caller's arguments on; the caller passed the location for the answer.
    unsafe {
        let code = (real_functions().getTransferStatus)(engine, batch, piece, status);
        A::change(piece, code, &mut *status)
    }
}

/// Returns the adapter that `cargo xtask peers mooncake` builds.
pub(super) fn adapter() -> Option<PathBuf> {
    let program = std::env::current_exe().expect("the program's path is known");
    let file = "peers/mooncake/libkvx_mooncake_adapter.so";
    program.ancestors().map(|folder| folder.join(file)).find(|file| file.exists())
}

/// Returns the real library and its functions, or skips the test.
pub(super) fn real(
    test: &str,
) -> Option<(&'static Library, Functions, adapter_bindings::Functions)> {
    let Some(file) = adapter() else {
        let why = "Mooncake's wheel and the adapter are not installed";
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

/// Starts an engine of a library that lives as long as the engine.
pub(super) fn engine(library: Library, devices: &[&str]) -> kvx_core::Result<Engine> {
    Engine::start(Box::leak(Box::new(library)), &engine_options(devices))
}

/// Returns the list of one batch to `peer`, whose pieces have these lengths.
pub(super) fn in_flight(batch: Batch, peer: &Engine, lens: &[u64]) -> Batches {
    let mut batches = Batches::default();
    let (job, endpoint) = (JobId::from_number(1), EndpointId::from_number(1));
    batches.push(InFlightBatch::new(batch, job, endpoint, peer.name().into(), lens.into()));
    batches
}
