//! Tests that the backend KVX in NIXL confirms reads from a kvx engine: a NIXL agent, as in a
//! decode with NixlConnector, reads blocks of an engine in another process.

use std::collections::HashMap;
use std::io::BufRead as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvx::Memory;
use kvx::config::{KvTransferConfig, Surroundings};
use kvx::connector::{
    BlockLists, Caches, CompatibilityFactors, Connector, Heads, KvLayout, LayerCache, Prefill,
    Version, WorkerRank, probe,
};
use kvx_testkit::{Child, trial};
use libtest_mimic::{Failed, Trial};
use serde_json::{Value, json};

use crate::plain_agent::{Nixl, Setting, content, hex, settings};

const LIMIT: Duration = Duration::from_secs(10);
const TOKENS: u32 = 16;
const BLOCKS: u32 = 64;
const BLOCK_LEN: u64 = 16 << 10;
const ALL: u64 = BLOCKS as u64 * BLOCK_LEN;
/// The number of times that each race is run.
const ROUNDS: usize = 20;
/// The variable that makes this program an engine: its value is the backend.
const ENGINE: &str = "KVX_NIXL_TEST_ENGINE";

type Test = fn(&Setting) -> Result<(), Failed>;
const TESTS: &[(&str, Test)] = &[
    ("a_read_within_the_lease_succeeds_and_ends_it", a_read_within_the_lease_succeeds_and_ends_it),
    (
        "a_read_after_the_lease_fails_and_never_succeeds",
        a_read_after_the_lease_fails_and_never_succeeds,
    ),
    ("blocks_that_are_reused_during_a_read_fail_it", blocks_that_are_reused_during_a_read_fail_it),
    (
        "a_stopped_engine_ends_the_read_by_the_deadline",
        a_stopped_engine_ends_the_read_by_the_deadline,
    ),
    ("a_read_that_names_no_request_is_refused", a_read_that_names_no_request_is_refused),
    ("many_reads_at_once_are_all_confirmed", many_reads_at_once_are_all_confirmed),
];

/// Runs an engine if this process was started as one. Each line of its input is a command, and each
/// line of its output the answer.
pub(crate) fn served_as_engine() -> bool {
    let Ok(route) = std::env::var(ENGINE) else { return false };
    let json = json!({"kv_connector": "NixlConnector", "kv_role": "kv_producer", "engine_id": "e",
        "kv_connector_extra_config": {"backends": ["KVX", route], "kv_lease_duration": 60}});
    let surroundings = Surroundings::default().variable("VLLM_NIXL_SIDE_CHANNEL_HOST", "127.0.0.1");
    let config = KvTransferConfig::from_json(&json.to_string(), &surroundings).unwrap();
    let factors = CompatibilityFactors::new(Version::default(), "a model");
    let builder = Connector::builder(&config, kvx::registry(), factors);
    let connector = builder.block_size(TOKENS).any_port().build_blocking().unwrap();
    let pool = Arc::new(Memory::pool(ALL as usize).build().unwrap());
    let heads = Heads::Sharded(4);
    let layer = LayerCache::packed("layers.0.attn", pool.address(), BLOCKS, BLOCK_LEN, heads);
    let caches = Caches::of_layers(vec![layer], KvLayout::Lbhnc, TOKENS, 1, 0).unwrap();
    let rank = WorkerRank { pp: 0, tp: 0 };
    let _rank = connector.rank(rank).unwrap().register(caches, [Arc::clone(&pool)]).unwrap();
    let told = probe(connector.address(), rank, Version::default(), None, LIMIT).unwrap();
    println!("{}", json!([hex(&told.metadata.unwrap().agent_metadata), pool.address()]));
    let mut leases = HashMap::new();
    for line in std::io::stdin().lock().lines().map_while(Result::ok) {
        let command: Value = serde_json::from_str(&line).unwrap();
        let name = command[1].as_str().unwrap().to_owned();
        let seed = command[2].as_u64().unwrap_or(0) as usize;
        let bytes = content(seed, ALL as usize);
        let answer = match command[0].as_str().unwrap() {
            // Computes all blocks, and lets a decode read them.
            "publish" => {
                pool.copy_in(0, &bytes).unwrap();
                let all = BlockLists::single((0..BLOCKS).collect::<Vec<_>>());
                let (lease, _) =
                    Prefill::new(&connector).publish(&*name, all, BLOCKS * TOKENS).unwrap();
                leases.insert(name, lease);
                json!("published")
            }
            // Ends the lease, and gives the blocks to another request.
            "reuse" => {
                drop(leases.remove(&name));
                pool.copy_in(0, &bytes).unwrap();
                json!("reused")
            }
            _ => {
                let lease = leases.remove(&name).unwrap();
                json!(format!("{:?}", lease.wait_blocking(LIMIT).unwrap()))
            }
        };
        println!("{answer}");
    }
    true
}

/// An engine in another process, and a NIXL agent that has loaded its metadata.
struct Pair {
    engine: Child,
    nixl: Nixl,
    /// The engine's name and the address of its blocks.
    name: String,
    base: u64,
}

impl Pair {
    fn new(setting: &Setting, parameters: Value) -> Result<Pair, Failed> {
        let engine = Child::start_self(ENGINE, setting.route)?;
        let told: Value = serde_json::from_str(&engine.hear(LIMIT)?)?;
        let mut nixl = Nixl::with_parameters(setting, ALL as usize, parameters)?;
        let name = nixl.call(json!(["load", told[0]]))?;
        let name = name.as_str().ok_or("a name")?.to_owned();
        let base = told[1].as_u64().ok_or("an address")?;
        Ok(Pair { engine, nixl, name, base })
    }

    fn order(&mut self, command: Value) -> Result<String, Failed> {
        self.engine.say(&command.to_string())?;
        Ok(serde_json::from_str::<String>(&self.engine.hear(LIMIT)?)?)
    }

    fn publish(&mut self, request: &str, seed: usize) -> Result<(), Failed> {
        self.order(json!(["publish", request, seed])).map(drop)
    }

    /// Ends the lease of a request, and fills its blocks for another.
    fn reuse(&mut self, request: &str, seed: usize) -> Result<(), Failed> {
        self.order(json!(["reuse", request, seed])).map(drop)
    }

    /// Starts a read of all blocks with this notification. Returns its number.
    fn begin(&mut self, note: &str) -> Result<Value, Failed> {
        let moves: Vec<_> = (0..u64::from(BLOCKS))
            .map(|block| (0, block * BLOCK_LEN, self.base + block * BLOCK_LEN, BLOCK_LEN))
            .collect();
        self.nixl.call(json!(["begin", "READ", self.name, moves, hex(note.as_bytes())]))
    }

    fn finish(&mut self, number: &Value) -> Result<String, Failed> {
        let state = self.nixl.call(json!(["finish", number]))?;
        Ok(state.as_str().ok_or("a state")?.to_owned())
    }

    fn read(&mut self, note: &str) -> Result<String, Failed> {
        let number = self.begin(note)?;
        self.finish(&number)
    }

    /// Returns whether the NIXL agent's memory has what a request with this seed computed.
    fn holds(&mut self, seed: usize) -> Result<bool, Failed> {
        Ok(self.nixl.bytes(json!(["peek", 0, ALL]))? == content(seed, ALL as usize))
    }
}

fn a_read_within_the_lease_succeeds_and_ends_it(setting: &Setting) -> Result<(), Failed> {
    let mut pair = Pair::new(setting, json!(null))?;
    for seed in 1..4 {
        let request = format!("cmpl-u-0-{seed:08x}");
        pair.publish(&request, seed)?;
        assert_eq!(pair.read(&format!("{request}:1"))?, "DONE");
        assert!(pair.holds(seed)?, "the blocks of {request}");
        assert_eq!(pair.order(json!(["await", request]))?, "Fetched");
        // A second read with these parameters, although the blocks still have their content.
        assert_ne!(pair.read(&format!("{request}:1"))?, "DONE");
    }
    // Two readers of one request: the first does not end the lease.
    pair.publish("two", 9)?;
    assert_eq!(pair.read("two:2")?, "DONE");
    assert_eq!(pair.read("two:2")?, "DONE");
    Ok(())
}

fn a_read_after_the_lease_fails_and_never_succeeds(setting: &Setting) -> Result<(), Failed> {
    let mut pair = Pair::new(setting, json!(null))?;
    for round in 0..ROUNDS {
        let (late, next) = (format!("late-{round}"), format!("next-{round}"));
        pair.publish(&late, 2 * round)?;
        pair.reuse(&late, 2 * round + 1)?;
        // Another request has the blocks, and a lease of its own.
        pair.publish(&next, 2 * round + 1)?;
        assert_ne!(pair.read(&format!("{late}:1"))?, "DONE", "round {round}");
        assert_eq!(pair.read(&format!("{next}:1"))?, "DONE", "round {round}");
        assert!(pair.holds(2 * round + 1)?);
    }
    Ok(())
}

fn blocks_that_are_reused_during_a_read_fail_it(setting: &Setting) -> Result<(), Failed> {
    let mut pair = Pair::new(setting, json!(null))?;
    let mut failed = 0;
    for round in 0..ROUNDS {
        let request = format!("r-{round}");
        pair.publish(&request, 2 * round)?;
        let number = pair.begin(&format!("{request}:1"))?;
        pair.reuse(&request, 2 * round + 1)?;
        match pair.finish(&number)?.as_str() {
            "DONE" => assert!(pair.holds(2 * round)?, "round {round}: blocks of two requests"),
            _ => failed += 1,
        }
    }
    assert!(failed > 0, "no read was overtaken in {ROUNDS} rounds");
    Ok(())
}

fn a_stopped_engine_ends_the_read_by_the_deadline(setting: &Setting) -> Result<(), Failed> {
    let mut pair = Pair::new(setting, json!({"deadline": "2"}))?;
    pair.publish("first", 1)?;
    assert_eq!(pair.read("first:1")?, "DONE");
    pair.publish("second", 2)?;
    pair.engine.stop()?;
    let started = Instant::now();
    let state = pair.read("second:1")?;
    assert!(state.starts_with("ERR"), "{state}");
    assert!(started.elapsed() < LIMIT, "{:?}", started.elapsed());
    Ok(())
}

fn a_read_that_names_no_request_is_refused(setting: &Setting) -> Result<(), Failed> {
    let mut pair = Pair::new(setting, json!(null))?;
    pair.publish("r", 1)?;
    for note in ["", "HB:r", "r"] {
        let pairs = [(0, 0, BLOCK_LEN)];
        let command =
            json!(["move", "READ", pair.name, pair.base, pairs, hex(note.as_bytes()), "direct"]);
        let state = pair.nixl.call(command)?;
        assert!(state.as_str().is_some_and(|state| state.starts_with("ERR")), "{note:?}: {state}");
    }
    // Notifications without a read go through: this one ends the lease.
    pair.nixl.call(json!(["notify", pair.name, hex(b"r:1")]))?;
    assert_eq!(pair.order(json!(["await", "r"]))?, "Fetched");
    Ok(())
}

fn many_reads_at_once_are_all_confirmed(setting: &Setting) -> Result<(), Failed> {
    let mut pair = Pair::new(setting, json!(null))?;
    pair.publish("r", 1)?;
    // More than confirmations have places for; small ones, so that all of them arrive first.
    let begun: Vec<Value> = (0..600)
        .map(|_| {
            let moves = [(0, 0, pair.base, 64)];
            pair.nixl.call(json!(["begin", "READ", pair.name, moves, hex(b"r:601")]))
        })
        .collect::<Result<_, _>>()?;
    for number in &begun {
        assert_eq!(pair.finish(number)?, "DONE");
    }
    assert_eq!(pair.read("r:601")?, "DONE");
    assert!(pair.holds(1)?);
    Ok(())
}

pub(crate) fn trials() -> Vec<Trial> {
    let (settings, mut trials) = settings("a decode's NIXL over", "engines");
    for (release, setting) in settings {
        for (name, test) in TESTS {
            let setting = Arc::clone(&setting);
            let route = setting.route.to_lowercase();
            let title = format!("engines::{release}::{route}::{name}");
            trials.push(trial(title, move || test(&setting)));
        }
    }
    trials
}
