//! The machine's side as an initiator: links that come up, go on, and go.

use std::time::Instant;

use kvx_backend::reactor::Outbox;
use kvx_core::backend::{LinkId, LinkState};
use kvx_core::{Error, Result, TransferId};

use crate::tcp::connections::connection::{Conn, Role};
use crate::tcp::error;
use crate::tcp::links::OpenedLink;
use crate::tcp::machine::{HANDSHAKE, Machine};
use crate::tcp::seal::Seal;
use crate::tcp::socket;

/// How often a link is greeted again whose owner hung up.
const GREETED_AGAIN: u8 = 20;

impl Machine {
    /// A lane is up: the small one opens the others, the last one makes the link.
    pub(crate) fn welcome(
        &mut self,
        (link, lane): (LinkId, u8),
        seal: Seal,
        now: Instant,
        out: &mut Outbox,
    ) {
        let Some(peer) = self.peers.get_mut(&link) else { return };
        peer.lanes_up += 1;
        peer.note_activity(now);
        if peer.is_up() {
            let (address, bulk) = (peer.addresses[peer.address], peer.lanes.len() - 1);
            peer.standing
                .set(format!("TCP to {address}: a small lane and {bulk} bulk lanes; {seal}"));
            out.link(link, LinkState::Up);
            self.eager.push(link);
        } else if lane == 0 {
            for lane in 1..peer.lanes.len() {
                if let Err(error) = self.open_lane(link, lane as u8, now) {
                    self.lose(link, error, out);
                    return;
                }
            }
        }
    }

    fn open_lane(&mut self, link: LinkId, lane: u8, now: Instant) -> Result<()> {
        let Some(peer) = self.peers.get(&link) else { return Ok(()) };
        let address = peer.addresses[peer.address];
        let socket = socket::connect(address, self.scope.context.peer_timeout)
            .map_err(|errno| error::unreachable(address, errno))?;
        let by = peer.lane_by(lane, HANDSHAKE, now);
        let conn = Conn::new(socket, address, Role::Connecting { link, lane }, by);
        let key = self.insert(conn, now)?;
        if let Some(peer) = self.peers.get_mut(&link) {
            peer.lanes[usize::from(lane)] = Some(key);
        }
        Ok(())
    }

    /// The other end hung up before it said anything, as it does to the oldest of too many that have proven nothing:
    /// opens the lane once more, some times. Says whether it did.
    pub(crate) fn greet_again(&mut self, link: LinkId, lane: u8, now: Instant) -> bool {
        let Some(peer) =
            self.peers.get_mut(&link).filter(|peer| peer.greeted_again < GREETED_AGAIN)
        else {
            return false;
        };
        peer.greeted_again += 1;
        self.open_lane(link, lane, now).is_ok()
    }

    /// Opens the small lane of a link, at the next address if `failed` says that the current one is no good.
    pub(crate) fn open_link(
        &mut self,
        link: LinkId,
        failed: Option<Error>,
        now: Instant,
        out: &mut Outbox,
    ) {
        let mut failed = failed;
        loop {
            let Some(peer) = self.peers.get_mut(&link) else { return };
            if let Some(error) = failed {
                if peer.address + 1 == peer.addresses.len() {
                    self.lose(link, error, out);
                    return;
                }
                peer.lanes[0] = None;
                tracing::debug!(peer = ?peer.who, %error, "trying the peer's next address");
                peer.address += 1;
            }
            match self.open_lane(link, 0, now) {
                Ok(()) => return,
                Err(error) => failed = Some(error),
            }
        }
    }

    /// Takes a link and its connections out.
    pub(crate) fn disband(&mut self, link: LinkId) -> Option<OpenedLink> {
        let peer = self.peers.remove(&link)?;
        for key in peer.lanes.iter().flatten() {
            self.remove(*key);
        }
        Some(peer)
    }

    pub(crate) fn lose(&mut self, link: LinkId, why: Error, out: &mut Outbox) {
        if let Some(peer) = self.disband(link) {
            tracing::debug!(peer = ?peer.who, error = %why, "a TCP link is lost");
            peer.lost(why, &self.scope.context.deferred, out);
        }
    }

    pub(crate) fn give_up(
        &mut self,
        link: LinkId,
        transfer: TransferId,
        why: Error,
        out: &mut Outbox,
    ) {
        let Some(peer) = self.peers.get_mut(&link) else { return };
        let mut touched = Vec::new();
        peer.give_up(transfer, why, &mut self.conns, &mut self.scope, out, |key| touched.push(key));
        touched.into_iter().for_each(|key| self.touch(key));
    }
}
