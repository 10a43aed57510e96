//! Streams answers as server-sent events, one chunk per token.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use axum::body::{Body, Bytes};
use axum::http::Response;
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE};
use axum::response::IntoResponse;
use hyper::body::Frame;
use serde_json::Value;

use super::error::ApiError;
use super::request::CompletionRequest;
use super::response::PartialAnswer;
use super::service::Service;
use crate::engine::Answer;

/// The chunks of a request's answers in the order of their arrival.
struct Events {
    service: Arc<Service>,
    request: CompletionRequest,
    answers: Vec<Answer>,
    partial: Vec<PartialAnswer>,
    /// The answer to poll first next time, so that all are polled in turn.
    turn: usize,
    ready: VecDeque<Bytes>,
    done: bool,
}

/// Returns a response that streams these answers.
pub(crate) fn response(
    service: Arc<Service>,
    request: CompletionRequest,
    answers: Vec<Answer>,
) -> Response<Body> {
    let partial = answers.iter().map(|_| PartialAnswer::default()).collect();
    let mut ready = VecDeque::new();
    if request.chat {
        ready.extend((0..answers.len()).map(|index| event(&request.first_chunk(index))));
    }
    let events = Events { service, request, answers, partial, turn: 0, ready, done: false };
    let headers = [(CONTENT_TYPE, "text/event-stream; charset=utf-8"), (CACHE_CONTROL, "no-cache")];
    (headers, Body::new(events)).into_response()
}

fn event(value: &Value) -> Bytes {
    Bytes::from(format!("data: {value}\n\n"))
}

impl Events {
    /// Polls the answers. Returns whether there was anything to send.
    fn gather(&mut self, context: &mut Context<'_>) -> bool {
        let mut any = false;
        for step in 0..self.answers.len() {
            let index = (self.turn + step) % self.answers.len();
            if self.partial[index].has_ended() {
                continue;
            }
            match self.answers[index].poll_next(context) {
                Poll::Pending => {}
                Poll::Ready(Some(Ok(piece))) => {
                    any = true;
                    let chunk =
                        self.request.chunk(index, piece, &mut self.partial[index], &self.service);
                    self.ready.push_back(event(&chunk));
                }
                Poll::Ready(Some(Err(failure))) => return self.break_off(&failure.0),
                Poll::Ready(None) => {
                    return self
                        .break_off("the engine has ended; see the server's log for the reason");
                }
            }
        }
        self.turn += 1;
        if self.partial.iter().all(PartialAnswer::has_ended) {
            if self.request.include_usage {
                self.ready
                    .push_back(event(&self.request.usage_chunk(&self.partial, &self.service)));
            }
            return self.finish();
        }
        any
    }

    fn break_off(&mut self, words: &str) -> bool {
        self.ready.push_back(event(&ApiError::internal(words).body()));
        self.finish()
    }

    fn finish(&mut self) -> bool {
        self.ready.push_back(Bytes::from_static(b"data: [DONE]\n\n"));
        self.done = true;
        // Aborts the answers that are still running.
        self.answers.clear();
        true
    }
}

impl hyper::body::Body for Events {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let this = self.get_mut();
        loop {
            if let Some(bytes) = this.ready.pop_front() {
                return Poll::Ready(Some(Ok(Frame::data(bytes))));
            }
            if this.done {
                return Poll::Ready(None);
            }
            if !this.gather(context) {
                return Poll::Pending;
            }
        }
    }
}
