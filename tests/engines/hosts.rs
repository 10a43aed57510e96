//! Engines on two hosts, which are two network namespaces of this machine.

use std::process::Command;
use std::time::Duration;

use kvx_testkit::{Check, Failure, Tier, skip};

use crate::Case;
use crate::engine::Spec;
use crate::fleet::{CUT_OFF, Engine, GRACE, Load, ensure, spec};

pub(crate) fn cases() -> Vec<Case> {
    let run: fn(&str) -> Check = two_hosts;
    vec![Case::new("one_variable_is_enough_for_two_hosts", "TCP", Tier::Usual, run)]
}

/// Two namespaces with a link between them; gone when dropped.
struct Hosts {
    names: [String; 2],
    addresses: [String; 2],
}

fn ip(arguments: &str) -> Check {
    let done = kvx_testkit::output(Command::new("ip").args(arguments.split(' ')), CUT_OFF);
    ensure(done.status.success(), || format!("ip {arguments}: {}", String::from_utf8_lossy(&done.stderr)))
}

impl Hosts {
    fn make() -> Result<Self, Failure> {
        let id = std::process::id();
        let hosts = Hosts {
            names: [format!("kvx-p{id}"), format!("kvx-d{id}")],
            addresses: ["10.213.7.1".to_owned(), "10.213.7.2".to_owned()],
        };
        let [prefill, decode] = &hosts.names;
        ip(&format!("netns add {prefill}"))?;
        ip(&format!("netns add {decode}"))?;
        ip(&format!("-n {prefill} link add up0 type veth peer name up0 netns {decode}"))?;
        for (name, address) in hosts.names.iter().zip(&hosts.addresses) {
            ip(&format!("-n {name} address add {address}/24 dev up0"))?;
            ip(&format!("-n {name} link set up0 up"))?;
            ip(&format!("-n {name} link set lo up"))?;
        }
        Ok(hosts)
    }

    /// An engine on one of them, whose side channel is told to be there.
    fn start(&self, at: usize, name: &str, backend: &str, side: &str) -> Result<Engine, Failure> {
        let variables = vec![("VLLM_NIXL_SIDE_CHANNEL_HOST".to_owned(), side.to_owned())];
        Engine::start_in(Spec { variables, ..spec(name, backend) }, Some(&self.names[at]))
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for name in &self.names {
            ip(&format!("netns del {name}")).ok(); // an error: it was not made
        }
    }
}

fn two_hosts(backend: &str) -> Check {
    let hosts = match Hosts::make() {
        Ok(hosts) => hosts,
        Err(why) => {
            skip(
                "one_variable_is_enough_for_two_hosts",
                &why.to_string(),
                "as root, cargo xtask test --install",
            );
            return Ok(());
        }
    };
    let [at, from] = &hosts.addresses;
    let mut prefill = hosts.start(0, "prefill", backend, at)?;
    let mut decode = hosts.start(1, "decode", backend, from)?;
    let params = prefill.prefill("one", 1, 40)?;
    ensure(params["remote_host"] == **at, || format!("{params}"))?;
    decode.loads(&Load::new("one", 1, 40), &params)?;
    prefill.all_free(CUT_OFF)?;

    // Nothing is set: a prefill on one host says so to a decode on the other.
    let mut local = hosts.start(0, "local", backend, "localhost")?;
    let params = local.prefill("two", 2, 40)?;
    let within = Duration::from_secs(5);
    decode.decode(&Load::new("two", 2, 40), &params, within)?;
    let why = decode.fails("two", within)?;
    for setting in ["VLLM_NIXL_SIDE_CHANNEL_HOST", "tcp.bind"] {
        ensure(why.contains(setting), || format!("{setting} is not named: {why}"))?;
    }
    decode.all_free(CUT_OFF + GRACE)
}
