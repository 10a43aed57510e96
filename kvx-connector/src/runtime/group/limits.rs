//! How long an engine and its ranks wait for each other.

use std::time::Duration;

/// The interval at which a rank reports that it is alive.
pub(super) const PULSE: Duration = Duration::from_secs(1);
/// The time after which a silent rank is lost.
pub(in crate::runtime) const SILENT: Duration = Duration::from_secs(10);
/// The time limit for each step of joining.
pub(in crate::runtime) const PATIENCE: Duration = Duration::from_secs(10);
/// The time limit for a process to authenticate.
pub(super) const IMPATIENCE: Duration = Duration::from_secs(3);
/// The time limit for sending the last message.
pub(super) const LAST_WORD: Duration = Duration::from_secs(1);
