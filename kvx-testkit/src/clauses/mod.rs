//! The clauses of CONTRACT.md, each a public async function over a [`Setup`](crate::Setup).

pub mod agents;
pub mod backends;
mod clause;
pub mod hung_pages;
pub mod killed_peers;
pub mod metadata;
pub mod notifications;
pub mod ownership;
pub mod peers;
pub mod plans;
pub mod posting;
pub mod safety;
mod traffic;
pub mod transfers;

pub use clause::{Breaker, Clause, Execution};

/// All clauses, in the groups of CONTRACT.md.
pub const CLAUSES: &[&[Clause]] = &[
    transfers::CLAUSES,
    plans::CLAUSES,
    posting::CLAUSES,
    peers::CLAUSES,
    killed_peers::CLAUSES,
    hung_pages::CLAUSES,
    ownership::CLAUSES,
    notifications::CLAUSES,
    safety::CLAUSES,
    metadata::CLAUSES,
    agents::CLAUSES,
    backends::CLAUSES,
];
