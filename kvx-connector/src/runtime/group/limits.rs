//! How long an engine and its ranks wait for each other.

use std::time::Duration;

/// A rank reports this often that it is alive.
pub(super) const PULSE: Duration = Duration::from_secs(1);
/// A rank that has sent nothing for this long is lost.
pub(in crate::runtime) const SILENT: Duration = Duration::from_secs(10);
/// The limit of a step of joining.
pub(in crate::runtime) const PATIENCE: Duration = Duration::from_secs(10);
/// The same for a process that has not authenticated yet.
pub(super) const IMPATIENCE: Duration = Duration::from_secs(3);
/// The limit of sending the last message.
pub(super) const LAST_WORD: Duration = Duration::from_secs(1);
