//! The messages between scheduler and worker, for a worker in another process.
//!
//! Records are arrays without field names: both ends run the same build of kvx, which their first
//! message checks.

use std::sync::Arc;
use std::time::Duration;

use kvx_core::{ErrorKind, Result};

use crate::engine::{
    Address, BlockLists, BlockReference, ClockOffset, ConnectorMeta, EngineId, FailedLoad,
    FailureKind, Heartbeat, Kept, LoadFailure, ReceiveOrder, RemoteEngine, RemoteRequest,
    RequestId, SendOrder, Time, TransferFailure, TransferStats, Transferred, WorkerOutput,
    WorkerRank,
};
use crate::msgpack::{self, MsgpackReader, MsgpackWriter};

/// The longest message, in bytes.
pub(crate) const MAX_STEP: usize = 32 << 20;
/// The most loads, leases, failures and heartbeats in a message.
const MAX_ORDERS: usize = 1 << 16;
/// The most names in a list.
const MAX_NAMES: usize = 1 << 20;
/// The most KV cache groups.
pub(super) const MAX_GROUPS: usize = 1 << 10;
/// The longest reason, in bytes. The writer cuts longer ones.
const MAX_REASON: usize = 4 << 10;

impl ConnectorMeta {
    /// Encodes the orders for a worker.
    ///
    /// # Errors
    ///
    /// `Exhausted`: the message is longer than the reader accepts.
    pub fn encode(&self) -> Result<Vec<u8>> {
        let mut writer = MsgpackWriter::default();
        writer.array(10);
        time(&mut writer, self.built_at);
        writer.unsigned(self.registration);
        writer.list(&self.named, |writer, (request, transfer)| {
            writer.array(2);
            writer.text(request.as_str());
            writer.text(transfer.as_str());
        });
        for names in [&self.prefilling, &self.dropped, &self.withdrawn, &self.cancel] {
            requests(&mut writer, names);
        }
        writer.list(&self.send, |writer, order| {
            writer.array(3);
            writer.text(order.request.as_str());
            time(writer, order.expires);
            writer.optional(order.push.as_ref(), lists);
        });
        writer.list(&self.receive, receive_order);
        writer.list(&self.heartbeats, |writer, heartbeat| {
            writer.array(2);
            remote_engine(writer, &heartbeat.peer);
            requests(writer, &heartbeat.requests);
        });
        bounded("a step", writer)
    }

    /// Decodes a message of the scheduler.
    ///
    /// # Errors
    ///
    /// `Malformed`.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let mut reader = MsgpackReader::new("step", bytes, MAX_STEP)?;
        record(&mut reader, 10)?;
        let (built_at, registration) = (read_time(&mut reader)?, reader.unsigned()?);
        let named = reader.list(MAX_ORDERS, |reader| reader.pair(read_request, read_request))?;
        let mut names = || read_requests(&mut reader);
        let (prefilling, dropped, withdrawn, cancel) = (names()?, names()?, names()?, names()?);
        let send = reader.list(MAX_ORDERS, |reader| {
            record(reader, 3)?;
            Ok(SendOrder {
                request: read_request(reader)?,
                expires: read_time(reader)?,
                push: reader.optional(read_lists)?,
            })
        })?;
        let receive = reader.list(MAX_ORDERS, read_receive_order)?;
        let heartbeats = reader.list(MAX_ORDERS, |reader| {
            record(reader, 2)?;
            Ok(Heartbeat {
                peer: Arc::new(read_remote_engine(reader)?),
                requests: read_requests(reader)?,
            })
        })?;
        reader.end()?;
        Ok(ConnectorMeta {
            built_at,
            registration,
            named,
            prefilling,
            dropped,
            send,
            withdrawn,
            receive,
            cancel,
            heartbeats,
        })
    }
}

impl WorkerOutput {
    /// Encodes the output for the scheduler. Reasons of more than 4 KiB are cut.
    ///
    /// # Errors
    ///
    /// `Exhausted`: the message is longer than the reader accepts.
    pub fn encode(&self) -> Result<Vec<u8>> {
        let mut writer = MsgpackWriter::default();
        writer.array(9);
        time(&mut writer, self.at);
        requests(&mut writer, &self.finished_sending);
        requests(&mut writer, &self.finished_recving);
        writer.list(&self.failed_recving, |writer, failed| {
            writer.array(3);
            writer.text(failed.request.as_str());
            load_failure(writer, &failed.failure);
            writer.list(&failed.invalid, |writer, block| writer.unsigned((*block).into()));
        });
        writer.list(&self.failing, |writer, (request, failure)| {
            writer.array(2);
            writer.text(request.as_str());
            load_failure(writer, failure);
        });
        writer.list(&self.lost, |writer, (request, kept)| {
            writer.array(2);
            writer.text(request.as_str());
            writer.unsigned(u64::from(*kept == Kept::Request));
        });
        writer.list(&self.clocks, |writer, (engine, offset)| {
            writer.array(3);
            writer.text(engine.as_str());
            writer.float(offset.seconds);
            duration(writer, offset.round_trip);
        });
        writer.list(&self.failures, transfer_failure);
        stats(&mut writer, &self.stats);
        bounded("the output of a worker", writer)
    }

    /// Decodes a message of a worker.
    ///
    /// # Errors
    ///
    /// `Malformed`.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let mut reader = MsgpackReader::new("worker's output", bytes, MAX_STEP)?;
        record(&mut reader, 9)?;
        let output = WorkerOutput {
            at: read_time(&mut reader)?,
            finished_sending: read_requests(&mut reader)?,
            finished_recving: read_requests(&mut reader)?,
            failed_recving: reader.list(MAX_ORDERS, |reader| {
                record(reader, 3)?;
                Ok(FailedLoad {
                    request: read_request(reader)?,
                    failure: read_load_failure(reader)?,
                    invalid: reader.list(MAX_STEP, MsgpackReader::unsigned_32)?,
                })
            })?,
            failing: reader
                .list(MAX_ORDERS, |reader| reader.pair(read_request, read_load_failure))?,
            lost: reader.list(MAX_ORDERS, |reader| reader.pair(read_request, read_kept))?,
            clocks: reader.list(MAX_ORDERS, |reader| {
                record(reader, 3)?;
                let engine = EngineId::from(reader.text()?);
                let seconds = finite(reader)?;
                Ok((engine, ClockOffset { seconds, round_trip: read_duration(reader)? }))
            })?,
            failures: reader.list(MAX_ORDERS, read_transfer_failure)?,
            stats: read_stats(&mut reader)?,
            // Each process logs the unknown requests of its own peers.
            unknown_requests: 0,
        };
        reader.end()?;
        Ok(output)
    }
}

fn bounded(what: &str, writer: MsgpackWriter) -> Result<Vec<u8>> {
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

/// Reads the head of a record: an array of exactly `items` items.
pub(super) fn record(reader: &mut MsgpackReader<'_>, items: usize) -> msgpack::Result<()> {
    match reader.array(items)? {
        len if len == items => Ok(()),
        len => Err(reader.malformed(format_args!("expected {items} items, found {len}"))),
    }
}

pub(super) fn duration(writer: &mut MsgpackWriter, duration: Duration) {
    writer.unsigned(u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX));
}

pub(super) fn read_duration(reader: &mut MsgpackReader<'_>) -> msgpack::Result<Duration> {
    reader.unsigned().map(Duration::from_nanos)
}

fn time(writer: &mut MsgpackWriter, time: Time) {
    duration(writer, time.since(Time::default()));
}

fn read_time(reader: &mut MsgpackReader<'_>) -> msgpack::Result<Time> {
    read_duration(reader).map(Time::from_origin)
}

fn finite(reader: &mut MsgpackReader<'_>) -> msgpack::Result<f64> {
    match reader.float()? {
        number if number.is_finite() => Ok(number),
        number => Err(reader.malformed(format_args!("{number} is not a number of seconds"))),
    }
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

fn requests(writer: &mut MsgpackWriter, names: &[RequestId]) {
    writer.list(names, |writer, name| writer.text(name.as_str()));
}

pub(super) fn read_request(reader: &mut MsgpackReader<'_>) -> msgpack::Result<RequestId> {
    reader.text().map(RequestId::from)
}

fn read_requests(reader: &mut MsgpackReader<'_>) -> msgpack::Result<Vec<RequestId>> {
    reader.list(MAX_NAMES, read_request)
}

fn lists(writer: &mut MsgpackWriter, blocks: &BlockLists) {
    writer.list(blocks.groups(), |writer, list| {
        writer.list(list, |writer, block| writer.unsigned((*block).into()));
    });
}

fn read_lists(reader: &mut MsgpackReader<'_>) -> msgpack::Result<BlockLists> {
    let groups =
        reader.list(MAX_GROUPS, |reader| reader.list(MAX_STEP, MsgpackReader::unsigned_32))?;
    Ok(BlockLists::new(groups))
}

fn read_kept(reader: &mut MsgpackReader<'_>) -> msgpack::Result<Kept> {
    match reader.unsigned()? {
        0 => Ok(Kept::Load),
        1 => Ok(Kept::Request),
        other => Err(reader.malformed(format_args!("unknown kind of kept blocks {other}"))),
    }
}

fn address(writer: &mut MsgpackWriter, address: &Address) {
    writer.array(2);
    writer.text(&address.host);
    writer.unsigned(address.port.into());
}

fn read_address(reader: &mut MsgpackReader<'_>) -> msgpack::Result<Address> {
    let (host, port) = reader.pair(MsgpackReader::text, MsgpackReader::port)?;
    Ok(Address { host: host.into(), port })
}

fn remote_engine(writer: &mut MsgpackWriter, peer: &Arc<RemoteEngine>) {
    writer.array(6);
    writer.text(peer.engine.as_str());
    address(writer, &peer.address);
    for size in [peer.tp_size, peer.pp_size, peer.dcp_size] {
        writer.unsigned(size.into());
    }
    writer.unsigned(peer.registration);
}

fn read_remote_engine(reader: &mut MsgpackReader<'_>) -> msgpack::Result<RemoteEngine> {
    record(reader, 6)?;
    Ok(RemoteEngine {
        engine: reader.text()?.into(),
        address: read_address(reader)?,
        tp_size: reader.unsigned_32()?,
        pp_size: reader.unsigned_32()?,
        dcp_size: reader.unsigned_32()?,
        registration: reader.unsigned()?,
    })
}

fn receive_order(writer: &mut MsgpackWriter, order: &ReceiveOrder) {
    let remote = &order.remote;
    writer.array(12);
    writer.text(order.request.as_str());
    lists(writer, &order.local);
    writer.text(remote.request.as_str());
    remote_engine(writer, &remote.peer);
    lists(writer, &remote.blocks);
    writer.optional(remote.expires_at_peer.as_ref(), |writer, seconds| writer.float(*seconds));
    writer.optional(remote.reference.as_ref(), |writer, reference| {
        writer.array(2);
        writer.unsigned(reference.pool);
        writer.unsigned(reference.stamp);
    });
    for tokens in [order.computed, order.end, order.held_there] {
        writer.unsigned(tokens.into());
    }
    writer.unsigned(order.awaited.into());
    time(writer, order.deadline);
}

fn read_receive_order(reader: &mut MsgpackReader<'_>) -> msgpack::Result<ReceiveOrder> {
    record(reader, 12)?;
    Ok(ReceiveOrder {
        request: read_request(reader)?,
        local: read_lists(reader)?,
        remote: RemoteRequest {
            request: read_request(reader)?,
            peer: Arc::new(read_remote_engine(reader)?),
            blocks: read_lists(reader)?,
            expires_at_peer: reader.optional(finite)?,
            reference: reader.optional(|reader| {
                let (pool, stamp) =
                    reader.pair(MsgpackReader::unsigned, MsgpackReader::unsigned)?;
                Ok(BlockReference { pool, stamp })
            })?,
        },
        computed: reader.unsigned_32()?,
        end: reader.unsigned_32()?,
        held_there: reader.unsigned_32()?,
        awaited: read_flag(reader)?,
        deadline: read_time(reader)?,
    })
}

pub(super) fn read_flag(reader: &mut MsgpackReader<'_>) -> msgpack::Result<bool> {
    match reader.unsigned()? {
        0 => Ok(false),
        1 => Ok(true),
        other => Err(reader.malformed(format_args!("{other} is not a flag (0 or 1)"))),
    }
}

fn load_failure(writer: &mut MsgpackWriter, failure: &LoadFailure) {
    let (number, why) = match failure {
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

fn read_load_failure(reader: &mut MsgpackReader<'_>) -> msgpack::Result<LoadFailure> {
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

fn transfer_failure(writer: &mut MsgpackWriter, failure: &TransferFailure) {
    let number =
        FailureKind::ALL.iter().position(|kind| *kind == failure.kind).expect("all are in it");
    writer.array(8);
    writer.unsigned(number as u64);
    for request in [&failure.request, &failure.remote_request] {
        writer.optional(request.as_ref(), |writer, request| writer.text(request.as_str()));
    }
    writer.optional(failure.engine.as_ref(), |writer, engine| writer.text(engine.as_str()));
    writer.optional(failure.address.as_ref(), address);
    writer.optional(failure.rank.as_ref(), rank);
    writer.list(&failure.blocks, |writer, count| writer.unsigned(*count as u64));
    reason(writer, &failure.error);
}

fn read_transfer_failure(reader: &mut MsgpackReader<'_>) -> msgpack::Result<TransferFailure> {
    record(reader, 8)?;
    let number = usize::try_from(reader.unsigned()?).unwrap_or(usize::MAX);
    let Some(kind) = FailureKind::ALL.get(number) else {
        return Err(reader.malformed(format_args!("unknown failure kind {number}")));
    };
    Ok(TransferFailure {
        kind: *kind,
        request: reader.optional(read_request)?,
        remote_request: reader.optional(read_request)?,
        engine: reader.optional(|reader| reader.text().map(EngineId::from))?,
        address: reader.optional(read_address)?,
        rank: reader.optional(read_rank)?,
        blocks: reader.list(MAX_GROUPS, |reader| Ok(reader.unsigned_32()? as usize))?,
        error: read_reason(reader)?,
    })
}

pub(super) fn rank(writer: &mut MsgpackWriter, rank: &WorkerRank) {
    writer.array(2);
    writer.unsigned(rank.pp.into());
    writer.unsigned(rank.tp.into());
}

pub(super) fn read_rank(reader: &mut MsgpackReader<'_>) -> msgpack::Result<WorkerRank> {
    let (pp, tp) = reader.pair(MsgpackReader::unsigned_32, MsgpackReader::unsigned_32)?;
    Ok(WorkerRank { pp, tp })
}

fn stats(writer: &mut MsgpackWriter, stats: &TransferStats) {
    let TransferStats {
        transfers,
        failed_transfers,
        failed_notifications,
        failed_receives,
        expired,
        after_expiry,
    } = stats;
    writer.array(6);
    writer.list(transfers, |writer, transfer| {
        writer.array(4);
        duration(writer, transfer.time);
        duration(writer, transfer.post);
        writer.unsigned(transfer.bytes);
        writer.unsigned(transfer.descriptors);
    });
    for count in [failed_transfers, failed_notifications, failed_receives, expired, after_expiry] {
        writer.unsigned((*count).min(u32::MAX.into()));
    }
}

fn read_stats(reader: &mut MsgpackReader<'_>) -> msgpack::Result<TransferStats> {
    record(reader, 6)?;
    Ok(TransferStats {
        transfers: reader.list(MAX_NAMES, |reader| {
            record(reader, 4)?;
            Ok(Transferred {
                time: read_duration(reader)?,
                post: read_duration(reader)?,
                bytes: reader.unsigned()?,
                descriptors: reader.unsigned()?,
            })
        })?,
        failed_transfers: count(reader)?,
        failed_notifications: count(reader)?,
        failed_receives: count(reader)?,
        expired: count(reader)?,
        after_expiry: count(reader)?,
    })
}

/// Reads a number that is added to others: 32 bits, so that the sum does not overflow.
fn count(reader: &mut MsgpackReader<'_>) -> msgpack::Result<u64> {
    reader.unsigned_32().map(u64::from)
}
