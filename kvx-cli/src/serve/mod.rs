//! `kvx serve MODEL`: the example server, with the command lines of `vllm serve`.

mod flags;
mod models;
mod registration;
mod security;

use std::io::Write;
use std::ops::Range;
use std::os::unix::process::CommandExt as _;
use std::process::Command;

use kvx::Secret;
use kvx::config::{KvCacheLayout, KvTransferConfig, Surroundings};
use kvx_paged_llama::events::EventsConfig;
use kvx_paged_llama::http::Recorder;
use kvx_paged_llama::model::{Dtype, PoolLayout};
use kvx_paged_llama::rank;
use kvx_paged_llama::server::{self, Options, OtherEngines, ServerInfo};

use self::flags::Flags;
use crate::{Result, bytes};

/// Variables without effect here, and why.
const VARIABLES_WITHOUT_EFFECT: &[(&str, &str)] = &[
    ("CUDA_VISIBLE_DEVICES", "this server computes on the CPU"),
    ("HIP_VISIBLE_DEVICES", "this server computes on the CPU"),
];

/// Returns the command that runs this program as a rank of a model, even if its file has been
/// replaced.
fn rank_process() -> Command {
    let mut command = Command::new("/proc/self/exe");
    command.arg0("kvx").arg("serve-rank");
    command
}

/// Runs a rank of a model, in a process that a server has started.
pub(crate) fn run_rank() -> Result<()> {
    crate::log_to_standard_error();
    Ok(rank::run()?)
}

/// Runs the command with the arguments after `serve`.
pub(crate) fn run(arguments: Vec<String>, out: &mut dyn Write) -> Result<()> {
    // Even if a variable is invalid: the help names the variables.
    if arguments.iter().any(|word| word == "-h" || word == "--help") {
        return Ok(writeln!(out, "{}", flags::help())?);
    }
    let surroundings = Surroundings::of_process();
    let (transfer, rest) = KvTransferConfig::from_arguments(arguments, &surroundings)?;
    let flags = Flags::parse_arguments(rest)?;
    crate::log_to_standard_error();
    for note in &flags.notes {
        eprintln!("kvx: {note}");
    }
    security::check_variables(|name| std::env::var_os(name).is_some())?;
    for (name, reason) in VARIABLES_WITHOUT_EFFECT.iter().chain(security::WITHOUT_EFFECT) {
        if std::env::var_os(name).is_some() {
            eprintln!("kvx: {name} has no effect: {reason}");
        }
    }
    transfer.log_warnings_once();
    let options = options(flags, transfer)?;
    let recorder = Recorder::install(&options.names[0])?;
    eprintln!("kvx: reading {}", options.folder.display());
    let name = options.names[0].clone();
    let started = move |started: &ServerInfo| {
        eprintln!(
            "kvx: {name}, up to {} tokens, a KV cache of {} blocks ({})",
            started.model_len,
            started.blocks,
            bytes::show(started.pool_bytes as u64)
        );
        match started.address {
            Some(address) => eprintln!("kvx: listening on http://{address}"),
            None => eprintln!("kvx: joined the head, which receives the requests for this host"),
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
    let (data_parallel_here, others) = data_parallel(&flags)?;
    let secret = Secret::from_environment()?;
    let registration = registration::registration(&flags, &transfer, secret.as_ref())?;
    let transfer = match &flags.data_parallel_address {
        Some(host) => transfer.with_first_rank_at(host),
        None => transfer,
    };
    let cpu_attention = flags.cpu_attention();
    let model = flags.models.into_iter().next();
    let model = model.ok_or("no model is given: write kvx serve MODEL, a folder or a name")?;
    let layout = match transfer.environment().kv_cache_layout {
        None | Some(KvCacheLayout::Hnd | KvCacheLayout::Lbhnc) if cpu_attention => {
            PoolLayout::VllmCpu
        }
        Some(other) if cpu_attention => {
            return Err(format!(
                "VLLM_KV_CACHE_LAYOUT is {other}: --attention-backend CPU_ATTN supports HND only"
            )
            .into());
        }
        None | Some(KvCacheLayout::Hnd | KvCacheLayout::Lbhnc) => PoolLayout::Hnd,
        Some(KvCacheLayout::Nhd | KvCacheLayout::Lbnhc) => PoolLayout::Nhd,
        Some(other) => {
            return Err(format!(
                "VLLM_KV_CACHE_LAYOUT is {other}: this server supports HND and NHD"
            )
            .into());
        }
    };
    let keys = security::keys(&flags.api_key, std::env::var_os(security::API_KEY).as_deref())?;
    let mut names = flags.served_model_name;
    if names.is_empty() {
        names.push(model.clone());
    }
    let mut dtypes = [Dtype::F32, Dtype::Bf16].into_iter();
    Ok(Options {
        folder: models::find(&model)?,
        model,
        names,
        host: flags.host,
        port: flags.port,
        keys,
        block_size: flags.block_size,
        kernel_block_size: flags.kernel_block_size.unwrap_or(flags.block_size),
        ranks: flags.tensor_parallel_size,
        rank_process,
        data_parallel_size: flags.data_parallel_size,
        data_parallel_here,
        others,
        model_len: flags.max_model_len,
        requests: flags.max_num_seqs,
        step_tokens: flags.max_num_batched_tokens,
        blocks: flags.num_gpu_blocks_override,
        pool_bytes: flags.kv_cache_memory_bytes,
        dtype: dtypes.find(|dtype| dtype.name() == flags.kv_cache_dtype),
        layout,
        prefix_cache: !flags.no_enable_prefix_caching,
        prompt_details: flags.enable_prompt_tokens_details,
        most_logprobs: flags.max_logprobs,
        raw_logits: flags.logprobs_mode == "raw_logits",
        spoil: flags.spoil_a_moved_block,
        events: flags.kv_events_config.filter(EventsConfig::is_on),
        transfer: transfer.is_kv_transfer_instance().then_some(transfer),
        secret,
        registration,
    })
}

/// Returns the data parallel ranks on this host, and the location of the others.
fn data_parallel(flags: &Flags) -> Result<(Range<usize>, OtherEngines)> {
    let size = flags.data_parallel_size;
    let head = || {
        let address = flags.data_parallel_address.clone();
        (address.unwrap_or_else(|| "127.0.0.1".into()), flags.data_parallel_rpc_port)
    };
    let (local, start) = (flags.data_parallel_size_local, flags.data_parallel_start_rank);
    match (flags.data_parallel_rank, flags.headless) {
        (Some(_), headless) if headless || local.is_some() || start.is_some() => {
            Err("--data-parallel-rank starts an independent server of one rank: leave it out, or \
                 leave out --headless, --data-parallel-size-local and --data-parallel-start-rank"
                .into())
        }
        (Some(rank), _) => Ok((rank..rank.saturating_add(1), OtherEngines::Independent)),
        (None, true) => {
            let first = start.unwrap_or(0);
            let here = local.unwrap_or(size.saturating_sub(first));
            let (address, port) = head();
            Ok((first..first.saturating_add(here), OtherEngines::JoinThere(address, port)))
        }
        (None, false) if start.is_some() => {
            Err("--data-parallel-start-rank is for hosts behind a head: add --headless, or leave it out".into())
        }
        (None, false) => {
            let here = local.unwrap_or(size);
            let (address, port) = head();
            let others = if here < size { OtherEngines::JoinHere(address, port) } else { OtherEngines::Independent };
            Ok((0..here, others))
        }
    }
}

/// Returns a future that is ready after the first signal to end. The second signal exits at once.
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
            eprintln!("kvx: waiting for answers to end; a second signal exits at once");
            stopped.send_replace(true);
        }
    });
    Ok(async move {
        // An error: the task has ended, and with it the program.
        let _ = stopping.wait_for(|stopped| *stopped).await;
    })
}
