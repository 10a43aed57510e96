//! Inputs for tests that compare code with a model: everything up to a size, and numbers at the
//! limits of their types.

/// Numbers around each limit of 32 and 64 bits, at which sums and products overflow.
pub const EDGES: [u64; 13] = [
    0,
    1,
    2,
    3,
    1 << 31,
    (1 << 32) - 1,
    1 << 32,
    (1 << 32) + 1,
    (1 << 63) - 1,
    1 << 63,
    u64::MAX - 2,
    u64::MAX - 1,
    u64::MAX,
];

/// Returns every sequence of `len` of these items.
///
/// ```
/// let all: Vec<_> = kvx_testkit::sequences(&['a', 'b'], 2).collect();
/// assert_eq!(all, [['a', 'a'], ['b', 'a'], ['a', 'b'], ['b', 'b']]);
/// ```
///
/// # Panics
/// If there are more than `usize::MAX` sequences.
pub fn sequences<T: Clone>(items: &[T], len: usize) -> impl Iterator<Item = Vec<T>> {
    let digits = u32::try_from(len).ok();
    let count = digits.and_then(|digits| items.len().checked_pow(digits));
    (0..count.expect("too many sequences")).map(move |number| {
        let mut rest = number;
        let mut next = || {
            let item = items[rest % items.len()].clone();
            rest /= items.len();
            item
        };
        (0..len).map(|_| next()).collect()
    })
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn every_sequence_is_returned_once() {
        let all: HashSet<Vec<u8>> = sequences(&[1, 2, 3], 4).collect();
        assert_eq!((all.len(), sequences(&[1, 2, 3], 4).count()), (81, 81));
        assert_eq!((sequences(&[1, 2], 0).count(), sequences(&[1, 2], 1).count()), (1, 2));
        assert_eq!((sequences::<u8>(&[], 0).count(), sequences::<u8>(&[], 2).count()), (1, 0));
    }
}
