//! `kvx register`: registers an engine that cannot register itself, such as vLLM.

use kvx_proxy::registration::{FleetAddress, register_while_healthy};
use kvx_proxy::{FleetSecret, Role};
use serde_json::{Map, Value};

use crate::Result;

/// The arguments of `kvx register`.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// The fleet in etcd: `etcd://HOST:PORT[,HOST:PORT]/FLEET`, or `etcd+https://` if TLS is built
    /// in. ETCD_AUTH_USERNAME and ETCD_AUTH_PASSWORD name etcd's user, KVX_SECRET_FILE the fleet's
    /// secret.
    #[arg(value_name = "FLEET")]
    fleet: String,
    /// The engine: registered while its `GET /health` answers with 200.
    #[arg(long, value_name = "URL")]
    watch: String,
    /// Its role in the fleet: prefill or decode.
    #[arg(long)]
    role: String,
    /// The engine's URL for routers [default: that of --watch].
    #[arg(long)]
    url: Option<String>,
    /// Its pool [default: the router's first].
    #[arg(long, value_name = "NAME")]
    pool: Option<String>,
    /// Other settings of the instance, as for `POST /instances` of the router: JSON such as
    /// `{"events": "tcp://*:5557", "bootstrap_port": 8998}`.
    #[arg(long, value_name = "JSON")]
    settings: Option<String>,
}

impl Arguments {
    /// Returns the instance as for `POST /instances` of the router.
    fn instance(&self) -> Result<String> {
        let mut instance: Map<String, Value> = match &self.settings {
            Some(settings) => serde_json::from_str(settings)
                .map_err(|error| format!("--settings is not a JSON object: {error}"))?,
            None => Map::new(),
        };
        let role = Role::from_name(&self.role)?;
        let url = self.url.as_ref().unwrap_or(&self.watch);
        instance.insert("role".to_owned(), role.as_str().into());
        instance.insert("url".to_owned(), url.trim_end_matches('/').into());
        if let Some(pool) = &self.pool {
            instance.insert("pool".to_owned(), pool.as_str().into());
        }
        Ok(Value::Object(instance).to_string())
    }
}

/// Runs the command until a signal ends it.
pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let fleet = FleetAddress::new(&arguments.fleet)?.with_environment();
    let instance = arguments.instance()?;
    let secret = kvx::Secret::from_environment()?;
    let secret = secret.map(|secret| FleetSecret::new(*secret.bytes()));
    crate::log_to_standard_error();
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    runtime.block_on(async {
        use tokio::signal::unix::{SignalKind, signal};
        let mut interrupt = signal(SignalKind::interrupt())?;
        let mut terminate = signal(SignalKind::terminate())?;
        let stop = async {
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
            }
        };
        let (watched, secret) = (&arguments.watch, secret.as_ref());
        Ok(register_while_healthy(&fleet, watched, &instance, secret, stop).await?)
    })
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Program {
        #[command(flatten)]
        arguments: Arguments,
    }

    fn instance(line: &[&str]) -> Result<String> {
        let words = ["register", "etcd://a:1/f", "--watch", "http://localhost:8000/"];
        Program::try_parse_from(words.iter().chain(line))?.arguments.instance()
    }

    #[test]
    fn arguments_become_an_instance() {
        assert_eq!(
            instance(&["--role", "prefill"]).unwrap(),
            r#"{"role":"prefill","url":"http://localhost:8000"}"#
        );
        let more = ["--role", "decode", "--url", "http://a:1", "--pool", "p"];
        let settings = ["--settings", r#"{"weight": 2}"#];
        assert_eq!(
            instance(&[&more[..], &settings].concat()).unwrap(),
            r#"{"pool":"p","role":"decode","url":"http://a:1","weight":2}"#
        );
    }

    #[test]
    fn mistakes_are_named() {
        for (line, words) in [
            (&["--role", "router"][..], "prefill"),
            (&["--role", "decode", "--settings", "2"], "--settings is not a JSON object"),
        ] {
            let error = instance(line).unwrap_err().to_string();
            assert!(error.contains(words), "{line:?}: {error}");
        }
    }
}
