//! Fetches and stores: the two kinds of stream.

use std::collections::VecDeque;
use std::fmt;

use super::Copies;
use super::pool::BounceBuffer;
use super::stream::{Stream, StreamCopy};
use kvx_core::Result;
use kvx_core::backend::{Direction, Extent};

/// Blocks on their way from a device: a stream of bytes to be sent. See the [module](super).
pub(crate) struct Fetch {
    pub(super) stream: Stream,
    /// What has been copied and not been sent.
    pub(super) copied: VecDeque<HostBytes>,
    /// Bytes of the first of these that have been sent.
    pub(super) at: usize,
}

/// Bytes in a buffer, and which they are.
pub(super) struct HostBytes {
    len: usize,
    bounce: BounceBuffer,
    extents: Vec<Extent>,
}

impl Fetch {
    /// Takes in copies that have ended, and starts as many as there are buffers for.
    ///
    /// # Errors
    /// What a copy said, or the device when asked for a buffer; `OutOfBounds` for blocks outside
    /// their memory; `Forgotten` when a copy was lost; `Cancelled` after [`stop`](Fetch::stop). A
    /// stream that has failed stays so.
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

    /// The next bytes that lie together. None, with some [`left`](Fetch::left): wait for the
    /// stream's token.
    pub(crate) fn bytes(&self) -> &[u8] {
        self.slices().next().unwrap_or_default()
    }

    /// All bytes that have come so far, in order, for a vectored send. They stay in place until
    /// they are [`sent`](Fetch::sent) or the stream is stopped or dropped, whatever else is called.
    pub(crate) fn slices(&self) -> impl Iterator<Item = &[u8]> {
        let mut sent = self.at;
        self.copied
            .iter()
            .map(move |copied| &copied.bounce.bytes()[std::mem::take(&mut sent)..copied.len])
    }

    /// `count` bytes went out: not more than [`slices`](Fetch::slices) has. Buffers that are sent
    /// are free again.
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

    /// Bytes that are not sent yet.
    pub(crate) fn left(&self) -> u64 {
        let copied: usize = self.copied.iter().map(|copied| copied.len).sum();
        self.stream.left() + (copied - self.at) as u64
    }

    /// Returns whether others wait for a buffer while its peer does not read. If not now, its token
    /// comes when they do.
    pub(crate) fn is_in_the_way(&self) -> bool {
        self.stream.pool.is_scarce(&self.stream.shared)
    }

    /// Releases its buffers. Bytes that are not sent are copied again from the next
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

    /// Starts nothing any more and gives the buffers back. Copies in flight end by themselves: the
    /// token comes for each that does, and [`copies`](Fetch::copies) tells.
    pub(crate) fn stop(&mut self) {
        self.stream.stop();
        self.copied.clear();
        self.at = 0;
    }

    /// Where its copies stand.
    pub(crate) fn copies(&self) -> Copies {
        self.stream.copies()
    }
}

impl fmt::Debug for Fetch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Fetch({}, {} bytes left, {:?})",
            self.stream.shared.token,
            self.left(),
            self.copies()
        )
    }
}

/// Blocks on their way to a device: a stream of bytes that are received. See the [module](super).
pub(crate) struct Store {
    pub(super) stream: Stream,
    pub(super) filling: Option<PartialBuffer>,
}

/// The buffer that bytes are received into.
pub(super) struct PartialBuffer {
    bounce: BounceBuffer,
    /// How many bytes the blocks planned for it have.
    len: usize,
    /// How many have come.
    at: usize,
}

impl Store {
    /// Takes in copies that have ended, and says where to receive the next bytes. None, with bytes
    /// still to be received: wait for the stream's token. The room stays in place until bytes are
    /// [`received`](Store::received) into it, or the stream is paused, stopped or dropped.
    ///
    /// # Errors
    /// As [`Fetch::resume`].
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

    /// Notes that `count` bytes were received in the [`room`](Store::room), which must have had as
    /// many. Copies a full buffer.
    pub(crate) fn received(&mut self, count: usize) {
        let Some(filling) = &mut self.filling else { return debug_assert_eq!(count, 0) };
        filling.at += count;
        debug_assert!(filling.at <= filling.len);
        if filling.at >= filling.len {
            self.copy();
        }
    }

    /// No bytes are there to be received now. If others wait for a buffer, this stream's is copied
    /// as far as it is filled, and theirs next; if they come later, the stream's token does too.
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

    /// Returns the number of bytes that are not on the device yet, as [`room`](Store::room) last
    /// saw it for received ones.
    pub(crate) fn left(&self) -> u64 {
        self.stream.left()
    }

    /// Bytes that are still to be received.
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

    /// Where its copies stand.
    pub(crate) fn copies(&self) -> Copies {
        self.stream.copies()
    }
}

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Store({}, {} bytes left, {:?})",
            self.stream.shared.token,
            self.left(),
            self.copies()
        )
    }
}
