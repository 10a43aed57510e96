//! Clients and the proxy in front of the engines: both legs at once, and one end.

use kvx_connector::engine::RequestId;
use kvx_connector::params::{MooncakeLeg, MooncakeParams, TransferId};

use super::{Event, MILLISECOND, SECOND, World};
use crate::engine::{Asked, End};

pub(super) struct Client {
    conversation: u32,
    prompt: u32,
    output: u32,
    pub(super) prefill: usize,
    pub(super) decode: usize,
    deadline: u64,
    prefill_id: RequestId,
    decode_id: RequestId,
    transfer: TransferId,
    lives: (u32, u32),
    pub(super) prefilling: bool,
    pub(super) decoding: bool,
    /// When its prefill was aborted under its decode.
    alone_since: Option<u64>,
    pub(super) over: bool,
}

impl World {
    pub(super) fn new_client(&mut self) {
        let number = self.clients.len();
        let random = &mut self.random;
        let start = random.skewed(0..10 * SECOND);
        let (p, d) = (self.scenario.prefills, self.scenario.decodes);
        let longest = u64::from(self.scenario.blocks) * 4 / 2;
        let client = Client {
            conversation: number as u32,
            prompt: random.within(1..longest) as u32,
            output: random.within(1..9) as u32,
            prefill: random.within(0..p as u64) as usize,
            decode: p + random.within(0..d as u64) as usize,
            deadline: start + random.one_of(&[5, 30, 120]) * SECOND,
            prefill_id: format!("p-{number}").into(),
            decode_id: format!("d-{number}").into(),
            transfer: TransferId::new(format!("xfer-{number}")).expect("it is not empty"),
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
        for event in [Event::Prefill(number), Event::Decode(number)] {
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
        let request = (number, client.conversation, client.prompt, 1);
        let times = (client.deadline, self.now, 0);
        self.engines[prefill].arrive(self.now, &id, request, Asked::Mooncake(&params), times);
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
        let cached = if self.random.percent(40) { self.random.within(0..whole_blocks + 1) as u32 } else { 0 };
        let hold = if self.random.percent(20) { self.random.skewed(0..20 * SECOND) } else { 0 };
        let leg = MooncakeLeg::Decode {
            remote_engine_id: self.engines[client.prefill].id.clone(),
            remote_bootstrap_addr: format!("http://host-{}:8998", client.prefill),
        };
        let params = MooncakeParams::new(client.transfer.clone(), leg);
        let request = (number, client.conversation, client.prompt, client.output);
        let times = (client.deadline, self.now + hold, cached);
        self.engines[decode].arrive(self.now, &id, request, Asked::Mooncake(&params), times);
        self.wake(decode, self.now);
    }

    pub(super) fn abort(&mut self, number: usize) -> Result<(), String> {
        if self.clients[number].over {
            return Ok(());
        }
        self.summary.aborted += 1;
        self.end_client(number)
    }

    /// Nobody waits for an answer any more: both legs go.
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

    /// The prefill leg ends alone, as under a proxy that does not look at it.
    pub(super) fn prefill_dies(&mut self, number: usize) -> Result<(), String> {
        let client = &mut self.clients[number];
        let (prefill, id) = (client.prefill, client.prefill_id.clone());
        if !client.prefilling || client.over || self.engines[prefill].life != client.lives.0 {
            return Ok(());
        }
        client.prefilling = false;
        client.alone_since = Some(self.now);
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
            // 20 s may pass before it is admitted, 14 until all are told that it is over.
            let waited = alone.map_or(0, |alone| self.now.saturating_sub(alone));
            if self.scenario.trouble == 0 && waited > 34 * SECOND {
                return Err(format!(
                    "client {number} waited {waited} us for a prefill that had been aborted"
                ));
            }
        }
        Ok(())
    }
}
