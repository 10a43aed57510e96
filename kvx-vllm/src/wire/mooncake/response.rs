//! The answers of the prefill side, several for one request.

use kvx_core::Result;

use crate::msgpack::{MsgpackReader, MsgpackValue, MsgpackWriter};
use crate::wire::record::{Record as _, RecordFields, Shape, record};

const WHAT: &str = "pull response";

/// The state of a pull.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum PullStatus {
    /// The pull is complete: this is the last answer.
    Finish = 0,
    /// More answers follow.
    Continue = 1,
    /// The pull has failed, for the reason in `err_msg`.
    Error = 2,
    /// The prefill worker does not know the layout: send the request again with it.
    LayoutMiss = 3,
}

/// `MooncakeXferResponse`: a prefill worker's answer about requested requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PullResponse {
    /// The state of the pull.
    pub status: PullStatus,
    /// Requests whose blocks are written, by their ids on the decode side.
    pub ok_reqs: Option<Vec<String>>,
    /// Requests that have failed, by their ids on the decode side.
    pub err_reqs: Option<Vec<String>>,
    /// The reason of the failure.
    pub err_msg: Option<String>,
    /// The layout that the prefill worker now knows; 0 if it does not report one.
    pub layout_id: u64,
    /// True if no writes for the failed requests can follow. kvx only: Mooncake may continue to
    /// write after its error.
    pub kvx_settled: bool,
    shape: Shape,
}

impl PullResponse {
    /// The longest answer that is read, in bytes.
    pub const MAX_LEN: usize = 16 << 20;
    /// The most requests that are read.
    pub const MAX_REQUESTS: usize = 1 << 16;

    /// Creates an answer that names no request.
    pub fn new(status: PullStatus) -> Self {
        PullResponse {
            status,
            ok_reqs: None,
            err_reqs: None,
            err_msg: None,
            layout_id: 0,
            kvx_settled: false,
            shape: Shape::default(),
        }
    }

    /// Encodes the message.
    pub fn encode(&self) -> Vec<u8> {
        self.encode_map()
    }

    /// Decodes a message.
    ///
    /// # Errors
    ///
    /// Malformed bytes, or an unknown status.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let fields = RecordFields::read(WHAT, bytes, Self::MAX_LEN, Self::KEYS)?;
        let ids = |reader: &mut MsgpackReader<'_>| {
            reader.list(Self::MAX_REQUESTS, MsgpackReader::owned_text)
        };
        Ok(PullResponse {
            status: fields.required("status", |reader| match reader.unsigned()? {
                0 => Ok(PullStatus::Finish),
                1 => Ok(PullStatus::Continue),
                2 => Ok(PullStatus::Error),
                3 => Ok(PullStatus::LayoutMiss),
                other => Err(reader.malformed(format_args!("unknown status {other}"))),
            })?,
            ok_reqs: fields.nullable("ok_reqs", ids)?,
            err_reqs: fields.nullable("err_reqs", ids)?,
            err_msg: fields.nullable("err_msg", MsgpackReader::owned_text)?,
            layout_id: fields.or_default("layout_id", MsgpackReader::unsigned)?,
            kvx_settled: fields.optional("kvx_settled", MsgpackReader::unsigned)? == Some(1),
            shape: fields.shape(),
        })
    }
}

record! {
    PullResponse as response:
    "status" => status,
    "ok_reqs" => ok_reqs or None,
    "err_reqs" => err_reqs or None,
    "err_msg" => err_msg or None,
    "layout_id" => layout_id or 0,
    "kvx_settled" => kvx_settled or false,
}

impl MsgpackValue for PullStatus {
    fn write_to(&self, writer: &mut MsgpackWriter) {
        writer.unsigned(*self as u64);
    }
}
