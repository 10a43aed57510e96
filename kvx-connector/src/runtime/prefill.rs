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
use kvx_vllm::engine::{
    Address, Arrival, BlockLists, Ending, Finished, Kept, RequestId, Status, Withheld,
};
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

    /// Publishes the blocks of a prefilled request, so that a decode can load them.
    ///
    /// `blocks` hold the KV cache of the prompt's first `tokens` tokens, with one list for each KV
    /// cache group. Blocks beyond those that the tokens need are not published. The engine sends
    /// the returned parameters to the decode unchanged (they implement serde's traits, for example
    /// for `serde_json`), and must not change the blocks until the [`Lease`] ends; it must not
    /// append tokens to the last one either. This call blocks in the cases in which
    /// [`request_finished`](Connector::request_finished) does.
    ///
    /// The parameters name the address of this engine's side channel, `localhost` by default. If
    /// decodes run on other hosts, set `VLLM_NIXL_SIDE_CHANNEL_HOST` to an address that they reach.
    ///
    /// Give every request a name of its own, as vLLM does. The decode of an earlier request with
    /// the same name may still have a notification in flight. That notification would end the new
    /// lease, and the new request's decode would then be refused.
    ///
    /// # Errors
    /// - `Invalid`: a request of this name has not ended; `tokens` is 0; the lists of `blocks` do
    ///   not match the KV cache groups, hold too few blocks for the tokens, or name a block beyond
    ///   the registered caches; or a rank has no caches registered.
    /// - `PeerLost`: a rank of this engine is lost.
    /// - `Native`: the blocks could not be copied to the host.
    /// - `Closed`: the connector was shut down.
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

    /// Publishes a request that arrived with parameters, as [`publish`](Self::publish) does for one
    /// without.
    ///
    /// A decode with a MooncakeConnector identifies the request by the `transfer_id` in `asked`,
    /// and may ask for the blocks before this call.
    ///
    /// # Errors
    /// Those of [`publish`](Self::publish), and `Invalid` if `asked` does not ask for a prefill.
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
        let refused = |kind: ErrorKind, why: &dyn fmt::Display| {
            if shared.is_closed() {
                return ErrorKind::Closed.because(format!(
                    "request {request} cannot be published: the connector was shut down"
                ));
            }
            Error::new(kind, format!("request {request} cannot be published: {why}"))
        };
        let wait = |outcomes: &mut Outcomes| outcomes.wait_for_release(&request, Kept::Request);
        let slot =
            arrive(shared, arrival, wait).map_err(|why| refused(ErrorKind::Invalid, &why))?;
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
                let params = decode_leg(connector, asked, tokens)
                    .map_err(|why| refused(ErrorKind::Invalid, &why))?;
                Ok((Lease { connector: connector.clone(), request, slot, over: false }, params))
            }
            Finished { withheld, .. } => {
                let mut state = shared.state.lock();
                state.outcomes.forget_release(&request, Kept::Request, &slot);
                drop(state);
                let kept_nothing = Withheld::invalid("the connector keeps no blocks for a decode");
                let withheld = withheld.unwrap_or(kept_nothing);
                Err(refused(withheld.kind, &withheld))
            }
        }
    }
}

/// Builds the decode's parameters for a MooncakeConnector, whose prefill answers with none.
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

/// Published blocks, reserved for a decode.
///
/// The lease lasts for `kv_lease_duration` of `kv_connector_extra_config` (30 s by default).
/// Heartbeats of a decode that waits for the blocks renew it.
///
/// Dropping the lease before its end takes the blocks back. Decodes that still want them are
/// refused, and the engine may reuse the blocks at once. Two cases are different:
///
/// - A vLLM that is reading the blocks cannot notice that they were reused. With such peers, wait
///   for the end of the lease.
/// - With NixlPushConnector this engine may be writing the blocks to a peer, and ranks on other
///   hosts have to acknowledge the release. The engine may then reuse the blocks only after
///   [`outcomes`](Connector::outcomes) returns `Free` for the request.
#[must_use = "dropping a lease takes the blocks back"]
pub struct Lease {
    connector: Connector,
    request: RequestId,
    slot: Arc<Slot<Released>>,
    over: bool,
}

impl Lease {
    /// Returns the name of the request.
    pub fn request(&self) -> &RequestId {
        &self.request
    }

    /// Waits until the decode has fetched the blocks or the lease has expired. The engine may then
    /// reuse the blocks, unless the result is [`Released::Lost`].
    pub fn released(self) -> impl Future<Output = Released> + Send {
        self
    }

    /// Blocks the thread until the lease ends, as [`released`](Self::released) does without
    /// blocking.
    ///
    /// # Errors
    /// Returns the lease itself, which continues, if it has not ended by the deadline.
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
