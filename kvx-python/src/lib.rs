//! The two halves of kvx's connector for vLLM, as the Python module `kvx._kvx`.
//!
//! vLLM creates a connector twice: next to its scheduler, and in the process of each worker.
//! `Scheduler` has the [`Connector`](kvx::connector::Connector), with its side channel, leases and
//! deadlines. Each `Worker` joins it as a rank, over a Unix socket, and has the memory. Both work
//! in their own threads, so a load continues while vLLM computes a step or is idle. The scheduler's
//! half sends the workers a list of ended loads and leases, which they report to vLLM.
//!
//! `kvx/vllm.py` has the Python class that vLLM loads. It passes values on and decides nothing. No
//! thread of this module calls into Python.

#![cfg(target_os = "linux")]

mod scheduler;
mod socket;
mod stats;
mod worker;

use kvx::{Error, ErrorKind};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyModule;
use serde_json::Value;

use crate::scheduler::Scheduler;
use crate::worker::{Pool, Worker};

/// Converts an error to Python's: `ValueError` for what the caller has given.
fn python_error(error: &Error) -> PyErr {
    let mut sentence = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        sentence = format!("{sentence}: {cause}");
        source = cause.source();
    }
    match error.kind() {
        ErrorKind::Invalid | ErrorKind::Unsupported => PyValueError::new_err(sentence),
        _ => PyRuntimeError::new_err(sentence),
    }
}

/// Converts a request of the wrong form, which only another version of `vllm.py` makes.
fn malformed(what: &str) -> PyErr {
    PyValueError::new_err(format!("kvx/vllm.py and _kvx do not fit together: {what}"))
}

/// Parses JSON that `vllm.py` has written.
fn parse(text: &str) -> PyResult<Value> {
    serde_json::from_str(text).map_err(|error| malformed(&error.to_string()))
}

/// The process that created a value. Threads do not exist in forked children.
struct Process(u32);

impl Process {
    fn current() -> Self {
        Process(std::process::id())
    }

    fn check(&self) -> PyResult<()> {
        if self.0 == std::process::id() {
            return Ok(());
        }
        Err(PyRuntimeError::new_err(
            "this connector belongs to the process that vLLM forked from: start vLLM with \
             VLLM_WORKER_MULTIPROCESSING_METHOD=spawn",
        ))
    }
}

/// Writes kvx's log to stderr, once per process. `KVX_LOG` sets the level: `error`, `warn`, `info`
/// (the default), `debug` or `trace`.
fn log_to_stderr() {
    let level = std::env::var("KVX_LOG").ok().and_then(|level| level.parse().ok());
    let level: tracing::Level = level.unwrap_or(tracing::Level::INFO);
    let log = tracing_subscriber::fmt().with_writer(std::io::stderr).with_max_level(level);
    // Another library of this process may have set the log up.
    let _ = log.with_ansi(false).try_init();
}

/// The Python module.
#[pymodule]
fn _kvx(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_class::<Scheduler>()?;
    module.add_class::<Worker>()?;
    module.add_class::<Pool>()
}
