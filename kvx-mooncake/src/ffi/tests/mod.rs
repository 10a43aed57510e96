//! Tests of the real engine with some of its functions replaced.

mod endings;
mod real_engine;
mod wrong_answers;
