//! Fuzz targets: no bytes from a peer may cause a panic or an access to memory that was not
//! requested.

#[cfg(feature = "shm")]
use crate::shm;
#[cfg(feature = "tcp")]
use crate::tcp;

#[cfg(feature = "tcp")]
pub use crate::tcp::fuzz::by_hand;

use kvx_core::backend::wire::Reader;

use crate::described::{Described, MAX_GRIDS, MAX_INDICES};

/// The targets, with the names of their corpora.
pub const TARGETS: &[(&str, fn(&[u8]))] = &[
    ("described", described),
    #[cfg(feature = "shm")]
    ("shm_messages", shm::fuzz::messages),
    #[cfg(feature = "tcp")]
    ("tcp_frames", tcp::fuzz::frames::frames),
    #[cfg(feature = "tcp")]
    ("tcp_handshake", tcp::fuzz::handshake::handshake),
    #[cfg(feature = "tcp")]
    ("tcp_owner", tcp::fuzz::owner::owner),
    #[cfg(feature = "tcp")]
    ("tcp_initiator", tcp::fuzz::initiator::initiator),
];

/// Decodes blocks that a peer names.
fn described(bytes: &[u8]) {
    let Ok(read) = Described::decode(&mut Reader::new("blocks", bytes)) else { return };
    check(&read);
    let mut written = Vec::new();
    read.encode(&mut written);
    let mut reader = Reader::new("blocks", &written);
    let mut again = Vec::new();
    match Described::decode(&mut reader).and_then(|read| reader.end().map(|()| read)) {
        Ok(read) => read.encode(&mut again),
        Err(error) => panic!("{read:?} was decoded, but not after encoding: {error}"),
    }
    assert_eq!(written, again);
}

/// Checks that decoded blocks are valid without knowledge of the regions, and lie within the
/// lengths for which `check` accepts them.
pub(crate) fn check(read: &Described) {
    assert!(
        (1..=MAX_GRIDS).contains(&read.regions.len())
            && (1..=MAX_GRIDS).contains(&read.grids.len())
    );
    assert!(read.indices.len() <= MAX_INDICES && read.bytes() <= i64::MAX as u64);
    let lengths: Vec<u64> = (1..=read.regions.len() as u64).map(|region| region * 4096).collect();
    let fits = read.check(&lengths).is_ok();
    for placed in read.grids.iter() {
        let len = lengths[placed.region as usize];
        let grid = placed.grid;
        for index in [read.indices.max(), grid.count.checked_sub(1)].into_iter().flatten() {
            assert!(index < grid.count);
            let end =
                grid.stride.checked_mul(index.into()).and_then(|at| at.checked_add(grid.base));
            let end =
                end.and_then(|at| at.checked_add(grid.length)).expect("every block has an end");
            assert!(!fits || end <= len, "a block ends at {end} of {len}");
        }
    }
}

#[cfg(test)]
mod tests {
    kvx_testkit::replay_test!(super::TARGETS);
}
