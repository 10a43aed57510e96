//! Messages over a Unix socket, each behind its length; a file may come beside one.

use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use kvx_core::{Error, Kind, Result};
use rustix::io::retry_on_intr;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};
use tokio::io::Interest;
use tokio::net::UnixStream;

use crate::wire::group::MAX_MESSAGE;

/// Bytes that are asked for at once.
const CHUNK: usize = 16 << 10;
/// Bytes of a length.
const LENGTH: usize = 4;

/// A connection whose other end is a process of the same user.
pub(super) fn same_user(socket: &UnixStream) -> Result<i32> {
    let other =
        socket.peer_cred().map_err(|error| Error::os("a process at the socket has no name", error))?;
    let own = rustix::process::geteuid().as_raw();
    if other.uid() != own {
        return Err(Error::new(
            Kind::Denied,
            format!(
                "the process at the other end of the socket runs as user {}, this one as user {own}: an engine and its \
                 ranks are of one user",
                other.uid()
            ),
        ));
    }
    Ok(other.pid().unwrap_or(0))
}

/// The reading end.
pub(super) struct Incoming {
    socket: Arc<UnixStream>,
    bytes: Vec<u8>,
    files: VecDeque<OwnedFd>,
}

impl Incoming {
    pub(super) fn new(socket: Arc<UnixStream>) -> Self {
        Incoming { socket, bytes: Vec::new(), files: VecDeque::new() }
    }

    /// The file that came beside a message.
    pub(super) fn take_file(&mut self) -> Option<OwnedFd> {
        self.files.pop_front()
    }

    /// The next message. `None`: the other end sends no more. Cancelled, it goes on where it was.
    ///
    /// Errors: `Malformed` for one that is too long or cut off; `PeerLost`.
    pub(super) async fn next(&mut self) -> Result<Option<Vec<u8>>> {
        loop {
            if let Some(length) = self.bytes.first_chunk::<LENGTH>() {
                let length = u32::from_be_bytes(*length) as usize;
                if length > MAX_MESSAGE {
                    let why =
                        format!("a message of {length} bytes is announced, at most {MAX_MESSAGE} are taken");
                    return Err(Error::new(Kind::Malformed, why));
                }
                if self.bytes.len() >= LENGTH + length {
                    let rest = self.bytes.split_off(LENGTH + length);
                    let mut message = std::mem::replace(&mut self.bytes, rest);
                    message.drain(..LENGTH);
                    return Ok(Some(message));
                }
            }
            if self.receive().await? == 0 {
                return match self.bytes.is_empty() {
                    true => Ok(None),
                    false => Err(Error::new(Kind::Malformed, "the connection ended within a message")),
                };
            }
        }
    }

    async fn receive(&mut self) -> Result<usize> {
        let lost = |error| Error::os("the connection is lost", error).kind_is(Kind::PeerLost);
        loop {
            self.socket.readable().await.map_err(lost)?;
            let (socket, files) = (&self.socket, &mut self.files);
            let start = self.bytes.len();
            self.bytes.resize(start + CHUNK, 0);
            let into = &mut self.bytes[start..];
            let got = socket.try_io(Interest::READABLE, || receive(socket.as_fd(), into, files));
            self.bytes.truncate(start + got.as_ref().copied().unwrap_or(0));
            match got {
                Ok(got) => return Ok(got),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return Ok(0),
                Err(error) => return Err(lost(error)),
            }
        }
    }
}

/// Takes what is there, and keeps one file at most.
fn receive(socket: BorrowedFd<'_>, into: &mut [u8], files: &mut VecDeque<OwnedFd>) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let got =
        retry_on_intr(|| rustix::net::recvmsg(socket, &mut [IoSliceMut::new(into)], &mut control, flags))?;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(came) = message {
            files.extend(came.take(1usize.saturating_sub(files.len())));
        }
    }
    Ok(got.bytes)
}

/// Sends a message, with a file beside it or without.
///
/// Errors: `PeerLost`.
pub(super) async fn send(socket: &UnixStream, message: &[u8], file: Option<BorrowedFd<'_>>) -> Result<()> {
    let lost = |error| Error::os("the connection is lost", error).kind_is(Kind::PeerLost);
    let length = u32::try_from(message.len()).expect("messages are bounded").to_be_bytes();
    let (mut sent, mut file) = (0, file);
    while sent < LENGTH + message.len() {
        socket.writable().await.map_err(lost)?;
        let head = &length[sent.min(LENGTH)..];
        let body = &message[sent.saturating_sub(LENGTH)..];
        let pieces = [IoSlice::new(head), IoSlice::new(body)];
        match socket.try_io(Interest::WRITABLE, || put(socket.as_fd(), &pieces, file)) {
            Ok(more) => {
                sent += more;
                file = None;
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(lost(error)),
        }
    }
    Ok(())
}

fn put(socket: BorrowedFd<'_>, pieces: &[IoSlice<'_>], file: Option<BorrowedFd<'_>>) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let files = file.map(|file| [file]);
    if let Some(files) = &files {
        control.push(SendAncillaryMessage::ScmRights(files));
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    Ok(retry_on_intr(|| rustix::net::sendmsg(socket, pieces, &mut control, flags))?)
}
