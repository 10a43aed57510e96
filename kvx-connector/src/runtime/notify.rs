//! Notifications to workers of peers.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kvx_core::{ErrorKind, Peer, Result};

use super::shared::Shared;
use super::trace::Phase;
use kvx_vllm::engine::{Connection, RequestId, WorkerRank};
use kvx_vllm::wire::nixl::{MAX_NOTE, notes};

/// The time limit for a notification.
pub(super) const LIMIT: Duration = Duration::from_secs(10);

/// Answers [`Action::Notify`](kvx_vllm::engine::Action::Notify).
pub(super) async fn run(
    shared: Arc<Shared>,
    rank: WorkerRank,
    (connection, at): (Connection, WorkerRank),
    request: Option<RequestId>,
    bytes: Arc<[u8]>,
) {
    let began = Instant::now();
    let sent = async {
        let link = shared.link(rank, connection)?;
        send(&link.worker(at)?.peer, &bytes, LIMIT).await
    };
    let sent = sent.await;
    Phase::Notify.took(began.elapsed());
    if let Err(error) = sent {
        shared.report_nixl(rank, |worker, now| {
            worker.notification_failed(now, request.as_ref(), at, error.to_string());
        });
    }
}

/// Sends a notification of any length. Long ones go in parts, if a transport of kvx carries them.
pub(super) async fn send(peer: &Peer, bytes: &[u8], limit: Duration) -> Result<()> {
    static LAST: AtomicU64 = AtomicU64::new(0);
    let too_long = || {
        let why = format!("{} bytes of a notification, at most {MAX_NOTE} are sent", bytes.len());
        ErrorKind::Exhausted.because(why)
    };
    let number = LAST.fetch_add(1, Ordering::Relaxed);
    for note in notes(number, bytes).ok_or_else(too_long)? {
        peer.notify(note, limit).await?;
    }
    Ok(())
}
