//! Two machines in one thread and on virtual time, connected by the kernel's own sockets, with
//! faults injected into their system calls by [`cut`]: calls that return "later" or are
//! interrupted, files that arrive late or never. Ends are stopped, or killed at any packet. The
//! thread also copies in place of the machines' copying threads. A machine has turns only while its
//! reactor would be awake, and time passes only while both sleep.
//!
//! A test chooses the next event; this module checks the result of every transfer, notification and
//! revocation. A killed end vanishes with all its resources, as a killed process does, and a new
//! incarnation takes its place.

mod by_seed;
mod checks;
pub(super) mod cut;
mod end;
mod step_by_step;
mod turns;

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvx_core::backend::{
    BoundPlan, INLINE_BYTES, INLINE_SEGMENTS, LinkId, LocalSide, PlacedGrid, RegionKey, RemoteSide,
};
use kvx_core::{ErrorKind, Grid, Indices, Memory, Op, RegionId, TransferId};
use kvx_testkit::Random;

use super::handshake::MAX_GREETING_RETRIES;
use super::inline::read_inline;
use super::memory::Reach;
use super::progress::Command;
use super::shared_link::{Import, SharedLink};
use crate::clock;
use crate::clock::virtual_time::VirtualTime;
use end::{End, Inbox, Outcome, Resources};

/// The blocks of a slot, and the kind of their memory.
#[derive(Clone, Copy, Debug)]
struct Shape {
    block: usize,
    count: u32,
    /// True for pools, false for the program's own memory, `None` for either.
    on_pools: Option<bool>,
}

impl Shape {
    const fn of(block: usize, count: u32) -> Self {
        Shape { block, count, on_pools: None }
    }

    fn len(&self) -> usize {
        self.block * self.count as usize
    }
}

/// A shape whose reads are small.
const SMALL: Shape = Shape::of(64, 32);
/// A shape whose writes have several parts.
const MANY: Shape = Shape::of(8, 8_200);
/// A shape whose transfers take several turns.
const LONG: Shape = Shape::of(64 << 10, 32);

/// The multipliers of the block orders at this end and at the peer; they are coprime to every
/// number of blocks.
const ORDERS: [u32; 2] = [3, 7];
/// The filler of memory that must not be touched any more. No block contains it.
const POISON: u8 = 0xee;

/// One of the two ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    Initiator,
    Owner,
}

/// The role of a region in its slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RegionRole {
    Local,
    Source,
    Sink,
}

impl RegionRole {
    const ALL: [RegionRole; 3] = [RegionRole::Local, RegionRole::Source, RegionRole::Sink];

    fn of(self, slot: &mut Slot) -> &mut Place {
        match self {
            RegionRole::Local => &mut slot.local,
            RegionRole::Source => &mut slot.source,
            RegionRole::Sink => &mut slot.sink,
        }
    }

    fn owner(self) -> Role {
        if self == RegionRole::Local { Role::Initiator } else { Role::Owner }
    }
}

/// A region, and its expected content.
struct Place {
    id: RegionId,
    key: RegionKey,
    memory: Arc<Memory>,
    content: Vec<u8>,
    /// The pending revocation.
    revoked: Option<Outcome>,
    /// The import of the region at the other end.
    import: Option<Arc<Import>>,
}

impl Place {
    fn new(id: u64, len: usize, on_pool: bool) -> Self {
        let memory = match on_pool {
            true => Memory::pool(len).build().expect("there is memory"),
            false => Memory::owned(vec![0; len]),
        };
        Place {
            id: RegionId(id),
            key: RegionKey([id as u8; 16]),
            memory: Arc::new(memory),
            content: vec![0; len],
            revoked: None,
            import: None,
        }
    }

    fn set(&mut self, content: Vec<u8>) {
        self.memory.copy_in(0, &content).expect("the lengths are equal");
        self.content = content;
    }

    fn look(&self) -> Vec<u8> {
        let mut content = vec![0; self.memory.len()];
        self.memory.copy_out(0, &mut content).expect("the lengths are equal");
        content
    }

    fn check(&self, whose: &str) {
        assert!(self.look() == self.content, "{whose}: a write to memory that must not be touched");
    }
}

/// A transfer in progress.
struct Posted {
    id: TransferId,
    op: Op,
    is_list: bool,
    outcome: Outcome,
    /// The content of the source.
    from: Vec<u8>,
    /// The time at which core cancels it.
    deadline: Instant,
    /// The error kinds with which it may end instead.
    ends_by: Vec<ErrorKind>,
    /// True if its target was revoked or replaced.
    orphan: bool,
}

/// Memory between which transfers move, one at a time: from the owner's source to the initiator's
/// local memory, or from there to the owner's sink.
struct Slot {
    shape: Shape,
    local: Place,
    source: Place,
    sink: Place,
    posted: Option<Posted>,
    /// True if the owner may still pull a killed initiator's write into the sink.
    unsure: bool,
}

/// A link as core knows it.
struct OpenLink {
    shared: Arc<SharedLink>,
    imports: u64,
    /// The error kinds with which it may be lost.
    ends_by: Vec<ErrorKind>,
}

struct SentNotice {
    number: u64,
    outcome: Outcome,
    ends_by: Vec<ErrorKind>,
}

/// Both ends, and all operations between them.
struct Pair {
    random: Random,
    inbox: Arc<Inbox>,
    initiator: End,
    owner: End,
    link: Option<OpenLink>,
    /// Links whose other end was killed.
    lost: Vec<Arc<SharedLink>>,
    /// The number of this process's descriptors that do not belong to the pair.
    others: usize,
    slots: Vec<Slot>,
    /// Revoked memory.
    given_back: Vec<Place>,
    told: Vec<SentNotice>,
    next: u64,
    lives: u8,
    /// The deadline of new transfers.
    patience: Duration,
    /// True if copying threads may be slow.
    slow_copies: bool,
    _time: VirtualTime,
    /// The numbers of successful transfers, acknowledged notifications and revoked regions.
    arrived: u64,
    acknowledged: u64,
    revoked: u64,
}

impl Pair {
    fn new(mut random: Random, slots: &[Shape]) -> Self {
        let (inbox, others) = (Arc::<Inbox>::default(), Resources::now().descriptors);
        let time = VirtualTime::start();
        let mut pair = Pair {
            initiator: End::new("initiator", 1, Arc::clone(&inbox)),
            owner: End::new("owner", 2, Arc::clone(&inbox)),
            inbox,
            link: None,
            lost: Vec::new(),
            others,
            slots: Vec::new(),
            given_back: Vec::new(),
            told: Vec::new(),
            next: 0,
            lives: 2,
            patience: Duration::from_secs(30),
            slow_copies: false,
            _time: time,
            arrived: 0,
            acknowledged: 0,
            revoked: 0,
            random: Random::seeded(random.word()),
        };
        for &shape in slots {
            let slot = Slot {
                shape,
                local: pair.open(Role::Initiator, shape),
                source: pair.open(Role::Owner, shape),
                sink: pair.open(Role::Owner, shape),
                posted: None,
                unsure: false,
            };
            pair.slots.push(slot);
        }
        pair
    }

    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn end(&mut self, who: Role) -> &mut End {
        match who {
            Role::Initiator => &mut self.initiator,
            Role::Owner => &mut self.owner,
        }
    }

    /// Registers a new region, with distinct blocks.
    fn open(&mut self, who: Role, shape: Shape) -> Place {
        let (id, either) = (self.number(), self.random.below(2) == 0);
        let mut place = Place::new(id, shape.len(), shape.on_pools.unwrap_or(either));
        place.set(self.content(shape));
        self.end(who).register(&place);
        place
    }

    fn content(&mut self, shape: Shape) -> Vec<u8> {
        let mut content = Vec::with_capacity(shape.len());
        for _ in 0..shape.count {
            let byte = 1 + self.random.below(usize::from(POISON) - 1) as u8;
            content.resize(content.len() + shape.block, byte);
        }
        content
    }

    /// Initiates a link, over which all regions are requested as soon as it is up.
    fn connect(&mut self) {
        let id = LinkId(self.number());
        let shared = Arc::new(self.owner.shared(id));
        let socket = self.owner.machine.socket_name();
        self.initiator.command(Command::Connect { link: Arc::clone(&shared), socket });
        self.link = Some(OpenLink { shared, imports: 0, ends_by: Vec::new() });
    }

    /// Returns the link if plans may be posted over it.
    fn up(&self) -> Option<Arc<SharedLink>> {
        let link = &self.link.as_ref()?.shared;
        let at = *self.initiator.machine.links.get(&link.id)?;
        self.initiator.machine.connections[at].is_up().then(|| Arc::clone(link))
    }

    /// Requests the owner's regions that were not yet requested over this link.
    fn import(&mut self) {
        let (Some(shared), Some(link)) = (self.up(), &mut self.link) else { return };
        for slot in &mut self.slots {
            for place in [&mut slot.source, &mut slot.sink] {
                if place.import.is_some() || place.revoked.is_some() {
                    continue;
                }
                link.imports += 1;
                let import = Arc::new(Import {
                    number: link.imports,
                    id: place.id,
                    key: place.key,
                    len: place.memory.len() as u64,
                    reach: Reach::of(&place.memory),
                    shutter: Default::default(),
                });
                place.import = Some(Arc::clone(&import));
                self.initiator.command(Command::Import { link: Arc::clone(&shared), import });
            }
        }
    }

    /// Posts a transfer if there is a link and its slot is free. Returns true if it did.
    fn post(&mut self, at: usize, op: Op, is_list: bool) -> bool {
        let Some(link) = self.up() else { return false };
        let id = TransferId(self.number());
        let content = self.content(self.slots[at].shape);
        let small_on = (self.random.below(2) == 0).then(|| std::thread::current().id());
        let slot = &mut self.slots[at];
        let remote = match op {
            Op::Read => &slot.source,
            Op::Write => &slot.sink,
        };
        let Some(import) = remote.import.clone() else { return false };
        let ends_by = remote.revoked.iter().map(|_| ErrorKind::Revoked).collect();
        if slot.posted.is_some() || slot.local.revoked.is_some() || slot.unsure {
            return false;
        }
        let from = match op {
            Op::Read => {
                slot.local.set(vec![0; slot.local.content.len()]);
                slot.source.content.clone()
            }
            Op::Write => {
                slot.local.set(content.clone());
                content
            }
        };
        let (ticket, outcome) = Outcome::new();
        let plan = Arc::new(plan(op, link.id, slot.shape, is_list, &slot.local, import));
        let deadline = clock::now() + self.patience;
        let orphan = false;
        slot.posted = Some(Posted { id, op, is_list, outcome, from, deadline, ends_by, orphan });
        // The handle of a link does the same.
        let size = plan.size();
        let is_small = size.bytes <= INLINE_BYTES && size.segments <= INLINE_SEGMENTS;
        if op == Op::Read && is_small && read_inline(&plan) {
            ticket.settle(Ok(()));
        } else {
            let inline_on = small_on.filter(|_| is_small || op == Op::Write);
            self.initiator.command(Command::Post { link, plan, id, done: ticket, inline_on });
        }
        self.settle();
        true
    }

    fn cancel(&mut self, at: usize) {
        let (Some(link), Some(posted)) = (&self.link, &mut self.slots[at].posted) else { return };
        posted.ends_by.push(ErrorKind::Cancelled);
        self.initiator.command(Command::Cancel { link: Arc::clone(&link.shared), id: posted.id });
        self.settle();
    }

    /// Sends the owner a notification with its number, padded to `len` bytes.
    fn notify(&mut self, len: usize) {
        let Some(link) = self.up() else { return };
        let number = self.number();
        let mut bytes = number.to_le_bytes().to_vec();
        bytes.resize(len.max(bytes.len()), number as u8);
        let (done, outcome) = Outcome::new();
        self.told.push(SentNotice { number, outcome, ends_by: Vec::new() });
        self.initiator.command(Command::Notify { link, bytes: bytes.into(), done });
        self.settle();
    }

    /// Revokes a region. Core cancels its own transfers from and to the region before; for writes
    /// that have begun the machines do not rely on that.
    fn revoke(&mut self, at: usize, which: RegionRole) {
        let has_begun = self.has_begun(at);
        let slot = &mut self.slots[at];
        let op = slot.posted.as_ref().map(|posted| posted.op);
        let place = which.of(slot);
        if place.revoked.is_some() || which == RegionRole::Local && op == Some(Op::Read) {
            return;
        }
        let (done, outcome) = Outcome::new();
        place.revoked = Some(outcome);
        let id = place.id;
        let cancels = which == RegionRole::Local && (!has_begun || self.random.below(2) == 0);
        if cancels {
            self.cancel(at);
        } else if let Some(posted) = &mut slot.posted {
            posted.ends_by.push(ErrorKind::Revoked);
            // Parts of a write that are pulled later name a region that is not lent any more.
            posted.ends_by.extend((which == RegionRole::Local).then_some(ErrorKind::Unregistered));
        }
        let end = self.end(which.owner());
        let region = end.regions.revoke(id).expect("the machine has not ended");
        end.command(Command::Revoke { region, done });
        self.settle();
    }

    /// Returns true if the owner was asked to pull a write, or is about to be.
    fn has_begun(&self, at: usize) -> bool {
        let Some(posted) = &self.slots[at].posted else { return false };
        let mut connections = self.initiator.machine.connections.iter();
        connections.any(|(_, connection)| connection.writes.contains(posted.id.0))
    }

    /// Records that the link ends, so that operations in progress may end with these kinds.
    fn ends(&mut self, by: &[ErrorKind]) {
        let transfers = self.slots.iter_mut().filter_map(|slot| slot.posted.as_mut());
        let all = transfers
            .map(|posted| &mut posted.ends_by)
            .chain(self.told.iter_mut().map(|told| &mut told.ends_by));
        let link = self.link.iter_mut().map(|link| &mut link.ends_by);
        all.chain(link).for_each(|ends_by| ends_by.extend_from_slice(by));
    }

    /// Closes the link, as core does.
    fn close(&mut self) {
        self.ends(&[ErrorKind::Closed]);
        self.forget_link();
        self.settle();
    }

    fn forget_link(&mut self) {
        let Some(link) = self.link.take() else { return };
        for slot in &mut self.slots {
            (slot.source.import, slot.sink.import) = (None, None);
        }
        self.initiator.command(Command::Close { link: link.shared });
    }

    /// Makes the kernel refuse the next packet for good, which ends the link; sends one for that if
    /// necessary.
    fn break_link(&mut self) {
        const BY: [ErrorKind; 2] = [ErrorKind::Exhausted, ErrorKind::PeerLost];
        if self.link.is_none() {
            return;
        }
        self.owner.set_room(true);
        self.ends(&BY);
        let was_up = self.up().is_some();
        cut::break_next();
        self.until("a packet", |pair| !cut::will_break() || pair.is_idle() && pair.up().is_some());
        if cut::will_break() {
            self.notify(20);
            self.ends(&BY);
            self.until("a packet", |_| !cut::will_break());
        }
        if !was_up {
            self.until("the end, or a second greeting", |pair| {
                pair.is_gone() || pair.has_greeted_again() || pair.up().is_some()
            });
            if self.has_greeted_again() {
                self.close();
            }
        }
    }

    fn is_gone(&self) -> bool {
        self.link.as_ref().is_none_or(|link| link.shared.gone.get().is_some())
    }

    /// Returns true if the owner closed during the handshake, after which the initiator tried
    /// again.
    fn has_greeted_again(&self) -> bool {
        let machine = &self.initiator.machine;
        let attempts = machine.connections.iter().filter_map(|(_, one)| one.attempt.as_ref());
        attempts.chain(&machine.connecting).any(|attempt| attempt.retries < MAX_GREETING_RETRIES)
    }

    /// Kills an end with all its resources and starts a new incarnation. Operations of the other
    /// end that depend on it end.
    fn kill(&mut self, who: Role) {
        self.lives += 1;
        self.end(who).machine.listeners = [None, None]; // its successor has the same name
        let new = match who {
            Role::Initiator => End::new("initiator", self.lives, Arc::clone(&self.inbox)),
            Role::Owner => End::new("owner", self.lives, Arc::clone(&self.inbox)),
        };
        for slot in &mut self.slots {
            (slot.source.import, slot.sink.import) = (None, None);
        }
        drop(std::mem::replace(self.end(who), new));
        match who {
            Role::Owner => {
                self.ends(&[ErrorKind::PeerLost]);
                self.lost.extend(self.link.take().map(|link| link.shared));
                for at in 0..self.slots.len() {
                    let shape = self.slots[at].shape;
                    let (source, sink) = (self.open(who, shape), self.open(who, shape));
                    let slot = &mut self.slots[at];
                    (slot.source, slot.sink, slot.unsure) = (source, sink, false);
                    slot.posted
                        .iter_mut()
                        .for_each(|posted| posted.orphan |= posted.op == Op::Write);
                }
            }
            Role::Initiator => {
                self.link = None;
                self.told.clear();
                for at in 0..self.slots.len() {
                    let local = self.open(who, self.slots[at].shape);
                    let slot = &mut self.slots[at];
                    slot.local = local;
                    slot.unsure |= slot.posted.take().is_some_and(|posted| posted.op == Op::Write);
                }
            }
        }
    }
}

/// Returns the blocks of a slot that are moved, in order.
fn indices(Shape { count, .. }: Shape, is_list: bool, by: u32) -> Indices {
    match is_list {
        false => (0..count).into(),
        true => (0..count - count / 4).map(|index| index * by % count).collect::<Vec<_>>().into(),
    }
}

fn plan(
    op: Op,
    link: LinkId,
    shape: Shape,
    is_list: bool,
    local: &Place,
    import: Arc<Import>,
) -> BoundPlan {
    let grid = Grid::packed(shape.block as u64, shape.count);
    let grids = || -> Arc<[PlacedGrid]> { Arc::from([PlacedGrid { region: 0, grid }]) };
    let [ours, theirs] = ORDERS.map(|by| indices(shape, is_list, by));
    let pair = kvx_core::backend::Pair {
        local: grids(),
        remote: grids(),
        local_indices: ours,
        remote_indices: theirs,
    };
    let memory = Arc::clone(&local.memory);
    let local = LocalSide { id: local.id, key: local.key, memory, region: Arc::new(end::Local) };
    let remote = RemoteSide { id: import.id, key: import.key, len: import.len, region: import };
    kvx_core::fuzz::bound(op, link, pair, local, remote)
}
