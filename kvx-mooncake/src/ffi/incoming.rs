//! Finds connections over which bytes from ended processes may still arrive.
//!
//! The bytes that a process had sent before it was killed still arrive: the kernel keeps them, here
//! until the engine has read them into memory, and at the other end, which has no owner any more,
//! until there is space here. So a connection to the engine is known to be at its end only when the
//! engine has closed it; and one that looks open is known to bring nothing of the kind only when
//! its other end, of which the kernel tells, has an owner. That the process's own end comes before
//! is the kernel's order: its sockets are closed before anybody sees that it has ended.
//!
//! Other ends on other hosts, or in another network's namespace, the kernel does not tell of. Nor
//! does kvx see processes end on other hosts: it gives nothing back because of them. What it cannot
//! see: a peer in this namespace of processes and another one of networks, and connections that a
//! child of the peer has without having started a program.

use std::collections::BTreeSet;
use std::fs::{DirEntry, File};
use std::io::{Error, Read as _, Result, Write as _};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{FromRawFd as _, OwnedFd, RawFd};

/// States of a connection, in the kernel's numbers.
const ESTABLISHED: u8 = 1;
const LISTENS: u8 = 10;

/// The ports at which this process listens.
pub(super) fn listening_ports() -> Result<BTreeSet<u16>> {
    let listens = |fd: &RawFd| state(*fd) == Some(LISTENS);
    let local = open_files()?.into_iter().filter(listens).filter_map(own);
    Ok(local.map(|local| local.port()).collect())
}

/// Returns the inode numbers of the connections to these ports over which bytes of an ended process
/// of this host may still arrive. `None`: not known yet, as some connections wait to be accepted.
/// Errors: the kernel does not say.
pub(super) fn from_ended_processes(ports: &BTreeSet<u16>) -> Result<Option<BTreeSet<u64>>> {
    let (mut found, mut kernel) = (BTreeSet::new(), None);
    for fd in open_files()? {
        // A descriptor may be given to another file at any moment. The connections that matter are
        // there from the beginning, and are looked at under their own, unless the engine closes
        // them meanwhile: then they have ended.
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
                // This end, to see whether the kernel tells at all: without that part it knows of
                // no connection.
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
            Some(_) => drop(found.insert(connection)), // the engine has not read to its end yet
        }
    }
    Ok(Some(found))
}

fn untold() -> Error {
    Error::other("the kernel does not tell of connections, as where it has no tcp_diag")
}

/// The numbers of this process's files.
fn open_files() -> Result<Vec<RawFd>> {
    let number = |entry: DirEntry| entry.file_name().to_str().and_then(|name| name.parse().ok());
    std::fs::read_dir("/proc/self/fd")?
        .map(|entry| number(entry?).ok_or_else(|| Error::other("a file has no number")))
        .collect()
}

type Name = unsafe extern "C" fn(RawFd, *mut libc::sockaddr, *mut libc::socklen_t) -> libc::c_int;

fn own(fd: RawFd) -> Option<SocketAddr> {
    name(fd, libc::getsockname)
}

fn peer(fd: RawFd) -> Option<SocketAddr> {
    name(fd, libc::getpeername)
}

/// One end of what is a connection of the internet, if this is one.
fn name(fd: RawFd, ask: Name) -> Option<SocketAddr> {
    // SAFETY: all zeros are an address of no family.
    let mut address: libc::sockaddr_storage = unsafe { std::mem::zeroed() };
    let mut len = size_of_val(&address) as libc::socklen_t;
    // SAFETY: the buffer holds any address, and `len` is its size. The call only queries the
    // descriptor, whatever it is.
    if unsafe { ask(fd, (&raw mut address).cast(), &raw mut len) } != 0 {
        return None;
    }
    match i32::from(address.ss_family) {
        libc::AF_INET => {
            // SAFETY: an address of this family is one of these.
            let remote = unsafe { &*(&raw const address).cast::<libc::sockaddr_in>() };
            Some((remote.sin_addr.s_addr.to_ne_bytes(), u16::from_be(remote.sin_port)).into())
        }
        libc::AF_INET6 => {
            // SAFETY: an address of this family is one of these.
            let remote = unsafe { &*(&raw const address).cast::<libc::sockaddr_in6>() };
            Some((remote.sin6_addr.s6_addr, u16::from_be(remote.sin6_port)).into())
        }
        _ => None,
    }
}

/// The number of a file, which it has for its life.
fn file(fd: RawFd) -> Option<u64> {
    // SAFETY: all zeros are such a description.
    let mut told: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: the buffer holds the result. The call only queries the descriptor, whatever it is.
    (unsafe { libc::fstat(fd, &raw mut told) } == 0).then_some(told.st_ino)
}

/// Returns how many connections wait at a listener to be accepted.
fn waiting(fd: RawFd) -> Option<u32> {
    // SAFETY: all zeros are such a description.
    let mut told: libc::tcp_info = unsafe { std::mem::zeroed() };
    let mut len = size_of_val(&told) as libc::socklen_t;
    // SAFETY: the buffer holds the result, and `len` is its size. The call only queries the
    // descriptor, whatever it is.
    let code = unsafe {
        libc::getsockopt(
            fd,
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            (&raw mut told).cast(),
            &raw mut len,
        )
    };
    (code == 0).then_some(told.tcpi_unacked) // of a listener it is that
}

/// The state of a connection over TCP, if this is one.
fn state(fd: RawFd) -> Option<u8> {
    let (mut state, mut len) = (0_u8, 1);
    // SAFETY: the buffer holds the first byte of the result, which is the state. The call only
    // queries the descriptor, whatever it is.
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

/// The kernel's interface that tells of connections.
struct Kernel(File);

const NETLINK_SOCK_DIAG: libc::c_int = 4;
const SOCK_DIAG_BY_FAMILY: u16 = 20;
/// The header of a message, in both directions.
const HEADER: usize = 16;

impl Kernel {
    fn new() -> Result<Self> {
        // It answers within the question.
        let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        // SAFETY: numbers only.
        let fd = unsafe { libc::socket(libc::AF_NETLINK, kind, NETLINK_SOCK_DIAG) };
        if fd < 0 {
            return Err(Error::last_os_error());
        }
        // SAFETY: it is new, and nobody else's.
        Ok(Kernel(File::from(unsafe { OwnedFd::from_raw_fd(fd) })))
    }

    /// The state of the end of a connection that is `local`, and leads to `remote`. `None`: there
    /// is none.
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

/// An address as the kernel is asked for it: of the shorter ones four bytes count.
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

    /// A listener on all interfaces, as the engine's, and both ends of a connection to it.
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

    /// Writes as much as goes in.
    fn fill(mut sender: &TcpStream) {
        sender.set_nonblocking(true).expect("a socket");
        while sender.write(&[7; 1 << 16]).is_ok() {}
    }

    #[test]
    fn what_a_closed_end_has_sent_is_over_when_this_end_is_closed() {
        let (ports, sender, mut receiver) = connection();
        assert!(over(&ports), "its owner lives, and may go on");
        fill(&sender);
        assert!(over(&ports), "what is not over for the living, they say themselves");
        drop(sender);
        assert_eq!(
            state(std::os::fd::AsRawFd::as_raw_fd(&receiver)),
            Some(ESTABLISHED),
            "its end is not here yet"
        );
        assert!(!over(&ports), "much of it is still with the kernel");
        let read = std::io::copy(&mut receiver, &mut std::io::sink()).expect("all of it comes");
        assert!(read > 1 << 16);
        assert!(!over(&ports), "the reader has not closed it");
        drop(receiver);
        assert!(over(&ports));
    }

    #[test]
    fn who_waits_to_be_accepted_is_not_done() {
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
    fn what_came_before_a_reset_is_not_over_either() {
        let (ports, sender, mut receiver) = connection();
        receiver.write_all(b"unread, so that the other end is reset").expect("it is open");
        fill(&sender);
        drop(sender);
        assert!(
            !over(&ports)
                && receiver.read(&mut [0; 64]).expect("it came before") > 0
                && !over(&ports)
        );
        drop(receiver);
        assert!(over(&ports));
    }
}
