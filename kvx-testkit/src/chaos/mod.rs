//! The chaos transport: wraps any transport and breaks one promise of it.

/// draft
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// One byte of a read's destination is changed before its ticket settles.
    WrongBytes,
}
/// draft
pub struct Chaos;
