//! How core treats its backends, shown by some that move nothing.

mod foreign;
mod hanging;
mod names;
mod still;
