//! Tests against an engine in Python, in both roles, on NIXL's wheel, pyzmq and msgspec. It behaves
//! like vLLM's engines.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use kvx_testkit::{Check, Child, Failure, Tier, free_port};
use serde_json::{Value, json};

use crate::engines::engine::{Answer, Spec};
use crate::engines::fleet::{CUT_OFF, Engine, GRACE, Load, ensure, pushing, spec};
use crate::engines::model::Shape;
use crate::engines::{Case, Missing, libraries, wheel};

/// The lease of the engines' blocks: `kv_lease_duration` in `spec`.
const LEASE: Duration = Duration::from_secs(3);
const TOKENS: u32 = 40;

pub(crate) fn cases() -> Vec<Case> {
    type Run = fn(&str) -> Check;
    let all: [(&str, Run); 7] = [
        // vLLM 13, 14: a plain NIXL agent in Python reads from a kvx prefill, which counts its
        //     completions, over RIXL, and with UCX alone in the list of backends
        ("a_python_decode_reads_and_is_counted", decodes),
        ("heartbeats_of_5000_names_keep_a_lease_and_their_end_ends_it", leases),
        // vLLM 14, 18: a kvx decode reads from a plain NIXL prefill in Python after one handshake,
        //     notifies it, and logs the route with its reason
        ("a_python_prefill_is_read_and_told", prefills),
        ("a_python_prefill_that_is_killed_and_restarted_costs_its_requests_alone", restarts),
        // vLLM 14, 17: a kvx decode and a Python decode load from one prefill concurrently
        ("a_kvx_and_a_python_decode_load_from_one_prefill_at_once", side_by_side),
        // vLLM 7, 15, 16: two ranks of a NIXL engine in Python and one of kvx load from each other
        ("two_python_ranks_and_one_of_kvx_read_from_each_other", ranks),
        // vLLM 47: a decode does not register with a plain NIXL agent in Python that would write to
        //     it
        ("a_decode_registers_with_no_python_prefill_that_would_write", refused_push),
    ];
    // For plain NIXL agents, UCX in the list means NIXL's plugin of that name.
    let by_ucx: [(&str, Run); 2] = [
        ("a_python_decode_reads_and_is_counted", decodes),
        ("a_python_prefill_is_read_and_told", prefills),
    ];
    let case = |backend| {
        move |(name, run): (&'static str, Run)| {
            Case::new(name, backend, Tier::Usual, run).needing(packages_are_installed)
        }
    };
    all.into_iter().map(case("RIXL")).chain(by_ucx.into_iter().map(case("UCX"))).collect()
}

fn packages_are_installed() -> Result<(), Missing> {
    let interpreter = wheel::python().unwrap_or_default();
    let environment = interpreter.parent().and_then(Path::parent).unwrap_or(Path::new(""));
    match libraries::has_packages(environment, ["nixl_cu12", "zmq", "msgspec"]) {
        true => Ok(()),
        false => Err((
            "nixl, pyzmq or msgspec is not installed in target/peers/nixl".to_owned(),
            "cargo xtask test --install",
        )),
    }
}

/// The engine in Python.
struct Python(Child);

impl Python {
    fn start(engine: &str) -> Result<Self, Failure> {
        Python::start_ranks(engine, 1)
    }

    /// Starts an engine with `tp` ranks.
    fn start_ranks(engine: &str, tp: u32) -> Result<Self, Failure> {
        let mut command = Command::new(wheel::python().unwrap_or_default());
        command.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/engines/nixl_engine.py"));
        command
            .envs([("NIXL_LOG_LEVEL", "fatal"), ("UCX_LOG_LEVEL", "fatal")])
            .env_remove("KVX_RIXL_LIB");
        let mut python = Python(Child::start(command)?);
        python.ask(json!({"do": "start", "engine": engine, "tp": tp}))?;
        Ok(python)
    }

    fn ask(&mut self, order: Value) -> Result<Value, Failure> {
        let order = order.to_string();
        self.0.say(&order)?;
        self.answer(&order)
    }

    fn answer(&mut self, order: &str) -> Result<Value, Failure> {
        let line = self.0.hear(2 * CUT_OFF)?;
        let answer: Value =
            serde_json::from_str(&line).map_err(|why| Failure::new(format!("{line}: {why}")))?;
        ensure(answer["error"].is_null(), || format!("{order}: {answer}"))?;
        Ok(answer)
    }

    /// Fails unless the engine receives exactly these completions, and otherwise only heartbeats.
    fn is_told(&mut self, wanted: &[&str]) -> Check {
        let mut heard: Vec<Value> = Vec::new();
        let until = Instant::now() + CUT_OFF;
        loop {
            let told =
                |message: &&Value| !message.as_str().is_some_and(|text| text.starts_with("HB:"));
            let told: Vec<_> = heard.iter().filter(told).collect();
            if told.len() >= wanted.len() || Instant::now() >= until {
                return ensure(told == wanted, || {
                    format!("expected {wanted:?}, received {heard:?}")
                });
            }
            let answer = self.ask(json!({"do": "hear", "patience": 1.0}))?;
            heard.extend(answer["heard"].as_array().cloned().unwrap_or_default());
        }
    }

    /// Reads a published prompt and checks it.
    fn loads(&mut self, params: &Value, prompt: u64, readers: u32) -> Check {
        self.begins(params, prompt, readers)?;
        self.has_loaded()
    }

    /// Orders the engine to read a published prompt.
    fn begins(&mut self, params: &Value, prompt: u64, readers: u32) -> Check {
        let order = json!({"do": "load", "params": params, "local": [5, 20, 2], "prompt": prompt, "tokens": TOKENS,
            "readers": readers});
        self.0.say(&order.to_string())
    }

    fn has_loaded(&mut self) -> Check {
        let answer = self.answer("a load")?;
        ensure(answer == json!({"state": "DONE", "wrong": 0}), || {
            format!("the load in Python: {answer}")
        })
    }

    /// Returns the parameters of a prompt that the engine has computed.
    fn params(
        &mut self,
        request: &str,
        port: &Value,
        prompt: u64,
        engine: &str,
    ) -> Result<Value, Failure> {
        let blocks = [9, 3, 14];
        self.ask(json!({"do": "fill", "prompt": prompt, "blocks": blocks, "tokens": TOKENS}))?;
        Ok(
            json!({"do_remote_prefill": true, "do_remote_decode": false, "remote_block_ids": [blocks],
            "remote_engine_id": engine, "remote_request_id": request, "remote_host": "127.0.0.1", "remote_port": port,
            "tp_size": 1, "dcp_size": 1, "pp_size": 1, "remote_num_tokens": TOKENS, "remote_blocks_expiry_time": null,
            "remote_registration_generation": 0, "transfer_mode": "pull"}),
        )
    }
}

fn name(engine: &str) -> String {
    format!("{engine}-{}", std::process::id())
}

fn decodes(backend: &str) -> Check {
    let mut python = Python::start(&name("python-decode"))?;
    let mut prefill = Engine::start(spec("prefill", backend))?;
    let all = prefill.free()?;
    let connected = python.ask(json!({"do": "connect", "port": prefill.port}))?;
    let id = connected["engine"].as_str().unwrap_or_default();
    ensure(id.starts_with(&prefill.spec.id), || format!("{connected}"))?;
    for prompt in 1..4 {
        let params = prefill.prefill(&format!("r{prompt}"), prompt, TOKENS)?;
        python.loads(&params, prompt, 1)?;
        prefill.all_free(CUT_OFF)?;
    }
    // With two readers, the blocks stay leased until both have reported, even if the first reports
    // twice.
    let mut second = Python::start(&name("python-second"))?;
    second.ask(json!({"do": "connect", "port": prefill.port}))?;
    let params = prefill.prefill("two", 7, TOKENS)?;
    python.loads(&params, 7, 2)?;
    python.loads(&params, 7, 2)?;
    std::thread::sleep(Duration::from_millis(300));
    ensure(prefill.free()? < all, || {
        "the blocks were freed after one of two readers had reported".to_owned()
    })?;
    second.loads(&params, 7, 2)?;
    prefill.all_free(LEASE - GRACE)?;
    // An unknown request and a malformed message have no effect.
    python.ask(json!({"do": "notify", "message": "nobody:1"}))?;
    python.ask(json!({"do": "notify", "message": "\u{fffd}::-1"}))?;
    let params = prefill.prefill("last", 8, TOKENS)?;
    python.loads(&params, 8, 1)?;
    prefill.all_free(LEASE - GRACE)
}

fn leases(backend: &str) -> Check {
    let mut python = Python::start(&name("python-decode"))?;
    let mut prefill = Engine::start(spec("prefill", backend))?;
    let all = prefill.free()?;
    python.ask(json!({"do": "connect", "port": prefill.port}))?;
    let params = prefill.prefill("kept", 1, TOKENS)?;
    let others = (0..4_999).map(|index| format!("cmpl-{index:032x}-0-0123abcd"));
    let names: Vec<_> = others
        .chain([params["remote_request_id"].as_str().unwrap_or_default().to_owned()])
        .collect();
    let until = Instant::now() + LEASE * 2;
    while Instant::now() < until {
        python.ask(json!({"do": "heartbeat", "names": names}))?;
        std::thread::sleep(LEASE / 6);
    }
    ensure(prefill.free()? < all, || "a renewed lease ended".to_owned())?;
    python.loads(&params, 1, 1)?;
    prefill.all_free(GRACE)?;

    prefill.prefill("abandoned", 2, TOKENS)?;
    python.0.kill()?;
    prefill.all_free(LEASE + 2 * GRACE)?;
    let mut next = Python::start(&name("python-next"))?;
    next.ask(json!({"do": "connect", "port": prefill.port}))?;
    let params = prefill.prefill("next", 3, TOKENS)?;
    next.loads(&params, 3, 1)?;
    prefill.all_free(GRACE)
}

fn prefills(backend: &str) -> Check {
    let engine = name("python-prefill");
    let mut python = Python::start(&engine)?;
    let mut decode = Engine::start(spec("decode", backend))?;
    let port = python.ask(json!({"do": "serve", "like": decode.port}))?["port"].clone();
    for prompt in 1..4 {
        let (request, there) = (format!("d{prompt}"), format!("cmpl-{prompt}-0-0123abcd"));
        let params = python.params(&there, &port, prompt, &engine)?;
        decode.loads(&Load::new(&request, prompt, TOKENS), &params)?;
        python.is_told(&[&format!("{there}:1")])?;
    }
    // One handshake serves all loads, with the exact bytes that vLLM sends.
    let asked = python.ask(json!({"do": "asked"}))?;
    ensure(asked == json!({"requests": ["93c40c6765745f6d6574615f6d73670000"]}), || {
        format!("{asked}")
    })?;
    decode.all_free(GRACE)?;
    // The log names the route and the reason for it.
    let log = decode.log()?;
    let line = |of: &str| log.lines().find(|line| line.contains(of)).unwrap_or_default().to_owned();
    let (connected, load) = (line("connected to a worker of a peer"), line("kvx_load{request=d1"));
    ensure(
        connected.contains("route=RIXL")
            && connected.contains("as_nixl=the answer has no metadata of kvx"),
        || log.clone(),
    )?;
    ensure(
        load.contains("backend=\"RIXL\"")
            && load.contains("nixl=\"the answer has no metadata of kvx\""),
        || log.clone(),
    )
}

fn side_by_side(backend: &str) -> Check {
    let mut python = Python::start(&name("python-decode"))?;
    let both = vec!["TCP".to_owned(), backend.to_owned()];
    let mut prefill = Engine::start(Spec { backends: both, ..spec("prefill", backend) })?;
    let mut decode = Engine::start(spec("decode", "TCP"))?;
    python.ask(json!({"do": "connect", "port": prefill.port}))?;
    for prompt in [1, 3, 5] {
        let (one, other) = (format!("r{prompt}"), format!("r{}", prompt + 1));
        let params = prefill.prefill(&one, prompt, TOKENS)?;
        let others = prefill.prefill(&other, prompt + 1, TOKENS)?;
        python.begins(&others, prompt + 1, 1)?;
        decode.decode(&Load::new(&one, prompt, TOKENS), &params, CUT_OFF)?;
        decode.arrives(&one, TOKENS)?;
        python.has_loaded()?;
    }
    prefill.all_free(LEASE - GRACE)?;
    decode.all_free(GRACE)?;
    let log = decode.log()?;
    let load = log.lines().find(|line| line.contains("kvx_load{request=r1")).unwrap_or_default();
    ensure(load.contains("backend=\"TCP\"") && !load.contains("nixl="), || log.clone())
}

/// Two ranks prefill and one loads: first with Python prefilling, then with kvx prefilling.
fn ranks(backend: &str) -> Check {
    let engine = name("python-prefill");
    let mut python = Python::start_ranks(&engine, 2)?;
    let mut decode = Engine::start(spec("decode", backend))?;
    let port = python.ask(json!({"do": "serve", "like": decode.port}))?["port"].clone();
    for prompt in 1..4 {
        let (request, there) = (format!("d{prompt}"), format!("cmpl-{prompt}-0-0123abcd"));
        let mut params = python.params(&there, &port, prompt, &engine)?;
        params["tp_size"] = 2.into();
        decode.loads(&Load::new(&request, prompt, TOKENS), &params)?;
        // Each rank receives a completion.
        let told = format!("{there}:1");
        python.is_told(&[&told, &told])?;
    }
    decode.all_free(GRACE)?;

    let mut python = Python::start(&name("python-decode"))?;
    let shape = Shape { tp: 2, ..Shape::default() };
    let mut prefill = Engine::start(Spec { shape, ..spec("prefill", backend) })?;
    python.ask(json!({"do": "connect", "port": prefill.port, "tp": 2}))?;
    for prompt in 1..4 {
        let params = prefill.prefill(&format!("r{prompt}"), prompt, TOKENS)?;
        python.loads(&params, prompt, 1)?;
        prefill.all_free(LEASE - GRACE)?;
    }
    Ok(())
}

/// Checks that a decode rejects writes by a plain NIXL prefill: it could not end them, so it does
/// not announce its blocks.
fn refused_push(backend: &str) -> Check {
    let engine = name("python-prefill");
    let mut python = Python::start(&engine)?;
    let mut decode = Engine::start(pushing("decode", backend))?;
    let port = python.ask(json!({"do": "serve", "like": decode.port}))?["port"].clone();
    let mut params = python.params("cmpl-1-0-0123abcd", &port, 1, &engine)?;
    params["transfer_mode"] = "push".into();
    decode.decode(&Load::new("one", 1, TOKENS), &params, CUT_OFF)?;
    let why = decode.fails("one", CUT_OFF)?;
    ensure(
        why.contains("writes without a grant") && why.contains("kv_connector NixlConnector"),
        || why,
    )?;
    decode.all_free(GRACE)?;
    let heard = python.ask(json!({"do": "hear", "patience": 0.3}))?;
    let registered = heard["heard"]
        .as_array()
        .into_iter()
        .flatten()
        .any(|message| message.as_str().is_some_and(|text| text.contains("PUSH_REG")));
    ensure(!registered, || format!("the decode must not announce its blocks: {heard}"))
}

fn restarts(backend: &str) -> Check {
    let first = name("python-first");
    let mut python = Python::start(&first)?;
    let mut decode = Engine::start(spec("decode", backend))?;
    let port = json!(free_port(0)?);
    python.ask(json!({"do": "serve", "like": decode.port, "port": port}))?;
    let params = python.params("one", &port, 1, &first)?;
    decode.loads(&Load::new("one", 1, TOKENS), &params)?;
    let (within, lost) = (Duration::from_secs(5), python.params("two", &port, 2, &first)?);
    python.0.kill()?;
    decode.decode(&Load::new("two", 2, TOKENS), &lost, within)?;
    decode.fails("two", within)?;
    decode.all_free(CUT_OFF + GRACE)?;

    let second = name("python-second");
    let mut python = Python::start(&second)?;
    python.ask(json!({"do": "serve", "like": decode.port, "port": port}))?;
    decode.decode(&Load::new("three", 3, TOKENS), &lost, within)?;
    let why = decode.fails("three", within)?;
    ensure(why.contains(&second) || why.contains("engine"), || {
        format!("the error must name the restart: {why}")
    })?;
    let params = python.params("four", &port, 4, &second)?;
    decode.decode(&Load::new("four", 4, TOKENS), &params, CUT_OFF)?;
    match decode.outcome("four", CUT_OFF + GRACE)? {
        Answer::Loaded { .. } => decode.all_free(GRACE),
        other => Err(Failure::new(format!("after the restart: {other:?}"))),
    }
}
