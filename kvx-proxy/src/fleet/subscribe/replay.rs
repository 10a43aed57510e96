//! Asks a publisher for its earlier batches.

use std::sync::Arc;
use std::time::Duration;

use kvx_vllm::events::{CacheEvent, EventBatch, ReplayAnswer, replay_answer, replay_request};
use kvx_vllm::zmtp::{Budget, Command, Input, SocketType};
use tokio::time::timeout;

use super::{CONNECT, connect};
use crate::error::{Error, Result};
use crate::fleet::knowledge::index::EventIndex;

/// The time for a replay.
const LIMIT: Duration = Duration::from_secs(30);

/// An index that batches have filled from the first one on.
#[derive(Default)]
pub(super) struct ReplayedIndex {
    pub(super) index: EventIndex,
    /// The number after the last batch.
    pub(super) next: u64,
    /// True if batches are missing.
    pub(super) lacks_some: bool,
}

/// A part of a replay.
#[derive(PartialEq)]
enum ReplayPart {
    /// The last one.
    Last,
    /// One after which batches are missing.
    BeforeHole,
}

/// Asks for the batches after those of `so_far`, and applies them. Returns the index also after an
/// error: it may have grown.
pub(super) async fn replay(
    endpoint: (String, u16),
    budget: Arc<Budget>,
    mut so_far: ReplayedIndex,
) -> (ReplayedIndex, Result<()>) {
    let parts = async {
        // Engines before vLLM 0.33 drop batches that this router does not read fast enough. They
        // still have them.
        let part = replay_part(&endpoint, &budget, &mut so_far, true).await?;
        if part == ReplayPart::BeforeHole {
            replay_part(&endpoint, &budget, &mut so_far, false).await?;
        }
        Ok(())
    };
    let result: Result<()> = match timeout(LIMIT, parts).await {
        Ok(result) => result,
        Err(_) => Err(Error::new(format!("it did not end within {LIMIT:?}"))),
    };
    (so_far, result.map_err(|error| Error::new(format!("its replay failed: {error}"))))
}

/// Asks once. Ends before a hole within the answer if `ends_before_hole`.
async fn replay_part(
    endpoint: &(String, u16),
    budget: &Arc<Budget>,
    so_far: &mut ReplayedIndex,
    ends_before_hole: bool,
) -> Result<ReplayPart> {
    let malformed = |error: kvx_vllm::DecodeError| Error::new(error.to_string());
    let mut connection = connect(endpoint, SocketType::Dealer, budget).await?;
    connection.send(&replay_request(so_far.next), CONNECT).await?;
    let mut is_first = true;
    loop {
        let message = match connection.next().await? {
            Some(Input::Message(message)) => message,
            Some(Input::Command(Command::Ping { context })) => {
                connection.command(&Command::Pong { context }, CONNECT).await?;
                continue;
            }
            Some(Input::Command(_)) => continue,
            None => return Err(Error::new("the connection was closed before its end")),
        };
        let answer = replay_answer(message.frames()).map_err(malformed)?;
        let ReplayAnswer::Publication(one) = answer else { return Ok(ReplayPart::Last) };
        let batch = EventBatch::decode(one.batch).map_err(malformed)?;
        // A snapshot begins anew.
        let begins_anew = batch.events.contains(&CacheEvent::Cleared);
        if one.sequence != so_far.next && !begins_anew {
            // The engine does not have those before the first one any more.
            if ends_before_hole && !is_first && one.sequence > so_far.next {
                return Ok(ReplayPart::BeforeHole);
            }
            so_far.lacks_some = true;
            so_far.index.clear();
        }
        if begins_anew {
            so_far.lacks_some = false;
        }
        is_first = false;
        so_far.next = one.sequence.saturating_add(1);
        for event in &batch.events {
            if so_far.index.apply(event).is_err() {
                so_far.lacks_some = true;
                return Err(Error::new("the instance has more blocks than the router keeps"));
            }
        }
        // Other tasks run between batches.
        tokio::task::yield_now().await;
    }
}
