//! Describes a configuration, and finds what would not work with it now.

use std::sync::Arc;

use crate::discovery::{Reconciler, providers};
use crate::fleet::Fleet;
use crate::fleet::instance::{Instance, PrefillKind, Role};
use crate::fleet::watch;
use crate::log::AccessLogger;
use crate::recording::writer::Recorder;
use crate::relay::core::{Core, LiveSetup};
use crate::serve;
use crate::setup::{Finding, PoolConnector, Setup};

/// Returns the [findings](Setup::findings). Also checks that the address can be bound, that DNS
/// answers, and that the instances do. Serves no requests.
pub async fn check(setup: Setup) -> Vec<Finding> {
    let mut found = setup.findings();
    // The listener closes at once: only a failure matters.
    if let Err(error) = serve::listen(&setup).await {
        found.push(Finding::Fails(error.to_string()));
    }
    let live = match LiveSetup::new(setup, None) {
        Ok(live) => live,
        Err(error) => {
            let failed = Finding::Fails(error.to_string());
            if !found.contains(&failed) {
                found.push(failed);
            }
            return found;
        }
    };
    let (core, _none_works) = Core::new(live, AccessLogger::off(), Recorder::off());
    let core = Arc::new(core);
    let limit = core.live().setup.discovery.first_limit();
    let mut discovery = Reconciler::new(Arc::clone(&core));
    for (provider, instances) in discovery.first(providers::all, limit).await {
        let refused = core.metrics.discovery.refused_entries(&provider);
        found.push(match instances {
            Ok(0) if refused.is_empty() => Finding::Beware(format!(
                "{provider} finds no instance now: is the name right, and is one ready?"
            )),
            Ok(0) => Finding::Beware(format!("{provider} finds no instance that is valid now")),
            Ok(1) => Finding::Means(format!("{provider} finds 1 instance now")),
            Ok(count) => Finding::Means(format!("{provider} finds {count} instances now")),
            Err(why) => Finding::Fails(format!("{provider}: {why}")),
        });
        found.extend(refused.iter().map(|(reason, count)| {
            Finding::Beware(format!(
                "{provider} has entries that are refused ({reason}: {count}): the router's log \
                 names them and says what to do"
            ))
        }));
    }
    let live = core.live();
    watch::round(&core, &live, watch::WatchScope::Everything).await;
    for one in live.fleet.all() {
        found.push(instance(&live, one).await);
    }
    pairs(&live.fleet, &mut found);
    found
}

async fn instance(live: &LiveSetup, one: &Instance) -> Finding {
    let (role, name) = (one.role.as_str(), one.name());
    if one.state.is_down() {
        let why = one.state.last_fault().unwrap_or_else(|| "it does not answer".to_owned());
        return Finding::Fails(format!("{role} {name}: {why}"));
    }
    let headers = live.headers_for_instances();
    let timeout = live.setup.health.timeout;
    let models = live.upstream.get_json(&one.setup, "/v1/models", headers, timeout).await;
    if let Ok((status, _)) = &models
        && matches!(status.as_u16(), 401 | 403)
    {
        return Finding::Beware(format!(
            "{role} {name} requires a key: set OPENAI_API_KEY; otherwise its models are unknown and clients must send their own key"
        ));
    }
    let models = one.state.models.cards();
    let models = match models.len() {
        0 => "lists no models".to_owned(),
        _ => format!("serves {}", models.keys().cloned().collect::<Vec<_>>().join(", ")),
    };
    let connector = live.fleet.pools[one.pool].connector;
    let recipe = match (one.role, connector, one.state.kind()) {
        (Role::Prefill, PoolConnector::Auto, PrefillKind::Mooncake(ranks)) => {
            format!(
                ", has a Mooncake bootstrap server with {} ranks: MooncakeConnector",
                ranks.len()
            )
        }
        (Role::Prefill, PoolConnector::Auto, _) => {
            ", has no Mooncake bootstrap server: NixlConnector".to_owned()
        }
        _ => String::new(),
    };
    Finding::Means(format!("{role} {name} is up, {models}{recipe}"))
}

/// Reports models that only one side of a pool serves.
fn pairs(fleet: &Fleet, found: &mut Vec<Finding>) {
    for (place, pool) in fleet.pools.iter().enumerate() {
        for (role, other) in [(Role::Prefill, Role::Decode), (Role::Decode, Role::Prefill)] {
            let of = |role| fleet.of(role).iter().filter(move |one| one.pool == place);
            if of(other).next().is_none() {
                continue;
            }
            let mut names: Vec<String> = of(role)
                .flat_map(|one| one.state.models.cards().keys().cloned().collect::<Vec<_>>())
                .collect();
            names.sort();
            names.dedup();
            for name in names {
                let model = fleet.names.named(&name);
                if !of(other).any(|one| one.state.models.serve(model)) {
                    found.push(Finding::Beware(format!(
                        "pool {}: only {} instances serve model {name}: its requests are not disaggregated",
                        pool.name,
                        role.as_str()
                    )));
                }
            }
        }
    }
}
