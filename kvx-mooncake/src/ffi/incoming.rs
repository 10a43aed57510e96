//! Finds connections over which bytes from ended processes may still arrive.
//!
//! The bytes that a process sent before it was killed still arrive. The kernel keeps them: here
//! until the engine has read them, and at the other end, whose socket has no owner any more, until
//! there is space here. So a connection to the engine has certainly ended only when the engine has
//! closed it. A connection that looks open certainly delivers no such bytes only if its other end
//! has an owner; the kernel reports that for sockets on this host. The kernel closes a process's
//! sockets before anyone can see that the process has ended, so the order is safe.
//!
//! The kernel does not report ends on other hosts or in another network namespace. kvx does not
//! detect the end of processes on other hosts either, and releases no memory because of them. Not
//! covered: a peer in this PID namespace but in another network namespace, and connections that a
//! child of the peer holds without having started a program.

use std::collections::BTreeSet;
use std::fs::{DirEntry, File};
use std::io::{Error, Read as _, Result, Write as _};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{FromRawFd as _, OwnedFd, RawFd};

/// States of a connection, as the kernel numbers them.
const ESTABLISHED: u8 = 1;
const LISTENS: u8 = 10;

/// Returns the ports at which this process listens.
pub(super) fn listening_ports() -> Result<BTreeSet<u16>> {
    let listens = |fd: &RawFd| state(*fd) == Some(LISTENS);
    let local = open_files()?.into_iter().filter(listens).filter_map(own);
    Ok(local.map(|local| local.port()).collect())
}

/// Returns the inode numbers of the connections to these ports over which bytes of an ended process
/// of this host may still arrive. `None`: not known yet, because connections wait to be accepted.
/// Errors: the kernel does not tell.
pub(super) fn from_ended_processes(ports: &BTreeSet<u16>) -> Result<Option<BTreeSet<u64>>> {
    let (mut found, mut kernel) = (BTreeSet::new(), None);
    for fd in open_files()? {
        // A descriptor may refer to another file at any moment. The relevant connections exist from
        // the beginning, and are checked under their own inode; if the engine closes them
        // meanwhile, they have ended.
        let Some(local) = own(fd).filter(|local| ports.contains(&local.port())) else { continue };
        let Some(connection) = file(fd) else { continue };
        match state(fd) {
            None => continue,
            Some(LISTENS) if waiting(fd) == Some(0) => continue,
            Some(LISTENS) => return Ok(None),
            Some(ESTABLISHED) => {
                let Some(remote) = peer(fd) else {
                    found.insert(connection);
                    continue;
                };
                let kernel = match &mut kernel {
                    Some(kernel) => kernel,
                    none => none.insert(Kernel::new()?),
                };
                // Check that the kernel reports this end: without tcp_diag it reports no
                // connection.
                let told = kernel.state(local, remote)?.is_some();
                if !told && state(fd) == Some(ESTABLISHED) {
                    return Err(untold());
                }
                let near = local.ip().to_canonical() == remote.ip().to_canonical()
                    || remote.ip().to_canonical().is_loopback();
                match kernel.state(remote, local)? {
                    Some(ESTABLISHED) if told => {}
                    None | Some(LISTENS) if told && !near => {}
                    _ => drop(found.insert(connection)),
                }
            }
            Some(_) => drop(found.insert(connection)), // the engine has not read everything yet
        }
    }
    Ok(Some(found))
}

fn untold() -> Error {
    Error::other("the kernel does not report TCP connections: it may lack tcp_diag")
}

/// Returns the descriptors of this process.
fn open_files() -> Result<Vec<RawFd>> {
    let number = |entry: DirEntry| entry.file_name().to_str().and_then(|name| name.parse().ok());
    std::fs::read_dir("/proc/self/fd")?
        .map(|entry| number(entry?).ok_or_else(|| Error::other("a descriptor is not a number")))
        .collect()
}

type Name = unsafe extern "C" fn(RawFd, *mut libc::sockaddr, *mut libc::socklen_t) -> libc::c_int;

fn own(fd: RawFd) -> Option<SocketAddr> {
    name(fd, libc::getsockname)
}

fn peer(fd: RawFd) -> Option<SocketAddr> {
    name(fd, libc::getpeername)
}

/// Returns the address of one end of an internet connection, if the descriptor is one.
fn name(fd: RawFd, ask: Name) -> Option<SocketAddr> {
    // SAFETY: all zeros are a valid address without a family.
    let mut address: libc::sockaddr_storage = unsafe { std::mem::zeroed() };
    let mut len = size_of_val(&address) as libc::socklen_t;
    // SAFETY: the buffer holds any address, and `len` is its size. The call only queries the
    // descriptor, whatever it refers to.
    if unsafe { ask(fd, (&raw mut address).cast(), &raw mut len) } != 0 {
        return None;
    }
    match i32::from(address.ss_family) {
        libc::AF_INET => {
            // SAFETY: an address of this family has this type.
            let remote = unsafe { &*(&raw const address).cast::<libc::sockaddr_in>() };
            Some((remote.sin_addr.s_addr.to_ne_bytes(), u16::from_be(remote.sin_port)).into())
        }
        libc::AF_INET6 => {
            // SAFETY: an address of this family has this type.
            let remote = unsafe { &*(&raw const address).cast::<libc::sockaddr_in6>() };
            Some((remote.sin6_addr.s6_addr, u16::from_be(remote.sin6_port)).into())
        }
        _ => None,
    }
}

/// Returns the inode number of a file, which does not change.
fn file(fd: RawFd) -> Option<u64> {
    // SAFETY: all zeros are a valid value.
    let mut told: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: the buffer holds the result. The call only queries the descriptor, whatever it refers
    // to.
    (unsafe { libc::fstat(fd, &raw mut told) } == 0).then_some(told.st_ino)
}

/// Returns the number of connections that wait at a listener to be accepted.
fn waiting(fd: RawFd) -> Option<u32> {
    // SAFETY: all zeros are a valid value.
    let mut told: libc::tcp_info = unsafe { std::mem::zeroed() };
    let mut len = size_of_val(&told) as libc::socklen_t;
    // SAFETY: the buffer holds the result, and `len` is its size. The call only queries the
    // descriptor, whatever it refers to.
    let code = unsafe {
        libc::getsockopt(
            fd,
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            (&raw mut told).cast(),
            &raw mut len,
        )
    };
    (code == 0).then_some(told.tcpi_unacked) // for a listener: the length of its queue
}

/// Returns the state of a TCP connection, if the descriptor is one.
fn state(fd: RawFd) -> Option<u8> {
    let (mut state, mut len) = (0_u8, 1);
    // SAFETY: the buffer holds the first byte of the result, which is the state. The call only
    // queries the descriptor, whatever it refers to.
    let told = unsafe {
        libc::getsockopt(
            fd,
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            (&raw mut state).cast(),
            &raw mut len,
        )
    };
    (told == 0).then_some(state)
}

/// The kernel's interface for querying connections.
struct Kernel(File);

const NETLINK_SOCK_DIAG: libc::c_int = 4;
const SOCK_DIAG_BY_FAMILY: u16 = 20;
/// The length of a message's header, in both directions.
const HEADER: usize = 16;

impl Kernel {
    fn new() -> Result<Self> {
        // The kernel answers during the request.
        let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        // SAFETY: takes only integers.
        let fd = unsafe { libc::socket(libc::AF_NETLINK, kind, NETLINK_SOCK_DIAG) };
        if fd < 0 {
            return Err(Error::last_os_error());
        }
        // SAFETY: it is new, and has no other owner.
        Ok(Kernel(File::from(unsafe { OwnedFd::from_raw_fd(fd) })))
    }

    /// Returns the state of the connection's end at `local` that leads to `remote`; `None` if it
    /// does not exist.
    fn state(&mut self, local: SocketAddr, remote: SocketAddr) -> Result<Option<u8>> {
        let [local, remote] =
            [local, remote].map(|end| SocketAddr::new(end.ip().to_canonical(), end.port()));
        let family = if local.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
        let mut question = Vec::with_capacity(72);
        question.extend(72_u32.to_ne_bytes());
        question.extend(SOCK_DIAG_BY_FAMILY.to_ne_bytes());
        question.extend((libc::NLM_F_REQUEST as u16).to_ne_bytes());
        question.extend([0; 8]);
        question.extend([family as u8, libc::IPPROTO_TCP as u8, 0, 0]);
        question.extend(u32::MAX.to_ne_bytes()); // in any state
        question.extend(local.port().to_be_bytes());
        question.extend(remote.port().to_be_bytes());
        question.extend(octets(local.ip()));
        question.extend(octets(remote.ip()));
        question.extend([0; 4]); // at any interface
        question.extend([0xFF; 8]); // no cookie is known
        self.0.write_all(&question)?;
        let mut answer = [0; 1024];
        let len = self.0.read(&mut answer)?;
        let (header, said) = answer[..len].split_at_checked(HEADER).ok_or_else(untold)?;
        match (u16::from_ne_bytes([header[4], header[5]]), said) {
            (SOCK_DIAG_BY_FAMILY, [_, state, ..]) => Ok(Some(*state)),
            (kind, [a, b, c, d, ..]) if i32::from(kind) == libc::NLMSG_ERROR => {
                match -i32::from_ne_bytes([*a, *b, *c, *d]) {
                    libc::ENOENT => Ok(None),
                    code => Err(Error::from_raw_os_error(code)),
                }
            }
            _ => Err(untold()),
        }
    }
}

/// Returns an address as the kernel's request encodes it; an IPv4 address uses the first four
/// bytes.
fn octets(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(four) => {
            let mut bytes = [0; 16];
            bytes[..4].copy_from_slice(&four.octets());
            bytes
        }
        IpAddr::V6(six) => six.octets(),
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv6Addr, TcpListener, TcpStream};

    use super::*;

    /// Returns a listener's port on all interfaces, like the engine's, and both ends of a
    /// connection to it.
    fn connection() -> (BTreeSet<u16>, TcpStream, TcpStream) {
        let listener = TcpListener::bind((Ipv6Addr::UNSPECIFIED, 0)).expect("a port is free");
        let port = listener.local_addr().expect("it has one").port();
        assert!(listening_ports().expect("files are listed").contains(&port));
        let sender = TcpStream::connect(("127.0.0.1", port)).expect("somebody listens");
        let receiver = listener.accept().expect("somebody has connected").0;
        (BTreeSet::from([port]), sender, receiver)
    }

    fn over(ports: &BTreeSet<u16>) -> bool {
        from_ended_processes(ports).expect("the kernel tells").is_some_and(|found| found.is_empty())
    }

    /// Writes until the buffers are full.
    fn fill(mut sender: &TcpStream) {
        sender.set_nonblocking(true).expect("a socket");
        while sender.write(&[7; 1 << 16]).is_ok() {}
    }

    #[test]
    fn bytes_of_a_closed_end_may_arrive_until_this_end_is_closed() {
        let (ports, sender, mut receiver) = connection();
        assert!(over(&ports), "its owner is alive");
        fill(&sender);
        assert!(over(&ports), "live processes report their own operations");
        drop(sender);
        assert_eq!(
            state(std::os::fd::AsRawFd::as_raw_fd(&receiver)),
            Some(ESTABLISHED),
            "its end has not arrived yet"
        );
        assert!(!over(&ports), "the kernel still holds many bytes");
        let read = std::io::copy(&mut receiver, &mut std::io::sink()).expect("all bytes arrive");
        assert!(read > 1 << 16);
        assert!(!over(&ports), "the reader has not closed it");
        drop(receiver);
        assert!(over(&ports));
    }

    #[test]
    fn connections_that_wait_to_be_accepted_are_not_done() {
        let listener = TcpListener::bind((Ipv6Addr::UNSPECIFIED, 0)).expect("a port is free");
        let port = listener.local_addr().expect("it has one").port();
        let ports = BTreeSet::from([port]);
        let sender = TcpStream::connect(("127.0.0.1", port)).expect("somebody listens");
        let asked = || from_ended_processes(&ports).expect("the kernel tells");
        assert_eq!(asked(), None);
        let receiver = listener.accept().expect("somebody has connected").0;
        assert_eq!(asked(), Some(BTreeSet::new()));
        drop(sender);
        let other = TcpStream::connect(("127.0.0.1", port)).expect("somebody listens");
        let other = (other, listener.accept().expect("somebody has connected").0);
        assert_eq!(asked().map(|found| found.len()), Some(1));
        drop(receiver);
        assert_eq!(asked(), Some(BTreeSet::new()));
        drop(other);
    }

    #[test]
    fn bytes_before_a_reset_may_still_arrive() {
        let (ports, sender, mut receiver) = connection();
        receiver.write_all(b"unread, so that the other end is reset").expect("it is open");
        fill(&sender);
        drop(sender);
        assert!(
            !over(&ports)
                && receiver.read(&mut [0; 64]).expect("the bytes arrived before the reset") > 0
                && !over(&ports)
        );
        drop(receiver);
        assert!(over(&ports));
    }
}
