//! Requests of a MooncakeConnector: both legs come at once, and a transfer's name is all that they share.

use std::sync::Arc;

use super::super::identity::{Address, BlockLists, RequestId};
use super::super::step::{RemoteEngine, RemoteRequest};
use super::{Arrival, Load, LoadStage, NotLoaded, Publishes, Scheduler, Source};
use crate::params::{MooncakeLeg, MooncakeParams, ParamsError};

impl Scheduler {
    /// A request of a MooncakeConnector has arrived. As [`on_new_request`](Self::on_new_request) does, for its other
    /// parameters; those in `arrival` are not looked at. From now on a prefill leg's transfer is known, so that who
    /// asks for it waits for this request, and hears of its end.
    ///
    /// # Errors
    ///
    /// The parameters cannot be used; the request is computed here, as if it had none.
    pub fn on_new_transfer(
        &mut self,
        arrival: Arrival<'_>,
        params: &MooncakeParams,
    ) -> Result<(), NotLoaded> {
        let mut entry = self.entry(&arrival)?;
        let refused = |key, why: &str| Err(NotLoaded::Params(ParamsError::new(key, why)));
        let Some(mooncake) = &self.settings.mooncake else {
            return refused(
                "transfer_id",
                "parameters of a MooncakeConnector, and this engine has none: write MooncakeConnector as kv_connector",
            );
        };
        let name = RequestId::from(params.transfer_id.as_str());
        match &params.leg {
            MooncakeLeg::Prefill if !mooncake.prefills() => {
                return refused(
                    "do_remote_decode",
                    "a prefill leg, and this engine's kv_role is kv_consumer: send it to a kv_producer, or write \
                     kv_both",
                );
            }
            MooncakeLeg::Decode { .. } if !mooncake.decodes() => {
                return refused(
                    "do_remote_prefill",
                    "a decode leg, and this engine's kv_role is kv_producer: send it to a kv_consumer, or write \
                     kv_both",
                );
            }
            MooncakeLeg::Prefill => {
                (entry.publishes, entry.announced) = (Publishes::ForTransfer, true);
                self.next.named.push((arrival.request.clone(), name));
            }
            MooncakeLeg::Decode { remote_engine_id, remote_bootstrap_addr } => {
                let address = bootstrap_address(remote_bootstrap_addr).map_err(NotLoaded::Params)?;
                let allowed = self.settings.allowed_hosts.as_ref();
                if allowed.is_some_and(|allowed| !allowed.iter().any(|host| **host == *address.host)) {
                    return Err(NotLoaded::HostNotAllowed(address.host));
                }
                let end = arrival.prompt_tokens.saturating_sub(self.settings.prefill_backoff);
                let peer = RemoteEngine {
                    engine: remote_engine_id.as_str().into(),
                    address,
                    // Its bootstrap server will tell.
                    tp_size: 1,
                    pp_size: 1,
                    dcp_size: 1,
                    registration: 0,
                };
                let remote = RemoteRequest {
                    request: name,
                    peer: Arc::new(peer),
                    blocks: BlockLists::default(),
                    expires_at_peer: None,
                    reference: None,
                };
                let (source, deadline, stage) = (Source::Transfer, arrival.deadline, LoadStage::Arrived);
                entry.load = Some(Load { source, remote, end, held_there: end, deadline, stage });
            }
        }
        self.enter(arrival.request, entry);
        Ok(())
    }
}

/// `http://host:port`, as routers write it.
fn bootstrap_address(text: &str) -> Result<Address, ParamsError> {
    let at = text.strip_prefix("http://").unwrap_or(text).trim_end_matches('/');
    Address::parse(at).ok_or_else(|| {
        ParamsError::new(
            "remote_bootstrap_addr",
            format!(
                "remote_bootstrap_addr is {text:?}; it takes http://host:port of a prefill's bootstrap server"
            ),
        )
    })
}
