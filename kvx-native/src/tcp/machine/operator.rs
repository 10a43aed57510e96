//! Who works on the machine: another operator when a turn of one hangs.

use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use kvx_backend::reactor::{Armed, Outbox, Progress, Queued, Turn};
use kvx_core::Result;
use kvx_core::backend::sync::Mutex;

use crate::tcp::error;
use crate::tcp::machine::turns::let_go;
use crate::tcp::machine::{Command, Machine};

/// A machine, until it ends.
pub(crate) struct Owned {
    pub(crate) machine: Mutex<Option<Machine>>,
    /// The number of the operator that works on it; changed under the machine's lock.
    operator: AtomicU64,
}

/// Works on a machine until one of its turns hangs; then another does. The machine ends with the last of them.
pub(crate) struct Operator {
    owned: Arc<Owned>,
    number: u64,
    fds: [RawFd; 1],
}

impl Operator {
    /// The first.
    pub(crate) fn of(machine: Machine) -> Self {
        let fds = machine.poller.fds();
        let owned = Owned { machine: Mutex::new(Some(machine)), operator: AtomicU64::new(0) };
        Operator { owned: Arc::new(owned), number: 0, fds }
    }

    pub(crate) fn owned(&self) -> &Arc<Owned> {
        &self.owned
    }

    fn is_current(&self) -> bool {
        self.owned.operator.load(Ordering::Acquire) == self.number
    }
}

impl Owned {
    /// Has another operator go on without a turn that hangs: `start` has a thread for it. Says whether there is a
    /// machine.
    pub(crate) fn go_on_without(
        self: &Arc<Self>,
        turn: u64,
        start: impl FnOnce(Operator) -> Result<()>,
    ) -> bool {
        let mut guard = self.machine.lock();
        let Some(machine) = guard.as_mut() else { return false };
        let number = self.operator.load(Ordering::Relaxed) + 1;
        let next = Operator { owned: Arc::clone(self), number, fds: machine.poller.fds() };
        if machine.leave_behind(turn, || start(next)) {
            self.operator.store(number, Ordering::Release);
        }
        true
    }
}

impl Drop for Operator {
    /// Also when a turn panics: the machine goes, whoever else still knows of it.
    fn drop(&mut self) {
        if !self.is_current() {
            return; // also one that was never started, which is dropped under the lock
        }
        let mut machine = self.owned.machine.lock();
        let gone = if self.is_current() { machine.take() } else { None };
        drop(machine);
        drop(gone);
    }
}

impl Progress for Operator {
    type Command = Command;

    fn command(&mut self, command: Command, out: &mut Outbox) {
        match self.owned.machine.lock().as_mut() {
            Some(machine) => {
                machine.lose_left(out);
                machine.command(command, out);
            }
            None => Self::late(command),
        }
    }

    fn progress(&mut self, _: &Queued, out: &mut Outbox) -> Turn {
        let now = Instant::now();
        let mut guard = self.owned.machine.lock();
        let Some(mut machine) = guard.as_mut() else { return Turn::did(0) };
        machine.lose_left(out);
        let mut budget = machine.begin(now, out);
        while let Some(key) = machine.next(&mut budget) {
            let Some(mut away) = machine.send_away(key, now, out) else { continue };
            drop(guard);
            let moved = away.conn.serve(away.share, away.key, &mut away.scope); // where memory is touched
            guard = self.owned.machine.lock();
            let back = match guard.as_mut() {
                Some(machine) => machine.take_back(away, moved, now, out),
                None => Err(away),
            };
            match back {
                Ok(moved) => budget.spend(moved),
                Err(away) => {
                    drop(guard);
                    let_go(&self.owned, away);
                    return Turn::did(1);
                }
            }
            let Some(again) = guard.as_mut() else { return Turn::did(1) };
            machine = again;
        }
        machine.end(&budget, now, out)
    }

    fn arm(&mut self) -> Result<Armed> {
        Ok(self.owned.machine.lock().as_mut().map_or(Armed::Sleep(None), Machine::arm))
    }

    fn fds(&self) -> &[RawFd] {
        &self.fds
    }

    fn stop(&mut self, out: &mut Outbox) {
        if let Some(machine) = self.owned.machine.lock().as_mut() {
            machine.lose_left(out);
            machine.stop(out);
        }
    }

    fn late(command: Command) {
        match command {
            Command::Post { done, .. } | Command::Notify { done, .. } => {
                done.settle(Err(error::closed("the agent")));
            }
            // Nothing reaches the region: all connections are closed, and none is accepted. Of copies that a device has
            // begun the ticket knows by itself.
            Command::Revoke { done, .. } => done.settle(Ok(())),
            Command::Connect(_)
            | Command::Cancel { .. }
            | Command::Close { .. }
            | Command::Staged { .. }
            | Command::Resume => {}
        }
    }
}
