//! `kvx config ARGS…`: explains what vLLM's arguments mean to kvx.

use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

use kvx::config::{ConfigReport, ConnectorKind, KvTransferConfig, Opening, Surroundings};
use kvx::connector::nixl::BACKEND;
use kvx::{BackendStatus, Options, Registry, Result, Secret};
use kvx_core::backend::{AutoOpen, Factory};

const USAGE: &str = "\
Explains what vLLM's KV transfer arguments mean to kvx, in this environment and on this machine.

Usage: kvx config [--json] ARGS...

ARGS are those of `vllm serve`, unchanged: --kv-transfer-config JSON, --kv-transfer-config.KEY VALUE,
--kv-transfer-config.KEY+ ITEM. The parallel sizes are read too; all others are listed as ignored.
Prints the merged JSON, every value and its source, the settings that follow (without a list of backends also
whether vLLM peers can reach this engine), the backends that it would open, and the warnings.

  --json    print JSON
  --help    print this help

Exit status: 0, 1 if the answer could not be written, or 2 if the arguments are not valid.";

/// Runs the command with the arguments after `config`.
pub(crate) fn run(args: Vec<String>, registry: &Registry, out: &mut dyn Write) -> ExitCode {
    let said = if matches!(args.first().map(String::as_str), Some("--help" | "-h")) {
        writeln!(out, "{USAGE}")
    } else {
        match output(args, &Surroundings::of_process().gpu(gpu_present()), registry) {
            Ok(text) => writeln!(out, "{}", text.trim_end()),
            Err(error) => {
                eprintln!("kvx: {error}");
                return ExitCode::from(2);
            }
        }
    };
    match said {
        // The reader of the output, such as `head`, has closed it.
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            eprintln!("kvx: {error}");
            ExitCode::FAILURE
        }
        _ => ExitCode::SUCCESS,
    }
}

fn output(
    mut args: Vec<String>,
    surroundings: &Surroundings,
    registry: &Registry,
) -> Result<String> {
    let json = args.first().is_some_and(|first| first == "--json");
    if json {
        args.remove(0);
    }
    let (config, rest) = KvTransferConfig::from_arguments(args, surroundings)?;
    let report = ConfigReport::new(&config, &rest)
        .openings(openings(&config, registry)?)
        .also("secret", secret());
    Ok(if json { format!("{:#}", report.to_json()) } else { report.to_string() })
}

/// Describes which peers an engine accepts here; never contains the secret itself.
fn secret() -> String {
    match Secret::from_environment() {
        Ok(Some(_)) => {
            "KVX_SECRET_FILE names one: SHM, TCP, UCX and LIBFABRIC refuse peers without it".into()
        }
        Ok(None) => {
            "none: every peer with this engine's metadata is served; `kvx secret FILE` makes one, \
             and KVX_SECRET_FILE names it"
                .into()
        }
        Err(error) => error.to_string(),
    }
}

/// Returns true if a kernel driver's control node exists. The GPU crates determine which memory can
/// be transferred.
fn gpu_present() -> bool {
    ["/dev/nvidiactl", "/dev/kfd"].iter().any(|node| Path::new(node).exists())
}

/// Returns the named backends, or those that are opened without a list, with their status on this
/// machine.
fn openings(config: &KvTransferConfig, registry: &Registry) -> Result<Vec<Opening>> {
    let options = Options::from_json(config.extra().clone());
    if let Some(names) = config.backends()? {
        return Ok(names.iter().map(|name| named(name, config, registry, &options)).collect());
    }
    if config.connector() == Some(&ConnectorKind::Mooncake) {
        return Ok(vec![named("MOONCAKE", config, registry, &options)]);
    }
    let unnamed = |factory: &dyn Factory| {
        let available = factory.available(&options).ok()?;
        let opens = match factory.placement().auto_open {
            AutoOpen::Open => true,
            AutoOpen::OpenWithRdma => available.rdma,
            AutoOpen::Skip => false,
        };
        opens.then(|| Opening { name: factory.name().to_owned(), note: available.version })
    };
    Ok(registry.factories().iter().filter_map(|factory| unnamed(&**factory)).collect())
}

fn named(
    written: &str,
    config: &KvTransferConfig,
    registry: &Registry,
    options: &Options,
) -> Opening {
    if written.eq_ignore_ascii_case(BACKEND) {
        let note = "kvx in the NIXL of vLLM peers: they load from this engine over the other named backends, or in kvx's own order";
        return Opening { name: BACKEND.to_owned(), note: note.to_owned() };
    }
    let (name, standing) = match registry.status(written, options) {
        Ok(found) => found,
        Err(error) => return Opening { name: written.to_owned(), note: error.to_string() },
    };
    let mut notes = Vec::new();
    if !name.eq_ignore_ascii_case(written) {
        notes.push(format!("written as {written}"));
    }
    match standing {
        BackendStatus::Available(available) => notes.push(available.version),
        _ => notes.extend(registry.require(written, options).err().map(|error| error.to_string())),
    }
    let nixl =
        matches!(config.connector(), Some(ConnectorKind::NixlPull | ConnectorKind::NixlPush));
    let speaker =
        |factory: &&std::sync::Arc<dyn Factory>| factory.placement().speaks_for.contains(&name);
    if let Some(speaker) = registry.factories().iter().find(speaker).filter(|_| nixl) {
        notes.push(format!("toward vLLM peers through {}", speaker.name()));
    }
    Opening { name: name.to_owned(), note: notes.join("; ") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvx_core::backend::BackendName;

    fn lines(args: &[&str]) -> Result<String> {
        let known = |name, aliases, feature| BackendName { name, aliases, feature };
        let registry = Registry::new().with_names(&[
            known("UCX", &[], Some("ucx")),
            known("RIXL", &["NIXL"], None),
            known("TCP", &[], Some("tcp")),
        ]);
        output(
            args.iter().map(|arg| (*arg).to_owned()).collect(),
            &Surroundings::default(),
            &registry,
        )
    }

    #[test]
    fn each_named_backend_reports_its_status() {
        let text =
            lines(&["--kv-transfer-config.kv_connector_extra_config.backends+=ucx,nixl,UXC,kvx"])
                .unwrap();
        assert!(
            text.contains("\n  UCX: backend UCX is not in this build: enable feature \"ucx\"\n"),
            "{text}"
        );
        assert!(
            text.contains("\n  RIXL: written as nixl; backend RIXL is not in this release"),
            "{text}"
        );
        assert!(text.contains("\n  UXC: backend \"UXC\" is unknown; did you mean UCX?"), "{text}");
        assert!(text.contains("\n  KVX: kvx in the NIXL of vLLM peers"), "{text}");
    }

    #[test]
    fn json_is_printed_on_request() {
        let text = lines(&["--json", "--kv-transfer-config.kv_role=kv_both"]).unwrap();
        assert!(text.starts_with("{\n") && text.contains("\"kv_role\": \"kv_both\""), "{text}");
    }

    /// The report about vLLM peers without a list matches the backends of this build.
    #[test]
    fn without_a_list_rixl_is_not_opened() {
        let line = [
            "--kv-transfer-config.kv_connector=NixlConnector",
            "--kv-transfer-config.kv_role=kv_both",
        ];
        let (config, _) = KvTransferConfig::from_arguments(line, &Surroundings::default()).unwrap();
        let opened = openings(&config, &kvx::registry()).unwrap();
        assert!(opened.iter().all(|opening| opening.name != "RIXL"), "{opened:?}");
    }

    #[test]
    fn a_mistake_is_an_error_that_names_the_key() {
        let error = lines(&["--kv-transfer-config.kv_rol=kv_both"]).unwrap_err().to_string();
        assert!(error.contains("did you mean kv_role?"), "{error}");
    }
}
