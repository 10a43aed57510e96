//! Tests that an agent that ends leaves nothing behind in its peers, even if programs that were
//! started while it was open still run.

use std::process::{Child, Command};
use std::time::{Duration, Instant};

use kvx_core::{Agent, Grid, Memory, Options, Plan, Region};
use kvx_testkit::test;

use crate::registry;

const PATIENCE: Duration = Duration::from_secs(10);
const GRID: Grid = Grid::packed(4096, 4);
/// The number of agents that start and end.
const ROUNDS: usize = 8;

type Outcome<T = ()> = Result<T, Box<dyn std::error::Error>>;

/// A program that has inherited libfabric's sockets.
struct Program(Child);

impl Program {
    fn start() -> Outcome<Self> {
        Ok(Program(Command::new("sleep").arg("600").spawn()?))
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _killed = self.0.kill();
        let _waited = self.0.wait();
    }
}

fn options() -> Options {
    Options::parse(r#"{"libfabric": {"provider": "tcp;ofi_rxm"}}"#).expect("it is JSON")
}

fn agent(name: &str) -> Outcome<(Agent, Region)> {
    let agent = Agent::builder(name)
        .backends(["LIBFABRIC"])
        .options(options())
        .registry(registry(""))
        .build()?;
    let region =
        agent.register("kv", Memory::pool(GRID.length as usize * GRID.count as usize).build()?)?;
    Ok((agent, region))
}

/// Connects both ways, and reads once in each direction.
fn meet(one: &(Agent, Region), other: &(Agent, Region)) -> Outcome {
    for ((agent, region), (owner, _)) in [(one, other), (other, one)] {
        let peer = agent.connect(owner.metadata()?)?;
        peer.ready(PATIENCE).wait_blocking(PATIENCE)?;
        let all = 0..GRID.count;
        let plan = Plan::read(
            region.grid(GRID)?.blocks(all.clone()),
            peer.region("kv")?.grid(GRID)?.blocks(all),
        )?;
        peer.post(&plan)?.wait_blocking(PATIENCE)?;
    }
    Ok(())
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("there is /proc").count()
}

/// Waits until at most `most` descriptors are open.
fn shrink_to(most: usize) {
    let until = Instant::now() + PATIENCE;
    while descriptors() > most {
        assert!(
            Instant::now() < until,
            "{} descriptors are open, there were {most}",
            descriptors()
        );
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test(own_process)]
fn an_agent_keeps_no_resources_of_peers_that_have_ended() {
    if let Err(why) = registry("").require("LIBFABRIC", &options()) {
        const TEST: &str = "an_agent_keeps_no_resources_of_peers_that_have_ended";
        let cure = "cargo xtask test --install on Debian 12";
        return kvx_testkit::skip(TEST, &why.to_string(), cure);
    }
    let old: Vec<_> = (0..2).map(|at| agent(&format!("old{at}")).unwrap()).collect();
    let before = descriptors();
    let mut programs = Vec::new();
    for _ in 0..ROUNDS {
        let new = agent("new").unwrap();
        old.iter().for_each(|old| meet(old, &new).unwrap());
        programs.push(Program::start().unwrap());
        new.0.shutdown(PATIENCE).wait_blocking(PATIENCE).unwrap();
        drop(new);
        shrink_to(before);
    }
}
