#![doc = include_str!("../README.md")]

mod corruption;
pub mod engine;
pub mod events;
#[doc(hidden)]
pub mod fuzz;
pub mod http;
pub mod kv;
pub mod model;
pub mod rank;
pub mod registration;
pub mod server;
pub mod tokenizer;

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};

    /// Returns the files in a folder and below it.
    fn files(folder: &Path) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
        entries.flat_map(|path| if path.is_dir() { files(&path) } else { vec![path] }).collect()
    }

    #[test]
    fn kvx_is_in_one_file_of_at_most_150_lines() {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
        let has_kvx = |path: &PathBuf| {
            let text = std::fs::read_to_string(path).unwrap();
            // Split into two literals, so that this file does not match.
            text.contains(concat!("kvx", "::"))
        };
        let with: Vec<PathBuf> = files(&source).into_iter().filter(has_kvx).collect();
        assert_eq!(with, [source.join("kv.rs")]);
        let lines = std::fs::read_to_string(&with[0]).unwrap().lines().count();
        assert!(lines <= 150, "kv.rs has {lines} lines");
    }
}
