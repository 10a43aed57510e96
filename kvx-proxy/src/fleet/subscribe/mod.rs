//! Subscribes to the KV cache events of instances.
//!
//! The end of a connection may be the end of the instance, so everything about its cache is
//! forgotten then. A replay brings it back.

#[cfg(test)]
mod tests;

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use kvx_vllm::events::{
    CacheEvent, EventBatch, MAX_BATCH, Publication, ReplayAnswer, publication, replay_answer,
    replay_request,
};
use kvx_vllm::zmtp::{Budget, Command, Input, MessageLimits, SocketType};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;
use tokio::time::{Instant, MissedTickBehavior, timeout};

use super::instance::{Instance, State};
use super::knowledge::index::EventIndex;
use crate::error::{Error, Result};
use crate::relay::core::Core;
use crate::setup::EventSource;
use crate::zmtp::EventConnection;

/// The time between two looks at the fleet.
const LOOK: Duration = Duration::from_secs(1);
/// The time for a connection, and for its greeting.
const CONNECT: Duration = Duration::from_secs(3);
/// The time for a replay.
const REPLAY: Duration = Duration::from_secs(30);
/// The times between two replays: the shortest, and the longest after failed ones.
const REPLAY_PAUSES: (Duration, Duration) = (Duration::from_secs(5), Duration::from_secs(300));
/// The time between two pings.
const PING: Duration = Duration::from_secs(2);
/// A publisher from which nothing has arrived for this time is lost.
const SILENCE: Duration = Duration::from_secs(6);
/// The times between attempts to connect: the first and the longest.
const BACK_OFF: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));
/// The time without events after predictions have drifted, or events could not be read.
const LONG_PAUSE: Duration = Duration::from_secs(60);
/// The limits of a message: topic, number and batch, and an empty frame in replays.
const MESSAGE: MessageLimits = MessageLimits { frames: 4, bytes: MAX_BATCH + 4096 };
/// The bytes of an instance's messages in memory.
const MEMORY: usize = 2 * MESSAGE.bytes;
/// The events that are applied at once. Choices look into the cache before the next ones.
const EVENTS_AT_ONCE: usize = 64;

/// Keeps a subscription to each instance with events; never returns.
pub(crate) async fn subscribe(core: Arc<Core>) {
    let mut running: Vec<Subscription> = Vec::new();
    loop {
        let live = core.live();
        let is_wanted = |one: &Subscription| {
            let is_its = |instance: &Arc<Instance>| {
                Arc::ptr_eq(&instance.state, &one.state)
                    && instance.setup.events.as_ref() == Some(&one.source)
            };
            !one.task.is_finished() && live.fleet.all().any(is_its)
        };
        let (wanted, ended): (Vec<_>, Vec<_>) = running.into_iter().partition(is_wanted);
        running = wanted;
        for one in ended {
            one.end().await;
        }
        for instance in live.fleet.all() {
            let Some(source) = &instance.setup.events else { continue };
            if running.iter().any(|one| Arc::ptr_eq(&one.state, &instance.state)) {
                continue;
            }
            let (state, source) = (Arc::clone(&instance.state), source.clone());
            let one = Subscriber {
                core: Arc::clone(&core),
                name: instance.name().to_owned(),
                state: Arc::clone(&state),
                source: source.clone(),
            };
            running.push(Subscription { state, source, task: tokio::spawn(one.run()) });
        }
        drop(live);
        tokio::time::sleep(LOOK).await;
    }
}

/// A running task.
struct Subscription {
    state: Arc<State>,
    source: EventSource,
    task: JoinHandle<()>,
}

impl Subscription {
    /// Ends the task. Forgets the cache after that, since the task may still change it before.
    async fn end(mut self) {
        self.task.abort();
        // An error: it was aborted, or it has panicked, which the log shows.
        let _ = (&mut self.task).await;
        self.state.cache().forget(None);
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// The reason for the end of a subscription.
enum SessionEnd {
    /// The connection has ended, or the publisher has restarted.
    Lost(Error),
    /// This router cannot read what the publisher sends.
    Unreadable(Error),
    /// Predictions have drifted.
    Drifted,
}

impl From<Error> for SessionEnd {
    fn from(error: Error) -> Self {
        SessionEnd::Lost(error)
    }
}

fn unreadable(error: impl std::fmt::Display) -> SessionEnd {
    SessionEnd::Unreadable(Error::new(error.to_string()))
}

/// The subscriber of one instance.
struct Subscriber {
    core: Arc<Core>,
    name: String,
    state: Arc<State>,
    source: EventSource,
}

impl Subscriber {
    async fn run(self) {
        let mut wait = BACK_OFF.0;
        loop {
            let started = Instant::now();
            let mut has_begun = false;
            let Err(end) = session(&self.state, &self.source, &mut has_begun).await;
            if started.elapsed() > BACK_OFF.1 {
                wait = BACK_OFF.0;
            }
            // The drift may not have been noticed before the end.
            let end = if self.state.cache().has_drifted() { SessionEnd::Drifted } else { end };
            let pause = match end {
                SessionEnd::Lost(error) => {
                    self.lost(error.to_string(), has_begun);
                    wait
                }
                SessionEnd::Unreadable(error) => {
                    self.state.cache().ignore_events(error.to_string());
                    self.report(&error.to_string());
                    LONG_PAUSE
                }
                SessionEnd::Drifted => LONG_PAUSE,
            };
            tokio::time::sleep(pause).await;
            wait = (2 * wait).min(BACK_OFF.1);
        }
    }

    /// Records why there are no events. If there were some, the instance may have ended.
    fn lost(&self, why: String, has_begun: bool) {
        let is_new = {
            let mut cache = self.state.cache();
            let is_new = has_begun || cache.why.as_deref() != Some(&why);
            if has_begun {
                cache.counts.losses += 1;
                cache.forget(Some(why.clone()));
            } else {
                cache.why = Some(why.clone());
            }
            is_new
        };
        if is_new {
            self.report(&why);
        }
    }

    fn report(&self, why: &str) {
        let (host, port) = &self.source.endpoint;
        tracing::warn!(instance = self.name, why, "its KV events are not received");
        self.core.errors.add(&self.name, &format!("KV events at {host}:{port}: {why}"));
    }
}

async fn connect(
    endpoint: &(String, u16),
    kind: SocketType,
    budget: &Arc<Budget>,
) -> Result<EventConnection> {
    let address = (endpoint.0.as_str(), endpoint.1);
    let stream = match timeout(CONNECT, TcpStream::connect(address)).await {
        Ok(connected) => connected.map_err(|error| Error::io("cannot connect", error))?,
        Err(_) => return Err(Error::new(format!("cannot connect within {CONNECT:?}"))),
    };
    EventConnection::open(stream, kind, MESSAGE, budget, CONNECT).await
}

/// Connects to an instance, and follows its events until they are lost. Sets `has_begun` once it
/// has connected.
async fn session(
    state: &State,
    source: &EventSource,
    has_begun: &mut bool,
) -> std::result::Result<Infallible, SessionEnd> {
    let budget = Budget::new(MEMORY);
    let mut connection = connect(&source.endpoint, SocketType::Sub, &budget).await?;
    // All topics.
    connection.send(&[&b"\x01"[..]], CONNECT).await?;
    *has_begun = true;
    state.cache().subscribed();
    let mut cursor = BatchCursor::new(state, source, budget);
    let mut last_input = Instant::now();
    let mut ticks = tokio::time::interval(PING);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let input = tokio::select! {
            input = connection.next() => input?,
            _ = ticks.tick() => {
                if last_input.elapsed() > SILENCE {
                    return Err(Error::new(format!("it was silent for {SILENCE:?}")).into());
                }
                if has_drifted(state) {
                    return Err(SessionEnd::Drifted);
                }
                cursor.replay_if_due().await;
                connection.command(&Command::Ping { context: Vec::new() }, SILENCE).await?;
                cursor.pings += 1;
                last_input = last_input.max(cursor.last_replay.unwrap_or(last_input));
                continue;
            }
        };
        match input {
            None => return Err(Error::new("the publisher closed the connection").into()),
            Some(Input::Command(Command::Ping { context })) => {
                connection.command(&Command::Pong { context }, SILENCE).await?;
            }
            Some(Input::Command(Command::Pong { .. })) => cursor.pong().await,
            Some(Input::Command(Command::Error(why))) => {
                let why = format!("the publisher refused the connection: {why:?}");
                return Err(Error::new(why).into());
            }
            Some(Input::Command(_)) => {}
            Some(Input::Message(message)) => {
                cursor.take(publication(message.frames()).map_err(unreadable)?).await?;
            }
        }
        last_input = Instant::now(); // a replay may have taken a while
    }
}

/// Forgets prompts that were sent long ago, and returns true if predictions have drifted.
fn has_drifted(state: &State) -> bool {
    let mut cache = state.cache();
    cache.expire(std::time::Instant::now());
    cache.has_drifted()
}

/// The place in the sequence of an instance's batches.
struct BatchCursor<'a> {
    state: &'a State,
    source: &'a EventSource,
    budget: Arc<Budget>,
    /// True once batches count. With a replay, that is when the publisher has answered a ping, and
    /// so has the subscription: what it published before is in the replay.
    has_begun: bool,
    /// The number of the next batch, if one has been seen.
    next: Option<u64>,
    /// The pings that were sent, and those that were answered.
    pings: u64,
    pongs: u64,
    /// Batches that a replay has contained may arrive until this ping is answered.
    repeats_until: Option<u64>,
    /// The time of the next replay, if one is needed.
    replay_at: Option<Instant>,
    /// The index before a gap, which a replay of the missing batches completes.
    before_gap: Option<ReplayResult>,
    /// The pause after a failed replay.
    replay_pause: Duration,
    /// The end of the latest replay.
    last_replay: Option<Instant>,
}

/// The index that a replay has filled.
#[derive(Default)]
struct ReplayResult {
    index: EventIndex,
    /// The number after the last batch.
    next: u64,
    /// False if batches are missing.
    is_complete: bool,
}

impl<'a> BatchCursor<'a> {
    fn new(state: &'a State, source: &'a EventSource, budget: Arc<Budget>) -> Self {
        let has_begun = source.replay.is_none();
        if has_begun {
            let why = "it has no replay of earlier events; see events_replay";
            state.cache().begin(EventIndex::default(), Some(why.to_owned()));
        }
        BatchCursor {
            state,
            source,
            budget,
            has_begun,
            next: None,
            pings: 0,
            pongs: 0,
            repeats_until: None,
            replay_at: None,
            before_gap: None,
            replay_pause: REPLAY_PAUSES.0,
            last_replay: None,
        }
    }

    /// Records the answer to a ping.
    async fn pong(&mut self) {
        self.pongs += 1;
        if !self.has_begun {
            self.replay().await;
        } else if self.repeats_until.is_some_and(|ping| self.pongs >= ping) {
            self.repeats_until = None;
        }
    }

    async fn replay_if_due(&mut self) {
        if self.replay_at.is_some_and(|at| at <= Instant::now()) {
            self.replay().await;
        }
    }

    /// Asks for the batches after a gap, or for all. If that fails, the index stays as it is, until a later replay.
    async fn replay(&mut self) {
        let Some(replay) = &self.source.replay else { return };
        let all = ReplayResult { is_complete: true, ..ReplayResult::default() };
        let start = self.before_gap.take().unwrap_or(all);
        let replayed = match timeout(REPLAY, replayed(replay, &self.budget, start)).await {
            Ok(replayed) => replayed,
            Err(_) => Err(Error::new(format!("its replay did not end within {REPLAY:?}"))),
        };
        let is_first = !std::mem::replace(&mut self.has_begun, true);
        self.last_replay = Some(Instant::now());
        let mut cache = self.state.cache();
        match replayed {
            Ok(ReplayResult { index, next, is_complete }) => {
                let why = "earlier events are missing in its replay";
                cache.begin(index, (!is_complete).then(|| why.to_owned()));
                self.next = Some(next);
                self.repeats_until = Some(self.pings + 1);
                (self.replay_at, self.replay_pause) = (None, REPLAY_PAUSES.0);
            }
            Err(error) => {
                match is_first {
                    true => cache.begin(EventIndex::default(), Some(error.to_string())),
                    false => cache.why = Some(error.to_string()),
                }
                self.replay_at = Some(Instant::now() + self.replay_pause);
                self.replay_pause = (2 * self.replay_pause).min(REPLAY_PAUSES.1);
            }
        }
    }

    /// Applies a batch in its turn.
    async fn take(&mut self, one: Publication<'_>) -> std::result::Result<(), SessionEnd> {
        if !self.has_begun {
            return Ok(());
        }
        let batch = EventBatch::decode(one.batch).map_err(unreadable)?;
        let number = one.sequence;
        match self.next {
            // The first batch of all.
            None if number == 0 => self.state.cache().begin(EventIndex::default(), None),
            None => {}
            Some(next) if number < next => {
                if self.repeats_until.is_some() {
                    return Ok(());
                }
                let last = next - 1;
                return Err(Error::new(format!(
                    "the publisher has restarted: its number is {number} after {last}"
                ))
                .into());
            }
            Some(next) if number > next => {
                let why = format!("{} batches of its events are missing", number - next);
                {
                    let mut cache = self.state.cache();
                    let index = cache.take_exact();
                    self.before_gap =
                        index.map(|index| ReplayResult { index, next, is_complete: true });
                    cache.lose(&why);
                }
                // Replays cost the engine time.
                let earliest = self.last_replay.map(|last| last + REPLAY_PAUSES.0);
                self.replay_at = Some(earliest.unwrap_or_else(Instant::now));
                self.replay_if_due().await;
                match self.next {
                    // The replay has contained this batch.
                    Some(next) if number < next => return Ok(()),
                    // It has ended before.
                    Some(next) if number > next && self.replay_at.is_none() => {
                        self.state.cache().degrade(&why);
                        self.replay_at = Some(Instant::now() + REPLAY_PAUSES.0);
                    }
                    _ => {}
                }
            }
            Some(_) => {}
        }
        self.repeats_until = None;
        self.next = Some(number + 1);
        self.state.cache().counts.batches += 1;
        for events in batch.events.chunks(EVENTS_AT_ONCE) {
            {
                let mut cache = self.state.cache();
                events.iter().for_each(|event| cache.apply(event));
            }
            tokio::task::yield_now().await;
        }
        Ok(())
    }
}

/// Asks for the batches after those of `so_far`, and applies them.
async fn replayed(
    replay: &(String, u16),
    budget: &Arc<Budget>,
    mut so_far: ReplayResult,
) -> Result<ReplayResult> {
    let failed = |why: &dyn std::fmt::Display| Error::new(format!("its replay failed: {why}"));
    let connected = connect(replay, SocketType::Dealer, budget).await;
    let mut connection = connected.map_err(|error| failed(&error))?;
    connection.send(&replay_request(so_far.next), CONNECT).await.map_err(|error| failed(&error))?;
    loop {
        let message = match connection.next().await.map_err(|error| failed(&error))? {
            Some(Input::Message(message)) => message,
            Some(Input::Command(Command::Ping { context })) => {
                let pong = Command::Pong { context };
                connection.command(&pong, CONNECT).await.map_err(|error| failed(&error))?;
                continue;
            }
            Some(Input::Command(_)) => continue,
            None => return Err(failed(&"the connection was closed before its end")),
        };
        let answer = replay_answer(message.frames()).map_err(|error| failed(&error))?;
        let ReplayAnswer::Publication(one) = answer else { return Ok(so_far) };
        let batch = EventBatch::decode(one.batch).map_err(|error| failed(&error))?;
        if one.sequence != so_far.next {
            so_far.is_complete = false;
            so_far.index.clear();
        }
        for event in &batch.events {
            if *event == CacheEvent::Cleared {
                so_far.is_complete = true;
            }
            if so_far.index.apply(event).is_err() {
                return Err(failed(&"the instance has more blocks than the router keeps"));
            }
        }
        so_far.next = one.sequence + 1;
        // Other tasks run between batches.
        tokio::task::yield_now().await;
    }
}
