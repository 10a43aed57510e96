//! Clients, and the proxy in front of the engines. It sends both legs at once, or before vLLM 0.16
//! also one after the other.

use kvx_vllm::engine::RequestId;
use kvx_vllm::params::{
    KvxPrefill, MooncakeLeg, MooncakeParams, MooncakeTransferId, OlderMooncakeLeg,
    OlderMooncakeParams, TransferParams,
};

use super::{Event, MAY_WRITE_FOR, MILLISECOND, SECOND, World};
use crate::simulation::engine::{Asked, End};

pub(super) struct Client {
    conversation: u32,
    prompt: u32,
    output: u32,
    pub(super) prefill: usize,
    pub(super) decode: usize,
    deadline: u64,
    prefill_id: RequestId,
    decode_id: RequestId,
    transfer: MooncakeTransferId,
    older: Option<Older>,
    lives: (u32, u32),
    pub(super) prefilling: bool,
    pub(super) decoding: bool,
    /// The time at which its prefill was aborted while the decode leg was running.
    alone_since: Option<u64>,
    pub(super) over: bool,
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
    /// Returns whether its decode leg waits for the prefill's answer.
    fn waits_for_the_prefill(&self) -> bool {
        self.older.as_ref().is_some_and(|older| !older.at_once && older.answer.is_none())
    }
}

impl World {
    pub(super) fn new_client(&mut self) {
        let number = self.clients.len();
        let random = &mut self.random;
        let start = random.skewed(0..10 * SECOND);
        let scenario = &self.scenario;
        let older = scenario.older.then(|| Older {
            plain: scenario.foreign
                || (scenario.prefill_tp == scenario.decode_tp && random.percent(20)),
            at_once: random.percent(25),
            answer: None,
        });
        // Before vLLM 0.16, a plain decode and its prefill share only the name that the proxy gives
        // both.
        let (prefill_id, decode_id) = match &older {
            None => (format!("p-{number}"), format!("d-{number}")),
            Some(_) if random.percent(20) => {
                (format!("r-{number}"), format!("r-{number}-{number:08x}"))
            }
            Some(_) => (format!("r-{number}-{number:08x}"), format!("r-{number}-ffff{number:04x}")),
        };
        let at_once = older.as_ref().is_none_or(|older| older.at_once);
        let (p, d) = (self.scenario.prefills, self.scenario.decodes);
        let longest = u64::from(self.scenario.blocks) * 4 / 2;
        let client = Client {
            conversation: number as u32,
            prompt: random.within(1..longest) as u32,
            output: random.within(1..9) as u32,
            prefill: random.within(0..p as u64) as usize,
            decode: p + random.within(0..d as u64) as usize,
            deadline: start + random.one_of(&[5, 30, 120]) * SECOND,
            prefill_id: prefill_id.into(),
            decode_id: decode_id.into(),
            transfer: MooncakeTransferId::new(format!("xfer-{number}")).expect("it is not empty"),
            older,
            lives: (0, 0),
            prefilling: false,
            decoding: false,
            alone_since: None,
            over: false,
        };
        let lives = client.deadline - start;
        if random.percent(5 + self.scenario.trouble) {
            let life = random.skewed(0..lives);
            self.after(start + life, Event::Abort(number));
        } else if self.random.percent(5 + self.scenario.trouble) {
            let life = self.random.skewed(0..lives);
            self.after(start + life, Event::PrefillDies(number));
        }
        self.after(client.deadline, Event::GivesUp(number));
        self.clients.push(client);
        let legs = [Some(Event::Prefill(number)), at_once.then_some(Event::Decode(number))];
        for event in legs.into_iter().flatten() {
            let late = self.random.skewed(0..2 * SECOND);
            self.after(start + late, event);
        }
    }

    pub(super) fn prefill_leg(&mut self, number: usize) {
        let client = &mut self.clients[number];
        if client.over {
            return;
        }
        let (prefill, id) = (client.prefill, client.prefill_id.clone());
        client.lives.0 = self.engines[prefill].life;
        client.prefilling = true;
        let params = MooncakeParams::new(client.transfer.clone(), MooncakeLeg::Prefill);
        let older =
            client.older.is_some().then(|| OlderMooncakeParams::new(OlderMooncakeLeg::Prefill));
        let asked = older.as_ref().map_or(Asked::Mooncake(&params), Asked::OlderMooncake);
        let request = (number, client.conversation, client.prompt, 1);
        let times = (client.deadline, self.now, 0);
        self.engines[prefill].arrive(self.now, &id, request, asked, times);
        self.wake(prefill, self.now);
    }

    pub(super) fn decode_leg(&mut self, number: usize) {
        let client = &mut self.clients[number];
        if client.over {
            return;
        }
        client.decoding = true;
        let (decode, id) = (client.decode, client.decode_id.clone());
        client.lives.1 = self.engines[decode].life;
        let whole_blocks = u64::from(client.prompt / 4);
        let cached = if self.random.percent(40) {
            self.random.within(0..whole_blocks + 1) as u32
        } else {
            0
        };
        let hold = if self.random.percent(20) { self.random.skewed(0..20 * SECOND) } else { 0 };
        let client = &self.clients[number];
        let leg = MooncakeLeg::Decode {
            remote_engine_id: self.engines[client.prefill].id.clone(),
            remote_bootstrap_addr: format!("http://host-{}:8998", client.prefill),
        };
        let params = MooncakeParams::new(client.transfer.clone(), leg);
        let older = client.older.as_ref().map(|older| self.older_params(client, older));
        let asked = older.as_ref().map_or(Asked::Mooncake(&params), Asked::OlderMooncake);
        let request = (number, client.conversation, client.prompt, client.output);
        let times = (client.deadline, self.now + hold, cached);
        self.engines[decode].arrive(self.now, &id, request, asked, times);
        self.wake(decode, self.now);
    }

    /// Returns whether a decode engine asks for this request as a plain agent before vLLM 0.16.
    pub(super) fn asks_plainly(&self, request: &RequestId) -> bool {
        let is_plain = |client: &Client| client.older.as_ref().is_some_and(|older| older.plain);
        self.clients.iter().any(|client| client.decode_id == *request && is_plain(client))
    }

    /// Returns a decode leg's parameters before vLLM 0.16: the prefill's answer, or the proxy's
    /// own.
    fn older_params(&self, client: &Client, older: &Older) -> OlderMooncakeParams {
        let answer = older.answer.as_ref().map(|answer| OlderMooncakeParams::from_params(answer));
        let mut params =
            answer.transpose().expect("the prefill's answer is valid").unwrap_or_else(|| {
                let there = &self.engines[client.prefill];
                let request_id = Some(client.prefill_id.to_string());
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

    pub(super) fn abort(&mut self, number: usize) -> Result<(), String> {
        if self.clients[number].over {
            return Ok(());
        }
        self.summary.aborted += 1;
        self.end_client(number)
    }

    /// Ends both legs of a client that no longer waits for an answer.
    pub(super) fn end_client(&mut self, number: usize) -> Result<(), String> {
        let client = &mut self.clients[number];
        client.over = true;
        let legs = [
            (client.prefilling, client.prefill, client.lives.0, client.prefill_id.clone()),
            (client.decoding, client.decode, client.lives.1, client.decode_id.clone()),
        ];
        for (running, engine, life, id) in legs {
            if running && self.engines[engine].life == life {
                self.engines[engine].abort(self.now, &id)?;
                self.wake(engine, self.now);
            }
        }
        Ok(())
    }

    /// Ends only the prefill leg, as under a proxy that ignores its errors.
    pub(super) fn prefill_dies(&mut self, number: usize) -> Result<(), String> {
        let client = &mut self.clients[number];
        let (prefill, id) = (client.prefill, client.prefill_id.clone());
        if !client.prefilling || client.over || self.engines[prefill].life != client.lives.0 {
            return Ok(());
        }
        client.prefilling = false;
        client.alone_since = Some(self.now);
        if client.waits_for_the_prefill() {
            client.over = true;
            self.summary.errors += 1;
        }
        self.engines[prefill].abort(self.now, &id)?;
        self.wake(prefill, self.now);
        Ok(())
    }

    pub(super) fn ended(
        &mut self,
        engine: usize,
        number: usize,
        id: &RequestId,
        end: End,
    ) -> Result<(), String> {
        let client = &mut self.clients[number];
        if *id == client.prefill_id {
            client.prefilling = false;
            if matches!(end, End::Error) && client.alone_since.is_none() {
                client.alone_since = Some(self.now);
            }
            if client.over || !client.waits_for_the_prefill() {
                return Ok(());
            }
            match (end, &mut client.older) {
                (End::Finished(Some(answer)), Some(older)) => {
                    older.answer = Some(answer);
                    let delay = self.random.skewed(0..2 * SECOND);
                    self.after(delay, Event::Decode(number));
                }
                (End::Finished(_), _) => {
                    return Err(format!("{id} does not return its address"));
                }
                (End::Error, _) => {
                    client.over = true;
                    self.summary.errors += 1;
                }
            }
            return Ok(());
        }
        client.decoding = false;
        if client.over {
            return Ok(());
        }
        client.over = true;
        let (deadline, alone, decode) = (client.deadline, client.alone_since, client.decode);
        if engine != decode {
            return Err(format!("client {number} was answered by another engine"));
        }
        let late = self.now.saturating_sub(deadline);
        if late > 100 * MILLISECOND {
            return Err(format!("client {number} got its answer {late} us after its deadline"));
        }
        if matches!(end, End::Error) {
            self.summary.errors += 1;
            // Admission may take 20 s, and ending all parts another 14. A plain agent proves
            // nothing.
            let waited = alone.map_or(0, |alone| self.now.saturating_sub(alone));
            let held = if self.asks_plainly(id) { MAY_WRITE_FOR } else { 0 };
            if self.scenario.trouble == 0 && waited > 34 * SECOND + held {
                return Err(format!(
                    "client {number} waited {waited} us for a prefill that had been aborted"
                ));
            }
        }
        Ok(())
    }
}
