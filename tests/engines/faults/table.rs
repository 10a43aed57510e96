//! Whose process fails, how, and where a load is then: each of it with each.

use std::fmt;

use super::*;
use crate::checking;
use crate::engine::Answer;
use crate::model::Shape;

/// Set: all of it, a row of the table for each, and none of the engines' other tests.
const ALL: &str = "KVX_FAULTS_ALL";

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
/// How many loads may be checked before the check of one is held.
const CHECKS: u32 = 200;
/// How long somebody stands still who goes on.
const A_WHILE: Duration = Duration::from_secs(5);

#[derive(Clone, Copy, PartialEq)]
enum Subject {
    PrefillRank,
    PrefillEngine,
    DecodeRank,
    DecodeEngine,
}

#[derive(Clone, Copy, PartialEq)]
enum Trouble {
    Killed,
    StoppedAWhile,
    Stopped,
    Restarted,
    Renamed,
    /// Its request is.
    Aborted,
}

#[derive(Clone, Copy, PartialEq)]
enum Moment {
    BeforeTheHandshake,
    InTheHandshake,
    Queued,
    Reading,
    /// All has arrived, and is compared with its digests.
    Checking,
    ToldNotFreed,
    Idle,
}

use Moment::{BeforeTheHandshake, Checking, Idle, InTheHandshake, Queued, Reading, ToldNotFreed};
use Subject::{DecodeEngine, DecodeRank, PrefillEngine, PrefillRank};
use Trouble::{Aborted, Killed, Renamed, Restarted, Stopped, StoppedAWhile};

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            PrefillRank => "prefill rank",
            PrefillEngine => "prefill engine",
            DecodeRank => "decode rank",
            DecodeEngine => "decode engine",
        })
    }
}

impl fmt::Display for Trouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Killed => "killed",
            StoppedAWhile => "stopped 5 s",
            Stopped => "stopped",
            Restarted => "restarted",
            Renamed => "restarted with a new id",
            Aborted => "aborts",
        })
    }
}

impl fmt::Display for Moment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            BeforeTheHandshake => "before the handshake",
            InTheHandshake => "in the handshake",
            Queued => "queued",
            Reading => "reading",
            Checking => "checking",
            ToldNotFreed => "told, not freed",
            Idle => "idle",
        })
    }
}

impl Subject {
    fn is_rank(self) -> bool {
        matches!(self, PrefillRank | DecodeRank)
    }

    fn is_prefill(self) -> bool {
        matches!(self, PrefillRank | PrefillEngine)
    }
}

/// What can happen: a rank starts with its engine, and nothing is aborted where nothing is.
fn can_be(subject: Subject, trouble: Trouble, moment: Moment) -> bool {
    match trouble {
        Restarted | Renamed => !subject.is_rank(),
        Aborted => !subject.is_rank() && !matches!(moment, ToldNotFreed | Idle | BeforeTheHandshake),
        Killed | Stopped | StoppedAWhile => true,
    }
}

pub(crate) fn cases() -> Vec<Case> {
    let mut rows = Vec::new();
    for subject in [PrefillRank, PrefillEngine, DecodeRank, DecodeEngine] {
        for trouble in [Killed, StoppedAWhile, Stopped, Restarted, Renamed, Aborted] {
            for moment in [BeforeTheHandshake, InTheHandshake, Queued, Reading, Checking, ToldNotFreed, Idle]
            {
                rows.extend(can_be(subject, trouble, moment).then_some((subject, trouble, moment)));
            }
        }
    }
    let all = is_all();
    let (tier, backends): (_, &[&str]) = match all {
        true => (Tier::Fast, &["TCP", "SHM", "UCX", "LIBFABRIC", "RIXL"]),
        false => (Tier::Whole, &["TCP"]),
    };
    let mut cases = Vec::new();
    for backend in backends {
        for (at, (subject, trouble, moment)) in rows.iter().copied().enumerate() {
            if all || at % 3 == 0 {
                let name = format!("{subject} {trouble}, {moment}");
                let title = name.clone();
                let needed = move |backend: &str| match moment {
                    Checking => checking::can_be_held().and_then(|()| that_outlive_kills(backend)),
                    _ => that_outlive_kills(backend),
                };
                let run_or_say = move |backend: &str| match needed(backend) {
                    Ok(variables) => {
                        let two = two(backend, variables, subject, moment == Checking)?;
                        Run { two, subject, trouble, moment }.run(backend)
                    }
                    Err((reason, cure)) => {
                        skip(&format!("{backend}::{title}"), &reason, cure);
                        Ok(())
                    }
                };
                cases.push(Case::new(name, backend, tier, run_or_say));
            }
        }
    }
    cases
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
    subject: Subject,
    trouble: Trouble,
    moment: Moment,
}

impl Run {
    fn run(mut self, backend: &str) -> Check {
        let Run { subject, trouble, moment, .. } = self;
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
        if moment == Checking && subject == PrefillRank && trouble == Stopped {
            let step = self.step_with_digests()?.as_millis();
            ended = ended.map(|ended| format!("{ended}, next step held {step}"));
        }
        if trouble == StoppedAWhile && !waits {
            self.go_on_after(since)?;
        }
        let back = self.blocks_come_back()?;
        let healed = Instant::now();
        self.heal()?;
        self.two.works()?;
        let works = healed.elapsed();
        self.two.all_free()?;
        if is_all() {
            let ms =
                |time: Option<Duration>| time.map_or("-".to_owned(), |time| time.as_millis().to_string());
            let ended = ended.as_deref().unwrap_or("-");
            let (after, works) = (ms(after), ms(Some(works)));
            // The harness has begun a line.
            println!(
                "\n| {backend} | {subject} {trouble} | {moment} | {ended} | {after} | {back} | {works} |"
            );
        }
        Ok(())
    }

    /// Brings a load to the moment.
    fn reach(&mut self) -> Result<Published, Failure> {
        let published = self.two.published()?;
        match self.moment {
            BeforeTheHandshake | Idle => {}
            Queued => self.two.decode.arrive(&load(&published.0), &published.1, WITHIN)?,
            InTheHandshake | Reading => {
                self.hold()?;
                self.two.begin(&published, WITHIN)?;
            }
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
        for _ in 0..CHECKS {
            if self.two.decode.check(&load(&published.0), &published.1, WITHIN)? {
                return Ok(published);
            }
            self.two.decode.arrives(&published.0, TOKENS)?;
            published = self.two.published()?;
        }
        Err(Failure::new(format!("{CHECKS} checks were over before they could be held")))
    }

    /// The prefill stands still, so that the load does.
    fn is_held(&self) -> bool {
        matches!(self.moment, InTheHandshake | Reading)
    }

    /// Stops the process that the load needs: for its data the prefill's rank, if that has one of its own.
    fn hold(&mut self) -> Check {
        match (self.moment, &self.two.prefill.ranks[..]) {
            (Reading, [rank, ..]) => rank.stop(),
            _ => self.two.prefill.process().stop(),
        }
    }

    fn let_go(&mut self) -> Check {
        match (self.moment, &self.two.prefill.ranks[..]) {
            (Reading, [rank, ..]) => rank.go_on(),
            _ => self.two.prefill.process().go_on(),
        }
    }

    /// Whether the process that is held is the one in trouble: the trouble says then whether it goes on.
    fn is_held_itself(&self) -> bool {
        match self.subject {
            PrefillEngine => true,
            PrefillRank => self.moment == Reading,
            DecodeRank | DecodeEngine => false,
        }
    }

    fn subject(&mut self) -> &mut Engine {
        if self.subject.is_prefill() { &mut self.two.prefill } else { &mut self.two.decode }
    }

    fn cause_trouble(&mut self, request: &str) -> Check {
        let (subject, trouble, is_held) = (self.subject, self.trouble, self.is_held());
        let engine = self.subject();
        match trouble {
            Killed if subject.is_rank() => engine.ranks[0].kill(),
            Killed => engine.process().kill(),
            Stopped | StoppedAWhile if subject.is_rank() => engine.ranks[0].stop(),
            Stopped | StoppedAWhile => engine.process().stop(),
            Restarted => engine.start_again(&engine.spec.id.clone()),
            Renamed => engine.start_again(&format!("{}-new", engine.spec.id)),
            Aborted if subject == PrefillEngine && is_held => engine.goes_on_with_an_abort(request),
            Aborted => engine.abort(request),
        }
    }

    fn go_on_after(&mut self, since: Instant) -> Check {
        std::thread::sleep((since + A_WHILE).saturating_duration_since(Instant::now()));
        let subject = self.subject;
        let engine = self.subject();
        if subject.is_rank() { engine.ranks[0].go_on() } else { engine.process().go_on() }
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
        match (self.subject, self.trouble, self.moment) {
            (_, _, ToldNotFreed) => return Ok(None),
            (DecodeEngine, Killed | Stopped | Aborted, _) => return Ok(None),
            // The old one's loads have gone with it.
            (DecodeEngine, Restarted | Renamed, Queued | InTheHandshake | Reading | Checking) => {
                return Ok(None);
            }
            (_, _, BeforeTheHandshake | Idle) => self.two.begin(published, WITHIN)?,
            // Who knows that a rank is lost orders nothing.
            (DecodeRank, Killed, Queued) if self.two.decode.admit(&published.0).is_err() => {
                self.two.decode.abort(&published.0)?;
                return Ok(Some("rank".to_owned()));
            }
            (DecodeRank, Killed, Queued) => {}
            (_, _, Queued) => self.two.decode.admit(&published.0)?,
            (_, _, InTheHandshake | Reading | Checking) => {}
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

    /// How long the blocks of both took to come back, as far as anybody can say.
    fn blocks_come_back(&mut self) -> Result<String, Failure> {
        let (subject, trouble) = (self.subject, self.trouble);
        let gone = matches!(trouble, Killed | Stopped);
        let began = Instant::now();
        if !(subject == PrefillEngine && gone) {
            let is_missed = subject == PrefillRank && trouble == Stopped;
            self.two.prefill.all_free(if is_missed { MISSED } else { BLOCKS_BACK })?;
        }
        let are_kept = match (subject, trouble) {
            // It may still write when it goes on: what it was to fill is nobody's any more.
            (DecodeRank, Stopped) => true,
            // So may a library, of which the backend says that it needs the peer to be done: until the prefill is gone.
            (PrefillRank | PrefillEngine, Stopped) if !self.two.reads_end_alone()? => {
                self.two.decode.all_free(BLOCKS_BACK).is_err()
            }
            _ => false,
        };
        if are_kept {
            let (free, all) = (self.two.decode.free()?, self.two.decode.spec.shape.blocks);
            ensure(all - free <= TOKENS.div_ceil(self.two.decode.spec.shape.logical()), || {
                format!("{free} of {all}")
            })?;
            return Ok(if free < all { "its blocks are kept".to_owned() } else { "0".to_owned() });
        }
        if !(subject == DecodeEngine && gone) {
            self.two.decode.all_free(BLOCKS_BACK)?;
        }
        Ok(began.elapsed().as_millis().to_string())
    }

    /// Another engine takes the place of one that is gone, or has lost a rank.
    fn heal(&mut self) -> Check {
        if !matches!(self.trouble, Killed | Stopped) {
            return Ok(());
        }
        let engine = self.subject();
        engine.start_again(&format!("{}-again", engine.spec.id))
    }
}

/// What has failed, in a word.
fn kind_of(why: &str) -> &str {
    let kinds = [
        ("the handshake failed", "handshake"),
        ("the transfer failed", "transfer"),
        ("the peer had taken blocks back", "stale"),
        ("the request's deadline", "deadline"),
        ("this engine has lost a rank", "rank"),
    ];
    kinds.iter().find(|(words, _)| why.starts_with(words)).map_or(why, |(_, kind)| kind)
}
