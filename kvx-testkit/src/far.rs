//! The far end of a pair: agents in this process or in another one, asked in the same commands.

use std::collections::HashMap;
use std::io::BufRead as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvx_core::{
    Agent, Error, Grid, Indices, Kind, Memory, Notification, Op, Options, Peer, Place as _, Plan, Region,
    Registry, Secret, quarantined_bytes,
};
use serde::{Deserialize, Serialize};

use crate::check::Failure;
use crate::pattern;
use crate::process::Child;
use crate::surroundings::Surroundings;

/// How long a far end may take to answer a command, beyond the command's own deadline.
const PATIENCE: Duration = Duration::from_secs(20);
/// The variable by which a program learns that it is a far end, and of which variant of its registry.
pub(crate) const VARIABLE: &str = "KVX_TESTKIT_FAR";

#[derive(Clone, Debug, Serialize, Deserialize)]
enum Command {
    Agent {
        name: String,
        backends: Vec<String>,
        options: String,
        secret: Option<Vec<u8>>,
        peer_timeout: Duration,
        inbox: (usize, usize),
    },
    Metadata {
        agent: usize,
    },
    Register {
        agent: usize,
        name: String,
        len: usize,
        pool: bool,
        seed: Option<u64>,
    },
    RegisterNeighbours {
        agent: usize,
        names: [String; 2],
        len: usize,
    },
    Fill {
        region: usize,
        seed: u64,
    },
    CopyIn {
        region: usize,
        offset: usize,
        bytes: Vec<u8>,
    },
    CopyOut {
        region: usize,
        offset: usize,
        len: usize,
    },
    Sum {
        region: usize,
    },
    Revoke {
        region: usize,
        within: Duration,
    },
    DropRegion {
        region: usize,
    },
    Connect {
        agent: usize,
        metadata: Vec<u8>,
    },
    Notify {
        peer: usize,
        bytes: Vec<u8>,
        within: Duration,
    },
    Post {
        peer: usize,
        post: PostSpec,
    },
    Take {
        agent: usize,
        within: Duration,
    },
    TakeMany {
        agent: usize,
        count: usize,
        within: Duration,
    },
    Expect {
        agent: usize,
        bytes: Vec<u8>,
        senders: usize,
        within: Duration,
    },
    Cpu,
    Surroundings,
    Quarantined,
    Shutdown {
        agent: usize,
        within: Duration,
    },
}

/// A transfer that the far end is asked to post: `op` between its region and the peer's, by index lists.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PostSpec {
    /// Whether to write; else it reads.
    pub write: bool,
    /// Number of the far end's region.
    pub region: usize,
    /// Name of the region at the peer.
    pub theirs: String,
    /// Length and number of the blocks, packed, on both sides.
    pub grid: (u64, u32),
    /// The far end's own blocks.
    pub local: Vec<u32>,
    /// The peer's blocks.
    pub remote: Vec<u32>,
    /// The transfer's deadline.
    pub within: Duration,
    /// What to send after the data.
    pub notify: Option<Vec<u8>>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
enum Reply {
    Done,
    Number(u64),
    Bytes(Vec<u8>),
    Notifications(Vec<Sent>),
    Surroundings(Surroundings),
    Senders(Vec<(String, [u8; 16])>),
    Failed { kind: String, sentence: String },
}

/// A notification that the far end took.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sent {
    /// Name of the sender.
    pub name: String,
    /// Its incarnation.
    pub incarnation: [u8; 16],
    /// The bytes.
    pub bytes: Vec<u8>,
}

impl From<Notification> for Sent {
    fn from(taken: Notification) -> Self {
        let Notification { from, bytes } = taken;
        Sent { name: from.name.to_string(), incarnation: from.incarnation.0, bytes: bytes.into_vec() }
    }
}

/// The agents, regions and peers of a far end, by number.
struct End {
    registry: Registry,
    agents: Vec<Agent>,
    regions: Vec<Option<Region>>,
    peers: Vec<Peer>,
}

impl End {
    fn new(registry: Registry) -> Self {
        End { registry, agents: Vec::new(), regions: Vec::new(), peers: Vec::new() }
    }

    fn region(&self, number: usize) -> kvx_core::Result<&Region> {
        let region = self.regions.get(number).and_then(Option::as_ref);
        region.ok_or_else(|| Error::new(Kind::Invalid, "the far end has no such region"))
    }

    fn execute(&mut self, command: Command) -> Reply {
        self.try_execute(command).unwrap_or_else(|error| Reply::Failed {
            kind: error.kind().as_str().to_owned(),
            sentence: error.to_string(),
        })
    }

    fn try_execute(&mut self, command: Command) -> kvx_core::Result<Reply> {
        Ok(match command {
            Command::Agent { name, backends, options, secret, peer_timeout, inbox } => {
                let mut builder = Agent::builder(name)
                    .backends(backends)
                    .options(Options::parse(&options)?)
                    .peer_timeout(peer_timeout)
                    .notifications(inbox.0, inbox.1);
                if let Some(secret) = secret {
                    builder = builder.secret(Secret::new(secret)?);
                }
                self.agents.push(builder.build(&self.registry)?);
                Reply::Number(self.agents.len() as u64 - 1)
            }
            Command::Metadata { agent } => Reply::Bytes(self.agents[agent].metadata()?),
            Command::Register { agent, name, len, pool, seed } => {
                let memory = if pool { Memory::pool(len).build()? } else { Memory::owned(vec![0; len]) };
                if let Some(seed) = seed {
                    pattern::fill(&memory, seed)?;
                }
                self.regions.push(Some(self.agents[agent].register(&name, memory)?));
                Reply::Number(self.regions.len() as u64 - 1)
            }
            Command::RegisterNeighbours { agent, names, len } => {
                let both = Arc::new(Memory::owned(vec![0; 2 * len]));
                for (at, name) in names.iter().enumerate() {
                    // SAFETY: the half lies within `both`, which the new memory keeps alive and which lends no slices.
                    let half = unsafe { Memory::adopt(both.as_ptr().add(at * len), len, Arc::clone(&both)) };
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
                self.region(region)?.revoke(within).wait(within + Duration::from_secs(5))?;
                Reply::Done
            }
            Command::DropRegion { region } => {
                self.regions[region] = None;
                Reply::Done
            }
            Command::Connect { agent, metadata } => {
                self.peers.push(self.agents[agent].connect(&metadata)?);
                Reply::Number(self.peers.len() as u64 - 1)
            }
            Command::Notify { peer, bytes, within } => {
                self.peers[peer].notify(&bytes, within).wait(within + Duration::from_secs(5))?;
                Reply::Done
            }
            Command::Post { peer, post } => {
                let grid = Grid::packed(post.grid.0, post.grid.1);
                let local = self.region(post.region)?.grid(grid)?.blocks(Indices::from(post.local));
                let peer = &self.peers[peer];
                let remote = peer.region(&post.theirs)?.grid(grid)?.blocks(Indices::from(post.remote));
                let op = if post.write { Op::Write } else { Op::Read };
                let mut posting = peer.transfer(&Plan::of(op, [(local, remote)])?).deadline(post.within);
                if let Some(bytes) = post.notify {
                    posting = posting.notify(bytes);
                }
                let report = posting.post()?.wait(post.within + Duration::from_secs(5))?;
                Reply::Number(report.bytes)
            }
            Command::Take { agent, within } => {
                Reply::Notifications(vec![self.agents[agent].notification(within).wait()?.into()])
            }
            Command::TakeMany { agent, count, within } => {
                let deadline = Instant::now() + within;
                let mut taken = Vec::new();
                while taken.len() < count {
                    match self.agents[agent].notification(deadline).wait() {
                        Ok(notification) => taken.push(notification.into()),
                        Err(error) if error.kind() == Kind::TimedOut => break,
                        Err(error) => return Err(error),
                    }
                }
                Reply::Notifications(taken)
            }
            Command::Expect { agent, bytes, senders, within } => {
                let met = self.agents[agent]
                    .expect(&bytes, senders, within)
                    .wait(within + Duration::from_secs(5))?;
                Reply::Senders(
                    met.into_iter().map(|from| (from.name.to_string(), from.incarnation.0)).collect(),
                )
            }
            Command::Surroundings => Reply::Surroundings(Surroundings::of_this_process()),
            Command::Cpu => Reply::Number(cpu_time().as_micros() as u64),
            Command::Quarantined => Reply::Number(quarantined_bytes()),
            Command::Shutdown { agent, within } => {
                self.agents[agent].shutdown(within).wait(within + Duration::from_secs(5))?;
                Reply::Done
            }
        })
    }
}

/// CPU time that this process has used.
pub(crate) fn cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec.try_into().unwrap_or(0), time.tv_nsec.try_into().unwrap_or(0))
}

/// Serves commands from standard input until it ends; called by `serve_if_asked` in the child.
pub(crate) fn serve(registry: Registry) {
    let mut end = End::new(registry);
    for line in std::io::stdin().lock().lines() {
        let Ok(line) = line else { break };
        let reply = match serde_json::from_str(&line) {
            Ok(command) => end.execute(command),
            Err(error) => Reply::Failed { kind: Kind::Invalid.as_str().into(), sentence: error.to_string() },
        };
        println!("{}", serde_json::to_string(&reply).expect("replies are JSON"));
    }
}

enum Place {
    Here(End),
    There { child: Child, variable: String },
}

/// The far end of a pair. Answers are kvx's own results: an error comes back with its kind.
pub struct Far {
    place: Place,
    metadata_agent: usize,
}

/// How the far end's agents are built.
#[derive(Clone, Debug)]
pub(crate) struct AgentSpec {
    pub(crate) name: String,
    pub(crate) backends: Vec<String>,
    pub(crate) options: String,
    pub(crate) secret: Option<Vec<u8>>,
    pub(crate) peer_timeout: Duration,
    pub(crate) inbox: (usize, usize),
}

impl Far {
    pub(crate) fn here(registry: Registry) -> Self {
        Far { place: Place::Here(End::new(registry)), metadata_agent: 0 }
    }

    pub(crate) fn there(variant: &str) -> Result<Self, Failure> {
        let child = Child::start_self(VARIABLE, variant)?;
        Ok(Far { place: Place::There { child, variable: variant.to_owned() }, metadata_agent: 0 })
    }

    /// The process it lives in; `None` when that is this one.
    pub fn child(&mut self) -> Option<&mut Child> {
        match &mut self.place {
            Place::Here(_) => None,
            Place::There { child, .. } => Some(child),
        }
    }

    /// The process it lives in; fails in one process.
    pub fn process(&mut self) -> Result<&mut Child, Failure> {
        self.child().ok_or_else(|| Failure::new("this clause runs in two processes"))
    }

    /// Starts the process anew, without agents; the old one must have been killed.
    pub fn restart(&mut self) -> Result<(), Failure> {
        if let Place::There { child, variable } = &mut self.place {
            *child = Child::start_self(VARIABLE, variable)?;
        }
        Ok(())
    }

    fn ask(&mut self, command: Command, within: Duration) -> Result<Reply, Failure> {
        match &mut self.place {
            Place::Here(end) => Ok(end.execute(command)),
            Place::There { child, .. } => {
                child.say(
                    &serde_json::to_string(&command).map_err(|error| Failure::new(error.to_string()))?,
                )?;
                let answer = child.hear(within + PATIENCE)?;
                serde_json::from_str(&answer).map_err(|error| Failure::new(format!("{error} in {answer:?}")))
            }
        }
    }

    /// As `ask`; what kvx said at the far end comes back as the inner result.
    fn call(&mut self, command: Command, within: Duration) -> Result<kvx_core::Result<Reply>, Failure> {
        Ok(match self.ask(command, within)? {
            Reply::Failed { kind, sentence } => Err(Error::new(
                kind_of(&kind).ok_or_else(|| Failure::new(format!("unknown kind {kind}")))?,
                sentence,
            )),
            reply => Ok(reply),
        })
    }

    fn number(&mut self, command: Command) -> Result<kvx_core::Result<u64>, Failure> {
        Ok(match self.call(command, Duration::ZERO)? {
            Ok(Reply::Number(number)) => Ok(number),
            Ok(other) => return Err(Failure::new(format!("a number was wanted, it was {other:?}"))),
            Err(error) => Err(error),
        })
    }

    fn done(&mut self, command: Command, within: Duration) -> Result<kvx_core::Result<()>, Failure> {
        Ok(self.call(command, within)?.map(|_| ()))
    }

    pub(crate) fn build(&mut self, spec: AgentSpec) -> Result<kvx_core::Result<usize>, Failure> {
        let AgentSpec { name, backends, options, secret, peer_timeout, inbox } = spec;
        let command = Command::Agent { name, backends, options, secret, peer_timeout, inbox };
        Ok(self.number(command)?.map(|number| number as usize))
    }

    /// Metadata of its first agent.
    pub fn metadata(&mut self) -> Result<Vec<u8>, Failure> {
        self.metadata_of(self.metadata_agent)
    }

    /// Metadata of one of its agents.
    pub fn metadata_of(&mut self, agent: usize) -> Result<Vec<u8>, Failure> {
        match self.call(Command::Metadata { agent }, Duration::ZERO)?? {
            Reply::Bytes(bytes) => Ok(bytes),
            other => Err(Failure::new(format!("metadata was wanted, it was {other:?}"))),
        }
    }

    /// Registers `len` bytes with its first agent: a pool, or memory of the program's. Gives the region's number.
    pub fn register(
        &mut self,
        name: &str,
        len: usize,
        pool: bool,
        seed: Option<u64>,
    ) -> Result<usize, Failure> {
        let command = Command::Register { agent: 0, name: name.into(), len, pool, seed };
        Ok(self.number(command)?? as usize)
    }

    /// Registers two regions of `len` bytes each of which the second begins where the first ends. Gives the number of
    /// the first; the second has the next.
    pub fn register_neighbours(&mut self, names: [&str; 2], len: usize) -> Result<usize, Failure> {
        let command = Command::RegisterNeighbours { agent: 0, names: names.map(str::to_owned), len };
        Ok(self.number(command)?? as usize)
    }

    /// Fills a region with content `seed`.
    pub fn fill(&mut self, region: usize, seed: u64) -> Result<(), Failure> {
        Ok(self.done(Command::Fill { region, seed }, Duration::ZERO)??)
    }

    /// Copies bytes into a region.
    pub fn copy_in(&mut self, region: usize, offset: usize, bytes: &[u8]) -> Result<(), Failure> {
        Ok(self.done(Command::CopyIn { region, offset, bytes: bytes.to_vec() }, Duration::ZERO)??)
    }

    /// Copies bytes out of a region.
    pub fn copy_out(&mut self, region: usize, offset: usize, len: usize) -> Result<Vec<u8>, Failure> {
        match self.call(Command::CopyOut { region, offset, len }, Duration::ZERO)?? {
            Reply::Bytes(bytes) => Ok(bytes),
            other => Err(Failure::new(format!("bytes were wanted, it was {other:?}"))),
        }
    }

    /// Checksum of a whole region.
    pub fn sum(&mut self, region: usize) -> Result<u64, Failure> {
        Ok(self.number(Command::Sum { region })??)
    }

    /// Revokes a region; the inner result is the revocation's.
    pub fn revoke(&mut self, region: usize, within: Duration) -> Result<kvx_core::Result<()>, Failure> {
        self.done(Command::Revoke { region, within }, within)
    }

    /// Drops a region's handle.
    pub fn drop_region(&mut self, region: usize) -> Result<(), Failure> {
        Ok(self.done(Command::DropRegion { region }, Duration::ZERO)??)
    }

    /// Connects one of its agents to a peer. Gives the peer's number.
    pub fn connect(&mut self, agent: usize, metadata: &[u8]) -> Result<usize, Failure> {
        Ok(self.number(Command::Connect { agent, metadata: metadata.to_vec() })?? as usize)
    }

    /// Sends a notification to one of its peers; the inner result is the sending's.
    pub fn notify(
        &mut self,
        peer: usize,
        bytes: &[u8],
        within: Duration,
    ) -> Result<kvx_core::Result<()>, Failure> {
        self.done(Command::Notify { peer, bytes: bytes.to_vec(), within }, within)
    }

    /// Posts a transfer and waits for it; the inner result is the transfer's, with its bytes.
    pub fn post(&mut self, peer: usize, post: PostSpec) -> Result<kvx_core::Result<u64>, Failure> {
        let within = post.within;
        Ok(match self.call(Command::Post { peer, post }, within)? {
            Ok(Reply::Number(bytes)) => Ok(bytes),
            Ok(other) => return Err(Failure::new(format!("a report was wanted, it was {other:?}"))),
            Err(error) => Err(error),
        })
    }

    /// Takes a notification of its first agent.
    pub fn take(&mut self, within: Duration) -> Result<kvx_core::Result<Sent>, Failure> {
        self.take_of(0, within)
    }

    /// Takes a notification of one of its agents.
    pub fn take_of(&mut self, agent: usize, within: Duration) -> Result<kvx_core::Result<Sent>, Failure> {
        let taken = self.notifications(Command::Take { agent, within }, within)?;
        Ok(taken.and_then(|mut one| {
            one.pop().ok_or_else(|| Error::new(Kind::Malformed, "no notification came back"))
        }))
    }

    /// Takes up to `count` notifications of one of its agents, for as long as `within`.
    pub fn take_many(&mut self, agent: usize, count: usize, within: Duration) -> Result<Vec<Sent>, Failure> {
        Ok(self.notifications(Command::TakeMany { agent, count, within }, within)??)
    }

    fn notifications(
        &mut self,
        command: Command,
        within: Duration,
    ) -> Result<kvx_core::Result<Vec<Sent>>, Failure> {
        Ok(match self.call(command, within)? {
            Ok(Reply::Notifications(taken)) => Ok(taken),
            Ok(other) => return Err(Failure::new(format!("notifications were wanted, it was {other:?}"))),
            Err(error) => Err(error),
        })
    }

    /// Expects notifications at its first agent; gives the senders.
    pub fn expect(
        &mut self,
        bytes: &[u8],
        senders: usize,
        within: Duration,
    ) -> Result<kvx_core::Result<Vec<(String, [u8; 16])>>, Failure> {
        let command = Command::Expect { agent: 0, bytes: bytes.to_vec(), senders, within };
        Ok(match self.call(command, within)? {
            Ok(Reply::Senders(senders)) => Ok(senders),
            Ok(other) => return Err(Failure::new(format!("senders were wanted, they were {other:?}"))),
            Err(error) => Err(error),
        })
    }

    /// CPU time of its process.
    pub fn cpu(&mut self) -> Result<Duration, Failure> {
        Ok(Duration::from_micros(self.number(Command::Cpu)??))
    }

    /// What a library must leave alone in its process.
    pub fn surroundings(&mut self) -> Result<Surroundings, Failure> {
        match self.call(Command::Surroundings, Duration::ZERO)?? {
            Reply::Surroundings(surroundings) => Ok(surroundings),
            other => Err(Failure::new(format!("surroundings were wanted, it was {other:?}"))),
        }
    }

    /// Bytes that its process has in quarantine.
    pub fn quarantined(&mut self) -> Result<u64, Failure> {
        Ok(self.number(Command::Quarantined)??)
    }

    /// Shuts one of its agents down; the inner result is the shutdown's.
    pub fn shutdown(&mut self, agent: usize, within: Duration) -> Result<kvx_core::Result<()>, Failure> {
        self.done(Command::Shutdown { agent, within }, within)
    }
}

fn kind_of(word: &str) -> Option<Kind> {
    use Kind::*;
    let kinds = [
        Invalid,
        OutOfBounds,
        Overlap,
        Unregistered,
        WrongKey,
        Revoked,
        StillShared,
        TimedOut,
        Cancelled,
        Busy,
        PeerLost,
        PeerRestarted,
        Incompatible,
        Denied,
        NoRoute,
        UnknownBackend,
        NotCompiled,
        Unavailable,
        Unsupported,
        Exhausted,
        Malformed,
        Closed,
        Forked,
        Forgotten,
        Native,
    ];
    let by_word: HashMap<_, _> = kinds.into_iter().map(|kind| (kind.as_str(), kind)).collect();
    by_word.get(word).copied()
}
