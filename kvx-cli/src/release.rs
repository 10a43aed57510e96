//! Releases the blocks of a fleet's prefills for `kvx proxy`, over kvx's backends.

use kvx::connector::Releaser;
use kvx::{ErrorKind, Secret};
use kvx_proxy::{BlockReleaser, KeptBlocks, ReleaseBlocks, ReleaseError, ReleaseFuture};

use crate::Result;

/// The connections to the prefills of a fleet.
#[derive(Debug)]
struct FleetReleaser(Releaser);

impl ReleaseBlocks for FleetReleaser {
    fn release<'a>(&'a self, blocks: &'a KeptBlocks) -> ReleaseFuture<'a> {
        Box::pin(async move {
            self.0.release(&blocks.remote, blocks.version).await.map_err(|error| {
                match error.kind() {
                    ErrorKind::TimedOut
                    | ErrorKind::PeerLost
                    | ErrorKind::Busy
                    | ErrorKind::Native
                    | ErrorKind::Closed => ReleaseError::Failed(error.to_string()),
                    ErrorKind::NoRoute => ReleaseError::Refused(format!(
                        "{error}; name a backend that the prefill has in `release` (RIXL for a \
                         vLLM over NIXL)"
                    )),
                    _ => ReleaseError::Refused(error.to_string()),
                }
            })
        })
    }
}

/// Returns a releaser over these backends, which it opens at the first release. Returns `None` if
/// there are none.
///
/// # Errors
///
/// A name that no backend has.
pub(crate) fn releaser(
    backends: &[String],
    secret: Option<Secret>,
) -> Result<Option<BlockReleaser>> {
    let registry = kvx::registry();
    for name in backends {
        registry.canonical(name)?;
    }
    let made = || BlockReleaser::new(FleetReleaser(Releaser::new(registry, backends, secret)));
    Ok((!backends.is_empty()).then(made))
}
