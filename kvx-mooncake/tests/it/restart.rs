//! Tests that an engine that restarts under the same name, with other data ports, is queried for
//! its ports again.

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kvx_core::{Agent, ErrorKind, Grid, Memory, MemoryKind, Options, Peer, Plan, Region};
use kvx_testkit::test;

use crate::adapter;
use crate::python::{Python, content};

const CUT_OFF: Duration = Duration::from_secs(10);
const BLOCK: usize = 4096;
const LEN: usize = 1 << 16;

/// The name of an engine that restarts. Mooncake names an engine after its metadata port, which it
/// chooses at random and cannot bind again for a minute after it was queried. So this process owns
/// the port, and forwards queries to the current engine.
struct Name {
    text: String,
    engine: Arc<Mutex<String>>,
}

impl Name {
    fn of(python: &Python) -> Self {
        // As long as the engine's own name, which it replaces in answers.
        let mut listeners = (0..100).map(|_| TcpListener::bind("127.0.0.1:0").unwrap());
        let listener = listeners.find(|at| at.local_addr().unwrap().port() >= 10_000).unwrap();
        let text = listener.local_addr().unwrap().to_string();
        let name = Name { text: text.clone(), engine: Arc::default() };
        name.leads_to(python);
        let engine = Arc::clone(&name.engine);
        std::thread::spawn(move || {
            for asking in listener.incoming() {
                let (asking, name, engine) =
                    (asking.unwrap(), text.clone(), engine.lock().unwrap().clone());
                // An error means that the engine has ended, or that the query was empty.
                std::thread::spawn(move || ask(asking, &name, &engine).ok());
            }
        });
        name
    }

    fn leads_to(&self, python: &Python) {
        assert_eq!(python.name.len(), self.text.len(), "an engine takes a port of 15000 to 17000");
        python.name.clone_into(&mut self.engine.lock().unwrap());
    }
}

/// Forwards a query to an engine, and returns its answer with the name replaced by `name`.
fn ask(mut asking: TcpStream, name: &str, engine: &str) -> std::io::Result<()> {
    let mut theirs = TcpStream::connect(engine)?;
    let (mut from, mut to) = (asking.try_clone()?, theirs.try_clone()?);
    std::thread::spawn(move || {
        std::io::copy(&mut from, &mut to).ok();
        to.shutdown(std::net::Shutdown::Write).ok();
    });
    let mut answer = Vec::new();
    theirs.set_read_timeout(Some(CUT_OFF))?;
    theirs.read_to_end(&mut answer)?; // it answers once, and closes the connection
    for at in 0..answer.len().saturating_sub(name.len()) {
        if answer[at..].starts_with(engine.as_bytes()) {
            answer[at..at + name.len()].copy_from_slice(name.as_bytes());
        }
    }
    asking.write_all(&answer)
}

/// Moves the fourth block of Python's memory to the first one of a region, or the other way.
fn moves(write: bool, peer: &Peer, python: &Python, region: &Region) -> kvx_core::Result<()> {
    let grid = Grid::packed(BLOCK as u64, (LEN / BLOCK) as u32);
    let theirs =
        peer.foreign(python.address, LEN as u64, MemoryKind::Host, 0)?.grid(grid)?.blocks([3]);
    let ours = region.grid(grid)?.blocks([0]);
    let plan = if write { Plan::write(ours, theirs) } else { Plan::read(ours, theirs) }?;
    peer.transfer(&plan).deadline(CUT_OFF).post()?.wait_blocking(CUT_OFF).map(drop)
}

fn reads(peer: &Peer, python: &Python, region: &Region) {
    region.copy_in(0, &[0; BLOCK]).unwrap();
    moves(false, peer, python, region).unwrap();
    let mut bytes = vec![0; BLOCK];
    region.copy_out(0, &mut bytes).unwrap();
    assert!(bytes.iter().enumerate().all(|(at, byte)| *byte == content(3 * BLOCK + at)));
}

fn reached_again(adapter: &Path) {
    let options = Options::parse(r#"{"mooncake_protocol": "tcp"}"#).unwrap();
    let builder = Agent::builder("decode").backends(["MOONCAKE"]).options(options);
    let agent = builder.registry(adapter::registry("")).build().unwrap();
    let region = agent.register("kv", Arc::new(Memory::owned(vec![0; LEN]))).unwrap();
    let mut first = Python::start(adapter, LEN);
    let name = Name::of(&first);
    let peer = agent.connect_foreign("MOONCAKE", name.text.as_bytes()).unwrap();
    peer.ready(CUT_OFF).wait_blocking(CUT_OFF).unwrap();
    reads(&peer, &first, &region);

    let mut second = Python::start(adapter, LEN); // while the first still has its ports
    name.leads_to(&second);
    first.kill();
    let why = moves(false, &peer, &second, &region).unwrap_err();
    assert_eq!(
        why.kind(),
        ErrorKind::Native,
        "a transfer in flight fails, but the peer is not lost: {why}"
    );
    reads(&peer, &second, &region);
    region.copy_in(0, &[0xC3; BLOCK]).unwrap();
    moves(true, &peer, &second, &region).unwrap();
    assert_eq!(second.get(3 * BLOCK, BLOCK), [0xC3; BLOCK]);
    agent.shutdown(CUT_OFF).wait_blocking(CUT_OFF).unwrap();
}

#[test(own_process)]
fn an_engine_that_restarts_under_the_same_name_is_reached_again() {
    const NAME: &str = "an_engine_that_restarts_under_the_same_name_is_reached_again";
    if let Some(adapter) = adapter::or_skip(NAME) {
        reached_again(&adapter);
    }
}
