//! How core treats its backends, tested with backends that move nothing.

mod foreign;
mod hanging;
mod lost;
mod names;
mod still;
