//! `kvx proxy` between clients and a fleet of instances, each a process.
//!
//! Instances are kvx-instance's: this program again. They stop where a vLLM 0.33 would, and say so at the end of each test.

mod client;
mod fleet;
mod instances;

use std::time::Duration;

use libtest_mimic::{Arguments, Trial};

/// A test that takes longer has hung.
const LIMIT: Duration = Duration::from_secs(60);

/// A test by the name of its room and its own.
macro_rules! trials {
    ($($room:ident: $($test:ident),+;)+) => {
        vec![$($(trial(concat!(stringify!($room), "::", stringify!($test)), $room::$test)),+),+]
    };
}

fn trial<F: Future<Output = ()>>(name: &str, test: impl FnOnce() -> F + Send + 'static) -> Trial {
    Trial::test(name, move || {
        // The test itself waits for its instances without yielding; connections go on beside it.
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
        let ended = runtime.block_on(async { tokio::time::timeout(LIMIT, test()).await });
        ended.map_err(|_| format!("it has not ended within {LIMIT:?}").into())
    })
}

fn main() {
    kvx_instance::run_if_asked();
    let trials = trials! {
        instances: answer_what_one_server_answers, hand_over_their_blocks_once, stop_where_a_vllm_stops,
            notice_blocks_of_another_prompt, count_what_nobody_reads, do_what_they_are_told_to_do_wrong;
    };
    libtest_mimic::run(&Arguments::from_args(), trials).exit();
}
