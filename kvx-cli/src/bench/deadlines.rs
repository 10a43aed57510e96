//! How long the bench waits.

use std::time::Duration;

/// For a link to come up, a transfer or a shutdown to end.
pub(crate) const DEADLINE: Duration = Duration::from_secs(60);
/// For a round, or an answer of the target.
pub(crate) const ANSWER_DEADLINE: Duration = Duration::from_secs(120);
