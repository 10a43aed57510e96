//! Both legs of a client. The proxy sends them at once, or before vLLM 0.16 also one after the
//! other.

use kvx_vllm::engine::RequestId;
use kvx_vllm::params::{
    KvxPrefill, MooncakeLeg, MooncakeParams, MooncakeTransferId, OlderMooncakeLeg,
    OlderMooncakeParams, TransferParams,
};

use super::{MAY_WRITE_FOR, Mooncake};
use crate::random::Random;
use crate::simulation::engine::{Asked, End};
use crate::simulation::world::{DECODE, PREFILL, SECOND, Scenario, World};

/// A client's own parts.
pub(crate) struct Client {
    transfer: MooncakeTransferId,
    older: Option<Older>,
    /// The time at which its prefill was aborted while the decode leg was running.
    alone_since: Option<u64>,
}

/// The options of a client before vLLM 0.16.
struct Older {
    /// True if the decode side gets no kvx extensions.
    plain: bool,
    /// True if its proxy knows the prefill's address and sends both legs at once.
    at_once: bool,
    /// The prefill's answer.
    answer: Option<Box<TransferParams>>,
}

impl Client {
    /// Draws the options of a client, and the names of its legs.
    pub(super) fn drawn(
        scenario: &Scenario<Mooncake>,
        random: &mut Random,
        number: usize,
    ) -> (Self, [RequestId; 2]) {
        let [prefill_tp, decode_tp] = scenario.tp;
        let older = scenario.own.older.then(|| Older {
            plain: scenario.own.foreign || (prefill_tp == decode_tp && random.percent(20)),
            at_once: random.percent(25),
            answer: None,
        });
        // Before vLLM 0.16, a plain decode and its prefill share only the name that the proxy gives
        // both.
        let names = match &older {
            None => [format!("p-{number}"), format!("d-{number}")],
            Some(_) if random.percent(20) => {
                [format!("r-{number}"), format!("r-{number}-{number:08x}")]
            }
            Some(_) => [format!("r-{number}-{number:08x}"), format!("r-{number}-ffff{number:04x}")],
        };
        let transfer = MooncakeTransferId::new(format!("xfer-{number}")).expect("it is not empty");
        (Client { transfer, older, alone_since: None }, names.map(RequestId::from))
    }

    /// Returns whether its decode leg waits for the prefill's answer.
    pub(super) fn waits_for_the_prefill(&self) -> bool {
        self.older.as_ref().is_some_and(|older| !older.at_once && older.answer.is_none())
    }
}

impl World<Mooncake> {
    /// Returns the parameters of a leg.
    pub(super) fn params(&self, number: usize, leg: usize) -> Asked {
        let client = &self.clients[number];
        let prefill = &client.legs[PREFILL];
        match &client.own.older {
            Some(_) if leg == PREFILL => {
                Asked::OlderMooncake(OlderMooncakeParams::new(OlderMooncakeLeg::Prefill))
            }
            Some(older) => {
                Asked::OlderMooncake(self.older_params(older, prefill.engine, &prefill.id))
            }
            None => {
                let leg = match leg {
                    PREFILL => MooncakeLeg::Prefill,
                    _ => MooncakeLeg::Decode {
                        remote_engine_id: self.engines[prefill.engine].id.clone(),
                        remote_bootstrap_addr: format!("http://host-{}:8998", prefill.engine),
                    },
                };
                Asked::Mooncake(MooncakeParams::new(client.own.transfer.clone(), leg))
            }
        }
    }

    /// Returns whether a decode engine asks for this request as a plain agent before vLLM 0.16.
    pub(super) fn asks_plainly(&self, request: &RequestId) -> bool {
        let mut clients = self.clients.iter().filter(|client| client.legs[DECODE].id == *request);
        clients.any(|client| client.own.older.as_ref().is_some_and(|older| older.plain))
    }

    /// Returns a decode leg's parameters before vLLM 0.16: the prefill's answer, or the proxy's
    /// own.
    fn older_params(&self, older: &Older, prefill: usize, id: &RequestId) -> OlderMooncakeParams {
        let answer = older.answer.as_ref().map(|answer| OlderMooncakeParams::from_params(answer));
        let mut params =
            answer.transpose().expect("the prefill's answer is valid").unwrap_or_else(|| {
                let there = &self.engines[prefill];
                let request_id = Some(id.to_string());
                OlderMooncakeParams::new(OlderMooncakeLeg::Decode {
                    remote_host: there.settings.address.host.to_string(),
                    remote_port: there.settings.address.port,
                    kvx: Some(KvxPrefill { engine_id: there.id.clone(), request_id }),
                })
            });
        if let OlderMooncakeLeg::Decode { kvx, .. } = &mut params.leg
            && older.plain
        {
            (*kvx, params.remote_num_tokens) = (None, None);
        }
        params
    }

    /// Ends only the prefill leg, as under a proxy that ignores its errors.
    pub(super) fn prefill_dies(&mut self, number: usize) -> Result<(), String> {
        let client = &mut self.clients[number];
        let leg = &client.legs[PREFILL];
        if !leg.running || client.over || self.engines[leg.engine].life != leg.life {
            return Ok(());
        }
        client.own.alone_since = Some(self.now);
        if client.own.waits_for_the_prefill() {
            client.over = true;
            self.summary.errors += 1;
        }
        self.abort_leg(number, PREFILL)
    }

    pub(super) fn prefill_ended(&mut self, number: usize, end: End) -> Result<(), String> {
        let client = &mut self.clients[number];
        if matches!(end, End::Error) {
            client.own.alone_since.get_or_insert(self.now);
        }
        if !client.own.waits_for_the_prefill() {
            return Ok(());
        }
        match (end, &mut client.own.older) {
            // After the deadline, the client no longer waits for an answer.
            (End::Finished(Some(answer)), Some(older)) if self.now < client.deadline => {
                older.answer = Some(answer);
                let delay = self.random.skewed(0..2 * SECOND);
                self.start_leg_after(delay, number, DECODE);
                Ok(())
            }
            (End::Finished(None), _) => {
                Err(format!("{} does not return its address", client.legs[PREFILL].id))
            }
            _ => self.answer_client(number, &End::Error),
        }
    }

    pub(super) fn decode_ended(&mut self, number: usize, end: &End) -> Result<(), String> {
        self.answer_client(number, end)?;
        let client = &self.clients[number];
        // Admission may take 20 s, and ending all parts another 14. A plain agent proves nothing.
        let waited = client.own.alone_since.map_or(0, |alone| self.now.saturating_sub(alone));
        let held = if self.asks_plainly(&client.legs[DECODE].id) { MAY_WRITE_FOR } else { 0 };
        let is_error = matches!(end, End::Error);
        if is_error && self.scenario.trouble == 0 && waited > 34 * SECOND + held {
            return Err(format!(
                "client {number} waited {waited} us for a prefill that had been aborted"
            ));
        }
        Ok(())
    }
}
