//! The descriptor lists that vLLM would prepare for the lanes of a map: rows of equal blocks, and
//! flat ids that count across the rows.

use kvx_vllm::mapping::{Geometry, Pairing, RegionGrid, Source};

/// Equal blocks at equal strides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Row {
    pub(crate) address: u64,
    pub(crate) len: u64,
    pub(crate) device: u64,
    pub(crate) stride: u64,
    pub(crate) count: u64,
}

impl Row {
    fn of(side: RegionGrid, geometry: &Geometry) -> Self {
        let RegionGrid { region, grid } = side;
        Row {
            address: geometry.regions()[region as usize].base + grid.base,
            len: grid.length,
            device: geometry.device(),
            stride: grid.stride,
            count: grid.count.into(),
        }
    }
}

/// Returns the rows of a rank's own memory.
pub(crate) fn local_rows(source: &Source, own: &Geometry) -> Vec<Row> {
    source.lanes().iter().map(|lane| Row::of(lane.local, own)).collect()
}

/// Returns the rows of the peer's memory.
pub(crate) fn remote_rows(source: &Source, theirs: &Geometry) -> Vec<Row> {
    source.lanes().iter().map(|lane| Row::of(lane.remote, theirs)).collect()
}

/// Returns the ids of a pairing's blocks on both sides, row by row.
pub(crate) fn descriptor_ids(source: &Source, pairing: &Pairing) -> (Vec<u64>, Vec<u64>) {
    let start = |side: RegionGrid| (side.region, side.grid.base);
    let starts = |(local, remote)| (start(local), start(remote));
    let moved: Vec<_> = source.grids(pairing.set).map(starts).collect();
    let (mut here, mut there) = (Vec::new(), Vec::new());
    let (mut local, mut remote) = (0, 0);
    for lane in source.lanes() {
        if moved.contains(&starts((lane.local, lane.remote))) {
            let places = 0..pairing.local.len();
            here.extend(places.clone().map(|at| local + u64::from(pairing.local.at(at))));
            there.extend(places.map(|at| remote + u64::from(pairing.remote.at(at))));
        }
        local += u64::from(lane.local.grid.count);
        remote += u64::from(lane.remote.grid.count);
    }
    (here, there)
}
