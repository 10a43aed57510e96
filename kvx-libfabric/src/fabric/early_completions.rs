//! A provider that completes a write before its bytes have arrived, as verbs below ofi_rxm does:
//! tcp without `FI_DELIVERY_COMPLETE`, on two rails. The target's second rail is slow, and the
//! first one carries the messages.

use std::sync::Arc;

use kvx_core::Result;
use kvx_core::backend::{Context, Transport};

use super::unordered::{OpenedBy, notifications_wait};
use crate::factory;
use crate::ffi::{self, Info, Infos, ProviderQuery};
use crate::providers::DeliveryProof;

/// Opens a transport whose provider reports a write when it has left.
fn open(agent: Context, proof: DeliveryProof) -> Result<Arc<dyn Transport>> {
    let library = ffi::LIBRARY.open().unwrap();
    let asked = ProviderQuery { provider: Some("tcp;ofi_rxm"), ..ProviderQuery::default() };
    let found = Infos::find(library, asked).unwrap();
    let info = found.iter().find(|info: &&Info| info.domain() == "lo").unwrap();
    let chosen = [info.copy().unwrap(), info.copy().unwrap()];
    let mut parts = factory::build(&agent, library, &chosen, proof, |_| ())?;
    if &*agent.agent.name == "far" {
        parts.fabric.rail(1).endpoint().slow_down();
    }
    kvx_backend::fabric::open(agent, parts)
}

fn proven_by_reads(agent: Context) -> Result<Arc<dyn Transport>> {
    open(agent, DeliveryProof::ReadBack)
}

#[test]
fn notifications_come_after_data_whose_writes_complete_early() {
    let test = "notifications_come_after_data_whose_writes_complete_early";
    let options = r#"{"libfabric": {"provider": "tcp;ofi_rxm"}}"#;
    notifications_wait(test, options, OpenedBy(proven_by_reads));
}
