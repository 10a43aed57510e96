//! Publishing blocks for a decode, for engines without a step loop.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use kvx_core::{Deadline, Error, ErrorKind};

use super::connector::{Connector, arrive};
use super::outcomes::{Outcomes, Released};
use super::requests;
use super::slot::Slot;
use kvx_vllm::engine::{Address, Arrival, BlockLists, Ending, Finished, Kept, RequestId, Status};
use kvx_vllm::params::{
    MooncakeLeg, MooncakeParams, MooncakeTransferId, ParamsError, TransferMode, TransferParams,
};

/// The prefill side of a connector: it publishes blocks for a decode.
#[derive(Clone, Copy, Debug)]
pub struct Prefill<'a>(&'a Connector);

impl<'a> Prefill<'a> {
    /// Returns the prefill side of this connector.
    pub fn new(connector: &'a Connector) -> Self {
        Prefill(connector)
    }

    pub(super) fn mode(&self) -> TransferMode {
        self.0.settings().mode
    }

    /// Publishes a prefilled request: `blocks` hold the KV of `tokens` tokens. The parameters go to
    /// the decode, unchanged (serde writes and reads them), and the blocks stay as they are until
    /// the lease says otherwise.
    /// Blocks beyond those that the tokens need are left out of it. Waits as
    /// [`request_finished`](Connector::request_finished) does.
    ///
    /// A request has a name of its own, as in vLLM: a decode's last notification of an earlier one
    /// of this name may still be on its way, and would end this lease: a decode that loads by it is
    /// refused then.
    ///
    /// # Errors
    /// `Invalid` for a name that is in use, for blocks that do not fit the tokens or the registered
    /// caches, and for those that could not be copied to the host; `Closed`.
    pub fn publish(
        &self,
        request: impl Into<RequestId>,
        blocks: BlockLists,
        tokens: u32,
    ) -> kvx_core::Result<(Lease, TransferParams)> {
        let asked = match &self.0.settings().mooncake {
            None => TransferParams::ask_prefill(),
            Some(mooncake) if mooncake.is_older() => TransferParams::ask_prefill(),
            Some(_) => MooncakeParams::new(
                MooncakeTransferId::from_random(random()?),
                MooncakeLeg::Prefill,
            )
            .into(),
        };
        self.publish_as(request, &asked, blocks, tokens)
    }

    /// As [`publish`](Self::publish), for a request that came with parameters. A
    /// MooncakeConnector's decode knows it by their `transfer_id`, and may have asked for it
    /// before.
    ///
    /// # Errors
    /// As [`publish`](Self::publish); `Invalid` for parameters that ask for no prefill.
    pub fn publish_as(
        &self,
        request: impl Into<RequestId>,
        asked: &TransferParams,
        blocks: BlockLists,
        tokens: u32,
    ) -> kvx_core::Result<(Lease, TransferParams)> {
        let (connector, request) = (self.0, request.into());
        let arrival = Arrival {
            request: &request,
            prompt_tokens: tokens,
            params: Some(asked),
            deadline: None,
        };
        let shared = connector.shared();
        let refused = |why: &dyn fmt::Display| {
            if shared.is_closed() {
                return Error::new(
                    ErrorKind::Closed,
                    format!("request {request} cannot be published: the connector was shut down"),
                );
            }
            Error::new(ErrorKind::Invalid, format!("request {request} cannot be published: {why}"))
        };
        let wait = |outcomes: &mut Outcomes| outcomes.wait_for_release(&request, Kept::Request);
        let slot = arrive(shared, arrival, wait).map_err(|why| refused(&why))?;
        let ending = Ending {
            status: Status::LengthCapped,
            blocks,
            computed: tokens,
            cached: None,
            reference: None,
        };
        match connector.request_finished(&request, ending) {
            Finished { params: Some(params), .. } => {
                Ok((Lease { connector: connector.clone(), request, slot, over: false }, params))
            }
            Finished { delay_free: true, .. } if connector.settings().mooncake.is_some() => {
                let params = decode_leg(connector, asked, tokens).map_err(|why| refused(&why))?;
                Ok((Lease { connector: connector.clone(), request, slot, over: false }, params))
            }
            Finished { withheld, .. } => {
                let mut state = shared.state.lock();
                state.outcomes.forget_release(&request, Kept::Request, &slot);
                drop(state);
                Err(refused(&withheld.unwrap_or("the connector keeps nothing for a decode")))
            }
        }
    }
}

/// The parameters for a decode with a MooncakeConnector, whose prefill leg answers none.
fn decode_leg(
    connector: &Connector,
    asked: &TransferParams,
    tokens: u32,
) -> Result<TransferParams, ParamsError> {
    let Address { host, port } = connector.address();
    let host = if host.contains(':') { format!("[{host}]") } else { host.to_string() };
    let leg = MooncakeLeg::Decode {
        remote_engine_id: connector.engine_id().as_str().to_owned(),
        remote_bootstrap_addr: format!("http://{host}:{port}"),
    };
    let mut params: TransferParams = MooncakeParams::new(asked.mooncake()?.transfer_id, leg).into();
    params.remote_num_tokens = Some(tokens.into());
    Ok(params)
}

fn random() -> kvx_core::Result<[u8; 16]> {
    let [half, other] = [kvx_core::backend::random_number()?, kvx_core::backend::random_number()?];
    Ok((u128::from(half) << 64 | u128::from(other)).to_be_bytes())
}

/// Blocks that a decode may fetch within `kv_lease_duration` of `kv_connector_extra_config` (30 s
/// by default), which the heartbeats of a decode that waits for them renew.
///
/// Dropping it before its end takes the blocks back: decodes that still want them are refused, and
/// the blocks are the engine's at once. A vLLM that reads at that moment cannot notice: with such
/// peers, wait for the end. With NixlPushConnector this engine may itself be writing the blocks to
/// a peer, and ranks on other hosts have to acknowledge: in these modes the blocks are the engine's
/// when [`outcomes`](Connector::outcomes) says `Free`.
#[must_use = "dropping a lease takes the blocks back"]
pub struct Lease {
    connector: Connector,
    request: RequestId,
    slot: Arc<Slot<Released>>,
    over: bool,
}

impl Lease {
    /// The request.
    pub fn request(&self) -> &RequestId {
        &self.request
    }

    /// Ends when the decode has fetched the blocks, or the lease has expired: then they are the
    /// engine's again.
    pub fn released(self) -> impl Future<Output = Released> + Send {
        self
    }

    /// As [`released`](Self::released), without a runtime. `Err`: not by the deadline; the lease
    /// continues.
    pub fn wait_blocking(mut self, deadline: impl Into<Deadline>) -> Result<Released, Lease> {
        match self.slot.wait(deadline.into()) {
            Some(released) => {
                self.over = true;
                Ok(released)
            }
            None => Err(self),
        }
    }
}

impl Future for Lease {
    type Output = Released;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Released> {
        let polled = self.slot.poll(context);
        self.over |= polled.is_ready();
        polled
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if !self.over {
            requests::withdraw(self.connector.shared(), &self.request, &self.slot);
        }
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Lease({:?})", self.request)
    }
}
