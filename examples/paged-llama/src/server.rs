//! The complete server: a model's folder, a pool, an engine and a port.

use std::borrow::Cow;
use std::collections::HashMap;
use std::future::Future;
use std::net::SocketAddr;
use std::ops::Range;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;

use tokio::net::TcpListener;

use crate::corruption::CorruptingMover;
use crate::engine::{Engine, Forward, Limits, Mover, NoMover, Running};
use crate::events::{self, CachePublisher, EventsConfig};
use crate::http::{self, Hosts, JOIN_TIMEOUT, JoinRequest, Keys, Recorder, Service, SharedConfig};
use crate::kv::{self, Kv, KvTransferConfig, ParamsTrust, Secret};
use crate::model::{Chunk, Config, Dtype, Model, ModelError, Pool, PoolLayout, Result};
use crate::rank::{self, AllRanks, RankProcess, RankSetup, RankSockets};
use crate::registration::ServerRegistration;
use crate::tokenizer::Tokenizer;

/// The default size of the pool, in bytes.
const POOL: usize = 256 << 20;
/// The time that running answers have to end after the server was stopped.
const DRAIN: Duration = Duration::from_secs(30);

/// The options of a server.
#[derive(Clone, Debug)]
pub struct Options {
    /// The model's folder.
    pub folder: PathBuf,
    /// The model's name as the operator wrote it; peers must use the same name.
    pub model: String,
    /// The names of the model for clients, the primary one first.
    pub names: Vec<String>,
    /// The address to listen on.
    pub host: String,
    /// The port to listen on; 0 for any free one.
    pub port: u16,
    /// The keys of clients, if they need one.
    pub keys: Option<Keys>,
    /// Tokens per block.
    pub block_size: usize,
    /// Tokens per block of the pool, which peers see; `--block-size` is a multiple of it.
    pub kernel_block_size: usize,
    /// The number of tensor-parallel ranks: 1, 2, 4 or 8. Each has its share of the weights and its
    /// own pool.
    pub ranks: usize,
    /// Returns a command that calls [`rank::run`], to start the process of a further rank.
    pub rank_process: fn() -> Command,
    /// The number of data-parallel ranks. Each is an engine.
    pub data_parallel_size: usize,
    /// The data-parallel ranks on this server. Each is an engine with its own pool.
    pub data_parallel_here: Range<usize>,
    /// The place of the other data-parallel ranks.
    pub others: OtherEngines,
    /// The longest sequence, prompt and answer together; by default the model's limit, if that
    /// fits.
    pub model_len: Option<usize>,
    /// The number of requests that run concurrently.
    pub requests: usize,
    /// The most tokens per step.
    pub step_tokens: usize,
    /// The number of blocks in the pool.
    pub blocks: Option<usize>,
    /// The size of the pool in bytes, if `blocks` is not set.
    pub pool_bytes: Option<usize>,
    /// The number format of keys and values; by default that of the weights.
    pub dtype: Option<Dtype>,
    /// The layout of a block in memory.
    pub layout: PoolLayout,
    /// Lets requests with the same prefix share blocks.
    pub prefix_cache: bool,
    /// Reports in the usage how many tokens of the prompt were not computed.
    pub prompt_details: bool,
    /// The most probabilities that a request may report for each token.
    pub most_logprobs: usize,
    /// Reports logits instead of log probabilities.
    pub raw_logits: bool,
    /// Corrupts one moved block, to show that moved blocks determine the answers.
    pub spoil: bool,
    /// The events of the prefix caches, if they are published.
    pub events: Option<EventsConfig>,
    /// The configuration of peers, if there are any.
    pub transfer: Option<KvTransferConfig>,
    /// The fleet's secret, with which the hosts of this server authenticate each other.
    pub secret: Option<Secret>,
    /// The registration in a fleet, if there is one. A host behind a head has none.
    pub registration: Option<ServerRegistration>,
}

/// The place of the data-parallel ranks that are not on this server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OtherEngines {
    /// There are none, or each is a separate server that the router knows.
    Independent,
    /// On hosts that join this server at this address and port. Clients know only this server.
    JoinHere(String, u16),
    /// This server is such a host, and joins the head at this address and port. It has no port for
    /// clients.
    JoinThere(String, u16),
}

/// A server that has started.
#[derive(Clone, Debug)]
pub struct ServerInfo {
    /// The address for clients, unless the server is a host behind a head.
    pub address: Option<SocketAddr>,
    /// The longest sequence, prompt and answer together.
    pub model_len: usize,
    /// The number of blocks of all engines.
    pub blocks: usize,
    /// The bytes of all pools.
    pub pool_bytes: usize,
}

/// The source of requests.
enum RequestSource {
    Clients(TcpListener),
    Head((String, u16)),
}

/// Rank 0, which the other ranks follow until its model is dropped.
struct RankZero {
    model: Model,
    pool: Pool,
    /// The number of pool blocks per block of the engine.
    kernel_per_block: u32,
}

impl Forward for RankZero {
    fn forward(&mut self, chunks: &[Chunk<'_>]) -> Result<Vec<Vec<Vec<f32>>>> {
        let each = self.kernel_per_block;
        let kernel = |block: &u32| block * each..(block + 1) * each;
        let lists: Vec<Cow<'_, [u32]>> = chunks
            .iter()
            .map(|chunk| match each {
                1 => Cow::Borrowed(chunk.blocks),
                _ => Cow::Owned(chunk.blocks.iter().flat_map(kernel).collect()),
            })
            .collect();
        let of_pool: Vec<Chunk<'_>> =
            chunks.iter().zip(&lists).map(|(chunk, blocks)| Chunk { blocks, ..*chunk }).collect();
        let logits = self.model.forward(&mut self.pool, &of_pool)?;
        Ok((0..chunks.len()).map(|index| logits.of(index).map(<[f32]>::to_vec).collect()).collect())
    }
}

/// An engine that is ready to start.
struct PreparedEngine {
    computing: RankZero,
    /// Declared after the model, because the ranks end when it is dropped.
    ranks: AllRanks,
    config: Config,
    limits: Limits,
}

impl PreparedEngine {
    /// Prepares an engine with this number of threads per rank of its model.
    fn of(
        options: &Options,
        engine: usize,
        threads: usize,
        kernel_per_block: usize,
    ) -> Result<Self> {
        let (first, others) = rank::connect(options.ranks)?;
        let model = Model::open(&options.folder, first)?.with_threads(threads);
        let config = model.config().clone();
        let dtype = options.dtype.unwrap_or(config.dtype);
        let shape = |blocks: usize| {
            model.pool_shape(
                blocks * kernel_per_block,
                options.kernel_block_size,
                dtype,
                options.layout,
            )
        };
        let (model_len, blocks) =
            options.sizes(config.max_positions, shape(1).bytes() * options.ranks)?;
        let shape = shape(blocks);
        let (pool, memory) = kv::pool(shape)?;
        let setup = RankSetup {
            engine,
            rank: 0,
            size: options.ranks,
            folder: options.folder.clone(),
            threads,
            shape,
            kv_heads: config.kv_heads,
            block_size: options.block_size,
            joins: options.transfer.is_some(),
        };
        let ranks = AllRanks { setup, memories: vec![memory], processes: Vec::new() };
        let computing = RankZero { model, pool, kernel_per_block: kernel_per_block as u32 };
        let limits = Limits {
            block_size: options.block_size,
            blocks,
            model_len,
            requests: options.requests,
            step_tokens: options.step_tokens,
            prefix_cache: options.prefix_cache,
            raw_logits: options.raw_logits,
            engine,
        };
        let mut opened = PreparedEngine { computing, ranks, config, limits };
        opened.start_ranks(others, options)?;
        Ok(opened)
    }

    /// Starts the further ranks: as processes if the connector supports that, else as threads.
    fn start_ranks(&mut self, others: Vec<RankSockets>, options: &Options) -> Result<()> {
        let ranks = &mut self.ranks;
        let apart = options.transfer.as_ref().map_or(Ok(()), kv::Rank::may_join);
        if let (Err(why), [_, ..]) = (&apart, &others[..]) {
            tracing::info!(
                "the ranks of engine {} are threads of one process: {why}",
                ranks.setup.engine
            );
        }
        for sockets in others {
            let setup = RankSetup { rank: sockets.rank, ..ranks.setup.clone() };
            match apart {
                Ok(()) => ranks.processes.push(RankProcess::start(
                    (options.rank_process)(),
                    &setup,
                    sockets,
                )?),
                Err(_) => ranks.memories.push(rank::start_thread(&setup, sockets)?),
            }
        }
        let joins = ranks.setup.joins;
        ranks.processes.iter_mut().try_for_each(|process| process.ready(joins))
    }

    /// Starts the engine, with its peers if there are any. The caller must drop the ranks'
    /// processes after the engine.
    fn start(
        self,
        options: &Options,
        tokenizer: &Arc<Tokenizer>,
        events: Option<CachePublisher>,
    ) -> Result<(Vec<RankProcess>, Running)> {
        let PreparedEngine { mut ranks, computing, limits, .. } = self;
        let len = ranks.setup.shape.block_bytes() * computing.kernel_per_block as usize;
        let mover = |wake| -> Result<Box<dyn Mover>> {
            let Some(transfer) = &options.transfer else { return Ok(Box::new(NoMover)) };
            let memory = ranks.memories[0].clone();
            let mover = Kv::open((transfer, &options.model), &mut ranks, wake)?;
            let spoiling = CorruptingMover { mover, memory, len, fill: HashMap::new() };
            Ok(if options.spoil { Box::new(spoiling) } else { Box::new(spoiling.mover) })
        };
        let (limits, model) = (limits.clone(), Box::new(computing));
        let running = Engine::start(limits, model, tokenizer.clone(), events, mover)?;
        for process in &ranks.processes {
            let engine = running.engine().clone();
            process.watch(move |why| engine.fail(why))?;
        }
        Ok((ranks.processes, running))
    }
}

impl Options {
    /// Returns the number of pool blocks per block of the engine.
    fn kernel_per_block(&self) -> Result<usize> {
        let Options { block_size, kernel_block_size: kernel, .. } = *self;
        match block_size.checked_rem(kernel) {
            Some(0) if block_size > 0 => Ok(block_size / kernel),
            _ => Err(ModelError::new(format!(
                "--block-size {block_size} is no multiple of --kernel-block-size {kernel}; choose \
                 one that is"
            ))),
        }
    }

    /// Returns the check of `kv_transfer_params`.
    fn trust(&self) -> Option<ParamsTrust> {
        let unsigned_hosts = &self.transfer.as_ref()?.nixl().allow_unsigned_params;
        Some(ParamsTrust::new(self.secret.as_ref(), unsigned_hosts))
    }

    /// Returns the data-parallel ranks on this server.
    fn engines(&self) -> Result<Range<usize>> {
        let (size, here) = (self.data_parallel_size, self.data_parallel_here.clone());
        if !here.is_empty() && here.end <= size {
            return Ok(here);
        }
        Err(ModelError::new(format!(
            "ranks {} to {} are not among the {size} of --data-parallel-size, which count from 0; \
             see --data-parallel-rank, --data-parallel-start-rank and --data-parallel-size-local",
            here.start,
            here.end.saturating_sub(1)
        )))
    }

    /// Returns the publisher of an engine's events, if they are published.
    fn publisher(&self, engine: usize) -> Option<CachePublisher> {
        let config = self.events.as_ref()?;
        Some(CachePublisher::new(engine, config.buffer_steps))
    }

    /// Returns the number of threads of each rank, given the number of engines.
    fn threads(&self, engines: usize) -> usize {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        (cores / (self.ranks * engines)).max(1)
    }

    /// Returns the longest sequence in tokens, and the number of blocks in the pool.
    fn sizes(&self, longest: usize, block_bytes: usize) -> Result<(usize, usize)> {
        let block = self.block_size;
        let blocks = self.blocks.unwrap_or_else(|| self.pool_bytes.unwrap_or(POOL) / block_bytes);
        let asked = match self.model_len {
            Some(len) if len > longest => {
                return Err(ModelError::new(format!(
                    "--max-model-len is {len}, but the model supports {longest} tokens; lower it"
                )));
            }
            Some(len) => len,
            None => longest.min((blocks * block).max(block)),
        };
        let told = self.blocks.is_some() || self.pool_bytes.is_some();
        Ok((asked, if told { blocks } else { blocks.max(asked.div_ceil(block)) }))
    }
}

/// Serves until `stop` is ready and answers have ended. Calls `started` when it listens, or has
/// joined its head.
///
/// # Errors
///
/// Fails if the folder, the port, the pool, the peers or the other hosts are unusable; the message
/// says what to do.
pub async fn serve(
    options: Options,
    recorder: Recorder,
    started: impl FnOnce(&ServerInfo),
    stop: impl Future<Output = ()> + Send + 'static,
) -> Result<()> {
    let (engines, kernel_per_block) = (options.engines()?, options.kernel_per_block()?);
    let threads = options.threads(engines.len());
    let open = |engine| PreparedEngine::of(&options, engine, threads, kernel_per_block);
    let opened = engines.clone().map(open).collect::<Result<Vec<_>>>()?;
    let (config, limits) = (opened[0].config.clone(), opened[0].limits.clone());
    let blocks = opened.iter().map(|one| one.limits.blocks).sum();
    let pool_bytes = opened.iter().map(|one| one.ranks.setup.shape.bytes() * options.ranks).sum();
    let tokenizer = Arc::new(Tokenizer::open(&options.folder, &config)?);
    let source = match &options.others {
        OtherEngines::JoinThere(host, port) => RequestSource::Head((host.clone(), *port)),
        _ => RequestSource::Clients(listen("--port", "--host", &options.host, options.port).await?),
    };
    let address = match &source {
        RequestSource::Clients(listener) => Some(listener.local_addr().map_err(ModelError::of)?),
        RequestSource::Head(_) => None,
    };
    let publishers: Vec<_> = engines.clone().map(|engine| options.publisher(engine)).collect();
    let mut listening = Vec::new();
    if let Some(config) = &options.events {
        for (engine, publisher) in engines.clone().zip(publishers.iter().flatten()) {
            listening.push(events::listen(publisher, config, engine).await?);
        }
    }
    let start = |(one, events): (PreparedEngine, _)| one.start(&options, &tokenizer, events);
    // The order matters: the processes are declared first, so they are dropped last.
    let (processes, running): (Vec<_>, Vec<_>) = opened
        .into_iter()
        .zip(publishers)
        .map(start)
        .collect::<Result<Vec<_>>>()?
        .into_iter()
        .unzip();
    let shared = SharedConfig {
        model: options.model.clone(),
        data_parallel_size: options.data_parallel_size,
        model_len: limits.model_len,
        block_size: options.block_size,
    };
    let everywhere = if let OtherEngines::JoinHere(..) = options.others {
        options.data_parallel_size
    } else {
        engines.len()
    };
    let hosts =
        Arc::new(Hosts::new(shared.clone(), engines.len()..everywhere, options.secret.clone()));
    let (trust, keys) = (options.trust(), options.keys.clone());
    let service = Arc::new(Service {
        engines: running.iter().map(|one| one.engine().clone()).collect(),
        tokenizer,
        models: options.names,
        root: options.model,
        vocabulary: config.vocab,
        prompt_details: options.prompt_details,
        most_logprobs: options.most_logprobs,
        recorder,
        request_limits: http::RequestLimits::default(),
        readers: http::Readers::default(),
        turn: AtomicUsize::new(0),
        hosts: hosts.clone(),
        trust,
        refused_params: http::RefusedParams::default(),
    });
    let started =
        || started(&ServerInfo { address, model_len: limits.model_len, blocks, pool_bytes });
    let served = async {
        let mut stop = Box::pin(stop);
        let listener = match source {
            RequestSource::Clients(listener) => listener,
            RequestSource::Head(head) => {
                let joining = JoinRequest { ranks: engines, config: shared };
                let (secret, router) = (options.secret.as_ref(), http::router(service));
                return http::follow(
                    &head,
                    &joining,
                    secret,
                    router,
                    started,
                    stop.as_mut(),
                    DRAIN,
                )
                .await;
            }
        };
        if let OtherEngines::JoinHere(host, port) = &options.others {
            let joins =
                listen("--data-parallel-rpc-port", "--data-parallel-address", host, *port).await?;
            http::check_reach(
                joins.local_addr().map_err(ModelError::of)?,
                options.secret.as_ref(),
            )?;
            tokio::spawn(hosts.clone().accept(joins));
            tokio::select! {
                all = hosts.all(JOIN_TIMEOUT) => all?,
                () = &mut stop => return Ok(()),
            }
        }
        let registered = match (options.registration, address) {
            (Some(registration), Some(address)) => Some(registration.register(address)?),
            _ => None,
        };
        started();
        let stop = async {
            stop.await;
            // Routers send nothing new while the answers end.
            if let Some(registered) = registered {
                registered.leave().await;
            }
        };
        http::serve(listener, service, keys, stop, DRAIN).await;
        Ok(())
    };
    let served = served.await;
    let stop_all = || {
        let stopped = Running::stop_all(running);
        drop(processes);
        stopped
    };
    let stopped = tokio::task::spawn_blocking(stop_all).await;
    served?;
    stopped.map_err(ModelError::of)?
}

/// Listens on an address and a port that come from these flags.
async fn listen(port_flag: &str, host_flag: &str, host: &str, port: u16) -> Result<TcpListener> {
    TcpListener::bind((host, port)).await.map_err(|error| {
        ModelError::new(format!(
            "cannot listen on {host}:{port}: {error}; take another {port_flag} (0 is any free one) \
             or {host_flag}"
        ))
    })
}
