//! `cargo xtask book`: renders the documents for a browser, with mdBook.
//!
//! mdBook wants all pages below one folder; kvx's lie at the root and in the crates as well. The
//! command copies the chapters of `docs/SUMMARY.md`, and the files that they link to, to the same
//! paths below a folder of its own.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Component, Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::metadata::Metadata;
use crate::process::{self, Deadline};
use crate::{Result, all_held, root};

/// The limit of the whole command.
const LIMIT: Duration = Duration::from_secs(5 * 60);

/// The table of contents, which mdBook wants at the root of its folder.
const CONTENTS: &str = "docs/SUMMARY.md";

/// mdBook's own table of contents.
const RENDERED_CONTENTS: &str = "toc.html";

/// mdBook's settings. Its preprocessors would read `{{` as their own and rename each `README.md`.
const SETTINGS: &str = r#"[book]
title = "kvx"
src = "pages"

[build]
build-dir = "html"
create-missing = false
use-default-preprocessors = false
"#;

/// Renders the book and returns whether all links between its files hold.
pub(crate) fn run() -> Result<bool> {
    let folder = Metadata::of_members()?.target_directory.join("xtask/book");
    if folder.exists() {
        fs::remove_dir_all(&folder)?;
    }
    copy_pages(&folder.join("pages"))?;
    fs::write(folder.join("book.toml"), SETTINGS)?;
    let mut mdbook = Command::new("mdbook");
    mdbook.arg("build").arg(&folder);
    process::must_succeed(mdbook, Deadline::after(LIMIT))
        .map_err(|error| format!("{error}; mdBook comes with: cargo install mdbook --locked"))?;
    let html = folder.join("html");
    println!("open {}", html.join("index.html").display());
    broken_links(&html).map(all_held)
}

/// Copies the chapters and the files that they link to, and writes mdBook's table of contents.
fn copy_pages(folder: &Path) -> Result<()> {
    let contents = fs::read_to_string(root().join(CONTENTS))?;
    let chapters: BTreeSet<_> = paths(&contents, "](", ')').collect();
    let mut summary = contents.clone();
    let mut copied = BTreeSet::new();
    for chapter in chapters {
        let page = beside(Path::new(CONTENTS), chapter);
        summary = summary.replace(&format!("({chapter})"), &format!("({})", page.display()));
        let text = fs::read_to_string(root().join(&page))?;
        let linked = paths(&text, "](", ')').map(|path| beside(&page, path));
        copied.extend(linked.filter(|path| root().join(path).is_file()));
        copied.insert(page);
    }
    for path in copied {
        let copy = folder.join(&path);
        fs::create_dir_all(copy.parent().expect("it lies below the folder"))?;
        fs::copy(root().join(&path), copy)?;
    }
    fs::write(folder.join("SUMMARY.md"), summary)?;
    let front_page = folder.join("README.md");
    let text = fs::read_to_string(&front_page)?;
    Ok(fs::write(front_page, text.replace(CONTENTS, RENDERED_CONTENTS))?)
}

/// Returns the local paths that stand between `open` and `close` in a text, without the fragments.
fn paths<'a>(text: &'a str, open: &'a str, close: char) -> impl Iterator<Item = &'a str> {
    text.split(open)
        .skip(1)
        .filter_map(move |rest| rest.split([close, '#']).next())
        .filter(|path| !path.is_empty() && !path.contains(':'))
}

/// Returns the path that a link of a file means.
fn beside(file: &Path, link: &str) -> PathBuf {
    let mut path = file.parent().unwrap_or(Path::new("")).to_owned();
    for part in Path::new(link).components() {
        match part {
            Component::ParentDir => drop(path.pop()),
            Component::CurDir => {}
            other => path.push(other),
        }
    }
    path
}

/// Returns a sentence for each link of the rendered pages to a file that does not exist.
fn broken_links(html: &Path) -> Result<Vec<String>> {
    let mut broken = Vec::new();
    let mut folders = vec![html.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder)? {
            let path = entry?.path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "html") {
                let text = fs::read_to_string(&path)?;
                let links = paths(&text, "href=\"", '"').chain(paths(&text, "src=\"", '"'));
                let missing = links.filter(|link| !beside(&path, link).exists());
                let page = path.strip_prefix(html)?.display();
                broken.extend(missing.map(|link| format!("{page} links to {link}: no such file")));
            }
        }
    }
    Ok(broken)
}
