//! Blocks on the wire: regions with their keys, grids, and an index list. Never addresses.

use std::ops::Range;
use std::sync::Arc;

use kvx_core::backend::wire::{Reader, Writer};
use kvx_core::backend::{BoundPlan, Pair, PlacedGrid, RegionKey};
use kvx_core::{ErrorKind, Grid, Indices, RegionId, Result};

/// The limit for grids in one request.
pub(crate) const MAX_GRIDS: usize = 1024;
/// The limit for indices in one request.
pub(crate) const MAX_INDICES: usize = 256 << 10;
/// The largest number of bytes that [`Described::encode`] produces.
#[cfg_attr(not(feature = "tcp"), allow(dead_code, reason = "SHM cuts its own, smaller parts"))]
pub(crate) const MAX_BYTES: usize = MAX_GRIDS * (24 + 32) + MAX_INDICES * 4 + 32;

/// A part of a pair that fits into one request. A transfer has as many parts as it needs, without a
/// limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    pub(crate) pair: usize,
    pub(crate) grids: Range<usize>,
    pub(crate) indices: Range<usize>,
}

/// Cuts the pairs of a plan into parts of at most `max_bytes` of data each, but at least one block.
/// `joins` returns whether a grid of a pair may share a part with the grid before it.
#[cfg_attr(not(feature = "tcp"), allow(dead_code, reason = "SHM cuts its own, smaller parts"))]
pub(crate) fn parts(
    pairs: &[Pair],
    max_bytes: u64,
    joins: impl Fn(&Pair, usize) -> bool,
) -> Vec<Part> {
    let mut parts = Vec::new();
    for (number, pair) in pairs.iter().enumerate() {
        let count = pair.local_indices.len();
        if count == 0 {
            continue;
        }
        let mut grids = 0..0;
        while grids.end < pair.local.len() {
            let most = pair.local.len().min(grids.end + MAX_GRIDS);
            let end = (grids.end + 1..most).find(|grid| !joins(pair, *grid)).unwrap_or(most);
            grids = grids.end..end;
            let row: u64 = pair.local[grids.clone()].iter().map(|placed| placed.grid.length).sum();
            let step = usize::try_from(max_bytes / row).unwrap_or(usize::MAX).clamp(1, MAX_INDICES);
            for from in (0..count).step_by(step) {
                parts.push(Part {
                    pair: number,
                    grids: grids.clone(),
                    indices: from..count.min(from.saturating_add(step)),
                });
            }
        }
    }
    parts
}

/// A side of a bound plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    #[cfg_attr(not(feature = "shm"), allow(dead_code))]
    // TCP never sends the local side
    Local,
    Remote,
}

/// The description of one side of a [`Part`].
#[derive(Clone, Debug)]
pub(crate) struct Described {
    /// The regions, and the keys that the sender shows for them.
    pub(crate) regions: Vec<(RegionId, RegionKey)>,
    /// The grids on those regions; `region` is an index into `regions`.
    pub(crate) grids: Arc<[PlacedGrid]>,
    /// The indices of blocks, each below the count of every grid.
    pub(crate) indices: Indices,
}

impl Described {
    /// Describes one side of a part of a bound plan. Local regions have no key on this side, so
    /// `key` supplies the one to show.
    pub(crate) fn of(
        bound: &BoundPlan,
        part: &Part,
        side: Side,
        key: impl Fn(u32) -> (RegionId, RegionKey),
    ) -> Self {
        let pair = &bound.pairs()[part.pair];
        let (grids, indices) = match side {
            Side::Local => (&pair.local, &pair.local_indices),
            Side::Remote => (&pair.remote, &pair.remote_indices),
        };
        let mut order: Vec<u32> = Vec::new();
        let grids = grids[part.grids.clone()]
            .iter()
            .map(|placed| {
                let known = order.iter().position(|region| *region == placed.region);
                let region = known.unwrap_or_else(|| {
                    order.push(placed.region);
                    order.len() - 1
                });
                PlacedGrid { region: region as u32, grid: placed.grid }
            })
            .collect();
        Described {
            regions: order.into_iter().map(key).collect(),
            grids,
            indices: indices.slice(part.indices.clone()),
        }
    }

    /// Returns the number of bytes of data in its blocks.
    pub(crate) fn bytes(&self) -> u64 {
        self.grids.iter().map(|placed| placed.grid.length * self.indices.len() as u64).sum()
    }

    /// Returns the bytes of memory that the description takes.
    #[cfg_attr(not(feature = "shm"), allow(dead_code, reason = "TCP counts the bytes on the wire"))]
    pub(crate) fn kept(&self) -> usize {
        let list = self.indices.as_list().map_or(0, size_of_val);
        size_of_val(&*self.regions) + size_of_val(&*self.grids) + list
    }

    /// Appends the encoded description to a message.
    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        out.put_u16(self.regions.len() as u16);
        for (id, key) in &self.regions {
            out.put_region(*id, key);
        }
        out.put_u16(self.grids.len() as u16);
        for placed in self.grids.iter() {
            out.put_u32(placed.region);
            out.put_u64(placed.grid.base);
            out.put_u64(placed.grid.stride);
            out.put_u64(placed.grid.length);
            out.put_u32(placed.grid.count);
        }
        match (self.indices.as_range(), self.indices.as_list()) {
            (Some(range), _) => {
                out.put_u8(0);
                out.put_u32(range.start);
                out.put_u32(range.len() as u32);
            }
            (None, list) => {
                let list = list.unwrap_or(&[]);
                out.put_u8(1);
                out.put_u32(list.len() as u32);
                out.reserve(list.len() * 4);
                list.iter().for_each(|index| out.put_u32(*index));
            }
        }
    }

    /// Decodes a description within the limits. Checks everything that does not require the
    /// regions: each grid names one of the regions and is valid, and each index lies in every grid.
    pub(crate) fn decode(reader: &mut Reader<'_>) -> Result<Self> {
        let regions = usize::from(reader.u16()?);
        if regions == 0 || regions > MAX_GRIDS {
            return Err(reader
                .malformed(format_args!("{regions} regions, but 1 to {MAX_GRIDS} are allowed")));
        }
        let regions = (0..regions).map(|_| reader.region()).collect::<Result<Vec<_>>>()?;
        let count = usize::from(reader.u16()?);
        if count == 0 || count > MAX_GRIDS {
            return Err(
                reader.malformed(format_args!("{count} grids, but 1 to {MAX_GRIDS} are allowed"))
            );
        }
        let mut smallest = u32::MAX;
        let mut total = 0u64;
        let grids = (0..count)
            .map(|_| {
                let region = reader.u32()?;
                let grid = Grid {
                    base: reader.u64()?,
                    stride: reader.u64()?,
                    length: reader.u64()?,
                    count: reader.u32()?,
                };
                if region as usize >= regions.len() {
                    return Err(reader.malformed(format_args!(
                        "a grid on region {region} of {}",
                        regions.len()
                    )));
                }
                grid.check(u64::MAX).map_err(|error| reader.malformed(error))?;
                smallest = smallest.min(grid.count);
                total = total.saturating_add(grid.length);
                Ok(PlacedGrid { region, grid })
            })
            .collect::<Result<Arc<[PlacedGrid]>>>()?;
        let indices: Indices = match reader.u8()? {
            0 => {
                let (start, len) = (reader.u32()?, reader.u32()?);
                let end = start
                    .checked_add(len)
                    .ok_or_else(|| reader.malformed("a range beyond 32 bits"))?;
                (start..end).into()
            }
            1 => {
                let len = reader.u32()? as usize;
                if len > MAX_INDICES {
                    return Err(reader.malformed(format_args!(
                        "{len} indices, but at most {MAX_INDICES} are allowed"
                    )));
                }
                let bytes = reader.bytes(len * 4)?;
                bytes
                    .as_chunks::<4>()
                    .0
                    .iter()
                    .map(|index| u32::from_le_bytes(*index))
                    .collect::<Vec<_>>()
                    .into()
            }
            other => {
                return Err(reader.malformed(format_args!("unknown kind {other} of an index list")));
            }
        };
        if indices.len() > MAX_INDICES {
            return Err(reader.malformed(format_args!(
                "{} indices, but at most {MAX_INDICES} are allowed",
                indices.len()
            )));
        }
        if indices.max().is_some_and(|max| max >= smallest) {
            return Err(reader.malformed("an index beyond its grid"));
        }
        if total.checked_mul(indices.len() as u64).is_none_or(|bytes| bytes > i64::MAX as u64) {
            return Err(reader.malformed("more bytes than a file can have"));
        }
        Ok(Described { regions, grids, indices })
    }

    /// Checks the grids against the regions' lengths. Returns `OutOfBounds` for a grid that does
    /// not fit.
    pub(crate) fn check(&self, lengths: &[u64]) -> Result<()> {
        for placed in self.grids.iter() {
            let len = lengths.get(placed.region as usize).copied().unwrap_or(0);
            placed.grid.check(len).map_err(|error| {
                if error.kind() == ErrorKind::OutOfBounds {
                    error
                } else {
                    ErrorKind::Malformed.because(error.to_string())
                }
            })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod exhaustive;
#[cfg(test)]
mod tests {
    use super::*;

    fn sample(indices: impl Into<Indices>) -> Described {
        Described {
            regions: vec![(RegionId(7), RegionKey([1; 16])), (RegionId(9), RegionKey([2; 16]))],
            grids: [
                PlacedGrid { region: 0, grid: Grid::packed(64, 100) },
                PlacedGrid {
                    region: 1,
                    grid: Grid { base: 8, stride: 128, length: 64, count: 100 },
                },
            ]
            .into(),
            indices: indices.into(),
        }
    }

    fn encoded(described: &Described) -> Vec<u8> {
        let mut bytes = Vec::new();
        described.encode(&mut bytes);
        bytes
    }

    #[test]
    fn blocks_round_trip() {
        for sample in [sample([3, 1, 2]), sample(10..20), sample(0..0)] {
            let bytes = encoded(&sample);
            let mut reader = Reader::new("request", &bytes);
            let back = Described::decode(&mut reader).unwrap();
            reader.end().unwrap();
            assert_eq!(encoded(&back), bytes);
            assert_eq!(back.bytes(), sample.bytes());
        }
    }

    #[test]
    fn every_truncation_and_bit_flip_is_an_error_or_yields_valid_blocks() {
        let bytes = encoded(&sample([3, 1, 99]));
        for len in 0..bytes.len() {
            assert!(Described::decode(&mut Reader::new("request", &bytes[..len])).is_err());
        }
        for bit in 0..bytes.len() * 8 {
            let mut flipped = bytes.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            if let Ok(described) = Described::decode(&mut Reader::new("request", &flipped)) {
                let max = described.indices.max().unwrap_or(0);
                assert!(described.grids.iter().all(|placed| max < placed.grid.count));
                assert!(
                    described
                        .grids
                        .iter()
                        .all(|placed| (placed.region as usize) < described.regions.len())
                );
            }
        }
    }

    #[test]
    fn a_grid_beyond_its_region_is_out_of_bounds() {
        let error = sample([0]).check(&[6400, 100]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::OutOfBounds);
        sample([0]).check(&[6400, 8 + 99 * 128 + 64]).unwrap();
    }

    #[test]
    fn parts_cover_every_block_once() {
        let grids: Arc<[PlacedGrid]> =
            vec![PlacedGrid { region: 0, grid: Grid::packed(4096, 1000) }; 3].into();
        let indices = Indices::from(0..1000);
        let pair = Pair {
            local: Arc::clone(&grids),
            remote: grids,
            local_indices: indices.clone(),
            remote_indices: indices,
        };
        for max in [1, 3 * 4096, 1 << 20, u64::MAX] {
            let parts = parts(std::slice::from_ref(&pair), max, |_, _| true);
            assert_eq!(
                parts.iter().map(|part| part.grids.len() * part.indices.len()).sum::<usize>(),
                3000
            );
            assert!(parts.windows(2).all(|pair| pair[0].indices.end == pair[1].indices.start));
        }
        let cut = parts(std::slice::from_ref(&pair), u64::MAX, |_, grid| grid != 2);
        assert_eq!(cut.iter().map(|part| part.grids.clone()).collect::<Vec<_>>(), [0..2, 2..3]);
    }
}
