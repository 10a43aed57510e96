//! Tries an engine before kvx trusts it: its C++ layouts are known for some versions only, and a wrong one corrupts
//! memory in silence.

use std::ffi::CString;
use std::time::{Duration, Instant};

use kvx_core::{Error, Op};

use super::engine::{Batch, Engine, PEER_TO_PEER, Piece, Recipe, SegmentId, State};
use super::library::Library;

/// How long each step may take.
const PATIENCE: Duration = Duration::from_secs(10);
const LEN: usize = 512 << 10;
/// What lies around the pieces and must stay.
const UNTOUCHED: u8 = 0xA5;

/// Two engines of this process exchange bytes over loopback. The library is not in use yet.
pub(super) fn run(library: &Library) -> Result<(), String> {
    // SAFETY: the engines below are the only ones that keep the reference, and they are gone when this returns.
    let library: &'static Library = unsafe { &*std::ptr::from_ref(library) };
    let recipe = Recipe {
        metadata: PEER_TO_PEER.into(),
        host: "127.0.0.1".into(),
        protocol: "tcp".into(),
        devices: Vec::new(),
    };
    let ours = Engine::make(library, &recipe).map_err(|why| why.to_string())?;
    let theirs = Engine::make(library, &recipe).map_err(|why| why.to_string())?;
    // Never freed if a step fails: the engine may still write to them.
    let near: &'static mut [u8] = Vec::leak(vec![UNTOUCHED; LEN]);
    let far: &'static mut [u8] = Vec::leak((0..LEN).map(content).collect());
    let (near, far) = (std::ptr::from_mut(near), std::ptr::from_mut(far));
    let trial = Trial { ours: &ours, theirs: &theirs, near, far };
    if let Err((step, why)) = trial.run() {
        std::mem::forget((ours, theirs)); // who knows what they are at
        return Err(format!("{step}: {why}"));
    }
    drop((ours, theirs));
    // SAFETY: both came from `leak`, all transfers have ended, and the engines are gone.
    unsafe {
        drop(Box::from_raw(near));
        drop(Box::from_raw(far));
    }
    Ok(())
}

fn content(at: usize) -> u8 {
    (at.wrapping_mul(31) >> 3) as u8 ^ at as u8
}

struct Trial<'a> {
    ours: &'a Engine,
    theirs: &'a Engine,
    near: *mut [u8],
    far: *mut [u8],
}

type Step<T = ()> = Result<T, (&'static str, String)>;

fn named<T>(step: &'static str, result: Result<T, Error>) -> Step<T> {
    result.map_err(|why| (step, why.to_string()))
}

impl Trial<'_> {
    fn run(&self) -> Step {
        let (near, far) = (self.near as *mut u8 as u64, self.far as *mut u8 as u64);
        // SAFETY: both buffers stay until everything has ended, or for ever.
        named("registering", unsafe { self.ours.register(near, LEN, "*") })?;
        // SAFETY: as above.
        named("registering", unsafe { self.theirs.register(far, LEN, "*") })?;
        let segment = named("opening a segment", self.ours.open_segment(self.theirs.name()))?;
        self.reads(segment, near, far)?;
        self.writes(segment, near, far)?;
        self.is_refused(segment, near, far)?;
        self.notifies(segment)?;
        named("unregistering", self.ours.unregister(near))
    }

    fn transfer(&self, pieces: &[Piece]) -> Step<Vec<State>> {
        // SAFETY: as `run` says.
        let batch =
            unsafe { self.ours.submit(pieces) }.map_err(|refused| ("submitting", refused.why.to_string()))?;
        let states = self.ended(&batch, pieces.len())?;
        self.ours.free(batch);
        Ok(states)
    }

    fn ended(&self, batch: &Batch, count: usize) -> Step<Vec<State>> {
        let until = Instant::now() + PATIENCE;
        (0..count)
            .map(|piece| {
                loop {
                    match named("asking for a state", self.ours.task(batch, piece))? {
                        State::Moving if Instant::now() < until => std::thread::yield_now(),
                        State::Moving => return Err(("waiting", "a piece did not end".to_owned())),
                        ended => return Ok(ended),
                    }
                }
            })
            .collect()
    }

    /// Three pieces of different lengths: with a wrong layout of requests the second is not what was asked.
    fn reads(&self, segment: SegmentId, near: u64, far: u64) -> Step {
        const SHAPE: [(usize, usize, usize); 3] =
            [(1, 3, 7), (5000, 70_001, 4109), (100_000, 200_001, 300_001)];
        let pieces = SHAPE.map(|(local, remote, len)| Piece {
            op: Op::Read,
            local: near + local as u64,
            segment,
            remote: far + remote as u64,
            len: len as u64,
        });
        let states = self.transfer(&pieces)?;
        let wanted = SHAPE.map(|(_, _, len)| State::Completed(len as u64));
        if states != wanted {
            return Err(("reading", format!("three pieces ended as {states:?}, not {wanted:?}")));
        }
        // SAFETY: every piece has ended, and nobody else has the buffer.
        let near = unsafe { &*self.near };
        for (at, byte) in near.iter().enumerate() {
            let from = SHAPE.iter().find(|(local, _, len)| (*local..local + len).contains(&at));
            let wanted = from.map_or(UNTOUCHED, |(local, remote, _)| content(at - local + remote));
            if *byte != wanted {
                return Err(("reading", format!("byte {at} is {byte}, not {wanted}")));
            }
        }
        Ok(())
    }

    fn writes(&self, segment: SegmentId, near: u64, far: u64) -> Step {
        const LEN: u64 = 65_537;
        let piece = Piece { op: Op::Write, local: near + 100_000, segment, remote: far + 11, len: LEN };
        let states = self.transfer(&[piece])?;
        if states != [State::Completed(LEN)] {
            return Err(("writing", format!("it ended as {states:?}")));
        }
        // SAFETY: as above.
        let (near, far) = unsafe { (&*self.near, &*self.far) };
        if near[100_000..100_000 + LEN as usize] != far[11..11 + LEN as usize] {
            return Err(("writing", "other bytes arrived".into()));
        }
        Ok(())
    }

    /// What lies outside of registered memory fails.
    fn is_refused(&self, segment: SegmentId, near: u64, far: u64) -> Step {
        let states = self.transfer(&[Piece {
            op: Op::Read,
            local: near,
            segment,
            remote: far + LEN as u64,
            len: 16,
        }])?;
        match states[..] {
            [State::Failed(_)] => Ok(()),
            _ => Err((
                "reading unregistered memory",
                format!("it ended as {states:?}, and should have failed"),
            )),
        }
    }

    fn notifies(&self, segment: SegmentId) -> Step {
        let (name, text) = (CString::from(c"kvx self-test"), CString::from(c"hello"));
        named("notifying", self.ours.notify(segment, &name, &text))?;
        let until = Instant::now() + PATIENCE;
        let mut heard = Vec::new();
        while heard.is_empty() && Instant::now() < until {
            self.theirs.notifications(|name, text| heard.push((name.to_vec(), text.to_vec())));
            std::thread::yield_now();
        }
        if heard != [(name.into_bytes(), text.into_bytes())] {
            return Err(("notifying", format!("{} notifications arrived, one was sent", heard.len())));
        }
        Ok(())
    }
}
