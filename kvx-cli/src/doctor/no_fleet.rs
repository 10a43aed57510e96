//! Fleets in a build without the router, which examines none.

use std::io::Write;

use serde_json::Value;

use super::finding::Finding;
use crate::Result;

/// No arguments.
#[derive(clap::Args)]
pub(super) struct FleetArguments {}

/// The report on a fleet, of which there is none.
pub(super) enum FleetReport {}

#[expect(clippy::unused_self, reason = "with the router, the arguments name a fleet")]
impl FleetArguments {
    pub(super) fn skips_host(&self) -> bool {
        false
    }

    #[expect(clippy::unnecessary_wraps, reason = "with the router, it may fail")]
    pub(super) fn examine(&self) -> Result<Option<FleetReport>> {
        Ok(None)
    }
}

impl FleetReport {
    pub(super) fn findings(&self) -> &[Finding] {
        match *self {}
    }

    pub(super) fn show(&self, _out: &mut dyn Write) -> std::io::Result<()> {
        match *self {}
    }

    pub(super) fn to_json(&self) -> Value {
        match *self {}
    }
}
