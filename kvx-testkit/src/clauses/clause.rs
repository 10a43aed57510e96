//! A clause of CONTRACT.md.

use std::future::Future;
use std::pin::Pin;

use crate::chaos::Fault;
use crate::check::Check;
use crate::setup::{Mode, Setup};

/// The processes that a clause needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Execution {
    /// It needs no far end, or one in the same process.
    OneProcess,
    /// It needs a far end that can be stopped or killed, or whose cost can be measured.
    TwoProcesses,
    /// It runs in both ways.
    Both,
    /// The compiler holds it: a compile-fail test.
    Compiler,
}

impl Execution {
    /// Returns the modes in which such a clause runs.
    pub fn modes(self) -> &'static [Mode] {
        match self {
            Execution::OneProcess => &[Mode::OneProcess],
            Execution::TwoProcesses => &[Mode::TwoProcesses],
            Execution::Both => &[Mode::OneProcess, Mode::TwoProcesses],
            Execution::Compiler => &[],
        }
    }
}

/// A way to break a clause, so that the suite can be seen to catch it.
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
    /// The processes that it needs.
    pub runs: Execution,
    /// The ways to break it.
    pub breakers: &'static [Breaker],
    /// The test.
    pub test: fn(&Setup) -> Pin<Box<dyn Future<Output = Check> + Send + '_>>,
}

/// Lists the clauses of a module: `id name, execution, [breakers]`; the function has the clause's
/// name.
macro_rules! clauses {
    ($($id:ident $name:ident, $runs:ident, [$($breaker:expr),* $(,)?];)*) => {
        &[$(Clause {
            id: stringify!($id),
            name: stringify!($name),
            runs: Execution::$runs,
            breakers: &[$($breaker),*],
            test: |setup| Box::pin($name(setup)),
        }),*]
    };
}
pub(crate) use clauses;
