//! The network of simulated agents: it carries the bytes of their connections on virtual time.
//!
//! Each end of a connection is a socket pair, whose far end the network holds. Each direction has
//! its own delays, so that lanes overtake each other; bytes arrive in pieces of any size. The
//! network belongs to its thread.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::io::{ErrorKind, Read as _, Write as _};
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr as UnixAddress, UnixListener, UnixStream};
use std::time::{Duration, Instant};

use kvx_core::backend::fork::Private;
use kvx_testkit::Random;
use rustix::io::Errno;

use crate::clock;

/// The bytes that one direction of a connection has on their way, at most.
const WINDOW: usize = 256 << 10;
/// The longest delay of bytes, in microseconds.
const DELAY: usize = 4_000;
/// The time for which one direction of a connection stalls, at most, and the time between two
/// stalls.
const STALL: (Duration, Duration) = (Duration::from_millis(400), Duration::from_secs(5));

thread_local! {
    static NETWORK: RefCell<Option<Network>> = const { RefCell::new(None) };
}

struct Network {
    random: Random,
    /// The names of the sockets that listen at addresses.
    listeners: BTreeMap<SocketAddr, Vec<u8>>,
    wires: Vec<Wire>,
    /// The largest piece that is read at a time.
    piece: Box<[u8]>,
    /// The time until which no byte arrives.
    frozen_until: Option<Instant>,
}

/// A connection.
struct Wire {
    /// The address to which it was opened.
    to: SocketAddr,
    /// The far ends of the sockets of who opened it, and of who accepted it.
    ends: [UnixStream; 2],
    /// The bytes from each of the ends to the other.
    flows: [Flow; 2],
}

#[derive(Default)]
struct Flow {
    on_the_way: VecDeque<(Instant, Vec<u8>)>,
    bytes: usize,
    stalled_until: Option<Instant>,
    /// The time at which bytes arrived last.
    arrived: Option<Instant>,
    /// True if its sender has closed the connection.
    ends: bool,
}

/// The network of this thread, which ends when it is dropped.
pub(crate) struct Running(());

impl Drop for Running {
    fn drop(&mut self) {
        NETWORK.set(None);
    }
}

/// Starts a network whose delays the seed determines.
pub(crate) fn start(seed: u64) -> Running {
    NETWORK.set(Some(Network {
        random: Random::seeded(seed),
        listeners: BTreeMap::new(),
        wires: Vec::new(),
        piece: vec![0; 64 << 10].into(),
        frozen_until: None,
    }));
    Running(())
}

/// Returns true if this thread has a network.
pub(crate) fn is_running() -> bool {
    NETWORK.with_borrow(Option::is_some)
}

fn with<T>(call: impl FnOnce(&mut Network) -> T) -> T {
    NETWORK.with_borrow_mut(|network| call(network.as_mut().expect("a network is running")))
}

/// Opens a socket that accepts the connections to `address`, in place of an earlier one.
pub(crate) fn listen(address: SocketAddr) -> Private {
    let name = kvx_core::backend::random_key().expect("random numbers are available").to_vec();
    let address_of_socket = UnixAddress::from_abstract_name(&name).expect("a short name");
    let listener = UnixListener::bind_addr(&address_of_socket).expect("the name is free");
    listener.set_nonblocking(true).expect("it is open");
    with(|network| network.listeners.insert(address, name));
    Private::from(OwnedFd::from(listener))
}

/// Connects to `address`, as the machine does.
pub(crate) fn connect(address: SocketAddr) -> Result<Private, Errno> {
    with(|network| {
        let name = network.listeners.get(&address).ok_or(Errno::CONNREFUSED)?;
        let listener = UnixAddress::from_abstract_name(name).expect("a short name");
        let there = UnixStream::connect_addr(&listener).map_err(|_| Errno::CONNREFUSED)?;
        let (near, here) = UnixStream::pair().expect("descriptors are available");
        for socket in [&near, &here, &there] {
            socket.set_nonblocking(true).expect("it is open");
            network.limit_buffer(socket);
        }
        let flows = Default::default();
        network.wires.push(Wire { to: address, ends: [here, there], flows });
        Ok(Private::from(OwnedFd::from(near)))
    })
}

/// Gives a socket that was accepted a buffer of any size, so that calls send less than they could.
pub(crate) fn tune(socket: &Private) {
    with(|network| network.limit_buffer(socket));
}

/// Carries bytes that are due. Returns true if any moved, or a connection ended.
pub(crate) fn carry() -> bool {
    with(|network| {
        let now = clock::now();
        if network.frozen_until.is_some_and(|until| now < until) {
            return false;
        }
        network.frozen_until = None;
        let Network { random, wires, piece, .. } = network;
        let mut moved = false;
        for wire in &mut *wires {
            for from in 0..2 {
                moved |= wire.carry(from, now, piece, random);
            }
        }
        let count = wires.len();
        wires.retain(|wire| !wire.flows.iter().any(|flow| flow.ends && flow.bytes == 0));
        moved || wires.len() < count
    })
}

/// Returns the time at which bytes are due next.
pub(crate) fn next_event() -> Option<Instant> {
    with(|network| {
        let flows = network.wires.iter().flat_map(|wire| &wire.flows);
        let due = flows.flat_map(|flow| {
            let first = flow.on_the_way.front().map(|(at, _)| *at);
            let stall = flow.stalled_until;
            first.map(|at| stall.map_or(at, |stall| stall.max(at))).into_iter().chain(stall)
        });
        let now = clock::now();
        match network.frozen_until {
            Some(until) => Some(until),
            None => due.filter(|at| *at > now).min(),
        }
    })
}

/// Stalls a direction of a connection that has not stalled lately.
pub(crate) fn stall() {
    with(|network| {
        let Network { random, wires, .. } = network;
        let at = random.below(wires.len());
        let Some(wire) = wires.get_mut(at) else { return };
        let flow = &mut wire.flows[random.below(2)];
        let now = clock::now();
        if flow.stalled_until.is_none_or(|until| until + STALL.1 < now) {
            flow.stalled_until = Some(now + STALL.0.mul_f64(random.below(100) as f64 / 100.0));
        }
    });
}

/// Cuts a connection; bytes on their way are lost. Returns the address to which it was opened.
pub(crate) fn cut() -> Option<SocketAddr> {
    with(|network| {
        let at = network.random.below(network.wires.len());
        (at < network.wires.len()).then(|| network.wires.remove(at).to)
    })
}

/// Lets nothing arrive until then, no end of a connection either.
pub(crate) fn freeze(until: Instant) {
    with(|network| network.frozen_until = Some(until));
}

/// Returns true while nothing arrives.
pub(crate) fn is_frozen() -> bool {
    with(|network| network.frozen_until.is_some_and(|until| clock::now() < until))
}

/// Ends all stalls and freezes.
pub(crate) fn heal() {
    with(|network| {
        network.frozen_until = None;
        for wire in &mut network.wires {
            wire.flows.iter_mut().for_each(|flow| flow.stalled_until = None);
        }
    });
}

/// Returns when bytes arrived last over the connections to `address`, at who opened them.
pub(crate) fn last_arrival(address: SocketAddr) -> Option<Instant> {
    with(|network| {
        let wires = network.wires.iter().filter(|wire| wire.to == address);
        wires.filter_map(|wire| wire.flows[1].arrived).max()
    })
}

/// Returns the number of connections.
pub(crate) fn connections() -> usize {
    with(|network| network.wires.len())
}

impl Network {
    fn limit_buffer(&mut self, socket: impl AsFd) {
        // The kernel doubles the size and has a minimum.
        let size = [1, 8 << 10, 64 << 10][self.random.below(3)];
        rustix::net::sockopt::set_socket_send_buffer_size(socket, size).expect("it is open");
    }
}

impl Wire {
    /// Carries bytes from one end to the other. Returns true if any moved.
    fn carry(&mut self, from: usize, now: Instant, piece: &mut [u8], random: &mut Random) -> bool {
        let Wire { ends, flows, .. } = self;
        let flow = &mut flows[from];
        let mut moved = false;
        while !flow.ends && flow.bytes < WINDOW {
            let most = [1 + random.below(100), 1 + random.below(5000), piece.len()];
            let most = most[random.below(3)];
            match (&ends[from]).read(&mut piece[..most]) {
                Ok(count) if count > 0 => {
                    let last = flow.on_the_way.back().map_or(now, |(at, _)| *at);
                    let delay =
                        Duration::from_micros([0, random.below(DELAY)][random.below(2)] as u64);
                    flow.on_the_way.push_back((last.max(now + delay), piece[..count].to_vec()));
                    flow.bytes += count;
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                _ => flow.ends = true, // closed, perhaps with unread bytes
            }
            moved = true;
        }
        if flow.stalled_until.is_some_and(|until| now < until) {
            return moved;
        }
        while let Some((at, bytes)) = flow.on_the_way.front_mut()
            && *at <= now
        {
            match (&ends[1 - from]).write(bytes) {
                Ok(count) => {
                    (moved, flow.arrived) = (true, Some(now));
                    flow.bytes -= count;
                    bytes.drain(..count);
                    if bytes.is_empty() {
                        flow.on_the_way.pop_front();
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(_) => {
                    // The receiver has closed the connection.
                    flow.on_the_way.clear();
                    (flow.bytes, flow.ends, moved) = (0, true, true);
                }
            }
        }
        moved
    }
}
