//! A ROUTER socket. A [`ConnectionHandler`] handles whole connections, a [`Handler`] single
//! messages.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use kvx_core::backend::sync::Mutex;
use kvx_core::{Error, Result};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::AbortHandle;

use super::connection::{Received, SocketConnection};
use super::{Budget, Message, MessageLimits, SocketType};

/// The behaviour of a ROUTER, connection by connection.
pub(crate) trait ConnectionHandler: Send + Sync + 'static {
    /// Talks with one peer. When it returns, the connection is closed.
    fn talk(&self, peer: RouterConnection) -> impl Future<Output = Result<()>> + Send;
}

/// One connection of a ROUTER.
#[derive(Debug)]
pub(crate) struct RouterConnection {
    connection: SocketConnection,
    name: Vec<u8>,
    answers: Arc<Budget>,
    patience: Duration,
    heard: LastMessage,
}

impl RouterConnection {
    /// Waits until there is something to receive. The future may be dropped at any moment.
    pub(crate) async fn readable(&mut self) -> Result<()> {
        self.connection.readable().await
    }

    /// Returns the next message, whose first frame names the peer. `None`: the peer has closed.
    pub(crate) async fn receive(&mut self) -> Result<Option<Message>> {
        loop {
            match self.receive_one().await? {
                Received::Message(message) => return Ok(Some(message)),
                Received::Command => {}
                Received::End => return Ok(None),
            }
        }
    }

    /// Returns the next message, or a ping that was answered, so that the caller can send in
    /// between.
    pub(crate) async fn receive_one(&mut self) -> Result<Received> {
        let mut received = self.connection.receive_one(self.patience).await?;
        if let Received::Message(message) = &mut received {
            self.heard.note();
            message.put_first(self.name.clone());
        }
        Ok(received)
    }

    /// Sends frames, without one that names the peer. Errors: `TimedOut`: the peer does not read;
    /// `Exhausted`.
    pub(crate) async fn send<F: AsRef<[u8]>>(&mut self, frames: &[F]) -> Result<()> {
        let mut unread = self.answers.share();
        unread.take(frames.iter().map(|frame| frame.as_ref().len()).sum())?;
        self.connection.send(frames, self.patience).await
    }
}

/// Answers one message after the other.
struct MessageHandler<H>(Arc<H>);

impl<H: Handler> ConnectionHandler for MessageHandler<H> {
    async fn talk(&self, mut peer: RouterConnection) -> Result<()> {
        let mut session = H::Session::default();
        while let Some(message) = peer.receive().await? {
            let Some(answer) = self.0.answer(&mut session, message.frames()) else { return Ok(()) };
            drop(message);
            peer.send(&answer[1..]).await?;
        }
        Ok(())
    }
}

/// The behaviour of a ROUTER, message by message.
pub(crate) trait Handler: Send + Sync + 'static {
    /// The state that is kept for a connection.
    type Session: Default + Send;

    /// Returns the answer to a message. Both start with the frame that names the peer. `None`:
    /// there is no answer, and the connection ends.
    fn answer(&self, session: &mut Self::Session, message: &[Vec<u8>]) -> Option<Vec<Arc<[u8]>>>;
}

/// The limits for the peers of a ROUTER.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RouterLimits {
    /// The number of connections. A further one replaces the one that has been silent longest.
    pub(crate) connections: usize,
    /// The limits of one message.
    pub(crate) message: MessageLimits,
    /// The bytes of all messages in memory.
    pub(crate) bytes: usize,
    /// The bytes of all answers that peers have not read yet.
    pub(crate) answers: usize,
    /// The time limit for a greeting, for the rest of a message, and for the reading of an answer.
    pub(crate) patience: Duration,
}

/// The budgets that all connections of a ROUTER share.
#[derive(Clone, Debug)]
struct Budgets {
    messages: Arc<Budget>,
    answers: Arc<Budget>,
}

/// A ROUTER socket that listens until it is dropped.
#[derive(Debug)]
pub(crate) struct Router {
    local: SocketAddr,
    accepting: AbortHandle,
    connections: Arc<Connections>,
}

/// The open connections. Each ends with its task.
#[derive(Debug)]
struct Connections {
    began: Instant,
    last: AtomicU64,
    open: Mutex<BTreeMap<u64, OpenConnection>>,
}

#[derive(Debug)]
struct OpenConnection {
    /// The time of the connection's last message, in milliseconds since the start.
    heard: Arc<AtomicU64>,
    task: AbortHandle,
}

impl Router {
    /// Answers all connections, on tasks of the current runtime.
    ///
    /// Errors: those of the operating system for the socket.
    pub(crate) fn serve(
        listener: TcpListener,
        limits: RouterLimits,
        handler: Arc<impl Handler>,
    ) -> Result<Self> {
        Router::serve_by(listener, limits, Arc::new(MessageHandler(handler)))
    }

    /// Serves as [`serve`](Self::serve) does, for handlers that may send several answers to one
    /// message, at any time.
    pub(crate) fn serve_by(
        listener: TcpListener,
        limits: RouterLimits,
        handler: Arc<impl ConnectionHandler>,
    ) -> Result<Self> {
        let local = listener
            .local_addr()
            .map_err(|error| Error::os("a listening socket has no address", error))?;
        let connections = Arc::new(Connections {
            began: Instant::now(),
            last: AtomicU64::new(0),
            open: Mutex::new(BTreeMap::new()),
        });
        let accepting = accept(listener, limits, handler, Arc::clone(&connections));
        Ok(Router { local, accepting: tokio::spawn(accepting).abort_handle(), connections })
    }

    /// Returns the address where the socket listens.
    pub(crate) fn local(&self) -> SocketAddr {
        self.local
    }

    #[cfg(test)]
    pub(crate) fn connections(&self) -> usize {
        self.connections.open.lock().len()
    }
}

impl Drop for Router {
    fn drop(&mut self) {
        self.accepting.abort();
        let open = std::mem::take(&mut *self.connections.open.lock());
        for open in open.into_values() {
            open.task.abort();
        }
    }
}

async fn accept(
    listener: TcpListener,
    limits: RouterLimits,
    handler: Arc<impl ConnectionHandler>,
    connections: Arc<Connections>,
) {
    let budgets =
        Budgets { messages: Budget::new(limits.bytes), answers: Budget::new(limits.answers) };
    loop {
        match listener.accept().await {
            Ok((stream, from)) => {
                if connections.open.lock().len() >= limits.connections {
                    connections.close_most_silent();
                }
                connections.start(stream, from, limits, &handler, &budgets);
            }
            Err(error) => {
                // The process has no file descriptor left. Closing an old connection frees one. The
                // pause avoids a busy loop if other parts of the process hold them all.
                tracing::warn!(%error, "a connection to the side channel was not accepted");
                connections.close_most_silent();
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
    }
}

impl Connections {
    fn now(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    fn close_most_silent(&self) {
        let mut open = self.open.lock();
        let silent = open
            .iter()
            .min_by_key(|(_, open)| open.heard.load(Ordering::Relaxed))
            .map(|(id, _)| *id);
        let closed = silent.and_then(|id| open.remove(&id));
        drop(open);
        if let Some(closed) = closed {
            closed.task.abort();
        }
    }

    fn start(
        self: &Arc<Self>,
        stream: TcpStream,
        from: SocketAddr,
        limits: RouterLimits,
        handler: &Arc<impl ConnectionHandler>,
        budgets: &Budgets,
    ) {
        let id = self.last.fetch_add(1, Ordering::Relaxed) + 1;
        let heard = Arc::new(AtomicU64::new(self.now()));
        let (handler, budgets) = (Arc::clone(handler), budgets.clone());
        let (hears, all) = (
            LastMessage { at: Arc::clone(&heard), all: Arc::downgrade(self) },
            Arc::downgrade(self),
        );
        // The table stays locked until the task is in it, so that the task finds its entry when it
        // ends.
        let mut open = self.open.lock();
        let task = tokio::spawn(async move {
            let _gone = ForgetConnectionOnDrop { id, all };
            if let Err(error) = converse(stream, id, limits, &*handler, budgets, hears).await {
                tracing::debug!(%from, %error, "a connection to the side channel ended");
            }
        });
        open.insert(id, OpenConnection { heard, task: task.abort_handle() });
    }
}

/// Records the time of a connection's last message.
#[derive(Debug)]
struct LastMessage {
    at: Arc<AtomicU64>,
    all: Weak<Connections>,
}

impl LastMessage {
    fn note(&self) {
        if let Some(all) = self.all.upgrade() {
            self.at.store(all.now(), Ordering::Relaxed);
        }
    }
}

/// Removes a connection from the table when its task ends, in whatever way.
struct ForgetConnectionOnDrop {
    id: u64,
    all: Weak<Connections>,
}

impl Drop for ForgetConnectionOnDrop {
    fn drop(&mut self) {
        if let Some(all) = self.all.upgrade() {
            all.open.lock().remove(&self.id);
        }
    }
}

async fn converse(
    stream: TcpStream,
    number: u64,
    limits: RouterLimits,
    handler: &impl ConnectionHandler,
    budgets: Budgets,
    heard: LastMessage,
) -> Result<()> {
    let patience = limits.patience;
    let connection = SocketConnection::open(
        stream,
        SocketType::Router,
        limits.message,
        &budgets.messages,
        patience,
    )
    .await?;
    // ZeroMQ names peers without an identity by a zero and a number.
    let name = match connection.identity.is_empty() {
        true => [&[0], &number.to_be_bytes()[4..]].concat(),
        false => connection.identity.clone(),
    };
    handler
        .talk(RouterConnection { connection, name, answers: budgets.answers, patience, heard })
        .await
}
