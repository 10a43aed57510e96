//! Streamed answers: the chunk with `finish_reason` carries the parameters.

use serde_json::Value;

use super::Answer;
use crate::params::ParamsError;

/// A reader of a streamed answer (server-sent events) that passes through, in pieces of any size.
///
/// It keeps only the fields of an [`Answer`] and at most one line of the stream.
///
/// ```
/// use kvx_vllm::params::recipe::AnswerStream;
/// let mut stream = AnswerStream::default();
/// stream.push(b"data: {\"choices\": [{\"text\": \"a\", \"finish_reason\": null}]}\n\nda").unwrap();
/// stream.push(b"ta: {\"choices\": [{\"finish_reason\": \"stop\"}]}\n\ndata: [DONE]\n\n").unwrap();
/// assert!(stream.done());
/// assert_eq!(stream.answer().finish_reason.as_deref(), Some("stop"));
/// ```
#[derive(Clone, Debug)]
pub struct AnswerStream {
    line: Vec<u8>,
    max_line: usize,
    done: bool,
    answer: Answer,
}

impl Default for AnswerStream {
    /// Limits lines to 16 MiB: a chunk may carry the ids of a long prompt.
    fn default() -> Self {
        Self::with_max_line(16 << 20)
    }
}

impl AnswerStream {
    /// Limits lines to `max_line` bytes.
    pub fn with_max_line(max_line: usize) -> Self {
        AnswerStream { line: Vec::new(), max_line, done: false, answer: Answer::default() }
    }

    /// Reads the next bytes of the stream.
    ///
    /// # Errors
    ///
    /// A chunk that is not a JSON object, an event with an `error`, parameters of a wrong type, or
    /// a line that is too long. After an error, the caller may still pass the bytes on to the
    /// client, but must not push to this stream again.
    pub fn push(&mut self, mut bytes: &[u8]) -> Result<(), ParamsError> {
        while let Some(end) = bytes.iter().position(|byte| *byte == b'\n') {
            let (line, left) = bytes.split_at(end);
            bytes = &left[1..];
            if self.line.is_empty() {
                self.event(line)?;
            } else {
                self.keep(line)?;
                let line = std::mem::take(&mut self.line);
                self.event(&line)?;
            }
        }
        self.keep(bytes)
    }

    /// Returns whether the stream has signalled its end.
    pub fn done(&self) -> bool {
        self.done
    }

    /// Returns the answer that the chunks so far contain.
    pub fn answer(&self) -> &Answer {
        &self.answer
    }

    fn keep(&mut self, bytes: &[u8]) -> Result<(), ParamsError> {
        if self.line.len() + bytes.len() > self.max_line {
            return Err(ParamsError::new(
                "data",
                format!("a line of the stream is longer than {} bytes", self.max_line),
            ));
        }
        self.line.extend_from_slice(bytes);
        Ok(())
    }

    fn event(&mut self, line: &[u8]) -> Result<(), ParamsError> {
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        let Some(data) = line.strip_prefix(b"data:") else { return Ok(()) };
        let data = data.trim_ascii();
        if data == b"[DONE]" {
            self.done = true;
            return Ok(());
        }
        if data.is_empty() {
            return Ok(());
        }
        let chunk: Value = serde_json::from_slice(data).map_err(|error| {
            ParamsError::new("data", format!("a chunk of the stream is not JSON: {error}"))
        })?;
        let Answer { params, finish_reason } = Answer::from_body(&chunk)?;
        if params.is_some() {
            self.answer.params = params;
        }
        if finish_reason.is_some() {
            self.answer.finish_reason = finish_reason;
        }
        Ok(())
    }
}
