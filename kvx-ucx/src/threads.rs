//! Threads that UCX starts: they bear kvx's name, as all threads that kvx brings into a process do.

use std::collections::HashSet;
use std::ffi::OsString;

/// UCX's name for its thread, and kvx's name for it; the kernel keeps 15 bytes.
const NAMES: (&str, &str) = ("async", "kvx-ucx async");

/// The threads of this process at one time.
pub(crate) struct Threads(HashSet<OsString>);

impl Threads {
    pub(crate) fn now() -> Self {
        Threads(tasks().collect())
    }

    /// Names those that UCX has started since. One that was there before belongs to whoever else uses UCX here.
    pub(crate) fn name_new(&self) {
        for task in tasks().filter(|task| !self.0.contains(task)) {
            let file = std::path::Path::new("/proc/self/task").join(task).join("comm");
            if std::fs::read_to_string(&file).is_ok_and(|name| name.trim_end() == NAMES.0)
                && let Err(cause) = std::fs::write(&file, NAMES.1)
            {
                tracing::debug!(%cause, "a thread of UCX keeps its own name");
            }
        }
    }
}

fn tasks() -> impl Iterator<Item = OsString> {
    std::fs::read_dir("/proc/self/task")
        .into_iter()
        .flatten()
        .flatten()
        .map(|task| task.file_name())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A thread of this name, and what it is called after `meanwhile`.
    fn called_after(name: &str, meanwhile: impl FnOnce()) -> String {
        std::thread::scope(|scope| {
            let (told, heard) = std::sync::mpsc::channel::<()>();
            let (begun, begins) = std::sync::mpsc::channel();
            let thread = std::thread::Builder::new().name(name.to_owned());
            let thread = thread.spawn_scoped(scope, move || {
                begun.send(()).ok();
                heard.recv().ok();
                std::fs::read_to_string("/proc/thread-self/comm").unwrap().trim_end().to_owned()
            });
            let thread = thread.unwrap();
            begins.recv().unwrap();
            meanwhile();
            drop(told);
            thread.join().unwrap()
        })
    }

    #[test]
    fn new_threads_of_ucx_alone_are_named() {
        let before = Threads::now();
        assert_eq!(called_after("async", || before.name_new()), "kvx-ucx async");
        assert_eq!(called_after("other", || before.name_new()), "other");
        assert_eq!(called_after("async", || Threads::now().name_new()), "async");
    }
}
