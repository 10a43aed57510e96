//! Entry points of the fuzz targets, here and in the crates above. They accept any bytes, do not
//! panic, and write what they have accepted as bytes with the same meaning.

use std::sync::Arc;

use crate::bound::{BoundPlan, LocalSide, Pair, RemoteSide};
use crate::identity::LinkId;
use crate::metadata::{Metadata, decode_region, encode_region};
use crate::{Identity, Op, Result, Secret, Size};

/// The targets, by the names of their corpora.
pub const TARGETS: &[(&str, fn(&[u8]))] = &[("core_metadata", metadata), ("core_secret", secret)];

/// Parses the metadata of an agent, and that of one region.
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

/// Checks that the bytes that were written stay the same when they are read and written again.
fn stable(written: Result<Vec<u8>>, again: impl Fn(&[u8]) -> Result<Vec<u8>>) {
    let written =
        written.unwrap_or_else(|error| panic!("it was read, but cannot be written: {error}"));
    match again(&written) {
        Ok(again) => assert_eq!(written, again),
        Err(error) => panic!("it was read, but not again: {error}"),
    }
}

/// Parses the text of a secret's file, and checks that only its canonical form is accepted.
pub fn secret(bytes: &[u8]) {
    if let Some(secret) = Secret::parse(bytes) {
        assert_eq!(secret.line().trim_end().as_bytes(), bytes.trim_ascii_end());
    }
}

/// Creates a bound plan of one pair, for the fuzz targets of transports.
pub fn bound(op: Op, link: LinkId, pair: Pair, local: LocalSide, remote: RemoteSide) -> BoundPlan {
    let blocks = pair.local.len() as u64 * pair.local_indices.len() as u64;
    let bytes =
        pair.local.iter().map(|placed| placed.grid.length * pair.local_indices.len() as u64).sum();
    let size = Size { bytes, blocks, segments: blocks, description: 0 };
    BoundPlan::new(op, size, Arc::from([pair]), link, vec![local], vec![remote])
}

#[cfg(test)]
mod tests {
    kvx_testkit::replay_test!(super::TARGETS);
}
