//! The faults for which a link may be lost, and for how long they explain that.

use std::time::{Duration, Instant};

use kvx_core::backend::LinkId;

use super::agent::PEER_TIMEOUT;
use super::world::{BRIEF, SLACK, World};
use crate::clock;
use crate::tcp::socket::network;

/// The longest silence of a peer that answers: the time until it is asked, and that of the ping and
/// its answer on lanes that stall.
const ANSWER: Duration = Duration::from_millis(2500);

/// The faults of a run so far.
#[derive(Default)]
pub(super) struct Causes {
    outages: Vec<Outage>,
    /// The last cut of a connection that each agent opened.
    cuts: [Option<Instant>; 2],
}

/// A time in which an agent was stopped, or the network was down.
struct Outage {
    from: Instant,
    until: Instant,
    /// True for the agents whose peers could not answer.
    unanswered: [bool; 2],
}

impl Causes {
    /// Records an outage that begins now.
    pub(super) fn note_outage(&mut self, time: Duration, unanswered: [bool; 2]) {
        let from = clock::now();
        self.outages.push(Outage { from, until: from + time, unanswered });
    }

    /// Records that a connection was cut that this agent opened.
    pub(super) fn note_cut(&mut self, of: usize) {
        self.cuts[of] = Some(clock::now());
    }

    /// Ends all outages.
    pub(super) fn end(&mut self) {
        let now = clock::now();
        self.outages.iter_mut().for_each(|outage| outage.until = outage.until.min(now));
    }

    /// Returns how much of the time since `from` were outages: all, or those in which an agent got
    /// no answer. At most one happens at a time.
    fn since(&self, from: Instant, of: Option<usize>) -> Duration {
        let now = clock::now();
        let counted = self.outages.iter().filter(|it| of.is_none_or(|of| it.unanswered[of]));
        counted.map(|it| it.until.min(now).saturating_duration_since(it.from.max(from))).sum()
    }
}

impl World {
    /// Returns why the link must not be lost now, if it must not.
    pub(super) fn must_keep(&self, of: usize, id: LinkId) -> Option<String> {
        let Some(link) = self.links[of].as_ref().filter(|link| link.id == id) else {
            return Some("it is closed".into());
        };
        let (now, causes) = (clock::now(), &self.causes);
        if causes.cuts[of].is_some_and(|at| now - at <= SLACK + causes.since(at, None)) {
            return None;
        }
        if !link.is_up {
            let outages = causes.since(link.opened, None);
            return (outages <= BRIEF).then(|| format!("outages of {outages:?} since it began"));
        }
        let arrival = network::last_arrival(self.agents[1 - of].metadata.address);
        let silent_since = arrival.max(link.waits_since).unwrap_or(now);
        let silence = now - silent_since;
        let [unanswered, all] = [Some(of), None].map(|of| causes.since(silent_since, of));
        let is_caused = silence >= PEER_TIMEOUT && unanswered > BRIEF && silence <= all + ANSWER;
        let why = || format!("a silence of {silence:?}, {unanswered:?} of it by faults");
        (!is_caused || link.waits_since.is_none()).then(why)
    }
}
