//! The requests to the demo's servers, and the display of their answers.

use std::io::Write;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::Arguments;
use super::client::{Metrics, StreamedAnswer, send, stream};
use super::fleet::{Fleet, Server};
use crate::{Result, bytes};

/// Tokens of each answer.
const TOKENS: usize = 24;
/// The timeout for a decode server to begin to load.
const LOADING: Duration = Duration::from_secs(10);

/// Sends each prompt to the single server and to the fleet, and compares the answers. Kills a
/// prefill in the end. `begun` is the time at which this backend's servers were started.
pub(super) fn show(
    mut fleet: Fleet,
    arguments: &Arguments,
    begun: Instant,
    out: &mut dyn Write,
) -> Result<()> {
    writeln!(
        out,
        "  {:<22}{:>7}{:>9}{:>8}{:>10}{:>7}{:>11}{:>11}{:>12}{:>12}",
        "prompt",
        "tokens",
        "computed",
        "blocks",
        "bytes",
        "route",
        "handshake",
        "transfer",
        "TTFT alone",
        "apart"
    )?;
    let (mut different, mut first) = (0, None);
    for (name, prompt) in prompts() {
        let before = TransferTotals::by(&fleet.decodes)?;
        let alone = stream_aloud("alone", fleet.single.port, &prompt, out)?;
        let apart = stream_aloud("apart", fleet.proxy.port, &prompt, out)?;
        first.get_or_insert_with(|| begun.elapsed());
        let moved = TransferTotals::by(&fleet.decodes)?.since(before);
        let equal = alone.tokens == apart.tokens && apart.tokens.len() == TOKENS;
        different += usize::from(!equal);
        row(out, name, &alone, &apart, &moved, equal)?;
        assert_moved(computed(&apart))?;
    }
    if different > 0 {
        let why =
            if arguments.corrupt { ", as expected: a transferred block was corrupted" } else { "" };
        return Err(format!("{different} answers are not those of the single server{why}").into());
    }
    if arguments.corrupt {
        return Err("a transferred block was corrupted, but every answer is the same: they were not made from the transferred blocks".into());
    }
    let first = first.unwrap_or_default().as_secs_f64();
    writeln!(
        out,
        "  Every answer equals the single server's, token by token. The first one was complete {first:.1} s after the start."
    )?;
    if arguments.serve {
        writeln!(
            out,
            "\n  curl http://127.0.0.1:{}/v1/completions -H 'content-type: application/json' -d '{{\"prompt\": \"Hello\", \"max_tokens\": 16}}'\n\
             Ctrl-C ends the servers.",
            fleet.proxy.port
        )?;
        out.flush()?;
        loop {
            std::thread::park();
        }
    }
    let killed = fleet.prefills.pop().ok_or("there is a prefill")?;
    kill(killed, &fleet.decodes[0], &fleet.single, out)
}

/// Returns how many tokens of the prompt the decode server computed: at least the last one, which
/// the next token needs.
fn computed(apart: &StreamedAnswer) -> u64 {
    apart.prompt_tokens.saturating_sub(apart.not_computed).max(1)
}

/// Fails if the decode server computed the prompt again: equal answers would then prove nothing.
fn assert_moved(computed: u64) -> Result<()> {
    match computed {
        1 => Ok(()),
        more => Err(format!("the decode server computed {more} tokens of the prompt").into()),
    }
}

/// Shows what a client receives if its prefill dies during the transfer of its blocks.
fn kill(mut prefill: Server, decode: &Server, single: &Server, out: &mut dyn Write) -> Result<()> {
    // Connect the two first: the kill must interrupt the transfer, not the handshake.
    ask(decode.port, &tokens(7, 40), Some(publish(&prefill, &tokens(7, 40))?))?;
    let prompt = tokens(8, 1500);
    let right = ask(single.port, &prompt, None)?;
    let params = publish(&prefill, &prompt)?;
    prefill.child.stop()?;
    let (begun, port, prompt) = (Instant::now(), decode.port, &prompt);
    let (status, answer) = std::thread::scope(|scope| -> Result<_> {
        let asked =
            scope.spawn(move || ask(port, prompt, Some(params)).map_err(|error| error.to_string()));
        while !asked.is_finished() && Metrics::of(port)?.sum("vllm:num_requests_waiting") == 0.0 {
            if begun.elapsed() > LOADING {
                return Err("the decode server did not begin to load".into());
            }
        }
        prefill.child.kill()?;
        Ok(asked.join().map_err(|_| "the client has panicked")??)
    })?;
    let seconds = begun.elapsed().as_secs_f64();
    write!(
        out,
        "  Process {} (prefill) was killed during the transfer of its blocks. ",
        prefill.child.pid()
    )?;
    match status {
        500 => writeln!(
            out,
            "The client receives HTTP 500 after {seconds:.1} s: {}",
            answer["error"]["message"]
        )?,
        // Shared memory can be read without its owner.
        200 if answer["choices"][0]["token_ids"] == right.1["choices"][0]["token_ids"] => {
            writeln!(
                out,
                "Its memory was still there: the client received the right answer after {seconds:.1} s."
            )?;
        }
        _ => {
            return Err(format!(
                "the client got neither the right answer nor HTTP 500, but {status}: {answer}"
            )
            .into());
        }
    }
    stream(decode.port, &json!("the next one"), 4, |_| Ok(()))?;
    writeln!(out, "  The next request is served.")?;
    Ok(())
}

/// Streams an answer, and prints its text as it arrives.
fn stream_aloud(
    who: &str,
    port: u16,
    prompt: &Value,
    out: &mut dyn Write,
) -> Result<StreamedAnswer> {
    write!(out, "  {who}: ")?;
    out.flush()?;
    let streamed = stream(port, prompt, TOKENS, |text| {
        write!(out, "{}", text.escape_debug())?;
        Ok(out.flush()?)
    })?;
    writeln!(out)?;
    Ok(streamed)
}

/// Lets a prefill server compute a prompt, and returns its `kv_transfer_params`.
fn publish(prefill: &Server, prompt: &Value) -> Result<Value> {
    let (status, mut answer) = ask(prefill.port, prompt, Some(json!({"do_remote_decode": true})))?;
    match answer["kv_transfer_params"].take() {
        Value::Null => {
            Err(format!("the prefill server publishes nothing: HTTP {status}: {answer}").into())
        }
        params => Ok(params),
    }
}

/// Requests a short greedy answer.
fn ask(port: u16, prompt: &Value, params: Option<Value>) -> Result<(u16, Value)> {
    let prefills = params.as_ref().is_some_and(|params| params["do_remote_decode"] == true);
    let body = json!({"prompt": prompt, "max_tokens": if prefills { 1 } else { 4 }, "temperature": 0, "ignore_eos": true,
                      "return_token_ids": true, "kv_transfer_params": params});
    let (status, answer) = send(port, "/v1/completions", Some(&body))?;
    Ok((status, serde_json::from_reader(answer)?))
}

fn row(
    out: &mut dyn Write,
    name: &str,
    alone: &StreamedAnswer,
    apart: &StreamedAnswer,
    moved: &TransferTotals,
    equal: bool,
) -> Result<()> {
    let millis = |seconds: f64, digits: usize| format!("{:.digits$} ms", seconds * 1e3);
    writeln!(
        out,
        "  {name:<22}{:>7}{:>9}{:>8}{:>10}{:>7}{:>11}{:>11}{:>12}{:>12}  {}",
        apart.prompt_tokens,
        computed(apart),
        moved.blocks,
        bytes::show(moved.bytes as u64),
        moved.route(),
        if moved.handshake > 0.0 { millis(moved.handshake, 1) } else { "before".to_owned() },
        millis(moved.seconds, 2),
        millis(alone.first.as_secs_f64(), 1),
        millis(apart.first.as_secs_f64(), 1),
        if equal { "equal" } else { "DIFFERENT" }
    )?;
    Ok(out.flush()?)
}

/// Totals of the transfers of decode servers.
struct TransferTotals {
    bytes: f64,
    blocks: f64,
    seconds: f64,
    handshake: f64,
    /// Transfers by each backend.
    transfers: Vec<(String, f64)>,
}

impl TransferTotals {
    /// Reads the totals so far.
    fn by(decodes: &[Server]) -> Result<Self> {
        let mut moved = TransferTotals {
            bytes: 0.0,
            blocks: 0.0,
            seconds: 0.0,
            handshake: 0.0,
            transfers: Vec::new(),
        };
        for decode in decodes {
            let metrics = Metrics::of(decode.port)?;
            moved.bytes += metrics.sum("vllm:nixl_bytes_transferred_sum");
            moved.blocks += metrics.sum("kvx_blocks_total");
            moved.seconds += metrics.sum("vllm:nixl_xfer_time_seconds_sum");
            moved.handshake += metrics.sum("kvx_handshake_seconds_sum");
            for (labels, count) in metrics.each("kvx_transfers_total") {
                let backend = labels.split('"').nth(1).unwrap_or_default();
                match moved.transfers.iter_mut().find(|(known, _)| known == backend) {
                    Some((_, sum)) => *sum += count,
                    None => moved.transfers.push((backend.to_owned(), count)),
                }
            }
        }
        Ok(moved)
    }

    /// Returns the difference from earlier totals.
    fn since(self, before: TransferTotals) -> TransferTotals {
        let had = |backend: &str| {
            before.transfers.iter().find(|(known, _)| known == backend).map_or(0.0, |had| had.1)
        };
        TransferTotals {
            bytes: self.bytes - before.bytes,
            blocks: self.blocks - before.blocks,
            seconds: self.seconds - before.seconds,
            handshake: self.handshake - before.handshake,
            transfers: self
                .transfers
                .iter()
                .map(|(name, count)| (name.clone(), count - had(name)))
                .collect(),
        }
    }

    /// Returns the backends that were used.
    fn route(&self) -> String {
        let used =
            self.transfers.iter().filter(|(_, count)| *count > 0.0).map(|(name, _)| name.as_str());
        used.collect::<Vec<_>>().join("+")
    }
}

/// Returns prompts around the boundaries of blocks, with a common prefix, a long one, and a chat.
fn prompts() -> Vec<(&'static str, Value)> {
    vec![
        ("one token", tokens(1, 1)),
        ("a block less one", tokens(2, 15)),
        ("a block", tokens(3, 16)),
        ("a block and one", tokens(4, 17)),
        ("three blocks and one", tokens(5, 49)),
        ("the same and more", tokens(5, 80)),
        ("2,000 tokens", tokens(6, 2000)),
        ("a chat", json!([{"role": "user", "content": "What is the answer?"}])),
    ]
}

/// Returns `count` tokens, which differ for each `from`.
fn tokens(from: u64, count: u64) -> Value {
    json!((0..count).map(|at| 33 + (from * 31 + at * 7) % 90).collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prompt_that_was_computed_again_is_an_error() {
        let answered = |not_computed| StreamedAnswer {
            prompt_tokens: 49,
            not_computed,
            ..StreamedAnswer::default()
        };
        for all_but_the_last in [49, 48] {
            assert!(assert_moved(computed(&answered(all_but_the_last))).is_ok());
        }
        for (not_computed, words) in [(47, "computed 2 tokens"), (0, "computed 49 tokens")] {
            let error = assert_moved(computed(&answered(not_computed))).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
    }
}
