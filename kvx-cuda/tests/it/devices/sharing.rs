//! Tests memory of other processes.

use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;

use kvx_core::DeviceAccess as _;
use kvx_core::backend::{Hop, IpcHandle, LinkProcess};
use kvx_core::{DeviceId, ErrorKind, Memory, MemoryKind, Result};
use kvx_gpu::Device;
use kvx_testkit::{Child, hex, unhex};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::{Bench, LONG, ROLE, Test, all_of, filled, pattern, settled, until};

pub(crate) const ANYWHERE: &[(&str, Test)] = &[
    ("memory_of_another_process_is_read", read_from_another_process),
    ("an_owners_death_ends_its_imports", an_owners_death),
    ("memory_that_this_process_shared_is_opened_in_place", opened_in_place),
    ("handles_that_peers_made_up_are_refused", made_up),
];

pub(crate) const TESTS: &[(&str, Test)] = &[
    ("both_processes_see_device_0_and_mean_another", both_see_device_0),
    ("an_allocation_is_opened_once_and_closed_with_its_last_use", opened_once),
    ("devices_that_do_not_reach_each_other_say_so", no_way),
    ("memory_whose_range_the_driver_hides_is_opened_or_refused", hidden_ranges),
    ("an_open_that_the_driver_refuses_says_what_to_set", refused_open),
    ("virtual_memory_is_shared_by_descriptor", virtual_memory),
    ("every_release_of_the_library_maps_virtual_memory_of_another_process", every_release),
];

/// A process with a pool, which prints the handle to open.
pub(crate) struct Owner {
    pub(crate) child: Child,
    pub(crate) process: ProcessHandle,
    pub(crate) device: DeviceId,
    pub(crate) handle: IpcHandle,
}

/// A process, as the kernel reports it to a peer.
pub(crate) struct ProcessHandle {
    number: u32,
    pidfd: OwnedFd,
}

impl ProcessHandle {
    pub(crate) fn of(number: u32) -> Self {
        let pid = Pid::from_raw(number.cast_signed()).expect("a process has a number");
        let pidfd = pidfd_open(pid, PidfdFlags::empty()).expect("it lives, or was not waited for");
        ProcessHandle { number, pidfd }
    }

    pub(crate) fn of_this_process() -> Self {
        ProcessHandle::of(std::process::id())
    }

    /// Opens memory with a handle from this process.
    pub(crate) fn open(
        &self,
        device: &Arc<Device>,
        owner: DeviceId,
        handle: &IpcHandle,
        len: usize,
    ) -> Result<Memory> {
        let process = LinkProcess { number: self.number, pidfd: Some(self.pidfd.as_fd()) };
        Arc::clone(device).open(owner, process, handle, len)
    }
}

impl Owner {
    pub(crate) fn start(role: &str) -> Self {
        let child = Child::start_self(ROLE, role).expect("a process starts");
        let line = child.hear(LONG).expect("the owner says what it shares");
        let words: Vec<_> = line.split(' ').collect();
        let [ordinal, device, offset, handle] = words[..] else { panic!("the owner says {line}") };
        assert_eq!(ordinal, "0");
        let device = DeviceId(unhex(device).try_into().expect("16 bytes"));
        let handle = IpcHandle { bytes: unhex(handle), offset: offset.parse().expect("a number") };
        let process = ProcessHandle::of(child.pid());
        Owner { child, process, device, handle }
    }

    fn open(&self, bench: &Bench<'_>, handle: &IpcHandle, len: usize) -> Result<Memory> {
        self.process.open(&bench.device, self.device, handle, len)
    }

    /// Reads all shared bytes, in scattered blocks.
    fn read(&self, bench: &Bench<'_>) -> Result<Vec<u8>> {
        read(bench, &self.process, self.device, &self.handle)
    }
}

/// Returns the content of an owner's pool, from the offset that it shares.
pub(crate) fn owned() -> Vec<u8> {
    pattern(9, 1 << 20)
}

/// The part of its pool that an owner shares: offset and length.
pub(crate) const SHARED: (usize, usize) = (4096, 500_000);

/// Reads all bytes that a process shares, in scattered blocks.
pub(crate) fn read(
    bench: &Bench<'_>,
    process: &ProcessHandle,
    owner: DeviceId,
    handle: &IpcHandle,
) -> Result<Vec<u8>> {
    let len = SHARED.1;
    let theirs = process.open(&bench.device, owner, handle, len)?;
    assert_eq!(theirs.device(), owner);
    let ours = bench.device.pool(len).build()?;
    let block = 10_000;
    let hops: Vec<_> = (0..len / block)
        .rev()
        .map(|at| Hop {
            from: theirs.address() + (at * block) as u64,
            to: ours.address() + (at * block) as u64,
            len: block,
        })
        .collect();
    // SAFETY: the hops are in memory that outlives the wait.
    settled(|done| unsafe { bench.device.hop(&hops, done) })?;
    Ok(all_of(&ours))
}

fn expected() -> Vec<u8> {
    owned()[SHARED.0..][..SHARED.1].to_vec()
}

fn read_from_another_process(bench: &Bench<'_>) {
    let owner = Owner::start("owner 0");
    assert_eq!(owner.device, bench.device.info().id);
    assert!(owner.read(bench).unwrap() == expected());
}

fn both_see_device_0(_: &Bench<'_>) {
    let owner = Owner::start("owner 0");
    let mut reader = Child::start_self(ROLE, "reader 1").expect("a process starts");
    let line = reader.hear(LONG).expect("the reader says what it sees");
    let (ordinal, device) = line.split_once(' ').expect("two words");
    assert_eq!(ordinal, "0");
    assert_ne!(unhex(device), owner.device.0, "both have number 0, but they are different devices");
    let Owner { child, device, handle, .. } = &owner;
    let (device, bytes) = (hex(&device.0), hex(&handle.bytes));
    reader.say(&format!("{} {device} {} {bytes}", child.pid(), handle.offset)).unwrap();
    assert_eq!(
        reader.hear(LONG).expect("the reader says what it read"),
        format!("read {}", sum(&expected()))
    );
}

pub(crate) fn sum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(17, |sum: u64, byte| sum.wrapping_mul(31).wrapping_add(u64::from(*byte)))
}

fn opened_once(bench: &Bench<'_>) {
    let owner = Owner::start("owner 0");
    let (open, close) = (bench.maker.names.open, bench.maker.names.close);
    let before = (bench.control.calls(open), bench.control.calls(close));
    let first = owner.open(bench, &owner.handle, 1000).unwrap();
    let later = IpcHandle { offset: owner.handle.offset + 5000, ..owner.handle.clone() };
    let second = owner.open(bench, &later, 1000).unwrap();
    assert_eq!(second.address(), first.address() + 5000);
    assert!(all_of(&second) == expected()[5000..6000]);
    drop(first);
    assert!(all_of(&second) == expected()[5000..6000], "the other use continues");
    assert_eq!((bench.control.calls(open), bench.control.calls(close)), (before.0 + 1, before.1));
    drop(second);
    until("it is closed", || bench.control.calls(close) == before.1 + 1);
    drop(owner.open(bench, &later, 1000).unwrap());
    // A later opening is queued behind the closing.
    let third = owner.open(bench, &later, 1000).unwrap();
    assert_eq!(
        (bench.control.calls(open), bench.control.calls(close)),
        (before.0 + 3, before.1 + 2)
    );
    drop(third);
}

/// A driver need not tell the range of memory of another process by the usual function.
fn hidden_ranges(bench: &Bench<'_>) {
    let owner = Owner::start("owner 0");
    // HIP has no number of an allocation.
    let told = if bench.maker.kind == MemoryKind::Cuda { 2 } else { 1 };
    for level in 1..=told {
        bench.control.command(&format!("hide-imports {level}"));
        assert!(owner.read(bench).unwrap() == expected(), "level {level}");
        let mut longer = owner.handle.clone();
        longer.bytes[45..53].copy_from_slice(&[0, 0, 0, 0, 1, 0, 0, 0]); // more than it has
        longer.offset = 1 << 24;
        let error = owner.open(bench, &longer, 1 << 20).unwrap_err();
        let refused = [ErrorKind::Malformed, ErrorKind::Unsupported];
        assert!(refused.contains(&error.kind()), "level {level}: {error}");
    }
    bench.control.command(&format!("hide-imports {}", told + 1));
    let error = owner.read(bench).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    assert!(error.to_string().contains("bounds"), "{error}");
}

fn refused_open(bench: &Bench<'_>) {
    let owner = Owner::start("owner 0");
    bench.control.fail(bench.maker.names.open, 201, 1);
    let error = owner.read(bench).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported, "so that another transport moves it: {error}");
    assert_eq!(error.native().map(|native| native.code), Some(201));
    for hint in ["--ipc=host", "MIG", "TCP"] {
        assert!(error.to_string().contains(hint), "{error}");
    }
    assert!(owner.read(bench).unwrap() == expected());
}

fn an_owners_death(bench: &Bench<'_>) {
    let mut owner = Owner::start("owner 0");
    let theirs = owner.open(bench, &owner.handle, 1000).unwrap();
    assert!(all_of(&theirs) == expected()[..1000]);
    owner.child.kill().unwrap();
    let error = theirs.copy_out(0, &mut [0; 1000]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::PeerLost, "{error}");
    let again = owner.open(bench, &owner.handle, 1000).unwrap_err();
    assert_eq!(again.kind(), ErrorKind::PeerLost, "even while it is still open: {again}");
    drop(theirs);
    let error = owner.open(bench, &owner.handle, 1000).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::PeerLost, "{error}");
}

fn opened_in_place(bench: &Bench<'_>) {
    let bytes = pattern(10, 300_000);
    let pool = Arc::new(filled(&bench.device, &bytes));
    let handle = bench.device.share(&pool).unwrap();
    let this = ProcessHandle::of_this_process();
    let open = |len| this.open(&bench.device, bench.device.info().id, &handle, len);
    let again = open(200_000).unwrap();
    assert_eq!(again.address(), pool.address());
    drop(pool);
    assert!(all_of(&again) == bytes[..200_000], "it lives as long as a peer has it open");
    drop(again);
    let gone = open(200_000).unwrap_err();
    assert_eq!(gone.kind(), ErrorKind::Revoked, "{gone}");
}

fn made_up(bench: &Bench<'_>) {
    let owner = Owner::start("owner 0");
    let open = |handle: &IpcHandle, len| owner.open(bench, handle, len).map(drop);
    let good = &owner.handle;
    let far = IpcHandle { offset: 1 << 40, ..good.clone() };
    assert_eq!(open(&far, 10).unwrap_err().kind(), ErrorKind::Malformed);
    let wrapping = IpcHandle { offset: u64::MAX, ..good.clone() };
    assert_eq!(open(&wrapping, 10).unwrap_err().kind(), ErrorKind::Malformed);
    assert_eq!(open(good, 0).unwrap_err().kind(), ErrorKind::Malformed);
    for cut in 0..good.bytes.len() {
        open(&IpcHandle { bytes: good.bytes[..cut].to_vec(), offset: 0 }, 10).unwrap_err();
    }
    for at in 0..good.bytes.len() {
        let mut bytes = good.bytes.clone();
        bytes[at] ^= 0x40;
        open(&IpcHandle { bytes, offset: 0 }, 10).ok(); // any result except a crash
    }
    // A length that the owner does not have: the length of the opened memory counts.
    let mut longer = good.bytes.clone();
    longer[45..53].copy_from_slice(&[0xff; 8]); // after the format, the process and the base
    let all = IpcHandle { bytes: longer, offset: 0 };
    assert_eq!(open(&all, 1 << 30).unwrap_err().kind(), ErrorKind::Malformed);
}

fn no_way(bench: &Bench<'_>) {
    let owner = Owner::start("owner 1");
    bench.control.command("no-peers");
    let error = owner.open(bench, &owner.handle, 1000).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
}

fn virtual_memory(bench: &Bench<'_>) {
    let bytes = pattern(20, 3 << 20);
    let before = bench.control.allocated();
    let pool = Arc::new(bench.device.pool(3 << 20).virtual_memory().build().unwrap());
    pool.copy_in(0, &bytes).unwrap();
    assert!(all_of(&pool) == bytes);
    bench.device.dma_buf(pool.address(), pool.len()).unwrap();
    let handle = bench.device.share(&pool).unwrap();
    let (this, id) = (ProcessHandle::of_this_process(), bench.device.info().id);
    let again = this.open(&bench.device, id, &handle, pool.len()).unwrap();
    assert_eq!(again.address(), pool.address());
    drop((again, pool));
    until("the pool is freed", || bench.control.allocated() == before);

    let mut owner = Owner::start("owner 0 mapped");
    assert!(owner.read(bench).unwrap() == expected());
    let kept = owner.open(bench, &owner.handle, 1000).unwrap();
    owner.child.kill().unwrap();
    assert_eq!(kept.copy_out(0, &mut [0; 1000]).unwrap_err().kind(), ErrorKind::PeerLost);
    drop(kept);
    assert_eq!(owner.read(bench).unwrap_err().kind(), ErrorKind::PeerLost);
    drop(filled(&bench.device, &[1; 16]));
}

/// Runs in separate processes, because a library has one version.
fn every_release(bench: &Bench<'_>) {
    for release in bench.maker.releases {
        let child =
            Child::start_self(ROLE, &format!("mapping {release}")).expect("a process starts");
        assert_eq!(child.hear(LONG).expect("it maps another's memory"), "mapped", "{release}");
    }
}

/// For [`super::roles`].
pub(crate) fn map_anothers(bench: &Bench<'_>) {
    let owner = Owner::start("owner 0 mapped");
    assert!(owner.read(bench).unwrap() == expected());
}
