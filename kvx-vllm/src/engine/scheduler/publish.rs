//! The end of a request: whether the engine keeps its blocks for a peer, and the parameters that it
//! publishes.

use std::fmt;

use kvx_core::ErrorKind;

use super::super::generations::BlockReference;
use super::super::step::SendOrder;
use super::{LoadStage, Publishes, Scheduler};
use crate::config::BlockRelease;
use crate::ids::{BlockLists, RequestId};
use crate::params::{RemoteBlocks, TransferMode, TransferParams};
use crate::time::Time;

/// The way in which a request has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Status {
    /// The request has reached its maximum number of tokens. A prefill leg always ends like this,
    /// after one token.
    LengthCapped,
    /// The model has stopped.
    Stopped,
    /// The client has disconnected, or the request was rejected.
    Aborted,
    /// The request has failed.
    Failed,
}

/// A request that ends, and its blocks.
#[derive(Clone, Debug)]
pub struct Ending {
    /// The way in which the request has ended.
    pub status: Status,
    /// The blocks of the request from the first token on, group by group. A group with a sliding
    /// window needs at least the blocks of the window.
    pub blocks: BlockLists,
    /// The number of tokens whose KV is in the blocks.
    pub computed: u32,
    /// The number of prompt tokens that were found in the prefix cache.
    pub cached: Option<u32>,
    /// The current reference of the pool's [`Generations`](crate::engine::Generations), if it has
    /// them.
    pub reference: Option<BlockReference>,
}

impl Ending {
    /// Creates the ending of an aborted request, whose blocks are not kept.
    pub fn aborted() -> Self {
        Ending {
            status: Status::Aborted,
            blocks: BlockLists::default(),
            computed: 0,
            cached: None,
            reference: None,
        }
    }
}

/// The handling of a request that has ended.
#[derive(Clone, Debug, Default)]
pub struct Finished {
    /// True if the engine must keep the blocks until [`Outcome::Free`](super::Outcome::Free) names
    /// the request.
    pub delay_free: bool,
    /// The `kv_transfer_params` for the answer.
    pub params: Option<TransferParams>,
    /// The reason why there are no `params` although the request asked for them.
    pub withheld: Option<Withheld>,
}

/// A reason for publishing no parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Withheld {
    /// The kind of the error that a caller gets.
    pub kind: ErrorKind,
    /// The reason, and what to do.
    pub reason: &'static str,
}

impl Withheld {
    /// Creates the reason for a mistake of the caller.
    pub fn invalid(reason: &'static str) -> Self {
        Withheld { kind: ErrorKind::Invalid, reason }
    }
}

impl fmt::Display for Withheld {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.reason)
    }
}

impl Publishes {
    /// Returns whether the engine keeps blocks after a request ended like this.
    fn after(self, status: Status) -> bool {
        match self {
            Publishes::Nothing => false,
            Publishes::ForTransfer => status == Status::LengthCapped,
            Publishes::ForDecode | Publishes::ForNextTurn => {
                matches!(status, Status::LengthCapped | Status::Stopped)
            }
        }
    }
}

impl Scheduler {
    /// Ends a request in any state. An engine with one KV cache group calls the same method.
    pub fn request_finished(&mut self, now: Time, request: &RequestId, ending: Ending) -> Finished {
        // Requests without parameters have no entry.
        let Some(entry) = self.requests.get(request) else { return Finished::default() };
        let (publishes, announced) = (entry.publishes, entry.announced);
        if !self.end_load(now, request) {
            if announced {
                self.next.dropped.push(request.clone());
            }
            return Finished { delay_free: true, ..Finished::default() };
        }
        let finished = match publishes {
            _ if !publishes.after(ending.status) => Finished::default(),
            _ => match self.publish(now, request, publishes, ending) {
                Ok(params) => Finished { delay_free: true, params, withheld: None },
                Err(reason) => {
                    Finished { withheld: Some(Withheld::invalid(reason)), ..Finished::default() }
                }
            },
        };
        if announced && !finished.delay_free {
            self.next.dropped.push(request.clone());
        }
        finished
    }

    /// Returns whether the engine keeps blocks of a request for a peer if the request ends like
    /// this.
    #[doc(hidden)]
    pub fn would_publish(&self, request: &RequestId, status: Status) -> bool {
        self.requests.get(request).is_some_and(|entry| entry.publishes.after(status))
    }

    /// Returns whether the engine keeps blocks of a request for a peer if the request succeeds.
    #[doc(hidden)]
    pub fn may_publish(&self, request: &RequestId) -> bool {
        self.would_publish(request, Status::LengthCapped)
    }

    /// Revokes blocks that the engine keeps for a peer, even if the peer still wants them.
    ///
    /// Returns true if the engine may free them at once. No outcome follows, and readers detect the
    /// reuse by the [`Generations`](crate::engine::Generations) of the blocks. Returns false if the
    /// blocks are not kept, or if this engine may be writing them to a peer. In the second case an
    /// outcome reports when they are free.
    pub fn withdraw(&mut self, request: &RequestId) -> bool {
        if !self.sending.contains(request) {
            return false;
        }
        let sends = self.next.send.len();
        self.next.send.retain(|order| order.request != *request);
        self.next.prefilling.retain(|prefilling| prefilling != request);
        self.next.withdrawn.push(request.clone());
        let unknown = self.next.send.len() < sends;
        let at_once = unknown || self.settings.mode == TransferMode::Pull;
        if at_once {
            self.sending.remove(request);
        }
        at_once
    }

    /// Ends a load, if there is one, and forgets the request. Returns false if workers still have
    /// its blocks.
    fn end_load(&mut self, now: Time, request: &RequestId) -> bool {
        let load = self.requests.get(request).and_then(|entry| entry.load.as_ref());
        if load.is_some_and(|load| !matches!(load.stage, LoadStage::Over)) {
            self.over(request);
        }
        let Some(load) = self.requests.remove(request).and_then(|entry| entry.load) else {
            return true;
        };
        let release = load.release(request, now + self.settings.load_timeout);
        match &load.stage {
            LoadStage::Over => {}
            LoadStage::Arrived => self.next.receive.extend(release),
            LoadStage::Ordered(_) => {
                self.next.receive.retain(|order| order.request != *request);
                self.next.receive.extend(release);
            }
            LoadStage::Loading(allocation) => {
                self.next.cancel.push(request.clone());
                self.held.insert(request.clone(), allocation.fill.clone());
                return false;
            }
        }
        true
    }

    fn publish(
        &mut self,
        now: Time,
        request: &RequestId,
        publishes: Publishes,
        ending: Ending,
    ) -> Result<Option<TransferParams>, &'static str> {
        let for_next_turn = publishes == Publishes::ForNextTurn;
        let settings = &self.settings;
        if ending.computed == 0 {
            return Err("no token was computed");
        }
        // A peer aligns lists at their ends, so they must contain exactly the blocks of the tokens.
        // With fewer blocks, vLLM's engine crashes.
        let needed = settings.blocks_for(ending.computed) as usize;
        if ending.blocks.groups().len() != settings.groups.len() {
            return Err("each KV cache group needs its own list of blocks");
        }
        let mut lists = Vec::with_capacity(settings.groups.len());
        for (blocks, clip) in ending.blocks.groups().iter().zip(&settings.groups) {
            let (from, to) = match clip {
                None => (0, needed),
                // The list of a window may begin anywhere, but ends with the request.
                Some(clip) => {
                    (blocks.len().saturating_sub((*clip as usize).min(needed)), blocks.len())
                }
            };
            let list = blocks
                .get(from..to)
                .ok_or("there are fewer blocks than the computed tokens need")?;
            if list.is_empty() {
                return Err("there are fewer blocks than the computed tokens need");
            }
            lists.push(list.to_vec());
        }
        let kept = if for_next_turn {
            settings.decoder_ttl
        } else {
            match settings.release {
                BlockRelease::Lease(lease) => lease.duration,
                BlockRelease::After(duration) => duration,
            }
        };
        let expires = now + kept;
        let named = publishes == Publishes::ForTransfer;
        let push = (named || settings.mode == TransferMode::Push && !for_next_turn)
            .then(|| BlockLists::new(lists.iter().map(Vec::as_slice)));
        let order = SendOrder { request: request.clone(), expires, push };
        self.sending.insert(request.clone());
        if named {
            // The decode that knows the transfer's name asks for the blocks.
            self.next.send.push(order);
            return Ok(self.transfer_answer(request, ending.computed));
        }
        let mut remote = RemoteBlocks::new(
            settings.engine.as_str(),
            request.as_str(),
            &*settings.address.host,
            settings.address.port,
            lists,
        );
        remote.tp_size = settings.tp_size.max(settings.dcp_size);
        remote.dcp_size = settings.dcp_size;
        remote.pp_size = settings.pp_size;
        remote.num_tokens = Some(ending.computed.into());
        remote.expiry_time = for_next_turn.then_some(expires.seconds());
        remote.registration_generation = self.registration;
        remote.mode = settings.mode;
        remote.prefill_cached_tokens = ending.cached.map(u64::from);
        remote.block_reference = ending.reference.map(|reference| reference.to_string());
        let mut params = if for_next_turn {
            TransferParams::decoded(remote, settings.version)
        } else {
            TransferParams::prefilled(remote, settings.version)
        };
        // Sign the parameters as a reader parses them: not every version writes every field.
        params.kvx_signature =
            params.remote_blocks().ok().and_then(|remote| settings.trust.sign(&remote, kept));
        self.next.send.push(order);
        Ok(Some(params))
    }
}
