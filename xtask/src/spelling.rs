//! Checks the spelling with `typos` and `_typos.toml`.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::harness::Tally;
use crate::install::Environment;
use crate::process::{self, Deadline};
use crate::skips::Skip;
use crate::{Result, root};

/// Runs `typos`, which prints misspelled words. Skips itself where `typos` is not installed.
pub(crate) fn check(target: &Path, limit: Duration) -> Result<Tally> {
    let program = Environment::of(target, "typos").0.join("bin/typos");
    if !program.is_file() {
        let reason = "typos is not installed; cure: cargo xtask test --install";
        return Ok(Tally { skips: vec![Skip::new("spelling", reason)], ..Tally::default() });
    }
    let mut typos = Command::new(program);
    typos.current_dir(root()).args(["--format", "brief"]);
    let shown = "typos: correct the misspelled terms, or add correct ones to _typos.toml";
    Ok(Tally::of_check(process::failure_of(typos, shown, Deadline::after(limit))?))
}
