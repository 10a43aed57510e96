//! Requests of which blocks are copied to the host before they end.

use std::collections::HashMap;

use kvx_vllm::engine::RequestId;

/// Requests of which blocks were saved before they end, each under a number that no other ever has,
/// with how many whole blocks were ordered.
#[derive(Default)]
pub(super) struct SaveNumbers {
    numbers: HashMap<RequestId, (u64, u32)>,
    last: u64,
}

impl SaveNumbers {
    /// The number of a request, and how many whole blocks were ordered before, of which there are
    /// so many now.
    pub(super) fn number(&mut self, request: &RequestId, whole: u32) -> (u64, u32) {
        if let Some((number, ordered)) = self.numbers.get_mut(request) {
            return (*number, std::mem::replace(ordered, whole.max(*ordered)));
        }
        self.last += 1;
        self.numbers.insert(request.clone(), (self.last, whole));
        (self.last, 0)
    }

    /// What was saved of it counts no more.
    pub(super) fn forget(&mut self, request: &RequestId) {
        self.numbers.remove(request);
    }
}
