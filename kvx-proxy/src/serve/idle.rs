//! The requests in progress on an HTTP/2 connection. Its frames do not tell whether it is idle: a
//! client can send pings for ever.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use hyper::Response;
use hyper::body::{Frame, SizeHint};
use tokio::sync::watch;

/// The number of requests in progress on a connection.
#[derive(Clone, Debug, Default)]
pub(super) struct OpenRequests(watch::Sender<usize>);

/// A request in progress, until its answer has been sent or dropped.
#[derive(Debug)]
pub(super) struct OpenRequest(OpenRequests);

impl OpenRequests {
    pub(super) fn begin(&self) -> OpenRequest {
        self.0.send_modify(|open| *open += 1);
        OpenRequest(self.clone())
    }

    /// Returns once the connection has had no request for this time.
    pub(super) async fn idle_for(&self, time: Duration) {
        let mut open = self.0.subscribe();
        loop {
            // The sender lives at least as long as `self`.
            let none = open.wait_for(|open| *open == 0).await.is_ok();
            debug_assert!(none, "the sender lives");
            tokio::select! {
                () = tokio::time::sleep(time) => return,
                changed = open.changed() => debug_assert!(changed.is_ok(), "the sender lives"),
            }
        }
    }
}

impl OpenRequest {
    /// Counts the request until the body of its answer is dropped.
    pub(super) fn until_sent(self, answer: Response<Body>) -> Response<Body> {
        answer.map(|body| Body::new(CountedBody { body, _open: self }))
    }
}

impl Drop for OpenRequest {
    fn drop(&mut self) {
        self.0.0.send_modify(|open| *open -= 1);
    }
}

/// The body of a request in progress.
struct CountedBody {
    body: Body,
    _open: OpenRequest,
}

impl hyper::body::Body for CountedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.get_mut().body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_connection_is_idle_after_its_last_request() {
        let (requests, time) = (OpenRequests::default(), Duration::from_millis(20));
        let started = std::time::Instant::now();
        requests.idle_for(time).await;
        assert!(started.elapsed() >= time);
        let open = requests.begin();
        let answer = open.until_sent(Response::new(Body::from("a")));
        assert!(tokio::time::timeout(time * 5, requests.idle_for(time)).await.is_err());
        drop(answer);
        drop(requests.begin());
        let idle = tokio::time::timeout(Duration::from_secs(10), requests.idle_for(time));
        assert!(idle.await.is_ok());
    }
}
