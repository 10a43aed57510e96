//! The frames of messages: publications, and replays.

use crate::{DecodeError, DecodeErrorKind};

type Result<T> = std::result::Result<T, DecodeError>;

/// The number that ends a replay: -1.
const END: [u8; 8] = [0xff; 8];

fn malformed(why: &str) -> DecodeError {
    DecodeError::new(DecodeErrorKind::Malformed, format!("malformed KV event message: {why}"))
}

/// A message of a publisher.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Publication<'a> {
    /// Its number. Numbers begin with 0 at each start of the publisher.
    pub sequence: u64,
    /// An encoded [`EventBatch`](super::EventBatch).
    pub batch: &'a [u8],
}

/// An answer to a [`replay_request`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplayAnswer<'a> {
    /// An earlier publication.
    Publication(Publication<'a>),
    /// All that the publisher has kept was sent.
    End,
}

fn number(frame: &[u8]) -> Result<[u8; 8]> {
    frame.try_into().map_err(|_| malformed("a number does not have 8 bytes"))
}

/// Reads the frames of a publication: topic, number and batch.
///
/// # Errors
///
/// `Malformed`.
pub fn publication(frames: &[Vec<u8>]) -> Result<Publication<'_>> {
    let [_, sequence, batch] = frames else {
        return Err(malformed("a publication does not have 3 frames"));
    };
    match number(sequence)? {
        END => Err(malformed("a publication has the number that ends a replay")),
        sequence => Ok(Publication { sequence: u64::from_be_bytes(sequence), batch }),
    }
}

/// Reads the frames that a DEALER gets: an empty one, the topic (vLLM 0.26 and later), number and
/// batch.
///
/// # Errors
///
/// `Malformed`.
pub fn replay_answer(frames: &[Vec<u8>]) -> Result<ReplayAnswer<'_>> {
    let [delimiter, .., sequence, batch] = frames else {
        return Err(malformed("an answer to a replay does not have 3 or 4 frames"));
    };
    if frames.len() > 4 || !delimiter.is_empty() {
        return Err(malformed("an answer to a replay does not have 3 or 4 frames"));
    }
    Ok(match number(sequence)? {
        END => ReplayAnswer::End,
        sequence => {
            let sequence = u64::from_be_bytes(sequence);
            ReplayAnswer::Publication(Publication { sequence, batch })
        }
    })
}

/// Returns the frames with which a DEALER asks for all publications from this number on.
pub fn replay_request(from: u64) -> [Vec<u8>; 2] {
    [Vec::new(), from.to_be_bytes().to_vec()]
}

/// Returns the frames that end a replay, after those that address the peer.
pub fn replay_end(topic: &str) -> [Vec<u8>; 4] {
    [Vec::new(), topic.into(), END.to_vec(), Vec::new()]
}
