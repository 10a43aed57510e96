//! `kvx_backend::fabric` keeps the contract over the smallest library there is, which loses nothing and orders nothing.

mod shuffled;

use std::process::ExitCode;
use std::sync::Once;

use kvx_core::Registry;
use kvx_testkit::{Suite, Tier, conformance_main};

fn registry(_: &str) -> Registry {
    // As libraries do: a far end's answers must not be mixed up with it.
    static LOGGED: Once = Once::new();
    LOGGED.call_once(|| println!("SHUFFLED logs on standard output"));
    let mut registry = Registry::new();
    registry.add(shuffled::Shuffled).expect("one name");
    registry
}

fn main() -> ExitCode {
    conformance_main(registry, &[Suite { tier: Tier::Fast, ..Suite::over("SHUFFLED") }])
}
