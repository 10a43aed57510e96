//! Writes on the target's side: the local thread pulls the bytes into local memory, after checking
//! keys and bounds.

use kvx_backend::control::Refusal;
use kvx_backend::reactor::SLICE;
use kvx_core::backend::Extents;
use kvx_core::{Error, ErrorKind, Result};

use super::copy::PullPieces;
use super::error::error;
use super::flights::Load;
use super::machine::Machine;
use super::messages::Message;
use super::work::{Pull, Work};
use super::writes::WINDOW;
use crate::described::Described;

/// The approximate bytes that a region takes in a [`Pull`], in addition to its id and key.
const NAMED: usize = 128;

/// Returns the bytes of memory that a described side of a part takes.
fn cost(side: &Described) -> usize {
    side.kept() + side.regions.len() * NAMED
}

impl Machine {
    /// Takes a peer's request to pull a part of a write. Returns `Malformed` to end the connection;
    /// all other errors are sent as an answer.
    pub(crate) fn take_write(
        &mut self,
        at: usize,
        write: u64,
        into: Described,
        from: Described,
    ) -> Result<()> {
        let connection = &mut self.connections[at];
        if connection.pulls >= WINDOW {
            return Err(error(
                ErrorKind::Malformed,
                format!("malformed SHM message: more than {WINDOW} unanswered parts of writes"),
            ));
        }
        match self.check_write(at, write, into, from) {
            Ok(pull) if pull.left > 0 => {
                self.connections[at].pulls += 1;
                self.connections[at].pulls_bytes += pull.cost;
                let left = pull.left;
                match Load::mover(&pull.places, pull.into.iter().map(|(_, memory)| memory)) {
                    Some(mover) => {
                        let (purpose, load) = pull.flight(mover);
                        self.start_flight(at, purpose, load);
                    }
                    None => self.turns.push(Work::Pull(Box::new(pull)), left),
                }
            }
            Ok(_) => {
                self.connections[at].send(&self.poller, Message::Done { write, result: Ok(()) })
            }
            Err(refused) => {
                let result = Err(Refusal::from(&refused));
                self.connections[at].send(&self.poller, Message::Done { write, result });
            }
        }
        Ok(())
    }

    fn check_write(&self, at: usize, write: u64, into: Described, from: Described) -> Result<Pull> {
        let ours = into
            .regions
            .iter()
            .map(|(id, key)| Ok((*id, self.regions.check(*id, key)?)))
            .collect::<Result<Vec<_>>>()?;
        ours.iter().try_for_each(|(_, memory)| memory.check_writable())?;
        into.check(&ours.iter().map(|(_, memory)| memory.len() as u64).collect::<Vec<_>>())?;
        let lent = &self.connections[at].lent;
        let theirs = from
            .regions
            .iter()
            .map(|(id, _)| match lent.get(*id) {
                Some(Ok(held)) => Ok(held),
                Some(Err(unfit)) => Err(unfit.clone()),
                None => Err(error(
                    ErrorKind::Unregistered,
                    format!("region {id} was not lent for this write"),
                )),
            })
            .collect::<Result<Vec<_>>>()?;
        from.check(&theirs.iter().map(|held| held.len).collect::<Vec<_>>())?;
        Ok(Pull {
            at,
            write,
            left: into.bytes(),
            cost: cost(&into) + cost(&from),
            places: theirs.iter().map(|held| held.place.clone()).collect(),
            from: theirs.iter().map(|held| held.id).collect(),
            targets: ours.iter().map(|(_, memory)| memory.address()).collect(),
            into: ours,
            pieces: PullPieces::new(
                Extents::new(from.grids, from.indices),
                Extents::new(into.grids, into.indices),
            ),
        })
    }

    /// Runs one turn of a pull. Returns the number of bytes moved.
    pub(crate) fn pull_turn(&mut self, mut pull: Box<Pull>) -> u64 {
        // SAFETY: `check_write` checked both sides' grids against the lengths of the regions. The
        // pull keeps the local memory, which is host memory and is never lent as slices, and keeps
        // the places mapped (`mover`).
        let turn =
            unsafe { self.copier.turn(&mut pull.pieces, &pull.places, &pull.targets, SLICE) };
        pull.left = pull.left.saturating_sub(turn.moved);
        if turn.finished || pull.left == 0 {
            self.end_pull(*pull, Ok(()));
        } else {
            let left = pull.left;
            self.turns.push(Work::Pull(pull), left);
        }
        turn.moved
    }

    /// Answers a part, and releases its memory.
    fn end_pull(&mut self, pull: Pull, result: Result<()>) {
        let (at, write, cost) = (pull.at, pull.write, pull.cost);
        drop(pull);
        self.forget_pull(at, cost);
        self.answer(at, write, result);
    }

    /// Answers a part.
    pub(crate) fn answer(&mut self, at: usize, write: u64, result: Result<()>) {
        let result = result.map_err(|reason| Refusal::from(&reason));
        let connection = &mut self.connections[at];
        connection.pulls -= 1;
        connection.send(&self.poller, Message::Done { write, result });
    }

    /// Stops counting the memory of a part.
    pub(crate) fn forget_pull(&mut self, at: usize, cost: usize) {
        let connection = &mut self.connections[at];
        connection.pulls_bytes -= cost;
        connection.note_held(&mut self.held).ok(); // cannot fail: it holds less
    }

    /// Removes pulls from the turns and answers them with `reason`.
    pub(crate) fn stop_pulls(&mut self, which: impl Fn(&Pull) -> bool, reason: &Error) {
        let stopped = self.turns.extract(|work| matches!(work, Work::Pull(pull) if which(pull)));
        for work in stopped {
            if let Work::Pull(pull) = work {
                self.end_pull(*pull, Err(reason.clone()));
            }
        }
    }
}
