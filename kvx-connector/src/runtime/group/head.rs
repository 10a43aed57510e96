//! The engine's end: who joins, and what is heard of them.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;

use kvx_config::KvTransferConfig;
use kvx_core::{Completion, Deadline, Error, ErrorKind, Result, Ticket};
use tokio::sync::mpsc::Receiver;
use tokio::time::sleep_until;

use super::super::half::WorkerKind;
use super::super::rank::Rank;
use super::super::register::closed;
use super::super::slot::until;
use super::super::state::{Shared, State};
use super::away::{Away, Down, Newcomer, name, out_of_turn};
use super::serving::{ENDED, RankListener, gather};
use crate::engine::WorkerRank;
use crate::params::TransferMode;
use crate::wire::group::{ToHead, ToRank};

/// Where ranks join their engine.
#[derive(Clone, Debug)]
pub(in crate::runtime) enum JoinAddress {
    /// At a Unix socket.
    Path(PathBuf),
    /// From other hosts too.
    Tcp(SocketAddr),
}

/// Ranks that are to join. The socket goes with it.
pub(in crate::runtime) struct Gathering {
    at: JoinAddress,
    /// Settled when all have come, or one does not.
    ticket: Option<Ticket>,
    /// All have come. Caches that a rank gives back afterwards have no deadline.
    whole: bool,
}

impl Gathering {
    /// Nobody joins any more.
    pub(in crate::runtime) fn end(mut self, why: Error) {
        if let Some(ticket) = self.ticket.take() {
            ticket.settle(Err(why));
        }
    }
}

impl Drop for Gathering {
    fn drop(&mut self) {
        if let JoinAddress::Path(path) = &self.at {
            std::fs::remove_file(path).ok(); // a socket that is left behind is replaced
        }
    }
}

impl Rank {
    /// Whether ranks of an engine with this configuration may be in processes of their own ([`Connector::group`]).
    ///
    /// [`Connector::group`]: crate::runtime::Connector::group
    ///
    /// # Errors
    /// `Unsupported`: all of them have to be in the engine's process.
    pub fn may_join(config: &KvTransferConfig) -> Result<()> {
        let why = match config.connector() {
            Some(kvx_config::ConnectorKind::Mooncake) => {
                "ranks in processes of their own are for NixlConnector and NixlPushConnector: with a \
                 MooncakeConnector register all of them here"
            }
            _ => return Ok(()),
        };
        Err(Error::new(ErrorKind::Unsupported, why))
    }
}

impl Shared {
    pub(in crate::runtime) fn group(
        self: &Arc<Self>,
        at: JoinAddress,
        deadline: Deadline,
    ) -> Completion<()> {
        let (done, ticket) = Completion::with_ticket();
        let opened = self.may_gather().and_then(|()| {
            let _entered = self.runtime.enter();
            RankListener::open(&at, self.secret.as_ref())
        });
        match opened {
            Ok(listener) => {
                let gathering = Gathering { at, ticket: Some(ticket), whole: false };
                if let Err((gathering, error)) = self.await_ranks(gathering) {
                    gathering.end(error);
                    return done;
                }
                self.runtime.spawn(gather(Arc::clone(self), listener));
                let shared = Arc::clone(self);
                self.runtime.spawn(async move {
                    sleep_until(until(deadline).into()).await;
                    shared.close_the_gathering();
                });
            }
            Err(error) => ticket.settle(Err(error)),
        }
        done
    }

    fn may_gather(&self) -> Result<()> {
        Rank::may_join(&self.setup.config)?;
        self.state.lock().may_gather()
    }

    /// All workers without caches are to join. Errors: meanwhile nobody may any more; the gathering comes back.
    fn await_ranks(&self, gathering: Gathering) -> Result<(), (Gathering, Error)> {
        // A registration that is under way is waited for.
        let _side = self.side.lock();
        let mut state = self.state.lock();
        if let Err(error) = state.may_gather() {
            return Err((gathering, error));
        }
        state.gathering = Some(gathering);
        if state.ranks.values().all(|held| held.registered.is_none()) {
            // Caches that were given back say nothing of those that come.
            (state.pool, state.published) = (None, None);
        }
        let pushes = self.setup.settings.mode == TransferMode::Push;
        for (rank, held) in state.ranks.iter_mut().filter(|(_, held)| held.registered.is_none()) {
            held.worker = WorkerKind::Away(Box::new(Away::new(*rank, pushes)));
        }
        Ok(())
    }

    /// A process takes the place of a rank.
    pub(super) fn seat(&self, rank: WorkerRank, newcomer: &Newcomer) -> Result<Receiver<Down>> {
        let process = &newcomer.process;
        // It may have been killed and started again before its connection was seen to end.
        let mut has_ended = false;
        self.with_away(rank, |away| has_ended = away.has_ended());
        if has_ended {
            self.lose(rank, ENDED, true);
        }
        let mut state = self.state.lock();
        let why = match state.ranks.get_mut(&rank).map(|held| &mut held.worker) {
            Some(WorkerKind::Away(away)) => match away.join(newcomer) {
                Ok(down) => return Ok(down),
                Err(error) if error.kind() == ErrorKind::Closed => return Err(error),
                Err(error) => error.sentence().to_owned(),
            },
            Some(WorkerKind::Nixl(_) | WorkerKind::Mooncake(_)) => format!(
                "{process} joined as {}, which the engine's own process is already: start each rank once",
                name(rank)
            ),
            None => format!(
                "{process} joined as {}, and the engine was built for {} x {} workers (pipeline x tensor \
                 parallel): see ConnectorBuilder::workers",
                name(rank),
                self.setup.settings.pp_size,
                self.setup.settings.tp_size
            ),
        };
        // Two processes for one place: whose blocks it would load is in doubt. All are if there is no such place.
        let twice = state.ranks.get(&rank).is_some_and(|held| held.worker.away().is_some());
        for (at, held) in &mut state.ranks {
            if let WorkerKind::Away(away) = &mut held.worker
                && (!twice || *at == rank)
            {
                away.lose(&why, false);
            }
        }
        let failed = state.gathered(Err(Error::new(ErrorKind::Invalid, why.clone())));
        drop(state);
        failed.settle();
        self.wake_up.notify_one();
        Err(Error::new(ErrorKind::Invalid, why))
    }

    /// The deadline has come: who is not there now does not come any more.
    fn close_the_gathering(&self) {
        let mut state = self.state.lock();
        if state.gathering.as_ref().is_none_or(|gathering| gathering.whole) {
            return;
        }
        let mut first = None;
        for held in state.ranks.values_mut() {
            if let WorkerKind::Away(away) = &mut held.worker
                && away.missing().is_some()
            {
                away.lose(
                    "it had not joined and registered its caches at the deadline of Connector::group",
                    false,
                );
                first = first.or_else(|| away.missing());
            }
        }
        let Some(first) = first else { return };
        let failed = state.gathered(Err(Error::new(ErrorKind::TimedOut, first)));
        drop(state);
        failed.settle();
        self.wake_up.notify_one();
    }

    pub(super) fn lose(&self, rank: WorkerRank, why: &str, proven: bool) {
        let mut state = self.state.lock();
        let Some(away) = state.ranks.get_mut(&rank).and_then(|held| held.worker.away_mut()) else {
            return;
        };
        away.lose(why, proven);
        let why = away.missing().unwrap_or_default();
        let failed = state.gathered(Err(Error::new(ErrorKind::PeerLost, why)));
        drop(state);
        failed.settle();
        self.wake_up.notify_one();
    }

    /// Peers find it no more. May block.
    pub(super) fn withdraw_rank(self: &Arc<Self>, rank: WorkerRank) {
        if let Some(side) = &*self.side.lock() {
            side.withdraw(self, rank);
        }
    }

    /// Takes what a rank says. Errors: what it says is refused. May block where the rank registers or gives back.
    pub(super) fn heard(&self, rank: WorkerRank, message: ToHead) -> Result<()> {
        match message {
            ToHead::Pool(blocks) => self.give_words(rank, blocks)?,
            ToHead::Registered { metadata, host_copies } => {
                self.take_registration(rank, &metadata, host_copies)?;
                self.tell_rank(rank, ToRank::Taken, None);
            }
            ToHead::GivesBack => {
                self.take_back(rank)?;
                self.tell_rank(rank, ToRank::GivenBack, None);
            }
            ToHead::Output(output) => {
                self.with_away(rank, |away| away.hear(output));
                self.wake_up.notify_one();
            }
            ToHead::Raised(number) => {
                self.with_away(rank, |away| away.has_raised(number));
                self.wake_up.notify_one();
            }
            ToHead::Done { number, failed } => {
                self.with_away(rank, |away| away.has_done(number, failed))
            }
            ToHead::Granted { request, told } => {
                self.with_away(rank, |away| away.granted(&request, told))
            }
            ToHead::GrantsOfAll(request) => self.want_grants(rank, request),
            ToHead::Alive => {}
            ToHead::Hello { .. } | ToHead::Ended(_) => {
                return Err(out_of_turn());
            }
        }
        Ok(())
    }

    pub(super) fn tell_rank(&self, rank: WorkerRank, message: ToRank, file: Option<OwnedFd>) {
        self.with_away(rank, |away| away.send(message, file));
    }

    fn with_away(&self, rank: WorkerRank, change: impl FnOnce(&mut Away)) {
        if let Some(away) =
            self.state.lock().ranks.get_mut(&rank).and_then(|held| held.worker.away_mut())
        {
            change(away);
        }
    }
}

/// A gathering that has ended, for whoever waits for it.
pub(super) struct Gathered(Option<Ticket>, Result<()>);

impl Gathered {
    pub(super) fn settle(self) {
        if let Some(ticket) = self.0 {
            ticket.settle(self.1);
        }
    }
}

impl State {
    fn may_gather(&self) -> Result<()> {
        let refused = |why: &'static str| Err(Error::new(ErrorKind::Invalid, why));
        if self.is_closing() {
            return Err(closed());
        }
        if self.gathering.is_some() {
            return refused("ranks join this connector already: call Connector::group once");
        }
        if self.ranks.values().all(|held| held.registered.is_some()) {
            return refused("all workers have registered their caches here: none is left to join");
        }
        Ok(())
    }

    pub(super) fn gathered(&mut self, result: Result<()>) -> Gathered {
        let Some(gathering) = &mut self.gathering else { return Gathered(None, result) };
        gathering.whole |= result.is_ok();
        Gathered(gathering.ticket.take(), result)
    }
}
