//! The providers of a configuration.

use super::{Provider, dns, etcd, kubernetes};
use crate::error::Result;
use crate::setup::Setup;

/// Returns all providers.
pub(crate) fn all(setup: &Setup) -> Vec<Provider> {
    let mut all = dns::providers(setup);
    all.extend(etcd::provider(setup));
    all.extend(kubernetes::provider(setup));
    all
}

/// Checks that the providers have what they need of this machine.
///
/// # Errors
///
/// Fails if one does not; the message says what to set.
pub(crate) fn check(setup: &Setup) -> Result<()> {
    setup.discovery.kubernetes.as_ref().map_or(Ok(()), kubernetes::check)
}
