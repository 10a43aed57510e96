//! Lets the single server and the fleet continue openings, and compares their answers.

use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Instant;

use serde_json::{Value, json};

use super::client::{Metrics, StreamedAnswer, stream};
use super::fleet::{Fleet, Server};
use super::openings::{OPENINGS, Opening};
use super::screen::{QUIET, Screen};
use crate::backends::wrap;
use crate::demo::arguments::Arguments;
use crate::{Result, bytes};

/// Tokens of each answer.
const TOKENS: usize = 24;

/// Sends each opening to the single server and to the fleet. Returns the number of answers that
/// differ.
pub(super) fn compare(
    fleet: &Fleet,
    arguments: &Arguments,
    backend: &str,
    screen: &mut Screen<'_>,
) -> Result<usize> {
    let mut different = 0;
    for opening in OPENINGS {
        let before = TransferTotals::by(&fleet.decodes)?;
        let name = opening.name();
        screen.line(format_args!(""))?;
        for line in wrap(name.split_whitespace(), 96, "") {
            screen.line(format_args!("  {line}"))?;
        }
        let single = std::slice::from_ref(&fleet.single);
        let alone = stream_aloud("alone", &fleet.single, (single, &[]), opening, screen)?;
        let both = (fleet.prefills.as_slice(), fleet.decodes.as_slice());
        let apart = stream_aloud("apart", &fleet.router, both, opening, screen)?;
        let moved = TransferTotals::by(&fleet.decodes)?.since(before);
        let equal = alone.tokens == apart.tokens && apart.tokens.len() == TOKENS;
        different += usize::from(!equal);
        report(screen, &alone, &apart, &moved, equal)?;
        screen.event(&json!({
            "event": "answer", "backend": backend, "opening": name,
            "opening_is_training_text": opening.is_chapter() && arguments.model.is_none(),
            "prompt_tokens": apart.prompt_tokens, "equal": equal,
            "alone": alone.to_json(), "apart": apart.to_json(),
            "computed_by_decode": computed(&apart), "transfer": moved.to_json(),
        }))?;
        assert_moved(computed(&apart))?;
    }
    Ok(different)
}

/// Streams an answer, and prints its text as it arrives. `computing` are the prefill and decode
/// servers behind `server`.
fn stream_aloud(
    who: &str,
    server: &Server,
    computing: (&[Server], &[Server]),
    opening: &Opening,
    screen: &mut Screen<'_>,
) -> Result<StreamedAnswer> {
    screen.step();
    screen.begin(&format!("    {who}   "))?;
    let begun = Instant::now();
    let (port, prompt) = (server.port, json!(opening.text()));
    let streamed = std::thread::scope(|scope| -> Result<_> {
        let (pieces, received) = mpsc::channel::<String>();
        let stream = scope.spawn(move || {
            let tell = |piece: &str| Ok(pieces.send(piece.to_owned())?);
            stream(port, &prompt, TOKENS, tell).map_err(|error| error.to_string())
        });
        let mut waiting = true;
        loop {
            match received.recv_timeout(QUIET) {
                Ok(piece) => {
                    if std::mem::take(&mut waiting) {
                        screen.clear()?;
                    }
                    screen.piece(&piece)?;
                }
                Err(RecvTimeoutError::Timeout) if waiting && screen.is_terminal() => {
                    screen.progress(phase(computing)?, begun)?;
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        Ok(stream.join().map_err(|_| "the client has panicked")??)
    })?;
    screen.end()?;
    Ok(streamed)
}

/// Returns what the servers do before the first token. A request waits at a decode server while its
/// blocks are transferred.
fn phase((prefills, decodes): (&[Server], &[Server])) -> Result<&'static str> {
    let has = |servers: &[Server], metric: &str| -> Result<bool> {
        for server in servers {
            if Metrics::of(server.port)?.sum(metric) > 0.0 {
                return Ok(true);
            }
        }
        Ok(false)
    };
    if has(decodes, "vllm:num_requests_waiting")? {
        return Ok("transfer");
    }
    if has(prefills, "vllm:num_requests_running")? {
        return Ok("prefill");
    }
    Ok("decode")
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

/// Writes what two answers cost, and whether they are equal.
fn report(
    screen: &mut Screen<'_>,
    alone: &StreamedAnswer,
    apart: &StreamedAnswer,
    moved: &TransferTotals,
    equal: bool,
) -> Result<()> {
    let handshake = match moved.handshake {
        0.0 => String::new(),
        seconds => format!(", after a handshake of {}", millis(seconds)),
    };
    let others = match moved.had {
        0 => String::new(),
        had => format!("; the decode server had the other {had}"),
    };
    screen.line(format_args!(
        "    {:<8}the first token came after {} alone, {} apart\n            \
         {} for {} tokens moved over {} in {}{handshake}{others}",
        if equal { "equal" } else { "DIFFERENT" },
        millis(alone.first.as_secs_f64()),
        millis(apart.first.as_secs_f64()),
        bytes::show(moved.bytes as u64),
        apart.prompt_tokens.saturating_sub(moved.had),
        moved.route(),
        millis(moved.seconds),
    ))
}

fn millis(seconds: f64) -> String {
    match seconds * 1e3 {
        long if long >= 100.0 => format!("{long:.0} ms"),
        middle if middle >= 1.0 => format!("{middle:.1} ms"),
        short => format!("{short:.2} ms"),
    }
}

impl StreamedAnswer {
    fn to_json(&self) -> Value {
        json!({
            "text": self.text, "token_ids": self.tokens,
            "first_token_seconds": self.first.as_secs_f64(),
        })
    }
}

/// Totals of the transfers of decode servers.
#[derive(Default)]
struct TransferTotals {
    bytes: f64,
    seconds: f64,
    handshake: f64,
    /// The prompt tokens whose blocks the decode servers had already.
    had: u64,
    /// Transfers by each backend.
    transfers: Vec<(String, f64)>,
}

impl TransferTotals {
    /// Reads the totals so far.
    fn by(decodes: &[Server]) -> Result<Self> {
        let mut moved = TransferTotals::default();
        for decode in decodes {
            let metrics = Metrics::of(decode.port)?;
            moved.bytes += metrics.sum("vllm:nixl_bytes_transferred_sum");
            moved.seconds += metrics.sum("vllm:nixl_xfer_time_seconds_sum");
            moved.handshake += metrics.sum("kvx_handshake_seconds_sum");
            moved.had += metrics.sum("vllm:prefix_cache_hits_total") as u64;
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
            seconds: self.seconds - before.seconds,
            handshake: self.handshake - before.handshake,
            had: self.had - before.had,
            transfers: self
                .transfers
                .iter()
                .map(|(name, count)| (name.clone(), count - had(name)))
                .collect(),
        }
    }

    /// Returns the backends that were used.
    fn used(&self) -> Vec<&str> {
        let used = self.transfers.iter().filter(|(_, count)| *count > 0.0);
        used.map(|(name, _)| name.as_str()).collect()
    }

    fn route(&self) -> String {
        self.used().join("+")
    }

    fn to_json(&self) -> Value {
        json!({
            "backends": self.used(), "bytes": self.bytes, "seconds": self.seconds,
            "handshake_seconds": self.handshake, "tokens_had": self.had,
        })
    }
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
