//! One connection, which converts between bytes and frames. Its role gives frames their meaning.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvx_backend::control::HeldBytes;
use kvx_core::backend::LinkId;
use kvx_core::backend::fork::Private;
use kvx_core::{Error, ErrorKind, Identity, Result};
use kvx_noise::Seals;

use crate::tcp::connections::lane::{Effect, LaneEnd, Scope};
use crate::tcp::connections::requests::RequestLane;
use crate::tcp::connections::serve::ServedLane;
use crate::tcp::frames::auth::{InitiatorHandshake, InitiatorVerdict, OwnerHandshake, Step};
use crate::tcp::frames::input::{Input, ReadState};
use crate::tcp::frames::output::Output;
use crate::tcp::frames::{Frame, Header};
use crate::tcp::seal::Seal;

/// The role of a connection.
pub(crate) enum Role {
    /// Opened by this end, not connected yet.
    Connecting { link: LinkId, lane: u8 },
    /// Opened by this end, in the handshake.
    Greeting { link: LinkId, lane: u8, handshake: Box<InitiatorHandshake> },
    /// Opened by this end, up.
    Requests(Box<RequestLane>),
    /// Opened by a peer, in the handshake.
    Greeted(Box<OwnerHandshake>),
    /// Opened by a peer, up.
    Served(Box<ServedLane>),
}

impl Role {
    /// Returns the link and lane that the connection belongs to, if this end opened it.
    pub(crate) fn lane(&self) -> Option<(LinkId, u8)> {
        match self {
            Role::Connecting { link, lane } | Role::Greeting { link, lane, .. } => {
                Some((*link, *lane))
            }
            Role::Requests(lane) => Some((lane.link, lane.number)),
            Role::Greeted(_) | Role::Served(_) => None,
        }
    }

    /// Returns true during the handshake.
    pub(crate) fn is_greeting(&self) -> bool {
        self.up().is_none()
    }

    fn frame(
        &mut self,
        header: Header,
        body: &[u8],
        output: &mut Output,
        key: usize,
        scope: &mut Scope,
    ) -> Result<Change> {
        match self {
            Role::Connecting { .. } => Err(out_of_turn(header)),
            Role::Greeting { link, lane, handshake } => {
                match handshake.frame(header, body, &mut output.control)? {
                    None => Ok(Change::Stay),
                    Some(InitiatorVerdict::Welcome(seals)) => {
                        scope.effects.push(Effect::Welcome {
                            link: *link,
                            lane: *lane,
                            seal: seals.0,
                        });
                        let role = Role::Requests(Box::new(RequestLane::new(key, *link, *lane)));
                        Ok(Change::Become { role, lane: *lane, seals })
                    }
                    Some(InitiatorVerdict::Restarted) => {
                        scope.effects.push(Effect::Restarted { link: *link });
                        Ok(Change::Close)
                    }
                }
            }
            Role::Greeted(handshake) => match handshake.frame(header, body, &mut output.control)? {
                Step::More => Ok(Change::Stay),
                Step::Entered { who, link, lane, seals, place } => {
                    scope.effects.push(Effect::Entered { key });
                    let served = ServedLane::new(key, who, (link, lane), place);
                    Ok(Change::Become { role: Role::Served(Box::new(served)), lane, seals })
                }
                Step::Mistaken => {
                    tracing::debug!(
                        "a peer expects another agent, or another incarnation of this one"
                    );
                    Ok(Change::Close)
                }
            },
            Role::Requests(lane) => lane.frame(header, body, output, scope).map(|()| Change::Stay),
            Role::Served(lane) => lane.frame(header, body, output, scope).map(|()| Change::Stay),
        }
    }

    /// Returns the end of the lane, once the handshake is done.
    fn up(&self) -> Option<&dyn LaneEnd> {
        match self {
            Role::Requests(lane) => Some(&**lane),
            Role::Served(lane) => Some(&**lane),
            Role::Connecting { .. } | Role::Greeting { .. } | Role::Greeted(_) => None,
        }
    }

    /// Like [`up`](Self::up), but mutable.
    pub(crate) fn up_mut(&mut self) -> Option<&mut dyn LaneEnd> {
        match self {
            Role::Requests(lane) => Some(&mut **lane),
            Role::Served(lane) => Some(&mut **lane),
            Role::Connecting { .. } | Role::Greeting { .. } | Role::Greeted(_) => None,
        }
    }
}

/// The effect of a frame on its connection.
enum Change {
    Stay,
    /// The handshake is done.
    Become {
        role: Role,
        lane: u8,
        seals: (Seal, Box<Seals>),
    },
    /// The connection must be closed once its output is sent.
    Close,
}

fn out_of_turn(header: Header) -> Error {
    ErrorKind::Malformed.because(format!("malformed conversation: unexpected {:?}", header.frame))
}

/// A connection.
pub(crate) struct Conn {
    socket: Arc<Private>,
    pub(crate) peer: SocketAddr,
    /// True if the connection has precedence over bulk connections.
    pub(crate) small: bool,
    /// True if the connection waits in a queue of the machine.
    pub(crate) queued: bool,
    /// The time by which the connection's handshake must be done.
    pub(crate) deadline: Option<Instant>,
    /// True if the connection must be closed once its output is sent.
    pub(crate) closing: bool,
    readable: bool,
    writable: bool,
    /// True if the other end has closed, so that a short read does not mean that nothing more
    /// arrives.
    hung_up: bool,
    /// The time since when the socket takes no bytes, if that matters to others.
    full_since: Option<Instant>,
    /// The bytes that are counted as held for the peer.
    held: usize,
    pub(crate) input: Input,
    pub(crate) output: Output,
    pub(crate) role: Role,
}

/// The time after which a socket that takes no bytes may do so for ever; its streams then release
/// their bounce buffers.
const STUCK: Duration = Duration::from_millis(100);

impl Conn {
    pub(crate) fn new(socket: Private, peer: SocketAddr, role: Role, deadline: Instant) -> Self {
        Conn {
            socket: Arc::new(socket),
            peer,
            small: true,
            queued: false,
            deadline: Some(deadline),
            closing: false,
            readable: false,
            writable: false,
            hung_up: false,
            full_since: None,
            held: 0,
            input: Input::new(),
            output: Output::default(),
            role,
        }
    }

    /// Counts the bytes that are held for a peer. Returns `Exhausted` above the peer's limit.
    pub(crate) fn note_held(&mut self, held: &mut HeldBytes<Identity>) -> Result<()> {
        let Role::Served(lane) = &self.role else { return Ok(()) };
        let bytes = self.input.held() + lane.held() + self.output.held();
        held.note(&lane.who, &mut self.held, bytes)
    }

    /// Ends the count of memory that the connection holds for its peer.
    pub(crate) fn release_held(&mut self, held: &mut HeldBytes<Identity>) {
        if let Role::Served(lane) = &self.role {
            // An excess of this peer's other connections is noticed in their turns.
            held.note(&lane.who, &mut self.held, 0).ok();
        }
    }

    /// Returns the bytes of the descriptions that the connection holds for a peer.
    pub(crate) fn described(&self) -> usize {
        if let Role::Served(lane) = &self.role { lane.described() } else { 0 }
    }

    pub(crate) fn socket(&self) -> &Arc<Private> {
        &self.socket
    }

    /// Records the readiness that the kernel reports.
    pub(crate) fn event(&mut self, readable: bool, writable: bool, hung_up: bool) {
        self.readable |= readable || hung_up;
        self.writable |= writable || hung_up;
        self.hung_up |= hung_up;
        if self.writable {
            self.full_since = None;
        }
    }

    /// Records whether the socket takes no bytes while the connection has streams. Returns the time
    /// of the next check if that has just begun.
    pub(crate) fn note_if_full(&mut self, now: Instant) -> Option<Instant> {
        if self.writable
            || self.full_since.is_some()
            || !self.role.up().is_some_and(|lane| lane.has_streams())
        {
            return None;
        }
        self.full_since = Some(now);
        Some(now + STUCK)
    }

    /// Releases the bounce buffers of its streams if its socket has taken no bytes for long.
    /// Returns the time of the next check, if there is one.
    pub(crate) fn look_if_stuck(&mut self, now: Instant) -> Option<Instant> {
        let stuck_at = self.full_since? + STUCK;
        if stuck_at > now {
            return Some(stuck_at);
        }
        if let Some(lane) = self.role.up_mut() {
            lane.make_way(&mut self.output);
        }
        None // a token arrives when others wait
    }

    /// Returns true if there is work now.
    pub(crate) fn is_ready(&self, described: usize) -> bool {
        match &self.role {
            Role::Connecting { .. } => self.readable || self.writable,
            _ => {
                let reads = self.readable || self.input.has_backlog();
                reads && !self.input.stalled && !self.is_paused(described)
                    || self.writable && self.has_output()
            }
        }
    }

    /// Returns true if the socket may have unread bytes.
    pub(crate) fn may_have_unread(&self) -> bool {
        self.readable
    }

    /// Returns true if output waits to be sent.
    pub(crate) fn has_output(&self) -> bool {
        !self.output.at_boundary()
            || !self.output.control.is_empty()
            || self.role.up().is_some_and(|lane| lane.has_frames())
    }

    fn is_paused(&self, described: usize) -> bool {
        self.closing || self.role.up().is_some_and(|lane| lane.is_paused(&self.output, described))
    }

    /// Runs the connection's turn: receives and sends about `share` bytes each. Returns both
    /// amounts.
    pub(crate) fn serve(
        &mut self,
        share: usize,
        key: usize,
        scope: &mut Scope,
    ) -> Result<(usize, usize)> {
        match self.receive(share, key, scope) {
            Ok(received) => self.send(share, scope).map(|sent| (received, sent)),
            Err(error) => {
                if self.role.is_greeting() {
                    self.send(share, scope).ok(); // sends the rest of a refusal
                }
                Err(error)
            }
        }
    }

    /// Receives about `budget` bytes. Returns how many.
    fn receive(&mut self, budget: usize, key: usize, scope: &mut Scope) -> Result<usize> {
        let mut moved = 0;
        loop {
            scope.go_on()?;
            self.parse(key, scope)?;
            if !self.readable
                || moved >= budget
                || self.input.stalled
                || self.is_paused(scope.described)
            {
                self.release_idle_buffer(scope.described);
                return Ok(moved);
            }
            moved += self.read(scope)?;
        }
    }

    /// Releases the bounce buffer that waits for payload, unless payload is being read now.
    fn release_idle_buffer(&mut self, described: usize) {
        let waits = matches!(self.input.state, ReadState::Data { .. }) && !self.input.stalled;
        if waits
            && (!self.readable || self.is_paused(described))
            && self.role.up_mut().is_some_and(|lane| lane.pause())
        {
            self.input.chunk.clear();
        }
    }

    /// Continues a stream for which a device has copied.
    pub(crate) fn woken(&mut self, token: u64, now: Instant, scope: &mut Scope) {
        if let Some(lane) = self.role.up_mut() {
            lane.woken(token, &mut self.input, &mut self.output, scope);
        }
        self.release_idle_buffer(scope.described);
        self.look_if_stuck(now);
    }

    /// Reads from the socket. A short read means that it is empty: the next bytes cause an event.
    fn read(&mut self, scope: &mut Scope) -> Result<usize> {
        let (got, want) = self.input.read(&self.socket, self.small, &mut scope.pieces)?;
        if got.is_none_or(|got| got < want && !self.hung_up) {
            self.readable = false;
        }
        Ok(got.unwrap_or(0))
    }

    /// Handles all complete frames and the received payload.
    fn parse(&mut self, key: usize, scope: &mut Scope) -> Result<()> {
        loop {
            scope.go_on()?;
            let moved = self.input.chunk.take_moved();
            if moved > 0
                && let Some(lane) = self.role.up_mut()
            {
                lane.took(moved);
            }
            match self.input.state {
                ReadState::Header => {
                    if self.is_paused(scope.described) {
                        return Ok(());
                    }
                    let Some(header) = self.input.header()? else { return Ok(()) };
                    if self.role.is_greeting() != header.frame.is_greeting() {
                        return Err(out_of_turn(header));
                    }
                    self.input.state = if header.frame == Frame::Data {
                        let lane = self.role.up_mut().ok_or_else(|| out_of_turn(header))?;
                        lane.data(header)?;
                        self.input.chunk.clear();
                        ReadState::Data { left: header.len }
                    } else {
                        ReadState::Body(header)
                    };
                }
                ReadState::Body(header) => {
                    let Some(body) = self.input.body(header.len)? else { return Ok(()) };
                    let change = self.role.frame(header, body, &mut self.output, key, scope)?;
                    self.input.body_end();
                    self.change(change);
                }
                ReadState::Data { left: 0 } => {
                    if let Some(lane) = self.role.up_mut() {
                        lane.data_end(&mut self.output, scope);
                    }
                    self.input.state = ReadState::Header;
                }
                ReadState::Data { left } => {
                    let input = &mut self.input;
                    if input.chunk.left() == 0 {
                        input.chunk.clear();
                        let max = left.min(scope.piece);
                        let Some(lane) = self.role.up_mut() else {
                            debug_assert!(false, "only a lane that is up receives payload");
                            return Ok(());
                        };
                        input.stalled = !lane.fill(&mut input.chunk, max, &mut self.output, scope);
                        if input.stalled {
                            return Ok(());
                        }
                    }
                    if !input.drain_into_chunk(left)? {
                        return Ok(());
                    }
                }
            }
        }
    }

    fn change(&mut self, change: Change) {
        match change {
            Change::Stay => {}
            Change::Close => self.closing = true,
            Change::Become { role, lane, seals: (seal, seals) } => {
                self.deadline = None;
                self.small = lane == 0;
                self.role = role;
                self.input.open_from_here(seals.opener, seal);
                self.output.seal_from_here(seals.sealer, seal);
            }
        }
    }

    /// Sends about `budget` bytes. Returns how many.
    fn send(&mut self, budget: usize, scope: &mut Scope) -> Result<usize> {
        let mut moved = 0;
        while self.writable && moved < budget {
            scope.go_on()?;
            if self.output.at_boundary() {
                self.output.begin();
                if let Some(lane) = self.role.up_mut() {
                    lane.next_frame(&mut self.output, scope);
                }
                self.output.seal();
                if self.output.left() == 0 {
                    break;
                }
            }
            let sent = self.output.write(&self.socket, &mut scope.pieces)?;
            // Otherwise the socket is full: free space causes an event.
            self.writable = self.output.left() == 0;
            moved += sent;
        }
        Ok(moved)
    }
}
