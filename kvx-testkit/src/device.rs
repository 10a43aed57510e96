//! A plain test device (being written).
/// draft
pub struct TestDevice;
