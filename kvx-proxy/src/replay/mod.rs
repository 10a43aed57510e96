//! Plays a [recording](Trace) against endpoints, and measures their answers.
//!
//! Every request is a streamed completion of token ids. The prompts are made from the hashes of the
//! recording and a seed: where two prompts of the recording were equal, those that are sent are
//! equal too.

mod answer;
mod cache;
mod prompt;

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Semaphore, mpsc};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};

pub use self::answer::PlayError;
pub use self::cache::CacheCounts;
pub use crate::recording::trace::{Trace, TraceRequest};

use self::answer::{Measured, stream};
use self::cache::{ObservedCaches, difference};
use crate::endpoint::{Endpoint, EndpointClient, client};
use crate::error::{Error, Result};
use crate::setup::ApiKey;

/// How to play a trace.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ReplayOptions {
    /// The model; `None` takes the first one that each endpoint lists.
    pub model: Option<String>,
    /// The key of the endpoints.
    pub key: Option<ApiKey>,
    /// Determines the tokens of prompts.
    pub seed: u64,
    /// The speed of the arrivals, times the recorded one.
    pub speed: f64,
    /// The time after which no further request is sent.
    pub length: Option<Duration>,
    /// The most requests in progress at an endpoint; further ones are late.
    pub concurrency: usize,
    /// The time that an answer may take.
    pub timeout: Duration,
    /// The endpoints take turns of this length, instead of getting each request at the same time.
    pub in_turn: Option<Duration>,
    /// Servers whose prefix caches are observed.
    pub caches: Vec<String>,
}

impl Default for ReplayOptions {
    fn default() -> Self {
        ReplayOptions {
            model: None,
            key: None,
            seed: 0,
            speed: 1.0,
            length: None,
            concurrency: 256,
            timeout: Duration::from_secs(300),
            in_turn: None,
            caches: Vec::new(),
        }
    }
}

/// The answers of an endpoint to a trace.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct PlayedEndpoint {
    /// Its URL.
    pub url: String,
    /// The requests that it got, in the order of the trace.
    pub requests: Vec<PlayedRequest>,
    /// Requests whose time came, and that were not sent before the end of the replay because too
    /// many others were in progress.
    pub not_sent: usize,
    /// The time from the first request until the last answer, without the turns of others.
    pub took: Duration,
    /// The part of prompts that the observed caches had, or why it is unknown; `None` if no caches
    /// are observed.
    pub caches: Option<std::result::Result<CacheCounts, String>>,
}

impl PlayedEndpoint {
    /// Adds what the observed caches counted, or forgets all of it if that is unknown.
    fn observe(&mut self, counted: std::result::Result<CacheCounts, String>) {
        match (&mut self.caches, counted) {
            (Some(Ok(counts)), Ok(more)) => counts.add(more),
            (Some(caches @ Ok(_)), Err(error)) => *caches = Err(error),
            // None are observed, or an earlier error has made the part unknown.
            (None | Some(Err(_)), _) => {}
        }
    }
}

/// A request that was sent, and its answer.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct PlayedRequest {
    /// Its number in the trace.
    pub number: usize,
    /// When it was to be sent, since the trace began, at the speed of the replay.
    pub due: Duration,
    /// The delay of sending it, because too many others were in progress. It is a part of
    /// `first_token` and `total`, as it would be for a user.
    pub late: Duration,
    /// The tokens of its prompt.
    pub prompt_tokens: usize,
    /// The tokens of its answer.
    pub answer_tokens: u64,
    /// The time from when it was to be sent until the first token.
    pub first_token: Option<Duration>,
    /// The mean time between two tokens.
    pub per_token: Option<Duration>,
    /// The time from when it was to be sent until the end.
    pub total: Duration,
    /// The tokens of the prompt, and those that the server had cached, if it reports them.
    pub cached: Option<(u64, u64)>,
    /// Why the answer is not complete.
    pub error: Option<PlayError>,
}

/// Plays a trace against one or more endpoints. Their prompts have the same lengths and share the
/// same parts, but differ in their tokens: two routers of one fleet do not find each other's
/// prompts cached. Calls `each` for each answer.
///
/// # Errors
///
/// Fails if a URL is invalid, an endpoint lists no model and none is named, or an observed cache
/// cannot be read before the first request. Requests that fail are results.
pub async fn play(
    trace: &Arc<Trace>,
    urls: &[&str],
    options: &ReplayOptions,
    mut each: impl FnMut(&PlayedRequest),
) -> Result<Vec<PlayedEndpoint>> {
    if !(0.001..=1000.0).contains(&options.speed) {
        return Err(Error::new(format!(
            "the speed is {}; it must be from 0.001 to 1000",
            options.speed
        )));
    }
    if !options.caches.is_empty() && urls.len() > 1 && options.in_turn.is_none() {
        return Err(Error::new(
            "caches can be observed for one endpoint at a time; let the endpoints take turns",
        ));
    }
    let players = players(trace, urls, options).await?;
    let caches = ObservedCaches::new(&options.caches)?;
    let mut played: Vec<PlayedEndpoint> = urls
        .iter()
        .map(|url| PlayedEndpoint {
            url: (*url).to_owned(),
            caches: (!options.caches.is_empty()).then(|| Ok(CacheCounts::default())),
            ..PlayedEndpoint::default()
        })
        .collect();
    let mut first_counts = Some(caches.counts().await?);
    for (turn, requests) in turns(&trace.requests, options).into_iter().enumerate() {
        let mut order: Vec<usize> = (0..players.len()).collect();
        let together = match options.in_turn {
            Some(_) => {
                // The first one of a turn is the last one of the next.
                order.rotate_left(turn % players.len().max(1));
                1
            }
            None => players.len().max(1),
        };
        for group in order.chunks(together) {
            // A reading that fails later is no reason to discard the answers.
            let before = match first_counts.take() {
                Some(counts) => Ok(counts),
                None => caches.counts().await,
            };
            let (sender, mut ended) = mpsc::unbounded_channel();
            let start = Instant::now();
            let mut turns = JoinSet::new();
            for at in group {
                let (player, requests) = (Arc::clone(&players[*at]), requests.clone());
                let (sender, at) = (sender.clone(), *at);
                turns.spawn(async move {
                    // The receiver lives as long as this task.
                    let each = move |request| _ = sender.send((at, request));
                    (at, player.turn(requests, start, each).await)
                });
            }
            drop(sender);
            let mut last = vec![Duration::ZERO; players.len()];
            while let Some((at, request)) = ended.recv().await {
                each(&request);
                last[at] = start.elapsed();
                played[at].requests.push(request);
            }
            for (at, not_sent) in turns.join_all().await {
                played[at].not_sent += not_sent;
            }
            let after = caches.counts().await;
            let counted = before.and_then(|before| difference(&before, &after?));
            let counted = counted.map_err(|error| error.to_string());
            for at in group {
                played[*at].took += last[*at];
                played[*at].observe(counted.clone());
            }
        }
    }
    for endpoint in &mut played {
        endpoint.requests.sort_by_key(|request| request.number);
    }
    Ok(played)
}

/// Returns the requests of each turn: all of them if the endpoints take no turns.
fn turns(requests: &[TraceRequest], options: &ReplayOptions) -> Vec<Range<usize>> {
    let Some(length) = options.in_turn else {
        return Some(0..requests.len()).filter(|all| !all.is_empty()).into_iter().collect();
    };
    let length = length.mul_f64(options.speed).max(Duration::from_millis(1));
    let mut turns = Vec::new();
    let mut begin = 0;
    while let Some(first) = requests.get(begin) {
        let end = begin + requests[begin..].partition_point(|one| one.at < first.at + length);
        turns.push(begin..end);
        begin = end;
    }
    turns
}

/// Plays requests against an endpoint.
struct Player {
    trace: Arc<Trace>,
    options: ReplayOptions,
    endpoint: Endpoint,
    client: EndpointClient,
    model: String,
    seed: u64,
    slots: Arc<Semaphore>,
}

async fn players(
    trace: &Arc<Trace>,
    urls: &[&str],
    options: &ReplayOptions,
) -> Result<Vec<Arc<Player>>> {
    let mut players = Vec::new();
    for (at, url) in urls.iter().enumerate() {
        let endpoint = Endpoint::new(url)?;
        let client = client(std::slice::from_ref(&endpoint))?;
        let model = match &options.model {
            Some(model) => model.clone(),
            None => endpoint.first_model(&client, options.key.as_ref().map(ApiKey::text)).await?,
        };
        players.push(Arc::new(Player {
            trace: Arc::clone(trace),
            options: options.clone(),
            endpoint,
            client,
            model,
            seed: options.seed.wrapping_add((at as u64) << 32),
            slots: Arc::new(Semaphore::new(options.concurrency.clamp(1, Semaphore::MAX_PERMITS))),
        }));
    }
    Ok(players)
}

impl Player {
    /// Sends some requests of the trace, the first one now, and calls `each` with each answer.
    /// Returns how many were to be sent, and were not because others were in progress.
    async fn turn(
        self: &Arc<Self>,
        requests: Range<usize>,
        start: Instant,
        each: impl Fn(PlayedRequest) + Clone + Send + 'static,
    ) -> usize {
        let speed = self.options.speed;
        let due_at = |number: usize| self.trace.requests[number].at.div_f64(speed);
        let begin = due_at(requests.start);
        let is_over = |time| self.options.length.is_some_and(|length| time > length);
        let mut in_progress = JoinSet::new();
        let mut not_sent = 0;
        for number in requests.clone() {
            let due = due_at(number);
            if is_over(due) {
                break;
            }
            // The body is ready before its time, so that long prompts are not late.
            let body = self.body(number);
            let planned = start + (due - begin);
            sleep_until(planned).await;
            let slot = match Arc::clone(&self.slots).try_acquire_owned() {
                Ok(slot) => slot,
                Err(_) => {
                    // The semaphore is never closed.
                    let Ok(slot) = Arc::clone(&self.slots).acquire_owned().await else { break };
                    if is_over(begin + start.elapsed()) {
                        not_sent =
                            (number..requests.end).filter(|later| !is_over(due_at(*later))).count();
                        break;
                    }
                    slot
                }
            };
            let (player, each) = (Arc::clone(self), each.clone());
            while in_progress.try_join_next().is_some() {}
            in_progress.spawn(async move {
                let played = player.request(number, body, due, planned).await;
                each(played);
                drop(slot);
            });
        }
        while in_progress.join_next().await.is_some() {}
        not_sent
    }

    /// Returns the body of a request.
    fn body(&self, number: usize) -> String {
        let request = &self.trace.requests[number];
        let options = serde_json::json!({
            "model": self.model,
            "max_tokens": request.answer_tokens,
            "ignore_eos": true,
            "temperature": 0,
            "stream": true,
            "stream_options": {"include_usage": true},
        });
        let mut body = options.to_string();
        body.truncate(body.len() - 1);
        body.push_str(",\"prompt\":[");
        prompt::write(&mut body, request, number, self.trace.block_tokens, self.seed);
        body.push_str("]}");
        body
    }

    async fn request(
        &self,
        number: usize,
        body: String,
        due: Duration,
        planned: Instant,
    ) -> PlayedRequest {
        let late = planned.elapsed();
        let mut measured = Measured::default();
        let key = self.options.key.as_ref().map(ApiKey::text);
        let ended = match self.endpoint.request(key, "/v1/completions", Some(body)) {
            Ok(request) => stream(&self.client, request, self.options.timeout, &mut measured).await,
            Err(error) => Err(PlayError::new("no connection", error.message)),
        };
        PlayedRequest {
            number,
            due,
            late,
            prompt_tokens: self.trace.requests[number].prompt_tokens,
            answer_tokens: measured.tokens(),
            first_token: measured.first.map(|time| late + time),
            per_token: measured.per_token(),
            total: planned.elapsed(),
            cached: measured.cached(),
            error: ended.err(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turns_have_the_length_of_the_replay_and_every_request_once() {
        let lines = [0, 900, 1100, 9000, 9100].map(|at| {
            format!(r#"{{"timestamp":{at},"input_length":9,"output_length":1,"hash_ids":[]}}"#)
        });
        let trace = Trace::read(lines.join("\n").as_bytes()).unwrap();
        let turns = |in_turn, speed| {
            let options = ReplayOptions {
                in_turn: Some(Duration::from_millis(in_turn)),
                speed,
                ..ReplayOptions::default()
            };
            turns(&trace.requests, &options)
        };
        assert_eq!(turns(1000, 1.0), [0..2, 2..3, 3..5]);
        assert_eq!(turns(1000, 2.0), [0..3, 3..5]);
        let all = super::turns(&trace.requests, &ReplayOptions::default());
        assert!(all.len() == 1 && all[0] == (0..5), "{all:?}");
        assert!(super::turns(&[], &ReplayOptions::default()).is_empty());
    }
}
