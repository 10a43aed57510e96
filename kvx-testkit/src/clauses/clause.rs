//! A clause of CONTRACT.md.

use std::future::Future;
use std::pin::Pin;

use crate::chaos::Fault;
use crate::check::Check;
use crate::setup::{Mode, Setup};

/// The processes that a clause needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Execution {
    /// No far end, or one in the same process.
    OneProcess,
    /// A far end that can be stopped or killed, or whose cost can be measured.
    TwoProcesses,
    /// Either of these: the clause runs in both ways.
    Both,
    /// None: a compile-fail test checks the clause.
    Compiler,
}

impl Execution {
    /// Returns the modes in which the clause runs.
    pub fn modes(self) -> &'static [Mode] {
        match self {
            Execution::OneProcess => &[Mode::OneProcess],
            Execution::TwoProcesses => &[Mode::TwoProcesses],
            Execution::Both => &[Mode::OneProcess, Mode::TwoProcesses],
            Execution::Compiler => &[],
        }
    }
}

/// A way to break a clause, to show that the suite detects it.
#[derive(Clone, Copy, Debug)]
pub enum Breaker {
    /// A switch of core's feature `break-for-tests`.
    Core(&'static str),
    /// A fault of the chaos transport.
    Chaos(Fault),
    /// Code that must not compile, checked by a doc test in the named file.
    CompileFail(&'static str),
}

/// A clause of CONTRACT.md.
pub struct Clause {
    /// The id in CONTRACT.md.
    pub id: &'static str,
    /// The test's name in CONTRACT.md.
    pub name: &'static str,
    /// The processes that the clause needs.
    pub runs: Execution,
    /// The ways to break the clause.
    pub breakers: &'static [Breaker],
    /// The test.
    pub test: fn(&Setup) -> Pin<Box<dyn Future<Output = Check> + Send + '_>>,
}

/// Lists the clauses of a module: `id name, execution, [breakers]`. The test function has the
/// clause's name.
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
