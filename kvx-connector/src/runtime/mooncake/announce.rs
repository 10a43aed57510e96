//! Workers of a prefill announce where they listen, again and again: a bootstrap server that was
//! restarted knows them again, and one that they have left forgets them.

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

/// A worker that has not announced itself for this long is dead.
const TTL: Duration = Duration::from_secs(30);
/// Workers announce themselves this often.
const EVERY: Duration = Duration::from_secs(5);
/// A registration that failed is tried again after this, and then after longer and longer, up to
/// [`EVERY`].
const FIRST_RETRY: Duration = Duration::from_secs(1);

/// A worker has registered its caches: from now on decodes find it.
pub(in super::super) fn announce(
    channels: &Channels,
    shared: &Arc<Shared>,
    rank: WorkerRank,
) -> Result<()> {
    let settings = &shared.setup.settings;
    if shared.is_older_mooncake() {
        return Ok(()); // decodes are told by the answer of each prefill leg
    }
    let router = channels.routers.iter().find(|(of, _)| *of == rank).map(|(_, router)| router);
    let Some(router) = router else { return Ok(()) }; // a decode has none
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
        // At once: whoever was told of this engine may ask now.
        own.register(registration.clone())?;
    }
    let own = channels.bootstrap.as_ref().map(Arc::downgrade);
    let task = shared.runtime.spawn(repeat(Arc::clone(shared), own, registration)).abort_handle();
    if let Some(before) = channels.announcements.lock().insert(rank, task) {
        before.abort();
    }
    Ok(())
}

/// Says where a worker listens for as long as it does.
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
                // One that hangs leaves time for others before it is taken for dead.
                let limit = mooncake.connect_timeout.min(TTL / 3);
                client::register(address, &registration, shared.secret.as_ref(), limit).await
            }
        };
        let wait = match said {
            Ok(()) => {
                if !known {
                    tracing::info!(?registration.rank, "registered at the bootstrap server again");
                }
                (retry, known) = (FIRST_RETRY, true);
                EVERY
            }
            Err(error) => {
                if std::mem::take(&mut known) {
                    tracing::warn!(%error, "not registered at the bootstrap server; it is tried again and again");
                }
                let longer = (retry * 2).min(EVERY);
                std::mem::replace(&mut retry, longer)
            }
        };
        tokio::time::sleep(wait).await;
    }
}

/// What a worker with these caches tells of itself when it asks for blocks.
pub(in super::super) fn own_request(
    shared: &Shared,
    rank: WorkerRank,
    own: &RegisteredCaches,
) -> Result<PullRequest> {
    let settings = &shared.setup.settings;
    let mut metadata = kvx_core::backend::Metadata::decode(&own.agent.metadata()?)?;
    // No name of an engine: this is told to kvx, which reaches the agent by what follows.
    let mut told = PullRequest::new(
        format!("kvx-{}", metadata.identity.incarnation),
        1,
        settings.tp_size,
        rank.tp,
    );
    told.remote_pp_size = settings.pp_size;
    tell_layout(&own.caches, &mut told)?;
    // Odd, as vLLM's are.
    told.layout_id = (kvx_core::backend::random_number()? >> 1) | 1;
    told.kvx_block_size = Some(settings.block_size);
    // What is written to is granted for each request.
    metadata.regions.clear();
    told.kvx_metadata = Some(metadata.encode()?);
    Ok(told)
}
