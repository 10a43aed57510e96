//! The model that the demo serves: its own, which writes English words, or the user's.

use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::Result;

/// The files of the demo's model; `demo-model/README.md` says how it was trained.
const FILES: [(&str, &[u8]); 4] = [
    ("tokenizer.json", include_bytes!("../../../demo-model/tokenizer.json")),
    ("tokenizer_config.json", include_bytes!("../../../demo-model/tokenizer_config.json")),
    ("model.safetensors", include_bytes!("../../../demo-model/model.safetensors")),
    ("config.json", include_bytes!("../../../demo-model/config.json")),
];

/// A served model. The folder of the demo's own model is removed when this is dropped: servers that
/// listen have mapped the files. A user's folder stays.
pub(super) struct DemoModel {
    folder: PathBuf,
}

impl DemoModel {
    /// Writes the demo's own model into a new folder, unless the user named a model.
    pub(super) fn open(users: Option<&Path>) -> Result<Self> {
        if let Some(folder) = users {
            return Ok(DemoModel { folder: folder.to_owned() });
        }
        let mut created = created_folder();
        let folder = created.insert(private_folder()?).clone();
        for (name, content) in FILES {
            let path = folder.join(name);
            if let Err(error) = std::fs::write(&path, content) {
                remove(&mut created);
                return Err(
                    format!("{}: {error}; name another folder in TMPDIR", path.display()).into()
                );
            }
        }
        Ok(DemoModel { folder })
    }

    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }
}

impl Drop for DemoModel {
    fn drop(&mut self) {
        remove(&mut created_folder());
    }
}

/// Removes the folder that the demo created when a signal ends this process; the kernel kills the
/// servers with it.
pub(super) fn remove_when_interrupted() -> Result<()> {
    use tokio::signal::unix::{SignalKind, signal};
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let [mut interrupt, mut terminate] = {
        let _entered = runtime.enter();
        [signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?]
    };
    let wait = move || {
        let status = runtime.block_on(async {
            tokio::select! {
                _ = interrupt.recv() => 130,
                _ = terminate.recv() => 143,
            }
        });
        // Keep it locked, so that no folder is created after this.
        let mut created = created_folder();
        remove(&mut created);
        std::process::exit(status)
    };
    std::thread::Builder::new().name("signals".into()).spawn(wait)?;
    Ok(())
}

/// Locks the path of the folder that the demo created, which is removed when this process ends. Its
/// creator holds the lock until the model is complete.
fn created_folder() -> MutexGuard<'static, Option<PathBuf>> {
    static CREATED: Mutex<Option<PathBuf>> = Mutex::new(None);
    CREATED.lock().unwrap_or_else(PoisonError::into_inner)
}

fn remove(created: &mut Option<PathBuf>) {
    if let Some(folder) = created.take() {
        // An error: it has been removed already.
        std::fs::remove_dir_all(folder).ok();
    }
}

/// Creates a folder that no other user can read.
fn private_folder() -> Result<PathBuf> {
    let temporary = std::env::temp_dir();
    for at in 0..1000 {
        let folder = temporary.join(format!("kvx-demo-{}-{at}", std::process::id()));
        match DirBuilder::new().mode(0o700).create(&folder) {
            Ok(()) => return Ok(folder),
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
            Err(error) => {
                let folder = folder.display();
                return Err(format!("{folder}: {error}; name another folder in TMPDIR").into());
            }
        }
    }
    let temporary = temporary.display();
    Err(format!("{temporary} is full of the demo's folders: remove kvx-demo-* there").into())
}
