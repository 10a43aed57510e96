//! The connections of a machine, one of which may be away for its turn.

use std::ops::{Index, IndexMut};

use slab::Slab;

use super::conn::Conn;

/// See the module. Who looks at all of them does not see the one that is away.
#[derive(Default)]
pub(super) struct Conns(Slab<Option<Box<Conn>>>);

impl Conns {
    pub(super) fn insert(&mut self, conn: Conn) -> usize {
        self.0.insert(Some(Box::new(conn)))
    }

    pub(super) fn get(&self, key: usize) -> Option<&Conn> {
        self.0.get(key)?.as_deref()
    }

    pub(super) fn get_mut(&mut self, key: usize) -> Option<&mut Conn> {
        self.0.get_mut(key)?.as_deref_mut()
    }

    /// Takes one out for good, also one that is away: that does not come back to its place.
    pub(super) fn remove(&mut self, key: usize) -> Option<Box<Conn>> {
        self.0.try_remove(key)?
    }

    /// Takes one out for its turn.
    pub(super) fn send_away(&mut self, key: usize) -> Option<Box<Conn>> {
        self.0.get_mut(key)?.take()
    }

    /// It is back.
    pub(super) fn put_back(&mut self, key: usize, conn: Box<Conn>) {
        if let Some(place) = self.0.get_mut(key) {
            *place = Some(conn);
        }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (usize, &Conn)> {
        self.0.iter().filter_map(|(key, conn)| Some((key, conn.as_deref()?)))
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = (usize, &mut Conn)> {
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
