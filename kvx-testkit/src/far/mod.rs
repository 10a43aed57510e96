//! The far end of a pair: agents in this process or in another one, controlled by the same
//! commands.

mod agents;
mod commands;
mod limits;

use std::sync::Arc;
use std::time::Duration;

use kvx_core::{Error, ErrorKind, Registry};

use self::agents::FarAgents;
use self::commands::{Command, Reply, kind_of};
use crate::backing::Backing;
use crate::check::Failure;
use crate::device::Device;
use crate::process::Child;
use crate::process_state::{ProcessState, ResourceUsage};

pub use self::agents::cpu_time;
pub(crate) use self::agents::serve;
pub(crate) use self::commands::AgentSpec;
pub use self::commands::{PostSpec, ReceivedNotification};
pub(crate) use self::limits::limit;
pub use self::limits::{HungPage, Limit};

/// How long a far end may take to reply, beyond the command's own deadline.
const PATIENCE: Duration = Duration::from_secs(20);
/// The variable that makes a program a far end, and that names the variant of its registry.
pub(crate) const VARIABLE: &str = "KVX_TESTKIT_FAR";

/// The variable that names the suite whose device the far end uses, if it has one.
pub(crate) const SUITE: &str = "KVX_TESTKIT_SUITE";

enum FarProcess {
    SameProcess(FarAgents),
    OtherProcess { child: Child, start: StartCommand },
}

/// How to start the far end's process.
struct StartCommand {
    variables: Vec<(&'static str, String)>,
    through: Vec<String>,
}

impl StartCommand {
    fn run(&self) -> Result<Child, Failure> {
        Child::start_self_through(&self.through, &self.variables)
    }
}

/// The far end of a pair. Its replies are kvx's own results: an error keeps its kind.
pub struct FarEnd {
    process: FarProcess,
}

impl FarEnd {
    pub(crate) fn in_this_process(registry: Registry, device: Option<Arc<dyn Device>>) -> Self {
        FarEnd { process: FarProcess::SameProcess(FarAgents::new(registry, device)) }
    }

    /// Creates a far end in another process. `suite` is the label of the suite whose device it
    /// uses; `through` is the program, with its arguments, that starts the process.
    pub(crate) fn there(
        variant: &str,
        suite: Option<&str>,
        through: &[String],
    ) -> Result<Self, Failure> {
        let mut variables = vec![(VARIABLE, variant.to_owned())];
        variables.extend(suite.map(|suite| (SUITE, suite.to_owned())));
        let start = StartCommand { variables, through: through.to_vec() };
        Ok(FarEnd { process: FarProcess::OtherProcess { child: start.run()?, start } })
    }

    /// Returns the far end's process; `None` if that is this one.
    pub fn child(&mut self) -> Option<&mut Child> {
        match &mut self.process {
            FarProcess::SameProcess(_) => None,
            FarProcess::OtherProcess { child, .. } => Some(child),
        }
    }

    /// Returns the far end's process; fails if that is this one.
    pub fn process(&mut self) -> Result<&mut Child, Failure> {
        self.child().ok_or_else(|| Failure::new("this clause runs in two processes"))
    }

    /// Starts the process again, without agents. The old process must have been killed.
    pub fn restart(&mut self) -> Result<(), Failure> {
        if let FarProcess::OtherProcess { child, start } = &mut self.process {
            *child = start.run()?;
        }
        Ok(())
    }

    fn ask(&mut self, command: Command, within: Duration) -> Result<Reply, Failure> {
        match &mut self.process {
            FarProcess::SameProcess(end) => Ok(end.execute(command)),
            FarProcess::OtherProcess { .. } => {
                self.tell(&command)?;
                self.answer(within)
            }
        }
    }

    /// Sends a command to the far end's process without waiting for the [`answer`](FarEnd::answer).
    fn tell(&mut self, command: &Command) -> Result<(), Failure> {
        let line =
            serde_json::to_string(command).map_err(|error| Failure::new(error.to_string()))?;
        self.process()?.say(&line)
    }

    fn answer(&mut self, within: Duration) -> Result<Reply, Failure> {
        let answer = self.process()?.hear(within + PATIENCE)?;
        serde_json::from_str(&answer)
            .map_err(|error| Failure::new(format!("{error} in {answer:?}")))
    }

    /// Sends a command and waits for the reply; kvx's result at the far end is the inner result.
    fn call(
        &mut self,
        command: Command,
        within: Duration,
    ) -> Result<kvx_core::Result<Reply>, Failure> {
        self.ask(command, within).and_then(said_by_kvx)
    }

    fn number(&mut self, command: Command) -> Result<kvx_core::Result<u64>, Failure> {
        number_in(self.call(command, Duration::ZERO)?)
    }

    fn done(
        &mut self,
        command: Command,
        within: Duration,
    ) -> Result<kvx_core::Result<()>, Failure> {
        Ok(self.call(command, within)?.map(|_| ()))
    }

    pub(crate) fn build(&mut self, spec: AgentSpec) -> Result<kvx_core::Result<usize>, Failure> {
        Ok(self.number(Command::Agent(spec))?.map(|number| number as usize))
    }

    /// Returns the metadata of its first agent.
    pub fn metadata(&mut self) -> Result<Vec<u8>, Failure> {
        self.metadata_of(0)
    }

    /// Returns the metadata of one of its agents.
    pub fn metadata_of(&mut self, agent: usize) -> Result<Vec<u8>, Failure> {
        match self.call(Command::Metadata { agent }, Duration::ZERO)?? {
            Reply::Bytes(bytes) => Ok(bytes),
            other => Err(Failure::new(format!("expected metadata, got {other:?}"))),
        }
    }

    /// Registers `len` bytes with its first agent. Returns the region's number.
    pub fn register(
        &mut self,
        name: &str,
        len: usize,
        backing: Backing,
        seed: Option<u64>,
    ) -> Result<usize, Failure> {
        self.register_of(0, name, len, backing, seed)
    }

    /// Registers `len` bytes with one of its agents. Returns the region's number.
    pub fn register_of(
        &mut self,
        agent: usize,
        name: &str,
        len: usize,
        backing: Backing,
        seed: Option<u64>,
    ) -> Result<usize, Failure> {
        let command = Command::Register { agent, name: name.into(), len, backing, seed };
        Ok(self.number(command)?? as usize)
    }

    /// Registers `len` bytes with one of its agents, which may fail; the inner result is that of
    /// kvx.
    pub(crate) fn try_register_of(
        &mut self,
        agent: usize,
        name: &str,
        len: usize,
        backing: Backing,
    ) -> Result<kvx_core::Result<u64>, Failure> {
        self.number(Command::Register { agent, name: name.into(), len, backing, seed: None })
    }

    /// Registers two adjacent regions of `len` bytes each. Returns the number of the first; the
    /// second has the next number.
    pub fn register_neighbours(
        &mut self,
        names: [&str; 2],
        len: usize,
        backing: Backing,
    ) -> Result<usize, Failure> {
        let names = names.map(str::to_owned);
        let command = Command::RegisterNeighbours { agent: 0, names, len, backing };
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
    pub fn copy_out(
        &mut self,
        region: usize,
        offset: usize,
        len: usize,
    ) -> Result<Vec<u8>, Failure> {
        match self.call(Command::CopyOut { region, offset, len }, Duration::ZERO)?? {
            Reply::Bytes(bytes) => Ok(bytes),
            other => Err(Failure::new(format!("expected bytes, got {other:?}"))),
        }
    }

    /// Returns the checksum of a whole region.
    pub fn sum(&mut self, region: usize) -> Result<u64, Failure> {
        Ok(self.number(Command::Sum { region })??)
    }

    /// Revokes a region; the inner result is that of the revocation.
    pub fn revoke(
        &mut self,
        region: usize,
        within: Duration,
    ) -> Result<kvx_core::Result<()>, Failure> {
        self.done(Command::Revoke { region, within }, within)
    }

    /// Drops a region's handle.
    pub fn drop_region(&mut self, region: usize) -> Result<(), Failure> {
        Ok(self.done(Command::DropRegion { region }, Duration::ZERO)??)
    }

    /// Connects one of its agents to a peer. Returns the peer's number.
    pub fn connect(&mut self, agent: usize, metadata: &[u8]) -> Result<usize, Failure> {
        Ok(self.number(Command::Connect { agent, metadata: metadata.to_vec() })?? as usize)
    }

    /// Waits until the link to one of its peers is up; the inner result is that of the wait.
    pub fn ready(
        &mut self,
        peer: usize,
        within: Duration,
    ) -> Result<kvx_core::Result<()>, Failure> {
        self.done(Command::Ready { peer, within }, within)
    }

    /// Drops the handle of one of its peers.
    pub fn drop_peer(&mut self, peer: usize) -> Result<(), Failure> {
        Ok(self.done(Command::DropPeer { peer }, Duration::ZERO)??)
    }

    /// Sends a notification to one of its peers; the inner result is that of kvx.
    pub fn notify(
        &mut self,
        peer: usize,
        bytes: &[u8],
        within: Duration,
    ) -> Result<kvx_core::Result<()>, Failure> {
        self.done(Command::Notify { peer, bytes: bytes.to_vec(), within }, within)
    }

    /// Posts a transfer and waits for it; the inner result is that of the transfer, with its bytes.
    pub fn post(&mut self, peer: usize, post: PostSpec) -> Result<kvx_core::Result<u64>, Failure> {
        let within = post.within;
        number_in(self.call(Command::Post { peer, post, times: 1 }, within)?)
    }

    /// Makes the far end's process post a transfer `times` times, one after the other, until one
    /// fails. Does not wait: [`posted`](FarEnd::posted) returns the result of the last.
    pub fn begin_posts(&mut self, peer: usize, post: PostSpec, times: u32) -> Result<(), Failure> {
        self.tell(&Command::Post { peer, post, times })
    }

    /// Returns the result of the transfers that [`begin_posts`](FarEnd::begin_posts) started.
    pub fn posted(&mut self, within: Duration) -> Result<kvx_core::Result<u64>, Failure> {
        number_in(self.answer(within).and_then(said_by_kvx)?)
    }

    /// Takes a notification of its first agent.
    pub fn take(
        &mut self,
        within: Duration,
    ) -> Result<kvx_core::Result<ReceivedNotification>, Failure> {
        self.take_of(0, within)
    }

    /// Takes a notification of one of its agents.
    pub fn take_of(
        &mut self,
        agent: usize,
        within: Duration,
    ) -> Result<kvx_core::Result<ReceivedNotification>, Failure> {
        let taken = self.notifications(Command::Take { agent, within }, within)?;
        Ok(taken.and_then(|mut one| {
            one.pop().ok_or_else(|| ErrorKind::Malformed.because("no notification was returned"))
        }))
    }

    /// Takes up to `count` notifications of one of its agents, waiting for at most `within`.
    pub fn take_many(
        &mut self,
        agent: usize,
        count: usize,
        within: Duration,
    ) -> Result<Vec<ReceivedNotification>, Failure> {
        Ok(self.notifications(Command::TakeMany { agent, count, within }, within)??)
    }

    fn notifications(
        &mut self,
        command: Command,
        within: Duration,
    ) -> Result<kvx_core::Result<Vec<ReceivedNotification>>, Failure> {
        Ok(match self.call(command, within)? {
            Ok(Reply::Notifications(taken)) => Ok(taken),
            Ok(other) => {
                return Err(Failure::new(format!("expected notifications, got {other:?}")));
            }
            Err(error) => Err(error),
        })
    }

    /// Waits for notifications at its first agent; returns the senders.
    pub fn wait_for_senders(
        &mut self,
        bytes: &[u8],
        senders: usize,
        within: Duration,
    ) -> Result<kvx_core::Result<Vec<(String, [u8; 16])>>, Failure> {
        let command = Command::Expect { agent: 0, bytes: bytes.to_vec(), senders, within };
        Ok(match self.call(command, within)? {
            Ok(Reply::Senders(senders)) => Ok(senders),
            Ok(other) => {
                return Err(Failure::new(format!("expected senders, got {other:?}")));
            }
            Err(error) => Err(error),
        })
    }

    /// Sets whether its process may open more files.
    pub fn open_files(&mut self, more: bool) -> Result<(), Failure> {
        self.limit(Limit::Files, more)
    }

    /// Sets whether its process may have more of a resource than it has now.
    pub fn limit(&mut self, what: Limit, more: bool) -> Result<(), Failure> {
        Ok(self.done(Command::Limit { what, more }, Duration::ZERO)??)
    }

    /// Leaves the faults of a page of this region, which must be memory of the program, unresolved
    /// until the next call; `None` resolves them.
    pub fn hang_page(&mut self, region: Option<usize>) -> Result<(), Failure> {
        Ok(self.done(Command::HangPage { region }, Duration::ZERO)??)
    }

    /// Makes its process fork a child that does nothing, holds what it inherits, and ends after
    /// this time.
    pub fn fork(&mut self, ends_after: Duration) -> Result<(), Failure> {
        Ok(self.done(Command::Fork { ends_after }, Duration::ZERO)??)
    }

    /// Returns the CPU time of its process.
    pub fn cpu(&mut self) -> Result<Duration, Failure> {
        Ok(Duration::from_micros(self.number(Command::Cpu)??))
    }

    /// Returns the resource usage of its process.
    pub fn holdings(&mut self) -> Result<ResourceUsage, Failure> {
        match self.call(Command::ResourceUsage, Duration::ZERO)?? {
            Reply::ResourceUsage(holdings) => Ok(holdings),
            other => Err(Failure::new(format!("expected holdings, got {other:?}"))),
        }
    }

    /// Returns the state of its process that a library must not change.
    pub fn surroundings(&mut self) -> Result<ProcessState, Failure> {
        match self.call(Command::ProcessState, Duration::ZERO)?? {
            Reply::ProcessState(surroundings) => Ok(surroundings),
            other => Err(Failure::new(format!("expected surroundings, got {other:?}"))),
        }
    }

    /// Returns the number of bytes that its process has in quarantine.
    pub fn quarantined(&mut self) -> Result<u64, Failure> {
        Ok(self.number(Command::Quarantined)??)
    }

    /// Shuts down one of its agents; the inner result is that of the shutdown.
    pub fn shutdown(
        &mut self,
        agent: usize,
        within: Duration,
    ) -> Result<kvx_core::Result<()>, Failure> {
        self.done(Command::Shutdown { agent, within }, within)
    }
}

/// Converts a reply into kvx's result at the far end.
fn said_by_kvx(reply: Reply) -> Result<kvx_core::Result<Reply>, Failure> {
    match reply {
        Reply::Failed { kind, sentence } => {
            let known =
                kind_of(&kind).ok_or_else(|| Failure::new(format!("unknown kind {kind}")))?;
            Ok(Err(Error::new(known, sentence)))
        }
        reply => Ok(Ok(reply)),
    }
}

fn number_in(said: kvx_core::Result<Reply>) -> Result<kvx_core::Result<u64>, Failure> {
    match said {
        Ok(Reply::Number(number)) => Ok(Ok(number)),
        Ok(other) => Err(Failure::new(format!("expected a number, got {other:?}"))),
        Err(error) => Ok(Err(error)),
    }
}
