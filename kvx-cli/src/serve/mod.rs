//! `kvx serve MODEL`: the example server, by the command lines of `vllm serve`.

mod flags;
mod models;

use std::io::{IsTerminal as _, Write};
use std::ops::Range;
use std::os::unix::process::CommandExt as _;
use std::process::Command;

use kvx::Secret;
use kvx::config::{KvCacheLayout, KvTransferConfig, Surroundings};
use kvx_paged_llama::http::Recorder;
use kvx_paged_llama::model::PoolLayout;
use kvx_paged_llama::rank;
use kvx_paged_llama::server::{self, Options, Others, Started};

use self::flags::{Flags, MEANINGLESS_VARIABLES};
use crate::{Result, bytes};

/// Where hosts join a head unless it is said: vLLM's port.
const HEAD_PORT: u16 = 29550;

const USAGE: &str = "\
Serves a model as `vllm serve` does: OpenAI's interface, and KV cache from and to other servers.

Usage: kvx serve MODEL [FLAGS...]

MODEL is a folder as Hugging Face has them (config.json, safetensors, tokenizer.json) of a Llama, Qwen2 or Qwen3, or a
name that is in the local Hugging Face cache. It is an example on the CPU, not an engine to tune.

  --host HOST, --port PORT         where to listen [default: 0.0.0.0, 8000; port 0: any]
  --served-model-name NAME...      what clients call the model [default: MODEL]
  --max-model-len TOKENS           of prompt and answer together
  --max-num-seqs N                 requests that run at once [default: 128]
  --max-num-batched-tokens N       tokens of a step [default: 512]
  --block-size TOKENS              of the KV cache [default: 16]
  --kernel-block-size TOKENS       a block is made of such blocks, which is how peers see it [default: --block-size]
  --kv-cache-memory-bytes BYTES    of the KV cache; --num-gpu-blocks-override BLOCKS says it in blocks
  --tensor-parallel-size N         ranks of the model, processes each with a pool of its own: 1, 2, 4 or 8
  --data-parallel-size N           engines, each with a pool of its own; --data-parallel-rank R: only that one of them
  --data-parallel-size-local N     so many of them here; the others on hosts that join at --data-parallel-address and
                                   --data-parallel-rpc-port [default: 127.0.0.1, 29550]; beyond loopback they prove
                                   the secret that KVX_SECRET_FILE names
  --headless                       is such a host, of the ranks from --data-parallel-start-rank on
  --kv-cache-dtype TYPE            auto, float32 or bfloat16
  --attention-backend CPU_ATTN     blocks as a vLLM on the CPU has them, to exchange with one
  --no-enable-prefix-caching       requests that begin alike share nothing
  --enable-prompt-tokens-details   usage says how many tokens of a prompt were not computed
  --max-logprobs N                 tokens whose probabilities a request may have, -1: all [default: 20]
  --logprobs-mode MODE             raw_logprobs, or raw_logits to have logits instead
  --kv-transfer-config JSON        other servers, as in vLLM; also --kv-transfer-config.KEY VALUE; `kvx config` tells

VLLM_NIXL_SIDE_CHANNEL_HOST and _PORT, VLLM_KV_CACHE_LAYOUT, UCX_* and what else `kvx config` lists are heeded. Flags of
vLLM that mean nothing here are said to mean nothing; others are refused. Ctrl-C waits for answers to end, a second one
does not.";

/// This program as a rank of a model: also when its file was replaced meanwhile.
fn rank_process() -> Command {
    let mut command = Command::new("/proc/self/exe");
    command.arg0("kvx").arg("serve-rank");
    command
}

/// The whole life of a rank of a model, in a process that a server has started.
pub(crate) fn run_rank() -> Result<()> {
    log_to_standard_error();
    Ok(rank::run()?)
}

fn log_to_standard_error() {
    tracing_subscriber::fmt()
        .with_max_level(tracing_subscriber::filter::LevelFilter::INFO)
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(std::io::stderr)
        .init();
}

/// Runs the command with what stands behind `serve` on the command line.
pub(crate) fn run(arguments: Vec<String>, out: &mut dyn Write) -> Result<()> {
    // Also where a variable is wrong: the help names them.
    if arguments.iter().any(|word| word == "-h" || word == "--help") {
        return Ok(writeln!(out, "{USAGE}")?);
    }
    let surroundings = Surroundings::of_process();
    let (transfer, rest) = KvTransferConfig::from_arguments(arguments, &surroundings)?;
    let flags = Flags::read(rest)?;
    log_to_standard_error();
    for note in &flags.notes {
        eprintln!("kvx: {note}");
    }
    for (name, why) in MEANINGLESS_VARIABLES {
        if std::env::var_os(name).is_some() {
            eprintln!("kvx: {name} means nothing here: {why}");
        }
    }
    transfer.log_warnings_once();
    let options = options(flags, transfer)?;
    let recorder = Recorder::install(&options.names[0])?;
    eprintln!("kvx: reading {}", options.folder.display());
    let name = options.names[0].clone();
    let started = move |started: &Started| {
        eprintln!(
            "kvx: {name}, up to {} tokens, a KV cache of {} blocks ({})",
            started.model_len,
            started.blocks,
            bytes::show(started.pool_bytes as u64)
        );
        match started.address {
            Some(address) => eprintln!("kvx: listening on http://{address}"),
            None => eprintln!("kvx: joined the head, which is asked for what this host computes"),
        }
    };
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let served = runtime.block_on(async {
        let stop = stop()?;
        server::serve(options, recorder, started, stop).await?;
        Ok(())
    });
    runtime.shutdown_timeout(std::time::Duration::from_secs(1));
    served
}

fn options(flags: Flags, transfer: KvTransferConfig) -> Result<Options> {
    let (data_parallel_size, data_parallel_here, others) = placed(&flags)?;
    let transfer = match &flags.head_address {
        Some(host) => transfer.with_first_rank_at(host),
        None => transfer,
    };
    let model =
        flags.model.ok_or("no model is given: write kvx serve MODEL, a folder or a name")?;
    let layout = match transfer.environment().kv_cache_layout {
        None | Some(KvCacheLayout::Hnd | KvCacheLayout::Lbhnc) if flags.cpu_attention => {
            PoolLayout::VllmCpu
        }
        Some(other) if flags.cpu_attention => {
            return Err(format!(
                "VLLM_KV_CACHE_LAYOUT is {other}: --attention-backend CPU_ATTN has HND alone"
            )
            .into());
        }
        None | Some(KvCacheLayout::Hnd | KvCacheLayout::Lbhnc) => PoolLayout::Hnd,
        Some(KvCacheLayout::Nhd | KvCacheLayout::Lbnhc) => PoolLayout::Nhd,
        Some(other) => {
            return Err(
                format!("VLLM_KV_CACHE_LAYOUT is {other}: this server has HND and NHD").into()
            );
        }
    };
    let block_size = flags.block_size.unwrap_or(16);
    let names = if flags.names.is_empty() { vec![model.clone()] } else { flags.names };
    Ok(Options {
        folder: models::find(&model)?,
        model,
        names,
        host: flags.host.unwrap_or_else(|| "0.0.0.0".into()),
        port: flags.port.unwrap_or(8000),
        block_size,
        kernel_block_size: flags.kernel_block_size.unwrap_or(block_size),
        ranks: flags.ranks.unwrap_or(1),
        rank_process,
        data_parallel_size,
        data_parallel_here,
        others,
        model_len: flags.model_len,
        requests: flags.requests.unwrap_or(128),
        step_tokens: flags.step_tokens.unwrap_or(512),
        blocks: flags.blocks,
        pool_bytes: flags.pool_bytes,
        dtype: flags.dtype,
        layout,
        prefix_cache: !flags.no_prefix_cache,
        prompt_details: flags.prompt_details,
        most_logprobs: flags.most_logprobs.unwrap_or(20),
        raw_logits: flags.raw_logits,
        spoil: flags.spoil,
        transfer: transfer.is_kv_transfer_instance().then_some(transfer),
        secret: Secret::from_environment()?,
    })
}

/// How many ranks of data parallelism there are, which of them are here, and where the others are.
fn placed(flags: &Flags) -> Result<(usize, Range<usize>, Others)> {
    let size = flags.engines.unwrap_or(1);
    let head = || {
        let address = flags.head_address.clone().unwrap_or_else(|| "127.0.0.1".into());
        (address, flags.head_port.unwrap_or(HEAD_PORT))
    };
    let several = flags.headless || flags.engines_here.is_some() || flags.first_engine.is_some();
    match (flags.engine, flags.headless) {
        (Some(_), _) if several => {
            Err("--data-parallel-rank is for a server of one rank that clients know: leave it out, or --headless, \
                 --data-parallel-size-local and --data-parallel-start-rank"
                .into())
        }
        (Some(rank), _) => Ok((size, rank..rank.saturating_add(1), Others::Apart)),
        (None, true) => {
            let first = flags.first_engine.unwrap_or(0);
            let here = flags.engines_here.unwrap_or(size.saturating_sub(first));
            let (address, port) = head();
            Ok((size, first..first.saturating_add(here), Others::JoinThere(address, port)))
        }
        (None, false) if flags.first_engine.is_some() => {
            Err("--data-parallel-start-rank is for hosts behind a head: add --headless, or leave it out".into())
        }
        (None, false) => {
            let here = flags.engines_here.unwrap_or(size);
            let (address, port) = head();
            let others = if here < size { Others::JoinHere(address, port) } else { Others::Apart };
            Ok((size, 0..here, others))
        }
    }
}

/// Ready when the program was told to end. Told again, it ends at once.
fn stop() -> Result<impl Future<Output = ()> + Send + 'static> {
    use tokio::signal::unix::{SignalKind, signal};
    let (mut interrupt, mut terminate) =
        (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    let (stopped, mut stopping) = tokio::sync::watch::channel(false);
    tokio::spawn(async move {
        for again in [false, true] {
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
            }
            if again {
                std::process::exit(130);
            }
            eprintln!("kvx: waiting for answers to end; once more ends at once");
            stopped.send_replace(true);
        }
    });
    Ok(async move {
        // An error: the task has ended, and with it the program.
        let _ = stopping.wait_for(|stopped| *stopped).await;
    })
}
