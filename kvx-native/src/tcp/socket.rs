//! System calls on a connection's socket.

use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::time::Duration;

use kvx_core::fork::Private;
use kvx_core::{Error, Kind, Result};
use rustix::io::Errno;
use rustix::net::sockopt;

use super::listener::stream_socket;

/// How long a connection is idle before the kernel asks whether the other host still exists.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(30);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);
const KEEPALIVE_PROBES: u32 = 3;
/// How long sent bytes may stay unacknowledged, or the other end's window shut, at least.
const UNACKNOWLEDGED: Duration = Duration::from_secs(60);

/// Starts to connect.
pub(super) fn connect(address: SocketAddr, peer_timeout: Duration) -> Result<Private, Errno> {
    let socket = stream_socket(address)?;
    tune(&socket, peer_timeout)?;
    match rustix::net::connect(&socket, &address) {
        Ok(()) | Err(Errno::INPROGRESS | Errno::INTR) => Ok(socket),
        Err(errno) => Err(errno),
    }
}

/// Options of every connection: no delay, and an end for half-dead ones.
pub(super) fn tune(socket: &Private, peer_timeout: Duration) -> Result<(), Errno> {
    sockopt::set_tcp_nodelay(socket, true)?;
    sockopt::set_socket_keepalive(socket, true)?;
    sockopt::set_tcp_keepidle(socket, KEEPALIVE_IDLE)?;
    sockopt::set_tcp_keepintvl(socket, KEEPALIVE_INTERVAL)?;
    sockopt::set_tcp_keepcnt(socket, KEEPALIVE_PROBES)?;
    let unacknowledged = (peer_timeout * 3).max(UNACKNOWLEDGED).as_millis();
    sockopt::set_tcp_user_timeout(socket, u32::try_from(unacknowledged).unwrap_or(u32::MAX))
}

/// Whether a connect that was started has succeeded.
pub(super) fn connected(socket: &Private) -> Result<(), Errno> {
    sockopt::socket_error(socket)??;
    rustix::net::getpeername(socket)?.map(|_| ()).ok_or(Errno::NOTCONN)
}

/// Sends from these pieces. `None`: the socket takes nothing now.
///
/// # Safety
/// Each piece names readable memory.
pub(super) unsafe fn send(socket: &Private, pieces: &mut [libc::iovec]) -> Result<Option<usize>> {
    // SAFETY: all zeros is a message header without address, pieces and ancillary data.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = pieces.as_mut_ptr();
    message.msg_iovlen = pieces.len();
    let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
    // SAFETY: the header names `pieces`, which outlive the call; the caller vouches for what they name.
    let sent = unsafe { libc::sendmsg(socket.as_raw_fd(), &message, flags) };
    outcome(sent)
}

/// Receives into these pieces. `None`: nothing is there now. An error at the end of the stream.
///
/// # Safety
/// Each piece names writable memory.
pub(super) unsafe fn receive(socket: &Private, pieces: &mut [libc::iovec]) -> Result<Option<usize>> {
    // SAFETY: the pieces outlive the call; the caller vouches for what they name.
    let got = unsafe { libc::readv(socket.as_raw_fd(), pieces.as_ptr(), pieces.len() as libc::c_int) };
    match outcome(got)? {
        Some(0) => {
            Err(Error::new(Kind::PeerLost, "the peer closed the connection: check whether it still runs"))
        }
        got => Ok(got),
    }
}

fn outcome(returned: libc::ssize_t) -> Result<Option<usize>> {
    match usize::try_from(returned) {
        Ok(count) => Ok(Some(count)),
        Err(_) => match Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO) {
            Errno::AGAIN | Errno::INTR => Ok(None),
            errno => Err(broken(errno)),
        },
    }
}

/// An established connection failed.
fn broken(errno: Errno) -> Error {
    Error::os("the connection to the peer broke: check whether it still runs", errno).kind_is(Kind::PeerLost)
}
