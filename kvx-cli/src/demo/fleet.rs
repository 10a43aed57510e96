//! Runs prefill and decode servers, the proxy, and a single server as processes.

use std::fs::DirBuilder;
use std::io::Write;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use kvx_paged_llama::model::{Architecture, Dtype};
use kvx_random_model::{ModelSpec, make_model};
use serde_json::json;

use super::client::send;
use super::{Arguments, requests};
use crate::Result;
use crate::child::Child;

/// The timeout for a server to listen.
const START: Duration = Duration::from_secs(120);

/// A server and its port.
pub(super) struct Server {
    pub(super) child: Child,
    pub(super) port: u16,
}

/// The servers of the demo.
pub(super) struct Fleet {
    pub(super) single: Server,
    pub(super) prefills: Vec<Server>,
    pub(super) decodes: Vec<Server>,
    pub(super) proxy: Server,
}

/// Runs the demo over one backend after the other. `Ok` means that every answer equals the single
/// server's.
pub(super) fn run(arguments: &Arguments, out: &mut dyn Write) -> Result<()> {
    end_when_interrupted()?;
    if arguments.model.is_none() {
        writeln!(
            out,
            "The model has random weights, so its answers are meaningless. The demo shows that they are equal."
        )?;
    }
    for backend in &arguments.backend {
        let begun = Instant::now();
        writeln!(
            out,
            "\n{backend}: {} prefill and {} decode servers with a proxy in front, and a single server, are starting.",
            arguments.prefillers, arguments.decoders
        )?;
        let fleet = Fleet::start(arguments, backend, out)?;
        writeln!(
            out,
            "  All of them listen after {:.1} s. The proxy's status page is http://127.0.0.1:{}/",
            begun.elapsed().as_secs_f64(),
            fleet.proxy.port
        )?;
        requests::show(fleet, arguments, begun, out)?;
    }
    Ok(())
}

impl Fleet {
    fn start(arguments: &Arguments, backend: &str, out: &mut dyn Write) -> Result<Fleet> {
        let model = Model::of(arguments)?;
        let (prefill, decode) = arguments.block_size;
        let started = |count: u8, name: &str, role: &Role<'_>| -> Result<Vec<StartingServer>> {
            let one = |at| role.start(&format!("{name} {at}"), &model.folder);
            (1..=count).map(one).collect()
        };
        let of = |block_size: u16, ranks| Role {
            block_size,
            // A block that is larger than the decode's consists of blocks of the decode's size.
            kernel_block_size: block_size.min(decode),
            ranks,
            backend: Some(backend),
            corrupt: false,
        };
        let alone = Role { backend: None, ..of(prefill, 1) };
        let prefills = of(prefill, arguments.tp.0);
        let decodes = Role { corrupt: arguments.corrupt, ..of(decode, arguments.tp.1) };
        let single = alone.start("the single server", &model.folder)?;
        let prefills = started(arguments.prefillers, "prefill", &prefills)?;
        let decodes = started(arguments.decoders, "decode", &decodes)?;
        let single = single.listens(out)?;
        let mut all = |starting: Vec<StartingServer>| -> Result<Vec<Server>> {
            starting.into_iter().map(|one| one.listens(out)).collect()
        };
        let (prefills, decodes) = (all(prefills)?, all(decodes)?);
        let proxy = proxy(&prefills, &decodes, out)?;
        Ok(Fleet { single, prefills, decodes, proxy })
    }
}

/// The served model. A folder that the demo created is removed when this is dropped: servers that
/// listen have mapped the files. A user's own folder stays.
struct Model {
    folder: PathBuf,
}

impl Model {
    fn of(arguments: &Arguments) -> Result<Self> {
        if let Some(folder) = &arguments.model {
            return Ok(Model { folder: folder.clone() });
        }
        let made = ModelSpec {
            architecture: Architecture::Llama,
            layers: 4,
            hidden: 256,
            intermediate: 512,
            heads: 8,
            kv_heads: 4,
            head_dim: 32,
            vocab: 259,
            max_positions: 4096,
            dtype: Dtype::F32,
            tied: false,
            seed: 1,
            init: None,
            shards: 1,
            like: None,
        };
        let mut ours = model_folder();
        let folder = ours.insert(folder_of_ours()?).clone();
        if let Err(why) = make_model(&folder, &made) {
            remove(&mut ours);
            return Err(why.into());
        }
        Ok(Model { folder })
    }
}

impl Drop for Model {
    fn drop(&mut self) {
        remove(&mut model_folder());
    }
}

/// Locks the path of the folder that the demo created, which is removed when this process ends. Its
/// creator holds the lock until the model is complete.
fn model_folder() -> MutexGuard<'static, Option<PathBuf>> {
    static OURS: Mutex<Option<PathBuf>> = Mutex::new(None);
    OURS.lock().unwrap_or_else(PoisonError::into_inner)
}

fn remove(ours: &mut Option<PathBuf>) {
    if let Some(folder) = ours.take() {
        // An error: it has been removed already.
        std::fs::remove_dir_all(folder).ok();
    }
}

/// Removes the folder when a signal ends this process; the kernel kills the servers with it.
fn end_when_interrupted() -> Result<()> {
    use tokio::signal::unix::{SignalKind, signal};
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let [mut interrupt, mut terminate] = {
        let _entered = runtime.enter();
        [signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?]
    };
    let wait = move || {
        let status = runtime.block_on(async {
            tokio::select! {
                _ = interrupt.recv() => 130,
                _ = terminate.recv() => 143,
            }
        });
        // Keep it locked, so that no folder is created after this.
        let mut ours = model_folder();
        remove(&mut ours);
        std::process::exit(status)
    };
    std::thread::Builder::new().name("signals".into()).spawn(wait)?;
    Ok(())
}

/// Creates a folder that no other user can read.
fn folder_of_ours() -> Result<PathBuf> {
    for at in 0..1000 {
        let folder = std::env::temp_dir().join(format!("kvx-demo-{}-{at}", std::process::id()));
        match DirBuilder::new().mode(0o700).create(&folder) {
            Ok(()) => return Ok(folder),
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
            Err(error) => {
                return Err(format!(
                    "{}: {error}; name another folder in TMPDIR",
                    folder.display()
                )
                .into());
            }
        }
    }
    Err(format!("{} is full of the demo's folders: remove them", std::env::temp_dir().display())
        .into())
}

fn program() -> Result<Command> {
    Ok(Command::new(std::env::current_exe()?))
}

/// The role of a server.
#[derive(Clone, Copy)]
struct Role<'a> {
    block_size: u16,
    kernel_block_size: u16,
    ranks: u16,
    /// The backend that the server transfers blocks over; `None` if it transfers none.
    backend: Option<&'a str>,
    corrupt: bool,
}

impl Role<'_> {
    fn start(&self, name: &str, model: &Path) -> Result<StartingServer> {
        let mut command = program()?;
        // The demo's clients send no key.
        command.arg("serve").arg(model).env_remove("VLLM_API_KEY");
        command.args(["--host", "127.0.0.1", "--port", "0", "--enable-prompt-tokens-details"]);
        for (flag, value) in [
            ("--block-size", self.block_size),
            ("--kernel-block-size", self.kernel_block_size),
            ("--tensor-parallel-size", self.ranks),
        ] {
            command.args([flag, &value.to_string()]);
        }
        if let Some(backend) = self.backend {
            let config = json!({"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_load_failure_policy": "fail",
                                "kv_connector_extra_config": {"backends": [backend], "load_timeout": 10}});
            command.args(["--kv-transfer-config", &config.to_string()]);
            command.envs([
                ("VLLM_NIXL_SIDE_CHANNEL_HOST", "127.0.0.1"),
                ("VLLM_NIXL_SIDE_CHANNEL_PORT", "0"),
            ]);
        }
        if self.corrupt {
            command.arg("--spoil-a-moved-block");
        }
        StartingServer::new(name, command)
    }
}

fn proxy(prefills: &[Server], decodes: &[Server], out: &mut dyn Write) -> Result<Server> {
    let mut command = program()?;
    command.args(["proxy", "--port", "0", "--access-log", "off"]);
    for (hosts, ports, servers) in [
        ("--prefiller-hosts", "--prefiller-ports", prefills),
        ("--decoder-hosts", "--decoder-ports", decodes),
    ] {
        command.arg(hosts).args(servers.iter().map(|_| "127.0.0.1"));
        command.arg(ports).args(servers.iter().map(|server| server.port.to_string()));
    }
    let proxy = StartingServer::new("the proxy", command)?.listens(out)?;
    let until = Instant::now() + START;
    while send(proxy.port, "/ready", None)?.0 != 200 {
        if Instant::now() > until {
            return Err("the proxy does not find its servers".into());
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(proxy)
}

/// A server that does not listen yet.
struct StartingServer(Child);

impl StartingServer {
    fn new(name: &str, command: Command) -> Result<Self> {
        Ok(StartingServer(Child::start_hearing_errors(name, command)?))
    }

    /// Waits until the server listens, and prints its address.
    fn listens(mut self, out: &mut dyn Write) -> Result<Server> {
        let until = Instant::now() + START;
        let mut last = String::new();
        loop {
            let line = self.0.receive_line(until.saturating_duration_since(Instant::now()));
            last = line.map_err(|error| format!("{error}; its last line: {last}"))?;
            let said = last.split_once("listening on http://127.0.0.1:");
            if let Some(port) = said.and_then(|(_, port)| port.trim().parse().ok()) {
                writeln!(out, "  {} listens on http://127.0.0.1:{port}", self.0.name())?;
                return Ok(Server { child: self.0, port });
            }
        }
    }
}
