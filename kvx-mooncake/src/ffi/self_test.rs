//! Tests an engine before kvx uses it: its C++ layouts are known for some versions only, and a
//! wrong layout silently corrupts memory.

use std::ffi::CString;
use std::time::{Duration, Instant};

use kvx_core::{Error, Op};

use super::engine::{
    Batch, Engine, EngineOptions, EnginePiece, PEER_TO_PEER, SegmentId, TransferState,
};
use super::library::Library;

/// The time that pieces may take, and the delivery of a notification. The engine's calls that open
/// a segment and send a notification have their own time limits, and cannot be interrupted.
pub(super) const PATIENCE: Duration = Duration::from_secs(10);
const LEN: usize = 512 << 10;
/// The bytes around the pieces, which must not change.
const UNTOUCHED: u8 = 0xA5;

/// Lets two engines of this process exchange bytes over loopback, and a notification within
/// `heard_within`. The library is not in use yet. A failed step leaves two engines and 1 MiB behind
/// forever.
pub(super) fn run(library: &Library, heard_within: Duration) -> Result<(), String> {
    // SAFETY: only the engines below keep the reference. When this returns they have been dropped
    // or forgotten. A forgotten engine makes no more calls; the native engine, which continues,
    // does not have the reference.
    let library: &'static Library = unsafe { &*std::ptr::from_ref(library) };
    let engine_options = EngineOptions {
        metadata: PEER_TO_PEER.into(),
        host: "127.0.0.1".into(),
        protocol: "tcp".into(),
        devices: Vec::new(),
    };
    let ours = Engine::make(library, &engine_options).map_err(|why| why.to_string())?;
    let theirs = Engine::make(library, &engine_options).map_err(|why| why.to_string())?;
    // Never freed if a step fails: the engine may still write to them.
    let near: &'static mut [u8] = Vec::leak(vec![UNTOUCHED; LEN]);
    let far: &'static mut [u8] = Vec::leak((0..LEN).map(content).collect());
    let (near, far) = (std::ptr::from_mut(near), std::ptr::from_mut(far));
    let trial = Trial { library, ours: &ours, theirs: &theirs, near, far, heard_within };
    if let Err((step, why)) = trial.run() {
        std::mem::forget((ours, theirs)); // their state is unknown
        return Err(format!("{step}: {why}"));
    }
    drop((ours, theirs));
    // SAFETY: both came from `leak`, all transfers have ended, and the engines are dropped.
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
    library: &'a Library,
    ours: &'a Engine,
    theirs: &'a Engine,
    near: *mut [u8],
    far: *mut [u8],
    heard_within: Duration,
}

type Step<T = ()> = Result<T, (&'static str, String)>;

fn named<T>(step: &'static str, result: Result<T, Error>) -> Step<T> {
    result.map_err(|why| (step, why.to_string()))
}

impl Trial<'_> {
    fn run(&self) -> Step {
        let (near, far) = (self.near as *mut u8 as u64, self.far as *mut u8 as u64);
        // SAFETY: both buffers stay valid until everything has ended, or forever.
        named("registering", unsafe { self.ours.register(near, LEN, "*") })?;
        // SAFETY: both buffers stay valid until everything has ended, or forever.
        named("registering", unsafe { self.theirs.register(far, LEN, "*") })?;
        let segment = named("opening a segment", self.ours.open_segment(self.theirs.name()))?;
        self.test_read(segment, near, far)?;
        self.test_write(segment, near, far)?;
        self.test_bounds(segment, near, far)?;
        self.test_notification(segment)?;
        named("unregistering", self.ours.unregister(near))
    }

    fn transfer(&self, pieces: &[EnginePiece]) -> Step<Vec<TransferState>> {
        // SAFETY: `run` keeps the memory.
        let batch = unsafe { self.ours.submit(pieces) }
            .map_err(|refused| ("submitting", refused.why.to_string()))?;
        let states = self.wait_for_pieces(&batch, pieces.len())?;
        self.test_batch_state(&batch, &states)?;
        self.test_error(&batch, pieces.len())?;
        self.ours.free(batch);
        Ok(states)
    }

    /// Checks that the state of the whole batch matches the states of its pieces.
    fn test_batch_state(&self, batch: &Batch, pieces: &[TransferState]) -> Step {
        let bytes = pieces.iter().map(|piece| match piece {
            TransferState::Completed(bytes) => Some(*bytes),
            _ => None,
        });
        let bytes: Option<u64> = bytes.sum();
        match (self.ours.batch_state(batch), bytes) {
            (None, _) => Ok(()), // kvx does not use the state of whole batches then
            (Some(TransferState::Completed(said)), Some(bytes)) if said == bytes => Ok(()),
            (Some(TransferState::Failed(_)), None) => Ok(()),
            (whole, _) => {
                let why = format!("it is {whole:?}, but its pieces are {pieces:?}");
                Err(("asking for a batch's state", why))
            }
        }
    }

    /// Checks that an invalid call returns an error code, and a text if the engine has texts. The
    /// call is a query for a piece that the batch does not have.
    fn test_error(&self, batch: &Batch, beyond: usize) -> Step {
        const INVALID: i64 = 1;
        const STEP: &str = "asking for a piece that is not there";
        let why = match self.ours.piece_state(batch, beyond) {
            Ok(state) => return Err((STEP, format!("it is {state:?}, and should be an error"))),
            Err(why) => why,
        };
        let code = why.native().map(|native| native.code);
        if self.library.adapter().is_some()
            && (code != Some(INVALID) || self.library.last_error().is_none())
        {
            return Err((
                STEP,
                format!("the engine returns no text, or a code other than {INVALID}: {why}"),
            ));
        }
        Ok(())
    }

    fn wait_for_pieces(&self, batch: &Batch, count: usize) -> Step<Vec<TransferState>> {
        let until = Instant::now() + PATIENCE;
        (0..count)
            .map(|piece| {
                loop {
                    match named("asking for a state", self.ours.piece_state(batch, piece))? {
                        TransferState::InProgress if Instant::now() < until => {
                            std::thread::yield_now()
                        }
                        TransferState::InProgress => {
                            return Err(("waiting", "a piece did not end in time".to_owned()));
                        }
                        ended => return Ok(ended),
                    }
                }
            })
            .collect()
    }

    /// Reads three pieces of different lengths: with a wrong layout of requests, the second one
    /// differs.
    fn test_read(&self, segment: SegmentId, near: u64, far: u64) -> Step {
        const SHAPE: [(usize, usize, usize); 3] =
            [(1, 3, 7), (5000, 70_001, 4109), (100_000, 200_001, 300_001)];
        let pieces = SHAPE.map(|(local, remote, len)| EnginePiece {
            op: Op::Read,
            local: near + local as u64,
            segment,
            remote: far + remote as u64,
            len: len as u64,
        });
        let states = self.transfer(&pieces)?;
        let wanted = SHAPE.map(|(_, _, len)| TransferState::Completed(len as u64));
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

    /// Writes some of the bytes that were read to another place.
    fn test_write(&self, segment: SegmentId, near: u64, far: u64) -> Step {
        const LEN: usize = 65_537;
        const LOCAL: usize = 100_000;
        const READ_FROM: usize = 200_001;
        const REMOTE: usize = 11;
        let (local, remote) = (near + LOCAL as u64, far + REMOTE as u64);
        let states = self.transfer(&[EnginePiece {
            op: Op::Write,
            local,
            segment,
            remote,
            len: LEN as u64,
        }])?;
        if states != [TransferState::Completed(LEN as u64)] {
            return Err(("writing", format!("the transfer ended as {states:?}")));
        }
        // SAFETY: the piece has ended, and nobody else has the buffer.
        let far = unsafe { &*self.far };
        for (at, byte) in far.iter().enumerate() {
            let written = (REMOTE..REMOTE + LEN).contains(&at);
            let wanted = content(if written { at - REMOTE + READ_FROM } else { at });
            if *byte != wanted {
                return Err(("writing", format!("byte {at} is {byte}, not {wanted}")));
            }
        }
        Ok(())
    }

    /// Checks that a read outside of registered memory fails.
    fn test_bounds(&self, segment: SegmentId, near: u64, far: u64) -> Step {
        let states = self.transfer(&[EnginePiece {
            op: Op::Read,
            local: near,
            segment,
            remote: far + LEN as u64,
            len: 16,
        }])?;
        match states[..] {
            [TransferState::Failed(_)] => Ok(()),
            _ => Err((
                "reading unregistered memory",
                format!("the transfer ended as {states:?}, and should have failed"),
            )),
        }
    }

    fn test_notification(&self, segment: SegmentId) -> Step {
        let (name, text) = (CString::from(c"kvx self-test"), CString::from(c"hello"));
        named("notifying", self.ours.notify(segment, &name, &text))?;
        let until = Instant::now() + self.heard_within;
        let mut heard = Vec::new();
        while heard.is_empty() && Instant::now() < until {
            self.theirs.notifications(|name, text| heard.push((name.to_vec(), text.to_vec())));
            std::thread::yield_now();
        }
        if heard != [(name.into_bytes(), text.into_bytes())] {
            let heard: Vec<_> =
                heard.iter().map(|(_, text)| String::from_utf8_lossy(text)).collect();
            return Err(("notifying", format!("one \"hello\" was sent, but {heard:?} arrived")));
        }
        Ok(())
    }
}
