//! The frames that belong to requests: payload and ENDs from the owner, and the payload of writes.

use kvx_core::{Error, ErrorKind, Op, Result};

use super::{Local, Request, RequestLane, SLOT_BITS};
use crate::tcp::connections::lane::{Effect, LaneEnd, Scope};
use crate::tcp::frames::input::Input;
use crate::tcp::frames::output::Output;
use crate::tcp::frames::{Frame, Header, put_bare, read_end};
use crate::tcp::memory::deferred::DeferredCompletions;
use crate::tcp::memory::payload::Sink;
use crate::tcp::socket::chunk::Chunk;

fn malformed(why: impl std::fmt::Display) -> Error {
    ErrorKind::Malformed.because(format!("the peer's answer is invalid: {why}"))
}

impl RequestLane {
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
            return Err(malformed(format_args!("an END for {id}, which is not open")));
        };
        let going_out = self.sending == Some(slot) && output.in_payload();
        let request = &mut self.requests[slot];
        if request.transfer.is_some() && result.is_ok() {
            if request.left > 0 || going_out {
                return Err(malformed("a successful END before the last byte"));
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

    /// Ends a read whose END has arrived, if all its bytes have landed.
    fn end_if_landed(&mut self, slot: usize, scope: &mut Scope) {
        let Some(Local::Into(sink)) = &mut self.requests[slot].local else { return }; // given up
        let result = match sink.has_landed() {
            Ok(false) => return, // its token will arrive
            Ok(true) => Ok(()),
            Err(why) => Err(why),
        };
        let request = self.forget(slot);
        if let Some(local) = request.local {
            local.stop(&scope.context.deferred);
        }
        scope.effects.push(Effect::Ended { link: self.link, transfer: request.transfer, result });
    }

    /// Returns the sink of the payload that is being received, unless its request was given up.
    fn receiving(&mut self) -> Option<&mut Sink> {
        match self.requests.get_mut(self.receiving?)?.local.as_mut()? {
            Local::Into(sink) => Some(sink),
            Local::From(_) => None,
        }
    }

    /// Fails the read that is being received, because its device has failed.
    fn fail_receiving(&mut self, why: Error, scope: &mut Scope) {
        let Some(request) = self.receiving.and_then(|slot| self.requests.get_mut(slot)) else {
            return debug_assert!(false, "its sink has just failed");
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
            other => Err(malformed(format_args!("unexpected {other:?} from an owner"))),
        }
    }

    fn data(&mut self, header: Header) -> Result<()> {
        let Some(slot) = self.find(header.id) else {
            return Err(malformed(format_args!("DATA for {}, which is not open", header.id)));
        };
        let request = &mut self.requests[slot];
        if request.op != Op::Read || header.len as u64 > request.left {
            return Err(malformed(format_args!(
                "{} bytes of DATA, but only {} are left",
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
            return debug_assert!(false, "its source has just resumed");
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
            return; // the request ended while the device copied
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
