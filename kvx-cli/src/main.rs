#![doc = include_str!("../README.md")]

mod backends;
mod bench;
mod bytes;
mod child;
mod config;
mod demo;
mod devices;
mod doctor;
#[cfg(feature = "serve")]
mod make_model;
#[cfg(feature = "mooncake")]
mod mooncake_adapter;
mod nixl;
mod printable;
#[cfg(feature = "connector")]
mod probe;
mod progress;
#[cfg(feature = "proxy")]
mod proxy;
#[cfg(feature = "proxy")]
mod register;
#[cfg(feature = "release")]
mod release;
#[cfg(feature = "proxy")]
mod replay;
mod report;
mod routes;
mod secret;
#[cfg(feature = "serve")]
mod serve;
mod wheels;

use std::fs::File;
use std::io::{IsTerminal as _, LineWriter, Write};
use std::os::fd::AsFd as _;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use kvx::ErrorKind;

/// The result of a command that may fail.
type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Moves KV cache between LLM inference servers: tools for operators.
#[derive(Parser)]
#[command(name = "kvx", version)]
struct Program {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// List all backends, whether each works here, and how to fix those that do not.
    Backends(backends::Arguments),
    /// List the GPUs whose memory kvx can move, or the reason why there are none.
    Devices(devices::Arguments),
    /// Explain what vLLM's KV transfer arguments mean to kvx.
    #[command(disable_help_flag = true)]
    Config {
        /// The arguments of `vllm serve`, unchanged; see `--help`.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
    /// Demonstrate that answers from transferred KV cache equal those of a single server. Show the
    /// cost of transfers, and the error that a client gets when its prefill is killed.
    Demo(demo::Arguments),
    /// Examine this host, and with `--fleet` whether blocks really move through each pair of a fleet:
    /// list problems with reasons and commands.
    Doctor(Box<doctor::Arguments>),
    /// Measure the cost of moving blocks, next to a limit that moves the same blocks without kvx.
    Bench(Box<bench::Arguments>),
    /// List the NIXL installations of this machine, and install kvx in them as backend KVX.
    Nixl(nixl::Arguments),
    /// Build or find the library that connects kvx to the engine in Mooncake's wheel, and print the
    /// variables to set.
    #[cfg(feature = "mooncake")]
    MooncakeAdapter(mooncake_adapter::Arguments),
    /// Query the handshake of a prefill's side channel, and check whether a decode engine is
    /// compatible.
    #[cfg(feature = "connector")]
    Probe(probe::Arguments),
    /// Create a fleet's secret: a file with a random key that only its owner can read.
    Secret(secret::Arguments),
    /// Route requests of clients to a fleet of prefill and decode instances.
    #[cfg(feature = "proxy")]
    Proxy(Box<proxy::Arguments>),
    /// Register an engine, such as vLLM, in a fleet in etcd while it is healthy.
    #[cfg(feature = "proxy")]
    Register(register::Arguments),
    /// Play recorded requests against a fleet, and measure its answers.
    #[cfg(feature = "proxy")]
    Replay(Box<replay::Arguments>),
    /// Serve a model as `vllm serve` does, with KV cache from and to other servers.
    #[cfg(feature = "serve")]
    #[command(disable_help_flag = true)]
    Serve {
        /// The arguments of `vllm serve`, unchanged; see `--help`.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
    /// Write a model with random weights, for tests and measurements.
    #[cfg(feature = "serve")]
    MakeModel(Box<make_model::Arguments>),
    /// Act as the companion program of another `kvx bench --beside`.
    BenchBeside(bench::CompanionArguments),
    /// Own the target's memory for `bench`, `demo` and `backends --routes`.
    #[command(hide = true)]
    BenchTarget(bench::TargetArguments),
    /// Run a rank of a model for `serve`.
    #[cfg(feature = "serve")]
    #[command(hide = true)]
    ServeRank,
}

/// Returns standard output for kvx alone, and redirects descriptor 1 to standard error. Libraries
/// such as UCX log to standard output: their lines would be taken for figures and answers.
fn output_apart() -> std::io::Result<File> {
    // SAFETY: <stdio.h> declares it with this type.
    unsafe extern "C" {
        /// C's standard output, where libraries print. Unless its buffering changes, it keeps the
        /// output to a file or pipe until this process ends.
        static stdout: *mut libc::FILE;
    }
    // SAFETY: this process has not printed through it yet, and the C library allocates its buffer.
    unsafe { libc::setvbuf(stdout, std::ptr::null_mut(), libc::_IOLBF, 0) };
    let output = std::io::stdout().as_fd().try_clone_to_owned()?;
    // SAFETY: plain system call. No object owns the descriptor of standard output, and this process
    // has not written to it.
    match unsafe { libc::dup2(libc::STDERR_FILENO, libc::STDOUT_FILENO) } {
        -1 => Err(std::io::Error::last_os_error()),
        _ => Ok(output.into()),
    }
}

#[cfg(any(feature = "proxy", feature = "serve"))]
fn log_to_standard_error() {
    tracing_subscriber::fmt()
        .with_max_level(tracing_subscriber::filter::LevelFilter::INFO)
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(std::io::stderr)
        .init();
}

fn main() -> ExitCode {
    let command = Program::parse().command;
    #[cfg(feature = "libfabric")]
    if !matches!(command, Command::Backends(_)) {
        // SAFETY: this process has not started a thread. (`backends` reports what other programs
        // get.)
        unsafe { kvx::Libfabric::bound_kept_messages() };
    }
    let out = &mut match output_apart() {
        Ok(output) => LineWriter::new(output),
        Err(error) => {
            eprintln!("kvx: cannot duplicate standard output: {error}");
            return ExitCode::FAILURE;
        }
    };
    let for_people = out.get_ref().is_terminal();
    let registry = kvx::registry();
    let done = match command {
        Command::Backends(arguments) => backends::run(&arguments, &registry, out),
        Command::Bench(arguments) => bench::run(&arguments, &registry, out, for_people),
        Command::BenchBeside(arguments) => bench::answer(&arguments, &registry, out),
        Command::BenchTarget(arguments) => bench::serve(&arguments, &registry, out),
        Command::Config { args } => return config::run(args, &registry, out),
        Command::Doctor(arguments) => match doctor::run(&arguments, &registry, out) {
            Ok(status) => return status,
            Err(error) => Err(error),
        },
        Command::Devices(arguments) => devices::run(&arguments, out),
        #[cfg(feature = "serve")]
        Command::MakeModel(arguments) => make_model::run(&arguments, out),
        #[cfg(feature = "serve")]
        Command::Serve { args } => serve::run(args, out),
        #[cfg(feature = "serve")]
        Command::ServeRank => serve::run_rank(),
        #[cfg(feature = "mooncake")]
        Command::MooncakeAdapter(arguments) => mooncake_adapter::run(&arguments, out),
        Command::Nixl(arguments) => nixl::run(&arguments, out),
        Command::Demo(arguments) => demo::run(&arguments, &registry, out, for_people),
        #[cfg(feature = "connector")]
        Command::Probe(arguments) => match probe::run(&arguments, out) {
            Ok(status) => return status,
            Err(error) => Err(error),
        },
        #[cfg(feature = "proxy")]
        Command::Proxy(arguments) => proxy::run(&arguments, out),
        #[cfg(feature = "proxy")]
        Command::Register(arguments) => register::run(&arguments),
        #[cfg(feature = "proxy")]
        Command::Replay(arguments) => replay::run(&arguments, out),
        Command::Secret(arguments) => secret::run(&arguments, out),
    };
    match done.and_then(|()| Ok(out.flush()?)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if closed_by_reader(&*error) => ExitCode::SUCCESS,
        Err(error) if names_a_backend(&*error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("kvx: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Returns true for the registry's three errors about an unusable backend, which are printed
/// without a prefix.
fn names_a_backend(error: &(dyn std::error::Error + 'static)) -> bool {
    let kind = error.downcast_ref::<kvx::Error>().map(kvx::Error::kind);
    matches!(
        kind,
        Some(ErrorKind::UnknownBackend | ErrorKind::NotCompiled | ErrorKind::Unavailable)
    )
}

/// Returns true if the reader of the output, such as `head`, has closed it.
fn closed_by_reader(error: &(dyn std::error::Error + 'static)) -> bool {
    let io = error.downcast_ref::<std::io::Error>();
    io.is_some_and(|error| error.kind() == std::io::ErrorKind::BrokenPipe)
}
