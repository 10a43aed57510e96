//! Requests whose blocks are copied to the host before they end.

use std::collections::HashMap;

use kvx_vllm::engine::RequestId;

/// Requests whose blocks are copied to the host before they end. Each has a unique number, and a
/// count of the whole blocks that were ordered.
#[derive(Default)]
pub(super) struct SaveNumbers {
    numbers: HashMap<RequestId, (u64, u32)>,
    last: u64,
}

impl SaveNumbers {
    /// Returns the number of a request, and how many whole blocks were ordered before. Updates the
    /// count to `whole`.
    pub(super) fn number(&mut self, request: &RequestId, whole: u32) -> (u64, u32) {
        if let Some((number, ordered)) = self.numbers.get_mut(request) {
            return (*number, std::mem::replace(ordered, whole.max(*ordered)));
        }
        self.last += 1;
        self.numbers.insert(request.clone(), (self.last, whole));
        (self.last, 0)
    }

    /// Forgets a request and its saved blocks.
    pub(super) fn forget(&mut self, request: &RequestId) {
        self.numbers.remove(request);
    }
}
