//! `kvx demo`: demonstrates that an answer from transferred KV cache equals a single server's, and
//! what transfers cost.

mod arguments;
mod blocks;
#[cfg(all(feature = "serve", feature = "proxy"))]
mod servers;
mod transfer;

use std::io::Write;

use kvx::Registry;

use crate::Result;

pub(crate) use self::arguments::Arguments;

/// Runs the demo. `Ok` means that every check has passed. `terminal` says whether `out` is a
/// terminal, which also shows progress.
pub(crate) fn run(
    arguments: &Arguments,
    registry: &Registry,
    out: &mut dyn Write,
    terminal: bool,
) -> Result<()> {
    #[cfg(all(feature = "serve", feature = "proxy"))]
    if !arguments.transfer {
        for written in &arguments.backend {
            registry.require(written, &kvx::Options::new())?;
        }
        let text = servers::Format::Text { terminal };
        let format = if arguments.json { servers::Format::Json } else { text };
        return servers::run(arguments, format, out);
    }
    #[cfg(not(all(feature = "serve", feature = "proxy")))]
    let _ = terminal;
    #[cfg(not(all(feature = "serve", feature = "proxy")))]
    if !arguments.transfer {
        let words = "this kvx was built without the servers of the demo: build it with the features serve and proxy, or \
                     move blocks without servers with --transfer";
        return Err(words.into());
    }
    transfer::run(&arguments.backend, arguments.size, registry, out)
}
