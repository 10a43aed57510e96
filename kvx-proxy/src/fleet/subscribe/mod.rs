//! Subscribes to the KV cache events of instances.
//!
//! The end of a connection may be the end of the instance, so everything about its cache is
//! forgotten then. A replay brings it back.

mod cursor;
mod replay;
mod steps;
#[cfg(test)]
mod tests;

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use kvx_vllm::events::{MAX_BATCH, publication};
use kvx_vllm::zmtp::{Budget, Command, Input, MessageLimits, SocketType};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;
use tokio::time::{Instant, MissedTickBehavior, timeout};

use self::cursor::BatchCursor;
use super::instance::{Instance, State};
use crate::error::{Error, Result};
use crate::relay::core::Core;
use crate::setup::EventSource;
use crate::zmtp::EventConnection;

/// The time between two looks at the fleet.
const LOOK: Duration = Duration::from_secs(1);
/// The time for a connection, and for its greeting.
const CONNECT: Duration = Duration::from_secs(3);
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
            replayed = cursor.replay_end() => {
                cursor.replayed(replayed).await?;
                last_input = Instant::now(); // it took its time
                continue;
            }
            _ = ticks.tick() => {
                if last_input.elapsed() > SILENCE {
                    return Err(Error::new(format!("it was silent for {SILENCE:?}")).into());
                }
                if has_drifted(state) {
                    return Err(SessionEnd::Drifted);
                }
                cursor.replay_if_due();
                connection.command(&Command::Ping { context: Vec::new() }, SILENCE).await?;
                cursor.pinged();
                continue;
            }
        };
        match input {
            None => return Err(Error::new("the publisher closed the connection").into()),
            Some(Input::Command(Command::Ping { context })) => {
                connection.command(&Command::Pong { context }, SILENCE).await?;
            }
            Some(Input::Command(Command::Pong { .. })) => cursor.pong(),
            Some(Input::Command(Command::Error(why))) => {
                let why = format!("the publisher refused the connection: {why:?}");
                return Err(Error::new(why).into());
            }
            Some(Input::Command(_)) => {}
            Some(Input::Message(message)) => {
                cursor.take(publication(message.frames()).map_err(unreadable)?).await?;
            }
        }
        last_input = Instant::now();
    }
}

/// Forgets prompts that were sent long ago, and returns true if predictions have drifted.
fn has_drifted(state: &State) -> bool {
    let mut cache = state.cache();
    cache.expire(std::time::Instant::now());
    cache.has_drifted()
}
