//! The factory of libfabric transports.

use std::sync::Arc;

use kvx_backend::error::unavailable;
use kvx_backend::fabric::Parts;
use kvx_core::backend::{
    Admission, AutoOpen, Availability, Context, Factory, Placement, Transport, Unavailable,
};
use kvx_core::{Error, ErrorKind, Idle, MemoryKind, Options, Result};

use crate::address::{Address, HostProcess};
use crate::config::Config;
use crate::error::{self, NAME};
use crate::fabric::LibfabricFabric;
use crate::ffi::{self, Domain, Info, Infos, Library, WaitMethod};
use crate::memory::{MemoryRegistrar, RailPlace};
use crate::process_copy;
use crate::providers::{self, DeliveryProof};
use crate::rail::Rail;
use crate::topology::Topology;
use crate::wake_socket::WakeSocket;

/// Creates libfabric transports: over EFA, verbs and other providers, over sockets and over shared
/// memory.
#[derive(Clone, Copy, Debug, Default)]
pub struct Libfabric;

impl Libfabric {
    /// Bounds the messages from unauthenticated senders that libfabric keeps over sockets. Sets
    /// `FI_OFI_RXM_BUFFER_SIZE` and `FI_OFI_RXM_EAGER_LIMIT` in the environment of this process and
    /// of programs that it starts. Does nothing if either is set already, or if the machine has an
    /// RDMA card, on which this is untested. See SECURITY.md.
    ///
    /// # Safety
    /// No other thread uses the environment during the call. Call it first in `main`, before
    /// anything starts threads.
    pub unsafe fn bound_kept_messages() {
        // SAFETY: the caller guarantees that no other thread uses the environment.
        unsafe { providers::bound_kept_messages() }
    }
}

impl Factory for Libfabric {
    fn name(&self) -> &'static str {
        NAME
    }

    fn placement(&self) -> Placement {
        Placement { order: 40, auto_open: AutoOpen::OpenWithRdma, speaks_for: &[] }
    }

    fn admission(&self) -> Admission {
        Admission::Keys
    }

    fn available(&self, options: &Options) -> Result<Availability, Unavailable> {
        let library = ffi::LIBRARY.open()?;
        let because =
            |why: Error| Unavailable::because(why.to_string(), "correct the setting or remove it");
        let config = Config::read(options).map_err(because)?;
        let devices = drivers();
        let chosen = providers::choose(library, &config, !devices.is_empty()).map_err(because)?;
        let first = first(&chosen).map_err(because)?;
        let provider = first.provider();
        let rdma = providers::is_rdma(&provider);
        let used: Vec<String> = chosen.iter().flat_map(Infos::iter).map(Info::domain).collect();
        let mut cautions = Vec::new();
        if !rdma && config.provider.is_none() {
            cautions.push(format!(
                "libfabric uses {provider} over {}, which is not RDMA: set \"libfabric.provider\" and \"libfabric.domain\" to choose others",
                used.join(", ")
            ));
        }
        cautions.extend(providers::caution(&provider).map(str::to_owned));
        Ok(Availability {
            version: library.version().to_string(),
            library: Some(library.path().to_owned()),
            devices: providers::list(library).map_err(because)?,
            rdma,
            capabilities: providers::capabilities(
                &provider,
                idle(first, library).map_err(because)?,
                providers::kinds(first, &devices),
            ),
            cautions,
        })
    }

    fn open(&self, agent: Context) -> Result<Arc<dyn Transport>> {
        let parts = parts(&agent)?;
        kvx_backend::fabric::open(agent, parts)
    }
}

/// Returns the endpoints of an agent with everything they need. Errors: `Unavailable`, `Invalid`,
/// libfabric's.
pub(crate) fn parts(agent: &Context) -> Result<Parts<LibfabricFabric>> {
    let library = ffi::LIBRARY.open().map_err(|why| unavailable(NAME, why))?;
    let config = Config::read(&agent.options)?;
    let chosen = providers::choose(library, &config, !agent.devices.is_empty())?;
    let proof = providers::delivery_proof(&first(&chosen)?.provider());
    build(agent, library, &chosen, proof, |_| ())
}

/// Returns the endpoints of an agent on the chosen domains. Calls `opened` for each domain before
/// its endpoint is opened. Errors: `Invalid`, libfabric's.
pub(crate) fn build(
    agent: &Context,
    library: &'static Library,
    chosen: &[Infos],
    proof: DeliveryProof,
    opened: impl Fn(&Arc<Domain>),
) -> Result<Parts<LibfabricFabric>> {
    let config = Config::read(&agent.options)?;
    let devices: Vec<MemoryKind> = agent.devices.iter().map(|access| access.kind()).collect();
    let reads_back = proof == DeliveryProof::ReadBack;
    let first = first(chosen)?;
    let provider = first.provider();
    let memory = providers::kinds(first, &devices);
    let wake_socket =
        if providers::is_shared_memory(&provider) { Some(WakeSocket::new()?) } else { None };
    let topology = Topology::of_this_machine();
    let (mut rails, mut near, mut addresses) = (Vec::new(), Vec::new(), Vec::new());
    for info in chosen.iter().flat_map(Infos::iter) {
        let domain = open_domain(library, info)?;
        opened(&domain);
        let rail = Rail::open(&domain, rails.is_empty(), reads_back)?;
        let endpoint = Arc::clone(rail.endpoint());
        let address = endpoint
            .address()
            .map_err(|errno| error::native("an endpoint has no address", errno))?;
        addresses.push(address.into_boxed_slice());
        near.push(RailPlace { endpoint, place: topology.of_card(info.pci(), &info.domain()) });
        rails.push(rail);
    }
    let sleeps = |rail: &Rail| matches!(rail.endpoint().wait_method(), WaitMethod::Descriptor(_));
    let idle =
        if wake_socket.is_some() || rails.iter().all(sleeps) { Idle::Asleep } else { Idle::Polls };
    let capabilities = providers::capabilities(&provider, idle, memory);
    let ours = Arc::new(Address {
        provider,
        protocol: first.protocol(),
        rails: addresses,
        host: wake_socket.as_ref().map(|wake_socket| HostProcess {
            process: std::process::id(),
            probe: process_copy::probe(),
            wake_name: wake_socket.name().into(),
        }),
    });
    let description = described(library, first, chosen, proof);
    let registrar = Arc::new(MemoryRegistrar::new(near, topology, config.rails));
    let encoded = ours.encode();
    let fabric = LibfabricFabric::new(
        rails,
        ours,
        wake_socket,
        reads_back,
        Arc::clone(&registrar),
        capabilities.clone(),
        description,
    );
    Ok(Parts {
        name: NAME,
        capabilities,
        address: Box::new(move || Ok(encoded.clone())),
        fabric,
        registrar,
    })
}

/// Returns how an idle agent waits on a domain. Errors: libfabric's, if the domain cannot be
/// opened.
fn idle(info: &Info, library: &'static Library) -> Result<Idle> {
    if providers::is_shared_memory(&info.provider()) {
        return Ok(Idle::Asleep); // peers wake it
    }
    let domain = open_domain(library, info)?;
    Ok(if ffi::has_descriptors(&domain) { Idle::Asleep } else { Idle::Polls })
}

fn open_domain(library: &'static Library, info: &Info) -> Result<Arc<Domain>> {
    Domain::open(library, info).map_err(|errno| {
        let what = format!("libfabric could not open {} on {}", info.provider(), info.domain());
        error::native(what, errno)
    })
}

fn first(chosen: &[Infos]) -> Result<&Info> {
    chosen.iter().flat_map(Infos::iter).next().ok_or_else(|| {
        Error::new(ErrorKind::Unavailable, "libfabric lists no domain: check FI_PROVIDER")
            .with_backend(NAME)
    })
}

/// Returns the kinds of device whose drivers run on this machine.
fn drivers() -> Vec<MemoryKind> {
    let drivers = [("/proc/driver/nvidia", MemoryKind::Cuda), ("/sys/class/kfd", MemoryKind::Rocm)];
    drivers
        .into_iter()
        .filter(|(path, _)| std::path::Path::new(path).exists())
        .map(|(_, kind)| kind)
        .collect()
}

/// Returns the route's text.
fn described(library: &Library, first: &Info, chosen: &[Infos], proof: DeliveryProof) -> String {
    let domains: Vec<String> = chosen.iter().flat_map(Infos::iter).map(Info::domain).collect();
    let (name, version) = (first.provider(), first.provider_version());
    let arrival = match proof {
        DeliveryProof::Copy => ", bytes copied by kvx through the kernel",
        DeliveryProof::ReadBack => ", writes proven by reads",
        DeliveryProof::Completion => "",
    };
    let caution = providers::caution(&name).map_or(String::new(), |caution| format!("; {caution}"));
    let over = domains.join(" and ");
    format!("libfabric {}, {name} {version} over {over}{arrival}{caution}", library.version())
}
