//! The listeners of TCP and SHM under attack.

use std::io;
use std::net::Ipv4Addr;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use kvx_backend::control::violations::greet;
use kvx_core::backend::Invitation;
use kvx_core::{Agent, Memory, Options, Registry, Secret};
use kvx_testkit::{
    ATTACKER_CONNECTS, AttackBytes, Bounds, Failure, Listener, connect_from, readers, test,
};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

use crate::ends::child::{self, Other};
use crate::tcp_pair::raw::{BARE, HELLO, NOTIFY, PING, READ, Raw, address_in, frame, fresh, hello};

/// The variable with a child's role: the kind of its listener.
const ROLE: &str = "KVX_LISTENER_TEST_ROLE";
/// The time limit of a handshake, over both transports.
const HANDSHAKE: Duration = Duration::from_secs(5);
/// How long a crowd may wait for a place in the backlog of a Unix socket.
const BACKLOG: Duration = Duration::from_millis(250);

/// The kinds of owners and readers.
#[derive(Clone, Copy, Debug)]
enum Kind {
    Tcp,
    /// TCP without a secret and without encryption, where the metadata suffices to authenticate.
    BareTcp,
    Shm,
}

impl Kind {
    fn agent(self, name: &str) -> Agent {
        let mut registry = Registry::new();
        registry.add(kvx_native::Shm).and_then(|registry| registry.add(kvx_native::Tcp)).unwrap();
        let builder = Agent::builder(name).registry(registry);
        let secret = Secret::from_bytes([3; 32]);
        let builder = match self {
            Kind::Tcp => builder.backends(["TCP"]).secret(secret),
            Kind::BareTcp => builder.backends(["TCP"]).options(Options::parse(BARE).unwrap()),
            Kind::Shm => builder.backends(["SHM"]).secret(secret),
        };
        builder.build().unwrap()
    }
}

/// Owns a region until the parent ends, if the process was started for that.
pub(crate) fn play_if_asked() {
    let Some((role, mut line)) = child::role(ROLE) else { return };
    let kinds = [Kind::Tcp, Kind::BareTcp, Kind::Shm];
    let kind = kinds.into_iter().find(|kind| format!("{kind:?}") == role).unwrap();
    let owner = kind.agent("owner");
    let _region = owner.register("kv", Memory::pool(64 << 10).build().unwrap()).unwrap();
    line.say(&owner.metadata().unwrap());
    line.hear();
    std::process::exit(0);
}

/// Attacks an owner in another process. `connection` opens a connection to the owner with this
/// metadata.
fn attack(
    name: &'static str,
    kind: Kind,
    connection: impl Fn(&[u8]) -> io::Result<OwnedFd> + Sync,
    bytes: &AttackBytes,
    bounds: Bounds,
) -> Result<(), Failure> {
    let mut owner = Other::start(ROLE, &format!("{kind:?}"));
    let metadata = owner.hear();
    let cost = Listener {
        name,
        process: owner.pid().cast_unsigned(),
        bounds,
        clients: readers(|| kind.agent("reader"), &metadata)?,
    }
    .attack(|| connection(&metadata), bytes)?;
    eprintln!("{cost}");
    Ok(())
}

/// Returns the header of a frame that names this length.
fn claim(kind: u8, len: u32) -> Vec<u8> {
    let mut header = frame(kind, 1, &[]);
    header[4..8].copy_from_slice(&len.to_le_bytes());
    header
}

#[test(own_process)]
fn unauthenticated_peers_of_tcp_cost_little() -> Result<(), Failure> {
    let bytes = AttackBytes {
        message: hello(&Invitation::from_bytes([9; 32])),
        claims: [(HELLO, 1024), (HELLO, u32::MAX), (READ, 2 << 20)]
            .map(|(kind, len)| claim(kind, len))
            .to_vec(),
        longest: claim(HELLO, 1024),
        ..AttackBytes::default()
    };
    let connection = |metadata: &[u8]| {
        Ok(connect_from(Ipv4Addr::LOCALHOST, address_in(metadata), ATTACKER_CONNECTS)?.into())
    };
    attack("TCP", Kind::Tcp, connection, &bytes, Bounds::new(512, HANDSHAKE))
}

/// SECURITY.md: 64 MiB for an authenticated peer.
#[test(own_process)]
fn authenticated_peers_of_tcp_stay_within_their_budget() -> Result<(), Failure> {
    let bytes = AttackBytes {
        message: frame(PING, 1, &[]),
        claims: [(READ, 2 << 20), (NOTIFY, 64 << 10), (READ, u32::MAX)]
            .map(|(kind, len)| claim(kind, len))
            .to_vec(),
        longest: claim(READ, 2 << 20),
        ..AttackBytes::default()
    };
    let connection = |metadata: &[u8]| Ok(Raw::lane_to(metadata, fresh(), 1).0.into());
    // Its connections may stay: `tcp.max_connections` is for all peers together.
    let bounds = Bounds {
        crowd: 64,
        time: None,
        idle: true,
        budget: 64 << 20,
        ..Bounds::new(256, HANDSHAKE)
    };
    attack("TCP, authenticated", Kind::BareTcp, connection, &bytes, bounds)
}

/// Connects to the socket whose name is in metadata.
fn connect_shm(metadata: &[u8]) -> io::Result<OwnedFd> {
    let at = metadata.windows(8).position(|window| window == b"kvx-shm-").unwrap();
    let address = SocketAddrUnix::new_abstract_name(&metadata[at..at + 40])?;
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    let until = Instant::now() + BACKLOG;
    loop {
        match connect(&socket, &address) {
            Ok(()) => return Ok(socket),
            Err(Errno::AGAIN) if Instant::now() < until => {
                std::thread::sleep(Duration::from_millis(1));
            }
            Err(error) => return Err(error.into()),
        }
    }
}

#[test(own_process)]
fn unauthenticated_peers_of_shm_cost_little() -> Result<(), Failure> {
    let (_, hello) = greet(&Invitation::from_bytes([9; 32]), None, &[0; 64])?;
    // A packet is a message, so half of one is one that is too short.
    let longest = hello[..hello.len() / 2].to_vec();
    let bytes = AttackBytes { message: hello, longest, ..AttackBytes::default() };
    // The socket, and the pidfd that reports when the process behind it has ended.
    let bounds = Bounds { descriptors: 2, ..Bounds::new(256, HANDSHAKE) };
    attack("SHM", Kind::Shm, connect_shm, &bytes, bounds)
}
