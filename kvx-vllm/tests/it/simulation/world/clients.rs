//! Clients, and the proxy in front of the engines: the two legs of each request, and its single
//! end.

use kvx_vllm::Version;
use kvx_vllm::engine::RequestId;
use kvx_vllm::params::{RemoteBlocks, TransferMode, TransferParams};

use super::{Event, MILLISECOND, SECOND, World};
use crate::simulation::engine::{Asked, End};

pub(super) struct Client {
    pub(super) conversation: u32,
    pub(super) prompt: u32,
    pub(super) output: u32,
    pub(super) prefill: usize,
    pub(super) decode: usize,
    pub(super) deadline: u64,
    pub(super) prefill_id: RequestId,
    pub(super) decode_id: RequestId,
    pub(super) lives: (u32, u32),
    /// The parameters that an earlier turn returned.
    pub(super) earlier: Option<Box<TransferParams>>,
    /// Whether the prefill leg and the decode leg are running.
    pub(super) running: (bool, bool),
    pub(super) over: bool,
}

impl World {
    pub(super) fn new_client(&mut self, turn: Option<(usize, Box<TransferParams>)>) {
        let number = self.clients.len();
        let random = &mut self.random;
        let start = self.now + random.skewed(0..10 * SECOND);
        let (p, d) = (self.scenario.prefills, self.scenario.decodes);
        let mut name = || RequestId::from(format!("cmpl-{number}-0-{:08x}", random.word() as u32));
        let (prefill_id, decode_id) = (name(), name());
        let longest = u64::from(self.scenario.blocks) * 4 / 2;
        let mut client = Client {
            conversation: number as u32,
            prompt: random.within(1..longest) as u32,
            output: random.within(1..9) as u32,
            prefill: random.within(0..p as u64) as usize,
            decode: p + random.within(0..d as u64) as usize,
            deadline: start + random.one_of(&[5, 30, 120]) * SECOND,
            prefill_id,
            decode_id,
            lives: (0, 0),
            earlier: None,
            running: (false, false),
            over: false,
        };
        if let Some((before, params)) = turn {
            let before = &self.clients[before];
            client.conversation = before.conversation;
            client.prompt = (before.prompt + before.output + random.within(0..8) as u32)
                .min(longest as u32 + 8);
            client.decode = before.decode;
            client.earlier = Some(params);
        }
        if self.random.percent(5 + self.scenario.trouble) {
            let life = self.random.skewed(0..client.deadline - start);
            self.after(start - self.now + life, Event::Abort(number));
        }
        self.after(client.deadline - self.now, Event::GivesUp(number));
        self.clients.push(client);
        self.after(start - self.now, Event::Start(number));
    }

    pub(super) fn start(&mut self, number: usize) {
        let client = &mut self.clients[number];
        if client.over {
            return;
        }
        let asked = match client.earlier.take() {
            Some(params) => *params,
            None => TransferParams::ask_prefill(),
        };
        let (prefill, id) = (client.prefill, client.prefill_id.clone());
        client.lives.0 = self.engines[prefill].life;
        client.running.0 = true;
        let request = (number, client.conversation, client.prompt, 1);
        let deadline = client.deadline;
        self.engines[prefill].arrive(
            self.now,
            &id,
            request,
            Asked::Nixl(&asked),
            (deadline, self.now, 0),
        );
        self.wake(prefill, self.now);
        if self.scenario.mode == TransferMode::Push {
            let engine = &self.engines[prefill];
            let version = engine.settings.version;
            let shared = format!("cmpl-{number}-0");
            let at = &engine.settings.address;
            let mut remote =
                RemoteBlocks::new(engine.id.as_str(), shared, &*at.host, at.port, Vec::new());
            remote.tp_size = self.scenario.prefill_tp;
            remote.mode = TransferMode::Push;
            remote.num_tokens = Some(self.clients[number].prompt.into());
            // A router names the mode, whatever the engines write.
            let params = TransferParams::prefilled(remote, version.max(Version::V0_28));
            let delay = self.random.skewed(0..2 * SECOND);
            self.after(delay, Event::ToDecode(number, Some(Box::new(params))));
        }
    }

    pub(super) fn decode_leg(&mut self, number: usize, params: Option<Box<TransferParams>>) {
        let client = &mut self.clients[number];
        if client.over {
            return;
        }
        client.running.1 = true;
        let (decode, prefill, id) = (client.decode, client.prefill, client.decode_id.clone());
        client.lives.1 = self.engines[decode].life;
        let whole_blocks = u64::from(client.prompt / 4);
        let cached = if self.random.percent(40) {
            self.random.within(0..whole_blocks + 1) as u32
        } else {
            0
        };
        let hold = if self.random.percent(20) { self.random.skewed(0..20 * SECOND) } else { 0 };
        let request = (number, client.conversation, client.prompt, client.output);
        let deadline = client.deadline;
        // The parameters travel as JSON, as the prefill engine writes it.
        let version = self.engines[prefill].settings.version;
        let params = params.map(|params| {
            let text = params.to_value(version).expect("right parameters").to_string();
            TransferParams::from_value(&serde_json::from_str(&text).expect("JSON"))
                .expect("right parameters")
        });
        self.engines[decode].arrive(
            self.now,
            &id,
            request,
            params.as_ref().map_or(Asked::Nothing, Asked::Nixl),
            (deadline, self.now + hold, cached),
        );
        self.wake(decode, self.now);
    }

    pub(super) fn abort(&mut self, number: usize) -> Result<(), String> {
        let client = &mut self.clients[number];
        if client.over {
            return Ok(());
        }
        client.over = true;
        self.summary.aborted += 1;
        let legs = [
            (client.prefill, client.lives.0, client.prefill_id.clone()),
            (client.decode, client.lives.1, client.decode_id.clone()),
        ];
        for (engine, life, id) in legs {
            if self.engines[engine].life == life {
                self.engines[engine].abort(self.now, &id)?;
                self.wake(engine, self.now);
            }
        }
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
        if client.over {
            return Ok(());
        }
        if *id == client.prefill_id {
            client.running.0 = false;
            match end {
                // This client no longer waits for an answer.
                End::Finished(_) if self.now >= client.deadline => {}
                End::Finished(params) if self.scenario.mode == TransferMode::Pull => {
                    let params = params
                        .ok_or_else(|| format!("{id} was prefilled, but nothing was published"))?;
                    never_stops_vllm(
                        &params,
                        client.prompt,
                        self.engines[engine].settings.version,
                    )?;
                    // Some answers are delayed, and some have no parameters.
                    let delay = if self.random.percent(10) { 40 * SECOND } else { SECOND };
                    let delay = self.random.skewed(0..delay);
                    let params = (!self.random.percent(3)).then_some(params);
                    self.after(delay, Event::ToDecode(number, params));
                    return Ok(());
                }
                End::Finished(_) => return Ok(()),
                End::Error => {
                    // The proxy gives up and aborts the decode leg of a push.
                    let (decode, life, id) =
                        (client.decode, client.lives.1, client.decode_id.clone());
                    if client.running.1 && self.engines[decode].life == life {
                        self.engines[decode].abort(self.now, &id)?;
                        self.wake(decode, self.now);
                    }
                }
            }
        }
        let client = &mut self.clients[number];
        client.over = true;
        let late = self.now.saturating_sub(client.deadline);
        if late > 100 * MILLISECOND {
            return Err(format!("client {number} got its answer {late} us after its deadline"));
        }
        match end {
            End::Finished(Some(params)) if engine == client.decode && self.random.percent(50) => {
                if self.clients.len() < 2 * self.scenario.clients {
                    self.new_client(Some((number, params)));
                }
            }
            End::Finished(_) => {}
            End::Error => self.summary.errors += 1,
        }
        Ok(())
    }
}

/// Checks that an answer has no parameters that would stop vLLM's decode engine.
fn never_stops_vllm(params: &TransferParams, prompt: u32, version: Version) -> Result<(), String> {
    if !version.blocks_per_group() {
        return Ok(());
    }
    let value = params.to_value(version).map_err(|error| error.to_string())?;
    let blocks = value["remote_block_ids"].as_array().ok_or("no block ids")?;
    let nested = blocks.iter().all(serde_json::Value::is_array);
    let enough = blocks
        .iter()
        .all(|group| group.as_array().is_some_and(|ids| ids.len() == prompt.div_ceil(4) as usize));
    let named = value["remote_request_id"].as_str().is_some_and(|name| !name.is_empty());
    if nested && enough && named { Ok(()) } else { Err(format!("vLLM would not survive {value}")) }
}
