//! `nixl_capi_status_t`.

use kvx_core::{Error, Kind};

use super::bindings::{
    NIXL_CAPI_ERROR_BACKEND, NIXL_CAPI_ERROR_EXCEPTION, NIXL_CAPI_ERROR_INVALID_PARAM,
    NIXL_CAPI_ERROR_INVALID_STATE, NIXL_CAPI_ERROR_NO_TELEMETRY, NIXL_CAPI_ERROR_NOT_FOUND,
    NIXL_CAPI_IN_PROG, NIXL_CAPI_SUCCESS, nixl_status,
};

/// What a call answered, other than success.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Status(nixl_status);

/// Where a transfer stands.
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

    /// `Ok` for success alone.
    pub(super) fn check(status: nixl_status) -> Result<(), Status> {
        if status == NIXL_CAPI_SUCCESS { Ok(()) } else { Err(Status(status)) }
    }

    /// Whether nothing was done, because NIXL knows no such agent. NIXL before 1.5, and RIXL, do not tell it from other errors.
    pub(crate) fn is_not_found(self) -> bool {
        self.0 == NIXL_CAPI_ERROR_NOT_FOUND
    }

    fn text(self) -> &'static str {
        match self.0 {
            NIXL_CAPI_IN_PROG => "in progress",
            NIXL_CAPI_ERROR_INVALID_PARAM => "an invalid parameter",
            NIXL_CAPI_ERROR_BACKEND => "an error that its C interface does not name",
            NIXL_CAPI_ERROR_INVALID_STATE => "an invalid state",
            NIXL_CAPI_ERROR_EXCEPTION => "an exception",
            NIXL_CAPI_ERROR_NO_TELEMETRY => "no telemetry",
            NIXL_CAPI_ERROR_NOT_FOUND => {
                "not found: no metadata of the agent, or no plugin that serves the request"
            }
            _ => "an error that kvx has no name for",
        }
    }

    /// As an error. NIXL's own words are on standard error, if NIXL_LOG_LEVEL lets them.
    pub(crate) fn error(self, doing: &str) -> Error {
        Error::new(Kind::Native, format!("NIXL failed in {doing}; its log on standard error may say more"))
            .native(i64::from(self.0), self.text())
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
