//! `kvx secret`: creates the key with which a fleet's engines authenticate each other.

use std::io::Write;
use std::path::PathBuf;

use kvx::Secret;

use crate::Result;

/// The arguments of `kvx secret`.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// The file to create; an existing file is not changed.
    file: PathBuf,
}

/// Creates the file, and prints what to do with it.
pub(crate) fn run(arguments: &Arguments, out: &mut impl Write) -> Result<()> {
    Secret::create(&arguments.file)?;
    let file = std::path::absolute(&arguments.file)?;
    let file = file.display();
    writeln!(out, "{file} has a new secret of 32 random bytes, which only its owner can read.")?;
    writeln!(
        out,
        "Copy it to every host over a channel that you trust, with mode 600, and set for each engine and"
    )?;
    writeln!(out, "router:")?;
    writeln!(out, "KVX_SECRET_FILE={file}")?;
    writeln!(out, "Peers with the secret are accepted; peers without it are rejected.")?;
    Ok(())
}
