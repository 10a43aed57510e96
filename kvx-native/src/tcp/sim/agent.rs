//! A simulated agent: a machine whose turns the simulation runs, and what its core observes.

use std::collections::HashSet;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use kvx_backend::control::proof::Keys;
use kvx_backend::reactor::{Armed, Outbox, Progress as _};
use kvx_core::backend::{Events, Invitation, LinkId, LinkState, QueueFull, RegionSpec, Ticket};
use kvx_core::{Identity, Incarnation, Options, Result, Sender};

use crate::clock;
use crate::tcp::config::Config;
use crate::tcp::context::AgentContext;
use crate::tcp::limit::ConnectionLimit;
use crate::tcp::machine::{Command, Machine};
use crate::tcp::memory::regions::Regions;
use crate::tcp::memory::stages::DeviceStages;
use crate::tcp::region::TcpRegion;
use crate::tcp::socket::listener::Listener;
use crate::tcp::socket::network;

/// The time after which a silent peer counts as lost.
pub(super) const PEER_TIMEOUT: Duration = Duration::from_secs(4);

/// The reports that an agent's core receives.
#[derive(Default)]
pub(super) struct Inbox {
    is_full: AtomicBool,
    notifications: Mutex<HashSet<u64>>,
    /// The reports that the simulation has not seen.
    unseen: Mutex<Vec<Report>>,
}

/// A report to an agent's core.
pub(super) enum Report {
    Notification(u64),
    Link(LinkId, LinkState),
}

impl Inbox {
    /// Returns true if the notification with this number has arrived.
    pub(super) fn has(&self, number: u64) -> bool {
        self.notifications.lock().expect("no test has failed").contains(&number)
    }

    pub(super) fn take_unseen(&self) -> Vec<Report> {
        std::mem::take(&mut self.unseen.lock().expect("no test has failed"))
    }

    fn report(&self, report: Report) {
        self.unseen.lock().expect("no test has failed").push(report);
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
        self.report(Report::Notification(number));
        Ok(())
    }

    fn link(&self, id: LinkId, state: LinkState) {
        self.report(Report::Link(id, state));
    }
}

/// An agent's metadata, as its peers know it.
#[derive(Clone)]
pub(super) struct Metadata {
    pub(super) identity: Identity,
    pub(super) invitation: Invitation,
    pub(super) address: SocketAddr,
}

pub(super) struct Agent {
    pub(super) metadata: Metadata,
    pub(super) machine: Machine,
    pub(super) inbox: Arc<Inbox>,
    context: Arc<AgentContext>,
    /// The commands that wait for the next turn.
    commands: Arc<Mutex<Vec<Command>>>,
    /// True if its reactor runs the next turn without sleeping.
    is_awake: bool,
    /// The time until which the process is stopped, as by SIGSTOP.
    pub(super) stopped_until: Option<Instant>,
}

impl Agent {
    /// Starts an incarnation of the agent with this number.
    pub(super) fn start(number: usize, life: u8, seal: &str) -> Self {
        let address = SocketAddr::from(([10, 0, 0, number as u8], 7000));
        let identity = Identity {
            name: ["prefill", "decode"][number].into(),
            incarnation: Incarnation([life; 16]),
        };
        let invitation = Invitation::from_bytes([life; 32]);
        let options = Options::parse(&format!(r#"{{"tcp": {{"seal": "{seal}"}}}}"#));
        let config = Config::read(&options.expect("it is JSON")).expect("the option is valid");
        let inbox = Arc::new(Inbox::default());
        let context = Arc::new(AgentContext {
            limit: ConnectionLimit::new(config.max_connections),
            config,
            agent: identity.clone(),
            keys: Keys::new(&invitation, None),
            secret: None,
            events: Arc::clone(&inbox) as _,
            peer_timeout: PEER_TIMEOUT,
            process: std::process::id(),
            regions: Regions::default(),
            stages: DeviceStages::default(),
            deferred: Arc::default(),
        });
        let listener = Listener { socket: network::listen(address), addresses: vec![address] };
        let machine =
            Machine::new(Arc::clone(&context), listener).expect("descriptors are available");
        Agent {
            metadata: Metadata { identity, invitation, address },
            machine,
            inbox,
            context,
            commands: Arc::default(),
            is_awake: true,
            stopped_until: None,
        }
    }

    pub(super) fn submit(&self, command: Command) {
        self.commands.lock().expect("no test has failed").push(command);
    }

    pub(super) fn register(&self, spec: RegionSpec) -> Arc<TcpRegion> {
        let commands = Arc::clone(&self.commands);
        let revoke = move |region, done| {
            commands.lock().expect("no test has failed").push(Command::Revoke { region, done });
        };
        let region = TcpRegion::register(spec, Arc::clone(&self.context), revoke);
        Arc::new(region.expect("it needs no device"))
    }

    /// Sets whether the agent has space for notifications.
    pub(super) fn set_room(&self, has_room: bool) {
        self.inbox.is_full.store(!has_room, Ordering::Relaxed);
        if has_room {
            self.submit(Command::Resume);
        }
    }

    pub(super) fn is_stopped(&self) -> bool {
        self.stopped_until.is_some_and(|until| clock::now() < until)
    }

    /// Returns the time of its next timer, or of the end of its stop.
    pub(super) fn next_event(&self) -> Option<Instant> {
        if self.is_stopped() { self.stopped_until } else { self.machine.poller.timer() }
    }

    /// Returns true if the reactor's thread is awake or would wake up now.
    pub(super) fn wakes(&self) -> bool {
        !self.is_stopped()
            && (self.is_awake
                || !self.commands.lock().expect("no test has failed").is_empty()
                || self.machine.poller.is_ready())
    }

    /// Runs a turn as the reactor's thread does.
    pub(super) fn turn(&mut self) {
        let mut out = Outbox::default();
        let commands = std::mem::take(&mut *self.commands.lock().expect("no test has failed"));
        let has_commands = !commands.is_empty();
        for command in commands {
            self.machine.command(command, &mut out);
        }
        let turn = kvx_backend::fuzz::turn(&mut self.machine, &mut out);
        kvx_backend::fuzz::deliver_to(&mut out, &*self.inbox);
        let armed = self.machine.arm().expect("it can sleep");
        self.is_awake = has_commands || turn.done > 0 || !matches!(armed, Armed::Sleep(_));
    }
}

/// The result of a ticket.
#[derive(Clone)]
pub(super) struct Outcome(Arc<OnceLock<Result<()>>>);

impl Outcome {
    /// Returns a new ticket with its result.
    pub(super) fn new() -> (Ticket, Self) {
        let outcome = Arc::new(OnceLock::new());
        let told = Arc::clone(&outcome);
        let settle = move |result| told.set(result).expect("a ticket settles once");
        (Ticket::new(settle), Outcome(outcome))
    }

    /// Returns the result, if the ticket has settled. A live agent must not forget a ticket.
    pub(super) fn get(&self, what: &str) -> Option<Result<()>> {
        let is_held = Arc::strong_count(&self.0) > 1;
        let result = self.0.get().cloned();
        assert!(result.is_some() || is_held, "{what} is forgotten: its ticket has not settled");
        result
    }
}
