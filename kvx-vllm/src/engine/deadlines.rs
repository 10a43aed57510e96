//! Deadlines by key.

use std::collections::{BTreeMap, BTreeSet};

use crate::time::Time;

/// Deadlines by key, at most one per key, in order of their times.
#[derive(Clone, Debug)]
pub(crate) struct Deadlines<K> {
    by_key: BTreeMap<K, Time>,
    by_time: BTreeSet<(Time, K)>,
}

impl<K> Default for Deadlines<K> {
    fn default() -> Self {
        Deadlines { by_key: BTreeMap::new(), by_time: BTreeSet::new() }
    }
}

impl<K: Ord + Clone> Deadlines<K> {
    /// Sets or moves a deadline.
    pub(crate) fn set(&mut self, key: K, at: Time) {
        if let Some(old) = self.by_key.insert(key.clone(), at) {
            self.by_time.remove(&(old, key.clone()));
        }
        self.by_time.insert((at, key));
    }

    /// Removes a deadline, if it exists.
    pub(crate) fn clear(&mut self, key: &K) {
        if let Some(at) = self.by_key.remove(key) {
            self.by_time.remove(&(at, key.clone()));
        }
    }

    /// Returns the earliest deadline.
    pub(crate) fn next(&self) -> Option<Time> {
        self.by_time.first().map(|(at, _)| *at)
    }

    /// Removes the earliest deadline, even if it has not passed, and returns its key.
    pub(crate) fn take_next(&mut self) -> Option<K> {
        let (_, key) = self.by_time.pop_first()?;
        self.by_key.remove(&key);
        Some(key)
    }

    /// Removes one deadline that has passed, and returns its key.
    pub(crate) fn take_reached(&mut self, now: Time) -> Option<K> {
        let (at, _) = self.by_time.first()?;
        if !now.has_reached(*at) {
            return None;
        }
        self.take_next()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn at(seconds: u64) -> Time {
        Time::from_origin(Duration::from_secs(seconds))
    }

    #[test]
    fn deadlines_are_taken_in_order_even_after_they_were_moved() {
        let mut deadlines = Deadlines::default();
        deadlines.set("a", at(5));
        deadlines.set("b", at(6));
        deadlines.set("a", at(9));
        assert_eq!(deadlines.next(), Some(at(6)));
        assert_eq!(deadlines.take_reached(at(5)), None);
        assert_eq!(
            deadlines.take_reached(at(6)),
            Some("b"),
            "a deadline has passed at its own moment"
        );
        deadlines.clear(&"a");
        assert_eq!((deadlines.next(), deadlines.take_reached(at(100))), (None, None));
    }
}
