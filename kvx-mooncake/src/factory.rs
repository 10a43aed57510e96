//! The backend: whether it is available here, and how it is opened.

use std::path::PathBuf;
use std::sync::Arc;

use kvx_backend::devices::rdma_devices;
use kvx_backend::error::unavailable;
use kvx_backend::fabric::{self, Parts};
use kvx_core::backend::{
    Admission, AutoOpen, Availability, Context, Factory, Placement, Transport, Unavailable,
};
use kvx_core::{Options, Result};

use crate::adapter;
use crate::blocking_calls::BlockingCalls;
use crate::capabilities::capabilities;
use crate::config::Config;
use crate::error::NAME;
use crate::fabric::MooncakeFabric;
use crate::ffi::{Engine, Library, LoadOptions};
use crate::memory::{MemoryRegistrar, RegisteredRanges};

/// The Mooncake Transfer Engine, loaded at run time. It is used only if a list of backends names
/// it.
#[derive(Clone, Debug, Default)]
pub struct Mooncake {
    files: Vec<PathBuf>,
}

impl Mooncake {
    /// Searches for the library as the environment and the dynamic linker specify.
    pub fn new() -> Self {
        Self::default()
    }

    /// Also tries these files, last: for a program that includes the library.
    #[must_use]
    pub fn or_files(mut self, files: impl IntoIterator<Item = PathBuf>) -> Self {
        self.files.extend(files);
        self
    }

    /// Returns the names of two shared libraries, and the C++17 source that `kvx mooncake-adapter`
    /// compiles each from. The first exports Mooncake's C functions and calls the engine in
    /// Mooncake's wheel. The second is installed in the same folder: that engine loads it instead
    /// of its etcd client. `KVX_MOONCAKE_LIB` names the first, `KVX_MOONCAKE_ENGINE` the engine.
    pub fn adapter_sources() -> [(&'static str, String); 2] {
        adapter::sources()
    }

    fn library(&self, config: &Config) -> Result<&'static Library, Unavailable> {
        Library::open(&LoadOptions {
            files: self.files.clone(),
            any_version: config.any_version,
            etcd: config.etcd(),
        })
    }
}

const CAUTION: &str = "Mooncake's engine always listens on all interfaces, and lets anyone who can reach \
                       its ports read and write registered memory without authentication: keep untrusted hosts off the network";

impl Factory for Mooncake {
    fn name(&self) -> &'static str {
        NAME
    }

    fn placement(&self) -> Placement {
        Placement { order: 95, auto_open: AutoOpen::Skip, speaks_for: &[] }
    }

    fn admission(&self) -> Admission {
        Admission::Open
    }

    fn available(&self, options: &Options) -> Result<Availability, Unavailable> {
        let config = Config::read(options).map_err(|error| {
            Unavailable::because(error.sentence().to_owned(), "correct the option")
        })?;
        let library = self.library(&config)?;
        let devices = rdma_devices();
        if config.engine_options.protocol == "rdma" && devices.is_empty() {
            return Err(Unavailable::because(
                "mooncake_protocol is rdma, but this machine has no RDMA device",
                "set it to tcp, or remove it; kvx does not substitute another transport",
            ));
        }
        Ok(Availability {
            version: library.version().to_owned(),
            library: Some(library.path().to_owned()),
            rdma: config.engine_options.protocol == "rdma",
            devices,
            capabilities: capabilities(&config.engine_options.protocol),
            cautions: vec![CAUTION.to_owned()],
        })
    }

    fn open(&self, context: Context) -> Result<Arc<dyn Transport>> {
        let config = Config::read(&context.options).map_err(|error| error.with_backend(NAME))?;
        let library = self.library(&config).map_err(|why| unavailable(NAME, why))?;
        open(library, config, context)
    }
}

/// Opens an agent's transport over this library.
pub(crate) fn open(
    library: &'static Library,
    config: Config,
    context: Context,
) -> Result<Arc<dyn Transport>> {
    let engine =
        Engine::start(library, &config.engine_options).map_err(|error| error.with_backend(NAME))?;
    let engine = Arc::new(engine);
    tracing::warn!(agent = %context.agent.name, address = engine.name(), "{CAUTION}");
    let calls = BlockingCalls::new(config.workers)?;
    let name = engine.name().as_bytes().to_vec();
    let ranges = Arc::<RegisteredRanges>::default();
    let registrar = MemoryRegistrar {
        engine: Arc::downgrade(&engine),
        ranges: Arc::clone(&ranges),
        node: config.node,
    };
    let protocol = config.engine_options.protocol;
    let parts = Parts {
        name: NAME,
        capabilities: capabilities(&protocol),
        address: Box::new(move || Ok(name.clone())),
        fabric: MooncakeFabric::new(engine, calls, ranges, protocol, &context.agent),
        registrar: Arc::new(registrar),
    };
    fabric::open(context, parts)
}
