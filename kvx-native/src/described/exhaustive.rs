//! [`Described::decode`], [`Described::check`] and a model agree on all small descriptions, and on
//! numbers at every limit.
//!
//! Memory safety: a peer chooses every number of a description. TCP and SHM decode it, check it
//! against the lengths of the regions, and then access the bytes that [`Extents`] returns without
//! checking them again. So all of these bytes must lie within their regions, without overflow.
//!
//! `kvx-core/src/segments/exhaustive.rs` compares `Extents` with a model on all other sides.

use kvx_core::backend::Extents;
use kvx_testkit::{EDGES, Tier, sequences};
use proptest::prelude::*;
use proptest::sample::select;

use super::*;

/// The indices of a description as a peer sends them.
#[derive(Clone, Debug)]
enum SentIndices {
    /// The first index, and how many follow each other.
    Range(u32, u32),
    List(Vec<u32>),
}

/// A description as a peer sends it.
#[derive(Clone, Debug)]
struct Sent {
    regions: u16,
    grids: Vec<(u32, Grid)>,
    indices: SentIndices,
}

impl SentIndices {
    fn len(&self) -> u64 {
        match self {
            SentIndices::Range(_, len) => (*len).into(),
            SentIndices::List(list) => list.len() as u64,
        }
    }

    /// Returns the largest index; `None` if there are none.
    fn last(&self) -> Option<u64> {
        match self {
            SentIndices::Range(start, len) => {
                len.checked_sub(1).map(|more| u64::from(*start) + u64::from(more))
            }
            SentIndices::List(list) => list.iter().copied().max().map(u64::from),
        }
    }

    /// Returns every index; for small descriptions.
    fn all(&self) -> Vec<u64> {
        match self {
            SentIndices::Range(start, len) => {
                (0..*len).map(|more| u64::from(*start) + u64::from(more)).collect()
            }
            SentIndices::List(list) => list.iter().copied().map(u64::from).collect(),
        }
    }
}

/// Returns the end of a grid, in numbers that cannot overflow.
fn end(grid: &Grid) -> u128 {
    let base = u128::from(grid.base);
    match grid.count.checked_sub(1) {
        Some(last) => base + u128::from(grid.stride) * u128::from(last) + u128::from(grid.length),
        None => base,
    }
}

impl Sent {
    /// Returns the message, written field by field.
    fn message(&self) -> Vec<u8> {
        let mut out = self.regions.to_le_bytes().to_vec();
        for region in 0..u64::from(self.regions) {
            out.extend(region.to_le_bytes());
            out.extend([7; 16]);
        }
        out.extend((self.grids.len() as u16).to_le_bytes());
        for (region, grid) in &self.grids {
            out.extend(region.to_le_bytes());
            [grid.base, grid.stride, grid.length].iter().for_each(|n| out.extend(n.to_le_bytes()));
            out.extend(grid.count.to_le_bytes());
        }
        match &self.indices {
            SentIndices::Range(start, len) => {
                out.push(0);
                [start, len].iter().for_each(|n| out.extend(n.to_le_bytes()));
            }
            SentIndices::List(list) => {
                out.push(1);
                out.extend((list.len() as u32).to_le_bytes());
                list.iter().for_each(|index| out.extend(index.to_le_bytes()));
            }
        }
        out
    }

    /// Returns the bytes of data that the description names.
    fn data(&self) -> u128 {
        let row: u128 = self.grids.iter().map(|(_, grid)| u128::from(grid.length)).sum();
        row * u128::from(self.indices.len())
    }

    /// Returns whether a decoder that does not know the regions must accept the description.
    fn is_valid(&self) -> bool {
        let grids = self.grids.iter().all(|(region, grid)| {
            let apart = grid.count < 2 || grid.stride >= grid.length;
            let named = *region < u32::from(self.regions);
            let within = self.indices.last().is_none_or(|last| last < u64::from(grid.count));
            named && grid.length > 0 && apart && end(grid) <= u128::from(u64::MAX) && within
        });
        let in_32_bits = match &self.indices {
            SentIndices::Range(start, len) => u64::from(*start) + u64::from(*len) < 1 << 32,
            SentIndices::List(_) => true,
        };
        let limits = [self.regions.into(), self.grids.len()];
        limits.iter().all(|count| (1..=MAX_GRIDS).contains(count))
            && grids
            && in_32_bits
            && self.indices.len() <= MAX_INDICES as u64
            && self.data() <= i64::MAX as u128
    }

    /// Returns the least length of each region for which its grids fit.
    fn needed(&self) -> Vec<u64> {
        let ends = |wanted| {
            let grids = self.grids.iter().filter(move |(region, _)| *region == wanted);
            grids.map(|(_, grid)| end(grid) as u64)
        };
        (0..u32::from(self.regions)).map(|region| ends(region).max().unwrap_or(0)).collect()
    }

    /// Decodes the message, and compares the result with the model.
    fn decode(&self) -> Option<Described> {
        let message = self.message();
        let mut reader = Reader::new("request", &message);
        let decoded = Described::decode(&mut reader);
        assert_eq!(decoded.is_ok(), self.is_valid(), "{self:?}: {decoded:?}");
        let decoded = match decoded {
            Ok(decoded) => decoded,
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Malformed, "{self:?}");
                return None;
            }
        };
        reader.end().expect("the whole message was read");
        assert_eq!(u128::from(decoded.bytes()), self.data(), "{self:?}");
        assert_eq!(decoded.indices.len() as u64, self.indices.len(), "{self:?}");
        assert_eq!(decoded.indices.max().map(u64::from), self.indices.last(), "{self:?}");
        let grids = decoded.grids.iter().map(|placed| (placed.region, placed.grid));
        assert!(grids.eq(self.grids.iter().copied()), "{self:?} became {decoded:?}");
        let mut again = Vec::new();
        decoded.encode(&mut again);
        assert_eq!(again, message);
        self.compare_lengths(&decoded);
        Some(decoded)
    }

    /// Compares the least lengths for which `check` accepts the grids with the model.
    fn compare_lengths(&self, decoded: &Described) {
        let needed = self.needed();
        decoded.check(&needed).unwrap_or_else(|error| panic!("{self:?} on {needed:?}: {error}"));
        for region in (0..needed.len()).filter(|region| needed[*region] > 0) {
            let mut short = needed.clone();
            short[region] -= 1;
            for lengths in [&short[..], &needed[..region]] {
                let refused = decoded.check(lengths).map_err(|error| error.kind());
                assert_eq!(refused, Err(ErrorKind::OutOfBounds), "{self:?} on {lengths:?}");
            }
        }
    }

    /// Compares the bytes that a transport accesses with a loop over every byte.
    fn compare_bytes(&self, decoded: Described) {
        let needed = self.needed();
        let mut model = Vec::new();
        for (region, grid) in &self.grids {
            for index in self.indices.all() {
                let start = grid.base + grid.stride * index;
                model.extend((start..start + grid.length).map(|at| (*region, at)));
            }
        }
        assert!(model.iter().all(|(region, at)| *at < needed[*region as usize]), "{self:?}");
        let mut extents = Extents::new(decoded.grids, decoded.indices);
        let mut accessed = Vec::new();
        while let Some(extent) = extents.take(3) {
            let bytes = extent.offset..extent.offset + extent.len;
            accessed.extend(bytes.map(|at| (extent.region, at)));
        }
        assert_eq!(accessed, model, "{self:?}");
    }
}

/// Returns all grids with numbers up to `most`, invalid ones included.
fn grids(most: u32) -> Vec<Grid> {
    let numbers: Vec<u32> = (0..=most).collect();
    let grid = |of: Vec<u32>| Grid {
        base: of[0].into(),
        stride: of[1].into(),
        length: of[2].into(),
        count: of[3],
    };
    sequences(&numbers, 4).map(grid).collect()
}

/// Returns all lists of at most 2 of these indices, and all ranges of these numbers.
fn indices(numbers: &[u32]) -> Vec<SentIndices> {
    let lists = (0..=2).flat_map(|len| sequences(numbers, len)).map(SentIndices::List);
    let ranges = sequences(numbers, 2).map(|of| SentIndices::Range(of[0], of[1]));
    lists.chain(ranges).collect()
}

/// Proven for one grid with numbers up to 3 (in the whole tier 5) on none to two regions, and for
/// two grids with numbers up to 2 on two regions: each with all lists of up to 2 indices and all
/// ranges up to the same numbers, and with regions as long as needed, and one byte shorter.
#[test]
fn every_small_description_that_is_accepted_names_bytes_within_its_regions() {
    let most = if Tier::Whole.runs_or_says("descriptions with numbers up to 5") { 5 } else { 3 };
    let named = |most: u32| indices(&(0..=most).collect::<Vec<_>>());
    let test = |sent: Sent| {
        if let Some(decoded) = sent.decode() {
            sent.compare_bytes(decoded);
        }
    };
    let of_one = named(most);
    for grid in grids(most) {
        for (regions, region) in [(0, 0), (1, 0), (1, 1), (2, 0), (2, 1), (2, 2), (2, u32::MAX)] {
            for indices in of_one.iter().cloned() {
                test(Sent { regions, grids: vec![(region, grid)], indices });
            }
        }
    }
    let of_two = named(2);
    for two in sequences(&grids(2), 2) {
        for regions in sequences(&[0, 1], 2) {
            for indices in of_two.iter().cloned() {
                let grids = regions.iter().copied().zip(two.iter().copied()).collect();
                test(Sent { regions: 2, grids, indices });
            }
        }
    }
}

/// Proven for one grid whose numbers are all combinations of limits of 32 and 64 bits, with lists
/// of up to 2 indices and ranges at the limits of 32 bits and of [`MAX_INDICES`].
#[test]
fn no_description_at_the_limits_of_its_numbers_overflows_into_its_region() {
    let most = MAX_INDICES as u32;
    let mut of = indices(&[0, 1, u32::MAX - 1, u32::MAX]);
    of.extend([most - 1, most, most + 1].map(|len| SentIndices::Range(0, len)));
    of.extend([most, most + 1].map(|len| SentIndices::Range(u32::MAX - most, len)));
    for three in sequences(&EDGES, 3) {
        for count in [0, 1, 2, most, u32::MAX - 1, u32::MAX] {
            let grid = Grid { base: three[0], stride: three[1], length: three[2], count };
            for indices in of.iter().cloned() {
                Sent { regions: 1, grids: vec![(0, grid)], indices }.decode();
            }
        }
    }
}

/// Proven for all pairs of counts of regions and grids at their limits, for lists at their limit,
/// and for every kind of list.
#[test]
fn counts_beyond_their_limits_and_beyond_the_message_are_refused() {
    let most = MAX_GRIDS as u16;
    for counts in sequences(&[0, 1, most, most + 1, u16::MAX], 2) {
        let grids = vec![(0, Grid::packed(1, 3)); counts[1].into()];
        Sent { regions: counts[0], grids, indices: SentIndices::List(vec![2, 0]) }.decode();
    }
    for len in [MAX_INDICES, MAX_INDICES + 1] {
        let grids = vec![(0, Grid::packed(1, 3)); MAX_GRIDS];
        let sent = Sent { regions: most, grids, indices: SentIndices::List(vec![1; len]) };
        assert_eq!(sent.decode().is_some(), len == MAX_INDICES);
        assert!(len > MAX_INDICES || sent.message().len() <= MAX_BYTES);
    }
    let one = Sent {
        regions: 1,
        grids: vec![(0, Grid::packed(1, 3))],
        indices: SentIndices::List(vec![2, 0]),
    };
    let message = one.message();
    let kind_at = message.len() - 4 - 2 * 4 - 1;
    for len in [3, 4, MAX_INDICES as u32, MAX_INDICES as u32 + 1, u32::MAX] {
        let mut longer = message.clone();
        longer[kind_at + 1..kind_at + 5].copy_from_slice(&len.to_le_bytes());
        assert!(Described::decode(&mut Reader::new("request", &longer)).is_err(), "{len} indices");
    }
    for kind in 0..=u8::MAX {
        let mut other = message.clone();
        other[kind_at] = kind;
        // As kind 0, the range of 2 indices from 2, the last of which lies beyond the grid.
        let decoded = Described::decode(&mut Reader::new("request", &other));
        assert_eq!(decoded.is_ok(), kind == 1, "kind {kind}");
    }
}

/// Returns numbers of any size, most of them near a limit.
fn number() -> impl Strategy<Value = u64> {
    prop_oneof![0..=16_u64, select(EDGES.to_vec()), any::<u64>()]
}

/// Returns grids of any numbers, about half of which are valid.
fn any_grid() -> impl Strategy<Value = Grid> {
    let count = prop_oneof![0..=16_u32, any::<u32>()];
    (number(), number(), number(), count, any::<bool>()).prop_map(
        |(base, stride, length, count, fits)| {
            if !fits {
                return Grid { base, stride, length, count };
            }
            let (base, length) = (base >> 2, (length >> 2).max(1));
            let stride = (stride / u64::from(count.max(1))).max(length);
            Grid { base, stride, length, count }
        },
    )
}

fn any_indices() -> impl Strategy<Value = SentIndices> {
    let index = || prop_oneof![0..=16_u32, any::<u32>()];
    prop_oneof![
        (index(), index()).prop_map(|(start, len)| SentIndices::Range(start, len)),
        prop::collection::vec(index(), 0..6).prop_map(SentIndices::List),
    ]
}

fn config() -> ProptestConfig {
    ProptestConfig { cases: 4096, failure_persistence: None, ..ProptestConfig::default() }
}

proptest! {
    #![proptest_config(config())]

    /// Beyond these sizes: up to 4 grids with any numbers on up to 3 regions.
    #[test]
    fn any_description_that_is_accepted_names_blocks_within_its_regions(
        regions in 0..=3_u16,
        grids in prop::collection::vec((0..=3_u32, any_grid()), 0..=4),
        indices in any_indices(),
    ) {
        let sent = Sent { regions, grids, indices };
        if let Some(decoded) = sent.decode() {
            let needed = sent.needed();
            for placed in decoded.grids.iter() {
                for position in (0..decoded.indices.len()).take(8) {
                    let index = decoded.indices.at(position);
                    let start = u128::from(placed.grid.offset(index));
                    let end = start + u128::from(placed.grid.length);
                    prop_assert!(end <= u128::from(needed[placed.region as usize]), "{:?}", sent);
                }
            }
        }
    }
}
