//! Executes the commands to a far end: its agents, regions and peers, in either process.

use std::fs::File;
use std::io::{BufRead as _, Write as _};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvx_core::{
    Agent, Error, ErrorKind, Grid, Indices, Memory, Op, Options, Peer, Place as _, Plan, Region,
    Registry, Secret, quarantined_bytes,
};

use super::commands::{AgentSpec, Command, Reply};
use super::limits::{HungPage, limit};
use crate::backing::Backing;
use crate::device::Device;
use crate::pattern;
use crate::process_state::{self, ProcessState, ResourceUsage, Tid};

/// The agents, regions and peers of a far end, by number.
pub(super) struct FarAgents {
    registry: Registry,
    device: Option<Arc<dyn Device>>,
    /// Threads that the device had when it was opened, which no agent of kvx started.
    threads: Vec<Tid>,
    agents: Vec<Agent>,
    regions: Vec<Option<Region>>,
    peers: Vec<Option<Peer>>,
    hung: Option<HungPage>,
}

impl FarAgents {
    pub(super) fn new(registry: Registry, device: Option<Arc<dyn Device>>) -> Self {
        let threads =
            device.iter().flat_map(|_| process_state::threads()).map(|(tid, _)| tid).collect();
        FarAgents {
            registry,
            device,
            threads,
            agents: Vec::new(),
            regions: Vec::new(),
            peers: Vec::new(),
            hung: None,
        }
    }

    fn region(&self, number: usize) -> kvx_core::Result<&Region> {
        let region = self.regions.get(number).and_then(Option::as_ref);
        region.ok_or_else(|| ErrorKind::Invalid.because("the far end has no such region"))
    }

    fn peer(&self, number: usize) -> kvx_core::Result<&Peer> {
        let peer = self.peers.get(number).and_then(Option::as_ref);
        peer.ok_or_else(|| ErrorKind::Invalid.because("the far end has no such peer"))
    }

    pub(super) fn execute(&mut self, command: Command) -> Reply {
        self.try_execute(command).unwrap_or_else(|error| Reply::Failed {
            kind: error.kind().as_str().to_owned(),
            sentence: error.to_string(),
        })
    }

    fn try_execute(&mut self, command: Command) -> kvx_core::Result<Reply> {
        Ok(match command {
            Command::Agent(spec) => {
                let AgentSpec { name, backends, options, secret, peer_timeout, inbox } = spec;
                let mut builder = Agent::builder(name)
                    .backends(backends)
                    .options(Options::parse(&options)?)
                    .peer_timeout(peer_timeout)
                    .notifications(inbox.0, inbox.1);
                if let Some(device) = &self.device {
                    builder = builder.device(device.access());
                }
                if let Some(secret) = secret {
                    builder = builder.secret(Secret::from_bytes(secret));
                }
                self.agents.push(builder.registry(self.registry.clone()).build()?);
                Reply::Number(self.agents.len() as u64 - 1)
            }
            Command::Metadata { agent } => Reply::Bytes(self.agents[agent].metadata()?),
            Command::Register { agent, name, len, backing, seed } => {
                let memory = backing.memory(len, seed, self.device.as_deref())?;
                self.regions.push(Some(self.agents[agent].register(&name, memory)?));
                Reply::Number(self.regions.len() as u64 - 1)
            }
            Command::RegisterNeighbours { agent, names, len, backing } => {
                let both = Arc::new(match backing {
                    Backing::Device => backing.memory(2 * len, None, self.device.as_deref())?,
                    Backing::Pool | Backing::Owned | Backing::Shared => {
                        Memory::owned(vec![0; 2 * len])
                    }
                });
                for (at, name) in names.iter().enumerate() {
                    let (base, kept) = (both.address() + (at * len) as u64, Arc::clone(&both));
                    // SAFETY: the half lies within `both`, which the new memory keeps alive, and no
                    // references into `both` exist.
                    let half = unsafe {
                        match both.device_access().cloned() {
                            Some(access) => {
                                Memory::adopt_device(base, len, both.device(), access, kept)
                            }
                            None => Memory::adopt(base as *mut u8, len, kept),
                        }
                    };
                    self.regions.push(Some(self.agents[agent].register(name, half)?));
                }
                Reply::Number(self.regions.len() as u64 - 2)
            }
            Command::Fill { region, seed } => {
                pattern::fill(self.region(region)?.memory(), seed)?;
                Reply::Done
            }
            Command::CopyIn { region, offset, bytes } => {
                self.region(region)?.copy_in(offset, &bytes)?;
                Reply::Done
            }
            Command::CopyOut { region, offset, len } => {
                let mut bytes = vec![0; len];
                self.region(region)?.copy_out(offset, &mut bytes)?;
                Reply::Bytes(bytes)
            }
            Command::Sum { region } => {
                let region = self.region(region)?;
                let mut bytes = vec![0; region.len() as usize];
                region.copy_out(0, &mut bytes)?;
                Reply::Number(pattern::checksum(&bytes))
            }
            Command::Revoke { region, within } => {
                self.region(region)?
                    .revoke(within)
                    .wait_blocking(within + Duration::from_secs(5))?;
                Reply::Done
            }
            Command::DropRegion { region } => {
                self.regions[region] = None;
                Reply::Done
            }
            Command::Connect { agent, metadata } => {
                self.peers.push(Some(self.agents[agent].connect(&metadata)?));
                Reply::Number(self.peers.len() as u64 - 1)
            }
            Command::Notify { peer, bytes, within } => {
                self.peer(peer)?
                    .notify(&bytes, within)
                    .wait_blocking(within + Duration::from_secs(5))?;
                Reply::Done
            }
            Command::Post { peer, post, times } => {
                let grid = Grid::packed(post.grid.0, post.grid.1);
                let local = self.region(post.region)?.grid(grid)?.blocks(Indices::from(post.local));
                let peer = self.peer(peer)?;
                let remote =
                    peer.region(&post.theirs)?.grid(grid)?.blocks(Indices::from(post.remote));
                let op = if post.write { Op::Write } else { Op::Read };
                let plan = Plan::of(op, [(local, remote)])?;
                let mut moved = 0;
                for _ in 0..times {
                    let mut posting = peer.transfer(&plan).deadline(post.within);
                    if let Some(bytes) = &post.notify {
                        posting = posting.notify(bytes);
                    }
                    moved =
                        posting.post()?.wait_blocking(post.within + Duration::from_secs(5))?.bytes;
                }
                Reply::Number(moved)
            }
            Command::Take { agent, within } => {
                Reply::Notifications(vec![self.agents[agent].notification(within).join()?.into()])
            }
            Command::TakeMany { agent, count, within } => {
                let deadline = Instant::now() + within;
                let mut taken = Vec::new();
                while taken.len() < count {
                    match self.agents[agent].notification(deadline).join() {
                        Ok(notification) => taken.push(notification.into()),
                        Err(error) if error.kind() == ErrorKind::TimedOut => break,
                        Err(error) => return Err(error),
                    }
                }
                Reply::Notifications(taken)
            }
            Command::Expect { agent, bytes, senders, within } => {
                let met = self.agents[agent]
                    .wait_for_senders(&bytes, senders, within)
                    .wait_blocking(within + Duration::from_secs(5))?;
                Reply::Senders(
                    met.into_iter()
                        .map(|from| (from.name.to_string(), from.incarnation.0))
                        .collect(),
                )
            }
            Command::Limit { what, more } => {
                limit(what, more)
                    .map_err(|error| Error::os(format!("the limit of {what}"), error))?;
                Reply::Done
            }
            Command::HangPage { region } => {
                self.hung = None; // resolves the faults of the previous page
                self.hung =
                    region.map(|number| HungPage::of(self.region(number)?.memory())).transpose()?;
                Reply::Done
            }
            Command::Fork { ends_after } => {
                let seconds = libc::c_uint::try_from(ends_after.as_secs()).unwrap_or(1);
                // SAFETY: the child only makes async-signal-safe system calls: it closes its
                // standard streams and waits for the signal that ends it.
                let child = unsafe { libc::fork() };
                if child == 0 {
                    // SAFETY: these calls take and return numbers only; the alarm ends the child.
                    unsafe {
                        (0..3).for_each(|standard| _ = libc::close(standard));
                        libc::alarm(seconds);
                        loop {
                            libc::pause();
                        }
                    }
                }
                if child < 0 {
                    return Err(Error::os("no fork", std::io::Error::last_os_error()));
                }
                Reply::Done
            }
            Command::ProcessState => {
                Reply::ProcessState(ProcessState::of_this_process_beside(&self.threads))
            }
            Command::Ready { peer, within } => {
                self.peer(peer)?.ready(within).wait_blocking(within + Duration::from_secs(5))?;
                Reply::Done
            }
            Command::DropPeer { peer } => {
                self.peers[peer] = None;
                Reply::Done
            }
            Command::ResourceUsage => Reply::ResourceUsage(
                ResourceUsage::of_this_process()
                    .map_err(|error| Error::os("the resource usage of the process", error))?,
            ),
            Command::Cpu => Reply::Number(cpu_time().as_micros() as u64),
            Command::Quarantined => Reply::Number(quarantined_bytes()),
            Command::Shutdown { agent, within } => {
                self.agents[agent]
                    .shutdown(within)
                    .wait_blocking(within + Duration::from_secs(5))?;
                Reply::Done
            }
        })
    }
}

/// Returns the CPU time that this process has used.
pub fn cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec.try_into().unwrap_or(0), time.tv_nsec.try_into().unwrap_or(0))
}

/// Serves commands from standard input until it ends. `serve_if_asked` calls it in the child.
pub(crate) fn serve(registry: Registry, device: Option<Arc<dyn Device>>, mut answers: File) {
    let mut end = FarAgents::new(registry, device);
    for line in std::io::stdin().lock().lines() {
        let Ok(line) = line else { break };
        let reply = match serde_json::from_str(&line) {
            Ok(command) => end.execute(command),
            Err(error) => Reply::Failed {
                kind: ErrorKind::Invalid.as_str().into(),
                sentence: error.to_string(),
            },
        };
        let reply = serde_json::to_string(&reply).expect("replies are JSON");
        if writeln!(answers, "{reply}").is_err() {
            break;
        }
    }
}
