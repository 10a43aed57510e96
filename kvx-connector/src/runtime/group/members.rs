//! Ranks in processes of their own, as the engine's process sees them: how they join, what they
//! send, and how they are lost.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use kvx_core::{ErrorKind, Result};
use tokio::sync::mpsc::Receiver;

use super::super::push;
use super::super::ranks::WorkerKind;
use super::super::shared::Shared;
use super::gathering::Gathering;
use super::registration::{self, settle_gathering};
use super::remote_rank::{RankMessage, RankProcess, RemoteRank, out_of_turn, rank_name};
use kvx_vllm::engine::WorkerRank;
use kvx_vllm::group::{ToHead, ToRank};

/// The longest note, in bytes.
const MAX_NOTE: usize = 1 << 20;

/// The reason for the loss of a rank that was killed.
pub(super) const ENDED: &str = "its process has ended";

/// Assigns a rank to a process.
pub(super) fn seat(
    shared: &Shared,
    rank: WorkerRank,
    newcomer: &RankProcess,
) -> Result<Receiver<RankMessage>> {
    let process = &newcomer.process;
    // The process may have been killed and started again before the end of its connection was
    // noticed.
    let mut has_ended = false;
    with_remote(shared, rank, |remote| has_ended = remote.has_ended());
    if has_ended {
        lose(shared, rank, ENDED, true);
    }
    let mut state = shared.state.lock();
    let why = match state.ranks.get_mut(rank).map(|held| &mut held.worker) {
        Some(WorkerKind::Remote(remote)) => match remote.join(newcomer) {
            Ok(down) => return Ok(down),
            Err(error) if error.kind() == ErrorKind::Closed => return Err(error),
            Err(error) => error.sentence().to_owned(),
        },
        Some(WorkerKind::Nixl(_) | WorkerKind::Mooncake(_)) => format!(
            "{process} joined as {}, which runs in the engine's own process: start each rank once",
            rank_name(rank)
        ),
        None => format!(
            "{process} joined as {}, and the engine was built for {} x {} workers (pipeline x tensor \
             parallel): see ConnectorBuilder::workers",
            rank_name(rank),
            shared.setup.settings.pp_size,
            shared.setup.settings.tp_size
        ),
    };
    // With two processes for one rank it is unclear whose blocks a load would fill. If there is no
    // such rank, that holds for all ranks.
    let twice = state.ranks.remote_at(rank).is_some();
    for (at, remote) in state.ranks.remote_mut() {
        if !twice || at == rank {
            remote.lose(&why, false);
        }
    }
    let failed = settle_gathering(&mut state, Err(ErrorKind::Invalid.because(why.clone())));
    drop(state);
    failed.settle();
    shared.wake_up.notify_one();
    Err(ErrorKind::Invalid.because(why))
}

/// Ends the gathering at its deadline. Ranks that are missing then are lost.
pub(super) fn close_gathering(shared: &Shared) {
    let mut state = shared.state.lock();
    if state.gathering.as_ref().is_none_or(Gathering::is_whole) {
        return;
    }
    let mut first = None;
    for (_, remote) in state.ranks.remote_mut().filter(|(_, remote)| remote.missing().is_some()) {
        remote.lose(
            "it had not joined and registered its caches by the deadline of Connector::group",
            false,
        );
        first = first.or_else(|| remote.missing());
    }
    let Some(first) = first else { return }; // expected race: the last rank has just registered
    let failed = settle_gathering(&mut state, Err(ErrorKind::TimedOut.because(first)));
    drop(state);
    failed.settle();
    shared.wake_up.notify_one();
}

pub(super) fn lose(shared: &Shared, rank: WorkerRank, why: &str, proven: bool) {
    let mut state = shared.state.lock();
    let Some(remote) = state.ranks.remote_at(rank) else {
        debug_assert!(false, "a rank that has joined stays in a process of its own");
        return;
    };
    remote.lose(why, proven);
    let why = remote.missing().unwrap_or_default();
    let failed = settle_gathering(&mut state, Err(ErrorKind::PeerLost.because(why)));
    drop(state);
    failed.settle();
    shared.wake_up.notify_one();
}

/// Handles a message of a rank. Errors: the message is refused. May block if the rank registers or
/// gives back.
pub(super) fn take_message(shared: &Shared, rank: WorkerRank, message: ToHead) -> Result<()> {
    match message {
        ToHead::Pool(blocks) => registration::give_generations(shared, rank, blocks)?,
        ToHead::Registered { metadata, host_copies } => {
            registration::take_registration(shared, rank, &metadata, host_copies)?;
            send(shared, rank, ToRank::Taken, None);
        }
        ToHead::GivesBack => {
            registration::take_back(shared, rank)?;
            send(shared, rank, ToRank::GivenBack, None);
        }
        ToHead::Output(output) => {
            with_remote(shared, rank, |remote| remote.take_report(*output));
            shared.wake_up.notify_one();
        }
        ToHead::Raised(number) => {
            with_remote(shared, rank, |remote| remote.has_raised(number));
            shared.wake_up.notify_one();
        }
        ToHead::Done { number, failed } => {
            with_remote(shared, rank, |remote| remote.has_done(number, failed))
        }
        ToHead::Granted { request, told } => {
            with_remote(shared, rank, |remote| remote.granted(&request, told))
        }
        ToHead::GrantsOfAll(request) => {
            shared.with_state(|state, _| state.grants.want(rank, request))
        }
        ToHead::Alive => {}
        ToHead::Hello { .. } | ToHead::Ended(_) => {
            return Err(out_of_turn());
        }
    }
    Ok(())
}

/// Sends a message to a rank.
pub(super) fn send(shared: &Shared, rank: WorkerRank, message: ToRank, file: Option<OwnedFd>) {
    with_remote(shared, rank, |remote| remote.send(message, file));
}

/// Sends a note of this program to that of a rank.
pub(super) fn note(shared: &Shared, rank: WorkerRank, note: &[u8]) -> Result<()> {
    if note.len() > MAX_NOTE {
        return Err(ErrorKind::Exhausted.because(format!(
            "a note of {} bytes is longer than {MAX_NOTE}: send it in parts",
            note.len()
        )));
    }
    let mut state = shared.state.lock();
    let Some(remote) = state.ranks.remote_at(rank) else {
        return Err(ErrorKind::Invalid
            .because(format!("{} runs in the engine's own process", rank_name(rank))));
    };
    if let Some(why) = remote.missing() {
        return Err(ErrorKind::PeerLost.because(why));
    }
    remote.send(ToRank::Note(note.to_vec()), None);
    Ok(())
}

/// Sends a rank the grants of all ranks for a request.
pub(in crate::runtime) async fn send_grants(
    shared: Arc<Shared>,
    rank: WorkerRank,
    request: kvx_vllm::engine::RequestId,
) {
    let grants = push::grants_of_ranks(&shared, &request).await;
    let told = grants.map_err(|error| error.sentence().to_owned());
    send(&shared, rank, ToRank::Grants { request, told }, None);
}

fn with_remote(shared: &Shared, rank: WorkerRank, change: impl FnOnce(&mut RemoteRank)) {
    // There is none if a process asks for a rank that the engine does not have.
    if let Some(remote) = shared.state.lock().ranks.remote_at(rank) {
        change(remote);
    }
}
