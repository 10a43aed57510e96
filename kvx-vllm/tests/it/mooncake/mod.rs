//! The halves of a MooncakeConnector, stepped by hand: prefill and decode apart, each with what the other would say.

mod configured;
mod older;
mod pulls;
mod rig;
mod serves;
