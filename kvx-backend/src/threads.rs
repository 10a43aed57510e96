//! Names of threads that native libraries start, so that an operator knows to which backend a
//! thread belongs.

use std::collections::BTreeSet;

/// Runs `start`, then renames the threads called `from` that were started meanwhile to `to`, of
/// which the kernel keeps 15 bytes. Leaves earlier threads alone, because they belong to another
/// user of the library.
pub fn rename_new<T>(from: &str, to: &str, start: impl FnOnce() -> T) -> T {
    let before = tasks();
    let started = start();
    for task in tasks().difference(&before) {
        let file = format!("/proc/self/task/{task}/comm");
        if std::fs::read_to_string(&file).is_ok_and(|name| name.trim_end() == from)
            && let Err(cause) = std::fs::write(&file, to)
        {
            tracing::debug!(%cause, from, "cannot rename a thread of a native library");
        }
    }
    started
}

fn tasks() -> BTreeSet<String> {
    let tasks = std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    tasks.filter_map(|task| task.file_name().into_string().ok()).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::thread::JoinHandle;

    use super::*;

    /// Starts a thread with this name, which returns its name once the sender is dropped.
    fn start(name: &str) -> (Sender<()>, JoinHandle<String>) {
        let (end, ended): (Sender<()>, Receiver<()>) = channel();
        let (started, starts) = channel();
        let thread = std::thread::Builder::new().name(name.to_owned()).spawn(move || {
            started.send(()).ok();
            ended.recv().ok();
            std::fs::read_to_string("/proc/thread-self/comm").unwrap().trim_end().to_owned()
        });
        starts.recv().unwrap();
        (end, thread.unwrap())
    }

    fn name_at_end((end, thread): (Sender<()>, JoinHandle<String>)) -> String {
        drop(end);
        thread.join().unwrap()
    }

    #[test]
    fn only_new_threads_of_the_library_are_renamed() {
        let earlier = start("a library's");
        let [renamed, other] =
            rename_new("a library's", "kvx-test", || ["a library's", "other"].map(start));
        assert_eq!(name_at_end(renamed), "kvx-test");
        assert_eq!(name_at_end(other), "other");
        assert_eq!(name_at_end(earlier), "a library's");
    }
}
