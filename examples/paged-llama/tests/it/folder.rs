//! A folder with a model, which is removed after the test.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use kvx_paged_llama::model::Pool;
use kvx_random_model::{ModelSpec, make_model};

pub(crate) struct Folder(PathBuf);

impl Folder {
    pub(crate) fn new() -> Folder {
        static NUMBER: AtomicUsize = AtomicUsize::new(0);
        let name =
            format!("kvx-llama-{}-{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    pub(crate) fn with(made: &ModelSpec) -> Folder {
        let folder = Folder::new();
        make_model(folder.path(), made).unwrap();
        folder
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Returns a pool of the same shape whose memory contains other requests' data.
pub(crate) fn fill_with_noise(pool: Pool) -> Pool {
    let mut memory: Vec<u64> = vec![u64::MAX; pool.shape().bytes().div_ceil(8)];
    let (begin, len) = (memory.as_mut_ptr().cast(), memory.len() * 8);
    // SAFETY: the vector belongs to the owner only, and lives as long as it.
    unsafe { Pool::over(*pool.shape(), begin, len, Arc::new(memory)) }.unwrap()
}
