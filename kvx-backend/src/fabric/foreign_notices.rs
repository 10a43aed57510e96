//! Notifications of foreign agents that do not fit into the agent's queue yet.

use std::collections::VecDeque;
use std::sync::Arc;

use kvx_core::backend::{MAX_FOREIGN_NOTIFICATION, QueueFull};

/// The limits for waiting notifications of foreign agents: their number and their bytes.
const MAX_HELD: (usize, usize) = (16 << 10, 64 << 20);

/// Waiting notifications of foreign agents, the oldest first. Such agents have no flow control.
#[derive(Default)]
pub(super) struct ForeignNotices {
    queue: VecDeque<(Arc<str>, Vec<u8>)>,
    bytes: usize,
}

impl ForeignNotices {
    /// Adds a notification. The error says why it is dropped.
    pub(super) fn add(&mut self, from: Arc<str>, bytes: Vec<u8>) -> Result<(), String> {
        let (count, room) = MAX_HELD;
        let len = bytes.len();
        if len > MAX_FOREIGN_NOTIFICATION {
            return Err(format!(
                "it has {len} bytes, and at most {MAX_FOREIGN_NOTIFICATION} are allowed"
            ));
        }
        if self.queue.len() >= count || self.bytes + len > room {
            return Err(format!(
                "{} are waiting already: the program must take them faster",
                self.queue.len()
            ));
        }
        self.bytes += len;
        self.queue.push_back((from, bytes));
        Ok(())
    }

    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Delivers the waiting notifications, the oldest first, until `deliver` reports a full queue.
    pub(super) fn deliver(
        &mut self,
        mut deliver: impl FnMut(&str, &[u8]) -> Result<(), QueueFull>,
    ) {
        while let Some((from, bytes)) = self.queue.front()
            && deliver(from, bytes).is_ok()
        {
            self.bytes -= bytes.len();
            self.queue.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notifications_of_foreign_agents_are_bounded_and_none_is_stuck() {
        let (mut held, from) = (ForeignNotices::default(), Arc::<str>::from("python"));
        assert!(held.add(Arc::clone(&from), vec![0; MAX_FOREIGN_NOTIFICATION + 1]).is_err());
        let fit = |held: &mut ForeignNotices, len| {
            (0..=MAX_HELD.0)
                .take_while(|_| held.add(Arc::clone(&from), vec![7; len]).is_ok())
                .count()
        };
        assert_eq!(fit(&mut held, MAX_FOREIGN_NOTIFICATION), MAX_HELD.1 / MAX_FOREIGN_NOTIFICATION);
        let mut room = 3;
        held.deliver(|name, bytes| {
            assert_eq!((name, bytes.len()), ("python", MAX_FOREIGN_NOTIFICATION));
            room -= 1;
            if room < 0 { Err(QueueFull) } else { Ok(()) }
        });
        assert_eq!(fit(&mut held, MAX_FOREIGN_NOTIFICATION), 3);
        held.deliver(|_, _| Ok(()));
        assert_eq!((held.bytes, fit(&mut held, 1)), (0, MAX_HELD.0));
    }
}
