//! draft
/// draft
pub struct Shm;
