//! The state of pulls from decodes.

use std::collections::BTreeSet;

use crate::ids::RequestId;

/// A pull from a decode worker, until all its requests are answered.
#[derive(Debug)]
pub(super) struct Ask {
    pub(super) left: BTreeSet<RequestId>,
    /// The layout's name, which each answer repeats.
    pub(super) layout_id: u64,
    /// True if the decode expects a second report of a failed request once its writes have ended.
    pub(super) hears_of_the_end: bool,
    pub(super) form: AnswerForm,
}

/// The form of the answers to a pull.
#[derive(Clone, Copy, Debug)]
pub(super) enum AnswerForm {
    /// One answer per request.
    Each,
    /// One answer when all requests have ended, as before vLLM 0.16.
    Older { failed: bool },
}
