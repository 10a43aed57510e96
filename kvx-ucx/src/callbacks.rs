//! Records what UCX's callbacks report, for the state machine.
//!
//! Callbacks run inside calls into UCX, so they only record; the machine reads the records when the
//! call returns. Only the thread that holds the machine's lock touches anything here, which is why
//! `Rc` and `Cell` are sufficient.

use std::cell::{Cell, RefCell};
use std::ffi::c_void;
use std::ptr::NonNull;
use std::rc::Rc;

use kvx_backend::fabric::{Event, JobId};
use kvx_core::backend::wire::{Reader, Writer};

use crate::error;
use crate::ffi::bindings_1_13::{ucp_ep_h, ucs_status_t};
use crate::ffi::{CompletionHandler, Message, MessageHandler, Status};

/// The maximum length of a message from a peer.
pub(crate) const MAX_MESSAGE: usize = 16 << 10;

/// The header of each message. It names the sending worker, the endpoint over which that worker
/// sends, and the receiver's endpoint that the sender takes for the other end (0 if it does not
/// know one yet).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MessageHeader {
    pub(crate) worker: u64,
    pub(crate) endpoint: u64,
    pub(crate) answers: u64,
}

impl MessageHeader {
    pub(crate) const LEN: usize = 24;

    /// Returns `message` with this header in front.
    pub(crate) fn frame(self, message: &[u8]) -> Vec<u8> {
        let mut frame = Vec::with_capacity(Self::LEN + message.len());
        for number in [self.worker, self.endpoint, self.answers] {
            frame.put_u64(number);
        }
        frame.put(message);
        frame
    }

    fn read(header: &[u8]) -> Option<MessageHeader> {
        let mut reader = Reader::new("postmark", header);
        let mut number = || reader.u64().ok();
        let postmark = MessageHeader { worker: number()?, endpoint: number()?, answers: number()? };
        reader.end().is_ok().then_some(postmark)
    }
}

/// The content of a worker's last message: no bytes. All other kvx messages have at least one.
pub(crate) const FAREWELL: &[u8] = &[];

/// A received message with its header.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct IncomingMessage {
    pub(crate) from: MessageHeader,
    pub(crate) message: Vec<u8>,
}

/// The events that callbacks have recorded.
#[derive(Default)]
pub(crate) struct CallbackNotes {
    messages: RefCell<Vec<IncomingMessage>>,
    flushed: RefCell<Vec<Event>>,
    /// Endpoints that have failed, by their handles.
    failed: RefCell<Vec<(EndpointHandle, Status)>>,
    /// Jobs that have completed pieces.
    ended: RefCell<Vec<JobId>>,
    /// Pieces that UCX has. Negative while some have ended before `PieceCounter::posted` counted
    /// them: a post that finds the connection broken ends the pieces before it.
    pieces: Cell<isize>,
    /// Operations other than pieces that UCX has.
    others: Cell<usize>,
}

/// UCX's handle of an endpoint, used only to identify it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct EndpointHandle(pub(crate) usize);

impl CallbackNotes {
    /// Returns whether nothing is recorded.
    pub(crate) fn is_empty(&self) -> bool {
        self.has_only_ended() && self.ended.borrow().is_empty()
    }

    /// Returns whether only completed pieces are recorded.
    fn has_only_ended(&self) -> bool {
        self.messages.borrow().is_empty()
            && self.flushed.borrow().is_empty()
            && self.failed.borrow().is_empty()
    }

    /// Returns the number of pieces that UCX has.
    pub(crate) fn pieces(&self) -> isize {
        self.pieces.get()
    }

    /// Returns whether no operation is in flight.
    pub(crate) fn is_quiet(&self) -> bool {
        self.pieces.get() == 0 && self.others.get() == 0
    }

    /// Takes the endpoints that have failed.
    pub(crate) fn take_failed(&self) -> Vec<(EndpointHandle, Status)> {
        self.failed.take()
    }

    /// Drops the recorded failure of an endpoint that has been closed.
    pub(crate) fn forget_failure(&self, endpoint: EndpointHandle) {
        self.failed.borrow_mut().retain(|(failed, _)| *failed != endpoint);
    }

    /// Takes the messages that have been received.
    pub(crate) fn take_messages(&self) -> Vec<IncomingMessage> {
        self.messages.take()
    }

    /// Takes the operations that have ended. `counters` holds the counter of each job by the job's
    /// number.
    pub(crate) fn take_ended(&self, counters: &[Rc<PieceCounter>], into: &mut Vec<Event>) {
        into.append(&mut self.flushed.borrow_mut());
        for job in self.ended.borrow_mut().drain(..) {
            let counter = &counters[job.number()];
            counter.noted.set(false);
            let result = match counter.failed.take() {
                None => Ok(()),
                Some(status) => Err(error::piece_error(status)),
            };
            into.push(Event::Completed { job, pieces: counter.take_pieces(), result });
        }
    }
}

impl MessageHandler for CallbackNotes {
    unsafe fn on_message(this: NonNull<Self>, message: Message<'_>) {
        let from =
            MessageHeader::read(message.header).filter(|_| message.data.len() <= MAX_MESSAGE);
        let Some(from) = from else {
            let (header, length) = (message.header.len(), message.data.len());
            return tracing::warn!(
                backend = error::NAME,
                header,
                length,
                "ignored a message that no kvx agent sent"
            );
        };
        // SAFETY: the fabric drops its worker before its notes.
        let notes = unsafe { this.as_ref() };
        notes.messages.borrow_mut().push(IncomingMessage { from, message: message.data.to_vec() });
    }
}

/// UCX's error handler of an endpoint; `target` is the [`CallbackNotes`].
pub(crate) unsafe extern "C" fn endpoint_failed(
    target: *mut c_void,
    endpoint: ucp_ep_h,
    status: ucs_status_t,
) {
    // SAFETY: the fabric drops its worker before its notes, as in `on_message`.
    let Some(notes) = (unsafe { target.cast::<CallbackNotes>().as_ref() }) else {
        return debug_assert!(false, "UCX passes the argument that it was given");
    };
    notes.failed.borrow_mut().push((EndpointHandle(endpoint as usize), Status(status)));
}

/// Counts the pieces of a job, and later those of the next job with the same number. The fabric
/// drops its worker before its counters.
pub(crate) struct PieceCounter {
    job: JobId,
    notes: Rc<CallbackNotes>,
    /// Pieces of all jobs that are posted to this job's peer and not yet taken as ended.
    to_peer: RefCell<Rc<Cell<usize>>>,
    /// Pieces that have ended since the machine last read the notes.
    ended: Cell<u32>,
    failed: Cell<Option<Status>>,
    /// True if the job is on the list of jobs with completed pieces.
    noted: Cell<bool>,
}

impl PieceCounter {
    pub(crate) fn new(job: JobId, notes: &Rc<CallbackNotes>) -> Rc<PieceCounter> {
        Rc::new(PieceCounter {
            job,
            notes: Rc::clone(notes),
            to_peer: RefCell::default(),
            ended: Cell::new(0),
            failed: Cell::new(None),
            noted: Cell::new(false),
        })
    }

    /// Returns the target of the pieces' callbacks.
    pub(crate) fn target(&self) -> NonNull<PieceCounter> {
        NonNull::from(self)
    }

    /// Counts the pieces that a turn has posted. `to_peer` counts all pieces in flight to the peer.
    /// `pending` pieces have a callback, which may already have run if a later piece failed; `done`
    /// pieces ended during the post.
    pub(crate) fn posted(&self, to_peer: &Rc<Cell<usize>>, pending: u32, done: u32) {
        to_peer.set(to_peer.get() + (pending + done) as usize);
        // A job has one peer. Another peer means that a new job uses this number, and the previous
        // job has no pieces in flight.
        if !Rc::ptr_eq(&self.to_peer.borrow(), to_peer) {
            *self.to_peer.borrow_mut() = Rc::clone(to_peer);
        }
        self.notes.pieces.set(self.notes.pieces.get() + pending as isize);
        if done > 0 {
            self.ended(done);
        }
    }

    /// Takes the job's `pieces` without an event if all of them succeeded and nothing else is
    /// recorded. Returns whether it did.
    pub(crate) fn take_back(&self, pieces: u32) -> bool {
        let notes = &*self.notes;
        let alone = notes.ended.borrow().len() == 1 && self.noted.get() && notes.has_only_ended();
        let all = notes.pieces() == 0 && self.ended.get() == pieces;
        if !(alone && all) || self.failed.get().is_some() {
            return false;
        }
        self.take_pieces();
        self.noted.set(false);
        notes.ended.borrow_mut().clear();
        true
    }

    /// Takes the pieces that have ended, and returns their number.
    fn take_pieces(&self) -> u32 {
        let ended = self.ended.take();
        let to_peer = self.to_peer.borrow();
        to_peer.set(to_peer.get() - ended as usize);
        ended
    }

    /// Records that pieces have ended.
    fn ended(&self, pieces: u32) {
        self.ended.set(self.ended.get() + pieces);
        if !self.noted.replace(true) {
            self.notes.ended.borrow_mut().push(self.job);
        }
    }
}

impl CompletionHandler for PieceCounter {
    unsafe fn on_completion(this: NonNull<Self>, outcome: Result<(), Status>) {
        // SAFETY: the fabric drops its worker before its counters.
        let counter = unsafe { this.as_ref() };
        counter.notes.pieces.set(counter.notes.pieces.get() - 1);
        if let Err(status) = outcome {
            counter.failed.set(counter.failed.get().or(Some(status)));
        }
        counter.ended(1);
    }
}

/// The target of a single callback. It owns what UCX reads during the operation. Its callback frees
/// it, or the poster if no callback follows.
pub(crate) struct OneShotOperation {
    notes: Rc<CallbackNotes>,
    what: CallbackEvent,
}

/// What an operation's callback reports.
pub(crate) enum CallbackEvent {
    /// A message is sent. It counts among the peer's unsent messages until then.
    Sent { frame: Vec<u8>, waiting: Rc<Cell<usize>> },
    /// A job's flush has ended.
    Flushed(JobId),
    /// The operation has ended, and nobody needs an event.
    Ended,
}

impl OneShotOperation {
    /// Allocates the target of an operation's callback.
    pub(crate) fn start(
        what: CallbackEvent,
        notes: &Rc<CallbackNotes>,
    ) -> NonNull<OneShotOperation> {
        if let CallbackEvent::Sent { waiting, .. } = &what {
            waiting.set(waiting.get() + 1);
        }
        notes.others.set(notes.others.get() + 1);
        NonNull::from(Box::leak(Box::new(OneShotOperation { notes: Rc::clone(notes), what })))
    }

    /// Returns the frame that UCX sends.
    ///
    /// # Safety
    /// `this` came from [`start`](OneShotOperation::start) and has not been freed.
    pub(crate) unsafe fn frame<'a>(this: NonNull<OneShotOperation>) -> &'a [u8] {
        // SAFETY: guaranteed by the caller.
        match unsafe { &this.as_ref().what } {
            CallbackEvent::Sent { frame, .. } => frame,
            CallbackEvent::Flushed(_) | CallbackEvent::Ended => &[],
        }
    }

    /// Frees the target: its callback has run, or none will.
    ///
    /// # Safety
    /// `this` came from [`start`](OneShotOperation::start) and has not been freed; nobody uses it
    /// afterwards.
    pub(crate) unsafe fn take_back(this: NonNull<OneShotOperation>) {
        // SAFETY: `start` leaked it, and the caller guarantees that nobody else frees it.
        let once = unsafe { Box::from_raw(this.as_ptr()) };
        once.notes.others.set(once.notes.others.get() - 1);
        if let CallbackEvent::Sent { waiting, .. } = &once.what {
            waiting.set(waiting.get() - 1);
        }
    }
}

impl CompletionHandler for OneShotOperation {
    unsafe fn on_completion(this: NonNull<Self>, outcome: Result<(), Status>) {
        // SAFETY: the poster passed it to this operation, whose only callback this is.
        let once = unsafe { this.as_ref() };
        if let CallbackEvent::Flushed(job) = once.what {
            let result = outcome.map_err(error::piece_error);
            once.notes.flushed.borrow_mut().push(Event::Flushed { job, result });
        }
        // SAFETY: the poster passed it to this operation, whose only callback this is. A message
        // that could not be sent needs no event: its endpoint reports a failure.
        unsafe { OneShotOperation::take_back(this) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ffi::bindings_1_13::UCS_ERR_CANCELED;

    fn counters() -> (Rc<CallbackNotes>, [Rc<PieceCounter>; 3]) {
        let notes = Rc::default();
        let counters = [0, 1, 2].map(|job| PieceCounter::new(JobId::from_number(job), &notes));
        (notes, counters)
    }

    fn moved(notes: &CallbackNotes, counters: &[Rc<PieceCounter>]) -> Vec<(usize, u32, bool)> {
        let mut events = Vec::new();
        notes.take_ended(counters, &mut events);
        let moved = events.into_iter().map(|event| match event {
            Event::Completed { job, pieces, result } => (job.number(), pieces, result.is_ok()),
            other => panic!("{other:?}"),
        });
        moved.collect()
    }

    #[test]
    fn pieces_are_counted_once() {
        let (notes, counters) = counters();
        let (counter, to_peer) = (&counters[1], Rc::default());
        let target = counter.target();
        counter.posted(&to_peer, 3, 1);
        assert_eq!(to_peer.get(), 4);
        assert_eq!((moved(&notes, &counters), notes.pieces()), (vec![(1, 1, true)], 3));
        // SAFETY: three callbacks are due, and the counter is alive.
        unsafe {
            PieceCounter::on_completion(target, Ok(()));
            PieceCounter::on_completion(target, Err(Status(UCS_ERR_CANCELED)));
        }
        assert_eq!((to_peer.get(), moved(&notes, &counters)), (3, vec![(1, 2, false)]));
        // SAFETY: three callbacks are due, and the counter is alive.
        unsafe { PieceCounter::on_completion(target, Ok(())) };
        assert_eq!(moved(&notes, &counters), [(1, 1, true)]);
        assert!(notes.is_quiet() && notes.is_empty() && to_peer.get() == 0);
    }

    #[test]
    fn pieces_may_end_before_their_turn_counts_them() {
        let (notes, counters) = counters();
        let (counter, to_peer) = (&counters[1], Rc::default());
        // SAFETY: the callback of the first of two pieces; the post of the second ended it.
        unsafe { PieceCounter::on_completion(counter.target(), Err(Status(UCS_ERR_CANCELED))) };
        counter.posted(&to_peer, 2, 0);
        assert_eq!((notes.pieces(), to_peer.get()), (1, 2));
        assert_eq!(moved(&notes, &counters), [(1, 1, false)]);
        // SAFETY: the callback of the second piece.
        unsafe { PieceCounter::on_completion(counter.target(), Err(Status(UCS_ERR_CANCELED))) };
        assert_eq!(moved(&notes, &counters), [(1, 1, false)]);
        assert!(notes.is_quiet() && notes.is_empty() && to_peer.get() == 0);
    }

    #[test]
    fn each_peer_has_its_own_pieces() {
        let (notes, counters) = counters();
        let (one, other) = (Rc::default(), Rc::default());
        counters[0].posted(&one, 0, 3);
        counters[1].posted(&other, 0, 5);
        counters[2].posted(&one, 0, 7);
        assert_eq!((one.get(), other.get()), (10, 5));
        moved(&notes, &counters);
        assert_eq!((one.get(), other.get()), (0, 0));
        // A second job with the same number.
        counters[0].posted(&other, 0, 2);
        assert_eq!((one.get(), other.get()), (0, 2));
        assert!(counters[0].take_back(2) && other.get() == 0);
    }

    #[test]
    fn pieces_that_end_during_their_post_need_no_event_if_nothing_else_is_recorded() {
        let (notes, counters) = counters();
        let ([_, counter, other], to_peer) = (&counters, Rc::default());
        let post = |counter: &Rc<PieceCounter>, outcome| {
            counter.posted(&to_peer, 1, 0);
            // SAFETY: the piece's only callback.
            unsafe { PieceCounter::on_completion(counter.target(), outcome) };
        };
        assert!(!counter.take_back(0), "no piece has ended");
        post(counter, Ok(()));
        counter.posted(&to_peer, 0, 1);
        assert!(!counter.take_back(1) && counter.take_back(2) && notes.is_empty());
        counter.posted(&to_peer, 1, 1);
        assert!(!counter.take_back(1), "one has not ended");
        // SAFETY: the piece's only callback.
        unsafe { PieceCounter::on_completion(counter.target(), Ok(())) };
        post(other, Ok(()));
        assert!(!counter.take_back(2), "a piece of another job has ended as well");
        assert_eq!(moved(&notes, &counters), [(1, 2, true), (2, 1, true)]);
        post(counter, Err(Status(UCS_ERR_CANCELED)));
        assert!(!counter.take_back(1), "it has failed");
        assert_eq!(moved(&notes, &counters), [(1, 1, false)]);
        post(counter, Ok(()));
        let from = MessageHeader { worker: 7, endpoint: 3, answers: 9 };
        notes.messages.borrow_mut().push(IncomingMessage { from, message: Vec::new() });
        assert!(!counter.take_back(1), "a message was received as well");
        assert_eq!(
            (moved(&notes, &counters), notes.take_messages().len()),
            (vec![(1, 1, true)], 1)
        );
    }

    #[test]
    fn messages_carry_a_header_and_others_are_ignored() {
        let notes = CallbackNotes::default();
        let from = MessageHeader { worker: 7, endpoint: 3, answers: 9 };
        let frame = from.frame(b"text");
        let long = vec![0; MAX_MESSAGE + 1];
        let receive = |header: &[u8], data: &[u8]| {
            // SAFETY: the notes are alive.
            unsafe { CallbackNotes::on_message(NonNull::from(&notes), Message { header, data }) };
        };
        receive(&frame[..MessageHeader::LEN], &frame[MessageHeader::LEN..]);
        receive(&[], b"text");
        receive(&frame[..MessageHeader::LEN - 1], b"text");
        receive(&frame, b"text");
        receive(&frame[..MessageHeader::LEN], &long);
        assert_eq!(notes.take_messages(), [IncomingMessage { from, message: b"text".to_vec() }]);
    }

    #[test]
    fn a_frame_is_kept_until_it_is_sent() {
        let notes = Rc::new(CallbackNotes::default());
        let waiting = Rc::new(Cell::new(0));
        let told = CallbackEvent::Sent { frame: b"frame".to_vec(), waiting: Rc::clone(&waiting) };
        let once = OneShotOperation::start(told, &notes);
        // SAFETY: it is newly allocated.
        assert_eq!(unsafe { OneShotOperation::frame(once) }, b"frame");
        assert_eq!((waiting.get(), notes.is_quiet()), (1, false));
        // SAFETY: its only callback.
        unsafe { OneShotOperation::on_completion(once, Ok(())) };
        assert_eq!((waiting.get(), notes.is_quiet()), (0, true));
    }
}
