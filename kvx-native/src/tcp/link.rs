//! A connected peer, as core holds it.

use std::sync::Arc;

use kvx_core::sync::Mutex;
use kvx_core::transport::{
    INLINE_BYTES, INLINE_SEGMENTS, Link, PeerSection, RemoteRegion, RemoteSpec, Turn,
};
use kvx_core::{Bound, Capabilities, LinkId, Result, Ticket, TransferId};

use super::address;
use super::memory;
use super::progress::Command;
use super::transport::{Handle, capabilities};

/// What the machine lets a link say of itself.
#[derive(Debug, Default)]
pub(super) struct LinkStanding(Mutex<Option<String>>);

impl LinkStanding {
    pub(super) fn set(&self, text: String) {
        *self.0.lock() = Some(text);
    }

    fn get(&self) -> Option<String> {
        self.0.lock().clone()
    }
}

/// The handle of a link.
pub(super) struct TcpLink {
    pub(super) id: LinkId,
    pub(super) handle: Arc<Handle>,
    pub(super) standing: Arc<LinkStanding>,
}

/// A region of the peer: number, key and bounds are all it takes, and a plan has those.
pub(super) struct TcpRemote {
    /// The number of the stage it lies on at the peer; 0: host memory.
    pub(super) stage: u32,
}

impl RemoteRegion for TcpRemote {}

// SAFETY: a plan's local memory is touched only in turns of the machine's connections, of which there is one at a time,
// while the plan's requests hold its blocks; they let go of them before its ticket settles, and what a device still
// copies, and a turn that others went on without, hold that up (`DeferredCompletions`).
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
        Ok(Arc::new(TcpRemote { stage: memory::import(region.export)? }))
    }

    fn post(&self, plan: Arc<Bound>, id: TransferId, done: Ticket) {
        let size = plan.size();
        let command = Command::Post { link: self.id, plan, id, done };
        if size.bytes <= INLINE_BYTES && size.segments <= INLINE_SEGMENTS {
            // It is sent off on the calling thread.
            self.handle.reactor.submit_and_turn(command);
        } else {
            self.handle.reactor.submit(command);
        }
    }

    fn notify(&self, bytes: &[u8], done: Ticket) {
        self.handle.reactor.submit_and_turn(Command::Notify {
            link: self.id,
            bytes: bytes.into(),
            done,
        });
    }

    fn cancel(&self, id: TransferId) {
        self.handle.reactor.submit(Command::Cancel { link: self.id, id });
    }

    fn drive(&self) -> Turn {
        self.handle.reactor.drive()
    }

    fn stop_driving(&self) {
        self.handle.reactor.stop_driving();
    }

    fn close(&self) {
        self.handle.reactor.submit(Command::Close { link: self.id });
    }
}

impl Drop for TcpLink {
    fn drop(&mut self) {
        if self.handle.is_at_home() {
            self.close();
        }
    }
}
