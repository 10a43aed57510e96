//! The initiator's end of a lane: its requests in flight. [`replies`] handles the frames for them.

mod replies;

use std::sync::Arc;

use kvx_backend::reactor::WorkQueue;
use kvx_core::backend::{BoundPlan, Extents, LinkId};
use kvx_core::{ErrorKind, Op, Result, TransferId};
use slab::Slab;

use crate::described::{Described, Part, Side};
use crate::tcp::connections::lane::{Effect, Scope};
use crate::tcp::frames::input::Input;
use crate::tcp::frames::output::Output;
use crate::tcp::frames::{Frame, put_bare, put_frame};
use crate::tcp::memory::deferred::{Concern, DeferredCompletions};
use crate::tcp::memory::payload::{HostBlocks, Sink, Source, StagedBlocks};
use crate::tcp::region::TcpRegion;

/// The approximate bytes of data of a lane's requests in flight: enough that the owner never waits
/// for the next one.
const WINDOW: u64 = 8 << 20;
/// The limit for requests in flight on a lane.
const MAX_REQUESTS: usize = 256;
/// The approximate limit in bytes for their descriptions.
const MAX_DESCRIBED: usize = 1 << 20;

/// The number of low bits in an id that name the request's slot; the high bits count, so that ids
/// increase.
const SLOT_BITS: u32 = 16;

/// A request in flight.
struct Request {
    id: u64,
    op: Op,
    /// The transfer; `None` if the request was given up. Its payload is then discarded, and its end
    /// only frees its slot.
    transfer: Option<TransferId>,
    /// The local side, as long as it may be touched.
    local: Option<Local>,
    /// True if the request waits for a device: a write for bytes to send, or a read whose END has
    /// arrived for its bytes to land.
    waiting: bool,
    /// The bytes of payload that are still to be received or sent.
    left: u64,
    bytes: u64,
    described: usize,
}

/// The local side of a request.
enum Local {
    From(Source),
    Into(Sink),
}

impl Local {
    fn token(&self) -> Option<u64> {
        match self {
            Local::From(source) => source.token(),
            Local::Into(sink) => sink.token(),
        }
    }

    /// Stops all access to the local side, except for copies that a device has begun.
    fn stop(self, deferred: &DeferredCompletions) {
        match self {
            Local::From(source) => source.stop(deferred),
            Local::Into(sink) => {
                sink.stop(deferred, None);
            }
        }
    }
}

impl Request {
    /// Returns true if the END of the request has arrived but its bytes have not landed.
    fn is_landing(&self) -> bool {
        self.waiting && self.op == Op::Read
    }
}

/// A lane that is up.
pub(crate) struct RequestLane {
    /// The key of the lane's connection.
    key: usize,
    pub(crate) link: LinkId,
    /// The number of the lane; 0 is the small one.
    pub(crate) number: u8,
    requests: Slab<Request>,
    sequence: u64,
    /// The number of writes that were given up and have not ended.
    given_up_writes: usize,
    bytes: u64,
    described: usize,
    /// Writes with payload to send.
    writes: WorkQueue<usize>,
    /// The write whose payload is being sent.
    sending: Option<usize>,
    /// The read whose payload is being received.
    receiving: Option<usize>,
}

impl RequestLane {
    pub(crate) fn new(key: usize, link: LinkId, number: u8) -> Self {
        RequestLane {
            key,
            link,
            number,
            requests: Slab::new(),
            sequence: 0,
            given_up_writes: 0,
            bytes: 0,
            described: 0,
            writes: WorkQueue::default(),
            sending: None,
            receiving: None,
        }
    }

    /// Returns true if another request may be sent; at least one always may be in flight.
    pub(crate) fn has_room(&self) -> bool {
        self.requests.is_empty()
            || self.bytes < WINDOW
                && self.requests.len() < MAX_REQUESTS
                && self.described < MAX_DESCRIBED
    }

    /// Returns true if requests in flight have not ended.
    pub(crate) fn owes_ends(&self) -> bool {
        !self.requests.is_empty()
    }

    /// Returns the bytes of the requests in flight.
    pub(crate) fn load(&self) -> u64 {
        self.bytes
    }

    /// Requests a part of a transfer.
    pub(crate) fn request(
        &mut self,
        plan: &Arc<BoundPlan>,
        part: &Part,
        transfer: TransferId,
        output: &mut Output,
        scope: &mut Scope,
    ) {
        let remote = Described::of(plan, part, Side::Remote, |region| {
            let side = plan.remote(region);
            (side.id, side.key)
        });
        let (op, bytes) = (plan.op(), remote.bytes());
        let local = self.local(plan, part, transfer, &scope.context.deferred);
        let slot = self.requests.vacant_key();
        let id = self.sequence << SLOT_BITS | slot as u64;
        self.sequence += 1;
        let before = output.control.len();
        let frame = if op == Op::Read { Frame::Read } else { Frame::Write };
        put_frame(&mut output.control, frame, id, |out| remote.encode(out));
        let described = output.control.len() - before;
        self.bytes += bytes;
        self.described += described;
        let mut request = Request {
            id,
            op,
            transfer: Some(transfer),
            local: None,
            waiting: false,
            left: bytes,
            bytes,
            described,
        };
        match local {
            Ok(local) => request.local = Some(local),
            Err(why) => scope.effects.push(Effect::Failed { link: self.link, transfer, why }),
        }
        self.requests.insert(request);
        if op == Op::Write {
            self.go_on(slot, &mut scope.effects);
        }
    }

    fn local(
        &self,
        plan: &Arc<BoundPlan>,
        part: &Part,
        transfer: TransferId,
        deferred: &DeferredCompletions,
    ) -> Result<Local> {
        let pair = &plan.pairs()[part.pair];
        let indices = pair.local_indices.slice(part.indices.clone());
        let on_host = pair
            .local
            .first()
            .is_none_or(|placed| plan.local(placed.region).memory.kind().is_host());
        if !on_host {
            let (regions, grids) = TcpRegion::of(plan, &pair.local[part.grids.clone()])?;
            if let Ok(staged) = StagedBlocks::of(&regions, Extents::new(grids, indices))? {
                let (token, concern) =
                    (deferred.token(self.key), Concern::Transfer(self.link, transfer));
                return Ok(match plan.op() {
                    Op::Read => Local::Into(staged.sink(self.number, token, concern)?),
                    Op::Write => Local::From(staged.source(self.number, token, concern)?),
                });
            }
            return Err(
                ErrorKind::Invalid.because("device memory was registered without a way to copy it")
            );
        }
        let grids = match part.grids.len() == pair.local.len() {
            true => Arc::clone(&pair.local),
            false => pair.local[part.grids.clone()].into(),
        };
        let blocks = HostBlocks::local(Arc::clone(plan), Extents::new(grids, indices));
        Ok(match plan.op() {
            Op::Read => Local::Into(Sink::Host(blocks)),
            Op::Write => Local::From(Source::Host(blocks)),
        })
    }

    /// Queues a write without a frame in progress: for its turn, or for the device.
    fn go_on(&mut self, slot: usize, effects: &mut Vec<Effect>) {
        let Some(request) = self.requests.get_mut(slot) else { return }; // it has ended meanwhile
        // A write that was given up has nothing more to send.
        let (Some(Local::From(source)), Some(transfer)) = (&mut request.local, request.transfer)
        else {
            return;
        };
        let has_more = source.resume();
        request.waiting = matches!(has_more, Ok(false)) && request.left > 0;
        match has_more {
            Ok(true) => self.writes.push(slot, request.left),
            Ok(false) => {}
            Err(why) => effects.push(Effect::Failed { link: self.link, transfer, why }),
        }
    }

    fn forget(&mut self, slot: usize) -> Request {
        let request = self.requests.remove(slot);
        self.bytes -= request.bytes;
        self.described -= request.described;
        self.given_up_writes -= usize::from(request.op == Op::Write && request.transfer.is_none());
        request
    }

    /// Stops sending payload of this write. Returns true if some was left.
    fn stop_write(&mut self, slot: usize, left: u64, output: &mut Output) -> bool {
        let queued = !self.writes.extract(|write| *write == slot).is_empty();
        let mut unfinished = queued || left > 0;
        if self.sending == Some(slot) {
            self.sending = None;
            if output.in_payload() {
                output.abort();
                unfinished = true;
            }
        }
        unfinished
    }

    /// Returns true if no other request may begin, because a write that was given up may still be
    /// arriving.
    pub(crate) fn is_fenced(&self) -> bool {
        self.given_up_writes > 0
    }

    /// Gives up all requests of a transfer. Its memory is not touched afterwards, except by copies
    /// that a device has begun. Calls `cancel` with the id of each request.
    pub(crate) fn give_up(
        &mut self,
        transfer: TransferId,
        input: &mut Input,
        output: &mut Output,
        scope: &mut Scope,
        mut cancel: impl FnMut(u64),
    ) {
        let slots = self.requests.iter().filter(|(_, request)| request.transfer == Some(transfer));
        for slot in slots.map(|(slot, _)| slot).collect::<Vec<_>>() {
            let request = &mut self.requests[slot];
            if request.is_landing() {
                if let Some(local) = self.forget(slot).local {
                    local.stop(&scope.context.deferred);
                }
                continue;
            }
            request.transfer = None;
            let local = request.local.take();
            let (id, op, left) = (request.id, request.op, request.left);
            match op {
                Op::Read if self.receiving == Some(slot) && input.in_payload() => {
                    input.abort(&scope.bin)
                }
                Op::Read => {}
                Op::Write => {
                    self.given_up_writes += 1;
                    if self.stop_write(slot, left, output) {
                        put_bare(&mut output.control, Frame::Stop, id);
                    }
                }
            }
            if let Some(local) = local {
                local.stop(&scope.context.deferred);
            }
            cancel(id);
        }
    }
}
