//! A queue of work that takes turns.

/// Schedules turns: small work first, bulk work round robin, and every eighth turn to bulk work so
/// that a stream of small requests cannot starve it.
#[derive(Debug)]
pub struct WorkQueue<W> {
    small: std::collections::VecDeque<W>,
    bulk: std::collections::VecDeque<W>,
    in_a_row: u32,
}

impl<W> Default for WorkQueue<W> {
    fn default() -> Self {
        WorkQueue { small: Default::default(), bulk: Default::default(), in_a_row: 0 }
    }
}

impl<W> WorkQueue<W> {
    /// The size in bytes up to which work counts as small.
    pub const SMALL: u64 = 256 << 10;

    /// Queues work with `left` bytes to go.
    pub fn push(&mut self, work: W, left: u64) {
        if left <= Self::SMALL { self.small.push_back(work) } else { self.bulk.push_back(work) }
    }

    /// Returns the work with the next turn; push it again if it is not finished.
    pub fn next_turn(&mut self) -> Option<W> {
        if self.in_a_row < 8
            && let Some(work) = self.small.pop_front()
        {
            self.in_a_row += 1;
            return Some(work);
        }
        self.in_a_row = 0;
        self.bulk.pop_front().or_else(|| self.small.pop_front())
    }

    /// Returns the work that [`next_turn`](Self::next_turn) would return.
    pub fn peek(&self) -> Option<&W> {
        let small = self.small.front();
        if self.in_a_row < 8 { small.or(self.bulk.front()) } else { self.bulk.front().or(small) }
    }

    /// Returns the number of waiting entries.
    pub fn len(&self) -> usize {
        self.small.len() + self.bulk.len()
    }

    /// Returns true if no entry waits.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Iterates over all waiting work, in no particular order.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut W> {
        self.small.iter_mut().chain(self.bulk.iter_mut())
    }

    /// Removes and returns the entries for which `gone` is true.
    pub fn extract(&mut self, mut gone: impl FnMut(&W) -> bool) -> Vec<W> {
        let mut taken = Vec::new();
        for queue in [&mut self.small, &mut self.bulk] {
            for _ in 0..queue.len() {
                let Some(work) = queue.pop_front() else { break };
                if gone(&work) { taken.push(work) } else { queue.push_back(work) }
            }
        }
        taken
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_work_goes_first_and_does_not_starve_bulk_work() {
        let mut turns = WorkQueue::default();
        turns.push("bulk", 10 << 20);
        for _ in 0..20 {
            turns.push("small", 4096);
        }
        let turn = || {
            let next = turns.peek().copied();
            assert_eq!(turns.next_turn(), next);
            next
        };
        let order: Vec<_> = std::iter::from_fn(turn).collect();
        assert_eq!(order.iter().position(|work| *work == "bulk"), Some(8));
        assert_eq!(order.len(), 21);
    }
}
