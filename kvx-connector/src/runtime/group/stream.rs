//! Messages between an engine and a rank, each with its length before it. Over a Unix socket a
//! message may carry a file. Over TCP messages are encrypted, after both ends have proved that they
//! have the fleet's secret.

use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use kvx_core::{Error, ErrorKind, Result, Secret};
use kvx_noise::{MESSAGE, NoiseHandshake, Opener, Sealer, Seals, derive_key};
use rustix::io::retry_on_intr;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, sockopt,
};
use tokio::io::Interest;
use tokio::net::{TcpStream, UnixStream};

use super::limits::SILENT;
use kvx_vllm::group::MAX_MESSAGE;

/// The number of bytes read at once.
const CHUNK: usize = 16 << 10;
/// The size of a length in bytes.
const LENGTH: usize = 4;
/// The label with which both ends derive their key from the secret, and to which they bind their
/// handshake.
const LABEL: &[u8] = b"kvx group 1: an engine and its ranks";
/// Keepalive probes start after this time without an answer. With one probe a second the connection
/// is lost after [`SILENT`].
const UNANSWERED: Duration = Duration::from_secs(4);
const QUESTIONS: u32 = 6;

/// A connection of either kind.
#[derive(Debug)]
pub(super) enum Socket {
    Unix(UnixStream),
    Tcp(TcpStream),
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Socket::Unix(socket) => socket.as_fd(),
            Socket::Tcp(socket) => socket.as_fd(),
        }
    }
}

impl Socket {
    async fn ready(&self, interest: Interest) -> io::Result<()> {
        match self {
            Socket::Unix(socket) => socket.ready(interest).await.map(drop),
            Socket::Tcp(socket) => socket.ready(interest).await.map(drop),
        }
    }

    fn try_io<T>(&self, interest: Interest, call: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        match self {
            Socket::Unix(socket) => socket.try_io(interest, call),
            Socket::Tcp(socket) => socket.try_io(interest, call),
        }
    }
}

/// Checks that the other end of a connection is a process of the same user. Returns its process id.
pub(super) fn same_user(socket: &UnixStream) -> Result<i32> {
    let other = socket
        .peer_cred()
        .map_err(|error| Error::os("the process at the socket cannot be identified", error))?;
    let own = rustix::process::geteuid().as_raw();
    if other.uid() != own {
        return Err(ErrorKind::Authentication.because(format!(
            "the process at the other end of the socket runs as user {}, this one as user {own}: \
             an engine and its ranks have to run as one user",
            other.uid()
        )));
    }
    Ok(other.pid().unwrap_or(0))
}

/// Returns both ends of a connection within a host.
pub(super) fn within_a_host(socket: UnixStream) -> (MessageWriter, MessageReader) {
    ends(Arc::new(Socket::Unix(socket)))
}

/// Returns both ends of a connection without encryption.
fn ends(socket: Arc<Socket>) -> (MessageWriter, MessageReader) {
    let incoming = MessageReader {
        socket: Arc::clone(&socket),
        opener: None,
        sealed: Vec::new(),
        bytes: Vec::new(),
        files: VecDeque::new(),
    };
    (MessageWriter { socket, sealer: None }, incoming)
}

/// Authenticates a rank's connection to an engine on another host.
///
/// Errors: `Authentication`; `PeerLost`; those of the operating system.
pub(super) async fn prove_as_rank(
    socket: TcpStream,
    secret: &Secret,
) -> Result<(MessageWriter, MessageReader)> {
    let (mut outgoing, mut incoming) = over_tcp(socket)?;
    let mut handshake = NoiseHandshake::initiator(&derive_key(secret, LABEL), LABEL)?;
    let mut first = Vec::new();
    handshake.write(&[], &mut first)?;
    outgoing.put_all(&first, None).await?;
    let answer = incoming.proof().await?;
    if answer.and_then(|answer| handshake.read(&answer)).is_none() {
        let why = "the peer has not proved that it has this fleet's secret: give the engine and \
                   its ranks the same KVX_SECRET_FILE";
        return Err(ErrorKind::Authentication.because(why));
    }
    Ok(sealed(outgoing, incoming, handshake.seals()))
}

/// Authenticates a rank's connection at the engine. A peer without the secret gets no answer.
pub(super) async fn prove_as_engine(
    socket: TcpStream,
    secret: &Secret,
) -> Result<(MessageWriter, MessageReader)> {
    let (mut outgoing, mut incoming) = over_tcp(socket)?;
    let mut handshake = NoiseHandshake::responder(&derive_key(secret, LABEL), LABEL)?;
    let first = incoming.proof().await?;
    if first.and_then(|first| handshake.read(&first)).is_none() {
        return Err(
            ErrorKind::Authentication.because("it has not proved that it has this fleet's secret")
        );
    }
    let mut answer = Vec::new();
    handshake.write(&[], &mut answer)?;
    outgoing.put_all(&answer, None).await?;
    Ok(sealed(outgoing, incoming, handshake.seals()))
}

/// Returns the error of a process that needs a secret for ranks on other hosts, and has none.
pub(super) fn no_secret() -> Error {
    let why = "ranks on other hosts and their engine have to share a secret, and this process has \
               none: create one with `kvx secret FILE`, and set KVX_SECRET_FILE";
    ErrorKind::Invalid.because(why)
}

fn over_tcp(socket: TcpStream) -> Result<(MessageWriter, MessageReader)> {
    let set = || {
        sockopt::set_tcp_nodelay(&socket, true)?;
        // Ends the connection to a host that has gone silently.
        sockopt::set_socket_keepalive(&socket, true)?;
        sockopt::set_tcp_keepidle(&socket, UNANSWERED)?;
        sockopt::set_tcp_keepintvl(&socket, Duration::from_secs(1))?;
        sockopt::set_tcp_keepcnt(&socket, QUESTIONS)?;
        sockopt::set_tcp_user_timeout(&socket, SILENT.as_millis() as u32)
    };
    set().map_err(|error| {
        Error::os("a connection between an engine and its rank cannot be set up", error)
    })?;
    Ok(ends(Arc::new(Socket::Tcp(socket))))
}

fn sealed(
    mut outgoing: MessageWriter,
    mut incoming: MessageReader,
    seals: Seals,
) -> (MessageWriter, MessageReader) {
    (outgoing.sealer, incoming.opener) = (Some(seals.sealer), Some(seals.opener));
    (outgoing, incoming)
}

fn lost(error: io::Error) -> Error {
    Error::os("the connection is lost", error).with_kind(ErrorKind::PeerLost)
}

/// The reading end of a connection.
pub(super) struct MessageReader {
    socket: Arc<Socket>,
    opener: Option<Opener>,
    /// Received bytes that are not decrypted yet.
    sealed: Vec<u8>,
    bytes: Vec<u8>,
    files: VecDeque<OwnedFd>,
}

impl MessageReader {
    /// Returns the address by which this host reaches the other one. `None` for a Unix socket.
    pub(super) fn own_address(&self) -> Option<IpAddr> {
        match &*self.socket {
            Socket::Unix(_) => None,
            Socket::Tcp(socket) => Some(socket.local_addr().ok()?.ip()),
        }
    }

    /// Takes the file that came with a message.
    pub(super) fn take_file(&mut self) -> Option<OwnedFd> {
        self.files.pop_front()
    }

    /// Returns the next message. `None`: the other end sends no more. May be cancelled without
    /// losing data.
    ///
    /// Errors: `Malformed` if a message is too long, cut off or altered; `PeerLost`.
    pub(super) async fn next(&mut self) -> Result<Option<Vec<u8>>> {
        loop {
            self.open()?;
            if let Some(length) = self.bytes.first_chunk::<LENGTH>() {
                let length = u32::from_be_bytes(*length) as usize;
                if length > MAX_MESSAGE {
                    let why = format!(
                        "a message has {length} bytes, and at most {MAX_MESSAGE} are accepted"
                    );
                    return Err(ErrorKind::Malformed.because(why));
                }
                if self.bytes.len() >= LENGTH + length {
                    let rest = self.bytes.split_off(LENGTH + length);
                    let mut message = std::mem::replace(&mut self.bytes, rest);
                    message.drain(..LENGTH);
                    return Ok(Some(message));
                }
            }
            if self.receive().await? == 0 {
                return match self.bytes.is_empty() && self.sealed.is_empty() {
                    true => Ok(None),
                    false => {
                        Err(ErrorKind::Malformed.because("the connection ended within a message"))
                    }
                };
            }
        }
    }

    /// Returns a message of the handshake. `None`: the other end sends no more.
    async fn proof(&mut self) -> Result<Option<Vec<u8>>> {
        while self.bytes.len() < MESSAGE {
            if self.receive().await? == 0 {
                return Ok(None);
            }
        }
        let sealed = self.bytes.split_off(MESSAGE);
        self.sealed = sealed;
        Ok(Some(std::mem::take(&mut self.bytes)))
    }

    /// Decrypts all complete records that have arrived.
    fn open(&mut self) -> Result<()> {
        let Some(opener) = &mut self.opener else { return Ok(()) };
        opener.open_stream(&mut self.sealed, &mut self.bytes)
    }

    async fn receive(&mut self) -> Result<usize> {
        loop {
            self.socket.ready(Interest::READABLE).await.map_err(lost)?;
            let (socket, files) = (&self.socket, &mut self.files);
            let coming = if self.opener.is_some() { &mut self.sealed } else { &mut self.bytes };
            let start = coming.len();
            coming.resize(start + CHUNK, 0);
            let into = &mut coming[start..];
            let got = socket.try_io(Interest::READABLE, || receive(socket.as_fd(), into, files));
            coming.truncate(start + got.as_ref().copied().unwrap_or(0));
            match got {
                Ok(got) => return Ok(got),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return Ok(0),
                Err(error) => return Err(lost(error)),
            }
        }
    }
}

/// Receives available bytes, and keeps one file at most.
fn receive(
    socket: BorrowedFd<'_>,
    into: &mut [u8],
    files: &mut VecDeque<OwnedFd>,
) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let got = retry_on_intr(|| {
        rustix::net::recvmsg(socket, &mut [IoSliceMut::new(into)], &mut control, flags)
    })?;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(came) = message {
            files.extend(came.take(1usize.saturating_sub(files.len())));
        }
    }
    Ok(got.bytes)
}

/// The writing end.
pub(super) struct MessageWriter {
    socket: Arc<Socket>,
    sealer: Option<Sealer>,
}

impl MessageWriter {
    /// Sends a message, with an optional file. If the future is dropped in between, no other
    /// message can follow.
    ///
    /// Errors: `PeerLost`.
    pub(super) async fn send(
        &mut self,
        message: &[u8],
        file: Option<BorrowedFd<'_>>,
    ) -> Result<()> {
        let length = u32::try_from(message.len()).expect("messages are bounded").to_be_bytes();
        let mut bytes = Vec::with_capacity(LENGTH + message.len());
        bytes.extend_from_slice(&length);
        bytes.extend_from_slice(message);
        if let Some(sealer) = &mut self.sealer {
            let mut sealed = Vec::new();
            sealer.seal_stream(&bytes, &mut sealed);
            bytes = sealed;
        }
        self.put_all(&bytes, file).await
    }

    async fn put_all(&mut self, bytes: &[u8], mut file: Option<BorrowedFd<'_>>) -> Result<()> {
        let mut sent = 0;
        while sent < bytes.len() {
            self.socket.ready(Interest::WRITABLE).await.map_err(lost)?;
            let put = || put(self.socket.as_fd(), &bytes[sent..], file);
            match self.socket.try_io(Interest::WRITABLE, put) {
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

    /// Closes the connection in both directions, if it is still open.
    pub(super) fn end(&self) {
        rustix::net::shutdown(&*self.socket, rustix::net::Shutdown::Both).ok();
    }
}

fn put(socket: BorrowedFd<'_>, bytes: &[u8], file: Option<BorrowedFd<'_>>) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let files = file.map(|file| [file]);
    if let Some(files) = &files {
        control.push(SendAncillaryMessage::ScmRights(files));
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    Ok(retry_on_intr(|| rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut control, flags))?)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "what fails here is the test")]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::net::{SocketAddr, TcpListener};
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::thread;

    use kvx_noise::RECORD;
    use tokio::time::timeout;

    use super::*;

    const LIMIT: Duration = Duration::from_secs(10);
    const SAID: [&[u8]; 3] = [b"first", &[7; 3 * RECORD], b""];

    fn secret(byte: u8) -> Secret {
        Secret::from_bytes([byte; Secret::LEN])
    }

    fn runtime() -> tokio::runtime::Runtime {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
    }

    /// Forwards bytes between two ends, and alters one byte of the connecting end. Returns the
    /// address to connect to, and the number of bytes that the connecting end has sent.
    fn between(engine: SocketAddr, altered: Option<usize>) -> (SocketAddr, Arc<AtomicUsize>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (address, said) = (listener.local_addr().unwrap(), Arc::new(AtomicUsize::new(0)));
        let counted = Arc::clone(&said);
        thread::spawn(move || {
            let (from, _) = listener.accept().unwrap();
            let to = std::net::TcpStream::connect(engine).unwrap();
            let pass = |mut from: std::net::TcpStream,
                        mut to: std::net::TcpStream,
                        mut each: Box<dyn FnMut(&mut [u8]) + Send>| {
                thread::spawn(move || {
                    let mut bytes = [0; 1 << 16];
                    while let Ok(got @ 1..) = from.read(&mut bytes) {
                        each(&mut bytes[..got]);
                        if to.write_all(&bytes[..got]).is_err() {
                            break;
                        }
                    }
                    to.shutdown(std::net::Shutdown::Both).ok();
                });
            };
            let alter = move |bytes: &mut [u8]| {
                let at = counted.fetch_add(bytes.len(), Ordering::Relaxed);
                let here = altered.and_then(|altered| bytes.get_mut(altered.checked_sub(at)?));
                here.into_iter().for_each(|byte| *byte ^= 0x10);
            };
            pass(from.try_clone().unwrap(), to.try_clone().unwrap(), Box::new(alter));
            pass(to, from, Box::new(|_| {}));
        });
        (address, said)
    }

    /// Returns what an engine receives from a rank that sends [`SAID`], and how many bytes that
    /// were.
    fn heard(altered: Option<usize>, secrets: [u8; 2]) -> (Vec<Vec<u8>>, Result<()>, usize) {
        let [of_engine, of_rank] = secrets.map(secret);
        runtime().block_on(async {
            let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
            let (address, said) = between(listener.local_addr().unwrap(), altered);
            let engine = async {
                let mut messages = Vec::new();
                let (socket, _) = listener.accept().await.unwrap();
                let proven = prove_as_engine(socket, &of_engine).await;
                drop(listener);
                let (_outgoing, mut incoming) = match proven {
                    Ok(ends) => ends,
                    Err(error) => return (messages, Err(error)),
                };
                loop {
                    match incoming.next().await {
                        Ok(Some(message)) => messages.push(message),
                        Ok(None) => return (messages, Ok(())),
                        Err(error) => return (messages, Err(error)),
                    }
                }
            };
            let rank = async {
                let socket = TcpStream::connect(address).await.unwrap();
                let Ok((mut outgoing, _incoming)) = prove_as_rank(socket, &of_rank).await else {
                    return;
                };
                for message in SAID {
                    outgoing.send(message, None).await.ok(); // the engine may have closed it
                }
                outgoing.end();
            };
            let ((messages, end), ()) = timeout(LIMIT, async { tokio::join!(engine, rank) })
                .await
                .expect("neither end waits for ever");
            (messages, end, said.load(Ordering::Relaxed))
        })
    }

    #[test]
    fn messages_over_tcp_arrive_unaltered_or_not_at_all() {
        let (messages, end, bytes) = heard(None, [1, 1]);
        assert_eq!(messages, SAID);
        end.unwrap();
        // Some places in the long message: both ends of each record, and between.
        let pieces = [0, 200, RECORD, RECORD + 40, 2 * RECORD + 60, 3 * RECORD - 400];
        let places = (0..300).chain(pieces.map(|at| at + 300)).chain(bytes - 60..bytes);
        for at in places {
            let (messages, end, _) = heard(Some(at), [1, 1]);
            let Err(error) = end else {
                panic!("byte {at} of {bytes} was altered, and nobody noticed")
            };
            assert!(
                matches!(error.kind(), ErrorKind::Authentication | ErrorKind::Malformed),
                "byte {at}: {error}"
            );
            assert!(
                messages.len() < SAID.len() && messages[..] == SAID[..messages.len()],
                "byte {at}"
            );
        }
    }

    #[test]
    fn a_peer_with_another_secret_is_refused() {
        let (messages, end, bytes) = heard(None, [1, 2]);
        assert_eq!(end.unwrap_err().kind(), ErrorKind::Authentication);
        assert!(messages.is_empty() && bytes == MESSAGE, "{bytes}");
    }
}
