//! The initiator's side of a lane: requests that are out, and the payload that comes in and goes out for them.

use std::sync::Arc;

use kvx_core::reactor::Turns;
use kvx_core::{Bound, Error, Extents, Kind, LinkId, Op, Result, TransferId};
use slab::Slab;

use super::conn::Effect;
use super::frames::{Frame, Header, MAX_DATA, put_bare, put_frame, read_end};
use super::input::Input;
use super::output::Output;
use super::payload::{Bin, Blocks, Chunk};
use crate::described::{Described, Part, Side};

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
    blocks: Option<Blocks>,
    /// Payload still to come in, or to go out.
    left: u64,
    bytes: u64,
    described: usize,
}

/// A lane that is up.
pub(super) struct Lane {
    pub(super) link: LinkId,
    /// 0: the small lane.
    pub(super) number: u8,
    requests: Slab<Request>,
    sequence: u64,
    /// Writes that were given up and have not ended.
    given_up_writes: usize,
    bytes: u64,
    described: usize,
    /// Writes with payload to send.
    writes: Turns<usize>,
    /// The write whose payload is going out.
    sending: Option<usize>,
    /// The read whose payload is coming in.
    receiving: Option<usize>,
}

fn malformed(why: impl std::fmt::Display) -> Error {
    Error::new(Kind::Malformed, format!("the peer answers out of order: {why}"))
}

impl Lane {
    pub(super) fn new(link: LinkId, number: u8) -> Self {
        Lane {
            link,
            number,
            requests: Slab::new(),
            sequence: 0,
            given_up_writes: 0,
            bytes: 0,
            described: 0,
            writes: Turns::default(),
            sending: None,
            receiving: None,
        }
    }

    /// Whether one more request may go out; at least one always may.
    pub(super) fn has_room(&self) -> bool {
        self.requests.is_empty()
            || self.bytes < WINDOW && self.requests.len() < MAX_REQUESTS && self.described < MAX_DESCRIBED
    }

    /// Bytes of the requests that are out.
    pub(super) fn load(&self) -> u64 {
        self.bytes
    }

    /// Sends out a part of a transfer.
    pub(super) fn request(
        &mut self,
        plan: &Arc<Bound>,
        part: &Part,
        transfer: TransferId,
        output: &mut Output,
    ) {
        let remote = Described::of(plan, part, Side::Remote, |region| {
            let side = plan.remote(region);
            (side.id, side.key)
        });
        let pair = &plan.pairs()[part.pair];
        let grids = match part.grids.len() == pair.local.len() {
            true => Arc::clone(&pair.local),
            false => pair.local[part.grids.clone()].into(),
        };
        let cursor = Extents::new(grids, pair.local_indices.slice(part.indices.clone()));
        let bytes = cursor.left();
        let slot = self.requests.vacant_key();
        let id = self.sequence << SLOT_BITS | slot as u64;
        self.sequence += 1;
        let op = plan.op();
        let before = output.control.len();
        let frame = if op == Op::Read { Frame::Read } else { Frame::Write };
        put_frame(&mut output.control, frame, id, |out| remote.encode(out));
        let described = output.control.len() - before;
        if op == Op::Write {
            self.writes.push(slot, bytes);
        }
        self.bytes += bytes;
        self.described += described;
        let blocks = Some(Blocks::local(Arc::clone(plan), cursor));
        self.requests.insert(Request {
            id,
            op,
            transfer: Some(transfer),
            blocks,
            left: bytes,
            bytes,
            described,
        });
    }

    fn find(&self, id: u64) -> Option<usize> {
        let slot = (id & ((1 << SLOT_BITS) - 1)) as usize;
        self.requests.get(slot).filter(|request| request.id == id).map(|_| slot)
    }

    /// A frame that is no payload.
    pub(super) fn frame(
        &mut self,
        header: Header,
        body: &[u8],
        output: &mut Output,
        effects: &mut Vec<Effect>,
    ) -> Result<()> {
        match header.frame {
            Frame::End => self.end(header.id, read_end(body)?, output, effects),
            Frame::Ack => {
                effects.push(Effect::Acked { link: self.link, id: header.id });
                Ok(())
            }
            Frame::Alive => Ok(()),
            other => Err(malformed(format_args!("{other:?} from an owner"))),
        }
    }

    fn end(
        &mut self,
        id: u64,
        result: Result<()>,
        output: &mut Output,
        effects: &mut Vec<Effect>,
    ) -> Result<()> {
        let Some(slot) = self.find(id) else {
            return Err(malformed(format_args!("an end of {id}, which is not open")));
        };
        let request = self.requests.remove(slot);
        self.bytes -= request.bytes;
        self.described -= request.described;
        self.given_up_writes -= usize::from(request.op == Op::Write && request.transfer.is_none());
        let going_out = self.sending == Some(slot) && output.in_payload();
        if request.transfer.is_some() && result.is_ok() && (request.left > 0 || going_out) {
            return Err(malformed("a good end before the last byte"));
        }
        let going_on = request.left > 0 || self.sending == Some(slot);
        if going_on
            && request.op == Op::Write
            && request.transfer.is_some()
            && self.stop_write(slot, request.left, output)
        {
            put_bare(&mut output.control, Frame::Stop, id);
        }
        effects.push(Effect::Ended { link: self.link, transfer: request.transfer, result });
        Ok(())
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
    pub(super) fn is_fenced(&self) -> bool {
        self.given_up_writes > 0
    }

    /// Gives up all requests of a transfer: from here on, its memory is not touched. Calls `cancel` with the id of
    /// each.
    pub(super) fn give_up(
        &mut self,
        transfer: TransferId,
        input: &mut Input,
        output: &mut Output,
        bin: &mut Bin,
        mut cancel: impl FnMut(u64),
    ) {
        let slots = self.requests.iter().filter(|(_, request)| request.transfer == Some(transfer));
        for slot in slots.map(|(slot, _)| slot).collect::<Vec<_>>() {
            let request = &mut self.requests[slot];
            request.transfer = None;
            request.blocks = None;
            let (id, op, left) = (request.id, request.op, request.left);
            match op {
                Op::Read if self.receiving == Some(slot) && input.in_payload() => input.abort(bin),
                Op::Read => {}
                Op::Write => {
                    self.given_up_writes += 1;
                    if self.stop_write(slot, left, output) {
                        put_bare(&mut output.control, Frame::Stop, id);
                    }
                }
            }
            cancel(id);
        }
    }

    /// Payload begins.
    pub(super) fn data(&mut self, header: Header) -> Result<()> {
        let Some(slot) = self.find(header.id) else {
            return Err(malformed(format_args!("data for {}, which is not open", header.id)));
        };
        let request = &mut self.requests[slot];
        if request.op != Op::Read || header.len as u64 > request.left {
            return Err(malformed(format_args!("{} bytes where {} are left", header.len, request.left)));
        }
        request.left -= header.len as u64;
        self.receiving = Some(slot);
        Ok(())
    }

    /// Where the next of it goes.
    pub(super) fn fill(&mut self, chunk: &mut Chunk, max: usize, bin: &mut Bin) {
        let request = self.receiving.and_then(|slot| self.requests.get_mut(slot));
        match request.and_then(|request| request.blocks.as_mut()) {
            Some(blocks) => blocks.gather(chunk, max),
            None => chunk.discard(bin, max),
        }
    }

    /// Payload has ended.
    pub(super) fn data_end(&mut self) {
        self.receiving = None;
    }

    pub(super) fn has_frames(&self) -> bool {
        !self.writes.is_empty() || self.sending.is_some()
    }

    /// The next piece of a write, of at most so many bytes.
    pub(super) fn next_frame(&mut self, output: &mut Output, most: usize) {
        if let Some(slot) = self.sending.take()
            && let Some(request) = self.requests.get(slot)
            && request.left > 0
        {
            self.writes.push(slot, request.left);
        }
        let Some(slot) = self.writes.next_turn() else { return };
        let Some(request) = self.requests.get_mut(slot) else { return };
        let Some(blocks) = request.blocks.as_mut() else { return };
        output.chunk.clear();
        blocks.gather(&mut output.chunk, most.min(MAX_DATA));
        let len = output.chunk.left();
        request.left -= len as u64;
        Header { frame: Frame::Data, len, id: request.id }.encode(output.head());
        self.sending = Some(slot);
    }
}
