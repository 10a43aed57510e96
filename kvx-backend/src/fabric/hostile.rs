//! What peers may send: anything. The machine must survive it, and keep no more than it has said.

use std::collections::HashSet;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Duration;

use super::handshake::hello_rest;
use super::machine::Machine;
use super::regions::{Regions, Registered};
use super::stream::Header;
use super::{EndpointId, Fabric, Happened, Job, LetGo, Sent};
use crate::control::{Hello, Message};
use crate::process::ProcessId;
use crate::reactor::{Armed, Outbox, Progress, Queued, Turn};
use kvx_core::Sender;
use kvx_core::transport::{Context, Events, Full, LinkState, RegionSpec, RemoteSpec};
use kvx_core::{
    Capabilities, Error, Identity, Incarnation, Kind, LinkId, Memory, Options, RegionId, RegionKey, Result,
};

/// A library that sends nothing and remembers what it was given.
#[derive(Default)]
pub(super) struct Quiet {
    sent: Vec<Vec<u8>>,
    endpoints: HashSet<EndpointId>,
    inbox: Vec<Vec<u8>>,
    foreign: Vec<Happened>,
    /// How many notifications it was told of.
    notified: usize,
    /// It lets go of no region now.
    pub(super) busy: bool,
    /// It does not say that it has ended.
    pub(super) kept: bool,
    /// It wants its own thread only.
    pub(super) alone: bool,
}

// SAFETY: it touches no memory.
unsafe impl Fabric for Quiet {
    type Local = ();
    type Remote = ();
    type State = ();

    fn connect(&mut self, endpoint: EndpointId, _: &Identity, address: &[u8]) -> Result<()> {
        if address == b"nowhere" {
            return Err(Error::new(Kind::Malformed, "no address"));
        }
        assert!(self.endpoints.insert(endpoint));
        Ok(())
    }
    fn send(&mut self, endpoint: EndpointId, message: &[u8]) -> Result<Sent> {
        assert!(self.endpoints.contains(&endpoint));
        self.sent.push(message.to_vec());
        Ok(Sent::Taken)
    }
    fn max_message(&self) -> usize {
        512
    }
    fn unpack(&mut self, _: EndpointId, _: &RemoteSpec<'_>) -> Result<()> {
        Ok(())
    }
    fn advance(&mut self, _: &mut Job<'_, Self>) -> Result<u64> {
        Ok(0)
    }
    fn sever(&mut self, _: EndpointId) {}
    fn disconnect(&mut self, endpoint: EndpointId) {
        assert!(self.endpoints.remove(&endpoint));
    }
    fn poll(&mut self, happened: &mut Vec<Happened>) -> Turn {
        happened.extend(self.inbox.drain(..).map(Happened::Message));
        happened.append(&mut self.foreign);
        Turn { own_thread_only: self.alone, ..Turn::did(happened.len()) }
    }
    fn arm(&mut self, _: bool) -> Result<Armed> {
        Ok(Armed::Sleep(None))
    }
    fn fds(&self) -> &[RawFd] {
        &[]
    }
    fn notified(&mut self) {
        self.notified += 1;
    }
    fn describe(&mut self, _: EndpointId) -> (String, Capabilities) {
        unreachable!("nobody links from here")
    }
    fn unregister(&mut self, (): &()) -> Result<LetGo> {
        Ok(if self.busy { LetGo::Later } else { LetGo::Now })
    }
    fn stop(&mut self) -> bool {
        !self.kept
    }
}

struct Nobody;

impl Events for Nobody {
    fn notification(&self, _: Sender<'_>, _: &[u8]) -> Result<(), Full> {
        Err(Full)
    }
    fn link(&self, _: LinkId, _: LinkState) {}
}

pub(super) fn identity(name: &str) -> Identity {
    Identity { name: name.into(), incarnation: Incarnation([3; 16]) }
}

const KEY: RegionKey = RegionKey([8; 16]);

pub(super) fn machine() -> Machine<Quiet> {
    let context = Context {
        agent: identity("owner"),
        options: Options::new(),
        events: Arc::new(Nobody),
        devices: Vec::new(),
        secret: None,
        peer_timeout: Duration::from_secs(10),
    };
    let regions = Arc::new(Regions::new(1));
    let memory = Arc::new(Memory::owned(vec![0; 64]));
    regions.open(Arc::new(Registered::new(RegionSpec { id: RegionId(1), key: KEY, memory }, (), 1)));
    Machine::new(context, "QUIET", Quiet::default(), regions, Arc::new(|| Ok(Vec::new()))).unwrap()
}

fn take(machine: &mut Machine<Quiet>, frame: Vec<u8>) {
    machine.fabric.inbox.push(frame);
    machine.progress(&Queued::default(), &mut Outbox::default());
}

fn hello(address: &[u8]) -> Vec<u8> {
    let hello = Hello::new(identity("stranger"), identity("owner"));
    Message::Hello { hello, rest: &hello_rest(ProcessId::this(), address) }.encode()
}

fn frame(to: u64, from: u64, place: u32, message: &[u8]) -> Vec<u8> {
    Header { to, from, place, more: false }.frame(message)
}

/// A machine with a peer: the number of its session.
fn linked() -> (Machine<Quiet>, u64) {
    let mut machine = machine();
    take(&mut machine, frame(0, 77, 0, &hello(b"somewhere")));
    let (header, part) = Header::read(&machine.fabric.sent.pop().unwrap()).map(owned).unwrap();
    assert_eq!(header.to, 77);
    assert!(matches!(Message::decode(&part), Ok(Message::Welcome { .. })));
    (machine, header.from)
}

fn owned((header, part): (Header, &[u8])) -> (Header, Vec<u8>) {
    (header, part.to_vec())
}

struct Random(u64);

impl Random {
    fn next(&mut self) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 9) as usize
    }
}

#[test]
fn the_library_is_told_of_notifications_and_of_no_other_message() {
    let (mut machine, number) = linked();
    take(&mut machine, frame(number, 77, 1, &Message::Ping.encode()));
    assert_eq!(machine.fabric.notified, 0);
    take(&mut machine, frame(number, 77, 2, &Message::Notify { notice: 1, bytes: b"here" }.encode()));
    assert_eq!(machine.fabric.notified, 1);
    machine.fabric.foreign.push(Happened::Notified { from: "python".into(), bytes: b"here".to_vec() });
    machine.progress(&Queued::default(), &mut Outbox::default());
    assert_eq!(machine.fabric.notified, 2);
    let too_long = vec![0; kvx_core::transport::MAX_FOREIGN_NOTIFICATION + 1];
    machine.fabric.foreign.push(Happened::Notified { from: "python".into(), bytes: too_long });
    machine.progress(&Queued::default(), &mut Outbox::default());
    assert_eq!(machine.fabric.notified, 2, "it was dropped");
}

#[test]
fn any_bytes_are_survived() {
    let mut random = Random(0x1234_5678_9abc_def1);
    let mut machine = machine();
    for _ in 0..20_000 {
        let len = random.next() % 80;
        let mut bytes: Vec<u8> = (0..len).map(|_| random.next() as u8).collect();
        if let Some(version) = bytes.first_mut() {
            *version = 1;
        }
        if random.next().is_multiple_of(2) {
            bytes.iter_mut().skip(1).take(8).for_each(|byte| *byte = 0);
        }
        take(&mut machine, bytes);
    }
    assert!(machine.sessions.is_empty());
    assert!(machine.greetings.len() <= 64);
}

#[test]
fn any_messages_on_a_link_are_survived() {
    for seed in 1..400_u64 {
        let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        let (mut machine, number) = linked();
        let mut place = 1;
        for _ in 0..60 {
            let id = RegionId(random.next() as u64 % 3);
            let message = match random.next() % 12 {
                0 => Message::Want { import: 1, id, key: KEY },
                1 => Message::Released { id },
                2..=6 => Message::Notify { notice: random.next() as u64, bytes: b"news" },
                7 => Message::Ping,
                8 => Message::Alive,
                9 => Message::Ack { notice: 0 },
                10 => Message::Leave,
                _ => Message::Bye,
            };
            let mut message = message.encode();
            if random.next().is_multiple_of(8) {
                let at = random.next() % message.len();
                message[at] = random.next() as u8;
            }
            take(&mut machine, frame(number, 77, place, &message));
            place += if random.next().is_multiple_of(16) { 2 } else { 1 };
        }
        assert!(machine.sessions.len() <= 1);
        assert_eq!(machine.fabric.endpoints.len(), machine.sessions.len());
    }
}

#[test]
fn what_strangers_make_us_keep_is_bounded() {
    let mut machine = machine();
    for from in 1..1_000 {
        let more = Header { to: 0, from, place: 0, more: true };
        take(&mut machine, more.frame(b"the beginning of a hello"));
    }
    assert_eq!(machine.greetings.len(), 64);
    assert!(machine.sessions.is_empty());
    let hello = hello(b"somewhere");
    for from in 10_000..15_000 {
        machine.take_frame(&frame(0, from, 0, &hello), &mut Outbox::default());
    }
    assert_eq!(machine.sessions.len(), 4096);
    // An address that leads nowhere costs nothing.
    let before = machine.fabric.endpoints.len();
    take(&mut machine, frame(0, 9, 0, &self::hello(b"nowhere")));
    assert_eq!(machine.fabric.endpoints.len(), before);
}
