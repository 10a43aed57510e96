//! The route to a peer: which backend serves it, and why the others do not.

use std::fmt;

use crate::Error;

/// The result of [`Peer::route`](crate::Peer::route): every backend that was considered, in order
/// of preference.
#[derive(Clone, Debug)]
pub struct Route {
    /// The backends and their state.
    pub candidates: Vec<RouteCandidate>,
}

/// A backend of a route.
#[derive(Clone, Debug)]
pub struct RouteCandidate {
    /// The backend's name.
    pub backend: &'static str,
    /// The backend's state.
    pub verdict: Verdict,
}

/// The state of a backend toward a peer.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Verdict {
    /// Connected, with a description of how it reaches the peer's memory.
    Up(String),
    /// Connecting.
    Opening,
    /// Not needed so far, because a backend before it works.
    Standby,
    /// Unable to serve this peer.
    Refused(Error),
}

impl Route {
    /// Returns the backend that carries transfers where it can: the first that is connected.
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
