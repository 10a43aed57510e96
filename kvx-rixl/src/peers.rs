//! The peers that NIXL knows, by name, with one address each, and the endpoints that lead to them.

use std::collections::BTreeMap;
use std::ffi::{CStr, CString};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kvx_backend::fabric::{EndpointId, Event};
use kvx_core::backend::wire::Writer as _;
use kvx_core::{Error, ErrorKind, PerOp, Result};

use crate::blob::{Blob, BlobMemory, malformed};
use crate::ffi::Range;
use crate::peer_loader::{LoadResult, LoadTask, Name, PeerLoader};

/// A peer's region, which NIXL loads when a transfer first needs it.
pub(crate) struct NixlRegion {
    pub(crate) range: Range,
    pub(crate) blob: Box<[u8]>,
    /// The load of the peer's address for which the region was loaded; 0 if for none.
    loaded_for: AtomicU64,
}

impl NixlRegion {
    pub(crate) fn new(range: Range, blob: Box<[u8]>) -> Self {
        NixlRegion { range, blob, loaded_for: AtomicU64::new(0) }
    }

    /// Returns whether NIXL has loaded the region for this load of the peer's address.
    pub(crate) fn is_loaded_for(&self, load: u64) -> bool {
        self.loaded_for.load(Ordering::Relaxed) == load
    }
}

/// The state of a peer in NIXL.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PeerState {
    /// NIXL is loading the region.
    Loading,
    Ready,
    /// The region must be removed and loaded again, because it uses a memory address for something
    /// else now.
    Stale,
    /// The peer is lost. `watched`: NIXL has loaded its name again, so that the end of requests can
    /// be detected.
    Lost {
        watched: bool,
    },
}

struct PeerAgent {
    blob: Vec<u8>,
    /// The part of the blob with its plugins and addresses.
    connections: Vec<u8>,
    /// The number of this load; requests of another load cannot be posted.
    load: u64,
    state: PeerState,
    endpoints: Vec<EndpointId>,
    /// The regions that NIXL has loaded, whether or not they are still used.
    exports: Vec<Arc<NixlRegion>>,
    /// The number of requests in progress.
    flights: usize,
    /// The number of requests in progress when the peer was lost, or when NIXL last reported an end
    /// after that.
    in_flight_at_load: usize,
    /// The operations that need the peer's CPU, once that is known.
    reach: Option<PerOp>,
    /// Another incarnation of the same name, or a new connection after this one was lost. It starts
    /// when this one is removed.
    next: Option<(Vec<u8>, Vec<EndpointId>)>,
}

struct Endpoint {
    /// `None` if the endpoint leads to this agent itself.
    peer: Option<Name>,
    foreign: bool,
    /// True if the peer has opened the endpoint, and may move bytes over it before its trial.
    accepted: bool,
    severed: bool,
}

/// Whether an endpoint is usable.
pub(crate) enum PeerAccess<'a> {
    /// The endpoint leads to this name with this load; the last field is the number of requests in
    /// progress to the peer.
    Open(&'a Name, u64, usize),
    /// Not yet, or not now.
    Later,
}

/// All peers.
pub(crate) struct Peers {
    own_name: Name,
    /// The operations that need the CPU if an endpoint leads to this agent itself.
    my_reach: Option<PerOp>,
    /// True if some of them need a CPU to move data, as over TCP, or may need this process's
    /// because their trial has not ended.
    pub(crate) needs_cpu: bool,
    loads: PeerLoader,
    next_load: u64,
    by_name: BTreeMap<Name, PeerAgent>,
    endpoints: BTreeMap<EndpointId, Endpoint>,
}

fn lost(why: &'static str) -> Error {
    ErrorKind::PeerLost.because(why)
}

impl Peers {
    pub(crate) fn new(own_name: CString, loads: PeerLoader) -> Self {
        Peers {
            own_name: own_name.into(),
            my_reach: None,
            needs_cpu: false,
            loads,
            next_load: 0,
            by_name: BTreeMap::new(),
            endpoints: BTreeMap::new(),
        }
    }

    /// Returns this agent's own name.
    pub(crate) fn own_name(&self) -> &CStr {
        &self.own_name
    }

    /// Connects an endpoint to the agent that the blob names. NIXL also gets the memory in the
    /// blob.
    pub(crate) fn connect(
        &mut self,
        endpoint: EndpointId,
        blob: &[u8],
        foreign: bool,
    ) -> Result<bool> {
        let said = Blob::read(blob)?;
        let name =
            CString::new(said.agent).map_err(|_| malformed("the agent's name has a NUL byte"))?;
        let name = Name::from(name);
        if name == self.own_name {
            if foreign {
                let why = "this is the blob of this agent: connect with its kvx metadata";
                return Err(ErrorKind::Invalid.because(why));
            }
            self.endpoints.insert(
                endpoint,
                Endpoint { peer: None, foreign, accepted: false, severed: false },
            );
            return Ok(true);
        }
        if said.connections.is_empty() {
            return Err(malformed("it has no plugin with an address"));
        }
        let connections = connections_of(&said);
        let found = Endpoint { peer: Some(name.clone()), foreign, accepted: false, severed: false };
        self.endpoints.insert(endpoint, found);
        match self.by_name.get_mut(&name) {
            None => self.begin(name, blob.to_vec(), connections, vec![endpoint]),
            Some(peer) => {
                let same = peer.connections == connections
                    && !matches!(peer.state, PeerState::Lost { .. });
                if same && peer.blob == blob && peer.next.is_none() {
                    peer.endpoints.push(endpoint);
                    return Ok(peer.state == PeerState::Ready);
                }
                // NIXL knows one incarnation and one description of a name: the new one waits until
                // the old one is unused.
                let (next, waiting) = peer.next.get_or_insert_with(Default::default);
                *next = blob.to_vec();
                waiting.push(endpoint);
            }
        }
        Ok(false)
    }

    /// Adds an endpoint that a peer has opened.
    pub(crate) fn accept(&mut self, endpoint: EndpointId, blob: &[u8]) -> Result<()> {
        self.connect(endpoint, blob, false)?;
        if let Some(endpoint) = self.endpoints.get_mut(&endpoint) {
            endpoint.accepted = true;
        }
        self.note_reach();
        Ok(())
    }

    /// Returns the name of an endpoint's peer.
    pub(crate) fn name(&self, endpoint: EndpointId) -> Option<Name> {
        Some(
            self.endpoints
                .get(&endpoint)?
                .peer
                .clone()
                .unwrap_or_else(|| Arc::clone(&self.own_name)),
        )
    }

    /// Returns the operations that need the CPU of an endpoint's peer, if that is known.
    pub(crate) fn reach(&self, endpoint: EndpointId) -> Option<PerOp> {
        match &self.endpoints.get(&endpoint)?.peer {
            None => self.my_reach,
            Some(name) => {
                self.by_name.get(name).filter(|peer| peer.endpoints.contains(&endpoint))?.reach
            }
        }
    }

    /// Records the operations that need the peer's CPU.
    pub(crate) fn set_reach(&mut self, endpoint: EndpointId, reach: PerOp) {
        // The endpoint may be disconnected during its trial.
        let Some(found) = self.endpoints.get(&endpoint) else { return };
        let peer = found.peer.as_ref().map(|name| self.by_name.get_mut(name));
        match peer {
            None => self.my_reach = Some(reach),
            Some(Some(peer)) if peer.endpoints.contains(&endpoint) => peer.reach = Some(reach),
            Some(_) => {}
        }
        self.note_reach();
    }

    fn note_reach(&mut self) {
        let mut known =
            self.by_name.values().map(|peer| peer.reach).chain([self.my_reach]).flatten();
        let mut accepted =
            self.endpoints.iter().filter(|(_, found)| found.accepted && found.peer.is_some());
        self.needs_cpu = known.any(|reach| reach != PerOp::NEITHER)
            || accepted.any(|(endpoint, _)| self.reach(*endpoint) != Some(PerOp::NEITHER));
    }

    /// Returns the endpoints of an earlier incarnation whose successor waits: they are lost.
    pub(crate) fn earlier_endpoints(&self, endpoint: EndpointId) -> Vec<EndpointId> {
        let name = self.endpoints.get(&endpoint).and_then(|endpoint| endpoint.peer.as_ref());
        let Some(peer) = name.and_then(|name| self.by_name.get(name)) else { return Vec::new() };
        match &peer.next {
            Some((_, waiting)) if waiting.contains(&endpoint) => peer.endpoints.clone(),
            _ => Vec::new(),
        }
    }

    fn begin(
        &mut self,
        name: Name,
        blob: Vec<u8>,
        connections: Vec<u8>,
        endpoints: Vec<EndpointId>,
    ) {
        self.next_load += 1;
        let load = self.next_load;
        self.loads.ask(LoadTask::Load { peer: name.clone(), load, blob: blob.clone() });
        let peer = PeerAgent {
            blob,
            connections,
            load,
            state: PeerState::Loading,
            endpoints,
            exports: Vec::new(),
            flights: 0,
            in_flight_at_load: 0,
            reach: None,
            next: None,
        };
        self.by_name.insert(name, peer);
    }

    fn peer_of(&mut self, endpoint: EndpointId) -> Option<&mut PeerAgent> {
        let name = self.endpoints.get(&endpoint)?.peer.as_ref()?;
        self.by_name.get_mut(name)
    }

    /// Returns whether an endpoint can be used now. Errors: `PeerLost`.
    pub(crate) fn access(&mut self, endpoint: EndpointId) -> Result<PeerAccess<'_>> {
        let found = self.endpoints.get(&endpoint).ok_or_else(|| lost("the endpoint is gone"))?;
        if found.severed {
            return Err(lost("the peer is lost"));
        }
        let Some(name) = &found.peer else { return Ok(PeerAccess::Open(&self.own_name, 1, 0)) };
        let peer = self.by_name.get(name).ok_or_else(|| lost("the endpoint is gone"))?;
        if !peer.endpoints.contains(&endpoint) {
            return Ok(PeerAccess::Later); // its incarnation has not started
        }
        match peer.state {
            PeerState::Ready => Ok(PeerAccess::Open(name, peer.load, peer.flights)),
            PeerState::Loading | PeerState::Stale => Ok(PeerAccess::Later),
            PeerState::Lost { .. } => Err(lost("the peer is lost")),
        }
    }

    pub(crate) fn is_foreign(&self, endpoint: EndpointId) -> bool {
        self.endpoints.get(&endpoint).is_some_and(|endpoint| endpoint.foreign)
    }

    /// Returns the blob of a region that NIXL must load before the endpoint can use it.
    pub(crate) fn unloaded_blob<'a>(
        &self,
        endpoint: EndpointId,
        export: &'a NixlRegion,
    ) -> Option<&'a [u8]> {
        let name = self.endpoints.get(&endpoint)?.peer.as_ref()?;
        let peer = self.by_name.get(name)?;
        let is_loaded_for = export.blob.is_empty() || export.is_loaded_for(peer.load);
        (!is_loaded_for).then_some(&export.blob[..])
    }

    /// Returns whether NIXL may load a region now. NIXL cannot replace a range, and drops the whole
    /// peer instead. So the peer is loaded again when no request is in progress.
    pub(crate) fn may_load_region(
        &mut self,
        endpoint: EndpointId,
        export: &Arc<NixlRegion>,
    ) -> bool {
        let Some(peer) = self.peer_of(endpoint) else { return false };
        let same =
            |other: &&Arc<NixlRegion>| other.range == export.range && other.blob == export.blob;
        if peer.exports.iter().any(|other| same(&other)) {
            export.loaded_for.store(peer.load, Ordering::Relaxed);
            return true;
        }
        if peer.exports.iter().any(|other| other.range.overlaps(&export.range)) {
            peer.state = PeerState::Stale;
            self.refresh(endpoint);
            return false;
        }
        true
    }

    /// Records that NIXL has loaded a region.
    pub(crate) fn note_loaded_region(&mut self, endpoint: EndpointId, export: &Arc<NixlRegion>) {
        if let Some(peer) = self.peer_of(endpoint) {
            export.loaded_for.store(peer.load, Ordering::Relaxed);
            peer.exports.push(Arc::clone(export));
        }
    }

    /// Loads a stale peer again when no request is in progress.
    fn refresh(&mut self, endpoint: EndpointId) {
        let Some(name) = self.endpoints.get(&endpoint).and_then(|endpoint| endpoint.peer.clone())
        else {
            return;
        };
        self.refresh_name(&name);
    }

    fn refresh_name(&mut self, name: &CStr) {
        let Some(peer) = self.by_name.get_mut(name) else {
            return debug_assert!(false, "its endpoint leads to this peer");
        };
        if peer.state != PeerState::Stale || peer.flights > 0 {
            return;
        }
        self.next_load += 1;
        (peer.load, peer.state) = (self.next_load, PeerState::Loading);
        peer.exports.clear();
        self.loads.ask(LoadTask::Forget { peer: name.into() });
        self.loads.ask(LoadTask::Load {
            peer: name.into(),
            load: peer.load,
            blob: peer.blob.clone(),
        });
    }

    /// Records that a request to this peer is in progress.
    pub(crate) fn note_posted(&mut self, peer: &CStr) {
        if let Some(peer) = self.by_name.get_mut(peer) {
            peer.flights += 1;
        }
    }

    pub(crate) fn note_ended(&mut self, name: &CStr) {
        if let Some(peer) = self.by_name.get_mut(name) {
            peer.flights = peer.flights.saturating_sub(1);
            if peer.flights == 0 && peer.state == PeerState::Stale {
                self.refresh_name(name);
            }
        }
    }

    /// Returns whether NIXL can be queried about requests to this peer: not before it has loaded
    /// its address, nor between its loss and the load that follows.
    pub(crate) fn can_be_asked(&self, peer: &CStr) -> bool {
        let unknown = |peer: &PeerAgent| {
            matches!(peer.state, PeerState::Loading | PeerState::Lost { watched: false })
        };
        self.by_name.get(peer).is_none_or(|peer| !unknown(peer))
    }

    /// Records that NIXL was queried about a request to a peer that it has dropped since. Returns
    /// whether the peer is known here: then the request may still be in progress.
    pub(crate) fn note_dropped(&mut self, name: &CStr, events: &mut Vec<Event>) -> bool {
        let Some(peer) = self.by_name.get_mut(name) else { return false };
        match peer.state {
            // NIXL had loaded the peer again and has dropped it again. Before 1.5 it does so for
            // each request whose failure it detects; if none has ended since, it never answers.
            PeerState::Lost { watched: true } if peer.flights < peer.in_flight_at_load => {
                self.watch(name)
            }
            PeerState::Lost { watched: true } => {
                peer.state = PeerState::Lost { watched: false };
                tracing::warn!(peer = ?name, "NIXL does not report the end of requests to a lost peer: kvx keeps their memory");
            }
            _ => self.lose(name, false, events),
        }
        true
    }

    /// Asks NIXL to load a lost peer's name again: it does not answer about requests to an agent
    /// that it does not know.
    fn watch(&mut self, name: &CStr) {
        let Some(peer) = self.by_name.get_mut(name) else {
            return debug_assert!(false, "the peer was found before");
        };
        peer.state = PeerState::Lost { watched: peer.flights == 0 };
        peer.in_flight_at_load = peer.flights;
        if peer.flights > 0 {
            self.next_load += 1;
            peer.load = self.next_load;
            self.loads.ask(LoadTask::Name { peer: name.into(), load: peer.load });
        }
    }

    /// Returns whether a peer is lost, and kept only for its requests in progress.
    pub(crate) fn is_lost(&self, name: &CStr) -> bool {
        self.by_name.get(name).is_some_and(|peer| matches!(peer.state, PeerState::Lost { .. }))
    }

    /// Returns some memory of a peer that NIXL knows.
    pub(crate) fn any_memory(&self, name: &CStr) -> Option<Range> {
        let peer = self.by_name.get(name)?;
        let loaded = peer.exports.first().map(|export| export.range);
        loaded.or_else(|| Blob::read(&peer.blob).ok()?.memory.iter().find_map(BlobMemory::range))
    }

    /// Records that a peer is lost, with all its endpoints: NIXL has dropped it, or knows it
    /// (`known`) but cannot reach it.
    pub(crate) fn lose(&mut self, name: &CStr, known: bool, events: &mut Vec<Event>) {
        // Its last endpoint may have been disconnected while requests to it were in progress.
        let Some(peer) = self.by_name.get_mut(name) else { return };
        if matches!(peer.state, PeerState::Lost { .. }) {
            return;
        }
        if known {
            peer.state = PeerState::Lost { watched: true };
            peer.in_flight_at_load = peer.flights;
        } else {
            self.watch(name);
        }
        let Some(peer) = self.by_name.get(name) else {
            return debug_assert!(false, "watching forgets no peer");
        };
        let why = "the connection broke: the peer's process has ended, or the network has failed";
        events.extend(peer.endpoints.iter().map(|endpoint| Event::Broken {
            endpoint: *endpoint,
            why: lost(why),
            gone: false,
        }));
    }

    /// Takes the results of the loading thread.
    pub(crate) fn take_loaded(&mut self, events: &mut Vec<Event>) {
        for LoadResult { peer: name, load, result } in self.loads.take() {
            let Some(peer) = self.by_name.get_mut(&name).filter(|peer| peer.load == load) else {
                continue;
            };
            match (peer.state, result) {
                (PeerState::Lost { .. }, Ok(())) => peer.state = PeerState::Lost { watched: true },
                // The end of its requests will never be known: kvx keeps their memory.
                (PeerState::Lost { .. }, Err(why)) => {
                    tracing::warn!(peer = ?name, %why, "the end of requests to a lost peer cannot be detected: kvx keeps their memory");
                }
                (_, Ok(())) => {
                    peer.state = PeerState::Ready;
                    // For links between kvx agents, this only triggers a retry of waiting work.
                    events.extend(peer.endpoints.iter().map(|endpoint| Event::Ready(*endpoint)));
                }
                (_, Err(why)) => {
                    peer.state = PeerState::Lost { watched: true };
                    let why = why.with_kind(ErrorKind::PeerLost);
                    events.extend(peer.endpoints.iter().map(|endpoint| Event::Broken {
                        endpoint: *endpoint,
                        why: why.clone(),
                        gone: false,
                    }));
                }
            }
        }
    }

    pub(crate) fn sever(&mut self, endpoint: EndpointId) {
        if let Some(endpoint) = self.endpoints.get_mut(&endpoint) {
            endpoint.severed = true;
        }
    }

    /// Removes an endpoint. With its last one, the peer is removed: returns its name.
    pub(crate) fn disconnect(&mut self, endpoint: EndpointId) -> Option<Name> {
        let name = self.endpoints.remove(&endpoint)?.peer?;
        let peer = self.by_name.get_mut(&name)?;
        peer.endpoints.retain(|other| *other != endpoint);
        if let Some((_, waiting)) = &mut peer.next {
            waiting.retain(|other| *other != endpoint);
        }
        if !peer.endpoints.is_empty() {
            self.note_reach();
            return None;
        }
        let next = self.by_name.remove(&name).and_then(|peer| peer.next);
        self.note_reach();
        self.loads.ask(LoadTask::Forget { peer: name.clone() });
        if let Some((blob, waiting)) = next
            && !waiting.is_empty()
            && let Ok(said) = Blob::read(&blob)
        {
            let connections = connections_of(&said);
            self.begin(name.clone(), blob.clone(), connections, waiting);
        }
        Some(name)
    }
}

/// Returns an agent's plugins and addresses as bytes to compare.
fn connections_of(said: &Blob<'_>) -> Vec<u8> {
    let mut out = Vec::new();
    for (plugin, address) in &said.connections {
        out.put_block(plugin.as_bytes());
        out.put_block(address);
    }
    out
}

#[cfg(test)]
mod tests;
