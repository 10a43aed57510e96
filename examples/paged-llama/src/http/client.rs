//! The location of a request's client, and whether it may use its `kv_transfer_params`.

use std::convert::Infallible;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::extract::{ConnectInfo, FromRequestParts};
use axum::http::request::Parts;
use axum::http::{HeaderName, HeaderValue, Request, StatusCode};
use axum::middleware::Next;
use axum::response::Response;

use super::error::{ApiError, Result};
use crate::kv::{ParamsTrust, TransferParams};

/// The header in which the head passes the client's location to its hosts.
pub(super) const CLIENT: HeaderName = HeaderName::from_static("x-kvx-client");

/// The shortest time between two log lines about refused parameters.
const APART: Duration = Duration::from_secs(10);

/// The length in characters at which such a line is cut.
const LONGEST_REFUSAL: usize = 512;

/// The location of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Client {
    ThisMachine,
    Elsewhere,
}

impl Client {
    fn at(address: IpAddr) -> Self {
        if address.to_canonical().is_loopback() { Client::ThisMachine } else { Client::Elsewhere }
    }

    pub(super) fn header(self) -> HeaderValue {
        HeaderValue::from_static(if self == Client::ThisMachine { "local" } else { "elsewhere" })
    }
}

/// Sets the client's location from the address of its connection.
pub(super) fn set_by_address<B>(request: &mut Request<B>, address: SocketAddr) {
    request.extensions_mut().insert(ConnectInfo(Client::at(address.ip())));
}

/// Sets the client's location from the head's header. Only the head sends requests to its hosts.
pub(super) async fn set_by_head(mut request: Request<Body>, next: Next) -> Response {
    let is_local =
        request.headers().get(CLIENT).is_some_and(|client| *client == Client::ThisMachine.header());
    let client = if is_local { Client::ThisMachine } else { Client::Elsewhere };
    request.extensions_mut().insert(ConnectInfo(client));
    next.run(request).await
}

/// A request over an unknown connection counts as one from elsewhere.
impl<S: Sync> FromRequestParts<S> for Client {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> std::result::Result<Self, Infallible> {
        Ok(parts.extensions.get::<ConnectInfo<Client>>().map_or(Client::Elsewhere, |info| info.0))
    }
}

/// The log of refused parameters: any client can cause a refusal, and most often a secret that is
/// missing at one engine does.
#[derive(Debug, Default)]
pub(crate) struct RefusedParams(Mutex<Option<Instant>>);

impl RefusedParams {
    /// Logs a refusal, unless it has logged one in the last ten seconds.
    pub(super) fn log(&self, refusal: &ApiError) {
        let now = Instant::now();
        let mut last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if last.is_some_and(|last| now < last + APART) {
            return;
        }
        *last = Some(now);
        drop(last);
        // The host in it comes from the client.
        let why: String = refusal.words.chars().take(LONGEST_REFUSAL).collect();
        tracing::warn!(status = refusal.status.as_u16(), "refused kv_transfer_params: {why}");
    }
}

/// Checks that a client may use these parameters.
///
/// # Errors
///
/// - 403 if they name another engine's blocks without that engine's signature or, in a fleet
///   without a secret, from a client that may not name them.
/// - 400 if they name blocks and are incomplete, so that no signature can be checked.
pub(super) fn check_params(
    trust: &ParamsTrust,
    client: Client,
    params: &TransferParams,
) -> Result<()> {
    let refused = |words: String| ApiError {
        field: Some("kv_transfer_params"),
        ..ApiError::new(StatusCode::FORBIDDEN, words)
    };
    if trust.has_secret() {
        return match params.remote_blocks() {
            Ok(remote) => trust.check(&remote).map_err(|why| refused(why.to_string())),
            // Parameters of a router, and of connectors whose prefill chooses the blocks.
            Err(_) if params.remote_block_ids.is_none() => Ok(()),
            Err(why) => Err(ApiError::of("kv_transfer_params", why.to_string())),
        };
    }
    let loads = params.do_remote_prefill || params.names_remote();
    let host = engine_host(params);
    if !loads
        || client == Client::ThisMachine
        || host.is_some_and(|host| trust.allows_unsigned(host))
    {
        return Ok(());
    }
    let host = host.unwrap_or("its host");
    Err(refused(format!(
        "this server has no KVX_SECRET_FILE, so it accepts kv_transfer_params only from this \
         machine: other clients could name any blocks in them. Give all servers of the fleet the \
         same secret, or name the engine's host in kv_connector_extra_config.allow_unsigned_params \
         (here {host:?})"
    )))
}

/// Returns the host of the engine that the parameters name, for either connector.
fn engine_host(params: &TransferParams) -> Option<&str> {
    let bootstrap = || {
        let address = params.rest.get("remote_bootstrap_addr")?.as_str()?;
        let address = address.split_once("://").map_or(address, |(_, address)| address);
        let host = address.split('/').next()?.rsplit_once(':')?.0;
        Some(host.trim_start_matches('[').trim_end_matches(']'))
    };
    params.remote_host.as_deref().or_else(bootstrap)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::kv::Secret;

    fn params(more: &Value) -> TransferParams {
        let mut params = json!({"do_remote_prefill": true, "remote_engine_id": "e", "remote_request_id": "r",
                                "remote_host": "10.0.0.1", "remote_port": 1, "remote_block_ids": [[1]]});
        params.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        TransferParams::from_value(&params).unwrap()
    }

    #[test]
    fn without_a_secret_parameters_come_from_this_machine_or_name_an_allowed_engine() {
        let trust = ParamsTrust::new(None, ["10.0.0.2", "fd00::1"]);
        let mooncake = |address: &str| {
            let params = json!({"do_remote_prefill": true, "transfer_id": "t", "remote_engine_id": "e",
                                "remote_bootstrap_addr": address});
            TransferParams::from_value(&params).unwrap()
        };
        let prefill = TransferParams::ask_prefill();
        for (params, is_taken) in [
            (params(&json!({})), false),
            (params(&json!({"do_remote_prefill": false, "do_remote_decode": true})), false),
            (params(&json!({"remote_host": "10.0.0.2"})), true),
            (mooncake("http://10.0.0.1:8998"), false),
            (mooncake("10.0.0.2:8998"), true),
            (mooncake("http://[fd00::1]:8998/"), true),
            (mooncake("nonsense"), false),
            (prefill, true),
        ] {
            assert!(check_params(&trust, Client::ThisMachine, &params).is_ok(), "{params:?}");
            let elsewhere = check_params(&trust, Client::Elsewhere, &params);
            assert_eq!(elsewhere.is_ok(), is_taken, "{params:?}");
        }
    }

    #[test]
    fn with_a_secret_blocks_are_signed_wherever_the_client_is() {
        let trust = ParamsTrust::new(Some(&Secret::from_bytes([1; Secret::LEN])), ["10.0.0.2"]);
        let mut signed = params(&json!({}));
        signed.kvx_signature =
            trust.sign(&signed.remote_blocks().unwrap(), std::time::Duration::from_secs(9));
        let mut altered = signed.clone();
        altered.remote_block_ids = Some(vec![vec![2]]);
        for client in [Client::ThisMachine, Client::Elsewhere] {
            assert_eq!(check_params(&trust, client, &signed), Ok(()));
            assert_eq!(
                check_params(&trust, client, &params(&json!({"remote_host": "10.0.0.2"}))),
                Ok(())
            );
            for wrong in [&altered, &params(&json!({}))] {
                let refusal = check_params(&trust, client, wrong).unwrap_err();
                assert_eq!(refusal.status, StatusCode::FORBIDDEN);
            }
        }
    }

    #[test]
    fn with_a_secret_incomplete_parameters_that_name_blocks_are_refused() {
        let trust = ParamsTrust::new(Some(&Secret::from_bytes([1; Secret::LEN])), ["10.0.0.1"]);
        for (key, value) in [
            ("remote_request_id", Value::Null),
            ("remote_engine_id", Value::Null),
            ("remote_host", Value::Null),
            ("remote_port", Value::Null),
            ("transfer_mode", "push".into()), // without tp_size
        ] {
            let incomplete = params(&json!({ key: value }));
            let refusal = check_params(&trust, Client::ThisMachine, &incomplete).unwrap_err();
            assert_eq!(refusal.status, StatusCode::BAD_REQUEST, "{key}");
        }
        let no_blocks = [
            json!({"do_remote_decode": true, "remote_block_ids": null}),
            json!({"do_remote_prefill": true, "transfer_id": "t", "remote_engine_id": "e",
                   "remote_bootstrap_addr": "10.0.0.3:1"}),
            json!({"do_remote_prefill": true, "remote_host": "10.0.0.3", "remote_port": 1}),
        ];
        for params in no_blocks.map(|value| TransferParams::from_value(&value).unwrap()) {
            assert_eq!(check_params(&trust, Client::Elsewhere, &params), Ok(()), "{params:?}");
        }
    }
}
