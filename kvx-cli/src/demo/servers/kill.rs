//! Kills prefill servers while requests need them, and shows what clients receive.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::client::{Metrics, send, stream};
use super::fleet::{FailurePolicy, Fleet, Server, start_pair};
use super::model::DemoModel;
use super::openings::CHAPTER;
use super::screen::Screen;
use crate::Result;
use crate::demo::arguments::Arguments;

/// The timeout for a server to begin what a kill interrupts.
const BEGIN: Duration = Duration::from_secs(10);
/// Attempts to kill a prefill server before it has computed a prompt.
const ATTEMPTS: usize = 5;

/// Kills a prefill server while it computes a prompt. The router sends the prompt to another one.
pub(super) fn during_prefill(
    fleet: &mut Fleet,
    backend: &str,
    screen: &mut Screen<'_>,
) -> Result<()> {
    if fleet.prefills.len() < 2 {
        return screen.line(format_args!(
            "\n  No prefill server was killed: start with --prefillers 2, and another one takes over."
        ));
    }
    for attempt in 1..=ATTEMPTS {
        // No cache knows its beginning.
        let prompt = format!("Reading {attempt}. {CHAPTER}");
        let single = fleet.single.port;
        let right =
            screen.wait_for("the single server answers", || complete(single, &prompt, None))?;
        if right.0 != 200 {
            return Err(format!("the single server answered HTTP {}: {}", right.0, right.1).into());
        }
        let port = fleet.router.port;
        let begun = Instant::now();
        let prefills = &mut fleet.prefills;
        let (killed, answer) = screen.wait_for("a prefill server is killed", || {
            std::thread::scope(|scope| -> Result<_> {
                let asked = scope
                    .spawn(|| complete(port, &prompt, None).map_err(|error| error.to_string()));
                let mut killed = None;
                while killed.is_none() && !asked.is_finished() && begun.elapsed() < BEGIN {
                    killed = kill_one_that_computes(prefills)?;
                }
                Ok((killed, asked.join().map_err(|_| "the client has panicked")??))
            })
        })?;
        let Some(killed) = killed else { continue };
        let seconds = begun.elapsed().as_secs_f64();
        expect_right(&answer, &right)?;
        screen.line(format_args!(
            "\n  Process {}, a prefill server, was killed while it computed a prompt of {} tokens.\n  \
             The router sent the prompt to another one: the client received the right answer after {seconds:.1} s.",
            killed.child.pid(),
            answer.1["usage"]["prompt_tokens"],
        ))?;
        screen.event(&json!({
            "event": "killed", "backend": backend, "during": "prefill", "pid": killed.child.pid(),
            "status": 200, "equal": true, "seconds": seconds,
        }))?;
        return Ok(());
    }
    Err(format!("{ATTEMPTS} prompts were computed before a prefill server could be killed").into())
}

/// Kills and removes the first server that computes a request.
fn kill_one_that_computes(servers: &mut Vec<Server>) -> Result<Option<Server>> {
    for at in 0..servers.len() {
        if Metrics::of(servers[at].port)?.sum("vllm:num_requests_running") > 0.0 {
            let mut killed = servers.remove(at);
            killed.child.kill()?;
            return Ok(Some(killed));
        }
    }
    Ok(None)
}

/// For each failure policy, kills a prefill server while a decode server fetches its blocks.
pub(super) fn during_transfer(
    arguments: &Arguments,
    backend: &str,
    single: &Server,
    screen: &mut Screen<'_>,
) -> Result<()> {
    screen.line(format_args!(
        "\n  Without a router, the policy of the decode server (kv_load_failure_policy) decides. A prefill\n  \
         server is killed while its blocks are fetched:"
    ))?;
    for policy in [FailurePolicy::Fail, FailurePolicy::Recompute] {
        let model = DemoModel::open(arguments.model.as_deref())?;
        let (prefill, decode) = start_pair(arguments, backend, policy, model.folder(), screen)?;
        drop(model);
        kill_during_transfer(prefill, &decode, single, (backend, policy), screen)?;
    }
    Ok(())
}

fn kill_during_transfer(
    mut prefill: Server,
    decode: &Server,
    single: &Server,
    (backend, policy): (&str, FailurePolicy),
    screen: &mut Screen<'_>,
) -> Result<()> {
    let what = format!("a prefill server is killed, {}", policy.name());
    let (decode_port, single) = (decode.port, single.port);
    let (right, answer, took) = screen.wait_for(&what, || {
        // Connect the two first: the kill must interrupt the transfer, not the handshake.
        let first = "The handshake comes before the first transfer, and this prompt pays for it.";
        complete(decode_port, first, Some(publish(&prefill, first)?))?;
        let right = complete(single, CHAPTER, None)?;
        let params = publish(&prefill, CHAPTER)?;
        prefill.child.stop()?;
        let begun = Instant::now();
        let answer = std::thread::scope(|scope| -> Result<_> {
            let asked = scope.spawn(move || {
                complete(decode_port, CHAPTER, Some(params)).map_err(|error| error.to_string())
            });
            while !asked.is_finished()
                && Metrics::of(decode_port)?.sum("vllm:num_requests_waiting") == 0.0
            {
                if begun.elapsed() > BEGIN {
                    return Err("the decode server did not begin to fetch blocks".into());
                }
            }
            prefill.child.kill()?;
            Ok(asked.join().map_err(|_| "the client has panicked")??)
        })?;
        Ok((right, answer, begun.elapsed()))
    })?;
    let (name, seconds) = (policy.name(), took.as_secs_f64());
    let (status, body) = &answer;
    if *status == 500 && policy == FailurePolicy::Fail {
        let reason = body["error"]["message"].as_str().unwrap_or_default();
        screen.line(format_args!("    {name:<10}HTTP 500 after {seconds:.1} s: {reason}"))?;
    } else {
        // Shared memory can be read without its owner.
        expect_right(&answer, &right)?;
        let tokens = &body["usage"]["prompt_tokens"];
        let cached = body["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64();
        let how = match cached {
            Some(cached) if cached > 0 => "from the blocks, which outlived their server",
            _ => "computed again by the decode server",
        };
        screen.line(format_args!(
            "    {name:<10}the right answer after {seconds:.1} s: {tokens} tokens {how}"
        ))?;
    }
    screen.event(&json!({
        "event": "killed", "backend": backend, "during": "transfer", "policy": name,
        "pid": prefill.child.pid(), "status": status, "equal": *status == 200, "seconds": seconds,
        "error": body["error"]["message"],
    }))?;
    stream(decode.port, &json!("The next"), 4, |_| Ok(()))?;
    Ok(())
}

/// Fails unless an answer has the right tokens.
fn expect_right(answer: &(u16, Value), right: &(u16, Value)) -> Result<()> {
    let tokens = |answer: &(u16, Value)| answer.1["choices"][0]["token_ids"].clone();
    match answer.0 {
        200 if !tokens(answer).is_null() && tokens(answer) == tokens(right) => Ok(()),
        status => Err(format!(
            "after a kill the client received a wrong answer, HTTP {status}: {}",
            answer.1
        )
        .into()),
    }
}

/// Lets a prefill server compute a prompt, and returns its `kv_transfer_params`.
fn publish(prefill: &Server, prompt: &str) -> Result<Value> {
    let (status, mut answer) =
        complete(prefill.port, prompt, Some(json!({"do_remote_decode": true})))?;
    match answer["kv_transfer_params"].take() {
        Value::Null => {
            Err(format!("the prefill server publishes nothing: HTTP {status}: {answer}").into())
        }
        params => Ok(params),
    }
}

/// Requests a short greedy answer.
fn complete(port: u16, prompt: &str, params: Option<Value>) -> Result<(u16, Value)> {
    let prefills = params.as_ref().is_some_and(|params| params["do_remote_decode"] == true);
    let body = json!({"prompt": prompt, "max_tokens": if prefills { 1 } else { 4 }, "temperature": 0,
                      "ignore_eos": true, "return_token_ids": true, "kv_transfer_params": params});
    let (status, answer) = send(port, "/v1/completions", Some(&body))?;
    Ok((status, serde_json::from_reader(answer)?))
}
