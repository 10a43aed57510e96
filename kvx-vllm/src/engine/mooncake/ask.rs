//! The state of what decodes ask.

use std::collections::BTreeSet;

use crate::ids::RequestId;

/// One question of a decode's worker, until all of it is answered.
#[derive(Debug)]
pub(super) struct Ask {
    pub(super) left: BTreeSet<RequestId>,
    /// The layout's name, to be said with each answer.
    pub(super) layout_id: u64,
    /// It hears of what has failed once nothing writes for it any more, if it has heard before.
    pub(super) hears_of_the_end: bool,
    pub(super) form: AnswerForm,
}

/// How a question is answered.
#[derive(Clone, Copy, Debug)]
pub(super) enum AnswerForm {
    /// Request by request.
    Each,
    /// Once, when nothing more is done for any of it, as before vLLM 0.16.
    Older { failed: bool },
}
