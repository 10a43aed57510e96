//! The scenarios of the model: the engines' settings, the requests, the faults that may happen, and
//! the known bugs that a transition can have.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use kvx_vllm::config::{BlockRelease, LeaseTime};
use kvx_vllm::engine::{Address, ConnectorMeta, PeerPlan, RequestId, Settings, Time};
use kvx_vllm::params::{RemoteBlocks, TransferMode, TransferParams};

/// The tokens of a block, and of a prompt: each request has one block.
pub(super) const TOKENS: u32 = 4;
/// The duration of a lease. A heartbeat extends it by two thirds.
pub(super) const LEASE: u64 = 3;
/// The interval between heartbeats.
const HEARTBEAT: u64 = 1;
/// The time that a load may take.
const LOAD: u64 = 2;
/// The time that a client waits.
pub(super) const PATIENCE: u64 = 4;
/// An engine that waits longer waits for ever.
pub(super) const HORIZON: u64 = 100;

/// One of the two engines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Role {
    Prefill,
    Decode,
}

impl Role {
    pub(super) const BOTH: [Role; 2] = [Role::Prefill, Role::Decode];

    pub(super) fn other(self) -> Role {
        match self {
            Role::Prefill => Role::Decode,
            Role::Decode => Role::Prefill,
        }
    }
}

/// The mistake of another engine, made by one transition of the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Bug {
    /// vllm#52234: the decode has no means to notice that the prefill reused the blocks that the
    /// parameters name.
    NoGenerations,
    /// vllm#46283: the blocks of a load return only when the prefill reports it. The decode's
    /// worker learns neither that the request was aborted nor that its time has passed.
    OnlyThePeerEndsALoad,
    /// sglang#38961: the decode gives the blocks of an aborted load back after some time, without
    /// the prefill's word that it no longer writes to them.
    ReleasesBeforeTheWriteEnds,
    /// sglang#38961: the prefill forgets an aborted write, and frees what it still reads.
    ForgetsTheWrite,
}

/// The faults that may still happen, in any order and at any moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Faults {
    /// Messages or handshakes that are lost.
    pub(super) losses: u8,
    /// Messages that arrive twice.
    pub(super) repeats: u8,
    /// Clients that disconnect.
    pub(super) aborts: u8,
    /// Restarts of either engine.
    pub(super) restarts: u8,
    /// The most faults of all kinds.
    pub(super) total: u8,
}

impl Faults {
    pub(super) const NONE: Faults =
        Faults { losses: 0, repeats: 0, aborts: 0, restarts: 0, total: 0 };

    /// Takes one fault of a kind, if it may happen.
    pub(super) fn take(mut self, kind: impl Fn(&mut Faults) -> &mut u8) -> Option<Faults> {
        self.total = self.total.checked_sub(1)?;
        let left = kind(&mut self);
        *left = left.checked_sub(1)?;
        Some(self)
    }
}

/// Something that must happen in some run, so that the model is not empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Sight {
    Loaded,
    Stale,
    TimedOut,
    NotPushed,
    Transfer,
    Released,
    Expired,
    Renewed,
    Held,
    Fenced,
    Refused,
}

impl Sight {
    const ALL: [Sight; 11] = [
        Sight::Loaded,
        Sight::Stale,
        Sight::TimedOut,
        Sight::NotPushed,
        Sight::Transfer,
        Sight::Released,
        Sight::Expired,
        Sight::Renewed,
        Sight::Held,
        Sight::Fenced,
        Sight::Refused,
    ];
}

/// A scenario.
pub(super) struct Scene {
    pub(super) mode: TransferMode,
    pub(super) requests: usize,
    /// The blocks of each engine, and so the requests that can have one at a time.
    pub(super) blocks: u32,
    pub(super) faults: Faults,
    pub(super) bug: Option<Bug>,
    settings: [Settings; 2],
    names: Vec<[RequestId; 2]>,
    asked: TransferParams,
    seen: Arc<AtomicU32>,
}

impl Scene {
    pub(super) fn new(mode: TransferMode, requests: usize, faults: Faults) -> Self {
        let settings = Role::BOTH.map(|role| settings(role, mode));
        let name =
            |number: usize| ["a", "d"].map(|role| format!("cmpl-{number}-0-0000000{role}").into());
        Scene {
            mode,
            requests,
            blocks: 1,
            faults,
            bug: None,
            settings,
            names: (0..requests).map(name).collect(),
            asked: TransferParams::ask_prefill(),
            seen: Arc::default(),
        }
    }

    pub(super) fn with_blocks(mut self, blocks: u32) -> Self {
        self.blocks = blocks;
        self
    }

    pub(super) fn with_bug(mut self, bug: Bug) -> Self {
        self.bug = Some(bug);
        self
    }

    pub(super) fn settings(&self, role: Role) -> &Settings {
        &self.settings[role as usize]
    }

    /// Returns an engine's name of a request.
    pub(super) fn name(&self, role: Role, request: usize) -> &RequestId {
        &self.names[request][role as usize]
    }

    /// Returns the request that an engine, or both, know by this name.
    pub(super) fn number(&self, name: &str) -> usize {
        let known = |names: &[RequestId; 2]| {
            names.iter().any(|known| known.as_str() == name || known.shared() == name)
        };
        self.names.iter().position(known).expect("a name of this model")
    }

    /// Returns the parameters of a prefill leg.
    pub(super) fn asked(&self) -> &TransferParams {
        &self.asked
    }

    /// Returns the parameters that a router gives to the decode leg of a push.
    pub(super) fn pushed(&self, request: usize) -> TransferParams {
        let prefill = self.settings(Role::Prefill);
        let shared = self.name(Role::Decode, request).shared();
        let address = &prefill.address;
        let mut remote = RemoteBlocks::new(
            prefill.engine.as_str(),
            shared,
            &*address.host,
            address.port,
            vec![],
        );
        remote.mode = TransferMode::Push;
        remote.num_tokens = Some(TOKENS.into());
        TransferParams::prefilled(remote, prefill.version)
    }

    /// Returns whether engines have generation counters of their blocks.
    pub(super) fn has_generations(&self) -> bool {
        self.mode == TransferMode::Pull && self.bug != Some(Bug::NoGenerations)
    }

    /// Returns the plan of a connection.
    pub(super) fn plan(&self) -> PeerPlan {
        let mut plan = PeerPlan::one_to_one(TOKENS, self.blocks).expect("a valid plan");
        plan.generations = self.has_generations();
        plan
    }

    /// Passes the message of a step to the worker, as an engine with the bug does.
    pub(super) fn spoil(&self, meta: &mut ConnectorMeta) {
        if self.bug == Some(Bug::OnlyThePeerEndsALoad) {
            meta.cancel.clear();
            for order in &mut meta.receive {
                order.deadline = order.deadline + Duration::from_secs(2 * HORIZON);
            }
        }
    }

    /// Records what a run has shown.
    pub(super) fn see(&self, sight: Sight) {
        self.seen.fetch_or(1 << sight as u32, Ordering::Relaxed);
    }

    /// Returns a view of the sights of all runs, which stays valid after the check.
    pub(super) fn sights(&self) -> impl Fn() -> BTreeSet<Sight> + use<> {
        let seen = Arc::clone(&self.seen);
        move || {
            let seen = seen.load(Ordering::Relaxed);
            Sight::ALL.into_iter().filter(|sight| seen & (1 << *sight as u32) != 0).collect()
        }
    }
}

fn settings(role: Role, mode: TransferMode) -> Settings {
    let name = match role {
        Role::Prefill => "p",
        Role::Decode => "d",
    };
    let seconds = Duration::from_secs;
    Settings {
        mode,
        block_size: TOKENS,
        release: BlockRelease::Lease(LeaseTime { duration: seconds(LEASE) }),
        heartbeat: Some(seconds(HEARTBEAT)),
        load_timeout: seconds(LOAD),
        push_timeout: seconds(LOAD),
        engine_ttl: None,
        ..Settings::new(name, Address { host: name.into(), port: 5600 })
    }
}

/// Returns a moment of the model's only clock.
pub(super) fn time(seconds: u64) -> Time {
    Time::from_origin(Duration::from_secs(seconds))
}
