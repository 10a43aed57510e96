//! The request of a handshake: for the metadata of one worker.

use kvx_core::{ErrorKind, Result};

use crate::Version;
use crate::ids::WorkerRank;
use crate::msgpack::{self, MsgpackReader, MsgpackWriter};

const TAG: &[u8] = b"get_meta_msg";

/// A decode worker's request to a side channel for the metadata of one worker of the engine.
///
/// ```
/// use kvx_vllm::Version;
/// use kvx_vllm::engine::WorkerRank;
/// use kvx_vllm::wire::HandshakeRequest;
/// let request = HandshakeRequest::new(WorkerRank { pp: 0, tp: 1 }, Version::V0_33)?;
/// assert_eq!(request.encode(), *b"\x93\xc4\x0cget_meta_msg\x00\x01");
/// assert_eq!(HandshakeRequest::decode(&request.encode())?, request);
/// # Ok::<(), kvx_core::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HandshakeRequest {
    rank: WorkerRank,
    pipeline_aware: bool,
}

impl HandshakeRequest {
    /// The longest request that is read, in bytes. The longest that is written has 29.
    pub const MAX_LEN: usize = 64;

    /// Creates the request for `rank`, in the form of a listener of `version`.
    ///
    /// # Errors
    ///
    /// A pipeline rank other than 0 for a version whose requests have none.
    pub fn new(rank: WorkerRank, version: Version) -> Result<Self> {
        let pipeline_aware = version.asks_for_pipeline_rank();
        if rank.pp != 0 && !pipeline_aware {
            return Err(ErrorKind::Unsupported.because(format!(
                "{version} has no handshake for pipeline rank {}: it supports stage 0 only",
                rank.pp
            )));
        }
        Ok(HandshakeRequest { rank, pipeline_aware })
    }

    /// Returns the requested worker.
    pub fn rank(&self) -> WorkerRank {
        self.rank
    }

    /// Returns whether the request names a pipeline rank, as since vLLM 0.26. The answer then
    /// contains the listener's clock.
    pub fn pipeline_aware(&self) -> bool {
        self.pipeline_aware
    }

    /// Encodes the request.
    pub fn encode(&self) -> Vec<u8> {
        self.encode_after(TAG)
    }

    /// Encodes the request with this first item.
    pub(super) fn encode_after(&self, first: &[u8]) -> Vec<u8> {
        let mut writer = MsgpackWriter::default();
        writer.array(if self.pipeline_aware { 3 } else { 2 });
        writer.binary(first);
        if self.pipeline_aware {
            writer.unsigned(self.rank.pp.into());
        }
        writer.unsigned(self.rank.tp.into());
        writer.into_bytes()
    }

    /// Decodes a request of either form. The tag may be bytes or a string.
    ///
    /// # Errors
    ///
    /// Any other bytes, with a reason for the peer.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        if bytes == TAG {
            return Err(ErrorKind::Unsupported.because(
                "the request is from vLLM 0.11.0 or older, which has no ranks; kvx supports 0.16 \
                 and later: upgrade it",
            ));
        }
        let check_tag = |reader: &MsgpackReader<'_>, tag: &[u8]| match tag {
            TAG => Ok(()),
            _ => {
                let found = tag.escape_ascii();
                Err(reader.malformed(format_args!("expected get_meta_msg, found \"{found}\"")))
            }
        };
        let (request, ()) =
            Self::decode_after("handshake request", bytes, Self::MAX_LEN, check_tag)?;
        Ok(request)
    }

    /// Decodes a request of either form, whose first item `read` reads.
    pub(super) fn decode_after<'a, T>(
        what: &'static str,
        bytes: &'a [u8],
        max: usize,
        read: impl FnOnce(&MsgpackReader<'a>, &'a [u8]) -> msgpack::Result<T>,
    ) -> msgpack::Result<(Self, T)> {
        let mut reader = MsgpackReader::new(what, bytes, max)?;
        let fields = reader.array(3)?;
        if fields < 2 {
            return Err(reader.malformed(format_args!("expected 2 or 3 items, found {fields}")));
        }
        let first = reader.binary_or_text()?;
        let first = read(&reader, first)?;
        let pipeline_aware = fields == 3;
        let pp = if pipeline_aware { reader.unsigned_32()? } else { 0 };
        let tp = reader.unsigned_32()?;
        reader.end()?;
        Ok((HandshakeRequest { rank: WorkerRank { pp, tp }, pipeline_aware }, first))
    }
}
