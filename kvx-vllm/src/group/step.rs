//! The messages between scheduler and worker, for a worker in another process.

use kvx_core::{ErrorKind, Result};

use super::value::{GroupValue, MAX_GROUPS, group_record, record};
use crate::engine::{
    ConnectorMeta, FailureKind, LoadFailure, ReceiveOrder, RemoteRequest, TransferFailure,
    TransferStats, WorkerOutput,
};
use crate::msgpack::{self, MsgpackReader, MsgpackValue, MsgpackWriter};

/// The longest message, in bytes.
pub(crate) const MAX_STEP: usize = 32 << 20;
/// The longest reason, in bytes. The writer cuts longer ones.
const MAX_REASON: usize = 4 << 10;

group_record! {
    ConnectorMeta: built_at registration named prefilling dropped withdrawn cancel send receive
    heartbeats
}

// Each process logs the unknown requests of its own peers.
group_record! {
    WorkerOutput: at finished_sending finished_recving failed_recving failing lost clocks failures
    stats; unknown_requests = 0
}

impl ConnectorMeta {
    /// Encodes the orders for a worker.
    ///
    /// # Errors
    ///
    /// `Exhausted`: the message is longer than the reader accepts.
    pub fn encode(&self) -> Result<Vec<u8>> {
        encode("a step", self)
    }

    /// Decodes a message of the scheduler.
    ///
    /// # Errors
    ///
    /// `Malformed`.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        decode("step", bytes)
    }
}

impl WorkerOutput {
    /// Encodes the output for the scheduler. Reasons of more than 4 KiB are cut.
    ///
    /// # Errors
    ///
    /// `Exhausted`: the message is longer than the reader accepts.
    pub fn encode(&self) -> Result<Vec<u8>> {
        encode("the output of a worker", self)
    }

    /// Decodes a message of a worker.
    ///
    /// # Errors
    ///
    /// `Malformed`.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        decode("worker's output", bytes)
    }
}

fn encode(what: &str, message: &impl MsgpackValue) -> Result<Vec<u8>> {
    let mut writer = MsgpackWriter::default();
    message.write_to(&mut writer);
    let bytes = writer.into_bytes();
    if bytes.len() <= MAX_STEP {
        return Ok(bytes);
    }
    let sentence = format!(
        "{what} has {} bytes, which exceeds the limit of {MAX_STEP} for a rank in another process",
        bytes.len()
    );
    Err(ErrorKind::Exhausted.because(sentence))
}

fn decode<T: GroupValue>(what: &'static str, bytes: &[u8]) -> Result<T> {
    let mut reader = MsgpackReader::new(what, bytes, MAX_STEP)?;
    let message = T::read(&mut reader)?;
    reader.end()?;
    Ok(message)
}

pub(super) fn reason(writer: &mut MsgpackWriter, text: &str) {
    let mut end = text.len().min(MAX_REASON);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    writer.text(&text[..end]);
}

/// Errors: `Malformed` for a reason that is longer than the writer allows.
pub(super) fn read_reason(reader: &mut MsgpackReader<'_>) -> msgpack::Result<String> {
    match reader.text()? {
        text if text.len() <= MAX_REASON => Ok(text.to_owned()),
        text => Err(reader.malformed(format_args!("a reason of {} bytes", text.len()))),
    }
}

impl MsgpackValue for ReceiveOrder {
    fn write_to(&self, writer: &mut MsgpackWriter) {
        let ReceiveOrder { request, local, remote, computed, end, held_there, awaited, deadline } =
            self;
        writer.array(12);
        request.write_to(writer);
        local.write_to(writer);
        remote.request.write_to(writer);
        remote.peer.write_to(writer);
        remote.blocks.write_to(writer);
        remote.expires_at_peer.write_to(writer);
        remote.reference.write_to(writer);
        for tokens in [computed, end, held_there] {
            tokens.write_to(writer);
        }
        awaited.write_to(writer);
        deadline.write_to(writer);
    }
}

impl GroupValue for ReceiveOrder {
    fn read(reader: &mut MsgpackReader<'_>) -> msgpack::Result<Self> {
        record(reader, 12)?;
        Ok(ReceiveOrder {
            request: GroupValue::read(reader)?,
            local: GroupValue::read(reader)?,
            remote: RemoteRequest {
                request: GroupValue::read(reader)?,
                peer: GroupValue::read(reader)?,
                blocks: GroupValue::read(reader)?,
                expires_at_peer: GroupValue::read(reader)?,
                reference: GroupValue::read(reader)?,
            },
            computed: GroupValue::read(reader)?,
            end: GroupValue::read(reader)?,
            held_there: GroupValue::read(reader)?,
            awaited: GroupValue::read(reader)?,
            deadline: GroupValue::read(reader)?,
        })
    }
}

impl MsgpackValue for LoadFailure {
    fn write_to(&self, writer: &mut MsgpackWriter) {
        let (number, why) = match self {
            LoadFailure::Handshake(why) => (0, why.as_str()),
            LoadFailure::Transfer(why) => (1, why.as_str()),
            LoadFailure::Stale => (2, ""),
            LoadFailure::Corrupt => (3, ""),
            LoadFailure::Refused(why) => (4, why.as_str()),
            LoadFailure::Expiring => (5, ""),
            LoadFailure::NotPushed => (6, ""),
            LoadFailure::Deadline => (7, ""),
            LoadFailure::Rank(why) => (8, why.as_str()),
        };
        writer.array(2);
        writer.unsigned(number);
        reason(writer, why);
    }
}

impl GroupValue for LoadFailure {
    fn read(reader: &mut MsgpackReader<'_>) -> msgpack::Result<Self> {
        let (number, why) = reader.pair(MsgpackReader::unsigned, read_reason)?;
        Ok(match number {
            0 => LoadFailure::Handshake(why),
            1 => LoadFailure::Transfer(why),
            2 => LoadFailure::Stale,
            3 => LoadFailure::Corrupt,
            4 => LoadFailure::Refused(why),
            5 => LoadFailure::Expiring,
            6 => LoadFailure::NotPushed,
            7 => LoadFailure::Deadline,
            8 => LoadFailure::Rank(why),
            other => return Err(reader.malformed(format_args!("unknown load failure {other}"))),
        })
    }
}

impl MsgpackValue for TransferFailure {
    fn write_to(&self, writer: &mut MsgpackWriter) {
        let TransferFailure { kind, request, remote_request, engine, address, rank, blocks, error } =
            self;
        let number = FailureKind::ALL.iter().position(|each| each == kind).expect("all are in it");
        writer.array(8);
        writer.unsigned(number as u64);
        request.write_to(writer);
        remote_request.write_to(writer);
        engine.write_to(writer);
        address.write_to(writer);
        rank.write_to(writer);
        writer.list(blocks, |writer, count| writer.unsigned(*count as u64));
        reason(writer, error);
    }
}

impl GroupValue for TransferFailure {
    fn read(reader: &mut MsgpackReader<'_>) -> msgpack::Result<Self> {
        record(reader, 8)?;
        let number = usize::try_from(reader.unsigned()?).unwrap_or(usize::MAX);
        let Some(kind) = FailureKind::ALL.get(number) else {
            return Err(reader.malformed(format_args!("unknown failure kind {number}")));
        };
        Ok(TransferFailure {
            kind: *kind,
            request: GroupValue::read(reader)?,
            remote_request: GroupValue::read(reader)?,
            engine: GroupValue::read(reader)?,
            address: GroupValue::read(reader)?,
            rank: GroupValue::read(reader)?,
            blocks: reader.list(MAX_GROUPS, |reader| Ok(reader.unsigned_32()? as usize))?,
            error: read_reason(reader)?,
        })
    }
}

impl MsgpackValue for TransferStats {
    fn write_to(&self, writer: &mut MsgpackWriter) {
        let TransferStats {
            transfers,
            failed_transfers,
            failed_notifications,
            failed_receives,
            expired,
            after_expiry,
        } = self;
        writer.array(6);
        transfers.write_to(writer);
        for count in
            [failed_transfers, failed_notifications, failed_receives, expired, after_expiry]
        {
            writer.unsigned((*count).min(u32::MAX.into()));
        }
    }
}

impl GroupValue for TransferStats {
    fn read(reader: &mut MsgpackReader<'_>) -> msgpack::Result<Self> {
        record(reader, 6)?;
        let transfers = Vec::read(reader)?;
        // The counts have 32 bits, so that the sums of several do not overflow.
        let mut count = || reader.unsigned_32().map(u64::from);
        Ok(TransferStats {
            transfers,
            failed_transfers: count()?,
            failed_notifications: count()?,
            failed_receives: count()?,
            expired: count()?,
            after_expiry: count()?,
        })
    }
}
