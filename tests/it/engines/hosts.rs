//! Tests engines on two hosts, which are two network namespaces of this machine.

use std::time::Duration;

use kvx_testkit::{Check, Failure, Hosts, Tier};

use crate::engines::Case;
use crate::engines::engine::Spec;
use crate::engines::fleet::{CUT_OFF, Engine, GRACE, Load, ensure, spec};

pub(crate) fn cases() -> Vec<Case> {
    let run: fn(&str) -> Check = two_hosts;
    vec![Case::new("one_variable_is_enough_for_two_hosts", "TCP", Tier::Usual, run)]
}

/// Starts an engine on one of the hosts, with the side channel at the address `side`.
fn start(
    hosts: &Hosts,
    at: usize,
    name: &str,
    backend: &str,
    side: &str,
) -> Result<Engine, Failure> {
    let variables = vec![("VLLM_NIXL_SIDE_CHANNEL_HOST".to_owned(), side.to_owned())];
    Engine::start_on(Spec { variables, ..spec(name, backend) }, Some(&hosts.each[at]))
}

fn two_hosts(backend: &str) -> Check {
    let Some(hosts) = Hosts::for_test("one_variable_is_enough_for_two_hosts", 2)? else {
        return Ok(());
    };
    let [at, from] = [1, 2].map(Hosts::address);
    let mut prefill = start(&hosts, 0, "prefill", backend, &at)?;
    let mut decode = start(&hosts, 1, "decode", backend, &from)?;
    let params = prefill.prefill("one", 1, 40)?;
    ensure(params["remote_host"] == *at, || format!("{params}"))?;
    decode.loads(&Load::new("one", 1, 40), &params)?;
    prefill.all_free(CUT_OFF)?;

    // A prefill without a setting announces a local address, which a decode on another host cannot
    // reach.
    let mut local = start(&hosts, 0, "local", backend, "localhost")?;
    let params = local.prefill("two", 2, 40)?;
    let within = Duration::from_secs(5);
    decode.decode(&Load::new("two", 2, 40), &params, within)?;
    let why = decode.fails("two", within)?;
    for setting in ["VLLM_NIXL_SIDE_CHANNEL_HOST", "tcp.bind"] {
        ensure(why.contains(setting), || format!("{setting} is not named: {why}"))?;
    }
    decode.all_free(CUT_OFF + GRACE)
}
