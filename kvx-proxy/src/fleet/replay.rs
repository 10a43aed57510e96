//! Replays conversations against simulated instances, to compare the policies of choice.
//!
//! An instance computes prompts one after the other, and keeps the least recently used blocks that
//! fit into its cache. The generation of answers is not simulated.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap};

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

/// The result of a replay: the part of chunks that were cached, and the median and the 95th
/// percentile of the seconds until a prompt is computed.
#[derive(Debug)]
struct Replayed {
    hits: f64,
    median: f64,
    slow: f64,
}

/// The routers in front of the instances.
#[derive(Clone, Copy)]
struct Routers<'a> {
    /// Their number. Each knows the requests that it has sent itself.
    count: usize,
    /// Their policy, or that of a router with knowledge of every cache and queue.
    choice: Option<&'a str>,
    /// True if they get the events of all instances.
    events: bool,
}

impl<'a> Routers<'a> {
    /// Returns one router without events.
    fn one(choice: Option<&'a str>) -> Self {
        Routers { count: 1, choice, events: false }
    }

    fn start(self) -> Vec<Fleet> {
        let urls: Vec<_> = (0..INSTANCES).map(|at| format!("'http://p{at}:1'")).collect();
        let setup = format!(
            "choice = '{}'\n[[pool]]\nprefill = [{}]\ndecode = ['http://d:1']",
            self.choice.unwrap_or("cached"),
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

/// Replays requests to instances that cache this many chunks. An instance publishes a prompt's
/// events when it has computed the prompt.
fn replay(requests: &[Arrival], cache: usize, routers: Routers<'_>) -> Replayed {
    let fleets = routers.start();
    let mut caches: Vec<_> = (0..INSTANCES).map(|_| Cache::new(cache)).collect();
    let mut free_at = [0.0f64; INSTANCES];
    let mut running = BinaryHeap::new();
    let mut in_flight: HashMap<usize, (usize, Vec<CacheEvent>, Option<InFlight>)> = HashMap::new();
    let (mut hits, mut all, mut waits) = (0, 0, Vec::new());
    let (started, mut random) = (Instant::now(), Random::seeded(54));
    for (number, request) in requests.iter().enumerate() {
        let Arrival { at, chunks } = request;
        let micros = |seconds: f64| (seconds * 1e6) as u64;
        while running.peek().is_some_and(|Reverse((end, _))| *end <= micros(*at)) {
            let Some(Reverse((_, ended))) = running.pop() else { break };
            let (place, events, _) = in_flight.remove(&ended).expect("it was running");
            if routers.events {
                for fleet in &fleets {
                    let mut cache = fleet.prefill[place].state.cache();
                    events.iter().for_each(|event| cache.apply(event));
                }
            }
        }
        let tokens = |chunks: usize| (chunks * CHUNK_TOKENS) as f64;
        let fleet = &fleets[random.below(fleets.len())];
        let (place, chosen) = match routers.choice {
            Some(_) => {
                let now = started + std::time::Duration::from_secs_f64(*at);
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
            None => {
                let cost = |place: &usize| {
                    let own = tokens(chunks.len() - caches[*place].cached(chunks)) / RATE;
                    let queue = (free_at[*place] - at).max(0.0);
                    micros(queue + own)
                };
                ((0..INSTANCES).min_by_key(cost).expect("there are instances"), None)
            }
        };
        let cached = caches[place].cached(chunks);
        in_flight.insert(number, (place, caches[place].add(chunks), chosen));
        (hits, all) = (hits + cached, all + chunks.len());
        free_at[place] = free_at[place].max(*at) + tokens(chunks.len() - cached) / RATE;
        waits.push(free_at[place] - at);
        running.push(Reverse((micros(free_at[place]), number)));
    }
    waits.sort_by(f64::total_cmp);
    let of = |part: f64| waits[(waits.len() as f64 * part) as usize];
    Replayed { hits: hits as f64 / all as f64, median: of(0.5), slow: of(0.95) }
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

/// Reads a trace as Mooncake publishes it, whose hashes stand for 512 tokens.
fn trace(path: &str) -> Vec<Arrival> {
    let text = std::fs::read_to_string(path).expect("KVX_TRACE names a file");
    text.lines()
        .map(|line| {
            let line: serde_json::Value = serde_json::from_str(line).expect("lines are JSON");
            let hashes = line["hash_ids"].as_array().expect("every request has hashes");
            let hashes = hashes.iter().map(|hash| hash.as_u64().expect("hashes are numbers"));
            let at = line["timestamp"].as_f64().expect("every request has a time") / 1e3;
            Arrival { at, chunks: hashes.flat_map(|hash| [2 * hash, 2 * hash + 1]).collect() }
        })
        .collect()
}

#[test]
fn the_history_of_sent_prompts_finds_almost_what_exact_knowledge_finds() {
    let requests = conversations(1, 500, 4.0);
    for cache in [CACHE, SMALL_CACHE] {
        let exact = replay(&requests, cache, Routers::one(None));
        let [cached, least, prefix] = ["cached", "least-tokens", "prefix"]
            .map(|choice| replay(&requests, cache, Routers::one(Some(choice))));
        let table = format!("{exact:?} {cached:?} {least:?} {prefix:?}");
        assert!(cached.hits > exact.hits - 0.02, "{table}");
        assert!(cached.hits > least.hits + 0.2 && cached.hits > prefix.hits + 0.1, "{table}");
        assert!(cached.median < least.median && cached.slow < least.slow, "{table}");
    }
}

#[test]
fn with_events_several_routers_find_almost_what_exact_knowledge_finds() {
    let requests = conversations(1, 500, 4.0);
    for cache in [CACHE, SMALL_CACHE] {
        let exact = replay(&requests, cache, Routers::one(None));
        let cached = |count, events| {
            replay(&requests, cache, Routers { count, choice: Some("cached"), events })
        };
        let [one, three, history] = [cached(1, true), cached(3, true), cached(3, false)];
        let table = format!("{exact:?} {one:?} {three:?} {history:?}");
        assert!(one.hits > exact.hits - 0.02, "{table}");
        assert!(three.hits > exact.hits - 0.03, "{table}");
        assert!(three.hits > history.hits + 0.05, "{table}");
    }
}

#[test]
fn a_trace_is_replayed() {
    if !kvx_testkit::is_asked_for("KVX_TRACE", "the comparison of policies on a trace") {
        return;
    }
    let requests = trace(&std::env::var("KVX_TRACE").unwrap());
    println!("cached tokens | routers | policy | hits | median s | 95 % s");
    for cache in [CACHE, SMALL_CACHE] {
        let policies = [Some("round-robin"), Some("least-tokens"), Some("prefix"), Some("cached")];
        let alone = policies.into_iter().chain([None]).map(Routers::one);
        let cached = |count, events| Routers { count, choice: Some("cached"), events };
        for routers in alone.chain([cached(1, true), cached(3, false), cached(3, true)]) {
            let Replayed { hits, median, slow } = replay(&requests, cache, routers);
            let (tokens, choice) = (cache * CHUNK_TOKENS, routers.choice.unwrap_or("exact"));
            let (count, events) = (routers.count, if routers.events { " with events" } else { "" });
            println!("{tokens} | {count} | {choice}{events} | {hits:.3} | {median:.2} | {slow:.2}");
        }
    }
}
