//! Posts pieces of a transfer: chooses the rail, bundles pieces, and returns them to the job while
//! the provider has no capacity.

use std::ffi::c_void;

use kvx_backend::fabric::Job;
use kvx_core::backend::Segment;
use kvx_core::{Op, Result};

use crate::error;
use crate::fabric::LibfabricFabric;
use crate::ffi::{self, Range};
use crate::memory::{Local, Remote};
use crate::process_copy;
use crate::rail::{Post, PostOutcome};
use crate::subnets;

/// The path of a piece: the local rail, the local memory's descriptor and the remote position.
pub(crate) struct PiecePath {
    pub(crate) rail: usize,
    pub(crate) descriptor: *mut c_void,
    pub(crate) remote: ffi::RemoteRange,
}

/// A job's number of posts so far, from which the rail of its next pieces follows.
#[derive(Default)]
pub(crate) struct PostingState(usize);

/// Pieces of one operation, from one local rail to one of the peer's rails.
#[derive(Default)]
pub(crate) struct Bundle {
    rail: usize,
    segments: Vec<Segment>,
    ranges: Vec<Range>,
    bytes: u64,
}

/// The outcome of posting pieces.
pub(crate) enum PieceOutcome {
    /// The pieces are in flight, and the provider will report their end.
    Posted,
    /// The pieces were copied and have completed.
    Copied,
    /// The provider has no capacity now.
    NoCapacity,
}

impl LibfabricFabric {
    /// Returns the path of the `turn`th piece of a transfer to a peer. Errors: libfabric's.
    #[inline]
    pub(crate) fn path(
        &mut self,
        peer: usize,
        turn: usize,
        local: &Local,
        remote: &Remote,
        offset: u64,
    ) -> Result<PiecePath> {
        let Some(pairs) = self.peers.peer(peer).map(|peer| &peer.pairs) else {
            return Err(error::lost_link());
        };
        let (near, far) = subnets::choose(turn, pairs, local.rails(), remote.rails());
        let ((rail, descriptor), key) = (local.rail(near), remote.key(far));
        let peer = self.peers.peer_number(peer, rail, key.rail, &self.rails[rail])?;
        let remote = ffi::RemoteRange { peer, address: key.base + offset, key: key.key };
        Ok(PiecePath { rail, descriptor, remote })
    }

    /// Gathers the next pieces of a job that have the same path.
    fn gather(
        &mut self,
        at: usize,
        job: &mut Job<'_, LibfabricFabric>,
        most: u64,
    ) -> Result<Bundle> {
        let mut bundle = Bundle { bytes: 0, ..std::mem::take(&mut self.bundle) };
        bundle.segments.clear();
        bundle.ranges.clear();
        // Jobs begin on different rails.
        let turn = job.id().number().wrapping_add(job.state().0);
        while bundle.ranges.len() < self.together
            && bundle.bytes < most
            && let Some(piece) = job.next_piece()
        {
            let (ours, theirs) = (job.local(piece.local_region), job.remote(piece.remote_region));
            let PiecePath { rail, descriptor, remote } =
                self.path(at, turn, ours, theirs, piece.remote_offset)?;
            if bundle
                .ranges
                .first()
                .is_some_and(|first| (bundle.rail, first.remote.peer) != (rail, remote.peer))
            {
                job.put_back(piece);
                break;
            }
            let (local, len) = (job.local_address(&piece) as *mut u8, piece.len as usize);
            bundle.rail = rail;
            bundle.bytes += piece.len;
            bundle.segments.push(piece);
            bundle.ranges.push(Range { local, len, descriptor, remote });
        }
        Ok(bundle)
    }

    /// Posts the next pieces of a job: `most` bytes of them, or slightly more. Returns the outcome,
    /// the number of pieces and their bytes; `None` if no piece is left.
    pub(crate) fn post_some(
        &mut self,
        at: usize,
        job: &mut Job<'_, LibfabricFabric>,
        most: u64,
    ) -> Result<Option<(PieceOutcome, u32, u64)>> {
        let bundle = self.gather(at, job, most)?;
        let (count, bytes) = (bundle.ranges.len() as u32, bundle.bytes);
        let post = Post { op: job.op(), job: job.id(), peer: at };
        let gone = match count {
            0 => Ok(PieceOutcome::NoCapacity),
            // SAFETY: core checked that each piece lies within its region, which the job keeps
            // until the piece is reported.
            _ => unsafe { self.post(post, bundle.rail, &bundle.ranges) },
        };
        match gone {
            Ok(PieceOutcome::NoCapacity) => {
                bundle.segments.iter().rev().for_each(|piece| job.put_back(*piece))
            }
            _ => job.state().0 += 1,
        }
        self.bundle = bundle;
        gone.map(|gone| (count > 0).then_some((gone, count, bytes)))
    }

    /// Posts pieces; over shared memory copies them instead, see [`process_copy`].
    ///
    /// # Safety
    /// As for [`Rail::post`].
    ///
    /// [`Rail::post`]: crate::rail::Rail::post
    #[inline]
    unsafe fn post(&mut self, post: Post, rail: usize, pieces: &[Range]) -> Result<PieceOutcome> {
        if let Some(host) = self.peers.peer(post.peer).and_then(|peer| peer.address.host.as_ref()) {
            // SAFETY: guaranteed by the caller.
            return unsafe { process_copy::copy(host.process, post.op, pieces) }
                .map(|()| PieceOutcome::Copied);
        }
        // SAFETY: guaranteed by the caller.
        match unsafe { self.rails[rail].post(post, pieces) } {
            Ok(PostOutcome::Posted) => {
                if self.reads_back && post.op == Op::Write {
                    self.read_backs.note_written(post.job, rail, pieces);
                }
                Ok(PieceOutcome::Posted)
            }
            Ok(PostOutcome::Later) => Ok(PieceOutcome::NoCapacity),
            Err(errno) => {
                Err(error::native("libfabric could not post a piece of the transfer", errno))
            }
        }
    }
}
