//! The connection from a worker of a prefill to one of a decode that has asked.

use std::sync::Arc;

use kvx_core::{ErrorKind, Result};

use super::super::handshake::link;
use super::super::setup::MOONCAKE;
use super::super::shared::Shared;
use super::route::{WriteRoute, lanes};
use kvx_vllm::engine::mooncake::Target;
use kvx_vllm::engine::{Connection, HandshakeFailure, PeerPlan, WorkerRank};
use kvx_vllm::mapping::{SendMap, Tp};

/// Answers [`MooncakeAction::Connect`](kvx_vllm::engine::mooncake::MooncakeAction::Connect).
pub(in super::super) async fn connect_decode(
    shared: Arc<Shared>,
    rank: WorkerRank,
    connection: Connection,
    target: Arc<Target>,
) {
    let result = match draw_up(&shared, rank, &target).await {
        Ok((plan, route)) => {
            shared.mooncake.add_route(rank, connection, route);
            Ok(plan)
        }
        Err(error) => Err(HandshakeFailure { setup: true, error: error.to_string() }),
    };
    shared.report_mooncake(rank, |worker, now| worker.connected(now, connection, result));
}

async fn draw_up(
    shared: &Shared,
    rank: WorkerRank,
    target: &Target,
) -> Result<(PeerPlan, WriteRoute)> {
    let own = shared.registered(rank).ok_or_else(|| {
        ErrorKind::Invalid
            .because("the prefill has no caches registered: call Rank::register there")
    })?;
    let here = shared.setup.settings.block_size;
    if let Some(there) = target.told.kvx_block_size.filter(|there| *there != here) {
        return Err(ErrorKind::Incompatible.because(format!(
            "blocks of {there} tokens at the decode and {here} at the prefill: a MooncakeConnector \
             names blocks by number, so give both the same block size"
        )));
    }
    let tp = Tp::new(rank.tp, shared.setup.settings.tp_size)?;
    let map = SendMap::new(&own.caches, tp, &target.told)?;
    let plan = PeerPlan::of_sends(&map, own.geometry(), target.rank())?;
    let (peer, foreign) = match &target.told.kvx_metadata {
        Some(metadata) => (link(own.agent.connect(metadata)).await?, false),
        None => {
            let name = match target.told.remote_hostname.contains(':') {
                true => {
                    format!("[{}]:{}", target.told.remote_hostname, target.told.remote_port)
                }
                false => format!("{}:{}", target.told.remote_hostname, target.told.remote_port),
            };
            (link(own.agent.connect_foreign(MOONCAKE, name)).await?, true)
        }
    };
    tracing::info!(
        decode = %target.told.remote_hostname,
        tp = target.told.remote_tp_rank,
        route = %peer.route(),
        "connected to a decode's worker"
    );
    Ok((plan, WriteRoute { peer, foreign, lanes: lanes(&own, &map)? }))
}
