//! Tests what happens to requests whose engines are killed, stopped or restarted, and to requests
//! that are aborted.
//!
//! Each load ends by its deadline and a second. No wrong byte counts as loaded (the engine checks
//! this). The blocks of both pools are free by the end of the lease and two seconds. The next
//! request works.

mod cell;
pub(crate) mod table;

use std::time::{Duration, Instant};

use kvx_testkit::{Check, Child, Failure, Tier, skip};
use serde_json::{Value, json};

use crate::engines::engine::Spec;
use crate::engines::fleet::{CUT_OFF, Engine, GRACE, Load, MOONCAKE, ensure, pushing, spec};
use crate::engines::libraries::{self, Standing};
use crate::engines::model::Shape;
use crate::engines::{Case, ucx};

/// The deadline of loads that cannot succeed.
const DEADLINE: Duration = Duration::from_secs(1);
/// The lease of these engines, and two seconds.
const BLOCKS_BACK: Duration = Duration::from_secs(5);
/// Tokens of each prompt: three blocks of 16, and one more.
const TOKENS: u32 = 49;
/// The number of loads that may finish before one is stopped in its check or between its blocks.
const TRIES: u32 = 200;

/// Returns the shape of a model whose prompts take longer to write than a process takes to stop.
fn large_prompts() -> Shape {
    Shape { heads: Some(1024), blocks: 16, ..Shape::default() }
}

pub(crate) fn cases() -> Vec<Case> {
    let all: [(&str, fn(&str) -> Check); 9] = [
        // vLLM 24, 25, 42: loads from a killed prefill fail in time, and everything that belongs to
        //     it is released
        ("a_prefill_that_is_killed_fails_its_loads", prefill_killed),
        // vLLM 24, 33: loads from a stopped prefill fail by their deadlines, and it does not write
        //     their blocks when it continues
        ("a_prefill_that_is_stopped_costs_the_deadline_and_no_block", prefill_stopped),
        // vLLM 24, 33: loads from a stopped prefill that is then killed fail by their deadlines,
        //     and their blocks are released (over UCX 1.22; 1.13 keeps them)
        (
            "a_stopped_prefill_that_is_killed_costs_the_deadline_and_no_block",
            prefill_stopped_and_killed,
        ),
        // vLLM 41: a prefill that restarts, under its old name or a new one, is not mistaken for
        //     the old one
        ("a_prefill_that_restarts_is_not_taken_for_the_old_one", prefill_restarted),
        // vLLM 35: blocks for a decode that is killed are free when their lease ends
        ("a_decode_that_is_killed_costs_a_lease", decode_killed),
        // vLLM 35, 38: blocks for a stopped decode are free when their lease ends, and nothing that
        //     it loads afterwards is wrong
        ("a_decode_that_is_stopped_costs_a_lease", decode_stopped),
        // vLLM 41: a decode that restarts, under its old name or a new one, loads what the old one
        //     requested
        ("a_decode_that_restarts_loads_what_the_old_one_wanted", decode_restarted),
        // vLLM 33: aborted loads and leases release their blocks on both sides
        ("loads_and_leases_can_be_given_up", aborts),
        // vLLM 35, 38: blocks that nobody fetches become free, and a later fetch is rejected
        ("blocks_that_nobody_fetches_come_back", nobody_comes),
    ];
    let mut cases = Vec::new();
    for (name, run) in all {
        for backend in ["TCP", "SHM", "UCX", "LIBFABRIC", "RIXL"] {
            let tier = if backend == "TCP" { Tier::Usual } else { Tier::Whole };
            let run_or_say = move |backend: &str| match that_outlive_kills(backend) {
                Ok(_) => run(backend),
                Err((reason, cure)) => {
                    skip(&format!("{backend}::{name}"), &reason, cure);
                    Ok(())
                }
            };
            cases.push(Case::new(name, backend, tier, run_or_say));
        }
    }
    let pushes: [(&str, fn(&str) -> Check); 4] = [
        // vLLM 47: a stopped prefill that continues does not write to blocks that the decode has
        //     abandoned
        ("blocks_that_a_decode_has_given_up_are_not_written", fenced),
        // vLLM 47: a stopped prefill that is then killed does not write to blocks that the decode
        //     has abandoned, and they are released
        (
            "blocks_that_a_decode_has_given_up_are_not_written_by_a_prefill_that_is_killed",
            fenced_and_killed,
        ),
        ("a_pushing_prefill_that_is_killed_fails_its_loads", pushing_prefill_killed),
        ("a_decode_that_is_killed_before_it_is_written_to_costs_a_lease", pushed_decode_killed),
    ];
    for (name, run) in pushes {
        for backend in ["TCP", "SHM"] {
            cases.push(Case::new(name, backend, Tier::Usual, run));
        }
    }
    cases.push(Case::new(
        "a_decode_that_stops_as_it_is_written_to_costs_a_lease",
        "TCP",
        Tier::Usual,
        written_decode_stopped,
    ));
    let asks: [(&str, fn(&str) -> Check); 7] = [
        // vLLM 59: a decode fences blocks that it abandons, and the prefill stops writing to them
        ("blocks_that_an_asking_decode_has_given_up_are_not_written", |backend| {
            HAVE_MET.into_iter().try_for_each(|have_met| {
                given_up(
                    Two::mooncake(backend)?,
                    Round { way: Way::Writes, have_met, at_last: AtLast::GoesOn },
                )
            })
        }),
        (
            "blocks_that_an_asking_decode_has_given_up_are_not_written_by_one_that_is_killed",
            |backend| {
                let round = Round { way: Way::Writes, have_met: true, at_last: AtLast::IsKilled };
                given_up(Two::mooncake(backend)?, round)
            },
        ),
        ("an_asked_prefill_that_is_killed_fails_its_loads", |backend| {
            killed_prefill(|| Two::mooncake(backend), Way::Writes)
        }),
        // vLLM 60: blocks for a killed decode are free at the time limit
        ("an_asking_decode_that_is_killed_costs_the_time_limit", |backend| {
            killed_decode(|| Two::mooncake(backend))
        }),
        // vLLM 59: a prefill that is killed and restarted at its address is not mistaken for the
        //     old one
        ("an_asked_prefill_that_restarts_is_not_taken_for_the_old_one", |backend| {
            [true, false]
                .into_iter()
                .try_for_each(|same| restarted_prefill(Two::mooncake_keeping(backend, 60)?, same))
        }),
        // vLLM 60: either side can abort pull requests and transfers
        ("questions_and_transfers_can_be_given_up", |backend| aborted(Two::mooncake(backend)?)),
        ("transfers_that_nobody_asks_for_come_back", |backend| {
            nobody_comes_to(Two::mooncake(backend)?)
        }),
    ];
    for (name, run) in asks {
        for backend in ["TCP", "SHM"] {
            cases.push(Case::new(name, backend, Tier::Usual, run));
        }
    }
    cases
}

struct Two {
    prefill: Engine,
    decode: Engine,
    /// The number of the last request.
    last: u64,
}

/// The name and the parameters of a published prompt.
type Published = (String, Value);

/// Prompts of a stopped prefill, by the state of their load.
struct Places {
    /// Queued at the decode, without blocks.
    queued: Published,
    /// Being loaded.
    reading: Published,
    /// Not requested by the decode.
    idle: Published,
}

impl Two {
    fn new(backend: &str) -> Result<Self, Failure> {
        Two::with_leases(backend, 3)
    }

    /// Starts engines with leases of this length.
    fn with_leases(backend: &str, seconds: u32) -> Result<Self, Failure> {
        let variables = that_outlive_kills(backend).map_err(|(reason, _)| Failure::new(reason))?;
        let start = |id| {
            let extra = json!({ "kv_lease_duration": seconds });
            Engine::start(Spec { extra, variables: variables.clone(), ..spec(id, backend) })
        };
        Ok(Two { prefill: start("prefill")?, decode: start("decode")?, last: 0 })
    }

    fn pushing(backend: &str) -> Result<Self, Failure> {
        Ok(Two {
            prefill: Engine::start(pushing("prefill", backend))?,
            decode: Engine::start(pushing("decode", backend))?,
            last: 0,
        })
    }

    /// Starts engines with the MooncakeConnector.
    fn mooncake(backend: &str) -> Result<Self, Failure> {
        Two::mooncake_keeping(backend, 3)
    }

    /// Starts engines with the MooncakeConnector, which keep prompts that no decode requests for
    /// this time.
    fn mooncake_keeping(backend: &str, seconds: u32) -> Result<Self, Failure> {
        let variables =
            vec![("VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT".to_owned(), seconds.to_string())];
        let start = |id| {
            let variables = variables.clone();
            Engine::start(Spec { variables, ..spec(id, &format!("{MOONCAKE}{backend}")) })
        };
        Ok(Two { prefill: start("prefill")?, decode: start("decode")?, last: 0 })
    }

    fn published(&mut self) -> Result<Published, Failure> {
        self.last += 1;
        let request = format!("request-{}", self.last);
        let params = self.prefill.prefill(&request, self.last, TOKENS)?;
        Ok((request, params))
    }

    fn begin(&mut self, (request, params): &Published, within: Duration) -> Check {
        self.decode.decode(&load(request), params, within)
    }

    /// Publishes three prompts, stops the prefill, and brings each prompt into one of the three
    /// states.
    fn spread(&mut self, within: Duration) -> Result<Places, Failure> {
        let [queued, reading, idle] = [self.published()?, self.published()?, self.published()?];
        self.prefill.process().stop()?;
        self.decode.arrive(&load(&queued.0), &queued.1, within)?;
        self.begin(&reading, within)?;
        Ok(Places { queued, reading, idle })
    }

    /// Gives the queued request blocks, and requests the idle prompt. Fails unless all three loads
    /// end in time: with a failure or, if they `may_have_loaded`, with all their bytes.
    fn all_end(&mut self, places: &Places, within: Duration, may_have_loaded: bool) -> Check {
        self.decode.admit(&places.queued.0)?;
        self.begin(&places.idle, within)?;
        for (request, _) in [&places.queued, &places.reading, &places.idle] {
            self.decode.ends(request, within, may_have_loaded)?;
        }
        Ok(())
    }

    /// Stops the decode when some blocks of a load have arrived. Repeats with a new prompt if all
    /// of them arrived before.
    fn decode_stops_amid(
        &mut self,
        mut published: Published,
        within: Duration,
    ) -> Result<Published, Failure> {
        for _ in 0..TRIES {
            if self.decode.stops_amid(&load(&published.0), &published.1, within)? {
                return Ok(published);
            }
            self.decode.arrives(&published.0, TOKENS)?;
            published = self.published()?;
        }
        Err(Failure::new(format!(
            "{TRIES} loads ended before the decode could be stopped between their blocks"
        )))
    }

    /// Starts another process in place of the decode, at its port.
    fn start_decode_again(&mut self) -> Check {
        let id = format!("{}-again", self.decode.spec.id);
        self.decode.start_again(&id)
    }

    fn start_prefill_again(&mut self) -> Check {
        let id = format!("{}-again", self.prefill.spec.id);
        self.prefill.start_again(&id)
    }

    /// Loads one request from end to end.
    fn works(&mut self) -> Check {
        let published = self.published()?;
        self.begin(&published, CUT_OFF)?;
        self.decode.arrives(&published.0, TOKENS)
    }

    /// Returns whether reads settle while the peer is stopped.
    fn reads_end_alone(&self) -> Result<bool, Failure> {
        Ok(self.status()?.reads_settle_alone)
    }

    /// Returns the status of the backend of both engines.
    fn status(&self) -> Result<Standing, Failure> {
        libraries::status(&self.decode.spec.backends[0]).map_err(Failure::new)
    }

    fn all_free(&mut self) -> Check {
        self.prefill.all_free(BLOCKS_BACK)?;
        self.decode.all_free(BLOCKS_BACK)
    }
}

/// Returns the load of a request. A request and its prompt have the same number.
fn load(request: &str) -> Load<'_> {
    let number = request.rsplit('-').next().and_then(|number| number.parse().ok());
    Load::new(request, number.unwrap_or_default(), TOKENS)
}

/// Cases of whether the engines have completed a handshake before.
const HAVE_MET: [bool; 2] = [false, true];

fn prefill_killed(backend: &str) -> Check {
    killed_prefill(|| Two::new(backend), Way::Reads)
}

fn pushing_prefill_killed(backend: &str) -> Check {
    killed_prefill(|| Two::pushing(backend), Way::Writes)
}

fn killed_prefill(two: impl Fn() -> Result<Two, Failure>, way: Way) -> Check {
    for have_met in HAVE_MET {
        let mut two = two()?;
        if have_met {
            two.works()?;
        }
        let places = two.spread(DEADLINE)?;
        two.prefill.process().kill()?;
        two.all_end(&places, DEADLINE, way == Way::Reads && have_met)?;
        two.decode.all_free(BLOCKS_BACK)?;
        two.start_prefill_again()?;
        two.works()?;
        two.all_free()?;
    }
    Ok(())
}

fn prefill_stopped(backend: &str) -> Check {
    for have_met in HAVE_MET {
        given_up(Two::new(backend)?, Round { way: Way::Reads, have_met, at_last: AtLast::GoesOn })?;
    }
    Ok(())
}

fn prefill_stopped_and_killed(backend: &str) -> Check {
    given_up(
        Two::new(backend)?,
        Round { way: Way::Reads, have_met: true, at_last: AtLast::IsKilled },
    )
}

/// The first tested UCX whose gets and puts need no queues on one host. When a process with an
/// older UCX is killed in the middle of a message, the message's reader receives nothing from new
/// peers afterwards, and reads from the dead process stay held
/// (docs/project/decisions/ucx-shared-memory.md). Versions between 1.13 and this one were not
/// tested.
const OUTLIVES_KILLS: (u32, u32) = (1, 22);

/// Returns environment variables for engines whose backend survives the kill of a peer: those of a
/// newer UCX, if the engines would open an older one. On error, returns the reason and the remedy.
fn that_outlive_kills(backend: &str) -> Result<Vec<(String, String)>, (String, &'static str)> {
    if backend != "UCX" {
        return Ok(Vec::new());
    }
    let found = libraries::status(backend).map_err(|why| (why, "see the reason"))?;
    let mut numbers = found.version.split('.').map(|number| number.parse().unwrap_or_default());
    let version = (numbers.next().unwrap_or_default(), numbers.next().unwrap_or_default());
    if version >= OUTLIVES_KILLS {
        return Ok(Vec::new());
    }
    let is_newer =
        |version: &&ucx::Version| version.number >= OUTLIVES_KILLS && !version.ends_badly;
    let newer = ucx::VERSIONS.iter().find(is_newer).expect("the tests run on a newer one");
    Ok(vec![("KVX_UCX_LIB".to_owned(), newer.library()?.display().to_string())])
}

/// Runs [`prefill_stopped`] with a prefill that writes.
fn fenced(backend: &str) -> Check {
    for have_met in HAVE_MET {
        given_up(
            Two::pushing(backend)?,
            Round { way: Way::Writes, have_met, at_last: AtLast::GoesOn },
        )?;
    }
    Ok(())
}

fn fenced_and_killed(backend: &str) -> Check {
    given_up(
        Two::pushing(backend)?,
        Round { way: Way::Writes, have_met: true, at_last: AtLast::IsKilled },
    )
}

/// The course of a test in which a decode gives up its requests to a stopped prefill.
struct Round {
    way: Way,
    /// The engines have completed a handshake before.
    have_met: bool,
    at_last: AtLast,
}

/// The side that moves the data.
#[derive(PartialEq)]
enum Way {
    /// The decode reads; with some backends it does not need the peer for that.
    Reads,
    /// The prefill writes.
    Writes,
}

/// The fate of the prefill after the decode has given up.
#[derive(PartialEq)]
enum AtLast {
    GoesOn,
    IsKilled,
}

/// Stops a prefill with open requests, lets the decode give up, and uses its blocks for other
/// prompts. Checks that they are not written to, whatever happens to the prefill `at_last`, and
/// that the next request works.
fn given_up(mut two: Two, round: Round) -> Check {
    let Round { way, have_met, at_last } = round;
    if have_met {
        two.works()?;
    }
    let aborted = two.published()?;
    let places = two.spread(DEADLINE)?;
    two.begin(&aborted, CUT_OFF)?;
    two.decode.abort(&aborted.0)?;
    two.all_end(&places, DEADLINE, way == Way::Reads && have_met)?;
    // Most backends release the blocks without the prefill. Where the backend needs it, the blocks
    // stay held and are not reused.
    if way == Way::Writes || two.reads_end_alone()? {
        two.decode.all_free(BLOCKS_BACK)?;
    }
    two.decode.occupy(1_000)?;
    match at_last {
        AtLast::GoesOn => two.prefill.process().go_on()?,
        AtLast::IsKilled => two.prefill.process().kill()?,
    }
    let until = Instant::now() + Duration::from_secs(1);
    while Instant::now() < until {
        two.decode.is_unchanged()?;
    }
    two.decode.vacate()?;
    if at_last == AtLast::IsKilled {
        two.start_prefill_again()?;
    }
    two.works()?;
    two.all_free()
}

fn prefill_restarted(backend: &str) -> Check {
    [true, false].into_iter().try_for_each(|same| restarted_prefill(Two::new(backend)?, same))
}

/// Restarts the prefill; `same`: under the same name.
fn restarted_prefill(mut two: Two, same: bool) -> Check {
    two.works()?;
    let places = two.spread(CUT_OFF)?;
    let id = two.prefill.spec.id.clone();
    let id = if same { id } else { format!("{id}-new") };
    two.prefill.start_again(&id)?;
    // Blocks with the same numbers hold other prompts now.
    let new = [two.published()?, two.published()?, two.published()?];
    two.decode.admit(&places.queued.0)?;
    two.begin(&places.idle, DEADLINE)?;
    two.decode.fails(&places.idle.0, DEADLINE)?;
    two.decode.fails(&places.queued.0, CUT_OFF)?;
    two.decode.ends(&places.reading.0, CUT_OFF, true)?;
    for published in &new {
        two.begin(published, CUT_OFF)?;
        two.decode.arrives(&published.0, TOKENS)?;
    }
    two.works()?;
    two.all_free()
}

fn decode_killed(backend: &str) -> Check {
    killed_decode(|| Two::new(backend))
}

fn pushed_decode_killed(backend: &str) -> Check {
    killed_decode(|| Two::pushing(backend))
}

/// The stopped decode no longer renews its lease, so the prefill stops writing.
fn written_decode_stopped(backend: &str) -> Check {
    let start = |id| Engine::start(Spec { shape: large_prompts(), ..pushing(id, backend) });
    let mut two = Two { prefill: start("prefill")?, decode: start("decode")?, last: 0 };
    two.works()?;
    let published = two.published()?;
    let published = two.decode_stops_amid(published, CUT_OFF)?;
    two.prefill.all_free(BLOCKS_BACK)?;
    // The new content of the blocks must not be written to the decode when that continues.
    two.prefill.occupy(1_000)?;
    two.decode.goes_on()?;
    two.decode.ends(&published.0, CUT_OFF, true)?;
    two.prefill.vacate()?;
    two.works()?;
    two.all_free()
}

fn killed_decode(two: impl Fn() -> Result<Two, Failure>) -> Check {
    for have_met in HAVE_MET {
        let mut two = two()?;
        if have_met {
            two.works()?;
        }
        two.spread(CUT_OFF)?;
        two.decode.process().kill()?;
        two.prefill.process().go_on()?;
        two.prefill.all_free(BLOCKS_BACK)?;
        two.start_decode_again()?;
        two.works()?;
        two.all_free()?;
    }
    Ok(())
}

fn decode_stopped(backend: &str) -> Check {
    let mut two = Two::new(backend)?;
    two.works()?;
    let places = two.spread(CUT_OFF)?;
    two.decode.process().stop()?;
    two.prefill.process().go_on()?;
    two.prefill.all_free(BLOCKS_BACK)?;
    // Meanwhile the same blocks are reused for other prompts.
    let others = [two.published()?, two.published()?, two.published()?];
    two.decode.process().go_on()?;
    two.decode.admit(&places.queued.0)?;
    two.begin(&places.idle, DEADLINE)?;
    two.decode.fails(&places.idle.0, DEADLINE)?;
    two.decode.fails(&places.queued.0, CUT_OFF)?;
    two.decode.ends(&places.reading.0, CUT_OFF, true)?;
    for published in &others {
        two.begin(published, CUT_OFF)?;
        two.decode.arrives(&published.0, TOKENS)?;
    }
    two.all_free()
}

/// The requests are repeated while their leases last.
fn decode_restarted(backend: &str) -> Check {
    for same in [true, false] {
        // The leases outlast the start of a process on a busy machine.
        let mut two = Two::with_leases(backend, 60)?;
        two.works()?;
        // A decode that is killed before its completion arrives costs a lease.
        two.prefill.all_free(BLOCKS_BACK)?;
        let Places { queued, reading, idle } = two.spread(CUT_OFF)?;
        let id = two.decode.spec.id.clone();
        two.decode.start_again(&if same { id } else { format!("{id}-new") })?;
        two.prefill.process().go_on()?;
        // The old decode may have loaded this and reported it before it was killed. The prefill
        // then rejects it, as the lease has ended.
        two.begin(&reading, CUT_OFF)?;
        two.decode.ends(&reading.0, CUT_OFF, true)?;
        for published in [queued, idle] {
            two.begin(&published, CUT_OFF)?;
            two.decode.arrives(&published.0, TOKENS)?;
        }
        two.works()?;
        two.all_free()?;
    }
    Ok(())
}

fn aborts(backend: &str) -> Check {
    aborted(Two::new(backend)?)
}

fn aborted(mut two: Two) -> Check {
    two.works()?;
    // The prefill revokes a lease before the load begins, while it is queued, and while it is in
    // progress.
    let [idle, queued, reading] = [two.published()?, two.published()?, two.published()?];
    two.decode.arrive(&load(&queued.0), &queued.1, CUT_OFF)?;
    two.prefill.abort(&idle.0)?;
    two.prefill.abort(&queued.0)?;
    two.begin(&idle, DEADLINE)?;
    two.decode.admit(&queued.0)?;
    two.decode.fails(&idle.0, DEADLINE)?;
    two.decode.fails(&queued.0, DEADLINE)?;
    two.prefill.process().stop()?;
    two.begin(&reading, DEADLINE)?;
    two.prefill.goes_on_with_an_abort(&reading.0)?;
    let other = two.published()?;
    two.decode.ends(&reading.0, DEADLINE, true)?;
    two.begin(&other, CUT_OFF)?;
    two.decode.arrives(&other.0, TOKENS)?;
    // The decode aborts a queued load: the prefill is notified.
    let queued = two.published()?;
    two.decode.arrive(&load(&queued.0), &queued.1, CUT_OFF)?;
    two.decode.abort(&queued.0)?;
    two.prefill.all_free(GRACE)?;
    // The decode aborts loads while the prefill is stopped.
    let Places { queued, reading, idle } = two.spread(CUT_OFF)?;
    two.decode.abort(&queued.0)?;
    two.decode.abort(&reading.0)?;
    two.prefill.process().go_on()?;
    two.prefill.abort(&idle.0)?;
    two.prefill.all_free(GRACE)?;
    two.decode.all_free(GRACE)?;
    // The decode aborts loads before the handshake.
    let id = format!("{}-stranger", two.decode.spec.id);
    two.decode = Engine::start(Spec { id, ..two.decode.spec.clone() })?;
    let (queued, begun) = (two.published()?, two.published()?);
    two.decode.arrive(&load(&queued.0), &queued.1, CUT_OFF)?;
    two.begin(&begun, CUT_OFF)?;
    two.decode.abort(&queued.0)?;
    two.decode.abort(&begun.0)?;
    two.works()?;
    two.all_free()
}

fn nobody_comes(backend: &str) -> Check {
    nobody_comes_to(Two::new(backend)?)
}

fn nobody_comes_to(mut two: Two) -> Check {
    let late = two.published()?;
    two.prefill.all_free(BLOCKS_BACK)?;
    two.begin(&late, DEADLINE)?;
    two.decode.fails(&late.0, DEADLINE)?;
    two.works()?;
    two.all_free()
}
