//! Messages between an engine and a rank in another process: one byte that names the message, then
//! its value.

use std::time::Duration;

use kvx_core::{ErrorKind, Result};

use super::step::{MAX_STEP, read_reason, reason};
use super::value::{GroupValue, MAX_GROUPS, group_record, record};
use crate::engine::{
    ConnectorMeta, Fresh, PoolBlocks, RequestId, Unsaved, WorkerOutput, WorkerRank,
};
use crate::msgpack::{self, MsgpackReader, MsgpackValue, MsgpackWriter};
use crate::wire::PushGrant;

/// The longest message in either direction, in bytes.
pub const MAX_MESSAGE: usize = MAX_STEP + 1;
/// The longest text of a message, in bytes: the configuration of the engine.
const MAX_TEXT: usize = 1 << 20;
/// The most blocks in a pool. The engine keeps eight bytes for each.
const MAX_BLOCKS: u32 = 1 << 24;

/// The most blocks in one request for digests or copies.
pub const MAX_ASKED: usize = 1 << 16;
/// The most blocks whose generation counters one message raises.
pub const MAX_RAISED: usize = 1 << 16;

/// A message from an engine to a rank.
#[derive(Debug, PartialEq)]
pub enum ToRank {
    /// Accepts the rank. Carries the engine's configuration, as JSON.
    Welcome(String),
    /// Rejects the rank or its registration, for this reason, and ends the connection.
    Refused(String),
    /// The generation counters that the rank registers with its caches. `None`: their file is
    /// passed with this message.
    Words(Option<OwnWords>),
    /// Accepts a registration. The engine announces it to peers once all ranks have registered.
    Taken,
    /// The orders of the engine for one step.
    Step(ConnectorMeta),
    /// Tells the rank that the engine shuts down within this time.
    End(Duration),
    /// Asks for the digests of blocks that are about to be published. The rank answers `Done` with
    /// this number.
    Digest { number: u64, fresh: Vec<Fresh> },
    /// Asks for copies on the host of blocks of the request numbered `of`; `early`: before it ends.
    /// The rank answers `Done` with this number.
    Save { number: u64, of: u64, early: bool, blocks: Vec<Unsaved> },
    /// Asks for the memory that a peer may write into for this request.
    Grant(RequestId),
    /// The memory on all ranks that peers may write into for a request, or the reason why they may
    /// not.
    Grants { request: RequestId, told: Result<Vec<PushGrant>, String> },
    /// Confirms that the rank has released its caches.
    GivenBack,
    /// Revokes peers' access to these blocks. The rank sets the generation counters that it made to
    /// this stamp and answers `Raised` with this number.
    Raise { number: u64, stamp: u64, blocks: Vec<u32> },
    /// A note of the engine's program for the rank's program.
    Note(Vec<u8>),
}

/// Generation counters that a rank creates itself because it runs on another host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OwnWords {
    /// The incarnation of the pool.
    pub pool: u64,
    /// The initial value of every counter.
    pub stamp: u64,
    /// The number of blocks.
    pub blocks: u32,
}

/// A message from a rank to its engine.
#[derive(Debug, PartialEq)]
pub enum ToHead {
    /// The first message: the version of kvx, and the rank that the sender wants to be.
    Hello { version: String, rank: WorkerRank },
    /// The blocks of the caches that are to be registered.
    Pool(PoolBlocks),
    /// The caches are registered. Carries the metadata for peers, and whether it describes copies
    /// on the host.
    Registered { metadata: Vec<u8>, host_copies: bool },
    /// The events since the last output.
    Output(Box<WorkerOutput>),
    /// Reports that the rank is alive.
    Alive,
    /// The rank has shut down. Without a reason, nothing accesses its memory any more.
    Ended(Option<String>),
    /// The request with this number is done, or failed for this reason.
    Done { number: u64, failed: Option<String> },
    /// The memory of this rank that peers may write into for a request, or the reason why they may
    /// not.
    Granted { request: RequestId, told: Result<Vec<Vec<u8>>, String> },
    /// Asks for the memory on all ranks that peers may write into for a request.
    GrantsOfAll(RequestId),
    /// Releases the rank's caches, so that it can register others.
    GivesBack,
    /// Confirms a `Raise` with this number.
    Raised(u64),
}

group_record!(OwnWords: pool stamp blocks);

impl ToRank {
    /// Errors: `Exhausted` if the message is longer than the reader accepts.
    pub fn encode(&self) -> Result<Vec<u8>> {
        match self {
            ToRank::Welcome(setup) => message(0, |writer| writer.text(setup)),
            ToRank::Refused(why) => message(1, |writer| reason(writer, why)),
            ToRank::Words(own) => message(2, |writer| own.write_to(writer)),
            ToRank::Taken => message(3, |_| ()),
            ToRank::Step(meta) => {
                let meta = meta.encode()?;
                message(4, |writer| writer.raw(&meta))
            }
            ToRank::End(within) => message(5, |writer| within.write_to(writer)),
            ToRank::Grant(request) => message(7, |writer| request.write_to(writer)),
            ToRank::Grants { request, told } => message(8, |writer| {
                writer.array(3);
                request.write_to(writer);
                result(writer, told);
            }),
            ToRank::GivenBack => message(9, |_| ()),
            ToRank::Raise { number, stamp, blocks } => message(10, |writer| {
                writer.array(3);
                number.write_to(writer);
                stamp.write_to(writer);
                blocks.write_to(writer);
            }),
            ToRank::Save { number, of, early, blocks } => message(11, |writer| {
                writer.array(4);
                number.write_to(writer);
                of.write_to(writer);
                early.write_to(writer);
                blocks.write_to(writer);
            }),
            ToRank::Note(note) => message(12, |writer| note.write_to(writer)),
            ToRank::Digest { number, fresh } => message(6, |writer| {
                writer.array(2);
                number.write_to(writer);
                fresh.write_to(writer);
            }),
        }
    }

    pub fn decode(bytes: &[u8]) -> Result<Self> {
        const WHAT: &str = "message of an engine to its rank";
        let (kind, body) = parts(WHAT, bytes)?;
        if kind == 4 {
            return ConnectorMeta::decode(body).map(ToRank::Step);
        }
        let longest = if matches!(kind, 6 | 8 | 10..=12) { MAX_STEP } else { MAX_TEXT };
        let mut reader = MsgpackReader::new(WHAT, body, longest)?;
        let message = match kind {
            0 => ToRank::Welcome(reader.owned_text()?),
            1 => ToRank::Refused(read_reason(&mut reader)?),
            2 => ToRank::Words(reader.optional(read_own_words)?),
            3 => ToRank::Taken,
            5 => ToRank::End(Duration::read(&mut reader)?),
            6 => {
                let (number, fresh) = GroupValue::read(&mut reader)?;
                ToRank::Digest { number, fresh }
            }
            7 => ToRank::Grant(RequestId::read(&mut reader)?),
            8 => {
                record(&mut reader, 3)?;
                let request = RequestId::read(&mut reader)?;
                ToRank::Grants { request, told: read_result(&mut reader, Vec::read)? }
            }
            9 => ToRank::GivenBack,
            10 => {
                record(&mut reader, 3)?;
                let (number, stamp) = (reader.unsigned()?, reader.unsigned()?);
                ToRank::Raise {
                    number,
                    stamp,
                    blocks: reader.list(MAX_RAISED, MsgpackReader::unsigned_32)?,
                }
            }
            11 => {
                record(&mut reader, 4)?;
                ToRank::Save {
                    number: GroupValue::read(&mut reader)?,
                    of: GroupValue::read(&mut reader)?,
                    early: GroupValue::read(&mut reader)?,
                    blocks: GroupValue::read(&mut reader)?,
                }
            }
            12 => ToRank::Note(reader.binary()?.to_vec()),
            other => {
                return Err(reader.malformed(format_args!("unknown message kind {other}")).into());
            }
        };
        reader.end()?;
        Ok(message)
    }
}

impl ToHead {
    /// Errors: `Exhausted` if the message is longer than the reader accepts.
    pub fn encode(&self) -> Result<Vec<u8>> {
        match self {
            ToHead::Hello { version, rank } => message(0, |writer| {
                writer.array(2);
                version.write_to(writer);
                rank.write_to(writer);
            }),
            ToHead::Pool(PoolBlocks { groups, others }) => message(1, |writer| {
                writer.array(2);
                others.write_to(writer);
                writer.array(groups.len());
                groups.iter().for_each(|(group, blocks)| (*group, *blocks).write_to(writer));
            }),
            ToHead::Registered { metadata, host_copies } => message(2, |writer| {
                writer.array(2);
                metadata.write_to(writer);
                host_copies.write_to(writer);
            }),
            ToHead::Output(output) => {
                let output = output.encode()?;
                message(3, |writer| writer.raw(&output))
            }
            ToHead::Alive => message(4, |_| ()),
            ToHead::Ended(why) => message(5, |writer| writer.optional(why.as_deref(), reason)),
            ToHead::Done { number, failed } => message(6, |writer| {
                writer.array(2);
                number.write_to(writer);
                writer.optional(failed.as_deref(), reason);
            }),
            ToHead::Granted { request, told } => message(7, |writer| {
                writer.array(3);
                request.write_to(writer);
                result(writer, told);
            }),
            ToHead::GrantsOfAll(request) => message(8, |writer| request.write_to(writer)),
            ToHead::GivesBack => message(9, |_| ()),
            ToHead::Raised(number) => message(10, |writer| number.write_to(writer)),
        }
    }

    pub fn decode(bytes: &[u8]) -> Result<Self> {
        const WHAT: &str = "message of a rank to its engine";
        let (kind, body) = parts(WHAT, bytes)?;
        if kind == 3 {
            return WorkerOutput::decode(body).map(Box::new).map(ToHead::Output);
        }
        let mut reader = MsgpackReader::new(WHAT, body, MAX_STEP)?;
        let message = match kind {
            0 => {
                record(&mut reader, 2)?;
                ToHead::Hello {
                    version: reader.owned_text()?,
                    rank: WorkerRank::read(&mut reader)?,
                }
            }
            1 => {
                record(&mut reader, 2)?;
                let others = reader.unsigned_32()?;
                let groups = reader.list(MAX_GROUPS, <(u32, u32)>::read)?;
                let pool = PoolBlocks { groups: groups.into_iter().collect(), others };
                check_blocks(&reader, pool.most())?;
                ToHead::Pool(pool)
            }
            2 => {
                record(&mut reader, 2)?;
                let metadata = reader.binary()?.to_vec();
                ToHead::Registered { metadata, host_copies: bool::read(&mut reader)? }
            }
            4 => ToHead::Alive,
            5 => ToHead::Ended(reader.optional(read_reason)?),
            6 => {
                record(&mut reader, 2)?;
                ToHead::Done { number: reader.unsigned()?, failed: reader.optional(read_reason)? }
            }
            7 => {
                record(&mut reader, 3)?;
                let request = RequestId::read(&mut reader)?;
                ToHead::Granted {
                    request,
                    told: read_result(&mut reader, PushGrant::read_regions)?,
                }
            }
            8 => ToHead::GrantsOfAll(RequestId::read(&mut reader)?),
            9 => ToHead::GivesBack,
            10 => ToHead::Raised(reader.unsigned()?),
            other => {
                return Err(reader.malformed(format_args!("unknown message kind {other}")).into());
            }
        };
        reader.end()?;
        Ok(message)
    }
}

/// Writes two items: a success flag, then the value or the reason of the failure.
fn result(writer: &mut MsgpackWriter, result: &Result<impl MsgpackValue, String>) {
    result.is_ok().write_to(writer);
    match result {
        Ok(value) => value.write_to(writer),
        Err(why) => reason(writer, why),
    }
}

fn read_result<T>(
    reader: &mut MsgpackReader<'_>,
    value: impl FnOnce(&mut MsgpackReader<'_>) -> msgpack::Result<T>,
) -> msgpack::Result<Result<T, String>> {
    match bool::read(reader)? {
        true => value(reader).map(Ok),
        false => read_reason(reader).map(Err),
    }
}

fn check_blocks(reader: &MsgpackReader<'_>, blocks: u32) -> msgpack::Result<()> {
    match blocks > MAX_BLOCKS {
        true => {
            Err(reader.malformed(format_args!("{blocks} blocks exceed the limit of {MAX_BLOCKS}")))
        }
        false => Ok(()),
    }
}

fn read_own_words(reader: &mut MsgpackReader<'_>) -> msgpack::Result<OwnWords> {
    let own = OwnWords::read(reader)?;
    check_blocks(reader, own.blocks)?;
    Ok(own)
}

fn message(kind: u8, value: impl FnOnce(&mut MsgpackWriter)) -> Result<Vec<u8>> {
    let mut writer = MsgpackWriter::default();
    writer.raw(&[kind]);
    value(&mut writer);
    let bytes = writer.into_bytes();
    match bytes.len() <= MAX_MESSAGE {
        true => Ok(bytes),
        false => Err(ErrorKind::Exhausted.because(format!(
            "a message of {} bytes between an engine and its rank exceeds the limit of \
             {MAX_MESSAGE}",
            bytes.len()
        ))),
    }
}

fn parts<'a>(what: &str, bytes: &'a [u8]) -> Result<(u8, &'a [u8])> {
    match bytes.split_first() {
        Some((kind, body)) => Ok((*kind, body)),
        None => Err(ErrorKind::Malformed.because(format!("malformed {what}: it is empty"))),
    }
}
