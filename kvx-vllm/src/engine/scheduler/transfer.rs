//! Requests of a MooncakeConnector, whose two legs share only the name of the transfer.

use std::sync::Arc;

use super::super::mooncake::{Mooncake, older_prefill};
use super::super::remote::RemoteEngine;
use super::super::step::RemoteRequest;
use super::{Arrival, Load, LoadSource, LoadStage, NotLoaded, Publishes, Scheduler};
use crate::ids::{Address, BlockLists, EngineId, RequestId};
use crate::params::{
    KvxPrefill, MooncakeLeg, MooncakeParams, OlderMooncakeLeg, OlderMooncakeParams, ParamsError,
    TransferParams,
};

/// One leg of a transfer, from either version of the parameters.
enum Leg {
    /// A decode will ask for the blocks by this name.
    Prefill { name: RequestId },
    /// This engine asks the prefill `engine` for the blocks by this name.
    Decode { name: RequestId, engine: EngineId, address: Address },
}

impl Scheduler {
    /// Adds a request of a MooncakeConnector that has arrived, like
    /// [`on_new_request`](Self::on_new_request). Ignores the parameters in `arrival`. From now on
    /// the transfer of a prefill leg is known, so that a decode that asks for it waits for this
    /// request and learns how it ends.
    ///
    /// # Errors
    ///
    /// Fails if the parameters cannot be used. The engine then computes the request as if it had
    /// none.
    pub fn on_new_transfer(
        &mut self,
        arrival: Arrival<'_>,
        params: &MooncakeParams,
    ) -> Result<(), NotLoaded> {
        let name = RequestId::from(params.transfer_id.as_str());
        let leg = match &params.leg {
            MooncakeLeg::Prefill => Leg::Prefill { name },
            MooncakeLeg::Decode { remote_engine_id, remote_bootstrap_addr } => Leg::Decode {
                name,
                engine: remote_engine_id.as_str().into(),
                address: bootstrap_address(remote_bootstrap_addr).map_err(NotLoaded::Params)?,
            },
        };
        self.on_new_leg(arrival, leg)
    }

    /// Adds a request with the parameters before vLLM 0.16, like
    /// [`on_new_transfer`](Self::on_new_transfer). These parameters name no transfer: both sides
    /// know the request by the same id, or a kvx prefill sends its own.
    ///
    /// # Errors
    ///
    /// As [`on_new_transfer`](Self::on_new_transfer).
    pub fn on_new_older_transfer(
        &mut self,
        arrival: Arrival<'_>,
        params: &OlderMooncakeParams,
    ) -> Result<(), NotLoaded> {
        let leg = match &params.leg {
            OlderMooncakeLeg::Prefill => Leg::Prefill { name: arrival.request.clone() },
            OlderMooncakeLeg::Decode { remote_host, remote_port, kvx } => {
                let host = crate::ids::bare(remote_host).into();
                let address = Address { host, port: *remote_port };
                let theirs = kvx.as_ref().and_then(|kvx| kvx.request_id.as_deref());
                Leg::Decode {
                    name: theirs.unwrap_or(arrival.request.shared()).into(),
                    engine: match kvx {
                        Some(kvx) => kvx.engine_id.as_str().into(),
                        None => older_prefill(&address),
                    },
                    address,
                }
            }
        };
        self.on_new_leg(arrival, leg)
    }

    fn on_new_leg(&mut self, arrival: Arrival<'_>, leg: Leg) -> Result<(), NotLoaded> {
        let mut entry = self.entry(&arrival)?;
        let refused = |key, why: &str| Err(NotLoaded::Params(ParamsError::new(key, why)));
        let Some(mooncake) = &self.settings.mooncake else {
            return refused(
                "transfer_id",
                "the parameters are for a MooncakeConnector, but this engine has another \
                 connector: set kv_connector to MooncakeConnector",
            );
        };
        match leg {
            Leg::Prefill { .. } if !mooncake.prefills() => {
                return refused(
                    "do_remote_decode",
                    "the request is a prefill leg, but this engine's kv_role is kv_consumer: send \
                     it to a kv_producer, or set kv_role to kv_both",
                );
            }
            Leg::Decode { .. } if !mooncake.decodes() => {
                return refused(
                    "do_remote_prefill",
                    "the request is a decode leg, but this engine's kv_role is kv_producer: send \
                     it to a kv_consumer, or set kv_role to kv_both",
                );
            }
            Leg::Prefill { name } => {
                (entry.publishes, entry.announced) = (Publishes::ForTransfer, true);
                self.next.named.push((arrival.request.clone(), name));
            }
            Leg::Decode { name, engine, address } => {
                let allowed = self.settings.allowed_hosts.as_ref();
                if allowed
                    .is_some_and(|allowed| !allowed.iter().any(|host| **host == *address.host))
                {
                    return Err(NotLoaded::HostNotAllowed(address.host));
                }
                let end = arrival.prompt_tokens.saturating_sub(self.settings.prefill_backoff);
                let remote = RemoteRequest {
                    request: name,
                    // The bootstrap server reports the sizes. Before vLLM 0.16 they equal the local
                    // ones.
                    peer: Arc::new(RemoteEngine::new(engine, address)),
                    blocks: BlockLists::default(),
                    expires_at_peer: None,
                    reference: None,
                };
                let (source, deadline, stage) =
                    (LoadSource::Transfer, arrival.deadline, LoadStage::Arrived);
                entry.load = Some(Load { source, remote, end, held_there: end, deadline, stage });
            }
        }
        self.enter(arrival.request, entry);
        Ok(())
    }

    /// Returns the answer of a MooncakeConnector's prefill: none since vLLM 0.16.
    pub(super) fn transfer_answer(
        &self,
        request: &RequestId,
        computed: u32,
    ) -> Option<TransferParams> {
        let settings = &self.settings;
        settings.mooncake.as_ref().filter(|mooncake| Mooncake::is_older(mooncake))?;
        let leg = OlderMooncakeLeg::Decode {
            remote_host: settings.address.host.to_string(),
            remote_port: settings.address.port,
            kvx: Some(KvxPrefill {
                engine_id: settings.engine.as_str().to_owned(),
                request_id: Some(request.as_str().to_owned()),
            }),
        };
        let told = OlderMooncakeParams::new(leg);
        Some(OlderMooncakeParams { remote_num_tokens: Some(computed.into()), ..told }.into())
    }
}

/// Parses `http://host:port`, as routers write it.
fn bootstrap_address(text: &str) -> Result<Address, ParamsError> {
    let at = text.strip_prefix("http://").unwrap_or(text).trim_end_matches('/');
    Address::parse(at).ok_or_else(|| {
        ParamsError::new(
            "remote_bootstrap_addr",
            format!(
                "remote_bootstrap_addr is {text:?}; it must be http://host:port of a prefill's \
                 bootstrap server"
            ),
        )
    })
}
