//! Tracks the work on streams (flights), which ends in the order of its events.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::kernel_tables::{KernelTable, Tables};
use crate::driver::{Driver, EventHandle, StreamHandle};
use kvx_backend::process::ProcessWatch;
use kvx_core::backend::Ticket;
use kvx_core::backend::sync::catch_panic;
use kvx_core::{Error, ErrorKind, Result};

/// The time that a driver may return errors that give no information about work before that work
/// counts as lost.
const PATIENCE: Duration = Duration::from_secs(3);

/// Work on a stream.
pub(super) struct Flight {
    pub(super) done: Ticket,
    /// An error if not all of the work was started.
    pub(super) started: Result<()>,
    /// Processes whose memory the work reads or writes.
    pub(super) owners: Vec<Arc<ProcessWatch>>,
    pub(super) tables: Vec<KernelTable>,
}

impl Flight {
    /// Settles the ticket: nobody accesses the memory any more.
    fn settle(self, ended: Result<()>, tables: &mut Tables) {
        tables.give(self.tables);
        let result = ended.and(self.started).and_then(|()| {
            // Check this after the bytes have arrived: memory of a process that has ended may have
            // been reused by then.
            match self.owners.iter().any(|owner| owner.is_exiting()) {
                false => Ok(()),
                true => Err(ErrorKind::PeerLost.because(
                    "the process whose device memory was copied has ended: do not use the copied \
                     bytes",
                )),
            }
        });
        catch_panic(|| self.done.settle(result));
    }
}

/// A stream and its flights.
pub(super) struct StreamFlights {
    pub(super) stream: StreamHandle,
    flights: VecDeque<(Flight, FlightEvent)>,
}

/// The event after a flight.
struct FlightEvent {
    event: Option<EventHandle>,
    recorded: bool,
    /// The time since which the driver has given no answer.
    silent: Option<Instant>,
}

/// The result of polling a stream.
pub(super) struct StreamLook {
    pub(super) ended: usize,
    /// Set if the driver has given the device up.
    pub(super) broken: Option<Error>,
}

impl StreamFlights {
    pub(super) fn new(stream: StreamHandle) -> Self {
        StreamFlights { stream, flights: VecDeque::new() }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.flights.is_empty()
    }

    /// Adds work that was just put on the stream.
    pub(super) fn push(&mut self, flight: Flight, driver: &Driver, events: &mut SpareEvents) {
        let mut mark = FlightEvent { event: None, recorded: false, silent: None };
        // The next poll hits and handles the error again.
        mark.record(self.stream, driver, events).ok();
        self.flights.push_back((flight, mark));
    }

    /// Settles the flights that have ended.
    pub(super) fn look(
        &mut self,
        driver: &Driver,
        events: &mut SpareEvents,
        tables: &mut Tables,
    ) -> StreamLook {
        let mut look = StreamLook { ended: 0, broken: None };
        while let Some((_, mark)) = self.flights.front_mut() {
            let reached = mark.record(self.stream, driver, events).and_then(|event| {
                // SAFETY: the event is alive and recorded.
                unsafe { driver.is_reached(event) }
            });
            let lost = match reached {
                Ok(false) => {
                    mark.silent = None;
                    return look;
                }
                Ok(true) => None,
                Err(error) if driver.is_fatal(code(&error)) => {
                    look.broken = Some(error);
                    return look;
                }
                Err(error) if mark.silent.get_or_insert_with(Instant::now).elapsed() > PATIENCE => {
                    Some(error)
                }
                Err(_) => return look,
            };
            let Some((flight, mark)) = self.flights.pop_front() else { return look };
            look.ended += 1;
            match lost {
                None => {
                    events.give(mark.event);
                    flight.settle(Ok(()), tables);
                }
                Some(error) => {
                    // Dropping its ticket quarantines its memory; the event and the tables may be
                    // in use.
                    tracing::error!(%error, "a driver does not report whether its copies have ended");
                    catch_panic(|| drop(flight));
                }
            }
        }
        look
    }

    /// Ends all flights with an error, because the driver does no more work.
    pub(super) fn fail(&mut self, error: &Error, tables: &mut Tables) {
        for (flight, _) in self.flights.drain(..) {
            flight.settle(Err(error.clone()), tables);
        }
    }
}

impl FlightEvent {
    /// Returns the event; records it now if it is not recorded yet, after all work on the stream.
    fn record(
        &mut self,
        stream: StreamHandle,
        driver: &Driver,
        events: &mut SpareEvents,
    ) -> Result<EventHandle> {
        let event = match self.event {
            Some(event) => event,
            None => *self.event.insert(events.take(driver)?),
        };
        if !self.recorded {
            // SAFETY: both are alive; this is the stream's only lane.
            unsafe { driver.record(event, stream) }?;
            self.recorded = true;
        }
        Ok(event)
    }
}

/// Events that are not in use.
#[derive(Default)]
pub(super) struct SpareEvents(Vec<EventHandle>);

impl SpareEvents {
    fn take(&mut self, driver: &Driver) -> Result<EventHandle> {
        self.0.pop().map_or_else(|| driver.create_event(), Ok)
    }

    fn give(&mut self, event: Option<EventHandle>) {
        self.0.extend(event);
    }

    pub(super) fn end(&mut self, driver: &Driver) {
        for event in self.0.drain(..) {
            // SAFETY: it came from `take`, and no flight uses it.
            if let Err(error) = unsafe { driver.destroy_event(event) } {
                tracing::debug!(%error, "an event was not destroyed");
            }
        }
    }
}

/// Returns the driver's code.
pub(super) fn code(error: &Error) -> i64 {
    error.native().map_or(0, |native| native.code)
}
