//! What the fuzz targets call, here and in the crates above: any bytes, no panic, and what was accepted is written as
//! bytes that mean the same.

use std::sync::Arc;

use crate::bound::{BoundPlan, LocalSide, Pair, RemoteSide};
use crate::identity::LinkId;
use crate::metadata::{Metadata, decode_region, encode_region};
use crate::{Identity, Op, Result, Secret, Size};

/// The targets, by the names of their corpora.
pub const TARGETS: &[(&str, fn(&[u8]))] = &[("core_metadata", metadata), ("core_secret", secret)];

/// An agent's metadata, and that of one region.
pub fn metadata(bytes: &[u8]) {
    if let Ok(read) = Metadata::decode(bytes) {
        assert!(
            read.regions
                .iter()
                .flat_map(|region| &region.exports)
                .all(|(at, _)| usize::from(*at) < read.backends.len())
        );
        stable(read.encode(), |bytes| Metadata::decode(bytes)?.encode());
    }
    if let Ok((incarnation, region)) = decode_region(bytes) {
        let owner = Identity { name: "owner".into(), incarnation };
        stable(encode_region(&owner, &region), |bytes| {
            let (incarnation, region) = decode_region(bytes)?;
            encode_region(&Identity { name: "owner".into(), incarnation }, &region)
        });
    }
}

/// What was read was written as these bytes: read and written again they are the same.
fn stable(written: Result<Vec<u8>>, again: impl Fn(&[u8]) -> Result<Vec<u8>>) {
    let written =
        written.unwrap_or_else(|error| panic!("it was read, but cannot be written: {error}"));
    match again(&written) {
        Ok(again) => assert_eq!(written, again),
        Err(error) => panic!("it was read, but not again: {error}"),
    }
}

/// The text of a secret's file: what is accepted is the one form that there is.
pub fn secret(bytes: &[u8]) {
    if let Some(secret) = Secret::parse(bytes) {
        assert_eq!(secret.line().trim_end().as_bytes(), bytes.trim_ascii_end());
    }
}

/// A plan of one pair as a link gets it, for the fuzz targets of transports.
pub fn bound(op: Op, link: LinkId, pair: Pair, local: LocalSide, remote: RemoteSide) -> BoundPlan {
    let blocks = pair.local.len() as u64 * pair.local_indices.len() as u64;
    let bytes =
        pair.local.iter().map(|placed| placed.grid.length * pair.local_indices.len() as u64).sum();
    let size = Size { bytes, blocks, segments: blocks, description: 0 };
    BoundPlan::new(op, size, Arc::from([pair]), link, vec![local], vec![remote])
}

#[cfg(test)]
mod tests {
    #[test]
    fn what_fuzzing_found_is_held() {
        kvx_testkit::replay(super::TARGETS);
    }
}
