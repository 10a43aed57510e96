//! The connections of a machine, one of which may be away for its turn.

use std::ops::{Index, IndexMut};

use slab::Slab;

use crate::tcp::connections::connection::Conn;

/// See the module. Who looks at all of them does not see the one that is away.
#[derive(Default)]
pub(crate) struct Conns(Slab<Option<Box<Conn>>>);

impl Conns {
    pub(crate) fn insert(&mut self, conn: Conn) -> usize {
        self.0.insert(Some(Box::new(conn)))
    }

    pub(crate) fn get(&self, key: usize) -> Option<&Conn> {
        self.0.get(key)?.as_deref()
    }

    pub(crate) fn get_mut(&mut self, key: usize) -> Option<&mut Conn> {
        self.0.get_mut(key)?.as_deref_mut()
    }

    /// Takes one out for good, also one that is away: that does not come back to its place.
    pub(crate) fn remove(&mut self, key: usize) -> Option<Box<Conn>> {
        self.0.try_remove(key)?
    }

    /// Takes one out for its turn.
    pub(crate) fn send_away(&mut self, key: usize) -> Option<Box<Conn>> {
        self.0.get_mut(key)?.take()
    }

    /// It is back.
    pub(crate) fn put_back(&mut self, key: usize, conn: Box<Conn>) {
        if let Some(place) = self.0.get_mut(key) {
            *place = Some(conn);
        }
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (usize, &Conn)> {
        self.0.iter().filter_map(|(key, conn)| Some((key, conn.as_deref()?)))
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = (usize, &mut Conn)> {
        self.0.iter_mut().filter_map(|(key, conn)| Some((key, conn.as_deref_mut()?)))
    }
}

impl Index<usize> for Conns {
    type Output = Conn;

    fn index(&self, key: usize) -> &Conn {
        self.get(key)
            .expect("whoever has a key of a connection loses it before the connection goes")
    }
}

impl IndexMut<usize> for Conns {
    fn index_mut(&mut self, key: usize) -> &mut Conn {
        self.get_mut(key)
            .expect("whoever has a key of a connection loses it before the connection goes")
    }
}
