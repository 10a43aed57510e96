//! `/instances`: shows and changes the fleet, for clients with `ADMIN_API_KEY`.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use bytes::Bytes;
use http_body_util::{BodyExt, Limited};
use hyper::header::HeaderMap;
use hyper::{Request, Response, StatusCode};
use serde_json::{Map, Value, json};

use super::keys::Keys;
use crate::fleet::Fleet;
use crate::fleet::instance::{Instance, Origin, PrefillKind, Role};
use crate::fleet::knowledge::CacheKnowledge;
use crate::relay::api_error::{ApiError, json_response};
use crate::relay::core::Core;
use crate::setup::{InstanceSetup, InstanceTable, InstanceTarget};

type AdminAnswer = Result<Response<Body>, ApiError>;

/// Rejects clients without `ADMIN_API_KEY`.
pub(super) fn admitted(core: &Core, headers: &HeaderMap) -> Result<(), ApiError> {
    match &core.live().setup.admin_api_key {
        None => Err(ApiError::client(
            StatusCode::FORBIDDEN,
            "this path is closed: start the proxy with ADMIN_API_KEY in its environment",
        )),
        Some(key) if Keys::one(key.text()).admit_admin(headers) => Ok(()),
        Some(_) => Err(ApiError::client(
            StatusCode::FORBIDDEN,
            "this path needs ADMIN_API_KEY: send it as x-api-key, or as Authorization: Bearer KEY",
        )),
    }
}

fn answer(answer: AdminAnswer) -> Response<Body> {
    answer.unwrap_or_else(|refusal| refusal.response())
}

/// Describes what the router knows about an instance's cache as JSON.
fn describe_cache(cache: &CacheKnowledge) -> Value {
    let (counts, drift) = (cache.counts(), &cache.drift);
    json!({
        "knowledge": cache.level().as_str(),
        "why": cache.why,
        "blocks": cache.blocks(),
        "batches": counts.batches,
        "gaps": counts.gaps,
        "losses": counts.losses,
        "orphans": counts.orphans,
        "ignored": counts.ignored,
        "drifts": counts.drifts,
        "predicted_tokens": drift.predicted,
        "reported_tokens": drift.reported,
    })
}

/// Describes an instance as JSON.
pub(super) fn describe(one: &Instance) -> Value {
    let state = &one.state;
    let recipe = match state.kind() {
        _ if one.role == Role::Decode => None,
        PrefillKind::Unknown => None,
        PrefillKind::Nixl => Some("NixlConnector"),
        PrefillKind::Push(_) => Some("NixlPushConnector"),
        PrefillKind::Mooncake(_) => Some("MooncakeConnector"),
    };
    json!({
        "pool": one.pool_name,
        "role": one.role,
        "url": format!("http://{}", one.name()),
        "state": one.standing(),
        "connector": recipe,
        "weight": one.setup.weight,
        "draining": one.setup.draining,
        "compatibility": one.setup.compatibility,
        "cache": describe_cache(&state.cache()),
        "added": one.origin == Origin::Admin,
        "discovered_by": one.origin.provider().map(|name| &**name),
        "models": state.models.cards().keys().collect::<Vec<_>>(),
        "requests": state.requests(),
        "outstanding_tokens": state.outstanding(),
        "requests_total": state.requests_total.load(std::sync::atomic::Ordering::Relaxed),
        "failed_in_a_row": state.failed_in_a_row(),
        "failures_total": state.failures_total.load(std::sync::atomic::Ordering::Relaxed),
        "last_fault": state.last_fault(),
    })
}

fn list_of(core: &Core) -> Value {
    json!({"instances": core.live().fleet.all().map(|one| describe(one)).collect::<Vec<_>>()})
}

pub(super) async fn list(State(core): State<Arc<Core>>, headers: HeaderMap) -> Response<Body> {
    answer(admitted(&core, &headers).map(|()| json_response(StatusCode::OK, &list_of(&core))))
}

async fn body_of(core: &Core, request: Request<Body>) -> Result<Map<String, Value>, ApiError> {
    let (parts, body) = request.into_parts();
    admitted(core, &parts.headers)?;
    let time = core.live().setup.limits.body_time;
    let body = tokio::time::timeout(time, Limited::new(body, 64 << 10).collect()).await;
    let bytes: Bytes = match body {
        Ok(Ok(collected)) => collected.to_bytes(),
        _ => return Err(ApiError::bad_request("the body is too long, or did not arrive in time")),
    };
    serde_json::from_slice(&bytes)
        .map_err(|error| ApiError::bad_request(format!("the body is not a JSON object: {error}")))
}

/// Splits a body into the target and the settings of an instance.
fn read(body: Map<String, Value>) -> Result<(InstanceTarget, InstanceTable), ApiError> {
    InstanceTarget::split(body).map_err(|error| ApiError::bad_request(error.to_string()))
}

impl InstanceTarget {
    /// Returns the index of the target's pool in this fleet; another fleet may have other indices.
    fn pool_in(&self, fleet: &Fleet) -> Result<usize, ApiError> {
        let pools = &fleet.pools;
        let pool = match &self.pool {
            Some(name) => pools.iter().position(|pool| pool.name == *name),
            None => (!pools.is_empty()).then_some(0),
        };
        let names: Vec<&str> = pools.iter().map(|pool| pool.name.as_str()).collect();
        pool.ok_or_else(|| {
            ApiError::bad_request(format!("there is no such pool; the pools are {names:?}"))
        })
    }
}

pub(super) async fn add(State(core): State<Arc<Core>>, request: Request<Body>) -> Response<Body> {
    let changed = async {
        let (place, table) = read(body_of(&core, request).await?)?;
        let role = place.role;
        let refused = |error: crate::Error| ApiError::bad_request(error.to_string());
        let named = InstanceSetup::new(&table.url).map_err(refused)?;
        if named.records().is_some() {
            let words =
                "names of DNS belong in the router's file; add instances by http://HOST:PORT";
            return Err(ApiError::bad_request(words));
        }
        let name = named.name().to_owned();
        core.change_fleet(|fleet| {
            let pool = place.pool_in(fleet)?;
            let before = fleet.find(pool, role, &name).map(|known| &known.setup);
            Ok(fleet.with(pool, role, table.over(before).map_err(refused)?))
        })
        .await?;
        tracing::info!(
            instance = name,
            role = role.as_str(),
            "added or changed through /instances"
        );
        Ok(json_response(StatusCode::OK, &list_of(&core)))
    };
    answer(changed.await)
}

pub(super) async fn remove(
    State(core): State<Arc<Core>>,
    request: Request<Body>,
) -> Response<Body> {
    let changed = async {
        let (place, table) = read(body_of(&core, request).await?)?;
        let role = place.role;
        let setup = InstanceSetup::new(&table.url)
            .map_err(|error| ApiError::bad_request(error.to_string()))?;
        let name = setup.name();
        core.change_fleet(|fleet| {
            let pool = place.pool_in(fleet)?;
            match fleet.find(pool, role, name).map(|known| &known.origin) {
                Some(Origin::Discovered { provider, is_changed: false, .. }) => {
                    let words = format!(
                        "{provider} would find {name} again; POST it with \"draining\": true until it \
                         has ended"
                    );
                    Err(ApiError::client(StatusCode::CONFLICT, words))
                }
                Some(Origin::Discovered { .. }) => Ok(fleet.handed_back(pool, role, name)),
                Some(_) => Ok(fleet.without(pool, role, name)),
                None => {
                    let words =
                        format!("there is no {} instance {name} in that pool", role.as_str());
                    Err(ApiError::client(StatusCode::NOT_FOUND, words))
                }
            }
        })
        .await?;
        tracing::info!(instance = name, role = role.as_str(), "removed through /instances");
        Ok(json_response(StatusCode::OK, &list_of(&core)))
    };
    answer(changed.await)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_is_found_in_the_fleet_that_is_changed() {
        let fleet = |text: &str| Fleet::new(&crate::Setup::from_toml(text).unwrap(), None);
        let place = InstanceTarget { role: Role::Decode, pool: Some("b".to_owned()) };
        let pool =
            |name: &str| format!("[[pool]]\nname = '{name}'\ndecode = ['http://{name}:1']\n");
        assert_eq!(place.pool_in(&fleet(&(pool("a") + &pool("b")))).unwrap(), 1);
        assert_eq!(place.pool_in(&fleet(&pool("b"))).unwrap(), 0);
        assert!(place.pool_in(&fleet(&pool("a"))).is_err());
    }
}
