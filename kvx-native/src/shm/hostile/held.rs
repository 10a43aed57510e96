//! Tests of the memory that an owner holds for peers: each process has a budget, and so have all
//! together.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvx_backend::control::violations::greet;
use kvx_backend::control::{ControlMessage as Shared, HeldBytes};
use kvx_backend::reactor::Outbox;
use kvx_core::backend::{
    Context, Events, Invitation, IpcHandle, LinkId, LinkState, PlacedGrid, QueueFull, RegionKey,
    RegionSpec,
};
use kvx_core::{
    DeviceAccess as _, ErrorKind, Grid, Identity, Incarnation, Memory, MemoryKind, Options,
    RegionId, Result, Sender,
};
use kvx_testkit::{TestDevice, newcomers_amid};
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use super::{
    CUT_OFF, NO_PROBE, Raw, a_good_client_works, agent, in_place_of, invitation, memory_file,
    sealed, socket_of, target,
};
use crate::described::Described;
use crate::shm::config::Config;
use crate::shm::handshake::MAX_GREETING_RETRIES;
use crate::shm::machine::Machine;
use crate::shm::memory::Regions;
use crate::shm::messages::{Location, Message, RegionAccess};
use crate::shm::socket;

/// Another process, as the kernel sees it: it connected the sockets of this test, and sleeps.
struct Another(std::process::Child);

impl Another {
    fn to(name: &[u8], connections: usize) -> (Self, Vec<Raw>) {
        let fresh = || {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
                .unwrap()
        };
        let sockets: Vec<OwnedFd> = (0..connections).map(|_| fresh()).collect();
        let numbers: Vec<_> = sockets.iter().map(AsRawFd::as_raw_fd).collect();
        let name = SocketAddrUnix::new_abstract_name(name).unwrap();
        let mut command = std::process::Command::new("sleep");
        // SAFETY: between fork and exec the closure only calls connect and sched_yield, which are
        // async-signal-safe; the sockets are open.
        unsafe {
            command.arg("100").pre_exec(move || {
                for number in &numbers {
                    let socket = BorrowedFd::borrow_raw(*number);
                    // Until there is space in the queue of clients.
                    while let Err(why) = rustix::net::connect(socket, &name) {
                        if why != Errno::AGAIN {
                            return Err(why.into());
                        }
                        rustix::thread::sched_yield();
                    }
                }
                Ok(())
            });
        }
        let another = Another(command.spawn().unwrap());
        (another, sockets.into_iter().map(|socket| Raw(socket.into())).collect())
    }
}

impl Drop for Another {
    fn drop(&mut self) {
        self.0.kill().ok(); // it may already have ended
        self.0.wait().ok();
    }
}

/// Sends more notifications than these tests' agents have capacity for, and than a link's window
/// allows.
fn park(raw: &Raw) -> bool {
    (0..16).all(|number| raw.pour(&notice(number), 1))
}

fn notice(notice: u64) -> Vec<u8> {
    Shared::Notify { notice, bytes: &[7; 64 << 10] }.encode()
}

#[test]
fn a_process_has_one_budget_for_all_its_connections_and_new_clients_are_served() {
    let (target, region) = target();
    let metadata = target.metadata().unwrap();
    let first = Raw::shaken(&target);
    assert!(park(&first), "the agent's queue is full from here on");
    let (_another, raws) = Another::to(&metadata[socket_of(&metadata)], 55);
    for raw in &raws {
        raw.say(&raw.greet(&invitation(&target), || ())).unwrap();
    }
    let cut_off = newcomers_amid(
        || agent("newcomer"),
        &metadata,
        || {
            let lend = |id| {
                let access = RegionAccess { len: 1, at: Location::File };
                Message::Lend { id: RegionId(id), access }.encode()
            };
            // Half a MiB of lent regions in addition to a MiB of notifications.
            let goes_on = |raw: &Raw| park(raw) && (0..2_000).all(|id| raw.pour(&lend(id), 1));
            let cut_off = raws.iter().filter(|raw| !goes_on(raw));
            cut_off.count()
        },
    );
    assert!((5..=30).contains(&cut_off), "{cut_off} of 55 were disconnected");
    a_good_client_works(&target, &region);
    while target.try_notification().is_some() {}
    first.send(Shared::Ping, None);
    while !matches!(
        Shared::decode(&first.next().expect("the first process has its own budget")),
        Ok(Shared::Alive)
    ) {}
    target.shutdown(CUT_OFF).wait_blocking(CUT_OFF).unwrap();
}

fn is_closed(raw: &Raw) -> bool {
    let mut polled = [PollFd::new(&raw.0, PollFlags::empty())];
    let now = rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 };
    rustix::event::poll(&mut polled, Some(&now)).unwrap() > 0
}

/// Another process opens half-open connections without end, silent or with half a handshake. The
/// oldest one is a different process's.
#[test]
fn a_process_closes_no_half_open_connection_but_its_own() {
    let (target, region) = target();
    let metadata = target.metadata().unwrap();
    let name = &metadata[socket_of(&metadata)];
    let ours = Raw::to(&target);
    let (_another, raws) = Another::to(name, 260);
    for raw in &raws[250..] {
        raw.say(&greet(&invitation(&target), None, &NO_PROBE.hello_rest()).unwrap().1).ok();
    }
    let (_more, more) = Another::to(name, 40);
    // All but 256 are closed.
    let until = Instant::now() + CUT_OFF;
    let all = || raws.iter().chain(&more).chain([&ours]);
    while all().filter(|raw| is_closed(raw)).count() < 45 {
        assert!(Instant::now() < until, "half-open connections are not bounded");
        std::thread::yield_now();
    }
    assert!(!is_closed(&ours), "another process closed this one's connection");
    ours.say(&ours.greet(&invitation(&target), || ())).unwrap();
    assert!(ours.is_served());
    a_good_client_works(&target, &region);
    target.shutdown(CUT_OFF).wait_blocking(CUT_OFF).unwrap();
}

/// A target with too many half-open connections closes one of them before it has read the hello.
#[test]
fn an_initiator_whose_connection_is_closed_in_the_handshake_greets_again() {
    let owner = agent("owner");
    let (metadata, listener) = in_place_of(&owner);
    let reader = agent("reader");
    let peer = reader.connect(metadata).unwrap();
    for _ in 0..3 {
        drop(Raw::accepted(&listener));
    }
    let raw = Raw::accepted(&listener);
    raw.welcome(&owner, &NO_PROBE);
    peer.ready(CUT_OFF).wait_blocking(CUT_OFF).unwrap();
    // A target that never welcomes it is lost.
    let (metadata, listener) = in_place_of(&owner);
    let patient = agent("patient");
    let peer = patient.connect(metadata).unwrap();
    for _ in 0..=MAX_GREETING_RETRIES {
        drop(Raw::accepted(&listener));
    }
    let lost = peer.ready(CUT_OFF).wait_blocking(CUT_OFF).unwrap_err();
    assert_eq!(lost.kind(), kvx_core::ErrorKind::PeerLost, "{lost}");
    for agent in [reader, patient, owner] {
        agent.shutdown(CUT_OFF).wait_blocking(CUT_OFF).unwrap();
    }
}

/// The connections of one process lend as many mappings as they like. Beyond the limit of mappings
/// the kernel would start no thread for this process any more.
#[test]
fn a_process_lends_a_bounded_number_of_mappings_over_all_its_connections() {
    const LIMIT: usize = 4096;
    let mut machine = machine(64 << 20, 256 << 20);
    let file = memory_file(4096, sealed());
    let raws: Vec<Raw> = (0..3).map(|_| shaken(&mut machine)).collect();
    let mut most: usize = 0;
    for raw in &raws {
        for id in 0..2_500 {
            let access = RegionAccess { len: 4096, at: Location::File };
            let lend = Message::Lend { id: RegionId(id), access }.encode();
            if socket::send(raw.0.as_fd(), &lend, Some(file.as_fd())).is_err() {
                break; // it was disconnected
            }
            turns(&mut machine);
            most = most.max(machine.connections.iter().map(|(_, one)| one.lent.mappings()).sum());
        }
    }
    assert_eq!(most, LIMIT, "mappings");
    assert!(!machine.held.is_empty(), "mappings are not counted");
    // A new process is served.
    let (_another, others) = Another::to(&machine.socket_name(), 1);
    shake(&mut machine, &others[0]);
    assert!(is_served(&mut machine, &others[0]));
}

#[test]
fn peers_that_lend_device_memory_and_leave_do_not_fill_the_queue_of_a_busy_device() {
    let busy = TestDevice::new(MemoryKind::Cuda);
    busy.hold_openings();
    let mut machine = machine(6 << 20, 10 << 20);
    machine.devices = vec![Arc::clone(&busy) as _];
    let lend = |id| {
        let handle = IpcHandle { bytes: vec![7; 64], offset: 0 };
        let at = Location::Device { device: busy.device(), handle };
        Message::Lend { id: RegionId(id), access: RegionAccess { len: 64, at } }.encode()
    };
    for id in 0..80 {
        let raw = shaken(&mut machine);
        (0..2).for_each(|more| raw.say(&lend(2 * id + more)).unwrap());
        turns(&mut machine);
        drop(raw);
        turns(&mut machine);
        machine.take_device_reports(&mut Outbox::default());
    }
    assert_eq!(busy.held_openings(), 64);
    // The next one is refused, and served.
    let raw = shaken(&mut machine);
    raw.say(&lend(1)).unwrap();
    turns(&mut machine);
    machine.take_device_reports(&mut Outbox::default());
    let answer = raw.next().expect("an answer");
    assert!(matches!(Shared::decode(&answer), Ok(Shared::Released { id: RegionId(1) })));
    assert!(is_served(&mut machine, &raw));
    for done in busy.hold_openings() {
        done(Err(ErrorKind::Unsupported.because("it cannot be opened")));
    }
    machine.take_device_reports(&mut Outbox::default());
    raw.say(&lend(2)).unwrap();
    turns(&mut machine);
    assert_eq!(busy.held_openings(), 1, "it opens memory again");
}

/// An agent without space for notifications.
struct Full;

impl Events for Full {
    fn notification(&self, _: Sender<'_>, _: &[u8]) -> Result<(), QueueFull> {
        Err(QueueFull)
    }
    fn link(&self, _: LinkId, _: LinkState) {}
}

const INVITED: Invitation = Invitation::from_bytes([5; 32]);
const KEY: RegionKey = RegionKey([8; 16]);
const BLOCKS: u32 = 6000;

/// Returns a machine that the test drives, with these limits for one peer and for all, and with a
/// region.
fn machine(one_peer: usize, all_peers: usize) -> Machine {
    let options = Options::new();
    let config = Config::read(&options).unwrap();
    let context = Context {
        agent: Identity { name: "full".into(), incarnation: Incarnation([1; 16]) },
        options,
        events: Arc::new(Full),
        devices: Vec::new(),
        invitation: INVITED,
        secret: None,
        peer_timeout: CUT_OFF,
    };
    let regions = Arc::new(Regions::default());
    let memory = Arc::new(Memory::owned(vec![0; BLOCKS as usize]));
    regions.open(RegionSpec { id: RegionId(1), key: KEY, memory }, None);
    let mut machine = Machine::new(context, config, regions).unwrap();
    machine.held = HeldBytes::of(one_peer, all_peers);
    machine
}

fn turns(machine: &mut Machine) {
    for _ in 0..3 {
        kvx_backend::fuzz::turn(machine, &mut Outbox::default());
    }
}

/// Completes the handshake of a connected client.
fn shake(machine: &mut Machine, raw: &Raw) {
    let proof = raw.greet(&INVITED, || turns(machine));
    raw.say(&proof).unwrap();
    turns(machine);
}

/// Connects a client of this process.
fn shaken(machine: &mut Machine) -> Raw {
    let raw = Raw(socket::connect(&machine.socket_name()).unwrap());
    shake(machine, &raw);
    raw
}

/// Returns true if a ping gets an answer, and checks that this takes less than a second.
fn is_served(machine: &mut Machine, raw: &Raw) -> bool {
    let begun = Instant::now();
    let asked = raw.say(&Shared::Ping.encode()).is_ok();
    turns(machine);
    assert!(begun.elapsed() < Duration::from_secs(1), "it waited {:?}", begun.elapsed());
    asked && raw.next().is_some()
}

#[test]
fn all_processes_have_one_budget_and_the_greediest_loses_its_connections() {
    let mut machine = machine(6 << 20, 10 << 20);
    let name = machine.socket_name();
    let mut others = vec![Raw(socket::connect(&name).unwrap())];
    let mut processes = Vec::new();
    // The second process has most when the third connects.
    for connections in [3, 4, 4] {
        let (process, raws) = Another::to(&name, connections);
        processes.push(process);
        others.extend(raws);
    }
    for raw in &others {
        shake(&mut machine, raw);
        for number in 0..16 {
            raw.say(&notice(number)).ok(); // the connection may end before all are sent
            turns(&mut machine);
        }
    }
    let served: Vec<bool> = others.iter().map(|raw| is_served(&mut machine, raw)).collect();
    assert_eq!(served, [[true; 4].as_slice(), &[false; 4], &[true; 4]].concat());
    drop((processes, others));
    let until = Instant::now() + CUT_OFF;
    while !machine.connections.is_empty() {
        assert!(Instant::now() < until, "the ends of the processes are not noticed");
        turns(&mut machine);
    }
    assert!(machine.held.is_empty());
}

#[test]
fn unread_answers_count_until_the_peer_reads_them() {
    let mut machine = machine(1 << 20, 4 << 20);
    let modest = shaken(&mut machine);
    let ask = |machine: &mut Machine, raw: &Raw| {
        let asked = raw.say(&Shared::Ping.encode());
        turns(machine);
        asked.is_ok()
    };
    let taking = shaken(&mut machine);
    while machine.held.is_empty() {
        assert!(ask(&mut machine, &taking));
    }
    let mut taken = 0;
    while !machine.held.is_empty() {
        assert!(taken < 100_000 && taking.next().is_some(), "answers that were read stay counted");
        taken += 1;
        turns(&mut machine);
    }
    let deaf = shaken(&mut machine);
    while machine.held.is_empty() {
        assert!(ask(&mut machine, &deaf));
    }
    // Each answer counts 128 bytes here.
    let asked = (0..16_000).take_while(|_| ask(&mut machine, &deaf)).count();
    assert!((4_000..9_000).contains(&asked), "{asked} answers were kept");
    assert!(is_served(&mut machine, &modest));
    assert!(machine.held.is_empty());
}

/// Returns a write with some 48 KiB of blocks, in memory that is lent as region 1.
fn part(write: u64) -> Vec<u8> {
    let grids = [PlacedGrid { region: 0, grid: Grid::packed(1, BLOCKS) }];
    let side = || Described {
        regions: vec![(RegionId(1), KEY)],
        grids: grids.into(),
        indices: (0..BLOCKS).rev().collect::<Vec<_>>().into(),
    };
    Message::Write { write, into: side(), from: side() }.encode()
}

fn lend(memory: &[u8]) -> Vec<u8> {
    let at = Location::Address(memory.as_ptr() as u64);
    Message::Lend { id: RegionId(1), access: RegionAccess { len: memory.len() as u64, at } }
        .encode()
}

#[test]
fn parts_of_writes_count_until_they_are_done_with_or_without_their_connection() {
    let ours = vec![7; BLOCKS as usize];
    let mut machine = machine(256 << 10, 1 << 20);
    let raw = shaken(&mut machine);
    raw.say(&lend(&ours)).unwrap();
    (1..=20).for_each(|write| raw.say(&part(write)).unwrap());
    turns(&mut machine);
    assert!(raw.next().is_none(), "the peer sent a MiB at once");
    // Only this test reports what the copying thread has done, so nothing completes before.
    let land_all = |machine: &mut Machine| {
        let until = Instant::now() + CUT_OFF;
        while machine.flights.any() {
            assert!(
                machine.copying.is_idle_by(until) && Instant::now() < until,
                "a part does not land"
            );
            for number in machine.flights.with_batch_ends() {
                machine.take_batch_ends(number, &mut Outbox::default());
            }
            turns(machine);
        }
    };
    land_all(&mut machine);
    assert!(machine.held.is_empty(), "{:?}", machine.held);
    let raw = shaken(&mut machine);
    [lend(&ours), part(1), part(2)].iter().for_each(|bytes| raw.say(bytes).unwrap());
    turns(&mut machine);
    assert!(!machine.held.is_empty());
    land_all(&mut machine);
    assert!(is_up(&machine) && machine.held.is_empty(), "{:?}", machine.held);
    drop(raw);
    turns(&mut machine);
    machine.held = HeldBytes::of(16 << 10, 1 << 20);
    let raw = shaken(&mut machine);
    [lend(&ours), part(1)].iter().for_each(|bytes| raw.say(bytes).unwrap());
    turns(&mut machine);
    assert!(is_up(&machine), "such a small amount is not counted");
    // A batch that no thread has begun would be withdrawn.
    assert!(machine.copying.is_idle_by(Instant::now() + CUT_OFF));
    socket::finish(raw.0.as_fd());
    turns(&mut machine);
    assert!(machine.connections.is_empty() && machine.flights.any() && !machine.held.is_empty());
    assert!(shaken(&mut machine).next().is_none(), "its process holds too much without it");
    land_all(&mut machine);
    assert!(machine.held.is_empty(), "{:?}", machine.held);
    let raw = shaken(&mut machine);
    assert!(is_served(&mut machine, &raw));
}

fn is_up(machine: &Machine) -> bool {
    machine.connections.iter().any(|(_, connection)| connection.is_up())
}
