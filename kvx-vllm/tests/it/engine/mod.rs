//! The behaviour of the two halves of an engine. The test names state what vLLM's tests of its
//! connector assert.

mod bidirectional;
mod configured;
mod failures;
mod leases;
mod loads;
mod peers;
mod plans;
mod push;
mod rig;
