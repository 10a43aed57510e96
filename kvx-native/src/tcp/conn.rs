//! One connection: bytes in, frames out, and the other way round. What frames mean is up to its role.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::time::Instant;

use kvx_core::{Error, Identity, Incarnation, Kind, LinkId, Result, TransferId};

use super::auth::{Door, Knock, Step, Verdict};
use super::fetch::Lane;
use super::frames::{Frame, HEADER, Header};
use super::payload::{Bin, Chunk};
use super::serve::Guest;
use super::socket;
use super::transport::Shared;

/// Bytes read at a time when nothing is known of what comes.
const BUFFER: usize = 16 << 10;
/// Bytes read behind a bulk payload: an END and the next header, no more, because they are copied.
const BEHIND_BULK: usize = 4 * HEADER;
/// The most that grows at a time while the body of a frame comes in.
const GROWTH: usize = 64 << 10;

/// What every connection of a machine shares.
pub(super) struct Scope<'a> {
    pub(super) shared: &'a Shared,
    pub(super) bin: &'a mut Bin,
    pub(super) pieces: &'a mut Vec<libc::iovec>,
    pub(super) effects: &'a mut Vec<Effect>,
    /// Bytes of queued descriptions, over all guests.
    pub(super) described: &'a mut usize,
}

/// What a connection tells the machine.
#[derive(Debug)]
pub(super) enum Effect {
    /// A lane is up.
    Welcome { link: LinkId, lane: u8 },
    /// Another incarnation answered.
    Restarted { link: LinkId, incarnation: Incarnation },
    /// A request has ended: one of a transfer's, or one that was given up. There is room for another.
    Ended { link: LinkId, transfer: Option<TransferId>, result: Result<()> },
    /// A notification has arrived.
    Acked { link: LinkId, id: u64 },
    /// A peer got in.
    Entered { key: usize },
    /// A peer takes back a request of another of its lanes.
    Cancelled { link: [u8; 16], lane: u8, id: u64 },
    /// A peer looked for somebody else.
    Mistaken { who: Identity },
}

/// What a connection is.
pub(super) enum Role {
    /// Ours, not connected yet.
    Connecting { link: LinkId, lane: u8 },
    /// Ours, in the handshake.
    Knock { link: LinkId, lane: u8, knock: Knock },
    /// Ours, up.
    Lane(Lane),
    /// A peer's, in the handshake.
    Door(Door),
    /// A peer's, up.
    Guest(Guest),
}

impl Role {
    /// The link that it belongs to, if it is ours, and which lane of it.
    pub(super) fn lane(&self) -> Option<(LinkId, u8)> {
        match self {
            Role::Connecting { link, lane } | Role::Knock { link, lane, .. } => Some((*link, *lane)),
            Role::Lane(lane) => Some((lane.link, lane.number)),
            Role::Door(_) | Role::Guest(_) => None,
        }
    }

    /// Whether the ends do not know each other yet.
    pub(super) fn is_greeting(&self) -> bool {
        !matches!(self, Role::Lane(_) | Role::Guest(_))
    }

    fn frame(
        &mut self,
        header: Header,
        body: &[u8],
        output: &mut Output,
        key: usize,
        scope: &mut Scope<'_>,
    ) -> Result<Change> {
        match self {
            Role::Connecting { .. } => Err(out_of_turn(header)),
            Role::Knock { link, lane, knock } => match knock.frame(header, body, &mut output.control)? {
                None => Ok(Change::Stay),
                Some(Verdict::Welcome) => {
                    scope.effects.push(Effect::Welcome { link: *link, lane: *lane });
                    Ok(Change::Become { role: Role::Lane(Lane::new(*link, *lane)), lane: *lane })
                }
                Some(Verdict::Restarted(incarnation)) => {
                    scope.effects.push(Effect::Restarted { link: *link, incarnation });
                    Ok(Change::Close)
                }
            },
            Role::Door(door) => match door.frame(header, body, &mut output.control)? {
                Step::More => Ok(Change::Stay),
                Step::Guest { who, link, lane } => {
                    scope.effects.push(Effect::Entered { key });
                    Ok(Change::Become { role: Role::Guest(Guest::new(who, link, lane)), lane })
                }
                Step::Mistaken { who } => {
                    scope.effects.push(Effect::Mistaken { who });
                    Ok(Change::Close)
                }
            },
            Role::Lane(lane) => lane.frame(header, body, output, scope.effects).map(|()| Change::Stay),
            Role::Guest(guest) => guest.frame(header, body, output, scope).map(|()| Change::Stay),
        }
    }

    fn data(&mut self, header: Header) -> Result<()> {
        match self {
            Role::Lane(lane) => lane.data(header),
            Role::Guest(guest) => guest.data(header),
            _ => Err(out_of_turn(header)),
        }
    }

    fn fill(&mut self, chunk: &mut Chunk, max: usize, bin: &mut Bin) {
        match self {
            Role::Lane(lane) => lane.fill(chunk, max, bin),
            Role::Guest(guest) => guest.fill(chunk, max, bin),
            _ => chunk.discard(bin, max),
        }
    }

    fn data_end(&mut self, output: &mut Output, scope: &mut Scope<'_>) {
        match self {
            Role::Lane(lane) => lane.data_end(),
            Role::Guest(guest) => guest.data_end(output, scope),
            _ => {}
        }
    }

    fn next_frame(&mut self, output: &mut Output, scope: &mut Scope<'_>) {
        match self {
            Role::Lane(lane) => lane.next_frame(output),
            Role::Guest(guest) => guest.next_frame(output, scope),
            _ => {}
        }
    }

    fn has_frames(&self) -> bool {
        match self {
            Role::Lane(lane) => lane.has_frames(),
            Role::Guest(guest) => guest.has_frames(),
            _ => false,
        }
    }
}

/// What a frame makes of its connection.
enum Change {
    Stay,
    /// The handshake is done.
    Become {
        role: Role,
        lane: u8,
    },
    /// To be closed when the output has gone.
    Close,
}

fn out_of_turn(header: Header) -> Error {
    Error::new(Kind::Malformed, format!("malformed conversation: {:?} out of turn", header.frame))
}

/// Where the reader stands.
enum Stage {
    Header,
    Body(Header),
    Data { left: usize },
}

/// What came in.
pub(super) struct Input {
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
    body: Vec<u8>,
    stage: Stage,
    /// Where the payload that is coming in goes.
    pub(super) chunk: Chunk,
}

/// What goes out: a frame's first bytes, its payload, and what follows it; then what has come up meanwhile.
#[derive(Default)]
pub(super) struct Output {
    head: Vec<u8>,
    head_at: usize,
    /// The payload of the frame that is going out.
    pub(super) chunk: Chunk,
    tail: Vec<u8>,
    tail_at: usize,
    /// Whole frames without payload; they go before the next payload.
    pub(super) control: Vec<u8>,
}

impl Output {
    fn at_boundary(&self) -> bool {
        self.head_at == self.head.len() && self.chunk.left() == 0 && self.tail_at == self.tail.len()
    }

    /// Where a DATA frame writes its header.
    pub(super) fn head(&mut self) -> &mut Vec<u8> {
        &mut self.head
    }

    /// Where it writes what follows its payload.
    pub(super) fn tail(&mut self) -> &mut Vec<u8> {
        &mut self.tail
    }

    /// Whether the payload that is going out has not gone out as a whole.
    pub(super) fn in_payload(&self) -> bool {
        self.chunk.left() > 0
    }

    /// Zeros in place of the rest of the payload, and nothing behind it: another frame says why.
    pub(super) fn abort(&mut self) {
        debug_assert!(self.in_payload());
        self.chunk.zero();
        self.tail.clear();
        self.tail_at = 0;
    }

    fn next(&mut self, role: &mut Role, scope: &mut Scope<'_>) {
        self.head.clear();
        self.tail.clear();
        (self.head_at, self.tail_at) = (0, 0);
        if self.head.capacity() > GROWTH {
            self.head = Vec::new();
        }
        std::mem::swap(&mut self.head, &mut self.control);
        role.next_frame(self, scope);
    }

    fn pieces(&self, pieces: &mut Vec<libc::iovec>) {
        let piece =
            |bytes: &[u8]| libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
        pieces.clear();
        if self.head_at < self.head.len() {
            pieces.push(piece(&self.head[self.head_at..]));
        }
        pieces.extend_from_slice(self.chunk.pieces());
        if self.tail_at < self.tail.len() {
            pieces.push(piece(&self.tail[self.tail_at..]));
        }
    }

    fn left(&self) -> usize {
        self.head.len() - self.head_at + self.chunk.left() + self.tail.len() - self.tail_at
    }

    fn advance(&mut self, mut count: usize) {
        let head = count.min(self.head.len() - self.head_at);
        self.head_at += head;
        count -= head;
        let payload = count.min(self.chunk.left());
        self.chunk.advance(payload);
        self.tail_at += count - payload;
    }
}

/// A connection.
pub(super) struct Conn {
    socket: OwnedFd,
    pub(super) peer: SocketAddr,
    /// Goes before bulk connections.
    pub(super) small: bool,
    /// Whether it waits in a queue of the machine.
    pub(super) queued: bool,
    /// When its handshake must be done.
    pub(super) deadline: Option<Instant>,
    /// To be closed when its output has gone.
    pub(super) closing: bool,
    readable: bool,
    writable: bool,
    /// Whether the other end has closed: a short read does not mean that nothing more comes.
    hung_up: bool,
    pub(super) input: Input,
    pub(super) output: Output,
    pub(super) role: Role,
}

impl Conn {
    pub(super) fn new(socket: OwnedFd, peer: SocketAddr, role: Role, deadline: Instant) -> Self {
        let input = Input {
            buffer: Box::default(),
            start: 0,
            end: 0,
            body: Vec::new(),
            stage: Stage::Header,
            chunk: Chunk::default(),
        };
        Conn {
            socket,
            peer,
            small: true,
            queued: false,
            deadline: Some(deadline),
            closing: false,
            readable: false,
            writable: false,
            hung_up: false,
            input,
            output: Output::default(),
            role,
        }
    }

    pub(super) fn socket(&self) -> &OwnedFd {
        &self.socket
    }

    /// What the kernel says of it now.
    pub(super) fn event(&mut self, readable: bool, writable: bool, hung_up: bool) {
        self.readable |= readable || hung_up;
        self.writable |= writable || hung_up;
        self.hung_up |= hung_up;
    }

    /// Whether there is something to do now.
    pub(super) fn is_ready(&self, described: usize) -> bool {
        match &self.role {
            Role::Connecting { .. } => self.readable || self.writable,
            _ => {
                let reads = (self.readable || self.input.has_backlog()) && !self.is_paused(described);
                reads || self.writable && self.has_output()
            }
        }
    }

    /// Whether something waits to be sent.
    pub(super) fn has_output(&self) -> bool {
        !self.output.at_boundary() || !self.output.control.is_empty() || self.role.has_frames()
    }

    fn is_paused(&self, described: usize) -> bool {
        self.closing || matches!(&self.role, Role::Guest(guest) if guest.is_paused(&self.output, described))
    }

    /// Takes in what is there: about `budget` bytes. Says how many.
    pub(super) fn receive(&mut self, budget: usize, key: usize, scope: &mut Scope<'_>) -> Result<usize> {
        let mut moved = 0;
        loop {
            self.parse(key, scope)?;
            if !self.readable || moved >= budget || self.is_paused(*scope.described) {
                return Ok(moved);
            }
            moved += self.read(scope)?;
        }
    }

    fn read(&mut self, scope: &mut Scope<'_>) -> Result<usize> {
        let input = &mut self.input;
        if input.buffer.is_empty() {
            input.buffer = vec![0; BUFFER].into();
        }
        if let Stage::Body(header) = input.stage
            && header.len - input.body.len() > BUFFER
        {
            let want = (header.len - input.body.len()).min(GROWTH);
            let old = input.body.len();
            input.body.resize(old + want, 0);
            let piece = libc::iovec { iov_base: input.body[old..].as_mut_ptr().cast(), iov_len: want };
            // SAFETY: the piece is the new end of `body`, which outlives the call.
            let got = unsafe { socket::receive(&self.socket, &mut [piece]) };
            input.body.truncate(old + got.as_ref().ok().copied().flatten().unwrap_or(0));
            return self.after_read(got?, want);
        }
        let pieces = &mut *scope.pieces;
        pieces.clear();
        let mut behind = BUFFER;
        let mut want = 0;
        if let Stage::Data { left } = input.stage {
            pieces.extend_from_slice(input.chunk.pieces());
            want = input.chunk.left();
            behind = match (want == left, self.small) {
                (false, _) => 0,
                (true, true) => BUFFER,
                (true, false) => BEHIND_BULK,
            };
        }
        input.compact();
        let room = &mut input.buffer[input.end..];
        let behind = behind.min(room.len());
        if behind > 0 {
            pieces.push(libc::iovec { iov_base: room.as_mut_ptr().cast(), iov_len: behind });
        }
        // SAFETY: the first pieces are the chunk's, whose owner keeps their memory and lets it be written; the last is
        // the free part of the buffer.
        let got = unsafe { socket::receive(&self.socket, pieces) }?;
        let count = got.unwrap_or(0);
        let payload = count.min(want);
        input.chunk.advance(payload);
        input.end += count - payload;
        if let Stage::Data { left } = &mut input.stage {
            *left -= payload;
        }
        self.after_read(got, want + behind)
    }

    /// A short read means that the socket is empty: the next bytes make an event.
    fn after_read(&mut self, got: Option<usize>, want: usize) -> Result<usize> {
        let count = got.unwrap_or(0);
        if got.is_none() || count < want && !self.hung_up {
            self.readable = false;
        }
        Ok(count)
    }

    /// Works on all whole frames, and on payload as far as it has come.
    fn parse(&mut self, key: usize, scope: &mut Scope<'_>) -> Result<()> {
        loop {
            match self.input.stage {
                Stage::Header => {
                    if self.is_paused(*scope.described) {
                        return Ok(());
                    }
                    let Some(header) = self.input.header()? else { return Ok(()) };
                    if self.role.is_greeting() != header.frame.is_greeting() {
                        return Err(out_of_turn(header));
                    }
                    self.input.stage = if header.frame == Frame::Data {
                        self.role.data(header)?;
                        self.input.chunk.clear();
                        Stage::Data { left: header.len }
                    } else {
                        Stage::Body(header)
                    };
                }
                Stage::Body(header) => {
                    let Some(body) = self.input.body(header.len) else { return Ok(()) };
                    let change = self.role.frame(header, body, &mut self.output, key, scope)?;
                    self.input.body_end();
                    self.change(change);
                }
                Stage::Data { left: 0 } => {
                    self.role.data_end(&mut self.output, scope);
                    self.input.stage = Stage::Header;
                }
                Stage::Data { left } => {
                    let input = &mut self.input;
                    if input.chunk.left() == 0 {
                        input.chunk.clear();
                        self.role.fill(&mut input.chunk, left, scope.bin);
                    }
                    if input.start == input.end {
                        return Ok(());
                    }
                    let count = input.chunk.copy_in(&input.buffer[input.start..input.end]);
                    input.start += count;
                    input.stage = Stage::Data { left: left - count };
                }
            }
        }
    }

    fn change(&mut self, change: Change) {
        match change {
            Change::Stay => {}
            Change::Close => self.closing = true,
            Change::Become { role, lane } => {
                self.deadline = None;
                self.small = lane == 0;
                self.role = role;
            }
        }
    }

    /// Sends what there is: about `budget` bytes. Says how many.
    pub(super) fn send(&mut self, budget: usize, scope: &mut Scope<'_>) -> Result<usize> {
        let mut moved = 0;
        while self.writable && moved < budget {
            if self.output.at_boundary() {
                self.output.next(&mut self.role, scope);
                if self.output.left() == 0 {
                    break;
                }
            }
            self.output.pieces(scope.pieces);
            // SAFETY: the pieces are buffers of this connection and the chunk's, whose owner keeps their memory.
            let sent = unsafe { socket::send(&self.socket, scope.pieces) }?;
            let count = sent.unwrap_or(0);
            if count < self.output.left() {
                self.writable = false; // full: room makes an event
            }
            self.output.advance(count);
            moved += count;
        }
        Ok(moved)
    }
}

impl Input {
    fn has_backlog(&self) -> bool {
        matches!(self.stage, Stage::Header) && self.end - self.start >= HEADER
    }

    /// Whether payload is coming in.
    pub(super) fn in_payload(&self) -> bool {
        matches!(self.stage, Stage::Data { .. })
    }

    /// The rest of the payload that is coming in goes nowhere.
    pub(super) fn abort(&mut self, bin: &mut Bin) {
        self.chunk.discard_into(bin);
    }

    fn header(&mut self) -> Result<Option<Header>> {
        let Some(bytes) = self.buffer[self.start..self.end].first_chunk::<HEADER>() else { return Ok(None) };
        let header = Header::decode(bytes)?;
        self.start += HEADER;
        Ok(Some(header))
    }

    /// The body of a frame, when it is there as a whole: in the buffer if it fits in there, else gathered.
    fn body(&mut self, len: usize) -> Option<&[u8]> {
        let buffered = self.end - self.start;
        if len <= BUFFER {
            let body = self.buffer.get(self.start..self.start + len).filter(|_| buffered >= len)?;
            self.start += len;
            return Some(body);
        }
        let more = buffered.min(len - self.body.len());
        self.body.extend_from_slice(&self.buffer[self.start..self.start + more]);
        self.start += more;
        (self.body.len() == len).then_some(&*self.body)
    }

    fn body_end(&mut self) {
        self.body.clear();
        self.body.shrink_to(GROWTH);
        self.stage = Stage::Header;
    }

    /// Moves what is left in the buffer to its front.
    fn compact(&mut self) {
        self.buffer.copy_within(self.start..self.end, 0);
        self.end -= self.start;
        self.start = 0;
    }
}
