//! `kvx devices`: lists the GPUs whose memory kvx can move here, or the reason why there are none.

use std::io::Write;
use std::sync::Arc;

use clap::Args;
use kvx_gpu::Device;
use serde_json::{Value, json};

use crate::Result;

/// The arguments of `kvx devices`.
#[derive(Args)]
pub(crate) struct Arguments {
    /// Print one JSON array of objects.
    #[arg(long)]
    json: bool,
}

/// Runs the command. Fails with each vendor's reason if there are none.
pub(crate) fn run(arguments: &Arguments, out: &mut dyn Write) -> Result<()> {
    let devices = all()?;
    let abouts = devices.iter().map(|device| device.info());
    if arguments.json {
        let rows: Value = abouts
            .map(|about| {
                json!({
                    "kind": about.kind.to_string(),
                    "driver": about.driver,
                    "version": about.version,
                    "ordinal": about.ordinal,
                    "name": about.name,
                    "bus": about.bus,
                })
            })
            .collect();
        return Ok(writeln!(out, "{rows:#}")?);
    }
    for about in abouts {
        writeln!(
            out,
            "{} {}: {} at {}, {} {}",
            about.kind, about.ordinal, about.name, about.bus, about.driver, about.version
        )?;
    }
    Ok(())
}

/// Returns all devices that this process sees: at least one.
pub(crate) fn all() -> Result<Vec<Arc<Device>>> {
    #[cfg_attr(
        not(any(feature = "cuda", feature = "rocm")),
        expect(unused_mut, reason = "no feature adds any")
    )]
    let (mut devices, mut reasons): (Vec<Arc<Device>>, Vec<String>) = Default::default();
    #[cfg(feature = "cuda")]
    match kvx::cuda::devices() {
        Ok(found) => devices.extend(found),
        Err(why) => reasons.push(format!("CUDA: {why}")),
    }
    #[cfg(feature = "rocm")]
    match kvx::rocm::devices() {
        Ok(found) => devices.extend(found),
        Err(why) => reasons.push(format!("ROCm: {why}")),
    }
    if !devices.is_empty() {
        return Ok(devices);
    }
    if reasons.is_empty() {
        reasons.push("build kvx with --features cuda, or rocm".to_owned());
    }
    Err(format!("no device memory can be reached; {}", reasons.join("; ")).into())
}

/// Returns the first device.
pub(crate) fn first() -> Result<Arc<Device>> {
    Ok(all()?.remove(0))
}
