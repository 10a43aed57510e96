//! Replays the inputs that fuzzing found: the files of the repository's `fuzz/corpus`, with a
//! folder for each target.

use std::path::Path;

use crate::mutation::{attempt, fuzz};

/// The mutations of its corpus that each target gets in addition.
const MUTATIONS: u64 = 2000;

/// Calls each target with each file of its corpus, and with mutations of them, within the limits
/// of [`within_limits`](crate::within_limits). The program's allocator must be
/// [`CountingAllocator`](crate::CountingAllocator).
///
/// # Panics
/// If a target panics or exceeds a limit, with the input on standard error, or if a target has no
/// file.
pub fn replay(targets: &[(&str, fn(&[u8]))]) {
    let corpus = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../fuzz/corpus"));
    targets.iter().for_each(|(name, target)| replay_one(name, &corpus.join(name), *target));
}

fn replay_one(name: &str, folder: &Path, target: fn(&[u8])) {
    let files =
        std::fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let mut seeds = Vec::new();
    for file in files {
        let path = file.expect("its name can be read").path();
        let bytes =
            std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        attempt(name, &path.display(), &bytes, target);
        seeds.push((path, bytes));
    }
    assert!(!seeds.is_empty(), "{} is empty", folder.display());
    // Every file system lists a folder in an order of its own.
    seeds.sort();
    let seeds: Vec<_> = seeds.into_iter().map(|(_, bytes)| bytes).collect();
    fuzz(name, &seeds, &[[]; 0], MUTATIONS, target);
}

/// Makes the unit test of a crate's fuzz targets: [`replay`], and the allocator that it needs. For
/// a module of its own.
#[macro_export]
macro_rules! replay_test {
    ($targets:expr) => {
        #[global_allocator]
        static ALLOCATOR: $crate::CountingAllocator = $crate::CountingAllocator;

        #[test]
        fn what_fuzzing_found_is_held() {
            $crate::replay($targets);
        }
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_breaks_a_target_and_a_target_without_files_are_found() {
        let here = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/src/chaos"));
        replay_one("any", here, |_| {});
        let fault_injection = |bytes: &[u8]| assert!(bytes.len() < 100, "too long");
        assert!(std::panic::catch_unwind(|| replay_one("any", here, fault_injection)).is_err());
        assert!(std::panic::catch_unwind(|| replay(&[("no_such_target", |_| {})])).is_err());
    }
}
