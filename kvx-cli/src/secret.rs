//! `kvx secret`: the key that a fleet's engines prove to each other.

use std::io::Write;
use std::path::PathBuf;

use kvx::Secret;

use crate::Result;

/// Where the secret goes.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// The file to make; one that exists is left as it is.
    file: PathBuf,
}

/// Makes the file and says what to do with it.
pub(crate) fn run(arguments: &Arguments, out: &mut impl Write) -> Result<()> {
    Secret::create(&arguments.file)?;
    let file = std::path::absolute(&arguments.file)?;
    let file = file.display();
    writeln!(out, "{file} has a new secret of 32 random bytes, which only its owner can read.")?;
    writeln!(
        out,
        "Copy it to every host by a way that you trust, with mode 600, and set for each engine:"
    )?;
    writeln!(out, "KVX_SECRET_FILE={file}")?;
    writeln!(out, "Whoever has it is let in; engines without it are refused.")?;
    Ok(())
}
