//! Whether a test that failed beside others fails alone too.
//!
//! The suites start thousands of processes, several tests at a time, on machines that others use as well. A test that
//! fails there once and never alone is a defect, of kvx, of a library or of the test, but one that repeating the whole
//! run does not find: its name and its message do. So such a test is *excused*: it counts as neither passed nor failed,
//! its name is printed above the counts, and it belongs into the ledger ([`super::ledger`]). A test that fails alone
//! once in [`TIMES`] runs has failed, and so have more tests than [`MOST`] and those that nothing excuses.

use std::path::Path;
use std::time::Duration;

use crate::harness::{self, Failure, Tally, Test};
use crate::process::{self, Output};
use crate::skips::{self, Skip};

/// How many tests may be excused in a run: more say that something is broken.
pub(crate) const MOST: usize = 2;

/// How often a test has to pass alone.
pub(crate) const TIMES: usize = 3;

/// How long each time may take.
const LIMIT: Duration = Duration::from_secs(120);

/// Clauses of kvx-core/CONTRACT.md that are never excused, as no backend may list them as gaps: memory that is touched or
/// freed too early, and a notification that arrives twice. Nor are the security clauses, which begin with S, tests of
/// unauthenticated peers, and those of the modules that admit peers.
const NEVER_EXCUSED: &[&str] = &["O2", "O3", "O4", "O5", "O6", "O7", "O8", "N3"];

/// Words in the names of security tests that have no clause.
const SECURITY_WORDS: &[&str] =
    &["hostile", "stranger", "strangers", "secret", "forged", "attackers", "security", "invited", "recorded"];

/// The modules that admit peers. Their names are words in the names of their tests.
const ADMISSION: [&str; 3] =
    ["kvx-native/src/tcp/auth.rs", "kvx-backend/src/control/hello.rs", "kvx-backend/src/control/proof.rs"];

/// Whether a test, or a program of tests, is none of those: no word of its name is such an id or such a word.
fn is_excusable(name: &str) -> bool {
    let is_security = |word: &str| {
        word.strip_prefix('S')
            .is_some_and(|number| !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit()))
    };
    let is_room =
        |word: &str| ADMISSION.iter().any(|room| Path::new(room).file_stem() == Some(word.as_ref()));
    let is_never = |word: &str| NEVER_EXCUSED.contains(&word) || SECURITY_WORDS.contains(&word);
    let mut words = name.split(|c: char| !c.is_alphanumeric());
    !words.any(|word| is_never(word) || is_room(word) || is_security(word))
}

/// Runs the failed tests of `tally` again by `passes`, if all of them can be excused and no more than `most` failed.
/// Those that pass each time are excused instead of failed.
pub(crate) fn excuse(tally: &mut Tally, most: usize, passes: impl Fn(&Test) -> bool) {
    let can_pass = |failure: &Failure| {
        let test = failure.test.as_ref();
        test.is_some_and(|test| is_excusable(&test.name) && is_excusable(&test.program.title))
    };
    if tally.failures.len() > most || !tally.failures.iter().all(can_pass) {
        return;
    }
    let fails =
        |failure: &Failure| !failure.test.as_ref().is_some_and(|test| (0..TIMES).all(|_| passes(test)));
    (tally.failures, tally.excused) = std::mem::take(&mut tally.failures).into_iter().partition(fails);
}

/// Whether this test, and no other, runs and passes. The whole run had skipped `skipped`, but not this test.
pub(crate) fn alone(test: &Test, notes: &Path, variables: &[(&str, &str)], skipped: &[Skip]) -> bool {
    println!("again, alone: cargo test {} -- --exact {}", test.program.shown(), test.name);
    if skips::clear(notes).is_err() {
        return false;
    }
    let mut command = test.program.command_of(&test.name);
    command.env(skips::VARIABLE, notes).envs(variables.iter().copied());
    let passed = process::run(command, LIMIT, Output::Shown)
        .is_ok_and(|finished| finished.succeeded() && harness::ran(&finished.output).0 == 1);
    passed && skips::read(notes).is_ok_and(|notes| all_of_others(&notes.skips, skipped))
}

/// Whether all these skips are of other suites of the program, which it leaves out whatever test it is asked for.
fn all_of_others(skips: &[Skip], skipped: &[Skip]) -> bool {
    skips.iter().all(|skip| skipped.contains(skip))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test::programs::TestProgram;
    use std::cell::Cell;

    fn failed(names: &[&str]) -> Tally {
        let program = TestProgram::of_nothing("-p tcp --lib");
        let failures = names.iter().map(|name| Failure::of_test(name, &program, ""));
        Tally { passed: 5, failures: failures.collect(), ..Tally::default() }
    }

    #[test]
    fn what_the_whole_run_left_out_too_is_no_skip_of_this_test() {
        let skip = |name| Skip::new(name, "no GPU; cure: another machine");
        let whole = [skip("UCX-device"), skip("UCX-other-device")];
        assert!(all_of_others(&[skip("UCX-device")], &whole));
        assert!(!all_of_others(&[skip("UCX-device"), skip("P12")], &whole));
    }

    #[test]
    fn what_passes_each_time_is_excused_and_what_fails_once_has_failed() {
        let (mut tally, runs) = (failed(&["steady", "rare"]), Cell::new(0));
        excuse(&mut tally, 2, |test| {
            runs.set(runs.get() + 1);
            // The first passes twice and fails then.
            test.name == "rare" || runs.get() < TIMES
        });
        assert_eq!(runs.get(), 2 * TIMES);
        assert_eq!(tally.failures, failed(&["steady"]).failures);
        assert_eq!(tally.excused, failed(&["rare"]).failures);
        assert_eq!(tally.passed, 5, "an excused test has not passed");
    }

    #[test]
    fn too_many_failures_those_without_a_name_and_those_of_memory_and_safety_stay_failures() {
        let unasked = |_: &Test| unreachable!("nothing runs again");
        let mut many = failed(&["a", "b"]);
        excuse(&mut many, 1, unasked);
        let mut nameless = Tally { failures: vec![Failure::from("it hung".to_owned())], ..Tally::default() };
        excuse(&mut nameless, 1, unasked);
        for name in [
            "UCX-1.13::two::O5_nothing_is_written_after_settle",
            "clause N3 x broken by y",
            "SHM::one::S12_x",
            "shm::hostile::a_frame_that_lies",
            "what_a_stranger_hears",
            "tcp::auth::tests::a_recorded_conversation_is_refused",
            "control::hello::tests::every_altered_bit_of_a_hello_or_a_welcome_is_noticed",
            "control::proof::tests::it_holds_for_one_key",
            "control::tests::who_was_invited_by_another_agent_is_turned_away",
            "runtime::side::tests::a_question_that_was_recorded_opens_nothing",
        ] {
            let mut never = failed(&[name]);
            excuse(&mut never, 1, unasked);
            assert_eq!(never.failures.len(), 1, "{name}");
        }
        assert_eq!((many.failures.len(), nameless.failures.len()), (2, 1));
    }

    #[test]
    fn other_clauses_and_names_that_look_like_theirs_can_be_excused() {
        for name in [
            "UCX::two::O1_a_ticket",
            "SHM-O::one::T2_x",
            "shm::NO3_x",
            "S::reads",
            "N31_x",
            "authors::proofs",
        ] {
            assert!(is_excusable(name), "{name}");
        }
    }

    #[test]
    fn the_modules_that_admit_peers_are_there() {
        for room in ADMISSION {
            assert!(crate::root().join(room).is_file(), "{room}");
        }
    }

    #[test]
    fn the_contract_has_the_clauses_that_are_never_excused() {
        let contract = concat!(env!("CARGO_MANIFEST_DIR"), "/../kvx-core/CONTRACT.md");
        let contract = std::fs::read_to_string(contract).unwrap();
        for clause in NEVER_EXCUSED.iter().chain(&["S1"]) {
            assert!(contract.contains(&format!("\n### {clause} ")), "{clause}");
        }
    }
}
