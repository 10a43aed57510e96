//! Runs two prefills and two decodes with random requests and faults. Some engines are killed
//! during loads and restarted, some are stopped for a moment, and thousands of requests are
//! aborted. Every byte that counts as loaded is right (the engines check this). Each load ends in
//! time, undisturbed loads arrive, and resource use does not grow.

use std::fmt;
use std::time::{Duration, Instant, SystemTime};

use kvx_testkit::{Check, Failure, Random, ResourceUsage, Tier, stays_flat};
use serde_json::Value;

use crate::engines::Case;
use crate::engines::engine::{Answer, Spec};
use crate::engines::fleet::{CUT_OFF, Engine, GRACE, Load, ensure, spec};
use crate::engines::model::Shape;

/// The environment variable that runs only this test, for this many seconds over each backend.
const SECONDS: &str = "KVX_ENGINE_SOAK_SECONDS";
/// The environment variable that repeats the choices of a run, which prints its value.
const SEED: &str = "KVX_SOAK_SEED";

/// The deadline of an undisturbed load.
const WITHIN: Duration = Duration::from_secs(2);
/// The longest time for which an engine is stopped. A load of a stopped engine counts as
/// undisturbed, but may be late.
const STILL_MS: usize = 300;
/// A decode does not repeat the handshake at once if an engine restarts twice under its name within
/// a second. An engine that has run for less than this time restarts under a new name.
const SAME_NAME: Duration = Duration::from_secs(3);
/// The lease of the engines, and two seconds.
const BLOCKS_BACK: Duration = Duration::from_secs(5);
/// The least number of aborted requests in five minutes.
const ABORTS: u64 = 10_000;
const FIVE_MINUTES: Duration = Duration::from_secs(300);
/// The time that a run may take beyond its seconds of work.
pub(crate) const AFTER: Duration = Duration::from_secs(300);

fn number(variable: &str) -> Option<u64> {
    let text = std::env::var(variable).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{variable} is not a number: {text}")))
}

/// Returns how long `cargo xtask soak connector` runs this over each backend, if it has started
/// this program.
pub(crate) fn asked_for() -> Option<Duration> {
    number(SECONDS).map(Duration::from_secs)
}

pub(crate) fn cases() -> Vec<Case> {
    let backends: &[&'static str] = if asked_for().is_some() { &["TCP", "SHM"] } else { &["TCP"] };
    let tier = if asked_for().is_some() { Tier::Fast } else { Tier::Whole };
    let case = |backend: &&'static str| {
        Case::new("four_engines_stay_correct_and_do_not_leak", backend, tier, work)
    };
    backends.iter().map(case).collect()
}

fn work(backend: &str) -> Check {
    let seed = number(SEED).unwrap_or_else(|| {
        SystemTime::UNIX_EPOCH.elapsed().map_or(1, |since| since.as_nanos() as u64)
    });
    let time = asked_for().unwrap_or(Duration::from_secs(5));
    println!("\n{backend}, {SEED}={seed}: two prefills and two decodes for {} s", time.as_secs());
    let done = Soak::new(backend, seed)?.run(time)?;
    println!("{backend}: {done}");
    // A busy machine aborts fewer: in one run, 76 in five seconds.
    let wanted =
        if time < FIVE_MINUTES { 1 } else { ABORTS * time.as_secs() / FIVE_MINUTES.as_secs() };
    ensure(done.aborted >= wanted && done.loaded > 0, || format!("too little was done: {done}"))
}

/// The work that was done.
#[derive(Clone, Copy, Default)]
struct Done {
    loaded: u64,
    failed: u64,
    aborted: u64,
    killed: u64,
    stopped: u64,
}

impl fmt::Display for Done {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Done { loaded, failed, aborted, killed, stopped } = self;
        write!(
            f,
            "{loaded} loads arrived, {failed} failed as expected, {aborted} requests aborted, \
             {killed} engines killed and started again, {stopped} stopped a while"
        )
    }
}

/// The fate of a request.
#[derive(Clone, Copy, PartialEq)]
enum Fate {
    Arrives,
    /// It has less time than it may need.
    Hurries,
    /// The decode aborts it after it has begun.
    GivenUp,
    /// The decode aborts it after others have begun too.
    GivenUpLater,
    /// The decode aborts it while it has no blocks.
    GivenUpInTheQueue,
    /// The prefill has revoked the blocks before the decode requests them.
    TakenBack,
    /// The prefill revokes the blocks during the load.
    TakenBackLater,
}

impl Fate {
    const ALL: [Fate; 10] = [
        Fate::Arrives,
        Fate::Arrives,
        Fate::Arrives,
        Fate::Hurries,
        Fate::GivenUp,
        Fate::GivenUp,
        Fate::GivenUpLater,
        Fate::GivenUpInTheQueue,
        Fate::TakenBack,
        Fate::TakenBackLater,
    ];
}

/// A load in progress.
struct Open {
    request: String,
    tokens: u32,
    prefill: usize,
    decode: usize,
    fate: Fate,
    begun: Instant,
    within: Duration,
}

/// The fault of a turn, while its loads are in progress.
#[derive(Clone, Copy, PartialEq)]
enum Trouble {
    Killed { prefill: bool },
    Stopped { prefill: bool, at: usize },
}

/// The state of a run. The first engine of each kind is never killed, so that its resource use can
/// be observed.
struct Soak {
    prefills: [Engine; 2],
    decodes: [Engine; 2],
    random: Random,
    done: Done,
    /// The number of the last request and of its prompt.
    last: u64,
    /// The number of the last new engine name.
    names: u64,
    /// The times at which the second decode and the second prefill were started.
    began: [Instant; 2],
}

impl Soak {
    fn new(backend: &str, seed: u64) -> Result<Self, Failure> {
        let start = |id: &str| {
            let shape = Shape { blocks: 512, ..Shape::default() };
            Engine::start(Spec { shape, ..spec(id, backend) })
        };
        Ok(Soak {
            prefills: [start("prefill-a")?, start("prefill-b")?],
            decodes: [start("decode-a")?, start("decode-b")?],
            random: Random::seeded(seed),
            done: Done::default(),
            last: 0,
            names: 0,
            began: [Instant::now(); 2],
        })
    }

    fn run(mut self, time: Duration) -> Result<Done, Failure> {
        println!(
            "| seconds | process | descriptors | threads | MiB | mappings | in quarantine |\n|---|---|---|---|---|---|---|"
        );
        stays_flat(&mut self, time, 2 * CUT_OFF, Soak::turn, |soak, passed| {
            soak.all_free()?;
            let held = soak.holdings()?;
            println!(
                "| {} | prefill | {} |\n| | decode | {} |",
                passed.as_secs(),
                held[0],
                held[1]
            );
            println!("  {}", soak.done);
            Ok(held)
        })?;
        Ok(self.done)
    }

    fn holdings(&mut self) -> Result<[ResourceUsage; 2], Failure> {
        Ok([self.prefills[0].holdings()?, self.decodes[0].holdings()?])
    }

    fn all_free(&mut self) -> Check {
        self.prefills
            .iter_mut()
            .chain(&mut self.decodes)
            .try_for_each(|engine| engine.all_free(BLOCKS_BACK))
    }

    /// Runs a few requests, each with a random fate, and sometimes a fault.
    fn turn(&mut self) -> Check {
        let mut open = Vec::new();
        for _ in 0..=self.random.below(16) {
            open.extend(self.request()?);
        }
        let trouble = match self.random.below(40) {
            0 => Some(Trouble::Killed { prefill: true }),
            1 => Some(Trouble::Killed { prefill: false }),
            at @ 2..6 => Some(Trouble::Stopped { prefill: at < 4, at: at % 2 }),
            _ => None,
        };
        if let Some(trouble) = trouble {
            self.cause(trouble)?;
        }
        for load in &open {
            self.resolve(load, trouble)?;
        }
        if let Some(Trouble::Killed { prefill }) = trouble {
            self.names += 1;
            let renamed =
                self.random.below(2) == 0 || self.began[usize::from(prefill)].elapsed() < SAME_NAME;
            self.began[usize::from(prefill)] = Instant::now();
            let (kind, engine) = if prefill {
                ("prefill", &mut self.prefills[1])
            } else {
                ("decode", &mut self.decodes[1])
            };
            let name =
                if renamed { format!("{kind}-{}", self.names) } else { engine.spec.id.clone() };
            engine.start_again(&name)?;
        }
        Ok(())
    }

    /// Computes a prompt and requests it. Returns the load if it is in progress afterwards.
    fn request(&mut self) -> Result<Option<Open>, Failure> {
        self.last += 1;
        let (number, request) = (self.last, format!("request-{}", self.last));
        let (prefill, decode) = (self.random.below(2), self.random.below(2));
        let tokens = 1 + self.random.below(100) as u32;
        let fate = Fate::ALL[self.random.below(Fate::ALL.len())];
        let within = match fate {
            Fate::Hurries => Duration::from_micros(100 + self.random.below(10_000) as u64),
            _ => WITHIN,
        };
        let params = self.prefill(prefill, &request, number, tokens)?;
        let load = Load::new(&request, number, tokens);
        let begun = Instant::now();
        match fate {
            Fate::GivenUpInTheQueue => {
                self.decodes[decode].arrive(&load, &params, within)?;
                self.abort(false, decode, &request)?;
                return Ok(None);
            }
            Fate::TakenBack => self.abort(true, prefill, &request)?,
            _ => {}
        }
        self.decodes[decode].decode(&load, &params, within)?;
        match fate {
            Fate::GivenUp => {
                self.abort(false, decode, &request)?;
                return Ok(None);
            }
            Fate::TakenBackLater => self.abort(true, prefill, &request)?,
            _ => {}
        }
        Ok(Some(Open { request, tokens, prefill, decode, fate, begun, within }))
    }

    /// Computes and publishes a prompt. If there are too few blocks, waits for those that killed
    /// decodes leased.
    fn prefill(
        &mut self,
        at: usize,
        request: &str,
        prompt: u64,
        tokens: u32,
    ) -> Result<Value, Failure> {
        let until = Instant::now() + BLOCKS_BACK;
        loop {
            match self.prefills[at].prefill(request, prompt, tokens) {
                Err(why) if why.to_string().contains("exhausted") && Instant::now() < until => {
                    std::thread::sleep(Duration::from_millis(50));
                }
                other => return other,
            }
        }
    }

    fn abort(&mut self, by_prefill: bool, at: usize, request: &str) -> Check {
        self.done.aborted += 1;
        let engine = if by_prefill { &mut self.prefills[at] } else { &mut self.decodes[at] };
        engine.abort(request)
    }

    fn cause(&mut self, trouble: Trouble) -> Check {
        match trouble {
            Trouble::Killed { prefill } => {
                self.done.killed += 1;
                let engine = if prefill { &mut self.prefills[1] } else { &mut self.decodes[1] };
                engine.process().kill()
            }
            Trouble::Stopped { prefill, at } => {
                self.done.stopped += 1;
                let still = Duration::from_millis(self.random.below(STILL_MS) as u64);
                let engine = if prefill { &mut self.prefills[at] } else { &mut self.decodes[at] };
                engine.process().stop()?;
                std::thread::sleep(still);
                engine.process().go_on()
            }
        }
    }

    /// Waits for the end of a load; fails if that end is not allowed.
    fn resolve(&mut self, load: &Open, trouble: Option<Trouble>) -> Check {
        if load.decode == 1 && trouble == Some(Trouble::Killed { prefill: false }) {
            return Ok(());
        }
        if load.fate == Fate::GivenUpLater {
            return self.abort(false, load.decode, &load.request);
        }
        let is_lost = load.prefill == 1 && trouble == Some(Trouble::Killed { prefill: true });
        let patience = (load.begun + load.within + GRACE).saturating_duration_since(Instant::now());
        let answer = self.decodes[load.decode].outcome(&load.request, patience)?;
        let (must_arrive, may_arrive) = match load.fate {
            Fate::Arrives => (!is_lost, true),
            Fate::TakenBack => (false, false),
            _ => (false, true),
        };
        match answer {
            Answer::Loaded { tokens, .. } if may_arrive && tokens + 1 >= load.tokens => {
                self.done.loaded += 1
            }
            Answer::NotLoaded { .. } if !must_arrive => self.done.failed += 1,
            answer => {
                let Open { request, prefill, decode, .. } = load;
                return Err(Failure::new(format!(
                    "{request} of prefill {prefill}, decode {decode}: {answer:?}"
                )));
            }
        }
        Ok(())
    }
}
