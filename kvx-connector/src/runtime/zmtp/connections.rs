//! The open connections of a ROUTER: the limits for them, and which of them is closed when a new
//! one needs its place.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Instant;

use kvx_core::backend::sync::Mutex;
use tokio::task::AbortHandle;

use super::{Budget, MessageLimits};

/// The limits for a class of peers: those that have authenticated, or the others.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PeerLimits {
    /// The number of connections. A further one replaces one of the address that has most: the one
    /// that has been silent longest.
    pub(crate) connections: usize,
    /// The limits of one message.
    pub(crate) message: MessageLimits,
    /// The bytes of all messages in memory. Peers of one address get half of them at most.
    pub(crate) bytes: usize,
}

/// The open connections. Each ends with its task.
#[derive(Debug)]
pub(super) struct Connections {
    began: Instant,
    open: Mutex<OpenConnections>,
}

#[derive(Debug)]
struct OpenConnections {
    /// The number of the last connection.
    last: u64,
    unauthenticated: PeerClass,
    authenticated: PeerClass,
}

/// The connections of a class of peers.
#[derive(Debug)]
struct PeerClass {
    limits: PeerLimits,
    /// The budget of all messages.
    messages: Arc<Budget>,
    open: BTreeMap<u64, OpenConnection>,
}

#[derive(Debug)]
struct OpenConnection {
    from: IpAddr,
    /// The time of its last message, in milliseconds since the start.
    heard: Arc<AtomicU64>,
    /// The budget of the messages of its address.
    messages: Arc<Budget>,
    task: AbortHandle,
}

/// The place of a connection among the others. Dropping it frees the place.
#[derive(Debug)]
pub(super) struct ConnectionPlace {
    /// The number of the connection.
    pub(super) number: u64,
    all: Weak<Connections>,
    heard: Arc<AtomicU64>,
}

/// Returns the address that counts: peers choose the last 64 bits of an IPv6 address.
pub(crate) fn counted(from: SocketAddr) -> IpAddr {
    match from.ip().to_canonical() {
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() >> 64 << 64).into(),
        address => address,
    }
}

impl Connections {
    pub(super) fn new(unauthenticated: PeerLimits, authenticated: PeerLimits) -> Arc<Self> {
        let open = OpenConnections {
            last: 0,
            unauthenticated: PeerClass::new(unauthenticated),
            authenticated: PeerClass::new(authenticated),
        };
        Arc::new(Connections { began: Instant::now(), open: Mutex::new(open) })
    }

    fn now(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    /// Starts the task of a new connection. `start` gets its place, and the limits and the budget
    /// of its messages.
    pub(super) fn start(
        self: &Arc<Self>,
        from: SocketAddr,
        start: impl FnOnce(ConnectionPlace, MessageLimits, &Arc<Budget>) -> AbortHandle,
    ) {
        let (from, heard) = (counted(from), Arc::new(AtomicU64::new(self.now())));
        // The table stays locked until the task is in it, so that the task finds its entry when it
        // ends.
        let mut open = self.open.lock();
        open.last += 1;
        let number = open.last;
        let peers = &mut open.unauthenticated;
        let replaced = peers.make_room();
        let messages = peers.messages_of(from);
        let place =
            ConnectionPlace { number, all: Arc::downgrade(self), heard: Arc::clone(&heard) };
        let task = start(place, peers.limits.message, &messages);
        peers.open.insert(number, OpenConnection { from, heard, messages, task });
        drop(open);
        close(replaced);
    }

    /// Closes one connection of an unauthenticated peer, if there is any.
    pub(super) fn close_unauthenticated(&self) {
        let closed = self.open.lock().unauthenticated.take_first_to_go();
        close(closed);
    }

    pub(super) fn close_all(&self) {
        let mut open = self.open.lock();
        let all = [
            std::mem::take(&mut open.unauthenticated.open),
            std::mem::take(&mut open.authenticated.open),
        ];
        drop(open);
        for connection in all.into_iter().flat_map(BTreeMap::into_values) {
            connection.task.abort();
        }
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        let open = self.open.lock();
        open.unauthenticated.open.len() + open.authenticated.open.len()
    }
}

fn close(task: Option<AbortHandle>) {
    if let Some(task) = task {
        task.abort();
    }
}

impl PeerClass {
    fn new(limits: PeerLimits) -> Self {
        PeerClass { limits, messages: Budget::new(limits.bytes), open: BTreeMap::new() }
    }

    /// Removes a connection if there is no place for a further one. Returns its task.
    fn make_room(&mut self) -> Option<AbortHandle> {
        if self.open.len() < self.limits.connections { None } else { self.take_first_to_go() }
    }

    /// Removes a connection of the address that has most: the one that has been silent longest.
    fn take_first_to_go(&mut self) -> Option<AbortHandle> {
        let mut crowds = HashMap::<IpAddr, usize>::new();
        for connection in self.open.values() {
            *crowds.entry(connection.from).or_default() += 1;
        }
        let first_to_go = self.open.iter().min_by_key(|(_, connection)| {
            let crowd = crowds.get(&connection.from).copied();
            (Reverse(crowd), connection.heard.load(Ordering::Relaxed))
        });
        let number = *first_to_go?.0;
        self.open.remove(&number).map(|connection| connection.task)
    }

    /// Returns the budget for the messages of an address, which all its connections share.
    fn messages_of(&self, from: IpAddr) -> Arc<Budget> {
        let other = self.open.values().find(|connection| connection.from == from);
        other.map_or_else(
            || self.messages.part(self.limits.bytes / 2),
            |other| Arc::clone(&other.messages),
        )
    }
}

impl ConnectionPlace {
    /// Records that a message has arrived.
    pub(super) fn note_message(&self) {
        if let Some(all) = self.all.upgrade() {
            self.heard.store(all.now(), Ordering::Relaxed);
        }
    }

    /// Counts the connection among those of authenticated peers. Returns the limits and the budget
    /// of its messages. `None`: it has been closed meanwhile.
    pub(super) fn authenticated(&self) -> Option<(MessageLimits, Arc<Budget>)> {
        let all = self.all.upgrade()?;
        let mut open = all.open.lock();
        let mut connection = open.unauthenticated.open.remove(&self.number)?;
        let peers = &mut open.authenticated;
        let replaced = peers.make_room();
        connection.messages = peers.messages_of(connection.from);
        let its_own = (peers.limits.message, Arc::clone(&connection.messages));
        peers.open.insert(self.number, connection);
        drop(open);
        close(replaced);
        Some(its_own)
    }
}

impl Drop for ConnectionPlace {
    fn drop(&mut self) {
        if let Some(all) = self.all.upgrade() {
            let mut open = all.open.lock();
            let closed = (
                open.unauthenticated.open.remove(&self.number),
                open.authenticated.open.remove(&self.number),
            );
            drop(open);
            drop(closed);
        }
    }
}
