//! One of the two machines, its reports to its agent, and the resources of this process.

use std::collections::{HashMap, HashSet};
use std::hash::{DefaultHasher, Hash, Hasher as _};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use kvx_backend::control::proof::Keys;
use kvx_backend::reactor::{Armed, Outbox, Progress as _};
use kvx_core::backend::{
    Context, Events, Invitation, LinkId, LinkState, LocalRegion, QueueFull, RegionSpec, Ticket,
};
use kvx_core::{Identity, Incarnation, Options, Result, Sender};
use kvx_testkit::{Tier, run_one_test};
use rustix::event::{PollFd, PollFlags};

use super::Place;
use crate::clock::{self, virtual_time};
use crate::shm::config::Config;
use crate::shm::machine::Machine;
use crate::shm::memory::Regions;
use crate::shm::progress::Command;
use crate::shm::shared_link::SharedLink;

/// The time after which a silent peer counts as lost.
pub(super) const PEER_TIMEOUT: Duration = Duration::from_secs(10);

/// The time limit for one test, and for one of the whole tier.
const LIMITS: [Duration; 2] = [Duration::from_secs(120), Duration::from_secs(15 * 60)];

/// The reports that both agents received.
#[derive(Default)]
pub(super) struct Inbox {
    is_full: AtomicBool,
    notifications: Mutex<HashSet<u64>>,
    /// The number of reports that a link is up, and that it has ended.
    links: Mutex<HashMap<LinkId, (u32, u32)>>,
    /// The hash of everything that both ends observed, and when.
    trace: Mutex<DefaultHasher>,
}

impl Inbox {
    /// Returns true if the notification with this number has arrived.
    pub(super) fn has(&self, number: u64) -> bool {
        self.notifications.lock().expect("no test has failed").contains(&number)
    }

    /// Returns how often the link was reported up, and ended.
    pub(super) fn told_of(&self, link: LinkId) -> (u32, u32) {
        self.links.lock().expect("no test has failed").get(&link).copied().unwrap_or_default()
    }

    /// Adds an observation, and the virtual time, to the hash of the run.
    pub(super) fn observe(&self, what: impl Hash) {
        let mut trace = self.trace.lock().expect("no test has failed");
        (virtual_time::passed(), what).hash(&mut *trace);
    }

    /// Returns the hash of everything that was observed.
    pub(super) fn trace(&self) -> u64 {
        self.trace.lock().expect("no test has failed").finish()
    }
}

impl Events for Inbox {
    fn notification(&self, _: Sender<'_>, bytes: &[u8]) -> Result<(), QueueFull> {
        if self.is_full.load(Ordering::Relaxed) {
            return Err(QueueFull);
        }
        let (number, rest) =
            bytes.split_first_chunk().expect("a notification begins with its number");
        let number = u64::from_le_bytes(*number);
        assert!(rest.iter().all(|byte| *byte == number as u8), "a notification has wrong bytes");
        let is_new = self.notifications.lock().expect("no test has failed").insert(number);
        assert!(is_new, "a notification arrived twice");
        self.observe(("notification", number));
        Ok(())
    }

    fn link(&self, id: LinkId, state: LinkState) {
        let mut links = self.links.lock().expect("no test has failed");
        let (ups, ends) = links.entry(id).or_default();
        let kind = if let LinkState::Lost(why) = &state { Some(why.kind()) } else { None };
        self.observe(("link", id, std::mem::discriminant(&state), kind));
        match state {
            LinkState::Up => *ups += 1,
            LinkState::Lost(_) | LinkState::Restarted => *ends += 1,
            LinkState::Changed => {}
        }
    }
}

/// A machine whose turns the test runs.
pub(super) struct End {
    pub(super) machine: Machine,
    pub(super) regions: Arc<Regions>,
    inbox: Arc<Inbox>,
    invitation: Invitation,
    /// True if its reactor runs the next turn without sleeping.
    awake: bool,
    /// The time of the next check of timers, after a turn that did nothing.
    pub(super) sleeps_until: Option<Instant>,
    /// True while the process is stopped, as by SIGSTOP.
    pub(super) is_stopped: bool,
}

impl End {
    pub(super) fn new(name: &str, life: u8, inbox: Arc<Inbox>) -> Self {
        let (options, regions) = (Options::new(), Arc::new(Regions::default()));
        let config = Config::read(&options).expect("every option has a default");
        let invitation = Invitation::from_bytes([life; 32]);
        let context = Context {
            // An incarnation of this name in another process must not answer.
            agent: Identity {
                name: format!("{name} of {}", std::process::id()).into(),
                incarnation: Incarnation([life; 16]),
            },
            options,
            events: Arc::clone(&inbox) as _,
            devices: Vec::new(),
            invitation,
            secret: None,
            peer_timeout: PEER_TIMEOUT,
        };
        let machine =
            Machine::new(context, config, Arc::clone(&regions)).expect("descriptors are available");
        End {
            machine,
            regions,
            inbox,
            invitation,
            awake: true,
            sleeps_until: None,
            is_stopped: false,
        }
    }

    pub(super) fn register(&self, place: &Place) {
        let memory = Arc::clone(&place.memory);
        self.regions.open(RegionSpec { id: place.id, key: place.key, memory }, None);
    }

    /// Returns the state of a link to this end.
    pub(super) fn shared(&self, id: LinkId) -> SharedLink {
        SharedLink {
            id,
            peer: self.machine.me.clone(),
            keys: Keys::new(&self.invitation, None),
            reachability: OnceLock::new(),
            gone: OnceLock::new(),
        }
    }

    pub(super) fn command(&mut self, command: Command) {
        let mut out = Outbox::default();
        self.machine.command(command, &mut out);
        kvx_backend::fuzz::deliver_to(&mut out, &*self.inbox);
        self.awake = true;
    }

    /// Returns true if the reactor's thread is awake or would wake up now.
    fn is_awake(&self) -> bool {
        let mut polled = [PollFd::from_borrowed_fd(self.machine.poller.fd(), PollFlags::IN)];
        let now = rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 };
        self.awake
            || self.sleeps_until.is_some_and(|at| at <= clock::now())
            || rustix::event::poll(&mut polled, Some(&now)).expect("it is open") > 0
    }

    /// Copies up to `most` batches as a copying thread does, then runs a turn as the reactor's
    /// thread does, if that would be awake. Returns true if it did anything.
    pub(super) fn turn(&mut self, most: usize) -> bool {
        if self.is_stopped {
            return false;
        }
        self.machine.copying.copy_here(most);
        let mut landed = self.machine.flights.with_batch_ends();
        if landed.is_empty() && !self.is_awake() {
            return false;
        }
        landed.sort_unstable(); // the table of flights has no order
        for number in &landed {
            self.command(Command::BatchEnded { number: *number });
        }
        let mut out = Outbox::default();
        let done = kvx_backend::fuzz::turn(&mut self.machine, &mut out).done + landed.len();
        kvx_backend::fuzz::deliver_to(&mut out, &*self.inbox);
        self.awake = done > 0
            || match self.machine.arm().expect("it can sleep") {
                Armed::Again | Armed::Busy => true,
                Armed::Sleep(longest) => {
                    self.sleeps_until = longest.map(|longest| clock::now() + longest);
                    false
                }
            };
        true
    }

    /// Sets whether the agent has space for notifications.
    pub(super) fn set_room(&mut self, has_room: bool) {
        self.inbox.is_full.store(!has_room, Ordering::Relaxed);
        if has_room {
            self.command(Command::Resume);
        }
    }

    /// Returns the number of descriptors that it has without connections.
    pub(super) fn descriptors(&self) -> usize {
        1 + self.machine.listeners.iter().flatten().count()
    }
}

/// A local region without behaviour: plans refer to their local memory directly.
pub(super) struct Local;

impl LocalRegion for Local {
    fn export(&self) -> &[u8] {
        &[]
    }

    fn revoke(&self, done: Ticket) {
        done.settle(Ok(()));
    }
}

/// The result of a ticket.
pub(super) struct Outcome(Arc<OnceLock<Result<()>>>);

impl Outcome {
    /// Returns a new ticket with its result.
    pub(super) fn new() -> (Ticket, Self) {
        let outcome = Arc::new(OnceLock::new());
        let told = Arc::clone(&outcome);
        (Ticket::new(move |result| drop(told.set(result))), Outcome(outcome))
    }

    /// Returns the result, if the ticket has settled. A live end must not forget a ticket.
    pub(super) fn get(&self, what: &str) -> Option<&Result<()>> {
        let is_held = Arc::strong_count(&self.0) > 1;
        let result = self.0.get();
        assert!(result.is_some() || is_held, "{what} is forgotten: its ticket has not settled");
        result
    }
}

/// The resources of this process that could leak.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Resources {
    pub(super) descriptors: usize,
    /// The number of mappings of peers' memory.
    pub(super) mapped: usize,
}

impl Resources {
    /// Returns the current resources. Only valid if no other thread opens or maps anything.
    pub(super) fn now() -> Self {
        let directory = std::fs::read_dir("/proc/self/fd").expect("there is a /proc");
        let own = 1; // the directory itself
        let maps = std::fs::read_to_string("/proc/self/maps").expect("there is a /proc");
        let is_peers = |line: &&str| line.contains(" r--s ") && line.contains("/memfd:");
        Resources {
            descriptors: directory.count() - own,
            mapped: maps.lines().filter(is_peers).count(),
        }
    }
}

/// Runs a test in its own process, in which no other test opens or maps anything.
pub(super) fn alone(module: &str, test: &str, run: impl FnOnce()) {
    const ALONE: &str = "KVX_TEST_ALONE";
    let (_, module) = module.split_once("::").expect("it begins with the crate");
    let name = format!("{module}::{test}");
    if std::env::var(ALONE).is_ok_and(|alone| alone == name) {
        // Opens the files that stay open for the life of the process.
        drop(End::new("first", 1, Arc::default()));
        return run();
    }
    let mut again = std::process::Command::new(std::env::current_exe().expect("it runs"));
    again.args(["--exact", &name, "--nocapture", "--test-threads=1"]).env(ALONE, &name);
    let limit = LIMITS[usize::from(Tier::Whole.runs())];
    let ran = run_one_test(&name, &mut again, limit);
    print!("{}", ran.unwrap_or_else(|why| panic!("{name}: {why}")));
}
