//! Suggestions for misspelt names.

/// Returns the candidate that takes the fewest edits from `name`, ignoring letter case, if the
/// edits are at most about half the candidate's letters.
///
/// ```
/// assert_eq!(kvx_core::backend::nearest("UXC", ["UCX", "TCP"]), Some("UCX"));
/// assert_eq!(kvx_core::backend::nearest("banana", ["UCX", "TCP"]), None);
/// ```
pub fn nearest<'a>(name: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let name = name.to_lowercase();
    candidates
        .into_iter()
        .map(|candidate| (distance(&name, &candidate.to_lowercase()), candidate))
        .min_by_key(|(edits, _)| *edits)
        .filter(|(edits, candidate)| *edits <= candidate.chars().count().div_ceil(2))
        .map(|(_, candidate)| candidate)
}

/// Returns the number of edits between two strings: insert, delete, replace, or swap neighbours.
fn distance(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
    let mut rows = vec![vec![0; b.len() + 1]; a.len() + 1];
    for (i, row) in rows.iter_mut().enumerate() {
        row[0] = i;
    }
    for (j, cell) in rows[0].iter_mut().enumerate() {
        *cell = j;
    }
    for i in 1..=a.len() {
        for j in 1..=b.len() {
            let replaced = rows[i - 1][j - 1] + usize::from(a[i - 1] != b[j - 1]);
            let mut best = replaced.min(rows[i - 1][j] + 1).min(rows[i][j - 1] + 1);
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                best = best.min(rows[i - 2][j - 2] + 1);
            }
            rows[i][j] = best;
        }
    }
    rows[a.len()][b.len()]
}

#[cfg(test)]
mod tests {
    use super::nearest;

    #[test]
    fn the_nearest_name_wins_and_far_ones_do_not_count() {
        let known = ["UCX", "LIBFABRIC", "MOONCAKE", "RIXL", "NIXL", "SHM", "TCP"];
        assert_eq!(nearest("libfabrik", known), Some("LIBFABRIC"));
        assert_eq!(nearest("nixle", known), Some("NIXL"));
        assert_eq!(nearest("tpc", known), Some("TCP"));
        assert_eq!(nearest("infiniband", known), None);
        assert_eq!(nearest("x", []), None);
    }
}
