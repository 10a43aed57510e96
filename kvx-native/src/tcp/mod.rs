//! draft
/// draft
pub struct Tcp;
