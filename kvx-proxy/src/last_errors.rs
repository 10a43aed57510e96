//! The last errors, for `/status`. Repeated ones are counted.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde::Serialize;

use crate::log::{now, shown};

/// An error of an instance, and how often it has occurred.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct RepeatedError {
    instance: String,
    what: String,
    count: u64,
    /// Seconds since the Unix epoch.
    first: f64,
    last: f64,
}

/// The most recent errors, each with its instance and text once. They begin with the latest.
#[derive(Debug, Default)]
pub(crate) struct LastErrors(Mutex<VecDeque<RepeatedError>>);

impl LastErrors {
    const KEPT: usize = 32;

    fn errors(&self) -> MutexGuard<'_, VecDeque<RepeatedError>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds an error, or counts it if it is among the last ones.
    pub(crate) fn add(&self, instance: &str, what: &str) {
        let (what, time) = (shown(what), now());
        let mut errors = self.errors();
        let is_same = |one: &RepeatedError| one.instance == instance && one.what == what;
        let again = errors.iter().position(is_same).and_then(|at| errors.remove(at));
        let error = match again {
            Some(error) => RepeatedError { count: error.count + 1, last: time, ..error },
            None => {
                let instance = instance.to_owned();
                RepeatedError { instance, what, count: 1, first: time, last: time }
            }
        };
        errors.truncate(Self::KEPT - 1);
        errors.push_front(error);
    }

    pub(crate) fn list(&self) -> Vec<RepeatedError> {
        self.errors().iter().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repeated_errors_are_counted_and_move_to_the_front() {
        let errors = LastErrors::default();
        errors.add("a:1", "refused");
        errors.add("b:1", "refused");
        for _ in 0..1000 {
            errors.add("a:1", "refused");
        }
        let list = errors.list();
        let counts: Vec<_> = list.iter().map(|one| (&*one.instance, one.count)).collect();
        assert_eq!(counts, [("a:1", 1001), ("b:1", 1)]);
        assert!(list[0].first <= list[1].first && list[1].last <= list[0].last);
        for count in 0..100 {
            errors.add("c:1", &format!("error {count}"));
        }
        let list = errors.list();
        assert_eq!((list.len(), &*list[0].what, &*list[31].what), (32, "error 99", "error 68"));
        errors.add("c:1", "error 68");
        assert_eq!((errors.list().len(), errors.list()[0].count), (32, 2));
    }

    #[test]
    fn texts_of_others_are_escaped_and_cut() {
        let errors = LastErrors::default();
        errors.add("a:1", &format!("no\u{1b}[31m {}", "x".repeat(4000)));
        let what = errors.list().remove(0).what;
        assert!(what.starts_with("no\\u{1b}[31m x") && what.len() < 400, "{what}");
    }
}
