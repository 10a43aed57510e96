//! The integration tests of the example server: its folders, its arithmetic, and a comparison with
//! transformers.
#![allow(clippy::unwrap_used, reason = "a test's unwrap is its assertion")]

mod folder;
mod folders;
mod reference;
mod same_bits;

use std::process::ExitCode;

use kvx_testkit::{harness_main, trial, trial_within};

fn main() -> ExitCode {
    let cases = reference::recorded_cases().into_iter();
    let recorded =
        cases.map(|case| trial(case.title(), move || reference::compare_with_recorded(case)));
    let live = reference::python().map(|python| {
        let name = "reference::logits_and_tokens_are_those_of_transformers";
        trial_within(reference::PYTHON_LIMIT, name, move || {
            reference::compare_with_transformers(python)
        })
    });
    let imported = reference::python().zip(reference::imported()).map(|(python, model)| {
        let name = "reference::answers_of_an_imported_model_are_those_of_transformers";
        trial_within(reference::PYTHON_LIMIT, name, move || {
            reference::compare_imported(python, model)
        })
    });
    harness_main(recorded.chain(live).chain(imported))
}
