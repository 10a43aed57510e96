//! kvx's promises for the devices of any maker, shown with the stand-in: the tests of `kvx-cuda`
//! and of `kvx-rocm`. Where a variable names another library, that one is tested, as far as it
//! needs no command of the stand-in's.

mod copies;
mod errors;
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

/// What differs between the makers.
pub(crate) struct Maker {
    pub(crate) kind: MemoryKind,
    pub(crate) devices: fn() -> Result<Vec<Arc<Device>>, Unavailable>,
    /// The variable that names the library, and further ones that tests set to the stand-in.
    pub(crate) variables: &'static [&'static str],
    pub(crate) visible: &'static str,
    /// The version that makes a library too old, as a command.
    pub(crate) too_old: &'static str,
    /// Versions that it may have, as commands.
    pub(crate) releases: &'static [&'static str],
    pub(crate) names: Names,
    /// Puts a copy on a stream of the program's, always the same one: from, to, bytes.
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
    pub(crate) open: &'static str,
    pub(crate) close: &'static str,
    pub(crate) load: &'static str,
}

/// What a test gets.
pub(crate) struct Bench<'a> {
    pub(crate) maker: &'static Maker,
    pub(crate) control: Commands<'a>,
    pub(crate) device: Arc<Device>,
}

/// The stand-in's commands; there are none over another library.
#[derive(Clone, Copy)]
pub(crate) struct Commands<'a>(Option<&'a Control>);

impl Deref for Commands<'_> {
    type Target = Control;

    fn deref(&self) -> &Control {
        self.0.expect("a test in ANYWHERE needs no stand-in")
    }
}

/// Does something with the first device, and with the stand-in's commands if it is the stand-in's.
pub(crate) fn with_a_device<T>(maker: &'static Maker, act: impl FnOnce(&Bench<'_>) -> T) -> T {
    let control = over_the_stand_in(maker).then(Control::open);
    let device = Arc::clone(&(maker.devices)().expect("the library has devices")[0]);
    act(&Bench { maker, control: Commands(control.as_ref()), device })
}

/// Whether the library to be tested is the stand-in.
pub(crate) fn over_the_stand_in(maker: &Maker) -> bool {
    let named = std::env::var_os(maker.variables[0]).unwrap_or_default();
    std::path::Path::new(&named).file_name() == kvx_stand_in::library().file_name()
}

/// Longer than anything takes.
pub(crate) const LONG: Duration = Duration::from_secs(8);

pub(crate) const ROLE: &str = "KVX_DEVICE_ROLE";

type Test = fn(&Bench<'_>);

/// Plays a role in one of the tests and ends the process, if it was started for that.
pub(crate) fn play_if_asked(maker: &'static Maker) {
    if let Ok(role) = std::env::var(ROLE) {
        roles::play(maker, &role);
        std::process::exit(0);
    }
}

/// Returns the tests of a maker, and those that it has `more`: with the stand-in only, and with any
/// library.
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
        tests.extend([copies::TESTS, errors::TESTS, kernels::TESTS, memory::TESTS].concat());
        tests.extend([sharing::TESTS, tickets::TESTS, more].concat());
    }
    let trials = tests.into_iter().map(|(name, test)| {
        let title = format!("devices::{name}");
        trial(title.clone(), move || match is_own_process() {
            true => check(maker, test),
            // The others and the clauses would meet what it makes slow or broken.
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

/// Bytes that tell where they are from.
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

/// A pool with bytes in it.
pub(crate) fn filled(device: &Arc<Device>, bytes: &[u8]) -> Memory {
    let pool = device.pool(bytes.len()).build().expect("there is room for a small pool");
    pool.copy_in(0, bytes).expect("a pool takes bytes");
    pool
}

/// Gives a ticket away and waits until it settles.
pub(crate) fn settled(give: impl FnOnce(Ticket)) -> Result<()> {
    let (completion, ticket) = Completion::with_ticket();
    give(ticket);
    completion.wait_blocking(LONG)
}

/// A ticket, and what it settled with so far.
pub(crate) fn watched() -> (Arc<Mutex<Option<Result<()>>>>, Ticket) {
    let outcome = Arc::new(Mutex::new(None));
    let ours = Arc::clone(&outcome);
    (outcome, Ticket::new(move |result| *ours.lock().unwrap() = Some(result)))
}

/// Waits until something is so.
pub(crate) fn until(what: &str, so: impl Fn() -> bool) {
    let begun = std::time::Instant::now();
    while !so() {
        assert!(begun.elapsed() < LONG, "{what}: not within {LONG:?}");
        std::thread::yield_now();
    }
}
