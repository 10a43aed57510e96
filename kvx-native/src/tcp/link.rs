//! A connected peer: the handle that core holds.

use std::sync::Arc;
use std::time::Duration;

use kvx_backend::reactor::Reactor;
use kvx_core::backend::{
    BoundPlan, INLINE_BYTES, INLINE_SEGMENTS, Link, LinkId, PeerSection, RemoteRegion, RemoteSpec,
    Ticket, Turn,
};
use kvx_core::{
    Capabilities, HungPageScope, Idle, Isolation, MemoryKinds, PerOp, Result, Revocation,
    TransferId,
};

use crate::tcp::address;
use crate::tcp::context::AgentContext;
use crate::tcp::links::LinkStanding;
use crate::tcp::machine::{Command, Machine};
use crate::tcp::memory::regions::{TcpRemote, import};

/// Returns the capabilities of TCP.
pub(crate) fn capabilities() -> Capabilities {
    Capabilities {
        isolation: PerOp::same(Isolation::Owner),
        idle: Idle::Asleep,
        target_cpu: PerOp::BOTH,
        revocation: Revocation::Owner,
        peer_loss_within: Some(Duration::from_secs(1)),
        settles_without_peer: PerOp::BOTH,
        hung_page: HungPageScope::Peer,
        ordered: false,
        // Memory of a device comes with the device access that copies it.
        local: MemoryKinds::ALL,
        remote: MemoryKinds::ALL,
    }
}

/// The handle of a link.
pub(crate) struct TcpLink {
    pub(crate) id: LinkId,
    pub(crate) context: Arc<AgentContext>,
    pub(crate) reactor: Arc<Reactor<Machine>>,
    pub(crate) standing: Arc<LinkStanding>,
}

// SAFETY: a plan's local memory is touched only in turns of the machine's connections, one at a
// time, while the plan's requests hold its blocks; they release the blocks before its ticket
// settles. Copies of a device in progress, and an abandoned turn, delay that
// (`DeferredCompletions`).
unsafe impl Link for TcpLink {
    fn capabilities(&self) -> Arc<Capabilities> {
        Arc::new(capabilities())
    }

    fn describe(&self) -> String {
        self.standing.get().unwrap_or_else(|| "TCP, not connected yet".into())
    }

    fn update(&self, peer: PeerSection<'_>) -> Result<()> {
        address::decode(peer.address).map(|_| ())
    }

    fn import(&self, region: RemoteSpec<'_>) -> Result<Arc<dyn RemoteRegion>> {
        Ok(Arc::new(TcpRemote { stage: import(region.export)? }))
    }

    fn post(&self, plan: Arc<BoundPlan>, id: TransferId, done: Ticket) {
        let size = plan.size();
        let command = Command::Post { link: self.id, plan, id, done };
        if size.bytes <= INLINE_BYTES && size.segments <= INLINE_SEGMENTS {
            // The calling thread sends it.
            self.reactor.submit_and_turn(command);
        } else {
            self.reactor.submit(command);
        }
    }

    fn notify(&self, bytes: &[u8], done: Ticket) {
        self.reactor.submit_and_turn(Command::Notify { link: self.id, bytes: bytes.into(), done });
    }

    fn cancel(&self, id: TransferId) {
        self.reactor.submit(Command::Cancel { link: self.id, id });
    }

    fn drive(&self) -> Turn {
        self.reactor.drive()
    }

    fn stop_driving(&self) {
        self.reactor.stop_driving();
    }

    fn close(&self) {
        self.reactor.submit(Command::Close { link: self.id });
    }
}

impl Drop for TcpLink {
    fn drop(&mut self) {
        if self.context.is_owner_process() {
            self.close();
        }
    }
}
