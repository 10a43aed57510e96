//! The machine's side of streams from and to devices.

use std::time::Instant;

use kvx_backend::reactor::Outbox;

use super::ending::DeferredCompletions;
use super::progress::Machine;

impl Machine {
    /// Looks after streams whose device has copied, and settles what has waited for that. Says how many there were.
    pub(super) fn wake_streams(&mut self, now: Instant, out: &mut Outbox) -> usize {
        let mut woken = std::mem::take(&mut self.woken);
        let count = woken.len();
        for token in woken.drain(..) {
            let (settled, answer) = self.scope.shared.ending.look(token);
            settled.into_iter().for_each(|(ticket, result)| out.settle(ticket, result));
            if let Some(answer) = answer {
                self.answer(&answer);
            }
            let key = DeferredCompletions::key(token);
            if let Some(conn) = self.conns.get_mut(key) {
                conn.woken(token, now, &mut self.scope);
                self.touch(key);
            }
        }
        self.woken = woken;
        self.take_effect(now, out);
        count
    }
}
