//! The machine as an initiator: links that it opens.

use std::time::Instant;

use kvx_backend::reactor::Outbox;
use kvx_core::backend::{LinkId, LinkState};
use kvx_core::{Error, Result};

use crate::tcp::connections::connection::{Conn, Role};
use crate::tcp::error;
use crate::tcp::machine::{HANDSHAKE, Machine};
use crate::tcp::seal::Seal;
use crate::tcp::socket;

/// The limit for reopening a lane whose owner closed it during the handshake.
const MAX_GREETING_RETRIES: u8 = 20;

impl Machine {
    /// Handles that a lane is up. The small lane opens the others, and the last one completes the
    /// link.
    pub(crate) fn welcome(
        &mut self,
        (link, lane): (LinkId, u8),
        seal: Seal,
        now: Instant,
        out: &mut Outbox,
    ) {
        let Some(peer) = self.peers.get_mut(&link) else { return }; // closed by its user
        peer.lanes_up += 1;
        peer.note_activity(now);
        if peer.is_up() {
            let (address, bulk) = (peer.addresses[peer.address], peer.lanes.len() - 1);
            peer.standing
                .set(format!("TCP to {address}: a small lane and {bulk} bulk lanes; {seal}"));
            out.link(link, LinkState::Up);
            self.links_with_output.push(link);
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
        let Some(peer) = self.peers.get(&link) else { return Ok(()) }; // lost by the previous lane
        let address = peer.addresses[peer.address];
        let socket = socket::connect(address, self.scope.context.peer_timeout)
            .map_err(|errno| error::unreachable(address, errno))?;
        let by = peer.lane_deadline(lane, HANDSHAKE, now);
        let conn = Conn::new(socket, address, Role::Connecting { link, lane }, by);
        let key = self.insert(conn, now)?;
        if let Some(peer) = self.peers.get_mut(&link) {
            peer.lanes[usize::from(lane)] = Some(key);
        }
        Ok(())
    }

    /// Reopens a lane whose owner closed it during the handshake, as an owner does to one of too
    /// many half-open connections. Returns false once the limit is reached.
    pub(crate) fn greet_again(&mut self, link: LinkId, lane: u8, now: Instant) -> bool {
        let Some(peer) =
            self.peers.get_mut(&link).filter(|peer| peer.greeting_retries < MAX_GREETING_RETRIES)
        else {
            return false;
        };
        peer.greeting_retries += 1;
        self.open_lane(link, lane, now).is_ok()
    }

    /// Opens the small lane of a link, at the next address if `failed` is the error of the current
    /// one.
    pub(crate) fn open_link(
        &mut self,
        link: LinkId,
        failed: Option<Error>,
        now: Instant,
        out: &mut Outbox,
    ) {
        let mut failed = failed;
        loop {
            // closed by its user
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
}
