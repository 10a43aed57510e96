//! The factory of RIXL transports.

use std::ffi::CString;
use std::os::fd::RawFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use kvx_backend::capabilities::of_library;
use kvx_backend::error::unavailable;
use kvx_backend::fabric::{self, Parts};
use kvx_backend::{loader, threads};
use kvx_core::backend::{
    Admission, AutoOpen, Availability, Context, Factory, Placement, Transport, Unavailable,
};
use kvx_core::{Capabilities, Error, ErrorKind, MemoryKind, MemoryKinds, Options, Result};

use crate::address::{Address, name_of};
use crate::agent_lock::AgentLock;
use crate::config::{Config, SPEAKS_FOR};
use crate::cpu_trials;
use crate::error::NAME;
use crate::fabric::NixlFabric;
use crate::ffi::{self, Library, NixlAgent, Plugin, Settings};
use crate::memory::{Export, RegisteredRanges};
use crate::peer_loader::PeerLoader;
use crate::peers::Peers;
use crate::wake_set::{self, WakeSet};

/// The longest sleep of NIXL's thread; it wakes on events.
const THREAD_SLEEPS: Duration = Duration::from_secs(1);
/// The time limit for opening: it takes half a second with UCX, and longer with RDMA cards.
const OPENS_WITHIN: Duration = Duration::from_secs(60);

/// Creates transports over NIXL's C interface: NIXL 1.x, for CUDA or for ROCm, and its fork RIXL.
///
/// Used only if a list of backends names it.
#[derive(Clone, Copy, Debug, Default)]
pub struct Rixl;

/// Returns the capabilities that hold for every plugin; NIXL's interface does not report the
/// plugin's own.
fn capabilities() -> Capabilities {
    let mut kinds = vec![MemoryKind::Host, MemoryKind::Pinned];
    if Path::new("/dev/nvidiactl").exists() {
        kinds.push(MemoryKind::Cuda);
    }
    if Path::new("/dev/kfd").exists() {
        kinds.push(MemoryKind::Rocm);
    }
    of_library(MemoryKinds::of(&kinds))
}

fn describe(library: &Library, plugin: &str) -> String {
    match library.version() {
        Some(version) => format!("NIXL {version}, plugin {plugin}"),
        None => format!("NIXL, plugin {plugin}"),
    }
}

impl Factory for Rixl {
    fn name(&self) -> &'static str {
        NAME
    }

    fn placement(&self) -> Placement {
        Placement { order: 100, auto_open: AutoOpen::Skip, speaks_for: SPEAKS_FOR }
    }

    fn admission(&self) -> Admission {
        Admission::Open
    }

    fn available(&self, options: &Options) -> Result<Availability, Unavailable> {
        let config = Config::read(options)
            .map_err(|why| Unavailable::because(why.sentence().to_owned(), "correct the option"))?;
        let library = ffi::open_library(config.any_version)?;
        let plugin = Plugin::check(library, &config.plugin)?;
        let version = library.version();
        Ok(Availability {
            version: version.map_or_else(|| "unknown (outside a wheel)".to_owned(), |version| version.to_string()),
            library: Some(library.path().to_owned()),
            devices: vec![format!("plugin {} ({})", config.plugin, plugin.path.display())],
            rdma: false,
            capabilities: capabilities(),
            cautions: vec![
                "its plugins listen on all network devices and serve anyone who has an agent's metadata; \
                 UCX_NET_DEVICES, or rixl.params {\"engine_config\": \"NET_DEVICES=…\"}, restricts UCX"
                    .to_owned(),
            ],
        })
    }

    fn open(&self, context: Context) -> Result<Arc<dyn Transport>> {
        let config = Config::read(&context.options)?;
        let library =
            ffi::open_library(config.any_version).map_err(|why| unavailable(NAME, why))?;
        Plugin::check(library, &config.plugin).map_err(|why| unavailable(NAME, why))?;
        let name = name_of(&context.agent);
        let me = CString::new(name.as_str()).map_err(|_| {
            ErrorKind::Invalid.because("the agent's name has a NUL byte").with_backend(NAME)
        })?;
        let opened = open_agent(library, &config, &name, &context.agent.name);
        let (agent, watchers) = opened.map_err(|why| why.with_backend(NAME))?;
        let blob = agent.connection().map_err(|why| why.with_backend(NAME))?;
        agent.register(&cpu_trials::page()).map_err(|why| why.with_backend(NAME))?;
        let page = agent.export(&cpu_trials::page()).map_err(|why| why.with_backend(NAME))?;
        let page = Export { range: cpu_trials::page(), blob: page.into() };
        let address = Address { name, blob, page }.encode();
        // Otherwise peers could not decode it.
        Address::decode(&address).map_err(|why| why.with_backend(NAME))?;
        let agent_lock = AgentLock::new(agent).map_err(|why| why.with_backend(NAME))?;
        let ranges = Arc::new(RegisteredRanges::new(Arc::clone(&agent_lock)));
        let loads = PeerLoader::start(
            format!("kvx-rixl+ {}", context.agent.name),
            Arc::clone(&agent_lock),
        )?;
        let wakes = WakeSet::new(&[loads.fd(), agent_lock.released_fd()], &watchers)
            .map_err(|why| why.with_backend(NAME))?;
        let peers = Peers::new(me, loads);
        let description = describe(library, &config.plugin);
        let fabric = NixlFabric::new(
            agent_lock,
            Arc::clone(&ranges),
            peers,
            wakes,
            capabilities(),
            description,
        )?;
        fabric::open(
            context,
            Parts {
                name: NAME,
                capabilities: capabilities(),
                address: Box::new(move || Ok(address.clone())),
                fabric,
                registrar: ranges,
            },
        )
    }
}

/// Creates the agent on a thread with kvx's name, which NIXL's own threads inherit. Also returns
/// the descriptors that it created.
fn open_agent(
    library: &'static Library,
    config: &Config,
    name: &str,
    agent: &str,
) -> Result<(NixlAgent, Vec<RawFd>)> {
    let (config, name) = (config.clone(), name.to_owned());
    run_within(OPENS_WITHIN, format!("kvx-rixl. {agent}"), move || {
        let settings = Settings {
            name: &name,
            plugin: &config.plugin,
            params: &config.params,
            progress_thread: config.progress_thread.then_some(THREAD_SLEEPS),
        };
        let open = || {
            wake_set::new_watchers(|| {
                threads::rename_new("async", "kvx-rixl async", || {
                    NixlAgent::open(library, &settings)
                })
            })
        };
        let (agent, watchers) = loader::with_signals_kept(open);
        Ok((agent?, watchers))
    })
}

/// Runs `open` on a thread of this name, which is abandoned after `limit`.
///
/// Errors: its own; `TimedOut`.
fn run_within<T: Send + 'static>(
    limit: Duration,
    name: String,
    open: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    let (sender, opened) = channel();
    let thread = std::thread::Builder::new().name(name).spawn(move || sender.send(open()).is_ok());
    let thread = thread.map_err(|error| {
        Error::os("could not start a thread for NIXL", error).with_kind(ErrorKind::Exhausted)
    })?;
    match opened.recv_timeout(limit) {
        Err(RecvTimeoutError::Timeout) => Err(ErrorKind::TimedOut.because(format!(
            "NIXL has not opened its plugin within {limit:?}: NIXL_LOG_LEVEL=debug shows why"
        ))),
        Ok(opened) => {
            thread.join().ok(); // it has finished
            opened
        }
        Err(RecvTimeoutError::Disconnected) => {
            // The panic hook has reported why.
            Err(ErrorKind::Native.because("opening NIXL panicked"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn opening_nixl_has_a_time_limit() {
        let name = || "opens".to_owned();
        let opened = run_within(Duration::MAX, name(), || {
            Ok(std::thread::current().name().map(str::to_owned))
        });
        assert_eq!(opened.unwrap(), Some(name()));
        let refused = || Err::<(), _>(ErrorKind::Invalid.because("refused"));
        assert_eq!(
            run_within(Duration::MAX, name(), refused).unwrap_err().kind(),
            ErrorKind::Invalid
        );
        let panicked = run_within(Duration::MAX, name(), || -> Result<()> { panic!("NIXL's own") });
        assert_eq!(panicked.unwrap_err().kind(), ErrorKind::Native);
        let (_never, opens) = channel::<()>();
        let open = move || Ok(opens.recv_timeout(Duration::from_secs(10)).is_ok());
        let late = run_within(Duration::from_millis(1), name(), open);
        assert_eq!(late.unwrap_err().kind(), ErrorKind::TimedOut);
    }
}
