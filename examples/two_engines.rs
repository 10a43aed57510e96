//! Runs a prefill server and a decode server, with a prefix cache and a failure policy, around a
//! toy engine.
//!
//! `cargo run --features connector --example two_engines` starts one process for each and acts as
//! their router: it sends a prompt to the prefill, and the prefill's answer to the decode. The
//! calls of kvx are between the marks `kvx` and `engine`; the rest is the toy engine.
//!
//! `--device cuda` (feature `cuda`) or `--device hip` (feature `rocm`) puts the pools on the first
//! device: `cargo run --features connector,cuda --example two_engines -- --device cuda`.

use std::collections::HashMap;
use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};

type Result<T = ()> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Every wait has a deadline.
const SOON: Duration = Duration::from_secs(10);
/// Tokens per block, bytes of KV per token, and blocks of the pool.
const TOKENS: u32 = 16;
const ROW: usize = 64;
const BLOCKS: u32 = 64;

// ---- kvx ----
use kvx::Memory;
use kvx::config::{KvTransferConfig, LoadFailurePolicy, Role};
use kvx::connector::{
    BlockLists, Caches, CompatibilityFactors, Connector, Decode, Heads, HeldBlocks, KvLayout,
    LayerCache, Lease, MemoryType, Prefill, TransferParams, WorkerRank,
};

/// Allocates the memory of an engine's KV cache, on the host or on the first device.
fn pool(device: &str, len: usize) -> Result<Memory> {
    Ok(match device {
        "host" => Memory::pool(len).build()?,
        #[cfg(feature = "cuda")]
        "cuda" => kvx::cuda::devices().map_err(|why| why.to_string())?[0].pool(len).build()?,
        #[cfg(feature = "rocm")]
        "hip" => kvx::rocm::devices().map_err(|why| why.to_string())?[0].pool(len).build()?,
        other => return Err(format!("--device {other} needs feature cuda or rocm").into()),
    })
}

/// Builds the connector of an engine whose KV cache is `pool`.
fn connector(name: &str, pool: &Arc<Memory>) -> Result<Connector> {
    let config = KvTransferConfig::builder("NixlConnector").role(Role::Both).engine_id(name);
    let config = config.load_failure_policy(LoadFailurePolicy::Recompute);
    let config = config.gpu(!pool.kind().is_host()).build()?;
    let mut factors = CompatibilityFactors::from_config(&config, "toy");
    (factors.num_kv_heads, factors.head_size, factors.num_hidden_layers) = (1, ROW as u32, 1);
    let builder = Connector::builder(&config, kvx::registry(), factors).block_size(TOKENS);
    let connector = builder.any_port().build_blocking()?;
    let (block_len, heads) = (u64::from(TOKENS) * ROW as u64, Heads::Sharded(1));
    let mut layer = LayerCache::packed("layers.0", pool.address(), BLOCKS, block_len, heads);
    layer.memory = if pool.kind().is_host() { MemoryType::Dram } else { MemoryType::Vram };
    let caches = Caches::of_layers(vec![layer], KvLayout::Lbhnc, TOKENS, 1, 0)?;
    connector.rank(WorkerRank::default())?.register(caches, [Arc::clone(pool)])?;
    Ok(connector)
}

/// Prefill: publishes blocks for a decode, and returns the parameters that the router passes to it
/// as JSON.
fn publish(kv: &Connector, request: &str, blocks: &[u32], tokens: u32) -> Result<(Lease, Value)> {
    let (lease, params) = Prefill::new(kv).publish(request, BlockLists::single(blocks), tokens)?;
    Ok((lease, serde_json::to_value(params)?))
}

/// Decode: fills `blocks`, which hold the prompt from token `cached` on. If that fails, returns the
/// blocks. The engine computes them once no transfer can write to them any more.
fn load(kv: &Connector, request: &str, params: &Value, cached: u32, blocks: &[u32]) -> Loading {
    let (params, blocks) = (TransferParams::from_value(params)?, BlockLists::single(blocks));
    let fetch = Decode::new(kv).fetch(request, &params, cached, blocks, SOON);
    let failed = fetch.join().err();
    Ok(failed.map(|error| {
        eprintln!("{request}: {error}");
        error.held
    }))
}

/// The blocks of a failed load: the engine may write to them once no transfer can.
type Loading = Result<Option<HeldBlocks>>;
// ---- engine ----

/// A toy engine. The KV of a token is a hash of all tokens up to it; the cache finds a block by the
/// tokens up to its end.
struct Engine {
    pool: Arc<Memory>,
    free: Vec<u32>,
    cached: HashMap<Vec<u32>, u32>,
    computed: usize,
}

/// Returns the KV of the last of these tokens.
fn kv(tokens: &[u32]) -> [u8; ROW] {
    let mix = |state: u64, token: &u32| {
        (state ^ u64::from(*token)).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(23)
    };
    let state = tokens.iter().fold(1, mix);
    std::array::from_fn(|at| (state >> (at % 8 * 8)) as u8)
}

impl Engine {
    fn new(device: &str) -> Result<Self> {
        let pool = Arc::new(pool(device, BLOCKS as usize * TOKENS as usize * ROW)?);
        Ok(Engine { pool, free: (0..BLOCKS).rev().collect(), cached: HashMap::new(), computed: 0 })
    }

    /// Returns the cached blocks at the front of a prompt.
    fn prefix(&self, prompt: &[u32]) -> Vec<u32> {
        let ends =
            (1..=prompt.len() / TOKENS as usize).map(|count| &prompt[..count * TOKENS as usize]);
        ends.map_while(|tokens| self.cached.get(tokens).copied()).collect()
    }

    /// Takes free blocks for the part of a prompt that is not cached.
    fn allocate(&mut self, prompt: &[u32], cached: usize) -> Result<Vec<u32>> {
        let count = prompt.len().div_ceil(TOKENS as usize) - cached;
        let rest = self.free.len().checked_sub(count).ok_or("the pool is full")?;
        Ok(self.free.split_off(rest))
    }

    fn compute(&mut self, prompt: &[u32], blocks: &[u32], from: usize) -> Result {
        for at in from * TOKENS as usize..prompt.len() {
            let place =
                blocks[at / TOKENS as usize] as usize * TOKENS as usize + at % TOKENS as usize;
            self.pool.copy_in(place * ROW, &kv(&prompt[..=at]))?;
            self.computed += 1;
        }
        Ok(())
    }

    /// Adds the full blocks of a prompt to the cache.
    fn remember(&mut self, prompt: &[u32], blocks: &[u32]) {
        for (at, block) in blocks.iter().enumerate().take(prompt.len() / TOKENS as usize) {
            self.cached.insert(prompt[..(at + 1) * TOKENS as usize].to_vec(), *block);
        }
    }

    /// Returns the generated text: a checksum of the KV of the whole prompt.
    fn answer(&self, prompt: &[u32], blocks: &[u32]) -> Result<u64> {
        let mut sum = 0_u64;
        for at in 0..prompt.len() {
            let place =
                blocks[at / TOKENS as usize] as usize * TOKENS as usize + at % TOKENS as usize;
            let mut row = [0; ROW];
            self.pool.copy_out(place * ROW, &mut row)?;
            sum = row
                .iter()
                .fold(sum, |sum, byte| sum.wrapping_mul(31).wrapping_add(u64::from(*byte)));
        }
        Ok(sum)
    }
}

/// Serves as the prefill or the decode: reads one line of JSON per request, and answers with one. A
/// decode's answer says how many tokens the engine computed itself.
fn serve(role: &str, device: &str) -> Result {
    let mut engine = Engine::new(device)?;
    let connector = connector(&format!("{role}-{}", std::process::id()), &engine.pool)?;
    let mut leases: Vec<(Lease, Vec<u32>)> = Vec::new();
    for line in std::io::stdin().lock().lines() {
        let order: Value = serde_json::from_str(&line?)?;
        let request = order["request"].as_str().ok_or("the request has no name")?;
        let prompt: Vec<u32> = serde_json::from_value(order["prompt"].clone())?;
        let mut blocks = engine.prefix(&prompt);
        let cached = blocks.len();
        blocks.extend(engine.allocate(&prompt, cached)?);
        let answer = if role == "prefill" {
            engine.compute(&prompt, &blocks, cached)?;
            let (lease, params) = publish(&connector, request, &blocks, prompt.len() as u32)?;
            leases.push((lease, blocks));
            params
        } else {
            engine.computed = 0;
            let (params, tokens) = (&order["params"], cached as u32 * TOKENS);
            if let Some(held) = load(&connector, request, params, tokens, &blocks[cached..])? {
                match held.wait_blocking(SOON) {
                    Ok(released) if released.is_free() => {}
                    // A transfer may still write to them. A larger engine would use other blocks
                    // instead.
                    _ => return Err("a transfer still holds the blocks of a failed load".into()),
                }
                engine.compute(&prompt, &blocks, cached)?;
            }
            engine.remember(&prompt, &blocks);
            json!({"answer": engine.answer(&prompt, &blocks)?, "computed": engine.computed, "cached": cached})
        };
        println!("{answer}");
        for (lease, blocks) in std::mem::take(&mut leases) {
            match lease.wait_blocking(Duration::ZERO) {
                Ok(released) if released.is_free() => engine.free.extend(blocks),
                Ok(_) => {} // a peer may still read them, so they are never reused
                Err(lease) => leases.push((lease, blocks)),
            }
        }
    }
    Ok(())
}

struct Server {
    process: Child,
    answers: BufReader<std::process::ChildStdout>,
}

impl Server {
    fn start(role: &str, device: &str) -> Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        let mut process =
            command.args([role, device]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let answers =
            BufReader::new(process.stdout.take().ok_or("the server has no standard output")?);
        Ok(Server { process, answers })
    }

    fn ask(&mut self, order: &Value) -> Result<Value> {
        writeln!(
            self.process.stdin.as_mut().ok_or("the server has no standard input")?,
            "{order}"
        )?;
        let mut line = String::new();
        self.answers.read_line(&mut line)?;
        Ok(serde_json::from_str(&line)?)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.process.kill().ok(); // fails if it has already exited
        self.process.wait().ok();
    }
}

/// Runs the router, or one of its two servers.
fn main() -> Result {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let device = match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [role @ ("prefill" | "decode"), device] => return serve(role, device),
        ["--device", device] => device,
        [] => "host",
        _ => return Err("two_engines [--device cuda|hip]".into()),
    };
    pool(device, ROW)?; // fails here, before a server starts, if there is no such device
    let (mut prefill, mut decode) =
        (Server::start("prefill", device)?, Server::start("decode", device)?);
    let first: Vec<u32> = (0..50).collect();
    let longer: Vec<u32> = (0..80).collect();
    let other: Vec<u32> = (100..140).collect();
    // In the first request the decode loads the whole prompt, in the second all but three cached
    // blocks. In the third the prefill dies before the decode fetches. The decode then computes the
    // prompt, or still reads it from shared memory if it has not detected the loss yet.
    for (request, prompt, dies, cached) in
        [("one", &first, false, 0), ("two", &longer, false, 3), ("three", &other, true, 0)]
    {
        let params = prefill.ask(&json!({"request": request, "prompt": prompt}))?;
        if dies {
            prefill.process.kill()?;
            prefill.process.wait()?;
        }
        let answer =
            decode.ask(&json!({"request": request, "prompt": prompt, "params": params}))?;
        println!("{request}: {answer}");
        let mut alone = Engine::new("host")?;
        let blocks = alone.allocate(prompt, 0)?;
        alone.compute(prompt, &blocks, 0)?;
        assert_eq!(answer["answer"], alone.answer(prompt, &blocks)?, "{request}");
        assert_eq!(answer["cached"], cached, "{request}");
        assert!(answer["computed"] == 0 || dies && answer["computed"] == prompt.len(), "{request}");
    }
    Ok(())
}
