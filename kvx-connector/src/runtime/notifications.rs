//! Notifications from peers to the workers of this process.

use std::sync::Arc;
use std::time::Duration;

use kvx_core::{Agent, ErrorKind, Result};

use super::refusal_log::RefusalLog;
use super::shared::Shared;
use kvx_vllm::engine::WorkerRank;
use kvx_vllm::wire::EngineNotification;
use kvx_vllm::wire::nixl::{Assembly, Got};

/// The longest wait for a notification. The task then waits again.
const LONG: Duration = Duration::from_secs(3600);

/// Decodes a peer's notification and reports it to the worker. Decoding comes before the lock,
/// because a notification may be long.
fn report(shared: &Shared, rank: WorkerRank, from: &str, bytes: &[u8]) -> Result<()> {
    let notification = EngineNotification::decode(bytes)?;
    let mut taken = Ok(());
    shared.report_nixl(rank, |worker, now| taken = worker.notified(now, from, notification));
    taken
}

/// Receives the notifications to a worker until its agent ends.
pub(super) async fn receive(shared: Arc<Shared>, rank: WorkerRank, agent: Agent) {
    let log = RefusalLog::default();
    let mut parts = Assembly::default();
    loop {
        // Yield, so that a peer that sends without end does not starve other tasks of this thread.
        tokio::task::coop::consume_budget().await;
        match agent.notification(LONG).await {
            Ok(notification) => {
                let from = format!("{:?}", notification.from);
                let heard = match parts.take(notification.from.incarnation, &notification.bytes) {
                    Got::Part => continue,
                    Got::Whole(bytes) => report(&shared, rank, &from, &bytes),
                    Got::Nonsense => report(&shared, rank, &from, &notification.bytes),
                    Got::Instead(bytes) => Err(ErrorKind::Exhausted.because(format!(
                        "an incomplete one, of which {bytes} bytes had arrived, was dropped to \
                         make space for this one"
                    ))),
                };
                let Err(error) = heard else { continue };
                if let Some(suppressed) = log.count() {
                    tracing::warn!(%from, %error, suppressed, "a notification was refused");
                }
            }
            Err(error) if error.kind() == ErrorKind::TimedOut => {}
            Err(_) => return,
        }
    }
}
