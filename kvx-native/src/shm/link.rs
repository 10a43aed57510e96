//! A link to a peer on this host: the handle that core holds.

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kvx_backend::error::{check_notification, other_peer};
use kvx_core::backend::{
    BoundPlan, INLINE_BYTES, INLINE_SEGMENTS, Link, PeerSection, RemoteRegion, RemoteSpec, Ticket,
    Turn,
};
use kvx_core::{Capabilities, Op, Result, TransferId};

use super::endpoint::Endpoint;
use super::error::NAME;
use super::inline::read_inline;
use super::memory::{Reach, openers};
use super::progress::Command;
use super::shared_link::{Import, Reachability, SharedLink};
use super::window::Shutter;

/// The limit in blocks for a write whose request is sent on the poster's thread.
const SHORT_WRITE: u64 = 2048;

/// The handle of a link.
pub(crate) struct ShmLink {
    endpoint: Arc<Endpoint>,
    shared: Arc<SharedLink>,
    imports: AtomicU64,
}

impl ShmLink {
    pub(crate) fn new(endpoint: Arc<Endpoint>, shared: Arc<SharedLink>) -> Self {
        ShmLink { endpoint, shared, imports: AtomicU64::new(0) }
    }

    /// Checks that the copying process can read the source of the bytes: this process for a read,
    /// the peer for a write.
    fn check_reachability(&self, plan: &BoundPlan) -> Result<()> {
        let foreign = match plan.op() {
            Op::Read => plan.remotes().iter().any(|remote| {
                let any: &dyn Any = &*remote.region;
                any.downcast_ref::<Import>().is_none_or(|import| import.reach == Reach::Foreign)
            }),
            Op::Write => {
                plan.locals().iter().any(|local| Reach::of(&local.memory) == Reach::Foreign)
            }
        };
        match (foreign, self.shared.reachability.get()) {
            (false, _) => Ok(()),
            (true, None) => Err(self.shared.gone()),
            (true, Some(reachability)) => match plan.op() {
                Op::Read => reachability.ours.clone(),
                Op::Write => reachability.theirs.clone(),
            },
        }
    }
}

// SAFETY: a plan's memory is touched only by the machine, which settles the ticket after its last
// access; by devices and copying threads, whose last batch lands before the ticket of its flight
// settles; or by the poster of a small read, which settles it afterwards. A peer that pulls a write
// has confirmed its end, or has died, before the ticket settles.
unsafe impl Link for ShmLink {
    fn capabilities(&self) -> Arc<Capabilities> {
        Arc::clone(&self.endpoint.capabilities)
    }

    fn describe(&self) -> String {
        let devices =
            if self.endpoint.devices.is_empty() { "" } else { ", device memory by its driver" };
        match self.shared.reachability.get() {
            None => "shared memory, not up".to_owned(),
            Some(Reachability { ours: Ok(()), theirs: Ok(()) }) => {
                format!("shared memory: pools mapped{devices}, other memory by process_vm_readv")
            }
            Some(reachability) => {
                let refused = |op, reachability: &Result<()>| match reachability {
                    Ok(()) => String::new(),
                    Err(reason) => format!("; no {op} of other memory: {}", reason.sentence()),
                };
                let (reads, writes) =
                    (refused("reads", &reachability.ours), refused("writes", &reachability.theirs));
                format!("shared memory: pools mapped{devices}{reads}{writes}")
            }
        }
    }

    fn update(&self, peer: PeerSection<'_>) -> Result<()> {
        if *peer.identity == self.shared.peer {
            return Ok(()); // the peer's address never changes within an incarnation
        }
        Err(other_peer(&self.shared.peer, peer.identity).with_backend(NAME))
    }

    fn import(&self, region: RemoteSpec<'_>) -> Result<Arc<dyn RemoteRegion>> {
        // Reads alone need to know whether foreign memory is readable; posting one checks that.
        let reach = Reach::import(region.export)?;
        if let Reach::Device(owner) = reach {
            openers(&self.endpoint.devices, Some(region.kind), owner)?;
        }
        let number = self.imports.fetch_add(1, Ordering::Relaxed);
        let import = Arc::new(Import {
            number,
            id: region.id,
            key: region.key,
            len: region.len,
            reach,
            shutter: Shutter::default(),
        });
        let link = Arc::clone(&self.shared);
        self.endpoint.reactor.submit(Command::Import { link, import: Arc::clone(&import) });
        Ok(import)
    }

    fn post(&self, plan: Arc<BoundPlan>, id: TransferId, done: Ticket) {
        if let Err(reason) = self.check_reachability(&plan) {
            drop(plan);
            return done.settle(Err(reason));
        }
        let size = plan.size();
        let small = match plan.op() {
            Op::Read => size.bytes <= INLINE_BYTES && size.segments <= INLINE_SEGMENTS,
            Op::Write => size.blocks <= SHORT_WRITE,
        };
        if small && plan.op() == Op::Read && self.shared.gone.get().is_none() && read_inline(&plan)
        {
            drop(plan);
            return done.settle(Ok(()));
        }
        let link = Arc::clone(&self.shared);
        if small {
            let inline_on = Some(std::thread::current().id());
            self.endpoint.reactor.submit_and_turn(Command::Post {
                link,
                plan,
                id,
                done,
                inline_on,
            });
        } else {
            self.endpoint.reactor.submit(Command::Post { link, plan, id, done, inline_on: None });
        }
    }

    fn notify(&self, bytes: &[u8], done: Ticket) {
        if let Err(why) = check_notification(bytes) {
            return done.settle(Err(why.with_backend(NAME)));
        }
        let link = Arc::clone(&self.shared);
        self.endpoint.reactor.submit(Command::Notify { link, bytes: bytes.into(), done });
    }

    fn cancel(&self, id: TransferId) {
        self.endpoint.reactor.submit(Command::Cancel { link: Arc::clone(&self.shared), id });
    }

    fn drive(&self) -> Turn {
        self.endpoint.reactor.drive()
    }

    fn stop_driving(&self) {
        self.endpoint.reactor.stop_driving();
    }

    fn close(&self) {
        self.endpoint.reactor.submit(Command::Close { link: Arc::clone(&self.shared) });
    }
}
