//! The confirmation of reads from kvx engines: a read succeeds only if the engine still kept the
//! request's blocks when all of them had been read.
//!
//! After the data, the table of the engine's leases is read ([`kvx_vllm::wire::nixl::LeaseKey`]).
//! Only if the request is in it, the engine is notified that its blocks have been read, and the
//! transfer succeeds. The engine may release the blocks once it has the notification.

use std::sync::Arc;

use kvx::{
    Agent, Completion, Deadline, ErrorKind, Memory, Op, Peer, PeerRegion, Place as _, Plan, Region,
    Result, Span, Transfer,
};
use kvx_core::backend::sync::Mutex;
use kvx_vllm::wire::EngineNotification;
use kvx_vllm::wire::nixl::{BUCKET_LEN, LeaseKey};

/// The number of confirmations that are read at the same time. Others wait.
const SLOTS: u32 = 256;
/// The length of a slot: two buckets.
const SLOT_LEN: u64 = 2 * BUCKET_LEN;

/// Registered memory that receives the buckets of peers' leases.
///
/// kvx-connector's memory for generations is another one: tasks of its runtime wait there for a
/// free slot of 32 KiB. NIXL's threads must not wait, so a confirmation without a slot looks again
/// when NIXL polls the transfer, and two buckets need only 256 bytes.
pub(crate) struct BucketSlots {
    region: Region,
    free: Mutex<Vec<u32>>,
}

impl BucketSlots {
    pub(crate) fn new(agent: &Agent, name: &str) -> Result<Self> {
        let memory = Memory::pool((u64::from(SLOTS) * SLOT_LEN) as usize).build()?;
        let region = agent.register(name, memory)?;
        Ok(BucketSlots { region, free: Mutex::new((0..SLOTS).collect()) })
    }

    fn take(self: &Arc<Self>) -> Option<Slot> {
        let at = self.free.lock().pop()?;
        Some(Slot { slots: Arc::clone(self), at })
    }
}

/// A place for two buckets. When it is dropped, another confirmation may use it, so no transfer may
/// still write to it. `Request` guarantees this: it keeps its confirmation until the transfer that
/// [`Confirmation::step`] returned has settled.
struct Slot {
    slots: Arc<BucketSlots>,
    at: u32,
}

impl Slot {
    fn base(&self) -> u64 {
        u64::from(self.at) * SLOT_LEN
    }

    fn bytes(&self) -> Result<[u8; SLOT_LEN as usize]> {
        let mut bytes = [0; SLOT_LEN as usize];
        self.slots.region.copy_out(self.base() as usize, &mut bytes)?;
        Ok(bytes)
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.slots.free.lock().push(self.at);
    }
}

/// The confirmation that a read needs before it succeeds.
pub(crate) struct Confirmation {
    request: Box<str>,
    key: LeaseKey,
    peer: Peer,
    leases: PeerRegion,
    slots: Arc<BucketSlots>,
    slot: Option<Slot>,
    /// The notification of the read, which follows the confirmation.
    notes: Vec<Box<[u8]>>,
    deadline: Deadline,
}

/// The next step of a confirmation.
pub(crate) enum Step {
    /// The leases are being read. Call [`Confirmation::step`] again when the transfer has ended.
    Reading(Transfer),
    /// All slots are in use.
    Waiting,
    /// The read is confirmed, and these notifications tell the engine so.
    Confirmed(Vec<Completion<()>>),
}

impl Confirmation {
    /// Creates the confirmation of a read that has `note` as its notification.
    ///
    /// # Errors
    /// `Unsupported`: the notification names no request.
    pub(crate) fn new(
        (peer, leases): (Peer, PeerRegion),
        slots: Arc<BucketSlots>,
        note: Option<&[u8]>,
        notes: Vec<Box<[u8]>>,
        deadline: Deadline,
    ) -> Result<Self> {
        let request = match note.map(EngineNotification::decode) {
            Some(Ok(EngineNotification::Done { request_id, .. })) => request_id,
            _ => {
                return Err(ErrorKind::Unsupported.because(
                    "the agent is a kvx engine, whose blocks may be reused at any time, and the \
                     read names no request: pass the request's notification with the read, as \
                     vLLM does (\"REQUEST:COUNT\")",
                ));
            }
        };
        let key = LeaseKey::of(&request);
        let request = request.into();
        Ok(Confirmation { request, key, peer, leases, slots, slot: None, notes, deadline })
    }

    /// Continues after the data, or the leases, have been read.
    ///
    /// # Errors
    /// - `Revoked`: the request's lease has ended.
    /// - `TimedOut`: no slot was free by the deadline.
    /// - `Malformed`: the region of the engine's leases is too short.
    /// - Further errors as [`Region::copy_out`], [`Plan::of_spans`] and [`Peer::post`].
    pub(crate) fn step(&mut self) -> Result<Step> {
        if let Some(slot) = &self.slot {
            if !self.key.is_in(&slot.bytes()?) {
                return Err(ErrorKind::Revoked.because(format!(
                    "the lease of request {} has ended, so its blocks may have been reused and \
                     the read fails; a longer kv_lease_duration at the prefill makes this rarer",
                    self.request
                )));
            }
            let notes = self.notes.iter().map(|note| self.peer.notify(note, self.deadline));
            return Ok(Step::Confirmed(notes.collect()));
        }
        let Some(slot) = self.slots.take() else {
            if self.deadline.passed() {
                let why = format!("{SLOTS} confirmations of reads have not ended by the deadline");
                return Err(ErrorKind::TimedOut.because(why));
            }
            return Ok(Step::Waiting);
        };
        let [first, second] = self.key.offsets(self.leases.len()).ok_or_else(|| {
            ErrorKind::Malformed.because("the region of the engine's leases is too short")
        })?;
        let local = slot.base();
        let spans = [
            Span { local, remote: first, len: BUCKET_LEN },
            Span { local: local + BUCKET_LEN, remote: second, len: BUCKET_LEN },
        ];
        let list = (self.slots.region.clone(), self.leases.clone(), &spans[..]);
        let plan = Plan::of_spans(Op::Read, [list])?;
        let reading = self.peer.transfer(&plan).deadline(self.deadline).post()?;
        self.slot = Some(slot);
        Ok(Step::Reading(reading))
    }
}
