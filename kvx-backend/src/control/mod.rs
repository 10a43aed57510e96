//! The control protocol of kvx's links: the messages of two agents beside their data.
//!
//! Everything here is pure: no socket, no thread, no clock. Callers pass in the time, and do what
//! the functions return. A transport carries the bytes, moves the data, and asks these parts what
//! to say. SHM and the machine behind [`Fabric`](crate::fabric::Fabric) speak the whole protocol;
//! TCP has frames and a handshake of its own.
//!
//! * **Handshake.** The initiator says [`Hello`](ControlMessage::Hello): versions, who it is, the
//!   proof that it was invited. The target says [`Welcome`](ControlMessage::Welcome) and proves
//!   itself, and the link is up at the initiator's [`Confirm`](ControlMessage::Confirm); or it says
//!   [`Refuse`](ControlMessage::Refuse), the same to every
//!   unauthenticated peer. See [`Greeting`] and [`verify_hello`].
//! * **Regions.** Before a link first uses a region, its owner is shown number and key
//!   ([`Want`](ControlMessage::Want)), and says [`Grant`](ControlMessage::Grant) or
//!   [`Deny`](ControlMessage::Deny). So a wrong key is refused also where a library's own keys know
//!   nothing of kvx's, and the owner knows whom to ask when it revokes. See [`RegionTable`],
//!   [`GrantedRegions`] and [`ImportedRegions`].
//! * **Revocation.** The owner says [`Recall`](ControlMessage::Recall) to every peer with a
//!   grant of the region; each lets its operations on it end, releases it, and says
//!   [`Released`](ControlMessage::Released). See [`Recalls`].
//! * **Notifications.** [`Notify`](ControlMessage::Notify), answered by
//!   [`Ack`](ControlMessage::Ack) once the peer's agent has it. At most a [`WINDOW`] is unanswered:
//!   a target keeps those that do not fit into its agent's queue, in their order, and never stops
//!   reading. See [`NoticesToPeer`] and [`NoticesFromPeer`].
//! * **Life.** While an answer is awaited, silence is broken by [`Ping`](ControlMessage::Ping),
//!   answered by [`Alive`](ControlMessage::Alive). An idle link is silent. See [`Silence`].
//! * **End.** [`Bye`](ControlMessage::Bye) is the last word of an end that holds nothing of the
//!   other any more. [`Leave`](ControlMessage::Leave) asks an initiator for it: the target's agent
//!   is shutting down. Over a socket its end says both.
//! * **Memory.** What a peer has this end keep is counted over all its links, and bounded. See
//!   [`HeldBytes`].
//!
//! Refusals travel as a [`Refusal`]: a kind, by one numbering for all transports, and a
//! sentence that is cleaned of control characters. [`errors`] holds the sentences that all
//! transports say alike.

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
