//! Unix sockets in the abstract namespace: one packet is one message, with at most one file.

use std::cell::Cell;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kvx_core::backend::fork::Private;
pub(crate) use rustix::event::epoll::EventFlags as Ready;
use rustix::event::epoll::{self, EventData};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};

#[cfg(test)]
use super::pair::cut::{self, Call};

/// The limit for clients that wait to be accepted.
const BACKLOG: i32 = 1024;
/// The kernel's buffer for outgoing messages, in bytes; the kernel limits it to
/// `net.core.wmem_max`.
const SEND_BUFFER: usize = 4 << 20;

/// The number of sockets that a transport listens on.
pub(crate) const LISTENERS: usize = 2;
/// Tokens that name the descriptor of an event.
pub(crate) mod token {
    use super::LISTENERS;

    pub(crate) fn socket(at: usize) -> u64 {
        (LISTENERS + 2 * at) as u64
    }

    pub(crate) fn life(at: usize) -> u64 {
        socket(at) + 1
    }

    pub(crate) enum Descriptor {
        Listener(usize),
        Socket(usize),
        Life(usize),
    }

    pub(crate) fn descriptor(token: u64) -> Descriptor {
        let token = token as usize;
        match token.checked_sub(LISTENERS) {
            None => Descriptor::Listener(token),
            Some(rest) if rest % 2 == 0 => Descriptor::Socket(rest / 2),
            Some(rest) => Descriptor::Life(rest / 2),
        }
    }
}

fn new_socket() -> Result<Private, Errno> {
    rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
        None,
    )
    .map(Private::from)
}

/// Listens under `name`. Returns `ADDRINUSE` if another socket already does.
pub(crate) fn listen(name: &[u8]) -> Result<Private, Errno> {
    let socket = new_socket()?;
    rustix::net::bind(&socket, &SocketAddrUnix::new_abstract_name(name)?)?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(socket)
}

/// Opens the listeners: under an unguessable name, and under the agent's name if that is free.
pub(crate) fn listen_twice(
    random: &[u8],
    name: &[u8],
) -> kvx_core::Result<[Option<Private>; LISTENERS]> {
    let main = listen(random).map_err(|cause| {
        kvx_core::Error::os("cannot create a Unix socket: raise ulimit -n", cause)
    })?;
    // If another living agent of this name has it, that agent answers.
    Ok([Some(main), listen(name).ok()])
}

/// Connects to `name`. Returns `CONNREFUSED` if no socket listens, and `AGAIN` if the backlog is
/// full.
pub(crate) fn connect(name: &[u8]) -> Result<Private, Errno> {
    let socket = new_socket()?;
    // The default size is sufficient to work.
    rustix::net::sockopt::set_socket_send_buffer_size(&socket, SEND_BUFFER).ok();
    let name = SocketAddrUnix::new_abstract_name(name)?;
    let call = || rustix::net::connect(&socket, &name);
    #[cfg(test)]
    let call = || cut::call(Call::Connect, call);
    call()?;
    Ok(socket)
}

/// Accepts the next client, if one waits.
pub(crate) fn accept(listener: BorrowedFd<'_>) -> Result<Option<Private>, Errno> {
    let call = || rustix::net::accept_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK);
    #[cfg(test)]
    let call = || cut::call(Call::Accept, call);
    match call() {
        Ok(socket) => {
            // Optional, as in `connect`.
            rustix::net::sockopt::set_socket_send_buffer_size(&socket, SEND_BUFFER).ok();
            Ok(Some(socket.into()))
        }
        Err(Errno::AGAIN | Errno::CONNABORTED | Errno::INTR) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Sends one message, completely or not at all.
pub(crate) fn send(
    socket: BorrowedFd<'_>,
    bytes: &[u8],
    file: Option<BorrowedFd<'_>>,
) -> Result<(), Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let files = file.map(|file| [file]);
    if let Some(files) = &files {
        control.push(SendAncillaryMessage::ScmRights(files));
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    let mut call = || rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut control, flags);
    #[cfg(test)]
    let mut call = || cut::call(Call::Send { file: file.is_some() }, &mut call);
    rustix::io::retry_on_intr(&mut call).map(|_| ())
}

/// The result of [`receive`].
#[derive(Debug)]
pub(crate) enum RecvOutcome {
    /// A message of this many bytes, with the file that came with it.
    Message(usize, Option<OwnedFd>),
    /// A message that is longer than the buffer.
    TooLong,
    /// No message is available now.
    Nothing,
    /// The other end sends no more.
    End,
}

/// Receives the next message.
pub(crate) fn receive(socket: BorrowedFd<'_>, buffer: &mut [u8]) -> Result<RecvOutcome, Errno> {
    // Capacity for a few more files than are allowed, so that a wrong number is noticed and they
    // are closed.
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let got = loop {
        let mut call =
            || rustix::net::recvmsg(socket, &mut [IoSliceMut::new(buffer)], &mut control, flags);
        #[cfg(test)]
        let mut call = || cut::call(Call::Receive, &mut call);
        match call() {
            Ok(got) => break got,
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => return Ok(RecvOutcome::Nothing),
            // Reported once if the other end closed without having read everything; its earlier
            // messages still follow.
            Err(Errno::CONNRESET) => {}
            Err(error) => return Err(error),
        }
    };
    let mut file = None;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(files) = message {
            for one in files {
                file.get_or_insert(one);
            }
        }
    }
    #[cfg(test)]
    let file = file.filter(|_| !cut::loses_file());
    if got.flags.contains(ReturnFlags::TRUNC) {
        return Ok(RecvOutcome::TooLong);
    }
    if got.bytes == 0 {
        return Ok(RecvOutcome::End);
    }
    Ok(RecvOutcome::Message(got.bytes, file))
}

/// Shuts down sending. The other end sees the end of the stream and answers by closing.
pub(crate) fn finish(socket: BorrowedFd<'_>) {
    rustix::net::shutdown(socket, rustix::net::Shutdown::Write).ok(); // it may have closed
}

/// The socket of a connection. Its end, which the peer sees once all owners have dropped it, proves
/// to the peer that this end holds nothing of it: a device that closes the peer's memory owns it
/// until then.
#[derive(Debug)]
pub(crate) struct ConnectionSocket {
    socket: Private,
    shuts_down: AtomicBool,
}

impl ConnectionSocket {
    /// Ends both directions after the last owner, even if a forked child of this process or a watch
    /// of the peer keeps the descriptor open.
    pub(crate) fn close(self: Arc<Self>) {
        self.shuts_down.store(true, Ordering::Relaxed);
    }

    /// Duplicates the descriptor.
    pub(crate) fn try_clone(&self) -> std::io::Result<Private> {
        self.socket.try_clone()
    }
}

impl From<Private> for ConnectionSocket {
    fn from(socket: Private) -> Self {
        ConnectionSocket { socket, shuts_down: AtomicBool::new(false) }
    }
}

impl AsFd for ConnectionSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for ConnectionSocket {
    fn drop(&mut self) {
        if *self.shuts_down.get_mut() {
            // It may have closed.
            rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Both).ok();
        }
    }
}

/// A readiness queue; its one descriptor is ready if any descriptor in it is.
#[derive(Debug)]
pub(crate) struct Poller {
    epoll: OwnedFd,
    ready: Vec<(u64, Ready)>,
    /// True if a socket took no file although it had space; no event reports when it does.
    crowded: Cell<bool>,
}

impl Poller {
    /// The limit for events taken in one turn.
    const BATCH: usize = 64;

    pub(crate) fn new() -> Result<Self, Errno> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        Ok(Poller { epoll, ready: Vec::with_capacity(Self::BATCH), crowded: Cell::new(false) })
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    pub(crate) fn add(&self, fd: BorrowedFd<'_>, token: u64, wanted: Ready) -> Result<(), Errno> {
        epoll::add(&self.epoll, fd, EventData::new_u64(token), wanted)
    }

    pub(crate) fn change(
        &self,
        fd: BorrowedFd<'_>,
        token: u64,
        wanted: Ready,
    ) -> Result<(), Errno> {
        epoll::modify(&self.epoll, fd, EventData::new_u64(token), wanted)
    }

    pub(crate) fn remove(&self, fd: BorrowedFd<'_>) {
        epoll::delete(&self.epoll, fd).ok(); // closing it would remove it as well
    }

    /// Records that the kernel takes no more files of this user now, so that sending must be tried
    /// again later.
    pub(crate) fn mark_crowded(&self) {
        self.crowded.set(true);
    }

    /// Returns true if [`mark_crowded`](Self::mark_crowded) was called since the last call of this.
    pub(crate) fn take_crowded(&self) -> bool {
        self.crowded.take()
    }

    /// Returns the ready tokens with their events, at most a batch, without waiting. Give the
    /// vector back with [`recycle`](Poller::recycle).
    pub(crate) fn take(&mut self) -> Vec<(u64, Ready)> {
        let mut ready = std::mem::take(&mut self.ready);
        ready.clear();
        let now = rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 };
        let mut events = [const { MaybeUninit::uninit() }; Self::BATCH];
        #[cfg(test)]
        let Ok(()) = cut::call(Call::Events, || Ok(())) else { return ready };
        match epoll::wait(&self.epoll, &mut events, Some(&now)) {
            Ok((events, _)) => {
                ready.extend(events.iter().map(|event| (event.data.u64(), event.flags)))
            }
            Err(Errno::INTR) => {}
            Err(error) => tracing::error!(%error, "SHM: the readiness queue failed"),
        }
        ready
    }

    /// Waits until a descriptor is ready, or until `longest` has passed.
    pub(crate) fn wait(&self, longest: std::time::Duration) {
        let mut polled = [rustix::event::PollFd::new(&self.epoll, rustix::event::PollFlags::IN)];
        let longest = rustix::time::Timespec {
            tv_sec: longest.as_secs().try_into().unwrap_or(i64::MAX),
            tv_nsec: longest.subsec_nanos().into(),
        };
        // The caller checks for events itself.
        rustix::event::poll(&mut polled, Some(&longest)).ok();
    }

    pub(crate) fn recycle(&mut self, ready: Vec<(u64, Ready)>) {
        self.ready = ready;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair() -> (Private, Private) {
        let name = [b"kvx-test-".as_slice(), &kvx_core::backend::random_key().unwrap()].concat();
        let listener = listen(&name).unwrap();
        let client = connect(&name).unwrap();
        let server = accept(listener.as_fd()).unwrap().unwrap();
        assert!(accept(listener.as_fd()).unwrap().is_none());
        (client, server)
    }

    #[test]
    fn messages_keep_their_boundaries_and_carry_files() {
        let (client, server) = pair();
        let (pipe, _) = rustix::pipe::pipe().unwrap();
        send(client.as_fd(), b"one", Some(pipe.as_fd())).unwrap();
        send(client.as_fd(), b"three", None).unwrap();
        send(client.as_fd(), &[0; 100], None).unwrap();
        let mut buffer = [0; 16];
        assert!(matches!(
            receive(server.as_fd(), &mut buffer),
            Ok(RecvOutcome::Message(3, Some(_)))
        ));
        assert!(matches!(receive(server.as_fd(), &mut buffer), Ok(RecvOutcome::Message(5, None))));
        assert!(matches!(receive(server.as_fd(), &mut buffer), Ok(RecvOutcome::TooLong)));
        assert!(matches!(receive(server.as_fd(), &mut buffer), Ok(RecvOutcome::Nothing)));
    }

    #[test]
    fn messages_sent_before_a_close_arrive_even_if_the_closer_left_messages_unread() {
        let (client, server) = pair();
        send(server.as_fd(), b"never read", None).unwrap();
        send(client.as_fd(), b"last words", None).unwrap();
        drop(client);
        let mut buffer = [0; 16];
        assert!(matches!(receive(server.as_fd(), &mut buffer), Ok(RecvOutcome::Message(10, None))));
        assert!(matches!(receive(server.as_fd(), &mut buffer), Ok(RecvOutcome::End)));
        assert_eq!(send(server.as_fd(), b"late", None), Err(Errno::PIPE));
    }

    #[test]
    fn connecting_to_an_unused_name_is_refused() {
        assert_eq!(connect(b"kvx-test-nobody").unwrap_err(), Errno::CONNREFUSED);
    }
}
