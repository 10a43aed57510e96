//! Tests against an engine in Python, in both roles, on Mooncake's wheel, pyzmq and msgspec. It
//! behaves like vLLM's engines with the MooncakeConnector.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use kvx_testkit::{Check, Child, Failure, Tier, free_port};
use serde_json::{Value, json};

use crate::engines::engine::Spec;
use crate::engines::fleet::{CUT_OFF, Engine, GRACE, Load, MOONCAKE, ensure, spec};
use crate::engines::{Case, Missing, adapter, libraries};

const TOKENS: u32 = 40;

pub(crate) fn cases() -> Vec<Case> {
    let all: [(&'static str, fn(&str) -> Check); 5] = [
        // vLLM 61: a kvx prefill handles pull requests with and without a layout, and answers
        //     LAYOUT_MISS to a Python decode with pyzmq and msgspec; Mooncake's own engine moves
        //     the bytes
        ("a_python_decode_asks_and_is_written", decodes),
        ("a_python_decode_hears_of_an_abort_and_lets_go", endings),
        // vLLM 61: a kvx decode sends its layout once, then omits it, toward a Python prefill with
        //     pyzmq and msgspec; Mooncake's own engine moves the bytes
        ("a_python_prefill_is_asked_and_writes", prefills),
        ("a_python_prefill_that_fails_and_restarts_costs_its_requests_alone", failures),
        ("a_kvx_decode_over_tcp_and_one_in_python_are_served_at_once", side_by_side),
    ];
    let older: [(&'static str, fn(&str) -> Check); 3] = [
        // vLLM 58: before 0.16: a Python decode with pyzmq and msgspec loads several requests by
        //     one pull request, and Mooncake's own engine moves the bytes
        ("before_0_16_a_python_decode_asks_and_is_written", older_decodes),
        // vLLM 58: before 0.16: two Python decode ranks each ask the prefill rank of their number,
        //     at port + tensor rank
        ("before_0_16_each_python_rank_is_written_by_its_own_of_the_prefill", older_ranks),
        // vLLM 58, 59: before 0.16: a kvx decode loads from one rank of a Python prefill
        ("before_0_16_a_python_prefill_is_asked_and_writes", older_prefills),
    ];
    let cases = |all: &[(&'static str, fn(&str) -> Check)], tier: Tier| -> Vec<Case> {
        all.iter()
            .map(|(name, run)| {
                Case::new(*name, "MOONCAKE", tier, *run).needing(packages_are_installed)
            })
            .collect()
    };
    cases(&all, Tier::Usual).into_iter().chain(cases(&older, Tier::Whole)).collect()
}

/// Returns the environment of Mooncake's wheel.
fn environment() -> PathBuf {
    adapter::adapter().and_then(|file| Some(file.parent()?.join("venv"))).unwrap_or_default()
}

fn packages_are_installed() -> Result<(), Missing> {
    match libraries::has_packages(&environment(), ["mooncake", "zmq", "msgspec"]) {
        true => Ok(()),
        false => Err((
            "Mooncake, pyzmq or msgspec is not installed in target/peers/mooncake".to_owned(),
            "cargo xtask test --install",
        )),
    }
}

/// The engine in Python.
struct Python(Child);

impl Python {
    fn start(engine: &str) -> Result<Self, Failure> {
        Python::start_rank(engine, 0, 1)
    }

    /// Starts one of several ranks.
    fn start_rank(engine: &str, rank: u32, ranks: u32) -> Result<Self, Failure> {
        let script: PathBuf =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/engines/mooncake_engine.py");
        let mut command = Command::new(environment().join("bin/python"));
        command.arg(script).envs([("MC_LOG_LEVEL", "ERROR"), ("MC_TCP_BIND_ADDRESS", "127.0.0.1")]);
        let mut python = Python(Child::start(command)?);
        python.ask(json!({"do": "start", "engine": engine, "rank": rank, "ranks": ranks}))?;
        Ok(python)
    }

    fn ask(&mut self, order: Value) -> Result<Value, Failure> {
        let order = order.to_string();
        self.0.say(&order)?;
        let line = self.0.hear(2 * CUT_OFF)?;
        let answer: Value =
            serde_json::from_str(&line).map_err(|why| Failure::new(format!("{line}: {why}")))?;
        ensure(answer["error"].is_null(), || format!("{order}: {answer}"))?;
        Ok(answer)
    }

    /// Requests a transfer, and returns the engine's answer.
    fn load(&mut self, params: &Value, blocks: &[u32], prompt: u64) -> Result<Value, Failure> {
        self.ask(json!({"do": "load", "params": params, "local": blocks, "prompt": prompt, "tokens": TOKENS}))
    }

    /// Loads a prompt; fails unless all of it arrives, with the layout sent `brought` times.
    fn loads(&mut self, params: &Value, prompt: u64, brought: u32) -> Check {
        let said = self.load(params, &[5, 20, 2], prompt)?;
        let right =
            said["ok"] == json!(["d-1"]) && said["wrong"] == 0 && said["brought"] == brought;
        ensure(right, || format!("the load in Python: {said}"))
    }

    /// Loads prompts (their shared names, blocks and prompts) with one message, as before vLLM
    /// 0.16.
    fn load_older(
        &mut self,
        params: &Value,
        wanted: &[(&str, &[u32], u64)],
    ) -> Result<Value, Failure> {
        self.ask(json!({"do": "load_older", "params": params, "wanted": wanted, "tokens": TOKENS}))
    }

    /// Loads prompts as before vLLM 0.16; fails unless all of them arrive.
    fn loads_older(&mut self, params: &Value, wanted: &[(&str, &[u32], u64)]) -> Check {
        let said = self.load_older(params, wanted)?;
        let checked = said["parts"].as_u64().is_some_and(|parts| parts > 0);
        let right = said["said"] == "trans_done" && said["wrong"] == 0 && checked;
        ensure(right, || format!("the load in Python: {said}"))
    }

    fn publish(&mut self, transfer: &str, prompt: u64, fails: bool) -> Check {
        let order = json!({"do": "publish", "transfer": transfer, "prompt": prompt, "blocks": [9, 3, 14],
            "tokens": TOKENS, "fails": fails});
        self.ask(order).map(drop)
    }

    /// Returns the blocks that were requested since the last call.
    fn asked(&mut self) -> Result<Vec<Value>, Failure> {
        let answer = self.ask(json!({"do": "questions"}))?;
        Ok(answer["asked"].as_array().cloned().unwrap_or_default())
    }
}

fn name(engine: &str) -> String {
    format!("{engine}-{}", std::process::id())
}

/// Returns the parameters that a router sends to a decode.
fn leg(engine: &str, port: &Value, transfer: &str) -> Value {
    json!({"do_remote_prefill": true, "do_remote_decode": false, "transfer_id": transfer,
        "remote_engine_id": engine, "remote_bootstrap_addr": format!("http://127.0.0.1:{port}")})
}

fn mooncake(id: &str, backend: &str) -> Spec {
    spec(id, &format!("{MOONCAKE}{backend}"))
}

/// Returns the settings of an engine with the protocol before vLLM 0.16.
fn older(id: &str, backend: &str) -> Spec {
    Spec { extra: json!({"kv_compat": "0.11"}), ..mooncake(id, backend) }
}

fn decodes(backend: &str) -> Check {
    let mut python = Python::start(&name("python-decode"))?;
    let mut prefill = Engine::start(mooncake("prefill", backend))?;
    for prompt in 1..4 {
        let params = prefill.prefill(&format!("r{prompt}"), prompt, TOKENS)?;
        python.loads(&params, prompt, u32::from(prompt == 1))?;
        prefill.all_free(GRACE)?;
    }
    // The prefill requests a layout that it does not have.
    python.ask(json!({"do": "forget"}))?;
    let params = prefill.prefill("again", 7, TOKENS)?;
    let said = python.load(&params, &[1, 2, 3], 7)?;
    ensure(said["statuses"] == json!([3, 0]) && said["wrong"] == 0, || format!("{said}"))?;
    // A decode that has a prefix gets the rest.
    let params = prefill.prefill("partial", 8, TOKENS)?;
    let said = python.load(&params, &[6], 8)?;
    ensure(said["ok"] == json!(["d-1"]) && said["wrong"] == 0, || format!("{said}"))?;
    prefill.all_free(GRACE)
}

fn endings(backend: &str) -> Check {
    let mut python = Python::start(&name("python-decode"))?;
    let mut prefill = Engine::start(mooncake("prefill", backend))?;
    let params = prefill.prefill("given-up", 1, TOKENS)?;
    prefill.abort("given-up")?;
    let said = python.load(&params, &[1, 2, 3], 1)?;
    let heard = said["err"] == json!(["d-1"])
        && said["why"].as_str().is_some_and(|why| why.contains("without"));
    ensure(heard, || format!("{said}"))?;
    let params = prefill.prefill("let-go", 2, TOKENS)?;
    python.load(&params, &[], 2)?;
    prefill.all_free(GRACE)?;
    // Blocks beyond the decode's pool fail only this request.
    let params = prefill.prefill("beyond", 3, TOKENS)?;
    let said = python.load(&params, &[1, 2, 4_000_000], 3)?;
    ensure(said["err"] == json!(["d-1"]), || format!("{said}"))?;
    let params = prefill.prefill("last", 4, TOKENS)?;
    python.loads(&params, 4, 0)?;
    prefill.all_free(CUT_OFF)
}

fn prefills(backend: &str) -> Check {
    let engine = name("python-prefill");
    let mut python = Python::start(&engine)?;
    let mut decode = Engine::start(mooncake("decode", backend))?;
    let port = python.ask(json!({"do": "serve"}))?["port"].clone();
    for prompt in 1..4 {
        let transfer = format!("xfer-{prompt}");
        let (request, params) = (format!("d{prompt}"), leg(&engine, &port, &transfer));
        // Both orders of publishing and loading work.
        if prompt == 2 {
            python.publish(&transfer, prompt, false)?;
        }
        decode.decode(&Load::new(&request, prompt, TOKENS), &params, CUT_OFF)?;
        if prompt != 2 {
            python.publish(&transfer, prompt, false)?;
        }
        decode.arrives(&request, TOKENS)?;
    }
    let asked = python.asked()?;
    let brings: Vec<_> =
        asked.iter().map(|each| each["brings"].as_bool().unwrap_or_default()).collect();
    ensure(brings == [true, false, false], || format!("the layout must be sent once: {asked:?}"))?;
    // Load the rest of a prompt whose first block is cached.
    python.publish("xfer-9", 9, false)?;
    let params = leg(&engine, &port, "xfer-9");
    let cached = Load { cached: 1, ..Load::new("d9", 9, TOKENS) };
    let mut params_of_all = params.clone();
    params_of_all["remote_num_tokens"] = TOKENS.into();
    decode.loads(&cached, &params_of_all)?;
    decode.all_free(GRACE)?;
    // A request that is aborted before it has blocks releases the prefill's.
    python.asked()?;
    decode.arrive(&Load::new("d10", 10, TOKENS), &leg(&engine, &port, "xfer-10"), CUT_OFF)?;
    decode.abort("d10")?;
    let until = std::time::Instant::now() + CUT_OFF;
    while python.asked()?.iter().all(|each| each["blocks"] != json!([[]])) {
        ensure(std::time::Instant::now() < until, || "the prefill was not notified".to_owned())?;
        std::thread::sleep(Duration::from_millis(20));
    }
    decode.all_free(GRACE)
}

fn older_decodes(backend: &str) -> Check {
    let mut python = Python::start(&name("python-decode"))?;
    let mut prefill = Engine::start(older("prefill", backend))?;
    let params = prefill.prefill("r1-0123abcd", 1, TOKENS)?;
    python.loads_older(&params, &[("r1", &[5, 20, 2], 1)])?;
    // Several prompts in one message, one of them without its first block.
    prefill.prefill("r2-0123abcd", 2, TOKENS)?;
    prefill.prefill("r3-0123abcd", 3, TOKENS)?;
    python.loads_older(&params, &[("r2", &[9, 3, 14], 2), ("r3", &[6, 1], 3)])?;
    prefill.all_free(GRACE)?;
    // One request that releases its blocks, and one that the prefill has aborted.
    prefill.prefill("r4-0123abcd", 4, TOKENS)?;
    let said = python.load_older(&params, &[("r4", &[], 4)])?;
    ensure(said["said"] == "trans_done", || format!("{said}"))?;
    prefill.prefill("r5-0123abcd", 5, TOKENS)?;
    prefill.abort("r5-0123abcd")?;
    let said = python.load_older(&params, &[("r5", &[1, 2, 3], 5)])?;
    ensure(said["said"] == "trans_error", || format!("{said}"))?;
    prefill.all_free(GRACE)?;
    // Blocks beyond the decode's pool fail only this request.
    prefill.prefill("r6-0123abcd", 6, TOKENS)?;
    let said = python.load_older(&params, &[("r6", &[1, 2, 4_000_000], 6)])?;
    ensure(said["said"] == "trans_error", || format!("{said}"))?;
    prefill.prefill("r7-0123abcd", 7, TOKENS)?;
    python.loads_older(&params, &[("r7", &[0, 23, 11], 7)])?;
    prefill.all_free(CUT_OFF)
}

fn older_ranks(backend: &str) -> Check {
    let mut ranks = Vec::new();
    for rank in 0..2 {
        let python = Python::start_rank(&name("python-decode"), rank, 2)?;
        ranks.push(python);
    }
    let mut spec = older("prefill", backend);
    spec.shape.tp = 2;
    let mut prefill = Engine::start(spec)?;
    for prompt in 1..3 {
        let params = prefill.prefill(&format!("r{prompt}-0123abcd"), prompt, TOKENS)?;
        for python in &mut ranks {
            let (free, all) = (prefill.free()?, prefill.spec.shape.blocks);
            ensure(free < all, || {
                "blocks are free before each rank has requested them".to_owned()
            })?;
            python.loads_older(&params, &[(&format!("r{prompt}"), &[5, 20, 2], prompt)])?;
        }
        prefill.all_free(GRACE)?;
    }
    Ok(())
}

fn older_prefills(backend: &str) -> Check {
    let mut python = Python::start(&name("python-prefill"))?;
    let mut decode = Engine::start(older("decode", backend))?;
    let port = python.ask(json!({"do": "serve_older"}))?["port"].clone();
    let params = json!({"do_remote_prefill": true, "do_remote_decode": false, "remote_host": "127.0.0.1",
        "remote_port": port});
    for prompt in 1..4 {
        let (request, shared) = (format!("r{prompt}-0123abcd"), format!("r{prompt}"));
        // Both orders of publishing and loading work.
        if prompt == 2 {
            python.publish(&shared, prompt, false)?;
        }
        decode.decode(&Load::new(&request, prompt, TOKENS), &params, CUT_OFF)?;
        if prompt != 2 {
            python.publish(&shared, prompt, false)?;
        }
        decode.arrives(&request, TOKENS)?;
    }
    // Load the rest of a prompt whose first block is cached.
    python.publish("r4", 4, false)?;
    let cached = Load { cached: 1, ..Load::new("r4-0123abcd", 4, TOKENS) };
    let mut params_of_all = params.clone();
    params_of_all["remote_num_tokens"] = TOKENS.into();
    decode.loads(&cached, &params_of_all)?;
    decode.all_free(GRACE)?;
    let blocks = |each: &Value| each["blocks"][0].as_array().map_or(0, Vec::len);
    let asked: Vec<_> = python.asked()?.iter().map(blocks).collect();
    ensure(asked == [3, 3, 3, 2], || format!("numbers of requested blocks: {asked:?}"))?;
    // A request that is aborted before it has blocks releases the prefill's.
    decode.arrive(&Load::new("r5-0123abcd", 5, TOKENS), &params, CUT_OFF)?;
    decode.abort("r5-0123abcd")?;
    let until = std::time::Instant::now() + CUT_OFF;
    while python.asked()?.iter().all(|each| *each != json!({"requests": ["r5"], "blocks": [[]]})) {
        ensure(std::time::Instant::now() < until, || "the prefill was not notified".to_owned())?;
        std::thread::sleep(Duration::from_millis(20));
    }
    decode.all_free(GRACE)?;
    // A failure affects only its request. Its blocks stay held: a Mooncake agent may still write
    // after it has reported an error.
    let within = Duration::from_secs(2);
    python.publish("r6", 6, true)?;
    decode.decode(&Load::new("r6-0123abcd", 6, TOKENS), &params, within)?;
    decode.fails("r6-0123abcd", within)?;
    let log = decode.log()?;
    ensure(log.contains("trans_error"), || format!("the log does not name the answer: {log}"))?;
    python.publish("r7", 7, false)?;
    decode.loads(&Load::new("r7-0123abcd", 7, TOKENS), &params)?;
    let (free, all) = (decode.free()?, decode.spec.shape.blocks);
    ensure(free + 3 == all, || format!("{free} of {all} blocks are free"))
}

fn failures(backend: &str) -> Check {
    let first = name("python-first");
    let mut python = Python::start(&first)?;
    let mut decode = Engine::start(mooncake("decode", backend))?;
    let port = json!(free_port(0)?);
    python.ask(json!({"do": "serve", "port": port}))?;
    let within = Duration::from_secs(2);
    python.publish("xfer-1", 1, true)?;
    // Mooncake may still write after its error, so the blocks stay held; the load fails at once.
    decode.decode(&Load::new("one", 1, TOKENS), &leg(&first, &port, "xfer-1"), 10 * within)?;
    let why = decode.fails("one", within)?;
    ensure(why.contains("failed on purpose"), || {
        format!("the error must name the prefill's reason: {why}")
    })?;
    python.publish("xfer-2", 2, false)?;
    decode.loads(&Load::new("two", 2, TOKENS), &leg(&first, &port, "xfer-2"))?;
    python.0.kill()?;
    decode.decode(&Load::new("three", 3, TOKENS), &leg(&first, &port, "xfer-3"), within)?;
    decode.fails("three", within)?;

    let second = name("python-second");
    let mut python = Python::start(&second)?;
    python.ask(json!({"do": "serve", "port": port}))?;
    decode.decode(&Load::new("four", 4, TOKENS), &leg(&first, &port, "xfer-4"), within)?;
    let why = decode.fails("four", within)?;
    ensure(why.contains("lists no engine") && why.contains(&second), || {
        format!("the error must name the restart: {why}")
    })?;
    python.publish("xfer-5", 5, false)?;
    decode.loads(&Load::new("five", 5, TOKENS), &leg(&second, &port, "xfer-5"))
}

fn side_by_side(backend: &str) -> Check {
    let mut python = Python::start(&name("python-decode"))?;
    let both = vec!["TCP".to_owned(), backend.to_owned()];
    let mut prefill = Engine::start(Spec { backends: both, ..mooncake("prefill", backend) })?;
    let mut decode = Engine::start(mooncake("decode", "TCP"))?;
    for prompt in [1, 3, 5] {
        let (one, other) = (format!("r{prompt}"), format!("r{}", prompt + 1));
        let params = prefill.prefill(&one, prompt, TOKENS)?;
        let others = prefill.prefill(&other, prompt + 1, TOKENS)?;
        decode.decode(&Load::new(&one, prompt, TOKENS), &params, CUT_OFF)?;
        python.loads(&others, prompt + 1, u32::from(prompt == 1))?;
        decode.arrives(&one, TOKENS)?;
    }
    prefill.all_free(GRACE)?;
    decode.all_free(GRACE)?;
    let log = prefill.log()?;
    let routes: Vec<_> =
        log.lines().filter(|line| line.contains("connected to a decode's worker")).collect();
    ensure(
        ["route=TCP", "route=MOONCAKE"]
            .iter()
            .all(|route| routes.iter().any(|line| line.contains(route))),
        || log.clone(),
    )
}
