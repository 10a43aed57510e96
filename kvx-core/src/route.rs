//! Which backend serves a peer, and why not another.

use std::fmt;

use crate::Error;

/// The answer of [`Peer::route`](crate::Peer::route): every backend that was considered, in order of preference.
#[derive(Clone, Debug)]
pub struct Route {
    /// The backends and what became of them.
    pub candidates: Vec<RouteCandidate>,
}

/// One backend of a route.
#[derive(Clone, Debug)]
pub struct RouteCandidate {
    /// Its name.
    pub backend: &'static str,
    /// Its state.
    pub verdict: Verdict,
}

/// The state of a backend toward a peer.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Verdict {
    /// Connected; how it reaches the peer's memory.
    Up(String),
    /// Connecting.
    Opening,
    /// Not needed so far: it comes after one that works.
    Standby,
    /// It cannot serve this peer.
    Refused(Error),
}

impl Route {
    /// The backend that serves what it can: the first that is connected.
    pub fn chosen(&self) -> Option<&'static str> {
        self.candidates
            .iter()
            .find(|candidates| matches!(candidates.verdict, Verdict::Up(_)))
            .map(|candidates| candidates.backend)
    }
}

impl fmt::Display for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let chosen = self.chosen();
        for (at, RouteCandidate { backend, verdict }) in self.candidates.iter().enumerate() {
            f.write_str(if at == 0 { "" } else { "; " })?;
            match verdict {
                Verdict::Up(how) if chosen == Some(backend) => {
                    write!(f, "{backend}: chosen, {how}")?
                }
                Verdict::Up(how) => write!(f, "{backend}: connected, {how}")?,
                Verdict::Opening => write!(f, "{backend}: connecting")?,
                Verdict::Standby => write!(f, "{backend}: not needed")?,
                Verdict::Refused(error) => write!(f, "{backend}: {error}")?,
            }
        }
        Ok(())
    }
}
