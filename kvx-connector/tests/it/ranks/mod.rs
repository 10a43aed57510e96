//! Engines whose ranks are processes of their own: loads over SHM and TCP, and their fate when a
//! rank is killed, stopped, started twice, or never joins; and the same on two hosts. Every byte
//! names the place where it belongs. Pools on devices are those of the stand-in, or, if
//! `KVX_CUDA_LIB` names a driver, the driver's.

mod attacked;
mod devices;
mod digests;
mod distant;
mod faults;
mod fleet;
mod giving_back;
mod loads;
mod pushes;
mod rank;

use kvx_testkit::{Tier, trial};
use libtest_mimic::Trial;

pub(crate) use self::distant::secret_of_this_host;

/// Serves as a rank until standard input ends, if this process is meant to be one.
pub(crate) fn served_as_rank() -> bool {
    let spec = std::env::var(rank::VARIABLE);
    spec.inspect(|spec| rank::serve(spec)).is_ok()
}

pub(crate) fn trials() -> Vec<Trial> {
    // Tests with several processes are too slow for the fast tier.
    if !Tier::Usual.runs() {
        return Vec::new();
    }
    let over = |backend: &'static str, cases: &[(&'static str, fn(&str))]| -> Vec<Trial> {
        let trial = |(name, run): &(&'static str, fn(&str))| {
            let run = *run;
            trial(format!("ranks::{backend}::{name}"), move || run(backend))
        };
        cases.iter().map(trial).collect()
    };
    let both = |cases| ["SHM", "TCP"].into_iter().flat_map(move |backend| over(backend, cases));
    both(loads::CASES)
        .chain(both(loads::OF_ONE_HOST))
        .chain(both(digests::CASES))
        .chain(both(pushes::CASES))
        .chain(both(giving_back::WITH_LOADS))
        .chain(over("SHM", giving_back::CASES))
        .chain(both(devices::CASES))
        .chain(over("SHM", devices::OF_SHM))
        .chain(both(faults::WITH_LOADS))
        .chain(both(faults::OF_ONE_HOST))
        .chain(over("SHM", faults::CASES))
        .chain(distant::trials())
        .chain([attacked::trial()])
        .collect()
}
