//! The end of a request: whether its blocks stay for a peer, and what the peer is told of them.

use crate::config::BlockRelease;

use super::super::generations::BlockReference;
use super::super::step::SendOrder;
use super::{LoadStage, Publishes, Scheduler};
use crate::ids::{BlockLists, RequestId};
use crate::params::{RemoteBlocks, TransferMode, TransferParams};
use crate::time::Time;

/// How a request has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Status {
    /// It has as many tokens as it may have. A prefill leg always ends like this, after one token.
    LengthCapped,
    /// The model has stopped.
    Stopped,
    /// The client has gone, or it was refused.
    Aborted,
    /// It has failed.
    Failed,
}

/// A request that ends, with what it has.
#[derive(Clone, Debug)]
pub struct Ending {
    /// How.
    pub status: Status,
    /// Its blocks from the first token on, group by group; of a group with a sliding window at least those of the
    /// window.
    pub blocks: BlockLists,
    /// Tokens whose KV is in the blocks.
    pub computed: u32,
    /// Tokens of the prompt that were found in the prefix cache.
    pub cached: Option<u32>,
    /// What [`Generations`](crate::engine::Generations) says now, if the pool has them.
    pub reference: Option<BlockReference>,
}

impl Ending {
    /// Nobody wants the request any more, and nothing of it is kept.
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

/// What becomes of a request that has ended.
#[derive(Clone, Debug, Default)]
pub struct Finished {
    /// The engine keeps the blocks until [`Outcome::Free`](super::Outcome::Free) names the request.
    pub delay_free: bool,
    /// What goes into the answer as `kv_transfer_params`.
    pub params: Option<TransferParams>,
    /// Why there are none although the request asked for them.
    pub withheld: Option<&'static str>,
}

impl Publishes {
    /// Whether blocks are kept after such an end.
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
    /// A request has ended, in whatever state it was. An engine with one KV cache group calls the same method.
    pub fn request_finished(&mut self, now: Time, request: &RequestId, ending: Ending) -> Finished {
        // Requests without parameters are not known.
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
                Err(why) => Finished { withheld: Some(why), ..Finished::default() },
            },
        };
        if announced && !finished.delay_free {
            self.next.dropped.push(request.clone());
        }
        finished
    }

    /// Whether blocks of a request are kept for a peer if it ends like this.
    #[doc(hidden)]
    pub fn would_publish(&self, request: &RequestId, status: Status) -> bool {
        self.requests.get(request).is_some_and(|entry| entry.publishes.after(status))
    }

    /// Whether blocks of a request are kept for a peer if it ends well.
    #[doc(hidden)]
    pub fn may_publish(&self, request: &RequestId) -> bool {
        self.would_publish(request, Status::LengthCapped)
    }

    /// The engine takes back blocks that it keeps for a peer, whoever still wants them. True: it frees them itself, and
    /// hears nothing more of them; what tells a reader that it was too late are the
    /// [`Generations`](crate::engine::Generations) of the blocks. False: they are not kept, or this engine itself may
    /// be writing them to a peer: then an outcome says when they are free.
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

    /// Ends a load, if there is one, and forgets the request. False: workers still have its blocks.
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
        // A peer pairs lists by their ends, so they hold exactly the blocks of the tokens: with fewer, vLLM's engine
        // dies.
        let needed = settings.blocks_for(ending.computed) as usize;
        if ending.blocks.groups().len() != settings.groups.len() {
            return Err("there is not a list of blocks for each KV cache group");
        }
        let mut lists = Vec::with_capacity(settings.groups.len());
        for (blocks, clip) in ending.blocks.groups().iter().zip(&settings.groups) {
            let (from, to) = match clip {
                None => (0, needed),
                // The list of a window may begin anywhere; it ends with the request.
                Some(clip) => {
                    (blocks.len().saturating_sub((*clip as usize).min(needed)), blocks.len())
                }
            };
            let list =
                blocks.get(from..to).ok_or("there are fewer blocks than computed tokens need")?;
            if list.is_empty() {
                return Err("there are fewer blocks than computed tokens need");
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
            // Whoever knows the transfer's name asks for the blocks.
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
        // The signature covers the parameters as a reader gets them: not every version writes every field.
        params.kvx_signature =
            params.remote_blocks().ok().and_then(|remote| settings.trust.sign(&remote, kept));
        self.next.send.push(order);
        Ok(Some(params))
    }
}
