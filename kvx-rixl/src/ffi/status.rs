//! NIXL's status codes, `nixl_capi_status_t`.

#[cfg(test)]
use super::bindings::NIXL_CAPI_ERROR_BACKEND;
use super::bindings::{
    NIXL_CAPI_ERROR_NOT_FOUND, NIXL_CAPI_IN_PROG, NIXL_CAPI_SUCCESS, nixl_status,
};

/// A status other than success.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Status(nixl_status);

/// The state of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    Done,
    InProgress,
    Failed(Status),
}

impl Status {
    #[cfg(test)]
    pub(crate) const BACKEND: Self = Status(NIXL_CAPI_ERROR_BACKEND);
    #[cfg(test)]
    pub(crate) const NOT_FOUND: Self = Status(NIXL_CAPI_ERROR_NOT_FOUND);

    /// Returns `Ok` only for success.
    pub(super) fn check(status: nixl_status) -> Result<(), Status> {
        if status == NIXL_CAPI_SUCCESS { Ok(()) } else { Err(Status(status)) }
    }

    /// Returns whether nothing was done because NIXL does not know the agent. NIXL before 1.5, and
    /// RIXL, do not distinguish that from other errors.
    pub(crate) fn is_not_found(self) -> bool {
        self.0 == NIXL_CAPI_ERROR_NOT_FOUND
    }

    /// Returns NIXL's code.
    pub(crate) fn code(self) -> nixl_status {
        self.0
    }
}

impl State {
    pub(super) fn of(status: nixl_status) -> Self {
        match status {
            NIXL_CAPI_SUCCESS => State::Done,
            NIXL_CAPI_IN_PROG => State::InProgress,
            failed => State::Failed(Status(failed)),
        }
    }
}
