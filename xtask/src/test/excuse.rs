//! Runs failed tests again, alone.
//!
//! The suites start thousands of processes, several tests at a time, on machines that others use as
//! well. A test that fails there once and never alone has a defect, of kvx, of a library or of the
//! test. Its name and its message help to find it; repeating the whole run does not. So such a test
//! is *excused*: it counts as neither passed nor failed, its name is printed above the counts, and
//! the run prints an entry for the ledger ([`super::ledger`]). A test that fails in one of
//! [`TIMES`] runs alone counts as failed. So do all failed tests if there are more than [`MOST`],
//! or if one of them is never excused.

use std::path::Path;
use std::time::Duration;

use crate::harness::{Failure, Tally, Test, passed_and_skipped};
use crate::process::{self, Output};
use crate::skips::{self, Skip};

/// The number of tests that may be excused in a run.
pub(crate) const MOST: usize = 2;

/// How often a failed test runs alone.
const TIMES: usize = 3;

/// The time limit of each of these runs.
const LIMIT: Duration = Duration::from_secs(120);

/// Clauses of kvx-core/CONTRACT.md that are never excused: those about memory that is touched or
/// freed too early, and about notifications that arrive twice. Neither are the security clauses, S1
/// and so on.
const SAFETY_CLAUSES: &[&str] = &["O2", "O3", "O4", "O5", "O6", "O7", "O8", "N3"];

/// Words in the names of security tests that have no clause.
const SECURITY_WORDS: &[&str] = &[
    "hostile",
    "attacker",
    "stranger",
    "strangers",
    "authentication",
    "unauthenticated",
    "altered",
    "replayed",
    "secret",
    "forged",
    "attackers",
    "attacks",
    "secrets",
    "noise",
    "security",
    "invited",
    "recorded",
];

/// The modules that admit peers. Their names are words in the names of their tests.
const ADMISSION: [&str; 3] = [
    "kvx-native/src/tcp/frames/auth.rs",
    "kvx-backend/src/control/hello.rs",
    "kvx-backend/src/control/proof.rs",
];

/// Returns whether a test, or a program, may be excused by its name.
fn is_excusable(name: &str) -> bool {
    let is_security_clause =
        |word: &str| word.strip_prefix('S').is_some_and(|number| number.parse::<u32>().is_ok());
    let admits = |word: &str| {
        ADMISSION.iter().any(|file| Path::new(file).file_stem() == Some(word.as_ref()))
    };
    !name.split(|c: char| !c.is_alphanumeric()).any(|word| {
        SAFETY_CLAUSES.contains(&word)
            || SECURITY_WORDS.contains(&word)
            || is_security_clause(word)
            || admits(word)
    })
}

/// Runs the failed tests of `tally` again, by `passes`, if no more than `most` failed and each of
/// them may be excused. Moves those that pass each time from the failures to the excused tests.
pub(crate) fn excuse(tally: &mut Tally, most: usize, passes: impl Fn(&Test) -> bool) {
    let may_be_excused = |failure: &Failure| {
        let test = failure.test.as_ref();
        test.is_some_and(|test| is_excusable(&test.name) && is_excusable(&test.program.title))
    };
    if tally.failures.len() <= most && tally.failures.iter().all(may_be_excused) {
        let passes_alone = |failure: &mut Failure| {
            failure.test.as_ref().is_some_and(|test| (0..TIMES).all(|_| passes(test)))
        };
        tally.excused.extend(tally.failures.extract_if(.., passes_alone));
    }
}

/// Runs a test alone and returns whether it ran and passed. A skip that the whole run did not have
/// (`known`) is its own.
pub(crate) fn passes_alone(
    test: &Test,
    notes: &Path,
    variables: &[(&str, &str)],
    known: &[Skip],
) -> bool {
    println!("again, alone: cargo test {} -- --exact {}", test.program.shown(), test.name);
    if skips::clear(notes).is_err() {
        return false;
    }
    let mut command = test.program.command_of(&test.name);
    command.env(skips::VARIABLE, notes).envs(variables.iter().copied());
    let passed = process::run(command, LIMIT, Output::Shown)
        .is_ok_and(|finished| finished.succeeded() && passed_and_skipped(&finished.output).0 == 1);
    passed && skips::read(notes).is_ok_and(|notes| are_known(&notes.skips, known))
}

/// Returns whether the whole run had all these skips: a program notes those of its other suites
/// whenever it runs.
fn are_known(skips: &[Skip], known: &[Skip]) -> bool {
    skips.iter().all(|skip| known.contains(skip))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test::programs::TestProgram;
    use std::cell::Cell;

    fn failed(names: &[&str]) -> Tally {
        let program = TestProgram::named("-p tcp --lib");
        let failures = names.iter().map(|name| Failure::of_test(name, &program, ""));
        Tally { passed: 5, failures: failures.collect(), ..Tally::default() }
    }

    #[test]
    fn a_test_that_passes_alone_each_time_is_excused_and_one_that_fails_once_has_failed() {
        let (mut tally, runs) = (failed(&["steady", "rare"]), Cell::new(0));
        excuse(&mut tally, MOST, |test| {
            runs.set(runs.get() + 1);
            // The first one passes twice and then fails.
            test.name == "rare" || runs.get() < 3
        });
        assert_eq!((runs.get(), MOST), (6, 2));
        assert_eq!(tally.failures, failed(&["steady"]).failures);
        assert_eq!(tally.excused, failed(&["rare"]).failures);
        assert_eq!(tally.passed, 5, "an excused test has not passed");
    }

    #[test]
    fn a_test_alone_that_skips_itself_has_not_passed() {
        let skip = |name| Skip::new(name, "no GPU; cure: another machine");
        let known = [skip("UCX-device"), skip("UCX-other-device")];
        assert!(are_known(&[skip("UCX-device")], &known));
        assert!(!are_known(&[skip("UCX-device"), skip("P12")], &known));
    }

    #[test]
    fn too_many_failures_nameless_ones_and_those_of_safety_and_admission_are_not_excused() {
        let mut nameless = failed(&["a"]);
        nameless.failures.push(Failure::from("it hung".to_owned()));
        let names = [
            "UCX-1.13::two::O5_nothing_is_written_after_settle",
            "clause N3 x broken by y",
            "SHM::one::S12_x",
            "shm::hostile::a_frame_that_lies",
            "what_a_stranger_hears",
            "tcp::frames::auth::tests::a_recorded_conversation_is_refused",
            "control::hello::tests::every_altered_bit_of_a_hello_or_a_welcome_is_noticed",
            "control::proof::tests::it_holds_for_one_key",
            "control::tests::who_was_invited_by_another_agent_is_turned_away",
            "runtime::side::tests::a_question_that_was_recorded_opens_nothing",
            "attacks::parameters::a_client_cannot_read_the_blocks_of_another_request",
            "engines::secrets::a_peer",
        ];
        let single = names.iter().map(|name| failed(&[name]));
        for mut tally in single.chain([nameless, failed(&["a", "b", "c"])]) {
            let before = tally.failures.clone();
            excuse(&mut tally, MOST, |test| unreachable!("{} runs again", test.name));
            assert_eq!((tally.failures, tally.excused), (before, Vec::new()));
        }
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
        assert!(!is_excusable("-p kvx-noise --lib"), "the title of a program");
    }

    #[test]
    fn the_clauses_and_modules_that_are_never_excused_exist() {
        for file in ADMISSION {
            assert!(crate::root().join(file).is_file(), "{file}");
        }
        let contract = std::fs::read_to_string(crate::root().join("kvx-core/CONTRACT.md")).unwrap();
        for clause in SAFETY_CLAUSES.iter().chain(&["S1"]) {
            assert!(contract.contains(&format!("\n### {clause} ")), "{clause}");
        }
        // xtask depends on no kvx crate, so it has its own copy of the suite's list.
        let suite =
            std::fs::read_to_string(crate::root().join("kvx-testkit/src/suite.rs")).unwrap();
        let list = format!("const NEVER_A_GAP: &[&str] = &{SAFETY_CLAUSES:?};");
        assert!(suite.contains(&list), "NEVER_A_GAP of the testkit must be {list}");
    }
}
