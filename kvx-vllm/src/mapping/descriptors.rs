//! Descriptors as NIXL prepares them: rows of equal blocks, and flat ids that count across the
//! rows.

use kvx_core::{Error, ErrorKind, Result};

use super::geometry::RegionGroup;

/// Equal blocks at equal strides: one row of a strided descriptor list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Row {
    /// The address of the first block.
    pub address: u64,
    /// The bytes of a block.
    pub len: u64,
    /// The number of the device.
    pub device: u64,
    /// The bytes from one block to the next.
    pub stride: u64,
    /// The number of blocks.
    pub count: u64,
}

/// Returns the rows of `blocks` blocks that consist of `parts` adjacent parts of `part_len` bytes
/// each: one row if the parts have an equal stride across blocks, otherwise one row per block.
///
/// # Errors
/// `Invalid` for no blocks or parts, or parts that do not fit into the stride; `OutOfBounds` beyond
/// the address space.
pub fn strided_rows(
    base: u64,
    part_len: u64,
    block_stride: u64,
    blocks: u32,
    parts: u32,
    device: u64,
) -> Result<Vec<Row>> {
    let block_len =
        part_len.checked_mul(u64::from(parts)).filter(|len| *len > 0 && *len <= block_stride);
    if block_len.is_none() || blocks == 0 {
        return Err(Error::new(
            ErrorKind::Invalid,
            format!(
                "{blocks} blocks of {parts} parts of {part_len} bytes, {block_stride} apart: parts must fit into \
                 blocks, and none may be empty"
            ),
        ));
    }
    let end = u64::from(blocks - 1)
        .checked_mul(block_stride)
        .and_then(|last| last.checked_add(block_stride));
    if end.and_then(|end| end.checked_add(base)).is_none() {
        return Err(Error::new(
            ErrorKind::OutOfBounds,
            format!(
                "{blocks} blocks, {block_stride} bytes apart, from {base:#x} end beyond the address space"
            ),
        ));
    }
    let row =
        Row { address: base, len: part_len, device, stride: part_len, count: u64::from(parts) };
    if parts == 1 {
        return Ok(vec![Row { stride: block_stride, count: u64::from(blocks), ..row }]);
    }
    if block_len == Some(block_stride) {
        return Ok(vec![Row { count: u64::from(parts) * u64::from(blocks), ..row }]);
    }
    let of_block = |block| Row { address: base + u64::from(block) * block_stride, ..row };
    Ok((0..blocks).map(of_block).collect())
}

/// A peer's region as this rank reads it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteRegionRow {
    /// The address of the peer's block 0.
    pub base: u64,
    /// The bytes from one block of the peer to the next.
    pub stride: u64,
    /// The peer's number of blocks.
    pub blocks: u32,
    /// The peer's device.
    pub device: u64,
    /// The bytes of a local block.
    pub local_block_len: u64,
    /// The number of the peer's ranks that fill a local block.
    pub sources: u32,
    /// The position of the local heads in the peer's block, in units of the local block's length.
    pub rank_offset: u32,
    /// The number of the peer's blocks in a local block.
    pub ratio: u32,
}

/// Returns the row of a peer's region as this rank reads it.
///
/// # Errors
/// `Invalid` for no blocks or sources, and local blocks that cannot be divided; `OutOfBounds` if
/// the range exceeds the peer's block or the address space.
pub fn remote_row(region: RemoteRegionRow) -> Result<Row> {
    let RemoteRegionRow {
        base,
        stride,
        blocks,
        device,
        local_block_len,
        sources,
        rank_offset,
        ratio,
    } = region;
    let pieces = u64::from(sources).checked_mul(u64::from(ratio)).filter(|pieces| *pieces > 0);
    let Some(pieces) =
        pieces.filter(|pieces| local_block_len % pieces == 0 && local_block_len > 0 && blocks > 0)
    else {
        return Err(Error::new(
            ErrorKind::Invalid,
            format!(
                "{sources} ranks with {ratio} blocks each (of {blocks}) cannot fill a local block of {local_block_len} bytes"
            ),
        ));
    };
    let len = local_block_len / pieces;
    let offset = u64::from(rank_offset).checked_mul(local_block_len / u64::from(ratio));
    let fits = |offset: &u64| {
        let last =
            u64::from(blocks - 1).checked_mul(stride).and_then(|last| last.checked_add(base));
        offset.checked_add(len).is_some_and(|end| {
            end <= stride && last.and_then(|last| last.checked_add(end)).is_some()
        })
    };
    match offset.filter(fits) {
        Some(offset) => {
            Ok(Row { address: base + offset, len, device, stride, count: u64::from(blocks) })
        }
        None => Err(Error::new(
            ErrorKind::OutOfBounds,
            format!(
                "piece {rank_offset} of {len} bytes is outside a peer's block ({blocks} blocks, {stride} \
                 bytes apart, from {base:#x})"
            ),
        )),
    }
}

/// Returns the flat descriptor ids of blocks, group by group, and region by region within a group.
/// If all regions belong to the same group, the blocks of all groups apply to every region.
///
/// # Errors
/// `Invalid` if the lists differ in regions; `OutOfBounds` for a group without blocks and for
/// blocks beyond a region.
pub fn descriptor_ids<B: AsRef<[u32]>>(
    region_blocks: &[u32],
    region_groups: &[RegionGroup],
    blocks_per_group: &[B],
) -> Result<Vec<u64>> {
    if region_blocks.len() != region_groups.len() {
        return Err(Error::new(
            ErrorKind::Invalid,
            format!(
                "{} regions have blocks, but {} have groups",
                region_blocks.len(),
                region_groups.len()
            ),
        ));
    }
    let mut ids = Vec::new();
    if region_groups.windows(2).all(|pair| pair[0] == pair[1]) {
        let all: Vec<u32> =
            blocks_per_group.iter().flat_map(|blocks| blocks.as_ref().iter().copied()).collect();
        add_ids(&mut ids, region_blocks, &all, |_| true)?;
        return Ok(ids);
    }
    for (group, blocks) in blocks_per_group.iter().enumerate() {
        let covers = |region: usize| region_groups[region].covers(group as u32);
        add_ids(&mut ids, region_blocks, blocks.as_ref(), covers)?;
    }
    Ok(ids)
}

fn add_ids(
    ids: &mut Vec<u64>,
    region_blocks: &[u32],
    blocks: &[u32],
    covers: impl Fn(usize) -> bool,
) -> Result<()> {
    let mut first = 0;
    for (region, count) in region_blocks.iter().enumerate() {
        if covers(region) {
            if let Some(beyond) = blocks.iter().find(|block| *block >= count) {
                return Err(Error::new(
                    ErrorKind::OutOfBounds,
                    format!("block {beyond} does not exist: region {region} has {count} blocks"),
                ));
            }
            ids.extend(blocks.iter().map(|block| first + u64::from(*block)));
        }
        first += u64::from(*count);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hostile_rows_are_errors() {
        assert_eq!(strided_rows(0, 64, 63, 1, 1, 0).unwrap_err().kind(), ErrorKind::Invalid);
        assert_eq!(
            strided_rows(0, u64::MAX, u64::MAX, 1, 2, 0).unwrap_err().kind(),
            ErrorKind::Invalid
        );
        assert_eq!(
            strided_rows(u64::MAX, 1, 1, 2, 1, 0).unwrap_err().kind(),
            ErrorKind::OutOfBounds
        );
        assert_eq!(strided_rows(0, 64, 64, 0, 1, 0).unwrap_err().kind(), ErrorKind::Invalid);
        let row = RemoteRegionRow {
            base: 0,
            stride: 200,
            blocks: 7,
            device: 0,
            local_block_len: 100,
            sources: 1,
            rank_offset: 1,
            ratio: 1,
        };
        assert!(remote_row(row).is_ok());
        for wrong in [
            RemoteRegionRow { rank_offset: 2, ..row },
            RemoteRegionRow { rank_offset: u32::MAX, local_block_len: u64::MAX, ..row },
            RemoteRegionRow { sources: 0, ..row },
            RemoteRegionRow { ratio: 0, ..row },
            RemoteRegionRow { blocks: 0, ..row },
            RemoteRegionRow { ratio: 3, ..row },
            RemoteRegionRow { base: u64::MAX - 100, ..row },
            RemoteRegionRow { stride: u64::MAX, blocks: u32::MAX, ..row },
        ] {
            assert!(remote_row(wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn blocks_beyond_a_region_are_errors() {
        let groups = [RegionGroup::Of(0), RegionGroup::Of(1)];
        assert_eq!(descriptor_ids(&[10, 4], &groups, &[&[9][..], &[3]]).unwrap(), [9, 13]);
        assert_eq!(
            descriptor_ids(&[10, 4], &groups, &[&[9][..], &[4]]).unwrap_err().kind(),
            ErrorKind::OutOfBounds
        );
        assert_eq!(descriptor_ids(&[10], &groups, &[[0]]).unwrap_err().kind(), ErrorKind::Invalid);
    }
}
