//! System calls on a connection's socket.

pub(crate) mod chunk;
pub(crate) mod listener;
#[cfg(test)]
pub(crate) mod network;
pub(crate) mod poller;

use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::time::Duration;

use kvx_core::backend::fork::Private;
use kvx_core::{Error, ErrorKind, Result};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};

/// The time that a connection is idle before the kernel checks whether the other host still exists.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(30);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);
const KEEPALIVE_PROBES: u32 = 3;
/// The minimum time for which sent bytes may stay unacknowledged, or the other end's window closed.
const UNACKNOWLEDGED: Duration = Duration::from_secs(60);

/// Creates a TCP socket of the family of `address`, non-blocking and not inherited.
pub(crate) fn stream_socket(address: SocketAddr) -> Result<Private, Errno> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    rustix::net::socket_with(
        family,
        SocketType::STREAM,
        SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
        None,
    )
    .map(Private::from)
}

/// Starts to connect.
pub(crate) fn connect(address: SocketAddr, peer_timeout: Duration) -> Result<Private, Errno> {
    #[cfg(test)]
    if network::is_running() {
        return network::connect(address);
    }
    let socket = stream_socket(address)?;
    tune(&socket, peer_timeout)?;
    match rustix::net::connect(&socket, &address) {
        Ok(()) | Err(Errno::INPROGRESS | Errno::INTR) => Ok(socket),
        Err(errno) => Err(errno),
    }
}

/// Sets the options of every connection: no delay, and timeouts for half-dead ones.
pub(crate) fn tune(socket: &Private, peer_timeout: Duration) -> Result<(), Errno> {
    #[cfg(test)]
    if network::is_running() {
        network::tune(socket);
        return Ok(()); // its sockets are no TCP sockets
    }
    sockopt::set_tcp_nodelay(socket, true)?;
    sockopt::set_socket_keepalive(socket, true)?;
    sockopt::set_tcp_keepidle(socket, KEEPALIVE_IDLE)?;
    sockopt::set_tcp_keepintvl(socket, KEEPALIVE_INTERVAL)?;
    sockopt::set_tcp_keepcnt(socket, KEEPALIVE_PROBES)?;
    let unacknowledged = (peer_timeout * 3).max(UNACKNOWLEDGED).as_millis();
    sockopt::set_tcp_user_timeout(socket, u32::try_from(unacknowledged).unwrap_or(u32::MAX))
}

/// Returns whether a connect that was started has succeeded.
pub(crate) fn connected(socket: &Private) -> Result<(), Errno> {
    sockopt::socket_error(socket)??;
    rustix::net::getpeername(socket)?.map(|_| ()).ok_or(Errno::NOTCONN)
}

/// Sends from these pieces. Returns `None` if the socket takes no bytes now.
///
/// # Safety
///
/// The caller ensures that each piece names readable memory.
pub(crate) unsafe fn send(socket: &Private, pieces: &mut [libc::iovec]) -> Result<Option<usize>> {
    #[cfg(test)]
    let Some(pieces) = cut::short(pieces) else { return Ok(None) };
    // SAFETY: all zeros is a message header without address, pieces and ancillary data.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = pieces.as_mut_ptr();
    message.msg_iovlen = pieces.len();
    let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
    // SAFETY: the header names `pieces`, which outlive the call; the caller ensures that their
    // memory is readable.
    let sent = unsafe { libc::sendmsg(socket.as_raw_fd(), &message, flags) };
    outcome(sent)
}

/// Receives into these pieces. Returns `None` if no bytes are available now, and an error at the
/// end of the stream.
///
/// # Safety
///
/// The caller ensures that each piece names writable memory.
pub(crate) unsafe fn receive(
    socket: &Private,
    pieces: &mut [libc::iovec],
) -> Result<Option<usize>> {
    #[cfg(test)]
    let Some(pieces) = cut::short(pieces) else { return Ok(None) };
    // SAFETY: the pieces outlive the call; the caller ensures that their memory is writable.
    let got =
        unsafe { libc::readv(socket.as_raw_fd(), pieces.as_ptr(), pieces.len() as libc::c_int) };
    match outcome(got)? {
        Some(0) => Err(ErrorKind::PeerLost
            .because("the peer closed the connection: check whether it still runs")),
        got => Ok(got),
    }
}

fn outcome(returned: libc::ssize_t) -> Result<Option<usize>> {
    match usize::try_from(returned) {
        Ok(count) => Ok(Some(count)),
        Err(_) => match Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
        {
            Errno::AGAIN | Errno::INTR => Ok(None),
            errno => Err(broken(errno)),
        },
    }
}

/// Returns the error of an established connection that failed.
fn broken(errno: Errno) -> Error {
    Error::os("the connection to the peer broke: check whether it still runs", errno)
        .with_kind(ErrorKind::PeerLost)
}

/// Fault injection: calls that move fewer bytes than possible, or none, as a test's seed
/// determines.
#[cfg(test)]
pub(crate) mod cut {
    use std::cell::RefCell;

    use kvx_testkit::Random;

    thread_local! {
        static CUTS: RefCell<Option<Random>> = const { RefCell::new(None) };
    }

    /// Starts the fault injection for this thread with this seed, or ends it.
    pub(crate) fn by(seed: Option<u64>) {
        CUTS.set(seed.map(Random::seeded));
    }

    /// Returns the part of these pieces that a call may move; `None` if it must report that it
    /// cannot move any now.
    pub(crate) fn short(pieces: &mut [libc::iovec]) -> Option<&mut [libc::iovec]> {
        /// The limit in bytes for a shortened call: some headers, or a part of a record.
        const MOST: usize = 3000;
        let Some(draw) = CUTS.with_borrow_mut(|cuts| cuts.as_mut().map(Random::word)) else {
            return Some(pieces);
        };
        let mut left = match draw % 8 {
            0..2 => return None,
            2..5 => 1 + (draw >> 8) as usize % MOST,
            5 => 1 + (draw >> 8) as usize % 20,
            _ => return Some(pieces),
        };
        let mut count = 0;
        while count < pieces.len() && left > 0 {
            pieces[count].iov_len = pieces[count].iov_len.min(left);
            left -= pieces[count].iov_len;
            count += 1;
        }
        Some(&mut pieces[..count])
    }
}
