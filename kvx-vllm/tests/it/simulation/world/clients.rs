//! Clients, and the proxy in front of the engines: the two legs of each request, and its single
//! end.

use kvx_vllm::engine::RequestId;

use super::{DECODE, Event, MILLISECOND, Protocol, SECOND, World};
use crate::simulation::engine::End;

pub(crate) struct Client<C> {
    pub(crate) conversation: u32,
    pub(crate) prompt: u32,
    pub(crate) output: u32,
    pub(crate) deadline: u64,
    /// The prefill leg and the decode leg.
    pub(crate) legs: [Leg; 2],
    pub(crate) over: bool,
    pub(crate) own: C,
}

/// A request at one of the engines.
pub(crate) struct Leg {
    pub(crate) engine: usize,
    pub(crate) id: RequestId,
    /// The engine's incarnation when it arrived.
    pub(crate) life: u32,
    pub(crate) running: bool,
}

impl Leg {
    fn new(engine: usize, id: RequestId) -> Self {
        Leg { engine, id, life: 0, running: false }
    }
}

impl<P: Protocol> World<P> {
    /// Adds a client. Returns its number.
    pub(crate) fn new_client(&mut self) -> usize {
        let number = self.clients.len();
        let delay = self.random.skewed(0..10 * SECOND);
        let (own, [prefill_id, decode_id]) = P::client(self, number);
        let (random, scenario) = (&mut self.random, &self.scenario);
        let (p, d) = (scenario.prefills, scenario.decodes);
        let prompt = random.within(1..scenario.longest_prompt().into()) as u32;
        let output = random.within(1..9) as u32;
        let prefill = random.within(0..p as u64) as usize;
        let decode = p + random.within(0..d as u64) as usize;
        let lifetime = random.one_of(&[5, 30, 120]) * SECOND;
        self.clients.push(Client {
            conversation: number as u32,
            prompt,
            output,
            deadline: self.now + delay + lifetime,
            legs: [Leg::new(prefill, prefill_id), Leg::new(decode, decode_id)],
            over: false,
            own,
        });
        if random.percent(5 + scenario.trouble) {
            let life = random.skewed(0..lifetime);
            self.after(delay + life, Event::Abort(number));
        }
        self.after(delay + lifetime, Event::GivesUp(number));
        P::start(self, number, delay);
        number
    }

    pub(crate) fn start_leg_after(&mut self, delay: u64, number: usize, leg: usize) {
        self.after(delay, Event::Leg(number, leg));
    }

    pub(super) fn start_leg(&mut self, number: usize, leg: usize) {
        let Client { over, conversation, prompt, output, deadline, .. } = self.clients[number];
        if over {
            return;
        }
        let random = &mut self.random;
        let (mut tokens, mut cached, mut hold) = (1, 0, 0);
        if leg == DECODE {
            tokens = output;
            if random.percent(40) {
                cached = random.within(0..u64::from(prompt / 4) + 1) as u32;
            }
            if random.percent(20) {
                hold = random.skewed(0..20 * SECOND);
            }
        }
        let asked = P::ask(self, number, leg);
        let leg = &mut self.clients[number].legs[leg];
        let engine = leg.engine;
        (leg.life, leg.running) = (self.engines[engine].life, true);
        let request = (number, conversation, prompt, tokens);
        let times = (deadline, self.now + hold, cached);
        self.engines[engine].arrive(self.now, &leg.id, request, asked, times);
        self.wake(engine, self.now);
    }

    /// Ends a client that no engine will answer, at its deadline.
    pub(super) fn gives_up(&mut self, number: usize) {
        let client = &mut self.clients[number];
        if !client.over && !client.legs.iter().any(|leg| leg.running) {
            client.over = true;
            self.summary.errors += 1;
        }
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
        self.clients[number].over = true;
        (0..2).try_for_each(|leg| self.abort_leg(number, leg))
    }

    /// Ends a leg that is running at an engine that has not restarted.
    pub(crate) fn abort_leg(&mut self, number: usize, leg: usize) -> Result<(), String> {
        let leg = &mut self.clients[number].legs[leg];
        let engine = leg.engine;
        if leg.running && self.engines[engine].life == leg.life {
            leg.running = false;
            self.engines[engine].abort(self.now, &leg.id)?;
            self.wake(engine, self.now);
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
        let leg = client.legs.iter().position(|leg| leg.id == *id && leg.engine == engine);
        let Some(leg) = leg else {
            return Err(format!("client {number} was answered by another engine"));
        };
        client.legs[leg].running = false;
        if client.over { Ok(()) } else { P::ended(self, number, leg, end) }
    }

    /// Gives a client its answer.
    pub(crate) fn answer_client(&mut self, number: usize, end: &End) -> Result<(), String> {
        let client = &mut self.clients[number];
        client.over = true;
        let late = self.now.saturating_sub(client.deadline);
        if late > 100 * MILLISECOND {
            return Err(format!("client {number} got its answer {late} us after its deadline"));
        }
        self.summary.errors += u32::from(matches!(end, End::Error));
        Ok(())
    }
}
