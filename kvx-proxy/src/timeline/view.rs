//! A timeline as JSON. What is not known is absent.

use serde::Serialize;

use super::{History, Leg, Timeline};
use crate::metrics::RequestOutcome;

fn millis(time: std::time::Duration) -> f64 {
    (time.as_secs_f64() * 1e6).round() / 1e3
}

/// A request as `/requests` shows it. Times in milliseconds count from its arrival.
#[derive(Debug, Serialize)]
pub(crate) struct RequestView<'a> {
    id: &'a str,
    path: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    model: Option<&'a str>,
    /// Seconds since the Unix epoch.
    arrived: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    route: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<&'static str>,
    outcome: &'static str,
    /// Absent if the client disconnected before its answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    status: Option<u16>,
    #[serde(skip_serializing_if = "Option::is_none")]
    why: Option<&'a str>,
    retries: u32,
    queue_ms: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    first_byte_ms: Option<f64>,
    end_ms: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    time_per_token_ms: Option<f64>,
    bytes: u64,
    /// The events of a stream.
    #[serde(skip_serializing_if = "is_zero")]
    events: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_tokens: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    answer_tokens: Option<u64>,
    legs: Vec<LegView>,
}

#[derive(Debug, Serialize)]
struct LegView {
    role: &'static str,
    instance: String,
    outcome: &'static str,
    /// True if the instance is to blame.
    #[serde(skip_serializing_if = "is_false")]
    failed: bool,
    start_ms: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    first_byte_ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    end_ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_tokens: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cached_tokens: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    blocks: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    side_channel: Option<String>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes references")]
fn is_zero(number: &u64) -> bool {
    *number == 0
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes references")]
fn is_false(flag: &bool) -> bool {
    !*flag
}

impl From<Leg> for LegView {
    fn from(leg: Leg) -> Self {
        LegView {
            role: leg.role.as_str(),
            instance: leg.instance.to_string(),
            outcome: leg.outcome,
            failed: leg.failed,
            start_ms: millis(leg.start),
            first_byte_ms: leg.first_byte.map(millis),
            end_ms: leg.end.map(millis),
            prompt_tokens: leg.told.prompt_tokens,
            cached_tokens: leg.told.cached_tokens,
            blocks: leg.told.blocks,
            side_channel: leg.told.side_channel.map(|address| address.to_string()),
        }
    }
}

impl<'a> RequestView<'a> {
    pub(crate) fn new(history: &History, one: &'a Timeline) -> Self {
        RequestView {
            id: &one.id,
            path: &one.path,
            model: one.model.as_deref(),
            arrived: history.unix_micros(one.arrived) as f64 / 1e6,
            route: one.route.map(|(route, _)| route),
            reason: one.route.map(|(_, reason)| reason).filter(|reason| !reason.is_empty()),
            outcome: one.outcome.as_str(),
            status: (one.status != 0).then_some(one.status),
            // An error about a wrong request may quote the request.
            why: one.why.as_deref().filter(|_| one.outcome != RequestOutcome::ClientError),
            retries: one.attempts.saturating_sub(1),
            queue_ms: millis(one.queued),
            first_byte_ms: one.first_byte.map(millis),
            end_ms: millis(one.total),
            time_per_token_ms: one.per_event().map(millis),
            bytes: one.bytes,
            events: one.events,
            prompt_tokens: one.prompt_tokens,
            answer_tokens: one.answer_tokens,
            legs: one.legs.list().into_iter().map(LegView::from).collect(),
        }
    }
}
