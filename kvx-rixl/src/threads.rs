//! Names for the threads that libraries start: an operator who sees one should know whose it is.

use std::collections::BTreeSet;

/// UCX's name for its thread, and kvx's name for it.
const RENAMED: (&str, &str) = ("async", "kvx-rixl async");

fn tasks() -> BTreeSet<String> {
    let tasks = std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    tasks.filter_map(|task| task.file_name().into_string().ok()).collect()
}

/// Runs `start`, and names threads that UCX started meanwhile after kvx. Others keep their names: they have that of the
/// thread that started them, which is kvx's own.
pub(crate) fn named<T>(start: impl FnOnce() -> T) -> T {
    let before = tasks();
    let started = start();
    for task in tasks().difference(&before) {
        let file = format!("/proc/self/task/{task}/comm");
        if std::fs::read_to_string(&file).is_ok_and(|name| name.trim_end() == RENAMED.0) {
            std::fs::write(&file, RENAMED.1).ok(); // only a name
        }
    }
    started
}
