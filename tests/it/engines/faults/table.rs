//! The fault table: every combination of the process that fails, the fault, and the state of the
//! load.

use super::cell::{self, *};
use super::*;
use crate::engines::checking;
use crate::engines::engine::Answer;
use crate::engines::unread;

/// The environment variable that makes these the only tests of the engines, over all backends, with
/// a table row for each.
const ALL: &str = "KVX_ENGINE_FAULTS_ALL";

/// Returns whether `cargo xtask faults connector` requests the table.
pub(crate) fn is_all() -> bool {
    std::env::var_os(ALL).is_some()
}

/// The deadline of a load.
const WITHIN: Duration = Duration::from_secs(2);
/// The time until a stopped rank is reported lost, and two seconds. Its leases may be extended
/// until then.
const MISSED: Duration = Duration::from_secs(12);
/// The time that a stopped rank may hold up its engine's step before it is reported lost.
const STEP: Duration = Duration::from_secs(10);
/// The time for which a process is stopped that later continues.
const A_WHILE: Duration = Duration::from_secs(5);

/// The text of a row whose blocks are not released.
const KEPT: &str = "its blocks are kept";
/// A prompt of no request.
const OTHERS: u64 = 1_000_000;
/// The time for which nothing may write into blocks after they were released.
const QUIET: Duration = Duration::from_millis(200);

pub(crate) fn cases() -> Vec<Case> {
    let all = is_all();
    let (tier, backends): (_, &[&str]) = match all {
        true => (Tier::Fast, &["TCP", "SHM", "UCX", "LIBFABRIC", "RIXL", "MOONCAKE"]),
        false => (Tier::Whole, &["TCP"]),
    };
    let third = |cells: Vec<Cell>, of: usize| {
        cells
            .into_iter()
            .enumerate()
            .filter(move |(at, _)| all || at % 3 == of)
            .map(|(_, cell)| cell)
    };
    let reads = third(cell::of_reads(), 0).map(|cell| (cell, false));
    // This third includes the cells that have failed before.
    let writes = third(cell::of_writes(), 2).map(|cell| (cell, true));
    let rows: Vec<(Cell, bool)> = reads.chain(writes).collect();
    let mut cases = Vec::new();
    for backend in backends {
        // Only the MooncakeConnector uses this backend.
        for (cell, asks) in rows.iter().copied().filter(|(_, asks)| *asks || *backend != "MOONCAKE")
        {
            let connector = if asks { MOONCAKE } else { "" };
            let name = format!("{connector}{cell}");
            let title = name.clone();
            let run_or_say = move |backend: &str| match needed(backend, cell) {
                Ok(variables) => {
                    let backend = format!("{connector}{backend}");
                    let two = match asks {
                        true => asking(&backend, variables, cell.moment == Written)?,
                        false => two(&backend, variables, cell.subject, cell.moment == Checking)?,
                    };
                    Run { two, cell, asks, again: None }.run(&backend)
                }
                Err((reason, cure)) => {
                    skip(&format!("{backend}::{title}"), &reason, cure);
                    Ok(())
                }
            };
            cases.push(Case::new(name, backend, tier, run_or_say));
        }
    }
    cases
}

/// Returns the environment variables of the engines in this cell. If the cell cannot run, returns
/// the reason and the remedy.
fn needed(backend: &str, cell: Cell) -> Result<Vec<(String, String)>, (String, &'static str)> {
    if cell.moment == Checking || (backend, cell.moment) == ("SHM", Written) {
        checking::can_be_held()?;
    }
    that_outlive_kills(backend)
}

/// Starts two engines with the MooncakeConnector. With `large` their blocks take long enough to
/// write that a load can be stopped between them.
fn asking(backend: &str, variables: Vec<(String, String)>, large: bool) -> Result<Two, Failure> {
    let start = |id| {
        let mut spec = spec(id, backend);
        spec.variables.extend(variables.clone());
        if large {
            spec.shape = large_prompts();
        }
        Engine::start(spec)
    };
    Ok(Two { prefill: start("prefill")?, decode: start("decode")?, last: 0 })
}

/// Starts two engines. If `subject` is a rank, its engine has two ranks in separate processes.
fn two(
    backend: &str,
    variables: Vec<(String, String)>,
    subject: Subject,
    digests: bool,
) -> Result<Two, Failure> {
    let start = |id, apart: bool| {
        // Digests cover whole blocks of the prefill's ranks, so it has as many ranks as the decode.
        let two = apart || digests && subject == DecodeRank;
        let shape = Shape { tp: if two { 2 } else { 1 }, ..Shape::default() };
        let mut spec = Spec { apart, shape, variables: variables.clone(), ..spec(id, backend) };
        spec.extra["kvx_digest"] = digests.into();
        Engine::start(spec)
    };
    let prefill = start("prefill", subject == PrefillRank)?;
    Ok(Two { prefill, decode: start("decode", subject == DecodeRank)?, last: 0 })
}

/// The run of one cell.
struct Run {
    two: Two,
    cell: Cell,
    /// The decode asks, and the prefill writes (MooncakeConnector).
    asks: bool,
    /// The rank that was started again.
    again: Option<Child>,
}

impl Run {
    fn run(mut self, backend: &str) -> Check {
        let Cell { subject, trouble, moment } = self.cell;
        if !matches!(moment, BeforeTheHandshake | InTheHandshake) {
            self.two.works()?;
            self.two.all_free()?;
        }
        let published = self.reach()?;
        let since = Instant::now();
        self.cause_trouble(&published.0)?;
        if self.is_held() && !self.is_held_itself() {
            self.let_go()?;
        }
        let waits = subject == DecodeEngine && trouble == StoppedAWhile;
        if waits {
            self.go_on_after(since)?;
        }
        if moment == Checking && !(subject == DecodeEngine && matches!(trouble, Killed | Stopped)) {
            self.two.decode.let_go()?;
        }
        let mut ended = self.end(&published)?;
        let after = ended.as_ref().map(|_| since.elapsed());
        self.is_refused()?;
        // The decode is alive and its load has ended, so its blocks can be reused.
        let lives_on = subject.is_prefill() || matches!(trouble, Aborted | StoppedAWhile);
        let is_watched = self.asks && lives_on && moment != ToldNotFreed;
        let used = if is_watched { self.use_decodes_blocks()? } else { Some(Duration::ZERO) };
        if moment == Checking && subject == PrefillRank && trouble == Stopped {
            let step = self.step_with_digests()?.as_millis();
            ended = ended.map(|ended| format!("{ended}, next step held {step}"));
        }
        if trouble == StoppedAWhile && !waits {
            self.go_on_after(since)?;
        }
        if is_watched {
            self.decodes_blocks_stay()?;
        }
        let back = match used {
            None if trouble == Stopped => KEPT.to_owned(),
            used => self.blocks_come_back(used.unwrap_or_default())?,
        };
        let healed = Instant::now();
        self.heal()?;
        self.two.works()?;
        let works = healed.elapsed();
        self.two.all_free()?;
        if is_all() {
            let ms = |time: Option<Duration>| {
                time.map_or("-".to_owned(), |time| time.as_millis().to_string())
            };
            let ended = ended.as_deref().unwrap_or("-");
            let (after, works) = (ms(after), ms(Some(works)));
            // The harness has printed the beginning of a line.
            let title = self.cell.title();
            println!("\n| {backend} | {title} | {moment} | {ended} | {after} | {back} | {works} |");
        }
        Ok(())
    }

    /// Brings a load into the state of the cell.
    fn reach(&mut self) -> Result<Published, Failure> {
        let published = self.two.published()?;
        match self.cell.moment {
            // A decode can only abort a request that it knows.
            BeforeTheHandshake
                if (self.cell.subject, self.cell.trouble) == (DecodeEngine, Aborted) =>
            {
                self.two.decode.arrive(&load(&published.0), &published.1, WITHIN)?
            }
            BeforeTheHandshake | Idle => {}
            Queued => self.two.decode.arrive(&load(&published.0), &published.1, WITHIN)?,
            InTheHandshake | Reading | Asked => {
                self.hold()?;
                self.two.begin(&published, WITHIN)?;
                if self.asks {
                    unread::wait_for(self.two.prefill.process().pid())?;
                }
            }
            Written => return self.two.decode_stops_amid(published, WITHIN),
            Checking => return self.check(published),
            ToldNotFreed => {
                self.two.begin(&published, CUT_OFF)?;
                self.two.decode.arrives(&published.0, TOKENS)?;
            }
        }
        Ok(published)
    }

    /// Begins a load and holds its check. Repeats with a new prompt if the check ended before it
    /// could be held.
    fn check(&mut self, mut published: Published) -> Result<Published, Failure> {
        for _ in 0..TRIES {
            if self.two.decode.check(&load(&published.0), &published.1, WITHIN)? {
                return Ok(published);
            }
            self.two.decode.arrives(&published.0, TOKENS)?;
            published = self.two.published()?;
        }
        Err(Failure::new(format!("{TRIES} checks ended before they could be held")))
    }

    /// Returns whether a process is stopped to hold the load in the state of the cell.
    fn is_held(&self) -> bool {
        matches!(self.cell.moment, InTheHandshake | Reading | Asked | Written)
    }

    /// Stops the process that the load needs: for its data, the prefill's rank if that is separate.
    fn hold(&mut self) -> Check {
        match (self.cell.moment, &self.two.prefill.ranks[..]) {
            (Reading, [rank, ..]) => rank.stop(),
            _ => self.two.prefill.process().stop(),
        }
    }

    fn let_go(&mut self) -> Check {
        match (self.cell.moment, &self.two.prefill.ranks[..]) {
            (Written, _) => self.two.decode.goes_on(),
            (Reading, [rank, ..]) => rank.go_on(),
            _ => self.two.prefill.process().go_on(),
        }
    }

    /// Returns whether the stopped process is the one that fails. The fault then decides whether it
    /// continues.
    fn is_held_itself(&self) -> bool {
        match self.cell.subject {
            PrefillEngine => self.cell.moment != Written,
            PrefillRank => self.cell.moment == Reading,
            DecodeRank => false,
            DecodeEngine => self.cell.moment == Written,
        }
    }

    fn subject(&mut self) -> &mut Engine {
        if self.cell.subject.is_prefill() { &mut self.two.prefill } else { &mut self.two.decode }
    }

    fn cause_trouble(&mut self, request: &str) -> Check {
        let Cell { subject, trouble, .. } = self.cell;
        let (is_held, asks) = (self.is_held() && self.is_held_itself(), self.asks);
        let is_of_a_rank_again = self.cell.is_of_a_rank_again();
        let engine = self.subject();
        match trouble {
            Killed | Restarted | Renamed if subject.is_rank() => engine.ranks[0].kill(),
            Killed => engine.process().kill(),
            Stopped | StoppedAWhile if subject.is_rank() => engine.ranks[0].stop(),
            Stopped | StoppedAWhile => engine.process().stop(),
            Restarted => engine.start_again(&engine.spec.id.clone()),
            Renamed => engine.start_again(&format!("{}-new", engine.spec.id)),
            Aborted if is_held => engine.goes_on_with_an_abort(request),
            Aborted => engine.abort(request),
        }?;
        if is_of_a_rank_again {
            let again = engine.start_rank_again()?;
            self.again = Some(again);
            return Ok(());
        }
        // The blocks are reused for another prompt at once.
        match asks && subject == PrefillEngine && trouble == Aborted {
            true => engine.occupy(OTHERS).and_then(|()| engine.vacate()),
            false => Ok(()),
        }
    }

    /// Checks that the rank that was started again receives an error that names the lost rank and
    /// the remedy.
    fn is_refused(&mut self) -> Check {
        let Some(again) = self.again.take() else { return Ok(()) };
        let said = again.hear(CUT_OFF)?;
        let words = ["rank pp 0 tp 0 (process ", "restart the engine with all its ranks"];
        ensure(words.iter().all(|words| said.contains(words)), || {
            format!("the error of a rank that was started again: {said}")
        })
    }

    fn go_on_after(&mut self, since: Instant) -> Check {
        std::thread::sleep((since + A_WHILE).saturating_duration_since(Instant::now()));
        let subject = self.cell.subject;
        let engine = self.subject();
        if subject.is_rank() { engine.ranks[0].go_on() } else { engine.goes_on() }
    }

    /// Returns how long a stopped rank delays the prefill's step, which waits for the digests of
    /// the blocks that it publishes.
    fn step_with_digests(&mut self) -> Result<Duration, Failure> {
        let began = Instant::now();
        self.two.prefill.prefill_within(STEP + GRACE, "held", u64::MAX, TOKENS)?;
        let took = began.elapsed();
        ensure(took <= STEP + GRACE, || format!("a step took {took:?}"))?;
        Ok(took)
    }

    /// Returns how the load ends, or `None` if no process is left to observe it.
    fn end(&mut self, published: &Published) -> Result<Option<String>, Failure> {
        match (self.cell.subject, self.cell.trouble, self.cell.moment) {
            (_, _, ToldNotFreed) => return Ok(None),
            (DecodeEngine, Killed | Stopped | Aborted, _) => return Ok(None),
            // The loads of the old decode have ended with it.
            (DecodeEngine, Restarted | Renamed, moment)
                if !matches!(moment, BeforeTheHandshake | Idle) =>
            {
                return Ok(None);
            }
            (_, _, BeforeTheHandshake | Idle) => self.two.begin(published, WITHIN)?,
            // A decode that has detected the loss of its rank starts no load.
            (DecodeRank, Killed | Restarted | Renamed, Queued)
                if self.two.decode.admit(&published.0).is_err() =>
            {
                self.two.decode.abort(&published.0)?;
                return Ok(Some("rank".to_owned()));
            }
            (DecodeRank, Killed | Restarted | Renamed, Queued) => {}
            (_, _, Queued) => self.two.decode.admit(&published.0)?,
            (_, _, InTheHandshake | Reading | Asked | Written | Checking) => {}
        }
        let began = Instant::now();
        let answer = self.two.decode.outcome(&published.0, WITHIN + GRACE)?;
        ensure(began.elapsed() <= WITHIN + GRACE, || format!("late: {answer:?}"))?;
        match answer {
            Answer::Loaded { .. } => Ok(Some("arrived".to_owned())),
            Answer::NotLoaded { why, .. } => Ok(Some(kind_of(&why).to_owned())),
            answer => Err(Failure::new(format!("expected the end of a load, got {answer:?}"))),
        }
    }

    /// Reuses the decode's blocks after the load has ended. Returns how long they took to become
    /// free, or `None` if some are still held because only the prefill can confirm that it no
    /// longer writes to them.
    fn use_decodes_blocks(&mut self) -> Result<Option<Duration>, Failure> {
        let began = Instant::now();
        let back = self.two.decode.all_free(BLOCKS_BACK);
        let took = began.elapsed();
        let needs_prefill = !self.two.status()?.owner_revokes;
        let stands_still = matches!(self.cell.trouble, Stopped | StoppedAWhile);
        let kept = match back {
            Err(_) if needs_prefill && stands_still => {
                self.two.decode.keeps_at_most(TOKENS).map(|()| true)?
            }
            back => back.map(|()| false)?,
        };
        self.two.decode.occupy(OTHERS)?;
        Ok((!kept).then_some(took))
    }

    /// Checks that nothing writes into the reused blocks, whatever happens to the prefill.
    fn decodes_blocks_stay(&mut self) -> Check {
        let until = Instant::now() + QUIET;
        while Instant::now() < until {
            self.two.decode.is_unchanged()?;
        }
        self.two.decode.vacate()
    }

    /// Returns how long the blocks of both engines took to become free, as far as can be observed.
    /// `used` is the time that the decode's blocks had taken before.
    fn blocks_come_back(&mut self, used: Duration) -> Result<String, Failure> {
        let (subject, trouble) = (self.cell.subject, self.cell.trouble);
        let gone = matches!(trouble, Killed | Stopped);
        let alone = self.two.status()?;
        let began = Instant::now();
        if !(subject == PrefillEngine && gone) {
            let is_missed = subject == PrefillRank && trouble == Stopped;
            let back = self.two.prefill.all_free(if is_missed { MISSED } else { BLOCKS_BACK });
            // The decode itself, or a library, may write them, so they are held until the decode is
            // gone.
            let may_be_kept = self.asks
                && (subject, trouble) == (DecodeEngine, Stopped)
                && !alone.writes_settle_alone;
            if may_be_kept && back.is_err() {
                return self.two.prefill.keeps_at_most(TOKENS).map(|()| KEPT.to_owned());
            }
            back?;
        }
        let are_kept = match (subject, trouble) {
            // The stopped rank may still write when it continues, so the blocks that it was to fill
            // are never reused.
            (DecodeRank, Stopped) => true,
            // A library whose backend needs the peer to settle may still write too, until the
            // prefill is gone.
            (PrefillRank | PrefillEngine, Stopped) if !self.asks && !alone.reads_settle_alone => {
                self.two.decode.all_free(BLOCKS_BACK).is_err()
            }
            _ => false,
        };
        if are_kept {
            self.two.decode.keeps_at_most(TOKENS)?;
            let all = self.two.decode.spec.shape.blocks;
            return Ok(if self.two.decode.free()? < all { KEPT } else { "0" }.to_owned());
        }
        if !(subject == DecodeEngine && gone) {
            self.two.decode.all_free(BLOCKS_BACK)?;
        }
        Ok(began.elapsed().max(used).as_millis().to_string())
    }

    /// Starts another engine in place of one that is gone or has lost a rank.
    fn heal(&mut self) -> Check {
        let suffix = match self.cell.trouble {
            Killed | Stopped => "-again",
            Restarted if self.cell.subject.is_rank() => "",
            Renamed if self.cell.subject.is_rank() => "-new",
            Restarted | Renamed | StoppedAWhile | Aborted => return Ok(()),
        };
        let engine = self.subject();
        engine.start_again(&format!("{}{suffix}", engine.spec.id))
    }
}

/// Returns a short name for the reason of a failure.
fn kind_of(why: &str) -> &str {
    let kinds = [
        ("the handshake failed", "handshake"),
        ("the transfer failed", "transfer"),
        ("the peer no longer held the blocks", "stale"),
        ("the request's deadline", "deadline"),
        ("this engine has lost a rank", "rank"),
        // The loss was known before the load began.
        ("the load is refused: a rank of this engine is not there", "rank"),
        ("the peer did not send the blocks in time", "not written"),
    ];
    kinds.iter().find(|(words, _)| why.starts_with(words)).map_or(why, |(_, kind)| kind)
}
