//! The process that owns the pool: what it does, and how the reader holds it. `kvx backends` asks
//! such a process too.

use std::io::{Read, Write};
use std::process::Command;
use std::sync::mpsc;
use std::time::Duration;

use clap::Args;
use kvx::{Agent, Registry};

use super::blocks::DemoBlocks;
use crate::Result;
use crate::child::Child;

/// The longest life of an owner, should it not see that its reader has ended.
const LIFE: Duration = Duration::from_secs(600);

/// What stands behind `demo-owner` on the command line.
#[derive(Args)]
pub(crate) struct OwnerArguments {
    #[arg(long, value_delimiter = ',', required = true)]
    backend: Vec<String>,
    #[arg(long)]
    size: u64,
}

/// Publishes a pool, prints its metadata, and keeps it until standard input ends.
pub(crate) fn own(
    arguments: &OwnerArguments,
    registry: &Registry,
    out: &mut dyn Write,
) -> Result<()> {
    let agent = Agent::builder("demo-owner").backends(&arguments.backend).build(registry)?;
    let _pool = agent.register("pool", DemoBlocks::of(arguments.size)?.filled_pool()?)?;
    let metadata: String = agent.metadata()?.iter().map(|byte| format!("{byte:02x}")).collect();
    writeln!(out, "{metadata}")?;
    out.flush()?;
    let (ended, wait) = mpsc::channel();
    std::thread::spawn(move || {
        std::io::stdin().read_to_end(&mut Vec::new()).ok();
        ended.send(()).ok();
    });
    wait.recv_timeout(LIFE).ok();
    Ok(agent.shutdown(Duration::from_secs(5)).join()?)
}

/// The owner's process, as its reader holds it: killed when this is dropped, however that comes.
pub(crate) struct Owner {
    child: Child,
    /// What it published.
    pub(crate) metadata: Vec<u8>,
}

impl Owner {
    /// Starts one, and waits until it has published its pool.
    pub(crate) fn start(backends: &[&str], size: u64, patience: Duration) -> Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["demo-owner", "--backend", &backends.join(","), "--size", &size.to_string()]);
        let mut child = Child::start("the owner of the pool", command)?;
        let line = child.hear(patience)?;
        let metadata =
            from_hex(line.trim_end()).ok_or("the owner's metadata is not hexadecimal")?;
        Ok(Owner { child, metadata })
    }

    /// Its process.
    pub(crate) fn pid(&self) -> u32 {
        self.child.pid()
    }

    /// Kills it by its process number.
    pub(crate) fn kill(&mut self) -> Result<()> {
        self.child.kill()
    }

    /// Lets it end by itself.
    pub(crate) fn end(self) {
        self.child.end();
    }
}

fn from_hex(text: &str) -> Option<Vec<u8>> {
    let digit = |digit: u8| char::from(digit).to_digit(16);
    let pairs = text.as_bytes().chunks(2);
    pairs.map(|pair| Some((digit(pair[0])? << 4 | digit(*pair.get(1)?)?) as u8)).collect()
}

#[cfg(test)]
mod tests {
    use super::from_hex;

    #[test]
    fn hexadecimal_is_read_or_refused() {
        assert_eq!(from_hex("00ff7A"), Some(vec![0, 255, 122]));
        assert_eq!([from_hex("0"), from_hex("0g"), from_hex("é")], [None, None, None]);
    }
}
