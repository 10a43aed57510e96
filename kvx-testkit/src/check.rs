//! The result of a clause: it holds, or the failure that was seen.

use std::fmt;
use std::time::Duration;

/// How long a single step of a clause may take before it counts as a hang.
pub(crate) const CUT_OFF: Duration = Duration::from_secs(10);

/// The result of a clause: it holds, or the reason why it does not.
pub type Check = Result<(), Failure>;

/// The reason why a clause does not hold.
#[derive(Clone, Debug)]
pub struct Failure(String);

impl Failure {
    /// Creates a failure with its reason.
    pub fn new(why: impl Into<String>) -> Self {
        Failure(why.into())
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl From<kvx_core::Error> for Failure {
    fn from(error: kvx_core::Error) -> Self {
        Failure(format!("unexpected error {error:?}"))
    }
}

impl From<std::io::Error> for Failure {
    fn from(error: std::io::Error) -> Self {
        Failure(format!("unexpected error {error}"))
    }
}

/// Fails the clause unless the condition holds.
macro_rules! ensure {
    ($condition:expr, $($why:tt)+) => {
        if !$condition {
            return Err($crate::check::Failure::new(format!($($why)+)));
        }
    };
}

/// Fails the clause unless the result is an error of one of these kinds.
macro_rules! ensure_kind {
    ($result:expr, $($kind:ident)|+) => {
        match &$result {
            Err(error) if matches!(error.kind(), $(kvx_core::ErrorKind::$kind)|+) => {}
            Err(error) => return Err($crate::check::Failure::new(format!(
                "{}: expected {:?}, got {:?}",
                stringify!($result),
                [$(kvx_core::ErrorKind::$kind),+],
                error
            ))),
            Ok(_) => return Err($crate::check::Failure::new(format!(
                "{}: expected {:?}, but it succeeded",
                stringify!($result),
                [$(kvx_core::ErrorKind::$kind),+]
            ))),
        }
    };
}

pub(crate) use {ensure, ensure_kind};
