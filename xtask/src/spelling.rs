//! The check of spelling, by `typos` and `_typos.toml`.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::install::{self, Environment};
use crate::process::{self, Deadline};
use crate::{Result, root};

/// Installs `typos` if it is missing and returns a sentence if it found misspelled words, which it prints.
pub(crate) fn spelling(target: &Path, limit: Duration) -> Result<Vec<String>> {
    let deadline = Deadline::after(limit);
    install::peers(&["typos"], target, deadline)?;
    let mut typos = Command::new(Environment::of(target, "typos").0.join("bin/typos"));
    typos.current_dir(root()).args(["--format", "brief"]);
    let shown = "typos (correct the words, or add what is meant to _typos.toml)";
    Ok(Vec::from_iter(process::failure_of(typos, shown, deadline)?))
}
