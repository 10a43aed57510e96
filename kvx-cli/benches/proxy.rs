//! Measures the cost of `kvx proxy` per request, next to a bare program that makes the same two
//! calls, and its cost when idle.
//!
//! 200 concurrent streams of 128 tokens run through one program and then the other, in turn, as
//! fast as instances without a model generate them. Latency and requests per second are those of a
//! saturated machine. Then 1,000 streams of 32 tokens run through two routers over 16 instances, next
//! to two bare programs. `cargo bench -p kvx-cli --bench proxy -- --bars` prints one JSON object per
//! line.
//!
//! `KVX_TOY_PROXY="PYTHON toy_proxy_server.py"` compares with that program instead, in requests per
//! second of CPU time. It is in vLLM's repository (tests/v1/kv_connector/nixl_integration) and
//! needs fastapi, httpx and uvicorn.

use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioIo};
use kvx_instance::{Instance, Settings};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde_json::{Value, json};
use tokio::net::{TcpListener, TcpStream};

type Failure = Box<dyn std::error::Error + Send + Sync>;

/// The number of rounds of each program, which alternate.
const ROUNDS: usize = 5;
/// The load of many streams, half of them through each of two routers.
const CROWD: Load = Load { streams: 1000, tokens: 32, round: Duration::from_secs(6) };
/// The usual load.
const USUAL: Load = Load { streams: 200, tokens: 128, round: Duration::from_secs(3) };
/// The most descriptors: two for each stream, and some.
const DESCRIPTORS: u64 = 8192;
/// The time for which the idle router is measured.
const QUIET: Duration = Duration::from_secs(20);
/// The variable that turns this program into the bare one; it has the URLs of the prefill and the
/// decode instances, those of a pair after each other.
const BARE: &str = "KVX_BARE_PROXY";
/// The variable with the command of vLLM's toy proxy.
const TOY: &str = "KVX_TOY_PROXY";
/// The target for requests per core, as a multiple of the toy's.
const TIMES_THE_TOY: f64 = 10.0;

fn main() -> Result<(), Failure> {
    // The programs that it starts inherit the limit.
    let maximum = getrlimit(Resource::Nofile).maximum;
    let current = Some(maximum.map_or(DESCRIPTORS, |most| most.min(DESCRIPTORS)));
    setrlimit(Resource::Nofile, Rlimit { current, maximum })?;
    kvx_instance::run_if_asked();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    if let Ok(urls) = std::env::var(BARE) {
        return runtime.block_on(serve_bare(&urls));
    }
    let settings = Settings { fetches: false, keeps: 0, ..Settings::default() };
    let (prefill, decode) = (Instance::start(settings.clone()), Instance::start(settings.clone()));
    let toys = [
        "--port",
        "0",
        "--prefiller-hosts",
        "127.0.0.1",
        "--decoder-hosts",
        "127.0.0.1",
        "--prefiller-ports",
    ];
    let (prefill_port, decode_port) = (prefill.port().to_string(), decode.port().to_string());
    let instances = |command: &mut Command| {
        let command = command.args(toys).args([&prefill_port, "--decoder-ports", &decode_port]);
        Program::start(command)
    };
    let kvx = instances(Command::new(env!("CARGO_BIN_EXE_kvx")).args([
        "proxy",
        "--connector",
        "NixlConnector",
    ]))?;
    let urls = format!("{} {}", prefill.url(), decode.url());
    let bare = Program::start(Command::new(std::env::current_exe()?).env(BARE, urls))?;
    if let Ok(line) = std::env::var(TOY) {
        let mut words = line.split_ascii_whitespace();
        let program = words.next().ok_or_else(|| format!("{TOY} is empty"))?;
        let toy = instances(Command::new(program).args(words))?;
        return beside_the_toy(&runtime, &kvx, &bare, &toy);
    }
    let of_bare = beside_bare(&runtime, &[&kvx], &[&bare], USUAL)?;
    cost("proxy_p50_of_bare", of_bare.p50);
    cost("proxy_p99_of_bare", of_bare.p99);
    cost("proxy_rate_of_bare", of_bare.rate);
    drop((kvx, bare));
    let instances: Vec<_> = (0..16).map(|_| Instance::start(settings.clone())).collect();
    let ports = |half: &[Instance]| {
        half.iter().map(|instance| instance.port().to_string()).collect::<Vec<_>>()
    };
    let hosts = ["127.0.0.1"; 8];
    let (prefills, decodes) = instances.split_at(8);
    let router = || {
        Program::start(
            Command::new(env!("CARGO_BIN_EXE_kvx"))
                .args(["proxy", "--port", "0", "--access-log", "off", "--prefiller-hosts"])
                .args(hosts)
                .arg("--prefiller-ports")
                .args(ports(prefills))
                .arg("--decoder-hosts")
                .args(hosts)
                .arg("--decoder-ports")
                .args(ports(decodes)),
        )
    };
    let (idle, other) = (router()?, router()?);
    let pairs = prefills.iter().zip(decodes).map(|(one, other)| [one.url(), other.url()].join(" "));
    let urls = pairs.collect::<Vec<_>>().join(" ");
    let bare = || Program::start(Command::new(std::env::current_exe()?).env(BARE, &urls));
    let (one_bare, other_bare) = (bare()?, bare()?);
    for router in [&idle, &other] {
        runtime.block_on(load_once(router.port))?;
    }
    let of_bare = beside_bare(&runtime, &[&idle, &other], &[&one_bare, &other_bare], CROWD)?;
    cost("proxies_p50_of_bare", of_bare.p50);
    cost("proxies_p99_of_bare", of_bare.p99);
    cost("proxies_rate_of_bare", of_bare.rate);
    drop((other, one_bare, other_bare));
    let before = idle.cpu()?;
    std::thread::sleep(QUIET);
    let used = idle.cpu()?.saturating_sub(before);
    cost("proxy_idle_percent", used.as_secs_f64() / QUIET.as_secs_f64() * 100.0);
    Ok(())
}

/// Returns the median figures of the routers as multiples of those of the bare programs.
fn beside_bare(
    runtime: &tokio::runtime::Runtime,
    kvx: &[&Program],
    bare: &[&Program],
    under: Load,
) -> Result<Figures, Failure> {
    let (mut requests, mut p50, mut p99, mut rate) = (0, Vec::new(), Vec::new(), Vec::new());
    for round in 0..=ROUNDS {
        let of_bare = runtime.block_on(load(bare, under))?;
        let of_kvx = runtime.block_on(load(kvx, under))?;
        if round == 0 {
            continue; // everything is warm from here on
        }
        eprintln!("round {round}: bare {of_bare:?}; kvx {of_kvx:?}");
        requests += of_kvx.requests;
        p50.push(of_kvx.p50 / of_bare.p50);
        p99.push(of_kvx.p99 / of_bare.p99);
        rate.push(of_kvx.rate / of_bare.rate);
    }
    Ok(Figures { requests, p50: median(p50), p99: median(p99), rate: median(rate) })
}

/// Compares the requests per second of CPU time. The bare program shows the upper limit.
fn beside_the_toy(
    runtime: &tokio::runtime::Runtime,
    kvx: &Program,
    bare: &Program,
    toy: &Program,
) -> Result<(), Failure> {
    let (mut times, mut times_of_bare) = (Vec::new(), Vec::new());
    for round in 0..=ROUNDS {
        let per_core = |program: &Program| -> Result<f64, Failure> {
            let before = program.cpu()?;
            let figures = runtime.block_on(load(&[program], USUAL))?;
            Ok(figures.requests as f64 / (program.cpu()? - before).as_secs_f64())
        };
        let (of_toy, of_kvx, of_bare) = (per_core(toy)?, per_core(kvx)?, per_core(bare)?);
        if round == 0 {
            continue; // everything is warm from here on
        }
        eprintln!(
            "round {round}: requests per second and core: toy {of_toy:.1}; kvx {of_kvx:.1}; bare {of_bare:.1}"
        );
        times.push(of_kvx / of_toy);
        times_of_bare.push(of_bare / of_toy);
    }
    let times = median(times);
    cost("proxy_per_core_of_toy", times);
    cost("bare_per_core_of_toy", median(times_of_bare));
    match times >= TIMES_THE_TOY {
        true => Ok(()),
        false => {
            Err(format!("{times:.1} times the toy's requests; the target is {TIMES_THE_TOY}")
                .into())
        }
    }
}

fn cost(name: &str, value: f64) {
    println!("{}", json!({"cost": name, "value": value}));
}

fn median(mut figures: Vec<f64>) -> f64 {
    figures.sort_unstable_by(f64::total_cmp);
    figures[figures.len() / 2]
}

/// A router process, which is killed when this is dropped.
struct Program {
    process: Child,
    port: u16,
}

impl Program {
    /// Starts it, and reads the port that it listens on.
    fn start(command: &mut Command) -> Result<Self, Failure> {
        let mut process =
            command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn()?;
        let mut lines = BufReader::new(process.stderr.take().ok_or("it is piped")?).lines();
        let mut program = Program { process, port: 0 };
        let line = lines
            .by_ref()
            .map_while(Result::ok)
            // The second is uvicorn's message.
            .find_map(|line| {
                let says = ["listening on ", "running on "]
                    .iter()
                    .find_map(|says| line.split_once(says))?;
                Some(says.1.to_owned())
            })
            .ok_or("it ended without listening")?;
        let port = line
            .split(' ')
            .next()
            .and_then(|address| address.trim_end_matches('/').rsplit_once(':'));
        program.port = port.ok_or("no port")?.1.parse()?;
        std::thread::spawn(move || lines.map_while(Result::ok).for_each(drop)); // it must not wait for a reader
        Ok(program)
    }

    /// Returns the CPU time that it has used.
    fn cpu(&self) -> Result<Duration, Failure> {
        let mut nanos = 0;
        for task in std::fs::read_dir(format!("/proc/{}/task", self.process.id()))? {
            let text = std::fs::read_to_string(task?.path().join("schedstat"))?;
            nanos += text.split(' ').next().ok_or("no figure")?.parse::<u64>()?;
        }
        Ok(Duration::from_nanos(nanos))
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        self.process.kill().ok(); // an error: it has ended
        self.process.wait().ok();
    }
}

/// The figures of a program in a round: milliseconds, and requests per second.
#[derive(Debug)]
struct Figures {
    requests: usize,
    p50: f64,
    p99: f64,
    rate: f64,
}

/// The load of a round.
#[derive(Clone, Copy)]
struct Load {
    streams: usize,
    /// The length of each answer.
    tokens: u64,
    round: Duration,
}

/// Runs all streams for a round, each one request after the other, through the programs in turn.
async fn load(programs: &[&Program], load: Load) -> Result<Figures, Failure> {
    let start = Instant::now();
    let port = |number: usize| programs[number % programs.len()].port;
    let start_one = |number| worker(port(number), number, load.tokens, start + load.round);
    let workers: Vec<_> = (0..load.streams).map(|number| tokio::spawn(start_one(number))).collect();
    let mut times = Vec::new();
    for worker in workers {
        times.extend(worker.await??);
    }
    let rate = times.len() as f64 / start.elapsed().as_secs_f64();
    times.sort_unstable();
    let at = |part: f64| times[((times.len() - 1) as f64 * part) as usize].as_secs_f64() * 1e3;
    Ok(Figures { requests: times.len(), p50: at(0.5), p99: at(0.99), rate })
}

async fn worker(
    port: u16,
    number: usize,
    tokens: u64,
    until: Instant,
) -> Result<Vec<Duration>, Failure> {
    let stream = TcpStream::connect(("127.0.0.1", port)).await?;
    stream.set_nodelay(true)?;
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    tokio::spawn(connection);
    let body = json!({"model": "m", "prompt": format!("{number} {}", "lorem ipsum ".repeat(40)), "max_tokens": tokens,
                      "stream": true});
    let body = Bytes::from(body.to_string());
    let mut times = Vec::new();
    while Instant::now() < until {
        let start = Instant::now();
        let request = Request::post("/v1/completions")
            .header("host", "127.0.0.1")
            .header("content-type", "application/json")
            .body(Full::new(body.clone()))?;
        let mut response = sender.send_request(request).await?;
        let mut events = 0;
        while let Some(frame) = response.frame().await {
            let Ok(data) = frame?.into_data() else { continue };
            events += data.windows(6).filter(|six| *six == b"data: ").count() as u64;
        }
        if response.status() != 200 || events < tokens {
            return Err(format!("{}: {events} events", response.status()).into());
        }
        times.push(start.elapsed());
        sender.ready().await?;
    }
    Ok(times)
}

/// Waits until a request is served.
async fn load_once(port: u16) -> Result<(), Failure> {
    let end = Instant::now() + Duration::from_secs(10);
    loop {
        match worker(port, 0, 1, Instant::now() + Duration::from_millis(1)).await {
            Ok(_) => return Ok(()),
            Err(error) if Instant::now() > end => return Err(error),
            Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
        }
    }
}

/// Runs the bare program: a prefill, then a decode whose bytes are forwarded. It checks, counts,
/// retries and limits nothing.
async fn serve_bare(urls: &str) -> Result<(), Failure> {
    let urls: Vec<_> = urls.split(' ').map(|url| format!("{url}/v1/completions")).collect();
    let urls: Arc<[String]> = urls.into();
    let turn = Arc::<AtomicUsize>::default();
    let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
    eprintln!("bare: listening on {}", listener.local_addr()?);
    let mut connector = HttpConnector::new();
    connector.set_nodelay(true);
    let client: Client<_, Full<Bytes>> = Client::builder(TokioExecutor::new()).build(connector);
    loop {
        let (stream, _) = listener.accept().await?;
        stream.set_nodelay(true)?;
        let (client, urls, turn) = (client.clone(), Arc::clone(&urls), Arc::clone(&turn));
        tokio::spawn(async move {
            let service = service_fn(|request| {
                let pair = turn.fetch_add(1, Relaxed) % (urls.len() / 2) * 2;
                two_calls(&client, &urls[pair], &urls[pair + 1], request)
            });
            let served = hyper::server::conn::http1::Builder::new()
                .serve_connection(TokioIo::new(stream), service);
            drop(served.await); // an error: the client has gone
        });
    }
}

async fn two_calls(
    client: &Client<HttpConnector, Full<Bytes>>,
    prefill: &str,
    decode: &str,
    request: Request<Incoming>,
) -> Result<Response<BoxBody<Bytes, hyper::Error>>, Failure> {
    let mut body: Value = serde_json::from_slice(&request.into_body().collect().await?.to_bytes())?;
    let mut first = body.clone();
    first["stream"] = false.into();
    first["max_tokens"] = 1.into();
    first["kv_transfer_params"] = json!({"do_remote_decode": true, "do_remote_prefill": false});
    let post = |url: &str, body: &Value| {
        Request::post(url)
            .header("content-type", "application/json")
            .header("x-request-id", "the-same")
            .body(Full::new(Bytes::from(body.to_string())))
    };
    let answer =
        client.request(post(prefill, &first)?).await?.into_body().collect().await?.to_bytes();
    let mut answer: Value = serde_json::from_slice(&answer)?;
    body["kv_transfer_params"] = answer["kv_transfer_params"].take();
    let response = client.request(post(decode, &body)?).await?;
    Ok(response.map(|body| body.boxed()))
}
