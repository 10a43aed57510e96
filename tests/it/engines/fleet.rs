//! The engines of a test, each in a separate process.

use std::process::Command;
use std::time::{Duration, Instant};

use kvx_testkit::{Child, Failure, Grandchild, Host, ResourceUsage, free_port};
use serde_json::{Value, json};

use crate::engines::engine::{Answer, LoadOrder, Order, Spec};
use crate::engines::{apart, libraries};

/// The environment variable with the settings of an engine's process.
pub(crate) const VARIABLE: &str = "KVX_TEST_ENGINE";
/// The time limit of every step of a test.
pub(crate) const CUT_OFF: Duration = Duration::from_secs(10);
/// The time by which an outcome may be late.
pub(crate) const GRACE: Duration = Duration::from_secs(1);

/// An engine that the test can stop and kill.
pub(crate) struct Engine {
    pub(crate) spec: Spec,
    pub(crate) port: u16,
    /// The port of the first data-parallel rank, at which the engine restarts.
    base: u16,
    /// The processes of the ranks, if they are separate.
    pub(crate) ranks: Vec<Grandchild>,
    child: Child,
    /// The engine has stopped itself during an order, and answers the order when it continues.
    amid: bool,
}

impl Drop for Engine {
    fn drop(&mut self) {
        if self.spec.apart {
            // Fails if it was never created.
            std::fs::remove_file(apart::path(self.child.pid())).ok();
        }
    }
}

fn other<T>(wanted: &str, answer: Answer) -> Result<T, Failure> {
    Err(Failure::new(format!("expected {wanted}, got {answer:?}")))
}

impl Engine {
    pub(crate) fn start(spec: Spec) -> Result<Self, Failure> {
        Engine::start_on(spec, None)
    }

    /// Starts an engine, on `host` if there is one.
    pub(crate) fn start_on(spec: Spec, host: Option<&Host>) -> Result<Self, Failure> {
        if spec.port != 0 {
            let port = spec.port;
            return Self::start_at(spec, port, host);
        }
        for _ in 0..4 {
            // No outgoing connection is assigned this port before the engine restarts at it. Ranks
            // have the ports above it.
            match Self::start_at(spec.clone(), free_port(7)?, host) {
                // Another process of the tests has bound it meanwhile.
                Err(why) if why.to_string().contains("is taken") => {}
                started => return started,
            }
        }
        Err(Failure::new("four ports in turn were taken by others".to_owned()))
    }

    fn start_at(spec: Spec, base: u16, host: Option<&Host>) -> Result<Self, Failure> {
        let program = std::env::current_exe()?;
        let mut command =
            host.map_or_else(|| Command::new(&program), |host| host.command(&program));
        command.env(
            VARIABLE,
            serde_json::to_string(&Spec { port: base, ..spec.clone() }).expect("specs are JSON"),
        );
        command.env("VLLM_NIXL_SIDE_CHANNEL_HOST", "127.0.0.1");
        command.envs(libraries::variables());
        command.envs(spec.variables.iter().map(|(name, value)| (name, value)));
        let child = Child::start(command)?;
        let mut engine = Engine { spec, base, port: 0, ranks: Vec::new(), child, amid: false };
        // The process ids of its ranks are known only after it has started.
        match engine.answer(2 * CUT_OFF)? {
            Answer::Ready { port, ranks } => {
                engine.port = port;
                let ranks = ranks.into_iter().map(|pid| Grandchild::of(pid.cast_signed()));
                engine.ranks = ranks.collect::<Result<_, _>>()?;
            }
            answer => return other("an engine", answer),
        }
        Ok(engine)
    }

    /// Kills the process if it still runs, and starts a new one in its place, at the same port.
    pub(crate) fn start_again(&mut self, id: &str) -> Result<(), Failure> {
        self.child.kill()?;
        let spec = Spec { id: id.to_owned(), ..self.spec.clone() };
        let until = Instant::now() + CUT_OFF;
        loop {
            match Engine::start_at(spec.clone(), self.base, None) {
                Ok(engine) => *self = engine,
                // The system may close the killed process's sockets later.
                Err(why) if why.to_string().contains("is taken") && Instant::now() < until => {
                    std::thread::sleep(Duration::from_millis(50));
                    continue;
                }
                Err(why) => return Err(why),
            }
            return Ok(());
        }
    }

    /// Starts another process as the first rank, after that was killed. It prints the outcome of
    /// joining in one line.
    pub(crate) fn start_rank_again(&self) -> Result<Child, Failure> {
        apart::again(self.child.pid(), &self.spec.shape)
    }

    pub(crate) fn process(&mut self) -> &mut Child {
        &mut self.child
    }

    fn answer(&self, patience: Duration) -> Result<Answer, Failure> {
        let line = self.child.hear(patience)?;
        serde_json::from_str(&line).map_err(|error| Failure::new(format!("{line}: {error}")))
    }

    pub(crate) fn ask(&mut self, order: &Order, patience: Duration) -> Result<Answer, Failure> {
        self.child.say(&serde_json::to_string(order).expect("orders are JSON"))?;
        self.answer(patience)
    }

    /// Computes and publishes a prompt, and returns its parameters.
    pub(crate) fn prefill(
        &mut self,
        request: &str,
        prompt: u64,
        tokens: u32,
    ) -> Result<Value, Failure> {
        self.prefill_within(CUT_OFF, request, prompt, tokens)
    }

    /// Computes and publishes a prompt; something may delay it by up to `limit`.
    pub(crate) fn prefill_within(
        &mut self,
        limit: Duration,
        request: &str,
        prompt: u64,
        tokens: u32,
    ) -> Result<Value, Failure> {
        let order = Order::Prefill { request: request.to_owned(), prompt, tokens };
        match self.ask(&order, limit)? {
            Answer::Params(params) => Ok(params),
            answer => other("parameters", answer),
        }
    }

    /// Spoils the block with this index of a prompt that it has published.
    pub(crate) fn spoil(&mut self, request: &str, block: usize) -> Result<(), Failure> {
        self.done(&Order::Spoil { request: request.to_owned(), block }, "a spoilt block")
    }

    /// Begins to load a prompt.
    pub(crate) fn decode(
        &mut self,
        load: &Load<'_>,
        params: &Value,
        within: Duration,
    ) -> Result<(), Failure> {
        self.done(&Order::Decode(load.order(params, within)), "a load")
    }

    /// Begins to load a prompt and holds its digest check. Returns whether the check is held.
    pub(crate) fn check(
        &mut self,
        load: &Load<'_>,
        params: &Value,
        within: Duration,
    ) -> Result<bool, Failure> {
        match self.ask(&Order::Check(load.order(params, within)), CUT_OFF)? {
            Answer::Held(held) => Ok(held),
            answer => other("a check", answer),
        }
    }

    /// Releases a held check, if there is one.
    pub(crate) fn let_go(&mut self) -> Result<(), Failure> {
        self.done(&Order::LetGo, "a check that goes on")
    }

    /// Begins to load a prompt and stops when some blocks have arrived. Returns whether it has
    /// stopped.
    pub(crate) fn stops_amid(
        &mut self,
        load: &Load<'_>,
        params: &Value,
        within: Duration,
    ) -> Result<bool, Failure> {
        // With SHM the decode's own thread copies the blocks, without a system call.
        let at_page = self.spec.backends == ["SHM"];
        let order = Order::StopAmid { load: load.order(params, within), at_page };
        self.child.say(&serde_json::to_string(&order).expect("orders are JSON"))?;
        let until = Instant::now() + CUT_OFF;
        while !self.child.is_stopped()? {
            match self.answer(Duration::from_millis(1)) {
                Ok(Answer::Held(false)) => return Ok(false),
                Ok(answer) => return other("a load", answer),
                Err(late) if Instant::now() >= until => return Err(late),
                Err(_) => {}
            }
        }
        self.amid = true;
        Ok(true)
    }

    /// Continues the stopped process.
    pub(crate) fn goes_on(&mut self) -> Result<(), Failure> {
        self.child.go_on()?;
        match std::mem::take(&mut self.amid).then(|| self.answer(CUT_OFF)).transpose()? {
            None | Some(Answer::Held(true)) => Ok(()),
            Some(answer) => other("a load that goes on", answer),
        }
    }

    /// Adds a request to the queue, without blocks.
    pub(crate) fn arrive(
        &mut self,
        load: &Load<'_>,
        params: &Value,
        within: Duration,
    ) -> Result<(), Failure> {
        self.done(&Order::Arrive(load.order(params, within)), "an arrival")
    }

    /// Gives a queued request blocks, unless it has already ended.
    pub(crate) fn admit(&mut self, request: &str) -> Result<(), Failure> {
        self.done(&Order::Admit { request: request.to_owned() }, "an admission")
    }

    fn done(&mut self, order: &Order, wanted: &str) -> Result<(), Failure> {
        match self.ask(order, CUT_OFF)? {
            Answer::Done => Ok(()),
            answer => other(wanted, answer),
        }
    }

    /// Waits for the outcome of a load.
    pub(crate) fn outcome(&mut self, request: &str, patience: Duration) -> Result<Answer, Failure> {
        match self
            .ask(&Order::Outcome { request: request.to_owned(), patience }, patience + CUT_OFF)?
        {
            Answer::Failed { kind, sentence } => {
                Err(Failure::new(format!("{request}: {kind}: {sentence}")))
            }
            answer => Ok(answer),
        }
    }

    /// Loads a prompt; fails unless every byte is right.
    pub(crate) fn loads(&mut self, load: &Load<'_>, params: &Value) -> Result<(), Failure> {
        self.decode(load, params, CUT_OFF)?;
        self.arrives(load.request, load.tokens)
    }

    /// Waits for the end of a load; fails unless every byte is right.
    pub(crate) fn arrives(&mut self, request: &str, tokens: u32) -> Result<(), Failure> {
        match self.outcome(request, CUT_OFF + GRACE)? {
            Answer::Loaded { tokens: loaded, .. } if loaded + 1 >= tokens => Ok(()),
            answer => other(&format!("all {tokens} tokens of {request}"), answer),
        }
    }

    /// Returns why a load failed; fails if the load succeeds or does not end by the deadline.
    pub(crate) fn fails(&mut self, request: &str, within: Duration) -> Result<String, Failure> {
        match self.outcome(request, within + GRACE)? {
            Answer::NotLoaded { why, took, .. } if took <= within + GRACE => Ok(why),
            answer => other(&format!("a failure of {request} within {within:?}"), answer),
        }
    }

    /// Fails unless the load ends by the deadline: with a failure or, if it `may_have_loaded`, with
    /// all bytes right. (Some backends read without the peer after the handshake.)
    pub(crate) fn ends(
        &mut self,
        request: &str,
        within: Duration,
        may_have_loaded: bool,
    ) -> Result<(), Failure> {
        match self.outcome(request, within + GRACE)? {
            Answer::NotLoaded { took, .. } if took <= within + GRACE => Ok(()),
            Answer::Loaded { .. } if may_have_loaded => Ok(()),
            answer => other(&format!("an end of {request} within {within:?}"), answer),
        }
    }

    pub(crate) fn abort(&mut self, request: &str) -> Result<(), Failure> {
        self.done(&Order::Abort { request: request.to_owned() }, "an abort")
    }

    /// Continues the stopped process with an abort.
    pub(crate) fn goes_on_with_an_abort(&mut self, request: &str) -> Result<(), Failure> {
        let order = Order::Abort { request: request.to_owned() };
        self.child.say(&serde_json::to_string(&order).expect("orders are JSON"))?;
        self.goes_on()?;
        match self.answer(CUT_OFF)? {
            Answer::Done => Ok(()),
            answer => other("an abort", answer),
        }
    }

    /// Computes a prompt in all free blocks.
    pub(crate) fn occupy(&mut self, prompt: u64) -> Result<(), Failure> {
        self.done(&Order::Occupy { prompt }, "a prompt in all blocks")
    }

    /// Fails unless those blocks still hold the computed prompt.
    pub(crate) fn is_unchanged(&mut self) -> Result<(), Failure> {
        self.done(&Order::IsUnchanged, "unchanged blocks")
    }

    /// Frees those blocks.
    pub(crate) fn vacate(&mut self) -> Result<(), Failure> {
        self.done(&Order::Vacate, "free blocks")
    }

    /// Returns the engine's log.
    pub(crate) fn log(&mut self) -> Result<String, Failure> {
        match self.ask(&Order::Log, CUT_OFF)? {
            Answer::Log(text) => Ok(text),
            answer => other("a log", answer),
        }
    }

    pub(crate) fn free(&mut self) -> Result<u32, Failure> {
        match self.ask(&Order::Free, CUT_OFF)? {
            Answer::Free(blocks) => Ok(blocks),
            answer => other("a number of blocks", answer),
        }
    }

    /// Returns the resources that the process holds.
    pub(crate) fn holdings(&mut self) -> Result<ResourceUsage, Failure> {
        match self.ask(&Order::ResourceUsage, CUT_OFF)? {
            Answer::ResourceUsage(holdings) => Ok(holdings),
            answer => other("what a process holds", answer),
        }
    }

    /// Fails if more blocks are in use than a prompt of this length has.
    pub(crate) fn keeps_at_most(&mut self, tokens: u32) -> Result<(), Failure> {
        let (free, all) = (self.free()?, self.spec.shape.blocks);
        ensure(all - free <= tokens.div_ceil(self.spec.shape.logical()), || {
            format!("{free} of {all} are free")
        })
    }

    /// Waits until all blocks of the pool are free.
    pub(crate) fn all_free(&mut self, within: Duration) -> Result<(), Failure> {
        let until = Instant::now() + within;
        loop {
            let (free, all) = (self.free()?, self.spec.shape.blocks);
            if free == all {
                return Ok(());
            }
            if Instant::now() >= until {
                let id = &self.spec.id;
                return Err(Failure::new(format!(
                    "{id}: {free} of {all} blocks are free after {within:?}"
                )));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// The parameters of a load.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Load<'a> {
    pub(crate) request: &'a str,
    pub(crate) prompt: u64,
    pub(crate) tokens: u32,
    /// The number of logical blocks at the front that are already cached.
    pub(crate) cached: u32,
}

impl<'a> Load<'a> {
    pub(crate) fn new(request: &'a str, prompt: u64, tokens: u32) -> Self {
        Load { request, prompt, tokens, cached: 0 }
    }

    fn order(&self, params: &Value, within: Duration) -> LoadOrder {
        let Load { request, prompt, tokens, cached } = *self;
        let (request, params) = (request.to_owned(), params.clone());
        LoadOrder { request, prompt, tokens, cached, params, within }
    }
}

/// A prefix of a backend's name that selects the MooncakeConnector.
pub(crate) const MOONCAKE: &str = "MooncakeConnector ";

/// Returns the settings of an engine over one backend, with short leases. With the prefix
/// [`MOONCAKE`] the engine uses the MooncakeConnector.
pub(crate) fn spec(id: &str, backend: &str) -> Spec {
    if let Some(backend) = backend.strip_prefix(MOONCAKE) {
        let config = json!({ "kv_connector": MOONCAKE.trim() });
        let variables = vec![("VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT".to_owned(), "3".to_owned())];
        return Spec { config, variables, extra: json!({}), ..spec(id, backend) };
    }
    Spec {
        id: format!("{id}-{}", std::process::id()),
        backends: vec![backend.to_owned()],
        extra: json!({ "kv_lease_duration": 3 }),
        ..Spec::default()
    }
}

/// Returns the settings of an engine whose prefill writes.
pub(crate) fn pushing(id: &str, backend: &str) -> Spec {
    Spec { config: json!({ "kv_connector": "NixlPushConnector" }), ..spec(id, backend) }
}

/// Fails with `why` unless `holds`.
pub(crate) fn ensure(holds: bool, why: impl FnOnce() -> String) -> Result<(), Failure> {
    if holds { Ok(()) } else { Err(Failure::new(why())) }
}
