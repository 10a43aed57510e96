//! The width of lines, of which the formatter leaves comments and texts as they are.

use std::path::Path;

/// The most columns of a line.
const WIDEST: usize = 120;

/// A program that writes generated code, which is as wide as it comes.
const WRITES_BINDINGS: &str = "xtask/bindings";

/// Lines of Rust under `root` that are wider, as `file:line`; bindings, tables and what was built are left out.
pub(crate) fn too_wide(root: &Path) -> crate::Result<Vec<String>> {
    let mut found = Vec::new();
    let mut folders = vec![root.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder)? {
            let path = entry?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let shown = path.strip_prefix(root).unwrap_or(&path);
            if path.is_dir() {
                let is_source =
                    name != "target" && !name.starts_with('.') && shown != Path::new(WRITES_BINDINGS);
                if is_source {
                    folders.push(path);
                }
            } else if name.ends_with(".rs") && !name.starts_with("bindings_") {
                let text = std::fs::read_to_string(&path)?;
                let wide = text.lines().enumerate().filter(|(_, line)| {
                    let text = line.trim_start_matches(['/', '!', ' ']);
                    // A table's row, and a text in quotes (a symbol, JSON), are not always to be broken.
                    line.chars().count() > WIDEST && !text.starts_with('|') && !text.contains('"')
                });
                found.extend(wide.map(|(at, _)| format!("{}:{}", shown.display(), at + 1)));
            }
        }
    }
    Ok(found)
}
