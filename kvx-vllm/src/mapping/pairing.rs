//! Finds the region of a peer that holds the layers of a local region.

use std::collections::HashMap;

use kvx_core::{ErrorKind, Result};

use super::geometry::{Geometry, shown};

/// The part of a peer's region that pairs with a local region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Match {
    /// The position in the list of pipeline stages.
    pub(super) stage: usize,
    /// The peer's region.
    pub(super) region: usize,
    /// The start of the layer in the peer's blocks.
    pub(super) offset: u64,
    /// The bytes of the layer in a block of the peer.
    pub(super) len: u64,
}

/// Returns the match of each local region, or `None` if the peer's stages do not hold it and `all`
/// is false.
///
/// Pairs by layer names if both sides name their layers, otherwise by position.
///
/// # Errors
/// `Incompatible` for layers that are missing, too many, in several regions or in another group.
pub(super) fn pair_regions(
    local: &Geometry,
    stages: &[&Geometry],
    all: bool,
) -> Result<Vec<Option<Match>>> {
    let named =
        |geometry: &Geometry| geometry.regions().iter().all(|region| !region.layers.is_empty());
    let matches = if named(local) && stages.iter().all(|stage| named(stage)) {
        by_name(local, stages, all)?
    } else {
        by_position(local, stages)?
    };
    for (at, found) in matches.iter().enumerate() {
        let Some(found) = found else { continue };
        let (ours, theirs) =
            (local.regions()[at].group, stages[found.stage].regions()[found.region].group);
        if !stages[found.stage].names_no_groups() && ours != theirs {
            return Err(ErrorKind::Incompatible.because(format!(
                "region {at} belongs to KV cache group {} here and {} at the peer",
                ours.to_wire(),
                theirs.to_wire()
            )));
        }
    }
    Ok(matches)
}

fn by_position(local: &Geometry, stages: &[&Geometry]) -> Result<Vec<Option<Match>>> {
    let [stage] = stages else {
        return Err(ErrorKind::Incompatible.because(format!(
            "{} pipeline stages have no layer names to pair regions by",
            stages.len()
        )));
    };
    if stage.regions().len() != local.regions().len() {
        return Err(ErrorKind::Incompatible.because(format!(
            "{} regions here and {} at the peer: both sides need the same layers",
            local.regions().len(),
            stage.regions().len()
        )));
    }
    let whole = |(region, found): (usize, &super::KvRegion)| {
        Some(Match { stage: 0, region, offset: 0, len: found.block_len })
    };
    Ok(stage.regions().iter().enumerate().map(whole).collect())
}

fn by_name(local: &Geometry, stages: &[&Geometry], all: bool) -> Result<Vec<Option<Match>>> {
    // A layer with separate K and V has two regions, in the same order on both sides.
    let mut offered: HashMap<&str, Vec<(usize, usize)>> = HashMap::new();
    for (stage, geometry) in stages.iter().enumerate() {
        for (region, found) in geometry.regions().iter().enumerate() {
            for layer in &found.layers {
                offered.entry(layer).or_default().push((stage, region));
            }
        }
    }
    let mut taken: HashMap<&str, usize> = HashMap::new();
    let mut matches = Vec::with_capacity(local.regions().len());
    for region in local.regions() {
        let mut found = None;
        for layer in &region.layers {
            let count = taken.entry(layer).or_default();
            let place = offered.get(&**layer).and_then(|places| places.get(*count)).copied();
            *count += 1;
            let place = place.map(|place| (place, layer));
            match (found, place) {
                (None, place) => found = Some(place),
                (Some(Some((before, _))), Some((now, _))) if before == now => {}
                (Some(None), None) => {}
                _ => {
                    return Err(ErrorKind::Incompatible.because(format!(
                        "layer {} shares a region with others here, but not at the peer",
                        shown(layer)
                    )));
                }
            }
        }
        let Some(Some(((stage, position), layer))) = found else {
            if all {
                return Err(ErrorKind::Incompatible.because(format!(
                    "layer {} is missing at the peer",
                    region.layers.first().map_or_else(String::new, |layer| shown(layer))
                )));
            }
            matches.push(None);
            continue;
        };
        let theirs = &stages[stage].regions()[position];
        let packed =
            theirs.packed.iter().find(|(name, ..)| name == layer && region.layers.len() == 1);
        let (offset, len) =
            packed.map_or((0, theirs.block_len), |(_, offset, len)| (*offset, *len));
        matches.push(Some(Match { stage, region: position, offset, len }));
    }
    for (layer, places) in &offered {
        let wanted = taken.get(layer).copied().unwrap_or(0);
        if wanted != places.len() && (all || wanted > 0) {
            return Err(ErrorKind::Incompatible.because(format!(
                "layer {} is in {} regions at the peer but in {wanted} here",
                shown(layer),
                places.len()
            )));
        }
    }
    Ok(matches)
}
