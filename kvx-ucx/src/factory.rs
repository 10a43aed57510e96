//! The factory of UCX transports.

use std::sync::Arc;
use std::time::Duration;

use kvx_backend::capabilities::of_library;
use kvx_backend::devices::rdma_devices;
use kvx_backend::error::unavailable;
use kvx_backend::fabric::{LaneParts, Parts};
use kvx_backend::threads;
use kvx_core::backend::{
    Admission, AutoOpen, Availability, Context, Factory, Placement, Transport, Unavailable,
};
use kvx_core::{Capabilities, ErrorKind, Idle, MemoryKinds, Options, Result};

use crate::address::Address;
use crate::config::{self, Config};
use crate::error::{self, NAME};
use crate::fabric::{SETS_UP, UcxFabric};
use crate::ffi::{self, Library, Version, Worker};
use crate::memory::{MemoryRegistrar, kinds};
use crate::route::{KILLED_AMID, SHARED_QUEUES};

/// The time within which kvx detects a peer that ended without closing its connections: several of
/// UCX's keepalives must fail. A first link needs time to create its endpoints as well.
const LOSS: Duration = Duration::from_secs(5).saturating_add(SETS_UP);
/// UCX answers gets over tcp with messages, and aborts when it cannot send an answer. Seen with
/// 1.13.1 and 1.22.0: `Fatal: unexpected error: Endpoint timeout`.
const OVER_TCP: &str = "over tcp, UCX aborts the target's process if the reading peer ends during a read: kvx uses UCX over tcp only if ucx.tls or UCX_TLS names tcp, and otherwise the backend TCP";
/// The first version that kvx uses over RDMA cards. 1.13.1 of Debian 12 ended by a failed assertion
/// in `ucp_request_send_state_ff` when an endpoint was closed whose peer had never answered.
const RDMA_SINCE: Version = Version::new(1, 14, 0);
const OLD_RDMA: &str = "UCX before 1.14 aborts the process when it closes an RDMA connection that never came up: kvx uses its RDMA only if ucx.tls or UCX_TLS names transports; set KVX_UCX_LIB to a newer UCX";
/// Prefixes of UCX's RDMA transports.
const RDMA: &[&str] = &["rc", "dc", "ud", "srd", "gga"];

/// Creates UCX transports over RDMA cards, between GPUs and through shared memory, depending on the
/// UCX of this machine.
///
/// Every UCX worker serves messages that read and write any address, registered or not. Peers are
/// therefore trusted ([`Isolation::Cooperative`](kvx_core::Isolation::Cooperative)).
#[derive(Clone, Copy, Debug, Default)]
pub struct Ucx;

impl Ucx {
    /// The number of progress threads without the option `num_threads`.
    pub const NUM_THREADS: u32 = config::NUM_THREADS;
}

/// Returns the capabilities that hold whichever lanes UCX chooses; a link reports more exact ones.
fn capabilities(memory: MemoryKinds) -> Capabilities {
    Capabilities { idle: Idle::Asleep, peer_loss_within: Some(LOSS), ..of_library(memory) }
}

/// Runs `start`, and names the thread that UCX may start in it.
fn named<T>(start: impl FnOnce() -> T) -> T {
    threads::rename_new("async", "kvx-ucx async", start)
}

/// Creates a context with these options. Errors: `Invalid`, `Unavailable`, UCX's.
fn context(library: &'static Library, options: &Options) -> Result<Arc<ffi::UcxContext>> {
    let config = Config::read(options)?;
    let mut settings = config.settings(library.path());
    let old = library.version() < RDMA_SINCE && !rdma_devices().is_empty();
    if old && config.transports(library.path()).is_none() {
        settings.push(config::no_rdma());
    }
    ffi::UcxContext::new(library, &settings).map_err(|(status, setting)| match setting {
        Some(setting) => error::native(format!("UCX refuses the setting {setting}"), status)
            .with_kind(ErrorKind::Invalid),
        None => {
            error::native("UCX finds no usable transport: check UCX_TLS and \"ucx.tls\"", status)
                .with_kind(ErrorKind::Unavailable)
        }
    })
}

/// Returns the devices that a context may use, as `transport/device`, from UCX's description of its
/// resources.
fn resources(printed: &str) -> Vec<(&str, &str)> {
    let resources = printed
        .lines()
        .filter(|line| line.contains("resource "))
        .filter_map(|line| line.rsplit_once("-- ")?.1.trim().split_once('/'));
    resources.collect()
}

fn is_rdma(transport: &str) -> bool {
    let family = transport.split_once('_').map_or(transport, |(family, _)| family);
    RDMA.contains(&family)
}

impl Factory for Ucx {
    fn name(&self) -> &'static str {
        NAME
    }

    fn placement(&self) -> Placement {
        Placement { order: 30, auto_open: AutoOpen::OpenWithRdma, speaks_for: &[] }
    }

    fn admission(&self) -> Admission {
        Admission::Keys
    }

    fn available(&self, options: &Options) -> Result<Availability, Unavailable> {
        let library = ffi::LIBRARY.open()?;
        let context = named(|| context(library, options)).map_err(|why| {
            Unavailable::because(why.to_string(), "correct the setting or remove it")
        })?;
        let printed = context.printed();
        let resources = resources(&printed);
        let rdma = resources.iter().any(|(transport, _)| is_rdma(transport));
        let shown = |(transport, device): &(&str, &str)| format!("{transport}/{device}");
        let mut devices: Vec<String> = resources.iter().map(shown).collect();
        devices.sort();
        devices.dedup();
        let cards = rdma_devices();
        let mut cautions = Vec::new();
        if library.version() < RDMA_SINCE && !cards.is_empty() {
            cautions.push(OLD_RDMA.to_owned());
        } else if !rdma && !cards.is_empty() {
            cautions.push(format!(
                "UCX uses none of this machine's RDMA cards ({}): it was built without RDMA, or \
                 its settings exclude the cards",
                cards.join(", ")
            ));
        }
        if resources.iter().any(|(transport, _)| *transport == "tcp") {
            cautions.push(OVER_TCP.to_owned());
        }
        if resources.iter().any(|(transport, _)| SHARED_QUEUES.contains(transport)) {
            cautions.push(KILLED_AMID.to_owned());
        }
        Ok(Availability {
            version: library.version().to_string(),
            library: Some(library.path().to_owned()),
            devices,
            rdma,
            capabilities: capabilities(kinds(context.memory_types())),
            cautions,
        })
    }

    fn open(&self, agent: Context) -> Result<Arc<dyn Transport>> {
        let (first, more) = parts(&agent)?;
        kvx_backend::fabric::open_lanes(agent, first, more)
    }
}

/// Returns the workers of an agent with everything they need. Errors: `Unavailable`, `Invalid`,
/// UCX's.
pub(crate) fn parts(agent: &Context) -> Result<(Parts<UcxFabric>, Vec<LaneParts<UcxFabric>>)> {
    let library = ffi::LIBRARY.open().map_err(|why| unavailable(NAME, why))?;
    let config = Config::read(&agent.options)?;
    let (ucx, workers) = named(|| -> Result<_> {
        let ucx = context(library, &agent.options)?;
        let workers: Result<Vec<_>, _> =
            (0..config.num_threads).map(|_| Worker::new(&ucx)).collect();
        Ok((ucx, workers.map_err(error::worker_error)?))
    })?;
    let capabilities = capabilities(kinds(ucx.memory_types()));
    let registrar = Arc::new(MemoryRegistrar::new(ucx, workers.len()));
    let mut lanes = Vec::with_capacity(workers.len());
    for worker in workers {
        let at = worker
            .address()
            .map_err(|status| error::native("UCX's worker has no address", status))?;
        let address = Address { version: library.version(), worker: at.into() };
        let (number, address) = (address.number(), address.encode());
        let fabric = UcxFabric::new(
            worker,
            number,
            Arc::clone(&registrar),
            capabilities.clone(),
            config.names_tcp(library.path()),
        )?;
        lanes.push(LaneParts { address: Box::new(move || Ok(address.clone())), fabric });
    }
    let LaneParts { address, fabric } = lanes.remove(0);
    let parts = Parts { name: NAME, capabilities, address, fabric, registrar };
    Ok((parts, lanes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resources_are_read_as_ucx_prints_them() {
        let printed = "#            md 4  :  component 6  cma \n#\n\
            #      resource 0  :  md 0  dev 0  flags -- self/memory0\n\
            #      resource 1  :  md 1  dev 1  flags -- rc_mlx5/mlx5_0:1\n#\n# memory: 1.43MB";
        assert_eq!(resources(printed), [("self", "memory0"), ("rc_mlx5", "mlx5_0:1")]);
        assert!(is_rdma("rc_mlx5") && is_rdma("ud_verbs") && is_rdma("srd"));
        assert!(!is_rdma("tcp") && !is_rdma("cuda_ipc") && !is_rdma("rdmacm"));
    }
}
