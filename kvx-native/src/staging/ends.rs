//! The two kinds of stream: fetches and stores.

use std::collections::VecDeque;

use super::Copies;
use super::pool::BounceBuffer;
use super::stream::{Stream, StreamCopy};
use kvx_core::Result;
use kvx_core::backend::{Direction, Extent};

/// Blocks on their way from a device: a stream of bytes to send. See the [module](super).
pub(crate) struct Fetch {
    pub(super) stream: Stream,
    /// The bytes that have been copied and not been sent.
    pub(super) copied: VecDeque<HostBytes>,
    /// The number of bytes of the first of these that have been sent.
    pub(super) at: usize,
}

/// Bytes in a buffer, and the blocks to which they belong.
pub(super) struct HostBytes {
    len: usize,
    bounce: BounceBuffer,
    extents: Vec<Extent>,
}

impl Fetch {
    /// Processes copies that have ended, and starts as many as there are buffers for.
    ///
    /// # Errors
    ///
    /// The error of a copy, or of the device when asked for a buffer; `OutOfBounds` for blocks
    /// outside their memory; `Forgotten` if a copy was lost; `Cancelled` after
    /// [`stop`](Fetch::stop). A stream that has failed stays failed.
    pub(crate) fn resume(&mut self) -> Result<()> {
        let stream = &mut self.stream;
        loop {
            stream.look()?;
            while let Some(copy) = stream.next_landed() {
                let StreamCopy { len, extents, bounce, .. } = copy;
                self.copied.extend(bounce.map(|bounce| HostBytes { len, bounce, extents }));
            }
            if stream.blocks.left() == 0 || self.copied.len() + stream.started.len() >= stream.depth
            {
                return Ok(());
            }
            let Some(bounce) = stream.buffer()? else { return Ok(()) };
            let len = stream.plan()?;
            stream.start(Direction::ToHost, bounce, len);
        }
    }

    /// Returns the next contiguous bytes. If there are none, with some bytes [`left`](Fetch::left),
    /// wait for the stream's token.
    pub(crate) fn bytes(&self) -> &[u8] {
        self.slices().next().unwrap_or_default()
    }

    /// Returns all bytes that are available, in order, for a vectored send. They stay in place
    /// until they are [`sent`](Fetch::sent) or the stream is stopped or dropped, regardless of
    /// other calls.
    pub(crate) fn slices(&self) -> impl Iterator<Item = &[u8]> {
        let mut sent = self.at;
        self.copied
            .iter()
            .map(move |copied| &copied.bounce.bytes()[std::mem::take(&mut sent)..copied.len])
    }

    /// Records that `count` bytes were sent, at most as many as [`slices`](Fetch::slices) has.
    /// Buffers that are completely sent are free again.
    pub(crate) fn sent(&mut self, count: usize) {
        self.at += count;
        while self.copied.front().is_some_and(|first| first.len <= self.at)
            && let Some(HostBytes { len, mut extents, .. }) = self.copied.pop_front()
        {
            self.at -= len;
            extents.clear();
            self.stream.spare.push(extents);
        }
        debug_assert!(self.at == 0 || !self.copied.is_empty());
    }

    /// Returns the number of bytes that are not sent yet.
    pub(crate) fn left(&self) -> u64 {
        let copied: usize = self.copied.iter().map(|copied| copied.len).sum();
        self.stream.left() + (copied - self.at) as u64
    }

    /// Returns true if other streams wait for a buffer while this one's peer does not read.
    /// Otherwise the stream's token arrives when others begin to wait.
    pub(crate) fn is_in_the_way(&self) -> bool {
        self.stream.pool.is_scarce(&self.stream.shared)
    }

    /// Releases the stream's buffers. Unsent bytes are copied again from the next
    /// [`resume`](Fetch::resume) on.
    pub(crate) fn rewind(&mut self) {
        let mut sent = std::mem::take(&mut self.at) as u64;
        let again = self.copied.drain(..).map(|HostBytes { mut extents, .. }| {
            extents.retain_mut(|extent| {
                let now = sent.min(extent.len);
                sent -= now;
                (extent.offset, extent.len) = (extent.offset + now, extent.len - now);
                extent.len > 0
            });
            extents
        });
        self.stream.rewind(again);
    }

    /// Starts no more copies and returns the buffers. Copies in flight still end: the token arrives
    /// for each, and [`copies`](Fetch::copies) reports their state.
    pub(crate) fn stop(&mut self) {
        self.stream.stop();
        self.copied.clear();
        self.at = 0;
    }

    /// Returns the state of the stream's copies.
    pub(crate) fn copies(&self) -> Copies {
        self.stream.copies()
    }
}

/// Blocks on their way to a device: a stream of received bytes. See the [module](super).
pub(crate) struct Store {
    pub(super) stream: Stream,
    pub(super) filling: Option<PartialBuffer>,
}

/// The buffer into which bytes are received.
pub(super) struct PartialBuffer {
    bounce: BounceBuffer,
    /// The number of bytes in the blocks planned for the buffer.
    len: usize,
    /// The number of bytes received.
    at: usize,
}

impl Store {
    /// Processes copies that have ended, and returns the space for the next bytes. If there is none
    /// with bytes still to be received, wait for the stream's token. The space stays in place until
    /// bytes are [`received`](Store::received) into it, or the stream is paused, stopped or
    /// dropped.
    ///
    /// # Errors
    ///
    /// As for [`Fetch::resume`].
    pub(crate) fn room(&mut self) -> Result<Option<&mut [u8]>> {
        let stream = &mut self.stream;
        stream.look()?;
        while stream.next_landed().is_some() {}
        if self.filling.is_none() {
            let in_flight = stream.started.iter().filter(|copy| !copy.landed).count();
            if stream.blocks.left() == 0 || in_flight >= stream.depth {
                return Ok(None);
            }
            let Some(bounce) = stream.buffer()? else { return Ok(None) };
            let len = stream.plan()?;
            self.filling = Some(PartialBuffer { bounce, len, at: 0 });
        }
        Ok(self
            .filling
            .as_mut()
            .map(|filling| &mut filling.bounce.bytes_mut()[filling.at..filling.len]))
    }

    /// Records that `count` bytes were received in the [`room`](Store::room), which must be at
    /// least as long. Copies a full buffer.
    pub(crate) fn received(&mut self, count: usize) {
        let Some(filling) = &mut self.filling else { return debug_assert_eq!(count, 0) };
        filling.at += count;
        debug_assert!(filling.at <= filling.len);
        if filling.at >= filling.len {
            self.copy();
        }
    }

    /// Records that no bytes are available to receive. If others wait for a buffer, the filled part
    /// of this stream's buffer is copied, and then they get it; if they come later, the stream's
    /// token arrives too.
    pub(crate) fn pause(&mut self) {
        if self.filling.is_some() && self.stream.pool.is_scarce(&self.stream.shared) {
            self.copy();
        }
    }

    fn copy(&mut self) {
        let Some(PartialBuffer { bounce, at, .. }) = self.filling.take() else { return };
        if at > 0 {
            self.stream.start(Direction::ToDevice, bounce, at);
        } else {
            self.stream.blocks.back.extend(self.stream.planned.drain(..));
        }
    }

    /// Returns the number of bytes that are not on the device yet. For received bytes it is as
    /// recent as the last [`room`](Store::room).
    pub(crate) fn left(&self) -> u64 {
        self.stream.left()
    }

    /// Returns the number of bytes still to be received.
    #[cfg(test)]
    pub(super) fn wanted(&self) -> u64 {
        let filling = self.filling.as_ref().map_or(0, |filling| filling.len - filling.at);
        self.stream.blocks.left() + filling as u64
    }

    /// Like [`Fetch::stop`].
    pub(crate) fn stop(&mut self) {
        self.stream.stop();
        self.filling = None;
    }

    /// Returns the state of the stream's copies.
    pub(crate) fn copies(&self) -> Copies {
        self.stream.copies()
    }
}
