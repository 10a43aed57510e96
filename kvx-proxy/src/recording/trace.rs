//! Reads recordings and Mooncake's public traces.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::time::Duration;

use serde::Deserialize;
use serde::de::IgnoredAny;

use super::{MOST_TOKENS, VERSION};
use crate::error::{Error, Result};

/// The tokens of a block in Mooncake's traces, which have no header.
const MOONCAKE_BLOCK: usize = 512;
/// The longest line, in bytes.
const LINE: u64 = 256 << 10;
/// The most requests, and the most hashes of all of them, which take 512 MiB.
const MOST_REQUESTS: usize = 4 << 20;
const MOST_HASHES: usize = 64 << 20;
/// The latest time, in milliseconds: 366 days.
const LATEST: f64 = 366.0 * 86400e3;

/// The requests of a trace, in the order of their arrival.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Trace {
    /// The requests.
    pub requests: Vec<TraceRequest>,
    /// The tokens for which a hash of a request stands.
    pub block_tokens: usize,
    /// Requests of a recording that are left out because a length, the time or the line is outside
    /// its limits.
    pub over_limit: usize,
    /// True if a recording ends with a part of a line, as a power failure or a router that is
    /// writing leaves it. That part is left out.
    pub is_torn: bool,
}

/// A request of a trace.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct TraceRequest {
    /// When it arrived, since the first request.
    pub at: Duration,
    /// The tokens of its prompt.
    pub prompt_tokens: usize,
    /// The tokens of its answer.
    pub answer_tokens: usize,
    /// Names of its prompt's blocks. Equal names stand for equal prompts up to their end. Tokens
    /// after the last one belong to this request alone.
    pub blocks: Vec<u64>,
}

/// A line of any kind. Other fields are ignored.
#[derive(Deserialize)]
struct RawLine {
    kvx_recording: Option<u32>,
    block_tokens: Option<u64>,
    timestamp: Option<f64>,
    input_length: Option<u64>,
    output_length: Option<u64>,
    hash_ids: Option<Vec<u64>>,
    max_tokens: Option<u64>,
    outcome: Option<String>,
}

impl RawLine {
    /// Returns true if a length or this time is outside its limits.
    fn is_over_limit(&self, at: f64) -> bool {
        let lengths = [self.input_length, self.output_length, self.max_tokens];
        at > LATEST
            || self.input_length == Some(0)
            || lengths.into_iter().flatten().any(|length| length > MOST_TOKENS)
    }
}

impl Trace {
    /// Reads a recording of `kvx proxy --record`, or a trace in the form of Mooncake's.
    ///
    /// # Errors
    ///
    /// Fails if the file cannot be read, a whole line is malformed, a line of Mooncake's form is
    /// outside a limit, or the file has no request that can be played. The message has the line's
    /// number.
    pub fn from_file(path: &Path) -> Result<Self> {
        let cannot_read =
            |error| Error::io(format_args!("cannot read the trace {}", path.display()), error);
        let file = std::fs::File::open(path).map_err(cannot_read)?;
        Self::read(BufReader::new(file))
            .map_err(|why| Error::new(format!("the trace {}: {why}", path.display())))
    }

    /// Reads a trace's lines. The error names the line.
    pub(crate) fn read(mut from: impl BufRead) -> std::result::Result<Self, String> {
        let mut reader = TraceReader::default();
        let mut line = Vec::new();
        for number in 1u64.. {
            line.clear();
            let read = from.by_ref().take(LINE + 1).read_until(b'\n', &mut line);
            read.map_err(|error| format!("line {number}: {error}"))?;
            if line.is_empty() {
                break;
            }
            if line.len() as u64 > LINE {
                if !reader.is_recording {
                    return Err(format!("line {number} is longer than {LINE} bytes"));
                }
                if line.last() != Some(&b'\n') {
                    skip_line(&mut from).map_err(|error| format!("line {number}: {error}"))?;
                }
                reader.over_limit += 1;
                continue;
            }
            if reader.is_recording && line.last() != Some(&b'\n') && !is_json(&line) {
                reader.is_torn = true;
                break;
            }
            if !line.trim_ascii().is_empty() {
                reader.line(&line).map_err(|why| format!("line {number}: {why}"))?;
            }
        }
        reader.finish()
    }

    /// Keeps the first `count` requests.
    pub fn first(&mut self, count: usize) {
        self.requests.truncate(count);
    }

    /// Divides all lengths by `divisor`, and keeps what prompts share. For small models.
    ///
    /// # Errors
    ///
    /// Fails if a block would have no token.
    pub fn shrink(&mut self, divisor: usize) -> Result<()> {
        if divisor == 0 || self.block_tokens < divisor {
            return Err(Error::new(format!(
                "lengths cannot be divided by {divisor}: a block of this trace has {} tokens; \
                 choose a divisor from 1 to that",
                self.block_tokens
            )));
        }
        self.block_tokens /= divisor;
        for request in &mut self.requests {
            // The length of blocks is rounded down, so none begins after its prompt.
            request.prompt_tokens = request.prompt_tokens.div_ceil(divisor).max(1);
            request.answer_tokens = request.answer_tokens.div_ceil(divisor).max(1);
        }
        Ok(())
    }

    /// Cuts longer prompts and answers. Returns how many requests it has changed.
    pub fn cut(&mut self, prompt: usize, answer: usize) -> usize {
        let (prompt, answer) = (prompt.max(1), answer.max(1));
        let mut cut = 0;
        for request in &mut self.requests {
            cut += usize::from(request.prompt_tokens > prompt || request.answer_tokens > answer);
            request.prompt_tokens = request.prompt_tokens.min(prompt);
            request.answer_tokens = request.answer_tokens.min(answer);
            request.blocks.truncate(request.prompt_tokens.div_ceil(self.block_tokens));
        }
        cut
    }
}

fn is_json(line: &[u8]) -> bool {
    serde_json::from_slice::<IgnoredAny>(line).is_ok()
}

/// Reads up to the end of a line.
fn skip_line(from: &mut impl BufRead) -> std::io::Result<()> {
    loop {
        let read = from.fill_buf()?;
        let end = read.iter().position(|byte| *byte == b'\n');
        let count = end.map_or(read.len(), |at| at + 1);
        let is_last = end.is_some() || count == 0;
        from.consume(count);
        if is_last {
            return Ok(());
        }
    }
}

/// Collects the lines of a trace.
#[derive(Default)]
struct TraceReader {
    /// `None` before the first line.
    block_tokens: Option<usize>,
    is_recording: bool,
    /// Milliseconds of the file's earlier sections.
    before: f64,
    /// The latest time so far.
    latest: f64,
    requests: Vec<(f64, TraceRequest)>,
    hashes: usize,
    over_limit: usize,
    is_torn: bool,
}

impl TraceReader {
    fn line(&mut self, line: &[u8]) -> std::result::Result<(), String> {
        let line: RawLine = serde_json::from_slice(line)
            .map_err(|error| format!("it is no JSON object of a recording or a trace: {error}"))?;
        match line.kvx_recording {
            Some(version) => self.header(version, line.block_tokens),
            None => self.request(line),
        }
    }

    fn header(
        &mut self,
        version: u32,
        block_tokens: Option<u64>,
    ) -> std::result::Result<(), String> {
        if version != VERSION {
            return Err(format!(
                "the recording has version {version}, and this kvx plays version {VERSION}; use \
                 the kvx that recorded it"
            ));
        }
        let block = block_tokens
            .filter(|tokens| (1..=MOST_TOKENS).contains(tokens))
            .ok_or_else(|| format!("block_tokens is missing, or not from 1 to {MOST_TOKENS}"))?
            as usize;
        if self.block_tokens.is_some_and(|before| !self.is_recording || before != block) {
            return Err("a header follows lines that do not belong to it".to_owned());
        }
        (self.is_recording, self.block_tokens) = (true, Some(block));
        // The router was restarted: its next requests follow the earlier ones.
        self.before = self.latest;
        Ok(())
    }

    fn request(&mut self, line: RawLine) -> std::result::Result<(), String> {
        let block = *self.block_tokens.get_or_insert(MOONCAKE_BLOCK);
        let missing = |what: &str| format!("{what} is missing");
        let at = line.timestamp.ok_or_else(|| missing("timestamp"))?;
        if self.is_recording && line.is_over_limit(at) {
            self.over_limit += 1;
            return Ok(());
        }
        if !(0.0..=LATEST).contains(&at) {
            return Err(format!("timestamp is {at}; it must be 0 to {LATEST} milliseconds"));
        }
        let tokens = |what: &str, value: u64| match value <= MOST_TOKENS {
            true => Ok(value as usize),
            false => Err(format!("{what} is {value}; it must be at most {MOST_TOKENS}")),
        };
        let prompt =
            tokens("input_length", line.input_length.ok_or_else(|| missing("input_length"))?)?;
        if prompt == 0 {
            return Err("input_length is 0; it must be at least 1".to_owned());
        }
        let blocks = line.hash_ids.ok_or_else(|| missing("hash_ids"))?;
        if blocks.len() > prompt.div_ceil(block) {
            return Err(format!(
                "hash_ids has {} hashes of {block} tokens for a prompt of {prompt}",
                blocks.len()
            ));
        }
        // An answer that did not end as it should has had another length.
        let is_whole = line.outcome.as_deref().is_none_or(|outcome| outcome == "ok");
        let answer = match (line.output_length.filter(|_| is_whole), line.max_tokens) {
            (Some(length), _) => tokens("output_length", length)?,
            (None, Some(most)) => tokens("max_tokens", most)?,
            (None, None) => return Err(missing("output_length")),
        };
        self.hashes += blocks.len();
        if self.requests.len() == MOST_REQUESTS || self.hashes > MOST_HASHES {
            return Err(format!(
                "the trace is too long: at most {MOST_REQUESTS} requests with {MOST_HASHES} hashes \
                 are read; cut the file"
            ));
        }
        let request = TraceRequest {
            at: Duration::ZERO,
            prompt_tokens: prompt,
            answer_tokens: answer.max(1),
            blocks,
        };
        self.latest = self.latest.max(self.before + at);
        self.requests.push((self.before + at, request));
        Ok(())
    }

    fn finish(mut self) -> std::result::Result<Trace, String> {
        self.requests.sort_by(|(one, _), (other, _)| one.total_cmp(other));
        let mut times: Vec<f64> = self.requests.iter().map(|(at, _)| *at).collect();
        if !self.is_recording {
            spread(&mut times);
        }
        let Some(first) = times.first().copied() else {
            return Err("it has no request that can be played".to_owned());
        };
        let mut requests: Vec<_> = self.requests.into_iter().map(|(_, request)| request).collect();
        for (request, at) in requests.iter_mut().zip(times) {
            request.at = Duration::from_secs_f64((at - first) / 1e3);
        }
        Ok(Trace {
            requests,
            block_tokens: self.block_tokens.unwrap_or(MOONCAKE_BLOCK),
            over_limit: self.over_limit,
            is_torn: self.is_torn,
        })
    }
}

/// Spreads equal times evenly until the next one: the clock of a trace may count in steps of three
/// seconds. Those at the end spread over as long as the step before them.
fn spread(times: &mut [f64]) {
    let (mut at, mut step) = (0, 0.0);
    while at < times.len() {
        let time = times[at];
        let end = at + times[at..].partition_point(|other| *other <= time);
        step = times.get(end).map_or(step, |next| next - time);
        let count = (end - at) as f64;
        for (number, time) in times[at..end].iter_mut().enumerate() {
            *time += step * number as f64 / count;
        }
        at = end;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> std::result::Result<Trace, String> {
        Trace::read(text.as_bytes())
    }

    const HEADER: &str = r#"{"kvx_recording":1,"started":1.5,"block_tokens":256,"holds":"…"}"#;

    fn seconds(trace: &Trace) -> Vec<f64> {
        trace.requests.iter().map(|request| request.at.as_secs_f64()).collect()
    }

    #[test]
    fn equal_times_of_a_mooncake_trace_are_spread() {
        let line = |at| {
            format!(
                r#"{{"timestamp": {at}, "input_length": 700, "output_length": 3, "hash_ids": [0, 1]}}"#
            )
        };
        let lines = [3000, 3000, 3000, 6000, 9000, 9000].map(line).join("\n");
        let trace = read(&lines).unwrap();
        assert_eq!(seconds(&trace), [0.0, 1.0, 2.0, 3.0, 6.0, 7.5]);
        assert_eq!((trace.block_tokens, trace.requests[0].blocks.len()), (512, 2));
        assert_eq!(read(&line(5)).unwrap().requests.len(), 1);
    }

    #[test]
    fn a_recording_is_sorted_and_its_sections_follow_each_other() {
        let line = |at, rest: &str| format!(r#"{{"timestamp":{at},"hash_ids":[],{rest}}}"#);
        let text = [
            HEADER.to_owned(),
            line(200, r#""input_length":30,"output_length":9,"max_tokens":99,"outcome":"ok""#),
            line(100, r#""input_length":10,"output_length":2,"max_tokens":8,"outcome":"timeout""#),
            HEADER.to_owned(),
            line(50, r#""input_length":40,"output_length":null,"max_tokens":5,"outcome":"ok""#),
        ];
        let trace = read(&text.join("\n")).unwrap();
        assert_eq!(seconds(&trace), [0.0, 0.1, 0.15]);
        let lengths: Vec<_> =
            trace.requests.iter().map(|one| (one.prompt_tokens, one.answer_tokens)).collect();
        assert_eq!(lengths, [(10, 8), (30, 9), (40, 5)], "the wanted length of a failed answer");
    }

    #[test]
    fn the_part_of_a_line_at_the_end_of_a_recording_is_left_out() {
        let good =
            r#"{"timestamp":5,"hash_ids":[],"input_length":30,"output_length":9,"max_tokens":99}"#;
        let whole = format!("{HEADER}\n{good}\n");
        for torn in [&good[..1], &good[..40], &HEADER[..20], "\0\0\0"] {
            let trace = read(&format!("{whole}{torn}")).unwrap();
            assert_eq!((trace.requests.len(), trace.is_torn), (1, true), "{torn:?}");
            // Not if a line follows.
            let error = read(&format!("{whole}{torn}\n{good}\n")).unwrap_err();
            assert!(error.contains("line 3: it is no JSON object"), "{torn:?}: {error}");
        }
        let trace = read(&format!("{whole}{good}")).unwrap();
        assert_eq!(
            (trace.requests.len(), trace.is_torn),
            (2, false),
            "only its newline is missing"
        );
        let error = read(&format!("{whole}{}", good.replace(":5,", ":-5,"))).unwrap_err();
        assert!(error.contains("line 3: timestamp is -5"), "{error}");
    }

    #[test]
    fn lines_of_a_recording_above_a_limit_are_left_out() {
        let line = |rest: &str| format!(r#"{{"hash_ids":[],"outcome":"ok",{rest}}}"#);
        let good = line(r#""timestamp":5,"input_length":30,"output_length":9,"max_tokens":99"#);
        let padding = format!(r#""x":"{}",""#, "x".repeat(LINE as usize));
        let text = [
            HEADER.to_owned(),
            good.replace("30", "4194305"),
            good.replace(":9,", ":4194305,"),
            good.replace("99", "4194305"),
            good.replace("30", "0"),
            good.replace(":5,", ":1e300,"),
            good.replacen('"', &padding, 1),
            good.clone(),
            good.replacen('"', &padding, 1),
        ];
        let trace = read(&text.join("\n")).unwrap();
        assert_eq!((trace.requests.len(), trace.over_limit), (1, 7));
    }

    #[test]
    fn malformed_lines_are_named() {
        let good = r#"{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": [1]}"#;
        let long = format!("{good}\n{{\"x\": \"{}\"}}", "x".repeat(LINE as usize));
        let deep = format!("{}1", r#"{"a":"#.repeat(100_000));
        let replaced = |from: &str, to: &str| format!("{good}\n\n{}", good.replace(from, to));
        for (text, why) in [
            (format!("{good}\nGET / HTTP/1.1"), "line 2: it is no JSON object"),
            (format!("{good}\n[1]"), "line 2: it is no JSON object"),
            (format!("{good}\n{}", &good[..20]), "line 2: it is no JSON object"),
            (format!("{good}\n\u{0}"), "line 2: it is no JSON object"),
            (deep, "line 1"),
            (long, "line 2 is longer than 262144 bytes"),
            (replaced("\"timestamp\": 1", "\"timestamp\": -1"), "line 3: timestamp is -1"),
            (replaced("\"timestamp\": 1", "\"timestamp\": 1e300"), "line 3: timestamp"),
            (replaced("\"timestamp\": 1, ", ""), "line 3: timestamp is missing"),
            (replaced("\"input_length\": 1", "\"input_length\": 99999999"), "line 3: input_length"),
            (replaced("\"input_length\": 1", "\"input_length\": -1"), "line 3: it is no JSON"),
            (replaced("\"input_length\": 1", "\"input_length\": 0"), "line 3: input_length is 0"),
            (replaced("\"output_length\": 1, ", ""), "line 3: output_length is missing"),
            (replaced("[1]", "[1, 2]"), "line 3: hash_ids has 2 hashes of 512 tokens"),
            (replaced("[1]", "[1.5]"), "line 3: it is no JSON object"),
            (format!("{good}\n{HEADER}"), "line 2: a header follows"),
            (HEADER.replace("ing\":1", "ing\":2"), "line 1: the recording has version 2"),
            (HEADER.replace("256", "0"), "line 1: block_tokens"),
            (HEADER.to_owned(), "no request"),
            (String::new(), "no request"),
        ] {
            let error = read(&text).expect_err(why);
            assert!(error.contains(why), "{error}, not {why}");
        }
    }

    #[test]
    fn lengths_shrink_and_are_cut_with_their_blocks() {
        let line =
            r#"{"timestamp": 1, "input_length": 1100, "output_length": 70, "hash_ids": [1, 2, 3]}"#;
        let mut trace = read(line).unwrap();
        trace.shrink(32).unwrap();
        assert_eq!(trace.block_tokens, 16);
        let request = &trace.requests[0];
        assert_eq!((request.prompt_tokens, request.answer_tokens), (35, 3));
        assert_eq!(trace.cut(20, 100), 1);
        assert_eq!(trace.requests[0].blocks, [1, 2]);
        assert_eq!(trace.cut(20, 100), 0);
        assert!(trace.shrink(17).is_err() && trace.shrink(0).is_err());
        trace.first(0);
        assert!(trace.requests.is_empty());
    }
}
