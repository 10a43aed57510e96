//! Every clause of the suite must be seen to fail.
fn main() {}
