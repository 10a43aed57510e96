//! The way to the machine, which links, regions and the transport hold.

use std::sync::{Arc, Weak};

use kvx_backend::reactor::Reactor;

use crate::tcp::context::AgentContext;
use crate::tcp::machine::operator::{Operator, Owned};

/// See the module.
pub(crate) struct Handle {
    pub(crate) context: Arc<AgentContext>,
    pub(crate) reactor: Reactor<Operator>,
    pub(crate) machine: Weak<Owned>,
}

impl Handle {
    /// Has another thread go on without a turn that hangs.
    pub(crate) fn go_on_without(&self, turn: u64) {
        let start = |next| self.reactor.go_on_with(next);
        if !self.machine.upgrade().is_some_and(|machine| machine.go_on_without(turn, start)) {
            self.context.turns.stop_watching();
        }
    }
}
