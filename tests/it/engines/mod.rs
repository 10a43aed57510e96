//! Runs engines without a model, in separate processes, that prefill and decode for each other.
//! Every byte of their caches encodes its place. The tests check which loads arrive, which fail,
//! and which blocks of both pools are free afterwards.

/// Finds the tests' Mooncake.
#[path = "../../../kvx-mooncake/tests/it/adapter.rs"]
#[allow(dead_code, reason = "each test program uses its part")]
mod adapter;
mod amid;
mod apart;
mod checking;
mod dialects;
mod digests;
mod engine;
mod faults;
mod fleet;
mod hosts;
mod libraries;
mod log;
mod matrix;
mod model;
mod mooncake_python;
mod python;
mod queue;
mod secrets;
mod soak;
/// Finds the tests' UCX.
#[path = "../../../kvx-ucx/tests/it/versions.rs"]
mod ucx;
mod unread;
/// Finds the tests' NIXL.
#[path = "../../../kvx-rixl/tests/it/wheel.rs"]
mod wheel;

use std::borrow::Cow;

use kvx_testkit::{Check, Tier, skip, trial, trial_within};
use libtest_mimic::Trial;

/// The reason why a case cannot run on this machine, and the remedy.
pub(crate) type Missing = (String, &'static str);

/// A trial: its name, its backend, and the tier that it runs in.
pub(crate) struct Case {
    name: Cow<'static, str>,
    backend: &'static str,
    tier: Tier,
    needs: fn() -> Result<(), Missing>,
    run: Box<dyn Fn(&str) -> Check + Send>,
}

impl Case {
    pub(crate) fn new(
        name: impl Into<Cow<'static, str>>,
        backend: &'static str,
        tier: Tier,
        run: impl Fn(&str) -> Check + Send + 'static,
    ) -> Case {
        Case { name: name.into(), backend, tier, needs: || Ok(()), run: Box::new(run) }
    }

    /// Skips the case if `needs` reports that something other than its backend is missing.
    pub(crate) fn needing(self, needs: fn() -> Result<(), Missing>) -> Case {
        Case { needs, ..self }
    }

    fn into_trial(self) -> Trial {
        let Case { name, backend, run, needs, .. } = self;
        let title = format!("engines::{backend}::{name}");
        let test = move || -> Check {
            let missing =
                libraries::status(backend).map(drop).map_err(|why| (why, "see the reason"));
            match missing.and_then(|()| needs()) {
                Ok(()) => run(backend),
                Err((reason, cure)) => {
                    skip(&format!("{backend}::{name}"), &reason, cure);
                    Ok(())
                }
            }
        };
        match soak::asked_for() {
            Some(time) => trial_within(time + soak::AFTER, title, test),
            None => trial(title, test),
        }
    }
}

/// Runs this process as an engine, a rank, or a reporter of a backend's status, if it was started
/// as one, and exits.
pub(crate) fn serve_if_asked() {
    if let Ok(setup) = std::env::var(apart::VARIABLE) {
        apart::run(&setup);
    }
    if let Ok(spec) = std::env::var(fleet::VARIABLE) {
        engine::serve(&spec);
    }
    if let Ok(backend) = std::env::var(libraries::VARIABLE) {
        libraries::answer(&backend);
    }
}

pub(crate) fn trials() -> impl Iterator<Item = Trial> {
    matrix::cases()
        .into_iter()
        .chain(faults::cases())
        .chain(dialects::cases())
        .chain(digests::cases())
        .chain(python::cases())
        .chain(mooncake_python::cases())
        .chain(secrets::cases())
        .chain(hosts::cases())
        .chain(faults::table::cases())
        .chain(soak::cases())
        .filter(|case| case.tier.runs())
        .map(Case::into_trial)
}

/// Returns only the trials of `cargo xtask faults connector` or `cargo xtask soak connector`, if
/// one of them has started this program.
pub(crate) fn asked_for() -> Option<Vec<Trial>> {
    let cases = if faults::table::is_all() {
        faults::table::cases()
    } else if soak::asked_for().is_some() {
        soak::cases()
    } else {
        return None;
    };
    Some(cases.into_iter().map(Case::into_trial).collect())
}
