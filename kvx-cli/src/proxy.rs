//! `kvx proxy`: the router of a prefill/decode fleet.

use std::fs::File;
use std::io::{LineWriter, Read as _, Write as _};
use std::path::PathBuf;

use kvx_proxy::registration::FleetAddress;
use kvx_proxy::{
    AccessLog, Choice, Fallback, Finding, FleetSecret, Pool, PoolConnector, Setup, parse_size,
};

use crate::Result;

mod kubernetes;

/// The arguments of `kvx proxy`: those of vLLM's toy proxies, and a file for all settings.
#[derive(Clone, clap::Args)]
pub(crate) struct Arguments {
    /// A TOML file with all settings; flags override it. SIGHUP reloads it.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// The address to listen on [default: 127.0.0.1].
    #[arg(long)]
    host: Option<String>,
    /// The port to listen on; 0 takes any free port [default: 8000].
    #[arg(long)]
    port: Option<u16>,
    /// Hosts of prefill instances [default: localhost].
    #[arg(long, alias = "prefiller-host", num_args = 1.., value_name = "HOST")]
    prefiller_hosts: Vec<String>,
    /// Ports of prefill instances, one for each host [default: 8100].
    #[arg(long, alias = "prefiller-port", num_args = 1.., value_name = "PORT")]
    prefiller_ports: Vec<u16>,
    /// Hosts of decode instances [default: localhost].
    #[arg(long, alias = "decoder-host", num_args = 1.., value_name = "HOST")]
    decoder_hosts: Vec<String>,
    /// Ports of decode instances, one for each host [default: 8200].
    #[arg(long, alias = "decoder-port", num_args = 1.., value_name = "PORT")]
    decoder_ports: Vec<u16>,
    /// A prefill instance, and the port of its Mooncake bootstrap server, or `none`. Several by DNS:
    /// `dns+http://HOST:PORT` for each address, `dnssrv+http://NAME` for each SRV record.
    #[arg(long, num_args = 1..=2, value_names = ["URL", "BOOTSTRAP_PORT"])]
    prefill: Vec<String>,
    /// A decode instance, or several by DNS.
    #[arg(long, value_name = "URL")]
    decode: Vec<String>,
    /// Find instances that have registered themselves in etcd, in both roles:
    /// `etcd://HOST:PORT[,HOST:PORT]/FLEET`. In a fleet with a secret, signed ones only.
    #[arg(long, value_name = "FLEET")]
    discovery_etcd: Option<String>,
    #[command(flatten)]
    kubernetes: kubernetes::Flags,
    /// NixlConnector, NixlPullConnector, NixlPushConnector or MooncakeConnector, for pools that
    /// name none.
    #[arg(long, value_name = "NAME")]
    connector: Option<String>,
    /// The policy for choosing instances: cached, least-tokens, round-robin or prefix.
    #[arg(long, value_name = "HOW")]
    choice: Option<String>,
    /// The endpoint where an instance publishes the events of its prefix cache, by which `cached`
    /// knows it: `10.0.0.1:8100=tcp://10.0.0.1:5557`.
    #[arg(long, value_name = "HOST:PORT=ENDPOINT")]
    events: Vec<String>,
    /// The endpoint where the instance replays earlier events.
    #[arg(long, value_name = "HOST:PORT=ENDPOINT")]
    events_replay: Vec<String>,
    /// The instances that compute prompts while no prefill instance is up: off for none (such
    /// requests get 503), or decode, for at most a tenth of the decode instances' load.
    #[arg(long, value_name = "WHO")]
    fallback: Option<String>,
    /// The backends over which to release the blocks of given-up requests at their prefills, or
    /// `off` [default: SHM TCP]. RIXL also reaches vLLM, over NIXL.
    #[arg(long, num_args = 1.., value_name = "BACKEND")]
    release: Vec<String>,
    /// Send prompts of fewer tokens (estimated) to decode alone.
    #[arg(long, value_name = "TOKENS")]
    local_below: Option<u64>,
    /// The access log, one JSON line per request: stdout, off, or a file.
    #[arg(long, value_name = "FILE")]
    access_log: Option<String>,
    /// Record the requests for `kvx replay`: times, lengths, outcomes and keyed hashes of prompts,
    /// without their text.
    #[arg(long, value_name = "FILE")]
    record: Option<PathBuf>,
    /// The most bytes of the recording, such as 64MiB [default: 256MiB].
    #[arg(long, value_name = "SIZE")]
    record_size: Option<String>,
    /// A file with one key per line; clients then need one of them.
    #[arg(long, value_name = "FILE")]
    api_key_file: Option<PathBuf>,
    /// The certificate chain for clients, PEM.
    #[arg(long, value_name = "FILE")]
    tls_cert: Option<PathBuf>,
    /// The private key of the certificate, PEM.
    #[arg(long, value_name = "FILE")]
    tls_key: Option<PathBuf>,
    /// Explain the configuration and report what would not work now, without serving. Exit with 1
    /// if something would not work.
    #[arg(long)]
    check: bool,
    /// Send the same prompts to two endpoints: `http://HOST:PORT`, or `http://HOST:PORT/BASE` for
    /// one that answers at `BASE/v1`; https if TLS is built in. Token ids are compared where both
    /// return them, and the same error of both counts as the same answer. Exit with 1 if an answer
    /// differs or is missing.
    #[arg(long, num_args = 2, value_names = ["URL", "URL"], conflicts_with_all = ["check", "config"])]
    compare: Vec<String>,
    /// The model for `--compare` [default: the first model of the first endpoint].
    #[arg(long, requires = "compare")]
    model: Option<String>,
    /// The number of tokens of each answer of `--compare`.
    #[arg(long, default_value_t = 24, requires = "compare")]
    tokens: u32,
    /// Explain where the router would send a request now, and why, without sending it: the JSON
    /// body of a completion or a chat completion, in a file, as text, or - for standard input.
    /// Needs the router's ADMIN_API_KEY in the environment.
    #[arg(long, value_name = "REQUEST", conflicts_with_all = ["check", "config", "compare"])]
    explain: Option<String>,
    /// The router for `--explain`.
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:8000", requires = "explain")]
    router: String,
}

impl Arguments {
    fn setup(&self, is_reload: bool) -> Result<Setup> {
        let mut setup = match &self.config {
            Some(path) => Setup::from_file(path)?,
            None => Setup::default(),
        }
        .with_environment();
        let secret = kvx::Secret::from_environment()?;
        setup.fleet_secret = secret.as_ref().map(|secret| FleetSecret::new(*secret.bytes()));
        let hosts = !(self.prefiller_hosts.is_empty()
            && self.prefiller_ports.is_empty()
            && self.decoder_hosts.is_empty()
            && self.decoder_ports.is_empty());
        let urls = !(self.prefill.is_empty() && self.decode.is_empty());
        if hosts && urls {
            let words = "--prefill and --decode cannot be combined with --prefiller-hosts and --decoder-hosts: use \
                         one way or the other";
            return Err(words.into());
        }
        let finds_all = self.discovery_etcd.is_some() || self.kubernetes.is_set();
        if urls {
            setup.pools = vec![Pool::from_urls(&self.prefill, &self.decode)?];
        } else if hosts || (self.config.is_none() && !finds_all) {
            setup.pools = vec![Pool::from_hosts_and_ports(
                &self.prefiller_hosts,
                &self.prefiller_ports,
                &self.decoder_hosts,
                &self.decoder_ports,
            )?];
        }
        if let Some(fleet) = &self.discovery_etcd {
            setup.discovery.etcd = Some(FleetAddress::new(fleet)?.with_environment());
        }
        self.kubernetes.apply(&mut setup)?;
        for (flag, all) in [("--events", &self.events), ("--events-replay", &self.events_replay)] {
            for one in all {
                match set_events(&mut setup, flag, one) {
                    // The new file may lack the instance on purpose.
                    Err(NoEvents::NoInstance(why)) if is_reload => eprintln!("kvx: {why}"),
                    set => set?,
                }
            }
        }
        setup.host = self.host.clone().unwrap_or(setup.host);
        setup.port = self.port.unwrap_or(setup.port);
        if let Some(name) = &self.connector {
            setup.connector = PoolConnector::from_name(name)?;
        }
        if let Some(name) = &self.choice {
            setup.choice = Choice::from_name(name)?;
        }
        if let Some(name) = &self.fallback {
            setup.fallback = Fallback::from_name(name)?;
        }
        setup.local_below = self.local_below.unwrap_or(setup.local_below);
        if let Some(name) = &self.access_log {
            setup.access_log = AccessLog::from_name(name);
        }
        setup.record = self.record.clone().or(setup.record);
        if let Some(size) = &self.record_size {
            setup.record_size = parse_size(size)?;
        }
        setup.api_key_file = self.api_key_file.clone().or(setup.api_key_file);
        setup.tls_cert = self.tls_cert.clone().or(setup.tls_cert);
        setup.tls_key = self.tls_key.clone().or(setup.tls_key);
        match &self.release[..] {
            [] => {}
            [off] if off == "off" => setup.release.clear(),
            names if names.iter().any(|name| name == "off") => {
                return Err("--release: name backends or off, not both".into());
            }
            names => setup.release = names.to_vec(),
        }
        #[cfg(feature = "release")]
        {
            setup.releaser = crate::release::releaser(&setup.release, secret)?;
        }
        Ok(setup)
    }
}

/// Why the endpoint of an instance's events was not set.
enum NoEvents {
    NoInstance(String),
    Invalid(String),
}

impl From<NoEvents> for Box<dyn std::error::Error> {
    fn from(error: NoEvents) -> Self {
        let (NoEvents::NoInstance(why) | NoEvents::Invalid(why)) = error;
        why.into()
    }
}

/// Sets the endpoint of an instance's events, or of their replay, in all its roles.
fn set_events(setup: &mut Setup, flag: &str, one: &str) -> std::result::Result<(), NoEvents> {
    let Some((name, endpoint)) = one.split_once('=') else {
        let why = format!("{flag} {one}: write HOST:PORT=tcp://HOST:PORT");
        return Err(NoEvents::Invalid(why));
    };
    let pools = setup.pools.iter_mut();
    let instances = pools.flat_map(|pool| pool.prefill.iter_mut().chain(&mut pool.decode));
    let mut count = 0;
    for instance in instances.filter(|instance| instance.name() == name) {
        let set = match flag {
            "--events" => instance.set_events(Some(endpoint), None),
            _ => instance.set_events(None, Some(endpoint)),
        };
        set.map_err(|error| NoEvents::Invalid(error.to_string()))?;
        count += 1;
    }
    match count {
        0 => {
            let why = format!("{flag} {one}: no instance is {name}; --check lists them");
            Err(NoEvents::NoInstance(why))
        }
        _ => Ok(()),
    }
}

/// Runs the command.
pub(crate) fn run(arguments: &Arguments, out: &mut LineWriter<File>) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    if let [one, other] = &arguments.compare[..] {
        return runtime.block_on(compare(arguments, [one, other], out));
    }
    if let Some(request) = &arguments.explain {
        let (request, key) = (text_of(request)?, key("ADMIN_API_KEY"));
        let explained = kvx_proxy::explain(&arguments.router, &request, key.as_deref());
        return Ok(write!(out, "{}", runtime.block_on(explained)?)?);
    }
    let setup = arguments.setup(false)?;
    if arguments.check {
        return check(&runtime.block_on(kvx_proxy::check(setup)), out);
    }
    crate::log_to_standard_error();
    let scheme = if setup.tls_cert.is_some() { "https" } else { "http" };
    let output = Box::new(out.get_ref().try_clone()?);
    let arguments = arguments.clone();
    let reread =
        move || arguments.setup(true).map_err(|error| kvx_proxy::Error::from(error.to_string()));
    let started = |address| eprintln!("kvx: listening on {scheme}://{address}");
    let served = runtime.block_on(kvx_proxy::serve(setup, reread, output, started));
    // A name lookup, or a write to a log without a reader, may still be in progress.
    runtime.shutdown_timeout(std::time::Duration::from_secs(1));
    Ok(served?)
}

/// Returns the key in this variable.
fn key(variable: &str) -> Option<String> {
    std::env::var(variable).ok().filter(|key| !key.is_empty())
}

/// Returns the text of a request that is given as JSON, as a file, or on standard input.
fn text_of(request: &str) -> Result<String> {
    if request.trim_start().starts_with('{') {
        return Ok(request.to_owned());
    }
    if request == "-" {
        let mut text = String::new();
        std::io::stdin().read_to_string(&mut text)?;
        return Ok(text);
    }
    std::fs::read_to_string(request)
        .map_err(|error| format!("cannot read the request {request}: {error}").into())
}

fn check(found: &[Finding], out: &mut LineWriter<File>) -> Result<()> {
    let mut failures = 0;
    for finding in found {
        match finding {
            Finding::Means(words) => writeln!(out, "{words}")?,
            Finding::Beware(words) => writeln!(out, "beware: {words}")?,
            Finding::Fails(words) => {
                failures += 1;
                writeln!(out, "fails: {words}")?;
            }
        }
    }
    match failures {
        0 => Ok(()),
        1 => Err("one thing would not work".into()),
        _ => Err(format!("{failures} things would not work").into()),
    }
}

async fn compare(
    arguments: &Arguments,
    urls: [&String; 2],
    out: &mut LineWriter<File>,
) -> Result<()> {
    let key = key("OPENAI_API_KEY");
    let mut tally = Tally::default();
    let mut lines = Vec::new();
    let each = |compared: &kvx_proxy::Comparison| tally.add(compared, urls, &mut lines);
    let urls_ = [urls[0].as_str(), urls[1].as_str()];
    let compared = kvx_proxy::compare(
        urls_,
        arguments.model.as_deref(),
        arguments.tokens,
        key.as_deref(),
        each,
    )
    .await;
    for line in &lines {
        writeln!(out, "{line}")?;
    }
    compared?;
    let Tally { prompts, different, errors, by_token_ids } = tally;
    if different > 0 {
        return Err(format!("{different} of {prompts} answers differ").into());
    }
    if errors == prompts {
        return Err("both endpoints answered every prompt with the same error".into());
    }
    let mut what = vec![format!("{prompts} prompts, the same answers")];
    if by_token_ids > 0 {
        what.push(format!("{by_token_ids} compared by token ids"));
    }
    if errors > 0 {
        what.push(format!("{errors} of them the same error"));
    }
    Ok(writeln!(out, "{}", what.join(", "))?)
}

/// The results of a comparison.
#[derive(Default)]
struct Tally {
    prompts: u32,
    different: u32,
    /// Prompts to which both endpoints answered with the same error.
    errors: u32,
    by_token_ids: u32,
}

impl Tally {
    /// Adds the answers to a prompt, and the lines about them.
    fn add(
        &mut self,
        compared: &kvx_proxy::Comparison,
        urls: [&String; 2],
        lines: &mut Vec<String>,
    ) {
        let prompt = &compared.prompt;
        self.prompts += 1;
        self.by_token_ids += u32::from(compared.token_ids().is_some());
        if let (true, [Err(error), _]) = (compared.is_same_error(), &compared.answers) {
            self.errors += 1;
            lines.push(format!("same error {prompt:?}: {error}"));
            return;
        }
        if compared.is_same() {
            lines.push(format!("same       {prompt:?}"));
            return;
        }
        self.different += 1;
        lines.push(format!("DIFFERENT  {prompt:?}"));
        for (url, answer) in urls.iter().zip(&compared.answers) {
            lines.push(match answer {
                Ok(answer) => format!("  {url}: {:?}", answer.text),
                Err(why) => format!("  {url}: no answer: {why}"),
            });
        }
        if let Some([one, other]) = compared.token_ids()
            && one != other
        {
            let at = one.iter().zip(other).take_while(|(one, other)| one == other).count();
            lines.push(format!("  the token ids differ from token {} on", at + 1));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Program {
        #[command(flatten)]
        arguments: Arguments,
    }

    fn setup(line: &str) -> Result<Setup> {
        let words = std::iter::once("proxy").chain(line.split_ascii_whitespace());
        Program::try_parse_from(words)?.arguments.setup(false)
    }

    fn names(setup: &Setup) -> (Vec<&str>, Vec<&str>) {
        let pool = &setup.pools[0];
        let names = |of: &'_ [kvx_proxy::InstanceSetup]| {
            of.iter().map(|one| one.name().to_owned()).collect::<Vec<_>>()
        };
        let leak = |names: Vec<String>| names.into_iter().map(|name| &*name.leak()).collect();
        (leak(names(&pool.prefill)), leak(names(&pool.decode)))
    }

    #[test]
    fn the_command_lines_of_vllms_guides_work() {
        let same_host = setup(
            "--port 8192 --prefiller-hosts localhost --prefiller-ports 8100 --decoder-hosts localhost --decoder-ports 8200",
        )
        .unwrap();
        assert_eq!((same_host.port, &*same_host.host), (8192, "127.0.0.1"));
        assert_eq!(names(&same_host), (vec!["localhost:8100"], vec!["localhost:8200"]));
        let four_hosts = setup(
            "--port 8192 --prefiller-hosts 10.0.0.1 10.0.0.2 --prefiller-ports 8000 8000 \
             --decoder-hosts 10.0.0.3 10.0.0.4 --decoder-ports 8000 8000",
        )
        .unwrap();
        let instances =
            (vec!["10.0.0.1:8000", "10.0.0.2:8000"], vec!["10.0.0.3:8000", "10.0.0.4:8000"]);
        assert_eq!(names(&four_hosts), instances);
        let mooncake = setup(
            "--prefiller-host 10.0.0.1 --prefiller-port 8010 --decoder-host 10.0.0.2 --decoder-port 8020",
        )
        .unwrap();
        assert_eq!(names(&mooncake), (vec!["10.0.0.1:8010"], vec!["10.0.0.2:8020"]));
        assert_eq!(mooncake.port, 8000);
        let defaults = setup("").unwrap();
        assert_eq!(names(&defaults), (vec!["localhost:8100"], vec!["localhost:8200"]));
    }

    #[test]
    fn the_command_line_of_mooncakes_proxy_works() {
        let line = "--prefill http://10.0.0.1:8010 8998 --prefill http://10.0.0.2:8010 --decode http://10.0.0.3:8020 \
                    --decode http://10.0.0.4:8020 --prefill http://10.0.0.5:8010 none \
                    --prefill http://10.0.0.6:8010 None --port 9000";
        let setup = setup(line).unwrap();
        let instances = (
            vec!["10.0.0.1:8010", "10.0.0.2:8010", "10.0.0.5:8010", "10.0.0.6:8010"],
            vec!["10.0.0.3:8020", "10.0.0.4:8020"],
        );
        assert_eq!(names(&setup), instances);
        let ports: Vec<_> = setup.pools[0].prefill.iter().map(|one| one.bootstrap_port).collect();
        assert_eq!(ports, [Some(8998), None, None, None]);
    }

    #[test]
    fn the_flags_of_sglangs_router_find_pods() {
        let line = "--service-discovery --prefill-selector app=vllm role=prefill \
                    --decode-selector app=vllm role=decode --service-discovery-port 30000 \
                    --service-discovery-namespace llm --port 9000";
        let found = setup(line).unwrap();
        assert!(found.pools.is_empty(), "localhost is no instance then");
        let pods = found.discovery.kubernetes.unwrap();
        assert_eq!(pods.prefill_selector.to_string(), "app=vllm,role=prefill");
        assert_eq!(pods.decode_selector.to_string(), "app=vllm,role=decode");
        assert_eq!((pods.port, pods.namespace.as_deref()), (30000, Some("llm")));
        let by_role = setup("--service-discovery --selector app=vllm --decode http://d:1").unwrap();
        assert_eq!(names(&by_role), (vec![], vec!["d:1"]), "next to fixed ones");
        let pods = by_role.discovery.kubernetes.unwrap();
        assert_eq!(
            (pods.port, pods.namespace, &*pods.selector.to_string()),
            (8000, None, "app=vllm")
        );
    }

    #[test]
    fn releases_are_off_or_over_backends() {
        let pair = "--prefill http://p:1 --decode http://d:1 --release";
        assert_eq!(setup(&format!("{pair} off")).unwrap().release, [""; 0]);
        assert_eq!(setup(&format!("{pair} SHM")).unwrap().release, ["SHM"]);
        for both in ["off RIXL", "RIXL off"] {
            let error = setup(&format!("{pair} {both}")).unwrap_err().to_string();
            assert_eq!(error, "--release: name backends or off, not both");
        }
    }

    #[test]
    fn flags_override_the_file() {
        let flags = "--local-below 300 --release TCP RIXL --fallback decode --connector MooncakeConnector --choice prefix --api-key-file keys \
                     --access-log off --tls-cert cert --tls-key key --host ::1 --port 9";
        let file =
            std::env::temp_dir().join(format!("kvx-proxy-flags-{}.toml", std::process::id()));
        let text = "local_below = 1\nfallback = 'off'\nconnector = 'NixlConnector'\nchoice = 'round-robin'\napi_key_file = 'k'\n\
                    access_log = 'a'\nhost = 'h'\nport = 1\n[[pool]]\ndecode = ['http://d:1']\n";
        std::fs::write(&file, text).unwrap();
        let config = format!("--config {}", file.display());
        let (alone, over, untouched) = (
            setup(flags).unwrap(),
            setup(&format!("{config} {flags}")).unwrap(),
            setup(&config).unwrap(),
        );
        std::fs::remove_file(&file).unwrap();
        for setup in [&alone, &over] {
            assert_eq!(
                (setup.local_below, setup.connector, setup.choice),
                (300, PoolConnector::Mooncake, Choice::Prefix)
            );
            assert_eq!(setup.fallback, Fallback::Decode);
            assert_eq!(setup.release, ["TCP", "RIXL"]);
            assert_eq!(setup.api_key_file, Some(PathBuf::from("keys")));
            assert_eq!(setup.access_log, AccessLog::Off);
            assert_eq!(
                (&setup.tls_cert, &setup.tls_key),
                (&Some("cert".into()), &Some("key".into()))
            );
            assert_eq!((&*setup.host, setup.port), ("::1", 9));
        }
        assert_eq!(
            over.pools[0].decode[0].name(),
            "d:1",
            "settings without a flag come from the file"
        );
        assert_eq!(
            (untouched.local_below, untouched.connector, untouched.choice),
            (1, PoolConnector::Nixl, Choice::RoundRobin)
        );
        assert_eq!(
            (untouched.api_key_file, untouched.access_log),
            (Some("k".into()), AccessLog::File("a".into()))
        );
        let logs = [
            ("stdout", AccessLog::Stdout),
            ("off", AccessLog::Off),
            ("a/log", AccessLog::File("a/log".into())),
        ];
        for (name, log) in logs {
            assert_eq!(setup(&format!("--access-log {name}")).unwrap().access_log, log);
        }
    }

    #[test]
    fn events_of_instances_are_flags_too() {
        let line = "--prefill http://a:1 --prefill http://b:1 --decode http://a:1 --events a:1=tcp://*:5 \
                    --events-replay a:1=tcp://r:6";
        let setup = setup(line).unwrap();
        let [pool] = &setup.pools[..] else { panic!("one pool") };
        for one in [&pool.prefill[0], &pool.decode[0]] {
            let events = one.events.as_ref().unwrap();
            assert_eq!(events.endpoint, ("a".to_owned(), 5));
            assert_eq!(events.replay, Some(("r".to_owned(), 6)));
        }
        assert_eq!(pool.prefill[1].events, None);
    }

    #[test]
    fn mistakes_are_named() {
        let cases = [
            ("--prefiller-hosts a b", "2 prefill hosts and 1 prefill ports"),
            ("--prefill http://a:1 --decoder-hosts b", "one way or the other"),
            ("--connector Nixl", "NixlConnector"),
            ("--choice best", "least-tokens"),
            ("--service-discovery --prefill-selector app", "key=value"),
            ("--prefill-selector app=vllm", "--service-discovery"),
            ("--fallback prefill", "decode"),
            ("--prefill a:1", "http://HOST:PORT"),
            ("--prefill http://a:1 some", "http://HOST:PORT"),
            ("--prefill none", "must follow the URL"),
            ("--events localhost:8100", "HOST:PORT=tcp://HOST:PORT"),
            ("--events a:1=tcp://b:2", "no instance is a:1"),
            ("--events localhost:8100=b:2", "tcp://HOST:PORT"),
            ("--events-replay localhost:8100=tcp://b:2", "no events"),
        ];
        for (line, words) in cases {
            let error = setup(line).unwrap_err().to_string();
            assert!(error.contains(words), "{line}: {error}");
        }
    }
}
