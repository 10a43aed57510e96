//! Tests kvx's guarantees for the devices of any vendor with the stand-in: the tests of `kvx-cuda`
//! and `kvx-rocm`. If a variable names another library, they test that one, as far as they need no
//! command of the stand-in.

mod arrival;
mod blocking;
mod copies;
mod errors;
mod forgery;
mod kernels;
mod memory;
mod roles;
pub(crate) mod sharing;
mod tickets;

use std::ops::Deref;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kvx_core::backend::{Ticket, Unavailable};
use kvx_core::{Completion, Memory, MemoryKind, Result};
use kvx_gpu::{Device, StreamHandle};
use kvx_stand_in::Control;
use kvx_testkit::{Check, Failure, is_own_process, run_in_own_process, trial};
use libtest_mimic::Trial;

/// The properties that differ between vendors.
pub(crate) struct Maker {
    pub(crate) kind: MemoryKind,
    pub(crate) devices: fn() -> Result<Vec<Arc<Device>>, Unavailable>,
    /// The variable that names the library, and others that tests set to the stand-in.
    pub(crate) variables: &'static [&'static str],
    pub(crate) visible: &'static str,
    /// The stand-in's command for a version that is too old.
    pub(crate) too_old: &'static str,
    /// The stand-in's commands for supported versions.
    pub(crate) releases: &'static [&'static str],
    pub(crate) names: Names,
    /// Puts a copy on a stream of the program, always the same one: from, to, bytes.
    pub(crate) copy_on_a_stream: fn(u64, u64, usize) -> StreamHandle,
}

/// The functions that tests count or make fail.
pub(crate) struct Names {
    pub(crate) to_device: &'static str,
    pub(crate) rows: &'static str,
    pub(crate) batch: Option<&'static str>,
    pub(crate) launch: &'static str,
    pub(crate) record: &'static str,
    pub(crate) query: &'static str,
    pub(crate) allocate: &'static str,
    pub(crate) free: &'static str,
    pub(crate) unpin: &'static str,
    pub(crate) create_stream: &'static str,
    pub(crate) open: &'static str,
    pub(crate) close: &'static str,
    pub(crate) load: &'static str,
}

/// The device and the stand-in's controls for a test.
pub(crate) struct Bench<'a> {
    pub(crate) maker: &'static Maker,
    pub(crate) control: Commands<'a>,
    pub(crate) device: Arc<Device>,
}

/// The stand-in's commands; `None` with another library.
#[derive(Clone, Copy)]
pub(crate) struct Commands<'a>(Option<&'a Control>);

impl Deref for Commands<'_> {
    type Target = Control;

    fn deref(&self) -> &Control {
        self.0.expect("a test in ANYWHERE needs no stand-in")
    }
}

/// Calls `act` with the first device, and with the stand-in's commands if the device is the
/// stand-in's.
pub(crate) fn with_a_device<T>(maker: &'static Maker, act: impl FnOnce(&Bench<'_>) -> T) -> T {
    let control = over_the_stand_in(maker).then(Control::open);
    let device = Arc::clone(&(maker.devices)().expect("the library has devices")[0]);
    act(&Bench { maker, control: Commands(control.as_ref()), device })
}

/// Returns whether the library under test is the stand-in.
pub(crate) fn over_the_stand_in(maker: &Maker) -> bool {
    let named = std::env::var_os(maker.variables[0]).unwrap_or_default();
    std::path::Path::new(&named).file_name() == kvx_stand_in::library().file_name()
}

/// A timeout that is longer than anything takes.
pub(crate) const LONG: Duration = Duration::from_secs(8);

pub(crate) const ROLE: &str = "KVX_DEVICE_ROLE";

type Test = fn(&Bench<'_>);

/// Plays a role in one of the tests and exits, if this process was started for that.
pub(crate) fn play_if_asked(maker: &'static Maker) {
    if let Ok(role) = std::env::var(ROLE) {
        roles::play(maker, &role);
        std::process::exit(0);
    }
}

/// Returns the tests of a vendor, and `more`: with the stand-in only, and with any library.
pub(crate) fn trials(
    maker: &'static Maker,
    more: &[(&'static str, Test)],
    more_anywhere: &[(&'static str, Test)],
) -> Vec<Trial> {
    let mut tests = [
        copies::ANYWHERE,
        errors::ANYWHERE,
        kernels::ANYWHERE,
        memory::ANYWHERE,
        sharing::ANYWHERE,
        tickets::ANYWHERE,
        more_anywhere,
    ]
    .concat();
    if over_the_stand_in(maker) {
        tests.extend([blocking::TESTS, copies::TESTS, errors::TESTS, kernels::TESTS].concat());
        tests.extend(memory::TESTS);
        tests.extend([forgery::TESTS, sharing::TESTS, tickets::TESTS, more].concat());
    }
    let trials = tests.into_iter().map(|(name, test)| {
        let title = format!("devices::{name}");
        trial(title.clone(), move || match is_own_process() {
            true => check(maker, test),
            // In this process, other tests and clauses would be affected by what it makes slow or
            // broken.
            false => run_in_own_process(&title, |_| {}),
        })
    });
    trials.collect()
}

fn check(maker: &'static Maker, test: Test) -> Check {
    let faults = with_a_device(maker, |bench| {
        test(bench);
        bench.control.0.map_or(0, Control::faults)
    });
    if faults == 0 {
        Ok(())
    } else {
        Err(Failure::new(format!("memory was misused {faults} times")))
    }
}

/// Returns bytes that depend on their position and the seed.
pub(crate) fn pattern(seed: u32, len: usize) -> Vec<u8> {
    (0..len as u32)
        .map(|at| (at.wrapping_mul(0x9e37_79b1).rotate_left(9) ^ seed.wrapping_mul(77)) as u8)
        .collect()
}

pub(crate) fn all_of(memory: &Memory) -> Vec<u8> {
    let mut bytes = vec![0; memory.len()];
    memory.copy_out(0, &mut bytes).expect("device memory is copied out");
    bytes
}

/// Returns a pool that contains bytes.
pub(crate) fn filled(device: &Arc<Device>, bytes: &[u8]) -> Memory {
    let pool = device.pool(bytes.len()).build().expect("a small pool fits");
    pool.copy_in(0, bytes).expect("a pool takes bytes");
    pool
}

/// Passes a ticket on and waits until it settles.
pub(crate) fn settled(give: impl FnOnce(Ticket)) -> Result<()> {
    let (completion, ticket) = Completion::with_ticket();
    give(ticket);
    completion.wait_blocking(LONG)
}

/// Returns a ticket, and the result with which it has settled so far.
pub(crate) fn watched() -> (Arc<Mutex<Option<Result<()>>>>, Ticket) {
    let outcome = Arc::new(Mutex::new(None));
    let ours = Arc::clone(&outcome);
    (outcome, Ticket::new(move |result| *ours.lock().unwrap() = Some(result)))
}

/// Waits until a condition is true.
pub(crate) fn until(what: &str, so: impl Fn() -> bool) {
    let begun = std::time::Instant::now();
    while !so() {
        assert!(begun.elapsed() < LONG, "{what}: not within {LONG:?}");
        std::thread::yield_now();
    }
}
