//! Watches the instances: their health, their models, and the recipe that each needs.

use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::Instant;

use super::bootstrap::{QueryFault, query};
use super::instance::{Instance, PrefillKind, Reason, Role};
use crate::relay::core::{Core, LiveSetup};
use crate::setup::PoolConnector;
use crate::upstream::Fault;

/// Checks all instances periodically; never returns.
pub(crate) async fn watch(core: Arc<Core>) {
    let mut models_at = Instant::now();
    loop {
        let live = core.live();
        let models = Instant::now() >= models_at;
        if models {
            models_at = Instant::now() + live.setup.health.models_every;
        }
        round(&core, &live, if models { WatchScope::Everything } else { WatchScope::Health }).await;
        let every = live.setup.health.every;
        tokio::select! {
            () = tokio::time::sleep(every) => {}
            // Something changed or failed: check soon, but not after every single failure.
            () = async {
                core.look.notified().await;
                tokio::time::sleep(every.min(Duration::from_secs(1))).await;
            } => {}
        }
    }
}

/// Checks new instances as they appear; never returns.
pub(crate) async fn greet(core: Arc<Core>) {
    loop {
        core.newcomers.notified().await;
        round(&core, &core.live(), WatchScope::Newcomers).await;
    }
}

/// The instances that a round checks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WatchScope {
    /// All instances: health, models and kind.
    Everything,
    /// All instances: health only.
    Health,
    /// Instances that were never checked, or may have been replaced: health, models and kind.
    Newcomers,
}

/// Checks the instances in scope once, all concurrently.
pub(crate) async fn round(core: &Arc<Core>, live: &Arc<LiveSetup>, look: WatchScope) {
    let models = look != WatchScope::Health;
    let mut checks = JoinSet::new();
    let is_new = |one: &&Arc<Instance>| !one.state.is_checked() || one.state.is_stale();
    for instance in live.fleet.all().filter(|one| look != WatchScope::Newcomers || is_new(one)) {
        let (core, live, instance) = (Arc::clone(core), Arc::clone(live), Arc::clone(instance));
        checks.spawn(async move { check(&core, &live, &instance, models).await });
    }
    while checks.join_next().await.is_some() {}
}

async fn check(core: &Core, live: &LiveSetup, instance: &Instance, models: bool) {
    let timeout = live.setup.health.timeout;
    let well = match live
        .upstream
        .get_json(&instance.setup, "/health", live.headers_for_instances(), timeout)
        .await
    {
        Ok((status, _)) if !status.is_server_error() => Ok(()),
        Ok((status, _)) => Err((format!("GET /health answered {}", status.as_u16()), false)),
        Err(fault) => Err((format!("GET /health: {fault}"), fault.is_late())),
    };
    let well = match well {
        Ok(()) => {
            let (fresh, stale) = (instance.state.is_down(), instance.state.take_stale());
            let models = models || stale;
            if fresh || models {
                learn_models(live, instance).await;
            }
            // Mooncake's ranks get new ids at each start: query them every time; the answer is
            // small.
            let mooncake = matches!(instance.state.kind(), PrefillKind::Mooncake(_));
            let asks = instance.role == Role::Prefill && (fresh || models || mooncake);
            match asks {
                true => {
                    let learned = learn_kind(live, instance).await;
                    learned.map(drop).map_err(|fault| (fault.to_string(), fault.is_late()))
                }
                false => Ok(()),
            }
        }
        ill => ill,
    };
    match well {
        Ok(()) => {
            if instance.state.healthy() {
                let role = instance.role.as_str();
                tracing::info!(instance = instance.name(), role, "an instance is up");
            }
        }
        Err((why, late)) => {
            core.errors.add(instance.name(), &why);
            // An instance that is too busy to answer is better than none.
            if live.fleet.unhealthy(instance, &why, &live.setup.health, late) {
                core.metrics.ejection(Reason::Health.as_str());
                let role = instance.role.as_str();
                tracing::warn!(instance = instance.name(), role, why, "an instance is down");
            }
        }
    }
}

async fn learn_models(live: &LiveSetup, instance: &Instance) {
    let timeout = live.setup.health.timeout;
    let answer = live
        .upstream
        .get_json(&instance.setup, "/v1/models", live.headers_for_instances(), timeout)
        .await;
    if let Ok((status, Some(value))) = answer
        && status.is_success()
    {
        instance.state.models.learn(&value, &live.fleet.names);
    }
}

/// Determines the kind of a prefill instance. Queries its bootstrap server, unless the pool's
/// connector is a NIXL one.
pub(crate) async fn learn_kind(
    live: &LiveSetup,
    instance: &Instance,
) -> Result<PrefillKind, Fault> {
    let connector = live.fleet.pools[instance.pool].connector;
    let known = instance.state.kind();
    let kind = match connector {
        PoolConnector::Nixl | PoolConnector::NixlPull | PoolConnector::NixlPush => {
            PrefillKind::Nixl
        }
        PoolConnector::Mooncake => PrefillKind::Mooncake(query(live, instance).await?),
        PoolConnector::Auto => match query(live, instance).await {
            Ok(targets) => PrefillKind::Mooncake(targets),
            Err(QueryFault::Denied(fault)) => return Err(fault),
            // A known Mooncake instance has only failed to answer.
            Err(QueryFault::Failed(fault))
                if instance.setup.bootstrap_port.is_some() || instance.state.was_mooncake() =>
            {
                return Err(fault);
            }
            Err(_) => PrefillKind::Nixl,
        },
    };
    // A NIXL instance that pushes has shown so in an earlier answer.
    let kind = match (kind, known) {
        (PrefillKind::Nixl, push @ PrefillKind::Push(_))
            if connector != PoolConnector::NixlPull =>
        {
            push
        }
        (kind, _) => kind,
    };
    instance.state.set_kind(kind.clone());
    Ok(kind)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_known_mooncake_instance_stays_one() {
        // No server listens there.
        let text = "[[pool]]\nprefill = [{ url = 'http://127.77.0.1:1', bootstrap_port = 2 }, 'http://127.77.0.2:1']";
        let live = LiveSetup::new(crate::Setup::from_toml(text).unwrap(), None).unwrap();
        let [named, open] = &live.fleet.prefill[..] else { panic!("two instances") };
        assert!(learn_kind(&live, named).await.is_err());
        assert_eq!(learn_kind(&live, open).await.unwrap(), PrefillKind::Nixl);
        open.state.set_kind(PrefillKind::Mooncake(Vec::new()));
        open.state.forget_ranks();
        assert!(learn_kind(&live, open).await.is_err());
    }
}
