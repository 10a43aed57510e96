//! A peer's writes, as the owner receives them.

use kvx_core::{Error, Result};

use super::{ServedLane, cancelled, malformed};
use crate::tcp::connections::lane::Scope;
use crate::tcp::frames::input::Input;
use crate::tcp::frames::output::Output;
use crate::tcp::frames::put_end;
use crate::tcp::memory::deferred::LateAnswer;
use crate::tcp::memory::payload::Sink;

/// The limit for unfinished writes of a peer on one lane.
const MAX_WRITES: usize = 1024;
/// The limit in bytes for the descriptions of a peer's unfinished writes on one lane.
const MAX_WRITES_DESCRIBED: usize = 16 << 20;

/// A write that is being received.
pub(crate) struct ServedWrite {
    /// The sink; `None` if the write was refused or cancelled by a revocation, so that its payload
    /// is discarded.
    pub(crate) sink: Option<Sink>,
    /// The bytes of payload still to be received.
    pub(crate) left: u64,
    described: usize,
}

impl ServedLane {
    pub(crate) fn write(
        &mut self,
        id: u64,
        body: &[u8],
        output: &mut Output,
        scope: &mut Scope,
    ) -> Result<()> {
        if self.writes.len() >= MAX_WRITES || self.writes_described > MAX_WRITES_DESCRIBED {
            return Err(malformed(format_args!("more than {MAX_WRITES} unfinished writes")));
        }
        let (left, named) = self.request(id, body, scope)?;
        let mut described = 0;
        let sink = match named.and_then(|named| self.sink(named, &scope.context.deferred)) {
            Ok(sink) => {
                described = body.len();
                Some(sink)
            }
            Err(refusal) => {
                tracing::debug!(peer = ?self.who, %refusal, "refused a write over TCP");
                put_end(&mut output.control, id, Err(&refusal));
                None
            }
        };
        self.writes_described += described;
        scope.described += described;
        self.writes.insert(id, ServedWrite { sink, left, described });
        Ok(())
    }

    pub(crate) fn receiving(&mut self) -> Option<(u64, &mut Sink)> {
        let (id, _) = self.receiving?;
        Some((id, self.writes.get_mut(&id)?.sink.as_mut()?))
    }

    /// Ends a write whose payload has all arrived, if it has landed.
    pub(crate) fn end_if_landed(&mut self, id: u64, output: &mut Output, scope: &mut Scope) {
        // It may have been refused meanwhile.
        let Some(ServedWrite { sink: Some(sink), .. }) = self.writes.get_mut(&id) else { return };
        match sink.has_landed() {
            Ok(false) => {} // its token will arrive
            Ok(true) => {
                put_end(&mut output.control, id, Ok(()));
                self.forget_write(id, scope);
            }
            Err(why) => self.refuse_write(id, &why, output, scope),
        }
    }

    pub(crate) fn forget_write(&mut self, id: u64, scope: &mut Scope) {
        if let Some(writing) = self.writes.remove(&id) {
            self.writes_described -= writing.described;
            scope.described -= writing.described;
        }
    }

    /// Handles that no more payload will arrive for a write.
    pub(crate) fn stop_write(&mut self, id: u64, output: &mut Output, scope: &mut Scope) {
        self.refuse_write(id, &cancelled(), output, scope);
        self.forget_write(id, scope);
    }

    /// Ends writes at once: nothing more is written to their memory.
    pub(crate) fn refuse_writes(
        &mut self,
        which: impl Fn(u64, &Sink) -> bool,
        why: &Error,
        input: &mut Input,
        output: &mut Output,
        scope: &mut Scope,
    ) {
        let refused = |(id, writing): (&u64, &ServedWrite)| {
            writing.sink.as_ref().is_some_and(|sink| which(*id, sink)).then_some(*id)
        };
        for id in self.writes.iter().filter_map(refused).collect::<Vec<_>>() {
            if input.in_payload() && self.receiving.is_some_and(|(receiving, _)| receiving == id) {
                input.abort(&scope.bin);
            }
            self.refuse_write(id, why, output, scope);
        }
    }

    /// Ends one write at once. Its initiator receives the END when no copy into its memory is in
    /// progress any more, so that the next write is not overwritten.
    pub(crate) fn refuse_write(
        &mut self,
        id: u64,
        why: &Error,
        output: &mut Output,
        scope: &mut Scope,
    ) {
        // The initiator may stop or cancel a write whose END is in flight.
        let Some(writing) = self.writes.get_mut(&id) else { return };
        let Some(sink) = writing.sink.take() else { return }; // refused before
        let answer = LateAnswer { link: self.link, lane: self.lane, id, why: why.clone() };
        if let Some(answer) = sink.stop(&scope.context.deferred, Some(answer)) {
            put_end(&mut output.control, id, Err(&answer.why));
        }
        if writing.left == 0 {
            self.forget_write(id, scope);
        }
    }
}
