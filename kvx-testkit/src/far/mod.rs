//! The far end of a pair: agents in this process or in another one, asked in the same commands.

mod end;
mod words;

use std::sync::Arc;
use std::time::Duration;

use kvx_core::{Error, Kind, Registry};

use self::end::End;
use self::words::{Command, Reply, kind_of};
use crate::check::Failure;
use crate::device::Device;
use crate::process::Child;
use crate::setup::Backing;
use crate::surroundings::Surroundings;

pub(crate) use self::end::serve;
pub use self::words::{PostSpec, Sent};

/// How long a far end may take to answer a command, beyond the command's own deadline.
const PATIENCE: Duration = Duration::from_secs(20);
/// The variable by which a program learns that it is a far end, and of which variant of its registry.
pub(crate) const VARIABLE: &str = "KVX_TESTKIT_FAR";

/// The suite by whose label it finds its device, if it has one.
pub(crate) const SUITE: &str = "KVX_TESTKIT_SUITE";

enum Location {
    SameProcess(End),
    OtherProcess { child: Child, started: Vec<(&'static str, String)> },
}

/// The far end of a pair. Answers are kvx's own results: an error comes back with its kind.
pub struct Far {
    place: Location,
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
    pub(crate) fn in_this_process(registry: Registry, device: Option<Arc<dyn Device>>) -> Self {
        Far { place: Location::SameProcess(End::new(registry, device)) }
    }

    /// `suite`: whose device it has.
    pub(crate) fn there(variant: &str, suite: Option<&str>) -> Result<Self, Failure> {
        let mut started = vec![(VARIABLE, variant.to_owned())];
        started.extend(suite.map(|suite| (SUITE, suite.to_owned())));
        Ok(Far { place: Location::OtherProcess { child: Child::start_self_with(&started)?, started } })
    }

    /// The process it lives in; `None` when that is this one.
    pub fn child(&mut self) -> Option<&mut Child> {
        match &mut self.place {
            Location::SameProcess(_) => None,
            Location::OtherProcess { child, .. } => Some(child),
        }
    }

    /// The process it lives in; fails in one process.
    pub fn process(&mut self) -> Result<&mut Child, Failure> {
        self.child().ok_or_else(|| Failure::new("this clause runs in two processes"))
    }

    /// Starts the process anew, without agents; the old one must have been killed.
    pub fn restart(&mut self) -> Result<(), Failure> {
        if let Location::OtherProcess { child, started } = &mut self.place {
            *child = Child::start_self_with(started)?;
        }
        Ok(())
    }

    fn ask(&mut self, command: Command, within: Duration) -> Result<Reply, Failure> {
        match &mut self.place {
            Location::SameProcess(end) => Ok(end.execute(command)),
            Location::OtherProcess { child, .. } => {
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
        self.metadata_of(0)
    }

    /// Metadata of one of its agents.
    pub fn metadata_of(&mut self, agent: usize) -> Result<Vec<u8>, Failure> {
        match self.call(Command::Metadata { agent }, Duration::ZERO)?? {
            Reply::Bytes(bytes) => Ok(bytes),
            other => Err(Failure::new(format!("metadata was wanted, it was {other:?}"))),
        }
    }

    /// Registers `len` bytes with its first agent. Gives the region's number.
    pub fn register(
        &mut self,
        name: &str,
        len: usize,
        backing: Backing,
        seed: Option<u64>,
    ) -> Result<usize, Failure> {
        let command = Command::Register { agent: 0, name: name.into(), len, backing, seed };
        Ok(self.number(command)?? as usize)
    }

    /// Registers two regions of `len` bytes each of which the second begins where the first ends. Gives the number of
    /// the first; the second has the next.
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
