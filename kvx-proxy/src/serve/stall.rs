//! Clients that read nothing.

use std::future::Future;
use std::io::{Error, ErrorKind, IoSlice, Result};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep};

/// A connection whose writes fail once the other side has taken nothing for a time.
pub(crate) struct Unstalled<T> {
    inner: T,
    patience: Duration,
    /// Runs while a write waits.
    sleep: Option<Pin<Box<Sleep>>>,
}

impl<T> Unstalled<T> {
    pub(crate) fn new(inner: T, patience: Duration) -> Self {
        Unstalled { inner, patience, sleep: None }
    }

    fn timed<R>(&mut self, polled: Poll<Result<R>>, cx: &mut Context<'_>) -> Poll<Result<R>> {
        if polled.is_ready() {
            self.sleep = None;
            return polled;
        }
        let patience = self.patience;
        let sleep =
            self.sleep.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(Instant::now() + patience)));
        match sleep.as_mut().poll(cx) {
            Poll::Pending => Poll::Pending,
            Poll::Ready(()) => Poll::Ready(Err(Error::new(ErrorKind::TimedOut, "the client reads nothing"))),
        }
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for Unstalled<T> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<Result<()>> {
        Pin::new(&mut self.inner).poll_read(cx, buf)
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for Unstalled<T> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<Result<usize>> {
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

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    #[tokio::test]
    async fn who_reads_nothing_is_given_up_and_who_reads_slowly_is_not() {
        let (ours, theirs) = tokio::io::duplex(16);
        let mut writer = Unstalled::new(ours, Duration::from_millis(50));
        let started = Instant::now();
        let error = writer.write_all(&[0; 64]).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut);
        assert!(started.elapsed() >= Duration::from_millis(50));
        drop(theirs);

        let (ours, mut theirs) = tokio::io::duplex(1);
        let mut writer = Unstalled::new(ours, Duration::from_secs(5));
        let reading = tokio::spawn(async move {
            let mut all = Vec::new();
            theirs.read_to_end(&mut all).await.map(|_| all.len())
        });
        writer.write_all(&[0; 64]).await.unwrap();
        drop(writer);
        assert_eq!(reading.await.unwrap().unwrap(), 64);
    }
}
