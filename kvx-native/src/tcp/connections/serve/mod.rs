//! The owner's end of a lane: checks and answers a peer's requests.

mod writes;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use kvx_backend::control::NoticesFromPeer;
use kvx_backend::reactor::WorkQueue;
use kvx_core::backend::Extents;
use kvx_core::backend::wire::Reader;
use kvx_core::{Error, ErrorKind, Identity, RegionId, Result};

use self::writes::ServedWrite;
use crate::described::Described;
use crate::tcp::connections::lane::{Effect, LaneEnd, Scope};
use crate::tcp::context::AgentContext;
use crate::tcp::frames::input::Input;
use crate::tcp::frames::output::Output;
use crate::tcp::frames::{Frame, Header, put_bare, put_end};
use crate::tcp::limit::ConnectionPlace;
use crate::tcp::memory::deferred::{ActiveRegions, Concern, DeferredCompletions};
use crate::tcp::memory::payload::{HostBlocks, Sink, Source, StagedBlocks};
use crate::tcp::memory::regions::ServedRegion;
use crate::tcp::socket::chunk::Chunk;

/// The number of waiting reads on one lane at which reading from it stops, and the limit for
/// requests that are cancelled in advance.
const MAX_READS: usize = 1024;
/// The bytes of waiting descriptions on one lane at which reading from it stops.
const MAX_DESCRIBED: usize = 4 << 20;
/// The same limit over all lanes of an agent.
const MAX_DESCRIBED_IN_ALL: usize = 64 << 20;
/// The bytes of waiting answers on one lane at which reading from it stops.
const MAX_ANSWERS: usize = 64 << 10;

/// A read that is being answered.
struct ServedRead {
    id: u64,
    source: Source,
    described: usize,
}

/// The blocks that a request names, after checking.
struct RequestedBlocks {
    regions: Vec<Arc<ServedRegion>>,
    extents: Extents,
}

/// The owner's end of a lane that a peer opened.
pub(crate) struct ServedLane {
    /// The key of the lane's connection.
    key: usize,
    pub(crate) who: Identity,
    /// The peer's link, and the number of the lane in it.
    pub(crate) link: [u8; 16],
    pub(crate) lane: u8,
    /// The lane's place among the connections of peers. If its turn hangs, it keeps the place until
    /// the turn ends.
    _place: Option<ConnectionPlace>,
    /// The id of the last request.
    last_id: Option<u64>,
    /// Requests that were cancelled before they arrived.
    cancelled: HashSet<u64>,
    reads: WorkQueue<ServedRead>,
    /// Reads that wait for a device, by token.
    waiting: HashMap<u64, ServedRead>,
    /// The read whose payload is being sent.
    sending: Option<ServedRead>,
    writes: HashMap<u64, ServedWrite>,
    /// The write whose payload is being received.
    receiving: Option<(u64, usize)>,
    /// The bytes of the descriptions of `reads`, `waiting` and `sending`.
    reads_described: usize,
    /// The bytes of the descriptions of `writes`.
    writes_described: usize,
    notices: NoticesFromPeer,
    /// The regions that the lane's turn touches, in case the turn hangs.
    pub(crate) touched: Arc<ActiveRegions>,
}

fn malformed(why: impl std::fmt::Display) -> Error {
    ErrorKind::Malformed.because(format!("malformed conversation: {why}"))
}

fn cancelled() -> Error {
    ErrorKind::Cancelled.because("cancelled by its initiator")
}

/// Returns the memory that streams over these regions touch.
fn concern(regions: &[Arc<ServedRegion>]) -> Concern {
    Concern::Regions(regions.iter().map(|served| served.id).collect())
}

impl ServedLane {
    /// Serves this lane of the peer's link. `place` is `None` in tests without a limit for
    /// connections.
    pub(crate) fn new(
        key: usize,
        who: Identity,
        (link, lane): ([u8; 16], u8),
        place: Option<ConnectionPlace>,
    ) -> Self {
        ServedLane {
            key,
            who,
            link,
            lane,
            _place: place,
            last_id: None,
            cancelled: HashSet::new(),
            reads: WorkQueue::default(),
            waiting: HashMap::new(),
            sending: None,
            writes: HashMap::new(),
            receiving: None,
            reads_described: 0,
            writes_described: 0,
            notices: NoticesFromPeer::default(),
            touched: Arc::default(),
        }
    }

    /// Returns the number of bytes that the lane holds for its peer: descriptions, and
    /// notifications that do not fit into the agent's queue.
    pub(crate) fn held(&self) -> usize {
        self.described() + self.notices.held()
    }

    /// Returns the bytes of all descriptions that the lane holds.
    pub(crate) fn described(&self) -> usize {
        self.reads_described + self.writes_described
    }

    /// Decodes and checks a request. The outer error ends the connection, the inner one refuses the
    /// request.
    fn request(
        &mut self,
        id: u64,
        body: &[u8],
        scope: &mut Scope,
    ) -> Result<(u64, Result<RequestedBlocks>)> {
        scope.small_came |= self.lane == 0;
        if let Some(last) = self.last_id.filter(|last| *last >= id) {
            return Err(malformed(format_args!("request {id} follows {last}: ids must increase")));
        }
        self.last_id = Some(id);
        let mut reader = Reader::new("request", body);
        let described = Described::decode(&mut reader)?;
        reader.end()?;
        let bytes = described.bytes();
        if bytes == 0 {
            return Err(reader.malformed("no blocks"));
        }
        if self.cancelled.remove(&id) {
            return Ok((bytes, Err(cancelled())));
        }
        let named = scope.context.regions.open(&described.regions).and_then(|regions| {
            let lengths: Vec<u64> =
                regions.iter().map(|served| served.memory.len() as u64).collect();
            described.check(&lengths)?;
            Ok(RequestedBlocks {
                regions,
                extents: Extents::new(described.grids, described.indices),
            })
        });
        Ok((bytes, named))
    }

    fn source(&self, named: RequestedBlocks, deferred: &DeferredCompletions) -> Result<Source> {
        match StagedBlocks::of(&named.regions, named.extents)? {
            Ok(staged) => {
                staged.source(self.lane, deferred.token(self.key), concern(&named.regions))
            }
            Err(extents) => Ok(Source::Host(HostBlocks::served(named.regions, extents))),
        }
    }

    fn sink(&self, named: RequestedBlocks, deferred: &DeferredCompletions) -> Result<Sink> {
        named.regions.iter().try_for_each(|served| served.memory.check_writable())?;
        deferred.check_writable(&named.regions)?;
        match StagedBlocks::of(&named.regions, named.extents)? {
            Ok(staged) => staged.sink(self.lane, deferred.token(self.key), concern(&named.regions)),
            Err(extents) => Ok(Sink::Host(HostBlocks::served(named.regions, extents))),
        }
    }

    fn read(&mut self, id: u64, body: &[u8], output: &mut Output, scope: &mut Scope) -> Result<()> {
        let (_, named) = self.request(id, body, scope)?;
        match named.and_then(|named| self.source(named, &scope.context.deferred)) {
            Err(refusal) => {
                tracing::debug!(peer = ?self.who, %refusal, "refused a read over TCP");
                put_end(&mut output.control, id, Err(&refusal));
            }
            Ok(source) => {
                self.reads_described += body.len();
                scope.described += body.len();
                self.go_on(ServedRead { id, source, described: body.len() }, output, scope);
            }
        }
        Ok(())
    }

    /// Queues a read without a frame in progress: for its turn, for the device, or not at all.
    fn go_on(&mut self, mut reading: ServedRead, output: &mut Output, scope: &mut Scope) {
        match (reading.source.resume(), reading.source.left(), reading.source.token()) {
            (Ok(_), 0, _) => self.forget_read(reading, scope),
            (Ok(false), _, Some(token)) => {
                self.waiting.insert(token, reading);
            }
            (Ok(_), left, _) => self.reads.push(reading, left),
            (Err(why), ..) => {
                put_end(&mut output.control, reading.id, Err(&why));
                self.forget_read(reading, scope);
            }
        }
    }

    fn forget_read(&mut self, reading: ServedRead, scope: &mut Scope) {
        self.reads_described -= reading.described;
        scope.described -= reading.described;
        reading.source.stop(&scope.context.deferred);
    }

    /// Cancels a request: work that was not done yet is not done any more.
    pub(crate) fn cancel(
        &mut self,
        id: u64,
        input: &mut Input,
        output: &mut Output,
        scope: &mut Scope,
    ) -> Result<()> {
        if self.last_id.is_none_or(|last| last < id) {
            if self.cancelled.len() >= MAX_READS {
                return Err(malformed("too many requests are cancelled in advance"));
            }
            self.cancelled.insert(id);
            return Ok(());
        }
        self.stop_reads(|reading| reading.id == id, &cancelled(), output, scope);
        self.refuse_writes(|writing, _| writing == id, &cancelled(), input, output, scope);
        Ok(())
    }

    /// Ends reads at once: nothing more of their memory is sent.
    fn stop_reads(
        &mut self,
        which: impl Fn(&ServedRead) -> bool,
        why: &Error,
        output: &mut Output,
        scope: &mut Scope,
    ) {
        let mut stopped = self.reads.extract(&which);
        stopped.extend(
            self.waiting.extract_if(|_, reading| which(reading)).map(|(_, reading)| reading),
        );
        for reading in stopped {
            put_end(&mut output.control, reading.id, Err(why));
            self.forget_read(reading, scope);
        }
        // none of these
        let Some(reading) = self.sending.take_if(|reading| which(reading)) else { return };
        let unfinished = output.in_payload() || reading.source.left() > 0;
        if output.in_payload() {
            output.abort();
        }
        if unfinished {
            put_end(&mut output.control, reading.id, Err(why));
        }
        self.forget_read(reading, scope);
    }

    /// Ends all access to a region at once.
    pub(crate) fn revoke(
        &mut self,
        region: RegionId,
        input: &mut Input,
        output: &mut Output,
        scope: &mut Scope,
    ) {
        let revoked =
            ErrorKind::Revoked.because(format!("region {region} was revoked by its owner"));
        self.stop_reads(|reading| reading.source.touches(region), &revoked, output, scope);
        self.refuse_writes(|_, sink| sink.touches(region), &revoked, input, output, scope);
    }

    fn notify(&mut self, id: u64, bytes: &[u8], output: &mut Output, scope: &Scope) -> Result<()> {
        let sender = self.who.as_sender();
        if self.notices.take(id, bytes, |bytes| scope.context.events.notification(sender, bytes))? {
            put_bare(&mut output.control, Frame::Ack, id);
        }
        Ok(())
    }

    /// Delivers waiting notifications when the agent's queue has capacity again. Returns true if
    /// any was delivered.
    pub(crate) fn resume(&mut self, output: &mut Output, context: &AgentContext) -> bool {
        let mut some = false;
        let deliver = |bytes: &[u8]| context.events.notification(self.who.as_sender(), bytes);
        while let Some(id) = self.notices.deliver_next(deliver) {
            put_bare(&mut output.control, Frame::Ack, id);
            some = true;
        }
        some
    }
}

impl LaneEnd for ServedLane {
    fn frame(
        &mut self,
        header: Header,
        body: &[u8],
        output: &mut Output,
        scope: &mut Scope,
    ) -> Result<()> {
        match header.frame {
            Frame::Read => self.read(header.id, body, output, scope),
            Frame::Write => self.write(header.id, body, output, scope),
            Frame::Cancel => {
                let mut reader = Reader::new("Cancel", body);
                let lane = reader.u8()?;
                scope.effects.push(Effect::Cancelled { link: self.link, lane, id: header.id });
                Ok(())
            }
            Frame::Stop => {
                self.stop_write(header.id, output, scope);
                Ok(())
            }
            Frame::Notify => self.notify(header.id, body, output, scope),
            Frame::Ping => {
                put_bare(&mut output.control, Frame::Alive, header.id);
                Ok(())
            }
            other => Err(malformed(format_args!("unexpected {other:?} from an initiator"))),
        }
    }

    fn next_frame(&mut self, output: &mut Output, scope: &mut Scope) {
        if let Some(reading) = self.sending.take() {
            self.go_on(reading, output, scope);
        }
        let mut reading = loop {
            let Some(mut reading) = self.reads.next_turn() else { return };
            if matches!(reading.source.resume(), Ok(true)) {
                break reading;
            }
            self.go_on(reading, output, scope);
        };
        let max = output.most_payload(scope.piece);
        output.chunk.clear();
        self.touched.sends(reading.source.regions());
        if scope.turn.is_abandoned() {
            self.sending = Some(reading); // `abandon` may not have seen its regions
            return;
        }
        reading.source.gather(&mut output.chunk, max);
        let len = output.chunk.left();
        Header { frame: Frame::Data, len, id: reading.id }.encode(output.head());
        if reading.source.left() == 0 {
            put_bare(output.tail(), Frame::End, reading.id);
        }
        self.sending = Some(reading);
    }

    fn has_frames(&self) -> bool {
        !self.reads.is_empty() || self.sending.is_some()
    }

    fn has_streams(&self) -> bool {
        let is_one = |reading: &ServedRead| reading.source.token().is_some();
        !self.waiting.is_empty() || self.sending.as_ref().is_some_and(is_one)
    }

    fn make_way(&mut self, output: &mut Output) {
        for reading in
            self.reads.iter_mut().chain(self.waiting.values_mut()).chain(&mut self.sending)
        {
            reading.source.make_way(|| output.spill());
        }
    }

    fn woken(&mut self, token: u64, input: &mut Input, output: &mut Output, scope: &mut Scope) {
        if let Some(reading) = self.waiting.remove(&token) {
            let left = reading.source.left();
            return self.reads.push(reading, left);
        }
        let receiving = self.receiving.map(|(id, _)| id);
        for (id, writing) in &mut self.writes {
            let Some(sink) = writing.sink.as_mut().filter(|sink| sink.token() == Some(token))
            else {
                continue;
            };
            let (id, left) = (*id, writing.left);
            if receiving == Some(id) {
                input.stalled = false;
            } else if left == 0 {
                self.end_if_landed(id, output, scope);
            } else {
                sink.pause();
            }
            return;
        }
    }

    fn release(&mut self, deferred: &DeferredCompletions) {
        let reads = self.reads.extract(|_| true).into_iter();
        let waiting = self.waiting.drain().map(|(_, reading)| reading);
        for reading in reads.chain(waiting).chain(self.sending.take()) {
            reading.source.stop(deferred);
        }
        for sink in self.writes.drain().filter_map(|(_, writing)| writing.sink) {
            sink.stop(deferred, None);
        }
    }

    fn is_paused(&self, output: &Output, described_in_all: usize) -> bool {
        output.control.len() > MAX_ANSWERS
            || self.reads.len() + self.waiting.len() >= MAX_READS
            || self.reads_described > MAX_DESCRIBED
            || self.reads_described > 0 && described_in_all > MAX_DESCRIBED_IN_ALL
    }

    fn data(&mut self, header: Header) -> Result<()> {
        let Some(writing) = self.writes.get(&header.id) else {
            return Err(malformed(format_args!(
                "DATA for the write {}, which is not open",
                header.id
            )));
        };
        if header.len as u64 > writing.left {
            return Err(malformed(format_args!(
                "{} bytes of DATA, but the write has only {} left",
                header.len, writing.left
            )));
        }
        self.touched.receives(writing.sink.as_ref().and_then(Sink::regions));
        self.receiving = Some((header.id, header.len));
        Ok(())
    }

    fn fill(
        &mut self,
        chunk: &mut Chunk,
        max: usize,
        output: &mut Output,
        scope: &mut Scope,
    ) -> bool {
        if let Some((id, sink)) = self.receiving() {
            if scope.turn.is_abandoned() {
                return false; // `abandon` may not have seen its regions
            }
            match sink.fill(chunk, max) {
                Ok(is_there) => return is_there,
                Err(why) => self.refuse_write(id, &why, output, scope),
            }
        }
        chunk.discard(&scope.bin, max);
        true
    }

    fn took(&mut self, count: usize) {
        if let Some((_, sink)) = self.receiving() {
            sink.took(count);
        }
    }

    fn pause(&mut self) -> bool {
        self.receiving().is_some_and(|(_, sink)| sink.pause())
    }

    fn data_end(&mut self, output: &mut Output, scope: &mut Scope) {
        let Some((id, len)) = self.receiving.take() else {
            return debug_assert!(false, "payload began before it ends");
        };
        let Some(writing) = self.writes.get_mut(&id) else {
            return debug_assert!(false, "a write whose payload is coming in is not forgotten");
        };
        writing.left -= len as u64;
        match &mut writing.sink {
            None if writing.left == 0 => self.forget_write(id, scope),
            Some(_) if writing.left == 0 => self.end_if_landed(id, output, scope),
            None => {}
            Some(sink) => {
                sink.pause(); // until its next frame
            }
        }
    }
}
