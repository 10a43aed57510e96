//! The property of every listener, and attacks that test it.
//!
//! An unauthenticated peer can neither evict, starve nor outlast an authenticated one. Its cost is
//! at most 4 times what it has sent plus 256 KiB for each connection, in memory, and the listener
//! keeps a bounded number of its connections. Authenticated peers may cost a fixed budget more.
//!
//! The listener runs in another process, so that all memory counts, also that of native libraries.
//! Its clients work without a pause while the attackers act one way after the other: lengths
//! without content, a crowd of silent connections, random bytes, halves of messages, messages of
//! the greatest length, answers that are not read, single bytes, and connections that close at
//! once.

mod attackers;
mod clients;
mod sockets;
mod usage;

use std::fmt;
use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_reuseaddr, set_socket_timeout};
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, connect, socket_with};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use self::attackers::{Attacker, Attackers, LETTER, drip};
pub use self::clients::Client;
use self::clients::{Rounds, work_until};
pub use self::sockets::listening_addresses;
use self::usage::{PeakUsage, ServerUsage, watch_until};
use crate::check::{CUT_OFF, Check, Failure, ensure};
use crate::stopwatch::Stopwatch;

/// The memory that a byte from an attacker may cost.
const PER_BYTE: u64 = 4;
/// The memory that a connection of an attacker may cost.
const PER_CONNECTION: u64 = 256 << 10;
/// The memory that the work of clients may cost beside what it had cost before.
const CLIENT_MEMORY: u64 = 8 << 20;
/// The descriptors that the work of clients may need at a time.
const CLIENT_DESCRIPTORS: u64 = 32;
/// The threads that a runtime may start for the work of clients.
const CLIENT_THREADS: u64 = 8;
/// The address space of a thread's stack and of its share of the heap.
const THREAD: u64 = 12 << 20;
/// The memory that an allocator may keep after the attack.
const KEPT_MEMORY: u64 = 32 << 20;
/// The descriptors that clients may add and not close, beyond [`Bounds::spare`].
const KEPT_DESCRIPTORS: u64 = 4;
/// How long a client may take to do its first work, and all of them for a round.
const PATIENCE: Duration = Duration::from_secs(30);
/// How late a time limit may end a connection.
const LATE: Duration = Duration::from_millis(1500);
/// The number of rounds of the clients before the first measurement.
const WARM_UP: usize = 3;
/// The number of connections of each attack but the crowd.
const FEW: usize = 16;
/// The number of connections of attacks whose connections stay open until the end.
const HELD: usize = 8;
/// How long connections open and close without a pause.
const STORM: Duration = Duration::from_secs(1);
/// The number of bytes that an attacker sends of the longest message, and of random ones.
const LONGEST: usize = 1 << 20;
const RANDOM: usize = 64 << 10;
/// The number of connections whose answers are not read, and the bytes that each sends at most. A
/// debug build takes a second to answer that much.
const UNREAD_CONNECTIONS: usize = 2;
const UNREAD: usize = 4 << 20;
/// The number of ports from which a connection is tried.
const PORTS_TRIED: usize = 32;
/// The number of descriptors that this process needs at most.
const DESCRIPTORS: u64 = 4096;
/// How long a connection may wait to be accepted before an attacker tries the next one.
pub const ATTACKER_CONNECTS: Duration = Duration::from_millis(250);

/// How an attacker connects.
type Connect<'a> = dyn Fn() -> io::Result<OwnedFd> + Sync + 'a;

/// A listener in another process, and its clients.
pub struct Listener<'a> {
    /// The name for failures and for the table of results.
    pub name: &'static str,
    /// The process that listens.
    pub process: u32,
    /// The bounds that it keeps.
    pub bounds: Bounds,
    /// The authenticated clients.
    pub clients: Vec<Client<'a>>,
}

/// The bytes of attackers.
#[derive(Clone, Debug, Default)]
pub struct AttackBytes {
    /// The bytes that precede all others on a connection, such as the greeting of a protocol.
    /// Silent attackers and those with random bytes omit it.
    pub prelude: Vec<u8>,
    /// A complete message. Attackers send it, half of it, and as often as the listener reads.
    pub message: Vec<u8>,
    /// The beginnings of messages that name a great length.
    pub claims: Vec<Vec<u8>>,
    /// The beginning of the longest message. Attackers add letters, many at once or one at a time.
    pub longest: Vec<u8>,
}

/// The bounds of a listener.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// The number of connections of attackers that the listener keeps.
    pub connections: usize,
    /// The descriptors that it needs for each of them.
    pub descriptors: u64,
    /// The number of silent connections that the crowd opens.
    pub crowd: usize,
    /// The longest life of an attacker's connection. `None`: longer than a test may take.
    pub time: Option<Duration>,
    /// True if a connection with complete messages may stay.
    pub idle: bool,
    /// The time limit for the work of a client.
    pub deadline: Duration,
    /// The descriptors that clients which begin to work during the attack may keep.
    pub spare: u64,
    /// The memory that authenticated attackers may cost beside their bytes and connections.
    pub budget: u64,
}

impl Bounds {
    /// Returns the bounds for a number of unauthenticated connections, each for at most this time.
    /// The crowd is larger.
    pub fn new(connections: usize, time: Duration) -> Self {
        Bounds {
            connections,
            descriptors: 1,
            crowd: connections + connections / 4 + 64,
            time: Some(time),
            idle: false,
            deadline: Duration::from_secs(2),
            spare: 0,
            budget: 0,
        }
    }

    /// Returns the bounds for a listener that limits neither the number of its connections nor
    /// their time. The crowd opens `crowd` connections, and each work of a client has this deadline.
    pub fn unlimited(crowd: usize, deadline: Duration) -> Self {
        let limited = Bounds::new(crowd, deadline);
        Bounds { crowd, time: None, idle: true, deadline, ..limited }
    }

    /// Returns the least number of descriptors that connections need which only the time limit
    /// ends: silent ones, and those that send single bytes.
    fn held(&self) -> u64 {
        self.descriptors * self.connections.min(2 * FEW) as u64
    }
}

/// The highest cost of an attack, and its bounds.
#[derive(Clone, Copy, Debug)]
pub struct Cost {
    name: &'static str,
    memory: u64,
    allowed: u64,
    descriptors: u64,
    threads: u64,
    connections: u64,
    slowest: Duration,
    took: Duration,
}

impl fmt::Display for Cost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Cost { name, memory, allowed, descriptors, threads, connections, slowest, took } = self;
        let (memory, allowed) = (memory >> 10, allowed >> 10);
        write!(
            f,
            "{name}: {memory} of {allowed} KiB, {descriptors} descriptors and {threads} threads \
             for {connections} connections; the slowest work took {slowest:.0?}; {took:.1?}"
        )
    }
}

/// Connects from an address of this host within a time limit.
///
/// # Errors
/// Those of the operating system, or `InProgress` if the connection is not accepted in time.
pub fn connect_from(
    from: Ipv4Addr,
    to: impl Into<SocketAddr>,
    limit: Duration,
) -> io::Result<TcpStream> {
    let to = to.into();
    for _ in 0..PORTS_TRIED {
        let socket =
            socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
        // Otherwise a server could not listen at this port for a minute after the connection.
        set_socket_reuseaddr(&socket, true)?;
        bind(&socket, &SocketAddr::from((from, 0)))?;
        set_socket_timeout(&socket, Timeout::Send, Some(limit))?;
        match connect(&socket, &to) {
            // A connection of this port to the same server has just ended.
            Err(Errno::ADDRNOTAVAIL) => continue,
            result => result?,
        }
        set_socket_timeout(&socket, Timeout::Send, None)?;
        return Ok(socket.into());
    }
    Err(io::ErrorKind::AddrNotAvailable.into())
}

/// Lets this process open as many descriptors as an attack needs.
fn allow_descriptors() -> Check {
    let limit = getrlimit(Resource::Nofile);
    let wanted = limit.maximum.map_or(DESCRIPTORS, |most| most.min(DESCRIPTORS));
    if limit.current.is_some_and(|current| current < wanted) {
        setrlimit(Resource::Nofile, Rlimit { current: Some(wanted), maximum: limit.maximum })
            .map_err(io::Error::from)?;
    }
    Ok(())
}

impl Listener<'_> {
    /// Attacks the listener by connections that `connect` opens, while its clients work. Run it in
    /// a test with its own process, whose limit of descriptors it raises. Returns the cost.
    ///
    /// # Errors
    /// The bound that does not hold, with the attack that showed it.
    pub fn attack(
        mut self,
        connect: impl Fn() -> io::Result<OwnedFd> + Sync,
        bytes: &AttackBytes,
    ) -> Result<Cost, Failure> {
        allow_descriptors()?;
        let began = Instant::now();
        for _ in 0..WARM_UP {
            self.clients.iter_mut().try_for_each(|client| client.work(PATIENCE).map(drop))?;
        }
        let Listener { name, process, bounds, mut clients } = self;
        let before = usage::settled(process)?;
        usage::reset_peak(process)?;
        let (end, peak, rounds) = (AtomicBool::new(false), PeakUsage::default(), Rounds::default());
        let attackers = &Attackers::new(&connect);
        let siege = Siege { process, bounds, attackers, before, peak: &peak, rounds: &rounds };
        let attacked = std::thread::scope(|scope| {
            let _ended = SetOnDrop(&end);
            scope.spawn(|| watch_until(process, &peak, &end));
            scope.spawn(|| work_until(&mut clients, bounds.deadline, &rounds, &end));
            siege.run(bytes)
        });
        attacked.map_err(|why| Failure::new(format!("{name}: {why}")))?;
        let highest = peak.highest();
        Ok(Cost {
            name,
            memory: highest.peak.saturating_sub(before.resident),
            allowed: siege.allowed_memory(),
            descriptors: highest.descriptors.saturating_sub(before.descriptors),
            threads: highest.threads.saturating_sub(before.threads),
            connections: attackers.most(),
            slowest: rounds.slowest(),
            took: began.elapsed(),
        })
    }
}

/// Sets a flag when it is dropped, also by a panic.
struct SetOnDrop<'a>(&'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// An attack on a listener.
struct Siege<'a> {
    process: u32,
    bounds: Bounds,
    attackers: &'a Attackers<'a>,
    before: ServerUsage,
    peak: &'a PeakUsage,
    rounds: &'a Rounds,
}

impl<'a> Siege<'a> {
    fn run(&self, bytes: &AttackBytes) -> Check {
        let (allowed, held) = (self.bounds.spare + KEPT_DESCRIPTORS, self.bounds.held());
        ensure!(
            self.bounds.time.is_none() || allowed < held,
            "{allowed} descriptors that clients may keep would hide {held} connections that \
             outlast their time limit"
        );
        let AttackBytes { prelude, message, claims, longest } = bytes;
        let say = |count, parts: &[&[u8]]| self.attackers.say(count, parts);
        // Attacks with few bytes come first: bytes that were sent allow memory.
        for claim in claims {
            self.stage("lengths without content", say(FEW, &[prelude, claim]))?;
        }
        let crowd = self.stage("silent connections", say(self.bounds.crowd, &[]))?;
        let (came, places) = (crowd.len(), self.bounds.connections);
        ensure!(
            came > places || self.bounds.crowd <= places,
            "a crowd of {came} does not fill the {places} places"
        );
        drop(crowd);
        self.connections_end("their end", &Stopwatch::start()?, Duration::ZERO)?;
        self.stage("random bytes", self.attackers.say_random(FEW, RANDOM))?;
        let silent = say(FEW, &[]);
        let half = &message[..message.len() / 2];
        let halves = self.stage("half messages", say(HELD, &[prelude, half]))?;
        let letters = vec![LETTER; LONGEST];
        let long = self.stage("the longest message", say(HELD, &[prelude, longest, &letters]))?;
        let unread = say(UNREAD_CONNECTIONS, &[prelude]);
        attackers::repeat(&unread, message, UNREAD);
        let unread = self.stage("unread answers", unread)?;
        // Connections that may stay are closed, so that those left over have to end.
        let unread = (!self.bounds.idle).then_some(unread);
        let slow = say(FEW, &[prelude, longest]);
        self.outlast(&slow, bytes)?;
        drop((silent, halves, long, unread, slow));
        self.rounds.next(PATIENCE)?;
        self.resources_return()
    }

    /// Lets the clients work during an attack, and checks its cost.
    fn stage(
        &self,
        attack: &str,
        connections: Vec<Attacker<'a>>,
    ) -> Result<Vec<Attacker<'a>>, Failure> {
        ensure!(!connections.is_empty(), "{attack}: no attacker has connected");
        self.holds(attack)?;
        Ok(connections)
    }

    fn holds(&self, attack: &str) -> Check {
        let in_attack = |why: Failure| Failure::new(format!("{attack}: {why}"));
        self.rounds.next(PATIENCE).map_err(in_attack)?;
        self.costs_are_bounded().map_err(in_attack)
    }

    /// Checks the cost since the beginning.
    fn costs_are_bounded(&self) -> Check {
        self.peak.add(ServerUsage::of(self.process)?);
        let (highest, before, bounds) = (self.peak.highest(), self.before, self.bounds);
        let (connections, sent) = (self.attackers.most(), self.attackers.sent());
        let kept = connections.min(bounds.connections as u64);
        let allowed =
            before.descriptors + kept * bounds.descriptors + CLIENT_DESCRIPTORS + bounds.spare;
        ensure!(
            highest.descriptors <= allowed,
            "the server had {} descriptors, {allowed} are allowed: {} before, and {kept} of \
             {connections} connections",
            highest.descriptors,
            before.descriptors
        );
        let allowed = before.threads + CLIENT_THREADS;
        ensure!(
            highest.threads <= allowed,
            "the server had {} threads, {allowed} are allowed",
            highest.threads
        );
        let threads = highest.threads.saturating_sub(before.threads);
        let allowed = self.allowed_memory();
        for (what, more) in [
            ("resident", highest.peak.saturating_sub(before.resident)),
            ("allocated", highest.data.saturating_sub(before.data + threads * THREAD)),
        ] {
            ensure!(
                more <= allowed,
                "the server had {} KiB more {what} memory, {} are allowed for {connections} \
                 connections and {} KiB that they have sent",
                more >> 10,
                allowed >> 10,
                sent >> 10
            );
        }
        Ok(())
    }

    fn allowed_memory(&self) -> u64 {
        PER_BYTE * self.attackers.sent()
            + PER_CONNECTION * self.attackers.most()
            + CLIENT_MEMORY
            + self.bounds.budget
    }

    /// Opens and closes connections while others send single bytes, and checks that all connections
    /// that still exist end in time.
    fn outlast(&self, slow: &[Attacker<'_>], bytes: &AttackBytes) -> Check {
        let (watch, opened, end) = (Stopwatch::start()?, Instant::now(), AtomicBool::new(false));
        std::thread::scope(|scope| {
            let _ended = SetOnDrop(&end);
            scope.spawn(|| drip(slow, &end));
            self.attackers.storm(bytes, opened + STORM);
            self.holds("connections that close at once")?;
            match self.bounds.time {
                Some(time) => self.connections_end("their time limit", &watch, time),
                None => Ok(()),
            }
        })
    }

    /// Waits until the server has closed the connections of attackers that have reached an end.
    fn connections_end(&self, end: &str, watch: &Stopwatch, time: Duration) -> Check {
        let allowed = self.before.descriptors + KEPT_DESCRIPTORS + self.bounds.spare;
        loop {
            let now = ServerUsage::of(self.process)?.descriptors;
            if now <= allowed {
                return Ok(());
            }
            let took = watch.read();
            ensure!(
                took.within(time + LATE),
                "connections of attackers outlast {end}: the server has {now} descriptors after \
                 {took}, {allowed} are allowed"
            );
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Waits until the server has what it had before.
    fn resources_return(&self) -> Check {
        let (until, before) = (Instant::now() + CUT_OFF, self.before);
        loop {
            let now = ServerUsage::of(self.process)?;
            let spare = self.bounds.spare;
            let beyond = [
                ("descriptors", now.descriptors, before.descriptors + KEPT_DESCRIPTORS + spare),
                ("threads", now.threads, before.threads + CLIENT_THREADS),
                ("bytes of memory", now.resident, before.resident + KEPT_MEMORY),
            ];
            let Some((what, held, allowed)) = beyond.into_iter().find(|(_, now, most)| now > most)
            else {
                return Ok(());
            };
            ensure!(
                Instant::now() < until,
                "after the attack the server keeps {held} {what}, {allowed} are allowed"
            );
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}
