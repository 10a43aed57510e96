//! Every clause of CONTRACT.md, as a public async function over a [`Setup`].

pub mod agents;
pub mod backends;
pub mod hung;
pub mod killed;
pub mod metadata;
pub mod notifications;
pub mod ownership;
pub mod peers;
pub mod plans;
pub mod posting;
pub mod safety;
mod traffic;
pub mod transfers;

use std::future::Future;
use std::pin::Pin;

use crate::chaos::Fault;
use crate::check::Check;
use crate::setup::Setup;

/// What a clause runs on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Runs {
    /// It needs no far end, or one in the same process.
    OneProcess,
    /// It needs a far end that can be stopped or killed, or whose cost can be measured.
    TwoProcesses,
    /// It runs in both ways.
    Both,
    /// The compiler holds it: a compile-fail test.
    Compiler,
}

/// What breaks a clause, so that the suite can be seen to catch it.
#[derive(Clone, Copy, Debug)]
pub enum Breaker {
    /// A switch of core's `break-for-tests`.
    Core(&'static str),
    /// A fault of the chaos transport.
    Chaos(Fault),
    /// Code that must not compile; the named doc test holds it.
    CompileFail(&'static str),
}

/// A clause of CONTRACT.md.
pub struct Clause {
    /// Its id there.
    pub id: &'static str,
    /// Its test's name there.
    pub name: &'static str,
    /// What it runs on.
    pub runs: Runs,
    /// What breaks it.
    pub breakers: &'static [Breaker],
    /// The test.
    pub test: fn(&Setup) -> Pin<Box<dyn Future<Output = Check> + Send + '_>>,
}

/// Lists the clauses of a room: `id name, runs, [breakers]`; the function has the clause's name.
macro_rules! clauses {
    ($room:ident: $($id:ident $name:ident, $runs:ident, [$($breaker:expr),* $(,)?];)*) => {
        &[$(Clause {
            id: stringify!($id),
            name: stringify!($name),
            runs: Runs::$runs,
            breakers: &[$($breaker),*],
            test: |setup| Box::pin($room::$name(setup)),
        }),*]
    };
}
pub(crate) use clauses;

/// All clauses, by the groups of CONTRACT.md.
pub const CLAUSES: &[&[Clause]] = &[
    transfers::CLAUSES,
    plans::CLAUSES,
    posting::CLAUSES,
    peers::CLAUSES,
    killed::CLAUSES,
    hung::CLAUSES,
    ownership::CLAUSES,
    notifications::CLAUSES,
    safety::CLAUSES,
    metadata::CLAUSES,
    agents::CLAUSES,
    backends::CLAUSES,
];
