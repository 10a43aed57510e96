//! Runs prefill and decode servers, the router, and a single server as processes.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::json;

use super::client::send;
use super::screen::Screen;
use crate::Result;
use crate::child::Child;
use crate::demo::arguments::Arguments;

/// The timeout for a server to listen.
const START: Duration = Duration::from_secs(120);

/// A server and its port.
pub(super) struct Server {
    pub(super) child: Child,
    pub(super) port: u16,
}

/// The policy of a decode server for prompts whose blocks do not arrive (`kv_load_failure_policy`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FailurePolicy {
    /// The server answers with an error.
    Fail,
    /// The server computes the prompt again.
    Recompute,
}

impl FailurePolicy {
    /// Returns vLLM's name of the policy.
    pub(super) fn name(self) -> &'static str {
        match self {
            FailurePolicy::Fail => "fail",
            FailurePolicy::Recompute => "recompute",
        }
    }
}

/// The servers of the demo.
pub(super) struct Fleet {
    pub(super) single: Server,
    pub(super) prefills: Vec<Server>,
    pub(super) decodes: Vec<Server>,
    pub(super) router: Server,
}

impl Fleet {
    /// Starts all servers, which serve the model in `folder`, and waits until they listen.
    pub(super) fn start(
        arguments: &Arguments,
        backend: &str,
        folder: &Path,
        screen: &mut Screen<'_>,
    ) -> Result<Fleet> {
        let sides = Sides::of(arguments, backend, FailurePolicy::Fail);
        let (_, decode_block) = arguments.block_size;
        let single = Role {
            backend: None,
            ranks: 1,
            kernel_block_size: sides.prefill.block_size.min(decode_block),
            ..sides.prefill
        };
        let several = |count: u8, name: &str, role: &Role<'_>| -> Result<Vec<StartingServer>> {
            (1..=count).map(|at| role.start(&format!("{name} {at}"), folder)).collect()
        };
        let single = single.start("the single server", folder)?;
        let prefills = several(arguments.prefillers, "prefill", &sides.prefill)?;
        let decodes = several(arguments.decoders, "decode", &sides.decode)?;
        let mut listening = |starting: Vec<StartingServer>| -> Result<Vec<Server>> {
            starting.into_iter().map(|one| one.listens(screen)).collect()
        };
        let (prefills, decodes) = (listening(prefills)?, listening(decodes)?);
        let single = single.listens(screen)?;
        let router = router(&prefills, &decodes, screen)?;
        Ok(Fleet { single, prefills, decodes, router })
    }
}

/// Starts a prefill and a decode server without a router.
pub(super) fn start_pair(
    arguments: &Arguments,
    backend: &str,
    policy: FailurePolicy,
    folder: &Path,
    screen: &mut Screen<'_>,
) -> Result<(Server, Server)> {
    let sides = Sides::of(arguments, backend, policy);
    let prefill = sides.prefill.start("a prefill", folder)?;
    let decode = Role { corrupt: false, ..sides.decode }.start("a decode", folder)?;
    Ok((prefill.listens(screen)?, decode.listens(screen)?))
}

/// The roles of the two kinds of servers.
struct Sides<'a> {
    prefill: Role<'a>,
    decode: Role<'a>,
}

impl<'a> Sides<'a> {
    fn of(arguments: &Arguments, backend: &'a str, policy: FailurePolicy) -> Self {
        let (prefill, decode) = arguments.block_size;
        let role = |block_size: u16, ranks, corrupt| Role {
            block_size,
            // A block that is larger than the decode's consists of blocks of the decode's size.
            kernel_block_size: block_size.min(decode),
            ranks,
            backend: Some(backend),
            policy,
            corrupt,
        };
        Sides {
            prefill: role(prefill, arguments.tp.0, false),
            decode: role(decode, arguments.tp.1, arguments.corrupt),
        }
    }
}

/// The role of a server.
#[derive(Clone, Copy)]
struct Role<'a> {
    block_size: u16,
    kernel_block_size: u16,
    ranks: u16,
    /// The backend that the server transfers blocks over; `None` if it transfers none.
    backend: Option<&'a str>,
    policy: FailurePolicy,
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
            let config = json!({"kv_connector": "NixlConnector", "kv_role": "kv_both",
                                "kv_load_failure_policy": self.policy.name(),
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

fn router(prefills: &[Server], decodes: &[Server], screen: &mut Screen<'_>) -> Result<Server> {
    let mut command = program()?;
    command.args(["proxy", "--port", "0", "--access-log", "off"]);
    for (hosts, ports, servers) in [
        ("--prefiller-hosts", "--prefiller-ports", prefills),
        ("--decoder-hosts", "--decoder-ports", decodes),
    ] {
        command.arg(hosts).args(servers.iter().map(|_| "127.0.0.1"));
        command.arg(ports).args(servers.iter().map(|server| server.port.to_string()));
    }
    let router = StartingServer::new("the router", command)?.listens(screen)?;
    screen.wait_for("the router finds its servers", || {
        let until = Instant::now() + START;
        while send(router.port, "/ready", None)?.0 != 200 {
            if Instant::now() > until {
                return Err("the router does not find its servers".into());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    })?;
    Ok(router)
}

fn program() -> Result<Command> {
    Ok(Command::new(std::env::current_exe()?))
}

/// A server that does not listen yet.
struct StartingServer(Child);

impl StartingServer {
    fn new(name: &str, command: Command) -> Result<Self> {
        Ok(StartingServer(Child::start_hearing_errors(name, command)?))
    }

    /// Waits until the server listens.
    fn listens(mut self, screen: &mut Screen<'_>) -> Result<Server> {
        let what = format!("{} starts", self.0.name());
        screen.wait_for(&what, move || {
            let until = Instant::now() + START;
            let mut last = String::new();
            loop {
                let line = self.0.receive_line(until.saturating_duration_since(Instant::now()));
                last = line.map_err(|error| format!("{error}; its last line: {last}"))?;
                let announced = last.split_once("listening on http://127.0.0.1:");
                if let Some(port) = announced.and_then(|(_, port)| port.trim().parse().ok()) {
                    return Ok(Server { child: self.0, port });
                }
            }
        })
    }
}
