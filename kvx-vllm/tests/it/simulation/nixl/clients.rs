//! The parameters of both legs: what the proxy passes on, and what it writes itself.

use kvx_vllm::Version;
use kvx_vllm::params::{RemoteBlocks, TransferMode, TransferParams};

use super::Nixl;
use crate::simulation::engine::End;
use crate::simulation::world::{DECODE, PREFILL, SECOND, World};

impl World<Nixl> {
    /// Plans the decode leg of a push, whose parameters a proxy writes.
    pub(super) fn push(&mut self, number: usize) {
        let client = &mut self.clients[number];
        let engine = &self.engines[client.legs[PREFILL].engine];
        let shared = format!("cmpl-{number}-0");
        let at = &engine.settings.address;
        let mut remote =
            RemoteBlocks::new(engine.id.as_str(), shared, &*at.host, at.port, Vec::new());
        remote.tp_size = engine.settings.tp_size;
        remote.mode = TransferMode::Push;
        remote.num_tokens = Some(client.prompt.into());
        // A router names the mode, whatever the engines write.
        let version = engine.settings.version.max(Version::V0_28);
        client.own = Some(Box::new(TransferParams::prefilled(remote, version)));
        let delay = self.random.skewed(0..2 * SECOND);
        self.start_leg_after(delay, number, DECODE);
    }

    /// Returns parameters that have travelled as JSON, as the prefill engine writes it.
    pub(super) fn through_the_proxy(
        &self,
        number: usize,
        params: &TransferParams,
    ) -> Box<TransferParams> {
        let prefill = &self.engines[self.clients[number].legs[PREFILL].engine];
        let text = params.to_value(prefill.settings.version).expect("right parameters").to_string();
        let value = serde_json::from_str(&text).expect("JSON");
        Box::new(TransferParams::from_value(&value).expect("right parameters"))
    }

    pub(super) fn leg_ended(&mut self, number: usize, leg: usize, end: End) -> Result<(), String> {
        let in_time = self.now < self.clients[number].deadline;
        match end {
            // After the deadline, this client no longer waits for an answer.
            End::Finished(params) if leg == PREFILL && in_time => {
                return self.prefilled(number, params);
            }
            // The proxy gives up and aborts the decode leg of a push.
            End::Error if leg == PREFILL => self.abort_leg(number, DECODE)?,
            _ => {}
        }
        self.answer_client(number, &end)?;
        if let End::Finished(Some(params)) = end
            && leg == DECODE
            && self.random.percent(50)
            && self.clients.len() < 2 * self.scenario.clients
        {
            self.next_turn(number, params);
        }
        Ok(())
    }

    /// Handles the answer of a prefill, whose parameters the decode leg of a pull gets.
    fn prefilled(
        &mut self,
        number: usize,
        params: Option<Box<TransferParams>>,
    ) -> Result<(), String> {
        if self.scenario.own.mode == TransferMode::Push {
            return Ok(());
        }
        let client = &mut self.clients[number];
        let leg = &client.legs[PREFILL];
        let params =
            params.ok_or_else(|| format!("{} was prefilled, but nothing was published", leg.id))?;
        never_stops_vllm(&params, client.prompt, self.engines[leg.engine].settings.version)?;
        // Some answers are delayed, and some have no parameters.
        let delay = if self.random.percent(10) { 40 * SECOND } else { SECOND };
        let delay = self.random.skewed(0..delay);
        client.own = (!self.random.percent(3)).then_some(params);
        self.start_leg_after(delay, number, DECODE);
        Ok(())
    }

    /// Adds a client that continues a conversation with the decode's parameters.
    fn next_turn(&mut self, before: usize, params: Box<TransferParams>) {
        let turn = self.new_client();
        let before = &self.clients[before];
        let (conversation, decode) = (before.conversation, before.legs[DECODE].engine);
        let prompt = before.prompt + before.output + self.random.within(0..8) as u32;
        let client = &mut self.clients[turn];
        client.conversation = conversation;
        client.prompt = prompt.min(self.scenario.longest_prompt() + 8);
        client.legs[DECODE].engine = decode;
        client.own = Some(params);
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
