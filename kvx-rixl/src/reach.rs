//! Whether a peer's memory is reached without the peer's CPU, which NIXL does not tell: it is tried out.
//!
//! Over the kernel's cross-memory attach, and between GPUs of one host, a post has moved its bytes when it returns. Over
//! TCP it never has: UCX asks the peer's process to read and write for it. A network card takes its time, too, and is
//! not told from that: such a link promises less than it could.

use std::ffi::CStr;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use kvx_core::{Op, PerOp, Result};

use crate::ffi::{Agent, Range, Request, Segment, State};

/// What a peer writes to the page, and what of it is read.
const LEN: u64 = 8;

/// How long a link that comes up may be tried out, for each operation.
pub(crate) const PATIENCE: Duration = Duration::from_millis(10);
/// How often each operation is tried.
const TIMES: usize = 32;
/// Bytes of the page.
const PAGE: usize = 4096;

/// The page of this process that peers may read, and write to, when they try out what a link can do. Never freed: nobody
/// knows when the last of them does.
pub(crate) fn page() -> Range {
    static ADDRESS: OnceLock<u64> = OnceLock::new();
    let address = *ADDRESS.get_or_init(|| Box::into_raw(Box::new([0_u8; PAGE])) as u64);
    Range { segment: Segment::Host, address, len: PAGE as u64, device: 0 }
}

/// What was found out.
#[derive(Default)]
pub(crate) struct Tried {
    /// Operations that needed nobody.
    pub(crate) alone: [bool; 2],
    /// Those that are in progress: to be kept until they are not.
    pub(crate) in_progress: Vec<Request>,
}

impl Tried {
    /// Operations that need the peer's CPU, as far as is known. The same path carries both: one that once needed the
    /// peer speaks for the other.
    pub(crate) fn target_cpu(&self) -> PerOp {
        PerOp::same(self.alone != [true; 2])
    }
}

/// Reads and writes a few bytes of the peer's page, of which NIXL was told. Errors: what NIXL answers.
pub(crate) fn try_out(agent: &Agent, peer: &CStr, page: &Range) -> Result<Tried> {
    let mut tried = Tried::default();
    // Reads and writes do not touch the same bytes, on either side.
    for (at, op) in [Op::Read, Op::Write].into_iter().enumerate() {
        let offset = at as u64 * LEN;
        let (mut local, mut remote) = (agent.list(Segment::Host)?, agent.list(page.segment)?);
        local.add(self::page().address + PAGE as u64 / 2 + offset, LEN, 0);
        remote.add(page.address + offset, LEN, page.device);
        let request = agent.request(op, &local, &remote, peer)?;
        let until = Instant::now() + PATIENCE;
        // The first request waits until both ends have found each other; the others tell. A peer's process may be quick
        // enough to answer within a post now and then, but not each time.
        for time in 0..=TIMES {
            // SAFETY: the page is never freed, and the request is not in progress.
            let mut state = unsafe { agent.post(&request) };
            tried.alone[at] = state == State::Done && (time <= 1 || tried.alone[at]);
            while state == State::InProgress && Instant::now() < until {
                state = agent.state(&request);
            }
            match state {
                State::Done => {}
                State::InProgress => {
                    tried.in_progress.push(request);
                    break;
                }
                State::Failed(_) => break,
            }
        }
    }
    Ok(tried)
}
