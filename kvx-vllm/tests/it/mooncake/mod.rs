//! The two halves of a MooncakeConnector, stepped by hand: prefill and decode separately, each with
//! scripted messages of the other.

mod configured;
mod older;
mod pulls;
mod rig;
mod serves;
