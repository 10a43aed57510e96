//! Registers an engine that cannot register itself, such as vLLM, from a process beside it.

use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::entry::OwnEntry;
use super::register::{Registered, register};
use crate::backoff::Reporter;
use crate::endpoint::{Endpoint, EndpointClient, EndpointError, client, head_by};
use crate::error::Result;
use crate::setup::{FleetAddress, FleetSecret};

/// The time between two health checks.
const EVERY: Duration = Duration::from_secs(1);
/// The time that `GET /health` may take.
const ANSWER: Duration = Duration::from_secs(2);
/// The time for which health checks may fail before the registration is deleted. Routers check too,
/// and sooner.
const PATIENCE: Duration = Duration::from_secs(10);

/// Registers an instance while `GET /health` of `watched`, such as `http://localhost:8000`, answers
/// with 200. Deletes the registration once `stop` is ready, or after the checks have failed for
/// 10 s; when they succeed again, the instance has a new id. `instance` and `secret` are as for
/// [`register`].
///
/// # Errors
///
/// Fails if an argument is invalid. An engine or an etcd that does not answer is no error.
pub async fn register_while_healthy(
    fleet: &FleetAddress,
    watched: &str,
    instance: &str,
    secret: Option<&FleetSecret>,
    stop: impl Future<Output = ()>,
) -> Result<()> {
    OwnEntry::new(fleet, 0, instance, secret)?;
    let endpoint = Endpoint::new(watched)?;
    let http = client(std::slice::from_ref(&endpoint))?;
    let mut registered = None;
    let watching = async {
        let mut healthy_at = Instant::now();
        let mut reporter = Reporter::new("the engine's health");
        loop {
            match check(&http, &endpoint).await {
                Ok(()) => {
                    healthy_at = Instant::now();
                    reporter.works();
                    if registered.is_none() {
                        registered = Some(register(fleet, instance, secret)?);
                        tracing::info!("{} is healthy: registering", endpoint.url());
                    }
                }
                Err(why) if healthy_at.elapsed() >= PATIENCE && registered.is_some() => {
                    tracing::warn!("{} is not healthy, and leaves: {why}", endpoint.url());
                    leave(registered.take()).await;
                }
                Err(why) => reporter.failed(format_args!("{}: {why}", endpoint.url())),
            }
            sleep(EVERY).await; // between checks
        }
    };
    let ended = tokio::select! {
        ended = watching => ended,
        () = stop => Ok(()),
    };
    leave(registered).await;
    ended
}

async fn leave(registered: Option<Registered>) {
    if let Some(registered) = registered {
        registered.leave().await;
    }
}

async fn check(
    http: &EndpointClient,
    endpoint: &Endpoint,
) -> std::result::Result<(), EndpointError> {
    let request = endpoint.request(None, "/health", None)?;
    let response = head_by(http, request, Instant::now() + ANSWER).await?;
    match response.status().as_u16() {
        200 => Ok(()),
        status => Err(format!("GET /health answers with status {status}").into()),
    }
}
