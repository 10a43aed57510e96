//! Replays conversations against simulated instances, to compare the policies of choice.
//!
//! An instance computes prompts one after the other, and keeps the least recently used blocks that
//! fit into its cache. The generation of answers is not simulated.
//!
//! Policies are compared at [`LOAD`] of [`saturation`].

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap};
use std::ops::Range;

use kvx_testkit::Random;
use kvx_vllm::events::{BlockHash, BlockRemoved, BlockStored, CacheEvent};

use super::cache_model::CHUNK_TOKENS;
use super::knowledge::index::EventIndex;
use super::tokens::PromptTokens;
use super::*;

const INSTANCES: usize = 8;
/// The tokens that an instance computes in a second.
const RATE: f64 = 20_000.0;
/// The chunks in an instance's cache: as many as the router remembers, and fewer.
const CACHE: usize = 12 << 10;
const SMALL_CACHE: usize = CACHE / 4;
/// The load, as a part of [`saturation`].
const LOAD: f64 = 0.8;

/// A request: its time in seconds, and the chunks of its prompt.
struct Arrival {
    at: f64,
    chunks: Vec<u64>,
}

/// The true cache of an instance.
struct Cache {
    most: usize,
    used: HashMap<u64, u64>,
    order: BTreeMap<u64, u64>,
    now: u64,
}

impl Cache {
    fn new(most: usize) -> Self {
        Cache { most, used: HashMap::new(), order: BTreeMap::new(), now: 0 }
    }

    fn cached(&self, chunks: &[u64]) -> usize {
        chunks.iter().take_while(|chunk| self.used.contains_key(chunk)).count()
    }

    /// Adds a prompt. Returns the events that an engine would publish.
    fn add(&mut self, chunks: &[u64]) -> Vec<CacheEvent> {
        let mut events: Vec<_> = (0..chunks.len())
            .filter(|at| !self.used.contains_key(&chunks[*at]))
            .map(|at| stored(chunks[at], at.checked_sub(1).map(|before| chunks[before])))
            .collect();
        for chunk in chunks.iter().rev() {
            self.now += 1;
            if let Some(before) = self.used.insert(*chunk, self.now) {
                self.order.remove(&before);
            }
            self.order.insert(self.now, *chunk);
        }
        let mut removed = BlockRemoved::default();
        while self.used.len() > self.most {
            let (_, chunk) = self.order.pop_first().expect("every chunk has a place");
            self.used.remove(&chunk);
            removed.hashes.push(BlockHash(chunk));
        }
        events.push(CacheEvent::Removed(Box::new(removed)));
        events
    }
}

/// Returns the tokens that a chunk stands for.
fn tokens_of(chunk: u64) -> impl Iterator<Item = u32> {
    [chunk as u32, (chunk >> 32) as u32].into_iter().chain([0; CHUNK_TOKENS - 2])
}

/// Returns the event of a chunk, as a block.
fn stored(chunk: u64, before: Option<u64>) -> CacheEvent {
    CacheEvent::Stored(Box::new(BlockStored {
        hashes: vec![BlockHash(chunk)],
        parent: before.map(BlockHash),
        tokens: tokens_of(chunk).collect(),
        block_size: CHUNK_TOKENS as u32,
        ..BlockStored::default()
    }))
}

/// The result of a replay.
#[derive(Debug)]
struct Replayed {
    /// The part of chunks that were cached.
    hits: f64,
    /// The seconds until a prompt is computed: mean, median and 95th percentile.
    mean: f64,
    median: f64,
    slow: f64,
    /// The tokens that were computed, as a part of those that the instances could have computed.
    busy: f64,
}

/// A rule to choose an instance.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Policy {
    /// A `choice` of the router.
    Choice(&'static str),
    /// The rule of `cached`, with knowledge of every cache. Loads are those that a router knows:
    /// an instance is busy with all of a prompt until it has computed the whole prompt.
    ExactCaches,
    /// [`ExactCaches`](Self::ExactCaches), with knowledge of every queue too.
    ExactQueues,
}

impl Policy {
    const ALL: [Policy; 6] = [
        Policy::Choice("round-robin"),
        Policy::Choice("least-tokens"),
        Policy::Choice("prefix"),
        Policy::Choice("cached"),
        Policy::ExactCaches,
        Policy::ExactQueues,
    ];
}

/// The routers in front of the instances.
#[derive(Clone, Copy)]
struct Routers {
    /// Their number. Each knows the requests that it has sent itself.
    count: usize,
    policy: Policy,
    /// True if they get the events of all instances.
    events: bool,
}

impl Routers {
    /// Returns one router without events.
    fn one(policy: Policy) -> Self {
        Routers { count: 1, policy, events: false }
    }

    /// Returns routers with the choice `cached`.
    fn cached(count: usize, events: bool) -> Self {
        Routers { count, policy: Policy::Choice("cached"), events }
    }

    fn start(self) -> Vec<Fleet> {
        let urls: Vec<_> = (0..INSTANCES).map(|at| format!("'http://p{at}:1'")).collect();
        let setup = format!(
            "choice = '{}'\n[[pool]]\nprefill = [{}]\ndecode = ['http://d:1']",
            match self.policy {
                Policy::Choice(choice) => choice,
                Policy::ExactCaches | Policy::ExactQueues => "cached",
            },
            urls.join(", ")
        );
        let setup = Setup::from_toml(&setup).unwrap();
        let fleets: Vec<_> = (0..self.count).map(|_| Fleet::new(&setup, None)).collect();
        for one in fleets.iter().flat_map(Fleet::all) {
            one.state.healthy();
            if self.events {
                one.state.cache().begin(EventIndex::default(), None);
            }
        }
        fleets
    }
}

/// Requests, and the instances to which they are sent.
#[derive(Clone)]
struct Scenario<'a> {
    requests: &'a [Arrival],
    /// The requests that count. Those before them fill the caches and the queues.
    window: Range<usize>,
    /// The chunks in an instance's cache.
    cache: usize,
    /// The speed of the replay: 2 halves the times between requests.
    speed: f64,
    /// The seed of the choice among routers.
    seed: u64,
}

impl Scenario<'_> {
    /// Returns this scenario at [`LOAD`].
    fn loaded(self) -> Self {
        Scenario { speed: LOAD * saturation(&self), ..self }
    }
}

/// Returns the speed that saturates the instances with one router that chooses by `least-tokens`,
/// which knows no caches: within the window, just as many tokens arrive that are not cached as the
/// instances can compute.
fn saturation(scenario: &Scenario<'_>) -> f64 {
    (0..4).fold(1.0, |speed, _| {
        let scenario = Scenario { speed, ..scenario.clone() };
        speed / replay(&scenario, Routers::one(Policy::Choice("least-tokens"))).busy
    })
}

/// Replays a scenario. An instance publishes a prompt's events when it has computed the prompt.
fn replay(scenario: &Scenario<'_>, routers: Routers) -> Replayed {
    let Scenario { requests, window, cache, speed, seed } = scenario.clone();
    let fleets = routers.start();
    let mut caches: Vec<_> = (0..INSTANCES).map(|_| Cache::new(cache)).collect();
    let mut free_at = [0.0f64; INSTANCES];
    let mut outstanding = [0; INSTANCES];
    let mut running = BinaryHeap::new();
    let mut in_flight: HashMap<usize, (usize, usize, Vec<CacheEvent>, Option<InFlight>)> =
        HashMap::new();
    let (mut hits, mut all, mut waits) = (0, 0, Vec::new());
    let (started, mut random) = (Instant::now(), Random::seeded(seed));
    let tokens = |chunks: usize| (chunks * CHUNK_TOKENS) as f64;
    for (number, request) in requests[..window.end].iter().enumerate() {
        let (at, chunks) = (request.at / speed, &request.chunks);
        let micros = |seconds: f64| (seconds * 1e6) as u64;
        while running.peek().is_some_and(|Reverse((end, _))| *end <= micros(at)) {
            let Some(Reverse((_, ended))) = running.pop() else { break };
            let (place, chunks, events, _) = in_flight.remove(&ended).expect("it was running");
            outstanding[place] -= chunks;
            if routers.events {
                for fleet in &fleets {
                    let mut cache = fleet.prefill[place].state.cache();
                    events.iter().for_each(|event| cache.apply(event));
                }
            }
        }
        let fleet = &fleets[random.below(fleets.len())];
        let (place, chosen) = match routers.policy {
            Policy::Choice(_) => {
                let now = started + std::time::Duration::from_secs_f64(at);
                let ids = || {
                    // The last token is computed in any case.
                    let ids = chunks.iter().copied().flat_map(tokens_of).chain([0]);
                    PromptTokens::new(ids.collect())
                };
                let ids = routers.events.then(ids);
                fleet.prefill.iter().for_each(|one| one.state.cache().expire(now));
                let wanted = Requirements {
                    tokens: tokens(chunks.len()) as u64,
                    prefix: chunks.first().copied().unwrap_or(0),
                    chunks,
                    token_ids: ids.as_ref(),
                    model: None,
                    avoid: &[],
                    now,
                };
                let chosen = fleet.choose_prefill(&wanted).expect("all are up");
                let place = fleet.prefill.iter().position(|one| Arc::ptr_eq(one, &chosen.instance));
                (place.expect("it is in the fleet"), Some(chosen))
            }
            Policy::ExactCaches | Policy::ExactQueues => {
                let cost = |place: &usize| {
                    let own = tokens(chunks.len() - caches[*place].cached(chunks)) / RATE;
                    let queue = match routers.policy {
                        Policy::ExactQueues => (free_at[*place] - at).max(0.0),
                        _ => tokens(outstanding[*place]) / RATE,
                    };
                    micros(queue + own)
                };
                ((0..INSTANCES).min_by_key(cost).expect("there are instances"), None)
            }
        };
        let cached = caches[place].cached(chunks);
        let computed = chunks.len() - cached;
        outstanding[place] += computed;
        in_flight.insert(number, (place, computed, caches[place].add(chunks), chosen));
        free_at[place] = free_at[place].max(at) + tokens(computed) / RATE;
        running.push(Reverse((micros(free_at[place]), number)));
        if window.contains(&number) {
            (hits, all) = (hits + cached, all + chunks.len());
            waits.push(free_at[place] - at);
        }
    }
    let seconds = (requests[window.end - 1].at - requests[window.start].at) / speed;
    let busy = tokens(all - hits) / (RATE * INSTANCES as f64 * seconds);
    let mean = waits.iter().sum::<f64>() / waits.len() as f64;
    waits.sort_by(f64::total_cmp);
    let of = |part: f64| waits[(waits.len() as f64 * part) as usize];
    Replayed { hits: hits as f64 / all as f64, mean, median: of(0.5), slow: of(0.95), busy }
}

/// Returns the requests of conversations that share one of a few system prompts. Each turn repeats
/// the earlier ones.
fn conversations(seed: u64, count: usize, a_second: f64) -> Vec<Arrival> {
    let mut random = Random::seeded(seed);
    let mut requests = Vec::new();
    for conversation in 0..count as u64 {
        let mut at = random.below(1_000_000) as f64 / 1e6 * count as f64 / a_second;
        let system = random.below(4) as u64;
        let mut chunks: Vec<u64> = (0..6).map(|chunk| system << 8 | chunk).collect();
        for _ in 0..1 + random.below(8) {
            for _ in 0..1 + random.below(16) {
                chunks.push(1 << 40 | conversation << 16 | chunks.len() as u64);
            }
            requests.push(Arrival { at, chunks: chunks.clone() });
            at += 5.0 + random.below(60) as f64;
        }
    }
    requests.sort_by(|a, b| a.at.total_cmp(&b.at));
    requests
}

/// Reads a trace as Mooncake publishes it, whose hashes stand for 512 tokens. Times in whole steps
/// of three seconds are spread over the step, in the order of the trace.
fn trace(path: &str, seed: u64) -> Vec<Arrival> {
    const STEP: u64 = 3000;
    let text = std::fs::read_to_string(path).expect("KVX_TRACE names a file");
    let (mut times, prompts): (Vec<_>, Vec<Vec<u64>>) = text
        .lines()
        .map(|line| {
            let line: serde_json::Value = serde_json::from_str(line).expect("lines are JSON");
            let hashes = line["hash_ids"].as_array().expect("every request has hashes");
            let hashes = hashes.iter().map(|hash| hash.as_u64().expect("hashes are numbers"));
            let at = line["timestamp"].as_u64().expect("every request has a time");
            (at, hashes.flat_map(|hash| [2 * hash, 2 * hash + 1]).collect())
        })
        .unzip();
    if times.iter().all(|at| at % STEP == 0) {
        let mut random = Random::seeded(seed);
        times.iter_mut().for_each(|at| *at += random.below(STEP as usize) as u64);
        times.sort();
    }
    let arrivals = times.into_iter().zip(prompts);
    arrivals.map(|(at, chunks)| Arrival { at: at as f64 / 1e3, chunks }).collect()
}

/// Returns simulated conversations at [`LOAD`]. The first quarter fills the caches.
fn simulated(requests: &[Arrival], cache: usize) -> Scenario<'_> {
    let window = requests.len() / 4..requests.len();
    Scenario { requests, window, cache, speed: 1.0, seed: 54 }.loaded()
}

#[test]
fn saturation_is_the_speed_at_which_least_load_has_no_pause() {
    let requests = conversations(1, 250, 4.0);
    let mut scenario = simulated(&requests, CACHE);
    let busy = |scenario: &_| replay(scenario, Routers::one(Policy::Choice("least-tokens"))).busy;
    let loaded = busy(&scenario);
    assert!((LOAD - 0.02..LOAD + 0.02).contains(&loaded), "{loaded}");
    scenario.speed /= LOAD;
    let saturated = busy(&scenario);
    assert!((0.98..1.02).contains(&saturated), "{saturated}");
}

#[test]
fn the_history_of_sent_prompts_finds_almost_what_exact_knowledge_finds() {
    let requests = conversations(1, 250, 4.0);
    for cache in [CACHE, SMALL_CACHE] {
        let scenario = simulated(&requests, cache);
        let exact = replay(&scenario, Routers::one(Policy::ExactCaches));
        let [cached, least, prefix] = ["cached", "least-tokens", "prefix"]
            .map(|choice| replay(&scenario, Routers::one(Policy::Choice(choice))));
        let table = format!("{exact:?} {cached:?} {least:?} {prefix:?}");
        assert!(cached.hits > exact.hits - 0.02, "{table}");
        assert!(cached.hits > least.hits + 0.2 && cached.hits > prefix.hits + 0.1, "{table}");
        assert!(1.5 * cached.median < prefix.median && 1.5 * cached.mean < prefix.mean, "{table}");
        assert!(cached.median < least.median && cached.slow < least.slow, "{table}");
    }
}

#[test]
fn with_events_several_routers_find_almost_what_exact_knowledge_finds() {
    let requests = conversations(1, 250, 4.0);
    for cache in [CACHE, SMALL_CACHE] {
        let scenario = simulated(&requests, cache);
        let exact = replay(&scenario, Routers::one(Policy::ExactCaches));
        let cached = |count, events| replay(&scenario, Routers::cached(count, events));
        let [one, three, history] = [cached(1, true), cached(3, true), cached(3, false)];
        let table = format!("{exact:?} {one:?} {three:?} {history:?}");
        assert!(one.hits > exact.hits - 0.02, "{table}");
        assert!(three.hits > exact.hits - 0.03, "{table}");
        assert!(three.hits > history.hits + 0.05, "{table}");
    }
}

/// Compares the policies on a third of a trace, after those before it. The last third is only for
/// the figures of policies that are not changed after it.
#[test]
fn a_trace_is_replayed() {
    if !kvx_testkit::is_asked_for("KVX_TRACE", "the comparison of policies on a trace") {
        return;
    }
    let third = std::env::var("KVX_TRACE_THIRD").unwrap_or("2".to_owned());
    let third: usize = third.parse().ok().filter(|third| (1..=3).contains(third)).expect("1 to 3");
    let requests = trace(&std::env::var("KVX_TRACE").unwrap(), third as u64);
    let window = (third - 1) * requests.len() / 3..third * requests.len() / 3;
    println!("cached tokens | speed | routers | policy | hits | mean s | median s | 95 % s | busy");
    for cache in [CACHE, SMALL_CACHE] {
        let (requests, window) = (&requests[..], window.clone());
        let seed = third as u64;
        let scenario = Scenario { requests, window, cache, speed: 1.0, seed }.loaded();
        let alone = Policy::ALL.map(Routers::one);
        let several = [(1, true), (3, false), (3, true)]
            .map(|(count, events)| Routers::cached(count, events));
        for routers in alone.into_iter().chain(several) {
            let Replayed { hits, mean, median, slow, busy } = replay(&scenario, routers);
            let (tokens, policy) = (cache * CHUNK_TOKENS, routers.policy);
            let (count, events) = (routers.count, if routers.events { " with events" } else { "" });
            println!(
                "{tokens} | {:.2} | {count} | {policy:?}{events} | {hits:.3} | {mean:.2} | \
                 {median:.2} | {slow:.2} | {busy:.2}",
                scenario.speed
            );
        }
    }
}
