//! The lines of an answer that arrives over time.

use std::fmt;

use bytes::{Buf as _, Bytes, BytesMut};
use http_body_util::BodyExt as _;
use hyper::body::Incoming;

/// The reason why there is no further line.
#[derive(Debug)]
pub(crate) enum LineError {
    /// The line is longer than this.
    TooLong(usize),
    /// The body ended early.
    Broken(hyper::Error),
}

impl fmt::Display for LineError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LineError::TooLong(most) => write!(f, "a line is longer than {most} bytes"),
            LineError::Broken(error) => error.fmt(f),
        }
    }
}

/// The lines of a body.
#[derive(Debug)]
pub(crate) struct Lines {
    body: Incoming,
    /// The most bytes of a line.
    most: usize,
    read: BytesMut,
    /// The bytes of `read` that have no end of a line.
    searched: usize,
}

impl Lines {
    /// Creates the lines of a body, of at most this many bytes each.
    pub(crate) fn new(body: Incoming, most: usize) -> Self {
        Lines { body, most, read: BytesMut::new(), searched: 0 }
    }

    /// Returns the next line, or `None` at the end of the body. Dropping the future loses nothing.
    pub(crate) async fn next(&mut self) -> Result<Option<Bytes>, LineError> {
        loop {
            if let Some(end) = self.read[self.searched..].iter().position(|byte| *byte == b'\n') {
                let line = self.read.split_to(self.searched + end).freeze();
                self.read.advance(1);
                self.searched = 0;
                return Ok(Some(line));
            }
            self.searched = self.read.len();
            if self.searched > self.most {
                return Err(LineError::TooLong(self.most));
            }
            match self.body.frame().await {
                None => return Ok(None),
                Some(Ok(frame)) => {
                    self.read.extend_from_slice(&frame.into_data().unwrap_or_default());
                }
                Some(Err(error)) => return Err(LineError::Broken(error)),
            }
        }
    }
}
