//! The running end of a transport, which its handle, its regions and its links share.

use std::sync::Arc;

use kvx_backend::reactor::Reactor;
use kvx_core::{Capabilities, DeviceAccess};

use super::completion::BatchEvents;
use super::machine::Machine;
use super::memory::Regions;
use super::progress::Command;

/// The shared state of a transport.
pub(crate) struct Endpoint {
    pub(crate) reactor: Reactor<Machine>,
    pub(crate) capabilities: Arc<Capabilities>,
    pub(crate) regions: Arc<Regions>,
    /// The devices of this agent.
    pub(crate) devices: Vec<Arc<dyn DeviceAccess>>,
}

impl BatchEvents for Endpoint {
    fn batch_ended(&self, number: u64, turn: bool) {
        let command = Command::BatchEnded { number };
        if turn {
            self.reactor.submit_and_turn(command);
        } else {
            self.reactor.submit(command);
        }
    }

    fn device_reported(&self) {
        self.reactor.submit(Command::DeviceReported);
    }
}
