//! The initiator's side of a lane: requests that are out, and the payload that comes in and goes out for them.

use std::sync::Arc;

use kvx_backend::reactor::WorkQueue;
use kvx_core::backend::{BoundPlan, Extents, LinkId};
use kvx_core::{Error, ErrorKind, Op, Result, TransferId};
use slab::Slab;

use crate::described::{Described, Part, Side};
use crate::tcp::connections::lane::{Effect, LaneEnd, Scope};
use crate::tcp::frames::input::Input;
use crate::tcp::frames::output::Output;
use crate::tcp::frames::{Frame, Header, put_bare, put_frame, read_end};
use crate::tcp::memory::deferred::{Concern, DeferredCompletions};
use crate::tcp::memory::payload::{HostBlocks, Sink, Source, Staged};
use crate::tcp::region::TcpRegion;
use crate::tcp::socket::chunk::Chunk;

/// Data of the requests that are out on a lane, about: enough that the owner never waits for the next.
const WINDOW: u64 = 8 << 20;
/// Requests that are out on a lane.
const MAX_REQUESTS: usize = 256;
/// Bytes of their descriptions, about.
const MAX_DESCRIBED: usize = 1 << 20;

/// The low bits of an id say where the request is; the high ones count, so that ids increase.
const SLOT_BITS: u32 = 16;

/// A request that is out.
struct Request {
    id: u64,
    op: Op,
    /// `None`: given up; whatever comes for it goes nowhere, and its end is awaited only to know that it is over.
    transfer: Option<TransferId>,
    /// The local side, as long as it may be touched.
    local: Option<Local>,
    /// It waits for a device: a write to have something to send, a read whose end has come for its bytes to land.
    waiting: bool,
    /// Payload still to come in, or to go out.
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

    /// Nothing of it is touched any more, but by copies that a device has begun.
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
    /// Whether its end has come, and its bytes have not landed.
    fn is_landing(&self) -> bool {
        self.waiting && self.op == Op::Read
    }
}

/// A lane that is up.
pub(crate) struct RequestLane {
    /// Of its connection.
    key: usize,
    pub(crate) link: LinkId,
    /// 0: the small lane.
    pub(crate) number: u8,
    requests: Slab<Request>,
    sequence: u64,
    /// Writes that were given up and have not ended.
    given_up_writes: usize,
    bytes: u64,
    described: usize,
    /// Writes with payload to send.
    writes: WorkQueue<usize>,
    /// The write whose payload is going out.
    sending: Option<usize>,
    /// The read whose payload is coming in.
    receiving: Option<usize>,
}

fn malformed(why: impl std::fmt::Display) -> Error {
    Error::new(ErrorKind::Malformed, format!("the peer answers out of order: {why}"))
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

    /// Whether one more request may go out; at least one always may.
    pub(crate) fn has_room(&self) -> bool {
        self.requests.is_empty()
            || self.bytes < WINDOW
                && self.requests.len() < MAX_REQUESTS
                && self.described < MAX_DESCRIBED
    }

    /// Whether requests are out whose ends have not come.
    pub(crate) fn owes_ends(&self) -> bool {
        !self.requests.is_empty()
    }

    /// Bytes of the requests that are out.
    pub(crate) fn load(&self) -> u64 {
        self.bytes
    }

    /// Sends out a part of a transfer.
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
            if let Ok(staged) = Staged::of(&regions, Extents::new(grids, indices))? {
                let (token, concern) =
                    (deferred.token(self.key), Concern::Transfer(self.link, transfer));
                return Ok(match plan.op() {
                    Op::Read => Local::Into(staged.sink(self.number, token, concern)?),
                    Op::Write => Local::From(staged.source(self.number, token, concern)?),
                });
            }
            return Err(Error::new(
                ErrorKind::Invalid,
                "device memory was registered without a way to copy it",
            ));
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

    /// Queues a write of which no frame is going out: for its turn, or for the device.
    fn go_on(&mut self, slot: usize, effects: &mut Vec<Effect>) {
        let Some(request) = self.requests.get_mut(slot) else { return };
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

    fn find(&self, id: u64) -> Option<usize> {
        let slot = (id & ((1 << SLOT_BITS) - 1)) as usize;
        self.requests
            .get(slot)
            .filter(|request| request.id == id && !request.is_landing())
            .map(|_| slot)
    }

    fn end(
        &mut self,
        id: u64,
        result: Result<()>,
        output: &mut Output,
        scope: &mut Scope,
    ) -> Result<()> {
        let Some(slot) = self.find(id) else {
            return Err(malformed(format_args!("an end of {id}, which is not open")));
        };
        let going_out = self.sending == Some(slot) && output.in_payload();
        let request = &mut self.requests[slot];
        if request.transfer.is_some() && result.is_ok() {
            if request.left > 0 || going_out {
                return Err(malformed("a good end before the last byte"));
            }
            if let Some(Local::Into(sink)) = &mut request.local
                && sink.token().is_some()
            {
                request.waiting = true;
                self.end_if_landed(slot, scope);
                return Ok(());
            }
        }
        let request = self.forget(slot);
        let going_on = request.left > 0 || self.sending == Some(slot);
        if going_on
            && request.op == Op::Write
            && request.transfer.is_some()
            && self.stop_write(slot, request.left, output)
        {
            put_bare(&mut output.control, Frame::Stop, id);
        }
        if let Some(local) = request.local {
            local.stop(&scope.context.deferred);
        }
        scope.effects.push(Effect::Ended { link: self.link, transfer: request.transfer, result });
        Ok(())
    }

    fn forget(&mut self, slot: usize) -> Request {
        let request = self.requests.remove(slot);
        self.bytes -= request.bytes;
        self.described -= request.described;
        self.given_up_writes -= usize::from(request.op == Op::Write && request.transfer.is_none());
        request
    }

    /// The end of a read has come: ends it here, if its bytes are where they belong.
    fn end_if_landed(&mut self, slot: usize, scope: &mut Scope) {
        let Some(Local::Into(sink)) = &mut self.requests[slot].local else { return };
        let result = match sink.has_landed() {
            Ok(false) => return, // its token comes
            Ok(true) => Ok(()),
            Err(why) => Err(why),
        };
        let request = self.forget(slot);
        if let Some(local) = request.local {
            local.stop(&scope.context.deferred);
        }
        scope.effects.push(Effect::Ended { link: self.link, transfer: request.transfer, result });
    }

    /// No more payload of this write goes out. Says whether some was still to go.
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

    /// Whether nothing else may begin: a write that was given up may still be on its way.
    pub(crate) fn is_fenced(&self) -> bool {
        self.given_up_writes > 0
    }

    /// Gives up all requests of a transfer: from here on, its memory is not touched, but for copies that a device has
    /// begun. Calls `cancel` with the id of each.
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

    /// Where the payload that is coming in belongs, if somebody wants it.
    fn receiving(&mut self) -> Option<&mut Sink> {
        match self.requests.get_mut(self.receiving?)?.local.as_mut()? {
            Local::Into(sink) => Some(sink),
            Local::From(_) => None,
        }
    }

    /// The device of the read that is coming in has failed.
    fn fail_receiving(&mut self, why: Error, scope: &mut Scope) {
        let Some(request) = self.receiving.and_then(|slot| self.requests.get_mut(slot)) else {
            return;
        };
        if let Some(local) = request.local.take() {
            local.stop(&scope.context.deferred);
        }
        if let Some(transfer) = request.transfer {
            scope.effects.push(Effect::Failed { link: self.link, transfer, why });
        }
    }
}

impl LaneEnd for RequestLane {
    fn frame(
        &mut self,
        header: Header,
        body: &[u8],
        output: &mut Output,
        scope: &mut Scope,
    ) -> Result<()> {
        match header.frame {
            Frame::End => self.end(header.id, read_end(body)?, output, scope),
            Frame::Ack => {
                scope.effects.push(Effect::Acked { link: self.link, id: header.id });
                Ok(())
            }
            Frame::Alive => Ok(()),
            other => Err(malformed(format_args!("{other:?} from an owner"))),
        }
    }

    fn data(&mut self, header: Header) -> Result<()> {
        let Some(slot) = self.find(header.id) else {
            return Err(malformed(format_args!("data for {}, which is not open", header.id)));
        };
        let request = &mut self.requests[slot];
        if request.op != Op::Read || header.len as u64 > request.left {
            return Err(malformed(format_args!(
                "{} bytes where {} are left",
                header.len, request.left
            )));
        }
        request.left -= header.len as u64;
        self.receiving = Some(slot);
        Ok(())
    }

    fn fill(&mut self, chunk: &mut Chunk, max: usize, _: &mut Output, scope: &mut Scope) -> bool {
        if let Some(sink) = self.receiving() {
            match sink.fill(chunk, max) {
                Ok(is_there) => return is_there,
                Err(why) => self.fail_receiving(why, scope),
            }
        }
        chunk.discard(&scope.bin, max);
        true
    }

    fn took(&mut self, count: usize) {
        if let Some(sink) = self.receiving() {
            sink.took(count);
        }
    }

    fn pause(&mut self) -> bool {
        self.receiving().is_some_and(Sink::pause)
    }

    fn data_end(&mut self, _: &mut Output, _: &mut Scope) {
        self.pause(); // until the next frame
        self.receiving = None;
    }

    fn next_frame(&mut self, output: &mut Output, scope: &mut Scope) {
        if let Some(slot) = self.sending.take() {
            self.go_on(slot, &mut scope.effects);
        }
        let slot = loop {
            let Some(slot) = self.writes.next_turn() else { return };
            let local = self.requests.get_mut(slot).and_then(|request| request.local.as_mut());
            if let Some(Local::From(source)) = local
                && matches!(source.resume(), Ok(true))
            {
                break slot;
            }
            self.go_on(slot, &mut scope.effects);
        };
        let Some(Request { local: Some(Local::From(source)), left, id, .. }) =
            self.requests.get_mut(slot)
        else {
            return;
        };
        let max = output.most_payload(scope.piece);
        output.chunk.clear();
        source.gather(&mut output.chunk, max);
        let len = output.chunk.left();
        *left -= len as u64;
        Header { frame: Frame::Data, len, id: *id }.encode(output.head());
        self.sending = Some(slot);
    }

    fn has_frames(&self) -> bool {
        !self.writes.is_empty() || self.sending.is_some()
    }

    fn has_streams(&self) -> bool {
        let is_one = |request: &Request| match &request.local {
            Some(Local::From(source)) => source.token().is_some(),
            _ => false,
        };
        self.requests.iter().any(|(_, request)| is_one(request))
    }

    fn make_way(&mut self, output: &mut Output) {
        for (_, request) in &mut self.requests {
            if let Some(Local::From(source)) = &mut request.local {
                source.make_way(|| output.spill());
            }
        }
    }

    fn woken(&mut self, token: u64, input: &mut Input, _: &mut Output, scope: &mut Scope) {
        let is_its =
            |request: &Request| request.local.as_ref().and_then(Local::token) == Some(token);
        let Some((slot, request)) = self.requests.iter_mut().find(|(_, request)| is_its(request))
        else {
            return;
        };
        let waits = request.waiting;
        match &mut request.local {
            Some(Local::From(_)) if waits => {
                request.waiting = false;
                self.writes.push(slot, request.left);
            }
            Some(Local::Into(_)) if waits => self.end_if_landed(slot, scope),
            Some(Local::Into(_)) if self.receiving == Some(slot) => input.stalled = false,
            Some(Local::Into(sink)) => {
                sink.pause();
            }
            _ => {}
        }
    }

    fn release(&mut self, deferred: &DeferredCompletions) {
        self.requests
            .drain()
            .filter_map(|request| request.local)
            .for_each(|local| local.stop(deferred));
    }
}
