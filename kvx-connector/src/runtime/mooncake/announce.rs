//! Workers of a prefill say where they listen, and go on saying so: a bootstrap server that was restarted knows them
//! again, and one that they have left forgets them.

use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::Duration;

use kvx_core::Result;
use kvx_core::sync::Mutex;
use tokio::task::AbortHandle;

use super::super::rank::Registered;
use super::super::state::Shared;
use super::bootstrap::BootstrapServer;
use super::{Channels, client};
use crate::engine::WorkerRank;
use crate::mapping::tell_layout;
use crate::wire::mooncake::{PullRequest, WorkerRegistration};

/// Who has not said so again for so long is dead.
const TTL: Duration = Duration::from_secs(30);
/// So often it is said.
const EVERY: Duration = Duration::from_secs(5);
/// A registration that failed is tried again after this, and then after longer and longer, up to [`EVERY`].
const FIRST_RETRY: Duration = Duration::from_secs(1);

/// Those who say so, by worker.
#[derive(Debug, Default)]
pub(in super::super) struct Announced(Mutex<HashMap<WorkerRank, AbortHandle>>);

impl Channels {
    /// A worker has registered its caches: from now on it is found.
    pub(in super::super) fn publish(&self, shared: &Arc<Shared>, rank: WorkerRank) -> Result<()> {
        let settings = &shared.setup.settings;
        if shared.is_older_mooncake() {
            return Ok(()); // decodes are told by the answer of each prefill leg
        }
        let Some(router) =
            self.routers.iter().find(|(of, _)| *of == rank).map(|(_, router)| router)
        else {
            return Ok(());
        };
        let host = if self.host.contains(':') {
            format!("[{}]", self.host)
        } else {
            self.host.to_string()
        };
        let registration = WorkerRegistration {
            engine_id: settings.engine.as_str().to_owned(),
            dp_rank: shared.setup.data_parallel,
            rank,
            addr: format!("tcp://{host}:{}", router.local().port()),
            kvx_ttl: Some(TTL.as_secs() as u32),
        };
        if let Some(own) = &self.bootstrap {
            // At once: whoever was told of this engine may ask now.
            own.register(registration.clone())?;
        }
        let own = self.bootstrap.as_ref().map(Arc::downgrade);
        let saying =
            shared.runtime.spawn(announce(Arc::clone(shared), own, registration)).abort_handle();
        if let Some(before) = shared.mooncake.announced.0.lock().insert(rank, saying) {
            before.abort();
        }
        Ok(())
    }

    /// There is nothing to be had of a worker any more.
    pub(in super::super) fn withdraw(&self, shared: &Shared, rank: WorkerRank) {
        if let Some(saying) = shared.mooncake.announced.0.lock().remove(&rank) {
            saying.abort();
        }
        if let Some(own) = &self.bootstrap {
            own.forget(shared.setup.settings.engine.as_str(), shared.setup.data_parallel, rank);
        }
    }
}

/// Says where a worker listens for as long as it does.
async fn announce(
    shared: Arc<Shared>,
    own: Option<Weak<BootstrapServer>>,
    registration: WorkerRegistration,
) {
    let Some(mooncake) = &shared.setup.settings.mooncake else { return };
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

impl Shared {
    /// What a worker with these caches tells of itself when it asks for blocks.
    pub(in super::super) fn own_description(
        &self,
        rank: WorkerRank,
        own: &Registered,
    ) -> Result<PullRequest> {
        let settings = &self.setup.settings;
        let mut metadata = kvx_core::Metadata::decode(&own.agent.metadata()?)?;
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
        told.layout_id = (kvx_core::random_number()? >> 1) | 1;
        told.kvx_block_size = Some(settings.block_size);
        // What is written to is granted for each request.
        metadata.regions.clear();
        told.kvx_metadata = Some(metadata.encode()?);
        Ok(told)
    }
}
