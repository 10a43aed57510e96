//! Tests with hostile peers, which may send anything. The machine must survive that and keep no
//! more memory than its limits allow.

use std::collections::HashSet;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::handshake::hello_rest;
use super::job::Job;
use super::library::{EndpointId, Event, Fabric, SendStatus, Unregister};
use super::machine::Machine;
use super::regions::{RegionRecord, Regions};
use super::session::LONG_SILENCE;
use super::shared_link::SharedLink;
use super::stream::FrameHeader;
use crate::control::proof::Keys;
use crate::control::violations::{
    HandshakeStage, Violation, greet, greet_as, prove, random_message, violations,
};
use crate::control::{ControlMessage, HeldBytes, Silence, verify_hello};
use crate::process::ProcessId;
use crate::reactor::{Armed, Outbox, Progress, Queued, Turn};
use kvx_core::backend::sync::Mutex;
use kvx_core::backend::wire::Reader;
use kvx_core::backend::{
    Context, Events, Invitation, LinkId, LinkState, QueueFull, RegionKey, RegionSpec, RemoteSpec,
};
use kvx_core::{
    Capabilities, ErrorKind, Identity, Incarnation, Memory, Options, RegionId, Result, Sender,
};
use kvx_testkit::Random;

/// A library that sends nothing and records what it receives.
#[derive(Default)]
pub(super) struct Quiet {
    sent: Vec<Vec<u8>>,
    endpoints: HashSet<EndpointId>,
    inbox: Vec<Vec<u8>>,
    foreign: Vec<Event>,
    /// True if the fabric has no capacity for messages.
    pub(super) full: bool,
    /// True if the fabric cannot reach any endpoint.
    unreachable: bool,
    /// True if the fabric cannot unregister a region now.
    pub(super) busy: bool,
    /// True if the fabric does not confirm that it has shut down.
    pub(super) kept: bool,
    /// True if the fabric must be driven by its own thread only.
    pub(super) alone: bool,
}

// SAFETY: it touches no memory.
unsafe impl Fabric for Quiet {
    type Local = ();
    type Remote = ();
    type State = ();

    fn connect(&mut self, endpoint: EndpointId, _: &Identity, address: &[u8]) -> Result<()> {
        if address == b"nowhere" {
            return Err(ErrorKind::Malformed.because("no address"));
        }
        assert!(self.endpoints.insert(endpoint));
        Ok(())
    }
    fn send(&mut self, endpoint: EndpointId, message: &[u8]) -> Result<SendStatus> {
        assert!(self.endpoints.contains(&endpoint));
        if self.unreachable {
            return Err(ErrorKind::PeerLost.because("no route"));
        }
        if self.full {
            return Ok(SendStatus::Later);
        }
        self.sent.push(message.to_vec());
        Ok(SendStatus::Taken)
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
    fn poll(&mut self, events: &mut Vec<Event>) -> Turn {
        events.extend(self.inbox.drain(..).map(Event::Message));
        events.append(&mut self.foreign);
        Turn { own_thread_only: self.alone, ..Turn::did(events.len()) }
    }
    fn arm(&mut self, _: bool) -> Result<Armed> {
        Ok(Armed::Sleep(None))
    }
    fn fds(&self) -> &[RawFd] {
        &[]
    }
    fn describe(&mut self, _: EndpointId) -> (String, Capabilities) {
        unreachable!("this end initiates no link that comes up")
    }
    fn unregister(&mut self, (): &()) -> Result<Unregister> {
        Ok(if self.busy { Unregister::Later } else { Unregister::Now })
    }
    fn stop(&mut self) -> bool {
        !self.kept
    }
}

struct Nobody;

impl Events for Nobody {
    fn notification(&self, _: Sender<'_>, _: &[u8]) -> Result<(), QueueFull> {
        Err(QueueFull)
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
        invitation: INVITATION,
        secret: None,
        peer_timeout: Duration::from_secs(10),
    };
    let regions = Arc::new(Regions::new(1));
    let memory = Arc::new(Memory::owned(vec![0; 64]));
    regions.open(Arc::new(RegionRecord::new(
        RegionSpec { id: RegionId(1), key: KEY, memory },
        (),
        1,
    )));
    Machine::new(
        context,
        "QUIET",
        Quiet::default(),
        regions,
        Arc::new(|| Ok(Vec::new())),
        Arc::default(),
    )
    .unwrap()
}

fn take(machine: &mut Machine<Quiet>, frame: Vec<u8>) {
    machine.fabric.inbox.push(frame);
    machine.progress(&Queued::default(), &mut Outbox::default());
}

const INVITATION: Invitation = Invitation::from_bytes([4; 32]);

fn hello(address: &[u8]) -> Vec<u8> {
    greet(&INVITATION, None, &hello_rest(ProcessId::current(), address)).unwrap().1
}

fn frame(to: u64, from: u64, place: u32, message: &[u8]) -> Vec<u8> {
    FrameHeader { to, from, place, more: false }.frame(message)
}

/// Returns a machine with a peer, and the number of the peer's session.
fn linked() -> (Machine<Quiet>, u64) {
    let mut machine = machine();
    let number = link(&mut machine, ProcessId::current(), 77);
    (machine, number)
}

/// Connects a peer with this process and session number. Returns the number of the local session.
fn link(machine: &mut Machine<Quiet>, process: ProcessId, from: u64) -> u64 {
    link_as("stranger", machine, process, from)
}

/// Like [`link`], with a name.
fn link_as(name: &str, machine: &mut Machine<Quiet>, process: ProcessId, from: u64) -> u64 {
    let (greeting, hello) =
        greet_as(name, &INVITATION, None, &hello_rest(process, b"somewhere")).unwrap();
    take(machine, frame(0, from, 0, &hello));
    let (header, welcome) = sent(machine);
    assert_eq!(header.to, from);
    assert!(!machine.sessions[&header.from].is_up(), "it may be a recorded hello");
    take(machine, frame(header.from, from, 1, &prove(&greeting, &welcome).unwrap()));
    assert!(machine.sessions[&header.from].is_up());
    header.from
}

/// Returns the message that was sent last.
fn sent(machine: &mut Machine<Quiet>) -> (FrameHeader, Vec<u8>) {
    FrameHeader::read(&machine.fabric.sent.pop().unwrap()).map(owned).unwrap()
}

fn owned((header, part): (FrameHeader, &[u8])) -> (FrameHeader, Vec<u8>) {
    (header, part.to_vec())
}

/// Checks that the machine consults [`control`](crate::control), which decides why each of these
/// ends a link.
#[test]
fn a_violation_ends_its_session_without_reaching_the_library_and_others_are_served() {
    let (mut machine, good) = linked();
    let mut place = 2;
    let mut answer = |machine: &mut Machine<Quiet>, message: ControlMessage<'_>| {
        take(machine, frame(good, 77, place, &message.encode()));
        place += 1;
        sent(machine).1
    };
    let rest = hello_rest(ProcessId::current(), b"somewhere");
    for Violation { description: what, stage: after, messages: says, .. } in
        violations(&INVITATION, &rest, RegionId(1), KEY).unwrap()
    {
        let (to, first) = match after {
            HandshakeStage::Start => (0, 0),
            HandshakeStage::Welcome => {
                take(&mut machine, frame(0, 78, 0, &hello(b"somewhere")));
                (sent(&mut machine).0.from, 1)
            }
            HandshakeStage::Up => (link(&mut machine, ProcessId::current(), 78), 2),
        };
        for (place, message) in (first..).zip(&says) {
            take(&mut machine, frame(to, 78, place, message));
        }
        assert!(machine.fabric.sent.is_empty(), "{what} got an answer");
        assert!(machine.sessions.keys().eq([&good]), "{what}");
        assert_eq!(machine.fabric.endpoints.len(), 1, "{what}");
        assert_eq!(
            answer(&mut machine, ControlMessage::Ping),
            ControlMessage::Alive.encode(),
            "after {what}"
        );
    }
    let want = |key| ControlMessage::Want { import: 1, id: RegionId(1), key };
    let denied = answer(&mut machine, want(RegionKey([0; 16])));
    assert!(
        matches!(ControlMessage::decode(&denied), Ok(ControlMessage::Deny { why, .. }) if why.kind == ErrorKind::WrongKey),
        "{denied:?}"
    );
    assert_eq!(
        answer(&mut machine, want(KEY)),
        ControlMessage::Grant { import: 1, rest: b"" }.encode()
    );
}

#[test]
fn the_machine_survives_any_bytes() {
    let mut random = Random::seeded(1);
    let mut machine = machine();
    for _ in 0..20_000 {
        let len = random.below(80);
        let mut bytes: Vec<u8> = (0..len).map(|_| random.word() as u8).collect();
        if let Some(version) = bytes.first_mut() {
            *version = 1;
        }
        if random.below(2) == 0 {
            bytes.iter_mut().skip(1).take(8).for_each(|byte| *byte = 0);
        }
        take(&mut machine, bytes);
    }
    assert!(machine.sessions.is_empty());
    assert!(machine.unfinished_hellos.len() <= 64);
}

#[test]
fn the_machine_survives_any_messages_on_a_link() {
    for seed in 1..400_u64 {
        let mut random = Random::seeded(seed);
        let (mut machine, number) = linked();
        let mut place = 2;
        for _ in 0..60 {
            let id = RegionId(random.below(3) as u64);
            let message = random_message(|bound| random.below(bound), id, KEY, &[]);
            take(&mut machine, frame(number, 77, place, &message));
            place += if random.below(16) == 0 { 2 } else { 1 };
        }
        assert!(machine.sessions.len() <= 1);
        assert_eq!(machine.fabric.endpoints.len(), machine.sessions.len());
    }
}

#[test]
fn memory_for_unauthenticated_peers_is_bounded() {
    let mut machine = machine();
    for from in 1..1_000 {
        let more = FrameHeader { to: 0, from, place: 0, more: true };
        take(&mut machine, more.frame(b"the beginning of a hello"));
    }
    assert_eq!(machine.unfinished_hellos.len(), 64);
    assert!(machine.sessions.is_empty());
    let hello = hello(b"somewhere");
    // A replayed hello, again and again, does not keep genuine initiators out.
    for from in 10_000..15_000 {
        machine.take_frame(&frame(0, from, 0, &hello), &mut Outbox::default());
        machine.fabric.sent.clear();
        if from % 1_000 == 0 {
            link(&mut machine, ProcessId::current(), from + 10_000);
        }
    }
    let up = |machine: &Machine<Quiet>| {
        machine.sessions.values().filter(|session| session.is_up()).count()
    };
    assert_eq!(
        (up(&machine), machine.sessions.len()),
        (5, 64),
        "the oldest unconfirmed session is ended"
    );
    for from in 30_000..30_059 {
        link(&mut machine, ProcessId::current(), from);
    }
    assert_eq!(up(&machine), 64);
    take(&mut machine, frame(0, 40_000, 0, &hello));
    assert_eq!(up(&machine), 64, "the initiator received an error instead");
    let told = sent(&mut machine).1;
    let Ok(ControlMessage::Refuse { why, .. }) = ControlMessage::decode(&told) else {
        panic!("{told:?}")
    };
    assert_eq!(why.kind, ErrorKind::Exhausted);
    // An address that leads nowhere consumes no endpoint.
    let before = machine.fabric.endpoints.len();
    take(&mut machine, frame(0, 9, 0, &self::hello(b"nowhere")));
    assert_eq!(machine.fabric.endpoints.len(), before);
}

/// Sends `mib` frames of 1 MiB ahead of one that never arrives, so that the machine must keep them.
fn keep(machine: &mut Machine<Quiet>, (to, from): (u64, u64), mib: u32) {
    for place in 10..10 + mib {
        take(machine, FrameHeader { to, from, place, more: true }.frame(&vec![7; 1 << 20]));
    }
}

/// Creates links of the peer `name`, and fills each with the given number of MiB.
fn greedy<const N: usize>(
    machine: &mut Machine<Quiet>,
    name: &str,
    first: u64,
    mib: [u32; N],
) -> [u64; N] {
    std::array::from_fn(|at| {
        let from = first + at as u64;
        let number = link_as(name, machine, ProcessId::current(), from);
        keep(machine, (number, from), mib[at]);
        number
    })
}

/// Checks that a ping is answered within a second.
fn is_served(machine: &mut Machine<Quiet>, (to, from, place): (u64, u64, u32)) {
    let begun = Instant::now();
    take(machine, frame(to, from, place, &ControlMessage::Ping.encode()));
    assert_eq!(sent(machine).1, ControlMessage::Alive.encode());
    assert!(begun.elapsed() < Duration::from_secs(1), "it waited {:?}", begun.elapsed());
}

#[test]
fn a_peer_has_one_budget_for_all_its_links_and_others_are_served() {
    let mut machine = machine();
    let modest = link_as("modest", &mut machine, ProcessId::current(), 77);
    let greedy = greedy(&mut machine, "greedy", 100, [4; 40]);
    let alive = greedy.iter().filter(|number| machine.sessions.contains_key(number)).count();
    assert_eq!(alive, 16, "64 MiB in all");
    is_served(&mut machine, (modest, 77, 2));
}

#[test]
fn unread_answers_count_until_the_peer_reads_them() {
    let (mut machine, modest) = linked();
    machine.held = Arc::new(Mutex::new(HeldBytes::of(1 << 20, 4 << 20)));
    let deaf =
        [201, 202].map(|from| (link_as("deaf", &mut machine, ProcessId::current(), from), from));
    machine.fabric.full = true;
    let ask = |machine: &mut Machine<Quiet>, (to, from): (u64, u64), most: u32| {
        let still = |machine: &Machine<Quiet>| machine.sessions.contains_key(&to);
        let asked = (2..2 + most).take_while(|place| {
            take(machine, frame(to, from, *place, &ControlMessage::Ping.encode()));
            still(machine)
        });
        asked.count()
    };
    let first = ask(&mut machine, deaf[0], 8_000);
    let second = ask(&mut machine, deaf[1], 8_000);
    assert!(first == 8_000 && second < 8_000, "{first} and {second} answers were kept");
    assert!(
        machine.sessions.contains_key(&deaf[0].0),
        "without the other link it is within the budget"
    );
    machine.fabric.full = false;
    machine.progress(&Queued::default(), &mut Outbox::default());
    assert!(machine.held.lock().is_empty(), "nothing is held any more");
    is_served(&mut machine, (modest, 77, 2));
}

#[test]
fn all_peers_have_one_budget_over_all_lanes_and_the_greediest_loses_its_links() {
    let (mut machine, mut other) = (machine(), machine());
    machine.held = Arc::new(Mutex::new(HeldBytes::of(6 << 20, 16 << 20)));
    other.held = Arc::clone(&machine.held);
    let alive = |machine: &Machine<Quiet>, links: &[u64]| {
        links.iter().filter(|number| machine.sessions.contains_key(number)).count()
    };
    let modest = link_as("modest", &mut machine, ProcessId::current(), 77);
    keep(&mut machine, (modest, 77), 1);
    let small = greedy(&mut machine, "small", 100, [2, 1]);
    let most = greedy(&mut machine, "most", 200, [3, 2]);
    // The other peers hold their share on another lane, whose links this lane cannot end.
    let elsewhere =
        [("a", 301), ("b", 302)].map(|(name, from)| greedy(&mut other, name, from, [4]));
    assert_eq!((alive(&machine, &small), alive(&machine, &most)), (2, 2));
    assert_eq!(alive(&other, elsewhere.as_flattened()), 2);
    assert!(machine.next_look.is_some_and(|at| at <= Instant::now() + Duration::from_secs(1)));
    machine.next_look = Some(Instant::now());
    machine.progress(&Queued::default(), &mut Outbox::default());
    assert_eq!((alive(&machine, &small), alive(&machine, &most)), (2, 0));
    assert!(machine.sessions[&modest].is_up());
    is_served(&mut machine, (modest, 77, 2));
    // All unconfirmed peers count as one, whatever names they claim.
    for from in 400..410 {
        let rest = hello_rest(ProcessId::current(), b"somewhere");
        let (_, hello) = greet_as(&from.to_string(), &INVITATION, None, &rest).unwrap();
        take(&mut machine, frame(0, from, 0, &hello));
        let to = sent(&mut machine).0.from;
        keep(&mut machine, (to, from), 1);
        let half_open = machine.sessions.values().filter(|session| !session.is_up()).count();
        assert!(half_open <= 6, "{half_open} hold a MiB each");
    }
    assert_eq!((alive(&machine, &small), machine.sessions[&modest].is_up()), (2, true));
}

#[test]
fn bytes_held_before_a_peer_confirmed_are_released_with_its_session() {
    let mut machine = machine();
    let (greeting, hello) =
        greet(&INVITATION, None, &hello_rest(ProcessId::current(), b"somewhere")).unwrap();
    take(&mut machine, frame(0, 500, 0, &hello));
    let (header, welcome) = sent(&mut machine);
    keep(&mut machine, (header.from, 500), 1);
    take(&mut machine, frame(header.from, 500, 1, &prove(&greeting, &welcome).unwrap()));
    machine.cut_off(
        header.from,
        ErrorKind::Malformed.because("on purpose"),
        &mut Outbox::default(),
    );
    assert!(machine.held.lock().is_empty());
}

/// Initiators on another host, whose processes cannot be watched.
#[test]
fn silent_initiators_are_asked_and_only_those_that_answer_stay() {
    let elsewhere = ProcessId::decode(&mut Reader::new("process", &[1; 36])).unwrap();
    let mut machine = machine();
    machine.peer_timeout = Duration::from_millis(40);
    // All sessions are taken. The machine asks none of them for a minute.
    let numbers: Vec<u64> = (1..=64).map(|from| link(&mut machine, elsewhere, from)).collect();
    let (from, lives) = (64, numbers[63]);
    take(
        &mut machine,
        frame(
            lives,
            from,
            2,
            &ControlMessage::Want { import: 1, id: RegionId(1), key: KEY }.encode(),
        ),
    );
    machine.fabric.sent.clear();
    machine.next_look = Some(Instant::now());
    machine.progress(&Queued::default(), &mut Outbox::default());
    assert!(machine.fabric.sent.is_empty());
    assert!(machine.next_look.is_some_and(|at| at > Instant::now() + LONG_SILENCE / 2));
    // A minute later.
    let age = |machine: &mut Machine<Quiet>| {
        let silent = || Silence::new(Instant::now() - LONG_SILENCE);
        machine.sessions.values_mut().for_each(|session| session.silence = silent());
        machine.next_look = Some(Instant::now());
    };
    age(&mut machine);
    let (mut place, mut asked) = (3, HashSet::new());
    let until = Instant::now() + Duration::from_secs(10);
    while machine.sessions.len() > 1 {
        assert!(Instant::now() < until, "{} are left", machine.sessions.len());
        machine.progress(&Queued::default(), &mut Outbox::default());
        for sent in std::mem::take(&mut machine.fabric.sent) {
            let (header, part) = FrameHeader::read(&sent).map(owned).unwrap();
            if matches!(ControlMessage::decode(&part), Ok(ControlMessage::Ping)) {
                assert!(asked.insert(header.to), "{} was asked twice", header.to);
                if header.to == from {
                    take(&mut machine, frame(lives, from, place, &ControlMessage::Alive.encode()));
                    place += 1;
                }
            }
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(asked.len(), 64);
    assert!(machine.sessions[&lives].is_up() && machine.fabric.endpoints.len() == 1);
    assert!(machine.lost_peers.is_empty(), "the lost peers held nothing");
    // A new peer can connect, and the live one is asked again after another minute.
    link(&mut machine, elsewhere, 1_000);
    age(&mut machine);
    machine.progress(&Queued::default(), &mut Outbox::default());
    assert!(machine.next_look.is_some_and(|at| at < Instant::now() + LONG_SILENCE / 2));
}

#[test]
fn a_link_whose_proof_cannot_be_sent_does_not_come_up() {
    let mut machine = machine();
    let keys = Keys::new(&INVITATION, None);
    let link = SharedLink::new(LinkId(1), identity("target"), Some(keys.clone()), 1);
    let link = Arc::new(link);
    machine.connect(Arc::clone(&link), b"somewhere", &mut Outbox::default());
    let (header, hello) = sent(&mut machine);
    let Ok(ControlMessage::Hello { versions, body }) = ControlMessage::decode(&hello) else {
        panic!("{hello:?}")
    };
    let Ok(verified) = verify_hello(&keys, versions, body) else { panic!("it was invited") };
    let mut process = Vec::new();
    ProcessId::current().encode(&mut process);
    let (version, body, _) = verified.welcome.complete(&keys, &process).unwrap();
    let welcome = ControlMessage::Welcome { version, body: &body }.encode();
    machine.fabric.unreachable = true;
    take(&mut machine, frame(header.from, 77, 0, &welcome));
    assert!(machine.sessions.is_empty() && machine.fabric.endpoints.is_empty());
    assert_eq!(link.gone().kind(), ErrorKind::PeerLost);
}

#[test]
fn a_peer_that_does_not_confirm_is_removed_in_time() {
    let mut machine = machine();
    take(&mut machine, frame(0, 77, 0, &hello(b"somewhere")));
    let Some(session) = machine.sessions.values_mut().next() else { panic!("it was greeted") };
    session.phase = super::session::Phase::Greeting(Instant::now());
    machine.next_look = Some(Instant::now());
    machine.progress(&Queued::default(), &mut Outbox::default());
    assert!(machine.sessions.is_empty(), "its time is over");
}
