//! Sends one request through each pair of a fleet, and finds out whether its blocks moved.

mod scrape;

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use axum::body::Body;
use bytes::Bytes;
use hyper::header::{CONTENT_TYPE, DATE};
use hyper::http::uri::PathAndQuery;
use hyper::service::Service as _;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::service::TowerToHyperService;
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout, timeout_at};

use self::scrape::Counters;
use crate::discovery::{Reconciler, providers};
use crate::error::Result;
use crate::fleet::instance::Instance;
use crate::fleet::watch::{WatchScope, round};
use crate::log::{AccessLogger, shown};
use crate::random::random_bytes;
use crate::recording::writer::Recorder;
use crate::relay::core::{Core, LiveSetup};
use crate::serve;
use crate::setup::{Discovery, Pool, Role, Setup};
use crate::upstream::{WHOLE, quoted, whole};

/// The tokens of a prompt: enough for a few blocks of any size in use.
const PROMPT: u32 = 512;
/// The tokens of an answer.
const ANSWER: u32 = 2;
/// How long the counters of an instance may lag behind its answer.
const LAG: Duration = Duration::from_secs(3);
/// The pause between two looks at counters.
const PAUSE: Duration = Duration::from_millis(100);
/// How long a side channel may take to accept a connection.
const CONNECT: Duration = Duration::from_secs(2);

/// The result of trying a fleet.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct FleetTrial {
    /// The providers of discovery that gave no instance, and why.
    pub discovery: Vec<String>,
    /// All instances.
    pub instances: Vec<InstanceReport>,
    /// All pairs of a prefill instance and a decode instance of one pool.
    pub pairs: Vec<PairReport>,
}

/// The answers of an instance about itself.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct InstanceReport {
    /// The pool.
    pub pool: String,
    /// The role.
    pub role: Role,
    /// Host and port.
    pub name: String,
    /// The reason that the instance is not usable, if so.
    pub fault: Option<String>,
    /// True if it demands an API key that it was not given.
    pub requires_key: bool,
    /// The answer of `/version`.
    pub version: Option<String>,
    /// The models that it lists.
    pub models: Vec<String>,
    /// The tokens of a block of its cache.
    pub block_size: Option<u32>,
    /// The type of its cache's elements.
    pub cache_type: Option<String>,
    /// The seconds by which its clock is ahead of this machine's, to about a second.
    pub clock_offset: Option<f64>,
}

/// The outcome of a request through a pair.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum PairOutcome {
    /// The decode instance loaded blocks of the prefill instance.
    Moved,
    /// The answer is right, and no block moved: the decode instance computed the prompt again.
    Computed,
    /// The answer is right, and the instances do not say whether blocks moved.
    Unknown,
    /// There was no answer.
    Failed,
    /// The pair was not tried.
    #[default]
    Untried,
}

/// A transfer, as the instances count it.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Transfer {
    /// The bytes that moved.
    pub bytes: u64,
    /// The tokens of the prompt that the decode instance did not compute.
    pub tokens: u64,
    /// The time of the transfer.
    pub seconds: Option<f64>,
    /// The backends of kvx that moved bytes.
    pub backends: Vec<String>,
}

/// The report on a request through a pair of instances.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct PairReport {
    /// The pool.
    pub pool: String,
    /// The prefill instance.
    pub prefill: String,
    /// The decode instance.
    pub decode: String,
    /// The outcome: whether blocks moved.
    pub outcome: PairOutcome,
    /// The error, or the reason why no blocks moved, if it is known.
    pub why: Option<String>,
    /// True if the decode instance refused the parameters of the prefill instance, and computed the
    /// prompt.
    pub refused: bool,
    /// The kinds of errors with which the decode instance failed to connect to the prefill
    /// instance, if it runs kvx: such as `authentication`, `incompatible`, `peer_lost`.
    pub failures: Vec<String>,
    /// Host and port of the side channel that the prefill instance named.
    pub side_channel: Option<String>,
    /// The reason that this machine cannot connect to that side channel, if so.
    pub side_channel_fault: Option<String>,
    /// The tokens of the prompt.
    pub prompt_tokens: u32,
    /// The transfer, if there was one.
    pub transfer: Option<Transfer>,
    /// The time of the prefill.
    pub prefill_time: Option<Duration>,
    /// The time until the answer.
    pub time: Duration,
}

/// Asks each instance of a fleet about itself, and sends one request of 512 random tokens through
/// each pair, one after the other, for at most `limit` in all.
///
/// # Errors
///
/// Fails if the configuration is invalid.
pub async fn try_fleet(
    setup: Setup,
    limit: Duration,
    mut progress: impl FnMut(usize, usize),
) -> Result<FleetTrial> {
    let until = Instant::now() + limit;
    let (core, _none_works) =
        Core::new(LiveSetup::new(setup, None)?, AccessLogger::off(), Recorder::off());
    let core = Arc::new(core);
    let first_limit = core.live().setup.discovery.first_limit();
    let mut discovery = Reconciler::new(Arc::clone(&core));
    let found = discovery.first(providers::all, first_limit).await;
    let mut trial = FleetTrial::default();
    for (provider, instances) in found {
        match instances {
            Ok(0) => trial.discovery.push(format!("{provider} finds no instance")),
            Ok(_) => {}
            Err(why) => trial.discovery.push(format!("{provider}: {why}")),
        }
    }
    let live = core.live();
    round(&core, &live, WatchScope::Everything).await;
    let mut asked = JoinSet::new();
    for (place, one) in live.fleet.all().enumerate() {
        let (live, one) = (Arc::clone(&live), Arc::clone(one));
        asked.spawn(async move { (place, InstanceReport::ask(&live, &one).await) });
    }
    let mut reports = asked.join_all().await;
    reports.sort_by_key(|(place, _)| *place);
    trial.instances = reports.into_iter().map(|(_, report)| report).collect();
    let pairs = pairs(&live);
    for (tried, (prefill, decode)) in pairs.iter().enumerate() {
        progress(tried, pairs.len());
        let mut report = PairReport::new(&live, prefill, decode);
        if timeout_at(until, report.attempt(&live, prefill, decode)).await.is_err() {
            report.why = Some("the time limit has passed".to_owned());
        }
        trial.pairs.push(report);
    }
    progress(pairs.len(), pairs.len());
    Ok(trial)
}

/// Returns all pairs. Those with an instance that no earlier pair has come first, so that a time
/// limit leaves out no instance.
fn pairs(live: &LiveSetup) -> Vec<(Arc<Instance>, Arc<Instance>)> {
    let mut tried = HashSet::new();
    let (mut first, mut rest) = (Vec::new(), Vec::new());
    for prefill in live.fleet.of(Role::Prefill) {
        let decodes = live.fleet.of(Role::Decode).iter();
        for decode in decodes.filter(|decode| decode.pool == prefill.pool) {
            let is_new =
                [prefill, decode].map(|one| tried.insert(Arc::as_ptr(one))).contains(&true);
            let pairs = if is_new { &mut first } else { &mut rest };
            pairs.push((Arc::clone(prefill), Arc::clone(decode)));
        }
    }
    first.extend(rest);
    first
}

async fn get(
    live: &LiveSetup,
    one: &Instance,
    path: &'static str,
) -> Option<(Response<()>, Bytes)> {
    let until = Instant::now() + live.setup.health.timeout;
    let path = PathAndQuery::from_static(path);
    let sent = live.upstream.send(
        &one.setup,
        Method::GET,
        &path,
        live.headers_for_instances(),
        Bytes::new(),
        until,
    );
    let (parts, body) = sent.await.ok()?.into_parts();
    let body = whole(body, WHOLE, until).await.ok()?;
    Some((Response::from_parts(parts, ()), body))
}

async fn counters(live: &LiveSetup, one: &Instance) -> Option<Counters> {
    let (answer, body) = get(live, one, "/metrics").await?;
    answer.status().is_success().then(|| Counters::parse(&String::from_utf8_lossy(&body)))
}

impl InstanceReport {
    /// Creates a report without answers.
    pub fn new(pool: impl Into<String>, role: Role, name: impl Into<String>) -> Self {
        InstanceReport {
            pool: pool.into(),
            role,
            name: name.into(),
            fault: None,
            requires_key: false,
            version: None,
            models: Vec::new(),
            block_size: None,
            cache_type: None,
            clock_offset: None,
        }
    }

    async fn ask(live: &LiveSetup, one: &Instance) -> Self {
        let mut report =
            InstanceReport::new(&*live.fleet.pools[one.pool].name, one.role, one.name());
        if one.state.is_down() {
            let fault = one.state.last_fault();
            report.fault = Some(fault.unwrap_or_else(|| "it does not answer".to_owned()));
            return report;
        }
        report.models = one.state.models.cards().keys().map(|name| shown(name)).collect();
        if report.models.is_empty()
            && let Some((answer, _)) = get(live, one, "/v1/models").await
        {
            let refused = [StatusCode::UNAUTHORIZED, StatusCode::FORBIDDEN];
            report.requires_key = refused.contains(&answer.status());
        }
        if let Some((answer, body)) = get(live, one, "/version").await {
            let date = answer.headers().get(DATE).and_then(|date| date.to_str().ok());
            let theirs = date.and_then(|date| httpdate::parse_http_date(date).ok());
            report.clock_offset = theirs.map(|theirs| offset(theirs, SystemTime::now()));
            let version: Option<Value> = serde_json::from_slice(&body).ok();
            let version = version.as_ref().and_then(|version| version.get("version")?.as_str());
            report.version = version.map(shown);
        }
        if let Some(counters) = counters(live, one).await {
            (report.block_size, report.cache_type) = (counters.block_size, counters.cache_type);
        }
        report
    }
}

/// Returns by how many seconds a time is later than another.
fn offset(time: SystemTime, now: SystemTime) -> f64 {
    match time.duration_since(now) {
        Ok(ahead) => ahead.as_secs_f64(),
        Err(behind) => -behind.duration().as_secs_f64(),
    }
}

impl PairReport {
    fn new(live: &LiveSetup, prefill: &Instance, decode: &Instance) -> Self {
        PairReport {
            pool: live.fleet.pools[prefill.pool].name.clone(),
            prefill: prefill.name().to_owned(),
            decode: decode.name().to_owned(),
            ..PairReport::default()
        }
    }

    async fn attempt(&mut self, live: &LiveSetup, prefill: &Instance, decode: &Instance) {
        for (role, one) in [("prefill", prefill), ("decode", decode)] {
            if one.state.is_down() {
                self.why = Some(format!("the {role} instance is down"));
                return;
            }
        }
        let (theirs, ours) = (prefill.state.models.cards(), decode.state.models.cards());
        let adapters = |card: &Value| card.get("parent").is_some_and(Value::is_string);
        let common = theirs.iter().filter(|(name, _)| ours.contains_key(*name));
        let Some((model, card)) = common.min_by_key(|(_, card)| adapters(card)) else {
            self.why = Some("they list no model in common".to_owned());
            return;
        };
        let lengths = [card, &ours[model]].map(|card| card.get("max_model_len")?.as_u64());
        let most = lengths.into_iter().flatten().min().unwrap_or(u64::from(u32::MAX));
        let most = u32::try_from(most).unwrap_or(u32::MAX).saturating_sub(ANSWER + 1);
        self.prompt_tokens = PROMPT.min(most).max(1);
        if let Err(why) = self.send(live, prefill, decode, model).await {
            (self.outcome, self.why) = (PairOutcome::Failed, Some(why));
        }
    }

    /// Sends a request through a router of this pair alone.
    async fn send(
        &mut self,
        live: &LiveSetup,
        prefill: &Instance,
        decode: &Instance,
        model: &str,
    ) -> std::result::Result<(), String> {
        let (core, _none_works) =
            alone(live, prefill, decode).map_err(|error| error.to_string())?;
        round(&core, &core.live(), WatchScope::Everything).await;
        let before = [counters(live, prefill).await, counters(live, decode).await];
        let body = json!({
            "model": model,
            "prompt": prompt(self.prompt_tokens)?,
            "max_tokens": ANSWER,
            "temperature": 0,
        });
        let request = Request::post("/v1/completions")
            .header(CONTENT_TYPE, "application/json")
            .body(Body::from(body.to_string()))
            .map_err(|error| error.to_string())?;
        let until = Instant::now() + core.live().setup.timeouts.request;
        let router = TowerToHyperService::new(serve::routes::router(Arc::clone(&core)));
        let began = Instant::now();
        let answer = match timeout_at(until, router.call(request)).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(never)) => match never {},
            Err(_) => return Err("no answer in time".to_owned()),
        };
        let (parts, body) = answer.into_parts();
        let body = whole(body, WHOLE, until).await.map_err(|fault| fault.to_string())?;
        self.time = began.elapsed();
        let timeline = core.history.last(1).pop();
        let legs = timeline.as_ref().map(|one| one.legs.list()).unwrap_or_default();
        let leg = legs.iter().find(|leg| leg.role == Role::Prefill);
        self.prefill_time = leg.and_then(crate::timeline::Leg::answer_time);
        self.side_channel = leg.and_then(|leg| leg.told.side_channel.as_deref()).map(str::to_owned);
        if let Some(address) = &self.side_channel {
            self.side_channel_fault = match timeout(CONNECT, TcpStream::connect(address)).await {
                Ok(Ok(_)) => None,
                Ok(Err(error)) => Some(error.to_string()),
                Err(_) => Some(format!("no answer within {CONNECT:?}")),
            };
        }
        let why = timeline.as_ref().and_then(|one| one.why.clone());
        if !parts.status.is_success() {
            if let (Some(before), Some(now)) = (&before[1], counters(live, decode).await) {
                self.failures = now.since(before).failures;
            }
            let status = parts.status.as_u16();
            return Err(match why {
                Some(why) => why,
                None => match quoted(&body) {
                    Some(said) => format!("status {status}: {said}"),
                    None => format!("status {status}"),
                },
            });
        }
        if let Some(("decode_alone", reason)) = timeline.as_ref().and_then(|one| one.route) {
            (self.outcome, self.why) = (PairOutcome::Computed, Some(reason.to_owned()));
            return Ok(());
        }
        self.judge(live, [prefill, decode], &before).await;
        Ok(())
    }

    /// Finds out whether blocks moved. Of connectors that write, the prefill instance has the numbers.
    async fn judge(
        &mut self,
        live: &LiveSetup,
        pair: [&Instance; 2],
        before: &[Option<Counters>; 2],
    ) {
        let [_, Some(_)] = before else {
            self.outcome = PairOutcome::Unknown;
            self.why = Some("the decode instance has no /metrics".to_owned());
            return;
        };
        let until = Instant::now() + LAG;
        loop {
            let now = [counters(live, pair[0]).await, counters(live, pair[1]).await];
            let counted = |at: usize| Some(now[at].as_ref()?.since(before[at].as_ref()?));
            let (sent, loaded) = (counted(0).unwrap_or_default(), counted(1).unwrap_or_default());
            self.refused |= loaded.refused;
            self.failures.clone_from(&loaded.failures);
            // A prefill instance that is a decode instance too counts other transfers.
            let moved = if loaded.bytes > 0 { &loaded } else { &sent };
            let is_late = Instant::now() >= until;
            // The number of tokens may be counted before that of bytes.
            if loaded.bytes > 0 || loaded.loaded_tokens > 0 && (moved.bytes > 0 || is_late) {
                self.outcome = PairOutcome::Moved;
                self.transfer = Some(Transfer {
                    bytes: moved.bytes,
                    tokens: loaded.loaded_tokens.min(u64::from(self.prompt_tokens)),
                    seconds: Some(moved.seconds).filter(|seconds| *seconds > 0.0),
                    backends: moved.backends.clone(),
                });
                return;
            }
            if is_late || self.refused {
                self.outcome = PairOutcome::Computed;
                return;
            }
            sleep(PAUSE).await;
        }
    }
}

/// Builds the state of a router for a pair.
fn alone(
    live: &LiveSetup,
    prefill: &Instance,
    decode: &Instance,
) -> Result<(Arc<Core>, tokio::sync::mpsc::Receiver<()>)> {
    let of = &live.fleet.pools[prefill.pool];
    let pool = Pool {
        name: of.name.clone(),
        connector: Some(of.connector),
        bidirectional: false,
        prefill: vec![prefill.setup.clone()],
        decode: vec![decode.setup.clone()],
    };
    let mut setup = Setup {
        pools: vec![pool],
        discovery: Discovery::default(),
        api_key_file: None,
        record: None,
        local_below: 0,
        ..(*live.setup).clone()
    };
    setup.retries.attempts = 1;
    let most = Duration::from_secs(30);
    let timeouts = &mut setup.timeouts;
    for limit in [&mut timeouts.prefill, &mut timeouts.first_byte, &mut timeouts.request] {
        *limit = most.min(*limit);
    }
    let live = LiveSetup::new(setup, None)?;
    let (core, none_works) = Core::new(live, AccessLogger::off(), Recorder::off());
    Ok((Arc::new(core), none_works))
}

/// Returns a prompt that no instance has cached, of ids that every tokenizer has.
fn prompt(tokens: u32) -> std::result::Result<Vec<u32>, String> {
    let mut ids = Vec::with_capacity(tokens as usize);
    while ids.len() < tokens as usize {
        let bytes: [u8; 64] = random_bytes().map_err(|error| error.to_string())?;
        ids.extend(bytes.map(|byte| 3 + u32::from(byte) % 90));
    }
    ids.truncate(tokens as usize);
    Ok(ids)
}
