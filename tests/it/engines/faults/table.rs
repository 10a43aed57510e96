//! Whose process fails, how, and where a load is then: each of it with each.

use super::cell::{self, *};
use super::*;
use crate::engines::checking;
use crate::engines::engine::Answer;
use crate::engines::unread;

/// Set: all of it, a row of the table for each, and none of the engines' other tests.
const ALL: &str = "KVX_ENGINE_FAULTS_ALL";

/// Whether `cargo xtask faults connector` wants the table.
pub(crate) fn is_all() -> bool {
    std::env::var_os(ALL).is_some()
}

/// How long a load may take.
const WITHIN: Duration = Duration::from_secs(2);
/// When a rank is missed that stands still, and two seconds: until then its leases may have been extended.
const MISSED: Duration = Duration::from_secs(12);
/// Until then a rank that stands still holds its engine's step: it is missed.
const STEP: Duration = Duration::from_secs(10);
/// How long somebody stands still who goes on.
const A_WHILE: Duration = Duration::from_secs(5);

/// What a row says instead of a time.
const KEPT: &str = "its blocks are kept";
/// A prompt that is nobody's request.
const OTHERS: u64 = 1_000_000;
/// How long nothing may write into blocks that were given back.
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
    // Those that once failed are among this third.
    let writes = third(cell::of_writes(), 2).map(|cell| (cell, true));
    let rows: Vec<(Cell, bool)> = reads.chain(writes).collect();
    let mut cases = Vec::new();
    for backend in backends {
        // A library of MooncakeConnector alone.
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

/// Variables of engines in this cell. Errors: reason and cure, if it cannot be.
fn needed(backend: &str, cell: Cell) -> Result<Vec<(String, String)>, (String, &'static str)> {
    if cell.moment == Checking || (backend, cell.moment) == ("SHM", Written) {
        checking::can_be_held()?;
    }
    that_outlive_kills(backend)
}

/// Two engines of MooncakeConnector, with blocks that do not come at once where the load is to be seen amid them.
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

/// Two engines. That subject rank it is about has two, in processes of their own.
fn two(
    backend: &str,
    variables: Vec<(String, String)>,
    subject: Subject,
    digests: bool,
) -> Result<Two, Failure> {
    let start = |id, apart: bool| {
        // Digests are of whole blocks of the prefill's ranks: it has as many as the decode.
        let two = apart || digests && subject == DecodeRank;
        let shape = Shape { tp: if two { 2 } else { 1 }, ..Shape::default() };
        let mut spec = Spec { apart, shape, variables: variables.clone(), ..spec(id, backend) };
        spec.extra["kvx_digest"] = digests.into();
        Engine::start(spec)
    };
    let prefill = start("prefill", subject == PrefillRank)?;
    Ok(Two { prefill, decode: start("decode", subject == DecodeRank)?, last: 0 })
}

/// Two engines, and what happens to one of them when.
struct Run {
    two: Two,
    cell: Cell,
    /// The decode asks, and the prefill writes.
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
        // Whoever was to be written to lives on, and its load is over.
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
            // The harness has begun a line.
            let title = self.cell.title();
            println!("\n| {backend} | {title} | {moment} | {ended} | {after} | {back} | {works} |");
        }
        Ok(())
    }

    /// Brings a load to the moment.
    fn reach(&mut self) -> Result<Published, Failure> {
        let published = self.two.published()?;
        match self.cell.moment {
            // What a decode aborts, it has heard of.
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

    /// Brings a load there whose check is held: another one, where a check was over before it could be.
    fn check(&mut self, mut published: Published) -> Result<Published, Failure> {
        for _ in 0..TRIES {
            if self.two.decode.check(&load(&published.0), &published.1, WITHIN)? {
                return Ok(published);
            }
            self.two.decode.arrives(&published.0, TOKENS)?;
            published = self.two.published()?;
        }
        Err(Failure::new(format!("{TRIES} checks were over before they could be held")))
    }

    /// One of the two stands still, so that the load does.
    fn is_held(&self) -> bool {
        matches!(self.cell.moment, InTheHandshake | Reading | Asked | Written)
    }

    /// Stops the process that the load needs: for its data the prefill's rank, if that has one of its own.
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

    /// Whether the process that is held is the one in trouble: the trouble says then whether it goes on.
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
        // Others compute in the same blocks at once.
        match asks && subject == PrefillEngine && trouble == Aborted {
            true => engine.occupy(OTHERS).and_then(|()| engine.vacate()),
            false => Ok(()),
        }
    }

    /// The rank that was started again hears which one its engine has lost, and what to do.
    fn is_refused(&mut self) -> Check {
        let Some(again) = self.again.take() else { return Ok(()) };
        let said = again.hear(CUT_OFF)?;
        let words = ["rank pp 0 tp 0 (process ", "restart the engine with all its ranks"];
        ensure(words.iter().all(|words| said.contains(words)), || {
            format!("a rank came back: {said}")
        })
    }

    fn go_on_after(&mut self, since: Instant) -> Check {
        std::thread::sleep((since + A_WHILE).saturating_duration_since(Instant::now()));
        let subject = self.cell.subject;
        let engine = self.subject();
        if subject.is_rank() { engine.ranks[0].go_on() } else { engine.goes_on() }
    }

    /// How long a rank that stands still holds the prefill's step, which awaits the digests of what it publishes.
    fn step_with_digests(&mut self) -> Result<Duration, Failure> {
        let began = Instant::now();
        self.two.prefill.prefill_within(STEP + GRACE, "held", u64::MAX, TOKENS)?;
        let took = began.elapsed();
        ensure(took <= STEP + GRACE, || format!("a step took {took:?}"))?;
        Ok(took)
    }

    /// How the load ends; nothing, where nobody is there to hear it.
    fn end(&mut self, published: &Published) -> Result<Option<String>, Failure> {
        match (self.cell.subject, self.cell.trouble, self.cell.moment) {
            (_, _, ToldNotFreed) => return Ok(None),
            (DecodeEngine, Killed | Stopped | Aborted, _) => return Ok(None),
            // The old one's loads have gone with it.
            (DecodeEngine, Restarted | Renamed, moment)
                if !matches!(moment, BeforeTheHandshake | Idle) =>
            {
                return Ok(None);
            }
            (_, _, BeforeTheHandshake | Idle) => self.two.begin(published, WITHIN)?,
            // Who knows that a rank is lost orders nothing.
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
            answer => Err(Failure::new(format!("an end was wanted, it was {answer:?}"))),
        }
    }

    /// The load is over: others compute in the decode's blocks. How long they took to come back; nothing, where some
    /// have not, as only the prefill can say that nobody writes into them.
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

    /// Nothing writes into them any more, whatever has become of the prefill.
    fn decodes_blocks_stay(&mut self) -> Check {
        let until = Instant::now() + QUIET;
        while Instant::now() < until {
            self.two.decode.is_unchanged()?;
        }
        self.two.decode.vacate()
    }

    /// How long the blocks of both took to come back, as far as anybody can say. Those of the decode had taken so long
    /// before.
    fn blocks_come_back(&mut self, used: Duration) -> Result<String, Failure> {
        let (subject, trouble) = (self.cell.subject, self.cell.trouble);
        let gone = matches!(trouble, Killed | Stopped);
        let alone = self.two.status()?;
        let began = Instant::now();
        if !(subject == PrefillEngine && gone) {
            let is_missed = subject == PrefillRank && trouble == Stopped;
            let back = self.two.prefill.all_free(if is_missed { MISSED } else { BLOCKS_BACK });
            // What writes them may be the decode itself, or a library: until the decode is gone.
            let may_be_kept = self.asks
                && (subject, trouble) == (DecodeEngine, Stopped)
                && !alone.writes_settle_alone;
            if may_be_kept && back.is_err() {
                return self.two.prefill.keeps_at_most(TOKENS).map(|()| KEPT.to_owned());
            }
            back?;
        }
        let are_kept = match (subject, trouble) {
            // It may still write when it goes on: what it was to fill is nobody's any more.
            (DecodeRank, Stopped) => true,
            // So may a library, of which the backend says that it needs the peer to be done: until the prefill is gone.
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

    /// Another engine takes the place of one that is gone, or has lost a rank.
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

/// What has failed, in a word.
fn kind_of(why: &str) -> &str {
    let kinds = [
        ("the handshake failed", "handshake"),
        ("the transfer failed", "transfer"),
        ("the peer revoked or reused blocks", "stale"),
        ("the request's deadline", "deadline"),
        ("this engine has lost a rank", "rank"),
        // It was known before the load began.
        ("the load is refused: a rank of this engine is not there", "rank"),
        ("the peer did not send the blocks in time", "not written"),
    ];
    kinds.iter().find(|(words, _)| why.starts_with(words)).map_or(why, |(_, kind)| kind)
}
