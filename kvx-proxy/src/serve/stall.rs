//! Timeouts for clients that stop reading a connection or a stream.

use std::future::Future;
use std::io::{Error, ErrorKind, IoSlice, Result};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use hyper::body::{Frame, SizeHint};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::task::AbortHandle;
use tokio::time::{Instant, Sleep};

/// A connection whose writes fail after the client has read nothing for `patience`.
pub(crate) struct StallTimeout<T> {
    inner: T,
    patience: Duration,
    /// Runs while a write waits.
    sleep: Option<Pin<Box<Sleep>>>,
}

impl<T> StallTimeout<T> {
    pub(crate) fn new(inner: T, patience: Duration) -> Self {
        StallTimeout { inner, patience, sleep: None }
    }

    fn timed<R>(&mut self, polled: Poll<Result<R>>, cx: &mut Context<'_>) -> Poll<Result<R>> {
        if polled.is_ready() {
            self.sleep = None;
            return polled;
        }
        let patience = self.patience;
        let sleep = self
            .sleep
            .get_or_insert_with(|| Box::pin(tokio::time::sleep_until(Instant::now() + patience)));
        match sleep.as_mut().poll(cx) {
            Poll::Pending => Poll::Pending,
            Poll::Ready(()) => {
                Poll::Ready(Err(Error::new(ErrorKind::TimedOut, "the client reads nothing")))
            }
        }
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for StallTimeout<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<Result<()>> {
        Pin::new(&mut self.inner).poll_read(cx, buf)
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for StallTimeout<T> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<Result<usize>> {
        let polled = Pin::new(&mut self.inner).poll_write(cx, buf);
        self.timed(polled, cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<Result<usize>> {
        let polled = Pin::new(&mut self.inner).poll_write_vectored(cx, bufs);
        self.timed(polled, cx)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        let polled = Pin::new(&mut self.inner).poll_flush(cx);
        self.timed(polled, cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        let polled = Pin::new(&mut self.inner).poll_shutdown(cx);
        self.timed(polled, cx)
    }
}

/// An answer over HTTP/2 that is dropped once its client has read nothing of it for a time. A
/// client that opens no window makes no write wait: hyper does not poll its stream's body, which
/// would be held for ever.
pub(crate) struct BodyStallTimeout {
    inner: Arc<Mutex<BodyState>>,
    watch: AbortHandle,
}

/// Longer pieces are split into parts of this length, so that slow reading shows.
const PART: usize = 16 << 10;

struct BodyState {
    /// `None` once the answer is dropped.
    body: Option<Body>,
    /// The rest of the last piece.
    rest: Bytes,
    /// Wakes the task that waits for the next piece.
    waker: Option<Waker>,
    /// The time at which the client last asked for more.
    asked: Instant,
    /// The time after `asked` until the answer is dropped: longer if there was no data for the
    /// client.
    may_wait: Duration,
    patience: Duration,
    /// The time for which the answer itself may have no data.
    silence: Duration,
}

fn lock(taken: &Mutex<BodyState>) -> MutexGuard<'_, BodyState> {
    taken.lock().unwrap_or_else(PoisonError::into_inner)
}

impl BodyStallTimeout {
    /// Wraps an answer. `silence` is the time for which the answer itself may have no data, which
    /// is not its client's fault.
    pub(crate) fn new(body: Body, patience: Duration, silence: Duration) -> Self {
        let taken = BodyState {
            body: Some(body),
            rest: Bytes::new(),
            waker: None,
            asked: Instant::now(),
            may_wait: patience,
            patience,
            silence,
        };
        let inner = Arc::new(Mutex::new(taken));
        let watch = tokio::spawn(watch(Arc::downgrade(&inner))).abort_handle();
        BodyStallTimeout { inner, watch }
    }
}

/// Drops the answer when its client has taken too long.
async fn watch(inner: Weak<Mutex<BodyState>>) {
    loop {
        // Expected: the body was dropped before this task was aborted.
        let Some(inner) = inner.upgrade() else { return };
        let end = {
            let mut taken = lock(&inner);
            let end = taken.asked + taken.may_wait;
            if end <= Instant::now() {
                (taken.body, taken.rest) = (None, Bytes::new());
                Err(taken.waker.take())
            } else {
                Ok(end)
            }
        };
        let end = match end {
            Ok(end) => end,
            // The dropped body would have woken the task.
            Err(waker) => {
                drop(inner);
                return waker.map_or((), Waker::wake);
            }
        };
        drop(inner);
        tokio::time::sleep_until(end).await;
    }
}

impl Drop for BodyStallTimeout {
    fn drop(&mut self) {
        self.watch.abort();
    }
}

impl hyper::body::Body for BodyStallTimeout {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<std::result::Result<Frame<Bytes>, axum::Error>>> {
        let taken = &mut *lock(&self.inner);
        taken.asked = Instant::now();
        taken.may_wait = taken.patience + taken.silence;
        taken.waker = Some(cx.waker().clone());
        let Some(body) = &mut taken.body else {
            let words = "the client has read nothing of this answer for too long";
            return Poll::Ready(Some(Err(axum::Error::new(Error::new(
                ErrorKind::TimedOut,
                words,
            )))));
        };
        if taken.rest.is_empty() {
            match ready!(Pin::new(body).poll_frame(cx)).map(|frame| frame.map(Frame::into_data)) {
                Some(Ok(Ok(data))) => taken.rest = data,
                Some(Ok(Err(other))) => return Poll::Ready(Some(Ok(other))),
                Some(Err(error)) => return Poll::Ready(Some(Err(error))),
                None => return Poll::Ready(None),
            }
        }
        taken.may_wait = taken.patience;
        let part = taken.rest.len().min(PART);
        Poll::Ready(Some(Ok(Frame::data(taken.rest.split_to(part)))))
    }

    fn is_end_stream(&self) -> bool {
        let taken = lock(&self.inner);
        taken.rest.is_empty() && taken.body.as_ref().is_some_and(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        let taken = lock(&self.inner);
        let Some(body) = &taken.body else { return SizeHint::default() };
        let (inner, rest) = (body.size_hint(), taken.rest.len() as u64);
        let mut hint = SizeHint::new();
        hint.set_lower(inner.lower() + rest);
        if let Some(upper) = inner.upper() {
            hint.set_upper(upper + rest);
        }
        hint
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    #[tokio::test]
    async fn a_client_that_reads_nothing_times_out_and_a_slow_one_does_not() {
        let (ours, theirs) = tokio::io::duplex(16);
        let mut writer = StallTimeout::new(ours, Duration::from_millis(50));
        let started = Instant::now();
        let error = writer.write_all(&[0; 64]).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut);
        assert!(started.elapsed() >= Duration::from_millis(50));
        drop(theirs);

        let (ours, mut theirs) = tokio::io::duplex(1);
        let mut writer = StallTimeout::new(ours, Duration::from_secs(5));
        let reading = tokio::spawn(async move {
            let mut all = Vec::new();
            theirs.read_to_end(&mut all).await.map(|_| all.len())
        });
        writer.write_all(&[0; 64]).await.unwrap();
        drop(writer);
        assert_eq!(reading.await.unwrap().unwrap(), 64);
    }
}
