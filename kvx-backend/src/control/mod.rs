//! The control protocol of kvx's links: the messages that two agents exchange in addition to data.
//!
//! Everything here is sans-IO: no sockets, threads or clocks. Callers pass in the time and carry
//! out what the functions return. A transport carries the bytes, moves the data, and asks these
//! types what to send. SHM and the machine behind [`Fabric`](crate::fabric::Fabric) speak the whole
//! protocol; TCP has its own frames and handshake.
//!
//! * **Handshake.** The initiator sends [`Hello`](ControlMessage::Hello): versions, its identity,
//!   and the proof that it was invited. The target proves itself with
//!   [`Welcome`](ControlMessage::Welcome), and the initiator's [`Confirm`](ControlMessage::Confirm)
//!   brings the link up; or the target sends [`Refuse`](ControlMessage::Refuse), with the same
//!   content to every unauthenticated peer. See [`Greeting`] and [`verify_hello`].
//! * **Regions.** Before a link first uses a region, it shows the region's id and key to the owner
//!   ([`Want`](ControlMessage::Want)), which answers [`Grant`](ControlMessage::Grant) or
//!   [`Deny`](ControlMessage::Deny). The owner thus rejects a wrong key even if the library's own
//!   keys are independent of kvx's, and knows which peers to notify when it revokes the region. See
//!   [`RegionTable`], [`GrantedRegions`] and [`ImportedRegions`].
//! * **Revocation.** The owner sends [`Recall`](ControlMessage::Recall) to every peer that holds
//!   the region. Each waits for its operations on the region to end, releases it, and answers
//!   [`Released`](ControlMessage::Released). See [`Recalls`].
//! * **Notifications.** The target answers [`Notify`](ControlMessage::Notify) with
//!   [`Ack`](ControlMessage::Ack) once its agent has the notification. At most a [`WINDOW`] is
//!   unanswered. A target keeps those that do not fit into its agent's queue, in order, and never
//!   stops reading. See [`NoticesToPeer`] and [`NoticesFromPeer`].
//! * **Liveness.** An end that waits for an answer breaks a silence with
//!   [`Ping`](ControlMessage::Ping); the answer is [`Alive`](ControlMessage::Alive). An idle link
//!   is silent. See [`Silence`].
//! * **End.** [`Bye`](ControlMessage::Bye) is the last message of an end that no longer holds
//!   anything of the other. With [`Leave`](ControlMessage::Leave) a target whose agent is shutting
//!   down asks the initiator for it. Over a socket, closing the socket means both.
//! * **Memory.** This end counts the memory that it keeps for a peer over all the peer's links, and
//!   bounds it. See [`HeldBytes`].
//!
//! Refusals travel as a [`Refusal`]: a kind, with one numbering for all transports, and a sentence
//! without control characters. [`errors`] holds the sentences that all transports share.

pub mod errors;
mod grants;
mod held;
mod hello;
mod messages;
mod notices;
pub mod proof;
mod refusal;
mod silence;
#[cfg(test)]
mod tests;
#[cfg(any(test, feature = "attacker-for-tests"))]
pub mod violations;

pub use grants::{GrantedRegions, ImportState, ImportedRegions, Recalls, RegionTable};
pub use held::{ENTRY_OVERHEAD, HeldBytes};
pub use hello::{Greeting, Rejection, VERSIONS, VerifiedHello, WelcomeDraft, verify_hello};
pub use messages::{ControlMessage, FIRST_TRANSPORT_NUMBER, MAX_MESSAGE};
pub use notices::{NoticesFromPeer, NoticesToPeer, WINDOW};
pub use refusal::Refusal;
pub use silence::{Silence, SilenceStatus};
