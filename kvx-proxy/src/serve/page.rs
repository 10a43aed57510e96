//! The status page `/` and its data, `/status`. The page has no data of its own: it asks for a key
//! where clients need one.

use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use axum::body::Body;
use axum::extract::State;
use hyper::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, HeaderValue, X_CONTENT_TYPE_OPTIONS,
};
use hyper::{Response, StatusCode};
use serde_json::{Value, json};

use super::admin;
use crate::fleet::Fleet;
use crate::fleet::instance::{Instance, Role};
use crate::fleet::missing::{self, BOTH};
use crate::relay::api_error::{ApiError, json_response};
use crate::relay::core::Core;
use crate::timeline::{LAST, LastMinute, Traffic};

const PAGE: &str = include_str!("page.html");
/// Allows only the page's own style and script, and requests to this server.
const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; \
                      img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

fn closed() -> Response<Body> {
    ApiError::client(StatusCode::NOT_FOUND, "the page is switched off").response()
}

pub(super) async fn page(State(core): State<Arc<Core>>) -> Response<Body> {
    if !core.live().setup.page {
        return closed();
    }
    let mut response = Response::new(Body::from(PAGE));
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/html; charset=utf-8"));
    headers.insert(CONTENT_SECURITY_POLICY, HeaderValue::from_static(POLICY));
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

/// Returns the state that the page begins with, and what it says about it. An instance that passes
/// its health checks may fail all requests, so outcomes count too.
fn state(core: &Core, fleet: &Fleet, minute: &LastMinute) -> (&'static str, String) {
    let LastMinute { ended, failed, of_clients } = minute;
    if core.is_draining() {
        return ("draining", "it takes no more requests".to_owned());
    }
    if !fleet.is_ready() {
        return ("not ready", missing::words(&fleet.missing(None, &BOTH)));
    }
    if minute.is_failing() {
        let judged = ended - of_clients;
        return ("failing", format!("{failed} of the last minute's {judged} requests failed"));
    }
    ("ready", String::new())
}

/// An instance with fewer legs than this has no median to compare.
const COMPARED: usize = 5;

/// Says that an instance is slow, and why, if its median is twice that of its peers.
fn slowness(one: &Instance, fleet: &Fleet, traffic: &Traffic) -> Option<String> {
    let legs = |one: &Instance| {
        let key = (one.role.as_str(), Arc::clone(&one.shared_name));
        let legs = traffic.instances.get(&key).filter(|legs| legs.legs >= COMPARED);
        legs.and_then(|legs| legs.p50_ms)
    };
    let own = legs(one)?;
    let peers = || {
        fleet.of(one.role).iter().filter(|peer| peer.pool == one.pool && peer.name() != one.name())
    };
    let mut medians: Vec<f64> = peers().filter_map(|peer| legs(peer)).collect();
    medians.sort_by(f64::total_cmp);
    let of_peers = *medians.get(medians.len().checked_sub(1)? / 2)?;
    if own < 2.0 * of_peers.max(1.0) {
        return None;
    }
    let what = match one.role {
        Role::Prefill => "a prefill takes",
        Role::Decode => "a first byte takes",
    };
    let mut words = format!("{what} {own} ms (median), {of_peers} ms at its peers");
    let (queued, peer) =
        (one.state.outstanding(), peers().map(|peer| peer.state.outstanding()).max());
    if peer.is_some_and(|peer| queued > 2 * peer.max(1)) {
        let _ = write!(words, "; it has {queued} tokens outstanding");
    }
    Some(words)
}

fn instances(fleet: &Fleet, traffic: &Traffic) -> Vec<Value> {
    let mut described = Vec::new();
    for one in fleet.all() {
        let mut value = admin::describe(one);
        let key = (one.role.as_str(), Arc::clone(&one.shared_name));
        let legs = traffic.instances.get(&key).copied().unwrap_or_default();
        value["recent"] = json!(legs);
        if let Some(slow) = slowness(one, fleet, traffic) {
            value["slow"] = slow.into();
        }
        described.push(value);
    }
    described
}

pub(super) async fn status(State(core): State<Arc<Core>>) -> Response<Body> {
    let live = core.live();
    if !live.setup.page {
        return closed();
    }
    let metrics = &core.metrics;
    let window = core.history.summary();
    let traffic = Traffic::of(&core.history.last(LAST));
    let (state, why) = state(&core, &live.fleet, &window.last_minute);
    let status = json!({
        "version": env!("CARGO_PKG_VERSION"),
        "up_for": metrics.started.elapsed().as_secs_f64(),
        "state": state,
        "why": why,
        "ready": !core.is_draining() && live.fleet.is_ready(),
        "draining": core.is_draining(),
        "missing": missing::words(&live.fleet.missing(None, &BOTH)),
        "in_flight": metrics.in_flight.load(Relaxed),
        "queued": metrics.queued.load(Relaxed),
        "connections": metrics.connections.load(Relaxed),
        "requests": metrics.outcomes(),
        "ejections": metrics.ejections(),
        "window": window,
        "flows": traffic.flows,
        "instances": instances(&live.fleet, &traffic),
        "discovery": metrics.discovery.json(),
        "releases": core.releases.status(),
        "errors": core.errors.list(),
    });
    let mut response = json_response(StatusCode::OK, &status);
    response.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::timeline::InstanceLegs;

    #[test]
    fn the_page_is_small_and_needs_no_network() {
        assert!(PAGE.len() < 60 << 10, "{} bytes", PAGE.len());
        for outside in ["http://", "https://", "url(", "@import", "src=", "innerHTML", "eval("] {
            // The namespace of SVG is a name, not an address that is loaded.
            let page = PAGE.replace("http://www.w3.org/2000/svg", "").replace("\"http://\"", "");
            assert!(!page.contains(outside), "{outside}");
        }
        for policy in ["default-src 'none'", "connect-src 'self'", "form-action 'none'"] {
            assert!(POLICY.contains(policy), "{policy}");
        }
    }

    #[test]
    fn an_instance_is_slow_beside_its_peers() {
        let setup = "[[pool]]\nprefill = ['http://p:1', 'http://p:2', 'http://p:3']\ndecode = ['http://d:1']";
        let fleet = Fleet::new(&crate::Setup::from_toml(setup).unwrap(), None);
        let mut traffic = Traffic::default();
        for (name, p50_ms) in [("p:1", 10.0), ("p:2", 12.0), ("p:3", 30.0)] {
            let legs = InstanceLegs { legs: 9, failed: 0, p50_ms: Some(p50_ms) };
            traffic.instances.insert(("prefill", name.into()), legs);
        }
        let slow: Vec<_> =
            fleet.prefill.iter().map(|one| slowness(one, &fleet, &traffic)).collect();
        let wanted = "a prefill takes 30 ms (median), 10 ms at its peers";
        assert_eq!(slow, [None, None, Some(wanted.to_owned())]);
        assert_eq!(slowness(&fleet.decode[0], &fleet, &traffic), None);
    }
}
