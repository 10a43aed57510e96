//! Core is only core: few lines, and its `unsafe` in few files.

use std::collections::BTreeMap;

use crate::circles::read;

/// The lines of kvx-core, without comments and tests. It is the words and the contract, which whoever writes a backend
/// or an engine has to read: the design promises at most 10,000, so that what grows beyond is taken out of it. Fewer
/// than 5,000 mean that its sources were not read.
const LINES: std::ops::RangeInclusive<usize> = 5_000..=10_000;
/// The files with `unsafe` in them: where core touches memory, forks and the kernel, and nowhere else. None means that
/// its sources were not read.
const UNSAFE_FILES: std::ops::RangeInclusive<usize> = 1..=6;

#[test]
fn core_stays_small_and_its_unsafe_code_in_six_files() {
    let mut texts = BTreeMap::new();
    read(&crate::root().join("kvx-core/src"), &mut Vec::new(), &mut texts).expect("its sources are read");
    let lines = texts.values().flat_map(|text| text.lines()).filter(|line| !line.trim().is_empty()).count();
    assert!(LINES.contains(&lines), "{lines} lines");
    let is_unsafe =
        |text: &&String| text.split(|c: char| !c.is_alphanumeric() && c != '_').any(|word| word == "unsafe");
    let files = texts.values().filter(is_unsafe).count();
    assert!(UNSAFE_FILES.contains(&files), "{files} files");
}
