//! Two prefills and two decodes that work without a plan: some are killed amid loads and started again, stand still a
//! moment, and thousands of requests are given up. Every byte that counts as loaded is right (the engines check), each
//! load ends in time, what nobody has disturbed arrives, and in the end nothing has grown.

use std::fmt;
use std::time::{Duration, Instant, SystemTime};

use kvx_testkit::{Check, Failure, Random, ResourceUsage, Tier, stays_flat};
use serde_json::Value;

use crate::engines::Case;
use crate::engines::engine::{Answer, Spec};
use crate::engines::fleet::{CUT_OFF, Engine, GRACE, Load, ensure, spec};
use crate::engines::model::Shape;

/// Set: only this, for so many seconds over each backend.
const SECONDS: &str = "KVX_ENGINE_SOAK_SECONDS";
/// What a run prints at its beginning: with it, another makes the same choices.
const SEED: &str = "KVX_SOAK_SEED";

/// How long a load may take that nobody disturbs.
const WITHIN: Duration = Duration::from_secs(2);
/// How long an engine stands still at most; a load whose engine does is not disturbed, but late.
const STILL_MS: usize = 300;
/// An engine that has begun anew under its old name is not asked anew at once if it does so again within a second: it
/// gets another name then.
const SAME_NAME: Duration = Duration::from_secs(3);
/// The lease of the engines, and two seconds.
const BLOCKS_BACK: Duration = Duration::from_secs(5);
/// In five minutes at least so many requests are given up.
const ABORTS: u64 = 10_000;
const FIVE_MINUTES: Duration = Duration::from_secs(300);
/// How long a run may take beyond its seconds of work.
pub(crate) const AFTER: Duration = Duration::from_secs(300);

fn number(variable: &str) -> Option<u64> {
    let text = std::env::var(variable).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{variable} is no number: {text}")))
}

/// How long `cargo xtask soak connector` wants this over each backend, if it does.
pub(crate) fn asked_for() -> Option<Duration> {
    number(SECONDS).map(Duration::from_secs)
}

pub(crate) fn cases() -> Vec<Case> {
    let backends: &[&'static str] = if asked_for().is_some() { &["TCP", "SHM"] } else { &["TCP"] };
    let tier = if asked_for().is_some() { Tier::Fast } else { Tier::Whole };
    let case = |backend: &&'static str| {
        Case::new("nothing_is_wrong_and_nothing_grows_among_four_engines", backend, tier, work)
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
    // A busy machine does less in seconds: 76 were given up once in five.
    let wanted =
        if time < FIVE_MINUTES { 1 } else { ABORTS * time.as_secs() / FIVE_MINUTES.as_secs() };
    ensure(done.aborted >= wanted && done.loaded > 0, || format!("too little was done: {done}"))
}

/// What was done.
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
            "{loaded} loads arrived, {failed} failed as they may, {aborted} requests given up, {killed} engines \
             killed and started again, {stopped} stopped a while"
        )
    }
}

/// What becomes of a request.
#[derive(Clone, Copy, PartialEq)]
enum Fate {
    Arrives,
    /// It has less time than it may need.
    Hurries,
    /// Its decode gives it up when it has begun.
    GivenUp,
    /// The same, when others have begun too.
    GivenUpLater,
    /// Its decode gives it up while it has no blocks.
    GivenUpInTheQueue,
    /// Its prefill has taken the blocks back when the decode comes.
    TakenBack,
    /// Its prefill takes them back meanwhile.
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

/// A load under way.
struct Open {
    request: String,
    tokens: u32,
    prefill: usize,
    decode: usize,
    fate: Fate,
    begun: Instant,
    within: Duration,
}

/// Whom a turn shakes, while its loads are under way.
#[derive(Clone, Copy, PartialEq)]
enum Trouble {
    Killed { prefill: bool },
    Stopped { prefill: bool, at: usize },
}

/// The first of each kind is never killed: it is the one that could grow.
struct Soak {
    prefills: [Engine; 2],
    decodes: [Engine; 2],
    random: Random,
    done: Done,
    /// The number of the last request, and its prompt.
    last: u64,
    /// The number of the last engine's name.
    names: u64,
    /// When the decode and the prefill that are killed were started.
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

    /// Some requests, each with a fate of its own, and at times a trouble amid them.
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

    /// A prompt is computed and asked for; the load, if it is under way then.
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

    /// Computes and publishes a prompt; when there are too few blocks, those of killed decodes are waited for.
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

    /// Waits for the end of a load; fails unless it is one that may be.
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
