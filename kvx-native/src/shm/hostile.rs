//! Tests with clients and owners that violate the protocol: each is refused with a reason, and
//! other peers do not notice.

mod held;

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvx_core::backend::fork::Private;
use kvx_core::backend::{Invitation, IpcHandle, Metadata, PlacedGrid, RegionKey};
use kvx_core::{Agent, DeviceId, ErrorKind, Grid, Memory, Plan, Region, RegionId, Registry};
use rustix::event::{PollFd, PollFlags};
use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};

use kvx_backend::control::proof::{Keys, Proof};
use kvx_backend::control::violations::{
    HandshakeStage, Violation, greet, prove, random_message, violations,
};
use kvx_backend::control::{ControlMessage as Shared, Refusal, verify_hello};
use kvx_testkit::{HungPage, Random, skip};

use super::messages::{Location, Message, Probe, RegionAccess};
use super::socket::{self, RecvOutcome};
use crate::described::Described;

const CUT_OFF: Duration = Duration::from_secs(10);
const LEN: usize = 64 << 10;

fn agent(name: &str) -> Agent {
    let mut registry = Registry::new();
    registry.add(super::Shm).unwrap();
    Agent::builder(name).notifications(1, 64 << 10).registry(registry.clone()).build().unwrap()
}

/// Returns the position of an agent's socket name in its metadata.
fn socket_of(metadata: &[u8]) -> std::ops::Range<usize> {
    let at = metadata.windows(8).position(|window| window == b"kvx-shm-").unwrap();
    at..at + 40
}

fn region_key(metadata: &[u8], region: &Region) -> RegionKey {
    // A region's section begins with its id and key.
    let id = region.id().0.to_le_bytes();
    let known = kvx_core::backend::Metadata::decode(metadata).unwrap();
    known.regions.iter().find(|info| info.id.0.to_le_bytes() == id).unwrap().key
}

/// A raw end of a connection.
struct Raw(Private);

impl Raw {
    fn to(agent: &Agent) -> Self {
        let metadata = agent.metadata().unwrap();
        Raw(socket::connect(&metadata[socket_of(&metadata)]).unwrap())
    }

    /// Connects and gets a welcome. Also returns the proof to confirm it.
    fn welcomed(agent: &Agent) -> (Self, Vec<u8>) {
        let raw = Raw::to(agent);
        let proof = raw.greet(&invitation(agent), || ());
        (raw, proof)
    }

    /// Sends a hello, and returns the proof. `turn` makes the other end answer.
    fn greet(&self, invitation: &Invitation, turn: impl FnOnce()) -> Vec<u8> {
        let (greeting, hello) = greet(invitation, None, &NO_PROBE.hello_rest()).unwrap();
        self.say(&hello).unwrap();
        turn();
        prove(&greeting, &self.next().unwrap()).unwrap()
    }

    /// Sends a hello with a probe that hangs, and checks that the welcome says that this end cannot
    /// be read. Returns the proof. `turn` runs before the welcome is read.
    fn greet_hung(&self, target: &Agent, probe: &Probe, turn: impl FnOnce()) -> Proof {
        let (greeting, hello) = greet(&invitation(target), None, &probe.hello_rest()).unwrap();
        self.say(&hello).unwrap();
        turn();
        let welcome = self.next().expect("an answer");
        let Ok(Shared::Welcome { version, body }) = Shared::decode(&welcome) else {
            panic!("{welcome:?}")
        };
        let (rest, proof) = greeting.verify_welcome(version, body).unwrap();
        let (_, reads_us) = Probe::of_welcome(rest).unwrap();
        assert_eq!(reads_us.unwrap_err().kind, ErrorKind::Unsupported);
        proof
    }

    /// Answers the hello of an initiator that connects here, and checks its proof.
    fn welcome(&self, owner: &Agent, probe: &Probe) {
        let hello = self.next().unwrap();
        let Ok(Shared::Hello { versions, body }) = Shared::decode(&hello) else {
            panic!("{hello:?}")
        };
        let keys = Keys::new(&invitation(owner), None);
        let greeted = verify_hello(&keys, versions, body).ok().unwrap();
        let (version, body, claim) =
            greeted.welcome.complete(&keys, &probe.welcome_rest(&Ok(()))).unwrap();
        self.send(Shared::Welcome { version, body: &body }, None);
        let confirm = self.next().unwrap();
        assert!(
            matches!(Shared::decode(&confirm), Ok(Shared::Confirm { proof }) if claim.holds(&proof))
        );
    }

    /// Accepts an initiator.
    fn accepted(listener: &Private) -> Self {
        let until = Instant::now() + CUT_OFF;
        loop {
            if let Some(socket) = socket::accept(listener.as_fd()).unwrap() {
                return Raw(socket);
            }
            assert!(Instant::now() < until, "nothing connects");
            std::thread::yield_now();
        }
    }

    fn shaken(agent: &Agent) -> Self {
        let (raw, proof) = Raw::welcomed(agent);
        raw.say(&proof).unwrap();
        raw
    }

    /// Sends a packet `count` times, as fast as the other end reads. Returns false if the
    /// connection ended.
    fn pour(&self, bytes: &[u8], count: usize) -> bool {
        (0..count).all(|_| {
            let until = Instant::now() + CUT_OFF;
            loop {
                match self.say(bytes) {
                    Ok(()) => return true,
                    Err(rustix::io::Errno::AGAIN) => {
                        assert!(Instant::now() < until, "the other end does not read")
                    }
                    Err(_) => return false,
                }
                wait_for(&self.0, PollFlags::OUT);
            }
        })
    }

    fn say(&self, bytes: &[u8]) -> rustix::io::Result<()> {
        socket::send(self.0.as_fd(), bytes, None)
    }

    fn send<'a>(&self, message: impl Into<Message<'a>>, file: Option<&OwnedFd>) {
        socket::send(self.0.as_fd(), &message.into().encode(), file.map(OwnedFd::as_fd)).unwrap();
    }

    fn is_served(&self) -> bool {
        self.send(Shared::Ping, None);
        matches!(Shared::decode(&self.next().unwrap()), Ok(Shared::Alive))
    }

    /// Returns the next packet; `None` once the other end has closed.
    fn next(&self) -> Option<Vec<u8>> {
        let mut buffer = vec![0; 1 << 20];
        let until = Instant::now() + CUT_OFF;
        loop {
            match socket::receive(self.0.as_fd(), &mut buffer).unwrap() {
                RecvOutcome::Message(len, _) => return Some(buffer[..len].to_vec()),
                RecvOutcome::End => return None,
                RecvOutcome::TooLong => panic!("longer than any message"),
                RecvOutcome::Nothing => {
                    assert!(Instant::now() < until, "the other end does not answer");
                    wait_for(&self.0, PollFlags::IN);
                }
            }
        }
    }

    fn answer(&self) -> Result<(), Refusal> {
        match Message::decode(&self.next().expect("still connected")).unwrap() {
            Message::Done { result, .. } => result,
            Message::Shared(Shared::Deny { why, .. }) => Err(why),
            Message::Shared(Shared::Grant { .. }) => Ok(()),
            other => panic!("{other:?}"),
        }
    }

    fn refusal(&self) -> ErrorKind {
        self.answer().unwrap_err().kind
    }
}

fn wait_for(socket: &Private, flags: PollFlags) {
    let wait = rustix::time::Timespec { tv_sec: 1, tv_nsec: 0 };
    rustix::event::poll(&mut [PollFd::new(socket, flags)], Some(&wait)).unwrap();
}

const NO_PROBE: Probe = Probe { address: 0, bytes: [0; 32] };

fn invitation(agent: &Agent) -> Invitation {
    Metadata::decode(&agent.metadata().unwrap()).unwrap().invited.unwrap().by
}

/// Returns the metadata of an agent, but for the socket, which is a new one.
fn in_place_of(owner: &Agent) -> (Vec<u8>, Private) {
    let mut metadata = owner.metadata().unwrap();
    let name = super::address::random_socket_name().unwrap();
    let listener = socket::listen(&name).unwrap();
    let place = socket_of(&metadata);
    metadata[place].copy_from_slice(&name);
    (metadata, listener)
}

/// A page of this process whose faults stay unresolved, and a probe that names it. `None` where the
/// system refuses it, with a note that `test` is skipped.
fn hung_probe(test: &str) -> Option<(HungPage, Probe)> {
    let memory = Arc::new(Memory::owned(vec![1; LEN]));
    match HungPage::of(&memory) {
        Ok(page) => {
            let address = (memory.address() + LEN as u64 / 2).next_multiple_of(4096);
            Some((page, Probe { address, bytes: [1; 32] }))
        }
        Err(why) => {
            skip(test, &why.to_string(), "run the tests as root");
            None
        }
    }
}

fn block(id: RegionId, key: RegionKey, grid: Grid) -> Described {
    Described {
        regions: vec![(id, key)],
        grids: [PlacedGrid { region: 0, grid }].into(),
        indices: (0..1).into(),
    }
}

fn memory_file(size: u64, seals: SealFlags) -> OwnedFd {
    let file = unsealed_file(size);
    rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, size).unwrap();
    rustix::fs::fcntl_add_seals(&file, seals).unwrap();
    file
}

/// Returns a sealed memory file without pages.
fn sparse_file(size: u64) -> OwnedFd {
    let file = unsealed_file(size);
    rustix::fs::fcntl_add_seals(&file, sealed()).unwrap();
    file
}

fn unsealed_file(size: u64) -> OwnedFd {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = rustix::fs::memfd_create("kvx-test", flags).unwrap();
    rustix::fs::ftruncate(&file, size).unwrap();
    file
}

fn sealed() -> SealFlags {
    SealFlags::SHRINK | SealFlags::GROW | SealFlags::FUTURE_WRITE
}

/// Checks that a well-behaved reader gets the region's bytes.
fn a_good_client_works(target: &Agent, region: &Region) {
    let reader = agent("good client");
    let local = reader.register("local", Memory::pool(LEN).build().unwrap()).unwrap();
    let peer = reader.connect(target.metadata().unwrap()).unwrap();
    let theirs = peer.region(region.name()).unwrap();
    let grid = Grid::packed(LEN as u64, 1);
    let plan =
        Plan::read(local.grid(grid).unwrap().blocks([0]), theirs.grid(grid).unwrap().blocks([0]))
            .unwrap();
    peer.transfer(&plan).deadline(CUT_OFF).post().unwrap().wait_blocking(CUT_OFF).unwrap();
    let (mut ours, mut original) = (vec![0; LEN], vec![0; LEN]);
    local.copy_out(0, &mut ours).unwrap();
    region.copy_out(0, &mut original).unwrap();
    assert!(ours == original);
    reader.shutdown(CUT_OFF).wait_blocking(CUT_OFF).unwrap();
}

fn target() -> (Agent, Region) {
    let target = agent("target");
    let memory = Memory::pool(LEN).build().unwrap();
    memory.copy_in(0, &vec![0x77; LEN]).unwrap();
    let region = target.register("kv", memory).unwrap();
    (target, region)
}

fn untouched(region: &Region) {
    let mut bytes = vec![0; LEN];
    region.copy_out(0, &mut bytes).unwrap();
    assert!(bytes.iter().all(|byte| *byte == 0x77));
}

/// Checks that SHM uses [`control`](kvx_backend::control), which decides why most of these end a
/// link; the last ones are specific to SHM.
#[test]
fn violations_end_the_connection_and_others_are_served() {
    let (target, region) = target();
    let good = Raw::shaken(&target);
    let lend = Message::Lend {
        id: RegionId(1),
        access: RegionAccess { len: 1, at: Location::Address(0x1000) },
    };
    let own = [
        (HandshakeStage::Start, "a packet that is too long", vec![vec![7; 100 << 10]]),
        (
            HandshakeStage::Up,
            "an answer to a write from the end that writes",
            vec![Message::Done { write: 1, result: Ok(()) }.encode()],
        ),
        (
            HandshakeStage::Up,
            "a goodbye message instead of the socket's end",
            vec![Shared::Bye.encode()],
        ),
        (HandshakeStage::Up, "a region lent twice", vec![lend.encode(), lend.encode()]),
    ];
    let own = own.map(|(after, what, says)| Violation {
        description: what,
        stage: after,
        messages: says,
        refusal: None,
    });
    let key = region_key(&target.metadata().unwrap(), &region);
    let of_control =
        violations(&invitation(&target), &NO_PROBE.hello_rest(), region.id(), key).unwrap();
    for violation in of_control.into_iter().chain(own) {
        let Violation { description: what, stage: after, messages: says, refusal: told } =
            violation;
        let raw = match after {
            HandshakeStage::Start => Raw::to(&target),
            HandshakeStage::Welcome => Raw::welcomed(&target).0,
            HandshakeStage::Up => Raw::shaken(&target),
        };
        // The connection may end before all messages are sent.
        says.iter().find(|bytes| raw.say(bytes).is_err());
        let mut answers = Vec::new();
        while let Some(answer) = raw.next() {
            match Shared::decode(&answer) {
                Ok(Shared::Refuse { why, proof: b"" }) => answers.push(why.kind),
                Ok(Shared::Ack { .. }) if after == HandshakeStage::Up => {}
                other => panic!("{what}: {other:?}"),
            }
        }
        assert_eq!(answers, Vec::from_iter(told), "{what}");
        assert!(after == HandshakeStage::Up || target.try_notification().is_none(), "{what}");
        assert!(good.is_served(), "after {what}");
        while target.try_notification().is_some() {}
    }
    // More silent clients than may be half-open at once.
    let silent: Vec<Raw> = (0..300).map(|_| Raw::to(&target)).collect();
    a_good_client_works(&target, &region);
    drop(silent);
    a_good_client_works(&target, &region);
    target.shutdown(CUT_OFF).wait_blocking(CUT_OFF).unwrap();
}

#[test]
fn a_client_above_the_limit_gets_an_error_and_can_connect_later() {
    let (target, region) = target();
    let inside: Vec<Raw> = (0..64).map(|_| Raw::shaken(&target)).collect();
    assert!(inside.iter().all(Raw::is_served));
    let late = agent("late");
    let peer = late.connect(target.metadata().unwrap()).unwrap();
    let why = peer.ready(CUT_OFF).wait_blocking(CUT_OFF).unwrap_err();
    assert!(why.to_string().contains("serves 64 others"), "{why}");
    drop(inside);
    let until = Instant::now() + CUT_OFF;
    while let Err(why) = peer.ready(CUT_OFF).wait_blocking(CUT_OFF) {
        assert!(Instant::now() < until, "the same handle cannot connect later: {why}");
    }
    a_good_client_works(&target, &region);
    late.shutdown(CUT_OFF).wait_blocking(CUT_OFF).unwrap();
    target.shutdown(CUT_OFF).wait_blocking(CUT_OFF).unwrap();
}

#[test]
fn wrong_keys_bounds_and_sources_move_nothing_and_the_connection_continues() {
    let (target, region) = target();
    let (id, key) = (region.id(), region_key(&target.metadata().unwrap(), &region));
    let raw = Raw::shaken(&target);
    raw.send(Shared::Want { import: 1, id, key: RegionKey([0; 16]) }, None);
    assert_eq!(raw.refusal(), ErrorKind::WrongKey);
    raw.send(Shared::Want { import: 2, id, key }, None);
    assert_eq!(raw.answer(), Ok(()));

    let ours = vec![1u8; LEN];
    let (foreign, open, good) = (RegionId(1), RegionId(2), RegionId(4));
    let len = LEN as u64;
    raw.send(
        Message::Lend {
            id: foreign,
            access: RegionAccess { len, at: Location::Address(ours.as_ptr() as u64) },
        },
        None,
    );
    raw.send(
        Message::Lend { id: open, access: RegionAccess { len, at: Location::File } },
        Some(&memory_file(len, SealFlags::GROW)),
    );
    raw.send(
        Message::Lend { id: good, access: RegionAccess { len, at: Location::File } },
        Some(&memory_file(len, sealed())),
    );
    raw.send(
        Message::Lend { id: RegionId(5), access: RegionAccess { len, at: Location::File } },
        None,
    );
    raw.send(
        Message::Lend {
            id: RegionId(6),
            access: RegionAccess { len, at: Location::Address(0x1000) },
        },
        None,
    );
    for unfit in [open, RegionId(5)] {
        let said = raw.next().expect("still connected");
        let released = Message::Shared(Shared::Released { id: unfit });
        assert_eq!(said, released.encode(), "a region that cannot be opened is released at once");
    }
    let whole = Grid::packed(len, 1);
    let beyond = Grid { base: 1, ..whole };
    let none = RegionKey([0; 16]);
    for (into, from, expected) in [
        (block(id, none, whole), block(foreign, none, whole), ErrorKind::WrongKey),
        (block(id, key, beyond), block(foreign, none, whole), ErrorKind::OutOfBounds),
        (block(id, key, whole), block(foreign, none, beyond), ErrorKind::OutOfBounds),
        (block(id, key, whole), block(RegionId(77), none, whole), ErrorKind::Unregistered),
        (block(id, key, whole), block(open, none, whole), ErrorKind::Authentication),
        (block(id, key, whole), block(RegionId(5), none, whole), ErrorKind::Exhausted),
        (block(id, key, whole), block(RegionId(6), none, whole), ErrorKind::Native),
    ] {
        raw.send(Message::Write { write: 8, into, from }, None);
        assert_eq!(raw.refusal(), expected);
        untouched(&region);
    }
    a_good_client_works(&target, &region);
    // The same connection still serves valid requests.
    raw.send(
        Message::Write { write: 9, into: block(id, key, whole), from: block(good, none, whole) },
        None,
    );
    assert_eq!(raw.answer(), Ok(()));
    let mut bytes = vec![1; LEN];
    region.copy_out(0, &mut bytes).unwrap();
    assert!(bytes.iter().all(|byte| *byte == 0));
    drop(raw);
    region.revoke(CUT_OFF).wait_blocking(CUT_OFF).unwrap();
    target.shutdown(CUT_OFF).wait_blocking(CUT_OFF).unwrap();
}

/// Checks a peer whose small writes name the missing pages of a large pool: copying them would
/// allocate them at the target's expense.
#[test]
fn a_writer_does_not_make_the_target_pay_for_missing_pages() {
    const SPARSE: u64 = 256 << 20;
    let (target, region) = target();
    let (id, key) = (region.id(), region_key(&target.metadata().unwrap(), &region));
    let (raw, file) = (Raw::shaken(&target), sparse_file(SPARSE));
    let lent = RegionId(1);
    let access = RegionAccess { len: SPARSE, at: Location::File };
    raw.send(Message::Lend { id: lent, access }, Some(&file));
    let released = raw.next().expect("still connected");
    assert_eq!(released, Message::Shared(Shared::Released { id: lent }).encode());
    let blocks = (SPARSE / LEN as u64) as u32;
    for index in (0..blocks).step_by(64) {
        let mut from = block(lent, RegionKey([0; 16]), Grid::packed(LEN as u64, blocks));
        from.indices = (index..index + 1).into();
        let into = block(id, key, Grid::packed(LEN as u64, 1));
        raw.send(Message::Write { write: index.into(), into, from }, None);
        assert_eq!(raw.refusal(), ErrorKind::Unsupported);
    }
    assert_eq!(rustix::fs::fstat(&file).unwrap().st_blocks, 0, "pages were allocated");
    untouched(&region);
    a_good_client_works(&target, &region);
    target.shutdown(CUT_OFF).wait_blocking(CUT_OFF).unwrap();
}

/// Checks an owner that passes files which would kill a reader that trusted them. `memory.rs` tests
/// which files those are.
#[test]
fn an_owner_that_passes_unfit_files_is_refused() {
    let (owner, region) = target();
    let reader = agent("reader");
    let local = reader.register("local", Memory::pool(LEN).build().unwrap()).unwrap();
    let len = LEN as u64;
    let good = || RegionAccess { len, at: Location::File };
    let handle = IpcHandle { bytes: vec![7; 64], offset: 0 };
    let device = Location::Device { device: DeviceId([1; 16]), handle };
    let cases: [(RegionAccess, Option<OwnedFd>, ErrorKind); 5] = [
        (good(), Some(memory_file(len, SealFlags::empty())), ErrorKind::PermissionDenied),
        (good(), Some(sparse_file(len)), ErrorKind::Unsupported),
        (good(), None, ErrorKind::Exhausted),
        (RegionAccess { len, at: device }, None, ErrorKind::Unsupported),
        (
            RegionAccess { len: len * 2, at: Location::File },
            Some(memory_file(len * 2, sealed())),
            ErrorKind::OutOfBounds,
        ),
    ];
    for (access, file, expected) in cases {
        let (metadata, listener) = in_place_of(&owner);
        let peer = reader.connect(&metadata).unwrap();
        let theirs = peer.region(region.name()).unwrap();
        let grid = Grid::packed(len, 1);
        let plan = Plan::read(
            local.grid(grid).unwrap().blocks([0]),
            theirs.grid(grid).unwrap().blocks([0]),
        )
        .unwrap();
        let transfer = peer.transfer(&plan).deadline(CUT_OFF).post().unwrap();
        let raw = Raw::accepted(&listener);
        raw.welcome(&owner, &NO_PROBE);
        let wanted = raw.next().unwrap();
        let Ok(Shared::Want { import, .. }) = Shared::decode(&wanted) else { panic!("{wanted:?}") };
        raw.send(Shared::Grant { import, rest: &access.grant_rest() }, file.as_ref());
        assert_eq!(transfer.wait_blocking(CUT_OFF).unwrap_err().kind(), expected);
        assert!(raw.is_served(), "the link is still up");
    }
    let mut bytes = vec![1; LEN];
    local.copy_out(0, &mut bytes).unwrap();
    assert!(bytes.iter().all(|byte| *byte == 0));
    reader.shutdown(CUT_OFF).wait_blocking(CUT_OFF).unwrap();
    owner.shutdown(CUT_OFF).wait_blocking(CUT_OFF).unwrap();
}

/// Sends seeded garbage on live connections, to both ends at once: no panic, and good clients keep
/// working.
#[test]
fn mutated_messages_on_live_connections_do_no_harm() {
    let (target, region) = target();
    let (id, key) = (region.id(), RegionKey([1; 16]));
    let own = [
        Message::Lend {
            id: RegionId(1),
            access: RegionAccess { len: 4096, at: Location::Address(0x10_0000) },
        },
        Message::Write {
            write: 1,
            into: block(id, key, Grid::packed(64, 4)),
            from: block(RegionId(1), key, Grid::packed(64, 4)),
        },
        Message::Cancel { write: 1 },
    ]
    .map(|message| message.encode());
    let mut random = Random::seeded(1);
    for _ in 0..200 {
        let raw = Raw::shaken(&target);
        for _ in 0..10 {
            if raw.say(&random_message(|bound| random.below(bound), id, key, &own)).is_err() {
                break;
            }
        }
        while target.try_notification().is_some() {}
    }
    untouched(&region);
    while target.try_notification().is_some() {}
    a_good_client_works(&target, &region);
    let kept = Arc::clone(region.memory());
    region.revoke(CUT_OFF).wait_blocking(CUT_OFF).unwrap();
    drop(kept);
    target.shutdown(CUT_OFF).wait_blocking(CUT_OFF).unwrap();
}

/// An initiator names a page of its memory whose fault stays unresolved.
#[test]
fn an_initiators_probe_that_hangs_holds_up_nobody_else() {
    let name = "shm::hostile::an_initiators_probe_that_hangs_holds_up_nobody_else";
    let Some((page, probe)) = hung_probe(name) else { return };
    let (target, region) = target();
    let good = Raw::shaken(&target);
    let raw = Raw::to(&target);
    // It is a peer like any other whose memory cannot be read.
    let proof = raw.greet_hung(&target, &probe, || {
        assert!(good.is_served());
        a_good_client_works(&target, &region);
    });
    raw.send(Shared::Confirm { proof }, None);
    assert!(raw.is_served());
    drop(page);
    a_good_client_works(&target, &region);
    target.shutdown(CUT_OFF).wait_blocking(CUT_OFF).unwrap();
}

/// A process opens more connections with such a probe than threads of a reactor may hang.
#[test]
fn a_process_hangs_one_thread_with_all_its_probes() {
    let name = "shm::hostile::a_process_hangs_one_thread_with_all_its_probes";
    let Some((page, probe)) = hung_probe(name) else { return };
    let (target, region) = target();
    let mut raws = Vec::new();
    for _ in 0..70 {
        let raw = Raw::to(&target);
        raw.greet_hung(&target, &probe, || ());
        raws.push(raw);
    }
    a_good_client_works(&target, &region);
    drop(page);
    a_good_client_works(&target, &region);
    target.shutdown(CUT_OFF).wait_blocking(CUT_OFF).unwrap();
}

/// A target names such a page.
#[test]
fn a_targets_probe_that_hangs_holds_up_nobody_else() {
    let name = "shm::hostile::a_targets_probe_that_hangs_holds_up_nobody_else";
    let Some((page, probe)) = hung_probe(name) else { return };
    let (reader, region) = target();
    let owner = agent("owner");
    let (metadata, listener) = in_place_of(&owner);
    let peer = reader.connect(metadata).unwrap();
    let raw = Raw::accepted(&listener);
    std::thread::scope(|scope| {
        let welcomed = scope.spawn(|| raw.welcome(&owner, &probe));
        a_good_client_works(&reader, &region);
        welcomed.join().unwrap();
    });
    // Its pools can be mapped all the same.
    peer.ready(CUT_OFF).wait_blocking(CUT_OFF).unwrap();
    drop(page);
    a_good_client_works(&reader, &region);
    reader.shutdown(CUT_OFF).wait_blocking(CUT_OFF).unwrap();
    owner.shutdown(CUT_OFF).wait_blocking(CUT_OFF).unwrap();
}
