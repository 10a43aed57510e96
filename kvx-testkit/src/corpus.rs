//! Replays the inputs that fuzzing found: the files of the repository's `fuzz/corpus`, with a
//! folder for each target.

use std::path::Path;
use std::time::{Duration, Instant};

/// The maximum time for one input, after which libFuzzer calls it a hang.
const LONGEST: Duration = Duration::from_secs(10);

/// Calls each target with each file of its corpus.
///
/// # Panics
/// If a target panics, with the name of the file on standard error, or if a target has no file.
pub fn replay(targets: &[(&str, fn(&[u8]))]) {
    let corpus = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../fuzz/corpus"));
    targets.iter().for_each(|(name, target)| replay_one(&corpus.join(name), *target));
}

fn replay_one(folder: &Path, target: fn(&[u8])) {
    let files =
        std::fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let mut tried = 0;
    for file in files {
        let path = file.expect("its name can be read").path();
        let bytes =
            std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let begun = Instant::now();
        if let Err(panic) = std::panic::catch_unwind(|| target(&bytes)) {
            eprintln!("{}: {}", path.display(), bytes.escape_ascii());
            std::panic::resume_unwind(panic);
        }
        assert!(begun.elapsed() < LONGEST, "{} took {:?}", path.display(), begun.elapsed());
        tried += 1;
    }
    assert!(tried > 0, "{} is empty", folder.display());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_breaks_a_target_and_a_target_without_files_are_found() {
        let here = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/src/chaos"));
        replay_one(here, |bytes| assert!(!bytes.is_empty()));
        let fault_injection = |bytes: &[u8]| assert!(bytes.len() < 100, "too long");
        assert!(std::panic::catch_unwind(|| replay_one(here, fault_injection)).is_err());
        assert!(std::panic::catch_unwind(|| replay(&[("no_such_target", |_| {})])).is_err());
    }
}
