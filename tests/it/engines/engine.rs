//! An engine without a model, in a separate process: pools, a free list, and the connector.

use std::collections::HashMap;
use std::io::{BufRead as _, Write as _};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvx::config::{KvTransferConfig, Surroundings};
use kvx::connector::{
    BlockLists, CompatibilityFactors, Connector, Decode, Fetch, HeldBlocks, Lease, LoadError,
    Prefill, Released, RequestId, Then, TransferParams,
};
use kvx::{Error, ErrorKind, MemoryKind, Result};
use kvx_testkit::{HungPage, ResourceUsage, TestDevice};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::engines::checking::{Checks, Expected};
use crate::engines::log::Log;
use crate::engines::model::{RankMemory, Shape};
use crate::engines::queue::{self, Queue};
use crate::engines::{amid, apart};

/// The settings of an engine.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Spec {
    pub(crate) id: String,
    pub(crate) shape: Shape,
    /// The backends to configure; empty for the default.
    pub(crate) backends: Vec<String>,
    /// The port of the side channel of the first data-parallel rank; 0 for any.
    pub(crate) port: u16,
    /// The data-parallel rank of this engine among engines with the same name.
    pub(crate) data_parallel: u32,
    /// Additional fields of the configuration.
    pub(crate) config: Value,
    /// Keys of `kv_connector_extra_config`.
    pub(crate) extra: Value,
    /// Puts the pools on a device; peers access copies on the host.
    pub(crate) on_device: bool,
    /// Runs each rank in a separate process.
    pub(crate) apart: bool,
    /// Environment variables of the process.
    pub(crate) variables: Vec<(String, String)>,
}

/// An order to an engine, one line of JSON.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Order {
    /// Computes and publishes a prompt. The answer has the parameters.
    Prefill { request: String, prompt: u64, tokens: u32 },
    /// Flips a bit of a published prompt, in its block with this index.
    Spoil { request: String, block: usize },
    /// Begins to load a prompt.
    Decode(LoadOrder),
    /// Begins a load and holds its digest check. The answer says whether it is held.
    Check(LoadOrder),
    /// Begins a load, and stops the process when some blocks have arrived and others have not.
    /// After the process continues, the answer says whether it was stopped. With `at_page` the
    /// writer blocks at a missing page; it must write to the page itself, not through a system
    /// call.
    StopAmid { load: LoadOrder, at_page: bool },
    /// Releases a held check.
    LetGo,
    /// Adds a request to the engine's queue, without blocks.
    Arrive(LoadOrder),
    /// Gives a queued request blocks. Its load begins, unless the request has already ended.
    Admit { request: String },
    /// Waits for the end of a load.
    Outcome { request: String, patience: Duration },
    /// Drops a load or a lease.
    Abort { request: String },
    /// Computes a prompt in all free blocks.
    Occupy { prompt: u64 },
    /// Checks that the blocks of `Occupy` still hold the computed prompt.
    IsUnchanged,
    /// Frees the blocks of `Occupy`.
    Vacate,
    /// Counts the free blocks.
    Free,
    /// Measures the resources that the process holds.
    ResourceUsage,
    /// Returns the engine's log.
    Log,
}

/// A load of a prompt whose first `cached` blocks are already here.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct LoadOrder {
    pub(crate) request: String,
    pub(crate) prompt: u64,
    pub(crate) tokens: u32,
    pub(crate) cached: u32,
    pub(crate) params: Value,
    pub(crate) within: Duration,
}

/// An answer of an engine, one line of JSON.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum Answer {
    /// The engine listens at this port; `ranks` are the ids of the ranks' processes, if they are
    /// separate.
    Ready {
        port: u16,
        ranks: Vec<u32>,
    },
    Params(Value),
    Done,
    Held(bool),
    Free(u32),
    ResourceUsage(ResourceUsage),
    Log(String),
    Loaded {
        tokens: u32,
        took: Duration,
    },
    /// A load failed. `recompute` says whether the engine must compute the prompt itself, `invalid`
    /// has the indices of the blocks that do not hold it.
    NotLoaded {
        why: String,
        recompute: bool,
        invalid: Vec<usize>,
        took: Duration,
    },
    /// The order failed, or bytes that count as loaded are wrong.
    Failed {
        kind: String,
        sentence: String,
    },
}

/// A load in progress.
struct Load {
    /// `None` for a request in the queue.
    fetch: Option<Fetch>,
    begun: Instant,
    prompt: u64,
    blocks: Vec<u32>,
    cached: u32,
    tokens: u32,
}

struct Engine {
    connector: Connector,
    shape: Shape,
    ranks: Vec<RankMemory>,
    /// The processes of the ranks, which exit with the engine.
    processes: Vec<std::process::Child>,
    free: Vec<u32>,
    loads: HashMap<String, Load>,
    /// Blocks that a peer may fetch.
    leases: Vec<(Lease, Vec<u32>)>,
    /// Blocks that a failed load may still write to.
    held: Vec<(Holder, Vec<u32>)>,
    queue: Queue,
    checks: Checks,
    /// The prompt of `Occupy` and its blocks.
    occupied: (u64, Vec<u32>),
    log: Log,
}

/// The source of the news that blocks are free again.
pub(crate) enum Holder {
    Fetch(HeldBlocks),
    /// An outcome of the queue.
    Queued(RequestId),
}

/// The end of a load that did not bring all tokens.
pub(crate) struct Failed {
    pub(crate) why: String,
    pub(crate) then: Then,
    pub(crate) invalid: Vec<u32>,
    /// `None` if its blocks are free.
    pub(crate) holder: Option<Holder>,
}

impl From<LoadError> for Failed {
    fn from(error: LoadError) -> Self {
        let LoadError { failure, then, invalid, held, .. } = error;
        Failed { why: failure.to_string(), then, invalid, holder: Some(Holder::Fetch(held)) }
    }
}

pub(crate) fn refused(why: impl ToString) -> Error {
    ErrorKind::Invalid.because(why.to_string())
}

fn parsed(params: &Value) -> Result<TransferParams> {
    TransferParams::from_value(params).map_err(refused)
}

/// Keeps the entries of `waiting` whose blocks are still in use. Blocks that are released return to
/// `free`; lost ones do not.
fn swept<T>(
    waiting: &mut Vec<(T, Vec<u32>)>,
    free: &mut Vec<u32>,
    mut poll: impl FnMut(T) -> std::result::Result<Released, T>,
) {
    for (one, blocks) in std::mem::take(waiting) {
        match poll(one) {
            Ok(Released::Lost) => {}
            Ok(_) => free.extend(blocks),
            Err(not_yet) => waiting.push((not_yet, blocks)),
        }
    }
}

impl Engine {
    fn new(spec: &Spec, log: Log) -> Result<Self> {
        let mut config = json!({
            "kv_connector": "NixlConnector", "kv_role": "kv_both", "engine_id": spec.id,
            "kv_connector_extra_config": spec.extra,
        });
        for (key, value) in spec.config.as_object().into_iter().flatten() {
            config[key] = value.clone();
        }
        if !spec.backends.is_empty() {
            config["kv_connector_extra_config"]["backends"] = json!(spec.backends);
        }
        if spec.on_device {
            config["kv_buffer_device"] = json!("cpu");
        }
        let mut surroundings = Surroundings::of_process().gpu(spec.on_device);
        for variable in ["VLLM_NIXL_SIDE_CHANNEL_PORT", "VLLM_MOONCAKE_BOOTSTRAP_PORT"] {
            surroundings = surroundings.variable(variable, spec.port.to_string());
        }
        let config = KvTransferConfig::from_json(&config.to_string(), &surroundings)?;
        let mut factors = CompatibilityFactors::from_config(&config, "a test model");
        (factors.num_kv_heads, factors.num_hidden_layers) =
            (spec.shape.heads.unwrap_or(1), spec.shape.layers);
        let builder = Connector::builder(&config, kvx::registry(), factors)
            .block_size(spec.shape.logical())
            .data_parallel_rank(spec.data_parallel)
            .workers(spec.shape.tp, spec.shape.pp);
        let connector = builder.build_blocking()?;
        let device = spec.on_device.then(|| TestDevice::new(MemoryKind::Cuda));
        let register = |worker| {
            let rank = RankMemory::new(&spec.shape, worker, device.as_ref())?;
            let caches = rank.caches()?;
            connector.rank(worker)?.register(caches, [Arc::clone(&rank.memory)])?;
            Ok(rank)
        };
        let (ranks, processes, checks) = match spec.apart {
            true => apart::start(&connector, &spec.shape)?,
            false => {
                let ranks = spec.shape.ranks().map(register).collect::<Result<_>>()?;
                (ranks, Vec::new(), Checks::Here(None))
            }
        };
        Ok(Engine {
            connector,
            shape: spec.shape.clone(),
            ranks,
            processes,
            free: (0..spec.shape.blocks).rev().collect(),
            loads: HashMap::new(),
            leases: Vec::new(),
            held: Vec::new(),
            queue: Queue::default(),
            checks,
            occupied: (0, Vec::new()),
            log,
        })
    }

    fn sweep(&mut self) {
        swept(&mut self.leases, &mut self.free, |lease| lease.wait_blocking(Duration::ZERO));
        let (queue, connector) = (&mut self.queue, &self.connector);
        swept(&mut self.held, &mut self.free, |holder| match holder {
            Holder::Fetch(held) => held.wait_blocking(Duration::ZERO).map_err(Holder::Fetch),
            Holder::Queued(request) => {
                queue.released(connector, &request).ok_or(Holder::Queued(request))
            }
        });
    }

    fn take(&mut self, tokens: u32) -> Result<Vec<u32>> {
        self.sweep();
        let count = tokens.div_ceil(self.shape.logical()) as usize;
        match self.free.len().checked_sub(count) {
            Some(rest) => Ok(self.free.split_off(rest)),
            None => Err(ErrorKind::Exhausted
                .because(format!("{count} blocks, {} are free", self.free.len()))),
        }
    }

    fn obey(&mut self, order: Order) -> Result<Answer> {
        match order {
            Order::Prefill { request, prompt, tokens } => {
                let blocks = self.take(tokens)?;
                for rank in &self.ranks {
                    rank.poison(&blocks)?;
                    rank.fill(prompt, &blocks, 0..tokens)?;
                }
                let lists = BlockLists::single(&blocks[..]);
                match Prefill::new(&self.connector).publish(&*request, lists, tokens) {
                    Ok((lease, params)) => {
                        self.leases.push((lease, blocks));
                        Ok(Answer::Params(serde_json::to_value(params).map_err(refused)?))
                    }
                    Err(error) => {
                        self.free.extend(blocks);
                        Err(error)
                    }
                }
            }
            Order::Spoil { request, block } => {
                let mut published =
                    self.leases.iter().filter(|(lease, _)| lease.request().as_str() == request);
                let blocks = published.next().map(|(_, blocks)| &blocks[..]).unwrap_or_default();
                let block = blocks
                    .get(block)
                    .ok_or_else(|| refused("the prompt is not published or has fewer blocks"))?;
                self.ranks.iter().try_for_each(|rank| rank.spoil(*block)).map(|()| Answer::Done)
            }
            Order::Decode(LoadOrder { request, prompt, tokens, cached, params, within }) => {
                let params = parsed(&params)?;
                let blocks = self.take(tokens)?;
                let computed = (cached * self.shape.logical()).min(tokens);
                for rank in &self.ranks {
                    rank.poison(&blocks)?;
                    rank.fill(prompt, &blocks, 0..computed)?;
                }
                let wanted = BlockLists::single(&blocks[cached as usize..]);
                let (begun, decode) = (Instant::now(), Decode::new(&self.connector));
                let fetch = Some(decode.fetch(&*request, &params, computed, wanted, within));
                self.loads.insert(request, Load { fetch, begun, prompt, blocks, cached, tokens });
                Ok(Answer::Done)
            }
            Order::Check(LoadOrder { request, prompt, tokens, params, within, .. }) => {
                let params = parsed(&params)?;
                let blocks = self.take(tokens)?;
                // Fill the blocks with another prompt, also where the prefill has computed nothing,
                // so that every byte that arrives makes a difference.
                let all = 0..blocks.len() as u32 * self.shape.logical();
                self.ranks.iter().try_for_each(|rank| rank.fill(u64::MAX, &blocks, all.clone()))?;
                let expected = Expected { prompt, blocks: blocks.clone(), tokens };
                let (connector, loads) = (&self.connector, &mut self.loads);
                let held = self.checks.hold(&self.ranks[0], &expected, || {
                    let (begun, wanted) = (Instant::now(), BlockLists::single(&blocks[..]));
                    let fetch =
                        Some(Decode::new(connector).fetch(&*request, &params, 0, wanted, within));
                    loads.insert(request, Load { fetch, begun, prompt, blocks, cached: 0, tokens });
                    Ok(())
                })?;
                Ok(Answer::Held(held))
            }
            Order::StopAmid { load, at_page } => {
                let LoadOrder { request, prompt, tokens, params, within, .. } = load;
                let params = parsed(&params)?;
                let blocks = self.take(tokens)?;
                let rank = &self.ranks[0];
                rank.poison(&blocks)?;
                let expected = rank.expected(prompt, &blocks, tokens)?;
                let page = at_page
                    .then(|| HungPage::of_file(&rank.memory, rank.last(&blocks)))
                    .transpose()?;
                page.iter().try_for_each(HungPage::take_away)?;
                let (begun, wanted) = (Instant::now(), BlockLists::single(&blocks[..]));
                let fetch =
                    Some(Decode::new(&self.connector).fetch(&*request, &params, 0, wanted, within));
                self.loads
                    .insert(request, Load { fetch, begun, prompt, blocks, cached: 0, tokens });
                let stopped = match page {
                    Some(page) => amid::stop_at(page)?,
                    None => amid::stop_between(rank, &expected)?,
                };
                Ok(Answer::Held(stopped))
            }
            Order::LetGo => {
                self.checks.let_go();
                Ok(Answer::Done)
            }
            Order::Arrive(LoadOrder { request, prompt, tokens, params, within, .. }) => {
                let begun = Instant::now();
                queue::arrive(
                    &self.connector,
                    &(&*request).into(),
                    tokens,
                    &parsed(&params)?,
                    within,
                )?;
                let (fetch, blocks, cached) = (None, Vec::new(), 0);
                self.loads.insert(request, Load { fetch, begun, prompt, blocks, cached, tokens });
                Ok(Answer::Done)
            }
            Order::Admit { request } => self.admit(&request).map(|()| Answer::Done),
            Order::Outcome { request, patience } => self.outcome(&request, patience),
            Order::Abort { request } => {
                for (lease, blocks) in
                    self.leases.extract_if(.., |(lease, _)| lease.request().as_str() == request)
                {
                    drop(lease);
                    self.free.extend(blocks);
                }
                if let Some(Load { fetch, blocks, .. }) = self.loads.remove(&request) {
                    let request: RequestId = request.into();
                    match fetch {
                        Some(fetch) => self.held.push((Holder::Fetch(fetch.cancel()), blocks)),
                        None if queue::finish(&self.connector, &request) => {
                            self.held.push((Holder::Queued(request), blocks));
                        }
                        None => self.free.extend(blocks),
                    }
                }
                Ok(Answer::Done)
            }
            Order::Occupy { prompt } => {
                self.sweep();
                let blocks = std::mem::take(&mut self.free);
                for rank in &self.ranks {
                    rank.fill(prompt, &blocks, 0..blocks.len() as u32 * self.shape.logical())?;
                }
                self.occupied = (prompt, blocks);
                Ok(Answer::Done)
            }
            Order::IsUnchanged => {
                let (prompt, blocks) = &self.occupied;
                let tokens = blocks.len() as u32 * self.shape.logical();
                self.check(*prompt, blocks, tokens).map(|()| Answer::Done)
            }
            Order::Vacate => {
                self.free.append(&mut self.occupied.1);
                Ok(Answer::Done)
            }
            Order::Free => {
                self.sweep();
                Ok(Answer::Free(self.free.len() as u32))
            }
            Order::ResourceUsage => {
                ResourceUsage::of_this_process().map(Answer::ResourceUsage).map_err(refused)
            }
            Order::Log => Ok(Answer::Log(self.log.text())),
        }
    }

    fn admit(&mut self, request: &str) -> Result<()> {
        let id: RequestId = request.into();
        let tokens = self.loads.get(request).map_or(0, |load| load.tokens);
        let blocks = self.take(tokens)?;
        for rank in &self.ranks {
            rank.poison(&blocks)?;
        }
        let admitted = queue::admit(&self.connector, self.shape.ranks(), &id, &blocks);
        match self.loads.get_mut(request).filter(|_| matches!(admitted, Ok(true))) {
            Some(load) => load.blocks = blocks,
            None => self.free.extend(blocks),
        }
        admitted.map(drop)
    }

    fn check(&self, prompt: u64, blocks: &[u32], tokens: u32) -> Result<()> {
        let wrong = self
            .ranks
            .iter()
            .map(|rank| rank.wrong(prompt, blocks, 0..tokens))
            .sum::<Result<u64>>()?;
        match wrong {
            0 => Ok(()),
            _ => Err(ErrorKind::Malformed
                .because(format!("{wrong} rows that count as loaded have wrong bytes"))),
        }
    }

    fn outcome(&mut self, request: &str, patience: Duration) -> Result<Answer> {
        let load = self.loads.remove(request);
        let Load { fetch, begun, prompt, blocks, cached, tokens } =
            load.ok_or_else(|| ErrorKind::Invalid.because(format!("no load {request}")))?;
        let ended = match fetch {
            Some(fetch) => fetch.wait_blocking(patience).ok().map(|end| end.map_err(Failed::from)),
            None => self.queue.end(&self.connector, &request.into(), patience),
        };
        let took = begun.elapsed();
        match ended
            .ok_or_else(|| ErrorKind::TimedOut.because(format!("no outcome within {patience:?}")))?
        {
            Ok(loaded) => {
                let checked = self.check(prompt, &blocks, loaded.tokens.end.min(tokens));
                self.free.extend(blocks);
                checked?;
                Ok(Answer::Loaded { tokens: loaded.tokens.end, took })
            }
            Err(Failed { why, then, invalid, holder }) => {
                // Every byte that counts as loaded must be right.
                let right = match then {
                    Then::Recompute { computed } => computed,
                    Then::Fail if invalid.is_empty() => cached * self.shape.logical(),
                    Then::Fail => {
                        let first = blocks.iter().position(|block| invalid.contains(block));
                        first.unwrap_or_default() as u32 * self.shape.logical()
                    }
                };
                let checked = self.check(prompt, &blocks, right.min(tokens));
                let places = blocks.iter().enumerate().filter(|(_, block)| invalid.contains(block));
                let invalid = places.map(|(place, _)| place).collect();
                match holder {
                    Some(holder) => self.held.push((holder, blocks)),
                    None => self.free.extend(blocks),
                }
                checked?;
                Ok(Answer::NotLoaded {
                    why,
                    recompute: matches!(then, Then::Recompute { .. }),
                    invalid,
                    took,
                })
            }
        }
    }
}

/// Executes orders from standard input until it ends.
pub(crate) fn serve(spec: &str) -> ! {
    let mut answers = kvx_testkit::answers_apart().expect("the standard output can be duplicated");
    let mut say = |answer: Result<Answer>| {
        let answer = answer.unwrap_or_else(|error| Answer::Failed {
            kind: error.kind().as_str().to_owned(),
            sentence: error.to_string(),
        });
        let line = serde_json::to_string(&answer).expect("answers are JSON");
        writeln!(answers, "{line}").ok();
    };
    let spec: Spec = serde_json::from_str(spec).expect("the test writes specs");
    let mut engine = match Engine::new(&spec, Log::begin()) {
        Ok(engine) => engine,
        Err(error) => {
            say(Err(error));
            std::process::exit(1);
        }
    };
    let ranks = engine.processes.iter().map(std::process::Child::id).collect();
    say(Ok(Answer::Ready { port: engine.connector.address().port, ranks }));
    for line in std::io::stdin().lock().lines() {
        let Ok(line) = line else { break };
        let order = serde_json::from_str(&line).expect("the test writes orders");
        say(engine.obey(order));
    }
    std::process::exit(0);
}
