//! The request and the two answers of the MooncakeConnector before vLLM 0.16.
//!
//! A decode worker's REQ socket asks the prefill worker for several requests at once and gets one
//! answer: all of them are written, or not. The request does not describe the decode side's layout,
//! since both sides have the same layout.

use std::collections::BTreeSet;

use kvx_core::{ErrorKind, Result};

use super::{PullRequest, PulledRequest};
use crate::msgpack::MsgpackReader;
use crate::wire::record::{Record as _, RecordFields, Shape, record};

const WHAT: &str = "pull request of vLLM before 0.16";

/// The request of a decode worker to a prefill worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OlderPullRequest {
    /// The host of the decode worker's Mooncake engine.
    pub remote_hostname: String,
    /// The port of the decode worker's Mooncake engine.
    pub remote_port: u16,
    /// The requests that are asked for, by the names that both sides use.
    pub request_ids: Vec<String>,
    /// The start of each region of the decode worker.
    pub kv_caches_base_addr: Vec<u64>,
    /// The decode side's blocks for each request. An empty list tells the prefill side to release
    /// its blocks.
    pub block_ids: Vec<Vec<u32>>,
    /// The current form of the request. kvx sends it only to kvx, which answers in the current
    /// form. The lists of addresses and blocks are then empty, which vLLM rejects.
    pub kvx_question: Option<Vec<u8>>,
    shape: Shape,
}

/// The answer of a prefill worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OlderAnswer {
    /// All requested blocks are written or released.
    Done,
    /// Not all requested blocks are written or released.
    Failed,
}

impl OlderPullRequest {
    /// Creates the request to a plain Mooncake agent, with the blocks to write into.
    ///
    /// # Errors
    ///
    /// `Unsupported` for blocks of several KV cache groups: a request has one list.
    pub fn plain(question: &PullRequest) -> Result<Self> {
        let one_list = |wanted: &PulledRequest| match &wanted.block_ids[..] {
            [] => Ok(Vec::new()),
            [blocks] => Ok(blocks.clone()),
            several => Err(ErrorKind::Unsupported.because(format!(
                "the MooncakeConnector before vLLM 0.16 supports one KV cache group, but request \
                 {} has {}: set kv_compat to 0.16 or later on both sides",
                wanted.request_id,
                several.len()
            ))),
        };
        Ok(OlderPullRequest {
            kv_caches_base_addr: question.kv_caches_base_addr.clone(),
            block_ids: question.req_blocks.iter().map(one_list).collect::<Result<_>>()?,
            ..Self::naming(question)
        })
    }

    /// Creates the request to a kvx engine, in the current form.
    pub fn to_kvx(question: &PullRequest) -> Self {
        OlderPullRequest { kvx_question: Some(question.encode()), ..Self::naming(question) }
    }

    fn naming(question: &PullRequest) -> Self {
        OlderPullRequest {
            remote_hostname: question.remote_hostname.clone(),
            remote_port: question.remote_port,
            request_ids: question
                .req_blocks
                .iter()
                .map(|wanted| wanted.transfer_id.clone())
                .collect(),
            kv_caches_base_addr: Vec::new(),
            block_ids: Vec::new(),
            kvx_question: None,
            shape: Shape::default(),
        }
    }

    /// Converts the request of a plain Mooncake agent to the current form, with the layout of this
    /// worker: the agent has the same layout.
    ///
    /// # Errors
    ///
    /// `Malformed` for lists that do not match each other and duplicate requests; `Incompatible`
    /// for a different number of regions.
    pub fn as_pull_request(self, own: &PullRequest) -> Result<PullRequest> {
        let malformed =
            |why: String| ErrorKind::Malformed.because(format!("malformed {WHAT}: {why}"));
        let (requests, lists) = (self.request_ids.len(), self.block_ids.len());
        if requests != lists {
            return Err(malformed(format!(
                "{requests} request_ids but {lists} lists of block_ids"
            )));
        }
        let distinct: BTreeSet<_> = self.request_ids.iter().collect();
        if distinct.len() != requests {
            return Err(malformed("request_ids has a duplicate".into()));
        }
        let (here, there) = (own.kv_caches_base_addr.len(), self.kv_caches_base_addr.len());
        if here != there && self.block_ids.iter().any(|blocks| !blocks.is_empty()) {
            return Err(ErrorKind::Incompatible.because(format!(
                "{here} regions at the prefill but {there} at the decode: the MooncakeConnector \
                 before vLLM 0.16 needs the same layout and the same tensor-parallel size on \
                 both sides"
            )));
        }
        let pulled = |(request, blocks): (String, Vec<u32>)| PulledRequest {
            transfer_id: request.clone(),
            request_id: request,
            block_ids: if blocks.is_empty() { Vec::new() } else { vec![blocks] },
        };
        let mut question = own.of_worker();
        (question.remote_hostname, question.remote_port) = (self.remote_hostname, self.remote_port);
        question.kv_caches_base_addr = self.kv_caches_base_addr;
        question.req_blocks =
            self.request_ids.into_iter().zip(self.block_ids).map(pulled).collect();
        (question.kvx_metadata, question.kvx_block_size) = (None, None);
        Ok(question)
    }

    /// Encodes the message.
    pub fn encode(&self) -> Vec<u8> {
        self.encode_map()
    }

    /// Decodes a message. Does not check that its lists match each other.
    ///
    /// # Errors
    ///
    /// Malformed bytes; the error names a missing key.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let fields = RecordFields::read(WHAT, bytes, PullRequest::MAX_LEN, Self::KEYS)?;
        let blocks = |reader: &mut MsgpackReader<'_>| {
            reader.list(PullRequest::MAX_BLOCKS, MsgpackReader::unsigned_32)
        };
        Ok(OlderPullRequest {
            remote_hostname: fields.required("remote_hostname", MsgpackReader::owned_text)?,
            remote_port: fields.required("remote_port", MsgpackReader::port)?,
            request_ids: fields.required("request_ids", |reader| {
                reader.list(PullRequest::MAX_ITEMS, MsgpackReader::owned_text)
            })?,
            kv_caches_base_addr: fields.required("kv_caches_base_addr", |reader| {
                reader.list(PullRequest::MAX_ITEMS, MsgpackReader::unsigned)
            })?,
            block_ids: fields
                .required("block_ids", |reader| reader.list(PullRequest::MAX_ITEMS, blocks))?,
            kvx_question: fields.nullable("kvx_question", MsgpackReader::owned_binary)?,
            shape: fields.shape(),
        })
    }
}

record! {
    OlderPullRequest as request:
    "remote_hostname" => remote_hostname,
    "remote_port" => remote_port,
    "request_ids" => request_ids,
    "kv_caches_base_addr" => kv_caches_base_addr,
    "block_ids" => block_ids,
    "kvx_question" => kvx_question or None,
}

impl OlderAnswer {
    /// Encodes the answer.
    pub fn encode(self) -> &'static [u8] {
        match self {
            OlderAnswer::Done => b"trans_done",
            OlderAnswer::Failed => b"trans_error",
        }
    }

    /// Decodes an answer.
    ///
    /// # Errors
    ///
    /// `Malformed`: neither of the two answers.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let is = |answer: &OlderAnswer| bytes == answer.encode();
        [OlderAnswer::Done, OlderAnswer::Failed].into_iter().find(is).ok_or_else(|| {
            let sentence = format!(
                "malformed answer of {} bytes: neither trans_done nor trans_error",
                bytes.len()
            );
            ErrorKind::Malformed.because(sentence)
        })
    }
}
