//! Workers of a prefill announce repeatedly where they listen. A restarted bootstrap server thus
//! learns of them again, and a running one forgets workers that have stopped.

use std::sync::{Arc, Weak};
use std::time::Duration;

use kvx_core::Result;

use super::super::caches::RegisteredCaches;
use super::super::shared::Shared;
use super::bootstrap::BootstrapServer;
use super::channels::Channels;
use super::client;
use kvx_vllm::engine::WorkerRank;
use kvx_vllm::mapping::tell_layout;
use kvx_vllm::wire::mooncake::{PullRequest, WorkerRegistration};

/// The time after which a worker that has not announced itself counts as dead.
const TTL: Duration = Duration::from_secs(30);
/// The interval between announcements of a worker.
const EVERY: Duration = Duration::from_secs(5);
/// The delay after a registration that failed. It doubles with each further failure, up to
/// [`EVERY`].
const FIRST_RETRY: Duration = Duration::from_secs(1);

/// Announces a worker that has registered its caches, so that decodes find it.
pub(in super::super) fn announce(
    channels: &Channels,
    shared: &Arc<Shared>,
    rank: WorkerRank,
) -> Result<()> {
    let settings = &shared.setup.settings;
    if shared.is_older_mooncake() {
        return Ok(()); // the answer of each prefill leg tells decodes
    }
    let router = channels.routers.iter().find(|(of, _)| *of == rank).map(|(_, router)| router);
    let Some(router) = router else { return Ok(()) }; // a decode has no router
    let host = if channels.host.contains(':') {
        format!("[{}]", channels.host)
    } else {
        channels.host.to_string()
    };
    let registration = WorkerRegistration {
        engine_id: settings.engine.as_str().to_owned(),
        dp_rank: shared.setup.data_parallel,
        rank,
        addr: format!("tcp://{host}:{}", router.local().port()),
        kvx_ttl: Some(TTL.as_secs() as u32),
    };
    if let Some(own) = &channels.bootstrap {
        // At once, because a decode that knows this engine may ask now.
        own.register(registration.clone())?;
    }
    let own = channels.bootstrap.as_ref().map(Arc::downgrade);
    let task = shared.runtime.spawn(repeat(Arc::clone(shared), own, registration)).abort_handle();
    if let Some(before) = channels.announcements.lock().insert(rank, task) {
        before.abort();
    }
    Ok(())
}

/// Announces a worker for as long as it listens.
async fn repeat(
    shared: Arc<Shared>,
    own: Option<Weak<BootstrapServer>>,
    registration: WorkerRegistration,
) {
    let Some(mooncake) = &shared.setup.settings.mooncake else {
        debug_assert!(false, "only workers of a MooncakeConnector are announced");
        return;
    };
    let (mut retry, mut known) = (FIRST_RETRY, true);
    while !shared.is_closed() {
        let said = match &own {
            Some(own) => match own.upgrade() {
                Some(own) => own.register(registration.clone()),
                None => return,
            },
            None => {
                let address = &shared.setup.settings.address;
                // One attempt that hangs leaves time for another before the worker counts as dead.
                let limit = mooncake.connect_timeout.min(TTL / 3);
                client::register(address, &registration, shared.secret.as_ref(), limit).await
            }
        };
        let wait = match said {
            Ok(()) => {
                if !known {
                    tracing::info!(
                        ?registration.rank,
                        "registered with the bootstrap server again"
                    );
                }
                (retry, known) = (FIRST_RETRY, true);
                EVERY
            }
            Err(error) => {
                if std::mem::take(&mut known) {
                    tracing::warn!(
                        %error,
                        "the bootstrap server did not accept the registration; retrying"
                    );
                }
                let longer = (retry * 2).min(EVERY);
                std::mem::replace(&mut retry, longer)
            }
        };
        tokio::time::sleep(wait).await;
    }
}

/// Returns a worker's description of its caches for questions to prefills.
pub(in super::super) fn own_request(
    shared: &Shared,
    rank: WorkerRank,
    own: &RegisteredCaches,
) -> Result<PullRequest> {
    let settings = &shared.setup.settings;
    let mut metadata = kvx_core::backend::Metadata::decode(&own.agent.metadata()?)?;
    // Contains no name of a Mooncake engine, because kvx prefills connect to the agent in
    // `kvx_metadata`.
    let mut told = PullRequest::new(
        format!("kvx-{}", metadata.identity.incarnation),
        1,
        settings.tp_size,
        rank.tp,
    );
    told.remote_pp_size = settings.pp_size;
    tell_layout(&own.caches, &mut told)?;
    // The number is odd, like vLLM's.
    told.layout_id = (kvx_core::backend::random_number()? >> 1) | 1;
    told.kvx_block_size = Some(settings.block_size);
    // The regions are left out, because each request grants its own.
    metadata.regions.clear();
    told.kvx_metadata = Some(metadata.encode()?);
    Ok(told)
}
