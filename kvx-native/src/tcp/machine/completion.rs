//! The end of requests, transfers and links, as connections report it.

use std::time::Instant;

use kvx_backend::reactor::Outbox;
use kvx_core::backend::{LinkId, LinkState, Ticket};
use kvx_core::{Error, ErrorKind, Result, TransferId};

use crate::tcp::connections::connection::{Conn, Role};
use crate::tcp::connections::lane::{Effect, Scope};
use crate::tcp::connections::table::Conns;
use crate::tcp::error;
use crate::tcp::frames::put_cancel;
use crate::tcp::links::{OpenedLink, UnsettledTransfer};
use crate::tcp::machine::Machine;
use crate::tcp::memory::deferred::DeferredCompletions;

impl Machine {
    /// Applies the effects that connections have reported. A link may have been lost since the
    /// report, by another of its connections or by its user; its operations have failed already.
    pub(crate) fn apply_effects(&mut self, now: Instant, out: &mut Outbox) {
        let mut effects = std::mem::take(&mut self.scope.effects);
        for effect in effects.drain(..) {
            match effect {
                Effect::Welcome { link, lane, seal } => self.welcome((link, lane), seal, now, out),
                Effect::Restarted { link } => {
                    let Some(peer) = self.peers.get(&link) else { continue };
                    let why = ErrorKind::PeerRestarted.because(format!(
                        "agent {} does not recognise this metadata: it was restarted; connect with \
                         its new metadata",
                        peer.who.name
                    ));
                    if peer.lanes_up == 0 && peer.address + 1 < peer.addresses.len() {
                        self.open_link(link, Some(why), now, out);
                        continue;
                    }
                    let Some(mut peer) = self.disband(link) else { continue };
                    peer.fail(&error::of_peer(why, &peer.who), &self.scope.context.deferred, out);
                    out.link(link, LinkState::Restarted);
                }
                Effect::Ended { link, transfer, result } => {
                    let Some(peer) = self.peers.get_mut(&link) else { continue };
                    if let Some(transfer) = transfer
                        && peer.ended(transfer, &result, out)
                        && let Err(error) = result
                    {
                        self.give_up(link, transfer, error, out);
                    }
                    self.links_with_output.push(link);
                }
                Effect::Failed { link, transfer, why } => {
                    self.give_up(link, transfer, why, out);
                    self.links_with_output.push(link);
                }
                Effect::Acked { link, id } => {
                    let Some(peer) = self.peers.get_mut(&link) else { continue };
                    match peer.acknowledged(id, out) {
                        Ok(()) => self.links_with_output.push(link),
                        Err(error) => self.lose(link, error, out),
                    }
                }
                Effect::Entered { key } => self.entered(key, now, out),
                Effect::Cancelled { link, lane, id } => self.cancelled(link, lane, id, now, out),
            }
        }
        self.scope.effects = effects;
    }

    /// Continues streams whose device has copied, and settles the tickets that waited for that.
    /// Returns the number of streams.
    pub(crate) fn wake_streams(&mut self, now: Instant, out: &mut Outbox) -> usize {
        let mut woken = std::mem::take(&mut self.woken);
        let count = woken.len();
        for token in woken.drain(..) {
            let (settled, answer) = self.scope.context.deferred.look(token);
            settled.into_iter().for_each(|(ticket, result)| out.settle(ticket, result));
            if let Some(answer) = answer {
                self.answer(&answer);
            }
            let key = DeferredCompletions::key(token);
            if let Some(conn) = self.conns.get_mut(key) {
                conn.woken(token, now, &mut self.scope);
                self.queue_if_ready(key);
            }
        }
        self.woken = woken;
        self.apply_effects(now, out);
        count
    }

    /// Removes a link and its connections.
    pub(crate) fn disband(&mut self, link: LinkId) -> Option<OpenedLink> {
        let peer = self.peers.remove(&link)?;
        for key in peer.lanes.iter().flatten() {
            self.remove(*key);
        }
        Some(peer)
    }

    /// Ends a link that is unusable, and reports that.
    pub(crate) fn lose(&mut self, link: LinkId, why: Error, out: &mut Outbox) {
        if let Some(peer) = self.disband(link) {
            tracing::debug!(peer = ?peer.who, error = %why, "a TCP link is lost");
            peer.lost(why, &self.scope.context.deferred, out);
        }
    }

    /// Ends a transfer at once, unless it has ended with its link.
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
        touched.into_iter().for_each(|key| self.queue_if_ready(key));
    }
}

impl OpenedLink {
    /// Takes the acknowledgement of a notification.
    pub(crate) fn acknowledged(&mut self, id: u64, out: &mut Outbox) -> Result<()> {
        out.settle(self.notices.acknowledge(id)?, Ok(()));
        Ok(())
    }

    /// Records that a request of a transfer has ended. Returns true if that fails the transfer, so
    /// that the caller must give it up.
    pub(crate) fn ended(&mut self, id: TransferId, result: &Result<()>, out: &mut Outbox) -> bool {
        // given up meanwhile
        let Some(transfer) = self.transfers.get_mut(&id) else { return false };
        transfer.out -= 1;
        if result.is_err() {
            return true;
        }
        if transfer.out == 0
            && transfer.next == transfer.parts.len()
            && let Some(transfer) = self.transfers.remove(&id)
        {
            out.settle(transfer.done, Ok(()));
        }
        false
    }

    /// Ends a transfer at once. Its memory is not touched afterwards, except by copies that a
    /// device has begun; it settles after them. Calls `touched` like `issue`.
    pub(crate) fn give_up(
        &mut self,
        id: TransferId,
        why: Error,
        conns: &mut Conns,
        scope: &mut Scope,
        out: &mut Outbox,
        mut touched: impl FnMut(usize),
    ) {
        let Some(transfer) = self.transfers.remove(&id) else { return }; // it has just ended
        for queue in [&mut self.small, &mut self.bulk] {
            if queue.len() > 2 * self.transfers.len() + 64 {
                queue.retain(|id| self.transfers.contains_key(id));
            }
        }
        if transfer.out > 0 {
            let mut cancelled = Vec::new();
            for key in self.lanes.iter().flatten().copied() {
                let Conn { role, input, output, .. } = &mut conns[key];
                if let Role::Requests(lane) = role {
                    let number = lane.number;
                    lane.give_up(id, input, output, scope, |id| cancelled.push((id, number)));
                    touched(key);
                }
            }
            if let Some(key) = self.lanes[0] {
                cancelled
                    .iter()
                    .for_each(|(id, lane)| put_cancel(&mut conns[key].output.control, *id, *lane));
                touched(key);
            }
        }
        drop((transfer.plan, transfer.parts));
        self.settle(
            id,
            transfer.done,
            error::of_peer(why, &self.who),
            &scope.context.deferred,
            out,
        );
    }

    /// Fails a transfer when no device or turn touches its memory any more.
    fn settle(
        &self,
        id: TransferId,
        done: Ticket,
        why: Error,
        deferred: &DeferredCompletions,
        out: &mut Outbox,
    ) {
        if let Some((done, result)) =
            deferred.hold(|concern| concern.is_of(self.id, id), done, Err(why))
        {
            out.settle(done, result);
        }
    }

    /// Fails all operations, after its connections have ended.
    pub(crate) fn fail(&mut self, why: &Error, deferred: &DeferredCompletions, out: &mut Outbox) {
        for (id, UnsettledTransfer { plan, done, .. }) in std::mem::take(&mut self.transfers) {
            drop(plan);
            self.settle(id, done, why.clone(), deferred, out);
        }
        for done in self.notices.end() {
            out.settle(done, Err(why.clone()));
        }
    }

    /// Fails all operations of a lost link and reports the loss.
    pub(crate) fn lost(mut self, why: Error, deferred: &DeferredCompletions, out: &mut Outbox) {
        let why = error::of_peer(why, &self.who);
        self.fail(&why, deferred, out);
        out.link(self.id, LinkState::Lost(why));
    }
}
