//! Small reads on the poster's thread that bypass the machine, so that their latency does not
//! depend on the machine's other work.

use std::any::Any;
use std::os::fd::AsFd as _;
use std::sync::Arc;

use kvx_core::backend::{BoundPlan, INLINE_BYTES, INLINE_SEGMENTS, copy_shared};

use super::copy;
use super::shared_link::Import;
use super::window::View;

/// The limit for regions of a read that is done inline.
const MAX_REGIONS: usize = 4;
const MAX_PIECES: usize = INLINE_SEGMENTS as usize;

/// Does a small read now, if its regions are open. Returns false, with the ticket unsettled, if the
/// machine must do it. An unresolved page fault blocks only the calling thread.
pub(crate) fn read_inline(plan: &Arc<BoundPlan>) -> bool {
    let mut windows = [const { None }; MAX_REGIONS];
    // Each side has one kind of memory, so the first one is representative.
    let on_host = plan.locals().first().is_none_or(|local| local.memory.kind().is_host());
    if plan.remotes().len() > MAX_REGIONS || !on_host {
        return false;
    }
    for (window, remote) in windows.iter_mut().zip(plan.remotes()) {
        let any: &dyn Any = &*remote.region;
        *window = any.downcast_ref::<Import>().and_then(|import| import.shutter.look());
        if window.is_none() {
            return false;
        }
    }
    let nothing = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
    let (mut ours, mut theirs) = ([nothing; MAX_PIECES], [nothing; MAX_PIECES]);
    let (mut pieces, mut bytes, mut owner) = (0, 0, None);
    for segment in plan.segments(INLINE_BYTES) {
        let Some(window) = windows[segment.remote_region as usize]
            .as_ref()
            .and_then(|view: &View<'_>| view.window.as_ref())
        else {
            return false;
        };
        let into =
            (plan.local(segment.local_region).memory.address() + segment.local_offset) as *mut u8;
        let from = (window.place.base + segment.remote_offset) as *const u8;
        let len = segment.len as usize;
        match &window.owner {
            None => {
                // SAFETY: core checked the plan against the lengths of its regions, and the machine
                // checked the remote length at the grant. The plan keeps the local memory, and the
                // open window keeps the mapping.
                unsafe { copy_shared(from, into, len) };
            }
            Some(_) if pieces == MAX_PIECES => return false,
            Some(watched) => {
                ours[pieces] = libc::iovec { iov_base: into.cast(), iov_len: len };
                theirs[pieces] = libc::iovec { iov_base: from.cast_mut().cast(), iov_len: len };
                (pieces, bytes, owner) = (pieces + 1, bytes + len, Some(watched));
            }
        }
    }
    if let Some(owner) = owner {
        // SAFETY: the local side is memory that the plan keeps, within bounds that core checked.
        let got = unsafe { copy::readv(owner.process.pid, &ours[..pieces], &theirs[..pieces]) };
        if got != Ok(bytes) || !owner.process.still_behind(owner.socket.as_fd()) {
            return false;
        }
    }
    // A transport that ends does not wait for ever: bytes copied after that may belong to other
    // data.
    windows.iter().flatten().all(|window| !window.is_shut())
}
