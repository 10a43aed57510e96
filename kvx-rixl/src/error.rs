//! Maps NIXL's status codes to kvx's errors.

use kvx_core::{Error, ErrorKind};

use crate::ffi::Status;
use crate::ffi::bindings::{
    NIXL_CAPI_ERROR_BACKEND, NIXL_CAPI_ERROR_EXCEPTION, NIXL_CAPI_ERROR_INVALID_PARAM,
    NIXL_CAPI_ERROR_INVALID_STATE, NIXL_CAPI_ERROR_NO_TELEMETRY, NIXL_CAPI_ERROR_NOT_FOUND,
    NIXL_CAPI_IN_PROG,
};

/// The backend's name.
pub(crate) const NAME: &str = "RIXL";

impl Status {
    fn text(self) -> &'static str {
        match self.code() {
            NIXL_CAPI_IN_PROG => "in progress",
            NIXL_CAPI_ERROR_INVALID_PARAM => "an invalid parameter",
            NIXL_CAPI_ERROR_BACKEND => "an error of its backend",
            NIXL_CAPI_ERROR_INVALID_STATE => "an invalid state",
            NIXL_CAPI_ERROR_EXCEPTION => "an exception",
            NIXL_CAPI_ERROR_NO_TELEMETRY => "no telemetry",
            NIXL_CAPI_ERROR_NOT_FOUND => {
                "not found: no metadata of the agent, or no plugin that serves the request"
            }
            _ => "an unknown error",
        }
    }

    /// Converts the status to an error. NIXL's own message is on standard error, if NIXL_LOG_LEVEL
    /// permits.
    pub(crate) fn error(self, doing: &str) -> Error {
        Error::new(
            ErrorKind::Native,
            format!("NIXL failed in {doing}; its log on standard error may say more"),
        )
        .with_native(i64::from(self.code()), self.text())
    }
}
