//! The control protocol of kvx's links: what two agents say to each other beside their data.
//!
//! Everything here is pure: no socket, no thread, no clock. The time is passed in, and what is to be done is returned.
//! A transport carries the bytes, moves the data, and asks these parts what to say.
//!
//! * **Refusals.** [`Refusal`]: a kind, by one numbering for all transports, and a sentence that was cleaned of control characters.
//! * **Notifications.** [`NoticesToPeer`] sends as many as the window has room for, and keeps a bounded number of the others.
//!   [`NoticesFromPeer`] keeps those that the agent has no room for, and lets no later one overtake them.
//! * **Silence.** [`Silence`] counts looks at a peer that owes an answer and says nothing.

mod notices;
mod refusal;
mod silence;

pub use notices::{MAX_WAITING_BYTES, NoticesFromPeer, NoticesToPeer, WINDOW};
pub use refusal::Refusal;
pub use silence::{Look, Silence};
