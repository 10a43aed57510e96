//! The owner's side of a lane: a peer's requests, checked and answered.

use std::collections::{HashMap, HashSet, VecDeque};

use kvx_core::reactor::Turns;
use kvx_core::transport::MAX_NOTIFICATION;
use kvx_core::wire::Reader;
use kvx_core::{Error, Extents, Identity, Kind, RegionId, Result};

use super::conn::{Effect, Scope};
use super::frames::{Frame, Header, MAX_DATA, put_bare, put_end};
use super::input::Input;
use super::output::Output;
use super::payload::{Bin, Blocks, Chunk};
use super::transport::Shared;
use crate::described::Described;

/// Reads that wait on one lane before it is not read any further, and requests that may be cancelled in advance.
const MAX_READS: usize = 1024;
/// Writes that a peer may begin on one lane before it ends one.
const MAX_WRITES: usize = 1024;
/// Bytes of descriptions that wait on one lane before it is not read any further.
const MAX_DESCRIBED: usize = 4 << 20;
/// The same over all lanes of an agent.
const MAX_DESCRIBED_IN_ALL: usize = 64 << 20;
/// Bytes of descriptions of writes that a peer may begin on one lane.
const MAX_WRITES_DESCRIBED: usize = 16 << 20;
/// Bytes of answers that wait on one lane before it is not read any further.
const MAX_ANSWERS: usize = 64 << 10;
/// Notifications that a peer may send before the first of them is acknowledged.
pub(super) const NOTICES: usize = 64;
/// Bytes of them; a single one is always allowed.
pub(super) const NOTICES_BYTES: usize = 256 << 10;

/// A read that is being answered.
struct Reading {
    id: u64,
    blocks: Blocks,
    described: usize,
}

/// A write that is coming in.
struct Writing {
    /// `None`: refused, cancelled by a revocation; its payload goes nowhere.
    blocks: Option<Blocks>,
    left: u64,
    described: usize,
}

/// A peer on a lane that it opened.
pub(super) struct Guest {
    pub(super) who: Identity,
    /// Which of its links, and which lane of that.
    pub(super) link: [u8; 16],
    pub(super) lane: u8,
    /// The last request's.
    last_id: Option<u64>,
    /// Requests that were cancelled before they came.
    cancelled: HashSet<u64>,
    reads: Turns<Reading>,
    /// The read whose payload is going out.
    sending: Option<Reading>,
    writes: HashMap<u64, Writing>,
    /// The write whose payload is coming in.
    receiving: Option<(u64, usize)>,
    /// Bytes of the descriptions of `reads` and `sending`.
    reads_described: usize,
    /// The same of `writes`.
    writes_described: usize,
    /// Notifications that the agent had no room for.
    parked: VecDeque<(u64, Box<[u8]>)>,
    parked_bytes: usize,
}

fn malformed(why: impl std::fmt::Display) -> Error {
    Error::new(Kind::Malformed, format!("malformed conversation: {why}"))
}

fn cancelled() -> Error {
    Error::new(Kind::Cancelled, "cancelled by its initiator")
}

impl Guest {
    pub(super) fn new(who: Identity, link: [u8; 16], lane: u8) -> Self {
        Guest {
            who,
            link,
            lane,
            last_id: None,
            cancelled: HashSet::new(),
            reads: Turns::default(),
            sending: None,
            writes: HashMap::new(),
            receiving: None,
            reads_described: 0,
            writes_described: 0,
            parked: VecDeque::new(),
            parked_bytes: 0,
        }
    }

    /// Bytes of all descriptions that it holds.
    pub(super) fn described(&self) -> usize {
        self.reads_described + self.writes_described
    }

    /// Whether nothing more is read before some of what waits has gone out.
    pub(super) fn is_paused(&self, output: &Output, described_in_all: usize) -> bool {
        output.control.len() > MAX_ANSWERS
            || self.reads.len() >= MAX_READS
            || self.reads_described > MAX_DESCRIBED
            || self.reads_described > 0 && described_in_all > MAX_DESCRIBED_IN_ALL
    }

    pub(super) fn has_frames(&self) -> bool {
        !self.reads.is_empty() || self.sending.is_some()
    }

    /// A frame that is no payload.
    pub(super) fn frame(
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
            other => Err(malformed(format_args!("{other:?} from an initiator"))),
        }
    }

    /// Decodes and checks a request. The outer error ends the connection, the inner one refuses the request.
    fn request(&mut self, id: u64, body: &[u8], scope: &mut Scope) -> Result<(u64, Result<Blocks>)> {
        scope.small_came |= self.lane == 0;
        if self.last_id.is_some_and(|last| last >= id) {
            return Err(malformed(format_args!("request {id} after {:?}", self.last_id)));
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
        let blocks = scope.shared.regions.open(&described.regions).and_then(|regions| {
            let lengths: Vec<u64> = regions.iter().map(|served| served.memory.len() as u64).collect();
            described.check(&lengths)?;
            Ok(Blocks::served(regions, Extents::new(described.grids, described.indices)))
        });
        Ok((bytes, blocks))
    }

    fn read(&mut self, id: u64, body: &[u8], output: &mut Output, scope: &mut Scope) -> Result<()> {
        match self.request(id, body, scope)? {
            (_, Err(refusal)) => {
                tracing::debug!(peer = ?self.who, %refusal, "refused a read over TCP");
                put_end(&mut output.control, id, Err(&refusal));
            }
            (bytes, Ok(blocks)) => {
                self.reads_described += body.len();
                scope.described += body.len();
                self.reads.push(Reading { id, blocks, described: body.len() }, bytes);
            }
        }
        Ok(())
    }

    fn write(&mut self, id: u64, body: &[u8], output: &mut Output, scope: &mut Scope) -> Result<()> {
        if self.writes.len() >= MAX_WRITES || self.writes_described > MAX_WRITES_DESCRIBED {
            return Err(malformed(format_args!("more than {MAX_WRITES} writes at a time")));
        }
        let (left, blocks) = self.request(id, body, scope)?;
        let mut described = 0;
        let blocks = match blocks {
            Ok(blocks) => {
                described = body.len();
                Some(blocks)
            }
            Err(refusal) => {
                tracing::debug!(peer = ?self.who, %refusal, "refused a write over TCP");
                put_end(&mut output.control, id, Err(&refusal));
                None
            }
        };
        self.writes_described += described;
        scope.described += described;
        self.writes.insert(id, Writing { blocks, left, described });
        Ok(())
    }

    /// Payload begins.
    pub(super) fn data(&mut self, header: Header) -> Result<()> {
        let Some(writing) = self.writes.get(&header.id) else {
            return Err(malformed(format_args!("data for the write {}, which is not open", header.id)));
        };
        if header.len as u64 > writing.left {
            return Err(malformed(format_args!("{} bytes for a write of {} more", header.len, writing.left)));
        }
        self.receiving = Some((header.id, header.len));
        Ok(())
    }

    /// Where the next of it goes.
    pub(super) fn fill(&mut self, chunk: &mut Chunk, max: usize, bin: &mut Bin) {
        let writing = self.receiving.and_then(|(id, _)| self.writes.get_mut(&id));
        match writing.and_then(|writing| writing.blocks.as_mut()) {
            Some(blocks) => blocks.gather(chunk, max),
            None => chunk.discard(bin, max),
        }
    }

    /// Payload has ended.
    pub(super) fn data_end(&mut self, output: &mut Output, scope: &mut Scope) {
        let Some((id, len)) = self.receiving.take() else { return };
        let Some(writing) = self.writes.get_mut(&id) else { return };
        writing.left -= len as u64;
        if writing.left == 0 {
            if writing.blocks.is_some() {
                put_end(&mut output.control, id, Ok(()));
            }
            self.forget_write(id, &mut scope.described);
        }
    }

    fn forget_write(&mut self, id: u64, described: &mut usize) {
        if let Some(writing) = self.writes.remove(&id) {
            self.writes_described -= writing.described;
            *described -= writing.described;
        }
    }

    fn forget_read(&mut self, reading: Reading, described: &mut usize) {
        self.reads_described -= reading.described;
        *described -= reading.described;
    }

    /// The next piece of an answer.
    pub(super) fn next_frame(&mut self, output: &mut Output, scope: &mut Scope) {
        if let Some(reading) = self.sending.take() {
            match reading.blocks.left() {
                0 => self.forget_read(reading, &mut scope.described),
                left => self.reads.push(reading, left),
            }
        }
        let Some(mut reading) = self.reads.next_turn() else { return };
        output.chunk.clear();
        reading.blocks.gather(&mut output.chunk, scope.piece.min(MAX_DATA));
        let len = output.chunk.left();
        Header { frame: Frame::Data, len, id: reading.id }.encode(output.head());
        if reading.blocks.left() == 0 {
            put_bare(output.tail(), Frame::End, reading.id);
        }
        self.sending = Some(reading);
    }

    /// The initiator takes a request back: what was not done is not done any more.
    pub(super) fn cancel(
        &mut self,
        id: u64,
        input: &mut Input,
        output: &mut Output,
        scope: &mut Scope,
    ) -> Result<()> {
        if self.last_id.is_none_or(|last| last < id) {
            if self.cancelled.len() >= MAX_READS {
                return Err(malformed("more requests cancelled in advance than may wait"));
            }
            self.cancelled.insert(id);
            return Ok(());
        }
        self.stop_reads(|reading| reading.id == id, &cancelled(), output, &mut scope.described);
        self.refuse_writes(|writing, _| writing == id, &cancelled(), input, output, &mut scope.bin);
        Ok(())
    }

    /// No more payload comes for a write.
    fn stop_write(&mut self, id: u64, output: &mut Output, scope: &mut Scope) {
        if self.writes.get(&id).is_some_and(|writing| writing.blocks.is_some()) {
            put_end(&mut output.control, id, Err(&cancelled()));
        }
        self.forget_write(id, &mut scope.described);
    }

    /// Ends writes at once: nothing more goes into their memory.
    fn refuse_writes(
        &mut self,
        which: impl Fn(u64, &Blocks) -> bool,
        why: &Error,
        input: &mut Input,
        output: &mut Output,
        bin: &mut Bin,
    ) {
        for (id, writing) in &mut self.writes {
            if writing.blocks.take_if(|blocks| which(*id, blocks)).is_some() {
                put_end(&mut output.control, *id, Err(why));
                if input.in_payload() && self.receiving.is_some_and(|(receiving, _)| receiving == *id) {
                    input.abort(bin);
                }
            }
        }
    }

    /// Ends reads at once: nothing more of their memory goes out.
    fn stop_reads(
        &mut self,
        which: impl Fn(&Reading) -> bool,
        why: &Error,
        output: &mut Output,
        described: &mut usize,
    ) {
        for reading in self.reads.extract(&which) {
            put_end(&mut output.control, reading.id, Err(why));
            self.forget_read(reading, described);
        }
        let Some(reading) = self.sending.take_if(|reading| which(reading)) else { return };
        let unfinished = output.in_payload() || reading.blocks.left() > 0;
        if output.in_payload() {
            output.abort();
        }
        if unfinished {
            put_end(&mut output.control, reading.id, Err(why));
        }
        self.forget_read(reading, described);
    }

    /// Ends all access to a region at once.
    pub(super) fn revoke(
        &mut self,
        region: RegionId,
        input: &mut Input,
        output: &mut Output,
        scope: &mut Scope,
    ) {
        let revoked = Error::new(Kind::Revoked, format!("region {region} was revoked by its owner"));
        self.stop_reads(|reading| reading.blocks.touches(region), &revoked, output, &mut scope.described);
        self.refuse_writes(|_, blocks| blocks.touches(region), &revoked, input, output, &mut scope.bin);
    }

    fn notify(&mut self, id: u64, bytes: &[u8], output: &mut Output, scope: &Scope) -> Result<()> {
        if self.parked.is_empty() && scope.shared.events.notification(self.who.as_sender(), bytes).is_ok() {
            put_bare(&mut output.control, Frame::Ack, id);
            return Ok(());
        }
        if self.parked.len() >= NOTICES || self.parked_bytes > NOTICES_BYTES + MAX_NOTIFICATION {
            return Err(malformed("more notifications than may wait for their acknowledgement"));
        }
        self.parked_bytes += bytes.len();
        self.parked.push_back((id, bytes.into()));
        Ok(())
    }

    /// The agent has room again. Says whether something was taken.
    pub(super) fn resume(&mut self, output: &mut Output, shared: &Shared) -> bool {
        let before = self.parked.len();
        while let Some((id, bytes)) = self.parked.front() {
            if shared.events.notification(self.who.as_sender(), bytes).is_err() {
                break;
            }
            put_bare(&mut output.control, Frame::Ack, *id);
            self.parked_bytes -= bytes.len();
            self.parked.pop_front();
        }
        self.parked.len() < before
    }
}
