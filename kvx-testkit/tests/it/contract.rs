//! Compares CONTRACT.md with the suite's table: every clause has a test, and every test is a
//! clause.

use kvx_core::fault_injection::BREAKS;
use kvx_testkit::{Breaker, CLAUSES, Execution, Fault, test};

const CONTRACT: &str = include_str!("../../../kvx-core/CONTRACT.md");

/// Returns the id, the name and the text after `Runs:` of each clause of the contract.
fn written() -> Vec<(&'static str, &'static str, &'static str)> {
    let clauses = CONTRACT.split("\n### ").skip(1);
    clauses
        .map(|clause| {
            let (heading, text) = clause.split_once('\n').expect("a clause has a text");
            let (id, name) = heading.split_once(' ').expect("a heading is an id and a name");
            let runs = text.lines().find_map(|line| line.strip_prefix("Runs: "));
            assert!(text.contains("\nDepends on: "), "{id} does not say what it depends on");
            (id, name, runs.unwrap_or_else(|| panic!("{id} does not say what it runs on")))
        })
        .collect()
}

#[test]
fn the_contract_and_the_suite_agree_one_to_one() {
    let written: Vec<_> = written().into_iter().map(|(id, name, _)| (id, name)).collect();
    let tested: Vec<_> =
        CLAUSES.iter().copied().flatten().map(|clause| (clause.id, clause.name)).collect();
    for clause in &written {
        assert!(tested.contains(clause), "{clause:?} is promised but not tested");
    }
    for clause in &tested {
        assert!(written.contains(clause), "{clause:?} is tested but not promised");
    }
    assert_eq!(written.len(), tested.len(), "a clause is listed twice");
}

#[test]
fn clauses_run_on_what_the_contract_says() {
    for (id, _, runs) in written() {
        let clause = CLAUSES.iter().copied().flatten().find(|clause| clause.id == id);
        let clause = clause.unwrap_or_else(|| panic!("{id} is not tested"));
        let alone = runs.contains("in a process of its own");
        let one = runs.contains("one agent") && !alone || runs.contains("pair in one process");
        let two = runs.contains("pair in two processes") || alone;
        let wanted = match (one, two) {
            (true, true) => Execution::Both,
            (true, false) => Execution::OneProcess,
            (false, true) => Execution::TwoProcesses,
            (false, false) => Execution::Compiler,
        };
        assert_eq!(clause.runs, wanted, "{id} runs on {runs:?}");
    }
}

#[test]
fn every_clause_has_a_breaker_and_every_breaker_a_clause() {
    let clauses = || CLAUSES.iter().copied().flatten();
    for clause in clauses() {
        assert!(!clause.breakers.is_empty(), "{} has no breaker: could it fail?", clause.id);
    }
    let used: Vec<_> = clauses().flat_map(|clause| clause.breakers).collect();
    for switch in BREAKS {
        let found =
            used.iter().any(|breaker| matches!(breaker, Breaker::Core(used) if used == switch));
        assert!(found, "no clause is broken by core's switch {switch:?}: remove it");
    }
    for fault in Fault::ALL.iter().filter(|fault| !Fault::HARMLESS.contains(fault)) {
        let found =
            used.iter().any(|breaker| matches!(breaker, Breaker::Chaos(used) if used == fault));
        assert!(found, "no clause is broken by the fault {:?}: remove it", fault.name());
    }
}
