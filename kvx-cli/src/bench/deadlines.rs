//! The timeouts of the bench.

use std::time::Duration;

/// The timeout for a link to come up, and a transfer or a shutdown to end.
pub(crate) const DEADLINE: Duration = Duration::from_secs(60);
/// The timeout for a round, or an answer of the target.
pub(crate) const ANSWER_DEADLINE: Duration = Duration::from_secs(120);
