//! The connections of a machine, one of which may be taken out for its turn.

use std::ops::{Index, IndexMut};
use std::sync::Arc;

use kvx_core::backend::fork::Private;
use slab::Slab;

use crate::tcp::connections::connection::Conn;

/// All connections by key. Iterators skip the one that has its turn.
#[derive(Default)]
pub(crate) struct Conns(Slab<Place>);

struct Place {
    /// The socket, shared with the connection, so that its descriptor is not reused while the
    /// connection has its turn.
    socket: Arc<Private>,
    /// `None` while the connection has its turn.
    conn: Option<Box<Conn>>,
}

impl Conns {
    pub(crate) fn insert(&mut self, conn: Conn) -> usize {
        self.0.insert(Place { socket: Arc::clone(conn.socket()), conn: Some(Box::new(conn)) })
    }

    pub(crate) fn get(&self, key: usize) -> Option<&Conn> {
        self.0.get(key)?.conn.as_deref()
    }

    pub(crate) fn get_mut(&mut self, key: usize) -> Option<&mut Conn> {
        self.0.get_mut(key)?.conn.as_deref_mut()
    }

    /// Removes a connection for good.
    pub(crate) fn remove(&mut self, key: usize) -> Option<Box<Conn>> {
        self.0.try_remove(key)?.conn
    }

    /// Takes a connection out for its turn.
    pub(crate) fn take(&mut self, key: usize) -> Option<Box<Conn>> {
        self.0.get_mut(key)?.conn.take()
    }

    /// Puts a connection back after its turn.
    pub(crate) fn put_back(&mut self, key: usize, conn: Box<Conn>) {
        if let Some(place) = self.0.get_mut(key) {
            place.conn = Some(conn);
        }
    }

    /// Removes a connection whose turn was abandoned. Returns its socket.
    pub(crate) fn abandon(&mut self, key: usize) -> Option<Arc<Private>> {
        self.0.try_remove(key).map(|place| place.socket)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (usize, &Conn)> {
        self.0.iter().filter_map(|(key, place)| Some((key, place.conn.as_deref()?)))
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = (usize, &mut Conn)> {
        self.0.iter_mut().filter_map(|(key, place)| Some((key, place.conn.as_deref_mut()?)))
    }
}

impl Index<usize> for Conns {
    type Output = Conn;

    fn index(&self, key: usize) -> &Conn {
        self.get(key).expect("all keys of a connection are removed before the connection is")
    }
}

impl IndexMut<usize> for Conns {
    fn index_mut(&mut self, key: usize) -> &mut Conn {
        self.get_mut(key).expect("all keys of a connection are removed before the connection is")
    }
}
